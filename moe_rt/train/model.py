"""The decoder: pre-norm attention with rotary positions, and a mixture of experts in place of the MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.nn import by_sequence
from moe_rt.nn.router import RouterAux
from moe_rt.ops.tree_sums import for_each_sequence
from moe_rt.train.config import VOCAB_SIZE, TrainConfig

# Layer index -> a module whose forward takes [B, S, H] and returns the same shape and a RouterAux.
MakeMoE = Callable[[int], nn.Module]

ROPE_BASE = 10_000.0


class DecoderOutput(NamedTuple):
    """Logits [B, S, 256], the sum of the layers' router losses, and top-k entries per expert, int64 [layers, E]."""

    logits: Tensor
    aux_loss: Tensor
    tokens_per_expert: Tensor


class Decoder(nn.Module):
    """A language model over bytes. Ranks with the same seed start with the same weights however experts are spread.

    With sums="invariant" on CPUs, outputs and gradients that are added up by `tree_all_reduce` have the same bits on 1,
    2, 4, 8, ... ranks.
    """

    def __init__(self, config: TrainConfig, make_moe: MakeMoE) -> None:
        super().__init__()
        kinds = kinds_of(config)
        self.embedding = kinds.Embedding(VOCAB_SIZE, config.hidden)
        self.layers = nn.ModuleList(Block(config, make_moe(i)) for i in range(config.num_layers))
        self.norm = kinds.RMSNorm(config.hidden)
        self.head = kinds.Linear(config.hidden, VOCAB_SIZE, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise all parameters except the mixtures'. A small head makes the first prediction nearly uniform."""
        for module in self.modules():
            if isinstance(module, Attention):
                module.reset_parameters()
        nn.init.normal_(self.embedding.weight, std=1.0)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, tokens: Tensor) -> DecoderOutput:
        """Run the model on tokens int64 [B, S], S <= seq_len."""
        # A tied weight's gradient of a sequence is that of both uses, so the tree comes after both.
        by_sequence_and_tied = self.head.weight is self.embedding.weight and isinstance(self.head, by_sequence.Linear)
        tied = (for_each_sequence(self.head.weight, len(tokens)),) if by_sequence_and_tied else ()
        x = self.embedding(tokens, *tied)
        auxes = []
        for layer in self.layers:
            x, aux = layer(x)
            auxes.append(aux)
        aux_loss = torch.stack([aux.loss for aux in auxes]).sum()
        return DecoderOutput(
            self.head(self.norm(x), *tied), aux_loss, torch.stack([aux.tokens_per_expert for aux in auxes])
        )


def kinds_of(config: TrainConfig) -> Any:
    """Return the module that has the classes Linear, RMSNorm and Embedding of the model."""
    return by_sequence if config.sums == "invariant" and config.device == "cpu" else nn


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x))."""

    def __init__(self, config: TrainConfig, moe: nn.Module) -> None:
        super().__init__()
        kinds = kinds_of(config)
        self.attention_norm = kinds.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.moe_norm = kinds.RMSNorm(config.hidden)
        self.moe = moe

    def forward(self, x: Tensor) -> tuple[Tensor, RouterAux]:
        x = x + self.attention(self.attention_norm(x))
        y, aux = self.moe(self.moe_norm(x))
        return x + y, aux


class Attention(nn.Module):
    """Causal self-attention; queries and keys are rotated by their position (Su et al. 2021, RoFormer)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        kinds = kinds_of(config)
        self.qkv = kinds.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = kinds.Linear(config.hidden, config.hidden, bias=False)
        half = config.hidden // config.num_heads // 2
        angles = torch.outer(torch.arange(config.seq_len), ROPE_BASE ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def reset_parameters(self) -> None:
        """Draw from N(0, 1 / fan-in), as for the experts."""
        for linear in (self.qkv, self.out):
            nn.init.normal_(linear.weight, std=linear.in_features**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, H] -> three of [B, heads, S, H / heads]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)
