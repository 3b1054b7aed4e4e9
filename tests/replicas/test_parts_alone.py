"""A Part in one process: what it is, what stays a Part, what reductions ask of other ranks, and what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.testing._internal.two_tensor import TwoTensor

from moe_rt.errors import InvalidConfig
from moe_rt.nn import callers, part, part_reductions
from moe_rt.nn.part import Part, Whole, as_part, experts_of, plain
from moe_rt.ops.activations import swiglu

WHOLE = Whole("a group", (2, 3), 6)
PIECE = Whole("a group", (), 0)
OTHER = Whole("another group", (2, 3), 6)


def values(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)


def in_file(file: str, name: str = "called") -> Callable[..., Any]:
    """Return a function `name(ask)` of a file, which returns ask()."""
    made: dict[str, Any] = {}
    exec(compile(f"def {name}(ask):\n    return ask()", file, "exec"), made)
    return made[name]  # type: ignore[no-any-return]


class Step(torch.optim.Optimizer):
    """An optimizer whose step computes something."""

    def __init__(self) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {})

    def step(self, compute: Callable[[], Any]) -> Any:  # type: ignore[override]
        return compute()


class Ranks:
    """Stands in for collectives: notes what is reduced, and doubles it."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []
        patched.setattr(part_reductions, "_all_reduce", self.all_reduce)

    def all_reduce(self, number: Tensor, how: str, group: str) -> Tensor:
        self.asked.append((how, group))
        return number * 2 if how == "sum" else number


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def test_a_part_is_a_parameter_in_the_memory_of_its_tensor() -> None:
    data = values(2, 3)
    p = Part(data, whole=WHOLE)
    assert isinstance(p, nn.Parameter)
    assert (p.requires_grad, p.whole, p.mixed) == (True, WHOLE, False)
    assert p.data_ptr() == data.data_ptr()
    again = Part(p, False)
    assert (again.requires_grad, again.whole) == (False, WHOLE)
    assert Part(p, whole=OTHER).whole == OTHER
    assert Part(data).whole is None
    mixed = Part(data, False, WHOLE, True, False)
    assert mixed.mixed
    assert not isinstance(mixed, nn.Parameter)
    assert not isinstance(as_part(data, WHOLE), nn.Parameter)
    assert not as_part(data, WHOLE).mixed
    assert as_part(p, None).whole is None
    assert type(plain(p)) is type(p.to_local()) is Tensor
    assert p.to_local().data_ptr() == data.data_ptr()
    assert not p.to_local().requires_grad


def test_a_gradient_is_a_part_and_stays_the_same_object() -> None:
    p, unknown = Part(values(2, 3), whole=WHOLE), Part(values(2, 3))
    assert p.grad is None
    for each in (p, unknown):
        (each * 3).sum().backward()
    assert isinstance(p.grad, Part)
    assert p.grad is p.grad
    assert p.grad.whole == WHOLE
    assert type(unknown.grad) is Tensor
    marked = as_part(values(2, 3), PIECE)
    p.grad = marked
    assert p.grad is marked
    del p.grad
    assert p.grad is None
    for file in (clip_grad.__file__, torch.amp.grad_scaler.__file__):
        empty: Any = in_file(file)(lambda: p.grad)
        assert (type(empty), empty.numel(), empty.whole) == (Part, 0, WHOLE), "all ranks reach the same reductions"


def test_data_of_a_part() -> None:
    p = Part(values(2, 3), whole=WHOLE)
    assert isinstance(p.data, Tensor)
    assert torch.equal(plain(p.data), values(2, 3))
    given = values(2, 3) * 2
    p.data = given
    assert p.to_local().data_ptr() == given.data_ptr()
    p.data = as_part(given * 2, WHOLE)
    assert p.tolist() == (given * 2).tolist()
    assert (p.whole, isinstance(p, Part), p.requires_grad) == (WHOLE, True, True)


def test_elements_are_counted_for_a_mean_of_squares() -> None:
    """An optimizer's root mean square divides the norm of all parts by the elements of all parts."""
    for whole, expected in ((WHOLE, 18), (PIECE, 6), (None, 6)):
        p = Part(values(2, 3), False, whole)
        assert p.numel() == 6
        assert Step().step(lambda p=p: in_file("a_user_s.py", "_rms")(p.numel)) == expected
        assert Step().step(p.numel) == 6


def test_values_for_python() -> None:
    p = Part(values(2, 3), whole=WHOLE)
    assert p.tolist() == values(2, 3).tolist()
    with pytest.raises(RuntimeError, match="requires grad"):
        p.numpy()
    assert p.numpy(force=True).tolist() == p.detach().numpy().tolist() == values(2, 3).tolist()
    assert repr(p) == f"Part({values(2, 3)!r}, {WHOLE})"


