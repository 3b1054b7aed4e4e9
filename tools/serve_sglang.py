"""Serve a small model with all of SGLang on two CPU ranks over moe_rt, and compare with SGLang on one rank.

    .venv/serving/sglang/bin/python tools/serve_sglang.py

SGLang has no installable CPU kernels, so this provides what is missing: sglang_stand_ins, and a method that its plain
torch attention lacks. It shows that the whole server works; tests/serving_sglang tests only the dispatcher.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import sglang_stand_ins  # noqa: F401 (and again in each process that SGLang starts)
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda self: 1
PROMPTS = [[5, 80, 41], [17, 230, 99, 3, 64], [301], [12, 12, 12, 12], list(range(200, 233))]
LENGTHS = [6, 20, 11, 16, 9]  # ranks run out of work at different steps
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ENGINE = dict(
    device="cpu", dtype="float32", attention_backend="torch_native", sampling_backend="pytorch", log_level="warning",
    disable_cuda_graph=True, disable_overlap_schedule=True, skip_tokenizer_init=True, random_seed=0,
    max_total_tokens=4096, max_running_requests=16, watchdog_timeout=3600,
)  # fmt: skip


def answer(model: str, ranks: int) -> tuple[list[list[int]], float]:
    """Return the greedy tokens of every request, and the time that they took."""
    from sglang.srt.entrypoints.engine import Engine

    more: dict[str, Any] = {}
    if ranks > 1:
        more = dict(tp_size=ranks, dp_size=ranks, ep_size=ranks, enable_dp_attention=True, moe_a2a_backend="customized")
    os.environ["MOE_RT_SGLANG"] = str(int(ranks > 1))
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
    engine = Engine(model_path=model, **ENGINE, **more)
    try:
        begin = time.monotonic()
        greedy = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for n in LENGTHS]
        done = engine.generate(input_ids=PROMPTS, sampling_params=greedy)
        return [one["output_ids"] for one in done], time.monotonic() - begin
    finally:
        engine.shutdown()


def save(path: str) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, intermediate_size=256, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)


def main() -> None:
    os.environ |= ENVIRONMENT
    with tempfile.TemporaryDirectory() as model:
        save(model)
        expected, alone_s = answer(model, 1)
        given, together_s = answer(model, 2)
    same = sum(a == b for a, b in zip(given, expected, strict=True))
    print(json.dumps({"same": same, "of": len(expected), "alone_s": alone_s, "together_s": together_s}))
    sys.exit(same != len(expected))


if __name__ == "__main__":
    main()
