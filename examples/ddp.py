"""Trains with DistributedDataParallel: torchrun --standalone --nproc-per-node 2 examples/ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel import prepare


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm, self.moe = nn.RMSNorm(64), MoELayer(config)  # its experts are spread over all ranks

    def forward(self, x):
        y, aux = self.moe(self.norm(x))
        return x + y, aux.loss


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
config = MoEConfig(
    hidden=64, intermediate=128, num_experts=8, num_topk=2, num_max_tokens_per_rank=64, aux_loss_coef=0.01
)
model = DistributedDataParallel(prepare(Model(config)))  # Accelerator().prepare(prepare(Model(config))) does the same
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 64, generator=torch.Generator().manual_seed(rank))  # every rank has its own batch
for step in range(10):
    with torch.autocast("cpu", torch.bfloat16):  # rows travel and experts compute in bf16, as linear layers do
        y, aux_loss = model(x)
    loss = (y.float() - x.flip(-1)).square().mean() + aux_loss
    loss.backward()  # all gradients are those of the mean over ranks, the experts' included
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # counts the experts of all ranks
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 3 == 0:
        print(f"step {step}: loss {loss.item():.3f}, gradient norm {norm.item():.3f}")
model.module.moe.buffer.close()
dist.destroy_process_group()
