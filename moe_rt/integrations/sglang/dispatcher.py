"""SGLang's token dispatcher interface, in its standard format, implemented by one dispatch and one combine."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import BaseDispatcher, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from torch import Tensor

from moe_rt.integrations.exchange import Exchanged, LayerExchange


class MoeRtDispatcher(BaseDispatcher):  # type: ignore[misc]
    """Sends tokens to the ranks of their experts, and returns the experts' rows, weighted and summed.

    Experts get one row for each (token, local expert), in the order expert, source rank, token, with K = 1, the
    expert's local id and weight 1; combine applies the router's weights in fp32. So kernels that do not support entries
    for other ranks can be used also.

    Args:
        exchange: the layer's exchange.
    """

    def __init__(self, exchange: LayerExchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._received: Exchanged | None = None  # set between dispatch and combine

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> StandardDispatchOutput:
        """Dispatch hidden_states [T, H], ids and weights [T, K] -> rows [N, H], local ids int32 [N, 1], ones [N, 1].

        N is at least 1, because SGLang's own experts fail without a row; combine reads only received rows.
        """
        received = self._exchange.dispatch(hidden_states, topk_output.topk_ids, topk_output.topk_weights)
        self._received = received
        num_rows = max(int(received.handle.offs[-1]), 1)  # CPU ranks have waited for the rows anyway
        ids = received.handle.row_experts(num_rows).clamp(min=0)[:, None]
        topk = StandardTopKOutput(torch.ones(num_rows, 1), ids, topk_output.router_logits)
        return StandardDispatchOutput(received.rows[:num_rows], None, topk)

    def combine(self, combine_input: Any) -> Tensor:
        """Combine the experts' rows [N, H] -> [T, H], summed over all ranks."""
        assert self._received is not None
        received, self._received = self._received, None
        return received.combine(combine_input.hidden_states)
