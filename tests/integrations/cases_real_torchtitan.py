"""Functions that ranks run with the real torchtitan 0.3: its layer and experts, with the line that the guide gives."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from integrations import fake_triton  # noqa: F401
from integrations.cases_adapters import EXPERTS, HIDDEN, INTERMEDIATE, TOPK, differences, inputs_of, weighted_sum
from integrations.cases_torchtitan import make_weights, route
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import moe, token_dispatcher

from moe_rt.integrations.torchtitan import MoeRtTokenDispatcher

LINE = "moe_rt.integrations.torchtitan.token_dispatcher"


def _routed(kind: Any, arguments: list[str] | None = None, num_experts: int = EXPERTS) -> Any:
    """Return RoutedExperts with a dispatcher of this kind, after any overrides of the command line."""
    experts = moe.GroupedExperts.Config(dim=HIDDEN, hidden_dim=INTERMEDIATE, num_experts=num_experts)
    chosen = kind.Config(num_experts=EXPERTS, top_k=TOPK)
    config = moe.RoutedExperts.Config(inner_experts=experts, token_dispatcher=chosen)
    if arguments is not None:
        apply_overrides(OverrideConfig(imports=parse_cli_imports(arguments)), config)
    return config.build()


def _run(routed: Any, rank: int, num_tokens: int, weights: list[torch.Tensor]) -> dict[str, Any]:
    """Return output and gradients of one batch [1, T, D], as torchtitan 0.3 calls its layer."""
    with torch.no_grad():
        for p, w in zip(routed.parameters(), weights, strict=True):
            p.copy_(w)
    x = inputs_of(rank, num_tokens).bfloat16().requires_grad_()
    scores, ids = route(x.detach().float(), make_weights()["router"].detach())
    scores.requires_grad_()
    one_hot = F.one_hot(ids, EXPERTS).sum((0, 1))
    out = routed(x[None], scores[None], ids[None], one_hot)
    assert out.shape == (1, num_tokens, HIDDEN)
    weighted_sum(out).backward()
    grads = dict(zip(("w1", "w2", "w3"), (p.grad for p in routed.parameters()), strict=True))
    return {"out": out.detach(), "x": x.grad, "scores": scores.grad, **grads}


def _experts() -> list[torch.Tensor]:
    weights = make_weights()
    return [weights[name].detach() for name in ("w1", "w2", "w3")]


def equal_local_dispatch(group: Any, arguments: list[str]) -> dict[str, float]:
    """Compare with torchtitan's local dispatcher."""
    overridden = _routed(token_dispatcher.AllToAllTokenDispatcher, arguments)
    assert type(overridden.token_dispatcher) is MoeRtTokenDispatcher
    overridden.token_dispatcher.wire_meshes(ep_mesh=group)
    local = _routed(token_dispatcher.LocalTokenDispatcher)
    return differences(*(_run(routed, 0, 9, _experts()) for routed in (overridden, local)))


def equal_dense_layer(group: Any, tokens: list[int]) -> dict[str, float]:
    """Compare with torchtitan's own all-to-all; each rank has its block of the experts."""
    rank, size = group.rank(), group.size()
    set_spmd_backend("default")  # the other back end has its own mesh
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    own = [w.chunk(size)[rank] for w in _experts()]
    results = []
    for arguments in ([LINE], None):
        routed = _routed(token_dispatcher.AllToAllTokenDispatcher, arguments, EXPERTS // size)
        routed.token_dispatcher.wire_meshes(ep_mesh=mesh)
        results.append(_run(routed, rank, tokens[rank], own))
    return differences(*results)


def check_signatures(parameters: dict[str, list[str]]) -> None:
    assert issubclass(MoeRtTokenDispatcher, token_dispatcher.BaseEPTokenDispatcher)
    for method, names in parameters.items():
        for owner in (token_dispatcher.BaseEPTokenDispatcher, MoeRtTokenDispatcher):
            assert list(inspect.signature(getattr(owner, method)).parameters) == names, (owner, method)
