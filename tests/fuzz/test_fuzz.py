"""Hostile bytes under AddressSanitizer and UBSan: kept inputs with any compiler, new ones with libFuzzer.

A finding is a file `crash-*` in the test's directory; `replay.cpp` runs it, and once fixed it belongs in corpus/.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from protocol.engine_programs import compile_program

HERE = Path(__file__).parent
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
TARGETS = {  # name: source, corpus, defines, seconds of fuzzing, ten times as many in the sweep
    "routing": ("routing.cpp", "routing", [], 2),
    "peers": ("peers.cpp", "peers", [], 3),
    "peers-gpu": ("peers.cpp", "peers", ["-DMOE_RT_EMULATED_GPU"], 2),
    "peers-network": ("peers.cpp", "peers", ["-DMOE_RT_EMULATED_GPU", "-DMOE_RT_EMULATED_NETWORK"], 2),
}
# libFuzzer's limit reads ru_maxrss, which a process inherits over exec: the peak of the test process.
MEMORY_LIMIT = ["-rss_limit_mb=0", "-malloc_limit_mb=1024"]
CLANGS = ["clang++", *(f"clang++-{version}" for version in range(21, 14, -1))]


def run(program: Path, directory: Path, *args: str | Path) -> None:
    done = subprocess.run([program, *args], cwd=directory, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-8000:]


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(tmp_path: Path, name: str) -> None:
    if name != "routing" and find_clang(tmp_path):
        pytest.skip("the fuzzer runs them before new ones")
    source, corpus, defines, _ = TARGETS[name]
    inputs = sorted((HERE / "corpus" / corpus).iterdir())
    assert len(inputs) > 20
    program = compile_program(HERE / source, *SANITIZERS, *defines, more=(HERE / "replay.cpp",))
    run(program, tmp_path, *inputs)


@pytest.mark.parametrize("name", TARGETS)
def test_new_inputs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    source, corpus, defines, seconds = TARGETS[name]
    seconds *= 10 if pytestconfig.getoption("--sweep") else 1
    monkeypatch.setenv("CXX", require_clang(tmp_path))
    program = compile_program(HERE / source, "-fsanitize=fuzzer", *SANITIZERS, *defines)
    (tmp_path / "found").mkdir()
    options = [f"-max_total_time={seconds}", "-seed=1", "-max_len=400", "-use_value_profile=1", *MEMORY_LIMIT]
    run(program, tmp_path, *options, tmp_path / "found", HERE / "corpus" / corpus)


def find_clang(directory: Path) -> str | None:
    """Return a clang that has libFuzzer and knows _Float16."""
    probe = directory / "probe.cpp"
    probe.write_text('extern "C" int LLVMFuzzerTestOneInput(const char*, decltype(sizeof 0)) { return _Float16(0); }\n')
    for compiler in filter(shutil.which, CLANGS):
        command = [compiler, "-fsanitize=fuzzer,address", str(probe), "-o", str(directory / "probe")]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return compiler
    return None


def require_clang(directory: Path) -> str:
    """Skip the test without such a clang, or fail it if tools are required."""
    if compiler := find_clang(directory):
        return compiler
    reason = "fuzzing needs clang++ 15 or later with libFuzzer on PATH (apt-get install clang-16 libclang-rt-16-dev)"
    if os.environ.get("MOE_RT_REQUIRE_TOOLS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
