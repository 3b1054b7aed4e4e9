"""Experts and shared experts on one rank: names and shapes, casts, formulas by hand, resets and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from layer.cases_kinds import KINDS, dense_expert, name_of
from torch import Tensor, nn

from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.nn import experts
from moe_rt.nn.chunks import half_way
from moe_rt.nn.experts import Experts, ExpertsConfig, SharedExpert, SwiGLUExperts, expert_mlp
from moe_rt.nn.overlap import late_weights, weights_of
from moe_rt.ops.late_weights import LateWeights

H, W = 8, 4
OFFS = torch.tensor([3, 3, 7], dtype=torch.int32)


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


SHAPES: dict[tuple[str, bool], dict[str, tuple[int, ...]]] = {
    ("hf", True): {"gate_up_proj": (3, 2 * W, H), "down_proj": (3, H, W)},
    ("hf", False): {"up_proj": (3, W, H), "down_proj": (3, H, W)},
    ("transposed", True): {"gate_up_proj": (3, H, 2 * W), "down_proj": (3, W, H)},
    ("transposed", False): {"up_proj": (3, H, W), "down_proj": (3, W, H)},
    ("split", True): {"w1": (3, W, H), "w3": (3, W, H), "w2": (3, H, W)},
    ("split", False): {"w1": (3, W, H), "w2": (3, H, W)},
}


@pytest.mark.parametrize(("layout", "gated"), SHAPES)
def test_names_and_shapes(layout: Any, gated: bool) -> None:
    """A bias follows its weight, and has the width of the layer's output."""
    expected = SHAPES[layout, gated]
    activation: Any = "geglu" if gated else "relu2"
    plain = ExpertsConfig(activation=activation, weight_layout=layout)
    assert list(plain.shapes(3, H, W).items()) == list(expected.items())
    assert plain.gated is gated
    outputs = {name: H if name in ("down_proj", "w2") else 2 * W if "gate" in name else W for name in expected}
    biased = ExpertsConfig(activation=activation, weight_layout=layout, biases=True)
    with_biases = [each for name in expected for each in ((name, expected[name]), (f"{name}_bias", (3, outputs[name])))]
    assert list(biased.shapes(3, H, W).items()) == with_biases
    module = Experts(3, H, W, biased, dtype=torch.bfloat16)
    assert [(name, p.shape) for name, p in module.named_parameters()] == with_biases
    assert {p.dtype for p in module.parameters()} == {module.dtype} == {torch.bfloat16}
    assert {p.device.type for p in Experts(3, H, W, biased, device="meta").parameters()} == {"meta"}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["hf", "transposed", "split"])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "geglu_tanh", "relu2", "clamped_swiglu"])
def test_which_experts_have_a_kernel(activation: Any, layout: Any, interleaved: bool) -> None:
    """Only SwiGLU over one tensor with all of gate before up; without a gate next to up nothing can alternate."""
    if interleaved and (layout == "split" or activation == "relu2"):
        with pytest.raises(InvalidConfig, match=r"^interleaved: got True, expected False with weight_layout="):
            ExpertsConfig(activation=activation, weight_layout=layout, interleaved=True)
        return
    config = ExpertsConfig(activation=activation, weight_layout=layout, interleaved=interleaved)
    assert config.has_kernel == (activation == "swiglu" and layout != "split" and not interleaved)


def test_experts_by_default() -> None:
    config = ExpertsConfig()
    assert (config.activation, config.weight_layout, config.biases, config.interleaved) == (
        "swiglu",
        "hf",
        False,
        False,
    )
    assert (config.swiglu_alpha, config.swiglu_limit) == (1.702, 7.0)
    with pytest.raises(InvalidConfig, match=r"^interleaved: got True"):
        ExpertsConfig(activation="relu2", interleaved=True, swiglu_limit=0.0)


def test_limits_are_above_zero() -> None:
    assert ExpertsConfig(swiglu_limit=1e-9).swiglu_limit == 1e-9
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidConfig, match=r"^swiglu_limit: got .*, expected a number > 0"):
            ExpertsConfig(swiglu_limit=wrong)


