"""Records the experts that tokens visit in a model's layers, and replays them with weights from the live logits."""

from __future__ import annotations

import itertools
import os
import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moe_rt.errors import InvalidConfig, InvalidInput, expect
from moe_rt.group.all_or_none import agree, all_or_none
from moe_rt.group.groups import Group, rendezvous_of
from moe_rt.routes.calls import Calls, in_backward
from moe_rt.routes.file import MOST_EXPERTS, Routes, layer_number, load, merge

RECORDS, REPLAYS, REPLAYED = 1, 2, 4  # bits of Routed.routing
TIMEOUT_S = 300.0
WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


class Routed(Protocol):
    """A layer whose routes can be recorded.

    Attributes:
        routing: sum of RECORDS and REPLAYS, what the layer does now, and REPLAYED, if it did and may recompute it.
        routes_id: identifies the layer in compiled graphs, in which it is a constant; 0 before its first use.
    """

    routing: int
    routes_id: int

    def routes_sizes(self) -> tuple[int, int, Group]:
        """Return E, K and the group of the ranks that run the layer together."""
        ...

    def refuse_routes(self, error: InvalidInput) -> None:
        """Raise the error on every rank of the group, in place of the layer's exchange."""
        ...


Finder = Callable[[nn.Module], "Routed | None"]
# Each returns a module's Routed, if it is a layer of its kind. Integrations append theirs.
FINDERS: list[Finder] = [lambda module: module if hasattr(type(module), "routes_sizes") else None]  # type: ignore
_ids = itertools.count(1)
_entering = threading.Lock()
# Running sessions, and a layer's place in each, by (routes_id, RECORDS or REPLAYS).
_running: dict[tuple[int, int], tuple[Any, int]] = {}
# The latest replay of each layer, whose backward may come after its block, and the layer's place, by routes_id.
_ended: dict[int, tuple[Any, int]] = {}


def routed_layers(model: nn.Module | Sequence[nn.Module]) -> dict[str, Routed]:
    """Return the layers of a model, or of several modules, by name.

    Raises:
        InvalidConfig: none is found.
    """
    roots = [("", model)] if isinstance(model, nn.Module) else [(str(i), one) for i, one in enumerate(model)]
    found: dict[str, Routed] = {}
    for prefix, root in roots:
        for path, module in root.named_modules(prefix=prefix):
            routed = next((r for finder in FINDERS if (r := finder(module)) is not None), None)
            if routed is not None:
                name = ".".join(part for part in path.split(".") if part not in WRAPPERS)
                found[name or "layer"] = routed
    expect(bool(found), "model", type(model).__name__, "a model with a MoELayer, or with experts over moe_rt")
    return found


class _Session:
    """Layers of one model that record or replay while a `with` block runs. It may be entered several times."""

    bit: int  # RECORDS or REPLAYS

    def __init__(self, model: nn.Module | Sequence[nn.Module], group: Group) -> None:
        self.names, self.routed = (tuple(t) for t in zip(*routed_layers(model).items(), strict=True))
        sizes = [layer.routes_sizes() for layer in self.routed]
        self.num_experts, self.num_topk = sizes[0][:2]
        for name, (num_experts, num_topk, _) in zip(self.names, sizes, strict=True):
            equal = (num_experts, num_topk) == (self.num_experts, self.num_topk)
            expected = f"E = {self.num_experts}, K = {self.num_topk} as in {self.names[0]}"
            expect(equal, name, f"E = {num_experts}, K = {num_topk}", expected)
        expect(self.num_experts <= MOST_EXPERTS, "num_experts", self.num_experts, f"at most {MOST_EXPERTS}")
        self.rendezvous = rendezvous_of(sizes[0][2] if group is None else group)
        self.rank, self.num_ranks = self.rendezvous.rank, self.rendezvous.size
        self.calls = [Calls() for _ in self.routed]

    def __enter__(self) -> Any:
        with _entering:
            busy = [n for n, r in zip(self.names, self.routed, strict=True) if r.routing & self.bit]
            expect(not busy, ", ".join(busy), "a layer that records or replays already", "one that does not")
            for at, layer in enumerate(self.routed):
                taken = any((layer.routes_id, bit) in _running for bit in (RECORDS, REPLAYS))
                if layer.routes_id == 0 or (taken and not layer.routing & ~REPLAYED):  # by the layer it is a copy of
                    layer.routes_id = next(_ids)
                layer.routing = layer.routing & ~REPLAYED | self.bit
                _running[layer.routes_id, self.bit] = self, at
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer in self.routed:
            ended = _running.pop((layer.routes_id, self.bit), None)
            layer.routing &= ~self.bit
            if ended is not None and self.bit == REPLAYS:
                layer.routing |= REPLAYED
                _ended[layer.routes_id] = ended


