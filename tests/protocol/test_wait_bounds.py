"""The duration of a wait, and the share of it that leaves the core to others, on a clock that only the wait
advances."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

import pytest
from protocol.engine_programs import compile_program

from moe_rt.errors import Code

MACHINES = ("cpu", "gpu")


class Wait(NamedTuple):
    code: int
    peer: int
    seconds: float
    seconds_in_naps: float


def wait(machine: str, timeout_s: float, num_ranks: int, *late_s: float | str) -> Wait:
    """Run a wait of rank 0: rank 1 announces after late_s[0], rank 2 after late_s[1] and so on; the other ranks never
    do."""
    code, peer, seconds, napped = printed(machine, timeout_s, num_ranks, *late_s)
    return Wait(int(code), int(peer), float(seconds), float(napped))


def printed(*arguments: float | str) -> list[str]:
    command = [str(compile_program("waiting.cpp")), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=3000).stdout.split()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("timeout_s", [0.02, 2.0])
def test_a_wait_lasts_for_its_timeout(machine: str, timeout_s: float) -> None:
    found = wait(machine, timeout_s, 2)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 1)
    assert timeout_s < found.seconds < 1.1 * timeout_s


@pytest.mark.parametrize("machine", MACHINES)
def test_one_timeout_for_all_peers(machine: str) -> None:
    """One timeout covers peers that are late in turn and one that never arrives; on a GPU each peer once had a separate
    one."""
    found = wait(machine, 1.0, 4, 0.5, 0.9)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 3)
    assert 1.0 < found.seconds < 1.1


@pytest.mark.parametrize("machine", ["nodes", "gpu_nodes"])
def test_what_is_passed_on_may_take_a_quarter_longer(machine: str) -> None:
    """Rank 0 waits a quarter longer for rank 1, the proxy that forwards rank 3's header from the other node and learns
    first that 3 is late. If rank 1 does not report that in time, rank 0 blames rank 1."""
    found = wait(machine, 1.0, 4, 0.1, 0.2)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 1)
    assert 1.25 < found.seconds < 1.3
    found = wait(machine, 1.0, 4, 0.1, 1.1, 0.2)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 2), "it waits for 2 itself"
    assert 1.0 < found.seconds < 1.05


@pytest.mark.parametrize("machine", MACHINES)
def test_who_waits_itself_is_not_the_late_one(machine: str) -> None:
    """Rank 1 has stopped before it announced an op to rank 0, and rank 2 waits for rank 0's next one. Rank 1 is
    named in either order of the two timeouts. Rank 0 is late if it has not waited for long."""
    found = wait(machine, 1.0, 3, "blamed:0.8")
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 1)
    assert 0.8 < found.seconds < 0.85
    found = wait(machine, 1.0, 3, "blamed:0.7")
    assert (found.code, found.peer) == (Code.POISONED, 2)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("word", ["other", "dead"])
def test_only_a_timeout_on_this_rank_is_passed_to_its_peer(machine: str, word: str) -> None:
    """Rank 2 has timed out on rank 1, or found rank 0 dead: that is the cause, however long rank 0 has waited."""
    found = wait(machine, 1.0, 3, f"{word}:0.9")
    assert (found.code, found.peer) == (Code.POISONED, 2)


def test_who_was_frozen_in_a_wait_is_the_late_one() -> None:
    """A rank that was frozen in a wait must not blame the peer it would have waited for: frozen time is not waiting."""
    found = wait("cpu", 1.0, 3, "woken:0.1")
    assert (found.code, found.peer) == (Code.POISONED, 2)


def test_who_left_because_of_a_failure_is_not_taken_for_its_cause() -> None:
    """Rank 3 fails and poisons all; rank 2 sees that and has exited when rank 0 checks: rank 0 blames rank 3."""
    found = wait("left", 1.0, 4, 0.1)
    assert (found.code, found.peer) == (Code.POISONED, 3)


def test_who_failed_and_left_between_two_looks_has_failed() -> None:
    """Rank 1 fails and closes its buffer after rank 0 has looked at its poison word."""
    found = wait("cpu", 1.0, 2, "gone:0.1")
    assert (found.code, found.peer) == (Code.POISONED, 1)


def test_rows_of_a_lost_peer_are_not_taken_for_there() -> None:
    """Rows of a lost peer are not used, although every request to it has completed, successfully or not."""
    found = wait("lost", 1.0, 4)
    assert (found.code, found.peer) == (Code.PEER_DEAD, 3)


def test_last_words_are_of_a_peer_that_can_be_read() -> None:
    """They are empty if the network has lost the peer or does not answer."""
    assert printed("words", 1.0, 4) == ["'words'", "''", "''"]


def test_a_signal_while_rows_are_awaited_is_no_peers() -> None:
    found = wait("interrupted", 1.0, 4)
    assert (found.code, found.peer) == (Code.INTERRUPTED, -1)


def test_a_signal_in_a_wait_too_short_to_look_for_one() -> None:
    """A signal that came before the timeout ends the wait, although these are looked for ten times a second."""
    assert wait("interrupted", 0.02, 4).code == Code.INTERRUPTED


def test_a_lost_proxy_ends_the_wait_for_what_it_passes_on() -> None:
    """The source may be lost: the proxy has its announcement."""
    found = wait("abandoned", 10.0, 4)
    assert (found.code, found.peer) == (Code.PEER_DEAD, 3)
    assert found.seconds < 0.1
    assert wait("passed", 1.0, 4).code == Code.PEER_TIMEOUT


@pytest.mark.parametrize("machine", MACHINES)
def test_a_long_wait_naps(machine: str) -> None:
    """A long wait naps except in its first milliseconds, which are for peers that are nearly there."""
    found = wait(machine, 2.0, 2)
    assert found.seconds_in_naps > (0.95 if machine == "cpu" else 0.7) * found.seconds


def test_a_short_wait_of_a_cpu_rank_does_not_nap() -> None:
    """A peer that arrives within the first milliseconds is not delayed by the end of a nap."""
    found = wait("cpu", 2.0, 2, 0.002)
    assert found.seconds < 0.0021
    assert found.seconds_in_naps == 0.0
