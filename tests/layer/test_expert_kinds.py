"""Experts of every kind and layout: equal to plain dense loops, over real rows only, without copies of weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layer.cases_kinds import KINDS, dense_expert, name_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_rt import MoEConfig
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.nn.experts import Experts, ExpertsConfig, SwiGLUExperts, expert_mlp
from moe_rt.ops import activations, grouped

H, F, ROWS = 16, 8, 13
SPREADS = [[4, 0, 5], [0, 0, 0], [0, 13, 0]]
kinds = pytest.mark.parametrize("config", KINDS, ids=name_of)


def make_weights(config: ExpertsConfig, dtype: torch.dtype, num_local: int = 3, h: int = H, f: int = F) -> Any:
    g = torch.Generator().manual_seed(0)
    shapes = config.shapes(num_local, h, f).items()
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for n, s in shapes}


def offs_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def poisoned_rows(dtype: torch.dtype, real: int, h: int = H) -> Tensor:
    """Return random rows; rows past the real ones are NaN."""
    rows = torch.randn(ROWS, h, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    rows[real:] = float("nan")
    return rows


def dense_loop(x: Tensor, sizes: list[int], weights: dict[str, Tensor], config: ExpertsConfig) -> Tensor:
    parts = x[: sum(sizes)].split(sizes)
    return torch.cat([dense_expert(p, {n: w[e] for n, w in weights.items()}, config) for e, p in enumerate(parts)])


@pytest.fixture
def poisoned_memory() -> Any:
    """Fill every fresh tensor with NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


