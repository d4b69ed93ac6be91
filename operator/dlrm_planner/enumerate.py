"""Enumerate the shard options of tables: which may be replicated or split, how, and over which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from dlrm_api.dimensions import MAX_SLAB_ROWS
from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TablePin, TableSpec
from dlrm_api.plan import Device, ShardKind
from dlrm_planner.estimate import CostModel, Each
from dlrm_planner.tables import ELEMENT_BYTES, NO_PIN, Tables
from dlrm_planner.types import Capacity, Floats, Indices, ShardOption, cut_tables

MAX_SHARDS = 2**24
"""Shards of all tables: so many take 16 s and 1.7 GiB."""
MAX_REPLICA_BYTES = 4 * 2**20
"""Largest table that is replicated without a pin: its gradient is cleared and summed in each step, within the cache."""
MAX_REPLICA_HOST_S = 3e-3
"""Host work of a step up to which tables are replicated without a pin."""
MIN_SPLIT_GAIN = 0.95
"""A split must bring the costliest rank below this part of what it was."""
ROW_TOLERANCE, COLUMN_TOLERANCE = 1.02, 1.1
"""Accept so much of the best balance for fewer shards. Columns get more: their vectors are sums of whole bags."""
SPLIT_KINDS: tuple[ShardKind, ...] = ("row", "column", "table-row", "grid")
PINNED = "as pinned"
TOO_MANY_ROWS = f"a rank holds at most {MAX_SLAB_ROWS} rows of several sizes"


def check_pins(spec: DLRMJobSpec, tables: Tables, replicas_field: str) -> None:
    """Refuse pins and numbers of rows that no placement can honour; ``replicas_field`` is the field that adds ranks.

    Raises:
        InvalidSpecError: a pinned rank does not exist, replicas are pinned to some ranks only, table-row or grid is
            pinned without several ranks on a node, a rank would hold too many rows of several sizes, or there would be
            more shards than the planner places.
    """
    world_size, shards = spec.world_size, list[int]()
    for table, path in zip(tables.specs, tables.paths, strict=True):
        pin, is_pinned = table.pin or NO_PIN, f"table {table.name} is pinned to"
        if pin.sharding in ("table-row", "grid"):
            _check_inside_nodes(pin, path, is_pinned, spec.trainer.processes_per_replica)
        if pin.sharding in ("row", "table-row") and table.is_unique and units_of(table, "row") == 1 < world_size:
            raise InvalidSpecError(
                f"{path}.embedding.buckets",
                f"{is_pinned} sharding {pin.sharding}, and its one bucket is never split: set buckets to 2 or more",
            )
        if pin.ranks and max(pin.ranks) >= world_size:
            raise InvalidSpecError(
                f"{path}.pin.ranks",
                f"{is_pinned} rank {max(pin.ranks)}, but the job has ranks 0 to {world_size - 1}: name one of these, "
                f"or raise {replicas_field}",
            )
        if pin.sharding == "data" and 0 < len(set(pin.ranks)) < world_size:
            problem = f"{is_pinned} sharding data, which places it on every rank: leave ranks out"
            raise InvalidSpecError(f"{path}.pin.ranks", problem)
        shards.append(_pinned_shards(spec, table))
        if table.has_sizes and units_of(table, "row") > shards[-1] * (MAX_SLAB_ROWS // table.unit_rows):
            fix = f"leave out its pin, or raise {replicas_field}" if is_bound(table) else f"raise {replicas_field}"
            raise InvalidSpecError(
                f"{path}.rows",
                f"table {table.name} has {table.rows} rows, which {shards[-1]} of the job's ranks may hold, and "
                f"{TOO_MANY_ROWS}: {fix}",
            )
    if sum(shards) > MAX_SHARDS:
        raise InvalidSpecError(
            f"{tables.paths[shards.index(max(shards))]}.pin.sharding",
            f"{sum(count > 1 for count in shards)} tables are pinned to be split, into {max(shards)} shards at most "
            f"over the job's {world_size} ranks: {sum(shards)} shards with all other tables, and the planner places at "
            f"most {MAX_SHARDS}: pin fewer tables, name fewer ranks in pin.ranks, or use fewer ranks",
        )


def required_shards(spec: DLRMJobSpec, tables: Tables) -> int:
    """Count the shards that all tables must have."""
    return sum(_pinned_shards(spec, table) for table in tables.specs)


def _pinned_shards(spec: DLRMJobSpec, table: TableSpec) -> int:
    """Count the shards that a table must have before any is made."""
    kind, processes = _required_split(table), spec.trainer.processes_per_replica
    if kind is None:
        return 1
    ranks = (table.pin or NO_PIN).ranks
    if kind == "grid":
        nodes = len({rank // processes for rank in ranks}) or spec.replicas
        return min(units_of(table, "column"), nodes) * min(units_of(table, "row"), processes)
    most = processes if kind == "table-row" else len(set(ranks)) or spec.world_size
    return min(units_of(table, kind), most)


def _required_split(table: TableSpec) -> ShardKind | None:
    """Return how a table must be split: as pinned, or by rows that no rank could hold; else None."""
    kind = (table.pin or NO_PIN).sharding
    if kind is None and table.has_sizes and table.held_rows > MAX_SLAB_ROWS:
        return "row"
    return kind if kind in SPLIT_KINDS else None


def _check_inside_nodes(pin: TablePin, path: str, is_pinned: str, processes: int) -> None:
    if processes == 1:
        nodes_, other = ("one node", "row") if pin.sharding == "table-row" else ("each node", "column")
        raise InvalidSpecError(
            f"{path}.pin.sharding",
            f"{is_pinned} sharding {pin.sharding}, which splits rows over the ranks of {nodes_}, and a node has one "
            f"rank: set trainer.processesPerReplica to 2 or more, or pin to sharding {other}",
        )
    nodes = sorted({rank // processes for rank in pin.ranks})
    if pin.sharding == "table-row" and len(nodes) > 1:
        raise InvalidSpecError(
            f"{path}.pin.ranks",
            f"{is_pinned} sharding table-row on ranks of nodes {', '.join(map(str, nodes))}: name ranks of one node, "
            f"such as {nodes[0] * processes} to {(nodes[0] + 1) * processes - 1}, or pin to sharding row",
        )


def may_split(table: TableSpec) -> bool:
    """Return whether the planner may split a table that no pin splits."""
    pin = table.pin or NO_PIN
    return units_of(table, "row") > 1 and pin.sharding is None and len(set(pin.ranks)) != 1


def is_bound(table: TableSpec) -> bool:
    """Return whether a pin names ranks or a sharding."""
    pin = table.pin or NO_PIN
    return bool(pin.ranks or pin.sharding)


def pinned_to_data(tables: Tables) -> NDArray[np.bool_]:
    """Return the (T,) tables that pins replicate."""
    return np.array([(table.pin or NO_PIN).sharding == "data" for table in tables.specs], bool)


def worth_replicating(tables: Tables, costs: CostModel, device: Device) -> NDArray[np.bool_]:
    """Return the (T,) tables to replicate: pinned ones, and small ones with gradients that are cheaper to all-reduce.

    Over all W ranks, a ring all-reduce of R rows moves 2 (W - 1) R D elements; the exchange of a whole table moves the
    ids of the samples of W - 1 ranks, and their pooled vectors there and back. Replicas are where ranks compute. Those
    that gain most come first, up to ``MAX_REPLICA_HOST_S`` with that of pinned tables.
    """
    home = "hbm" if device == "cuda" else "ddr"
    table_bytes = tables.rows * costs.dims * ELEMENT_BYTES
    reduced = 2 * (costs.world_size - 1) * table_bytes
    exchanged = costs.sent_bytes(np.arange(len(table_bytes)), 1.0, costs.dims, costs.blocks)
    unpinned = [
        not (table.is_unique or table.has_sizes or is_bound(table)) and (table.pin or NO_PIN).tier in (None, home)
        for table in tables.specs
    ]
    is_small = np.array(unpinned, bool) & (table_bytes <= MAX_REPLICA_BYTES)
    chosen = pinned_to_data(tables)
    gained = np.where(chosen, np.inf, (exchanged - reduced) * is_small)
    order = np.argsort(-gained, kind="stable")
    order = order[gained[order] > 0]
    chosen[order[costs.replica_host_s(order).cumsum() <= MAX_REPLICA_HOST_S]] = True
    return chosen


class OptionBuilder:
    """Choose options for tables one after the other, and track what they leave of each rank and node."""

    def __init__(self, spec: DLRMJobSpec, tables: Tables, costs: CostModel, capacity: Capacity) -> None:
        self.tables, self.costs, self.capacity = tables, costs, capacity
        self.processes, self.world_size = spec.trainer.processes_per_replica, spec.world_size
        self.nodes, self.sharing = spec.replicas, capacity.sharing
        self._everywhere = np.arange(spec.world_size)
        self.load = np.zeros(spec.world_size)  # seconds of each rank
        self.free = np.array(capacity.free, np.int64)
        self.reserve = 0.0
        """Memory of each node to leave for tables that stay whole."""
        self.options: dict[int, ShardOption] = {}
        self.floor_s = self.floor_bytes = 0.0
        """What splits over nodes left to the rank with most lookups, and to the node that sends most."""

    def copy(self) -> OptionBuilder:
        """Return a builder that continues from here independently."""
        other = copy(self)
        other.load, other.free, other.options = self.load.copy(), self.free.copy(), dict(self.options)
        return other

    def add(self, i: int, option: ShardOption | None) -> None:
        """Take an option of a table, if there is one."""
        if option is None:
            return
        shards, ranks = cut_tables(self.tables, (i,), {i: option}), option.ranks
        self.options[i] = option
        # No rank has two parts.
        self.load[ranks] += self.costs.of_shapes(shards.shapes)[shards.shape]
        np.subtract.at(self.free, ranks // self.sharing, self.capacity.measure(shards.shapes)[shards.shape])

    def put(self, i: int, rank: int) -> None:
        """Place a whole table on a rank."""
        self.options[i] = whole_option(self.tables.specs[i], rank)
        self.load[rank] += self.costs.whole_s[i]
        self.free[rank // self.sharing] -= self.capacity.held[i]

    def allowed(self, i: int) -> Indices:
        """Return the ranks that a table's pin allows."""
        ranks = (self.tables.specs[i].pin or NO_PIN).ranks
        return np.array(sorted(set(ranks)), np.int64) if ranks else self._everywhere

    def open_tables(self) -> list[int]:
        """Return the tables that may be split and have no option yet."""
        return [i for i in self.capacity.placed if i not in self.options and may_split(self.tables.specs[i])]

    def heavy_tables(self) -> list[int]:
        """Return open tables that take longer than the mean of a rank, the longest first."""
        return sorted(filter(self.is_heavy, self.open_tables()), key=lambda i: -self.costs.whole_s[i])

    def is_heavy(self, i: int) -> bool:
        """Return whether balance may want a split: a table takes longer than the mean rank, and long enough."""
        return bool(self.costs.whole_s[i] > max(self.total_s / self.world_size, self.costs.min_split_s[i]))

    @cached_property
    def total_s(self) -> float:
        """Return the seconds of all tables whole, over all ranks."""
        return float(self.costs.whole_s[list(self.capacity.placed)].sum())

    def remaining_s(self) -> float:
        """Return the seconds of all shards and of the tables without an option, over all ranks."""
        whole = [i for i in self.capacity.placed if i not in self.options]
        return float(self.load.sum() + self.costs.whole_s[whole].sum())

    def require(self) -> None:
        """Take the splits that tables must have, in their order, as :meth:`as_pinned` does one by one."""
        which = [i for i in self.capacity.placed if _required_split(self.tables.specs[i]) is not None]
        place, alone = 0, 1
        while place < len(which):
            place += self._add_even([*takewhile(self._is_over_all_ranks, which[place:])])
            for i in which[place : place + alone]:
                self.add(i, self.as_pinned(i))
            # Where memory is tight many tables may need ranges of their own, and runs of even ones are short.
            place, alone = place + alone, 2 * alone

    def _is_over_all_ranks(self, i: int) -> bool:
        """Return whether a table must have a range of rows on every rank."""
        table = self.tables.specs[i]
        is_row = _required_split(table) == "row" and not (table.pin or NO_PIN).ranks
        return is_row and units_of(table, "row") >= self.world_size > 1

    def _add_even(self, which: Sequence[int]) -> int:
        """Split tables into even ranges over all ranks, up to the first that only uneven ones fit; return how many."""
        if not which:
            return 0
        specs, world_size = [self.tables.specs[i] for i in which], self.world_size
        units = np.array([units_of(table, "row") for table in specs], np.int64)
        edges = np.arange(world_size + 1) * units[:, None] // world_size
        options = {
            i: split_option(table, "row", self._everywhere, sizes, _reason(table))
            for i, table, sizes in zip(which, specs, np.diff(edges, axis=1), strict=True)
        }
        shards = cut_tables(self.tables, which, options)
        seconds = self.costs.of_shapes(shards.shapes)[shards.shape].reshape(len(which), world_size)
        held = self.capacity.measure(replace(shards.shapes, apart=True))[shards.shape]
        taken = held.reshape(len(which), len(self.free), self.sharing).sum(axis=2)
        free, needed = self.free - (np.cumsum(taken, axis=0) - taken), np.diff(edges[:, :: self.sharing], axis=1)
        per, count = np.full(len(self.free), self.sharing), 0
        for count, i in enumerate(which):
            most = self._units_within(i, free[count], per)
            # Tables that no ranges fit are split evenly too.
            if (needed[count] > most).any() and int(most.sum()) >= units[count]:
                break
            self.options[i] = options[i]
        else:
            count = len(which)
        # One table after the other, as single ones are added: sums of another order differ in their last digits.
        for of_table in seconds[:count]:
            self.load += of_table
        self.free -= taken[:count].sum(axis=0)
        return count

    def as_pinned(self, i: int) -> ShardOption | None:
        """Return the split that a table must have, even if memory is too small for it; None if it may stay whole."""
        table, ranks = self.tables.specs[i], self.allowed(i)
        pin, kind = table.pin or NO_PIN, _required_split(table)
        if kind is None:
            return None
        if kind == "column":
            blocks = min(len(table.block_edges) - 1, len(ranks))
            return self.by_columns(i, blocks, ranks, PINNED) or self._columns(i, ranks[:blocks], PINNED)
        if kind == "grid":
            nodes = np.unique(ranks // self.processes)
            return self.by_grid(i, min(units_of(table, "column"), len(nodes)), self.processes, nodes, PINNED)
        if kind == "table-row":
            node = ranks[0] // self.processes if pin.ranks else self._node_for(i)
            ranks = np.arange(node * self.processes, (node + 1) * self.processes)
        even, reason = _even(units_of(table, kind), len(ranks)), _reason(table)
        return self.by_rows(i, ranks, kind, reason) or _row_option(table, ranks, even, kind, reason)

    def _node_for(self, i: int) -> int:
        """Return the least loaded node with enough memory for a table."""
        load = self.load.reshape(self.nodes, self.processes).sum(axis=1)
        free = self.free.reshape(self.nodes, self.processes // self.sharing)
        held = -(-self.capacity.held[i] // free.shape[1])
        return int(np.lexsort((np.arange(self.nodes), load, ~(free >= held).all(axis=1)))[0])

    def by_rows(self, i: int, ranks: Indices, kind: ShardKind, reason: str) -> ShardOption | None:
        """Split into row ranges over ranks, as even as memory allows; None if they do not hold the table."""
        table = self.tables.specs[i]
        for reserve in (self.reserve, 0.0):
            nodes, per = np.unique(ranks // self.sharing, return_counts=True)
            units, most = units_of(table, kind), self.max_units(i, nodes, per, reserve)
            sizes = _even(units, len(ranks))
            if (np.add.reduceat(sizes, per.cumsum() - per) <= most).all():
                return _row_option(table, np.sort(ranks), sizes, kind, reason)
            got = spread_rows(units, per, most)
            if got is not None:
                sizes = np.concatenate([_even(rows, count) for rows, count in zip(got, per.tolist(), strict=True)])
                return _row_option(table, np.sort(ranks), sizes, kind, reason)
        return None

    def max_units(self, i: int, nodes: Indices, per: Indices, reserve: float) -> Indices:
        """Return the rows, or buckets, of a table that fit each node, in ``per`` ranges."""
        return self._units_within(i, self.free[nodes].astype(np.float64) - reserve, per)

    def _units_within(self, i: int, free: Indices | Floats, per: Indices) -> Indices:
        """Return the same by the memory that each node has."""
        table, held = self.tables.specs[i], self.capacity.held[i]
        units = units_of(table, "row")
        most = np.minimum(units, per * (MAX_SLAB_ROWS // table.unit_rows)) if table.has_sizes else units
        if held == 0:
            return np.full(len(free), most, np.int64)
        free = free - per * float(self.capacity.extra[i])
        # One row, for what is rounded up, is a small part of a bucket.
        rounded = 1 / table.unit_rows
        return np.asarray(np.clip(np.floor(free / held * units - rounded), 0, most), np.int64)

    def choose_ranks(self, i: int, count: int) -> tuple[Indices, ShardKind] | None:
        """Return at least ``count`` ranks for row ranges of a table: of one node, else of as few as hold it."""
        allowed = self.allowed(i)
        nodes, sizes = np.unique(allowed // self.sharing, return_counts=True)
        load = np.bincount(np.searchsorted(nodes, allowed // self.sharing), weights=self.load[allowed]) / sizes
        units = units_of(self.tables.specs[i], "row")
        for reserve in (self.reserve, 0.0):
            most = self.max_units(i, nodes, sizes, reserve)
            order = np.lexsort((nodes, -most, load))
            inside = order[(most[order] >= units) & (sizes[order] >= count)]
            if count > 1 and len(inside):
                kind: ShardKind = "table-row" if self.nodes > 1 else "row"
                return self._least_loaded(allowed, nodes[inside[:1]], count), kind
            fewest = min(len(nodes), max(2, -(-count // int(sizes.max()))))
            if int(most[order[:fewest]].sum()) < units:
                order = np.lexsort((nodes, load, -most))
                fewest = max(fewest, int(np.searchsorted(np.cumsum(most[order]), units)) + 1)
            if 1 < fewest <= len(nodes):
                return self._least_loaded(allowed, nodes[order[:fewest]], -(-count // fewest)), "row"
        return None

    def _least_loaded(self, allowed: Indices, nodes: Indices, count: int) -> Indices:
        by_node = (allowed[allowed // self.sharing == node] for node in nodes)
        return np.sort(np.concatenate([here[np.lexsort((here, self.load[here]))[:count]] for here in by_node]))

    def by_columns(self, i: int, count: int, allowed: Indices, reason: str) -> ShardOption | None:
        """Split into groups of column blocks on the least loaded ranks with memory; None if too few have it."""
        if (option := self._columns(i, allowed[:count], reason)) is None:
            return None
        free, taken, ranks = self.free.copy(), np.zeros(self.world_size, bool), list[int]()
        # Groups on several nodes share no link.
        here = np.zeros(self.nodes, np.int64)
        shards = cut_tables(self.tables, (i,), {i: option})
        for held in self.capacity.measure(shards.shapes)[shards.shape].tolist():
            open_ = allowed[(free[allowed // self.sharing] >= held) & ~taken[allowed]]
            if not len(open_):
                return None
            keys = open_, -free[open_ // self.sharing], here[open_ // self.processes], self.load[open_]
            rank = int(open_[np.lexsort(keys)[0]])
            taken[rank] = True
            here[rank // self.processes] += 1
            free[rank // self.sharing] -= held
            ranks.append(rank)
        return replace(option, ranks=np.array(ranks))

    def _columns(self, i: int, ranks: Indices, reason: str) -> ShardOption | None:
        table = self.tables.specs[i]
        blocks = len(table.block_edges) - 1
        if len(ranks) < 2 or blocks < 2:
            return None
        return split_option(table, "column", ranks, _even(blocks, len(ranks)), reason)

    def by_grid(self, i: int, groups: int, ranges: int, nodes: Indices, reason: str) -> ShardOption | None:
        """Split into groups of column blocks on the least loaded nodes with memory, each into ranges of rows there.

        Without such nodes it takes others where a pin requires the split, else there is none.
        """
        table, ranges = self.tables.specs[i], min(ranges, units_of(self.tables.specs[i], "row"))
        if groups * ranges < 2 or groups > len(nodes):
            return None
        kind: ShardKind = "grid"
        if reason != PINNED and 1 in (groups, ranges):
            kind = "column" if ranges == 1 else "table-row"
        option = ShardOption(
            kind=kind,
            ranks=np.arange(groups * ranges),
            row_edges=_edges(table, "row", _even(units_of(table, "row"), ranges)),
            column_edges=_edges(table, "column", _even(units_of(table, "column"), groups)),
            reason=reason,
        )
        shards = cut_tables(self.tables, (i,), {i: option})
        held = self.capacity.measure(shards.shapes)[shards.shape].reshape(groups, ranges)
        load = self.load.reshape(self.nodes, self.processes)
        # (nodes, P) ranks of each node, the least loaded first; the ranges of a group follow each other.
        inside = np.argsort(load[nodes], axis=1, kind="stable")[:, :ranges] + nodes[:, None] * self.processes
        inside.sort(axis=1)
        # Shares of a node's memory: that of all its ranks, or of each.
        free = self.free[inside // self.sharing]
        taken = held.sum(axis=1).max() if self.sharing > 1 else held.max()
        fits = (free - self.reserve * (reason != PINNED) >= taken).all(axis=1)
        order = np.lexsort((nodes, load[nodes].sum(axis=1), ~fits))
        if reason != PINNED and int(fits.sum()) < groups:
            return None
        return replace(option, ranks=inside[np.sort(order[:groups])].ravel())

    def is_too_large(self, i: int) -> bool:
        """Return whether not even an empty node holds a table whole."""
        return self.capacity.held[i] > self.capacity.max_free

    def for_memory(self, i: int) -> ShardOption | None:
        """Split a table that is too large for a node: by columns if that is enough, else by rows."""
        table, allowed = self.tables.specs[i], self.allowed(i)
        reason = f"no {self.capacity.holder} has enough memory for it whole"
        for count in range(2, min(len(table.block_edges) - 1, len(allowed)) + 1):
            if self.capacity.held[i] / count > self.free.max():
                continue
            if (option := self.by_columns(i, count, allowed, reason)) is not None:
                return option
        chosen = self.choose_ranks(i, 1)
        return chosen and self.by_rows(i, *chosen, reason)

    def balance_reason(self, i: int, total_s: float) -> str:
        """Return why a table is split that fits whole; ``total_s`` are the seconds of all tables."""
        times = float(self.costs.whole_s[i]) / total_s * self.world_size
        costs = f"alone it costs {times:.2f} times the mean of a rank"
        return costs if times > 1 else "whole tables leave the ranks less balanced"

    def over_all_ranks(self, i: int, reason: str, *, by_rows: bool = False) -> ShardOption | None:
        """Split over all allowed ranks, by columns where they suit the table, else by rows."""
        allowed = self.allowed(i)
        if self.suits_columns(i) and not by_rows:
            return self.by_columns(i, len(allowed), allowed, reason)
        return self.by_rows(i, allowed, "row", reason)

    def suits_columns(self, i: int) -> bool:
        """Return whether to split a table over all its ranks by columns: bags have several ids, and blocks suffice."""
        table = self.tables.specs[i]
        return table.lookups > 1 and len(table.block_edges) - 1 >= len(self.allowed(i))

    def for_balance(self, i: int, total_s: float, other_s: float) -> ShardOption | None:
        """Split the slowest table if that brings the slowest rank down enough.

        ``total_s`` are the seconds of all tables, ``other_s`` those of the slowest other one. That one goes to a rank
        without a part of this table, or next to a group of its columns: ranges of rows can be made smaller for it,
        column blocks cannot.
        """
        costs, table, allowed = self.costs, self.tables.specs[i], self.allowed(i)
        before, blocks = float(costs.whole_s[i]), len(table.block_edges) - 1
        reason = self.balance_reason(i, total_s)
        row_counts = np.arange(2, min(len(allowed), units_of(table, "row")) + 1)
        block_counts = np.arange(2, min(len(allowed), blocks) + 1)
        largest = np.asarray(-(-blocks // block_counts), np.float64)
        fixed = float(costs.total_s(i, 1.0, 0, 0))
        widest = costs.total_s(i, 1.0, largest * (table.dim / blocks), largest)
        parts = costs.total_s(i, 1 / row_counts, table.dim, blocks)
        with_other = np.where(block_counts < self.world_size, np.maximum(widest, other_s), widest + other_s)
        column = np.maximum(with_other, (total_s + (block_counts - 1) * fixed) / self.world_size)
        row = np.maximum(parts, (total_s - before + row_counts * parts) / self.world_size)
        best = min([*column, *row], default=before)
        if best >= MIN_SPLIT_GAIN * before:
            return None
        close = block_counts[column <= COLUMN_TOLERANCE * best]
        if close.size and (option := self.by_columns(i, int(close[0]), allowed, reason)) is not None:
            return option
        close = row_counts[row <= ROW_TOLERANCE * best]
        chosen = self.choose_ranks(i, int(close[0])) if close.size else None
        return chosen and self.by_rows(i, *chosen, reason)

    def for_nodes(self, i: int, *, over_all: bool) -> ShardOption | None:
        """Split a slow table by columns over nodes and by rows inside each, where a step is shortest; None if whole.

        Ranks look rows up for themselves, but send over the link of their node: groups of columns on several nodes
        share no link, and few ranges of rows send few vectors. ``over_all``: over as many nodes as blocks allow, and
        all of their ranks.
        """
        costs, table = self.costs, self.tables.specs[i]
        blocks, ranges = units_of(table, "column"), min(units_of(table, "row"), self.processes)
        c, r = np.arange(1, min(blocks, self.nodes) + 1)[:, None], np.arange(1, ranges + 1)
        if is_bound(table) or not may_split(table):
            return None
        (part_s, part), mean = (
            self._looked_and_sent(i, 1 / r, each * (table.dim / blocks), each)
            for each in (-(-blocks // c).astype(np.float64), blocks / c)
        )
        total = zip(self.looked_and_sent, self._looked_and_sent(i, 1.0, table.dim, blocks), mean, strict=True)
        looked_s, sent = (of_all - whole + c * r * each for of_all, whole, each in total)
        rank_s = np.maximum(np.maximum(part_s, looked_s / self.world_size), self.floor_s)
        node = np.maximum(np.maximum(part * r, sent / self.nodes), self.floor_bytes)
        step_s = rank_s + costs.links.spread_s(node, np.maximum(part, sent / self.world_size))
        is_whole = step_s.min() >= MIN_SPLIT_GAIN * step_s[0, 0] and not self.is_too_large(i)
        close = np.array([[-1, -1]]) if over_all else np.argwhere(step_s <= ROW_TOLERANCE * step_s.min())
        order = np.argsort((c * r)[tuple(close.T)], kind="stable")
        for at in [(0, 0)] if is_whole and not over_all else map(tuple, close[order].tolist()):
            groups, ranges = int(c[at[0], 0]), int(r[at[1]])
            option = self.by_grid(i, groups, ranges, np.arange(self.nodes), self.balance_reason(i, self.total_s))
            if option is not None or groups * ranges == 1:
                self.floor_s = max(self.floor_s, float(part_s[at]))
                self.floor_bytes = max(self.floor_bytes, float((part * r)[at]))
                return option
        return None

    def loads_node(self, i: int) -> bool:
        """Return whether a whole table takes more lookups than the mean rank, or sends more than the mean node."""
        costs = self.costs
        if costs.whole_s[i] < costs.min_split_s[i]:
            return False
        looked, sent = self._looked_and_sent(i, 1.0, self.tables.specs[i].dim, units_of(self.tables.specs[i], "column"))
        total_s, total = self.looked_and_sent
        return bool(looked > total_s / self.world_size or sent > total / self.nodes)

    def _looked_and_sent(self, which: Indices | int, share: Each, width: Each, blocks: Each) -> tuple[Floats, Floats]:
        """Return the seconds in which parts of tables are looked up, and the bytes that they exchange."""
        sent = self.costs.sent_bytes(which, share, width, blocks)
        return self.costs.total_s(which, share, width, blocks) - self.costs.byte_s * sent, sent

    @cached_property
    def looked_and_sent(self) -> tuple[float, float]:
        """Return the same of all tables, whole."""
        which = np.array(self.capacity.placed, np.int64)
        looked, sent = self._looked_and_sent(which, 1.0, self.costs.dims[which], self.costs.blocks[which])
        return float(looked.sum()), float(sent.sum())


def _reason(table: TableSpec) -> str:
    """Return why a table must be split."""
    return PINNED if (table.pin or NO_PIN).sharding else TOO_MANY_ROWS


def units_of(table: TableSpec, kind: ShardKind) -> int:
    """Return how many parts a table can be split into: rows, buckets of a unique table, or column blocks."""
    return len(table.block_edges) - 1 if kind == "column" else table.held_rows // table.unit_rows


def spread_rows(rows: int, weights: Indices, most: Indices) -> list[int] | None:
    """Spread rows in proportion to weights, at most ``most`` each; None if these do not hold all."""
    if int(most.sum()) < rows:
        return None
    got = np.zeros(len(most), np.int64)
    while (left := rows - int(got.sum())) > 0:
        open_ = np.flatnonzero(got < most)
        share = np.floor(left * (weights[open_] / weights[open_].sum())).astype(np.int64)
        share[: left - int(share.sum())] += 1 if not share.any() else 0
        got[open_] = np.minimum(got[open_] + share, most[open_])
    return got.tolist()


def split_option(table: TableSpec, kind: ShardKind, ranks: Indices, sizes: Indices, reason: str) -> ShardOption:
    """Return consecutive parts of so many rows, buckets or column blocks."""
    edges = {"row_edges": np.array((0, table.held_rows)), "column_edges": np.array((0, table.dim))}
    edges["column_edges" if kind == "column" else "row_edges"] = _edges(table, kind, sizes)
    return ShardOption(kind=kind, ranks=ranks, reason=reason, **edges)


def whole_option(table: TableSpec, rank: int) -> ShardOption:
    """Return a whole table on a rank."""
    return split_option(table, "table", np.array([rank]), np.array([units_of(table, "row")]), "")


def _edges(table: TableSpec, kind: ShardKind, sizes: Indices) -> Indices:
    ends = np.append(0, np.cumsum(sizes))
    return np.array(table.block_edges)[ends] if kind == "column" else ends * table.unit_rows


def _even(count: int, parts: int) -> Indices:
    """Return the sizes of even parts, as a ``ShardRange`` has them."""
    return np.diff(np.arange(parts + 1) * count // parts)


def _row_option(table: TableSpec, ranks: Indices, sizes: Indices, kind: ShardKind, reason: str) -> ShardOption | None:
    """Return consecutive ranges of these sizes, for ranks with rows; None if one rank holds all."""
    held = np.flatnonzero(sizes)
    if len(held) < 2:
        return None
    return split_option(table, kind, ranks[held], sizes[held], reason)
