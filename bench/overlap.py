"""A layer's steps with whole ops, with dispatch's backward in halves, and in chunks: in turns, in one run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/overlap.py --late-ms 20

In every step one rank, drawn anew, is late by `--late-ms` in the experts of a layer, drawn anew. Of the backward of a
step, *exposed* is the time that a rank spends inside dispatch's backward ops; of the whole step, *in_ops* the time
inside all ops, and *waited* that in which it waits for its peers' signals. *compute* and *wire* are the experts of the
step's layers without exchanges, and its exchanges without experts. *asleep* is the wire with ranks that sleep between
the halves of each op, so that its *cpu*, the processor time of all threads of a rank, is what the exchanges take from
the experts: no rank polls. The last line is one JSON document.
Between emulated nodes, in two shells (and `moe-rt nodes down` afterwards):

    moe-rt nodes up 2 --rate 1gbit
    moe-rt nodes run NODE -- env OMP_NUM_THREADS=1 MASTER_ADDR=node0 MASTER_PORT=29400 WORLD_SIZE=2 RANK=NODE \
        python bench/overlap.py
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_rt import Buffer, MoEConfig, MoELayer
from moe_rt.engine.engine import Engine
from moe_rt.errors import Op
from moe_rt.nn import overlap

METHODS = ("_run", "_run_first", "_run_second")  # a whole op, and its halves


class Stopwatch:
    """Adds up the time inside the ops of an engine: of all, and of dispatch's backward."""

    def __init__(self, engine: Engine) -> None:
        self.all = self.exposed = 0.0
        for name in METHODS:
            setattr(engine, name, self._timed(getattr(engine, name)))

    def _timed(self, method: Any) -> Any:
        def run(op: Any, *given: Any) -> Any:  # or a Begun, which names its op
            start = time.perf_counter()
            try:
                return method(op, *given)
            finally:
                took = time.perf_counter() - start
                self.all += took
                if getattr(op, "op", op) is Op.DISPATCH_BACKWARD:
                    self.exposed += took

        return run


def make_layers(num_layers: int, config: MoEConfig) -> nn.ModuleList:
    return nn.ModuleList(MoELayer(config) for _ in range(num_layers))


def be_late_in(layer: Any) -> None:
    """Make the backward of a layer's experts sleep. A hook on the module would keep it from overlapping."""
    rows = layer._expert_rows
    layer._expert_rows = lambda *given: _noted(rows(*given))


def _noted(y: Tensor) -> Tensor:
    if late:
        y.register_hook(_be_late)
    return y


late: list[float] = []  # seconds to sleep in the experts' backward of each layer, the last layer first


def _be_late(grad: Tensor) -> Tensor:
    time.sleep(late.pop(0))
    return grad


def step(layers: nn.ModuleList, x: Tensor, stopwatch: Stopwatch, buffer: Buffer) -> dict[str, float]:
    """Run forward and backward, and return their times in milliseconds."""
    dist.barrier()
    cpu, waited, stopwatch.all, stopwatch.exposed = time.process_time(), sum(buffer.waited_ns()), 0.0, 0.0
    start = time.perf_counter()
    for layer in layers:
        x = x + layer(x)[0]
    forward = time.perf_counter() - start
    if late:
        dist.barrier()
    before = time.perf_counter()
    x.square().mean().backward()
    backward = time.perf_counter() - before
    return {
        "step_ms": 1e3 * (forward + backward),
        "backward_ms": 1e3 * backward,
        "exposed_ms": 1e3 * stopwatch.exposed,
        "in_ops_ms": 1e3 * stopwatch.all,
        "cpu_ms": 1e3 * (time.process_time() - cpu),
        "waited_ms": 1e-6 * (sum(buffer.waited_ns()) - waited),
    }


def compute_alone(layers: nn.ModuleList, x: Tensor) -> dict[str, float]:
    """Run a step without its exchanges, on rows that were dispatched before."""
    given = []
    for layer in layers:
        idx, weights, _ = layer.router(x.detach())
        rows, _, handle = layer.buffer.dispatch(x.detach(), idx, weights.detach())
        given.append((layer, rows.requires_grad_(), handle.offs))
    dist.barrier()
    start = time.perf_counter()
    for layer, rows, offs in given:
        layer.router(x)
        y = layer.experts(rows, offs)
        y.backward(rows.detach())
    return {"step_ms": 1e3 * (time.perf_counter() - start)}


