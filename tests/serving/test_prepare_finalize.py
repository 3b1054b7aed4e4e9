"""The adapter's contract over a real buffer, without an engine: rows, ids and weights in, sums out."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.integrations.vllm.prepare_finalize import MoeRtPrepareAndFinalize

T, H, E = 9, 16, 4


@pytest.fixture(params=[1, 3])
def layer(request: pytest.FixtureRequest) -> Iterator[MoeRtPrepareAndFinalize]:
    sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=request.param, num_experts=E, dtype=torch.float32)
    with Buffer(ThreadGroup.make(1)[0], **sizes) as buffer:
        yield MoeRtPrepareAndFinalize(buffer)


def routing(num_topk: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    weights, ids = torch.rand(T, E).topk(num_topk)
    return torch.randn(T, H), weights, ids


def experts(rows: Tensor, ids: Tensor) -> Tensor:
    """Expert e multiplies by e + 2 and is not linear."""
    return (rows * (ids + 2)).tanh()


def expected(x: Tensor, weights: Tensor, ids: Tensor, on_input: bool) -> Tensor:
    out = torch.zeros_like(x)
    for t in range(T):
        for w, e in zip(weights[t], ids[t], strict=True):
            out[t] += experts(x[t] * w, e) if on_input else w * experts(x[t], e)
    return out


@pytest.mark.parametrize("on_input", [False, True])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_sums_are_those_of_all_experts(
    layer: MoeRtPrepareAndFinalize, on_input: bool, reduced: bool, transposed: bool
) -> None:
    num_topk = layer._buffer.spec.num_topk
    if on_input and num_topk > 1:
        return  # vLLM allows this with one expert per token
    x, weights, ids = routing(num_topk)
    if transposed:
        x = x.t().contiguous().t()
    with torch.no_grad():
        rows, scales, _, row_ids, ones = layer.prepare(x, weights, ids, E, None, on_input, None, True)
        assert scales is None
        assert rows.shape == (T * num_topk, H)
        assert row_ids.dtype is torch.int32
        assert row_ids.shape == ones.shape == (len(rows), 1)
        y = experts(rows, row_ids)
        out = torch.empty_like(x)
        assert out.is_contiguous() != transposed
        reduce = TopKWeightAndReduceNoOP()
        layer.finalize(out, y if reduced else y[:, None], ones, row_ids, on_input, reduce)
    assert layer._sent is None, "the handle has gone"
    torch.testing.assert_close(out, expected(x, weights, ids, on_input))


def test_experts_that_want_quantised_tokens_are_refused(layer: MoeRtPrepareAndFinalize) -> None:
    def kernel(dtype: Any, unquantised: bool) -> Any:
        return SimpleNamespace(quant_config=SimpleNamespace(quant_dtype=dtype), expects_unquantized_inputs=unquantised)

    layer.post_init_setup(kernel(None, False))
    layer.post_init_setup(kernel(torch.float8_e4m3fn, True))
    with pytest.raises(InvalidConfig, match=r"whose tokens travel as torch\.float8_e4m3fn, expected experts that take"):
        layer.post_init_setup(kernel(torch.float8_e4m3fn, False))
