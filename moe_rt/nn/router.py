"""The router: chooses the experts of each token and their weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.errors import InvalidConfig, InvalidInput, expect
from moe_rt.nn.padding import UNTAKEN, real_tokens, without_padding
from moe_rt.nn.router_losses import (
    BalanceScope,
    RouterAux,
    at_least_one,
    count_sequences,
    count_tokens,
    load_balancing_loss,
    sequence_view,
    z_loss,
)
from moe_rt.ops.grouped import row_wise_linear, row_wise_sigmoid
from moe_rt.routes.file import UNRECORDED

__all__ = ["Router", "RouterAux", "RouterConfig", "ScoreFunc"]

ScoreFunc = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Options of the router; docs/howto/layer.md has the values of some models.

    Attributes:
        num_experts, num_topk: E, K.
        score_func: "softmax", probabilities over all experts, or "sigmoid", independent scores.
        topk_before_softmax: choose by logits, and take the softmax over only the K chosen ones (GPT-OSS).
        norm_topk: divide the chosen scores by their sum.
        route_scale: factor of the final weights.
        router_bias: the gate's linear layer has a bias.
        num_groups, topk_groups: a token chooses within its best `topk_groups` of `num_groups` contiguous groups, ranked
            by the sum of their two highest scores (DeepSeek-V3).
        balance_bias: add a buffer [E] to the scores for choosing, but not for weights; `Router.update_bias` moves it by
            `balance_bias_rate` (Wang et al. 2024, Auxiliary-Loss-Free Load Balancing).
        expert_choice: None, or the mean number of experts per token: experts take an equal share of this rank's tokens
            in the forward, and a token keeps the K highest-scoring experts that took it, padded with -1
            (moe_rt.nn.router.choose_by_experts). Later tokens influence earlier ones, so it does not suit decoding.
        jitter: in training, multiply the router's input by uniform noise in [1 - jitter, 1 + jitter] (Fedus et al.
            2021, Switch Transformers). Experts see the input unchanged.
        aux_loss_coef, z_loss_coef: weights of the losses in `RouterAux.loss`.
        balance_scope: "sequence" takes the load-balancing loss per sequence and averages (DeepSeek-V3, eq. 17 to 20),
            independent of how sequences are spread over ranks; "batch" takes it over this rank's batch (Switch). An
            input [T, H] is one sequence. For the global batch see `moe_rt.nn.router_losses.load_balancing_loss`.

    Raises:
        InvalidConfig: a value is invalid; names the field, what was got and what was expected.
    """

    num_experts: int
    num_topk: int
    score_func: ScoreFunc = "softmax"
    topk_before_softmax: bool = False
    norm_topk: bool = True
    route_scale: float = 1.0
    router_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    balance_bias: bool = False
    balance_bias_rate: float = 1e-3
    expert_choice: float | None = None
    jitter: float = 0.0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    balance_scope: BalanceScope = "sequence"

    def __post_init__(self) -> None:
        _one_of("score_func", self.score_func, ("softmax", "sigmoid"))
        _one_of("balance_scope", self.balance_scope, ("sequence", "batch"))
        softmax = self.score_func == "softmax"
        expect(softmax or not self.topk_before_softmax, "topk_before_softmax", True, 'False with score_func="sigmoid"')
        expect(0 <= self.jitter < 1, "jitter", self.jitter, "0 <= jitter < 1")
        expect(self.balance_bias_rate >= 0, "balance_bias_rate", self.balance_bias_rate, "a number >= 0")
        self._check_groups()
        if self.expert_choice is not None:
            in_range = 0 < self.expert_choice <= self.num_topk
            expect(in_range, "expert_choice", self.expert_choice, f"above 0, at most num_topk = {self.num_topk}")
            for name, default in (("num_groups", 1), ("balance_bias", False), ("topk_before_softmax", False)):
                got = getattr(self, name)
                expect(got == default, name, got, f"{default}, for with expert_choice it is the experts that choose")

    def _check_groups(self) -> None:
        num_experts, num_groups, topk_groups = self.num_experts, self.num_groups, self.topk_groups
        expect(num_groups > 0, "num_groups", num_groups, "a positive integer")
        expect(0 < topk_groups <= num_groups, "topk_groups", topk_groups, f"1 to num_groups = {num_groups}")
        if num_groups > 1:
            size = num_experts // num_groups
            fits = num_experts % num_groups == 0 and size >= 2
            expect(fits, "num_groups", num_groups, f"a divisor of num_experts = {num_experts}, two experts a group")
            enough = topk_groups * size >= self.num_topk
            expect(enough, "topk_groups", topk_groups, f"groups of {size} for num_topk = {self.num_topk} experts")


