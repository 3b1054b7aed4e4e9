"""Formulas recover the parameters that made their data, predictions state their range, and scoring counts refusals."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from moe_rt.errors import InvalidConfig
from moe_rt.info import machine_card
from moe_rt.lab.bench import calibrate as bench_calibrate
from moe_rt.lab.bench.calibrate import cases_of, cores_apart, measure
from moe_rt.plan.calibration import Library, _merged, calibrate, load, published, save, usual_of
from moe_rt.plan.families import FAMILIES, pipelined
from moe_rt.plan.fit import Correction, fit
from moe_rt.plan.models import MODELS
from moe_rt.plan.points import COLUMNS, Points, Row, least, parse
from moe_rt.plan.score import main
from moe_rt.plan.systems import GPUS

VALUES = "here|DeepEP-V1|H100 + IB|8|low_latency|dispatch|8|64|7168|8|256|fp8|25.0||"
LINE = dict(zip(COLUMNS, VALUES.split("|"), strict=True))


def lines(mode: str, op: str = "dispatch", **changes: str) -> list[dict[str, str]]:
    dtype = "fp8" if op == "dispatch" else "bf16"
    shapes = [(h, k, e) for h, k, e in ((7168, 8, 256), (2048, 4, 64), (4096, 2, 16))]
    return [
        LINE | dict(mode=mode, op=op, dtype=dtype, hidden=str(h), topk=str(k), experts=str(e), tokens_per_rank=str(t))
        | changes
        for h, k, e in shapes
        for t in (1, 8, 64, 256, 1024, 4096)
    ]  # fmt: skip


def measured(mode: str, op: str = "dispatch", noise: float = 0.01, **changes: str) -> list[dict[str, str]]:
    """Lines whose times come from the family's usual parameters, with noise."""
    made, rng = lines(mode, op, **changes), np.random.default_rng(0)
    family = FAMILIES[parse(made[0]).system.family]
    x = Points.of(parse(line).shape for line in made)
    times = family.seconds({p.name: p.usual * 1.2 for p in family.parameters}, x) * np.exp(
        noise * rng.standard_normal(len(made))
    )
    return [line | {"latency_us": str(time)} for line, time in zip(made, times, strict=True)]


@pytest.mark.parametrize(
    ("mode", "library"), [("low_latency", "DeepEP-V1"), ("normal", "DeepEP-V1"), ("normal", "MORI-EP")]
)
def test_a_fit_predicts_times_that_it_did_not_see(mode: str, library: str) -> None:
    rows = [parse(line) for line in measured(mode, library=library)]
    seen, unseen = [row for i, row in enumerate(rows) if i % 3], rows[::3]
    family = FAMILIES[rows[0].system.family]
    values = fit(family, Points.of(r.shape for r in seen), np.array([r.latency_us for r in seen]))
    predicted = family.seconds(values, Points.of(r.shape for r in unseen))
    error = np.abs(predicted / [r.latency_us for r in unseen] - 1)
    assert np.median(error) < 0.03
    assert all(value > 0 for value in values.values())


def copies_us(**changes: str) -> float:
    """Time of a dispatch on two cores, by usual parameters."""
    line = LINE | dict(library="moe_rt", hardware="cpu: chip, 2 cores", mode="copies", dtype="bf16", nvlink_domain="4")
    row = parse(line | dict(ep_size="4", tokens_per_rank="512", hidden="2048", topk="4", experts="16") | changes)
    family = FAMILIES["copies"]
    return float(family.seconds({p.name: p.usual for p in family.parameters}, Points.of([row.shape]))[0])


def test_the_busiest_rank_shares_its_core_with_ranks_that_wait() -> None:
    """Four ranks on two cores take turns, also if one of them has most rows: the others spin and yield."""
    small = dict(tokens_per_rank="128", notes="busiest=1.0; to_ranks=1.0")
    alone = dict(hardware="cpu: chip, 4 cores")
    even, skewed = copies_us(**small), copies_us(**small | {"notes": "busiest=4.0; to_ranks=1.0"})
    assert even > 1.5 * copies_us(**small | alone)
    assert 1.5 * even < skewed < 4 * even
    assert skewed > 1.5 * copies_us(**small | alone | {"notes": "busiest=4.0; to_ranks=1.0"})


