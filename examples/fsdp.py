"""Trains with FSDP2 + EP: torchrun --standalone --nproc-per-node 4 examples/fsdp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel import clip_grad_norm_, shard_experts


class Block(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(64), moe

    def forward(self, x):
        y, aux = self.moe(self.norm(x))
        return x + y, aux.loss


dist.init_process_group("gloo")
rank = dist.get_rank()
experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
everyone = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))

torch.manual_seed(0)  # the same global weights on every rank, and for every shape of the mesh
config = MoEConfig(
    hidden=64, intermediate=128, num_experts=8, num_topk=2, num_max_tokens_per_rank=64, aux_loss_coef=0.01
)
blocks = nn.ModuleList(Block(MoELayer(config, experts["ep"])) for _ in range(2))
shard_experts(blocks, experts["efsdp"])  # before fully_shard of the modules that contain them
for block in blocks:
    fully_shard(block, mesh=everyone)

optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-2)
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(rank))  # every rank has its own batch
for step in range(10):
    y, loss = x, 0.0
    for block in blocks:
        y, aux_loss = block(y)
        loss = loss + aux_loss
    loss = loss + (y - x.flip(-1)).square().mean()
    loss.backward()  # gradients of the loss averaged over all four ranks, experts included
    norm = clip_grad_norm_(blocks, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 3 == 0:
        print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
for block in blocks:
    block.moe.buffer.close()
dist.destroy_process_group()
