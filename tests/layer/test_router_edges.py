"""A router at its edges: one token, one expert, given experts, wrong inputs, casts, and which module computes."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer.cases_layer import config
from layer.cases_router import FAMILY, E, H, K, T, make_router, tokens
from torch import Tensor, nn

from moe_rt import MoELayer
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.nn import experts as experts_module
from moe_rt.nn import router as router_module
from moe_rt.nn.experts import Experts, ExpertsConfig, SharedExpert
from moe_rt.nn.padding import real_tokens, route, takes_mask
from moe_rt.nn.router import KeepsFp32, Router, RouterConfig
from moe_rt.nn.router_losses import RouterAux, count_tokens, load_balancing_loss

calm = [{**options, "jitter": 0.0} for options in FAMILY.values()]


@pytest.mark.parametrize("options", calm, ids=FAMILY)
def test_one_token_without_a_batch(options: dict[str, Any]) -> None:
    """x [H] is one token, with or without a mask or given experts, as x [1, H] is."""
    router, x, given = make_router(**options), tokens(1), torch.tensor([[3, 1, -1, 0]])
    for mask, idx in itertools.product((None, True, False), (None, given)):
        marks = [None if mask is None else torch.tensor(mask).expand(shape) for shape in ((1,), ())]
        expected, got = router(x, idx, marks[0]), router(x[0], idx, marks[1])
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_both_biases_begin_at_zero() -> None:
    router = Router(H, E, K, router_bias=True, balance_bias=True, score_func="sigmoid")
    for bias in (router.bias, router.balance_bias):
        with torch.no_grad():
            bias.fill_(3.0)
    router.reset_parameters()
    assert not router.bias.any()
    assert not router.balance_bias.any()
    assert router.weight.any()


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("is_given", [False, True], ids=["experts choose", "given"])
def test_weights_of_a_token_with_fewer_experts_add_up(score_func: Any, is_given: bool) -> None:
    """Normalised weights are shares of the experts that a token has; what it lacks weighs nothing."""
    options: dict[str, Any] = {} if is_given else {"expert_choice": 0.5}
    router, x = Router(H, E, K, score_func=score_func, norm_topk=True, route_scale=2.5, **options), tokens(T)
    router.reset_parameters()
    given = torch.arange(T * K).reshape(T, K) % (E + 1) - 1 if is_given else None
    idx, weights, _ = router(x, given)
    has = idx >= 0
    assert has.any()
    assert not has.all()
    scores = (x @ router.weight.T).float()
    scores = scores.softmax(-1) if score_func == "softmax" else scores.sigmoid()
    shares = scores.gather(-1, idx.clamp(min=0).long()) * has
    torch.testing.assert_close(weights, 2.5 * shares / shares.sum(-1, keepdim=True).clamp(min=1e-30))


def test_one_token_of_a_layer() -> None:
    layer = MoELayer(config(shared_intermediate=8))
    x = torch.randn(layer.config.hidden)
    torch.testing.assert_close(layer(x)[0], layer(x[None])[0][0])
    assert not layer(x, mask=torch.tensor(False))[0].any()
    layer.buffer.close()


@pytest.mark.parametrize("options", [{}, {"score_func": "sigmoid", "balance_bias": True}, {"expert_choice": 1.0}])
def test_one_expert_takes_all(options: dict[str, Any]) -> None:
    router = Router(H, 1, 1, **options)
    router.reset_parameters()
    idx, weights, aux = router(tokens(T))
    assert idx.tolist() == [[0]] * T
    torch.testing.assert_close(weights, torch.ones(T, 1))
    assert aux.tokens_per_expert.tolist() == [T]
    torch.testing.assert_close(aux.load_balancing_loss, torch.tensor(1.0))
    torch.testing.assert_close(aux.mean_prob, torch.ones(1))


@pytest.mark.parametrize(
    ("x", "got"),
    [
        (torch.ones(2, H, dtype=torch.int64), f"torch.int64 [2, {H}] on cpu"),
        (torch.tensor(1.0), "torch.float32 [] on cpu"),
        (torch.ones(2, H + 1), f"torch.float32 [2, {H + 1}] on cpu"),
        (torch.ones(H, 2), f"torch.float32 [{H}, 2] on cpu"),
        (torch.ones(2, H, device="meta"), f"torch.float32 [2, {H}] on meta"),
        (torch.ones(2, H, dtype=torch.bool), f"torch.bool [2, {H}] on cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_input(x: Tensor, got: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        make_router()(x)
    assert str(raised.value).startswith(f"x: got {got}, expected floating [..., {H}] on cpu")


WRONG_IDS: dict[str, tuple[Any, str]] = {
    "list": ([[0] * K] * 3, f"got list, expected an integer tensor [3, {K}]"),
    "flat": (torch.zeros(3 * K, dtype=torch.int64), f"got shape [{3 * K}], expected [3, {K}]"),
    "too few": (torch.zeros(2, K, dtype=torch.int64), f"got shape [2, {K}], expected [3, {K}]"),
    "bool": (torch.zeros(3, K, dtype=torch.bool), "got torch.bool on cpu, expected integers on cpu"),
    "floating": (torch.zeros(3, K), "got torch.float32 on cpu, expected integers on cpu"),
    "complex": (torch.zeros(3, K, dtype=torch.complex64), "got torch.complex64 on cpu, expected integers on cpu"),
    "device": (
        torch.zeros(3, K, dtype=torch.int64, device="meta"),
        "got torch.int64 on meta, expected integers on cpu",
    ),
}
MASKS = "expected bool or integer [3] on cpu, True or 1 for a real token"
WRONG_MASKS: dict[str, tuple[Any, str]] = {
    "list": ([True] * 3, f"got list, {MASKS}"),
    "floating": (torch.ones(3), f"got torch.float32 [3] on cpu, {MASKS}"),
    "complex": (torch.ones(3, dtype=torch.complex64), f"got torch.complex64 [3] on cpu, {MASKS}"),
    "shape": (torch.ones(1, 3, dtype=torch.bool), f"got torch.bool [1, 3] on cpu, {MASKS}"),
    "too few": (torch.ones(2, dtype=torch.bool), f"got torch.bool [2] on cpu, {MASKS}"),
    "device": (torch.ones(3, dtype=torch.bool, device="meta"), f"got torch.bool [3] on meta, {MASKS}"),
}


@pytest.mark.parametrize(
    ("name", "case"), [("topk_idx", case) for case in WRONG_IDS] + [("mask", case) for case in WRONG_MASKS]
)
def test_what_names_no_tokens(name: str, case: str) -> None:
    wrong, text = (WRONG_IDS if name == "topk_idx" else WRONG_MASKS)[case]
    with pytest.raises(InvalidInput) as raised:
        make_router()(tokens(3), **{name: wrong})
    assert str(raised.value).startswith(f"{name}: {text}")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_real_tokens_are_those_of_both_marks(dtype: torch.dtype) -> None:
    """A token is padding if its mask is zero, or if all of its ids are -1."""
    x = torch.zeros(2, 2, H)
    idx = torch.tensor([[0, -1], [-1, -1], [-1, 5], [-1, -1]])
    mask = torch.tensor([[1, 1], [0, 2]]).to(dtype)
    assert real_tokens(x, None, None, 2) is None
    both: list[Tensor | None] = [
        real_tokens(x, idx, None, 2),
        real_tokens(x, None, mask, 2),
        real_tokens(x, idx, mask, 2),
    ]
    assert [None if t is None else t.tolist() for t in both] == [
        [[True, False], [True, False]],
        [[True, True], [False, True]],
        [[True, False], [False, False]],
    ]
    assert {t.dtype for t in both if t is not None} == {torch.bool}


class Chooser(nn.Module):
    """A user's router, which names expert 1 for every token and returns what it was given."""

    num_experts, num_topk = 3, 2
    shape: tuple[int, ...] = (2, 2)

    def forward(self, x: Tensor, topk_idx: Tensor | None = None) -> Any:
        return torch.ones(self.shape, dtype=torch.int32), torch.ones(2, 2), "its own second result"


