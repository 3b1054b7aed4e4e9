"""The MoE layer: router, dispatch, this rank's experts, combine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch._C import _are_functorch_transforms_active
from torch.distributed.device_mesh import DeviceMesh

from moe_rt.buffer.buffer import Buffer
from moe_rt.buffer.handle import Handle
from moe_rt.buffer.pool import LayerBuffers
from moe_rt.config.options import BufferOptions
from moe_rt.config.placement import Placement
from moe_rt.config.spec import BufferSpec
from moe_rt.engine.checks import require_plain
from moe_rt.errors import InvalidConfig, InvalidInput, expect
from moe_rt.group.all_or_none import all_or_none
from moe_rt.group.groups import Group, rendezvous_of
from moe_rt.group.rendezvous import Rendezvous
from moe_rt.nn import chunks, overlap
from moe_rt.nn.averaging import refuse_copied_adapter, scaled_gradient
from moe_rt.nn.experts import Experts, ExpertsConfig, SharedExpert
from moe_rt.nn.metrics import LayerMetrics
from moe_rt.nn.padding import real_tokens, route, without_padding
from moe_rt.nn.protocols import ExpertsLike, RouterLike, check_siblings
from moe_rt.nn.router import Router, RouterConfig
from moe_rt.nn.router_losses import RouterAux
from moe_rt.nn.spread import SpreadModule
from moe_rt.nn.wrappers import watch_wrappers
from moe_rt.routes.ops import note_routes, recorded_routes
from moe_rt.routes.session import RECORDS, REPLAYED, REPLAYS, recomputes


@dataclass(frozen=True, kw_only=True)
class MoEConfig(RouterConfig, ExpertsConfig, BufferOptions):
    """Sizes and options of a layer; identical on every rank. docs/howto/layer.md has the values of some models.

    Attributes:
        hidden, intermediate, num_experts, num_topk: H, F, E, K.
        num_max_tokens_per_rank: maximum number of tokens of one forward on any rank; sizes the symmetric buffer.
        dtype: dtype of rows and of the experts' computation. None, the usual choice, follows the model: autocast's
            dtype if autocast is on, else the dtype of the experts' parameters. A fixed dtype casts the parameters, and
            warns once if it differs from the dtype that None would give.
        score_func, topk_before_softmax, norm_topk, route_scale, router_bias, num_groups, topk_groups, balance_bias,
            balance_bias_rate, expert_choice, jitter, aux_loss_coef, z_loss_coef, balance_scope: see
            `moe_rt.nn.router.RouterConfig`.
        activation, weight_layout, biases, interleaved, swiglu_alpha, swiglu_limit: see
            `moe_rt.nn.experts.ExpertsConfig`.
        shared_intermediate: width of a shared expert, which every token visits on its own rank, without biases; None
            for no shared expert. See `moe_rt.nn.experts.SharedExpert`.
        shared_gate: scale the shared expert's output by a sigmoid gate (Qwen2-MoE).
        num_chunks: chunks of a batch that are exchanged by themselves, so that the experts compute one while another is
            under way (docs/howto/overlap.md); "auto" for the number that this group gains by.
        heap, capacity_factor, overflow, dispatch_dtype, combine_dtype, route, sums, depth, placement, timeout_s,
            init_timeout_s, num_threads, num_sms, tuning: see `moe_rt.Buffer`. With sums="invariant" the modules that
            the layer makes also compute each row by itself on the CPU (docs/howto/equal_bits.md).

    Raises:
        InvalidConfig: a value is invalid; names the field, what was got and what was expected.
    """

    hidden: int
    intermediate: int
    num_max_tokens_per_rank: int
    dtype: torch.dtype | None = None
    shared_intermediate: int | None = None
    shared_gate: bool = False
    num_chunks: int | Literal["auto"] = 1

    def __post_init__(self) -> None:
        if self.num_chunks != "auto" and (type(self.num_chunks) is not int or self.num_chunks < 1):
            raise InvalidConfig(f'num_chunks: got {self.num_chunks!r}, expected a positive integer, or "auto"')
        for name in ("intermediate", "shared_intermediate"):
            got = getattr(self, name)
            if got is not None and got < 1:
                raise InvalidConfig(f"{name}: got {got}, expected a positive integer")
        if self.shared_gate and self.shared_intermediate is None:
            raise InvalidConfig("shared_gate: got True, expected False without shared_intermediate")
        RouterConfig.__post_init__(self)
        ExpertsConfig.__post_init__(self)

    def buffer_sizes(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Return the keyword arguments of the `moe_rt.Buffer` that a layer of this config needs.

        Args:
            dtype: dtype of rows if the config has None; default: torch's default dtype.
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

    The constructor and the forward are collective over the group. Layers of one group with equal sizes share a buffer;
    the first forward in another dtype makes another buffer.

    Parameters: `router.weight` [E, H], identical on every rank; `experts.gate_up_proj` [L, 2F, H] and
    `experts.down_proj` [L, H, F], or the weights of another weight_layout: this rank's slices of the global tensors, in
    the order of `expert_ids`; with shared_intermediate `shared_expert.*`, identical on every rank. Ranks with equal
    seeds start with the same global weights for any number of ranks. Over a DeviceMesh `experts.*` are DTensors
    [E, ...] in equal blocks, so checkpoints (docs/howto/resume.md) and FSDP (docs/howto/fsdp.md) see global tensors.

    Gradients: `experts.*` hold the sum over all ranks of the group; all other parameters hold this rank's part.
    `moe_rt.parallel.prepare` turns the experts' sums into means, as in data parallelism, and makes wrappers skip them.

    A layer of a single rank or of the default process group can be pickled, without its buffer: the first use after
    loading makes one, collectively. Other layers refuse; `state_dict` always works.

    Args:
        config: see MoEConfig.
        group: see moe_rt.Buffer.
        buffer: an existing buffer to use; its sizes must be the config's.
        router: a module to use instead of `moe_rt.nn.router.Router`; see `moe_rt.nn.protocols.RouterLike`.
        experts: a module that runs `expert_ids`, instead of `moe_rt.nn.experts.Experts`; see `ExpertsLike` there.
        shared_expert: a module [T, H] -> [T, H] that every token visits, instead of shared_intermediate. Given modules
            keep their weights and must be on the group's device.

    Raises:
        InvalidConfig: on every rank, if over a mesh the experts are not in equal contiguous blocks, or if a given
            module does not fit on some rank; only on this rank, if `buffer` was given also.
        MoeRtError: see moe_rt.Buffer.
    """

    holds_experts = True  # parameters in `experts`, adapters included, differ between ranks
    routing, routes_id = 0, 0  # see moe_rt.routes.session.Routed
    watcher: Callable[[], Any] | None = None  # see moe_rt.diagnostics.digests.Watched

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
            # Annotated as the default classes, which most layers have.
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
        if config.sums == "invariant":
            made = {"router": self.router, "experts": self.experts, "shared_expert": self.shared_expert}
            for kind, module in made.items():
                if kind not in self._given and isinstance(module, Router | Experts | SharedExpert):
                    module.row_wise = True
        self.reset_parameters()

    def _require_fitting(self, modules: dict[str, Any], rendezvous: Rendezvous | None) -> None:
        """Raise InvalidConfig if a given module does not fit; on every rank, collectively, if a rendezvous is given."""

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
        """Buffer of the last forward, or the buffer that the layer was made with; see LayerBuffers."""
        return self._shared_buffers.current

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw weights from N(0, 1 / fan-in), always on the CPU; biases become zero. Given modules are unchanged.

        Every expert has its own random stream, so its weights do not depend on its rank.
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
        """Route tokens, run the experts and sum their outputs. Collective.

        A token is padding if `mask` is False there or its row of `topk_idx` is all -1. Padding is not sent: its output,
        including the shared expert's part, and its gradient are zero, whatever x holds there, and losses and counts
        exclude it. All tokens of a rank may be padding.

        Args:
            x: floating [..., H]; T is the number of tokens.
            topk_idx: integer [T, K], experts to visit instead of choosing; see `moe_rt.nn.router.Router.forward`.
            mask: bool or integer [...], x's leading shape: True or 1 for a real token. The host does not read it.
            buffer: use this buffer, made with `Buffer(group, **config.buffer_sizes())`, instead of the layer's. Its
                ops, backward ops included, are ordered separately, so that two threads can each have a micro-batch in
                flight.

        Returns:
            A tensor with the shape and dtype of x, and the router's losses.

        Raises:
            InvalidInput: on every rank, if x is not floating or has another H; if topk_idx or mask is not an integer
                tensor or has another shape or device; if one of them is not a dense tensor; or under torch.vmap.
            MoeRtError: see moe_rt.Buffer.dispatch.
        """
        buffer = self._buffer_for(x, buffer)
        topk_idx = self._replayed(x, topk_idx) if self.routing else topk_idx
        try:
            given = {"x": x, "topk_idx": topk_idx, "mask": mask}
            require_plain(**{name: t for name, t in given.items() if t is not None or name == "x"})
            real = real_tokens(x, topk_idx, mask, self.config.num_topk)
            x = without_padding(x, real)
            idx, weights, aux = route(self.router, x, topk_idx, real)
            if self.routing & RECORDS:
                chosen = aux.topk_idx if isinstance(aux, RouterAux) and aux.topk_idx is not None else idx
                idx = note_routes(idx, chosen, self.routes_id)
        except InvalidInput as error:
            buffer.refuse(error, tag=self.tag)
        rows = x.reshape(-1, self.config.hidden).to(buffer.spec.dtype)
        see = _nothing if self.watcher is None else self.watcher()
        see("route", x=rows, ids=idx, weights=weights)
        num_chunks = chunks.number(self.config.num_chunks, buffer, self.config.intermediate)
        shared = None if self.shared_expert is None else _Once(partial(self._shared, rows, x.shape, real))
        if num_chunks > 1:
            out = self._in_chunks(buffer, num_chunks, (rows, idx, weights), aux, see, shared)
        else:
            recv_x, recv_weights, handle, y = self._computed(buffer, rows, idx, weights, shared)
            self.metrics.add(aux.tokens_per_expert, handle)
            see("dispatch", handle.offs, rows=recv_x, weights=recv_weights)
            see("experts", handle.offs, rows=y)
            out = buffer.combine(y, recv_weights, handle)
        see("combine", out=out)
        if shared is not None:
            out = out + shared()
        return out.to(x.dtype).reshape(x.shape), aux

    def _computed(
        self, buffer: Buffer, rows: Tensor, idx: Tensor, weights: Tensor, shared: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Tensor, Handle, Tensor]:
        """Dispatch rows, and return what dispatch returns and the experts' outputs. `shared` may run also."""
        if not overlap.has_gain(buffer, self.experts, rows, weights):
            recv_x, recv_weights, handle = buffer.dispatch(rows, idx, weights, tag=self.tag)
            return recv_x, recv_weights, handle, self._expert_rows(recv_x, handle.offs)
        recv_x, recv_weights, handle, weights_later = overlap.dispatch(buffer, rows, idx, weights, self.tag, shared)
        with overlap.weights_of(weights_later):
            return recv_x, recv_weights, handle, self._expert_rows(recv_x, handle.offs)

    def _expert_rows(self, recv_x: Tensor, offs: Tensor) -> Tensor:
        mean = self.spread.mean if self.spread.mean_of_rows else None
        if mean is not None:
            recv_x = scaled_gradient(recv_x, mean.num_ranks)
        y = self.experts(recv_x, offs).to(recv_x.dtype)  # FSDP may have cast it
        if mean is not None:
            refuse_copied_adapter(y, mean)
            y = scaled_gradient(y, 1 / mean.num_ranks)
        return y.requires_grad_() if self._trained_elsewhere(y) else y

    def _in_chunks(
        self,
        buffer: Buffer,
        num_chunks: int,
        batch: tuple[Tensor, Tensor, Tensor],
        aux: RouterAux,
        see: Callable[..., None],
        shared: Callable[[], Tensor] | None,
    ) -> Tensor:
        """Run dispatch, experts and combine in chunks, and `shared`; return combine's output."""
        self.metrics.add(aux.tokens_per_expert)

        def compute(chunk: chunks.Chunk) -> Tensor:
            self.metrics.add_dropped(chunk.handle)
            return self._expert_rows(chunk.recv_x, chunk.handle.offs)

        once = isinstance(self.experts, Experts) and chunks.runs_once(self.experts)
        late = once and not overlap.has_backward_hooks(self.experts)
        spread, shares = self.spread, not overlap.is_sharded(self.experts)
        done = chunks.run(
            buffer,
            self.tag,
            batch,
            num_chunks,
            compute,
            meanwhile=shared,
            calls_half_way=once,
            make_weights=partial(spread.weights, buffer.spec.dtype) if shares and isinstance(spread, Experts) else None,
            shares_weights=shares,
            has_late_weights=late,
        )
        if see is not _nothing:
            real = [int(chunk.handle.offs[-1]) for chunk in done]
            offs = torch.tensor([sum(real)], device=buffer.device)
            rows, weights, y = (
                torch.cat([t[:n] for t, n in zip(each, real, strict=True)])
                for each in zip(*((c.recv_x, c.recv_weights, c.y) for c in done), strict=True)
            )
            see("dispatch", offs, rows=rows, weights=weights)
            see("experts", offs, rows=y)
        return torch.cat([chunk.out for chunk in done])

    def _shared(self, rows: Tensor, shape: torch.Size, real: Tensor | None) -> Tensor:
        """Return the shared expert's outputs [T, H]. A row-wise one gets sequences, by which it sums gradients."""
        assert self.shared_expert is not None
        by_sequence = isinstance(self.shared_expert, SharedExpert) and self.shared_expert.row_wise
        out: Tensor = self.shared_expert(rows.view(shape) if by_sequence else rows)
        return without_padding(out.view_as(rows), None if real is None else real.flatten())

    def _replayed(self, x: Tensor, topk_idx: Tensor | None) -> Tensor | None:
        """Return the recorded experts of x if routes are replayed, else topk_idx. It refuses on every rank."""
        if not isinstance(x, Tensor):  # which forward refuses
            return topk_idx
        if not self.routing & REPLAYS:
            late = self.routing & REPLAYED and not torch.compiler.is_compiling() and recomputes(self.routes_id)
            return recorded_routes(x, self.config.num_topk, self.routes_id) if late else topk_idx
        if topk_idx is not None:
            self.refuse_routes(InvalidInput("topk_idx: got a tensor while routes are replayed, expected None"))
        return recorded_routes(x, self.config.num_topk, self.routes_id)

    def routes_sizes(self) -> tuple[int, int, Group]:
        """Return E, K and the group of the layer, for `moe_rt.routes`."""
        return self.config.num_experts, self.config.num_topk, self._shared_buffers.group

    def refuse_routes(self, error: InvalidInput) -> None:
        """Raise the error on every rank, in place of a forward's dispatch."""
        self.buffer.refuse(error, tag=self.tag)

    def _buffer_for(self, x: Any, given: Buffer | None) -> Buffer:
        """Return the buffer whose dtype nn.Linear would compute in: autocast's if it is on, else the experts' own."""
        dtype = self.spread.param_dtype or self.spread.dtype
        device = (x if isinstance(x, Tensor) else self.buffer).device.type  # forward refuses any other x below
        if torch.is_autocast_enabled(device) and dtype is not torch.float64:  # which autocast does not cast
            dtype = torch.get_autocast_dtype(device)
        if given is not None:
            return _fitting(given, self.config, self._shared_buffers.fixed or dtype, self.buffer.spec.placement)
        return self._shared_buffers.use(dtype)

    def _trained_elsewhere(self, y: Tensor) -> bool:
        """True if this rank must take part in the backward only because other ranks' experts need gradients."""
        if y.requires_grad or not self.spread.trains_somewhere:
            return False
        return torch.is_grad_enabled() and not _are_functorch_transforms_active()

    @property
    def spread(self) -> SpreadModule:
        """The SpreadModule of the experts, without an adapter around it."""
        experts: nn.Module = self.experts
        if isinstance(experts, SpreadModule):
            return experts
        return next(m for m in experts.modules() if isinstance(m, SpreadModule))

    def extra_repr(self) -> str:
        """Return the config fields that differ from their defaults, and the expert ids."""
        values = ((f, getattr(self.config, f.name)) for f in fields(self.config) if f.repr)
        changed = ", ".join(f"{f.name}={value}" for f, value in values if value != f.default)
        return f"{changed}, expert_ids={self.expert_ids}"


