"""SpreadModules in one process: their parameters are Parts from the moment they are set, and means of gradients."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from moe_rt.errors import InvalidConfig
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.nn import averaging
from moe_rt.nn.averaging import Mean, averaged, mean_of, refuse_copied_adapter, scaled_gradient
from moe_rt.nn.experts import Experts, ExpertsConfig
from moe_rt.nn.part import Part, Whole
from moe_rt.nn.spread import (
    HELD,
    SpreadModule,
    names_in,
    spread_modules,
    spread_names,
    spread_parameters,
)

GROUP: Any = SimpleNamespace(group_name="a group")
WHOLE = Whole("a group", (2, 3), 6)


def experts(num_ranks: int = 2, group: Any = GROUP, **options: Any) -> Experts:
    """Return experts 2 and 3 of 6, with whole numbers as weights."""
    module = Experts(2, 4, 2, ExpertsConfig(**options))
    with torch.no_grad():
        for i, p in enumerate(module.parameters()):
            p.copy_(torch.arange(float(p.numel())).view(p.shape) + 100 * i)
    module.spread_over(num_ranks, group, (2, 3), 6)
    return module


def kinds(module: nn.Module) -> dict[str, Any]:
    return {name: p.whole if isinstance(p, Part) else None for name, p in module.named_parameters()}


def test_parameters_are_parts_of_several_ranks() -> None:
    module = experts()
    assert (module.num_ranks, module.expert_ids, module.num_experts) == (2, (2, 3), 6)
    assert kinds(module) == {"gate_up_proj": WHOLE, "down_proj": WHOLE}
    assert module.get_buffer(HELD).tolist() == [2, 3]
    assert module.get_buffer(HELD).whole == WHOLE  # type: ignore[attr-defined]
    for alone in (experts(1), experts(2, None)):
        assert kinds(alone) == {"gate_up_proj": None, "down_proj": None}
        assert dict(alone.named_buffers()) == {}
        assert alone.process_group is None
    unknown = Experts(2, 4, 2)
    unknown.spread_over(2, GROUP)
    assert kinds(unknown) == dict.fromkeys(("gate_up_proj", "down_proj"), Whole("a group", (), 0))
    assert dict(unknown.named_buffers()) == {}
    fresh = SpreadModule()
    assert (fresh.num_ranks, fresh.num_experts, fresh.expert_ids, fresh.mean) == (1, 0, (), None)
    assert (fresh.trains_somewhere, fresh.sharded, fresh.over_mesh, fresh.mean_of_rows) == (False,) * 4
    assert (fresh.param_dtype, fresh.process_group) == (None, None)


def test_the_group_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_rt.nn.spread.group_named", lambda name: {"a group": "found"}[name])
    assert experts().process_group == "found"  # type: ignore[comparison-overlap]


def test_a_parameter_that_is_set_becomes_a_part() -> None:
    module = experts()
    kept = module.gate_up_proj
    module.down_proj = nn.Parameter(torch.zeros(2, 4, 2))
    module.extra = nn.Parameter(torch.zeros(2))
    assert kinds(module) == dict.fromkeys(("gate_up_proj", "down_proj", "extra"), WHOLE)
    assert module.gate_up_proj is kept, "what is a Part stays the same object"
    module.register_parameter("none", None)
    module.double()
    assert {p.dtype for p in module.parameters()} == {torch.float64}
    assert set(kinds(module).values()) == {WHOLE}
    twin = copy.deepcopy(module)
    assert set(kinds(twin).values()) == {WHOLE}
    assert twin.down_proj.data_ptr() != module.down_proj.data_ptr()
    module._parameters["down_proj"] = nn.Parameter(torch.zeros(2, 4, 2))  # as offloading hooks do
    assert module.parts("down_proj").keys() == {"down_proj"}
    assert set(kinds(module).values()) == {WHOLE}
    module.unmark_parameters()
    assert set(kinds(module).values()) == {None}
    assert HELD not in dict(module.named_buffers())
    module.sharded = True
    module.mark_parameters()
    assert set(kinds(module).values()) == {None}, "FSDP has them"


def test_an_adapter_s_parameters_are_marked_also() -> None:
    module = experts()
    adapter = nn.Sequential(module, nn.Linear(2, 2))
    module.mark_parameters(adapter)
    assert set(kinds(adapter).values()) == {WHOLE}
    other = experts(1)
    other.mark_parameters(nn.Sequential(other, linear := nn.Linear(2, 2)))
    assert type(linear.weight) is nn.Parameter


def test_parts_are_plain_tensors_in_the_same_memory() -> None:
    """Gradients become means, unless the layer takes means of rows."""
    for mean, of_rows, divided in ((None, False, 1), (Mean(4, None), False, 4), (Mean(4, None), True, 1)):
        for module in (experts(), experts(1)):
            module.mean, module.mean_of_rows = mean, of_rows
            module.gate_up_proj.requires_grad_(False)
            parts = module.parts("down_proj", "gate_up_proj")
            assert list(parts) == ["down_proj", "gate_up_proj"]
            assert [t.requires_grad for t in parts.values()] == [True, False]
            for name, t in parts.items():
                p = getattr(module, name)
                assert t.data_ptr() == p.data_ptr()
                assert type(t) in ((Tensor,) if module.num_ranks > 1 else (Tensor, nn.Parameter))
            (parts["down_proj"] * 8).sum().backward()
            grad = module.down_proj.grad
            assert grad is not None
            assert grad.tolist() == torch.full((2, 4, 2), 8.0 / divided).tolist()


def test_what_needs_no_mean_is_returned_as_it_is() -> None:
    weights = {"one": torch.ones(2, requires_grad=True), "two": torch.ones(3)}
    assert averaged(weights, None) is weights
    assert averaged({}, Mean(2, None)) == {}
    for only in ("one", "two"):
        made = averaged({only: weights[only]}, Mean(2, None))
        assert (list(made), made[only].requires_grad) == ([only], only == "one")


def test_means_have_tangents() -> None:
    """A tangent is not divided: it is of the forward."""
    p = Part(torch.arange(3.0), whole=WHOLE)
    moved = torch.tensor([1.0, 2.0, 3.0])
    with forward_ad.dual_level():
        duals = {"w": forward_ad.make_dual(p.to_local(), moved), "still": torch.ones(2)}
        made = averaged(duals, Mean(4, None))
        assert torch.equal(forward_ad.unpack_dual(made["w"]).tangent, moved)
        scaled = scaled_gradient(duals["w"], 5.0)
        assert torch.equal(forward_ad.unpack_dual(scaled).tangent, moved)


def test_a_gradient_is_scaled_and_its_tensor_is_not() -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = scaled_gradient(x, 5.0)
    assert torch.equal(y, x)
    assert y.data_ptr() == x.data_ptr()
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [5.0] * 3


@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("replicas", [None, "copies"])
def test_a_mean_is_divided_before_it_is_summed(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, replicas: str | None
) -> None:
    """The order keeps sums of 16-bit gradients in range."""
    given: list[tuple[Tensor, str, str]] = []

    def all_reduce(t: Tensor, how: str, group: str) -> Tensor:
        given.append((t, how, group))
        return t * 10

    found = SimpleNamespace(all_reduce=all_reduce, wait_tensor=lambda t: t)
    monkeypatch.setattr(torch.ops, "_c10d_functional", found)
    grad = torch.arange(6.0).view(2, 3).t()
    got = mean_of(grad, Mean(num_ranks, replicas))
    check_bits("mean", got, grad / num_ranks * (1 if replicas is None else 10))
    assert [(how, group) for _, how, group in given] == ([] if replicas is None else [("sum", "copies")])
    assert all(t.is_contiguous() for t, _, _ in given)


def test_adapters_of_copied_experts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only weights whose gradients become means may train: others would differ between copies."""
    module = experts()
    module.mean = Mean(1, "copies")
    weight = nn.Parameter(torch.ones(4, 2))
    y = module.parts("down_proj")["down_proj"][0] * 2
    refuse_copied_adapter(y, Mean(2, "copies"))
    refuse_copied_adapter(y * weight, Mean(2, None))
    with pytest.raises(InvalidConfig, match=r"^experts: got a weight \[4, 2\] of an adapter, and copies of these"):
        refuse_copied_adapter(y * weight, Mean(2, "copies"))
    monkeypatch.setattr(averaging, "is_compiling", lambda: True)
    refuse_copied_adapter(y * weight, Mean(2, "copies"))


