"""The just-in-time compiler: its output, its reports, its refusals, and the cached code it trusts."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from device.jit_tools import compile_at_once, copy_sources, require_compiler, write_small_source

from moe_rt.engine.gpu import jit
from moe_rt.engine.gpu.jit import Binary, compile_kernels, compile_ptx, source_dir
from moe_rt.engine.gpu.libraries import NVSHMEM
from moe_rt.engine.gpu.nvrtc import find_toolkit
from moe_rt.errors import CompileError

ARCHS = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    require_compiler()


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_sources(tmp_path_factory.mktemp("sources") / "cuda")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write_small_source(tmp_path / "cuda")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache directory, which does not exist yet."""
    monkeypatch.setenv("MOE_RT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compile_small(root: Path, arch: str = "sm_90a", **defines: str | int) -> Binary:
    return compile_kernels("small.cu", arch, defines, root=root)


def is_elf(binary: Binary) -> bool:
    return binary.cubin.startswith(b"\x7fELF")


def test_resources(programs: Path) -> None:
    binary = compile_kernels("needs.cu", "sm_90a", {}, cache=False, root=programs)
    assert is_elf(binary)
    assert not binary.from_cache
    needs = binary.resources
    assert set(needs) == {"spills", "stacks", "shares", "multiplies_and_adds"}
    assert needs["spills"].registers <= 32, "two blocks of 1024 threads share 65536 registers"
    assert needs["spills"].spill_bytes >= 2 * 4 * 64
    assert needs["stacks"].stack_bytes >= 4 * 256
    assert needs["stacks"].spill_bytes == 0
    assert needs["shares"].shared_bytes == 4 * 77
    for name in ("shares", "multiplies_and_adds"):
        assert (needs[name].spill_bytes, needs[name].stack_bytes) == (0, 0)
        assert needs[name].registers > 0


def test_multiplies_and_adds_are_not_contracted(programs: Path) -> None:
    ptx = compile_ptx("needs.cu", "sm_90a", {}, root=programs)
    assert ".target sm_90a" in ptx
    assert "mul.f32" in ptx or "mul.rn.f32" in ptx
    assert "fma" not in ptx


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_orders(programs: Path, arch: str) -> None:
    ptx = compile_ptx("orders.cu", arch, {}, root=programs)
    assert re.search(r"st\.release\.sys(\.global)?\.[bu]64", ptx)
    assert re.search(r"ld\.acquire\.sys(\.global)?\.[bu]64", ptx)


@pytest.mark.parametrize(
    "arch", ["sm_100a", *(pytest.param(arch, marks=pytest.mark.sweep) for arch in ARCHS if arch != "sm_100a")]
)
def test_linked_with_nvshmem(programs: Path, arch: str) -> None:
    binary = compile_kernels("network.cu", arch, {}, library=NVSHMEM, cache=False, root=programs)
    assert is_elf(binary)
    assert set(binary.resources) == {"talks", "keeps_to_itself"}
    talks, alone = binary.resources["talks"], binary.resources["keeps_to_itself"]
    assert talks.stack_bytes > 0, "the library's functions need a stack"
    assert talks.registers >= alone.registers > 0
    assert (alone.stack_bytes, alone.spill_bytes, alone.shared_bytes) == (0, 0, 8 * 32)


def test_unlinkable_function_is_named(small: Path) -> None:
    copy = Path(__file__).resolve().parents[2] / "cuda" / "gpu" / "nvshmem_prelude.h"
    (small / "gpu" / copy.name).write_text(copy.read_text())
    text = 'extern "C" __device__ void nowhere();\nextern "C" __global__ void small() { nowhere(); }\n'
    (small / "gpu" / "small.cu").write_text(text)
    with pytest.raises(CompileError, match=r"(?s)small\.cu and NVSHMEM for sm_90a.*nowhere"):
        compile_kernels("small.cu", "sm_90a", {}, library=NVSHMEM, cache=False, root=small)


def test_error_holds_the_log_and_what_was_compiled(small: Path) -> None:
    (small / "gpu" / "small.cu").write_text('extern "C" __global__ void small() { missing_name = WIDTH; }\n')
    with pytest.raises(CompileError, match=r"(?s)small\.cu for sm_90a with DEPTH=x WIDTH=3 defined.*missing_name"):
        compile_kernels("small.cu", "sm_90a", {"WIDTH": 3, "DEPTH": "x"}, cache=False, root=small)
    with pytest.raises(CompileError, match=r"(?s)small\.cu for sm_90a with nothing defined.*missing_name"):
        compile_ptx("small.cu", "sm_90a", {}, root=small)


@pytest.mark.parametrize(
    ("source", "arch", "defines", "message"),
    [
        ("none.cu", "sm_90a", {}, "got source 'none.cu'"),
        ("small.cu", "compute_90", {}, "got architecture 'compute_90'"),
        ("small.cu", "sm_11", {}, "sm_11"),
        ("small.cu", "sm_90a", {"A B": 1}, "got 'A B' to define"),
    ],
)
def test_arguments_are_checked(small: Path, source: str, arch: str, defines: dict[str, int], message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compile_kernels(source, arch, defines, cache=False, root=small)


@pytest.mark.parametrize("module", ["cuda.bindings", "cuda.pathfinder"])
def test_missing_compiler_says_what_to_install(small: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    find_toolkit.cache_clear()
    with pytest.raises(CompileError, match=r"pip install '\.\[cuda\]'"):
        compile_kernels("small.cu", "sm_90a", {}, cache=False, root=small)


def test_sources_are_found() -> None:
    assert (source_dir() / "protocol" / "core" / "atomics.h").is_file()
    assert (source_dir() / "gpu" / "nvshmem_prelude.h").is_file()


def test_second_time_comes_from_the_cache(small: Path, directory: Path) -> None:
    cold, warm = compile_small(small), compile_small(small)
    assert (cold.from_cache, warm.from_cache) == (False, True)
    assert (warm.cubin, warm.resources) == (cold.cubin, cold.resources)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    (entry,) = directory.iterdir()  # neither a lock nor a temporary file remains
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert not compile_kernels("small.cu", "sm_90a", {}, cache=False, root=small).from_cache


def test_cache_follows_the_environment(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOE_RT_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    compile_small(small)
    assert list((tmp_path / "xdg" / "moe_rt").iterdir())
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    compile_small(small)
    assert list((tmp_path / "home" / ".cache" / "moe_rt").iterdir())


def change_header(root: Path) -> Binary:
    (root / "protocol" / "value.h").write_text("// A header.\n#define VALUE 2\n")
    return compile_small(root)


def add_file(root: Path) -> Binary:
    (root / "gpu" / "more.h").write_text("// Included by nobody yet.\n")
    return compile_small(root)


@pytest.mark.parametrize(
    "change",
    [
        change_header,
        add_file,
        lambda root: compile_small(root, "sm_80"),
        lambda root: compile_small(root, WIDTH=1),
        lambda root: compile_small(root, WIDTH=2),
    ],
    ids=["header", "new-file", "arch", "define", "value"],
)
def test_every_change_compiles_anew(small: Path, directory: Path, change: Callable[[Path], Binary]) -> None:
    compile_small(small)
    compile_small(small, WIDTH=3)
    assert not change(small).from_cache
    assert change(small).from_cache


def flip_last_byte(entry: Path) -> None:
    data = bytearray(entry.read_bytes())
    data[-1] ^= 1
    entry.write_bytes(data)


def change_registers(entry: Path) -> None:
    header, _, payload = entry.read_bytes().partition(b"\n")
    entry.write_bytes(re.sub(rb'"registers": \d+', b'"registers": 1', header) + b"\n" + payload)


def make_link(entry: Path) -> None:
    target = entry.rename(entry.parent.parent / "elsewhere")
    entry.symlink_to(target)


def make_fifo(entry: Path) -> None:
    entry.unlink()
    os.mkfifo(entry, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        flip_last_byte,
        change_registers,
        make_link,
        make_fifo,
        lambda entry: entry.write_bytes(entry.read_bytes()[:-100]),
        lambda entry: entry.write_bytes(b""),
        lambda entry: entry.write_bytes(b"[]\n"),
        lambda entry: entry.chmod(0o666),
    ],
    ids=["payload", "resources", "link", "fifo", "truncated", "empty", "other-json", "writable"],
)
def test_spoilt_entry_is_recompiled(small: Path, directory: Path, spoil: Callable[[Path], None]) -> None:
    good = compile_small(small)
    (entry,) = directory.iterdir()
    spoil(entry)
    again = compile_small(small)
    assert not again.from_cache
    assert (again.cubin, again.resources) == (good.cubin, good.resources)
    assert compile_small(small).from_cache


def test_entry_of_another_key_is_recompiled(small: Path, directory: Path) -> None:
    compile_small(small)
    (first,) = directory.iterdir()
    compile_small(small, WIDTH=1)
    (second,) = set(directory.iterdir()) - {first}
    second.write_bytes(first.read_bytes())
    assert not compile_small(small, WIDTH=1).from_cache


def as_link(directory: Path) -> None:
    (directory.parent / "real").mkdir(mode=0o700)
    directory.symlink_to(directory.parent / "real")


def as_file(directory: Path) -> None:
    directory.write_text("")


def as_shared(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o770)


def as_foreign(directory: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    directory.mkdir(mode=0o700)
    os.chown(directory, 12345, -1)


@pytest.mark.parametrize("make", [as_link, as_file, as_shared, as_foreign])
def test_untrusted_directory_is_not_used(small: Path, directory: Path, make: Callable[[Path], None]) -> None:
    make(directory)
    with pytest.warns(RuntimeWarning, match="are not kept: .*; set MOE_RT_CACHE to a directory of your own"):
        first = compile_small(small)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        second = compile_small(small)
    assert not first.from_cache
    assert not second.from_cache
    assert not (directory.is_dir() and list(directory.iterdir()))


def test_ranks_that_start_together_compile_once(small: Path, directory: Path) -> None:
    found, _ = compile_at_once(small, 4, MOE_RT_CACHE=str(directory))
    assert sorted(found) == [False, True, True, True]


def test_waiting_for_another_process_ends(small: Path, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_small(small)
    (entry,) = directory.iterdir()
    entry.unlink()
    lock = entry.with_suffix(".lock")
    monkeypatch.setattr(jit, "LOCK_SECONDS", 0.3)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        begin = time.monotonic()
        assert not compile_small(small).from_cache
        assert time.monotonic() - begin >= 0.3
    assert lock.exists(), "the lock was another's"
