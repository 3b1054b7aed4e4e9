"""The adapter for GPUs over an emulated one, without an engine: constant shapes, no value read, right sums."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from device.fake_cuda_tensors import SYNCS
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import TopKWeightAndReduce
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.integrations.vllm import token_rows
from moe_rt.integrations.vllm.token_rows import TokenRowsPrepareAndFinalize

T, H, E = 9, 16, 6
NUM_TOKENS = [5, 0, 3]
MOST = 6  # the size of a step in vLLM: tokens of the largest rank, padded
# Expert e is on rank e % 3, as in round-robin placement, or experts are in contiguous blocks.
PLACEMENTS = [(0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2)]


class NoValueRead(TorchDispatchMode):
    """Raises on ops that make the host wait for a value on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(sync in str(func) for sync in SYNCS), f"{func} reads a value"
        return func(*args, **(kwargs or {}))


class SumOverK(TopKWeightAndReduce):  # type: ignore[misc]
    """vLLM's sum of [N, K, H], whose kernel is for GPUs."""

    def apply(self, output: Any, y: Tensor, weights: Tensor, ids: Tensor, on_input: bool) -> Tensor:
        return (y if on_input else y * weights[..., None]).sum(1)


def expert(x: Tensor, number: Any) -> Tensor:
    return (x * (number + 2)).tanh()


def inputs_of(rank: int, num_topk: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    weights, ids = torch.rand(NUM_TOKENS[rank], E, generator=generator).topk(num_topk)
    return torch.randn(NUM_TOKENS[rank], H, generator=generator), weights, ids


def plain() -> FusedMoEQuantConfig:
    return FusedMoEQuantConfig.make(None)


def fp8(**scales_of: Any) -> FusedMoEQuantConfig:
    return FusedMoEQuantConfig.make(torch.float8_e4m3fn, **scales_of)


FP8 = {"blocks": fp8(block_shape=[8, 8]), "tokens": fp8(per_act_token_quant=True)}


def quantised(a: Tensor, scale: Any, quant_dtype: Any, per_act_token_quant: bool, block_shape: Any) -> Any:
    """Quantize as vLLM does, whose kernels are for GPUs."""
    assert (scale, quant_dtype) == (None, torch.float8_e4m3fn)
    blocks = a.unflatten(1, (1 if per_act_token_quant else -1, H if per_act_token_quant else block_shape[1]))
    scales = blocks.abs().amax(2).clamp(min=1e-4) / 448
    return (blocks / scales[..., None]).flatten(1).to(quant_dtype), scales


def one_layer(
    group: Any,
    num_topk: int,
    placement: tuple[int, ...],
    on_input: bool,
    reduced: bool,
    quant: FusedMoEQuantConfig,
    deferred: bool = False,
) -> None:
    sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=num_topk, num_experts=E, timeout_s=60.0)
    with Buffer(group, layout="tokens", dtype=torch.float32, placement=placement, **sizes) as buffer:
        layer = TokenRowsPrepareAndFinalize(buffer)
        x, weights, ids = inputs_of(buffer.rank, num_topk)
        with NoValueRead():
            rows, scales, _, numbers, row_weights = layer.prepare(x, weights, ids, E, None, on_input, quant, deferred)
        assert (scales is None) == (quant.quant_dtype is None or deferred)
        if scales is not None:
            assert rows.dtype is torch.float8_e4m3fn
            rows = rows.float() * scales.repeat_interleave(H // scales.shape[1], 1)
        assert rows.shape == (3 * MOST, H)
        assert numbers.dtype is torch.int64
        assert numbers.shape == row_weights.shape == (3 * MOST, num_topk)
        here = torch.tensor(placement)[numbers] == buffer.rank
        expected = sum(int((torch.tensor(placement)[inputs_of(r, num_topk)[2]] == buffer.rank).sum()) for r in range(3))
        assert int(here.sum()) == expected, "each choice of a local expert appears once, and none past the rows"
        y = torch.where(here[..., None], expert(rows[:, None], numbers[..., None]), 0)
        y[~here.any(1)] = torch.nan  # rows without a token hold arbitrary memory
        if reduced:
            y = SumOverK().apply(None, y, row_weights, numbers, on_input)
        out = torch.empty_like(x)
        with NoValueRead():
            layer.finalize(out, y, row_weights, numbers, on_input, TopKWeightAndReduceNoOP() if reduced else SumOverK())
        assert layer._sent is None
    want = torch.zeros_like(x)
    for k in range(num_topk):
        w, e = weights[:, k, None], ids[:, k, None]
        want += expert(x * w, e) if on_input else w * expert(x, e)
    close = {"rtol": 0.1, "atol": 0.1} if scales is not None else {}
    torch.testing.assert_close(out, want, **close)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["round robin", "blocks"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("num_topk", "on_input"), [(1, False), (1, True), (3, False)])
def test_sums_are_those_of_all_experts(
    monkeypatch: pytest.MonkeyPatch, num_topk: int, on_input: bool, reduced: bool, placement: tuple[int, ...]
) -> None:
    monkeypatch.setattr(token_rows, "most_tokens", lambda: MOST)
    ThreadRanks(3, EmulatedGpu()).run(one_layer, num_topk, placement, on_input, reduced, plain())


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("scales_of", FP8)
def test_fp8_travels_with_its_scales(monkeypatch: pytest.MonkeyPatch, scales_of: str, deferred: bool) -> None:
    monkeypatch.setattr(token_rows, "most_tokens", lambda: MOST)
    monkeypatch.setattr(token_rows, "moe_kernel_quantize_input", quantised)
    ThreadRanks(3, EmulatedGpu()).run(one_layer, 3, PLACEMENTS[0], False, True, FP8[scales_of], deferred)


def test_scales_of_whole_batches_are_refused() -> None:
    def experts(quant: FusedMoEQuantConfig) -> Any:
        return SimpleNamespace(quant_config=quant, expects_unquantized_inputs=False)

    sizes = dict(num_max_tokens_per_rank=T, hidden=H, num_topk=1, num_experts=E, dtype=torch.bfloat16)
    with Buffer(ThreadGroup.make(1)[0], layout="tokens", **sizes) as buffer:
        layer = TokenRowsPrepareAndFinalize(buffer)
        for quant in (plain(), *FP8.values()):
            layer.post_init_setup(experts(quant))
        for quant in (fp8(), FusedMoEQuantConfig.make(torch.int8, per_act_token_quant=True)):
            with pytest.raises(InvalidConfig, match="whose tokens travel as"):
                layer.post_init_setup(experts(quant))


def test_the_bound_is_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert token_rows.most_tokens() is None, "no step runs"
    metadata = SimpleNamespace(num_tokens_across_dp_cpu=torch.tensor([4, 7]))
    monkeypatch.setattr(token_rows, "is_forward_context_available", lambda: True)
    monkeypatch.setattr(token_rows, "get_forward_context", lambda: SimpleNamespace(dp_metadata=metadata))
    assert token_rows.most_tokens() == 7
    monkeypatch.setattr(token_rows, "get_forward_context", lambda: SimpleNamespace(dp_metadata=None))
    assert token_rows.most_tokens() is None
