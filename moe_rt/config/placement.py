"""Placement of experts: the rank of each expert, and its index on that rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from moe_rt.errors import expect


@dataclass(frozen=True, repr=False)
class Placement:
    """Rank and local index of every expert.

    Attributes:
        places: for each expert its (rank, local index) pairs. The protocol supports one pair per expert, with local
            indices in the order of expert ids; `make` refuses others.
    """

    places: tuple[tuple[tuple[int, int], ...], ...]

    @classmethod
    def contiguous(cls, num_experts: int, num_ranks: int) -> Placement:
        """Place contiguous blocks; the first num_experts % num_ranks ranks hold one expert more."""
        each, extra = divmod(num_experts, num_ranks)
        return cls.from_ranks([r for r in range(num_ranks) for _ in range(each + (r < extra))])

    @classmethod
    def from_ranks(cls, ranks: Sequence[int]) -> Placement:
        """Place each expert on the given rank; `ranks` has length E."""
        held: dict[int, int] = {}
        places = []
        for rank in map(int, ranks):
            places.append(((rank, held.get(rank, 0)),))
            held[rank] = held.get(rank, 0) + 1
        return cls(tuple(places))

    @classmethod
    def make(cls, given: Placement | Sequence[int] | None, num_experts: int, num_ranks: int) -> Placement:
        """Return the placement that a user gave: a Placement, the rank of each expert, or None for contiguous blocks.

        Raises:
            InvalidConfig: it has other numbers of experts or ranks, leaves a rank without experts, places an expert
                twice, or does not order local indices by expert id.
        """
        if given is None:
            return cls.contiguous(num_experts, num_ranks)
        made = given if isinstance(given, Placement) else cls.from_ranks(given)
        got = len(made.places)
        expect(got == num_experts, "placement", f"{got} entries", f"num_experts = {num_experts} entries")
        for expert, places in enumerate(made.places):
            expect(len(places) == 1, "placement", f"{len(places)} places for expert {expert}", "one")
        found = set(made.ranks)
        expect(found == set(range(num_ranks)), "placement", sorted(found), f"every rank of {num_ranks}")
        expect(made == cls.from_ranks(made.ranks), "placement", made.places, "local indices in the order of expert ids")
        return made

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each expert, length E."""
        return tuple(rank for ((rank, _),) in self.places)

    def local_experts(self, rank: int) -> list[int]:
        """Return the global ids of a rank's experts, in local order."""
        return [expert for expert, at in enumerate(self.ranks) if at == rank]

    def num_local(self, rank: int) -> int:
        """Return the number of experts on a rank (L)."""
        return self.ranks.count(rank)

    def __repr__(self) -> str:
        return f"Placement({list(self.ranks)})"