class ByName(Chooser):
    def forward(self, x: Tensor, topk_idx: Tensor | None = None, mask: Tensor | None = None) -> Any:
        return mask


class ByKeywords(Chooser):
    def forward(self, x: Tensor, topk_idx: Tensor | None = None, **others: Any) -> Any:
        return others


class ByPosition(Chooser):
    def forward(self, x: Tensor, *others: Any) -> Any:
        return others


def test_routers_get_the_mask_that_they_take() -> None:
    x, real = torch.zeros(2, H), torch.tensor([True, False])
    assert [takes_mask(kind) for kind in (Chooser, ByName, ByKeywords, ByPosition)] == [False, True, True, False]
    assert route(ByName(), x, None, real) is real
    assert route(ByName(), x, None, None) is None
    assert route(ByKeywords(), x, None, real) == {"mask": real}
    assert route(ByKeywords(), x, None, None) == {}
    idx, _, aux = route(Chooser(), x, None, real)
    assert (idx.tolist(), aux) == ([[1, 1], [-1, -1]], "its own second result")
    assert route(Chooser(), x, None, None)[0].tolist() == [[1, 1], [1, 1]]
    wrong = Chooser()
    wrong.shape = (2, 3)
    with pytest.raises(InvalidInput, match=r"^topk_idx: got shape \[2, 3\], expected \[2, 2\]"):
        route(wrong, x, None, real)


