"""Padding, named by a mask or by ids of -1, is not routed, counted or differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HEAPS
from layer import cases_padding as cases
from layer.cases_kinds import DEEPSEEK, EXPERT_CHOICE, QWEN2, filled_layer, layer_config
from layer.cases_router import FAMILY, E, K, NoRead, make_router, tokens
from support.ranks import Ranks
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_rt import MoELayer
from moe_rt.errors import InvalidInput
from moe_rt.nn.router import Router, choose_by_experts
from moe_rt.nn.router_losses import RouterAux, count_tokens

MakeRanks = Callable[[str, int], Ranks]
# Sequences of 2, 0, 5 and 7 real tokens of 7.
MASK = torch.tensor([[0] * 5 + [1] * 2, [0] * 7, [1] * 5 + [0] * 2, [1] * 7], dtype=torch.bool)
calm = {name: {**options, "jitter": 0.0} for name, options in FAMILY.items()}
family = pytest.mark.parametrize("options", calm.values(), ids=calm.keys())


def padded(x: Tensor) -> Tensor:
    """Return x with padding replaced by NaN and inf, which must not spread."""
    return torch.where(MASK.unsqueeze(-1), x, torch.tensor([torch.nan, torch.inf] * (x.shape[-1] // 2)))


def sequence_by_sequence(router: Router, x: Tensor, record: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, weights and loss of the real tokens without padding; a loss per sequence takes one at a time."""
    idx, weights, whole = router(x[MASK], record)
    if router.config.balance_scope == "batch":
        return idx, weights, whole.loss
    c, parts = router.config, []
    # Experts choose among all tokens; their choice is replayed for each sequence.
    ids = whole.topk_idx if c.expert_choice is not None or record is not None else None
    splits = [None] * 3 if ids is None else ids.split([2, 5, 7])
    for sequence, chosen in zip((x[0, 5:], x[2, :5], x[3]), splits, strict=True):
        parts.append(router(sequence, chosen)[2].load_balancing_loss)
    return idx, weights, c.aux_loss_coef * torch.stack(parts).mean() + c.z_loss_coef * whole.z_loss


@family
@pytest.mark.parametrize("by", ["mask", "integers", "ids"])
def test_a_router_without_the_padding(options: dict[str, Any], by: str) -> None:
    router, x = make_router(**options), tokens(4, 7)
    record = router(x[MASK])[2].topk_idx if by == "ids" else None
    ids = torch.full((MASK.numel(), K), -1).masked_scatter(MASK.flatten()[:, None], record) if by == "ids" else None
    mask = {"mask": MASK, "integers": MASK.to(torch.uint8), "ids": None}[by]
    slope = torch.linspace(-1, 1, K)
    results = []
    for with_padding in (True, False):
        router.zero_grad()
        given = (padded(x) if with_padding else x).requires_grad_()
        if with_padding:
            idx, weights, aux = router(given, ids, mask)
            assert (idx[~MASK.flatten()] == -1).all()
            assert not weights[~MASK.flatten()].any()
            idx, weights, loss = idx[MASK.flatten()], weights[MASK.flatten()], aux.loss
            assert aux.tokens_per_expert.tolist() == count_tokens(idx.flatten(), E).tolist()
            assert aux.mean_prob is not None
            torch.testing.assert_close(aux.mean_prob.sum(), torch.tensor(1.0))
        else:
            idx, weights, loss = sequence_by_sequence(router, given, record)
        ((weights * slope).sum() + loss).backward()
        assert given.grad is not None
        assert not given.grad[~MASK].any()
        grads = {name: p.grad.clone() for name, p in router.named_parameters() if p.grad is not None}
        results.append({"idx": idx, "weights": weights.detach(), "loss": loss.detach(), "x": given.grad, **grads})
    torch.testing.assert_close(*results)