class KeepsFp32(nn.Module):
    """A module whose own floating-point buffers stay fp32 when it is cast and when it loads, with assign=True also.

    Steps of such buffers are below the precision of 16-bit floats.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KeepsFp32:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, t in self._buffers.items():
            was = before[name]
            if t is not None and was is not None and t.dtype is not was.dtype:
                self._buffers[name] = was.to(t.device)  # undoes the rounding of the cast
        self.keep_fp32()
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.keep_fp32()

    def keep_fp32(self) -> None:
        """Cast floating-point buffers to fp32 again, in case they were replaced without a call of this module."""
        for name, t in self._buffers.items():
            if t is not None and t.is_floating_point():
                self._buffers[name] = t.to(torch.float32)


class Router(KeepsFp32):
    """Chooses experts with a linear gate in fp32 (fp64 for fp64 inputs).

    Parameters: `weight` [E, H]; with router_bias `bias` [E]. Buffer, with balance_bias: `balance_bias` fp32 [E],
    persistent. It stays fp32 when the module is cast, because its steps are below the precision of 16-bit floats.

    Args:
        hidden: H.
        num_experts, num_topk, options: fields of RouterConfig; not used if `config` is given.
        config: see RouterConfig.

    Raises:
        InvalidConfig: see RouterConfig.
    """

    bias: nn.Parameter | None
    balance_bias: Tensor | None
    row_wise = False  # see `moe_rt.ops.grouped.grouped_linear`; a layer with sums="invariant" sets it

    def __init__(
        self,
        hidden: int,
        num_experts: int = 0,
        num_topk: int = 0,
        *,
        config: RouterConfig | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.config = config or RouterConfig(num_experts=num_experts, num_topk=num_topk, **options)
        self.weight = nn.Parameter(torch.empty(self.config.num_experts, hidden))
        bias = nn.Parameter(torch.zeros(self.config.num_experts)) if self.config.router_bias else None
        self.register_parameter("bias", bias)
        steered = torch.zeros(self.config.num_experts, dtype=torch.float32) if self.config.balance_bias else None
        self.register_buffer("balance_bias", steered)

    @property
    def num_experts(self) -> int:
        """Number of experts (E)."""
        return self.config.num_experts

    @property
    def num_topk(self) -> int:
        """Number of experts per token (K)."""
        return self.config.num_topk

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw `weight` from N(0, 1 / H), always on the CPU; bias and balance_bias become zero."""
        drawn = torch.empty(self.weight.shape, dtype=self.weight.dtype, device="cpu")
        self.weight.copy_(drawn.normal_(std=self.weight.shape[1] ** -0.5))
        for bias in (self.bias, self.balance_bias):
            if bias is not None:
                bias.zero_()

    def forward(
        self, x: Tensor, topk_idx: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, RouterAux]:
        """Score tokens and choose experts.

        A token is padding if `mask` is False there or its row of `topk_idx` is all -1. Padding chooses no expert, and
        losses and counts exclude it; x may be NaN there and gets a gradient of zero.

        Args:
            x: floating [..., H]; T is the number of tokens.
            topk_idx: integer [T, K], -1 for no expert: visit these experts instead of choosing, as recorded in
                `RouterAux.topk_idx`. Weights and their gradients use the current scores. A row of -3 has no record:
                its token chooses.
            mask: bool or integer [...], x's leading shape: True or 1 for a real token. The host does not read it.

        Returns:
            topk_idx int64 [T, K], topk_weights fp32 [T, K] (fp64 for fp64), zero for -1, and the losses.

        Raises:
            InvalidInput: x is not floating or has another H or device; or topk_idx or mask has another type, shape or
                device.
        """
        c = self.config
        if (
            not x.is_floating_point()
            or x.dim() == 0
            or x.shape[-1] != self.weight.shape[1]
            or x.device != self.weight.device
        ):
            got, expected = f"{x.dtype} {list(x.shape)} on {x.device}", f"[..., {self.weight.shape[1]}]"
            raise InvalidInput(f"x: got {got}, expected floating {expected} on {self.weight.device}")
        real = real_tokens(x, topk_idx, mask, c.num_topk)
        acc = torch.float64 if x.dtype is torch.float64 else torch.float32
        with torch.autocast(x.device.type, enabled=False):
            rows = torch.atleast_2d(without_padding(x, real).to(acc))  # x [H] is a sequence of one token
            real = None if real is None else torch.atleast_1d(real)
            if self.training and c.jitter:
                rows = rows * torch.empty_like(rows).uniform_(1 - c.jitter, 1 + c.jitter)
            row_wise = self.row_wise and x.device.type == "cpu"
            linear, sigmoid = (row_wise_linear, row_wise_sigmoid) if row_wise else (F.linear, torch.sigmoid)
            logits = linear(rows, self.weight.to(acc), None if self.bias is None else self.bias.to(acc))
            scores = logits.softmax(-1) if c.score_func == "softmax" else sigmoid(logits)
            idx = self._choose(logits, scores, real)
            idx = idx if topk_idx is None else self._recorded(topk_idx, idx)
            idx = without_padding(idx, real, -1)
            may_lack = real is not None or c.expert_choice is not None
            weights = self._weigh(logits, scores, idx, may_lack)
            aux = self._aux(logits, scores, idx, real)
        return idx.reshape(-1, c.num_topk), weights.reshape(-1, c.num_topk), aux

    @torch.no_grad()
    def update_bias(self, tokens_per_expert: Tensor) -> None:
        """Add rate * sign(mean load - load) to balance_bias; call it once a step (Wang et al. 2024, algorithm 1).

        Args:
            tokens_per_expert: int64 [E], `RouterAux.tokens_per_expert` summed over the step's micro-batches and, by the
                caller, over all ranks that hold this router. The host does not wait for it.

        Raises:
            InvalidConfig: the router has no balance_bias.
            InvalidInput: tokens_per_expert is not [E].
        """
        if self.balance_bias is None:
            raise InvalidConfig("balance_bias: got False, expected True in the config to update the bias")
        if tokens_per_expert.shape != self.balance_bias.shape:
            got, expected = list(tokens_per_expert.shape), list(self.balance_bias.shape)
            raise InvalidInput(f"tokens_per_expert: got shape {got}, expected {expected}")
        self.keep_fp32()
        # mean - load, times E, which is exact in integers.
        lack = tokens_per_expert.sum() - tokens_per_expert * self.config.num_experts
        self.balance_bias.add_(lack.sign().to(torch.float32), alpha=self.config.balance_bias_rate)

    @torch.no_grad()
    def _choose(self, logits: Tensor, scores: Tensor, real: Tensor | None) -> Tensor:
        c = self.config
        if c.expert_choice is not None:
            candidates = None if real is None else real.flatten()
            idx = choose_by_experts(scores.flatten(0, -2), c.num_topk, c.expert_choice, candidates)
            return idx.reshape(*scores.shape[:-1], c.num_topk)
        by = logits if c.topk_before_softmax else scores
        if self.balance_bias is not None:
            by = by + self.balance_bias
        if c.num_groups > 1:
            by = within_best_groups(by, c.num_groups, c.topk_groups)
        return by.topk(c.num_topk, dim=-1).indices

    def _weigh(self, logits: Tensor, scores: Tensor, idx: Tensor, may_lack: bool) -> Tensor:
        """Return the weights of chosen experts. If `may_lack`, ids may be outside [0, E); dispatch validates them."""
        c = self.config
        values = logits if c.topk_before_softmax else scores
        weights = values.gather(-1, idx.clamp(0, c.num_experts - 1) if may_lack else idx)
        if c.topk_before_softmax:
            # -inf would give NaN to a token without any expert.
            lowest = torch.finfo(weights.dtype).min
            weights = (weights.masked_fill(idx < 0, lowest) if may_lack else weights).softmax(-1)
        weights = weights.masked_fill(idx < 0, 0) if may_lack else weights
        if c.norm_topk and not c.topk_before_softmax:
            weights = weights / (weights.sum(-1, keepdim=True) + torch.finfo(weights.dtype).tiny)
        return weights * c.route_scale

    def _aux(self, logits: Tensor, scores: Tensor, idx: Tensor, real: Tensor | None) -> RouterAux:
        """Return the losses and counts of the `real` tokens; `idx` is -1 for padding."""
        c = self.config
        may_lack = real is not None or c.expert_choice is not None
        probs = scores if c.score_func == "softmax" else scores / scores.sum(-1, keepdim=True)
        counted = idx
        if c.balance_scope == "sequence" and (c.balance_bias or c.num_groups > 1):
            # DeepSeek-V3's f counts the top-k of the plain scores (eq. 18), without bias and groups.
            counted = without_padding(scores.detach().topk(c.num_topk, dim=-1).indices, real, -1)
        counts = count_tokens(sequence_view(counted, c.balance_scope).flatten(1), c.num_experts, may_lack)
        sequences = sequence_view(without_padding(probs, real), c.balance_scope)
        sums = sequences.sum(1)
        num_sequences, lengths, num_tokens = count_sequences(sequences, real, c.balance_scope)
        balance = load_balancing_loss(sums / at_least_one(lengths), counts, num_sequences)
        z = z_loss(logits, real)
        loss = c.aux_loss_coef * balance + c.z_loss_coef * z
        load = counts.sum(0) if counted is idx else count_tokens(idx.flatten(), c.num_experts, may_lack)
        mean_prob = sums.sum(0) / at_least_one(num_tokens)
        return RouterAux(loss, balance, z, load, mean_prob, self._record(idx, real).reshape(-1, c.num_topk))

    def _recorded(self, topk_idx: Tensor, chosen: Tensor) -> Tensor:
        """Return the experts to visit, from a topk_idx that `_record` or the caller made."""
        idx = topk_idx.to(torch.int64).reshape(chosen.shape)
        idx = torch.where(idx == UNRECORDED, chosen, idx)
        return idx if self.config.expert_choice is None else idx.masked_fill(idx == UNTAKEN, -1)

    def _record(self, idx: Tensor, real: Tensor | None) -> Tensor:
        if self.config.expert_choice is None:
            return idx
        untaken = (idx == -1).all(-1)
        untaken = untaken if real is None else untaken & real
        return idx.masked_fill(untaken.unsqueeze(-1), UNTAKEN)


