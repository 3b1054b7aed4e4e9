"""Input on which DeepEP traps, hangs or corrupts raises a typed error on every rank, which names the rank."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat.oracle import Job, make_job
from compat.test_normal import BYTES, dispatch, layout_arguments, on_ranks
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep.config import low_latency_bytes
from moe_rt.compat.deep_ep.exchange import Exchange
from moe_rt.errors import (
    CallOrderMismatch,
    ConfigMismatch,
    GroupClosed,
    InvalidConfig,
    InvalidInput,
    InvalidRouting,
    MoeRtError,
    PeerDead,
    TooManyTokens,
)

JOB = make_job(2, [20, 20], 128, 3, 4)
WRONG = 1  # the rank that calls wrongly

Work = Callable[[deep_ep.Buffer, int], Any]


def raised(work: Work, job: Job = JOB, usable: bool = True) -> list[MoeRtError]:
    """Run work, which must raise on every rank, and return the errors. The buffer must work afterwards if usable."""

    def rank(buffer: deep_ep.Buffer, number: int) -> MoeRtError:
        with pytest.raises(MoeRtError) as caught:
            work(buffer, number)
        if usable:
            recv_x, _, _, _, handle, _ = dispatch(buffer, job, number)
            buffer.combine(recv_x, handle)
        return caught.value

    return on_ranks(job, rank)


def ordinary(buffer: deep_ep.Buffer, rank: int, **changed: Any) -> Any:
    """Dispatch in normal mode, with other arguments on the wrong rank."""
    arguments = layout_arguments(buffer, JOB, rank)
    arguments |= {"topk_idx": JOB.topk_idx[rank], "topk_weights": JOB.topk_weights[rank], "x": JOB.x[rank]}
    return buffer.dispatch(**(arguments | (changed if rank == WRONG else {})))


def low(buffer: deep_ep.Buffer, rank: int, most: int = 20, **options: Any) -> Any:
    return buffer.low_latency_dispatch(JOB.x[rank], JOB.topk_idx[rank], most, 4, use_fp8=False, **options)


def assert_named(errors: list[MoeRtError], text: str, kind: type[MoeRtError] = InvalidInput) -> None:
    """Check that the wrong rank's error has the text, and that each peer's error is as typed and names that rank."""
    for rank, error in enumerate(errors):
        assert isinstance(error, kind), (rank, error)
        assert (text if rank == WRONG else f"rank {WRONG}") in str(error)


NORMAL: dict[str, tuple[dict[str, Any], str, type[MoeRtError]]] = {
    "counts of ranks": ({"num_tokens_per_rank": torch.ones(2, dtype=torch.int32)}, "num_tokens_per_rank", InvalidInput),
    "counts of experts": (
        {"num_tokens_per_expert": torch.ones(4, dtype=torch.int32)}, "num_tokens_per_expert", InvalidInput,
    ),
    "visits": ({"is_token_in_rank": torch.zeros(20, 2, dtype=torch.bool)}, "num_tokens_per_rank", InvalidInput),
    "dtype of counts": ({"num_tokens_per_rank": torch.ones(2)}, "num_tokens_per_rank", InvalidInput),
    "no layout": ({"is_token_in_rank": None}, "is_token_in_rank", InvalidInput),
    "float32 rows": ({"x": torch.zeros(20, 128)}, "x: got", InvalidInput),
    "transposed rows": ({"x": torch.zeros(128, 20).bfloat16().T}, "not contiguous", InvalidInput),
    "a number": ({"x": torch.zeros((), dtype=torch.bfloat16)}, "x: got", InvalidInput),
    "fewer rows": ({"x": torch.zeros(19, 128).bfloat16()}, "is_token_in_rank", InvalidInput),
    "int32 ids": ({"topk_idx": torch.zeros(20, 3, dtype=torch.int32)}, "topk_idx", InvalidInput),
    "no weights": ({"topk_weights": None}, "topk_weights", InvalidInput),
    "few worst tokens": ({"num_worst_tokens": 1}, "num_worst_tokens", InvalidInput),
    "large queues": ({"config": deep_ep.Config(2000, 6, 300_000)}, "num_nvl_bytes", InvalidInput),
    "counts on another device": (
        {"num_tokens_per_rank": torch.ones(2, dtype=torch.int32, device="meta")}, "num_tokens_per_rank", InvalidInput,
    ),
    "visits on another device": (
        {"is_token_in_rank": torch.ones(20, 2, dtype=torch.bool, device="meta")}, "is_token_in_rank", InvalidInput,
    ),
    "weights on another device": ({"topk_weights": torch.ones(20, 3, device="meta")}, "topk_weights", InvalidInput),
    "rows on another device": ({"x": JOB.x[WRONG].to("meta")}, "on meta", InvalidInput),
    "scales on another device": (
        {"x": (torch.zeros(20, 128, dtype=torch.uint8), torch.zeros(20, 1, device="meta"))}, "scales", InvalidInput,
    ),
    "scales of float64": (
        {"x": (torch.zeros(20, 128, dtype=torch.float8_e4m3fn), torch.zeros(20, 1).double())}, "scales", InvalidInput,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NORMAL)
def test_wrong_operands_of_dispatch(case: str) -> None:
    changed, text, kind = NORMAL[case]
    assert_named(raised(lambda buffer, rank: ordinary(buffer, rank, **changed)), text, kind)


def test_an_expert_named_twice() -> None:
    ids = JOB.topk_idx[WRONG].clone()
    ids[3] = torch.tensor([2, 2, -1])
    job = dataclasses.replace(JOB, topk_idx=[JOB.topk_idx[0], ids])
    errors = raised(lambda buffer, rank: dispatch(buffer, job, rank))
    assert isinstance(errors[WRONG], InvalidRouting)
    assert isinstance(errors[0], InvalidInput)
    assert f"rank {WRONG}" in str(errors[0])


def test_an_expert_named_twice_in_low_latency() -> None:
    ids = JOB.topk_idx[WRONG].clone()
    ids[3] = torch.tensor([2, 2, -1])

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        buffer.low_latency_dispatch(JOB.x[rank], ids if rank == WRONG else JOB.topk_idx[rank], 20, 4, use_fp8=False)

    errors = raised(work)
    assert isinstance(errors[WRONG], InvalidRouting)
    assert f"rank {WRONG}" in str(errors[0])


def test_an_expert_that_does_not_exist() -> None:
    ids = JOB.topk_idx[WRONG].clone()
    ids[3, 0] = 4
    job = dataclasses.replace(JOB, topk_idx=[JOB.topk_idx[0], ids])
    assert_named(raised(lambda buffer, rank: dispatch(buffer, job, rank)), "expert id 4", InvalidRouting)


@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_another_number_of_experts_on_a_rank(first: bool) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        if not first:
            dispatch(buffer, JOB, rank)
        dispatch(buffer, dataclasses.replace(JOB, num_experts=8) if rank == WRONG else JOB, rank)

    kind = ConfigMismatch if first else CallOrderMismatch
    for error in raised(work, usable=False):
        assert isinstance(error, kind)
        assert f"rank {WRONG}" in str(error)


@pytest.mark.parametrize("what", ["handle", "rows", "weights", "weights elsewhere", "dtype", "bias", "bias elsewhere"])
def test_wrong_operands_of_combine(what: str) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, weights, _, handle, _ = dispatch(buffer, JOB, rank)
        arguments: dict[str, Any] = {"x": recv_x, "handle": handle, "topk_weights": weights}
        if what.startswith("bias"):
            arguments["bias"] = JOB.x[rank]
        changes: dict[str, dict[str, Any]] = {
            "handle": {"handle": tuple(handle)},
            "rows": {"x": recv_x[1:]},
            "weights": {"topk_weights": weights[1:]},
            "dtype": {"x": recv_x.float()},
            "bias": {"bias": torch.zeros(1, 128).bfloat16()},
            "weights elsewhere": {"topk_weights": weights.to("meta")},
            "bias elsewhere": {"bias": JOB.x[rank].to("meta")},
        }
        buffer.combine(**(arguments | (changes[what] if rank == WRONG else {})))

    what = what.removesuffix(" elsewhere")
    name = {"rows": "x", "weights": "topk_weights", "dtype": "x"}.get(what, what)
    assert_named(raised(work), f"{name}: got")


def test_a_refusal_after_the_weights_went_home() -> None:
    """Peers learn of it in the buffer of rows, although the last op went through that of weights."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, weights, _, handle, _ = dispatch(buffer, JOB, rank)
        buffer.combine(recv_x, handle, topk_weights=weights)
        ordinary(buffer, rank, x=torch.zeros(20, 128))

    assert_named(raised(work), "x: got")