@family
def test_padding_alone_costs_nothing(options: dict[str, Any]) -> None:
    router = make_router(**options)
    x = torch.full((2, 3, router.weight.shape[1]), torch.nan, requires_grad=True)
    idx, weights, aux = router(x, mask=torch.zeros(2, 3, dtype=torch.bool))
    assert (idx == -1).all()
    assert not weights.any()
    assert (aux.loss.item(), aux.load_balancing_loss.item(), aux.z_loss.item()) == (0, 0, 0)
    assert not aux.tokens_per_expert.any()
    assert not aux.mean_prob.any()
    (weights.sum() + aux.loss).backward()
    assert not x.grad.any()
    assert not router.weight.grad.any()
    if router.balance_bias is not None:
        before = router.balance_bias.clone()
        router.update_bias(aux.tokens_per_expert)
        assert torch.equal(router.balance_bias, before)


def test_jitter_leaves_padding_alone() -> None:
    router, x = make_router(jitter=0.1), padded(tokens(4, 7)).requires_grad_()
    _, weights, aux = router(x, mask=MASK)
    (weights.sum() + aux.loss).backward()
    assert x.grad.isfinite().all()
    assert router.weight.grad.isfinite().all()
    assert not x.grad[~MASK].any()


@family
def test_nothing_is_read_on_the_host(options: dict[str, Any]) -> None:
    router, x = make_router(**options), padded(tokens(4, 7))
    with NoRead():
        idx, weights, aux = router(x, mask=MASK)
        (weights.sum() + aux.loss).backward()
        router(x, idx, MASK)


@pytest.mark.parametrize("experts_per_token", [0.3, 1.0, 2.3, 4.0])
def test_experts_choose_among_real_tokens(experts_per_token: float) -> None:
    """Experts choose among real tokens as if no others existed, however high padding scores."""
    scores = tokens(20)[:, :E].softmax(-1)
    scores[3] = scores[7]  # equal scores
    for count in range(21):
        real = torch.zeros(20, dtype=torch.bool)
        real[torch.randperm(20, generator=torch.Generator().manual_seed(count))[:count]] = True
        given = scores.masked_fill(~real.unsqueeze(1), 1.0)
        chosen = choose_by_experts(given, K, experts_per_token, real)
        assert torch.equal(chosen[real], choose_by_experts(scores[real], K, experts_per_token))
        assert (chosen[~real] == -1).all()


def test_a_record_tells_padding_from_what_no_expert_took() -> None:
    """A record keeps -2 for a token that no expert took and -1 for padding; a replay has the same losses."""
    router, x = make_router(expert_choice=0.5, norm_topk=False), tokens(4, 7)
    torch.nn.init.zeros_(router.weight)  # all experts take the first token
    idx, weights, aux = router(padded(x), mask=MASK)
    untaken = (idx == -1).all(-1) & MASK.flatten()
    assert untaken.any()
    assert (aux.topk_idx[untaken] == -2).all()
    assert (aux.topk_idx[~MASK.flatten()] == -1).all()
    again = router(padded(x), aux.topk_idx)
    torch.testing.assert_close(again, (idx, weights, aux), rtol=0, atol=0)


