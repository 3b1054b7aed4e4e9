"""Work of all ranks that succeeds on all of them or raises on all."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moe_rt.errors import ConfigMismatch, InvalidConfig, LimitReached, MoeRtError, SegmentPermission
from moe_rt.group.rendezvous import Rendezvous, all_gather_records

_LIMITS = {
    errno.EMFILE: "descriptors (ulimit -n)",
    errno.ENFILE: "descriptors on this host (fs.file-max)",
    errno.EAGAIN: "threads (ulimit -u, ulimit -v, pids.max of the control group)",
}
_LAST_THREAD_S = 2.0


@contextmanager
def own_part(rendezvous: Rendezvous, what: str) -> Iterator[None]:
    """Run a block that every rank runs before they gather. If it raises here, the others raise when they gather.

    Errors not from moe_rt become InvalidConfig, which says that `what` could not be done. KeyboardInterrupt and the
    like keep their type here and are GroupPoisoned on other ranks.
    """
    with rendezvous:
        try:
            yield
        except Exception as error:
            ours = _as_ours(error, rendezvous.rank, what)
            if ours is error:
                raise
            raise ours from error


def all_or_none(
    rendezvous: Rendezvous, work: Callable[[], dict[str, Any]], what: str, timeout_s: float
) -> list[dict[str, Any]]:
    """Run `work` on every rank as its `own_part`, and return every rank's record."""
    with rendezvous:
        with own_part(rendezvous, what):
            record = work()
        return all_gather_records(rendezvous, record, timeout_s, what)


def take_all_or_none(rendezvous: Rendezvous, work: Callable[[], None], what: str, timeout_s: float) -> None:
    """Run `all_or_none` with `work` that uses what peers have made. If it fails because a peer did, name that peer."""

    def take() -> dict[str, Any]:
        try:
            work()
        except Exception as error:
            rendezvous.raise_first_failure()
            # A killed process loses its descriptors before its last thread is known to have ended.
            deadline = time.monotonic() + (_LAST_THREAD_S if isinstance(error, SegmentPermission) else 0.0)
            while time.monotonic() < deadline:
                time.sleep(_LAST_THREAD_S / 100)
                rendezvous.raise_first_failure()
            raise
        return {}

    all_or_none(rendezvous, take, what, timeout_s)


def agree(rendezvous: Rendezvous, record: dict[str, Any], timeout_s: float, what: str) -> None:
    """Compare this rank's configuration with those of all ranks. Collective.

    Raises:
        ConfigMismatch: the records differ; names the first such field, the ranks and both values.
        InvalidConfig: a peer refused its own configuration.
        CorruptPeer: the record received from a rank is malformed.
        PeerTimeout, PeerDead, StoreLost: a rank did not join, or can no longer join.
    """
    me = rendezvous.rank
    try:
        records = all_gather_records(rendezvous, record, timeout_s, what)
    except InvalidConfig as error:
        message = f"rank {error.peer} refused its own configuration: {error}"
        raise InvalidConfig(message, rank=me, peer=error.peer) from None
    # Every rank is compared with rank 0, so that all name the same faulty rank.
    for peer, other in enumerate(records):
        for field in record:
            expected = records[0].get(field)
            if other.get(field) != expected:
                message = f"{field}: got {other.get(field)} on rank {peer}, expected {expected} as on rank 0"
                raise ConfigMismatch(message, rank=me, peer=peer)


def _as_ours(error: Exception, rank: int, what: str) -> MoeRtError:
    system_error = error.__cause__ if isinstance(error, MoeRtError) else error
    if isinstance(system_error, OSError) and system_error.errno in _LIMITS:
        got, limit = system_error.strerror, _LIMITS[system_error.errno]
        return LimitReached(f"rank {rank} could not {what}: got {got}, expected room for more {limit}", rank=rank)
    if isinstance(error, MoeRtError):
        return error
    return InvalidConfig(f"rank {rank} could not {what}: got {type(error).__name__}: {error}", rank=rank)