def test_all_local_experts_have_gradients() -> None:
    """A token visits one of many experts: gradients of the others are written, though their weights are not read."""
    line = LINE | dict(
        library="moe_rt", hardware="cpu: chip, 2 cores", mode="copies", dtype="bf16", tokens_per_rank="1"
    )

    def us(experts: str, op: str) -> float:
        row = parse(line | dict(op=op, ep_size="2", topk="1", experts=experts, notes="intermediate=4096"))
        found = FAMILIES["copies"].seconds(usual, Points.of([row.shape]))
        return float(found[0]) - int(experts) / 2 * usual["c_expert"]

    for op, more in (("layer", False), ("layer+backward", True)):
        usual = {p.name: p.usual for p in FAMILIES["copies"].parameters} | usual_of(parse(line).system, op)
        assert (us("128", op) > 2 * us("8", op)) is more


def test_bytes_that_no_cache_keeps_go_through_memory_that_cores_share() -> None:
    """Twice the ranks take twice the time once memory decides, though each has a core."""
    large = dict(tokens_per_rank="4096", experts="16", notes="to_ranks=1.0", hardware="cpu: chip, 8 cores")
    two, four = (copies_us(**large, ep_size=ranks) for ranks in ("2", "4"))
    assert four > 1.7 * two
    assert two > 15 * copies_us(**large | {"tokens_per_rank": "256"}, ep_size="2")


def test_rows_of_neighbouring_tokens_cross_between_nodes_together() -> None:
    """Rows take longer if every second token visits the other node than if each token of half a batch does."""
    nodes = dict(library="moe_rt, 2 emulated nodes", ep_size="2", hidden="1024", notes="nodes=2; to_ranks=2.0")
    half = copies_us(**nodes, topk="1", experts="2", tokens_per_rank="1024")
    whole = copies_us(**nodes, topk="2", experts="2", tokens_per_rank="512")
    assert half > 1.5 * whole


def test_a_layer_also_takes_its_products() -> None:
    exchange, layer = copies_us(op="pair"), copies_us(op="layer", notes="intermediate=512")
    flops = 512 * 4 * 6 * 2048 * 512
    assert layer > exchange + 2 * flops / 150e3
    assert copies_us(op="layer", notes="intermediate=512", tokens_per_rank="1") > 2 * 4 * 10, "experts of two ranks"


def test_outliers_do_not_move_the_fit() -> None:
    rows = [parse(line) for line in measured("normal", noise=0.0)]
    family, x = FAMILIES["channels"], Points.of(row.shape for row in rows)
    times = np.array([row.latency_us for row in rows])
    spoilt = times.copy()
    spoilt[4] *= 10
    assert np.median(np.abs(family.seconds(fit(family, x, spoilt), x) / times - 1)) < 0.03


def test_corrections_reach_measured_shapes_and_fade_elsewhere() -> None:
    features = np.zeros((3, 6)) + np.array([[0.0], [1.0], [2.0]])
    correction = Correction.of(features, np.array([0.2, 0.2, 0.2]))
    near, certain = correction.at(features)
    far, uncertain = correction.at(features + 40)
    assert near == pytest.approx(0.2, abs=0.03)
    assert np.abs(far).max() < 0.001
    assert uncertain.min() > certain.max()


def test_predictions_hold_their_interval_and_name_their_basis() -> None:
    library = Library(
        calibrate([parse(line) for line in measured("low_latency")], source="s", device="d", date="2026-01-01")
    )
    row = parse(measured("low_latency")[7])
    own = library.predict(row.system, row.op, row.shape)
    assert own.p5_us < row.latency_us < own.p95_us
    assert "DeepEP-V1, H100 + IB, low_latency, dispatch" in own.basis
    other = parse(LINE | {"hardware": "H800", "tokens_per_rank": "512"})
    moved = library.predict(other.system, other.op, other.shape)
    assert "links scaled by 0.44" in moved.basis
    assert moved.p95_us / moved.us > own.p95_us / own.us


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hardware": "MI300X"}, "link class: got dispatch of direct over xgmi"),
        ({"ep_size": "16"}, "link class: got ib between nodes"),
        ({"op": "combine"}, "link class: got combine"),
        ({"tokens_per_rank": "9999999"}, "tokens: got 1e[+]07, expected 0.0625 to"),
    ],
)
def test_what_was_not_calibrated_is_refused(changes: dict[str, str], field: str) -> None:
    library = Library(calibrate([parse(line) for line in measured("low_latency")], source="s", device="d", date="x"))
    row = parse(LINE | changes)
    with pytest.raises(InvalidConfig, match=field):
        library.predict(row.system, row.op, row.shape)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens_per_rank", "-4"), ("hidden", "wide"), ("mode", "fast"), ("op", "prepare"), ("dtype", "q3"),
        ("hardware", "abacus"), ("latency_us", "nan"), ("ep_size", "zero"), ("topk", "999"),
    ],
)  # fmt: skip
def test_senseless_measurements_are_refused_by_name(field: str, value: str) -> None:
    with pytest.raises(InvalidConfig, match=f"^{field}: got .*expected"):
        parse(LINE | {field: value})


