"""Installs what moe_rt is compared with or plugged into, beside the running environment, for the tests that run it.

    python tools/install_third_party.py

Each tools/third_party/*.txt gets an environment of its own under the running one, which finds torch and everything else
there; so neither can change what the other is tested with. What is there already and has not changed is left alone.
"""

from __future__ import annotations

import sys
from pathlib import Path

from install_toolkits import install


def main() -> None:
    for pins in sorted((Path(__file__).parent / "third_party").glob("*.txt")):
        # Megatron-Core asks for a newer Python than its modules need.
        home = Path(sys.prefix) / "third_party" / pins.stem
        install(pins, home, "--no-deps", "--ignore-requires-python")


if __name__ == "__main__":
    main()
