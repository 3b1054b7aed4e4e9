"""Digests of what goes into and out of each op of a model's layers, to find where two runs part.

A digest is 64 bits of the bits of a tensor's rows, added up over rows: rows may be in any order and on any rank, so
runs of different numbers of ranks compare. Each rank writes one file, a line of JSON for each digest; `moe-rt diff`
compares two runs. The host reads digests only at the end of a step, many in one copy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from moe_rt.errors import InvalidConfig, WriteFailed, expect
from moe_rt.routes.calls import Calls, in_backward
from moe_rt.routes.session import routed_layers

VERSION = 1
REPLICATED = "replicated parameter"  # the same on every rank, unlike those of experts
MOST_PENDING = 8192  # digests on the device before the host reads them, also within a step
ROWS_BYTES = 1 << 26  # of one temporary tensor
FIRST, SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # multipliers of splitmix64's finaliser, as signed integers
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_factors: dict[tuple[int, torch.device], Tensor] = {}

Seer = Callable[..., None]


class Watched(Protocol):
    """A layer that shows its tensors to a digest: `watcher` is None, or what returns a Seer for each forward."""

    watcher: Callable[[], Seer] | None


def row_digests(t: Tensor) -> Tensor:
    """Return int64 [rows], a digest of the bits of each row of t [rows, ...]."""
    rows = t.detach().reshape(len(t), t.shape[1:].numel()).contiguous().view(_INTS[t.element_size()])
    key = rows.shape[1], t.device
    if key not in _factors:
        drawn = torch.randint(-(1 << 62), 1 << 62, (key[0],), generator=torch.Generator().manual_seed(9))
        _factors[key] = (2 * drawn + 1).to(t.device)
    each = max(1, ROWS_BYTES // (8 * max(1, key[0])))
    return _mixed(torch.cat([(part * _factors[key]).sum(1) for part in rows.split(each)]))


def _mixed(h: Tensor) -> Tensor:
    """Return the digests mixed, so that their sum over rows does not cancel."""
    for shift, factor in ((30, FIRST), (27, SECOND)):
        h = (h ^ ((h >> shift) & ((1 << 64 - shift) - 1))) * factor
    return h ^ ((h >> 31) & ((1 << 33) - 1))


class Digest:
    """Watches the layers of a model while a `with` block runs; see `moe_rt.diagnostics.digest`."""

    def __init__(self, model: nn.Module, directory: str | Path, tokens: bool) -> None:
        layers: dict[str, Any] = dict(routed_layers(model))
        for name, layer in layers.items():
            expect(hasattr(layer, "watcher"), f"model: {name}", type(layer).__name__, "MoELayers only")
            expect(layer.watcher is None, f"model: {name}", "a layer that is watched already", "one that is not")
        self._layers, self._calls = layers, {name: Calls() for name in layers}
        buffer = next(iter(layers.values())).buffer
        self._model, self._tokens = model, tokens
        self._parameters = {id(p) for p in model.parameters()}
        self._step, self._first = 0, dict.fromkeys(layers, 0)
        self._pending: list[tuple[list[Any], Tensor, Tensor | None]] = []
        self._path = Path(directory, f"rank-{buffer.rank:05d}.jsonl")
        with self._writing():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("w")
        self._write({"version": VERSION, "rank": buffer.rank, "num_ranks": buffer.num_ranks, "layers": [*layers]})

    def step(self) -> None:
        """End a step. An optimizer's step on a parameter of the model does this by itself."""
        from torch.distributed.tensor import DTensor  # here, since it would slow the import of Buffer by a second

        for name, p in self._model.named_parameters():
            # Shards depend on the number of ranks.
            if not isinstance(p, DTensor):
                experts = getattr(p, "whole", None) is not None or ".experts." in f".{name}"
                value = p.detach().as_subclass(Tensor) if type(p) is nn.Parameter else _local(p)
                row = value if experts else value.reshape(1, -1)
                self._keep(name, 0, "step", "parameter" if experts else REPLICATED, "step", row, None)
        self._flush()
        self._step += 1
        self._first = {name: calls.count for name, calls in self._calls.items()}

    def __enter__(self) -> Digest:
        for name, layer in self._layers.items():
            layer.watcher = self._watcher(name)
        self._hook = register_optimizer_step_post_hook(self._after_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hook.remove()
        for layer in self._layers.values():
            layer.watcher = None
        try:
            self._flush()
        finally:
            with self._writing():  # a full disk is often noticed only here
                self._file.close()

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self.step()

    def _watcher(self, name: str) -> Callable[[], Seer]:
        def begin() -> Seer:
            if torch.compiler.is_compiling():
                raise InvalidConfig(f"digest: got {name} in a graph that is being compiled, expected eager layers")
            number, recomputed = self._calls[name].number(), in_backward()
            call = -1 if number is None else number - self._first[name]

            def see(op: str, offs: Tensor | None = None, **tensors: Tensor) -> None:
                for what, t in tensors.items():
                    if not recomputed:
                        self._keep(name, call, op, what, "forward", t, offs)
                    if t.requires_grad and torch.is_grad_enabled():
                        t.register_hook(self._of_gradient(name, call, op, what, offs))

            return see

        return begin

    def _of_gradient(self, name: str, call: int, op: str, what: str, offs: Tensor | None) -> Callable[[Tensor], None]:
        def keep(grad: Tensor) -> None:
            self._keep(name, call, op, what, "backward", grad, offs)

        return keep

    @torch.no_grad()
    def _keep(self, name: str, call: int, op: str, what: str, way: str, t: Tensor, offs: Tensor | None) -> None:
        digests = row_digests(t)
        if offs is not None:  # rows after the last expert's are unspecified
            digests = digests.masked_fill(torch.arange(len(digests), device=digests.device) >= offs[-1], 0)
        each = digests if self._tokens and offs is None and way != "step" else None
        self._pending.append(([self._step, call, name, op, what, way], digests.sum(), each))
        if len(self._pending) >= MOST_PENDING:
            self._flush()

    def _flush(self) -> None:
        """Write what is pending; the host waits for the device."""
        if not self._pending:
            return
        sums = torch.stack([total for _, total, _ in self._pending]).tolist()
        for (key, _, each), total in zip(self._pending, sums, strict=True):
            tokens = None if each is None else [_hex(token) for token in each.tolist()]
            self._write([*key, _hex(total), *([] if tokens is None else [tokens])])
        self._pending.clear()
        with self._writing():
            self._file.flush()

    def _write(self, record: Any) -> None:
        with self._writing():
            self._file.write(json.dumps(record) + "\n")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteFailed(f"digests {self._path}: got {error.strerror}, expected to write there") from error


def digest(model: nn.Module, directory: str | Path, *, tokens: bool = False) -> Digest:
    """Write digests of the tensors of each MoELayer of a model, and of its parameters after each step. Local.

    Layers run as without it, eagerly. The digest of one tensor takes one pass over it; the host reads all digests of a
    step when an optimizer has stepped, or at `step()`. The files grow, memory does not.

    Args:
        model: the model; other layers are not watched.
        directory: a directory for the files of all ranks of one run, one for each; an older file is replaced.
        tokens: also write a digest of each token, so that `moe-rt diff` names tokens.

    Returns:
        What to enter with `with`.

    Raises:
        InvalidConfig: the model has no MoELayer, or is watched already; or, in a forward, is being compiled.
        WriteFailed: a file cannot be written.
    """
    return Digest(model, directory, tokens)


def _local(p: Any) -> Tensor:
    """Return a parameter's values on this rank as a plain tensor."""
    part: Tensor = p.to_local() if hasattr(p, "to_local") else p
    return part.detach()


def _hex(value: int) -> str:
    return f"{value % (1 << 64):016x}"
