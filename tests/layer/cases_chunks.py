"""A layer's forward and backward in chunks, next to the same layer in one; each case returns what its rank saw."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from layer.cases_layer import config, inputs_for
from layer.cases_overlap import Grads, LowRank, run, whole
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from moe_rt import MoELayer
from moe_rt.engine.cpu import CpuEngine
from moe_rt.errors import MoeRtError, TooManyTokens
from moe_rt.nn import averaging, experts
from moe_rt.nn.spread import SpreadModule
from moe_rt.ops.grouped import grouped_linear
from moe_rt.parallel import prepare


def make_layer(group: Any, num_chunks: Any, **changes: Any) -> MoELayer:
    """Return a layer whose rows have the same bits in any number of chunks."""
    own = changes.pop("experts", None)
    layer = MoELayer(config(num_chunks=num_chunks, **{"sums": "invariant"} | changes), group, experts=own)
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    return layer


@contextmanager
def seen_ops() -> Iterator[list[str]]:
    """Yield the list in which halves of ops are noted, and the experts at half and all of the way."""
    seen: list[str] = []
    halves = {name: getattr(CpuEngine, name) for name in ("_run_first", "_run_second")}
    for name, half in halves.items():

        def noted(engine: CpuEngine, begun: Any, half: Callable[..., None] = half, name: str = name) -> None:
            seen.append(f"{'begin' if name == '_run_first' else 'end'} {begun.op.name.lower()}")
            half(engine, begun)

        setattr(CpuEngine, name, noted)
    activate = experts.activate

    def activated(*given: Any, **named: Any) -> Tensor:
        seen.append("half-way")
        return activate(*given, **named)

    def computed(*given: Any, **named: Any) -> Tensor:
        y = compute(*given, **named)
        seen.append("experts")
        return y

    compute = experts.expert_mlp
    experts.activate, experts.expert_mlp = activated, computed
    yield seen
    experts.activate, experts.expert_mlp = activate, compute
    for name, half in halves.items():
        setattr(CpuEngine, name, half)


class Twice(nn.Module):
    """Experts that compute in another dtype, and know nothing of chunks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        return self.inner(x, offs).double() * 2


