"""Every rank's error names the rank that failed first, and the reason."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import CPU_HEAPS
from faults import cases_first_failure as cases
from support.combinations import each_value
from support.forked_python import commands, run_python
from support.ranks import Ranks
from support.routing import buffer_kwargs, make_spec

from moe_rt import Buffer, ThreadGroup, _engine
from moe_rt.diagnostics.report import readable
from moe_rt.engine import backend
from moe_rt.engine.cpu import CpuEngine
from moe_rt.errors import Code, GroupPoisoned, MoeRtError

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 3
HERE = Path(__file__).parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE}:{HERE.parent}"}
SAID = {
    "ValueError": "ValueError: bad batch;",
    "KeyError": "KeyError: 'weight';",
    "SystemExit": "SystemExit: 3;",
    "KeyboardInterrupt": "KeyboardInterrupt;",
    "nothing said": "OSError;",
    "no text": "Unspeakable;",
    "too long": f"ValueError: {'ü' * 246};",  # 504 bytes in total
    "control characters": "ValueError: a [2Jb c d;",
    "surrogate": "ValueError: file ?;",
}


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize("how", ["with", "abort"])
@pytest.mark.parametrize("name", SAID)
def test_survivors_say_what_the_first_rank_raised(make_ranks: MakeRanks, heap: str, how: str, name: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.leave_by, FAULTY_RANK, name, how)
    for rank in (0, 2):
        assert texts[rank].startswith("GroupPoisoned:"), texts
        assert f"rank 1 failed first: {SAID[name]}" in texts[rank], texts


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_a_collective_that_fails_for_lack_of_a_peer(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.collective_fails, FAULTY_RANK, RuntimeError)
    for rank in (0, 2):
        assert texts[rank].startswith("GroupPoisoned:"), texts
        assert "rank 1 failed first: ValueError: bad batch" in texts[rank]
        assert texts[rank].endswith("| RuntimeError")


def test_an_error_of_its_own_stays_what_it_is(make_ranks: MakeRanks) -> None:
    texts = make_ranks("threads", SIZE).run(cases.collective_fails, FAULTY_RANK, KeyError)
    assert texts[0].startswith("KeyError: "), texts


SCRIPT = """
import sys, torch.distributed as dist
from faults.cases_first_failure import end_program
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
end_program(dist.group.WORLD, 1, sys.argv[3])
"""


STARTED = ("as a command", "as a file", "as a module")
ENDS = {
    "error": ("GroupPoisoned", "rank 1 failed first: ValueError: bad batch; the group is over"),
    "interrupt": ("GroupPoisoned", "rank 1 failed first: KeyboardInterrupt; the group is over"),
    "exit": ("GroupClosed", "rank 1 closed its buffer (its program ended): it announced op 1"),
}


@pytest.mark.parametrize(("started", "how"), each_value(STARTED, ENDS))
def test_a_program_that_ends(tmp_path: Path, started: str, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = {"as a command": ["-c", SCRIPT], "as a file": ["script.py"], "as a module": ["-m", "script"]}[started]
    ranks = [
        subprocess.Popen(
            [sys.executable, *command, str(tmp_path / "store"), str(rank), how],
            env=ENVIRONMENT,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    seen, _ = ranks[0].communicate(timeout=3000)
    assert (ranks[1].wait(800) == 0) == (how == "exit")
    kind, said = ENDS[how]
    assert seen.startswith(kind), seen
    assert said in seen


# Rank 1's process ends once rank 0 has printed why it raises: torchrun ends the others as soon as one has failed.
JOB = """
import atexit, os, sys, time
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from faults.cases_faults import good_round, open_buffer


@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        sys.excepthook = lambda *error, shown=sys.excepthook: (shown(*error), open("shown", "w").close())
    else:
        atexit.register(lambda: [time.sleep(0.01) for _ in range(60000) if not os.path.exists("shown")])
    with open_buffer(dist.group.WORLD) as buffer:
        good_round(buffer)
        if buffer.rank == 1:
            raise ValueError("bad batch")
        good_round(buffer)


main()
"""


def test_torchrun_shows_the_first_failure(tmp_path: Path) -> None:
    """torchrun shows the first failure in its summary, for any rank that it names, and in the survivor's output."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = run_python(*torchrun, script, cwd=tmp_path, env={**ENVIRONMENT, "PYTHON_EXEC": str(commands() / "python")})
    assert done.returncode != 0
    assert "bad batch" in done.stderr.rpartition("Root Cause")[2], done.stderr
    survivor = [line for line in done.stderr.splitlines() if line.startswith("[rank0]:")]
    assert any("rank 1 failed first: ValueError: bad batch" in line for line in survivor), done.stderr


def test_a_buffer_that_became_garbage_is_reported(make_ranks: MakeRanks) -> None:
    texts = make_ranks("threads", 2).run(cases.let_go, FAULTY_RANK)
    assert "rank 1 closed its buffer (its buffer became garbage)" in texts[0], texts


