"""Three ranks train, one is killed, two continue from the checkpoint: python examples/elastic.py"""

import multiprocessing
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from json import __file__ as data
from pathlib import Path

import torch
import torch.distributed as dist

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


with tempfile.TemporaryDirectory() as directory:
    out = Path(directory, "run")
    sizes = dict(num_layers=1, hidden=32, num_heads=2, intermediate=32, num_experts=7, seq_len=32, batch_size=6)
    config = TrainConfig(
        out=out, data=Path(data).parent, steps=60, checkpoint_every=10, val_sequences=6, sample_bytes=0, **sizes
    )
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(r, f"file://{directory}/store", config)) for r in range(3)]
    [rank.start() for rank in ranks]
    while not list(out.glob("checkpoints/*/manifest.json")) and ranks[1].is_alive():
        time.sleep(0.01)
    ranks[1].kill()  # SIGKILL: it announces nothing
    [rank.join() for rank in ranks]
    assert [rank.exitcode for rank in ranks] == [0, -9, 0]
    assert (out / "checkpoints" / "step-00000060").is_dir()
    print("rank 1 was killed; ranks 0 and 2 went on from the checkpoint to step 60")
