"""vLLM's experts on CPU ranks without moe_rt: an all-gather of all tokens and a sum of the results, in two forms.

gloo: all-gather and reduce-scatter, vLLM's default on GPUs, which it lacks on CPUs. This is the fastest form known to
us. All data of a token is one row of a single all-gather. Each rank keeps the pairs of local experts, since vLLM's CPU
experts accept no others. Gloo's all-to-all and a sum are faster than its reduce-scatter.

shm: the collectives of vLLM's tensor parallelism, its fastest transport between CPU ranks of a host. vLLM does not use
them for experts; a native CPU expert parallelism would. An all-gather sends every token to every rank, as over gloo,
and an all-reduce sums the ranks' results of all tokens, since these collectives have no reduce-scatter.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.expert_map_manager import determine_expert_map
from vllm.model_executor.layers.fused_moe.modular_kernel import PrepareResultType

from moe_rt.integrations.vllm import factory
from moe_rt.integrations.vllm.prepare_finalize import MoeRtPrepareAndFinalize


class GlooPrepareAndFinalize(MoeRtPrepareAndFinalize):
    """MoeRtPrepareAndFinalize's contract on two collectives. Rows are fp32.

    Args:
        moe: vLLM's configuration of the layer.
        group: the ranks that share its experts.
    """

    def __init__(self, moe: Any, group: dist.ProcessGroup) -> None:
        super(MoeRtPrepareAndFinalize, self).__init__()
        assert moe.in_dtype == torch.float32
        expert_map = determine_expert_map(group.size(), group.rank(), moe.num_experts)[1]
        assert expert_map is not None
        self._group, self._local = group, expert_map.int()  # -1 for another rank's expert
        self._tokens, self._sizes = torch.empty(0), list[int]()

    def num_dispatchers(self) -> int:
        """Number of ranks that send."""
        return self._group.size()

    def prepare(
        self, a1: Tensor, topk_weights: Tensor, topk_ids: Tensor, *others: Any, **more: Any
    ) -> PrepareResultType:
        """a1 [T, H] -> rows [N, H] of this rank's experts, their ids int32 [N, 1] and weights [N, 1]."""
        metadata = get_forward_context().dp_metadata
        assert metadata is not None
        self._sizes = metadata.num_tokens_across_dp_cpu.tolist()
        hidden, topk = a1.shape[1], topk_ids.shape[1]
        mine = torch.cat([a1, topk_weights.float(), topk_ids.int().view(torch.float32)], 1)
        x, weights, ids = self._gathered(mine).split([hidden, topk, topk], 1)
        local = self._local[ids.view(torch.int32)]
        here = local >= 0
        rows, columns = here.nonzero(as_tuple=True)
        per_token = here.sum(1)
        self._tokens = per_token.cumsum(0) - per_token  # first row of each token
        return x[rows], None, None, local[rows, columns][:, None], weights[rows, columns][:, None]

    def finalize(self, output: Tensor, fused_expert_output: Tensor, *others: Any) -> None:
        """Rows [N, H], weighted by the experts -> output [T, H]."""
        y = fused_expert_output.flatten(0, -2)
        if len(y):
            partial = F.embedding_bag(torch.arange(len(y)), y, self._tokens, mode="sum")
        else:
            partial = y.new_zeros(sum(self._sizes), output.shape[1])
        self._summed(partial, output)

    def _summed(self, partial: Tensor, output: Tensor) -> None:
        """Sum all ranks' rows of this rank's tokens: rows of all tokens [sum of sizes, H] -> output [T, H]."""
        ranks, num_tokens = self._group.size(), len(output)
        arrived = torch.empty(ranks * num_tokens, output.shape[1])
        dist.all_to_all_single(arrived, partial, [num_tokens] * ranks, self._sizes, group=self._group)
        torch.sum(arrived.view(ranks, num_tokens, -1), 0, out=output)

    def _gathered(self, mine: Tensor) -> Tensor:
        """Return all ranks' rows, padded to equal counts, since gloo gathers equal counts only."""
        most = max(self._sizes)
        everyone = torch.empty(len(self._sizes) * most, mine.shape[1])
        dist.all_gather_into_tensor(everyone, padded(mine, most), group=self._group)
        return self._without_padding(everyone)

    def _without_padding(self, everyone: Tensor) -> Tensor:
        most = max(self._sizes)
        if min(self._sizes) == most:
            return everyone
        return torch.cat([part[:size] for part, size in zip(everyone.split(most), self._sizes, strict=True)])


def padded(rows: Tensor, most: int) -> Tensor:
    """Return the rows, padded with zeros to `most` rows."""
    return F.pad(rows, (0, 0, 0, most - len(rows))) if len(rows) < most else rows


def install_gloo() -> None:
    """Replace moe_rt's class in moe_rt's own factory."""
    replace(GlooPrepareAndFinalize)


def replace(kind: type[GlooPrepareAndFinalize]) -> None:
    """Make the factory create this kind instead of a buffer and moe_rt's own class."""
    names: Any = factory
    names.make_buffer = lambda moe, group: (moe, group)
    names.MoeRtPrepareAndFinalize = lambda made: kind(*made)


class ShmPrepareAndFinalize(GlooPrepareAndFinalize):
    """GlooPrepareAndFinalize's contract on vLLM's compiled collectives. Rows are fp32.

    Args:
        moe: vLLM's configuration of the layer.
        group: the ranks that share its experts.
    """

    def __init__(self, moe: Any, group: dist.ProcessGroup) -> None:
        super().__init__(moe, group)
        self._handle = _manager(group)

    def _gathered(self, mine: Tensor) -> Tensor:
        """Return all ranks' rows, padded to equal counts for the all-gather."""
        most = max(self._sizes)
        everyone = torch.empty(len(self._sizes) * most, mine.shape[1])
        torch.ops._C.shm_all_gather(self._handle, padded(mine, most), everyone)
        return self._without_padding(everyone)

    def _summed(self, partial: Tensor, output: Tensor) -> None:
        """Sum the ranks' rows of all tokens [sum of sizes, H] and keep this rank's: output [T, H]."""
        torch.ops._C.shm_allreduce(self._handle, partial)
        begin = sum(self._sizes[: self._group.rank()])
        output.copy_(partial[begin : begin + len(output)])


@functools.cache
def _manager(group: dist.ProcessGroup) -> int:
    """Create the group's shared memory as vLLM does. Its files are unlinked immediately, so it ends with the last
    process."""
    first = torch.tensor([os.getpid()])
    dist.broadcast(first, group=group, group_src=0)
    name = f"moe_rt_bench_vllm_{int(first)}"
    handle = int(torch.ops._C.init_shm_manager(name, group.size(), group.rank(), torch.get_num_threads()))
    dist.barrier(group)
    torch.ops._C.join_shm_manager(handle, name)
    dist.barrier(group)
    for path in Path("/dev/shm").glob(f"{name}_*"):
        path.unlink(missing_ok=True)
    return handle


def install_shm() -> None:
    """Replace moe_rt's class in moe_rt's own factory."""
    replace(ShmPrepareAndFinalize)
