"""SGLang's contract before and after experts, in its standard format, kept by one dispatch and one combine."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher import BaseDispatcher, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput
from torch import Tensor

from moe_rt.integrations.exchange import Exchanged, LayerExchange


class MoeRtDispatcher(BaseDispatcher):  # type: ignore[misc]
    """Tokens to the ranks of their experts, and the experts' rows back, weighted and summed.

    Experts get one row for each (token, expert) of theirs, in the order expert, source rank, token, with K = 1, the
    expert's number on this rank and weight 1; combine applies the router's weights in fp32. So kernels that know no
    entries for other ranks serve as well.

    Args:
        exchange: of the layer.
    """

    def __init__(self, exchange: LayerExchange) -> None:
        super().__init__()
        self._exchange = exchange
        self._received: Exchanged | None = None  # between dispatch and combine

    def dispatch(self, hidden_states: Tensor, topk_output: Any) -> StandardDispatchOutput:
        """hidden_states [T, H], ids and weights [T, K] -> rows [N, H], ids int32 [N, 1] of this rank, ones [N, 1].

        N is one at least, since SGLang's own experts fail without a row; combine does not read more than were received.
        """
        received = self._exchange.dispatch(hidden_states, topk_output.topk_ids, topk_output.topk_weights)
        self._received = received
        num_rows = max(int(received.handle.offs[-1]), 1)  # CPU ranks have waited for the rows anyway
        ids = received.handle.row_experts(num_rows).clamp(min=0)[:, None]
        topk = StandardTopKOutput(torch.ones(num_rows, 1), ids, topk_output.router_logits)
        return StandardDispatchOutput(received.rows[:num_rows], None, topk)

    def combine(self, combine_input: Any) -> Tensor:
        """The experts' rows [N, H] -> [T, H], complete."""
        assert self._received is not None
        received, self._received = self._received, None
        return received.combine(combine_input.hidden_states)
