"""Propose splits of tables: one function per strategy, from few shards to many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import ShardKind
from dlrm_planner.enumerate import (
    PINNED,
    TOO_MANY_ROWS,
    OptionBuilder,
    is_bound,
    may_split,
    split_option,
    units_of,
    whole_option,
)
from dlrm_planner.estimate import CostModel, PartCost
from dlrm_planner.partition import Partitioner
from dlrm_planner.tables import NO_PIN, Tables
from dlrm_planner.types import Capacity, Floats, Options, Placement, ShardOption, TableShortage

MAX_SHARDS_PER_PROPOSAL = 2**14
"""Largest number of shards of tables that are split over all ranks for balance."""
LEVEL_TOLERANCE = 1.01
"""The level to fill ranks to is found to within this factor."""
MIN_FILLED_SHARE = 0.01
"""No part is cut that fills less of a rank than this share of the level."""


class Proposer:
    """Hold what all strategies start from: the splits that pins and memory require."""

    def __init__(self, spec: DLRMJobSpec, tables: Tables, costs: CostModel, capacity: Capacity) -> None:
        self.empty = OptionBuilder(spec, tables, costs, capacity)
        self.world_size = spec.world_size

    @cached_property
    def required(self) -> OptionBuilder:
        """Return the splits that pins and memory require, each on ranks of its own choice."""
        return self._require(also_heavy=True)

    @cached_property
    def pinned(self) -> OptionBuilder:
        """Return the same without heavy tables: balance may want more parts of them than memory requires."""
        return self._require(also_heavy=False)

    @cached_property
    def bound(self) -> OptionBuilder:
        """Return the splits that tables must have, whatever the memory."""
        builder = self.empty.copy()
        builder.require()
        return builder

    def _require(self, *, also_heavy: bool) -> OptionBuilder:
        builder, capacity = self.bound.copy(), self.empty.capacity
        if self.world_size == 1:
            return builder
        large = [i for i in builder.open_tables() if builder.is_too_large(i)]
        rest = sum(capacity.held[i] for i in capacity.placed if i not in builder.options)
        builder.reserve = (rest - sum(capacity.held[i] for i in large)) / len(capacity.free)
        for i in sorted(large, key=lambda i: -capacity.held[i]):
            if also_heavy or not builder.is_heavy(i):
                builder.add(i, builder.for_memory(i))
        return builder


def all_whole(proposer: Proposer) -> Options:
    """Split only what pins and memory require."""
    return proposer.required.options


def split_heaviest(proposer: Proposer) -> Options | None:
    """Split tables that take longer than the mean of a rank, over as few ranks as balance needs."""
    if proposer.world_size == 1:
        return None
    builder, costs = proposer.pinned.copy(), proposer.empty.costs
    slowest = sorted(builder.capacity.placed, key=lambda i: -costs.whole_s[i])[:2]
    for i in builder.heavy_tables():
        other_s = max((float(costs.whole_s[each]) for each in slowest if each != i), default=0.0)
        option = builder.for_balance(i, builder.total_s, other_s)
        builder.add(i, option or (builder.for_memory(i) if builder.is_too_large(i) else None))
    return builder.options if builder.options != proposer.required.options else None


def split_over_nodes(proposer: Proposer) -> Options | None:
    """Split tables that load a rank or a link too much: by columns over nodes, by rows inside each."""
    builder = _split_over_nodes(proposer, over_all=False)
    return None if builder is None else builder.options


def split_over_all_nodes(proposer: Proposer) -> Options | None:
    """Split the same tables over as many nodes as their blocks allow and all their ranks, and fill these to a level."""
    builder = _split_over_nodes(proposer, over_all=True)
    if builder is None:
        return None
    return _Filling(builder).lowest(builder.remaining_s()) or builder.options


def _split_over_nodes(proposer: Proposer, *, over_all: bool) -> OptionBuilder | None:
    builder, found = proposer.pinned.copy(), False
    if 1 in (builder.nodes, builder.processes):
        return None
    for i in builder.heavy_tables():
        option = builder.for_nodes(i, over_all=over_all) if builder.loads_node(i) else None
        found |= option is not None
        builder.add(i, option or (builder.for_memory(i) if builder.is_too_large(i) else None))
    return builder if found else None


def split_heaviest_over_all(proposer: Proposer) -> Options | None:
    """Split the same tables over all ranks: each then reads and exchanges as much as others."""
    return _over_all_ranks(proposer, proposer.pinned.heavy_tables())


def heaviest_rows(proposer: Proposer) -> Options | None:
    """Split the same tables over all ranks by rows, also those that columns suit."""
    return _over_all_ranks(proposer, proposer.pinned.heavy_tables(), by_rows=True)


def even_parts(proposer: Proposer) -> Options | None:
    """Split every table that takes long enough over all ranks, into even parts."""
    return _over_all_ranks(proposer, _long_tables(proposer))


def even_rows(proposer: Proposer) -> Options | None:
    """Split the same tables into even ranges of rows, also those that columns suit."""
    return _over_all_ranks(proposer, _long_tables(proposer), by_rows=True)


def _long_tables(proposer: Proposer) -> list[int]:
    builder, costs = proposer.pinned, proposer.empty.costs
    return [i for i in builder.open_tables() if costs.whole_s[i] >= costs.min_split_s[i]]


def _over_all_ranks(proposer: Proposer, tables: Sequence[int], *, by_rows: bool = False) -> Options | None:
    """Split tables over all ranks; None if there are none, or ``by_rows`` changes nothing."""
    builder, ranks = proposer.pinned.copy(), proposer.world_size
    if ranks == 1 or not tables or len(tables) * ranks > MAX_SHARDS_PER_PROPOSAL:
        return None
    if by_rows and not any(builder.suits_columns(i) for i in tables):
        return None
    for i in tables:
        builder.add(i, builder.over_all_ranks(i, builder.balance_reason(i, builder.total_s), by_rows=by_rows))
    return builder.options


def fill_to_level(proposer: Proposer) -> Options | None:
    """Fill ranks one by one to a level; the next rank takes the rest of a table that passes the level.

    Source: McNaughton, "Scheduling with deadlines and loss functions", 1959: the wrap-around rule. Here a cut costs
    something, so the level is searched for.
    """
    if proposer.world_size == 1:
        return None
    return _Filling(proposer.pinned).lowest(proposer.required.remaining_s())


class _Filling:
    """Fill ranks around the tables that may not be cut."""

    def __init__(self, builder: OptionBuilder) -> None:
        self._builder, self._capacity, self._specs = builder, builder.capacity, builder.tables.specs
        whole_s, min_s = builder.costs.whole_s, builder.costs.min_split_s
        open_ = [i for i in self._capacity.placed if i not in builder.options]
        cut = [i for i in open_ if may_split(self._specs[i]) and not is_bound(self._specs[i])]
        self._order = sorted((i for i in cut if whole_s[i] >= min_s[i]), key=lambda i: -whole_s[i])
        filled, rest = builder.copy(), sorted(set(open_) - set(self._order))
        for i in sorted((i for i in rest if is_bound(self._specs[i])), key=lambda i: -whole_s[i]):
            ranks = filled.allowed(i)
            filled.put(i, int(ranks[np.argmin(filled.load[ranks])]))
        self._load, self._free = filled.load, filled.free
        self._small_s = sum(float(whole_s[i]) for i in rest if not is_bound(self._specs[i]))
        """Seconds of tables that are placed afterwards, into what is left."""
        self._total_s = float(self._load.sum()) + self._small_s + float(whole_s[self._order].sum())
        self._parts = {i: self._cut_by(i) for i in self._order}

    def _cut_by(self, i: int) -> tuple[bool, int, PartCost]:
        """Return whether to cut by columns, the number of units, and the cost of parts.

        Columns suit bags of several ids, since blocks hold sums of whole bags and ranges of rows do not.
        """
        table = self._specs[i]
        blocks = len(table.block_edges) - 1
        by_columns = blocks > 1 and table.lookups > 1
        cost = self._builder.costs.by_part(i, by_columns=by_columns)
        return by_columns, units_of(table, "column" if by_columns else "row"), cost

    def lowest(self, most_s: float) -> Options | None:
        """Return the options of the lowest level below ``most_s`` that holds everything, or None."""
        if not self._order:
            return None
        low, high, found = max(self._total_s / len(self._load), float(self._load.max())), most_s, None
        # The level sums what a rank looks up and sends; a step may still be shorter at the highest level.
        if low < high <= LEVEL_TOLERANCE * low:
            return self._at(high)
        while high > LEVEL_TOLERANCE * low:
            level = (low * high) ** 0.5
            options = self._at(level)
            low, high = (low, level) if options is not None else (level, high)
            found = options or found
        return found

    def _at(self, level_s: float) -> Options | None:
        """Fill ranks to this level; None if they do not hold everything."""
        sharing, capacity, min_s = self._builder.sharing, self._capacity, MIN_FILLED_SHARE * level_s
        left: list[float] = (level_s - self._load).tolist()
        free: list[int] = self._free.tolist()
        # Ranks of all nodes in turn: parts of a table then share no link.
        builder = self._builder
        order = np.arange(len(left)).reshape(builder.nodes, builder.processes).T.ravel().tolist()
        turn, found = 0, dict(builder.options)
        for i in self._order:
            by_columns, units, costs = self._parts[i]
            rest, parts = units, list[tuple[int, int]]()
            held, extra = capacity.held[i] / units, capacity.extra[i]
            while rest and turn < len(left):
                rank = order[turn]
                here = left[rank]
                fit = rest
                if costs.seconds(rest / units) > here:
                    fit = min(rest, int(costs.share(here) * units)) if here > min_s else 0
                if held:
                    fit = min(fit, max(int((free[rank // sharing] - extra) / held), 0))
                if fit:
                    seconds = costs.seconds(fit / units)
                    if fit < rest and seconds < min_s:
                        turn += 1
                        continue
                    parts.append((rank, fit))
                    left[rank] -= seconds
                    free[rank // sharing] -= int(fit * held) + extra
                    rest -= fit
                if rest:
                    turn += 1
            if rest:
                return None
            found[i] = self._option(i, parts, by_columns=by_columns)
        return found if sum(each for each in left if each > 0) >= self._small_s else None

    def _option(self, i: int, parts: Sequence[tuple[int, int]], *, by_columns: bool) -> ShardOption:
        table, builder = self._specs[i], self._builder
        ranks, sizes = np.array(parts, np.int64).T
        if len(parts) == 1:
            return whole_option(table, int(ranks[0]))
        inside = builder.nodes > 1 and len(np.unique(ranks // builder.processes)) == 1
        kind: ShardKind = "column" if by_columns else "table-row" if inside else "row"
        return split_option(table, kind, ranks, sizes, builder.balance_reason(i, self._total_s))


def pack(proposer: Proposer) -> Options | TableShortage:
    """Place tables by best fit of bytes, largest first; those that fit nowhere whole are split by rows."""
    builder, capacity = proposer.bound.copy(), proposer.empty.capacity
    held, which, sharing = capacity.held, capacity.placed, builder.sharing
    crowded = f"no {capacity.holder} has enough memory for it whole next to other tables"
    choices = np.array([len(builder.allowed(i)) for i in which])
    order = np.lexsort((np.arange(len(which)), np.array([-float(held[i]) for i in which]), choices))
    for i in (which[k] for k in order if which[k] not in builder.options):
        allowed = builder.allowed(i)
        free = builder.free[allowed // sharing]
        open_ = free >= held[i]
        if open_.any():
            allowed, free = allowed[open_], free[open_]
            builder.put(i, int(allowed[np.lexsort((allowed, builder.load[allowed], free))[0]]))
            continue
        chosen = builder.choose_ranks(i, 1) if may_split(builder.tables.specs[i]) else None
        option = builder.by_rows(i, *chosen, crowded) if chosen else None
        if option is None:
            return _shortage(builder, i)
        builder.add(i, option)
    if int(builder.free.min()) < 0:
        node = int(np.argmin(builder.free))
        there = (i for i, option in builder.options.items() if (option.ranks // sharing == node).any())
        largest = max(there, key=held.__getitem__)
        return capacity.shortage(largest, node * sharing, max(0, held[largest] + int(builder.free[node])))
    return builder.options


def _shortage(builder: OptionBuilder, i: int) -> TableShortage:
    """Return why a table does not fit next to those that are placed."""
    capacity, allowed = builder.capacity, builder.allowed(i)
    free = builder.free[allowed // builder.sharing]
    best = int(np.argmax(free))
    nodes, ranges = np.unique(allowed // builder.sharing, return_counts=True)
    spread, left = 0, int(free[best])
    if len(nodes) > 1 and may_split(builder.tables.specs[i]):
        # Each range also takes what does not shrink with its rows, so count the rows that fit.
        units, fit = units_of(builder.tables.specs[i], "row"), builder.max_units(i, nodes, ranges, 0.0)
        spread, left = len(nodes), capacity.held[i] * min(int(fit.sum()), units - 1) // units
    return capacity.shortage(i, int(allowed[best]), left, spread=spread)


Propose = Callable[[Proposer], Options | TableShortage | None]
When = Literal["always", "placed", "not placed", "not feasible"]


@dataclass(frozen=True)
class Strategy:
    """Name one way to split tables, the partitioners for it, and when it is tried."""

    name: str
    propose: Propose
    """Returns None if it cannot."""
    methods: tuple[str, ...] = ("greedy",)
    when: When = "always"
    """Always; after an earlier strategy found ranks; if none did; or if tiers did not hold the rows of any."""


_BALANCED, _BEST_FIT = ("largest differencing", "greedy"), ("best fit by bytes",)
_WHOLE = Strategy("all-whole", all_whole)
_HEAVIEST = Strategy("heaviest-split", split_heaviest)
_OVER_ALL = Strategy("heaviest-split-all", split_heaviest_over_all)
_HEAVIEST_ROWS = Strategy("heaviest-rows", heaviest_rows)
_FILL = Strategy("fill-to-level", fill_to_level)
_EVEN, _EVEN_ROWS = Strategy("even-parts", even_parts), Strategy("even-rows", even_rows)
_NODES = Strategy("split-over-nodes", split_over_nodes, _BALANCED)
_ALL_NODES = Strategy("split-over-all-nodes", split_over_all_nodes)
_PACK = Strategy("best-fit", pack)
_OVER_RANKS = (_OVER_ALL, _HEAVIEST_ROWS, _FILL, _EVEN, _EVEN_ROWS, _NODES, _ALL_NODES)


@dataclass(frozen=True)
class StrategyList:
    """Hold strategies in the order in which they are tried."""

    strategies: tuple[Strategy, ...]
    splits_to_fit: bool = False
    """Also split tables that an empty node could hold, because others leave too little memory for them whole."""
    only_checks: bool = False
    """The first placement that fits is enough."""


KEEP_WHOLE = StrategyList(
    (
        replace(_WHOLE, methods=_BALANCED),
        replace(_WHOLE, methods=_BEST_FIT, when="not placed"),
        replace(_HEAVIEST, methods=_BALANCED),
        replace(_HEAVIEST, methods=_BEST_FIT, when="not placed"),
        *(replace(each, when="placed") for each in _OVER_RANKS),
        *(replace(each, methods=_BEST_FIT, when="not feasible") for each in (_WHOLE, _HEAVIEST)),
    )
)
SPLIT_TO_FIT = StrategyList((_PACK, *_OVER_RANKS), splits_to_fit=True)
CHECK_WHOLE = StrategyList(
    (
        replace(_WHOLE, when="not feasible"),
        replace(_WHOLE, methods=_BEST_FIT, when="not feasible"),
        replace(_HEAVIEST, when="not placed"),
        replace(_HEAVIEST, methods=_BEST_FIT, when="not placed"),
    ),
    only_checks=True,
)
CHECK_SPLIT = StrategyList((_PACK,), splits_to_fit=True, only_checks=True)


def first_shortage(tables: Tables, capacity: Capacity) -> TableShortage | None:
    """Return a table too large for empty nodes, or the largest if nodes lack memory without tables."""
    held, free, sharing = capacity.held, capacity.free, capacity.sharing
    node = min(range(len(free)), key=free.__getitem__)
    if free[node] < 0:
        largest = max(range(len(held)), key=held.__getitem__)
        return capacity.shortage(largest, node * sharing, free[node], is_alone=True)
    emptiest, total = max(range(len(free)), key=lambda node: (free[node], -node)), sum(free)
    for i in sorted(capacity.placed, key=lambda i: -held[i]):
        table, pin = tables.specs[i], tables.specs[i].pin or NO_PIN
        if held[i] <= free[emptiest] and table.pin is None:
            continue
        ranks = sorted(set(pin.ranks))
        best = max(ranks, key=lambda rank: (free[rank // sharing], -rank)) if ranks else emptiest * sharing
        nodes = {rank // sharing for rank in ranks} or range(len(free))
        there, spread = free[best // sharing], 0
        if len(nodes) > 1 and (pin.sharding in ("row", "column", "grid") or may_split(table)):
            there, spread = sum(free[node] for node in nodes) if ranks else total, len(nodes)
        if held[i] > there:
            return capacity.shortage(i, best, there, is_alone=True, spread=spread)
    return None


def level_edges(partitioner: Partitioner, placement: Placement) -> Placement | None:
    """Move edges of split tables until loads are level, if that is faster and fits.

    Seconds are taken to grow with the rows of a range, or with the column blocks of a group.
    """
    costs, shards = partitioner.costs, placement.shards
    options = _level_options(placement, partitioner.seconds[shards.shape], costs.world_size)
    if options == placement.options:
        return None
    levelled = Partitioner(partitioner.tables, costs, partitioner.capacity, options)
    home = np.zeros(len(partitioner.tables.specs), np.int64)
    home[shards.table] = placement.ranks
    is_split = np.zeros(len(home), bool)
    is_split[list(options)] = True
    table = levelled.shards.table
    better = levelled.place(np.where(is_split[table], levelled.shards.ranks, home[table]), placement.method)
    is_faster = costs.estimate(better).fast_s < costs.estimate(placement).fast_s
    return better if is_faster and levelled.fits(better.ranks) else None


def _level_options(placement: Placement, seconds: Floats, world_size: int) -> Options:
    options, table, found = placement.options, placement.shards.table, dict(placement.options)
    load = np.bincount(placement.ranks, weights=seconds, minlength=world_size)
    # Shards are in the order of their tables.
    starts = np.searchsorted(table, list(options)).tolist()
    ends = np.searchsorted(table, list(options), side="right").tolist()
    own = {i: slice(start, end) for i, start, end in zip(options, starts, ends, strict=True)}
    for i in sorted(options, key=lambda i: -float(seconds[own[i]].sum())):
        option, mine = options[i], seconds[own[i]]
        # The ranges of a grid's column groups have common edges.
        if option.reason in (PINNED, TOO_MANY_ROWS) or option.kind == "grid":
            continue
        spec, where, total = placement.shards.shapes.tables.specs[i], option.ranks, float(mine.sum())
        units, others = units_of(spec, option.kind), load[where] - mine
        shares = _pour(others, total) / total if total > 0 else np.zeros(len(where))
        ends_ = np.rint(np.cumsum(shares) * units).astype(np.int64)
        sizes = np.diff(ends_, prepend=0)
        kept = sizes > 0
        if kept.sum() < 2 or ends_[-1] != units:
            continue
        load[where] = others + shares * total
        found[i] = split_option(spec, option.kind, where[kept], sizes[kept], option.reason)
    return found


def _pour(levels: Floats, amount: float) -> Floats:
    """Return what each vessel takes if ``amount`` is poured over all of them and finds one level."""
    order = np.sort(levels)
    surface = (amount + np.cumsum(order)) / np.arange(1, len(order) + 1)
    wet = int(np.flatnonzero(surface > order)[-1])
    return np.asarray(np.maximum(surface[wet] - levels, 0.0))
