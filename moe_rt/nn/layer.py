"""The MoE layer: router, dispatch, this rank's experts, combine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.shared_buffers import LayerBuffers
from moe_rt.config.expect import expect
from moe_rt.config.options import BufferOptions
from moe_rt.config.placement import Placement
from moe_rt.config.spec import BufferSpec
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.heap.groups import Group, rendezvous_of
from moe_rt.heap.rendezvous import Rendezvous
from moe_rt.heap.segments import all_or_none
from moe_rt.nn.experts import Experts, ExpertsConfig
from moe_rt.nn.metrics import LayerMetrics
from moe_rt.nn.router import Router, RouterConfig
from moe_rt.nn.router_losses import RouterAux
from moe_rt.nn.shared_expert import SharedExpert
from moe_rt.nn.siblings import ExpertsLike, RouterLike, check_siblings


@dataclass(frozen=True, kw_only=True)
class MoEConfig(RouterConfig, ExpertsConfig, BufferOptions):
    """Sizes and choices of a layer; the same on every rank. docs/howto/layer.md has the values of some models.

    Attributes:
        hidden, intermediate, num_experts, num_topk: H, F, E, K.
        num_max_tokens_per_rank: the most tokens of one forward on any rank; sizes the symmetric buffer.
        dtype: what rows travel and experts compute in. None, which is what most want, follows the model: autocast's
            dtype where autocast is on, else the experts' own. A fixed one stays, whatever their dtype, and they are
            cast; it warns once where it is not the one that would be followed.
        score_func, topk_before_softmax, norm_topk, route_scale, router_bias, num_groups, topk_groups, balance_bias,
            balance_bias_rate, expert_choice, jitter, aux_loss_coef, z_loss_coef, balance_scope: see
            `moe_rt.nn.router.RouterConfig`.
        activation, layout, biases, interleaved, swiglu_alpha, swiglu_limit: see `moe_rt.nn.experts.ExpertsConfig`.
        shared_intermediate: width of an expert that every token visits besides, on its own rank and without biases, or
            None for none; see `moe_rt.nn.shared_expert.SharedExpert`.
        shared_gate: the shared expert's output is scaled by a sigmoid gate of its own (Qwen2-MoE).
        heap, capacity_factor, overflow, dispatch_dtype, combine_dtype, route, placement, timeout_s, init_timeout_s,
            num_threads, num_sms: see `moe_rt.Buffer`.

    Raises:
        InvalidConfig: naming the field, what was got and what was expected.
    """

    hidden: int
    intermediate: int
    num_max_tokens_per_rank: int
    dtype: torch.dtype | None = None
    shared_intermediate: int | None = None
    shared_gate: bool = False

    def __post_init__(self) -> None:
        for name in ("intermediate", "shared_intermediate"):
            got = getattr(self, name)
            if got is not None and got < 1:
                raise InvalidConfig(f"{name}: got {got}, expected a positive integer")
        if self.shared_gate and self.shared_intermediate is None:
            raise InvalidConfig("shared_gate: got True, expected False without shared_intermediate")
        RouterConfig.__post_init__(self)
        ExpertsConfig.__post_init__(self)

    def buffer_sizes(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """The keyword arguments of the `moe_rt.Buffer` that a layer of this config needs.

        Args:
            dtype: of the rows, where the config leaves it open; default: torch's default dtype.
        """
        return {
            "num_max_tokens_per_rank": self.num_max_tokens_per_rank,
            "hidden": self.hidden,
            "num_topk": self.num_topk,
            "num_experts": self.num_experts,
            "dtype": self.dtype or dtype or torch.get_default_dtype(),
            **self.arguments(),
        }


class MoELayer(nn.Module):
    """A mixture of experts spread over the ranks of `group`.

    Making a layer and calling it are collective over the group. Layers of one group and one size share a buffer; the
    first forward in another dtype makes another one.

    Parameters: `router.weight` [E, H], the same on every rank; `experts.gate_up_proj` [L, 2F, H] and
    `experts.down_proj` [L, H, F], or what the config's layout has instead, this rank's slice of the global tensors in
    the order of `expert_ids`; with shared_intermediate `shared_expert.*`, the same on every rank. Ranks seeded alike
    start with the same global weights whatever their number. Over a DeviceMesh `experts.*` are DTensors [E, ...] in
    equal blocks, so that checkpoints (docs/howto/resume.md) and FSDP (docs/howto/fsdp.md) see the global tensors.

    Gradients: `experts.*` hold the sum over all ranks of the group; all others hold this rank's part.
    `moe_rt.parallel.prepare` makes them the mean that data parallelism makes of all others, and tells its wrappers.

    A layer of a single rank or of the default process group pickles, without its buffer: the first use in the process
    that loads it makes one, collectively. Others refuse; `state_dict` always works.

    Args:
        config: see MoEConfig.
        group: see moe_rt.Buffer.
        buffer: use this one instead; its sizes must be the config's.
        router: a module that chooses in place of `moe_rt.nn.router.Router`; see `moe_rt.nn.siblings.RouterLike`.
        experts: a module that runs `expert_ids` in place of `moe_rt.nn.experts.Experts`; see `ExpertsLike` there.
        shared_expert: a module [T, H] -> [T, H] that every token visits besides, instead of shared_intermediate.
            Modules that are given keep their weights and live on the group's device already.

    Raises:
        InvalidConfig: on every rank, if over a mesh the experts are not in equal contiguous blocks, or if a module that
            was given does not fit on some rank; on this rank alone, if `buffer` was given too.
        MoeRtError: as moe_rt.Buffer.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: Group = None,
        *,
        buffer: Buffer | None = None,
        router: RouterLike | None = None,
        experts: ExpertsLike | None = None,
        shared_expert: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        fixed = config.dtype is not None or buffer is not None
        given = None if buffer is None else _fitting(buffer, config, config.dtype)
        self._shared_buffers = LayerBuffers(
            group, config.buffer_sizes(), fixed=fixed, first=given, has_kernel=config.has_kernel
        )
        if isinstance(group, DeviceMesh):
            _check_blocks(self.buffer.spec, group)
        self.expert_ids = self.buffer.spec.placement.local_experts(self.buffer.rank)
        self.tag = self._shared_buffers.tag
        device = self.buffer.device
        self.metrics = LayerMetrics(config.num_experts, self._shared_buffers)
        modules = {"router": router, "experts": experts, "shared_expert": shared_expert}
        self._given = {kind for kind, module in modules.items() if module is not None}
        if self._given:
            self._require_fitting(modules, rendezvous_of(group) if buffer is None else None)
        with device:
            # Typed as what they are unless they are given, which is what most users read.
            self.router = cast(Router, Router(config.hidden, config=config) if router is None else router)
            if experts is None:
                experts = Experts(len(self.expert_ids), config.hidden, config.intermediate, config)
            self.experts = cast(Experts, experts)
            if isinstance(group, DeviceMesh):
                self.experts.shard_over(group)
            self.experts.spread_over(self.buffer.num_ranks, self.buffer.process_group)
            self.shared_expert = shared_expert
            if config.shared_intermediate is not None and shared_expert is None:
                self.shared_expert = SharedExpert(
                    config.hidden, config.shared_intermediate, config, gated_output=config.shared_gate
                )
        self.reset_parameters()

    def _require_fitting(self, modules: dict[str, Any], rendezvous: Rendezvous | None) -> None:
        """Collective where there is a rendezvous: every rank raises what a module on one rank does not fit."""

        def check() -> dict[str, Any]:
            c = self.config
            if modules["shared_expert"] is not None:
                got = c.shared_intermediate
                expect(got is None, "shared_intermediate", got, "None for a layer that is given a shared expert")
            check_siblings(
                **modules,
                num_experts=c.num_experts,
                num_topk=c.num_topk,
                num_local=len(self.expert_ids),
                device=self.buffer.device,
            )
            return {}

        if rendezvous is None:
            check()
        else:
            all_or_none(rendezvous, check, "take its layer's modules", self.config.init_timeout_s)

    @property
    def buffer(self) -> Buffer:
        """The one that the last forward went through, or that the layer was made with; see LayerBuffers."""
        return self._shared_buffers.current

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draws N(0, 1 / fan-in), on the CPU whatever the device; biases are zero. Modules that were given stay.

        Every expert has its own stream, so the draw does not depend on where it lives.
        """
        if "router" not in self._given:
            self.router.reset_parameters()
        seeds = torch.randint(2**62, (self.config.num_experts,), device="cpu").tolist()
        for local, expert in enumerate(() if "experts" in self._given else self.expert_ids):
            self.experts.reset_expert(local, torch.Generator().manual_seed(seeds[expert]))
        if isinstance(self.shared_expert, SharedExpert) and "shared_expert" not in self._given:
            self.shared_expert.reset_parameters()

    def forward(
        self, x: Tensor, topk_idx: Tensor | None = None, *, buffer: Buffer | None = None
    ) -> tuple[Tensor, RouterAux]:
        """Routes, runs the experts, adds up. Collective.

        Args:
            x: [..., H].
            topk_idx: visit these experts instead of choosing, see `moe_rt.nn.router.Router.forward`.
            buffer: travel through this one, made with `Buffer(group, **config.buffer_sizes())`, instead of the layer's;
                its ops, backwards included, keep an order of their own. So two threads can each have a micro-batch in
                flight.

        Returns:
            The shape and dtype of x, and the router's losses.

        Raises:
            InvalidInput: on every rank, if x is not floating or has another H, or topk_idx has another shape.
            MoeRtError: as moe_rt.Buffer.dispatch.
        """
        buffer = self._buffer_for(x, buffer)
        try:
            idx, weights, aux = self.router(x, topk_idx)
        except InvalidInput as error:
            buffer.refuse(error, tag=self.tag)
        rows = x.reshape(-1, self.config.hidden).to(buffer.spec.dtype)
        recv_x, recv_weights, handle = buffer.dispatch(rows, idx, weights, tag=self.tag)
        self.metrics.add(aux.tokens_per_expert, handle)
        y = self.experts(recv_x, handle.offs)
        out = buffer.combine(y, recv_weights, handle)
        if self.shared_expert is not None:
            out = out + self.shared_expert(rows)
        return out.to(x.dtype).reshape(x.shape), aux

    def _buffer_for(self, x: Tensor, given: Buffer | None) -> Buffer:
        """The buffer for rows of the dtype that a linear layer in place of the experts would compute in."""
        dtype, device = self.experts.dtype, x.device.type
        if torch.is_autocast_enabled(device) and dtype is not torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device)
        if given is not None:
            return _fitting(given, self.config, self._shared_buffers.fixed or dtype, self.buffer.spec.placement)
        return self._shared_buffers.use(dtype)

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        values = ((f, getattr(self.config, f.name)) for f in fields(self.config) if f.repr)
        changed = ", ".join(f"{f.name}={value}" for f, value in values if value != f.default)
        return f"{changed}, expert_ids={self.expert_ids}"


def _check_blocks(spec: BufferSpec, mesh: DeviceMesh) -> None:
    """A DTensor's blocks are equal and in rank order. The ranks agreed on `spec`, so all of them raise or none."""
    size = mesh.size()
    if size != spec.num_ranks:
        raise InvalidConfig(f"group: got a mesh of {size} ranks, expected {spec.num_ranks} as in the buffer")
    if spec.num_experts % size:
        raise InvalidConfig(f"num_experts: got {spec.num_experts}, expected a multiple of the mesh's {size} ranks")
    placement = spec.placement
    if placement != Placement.contiguous(spec.num_experts, size):
        raise InvalidConfig(f"placement: got {list(placement.ranks)}, expected contiguous blocks, or a ProcessGroup")
    members = mesh.mesh.flatten().tolist()
    if members != sorted(members):  # a group's ranks ascend, whatever the mesh's order
        raise InvalidConfig(f"group: got a mesh of ranks {members}, expected ascending ones, or a ProcessGroup")


def _fitting(
    buffer: Buffer, config: MoEConfig, dtype: torch.dtype | None, placement: Placement | None = None
) -> Buffer:
    """The buffer, if it is the layer's kind; None fits all."""
    fields = {f: getattr(config, f) for f in ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts")}
    for name, expected in {**fields, "dtype": dtype, "placement": placement, "layout": "experts"}.items():
        got = getattr(buffer.spec, name)
        if expected is not None and got != expected:
            raise InvalidConfig(f"buffer.{name}: got {got}, expected {expected} as in the layer")
    return buffer
