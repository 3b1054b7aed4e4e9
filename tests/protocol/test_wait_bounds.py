"""How long a wait lasts, and how much of it leaves the core to others, in a clock that only the wait itself moves."""

from __future__ import annotations

import subprocess
from typing import NamedTuple

import pytest
from engine_programs import compile_program

from moe_rt.errors import Code

MACHINES = ("cpu", "gpu")


class Wait(NamedTuple):
    code: int
    peer: int
    seconds: float
    seconds_in_naps: float


def wait(machine: str, timeout_s: float, num_ranks: int, *late_s: float | str) -> Wait:
    """Of rank 0: rank 1 announces after late_s[0], rank 2 after late_s[1] and so on; those without a time never do."""
    arguments = [machine, str(timeout_s), str(num_ranks), *map(str, late_s)]
    done = subprocess.run(
        [compile_program("waiting.cpp"), *arguments], capture_output=True, text=True, check=True, timeout=3000
    )
    code, peer, seconds, napped = done.stdout.split()
    return Wait(int(code), int(peer), float(seconds), float(napped))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("timeout_s", [0.02, 2.0])
def test_a_wait_lasts_for_its_timeout(machine: str, timeout_s: float) -> None:
    found = wait(machine, timeout_s, 2)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 1)
    assert timeout_s < found.seconds < 1.1 * timeout_s


@pytest.mark.parametrize("machine", MACHINES)
def test_one_timeout_for_all_peers(machine: str) -> None:
    """Peers that are late one after the other, and then one that never comes: on a GPU each had a time of its own."""
    found = wait(machine, 1.0, 4, 0.5, 0.9)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 3)
    assert 1.0 < found.seconds < 1.1


def test_what_is_passed_on_may_take_a_quarter_longer() -> None:
    """Of ranks 0 and 1 on one node and 2 and 3 on another, 1 passes on what 3 announces, and knows first if 3 is late:
    rank 0 gives it time to say so, and then takes 1 for the one that is late."""
    found = wait("nodes", 1.0, 4, 0.1, 0.2)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 1)
    assert 1.25 < found.seconds < 1.3
    found = wait("nodes", 1.0, 4, 0.1)
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 2), "it waits for 2 itself"
    assert 1.0 < found.seconds < 1.05


@pytest.mark.parametrize("machine", MACHINES)
def test_who_waits_itself_is_not_the_late_one(machine: str) -> None:
    """Rank 1 has stopped before it told rank 0 of an op, and rank 2 waits for rank 0's next one: whichever of the two
    sees first that its time is over, rank 1 is named. Rank 0 is late if it has not waited for long."""
    found = wait(machine, 1.0, 3, "blamed:0.8")
    assert (found.code, found.peer) == (Code.PEER_TIMEOUT, 1)
    assert 0.8 < found.seconds < 0.85
    found = wait(machine, 1.0, 3, "blamed:0.7")
    assert (found.code, found.peer) == (Code.POISONED, 2)


def test_who_was_frozen_in_a_wait_is_the_late_one() -> None:
    """That it was is no waiting: it must not name a peer for which it would have waited."""
    found = wait("cpu", 1.0, 3, "woken:0.1")
    assert (found.code, found.peer) == (Code.POISONED, 2)


def test_who_left_because_of_a_failure_is_not_taken_for_its_cause() -> None:
    """Rank 3 fails and says so to all; rank 2 hears it and is gone when rank 0 looks."""
    found = wait("left", 1.0, 4, 0.1)
    assert (found.code, found.peer) == (Code.POISONED, 3)


def test_rows_of_a_lost_peer_are_not_taken_for_there() -> None:
    """All that was asked of it has ended, in one way or the other."""
    found = wait("lost", 1.0, 4)
    assert (found.code, found.peer) == (Code.PEER_DEAD, 3)


def test_a_signal_while_rows_are_awaited_is_no_peers() -> None:
    found = wait("interrupted", 1.0, 4)
    assert (found.code, found.peer) == (Code.INTERRUPTED, -1)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_long_wait_naps(machine: str) -> None:
    """All but the first milliseconds, which are for peers that are nearly there."""
    found = wait(machine, 2.0, 2)
    assert found.seconds_in_naps > (0.95 if machine == "cpu" else 0.7) * found.seconds


def test_a_short_wait_of_a_cpu_rank_does_not_nap() -> None:
    """Who comes within the first milliseconds is not kept waiting by the end of a nap."""
    found = wait("cpu", 2.0, 2, 0.002)
    assert found.seconds < 0.0021
    assert found.seconds_in_naps == 0.0
