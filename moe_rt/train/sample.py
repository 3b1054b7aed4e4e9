"""Sample text from the model. Every rank takes part, since the experts are spread over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moe_rt.train.model import DecoderOutput


@torch.no_grad()
def generate(
    forward: Callable[[Tensor], DecoderOutput],
    prompt: str,
    *,
    num_bytes: int,
    seq_len: int,
    temperature: float,
    seed: int,
) -> str:
    """Return `prompt` and `num_bytes` more; temperature 0 takes the likeliest byte.

    Collective: the arguments must be identical on all ranks. Characters that a terminal cannot print are replaced.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt.encode())])
    for _ in range(num_bytes):
        logits = forward(tokens[:, -seq_len:]).logits[:, -1].float().cpu()
        if temperature > 0:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        else:
            token = logits.argmax(-1, keepdim=True)
        tokens = torch.cat([tokens, token], dim=1)
    text = bytes(tokens[0].tolist()).decode(errors="replace")
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
