"""The two ops by which a layer passes its routes to a recording and takes them from a replay, also in compiled graphs.

A graph holds only a layer's id, a constant; which recording or replay runs is found when the op runs. Each op has an
output that the layer needs, so no compiler drops it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_rt.errors import InvalidConfig
from moe_rt.routes.session import given, noted

_lib = torch.library.Library("moe_rt", "FRAGMENT")
_lib.define("note_routes(Tensor topk_idx, Tensor noted, int routes_id) -> Tensor")
_lib.define("recorded_routes(Tensor x, int num_topk, int routes_id) -> Tensor")


def _require_no_capture(x: Tensor) -> None:
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        got = "a CUDA graph that is being captured, which would repeat the routes of one micro-batch"
        raise InvalidConfig(f"routes: got {got}, expected eager or compiled code")


def _note(topk_idx: Tensor, chosen: Tensor, routes_id: int) -> Tensor:
    _require_no_capture(topk_idx)
    noted(routes_id, chosen)
    return topk_idx.clone()


def _recorded(x: Tensor, num_topk: int, routes_id: int) -> Tensor:
    _require_no_capture(x)
    return given(routes_id, x.shape[:-1].numel(), x.device)


def _recorded_fake(x: Tensor, num_topk: int, routes_id: int) -> Tensor:
    return x.new_empty(x.shape[:-1].numel(), num_topk, dtype=torch.int64)


for _key in ("CPU", "CUDA"):
    _lib.impl("note_routes", _note, _key)
    _lib.impl("recorded_routes", _recorded, _key)
torch.library.register_fake("moe_rt::note_routes", lambda topk_idx, chosen, routes_id: topk_idx.clone(), lib=_lib)
torch.library.register_fake("moe_rt::recorded_routes", _recorded_fake, lib=_lib)


def note_routes(topk_idx: Tensor, chosen: Tensor, routes_id: int) -> Tensor:
    """Record `chosen`, integers [T, K], for a layer, and return a copy of topk_idx, which the layer must use."""
    noted_idx: Tensor = torch.ops.moe_rt.note_routes(topk_idx, chosen, routes_id)
    return noted_idx


def recorded_routes(x: Tensor, num_topk: int, routes_id: int) -> Tensor:
    """Return int64 [T, K], the recorded experts of x [..., H]."""
    topk_idx: Tensor = torch.ops.moe_rt.recorded_routes(x.detach(), num_topk, routes_id)
    return topk_idx
