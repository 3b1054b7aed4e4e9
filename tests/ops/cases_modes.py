"""Modes of evaluation, and a training step after any two of them that must equal a step after none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from moe_rt import Buffer, MoEConfig, MoELayer

E, K = 4, 2
# Large enough for recycled outputs, on the heaps that recycle.
SIZES = {"threads": (256, 1024), "shm": (256, 1024), "loopback": (6, 20)}
BITWISE = {"rtol": 0, "atol": 0}

Model = Callable[[Tensor], Tensor]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "deterministic": deterministic,
    "meta as device": lambda: torch.device("meta"),
    "default device": default_device,
    "default dtype": default_dtype,
}


def in_fake_mode(model: Model, x: Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(x))


def tried(transform: Callable[[Model], Model], model: Model, x: Tensor) -> None:
    """Run a transform that may raise: torch has no rule for some ops, and says so before anything is announced."""
    with suppress(RuntimeError):
        transform(lambda x: model(x).sum())(x)


def exported(model: Model, x: Tensor) -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x)

    torch.export.export(Wrapped(), (x,), strict=False).module()(x)


def compiled(model: Model, x: Tensor) -> None:
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager")(x).sum().backward()


TRANSFORMS: dict[str, Callable[[Model, Tensor], Any]] = {
    "fake": in_fake_mode,
    "make_fx": lambda model, x: make_fx(model)(x)(x),
    "functionalize": lambda model, x: torch.func.functionalize(model)(x),
    "grad": lambda model, x: tried(torch.func.grad, model, x),
    "vmap": lambda model, x: tried(torch.vmap, model, x.unsqueeze(0)),
    "export": exported,
    "compile": compiled,
}
# Tracing takes a second or more, and does not depend on the heap.
SLOW = ("export", "compile")


# The modes that programs use most, and that are most likely to leave state in an op.
USUAL = ("plain", "no_grad", "inference_mode", "autocast", "compile")


def modes(heap: str) -> list[str]:
    """Return the modes to try on a heap."""
    return [mode for mode in (*CONTEXTS, *TRANSFORMS) if heap == "threads" or mode not in SLOW]


def evaluate(mode: str, model: Model, x: Tensor) -> None:
    if mode in TRANSFORMS:
        TRANSFORMS[mode](model, x)
    else:
        with CONTEXTS[mode]():
            model(x), model(x)


def train(model: Model, x: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """Return outputs and gradients of two steps."""
    results = []
    for _ in range(2):
        x = x.detach().requires_grad_()
        out = model(x)
        loss = (out * torch.linspace(-1, 1, out.shape[1], dtype=out.dtype)).sum() + x.sum()
        results += [out.detach(), *torch.autograd.grad(loss, [x, *leaves])]
    return results


def rank_of(group: Any) -> int:
    return group.rank if isinstance(group.rank, int) else group.rank()


def input_of(group: Any, heap: str) -> Tensor:
    return torch.randn(SIZES[heap], generator=torch.Generator().manual_seed(rank_of(group)))


def buffer_case(group: Any, heap: str, first: str, seconds: list[str]) -> None:
    tokens, hidden = SIZES[heap]
    sizes = dict(num_max_tokens_per_rank=tokens, hidden=hidden, num_topk=K, num_experts=E, dtype=torch.float32)
    x = input_of(group, heap)
    idx = torch.randint(0, E, (tokens, K), generator=torch.Generator().manual_seed(rank_of(group)))

    def open_one() -> tuple[Buffer, Model, list[Tensor]]:
        buffer, weights = Buffer(group, **sizes), torch.full((tokens, K), 0.5, requires_grad=True)

        def there_and_back(x: Tensor) -> Tensor:
            recv_x, recv_weights, handle = buffer.dispatch(x, idx, weights)
            return buffer.combine(recv_x * recv_x, recv_weights, handle) + buffer.combine(recv_x, recv_weights, handle)

        return buffer, there_and_back, [weights]

    buffer, model, leaves = open_one()
    with buffer:
        expected = train(model, x, leaves)
    for second in seconds:
        buffer, model, leaves = open_one()
        with buffer:
            evaluate(first, model, x), evaluate(second, model, x)
            torch.testing.assert_close(train(model, x, leaves), expected, **BITWISE, msg=f"{first}, {second}")


def layer_case(group: Any, heap: str, first: str, seconds: list[str]) -> None:
    tokens, hidden = SIZES[heap]
    config = MoEConfig(
        hidden=hidden, intermediate=16, num_experts=E, num_topk=K, num_max_tokens_per_rank=tokens, aux_loss_coef=0.01
    )
    x = input_of(group, heap)

    def make() -> tuple[MoELayer, Model, list[Tensor]]:
        layer = MoELayer(config, group, buffer=Buffer(group, **config.buffer_sizes()))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():  # ranks that are threads share the global RNG
            for p in layer.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)

        def forward(x: Tensor) -> Tensor:
            out, aux = layer(x)
            return out + aux.loss

        return layer, forward, list(layer.parameters())

    layer, model, leaves = make()
    with layer.buffer:
        expected = train(model, x, leaves)
    for second in seconds:
        layer, model, leaves = make()
        with layer.buffer:
            evaluate(first, model, x), evaluate(second, model, x)
            torch.testing.assert_close(train(model, x, leaves), expected, **BITWISE, msg=f"{first}, {second}")
            assert not any(t.is_inference() for t in (layer.metrics._tokens, layer.metrics._forwards))


def made_in(group: Any, mode: str) -> None:
    """A layer keeps its parameters in the mode that it is made in, as torch's layers do; its counters change later."""
    tokens, hidden = SIZES["threads"]
    config = MoEConfig(hidden=hidden, intermediate=16, num_experts=E, num_topk=K, num_max_tokens_per_rank=tokens)
    x = input_of(group, "threads")
    with CONTEXTS[mode]():
        layer = MoELayer(config, group)
        layer(x)
    with layer.buffer, torch.no_grad():
        layer(x)
        assert layer.metrics.snapshot().forwards == 2
        assert layer.router.weight.device == layer.buffer.device
        idx = torch.zeros(tokens, K, dtype=torch.int64)

        def pair(x: Tensor) -> Tensor:
            return layer.buffer.combine(*layer.buffer.dispatch(x, idx, torch.ones(tokens, K)))

        with torch.enable_grad():
            expected = (K * torch.linspace(-1, 1, hidden) + 1).expand(tokens, hidden)
            torch.testing.assert_close(train(pair, x, [])[1], expected)
            assert not pair(x).is_inference()
