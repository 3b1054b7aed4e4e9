"""Ranks agree on their experts, and gather whole tensors from parts, with collectives between threads."""

from __future__ import annotations

import itertools
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.ranks import ThreadRanks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_rt import MoEConfig, MoELayer
from moe_rt.buffer import replicas
from moe_rt.config.placement import Placement
from moe_rt.errors import InvalidConfig
from moe_rt.nn import spread, wrappers
from moe_rt.nn.averaging import Mean
from moe_rt.nn.part import Part, Whole
from moe_rt.parallel import own_experts, wrapping
from moe_rt.parallel import whole as whole_module

IGNORED = "_ddp_params_and_buffers_to_ignore"


class Collectives:
    """torch.distributed of ranks that are threads; a group is a tuple of ranks."""

    def __init__(self, size: int) -> None:
        self._size, self._barrier = size, threading.Barrier(size)
        self._given: list[Any] = [None] * size

    def get_rank(self) -> int:
        return int(threading.current_thread().name.split()[-1])

    def get_world_size(self, group: Any = None) -> int:
        return self._size if group is None else len(group)

    def get_process_group_ranks(self, group: tuple[int, ...]) -> list[int]:
        return list(group)

    def get_backend(self, group: Any) -> str:
        return "gloo"

    def all_gather(self, received: list[Tensor], given: Tensor, group: tuple[int, ...]) -> None:
        """All ranks call it at the same time, perhaps each in another group."""
        self._given[self.get_rank()] = given
        self._barrier.wait(60.0)
        for place, rank in enumerate(group):
            assert self._given[rank].shape == received[place].shape, "as gloo requires"
            received[place].copy_(self._given[rank])
        self._barrier.wait(60.0)


def agreed(monkeypatch: pytest.MonkeyPatch, groups: list[tuple[int, ...]], trains: tuple[bool, ...]) -> list[Any]:
    """Return what `prepare` finds on each rank; groups[r] holds the ranks that share experts with rank r."""
    size = len(groups)
    monkeypatch.setattr(wrapping, "dist", collectives := Collectives(size))

    def case(_: Any) -> Any:
        rank = collectives.get_rank()
        experts = nn.Linear(2, 2).requires_grad_(trains[rank])
        inner: Any = SimpleNamespace(process_group=groups[rank] if len(groups[rank]) > 1 else None)
        everyone: Any = tuple(range(size))
        return wrapping._agree(experts, inner, everyone)

    return ThreadRanks(size).outcomes(case)


