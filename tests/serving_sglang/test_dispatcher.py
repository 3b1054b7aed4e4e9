"""The dispatcher around SGLang's experts: outputs on two ranks are those of one that has all experts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import Ranks
from torch import Tensor

H, F, E, K = 32, 24, 6, 3
ROUTINGS = ("any", "the first rank's", "some for nobody")


def routing(rank: int, num_tokens: int, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return tokens [T, H], weights and ids [T, K] in the dtypes of SGLang's router, and which entries count."""
    draw = torch.Generator().manual_seed(17 * rank + num_tokens)
    scores = torch.rand(num_tokens, E, generator=draw)
    if kind == "the first rank's":
        scores[:, E // 2 :] -= 1.0
    weights, ids = scores.topk(K)
    counts = torch.ones_like(ids, dtype=torch.bool)
    if kind == "some for nobody":
        counts[::2, 1] = False
    return torch.randn(num_tokens, H, generator=draw), weights, ids.int(), counts


def experts(first: int, last: int, dtype: torch.dtype) -> Any:
    """Return the members of a layer with experts first to last that SGLang's reference reads."""
    draw = torch.Generator().manual_seed(5)
    w13, w2 = torch.randn(E, 2 * F, H, generator=draw) / 4, torch.randn(E, H, F, generator=draw) / 4
    return SimpleNamespace(
        num_experts=last - first, w13_weight=w13[first:last].to(dtype), w2_weight=w2[first:last].to(dtype)
    )


class Layer:
    """SGLang's experts of one rank, between a dispatch and its combine."""

    def __init__(self, group: Any, dtype: torch.dtype) -> None:
        import sglang_stand_ins  # noqa: F401
        from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
        from sglang.srt.layers.moe.topk import StandardTopKOutput
        from sglang.srt.runtime_context import get_parallel

        from moe_rt.integrations.sglang.dispatcher import MoeRtDispatcher
        from moe_rt.integrations.sglang.settings import make_exchange

        config = MoeRunnerConfig(num_experts=E, top_k=K)
        with get_parallel().override(moe_ep_group=SimpleNamespace(cpu_group=group)):
            self.dispatcher = MoeRtDispatcher(make_exchange(config))
        first, last = (rank * E // group.size() for rank in (group.rank(), group.rank() + 1))
        here, everywhere = experts(first, last, dtype), experts(0, E, dtype)

        def forward(x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
            topk = StandardTopKOutput(weights, ids.where(counts, -1), torch.empty(len(x), E))
            sent = self.dispatcher.dispatch(hidden_states=x, topk_output=topk)
            assert sent.format.is_standard()
            made = moe_forward_native(here, sent.hidden_states, sent.topk_output, config)
            return self.dispatcher.combine(combine_input=StandardCombineInput(hidden_states=made))

        def reference(x: Tensor, weights: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
            topk = StandardTopKOutput(weights.where(counts, 0.0), ids, torch.empty(len(x), E))
            return moe_forward_native(everywhere, x, topk, config)

        self.forward, self.reference = forward, reference


def case(group: Any, batches: list[list[int]], kind: str, dtype: torch.dtype) -> None:
    """Call one layer once for each batch, given as the token counts of the ranks, and compare with the reference."""
    layer = Layer(group, dtype)
    with torch.inference_mode():
        for batch in batches:
            x, *topk = routing(group.rank(), batch[group.rank()], kind)
            x = x.to(dtype)
            out = layer.forward(x, *topk)
            assert (out.shape, out.dtype) == (x.shape, dtype)
            if len(x) > 0:  # the reference fails without tokens
                want = layer.reference(x, *topk)
                # Each expert's part is rounded to bf16, and may be larger than the sum.
                rounded = {"rtol": 0.0, "atol": 2**-6 * float(want.abs().max())} if dtype is torch.bfloat16 else {}
                torch.testing.assert_close(out, want, **rounded)


def buffers_of_two_layers(group: Any) -> int:
    layers = [Layer(group, torch.float32) for _ in range(2)]
    used = set()
    for layer in layers:
        layer.forward(*routing(group.rank(), 4, "any"))
        used.add(layer.dispatcher._exchange._buffer)
    return len(used)


@pytest.fixture(scope="module")
def two(make_ranks: Callable[[str, int], Ranks]) -> Ranks:
    return make_ranks("shm", 2)


@pytest.mark.parametrize("kind", ROUTINGS)
@pytest.mark.parametrize("one", [0, 1, 17])
@pytest.mark.parametrize("other", [0, 1, 17])
def test_outputs_are_those_of_all_experts(two: Ranks, one: int, other: int, kind: str) -> None:
    two.run(case, [[one, other]], kind, torch.float32)


def test_batches_of_any_size_follow_each_other(two: Ranks) -> None:
    """Batches may grow: the second exceeds the first's capacity on one rank only, and the last the second's on both."""
    two.run(case, [[1, 0], [0, 200], [17, 1], [0, 0], [300, 300]], "any", torch.float32)


def test_bf16(two: Ranks) -> None:
    two.run(case, [[17, 1]], "any", torch.bfloat16)


def test_layers_share_a_buffer(two: Ranks) -> None:
    assert two.run(buffers_of_two_layers) == [1, 1]
