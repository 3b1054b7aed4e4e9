"""Answers for one model on one cluster: time of a layer's parts, memory, overflow risk, and the best configurations."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from moe_rt.errors import InvalidConfig, expect
from moe_rt.plan.calibration import Estimate, Library, published
from moe_rt.plan.distinct import Array, distinct, distinct_limited
from moe_rt.plan.memory import deepep_low_latency_bytes
from moe_rt.plan.models import Model
from moe_rt.plan.points import Shape
from moe_rt.plan.routing import Overflow, overflow, popularity, rank_loads
from moe_rt.plan.systems import CPU, System, gpu_of, refuse_mixed, row_bytes, system_of

EFFICIENCY = 0.5  # share of a GPU's peak that grouped products reach, unless stated
CONTENTION = 1.5  # communication under products takes 1.3 to 1.9 times as long in DeepSeek's published trace
KEPT = 0.9  # share of a GPU's memory that weights and buffers may take
LIBRARIES = {"nvlink": "DeepEP-V1", "xgmi": "MORI-EP", "shared memory": "moe_rt"}


@dataclass(frozen=True)
class Cluster:
    """GPUs by name, and how many of them fast links join.

    Attributes:
        efficiency: share of the peak rate that grouped products reach.
    """

    gpus: int
    hardware: str = "H100 SXM + 400G IB"
    domain: int = 8
    library: str = ""
    efficiency: float = EFFICIENCY

    def __post_init__(self) -> None:
        expect(self.gpus > 0, "gpus", self.gpus, "a positive number")
        expect(self.domain > 0, "domain", self.domain, "a positive number")
        expect(0 < self.efficiency <= 1, "efficiency", self.efficiency, "a number above 0, at most 1")
        gpu_of(self.hardware)
        refuse_mixed(self.hardware)

    @property
    def modes(self) -> tuple[str, ...]:
        """Modes that the library has on this hardware."""
        return ("copies",) if self.hardware.startswith(CPU) else ("low_latency", "normal")

    @property
    def payloads(self) -> tuple[str, ...]:
        """Types of dispatched rows whose times are calibrated."""
        return ("bf16",) if self.hardware.startswith(CPU) else ("fp8", "bf16")

    def system(self, mode: str) -> System:
        """Return the library on this hardware in one of its modes."""
        library = self.library or LIBRARIES[gpu_of(self.hardware).link]
        return system_of(library, self.hardware, mode, self.domain)


@dataclass(frozen=True)
class Configuration:
    """One way to run a layer.

    Attributes:
        ep_size: ranks that share a layer's experts.
        mode: low_latency or normal.
        payload: type of dispatched rows; combine returns bf16.
        tokens: tokens of each rank in one step.
        chunks: parts of a batch whose communication overlaps with the products of others.
    """

    ep_size: int
    mode: str
    payload: str
    tokens: int
    chunks: int = 1


@dataclass(frozen=True)
class Layer:
    """Predicted times of one layer's forward in us, and what it costs.

    Attributes:
        dispatch, experts_us, combine: times of one chunk.
        step_us: all chunks' dispatch, experts and combine after overlap.
        limits: the part that takes longest, in words.
        weights_bytes, buffer_bytes: memory of one GPU, for all layers' experts and for the exchange.
        overflow: risk of the capacity factor per dispatch; None without one.
    """

    configuration: Configuration
    dispatch: Estimate
    experts_us: float
    combine: Estimate
    step_us: float
    p5_us: float
    p95_us: float
    limits: str
    weights_bytes: int
    buffer_bytes: int
    memory_bytes: int
    fits: bool
    busiest: float
    overflow: Overflow | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of one GPU through this layer."""
        return self.configuration.tokens / self.step_us * 1e6