def buffers(size: int) -> list[Any]:
    made: list[Any] = [None] * size
    spec = make_spec(size)

    def make(group: ThreadGroup) -> None:
        made[group.rank] = Buffer(group, timeout_s=100.0, **buffer_kwargs(spec))

    threads = [threading.Thread(target=make, args=(group,)) for group in ThreadGroup.make(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def segment_of(buffer: Buffer, rank: int) -> tuple[int, Any]:
    segments = buffer._engine._segments  # type: ignore[attr-defined]
    return segments.addresses[rank], _engine.read_segment(segments.mappings[rank]).header


def test_who_passes_a_failure_on_is_not_taken_for_the_first() -> None:
    """Rank 0 aborts because of rank 1's poison word, before rank 2 has received it: rank 2 still blames rank 1."""
    made = buffers(SIZE)
    address, header = segment_of(made[0], 0)
    ctypes.c_uint64.from_address(address + header.poison).value = (FAULTY_RANK + 1) << 16 | Code.POISONED
    with pytest.raises(GroupPoisoned, match="rank 1 failed first"), made[0]:
        made[0].check()
    with pytest.raises(GroupPoisoned, match=r"^rank 2: rank 1 failed first") as raised:
        made[2].check()
    assert raised.value.peer == FAULTY_RANK
    for buffer in made:
        buffer.close()


@pytest.mark.parametrize(
    ("ended", "at_a_prompt", "error", "expected"),
    [
        (True, False, ValueError("bad batch"), ["poison", "close: its program ended", "await peers"]),
        (True, True, ValueError("shown before"), ["close: its program ended", "await peers"]),
        (True, False, None, ["close: its program ended", "await peers"]),
        (False, False, ValueError("caught before"), ["close: its buffer became garbage"]),
    ],
)
def test_a_buffer_that_is_open_at_the_end(
    monkeypatch: pytest.MonkeyPatch, ended: bool, at_a_prompt: bool, error: Exception | None, expected: list[str]
) -> None:
    """An exception that ends the program ends the group; one that a prompt has shown, or a garbage buffer, does not."""
    noted: list[str] = []
    engine: Any = SimpleNamespace(
        poison=lambda cause: noted.append("poison") if cause is error else None,
        close=lambda why: noted.append(f"close: {why}"),
    )
    main = SimpleNamespace(is_alive=lambda: not ended)
    threads = SimpleNamespace(current_thread=lambda: main, main_thread=lambda: main)
    monkeypatch.setattr(backend, "threading", threads)
    monkeypatch.setattr(backend, "await_peers", lambda: noted.append("await peers"))
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    if at_a_prompt:
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    backend.leave(engine)
    assert noted == expected


def test_an_abort_blames_nobody() -> None:
    made = buffers(2)
    made[1].abort()
    with pytest.raises(GroupPoisoned, match="rank 1 failed first: its own exception, or abort") as raised:
        made[0].check()
    assert raised.value.peer == 1
    assert [rank.poison for rank in made[0].report().ranks] == ["poisoned, found by rank 1"] * 2
    for buffer in made:
        buffer.close()


@pytest.mark.parametrize("num_bytes", [1, 504, 505, 2**63, 2**64 - 1])
def test_hostile_last_words(num_bytes: int) -> None:
    made = buffers(2)
    address, header = segment_of(made[0], 1)
    text = b"\x1b[31m\n\xff\xfe\r\0" * 100
    ctypes.memmove(address + header.last_words + 8, text, 504)
    ctypes.c_uint64.from_address(address + header.last_words).value = num_bytes
    made[1].abort()
    with pytest.raises(GroupPoisoned) as raised:
        made[0].dispatch(torch.zeros(0, 20), torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 3))
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 700
    made[0].close()


@pytest.mark.parametrize(("peer", "words"), [(-1, ""), (0, ""), (1, "from  1"), (2, "")], ids=str)
def test_last_words_of_a_peer_on_another_node(peer: int, words: str) -> None:
    """They are read over the network, and shown on one line; a rank that does not exist has none."""
    engine: Any = SimpleNamespace(remote_last_words=lambda peer: f"from\r\n{peer}".encode())
    own: Any = SimpleNamespace(_engine=engine, _segments=SimpleNamespace(mappings=[bytearray(0), None]))
    assert CpuEngine._last_words_of(own, peer) == words


def test_the_first_of_last_words_stay() -> None:
    (made,) = buffers(1)
    for words in (b"first", b"second"):
        made._engine._engine.leave_words(words)  # type: ignore[attr-defined]
    assert made.report().ranks[0].last_words == "first"
    made.close()


def test_a_poison_word_that_names_nobody() -> None:
    made = buffers(2)
    address, header = segment_of(made[0], 0)
    ctypes.c_uint64.from_address(address + header.poison).value = 0xFFFF << 16 | Code.POISONED
    with pytest.raises(MoeRtError, match="rank 65534 failed first"):
        made[0].check()
    for buffer in made:
        buffer.close()


def test_any_bytes_are_readable() -> None:
    assert readable(bytes(range(256)) + "\u2028\u202e\u0085é".encode()).isprintable()
