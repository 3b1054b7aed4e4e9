"""A forward that runs the experts on this rank's own rows while the others arrive, next to whole ops and chunks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/overlap_own_rows.py

Between emulated nodes it runs as bench/overlap.py does. Rows from this rank need no network, so the experts can begin
with them between the halves of dispatch: *own*. The output is compared with that of whole ops, to the bit. The last
line is one JSON document, milliseconds of two layers: medians over steps, means over ranks.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from statistics import median

import click
import torch
import torch.distributed as dist
from torch import Tensor

from moe_rt import MoEConfig, MoELayer

LAYERS, LOCAL = 2, 4  # layers, and experts of a rank


def own_first(layer: MoELayer, x: Tensor) -> Tensor:
    """Return the layer's output for tokens x [T, H]; two ranks."""
    buffer = layer.buffer
    idx, weights, _ = layer.router(x)
    pending = buffer.dispatch(x, idx, weights, wait=False)
    local = idx - LOCAL * buffer.rank
    token, k = ((local >= 0) & (local < LOCAL)).nonzero(as_tuple=True)
    order = local[token, k].argsort(stable=True)
    counts = torch.bincount(local[token, k], minlength=LOCAL)
    y_own = layer.experts(x[token[order]], counts.cumsum(0).int())

    recv_x, recv_weights, handle = pending.wait()
    ends = handle.offs.long()
    is_own = torch.zeros(int(ends[-1]), dtype=torch.bool)
    for begin, end, count in zip([0, *ends[:-1].tolist()], ends.tolist(), counts.tolist(), strict=True):
        # An expert's rows are ordered by their rank.
        is_own[slice(begin, begin + count) if buffer.rank == 0 else slice(end - count, end)] = True
    own, others = is_own.nonzero()[:, 0], (~is_own).nonzero()[:, 0]
    y = torch.empty_like(recv_x)
    y[own] = y_own
    y[others] = layer.experts(recv_x[others], torch.searchsorted(others, ends).int())
    return buffer.combine(y, recv_weights, handle)


@click.command()
@click.option("--tokens", default=512, show_default=True)
@click.option("--hidden", default=1024, show_default=True)
@click.option("--intermediate", default=192, show_default=True)
@click.option("--steps", default=10, show_default=True)
@torch.no_grad()
def main(tokens: int, hidden: int, intermediate: int, steps: int) -> None:
    """Measure on this rank; rank 0 prints the means over ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    size = dist.get_world_size()
    if size != 2:
        raise click.UsageError(f"got {size} ranks, expected 2")
    sizes = dict(hidden=hidden, intermediate=intermediate, num_experts=LOCAL * size, num_max_tokens_per_rank=tokens)
    layers = [MoELayer(MoEConfig(num_topk=2, **sizes)) for _ in range(LAYERS)]
    x = torch.randn(tokens, hidden)
    seen: dict[str, list[float]] = {name: [] for name in ("whole", "own", "2 chunks", "3 chunks", "4 chunks")}
    outputs = {}
    for i in range(steps + 2):
        for name in seen if i % 2 else reversed(seen):
            for layer in layers:
                layer.config = replace(layer.config, num_chunks=int(name[0]) if "chunks" in name else 1)
            dist.barrier()
            start, out = time.perf_counter(), x
            for layer in layers:
                out = out + (own_first(layer, out) if name == "own" else layer(out)[0])
            seen[name].append(1e3 * (time.perf_counter() - start))
            outputs[name] = out
    assert torch.equal(outputs["own"], outputs["whole"])
    result = torch.tensor([median(each[2:]) for each in seen.values()])
    dist.all_reduce(result)
    if dist.get_rank() == 0:
        print(json.dumps({name: round(ms, 1) for name, ms in zip(seen, (result / size).tolist(), strict=True)}))
    for layer in layers:
        layer.buffer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
