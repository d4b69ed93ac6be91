"""Sets of splits that compete, and their placements: the quickest is taken, and of like ones that of fewest shards."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.costs import Costs
from dlrm_planner.levelling import levelled
from dlrm_planner.needs import Needs, NoPlacement
from dlrm_planner.packing import pack
from dlrm_planner.partition import fits as fits_caps
from dlrm_planner.placement import Attempt, Placement
from dlrm_planner.shards import Split
from dlrm_planner.splitting import (
    LEAST_ELEMENTS,
    MOST_PIECES,
    NEAR,
    Splitter,
    forced,
    free,
    split_heaviest,
    spread_all,
    spread_heaviest,
)
from dlrm_planner.tables import Tables
from dlrm_planner.wrapping import Wrapping

PACKED = "best fit by bytes, splitting what fits nowhere whole"
WRAPPED = "filling ranks in turn"
WIDE = "the heaviest over all ranks, then greedy"
EVEN = "even ranges of rows of every table"


class Rivals:
    """The splits that must be; also those of the heaviest tables; of tables where ranks are full; of all tables."""

    def __init__(self, spec: DLRMJobSpec, tables: Tables, costs: Costs, needs: Needs) -> None:
        self._spec, self._tables, self._costs, self._needs = spec, tables, costs, needs
        self._which = needs.placed
        self._forced = forced(spec, tables, costs, needs, self._which)

    @cached_property
    def _pinned(self) -> Splitter:
        """Without splits that memory asks for of the heaviest tables: balance may want them wider."""
        return forced(self._spec, self._tables, self._costs, self._needs, self._which, heavy=False)

    @cached_property
    def _least(self) -> Attempt:
        return self._attempt(self._forced.splits)

    @cached_property
    def _heaviest(self) -> Attempt | None:
        splits = split_heaviest(self._pinned.copy(), self._tables, self._costs, self._which)
        return self._attempt(splits) if splits != self._forced.splits else None

    def _attempt(self, splits: dict[int, Split]) -> Attempt:
        return Attempt(self._spec, self._tables, self._costs, self._needs, splits)

    def plain(self) -> Iterator[Attempt]:
        """As few splits as there may be, and then those that the heaviest tables ask for."""
        yield self._least
        if self._spec.world_size > 1 and self._heaviest is not None:
            yield self._heaviest

    def balanced(self, *, crowded: bool) -> list[Placement]:
        """Placements that keep to the caps, first those of fewest shards among the quickest.

        Splits that no memory asks for are tried where whole tables have room, or where ``crowded`` allows them.
        """
        found: list[Placement] = []
        for attempt in self.plain():
            for placement in attempt.balanced():
                found += self._with_level(placement, attempt)
            if not found and isinstance(tight := attempt.by_room(), Placement):
                found.append(tight)
            if found and min(each.pace for each in found) <= NEAR * self._least.least_pace:
                break
        else:
            if crowded and not found and isinstance(crammed := self.packed(), Placement):
                found.append(crammed)
            if found or crowded:
                found += self._cut(min((each.pace for each in found), default=np.inf))
        return _preferred(found)

    def wide(self) -> list[Placement]:
        """Placements of tables that are split however level whole ones are: slower tiers may be less so."""
        return _preferred(list(self._cut(np.inf, every=True)))

    def packed(self) -> Placement | NoPlacement:
        """Best fit by bytes, where what fits nowhere whole is split."""
        splits = pack(self._spec, self._tables, self._costs, self._needs, self._which)
        if isinstance(splits, NoPlacement):
            return splits
        attempt = self._attempt(splits)
        ranks = np.array([rank for allowed in attempt.shards.allowed for rank in allowed], np.int64)
        return attempt.placement(PACKED, ranks, {})

    def _with_level(self, placement: Placement, attempt: Attempt) -> list[Placement]:
        better = _levelled(self._spec, self._costs, self._needs, placement, attempt.items.cost)
        return [placement] if better is None else [better, placement]

    def _cut(self, most: float, *, every: bool = False) -> Iterator[Placement]:
        """Tables cut where ranks are full, and all tables over all ranks, where these may be quicker than ``most``.

        Args:
            most: pace of what there is.
            every: all tables over all ranks also where others of these are quicker.
        """
        spec, tables, costs, needs, which = self._spec, self._tables, self._costs, self._needs, self._which
        if spec.world_size == 1:
            return
        heaviest = spread_heaviest(self._pinned.copy(), tables, costs, which)
        if len(heaviest) > len(self._pinned.splits):
            wide = self._attempt(heaviest)
            if (placed := wide.by_load(WIDE)) is not None:
                most = min(most, placed.pace)
                yield from self._with_level(placed, wide)
        if self._even_pace < (np.inf if every else most):
            even = self._attempt(spread_all(self._pinned.copy(), tables, costs, which))
            if (placed := even.by_load(EVEN)) is not None:
                most = min(most, placed.pace)
                yield from self._with_level(placed, even)
        wrapping = Wrapping(self._pinned, tables, costs, needs, which, spec.trainer.processes_per_replica)
        if (splits := wrapping.lowest(min(most, float(self._least.items.cost.sum())))) is not None:
            attempt = self._attempt(splits)
            if (placed := attempt.by_load(WRAPPED)) is not None:
                yield from self._with_level(placed, attempt)

    @cached_property
    def _even_pace(self) -> float:
        """The least pace with all tables over all ranks; infinite where there would be too many shards."""
        costs, splitter, whole = self._costs, self._pinned, self._costs.whole
        over = [i for i in free(splitter, self._tables, self._which) if whole[i] >= LEAST_ELEMENTS]
        if len(over) * self._spec.world_size > MOST_PIECES:
            return np.inf
        spread = np.array(over, np.int64)
        count = np.array([len(splitter.allowed(i)) for i in over], np.float64)
        parts = costs.total(spread, 1 / count, costs.dims[spread], costs.blocks[spread])
        added = float((count * parts - whole[spread]).sum()) / self._spec.world_size
        return self._attempt(splitter.splits).least_pace + added


def _preferred(found: list[Placement]) -> list[Placement]:
    """Those near the quickest by their shards, then the others by their pace."""
    near = NEAR * min((each.pace for each in found), default=0.0)
    return sorted(found, key=lambda each: (each.pace > near, len(each.ranks) if each.pace <= near else 0, each.pace))


def _levelled(
    spec: DLRMJobSpec, costs: Costs, needs: Needs, placement: Placement, cost: NDArray[np.float64]
) -> Placement | None:
    """The same placement with row ranges that level the ranks' loads, where nodes have room for them."""
    shards, ranks = placement.shards, placement.ranks
    splits = levelled(placement.splits, shards, ranks, cost, spec.world_size)
    if splits == placement.splits:
        return None
    attempt = Attempt(spec, shards.tables, costs, needs, splits)
    home = dict(zip(shards.table.tolist(), ranks.tolist(), strict=True))
    chosen = [
        allowed[0] if i in splits else home[i]
        for i, allowed in zip(attempt.shards.table.tolist(), attempt.shards.allowed, strict=True)
    ]
    better = attempt.placement(placement.method, np.array(chosen, np.int64), placement.imbalance)
    room = fits_caps(attempt.items, attempt.bins, better.ranks)
    return better if room and better.pace < placement.pace else None
