"""A captured pair is replayed with changed tokens and routing: kernels keep sequence numbers and windows themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
import torch
from conformance.cases_token_window import check_round, written
from ptx.gpu import PtxGpu
from ptx.own_process import isolated
from support.ranks import ThreadRanks
from support.routing import buffer_kwargs, make_inputs, make_spec

from moe_rt import Buffer
from moe_rt.errors import GroupPoisoned, InvalidConfig, InvalidInput
from moe_rt.lab.testing.rounds import check_bits
from moe_rt.ops import reference

REPLAYS = 6


def replayed(size: int) -> None:
    gpu = PtxGpu()
    ThreadRanks(size, gpu).run(capture_and_replay, gpu)


def capture_and_replay(
    group: Any, gpu: PtxGpu, changes: Mapping[str, Any] = MappingProxyType({}), num_sms: int | None = None
) -> None:
    spec = replace(make_spec(group.size, **changes), topology=group.topology)
    tokens = [12 - 5 * r for r in range(group.size)]  # shapes are part of a graph
    rounds = [make_inputs(spec, tokens, seed, kind) for seed, kind in enumerate(["random", "topk", "one_expert"] * 2)]
    with Buffer(group, timeout_s=60.0, num_sms=num_sms, **buffer_kwargs(spec)) as buffer:
        rank = buffer.rank
        given = [each[rank].clone() for each in (rounds[0].xs, rounds[0].topk_idx, rounds[0].topk_weights)]
        with gpu.graph() as replay:
            recv_x, recv_weights, handle = buffer.dispatch(*given)
            out = buffer.combine(recv_x, recv_weights, handle)
        for inputs in rounds[:REPLAYS]:
            mine = (inputs.xs[rank], inputs.topk_idx[rank], inputs.topk_weights[rank])
            for to, new in zip(given, mine, strict=True):
                to.copy_(new)
            replay()
            buffer.check()
            received = reference.dispatch(inputs.xs, inputs.topk_idx, inputs.topk_weights, spec)
            n = len(received[rank].recv_x)
            check_bits("recv_x", recv_x[:n], received[rank].recv_x)
            check_bits("offs", handle.offs, received[rank].offs)
            factors, rows = [r.recv_weights for r in received], [r.recv_x for r in received]
            outs = reference.combine(rows, factors, received, inputs.num_tokens, spec, spec.combine_dtype)
            check_bits("out", out, outs[rank])
        assert torch.isfinite(out).all()


@pytest.mark.parametrize("size", [1, 2])
def test_replays(size: int) -> None:
    isolated(replayed, size)


def windows_and_graphs() -> None:
    gpu = PtxGpu()
    ThreadRanks(2, gpu).run(capture_beside_windows, gpu)


def capture_beside_windows(group: Any, gpu: PtxGpu) -> None:
    """A graph neither takes a token window nor follows one: windows belong to ops in the order of the host's queue."""
    spec = make_spec(2, hidden=20)
    with Buffer(group, timeout_s=60.0, **buffer_kwargs(spec)) as buffer, torch.no_grad():
        inputs = make_inputs(spec, [12, 7], 1)
        for _ in range(3):
            stale = written(buffer, inputs.xs[buffer.rank])
            check_round(buffer, inputs, stale)
        given = [each[buffer.rank] for each in (inputs.xs, inputs.topk_idx, inputs.topk_weights)]
        with gpu.graph():
            with pytest.raises(InvalidConfig, match="a stream that is being captured"):
                buffer.token_window(1)
            buffer.dispatch(*given)
        with pytest.raises(InvalidConfig, match="or a buffer whose ops were"):
            buffer.token_window(1)
        with pytest.raises((InvalidInput, GroupPoisoned)):
            buffer.dispatch(stale, *given[1:])


def test_windows() -> None:
    isolated(windows_and_graphs)
