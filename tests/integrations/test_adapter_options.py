"""Options of the Megatron and torchtitan adapters, and where each arrives: buffers, tags, budgets and routes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from support.signatures import misplaced, unlike_defaults

from moe_rt import ThreadGroup
from moe_rt.buffer.pool import BufferPool, GrowingOptions
from moe_rt.errors import InvalidConfig, InvalidInput, MissingPackage, OutOfSharedMemory
from moe_rt.integrations import exchange, megatron, torchtitan
from moe_rt.integrations.exchange import LayerExchange
from moe_rt.integrations.megatron import MoeRtManager, install, replace_deepep
from moe_rt.integrations.torchtitan import MoeRtTokenDispatcher, token_dispatcher

GIVEN = {"capacity_factor": 3.5, "timeout_s": 4.5, "init_timeout_s": 5.5, "num_threads": 3, "sums": "invariant"}


def text_of(error: pytest.ExceptionInfo[Any]) -> str:
    return str(error.value).rpartition(" (moe-rt docs")[0]


@pytest.mark.parametrize("fixed", [True, False])
def test_a_buffer_that_could_not_be_made_is_asked_for_again(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer whose next kind of rows finds no memory still has its buffer for the rows before."""
    asked: list[torch.dtype] = []
    fails = [False, True, False]

    def made(self: BufferPool, *options: Any, **sizes: Any) -> Any:
        asked.append(sizes["dtype"])
        if fails[len(asked) - 1]:
            raise OutOfSharedMemory("no memory")
        dtype = sizes["dtype"]
        return SimpleNamespace(new_tag=lambda: 10 + len(asked), dispatch=lambda *given: (dtype, given[-1]))

    monkeypatch.setattr(BufferPool, "fixed" if fixed else "growing", made)
    monkeypatch.setattr(exchange, "Buffer", ())
    options = GrowingOptions(num_max_tokens_per_rank=7 if fixed else None)
    layer = LayerExchange(ThreadGroup.make(1)[0], num_experts=4, num_topk=2, options=options)
    idx, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)

    def dispatched(dtype: torch.dtype) -> Any:
        return layer.dispatch(torch.zeros(3, 8, dtype=dtype), idx, weights)

    assert dispatched(torch.float32) == (torch.float32, 11)
    with pytest.raises(OutOfSharedMemory):
        dispatched(torch.bfloat16)
    assert dispatched(torch.float32) == (torch.float32, 11)
    assert dispatched(torch.bfloat16) == (torch.bfloat16, 13)
    assert asked == [torch.float32, torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("fixed", [True, False])
def test_a_layer_asks_for_a_buffer_of_its_rows_once(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option and size arrives; a buffer is asked for when the rows' size or dtype changes, and gives a tag."""
    asked: list[dict[str, Any]] = []

    def made(self: BufferPool, *options: Any, **sizes: Any) -> Any:
        asked.append({"options": options, **sizes})
        return SimpleNamespace(new_tag=lambda: 10 + len(asked), dispatch=lambda *given: given)

    monkeypatch.setattr(BufferPool, "fixed" if fixed else "growing", made)
    options = GrowingOptions(**{**GIVEN, "num_max_tokens_per_rank": 7 if fixed else None})
    layer = LayerExchange(ThreadGroup.make(3)[1], num_experts=6, num_topk=2, options=options)
    assert layer.num_ranks == 3
    ids, weights = torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)
    for number, (hidden, dtype) in enumerate(
        ((8, torch.float32), (8, torch.bfloat16), (16, torch.bfloat16), (8, torch.float32)), 1
    ):
        x = torch.zeros(4, hidden, dtype=dtype)
        for _ in range(2):
            assert all(a is b for a, b in zip(layer.dispatch(x, ids, weights), (x, ids, weights), strict=False))
            assert layer.dispatch(x, ids, weights)[3] == 10 + number
        assert len(asked) == number
        sizes = {"num_experts": 6, "num_topk": 2, "hidden": hidden, "dtype": dtype}
        if fixed:
            assert asked[-1] == {"options": (), "num_max_tokens_per_rank": 7, **sizes, **options.arguments()}
        else:
            assert asked[-1] == {"options": (options,), **sizes}


def test_layers_share_a_buffer_and_keep_apart() -> None:
    """Layers that are made one after the other join one pool; layers of the same fixed sizes share a buffer too."""

    def work(group: ThreadGroup) -> None:
        x, ids, weights = torch.randn(3, 8), torch.tensor([[0], [1], [0]]), torch.rand(3, 1)
        for size in (None, 4):
            options = GrowingOptions(num_max_tokens_per_rank=size)
            layers = [LayerExchange(group, num_experts=2, num_topk=1, options=options) for _ in range(2)]
            received = [layer.dispatch(x, ids, weights) for layer in layers]
            assert layers[0]._buffer is layers[1]._buffer
            assert layers[0]._tag != layers[1]._tag
            assert received[0].handle.tag == layers[0]._tag
            for each in received:
                assert torch.equal(each.combine(each.rows), x * weights)
            late = LayerExchange(group, num_experts=2, num_topk=1, options=options)
            late.open(8, torch.float32)
            assert (late._buffer is layers[0]._buffer) is (size is not None)

    ThreadGroup.run(work, 2, timeout_s=120)


def test_the_group_of_a_mesh_is_the_groups_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meshes of one group share a pool, which is found by the group."""
    group = ThreadGroup.make(1)[0]

    class Mesh:
        pass

    monkeypatch.setattr(exchange, "DeviceMesh", Mesh)
    monkeypatch.setattr(exchange, "process_group_of", lambda mesh: group if isinstance(mesh, Mesh) else None)
    monkeypatch.setattr(exchange, "rendezvous_of", lambda mesh: SimpleNamespace(size=5))
    layers = [LayerExchange(mesh, num_experts=2, num_topk=1, options=GrowingOptions()) for mesh in (Mesh(), Mesh())]  # type: ignore[arg-type]
    assert layers[0]._pool is layers[1]._pool
    assert layers[0]._pool.group is group
    assert layers[0].num_ranks == 5


class Recorded:
    """Replacement for a LayerExchange, which records what it was made with."""

    made: list[Recorded]
    num_ranks = 2

    def __init__(self, group: Any, **given: Any) -> None:
        self.group, self.given = group, given
        self.opened: list[Any] = []
        Recorded.made.append(self)

    def open(self, hidden: int, dtype: torch.dtype) -> None:
        self.opened.append((hidden, dtype))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    Recorded.made = []
    for module in (megatron, torchtitan):
        monkeypatch.setattr(module, "LayerExchange", Recorded)
    return Recorded.made


@pytest.mark.parametrize("budget", [None, 1.5])
def test_options_of_a_manager(made: list[Recorded], budget: float | None) -> None:
    """A budget is the capacity of a second exchange, which drops rows; everything else of both is the same."""
    given = unlike_defaults(MoeRtManager, leave_out=["config"])
    given |= {"capacity_factor": None} if budget else {}
    config = SimpleNamespace(moe_flex_dispatcher_num_sms=6, moe_expert_rank_capacity_factor=budget)
    manager = MoeRtManager("group", 3, 4, 6, config, **given)  # type: ignore[arg-type]
    assert (manager.group, manager.num_local_experts, manager.router_topk, manager.num_experts) == ("group", 3, 4, 6)
    assert manager.static_shapes is given.pop("static_shapes")
    assert manager.moe_expert_rank_capacity_factor == budget
    assert not hasattr(manager, "over_budget")
    assert len(made) == (2 if budget else 1)
    for each in made:
        assert (each.group, each.given["num_experts"], each.given["num_topk"]) == ("group", 6, 4)
    options = made[0].given["options"]
    assert misplaced({**given, "num_sms": 6, "overflow": "raise"}, options) == {}
    if budget:
        assert made[1].given["options"] == replace(options, capacity_factor=1.5, overflow="drop")
    without = MoeRtManager(None, 3, 4, 6, SimpleNamespace())
    assert made[-1].given["options"] == GrowingOptions()
    assert without.moe_expert_rank_capacity_factor is without.get_number_of_tokens_per_expert() is None
    rows = torch.zeros(2, 3)
    assert without.get_restored_hidden_states_by_experts(rows) is rows


def dispatcher_of(**config: Any) -> Any:
    config = {"moe_router_topk": 2, "num_moe_experts": 6, **config}
    sizes = {"tp_size": 3, "tp_ep_group": "group", "num_local_experts": 9}
    return SimpleNamespace(config=SimpleNamespace(**config), _comm_manager=None, **sizes)


def test_an_installed_manager_has_the_sizes_of_the_dispatcher(made: list[Recorded]) -> None:
    """Each tensor-parallel rank gets a copy of a token, so entries and experts are multiplied."""
    dispatcher, given = dispatcher_of(), unlike_defaults(MoeRtManager, leave_out=["config"])
    manager = install(dispatcher, **given)
    assert dispatcher._comm_manager is manager
    assert dispatcher.cudagraph_attrs == ["_comm_manager.token_probs", "_comm_manager.token_indices"]
    assert (manager.group, manager.num_local_experts, manager.router_topk, manager.num_experts) == ("group", 9, 6, 18)
    assert manager.static_shapes is given.pop("static_shapes")
    assert misplaced(given, made[0].given["options"]) == {}


@pytest.mark.parametrize("name", megatron._WANT_ALIGNED_ROWS)
def test_experts_that_want_aligned_rows(made: list[Recorded], name: str) -> None:
    install(dispatcher_of(**{name: None}))
    install(dispatcher_of(**{name: False}))
    with pytest.raises(InvalidConfig) as caught:
        install(dispatcher_of(**{name: "yes"}))
    assert text_of(caught) == f"{name}: got yes, expected it unset: rows come without gaps"


def test_texts_of_a_manager(made: list[Recorded]) -> None:
    budget = SimpleNamespace(moe_expert_rank_capacity_factor=1.5)
    refusals: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: MoeRtManager(None, 1, 1, 2, budget, capacity_factor=2.0),
            "capacity_factor: got 2.0, expected None with moe_expert_rank_capacity_factor = 1.5",
        ),
        (
            lambda: install(SimpleNamespace()),
            "dispatcher: got SimpleNamespace, expected MoEFlexTokenDispatcher: "
            "moe_rt.integrations.megatron.replace_deepep() before the model is built, with "
            "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep",
        ),
    ]
    manager = MoeRtManager(None, 2, 2, 6)
    rows, good = torch.zeros(3, 4), torch.zeros(3, 6)
    refusals += [
        (lambda: manager.dispatch(rows), "routing_map: got none, expected setup_metadata before dispatch"),
        (lambda: manager.combine(rows), "hidden_states: got none dispatched, expected dispatch before combine"),
        (
            lambda: manager.get_permuted_hidden_states_by_experts(rows),
            "hidden_states: got none dispatched, expected dispatch before",
        ),
        (
            lambda: manager.setup_metadata(good[:, 1:], good),
            "routing_map: got [3, 5], expected 6 entries for each token",
        ),
        (lambda: manager.setup_metadata(good, good[:, 1:]), "probs: got [3, 5], expected 6 entries for each token"),
    ]
    for call, text in refusals:
        with pytest.raises((InvalidConfig, InvalidInput)) as caught:
            call()
        assert text_of(caught) == text
    manager.setup_metadata(good, good)
    with pytest.raises(InvalidConfig) as caught:
        manager.dispatch(rows)
    assert text_of(caught) == "num_local_experts: got 2, expected 6 experts divided by 2 ranks"


@pytest.mark.parametrize("num_topk", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_entries_of_any_map(num_topk: int, dtype: torch.dtype, made: list[Recorded]) -> None:
    draw = torch.Generator().manual_seed(num_topk)
    routing_map = torch.rand(40, 3, 2, generator=draw) < 0.4
    probs = torch.rand(40, 3, 2, generator=draw).requires_grad_()
    manager = MoeRtManager(None, 3, num_topk, 6)
    manager.setup_metadata(routing_map.to(dtype), probs)
    assert manager.token_indices is not None
    assert manager.token_probs is not None
    for token, chosen in enumerate(routing_map.flatten(1).tolist()):
        experts = [e for e in range(6) if chosen[e]]
        ids = experts[:num_topk] + [-1] * (num_topk - len(experts))
        weights = [float(probs.detach().flatten(1)[token, e]) if e >= 0 else 0.0 for e in ids]
        assert manager.token_indices[token].tolist() == ([6] * num_topk if len(experts) > num_topk else ids)
        assert manager.token_probs[token].tolist() == weights
    manager.token_probs.sum().backward()
    assert probs.grad is not None
    assert probs.grad.count_nonzero() == (manager.token_probs > 0).sum()


def test_rows_over_the_budget_are_dropped_and_said() -> None:
    """The flag stays one tensor, which only Megatron clears; without a budget every row arrives."""

    def work(group: ThreadGroup) -> None:
        config = SimpleNamespace(moe_expert_rank_capacity_factor=1.0)
        manager = MoeRtManager(group, 1, 1, 2, config, num_max_tokens_per_rank=64)
        x = torch.ones(64, 8)

        def step(first: int, factor: float | None = 1.0) -> int:
            """Send the first tokens to rank 0, the others to rank 1, and return the rows that came."""
            routing_map = torch.zeros(64, 2, dtype=torch.bool)
            routing_map[:first, 0] = routing_map[first:, 1] = True
            manager.moe_expert_rank_capacity_factor = factor
            manager.setup_metadata(routing_map, routing_map.float())
            rows = manager.dispatch(x)
            counts = manager.get_number_of_tokens_per_expert()
            assert counts is not None
            real, probs = manager.get_permuted_hidden_states_by_experts(rows)
            assert len(real) == len(probs) == int(counts.sum())
            out = manager.combine(manager.get_restored_hidden_states_by_experts(real))
            assert manager.get_number_of_tokens_per_expert() is manager.dispatched_probs is None
            assert torch.equal(out.sum(1) / 8, (out[:, 0] != 0).float())
            return int(counts.sum())

        assert step(64, None) == (0 if group.rank else 128)
        assert not hasattr(manager, "over_budget")
        assert step(32) == 64
        flag = manager.over_budget
        assert (flag.dtype, flag.tolist()) == (torch.bool, [False])
        assert step(64) < 128
        assert flag.tolist() == [group.rank == 0]
        assert step(32) == 64
        assert flag.tolist() == [group.rank == 0]  # until it is cleared
        flag.zero_()
        step(32)
        step(64, None)
        assert manager.over_budget is flag
        assert flag.tolist() == [False]
        with pytest.raises(InvalidInput):
            manager.combine(x)

    ThreadGroup.run(work, 2, timeout_s=120)


def test_megatron_makes_managers_with_the_last_options(monkeypatch: pytest.MonkeyPatch, made: list[Recorded]) -> None:
    names = [f"megatron{rest}" for rest in ("", ".core", ".core.transformer", ".core.transformer.moe")]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    moe: Any = sys.modules[names[-1]]
    moe.token_dispatcher = SimpleNamespace()
    with pytest.raises(MissingPackage) as caught:
        replace_deepep()
    assert text_of(caught) == "megatron.core: got none with a _DeepepManager, expected 0.11 or later"
    moe.token_dispatcher._DeepepManager = object
    for size in (5, 7):
        replace_deepep(num_max_tokens_per_rank=size, timeout_s=3.0)
        manager = moe.token_dispatcher._DeepepManager("group", 3, 2, 6, config=None)
        assert isinstance(manager, MoeRtManager)
        assert made[-1].given["options"] == GrowingOptions(num_max_tokens_per_rank=size, timeout_s=3.0)
    monkeypatch.delattr(moe, "token_dispatcher")
    with pytest.raises(
        MissingPackage, match=r"^megatron\.core: got ImportError: cannot import name 'token_dispatcher'"
    ):
        replace_deepep()


TITAN = unlike_defaults(token_dispatcher, leave_out=["hidden_dim", "dtype"])


def test_every_option_of_torchtitan_arrives(made: list[Recorded]) -> None:
    base = MoeRtTokenDispatcher.Config(num_experts=6, top_k=2)
    config = token_dispatcher(base, hidden_dim=48, dtype="bfloat16", **TITAN)
    assert misplaced({**TITAN, "num_experts": 6, "top_k": 2, "hidden_dim": 48, "dtype": "bfloat16"}, config) == {}
    assert token_dispatcher(base) == base
    dispatcher = MoeRtTokenDispatcher(config)
    dispatcher.wire_meshes(ep_mesh="mesh")  # type: ignore[arg-type]
    (layer,) = made
    assert (layer.group, layer.given["num_experts"], layer.given["num_topk"]) == ("mesh", 6, 2)
    assert misplaced(TITAN, layer.given["options"]) == {}
    assert layer.opened == [(48, torch.bfloat16)]


@pytest.mark.parametrize("size", [None, 9])
@pytest.mark.parametrize("hidden", [None, 48])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_buffer_is_made_early_if_all_its_sizes_are_known(
    made: list[Recorded], size: int | None, hidden: int | None, dtype: torch.dtype | None
) -> None:
    sizes = {"num_max_tokens_per_rank": size, "hidden_dim": hidden, "dtype": dtype}
    MoeRtTokenDispatcher(MoeRtTokenDispatcher.Config(num_experts=6, top_k=2, **sizes)).wire_meshes(ep_mesh="mesh")  # type: ignore[arg-type]
    assert made[0].opened == ([] if None in sizes.values() else [(48, torch.float16)])
    assert made[0].given["options"] == GrowingOptions(num_max_tokens_per_rank=size)


def test_dtypes_by_name(made: list[Recorded]) -> None:
    base = MoeRtTokenDispatcher.Config(num_experts=6, top_k=2)
    for name in ("float32", torch.float32):
        assert token_dispatcher(base, dtype=name).dtype == name
    for wrong in ("bf17", "Tensor", "", 5):
        with pytest.raises(InvalidConfig) as caught:
            token_dispatcher(base, dtype=wrong)  # type: ignore[arg-type]
        assert text_of(caught) == f'dtype: got {wrong!r}, expected the name of a torch dtype, such as "bfloat16"'
        with pytest.raises(InvalidConfig):
            MoeRtTokenDispatcher(replace(base, dtype=wrong))  # type: ignore[arg-type]


def test_texts_of_a_dispatcher(made: list[Recorded]) -> None:
    none = torch.zeros(0)
    dispatcher = MoeRtTokenDispatcher(MoeRtTokenDispatcher.Config(num_experts=5, top_k=2))
    refusals: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: dispatcher.dispatch(none, none, none, none),
            "ep_mesh: got None, expected wire_meshes(ep_mesh=...) before the first dispatch",
        ),
        (
            lambda: dispatcher.wire_meshes(ep_mesh=None),
            "ep_mesh: got None, expected a mesh: expert_parallel_degree must be above 1",
        ),
        (
            lambda: dispatcher.wire_meshes(ep_mesh="mesh"),  # type: ignore[arg-type]
            "num_experts: got 5, expected a multiple of the 2 ranks",
        ),
    ]
    for call, text in refusals:
        with pytest.raises(InvalidConfig) as caught:
            call()
        assert text_of(caught) == text


def test_scores_weigh_rows_on_their_return() -> None:
    dispatcher = MoeRtTokenDispatcher(MoeRtTokenDispatcher.Config(num_experts=3, top_k=2))
    dispatcher.wire_meshes(ep_mesh=ThreadGroup.make(1)[0])
    x, scores, ids = torch.randn(4, 8), torch.rand(4, 2), torch.tensor([[0, 2], [2, 0], [2, -1], [0, 1]])
    rows, counts, metadata = dispatcher.dispatch(x, scores, ids, torch.zeros(3))
    assert (counts.dtype, counts.tolist()) == (torch.int64, [3, 1, 3])
    out = dispatcher.combine(rows, metadata, x)
    assert torch.allclose(out, x * scores.masked_fill(ids < 0, 0).sum(1, keepdim=True), atol=1e-6)
