"""The file of recorded routes: expert ids [tokens, layers, K] and a header, as NumPy's .npz or .npy.

The .npz holds `topk_idx` int16 [tokens, layers, K], `rank` and `micro_batch` int32 [tokens], and `header`, JSON in
uint8: version, num_experts, num_topk, num_ranks, num_micro_batches, layers, and of_rank if it is one rank's part.
Tokens are sorted by micro-batch, then rank, then place. An id of -1 is no expert, -2 in a whole row is a token that no
expert took, and -3 in a whole row is a token without a record.
A .npy, or an .npz with one array, holds the ids of one rank and one micro-batch, as vLLM and SGLang return them; it may
be [tokens, K] of one layer.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moe_rt.errors import InvalidConfig, WriteFailed, expect

VERSION = 1
FIELDS = ("version", "num_experts", "num_topk", "num_ranks", "num_micro_batches")  # integers of the header
MOST_EXPERTS = 1 << 15  # ids are int16
UNRECORDED = -3
Ids = npt.NDArray[np.int64]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Routes:
    """Experts that each token visited in each layer.

    Attributes:
        topk_idx: int16 [tokens, layers, K]; see the module for negative ids.
        num_experts: number of experts of each layer (E).
        layers: name of each layer.
        num_ranks, num_micro_batches: numbers of ranks that recorded, and of micro-batches; some may have no tokens.
        rank, micro_batch: int32 [tokens], where each token was; micro-batches are numbered from 0.
        of_rank: the rank whose tokens these are; None for the tokens of all ranks.
    """

    topk_idx: Tensor
    num_experts: int
    layers: tuple[str, ...]
    num_ranks: int
    num_micro_batches: int
    rank: Tensor
    micro_batch: Tensor
    of_rank: int | None = None

    @property
    def num_topk(self) -> int:
        """Number of experts per token (K)."""
        return self.topk_idx.shape[2]

    @classmethod
    def from_routed_experts(
        cls,
        requests: Sequence[Any],
        *,
        num_experts: int,
        layers: Sequence[str] = (),
        length: int | None = None,
        starts: Sequence[int] | None = None,
        shape: tuple[int, int] | None = None,
    ) -> Routes:
        """Make the routes of one micro-batch from what servers return, one request after the other.

        vLLM and SGLang return the experts of all tokens of a request that they ran, and so none of its last one. Their
        layers are all the model's layers, with zeros in those without experts.

        Args:
            requests: for each request integers [tokens, layers, K], or base64 text: of a .npy, as vLLM's HTTP API
                returns it, or of int32 without a shape, as SGLang does.
            num_experts: E.
            layers: name of each layer; default "0", "1", ...
            length: pad each request to this many tokens, as in a batch [requests, length]. Tokens without a record
                choose their experts anew in a replay.
            starts: number of tokens before the first recorded one of each request: vLLM's routed_experts_prompt_start
                or SGLang's routed_experts_start_len. They have no record. Default: 0.
            shape: (layers, K) of texts without a shape.

        Raises:
            InvalidConfig: an array has another shape or type, is longer than `length`, or has an id out of range; or a
                text is not such base64.
        """
        arrays = [_decoded(request, shape, f"requests[{i}]") for i, request in enumerate(requests)]
        shapes = [list(array.shape) for array in arrays]
        fits = bool(arrays) and all(a.ndim == 3 and a.shape[1:] == arrays[0].shape[1:] for a in arrays)
        expect(fits, "requests", f"shapes {shapes}", "arrays [tokens, layers, K] that differ in tokens only")
        before = [0] * len(arrays) if starts is None else list(starts)
        fits = len(before) == len(arrays) and min(before) >= 0
        expect(fits, "starts", before, f"numbers >= 0, one for each of {len(arrays)} requests")
        longest = max(n + len(a) for n, a in zip(before, arrays, strict=True))
        expect(length is None or longest <= length, "length", length, f"at least the {longest} tokens of a request")
        if length is not None or any(before):
            arrays = [_padded(a, n, length) for n, a in zip(before, arrays, strict=True)]
        return _plain(np.concatenate(arrays), num_experts, "requests", tuple(layers))

    def of(self, *, rank: int | None = None, micro_batch: int | None = None) -> Routes:
        """Return the part that a rank, a micro-batch or both recorded."""
        kept = torch.ones_like(self.rank, dtype=torch.bool)
        if rank is not None:
            kept &= self.rank == rank
        if micro_batch is not None:
            kept &= self.micro_batch == micro_batch
        of_rank = self.of_rank if rank is None or self.num_ranks == 1 else rank
        return replace(
            self, topk_idx=self.topk_idx[kept], rank=self.rank[kept], micro_batch=self.micro_batch[kept],
            of_rank=of_rank,
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write these tokens' file. Local; `Recording.save` writes the tokens of all ranks.

        Raises:
            WriteFailed: the file cannot be written.
        """
        header = {
            "version": VERSION, "num_experts": self.num_experts, "num_topk": self.num_topk,
            "num_ranks": self.num_ranks, "num_micro_batches": self.num_micro_batches, "layers": list(self.layers),
        }  # fmt: skip
        header |= {} if self.of_rank is None else {"of_rank": self.of_rank}
        tensors = {"topk_idx": self.topk_idx, "rank": self.rank, "micro_batch": self.micro_batch}
        arrays: dict[str, Any] = {name: t.cpu().numpy() for name, t in tensors.items()}
        target = Path(path)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.new")
        try:
            with unfinished.open("wb") as file:
                np.savez(file, header=np.frombuffer(json.dumps(header).encode(), np.uint8), **arrays)
            unfinished.replace(target)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise WriteFailed(f"routes {target}: got {error.strerror}, expected to write the file") from error


