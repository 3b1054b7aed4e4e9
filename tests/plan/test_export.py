"""Exports have the columns and fields that AIConfigurator and CollectiveX read, and return as the same predictions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from moe_rt.cli import main
from moe_rt.errors import InvalidConfig
from moe_rt.plan.answers import Cluster, make_plan
from moe_rt.plan.calibration import published
from moe_rt.plan.export import (
    AICONFIGURATOR,
    aiconfigurator_lines,
    collectivex_cases,
    export,
    ladder,
    measurements,
    predicted,
    read_table,
)
from moe_rt.plan.models import MODELS
from moe_rt.plan.points import parse

QWEN = MODELS["qwen3-30b-a3b"]
H200 = "H200 SXM"


def test_parquet_needs_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    plan = make_plan(QWEN, Cluster(8, H200, library="DeepEP-V1.2.1"), 256)
    for act in (lambda path: export(plan, path), read_table):
        with pytest.raises(InvalidConfig, match=r"got \.parquet without pyarrow, expected it installed, or \.csv"):
            act(tmp_path / "a.parquet")


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_table_returns_as_the_predictions_that_made_it(tmp_path: Path, suffix: str) -> None:
    cluster = Cluster(8, H200, library="DeepEP-V1.2.1")
    plan = make_plan(QWEN, cluster, 256)
    path = tmp_path / f"moe_a2a_perf.{suffix}"
    said = export(plan, path)
    lines = read_table(path)
    assert f"{len(lines)} lines" in said
    assert {line["comm_backend"] for line in lines} == {"deepep_ll", "deepep_ht"}
    assert {line["phase"] for line in lines} == {"dispatch", "combine"}
    expected = {(c.ep_size, c.mode, c.payload, c.tokens, op): e.us for c, _, op, e in predicted(plan)}
    assert len(expected) == len(lines) > 50
    for line in measurements(lines, cluster.library, H200, "export"):
        row = parse(line)
        again = published().predict(row.system, row.op, row.shape).us
        assert again == pytest.approx(row.latency_us, rel=1e-3, abs=1e-3)


def test_the_columns_are_those_of_the_unified_table() -> None:
    lines = aiconfigurator_lines(make_plan(QWEN, Cluster(16, "H100 + IB"), 128))
    line = max(lines, key=lambda each: (each["ep_size"], each["sms"], each["num_tokens"]))
    assert tuple(line) == AICONFIGURATOR
    assert (line["ep_size"], line["node_num"], line["hidden_size"], line["topk"]) == (16, 2, 2048, 8)
    assert (line["num_experts"], line["sms"], line["num_tokens"]) == (128, 24, 128)


def test_documents_say_that_nothing_was_measured(tmp_path: Path) -> None:
    plan = make_plan(QWEN, Cluster(8, H200), 64)
    cases = collectivex_cases(plan)
    assert export(plan, tmp_path / "cases") == f"{tmp_path / 'cases'}: {len(cases)} documents of CollectiveX"
    times = {(c.ep_size, c.mode, c.payload, c.tokens, op): e.us for c, _, op, e in predicted(plan)}
    for path in (tmp_path / "cases").iterdir():
        case = json.loads(path.read_text())
        factors = case["identity"]["case_factors"]
        names = ("backend", "suite", "routing", "mode", "phase", "ep", "precision")  # those of CollectiveX's summary
        assert factors["sku"] == H200
        assert all(factors["case"][name] for name in names)
        assert (case["record_type"], case["outcome"]["status"]) == ("case-attempt", "invalid")
        assert case["outcome"]["reasons"] == ["predicted by moe-rt plan, not measured"]
        rows = case["measurement"]["rows"]
        assert [row["tokens_per_rank"] for row in rows] == ladder(64)
        for row in rows:
            key = (factors["case"]["ep"], factors["case"]["mode"].replace("-", "_"), factors["case"]["precision"])
            for op, found in row["components"].items():
                ops = ("dispatch", "combine") if op == "roundtrip" else (op,)
                us = sum(times[(*key, row["tokens_per_rank"], each)] for each in ops)
                assert found["percentiles_us"]["p50"] == pytest.approx(us, abs=1e-3)
                assert found["percentiles_us"]["p99"] > found["percentiles_us"]["p95"] > us
                assert (found["availability"], found["sample_count"]) == ("derived", 0)


def test_every_field_of_a_document() -> None:
    cases = collectivex_cases(make_plan(QWEN, Cluster(16, "H100 + IB"), 4))
    (case,) = (c for c in cases if c["identity"]["case_id"].endswith("low-latency-decode-16-uniform-bf16"))
    assert case.pop("generated_at").endswith("+00:00")
    assert len(case["measurement"].pop("rows")) == 3
    factors = {"backend": "DeepEP-V1", "ep": 16, "experts": 128, "gpus_per_node": 8, "hidden": 2048, "ladder": "1 2 4"}
    factors |= {"mode": "low-latency", "nodes": 2, "phase": "decode", "precision": "bf16", "routing": "uniform"}
    factors |= {"scale_up_domain": 8, "suite": "moe-rt-plan", "topk": 8, "workload": "qwen3-30b-a3b"}
    name = "h100-+-ib-deepep-v1-qwen3-30b-a3b-low-latency-decode-16-uniform-bf16"
    assert case == {
        "version": 1,
        "record_type": "case-attempt",
        "identity": {
            "attempt_ordinal": 1,
            "case_factors": {"case": factors, "sku": "H100 + IB"},
            "case_id": name,
        },
        "measurement": {
            "combine_dtype": "bf16",
            "dispatch_dtype": "bf16",
            "payload_unit": "token-rank",
            "sampling": {"samples_per_component": 0},
        },
        "implementation": {"name": "DeepEP-V1", "maturity": "predicted"},
        "topology": {"gpus_per_node": 8, "nodes": 2, "scale_up_domain": 8},
        "outcome": {"status": "invalid", "reasons": ["predicted by moe-rt plan, not measured"]},
    }


def test_what_no_reader_knows_is_refused(tmp_path: Path) -> None:
    mori = make_plan(QWEN, Cluster(8, "MI300X"), 256)
    with pytest.raises(InvalidConfig, match="library: got MORI-EP, expected one that AIConfigurator knows"):
        export(mori, tmp_path / "a.csv")
    with pytest.raises(InvalidConfig, match=r"export: got a\.xlsx, expected FILE\.csv"):
        export(mori, tmp_path / "a.xlsx")
    (tmp_path / "b.csv").write_text("phase,latency\ndispatch,1\n")
    with pytest.raises(InvalidConfig, match="columns: got no column comm_backend"):
        read_table(tmp_path / "b.csv")


def test_the_command_exports(tmp_path: Path) -> None:
    words = ("plan", "--model", "qwen3-30b-a3b", "--gpus", "4", "--tokens", "8", "--json")
    done = CliRunner().invoke(main, [*words, "--export", str(tmp_path / "t.csv")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "t.csv").read_text().startswith(",".join(AICONFIGURATOR))
