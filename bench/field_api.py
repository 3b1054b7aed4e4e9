"""moe_rt.compat.deep_ep against `moe_rt.Buffer`: dispatch and combine of the same tokens, in turns, in one run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/field_api.py

Each line has the medians of one pair in microseconds, of the buffer's own ops and through DeepEP's names, and what
DeepEP's names add. Both sides move the same bytes: low-latency combine weights each row at its token, so rows return
one by one, as with sums="invariant"; the last pair returns the weights as well, which `Buffer` does only in backward.
The last line is one JSON document.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import click
import torch
import torch.distributed as dist

from moe_rt import Buffer
from moe_rt.compat import deep_ep
from moe_rt.ops import table as ops

Pair = Callable[[], object]


@contextmanager
def pairs(tokens: int, hidden: int, topk: int, experts: int) -> Iterator[dict[str, tuple[Pair, Pair]]]:
    """Yield the two ways to do each pair of dispatch and combine."""
    group, size = dist.group.WORLD, dist.get_world_size()
    sizes = {"num_max_tokens_per_rank": tokens, "hidden": hidden, "num_topk": topk, "num_experts": experts}
    by_token = Buffer(group, **sizes, dtype=torch.bfloat16, layout="tokens")
    by_expert = Buffer(group, **sizes, dtype=torch.bfloat16, sums="invariant")
    most = max(tokens, 4)  # DeepEP refuses fewer on two ranks
    rdma_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(most, hidden, size, experts)
    compat = deep_ep.Buffer(group, int(2e9), rdma_bytes, low_latency_mode=True, explicitly_destroy=True)
    x = torch.randn(tokens, hidden).bfloat16()
    weights, ids = torch.rand(tokens, experts).topk(topk)
    per_rank, _, per_expert, in_rank, _ = compat.get_dispatch_layout(ids, experts)
    counts = {"num_tokens_per_rank": per_rank, "num_tokens_per_expert": per_expert, "is_token_in_rank": in_rank}

    def own_tokens() -> object:
        recv_x, _, handle = by_token.dispatch(x, ids, weights)
        return by_token.combine(recv_x, None, handle)

    def own_backward() -> object:
        recv_x, recv_weights, handle = by_token.dispatch(x, ids, weights)
        plans = handle.recv_plan, handle.send_plan
        return ops.dispatch_backward(recv_x, recv_weights, *plans, by_token._engine, handle.tag)

    def own_experts() -> object:
        recv_x, recv_weights, handle = by_expert.dispatch(x, ids, weights)
        return by_expert.combine(recv_x, recv_weights, handle)

    def normal() -> object:
        recv_x, _, _, _, handle, _ = compat.dispatch(x, topk_idx=ids, topk_weights=weights, **counts)
        return compat.combine(recv_x, handle)

    def with_weights() -> object:
        recv_x, _, recv_weights, _, handle, _ = compat.dispatch(x, topk_idx=ids, topk_weights=weights, **counts)
        return compat.combine(recv_x, handle, topk_weights=recv_weights)

    def low_latency() -> object:
        recv_x, _, handle, _, _ = compat.low_latency_dispatch(x, ids, most, experts, use_fp8=False)
        return compat.low_latency_combine(recv_x, ids, weights, handle)

    yield {
        "normal": (own_tokens, normal),
        "low-latency": (own_experts, low_latency),
        "with weights": (own_backward, with_weights),
    }
    for buffer in (by_token, by_expert):
        buffer.close()
    compat.destroy()


def measure(ways: tuple[Pair, Pair], rounds: int) -> list[float]:
    """Return the median microseconds of each way, averaged over ranks. Ways take turns."""
    times: list[list[float]] = [[], []]
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            start = time.perf_counter()
            ways[which]()
            times[which].append(time.perf_counter() - start)
    means = torch.tensor([1e6 * median(each[rounds // 5 :]) for each in times])  # the first ones warm up
    dist.all_reduce(means)
    return [float(mean) / dist.get_world_size() for mean in means]


@click.command()
@click.option("--tokens", multiple=True, default=(1, 512), show_default=True, help="Tokens of each rank; repeatable.")
@click.option("--hidden", default=2048, show_default=True)
@click.option("--topk", default=8, show_default=True)
@click.option("--experts", default=64, show_default=True)
@click.option("--rounds", default=500, show_default=True)
def main(tokens: tuple[int, ...], hidden: int, topk: int, experts: int, rounds: int) -> None:
    """Measure on this rank; rank 0 prints the means over ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    found: dict[str, dict[str, float]] = {}
    for number in tokens:
        with pairs(number, hidden, topk, experts) as each, torch.no_grad():
            for name, ways in each.items():
                own, through = measure(ways, rounds)
                found[f"{name} T={number}"] = {"own_us": round(own, 1), "deep_ep_us": round(through, 1)}
                if dist.get_rank() == 0:
                    added = f"{through / own:.2f} times, {through - own:+.1f} us"
                    print(f"{name:12} T={number:<5} {own:9.1f} us, as deep_ep {through:9.1f} us: {added}", flush=True)
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
