"""Balance of experts: losses as in the papers, and the bias that steers without a loss."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer.cases_router import E, K, T, make_router, tokens
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.nn.router import Router
from moe_rt.nn.router_losses import load_balancing_loss

GROUPS = dict(num_groups=4, topk_groups=2)


def test_balance_bias_chooses_but_does_not_weigh() -> None:
    router = make_router(score_func="sigmoid", balance_bias=True, norm_topk=False)
    x = tokens(T)
    plain = make_router(score_func="sigmoid", norm_topk=False)(x)
    idx, weights, aux = router(x)
    assert not torch.equal(idx, plain[0])
    torch.testing.assert_close(weights, F.linear(x, router.weight).sigmoid().gather(1, idx))
    assert list(router.state_dict()) == ["weight", "balance_bias"]
    assert router.balance_bias is not None
    assert not router.balance_bias.requires_grad
    torch.testing.assert_close(aux.load_balancing_loss, plain[2].load_balancing_loss)
    assert aux.tokens_per_expert.tolist() == torch.bincount(idx.flatten(), minlength=E).tolist()


def halves(router: Router) -> dict[str, Tensor]:
    return {name: t.bfloat16() for name, t in router.state_dict().items()}


def from_default_dtype(router: Router) -> Router:
    torch.set_default_dtype(torch.bfloat16)
    try:
        return make_router(balance_bias=True)
    finally:
        torch.set_default_dtype(torch.float32)


def assigned(router: Router) -> Router:
    router.load_state_dict(halves(router), assign=True)
    return router


def assigned_to_meta(router: Router) -> Router:
    parent = nn.Sequential(router.to("meta"))
    parent.load_state_dict({f"0.{name}": t for name, t in halves(make_router(balance_bias=True)).items()}, assign=True)
    return router


def swapped(router: Router) -> Router:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return assigned(router.bfloat16())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def set_by_checkpoint(router: Router) -> Router:
    set_model_state_dict(router, halves(router))
    return router


def emptied(router: Router) -> Router:
    router.bfloat16().to_empty(device="cpu").load_state_dict(halves(make_router(balance_bias=True)))
    return router


def poked(router: Router) -> Router:
    """Change the buffer as offloading hooks and wrappers do; the module notices at the next update."""
    router._buffers["balance_bias"] = router.balance_bias.bfloat16()
    return router


CASTS = {
    "bfloat16": lambda router: router.bfloat16(),
    "half": lambda router: nn.Sequential(router).half()[0],
    "double": lambda router: router.double(),
    "to": lambda router: router.to("cpu", torch.bfloat16),
    "type": lambda router: router.type(torch.float16),
    "copied": lambda router: copy.deepcopy(router).bfloat16(),
}
LOADS = [from_default_dtype, assigned, assigned_to_meta, swapped, set_by_checkpoint, emptied, poked]


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())
def test_balance_bias_stays_fp32_in_casts(cast: Callable[[Router], Router]) -> None:
    router = make_router(balance_bias=True)
    before = router.balance_bias.clone()
    router = cast(router)
    assert router.weight.dtype is not torch.float32
    assert torch.equal(router.balance_bias, before)


@pytest.mark.parametrize("load", LOADS)
def test_balance_bias_stays_fp32_in_loads(load: Callable[[Router], Router]) -> None:
    """The bias of an expert that lacks tokens rises by steps that a half would round away."""
    router = load(make_router(balance_bias=True))
    if load is not poked:
        assert router.balance_bias.dtype is torch.float32
    with torch.no_grad():
        router.balance_bias.fill_(1.0)
    for _ in range(3):
        router.update_bias(torch.tensor([0] + [1] * (E - 1)))
    assert router.balance_bias.dtype is torch.float32
    torch.testing.assert_close(router.balance_bias[0], torch.tensor(1.003))


def test_update_bias_moves_towards_balance() -> None:
    router = make_router(score_func="sigmoid", balance_bias=True, balance_bias_rate=0.25)
    assert router.balance_bias is not None
    router.balance_bias.zero_()
    router.update_bias(torch.tensor([8, 0, 4] + [4] * (E - 3)))
    assert router.balance_bias.tolist() == [-0.25, 0.25] + [0.0] * (E - 2)
    router.update_bias(torch.tensor([2**40] + [0] * (E - 1)))  # sums beyond fp32's integers
    assert router.balance_bias.tolist() == [-0.5, 0.5] + [0.25] * (E - 2)

    router = make_router(score_func="sigmoid", balance_bias=True, balance_bias_rate=0.01)
    x = tokens(400)
    spread = []
    for _ in range(150):
        load = router(x)[2].tokens_per_expert
        spread.append(float(load.max() / load.float().mean()))
        router.update_bias(load)
    assert spread[-1] < 1.2 < spread[0]


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_batch_without_tokens_costs_nothing(scope: str) -> None:
    """A batch without tokens has a loss of zero, since a rank's loss is averaged with the others'."""
    router = make_router(balance_scope=scope)
    aux = router(tokens(T)[:0])[2]
    assert (aux.loss.item(), aux.load_balancing_loss.item(), aux.z_loss.item()) == (0, 0, 0)
    assert aux.tokens_per_expert.tolist() == [0] * E
    aux.loss.backward()
    assert router.weight.grad is not None
    assert router.weight.grad.count_nonzero() == 0
    assert load_balancing_loss(torch.full((E,), 1 / E), torch.zeros(E, dtype=torch.int64)) == 0


def test_update_bias_refuses() -> None:
    with pytest.raises(InvalidConfig, match="balance_bias: got False, expected True"):
        make_router().update_bias(torch.zeros(E))
    with pytest.raises(InvalidInput, match=r"tokens_per_expert: got shape \[3\], expected \[16\]"):
        make_router(balance_bias=True).update_bias(torch.zeros(3))


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("options", [dict(balance_bias=True), GROUPS, dict(balance_bias=True, **GROUPS)], ids=str)
def test_sequence_loss_is_that_of_deepseek_v3(score_func: str, options: dict[str, Any]) -> None:
    """The loss equals equations 17 to 20, computed by loops: f counts the top-k of the scores, whether a bias, groups
    or both made something else of them."""
    router = make_router(score_func=score_func, **options)
    if router.balance_bias is not None:
        router.balance_bias.copy_(torch.linspace(-1, 1, E))
    x = tokens(3, 7)
    losses, differs = [], False
    for sequence in x:
        logits = F.linear(sequence, router.weight)
        s = logits.softmax(-1) if score_func == "softmax" else logits.sigmoid()
        normed = s / s.sum(-1, keepdim=True)
        chosen = s.topk(K, -1).indices.flatten().tolist()
        differs |= chosen != router(sequence)[0].flatten().tolist()
        losses.append(sum(E / (K * 7) * chosen.count(e) * normed[:, e].sum() / 7 for e in range(E)))
    assert differs
    torch.testing.assert_close(router(x)[2].load_balancing_loss, torch.stack(losses).mean())


def test_batch_loss_is_that_of_switch() -> None:
    """The loss times K equals that of Transformers, which counts K entries per token and so is K when balanced."""
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    router, x = make_router(balance_scope="batch"), tokens(3, 7)
    aux = router(x)[2]
    theirs = modeling.load_balancing_loss_func((F.linear(x, router.weight).flatten(0, 1),), E, K)
    torch.testing.assert_close(aux.load_balancing_loss * K, theirs)
    torch.testing.assert_close(aux.loss, 0.1 * aux.load_balancing_loss + 0.01 * aux.z_loss)
    torch.testing.assert_close(aux.z_loss, F.linear(x, router.weight).logsumexp(-1).square().mean())
    one_sequence = make_router()(x.flatten(0, 1))[2]
    torch.testing.assert_close(aux.load_balancing_loss, one_sequence.load_balancing_loss)


def test_global_batch_loss_from_summed_counts() -> None:
    """The mean over ranks of each rank's P with the global f is the loss of all tokens, gradients included."""
    router, x = make_router(balance_scope="batch"), tokens(4, 10)
    (whole,) = torch.autograd.grad(router(x)[2].load_balancing_loss, router.weight)
    parts = [router(part)[2] for part in x.split(2)]
    total = torch.stack([aux.tokens_per_expert for aux in parts]).sum(0)
    losses = [load_balancing_loss(aux.mean_prob, total) for aux in parts]
    loss = torch.stack(losses).mean()
    torch.testing.assert_close(loss, router(x)[2].load_balancing_loss)
    torch.testing.assert_close(torch.autograd.grad(loss, router.weight)[0], whole)


