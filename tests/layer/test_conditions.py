"""When a layer's ops run in halves or in chunks, and which modules of a user fit a layer, condition by condition."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_rt.errors import InvalidConfig
from moe_rt.memory.heaps import HEAPS
from moe_rt.nn import chunks, overlap
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.protocols import check_siblings
from moe_rt.nn.spread import SpreadModule


def buffer(num_ranks: int = 2, heap: str = "ucx") -> Any:
    return SimpleNamespace(num_ranks=num_ranks, heap=heap)


@pytest.mark.parametrize("heap", HEAPS)
def test_rows_travel_between_halves_over_networks_of_cpus(heap: str) -> None:
    """Halves gained nothing on one host, and nothing was measured on GPUs."""
    expected = HEAPS[heap].network and not HEAPS[heap].gpu
    assert overlap.over_network(buffer(heap=heap)) == expected
    assert not overlap.over_network(buffer(1, heap))


def given() -> dict[str, Any]:
    return {
        "buffer": buffer(),
        "experts": SwiGLUExperts(1, 4, 2),
        "rows": torch.ones(2, 4, requires_grad=True),
        "topk_weights": torch.ones(2, 1),
    }


class Other(Tensor):
    """A tensor that torch does not call the engine with."""


def test_what_a_backward_in_halves_needs() -> None:
    """A network, a graph, rows or weights with a gradient, experts that train, and no hook that reads theirs."""
    assert overlap.has_gain(**given())
    with torch.no_grad():
        assert not overlap.has_gain(**given())
    plain, weights = torch.ones(2, 4), torch.ones(2, 1, requires_grad=True)
    changes: list[tuple[dict[str, Any], bool]] = [
        ({"buffer": buffer(heap="shm")}, False),
        ({"rows": plain}, False),
        ({"rows": plain, "topk_weights": weights}, True),
        ({"topk_weights": weights}, True),
        ({"rows": torch.ones(2, 4).as_subclass(Other).requires_grad_()}, False),
        ({"topk_weights": torch.ones(2, 1).as_subclass(Other)}, False),
        ({"experts": SwiGLUExperts(1, 4, 2).requires_grad_(False)}, False),
    ]
    for change, expected in changes:
        assert overlap.has_gain(**{**given(), **change}) == expected, change
    one_trains = SwiGLUExperts(1, 4, 2)
    one_trains.down_proj.requires_grad_(False)
    assert overlap.has_gain(**{**given(), "experts": one_trains})
    for hook in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        for inside in (False, True):
            experts = SwiGLUExperts(1, 4, 2)
            outer = nn.Sequential(experts)
            getattr(experts if inside else outer, hook)(lambda *_: None)
            assert overlap.has_backward_hooks(outer)
            assert not overlap.has_gain(**{**given(), "experts": outer})
    assert not overlap.has_backward_hooks(nn.Sequential(SwiGLUExperts(1, 4, 2)))
    assert not overlap.is_sharded(nn.Sequential(SwiGLUExperts(1, 4, 2)))


def test_gradients_that_nothing_reads_take_no_memory() -> None:
    like = torch.ones(3, dtype=torch.float64)
    unread = overlap._unread(like, 5, 7)
    assert (unread.shape, unread.stride(), unread.dtype) == ((5, 7), (0, 0), torch.float64)
    assert not unread.any()


def test_results_and_arguments_of_an_exchange_are_forgotten() -> None:
    """They hold tensors of the graph, which would keep themselves alive."""
    exchange = overlap.Exchange(buffer(), 3)
    assert exchange.tag == 3
    exchange.receive = lambda: "received"
    assert exchange.received() == "received"
    assert not hasattr(exchange, "receive")
    exchange.begun = (1, 2)
    assert exchange.waited_for(lambda *args: args) == (1, 2)
    assert exchange.begun == ()


def with_forward_hook() -> nn.Module:
    module = SwiGLUExperts(1, 4, 2)
    module.register_forward_hook(lambda *_: None)
    return module


def with_pre_hook() -> nn.Module:
    module = SwiGLUExperts(1, 4, 2)
    module.register_forward_pre_hook(lambda *_: None)
    return module


def checkpointed() -> nn.Module:
    module = SwiGLUExperts(1, 4, 2)
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)  # type: ignore[method-assign]
    return module


def test_experts_that_run_once() -> None:
    """A hook or another forward may run them again in backward, when nothing is under way."""
    assert chunks.runs_once(SwiGLUExperts(1, 4, 2))
    for make in (with_forward_hook, with_pre_hook, checkpointed):
        assert not chunks.runs_once(make())


@pytest.mark.parametrize("num_chunks", [2, 3, 4, 7])
def test_the_first_and_last_chunk_are_half_as_large(num_chunks: int) -> None:
    """Nothing hides the dispatch of the first one and the combine of the last one."""
    ends = chunks._ends(24 * (num_chunks - 1), num_chunks)
    sizes = [end - start for start, end in pairwise(ends)]
    assert sizes == [12, *[24] * (num_chunks - 2), 12]
    assert [chunks._size(24 * (num_chunks - 1), i, num_chunks) for i in range(num_chunks)] == sizes
    assert [chunks._size(1, i, num_chunks) for i in range(num_chunks)] == [1] * num_chunks
    assert [chunks._size(0, i, num_chunks) for i in range(num_chunks)] == [0] * num_chunks


@pytest.mark.parametrize("calls", [True, False])
@pytest.mark.parametrize("num_turns", [1, 2])
@pytest.mark.parametrize("half_ways", [0, 1, 2])
def test_turns_of_ops(num_turns: int, half_ways: int, calls: bool) -> None:
    """A second op begins half-way, or else after the experts; each begins and ends once."""
    seen: list[str] = []
    turns = [(partial(seen.append, f"begin {i}"), partial(seen.append, f"end {i}")) for i in range(num_turns)]

    def experts(chunk: Any) -> Any:
        seen.append("experts")
        for _ in range(half_ways):
            chunks.half_way()
        seen.append("done")
        return chunk

    chunk: Any = SimpleNamespace()
    chunks._compute_during(turns, chunk, experts, calls)
    assert chunk.y is chunk
    turn = ["end 0", "begin 1"] if num_turns == 2 else []
    early = bool(turn and half_ways and calls)
    middle = ["experts", *(turn if early else []), "done", *([] if early else turn)]
    assert seen == ["begin 0", *middle, f"end {num_turns - 1}"]
    seen.clear()
    chunks.half_way()
    assert seen == []


def own_experts(*shape: int) -> SpreadModule:
    module = SpreadModule()
    module.weight = nn.Parameter(torch.ones(shape))
    return module


def own_router(**sizes: int) -> nn.Module:
    module = nn.Linear(2, 2)
    for name, size in {"num_experts": 6, "num_topk": 2, **sizes}.items():
        setattr(module, name, size)
    return module


FITTING: dict[str, Any] = {"router": own_router(), "experts": own_experts(3, 4), "shared_expert": nn.Linear(2, 2)}
NOT_FITTING: list[tuple[dict[str, Any], str]] = [
    ({"router": "cosine"}, "router: got str, expected a torch.nn.modules.module.Module"),
    ({"router": own_router(num_experts=5)}, "router.num_experts: got 5, expected 6 as in the config"),
    ({"router": own_router(num_topk=3)}, "router.num_topk: got 3, expected 2 as in the config"),
    ({"router": nn.Linear(2, 2)}, "router.num_experts: got None, expected 6 as in the config"),
    ({"experts": nn.Linear(2, 2)}, "experts: got Linear, expected a moe_rt.nn.spread.SpreadModule"),
    ({"experts": SpreadModule()}, "experts: got no parameter of its own, expected at least one"),
    ({"experts": own_experts(2, 4)}, "experts.weight: got [2, 4], expected [3, ...] for the experts of this rank"),
    ({"experts": own_experts()}, "experts.weight: got [], expected [3, ...] for the experts of this rank"),
    ({"shared_expert": 3}, "shared_expert: got int, expected a torch.nn.modules.module.Module"),
    (
        {"shared_expert": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))},
        "shared_expert.1.weight: got a parameter on meta, expected one on cpu",
    ),
    (
        {"shared_expert": nn.Linear(2, 2, device="meta")},
        "shared_expert.weight: got a parameter on meta, expected one on cpu",
    ),
]


@pytest.mark.parametrize(("change", "text"), NOT_FITTING, ids=lambda value: value if isinstance(value, str) else "")
def test_modules_of_a_user_that_do_not_fit(change: dict[str, Any], text: str) -> None:
    sizes: dict[str, Any] = dict(num_experts=6, num_topk=2, num_local=3, device=torch.device("cpu"))
    for kinds in ({}, {"router": None}, {"experts": None}, {"shared_expert": None}):
        check_siblings(**{**FITTING, **kinds}, **sizes)
    with pytest.raises(InvalidConfig) as raised:
        check_siblings(**{**FITTING, **change}, **sizes)
    assert str(raised.value).startswith(text)
    nested = own_experts(3, 4)
    nested.child = nn.Linear(3, 3)
    with pytest.raises(InvalidConfig) as raised:
        check_siblings(None, nested, None, **sizes)
    assert str(raised.value).startswith(
        "experts.child.weight: got a parameter of a child, expected only parameters of the module itself"
    )
