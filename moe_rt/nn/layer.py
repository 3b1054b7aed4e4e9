"""The MoE layer: router, dispatch, this rank's experts, combine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.comm.buffer import Buffer
from moe_rt.comm.shared_buffers import LayerBuffers
from moe_rt.config.expect import expect
from moe_rt.config.options import BufferOptions
from moe_rt.errors import InvalidConfig, InvalidInput
from moe_rt.heap.groups import Group, rendezvous_of
from moe_rt.heap.rendezvous import Rendezvous
from moe_rt.heap.segments import all_or_none
from moe_rt.native.checks import require_plain
from moe_rt.nn.buffer_fit import check_blocks, fitting
from moe_rt.nn.experts import Experts, ExpertsConfig
from moe_rt.nn.metrics import LayerMetrics
from moe_rt.nn.padding import real_tokens, route, without_padding
from moe_rt.nn.router import Router, RouterConfig
from moe_rt.nn.router_losses import RouterAux
from moe_rt.nn.shared_expert import SharedExpert
from moe_rt.nn.siblings import ExpertsLike, RouterLike, check_siblings
from moe_rt.nn.spread import SpreadModule
from moe_rt.nn.wrappers import watch_wrappers


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

    holds_experts = True  # what is in `experts`, adapters around them included, is this rank's own

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
        given = None if buffer is None else fitting(buffer, config, config.dtype)
        self._shared_buffers = LayerBuffers(
            group, config.buffer_sizes(), fixed=fixed, first=given, has_kernel=config.has_kernel
        )
        if isinstance(group, DeviceMesh):
            check_blocks(self.buffer.spec, group)
        self.expert_ids = self.buffer.spec.placement.local_experts(self.buffer.rank)
        self.tag = self._shared_buffers.tag
        device = self.buffer.device
        self.metrics = LayerMetrics(config.num_experts, self._shared_buffers)
        modules = {"router": router, "experts": experts, "shared_expert": shared_expert}
        self._given = {kind for kind, module in modules.items() if module is not None}
        if self._given:
            self._requirefitting(modules, rendezvous_of(group) if buffer is None else None)
        with device:
            # Typed as what they are unless they are given, which is what most users read.
            self.router = cast(Router, Router(config.hidden, config=config) if router is None else router)
            if experts is None:
                experts = Experts(len(self.expert_ids), config.hidden, config.intermediate, config)
            self.experts = cast(Experts, experts)
            if isinstance(group, DeviceMesh):
                self.experts.shard_over(group)
            ranks = self.buffer.num_ranks, self.buffer.process_group
            self.experts.spread_over(*ranks, self.expert_ids, config.num_experts)
            self.shared_expert = shared_expert
            if config.shared_intermediate is not None and shared_expert is None:
                self.shared_expert = SharedExpert(
                    config.hidden, config.shared_intermediate, config, gated_output=config.shared_gate
                )
        self.reset_parameters()

    def _requirefitting(self, modules: dict[str, Any], rendezvous: Rendezvous | None) -> None:
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
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        buffer: Buffer | None = None,
    ) -> tuple[Tensor, RouterAux]:
        """Routes, runs the experts, adds up. Collective.

        Padding, of which `mask` is False or the row of `topk_idx` is -1 throughout, goes nowhere: its output is zero,
        the shared expert's part included, its gradient is zero, whatever stood there, and neither losses nor counts,
        nor the numbers that losses are averaged over, know of it. A rank may have nothing else.

        Args:
            x: [..., H].
            topk_idx: visit these experts instead of choosing, see `moe_rt.nn.router.Router.forward`.
            mask: bool or integer [...], x's leading shape: True or 1 for a real token. No host reads it.
            buffer: travel through this one, made with `Buffer(group, **config.buffer_sizes())`, instead of the layer's;
                its ops, backwards included, keep an order of their own. So two threads can each have a micro-batch in
                flight.

        Returns:
            The shape and dtype of x, and the router's losses.

        Raises:
            InvalidInput: on every rank, if x is not floating or has another H; if topk_idx or mask is not of integers,
                of another shape or elsewhere; if one of them is no dense tensor; or under torch.vmap.
            MoeRtError: as moe_rt.Buffer.dispatch.
        """
        buffer = self._buffer_for(x, buffer)
        try:
            given = {"x": x, "topk_idx": topk_idx, "mask": mask}
            require_plain(**{name: t for name, t in given.items() if t is not None or name == "x"})
            real = real_tokens(x, topk_idx, mask, self.config.num_topk)
            x = without_padding(x, real)
            idx, weights, aux = route(self.router, x, topk_idx, real)
        except InvalidInput as error:
            buffer.refuse(error, tag=self.tag)
        rows = x.reshape(-1, self.config.hidden).to(buffer.spec.dtype)
        recv_x, recv_weights, handle = buffer.dispatch(rows, idx, weights, tag=self.tag)
        self.metrics.add(aux.tokens_per_expert, handle)
        y = self.experts(recv_x, handle.offs).to(recv_x.dtype)  # FSDP may have cast it
        if self._trained_elsewhere(y):
            y.requires_grad_()
        out = buffer.combine(y, recv_weights, handle)
        if self.shared_expert is not None:
            out = out + without_padding(self.shared_expert(rows), None if real is None else real.flatten())
        return out.to(x.dtype).reshape(x.shape), aux

    def _buffer_for(self, x: Any, given: Buffer | None) -> Buffer:
        """The buffer for rows of the dtype that a linear layer in place of the experts would compute in."""
        dtype = self.spread.param_dtype or self.spread.dtype
        device = (x if isinstance(x, Tensor) else self.buffer).device.type  # what is no tensor is refused in its place
        if torch.is_autocast_enabled(device) and dtype is not torch.float64:  # which autocast leaves alone
            dtype = torch.get_autocast_dtype(device)
        if given is not None:
            return fitting(given, self.config, self._shared_buffers.fixed or dtype, self.buffer.spec.placement)
        return self._shared_buffers.use(dtype)

    def _trained_elsewhere(self, y: Tensor) -> bool:
        """Whether the backward must pass here for other ranks' sake: nothing of this rank wants it."""
        if y.requires_grad or not self.spread.trains_somewhere:
            return False
        return torch.is_grad_enabled() and not _are_functorch_transforms_active()

    @property
    def spread(self) -> SpreadModule:
        """The experts themselves, where an adapter stands around them."""
        experts: nn.Module = self.experts
        if isinstance(experts, SpreadModule):
            return experts
        return next(m for m in experts.modules() if isinstance(m, SpreadModule))

    def extra_repr(self) -> str:
        """What differs from the defaults."""
        values = ((f, getattr(self.config, f.name)) for f in fields(self.config) if f.repr)
        changed = ", ".join(f"{f.name}={value}" for f, value in values if value != f.default)
        return f"{changed}, expert_ids={self.expert_ids}"


watch_wrappers()
