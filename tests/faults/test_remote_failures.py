"""When hosts, links or remote ranks fail, on emulated nodes, every rank raises, and none hangs."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from faults import cases_failures, cases_halves
from faults import cases_remote as cases
from faults.test_faults_between_halves import check_closed
from nodes.node_ranks import NodeRanks

NODES = (1, 2)
DEADLINE_S = 600.0  # for hangs only
TIMEOUT_S = 8.0
NO_TIMEOUT_S = 90.0  # an earlier end means that the failure was detected


@pytest.fixture(scope="module")
def ranks() -> Iterator[NodeRanks]:
    with closing(NodeRanks(NODES)) as made:
        yield made


def once_all_have_begun(begun: Path, size: int, act: Callable[[], None]) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if all(Path(f"{begun}.{rank}").exists() for rank in range(size)):
                return act()
            time.sleep(0.01)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("at", ["dispatch", "combine", pytest.param("backward", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank(ranks: NodeRanks, rank: int, at: str) -> None:
    """A killed rank is reported if its node has no other rank, and if a peer on its node sees its process exit."""
    outcomes = ranks.outcomes(cases_failures.die_at, rank, at)
    ranks.restart()
    assert isinstance(outcomes.pop(rank), ChildProcessError)
    assert all(text.startswith("PeerDead:") and f"rank {rank}" in text for text in outcomes), outcomes
    assert all(text.endswith(("then PeerDead", "then GroupPoisoned")) for text in outcomes), outcomes


def test_an_end_waits_for_remote_readers(ranks: NodeRanks, tmp_path: Path) -> None:
    """A program that ends immediately takes nothing from a rank on another node."""
    first, *_ = ranks.run(cases.the_last_op_is_read_late, str(tmp_path / "marker"))
    assert first


def test_a_link_that_goes_down(ranks: NodeRanks, tmp_path: Path) -> None:
    """Both sides notice, although no process has exited; a link that is up again serves new buffers."""
    cut = once_all_have_begun(tmp_path / "begun", ranks.size, lambda: ranks.cluster.cut(1))
    try:
        outcomes = ranks.run(cases.rounds_until_failure, str(tmp_path / "begun"), NO_TIMEOUT_S)
    finally:
        cut.join()
        ranks.cluster.mend(1)
    assert all(text.startswith("PeerDead:") for text, _ in outcomes), outcomes
    assert any("or the link to it is down" in text for text, _ in outcomes), outcomes
    ranks.restart()  # gloo's connections have also ended
    assert len(ranks.run(cases.refused, 1)) == ranks.size


def test_a_stopped_rank(ranks: NodeRanks, tmp_path: Path) -> None:
    """A stopped rank that resumes after its peers have left raises."""
    first, *texts = ranks.run(cases.stop_for_a_while, 0, TIMEOUT_S, str(tmp_path / "marker"))
    ranks.restart()
    assert any(text.startswith("PeerTimeout:") for text in texts), texts
    assert all(text.startswith(("PeerTimeout:", "GroupPoisoned:")) for text in texts), texts
    assert first.startswith(("GroupPoisoned:", "PeerDead:")), first


def test_a_rank_that_closes_or_raises(ranks: NodeRanks) -> None:
    texts = ranks.run(cases_failures.peer_closes_first, 0)
    assert texts[0] == "closed"
    assert all(text.startswith(("GroupClosed:", "GroupPoisoned:")) for text in texts[1:]), texts
    texts = ranks.run(cases_failures.raise_between_ops, 1)
    assert texts[1].startswith("KeyError")
    assert all("rank 1 failed first: " in text for text in (texts[0], texts[2])), texts


def test_rows_that_come_after_all_have_given_up(ranks: NodeRanks) -> None:
    """Rows may arrive after the rank that requested them has unmapped its segment, where rows are staged."""
    texts = ranks.run(cases.rows_come_late, 0, 0.4, 2.0)
    assert texts[1].startswith(("PeerTimeout:", "GroupPoisoned:")), texts
    assert all(text.startswith(("PeerTimeout:", "GroupPoisoned:", "PeerDead:", "GroupClosed:")) for text in texts), (
        texts
    )


def test_refusals_are_unanimous(ranks: NodeRanks) -> None:
    texts = ranks.run(cases.refused, 0)
    assert texts == ["InvalidRouting CapacityOverflow"] * ranks.size


def test_nothing_is_left_of_closed_buffers(ranks: NodeRanks) -> None:
    for left in ranks.run(cases.left_of_buffers, 4):
        assert max(left.values()) <= 0, left


def test_a_node_that_dies(tmp_path: Path) -> None:
    """When all ranks of a node and its network die together, the other node's ranks raise PeerDead, and nothing
    remains."""
    with closing(NodeRanks((2, 1))) as made:
        init = made.cluster.init_process(1)
        kill = once_all_have_begun(tmp_path / "begun", made.size, lambda: os.kill(init, signal.SIGKILL))
        outcomes = made.outcomes(cases.rounds_until_failure, str(tmp_path / "begun"), NO_TIMEOUT_S, 2)
        kill.join()
        assert isinstance(outcomes[2], ChildProcessError)
        assert all(text.startswith("PeerDead:") for text, _ in outcomes[:2]), outcomes
    assert [path.name for path in Path("/run/netns").glob(f"{made.cluster.name}-*")] == []


@pytest.mark.parametrize("route", ["flat", "two_level"])
@pytest.mark.parametrize(
    ("fault", "error"), [("dies", "PeerDead"), ("closes", "GroupClosed"), ("aborts", "GroupPoisoned")]
)
def test_a_rank_that_fails_between_the_halves(ranks: NodeRanks, route: str, fault: str, error: str) -> None:
    """The thread that serves peers fetches from it meanwhile, or has asked it for rows already. The rank is a proxy and
    a client."""
    outcomes = ranks.outcomes(partial(cases_halves.between, route=route), fault)
    ranks.restart()
    failed = outcomes.pop(cases_halves.FAULTY_RANK)
    assert isinstance(failed, ChildProcessError) if fault == "dies" else failed[0].startswith("GroupClosed: "), failed
    for waited, after in outcomes:
        assert waited == "ok" or waited.startswith((error, "GroupPoisoned")), outcomes
        assert after.startswith((error, "GroupPoisoned")), outcomes


@pytest.mark.parametrize("route", ["flat", "two_level"])
def test_a_rank_that_closed_in_any_channel(ranks: NodeRanks, route: str) -> None:
    check_closed(ranks.run(partial(cases_halves.closed_after, route=route), 0, 2), 0)


def test_a_rank_serves_what_it_has_announced(ranks: NodeRanks) -> None:
    """It has closed, but its network sends rows until every peer has announced a later op, or has closed."""
    found = ranks.run(partial(cases_halves.begun_before_it_closed, route="flat"), 2, 2000)
    assert found.pop(cases_halves.FAULTY_RANK) == []
    assert found == [["ok"] * 2] * len(found)


def test_a_forked_child(ranks: NodeRanks) -> None:
    """It has no thread that serves peers, and its copy of an op under way, of which the parent's thread does a part, is
    refused."""
    for of_child, of_parent in ranks.run(cases_halves.fork_between, 2):
        assert all(line.startswith("GroupClosed: ") for line in of_child.split("\n")), of_child
        assert of_parent == "ok\nok"


@pytest.mark.parametrize("route", ["flat", "two_level"])
def test_ops_that_are_never_waited_for(ranks: NodeRanks, route: str) -> None:
    """A buffer that is closed meanwhile asks for nothing more, and its memory lasts until all answers have come."""
    ranks.run(partial(cases_halves.lost_buffers, route=route), 20, 2)
