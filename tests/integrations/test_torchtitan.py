"""The torchtitan dispatcher: the caller's side against a dense layer, and the override."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import HEAPS
from integrations import cases_torchtitan as cases
from support.forked_python import run_python
from support.ranks import Ranks, ThreadRanks

from moe_rt.errors import InvalidConfig
from moe_rt.integrations.torchtitan import MoeRtTokenDispatcher, token_dispatcher

MakeRanks = Callable[[str, int], Ranks]

# Parameters that torchtitan passes to its dispatchers' methods.
PARAMETERS = {
    "wire_meshes": ["self", "ep_mesh"],
    "init_buffer": ["self"],
    "dispatch": [
        "self",
        "x_TD",
        "topk_scores_TK",
        "topk_expert_ids_TK",
        "num_local_tokens_per_expert_E",
    ],
    "combine": ["self", "routed_output_RD", "metadata", "x_TD"],
}

# The part of torchtitan that the module uses, with its rules for Configs.
STAND_IN = {
    "torchtitan/__init__.py": "",
    "torchtitan/models/__init__.py": "",
    "torchtitan/models/common/__init__.py": "",
    "torchtitan/config/__init__.py": """
REGISTRY = {}
def override(*, target, fqns=None, description="", exact=False):
    def register(function):
        REGISTRY[f"{function.__module__}.{function.__name__}"] = (target, exact)
        return function
    return register
""",
    "torchtitan/models/common/token_dispatcher.py": """
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import ClassVar
class Configurable:
    @dataclass(kw_only=True, slots=True)
    class Config:
        _owner: ClassVar = None
        def build(self):
            return self._owner(config=replace(self))
    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "Config" in cls.__dict__:
            assert "__slots__" in cls.Config.__dict__ and all(f.kw_only for f in fields(cls.Config))
            cls.Config._owner = cls
class BaseEPTokenDispatcher(Configurable, ABC):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        num_experts: int
        top_k: int
    def __init__(self, config):
        self.num_experts, self.top_k, self.ep_mesh = config.num_experts, config.top_k, None
    def wire_meshes(self, *, ep_mesh):
        self.ep_mesh = ep_mesh
        self.init_buffer()
    def init_buffer(self): ...
    @abstractmethod
    def dispatch(self, *args): ...
    @abstractmethod
    def combine(self, *args): ...
class AllToAllTokenDispatcher(BaseEPTokenDispatcher):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseEPTokenDispatcher.Config): ...
""",
}
WITH_STAND_IN = """
import torch
from torchtitan.config import REGISTRY
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, BaseEPTokenDispatcher
from moe_rt import ThreadGroup
from moe_rt.integrations import torchtitan as adapter
target, exact = REGISTRY["moe_rt.integrations.torchtitan.token_dispatcher"]
assert target is AllToAllTokenDispatcher.Config and exact
config = adapter.token_dispatcher(target(num_experts=4, top_k=2), num_max_tokens_per_rank=8)
dispatcher = config.build()
assert isinstance(dispatcher, BaseEPTokenDispatcher) and type(dispatcher) is adapter.MoeRtTokenDispatcher
dispatcher.wire_meshes(ep_mesh=ThreadGroup.make(1)[0])
x, ids = torch.randn(5, 16), torch.tensor([[0, 1]] * 5)
rows, counts, metadata = dispatcher.dispatch(x, torch.full((5, 2), 0.5), ids, torch.tensor([5, 5, 0, 0]))
assert counts.tolist() == [5, 5, 0, 0]
assert torch.allclose(dispatcher.combine(rows, metadata, x), x)
print("done")
"""


@pytest.mark.parametrize("tokens", [[9], [9, 4], [0, 5], [0, 0], [7, 0, 3]], ids=str)
def test_equal_dense(make_ranks: MakeRanks, tokens: list[int]) -> None:
    """Outputs and gradients equal a dense layer's although rows without tokens hold NaN."""
    ranks = make_ranks("threads", len(tokens))
    for differences in ranks.run(cases.equal_dense, tokens, {"num_max_tokens_per_rank": 9}):
        assert max(differences.values()) < 1e-5, differences


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sizes_of_the_first_dispatch(make_ranks: MakeRanks, size: int) -> None:
    for differences in make_ranks("threads", size).run(cases.equal_dense, [8] * size, {}):
        assert max(differences.values()) < 1e-5, differences


