"""Serves a small mixture-of-experts model with vLLM on two CPU ranks, and compares with one rank that has all experts.

    python examples/serve_vllm.py

Each engine is a process. The model has random weights, so its answers mean nothing, but they must be the same.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import sys
import tempfile
from contextlib import ExitStack, suppress

SETTINGS = {"MOE_RT_VLLM": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
SETTINGS |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
PROMPTS = [[5, 80, 41], [17, 230, 99, 3, 64], [301], [12, 12, 12, 12]]
RANKS = 2


def save_model(path: str) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, intermediate_size=256, initializer_range=0.08,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(path)


def answer(model: str, rank: int, size: int, port: int) -> list[list[int]]:
    """Answer this rank's share of the prompts."""
    os.environ |= SETTINGS
    if size > 1:
        os.environ |= {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank), "VLLM_DP_SIZE": str(size)}
        os.environ |= {"VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    from vllm import LLM, SamplingParams

    llm = LLM(
        model, dtype="float32", enforce_eager=True, enable_expert_parallel=size > 1, skip_tokenizer_init=True,
        max_model_len=256, max_num_seqs=8, kv_cache_memory_bytes=64 << 20, distributed_executor_backend="uni",
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS[rank::size]], greedy, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in answers]


def free_port() -> int:
    """Return the first of ten consecutive free ports, which vLLM's ranks use for rendezvous, one after the other.

    They are below the ports that the kernel gives to connections (from 32768), which could get one before vLLM does.
    """
    while True:
        first = random.randrange(20000, 32000)
        with ExitStack() as servers, suppress(OSError):
            for port in range(first, first + 10):
                servers.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def main() -> None:
    port = free_port()
    start = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as model, start.Pool(1 + RANKS, maxtasksperchild=1) as engines:
        engines.apply(save_model, (model,))
        alone = engines.apply_async(answer, (model, 0, 1, port))
        shares = [engines.apply_async(answer, (model, rank, RANKS, port)) for rank in range(RANKS)]
        expected, answers = alone.get(), [share.get() for share in shares]
    together = [answers[i % RANKS][i // RANKS] for i in range(len(PROMPTS))]
    print(f"{RANKS} ranks answer as one does: {together == expected}")
    sys.exit(together != expected)


if __name__ == "__main__":
    main()
