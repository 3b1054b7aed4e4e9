"""Layers with sums="invariant": the same bits for any number of ranks, where docs/howto/equal_bits.md promises them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from layer.cases_equal_layers import make_batch, part_of_layer, sequences_of_layer
from layer.cases_layer import config
from support.ranks import ThreadRanks
from torch import Tensor

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.errors import InvalidConfig
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.ops.grouped import TILE, grouped_linear, row_wise_linear
from moe_rt.ops.tree_sums import tree_sum

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared expert": dict(shared_intermediate=64, shared_gate=True),
    "biases, another activation": dict(biases=True, activation="geglu", intermediate=64),
    "sigmoid router, other weights": dict(score_func="sigmoid", weight_layout="transposed", router_bias=True),
    "two nodes": dict(route="two_level"),
}


def whole(counts: list[int], dtype: torch.dtype, changes: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """Return everything that is promised, joined over the ranks, and the sum of the router's gradients."""
    nodes = [rank // 2 for rank in range(len(counts))] if changes.get("route") else None
    parts = ThreadRanks(len(counts), nodes=nodes).run(part_of_layer, counts, dtype, changes)
    joined = {name: torch.cat([part[kind][name] for part in parts]) for kind in (0, 1) for name in parts[0][kind]}
    return joined, torch.stack([router.double() for _, _, router in parts]).sum(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equal_bits(kind: str, dtype: torch.dtype) -> None:
    """Outputs, gradients of inputs and of experts are equal in bits; the router's, a sum over ranks, nearly."""
    alone, router = whole([23], dtype, KINDS[kind])
    for counts in ([12, 11], [1, 2, 20], [23, 0, 0, 0], [2, 3, 4, 5, 1, 0, 8]):
        joined, summed = whole(counts, dtype, KINDS[kind])
        assert joined.keys() == alone.keys()
        for name, tensor in joined.items():
            check_bits(f"{name} of {counts}", tensor, alone[name])
        torch.testing.assert_close(summed, router, rtol=1e-4 if dtype is torch.float32 else 0.1, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "two nodes"])
def test_replicated_modules_over_sequences(kind: str, dtype: torch.dtype) -> None:
    """Gradients of the router and the shared expert, balance losses included, are equal if the tree adds them up."""
    expected = ThreadRanks(1).run(sequences_of_layer, dtype, KINDS[kind])[0]
    for size in (2, 4):
        parts = ThreadRanks(size).run(sequences_of_layer, dtype, KINDS[kind])
        for name, wanted in expected.items():
            of_ranks = [part[name] for part in parts]
            experts = name.startswith("experts.")
            check_bits(
                f"{name}, {size} ranks", torch.cat(of_ranks) if experts else tree_sum(torch.stack(of_ranks)), wanted
            )


def test_compiled() -> None:
    """A compiled layer has the bits of the eager one, gradients of the router and the shared expert included."""
    torch._dynamo.reset()
    layer = MoELayer(config(sums="invariant", shared_intermediate=64, shared_gate=True, num_max_tokens_per_rank=64))
    x = make_batch(64, torch.float32)[0].view(4, 16, -1)
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer.zero_grad()
        out, aux = run(x)
        (out.square().sum() + aux.loss).backward()
        results.append({name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None})
    assert results[0].keys() == results[1].keys()
    for name, grad in results[0].items():
        check_bits(name, results[1][name], grad)
    layer.buffer.close()


def test_the_tree() -> None:
    """Ranks that hold equal parts, a power of two of them, have whole subtrees; the order shows in the bits."""
    parts = torch.randn(24, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 5)
    for num_parts in (1, 2, 3, 4, 5, 6, 8, 12, 24):
        some = parts[:num_parts]
        torch.testing.assert_close(tree_sum(some), some.sum(0))
        for num_ranks in (1, 2, 4, 8):
            if num_parts % num_ranks == 0:
                check_bits("ranks", tree_sum(torch.stack([tree_sum(t) for t in some.chunk(num_ranks)])), tree_sum(some))
    assert not torch.equal(tree_sum(torch.stack([tree_sum(t) for t in parts.chunk(3)])), tree_sum(parts))
    assert tree_sum(parts[:0]).tolist() == [0.0] * 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_rows_stand_alone(dtype: torch.dtype) -> None:
    """A row's product has the same bits among any number of rows, at any place and address."""
    for fan_in, fan_out in ((20, 33), (16, 7), (64, 1), (64, 64), (100, 36), (512, 256), (2048, 24)):
        check_products(fan_in, fan_out, dtype)


def test_products_of_fp64_have_as_many_rows_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL's order of a sum in fp64 depends on the number of rows on some processors, not on all."""
    rows: list[int] = []
    multiply = torch.mm

    def counted(a: Tensor, b: Tensor, **out: Tensor) -> Tensor:
        rows.append(len(a))
        return multiply(a, b, **out)

    monkeypatch.setattr(torch, "mm", counted)
    x = torch.randn(3 * TILE + 5, 7, dtype=torch.float64)
    for columns in (TILE, 3):
        weight = torch.randn(columns, 7, dtype=torch.float64)
        torch.testing.assert_close(row_wise_linear(x, weight), x @ weight.T)
    assert rows == 8 * [TILE]


def test_several_threads_are_refused() -> None:
    """MKL may divide a row's sum among threads. The layer refuses before it sends, so it goes on with one thread."""
    layer = MoELayer(config(sums="invariant"))
    x = make_batch(4, torch.float32)[0]
    expected = layer(x)[0]
    try:
        torch.set_num_threads(2)
        with pytest.raises(InvalidConfig, match=r'got "invariant" with 2 threads of torch, expected one'):
            layer(x)
    finally:
        torch.set_num_threads(1)
    check_bits("after a refusal", layer(x)[0], expected)
    layer.buffer.close()


def check_products(fan_in: int, fan_out: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(fan_in)
    x, weight = torch.randn(300, fan_in, generator=g).to(dtype), torch.randn(fan_out, fan_in, generator=g).to(dtype)
    expected = row_wise_linear(x, weight)
    shuffled = torch.randperm(300, generator=g)
    check_bits("shuffled", row_wise_linear(x[shuffled], weight), expected[shuffled])
    for count in (1, 2, 3, 4, 5, 7, TILE - 1, TILE, TILE + 1, 31, 64, 200):
        for start in (0, 3, 99):
            rows = slice(start, start + count)
            check_bits(f"{count} rows of {fan_in} x {fan_out}", row_wise_linear(x[rows], weight), expected[rows])
    ends = torch.tensor([1, 1, 4, 50, 300], dtype=torch.int32)
    got = grouped_linear(x, weight.expand(5, -1, -1).contiguous(), ends, row_wise=True)
    check_bits("in groups", got, expected)
    transposed = weight.t().expand(5, -1, -1).contiguous()
    shifted = torch.tensor([7, 7, 21, 100, 300], dtype=torch.int32)
    one, other = (grouped_linear(x, transposed, e, transposed=True, row_wise=True) for e in (ends, shifted))
    check_bits("in groups, transposed", one, other)


def test_a_buffer_given_to_a_layer_must_add_alike() -> None:
    config = MoEConfig(hidden=8, intermediate=8, num_experts=4, num_topk=2, num_max_tokens_per_rank=4, sums="invariant")
    ranked = config.buffer_sizes(torch.float32) | {"sums": "ranked"}
    with Buffer(None, **ranked) as buffer, pytest.raises(InvalidConfig, match="sums: got ranked, expected inv"):
        MoELayer(config, buffer=buffer)
