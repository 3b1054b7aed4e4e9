"""The layer: equal to a dense loop on any number of ranks, exact gradients, finite with poisoned memory, compilable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HEAPS
from layer import cases_layer as cases
from support.ranks import Ranks
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_rt import Buffer, MoELayer
from moe_rt.errors import InvalidConfig

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize(
    ("num_tokens", "changes"),
    [
        ([10], {}),
        ([10, 4], {}),
        ([3, 0, 10], {"score_func": "sigmoid"}),
        ([1, 10, 0, 7], {"placement": [3, 2, 1, 0, 0, 1, 2]}),
    ],
    ids=lambda v: str(v).replace(" ", "") if isinstance(v, list) else "",
)
def test_equals_dense_loop(make_ranks: MakeRanks, heap: str, num_tokens: list[int], changes: dict[str, Any]) -> None:
    results = make_ranks(heap, len(num_tokens)).run(cases.forward_backward, num_tokens, changes)
    router = results[0]["params"][0].requires_grad_()
    gate_up = torch.empty(cases.EXPERTS, 2 * cases.INTERMEDIATE, cases.HIDDEN)
    down = torch.empty(cases.EXPERTS, cases.HIDDEN, cases.INTERMEDIATE)
    for r in results:
        gate_up[r["expert_ids"]], down[r["expert_ids"]] = r["params"][1], r["params"][2]
    gate_up.requires_grad_(), down.requires_grad_()
    xs = [cases.inputs_for(rank, n).requires_grad_() for rank, n in enumerate(num_tokens)]
    outs = [cases.dense_layer(x, router, gate_up, down, changes.get("score_func", "softmax")) for x in xs]
    sum((o * torch.linspace(-1, 1, cases.HIDDEN)).sum() for o in outs).backward()

    close = dict(rtol=1e-4, atol=1e-5)
    for r, x, out in zip(results, xs, outs, strict=True):
        torch.testing.assert_close(r["out"], out.detach(), **close)
        torch.testing.assert_close(r["x"], x.grad, **close)
        torch.testing.assert_close(r["gate_up"], gate_up.grad[r["expert_ids"]], **close)
        torch.testing.assert_close(r["down"], down.grad[r["expert_ids"]], **close)
    torch.testing.assert_close(sum(r["router"] for r in results), router.grad, **close)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_gradcheck_through_the_layer(score_func: Any) -> None:
    """Gradients of x, router (hence routing weights) and both expert weights are exact in fp64, losses included."""
    cfg = cases.config(hidden=6, intermediate=4, num_experts=4, num_topk=2, num_max_tokens_per_rank=5,
                       dtype=torch.float64, score_func=score_func)  # fmt: skip
    torch.manual_seed(0)
    layer = MoELayer(cfg).double()
    names = [n for n, _ in layer.named_parameters()]

    def call(x: torch.Tensor, *params: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, aux = torch.func.functional_call(layer, dict(zip(names, params, strict=True)), (x,))
        return out, aux.loss

    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(call, (x, *layer.parameters()))
    layer.buffer.close()


@pytest.mark.parametrize("size", [1, 3])
def test_poisoned_memory_stays_out_of_gradients(make_ranks: MakeRanks, size: int) -> None:
    for finite in make_ranks("shm", size).run(cases.two_steps_with_poisoned_memory):
        assert finite == [True] * 4


def test_traces_with_fake_tensors() -> None:
    """Forward and backward of the layer depend only on shapes, not on values."""
    layer = MoELayer(cases.config())
    real = {name: p.detach() for name, p in layer.named_parameters()}
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(p).requires_grad_() for name, p in real.items()}
        x = torch.empty(2, 5, cases.HIDDEN, requires_grad=True)
        out, aux = torch.func.functional_call(layer, fakes, (x,))
        grads = torch.autograd.grad(out.sum() + aux.loss, [x, *fakes.values()])
    assert out.shape == x.shape
    assert [g.shape for g in grads] == [x.shape, *(p.shape for p in real.values())]
    layer.buffer.close()


def test_initial_parameters_do_not_depend_on_ranks(make_ranks: MakeRanks) -> None:
    [(_, whole, router)] = make_ranks("shm", 1).run(cases.initial_parameters)
    for ids, local, same_router in make_ranks("shm", 3).run(cases.initial_parameters):
        assert torch.equal(local, whole[ids])
        assert torch.equal(same_router, router)


def test_layers_share_a_buffer(make_ranks: MakeRanks) -> None:
    assert make_ranks("shm", 2).run(cases.shares_buffer) == [(True, True, 2)] * 2


def test_buffer_of_other_sizes_is_refused() -> None:
    kwargs: dict[str, Any] = dict(num_max_tokens_per_rank=10, hidden=8, num_topk=3, num_experts=7, dtype=torch.float32)
    with Buffer(None, **kwargs) as buffer, pytest.raises(InvalidConfig, match=r"buffer\.hidden: got 8, expected 16"):
        MoELayer(cases.config(), buffer=buffer)


def test_buffer_of_another_placement_is_refused(make_ranks: MakeRanks) -> None:
    """A buffer of another placement is refused: it would send rows to ranks without their experts."""

    def case(group: Any) -> None:
        layer = MoELayer(cases.config(), group)
        swapped = [1 - rank for rank in layer.buffer.spec.placement.ranks]
        with (
            Buffer(group, **{**layer.config.buffer_sizes(), "placement": swapped}) as buffer,
            pytest.raises(InvalidConfig, match=r"buffer\.placement: got"),
        ):
            layer(torch.randn(2, cases.HIDDEN), buffer=buffer)
        layer.buffer.close()

    make_ranks("threads", 2).run(case)


def test_balanced_routing_has_unit_loss() -> None:
    """The load-balancing loss is 1 when every expert gets the same share, and at most E / K times the largest share."""
    layer = MoELayer(cases.config(num_topk=1))
    with torch.no_grad():
        layer.router.weight.zero_()[:, :7] = torch.eye(7) * 50
    x = torch.zeros(7, cases.HIDDEN)
    x[:, :7] = torch.eye(7)
    aux = layer(x)[1]
    torch.testing.assert_close(aux.load_balancing_loss, torch.tensor(1.0))
    assert aux.tokens_per_expert.tolist() == [1] * 7
    x = x[:1].expand(7, -1)
    torch.testing.assert_close(layer(x)[1].load_balancing_loss, torch.tensor(7.0))
    layer.buffer.close()


def test_sequences_are_balanced_on_their_own() -> None:
    """The loss of [B, S, H] is the mean over sequences, however they are distributed over ranks."""
    layer = MoELayer(cases.config())
    x = torch.randn(2, 5, cases.HIDDEN)
    both = layer(x)[1].load_balancing_loss
    each = [layer(x[i])[1].load_balancing_loss for i in range(2)]
    torch.testing.assert_close(both, (each[0] + each[1]) / 2)
    layer.buffer.close()
