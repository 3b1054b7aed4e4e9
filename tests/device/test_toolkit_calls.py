"""Calls that reach NVRTC and nvJitLink: options in order, files, logs, and what is destroyed after a failure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from device.fake_toolkit import COMPILED, LINKED, NvJitLink, Nvrtc, Result, toolkit
from device.jit_tools import write_small_source

from moe_rt.engine.gpu import cubins, jit, nvrtc
from moe_rt.engine.gpu.jit import Binary, Resources, compile_kernels, compile_ptx
from moe_rt.engine.gpu.libraries import NCCL, NVSHMEM, Library
from moe_rt.engine.gpu.nvrtc import Toolkit, compile_program, link_program
from moe_rt.errors import CompileError

ALWAYS = [
    "--std=c++20",
    "--fmad=false",
    "--generate-line-info",
    "--ptxas-options=--verbose",
    "--device-as-default-execution-space",
    "--define-macro=_LIBCUDACXX_ATOMIC_UNSAFE_AUTOMATIC_STORAGE",
    "--define-macro=_CCCL_ATOMIC_UNSAFE_AUTOMATIC_STORAGE",
    "--define-macro=DEPTH=x",
    "--define-macro=WIDTH=3",
]
RELOCATABLE = ["--relocatable-device-code=true", "--diag-suppress=3012,3013"]
NEEDS = {"first": Resources(40, 96, 24, 400), "second": Resources(7, 24, 0, 0)}
WITH_LIBRARY = {"first": Resources(50, 112, 24, 400), "second": Resources(11, 32, 0, 0)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_small_source(tmp_path / "cuda")


def compiled(
    monkeypatch: pytest.MonkeyPatch, root: Path, made: Toolkit, how: Any = compile_kernels, **more: Any
) -> Any:
    monkeypatch.setattr(jit, "find_toolkit", lambda library: made)
    return how("small.cu", "sm_90a", {"WIDTH": 3, "DEPTH": "x"}, library=made.library, root=root, **more)


def created(made: Toolkit) -> tuple[Any, ...]:
    return made.nvrtc.calls[0]


def options(made: Toolkit) -> list[str]:
    (found,) = (call[2] for call in made.nvrtc.calls if call[0] == "compile")
    return found


def test_a_program_is_compiled_for_one_architecture(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    made = toolkit()
    binary = compiled(monkeypatch, root, made, cache=False)
    file = root / "gpu/small.cu"
    assert created(made) == ("create", file.read_text().encode(), str(file).encode(), 0, [], [])
    paths = [f"--include-path={path}" for path in (file.parent, "/a", "/b")]
    assert options(made) == ["--gpu-architecture=sm_90a", *ALWAYS, *paths]
    assert made.nvrtc.calls[2:] == [("destroy", "program")]
    assert (binary.cubin, binary.resources, binary.from_cache) == (b"CUBIN of program", NEEDS, False)
    assert 0 <= binary.seconds < 600


def test_ptx_is_compiled_with_the_same_options(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    made = toolkit()
    assert compiled(monkeypatch, root, made, compile_ptx) == "PTX of program"
    assert options(made)[0].startswith("--gpu-architecture=")
    assert options(made)[1:-3] == ALWAYS


def test_machine_code_is_linked_with_a_library_of_machine_code(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    made = toolkit(NVSHMEM)
    binary = compiled(monkeypatch, root, made, cache=False)
    assert options(made)[1:-3] == [*ALWAYS, *RELOCATABLE, "--pre-include=nvshmem_prelude.h"]
    assert created(made)[3:] == (0, [], []), "it needs no header of the host"
    assert made.nvjitlink.calls == [
        ("create", ["-arch=sm_90a", "-lineinfo", "-verbose"]),
        ("add data", "linker", "a cubin", b"CUBIN of program", "small.cu"),
        ("add file", "linker", "a library", "/lib/file"),
        ("complete", "linker"),
        ("destroy", "linker"),
    ]
    assert (binary.cubin, binary.resources) == (b"linked", WITH_LIBRARY)


def test_the_linker_compiles_a_library_of_ltoir(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    made = toolkit(NCCL, nvjitlink=NvJitLink(COMPILED))
    binary = compiled(monkeypatch, root, made, cache=False)
    assert options(made)[1:-3] == [*ALWAYS, *RELOCATABLE, "--pre-include=gin_prelude.h", "--dlink-time-opt"]
    empty = [header.encode() for header in NCCL.host_headers]
    assert created(made)[3:] == (7, [b""] * 7, empty)
    assert made.nvjitlink.calls == [
        ("create", ["-arch=sm_90a", "-lineinfo", "-lto", "-fma=0", "-Xptxas=--verbose", "-verbose"]),
        ("add data", "linker", "an LTOIR", b"LTOIR of program", "small.cu"),
        ("add file", "linker", "an LTOIR", "/lib/file"),
        ("complete", "linker"),
        ("destroy", "linker"),
    ]
    assert (binary.cubin, binary.resources) == (b"linked", NEEDS)


@pytest.mark.parametrize(("major", "verbose"), [(12, []), (13, ["-verbose"]), (14, ["-verbose"])])
def test_only_newer_linkers_are_asked_for_a_log(major: int, verbose: list[str]) -> None:
    """nvJitLink 12 would print it."""
    made = toolkit(NVSHMEM, nvjitlink=NvJitLink(major=major))
    assert link_program(made, b"code", "name", ["-one"]) == (b"linked", LINKED.rstrip())
    assert made.nvjitlink.calls[0] == ("create", ["-one", *verbose])


def test_without_the_linkers_log_the_compilers_figures_are_kept(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    made = toolkit(NVSHMEM, nvjitlink=NvJitLink("", major=12))
    assert compiled(monkeypatch, root, made, cache=False).resources == NEEDS


def test_a_kernel_that_the_linker_does_not_name_is_an_error(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    made = toolkit(NVSHMEM, nvjitlink=NvJitLink("nothing\n" + LINKED.partition("info    : Function properties")[0]))
    with pytest.raises(CompileError, match=r"(?s)got no report on the resources of first, second in the linker's log"):
        compiled(monkeypatch, root, made, cache=False)


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("", "got no kernel in the compiler's log, expected at least one"),
        (COMPILED.replace("Used 7 registers", "?"), "got no report on the resources of second in the compiler's log"),
        (COMPILED.replace("for second", "for third"), "got no report on the resources of second"),
        (COMPILED.replace("48 bytes stack frame", "?"), "got no report on the resources of first"),
    ],
)
def test_a_log_without_figures_is_an_error(monkeypatch: pytest.MonkeyPatch, root: Path, log: str, says: str) -> None:
    with pytest.raises(CompileError, match=f"cannot compile small.cu for sm_90a with DEPTH=x WIDTH=3 defined: {says}"):
        compiled(monkeypatch, root, toolkit(nvrtc=Nvrtc(log)), cache=False)


@pytest.mark.parametrize(("cumulative", "stack"), [(0, 48), (48, 48), (49, 49)])
def test_the_stack_includes_functions_that_are_called(
    monkeypatch: pytest.MonkeyPatch, root: Path, cumulative: int, stack: int
) -> None:
    made = toolkit(nvrtc=Nvrtc(COMPILED.replace("96 bytes cumulative", f"{cumulative} bytes cumulative")))
    assert compiled(monkeypatch, root, made, cache=False).resources["first"].stack_bytes == stack


def test_a_program_that_cannot_be_made_is_an_error() -> None:
    made = toolkit()
    made.nvrtc.creates = Result.NVRTC_ERROR_INVALID_INPUT
    with pytest.raises(CompileError, match="NVRTC: NVRTC_ERROR_INVALID_INPUT"):
        compile_program(made, "text", "name", [])
    assert [call[0] for call in made.nvrtc.calls] == ["create"]


def test_an_error_of_the_compiler_holds_its_log_and_the_program_is_destroyed() -> None:
    made = toolkit()
    made.nvrtc.log, made.nvrtc.compiles = b"\xff is no name\n\0", Result.NVRTC_ERROR_COMPILATION
    with pytest.raises(CompileError) as raised:
        compile_program(made, "text", "name", ["-x"])
    assert raised.value.args[0] == "NVRTC: NVRTC_ERROR_COMPILATION\n\ufffd is no name"
    assert [call[0] for call in made.nvrtc.calls] == ["create", "compile", "destroy"]


@pytest.mark.parametrize("fails", ["add data", "add file", "complete"])
def test_an_error_of_the_linker_holds_its_log_and_the_linker_is_destroyed(fails: str) -> None:
    made = toolkit(NVSHMEM)
    made.nvjitlink.fails = fails
    with pytest.raises(CompileError) as raised:
        link_program(made, b"code", "name", [])
    assert raised.value.args[0] == f"nvJitLink: {fails} fails\n\ufffd what went wrong"
    assert made.nvjitlink.calls[-1] == ("destroy", "linker")


def test_a_linker_that_cannot_be_made_is_an_error() -> None:
    made = toolkit(NVSHMEM)
    made.nvjitlink.fails = "create"
    with pytest.raises(CompileError) as raised:
        link_program(made, b"code", "name", [])
    assert raised.value.args[0] == "nvJitLink: create fails"
    assert len(made.nvjitlink.calls) == 1


@pytest.fixture
def cached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MOE_RT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_an_entry_is_found_with_all_that_was_saved(monkeypatch: pytest.MonkeyPatch, root: Path, cached: Path) -> None:
    made = toolkit(NVSHMEM)
    first, second = (compiled(monkeypatch, root, made) for _ in range(2))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert (first.cubin, first.resources) == (second.cubin, second.resources) == (b"linked", WITH_LIBRARY)
    assert all(isinstance(binary, Binary) and 0 <= binary.seconds < 600 for binary in (first, second))
    assert [call[0] for call in made.nvrtc.calls].count("compile") == 1, "the second is not compiled"
    assert sorted(path.suffix for path in cached.iterdir()) == [".cubin"]
    assert not compiled(monkeypatch, root, made, cache=False).from_cache


def test_without_a_cache_each_call_compiles(monkeypatch: pytest.MonkeyPatch, root: Path, cached: Path) -> None:
    monkeypatch.setattr(cubins, "_warn", lambda message: None)
    cached.touch()  # a file in its place
    made = toolkit()
    for count in (1, 2):
        binary = compiled(monkeypatch, root, made)
        assert (binary.cubin, binary.resources, binary.from_cache) == (b"CUBIN of program", NEEDS, False)
        assert 0 <= binary.seconds < 600
        assert [call[0] for call in made.nvrtc.calls].count("compile") == count


def test_what_another_rank_saved_meanwhile_is_taken(monkeypatch: pytest.MonkeyPatch, root: Path, cached: Path) -> None:
    """A rank that has waited for the lock looks for the entry again."""
    made, lock = toolkit(), jit.open_cache
    monkeypatch.setattr(jit, "find_toolkit", lambda library: made)
    inside = []

    class Locked:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def lock(self, key: str, seconds: float) -> Any:
            if not inside:
                inside.append((len(key), seconds))
                compile_kernels("small.cu", "sm_90a", {}, root=root)
            return self.store.lock(key, seconds)

    class Opened:
        def __enter__(self) -> Locked:
            self.opened = lock()
            return Locked(self.opened.__enter__())

        def __exit__(self, *error: object) -> None:
            self.opened.__exit__(None, None, None)

    monkeypatch.setattr(jit, "open_cache", Opened)
    assert compile_kernels("small.cu", "sm_90a", {}, root=root).from_cache
    assert inside == [(64, 120.0)]


def keys(monkeypatch: pytest.MonkeyPatch, root: Path, library: Library | None) -> list[str]:
    """Return the keys of one program, and of the same with one thing changed."""

    def key(made: Toolkit, arch: str = "sm_90a", defines: Any = None, source: str = "small.cu") -> str:
        monkeypatch.setattr(jit, "find_toolkit", lambda library: made)
        return jit._Job(source, arch, defines or {}, made.library, root).key()

    made = toolkit(library)
    (root / "gpu/other.cu").write_text((root / "gpu/small.cu").read_text())
    found = [key(made), key(made, "sm_100a"), key(made, defines={"A": 1}), key(made, defines={"A": 2})]
    found += [key(made, source="other.cu"), key(replace(made, identity=("nvrtc 13.1",)))]
    assert key(made, defines={"A": 1, "B": 2}) == key(made, defines={"B": "2", "A": "1"})
    assert key(replace(made, include=("/elsewhere",))) == key(made), "places change no code"
    for path in ("protocol/value.h", "gpu/more.h", "gpu/deep/most.h"):
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(f"// changed {library}")
        found.append(key(made))
    (root / "README").write_text("no source")
    assert key(made) == found[-1]
    return found


def test_all_that_code_depends_on_is_in_its_key(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    plain, linked = keys(monkeypatch, root, None), keys(monkeypatch, root, NVSHMEM)
    assert len(set(plain)) == len(plain)
    assert len(set(linked)) == len(linked)
    assert not set(plain) & set(linked)


def test_options_of_the_linker_are_in_the_key(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    made = toolkit(NVSHMEM)
    monkeypatch.setattr(jit, "find_toolkit", lambda library: made)
    job = jit._Job("small.cu", "sm_90a", {}, NVSHMEM, root)
    key = job.key()
    monkeypatch.setattr(job, "_link_options", lambda: ["-another"])
    assert job.key() != key


def test_a_checkout_and_a_package_are_told_from_another_project(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Next to an installed package, a folder `cuda` may be another project's."""
    module = tmp_path / "site/moe_rt/engine/gpu/jit.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(jit, "__file__", str(module))
    inside, beside = tmp_path / "site/moe_rt/cuda", tmp_path / "site/cuda"
    (beside / "gpu").mkdir(parents=True)
    with pytest.raises(CompileError) as raised:
        jit.source_dir()
    assert raised.value.args[0] == f"got no CUDA sources, expected them in {inside} or {beside}"
    (beside / "protocol").mkdir()
    assert jit.source_dir() == beside
    for part in ("protocol", "gpu"):
        (inside / part).mkdir(parents=True)
    assert jit.source_dir() == inside