@pytest.mark.parametrize(
    ("changes", "same_as"),
    [
        ({"mode": "decode"}, {}),
        ({"hidden": "", "topk": "", "experts": "", "dtype": ""}, {}),
        ({"dtype": "fp8/bf16"}, {}),
        ({"op": "combine", "dtype": "fp8/bf16"}, {"op": "combine", "dtype": "bf16"}),
        ({"op": "combine_low_precision", "dtype": ""}, {"op": "combine", "dtype": "bf16"}),
        ({"tokens_per_rank": ""}, {"tokens_per_rank": "128"}),
        ({"mode": "high_throughput", "notes": "16 SMs"}, {"mode": "normal", "notes": "sms=16"}),
        ({"ep_size": "320", "experts": ""}, {"ep_size": "320", "experts": "320"}),
        ({"hardware": "GB200", "nvlink_domain": ""}, {"hardware": "GB200", "nvlink_domain": "72"}),
    ],
)
def test_empty_columns_and_other_words_are_understood(changes: dict[str, str], same_as: dict[str, str]) -> None:
    assert parse(LINE | changes) == parse(LINE | same_as)


def test_what_nothing_covers_is_guessed_on_request_with_a_wide_interval() -> None:
    made = calibrate([parse(line) for line in measured("low_latency")], date="2026-01-01")
    known = parse(LINE)
    certain = Library(made, guess=True).predict(known.system, known.op, known.shape)
    assert "guessed" not in certain.basis
    other = parse(LINE | {"hardware": "MI300X"})
    guess = Library(made, guess=True).predict(other.system, other.op, other.shape)
    assert guess.basis.startswith("guessed from")
    assert guess.p95_us / guess.p5_us > 8 > certain.p95_us / certain.p5_us


@pytest.mark.parametrize(
    ("changes", "link"),
    [
        ({"hardware": "GH200 pod"}, "unknown"),
        ({"hardware": "Ascend 910C"}, "unknown"),
        ({"hardware": "AMD Instinct MI308X"}, "xgmi"),
        ({"mode": "", "tokens_per_rank": "4096"}, "nvlink"),
        ({"dtype": "posit8"}, "nvlink"),
        ({"ep_size": ""}, "nvlink"),
    ],
)
def test_unknown_words_are_guessed_on_request_only(changes: dict[str, str], link: str) -> None:
    with pytest.raises(InvalidConfig):
        parse(LINE | changes)
    row = parse(LINE | changes, guess=True)
    assert row.system.gpu.link == link
    made = calibrate([parse(line) for mode in ("low_latency", "normal") for line in measured(mode)], date="2026-01-01")
    found = Library(made, guess=True).predict(row.system, row.op, row.shape)
    assert ("guessed" in found.basis) is (link != "nvlink")


def test_another_gpu_starts_as_much_later_as_in_other_ops() -> None:
    """Both GPUs have a normal mode; the low-latency mode of one is missing."""

    def rows(hardware: str, mode: str, later: float) -> list[Row]:
        lines_of = measured(mode, noise=0.0, hardware=hardware)
        return [parse(line | {"latency_us": str(float(line["latency_us"]) + later)}) for line in lines_of]

    known = [*rows("H200", "low_latency", 0), *rows("H200", "normal", 0), *rows("H100", "normal", 8)]
    library, target = Library(calibrate(known, date="x")), rows("H100", "low_latency", 8)[0]
    own = next(one for one in library.calibrations if one.mode == "low_latency")
    assert library.later_us(own, target.system) == pytest.approx(8, abs=2)
    assert library.predict(target.system, "dispatch", target.shape).us == pytest.approx(target.latency_us, rel=0.12)
    assert library.later_us(own, parse(LINE | {"hardware": "B200"}).system) == 0, "measured with no library of both"