TWO, THREE = ["some", "all"], ["none", "some", "one"]


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize(
    ("masks", "changes", "how"),
    [
        (THREE, DEEPSEEK | cases.LOSSES, ""),
        (TWO, QWEN2, "bf16"),
        (["none", "none"], {}, "shared"),
        (TWO, {**EXPERT_CHOICE, "shared_intermediate": 20}, "checkpoint"),
        (TWO, dict(dispatch_dtype=torch.float8_e4m3fn), "autocast"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_layer_without_the_padding(
    make_ranks: MakeRanks, heap: str, masks: list[str], changes: dict[str, Any], how: str
) -> None:
    bound = dict(rtol=2e-2, atol=2e-2) if how in ("bf16", "autocast") else dict(rtol=1e-4, atol=1e-5)
    changes = {name: value for name, value in changes.items() if name not in cases.LOSSES}
    for pairs in make_ranks(heap, len(masks)).run(cases.equals_without_padding, masks, changes, how):
        for got, expected, hidden in pairs:
            torch.testing.assert_close(got, expected, **bound)
            assert not hidden["out"].any()
            assert not hidden["x"].any()


def test_a_layer_in_ddp_without_the_padding(make_ranks: MakeRanks) -> None:
    for pairs in make_ranks("shm", 2).run(cases.equals_without_padding, TWO, QWEN2, "ddp"):
        for got, expected, hidden in pairs:
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            assert not hidden["out"].any()
            assert not hidden["x"].any()


@pytest.mark.parametrize("heap", HEAPS)
def test_bad_masks_are_refused_on_every_rank(make_ranks: MakeRanks, heap: str) -> None:
    kinds = ["float"] if heap == "loopback" else list(cases.BAD_MASKS)
    for mine, theirs in zip(*make_ranks(heap, 2).run(cases.refused, kinds), strict=True):
        with pytest.raises(InvalidInput, match=r"(mask|topk_idx): got .*, expected .*(integer|Tensor)"):
            raise mine
        if heap == "loopback":
            assert "InvalidInput" in str(theirs) or "refused its input" in str(theirs)
        else:
            with pytest.raises(InvalidInput, match="rank 0 refused its input"):
                raise theirs


class Plain(nn.Module):
    """A user's router without a mask argument."""

    num_experts, num_topk = 8, 3

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(cases.HIDDEN, 8, bias=False)
        self.seen: Tensor | None = None

    def forward(self, x: Tensor, topk_idx: Tensor | None = None) -> tuple[Tensor, Tensor, RouterAux]:
        scores = self.gate(x.flatten(0, -2)).softmax(-1)
        idx = scores.topk(3).indices if topk_idx is None else topk_idx
        load, zero = count_tokens(idx.flatten(), 8), scores.new_zeros(())
        return idx, scores.gather(1, idx.clamp(min=0)), RouterAux(zero, zero, zero, load, topk_idx=idx)


class Aware(Plain):
    """A user's router with a mask argument."""

    def forward(self, x: Tensor, topk_idx: Tensor | None = None, mask: Tensor | None = None) -> Any:
        self.seen = mask
        return super().forward(x, topk_idx)


@pytest.mark.parametrize("kind", [Plain, Aware])
def test_routers_of_a_user(kind: type[Plain]) -> None:
    """A router without a mask argument gets its padding ids replaced by the layer; its losses are not corrected."""
    layer = MoELayer(layer_config(), router=kind())
    x, mask = torch.randn(2, 4, cases.HIDDEN), torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1]])
    x[mask == 0] = torch.nan
    x.requires_grad_()
    out, aux = layer(x, mask=mask)
    assert layer.router.seen is None if kind is Plain else torch.equal(layer.router.seen, mask == 1)
    out.sum().backward()
    expected, _ = layer(x[mask == 1])
    torch.testing.assert_close(out[mask == 1], expected)
    assert not out[mask == 0].any()
    assert not x.grad[mask == 0].any()
    assert layer.router.gate.weight.grad.isfinite().all()
    if kind is Plain:
        assert aux.tokens_per_expert.sum() == 5 * 3
        assert (aux.topk_idx[mask.flatten() == 0] == -1).all()
        assert layer.metrics.snapshot().tokens_per_expert == (2 * aux.tokens_per_expert).tolist()
    layer.buffer.close()


def test_compiles_as_one_graph() -> None:
    layer = filled_layer(layer_config(**DEEPSEEK), None)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, mask = torch.randn(2, 4, cases.HIDDEN), torch.tensor([[0, 0, 1, 1], [1, 0, 1, 1]])
    x[mask == 0] = torch.nan
    for given in ({"mask": mask}, {"topk_idx": layer(x, mask=mask)[1].topk_idx}):
        results = []
        for module in (layer, compiled):
            layer.zero_grad()
            out, aux = module(x, **given)
            (out.square().mean() + aux.loss).backward()
            results.append([out.detach(), aux.loss.detach(), *(p.grad.clone() for p in layer.parameters())])
        torch.testing.assert_close(*results)
    layer.buffer.close()


def test_traces_with_fake_tensors() -> None:
    """No value is read in a layer with a mask, on any device."""
    layer = MoELayer(layer_config(**DEEPSEEK))
    real = layer.state_dict()
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(t) for name, t in real.items()}
        x, mask = torch.empty(2, 4, cases.HIDDEN, requires_grad=True), torch.ones(2, 4, dtype=torch.int64)
        out, aux = torch.func.functional_call(layer, fakes, (x,), {"mask": mask})
        (grad,) = torch.autograd.grad(out.sum() + aux.loss, x)
    assert grad.shape == out.shape == x.shape
    layer.buffer.close()
