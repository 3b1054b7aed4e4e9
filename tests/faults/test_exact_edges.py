"""The least and the largest value of a number are taken, and the next one is refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moe_rt.compat.deep_ep.config import Config
from moe_rt.compat.deep_ep.sizes import elastic_bytes
from moe_rt.config.options import BufferOptions
from moe_rt.config.spec import BufferSpec
from moe_rt.config.topology import Topology
from moe_rt.config.tuning import Tuning
from moe_rt.errors import InvalidConfig
from moe_rt.nn.router import RouterConfig
from moe_rt.plan.answers import Cluster, check_ep_size, make_plan
from moe_rt.plan.distinct import check_shape, distinct_limited
from moe_rt.plan.memory import buffer_memory, deepep_low_latency_bytes, hybridep_bytes
from moe_rt.plan.models import MODELS
from moe_rt.plan.routing import capacity_rows, draw, factor_for, inclusion, popularity, rank_loads, unevenness
from moe_rt.plan.simulate import Ports, exchange, slowest_of
from moe_rt.plan.volumes import expected, link_bytes
from moe_rt.train.config import TrainConfig

Make = Callable[[Any], Any]
SHARES, TOPOLOGY = np.full(4, 0.25), Topology.one_node(2)
QWEN = MODELS["qwen3-30b-a3b"]
INFINITE = (math.inf, math.nan)


def of(kind: Any, **others: Any) -> Callable[[str], Make]:
    """Return how to make `kind` with a value of one field, for each name of a field."""
    return lambda name: lambda value: kind(**{**others, name: value})


def tuning(name: str) -> Make:
    return lambda value: Tuning(**{name: value}).check()


def spec(name: str) -> Make:
    sizes: dict[str, Any] = dict(num_max_tokens_per_rank=3, hidden=8, num_topk=2, num_experts=4, dtype=torch.float32)
    return lambda value: BufferSpec.make(TOPOLOGY, BufferOptions(), **{**sizes, name: value})


train, ports, model = of(TrainConfig), of(Ports, link_gbs=1.0), lambda name: lambda v: replace(QWEN, **{name: v})
router, deepep = of(RouterConfig, num_experts=8, num_topk=2), of(Config)
# Map a field to how its owner is made, to values that are taken, and to values that are refused.
EDGES: dict[str, tuple[Make, tuple[Any, ...], tuple[Any, ...]]] = {
    **{name: (train(name), (1,), (0,)) for name in ("num_layers", "intermediate", "seq_len", "steps", "batch_size")},
    **{name: (train(name), (1,), (0,)) for name in ("val_every", "val_sequences", "checkpoint_every")},
    **{name: (train(name), (0,), (-1,)) for name in ("seed", "warmup_steps", "sample_bytes", "temperature")},
    **{name: (train(name), (0.0,), (-1e-9,)) for name in ("aux_loss_coef", "z_loss_coef", "weight_decay")},
    **{name: (train(name), (1e-9,), (0.0,)) for name in ("lr", "grad_clip", "timeout_s")},
    "min_lr_ratio": (train("min_lr_ratio"), (0, 1), (-1e-9, 1 + 1e-9)),
    "num_topk": (of(TrainConfig, num_experts=4)("num_topk"), (4,), (5,)),
    "jitter": (router("jitter"), (0.0, 1 - 1e-9), (-1e-9, 1.0)),
    "balance_bias_rate": (router("balance_bias_rate"), (0.0,), (-1e-9,)),
    "num_groups": (router("num_groups"), (1,), (0,)),
    "topk_groups": (of(RouterConfig, num_experts=8, num_topk=2, num_groups=4)("topk_groups"), (1, 4), (0, 5)),
    "num_sms": (deepep("num_sms"), (0,), (-1,)),
    "num_max_nvl_chunked_send_tokens": (deepep("num_max_nvl_chunked_send_tokens"), (1, 255), (0, 256)),
    "num_max_rdma_chunked_send_tokens": (deepep("num_max_rdma_chunked_send_tokens"), (1, 255), (0, 256)),
    "num_max_tokens_per_rank": (lambda v: elastic_bytes(2, v, 8, 2, False, False), (1,), (0,)),
    "hidden": (lambda v: elastic_bytes(2, 1, v, 2, False, False), (1,), (0,)),
    "num_experts": (spec("num_experts"), (2,), (1,)),
    "tuning.near_ns": (tuning("near_ns"), (0,), (-1e-9,)),
    "tuning.sending_part": (tuning("sending_part"), (1, 2**31 - 1), (0, 2**31, True)),
    "tuning.ring_blocks": (tuning("ring_blocks"), (0, 2**31 - 1), (-1, 2**31, 1.0)),
    "tuning.threads": (tuning("threads"), (32, 1024), (0, 31, 1056)),
    "tuning.stream_shares": (
        tuning("stream_shares"),
        ((0,) * 4,),
        ((0,) * 3, (0,) * 5, (-1, 0, 0, 0), (math.inf,) * 4),
    ),
    "capacity_factor": (
        lambda v: BufferOptions(capacity_factor=v).check_shared(torch.float32),
        (1e-9,),
        (0, *INFINITE),
    ),
    "num_threads": (lambda v: BufferOptions(num_threads=v).check_own(), (1,), (0,)),
    "init_timeout_s": (lambda v: BufferOptions(init_timeout_s=v).check_own(), (1e-9,), ()),
    "link_gbs": (ports("link_gbs"), (1e-9,), (0,)),
    "slower": (ports("slower"), (1e-9,), (0,)),
    **{name: (ports(name), (0,), (-1e-9,)) for name in ("net_gbs", "start_us", "signal_us", "noise")},
    "straggler": (ports("straggler"), (0, 1), (-1e-9, 1 + 1e-9)),
    **{name: (model(name), (1,), (0, 1.5)) for name in ("layers", "topk_groups")},
    "efficiency": (lambda v: Cluster(8, efficiency=v), (1e-9, 1), (0, 1 + 1e-9)),
    "domain": (lambda v: Cluster(8, domain=v), (1,), (0,)),
    "gpus": (lambda v: make_plan(QWEN, Cluster(v), 8), (2,), (1, 0, 3)),
    "ep_size": (lambda v: check_ep_size(QWEN, Cluster(256), v), (1, 128), (0, 256)),
    "rank": (
        lambda v: buffer_memory(
            TOPOLOGY, rank=v, num_max_tokens_per_rank=1, hidden=1, num_topk=1, num_experts=2, dtype=torch.float32
        ),
        (0, 1),
        (-1, 2),
    ),
    "ranks_of_domain": (lambda v: hybridep_bytes(1, 1, v, 1, 1), (1,), (0,)),
    "domains": (lambda v: hybridep_bytes(1, 1, 1, v, 1), (1,), (0,)),
    "local_experts": (lambda v: hybridep_bytes(1, 1, 1, 1, v), (1,), (0,)),
    "experts": (popularity, (1,), (0,)),
    "sigma": (lambda v: popularity(2, v), (0.0,), (-1e-9, *INFINITE)),
    "topk": (lambda v: draw(np.random.default_rng(0), 2, v, SHARES), (1, 4), (0, 5)),
    "loads": (unevenness, ([0, 1],), ([], [0, 0], [2, -1])),
    "probability": (lambda v: factor_for(v, 1, 1, 2, SHARES), (1e-3,), (0, 1)),
    "groups": (lambda v: slowest_of(1.0, 1.0, v), (1,), (0,)),
    "mean_us": (lambda v: slowest_of(v, v, 2), (0.0,), (-1e-9,)),
    "tokens": (lambda v: expected(v, 1, 2, TOPOLOGY), (0,), (-1,)),
    "row_bytes": (lambda v: link_bytes(expected(1, 1, 2, TOPOLOGY), v), (1e-9,), (0,)),
    "traffic": (lambda v: exchange(np.array(v), Ports(1.0)), ([[0.0, 0], [0, 0]],), ([[0.0, 0]], [[0, -1e-9], [0, 0]])),
}
# Add other owners of these fields.
MORE: list[tuple[str, Make, tuple[Any, ...], tuple[Any, ...]]] = [
    ("capacity_factor", lambda v: capacity_rows(v, 1, 1, 2, 2), (1e-9,), (0, *INFINITE)),
    ("topk", lambda v: inclusion(SHARES, v), (1, 4), (0, 5)),
    ("topk", lambda v: check_shape(1, 4, v), (1, 4), (0, 5)),
    ("topk", lambda v: distinct_limited(2, 8, v, 4, 2), (1, 4), (5,)),
    ("groups", lambda v: distinct_limited(2, 8, 1, v, 1), (1, 8), (0, 3)),
    ("topk_groups", lambda v: distinct_limited(2, 8, 1, 4, v), (1, 4), (0, 5)),
    ("ranks", lambda v: check_shape(v, 4, 1), (1, 4), (0,)),
    ("experts", lambda v: check_shape(4, v, 1), (4,), (3,)),
    ("experts", lambda v: rank_loads(1, 1, v, SHARES), (4,), (5,)),
    ("tokens", lambda v: rank_loads(v, 1, 2, SHARES), (1,), (0,)),
    ("ranks", lambda v: rank_loads(1, 1, v, SHARES), (1,), (0,)),
    ("tokens", lambda v: make_plan(QWEN, Cluster(2), v), (1,), (0, 1.0)),
    ("tokens", lambda v: deepep_low_latency_bytes(v, 128, 2, 2), (1,), (0,)),
    ("experts", lambda v: deepep_low_latency_bytes(1, 128, 2, v), (2,), (0, 3)),
    ("topk", lambda v: replace(QWEN, topk=v), (1, 128), (0, 129)),
    ("groups", lambda v: replace(QWEN, groups=v), (1, 128), (0, 3)),
    ("num_topk", spec("num_topk"), (1, 4), (0, 5)),
    ("num_max_tokens_per_rank", spec("num_max_tokens_per_rank"), (1,), (0, 2**31, 1.0)),
    ("tuning.network_threads", tuning("network_threads"), (32, 1024), (0, 1056)),
    ("timeout_s", lambda v: BufferOptions(timeout_s=v).check_own(), (1e-9,), (0, math.nan)),
    ("timeout_s", lambda v: BufferOptions(init_timeout_s=v).check_own(), (), (0, math.nan)),
]
CASES = [(name, *edge) for name, edge in EDGES.items()] + MORE


@pytest.mark.parametrize(("name", "make", "takes", "refuses"), CASES, ids=lambda v: v if isinstance(v, str) else "")
def test_the_last_value_is_taken_and_the_next_refused(
    name: str, make: Make, takes: tuple[Any, ...], refuses: tuple[Any, ...]
) -> None:
    for value in takes:
        make(value)
    for value in refuses:
        with pytest.raises(InvalidConfig, match=rf"(^|: ){name}: got "):
            make(value)
