"""Every way of routing: equal to Transformers' routers and to plain loops, with exact gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer.cases_router import FAMILY, E, H, K, NoRead, T, make_router, tokens
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.nn.router import RouterConfig, choose_by_experts

family = pytest.mark.parametrize("options", FAMILY.values(), ids=FAMILY.keys())


def by_id(idx: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    idx, order = idx.sort(-1)
    return idx, weights.gather(-1, order)


def transformers_router(name: str, config: dict[str, Any]) -> Any:
    models = pytest.importorskip("transformers.models")
    module = getattr(models, name)
    kind = {
        "mixtral": ("MixtralConfig", "MixtralTopKRouter"),
        "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeTopKRouter"),
        "deepseek_v3": ("DeepseekV3Config", "DeepseekV3TopkRouter"),
        "gpt_oss": ("GptOssConfig", "GptOssTopKRouter"),
    }[name]
    return getattr(getattr(module, f"modeling_{name}"), kind[1])(getattr(module, kind[0])(hidden_size=H, **config))


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("mixtral", dict(num_local_experts=E, num_experts_per_tok=K), {}),
        ("qwen3_moe", dict(num_experts=E, num_experts_per_tok=K, norm_topk_prob=True), {}),
        ("qwen3_moe", dict(num_experts=E, num_experts_per_tok=K, norm_topk_prob=False), {"norm_topk": False}),
        (
            "deepseek_v3",
            dict(n_routed_experts=E, num_experts_per_tok=K, n_group=4, topk_group=2, routed_scaling_factor=2.5),
            FAMILY["deepseek"],
        ),
        ("gpt_oss", dict(num_local_experts=E, num_experts_per_tok=K), FAMILY["gpt-oss"]),
    ],
)
def test_equals_transformers(name: str, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    router, reference = make_router(**ours), transformers_router(name, theirs)
    state = {k.replace("balance_bias", "e_score_correction_bias"): v for k, v in router.state_dict().items()}
    reference.load_state_dict(state)
    x = tokens(T)
    _, their_weights, their_idx = reference(x)
    got, want = by_id(*router(x)[:2]), by_id(their_idx, their_weights)
    assert torch.equal(got[0], want[0])
    torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-7)


def test_softmax_of_the_chosen_is_the_softmax_renormalised() -> None:
    """GPT-OSS's order of the two steps differs from Mixtral's only by rounding."""
    x = tokens(T)
    after, before = make_router()(x), make_router(topk_before_softmax=True)(x)
    assert torch.equal(after[0], before[0])
    torch.testing.assert_close(after[1], before[1])


@pytest.mark.parametrize(("num_groups", "topk_groups"), [(2, 1), (4, 2), (8, 2), (8, 8)])
def test_groups_against_a_loop(num_groups: int, topk_groups: int) -> None:
    router = make_router(num_groups=num_groups, topk_groups=topk_groups, score_func="sigmoid", balance_bias=True)
    x = tokens(T)
    idx, _, _ = router(x)
    biased = (F.linear(x, router.weight).sigmoid() + router.balance_bias).tolist()
    for row, chosen in zip(biased, idx.tolist(), strict=True):
        size = E // num_groups
        groups = [range(g * size, (g + 1) * size) for g in range(num_groups)]
        best = sorted(groups, key=lambda g: -sum(sorted((row[e] for e in g), reverse=True)[:2]))[:topk_groups]
        allowed = [e for g in best for e in g]
        assert sorted(chosen) == sorted(sorted(allowed, key=lambda e: -row[e])[:K])


@family
def test_no_tokens_cost_nothing(options: dict[str, Any]) -> None:
    for shape in ((0,), (2, 0), (0, 3)):
        idx, weights, aux = make_router(**options)(tokens(*shape))
        assert idx.shape == weights.shape == (0, K)
        assert aux.loss == 0
        assert aux.tokens_per_expert.tolist() == [0] * E


def test_jitter_is_on_the_input_and_in_training_only() -> None:
    router = make_router(score_func="sigmoid", norm_topk=False, jitter=0.2)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E, H))
    x = torch.ones(T, H)
    torch.manual_seed(0)
    noise = router(x, topk_idx=torch.arange(K).expand(T, K))[1].logit()
    assert 0.8 - 1e-5 <= noise.min() < 0.85
    assert 1.15 < noise.max() <= 1.2 + 1e-5
    assert (noise.std(0) > 0).all()
    assert (noise.std(1) > 0).all(), "each element has its own"
    torch.testing.assert_close(router.eval()(x)[1].logit(), torch.ones(T, K))


@family
def test_replay_repeats_a_decision(options: dict[str, Any]) -> None:
    options = {**options, "jitter": 0.0}
    router = make_router(**options)
    x = tokens(5, 10)
    idx, weights, aux = router(x)
    assert aux.topk_idx is not None
    again = router(x, topk_idx=aux.topk_idx.to(torch.int32))
    assert torch.equal(again[0], idx)
    assert torch.equal(again[1], weights)
    grads = [torch.autograd.grad(w.square().sum(), router.weight)[0] for w in (weights, again[1])]
    torch.testing.assert_close(*grads)
    assert torch.equal(again[2].tokens_per_expert, aux.tokens_per_expert)

    with torch.no_grad():
        router.weight.mul_(-1)  # this sign makes routing choose other experts
    assert not torch.equal(router(x)[0], idx)
    replayed = router(x, topk_idx=idx)
    assert torch.equal(replayed[0], idx)
    assert not torch.equal(replayed[1], weights)
    (grad,) = torch.autograd.grad(replayed[1].square().sum(), router.weight)
    assert grad.abs().sum() > 0


@family
@pytest.mark.parametrize("poison", [False, True])
def test_replay_of_no_expert(options: dict[str, Any], poison: bool) -> None:
    """An id of -1 has weight zero and no count, and no gradient flows through its weight."""
    router = make_router(**options)
    idx = torch.tensor([[0, 1, 2, 3], [5, -1, 6, -1], [-1, -1, -1, -1]])
    x = tokens(3)
    out, weights, aux = router(x, topk_idx=idx)
    assert torch.equal(out, idx)
    assert not weights[idx < 0].any()
    assert aux.tokens_per_expert.tolist() == [1, 1, 1, 1, 0, 1, 1] + [0] * (E - 7)
    grad = torch.ones_like(weights).masked_fill(idx < 0, 1e30 if poison else 1.0)
    (got,) = torch.autograd.grad(weights, router.weight, grad)
    assert got.isfinite().all()
    assert got.abs().max() < 100


def test_replay_leaves_wrong_ids_to_dispatch() -> None:
    idx = torch.full((3, K), E)
    replayed, _, aux = make_router()(tokens(3), topk_idx=idx)
    assert torch.equal(replayed, idx)
    assert aux.tokens_per_expert.tolist() == [0] * E  # ids out of range are not counted
    with pytest.raises(InvalidInput, match=r"topk_idx: got shape \[3, 2\], expected \[3, 4\]"):
        make_router()(tokens(3), topk_idx=idx[:, :2])


@pytest.mark.parametrize("experts_per_token", [0.5, 1.0, 2.3, 4.0])
def test_expert_choice_against_a_loop(experts_per_token: float) -> None:
    scores = F.softmax(tokens(T)[:, :E], -1)
    idx = choose_by_experts(scores, K, experts_per_token)
    each = math.ceil(T * experts_per_token / E)
    takers: list[list[int]] = [[] for _ in range(T)]
    for e in range(E):
        for t in sorted(range(T), key=lambda t: (-float(scores[t, e]), t))[:each]:
            takers[t].append(e)
    for t, chosen in enumerate(idx.tolist()):
        best = sorted(takers[t], key=lambda e: (-float(scores[t, e]), e))[:K]
        assert chosen == best + [-1] * (K - len(best))
    assert any(-1 in row for row in idx.tolist())


def test_expert_choice_breaks_ties_by_index() -> None:
    idx = choose_by_experts(torch.full((4, 3), 0.5), 2, 1.5)  # every expert takes two tokens
    assert idx.tolist() == [[0, 1], [0, 1], [-1, -1], [-1, -1]]


@family
def test_gradcheck(options: dict[str, Any]) -> None:
    """Gradients of x, weight and bias, through weights and losses, are exact; noise is off."""
    router = make_router(torch.float64, **{**options, "jitter": 0.0})
    names = [n for n, _ in router.named_parameters()]

    def call(x: Tensor, *params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, weights, aux = torch.func.functional_call(router, dict(zip(names, params, strict=True)), (x,))
        assert aux.mean_prob is not None
        return weights, aux.loss, aux.mean_prob

    x = tokens(2, 3, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(call, (x, *router.parameters()))


@family
def test_nothing_is_read_on_the_host(options: dict[str, Any]) -> None:
    router, x = make_router(**options), tokens(2, 5)
    with NoRead():
        idx, weights, aux = router(x)
        (weights.sum() + aux.loss).backward()
        router(x, topk_idx=idx)
        if router.balance_bias is not None:
            router.update_bias(aux.tokens_per_expert)
    real = router.state_dict()
    with FakeTensorMode() as mode:
        state = {name: mode.from_tensor(t) for name, t in real.items()}
        fake = torch.func.functional_call(router, state, (mode.from_tensor(x),))
        assert (fake[0].shape, fake[1].shape) == (idx.shape, weights.shape)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_func": "tanh"}, 'score_func: got "tanh", expected one of softmax, sigmoid'),
        ({"balance_scope": "world"}, 'balance_scope: got "world", expected one of sequence, batch'),
        ({"score_func": "sigmoid", "topk_before_softmax": True}, "topk_before_softmax: got True, expected False with"),
        ({"num_groups": 0}, "num_groups: got 0"),
        ({"num_groups": 3}, "num_groups: got 3, expected a divisor of num_experts = 16"),
        ({"num_groups": 16, "topk_groups": 8}, "num_groups: got 16, .* two experts a group"),
        ({"num_groups": 4, "topk_groups": 5}, "topk_groups: got 5, expected 1 to num_groups = 4"),
        ({"num_groups": 8, "topk_groups": 1}, "topk_groups: got 1, expected groups of 2 for num_topk = 4"),
        ({"jitter": 1.0}, "jitter: got 1.0, expected 0 <= jitter < 1"),
        ({"balance_bias_rate": -1.0}, "balance_bias_rate: got -1.0"),
        ({"expert_choice": 0.0}, "expert_choice: got 0.0, expected above 0, at most num_topk = 4"),
        ({"expert_choice": 5.0}, "expert_choice: got 5.0"),
        ({"expert_choice": 1.0, "balance_bias": True}, "balance_bias: got True, expected False, for with"),
        ({"expert_choice": 1.0, "num_groups": 4, "topk_groups": 2}, "num_groups: got 4, expected 1, for with"),
    ],
)
def test_nonsense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        RouterConfig(num_experts=E, num_topk=K, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"expert_choice": float(K)},
        {"expert_choice": 1e-9},
        {"jitter": 0.999},
        {"balance_bias_rate": 0.0},
        {"num_groups": 4, "topk_groups": 4},
        {"num_groups": 4, "topk_groups": 1},  # exactly K experts
        {"num_groups": 8, "topk_groups": 2},  # of two each
    ],
    ids=str,
)
def test_edges_of_what_makes_sense(options: dict[str, Any]) -> None:
    RouterConfig(num_experts=E, num_topk=K, **options)


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
def test_autocast_changes_no_bit(score_func: str) -> None:
    """A gate in 16 bits would choose other experts."""
    router, x = make_router(score_func=score_func, router_bias=True), tokens(T)
    plain = router(x)
    with torch.autocast("cpu", torch.bfloat16):
        cast = router(x)
    assert cast[1].dtype is torch.float32
    for got, expected in zip((*cast[:2], *cast[2]), (*plain[:2], *plain[2]), strict=True):
        assert torch.equal(got, expected)
