"""Lets `moe_rt.routes` record and replay the routes of Transformers models, with or without experts over moe_rt.

Each family has its own router, and all choose experts by one `torch.topk` over all experts. Inside a block with
experts this call is observed, or gets the recorded ids and the live scores of these experts, from which the router
then computes weights by its own rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.group.groups import Group
from moe_rt.routes.ops import note_routes, recorded_routes
from moe_rt.routes.session import FINDERS, RECORDS, REPLAYED, REPLAYS, recomputes

EXCHANGE = "_moe_rt_exchange"  # attribute of experts over moe_rt: their MoeRtEP
_NAME = "_moe_rt_routed"
_COUNTS = ("top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk")


class RoutedBlock:
    """Routes of one block: a module with a child `experts` and a router.

    Args:
        block: the module.
        num_experts, num_topk: E, K.
    """

    def __init__(self, block: nn.Module, num_experts: int, num_topk: int) -> None:
        self.routing = self.routes_id = 0
        self._sizes = num_experts, num_topk
        self._experts: Any = block.experts
        self._modes: list[_Choice] = []
        block.register_forward_pre_hook(self._begin)
        block.register_forward_hook(self._end, always_call=True)

    def routes_sizes(self) -> tuple[int, int, Group]:
        """Return E, K and the ranks that share the experts."""
        exchange = getattr(self._experts, EXCHANGE, None)
        return (*self._sizes, None if exchange is None else exchange.ep_mesh)

    def refuse_routes(self, error: InvalidInput) -> None:
        """Raise the error on every rank, in place of the experts' dispatch."""
        exchange = getattr(self._experts, EXCHANGE, None)
        if exchange is None:
            raise error
        exchange.refuse(error)

    def _begin(self, block: nn.Module, args: Any) -> None:
        replays = bool(self.routing & REPLAYS) or bool(self.routing & REPLAYED and recomputes(self.routes_id))
        if torch.compiler.is_compiling() and self.routing & (RECORDS | REPLAYS):
            got = f"a compiled {type(block).__name__} whose routes are recorded or replayed"
            raise InvalidConfig(f"routes: got {got}, expected an eager one")
        mode = _Choice(self, *self._sizes, replays)
        self._modes.append(mode)
        if replays or self.routing & RECORDS:
            mode.__enter__()

    def _end(self, *_: Any) -> None:
        mode = self._modes.pop()
        if mode.entered:
            mode.__exit__(None, None, None)


class _Choice(TorchFunctionMode):
    """Observes or replaces the call of torch.topk that chooses experts."""

    def __init__(self, routed: RoutedBlock, num_experts: int, num_topk: int, replays: bool) -> None:
        super().__init__()
        self._routed, self._sizes, self._replays = routed, (num_experts, num_topk), replays
        self._chosen = self.entered = False

    def __enter__(self) -> Any:
        self.entered = True
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func not in (torch.topk, Tensor.topk) or self._chosen:
            return result
        scores = args[0] if args else kwargs["input"]
        if (scores.shape[-1], result.indices.shape[-1]) != self._sizes:
            return result
        self._chosen = True
        values, idx = result
        id_ = self._routed.routes_id
        if self._replays:
            ids = recorded_routes(scores, self._sizes[1], id_).reshape(idx.shape)
            idx = torch.where(ids < 0, idx, ids)
            values = scores.gather(-1, idx)
        flat = idx.reshape(-1, self._sizes[1])
        idx = note_routes(flat, flat, id_).reshape(idx.shape)  # if they are recorded
        return torch.return_types.topk((values, idx))


def find(module: nn.Module) -> RoutedBlock | None:
    """Return the RoutedBlock of a module with a child `experts` and a router, or None."""
    found = module.__dict__.get(_NAME)
    experts = module._modules.get("experts")
    if found is not None or experts is None:
        return found if isinstance(found, RoutedBlock) else None
    places = [*(child for child in module.children() if child is not experts), module, getattr(experts, "config", None)]
    counts = [n for place in places for name in _COUNTS if isinstance(n := getattr(place, name, None), int)]
    exchange = getattr(experts, EXCHANGE, None)
    total = getattr(experts, "num_experts", None) if exchange is None else exchange.num_experts
    if not counts or not isinstance(total, int):
        return None
    routed = RoutedBlock(module, total, counts[0])
    setattr(module, _NAME, routed)
    return routed


def install() -> None:
    """Make `moe_rt.routes` find the blocks of Transformers models. Idempotent."""
    if find not in FINDERS:
        FINDERS.append(find)
