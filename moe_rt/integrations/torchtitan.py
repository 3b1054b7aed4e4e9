"""A token dispatcher for torchtitan, enabled by one option of its command line.

    --override.imports moe_rt.integrations.torchtitan.token_dispatcher

Without torchtitan the module can be imported, and the class has the same methods. docs/howto/adapters.md is the guide.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_rt.buffer.pool import GrowingOptions
from moe_rt.config.options import Sums
from moe_rt.errors import InvalidConfig, MissingPackage
from moe_rt.group.groups import Group
from moe_rt.integrations.exchange import Exchanged, LayerExchange

_HAVE_TORCHTITAN = importlib.util.find_spec("torchtitan") is not None


class StandaloneBase:
    """Replacement for torchtitan's BaseEPTokenDispatcher if torchtitan is not installed."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        """Sizes that torchtitan gives every dispatcher."""

        num_experts: int
        top_k: int

    def __init__(self, config: Config) -> None:
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.ep_mesh: Group = None

    def wire_meshes(self, *, ep_mesh: Group) -> None:
        """Set the ranks that experts are spread over."""
        self.ep_mesh = ep_mesh
        self.init_buffer()

    def init_buffer(self) -> None:
        """Make the buffer; overridden in MoeRtTokenDispatcher."""


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
    """Token dispatcher over a buffer that all layers with equal sizes share.

    The host does not wait for the device: experts get every row of recv_x, and counts that stay on the device. Only the
    rows that the counts cover are real. Other rows are unspecified; they do not affect outputs or gradients if experts
    process rows independently or use the counts, as torchtitan's do.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_Base.Config):
        """Sizes and options; see `token_dispatcher`. The first dispatch determines sizes that are None."""

        num_max_tokens_per_rank: int | None = None
        hidden_dim: int | None = None
        dtype: str | torch.dtype | None = None
        capacity_factor: float | None = None
        timeout_s: float = 120.0
        sums: Sums = "ranked"

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._config = config
        self._dtype = _dtype_from(config.dtype)
        self._exchange: LayerExchange | None = None

    def init_buffer(self) -> None:
        """Make the buffer if the configuration has all sizes; otherwise the first dispatch does. Collective.

        Raises:
            InvalidConfig: expert parallelism is off, or num_experts is not a multiple of the number of ranks.
        """
        c = self._config
        if self.ep_mesh is None:
            raise InvalidConfig("ep_mesh: got None, expected a mesh: expert_parallel_degree must be above 1")
        options = GrowingOptions(
            num_max_tokens_per_rank=c.num_max_tokens_per_rank,
            capacity_factor=c.capacity_factor,
            timeout_s=c.timeout_s,
            sums=c.sums,
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
        """Send tokens to the ranks of their experts. Differentiable in x_TD and topk_scores_TK. Collective.

        Args:
            x_TD: [T, D].
            topk_scores_TK: [T, K], applied to the experts' outputs in combine.
            topk_expert_ids_TK: [T, K].
            num_local_tokens_per_expert_E: not used; counts travel with the tokens.

        Returns:
            rows [capacity, D] packed by local expert; int64 [e] on the device, the number of rows of each expert; and
            the metadata for combine.

        Raises:
            InvalidConfig: wire_meshes was not called before.
            MoeRtError: see `moe_rt.Buffer` and its dispatch.
        """
        del num_local_tokens_per_expert_E
        if self._exchange is None:
            raise InvalidConfig("ep_mesh: got None, expected wire_meshes(ep_mesh=...) before the first dispatch")
        received = self._exchange.dispatch(x_TD, topk_expert_ids_TK, topk_scores_TK)
        return received.rows, received.handle.num_recv_tokens_per_expert.to(torch.int64), received

    def combine(self, routed_output_RD: Tensor, metadata: Exchanged, x_TD: Tensor) -> Tensor:
        """Return the experts' rows to their tokens, times their scores, and sum them. Collective.

        Args:
            routed_output_RD: [capacity, D], the experts' outputs.
            metadata: third result of the dispatch that returned these rows.
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
    sums: Sums = "ranked",
) -> MoeRtTokenDispatcher.Config:
    """Return moe_rt's Config in place of an all-to-all dispatcher's; torchtitan calls it if the command line names it.

    If num_max_tokens_per_rank, hidden_dim and dtype are given, the buffer is made before training starts. torch.compile
    needs num_max_tokens_per_rank.

    Args:
        cfg: the Config that torchtitan made.
        num_max_tokens_per_rank: maximum number of tokens a rank dispatches in one call; identical on every rank. None
            sizes buffers for the largest batch of any rank, and grows them; CUDA ranks then compare sizes each time.
        hidden_dim: D.
        dtype: dtype of x_TD, such as "bfloat16".
        capacity_factor: None sizes what a rank receives for the worst case; else for this multiple of a balanced load,
            beyond which every rank raises CapacityOverflow: no token is ever dropped.
        timeout_s: seconds to wait for a peer.
        sums: see `moe_rt.Buffer`.

    Raises:
        InvalidConfig: dtype is not the name of a torch dtype.
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
        sums=sums,
    )


def _dtype_from(name: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if isinstance(name, str) else name
    if name is None or isinstance(found, torch.dtype):
        return found
    raise InvalidConfig(f'dtype: got {name!r}, expected the name of a torch dtype, such as "bfloat16"')


if _HAVE_TORCHTITAN:
    from torchtitan.config import override
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    # exact=True, because subclasses pad rows for quantised experts, but moe_rt's rows are packed.
    override(target=AllToAllTokenDispatcher.Config, exact=True, description="moe_rt dispatch")(token_dispatcher)
