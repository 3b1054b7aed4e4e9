"""Rank functions for tests of rows that belong to tokens (layout="tokens")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from support.ranks import meet
from support.rounds import CPU, expected_once
from support.routing import buffer_kwargs, make_inputs, make_spec
from torch import Tensor

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.buffer.handle import Handle
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidConfig, MoeRtError
from moe_rt.lab.testing.rounds import play


def outcome(act: Callable[[], Any]) -> str:
    """Return "<error class>: <message>", or "no error"."""
    try:
        act()
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def dispatched(buffer: Buffer) -> tuple[Tensor, Tensor, Handle]:
    """Dispatch rows from every rank to every rank."""
    inputs = make_inputs(buffer.spec, [9] * buffer.num_ranks, 5, "topk")
    x, idx, weights = (each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights))
    return buffer.dispatch(x, idx, weights)


def bounded_round(group: Any, spec: BufferSpec, max_tokens: int) -> None:
    inputs = make_inputs(spec, [max_tokens, 0, 3], 4)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        play(buffer, inputs, expected_once(spec, inputs, 4, max_tokens), CPU, max_tokens=max_tokens)


def _experts_of_tokens(rows: Tensor, ids: Tensor, row_weights: Tensor, w: Tensor) -> Tensor:
    """Return each row's weighted sum over a rank's experts: w [L, H, H], ids and row_weights [N, K]."""
    out = torch.zeros_like(rows)
    for k in range(ids.shape[1]):
        at = ids[:, k] >= 0
        made = torch.einsum("nh,nho->no", rows[at], w[ids[at, k].long()]) * row_weights[at, k, None]
        out = out.index_add(0, at.nonzero()[:, 0], made)
    return out


def both_layouts(group: Any) -> None:
    """Compare output and gradients of linear experts over a buffer of each layout."""
    num_ranks = group.size if isinstance(group.size, int) else group.size()
    spec = make_spec(num_ranks, dtype=torch.float64)
    inputs = make_inputs(spec, [12, 0, 7], 11)
    found: dict[str, list[Tensor]] = {}
    for layout in ("experts", "tokens"):
        with Buffer(group, timeout_s=60.0, **buffer_kwargs(replace(spec, layout=layout))) as buffer:
            rank = buffer.rank
            local = spec.placement.local_experts(rank)
            w = torch.randn(9, 20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
            w = w[list(local)].requires_grad_()
            x, weights = inputs.xs[rank].clone().requires_grad_(), inputs.topk_weights[rank].clone().requires_grad_()
            recv_x, recv_weights, handle = buffer.dispatch(x, inputs.topk_idx[rank], weights)
            n = int(handle.offs[-1])
            if handle.recv_topk_idx is not None:
                y = _experts_of_tokens(recv_x[:n], handle.recv_topk_idx[:n], recv_weights[:n], w)
                out = buffer.combine(y, None, handle)
            else:
                experts = torch.arange(len(local)).repeat_interleave(handle.num_recv_tokens_per_expert)
                y = torch.einsum("nh,nho->no", recv_x[:n], w[experts])
                out = buffer.combine(y, recv_weights, handle)
            out.pow(2).sum().backward()
            assert x.grad is not None
            assert weights.grad is not None
            found[layout] = [out.detach(), x.grad, weights.grad, torch.zeros_like(w) if w.grad is None else w.grad]
    for got, wanted in zip(found["tokens"], found["experts"], strict=True):
        torch.testing.assert_close(got, wanted)


def wrong_weights(group: Any, layout: str, faulty_rank: int) -> str:
    spec = make_spec(3, layout=layout)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        recv_x, recv_weights, handle = dispatched(buffer)
        right, wrong = (None, recv_weights) if spec.by_token else (recv_weights, None)

        def act() -> None:
            buffer.combine(recv_x, wrong if buffer.rank == faulty_rank else right, handle)
            buffer.check()

        meet(group)
        text = outcome(act)
        if buffer.heap != "loopback":
            buffer.combine(recv_x, right, handle)
        return text


def retried(group: Any) -> tuple[int, int]:
    """Return this rank's capacity after an overflow, and the number of rows it needed."""
    spec = make_spec(3, layout="tokens", capacity_factor=0.1, overflow="retry")
    inputs = make_inputs(spec, [12, 3, 7], 2)
    expected = expected_once(replace(spec, capacity_factor=None), inputs, 2)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        play(buffer, inputs, expected, CPU)
        return buffer.capacity, len(expected.received[buffer.rank].rows)


