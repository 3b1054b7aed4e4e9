"""Codecs, options, placements, specs, topologies and tuning give the values and words on record.

After a change on purpose: python tests/layer/test_config_on_record.py
"""

from __future__ import annotations

import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, every, result_of, results_of, write_record

from moe_rt.config.codec import CODES, MOST_SCALES, SCALES, Codec, RowFormat, spelled
from moe_rt.config.options import ALIGNMENTS, BufferOptions
from moe_rt.config.placement import Placement
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.config.tuning import Tuning

RECORD = Path(__file__).with_suffix(".json")
SIZES: dict[str, Any] = dict(num_max_tokens_per_rank=5, hidden=40, num_topk=2, num_experts=7, dtype=torch.bfloat16)
PAIRS = Topology((0, 0, 1, 1))


def refused(make: Any, base: dict[str, Any], changes: dict[str, tuple[Any, ...]]) -> dict[str, str]:
    """Return the words about each changed value, or "taken"."""
    found = {}
    for name, values in changes.items():
        for value in values:
            made = result_of(partial(make, **(base | {name: value})))
            found[f"{name}={value}"] = made if isinstance(made, str) else "taken"
    return found


def codecs() -> Any:
    codes, scales = torch.zeros(3, 20, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.int32)
    formats = [RowFormat.of(codes, scales), RowFormat.of_codec(None, 128), RowFormat.of_codec(torch.int8, 129)]
    formats += [RowFormat(code, 33, scale, 5) for code in CODES for scale in SCALES]
    words = [each.word(hidden) for each in formats for hidden in (33, 66)]
    words += [0, 1 << 31, 1 << 32, (1 << 31) + MOST_SCALES, 0xFFFFFFFF, 1 << 31 | 4 << 27, 1 << 31 | 3 << 24, -1]
    return {
        "codecs": [[one.name, one.enumerator, str(one.dtype), Codec.of(one.dtype).value] for one in Codec],
        "dtypes": [str(dtype) for dtype in Codec.dtypes()],
        "formats": [[*map(str, each), each.code_bytes, each.scale_bytes, each.row_bytes] for each in formats],
        "words": [[word, spelled(word)] for word in words],
    }


def options() -> Any:
    def shared(dtype: torch.dtype = torch.float32, **given: Any) -> None:
        BufferOptions(**given).check_shared(dtype)

    def own(**given: Any) -> None:
        BufferOptions(**given).check_own()

    int8 = torch.int8
    both = [
        result_of(partial(shared, dtype=torch.float64, **{name: int8})) for name in ("dispatch_dtype", "combine_dtype")
    ]
    two = [result_of(partial(shared, overflow="retry", depth=depth)) for depth in (1, 2)]
    arguments = [BufferOptions(placement=given).arguments() for given in (None, [0, 1], Placement.from_ranks([0, 1]))]
    return {
        "shared": refused(shared, {}, {
            "dispatch_dtype": (None, int8, torch.float8_e4m3fn, torch.float16), "combine_dtype": (int8, torch.float64),
            "overflow": ("raise", "drop", "retry", "wait"), "route": ("auto", "flat", "two_level", "ring"),
            "sums": ("ranked", "invariant", "any"), "depth": (0, 1, 2**31 - 1, 2**31, 1.0),
            "capacity_factor": (0, 1e-9, math.inf, math.nan, -1, None), "tuning": (None, Tuning(), Tuning(threads=1)),
        }),
        "of fp64": both, "retry": two, "shown": repr(BufferOptions()),
        "own": refused(own, {}, {
            "timeout_s": (0, 1e-9, math.nan), "init_timeout_s": (0, 1e-9, -1.0), "num_threads": (0, 1),
        }),
        "arguments": [{name: str(value) for name, value in each.items()} for each in arguments],
    }  # fmt: skip


def placements() -> Any:
    made = [Placement.contiguous(7, 3), Placement.from_ranks([2, 0, 2, 1, 0])]
    twice = Placement((((0, 0), (1, 0)), ((1, 1),)))
    given = (None, [0, 1], [1, 0, 1], [0, 0], [0, 2], [0, 1, -1], twice, Placement((((0, 1),), ((1, 0),))))
    return {
        "made": [[each.places, each.ranks, repr(each), *([each.local_experts(r), each.num_local(r)] for r in range(4))]
                 for each in made],
        "given": [result_of(lambda g=each: repr(Placement.make(g, 2, 2))) for each in given],
        "default": every(lambda experts, ranks: repr(Placement.make(None, experts, ranks)), (2, 5), (1, 2)),
    }  # fmt: skip


def topologies() -> Any:
    made = [Topology((0, 0, 1, 1)), Topology((1, 0, 1)), Topology((0, 1, 2)), Topology((0, 0)), Topology((0, 1, 0, 1)),
            Topology.from_rows([[7, 3], [5]], [3, 5, 7]), Topology.of_places(["b", "a", "b"]), Topology.one_node(3),
            Topology((0, 0, 0, 1))]  # fmt: skip
    four = [each for each in made if each.num_ranks == 4] + [Topology((1, 1, 0, 0)), Topology((0, 1, 2, 3))]
    return {
        "facts": [[each.nodes, repr(each), each.num_ranks, each.num_nodes, each.shares_nodes, each.ranks_of(0),
                   each.node_of(1)] for each in made],
        "refused": every(Topology, ((), (1,), (0, 2), (-1, 0), (0,))),
        "divides_as": [[one.divides_as(other) for other in four] for one in four],
        "is_inside": [[one.is_inside(other) for other in four] for one in four],
    }  # fmt: skip


