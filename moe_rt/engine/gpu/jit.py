"""The just-in-time compiler of the CUDA kernels: compiles sources of cuda/gpu for one architecture.

Nothing is left for the driver to compile. So every rank runs the same instructions, and the resources that they need,
registers and spills included, are known before they run. Multiplies and adds are never contracted, as on CPU ranks.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_rt.engine.gpu.cubins import LOCK_SECONDS, open_cache
from moe_rt.engine.gpu.libraries import Library
from moe_rt.engine.gpu.nvrtc import Toolkit, compile_program, find_toolkit, link_program
from moe_rt.errors import CompileError

_ARCH = re.compile(r"sm_\d{2,3}[af]?")
_MACRO = re.compile(r"[A-Za-z_]\w*")
_PARTS = ("protocol", "gpu")
# CCCL's atomics test whether an address is on a lane's stack, and have extra code for that case. No atomic here is on a
# stack. The CCCL that torch 2.11 to 2.14 pin knows the first name.
_NO_ATOMICS_OF_STACKS = ("_LIBCUDACXX_ATOMIC_UNSAFE_AUTOMATIC_STORAGE", "_CCCL_ATOMIC_UNSAFE_AUTOMATIC_STORAGE")

_ENTRY = re.compile(r"^.*Compiling entry function '([^']+)'.*$", re.MULTILINE)
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_LINKED = re.compile(r"Function properties for '([^']+)':\s*\n.*used (\d+) registers.*?, (\d+) stack")


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel, as the assembler reports them.

    Attributes:
        registers: Per thread; in a linked binary including the library's functions that it calls.
        stack_bytes: Per thread, including the functions that it calls.
        spill_bytes: Stores and loads of spilled registers in the kernel's own code, not in functions that it calls.
        shared_bytes: Static shared memory per block.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Binary:
    """Machine code of one architecture.

    Attributes:
        cubin: Code for the driver to load.
        resources: Resources by kernel name.
        from_cache: True if it was compiled earlier or by another process.
        seconds: Time that it took to compile or load.
    """

    cubin: bytes
    resources: dict[str, Resources]
    from_cache: bool
    seconds: float


def compile_kernels(
    source: str,
    arch: str,
    defines: Mapping[str, str | int],
    *,
    library: Library | None = None,
    cache: bool = True,
    root: Path | None = None,
) -> Binary:
    """Compile a source for exactly one architecture, or load it from the cache on disk.

    Args:
        source: A file of cuda/gpu.
        arch: Architecture, such as "sm_90a".
        defines: Macros and their values.
        library: Library whose headers are included before the source, and which is linked.
        cache: False to neither read nor write the cache.
        root: Directory of `protocol` and `gpu`; source_dir() by default.

    Raises:
        CompileError: with the compiler's log, or with what to install.
    """
    begin = time.perf_counter()
    job = _Job(source, arch, defines, library, root)
    if not cache:
        return Binary(*job.build(), False, time.perf_counter() - begin)
    key = job.key()
    with open_cache() as store:
        if store is None:
            return Binary(*job.build(), False, time.perf_counter() - begin)
        found = store.load(key)
        if found is None:
            with store.lock(key, LOCK_SECONDS):
                found = store.load(key)
                if found is None:
                    cubin, resources = job.build()
                    store.save(key, {name: asdict(needs) for name, needs in resources.items()}, cubin)
                    return Binary(cubin, resources, False, time.perf_counter() - begin)
    facts, cubin = found
    resources = {name: Resources(**needs) for name, needs in facts.items()}
    return Binary(cubin, resources, True, time.perf_counter() - begin)


def compile_ptx(
    source: str,
    arch: str,
    defines: Mapping[str, str | int],
    *,
    library: Library | None = None,
    root: Path | None = None,
) -> str:
    """Return the PTX of a source, for people and tests. Arguments and errors are those of compile_kernels."""
    return _Job(source, arch, defines, library, root).ptx()


def source_dir() -> Path:
    """Return the directory of the CUDA sources: in an installed package, or next to the package in a checkout.

    Raises:
        CompileError: the sources are in neither place.
    """
    package = Path(__file__).resolve().parents[2]
    places = (package / "cuda", package.parent / "cuda")
    for place in places:  # next to an installed package, `cuda` is another project's
        if all((place / part).is_dir() for part in _PARTS):
            return place
    raise CompileError(f"got no CUDA sources, expected them in {places[0]} or {places[1]}")


class _Job:
    """One source with everything that its code depends on."""

    def __init__(
        self, source: str, arch: str, defines: Mapping[str, str | int], library: Library | None, root: Path | None
    ) -> None:
        self._root = source_dir() if root is None else root
        self._path = self._root / "gpu" / source
        self._source, self._arch, self._library = source, arch, library
        self._defines = sorted((name, str(value)) for name, value in defines.items())
        if not self._path.is_file():
            raise CompileError(f"got source {source!r}, expected a file of {self._path.parent}")
        if not _ARCH.fullmatch(arch):
            raise CompileError(f"got architecture {arch!r}, expected one like 'sm_90a'")
        if wrong := [name for name in defines if not _MACRO.fullmatch(name)]:
            raise CompileError(f"got {wrong[0]!r} to define, expected the name of a macro")
        if library is not None:
            library.require(arch)
        self._toolkit: Toolkit = find_toolkit(library)

    def key(self) -> str:
        """Return a digest that differs whenever the code may differ."""
        texts = []
        for part in _PARTS:
            paths = sorted(path for path in (self._root / part).rglob("*") if path.is_file())
            texts += [(path.relative_to(self._root).as_posix(), _sha256(path)) for path in paths]
        options = [self._options(), self._link_options() if self._library else []]
        everything = [texts, self._source, self._arch, self._defines, options, self._toolkit.identity]
        return hashlib.sha256(json.dumps(everything).encode()).hexdigest()

    def build(self) -> tuple[bytes, dict[str, Resources]]:
        try:
            target = f"--gpu-architecture={self._arch}"
            if self._library is not None and self._library.is_ltoir:
                code, _ = self._compile([target, *self._options(), "--dlink-time-opt"], to="LTOIR")
                code, linked = link_program(self._toolkit, code, self._source, self._link_options())
                return code, _report(linked)
            code, log = self._compile([target, *self._options()])
            resources = _report(log)
            if self._library is not None:
                code, linked = link_program(self._toolkit, code, self._source, self._link_options())
                if linked:
                    resources = _linked_report(resources, linked)
        except CompileError as error:
            raise self._explained(error) from error
        return code, resources

    def ptx(self) -> str:
        try:
            arch = self._arch.replace("sm_", "compute_")
            code, _ = self._compile([f"--gpu-architecture={arch}", *self._options()], to="PTX")
        except CompileError as error:
            raise self._explained(error) from error
        return code.rstrip(b"\0").decode()

    def _compile(self, options: list[str], *, to: str = "CUBIN") -> tuple[bytes, str]:
        options = [*options, f"--include-path={self._path.parent}"]
        return compile_program(self._toolkit, self._path.read_text(), str(self._path), options, to=to)

    def _options(self) -> list[str]:
        """Return the compiler's options, except for the architecture and paths, which change no code."""
        options = ["--std=c++20", "--fmad=false", "--generate-line-info", "--ptxas-options=--verbose"]
        # NVRTC 13.0 treats a lambda inside a device function as a host function, and refuses to call it. NVSHMEM's
        # older headers omit `__device__` in places.
        options.append("--device-as-default-execution-space")
        options += [f"--define-macro={name}" for name in _NO_ATOMICS_OF_STACKS]
        options += [f"--define-macro={name}={value}" for name, value in self._defines]
        if self._library is not None:
            # NVSHMEM's older headers use volatile in ways that C++20 deprecates.
            options += ["--relocatable-device-code=true", "--diag-suppress=3012,3013"]
            options.append(f"--pre-include={self._library.prelude}")
        return options

    def _link_options(self) -> list[str]:
        compiling = ["-lto", "-fma=0", "-Xptxas=--verbose"] if self._library and self._library.is_ltoir else []
        return [f"-arch={self._arch}", "-lineinfo", *compiling]

    def _explained(self, error: CompileError) -> CompileError:
        defines = " ".join(f"{name}={value}" for name, value in self._defines) or "nothing"
        linked = f" and {self._library.name}" if self._library else ""
        return CompileError(f"cannot compile {self._source}{linked} for {self._arch} with {defines} defined: {error}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _report(log: str) -> dict[str, Resources]:
    """Parse the assembler's verbose report, which has one section per kernel."""
    _, *parts = _ENTRY.split(log)
    resources = {}
    for name, section in zip(parts[::2], parts[1::2], strict=True):
        frame = re.search(
            rf"Function properties for {re.escape(name)}\s*\n"
            r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads",
            section,
        )
        used = _USED.search(section)
        if frame is None or used is None:
            raise CompileError(f"got no report on the resources of {name} in the compiler's log:\n{log}")
        stack, shared = _STACK.search(used[2]), _SHARED.search(used[2])
        resources[name] = Resources(
            registers=int(used[1]),
            stack_bytes=max(int(frame[1]), int(stack[1]) if stack else 0),
            spill_bytes=int(frame[2]) + int(frame[3]),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    if not resources:
        raise CompileError(f"got no kernel in the compiler's log, expected at least one:\n{log}")
    return resources


def _linked_report(compiled: dict[str, Resources], log: str) -> dict[str, Resources]:
    """Increase registers and stack to the linker's figures, which cover the kernel and all that it calls.

    The linker's shared memory includes what the system reserves, so the compiler's figure is kept.
    """
    linked = {name: (int(registers), int(stack)) for name, registers, stack in _LINKED.findall(log)}
    if missing := compiled.keys() - linked.keys():
        raise CompileError(
            f"got no report on the resources of {', '.join(sorted(missing))} in the linker's log:\n{log}"
        )
    return {
        name: Resources(linked[name][0], linked[name][1], needs.spill_bytes, needs.shared_bytes)
        for name, needs in compiled.items()
    }
