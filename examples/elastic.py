"""Three ranks train, one is killed, two continue from the checkpoint: python examples/elastic.py"""

import multiprocessing
import os
import signal
import tempfile
from dataclasses import replace
from datetime import timedelta
from itertools import count
from json import __file__ as data
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_rt.elastic import ElasticGroup
from moe_rt.errors import MissingPackage, RankExcluded, StoreLost
from moe_rt.train import TrainConfig, train


def rank_main(rank, store, config):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=20))
    members = ElasticGroup()  # collective, while all are alive: from now on ranks know which process has ended
    failed = False
    for _ in range(6):  # a rank may die in training, or while the others regroup; both are tried again
        try:
            if failed:
                members.survivors()  # the default process group now has the remaining ranks
                config = replace(config, resume=True)
            return train(config)
        except (RankExcluded, StoreLost, MissingPackage):
            raise  # nothing is left to continue with
        except RuntimeError as error:  # PeerDead, GroupPoisoned, ... from moe_rt, or the same news from gloo
            print(f"rank {rank}: {type(error).__name__}", flush=True)
            failed = True
    raise RuntimeError(f"rank {rank}: gave up")


def doomed_main(*given):
    steps = count(1)

    def die(*_):
        if next(steps) == 25:  # between two checkpoints
            os.kill(os.getpid(), signal.SIGKILL)  # it announces nothing

    register_optimizer_step_post_hook(die)
    rank_main(*given)


with tempfile.TemporaryDirectory() as directory:
    out = Path(directory, "run")
    sizes = dict(num_layers=1, hidden=32, num_heads=2, intermediate=32, num_experts=7, seq_len=32, batch_size=6)
    config = TrainConfig(
        out=out, data=Path(data).parent, steps=60, checkpoint_every=10, val_sequences=6, sample_bytes=0, **sizes
    )
    context = multiprocessing.get_context("fork")
    mains = [rank_main, doomed_main, rank_main]
    ranks = [context.Process(target=mains[r], args=(r, f"file://{directory}/store", config)) for r in range(3)]
    [rank.start() for rank in ranks]
    [rank.join() for rank in ranks]
    assert [rank.exitcode for rank in ranks] == [0, -9, 0]
    assert (out / "checkpoints" / "step-00000060").is_dir()
    print("rank 1 was killed; ranks 0 and 2 went on from the checkpoint of step 20 to step 60")
