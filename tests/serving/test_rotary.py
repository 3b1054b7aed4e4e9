"""vLLM's rotary op for CPUs is wrong for latent attention, and how tests go around it.

vLLM's GPU op takes queries [tokens, heads, dim] since pull request #12777. Its CPU op still divides the last dimension
by `dim` to count heads, and takes the stride of heads for that of tokens. So of T tokens with N heads it rotates T of
T * N rows, most by another token's position, and parts of latent vectors in place of keys. Answers of models with
latent attention and plain rotary positions are therefore wrong on CPUs, and depend on the whole batch.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

TOKENS, HEADS, ROTATED = 5, 4, 64


def rotate_by_torch() -> None:
    """Make vLLM rotate by its formula in torch, which takes any shape; engines call it before they make a model."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native


def rotated(layer: str, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(ROTATED, ROTATED, 128, 10000.0, False, torch.float32)
    return getattr(rope, layer)(torch.arange(len(queries)), queries.clone(), keys.clone())


@pytest.mark.parametrize("heads", [1, HEADS])
def test_only_one_head_is_rotated_right(heads: int) -> None:
    """The day that this fails for several heads, vLLM's op is right, and `rotate_by_torch` can go."""
    q, k = torch.randn(TOKENS, heads, ROTATED), torch.randn(TOKENS, 1, ROTATED)
    got, right = rotated("forward_cpu", q, k), rotated("forward_native", q, k)
    torch.testing.assert_close(got[1], right[1])
    same = torch.isclose(got[0], right[0], atol=1e-5).all(-1)
    assert same.tolist() == [
        [heads == 1 or (token, head) == (0, 0) for head in range(heads)] for token in range(TOKENS)
    ]
