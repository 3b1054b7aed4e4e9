"""vLLM over moe_rt: vLLM's expert kernels on two virtual ranks, and a served prompt if the machine has two GPUs.

Run as a module, this is the process that serves: its engines are forked before it has touched a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_rt.buffer.buffer import Buffer
from moe_rt.group.rendezvous import ThreadGroup
from moe_rt.group.thread_ranks import ThreadRanks, torch_device
from moe_rt.lab.check.steps import Check, Skipped
from moe_rt.lab.testing.programs import end_with_starter
from moe_rt.lab.testing.rounds import WrongOutput, read

RANKS = 2
T, HIDDEN, INTERMEDIATE, EXPERTS, TOPK = 64, 512, 256, 8, 2
TOLERANCE = 4e-2  # relative to the largest value: bf16 has 8 bits, and partial sums are rounded once more
STEPS = 16
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
APART = 0.1  # in log-probability, where an answer diverges from stock vLLM's: a near tie
ONE_GPU = "no prompt was served: vLLM's expert parallelism needs two GPUs"


def check(check: Check) -> None:
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("the package vllm is not installed")
    deadline = time.monotonic() + check.seconds
    with check.part("experts"):
        run_experts(check.device, seconds=check.seconds / 2)
        check.say(f"vLLM's experts on {RANKS} ranks equal those on one")
    with check.part("one prompt"):
        if torch.cuda.device_count() < RANKS:
            check.say(ONE_GPU)
        else:
            check.say(run_prompt("bfloat16", [False, True], deadline - time.monotonic()))


def run_experts(device: Any, *, seconds: float) -> None:
    """Run one layer of vLLM's contract on virtual ranks, against the same kernels on all tokens and experts.

    Raises:
        WrongOutput: they differ.
    """
    from vllm.model_executor.layers.fused_moe import fused_experts
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    from moe_rt.integrations.vllm.token_rows import TokenRowsPrepareAndFinalize

    where, per_rank = torch_device(device), EXPERTS // RANKS
    generator = torch.Generator("cpu").manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(torch.bfloat16).to(where)

    x, gate_up = normal(RANKS * T, HIDDEN), normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5
    down = normal(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
    weights, ids = normal(RANKS * T, EXPERTS).float().softmax(-1).topk(TOPK)
    # Run all tokens in one call, the maximum that a rank receives. This loads the kernels before a rank waits for
    # another.
    expected = fused_experts(x, gate_up, down, weights, ids).cpu().float()
    if where.type == "cuda":  # each rank has its own stream
        torch.cuda.synchronize(where)

    def work(group: ThreadGroup) -> Tensor:
        mine = slice(group.rank * T, (group.rank + 1) * T)
        here = slice(group.rank * per_rank, (group.rank + 1) * per_rank)
        numbers_here = torch.full((EXPERTS,), -1, dtype=torch.int32, device=where)
        numbers_here[here] = torch.arange(per_rank, dtype=torch.int32, device=where)
        sizes: dict[str, Any] = dict(num_max_tokens_per_rank=T, hidden=HIDDEN, num_topk=TOPK, num_experts=EXPERTS)
        with Buffer(group, layout="tokens", dtype=torch.bfloat16, timeout_s=20.0, **sizes) as buffer:
            layer = TokenRowsPrepareAndFinalize(buffer)
            quant = FusedMoEQuantConfig.make(None)
            rows, _, _, row_ids, row_weights = layer.prepare(
                x[mine], weights[mine], ids[mine], EXPERTS, numbers_here, False, quant
            )
            y = fused_experts(
                rows, gate_up[here], down[here], row_weights, row_ids, global_num_experts=EXPERTS,
                expert_map=numbers_here,
            )  # fmt: skip
            out = torch.empty_like(x[mine])
            layer.finalize(out, y, row_weights, row_ids, False, TopKWeightAndReduceNoOP())
            buffer.check()
            return read(out)

    got = torch.cat(ThreadRanks(RANKS, device).run(work, seconds=seconds)).float()
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise WrongOutput(f"experts: got a difference of {difference:.3g}, expected at most {TOLERANCE:g}")


def run_prompt(dtype: str, graphs: Sequence[bool], seconds: float) -> str:
    """Serve a prompt on ranks of vLLM in a separate process, and return the line to report if they answer as stock
    vLLM.

    Args:
        graphs: one run of the ranks per entry; True if vLLM compiles the model and captures its steps.

    Raises:
        RuntimeError: no answer within the time, or not stock vLLM's; the message holds the process's output.
    """
    from moe_rt.lab.check.child import run_command

    job = json.dumps({"dtype": dtype, "graphs": graphs})
    ended, log = run_command([sys.executable, "-m", "moe_rt.lab.check.serving", job], seconds, {})
    last = log.rstrip().rpartition("\n")[2]
    if not ended or not last.startswith(f"{RANKS} ranks"):
        why = "one that fails" if ended else f"no end within {seconds:.0f} s"
        raise RuntimeError(f"serving process: got {why}, expected an answer; it wrote\n{log[-4000:]}")
    return last


def answer_prompt(dtype: str, graphs: Sequence[bool]) -> str:
    """Run stock vLLM on one rank, then expert parallelism."""
    from moe_rt.lab.testing.serving import import_vllm
    from moe_rt.lab.testing.serving.engines import EngineRanks, Failed, parting
    from moe_rt.lab.testing.serving.models import save_apart

    import_vllm()

    def answers(model: Path, size: int, graph: bool) -> list[Any]:
        with EngineRanks(model, size, dtype=dtype, enforce_eager=not graph) as engines:
            found = engines.started()
            if not any(found):
                found = engines.generate([[PROMPT]] * size, [[STEPS]] * size, logprobs=20)
            for failed in found:
                if isinstance(failed, Failed):
                    raise failed
            return [answer[0] for answer in found]

    with tempfile.TemporaryDirectory(prefix="moe_rt_gpucheck_") as folder:
        model = save_apart("qwen3_moe", Path(folder, "model"))
        (stock,) = answers(model, 1, False)
        for graph in graphs:
            for rank, answer in enumerate(answers(model, RANKS, graph)):
                left = parting(stock, answer)
                if not left.same and not left.apart <= APART:
                    where = f"rank {rank}{', graphs' if graph else ''}, token {left.step}"
                    raise WrongOutput(f"{where}: got {answer['tokens']}, expected {stock['tokens']}")
    return f"{RANKS} ranks of vLLM served a prompt as one does{', also as graphs' if any(graphs) else ''}"


if __name__ == "__main__":
    end_with_starter()
    print(answer_prompt(**json.loads(sys.argv[1])), flush=True)
