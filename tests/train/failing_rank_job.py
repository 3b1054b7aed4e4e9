"""Train under torchrun's variables; rank 1 fails in its third step: `failing_rank_job.py OUT HOW`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from train.cases_train import tiny

from moe_rt.train import train
from moe_rt.train.data import Corpus
from moe_rt.train.parallel import Gradients


def main(out: Path, how: str) -> None:
    owner, name = (Gradients, "add_up") if how == "before the all-reduce" else (Corpus, "train_batch")
    original, calls = getattr(owner, name), []

    def failing(*args: object, **kwargs: object) -> object:
        calls.append(None)
        if len(calls) == 3 and os.environ["RANK"] == "1":
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError("rank 1 gives up")
        return original(*args, **kwargs)

    setattr(owner, name, failing)
    train(tiny(out=out, timeout_s=6000.0))


main(Path(sys.argv[1]), sys.argv[2])
