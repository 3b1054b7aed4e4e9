"""Steps of a layer whole, in chunks and with num_chunks="auto", in turns, for a list of shapes: what "auto" loses.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/overlap_auto.py

Between emulated nodes it runs as bench/overlap.py does. *skew* is the load of the fullest expert over the mean. *loss*
is how much longer a step of auto's number of chunks takes than the best other one, and *noise* how much two runs of
auto's number differ. The last line is one JSON document.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from statistics import median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor

from moe_rt import MoEConfig, MoELayer
from moe_rt.nn import chunks

NUM_TOPK = 2


def routing(tokens: int, num_experts: int, skew: float) -> Tensor:
    """Return expert ids [T, K] by which expert 0 has `skew` times the mean load, or all tokens."""
    scores = torch.rand(tokens, num_experts)
    share = skew * NUM_TOPK / num_experts
    if skew > 1:
        scores[:, 0] = torch.where(torch.rand(tokens) < share, 2.0, -1.0)
    return scores.topk(NUM_TOPK).indices


def step(layer: MoELayer, x: Tensor, idx: Tensor, num_chunks: Any) -> float:
    """Return the milliseconds of a forward and backward."""
    layer.config = replace(layer.config, num_chunks=num_chunks)
    layer.zero_grad()
    dist.barrier()
    start = time.perf_counter()
    (x + layer(x, idx)[0]).square().mean().backward()
    return 1e3 * (time.perf_counter() - start)


def measure(tokens: int, skew: float, numbers: list[int], budget_s: float, sizes: dict[str, int]) -> dict[str, Any]:
    """Measure one shape; the means over ranks of each variant's median step."""
    layer = MoELayer(MoEConfig(num_max_tokens_per_rank=tokens, num_topk=NUM_TOPK, **sizes))
    x, idx = torch.randn(tokens, sizes["hidden"], requires_grad=True), routing(tokens, sizes["num_experts"], skew)
    chosen = chunks.number("auto", layer.buffer, sizes["intermediate"])
    variants: list[Any] = [*numbers, "auto"]
    first = torch.tensor([step(layer, x, idx, n) for n in variants]).sum()
    dist.all_reduce(first, dist.ReduceOp.MAX)
    rounds = max(8, min(200, int(1e3 * budget_s / float(first))))
    seen: dict[Any, list[float]] = {n: [] for n in variants}
    for i in range(rounds):
        for n in variants if i % 2 else reversed(variants):
            seen[n].append(step(layer, x, idx, n))
    times = torch.tensor([median(seen[n]) for n in variants])
    dist.all_reduce(times)
    *of_numbers, auto = (times / dist.get_world_size()).tolist()
    ms = dict(zip(numbers, of_numbers, strict=True))
    layer.buffer.close()
    equal, others = (ms[chosen], auto), (t for n, t in ms.items() if n != chosen)
    return {
        "tokens": tokens,
        "skew": skew,
        "auto": chosen,
        "ms": {n: round(t, 3) for n, t in ms.items()},
        "loss": round(max(0.0, sum(equal) / 2 / min(others) - 1), 4),
        "noise": round(max(equal) / min(equal) - 1, 4),
    }


@click.command()
@click.option("--tokens", default="1,4,16,64,256,512,1024,2048,4096,8192", show_default=True, help="Per rank.")
@click.option("--skews", default="1,7", show_default=True)
@click.option("--chunks", "numbers", default="1,3", show_default=True, help="Numbers to compare; auto's among them.")
@click.option("--budget-s", default=4.0, show_default=True, help="Seconds per shape, and at least eight rounds.")
@click.option("--experts", default=16, show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--intermediate", default=192, show_default=True)
def main(tokens: str, skews: str, numbers: str, budget_s: float, experts: int, hidden: int, intermediate: int) -> None:
    """Measure on this rank; rank 0 prints a line per shape, and the worst loss."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    found = []
    for skew in map(float, skews.split(",")):
        for t in map(int, tokens.split(",")):
            sizes = dict(num_experts=experts, hidden=hidden, intermediate=intermediate)
            found.append(measure(t, skew, [int(n) for n in numbers.split(",")], budget_s, sizes))
            if dist.get_rank() == 0:
                print(json.dumps(found[-1]), flush=True)
    if dist.get_rank() == 0:
        worst = {f"worst_{name}": max(each[name] for each in found) for name in ("loss", "noise")}
        print(json.dumps({"shapes": len(found), **worst}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
