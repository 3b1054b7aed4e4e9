"""Installs the server that moe_rt is tested in, beside the running environment, for the tests of `make serve-test`.

    python tools/install_serving.py

It asks for other releases of many packages than the rest of the project, so it gets them all in an environment of its
own, under the running one, where only moe_rt and the test tools come from. What is there and has not changed stays.
"""

from __future__ import annotations

import sys
from pathlib import Path

from install_toolkits import ROOT, install

# What vLLM asks for, and what fails to import in it: builds for CUDA, beside a torch that is not.
BUILT_FOR_CUDA = ("torchaudio", "torchcodec", "torchvision")


def main() -> None:
    for pins in sorted((Path(__file__).parent / "serving").glob("*.txt")):
        home = Path(sys.prefix) / "serving" / pins.stem
        install(pins, home, "--constraint", str(ROOT / "constraints.txt"), without=BUILT_FOR_CUDA)


if __name__ == "__main__":
    main()
