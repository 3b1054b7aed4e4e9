"""Routes: a replayed step has the recorded step's bits, under every way to train; errors reach every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from routes import cases_routes as cases
from routes.cases_routes import E, H, K, Mixed, T, batch, step
from support.ranks import Ranks
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_rt import MoELayer, routes
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.routes.calls import Calls

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("options", cases.KINDS.values(), ids=cases.KINDS.keys())
def test_of_every_router(options: dict[str, Any]) -> None:
    cases.same_bits(None, options, None, None, together=False)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], []], ids=["in order", "in another", "together"])
def test_under_recomputation(make_ranks: MakeRanks, how: str, order: list[int]) -> None:
    """A recomputation finds its micro-batch, in whatever order the backwards come."""
    make_ranks("threads", 2).run(cases.same_bits, {}, how, order or None, not order)
    cases.same_bits(None, {"jitter": 0.2}, how, order or None, not order)


@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_a_backward_after_the_block(make_ranks: MakeRanks, how: str) -> None:
    make_ranks("threads", 2).run(cases.late_backward, how)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_under_wrappers(make_ranks: MakeRanks, how: str) -> None:
    make_ranks("shm", 2).run(cases.wrapped, how)


def test_with_dropped_rows(make_ranks: MakeRanks) -> None:
    make_ranks("threads", 2).run(cases.same_bits, dict(capacity_factor=0.5, overflow="drop"), None, None, False)


def test_with_a_frozen_router_and_a_rank_without_tokens(make_ranks: MakeRanks) -> None:
    make_ranks("threads", 2).run(cases.frozen, [T, 0])


@pytest.mark.parametrize("at", [0, 1], ids=["first layer", "last layer"])
def test_one_changed_id_changes_one_token(tmp_path: Path, at: int) -> None:
    """No bit of another token or its gradient changes: with sums="invariant" a row's products depend on no other."""
    model, x = Mixed(None, sums="invariant"), batch(0)
    with routes.record(model) as recorded:
        expected, _ = model(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    recorded.save(tmp_path / "a.npz")
    loaded = routes.load(tmp_path / "a.npz")
    token, taken = 7, loaded.topk_idx[7, at].tolist()
    loaded.topk_idx[token, at, 1] = next(e for e in range(E) if e not in taken)
    loaded.save(tmp_path / "b.npz")
    with routes.replay(tmp_path / "b.npz", model):
        out, _ = model(x)
    (moved,) = torch.autograd.grad(out.square().sum(), x)
    assert (out != expected).any(1).nonzero().flatten().tolist() == [token]
    assert (moved != grad).any(1).nonzero().flatten().tolist() == [token]
    model.close()


def test_a_forward_in_a_backward_that_recomputes_nothing_has_no_number() -> None:
    of_layer = Calls()
    numbers = [of_layer.number()]
    y = 2 * torch.ones(1, requires_grad=True)
    y.register_hook(lambda grad: numbers.append(of_layer.number()))
    y.backward()
    assert (numbers, of_layer.count) == ([0, None], 1)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inner", [True, False], ids=["regions in it", "one region"])
def test_gradients_of_a_layer_that_a_region_runs_often(inner: bool, reentrant: bool) -> None:
    """They are those without checkpointing, each forward with its own recorded routes."""
    layer = Mixed(None).moe[0]

    def looped(x: Tensor, inner: bool = False) -> Tensor:
        for _ in range(3):
            x = x + (checkpoint(layer, x, use_reentrant=reentrant) if inner else layer(x))[0]
        return x

    with routes.record(layer) as recorded, torch.no_grad():
        looped(batch(0))
    with torch.no_grad():
        layer.router.weight.neg_()  # the live choice is another
    grads = []
    for run in (looped, lambda x: checkpoint(looped, x, inner, use_reentrant=reentrant)):
        x = batch(0)
        with routes.replay(recorded, layer):
            out = run(x)
        out.square().sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    layer.buffer.close()


def test_a_recorded_expert_outside_the_top_k_learns() -> None:
    """Its weight is that of the live softmax over the recorded experts, and so is its gradient."""
    layer = Mixed(None).moe[0]
    x = torch.randn(1, H)
    scores = torch.nn.functional.linear(x, layer.router.weight).softmax(-1)
    worst = scores.topk(K, largest=False).indices
    given = routes.Routes.from_routed_experts([worst[:, None]], num_experts=E)
    with routes.replay(given, layer):
        out, _ = layer(x)
    (got,) = torch.autograd.grad(out.sum(), layer.router.weight)
    _, weights, _ = layer.router(x, worst)
    torch.testing.assert_close(weights, scores.gather(1, worst) / scores.gather(1, worst).sum())
    assert got[worst[0]].abs().min() > 0
    layer.buffer.close()


def test_compiled_as_one_graph() -> None:
    """A compiled layer records, replays and chooses; a new recording compiles nothing."""
    torch._dynamo.reset()
    layer = Mixed(None).moe[0]
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = batch(0)
    with routes.record(compiled) as recorded:
        expected = compiled(x)[0]
    (grad,) = torch.autograd.grad(expected.sum(), x)
    with torch.no_grad():
        layer.router.weight.neg_()
    frames = None
    for _ in range(3):
        with routes.replay(recorded, compiled), routes.record(compiled) as again:
            compiled(x)
        assert torch.equal(again.routes().topk_idx, recorded.routes().topk_idx)
        counters = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert frames in (None, counters)
        frames = counters
    with torch.no_grad():
        layer.router.weight.neg_()
    with routes.replay(recorded, compiled):
        out = compiled(x)[0]
    assert torch.equal(out, expected)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], grad)
    layer.buffer.close()