def overflowing(group: Any) -> str:
    spec = make_spec(3, layout="tokens", capacity_factor=0.1)
    inputs = make_inputs(spec, [12] * 3, 2, "one_expert")
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        mine = [each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
        return outcome(lambda: buffer.dispatch(*mine))


def overwritten(group: Any, faulty_rank: int, name: str, op: str) -> str:
    """One number of the faulty rank's plan is out of bounds."""
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(make_spec(3, layout="tokens"))) as buffer:
        recv_x, recv_weights, handle = dispatched(buffer)
        if buffer.rank == faulty_rank:  # the indices are in cuda/protocol/core/plan.h
            rows, ids = 12 + 4 * buffer.num_ranks * buffer.spec.num_max_tokens_per_rank, buffer._engine.ids_at
            where = {"mark": 0, "num_pulled": 5, "num_rows": 11, "row": rows, "k": (rows + ids) // 2}[name]
            handle.recv_plan = handle.recv_plan.clone()
            handle.recv_plan[where] = 2**30 + 12345
        engine, plans, grad_out = buffer._engine, (handle.recv_plan, handle.send_plan), torch.zeros(9, 20)
        calls: dict[str, Callable[[], Any]] = {
            "combine": lambda: buffer.combine(recv_x, None, handle),
            "combine_tokens_backward": lambda: engine.combine_tokens_backward(
                grad_out, handle.recv_plan, len(recv_x), 0
            ),
            "dispatch_backward": lambda: engine.dispatch_backward(recv_x, recv_weights, *plans, 0),
        }
        return outcome(calls[op])


def too_few_rows(group: Any, faulty_rank: int) -> str:
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(make_spec(3, layout="tokens"))) as buffer:
        recv_x, _, handle = dispatched(buffer)
        n = int(handle.offs[-1])

        def act() -> None:
            buffer.combine(recv_x[: n - (buffer.rank == faulty_rank)], None, handle)
            buffer.check()

        return outcome(act)


def other_layouts(group: Any) -> str:
    spec = make_spec(2, layout=["experts", "tokens"][group.rank])
    return outcome(lambda: Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)))


def no_such_layout(group: Any) -> str:
    kwargs = buffer_kwargs(make_spec(2)) | ({"layout": "rows"} if group.rank == 0 else {})
    return outcome(lambda: Buffer(group, timeout_s=60.0, **kwargs))


def layer_over_tokens() -> None:
    config = MoEConfig(hidden=8, intermediate=8, num_experts=4, num_topk=2, num_max_tokens_per_rank=4)
    sizes = {"num_max_tokens_per_rank": 4, "hidden": 8, "num_topk": 2, "num_experts": 4}
    with (
        Buffer(None, dtype=torch.float32, layout="tokens", **sizes) as buffer,
        pytest.raises(InvalidConfig, match=r"buffer.layout: got tokens, expected experts as in the layer"),
    ):
        MoELayer(config, buffer=buffer)


def asks_for_rows_of_experts() -> None:
    with Buffer(None, **buffer_kwargs(make_spec(1, layout="tokens"))) as buffer:
        _, _, handle = dispatched(buffer)
        with pytest.raises(InvalidConfig, match=r"num_recv_tokens_per_expert: got rows of tokens .* recv_topk_idx"):
            _ = handle.num_recv_tokens_per_expert
        with pytest.raises(InvalidConfig, match="row_experts: got rows of tokens"):
            handle.row_experts(9)


def backward_of_the_other_layout() -> None:
    """Call the backward of the other layout, as torch's dispatcher would; the group continues."""
    for layout in ("experts", "tokens"):
        with Buffer(None, **buffer_kwargs(make_spec(1, layout=layout))) as buffer:
            recv_x, recv_weights, handle = dispatched(buffer)
            engine, grad_out = buffer._engine, torch.zeros(9, 20)
            calls = {
                "experts": partial(engine.combine_tokens_backward, grad_out, handle.recv_plan, len(recv_x), 0),
                "tokens": partial(engine.combine_backward, grad_out, recv_x, recv_weights, handle.recv_plan, 0),
            }
            assert outcome(calls[layout]).startswith("InvalidInput: recv_weights: got ")
            buffer.combine(recv_x, None if layout == "tokens" else recv_weights, handle)


def bytes_written(group: Any, layout: str) -> tuple[int, int, int]:
    """Return the bytes of recv_x written by a dispatch of 64 tokens a rank with 4 experts each, the tokens received,
    and the number of their copies."""
    spec = make_spec(2, layout=layout, num_max_tokens_per_rank=64, hidden=8192, num_topk=4, dtype=torch.bfloat16)
    inputs = make_inputs(spec, [64, 64], 1, "topk")
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer:
        rank = buffer.rank
        mine = (inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
        recv_x = buffer.dispatch(*mine)[0]
        memory = recv_x.data_ptr()
        recv_x.fill_(float("nan"))
        del recv_x
        recv_x = buffer.dispatch(*mine)[0]
        assert recv_x.data_ptr() == memory, "outputs of a mebibyte and more come from recycled memory"
        here = [torch.isin(idx, torch.tensor(spec.placement.local_experts(rank))) for idx in inputs.topk_idx]
        came, copies = (sum(int(count(h)) for h in here) for count in (lambda h: h.any(1).sum(), torch.sum))
        return int((~recv_x.isnan()).sum()) * recv_x.itemsize, came, copies
