"""A layer on one rank: what it shows, makes, refuses and prints, and that it computes each thing once."""

from __future__ import annotations

import copy
import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layer.cases_layer import EXPERTS, HIDDEN, TOKENS, TOPK, config
from layer.cases_overlap import whole
from torch import Tensor, nn

from moe_rt import Buffer, MoEConfig, MoELayer, ThreadGroup
from moe_rt.config.placement import Placement
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.nn import layer as layer_module
from moe_rt.nn.experts import Experts, SharedExpert
from moe_rt.nn.router import Router
from moe_rt.routes.session import RECORDS, REPLAYS

Shown = list[tuple[str, list[int] | None, dict[str, Tensor]]]


def shown_by(layer: MoELayer, x: Tensor) -> Shown:
    """Run a forward, and return what the layer showed."""
    shown: Shown = []

    def see(op: str, offs: Tensor | None = None, **tensors: Tensor) -> None:
        shown.append((op, None if offs is None else offs.tolist(), tensors))

    layer.watcher = lambda: see
    layer(x)
    layer.watcher = None
    return shown


def same_weights(*layers: MoELayer) -> None:
    for other in layers[1:]:
        other.load_state_dict(layers[0].state_dict())


@pytest.mark.parametrize("num_chunks", [1, 2, 3])
def test_what_a_layer_shows(num_chunks: int) -> None:
    """A watcher sees each op's tensors once, in the order of ops; chunks show the rows that one batch shows."""
    plain, layer = MoELayer(config(), group := ThreadGroup.make(1)[0]), MoELayer(config(num_chunks=num_chunks), group)
    same_weights(plain, layer)
    x = torch.randn(TOKENS, HIDDEN)
    shown = shown_by(layer, x)
    ops = [op.op for op in layer.buffer.report().ranks[0].last_ops]
    assert [ops.count(op) for op in ("dispatch", "combine")] == [num_chunks] * 2
    assert [(op, sorted(tensors)) for op, _, tensors in shown] == [
        ("route", ["ids", "weights", "x"]),
        ("dispatch", ["rows", "weights"]),
        ("experts", ["rows"]),
        ("combine", ["out"]),
    ]
    (_, none, route), (_, offs, sent), (_, same_offs, made), (_, nothing, combined) = shown
    idx, weights, _ = layer.router(x)
    torch.testing.assert_close(route, {"x": x, "ids": idx, "weights": weights})
    assert (none, nothing, same_offs) == (None, None, offs)
    assert offs is not None
    assert offs[-1] == TOKENS * TOPK == int(sent["rows"][: offs[-1]].shape[0])
    torch.testing.assert_close(combined["out"], layer(x)[0])
    expected = {op: (ends, tensors) for op, ends, tensors in shown_by(plain, x)}
    for op, got, name in (("dispatch", sent, "rows"), ("dispatch", sent, "weights"), ("experts", made, "rows")):
        want = expected[op][1][name].flatten(1) if name == "rows" else expected[op][1][name][:, None]
        rows = got[name].flatten(1) if name == "rows" else got[name][:, None]
        torch.testing.assert_close(rows[: offs[-1]].sort(0).values, want[: offs[-1]].sort(0).values)
    assert layer(x)[0].shape == x.shape


@pytest.mark.parametrize(("num_chunks", "in_halves"), [(1, False), (1, True), (3, False)])
def test_a_shared_expert_runs_once(num_chunks: int, in_halves: bool) -> None:
    layer = MoELayer(config(shared_intermediate=8, num_chunks=num_chunks), ThreadGroup.make(1)[0])
    calls: list[int] = []
    assert layer.shared_expert is not None
    layer.shared_expert.register_forward_hook(lambda *_: calls.append(1))
    with whole(not in_halves):
        layer(torch.randn(TOKENS, HIDDEN, requires_grad=True))
    assert calls == [1]


