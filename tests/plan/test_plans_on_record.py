"""Plans, questions, predictions and exports of published systems give the numbers and words on record.

After a change on purpose: python tests/plan/test_plans_on_record.py
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.recorded import NEAR, REL, assert_on_record, result_of, results_of, write_record

from moe_rt.cli import main
from moe_rt.plan.answers import (
    Cluster,
    Configuration,
    busiest_of,
    configurations,
    experts_us,
    layer_of,
    make_plan,
    shape_of,
)
from moe_rt.plan.ask import QUESTIONS, Setting
from moe_rt.plan.calibration import Library, calibrate, published
from moe_rt.plan.export import aiconfigurator_lines, collectivex_cases, measurements
from moe_rt.plan.models import MODELS
from moe_rt.plan.points import parse
from moe_rt.plan.routing import popularity
from moe_rt.plan.systems import GPUS, gpu_of, row_bytes, system_of

RECORD = Path(__file__).with_suffix(".json")
QWEN, DEEPSEEK, MIXTRAL = (MODELS[name] for name in ("qwen3-30b-a3b", "deepseek-v3", "mixtral-8x7b"))
CLUSTERS = {"H100": Cluster(16), "H200": Cluster(8, "H200", efficiency=0.7), "MI300X": Cluster(8, "MI300X"),
            "GB200": Cluster(16, "GB200", 16, "TRTLLM-NVLinkOneSided")}  # fmt: skip


def shown(*words: str) -> Any:
    """Return the text of a command without the lines of its tables, and its exit status."""
    done = CliRunner().invoke(main, ["plan", *words])
    lines = (" ".join(re.sub(r"[\u2500-\u257f]+", "|", line).split()) for line in done.output.splitlines())
    return [done.exit_code, [line for line in lines if not re.fullmatch(r"[| ]*", line)]]


def planned(name: str) -> Any:
    """Return the facts of each configuration, best first, and what was refused."""
    tokens, factor = {"H100": (512, 1.5), "H200": (4096, None), "MI300X": (128, 2.0), "GB200": (256, 1.25)}[name]
    made = make_plan(QWEN, CLUSTERS[name], tokens, sigma=0.5, capacity_factor=factor)
    return {"layers": [[
        list(vars(layer.configuration).values()), layer.dispatch, layer.experts_us, layer.combine, layer.step_us,
        layer.p5_us, layer.p95_us, layer.limits, layer.weights_bytes, layer.buffer_bytes, layer.memory_bytes,
        layer.fits, layer.busiest, layer.overflow and layer.overflow.rows, made.why(layer), layer.tokens_per_second,
    ] for layer in made.layers], "best": len(made.best), "refused": made.refused}  # fmt: skip


def refused_plans() -> Any:
    made = partial(make_plan, QWEN)
    uneven = np.ones(127) / 127
    return [result_of(make) for make in (
        partial(made, Cluster(8), 0), partial(made, Cluster(8), 1.5), partial(made, Cluster(8), 8, capacity_factor=0),
        partial(made, Cluster(12), 8), partial(made, Cluster(1), 8), partial(made, Cluster(8), 8, shares=uneven),
        partial(made, Cluster(6, domain=2), 8), partial(made, Cluster(24), 8), partial(made, Cluster(8), 10**9),
        partial(make_plan, MIXTRAL, Cluster(2, "H20"), 10**6), partial(Cluster, 0), partial(Cluster, 1, domain=0),
        partial(Cluster, 1, efficiency=0), partial(Cluster, 1, efficiency=1.01), partial(Cluster, 1, "H100 and A100"),
        partial(layer_of, QWEN, Cluster(8), Configuration(8, "normal", "fp8", 0), uneven),
        partial(layer_of, QWEN, Cluster(8), Configuration(3, "normal", "fp8", 8), uneven),
        partial(layer_of, QWEN, Cluster(6), Configuration(4, "normal", "fp8", 8), uneven),
        partial(layer_of, QWEN, Cluster(256), Configuration(256, "normal", "fp8", 8), uneven),
    )]  # fmt: skip


def parts() -> Any:
    """Return the parts of a layer: configurations worth it, shapes, products and the busiest rank."""
    cluster, one = CLUSTERS["H100"], Configuration(16, "normal", "fp8", 100)
    cpu = Cluster(4, "cpu: chip, 2 cores", 4)
    shapes = [
        shape_of(model, cluster.system(mode), op, replace(one, ep_size=size, payload=payload), 1.2)
        for model, size, mode, op, payload in (
            (QWEN, 16, "normal", "dispatch", "fp8"), (QWEN, 8, "low_latency", "combine", "fp8"),
            (DEEPSEEK, 16, "low_latency", "dispatch", "bf16"), (DEEPSEEK, 1, "normal", "dispatch", "fp8"),
        )
    ]  # fmt: skip
    products = [
        experts_us(model, Cluster(16, efficiency=efficiency), replace(one, tokens=tokens), 1.3)
        for model in (QWEN, DEEPSEEK) for efficiency in (0.5, 1.0) for tokens in (1, 100, 20000)
    ]  # fmt: skip
    busiest = [busiest_of(QWEN, tokens, ranks, popularity(128, sigma)) for tokens, ranks, sigma in (
        (1, 8, 0.0), (64, 8, 0.0), (64, 2, 1.0), (4096, 16, 0.3)
    )]  # fmt: skip
    tried = [
        [list(vars(each).values()) for each in configurations(QWEN, which, tokens)]
        for which, tokens in ((Cluster(6), 8), (Cluster(4), 512), (Cluster(2), 511), (cpu, 512))
    ]
    return {"shapes": shapes, "products": products, "busiest": busiest, "tried": tried}


def asked(question: str) -> Any:
    """Return answers on one node and on two, for even and for uneven experts, and refusals."""
    settings = [Setting(QWEN, Cluster(8), 256), Setting(QWEN, Cluster(8, domain=4), 2048, 2.0),
                Setting(DEEPSEEK, Cluster(8, "H200"), 64), Setting(MODELS["glm-4.5"], Cluster(3), 64)]  # fmt: skip
    return [result_of(partial(QUESTIONS[question], each)) for each in settings]


def predictions(guess: bool) -> Any:
    """Return times of ops of many systems, near and far from what is calibrated."""
    library = Library(published().calibrations, guess)
    systems = [system_of(*words) for words in (
        ("DeepEP-V1", "H100 SXM + 400G IB", "low_latency", 8), ("DeepEP-V1", "H800 + IB", "normal", 8),
        ("DeepEP-V1.2.1", "H200 SXM", "normal", 8), ("DeepEP-V1.2.1", "B200 SXM", "low_latency", 8),
        ("MORI-EP", "MI300X", "normal", 8), ("TRTLLM", "GB200 NVL72", "normal", 72),
        ("NCCL", "GB200", "raw_alltoall", 72),
        ("DeepEP-V1", "A100 + RoCE", "low_latency", 8), ("MORI-EP", "MI355X", "low_latency", 8),
        ("moe_rt", "cpu: chip, 2 cores", "copies", 4),
    )]  # fmt: skip
    found = []
    for system in systems:
        for ranks, tokens in ((8, 128), (16, 1024), (64, 1), (8, 10**7)):
            one = Configuration(ranks, system.mode, "fp8", tokens)
            for op in ("dispatch", "combine", "pair"):
                if system.mode == "raw_alltoall":
                    op = "alltoall"
                size = row_bytes(system, "dispatch", "fp8", DEEPSEEK.hidden)
                shape = replace(shape_of(DEEPSEEK, system, "combine", one), row_bytes=size)
                made = result_of(partial(library.predict, system, op, shape))
                found.append(list(made.values()) if isinstance(made, dict) else made)
    return found


def calibrated() -> Any:
    """Return calibrations of made-up tables of two GPUs and libraries, on one node and between nodes."""
    rows = []
    for hardware, library, mode, extra in (
        ("H100 + IB", "DeepEP-V1", "normal", 1.0), ("H200 + IB", "DeepEP-V1", "normal", 1.2),
        ("H100 + IB", "DeepEP-V1", "low_latency", 0.5), ("MI300X", "MORI-EP", "normal", 1.1),
    ):  # fmt: skip
        for ranks in ("8", "16"):
            for tokens in ("8", "128", "2048", "8"):
                us = extra * (20 + 3 * int(ranks) ** 0.5 + int(tokens) / 8)
                rows.append(parse({
                    "source": f"{library} table", "library": library, "hardware": hardware, "nvlink_domain": "8",
                    "mode": mode, "op": "dispatch", "ep_size": ranks, "tokens_per_rank": tokens, "hidden": "4096",
                    "topk": "8", "experts": "128", "dtype": "fp8", "latency_us": f"{us + len(rows) % 3}",
                }))  # fmt: skip
    return [vars(one) for one in calibrate(rows, date="2026-01-01")] + [
        [one.source, one.device] for one in calibrate(rows[:1], date="", source="s", device="d")
    ]


def exported() -> Any:
    plan = make_plan(QWEN, Cluster(4, "H100 + IB", 2), 600)
    lines = aiconfigurator_lines(plan)
    cases = [case | {"generated_at": ""} for case in collectivex_cases(plan)]
    other = [{"comm_backend": "nvlink_one_sided", "phase": phase, "comm_dtype": dtype, "ep_size": "12", "node_num": "5",
              "hidden_size": "64", "topk": "2", "num_experts": "24", "sms": sms, "num_tokens": "7", "latency": "3.5"}
             for phase, dtype, sms in (("dispatch", "default", ""), ("combine", "fp8", "20"))]  # fmt: skip
    return {"lines": [list(line.values()) for line in lines[:4] + lines[-4:]], "case": cases[-1], "cases": len(cases),
            "measurements": measurements([*lines[-2:], *other], "L", "H", "S")}  # fmt: skip


def names() -> Any:
    """Return data sheets, sizes of models, and how names are understood."""
    return {
        "gpus": [list(vars(gpu).values()) for gpu in (*GPUS, gpu_of("cpu: chip, 3 cores"))],
        "models": [[*list(vars(model).values())[:-1], model.expert_bytes] for model in MODELS.values()],
        "sms": system_of("DeepEP", "H20", "normal", 8).sms,
    }


TINY = ("--model", "qwen3-30b-a3b", "--gpus", "8", "--tokens")
COMMANDS = {
    "plan": (*TINY, "64", "--capacity-factor", "3", "--measured", "dispatch=900", "--measured", "combine=1"),
    "two domains": (
        *TINY,
        "2048",
        "--domain",
        "4",
        "--sigma",
        "1",
        "--efficiency",
        "0.9",
        "--measured",
        "combine=9000",
    ),
    "slow": (*TINY, "2048", "--measured", "combine=9000.5", "--measured", "dispatch=0"),
    "left out": ("--model", "mixtral-8x7b", "--gpus", "2", "--tokens", "4096", "--hardware", "H20"),
    "nothing fits": ("--model", "deepseek-v3", "--gpus", "16", "--tokens", "64"),
    "ask": ("ask", "nodes", *TINY, "64", "--domain", "8", "--efficiency", "0.6"),
    "ask uneven": ("ask", "balance", *TINY, "64", "--sigma", "2", "--library", "DeepEP-V1", "--hardware", "H200"),
    "ask nothing": ("ask", "ep", "--model", "deepseek-v3"),
    "ask json": ("ask", "ep", *TINY, "64", "--json"),
    "systems": ("systems",),
    "no op": (*TINY, "64", "--measured", "send=4"),
    "no time": (*TINY, "64", "--measured", "dispatch=soon"),
    "no digit": (*TINY, "64", "--measured", "dispatch=²"),
}
RESULTS = {
    **{f"planned {name}": partial(planned, name) for name in CLUSTERS},
    **{f"asked {question}": partial(asked, question) for question in QUESTIONS},
    **{f"predictions guess={guess}": partial(predictions, guess) for guess in (False, True)},
    **{make.__name__: make for make in (refused_plans, parts, calibrated, exported, names)},
    **{f"shown {name}": partial(shown, *words) for name, words in COMMANDS.items()},
}


@pytest.mark.parametrize("name", RESULTS)
def test_numbers_and_words_are_those_on_record(name: str) -> None:
    """Fits stop, and draws of correlated normals fall, a little elsewhere on each processor."""
    rel, near = {"calibrated": (0.05, 2e-3), "asked bound": (0.02, NEAR)}.get(name, (REL, NEAR))
    assert_on_record(RECORD, name, result_of(RESULTS[name]), rel, near)


if __name__ == "__main__":
    write_record(RECORD, results_of(RESULTS))
