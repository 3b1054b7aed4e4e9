"""Recordings and replays of layers without a buffer: what they keep, what they give, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_rt import routes
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.routes import ops, session
from moe_rt.routes.calls import Calls, in_backward
from moe_rt.routes.file import MOST_EXPERTS, Routes
from moe_rt.routes.session import RECORDS, REPLAYED, REPLAYS

E, K = 6, 2


class Layer(nn.Module):
    """Takes part in sessions as a MoELayer does."""

    def __init__(self, num_experts: int = E, num_topk: int = K) -> None:
        super().__init__()
        self.routing, self.routes_id, self.sizes = 0, 0, (num_experts, num_topk)

    def routes_sizes(self) -> tuple[int, int, None]:
        return (*self.sizes, None)

    def refuse_routes(self, error: InvalidInput) -> None:
        raise error

    def forward(self, ids: Tensor) -> Tensor:
        if self.routing & REPLAYS:
            ids = ops.recorded_routes(torch.zeros(len(ids), 3), K, self.routes_id)
        return ops.note_routes(ids, ids, self.routes_id) if self.routing & RECORDS else ids


def two() -> nn.Sequential:
    return nn.Sequential(Layer(), Layer())


def ids(tokens: int, first: int = 0) -> Tensor:
    return (torch.arange(tokens * K).reshape(tokens, K) + first) % E


def recorded(model: nn.Sequential, *batches: Tensor) -> routes.Recording:
    with routes.record(model) as made:
        for batch in batches:
            for number, layer in enumerate(model):
                layer((batch + number) % E)
    return made


def test_each_micro_batch_has_a_part_for_every_rank() -> None:
    source = recorded(two(), ids(4), ids(2), ids(3)).routes()
    with pytest.raises(InvalidConfig, match="tokens of micro-batch 2: got 3, expected a multiple of 2 ranks"):
        session._shares(source, 0, 2, None)


def test_tokens_of_each_micro_batch_are_checked() -> None:
    source = recorded(two(), ids(4), ids(2)).routes()
    good, bad = torch.tensor([0, -1, 5]), torch.tensor([6])
    with pytest.raises(InvalidConfig, match=r"tokens\[2\]: got torch.int64 \[1\], expected numbers from -1 to 5"):
        session._shares(source, 0, 2, [good, good, bad])


def test_a_recording_keeps_micro_batches_in_turn() -> None:
    made = recorded(two(), ids(3), ids(0), ids(2, first=1)).routes()
    rows = torch.cat([ids(3), ids(2, first=1)])
    assert made.topk_idx.dtype == torch.int16
    assert made.topk_idx.tolist() == torch.stack([rows, (rows + 1) % E], 1).tolist()
    assert (made.num_experts, made.num_topk, made.layers, made.num_ranks) == (E, K, ("0", "1"), 1)
    assert (made.num_micro_batches, made.micro_batch.tolist(), made.rank.tolist()) == (3, [0, 0, 0, 2, 2], [0] * 5)
    assert (made.micro_batch.dtype, made.rank.dtype, made.of_rank) == (torch.int32, torch.int32, None)
    empty = routes.Recording(two()).routes()
    assert (list(empty.topk_idx.shape), empty.topk_idx.dtype, empty.num_micro_batches) == ([0, 2, K], torch.int16, 0)


def test_a_recording_keeps_copies() -> None:
    """A caller may reuse the memory of its ids."""
    model, given = two(), ids(2).to(torch.int16)
    with routes.record(model) as made:
        for layer in model:
            layer(given)
    given.zero_()
    assert made.routes().topk_idx[:, 0].tolist() == ids(2).tolist()


def test_a_replay_gives_each_micro_batch_once() -> None:
    model = two()
    made = recorded(model, ids(3), ids(2, first=1))
    with routes.replay(made, model):
        for batch in (ids(3), ids(2, first=1)):
            for number, layer in enumerate(model):
                got = layer(torch.zeros(len(batch), K, dtype=torch.int64))
                assert got.dtype == torch.int64
                assert got.tolist() == ((batch + number) % E).tolist()
        for number, layer in enumerate(model):
            with pytest.raises(InvalidInput, match=f"{number}: got micro-batch 2, expected only 2, as recorded"):
                layer(ids(1))


@pytest.mark.parametrize("tokens", [2, 4])
def test_a_replay_refuses_another_number_of_tokens(tokens: int) -> None:
    model = two()
    with routes.replay(recorded(model, ids(3)), model):
        text = f"1: got {tokens} tokens in micro-batch 0, expected 3 on rank 0 of 1, as recorded"
        with pytest.raises(InvalidInput, match=text) as raised:
            model[1](ids(tokens))
        assert raised.value.rank == 0


def test_bits_of_a_layer_say_what_it_does() -> None:
    model = two()
    made = routes.record(model)
    assert [layer.routing for layer in model] == [0, 0]
    with made:
        assert [layer.routing for layer in model] == [RECORDS] * 2
        numbers = [layer.routes_id for layer in model]
        assert len({0, *numbers}) == 3
        for layer in model:
            layer(ids(1))
        with pytest.raises(InvalidConfig, match="0, 1: got a layer that records or replays already, expected one that"):
            made.__enter__()
    assert [layer.routing for layer in model] == [0, 0]
    with routes.replay(made, model) as again, routes.record(model):
        assert [layer.routing for layer in model] == [RECORDS | REPLAYS] * 2
        assert [layer.routes_id for layer in model] == numbers
    assert [layer.routing for layer in model] == [REPLAYED] * 2
    with again:
        assert [layer.routing for layer in model] == [REPLAYS] * 2
    with made:
        assert [layer.routing for layer in model] == [RECORDS] * 2
    assert [layer.routing for layer in model] == [0] * 2
    assert [layer.routes_id for layer in model] == numbers


def test_a_copy_of_a_layer_gets_an_id_of_its_own() -> None:
    """A copy that is made while a session runs has the layer's id, of which only one may be in use."""
    layer, copy = Layer(), Layer()
    with routes.record(layer):
        copy.routes_id = layer.routes_id
        with routes.record(copy) as other:
            assert copy.routes_id not in (0, layer.routes_id)
            copy(ids(2))
        layer(ids(1))
    assert other.routes().topk_idx.shape == (2, 1, K)


