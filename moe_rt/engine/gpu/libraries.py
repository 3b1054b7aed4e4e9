"""Device libraries that kernels are linked with to reach peers over a network."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from moe_rt.errors import CompileError
from moe_rt.extras import cuda_extra, how_to_install

# Header by which a directory is recognised, and where wheels have it under the package `nvidia`.
_IN_WHEELS = {
    "cudart": ("cuda_runtime_api.h", ("cu13/include", "cuda_runtime/include")),
    "cccl": ("cuda/std/__cccl/version.h", ("cu13/include/cccl", "cuda_cccl/include")),
    "nvshmem": ("non_abi/nvshmem_version.h", ("nvshmem/include",)),
    "nccl": ("nccl.h", ("nccl/include",)),
}
_VERSION_CODE = re.compile(r"#define \w+_VERSION_CODE (\d+)")


@dataclass(frozen=True)
class Library:
    """A device library and its headers.

    Attributes:
        name: Name in messages; in lower case, the name that cuda-pathfinder and packages use.
        file: File name of the library, in `lib` next to `include`.
        prelude: The source of cuda/gpu that is included before all others.
        is_ltoir: True for LTO-IR, which the linker compiles together with the kernels; False for machine code.
        host_headers: Headers of the host that the library's headers include but do not need.
        since: Oldest version that has every function called here; `<name>.h` states the installed one. None: any.
        arch: Oldest architecture that it has code for.
    """

    name: str
    file: str
    prelude: str
    is_ltoir: bool = False
    host_headers: tuple[str, ...] = ()
    since: tuple[int, int] | None = None
    arch: int = 0

    def package(self, major: int) -> str:
        """Name of the library's package for a CUDA major version."""
        return f"nvidia-{self.name.lower()}-cu{major}"

    def find(self, include: str | None, major: int) -> Path:
        """Return the library's path, given its headers in `include` and the CUDA major version.

        Raises:
            CompileError: it is missing, or too old.
        """
        install = how_to_install(cuda_extra())
        if self.since is not None:  # torch pins one version: pip would refuse a newer one, or replace torch
            install = f"pip install --no-deps '{self.package(major)}>={_shown(self.since)}'"
        if include is None:
            raise CompileError(f"got no headers of {self.name}, expected them; {install}")
        if self.since is not None:
            header_version = _VERSION_CODE.search((Path(include) / f"{self.name.lower()}.h").read_text())
            version = divmod(int(header_version[1]) // 100, 100) if header_version else (0, 0)
            if version < self.since:
                expected = f"{_shown(self.since)} or newer"
                raise CompileError(f"got {self.name} {_shown(version)} in {include}, expected {expected}; {install}")
        found = Path(include).parent / "lib" / self.file
        if not found.is_file():
            raise CompileError(f"got no {found.name} next to {self.name}'s headers in {include}; {install}")
        return found

    def is_for(self, arch: str) -> bool:
        """True if the library has code for this architecture."""
        return int(arch.removeprefix("sm_").rstrip("af")) >= self.arch

    def require(self, arch: str) -> None:
        """Raise CompileError for an architecture that it has no code for."""
        if not self.is_for(arch):
            expected = f"sm_{self.arch} or newer: {self.name}'s device library has no code for older GPUs"
            raise CompileError(f"got architecture {arch!r}, expected {expected}")


NVSHMEM = Library("NVSHMEM", "libnvshmem_device.a", "nvshmem_prelude.h")
NCCL = Library(
    "NCCL",
    "libnccl_device.ltoir",
    "gin_prelude.h",
    is_ltoir=True,
    host_headers=("algorithm", "cassert", "limits.h", "stdbool.h", "stdint.h", "stdlib.h", "type_traits"),
    since=(2, 32),
    arch=90,
)


def find_headers(name: str) -> str | None:
    """Return a directory of headers: of a wheel, a Conda environment, the toolkit under CUDA_HOME or the system's.

    cuda-pathfinder looks for wheels in site-packages only, so wheels that are elsewhere on sys.path (`pip install
    --target`, PEX, `uv run --with`) are found here.
    """
    from cuda.pathfinder import find_nvidia_header_directory

    if found := find_nvidia_header_directory(name):
        return str(found)
    header, folders = _IN_WHEELS[name]
    candidates = (root / folder for root in _wheels() for folder in folders)
    return next((str(folder) for folder in candidates if (folder / header).is_file()), None)


def load_library(name: str) -> None:
    """Load a library such as "nvrtc" from a wheel anywhere on sys.path, if one is there, so that cuda-pathfinder finds
    it loaded."""
    for root in _wheels():
        for file in sorted(root.glob(f"*/lib/lib{name}.so.[0-9]*"), reverse=True):
            ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)
            return


def _wheels() -> list[Path]:
    """Return the folders of the namespace package `nvidia`, in the order of sys.path."""
    package = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in (package and package.submodule_search_locations) or ()]


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