def test_a_mesh_of_processes(make_ranks: MakeRanks) -> None:
    config = {"num_max_tokens_per_rank": 9, "hidden_dim": cases.HIDDEN, "dtype": "float32"}
    for differences in make_ranks("shm", 2).run(cases.equal_dense, [9, 4], config):
        assert max(differences.values()) < 1e-5, differences


def test_recomputed_activations(make_ranks: MakeRanks) -> None:
    for differences in make_ranks("threads", 2).run(cases.equal_dense, [8, 8], {}, True):
        assert max(differences.values()) < 1e-5, differences


def test_one_graph() -> None:
    [differences] = ThreadRanks(1).run(cases.compiled, 8)
    assert max(differences.values()) < 1e-6, differences


def test_layers_share_a_buffer(make_ranks: MakeRanks) -> None:
    assert make_ranks("threads", 2).run(cases.layers_share_a_buffer) == [(True, True)] * 2


def test_more_tokens_than_the_size_that_was_given(make_ranks: MakeRanks) -> None:
    config = {"num_max_tokens_per_rank": 4}
    for first, second, third in make_ranks("threads", 2).run(cases.refused, [[4, 4], [4, 5], [3, 4]], config):
        assert (first, third) == ("", "")
        assert second.startswith("TooManyTokens")
        assert re.search(r"5 tokens, expected at most (num_max_tokens_per_rank = )?4\b", second)


@pytest.mark.parametrize("heap", HEAPS)
def test_batches_that_outgrow_the_first(make_ranks: MakeRanks, heap: str) -> None:
    """Batches may outgrow the first, and ranks may have no tokens; both layers still share one buffer after it grew."""
    batches = [[0, 3], [4, 5], [70, 0], [0, 0], [300, 2]]
    for largest, shared in make_ranks(heap, 2).run(cases.outgrown, batches):
        assert largest < 1e-5
        assert shared


def test_beyond_capacity(make_ranks: MakeRanks) -> None:
    for (error,) in make_ranks("threads", 2).run(cases.refused, [[9, 9]], {"capacity_factor": 0.1}):
        assert error.startswith("CapacityOverflow")


def test_refused_configurations() -> None:
    config = MoeRtTokenDispatcher.Config(num_experts=4, top_k=2)
    with pytest.raises(InvalidConfig, match="ep_mesh: got None, expected a mesh"):
        MoeRtTokenDispatcher(config).wire_meshes(ep_mesh=None)
    with pytest.raises(InvalidConfig, match="dtype: got 'bf17', expected the name of a torch dtype"):
        token_dispatcher(config, dtype="bf17")


def test_experts_that_do_not_divide(make_ranks: MakeRanks) -> None:
    def case(group: Any) -> str:
        config = MoeRtTokenDispatcher.Config(
            num_experts=5, top_k=2, num_max_tokens_per_rank=4, hidden_dim=16, dtype="float32"
        )
        with pytest.raises(InvalidConfig) as caught:
            MoeRtTokenDispatcher(config).wire_meshes(ep_mesh=group)
        return str(caught.value)

    for message in make_ranks("threads", 2).run(case):
        assert message.startswith("num_experts: got 5, expected a multiple of the 2 ranks")


@pytest.mark.parametrize("method", PARAMETERS)
def test_parameters(method: str) -> None:
    assert list(inspect.signature(getattr(MoeRtTokenDispatcher, method)).parameters) == PARAMETERS[method]


def test_a_torchtitan_that_is_too_old(tmp_path: Path) -> None:
    (tmp_path / "torchtitan" / "models").mkdir(parents=True)
    for package in ("torchtitan", "torchtitan/models"):
        (tmp_path / package / "__init__.py").write_text("")
    done = run_python("-c", "import moe_rt.integrations.torchtitan", cwd=tmp_path)
    assert "MissingPackage: torchtitan: got one without torchtitan.models.common, expected 0.3 or later" in done.stderr


def test_override_of_a_stand_in(tmp_path: Path) -> None:
    """If torchtitan can be imported, the class is one of its dispatchers and the factory is registered."""
    for name, text in STAND_IN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = run_python("-c", WITH_STAND_IN, env=environment, cwd=tmp_path)
    assert done.stdout == "done\n", done.stderr
