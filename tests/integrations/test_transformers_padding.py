"""Padding of a Transformers model reaches no expert and does not change the results of real tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.needs_transformers import require_transformers
from support.ranks import Ranks

require_transformers()

from integrations import cases_transformers_padding as cases  # noqa: E402
from integrations.transformers_models import tiny_config  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from moe_rt.integrations import unattended  # noqa: E402
from moe_rt.integrations.unattended import Attended, watch_attention  # noqa: E402

MakeRanks = Callable[[str, int], Ranks]
TWO = dict(fsdp_size=2, ep_size=2)
TOKENS = cases.SHAPE[0] * cases.SHAPE[1]
REAL = int(cases.padded_tokens(0, "left")[1].sum())
LAYERS = 2


@pytest.mark.parametrize(
    ("family", "distributed", "attention", "checkpointing", "send_padding", "sent"),
    [
        ("mixtral", TWO, "sdpa", False, False, [REAL] * 2 * LAYERS),
        ("qwen3_moe", TWO, "eager", True, False, [REAL] * 4 * LAYERS),
        ("deepseek_v3", TWO, "sdpa", False, False, [REAL] * 2 * LAYERS),
        ("gpt_oss", dict(tp_size=2, ep_size=2), "eager", False, False, None),
        ("nemotron_h", TWO, "sdpa", False, False, [TOKENS] * 2 * LAYERS),  # its experts are in blocks of another class
        ("mixtral", TWO, "sdpa", False, True, [TOKENS] * 2 * LAYERS),
    ],
)
def test_real_tokens_equal_one_process(
    make_ranks: MakeRanks,
    tmp_path: Path,
    family: str,
    distributed: dict[str, int],
    attention: str,
    checkpointing: bool,
    send_padding: bool,
    sent: list[int] | None,
) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(family)).save_pretrained(tmp_path)
    arguments = (str(tmp_path), distributed, attention, checkpointing, send_padding)
    results = make_ranks("shm", 2).run(cases.equals_one_process, *arguments)
    for r in results:
        assert r["logits"] < 1e-5
        assert r["grads"] < 1e-5
        assert r["same_tokens"]
        if sent is not None:
            assert r["sent"] == sent
    if sent is None:  # the two ranks send halves of one batch
        assert [sum(both) for both in zip(*(r["sent"] for r in results), strict=True)] == [REAL] * 2 * LAYERS


class Layer(nn.Module):
    """Attention and experts; forward returns which tokens the experts take for real."""

    class Attention(nn.Module):
        def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            return x

    def __init__(self, attentions: int = 1) -> None:
        super().__init__()
        for i in range(attentions):
            self.add_module(f"attention{i}", self.Attention())
        self.mlp = nn.ModuleDict({"experts": nn.Identity()})
        self.attended = Attended(self.mlp["experts"])

    def forward(self, x: Tensor, mask: Any, first: bool = False) -> Tensor | None:
        before = self.attended.real(len(x)) if first else None
        self.attention0(x, attention_mask=mask)
        return before if first else self.attended.real(len(x))


REAL_TOKENS = torch.tensor([[0, 1, 1], [1, 1, 0]])
CAUSAL = torch.ones(3, 3, dtype=torch.bool).tril() & (REAL_TOKENS == 1)[:, None, None, :]
LOWEST = torch.finfo(torch.float32).min


@pytest.mark.parametrize(
    ("mask", "known"),
    [
        (REAL_TOKENS, True),
        (REAL_TOKENS.float(), True),
        (CAUSAL, True),
        (CAUSAL.expand(2, 4, 3, 3), True),
        (torch.where(CAUSAL, 0.0, LOWEST), True),
        (torch.where(CAUSAL, 0.0, LOWEST).bfloat16(), True),
        (torch.where(CAUSAL, -5.0, LOWEST), True),  # biased, as by positions
        (None, False),
        ("a block mask", False),
        (REAL_TOKENS[:, :2], False),
        (torch.cat([CAUSAL, CAUSAL], -1), False),  # earlier tokens are in a cache
        (torch.cat([CAUSAL, CAUSAL], -1)[:1], False),  # the cache has as many tokens as the input
        (CAUSAL[:1], False),
        (CAUSAL[:, 0], False),
    ],
)
def test_masks_of_every_kind(mask: Any, known: bool) -> None:
    model = nn.ModuleList([Layer()])
    watch_attention(model)
    got = model[0](torch.zeros(6, 4), mask)
    assert (got is None) is not known
    assert got is None or torch.equal(got, REAL_TOKENS.flatten() == 1)


def test_a_token_that_others_attend_to_is_real() -> None:
    model = nn.ModuleList([Layer()])
    watch_attention(model)
    no_self = (~torch.eye(3, dtype=torch.bool)).expand(2, 1, 3, 3)
    assert model[0](torch.zeros(6, 4), no_self).all()


def test_experts_that_ran_without_their_attention_use_no_mask_any_more() -> None:
    model = nn.ModuleList([Layer()])
    watch_attention(model)
    x = torch.zeros(6, 4)
    for _ in range(2):
        assert model[0](x, REAL_TOKENS) is not None
    assert model[0].attended.real(6) is None
    assert model[0](x, REAL_TOKENS) is None


def test_layers_that_are_not_understood_send_padding() -> None:
    """Layers with two attentions, hence two masks, or with experts that run before attention send padding."""
    two, first, apart = Layer(attentions=2), Layer(), nn.ModuleList([Layer.Attention(), nn.Identity()])
    lone = Attended(apart[1])
    model = nn.ModuleList([two, first, apart])
    watch_attention(model)
    x = torch.zeros(6, 4)
    assert two(x, REAL_TOKENS) is None
    apart[0](x, attention_mask=REAL_TOKENS)
    assert lone.real(6) is None
    for _ in range(2):
        assert first(x, REAL_TOKENS, first=True) is None


def test_half_of_the_lowest_number_is_no_attention() -> None:
    model = nn.ModuleList([Layer()])
    watch_attention(model)
    for share, attended in ((0.49, True), (0.5, False), (1.0, False)):
        mask = torch.full((2, 1, 3, 3), LOWEST * share)
        got = model[0](torch.zeros(6, 4), mask)
        assert got is not None
        assert got.tolist() == [attended] * 6


def test_a_batch_without_tokens_has_no_padding() -> None:
    model = nn.ModuleList([Layer()])
    watch_attention(model)
    assert model[0](torch.zeros(0, 4), torch.zeros(2, 1, 0, 0)) is None
    assert model[0](torch.zeros(6, 4), torch.ones(2, 1, 3, 4)) is None


class Nested(nn.Module):
    """Experts in blocks of which several may have attentions; `inner` and `outer` are the numbers of these."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.block = nn.Module()
        self.block.mlp = nn.ModuleDict({"experts": nn.Identity()})
        for module, number in ((self.block, inner), (self, outer)):
            for i in range(number):
                module.add_module(f"attention{i}", Layer.Attention())
        self.attended = Attended(self.block.mlp["experts"])


