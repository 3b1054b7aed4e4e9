"""SGLang settings that moe_rt does not support are refused when a layer is made, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang_stand_ins  # noqa: F401
import torch
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from sglang.srt.server_args import ServerArgs

from moe_rt.errors import InvalidConfig
from moe_rt.integrations.sglang import settings

PARALLEL = dict(tp_size=2, moe_ep_size=2, attn_dp_size=2)
CONFIG = dict(num_fused_shared_experts=0, apply_router_weight_on_input=False)


class Quantised(UnquantizedFusedMoEMethod):
    pass


def refused(
    monkeypatch: pytest.MonkeyPatch,
    arguments: dict[str, Any],
    parallel: dict[str, Any],
    config: dict[str, Any],
    method: type = UnquantizedFusedMoEMethod,
    device: str = "cpu",
    model: str = "Qwen3MoeForCausalLM",
) -> str:
    """Return the error of a layer with these settings, or an empty text."""
    group = SimpleNamespace(device=torch.device(device))
    here = SimpleNamespace(**(PARALLEL | parallel), moe_ep_group=group)
    given = ServerArgs(model_path="any", **arguments)
    monkeypatch.setattr(settings, "get_parallel", lambda: here)
    monkeypatch.setattr(settings, "get_server_args", lambda: given)
    hf_config = SimpleNamespace(architectures=[model])
    monkeypatch.setattr(settings, "process_model_config", lambda: SimpleNamespace(hf_config=hf_config))
    try:
        settings.refuse_unserved(SimpleNamespace(**(CONFIG | config)), object.__new__(method))
    except InvalidConfig as error:
        return str(error)
    return ""


def test_what_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(monkeypatch, {}, {}, {}) == ""
    assert refused(monkeypatch, {}, dict.fromkeys(PARALLEL, 1), {"num_fused_shared_experts": None}) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        {"enable_lora": True},
        {"lora_paths": ["some"]},
        {"enable_eplb": True},
        {"ep_num_redundant_experts": 2},
        {"init_expert_location": "some.json"},
        {"elastic_ep_backend": "mooncake"},
        {"enable_two_batch_overlap": True},
        {"enable_single_batch_overlap": True},
        {"enable_torch_compile": True},
        {"speculative_algorithm": "EAGLE"},
        {"pp_size": 2},
    ],
    ids=str,
)
def test_arguments_that_are_refused(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> None:
    ((name, value),) = arguments.items()
    said = refused(monkeypatch, arguments, {}, {})
    assert said.startswith(f"sglang: got {name}={value!r}, expected ")
    assert "unset MOE_RT_SGLANG" in said


@pytest.mark.parametrize(
    ("says", "given"),
    [
        ("ep_size=1 with tp_size=2", dict(parallel={"moe_ep_size": 1})),
        ("dp_size=1 with tp_size=2", dict(parallel={"attn_dp_size": 1})),
        ("device='cuda'", dict(device="cuda")),
        ("shared experts among the routed ones", dict(config={"num_fused_shared_experts": 1})),
        ("weighs tokens before its experts", dict(config={"apply_router_weight_on_input": True})),
        ("a model MixtralForCausalLM", dict(model="MixtralForCausalLM")),
        ("experts of Quantised", dict(method=Quantised)),
    ],
)
def test_layers_that_are_refused(monkeypatch: pytest.MonkeyPatch, says: str, given: dict[str, Any]) -> None:
    said = refused(monkeypatch, **{"arguments": {}, "parallel": {}, "config": {}, **given})
    assert says in said
    assert "expected" in said