class Double(nn.Module):
    """A user's shared expert, which must get rows."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 2
        return 2 * x


@pytest.mark.parametrize("sums", ["ranked", "invariant"])
@pytest.mark.parametrize("own", [False, True])
def test_a_shared_expert_gets_rows_or_sequences(sums: Any, own: bool) -> None:
    """Only one that sums gradients by sequences gets sequences."""
    options = config(sums=sums, **({} if own else {"shared_intermediate": 8}))
    layer = MoELayer(options, ThreadGroup.make(1)[0], shared_expert=Double() if own else None)
    shapes: list[Any] = []
    assert layer.shared_expert is not None
    layer.shared_expert.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))
    x, mask = torch.randn(2, 3, HIDDEN), torch.tensor([[True, False, True], [True, True, True]])
    out, _ = layer(x, mask=mask)
    by_sequence = sums == "invariant" and not own
    assert shapes == [(2, 3, HIDDEN) if by_sequence else (6, HIDDEN)]
    assert out.shape == x.shape
    assert not out[0, 1].any()
    without = MoELayer(config(sums=sums), ThreadGroup.make(1)[0])
    without.load_state_dict(layer.state_dict(), strict=False)
    torch.testing.assert_close(
        out[mask], (without(x, mask=mask)[0] + layer.shared_expert(x.flatten(0, 1)).view(x.shape))[mask]
    )


def test_no_routes_are_noted_unless_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "note_routes", lambda *_: pytest.fail("routes were noted"))
    monkeypatch.setattr(layer_module, "recorded_routes", lambda *_: pytest.fail("routes were replayed"))
    layer = MoELayer(config(), ThreadGroup.make(1)[0])
    layer(torch.randn(2, HIDDEN))
    assert layer.routes_sizes()[:2] == (EXPERTS, TOPK)


def test_what_is_recorded_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record holds the router's choice, and a replay needs the input, K and the layer's id."""
    noted: list[Any] = []
    monkeypatch.setattr(layer_module, "note_routes", lambda *given: noted.append(given) or given[0])
    choice = config(expert_choice=0.3, norm_topk=False)
    layer, x = MoELayer(choice, ThreadGroup.make(1)[0]), torch.randn(4, HIDDEN)
    layer.routing, layer.routes_id = RECORDS, 77
    with torch.no_grad():
        layer.router.weight.zero_()
        _, aux = layer(x)
    ((idx, chosen, number),) = noted
    assert number == 77
    assert torch.equal(chosen, aux.topk_idx)
    assert not torch.equal(idx, chosen), "a token that no expert took is no padding"

    def replayed(*given: Any) -> Tensor:
        noted.append(given)
        return torch.arange(TOPK).expand(4, TOPK)

    noted.clear()
    monkeypatch.setattr(layer_module, "recorded_routes", replayed)
    layer = MoELayer(config(), ThreadGroup.make(1)[0])
    layer.routing, layer.routes_id = REPLAYS, 78
    assert layer(x)[1].tokens_per_expert.tolist() == [4] * TOPK + [0] * (EXPERTS - TOPK)
    ((given, num_topk, number),) = noted
    assert given is x
    assert (num_topk, number) == (TOPK, 78)
    with pytest.raises(InvalidInput, match=r"^topk_idx: got a tensor while routes are replayed, expected None"):
        layer(x, torch.zeros(4, TOPK, dtype=torch.int64))
    with pytest.raises(InvalidInput, match=r"^x: got a NoneType"):
        layer(None)  # type: ignore[arg-type]


def test_every_expert_has_weights_of_its_own() -> None:
    """Draws of many experts are distinct, and those of one seed are the same each time."""
    many = config(num_experts=96, hidden=4, intermediate=2)
    layer, drawn = MoELayer(many, ThreadGroup.make(1)[0]), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        layer.reset_parameters()
        drawn.append(layer.experts.gate_up_proj.detach().clone())
    assert len({tuple(expert.flatten().tolist()) for expert in drawn[0]}) == 96
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


