"""Trains two steps and saves on rank 0, or continues from that file, on any number of ranks: examples/whole.py FILE"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel import prepare, whole_state_dict

path = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same router on every rank
config = MoEConfig(hidden=16, intermediate=32, num_experts=4, num_topk=2, num_max_tokens_per_rank=8)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.moe = nn.Linear(16, 16), MoELayer(config)

    def forward(self, x):
        return self.moe(self.inp(x))[0]


model = DistributedDataParallel(prepare(Model()))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
resumed = os.path.exists(path)
dist.barrier()
if resumed:
    state = torch.load(path)  # all experts; each rank takes its own
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).chunk(world)[rank]
for step in range(2 if resumed else 0, 4):
    if step == 2 and not resumed:
        state = {"model": whole_state_dict(model), "optimizer": whole_state_dict(optimizer)}  # on every rank
        if rank == 0:
            torch.save(state, path)
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach() / world
    dist.all_reduce(total)
    if rank == 0:
        print(f"step {step} on {world} ranks: loss {total.item():.5f}")
model.module.moe.buffer.close()
dist.destroy_process_group()