@pytest.mark.parametrize("op", ["cached dispatch", "combine", "low-latency combine"])
def test_handles_of_another_buffer(op: str) -> None:
    def rank(group: ThreadGroup) -> str:
        one, other = (deep_ep.Buffer(group, BYTES, BYTES, True, timeout_s=CASE_TIMEOUT_S) for _ in range(2))
        recv_x, _, _, _, handle, _ = dispatch(one, JOB, group.rank)
        dispatch(other, JOB, group.rank)
        packed, _, low_handle, _, _ = low(one, group.rank)
        low(other, group.rank)
        routing = JOB.topk_idx[group.rank], JOB.topk_weights[group.rank]
        calls = {
            "cached dispatch": lambda: other.dispatch(JOB.x[group.rank], handle=handle),
            "combine": lambda: other.combine(recv_x, handle),
            "low-latency combine": lambda: other.low_latency_combine(packed, *routing, low_handle),
        }
        with pytest.raises(InvalidInput) as caught:
            calls[op]()
        return str(caught.value)

    for text in ThreadGroup.run(rank, 2, timeout_s=CASE_TIMEOUT_S):
        assert "handle" in text


LOW: dict[str, tuple[dict[str, Any], str]] = {
    "float32 rows": ({"x": torch.zeros(20, 128)}, "x: got"),
    "a number": ({"x": torch.zeros((), dtype=torch.bfloat16)}, "x: got"),
    "few columns": ({"x": torch.zeros(20, 64).bfloat16()}, "x: got"),
    "int32 ids": ({"topk_idx": torch.zeros(20, 3, dtype=torch.int32)}, "topk_idx: got"),
    "fewer ids": ({"topk_idx": JOB.topk_idx[WRONG][1:]}, "topk_idx: got"),
    "ids of one dimension": (
        {"topk_idx": JOB.topk_idx[WRONG][:, 0]},
        "topk_idx: got torch.int64 [20], not contiguous, expected contiguous torch.int64 [20, K] on cpu",
    ),
    "a list of ids": ({"topk_idx": [0]}, "topk_idx: got list, expected contiguous torch.int64 [20, K] on cpu"),
    "transposed ids": ({"topk_idx": JOB.topk_idx[WRONG].T.contiguous().T}, "topk_idx: got"),
    "a bound of another type": ({"num_max_dispatch_tokens_per_rank": 20.0}, "num_max_dispatch_tokens_per_rank: got"),
    "experts of another type": ({"num_experts": [4]}, "num_experts: got"),
    "experts as a float": ({"num_experts": 4.0}, "num_experts: got"),
    "ids on another device": ({"topk_idx": JOB.topk_idx[WRONG].to("meta")}, "topk_idx: got"),
    "rows on another device": ({"x": JOB.x[WRONG].to("meta")}, "on meta"),
    "statistics on another device": (
        {"cumulative_local_expert_recv_stats": torch.zeros(2, dtype=torch.int32, device="meta")},
        "cumulative_local_expert_recv_stats: got",
    ),
    "exponents of bfloat16": ({"use_ue8m0": True}, "use_ue8m0: got"),
    "statistics": ({"cumulative_local_expert_recv_stats": torch.zeros(2)}, "cumulative_local_expert_recv_stats: got"),
    "waits": ({"dispatch_wait_recv_cost_stats": torch.zeros(2)}, "wait_recv_cost_stats: got"),
    "hook and event": ({"return_recv_hook": True, "async_finish": True}, "async_finish: got"),
}


