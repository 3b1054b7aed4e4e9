"""Expert parallelism for Transformers models: importing this registers `ep_implementation="moe_rt"`.

    import moe_rt.integrations.transformers
    config = DistributedConfig(fsdp_size=W, ep_size=W, ep_implementation="moe_rt")
    model = AutoModelForCausalLM.from_pretrained(name, distributed_config=config)

It works for every model whose plan has an `ep_dispatch_experts` rule. docs/howto/transformers.md is the guide.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_rt.buffer.pool import BufferPool, GrowingBuffer, GrowingOptions
from moe_rt.config.options import Overflow, Sums
from moe_rt.errors import InvalidConfig, InvalidInput, MissingPackage
from moe_rt.extras import how_to_install
from moe_rt.group.groups import rendezvous_of

try:
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

    from moe_rt.integrations.packed_experts import PackedExperts
    from moe_rt.integrations.routed_blocks import EXCHANGE
    from moe_rt.integrations.routed_blocks import install as watch_routes
    from moe_rt.integrations.unattended import Attended, watch_new_models
except ImportError as error:
    try:
        from transformers import __version__ as found
    except ImportError:
        found = "none"
    raise MissingPackage(
        f"transformers: got {found}, expected 5.23 or later; {how_to_install('transformers')}"
    ) from error

_options = GrowingOptions()
_send_padding = False


def configure(
    *,
    num_max_tokens_per_rank: int | None = None,
    capacity_factor: float | None = None,
    overflow: Overflow = "raise",
    timeout_s: float = 120.0,
    init_timeout_s: float = 300.0,
    num_threads: int = 1,
    sums: Sums = "ranked",
    send_padding: bool = False,
) -> None:
    """Set the options of buffers from the next forward on. Call it on every rank with the same arguments.

    Args:
        num_max_tokens_per_rank: maximum number of tokens (batch times sequence) of one forward on any rank. CUDA ranks
            then exchange nothing through the host; more tokens raise TooManyTokens on every rank. None: buffers grow.
        capacity_factor: None sizes what a rank receives for the worst case; else for this multiple of a balanced load,
            beyond which `overflow` applies.
        overflow, timeout_s, init_timeout_s, num_threads, sums: see `moe_rt.Buffer`.
        send_padding: send padding to experts also, as Transformers does. If False, tokens to which no token attends
            visit no expert; outputs of real tokens are the same.

    Raises:
        InvalidConfig: num_max_tokens_per_rank is not a positive integer. Other values are checked when a buffer is
            made.
    """
    global _options, _send_padding
    _send_padding = send_padding
    _options = GrowingOptions(
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        capacity_factor=capacity_factor,
        overflow=overflow,
        timeout_s=timeout_s,
        init_timeout_s=init_timeout_s,
        num_threads=num_threads,
        sums=sums,
    )


class MoeRtEP(EPImplementation):
    """Expert parallelism of one experts module over moe_rt. Layers of one model share a buffer.

    Padding, according to the attention mask of the experts' layer, is not sent, and its output is zero.

    With tensor parallelism, each rank of a TP group sends its own slice of their common batch.

    Args:
        experts: the experts module.
        ep_mesh: the ranks that experts are spread over.
        tp_mesh: the ranks that share a batch.

    Raises:
        InvalidConfig: on every rank, if the module's parameters are not one equal block of experts per EP rank.
    """

    def __init__(self, experts: nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
        super().__init__(experts, ep_mesh, tp_mesh)
        num_local: Any = self.num_local_experts
        _require_whole_experts(experts, ep_mesh, num_local)
        self.num_experts: int = num_local * ep_mesh.size()
        self._experts = PackedExperts(experts, self.experts_forward, num_local)
        self._pool = BufferPool.join(ep_mesh)
        self._buffer: GrowingBuffer | None = None
        self._buffer_key: tuple[Any, ...] = ()
        self._tag = 0
        self._attended = Attended(experts)
        setattr(experts, EXCHANGE, self)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        num_tokens = hidden_states.shape[0]
        real = self._attended.real(num_tokens)
        if real is not None and not _send_padding:
            top_k_index = top_k_index.masked_fill(~real.unsqueeze(1), -1)
        shares_batch = self.tp_mesh.size() > 1
        if shares_batch:
            hidden_states, top_k_index, top_k_weights = (
                _own_slice(t, self.tp_mesh) for t in (hidden_states, top_k_index, top_k_weights)
            )
        x = hidden_states.to(self._experts.dtype_of_rows(hidden_states))
        received = self._buffer_for(x, top_k_index).dispatch(x, top_k_index, top_k_weights, self._tag)
        self._experts.row_wise = _options.sums == "invariant"
        out = received.combine(self._experts(received.rows, received.handle.offs))
        return _whole_batch(out, self.tp_mesh, num_tokens) if shares_batch else out

    def refuse(self, error: InvalidInput) -> NoReturn:
        """Raise the error on every rank, in place of a dispatch. Collective."""
        lease = None if self._buffer is None else self._buffer.lease
        if lease is not None:
            lease.buffer.refuse(error, tag=self._tag)
        with rendezvous_of(self.ep_mesh):  # peers come there to make the first buffer
            raise error

    def _buffer_for(self, x: Tensor, top_k_index: Tensor) -> GrowingBuffer:
        wanted = (_options, x.shape[1], top_k_index.shape[1], x.dtype)
        if self._buffer is None or self._buffer_key != wanted:
            sizes = dict(hidden=x.shape[1], num_topk=top_k_index.shape[1], num_experts=self.num_experts, dtype=x.dtype)
            self._buffer = self._pool.growing(_options, **sizes)
            self._buffer_key, self._tag = wanted, self._buffer.new_tag()
        return self._buffer


def _require_whole_experts(experts: nn.Module, ep_mesh: DeviceMesh, num_local: int) -> None:
    num_ranks = ep_mesh.size()
    parameters = dict(experts.named_parameters(recurse=False))
    if not parameters:
        raise InvalidConfig(f"ep_plan: got experts {type(experts).__name__} without parameters, expected some to share")
    for name, parameter in parameters.items():
        if parameter.shape[0] != num_local * num_ranks or (num_ranks > 1 and not isinstance(parameter, DTensor)):
            kind = "sharded" if isinstance(parameter, DTensor) else "whole on every rank"
            raise InvalidConfig(
                f"ep_plan: got {type(experts).__name__}.{name} of {parameter.shape[0]} experts, {kind}, expected "
                f'{num_local} on each of {num_ranks} ranks; give it a "grouped_gemm" rule'
            )


def _own_slice(t: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's rows of a batch that the mesh shares. Its backward gathers the gradients of all rows."""
    return DTensor.from_local(t, mesh, [Replicate()], run_check=False).redistribute(mesh, [Shard(0)]).to_local()


def _whole_batch(t: Tensor, mesh: DeviceMesh, num_tokens: int) -> Tensor:
    """Gather all rows; slices may be uneven or empty."""
    shape = torch.Size((num_tokens, t.shape[1]))
    return DTensor.from_local(t, mesh, [Shard(0)], shape=shape, stride=(t.shape[1], 1)).full_tensor()


EPImplementationInterface.register("moe_rt", MoeRtEP)
watch_new_models()
watch_routes()