@pytest.mark.parametrize(
    ("major", "library", "names"),
    [
        (12, None, ["nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cuda-cccl-cu12"]),
        (13, None, ["nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl"]),
        (14, NCCL, ["nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-cccl", "nvidia-nvjitlink",
                    "nvidia-nccl-cu14"]),
        (12, NVSHMEM, ["nvidia-cuda-nvrtc-cu12", "nvidia-cuda-runtime-cu12", "nvidia-cuda-cccl-cu12",
                       "nvidia-nvjitlink-cu12", "nvidia-nvshmem-cu12"]),
    ],
)  # fmt: skip
def test_packages_that_decide_about_code(major: int, library: Library | None, names: list[str]) -> None:
    assert nvrtc._packages(major, library) == names
    assert nvrtc._installed("moe_rt_is_no_such_package") == ""
    assert nvrtc._installed("torch").startswith("torch 2.")


def test_a_library_is_loaded_from_a_wheel_if_the_bindings_do_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(nvrtc, "load_library", loaded.append)

    def version(after: int = 1) -> str:
        if len(loaded) < after:
            raise RuntimeError("no library")
        return "13.0"

    assert nvrtc._loaded("nvrtc", lambda: version(0)) == "13.0"
    assert loaded == []
    assert nvrtc._loaded("nvrtc", version) == "13.0"
    assert loaded == ["nvrtc"]
    with pytest.raises(RuntimeError, match="no library"):
        nvrtc._loaded("nvrtc", lambda: version(9))
    assert loaded == ["nvrtc", "nvrtc"]