@pytest.mark.parametrize("case", LOW)
def test_wrong_operands_of_low_latency_dispatch(case: str) -> None:
    changed, text = LOW[case]

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        low(buffer, rank)  # a size that was accepted once is still checked
        right = {"x": JOB.x[rank], "topk_idx": JOB.topk_idx[rank], "num_max_dispatch_tokens_per_rank": 20}
        right |= {"num_experts": 4, "use_fp8": False}
        buffer.low_latency_dispatch(**(right | (changed if rank == WRONG else {})))

    assert_named(raised(work), text)


def test_low_latency_with_more_tokens_than_agreed() -> None:
    errors = raised(lambda buffer, rank: low(buffer, rank, 10))
    assert all(isinstance(error, TooManyTokens) for error in errors)
    assert "20 tokens, expected at most num_max_dispatch_tokens_per_rank = 10" in str(errors[WRONG])


@pytest.mark.parametrize("elastic", [False, True], ids=["low latency", "elastic"])
def test_peers_are_told_how_many_tokens_were_too_many(elastic: bool) -> None:
    def rank(group: ThreadGroup) -> MoeRtError:
        tokens = 9 if group.rank == WRONG else 3
        x, ids = JOB.x[group.rank][:tokens], JOB.topk_idx[group.rank][:tokens]
        if elastic:
            made = deep_ep.ElasticBuffer(
                group, num_max_tokens_per_rank=8, hidden=128, num_cpu_timeout_secs=int(CASE_TIMEOUT_S)
            )
            made.dispatch(x[:3], ids[:3], num_experts=4)
        else:
            buffer = deep_ep.Buffer(group, BYTES, BYTES, True, timeout_s=CASE_TIMEOUT_S)
            buffer.low_latency_dispatch(x[:3], ids[:3], 8, 4, use_fp8=False)
        given = x, ids, 8, 4
        with pytest.raises(TooManyTokens) as caught:
            made.dispatch(x, ids, num_experts=4) if elastic else buffer.low_latency_dispatch(*given, use_fp8=False)
        return caught.value

    for error in ThreadGroup.run(rank, 2, timeout_s=CASE_TIMEOUT_S):
        assert re.search(r"\b9 tokens, expected at most (\w+ = )?8\b", str(error))


