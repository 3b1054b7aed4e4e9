"""Plans, questions, simulation and search answer as their formulas say, and refuse what makes no sense."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from moe_rt.cli import main
from moe_rt.errors import InvalidConfig
from moe_rt.plan import plots, simulate, tune
from moe_rt.plan.answers import Cluster, Configuration, layer_of, make_plan, overlapped
from moe_rt.plan.ask import QUESTIONS, Setting
from moe_rt.plan.calibration import calibrate, published, save
from moe_rt.plan.distinct import distinct
from moe_rt.plan.models import MODELS, find_model, read_config
from moe_rt.plan.points import COLUMNS, parse
from moe_rt.plan.routing import capacity_advice, overflow, popularity

QWEN = MODELS["qwen3-30b-a3b"]
UNIFORM = popularity(QWEN.experts)
PLANNED = ("--model", "mixtral-8x7b", "--gpus", "8", "--tokens", "4096")


def invoke(*words: str):
    return CliRunner().invoke(main, ["plan", *words])


def test_a_plan_is_sorted_and_says_why() -> None:
    made = make_plan(QWEN, Cluster(8), 4096, capacity_factor=1.25)
    best = made.best
    assert best[0].step_us == min(layer.step_us for layer in made.layers)
    assert len({(one.configuration.ep_size, one.configuration.mode) for one in best}) == len(best)
    for layer in made.layers:
        assert layer.p5_us < layer.step_us < layer.p95_us
        assert layer.fits
        assert layer.overflow is not None
    assert "limited by" in made.why(best[0])


def test_skew_never_makes_a_layer_faster() -> None:
    one = Configuration(8, "normal", "fp8", 2048)
    even = layer_of(QWEN, Cluster(8), one, UNIFORM)
    skewed = layer_of(QWEN, Cluster(8), one, popularity(QWEN.experts, 1.5))
    assert skewed.busiest > even.busiest >= 1
    assert skewed.step_us > even.step_us


def test_memory_is_that_of_all_layers_and_of_the_capacity() -> None:
    one = Configuration(8, "normal", "fp8", 2048)
    usual = layer_of(QWEN, Cluster(8), one, UNIFORM)
    assert usual.weights_bytes == QWEN.experts // 8 * 3 * 2 * QWEN.hidden * QWEN.intermediate * QWEN.layers
    row_and_copy = 2 * 2 * QWEN.hidden
    assert usual.buffer_bytes == int(row_and_copy * 2048 * QWEN.topk * usual.busiest)
    limited = layer_of(QWEN, Cluster(8), one, UNIFORM, capacity_factor=3.0)
    assert limited.buffer_bytes == row_and_copy * 2048 * QWEN.topk * 3
    for layer in (usual, limited):
        assert layer.memory_bytes == layer.weights_bytes + layer.buffer_bytes


def test_chunks_hide_the_shorter_part() -> None:
    assert overlapped(10, 100, 10, 1) == 120
    assert overlapped(5, 50, 5, 2) == 110  # products hide one exchange
    assert overlapped(50, 5, 50, 2) == 105 + 150  # links decide, slowed by the products


def test_two_nodes_cost_more_than_one() -> None:
    one = layer_of(QWEN, Cluster(16), Configuration(8, "normal", "fp8", 4096), UNIFORM)
    two = layer_of(QWEN, Cluster(16), Configuration(16, "normal", "fp8", 4096), UNIFORM)
    assert two.dispatch.us > one.dispatch.us


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_has_an_answer(question: str) -> None:
    answer = QUESTIONS[question](Setting(QWEN, Cluster(8), 256))
    assert answer.text
    assert all(len(row) == len(answer.columns) for row in answer.rows)


def test_a_question_compares_layers_as_they_are_planned() -> None:
    """Each row is of a batch; balanced experts cost a plan, and chunks are two."""
    asked = Setting(QWEN, Cluster(8), 256)
    skewed, chunked = QUESTIONS["balance"](asked), QUESTIONS["chunks"](asked)
    for tokens, before, after, choice in skewed.rows:
        uneven, even = (asked.layer(8, tokens=tokens, even=each).step_us for each in (False, True))
        assert (before, after) == (round(uneven, 1), round(even + 60, 1))
        assert choice == ("balance" if even + 60 < uneven else "do not")
    for tokens, before, after, choice in chunked.rows:
        whole, halves = (asked.layer(8, tokens=tokens, chunks=each).step_us for each in (1, 2))
        assert (before, after, choice) == (round(whole, 1), round(halves, 1), "2" if halves < whole else "1")
    assert {row[3] for row in skewed.rows} == {"balance", "do not"}


@pytest.mark.parametrize(("gpus", "factor"), [(8, 8), (16, 16), (32, 16)])
def test_the_worst_case_of_few_experts(gpus: int, factor: float) -> None:
    """A rank receives a token once for each of its experts at most: 128 experts are 4 on each of 32 GPUs, topk is 8."""
    rows = QUESTIONS["bound"](Setting(QWEN, Cluster(gpus), 256)).rows
    assert rows[-1][:2] == ("never", pytest.approx(factor, rel=0.01))


def test_the_command_line_answers_in_json_and_tables() -> None:
    plain = invoke()
    assert plain.exit_code == 0
    assert "moe-rt plan ask" in plain.output
    words = ("--model", "qwen3-30b-a3b", "--gpus", "4", "--tokens", "64")
    document = json.loads(invoke(*words, "--json").output)
    assert document["layers"][0]["configuration"]["ep_size"] in (2, 4)
    shown = invoke(*words, "--capacity-factor", "1.5", "--measured", "dispatch=1000")
    assert "overflows with probability" in shown.output
    assert "skew, if the busiest rank receives" in shown.output
    assert "is the op over when timed?" in invoke(*words, "--measured", "dispatch=1").output
    predicted = document["layers"][0]["dispatch"]
    as_predicted = invoke(*words, "--measured", f"dispatch={predicted['us']:.1f}").output
    assert f"is within the interval up to {predicted['p95_us']:.0f} us" in as_predicted
    assert "DeepEP-V1" in invoke("systems").output
    asked = invoke("ask", "payload", *words, "--json")
    assert json.loads(asked.output)["question"] == "payload"


def test_plans_are_compared_and_other_files_are_refused(tmp_path: Path) -> None:
    words = ("--model", "qwen3-30b-a3b", "--gpus", "4", "--json", "--tokens")
    for name, tokens in (("low", "64"), ("high", "4096")):
        (tmp_path / f"{name}.json").write_text(invoke(*words, tokens).output)
    (tmp_path / "bad.json").write_text("{}")
    low, high, bad = (str(tmp_path / f"{name}.json") for name in ("low", "high", "bad"))
    assert "high takes least per token" in invoke("compare", low, high).output
    assert "expected a document of moe-rt plan --json" in invoke("compare", low, bad).output
    assert "files: got 1, expected at least two" in invoke("compare", low).output


def test_cpu_ranks_are_planned_from_a_calibration_of_their_machine(tmp_path: Path) -> None:
    shapes = [(t, h, k, r) for t in (16, 256, 2048) for h in (512, 2048) for k, r in ((2, 2), (8, 4))]
    lines = [
        dict.fromkeys(COLUMNS, "")
        | dict(library="moe_rt", hardware="cpu: chip, 2 cores", nvlink_domain=str(r), mode="copies", op=op)
        | dict(ep_size=str(r), tokens_per_rank=str(t), hidden=str(h), topk=str(k), experts="128", dtype="bf16")
        | dict(latency_us=str(50 + t * h * k / 4e3))
        for t, h, k, r in shapes
        for op in ("dispatch", "combine")
    ]
    save(calibrate([parse(line) for line in lines], date="2026-01-01"), tmp_path / "own.json")
    config = dict(hidden_size=512, moe_intermediate_size=64, num_experts=128, num_experts_per_tok=8)
    (tmp_path / "config.json").write_text(json.dumps(config | dict(num_hidden_layers=2)))
    model = str(tmp_path / "config.json")
    words = ("--model", model, "--gpus", "2", "--tokens", "128", "--calibration", str(tmp_path / "own.json"))
    document = json.loads(invoke(*words, "--hardware", "cpu: chip, 2 cores", "--json").output)
    assert {layer["configuration"]["mode"] for layer in document["layers"]} == {"copies"}
    slow = invoke(*words, "--hardware", "cpu: chip, 2 cores", "--measured", "combine=99999").output
    assert "times the prediction. What explains it:" in slow
    assert "malloc, if large batches are slow" in slow
    own = invoke(*words, "--hardware", "cpu").output
    assert "hardware: got cpu, and calibrations of cpu: chip, 2 cores, expected one of this machine" in own


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--model", "deepseek-v4", "--gpus", "8", "--tokens", "1"),
            "model: got deepseek-v4.*did you mean deepseek-v3.*known are deepseek-v3, deepseek-v2,",
        ),
        (("--model", "gpt-oss-120b", "--gpus", "12", "--tokens", "1"), "gpus: got 12 for 128 experts, expected"),
        (("--model", "mixtral-8x7b", "--gpus", "8", "--tokens", "-1"), "tokens: got -1, expected a positive number"),
        (("--model", "mixtral-8x7b", "--gpus", "8", "--tokens", "1", "--hardware", "laptop"), "hardware: got laptop"),
        (("--model", "mixtral-8x7b", "--gpus", "1", "--tokens", "1"), "gpus: got 1, expected at least 2"),
        (("--model", "mixtral-8x7b", "--gpus", "8"), "a plan needs --model, --gpus and --tokens"),
        (("--json",), "a plan needs --model, --gpus and --tokens"),
        ((*PLANNED, "--json", "--measured", "dispatch=1"), "--measured: got it with --json"),
        ((*PLANNED, "--capacity-factor", "-1"), "capacity_factor: got -1.0, expected a positive number"),
        ((*PLANNED, "--hardware", "8x H100 + 8x A100"), "hardware: got A100 and H100 in '8x H100"),
        ((*PLANNED, "--hardware", "H100 + IB and RoCE"), "hardware: got ib and roce in .* plan the slower one"),
        ((*PLANNED, "--hardware", "cpu"), "expected one of this machine, cpu: .*calibrate"),
    ],
)
def test_bad_input_names_the_field(words: tuple[str, ...], message: str) -> None:
    done = invoke(*words)
    assert done.exit_code != 0
    assert re.search(message, done.output), done.output


def test_a_network_that_nobody_calibrated_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="link class: got efa between nodes"):
        layer_of(QWEN, Cluster(16, "H200 + EFA"), Configuration(16, "normal", "fp8", 128), UNIFORM)


def test_a_trace_of_other_experts_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.full((4, 1, 2), 200, np.int16))
    words = ("--model", "qwen3-30b-a3b", "--gpus", "4", "--tokens", "64", "--trace", str(tmp_path / "a.npy"))
    assert "experts: got ids 200 to 200, expected -1 to 127" in invoke(*words).output


def test_configs_of_hugging_face_are_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = dict(hidden_size=64, moe_intermediate_size=32, n_routed_experts=16, num_experts_per_tok=2)
    path.write_text(json.dumps(config | dict(num_hidden_layers=5, first_k_dense_replace=1, model_type="tiny")))
    model = find_model(str(tmp_path))
    assert (model.name, model.hidden, model.experts, model.topk, model.layers) == ("tiny", 64, 16, 2, 4)
    path.write_text(json.dumps(dict(hidden_size=64, intermediate_size=1, num_hidden_layers=2)))
    with pytest.raises(InvalidConfig, match="experts: got a dense model"):
        read_config(path)
    path.write_text(json.dumps(config))
    with pytest.raises(InvalidConfig, match="layers: got nothing"):
        read_config(path)


def test_capacity_advice_names_both_factors() -> None:
    text = capacity_advice(1.02, 64, 8, 8, popularity(64, 0.3))
    assert text.startswith("factor 1.02 overflows with probability ")
    assert text.endswith("for one in 10,000")


@pytest.mark.parametrize(("ranks", "domain"), [(2, None), (8, None), (16, 8), (12, 4)])
def test_the_simulation_agrees_with_the_closed_form(ranks: int, domain: int | None) -> None:
    ports = simulate.Ports(link_gbs=300, net_gbs=45)
    traffic = np.full((ranks, ranks), 1e6)
    step = simulate.exchange(traffic, ports, domain=domain)
    assert step.us == pytest.approx(simulate.closed_form_us(traffic, ports, domain), rel=0.02)


def test_the_busiest_port_and_stragglers_decide(tmp_path: Path) -> None:
    ports = simulate.Ports(link_gbs=300, straggler=1.0, slower=2.0)
    traffic = np.full((4, 4), 1e6)
    traffic[:, 2] = 9e6
    even = simulate.exchange(traffic, ports)
    assert even.us == pytest.approx(simulate.closed_form_us(traffic, ports), rel=0.02)
    assert simulate.exchange(traffic, ports, rng=np.random.default_rng(0)).us > 1.8 * even.us
    late = simulate.exchange(traffic, ports, arrives=np.array([0.0, 0.0, 50.0, 0.0]))
    assert late.ends[0] > even.ends[0] + 20  # waits for rank 2's rows
    simulate.write_trace(even, tmp_path / "t.json")
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 12 + 2 * 4


def test_a_step_takes_from_the_last_arrival_to_the_last_end() -> None:
    times = np.zeros((2, 2))
    assert simulate.Step(np.array([1.0, 5.0]), times, times, np.array([12.0, 9.0])).us == 7.0


@pytest.mark.parametrize("groups", [2, 8, 64, 1000])
def test_the_slowest_of_many_groups_follows_extreme_values(groups: int) -> None:
    drawn = (100 + 5 * np.random.default_rng(1).standard_normal((2000, groups))).max(1).mean()
    assert simulate.slowest_of(100, 5, groups) == pytest.approx(drawn, rel=0.005)
    assert simulate.slowest_of(100, 5, 100_000 // 8) < 125


SPACE = tune.Space({"a": (1, 2, 4, 8, 16, 32), "b": ("x", "y", "z"), "c": (1, 2, 3, 4), "d": (0.1, 1.0, 10.0)})


def bowl(number: int) -> float:
    knobs = SPACE.at(number)
    if knobs["c"] == 4:
        return math.inf
    off = {"x": 0.8, "y": 0.0, "z": 0.4}[str(knobs["b"])]
    return math.exp(
        (math.log2(float(knobs["a"])) - 3) ** 2 / 4 + off + 0.2 * float(knobs["c"]) + abs(float(knobs["d"]) - 1)
    )


def test_the_learned_search_needs_a_third_of_the_trials_of_a_random_one() -> None:
    costs = np.array([bowl(number) for number in range(SPACE.size)])
    needed = {
        name: float(np.median([tune.trials_to_best(search, SPACE, costs, seed) for seed in range(10)]))
        for name, search in tune.SEARCHES.items()
    }
    assert needed["cubic"] <= needed["random"] / 3, needed
    assert needed["best_predicted"] < needed["random"], needed


def test_a_knob_that_hardly_matters_does_not_hide_the_best() -> None:
    """A plan's capacity factors cost a ten-thousandth each; the best of them is found soon after the others' best."""
    space = tune.Space(SPACE.knobs | {"e": (1.0, 1.25, 1.5, 2.0)})
    costs = np.array([bowl(number // 4) * (1 + 1e-5 * float(space.at(number)["e"])) for number in range(space.size)])
    needed = [tune.trials_to_best(tune.cubic, space, costs, seed) for seed in range(5)]
    assert np.median(needed) < space.size / 8, needed


@pytest.mark.parametrize(("size", "first"), [(5, 4), (80, 5), (640, 8)])
def test_few_random_trials_come_first(size: int, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of the space, but 4 to 8."""
    judged: list[int] = []

    class Predicted(Exception):
        pass

    def judge(number: int) -> float:
        judged.append(number)
        return 1.0

    def propose(*given: object) -> int:
        raise Predicted

    monkeypatch.setattr(tune, "_propose", propose)
    with pytest.raises(Predicted):
        list(tune.cubic(tune.Space({"a": tuple(range(size))}), judge, size))
    assert len(judged) == first