ONE_BY_ONE: dict[str, tuple[Any, ...]] = {
    "score_func": ("softmax", "sigmoid"),
    "balance_scope": ("sequence", "batch"),
    "balance_bias": (False, True),
    "groups": (False, True),
    "norm_topk": (True, False),
    "route_scale": (1.0, 2.5),
    "topk_before_softmax": (False, True),
    "router_bias": (False, True),
    "padding": (False, True),
}
# Every pair of values of two options, in a few combinations of all.
COMBINATIONS = [
    dict(zip(ONE_BY_ONE, values, strict=True))
    for values in itertools.product(*ONE_BY_ONE.values())
    if values[6] is False or values[0] == "softmax"
][::5]


def by_loops(router: Router, x: Tensor, real: Tensor, given: dict[str, Any]) -> dict[str, Any]:
    """Return ids, weights, losses and counts of x [B, S, H], token by token; docs of RouterConfig and RouterAux."""
    logits = F.linear(x, router.weight, router.bias)
    scores = logits.softmax(-1) if given["score_func"] == "softmax" else logits.sigmoid()
    normed = scores / scores.sum(-1, keepdim=True)
    found: dict[str, Any] = {"ids": [], "weights": [], "load": [0] * E}
    counts, sums, lengths = torch.zeros(len(x), E), torch.zeros(len(x), E), [0] * len(x)
    for b, t in itertools.product(range(len(x)), range(x.shape[1])):
        if not real[b, t]:
            found["ids"].append([-1] * K)
            found["weights"].append(torch.zeros(K))
            continue
        by = logits[b, t] if given["topk_before_softmax"] else scores[b, t]
        by = by if router.balance_bias is None else by + router.balance_bias
        if given["groups"]:
            by = by.clone()
            in_groups = by.unflatten(0, (GROUPS["num_groups"], -1)).topk(2).values.sum(1)
            for group in set(range(GROUPS["num_groups"])) - set(in_groups.topk(GROUPS["topk_groups"]).indices.tolist()):
                by.unflatten(0, (GROUPS["num_groups"], -1))[group] = -torch.inf
        ids = by.topk(K).indices
        weights = logits[b, t][ids].softmax(-1) if given["topk_before_softmax"] else scores[b, t][ids]
        if given["norm_topk"] and not given["topk_before_softmax"]:
            weights = weights / weights.sum()
        found["ids"].append(ids.tolist())
        found["weights"].append(weights * given["route_scale"])
        for e in ids.tolist():
            found["load"][e] += 1
        as_plain = given["balance_scope"] == "sequence" and (given["groups"] or given["balance_bias"])
        counts[b] += F.one_hot(scores[b, t].topk(K).indices if as_plain else ids, E).sum(0)
        sums[b] += normed[b, t]
        lengths[b] += 1
    if given["balance_scope"] == "batch":
        balance = E * (counts.sum(0) / (K * sum(lengths)) * sums.sum(0) / sum(lengths)).sum()
    else:
        each = [E * (counts[b] / (K * n) * sums[b] / n).sum() for b, n in enumerate(lengths) if n]
        balance = torch.stack(each).mean()
    found["balance"], found["mean_prob"] = balance, sums.sum(0) / sum(lengths)
    found["z"] = logits.logsumexp(-1).square()[real].mean()
    return found


