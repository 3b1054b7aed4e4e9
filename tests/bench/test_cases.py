"""Named cases are what their names say, and every size of a case reaches what is derived from it."""

from __future__ import annotations

import re

import pytest
import torch

from moe_rt.lab.bench.cases import CASES, DTYPES, NAMED, OPS, Case

# The models' published configurations have these: hidden size, experts a token, experts, inner size of an expert.
MODELS = {
    "deepseek-v3": (7168, 8, 256, 2048),
    "qwen3-moe": (2048, 8, 128, 768),
    "mixtral": (4096, 2, 8, 14336),
    "gpt-oss": (2880, 4, 128, 2880),
}
SMALL_EXPERTS = {"deepseek-v3": 64, "qwen3-moe": 32, "mixtral": 8, "gpt-oss": 32}
TOKENS = {("prefill", False): 4096, ("decode", False): 128, ("prefill", True): 512, ("decode", True): 16}


@pytest.mark.parametrize("case", NAMED, ids=lambda case: case.name)
def test_a_name_says_the_sizes(case: Case) -> None:
    assert CASES[case.name] is case
    assert (case.dtype, case.routing, case.heap, case.nodes, case.rate) == ("bf16", "uniform", "shm", 0, "")
    if sizes := re.fullmatch(r"(\w+)-(\d+)x(\d+)x(\d+)", case.name):
        op, *numbers = sizes.groups()
        assert [case.ranks, case.tokens, case.hidden] == [int(number) for number in numbers]
        assert case.op == (op if op in OPS else "pair")
        assert (case.topk, case.experts) == ((8, 64) if case.hidden == 7168 else (4, 16))
        return
    if case.name == "layer-qwen3-small":
        assert (case.op, case.ranks, case.tokens) == ("layer", 2, 2048)
        assert (case.hidden, case.topk, case.experts, case.intermediate) == (1024, 4, 32, 512)
        return
    model = next(name for name in MODELS if case.name.startswith(name))
    small, phase = case.name.endswith("-small"), "decode" if "decode" in case.name else "prefill"
    hidden, topk, experts, intermediate = MODELS[model]
    assert (case.hidden, case.topk, case.intermediate) == (hidden, topk, intermediate)
    assert case.experts == (SMALL_EXPERTS[model] if small else experts)
    assert (case.op, case.ranks, case.tokens) == ("pair", 2 if small else 8, TOKENS[phase, small])


def test_no_two_cases_share_a_name() -> None:
    assert len(CASES) == len(NAMED)


def test_sizes_that_follow() -> None:
    case = Case(ranks=4, tokens=6, hidden=10, topk=3, experts=7, dtype="fp32", heap="ucx", nodes=2)
    assert case.row_bytes == 40
    assert case.local_experts == [2, 2, 2, 1]
    assert case.most_received_bytes == 4 * 6 * 2 * 40, "at most the local experts of each token"
    assert case.changed(topk=1).most_received_bytes == 4 * 6 * 40
    assert case.topology.nodes == (0, 0, 1, 1)
    assert Case(ranks=4).topology.nodes == (0, 0, 0, 0)
    assert {name: torch.zeros(1, dtype=dtype).element_size() for name, dtype in DTYPES.items()} == {
        "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8,
    }  # fmt: skip


def test_titles_and_words() -> None:
    case = CASES["layer-qwen3-small"]
    sizes = "R=2 T=2048 H=1024 K=4 E=32 F=512"
    assert case.title() == f"layer-qwen3-small: layer, {sizes}, bf16, uniform routing, shm heap"
    changed = case.changed(tokens=1, heap="ucx", nodes=2, rate="1gbit")
    assert changed.title() == "layer, R=2 T=1 H=1024 K=4 E=32 F=512 on 2 nodes, 1gbit, bf16, uniform routing, ucx heap"
    assert changed.changed(rate="").sizes().endswith("on 2 nodes, no limit")
    assert changed.in_words() == (
        "a mixture-of-experts layer of 1 token on each of 2 ranks on 2 nodes, 1024 bf16 elements a token,"
    )
    assert Case(op="dispatch").in_words().startswith("dispatch of 512 tokens on each of 2 ranks, 2048 bf16")
    assert Case().in_words().startswith("dispatch and combine of")
    assert "F=" not in Case().sizes()
    assert case.changed() is case
