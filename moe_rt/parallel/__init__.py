"""Support for models with MoELayers under DistributedDataParallel and FSDP2: sharding, sums, clipping, checkpoints."""

from moe_rt.ops.tree_sums import tree_all_reduce
from moe_rt.parallel.checkpoint import check_checkpoint
from moe_rt.parallel.clip import clip_grad_norm_
from moe_rt.parallel.own_experts import own_experts
from moe_rt.parallel.whole import whole_state_dict
from moe_rt.parallel.wrapping import expert_parameters, prepare, shard_experts

__all__ = [
    "check_checkpoint",
    "clip_grad_norm_",
    "expert_parameters",
    "own_experts",
    "prepare",
    "shard_experts",
    "tree_all_reduce",
    "whole_state_dict",
]