@pytest.mark.parametrize("is_param", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_deep_copy_is_as_the_part_was(is_param: bool, requires_grad: bool) -> None:
    p = Part(values(3, 2).t(), requires_grad, WHOLE, True, is_param)
    one, again = copy.deepcopy([p, p])
    assert one is again
    assert (one.requires_grad, one.whole, one.mixed) == (requires_grad, WHOLE, True)
    assert isinstance(one, nn.Parameter) == is_param
    assert (one.stride(), one.tolist()) == (p.stride(), p.tolist())
    assert one.data_ptr() != p.data_ptr()
    assert not isinstance(copy.deepcopy(as_part(values(2), WHOLE)), nn.Parameter)


def test_a_pickle_loads_without_moe_rt() -> None:
    """A parameter becomes a plain one; a tensor keeps the ids of its experts."""
    for requires_grad in (False, True):
        loaded = pickle.loads(pickle.dumps(Part(values(2, 3), requires_grad, WHOLE)))
        assert (type(loaded), loaded.requires_grad, loaded.tolist()) == (
            nn.Parameter,
            requires_grad,
            values(2, 3).tolist(),
        )
    for whole, expected in ((WHOLE, [2, 3]), (PIECE, None), (None, None)):
        data = io.BytesIO()
        torch.save({"t": as_part(values(2, 3), whole)}, data)
        assert b"moe_rt.nn" not in data.getvalue()
        data.seek(0)
        found = torch.load(data)["t"]
        assert (type(found), found.tolist()) == (Tensor, values(2, 3).tolist())
        assert experts_of(found) == expected
        assert experts_of(as_part(found, whole)) == (None if expected is None else tuple(expected))


@pytest.mark.parametrize(
    ("saved", "shape", "marked", "fits"),
    [
        ([2, 3], (2, 3), False, True),
        ([3, 2], (2, 3), False, False),
        ([0, 1], (2, 3), False, False),
        ([0, 1], (2, 3), True, True),
        ([0, 1], (1, 3), False, True),
        (None, (2, 3), False, True),
    ],
    ids=str,
)
def test_another_rank_s_tensor_is_not_copied(saved: list[int] | None, shape: Any, marked: bool, fits: bool) -> None:
    p, given = as_part(torch.zeros(2, 3), WHOLE), values(*shape)
    if saved is not None:
        given.moe_rt_experts = saved  # type: ignore[attr-defined]
    given = as_part(given, Whole("a group", tuple(saved or ()), 6)) if marked else given
    if fits:
        p.copy_(given)
        assert torch.equal(plain(p), values(*shape).expand(2, 3))
        return
    with pytest.raises(InvalidConfig, match=rf"^load: got experts \[{saved[0]}, {saved[1]}\], expected \[2, 3\]"):  # type: ignore[index]
        p.copy_(given)
    as_part(torch.zeros(2, 3), PIECE).copy_(given)


P, Q = as_part(values(2, 3), WHOLE), as_part(values(2, 3), Whole("a group", (4, 5), 6))
TOKENS = torch.ones(2, 3)
RESULTS: dict[str, tuple[Callable[[], Any], Any]] = {
    "elementwise with a plain one": (lambda: P + TOKENS, (WHOLE, False)),
    "by a keyword": (lambda: torch.add(TOKENS, other=P), (WHOLE, False)),
    "with a number": (lambda: 2 - P, (WHOLE, False)),
    "parts of two sets of experts": (lambda: P + Q, (PIECE, False)),
    "parts of two groups": (lambda: torch.cat([P, as_part(values(2, 3), OTHER)]).mixed, True),
    "a part without a whole": (lambda: as_part(values(2, 3), None) * 2, (None, False)),
    "one with a whole and one without": (lambda: as_part(values(2, 3), None) * P, (WHOLE, False)),
    "a mixed one": (lambda: as_part(values(2, 3), WHOLE, True) + P, (WHOLE, True)),
    "joined with tokens": (lambda: torch.cat([P, TOKENS]), (PIECE, True)),
    "joined with nothing": (lambda: torch.cat([P, torch.zeros(0, 3)]), (WHOLE, False)),
    "joined with parts": (lambda: torch.cat([P, P]), (PIECE, False)),
    "stacked with tokens": (lambda: torch.stack([TOKENS, P]), (PIECE, True)),
    "a column": (lambda: P[:, 0], (PIECE, False)),
    "columns": (lambda: P[:, :2], (WHOLE, False)),
    "transposed": (lambda: P.t(), (PIECE, False)),
    "an expert's row": (lambda: P[0], (PIECE, False)),
    "an element": (lambda: P[0, 0], None),
    "a norm": (lambda: P.norm(), None),
    "a product": (lambda: TOKENS.t() @ P, None),
    "a product of the shape of a part": (lambda: torch.ones(2, 2) @ P, None),
    "a product of parts": (lambda: as_part(torch.ones(2, 2), WHOLE) @ P, (WHOLE, False)),
    "a linear layer": (lambda: torch.nn.functional.linear(torch.ones(2, 3), torch.ones(3, 3), P[0]), None),
    "compared": (lambda: P > 1, (WHOLE, False)),
    "the largest of each expert": (lambda: P.max(dim=1, keepdim=True).values, (WHOLE, False)),
    "and which": (lambda: P.max(dim=1, keepdim=True).indices, (WHOLE, False)),
    "of another number of experts": (lambda: P.new_zeros(3, 2), None),
    "of a plain tensor's shape": (lambda: torch.outer(P[0], torch.ones(4)), None),
    "of its shape": (lambda: torch.zeros_like(P), (WHOLE, False)),
}


def mark_of(t: Any) -> Any:
    return t if isinstance(t, bool) else (t.whole, t.mixed) if isinstance(t, Part) else None


@pytest.mark.parametrize("name", RESULTS)
def test_results_of_parts(name: str) -> None:
    compute, expected = RESULTS[name]
    assert mark_of(compute()) == expected


def test_options_of_an_op_reach_it() -> None:
    assert plain(torch.add(P, TOKENS, alpha=3)).tolist() == (values(2, 3) + 3).tolist()
    assert torch.zeros_like(P, dtype=torch.int64).dtype is torch.int64
    assert torch.add(P, TOKENS, out=torch.empty(2, 3)).tolist() == (values(2, 3) + 1).tolist()


def test_results_in_lists() -> None:
    """Each entry is judged by its own operands in a _foreach op, and by all of them elsewhere."""
    moved = torch._foreach_add([P, TOKENS, Q], [TOKENS, TOKENS, TOKENS])
    assert [mark_of(t) for t in moved] == [(WHOLE, False), None, (Q.whole, False)]
    assert [mark_of(t) for t in torch._foreach_mul([TOKENS, P], [P, 2 * P])] == [(WHOLE, False)] * 2
    assert [mark_of(t) for t in torch._foreach_mul([P, TOKENS], 2.0)] == [(WHOLE, False), None]
    assert [mark_of(t) for t in P.split(1)] == [(PIECE, False)] * 2
    assert [mark_of(t) for t in P.split([2, 1], 1)] == [(WHOLE, False)] * 2
    assert [mark_of(t) for t in P.unbind()] == [(PIECE, False)] * 2
    target = [P.clone(), TOKENS.clone()]
    torch._foreach_add_(target, 1.0)
    assert [mark_of(t) for t in target] == [(WHOLE, False), None]
    assert torch.equal(plain(target[0]), values(2, 3) + 1)


def test_an_op_in_place_returns_its_operand() -> None:
    operand = P.clone()
    assert operand.add_(1.0).mul_(2.0) is operand
    assert torch._foreach_add_([operand, TOKENS.clone()], 1.0)[0] is operand


def test_other_subclasses_come_first() -> None:
    """A tensor that has rules of its own applies them, here to two tensors, each of which then meets the Part."""
    two = TwoTensor(values(2, 3), 2 * values(2, 3))
    for total in (torch.add(two, P), torch.add(P, two)):
        assert type(total) is TwoTensor
        assert [mark_of(t) for t in (total.a, total.b)] == [(WHOLE, False)] * 2
        assert [plain(t).tolist() for t in (total.a, total.b)] == [(n * values(2, 3)).tolist() for n in (2, 3)]
    y = swiglu(as_part(torch.ones(2, 6), WHOLE), torch.tensor([2], dtype=torch.int32))
    assert type(y) is Tensor, "an op of another library returns rows"


def test_a_wrapper_that_takes_parameters_for_copies_is_refused() -> None:
    made: dict[str, Any] = {}
    exec(compile("def take(p):\n    return p.view(-1)", f"{callers._FSDP}/_fully_shard/_fsdp_param.py", "exec"), made)
    with pytest.raises(InvalidConfig, match=r"^fully_shard or replicate: got experts spread over 0 ranks, whose parts"):
        made["take"](P)
    assert type(made["take"](TOKENS)) is Tensor
    unknown = as_part(values(2), None)
    with pytest.raises(InvalidConfig, match=r"^fully_shard or replicate: got experts spread over several ranks"):
        part_reductions.refuse_fsdp(unknown)


NUMBERS: dict[str, tuple[Callable[[Tensor], Any], list[str], float]] = {
    "sum": (torch.sum, ["sum"], 42.0),
    "sum of no dimension": (lambda p: p.sum(dim=()), ["sum"], 42.0),
    "sum over all dimensions": (lambda p: p.sum((0, 1)), ["sum"], 42.0),
    "mean": (torch.mean, ["sum"], 3.5),
    "largest": (torch.max, ["max"], 6.0),
    "smallest": (torch.min, ["min"], 1.0),
    "largest by a list": (lambda p: p.amax((0, 1)), ["max"], 6.0),
    "number of nonzero elements": (torch.count_nonzero, ["sum"], 12.0),
    "any": (lambda p: (p > 5).any(), ["max"], 1.0),
    "all": (lambda p: (p > 0).all(), ["min"], 1.0),
    "dot": (lambda p: torch.dot(p.flatten(), p.flatten()), ["sum"], 182.0),
    "norm": (torch.linalg.vector_norm, ["sum"], 182.0**0.5),
    "p norm": (lambda p: p.norm(p=3.0), ["sum"], (2 * 441.0) ** (1 / 3)),
    "first norm": (lambda p: torch.linalg.vector_norm(p, ord=1), ["sum"], 42.0),
    "zeroth norm": (lambda p: torch.linalg.vector_norm(p, 0), ["sum"], 12.0),
    "largest magnitude": (lambda p: torch.linalg.vector_norm(p, math.inf), ["max"], 6.0),
    "smallest magnitude": (lambda p: torch.linalg.vector_norm(p, ord=-math.inf), ["min"], 1.0),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_all_ranks(ranks: Ranks, name: str) -> None:
    """A step gets the number of all ranks, which two equal parts have here; other code gets this rank's."""
    compute, how, expected = NUMBERS[name]
    got = Step().step(lambda: compute(P))
    assert float(got) == pytest.approx(expected)
    assert ranks.asked == [(each, "a group") for each in how]
    torch.testing.assert_close(plain(compute(P)) if isinstance(compute(P), Part) else compute(P), compute(values(2, 3)))
    assert len(ranks.asked) == len(how)
    assert Step().step(lambda: compute(values(2, 3))) == compute(values(2, 3))


def test_norms_in_lists(ranks: Ranks) -> None:
    """Replicated tensors among parts keep their own norms."""
    got = Step().step(lambda: torch._foreach_norm([P, TOKENS, Q], 2.0))
    expected = [182.0**0.5, 6.0**0.5, 182.0**0.5]
    assert [float(t) for t in got] == pytest.approx(expected)
    assert ranks.asked == [("sum", "a group")] * 2
    ranks.asked.clear()
    assert [float(t) for t in torch._foreach_norm([P, TOKENS])] == pytest.approx([91.0**0.5, 6.0**0.5])
    assert [float(t) for t in Step().step(lambda: torch._foreach_max([TOKENS, P]))] == [1.0, 6.0]
    assert ranks.asked == [("max", "a group")]


@pytest.mark.parametrize(
    ("compute", "what"),
    [
        (lambda p: p.sum(0), "sum over the experts of each rank"),
        (lambda p: p.sum(-2), "sum over the experts of each rank"),
        (lambda p: torch.linalg.vector_norm(p, 2, [0]), "linalg_vector_norm over the experts of each rank"),
        (lambda p: torch.linalg.vector_norm(p, dim=0), "linalg_vector_norm over the experts of each rank"),
        (lambda p: p.amax(dim=0), "amax over the experts of each rank"),
        (lambda p: p.mean(dim=0), "mean over the experts of each rank"),
        (torch.prod, "prod over experts"),
        (torch.var, "var over experts"),
        (lambda p: torch.cat([p.flatten(), torch.ones(1)]).sum(), "sum over experts and replicated parameters"),
        (lambda p: as_part(p, None).sum(), "sum over experts and replicated parameters in one tensor"),
    ],
)
def test_numbers_that_do_not_follow_from_parts(ranks: Ranks, compute: Callable[[Tensor], Any], what: str) -> None:
    compute(P)
    with pytest.raises(InvalidConfig, match=rf"^{what}.*: got weights that differ between ranks, expected replicas"):
        Step().step(lambda: compute(P))
    assert ranks.asked == []


@pytest.mark.parametrize(
    "compute",
    [
        lambda p: p.sum(1),
        lambda p: p.sum(-1, keepdim=True),
        lambda p: p.amax(1),
        lambda p: torch.linalg.vector_norm(p, 2, [1]),
        lambda p: as_part(p, PIECE).sum(0),
        lambda p: p.cumsum(0),
        lambda p: p[0].sum(0, keepdim=True),
    ],
)
def test_reductions_within_experts_are_of_this_rank(ranks: Ranks, compute: Callable[[Tensor], Tensor]) -> None:
    torch.testing.assert_close(plain(Step().step(lambda: compute(P))), plain(compute(P)))
    assert ranks.asked == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64], ids=str)
