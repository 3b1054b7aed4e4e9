"""Transformers' own expert parallelism: the AllToAllEP of transformers.distributed, unchanged."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_rt.extras import how_to_install
from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.contestants.base import Delivery, Exchange, Unavailable, require_processes
from moe_rt.lab.bench.world import World


class Transformers(Exchange):
    """The two halves of AllToAllEP.__call__, between which it would run the experts.

    AllToAllEP leaves rows in the order (source, expert) and has the experts sort them. The layer op therefore sorts
    here, between exchange and experts. The other ops do not sort, so this contestant's dispatch does less work than the
    others'.
    """

    name = "transformers"

    def __init__(self, case: Case, world: World) -> None:
        require_processes(case)
        if case.experts % case.ranks:
            raise Unavailable(f"needs experts in equal shares, got {case.experts} for {case.ranks} ranks")
        super().__init__(case, world)
        try:
            from transformers.distributed.expert_parallel import AllToAllEP

            experts: Any = SimpleNamespace(forward=None, num_experts=case.experts // case.ranks)
            self._ep = AllToAllEP(experts, *_meshes(world.processor.device.type, world.size))
            self._dispatch, self._combine = self._ep._dispatch_tokens, self._ep._combine_tokens
        except (ImportError, AttributeError) as error:
            raise Unavailable(f"{error}; {how_to_install('bench')}") from error

    def dispatch(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Delivery:
        # Transformers' models also cast the weights to the payload dtype.
        rows, experts, _, state = self._dispatch(x, topk_idx, topk_weights.to(x.dtype))
        experts = experts.view(-1)
        if self.case.op != "layer":
            return Delivery(rows, experts[:0], (experts, state))
        order = experts.argsort()
        offs = experts.bincount(minlength=self._ep.num_local_experts).cumsum(0).to(torch.int32)
        return Delivery(rows[order], offs, (order, state))

    def combine(self, y: Tensor, delivery: Delivery) -> Tensor:
        order, state = delivery.state
        out: Tensor = self._combine(y if self.case.op != "layer" else y[order.argsort()], state)
        return out

    def experts_of(self, delivery: Delivery) -> Tensor:
        experts: Tensor = delivery.state[0]
        return experts


@lru_cache(maxsize=1)
def _meshes(device_type: str, size: int) -> tuple[Any, Any]:
    """Meshes with expert parallelism over all ranks and no tensor parallelism. Cached, because every mesh makes new
    groups."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(device_type, (size, 1), mesh_dim_names=("ep", "tp"))
    return mesh["ep"], mesh["tp"]