@pytest.mark.parametrize("feasible", [0, 1])
def test_a_space_with_hardly_anything_feasible_is_searched_whole(feasible: int) -> None:
    """Half of a budget goes to random trials; predictions need a trial that runs."""
    space = tune.Space({"a": tuple(range(12))})
    costs = [1.0 if number < feasible else math.inf for number in range(space.size)]
    for name, search in tune.SEARCHES.items():
        for seed in range(4):
            trials = list(search(space, costs.__getitem__, space.size, seed=seed))
            numbers = [trial.number for trial in trials]
            found = any(math.isfinite(trial.cost) for trial in trials[:6])
            expected = 6 if name == "best_predicted" and not found else space.size
            assert sorted(set(numbers)) == sorted(numbers)
            assert len(numbers) == expected, name


def test_searches_never_repeat_a_trial() -> None:
    for search in tune.SEARCHES.values():
        numbers = [trial.number for trial in search(SPACE, bowl, 30, seed=3)]
        assert len(set(numbers)) == len(numbers) == 30


def test_configurations_are_alike_by_their_knobs() -> None:
    alike = tune.Space({"size": [1.0, 2.0, 4.0, 64.0], "word": ["a", "b"]}).alike()
    assert np.diag(alike) == pytest.approx(np.ones(8))
    assert (alike == alike.T).all()
    near, far, other_word = alike[0, 2], alike[0, 6], alike[0, 1]
    assert 1 > near > far > 0
    both = (tune.ALIKE_WORDS + 1) / 2, tune.ALIKE_WORDS  # sizes are equal: the mean and the product of the knobs
    assert other_word == pytest.approx(sum(both) / 2)