def within_best_groups(scores: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    """Return scores [..., E] with -inf outside each token's `topk_groups` best of `num_groups` contiguous groups.

    A group is ranked by the sum of its two highest scores (DeepSeek-AI 2024, DeepSeek-V3, section 2.1.2, where two is
    K over topk_groups). Scores may have any sign; a group has at least two experts.
    """
    grouped = scores.unflatten(-1, (num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_groups, dim=-1).indices
    allowed = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, best, True)
    return grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)


def choose_by_experts(scores: Tensor, num_topk: int, experts_per_token: float, real: Tensor | None = None) -> Tensor:
    """Let every expert take the tokens that score it highest (Zhou et al. 2022, Expert Choice Routing, section 3.2).

    A token taken by more than num_topk experts keeps the highest-scoring ones. Sorts are stable: the lower index wins.

    Args:
        scores: [T, E].
        num_topk: K, maximum number of experts of a token.
        experts_per_token: the paper's capacity factor; each expert takes ceil(T * experts_per_token / E) tokens.
        real: bool [T], tokens that can be taken; T in that formula is then their count. Default: all.

    Returns:
        int64 [T, K], highest score first, then -1.
    """
    num_tokens, num_experts = scores.shape
    if real is None:
        each: int | Tensor = math.ceil(num_tokens * experts_per_token / num_experts)
    else:  # the same arithmetic on the device
        each = (real.sum().to(torch.float64) * experts_per_token / num_experts).ceil()
        scores = scores.masked_fill(~real.unsqueeze(-1), -math.inf)
    order = scores.sort(dim=0, descending=True, stable=True).indices
    first = torch.arange(num_tokens, device=scores.device).unsqueeze(-1) < each
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(0, order, first.expand_as(order))
    by_token = scores.masked_fill(~taken, -math.inf).sort(dim=1, descending=True, stable=True)
    values, idx = by_token.values[:, :num_topk], by_token.indices[:, :num_topk]
    return idx.masked_fill(values == -math.inf, -1)


def _one_of(field: str, got: str, allowed: tuple[str, ...]) -> None:
    if got not in allowed:
        raise InvalidConfig(f'{field}: got "{got}", expected one of {", ".join(allowed)}')
