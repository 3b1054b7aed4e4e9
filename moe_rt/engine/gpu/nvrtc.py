"""NVRTC and nvJitLink: compiles source text to code and links code to a cubin. Needs no GPU or driver."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from moe_rt.engine.gpu.libraries import Library, find_headers, load_library
from moe_rt.errors import CompileError
from moe_rt.extras import cuda_extra, how_to_install

_INSTALL = (
    "compiling CUDA kernels needs NVRTC, cuda-bindings, cuda-pathfinder and the headers of the CUDA runtime and CCCL, "
    f"and over a network nvJitLink and NVSHMEM; {how_to_install(cuda_extra())}"
)
_VERSION_HEADERS = ("cuda_runtime_api.h", "cuda/std/__cccl/version.h", "non_abi/nvshmem_version.h", "nccl.h")


@dataclass(frozen=True)
class Toolkit:
    """Compiler, linker and headers to compile with.

    Attributes:
        nvrtc: The bindings of NVRTC.
        nvjitlink: The bindings of nvJitLink; None unless a library is linked.
        include: Directories that headers are searched in, in order.
        library: Library that is linked, if any.
        library_file: Path of that library.
        identity: Versions and digests; another toolkit with the same identity makes the same code.
    """

    nvrtc: Any
    nvjitlink: Any
    include: tuple[str, ...]
    library: Library | None
    library_file: str
    identity: tuple[str, ...]


def nvrtc_version() -> tuple[int, int]:
    """Version of the compiler that find_toolkit finds, such as (13, 0)."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@functools.cache
def find_toolkit(library: Library | None = None) -> Toolkit:
    """Find the compiler and its headers in wheels, Conda environments, or the toolkit under CUDA_HOME.

    Args:
        library: Library to link.

    Raises:
        CompileError: something is missing; the message says what, and what to install.
    """
    try:
        from cuda.bindings import nvjitlink, nvrtc

        identity = [f"nvrtc {_loaded('nvrtc', nvrtc.nvrtcVersion)[1:]}"]
        if library is not None:
            identity.append(f"nvjitlink {_loaded('nvJitLink', nvjitlink.version)}")
        headers = {name: find_headers(name) for name in ("cudart", "cccl")}
    except (ImportError, RuntimeError, AttributeError) as error:
        raise CompileError(f"got no NVRTC or nvJitLink ({error}); {_INSTALL}") from error
    if absent := [name for name, found in headers.items() if found is None]:
        raise CompileError(f"got no headers of {' and '.join(absent)}; {_INSTALL}")
    include = [str(found) for found in headers.values()]
    files, major = [], nvrtc_version()[0]
    if library is not None:
        own = find_headers(library.name.lower())
        files.append(library.find(own, major))
        include.append(str(own))
    library_file = str(files[0]) if files else ""
    identity += [_installed(name) for name in _packages(major, library)]
    files = [*(Path(folder) / name for folder in include for name in _VERSION_HEADERS), *files]
    identity += [hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()]
    return Toolkit(
        nvrtc,
        nvjitlink if library is not None else None,
        tuple(include),
        library,
        library_file,
        tuple(identity),
    )


def _loaded(name: str, version: Callable[[], Any]) -> Any:
    """Return the version of a library. The bindings load it at the first call, and a missing one is noticed only then.

    Raises:
        RuntimeError: the library is neither where cuda-pathfinder looks nor in a wheel.
    """
    try:
        return version()
    except RuntimeError:
        load_library(name)
        return version()


def compile_program(
    toolkit: Toolkit, text: str, name: str, options: Sequence[str], *, to: str = "CUBIN"
) -> tuple[bytes, str]:
    """Compile one source.

    Args:
        toolkit: Result of find_toolkit.
        text: The source.
        name: Name of the source in diagnostics and line tables.
        options: Options of NVRTC; those for the toolkit's headers are added.
        to: Kind of code: "CUBIN", "PTX", or "LTOIR" for the linker to compile, which also needs its option.

    Returns:
        The code and the compiler's log.

    Raises:
        CompileError: with the log.
    """
    nvrtc = toolkit.nvrtc
    empty = [header.encode() for header in (toolkit.library.host_headers if toolkit.library else ())]
    status, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(empty), [b""] * len(empty), empty)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status.name}")

    def fetch(what: str) -> bytes:
        _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
        # NVRTC writes into it, so it must not be shared: Python shares bytes of length one, the size of an empty log.
        data = b" " * (size + 1)
        getattr(nvrtc, f"nvrtcGet{what}")(program, data)
        return data[:size]

    try:
        every = [option.encode() for option in (*options, *(f"--include-path={path}" for path in toolkit.include))]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(every), every)
        log = fetch("ProgramLog").rstrip(b"\0 \n").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"NVRTC: {status.name}\n{log}")
        return fetch(to), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def link_program(toolkit: Toolkit, code: bytes, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Link relocatable code with the toolkit's device library: both are machine code, or the linker compiles both.

    Returns:
        The cubin and the linker's log. The log of nvJitLink 12 is empty: asked for one, it prints it instead.

    Raises:
        CompileError: with the log.
    """
    nvjitlink, library = toolkit.nvjitlink, toolkit.library
    assert library is not None
    kinds = nvjitlink.InputType
    verbose = ["-verbose"] if nvjitlink.version()[0] >= 13 else []
    try:
        linker = nvjitlink.create(len(options) + len(verbose), [*options, *verbose])
    except nvjitlink.nvJitLinkError as error:
        raise CompileError(f"nvJitLink: {error}") from error

    def fetch(what: str) -> bytes:
        data = bytearray(getattr(nvjitlink, f"get_{what}_size")(linker))
        getattr(nvjitlink, f"get_{what}")(linker, data)
        return bytes(data)

    try:
        nvjitlink.add_data(linker, kinds.LTOIR if library.is_ltoir else kinds.CUBIN, code, len(code), name)
        nvjitlink.add_file(linker, kinds.LTOIR if library.is_ltoir else kinds.LIBRARY, toolkit.library_file)
        nvjitlink.complete(linker)
        return fetch("linked_cubin"), fetch("info_log").rstrip(b"\0 \n").decode(errors="replace")
    except nvjitlink.nvJitLinkError as error:
        log = fetch("error_log").rstrip(b"\0 \n").decode(errors="replace")
        raise CompileError(f"nvJitLink: {error}\n{log}") from error
    finally:
        nvjitlink.destroy(linker)


def _packages(major: int, library: Library | None) -> list[str]:
    """Packages that, with the source and the options, determine the compiler's output."""
    names = ["nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", *(["nvidia-nvjitlink"] if library else [])]
    named_by_major = "" if major >= 13 else f"-cu{major}"
    return [f"{name}{named_by_major}" for name in names] + ([library.package(major)] if library else [])


def _installed(package: str) -> str:
    """Return a package's version, which is finer than its library's; "" for a toolkit that is no package."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return ""
