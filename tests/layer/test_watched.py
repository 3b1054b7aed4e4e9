"""Hooks, anomaly mode and FLOP counters see no garbage in a layer; bad input is refused on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import CPU_HEAPS
from layer import cases_modes as cases
from support.ranks import Ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from moe_rt import MoEConfig, MoELayer
from moe_rt.group.groups import ThreadGroup
from moe_rt.ops.grouped import grouped_linear

MakeRanks = Callable[[str, int], Ranks]
FAULTY_RANK, SIZE = 1, 2
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared expert": {"shared_intermediate": 16, "shared_gate": True},
    "biases": {"weight_layout": "transposed", "biases": True, "activation": "clamped_swiglu", "interleaved": True},
    "split": {"weight_layout": "split", "activation": "geglu"},
    "no gate": {"activation": "relu2", "score_func": "sigmoid", "biases": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_tangents_are_finite_differences(make_ranks: MakeRanks, kind: str) -> None:
    make_ranks("shm", SIZE).run(cases.tangents_agree, KINDS[kind])


@pytest.fixture
def poison() -> Iterator[None]:
    """torch fills unwritten memory with NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def make(kind: str, dtype: torch.dtype = torch.float32, hidden: int = cases.HIDDEN, **options: Any) -> MoELayer:
    torch.manual_seed(0)
    sizes = {**cases.SIZES, "hidden": hidden, **KINDS[kind], **options}
    return MoELayer(MoEConfig(**sizes), ThreadGroup.make(1)[0]).to(dtype)