@pytest.mark.parametrize(
    ("groups", "copies"),
    [
        ([(0, 1, 2, 3)] * 4, [(0,), (1,), (2,), (3,)]),
        ([(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ([(0, 2), (1, 3), (0, 2), (1, 3)], [(0, 1), (0, 1), (2, 3), (2, 3)]),
        ([(0,), (1,), (2,), (3,)], [(0, 1, 2, 3)] * 4),
    ],
    ids=str,
)
def test_ranks_with_the_same_experts_find_each_other(
    monkeypatch: pytest.MonkeyPatch, groups: list[tuple[int, ...]], copies: list[tuple[int, ...]]
) -> None:
    assert [same for same, _ in agreed(monkeypatch, groups, (True,) * 4)] == copies


@pytest.mark.parametrize("trains", list(itertools.product([False, True], repeat=3)), ids=str)
def test_experts_that_are_frozen_on_some_ranks_train_somewhere(
    monkeypatch: pytest.MonkeyPatch, trains: tuple[bool, ...]
) -> None:
    """One rank with a gradient is enough for all to take part in the backward."""
    assert [found for _, found in agreed(monkeypatch, [(0, 1, 2)] * 3, trains)] == [any(trains)] * 3


@pytest.mark.parametrize("groups", [[(0, 1), (0, 1), (2,)], [(0,), (1, 2), (1, 2)]], ids=str)
def test_groups_of_different_sizes_are_refused_everywhere(
    monkeypatch: pytest.MonkeyPatch, groups: list[tuple[int, ...]]
) -> None:
    for outcome in agreed(monkeypatch, groups, (True,) * 3):
        assert isinstance(outcome, InvalidConfig)
        assert "group: got an expert-parallel group" in str(outcome)


def test_ddp_ignores_experts_of_every_module_and_what_it_ignored_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    names = {model: {"1.0.weight"}, model[1]: {"0.weight"}, model[1][0]: {"weight"}}
    monkeypatch.setattr(wrapping, "spread_names", lambda module: names.get(module, set()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    wrapping._name_to_ddp(model)
    wrapping._name_to_ddp(model)
    ignored = {path: set(getattr(module, IGNORED, ())) for path, module in model.named_modules()}
    assert ignored == {"": {"1.0.weight", "0.bias"}, "0": set(), "1": {"0.weight"}, "1.0": {"weight"}}


def test_every_block_of_experts_that_is_saved_keeps_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, noted = spread.SpreadModule(), list[Tensor]()
    experts.first, experts.second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    monkeypatch.setattr(spread, "note_mesh_block", noted.append)
    experts.state_dict()
    assert not noted
    experts.over_mesh = True
    assert [t.data_ptr() for t in experts.state_dict(prefix="a.").values()] == [t.data_ptr() for t in noted]
    assert len(noted) == 2


def test_all_experts_are_looked_at_before_a_wrapper_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def inner(mean: Any) -> Any:
        return SimpleNamespace(num_ranks=2, mean=mean, mark_parameters=lambda module: None)

    wrapper: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.parameters_to_ignore, wrapper.process_group = {"a.weight", "a.bias"}, "group"
    monkeypatch.setattr(wrappers.dist, "get_world_size", lambda group: 4)
    prepared = ("a", nn.Linear(1, 1), inner(SimpleNamespace(num_ranks=4)))
    monkeypatch.setattr(wrappers, "spread_modules", lambda child: [prepared])
    wrappers._refuse_wrapper(wrapper, "module", nn.Module())
    for other in (("b", nn.Linear(1, 1), inner(SimpleNamespace(num_ranks=4))), ("b", nn.Module(), inner(None))):
        monkeypatch.setattr(wrappers, "spread_modules", lambda child, other=other: [prepared, other])
        with pytest.raises(InvalidConfig, match=r"^DistributedDataParallel: got b spread over 2 ranks"):
            wrappers._refuse_wrapper(wrapper, "module", nn.Module())


def test_every_parameter_of_a_copy_is_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    experts, sent = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False)), []

    def broadcast(part: Tensor, **options: Any) -> None:
        sent.append((part.data_ptr(), options))
        part.fill_(7.0)

    monkeypatch.setattr(wrapping.dist, "broadcast", broadcast)
    wrapping._broadcast(experts, "copies")  # type: ignore[arg-type]
    assert sent == [(p.data_ptr(), {"group": "copies", "group_src": 0}) for p in experts.parameters()]
    assert all(p.eq(7.0).all() for p in experts.parameters())


def test_all_experts_are_looked_at_before_a_model_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, sharded = (SimpleNamespace(num_ranks=2, process_group=object(), sharded=later) for later in (False, True))
    monkeypatch.setattr(wrapping, "spread_modules", lambda model: [("a", None, plain), ("b", None, sharded)])
    with pytest.raises(InvalidConfig, match=r"^b: got experts after shard_experts"):
        wrapping.prepare(nn.Module())


PLACEMENTS = [
    [(0, 1), (2, 3), (4, 5)],
    [(3, 0), (2,), (5, 1, 4)],
    [(1,), (5, 4, 3, 2), (0,)],
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_whole_tensors_of_several_placements(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(whole_module, "dist", Collectives(3))
    monkeypatch.setattr(whole_module, "group_named", lambda name: (0, 1, 2))
    values = [torch.arange(6 * 4).reshape(6, 2, 2).to(dtype) + 100 * number for number in range(len(PLACEMENTS))]

    def case(group: Any) -> dict[str, Any]:
        parts = {}
        for number, (placement, value) in enumerate(zip(PLACEMENTS, values, strict=True)):
            own = placement[group.rank]
            part = Part(value[list(own)], False, Whole("experts", own, 6))
            parts[str(number)] = {"weight": part, "again": part + 1, "replica": value}
        source: Any = SimpleNamespace(state_dict=lambda: parts)
        return whole_module.whole_state_dict(source)

    for state in ThreadRanks(3).run(case):
        for number, value in enumerate(values):
            found = state[str(number)]
            assert {tensor.dtype for tensor in found.values()} == {dtype}
            assert torch.equal(found["weight"], value)
            assert torch.equal(found["again"], value + 1)
            assert torch.equal(found["replica"], value)


@pytest.mark.parametrize("shape", [(), (3, 2), (1, 2)], ids=str)
def test_a_tensor_without_an_entry_for_each_expert_is_refused(shape: tuple[int, ...]) -> None:
    part = Part(torch.zeros(shape), False, Whole("experts", (0, 1), 4))
    source: Any = SimpleNamespace(state_dict=lambda: {"state": {"weight": part}})
    expected = rf"state\.weight: got a tensor \[{', '.join(map(str, shape))}\], expected one entry for each of 2"
    with pytest.raises(InvalidConfig, match=expected):
        whole_module.whole_state_dict(source)


@pytest.mark.parametrize("held", [False, True], ids=["swapped", "held by a weak reference"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("has_grad", [False, True])
def test_a_marked_parameter_is_as_before(requires_grad: bool, has_grad: bool, held: bool) -> None:
    module = nn.Linear(2, 3)
    p = module.weight.requires_grad_(requires_grad)
    value, grad = p.detach().clone(), torch.randn(3, 2)
    p.note = "of the user"  # type: ignore[attr-defined]
    p.grad = grad.clone() if has_grad else None
    reference = weakref.ref(p) if held else None
    spread.mark_parameter(module, "weight", p, Whole("experts", (0, 1, 2), 6))
    marked: Any = module.weight
    assert isinstance(marked, Part)
    assert (marked is p) or held
    assert torch.equal(marked.to_local(), value)
    assert (marked.requires_grad, marked.note) == (requires_grad, "of the user")
    assert (marked.grad is not None) == has_grad
    if has_grad:
        assert isinstance(marked.grad, Part)
        assert torch.equal(marked.grad.to_local(), grad)
    del reference


@pytest.mark.parametrize(
    ("num_experts", "intermediate", "dims"),
    [(4, 8, {0}), (3, 8, {1}), (3, 7, {0, 1})],
    ids=["whole experts", "equal slices", "rows that do not divide"],
)
def test_experts_are_sharded_with_the_options_that_were_given(
    monkeypatch: pytest.MonkeyPatch, num_experts: int, intermediate: int, dims: set[int]
) -> None:
    """Whole experts go to ranks if they divide evenly; else equal slices of each, except of what does not divide."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(wrapping, "fully_shard", lambda experts, **options: calls.append((experts, options)))
    config = MoEConfig(
        hidden=8, intermediate=intermediate, num_experts=num_experts, num_topk=1, num_max_tokens_per_rank=1,
        weight_layout="split",
    )  # fmt: skip
    layer, mesh = MoELayer(config), SimpleNamespace(size=lambda: 2)
    wrapping.shard_experts(nn.Sequential(layer), mesh, mp_policy="a policy", reshard_after_forward=False)  # type: ignore[arg-type]
    ((experts, options),) = calls
    place = options.pop("shard_placement_fn")
    assert experts is layer.experts
    assert options == {"mesh": mesh, "mp_policy": "a policy", "reshard_after_forward": False}
    placed = {p: place(p).dim for p in layer.experts.parameters()}
    assert set(placed.values()) == dims
    assert all(dim == 0 or p.shape[1] % 2 == 0 for p, dim in placed.items())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_sharded_parameters_are_plain_and_train_as_before(monkeypatch: pytest.MonkeyPatch, requires_grad: bool) -> None:
    """FSDP takes plain parameters, and a mesh blocks of a DTensor; frozen ones stay frozen."""
    experts, group = spread.SpreadModule(), SimpleNamespace(group_name="experts")
    experts.weight = nn.Parameter(torch.ones(2, 3), requires_grad)
    experts.spread_over(2, group, (0, 1), 4)  # type: ignore[arg-type]
    assert isinstance(experts.weight, Part)
    assert dict(experts.named_buffers()).keys() == {spread.HELD}
    experts.unmark_parameters()
    assert type(experts.weight) is nn.Parameter
    assert (experts.weight.requires_grad, experts.weight.sum()) == (requires_grad, 6)
    assert not dict(experts.named_buffers())
    assert not experts.state_dict().keys() - {"weight"}

    made: list[Any] = []

    class Blocks:
        _op_dispatcher = SimpleNamespace(_custom_op_handlers={})

        @staticmethod
        def from_local(local: Tensor, *given: Any, **options: Any) -> Tensor:
            made.append((*given, options))
            return local

    monkeypatch.setattr(torch.distributed.tensor, "DTensor", Blocks)
    mesh: Any = SimpleNamespace(ndim=2)
    experts.shard_over(mesh)
    assert made == [(mesh, [torch.distributed.tensor.Shard(0)] * 2, {"run_check": False})]
    assert (experts.weight.requires_grad, experts.over_mesh) == (requires_grad, True)


def test_adapters_around_a_users_experts_take_their_mean() -> None:
    group = SimpleNamespace(group_name="experts")
    spec = SimpleNamespace(placement=Placement.make(None, 4, 2), num_experts=4)
    buffer: Any = SimpleNamespace(num_ranks=2, rank=0, process_group=group, spec=spec)
    experts: Any = own_experts(nn.Linear(2, 2), buffer)
    adapter = nn.Sequential(experts, nn.Linear(2, 2))
    experts.mark_parameters(adapter)
    assert all(isinstance(p, Part) for p in adapter.parameters())
    experts.mean = Mean(2, None)
    adapter(torch.ones(1, 2)).sum().backward()
    assert adapter[1].bias.grad.tolist() == [0.5, 0.5]


def test_every_leaf_of_the_experts_is_found_back_to_the_dispatch() -> None:
    """Neither an input without gradients nor a node that was met before ends the search."""

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    before, a, b, c, d = (torch.ones(2, requires_grad=True) for _ in range(5))
    constant = torch.ones(2)
    y = (d + constant * a) * (Dispatch.apply(before) * b + constant) + (a * c + constant)
    assert {id(leaf) for leaf in replicas.leaves(y.grad_fn)} == {id(leaf) for leaf in (a, b, c, d)}
    for first, second in ((a, b), (b, a)):
        assert len(list(replicas.leaves((constant * first + second * constant).grad_fn))) == 2
    assert len(list(replicas.leaves((a * a).grad_fn))) == 1
    assert not list(replicas.leaves(None))