class Recording(_Session):
    """The experts that this rank's tokens visit while `with` blocks of it run; see `moe_rt.routes.record`.

    Ids stay on the layers' device, and the host reads them only in `routes` and `save`.
    """

    bit = RECORDS

    def __init__(self, model: nn.Module | Sequence[nn.Module], group: Group = None) -> None:
        super().__init__(model, group)
        self._noted: list[list[Tensor]] = [[] for _ in self.routed]

    def note(self, at: int, topk_idx: Tensor) -> None:
        """Keep the ids of one forward, integers [T, K]; those of a recomputation are the same and are left out."""
        if not in_backward():
            self._noted[at].append(topk_idx.detach().to(torch.int16, copy=True))

    def routes(self) -> Routes:
        """Return what this rank has recorded so far. `moe_rt.routes.merge` joins the ranks' own, as `save` does.

        Raises:
            InvalidConfig: layers ran different numbers of times, or with different numbers of tokens.
        """
        shapes = [[len(ids) for ids in noted] for noted in self._noted]
        for name, shape in zip(self.names, shapes, strict=True):
            expected = f"{shapes[0]} as in {self.names[0]}"
            expect(shape == shapes[0], f"{name}: tokens of each forward", shape, expected)
        calls = [torch.stack(ids, 1) for ids in zip(*self._noted, strict=True)]
        empty = torch.empty(0, len(self.names), self.num_topk, dtype=torch.int16)
        ids = torch.cat(calls) if calls else empty
        counts = torch.tensor(shapes[0], dtype=torch.int64)
        micro_batch = torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts)
        rank, of_rank = torch.full_like(micro_batch, self.rank), None if self.num_ranks == 1 else self.rank
        return Routes(ids, self.num_experts, self.names, self.num_ranks, len(counts), rank, micro_batch, of_rank)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the routes of all ranks to one file, which rank 0 puts together. Collective over the group.

        Raises:
            InvalidConfig, WriteFailed: on every rank, if a rank's routes are incomplete, or a file cannot be written
                or, on rank 0, found.
        """
        target = Path(path)
        parts = [target.with_name(f"{target.name}.{rank}.part") for rank in range(self.num_ranks)]

        def write() -> dict[str, Any]:
            self.routes().save(parts[self.rank])
            return {}

        def put_together() -> dict[str, Any]:
            if self.rank == 0:
                merge([load(part) for part in parts]).save(target)
                for part in parts:
                    part.unlink()
            return {}

        if self.num_ranks == 1:
            return self.routes().save(target)
        for work, what in ((write, "write its routes"), (put_together, "put the routes together")):
            all_or_none(self.rendezvous, work, what, TIMEOUT_S)


class Replay(_Session):
    """Recorded routes in place of the layers' own choices while `with` blocks of it run; see `moe_rt.routes.replay`."""

    bit = REPLAYS

    def __init__(
        self,
        routes: Routes | Recording | str | os.PathLike[str],
        model: nn.Module | Sequence[nn.Module],
        *,
        tokens: Sequence[Tensor] | None = None,
        group: Group = None,
    ) -> None:
        super().__init__(model, group)
        self._batches: list[Tensor] = []
        root = model if isinstance(model, nn.Module) else model[0]
        device = next((p.device for p in root.parameters()), torch.device("cpu"))

        def prepare() -> dict[str, Any]:
            source = routes.routes() if isinstance(routes, Recording) else routes
            source = source if isinstance(source, Routes) else load(source)
            for name in ("num_experts", "num_topk"):
                expect(getattr(source, name) == getattr(self, name), f"routes: {name}", getattr(source, name),
                       f"{getattr(self, name)} as in the model")  # fmt: skip
            source = replace(source, topk_idx=source.topk_idx[:, columns(source.layers, self.names)])
            self._batches = [ids.to(device) for ids in _shares(source, self.rank, self.num_ranks, tokens)]
            which = f"checksum {_checksum(source)}" if source.of_rank is None else "each rank's own"
            return {"routes": f"of {source.num_ranks} ranks, {source.num_micro_batches} micro-batches, {which}"}

        record = all_or_none(self.rendezvous, prepare, "replay routes", TIMEOUT_S)[self.rank]
        agree(self.rendezvous, record, TIMEOUT_S, "compare the routes to replay")

    def give(self, at: int, num_tokens: int, device: torch.device) -> Tensor:
        """Return int64 [T, K], the experts of this rank's tokens in one forward of a layer."""
        name, number = self.names[at], self.calls[at].number()
        if number is None:
            got = f"{name}: got a recomputation by a checkpointing that keeps nothing from its forward"
            self._refuse(at, f"{got}, expected one of torch.utils.checkpoint or of an autograd.Function")
        elif number >= len(self._batches):
            self._refuse(at, f"{name}: got micro-batch {number}, expected only {len(self._batches)}, as recorded")
        elif len(self._batches[number]) != num_tokens:
            expected = f"{len(self._batches[number])} on rank {self.rank} of {self.num_ranks}, as recorded"
            self._refuse(at, f"{name}: got {num_tokens} tokens in micro-batch {number}, expected {expected}")
        else:
            if self._batches[number].device != device:
                self._batches[number] = self._batches[number].to(device)
            return self._batches[number][:, at].to(torch.int64)
        raise AssertionError("refuse_routes returned")

    def _refuse(self, at: int, message: str) -> None:
        self.routed[at].refuse_routes(InvalidInput(message, rank=self.rank))