def test_a_network_lends_other_families_only_its_rate() -> None:
    crossed = [parse(line) for line in measured("low_latency", ep_size="16")]
    library = Library(calibrate([*crossed, *(parse(line) for line in measured("normal"))], date="x"))
    row = parse(LINE | {"mode": "normal", "ep_size": "16", "tokens_per_rank": "8"})
    one = next(one for one in library.calibrations if one.mode == "normal")
    other = next(one for one in library.calibrations if one.mode == "low_latency")
    assert library.network(one, row.system) is other
    assert other.parameters["t_net"] < one.parameters["t_net"] / 2, "else the test would show nothing"
    t0, t_net = one.parameters["t0"], one.parameters["t_net"]
    assert library.predict(row.system, "dispatch", row.shape).us > 0.8 * (t0 + t_net)


def test_a_batch_of_one_chunk_takes_both_stages_in_turn() -> None:
    first, second = np.array([10.0, 10.0]), np.array([4.0, 40.0])
    assert pipelined(first, second, np.array([1.0, 1.0])).tolist() == [14, 50]
    assert pipelined(first, second, np.array([10.0, 10.0])).tolist() == [10.4, 41]


def test_every_gpu_and_model_names_its_public_source() -> None:
    assert all("data sheet" in gpu.source or "report" in gpu.source for gpu in GPUS)
    assert all(model.source.count("/") == 1 for model in MODELS.values())


def test_a_pair_takes_as_long_as_its_two_ops() -> None:
    lines_of_both = [*measured("low_latency"), *measured("low_latency", "combine")]
    library = Library(calibrate([parse(line) for line in lines_of_both], date="2026-01-01"))
    both = parse(LINE | {"op": "dispatch+combine"})
    parts = [parse(LINE | {"op": "dispatch"}), parse(LINE | {"op": "combine", "dtype": "bf16"})]
    each = sum(library.predict(row.system, row.op, row.shape).us for row in parts)
    assert library.predict(both.system, both.op, both.shape).us == pytest.approx(each)


def test_similar_systems_lend_what_few_measurements_leave_open() -> None:
    full = [parse(line) for line in measured("normal", library="MORI-EP", noise=0.0)]
    poor = [parse(line | {"mode": "low_latency"}) for line in measured("normal", library="MORI-EP", noise=0.0)[:3]]
    target = parse(measured("normal", library="MORI-EP", noise=0.0)[4] | {"mode": "low_latency"})

    def error(rows: list[Row]) -> float:
        library = Library([one for one in calibrate(rows, date="x") if one.mode == "low_latency"])
        return abs(library.predict(target.system, target.op, target.shape).us / target.latency_us - 1)

    assert error([*full, *poor]) < error(poor) / 2


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_residuals_of_one_gpu_do_not_correct_another(scale: float) -> None:
    """Only the formula counts for links of another rate."""
    (one,) = calibrate([parse(line) for line in measured("normal", noise=0.2)], date="x")
    x = Points.of(parse(line).shape for line in lines("normal"))
    values = one.parameters | {"B_link": one.parameters["B_link"] * scale}
    assert one.times(x, scale)[0] == pytest.approx(FAMILIES[one.family].seconds(values, x))
    assert one.times(x)[0] != pytest.approx(FAMILIES[one.family].seconds(one.parameters, x), rel=0.02)


def test_repeated_shapes_count_once() -> None:
    features, residuals = _merged(np.array([[2.0, 1.0], [1.0, 1.0], [2.0, 1.0]]), np.array([0.1, 0.5, 0.3]))
    assert features.tolist() == [[1.0, 1.0], [2.0, 1.0]]
    assert residuals.tolist() == pytest.approx([0.5, 0.2])


def test_an_interval_grows_beyond_the_measured_shapes() -> None:
    library = Library(calibrate([parse(line) for line in measured("normal")], date="x"))
    widths = []
    for tokens in (64, 4096, 16384, 65536):
        row = parse(measured("normal")[0] | {"tokens_per_rank": str(tokens)})
        found = library.predict(row.system, row.op, row.shape)
        widths.append(found.p95_us / found.p5_us)
    assert widths[1] < widths[2] < widths[3]
    assert widths[0] < 1.3


