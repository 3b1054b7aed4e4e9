"""NVRTC and nvJitLink behind two functions, source text to code and code to a linked cubin; needs no GPU or driver."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_rt.errors import CompileError
from moe_rt.extras import cuda_extra, how_to_install

_INSTALL = (
    "compiling CUDA kernels needs NVRTC, cuda-bindings, cuda-pathfinder and the headers of the CUDA runtime and CCCL, "
    f"and over a network nvJitLink and NVSHMEM; {how_to_install(cuda_extra())}"
)
_VERSION_HEADERS = ("cuda_runtime_api.h", "cuda/std/__cccl/version.h", "non_abi/nvshmem_version.h")


@dataclass(frozen=True)
class Toolkit:
    """What was found to compile with.

    Attributes:
        nvrtc: The bindings of NVRTC.
        nvjitlink: The bindings of nvJitLink; None unless NVSHMEM is linked.
        include: Where headers are searched, in order.
        library: NVSHMEM's device library; None unless NVSHMEM is linked.
        identity: Versions and digests; another toolkit with the same identity makes the same code.
    """

    nvrtc: Any
    nvjitlink: Any
    include: tuple[str, ...]
    library: str | None
    identity: tuple[str, ...]


def nvrtc_version() -> tuple[int, int]:
    """Of the compiler that find_toolkit finds, such as (13, 0)."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@functools.cache
def find_toolkit(nvshmem: bool) -> Toolkit:
    """Finds the compiler and its headers: in wheels, Conda environments, or the toolkit under CUDA_HOME.

    Raises:
        CompileError: something is missing; the message says what, and what to install.
    """
    try:
        from cuda.bindings import nvjitlink, nvrtc
        from cuda.pathfinder import find_nvidia_header_directory

        # Libraries are loaded by the first call, and a missing one is noticed only then.
        identity = [f"nvrtc {nvrtc.nvrtcVersion()[1:]}"]
        if nvshmem:
            identity.append(f"nvjitlink {nvjitlink.version()}")
    except (ImportError, RuntimeError, AttributeError) as error:
        raise CompileError(f"got no NVRTC or nvJitLink ({error}); {_INSTALL}") from error
    include = []
    for name in ("cudart", "cccl", *(["nvshmem"] if nvshmem else [])):
        found = find_nvidia_header_directory(name)
        if found is None:
            raise CompileError(f"got no headers of {name}; {_INSTALL}")
        include.append(found)
    library = Path(include[-1]).parent / "lib" / "libnvshmem_device.a" if nvshmem else None
    if library is not None and not library.is_file():
        raise CompileError(f"got no {library.name} beside NVSHMEM's headers in {include[-1]}; {_INSTALL}")
    identity += [_installed(name) for name in _packages(nvrtc_version()[0], nvshmem)]
    files = [Path(folder) / name for folder in include for name in _VERSION_HEADERS]
    files += [library] if library is not None else []
    identity += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    return Toolkit(
        nvrtc, nvjitlink if nvshmem else None, tuple(include), str(library) if library else None, tuple(identity)
    )


def compile_program(
    toolkit: Toolkit, text: str, name: str, options: Sequence[str], *, to_ptx: bool = False
) -> tuple[bytes, str]:
    """Compiles one source.

    Args:
        toolkit: From find_toolkit.
        text: The source.
        name: What diagnostics and line tables call it.
        options: NVRTC's; those of the toolkit's headers are added.
        to_ptx: Whether PTX is asked for rather than machine code.

    Returns:
        The code and the compiler's log.

    Raises:
        CompileError: with the log.
    """
    nvrtc = toolkit.nvrtc
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status.name}")

    def fetch(what: str) -> bytes:
        _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        # NVRTC writes into it, so it must be nobody else's: Python shares bytes of length one, which an empty log has.
        data = b" " * (size + 1)
        getattr(nvrtc, f"nvrtcGet{what}")(program, data)
        return data[:size]

    try:
        every = [option.encode() for option in (*options, *(f"--include-path={path}" for path in toolkit.include))]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(every), every)
        log = fetch("ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC: {status.name}\n{log}")
        return fetch("PTX" if to_ptx else "CUBIN"), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def link_program(toolkit: Toolkit, code: bytes, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Links relocatable machine code with NVSHMEM's device library.

    Returns:
        The cubin and the linker's log, which is empty from nvJitLink 12: it prints what it is asked to tell.

    Raises:
        CompileError: with the log.
    """
    nvjitlink = toolkit.nvjitlink
    told = ["-verbose"] if nvjitlink.version()[0] >= 13 else []
    try:
        linker = nvjitlink.create(len(options) + len(told), [*options, *told])
    except nvjitlink.nvJitLinkError as error:
        raise CompileError(f"nvJitLink: {error}") from error

    def fetch(what: str) -> bytes:
        data = bytearray(getattr(nvjitlink, f"get_{what}_size")(linker))
        getattr(nvjitlink, f"get_{what}")(linker, data)
        return bytes(data)

    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.CUBIN, code, len(code), name)
        nvjitlink.add_file(linker, nvjitlink.InputType.LIBRARY, toolkit.library)
        nvjitlink.complete(linker)
        return fetch("linked_cubin"), fetch("info_log").rstrip(b"\0 \n").decode(errors="replace")
    except nvjitlink.nvJitLinkError as error:
        log = fetch("error_log").rstrip(b"\0 \n").decode(errors="replace")
        raise CompileError(f"nvJitLink: {error}\n{log}") from error
    finally:
        nvjitlink.destroy(linker)


def _packages(major: int, nvshmem: bool) -> list[str]:
    """Of these alone depends what the compiler makes of a source, besides the source and the options."""
    names = ["nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", *(["nvidia-nvjitlink"] if nvshmem else [])]
    named_by_major = "" if major >= 13 else f"-cu{major}"
    return [f"{name}{named_by_major}" for name in names] + ([f"nvidia-nvshmem-cu{major}"] if nvshmem else [])


def _installed(package: str) -> str:
    """A package's version, which is finer than what its library reports; empty for a toolkit that is no package."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""
