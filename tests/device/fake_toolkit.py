"""Stand-ins for the bindings of NVRTC and nvJitLink, which record their calls and make code from a text."""

from __future__ import annotations

import ctypes
from enum import Enum
from types import SimpleNamespace
from typing import Any

from moe_rt.engine.gpu.libraries import Library
from moe_rt.engine.gpu.nvrtc import Toolkit

COMPILED = """\
ptxas info    : Compiling entry function 'first' for 'sm_90a'
ptxas info    : Function properties for first
    48 bytes stack frame, 8 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 96 bytes cumulative stack size, 400 bytes smem
ptxas info    : Compiling entry function 'second' for 'sm_90a'
ptxas info    : Function properties for second
    24 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 7 registers, used 0 barriers
"""
LINKED = """\
info    : Function properties for 'second':
info    : used 11 registers, 0 barriers, 32 stack, 0 bytes smem
info    : Function properties for 'first':
info    : used 50 registers, 1 barriers, 112 stack, 1424 bytes smem
"""


class Result(Enum):
    NVRTC_SUCCESS = 0
    NVRTC_ERROR_COMPILATION = 6
    NVRTC_ERROR_INVALID_INPUT = 3


class Nvrtc:
    """The bindings of NVRTC. `creates` and `compiles` are what these calls return."""

    nvrtcResult = Result

    def __init__(self, log: str = COMPILED) -> None:
        self.calls: list[Any] = []
        self.log, self.creates, self.compiles = log.encode() + b"\n\0", Result.NVRTC_SUCCESS, Result.NVRTC_SUCCESS

    def nvrtcCreateProgram(self, *given: Any) -> tuple[Any, str]:
        self.calls.append(("create", *given))
        return self.creates, "program"

    def nvrtcCompileProgram(self, program: str, count: int, options: list[bytes]) -> tuple[Any]:
        assert count == len(options)
        self.calls.append(("compile", program, [option.decode() for option in options]))
        return (self.compiles,)

    def nvrtcDestroyProgram(self, program: str) -> None:
        self.calls.append(("destroy", program))

    def nvrtcGetProgramLogSize(self, program: str) -> tuple[Any, int]:
        return Result.NVRTC_SUCCESS, len(self.log)

    def nvrtcGetProgramLog(self, program: str, data: bytes) -> None:
        write(data, self.log)

    def __getattr__(self, name: str) -> Any:
        """Return the getter of a kind of code, or of its size."""
        kind = name.removeprefix("nvrtcGet")
        if kind.endswith("Size"):
            return lambda program: (Result.NVRTC_SUCCESS, len(f"{kind[:-4]} of {program}"))
        return lambda program, data: write(data, f"{kind} of {program}".encode())


def write(data: bytes, text: bytes) -> None:
    """Write into bytes, as NVRTC does, which need room for one more."""
    assert len(data) == len(text) + 1, "bytes of length one are shared"
    ctypes.memmove(data, text, len(text))


class LinkError(Exception):
    pass


class NvJitLink:
    """The bindings of nvJitLink. `fails` is the call that fails."""

    InputType = SimpleNamespace(LTOIR="an LTOIR", CUBIN="a cubin", LIBRARY="a library")
    nvJitLinkError = LinkError

    def __init__(self, log: str = LINKED, major: int = 13) -> None:
        self.calls: list[Any] = []
        self.log, self.major, self.fails = log.encode() + b"\n\0", major, ""

    def version(self) -> tuple[int, int]:
        return self.major, 0

    def _note(self, name: str, *given: Any) -> None:
        self.calls.append((name, *given))
        if name == self.fails:
            raise LinkError(f"{name} fails")

    def create(self, count: int, options: list[str]) -> str:
        assert count == len(options)
        self._note("create", options)
        return "linker"

    def add_data(self, linker: str, kind: str, data: bytes, size: int, name: str) -> None:
        assert size == len(data)
        self._note("add data", linker, kind, data, name)

    def add_file(self, linker: str, kind: str, file: str) -> None:
        self._note("add file", linker, kind, file)

    def complete(self, linker: str) -> None:
        self._note("complete", linker)

    def destroy(self, linker: str) -> None:
        self._note("destroy", linker)

    def __getattr__(self, name: str) -> Any:
        kind = name.removeprefix("get_").removesuffix("_size")
        made = {"linked_cubin": b"linked", "info_log": self.log, "error_log": b"\xff what went wrong\n\0"}[kind]
        if name.endswith("_size"):
            return lambda linker: len(made)
        return lambda linker, data: data.__setitem__(slice(None), made)


def toolkit(library: Library | None = None, **changes: Any) -> Toolkit:
    """Return a toolkit of stand-ins."""
    parts: dict[str, Any] = {"nvrtc": Nvrtc(), "nvjitlink": NvJitLink() if library else None, "include": ("/a", "/b")}
    parts |= {"library": library, "library_file": "/lib/file" if library else "", "identity": ("nvrtc 13",)}
    return Toolkit(**{**parts, **changes})
