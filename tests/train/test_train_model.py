"""The trained model: causal attention, rotary positions, weight decay, and continuation of a text."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from train import cases_train as cases
from train.dense_moe import DenseMoE

from moe_rt.train.config import TrainConfig
from moe_rt.train.loop import generate, make_optimizer
from moe_rt.train.model import Attention, Decoder, DecoderOutput


def decoder(config: TrainConfig) -> Decoder:
    torch.manual_seed(0)
    return Decoder(config, lambda layer: DenseMoE(config))


def test_a_byte_changes_nothing_before_it() -> None:
    config = cases.tiny()
    model, tokens = decoder(config), torch.randint(256, (1, config.seq_len), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, 20] += 1
    with torch.no_grad():
        changed = (model(tokens).logits != model(other).logits).any(-1)[0]
    assert changed.tolist() == [False] * 20 + [True] * (config.seq_len - 20)


def test_what_attends_to_what_depends_on_the_distance() -> None:
    attention = Attention(cases.tiny(hidden=32, num_heads=2, seq_len=8))
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(2)).double()
    queries, keys = (attention._rotate(x.expand(8, 16)) for x in (query, key))
    scores = queries @ keys.T
    for distance in range(-7, 8):
        same = scores.diagonal(distance)
        torch.testing.assert_close(same, same[:1].expand_as(same))
    torch.testing.assert_close(scores[0, 0], query @ key)
    assert scores[0].unique().numel() == 8


def attend(attention: Attention, x: Tensor) -> Tensor:
    """Return what the attention adds to x [S, H], one head and one query at a time."""
    q, k, v = (x @ attention.qkv.weight.T).split(x.shape[1], dim=1)
    size = x.shape[1] // attention.num_heads
    heads = []
    for first in range(0, x.shape[1], size):
        part = slice(first, first + size)
        queries, keys = attention._rotate(q[:, part]), attention._rotate(k[:, part])
        rows = [(keys[: i + 1] @ queries[i] / size**0.5).softmax(0) @ v[: i + 1, part] for i in range(len(x))]
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=1) @ attention.out.weight.T


def test_the_decoder_is_the_sum_of_its_parts() -> None:
    """Logits are those of the formula of a decoder, written down once more with the same weights."""
    config = cases.tiny(num_layers=2)
    model = decoder(config)
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 2.0)
    tokens = torch.randint(256, (1, config.seq_len), generator=torch.Generator().manual_seed(3))

    def normed(x: Tensor, norm: torch.nn.Module) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + torch.finfo().eps).sqrt() * norm.weight

    with torch.no_grad():
        x = model.embedding.weight[tokens[0]]
        for block in model.layers:
            x = x + attend(block.attention, normed(x, block.attention_norm))
            x = x + block.moe(normed(x, block.moe_norm)[None])[0][0]
        expected = normed(x, model.norm) @ model.head.weight.T
        torch.testing.assert_close(model(tokens).logits[0], expected, rtol=1e-4, atol=1e-5)


def test_attention_of_every_layer_is_drawn_anew() -> None:
    model = decoder(cases.tiny(num_layers=3))
    for p in model.parameters():
        p.data.zero_()
    model.reset_parameters()
    parts = [module for module in model.modules() if isinstance(module, Attention)]
    assert len(parts) == 3
    for part in parts:
        for linear in (part.qkv, part.out):
            assert linear.weight.std().item() == pytest.approx(linear.in_features**-0.5, rel=0.2)


def test_only_matrices_decay() -> None:
    config = cases.tiny(weight_decay=0.25)
    model = decoder(config)
    decay = {
        id(p): group["weight_decay"] for group in make_optimizer(model, config).param_groups for p in group["params"]
    }
    assert {name: decay[id(p)] for name, p in model.named_parameters()} == {
        name: 0.25 if p.dim() > 1 else 0.0 for name, p in model.named_parameters()
    }
    assert {0.0, 0.25} == set(decay.values())


def test_state_of_the_optimizer_is_where_its_parameter_is() -> None:
    """Fused AdamW refuses a count of steps on another device."""
    model = decoder(cases.tiny()).to("meta")
    optimizer = make_optimizer(model, cases.tiny())
    found = {name: t.device.type for state in optimizer.state.values() for name, t in state.items()}
    assert found == dict.fromkeys(("step", "exp_avg", "exp_avg_sq"), "meta")


def test_a_text_is_gone_on_with_from_its_end() -> None:
    """A text is continued from its last sequence. The model counts: after byte b, the likeliest is b + 1."""
    lengths = []

    def count_up(tokens: Tensor) -> DecoderOutput:
        lengths.append(tokens.shape[1])
        logits = torch.nn.functional.one_hot(tokens + 1, 257).float()
        return DecoderOutput(logits, torch.zeros(()), torch.zeros(1, 1))

    assert generate(count_up, "ab", num_bytes=5, seq_len=4, temperature=0.0, seed=0) == "abcdefg"
    assert lengths == [2, 3, 4, 4, 4]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_a_sampled_text_is_torch_s(temperature: float) -> None:
    """Bytes are drawn by the seed from the model's distribution; what a terminal cannot print is replaced."""
    logits = torch.full((256,), -20.0)
    letters = list(b"abcdef\n\t\a")
    logits[letters] = torch.arange(len(letters)) / 4
    texts = set()
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        drawn = [int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)) for _ in range(200)]
        got = generate(
            lambda tokens: DecoderOutput(logits.expand(*tokens.shape, -1), torch.zeros(()), torch.zeros(1, 1)),
            "a", num_bytes=200, seq_len=4, temperature=temperature, seed=seed,
        )  # fmt: skip
        assert got == "a" + bytes(drawn).decode().replace("\a", "\N{REPLACEMENT CHARACTER}")
        texts.add(got)
    assert len(texts) == 3
    assert all(set("\n\t\N{REPLACEMENT CHARACTER}") <= set(text) for text in texts)


def test_a_tied_head_is_the_embedding_and_losses_of_layers_add_up() -> None:
    config = cases.tiny(tie_embeddings=True, num_layers=3)
    model, losses = decoder(config), []
    assert model.head.weight is model.embedding.weight
    assert decoder(cases.tiny()).head.weight is not model.embedding.weight
    for module in model.modules():
        if isinstance(module, DenseMoE):
            module.register_forward_hook(lambda _, given, out: losses.append(out[1].loss))
    out = model(torch.zeros(2, config.seq_len, dtype=torch.int64))
    assert len(losses) == 3
    torch.testing.assert_close(out.aux_loss, sum(losses), rtol=1e-6, atol=0.0)