@pytest.mark.parametrize("config", KINDS, ids=name_of)
def test_weights_are_cast_to_the_dtype_of_rows(config: ExpertsConfig) -> None:
    """Values are those of cast weights, and gradients have the weights' own dtype."""
    weights = {name: drawn(*shape, seed=i) for i, (name, shape) in enumerate(config.shapes(3, H, W).items())}
    for dtype in (torch.bfloat16, torch.float64):
        x = drawn(7, H, dtype=dtype)
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        y = expert_mlp(x, OFFS, leaves, config)
        assert y.dtype is dtype
        check_bits("y", y, expert_mlp(x, OFFS, {name: w.to(dtype) for name, w in weights.items()}, config))
        y.sum().backward()
        assert {w.grad.dtype for w in leaves.values() if w.grad is not None} == {torch.float32}
        assert all(w.grad is not None for w in leaves.values())
        parts = x.split([3, 0, 4])
        dense = [
            dense_expert(rows, {n: w[e].to(dtype) for n, w in weights.items()}, config) for e, rows in enumerate(parts)
        ]
        close = dict(rtol=0.1, atol=0.5) if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(y, torch.cat(dense), **close)


def test_products_are_of_all_rows_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products row by row take longer: only `sums="invariant"` asks for them."""
    seen: list[bool] = []
    multiply = experts.grouped_linear

    def noted(*given: Any, row_wise: bool, **named: Any) -> torch.Tensor:
        seen.append(row_wise)
        return multiply(*given, row_wise=row_wise, **named)

    monkeypatch.setattr(experts, "grouped_linear", noted)
    module = Experts(3, H, W, ExpertsConfig())
    module(drawn(7, H), OFFS)
    expert_mlp(drawn(7, H), OFFS, dict(module.named_parameters()), module.config)
    assert seen == [False] * 4


@pytest.mark.parametrize("row_wise", [False, True])
def test_experts_take_their_config_to_the_product(row_wise: bool) -> None:
    """A module's forward is expert_mlp of its parts, with its own way of products."""
    module = Experts(
        3, H, 64, ExpertsConfig(biases=True, activation="clamped_swiglu", swiglu_alpha=1.1, swiglu_limit=0.4)
    )
    for local in range(3):
        module.reset_expert(local, torch.Generator().manual_seed(local))
    module.row_wise, x = row_wise, drawn(7, H)
    weights = dict(module.named_parameters())
    check_bits("y", module(x, OFFS), expert_mlp(x, OFFS, weights, module.config, row_wise=row_wise))
    alone = expert_mlp(x[3:4], torch.tensor([0, 0, 1], dtype=torch.int32), weights, module.config, row_wise=True)
    if row_wise:
        check_bits("a row alone", module(x, OFFS)[3:4], alone)


def test_late_weights_are_of_one_forward() -> None:
    """Within one forward a module's weights are made once for each dtype; outside of it, each time."""
    one, other = SwiGLUExperts(3, H, W), SwiGLUExperts(3, H, W)
    assert late_weights() is None
    assert one.weights(torch.float32) is not one.weights(torch.float32)
    late = LateWeights()
    with weights_of(late):
        assert late_weights() is late
        made = [module.weights(dtype) for module in (one, other) for dtype in (torch.float32, torch.bfloat16)]
        assert [module.weights(d) for module in (one, other) for d in (torch.float32, torch.bfloat16)] == made
        assert len({id(weights) for weights in made}) == 4
        assert [weights["down_proj"].dtype for weights in made] == [torch.float32, torch.bfloat16] * 2
    assert late_weights() is None
    with pytest.raises(ValueError, match="on purpose"), weights_of(late):
        raise ValueError("a mistake on purpose")
    assert late_weights() is None
    half_way()  # nothing is under way


