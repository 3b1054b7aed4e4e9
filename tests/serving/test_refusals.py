"""Unsupported settings are refused at start, by name: every row of the page, and real servers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from serving.fake_platform import Platform
from vllm.config import parallel
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from moe_rt.errors import InvalidConfig
from moe_rt.integrations.vllm import refusals
from moe_rt.lab.testing.channel import Channel
from moe_rt.lab.testing.process_ranks import ProcessRanks
from moe_rt.lab.testing.serving.server import Server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "serving.md"
HANG_S = 600.0
TWO: dict[str, Any] = dict(data_parallel_size=2, enable_expert_parallel=True)
BACKENDS = [name for name in get_args(parallel.All2AllBackend) if name != refusals.BACKEND]
# The rows of "What is refused", by words that they contain: arguments, and the expected text of each.
ROWS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "without `--enable-expert-parallel`": [
        ({"data_parallel_size": 2}, "2 data-parallel ranks without --enable-expert-parallel"),
    ],
    "`--tensor-parallel-size` above 1": [({**TWO, "tensor_parallel_size": 2}, "--tensor-parallel-size 2")],
    "`--all2all-backend` other": [({**TWO, "all2all_backend": name}, f"--all2all-backend {name}") for name in BACKENDS],
    "`--enable-lora`, `--enable-eplb`, `--enable-dbo`": [
        ({**TWO, "enable_lora": True}, "--enable-lora"),
        ({**TWO, "enable_eplb": True}, "--enable-eplb"),
        ({**TWO, "enable_dbo": True}, "--enable-dbo or --ubatch-size"),
        ({**TWO, "ubatch_size": 2}, "--enable-dbo or --ubatch-size"),
        ({**TWO, "enable_elastic_ep": True, "enable_eplb": True}, "--enable-elastic-ep"),
        ({**TWO, "prefill_context_parallel_size": 2}, "--prefill-context-parallel-size 2"),
        ({**TWO, "pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
    ],
    "`--enable-fault-tolerance`": [({**TWO, "enable_fault_tolerance": True}, "--enable-fault-tolerance")],
    "fewer experts than ranks": [({**TWO, "data_parallel_size": 9}, "8 experts on 9 ranks")],
    "an option of `moe_rt`": [({**TWO, "additional_config": {"moe_rt": {"timeout": 1}}}, "additional_config moe_rt")],
}
# The tests of platforms and layers below, and test_prepare_finalize.py, check these.
OF_LAYERS = ["a platform that is neither", "checkpoints whose tokens are quantised"]
# Settings that vLLM and moe_rt accept.
SERVED = [
    TWO,
    {},
    {"enable_expert_parallel": True},
    {**TWO, "data_parallel_size": 8},
    {"tensor_parallel_size": 2},
    {**TWO, "additional_config": {"moe_rt": {"timeout_s": 1}}},
]


@pytest.fixture(scope="module")
def asked(model: Callable[[str], Path]) -> Callable[..., str]:
    """Return asked(family, **arguments): the error from vLLM's making of its configuration, or an empty text.

    Another process makes it, since vLLM then changes the environment.
    """

    def ask(family: str, **arguments: Any) -> str:
        with ProcessRanks() as one:
            one.start(
                0, configure, {"model": str(model(family)), "max_model_len": 512, "dtype": "float32", **arguments}
            )
            return json.loads(one.receive(0, HANG_S))

    return ask


def configure(channel: Channel, arguments: dict[str, Any]) -> None:
    said = ""
    try:
        refusals.early(EngineArgs.create_engine_config)(AsyncEngineArgs(**arguments))
    except InvalidConfig as error:
        said = str(error)
    channel.send(json.dumps(said).encode())


def test_the_page_has_no_other_rows() -> None:
    section = PAGE.read_text().split("## What is refused")[1].split("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")][1:]
    known = [*ROWS, *OF_LAYERS]
    assert [words for words in known if not any(words in row for row in rows)] == []
    assert [row for row in rows if not any(words in row for words in known)] == []
    flags = re.findall(r"`(--[a-z0-9-]+)`", "".join(rows))
    tried = {f"--{name.replace('_', '-')}" for of_row in ROWS.values() for given, _ in of_row for name in given}
    assert set(flags) <= tried


@pytest.mark.parametrize(
    ("arguments", "said"),
    [pytest.param(*asked, id=asked[1]) for of_row in ROWS.values() for asked in of_row],
)
def test_a_row_of_the_page(asked: Callable[..., str], arguments: dict[str, Any], said: str) -> None:
    got = asked("qwen3_moe", **arguments)
    assert said in got
    assert "expected" in got


@pytest.mark.parametrize("arguments", SERVED, ids=str)
def test_what_is_served(asked: Callable[..., str], arguments: dict[str, Any]) -> None:
    assert asked("qwen3_moe", **arguments) == ""


@pytest.mark.parametrize("more", [{}, {"enable_lora": True}], ids=str)
def test_models_without_experts_are_left_to_vllm(asked: Callable[..., str], more: dict[str, Any]) -> None:
    assert asked("llama", data_parallel_size=2, **more) == ""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--no-enable-expert-parallel"], "2 data-parallel ranks without --enable-expert-parallel"),
        (["--all2all-backend", "deepep_low_latency"], "--all2all-backend deepep_low_latency"),
        (["--enable-dbo"], "--enable-dbo or --ubatch-size"),
    ],
)
def test_a_server_refuses_before_it_has_other_processes(
    model: Callable[[str], Path], tmp_path: Path, flags: list[str], said: str
) -> None:
    server = Server(model("qwen3_moe"), tmp_path / "log", *flags)
    try:
        with pytest.raises(RuntimeError, match="the server did not start"):
            server.await_ready()
        assert server.await_end()
        last = [line for line in server.log.splitlines() if line][-1]
        assert last.startswith(f"moe_rt.errors.InvalidConfig: vllm: got {said}, expected "), server.log
        assert "EngineCore" not in server.log
    finally:
        server.close()


def layer(**changes: Any) -> SimpleNamespace:
    """Return a FusedMoEConfig with the members that are read."""
    of_ranks = SimpleNamespace(ep_size=changes.pop("ep_size", 2))
    return SimpleNamespace(**dict(num_experts=8, is_lora_enabled=False, moe_parallel_config=of_ranks) | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"ep_size": 8}, ""),
        ({"ep_size": 9}, "8 experts on 9 ranks"),
        ({"is_lora_enabled": True}, "--enable-lora"),
        ({"monolithic": True}, "do their own routing"),
        ({"modular": False}, "do their own routing"),
    ],
)
def test_what_a_layer_knows(changes: dict[str, Any], said: str) -> None:
    kernel = {name: changes.pop(name, name == "modular") for name in ("monolithic", "modular")}
    try:
        refusals.refuse_layer(layer(**changes), parallel.ParallelConfig(), **kernel)
        got = ""
    except InvalidConfig as error:
        got = str(error)
    assert (said in got) if said else got == ""


def test_a_layer_is_asked_for_all_settings() -> None:
    """A layer checks all settings, since programs may make a configuration without vLLM's arguments."""
    config = parallel.ParallelConfig(tensor_parallel_size=2)
    with pytest.raises(InvalidConfig, match="--tensor-parallel-size 2"):
        refusals.refuse_layer(layer(), config, monolithic=False, modular=True)


def test_a_platform_without_ranks_of_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpu", "cuda"):
        monkeypatch.setattr(refusals, "current_platform", Platform(name))
        refusals.refuse_unserved(parallel.ParallelConfig(), lora=False)
    monkeypatch.setattr(refusals, "current_platform", Platform("rocm"))
    with pytest.raises(InvalidConfig, match="got the platform rocm, expected CPUs or NVIDIA GPUs"):
        refusals.refuse_unserved(parallel.ParallelConfig(), lora=False)