class Instead(TorchDispatchMode):
    """Runs other functions instead of moe_rt's ops of these names."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.functions = functions

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("moe_rt::")
        return self.functions.get(name, func)(*args, **(kwargs or {}))


@kinds
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_equals_a_dense_loop(config: ExpertsConfig, sizes: list[int], dtype: torch.dtype) -> None:
    """Forward and gradients equal a loop; rows past the end are NaN in x, in the gradient and in unwritten memory."""
    weights, n = make_weights(config, dtype), sum(sizes)
    x = poisoned_rows(dtype, n).requires_grad_()
    out = expert_mlp(x, offs_of(sizes), weights, config)
    expected = dense_loop(x, sizes, weights, config)
    close = dict(rtol=1e-4, atol=1e-4) if dtype is torch.float32 else {}
    torch.testing.assert_close(out[:n], expected, **close)
    assert out.isnan()[n:].all(), "a row past the end was written"
    grad = poisoned_rows(dtype, n)
    got = torch.autograd.grad(out, [x, *weights.values()], grad)
    want = torch.autograd.grad(expected, [x, *weights.values()], grad[:n], materialize_grads=True)
    torch.testing.assert_close(got[0][:n], want[0][:n], **close)
    for name, g, w in zip(weights, got[1:], want[1:], strict=True):
        torch.testing.assert_close(g, w, msg=lambda text, name=name: f"{name}: {text}", **close)


@kinds
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
def test_gpu_formulas_are_the_same(config: ExpertsConfig, sizes: list[int]) -> None:
    """The formulas that CUDA runs over all rows agree: NaN past the end reaches no real row or weight gradient."""
    weights, n, offs = make_weights(config, torch.float64), sum(sizes), offs_of(sizes)
    x, grad = poisoned_rows(torch.float64, n).requires_grad_(), poisoned_rows(torch.float64, n)
    results = []
    for suffix in ("", "_on_gpu"):
        functions = {
            "grouped_mm": getattr(grouped, f"_grouped_mm{suffix}"),
            "grouped_add": getattr(grouped, f"_grouped_add{suffix}"),
            "activate": getattr(activations, f"_activate{suffix}"),
            "activate_backward": getattr(activations, f"_activate_backward{suffix}"),
        }
        with Instead(functions):
            out = expert_mlp(x, offs, weights, config)
            grads = torch.autograd.grad(out, [x, *weights.values()], grad)
        results.append([out[:n], grads[0][:n], *grads[1:]])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
        assert one.isfinite().all()


@kinds
def test_gradcheck(config: ExpertsConfig) -> None:
    weights, offs = make_weights(config, torch.float64, 2, 4, 3), offs_of([2, 3])
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()

    def call(x: Tensor, *values: Tensor) -> Tensor:
        return expert_mlp(x, offs, dict(zip(weights, values, strict=True)), config)

    assert torch.autograd.gradcheck(call, (x, *weights.values()))


@kinds
def test_bf16_rounds_little(config: ExpertsConfig) -> None:
    """Activations compute in fp32, so results are within a few units of the last place of an fp64 loop."""
    weights, sizes = make_weights(config, torch.bfloat16), [4, 0, 5]
    x = poisoned_rows(torch.bfloat16, 9)
    out = expert_mlp(x, offs_of(sizes), weights, config)
    assert out.dtype is torch.bfloat16
    exact = dense_loop(x.double(), sizes, {n: w.double() for n, w in weights.items()}, config)
    error = (out[:9].double() - exact).abs().max() / exact.abs().max()
    assert error < 2e-2


@pytest.mark.parametrize("kind", ["swiglu", "geglu", "geglu_tanh", "relu2", "clamped_swiglu"])
def test_activations_round_once(kind: Any) -> None:
    generator = torch.Generator().manual_seed(7)
    h = [4 * torch.randn(6, 16, generator=generator).bfloat16() for _ in range(1 if kind == "relu2" else 2)]
    gate, up = h[0].float(), h[1].float() if len(h) == 2 else None
    assert torch.equal(activations.activate(h, offs_of([6]), kind), activations.apply(kind, gate, up).bfloat16())


@pytest.mark.parametrize("kind", ["geglu", "relu2", "clamped_swiglu"])
@pytest.mark.usefixtures("poisoned_memory")
def test_activations_write_no_row_past_the_end(kind: Any) -> None:
    h, offs = [torch.ones(9, 16) for _ in range(1 if kind == "relu2" else 2)], offs_of([3, 1])
    out = activations.activate(h, offs, kind)
    grads = torch.ops.moe_rt.activate_backward(torch.ones(9, 16), h, offs, kind, False, 1.702, 7.0)
    for t in (out, *grads):
        assert t[:4].isfinite().all()
        assert t[4:].isnan().all()


@pytest.mark.parametrize(
    ("kind", "interleaved", "num_inputs"),
    [
        *itertools.product(("swiglu", "geglu", "geglu_tanh", "clamped_swiglu"), (False,), (1, 2)),
        ("clamped_swiglu", True, 1),
        ("relu2", False, 1),
    ],
)
def test_opcheck(kind: Any, interleaved: bool, num_inputs: int) -> None:
    """Schema, autograd, fakes and dynamic shapes pass opcheck; all rows are real, so values can be compared."""
    offs = offs_of([3, 4])
    h = [torch.randn(7, 6, dtype=torch.float64, requires_grad=True) for _ in range(num_inputs)]
    args = (offs, kind, interleaved, 1.702, 7.0)
    torch.library.opcheck(torch.ops.moe_rt.activate, (h, *args))
    out = torch.ops.moe_rt.activate(h, *args)
    detached = [t.detach() for t in h]
    torch.library.opcheck(torch.ops.moe_rt.activate_backward, (torch.randn_like(out), detached, *args))


def test_opcheck_of_bias_and_both_ways_of_a_weight() -> None:
    offs, rows = offs_of([3, 4]), torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(torch.ops.moe_rt.grouped_add, (rows, bias, offs))
    for weight in (torch.randn(2, 6, 4, dtype=torch.float64), torch.randn(2, 4, 6, dtype=torch.float64).mT):
        torch.library.opcheck(torch.ops.moe_rt.grouped_mm, (rows, weight.requires_grad_(), offs))


class Copies(TorchDispatchMode):
    """Records the shapes of copies, and lets every op run."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[torch.Size] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.name().split("::")[1].split(".")[0] in ("clone", "_to_copy", "copy_", "cat", "stack"):
            self.shapes.append(out.shape)
        return out


@kinds
def test_no_weight_is_copied(config: ExpertsConfig) -> None:
    """Neither a weight nor its gradient is copied, and gradients have the parameter's strides. Biases are copied."""
    experts = Experts(3, H, F, config)
    for local in range(3):
        experts.reset_expert(local, torch.Generator().manual_seed(local))
    x, offs = torch.randn(9, H, requires_grad=True), offs_of([4, 0, 5])
    with Copies() as copies:
        out = experts(x, offs)
        out.backward(torch.ones_like(out))
    assert {(len(shape), shape[0]) for shape in copies.shapes} <= {(2, 3)}
    for name, p in experts.named_parameters():
        assert p.grad is not None
        assert p.grad.stride() == p.stride(), name


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_traces_with_fake_cuda_tensors(config: ExpertsConfig, dtype: torch.dtype) -> None:
    """No value is read from the device: fake tensors have none, and a read would raise."""
    with FakeTensorMode():
        offs = torch.empty(3, dtype=torch.int32, device="cuda")
        weights = {n: torch.empty(s, dtype=dtype, device="cuda") for n, s in config.shapes(3, H, F).items()}
        out = expert_mlp(torch.empty(ROWS, H, dtype=dtype, device="cuda"), offs, weights, config)
        assert (out.shape, out.device.type, out.dtype) == ((ROWS, H), "cuda", dtype)
        inputs = [torch.empty(ROWS, F, dtype=dtype, device="cuda") for _ in range(1 if not config.gated else 2)]
        args = (offs, config.activation, False, 1.0, 1.0)
        back = torch.ops.moe_rt.activate_backward(inputs[0], inputs, *args)
        assert [(t.shape, t.device.type, t.dtype) for t in back] == [((ROWS, F), "cuda", dtype)] * len(inputs)


