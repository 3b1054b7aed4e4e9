"""Buffers and layers made under another default device, or one without memory, work like any other."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import HEAPS
from support.ranks import Ranks
from support.rounds import one_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.engine.gpu.driver import Gpu

MakeRanks = Callable[[str, int], Ranks]
PACKAGE = Path(__file__).resolve().parents[2] / "moe_rt"
FACTORIES = ("arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm")
FACTORIES += ("scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros")


def round_of_a_buffer(group: Any, device: str) -> None:
    spec = make_spec(2)
    with torch.device(device):
        buffer = Buffer(group, timeout_s=60.0, **buffer_kwargs(spec))
    with buffer:
        one_round(buffer, make_inputs(spec, [5, 3], seed=1), seed=1)


def steps_of_layers(group: Any, device: str) -> None:
    config = MoEConfig(hidden=16, intermediate=8, num_experts=4, num_topk=2, num_max_tokens_per_rank=6,
                       dtype=torch.float32, shared_intermediate=8, router_bias=True, timeout_s=60.0)  # fmt: skip
    results: list[list[Any]] = []
    weights: dict[str, torch.Tensor] = {}
    for other in ("cpu", device):
        with torch.device(other):
            layer = MoELayer(config, group)
        assert {p.device.type for p in layer.parameters()} == {"cpu"}, "where the buffer is"
        weights = weights or layer.state_dict()
        layer.load_state_dict(weights)
        x = torch.linspace(-1, 1, 6 * 16).view(6, 16).requires_grad_()
        out, aux = layer(x)
        (out.sum() + aux.loss).backward()
        results.append([out, x.grad, *(p.grad for p in layer.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.emulated("expects parameters on the CPU")
@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("device", ["meta", "cuda"])
@pytest.mark.parametrize("case", [round_of_a_buffer, steps_of_layers])
def test_made_under(make_ranks: MakeRanks, heap: str, device: str, case: Callable[..., None]) -> None:
    make_ranks(heap, 2).run(case, device)


def test_host_memory_that_the_device_writes_is_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory for the device ignores the default device: "meta" has no address, and torch refuses to pin "cuda"
    memory."""
    asked: list[Any] = []
    monkeypatch.setattr(torch, "zeros", lambda *_, **options: asked.append(options))
    Gpu.host_bytes(object.__new__(Gpu), 48)
    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]


def unplaced(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FACTORIES):
            continue
        if ast.unparse(node.func.value) == "torch" and "device" not in [keyword.arg for keyword in node.keywords]:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}: torch.{node.func.attr} names no device"


@pytest.mark.parametrize("part", ["engine", "memory", "lab/check"])
def test_tensors_are_made_where_the_code_says(part: str) -> None:
    paths = sorted((PACKAGE / part).rglob("*.py"))
    assert paths
    assert [found for path in paths for found in unplaced(path)] == []
