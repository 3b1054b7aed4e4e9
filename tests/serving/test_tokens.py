"""Greedy answers of ranks that share their experts are, token for token, those of one rank that has them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from serving.prompts import LENGTHS, PROMPTS, dealt, gathered, prompts, tokens

FP32 = dict(dtype="float32")
LATENT = dict(attention_backend="CPU_MLA", **FP32)  # vLLM selects kernels without fp32 on processors with AMX


@pytest.mark.parametrize(("family", "size"), [("qwen3_moe", 2), ("qwen3_moe", 4), ("mixtral", 2), ("uneven", 2)])
def test_of_ranks_that_end_at_different_steps(engines: Callable[..., Any], family: str, size: int) -> None:
    expected = tokens(engines(family, 1, **FP32).generate([PROMPTS], [LENGTHS])[0])
    answers = engines(family, size, **FP32).generate(dealt(PROMPTS, size), dealt(LENGTHS, size))
    assert tokens(gathered(answers)) == expected
    assert [len(answer) for answer in expected] == LENGTHS


def test_of_latent_attention_groups_and_a_shared_expert(engines: Callable[..., Any]) -> None:
    """Answers agree for latent attention, whose CPU results depend on the batch: one rank gets each rank's prompts."""
    stock = engines("deepseek_v3", 1, **LATENT)
    shares = list(zip(dealt(PROMPTS, 2), dealt(LENGTHS, 2), strict=True))
    expected = [tokens(gathered(stock.generate([prompts], [lengths]))) for prompts, lengths in shares]
    answers = engines("deepseek_v3", 2, **LATENT).generate(dealt(PROMPTS, 2), dealt(LENGTHS, 2))
    assert [tokens(gathered([answer])) for answer in answers] == expected


def test_of_one_short_request_beside_a_rank_that_goes_on(engines: Callable[..., Any]) -> None:
    shares, lengths = [PROMPTS[:1], PROMPTS[1:5]], [[3], [52, 40, 24, 16]]
    stock, ours = engines("qwen3_moe", 1, **FP32), engines("qwen3_moe", 2, **FP32)
    for asked in ((shares, lengths), (shares[::-1], lengths[::-1])):
        expected = [tokens(stock.generate([p], [n])[0]) for p, n in zip(*asked, strict=True)]
        assert [tokens(gathered([answer])) for answer in ours.generate(*asked)] == expected


def test_of_a_decoding_rank_beside_one_that_reads_a_long_prompt(engines: Callable[..., Any]) -> None:
    stock, ours = engines("qwen3_moe", 1, **FP32), engines("qwen3_moe", 2, **FP32)
    asked = [[prompts(7)[0]], prompts(500, 500, 500, 480, seed=1)], [[64], [2, 9, 1, 20]]
    expected = [tokens(stock.generate([p], [n])[0]) for p, n in zip(*asked, strict=True)]
    assert [tokens(gathered([answer])) for answer in ours.generate(*asked)] == expected


def test_with_prefix_caching_chunked_prefill_and_more_requests_than_slots(engines: Callable[..., Any]) -> None:
    settings = dict(
        enable_prefix_caching=True, enable_chunked_prefill=True, max_num_batched_tokens=64, max_num_seqs=2, **FP32
    )
    beginning = prompts(200, seed=2)[0]
    asked = [beginning + end for end in prompts(3, 90, 17, 41, 5, 60, 2, seed=3)]
    stock, ours = engines("qwen3_moe", 1, **settings), engines("qwen3_moe", 2, **settings)
    for _ in range(2):  # the second time from the cache
        expected = tokens(stock.generate([asked], [LENGTHS])[0])
        assert tokens(gathered(ours.generate(dealt(asked, 2), dealt(LENGTHS, 2)))) == expected


def test_of_a_rank_that_receives_no_row(engines: Callable[..., Any]) -> None:
    """Answers agree if all tokens choose the experts of the first rank."""
    shares, lengths = dealt(PROMPTS, 2), dealt(LENGTHS, 2)
    stock, ours = engines("one_sided", 1, **LATENT), engines("one_sided", 2, **LATENT)
    expected = [tokens(stock.generate([p], [n])[0]) for p, n in zip(shares, lengths, strict=True)]
    assert [tokens(gathered([answer])) for answer in ours.generate(shares, lengths)] == expected


def test_of_a_model_without_experts(engines: Callable[..., Any]) -> None:
    """vLLM runs a model without experts as without moe_rt."""
    expected = tokens(engines("llama", 1, **FP32).generate([PROMPTS], [LENGTHS])[0])
    answers = engines("llama", 1, environment=(("MOE_RT_VLLM", "1"),), **FP32).generate([PROMPTS], [LENGTHS])
    assert tokens(gathered(answers)) == expected


def test_compiled(engines: Callable[..., Any]) -> None:
    """Answers of a compiled model agree; Dynamo leaves dispatch and combine out of its graphs."""
    expected = tokens(engines("qwen3_moe", 2, **FP32).generate(dealt(PROMPTS, 2), dealt(LENGTHS, 2))[0])
    compiled = engines("qwen3_moe", 2, enforce_eager=False, environment=(("VLLM_CPU_CI_ENV", "1"),), **FP32)
    answers = compiled.generate(dealt(PROMPTS, 2), dealt(LENGTHS, 2))
    assert tokens(gathered(answers)[::2]) == expected
