"""Each field of Tuning reaches its end, ranks must agree on shared ones, and no other file states such a constant."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from support.emulated_gpu import EmulatedGpu
from support.ranks import ThreadRanks
from support.rounds import full_round
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer, MoEConfig, ThreadGroup, Tuning
from moe_rt.config import spec as spec_module
from moe_rt.engine.gpu.launcher import network_bytes
from moe_rt.errors import ConfigMismatch, InvalidConfig

ROOT = Path(__file__).parents[2]
SHARED = {f.name for f in fields(Tuning) if f.metadata}


def on_gpus(observe: Callable[[Buffer], Any], num_ranks: int = 2, **options: Any) -> Callable[[Tuning], Any]:
    """Return an observation of a buffer with a tuning, on emulated GPUs."""

    def observed(tuning: Tuning) -> Any:
        spec = make_spec(num_ranks, hidden=272, num_max_tokens_per_rank=200, tuning=tuning)

        def case(group: ThreadGroup) -> Any:
            with Buffer(group, **buffer_kwargs(spec), **options) as buffer:
                return observe(buffer)

        return ThreadRanks(num_ranks, EmulatedGpu(bulk_bytes=64 << 10)).run(case)[0]

    return observed


def launches(tuning: Tuning) -> set[str]:
    gpu = EmulatedGpu()
    ThreadRanks(1, gpu).run(full_round, make_spec(1, tuning=tuning), [12], 1, "random")
    return set(gpu.launched)


def threads_over_a_network(tuning: Tuning) -> tuple[int, int]:
    spec = make_spec(2, route="two_level", tuning=tuning)

    def case(group: ThreadGroup) -> Any:
        with Buffer(group, **buffer_kwargs(spec)) as buffer:
            return lanes(buffer)

    return ThreadRanks(2, EmulatedGpu(), nodes=(0, 1)).run(case)[0], network_bytes(spec, 4)


def lanes(buffer: Buffer) -> int:
    return buffer._engine._launcher._threads  # type: ignore[attr-defined]


def has_rings(buffer: Buffer) -> bool:
    return buffer._engine._launcher.ring is not None  # type: ignore[attr-defined]


def on_cpus(observe: Callable[[Any], Any]) -> Callable[[Tuning], Any]:
    """Return an observation of a CPU rank's engine after a dispatch to the other rank."""

    def observed(tuning: Tuning) -> Any:
        spec = make_spec(2, tuning=tuning)
        inputs = make_inputs(spec, [12, 12], 1, "topk")

        def case(group: ThreadGroup) -> Any:
            with Buffer(group, **buffer_kwargs(spec)) as buffer:
                r = buffer.rank
                buffer.dispatch(inputs.xs[r], inputs.topk_idx[r], inputs.topk_weights[r])
                return observe(buffer._engine)

        return ThreadRanks(2).run(case)[0]

    return observed


def stream_from(engine: Any) -> tuple[int, int]:
    found = engine._engine.stream_from()
    return found.published, found.combined


# Field -> another value, and what it changes.
ENDS: dict[str, tuple[Any, Callable[[Tuning], Any]]] = {
    "pushed_tokens": (64, on_gpus(lambda buffer: buffer.num_bytes)),
    "pushed_rows": (32, on_gpus(lambda buffer: buffer.num_bytes)),
    "pushed_bytes": (1 << 12, on_gpus(lambda buffer: buffer.num_bytes)),
    "network_threads": (128, threads_over_a_network),
    "threads": (256, on_gpus(lanes)),
    "wait_apart_tokens": (12, launches),
    "sending_part": (2, on_gpus(lambda buffer: buffer._engine._launcher.max_blocks)),  # type: ignore[attr-defined]
    "ring_blocks": (1, on_gpus(has_rings, num_sms=2)),
    "ring_bytes": (1 << 20, on_gpus(has_rings, num_sms=2)),
    "near_ns": (1e9, on_cpus(stream_from)),
    "stream_shares": ((0.5, 0.5, 0.5, 0.5), on_cpus(stream_from)),
    "recycled_bytes": (1, on_cpus(lambda engine: len(engine._memory._blocks))),
}
# Tunings that observations start from, if the default would hide the change.
STARTS: dict[str, dict[str, Any]] = {"near_ns": {"near_ns": 0.0}, "ring_blocks": {"ring_bytes": 0}}
STARTS["ring_bytes"] = {"ring_bytes": 0}


@pytest.mark.parametrize("name", [f.name for f in fields(Tuning)])
def test_each_field_reaches_its_end(name: str) -> None:
    value, observe = ENDS[name]
    start = STARTS.get(name, {})
    assert observe(Tuning(**start)) != observe(Tuning(**{**start, name: value}))


