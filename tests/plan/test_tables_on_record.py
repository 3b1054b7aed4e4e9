"""Lines of measurements, configs of models and scores are read and printed as on record.

After a change on purpose: python tests/plan/test_tables_on_record.py
"""

from __future__ import annotations

import csv
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import assert_on_record, result_of, results_of, write_record

from moe_rt.plan import score
from moe_rt.plan.models import Model, find_model, read_config
from moe_rt.plan.points import COLUMNS, Row, least, parse, read_rows
from moe_rt.plan.systems import gpu_of, names_gpu, refuse_mixed, row_bytes, system_of

RECORD = Path(__file__).with_suffix(".json")
VALUES = "here|DeepEP-V1|H100 + IB|8|low_latency|dispatch|8|64|7168|8|256|fp8|25.0||"
LINE = dict(zip(COLUMNS, VALUES.split("|"), strict=True))
COPIES = LINE | dict(library="moe_rt", hardware="cpu: chip, 2 cores", mode="copies", dtype="bf16", ep_size="2")
RAW = LINE | dict(mode="raw_alltoall", op="alltoall")
LINES: dict[str, dict[str, str]] = {
    "plain": LINE,
    "normal on two nodes": LINE | dict(mode="normal", ep_size="16"),
    "three domains": LINE | dict(ep_size="20", mode="High Throughput"),
    "round-robin": LINE | dict(notes="round-robin"),
    "TRTLLM": LINE | dict(library="TRTLLM", hardware="GB200", nvlink_domain="", ep_size="16", topk="4"),
    "groups": LINE | dict(ep_size="32", notes="group-limited top-min(nodes,3)"),
    "groups of two nodes": LINE | dict(ep_size="16", notes="group-limited top-min(nodes,4)"),
    "groups on one node": LINE | dict(notes="group-limited top-min(nodes,4)"),
    "notes": LINE | dict(notes="nodes=2; sms=20; to_ranks=3.25; busiest=1.5; line 30 ns; intermediate=64"),
    "16 SMs": LINE | dict(mode="ht", notes="16 SMs"),
    "one SM": LINE | dict(notes="1SM"),
    "empty": LINE | dict.fromkeys(("hidden", "topk", "experts", "dtype", "tokens_per_rank", "nvlink_domain"), ""),
    "empty normal": LINE | dict(mode="prefill", tokens_per_rank="", experts=""),
    "more ranks than experts": LINE | dict(ep_size="64", experts="16"),
    "pair": LINE | dict(op="round-trip"),
    "bandwidth": LINE | dict(latency_us="", bandwidth_gbs="100"),
    "bandwidth of ranks": LINE | dict(latency_us="", bandwidth_gbs="100", mode="normal"),
    "bandwidth of nodes": LINE | dict(latency_us="", bandwidth_gbs="100", mode="normal", ep_size="16", op="combine"),
    "both": LINE | dict(bandwidth_gbs="100"),
    "bandwidth of a pair": LINE | dict(latency_us="", bandwidth_gbs="100", op="pair"),
    "neither": LINE | dict(latency_us=""),
    "raw": RAW | dict(notes="4096 bytes per pair"),
    "raw without bytes": RAW,
    "layer": COPIES | dict(op="layer+backward", notes="intermediate=512; line 40 ns"),
    "copies pair": COPIES | dict(op="both"),
    "copies of nothing": COPIES | dict(op=""),
    "layer on GPUs": LINE | dict(op="layer"),
    "no op": LINE | dict(op=""),
    "no mode": LINE | dict(mode=""),
    "no mode, many": LINE | dict(mode="", tokens_per_rank="257"),
    "no mode, 256": LINE | dict(mode="new", tokens_per_rank="256"),
    "no ranks": LINE | dict(ep_size=""),
    "no type": LINE | dict(dtype="posit"),
    "no hardware": LINE | dict(hardware=""),
    "zero": LINE | dict(latency_us="0"),
    "infinite": LINE | dict(latency_us="inf"),
    "no number": LINE | dict(topk="many"),
}


def parsed(guess: bool) -> Any:
    found = {}
    for name, line in LINES.items():
        row = result_of(partial(parse, line, guess))
        found[name] = row if isinstance(row, str) else [
            row["source"], row["op"], row["latency_us"], row["line_ns"], row["system"]["mode"],
            row["system"]["family"], row["system"]["gpu"]["name"], *row["shape"].values(),
        ]  # fmt: skip
    return found


