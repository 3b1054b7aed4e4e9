"""Routes that vLLM records, replayed by Transformers: each forward of a request's tokens visits vLLM's experts."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from serving.prompts import dealt, prompts
from serving.test_rotary import rotate_by_torch

from moe_rt import routes
from moe_rt.integrations.vllm import routes as recording
from moe_rt.lab.testing.serving.engines import EngineRanks
from moe_rt.routes.file import UNRECORDED

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


class Batches:
    """A model runner of two layers and two experts per token; only layer 1 has experts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recording, "bind_routed_experts_capturer", lambda model, recorder: None)
        monkeypatch.setattr(recording, "_rows", {})
        model = SimpleNamespace(get_total_num_hidden_layers=lambda: 2, get_num_experts_per_tok=lambda: 2)
        self.vllm_config = SimpleNamespace(
            model_config=model,
            compilation_config=SimpleNamespace(mode=recording.CompilationMode.NONE),
            parallel_config=SimpleNamespace(enable_expert_parallel=False, world_size=1),
        )
        self.get_model = lambda: None
        self.recorder = recording.Recorder(self)

    def step(self, *parts: tuple[str, int, list[int]], finished: Sequence[str] = ()) -> None:
        """Run a step of (request, tokens that it has already, an expert for each of its further tokens)."""
        names, begins, experts = zip(*parts, strict=True)
        self.input_batch = SimpleNamespace(req_ids=list(names), num_computed_tokens_cpu=np.array(begins))
        scheduled = SimpleNamespace(
            finished_req_ids=set(finished),
            num_scheduled_tokens={name: len(ids) for name, ids in zip(names, experts, strict=True)},
        )
        ids = torch.tensor([[e, e + 1] for each in experts for e in each])
        self.recorder.run(lambda: self.recorder.capture(1, ids), self, scheduled)


def experts_of(request: str, num_tokens: int) -> list[int]:
    """Return the first expert of each token in layer 1."""
    return recording._rows[request][:num_tokens, 1, 0].tolist()


def test_tokens_of_several_steps_and_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Batches(monkeypatch)
    runner.step(("a", 0, [5, 6]), ("b", 0, [7]))
    runner.step(("b", 1, [3]), ("a", 2, [4, 2, 1]))
    assert experts_of("a", 5) == [5, 6, 4, 2, 1]
    assert experts_of("b", 2) == [7, 3]
    assert not recording._rows["a"][:5, 0].any(), "a layer without experts"
    assert recording._rows["b"][:2, 1].tolist() == [[7, 8], [3, 4]]


def test_tokens_from_a_cache_of_prefixes_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Batches(monkeypatch)
    runner.step(("a", 3, [5]))
    assert experts_of("a", 4) == [UNRECORDED] * 3 + [5]


def test_an_aborted_request_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No finished output takes its rows. A request that has its name later does not get them either."""
    runner = Batches(monkeypatch)
    runner.step(("a", 0, [5, 6]), ("b", 0, [7]))
    runner.step(("b", 1, [3]), finished=["a"])
    assert list(recording._rows) == ["b"]
    runner.step(("a", 1, [4]), finished=["b"])
    assert experts_of("a", 2) == [UNRECORDED, 4]


def test_batches_of_dummies_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Batches(monkeypatch)
    runner.recorder.capture(1, torch.tensor([[1, 2]]))
    runner.step(("a", 0, [5]))
    assert experts_of("a", 1) == [5]


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