def test_tokens_without_a_record_choose() -> None:
    layer, x = Mixed(None).moe[0], batch(0)
    with routes.record(layer) as live:
        expected, _ = layer(x)
    ids = live.routes().topk_idx
    given = routes.Routes.from_routed_experts([ids[:5], ids[6:11]], num_experts=E, length=6)
    with routes.replay(given, layer):
        assert torch.equal(layer(x)[0], expected)
    with routes.replay(live, layer, tokens=[torch.tensor([3, -1])]), routes.record(layer) as again:
        layer(x[[3, 7]])
    assert torch.equal(again.routes().topk_idx, ids[[3, 7]])
    layer.buffer.close()


def test_padding_and_ids_of_the_caller() -> None:
    layer, x = Mixed(None).moe[0], batch(0)
    mask = torch.arange(T) % 3 > 0
    with routes.record(layer) as recorded:
        expected, _ = layer(x, mask=mask)
    assert (recorded.routes().topk_idx[~mask] == -1).all()
    with routes.replay(recorded, layer):
        assert torch.equal(layer(x)[0], expected)
    with routes.replay(recorded, layer), pytest.raises(InvalidInput, match="topk_idx: got a tensor while"):
        layer(x, recorded.routes().topk_idx[:, 0].long())
    layer.buffer.close()


def test_saved_by_ranks_and_replayed_by_others(make_ranks: MakeRanks, tmp_path: Path) -> None:
    path = str(tmp_path / "routes.npz")
    make_ranks("shm", 2).run(cases.saved, path, [T, T])
    loaded = routes.load(path, num_experts=E)
    assert (loaded.num_ranks, loaded.num_micro_batches, loaded.layers) == (2, 2, ("moe.0", "moe.1"))
    assert loaded.rank.tolist() == ([0] * T + [1] * T) * 2
    assert [file.name for file in tmp_path.iterdir()] == ["routes.npz"]
    for size in (1, 2, 4):
        parts = make_ranks("threads", size).run(cases.replayed_elsewhere, path, 2)
        batches = [[ids.chunk(2)[n] for (ids,) in parts] for n in range(2)]
        assert torch.equal(torch.cat([torch.cat(one) for one in batches]), loaded.topk_idx)


def test_a_ranks_own_routes(make_ranks: MakeRanks, tmp_path: Path) -> None:
    """Each rank replays what it recorded, what a file has of it, or all ranks' after `merge`."""
    ranks, path = make_ranks("threads", 2), str(tmp_path / "routes.npz")
    ranks.run(cases.saved, path, [T, 0])
    own = ranks.run(cases.own_parts, path, [T, 0])
    whole, merged = routes.load(path), routes.merge(own[::-1])
    for name in ("topk_idx", "rank", "micro_batch"):
        assert torch.equal(getattr(merged, name), getattr(whole, name))
    assert (merged.of_rank, merged.num_micro_batches) == (None, 2)
    own[1].save(tmp_path / "own.npz")
    assert routes.load(tmp_path / "own.npz").of_rank == 1
    make_ranks("threads", 4).run(cases.replayed_elsewhere, path, 1)  # though one rank had no tokens
    for parts, said in ((own[:1], "those of ranks \\[0\\]"), ([own[0]] * 2, "those of ranks \\[0, 0\\]"), ([], "none")):
        with pytest.raises(InvalidConfig, match=f"parts: got {said}"):
            routes.merge(parts)
    with pytest.raises(InvalidConfig, match="parts: num_experts: got \\[8, 9\\], expected equal ones"):
        routes.merge([own[0], replace(own[1], num_experts=9)])


def test_uneven_ranks_need_their_own_number_or_tokens(make_ranks: MakeRanks, tmp_path: Path) -> None:
    path = str(tmp_path / "routes.npz")
    make_ranks("threads", 2).run(cases.saved, path, [3, 2])
    with pytest.raises(InvalidConfig, match="tokens of micro-batch 0: got 5, expected a multiple of 3 ranks"):
        make_ranks("threads", 3).run(cases.replayed_elsewhere, path, 2)


