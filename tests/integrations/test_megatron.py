"""The Megatron manager: the dispatcher's six steps against a dense layer, and ids from maps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations import cases_megatron as cases
from support.ranks import Ranks

from moe_rt import ThreadGroup
from moe_rt.errors import InvalidConfig, InvalidInput, MissingPackage
from moe_rt.integrations.megatron import MoeRtManager, install, replace_deepep

MakeRanks = Callable[[str, int], Ranks]

# Parameters that MoEFlexTokenDispatcher passes to its manager's methods and constructor.
PARAMETERS = {
    "__init__": ["self", "group", "num_local_experts", "router_topk", "num_experts", "config"],
    "setup_metadata": ["self", "routing_map", "probs"],
    "dispatch": ["self", "hidden_states", "async_finish", "allocate_on_comm_stream"],
    "combine": ["self", "hidden_states", "async_finish", "allocate_on_comm_stream"],
    "get_permuted_hidden_states_by_experts": ["self", "hidden_states"],
    "get_restored_hidden_states_by_experts": ["self", "hidden_states"],
    "get_number_of_tokens_per_expert": ["self"],
}
DISPATCHER_ATTRIBUTES = ("config", "tp_size", "tp_ep_group", "num_local_experts", "_comm_manager", "cudagraph_attrs")


@pytest.mark.parametrize("static_shapes", [True, False])
@pytest.mark.parametrize("tokens", [[9], [9, 4], [0, 5], [0, 0], [7, 0, 3]], ids=str)
def test_equal_dense(make_ranks: MakeRanks, tokens: list[int], static_shapes: bool) -> None:
    """Outputs and gradients equal a dense layer's although rows without tokens hold NaN."""
    options = {"num_max_tokens_per_rank": 9, "static_shapes": static_shapes}
    for differences in make_ranks("threads", len(tokens)).run(cases.equal_dense, tokens, options):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sizes_of_the_first_dispatch(make_ranks: MakeRanks, size: int) -> None:
    for differences in make_ranks("threads", size).run(cases.equal_dense, [8] * size, {}):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("size", [2, 4])
def test_tensor_parallel_experts(make_ranks: MakeRanks, size: int) -> None:
    """Both ranks of a pair get each token of an expert, and their halves of its output are added."""
    options = {"num_max_tokens_per_rank": 9}
    for differences in make_ranks("threads", size).run(cases.equal_dense, [9, 4, 0, 5][:size], options, 2):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("static_shapes", [True, False])
def test_processes(make_ranks: MakeRanks, static_shapes: bool) -> None:
    options = {"num_max_tokens_per_rank": 9, "static_shapes": static_shapes}
    for differences in make_ranks("shm", 2).run(cases.equal_dense, [9, 4], options):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("shape", [(3, 6), (3, 2, 3)])
def test_entries_of_a_map(shape: tuple[int, ...]) -> None:
    """Ids ascend, and an expert counts by the map, not by its probability."""
    routing_map = torch.tensor([[0, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0], [0] * 6]).bool()
    probs = torch.tensor([[0.9, 0.0, 0.9, 0.9, 0.3, 0.9], [0.9, 0.9, 0.9, 0.2, 0.9, 0.9], [0.9] * 6])
    manager = MoeRtManager(ThreadGroup.make(1)[0], 6, 2, 6)
    manager.setup_metadata(routing_map.view(shape), probs.view(shape))
    assert manager.token_indices is not None
    assert manager.token_indices.tolist() == [[1, 4], [3, -1], [-1, -1]]
    assert torch.equal(manager.token_probs, torch.tensor([[0.0, 0.3], [0.2, 0.0], [0.0, 0.0]]))


def test_too_many_experts_of_a_token(make_ranks: MakeRanks) -> None:
    for error, after in make_ranks("threads", 2).run(cases.too_many_experts):
        assert error.startswith("InvalidRouting")
        assert "rank 0 got expert id 6 in topk_idx" in error
        assert after == ""


def test_experts_that_do_not_fit(make_ranks: MakeRanks) -> None:
    def case(group: Any) -> str:
        manager = MoeRtManager(group, 2, 2, 6)
        manager.setup_metadata(torch.zeros(4, 6, dtype=torch.bool), torch.zeros(4, 6))
        with pytest.raises(InvalidConfig) as caught:
            manager.dispatch(torch.zeros(4, 16))
        return str(caught.value)

    for message in make_ranks("threads", 2).run(case):
        assert message.startswith("num_local_experts: got 2, expected 6 experts divided by 2 ranks")


@pytest.mark.parametrize(
    ("name", "value"), [("fp8", "hybrid"), ("moe_use_grouped_tensor", True), ("moe_router_padding_for_quantization", 1)]
)
def test_padded_experts_are_refused(name: str, value: object) -> None:
    config = SimpleNamespace(moe_router_topk=2, num_moe_experts=4, **{name: value})
    dispatcher = SimpleNamespace(config=config, tp_size=1, tp_ep_group=None, num_local_experts=4, _comm_manager=None)
    with pytest.raises(InvalidConfig, match=f"{name}: got {value}, expected it unset"):
        install(dispatcher)


def test_steps_out_of_order() -> None:
    manager = MoeRtManager(ThreadGroup.make(1)[0], 6, 2, 6)
    for step in (manager.dispatch, manager.get_permuted_hidden_states_by_experts, manager.combine):
        with pytest.raises(InvalidInput, match="before"):
            step(torch.zeros(4, 16))
    with pytest.raises(InvalidInput, match=r"routing_map: got \[4, 5\], expected 6 entries for each token"):
        manager.setup_metadata(torch.zeros(4, 5), torch.zeros(4, 6))


@pytest.mark.parametrize("method", PARAMETERS)
def test_parameters(method: str) -> None:
    parameters = inspect.signature(getattr(MoeRtManager, method)).parameters.values()
    assert [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY] == PARAMETERS[method]


def test_other_dispatchers_are_refused() -> None:
    """Megatron's other dispatchers are refused: they have no manager, and would silently ignore the request."""
    with pytest.raises(InvalidConfig, match=r"got SimpleNamespace, expected MoEFlexTokenDispatcher: .*replace_deepep"):
        install(SimpleNamespace(config=None, tp_size=1))


def test_without_megatron() -> None:
    with pytest.raises(MissingPackage, match="pip install megatron-core"):
        replace_deepep()


def test_a_budget_and_a_capacity_factor() -> None:
    config = SimpleNamespace(moe_expert_rank_capacity_factor=1.5)
    with pytest.raises(InvalidConfig, match=r"capacity_factor: got 2\.0, expected None with"):
        MoeRtManager(ThreadGroup.make(1)[0], 6, 2, 6, config, capacity_factor=2.0)


def test_installing_twice(make_ranks: MakeRanks) -> None:
    """The second manager replaces the first, before and after a step."""
    assert make_ranks("threads", 2).run(cases.installed_twice) == [True, True]