# Each of these is wrong, and is named before those below it.
FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("score_func", {"score_func": "tanh"}),
    ("balance_scope", {"balance_scope": "world"}),
    ("topk_before_softmax", {"topk_before_softmax": True, "score_func": "sigmoid"}),
    ("jitter", {"jitter": -0.1}),
    ("balance_bias_rate", {"balance_bias_rate": -0.1}),
    ("num_groups", {"num_groups": 0}),
    ("topk_groups", {"topk_groups": 0}),
    ("expert_choice", {"expert_choice": -1.0}),
]


def test_the_first_wrong_field_is_named() -> None:
    """Ranks compare errors, so one of several wrong fields is the first on every rank."""
    for (name, fault), (_, other) in itertools.combinations(FAULTS, 2):
        with pytest.raises(InvalidConfig, match=f"^{name}: got"):
            RouterConfig(num_experts=E, num_topk=K, **{**other, **fault})
    with pytest.raises(InvalidConfig, match=r"^topk_groups: got 0, expected 1 to num_groups = 3"):
        RouterConfig(num_experts=E, num_topk=K, num_groups=3, topk_groups=0)
    for name in ("balance_bias", "topk_before_softmax"):
        with pytest.raises(InvalidConfig, match=f"^{name}: got True, expected False, for with expert_choice"):
            RouterConfig(num_experts=E, num_topk=K, expert_choice=1.0, **{name: True})


@pytest.mark.parametrize(
    ("sizes", "options", "fits"),
    [
        ((1, 1), {}, True),
        ((1, 1), {"expert_choice": 1.0}, True),
        ((3, 1), {"num_groups": 2}, False),
        ((4, 2), {"num_groups": 2}, True),
        ((4, 3), {"num_groups": 2}, False),
        ((8, 6), {"num_groups": 4, "topk_groups": 3}, True),
        ((8, 7), {"num_groups": 4, "topk_groups": 3}, False),
        ((8, 2), {"num_groups": 4, "topk_groups": 1}, True),
        ((8, 2), {"num_groups": 8, "topk_groups": 8}, False),
        ((8, 2), {"num_groups": 4, "topk_groups": 0}, False),
        ((8, 2), {"jitter": 0.0}, True),
    ],
    ids=str,
)
def test_sizes_that_fit(sizes: tuple[int, int], options: dict[str, Any], fits: bool) -> None:
    try:
        RouterConfig(num_experts=sizes[0], num_topk=sizes[1], **options)
    except InvalidConfig:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize("options", [{}, {"num_groups": 2}, {"num_groups": 2, "topk_groups": 2}], ids=str)
@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_losses_of_given_experts(options: dict[str, Any], scope: str) -> None:
    """Losses count the experts that were visited; with groups and a loss for each sequence, the plain top-k."""
    router, x = make_router(balance_scope=scope, **options), tokens(2, 5)
    idx = (torch.arange(10 * K) * 7 % 5).reshape(10, K)
    aux = router(x, idx)[2]
    probs = F.linear(x, router.weight).softmax(-1)
    of_loss = probs.topk(K).indices if options and scope == "sequence" else idx.view(2, 5, K)
    parts = zip(probs, of_loss, strict=True) if scope == "sequence" else [(probs.flatten(0, 1), of_loss.flatten(0, 1))]
    losses = [E * (torch.bincount(ids.flatten(), minlength=E) / ids.numel() * p.mean(0)).sum() for p, ids in parts]
    torch.testing.assert_close(aux.load_balancing_loss, torch.stack(losses).mean())
    assert aux.tokens_per_expert.tolist() == torch.bincount(idx.flatten(), minlength=E).tolist()


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (2, 0), (2, 5), (3, 2, 4)], ids=str)
def test_counts_against_bincount(shape: tuple[int, ...]) -> None:
    idx = torch.randint(-2, 6, shape, generator=torch.Generator().manual_seed(0))
    rows = [row[(row >= 0) & (row < 4)] for row in idx.unsqueeze(0).flatten(0, -2)]
    expected = torch.stack([torch.bincount(row, minlength=4) for row in rows]).reshape(*shape[:-1], 4)
    assert torch.equal(count_tokens(idx, 4), expected)
    known = idx.clamp(0, 3)
    assert torch.equal(count_tokens(known, 4, may_lack=False), count_tokens(known, 4))


