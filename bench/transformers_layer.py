"""Time one Qwen3-MoE block, forward and backward, on two CPU ranks: moe_rt against Transformers' own all-to-all.

    python bench/transformers_layer.py [--tokens 2048 64] [--rounds 15] [--dtype bf16|fp32] [--malloc recycle|system]

Both run the same weights on the same tokens, and their outputs are compared first. A round times one and then the
other, and the ratio is the median over rounds, so that other load on the machine affects both. As in `moe-rt bench`,
malloc keeps freed memory unless it is left to the system: the weights' gradients have a size that malloc returns to the
system in some steps and not in others.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moe_rt.lab.bench.launch import RECYCLE

RANKS = 2
HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 1024, 512, 32, 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
IMPLEMENTATIONS = ("all_to_all", "moe_rt")


def make_block(implementation: str, mesh: DeviceMesh, dtype: torch.dtype) -> nn.Module:
    from transformers import Qwen3MoeConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    import moe_rt.integrations.transformers  # noqa: F401  registers "moe_rt"

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTERMEDIATE, num_experts=EXPERTS, num_experts_per_tok=TOPK
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    block = Qwen3MoeSparseMoeBlock(config).to(dtype)
    with torch.no_grad():
        for p in block.parameters():
            p.normal_(std=p.shape[-1] ** -0.5)
    plan = {f"experts.{name}": "grouped_gemm" for name, _ in block.experts.named_parameters()}
    plan["experts"] = "ep_dispatch_experts"
    apply_expert_parallelism(block, mesh["ep"], mesh["tp"], plan, ep_implementation=implementation)
    return block


def step(block: nn.Module, x: Tensor) -> Tensor:
    block.zero_grad()
    out: Tensor = block(x)
    out.backward(torch.ones_like(out))
    return out.detach()


def measure(num_tokens: int, rounds: int, dtype: torch.dtype, mesh: DeviceMesh) -> dict[str, list[float]]:
    """Milliseconds of every round on the slower rank."""
    blocks = {name: make_block(name, mesh, dtype) for name in IMPLEMENTATIONS}
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(1, num_tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    one, two = (step(block, x) for block in blocks.values())
    torch.testing.assert_close(one, two, atol=3e-2, rtol=3e-2)
    times: dict[str, list[float]] = {name: [] for name in blocks}
    repeats = max(1, 512 // num_tokens)
    for i in range(rounds + 2):
        for name, block in blocks.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                step(block, x)
            took = torch.tensor((time.perf_counter() - start) * 1e3 / repeats)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if i >= 2:  # the first rounds warm up
                times[name].append(float(took))
    return times


def serve(rank: int, store: str, num_tokens: int, rounds: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("ep", "tp"))
    times = measure(num_tokens, rounds, dtype, mesh)
    if rank == 0:
        print(report(num_tokens, times), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def report(num_tokens: int, times: dict[str, list[float]]) -> str:
    medians: dict[str, Any] = {name: statistics.median(t) for name, t in times.items()}
    ratios = sorted(a / b for a, b in zip(times["all_to_all"], times["moe_rt"], strict=True))
    spread = f"{ratios[len(ratios) // 4]:.2f} to {ratios[-1 - len(ratios) // 4]:.2f} in half of the rounds"
    texts = [f"{name} {ms:.2f} ms" for name, ms in medians.items()]
    return f"T = {num_tokens}: {', '.join(texts)}; ratio {statistics.median(ratios):.2f} ({spread})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 64], help="tokens of each rank")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="bf16 is slow where the CPU has no AVX-512")
    parser.add_argument("--malloc", choices=("recycle", "system"), default="recycle")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.update(RECYCLE if options.malloc == "recycle" else {})
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transformers.models.qwen3_moe.modeling_qwen3_moe"])  # this import takes seconds
    for num_tokens in options.tokens:  # in fresh processes, so that no size reuses the memory of another
        with tempfile.TemporaryDirectory() as directory:
            arguments = (f"{directory}/store", num_tokens, options.rounds, DTYPES[options.dtype])
            ranks = [context.Process(target=serve, args=(r, *arguments)) for r in range(RANKS)]
            for rank in ranks:
                rank.start()
            for rank in ranks:
                rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(1)


if __name__ == "__main__":
    main()
