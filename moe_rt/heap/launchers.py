"""Detects whether a launcher started this process as one of several, from environment variables."""

from __future__ import annotations

import os

# Variables with the rank and the number of ranks, by launcher. Both must be set: one may be inherited from a shell, as
# SLURM_NTASKS is in an interactive allocation. SLURM_STEP_NUM_TASKS is set only in processes that srun started.
_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "mpiexec": ("PMI_RANK", "PMI_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


def one_of_several() -> str:
    """Describe it: "WORLD_SIZE = 4 and RANK = 1, as torchrun sets them"; "" if nothing indicates other processes."""
    for launcher, (rank, size) in _VARIABLES.items():
        number = os.environ.get(size, "")
        if rank in os.environ and number.isdecimal() and int(number) > 1:
            return f"{size} = {number} and {rank} = {os.environ[rank]}, as {launcher} sets them"
    return ""