class _Once:
    """A tensor that is computed when it is first asked for."""

    _result: Tensor | None = None

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute

    def __call__(self) -> Tensor:
        if self._result is None:
            self._result = self._compute()
        return self._result


def _nothing(op: str, offs: Tensor | None = None, **tensors: Tensor) -> None:
    """Show tensors to no digest."""


def _check_blocks(spec: BufferSpec, mesh: DeviceMesh) -> None:
    """Raise InvalidConfig unless each rank holds one equal block of experts, in rank order, as a DTensor does.

    All ranks raise or none does, because they agreed on `spec`.
    """
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


def _fitting(buffer: Any, config: Any, dtype: torch.dtype | None, placement: Placement | None = None) -> Buffer:
    """Return `buffer`. Raise InvalidConfig if a size, dtype, placement or sum differs; a dtype or placement of None
    fits."""
    if not isinstance(buffer, Buffer):
        raise InvalidConfig(f"buffer: got {type(buffer).__name__}, expected a moe_rt.Buffer")
    fields = {f: getattr(config, f) for f in ("num_max_tokens_per_rank", "hidden", "num_topk", "num_experts")}
    sums = "invariant" if config.sums == "invariant" else None
    fields |= {"dtype": dtype, "placement": placement, "layout": "experts", "sums": sums}
    for name, expected in fields.items():
        got = getattr(buffer.spec, name)
        if expected is not None and got != expected:
            raise InvalidConfig(f"buffer.{name}: got {got}, expected {expected} as in the layer")
    return buffer


watch_wrappers()
