"""What GPUs' experts get: a row for each token of a rank, with all of its experts there, in shapes that are constant.

Nothing here reads a value of the device, so that vLLM can capture a step as a CUDA graph.
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

from moe_rt.comm.buffer import Buffer
from moe_rt.integrations.vllm.prepare_finalize import MoeRtPrepareAndFinalize


class TokenRowsPrepareAndFinalize(MoeRtPrepareAndFinalize):
    """Tokens to the ranks of their experts, once per rank, and each rank's weighted sums back.

    Rows are in the order source rank, token. Their number is the most that could come; those past the last that came,
    and experts of other ranks, have the number of an expert that is not here, which vLLM's experts pass over.

    Args:
        buffer: of the ranks that share the experts, with layout="tokens".
    """

    def __init__(self, buffer: Buffer) -> None:
        super().__init__(buffer)
        ranks = torch.tensor(buffer.spec.placement.ranks)
        here = (ranks == buffer.rank).nonzero()[:, 0]
        elsewhere = (ranks != buffer.rank).nonzero()[:1, 0]
        # vLLM numbers the experts of all ranks. The last entry, which -1 leads to, is for what is not here.
        self._numbers = torch.cat([here, elsewhere]).to(buffer.device)

    def sends(self, quant_config: FusedMoEQuantConfig) -> bool:
        """fp8 with scales of blocks or tokens, which travel beside the codes; a scale of a whole batch cannot."""
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
        """a1 [T, H], topk_weights and topk_ids [T, K] -> rows [N, H], ids int64 and weights [N, K]; N is no count.

        Where experts take fp8 and do not quantise for themselves, rows are codes and come with their scales [N, S].
        """
        if apply_router_weight_on_input:  # of models with K = 1
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
        """fused_expert_output [N, H], or what weight_and_reduce_impl makes it of -> output [T, H].

        Args:
            topk_weights, topk_ids: what prepare returned.
        """
        if isinstance(weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            weight_and_reduce_impl = TopKWeightAndReduceContiguous()
        y = weight_and_reduce_impl.apply(
            None, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input
        )
        self._send_home(y, output)


def most_tokens() -> int | None:
    """Of any rank in this step, which vLLM has told the host of every rank; None in a step that is no batch's."""
    told = get_forward_context().dp_metadata if is_forward_context_available() else None
    return None if told is None else int(told.num_tokens_across_dp_cpu.max())