FAULTS: list[tuple[str, dict[str, Any]]] = [
    ("num_chunks", {"num_chunks": 0}),
    ("intermediate", {"intermediate": 0}),
    ("shared_intermediate", {"shared_intermediate": 0}),
    ("jitter", {"jitter": 1.0}),
    ("activation", {"activation": "tanh"}),
    ("weight_layout", {"weight_layout": "megatron"}),
    ("swiglu_limit", {"swiglu_limit": 0.0}),
]


def test_the_first_wrong_field_is_named() -> None:
    """Ranks compare errors, so one of several wrong fields is the first on every rank."""
    for i, (name, fault) in enumerate(FAULTS):
        for _, other in FAULTS[i + 1 :]:
            with pytest.raises(InvalidConfig, match=f"^{name}: got"):
                config(**{**other, **fault})
    with pytest.raises(InvalidConfig, match=r"^shared_gate: got True, expected False without shared_intermediate"):
        config(shared_gate=True, jitter=1.0)
    with pytest.raises(InvalidConfig, match=r"^shared_intermediate: got 8, expected None for a layer that is given"):
        MoELayer(config(shared_intermediate=8), ThreadGroup.make(1)[0], shared_expert=Double(), router=nn.Linear(1, 1))  # type: ignore[arg-type]


def test_the_least_sizes() -> None:
    least = MoEConfig(
        hidden=1, intermediate=1, shared_intermediate=1, num_experts=1, num_topk=1, num_max_tokens_per_rank=1
    )
    layer = MoELayer(least, ThreadGroup.make(1)[0])
    for x in (torch.ones(1, 1), torch.ones(0, 1)):
        x.requires_grad_()
        out, aux = layer(x)
        (out.sum() + aux.loss).backward()
        assert out.shape == x.shape


def test_the_dtype_of_rows() -> None:
    """The config's comes first, then the argument, then torch's default."""
    assert config().buffer_sizes()["dtype"] is torch.float32
    assert config().buffer_sizes(torch.bfloat16)["dtype"] is torch.bfloat16
    assert config(dtype=torch.float64).buffer_sizes(torch.bfloat16)["dtype"] is torch.float64
    torch.set_default_dtype(torch.float64)
    try:
        assert config().buffer_sizes()["dtype"] is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_text_of_a_layer() -> None:
    """It names what differs from defaults, and this rank's experts."""
    layer = MoELayer(config(score_func="sigmoid", biases=True, num_chunks=2, timeout_s=77.0), ThreadGroup.make(1)[0])
    text = layer.extra_repr()
    assert text == (
        "biases=True, num_experts=7, num_topk=3, score_func=sigmoid, aux_loss_coef=0.1, z_loss_coef=0.01, hidden=16, "
        "intermediate=24, num_max_tokens_per_rank=10, num_chunks=2, expert_ids=[0, 1, 2, 3, 4, 5, 6]"
    )
    assert text in repr(layer)


OTHER_SIZES: list[tuple[str, dict[str, Any], str]] = [
    ("num_max_tokens_per_rank", {"num_max_tokens_per_rank": 9}, "got 9, expected 10"),
    ("hidden", {"hidden": 32}, "got 32, expected 16"),
    ("num_topk", {"num_topk": 2}, "got 2, expected 3"),
    ("num_experts", {"num_experts": 14}, "got 14, expected 7"),
    ("layout", {"layout": "tokens"}, "got tokens, expected experts"),
]