def test_a_bandwidth_stands_for_a_missing_time() -> None:
    row = parse(LINE | {"latency_us": "", "bandwidth_gbs": "100"})
    assert row.latency_us == pytest.approx(64 * 8 * (7168 + 224 + 16) / 100e3)


def test_calibrations_are_kept_and_checked(tmp_path: Path) -> None:
    made = calibrate([parse(line) for line in measured("normal")], source="s", device="d", date="2026-01-01")
    save(made, tmp_path / "a.json")
    assert load(tmp_path / "a.json") == made
    document = json.loads((tmp_path / "a.json").read_text())
    for spoil, message in (
        ({"version": 99}, r"version: got \['99'\], expected 3"),
        ({"colour": "red"}, "unexpected keyword argument 'colour'"),
        ({"family": "rings"}, "family: got rings, expected one of direct, "),
        ({"parameters": {"t0": 1.0}}, r"parameters: got other ones \(B_link, .*calibrate again with this version"),
    ):
        (tmp_path / "b.json").write_text(json.dumps([document[0] | spoil]))
        with pytest.raises(InvalidConfig, match=message):
            load(tmp_path / "b.json")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(InvalidConfig, match="expected a JSON list of calibrations"):
        load(tmp_path / "c.json")


def test_the_least_of_the_times_counts_whose_cores_shared_a_cache() -> None:
    def line(us: float, ns: int, **changes: str) -> Row:
        made = LINE | dict(library="moe_rt", hardware="cpu: chip, 2 cores", mode="copies", dtype="bf16", ep_size="2")
        return parse(made | {"latency_us": str(us), "notes": f"line {ns} ns"} | changes)

    seen = [
        line(50, 120),
        line(80, 12),
        line(70, 20),
        line(9, 120, tokens_per_rank="8"),
        line(8, 99, tokens_per_rank="8"),
    ]
    assert [row.latency_us for row in least(seen)] == [70, 8]
    assert [row.latency_us for row in least([*seen[:2], line(39, 120)])] == [39], "others disturbed the near time"
    far = [line(us, ns, notes=f"line {ns} ns; nodes=2") for us, ns in ((50, 120), (80, 12))]
    assert [row.latency_us for row in least(far)] == [50], "TCP between nodes takes most of the time"
    assert calibrate(seen, date="x") == calibrate(least(seen), date="x")


def test_a_benchmark_of_this_machine_gives_a_line_for_each_phase() -> None:
    measured_lines = measure(cases_of([(1, 4, 8, 2, 4, "uniform")], ("layer",)), 2, lambda part: None)
    assert [line["op"] for line in measured_lines] == ["layer", "layer+backward"]
    rows = [parse(line) for line in measured_lines]
    assert all(row.latency_us > 0 and row.system.family == "copies" for row in rows)
    assert [row.shape.intermediate for row in rows] == [512, 512]
    assert {one.op for one in calibrate(rows, date="x")} == {"layer", "layer+backward"}