def test_ids_outside_a_session_go_nowhere() -> None:
    """A graph that was compiled for a recording runs on after it; one that was compiled for a replay cannot."""
    layer = Layer()
    with routes.record(layer) as made:
        layer(ids(2))
    assert ops.note_routes(ids(3), ids(3), layer.routes_id).tolist() == ids(3).tolist()
    assert len(made.routes().topk_idx) == 2
    with pytest.raises(InvalidConfig, match="routes: got a compiled forward outside the replay that it was made for"):
        ops.recorded_routes(torch.zeros(2, 3), K, layer.routes_id)


def test_what_a_layer_notes_is_a_copy_of_its_ids() -> None:
    given = ids(2)
    got = ops.note_routes(given, given + 1, 0)
    assert got.data_ptr() != given.data_ptr()
    assert got.tolist() == given.tolist()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Layer(E, K), Layer(E + 1, K)], "1: got E = 7, K = 2, expected E = 6, K = 2 as in 0"),
        ([Layer(E, K), Layer(E, K + 1)], "1: got E = 6, K = 3, expected E = 6, K = 2 as in 0"),
        ([Layer(MOST_EXPERTS + 1, K)], f"num_experts: got {MOST_EXPERTS + 1}, expected at most {MOST_EXPERTS}"),
        ([nn.Linear(1, 1)], "model: got list, expected a model with a MoELayer"),
    ],
)
def test_layers_that_cannot_be_recorded_together(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        routes.record(layers)
    assert routes.record([Layer(MOST_EXPERTS, K)]).num_experts == MOST_EXPERTS


def test_names_of_layers_leave_wrappers_out() -> None:
    model = nn.ModuleDict({"a": nn.ModuleDict({"module": Layer(), "b": Layer()}), "_orig_mod": nn.Sequential(Layer())})
    assert list(session.routed_layers(model)) == ["a", "a.b", "0"]
    assert list(session.routed_layers([model["a"], Layer()])) == ["0", "0.b", "1"]
    assert list(session.routed_layers(Layer())) == ["layer"]


def of(layers: tuple[str, ...], tokens: int = 3, **changes: Any) -> Routes:
    where = torch.zeros(tokens, dtype=torch.int32)
    chosen = torch.stack([(ids(tokens) + at) % E for at in range(len(layers))], 1).to(torch.int16)
    return replace(Routes(chosen, E, layers, 1, 1, where, where), **changes)


def test_recorded_layers_are_found_by_name_whatever_their_order() -> None:
    model = nn.ModuleDict({"a": Layer(), "b": Layer()})
    with routes.replay(of(("b", "c", "a")), model):
        assert model["a"](ids(3)).tolist() == ((ids(3) + 2) % E).tolist()
        assert model["b"](ids(3)).tolist() == ids(3).tolist()


@pytest.mark.parametrize(
    ("recorded_ones", "layers", "found"),
    [
        (["a", "b"], ["b"], [1]),
        (["b", "a"], ["a", "b"], [1, 0]),
        (["a"], ["z"], [0]),
        (["0", "1", "2"], ["x.2", "x.0"], [2, 0]),
        (["0", "1", "x"], ["y.1"], [1]),
    ],
    ids=str,
)
def test_columns_of_layers(recorded_ones: list[str], layers: list[str], found: list[int]) -> None:
    assert session.columns(recorded_ones, layers) == found


@pytest.mark.parametrize(
    ("recorded_ones", "layers"),
    [
        (["0", "1"], ["a.0", "a.1", "a.2"]),
        (["0", "1", "1.x"], ["a.0"]),
        (["0", "1", "x"], ["a"]),
        (["0", "1", "2"], ["a.1", "b.1"]),
        (["0", "1", "2"], ["a.3"]),
    ],
    ids=str,
)
def test_columns_that_nothing_tells_apart(recorded_ones: list[str], layers: list[str]) -> None:
    with pytest.raises(InvalidConfig) as raised:
        session.columns(recorded_ones, layers)
    assert raised.value.args[0] == f"routes: layers: got {recorded_ones}, expected those of {layers}"


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        (torch.tensor([2, 0]), [[4, 5], [0, 1]]),
        (torch.tensor([-1, 1], dtype=torch.int32), [[-3, -3], [2, 3]]),
        (torch.tensor([], dtype=torch.int64), []),
        (torch.tensor([3]), r"tokens[0]: got torch.int64 [1], expected numbers from -1 to 2"),
        (torch.tensor([-2]), r"tokens[0]: got torch.int64 [1], expected numbers from -1 to 2"),
        (torch.tensor([[0]]), r"tokens[0]: got torch.int64 [1, 1], expected numbers from -1 to 2"),
        (torch.tensor([0.0]), r"tokens[0]: got torch.float32 [1], expected numbers from -1 to 2"),
    ],
    ids=str,
)
def test_tokens_are_chosen_by_number(tokens: Tensor, found: list[list[int]] | str) -> None:
    """The number of ranks that recorded does not matter then."""
    source = of(("0",), num_ranks=3)
    if isinstance(found, str):
        with pytest.raises(InvalidConfig) as raised:
            routes.replay(source, [Layer()], tokens=[tokens])
        assert raised.value.args[0].endswith(found)
        return
    layer = Layer()
    with routes.replay(source, [layer], tokens=[tokens]):
        assert layer(torch.zeros(len(tokens), K, dtype=torch.int64)).tolist() == found


