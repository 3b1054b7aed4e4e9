"""Workloads of the engines, and figures from the ranks' records of them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import eq
from statistics import median
from typing import Any

from moe_rt.lab.bench.results import percentiles
from moe_rt.lab.testing.serving.models import VOCABULARY

SHORT = 16  # tokens of a prompt that is to be decoded


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests of each rank.

    Attributes:
        sequences: number per rank.
        prompt: tokens of each prompt.
        steps: decoding steps after the prefill; 0 if the prefill is timed.
    """

    sequences: int
    prompt: int
    steps: int

    @classmethod
    def decode(cls, sequences: int, steps: int) -> Load:
        return cls(sequences=sequences, prompt=SHORT, steps=steps)

    @classmethod
    def prefill(cls, tokens: int) -> Load:
        return cls(sequences=1, prompt=tokens, steps=0)

    @property
    def most_at_once(self) -> int:
        """Tokens of a rank in its largest step."""
        return self.sequences * self.prompt

    @property
    def tokens(self) -> int:
        """Tokens of a rank within the measured time."""
        return self.sequences * self.steps if self.steps else self.most_at_once

    def in_words(self) -> str:
        if not self.steps:
            return f"prefill: {self.prompt} tokens a rank"
        sequences = "1 sequence" if self.sequences == 1 else f"{self.sequences} sequences"
        return f"decode: {sequences} a rank, {self.steps} steps"

    def prompts(self, ranks: int, seed: int) -> list[list[int]]:
        """Prompts of all ranks; each rank takes every ranks-th."""
        draw = random.Random(f"{seed} {self}")
        return [[draw.randrange(3, VOCABULARY) for _ in range(self.prompt)] for _ in range(ranks * self.sequences)]


# Ranks sum a token's experts in another order, which decides between two tokens that are almost equally likely. Rows
# sent to a wrong expert, or returned to a wrong token, change nearly all answers.
NEAR_TIES = 1 / 50
Turn = Sequence[Mapping[str, Any]]  # each rank's answer, see rank.answer


def summarise(load: Load, ranks: int, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Summarise a run: the figures of each contestant. `stock` is one rank that got the requests of all.

    Returns:
        tokens_per_s: of all ranks, median of the turns; `turns` has each turn's.
        layer_us: a layer's prepare and finalize with waits for other ranks; all ranks, layers and steps.
        adapter_us: the part of it outside of the buffer's ops.
        share: part of a rank's time spent in prepare and finalize, in percent.
        same: number of answers in the last turn that equal `stock`'s, token for token.
        errors: what is wrong with the other answers.
    """
    expected = _answers(turns["stock"][-1])
    results = []
    for name, of_turns in turns.items():
        rates = [ranks * load.tokens / _seconds(turn) for turn in of_turns]
        result: dict[str, Any] = {"contestant": name, "tokens_per_s": median(rates), "turns": rates}
        answers = [rank for turn in of_turns for rank in turn]
        layers = [ns / 1e3 for rank in answers for ns in rank["layers"]]
        if layers:
            result["layer_us"] = percentiles(layers)
            busy = sum(rank["span"][1] - rank["span"][0] for rank in answers) / 1e3
            result["share"] = 100 * sum(layers) / busy
        if any(rank["ops"] for rank in answers):
            pairs = [pair for rank in answers for pair in zip(rank["layers"], rank["ops"], strict=True)]
            result["adapter_us"] = percentiles([(whole - ops) / 1e3 for whole, ops in pairs])
        result["same"] = sum(map(eq, _answers(of_turns[-1]), expected))
        result["errors"] = _verdict(result["same"], len(expected))
        results.append(result)
    return {"load": {**asdict(load), "ranks": ranks}, "title": load.in_words(), "results": results}


def ratio(run: Mapping[str, Any], result: Mapping[str, Any]) -> float | None:
    """Time inside prepare and finalize as a multiple of moe_rt's. None for moe_rt, or if one of the two has no such
    time."""
    own: Any = next((r for r in run["results"] if r["contestant"] == "moe_rt"), {})
    if result is own or "layer_us" not in own or "layer_us" not in result:
        return None
    return float(result["layer_us"]["p50"] / own["layer_us"]["p50"])


def _seconds(turn: Turn) -> float:
    """Time from the first rank's start to the last rank's end; all ranks share the machine's clock."""
    return (max(rank["span"][1] for rank in turn) - min(rank["span"][0] for rank in turn)) / 1e9


def _answers(turn: Turn) -> list[Any]:
    """Answers in the order in which requests were dealt to ranks."""
    total = sum(len(rank["tokens"]) for rank in turn)
    return [turn[i % len(turn)]["tokens"][i // len(turn)] for i in range(total)]


def _verdict(same: int, total: int) -> list[str]:
    wrong = total - same
    return [f"{wrong} of {total} answers are not those of one rank of stock vLLM"] if wrong > NEAR_TIES * total else []
