"""A layer with a user's router, experts and shared expert: equal to a dense loop, or refused on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import HEAPS
from layer import cases_own_modules as cases
from layer.cases_layer import EXPERTS, HIDDEN, config
from support.ranks import Ranks
from torch import nn

from moe_rt import Buffer, MoELayer, ThreadGroup
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.nn.experts import Experts, SharedExpert
from moe_rt.nn.router import Router

MakeRanks = Callable[[str, int], Ranks]


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize("num_tokens", [[10], [7, 10]], ids=str)
def test_equals_a_dense_loop(make_ranks: MakeRanks, heap: str, num_tokens: list[int]) -> None:
    results = make_ranks(heap, len(num_tokens)).run(cases.with_siblings, num_tokens)
    whole = cases.dense(num_tokens)
    close = dict(rtol=1e-4, atol=1e-5)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["out"], whole["outs"][rank], **close)
        torch.testing.assert_close(result["x"], whole["xs"][rank], **close)
        assert int(result["load"].sum()) == num_tokens[rank] * 3
        assert not torch.equal(result["replayed"], result["out"])
    experts = torch.cat([result["experts.weight"] for result in results])
    torch.testing.assert_close(experts, whole["experts.weight"], **close)
    for name in ("router.vectors", "shared_expert.weight"):
        torch.testing.assert_close(sum(result[name] for result in results), whole[name], **close)


def test_prepared_as_the_layers_own(make_ranks: MakeRanks) -> None:
    for found, by_hand, prepared in make_ranks("shm", 2).run(cases.made_ready):
        assert found
        torch.testing.assert_close(prepared, by_hand)


@pytest.mark.parametrize("heap", HEAPS)
@pytest.mark.parametrize(
    ("which", "message"),
    [
        ({"router": cases.CosineRouter(num_experts=5)}, "router.num_experts: got 5, expected 7 as in the config"),
        ({"router": cases.CosineRouter(num_topk=2)}, "router.num_topk: got 2, expected 3 as in the config"),
        ({"router": nn.Linear(HIDDEN, EXPERTS)}, "router.num_experts: got None, expected 7"),
        ({"router": "cosine"}, "router: got str, expected a torch.nn.modules.module.Module"),
        ({"experts": nn.Linear(4, 4)}, "experts: got Linear, expected a moe_rt.nn.spread.SpreadModule"),
        ({"experts": cases.LinearExperts([0, 1])}, r"experts.weight: got \[2, 16, 16\], expected \[4, ...\]"),
        ({"experts": cases.Nested()}, "experts.gate.weight: got a parameter of a child"),
        ({"experts": cases.SpreadModule()}, "experts: got no parameter of its own"),
        ({"shared_expert": nn.Linear(4, 4, device="meta")}, "shared_expert.weight: got a parameter on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused_on_every_rank(
    make_ranks: MakeRanks, heap: str, which: dict[str, Any], message: str
) -> None:
    for outcome in make_ranks(heap, 2).outcomes(cases.refused, which, 0):
        with pytest.raises(InvalidConfig, match=message):
            raise outcome


def test_one_shared_expert() -> None:
    with pytest.raises(InvalidConfig, match="shared_intermediate: got 8, expected None"):
        MoELayer(config(shared_intermediate=8), shared_expert=nn.Linear(HIDDEN, HIDDEN))


def test_given_modules_stay_as_they_are() -> None:
    """Neither are weights of modules that the layer did not make drawn anew, nor their sums ordered by rows."""
    options = config(sums="invariant")
    given = {
        "router": Router(HIDDEN, config=options),
        "experts": Experts(EXPERTS, HIDDEN, 8, options),
        "shared_expert": SharedExpert(HIDDEN, 8, options),
    }
    for module in given.values():
        for p in module.parameters():
            nn.init.ones_(p)
    layer = MoELayer(options, ThreadGroup.make(1)[0], **given)
    layer.reset_parameters()
    for module in given.values():
        assert not module.row_wise
        assert all(bool((p == 1).all()) for p in module.parameters())


def test_a_refusal_is_of_the_layer_on_the_buffer_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers match a refusal with their op by its tag, in the buffer that the call is given."""
    group = ThreadGroup.make(1)[0]
    MoELayer(config(), group)
    layer = MoELayer(config(), group)
    given = Buffer(group, **config().buffer_sizes())
    refusals: list[Any] = []

    def refuse(buffer: Buffer, error: InvalidInput, **options: Any) -> None:
        refusals.append((buffer, options))
        raise error

    monkeypatch.setattr(Buffer, "refuse", refuse)
    with pytest.raises(InvalidInput):
        layer(torch.ones(2, HIDDEN), buffer=given, mask=torch.ones(3, dtype=torch.bool))
    assert refusals == [(given, {"tag": layer.tag})]
    assert layer.tag > 0
