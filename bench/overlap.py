"""Dispatch's backward under the gradients of the experts' weights: halves against whole ops, in turns, in one run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/overlap.py --late-ms 20

In every step one rank, drawn anew, is late by `--late-ms` in the experts of a layer, drawn anew. Of the backward of a
step, *exposed* is the time that a rank spends inside dispatch's backward ops, and *waited* that in which it waits for
its peers in any op. The last line is one JSON document.
Between emulated nodes, in two shells (and `moe-rt nodes down` afterwards):

    moe-rt nodes up 2 --rate 1gbit
    moe-rt nodes run NODE -- env OMP_NUM_THREADS=1 MASTER_ADDR=node0 MASTER_PORT=29400 WORLD_SIZE=2 RANK=NODE \
        python bench/overlap.py
"""

from __future__ import annotations

import json
import random
import time
from statistics import fmean, median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.engine.engine import Engine
from moe_rt.nn import overlap

METHODS = ("dispatch_backward", "_run_first", "_run_second")  # a whole backward op, and the halves of any op


class Stopwatch:
    """Adds up the time inside dispatch's backward ops."""

    def __init__(self, engine: Engine) -> None:
        self.seconds = 0.0
        for name in METHODS:
            setattr(engine, name, self._timed(getattr(engine, name)))

    def _timed(self, method: Any) -> Any:
        def run(*given: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*given, **named)
            finally:
                if "start" not in named:  # a half runs inside, and is timed itself
                    self.seconds += time.perf_counter() - start

        return run


def make_layers(num_layers: int, config: MoEConfig) -> nn.ModuleList:
    layers = nn.ModuleList(MoELayer(config) for _ in range(num_layers))
    for layer in layers:
        layer.experts.register_forward_hook(lambda _, __, y: (y.register_hook(_be_late), y)[1])
    return layers


late: list[float] = []  # seconds to sleep in the experts' backward of each layer, the last layer first


def _be_late(grad: Tensor) -> Tensor:
    time.sleep(late.pop(0))
    return grad


def step(layers: nn.ModuleList, x: Tensor, stopwatch: Stopwatch, buffer: Buffer) -> dict[str, float]:
    """Run forward and backward, and return their times in milliseconds."""
    for layer in layers:
        x = x + layer(x)[0]
    dist.barrier()
    waited = sum(buffer.waited_ns())
    stopwatch.seconds, before = 0.0, time.perf_counter()
    x.square().mean().backward()
    backward, waited = time.perf_counter() - before, sum(buffer.waited_ns()) - waited
    return {"backward_ms": 1e3 * backward, "exposed_ms": 1e3 * stopwatch.seconds, "waited_ms": 1e-6 * waited}


@click.command()
@click.option("--late-ms", default=0.0, help="Delay of one rank in one layer of each step.")
@click.option("--steps", default=20, show_default=True)
@click.option("--layers", "num_layers", default=4, show_default=True)
@click.option("--tokens", default=256, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--intermediate", default=1024, show_default=True)
def main(late_ms: float, steps: int, num_layers: int, tokens: int, hidden: int, intermediate: int) -> None:
    """Measure on this rank; rank 0 prints the means over ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    layers = make_layers(
        num_layers,
        MoEConfig(
            hidden=hidden, intermediate=intermediate, num_experts=4 * size, num_topk=2, num_max_tokens_per_rank=tokens
        ),
    )
    stopwatch = Stopwatch(layers[0].buffer._engine)
    x, draw = torch.randn(tokens, hidden, requires_grad=True), random.Random(1)
    seen: dict[str, list[dict[str, float]]] = {"whole": [], "halves": []}
    for i in range(steps + 2):
        who, where = draw.randrange(size), draw.randrange(num_layers)
        for name in sorted(seen, reverse=i % 2 == 0):
            overlap.over_network = lambda _, on=name == "halves": on
            late[:] = [late_ms / 1e3 if (rank, n) == (who, where) else 0.0 for n in range(num_layers)]
            seen[name].append(step(layers, x, stopwatch, layers[0].buffer))
    result: dict[str, float] = {}
    for name, found in seen.items():
        for what in found[0]:
            each = [one[what] for one in found[2:]]
            mine = torch.tensor(median(each) if what == "backward_ms" else fmean(each))
            dist.all_reduce(mine)
            result[f"{name}_{what}"] = round(float(mine) / size, 2)
    result["hidden_share"] = round(1 - result["halves_exposed_ms"] / result["whole_exposed_ms"], 3)
    if rank == 0:
        print(json.dumps(result))
    for layer in layers:
        layer.buffer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