def gradients(group: Any, kind: str, num_chunks: int) -> tuple[Tensor, Grads, list[str], list[str], Any]:
    """Return the output and gradients of two accumulated passes, ops of the last forward and backward, and metrics."""
    changes: dict[str, Any] = {"shared_intermediate": 8} if kind == "shared" else {}
    if kind in ("biases", "split", "transposed"):
        changes = {"biases": kind == "biases", "weight_layout": "hf" if kind == "biases" else kind}
    layer = make_layer(group, num_chunks, **changes)
    if kind == "frozen experts" or (kind == "frozen on one rank" and group.rank() == 0):
        layer.experts.requires_grad_(False)
    elif kind == "frozen router":
        layer.router.requires_grad_(False)
    elif kind == "lora":
        layer.experts = LowRank(layer.experts)  # type: ignore[assignment]
    elif kind == "other experts":
        layer.experts = Twice(layer.experts)  # type: ignore[assignment]
    elif kind == "checkpoint of experts":
        layer.experts.forward = partial(checkpoint, layer.experts.forward, use_reentrant=False)  # type: ignore
    elif kind == "hooks":
        layer.experts.register_forward_hook(lambda _, __, y: y * 2)
        layer.experts.register_full_backward_hook(lambda *_: None)
    tokens = {"no tokens": [0, 9], "one token": [1, 1], "one per chunk": [2, 4]}.get(kind, [9, 7])[group.rank()]
    x = inputs_for(group.rank(), tokens).requires_grad_(kind != "no input gradient")
    with seen_ops() as seen, torch.no_grad() if kind == "no_grad" else nullcontext():
        for _ in range(2):
            seen.clear()
            y = run(layer, kind, x)
            forward = list(seen)
            if kind != "no_grad":
                seen.clear()
                (y * y).sum().backward()
    grads: Grads = {"x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
    counted = layer.metrics.snapshot()
    layer.buffer.close()
    return y.detach(), grads, forward, seen, (counted.tokens_per_expert, counted.forwards)


def one_and_many(group: Any, kind: str, num_chunks: int) -> tuple[Any, Any]:
    return gradients(group, kind, 1), gradients(group, kind, num_chunks)


USES: dict[str, dict[str, Any]] = {  # with changes of the config
    "mask": {},
    "given experts": {},
    "inference mode": {},
    "layer after layer": {},
    "two graphs": {},
    "tangents": {},
    "fewer tokens than chunks": {"num_max_tokens_per_rank": 2},
    "dropped rows": {"capacity_factor": 3.0, "overflow": "drop"},
    "retried": {"capacity_factor": 0.5, "overflow": "retry"},
    "depth": {"depth": 2},
    "codes": {"dispatch_dtype": torch.float8_e4m3fn, "combine_dtype": torch.int8, "sums": "ranked"},
    "ucx": {"heap": "ucx"},
    "ucx, automatic": {"heap": "ucx", "num_max_tokens_per_rank": 1 << 16},  # rows of 4 MiB
}


def used(group: Any, use: str) -> list[tuple[Tensor, list[Any], list[str]]]:
    """Return the output, gradients, and ops in halves of a layer, in one chunk and in several."""
    results = []
    for num_chunks in (1, "auto" if "auto" in use else 4):
        layer = make_layer(group, num_chunks, **USES[use])
        x = inputs_for(group.rank(), 2 if use.startswith("fewer") else 9).requires_grad_(use != "inference mode")
        with seen_ops() as seen:
            outputs = _outputs(layer, use, x)
            for y in outputs if use not in ("inference mode", "tangents") else ():
                y.square().sum().backward()
        grads = [x.grad, *(p.grad for p in layer.parameters())]
        results.append((torch.cat(outputs).detach(), grads, [text for text in seen if text.startswith("begin")]))
        layer.buffer.close()
    return results


def _outputs(layer: MoELayer, use: str, x: Tensor) -> list[Tensor]:
    token = torch.arange(len(x))
    if use == "mask":
        return [layer(x, mask=token % 3 != 0)[0]]
    if use == "given experts":
        return [layer(x, torch.stack([token % 7, (token + 1) % 7, torch.full_like(token, -1)], 1))[0]]
    if use == "inference mode":
        with torch.inference_mode():
            return [layer(x)[0]]
    if use == "layer after layer":
        return [layer(layer(x)[0])[0]]
    if use == "two graphs":
        return [layer(x)[0], layer(2 * x)[0]]
    if use == "tangents":
        with forward_ad.dual_level():
            y, tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x.detach(), torch.ones_like(x)))[0])
            return [y, tangent]
    return [layer(x)[0]]


def wrapped(group: Any, wrap: str) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return the output and gradients under a wrapper of data parallelism, in one chunk and in three."""
    results = []
    for num_chunks in (1, 3):
        layer = prepare(make_layer(group, num_chunks))
        if wrap == "fsdp of experts":
            fully_shard(layer.experts)
        model = DistributedDataParallel(layer) if wrap == "ddp" else fully_shard(layer)
        for _ in range(2):
            y, _ = model(inputs_for(group.rank(), 9))
            (y * y).sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()}
        results.append((y.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}))
        layer.buffer.close()
    return results


def backward_again(group: Any) -> list[Any]:
    """Return gradients of x only, then of all in two passes over one graph, in one chunk and in three."""
    results: list[Any] = []
    for num_chunks in (1, 3):
        layer = make_layer(group, num_chunks)
        x = inputs_for(group.rank(), 9).requires_grad_()
        loss = layer(x)[0].square().sum()
        (only_x,) = torch.autograd.grad(loss, x, retain_graph=True)
        of_weights = torch.autograd.grad(loss, list(layer.experts.parameters()), retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([only_x, x.grad, *of_weights, *(p.grad for p in layer.parameters())])
        layer.buffer.close()
    return results


def weight_gradients(group: Any, num_chunks: int, hook: bool) -> list[str]:
    """Return the order of ops and of the experts' gradients in a backward; `hook` is one on the experts' backward."""
    layer = make_layer(group, num_chunks)
    if hook:
        layer.experts.register_full_backward_hook(lambda *_: None)
    y, _ = layer(inputs_for(group.rank(), 9).requires_grad_())
    with seen_ops() as seen:
        for name, p in layer.experts.named_parameters():
            p.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
        y.square().sum().backward()
    layer.buffer.close()
    return seen


def num_means(group: Any) -> int:
    """Return how many means of gradients over ranks a backward in chunks takes; rank 0 runs its ops whole."""
    layer, means, mean_of = prepare(make_layer(group, 3)), [0], averaging.mean_of

    def counted(*given: Any) -> Any:
        means[0] += 1
        return mean_of(*given)

    averaging.mean_of = counted
    with torch.profiler.profile() if group.rank() == 0 else nullcontext():
        layer(inputs_for(group.rank(), 9))[0].square().sum().backward()
    averaging.mean_of = mean_of
    layer.buffer.close()
    return means[0]


def ranks_differ(group: Any, how: str) -> list[Any]:
    """Rank 0 runs its ops whole. Return the outputs and gradients of x, in one chunk and in three."""
    results: list[Any] = []
    for num_chunks in (1, 3):
        layer = make_layer(group, num_chunks)
        x = inputs_for(group.rank(), 9).requires_grad_()
        with torch.profiler.profile() if how == "profiler" and group.rank() == 0 else nullcontext():
            if how == "compiled" and (group.rank() == 0 or num_chunks == 1):
                y = torch.compile(lambda x, layer=layer: layer(x)[0], fullgraph=True, backend="aot_eager")(x)
            else:
                y = layer(x)[0]
            y.square().sum().backward()
        results += [y.detach(), x.grad]
        layer.buffer.close()
    return results


class OwnExperts(SpreadModule):
    """A user's experts, which read one weight after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(4, 16, 16)) for _ in range(2))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        for name in ("first", "second"):
            x = grouped_linear(x, self.parts(name)[name], offs).relu()
        return x