@pytest.mark.parametrize(("num_ranks", "rank"), [(2, 0), (1, 1)])
def test_another_ranks_own_routes_are_refused(num_ranks: int, rank: int) -> None:
    text = f"routes: got those of rank {rank} of {num_ranks}, expected those of rank 0 of 1, those of all ranks"
    with pytest.raises(InvalidConfig, match=text):
        routes.replay(of(("0",), num_ranks=num_ranks, of_rank=rank), [Layer()])


def test_forwards_are_numbered_and_recomputations_find_theirs() -> None:
    calls, seen = Calls(), []
    assert not in_backward()

    def run(x: Tensor) -> Tensor:
        seen.append((calls.number(), calls.recomputes()))
        return x.sin()

    for reentrant in (True, False):
        x = torch.ones(1, requires_grad=True)
        out = [checkpoint(run, x, use_reentrant=reentrant) for _ in range(2)]
        out[1].sum().backward()
        out[0].sum().backward()
    assert seen == [(0, False), (1, False), (1, True), (0, True), (2, False), (3, False), (3, True), (2, True)]
    assert calls.count == 4


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("inner", [(), (0, 1, 2), (1, 2)], ids=["a region", "of regions", "partly of regions"])
def test_a_region_may_run_a_layer_often(inner: tuple[int, ...], backwards: int, reentrant: bool) -> None:
    """Each recomputation has the number of the forward with the same input; `inner` are regions themselves."""
    calls, numbers, recomputed = Calls(), {}, []

    def run(x: Tensor) -> Tensor:
        number = calls.number()
        if in_backward():
            recomputed.append((number, numbers[x.item()]))
        else:
            numbers[x.item()] = number
        return x.sin()

    def region(x: Tensor) -> Tensor:
        for i in range(3):
            x = checkpoint(run, x, use_reentrant=reentrant) if i in inner else run(x)
        return x

    x = torch.ones((), requires_grad=True)
    y = checkpoint(region, checkpoint(region, x, use_reentrant=reentrant), use_reentrant=reentrant)
    for _ in range(backwards):
        y.backward(retain_graph=backwards > 1)
    if backwards > 1 and not inner:
        assert [len(each) for each in calls._numbers.values()] == [3, 3], "recomputations add nothing"
    assert {number for number, _ in recomputed} >= {0, 1, 3, 4}
    assert [number for number, _ in recomputed] == [expected for _, expected in recomputed]


