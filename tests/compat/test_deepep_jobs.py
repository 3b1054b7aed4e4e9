"""deep_ep's set-up of ranks, and its dispatch in plain torch, in the processes that they make."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from compat.oracle import make_job, received, visits

from moe_rt.compat import deep_ep
from moe_rt.compat.deep_ep.utils import envs, refs
from moe_rt.lab.testing.ports import free_ports

HOSTS, LOCAL, MOST = 2, 2, 16
JOB = make_job(HOSTS * LOCAL, [16, 0, 9, 3], 16, 3, 8)


def in_processes(work: Callable[[int, int], str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run work(host, local rank) in a process for each, and return what they say, in the order of ranks."""
    monkeypatch.setenv("MASTER_PORT", str(free_ports()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", str(HOSTS))
    said = []
    for host in range(HOSTS):
        for local in range(LOCAL):
            read, write = os.pipe()
            pid = os.fork()
            if not pid:
                try:
                    torch.set_num_threads(1)
                    os.environ["RANK"] = str(host)
                    os.write(write, work(host, local).encode())
                except BaseException as error:
                    os.write(write, f"{type(error).__name__}: {error}\n".encode())
                finally:
                    os._exit(0)
            os.close(write)
            said.append((pid, read))
    text = []
    for pid, read in said:
        with os.fdopen(read) as end:
            text.append(end.read())
        os.waitpid(pid, 0)
    return "".join(text)


def test_a_job_of_two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(host: int, local: int) -> str:
        rank, size, group = envs.init_dist(local, LOCAL, seed=40)
        assert (rank, size, group.size()) == (host * LOCAL + local, 4, 4)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 4)
        assert group is not dist.group.WORLD
        assert torch.get_default_dtype() is torch.bfloat16
        assert deep_ep.get_physical_domain_size(group) == deep_ep.get_logical_domain_size(group) == (1, 4)
        assert (envs.get_local_seed(), envs.get_global_seed()) == (40 + rank, 40)
        drawn = torch.rand(2).tolist(), random.random()
        torch.manual_seed(40 + rank)
        random.seed(40 + rank)
        assert drawn == (torch.rand(2).tolist(), random.random())
        envs.init_seed(7)
        assert (envs.get_local_seed(), envs.get_global_seed()) == (7 + rank, 7)
        torch.set_default_dtype(torch.float32)
        for x in (JOB.x[rank], (JOB.x[rank].to(torch.float8_e4m3fn), torch.arange(len(JOB.x[rank])).view(-1, 1))):
            rows, ids, weights, tokens, came = refs.dispatch(x, JOB.topk_idx[rank], JOB.topk_weights[rank], MOST, 8)
            right, right_ids, right_weights, _, from_ranks = received(JOB, rank)
            pairs = [(source, int(t)) for source in range(4) for t in visits(JOB, source)[:, rank].nonzero()]
            if isinstance(x, tuple):
                assert torch.equal(rows[0].float(), right.to(torch.float8_e4m3fn).float())
                assert rows[1].flatten().tolist() == [token for _, token in pairs]
            else:
                assert torch.equal(rows, right)
            assert torch.equal(ids, right_ids)
            assert torch.equal(weights, right_weights.where(right_ids >= 0, weights))  # others keep theirs
            assert tokens.tolist() == [source * MOST + token for source, token in pairs]
            assert (tokens.dtype, came.dtype, came.tolist()) == (torch.int32, torch.int32, from_ranks)
        dist.destroy_process_group()
        return f"{rank} of {size}\n"

    assert in_processes(work, monkeypatch) == "".join(f"{rank} of 4\n" for rank in range(4))


def test_lines_are_printed_before_ranks_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(dist, "barrier", lambda: waits.append(capsys.readouterr().out))
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        envs.dist_print(f"of {rank}")
        envs.dist_print(f"once {rank}", once_in_node=True)
        envs.dist_print()
    assert waits == ["of 0\n", "once 0\n", "\n", "of 1\n", "", "\n"]
    assert capsys.readouterr().out == ""
