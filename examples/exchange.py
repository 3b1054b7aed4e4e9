"""Only the communication: rows to your own experts and back."""

import torch

from moe_rt import Buffer

sizes = dict(num_max_tokens_per_rank=256, hidden=64, num_topk=2, num_experts=8, dtype=torch.bfloat16)
with Buffer(None, **sizes) as buffer:  # None: the default process group, or a single rank
    x = torch.randn(100, 64, dtype=torch.bfloat16)
    topk_weights, topk_idx = torch.randn(100, 8).softmax(-1).topk(2)
    recv_x, recv_weights, handle = buffer.dispatch(x, topk_idx, topk_weights)
    y = recv_x  # your experts: rows of expert e end at handle.offs[e]
    out = buffer.combine(y, recv_weights, handle)
    print(f"{len(x)} tokens became {int(handle.offs[-1])} rows; rows of each expert end at {handle.offs.tolist()}")
    print(handle)
