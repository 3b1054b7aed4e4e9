"""Sizes that DeepEP demands, added up part by part, with the edges at which it refuses a buffer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compat.oracle import make_job
from compat.test_normal import dispatch
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep import config, sizes
from moe_rt.compat.deep_ep.exchange import Exchange
from moe_rt.compat.deep_ep.low_latency import LowLatency
from moe_rt.errors import InvalidConfig, InvalidInput

INT, INT64, FLOAT, INT4 = 4, 8, 4, 16  # bytes of C++ types
ALIGNED = 2 << 20


def up(number: int, multiple: int) -> int:
    return (number + multiple - 1) // multiple * multiple


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 16, 24])
@pytest.mark.parametrize(("num_sms", "hidden_bytes", "recv"), [(20, 14336, 260), (7, 128, 30), (1, 64, 10)])
def test_queues_between_ranks(num_ranks: int, num_sms: int, hidden_bytes: int, recv: int) -> None:
    made = deep_ep.Config(num_sms, 6, recv, 5, recv)
    assert made.num_max_rdma_chunked_recv_tokens == recv  # a multiple of 5 already
    channels, peers, nodes = num_sms // 2, min(num_ranks, 8), max(num_ranks // 8, 1)
    token = hidden_bytes + 8 + 128 * INT64 + 128 * FLOAT + 128 * FLOAT  # the row, its source, ids, weights and scales
    each = channels * peers
    assert made.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) == up(
        each * (2 * nodes + 3) * INT + each * recv * token, 128
    )
    sent_and_received = 2 * channels * nodes * ((2 * 8 + 2) * INT + recv * (token + INT4))
    hint = made.get_rdma_buffer_size_hint(hidden_bytes, num_ranks)
    assert hint == (up(sent_and_received, 128) if num_ranks > 8 else 0)


def test_buffers_of_all_sizes_and_ops_end_with_the_buffer() -> None:
    """A DeepEP buffer has an exchange for rows, and one for low latency; each has a buffer for each size of rows."""
    ended: list[str] = []

    class Part:
        def __init__(self, name: str) -> None:
            self.close = self.complete = lambda: ended.append(name)

    first, second = object.__new__(Exchange), object.__new__(Exchange)
    for exchange, names in ((first, "abc"), (second, "de")):
        made = [Part(name) for name in names]
        exchange._buffers, exchange._outgrown = {0: made[0], 1: made[1]}, made[2:]  # type: ignore
    whole: Any = object.__new__(deep_ep.Buffer)
    whole.explicitly_destroy, whole._exchanges = True, [first, second]
    whole._low_latency = SimpleNamespace(outstanding=[])
    whole.destroy()
    assert ended == list("abcde")
    ops: Any = object.__new__(LowLatency)
    ops.outstanding = [Part("f"), Part("g")]
    ops._complete_all()
    assert ended[5:] == ["f", "g"]


def test_a_number_of_ranks_that_fills_no_node() -> None:
    with pytest.raises(InvalidConfig, match=r"^num_ranks: got 12, expected a multiple of 8 "):
        deep_ep.Config().get_rdma_buffer_size_hint(128, 12)


def test_numbers_that_deep_ep_refuses() -> None:
    def said(*numbers: int) -> str:
        try:
            deep_ep.Config(*numbers)
        except InvalidConfig as error:
            return str(error).partition(" (moe-rt")[0]
        return ""

    assert said(0) == said(20, 1, 2) == said(20, 255, 256) == said(20, 6, 256, 1, 2) == said(20, 6, 256, 128, 256) == ""
    assert said(-1) == "num_sms: got -1, expected at least 0"
    nvl = "num_max_nvl_chunked_send_tokens: got {}, expected 1 to {}, below the received ones"
    assert [said(20, 0, 5), said(20, 5, 5), said(20, 6, 5)] == [nvl.format(send, 4) for send in (0, 5, 6)]
    rdma = "num_max_rdma_chunked_send_tokens: got {}, expected {}"
    assert said(20, 6, 256, 0, 8) == rdma.format(0, "at least 1")
    assert said(20, 6, 256, 5, 5) == rdma.format(5, "at most 2, half of the received ones")
    assert said(20, 6, 256, 129, 256) == said(20, 6, 256, 129, 258) == ""  # rounded up to two of them
    assert deep_ep.Config(20, 6, 256, 129, 256).num_max_rdma_chunked_recv_tokens == 258
    assert deep_ep.Config() == deep_ep.Config(20, 6, 256, 6, 256)
    assert deep_ep.Config().num_max_rdma_chunked_recv_tokens == 258


def test_recommended_queues() -> None:
    """Each number of ranks has those of the largest table entry that it reaches."""
    dispatch_of = {1: (24, 256, 6, 128), 4: (6, 256, 6, 128), 16: (36, 288, 20, 128), 24: (32, 288, 8, 128)}
    combine_of = {1: (10, 256, 6, 128), 4: (9, 256, 6, 128), 8: (4, 256, 6, 128), 16: (4, 288, 12, 128),
                  24: (1, 288, 8, 128)}  # fmt: skip
    for num_ranks in range(1, 65):
        for table, get in ((dispatch_of, "get_dispatch_config"), (combine_of, "get_combine_config")):
            numbers = table[max(size for size in table if size <= num_ranks)]
            assert getattr(deep_ep.Buffer, get)(num_ranks) == deep_ep.Config(20, *numbers)


def bytes_of_dispatch(made: deep_ep.Config, num_ranks: int, row: int, num_topk: int, num_scales: int) -> int:
    queues = made.num_sms // 2 * num_ranks
    slots = queues * made.num_max_nvl_chunked_recv_tokens
    return (
        num_ranks * num_ranks * INT  # counts of each pair
        + 4 * queues * INT  # begin, end, head and tail
        + slots * row + slots * INT  # rows and their tokens
        + slots * num_topk * INT64 + slots * num_topk * FLOAT + slots * num_scales * FLOAT
    )  # fmt: skip


@pytest.mark.parametrize("given", [None, deep_ep.Config(6, 4, 16)], ids=["recommended", "given"])
@pytest.mark.parametrize("codes", [False, True], ids=["bf16", "fp8"])
def test_a_dispatch_needs_exactly_the_bytes_of_its_queues(given: deep_ep.Config | None, codes: bool) -> None:
    """A cached dispatch sends no experts."""
    job = make_job(2, [5, 7], 64, 3, 4)
    queues = given or deep_ep.Buffer.get_dispatch_config(2)
    row, num_scales = (64, 2) if codes else (128, 0)
    needed = bytes_of_dispatch(queues, 2, row, 3, num_scales)
    cached = bytes_of_dispatch(queues, 2, row, 0, num_scales)

    def rank(group: ThreadGroup) -> None:
        x: Any = job.x[group.rank]
        x = (x.to(torch.float8_e4m3fn), torch.zeros(len(x), 2)) if codes else x
        wide = tuple(part.repeat(1, 2) for part in x) if codes else x.repeat(1, 2)
        fits, small = (deep_ep.Buffer(group, size, timeout_s=CASE_TIMEOUT_S) for size in (needed, needed - 1))
        handle = dispatch(fits, job, group.rank, x, config=given)[4]
        text = f"rank {group.rank}: num_nvl_bytes: got {needed - 1}, expected {needed}, as DeepEP needs for this config"
        with pytest.raises(InvalidInput) as caught:
            dispatch(small, job, group.rank, x, config=given)
        assert str(caught.value).startswith(f"{text} (")
        assert fits.dispatch(x, handle, config=given)[0] is not None
        twice = bytes_of_dispatch(queues, 2, 2 * row, 0, 2 * num_scales)
        text = f"rank {group.rank}: num_nvl_bytes: got {needed}, expected {twice}, as DeepEP needs for this config"
        assert cached < needed < twice
        with pytest.raises(InvalidInput) as caught:
            fits.dispatch(wide, handle, config=given)
        assert str(caught.value).startswith(f"{text} (")

    ThreadGroup.run(rank, 2, timeout_s=CASE_TIMEOUT_S)


@pytest.mark.parametrize("most", [1, 16, 128])
@pytest.mark.parametrize("hidden", [128, 512, 7168])
@pytest.mark.parametrize("num_experts", [1, 8, 33, 288])
def test_buffers_of_low_latency(most: int, hidden: int, num_experts: int) -> None:
    """Two buffers, each with what is sent, what is received, and counts; scales have two bytes twice."""
    num_scales = hidden // 128
    sent = INT4 + max(2 * hidden, hidden + num_scales * FLOAT)
    returned = num_scales * 4 + 2 * hidden
    send = max(most * sent, num_experts * most * returned)
    receive = max(num_experts * most * sent, num_experts * most * returned)
    needed = 2 * (send + receive + up(num_experts * INT, 128))
    assert config.low_latency_bytes(most, hidden, num_experts) == needed
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, hidden, 4, num_experts)
    assert hint == config.low_latency_hint(most, hidden, num_experts)
    assert hint % 128 == 0
    assert needed < hint <= needed + 128


GRID = list(itertools.product((1, 2, 8), (1, 100, 4096), (8, 7168), (1, 6, 8)))


@pytest.mark.parametrize(("num_ranks", "most", "hidden", "num_topk"), GRID)
def test_buffers_of_elastic_ranks(num_ranks: int, most: int, hidden: int, num_topk: int) -> None:
    """Parts of a token begin at multiples of 32 bytes, and the whole is a multiple of 2 MiB."""
    numbers = up(num_topk * INT64 + num_topk * INT + INT, 32)  # ids, weights and the token
    of_bf16 = num_ranks * most * (up(2 * hidden, 32) + numbers)
    of_fp8 = num_ranks * most * (up(hidden, 32) + up(up(hidden, 32) // 32 * FLOAT, 32) + numbers)
    assert sizes.dispatch_bytes(num_ranks, most, 2 * hidden, 0, num_topk) == of_bf16
    assert sizes.dispatch_bytes(num_ranks, most, hidden, up(hidden, 32) // 32, num_topk) == of_fp8
    for several, parts in ((True, min(num_ranks, num_topk)), (False, num_topk)):
        returned = parts * most * (up(2 * hidden, 32) + up(num_topk * 8, 32))
        assert sizes.combine_bytes(num_ranks, most, hidden, num_topk, several) == returned
        for fp8, sent in ((False, of_bf16), (True, of_fp8)):
            whole = sizes.elastic_bytes(num_ranks, most, hidden, num_topk, fp8, several)
            assert whole == up(max(sent, returned), ALIGNED)
            group = ThreadGroup.make(num_ranks)[0]
            given = {"use_fp8_dispatch": fp8, "allow_multiple_reduction": several}
            assert deep_ep.ElasticBuffer.get_buffer_size_hint(group, most, hidden, num_topk, **given) == whole
            made = deep_ep.ElasticBuffer(group, None, 0, most, hidden, num_topk, **given)
            assert made.num_bytes == whole
    assert sizes.elastic_bytes(num_ranks, most, hidden, 0, True, True) == sizes.elastic_bytes(
        num_ranks, most, hidden, 32, True, True
    )


def test_sizes_that_an_elastic_buffer_refuses() -> None:
    group = ThreadGroup.make(1)[0]

    def said(*given: Any, **options: Any) -> str:
        with pytest.raises(InvalidConfig) as caught:
            deep_ep.ElasticBuffer(group, *given, **options)
        return str(caught.value).partition(" (moe-rt")[0]

    assert deep_ep.ElasticBuffer(group, ALIGNED).num_bytes == ALIGNED
    for size in (0, -ALIGNED, ALIGNED + 1, ALIGNED - 1, ALIGNED // 2):
        assert said(size) == f"num_bytes: got {size}, expected a positive multiple of {ALIGNED}"
    positive = "expected a positive number, or num_bytes"
    assert said() == said(hidden=8) == f"num_max_tokens_per_rank: got 0, {positive}"
    assert said(num_max_tokens_per_rank=-1, hidden=8) == f"num_max_tokens_per_rank: got -1, {positive}"
    assert said(num_max_tokens_per_rank=1) == f"hidden: got 0, {positive}"
    assert deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=1, hidden=1).num_bytes == ALIGNED
    assert said(ALIGNED, 5) == "num_cpu_bytes: got 5, expected 0: there is no Engram storage"