def test_a_handle_of_another_type_after_a_dispatch() -> None:
    """Peers learn of it where they dispatch, not in the low-latency buffers."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        handle = dispatch(buffer, JOB, rank)[4]
        low(buffer, rank)
        buffer.dispatch(JOB.x[rank], (1,) if rank == WRONG else handle)  # type: ignore[arg-type]

    assert_named(raised(work), "handle: got tuple")


@pytest.mark.parametrize("most", [10, 24], ids=["fewer", "more"])
def test_other_bounds_of_low_latency_tokens(most: int) -> None:
    short = dataclasses.replace(JOB, x=[x[:8] for x in JOB.x], topk_idx=[ids[:8] for ids in JOB.topk_idx])

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        for bound in (20, most if rank == WRONG else 20):
            buffer.low_latency_dispatch(short.x[rank], short.topk_idx[rank], bound, 4, use_fp8=False)

    for error in raised(work, usable=False):
        assert isinstance(error, ConfigMismatch | CallOrderMismatch)
        assert f"rank {WRONG}" in str(error) or "rank 0" in str(error)


def test_a_third_outstanding_call() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        hooks = [low(buffer, rank, return_recv_hook=rank == WRONG)[-1] for _ in range(2)]
        try:
            low(buffer, rank)
        finally:
            for hook in hooks:
                if hook is not None:
                    hook()

    assert_named(raised(work), "low_latency_dispatch while the hooks of 2 other ops were not called")


def test_a_hook_that_was_never_called() -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, hook = low(buffer, rank, return_recv_hook=rank == WRONG)
        try:
            buffer.low_latency_combine(recv_x, JOB.topk_idx[rank], JOB.topk_weights[rank], handle)
        finally:
            if hook is not None:
                hook()

    assert_named(raised(work), "low_latency_dispatch whose hook was never called")


def test_a_hook_called_twice_and_one_left_at_the_end() -> None:
    def rank(group: ThreadGroup) -> None:
        buffer = deep_ep.Buffer(group, BYTES, BYTES, True, explicitly_destroy=True, timeout_s=CASE_TIMEOUT_S)
        hooks = [low(buffer, group.rank, return_recv_hook=True)[-1] for _ in range(2)]
        hooks[0]()
        with pytest.raises(InvalidInput, match=rf"rank {group.rank}: low_latency_dispatch: hook: got a second call"):
            hooks[0]()
        with pytest.raises(InvalidInput, match=rf"rank {group.rank}: destroy: got .* low_latency_dispatch"):
            buffer.destroy()
        with pytest.raises(GroupClosed):
            low(buffer, group.rank)

    ThreadGroup.run(rank, 2, timeout_s=CASE_TIMEOUT_S)


@pytest.mark.parametrize("what", ["topk_idx", "topk_weights", "x", "out"])
def test_operands_of_low_latency_combine_on_another_device(what: str) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, _ = low(buffer, rank)
        arguments: dict[str, Any] = {
            "x": recv_x, "topk_idx": JOB.topk_idx[rank], "topk_weights": JOB.topk_weights[rank], "handle": handle,
            "out": torch.empty_like(JOB.x[rank]),
        }  # fmt: skip
        changed = {what: arguments[what].to("meta")} if rank == WRONG else {}
        buffer.low_latency_combine(**(arguments | changed))

    assert_named(raised(work), f"{what}: got")


@pytest.mark.parametrize("what", ["topk_idx", "topk_weights", "x", "zero_copy", "out"])
def test_wrong_operands_of_low_latency_combine(what: str) -> None:
    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        recv_x, _, handle, _, _ = low(buffer, rank)
        arguments: dict[str, Any] = {
            "x": recv_x, "topk_idx": JOB.topk_idx[rank], "topk_weights": JOB.topk_weights[rank], "handle": handle,
        }  # fmt: skip
        changes: dict[str, Any] = {
            "topk_idx": 3 - JOB.topk_idx[rank],
            "topk_weights": JOB.topk_weights[rank].double(),
            "x": recv_x[:, 1:],
            "zero_copy": True,
            "out": torch.empty(JOB.x[rank].numel() + 1, dtype=torch.bfloat16)[1:].view(JOB.x[rank].shape),  # 2 bytes on
        }
        buffer.low_latency_combine(**(arguments | ({what: changes[what]} if rank == WRONG else {})))

    assert_named(raised(work), f"{what}: got")


@pytest.mark.parametrize("elastic", [False, True], ids=["normal", "elastic"])
def test_a_combine_is_refused_where_its_sums_return(elastic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers wait in the dispatch of sums, so the error must be announced in the buffer of that dispatch."""
    group = ThreadGroup.make(1)[0]
    job = make_job(1, [20], 128, 3, 4)
    refused: list[Any] = []

    def refuse(exchange: Exchange, rows: Any, error: MoeRtError, *given: Any) -> None:
        refused.append(exchange._buffers[rows].spec.hidden)
        raise error

    monkeypatch.setattr(Exchange, "refuse", refuse)
    buffer: Any
    if elastic:
        buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=20, hidden=128, num_topk=3)
        routing = job.topk_idx[0], job.topk_weights[0]
        recv_x, _, _, handle, _ = buffer.dispatch(job.x[0], *routing, num_experts=4)
    else:
        buffer = deep_ep.Buffer(group, BYTES, timeout_s=CASE_TIMEOUT_S)
        recv_x, _, _, _, handle, _ = dispatch(buffer, job, 0)
    buffer.combine(recv_x, handle, bias=job.x[0])
    with pytest.raises(InvalidInput, match="x: got"):
        buffer.combine(recv_x.float(), handle, bias=job.x[0])
    assert refused == [128]


