"""sums="invariant": one rank and two give answers with the same bits, where vLLM's own operators compute alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from serving.prompts import LENGTHS, PROMPTS, dealt, gathered

from moe_rt.lab.testing.serving.engines import EngineRanks

ON = (("MOE_RT_VLLM", "1"),)
INVARIANT = {"additional_config": {"moe_rt": {"sums": "invariant"}}}
MORE = {"qwen3_moe": {}, "mixtral": {}, "deepseek_v3": {"attention_backend": "CPU_MLA"}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", MORE)
def test_tokens_and_log_probabilities(
    model: Callable[..., Path], tell: Callable[[str], None], family: str, dtype: str
) -> None:
    """One rank gets each rank's requests in turn, since vLLM's dense operators sum by the size of a batch."""
    place, engine = model(family), {"dtype": dtype, **MORE[family], **INVARIANT}
    shares = list(zip(dealt(PROMPTS, 2), dealt(LENGTHS, 2), strict=True))
    with EngineRanks(place, 1, ON, **engine) as one:
        assert one.started() == [None]
        expected = [gathered(one.generate([asked], [n], logprobs=3)) for asked, n in shares]
        together = gathered(one.generate([PROMPTS], [LENGTHS], logprobs=3))
    with EngineRanks(place, 2, ON, **engine) as two:
        assert two.started() == [None, None]
        answers = two.generate(dealt(PROMPTS, 2), dealt(LENGTHS, 2), logprobs=3)
    for wanted, got in zip(expected, answers, strict=True):
        assert gathered([got]) == wanted
    differ = sum(a != b for a, b in zip(together, gathered(answers), strict=True))
    tell(f"{family} {dtype}: of one rank's {len(PROMPTS)} requests in one batch, {differ} have other bits")