def test_a_loss_is_the_mean_of_rows_with_tokens() -> None:
    """A row of only padding has neither probabilities nor tokens, and is no row."""
    probs = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 0.0], [0.25, 0.5, 0.25]])
    counts = torch.tensor([[2, 1, 1], [0, 0, 0], [0, 4, 0]])
    each = [3 * (0.5 * 0.5 + 0.25 * 0.25 * 2), 3 * 0.5]
    torch.testing.assert_close(load_balancing_loss(probs, counts), torch.tensor(sum(each) / 3))
    for number in (2, torch.tensor(2)):
        torch.testing.assert_close(load_balancing_loss(probs, counts, number), torch.tensor(sum(each) / 2))
    torch.testing.assert_close(load_balancing_loss(probs[0], counts[0]), torch.tensor(each[0]))
    torch.testing.assert_close(load_balancing_loss(probs[1], counts[1], 0), torch.tensor(0.0))


class Steered(KeepsFp32):
    """A module with a child, two floating-point buffers, one of integers and one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(2, 2)
        self.register_buffer("bias", torch.full((3,), 1 / 3))
        self.register_buffer("count", torch.ones(3, dtype=torch.int64))
        self.register_buffer("none", None)
        self.register_buffer("scale", torch.full((2,), 1 / 7))
        self.bias: Tensor
        self.count: Tensor
        self.scale: Tensor


def test_only_own_floating_buffers_stay_fp32() -> None:
    module = Steered().double()
    assert module.child.weight.dtype is torch.float64
    assert (module.bias.dtype, module.count.dtype) == (torch.float32, torch.int64)
    kept = module.bias
    module.to_empty(device="cpu")
    assert module.bias.data_ptr() != kept.data_ptr(), "what changes no dtype takes effect"
    module._buffers["bias"] = torch.ones(3, dtype=torch.float16)
    assert module.to(torch.bfloat16).bias.dtype is torch.float32
    for name in ("bias", "scale"):
        exact = getattr(Steered(), name)
        assert torch.equal(getattr(Steered().half(), name), exact), "no cast rounds it"
        setattr(module, name, exact.half())
        module.keep_fp32()
        assert getattr(module, name).dtype is torch.float32
    module._buffers["bias"] = torch.ones(3, dtype=torch.float16)
    module.load_state_dict(copy.deepcopy(module.state_dict()))
    assert module.bias.dtype is torch.float32
    assert module.none is None


def drawn_modules(dtype: torch.dtype) -> dict[str, nn.Module]:
    router, shared = Router(64, 8, 2), SharedExpert(64, 32, ExpertsConfig())
    experts = Experts(2, 64, 32, dtype=dtype)
    for module in (router.to(dtype), shared.to(dtype)):
        module.reset_parameters()  # type: ignore[operator]
    experts.reset_expert(0, None)
    return {"router": router, "shared expert": shared, "experts": experts}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_weights_are_drawn_in_their_dtype_on_the_cpu(dtype: torch.dtype) -> None:
    """Draws have the precision of the weights, and do not follow a default device, on which they would differ."""
    torch.manual_seed(3)
    made = drawn_modules(dtype)
    for name, module in made.items():
        for weight in (p[0] if name == "experts" else p for p in module.parameters()):
            rounded = bool((weight.detach() == weight.detach().float()).all())
            assert rounded == (dtype is torch.float32), name
    layer = MoELayer(config(shared_intermediate=8))
    drawn: list[list[Tensor]] = []
    for device in ("cpu", "meta"):
        torch.manual_seed(4)
        with torch.device(device):
            layer.reset_parameters()
        drawn.append([p.detach().clone() for p in layer.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*drawn, strict=True))
    layer.buffer.close()


@pytest.mark.parametrize("row_wise", [False, True])
def test_rows_stand_alone_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, row_wise: bool) -> None:
    """Only there have rows their own products, which are slower."""
    used: list[str] = []

    def note(name: str, result: Any) -> Any:
        return lambda x, *given: used.append(name) or result(x, *given)

    for module in (router_module, experts_module):
        monkeypatch.setattr(module, "row_wise_linear", note("linear", F.linear))
        monkeypatch.setattr(module, "row_wise_sigmoid", note("sigmoid", torch.sigmoid))
    router = make_router(score_func="sigmoid")
    shared = SharedExpert(H, 8, ExpertsConfig(), gated_output=True)
    x = tokens(2, 3)
    for module, expected in ((router, ["linear", "sigmoid"]), (shared, ["linear"] * 4 + ["sigmoid"])):
        used.clear()
        assert not module.row_wise
        module.row_wise = row_wise
        module(x)
        assert used == (expected if row_wise else [])


def test_a_record_of_a_router_has_its_fields() -> None:
    aux = make_router()(tokens(2, 3))[2]
    assert isinstance(aux, RouterAux)
    assert [t.shape for t in aux] == [(), (), (), (E,), (E,), (6, K)]
    assert [t.requires_grad for t in aux] == [True, True, True, False, True, False]
