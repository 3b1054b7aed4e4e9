"""A token dispatcher for torchtitan, switched on by one line of its command line.

    --override.imports moe_rt.integrations.torchtitan.token_dispatcher

Importable without torchtitan: the class then stands alone, with the same methods. docs/howto/adapters.md is the guide.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rt.comm.growing import GrowingOptions
from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.heap.groups import Group
from moe_rt.integrations.exchange import Exchanged, LayerExchange

_HAVE_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None


class StandaloneBase:
    """What the dispatcher needs of torchtitan's BaseEPTokenDispatcher, for where there is no torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Sizes that every dispatcher of torchtitan is given."""

        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: Group = None

    def wire_meshes(self, *, ep_mesh: Group) -> None:
        """Takes the ranks that experts are spread over."""
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Overridden below."""


if TYPE_CHECKING or not _HAVE_TORCHTITAN:
    _Base = StandaloneBase
else:
    try:
        from torchtitan.models.common.token_dispatcher import BaseEPTokenDispatcher as _Base
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("torchtitan"):  # torchtitan itself lacks something
            raise
        message = f"torchtitan: got one without {error.name}, expected 0.3 or later; pip install 'torchtitan>=0.3'"
        raise MissingPackage(message) from error


class MoeRtTokenDispatcher(_Base):
    """Dispatches through a buffer that all layers with the same sizes share.

    Nothing waits for the device: experts are given every row of the receive buffer, and counts that stay where they
    are. Only the rows that the counts cover are real. The rest is unspecified, and stays out of outputs and gradients
    as long as experts work on each row alone or by the counts; torchtitan's do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """Where None, a size is taken from what is dispatched; see `token_dispatcher` for the fields."""

        num_max_tokens_per_rank: int | None = None
        hidden_dim: int | None = None
        dtype: str | torch.dtype | None = None
        capacity_factor: float | None = None
        timeout_s: float = 120.0

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config
        self._dtype = _dtype_from(config.dtype)
        self._exchange: LayerExchange | None = None

    def init_buffer(self) -> None:
        """Makes the buffer, if the configuration says all sizes; otherwise the first dispatch does. Collective.

        Raises:
            InvalidConfig: without expert parallelism, or when ranks cannot hold equally many experts.
        """
        c = self._config
        if self.ep_mesh is None:
            raise InvalidConfig("ep_mesh: got None, expected a mesh: expert_parallel_degree must be above 1")
        options = GrowingOptions(
            num_max_tokens_per_rank=c.num_max_tokens_per_rank, capacity_factor=c.capacity_factor, timeout_s=c.timeout_s
        )
        exchange = LayerExchange(self.ep_mesh, num_experts=self.num_experts, num_topk=self.top_k, options=options)
        if self.num_experts % exchange.num_ranks:  # DTensor would not place the rest as the buffer does
            expected = f"a multiple of the {exchange.num_ranks} ranks"
            raise InvalidConfig(f"num_experts: got {self.num_experts}, expected {expected}")
        if c.num_max_tokens_per_rank is not None and c.hidden_dim is not None and self._dtype is not None:
            exchange.open(c.hidden_dim, self._dtype)
        self._exchange = exchange

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Exchanged]:
        """Sends tokens to the ranks of their experts. Differentiable in x_TD and topk_scores_TK. Collective.

        Args:
            x_TD: [T, D].
            topk_scores_TK: [T, K], applied to the experts' outputs in combine.
            topk_expert_ids_TK: [T, K].
            num_local_tokens_per_expert_E: not used; counts travel with the tokens.

        Returns:
            rows [capacity, D] packed by local expert; int64 [e] on the device, how many of them each expert has; and
            what combine needs.

        Raises:
            MoeRtError: as `moe_rt.Buffer` and its dispatch.
        """
        del num_local_tokens_per_expert_E
        if self._exchange is None:
            raise InvalidConfig("ep_mesh: got None, expected wire_meshes(ep_mesh=...) before the first dispatch")
        received = self._exchange.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
        return received.rows, received.handle.num_recv_tokens_per_expert.to(torch.int64), received

    def combine(self, routed_output_RD: Tensor, metadata: Exchanged, x_TD: Tensor) -> Tensor:
        """Brings rows home, each times its score, and adds those of a token. Collective.

        Args:
            routed_output_RD: [capacity, D], the experts' outputs.
            metadata: of the dispatch that these rows come from.
            x_TD: not used.

        Returns:
            [T, D].
        """
        del x_TD
        return metadata.combine(routed_output_RD)


def token_dispatcher(
    cfg: Any,
    *,
    num_max_tokens_per_rank: int | None = None,
    hidden_dim: int | None = None,
    dtype: str | torch.dtype | None = None,
    capacity_factor: float | None = None,
    timeout_s: float = 120.0,
) -> MoeRtTokenDispatcher.Config:
    """Takes the place of an all-to-all dispatcher's Config; torchtitan calls it when the command line names it.

    With the first three given, the buffer is made before training starts; torch.compile needs the first.

    Args:
        cfg: the Config that torchtitan made.
        num_max_tokens_per_rank: the most tokens a rank dispatches at once; the same on every rank. None makes room for
            the largest batch of any rank, and more when a larger one comes; CUDA ranks then compare sizes each time.
        hidden_dim: D.
        dtype: of x_TD, such as "bfloat16".
        capacity_factor: None makes room for the worst case; otherwise for this multiple of a balanced load, beyond
            which CapacityOverflow is raised on every rank: no token is ever dropped.
        timeout_s: seconds to wait for a peer.

    Raises:
        InvalidConfig: dtype names none.
    """
    _dtype_from(dtype)
    shared = {f.name: getattr(cfg, f.name) for f in fields(_Base.Config) if f.init and not f.name.startswith("_")}
    return MoeRtTokenDispatcher.Config(
        **shared,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        hidden_dim=hidden_dim,
        dtype=dtype,
        capacity_factor=capacity_factor,
        timeout_s=timeout_s,
    )


def _dtype_from(name: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if name is None or isinstance(found, torch.dtype):
        return found
    raise InvalidConfig(f'dtype: got {name!r}, expected the name of a torch dtype, such as "bfloat16"')


if _HAVE_TORCHTITAN:
    from torchtitan.config import override
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    # Exactly that class: what derives from it pads rows for quantised experts, and these rows are packed.
    override(target=AllToAllTokenDispatcher.Config, exact=True, description="moe_rt dispatch")(token_dispatcher)
