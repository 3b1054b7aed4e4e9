"""sums="invariant": one rank and two give a batch the same bits, tokens and log-probabilities, also in bf16.

One rank gets the batch of each of two ranks in turn. All requests in one batch may get other bits than in two, since
vLLM's own products, of attention for example, depend on their number of rows on some processors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving.prompts import LENGTHS, PROMPTS, dealt, gathered
from serving.test_rotary import rotate_by_torch

from moe_rt.lab.testing.serving.engines import EngineRanks

ON = (("MOE_RT_VLLM", "1"),)
INVARIANT = {"additional_config": {"moe_rt": {"sums": "invariant"}}}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {}, "mixtral": {}, "uneven": {}, "deepseek_v3": {"attention_backend": "CPU_MLA"},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_batch_on_one_rank_and_on_two(
    model: Callable[..., Path], tell: Callable[[str], None], family: str, dtype: str
) -> None:
    engine = {"dtype": dtype, **FAMILIES[family], **INVARIANT}
    shares = list(zip(dealt(PROMPTS, 2), dealt(LENGTHS, 2), strict=True))
    with EngineRanks(model(family), 1, ON, rotate_by_torch, **engine) as one:
        assert one.started() == [None]
        by_rank = [gathered(one.generate([asked], [n], logprobs=3)) for asked, n in shares]
        together = gathered(one.generate([PROMPTS], [LENGTHS], logprobs=3))
    with EngineRanks(model(family), 2, ON, rotate_by_torch, **engine) as two:
        assert two.started() == [None, None]
        answers = two.generate(dealt(PROMPTS, 2), dealt(LENGTHS, 2), logprobs=3)
    assert [gathered([answer]) for answer in answers] == by_rank
    differ = sum(a != b for a, b in zip(together, gathered(answers), strict=True))
    tell(f"{family}, {dtype}: {differ} of {len(PROMPTS)} requests have other bits on one rank in one batch")