def test_low_latency_memory_and_mode() -> None:
    def rank(group: ThreadGroup) -> None:
        enough = low_latency_bytes(20, JOB.x[0].shape[1], 4)
        for size, mode, name in ((enough - 1, True, "num_rdma_bytes"), (BYTES, False, "low_latency_mode")):
            buffer = deep_ep.Buffer(group, BYTES, size, mode, timeout_s=CASE_TIMEOUT_S)
            with pytest.raises(InvalidInput, match=name):
                low(buffer, group.rank)
        low(deep_ep.Buffer(group, BYTES, enough, True, timeout_s=CASE_TIMEOUT_S), group.rank)

    ThreadGroup.run(rank, 2, timeout_s=CASE_TIMEOUT_S)


@pytest.mark.parametrize("mode", ["cached dispatch", "low-latency"])
def test_a_dead_rank_is_named(mode: str) -> None:
    """Its process ends between two ops; the other rank raises in its next."""
    read, write = os.pipe()
    store = f"file:///dev/shm/moe_rt_deep_ep_{os.getpid()}_{mode[0]}"
    children = [pid for rank in range(2) if (pid := _start(rank, store, mode, write))]
    for pid in children:
        os.waitpid(pid, 0)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.read() == "PeerDead 1\n"
    os.unlink(store.removeprefix("file://"))


