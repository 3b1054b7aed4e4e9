"""Functions that ranks run over meshes of two dimensions, nodes and the ranks of a node."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from mesh.cases_mesh import close, decoder, loss_of, moe_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from moe_rt import Buffer, MoELayer
from moe_rt.parallel import clip_grad_norm_
from moe_rt.train.parallel import moe_layers


def over_nodes(group: Any, shape: tuple[int, ...], named: bool) -> tuple[tuple[int, ...], list[dict[str, Tensor]]]:
    """Return the nodes of a buffer over the last two dimensions of a mesh of this shape, and this rank's results of a
    step over these dimensions and over the buffer's process group.
    """
    names = ("replica", "node", "rank")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names if named else None)
    where: Any = mesh[names[-2:]] if len(shape) == 3 else mesh
    results = []
    for _ in range(2):
        model = decoder(where)
        buffer = moe_layers(model)[0].buffer
        results.append(stepped(model, buffer.process_group))
        if not results[1:]:
            nodes, where = buffer.topology.nodes, buffer.process_group
            assert all(p.full_tensor().shape[0] == 8 for p in moe_layers(model)[0].experts.parameters())
        close(model)
    return nodes, results


def stepped(model: nn.Module, group: Any) -> dict[str, Tensor]:
    """Return this rank's loss, parameters and gradients, and the norm of all gradients."""
    loss = loss_of(model, 0, dist.get_rank(group), dist.get_world_size(group))
    loss.backward()
    grads = {f"grad of {name}": local(p.grad) for name, p in model.named_parameters()}
    parts = {name: local(p) for name, p in model.named_parameters()}
    return {"loss": loss.detach(), **parts, **grads, "norm": clip_grad_norm_(model, 1e9)}


def local(t: Any) -> Tensor:
    return (t.to_local() if isinstance(t, DTensor) else t).detach().clone()


def again(group: Any) -> list[bool]:
    """Slices of a mesh are new objects each time; yet layers over them share a buffer, and buffers a group."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replica", "node", "rank"))
    layers = [MoELayer(moe_config(), mesh["node", "rank"]) for _ in range(2)]
    first = layers[0].buffer
    with Buffer(mesh["node", "rank"], **moe_config().buffer_sizes()) as other:
        same = [layers[1].buffer is first, other.process_group is first.process_group, other.topology == first.topology]
    first.close()
    return same


def disagree(group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    layer = MoELayer(moe_config(), mesh if group.rank() == 0 else group)
    layer.buffer.close()


def crossed(group: Any) -> tuple[int, ...]:
    """Return the nodes of a group whose ranks alternate between them."""
    sizes = moe_config().buffer_sizes()
    with Buffer(DeviceMesh("cpu", [[0, 2], [1, 3]]), **sizes) as buffer:
        return buffer.topology.nodes