def saved_by(module: SpreadModule) -> dict[str, Any]:
    return {name: t.clone() for name, t in module.state_dict().items()}


def test_a_rank_loads_its_experts() -> None:
    """It takes its own file, that of all experts, and one without ids, but never another rank's."""
    module, own = experts(), saved_by(experts())
    assert sorted(own) == ["down_proj", "gate_up_proj", HELD]
    whole = {
        name: torch.arange(6.0).view(6, 1, 1).expand(6, *own[name].shape[1:]) for name in ("gate_up_proj", "down_proj")
    }
    for state in (own, {n: t for n, t in own.items() if n != HELD}):
        loaded = experts()
        with torch.no_grad():
            loaded.down_proj.zero_()
        assert str(loaded.load_state_dict(state)) == "<All keys matched successfully>"
        assert torch.equal(loaded.down_proj.to_local(), module.down_proj.to_local())  # type: ignore[operator]
    for state in (whole, {**whole, HELD: torch.arange(6)}):
        for assign in (False, True):
            loaded = experts()
            loaded.load_state_dict(state, assign=assign)
            assert loaded.down_proj[:, 0, 0].tolist() == [2.0, 3.0]
            assert set(kinds(loaded).values()) == {WHOLE}
            assert loaded.get_buffer(HELD).tolist() == [2, 3]
    with pytest.raises(InvalidConfig, match=rf"^{HELD}: got experts \[0, 1\], expected this rank's, \[2, 3\]"):
        experts().load_state_dict({**own, HELD: torch.tensor([0, 1])})
    with pytest.raises(InvalidConfig, match=r"^0\.gate_up_proj: got 3 experts, expected this rank's"):
        nn.Sequential(experts()).load_state_dict({f"0.{n}": t[:3] for n, t in whole.items()})
    alone = experts(1, None)
    alone.load_state_dict(own)
    assert torch.equal(alone.down_proj, module.down_proj.to_local())  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="Missing key"):
        experts().load_state_dict({"down_proj": own["down_proj"]})


