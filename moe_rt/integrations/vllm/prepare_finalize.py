"""vLLM's prepare-and-finalize interface, implemented by one dispatch and one combine."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import (
    FusedMoEActivationFormat,
    FusedMoEExperts,
    FusedMoEPrepareAndFinalizeModular,
    PrepareResultType,
    TopKWeightAndReduce,
)

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.integrations.vllm import PLUGIN


class MoeRtPrepareAndFinalize(FusedMoEPrepareAndFinalizeModular):  # type: ignore[misc]
    """Sends tokens to the ranks of their experts, and returns the experts' rows, weighted and summed.

    Experts get one row for each (token, local expert), in the order expert, source rank, token, with K = 1, the
    expert's local id and weight 1; combine applies the router's weights in fp32.

    Args:
        buffer: buffer of the ranks that share the experts.
    """

    def __init__(self, buffer: Buffer) -> None:
        super().__init__()
        self._buffer, self._tag = buffer, buffer.new_tag()
        self._sent: tuple[Tensor | None, Handle] | None = None  # set between prepare and finalize
        self._row_numbers, self._ones = torch.empty(0, 1, dtype=torch.int32), torch.empty(0, 1)

    @property
    def activation_format(self) -> FusedMoEActivationFormat:
        """Standard: the rows of all experts in one tensor."""
        return FusedMoEActivationFormat.Standard

    def max_num_tokens_per_rank(self) -> int | None:
        """Return None: rows are not batched by expert."""
        return None

    def topk_indices_dtype(self) -> torch.dtype | None:
        """Return the dtype of the router's expert ids."""
        return torch.int64

    def num_dispatchers(self) -> int:
        """Return the number of ranks that send."""
        return self._buffer.num_ranks

    def output_is_reduced(self) -> bool:
        """Return True: combine sums over all ranks."""
        return True

    def post_init_setup(self, fused_experts: FusedMoEExperts) -> None:
        """Raise InvalidConfig if the experts need tokens quantised in a way that dispatch cannot send."""
        quantised = fused_experts.quant_config.quant_dtype
        as_they_are = quantised is None or fused_experts.expects_unquantized_inputs
        if not as_they_are and not self.sends(fused_experts.quant_config):
            experts = f"experts {type(fused_experts).__name__} whose tokens travel as {quantised}"
            raise PLUGIN.unserved(experts, "experts that take them as they are")

    def sends(self, quant_config: FusedMoEQuantConfig) -> bool:
        """True if dispatch can send tokens quantised with this config; always False on CPUs."""
        return False

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: Any,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        """Dispatch a1 [T, H], topk_weights and topk_ids [T, K] -> rows [N, H], local ids int32 [N, 1], ones [N, 1]."""
        if apply_router_weight_on_input:  # only models with K = 1
            a1, topk_weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(topk_weights)
        recv_x, recv_weights, handle = self._buffer.dispatch(a1, topk_ids, topk_weights, tag=self._tag)
        self._sent = recv_weights, handle
        # CPU ranks have waited for the rows anyway. Few torch ops are called, because each costs time in small steps.
        num_rows = handle.offs.tolist()[-1]
        if len(self._ones) < num_rows:
            self._row_numbers, self._ones = torch.arange(num_rows, dtype=torch.int32)[:, None], torch.ones(num_rows, 1)
        rows, ones = self._row_numbers.narrow(0, 0, num_rows), self._ones.narrow(0, 0, num_rows)
        experts = torch.searchsorted(handle.offs, rows, right=True, out_int32=True)
        return recv_x.narrow(0, 0, num_rows), None, None, experts, ones

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        """Combine fused_expert_output [N, H], or [N, 1, H] if experts do not sum over K = 1 -> output [T, H]."""
        y = fused_expert_output
        self._send_home(y if y.dim() == 2 else y.flatten(0, 1), output)

    def _send_home(self, y: Tensor, output: Tensor) -> None:
        """Combine y [N, H], the experts' outputs for the rows of the last prepare, into output [T, H]."""
        assert self._sent is not None
        (recv_weights, handle), self._sent = self._sent, None
        if output.is_contiguous():
            self._buffer.combine(y, recv_weights, handle, out=output)
        else:  # it has the strides of the layer's input
            output.copy_(self._buffer.combine(y, recv_weights, handle))