def test_truth_is_reduced_as_a_number(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    seen: list[Any] = []

    def all_reduce(t: Tensor, how: str, group: str) -> Tensor:
        seen.append((t.dtype, how, group))
        return t

    found = SimpleNamespace(all_reduce=all_reduce, wait_tensor=lambda t: t)
    monkeypatch.setattr(torch.ops, "_c10d_functional", found)
    got = part_reductions._all_reduce(torch.tensor(1).to(dtype), "max", "a group")
    assert (got.dtype, int(got)) == (dtype, 1)
    assert seen == [(torch.int32 if dtype is torch.bool else dtype, "max", "a group")]


def test_infinities_are_those_of_all_ranks(ranks: Ranks) -> None:
    """Every gradient is scaled back, and each group is asked once, in the order of the gradients."""
    grads = [as_part(values(2), OTHER), values(2), as_part(values(2), WHOLE), as_part(values(3), OTHER)]
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
    assert [plain(g).tolist() for g in grads] == [[0.5, 1.0], [0.5, 1.0], [0.5, 1.0], [0.5, 1.0, 1.5]]
    assert ranks.asked == [("max", "another group"), ("max", "a group")]
    assert found.item() == 0
    grads[2] = as_part(torch.tensor([1.0, math.inf]), WHOLE)
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(1.0))
    assert found.item() == 1


