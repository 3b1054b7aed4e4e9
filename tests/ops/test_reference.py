"""The plain-torch oracle against sums of whole numbers, which are exact in any order, and codes by hand."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from support.routing import make_spec
from torch import Tensor

from moe_rt.config.options import BufferOptions
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.ops import reference

SIZES = [4, 0, 7]  # tokens of each rank
PLACEMENT = [2, 0, 1, 1, 0, 2, 0, 1, 2]


def whole_numbers(spec: BufferSpec) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return rows, ids with repeated ones and none, and weights, each for all ranks."""
    g = torch.Generator().manual_seed(0)
    xs = [torch.randint(-3, 4, (n, spec.hidden), generator=g).to(spec.dtype) for n in SIZES]
    ids = [torch.randint(-1, 3, (n, spec.num_topk), generator=g) * 3 for n in SIZES]
    ids = [torch.where(t < 0, -1, t + torch.randint(0, 3, t.shape, generator=g)) for t in ids]
    for t in ids:
        t[:1], t[1:2, 1:] = 5, t[1:2, :1]
    weights = [torch.randint(1, 4, t.shape, generator=g).to(spec.acc_dtype) for t in ids]
    return xs, ids, weights


def spec_of(**changes: Any) -> BufferSpec:
    return make_spec(3, placement=PLACEMENT, dtype=torch.float64, **changes)


def local(expert: int) -> tuple[int, int]:
    """Return the rank of an expert and its place among that rank's."""
    rank = PLACEMENT[expert]
    return rank, PLACEMENT[:expert].count(rank)


def visits(ids: list[Tensor]) -> list[tuple[int, int, int, list[int]]]:
    """Return each (source, token, expert), and the entries that name the expert."""
    found = []
    for source, t in enumerate(ids):
        for token, row in enumerate(t.tolist()):
            for expert in sorted(set(row) - {-1}):
                found.append((source, token, expert, [k for k, e in enumerate(row) if e == expert]))
    return found