def in_file(text: str, act: Callable[[Path], Any], name: str = "a.csv") -> Any:
    """Return what a function returns for a file with this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_text(text, encoding="utf-8")
        found = result_of(partial(act, path))
        return json.loads(json.dumps(found).replace(folder, "FOLDER"))


def table(lines: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> str:
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "a.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, extrasaction="ignore")
            writer.writeheader()
            writer.writerows(lines)
        return (Path(folder) / "a.csv").read_text()


def files() -> Any:
    def numbers(guess: bool, path: Path) -> Any:
        rows, refused = read_rows(path, guess)
        return [[number, row.op, row.latency_us] for number, row in rows], refused

    some = table([LINE, LINES["no op"], LINES["no mode"], LINES["pair"]])
    return [
        in_file(some, partial(numbers, False)), in_file("\ufeff" + some, partial(numbers, True)),
        in_file(table([LINE], COLUMNS[:-2]), partial(numbers, False)), in_file("", partial(numbers, False)),
    ]  # fmt: skip


def least_times() -> Any:
    def row(us: float, ns: int, notes: str = "", **changes: str) -> Row:
        return parse(COPIES | {"latency_us": str(us), "notes": f"line {ns} ns; {notes}"} | changes)

    groups = [
        [row(10, 10), row(19.9, 10), row(9.95, 90)],
        [row(10, 90), row(20, 10)],
        [row(10, 90), row(19, 10)],
        [row(10, 90, "nodes=2"), row(19, 10, "nodes=2")],
        [row(10, 10), row(5, 10, topk="2"), row(4, 10, op="combine")],
    ]
    return [[one.latency_us for one in least(group)] for group in groups]


def scored() -> Any:
    """Return the whole text of a score, of tables with refused lines and of an empty one."""
    known = [LINE | {"tokens_per_rank": str(t), "latency_us": str(15 + t / 3)} for t in (8, 16, 64, 128)]
    other = [LINE | {"hardware": "MI300X", "source": "there"}, LINE | {"mode": "normal", "library": "Other"}]
    unknown = [LINE | {"op": "prepare"}, LINE | {"tokens_per_rank": "-1"}, LINE | {"op": "send"}]
    many = [LINE | {"op": "prepare"}] * 21
    run = lambda path: [(done := CliRunner().invoke(score.main, [str(path)])).exit_code, done.output.splitlines()]  # noqa: E731
    texts = [[*known, *other, *unknown], [*known, *many], known[:1], []]
    return [in_file(table(lines), run) for lines in texts]


def models() -> Any:
    plain: dict[str, Any] = dict(hidden_size=64, moe_intermediate_size=32, n_routed_experts=16, num_experts_per_tok=2)
    plain |= dict(num_hidden_layers=5)
    configs = [
        plain, plain | dict(first_k_dense_replace=2, n_shared_experts=3, model_type="x"), {"text_config": plain},
        dict(d_model=8, ffn_dim=4, num_local_experts=2, moe_topk=1, n_layer=3, n_group=2, topk_group=1),
        dict(d_model=8, intermediate_size=9, ffn_dim=4, moe_num_experts=2, moe_k=2, num_hidden_layers=1),
        *(plain | {name: None} for name in plain), plain | dict(n_routed_experts=1), plain | dict(n_routed_experts="2"),
        plain | dict(num_experts_per_tok=17), plain | dict(n_group=3), plain | dict(num_hidden_layers=0),
    ]  # fmt: skip
    found = [in_file(json.dumps(config), read_config, "config.json") for config in configs]
    found += [in_file(text, read_config, "config.json") for text in ("[", "[1]", "3")]
    found += [result_of(partial(find_model, name)) for name in ("Mixtral-8x7B", "mixtral", "zzz")]
    found += [in_file(json.dumps(plain), lambda path: find_model(str(path.parent)), "config.json")]
    good = dict(name="m", hidden=2, intermediate=2, experts=4, topk=2, layers=1, groups=2, topk_groups=1)
    for field in list(good)[1:]:
        found += [result_of(partial(Model, **(good | {field: value}))) for value in (0, 1.5, 5)]
    return found


def hardware() -> Any:
    mixed = (
        "H100",
        "H100 and H200",
        "8x H100, 8x A100",
        "H100 IB RoCE",
        "infiniband and ib",
        "EFA or thor",
        "B200 GB200",
    )
    names = ("xH100", "8xH100", "H1000", "NVIDIA H20", "my mi300x", "AMD new", "Instinct", "mi999", "MIX", "cpu: a",
             "cpu: a, 12 cores")  # fmt: skip
    types = ("bf16", "fp8/bf16", "BF16 , fp8", "fp4+int8", "raw", "odd", "half/odd", "fp16")
    systems = [system_of(library, gpu, mode, 4, guess=True) for library, gpu, mode in (
        ("DeepEP", "H100", "low_latency"), ("TRTLLM", "H100", "raw_alltoall"), ("x", "MI300X thor", "normal"),
        ("deepep v2", "H100 AINIC", "copies"), ("y", "AMD 1", "normal"),
    )]  # fmt: skip
    return {
        "mixed": [result_of(partial(refuse_mixed, name)) for name in mixed],
        "gpus": [[names_gpu(name, gpu_of("H100")), *(result_of(partial(gpu_of, name, g)) for g in (False, True))]
                 for name in names],
        "systems": [[one.key, one.network, one.family, one.gpu.link] for one in systems],
        "row_bytes": [[result_of(partial(row_bytes, one, op, dtype, 192)) for dtype in types for op in
                       ("dispatch", "combine")] for one in systems],
    }  # fmt: skip


def quantiles() -> Any:
    rows = [parse(LINE | {"latency_us": str(us)}) for us in (10, 20, 30)]
    made = [
        score.Scored(row, error, error < 0.2, error > 0.3) for row, error in zip(rows, (0.1, 0.2, 0.4), strict=True)
    ]
    return [score.summary(made, [(2, "x")]), score.summary([], []), score.table(made[2:])]


RESULTS = {
    **{f"parsed guess={guess}": partial(parsed, guess) for guess in (False, True)},
    **{make.__name__: make for make in (files, least_times, scored, models, hardware, quantiles)},
}


@pytest.mark.parametrize("name", RESULTS)
def test_what_is_read_is_on_record(name: str) -> None:
    assert_on_record(RECORD, name, result_of(RESULTS[name]))


if __name__ == "__main__":
    write_record(RECORD, results_of(RESULTS))