@pytest.mark.parametrize("given", COMBINATIONS, ids=lambda given: "-".join(map(str, given.values())))
def test_options_together_against_loops(given: dict[str, Any]) -> None:
    options = {name: given[name] for name in given if name not in ("groups", "padding")}
    router = make_router(**options, **(GROUPS if given["groups"] else {}), aux_loss_coef=0.3, z_loss_coef=0.02)
    with torch.no_grad():
        if router.bias is not None:
            router.bias.normal_(generator=torch.Generator().manual_seed(1))
        if router.balance_bias is not None:
            router.balance_bias.copy_(torch.linspace(1, -1, E))
    x, real = tokens(3, 7), torch.ones(3, 7, dtype=torch.bool)
    if given["padding"]:
        real[0, 4:], real[2] = False, False
    idx, weights, aux = router(x, mask=real if given["padding"] else None)
    expected = by_loops(router, x, real, given)
    assert idx.tolist() == expected["ids"]
    torch.testing.assert_close(weights, torch.stack(expected["weights"]))
    torch.testing.assert_close(aux.load_balancing_loss, expected["balance"])
    torch.testing.assert_close(aux.z_loss, expected["z"])
    torch.testing.assert_close(aux.loss, 0.3 * expected["balance"] + 0.02 * expected["z"])
    assert aux.tokens_per_expert.tolist() == expected["load"]
    torch.testing.assert_close(aux.mean_prob, expected["mean_prob"])


def test_each_pair_of_options_is_among_the_combinations() -> None:
    allowed = {("sigmoid", True)}  # topk_before_softmax
    for (one, ours), (other, theirs) in itertools.combinations(ONE_BY_ONE.items(), 2):
        found = {(given[one], given[other]) for given in COMBINATIONS}
        missing = set(itertools.product(ours, theirs)) - found
        assert missing == (allowed if (one, other) == ("score_func", "topk_before_softmax") else set())


def test_a_reset_forgets_what_was_learned() -> None:
    router = make_router(balance_bias=True, router_bias=True)
    with torch.no_grad():
        for t in (router.weight, router.bias, router.balance_bias):
            assert t is not None
            t.fill_(7.0)
    router.reset_parameters()
    assert router.bias is not None
    assert router.balance_bias is not None
    assert router.bias.count_nonzero() == router.balance_bias.count_nonzero() == 0
    assert float(router.weight.detach().std()) == pytest.approx(router.weight.shape[1] ** -0.5, rel=0.2)


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_more_leading_dimensions_are_more_sequences(scope: str) -> None:
    router, x = make_router(balance_scope=scope), tokens(6, 7)
    mask = torch.rand(6, 7, generator=torch.Generator().manual_seed(1)) < 0.7
    for given in ({}, {"mask": mask}):
        expected = router(x, **given)[2]
        got = router(x.unflatten(0, (2, 3)), **{name: t.unflatten(0, (2, 3)) for name, t in given.items()})[2]
        torch.testing.assert_close(got.load_balancing_loss, expected.load_balancing_loss)
        torch.testing.assert_close(got.z_loss, expected.z_loss)
        assert torch.equal(got.tokens_per_expert, expected.tokens_per_expert)