def test_a_module_of_the_default_kind() -> None:
    module = SwiGLUExperts(2, H, W, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    assert module.config == Experts(2, H, W).config == ExpertsConfig()


def test_a_reset_of_sharded_experts_is_refused() -> None:
    module = SwiGLUExperts(2, H, W)
    module.down_proj = nn.Parameter(torch.zeros(2, H, W - 1))
    before = module.gate_up_proj.detach().clone()
    with pytest.raises(
        InvalidConfig, match=r"^experts\.down_proj: got \(2, 8, 3\) on this rank, expected \(2, 8, 4\);"
    ):
        module.reset_expert(0, None)
    assert module.gate_up_proj.shape == before.shape


def test_a_reset_is_of_one_expert() -> None:
    module = Experts(2, H, W, ExpertsConfig(biases=True))
    for p in module.parameters():
        nn.init.ones_(p)
    module.reset_expert(1, torch.Generator().manual_seed(0))
    for name, p in module.named_parameters():
        assert bool((p[0] == 1).all())
        assert bool((p[1] == 0).all()) == name.endswith("_bias")
    again = Experts(2, H, W, ExpertsConfig(biases=True))
    again.reset_expert(0, torch.Generator().manual_seed(0))
    assert torch.equal(again.gate_up_proj[0], module.gate_up_proj[1])
    torch.manual_seed(1)
    again.reset_expert(0, None)
    first = again.gate_up_proj[0].clone()
    again.reset_expert(0, None)
    assert not torch.equal(again.gate_up_proj[0], first), "without a generator torch's own draws"


@pytest.mark.parametrize(
    ("biases", "change", "text"),
    [
        (False, {"down_proj": None}, r"^weights: got \['gate_up_proj'\], expected also \['down_proj'\]"),
        (
            False,
            {"gate_up_proj": torch.ones(3, 2 * W, H + 1)},
            r"^gate_up_proj: got shape \[3, 8, 9\], expected \[3, 8, 8\]",
        ),
        (False, {"down_proj": torch.ones(3, H + 1, W)}, r"^down_proj: got shape \[3, 9, 4\], expected \[3, 8, 4\]"),
        (False, {"down_proj": torch.ones(2, H, W)}, r"^down_proj: got shape \[2, 8, 4\], expected \[3, 8, 4\]"),
        (True, {}, r"^gate_up_proj_bias: got shape \[\], expected \[3, 8\]"),
    ],
)
def test_weights_that_do_not_fit(biases: bool, change: dict[str, Any], text: str) -> None:
    given = {"gate_up_proj": torch.ones(3, 2 * W, H), "down_proj": torch.ones(3, H, W)} | change
    with pytest.raises(InvalidInput, match=text):
        expert_mlp(
            torch.ones(7, H), OFFS, {n: t for n, t in given.items() if t is not None}, ExpertsConfig(biases=biases)
        )


@pytest.mark.parametrize("gated_output", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu2", "clamped_swiglu"])
@pytest.mark.parametrize("row_wise", [False, True])
def test_a_shared_expert_by_hand(activation: Any, gated_output: bool, row_wise: bool) -> None:
    """It has no biases, and computes in the dtype of its input, whatever autocast says."""
    config = ExpertsConfig(activation=activation, swiglu_alpha=1.1, swiglu_limit=0.3)
    module = SharedExpert(H, W, config, gated_output=gated_output)
    module.reset_parameters()
    module.row_wise = row_wise
    names = ["up_proj", "down_proj"] + ["output_gate"] * gated_output
    names = names if activation == "relu2" else ["gate_proj", *names]
    assert [name for name, _ in module.named_parameters()] == [f"{name}.weight" for name in names]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = drawn(2, 5, H, dtype=dtype)
        w = {name.split(".")[0]: p.detach().to(dtype) for name, p in module.named_parameters()}
        up = F.linear(x, w["up_proj"])
        if activation == "relu2":
            h = up.relu().square()
        else:
            gate = F.linear(x, w["gate_proj"])
            h = {
                "swiglu": lambda gate, up: F.silu(gate) * up,
                "geglu": lambda gate, up: F.gelu(gate) * up,
                "clamped_swiglu": lambda gate, up: (
                    gate.clamp(max=0.3) * torch.sigmoid(1.1 * gate.clamp(max=0.3)) * (up.clamp(-0.3, 0.3) + 1)
                ),
            }[activation](gate, up)
        expected = F.linear(h, w["down_proj"])
        expected = expected * F.linear(x, w["output_gate"]).sigmoid() if gated_output else expected
        y = module(x)
        close = dict(rtol=0.05, atol=0.05) if dtype is torch.bfloat16 else {}
        torch.testing.assert_close(y, expected, **close)
        with torch.autocast("cpu", torch.bfloat16):
            check_bits("autocast", module(x), y)
    assert {p.device.type for p in SharedExpert(H, W, config, device="meta", gated_output=True).parameters()} == {
        "meta"
    }


def test_a_shared_expert_is_drawn_by_its_fan_in() -> None:
    module = SharedExpert(64, 1024, ExpertsConfig(), gated_output=True)
    module.reset_parameters()
    for name, p in module.named_parameters():
        fan_in = 1024 if name.startswith("down") else 64
        assert float(p.detach().std()) == pytest.approx(fan_in**-0.5, rel=0.05 if p.numel() > 64 else 0.5), name
