"""vLLM's fastest transport between CPU ranks of a host: the collectives of its tensor parallelism.

vLLM does not use them for experts; a native CPU expert parallelism would. An all-gather sends every token to every
rank, as over gloo, and an all-reduce sums the ranks' results of all tokens, since these collectives have no
reduce-scatter.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_rt.bench.serving.gloo import GlooPrepareAndFinalize, padded, replace


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


def install() -> None:
    """Replace moe_rt's class in moe_rt's own factory."""
    replace(ShmPrepareAndFinalize)
