"""The permuted rows over MPI_Alltoallv, which in Open MPI copies directly between processes of a host (CMA)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rt.bench.cases import Case
from moe_rt.bench.contestants.permuted import Permuted
from moe_rt.bench.step import Unavailable
from moe_rt.bench.world import World
from moe_rt.extras import how_to_install


class Mpi(Permuted):
    """MPI_Alltoallv through mpi4py. The ranks must have been started by mpirun."""

    name = "mpi"

    def __init__(self, case: Case, world: World) -> None:
        if case.on_gpu or not case.as_processes:
            raise Unavailable("it moves memory of the host between processes: --heap shm or ucx")
        if not world.mpi:
            raise Unavailable(f"ranks were not started by mpirun; {how_to_install('bench')}")
        try:
            import mpi4py

            mpi4py.rc.thread_level = "single"  # no other thread calls MPI, so it needs no locks
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library was found
            raise Unavailable(f"{error}; {how_to_install('bench')}") from error
        super().__init__(case, world)
        self._comm = MPI.COMM_WORLD
        self._int64, self._row = MPI.INT64_T, MPI.BYTE.Create_contiguous(case.row_bytes).Commit()

    def exchange_counts(self, counts: Tensor) -> Tensor:
        incoming = counts.new_empty(self._num_local * self.world.size)
        each = [self._num_local] * self.world.size
        self._comm.Alltoallv(
            [counts.numpy(), self.case.local_experts, self._int64], [incoming.numpy(), each, self._int64]
        )
        return incoming

    def exchange_rows(self, rows: Tensor, send: list[int], recv: list[int]) -> Tensor:
        incoming = rows.new_empty(sum(recv), rows.shape[1])
        self._comm.Alltoallv([_bytes(rows), send, self._row], [_bytes(incoming), recv, self._row])
        return incoming

    def close(self) -> None:
        self._row.Free()


def _bytes(rows: Tensor) -> object:
    return rows.detach().view(torch.uint8).numpy()
