"""A mixture-of-experts layer in a model: forward, losses, backward."""

import torch

from moe_rt import MoEConfig, MoELayer
from moe_rt.parallel import prepare

config = MoEConfig(
    hidden=64, intermediate=128, num_experts=8, num_topk=2, num_max_tokens_per_rank=256, aux_loss_coef=0.01
)
layer = MoELayer(config)  # a ProcessGroup or DeviceMesh as second argument spreads the experts over its ranks
model = prepare(layer)  # over several ranks, before DistributedDataParallel(model), Accelerate or fully_shard(model)
x = torch.randn(4, 32, 64, requires_grad=True)
out, aux = model(x)  # rows travel and experts compute in autocast's dtype, or the model's
(out.square().mean() + aux.loss).backward()
assert out.shape == x.shape
print(f"{x.shape[:2].numel()} tokens visited 2 of 8 experts each; auxiliary loss {aux.loss.item():.4f}")
