"""A thread that rewrites lists in all segments that a rank maps, also its own, while ranks use them."""

from __future__ import annotations

import ctypes
import functools
import threading
from pathlib import Path

from support.cpp_programs import compile_program

from moe_rt import Buffer

LISTS = ("counts", "pull_offs", "copy_offs", "pulls", "copies")


@functools.cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(compile_program(Path(__file__).with_name("rewriter.cpp"), "-O1", "-shared", "-fPIC")))
    loaded.make_shape.restype = ctypes.c_void_p
    loaded.segment_bytes.restype = loaded.rewrite.restype = ctypes.c_int64
    return loaded


def shape_of(buffer: Buffer) -> ctypes.c_void_p:
    """Return the buffer's Shape, for calls of the library."""
    spec, engine = buffer.spec, buffer._engine
    pushed, rows = 0, 0
    if engine.pushes and not spec.node_of:
        tuning, row_bytes = spec.tuning, spec.shape().row_bytes()
        pushed = min(spec.num_max_tokens_per_rank, tuning.pushed_tokens)
        most = tuning.pushed_bytes // (spec.num_ranks * row_bytes)
        rows = min(spec.num_max_tokens_per_rank, tuning.pushed_rows, most)
    fields = (
        *(spec.num_ranks, spec.num_experts, spec.num_max_tokens_per_rank, spec.hidden, spec.num_topk),
        *(spec.dtype.itemsize, spec.by_token, spec.expert_alignment, pushed, rows, spec.sums == "invariant"),
    )
    nodes = (ctypes.c_int32 * spec.num_ranks)(*spec.node_of) if spec.node_of else None
    shape = ctypes.c_void_p(library().make_shape((ctypes.c_int32 * len(fields))(*fields), nodes))
    assert library().segment_bytes(shape) == buffer.num_bytes
    return shape


def lists_of(buffer: Buffer, window: int) -> dict[str, int]:
    """Return the offset of each list of a window in a segment."""
    found = (ctypes.c_int64 * len(LISTS))()
    library().lists_at(shape_of(buffer), window, found)
    return dict(zip(LISTS, found, strict=True))


class Rewriter:
    """Rewrites words while the context is active; `num_words` counts them.

    Args:
        control: also rewrite mailboxes, poison words and everything else before the lists.
    """

    def __init__(self, buffer: Buffer, seed: int, control: bool) -> None:
        segments = [address for address in buffer._engine._segments.addresses if address]
        self.num_words = 0
        self._stop = ctypes.c_int32(0)
        table = (ctypes.c_void_p * len(segments))(*segments)
        given = (shape_of(buffer), table, len(segments), ctypes.c_uint64(seed), int(control), ctypes.byref(self._stop))
        self._thread = threading.Thread(target=self._rewrite, args=given)

    def _rewrite(self, *given: object) -> None:
        self.num_words = library().rewrite(*given)

    def __enter__(self) -> Rewriter:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.value = 1
        self._thread.join()