class _Runs(torch.autograd.Function):
    """Calls a function in its forward. Its backward unpacks a tensor, and so recomputes the region that holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * x.cos(), None


def test_a_recomputation_is_of_the_region_not_of_the_op_that_needs_it() -> None:
    calls, numbers = Calls(), []

    def run(x: Tensor) -> Tensor:
        numbers.append(calls.number())
        return x.sin()

    def region(x: Tensor) -> Tensor:
        return _Runs.apply(_Runs.apply(x, run), run)  # type: ignore[no-any-return]

    checkpoint(region, torch.ones((), requires_grad=True), use_reentrant=False).backward()
    assert numbers == [0, 1, 0, 1]


class _RunsAgain(torch.autograd.Function):
    """Calls a function in its forward, by way of another, and twice in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        return _run_in(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        _run_in(ctx, x)
        _run_in(ctx, x)
        return grad * x.cos(), None


def _run_in(ctx: Any, x: Tensor) -> Tensor:
    return ctx.run(x)  # type: ignore[no-any-return]


def test_an_op_that_recomputes_by_itself() -> None:
    calls, numbers = Calls(), []

    def run(x: Tensor) -> Tensor:
        numbers.append(calls.number())
        return x.sin()

    x = torch.ones((), requires_grad=True)
    _RunsAgain.apply(_RunsAgain.apply(x, run), run).backward()
    assert numbers == [0, 1, 1, 1, 0, 0]


def test_only_a_backward_after_the_replay_recomputes() -> None:
    layer = Layer()
    assert not session.recomputes(layer.routes_id)
    with routes.replay(of(("0",)), [layer]):
        layer(ids(3))
    assert not session.recomputes(layer.routes_id)