def see_all(layer: MoELayer) -> list[Tensor]:
    """Return a list to which hooks on the experts add rows, outputs and their gradients."""
    seen: list[Tensor] = []
    layer.experts.register_forward_hook(lambda module, given, out: seen.extend([given[0], out]))
    layer.experts.register_full_backward_hook(lambda module, before, after: seen.extend([before[0], after[0]]))
    return seen


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.float64, False), (torch.float32, True)],
    ids=["fp32", "bf16", "fp64", "compiled"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_layer_raises_no_alarm(kind: str, dtype: torch.dtype, compiled: bool) -> None:
    """Two layers, with NaN in unused output rows, raise no alarm in anomaly mode."""
    layers = [make(kind, dtype) for _ in range(2)]
    run = [torch.compile(layer, backend="aot_eager") if compiled else layer for layer in layers]
    seen = [] if compiled else see_all(layers[1])
    with torch.autograd.detect_anomaly():
        y = torch.randn(3, cases.HIDDEN, dtype=dtype)
        for layer in run:
            y = y + layer(y)[0]
        y.square().mean().backward()
    assert all(p.grad.isfinite().all() for layer in layers for p in layer.parameters())
    assert len(seen) == (0 if compiled else 4)
    assert all(t.isfinite().all() for t in seen)


@pytest.mark.usefixtures("poison")
def test_hooks_see_what_nobody_wrote_outside_of_it() -> None:
    """Outside of anomaly mode hooks see unwritten rows, which shows that the fixture above works."""
    layer = make("plain")
    seen = see_all(layer)
    layer(torch.randn(3, cases.HIDDEN, requires_grad=True))[0].sum().backward()
    assert len(seen) == 4
    assert all(t.isnan().any() for t in seen)


def dense(layer: MoELayer, x: Tensor) -> Tensor:
    """Compute the layer in plain torch, in a loop over experts."""
    idx, weights, _ = layer.router(x)
    c, parts = layer.config, layer.experts.parts(*layer.experts._shapes)
    out = torch.zeros_like(x)
    for e in range(c.num_experts):
        token, k = (idx == e).nonzero(as_tuple=True)
        if c.weight_layout == "split":
            h = F.gelu(F.linear(x[token], parts["w1"][e])) * F.linear(x[token], parts["w3"][e])
            y = F.linear(h, parts["w2"][e])
        else:
            up = F.linear(x[token], parts["up_proj"][e], parts["up_proj_bias"][e])
            y = F.linear(up.relu().square(), parts["down_proj"][e], parts["down_proj_bias"][e])
        out = out.index_add(0, token, y * weights[token, k, None])
    return out


def flops_of(run: Callable[[], Tensor]) -> dict[str, int]:
    with FlopCounterMode(display=False) as ahead:
        out = run()
    with FlopCounterMode(display=False) as back:
        out.sum().backward()
    return {"forward": ahead.get_total_flops(), "backward": back.get_total_flops()}


@pytest.mark.parametrize("kind", ["split", "no gate"])
def test_flops_are_those_of_real_rows(kind: str) -> None:
    """FLOPs, forward and backward, are those of the layer in plain torch, independent of unused capacity."""
    layer = make(kind, hidden=16, num_max_tokens_per_rank=64)
    x = torch.randn(10, 16, requires_grad=True)
    counted, expected = flops_of(lambda: layer(x)[0]), flops_of(lambda: dense(layer, x))
    torch.testing.assert_close(layer(x)[0], dense(layer, x), rtol=1e-4, atol=1e-4)
    assert counted == expected
    products, width = (3 if kind == "split" else 2), layer.config.intermediate
    assert counted["forward"] == 2 * 10 * 16 * (4 + 2 * products * width)


def test_the_profiler_counts_the_same() -> None:
    layer, x = make("split", hidden=16, num_max_tokens_per_rank=64), torch.randn(10, 16, requires_grad=True)
    totals = []
    for run in (lambda: layer(x)[0], lambda: dense(layer, x)):
        with torch.profiler.profile(with_flops=True) as profile:
            run().sum().backward()
        totals.append(sum(e.flops for e in profile.key_averages() if e.key in ("aten::mm", "aten::addmm")))
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_flops_without_data_are_those_of_all_rows(kind: str, row_wise: bool) -> None:
    """Rows are counted as if all were real, in a product and in the gradient of its weight."""
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        a, b, offs = torch.empty(9, 4), torch.empty(3, 4, 5), torch.empty(3, dtype=torch.int32)
        grad = torch.empty(9, 5)
        for left, right in ((a, b), (a.t(), grad)):
            with FlopCounterMode(display=False) as counter:
                torch.ops.moe_rt.grouped_mm(left, right, offs, row_wise)
            assert counter.get_total_flops() == 2 * 9 * 4 * 5


def test_rows_depend_on_each_other_unless_asked() -> None:
    """A product of rows by themselves is slower, so it is not the default."""
    given: list[bool] = []

    def multiply(a: Tensor, b: Tensor, offs: Tensor, row_wise: bool) -> Tensor:
        given.append(row_wise)
        return a

    x, weight, offs = torch.ones(2, 3), torch.ones(1, 3, 3), torch.tensor([2], dtype=torch.int32)
    for how in ({}, {"row_wise": True}):
        grouped_linear(x, weight, offs, multiply=multiply, **how)
    assert given == [False, True]
    schema = torch.ops.moe_rt.grouped_mm.default._schema
    assert {argument.name: argument.default_value for argument in schema.arguments}["row_wise"] is False


@pytest.mark.parametrize("heap", CPU_HEAPS)
@pytest.mark.parametrize(
    ("name", "argument"),
    [(n, a) for n in cases.ODD for a in ("x", "topk_idx") if (n, a) not in (("None", "topk_idx"),)],
)
def test_what_is_no_input_is_refused(make_ranks: MakeRanks, heap: str, name: str, argument: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.odd_argument, FAULTY_RANK, name, argument)
    assert all(text.startswith("InvalidInput: ") for text in texts), texts
    assert f"InvalidInput: {argument}: got " in texts[FAULTY_RANK]
    assert "rank 1 refused its input" in texts[0]


def test_many_layers_at_once_are_refused(make_ranks: MakeRanks) -> None:
    for texts in make_ranks("shm", SIZE).run(cases.many_at_once):
        assert len(texts) == 2
        assert all(text.startswith("InvalidInput: call: got a call under torch.vmap") for text in texts)


@pytest.mark.parametrize("heap", CPU_HEAPS)
def test_any_refusal_reaches_peers(make_ranks: MakeRanks, heap: str) -> None:
    texts = make_ranks(heap, SIZE).run(cases.refused_routing, FAULTY_RANK)
    assert texts[FAULTY_RANK].startswith("InvalidRouting: a router of one's own")
    assert texts[0].startswith("InvalidInput: ")
