"""Score predictions against a table of measurements: `python -m moe_rt.planner.score FILE.csv`."""

from __future__ import annotations

from moe_rt.plan.score import main

if __name__ == "__main__":
    main()