def tunings() -> Any:
    words: dict[str, tuple[Any, ...]] = {
        "threads": (0, 31, 32, 1024, 1056, 48, 32.0), "network_threads": (0, 64, 1056), "sending_part": (0, 1, True),
        "ring_blocks": (-1, 0, 2**31 - 1, 2**31), "near_ns": (-0.1, 0, math.nan), "pushed_rows": (-1, 0),
        "stream_shares": (None, (0.0, 1.0, 2.0, 3.0), (0, 0, 0), [0, 0, 0, 0], (-1.0, 0, 0, 0), (0, 0, 0, math.inf)),
    }  # fmt: skip
    shared = Tuning(pushed_tokens=1, pushed_rows=2, pushed_bytes=3, network_threads=32, threads=64).shared()
    return {"refused": refused(lambda **given: Tuning(**given).check(), {}, words), "shared": shared,
            "defaults": vars(Tuning())}  # fmt: skip


def make(topology: Topology = PAIRS, options: dict[str, Any] | None = None, **sizes: Any) -> BufferSpec:
    return BufferSpec.make(topology, BufferOptions(**(options or {})), **(SIZES | sizes))


def specs() -> Any:
    large = dict(num_topk=2, num_experts=8, hidden=1)
    sizes = ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts")
    edges = [
        result_of(lambda given=given: make(**given).capacity(0)) for given in (
            large | dict(num_max_tokens_per_rank=2**28), large | dict(num_max_tokens_per_rank=2**28 - 1),
            large | dict(num_max_tokens_per_rank=2**28 - 15, expert_alignment=16),
            large | dict(num_max_tokens_per_rank=2**28 - 16, expert_alignment=16),
            dict(topology=Topology.one_node(2**15), num_experts=2**15),
            dict(hidden=2**31 - 1, num_max_tokens_per_rank=5461),
            dict(hidden=2**31 - 64, num_max_tokens_per_rank=5461),
            dict(hidden=2**31 - 64, num_max_tokens_per_rank=5462),
            dict(hidden=2**31 - 64, num_max_tokens_per_rank=2731, options=dict(depth=2)),
            dict(layout="tokens", options=dict(sums="invariant")), dict(layout="tokens", expert_alignment=8),
            dict(num_topk=8), dict(num_experts=3), dict(num_experts=4),
            dict(num_experts=1000, num_topk=64), dict(num_experts=1000, num_topk=65),
            dict(num_experts=1000, num_topk=129),
        )
    ]  # fmt: skip
    return {
        "refused": refused(make, {}, dict.fromkeys(sizes, (0, 1.5, 2 ** 31)) | {
            "dtype": (torch.int8, torch.float16), "layout": ("tokens", "rows"),
            "expert_alignment": (0, 2, *ALIGNMENTS, True)
        }),
        "edges": edges,
    }  # fmt: skip


def capacities() -> Any:
    """Return the rows of two ranks, for bounds, factors, layouts and alignments."""
    return [
        [name, factor, layout, align, *(spec.capacity(rank, bound) for rank in (0, 3) for bound in (None, 0, 3))]
        for name, placement in (("even", None), ("uneven", (0, 0, 0, 0, 1, 2, 3)))
        for factor in (None, 0.01, 1.0, 1.3, 9.0)
        for layout, align in (("experts", 1), ("experts", 8), ("tokens", 1))
        for options in [dict(capacity_factor=factor, placement=placement)]
        for spec in [make(options=options, layout=layout, expert_alignment=align)]
    ]  # fmt: skip


def shapes() -> Any:
    """Return the records of specs and the bytes of their segments, with and without rows that GPUs push."""
    found = []
    for given, sizes in (
        ({}, {}), (dict(route="two_level"), {}), (dict(sums="invariant", depth=True), {}),
        (dict(depth=2, capacity_factor=2), dict(num_max_tokens_per_rank=100, layout="tokens")),
        (dict(tuning=Tuning(pushed_tokens=3, pushed_rows=2)), dict(expert_alignment=True, dtype=torch.float64)),
        (dict(tuning=Tuning(pushed_bytes=4 * 3 * 128)), dict(hidden=33)),
    ):  # fmt: skip
        spec = make(options=given, **sizes)
        found.append([
            spec.record(), f"{spec.hash():x}", spec.shape().segment_bytes(), spec.gpu_shape().segment_bytes(),
            spec.node_of, str(spec.acc_dtype), spec.by_token, spec.num_ranks,
            [str(v) for v in spec.arguments().values()],
        ])  # fmt: skip
        assert hash(spec) == hash(make(options=given, **sizes))
    return found


RESULTS = {each.__name__: each for each in (
    codecs, options, placements, topologies, tunings, specs, capacities, shapes
)}  # fmt: skip


@pytest.mark.parametrize("name", RESULTS)
def test_values_and_words_are_those_on_record(name: str) -> None:
    assert_on_record(RECORD, name, result_of(RESULTS[name]))


if __name__ == "__main__":
    write_record(RECORD, results_of(RESULTS))