@pytest.mark.parametrize(
    ("kind", "tokens", "forwards", "message"),
    [
        ("E", [T, T], 1, "InvalidConfig: routes: num_experts: got 64, expected 8 as in the model"),
        ("K", [T, T], 1, "InvalidConfig: routes: num_topk: got 2, expected 3 as in the model"),
        ("layers", [T, T], 1, "InvalidConfig: routes: layers: got ['a', 'b', 'c']"),
        ("differs", [T, T], 1, "ConfigMismatch: routes: got of 2 ranks, 1 micro-batches, checksum"),
        ("own", [T, T], 1, "ConfigMismatch: routes: got of 2 ranks, 1 micro-batches, each rank's own"),
        ("another's", [T, T], 1, "InvalidConfig: routes: got those of rank 0 of 2, expected those of rank 1 of 2, "),
        ("fewer", [T, T], 1, "InvalidConfig: routes: got those of rank 0 of 3, expected those of rank 0 of 2, "),
        ("", [T, T - 1], 1, "InvalidInput: moe.0: got 11 tokens in micro-batch 0, expected 12 on rank 1 of 2"),
        ("", [T, T], 2, "InvalidInput: moe.0: got micro-batch 1, expected only 1, as recorded"),
    ],
)
def test_errors_on_every_rank(make_ranks: MakeRanks, kind: str, tokens: list[int], forwards: int, message: str) -> None:
    ids = torch.zeros(2 * T, 2, K, dtype=torch.int16)
    rank = torch.arange(2, dtype=torch.int32).repeat_interleave(T)
    good = routes.Routes(ids, E, ("moe.0", "moe.1"), 2, 1, rank, torch.zeros_like(rank))
    ranks = make_ranks("threads", 2)
    changed = {
        "E": replace(good, num_experts=64),
        "layers": replace(good, topk_idx=ids[:, [0, 1, 1]], layers=("a", "b", "c")),
        "differs": replace(good, topk_idx=ids + 1),
        "own": good.of(rank=1),
        "another's": good.of(rank=0),
        "fewer": replace(good, num_ranks=3).of(rank=0),
    }
    one, two = good if kind in ("differs", "own") else changed.get(kind, good), changed.get(kind, good)

    said = ranks.run(refused_by_rank, one, two, kind, tokens, forwards)
    kinds = [text.partition(":")[0] for text in said]
    assert len(set(kinds)) == 1, said
    assert any(message in text for text in said), said


def refused_by_rank(group: Any, one: Any, two: Any, *args: Any) -> str:
    return cases.refused(group, two if group.rank else one, *args)


def test_what_is_no_model_or_busy() -> None:
    with pytest.raises(InvalidConfig, match="model: got Linear, expected a model with a MoELayer"):
        routes.record(torch.nn.Linear(2, 2))
    layer = Mixed(None).moe[0]
    assert isinstance(layer, MoELayer)
    with routes.record(layer), pytest.raises(InvalidConfig, match="records or replays already"), routes.record(layer):
        pass
    layer.buffer.close()


def test_layers_that_ran_differently() -> None:
    model = Mixed(None)
    with routes.record(model) as recorded:
        model.moe[0](batch(0))
    with pytest.raises(InvalidConfig, match=r"moe.1: tokens of each forward: got \[\], expected \[12\] as in moe.0"):
        recorded.routes()
    model.close()


def test_opcheck() -> None:
    """The ops by which layers record and replay keep torch's contract of custom ops."""
    layer, x = Mixed(None).moe[0], batch(0)
    with routes.record(layer) as recorded:
        layer(x)
    many = torch.zeros(20, T, dtype=torch.int32) + torch.arange(20, dtype=torch.int32)[:, None]
    ids = recorded.routes().topk_idx.repeat(20, 1, 1)
    given = replace(
        recorded.routes(), topk_idx=ids, rank=0 * many.flatten(), micro_batch=many.flatten(), num_micro_batches=20
    )
    with routes.replay(given, layer), routes.record(layer):
        ops = torch.ops.moe_rt
        torch.library.opcheck(ops.recorded_routes, (x.detach(), K, layer.routes_id))
        torch.library.opcheck(ops.note_routes, (ids[:T, 0].long(), ids[:T, 0].long(), layer.routes_id))
    layer.buffer.close()


def test_evaluation_between_steps_is_left_out() -> None:
    """A recording may be entered again; what runs between its blocks is not recorded."""
    model, x = Mixed(None), batch(0)
    recorded = routes.record(model)
    for _ in range(2):
        with recorded:
            step(model, [x])
        model(x)
    assert recorded.routes().num_micro_batches == 2
    model.close()
