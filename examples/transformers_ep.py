"""Trains a Transformers model with its experts spread over ranks: examples/transformers_ep.py DIRECTORY"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

import moe_rt.integrations.transformers  # noqa: F401  line one: registers "moe_rt"

path = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:  # a tiny random model in place of yours
    sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    experts = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(vocab_size=100, **sizes, **experts)).save_pretrained(path)
dist.barrier()

config = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="moe_rt")  # line two
model = AutoModelForCausalLM.from_pretrained(path, distributed_config=config)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
tokens = torch.randint(100, (2, 16 + 8 * rank))  # every rank has its own batch, of any size
losses = []
for _ in range(5):
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0]
print(f"rank {rank}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")

model.generate(tokens[:, :4], max_new_tokens=5, do_sample=False)
model.save_pretrained(f"{path}/trained")  # one ordinary checkpoint, for any number of ranks
dist.barrier()
if rank == 0:
    AutoModelForCausalLM.from_pretrained(f"{path}/trained")
dist.destroy_process_group()
