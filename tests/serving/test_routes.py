"""Routes that vLLM records, replayed by Transformers: each forward of a request's tokens visits vLLM's experts."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving.prompts import dealt, prompts
from serving.test_rotary import rotate_by_torch

from moe_rt import routes
from moe_rt.lab.testing.serving.engines import EngineRanks

PROMPTS = prompts(5, 17, 1, 9)
LENGTHS = [6, 3, 8, 1]
REPLAY = Path(__file__).with_name("replay_job.py")


def answer(directory: str, llm: Any, order: dict[str, Any]) -> list[dict[str, Any]]:
    """Save each request's routes; return its tokens and the file."""
    from vllm import SamplingParams

    wanted = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=1)
        for n in order["lengths"]
    ]
    said = []
    for done in llm.generate([{"prompt_token_ids": ids} for ids in order["prompts"]], wanted, use_tqdm=False):
        made = done.outputs[0]
        path = str(Path(directory, f"{done.prompt_token_ids[0]}.npy"))
        np.save(path, made.routed_experts)
        tokens = [*done.prompt_token_ids, *made.token_ids]
        logprobs = [step[token].logprob for token, step in zip(made.token_ids, made.logprobs, strict=True)]
        said.append({"tokens": tokens, "prompt": len(done.prompt_token_ids), "logprobs": logprobs, "path": path})
    return said


@pytest.mark.parametrize(("family", "size", "settings"), [
    ("qwen3_moe", 1, {}), ("qwen3_moe", 2, {"max_num_batched_tokens": 16}),
    ("deepseek_v3", 2, {"attention_backend": "CPU_MLA"}),
])  # fmt: skip
def test_vllm_records_and_transformers_replays(
    model: Callable[..., Path], tmp_path: Path, family: str, size: int, settings: dict[str, Any]
) -> None:
    place = model(family)
    on = (("MOE_RT_VLLM_ROUTES", "1"),)
    save = functools.partial(answer, str(tmp_path))
    before = rotate_by_torch if family == "deepseek_v3" else lambda: None
    with EngineRanks(place, size, on, before, save, dtype="float32", **settings) as engines:
        assert engines.started() == [None] * size
        answers = engines.generate(dealt(PROMPTS, size), dealt(LENGTHS, size))
    requests = [request for each in answers for request in each]
    for request in requests:
        request["shape"] = list(np.load(request["path"]).shape)
    order = tmp_path / "order.json"
    order.write_text(json.dumps({"model": str(place), "requests": requests, "file": str(tmp_path / "routes.npz")}))
    done = subprocess.run([sys.executable, str(REPLAY), str(order)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for request, seen in zip(requests, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert request["shape"][0] == len(request["tokens"]) - 1
        assert seen["took the recorded experts"]
        assert seen["chose them by itself"]
        assert seen["chose others without the file"]
        assert max(map(abs, np.subtract(seen["logprobs"], request["logprobs"]))) < 1e-3
    assert routes.load(tmp_path / "routes.npz").num_experts == 8