def test_each_round_gives_a_line_of_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds measure all cases anew, with the iterations that were asked for."""
    asked: list[int | None] = []
    medians = iter([30.0, 70.0, 20.0, 90.0, 40.0, 80.0])

    def run(cases: list[Any], settings: Any, *rest: Any) -> dict[str, Any]:
        asked.append(settings.iters)
        results = [[{"phase": "", "isolated_us": {"p50": next(medians)}}] for _ in cases]
        runs = [{"results": each, "line_latency_ns": [[0, 7.0 * len(asked)]]} for each in results]
        return {"runs": runs, "machine": machine_card()}

    monkeypatch.setattr(bench_calibrate, "run_cases", run)
    shapes = [(1, tokens, 8, 2, 4, "uniform") for tokens in (4, 5)]
    lines = measure(cases_of(shapes, ("pair",)), 9, None, rounds=3)
    assert asked == [9, 9, 9]
    found = [(line["tokens_per_rank"], line["latency_us"], line["notes"].split("; ")[-1]) for line in lines]
    assert found == [
        ("4", "30", "line 7 ns"), ("5", "70", "line 7 ns"), ("4", "20", "line 14 ns"),
        ("5", "90", "line 14 ns"), ("4", "40", "line 21 ns"), ("5", "80", "line 21 ns"),
    ]  # fmt: skip


@pytest.mark.parametrize(("ns", "warns"), [((0, 12, 400), False), ((0, 120, 400), True), ((0,), False)])
def test_cores_without_a_common_cache_are_named(ns: tuple[int, ...], warns: bool) -> None:
    text = cores_apart([{"notes": f"busiest=1.000; line {each} ns"} for each in ns])
    assert ("cores do not share a cache now (120 ns a line)" in text) is warns


def test_published_calibrations_name_their_source() -> None:
    for one in published().calibrations:
        assert all((one.source, one.device, one.date))
        assert set(one.parameters) == set(FAMILIES[one.family].names)
        assert 0 <= one.median_error < 0.1
        assert len(one.features) == len(one.residuals) > 0


def write(path: Path, rows: list[dict[str, str]], columns: tuple[str, ...] = COLUMNS) -> str:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def test_scoring_prints_one_json_line_and_fails_if_it_refuses_too_much(tmp_path: Path) -> None:
    known = [LINE | {"tokens_per_rank": str(t), "latency_us": str(15 + t / 3)} for t in (8, 16, 64, 128)] * 5
    scored = CliRunner().invoke(main, [write(tmp_path / "a.csv", [*known, LINE | {"op": "prepare"}])])
    figures = json.loads(scored.output.splitlines()[-1])
    assert scored.exit_code == 0, scored.output
    assert (figures["rows"], figures["refused"], figures["failed"]) == (21, 1, False)
    assert figures["median_absolute_error"] < 0.5
    assert "refused 1: op: got prepare, expected dispatch, combine or pair (lines 22)" in scored.output
    scored = CliRunner().invoke(main, [write(tmp_path / "c.csv", [*known[:9], LINE | {"op": "prepare"}])])
    assert scored.exit_code == 0, "one in ten is not too much"
    scored = CliRunner().invoke(main, [write(tmp_path / "b.csv", [*known[:4], LINE | {"op": "prepare"}])])
    assert scored.exit_code == 1
    assert json.loads(scored.output.splitlines()[-1])["failed"]


def test_scoring_names_missing_columns(tmp_path: Path) -> None:
    scored = CliRunner().invoke(main, [write(tmp_path / "a.csv", [LINE], COLUMNS[:-1])])
    assert scored.exit_code == 1
    assert "no column notes" in scored.output


def test_a_table_is_fitted_into_a_file(tmp_path: Path) -> None:
    table, out = write(tmp_path / "table.csv", measured("normal")), tmp_path / "own.json"
    done = CliRunner().invoke(bench_calibrate.calibrate, ["--csv", table, "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == f"{out}: 1 calibrations, 0 lines refused"
    assert [one.library for one in load(out)] == ["DeepEP-V1"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "copies"])
def test_costs_make_ops_slower_and_rates_faster(name: str) -> None:
    """Ten times a cost is never faster, and ten times a rate never slower; each counts for some shape."""
    shapes = [
        parse(line | {"ep_size": ranks, "nvlink_domain": "8"}).shape
        for line in lines("normal")
        for ranks in ("8", "16")
    ]
    family, x = FAMILIES[name], Points.of(shapes)
    usual = {p.name: p.usual for p in family.parameters}
    before = family.seconds(usual, x)
    assert set(x.nodes) == {1, 2}
    for parameter in usual:
        if parameter[:2] in ("t_", "c_", "B_", "b_") and parameter not in ("t_doubling", "c_share"):
            change = family.seconds(usual | {parameter: 10 * usual[parameter]}, x) / before - 1
            sign = 1 if parameter[0] in "tc" else -1
            assert (sign * change >= -1e-12).all(), parameter
            assert (sign * change > 1e-9).any(), parameter


def test_scoring_guesses_what_is_unknown_and_counts_it(tmp_path: Path) -> None:
    rows = [LINE, LINE | {"hardware": "Ascend 910C"}, LINE | {"mode": "", "hardware": "Ascend 910C"}]
    scored = CliRunner().invoke(main, [write(tmp_path / "a.csv", rows)])
    figures = json.loads(scored.output.splitlines()[-1])
    assert (figures["predicted"], figures["refused"], figures["guessed"]) == (3, 0, 2)
