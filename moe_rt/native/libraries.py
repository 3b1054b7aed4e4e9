"""The device libraries that kernels are linked with where they reach peers over a network."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from moe_rt.errors import CompileError
from moe_rt.extras import cuda_extra, how_to_install

_VERSION_CODE = re.compile(r"#define \w+_VERSION_CODE (\d+)")


@dataclass(frozen=True)
class Library:
    """A device library and its headers.

    Attributes:
        name: What sentences call it; in small letters what cuda-pathfinder and packages do.
        file: The library, in `lib` beside `include`.
        prelude: The source of cuda/device that is included before all others.
        is_ltoir: Whether it is code for the linker to compile together with the kernels', rather than machine code.
        host_headers: Which headers of the host its own ask for, without a need for what they have.
        since: Its oldest version that has all that is called, where that is told in `<name>.h`.
        arch: The oldest architecture that it has code for.
    """

    name: str
    file: str
    prelude: str
    is_ltoir: bool = False
    host_headers: tuple[str, ...] = ()
    since: tuple[int, int] | None = None
    arch: int = 0

    def package(self, major: int) -> str:
        """Of that CUDA."""
        return f"nvidia-{self.name.lower()}-cu{major}"

    def find(self, include: str | None, major: int) -> Path:
        """The library, where its headers are in `include`, for that CUDA.

        Raises:
            CompileError: it is not there, or too old.
        """
        install = how_to_install(cuda_extra())
        if (
            self.since is not None
        ):  # torch asks for one version alone: pip would refuse a newer one, or take another torch
            install = f"pip install --no-deps '{self.package(major)}>={_shown(self.since)}'"
        if include is None:
            raise CompileError(f"got no headers of {self.name}, expected them; {install}")
        if self.since is not None:
            told = _VERSION_CODE.search((Path(include) / f"{self.name.lower()}.h").read_text())
            version = divmod(int(told[1]) // 100, 100) if told else (0, 0)
            if version < self.since:
                expected = f"{_shown(self.since)} or newer"
                raise CompileError(f"got {self.name} {_shown(version)} in {include}, expected {expected}; {install}")
        found = Path(include).parent / "lib" / self.file
        if not found.is_file():
            raise CompileError(f"got no {found.name} beside {self.name}'s headers in {include}; {install}")
        return found

    def is_for(self, arch: str) -> bool:
        """Whether it has code for such a GPU."""
        return int(arch.removeprefix("sm_").rstrip("af")) >= self.arch

    def require(self, arch: str) -> None:
        """Raises CompileError for a GPU that it has no code for."""
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


def _shown(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
