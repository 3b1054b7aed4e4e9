"""Writes a checkpoint and continues, or resumes from one, on any number of ranks: examples/resume.py DIRECTORY"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel import check_checkpoint

path = sys.argv[1]
dist.init_process_group("gloo")
world = dist.get_world_size()
torch.manual_seed(0)  # the same router on every rank
config = MoEConfig(hidden=16, intermediate=32, num_experts=4, num_topk=2, num_max_tokens_per_rank=8)
layer = MoELayer(config, init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)))
optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)


def state():
    model_state, optimizer_state = get_state_dict(layer, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


resumed = os.path.exists(path)
if resumed:
    check_checkpoint(layer, path)  # InvalidConfig, on every rank, if it is of another model
    loaded = state()
    dcp.load(loaded, checkpoint_id=path)
    set_state_dict(layer, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).chunk(world)[dist.get_rank()]
for step in range(1 if resumed else 0, 2):
    loss = (layer(x)[0] - x).square().sum() / 8
    loss.backward()
    dist.all_reduce(layer.router.weight.grad)  # experts' gradients are already sums over all ranks
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step} on {world} ranks: loss {total.item():.5f}")
    if step == 0:
        dcp.save(state(), checkpoint_id=path)
layer.buffer.close()
dist.destroy_process_group()
