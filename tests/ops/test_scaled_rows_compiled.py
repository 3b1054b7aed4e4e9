"""Rows with scales under torch's dispatcher: contracts (opcheck), fakes, torch.compile, and refused gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_rt import Buffer
from moe_rt.errors import InvalidInput

T, MOST, H, K, E, S = 5, 9, 16, 2, 4, 3
FP8 = torch.float8_e4m3fn


def open_buffer(**more: Any) -> Buffer:
    sizes = {"num_max_tokens_per_rank": MOST, "hidden": H, "num_topk": K, "num_experts": E}
    return Buffer(None, dtype=torch.float32, **sizes, **more)


@pytest.fixture(params=["experts", "tokens"])
def buffer(request: pytest.FixtureRequest) -> Iterator[Buffer]:
    with open_buffer(layout=request.param, dispatch_dtype=FP8) as b:
        yield b


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return rows, codes and scales; every token visits K experts, so with T as the bound no row is unspecified."""
    torch.manual_seed(0)
    x = torch.randn(T, H)
    idx = torch.tensor([[t % E, (t + 1) % E] for t in range(T)])
    return x, x.to(FP8), torch.rand(T, S), idx, torch.rand(T, K)


def doubled(recv: tuple[Tensor, Tensor], rows: int) -> Tensor:
    codes, scales = recv
    real = (torch.arange(len(codes)) < rows)[:, None]
    return torch.where(real, codes.float() * scales[:, :1], 0.0) * 2


def pair(buffer: Buffer, x: Any, idx: Tensor, w: Tensor, bound: int, coded: bool = False) -> Tensor:
    recv, recv_weights, handle = buffer.dispatch(x, idx, w, max_tokens=bound, coded=coded)  # type: ignore[call-overload]
    by_token = buffer.spec.by_token
    return buffer.combine(doubled(recv, T if by_token else T * K), None if by_token else recv_weights, handle)


@pytest.mark.parametrize("layout", ["experts", "tokens"])
def test_opcheck(layout: str) -> None:
    """Checked with int8 codes: torch has no fp8 kernels for opcheck's comparisons."""
    x, _, scales, idx, w = inputs()
    structure = ("test_schema", "test_autograd_registration", "test_faketensor")
    with open_buffer(layout=layout, dispatch_dtype=torch.int8) as buffer:
        for given in ((x.to(torch.int8), scales), (x, None)):
            args = (*given, idx, w, buffer._engine.id, 0, T)
            torch.library.opcheck(torch.ops.moe_rt.dispatch_scaled, args, test_utils=structure)


@pytest.mark.parametrize("bound", [1, T, None])
def test_fakes_have_shapes_and_dtypes(buffer: Buffer, bound: int | None) -> None:
    rows = (bound or MOST) * (1 if buffer.spec.by_token else K)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        x, codes, scales, idx, w = (mode.from_tensor(t) for t in inputs())
        for bytes_of in (codes, codes.view(torch.uint8)[:, : H // 2]):
            recv, _, handle = buffer.dispatch((bytes_of, scales), idx, w, max_tokens=bound)
            assert [(t.shape, t.dtype) for t in recv] == [
                ((rows, bytes_of.shape[1]), bytes_of.dtype),
                ((rows, S), torch.float32),
            ]
            assert handle.send_plan.shape == (T, K)
        recv, _, _ = buffer.dispatch(x, idx, w, max_tokens=bound, coded=True)
        assert [(t.shape, t.dtype) for t in recv] == [((rows, H), FP8), ((rows, 1), torch.float32)]


def test_compiles_as_one_graph(buffer: Buffer) -> None:
    x, codes, scales, idx, w = inputs()
    torch._dynamo.reset()
    compiled = torch.compile(pair, fullgraph=True, backend="aot_eager")
    for given, coded in (((codes, scales), False), (x, True)):
        want = pair(buffer, given, idx, w, T, coded)
        assert want.any()
        assert torch.equal(compiled(buffer, given, idx, w, T, coded), want)


@pytest.mark.parametrize("which", ["codes", "scales", "topk_weights"])
@pytest.mark.parametrize("through", ["buffer", "dispatcher"])
def test_codes_have_no_gradients(buffer: Buffer, which: str, through: str) -> None:
    """A dispatch of codes is refused before the op if gradients are recorded; it gets no sequence number."""
    _, codes, scales, idx, w = inputs()
    args = {"codes": codes, "scales": scales, "topk_weights": w}
    args[which] = args[which].detach().requires_grad_()

    def call() -> Any:
        given = args["codes"], args["scales"]
        if through == "buffer":
            return buffer.dispatch(given, idx, args["topk_weights"])[0]
        return torch.ops.moe_rt.dispatch_scaled(*given, idx, args["topk_weights"], buffer._engine.id, 0)

    with pytest.raises(InvalidInput, match="x: got codes, or coded=True, in a dispatch that gradients are recorded of"):
        call()
    with torch.no_grad():
        assert call()[0].dtype is FP8


def test_a_graph_refuses_what_the_buffer_cannot_code() -> None:
    """A graph refuses when it runs, on every rank; its fake accepts any buffer."""
    x, _, _, idx, w = inputs()
    with open_buffer() as buffer:
        torch._dynamo.reset()
        compiled = torch.compile(pair, fullgraph=True, backend="aot_eager")
        with pytest.raises(InvalidInput, match="coded: got True without scales"):
            compiled(buffer, x, idx, w, T, True)