def merge(parts: Sequence[Routes]) -> Routes:
    """Return the routes of all ranks from each rank's own, in any order.

    Raises:
        InvalidConfig: a rank is missing or there twice, or parts differ in E, K, layers or the number of ranks.
    """
    expect(bool(parts), "parts", "none", "one of each rank")
    first = parts[0]
    for name in ("num_experts", "num_topk", "layers", "num_ranks"):
        got = [getattr(part, name) for part in parts]
        expect(all(one == got[0] for one in got), f"parts: {name}", got, "equal ones")
    ranks = [0 if first.num_ranks == 1 else part.of_rank for part in parts]
    whole = len(ranks) == first.num_ranks and {*ranks} == {*range(first.num_ranks)}
    expect(whole, "parts", f"those of ranks {ranks}", f"one of each of {first.num_ranks} ranks")
    most = max(part.num_micro_batches for part in parts)
    ids, rank, micro_batch = (
        torch.cat([getattr(part, name).cpu() for part in parts]) for name in ("topk_idx", "rank", "micro_batch")
    )
    order = torch.argsort(micro_batch.to(torch.int64) * first.num_ranks + rank, stable=True)
    return replace(
        first, topk_idx=ids[order], rank=rank[order], micro_batch=micro_batch[order], num_micro_batches=most,
        of_rank=None,
    )  # fmt: skip


def load(path: str | os.PathLike[str], num_experts: int | None = None) -> Routes:
    """Read a file of routes.

    Args:
        path: a file of `Routes.save`, or only the ids, as .npy or .npz.
        num_experts: E; needed only to check ids of a file without a header.

    Raises:
        InvalidConfig: the file cannot be read, is no file of routes, or holds an id out of range.
    """
    where = f"routes {path}"
    arrays = _read(path, where)
    if "header" not in arrays:
        ids = arrays.get("topk_idx", next(iter(arrays.values())) if len(arrays) == 1 else None)
        expect(ids is not None, where, f"arrays {sorted(arrays)}", "one array, or one named topk_idx")
        return _plain(ids, num_experts, where, ())
    header = _header(arrays, where)
    ids, rank, micro_batch = (arrays[name] for name in ("topk_idx", "rank", "micro_batch"))
    _check_ids(ids, header["num_experts"], where)
    shape = [len(ids), len(header["layers"]), header["num_topk"]]
    whole = all(a.shape == (len(ids),) and np.issubdtype(a.dtype, np.integer) for a in (rank, micro_batch))
    got = ", ".join(f"{name} {a.dtype} {list(a.shape)}" for name, a in arrays.items() if name != "header")
    expected = f"topk_idx {shape}, and integers [{len(ids)}] as rank and micro_batch"
    expect(list(ids.shape) == shape and whole, where, got, expected)
    if num_experts is not None:
        expect(header["num_experts"] == num_experts, f"{where}: num_experts", header["num_experts"], f"{num_experts}")
    for name, bound in (("rank", header["num_ranks"]), ("micro_batch", header["num_micro_batches"])):
        fits = not len(rank) or (arrays[name].min() >= 0 and arrays[name].max() < bound)
        expect(bool(fits), f"{where}: {name}", "a number out of range", f"0 to {bound - 1}")
    of_rank = header.get("of_rank")
    fits = of_rank is None or (type(of_rank) is int and 0 <= of_rank < header["num_ranks"])
    expect(
        fits and (of_rank is None or bool((rank == of_rank).all())), f"{where}: of_rank", of_rank, "its tokens' rank"
    )
    ranks, numbers = (torch.from_numpy(np.ascontiguousarray(t, np.int32)) for t in (rank, micro_batch))
    return Routes(
        torch.from_numpy(ids.astype(np.int16)), header["num_experts"], tuple(header["layers"]), header["num_ranks"],
        header["num_micro_batches"], ranks, numbers, of_rank,
    )  # fmt: skip


