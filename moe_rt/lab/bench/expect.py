"""Expected output of every contestant, computed from the inputs of all ranks in plain torch."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_rt.lab.bench.cases import Case
from moe_rt.lab.bench.inputs import Inputs, generator, make_inputs, route
from moe_rt.lab.bench.traffic import Traffic, count
from moe_rt.lab.testing.rounds import WrongOutput
from moe_rt.nn.experts import SwiGLUExperts
from moe_rt.nn.router import Router


def make_router(case: Case) -> Router:
    router = Router(case.hidden, case.experts, case.topk)
    nn.init.normal_(router.weight, std=case.hidden**-0.5, generator=generator("router"))
    return router


def make_experts(case: Case, ids: range, dtype: torch.dtype) -> SwiGLUExperts:
    """Create experts by global id. Their parameters have the payload dtype, since casting is no part of an exchange."""
    experts = SwiGLUExperts(len(ids), case.hidden, case.intermediate, dtype=dtype)
    for local, expert in enumerate(ids):
        g = generator("expert", expert)
        for weight in (experts.gate_up_proj, experts.down_proj):
            rows, columns = weight.shape[1:]
            weight.data[local] = torch.randn(rows, columns, generator=g).mul_(columns**-0.5).to(case.torch_dtype)
    return experts


def make_grad_out(case: Case, rank: int) -> Tensor:
    """Gradient of a rank's output."""
    return torch.randn(case.tokens, case.hidden, generator=generator("grad", rank)).to(case.torch_dtype)


@torch.enable_grad()
def dense(case: Case, x: Tensor, grad_out: Tensor) -> dict[str, Tensor]:
    """Return out, grad_x and router.grad: every expert of the group in turn on its tokens."""
    x = x.float().requires_grad_()
    router = make_router(case)
    topk_idx, topk_weights, _ = router(x)
    grad_x, grad_weights = torch.zeros_like(x), torch.zeros_like(topk_weights)
    out = torch.zeros_like(x)
    for expert in range(case.experts):  # each has its own backward, so that only one is in memory
        token, k = (topk_idx == expert).nonzero(as_tuple=True)
        weights = make_experts(case, range(expert, expert + 1), torch.float32)
        rows = x.detach()[token].requires_grad_()
        weight = topk_weights.detach()[token, k].requires_grad_()
        gate, up = F.linear(rows, weights.gate_up_proj[0].detach()).chunk(2, dim=1)
        y = weight[:, None] * F.linear(F.silu(gate) * up, weights.down_proj[0].detach())
        grad_rows, grad_weight = torch.autograd.grad(y, (rows, weight), grad_out.float()[token])
        out.index_add_(0, token, y.detach())
        grad_x.index_add_(0, token, grad_rows)
        grad_weights[token, k] = grad_weight
    through_router, grad_router = torch.autograd.grad(topk_weights, (x, router.weight), grad_weights)
    return {"out": out, "grad_x": grad_x + through_router, "router.grad": grad_router}


# Largest error of an element, relative to the sum of the absolute values of its terms. A contestant may round weights,
# products and partial sums to the payload dtype.
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5, torch.float64: 1e-12}
# Largest error of a token's row of the layer's outputs, relative to its norm, and of the whole router gradient, whose
# rows cancel. The reference is fp32, the experts are not.
LAYER_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-4}