@pytest.mark.parametrize("name", ["allreduce_", "broadcast_", "all_reduce", "reduce_scatter_tensor", "_reduce_"])
@pytest.mark.parametrize(
    ("ranks_of_op", "refused"), [([0, 1], True), ([1, 2], False), ([2, 3], False), ([0, 1, 2, 3], True), (None, False)]
)
def test_collectives_that_make_parts_equal(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks_of_op: list[int] | None, refused: bool
) -> None:
    """One is refused if two of its ranks hold different parts."""
    members: dict[str, list[int] | None] = {"a group": [0, 1], "the op's": ranks_of_op}

    def resolve(name: Any) -> Any:
        if members.get(name) is None:
            raise KeyError(name)
        return name

    monkeypatch.setattr(part_reductions, "_resolve_process_group", resolve)
    monkeypatch.setattr(part_reductions.dist, "get_process_group_ranks", lambda group: members[group])
    func: Any = SimpleNamespace(overloadpacket=SimpleNamespace(__name__=name))
    part_reductions.refuse_collective(func, (P, "sum", "the op's"), [as_part(P, None), as_part(P, OTHER)])
    reads: Any = SimpleNamespace(overloadpacket=SimpleNamespace(__name__="_allgather_base_"))
    part_reductions.refuse_collective(reads, (P, "sum", "the op's"), [P])
    if not refused:
        part_reductions.refuse_collective(func, (P, "sum", "the op's"), [P])
        return
    what = name.strip("_")
    with pytest.raises(InvalidConfig, match=f"^{what} of experts: got weights that differ"):
        part_reductions.refuse_collective(func, (P, "sum", "the op's"), [as_part(P, None), P])


def test_tensors_of_two_wholes_are_of_neither() -> None:
    assert part._mark(values(2, 3), [P, Q], False).whole == PIECE
    both = part._mark(values(2, 3), [P, as_part(values(2, 3), OTHER)], False)
    assert both.mixed
    assert both.whole.experts == ()
    several = [as_part(values(2, 3), Whole("a group", (0, number), 9)) for number in range(1, 9)]
    assert not part._mark(values(2, 3), several, False).mixed
    for other in range(len(several)):
        elsewhere = [*several[:other], as_part(values(2, 3), Whole("another group", (0, 1), 9)), *several[other:]]
        assert part._mark(values(2, 3), elsewhere, False).mixed
    assert part._mark(values(2, 3), [P, Q], True).mixed
    assert not part._mark(values(2, 3), [P, Q], False).mixed