def test_a_plot_has_the_floor_of_its_links() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots._draw_times(axes, make_plan(QWEN, Cluster(8), 64), UNIFORM, published())
    lines = {line.get_label(): line for line in axes.get_lines()}
    for op, row_bytes in (("dispatch", 2048 + 2048 / 128 * 4 + 16), ("combine", 2 * 2048)):
        tokens, floors = lines[f"{op}, links alone"].get_data()
        us = distinct(8, 128, 8) * 7 / 8 * row_bytes / 450e3  # of a token that visits other ranks, at 450 GB/s
        assert floors / tokens == pytest.approx(np.full(len(tokens), us))
        assert (floors < lines[op].get_ydata()).all()


@pytest.mark.parametrize("name", ["plan.pdf", "svg", "plan"])
def test_plots_of_other_kinds_are_refused(tmp_path: Path, name: str) -> None:
    done = invoke("--model", "qwen3-30b-a3b", "--gpus", "4", "--tokens", "64", "--plot", str(tmp_path / name))
    assert done.exit_code == 1
    assert f"plot: got {name}, expected a name that ends in .svg or .png" in done.output


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plots_are_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"plan.{suffix}"
    done = invoke("--model", "qwen3-30b-a3b", "--gpus", "4", "--tokens", "64", "--plot", str(path))
    assert done.exit_code == 0, done.output
    assert path.stat().st_size > 5000


def test_a_plot_shows_the_best_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory is the least of each size, and the risk is that of the first line of the table."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: drawn.append(figure))
    plan = make_plan(QWEN, Cluster(8), 64)
    plots.draw_plan(plan, UNIFORM, tmp_path / "plan.svg", published())
    _, memory, risk = drawn[0].axes
    sizes, gigabytes = memory.get_lines()[0].get_data()
    for size, shown in zip(sizes, gigabytes, strict=True):
        each = [layer.memory_bytes / 1e9 for layer in plan.layers if layer.configuration.ep_size == size]
        assert shown == pytest.approx(min(each))
    assert set(sizes) == {layer.configuration.ep_size for layer in plan.layers}
    best = plan.layers[0].configuration
    factors, shown = risk.get_lines()[0].get_data()
    for factor, probability in zip(factors, shown, strict=True):
        expected = overflow(factor, best.tokens, QWEN.topk, best.ep_size, UNIFORM).probability
        assert probability == pytest.approx(max(expected, 1e-8))
    assert risk.get_title() == f"overflow, EP {best.ep_size}"
