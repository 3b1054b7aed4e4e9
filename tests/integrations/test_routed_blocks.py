"""Routes of blocks whose router calls torch.topk: which call is recorded or replaced, and what is no such block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_rt import routes
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.integrations.routed_blocks import EXCHANGE, RoutedBlock, find, install
from moe_rt.routes.session import FINDERS

EXPERTS, TOPK, TOKENS = 5, 2, 6


@pytest.fixture(autouse=True)
def installed() -> Any:
    there = find in FINDERS
    for _ in range(2):
        install()
    assert FINDERS.count(find) == 1
    yield
    if not there:
        FINDERS.remove(find)


class Block(nn.Module):
    """A router that calls topk in one of several ways, and experts that sum what they weigh."""

    def __init__(self, how: str = "function") -> None:
        super().__init__()
        self.experts = nn.Identity()
        self.experts.num_experts = EXPERTS  # type: ignore[assignment]
        self.gate = nn.Linear(4, EXPERTS, bias=False)
        self.top_k, self.how = TOPK, how

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x)
        scores.topk(1)  # of another number of experts
        scores[..., :3].topk(TOPK)  # of some experts
        if self.how == "method":
            values, idx = scores.topk(TOPK)
        elif self.how == "keywords":
            values, idx = torch.topk(input=scores, k=TOPK, dim=-1)
        else:
            values, idx = torch.topk(scores, TOPK, -1)
        again = torch.topk(scores, TOPK).indices  # a second call sees the live scores
        assert torch.equal(again, torch.sort(scores, -1, descending=True).indices[..., :TOPK])
        return values, idx


def reroute(block: Block) -> None:
    with torch.no_grad():
        block.gate.weight.neg_()


@pytest.mark.parametrize("shape", [(TOKENS, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("how", ["function", "method", "keywords"])
def test_the_first_choice_of_experts_is_recorded_and_replayed(how: str, shape: tuple[int, ...]) -> None:
    """A replay has the recorded experts with the live scores; outside of sessions nothing changes."""
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"block": Block(how)}), torch.randn(shape)
    block: Any = model["block"]
    with routes.record(model) as recorded:
        _, idx = block(x)
    assert recorded.routes().topk_idx[:, 0].tolist() == idx.view(-1, TOPK).tolist()
    assert recorded.names == ("block",)
    reroute(block)
    live = block(x)
    assert not torch.equal(live[1], idx)
    with routes.replay(recorded, model), routes.record(model) as again:
        replayed = block(x)
    assert torch.equal(replayed[1], idx)
    assert torch.equal(replayed[0], block.gate(x).gather(-1, idx))
    assert torch.equal(again.routes().topk_idx, recorded.routes().topk_idx)
    assert torch.equal(block(x)[1], live[1])
    assert len(recorded.routes().topk_idx) == TOKENS


def test_tokens_without_recorded_experts_choose_their_own() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"block": Block()}), torch.randn(TOKENS, 4)
    with routes.record(model) as recorded:
        _, idx = model["block"](x)
    reroute(model["block"])  # type: ignore[arg-type]
    _, live = model["block"](x)
    numbers = torch.tensor([0, -1, 2, -1, 4, 5])
    with routes.replay(recorded, model, tokens=[numbers]):
        _, replayed = model["block"](x)
    assert torch.equal(replayed, torch.where(numbers[:, None] < 0, live, idx))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recomputation_after_a_replay_has_its_experts(reentrant: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"block": Block()}), torch.randn(TOKENS, 4, requires_grad=True)
    block: Any = model["block"]
    with routes.record(model) as recorded:
        _, idx = block(x)
    reroute(block)
    assert not torch.equal(block(x)[1], idx)
    with routes.replay(recorded, model):
        values, _ = checkpoint(block, x, use_reentrant=reentrant)
    values.sum().backward()
    torch.testing.assert_close(x.grad, block.gate.weight[idx].sum(1))


def test_an_error_in_a_block_ends_its_mode() -> None:
    class Fails(Block):
        fails = True

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            if self.fails:
                raise RuntimeError("wrong")
            return super().forward(x)

    model, x = nn.ModuleDict({"block": Fails()}), torch.randn(TOKENS, 4)
    block: Any = model["block"]
    with routes.record(model) as recorded:
        with pytest.raises(RuntimeError, match="wrong"):
            block(x)
        torch.topk(torch.randn(TOKENS, EXPERTS), TOPK)  # outside of the block
        block.fails = False
        _, idx = block(x)
    assert recorded.routes().topk_idx[:, 0].tolist() == idx.tolist()


@pytest.mark.parametrize("replays", [False, True])
def test_a_compiled_block_is_refused(monkeypatch: pytest.MonkeyPatch, replays: bool) -> None:
    model, x = nn.ModuleDict({"block": Block()}), torch.randn(TOKENS, 4)
    with routes.record(model) as recorded:
        model["block"](x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model["block"](x)  # neither recorded nor replayed
    session = routes.replay(recorded, model) if replays else routes.record(model)
    with session, pytest.raises(InvalidConfig) as caught:
        model["block"](x)
    text = "routes: got a compiled Block whose routes are recorded or replayed, expected an eager one ("
    assert str(caught.value).startswith(text)


def module_of(**attributes: Any) -> Any:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize("name", ["top_k", "num_experts_per_tok", "num_experts_per_token", "moe_topk"])
def test_where_the_number_of_experts_of_a_token_is_found(name: str) -> None:
    """The router has it, or the block, or the experts' config, in this order; the experts count themselves."""

    def block(**places: Any) -> Any:
        experts = module_of(num_experts=EXPERTS, config=SimpleNamespace(**{name: places.get("config")}))
        return module_of(
            experts=experts, router=module_of(**{name: places.get("router")}), **{name: places.get("block")}
        )

    for places, number in (({"router": 2, "block": 3, "config": 4}, 2), ({"block": 3, "config": 4}, 3),
                           ({"config": 4}, 4)):  # fmt: skip
        found = find(block(**places))
        assert found is not None
        assert found.routes_sizes() == (EXPERTS, number, None)
        assert (found.routing, found.routes_id) == (0, 0)
    assert find(block(router=2.0, block="two")) is None


def test_modules_that_are_no_blocks() -> None:
    assert find(module_of(top_k=2)) is None
    assert find(module_of(experts=module_of(), top_k=2)) is None
    assert find(module_of(experts=module_of(num_experts="5"), top_k=2)) is None
    assert find(module_of(experts=module_of(num_experts=5))) is None
    assert find(module_of(experts=module_of(num_experts=5, top_k=2))) is None  # experts are no router
    found = find(block := module_of(experts=module_of(num_experts=5), top_k=2))
    assert isinstance(found, RoutedBlock)
    assert find(block) is found


def test_experts_over_moe_rt() -> None:
    """Their exchange counts the experts of all ranks, has the mesh, and refuses for every rank."""
    refused: list[Exception] = []
    exchange = SimpleNamespace(num_experts=8, ep_mesh="mesh", refuse=refused.append)
    block = module_of(experts=module_of(num_experts=4, **{EXCHANGE: exchange}), top_k=2)
    found = find(block)
    assert found is not None
    assert found.routes_sizes() == (8, 2, "mesh")
    error = InvalidInput("tokens: got 3")
    found.refuse_routes(error)
    assert refused == [error]
    alone = find(module_of(experts=module_of(num_experts=4), top_k=2))
    assert alone is not None
    with pytest.raises(InvalidInput) as caught:
        alone.refuse_routes(error)
    assert caught.value is error