def _start(rank: int, store: str, mode: str, write: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        buffer = deep_ep.Buffer(torch.distributed.group.WORLD, BYTES, BYTES, True, timeout_s=CASE_TIMEOUT_S)
        handle = dispatch(buffer, JOB, rank)[4]
        low(buffer, rank)
        if rank == WRONG:
            os._exit(3)
        deadline = time.monotonic() + 30
        try:
            while time.monotonic() < deadline:
                buffer.dispatch(JOB.x[rank], handle=handle) if mode == "cached dispatch" else low(buffer, rank)
        except PeerDead as error:
            os.write(write, f"PeerDead {error.peer}\n".encode())
    finally:
        os._exit(0)


def test_what_is_not_implemented_says_what_to_do() -> None:
    group = ThreadGroup.make(1)[0]
    for make in (
        lambda: deep_ep.ElasticBuffer(group),
        lambda: deep_ep.ElasticBuffer(group, num_bytes=1000),
        lambda: deep_ep.ElasticBuffer(group, num_bytes=1 << 21, num_cpu_bytes=1 << 21),
        lambda: deep_ep.ElasticBuffer(group, num_bytes=1 << 21).engram_write(torch.zeros(1)),
        lambda: deep_ep.ElasticBuffer(group, num_bytes=1 << 21).pp_send(torch.zeros(1), 0),
        lambda: deep_ep.ElasticBuffer(group, num_bytes=1 << 21).agrs_new_session(),
        lambda: deep_ep.ElasticBuffer.get_pp_buffer_size_hint(1, 1),
        lambda: deep_ep.ElasticBuffer(group, num_bytes=1 << 21).get_comm_stream(),
        lambda: deep_ep.Buffer(group, enable_shrink=True),
        lambda: deep_ep.Buffer(group, comm=object()),
        lambda: deep_ep.Buffer(group).get_local_buffer_tensor(torch.int8),
        lambda: deep_ep.Buffer(group).get_comm_stream(),
        lambda: deep_ep.Buffer(group).low_latency_query_mask_buffer(torch.zeros(1)),
        lambda: deep_ep.Buffer.set_num_sms(3),
        lambda: deep_ep.Config(20, 8, 8),
    ):
        with pytest.raises(InvalidConfig, match="expected"):
            make()


def test_destroy_closes_every_buffer_that_was_made() -> None:
    """A buffer that a larger batch has outgrown is closed as well."""

    def rank(group: ThreadGroup) -> None:
        buffer = deep_ep.Buffer(group, BYTES, BYTES, True, explicitly_destroy=True, timeout_s=CASE_TIMEOUT_S)
        for tokens in (20, 200):
            dispatch(buffer, make_job(2, [tokens, tokens], 128, 3, 4), group.rank)
        low(buffer, group.rank)
        made = [inner for exchange in buffer._exchanges for inner in exchange.buffers]
        assert len(made) == 3
        buffer.destroy()
        for inner in made:
            with pytest.raises(GroupClosed):
                inner.token_window(1)

    ThreadGroup.run(rank, 2)