@pytest.mark.parametrize(
    ("name", "changes", "text"), OTHER_SIZES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_buffer_of_other_sizes(name: str, changes: dict[str, Any], text: str) -> None:
    sizes = config().buffer_sizes(torch.float32)
    sizes = {key: value for key, value in sizes.items() if key in ("hidden", "num_topk", "num_experts", "dtype")}
    refused = pytest.raises(InvalidConfig, match=rf"^buffer\.{name}: {text} as in the layer")
    with Buffer(None, **{**sizes, "num_max_tokens_per_rank": TOKENS, **changes}) as buffer, refused:
        MoELayer(config(), buffer=buffer)


def test_a_buffer_that_is_none() -> None:
    with pytest.raises(InvalidConfig, match=r"^buffer: got SimpleNamespace, expected a moe_rt.Buffer"):
        MoELayer(config(), buffer=SimpleNamespace())  # type: ignore[arg-type]


def test_a_given_buffer_has_the_dtype_that_is_computed_in() -> None:
    """It is the experts' dtype, or autocast's, except for fp64."""
    group = ThreadGroup.make(1)[0]
    layer, x = MoELayer(config(), group), torch.randn(2, HIDDEN)
    sizes = config().buffer_sizes(torch.bfloat16)
    with Buffer(group, **sizes) as half, Buffer(group, **{**sizes, "dtype": torch.float64}) as wide:
        with pytest.raises(InvalidConfig, match=r"^buffer\.dtype: got torch\.bfloat16, expected torch\.float32"):
            layer(x, buffer=half)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x, buffer=half)[0].dtype is torch.float32
            assert layer.double()(x.double(), buffer=wide)[0].dtype is torch.float64
        torch.testing.assert_close(layer(x.double(), buffer=wide)[0], layer(x.double())[0])
        fixed = MoELayer(config(dtype=torch.bfloat16), group)
        assert fixed(x, buffer=half)[0].dtype is torch.float32
        with pytest.raises(InvalidConfig, match=r"^buffer\.dtype: got torch\.float64, expected torch\.bfloat16"):
            fixed(x, buffer=wide)


@pytest.mark.parametrize(
    ("ranks", "sizes", "text"),
    [
        ([0, 1], (2, 4, None), None),
        ([0], (2, 3, None), "group: got a mesh of 1 ranks, expected 2 as in the buffer"),
        ([0, 1], (2, 3, None), "num_experts: got 3, expected a multiple of the mesh's 2 ranks"),
        ([0, 1], (2, 4, (0, 1, 0, 1)), r"placement: got \[0, 1, 0, 1\], expected contiguous blocks, or a ProcessGroup"),
        ([1, 0], (2, 4, None), r"group: got a mesh of ranks \[1, 0\], expected ascending ones, or a ProcessGroup"),
    ],
    ids=str,
)
def test_blocks_of_a_mesh(ranks: list[int], sizes: tuple[int, int, Any], text: str | None) -> None:
    num_ranks, num_experts, given = sizes
    placement = Placement.from_ranks(given) if given else Placement.contiguous(num_experts, num_ranks)
    spec: Any = SimpleNamespace(num_ranks=num_ranks, num_experts=num_experts, placement=placement)
    mesh: Any = SimpleNamespace(size=lambda: len(ranks), mesh=torch.tensor([ranks]))
    if text is None:
        layer_module._check_blocks(spec, mesh)
        return
    with pytest.raises(InvalidConfig, match=f"^{text}"):
        layer_module._check_blocks(spec, mesh)


def test_a_copy_computes_the_same_with_weights_of_its_own() -> None:
    """State survives a copy, state_dict and train; modules that the layer made by rows stay so."""
    options = config(sums="invariant", shared_intermediate=8, router_bias=True, balance_bias=True)
    layer = MoELayer(options, ThreadGroup.make(1)[0])
    made: list[Any] = [layer.router, layer.experts, layer.shared_expert]
    assert [type(module) for module in made] == [Router, Experts, SharedExpert]
    assert all(module.row_wise for module in made)
    other, x = copy.deepcopy(layer), torch.randn(3, HIDDEN)
    data = io.BytesIO()
    torch.save(layer.state_dict(), data)
    data.seek(0)
    loaded = MoELayer(options, ThreadGroup.make(1)[0])
    loaded.load_state_dict(torch.load(data))
    for same in (other, loaded, layer.eval(), layer.train()):
        torch.testing.assert_close(same(x)[0], layer(x)[0], rtol=0, atol=0)
    with torch.no_grad():
        other.experts.down_proj.zero_()
        assert not torch.equal(other(x)[0], layer(x)[0])
        assert not layer(x)[0].requires_grad
