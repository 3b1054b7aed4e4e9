"""The shared expert: an MLP that every token visits, on its own rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.kernels.activations import apply
from moe_rt.nn.experts import ExpertsConfig


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
        """Compute x [T, H] -> [T, H] in x's dtype, like the other experts, even under autocast; parameters are cast."""
        c = self.config
        with torch.autocast(x.device.type, enabled=False):
            up = F.linear(x, self.up_proj.weight.to(x.dtype))
            gate = None if self.gate_proj is None else F.linear(x, self.gate_proj.weight.to(x.dtype))
            first, second = (up, None) if gate is None else (gate, up)
            h = apply(c.activation, first, second, alpha=c.swiglu_alpha, limit=c.swiglu_limit)
            out = F.linear(h, self.down_proj.weight.to(x.dtype))
            if self.output_gate is not None:
                out = out * F.linear(x, self.output_gate.weight.to(x.dtype)).sigmoid()
            return out
