"""deep_ep copies what it still needs of a caller's tensors, makes buffers of the right size, and returns no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compat.oracle import make_job, received, visits
from support.ranks import CASE_TIMEOUT_S

from moe_rt import ThreadGroup
from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep import exchange, fp8, sizes
from moe_rt.errors import InvalidConfig

BYTES, HIDDEN, MOST = int(2e9), 128, 16
JOB = make_job(2, [8, 8], HIDDEN, 3, 4)


def on_ranks(work: Callable[[deep_ep.Buffer, int], Any], num_ranks: int = 2) -> list[Any]:
    def rank(group: ThreadGroup) -> Any:
        buffer = deep_ep.Buffer(
            group, BYTES, BYTES, low_latency_mode=True, explicitly_destroy=True, timeout_s=CASE_TIMEOUT_S
        )
        result = work(buffer, group.rank)
        buffer.destroy()
        return result

    return ThreadGroup.run(rank, num_ranks, timeout_s=CASE_TIMEOUT_S)


def test_ids_of_a_normal_dispatch_may_change() -> None:
    """A repeated dispatch goes where the first one went."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        idx = JOB.topk_idx[rank].clone()
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        given = {"topk_idx": idx, "topk_weights": JOB.topk_weights[rank]}
        *_, handle, _ = buffer.dispatch(JOB.x[rank], **layout, **given)
        idx.fill_(-1)
        again, *_ = buffer.dispatch(JOB.x[rank], handle=handle)
        assert torch.equal(again, received(JOB, rank)[0])

    on_ranks(work)


def test_ids_of_a_low_latency_dispatch_may_change() -> None:
    """Entries that the caller has masked since are left out of combine."""

    def work(buffer: deep_ep.Buffer, rank: int) -> None:
        idx = JOB.topk_idx[rank].clone()
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(JOB.x[rank], idx, MOST, 4, use_fp8=False)
        idx[:, 1:] = -1
        out, _, _ = buffer.low_latency_combine(recv_x, idx, JOB.topk_weights[rank], handle)
        total = JOB.topk_weights[rank][:, :1] * (idx[:, :1] >= 0)
        torch.testing.assert_close(out.float(), JOB.x[rank].float() * total, rtol=2**-7, atol=1e-6)

    on_ranks(work)


@pytest.mark.parametrize("num_experts", [2, 6, 8, 10, 18])
@pytest.mark.parametrize("alignment", [1, 16])
def test_counts_without_experts_are_rounded_up(num_experts: int, alignment: int) -> None:
    """Ids decide the counts of a dispatch with experts, the callers' counts those of one without."""
    job = make_job(2, [8, 8], HIDDEN, 2, num_experts)

    def work(buffer: deep_ep.Buffer, rank: int) -> list[int]:
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(job.topk_idx[rank], num_experts)
        layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
        _, _, _, counts, _, _ = buffer.dispatch(job.x[rank], **layout, expert_alignment=alignment)
        return counts

    entries, half = torch.cat(job.topk_idx), num_experts // 2
    expected = [-(-int((entries == expert).sum()) // alignment) * alignment for expert in range(num_experts)]
    assert on_ranks(work) == [expected[:half], expected[half:]]


@pytest.mark.parametrize("where", ["normal", "elastic"])
def test_nothing_returns_to_a_rank_whose_tokens_visit_no_expert(where: str) -> None:
    def work(group: ThreadGroup) -> None:
        rank = group.rank
        idx = torch.full_like(JOB.topk_idx[0], -1) if rank == 0 else JOB.topk_idx[1]
        given: dict[str, Any] = {"topk_idx": idx, "topk_weights": JOB.topk_weights[rank]}
        if where == "elastic":
            sizes_of_buffer = {
                "num_max_tokens_per_rank": MOST,
                "hidden": HIDDEN,
                "num_cpu_timeout_secs": int(CASE_TIMEOUT_S),
            }
            elastic = deep_ep.ElasticBuffer(group, **sizes_of_buffer)
            recv_x, _, _, handle, _ = elastic.dispatch(JOB.x[rank], **given, num_experts=4)
            out, _, _ = elastic.combine(recv_x, handle)
        else:
            buffer = deep_ep.Buffer(group, BYTES, timeout_s=CASE_TIMEOUT_S)
            per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, 4)
            layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}
            recv_x, *_, handle, _ = buffer.dispatch(JOB.x[rank], **layout, **given)
            out, _, _ = buffer.combine(recv_x, handle, bias=torch.zeros_like(JOB.x[rank]))
        visited = visits(JOB, rank).sum(1, keepdim=True) * (rank == 1)
        assert torch.equal(out, (JOB.x[rank].float() * visited).bfloat16())

    ThreadGroup.run(work, 2, timeout_s=CASE_TIMEOUT_S)


@pytest.mark.parametrize(
    ("num_tokens", "bound", "expected"), [(0, None, 32), (32, None, 32), (33, None, 64), (64, None, 64), (5, 48, 48)]
)
def test_buffers_hold_a_power_of_two_or_the_bound(
    monkeypatch: pytest.MonkeyPatch, num_tokens: int, bound: int | None, expected: int
) -> None:
    """Making one lasts no longer than an op may wait."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(exchange, "Buffer", lambda group, **options: made.append(options))
    rows = exchange.Rows("tokens", HIDDEN, 2, 4, torch.bfloat16)
    exchange.Exchange(ThreadGroup.make(1)[0], 7.0)._make(rows, num_tokens, bound)
    (options,) = made
    assert (options["num_max_tokens_per_rank"], options["timeout_s"], options["init_timeout_s"]) == (expected, 7.0, 7.0)


def test_scales_are_the_smallest_powers_of_two_that_suffice() -> None:
    """Also if the largest element is one times the largest code."""
    largest = 448.0 * torch.tensor([1.0, 2.0, 0.5, 1.25, 2**-6])
    x = torch.zeros(5, fp8.BLOCK)
    x[:, 3] = largest
    codes, scales = fp8.cast(x.bfloat16(), True, False)
    assert scales.flatten().tolist() == [1.0, 2.0, 0.5, 2.0, 2**-6]
    torch.testing.assert_close(codes.float()[:, 3] * scales[:, 0], largest, rtol=2**-4, atol=0)


def test_a_size_hint_counts_scales_of_fp8_rows() -> None:
    """The rows of dispatch decide it if there are many ranks."""
    of_dispatch = sizes.dispatch_bytes(64, 1024, 7168, 7168 // 32, 8)
    assert sizes.elastic_bytes(64, 1024, 7168, 8, True, True) == -(-of_dispatch // sizes.ALIGNMENT) * sizes.ALIGNMENT
    assert of_dispatch == 64 * 1024 * (7168 + 896 + 128)


def test_a_number_of_sms_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is for the configs that are recommended from then on."""
    monkeypatch.setattr(deep_ep.Buffer, "num_sms", 20)
    for number in (2, 16, 24):
        deep_ep.Buffer.set_num_sms(number)
        configs = deep_ep.Buffer.get_dispatch_config(8), deep_ep.Buffer.get_combine_config(8)
        assert [config.num_sms for config in configs] == [number, number]
    for odd in (3, 9, 21):
        with pytest.raises(InvalidConfig, match=f"new_num_sms: got {odd}, expected an even number"):
            deep_ep.Buffer.set_num_sms(odd)
