"""Prepare and finalize for GPUs: experts get one row for each token of their rank, in constant shapes.

The host reads no value from the device, so vLLM can capture a step as a CUDA graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import PrepareResultType, TopKWeightAndReduce
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from vllm.model_executor.layers.fused_moe.utils import moe_kernel_quantize_input

from moe_rt.buffer.buffer import Buffer
from moe_rt.integrations.vllm.prepare_finalize import MoeRtPrepareAndFinalize


class TokenRowsPrepareAndFinalize(MoeRtPrepareAndFinalize):
    """Sends each token once to every rank of its experts, and returns each rank's weighted sums.

    Rows are in the order source rank, token, and their number is the capacity. Entries of unused rows, and entries for
    experts of other ranks, have the id of an expert of another rank, which vLLM's experts skip.

    Args:
        buffer: buffer of the ranks that share the experts, with layout="tokens".
    """

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        ranks = torch.tensor(buffer.spec.placement.ranks)
        here = (ranks == buffer.rank).nonzero()[:, 0]
        elsewhere = (ranks != buffer.rank).nonzero()[:1, 0]
        # vLLM uses global expert ids. Index -1 selects the last entry, an expert of another rank.
        self._numbers = torch.cat([here, elsewhere]).to(buffer.device)

    def sends(self, quant_config: FusedMoEQuantConfig) -> bool:
        """True for fp8 with scales per block or token, which travel with the codes; a scale per batch cannot."""
        with_rows = quant_config.is_block_quantized or quant_config.per_act_token_quant
        return bool(with_rows and quant_config.quant_dtype == torch.float8_e4m3fn)

    def prepare(
        self,
        a1: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        num_experts: int,
        expert_map: Tensor | None,
        apply_router_weight_on_input: bool,
        quant_config: FusedMoEQuantConfig,
        defer_input_quant: bool = False,
    ) -> PrepareResultType:
        """Dispatch a1 [T, H], topk_weights and topk_ids [T, K] -> rows [N, H], ids int64 and weights [N, K].

        N is the capacity, not the number of received rows. If experts take fp8 and do not quantise themselves, rows are
        codes and are returned with their scales [N, S].
        """
        if apply_router_weight_on_input:  # only models with K = 1
            a1, topk_weights = a1 * topk_weights.to(a1.dtype), torch.ones_like(topk_weights)
        x: Tensor | tuple[Tensor, Tensor] = a1
        if self.sends(quant_config) and not defer_input_quant:
            x = moe_kernel_quantize_input(
                a1,
                quant_config.a1_scale,
                quant_dtype=quant_config.quant_dtype,
                per_act_token_quant=quant_config.per_act_token_quant,
                block_shape=quant_config.block_shape,
            )
        received, recv_weights, handle = self._buffer.dispatch(
            x, topk_ids, topk_weights, tag=self._tag, max_tokens=most_tokens()
        )
        recv_x, recv_scales = received if isinstance(received, tuple) else (received, None)
        self._sent = None, handle
        local = handle.recv_topk_idx
        assert local is not None
        came = torch.arange(len(recv_x), dtype=torch.int32, device=local.device) < handle.offs[-1]
        return recv_x, recv_scales, None, self._numbers[torch.where(came[:, None], local, -1)], recv_weights

    def finalize(
        self,
        output: Tensor,
        fused_expert_output: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> None:
        """Combine fused_expert_output [N, H], or the input of weight_and_reduce_impl -> output [T, H].

        Args:
            topk_weights, topk_ids: [N, K], as returned by prepare.
        """
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        y = weight_and_reduce_impl.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )
        self._send_home(y, output)


def most_tokens() -> int | None:
    """Return the largest token count of any rank in this step, which vLLM shares between hosts; None if unknown."""
    metadata = get_forward_context().dp_metadata if is_forward_context_available() else None
    return None if metadata is None else int(metadata.num_tokens_across_dp_cpu.max())