@pytest.mark.parametrize("alignment", [1, 8])
def test_rows_of_experts(alignment: int) -> None:
    """They are in the order local expert, source, token; a repeated expert has the sum of its weights."""
    spec = spec_of(expert_alignment=alignment)
    xs, ids, weights = whole_numbers(spec)
    received = reference.dispatch(xs, ids, weights, spec)
    for rank, got in enumerate(received):
        mine = sorted((local(e)[1], s, t, ks) for s, t, e, ks in visits(ids) if local(e)[0] == rank)
        real = [row for row in got.rows if row.source >= 0]
        assert [(r.expert, r.source, r.token, r.entry) for r in real] == [(e, s, t, ks[0]) for e, s, t, ks in mine]
        assert [float(r.weight) for r in real] == [float(weights[s][t, ks].sum()) for _, s, t, ks in mine]
        counts = [sum(e == each for each, *_ in mine) for e in range(PLACEMENT.count(rank))]
        padded = [-(-n // alignment) * alignment for n in counts]
        ends = list(itertools.accumulate(padded))
        assert got.offs.tolist() == ends
        assert got.real_ends is not None
        assert got.real_ends.tolist() == [end - p + n for end, p, n in zip(ends, padded, counts, strict=True)]
        assert (got.offs.dtype, got.real_ends.dtype) == (torch.int32, torch.int32)
        padding = [row.source < 0 for row in got.rows]
        assert got.padding.tolist() == padding
        assert padding.count(True) == sum(padded) - sum(counts)
        assert {(r.expert, r.source, r.token, float(r.weight)) for r in got.rows if r.source < 0} <= {(-1, -1, -1, 0.0)}
        expected = torch.stack(
            [xs[r.source][r.token] if r.source >= 0 else xs[0].new_zeros(spec.hidden) for r in got.rows]
        )
        assert torch.equal(got.recv_x, expected)
        assert got.recv_weights.tolist() == [float(r.weight) for r in got.rows]


@pytest.mark.parametrize("route", ["flat", "two_level"])
@pytest.mark.parametrize("sums", ["ranked", "invariant"])
@pytest.mark.parametrize("alignment", [1, 8])
def test_a_round_of_experts(route: Any, sums: Any, alignment: int) -> None:
    """Outputs and gradients are those of a dense sum, differentiated by autograd."""
    spec = spec_of(expert_alignment=alignment, route=route, sums=sums)
    xs, ids, weights = whole_numbers(spec)
    dense_x = [x.clone().requires_grad_() for x in xs]
    dense_w = [w.clone().requires_grad_() for w in weights]
    outs = []
    for x, idx, w in zip(dense_x, ids, dense_w, strict=True):
        factors = torch.where(idx >= 0, w * (idx + 1), 0)
        outs.append(factors.sum(1, keepdim=True) * x)
    grads = [torch.randint(-2, 3, x.shape, generator=torch.Generator().manual_seed(7)).double() for x in xs]
    expected = torch.autograd.grad(outs, [*dense_x, *dense_w], grads)

    received = reference.dispatch(xs, ids, weights, spec)
    experts = [[e for e, r in enumerate(PLACEMENT) if r == rank] for rank in range(3)]
    factors = [torch.tensor([[experts[rank][r.expert] + 1.0] for r in got.kept]) for rank, got in enumerate(received)]
    ys = [got.recv_x * factor for got, factor in zip(received, factors, strict=True)]
    recv_weights = reference.factors(received, spec)
    combined = reference.combine(ys, recv_weights, received, SIZES, spec)
    for got, want in zip(combined, outs, strict=True):
        assert torch.equal(got, want)
        assert got.dtype is spec.dtype
    back = reference.combine_backward(grads, ys, recv_weights, received, spec)
    given = [(grad_y * factor).double() for (grad_y, _), factor in zip(back, factors, strict=True)]
    result = reference.dispatch_backward(given, [grad_w for _, grad_w in back], received, ids, spec)
    for (grad_x, grad_w), want_x, want_w in zip(result, expected[:3], expected[3:], strict=True):
        assert torch.equal(grad_x, want_x)
        assert torch.equal(grad_w, want_w)
        assert (grad_x.dtype, grad_w.dtype) == (spec.dtype, spec.acc_dtype)


def test_a_round_of_tokens() -> None:
    """A token's row arrives once on each of its ranks, with the ids and weights of the experts there."""
    spec = spec_of(layout="tokens")
    xs, ids, weights = whole_numbers(spec)
    received = reference.dispatch(xs, ids, weights, spec)
    partials = []
    for rank, got in enumerate(received):
        pairs = [(s, t) for s, n in enumerate(SIZES) for t in range(n)]
        mine = [(s, t) for s, t in pairs if any(e >= 0 and local(e)[0] == rank for e in ids[s][t].tolist())]
        assert [(r.source, r.token) for r in got.rows] == mine
        assert got.offs.tolist() == [sum(s <= source for s, _ in mine) for source in range(3)]
        assert torch.equal(got.recv_x, torch.stack([xs[s][t] for s, t in mine]))
        assert got.recv_topk_idx is not None
        for i, (s, t) in enumerate(mine):
            row = ids[s][t].tolist()
            first = [e >= 0 and local(e)[0] == rank and row.index(e) == k for k, e in enumerate(row)]
            assert got.recv_topk_idx[i].tolist() == [local(e)[1] if f else -1 for e, f in zip(row, first, strict=True)]
            summed = [sum(float(weights[s][t, j]) for j, o in enumerate(row) if o == e) for e in row]
            assert got.recv_weights[i].tolist() == [w if f else 0.0 for w, f in zip(summed, first, strict=True)]
        ones = (got.recv_topk_idx >= 0).double()
        scale = torch.tensor(
            [[PLACEMENT_OF[rank][e] + 1.0 if e >= 0 else 0.0 for e in row] for row in got.recv_topk_idx]
        )
        partials.append((got.recv_x * (got.recv_weights * scale * ones).sum(1, keepdim=True)).to(spec.dtype))
    for t in (*reference.factors(received, spec), *(r.recv_weights for r in received)):
        assert t.dtype is spec.acc_dtype
    assert [f.tolist() for f in reference.factors(received, spec)] == [[1.0] * len(r.recv_x) for r in received]
    outs = reference.combine(partials, reference.factors(received, spec), received, SIZES, spec)
    for out, x, idx, w in zip(outs, xs, ids, weights, strict=True):
        assert torch.equal(out, torch.where(idx >= 0, w * (idx + 1), 0).sum(1, keepdim=True) * x)
    grads_w = [torch.arange(float(r.recv_weights.numel())).view_as(r.recv_weights) for r in received]
    result = reference.dispatch_backward([torch.ones_like(r.recv_x) for r in received], grads_w, received, ids, spec)
    for source, (grad_x, grad_w) in enumerate(result):
        assert (grad_x.dtype, grad_w.dtype) == (spec.dtype, spec.acc_dtype)
        for t, row in enumerate(ids[source].tolist()):
            ranks = {local(e)[0] for e in row if e >= 0}
            assert grad_x[t].tolist() == [float(len(ranks))] * spec.hidden
            for k, e in enumerate(row):
                if e < 0:
                    assert grad_w[t, k] == 0
                    continue
                rank = local(e)[0]
                place = [(r.source, r.token) for r in received[rank].rows].index((source, t))
                assert grad_w[t, k] == grads_w[rank][place, row.index(e)]


PLACEMENT_OF = [[e for e, r in enumerate(PLACEMENT) if r == rank] for rank in range(3)]


@pytest.mark.parametrize("layout", ["experts", "tokens"])
def test_dropped_rows_add_nothing(layout: Any) -> None:
    """A receiver keeps its first rows, up to its capacity for the bound of a call."""
    spec = spec_of(layout=layout, capacity_factor=0.3, overflow="drop")
    xs, ids, weights = whole_numbers(spec)
    ids = [torch.full_like(t, 2) for t in ids]
    whole = reference.dispatch(xs, ids, weights, spec_of(layout=layout))
    for bound in (None, 8):
        received = reference.dispatch(xs, ids, weights, spec, bound)
        capacity = spec.capacity(1, bound)
        assert [len(r.recv_x) for r in received] == [0, min(capacity, 11), 0]
        assert {r.padding.dtype for r in received} == {torch.bool}
        assert {(r.recv_x.dtype, r.recv_weights.dtype) for r in received} == {(spec.dtype, spec.acc_dtype)}
        got = received[1]
        assert len(got.rows) == 11
        assert len(got.kept) == len(got.recv_weights) == min(capacity, 11)
        assert torch.equal(got.recv_x, whole[1].recv_x[:capacity])
        assert int(got.offs.max()) == min(capacity, 11)
        outs = reference.combine([r.recv_x for r in received], reference.factors(received, spec), received, SIZES, spec)
        kept = {(r.source, r.token) for r in got.kept}
        for source, out in enumerate(outs):
            for t, row in enumerate(out):
                assert bool(row.any()) <= ((source, t) in kept)


def test_codes_travel_as_they_are() -> None:
    spec = spec_of(expert_alignment=8)
    _, ids, weights = whole_numbers(spec)
    codes = [torch.arange(n * 5, dtype=torch.int8).view(n, 5) for n in SIZES]
    scales = [torch.arange(n * 2.0).view(n, 2) + 0.5 for n in SIZES]
    received = reference.dispatch_scaled(list(zip(codes, scales, strict=True)), ids, weights, spec)
    for got in received:
        for sent, rows in ((codes, got.recv_x), (scales, got.recv_scales)):
            assert rows is not None
            for row, value in zip(got.rows, rows, strict=True):
                expected = sent[row.source][row.token] if row.source >= 0 else torch.zeros_like(value)
                assert torch.equal(value, expected)
                assert value.dtype is sent[0].dtype


def test_lists_of_other_lengths_are_refused() -> None:
    """Each list has an entry for each rank."""
    spec = spec_of()
    xs, ids, weights = whole_numbers(spec)
    received = reference.dispatch(xs, ids, weights, spec)
    ys, recv_weights = [r.recv_x for r in received], [r.recv_weights for r in received]
    tokens = spec_of(layout="tokens")
    invariant = spec_of(sums="invariant")
    of_tokens = reference.dispatch(xs, ids, weights, tokens)
    of_weights = [r.recv_weights for r in of_tokens]
    calls = [
        lambda: reference.dispatch(xs, ids, weights[:2], spec),
        lambda: reference.dispatch(xs, ids, weights[:2], tokens),
        lambda: reference.combine(ys[:2], recv_weights, received, SIZES, invariant),
        lambda: reference.dispatch_backward([r.recv_x for r in of_tokens], of_weights[:2], of_tokens, ids, tokens),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="zip"):
            call()


TINY = 2.0**-100


@pytest.mark.parametrize(("codec", "most"), [(torch.int8, 127.0), (torch.float8_e4m3fn, 448.0)], ids=str)
def test_codes_by_hand(codec: torch.dtype, most: float) -> None:
    """The largest element gets the largest code; rows below 2**-100 are zero, and NaN where one is not finite."""
    row = torch.tensor([[1.0, -1.0, 0.5, -1e-9, 0.0]])
    codes, scales = reference.code(row, codec)
    assert scales.tolist() == (torch.ones(1, 1) / most).tolist()
    half = {torch.int8: 64.0, torch.float8_e4m3fn: 224.0}[codec]
    assert codes.float().tolist() == [[most, -most, half, 0.0, 0.0]]
    assert not codes.view(torch.uint8)[0, 3:].any(), "no code is a negative zero"
    for largest, coded in ((TINY, True), (TINY * 0.75, False), (TINY / 2, False), (0.0, False)):
        codes, scales = reference.code(torch.tensor([[largest, -largest]]), codec)
        assert scales.item() == (torch.tensor(largest) / torch.tensor(most) if coded else 0.0)
        assert codes.float().tolist() == ([[most, -most]] if coded else [[0.0, 0.0]])
        assert not codes.view(torch.uint8).any() or coded
    for bad in (torch.inf, -torch.inf, torch.nan):
        codes, scales = reference.code(torch.tensor([[1.0, bad]]), codec)
        assert scales.isnan().all()
        assert not codes.float().any()


@pytest.mark.parametrize("codec", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("hidden", [1, 127, 128, 129, 300])
def test_blocks_have_scales_of_their_own(codec: torch.dtype, hidden: int) -> None:
    rows = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(3)[:, None]
    codes, scales = reference.code(rows, codec)
    assert (codes.shape, codes.dtype, scales.shape) == ((3, hidden), codec, (3, -(-hidden // 128)))
    for block in range(scales.shape[1]):
        part = slice(128 * block, 128 * (block + 1))
        alone, one = reference.code(rows[:, part], codec)
        assert torch.equal(alone.view(torch.uint8), codes[:, part].view(torch.uint8))
        assert torch.equal(one[:, 0], scales[:, block])
    for dtype in (torch.float32, torch.bfloat16):
        decoded = reference.through_codec(rows.to(dtype), codec)
        assert decoded.dtype is dtype
        error = (decoded.float() - rows).abs() / rows.abs().amax(1, keepdim=True)
        assert error.max() < (0.04 if codec is torch.float8_e4m3fn or dtype is torch.bfloat16 else 0.005)
    assert reference.through_codec(rows, None) is rows


@pytest.mark.parametrize("codec", [None, torch.int8], ids=str)
@pytest.mark.parametrize("route", ["flat", "two_level"])
def test_partials_are_rounded_by_rank_and_by_node(route: Any, codec: torch.dtype | None) -> None:
    """A node's sum of several partials is rounded and coded again; that of a single one is as its rank sent it."""
    options = BufferOptions(route=route, placement=[0, 1, 2])
    sizes = dict(num_max_tokens_per_rank=2, hidden=4, num_topk=3, num_experts=3, dtype=torch.bfloat16)
    spec = BufferSpec.make(Topology((0, 0, 1)), options, **sizes, layout="experts", expert_alignment=1)
    g = torch.Generator().manual_seed(0)
    xs = [torch.ones(n, 4, dtype=torch.bfloat16) for n in (2, 0, 0)]
    ids = [torch.tensor([[0, 1, 2], [1, -1, 2]]), *[torch.zeros(0, 3, dtype=torch.int64)] * 2]
    weights = [torch.rand(len(t), 3, generator=g) for t in ids]
    received = reference.dispatch(xs, ids, weights, spec)
    ys = [torch.randn(len(r.recv_x), 4, generator=g).bfloat16() for r in received]
    outs = reference.combine(ys, [r.recv_weights for r in received], received, [2, 0, 0], spec, codec)

    def sent(rank: int, token: int) -> Tensor:
        at = [row.token for row in received[rank].rows].index(token)
        partial = (received[rank].recv_weights[at] * ys[rank][at].float())[None]
        return partial.bfloat16().float() if codec is None else reference.through_codec(partial, codec)

    if route == "flat":
        first, second = sent(0, 0) + sent(1, 0), sent(1, 1)
    else:
        both = (sent(0, 0) + sent(1, 0)).bfloat16().float()
        first, second = reference.through_codec(both, codec), sent(1, 1)
    assert torch.equal(outs[0], torch.cat([first + sent(2, 0), second + sent(2, 1)]).bfloat16())


def test_entries_are_added_as_one_process_adds_them() -> None:
    """A row is coded by itself, and added at the first entry that names its expert."""
    spec = make_spec(3, placement=PLACEMENT, sums="invariant")
    xs, ids, weights = whole_numbers(spec)
    received = reference.dispatch(xs, ids, weights, spec)
    g = torch.Generator().manual_seed(3)
    ys = [torch.randn(r.recv_x.shape, generator=g) for r in received]
    for codec in (None, torch.int8):
        rows = [reference.through_codec(y, codec) for y in ys]
        outs = reference.combine(ys, [r.recv_weights for r in received], received, SIZES, spec, codec)
        for source, out in enumerate(outs):
            for t, row in enumerate(ids[source].tolist()):
                total = torch.zeros(spec.hidden)
                for k, expert in enumerate(row):
                    if expert >= 0 and row.index(expert) == k:
                        rank, place = local(expert)
                        at = [(r.expert, r.source, r.token) for r in received[rank].rows].index((place, source, t))
                        total = total + received[rank].recv_weights[at] * rows[rank][at]
                assert torch.equal(out[t], total)