def columns(recorded: Sequence[str], layers: Sequence[str]) -> list[int]:
    """Return the place of each of the model's layers among the recorded ones.

    Equal names match; then equal numbers of layers, in order; then the number in a layer's path, since servers count
    layers without experts also.

    Raises:
        InvalidConfig: layers do not match.
    """
    if set(layers) <= set(recorded):
        return [recorded.index(name) for name in layers]
    if len(layers) == len(recorded):
        return list(range(len(layers)))
    numbers, places = [layer_number(n) for n in layers], {layer_number(n): i for i, n in enumerate(recorded)}
    fits = len(recorded) > len(layers) and len(places) == len(recorded) and set(numbers) <= set(places) - {None}
    expect(fits and len(set(numbers)) == len(numbers), "routes: layers", list(recorded), f"those of {list(layers)}")
    return [places[number] for number in numbers]


def _shares(source: Routes, rank: int, num_ranks: int, tokens: Sequence[Tensor] | None) -> Sequence[Tensor]:
    """Return int16 [T, layers, K] of this rank's tokens in each micro-batch."""
    if tokens is not None:
        missing = torch.full_like(source.topk_idx[:1], -3)
        ids = torch.cat([source.topk_idx, missing])
        for at, numbers in enumerate(tokens):
            whole = numbers.dim() == 1 and not numbers.is_floating_point()
            fits = whole and bool(((numbers >= -1) & (numbers < len(ids) - 1)).all())
            expect(
                fits, f"tokens[{at}]", f"{numbers.dtype} {list(numbers.shape)}", f"numbers from -1 to {len(ids) - 2}"
            )
        return [ids[numbers.cpu().to(torch.int64)] for numbers in tokens]
    same = source.num_ranks == num_ranks
    if source.of_rank is not None:
        got = f"those of rank {source.of_rank} of {source.num_ranks}"
        others = "those of all ranks, from Recording.save or moe_rt.routes.merge, or tokens="
        expect(same and source.of_rank == rank, "routes", got, f"those of rank {rank} of {num_ranks}, {others}")
    kept = source.of(rank=rank) if same else source
    order = torch.argsort(kept.micro_batch.to(torch.int64) * kept.num_ranks + kept.rank, stable=True)
    counts = torch.bincount(kept.micro_batch.to(torch.int64), minlength=kept.num_micro_batches).tolist()
    batches = kept.topk_idx[order].split(counts)
    if same:
        return batches
    for number, count in enumerate(counts):
        expected = f"a multiple of {num_ranks} ranks, or tokens="
        expect(count % num_ranks == 0, f"routes: tokens of micro-batch {number}", count, expected)
    return [batch.chunk(num_ranks)[rank] for batch in batches]


def _checksum(source: Routes) -> int:
    tensors = (source.topk_idx, source.rank, source.micro_batch)
    return zlib.crc32(b"".join(t.cpu().contiguous().numpy().tobytes() for t in tensors))


def noted(routes_id: int, topk_idx: Tensor) -> None:
    """Pass the ids of one forward to the recording that runs for the layer, if any."""
    running = _running.get((routes_id, RECORDS))
    if running is not None:
        running[0].note(running[1], topk_idx)


def given(routes_id: int, num_tokens: int, device: torch.device) -> Tensor:
    """Return int64 [T, K] from the replay that runs for the layer.

    Raises:
        InvalidConfig: none runs.
    """
    running = _running.get((routes_id, REPLAYS)) or _ended.get(routes_id)
    if running is None:
        raise InvalidConfig(
            "routes: got a compiled forward outside the replay that it was made for, expected it inside"
        )
    ids: Tensor = running[0].give(running[1], num_tokens, device)
    return ids


def recomputes(routes_id: int) -> bool:
    """True if this call of a layer recomputes a forward of its latest replay, whose block has ended."""
    ended = _ended.get(routes_id)
    return ended is not None and ended[0].calls[ended[1]].recomputes()