def ids_of(path: str | os.PathLike[str], num_experts: int | None = None) -> Ids:
    """Return the ids of a file as int64 [tokens, layers, K], with -1 in place of any negative id; see `load`."""
    return np.maximum(load(path, num_experts).topk_idx.numpy().astype(np.int64), -1)


def layer_number(name: str) -> int | None:
    """Return the first number in a layer's path, as 3 in "model.layers.3.mlp"; None without one."""
    found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
    return int(found[1]) if found else None


def _decoded(request: Any, shape: tuple[int, int] | None, where: str) -> npt.NDArray[Any]:
    """Return a request's ids, also from base64 text; see `Routes.from_routed_experts`."""
    if not isinstance(request, str | bytes):
        return np.asarray(request)
    try:
        raw = base64.b64decode(request, validate=True)
        if raw.startswith(np.lib.format.MAGIC_PREFIX):
            return np.asarray(np.load(io.BytesIO(raw), allow_pickle=False))
        expect(shape is not None, "shape", None, "(layers, K) for texts without a shape")
        assert shape is not None
        return np.frombuffer(raw, "<i4").reshape(-1, *shape)
    except (ValueError, EOFError) as error:  # binascii's error is a ValueError
        if isinstance(error, InvalidConfig):
            raise
        expected = f"base64 of a .npy, or of int32 [tokens, {', '.join(map(str, shape or ('layers', 'K')))}]"
        raise InvalidConfig(f"{where}: got {error}, expected {expected}") from error


def _padded(ids: npt.NDArray[Any], before: int, length: int | None) -> Ids:
    """Return ids after `before` tokens without a record, and with more of them up to `length` tokens."""
    after = 0 if length is None else length - before - len(ids)
    return np.pad(ids.astype(np.int64), [(before, after), (0, 0), (0, 0)], constant_values=UNRECORDED)


def _read(path: str | os.PathLike[str], where: str) -> Arrays:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            return {"topk_idx": loaded}
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidConfig(f"{where}: got {error}, expected a .npy or .npz file of integers") from error


def _header(arrays: Arrays, where: str) -> dict[str, Any]:
    try:
        header = json.loads(arrays["header"].tobytes())
        kinds: dict[str, type] = {**dict.fromkeys(FIELDS, int), "layers": list}
        fits = all(type(header.get(name)) is kind for name, kind in kinds.items())
        fits = fits and all(isinstance(name, str) for name in header["layers"])
    except (ValueError, AttributeError):
        fits = False
    expect(fits, f"{where}: header", "other fields", f"{', '.join(FIELDS)} and names of layers")
    expect(header["version"] == VERSION, f"{where}: version", header["version"], f"{VERSION}")
    missing = sorted({"topk_idx", "rank", "micro_batch"} - set(arrays))
    expect(not missing, where, f"no array {', '.join(missing)}", "topk_idx, rank and micro_batch")
    return dict(header)


def _plain(ids: Any, num_experts: int | None, where: str, layers: tuple[str, ...]) -> Routes:
    """Return ids without a header, [tokens, layers, K] or [tokens, K], as routes of one rank and one micro-batch."""
    ids = ids[:, None] if ids.ndim == 2 else ids
    _check_ids(ids, num_experts, where)
    expect(ids.size > 0, where, "no ids", "at least one token")
    names = layers or tuple(map(str, range(ids.shape[1])))
    expect(len(names) == ids.shape[1], "layers", f"{len(names)} names", f"one for each of {ids.shape[1]}")
    nowhere = torch.zeros(len(ids), dtype=torch.int32)
    most = max(1, int(ids.max()) + 1) if num_experts is None else num_experts  # no token may have an expert
    return Routes(torch.from_numpy(ids.astype(np.int16)), most, names, 1, 1, nowhere, nowhere.clone())


def _check_ids(ids: npt.NDArray[Any], num_experts: int | None, where: str) -> None:
    whole = np.issubdtype(ids.dtype, np.integer) and ids.ndim == 3
    expect(whole, where, f"{ids.dtype} {list(ids.shape)}", "integers [tokens, layers, K]")
    bound = MOST_EXPERTS if num_experts is None else num_experts
    expect(0 < bound <= MOST_EXPERTS, f"{where}: num_experts", bound, f"1 to {MOST_EXPERTS}")
    if ids.size:
        least, most = int(ids.min()), int(ids.max())
        fits = least >= UNRECORDED and most < bound
        expect(fits, f"{where}: experts", f"ids {least} to {most}", f"-1 to {bound - 1}")