@dataclass(frozen=True)
class Plan:
    """All feasible configurations, best first, and why others are not listed."""

    model: Model
    cluster: Cluster
    layers: list[Layer]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> list[Layer]:
        """The three best configurations, of different EP sizes or modes."""
        return self.layers[:3]

    def document(self) -> dict[str, Any]:
        """Return the plan as plain values for JSON."""
        return {
            "model": asdict(self.model),
            "cluster": asdict(self.cluster),
            "layers": [asdict(layer) | {"why": self.why(layer)} for layer in self.layers],
            "refused": self.refused,
        }

    def why(self, layer: Layer) -> str:
        """Say in one sentence what a configuration gains and what limits it."""
        one, cluster = layer.configuration, self.cluster
        nodes = math.ceil(one.ep_size / cluster.domain)
        place = "all rows stay on fast links" if nodes == 1 else f"rows cross the network between {nodes} domains"
        held = -(-self.model.experts // one.ep_size)
        return f"{place}; {held} experts a GPU; limited by {layer.limits}"


def busiest_of(model: Model, tokens: int, ep_size: int, shares: Array) -> float:
    """Return the mean of the busiest rank's rows relative to an even share, by extreme values of its law."""
    loads = rank_loads(tokens, model.topk, ep_size, shares)
    even = float(loads.mean.mean())
    typical = float(loads.quantile(0.5 ** (1 / max(ep_size, 1))).max())
    return max(1.0, typical / even)


def shape_of(model: Model, system: System, op: str, one: Configuration, busiest: float = 1.0) -> Shape:
    """Return the shape of one op of a configuration."""
    ranks, nodes = one.ep_size, math.ceil(one.ep_size / system.domain)
    sizes = (model.experts, model.topk)
    to_ranks, to_nodes = distinct(ranks, *sizes), distinct(nodes, *sizes)
    if model.groups > 1 and ranks > 1:
        to_ranks = distinct_limited(ranks, *sizes, model.groups, model.topk_groups, best=2)
        to_nodes = distinct_limited(nodes, *sizes, model.groups, model.topk_groups, best=2)
    return Shape(
        tokens=one.tokens,
        hidden=model.hidden,
        topk=model.topk,
        experts=model.experts,
        ranks=ranks,
        nodes=nodes,
        domain=ranks / nodes,
        row_bytes=row_bytes(system, op, one.payload if op == "dispatch" else "bf16", model.hidden),
        sms=system.usual_sms,
        sms_of_gpu=system.sms,
        to_ranks=to_ranks,
        to_nodes=to_nodes,
        busiest=busiest,
    )


def experts_us(model: Model, cluster: Cluster, one: Configuration, busiest: float) -> float:
    """Return the time of a layer's grouped products: operations at the stated efficiency, or the reading of weights."""
    gpu = gpu_of(cluster.hardware)
    rows, held = one.tokens * model.topk * busiest, -(-model.experts // one.ep_size)
    shared = one.tokens * 6 * model.hidden * model.shared
    products = (rows * 6 * model.hidden * model.intermediate + shared) / (gpu.tflops * cluster.efficiency) / 1e6
    read = min(held, rows) * model.expert_bytes + 6 * model.hidden * model.shared
    return max(products, read / gpu.memory_gbs / 1e3)


def layer_of(
    model: Model,
    cluster: Cluster,
    one: Configuration,
    shares: Array,
    *,
    library: Library | None = None,
    capacity_factor: float | None = None,
) -> Layer:
    """Predict one layer in one configuration.

    Raises:
        InvalidConfig: the sizes make no sense, or nothing with such links is calibrated.
    """
    expect(one.tokens > 0, "tokens", one.tokens, "a positive number")
    check_ep_size(model, cluster, one.ep_size)
    known, system = library or published(), cluster.system(one.mode)
    busiest = busiest_of(model, one.tokens, one.ep_size, shares)
    part = Configuration(one.ep_size, one.mode, one.payload, max(1, -(-one.tokens // one.chunks)))
    dispatch, combine = (
        known.predict(system, op, shape_of(model, system, op, part, busiest)) for op in ("dispatch", "combine")
    )
    products = experts_us(model, cluster, part, busiest)
    spread = math.hypot(math.log(dispatch.p95_us / dispatch.us), math.log(combine.p95_us / combine.us)) / math.sqrt(2)
    step = overlapped(dispatch.us, products, combine.us, one.chunks)
    weights = -(-model.experts // one.ep_size) * model.expert_bytes * model.layers
    buffers = exchange_bytes(model, cluster, one, busiest if capacity_factor is None else capacity_factor)
    parts = {"dispatch": dispatch.us, "the experts' products": products, "combine": combine.us}
    return Layer(
        configuration=one,
        dispatch=dispatch,
        experts_us=products,
        combine=combine,
        step_us=step,
        p5_us=step / math.exp(spread),
        p95_us=step * math.exp(spread),
        limits=max(parts, key=lambda name: parts[name]),
        weights_bytes=weights,
        buffer_bytes=buffers,
        memory_bytes=weights + buffers,
        fits=weights + buffers <= KEPT * gpu_of(cluster.hardware).memory_gb * 1e9,
        busiest=busiest,
        overflow=(capacity_factor and overflow(capacity_factor, one.tokens, model.topk, one.ep_size, shares)) or None,
    )


def overlapped(dispatch: float, products: float, combine: float, chunks: int) -> float:
    """Return the time of `chunks` equal parts whose times are given, if links and products work at the same time.

    Links carry the dispatches and combines of all parts one after the other; the products of a part start after its
    dispatch. In between the slower of both decides, and products slow communication down.
    """
    inner = max(CONTENTION * (dispatch + combine), products)
    return dispatch + products + combine + (chunks - 1) * inner


def exchange_bytes(model: Model, cluster: Cluster, one: Configuration, busiest: float) -> int:
    """Return the bytes of the exchange: DeepEP's low-latency slots, or in normal mode received rows and copies."""
    if one.mode == "low_latency" and model.experts % one.ep_size == 0:
        return deepep_low_latency_bytes(one.tokens, model.hidden, one.ep_size, model.experts)
    return int(2 * 2 * model.hidden * one.tokens * model.topk * busiest)


def check_ep_size(model: Model, cluster: Cluster, ep_size: int) -> None:
    """Raise InvalidConfig, naming the field, unless experts and GPUs can be divided into such groups."""
    expected = f"a divisor of experts = {model.experts}, at most that many"
    expect(0 < ep_size <= model.experts and model.experts % ep_size == 0, "ep_size", ep_size, expected)
    expect(cluster.gpus % ep_size == 0, "gpus", cluster.gpus, f"a multiple of ep_size = {ep_size}")


def configurations(model: Model, cluster: Cluster, tokens: int) -> Iterator[Configuration]:
    """Yield the configurations that are worth a prediction."""
    sizes = [n for n in range(2, cluster.gpus + 1) if cluster.gpus % n == 0 and model.experts % n == 0]
    for ep_size in sizes:
        for mode in cluster.modes:
            for payload in cluster.payloads:
                for chunks in (1, 2) if mode == "normal" and tokens >= 512 else (1,):
                    yield Configuration(ep_size, mode, payload, tokens, chunks)


def make_plan(
    model: Model,
    cluster: Cluster,
    tokens: int,
    *,
    sigma: float = 0.0,
    shares: Array | None = None,
    capacity_factor: float | None = None,
    library: Library | None = None,
) -> Plan:
    """Predict a layer in every configuration worth it, best first.

    Args:
        tokens: tokens of each GPU in one step.
        sigma: unevenness of the experts' log-normal popularity, unless `shares` gives theirs.

    Raises:
        InvalidConfig: the sizes make no sense together, or no configuration can be predicted; says why.
    """
    expect(isinstance(tokens, int) and tokens > 0, "tokens", tokens, "a positive number")
    expect(capacity_factor is None or capacity_factor > 0, "capacity_factor", capacity_factor, "a positive number")
    common = math.gcd(model.experts, cluster.gpus)
    fits = (
        cluster.gpus == 1 or common == cluster.gpus or (cluster.gpus % common == 0 and common >= min(cluster.domain, 8))
    )
    expected = f"a number that divides experts = {model.experts}, or a multiple of a whole domain of {cluster.domain}"
    expect(fits, "gpus", f"{cluster.gpus} for {model.experts} experts", expected)
    expect(cluster.gpus > 1, "gpus", cluster.gpus, "at least 2: one GPU exchanges nothing")
    if shares is None:
        shares = popularity(model.experts, sigma)
    expect(len(shares) == model.experts, "trace", f"{len(shares)} experts", f"those of {model.name}, {model.experts}")
    layers, refused = [], {}
    for one in configurations(model, cluster, tokens):
        try:
            layer = layer_of(model, cluster, one, shares, library=library, capacity_factor=capacity_factor)
        except InvalidConfig as error:
            refused[f"EP {one.ep_size}, {one.mode}, {one.payload}"] = error.args[0]
            continue
        name = f"EP {one.ep_size}, {one.mode}, {one.payload}, {one.chunks} chunks"
        if layer.fits:
            layers.append(layer)
        else:
            refused[name] = f"memory: got {layer.memory_bytes / 1e9:.1f} GB, expected at most {KEPT:.0%} of the GPU's"
    if not layers:
        raise InvalidConfig(
            f"plan: got no configuration that can run, expected one; {next(iter(refused.values()), '')}"
        )
    layers.sort(key=lambda layer: layer.step_us)
    return Plan(model, cluster, _different(layers), refused)


def _different(layers: list[Layer]) -> list[Layer]:
    """Put the best of each EP size and mode first, so that the best three are alternatives."""
    seen: set[tuple[int, str]] = set()
    first: list[Layer] = []
    later: list[Layer] = []
    for layer in layers:
        key = (layer.configuration.ep_size, layer.configuration.mode)
        (later if key in seen else first).append(layer)
        seen.add(key)
    return first + later