def whole_next_to_copies(group: Any, how: str, own: bool) -> list[Grads]:
    """Two of four ranks, one of each group, run their ops whole; the others, in halves, hold copies of their experts.

    Return the experts' gradients, in one chunk and in three."""
    ep = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep")).get_group("ep")
    results: list[Grads] = []
    for num_chunks in (1, 3):
        changes: dict[str, Any] = {"experts": OwnExperts(), "num_experts": 8} if own else {"biases": True}
        layer = prepare(make_layer(ep, num_chunks, **changes))
        x = inputs_for(group.rank(), 9).requires_grad_()
        differs = group.rank() in (0, 3)
        with whole(False), torch.profiler.profile() if differs and how == "profiler" else nullcontext():
            if differs and how == "compiled" and num_chunks > 1:
                y = torch.compile(lambda x, layer=layer: layer(x)[0], fullgraph=True, backend="aot_eager")(x)
            else:
                y = layer(x)[0]
            y.square().sum().backward()
        results.append({name: p.grad for name, p in layer.experts.named_parameters()})
        layer.buffer.close()
    return results


def check_means(found: list[list[Grads]]) -> None:
    """Check that gradients of four ranks are equal in one chunk and in three, and equal between copies."""
    for (one, many), (copy, _) in zip(found, found[2:] + found[:2], strict=True):
        torch.testing.assert_close(many, one)
        torch.testing.assert_close(copy, one)


def different_numbers(group: Any) -> str:
    """Return the error of ranks that were given different numbers of chunks."""
    layer = make_layer(group, 2 + group.rank())
    try:
        layer(inputs_for(group.rank(), 9))
    except MoeRtError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        layer.buffer.close()
    return ""


def too_many_tokens(group: Any) -> list[str]:
    """Return the error of a batch that is too large on rank 1, in chunks, and what the next batch gives.

    All ops of the report have the layer's tag, also a refused one.
    """
    before, layer = MoELayer(config(sums="invariant"), group), make_layer(group, 3)
    assert before.buffer is layer.buffer
    most = layer.config.num_max_tokens_per_rank
    assert most is not None
    x = torch.randn(most + 1 if group.rank() == 1 else 2, layer.config.hidden)
    texts = []
    for rows in (x, x[:2]):
        try:
            texts.append(f"{len(layer(rows)[0])} tokens")
        except TooManyTokens as error:
            texts.append(str(error))
    assert {op.tag for op in layer.buffer.report().ranks[group.rank()].last_ops} == {layer.tag}
    layer.buffer.close()
    return texts


def raises_between(group: Any) -> list[str]:
    """Rank 0's experts raise in their first call, while an op is under way. Return the errors of three forwards."""
    layer, errors = make_layer(group, 3), []
    for i in range(3):
        if group.rank() == 0 and i == 0:
            layer.experts.forward = _raise  # type: ignore[method-assign]
        try:
            layer(inputs_for(group.rank(), 9))
            errors.append("")
        except (ValueError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        vars(layer.experts).pop("forward", None)
    layer.buffer.close()
    return errors


def _raise(*_: Tensor) -> Tensor:
    raise ValueError("a mistake on purpose")