@pytest.mark.parametrize(
    ("inner", "outer", "which"), [(1, 0, "inner"), (1, 1, "inner"), (0, 1, "outer"), (2, 1, ""), (0, 2, ""), (0, 0, "")]
)
@pytest.mark.parametrize("listed", [False, True])
def test_the_nearest_attention_is_the_experts_own(inner: int, outer: int, which: str, listed: bool) -> None:
    """Its mask is used if it is the only one in its module; a list of layers ends the search."""
    for name in ("inner", "outer"):
        nested = Nested(inner, outer)
        watch_attention(nn.ModuleList([nested]) if listed else nested)
        for child in (nested.block if name == "inner" else nested).children():
            if isinstance(child, Layer.Attention):
                child(torch.zeros(6, 4), attention_mask=REAL_TOKENS)
        assert (nested.attended.real(6) is not None) is (name == which)


def test_an_attention_beyond_a_list_of_layers_is_another_layers() -> None:
    model = nn.Module()
    model.layers, model.attention = nn.ModuleList([Nested(0, 0)]), Layer.Attention()
    watch_attention(model)
    model.attention(torch.zeros(6, 4), attention_mask=REAL_TOKENS)
    assert model.layers[0].attended.real(6) is None


def test_models_that_transformers_spreads_from_now_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function keeps its name and arguments; without it, as in another release, nothing happens."""
    calls: list[Any] = []

    def apply_expert_parallelism(model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        calls.append((model, args, kwargs))
        return nn.ModuleList([model])

    mixin = SimpleNamespace(apply_expert_parallelism=apply_expert_parallelism)
    monkeypatch.setattr(unattended, "mixin", mixin)
    unattended.watch_new_models()
    layer = Layer()
    spread = mixin.apply_expert_parallelism(layer, 1, plan=2)
    assert mixin.apply_expert_parallelism.__name__ == "apply_expert_parallelism"
    assert calls == [(layer, (1,), {"plan": 2})]
    assert spread[0] is layer
    assert layer(torch.zeros(6, 4), REAL_TOKENS) is not None
    monkeypatch.setattr(unattended, "mixin", empty := SimpleNamespace())
    unattended.watch_new_models()
    assert vars(empty) == {}
