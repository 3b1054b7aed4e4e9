"""Routes of Transformers models: recorded in one process or over moe_rt, replayed with weights from live logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.needs_transformers import require_transformers
from support.ranks import Ranks

require_transformers()

from integrations import cases_transformers_routes as cases  # noqa: E402
from integrations.transformers_models import FAMILIES, tiny_config  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import moe_rt.integrations.transformers  # noqa: E402, F401
from moe_rt import routes  # noqa: E402
from moe_rt.errors import InvalidInput  # noqa: E402

MakeRanks = Callable[[str, int], Ranks]


def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_config(family)).train()


@pytest.mark.parametrize("checkpointed", [None, True, False], ids=["", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_replayed_step_has_the_same_bits(family: str, checkpointed: bool | None) -> None:
    model = model_of(family)
    if checkpointed is not None:
        if not model.supports_gradient_checkpointing:
            pytest.skip("the family has no gradient checkpointing")
        model.gradient_checkpointing_enable({"use_reentrant": checkpointed})
    with routes.record(model) as recorded:
        expected = cases.step(model, 0)
    with routes.replay(recorded, model):
        assert all(torch.equal(a, b) for a, b in zip(cases.step(model, 0), expected, strict=True))
    cases.reroute(model)
    with routes.record(model) as live:
        cases.step(model, 0)
    with routes.replay(recorded, model), routes.record(model) as again:
        got = cases.step(model, 0)
    ids = recorded.routes().topk_idx
    assert torch.equal(again.routes().topk_idx, ids)
    assert not torch.equal(live.routes().topk_idx, ids)
    assert not torch.equal(got[0], expected[0])


def test_recorded_in_one_process_and_replayed_by_two(make_ranks: MakeRanks, tmp_path: Path) -> None:
    """Ranks that share the experts visit what one process recorded, and refuse another batch together."""
    model, path = model_of("qwen3_moe"), str(tmp_path / "routes.npz")
    model.save_pretrained(tmp_path / "model")
    batches = [cases.tokens(rank) for rank in range(2)]
    with torch.no_grad(), routes.record(model) as recorded:
        expected = model(torch.cat(batches), use_cache=False).logits.chunk(2)
    recorded.save(path)
    loaded = routes.load(path)
    for (got, ids, said), wanted, chosen in zip(
        make_ranks("shm", 2).run(cases.replayed_by_ranks, str(tmp_path / "model"), path),
        expected,
        loaded.topk_idx.chunk(2),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert torch.equal(ids, chosen)
        assert said == InvalidInput.__name__
