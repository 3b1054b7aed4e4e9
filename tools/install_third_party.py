"""Install the packages that moe_rt is compared with or plugged into, next to the running environment, for their tests.

    python tools/install_third_party.py

Each tools/third_party/*.txt gets an environment under the running one, in which it finds torch and everything else. So
no package can affect the tests of another. Environments that are up to date are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from install_toolkits import install


def main() -> None:
    for pins in sorted((Path(__file__).parent / "third_party").glob("*.txt")):
        # Megatron-Core declares a newer Python than its modules need.
        home = Path(sys.prefix) / "third_party" / pins.stem
        install(pins, home, "--no-deps", "--ignore-requires-python")


if __name__ == "__main__":
    main()