def wire_alone(layers: nn.ModuleList, x: Tensor) -> dict[str, float]:
    """Run the exchanges of a step without its experts."""
    given = []
    for layer in layers:
        idx, weights, _ = layer.router(x.detach())
        given.append((layer, idx, weights.detach().requires_grad_()))
    dist.barrier()
    start = time.perf_counter()
    for layer, idx, weights in given:
        rows, recv_weights, handle = layer.buffer.dispatch(x, idx, weights)
        out = layer.buffer.combine(rows, recv_weights, handle)
        out.backward(out.detach())
    return {"step_ms": 1e3 * (time.perf_counter() - start)}


def wire_asleep(layers: nn.ModuleList, x: Tensor, pause: float) -> dict[str, float]:
    """Run a step's exchanges in halves, and sleep in between. It is twice the forward: backward moves the same rows."""
    x = x.detach()
    given = [(layer.buffer, *(t.detach() for t in layer.router(x)[:2])) for layer in layers]
    dist.barrier()
    cpu = time.process_time()
    for buffer, idx, weights in (*given, *given):
        pending = buffer.dispatch(x, idx, weights, wait=False)
        time.sleep(pause)
        rows, recv_weights, handle = pending.wait()
        pending = buffer.combine(rows, recv_weights, handle, wait=False)
        time.sleep(pause)
        pending.wait()
    return {"cpu_ms": 1e3 * (time.process_time() - cpu)}


def measure(late_ms: float, steps: int, chunks: list[int], layers: nn.ModuleList, x: Tensor) -> dict[str, Any]:
    """Run all variants in turns, and return what each step of each variant showed."""
    rank, size, draw = dist.get_rank(), dist.get_world_size(), random.Random(1)
    buffer = layers[0].buffer
    stopwatch = Stopwatch(buffer._engine)
    names = ["whole", "halves", *(f"chunks_{n}" for n in chunks), "compute", "wire", "asleep"]
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for i in range(steps + 2):
        who, where = draw.randrange(size), draw.randrange(len(layers))
        for name in sorted(seen, reverse=i % 2 == 0):
            number = int(name.removeprefix("chunks_")) if name.startswith("chunks_") else 1
            for layer in layers:
                layer.config = replace(layer.config, num_chunks=number)
            overlap.over_network = lambda _, on=name == "halves": on
            if name in ("compute", "wire", "asleep"):
                late.clear()
                pause = 1.5e-3 * seen["wire"][-1]["step_ms"] / (4 * len(layers)) if name == "asleep" else 0.0
                alone = {"compute": compute_alone, "wire": wire_alone, "asleep": partial(wire_asleep, pause=pause)}
                seen[name].append(alone[name](layers, x))
                continue
            late[:] = [late_ms / 1e3 if (rank, n) == (who, where) else 0.0 for n in range(len(layers))]
            if not late_ms or number > 1:
                late.clear()
            seen[name].append(step(layers, x, stopwatch, buffer))
    return {name: steps_of[2:] for name, steps_of in seen.items()}


@click.command()
@click.option("--late-ms", default=0.0, help="Delay of one rank in one layer of each step; not in chunks.")
@click.option("--steps", default=20, show_default=True)
@click.option("--chunks", default="2,4", show_default=True, help="Numbers of chunks to try.")
@click.option("--layers", "num_layers", default=4, show_default=True)
@click.option("--tokens", default=256, show_default=True)
@click.option("--hidden", default=512, show_default=True)
@click.option("--intermediate", default=1024, show_default=True)
def main(late_ms: float, steps: int, chunks: str, num_layers: int, tokens: int, hidden: int, intermediate: int) -> None:
    """Measure on this rank; rank 0 prints the means over ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    size = dist.get_world_size()
    sizes = dict(hidden=hidden, intermediate=intermediate, num_experts=4 * size, num_max_tokens_per_rank=tokens)
    layers = make_layers(num_layers, MoEConfig(num_topk=2, **sizes))
    for layer in layers:
        be_late_in(layer)
    x = torch.randn(tokens, hidden, requires_grad=True)
    seen = measure(late_ms, steps, [int(n) for n in chunks.split(",") if n], layers, x)
    result: dict[str, float] = {}
    for name, found in seen.items():
        for what in found[0]:
            each = [one[what] for one in found]
            mine = torch.tensor(median(each) if what in ("step_ms", "backward_ms") else fmean(each))
            dist.all_reduce(mine)
            result[f"{name}_{what}"] = round(float(mine) / size, 2)
    result["hidden_share"] = round(1 - result["halves_exposed_ms"] / result["whole_exposed_ms"], 3)
    if dist.get_rank() == 0:
        print(json.dumps(result))
    for layer in layers:
        layer.buffer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
