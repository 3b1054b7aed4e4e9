"""The experts: linear layers and an activation, with the weight layouts of several frameworks.

`Experts` are this rank's experts, as grouped linear layers; `SharedExpert` is one that every token visits, on its rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.nn.chunks import half_way
from moe_rt.nn.overlap import late_weights
from moe_rt.nn.spread import SpreadModule
from moe_rt.ops.activations import Activation, activate, apply, swiglu
from moe_rt.ops.grouped import grouped_linear, row_wise_linear, row_wise_sigmoid

__all__ = ["Experts", "ExpertsConfig", "SharedExpert", "SwiGLUExperts", "expert_mlp", "grouped_linear", "swiglu"]

WeightLayout = Literal["hf", "transposed", "split"]


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Formula of an expert and layout of its weights; docs/howto/layer.md has the values of some models.

    Attributes:
        activation: see `moe_rt.ops.activations.activate`. All except "relu2" have a gate.
        weight_layout: names and shapes of the weights, for the L experts of this rank:
            "hf" (Transformers): gate_up_proj [L, 2F, H], or up_proj [L, F, H] without a gate; down_proj [L, H, F].
            "transposed" (GPT-OSS in Transformers): gate_up_proj [L, H, 2F] or up_proj [L, H, F]; down_proj [L, F, H].
            "split" (torchtitan): w1 (gate) and w3 (up) [L, F, H], or only w1 without a gate; w2 [L, H, F].
        biases: every linear layer has one, named after its weight: `gate_up_proj_bias` [L, 2F] and so on.
        interleaved: gate and up alternate in gate_up_proj, gate first, instead of all of gate before up (GPT-OSS).
        swiglu_alpha, swiglu_limit: constants of "clamped_swiglu".

    Raises:
        InvalidConfig: a value is invalid; names the field, what was got and what was expected.
    """

    activation: Activation = "swiglu"
    weight_layout: WeightLayout = "hf"
    biases: bool = False
    interleaved: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0

    def __post_init__(self) -> None:
        for field, kind in (("activation", Activation), ("weight_layout", WeightLayout)):
            got = getattr(self, field)
            if got not in get_args(kind):
                raise InvalidConfig(f'{field}: got "{got}", expected one of {", ".join(get_args(kind))}')
        if self.interleaved and (self.weight_layout == "split" or not self.gated):
            got = f'weight_layout="{self.weight_layout}" and activation="{self.activation}"'
            raise InvalidConfig(f"interleaved: got True, expected False with {got}, which have no gate next to up")
        if not self.swiglu_limit > 0:
            raise InvalidConfig(f"swiglu_limit: got {self.swiglu_limit}, expected a number > 0")

    @property
    def gated(self) -> bool:
        return self.activation != "relu2"

    @property
    def has_kernel(self) -> bool:
        """True if GPU ranks run the activation in kernels that are compiled on first use."""
        return self.activation == "swiglu" and self.weight_layout != "split" and not self.interleaved

    @property
    def weight_names(self) -> tuple[list[str], str]:
        """Names of the weights applied to x, and of the weight that returns y."""
        if self.weight_layout == "split":
            return ["w1", "w3"] if self.gated else ["w1"], "w2"
        return ["gate_up_proj" if self.gated else "up_proj"], "down_proj"

    def shapes(self, num_local: int, hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter by name, layer by layer; a bias follows its weight."""
        inputs, down = self.weight_names
        width = intermediate * (2 if self.gated and self.weight_layout != "split" else 1)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, fan_out, fan_in in (*((name, width, hidden) for name in inputs), (down, hidden, intermediate)):
            matrix = (fan_in, fan_out) if self.weight_layout == "transposed" else (fan_out, fan_in)
            shapes[name] = (num_local, *matrix)
            if self.biases:
                shapes[f"{name}_bias"] = (num_local, fan_out)
        return shapes


def expert_mlp(
    x: Tensor, offs: Tensor, weights: Mapping[str, Tensor], config: ExpertsConfig, *, row_wise: bool = False
) -> Tensor:
    """Run every expert on its rows. Weights of another dtype are cast to x's dtype; other weights are not copied.

    Args:
        x: [rows, H] packed by expert.
        offs: int32 [L], inclusive ends of each expert's rows.
        weights: tensors by the names and with the shapes of config.shapes().
        row_wise: see `moe_rt.ops.grouped.grouped_linear`.

    Returns:
        [rows, H] in x's dtype; rows past offs[-1] are unspecified and do not affect any gradient.

    Raises:
        InvalidInput: a weight is missing or has another shape.
    """
    _check(x, offs, weights, config)
    late = late_weights()

    def linear(rows: Tensor, name: str) -> Tensor:
        bias = weights[f"{name}_bias"].to(x.dtype) if config.biases else None
        weight = weights[name].to(x.dtype)
        return grouped_linear(
            rows,
            weight,
            offs,
            bias,
            transposed=config.weight_layout == "transposed",
            row_wise=row_wise,
            multiply=None if late is None else partial(late.multiply, weight),
        )

    inputs, down = config.weight_names
    h = activate(
        [linear(x, name) for name in inputs],
        offs,
        config.activation,
        interleaved=config.interleaved,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
    )
    half_way()
    return linear(h, down)


class Experts(SpreadModule):
    """The L experts of this rank.

    The parameters are those of config.shapes(L, hidden, intermediate): slices of the global tensors, in local order.
    After `shard_over` they are DTensors, and `over_mesh` is True.

    Args:
        num_local, hidden, intermediate: L, H, F.
        config: activation and weight layout; None for the defaults of ExpertsConfig.
        device, dtype: device and dtype of the parameters.
    """

    # Parameters of the default weight layout; other layouts may lack these names.
    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter
    row_wise = False  # see `moe_rt.ops.grouped.grouped_linear`; a layer with sums="invariant" sets it

    def __init__(
        self,
        num_local: int,
        hidden: int,
        intermediate: int,
        config: ExpertsConfig | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.config = config or ExpertsConfig()
        self._shapes = self.config.shapes(num_local, hidden, intermediate)
        for name, shape in self._shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        weight: Tensor = getattr(self, self.config.weight_names[1])
        return weight.dtype

    @torch.no_grad()
    def reset_expert(self, local: int, generator: torch.Generator | None) -> None:
        """Draw the weights of one expert from N(0, 1 / fan-in), always on the CPU. Biases become zero.

        Raises:
            InvalidConfig: FSDP has sharded the parameters further, so this rank does not hold the whole expert.
        """
        weights = {name: self._part(name) for name in self._shapes}
        for name, shape in self._shapes.items():
            got = tuple(weights[name].shape)
            if got != shape:
                raise InvalidConfig(f"experts.{name}: got {got} on this rank, expected {shape}; reset before sharding")
            weight = weights[name][local]
            if weight.dim() == 1:
                weight.zero_()
                continue
            fan_in = weight.shape[0 if self.config.weight_layout == "transposed" else 1]
            drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
            weight.copy_(drawn.normal_(std=fan_in**-0.5, generator=generator))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Run the experts: x [rows, H] packed by expert, offs int32 [L] -> [rows, H] in x's dtype; see `expert_mlp`."""
        return expert_mlp(x, offs, self.weights(x.dtype), self.config, row_wise=self.row_wise)

    def weights(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the weights for rows of this dtype; within `weights_of` of one forward the same tensors each time."""
        late = late_weights()
        if late is None:
            return self.parts(*self._shapes)
        return late.made_once((self, dtype), partial(self._cast_parts, dtype))

    def _cast_parts(self, dtype: torch.dtype) -> dict[str, Tensor]:
        return {name: part.to(dtype) for name, part in self.parts(*self._shapes).items()}


class SwiGLUExperts(Experts):
    """down(silu(gate(x)) * up(x)) without biases: gate_up_proj [L, 2F, H] and down_proj [L, H, F]."""

    def __init__(self, num_local: int, hidden: int, intermediate: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(num_local, hidden, intermediate, ExpertsConfig(), device, dtype)


def _check(x: Tensor, offs: Tensor, weights: Mapping[str, Tensor], config: ExpertsConfig) -> None:
    inputs, down = config.weight_names
    missing = [name for name in (*inputs, down) if name not in weights]
    if missing:
        raise InvalidInput(f"weights: got {sorted(weights)}, expected also {missing}")
    intermediate = weights[down].shape[1 if config.weight_layout == "transposed" else -1]
    for name, expected in config.shapes(offs.shape[0], x.shape[1], intermediate).items():
        got = weights[name].shape if name in weights else ()
        if got != expected:
            raise InvalidInput(f"{name}: got shape {list(got)}, expected {list(expected)}")


class SharedExpert(nn.Module):
    """Computes down(act(gate(x), up(x))) without biases, times sigmoid(output_gate(x)) if `gated_output`.

    Several shared experts of one size equal one expert with the sum of their widths (DeepSeek-AI 2024, DeepSeekMoE,
    section 3.2). The output gate is that of Qwen2-MoE. Parameters have the names and shapes of Transformers'
    DeepseekV3MLP: gate_proj (absent without a gate) and up_proj [F, H], down_proj [H, F]; and output_gate [1, H].

    Args:
        hidden, intermediate: H, F.
        config: activation; see ExpertsConfig.
        gated_output: scale the output by a sigmoid gate.
        device: device of the parameters.
    """

    row_wise = False  # as in Experts

    def __init__(
        self, hidden: int, intermediate: int, config: ExpertsConfig, *, gated_output: bool = False, device: Any = None
    ) -> None:
        super().__init__()
        self.config = config
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, device=device) if config.gated else None
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, device=device)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, device=device)
        self.output_gate = nn.Linear(hidden, 1, bias=False, device=device) if gated_output else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights from N(0, 1 / fan-in), always on the CPU."""
        for weight in self.parameters():
            drawn = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
            weight.copy_(drawn.normal_(std=weight.shape[1] ** -0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Compute x [..., H] -> [..., H] in x's dtype, as other experts do, also under autocast; parameters are cast.

        With `row_wise`, gradients are summed as `moe_rt.ops.grouped.row_wise_linear` says.
        """
        c = self.config
        row_wise = self.row_wise and x.device.type == "cpu"
        linear, sigmoid = (row_wise_linear, row_wise_sigmoid) if row_wise else (_linear, torch.sigmoid)
        with torch.autocast(x.device.type, enabled=False):
            up = linear(x, self.up_proj.weight)
            gate = None if self.gate_proj is None else linear(x, self.gate_proj.weight)
            first, second = (up, None) if gate is None else (gate, up)
            h = apply(c.activation, first, second, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
            out = linear(h, self.down_proj.weight)
            if self.output_gate is not None:
                out = out * sigmoid(linear(x, self.output_gate.weight))
            return out


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype))
