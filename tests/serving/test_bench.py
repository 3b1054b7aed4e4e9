"""`moe-rt bench --op serve`, small: every contestant answers right, every kill ends all requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_rt.lab.bench.serving.conduct import kills
from moe_rt.lab.bench.serving.rank import contestants_here


def bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "moe_rt", "bench", "--op", "serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_contestants_answer_as_stock_does() -> None:
    sizes = ("--hidden", "64", "--experts", "6", "--topk", "2", "--intermediate", "64")
    segments = set(os.listdir("/dev/shm"))
    document = bench("--ranks", "2", *sizes, "--sequences", "1,3", "--prompts", "40", "--iters", "1")
    assert not [name for name in set(os.listdir("/dev/shm")) - segments if name.startswith("moe_rt_bench_vllm")]
    assert [run["title"] for run in document["runs"]] == [
        "decode: 1 sequence a rank, 32 steps", "decode: 3 sequences a rank, 32 steps", "prefill: 40 tokens a rank",
    ]  # fmt: skip
    for run in document["runs"]:
        ours, *others, stock = run["results"]
        assert tuple(result["contestant"] for result in run["results"]) == contestants_here()
        assert not any(result["errors"] for result in run["results"])
        layers = 4 * 2 * (run["load"]["steps"] or 1)
        assert [result["layer_us"]["n"] for result in (ours, *others)] == [layers] * (1 + len(others))
        assert ours["adapter_us"]["n"] == layers
        assert 0 < ours["adapter_us"]["p50"] < ours["layer_us"]["p50"]
        assert "layer_us" not in stock


def test_kills(model: Callable[[str], Path], tmp_path: Path) -> None:
    """Kills end all requests. Runs in this process, which has imported vLLM."""
    parts: list[float] = []
    found = kills(model("qwen3_moe"), tmp_path, ranks=2, number=2, seed=0, progress=parts.append)
    assert len(found["ms"]) == len(parts) == 2
    assert 0 < found["median"] <= found["worst"] == max(found["ms"])
    assert found["requests"] == 8
