"""Propose sets of splits and place them on ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_api.plan import ShardKind
from dlrm_planner.enumerate import (
    LEAST_ELEMENTS,
    MOST_PIECES,
    NEAR,
    PINNED,
    Splitter,
    edges_of,
    forced,
    free,
    may_split,
    split_heaviest,
    spread_all,
    spread_heaviest,
)
from dlrm_planner.estimate import Costs, Floats, Parts
from dlrm_planner.partition import Attempt, Placement, Ranks
from dlrm_planner.partition import fits as fits_caps
from dlrm_planner.tables import Tables
from dlrm_planner.types import Needs, NoPlacement, Shards, Split

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


def place(
    spec: DLRMJobSpec,
    tables: Tables,
    costs: Costs,
    needs: Needs,
    slowed: Callable[[Placement], float | None] = lambda _: 1.0,
    *,
    quick: bool = False,
    crowded: bool = False,
) -> Placement | NoPlacement | None:
    """Place all tables but the replicated ones, by the quickest placement that fits; None if only bytes fit.

    Args:
        spec: The job.
        tables: Its tables.
        costs: Of their shards.
        needs: Their bytes, and the room for them.
        slowed: How many times as long a step takes with a placement as by its pace; None where it does not fit in some
            other way.
        quick: Only ask whether there is a placement; the one that is found need not be balanced.
        crowded: Split also tables that some node could hold, where others leave no room for them whole.
    """
    which = needs.placed
    refusal = _first_refusal(tables, needs, which) if needs.bounded else None
    if refusal is not None:
        return refusal
    rivals = Rivals(spec, tables, costs, needs)
    found = [] if quick or needs.hopeless else rivals.balanced(crowded=crowded)
    if (quickest := _quickest(rivals, found, slowed)) is not None:
        return quickest
    misfit = None
    for attempt in rivals.plain():
        if quick and (placed := attempt.by_load("greedy")) is not None and slowed(placed) is not None:
            return placed
        packed = attempt.by_room()
        if isinstance(packed, Placement):
            return packed if slowed(packed) is not None else None
        misfit = attempt.misfit(packed)
    if found:
        return None
    if not crowded:
        return misfit
    crammed = rivals.packed()
    return None if isinstance(crammed, Placement) and slowed(crammed) is None else crammed


def _quickest(
    rivals: Rivals, found: Sequence[Placement], slowed: Callable[[Placement], float | None]
) -> Placement | None:
    """The first that fits, or a later one that is quicker once slower tiers count; None where none fits."""
    best, least = None, math.inf
    for wide in (False, True):
        for placement in rivals.wide() if wide else found:
            if placement.pace * NEAR >= least or (factor := slowed(placement)) is None:
                continue
            if placement.pace * factor * NEAR < least:
                best, least = placement, placement.pace * factor
        if best is None or least <= NEAR * best.pace:
            break
    return best


def _first_refusal(tables: Tables, needs: Needs, which: Sequence[int]) -> NoPlacement | None:
    """A table too large for empty nodes, or the largest one where nodes cannot hold what every node must."""
    held, rooms, processes = needs.held, needs.room, needs.sharing
    node = min(range(len(rooms)), key=lambda node: rooms[node])
    if rooms[node] < 0:
        largest = max(range(len(held)), key=lambda i: held[i])
        return NoPlacement(table=largest, rank=node * processes, held=held[largest], room=rooms[node], alone=True)
    roomiest, total = max(range(len(rooms)), key=lambda node: (rooms[node], -node)), sum(rooms)
    for i in sorted(which, key=lambda i: -held[i]):
        if held[i] <= rooms[roomiest] and tables.specs[i].pin is None:
            continue
        pin = tables.specs[i].pin
        ranks = sorted(set(pin.ranks)) if pin else []
        best = max(ranks, key=lambda rank: (rooms[rank // processes], -rank)) if ranks else roomiest * processes
        split = pin is not None and pin.sharding in ("row", "column", "table-row")
        if split or may_split(tables.specs[i]):
            nodes = {rank // processes for rank in ranks} or range(len(rooms))
            there = sum(rooms[node] for node in nodes) if ranks else total
            if len(nodes) > 1 and (pin is None or pin.sharding != "table-row"):
                if held[i] > there:
                    return NoPlacement(table=i, rank=best, held=held[i], room=there, alone=True, spread=len(nodes))
                continue
        if held[i] > rooms[best // processes]:
            return NoPlacement(table=i, rank=best, held=held[i], room=rooms[best // processes], alone=True)
    return None


CLOSE = 1.01
"""The level is found as closely as this."""
LEAST_PIECE = 0.01
"""No piece is cut that fills less of a rank than this part of the level."""


class Wrapping:
    """Tables that may be cut, around those that may not."""

    def __init__(
        self, splitter: Splitter, tables: Tables, costs: Costs, needs: Needs, which: Sequence[int], processes: int
    ) -> None:
        self._splitter, self._tables, self._needs, self._processes = splitter, tables, needs, processes
        free = [i for i in which if i not in splitter.splits]
        cuttable = [i for i in free if may_split(tables.specs[i]) and not _bound(tables.specs[i])]
        whole = costs.whole
        self._order = sorted((i for i in cuttable if whole[i] >= LEAST_ELEMENTS), key=lambda i: -whole[i])
        self._whole = {i: float(whole[i]) for i in self._order}
        cut = set(self._order)
        self._base = splitter.load.copy()
        self._room = splitter.room.copy()
        for i in sorted((i for i in free if i not in cut and _bound(tables.specs[i])), key=lambda i: -whole[i]):
            ranks = splitter.allowed(i)
            rank = int(ranks[np.argmin(self._base[ranks])])
            self._base[rank] += whole[i]
            self._room[rank // splitter.sharing] -= needs.held[i] if needs.bounded else 0
        self._small = sum(float(whole[i]) for i in free if i not in cut and not _bound(tables.specs[i]))
        """Cost of what is placed afterwards into what is left."""
        self._total = float(self._base.sum()) + self._small + sum(self._whole.values())
        self._parts = {i: self._cut_by(costs, i) for i in self._order}

    def _cut_by(self, costs: Costs, i: int) -> tuple[bool, int, Parts]:
        """Whether by columns, in how many units, and what parts cost: blocks hold sums of whole bags, rows do not."""
        table = self._tables.specs[i]
        blocks = len(table.block_edges) - 1
        by_columns = blocks > 1 and table.lookups > 1
        return by_columns, blocks if by_columns else table.rows, costs.parts(i, by_columns=by_columns)

    def lowest(self, most: float) -> dict[int, Split] | None:
        """The splits of the lowest level below ``most`` that holds everything; None where none does."""
        if not self._order:
            return None
        low, high, found = max(self._total / len(self._base), float(self._base.max())), most, None
        while high > CLOSE * low:
            level = (low * high) ** 0.5
            splits = self._at(level)
            low, high = (low, level) if splits is not None else (level, high)
            found = splits or found
        return found

    def _at(self, level: float) -> dict[int, Split] | None:
        """Ranks filled to this level; None where they do not hold everything."""
        sharing, bounded, needs = self._splitter.sharing, self._needs.bounded, self._needs
        left: list[float] = (level - self._base).tolist()
        room: list[int] = self._room.tolist()
        rank, found = 0, dict(self._splitter.splits)
        for i in self._order:
            by_columns, units, parts = self._parts[i]
            rest, pieces = units, list[tuple[int, int]]()
            held, extra = needs.held[i] / units, needs.extra[i]
            while rest and rank < len(left):
                here = left[rank]
                fit = rest
                if parts.cost(rest / units) > here:
                    fit = min(rest, int(parts.share(here) * units)) if here > LEAST_PIECE * level else 0
                if bounded:
                    fit = min(fit, max(int((room[rank // sharing] - extra) / held), 0) if held else rest)
                if fit:
                    cost = parts.cost(fit / units)
                    if fit < rest and cost < LEAST_PIECE * level:
                        rank += 1
                        continue
                    pieces.append((rank, fit))
                    left[rank] -= cost
                    room[rank // sharing] -= int(fit * held) + extra
                    rest -= fit
                if rest:
                    rank += 1
            if rest:
                return None
            found[i] = self._split(i, pieces, by_columns=by_columns)
        open_ = sum(each for each in left if each > 0)
        return found if open_ >= self._small else None

    def _split(self, i: int, pieces: list[tuple[int, int]], *, by_columns: bool) -> Split:
        table, ranks, why = self._tables.specs[i], tuple(rank for rank, _ in pieces), self._splitter.why(i, self._total)
        if len(pieces) == 1:
            return Split(kind="table", ranks=ranks, edges=(0, table.rows), why="")
        inside = self._splitter.nodes > 1 and ranks[0] // self._processes == ranks[-1] // self._processes
        kind: ShardKind = "column" if by_columns else "table-row" if inside else "row"
        return Split(kind=kind, ranks=ranks, edges=edges_of(table, kind, [size for _, size in pieces]), why=why)


def _bound(table: TableSpec) -> bool:
    return table.pin is not None and bool(table.pin.ranks or table.pin.sharding)


def levelled(
    splits: Mapping[int, Split], shards: Shards, ranks: Ranks, cost: Floats, world_size: int
) -> dict[int, Split]:
    """The splits with other edges where the planner chose them: every rank of a table at one load, as far as that goes.

    Cost is taken to grow with the rows of a range, or with the column blocks of a group.
    """
    load = np.bincount(ranks, weights=cost, minlength=world_size)
    found = dict(splits)
    of_table = {i: np.flatnonzero(shards.table == i) for i in splits}
    for i in sorted(splits, key=lambda i: -float(cost[of_table[i]].sum())):
        split, own = splits[i], of_table[i]
        if split.why == PINNED:
            continue
        table = shards.spec(int(own[0]))
        units = len(table.block_edges) - 1 if split.kind == "column" else table.rows
        mine = np.array(split.ranks, np.int64)
        beside, total = load[mine] - cost[own], float(cost[own].sum())
        shares = _filled(beside, total) / total if total > 0 else np.zeros(len(mine))
        ends = np.rint(np.cumsum(shares) * units).astype(np.int64)
        kept = np.diff(ends, prepend=0) > 0
        if kept.sum() < 2 or ends[-1] != units:
            continue
        load[mine] = beside + shares * total
        edges = (0, *(table.block_edges[end] if split.kind == "column" else end for end in ends[kept].tolist()))
        found[i] = replace(split, ranks=tuple(mine[kept].tolist()), edges=edges)
    return found


def _filled(levels: Floats, amount: float) -> Floats:
    """What each vessel takes where ``amount`` is poured over all of them and seeks one level."""
    order = np.sort(levels)
    count = np.arange(1, len(order) + 1)
    surface = (amount + np.cumsum(order)) / count  # if so many of the lowest take it
    wet = int(np.flatnonzero(surface > order)[-1])
    return np.asarray(np.maximum(surface[wet] - levels, 0.0))


def pack(
    spec: DLRMJobSpec, tables: Tables, costs: Costs, needs: Needs, which: Sequence[int]
) -> dict[int, Split] | NoPlacement:
    """A place for every table: best fit by bytes, largest first; what fits nowhere whole is split by rows.

    Returns:
        The split of each table, of kind ``table`` where it is whole; its shards keep to the nodes' room.
    """
    splitter, held = Splitter(spec, tables, costs, needs), needs.held
    crowded = f"beside other tables no {needs.holder} has room for it whole"
    for i in which:
        splitter.add(i, splitter.as_pinned(i))
    choices = np.array([len(splitter.allowed(i)) for i in which])
    order = np.lexsort((np.arange(len(which)), np.array([-float(held[i]) for i in which]), choices))
    for i in (which[k] for k in order if which[k] not in splitter.splits):
        allowed = splitter.allowed(i)
        room = splitter.room[allowed // splitter.sharing]
        open_ = room >= held[i]
        if open_.any():
            allowed, room = allowed[open_], room[open_]
            rank = int(allowed[np.lexsort((allowed, splitter.load[allowed], room))[0]])
            splitter.put(i, rank)
            continue
        chosen = splitter.choose(i, 1) if may_split(tables.specs[i]) else None
        split = splitter.by_rows(i, *chosen, crowded) if chosen else None
        if split is None:
            return no_room(splitter, i, held[i], tables)
        splitter.add(i, split)
    if needs.bounded and int(splitter.room.min()) < 0:
        node = int(np.argmin(splitter.room))
        there = (
            i for i, split in splitter.splits.items() if node in {rank // splitter.sharing for rank in split.ranks}
        )
        i = max(there, key=lambda i: held[i])
        return no_room(splitter, i, held[i], tables)
    return splitter.splits


def no_room(splitter: Splitter, i: int, held: int, tables: Tables) -> NoPlacement:
    """Why a table has no place beside those that have."""
    allowed = splitter.allowed(i)
    room = splitter.room[allowed // splitter.sharing]
    best = int(np.argmax(room))
    nodes = np.unique(allowed // splitter.sharing)
    if len(nodes) == 1 or not may_split(tables.specs[i]):
        return NoPlacement(table=i, rank=int(allowed[best]), held=held, room=int(room[best]), alone=False)
    total = int(np.maximum(splitter.room[nodes], 0).sum())
    return NoPlacement(table=i, rank=int(allowed[best]), held=held, room=total, alone=False, spread=len(nodes))
