"""DeepEP's set-up of ranks, as its tests use it."""

from __future__ import annotations

import os
import random

import torch
import torch.distributed as dist

_seeds = {"local": 0, "global": 0}


def init_seed(global_seed: int) -> None:
    """Seed torch and random with the seed plus this rank."""
    _seeds.update({"local": global_seed + dist.get_rank(), "global": global_seed})
    torch.manual_seed(_seeds["local"])
    random.seed(_seeds["local"])


def get_local_seed() -> int:
    """Return this rank's seed."""
    return _seeds["local"]


def get_global_seed() -> int:
    """Return the seed of all ranks."""
    return _seeds["global"]


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Make the default group, set bfloat16 and the device as defaults, and return rank, size and a group of all.

    WORLD_SIZE and RANK are the number of hosts and this host, as DeepEP reads them.
    """
    hosts, host = int(os.getenv("WORLD_SIZE", "1")), int(os.getenv("RANK", "0"))
    address, port = os.getenv("MASTER_ADDR", "127.0.0.1"), os.getenv("MASTER_PORT", "8361")
    dist.init_process_group(
        backend="nccl" if torch.cuda.is_available() else "gloo",
        init_method=f"tcp://{address}:{port}",
        world_size=hosts * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    if torch.cuda.is_available():
        torch.set_default_device("cuda")
        torch.cuda.set_device(local_rank)
    init_seed(seed)
    size = dist.get_world_size()
    group = dist.new_group(list(range(size)))
    assert isinstance(group, dist.ProcessGroup)
    return dist.get_rank(), size, group


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on rank 0, and wait for all."""
    if not once_in_node or dist.get_rank() == 0:
        print(s, flush=True)
    dist.barrier()


def check_nvlink_connections(group: object) -> None:
    """Do nothing: ranks share memory."""


def check_torch_deterministic() -> None:
    """Do nothing: no op depends on torch's mode."""


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return 1 and the number of ranks: all are in one domain."""
    return 1, group.size()


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """Return 1 and the number of ranks: all are in one domain."""
    return 1, group.size()


def get_nvlink_gbs(factor: float = 0.9) -> float:
    """Return 0, as DeepEP does where it finds no NVLink."""
    return 0.0


def get_rdma_gbs(nic_name: str = "") -> float:
    """Return 0, as DeepEP does where it finds no network card for RDMA."""
    return 0.0


def check_fast_rdma_atomic_support(nic_name: str = "") -> bool:
    """Return False, as DeepEP does where it finds no network card for RDMA."""
    return False