class Expectation:
    """Correct outputs of one rank, for any input number. Checked tensors are copied to the CPU."""

    def __init__(self, case: Case, seed: int, rank: int, rotations: int) -> None:
        self._case, self._seed, self._rank, self._rotations = case, seed, rank, rotations
        self._first_expert = sum(case.local_experts[:rank])
        # All contestants are checked on the same one or two inputs: those of their last iterations.
        self._inputs = lru_cache(maxsize=1)(
            lambda rotation: [make_inputs(case, seed, source, rotation) for source in range(case.ranks)]
        )
        self._dense = lru_cache(maxsize=2)(
            lambda rotation: dense(case, make_inputs(case, seed, rank, rotation).x, make_grad_out(case, rank))
        )

    def traffic(self) -> list[Traffic]:
        """Traffic of every rank, for the first input. The other inputs have the same routing distribution."""
        return count(self._case, [route(self._case, self._seed, rank, 0) for rank in range(self._case.ranks)])

    def rows(self, i: int, rows: Tensor, experts: Tensor) -> None:
        """Check the rows that dispatch delivered, bit for bit: rows [n, H] for the local experts [n], in any order."""
        rows, experts = rows.cpu(), experts.cpu()
        inputs: list[Inputs] = self._inputs(i % self._rotations)
        local = torch.cat([tokens.topk_idx for tokens in inputs]) - self._first_expert
        mine = (local >= 0) & (local < self._case.local_experts[self._rank])
        if rows.shape != (int(mine.sum()), self._case.hidden) or rows.dtype != inputs[0].x.dtype:
            got = f"{rows.dtype} {list(rows.shape)}"
            raise WrongOutput(f"rank {self._rank} received {got}, expected {int(mine.sum())} rows of its tokens' type")
        wanted = torch.cat([tokens.x for tokens in inputs])[mine.nonzero()[:, 0]]
        ours, theirs = _order(rows, experts), _order(wanted, local[mine])
        wrong = (rows[ours] != wanted[theirs]).any(1) | (experts[ours] != local[mine][theirs])
        if wrong.any():
            raise WrongOutput(f"rank {self._rank} received {int(wrong.sum())} rows that were not sent to their expert")

    def combined(self, i: int, out: Tensor, scaled: bool) -> None:
        """Check the output of combine for rows as dispatched, or for rows that went through `scale`."""
        out = out.cpu()
        tokens: Inputs = self._inputs(i % self._rotations)[self._rank]
        self._same_shape("out", out, tokens.x)
        x = tokens.x.double()
        factor = factors(self._case)[tokens.topk_idx] if scaled else torch.ones(tokens.topk_idx.shape)
        total = (tokens.topk_weights.double() * factor).sum(1, keepdim=True)
        error = (out.double() - x * total).abs()
        # The small constant is for elements close to zero, which fp16 rounds more coarsely.
        wrong = ~(error <= TOLERANCE[self._case.torch_dtype] * (x.abs() * total + 1e-3)).all(1)  # NaN is wrong as well
        if wrong.any():
            message = f"combined {int(wrong.sum())} tokens wrongly, off by up to {float(error.max()):.3g}"
            raise WrongOutput(f"rank {self._rank} {message}")

    def layer(self, i: int, outputs: dict[str, Tensor | None]) -> None:
        """Check the layer's output, and the gradients of tokens and router if there are any."""
        expected: dict[str, Tensor] = self._dense(i % self._rotations)
        for name, got in outputs.items():
            want = expected[name]
            difference = self._same_shape(name, got, want).cpu().float() - want
            if name == "router.grad":
                difference, want = difference.view(1, -1), want.view(1, -1)
            size = want.norm(dim=1)
            error = difference.norm(dim=1) / size.clamp(min=1e-3 * float(size.max()))
            if not bool((error <= LAYER_TOLERANCE[self._case.torch_dtype]).all()):  # NaN is wrong as well
                raise WrongOutput(f"rank {self._rank}: {name} is off by {float(error.max()):.3g} of its norm")

    def scale(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Apply the experts of the combine op: each multiplies its rows by a distinct factor."""
        factor = factors(self._case).to(rows.device)[self._first_expert + experts]
        return (rows * factor[:, None]).to(rows.dtype)

    def _same_shape(self, name: str, got: Tensor | None, want: Tensor) -> Tensor:
        if got is None or got.shape != want.shape:
            shape = None if got is None else list(got.shape)
            raise WrongOutput(f"rank {self._rank}: {name} is {shape}, expected {list(want.shape)}")
        return got


def _order(rows: Tensor, experts: Tensor) -> Tensor:
    """Return a permutation that puts equal sets of rows in the same order: by expert, then by the rows' first eight
    bytes."""
    first = 8 // rows.itemsize
    head = F.pad(rows[:, :first], (0, max(0, first - rows.shape[1]))).contiguous().view(torch.int64)[:, 0]
    order = head.argsort(stable=True)
    return order[experts[order].argsort(stable=True)]


def factors(case: Case) -> Tensor:
    """fp32 [E]: neighbours differ by powers of two, which rounding cannot hide and which cause no rounding
    themselves."""
    return 2.0 ** (torch.arange(case.experts) % 4)