@pytest.mark.parametrize("name", [f.name for f in fields(Tuning)])
def test_ranks_agree_on_the_shared_fields_only(name: str) -> None:
    def case(group: ThreadGroup) -> Any:
        tuning = Tuning(**{name: ENDS[name][0]}) if group.rank == 1 else Tuning()
        with Buffer(group, **buffer_kwargs(make_spec(2, tuning=tuning))) as buffer:
            return buffer.spec.hash()

    outcomes = ThreadRanks(2).outcomes(case)
    if name not in SHARED:
        assert outcomes[0] == outcomes[1]
        return
    for error in outcomes:
        assert isinstance(error, ConfigMismatch)
        assert f"tuning.{name}: got {ENDS[name][0]} on rank 1, expected {getattr(Tuning(), name)} as" in str(error)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("pushed_rows", -1), ("pushed_tokens", 1.5), ("threads", 100), ("network_threads", 2048)),
        *(("sending_part", 0), ("near_ns", -1.0), ("stream_shares", (0.5, 0.5)), ("ring_blocks", True)),
    ],
)
def test_invalid_values(name: str, value: Any) -> None:
    (group,) = ThreadGroup.make(1)
    sizes = dict(num_max_tokens_per_rank=1, hidden=8, num_topk=1, num_experts=1, dtype=torch.float32)
    with pytest.raises(InvalidConfig, match=rf"^tuning\.{name}: got .*, expected "):
        Buffer(group, **sizes, tuning=Tuning(**{name: value}))


EDGES = {  # the last valid value, and the first that is not
    "pushed_rows": (0, -1),
    "recycled_bytes": (2**31 - 1, 2**31),
    "sending_part": (1, 0),
    "threads": (1024, 1056),
    "network_threads": (32, 0),
    "near_ns": (0.0, -0.001),
    "stream_shares": ((0.0,) * 4, (0.0, 0.0, 0.0, math.inf)),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_valid_values(name: str) -> None:
    last, beyond = EDGES[name]
    Tuning(**{name: last}).check()
    with pytest.raises(InvalidConfig):
        Tuning(**{name: beyond}).check()


def test_a_layer_passes_it_on() -> None:
    tuning = Tuning(recycled_bytes=1)
    config = MoEConfig(hidden=8, intermediate=8, num_experts=1, num_topk=1, num_max_tokens_per_rank=1, tuning=tuning)
    assert config.arguments()["tuning"] is tuning


# Numbers that are facts: of the protocol, of the hardware, of other libraries, or limits of failures.
FACTS = """
kPullsOfLine kShortest kScratchRows kNoFault kEnds kMostRanks kLooks kCacheLine kFloats kDoubles kDeinterleaved
kPatience kCodesAtOnce kNoBadEntry kTeamLanes kRingAlign kRingFrame kScratchBytes kWordsWithin kOne kPollMs
kPollLeavingMs kClosingSteps kLastWords kCodecBlock kInfinity kTiny kMaxTopk kLinePair kPage kRowAlign
kSegmentHeaderMagic kSegmentHeaderVersion kNumOpRecords kDropped kAnyCapacity kNoExpert kNowhere kTagBits kNumKinds
kRepeats kLeads kMaxPlaces kNone kMajor _FOREVER_S _LEVEL FORMAT LOCK_SECONDS _POLL_SECONDS
_DRIVER_VERSION _DEPENDENT_DRIVER _DEPENDENT_ARCH _BULK_ARCH _WARP _UNIT _GRANULE ALIGNMENTS _COUNT_BITS _DTYPE_BITS
_ALIGN PROTOCOL_VERSION _VECTOR_BYTES
TILE WHOLE_VECTORS
"""
NUMBER = re.compile(r"\b(k[A-Z]\w*)\s*(?:=|\{)\s*-?\d")


def cpp_constants() -> set[str]:
    paths = [p for p in (ROOT / "cuda").rglob("*") if p.suffix in (".h", ".cpp", ".cu")]
    texts = [re.sub(r"//[^\n]*", "", p.read_text()) for p in paths if p.name not in ("tuning.h", "ucx_api.h")]
    declared = (match[0] for text in texts for match in re.finditer(r"\bconstexpr\b[^;(){}]*?[={][^;]*;", text))
    return {name for declaration in declared for name in NUMBER.findall(declaration)}


def python_constants() -> set[str]:
    """Return the names of numbers at the top of modules that ops run through."""
    found: set[str] = set()
    paths = [p for room in ("config", "engine", "ops") for p in (ROOT / "moe_rt" / room).rglob("*.py")]
    for node in (n for p in paths if p.name != "tuning.py" for n in ast.parse(p.read_text()).body):
        if isinstance(node, ast.Assign) and all(
            isinstance(n, ast.Constant | ast.BinOp | ast.Tuple | ast.operator | ast.expr_context)
            for n in ast.walk(node.value)
        ):
            numbers = [n for n in ast.walk(node.value) if isinstance(n, ast.Constant) and type(n.value) in (int, float)]
            names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            found.update(names if numbers else [])
    return found


@pytest.mark.emulated("reads the sources")
def test_no_other_file_states_a_constant_that_decides_speed() -> None:
    found = cpp_constants() | python_constants()
    facts = set(FACTS.split())
    new = found - facts
    assert not new, f"{sorted(new)}: got new numbers; if speed decides one, state it in a tuning file, else in FACTS"
    assert found >= facts, f"{sorted(facts - found)}: listed in FACTS, but gone"


@pytest.mark.parametrize(("num_ranks", "rows"), [(2, 64), (16, 64), (32, 32), (2048, 0)])
def test_windows_for_pushed_rows_hold_those_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, rows: int
) -> None:
    sizes = dict(num_max_tokens_per_rank=100, hidden=8192, num_topk=1, num_experts=num_ranks, dtype=torch.bfloat16)
    spec = make_spec(num_ranks, **sizes)
    monkeypatch.setattr(spec_module._engine, "Shape", lambda **given: given)
    assert spec.gpu_shape()["num_pushed_rows"] == rows  # type: ignore[index]
