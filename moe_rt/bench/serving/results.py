"""From what ranks noted to figures: tokens a second, times of a layer, and whether the answers are right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from operator import eq
from statistics import median
from typing import Any

from moe_rt.bench.results import percentiles
from moe_rt.bench.serving.loads import Load

# Ranks add a token's experts up in another order, which decides between two tokens that are as good as equally likely.
# What goes to a wrong expert, or comes back to a wrong token, changes nearly all answers.
NEAR_TIES = 1 / 50
Turn = Sequence[Mapping[str, Any]]  # what each rank answered, see rank.answer


def summarise(load: Load, ranks: int, turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """A run: for each contestant its figures. `stock` is one rank that has had the requests of all.

    Returns:
        tokens_per_s: of all ranks, median of the turns; `turns` has each of them.
        layer_us: inside prepare and finalize of a layer, waiting for other ranks included; of all ranks, layers and
            steps.
        adapter_us: of that, outside of the buffer's ops.
        share: the part of the time that a rank spent in prepare and finalize, in percent.
        same: answers of the last turn that are those of `stock`, token for token.
        errors: what is wrong with the others.
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
    """How many times moe_rt's time inside prepare and finalize; None for moe_rt, and where one of both has none."""
    own: Any = next((r for r in run["results"] if r["contestant"] == "moe_rt"), {})
    if result is own or "layer_us" not in own or "layer_us" not in result:
        return None
    return float(result["layer_us"]["p50"] / own["layer_us"]["p50"])


def _seconds(turn: Turn) -> float:
    """From the first rank's start to the last rank's end, on the one clock of the machine."""
    return (max(rank["span"][1] for rank in turn) - min(rank["span"][0] for rank in turn)) / 1e9


def _answers(turn: Turn) -> list[Any]:
    """In the order in which requests were dealt to ranks."""
    total = sum(len(rank["tokens"]) for rank in turn)
    return [turn[i % len(turn)]["tokens"][i // len(turn)] for i in range(total)]


def _verdict(same: int, total: int) -> list[str]:
    wrong = total - same
    return [f"{wrong} of {total} answers are not those of one rank of stock vLLM"] if wrong > NEAR_TIES * total else []
