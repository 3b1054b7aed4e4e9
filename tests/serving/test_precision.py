"""In bf16 a token's sums are rounded once more on their way, so that near ties may fall the other way."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median
from typing import Any

from asked import LENGTHS, PROMPTS, dealt, gathered, prompts

from moe_rt.testing.serving.answers import parting

Tell = Callable[[str], None]
BF16 = dict(dtype="bfloat16")
NEAR = 0.05  # of a log-probability


def test_the_first_other_token_is_as_likely(engines: Callable[..., Any], tell: Tell) -> None:
    """For most requests: where an expert is chosen by a hair, rounding may choose another one."""
    stock, ours = engines("qwen3_moe", 1, **BF16), engines("qwen3_moe", 2, **BF16)
    expected = gathered(stock.generate([PROMPTS], [LENGTHS], logprobs=20))
    answers = gathered(ours.generate(dealt(PROMPTS, 2), dealt(LENGTHS, 2), logprobs=20))
    partings = [parting(wanted, got) for wanted, got in zip(expected, answers, strict=True)]
    steps = sorted(left.step for left in partings if not left.same)
    of_last = [left.apart for left in partings]
    tell(f"bf16: {len(steps)} of {len(of_last)} requests differ, after {steps} tokens")
    tell(f"log-probabilities there, or of the last: {', '.join(f'{d:.4f}' for d in sorted(of_last))} apart")
    assert median(of_last) < NEAR
    assert fmean(of_last) < NEAR


def test_a_long_text_is_as_likely(engines: Callable[..., Any], tell: Tell) -> None:
    stock, ours = engines("qwen3_moe", 1, **BF16), engines("qwen3_moe", 2, **BF16)
    texts = prompts(200, 200, seed=4)
    expected = gathered(stock.generate([texts], [[1, 1]], prompt_logprobs=0))
    answers = gathered(ours.generate(dealt(texts, 2), [[1], [1]], prompt_logprobs=0))
    for wanted, got in zip(expected, answers, strict=True):
        differences = [abs(a - b) for a, b in zip(wanted["of_prompt"], got["of_prompt"], strict=True)]
        assert len(differences) == 199
        tell(f"bf16: log-probabilities of {len(differences)} tokens differ by {fmean(differences):.4f} in the mean")
        assert fmean(differences) < NEAR