class Holder(nn.Module):
    """A layer that holds experts, perhaps with an adapter around them."""

    holds_experts = True

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.gate = nn.Linear(2, 2)
        self.experts = inside


class Adapter(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside, self.down = inside, nn.Linear(2, 2, bias=False)
        self.register_buffer("scale", torch.ones(1))


def test_experts_of_a_model_are_found() -> None:
    """A single rank's are found too; an adapter's parameters count as theirs, and a gate's do not."""
    one, two, alone = experts(), experts(), experts(1)
    model = nn.Sequential(Holder(one), nn.Linear(2, 2), Holder(Adapter(two)), alone, Holder(nn.Linear(2, 2)))
    found = list(spread_modules(model))
    assert [(path, inner) for path, _, inner in found] == [("0.experts", one), ("2.experts", two), ("3", alone)]
    assert [module for _, module, _ in found] == [one, model[2].experts, alone]
    of_one = {f"0.experts.{name}" for name in ("gate_up_proj", "down_proj", HELD)}
    of_two = {f"2.experts.inside.{name}" for name in ("gate_up_proj", "down_proj", HELD)}
    of_two |= {"2.experts.down.weight", "2.experts.scale"}
    assert spread_names(model) == of_one | of_two
    buffers = {f"0.experts.{HELD}", f"2.experts.inside.{HELD}", "2.experts.scale"}
    parameters = spread_parameters(model)
    assert parameters.keys() == (of_one | of_two) - buffers
    assert {name: inner for name, (_, inner) in parameters.items()} == {
        name: one if name.startswith("0.") else two for name in parameters
    }
    assert parameters["2.experts.down.weight"][0] is model[2].experts.down.weight
    assert [(path, inner) for path, _, inner in spread_modules(one)] == [("", one)]
    assert names_in(one, "") == {"gate_up_proj", "down_proj", HELD}
    assert [path for path, *_ in spread_modules(Holder(one))] == ["experts"]


class Own(nn.Parameter):
    """A subclass of a parameter."""


def test_a_pickle_belongs_to_no_group_of_another_process() -> None:
    loaded = pickle.loads(pickle.dumps(experts()))
    assert set(kinds(loaded).values()) == {None}
    assert loaded.process_group is None
    assert (loaded.expert_ids, loaded.num_ranks) == ((2, 3), 2)
    assert torch.equal(loaded.down_proj, experts().down_proj.to_local())  # type: ignore[operator]


def test_other_kinds_of_parameters_are_left_alone() -> None:
    module = SpreadModule()
    module.own, module.usual = Own(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    module.register_parameter("none", None)
    module.spread_over(2, GROUP, (0, 1), 4)
    assert type(module.own) is Own
    assert module.dtype is torch.float32
    assert isinstance(module.usual, Part)
    assert module.none is None


def test_ids_are_on_the_cpu() -> None:
    """The host reads them, which must not wait for a GPU."""
    module = SpreadModule()
    with torch.device("meta"):
        module.usual = nn.Parameter(torch.ones(2, 3))
        module.spread_over(2, GROUP, (0, 1), 4)
    assert module.get_buffer(HELD).tolist() == [0, 1]
    assert module.usual.is_meta