def test_default_experts_are_swiglu() -> None:
    assert [n for n, _ in SwiGLUExperts(2, H, F).named_parameters()] == ["gate_up_proj", "down_proj"]
    assert {c.has_kernel for c in KINDS if c.activation != "swiglu"} == {False}
    assert [c.weight_layout for c in KINDS if c.has_kernel] == ["hf", "hf", "transposed", "transposed"]


def test_draws_follow_the_fan_in() -> None:
    """Weights are drawn from N(0, 1 / fan-in) in every layout, and biases are zero."""
    for layout, act in itertools.product(("hf", "transposed", "split"), ("swiglu", "relu2")):
        experts = Experts(1, 64, 256, ExpertsConfig(weight_layout=layout, activation=act, biases=True))  # type: ignore[arg-type]
        experts.reset_expert(0, torch.Generator().manual_seed(0))
        for name, p in experts.named_parameters():
            fan_in = 0.0 if name.endswith("_bias") else (256 if name in ("w2", "down_proj") else 64) ** -0.5
            assert abs(float(p.detach().std()) - fan_in) <= 0.03 * fan_in, (layout, name)


def test_wrong_weights_are_refused() -> None:
    config, offs, x = ExpertsConfig(biases=True), offs_of([2, 1, 1]), torch.randn(4, H)
    weights = make_weights(config, torch.float32)
    with pytest.raises(InvalidInput, match=r"gate_up_proj: got shape \[3, 16, 16\], expected \[4, 16, 16\]"):
        expert_mlp(x, offs_of([2, 1, 1, 0]), weights, config)
    with pytest.raises(InvalidInput, match=r"down_proj_bias: got shape \[3, 8\], expected \[3, 16\]"):
        expert_mlp(x, offs, {**weights, "down_proj_bias": torch.randn(3, 8)}, config)
    with pytest.raises(InvalidInput, match=r"expected also \['w1', 'w3', 'w2'\]"):
        expert_mlp(x, offs, weights, ExpertsConfig(weight_layout="split"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "tanh"}, 'activation: got "tanh", expected one of swiglu, geglu'),
        ({"weight_layout": "megatron"}, 'weight_layout: got "megatron", expected one of hf, transposed, split'),
        (
            {"interleaved": True, "weight_layout": "split"},
            'interleaved: got True, expected False with weight_layout="split"',
        ),
        ({"interleaved": True, "activation": "relu2"}, "interleaved: got True"),
        ({"swiglu_limit": 0.0}, "swiglu_limit: got 0.0"),
        ({"shared_intermediate": 0}, "shared_intermediate: got 0, expected a positive integer"),
        ({"shared_gate": True}, "shared_gate: got True, expected False without shared_intermediate"),
        ({"num_groups": 3}, "num_groups: got 3"),
    ],
)
def test_nonsense_is_refused(changes: dict[str, Any], message: str) -> None:
    sizes: dict[str, Any] = dict(hidden=8, intermediate=4, num_experts=8, num_topk=2, num_max_tokens_per_rank=4)
    with pytest.raises(InvalidConfig, match=message):
        MoEConfig(**sizes, **changes)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["plain", "row-wise", "tiled", "a bias", "a bias on a GPU"])
@pytest.mark.parametrize("sizes", SPREADS, ids=str)
def test_rows_past_the_end_are_zero_in_anomaly_mode(dtype: torch.dtype, how: str, sizes: list[int]) -> None:
    offs, real = offs_of(sizes), sum(sizes)
    x, weight = poisoned_rows(dtype, real), torch.randn(3, F, H).to(dtype)
    with torch.autograd.detect_anomaly(check_nan=False):
        if how == "tiled":
            y = grouped._tiled_mm(x, weight.transpose(1, 2), offs)
        elif "bias" in how:
            add = grouped._grouped_add_on_gpu if "GPU" in how else grouped._grouped_add
            y = add(x, torch.randn(3, H).to(dtype), offs)
        else:
            y = grouped.grouped_linear(x, weight, offs, row_wise=how == "row-wise")
    assert not y[real:].any()
    assert y[:real].isfinite().all()
