"""Choose which tables are replicated and which are split, how, and over which ranks."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_api.plan import MAX_SHARDS, Device, ShardKind
from dlrm_planner.estimate import Costs
from dlrm_planner.tables import ELEMENT_BYTES, Tables
from dlrm_planner.types import Needs, Split, cut

MAX_REPLICA_BYTES = 4 * 2**20
"""Largest table that is replicated unasked: its gradient is cleared and summed whole in every step, in cache still."""


def check_pins(spec: DLRMJobSpec, tables: Tables, grows: str) -> None:
    """Refuse pins that no placement can honour; ``grows`` is the field that more ranks are asked for by.

    Raises:
        InvalidSpecError: a pinned rank does not exist, replicas are to live on some ranks alone, ranges of rows over
            one node's ranks have no such ranks, or there would be more shards than a plan holds.
    """
    world_size = spec.world_size
    for table, path in zip(tables.specs, tables.paths, strict=True):
        if table.pin is None:
            continue
        if table.pin.sharding == "table-row":
            _check_table_row(table, path, spec.trainer.processes_per_replica)
        if table.pin.ranks and max(table.pin.ranks) >= world_size:
            raise InvalidSpecError(
                f"{path}.pin.ranks",
                f"table {table.name} is pinned to rank {max(table.pin.ranks)}, but the job has ranks 0 to "
                f"{world_size - 1}: name one of these, or raise {grows}",
            )
        if table.pin.sharding == "data" and 0 < len(set(table.pin.ranks)) < world_size:
            raise InvalidSpecError(
                f"{path}.pin.ranks",
                f"table {table.name} is pinned to sharding data, whose shards live on every rank: leave ranks out",
            )
    _check_shards(spec, tables)


def _check_shards(spec: DLRMJobSpec, tables: Tables) -> None:
    """Count the shards that pins ask for, before any is made."""
    counts = [_pinned_shards(spec, table) for table in tables.specs]
    if sum(counts) <= MAX_SHARDS:
        return
    split = [count for count in counts if count > 1]
    raise InvalidSpecError(
        f"{tables.paths[counts.index(max(counts))]}.pin.sharding",
        f"{len(split)} tables are pinned to be split, into {max(split)} shards at most over the job's "
        f"{spec.world_size} ranks: {sum(counts)} shards with all other tables, and a plan holds at most {MAX_SHARDS}: "
        "pin fewer tables, name fewer ranks in pin.ranks, or use fewer ranks",
    )


def _pinned_shards(spec: DLRMJobSpec, table: TableSpec) -> int:
    """Shards that a table's pin asks for; 1 where it asks for none."""
    pin = table.pin
    if pin is None or pin.sharding not in ("row", "column", "table-row"):
        return 1
    ranks = len(set(pin.ranks)) or spec.world_size
    if pin.sharding == "table-row":
        return min(table.rows, spec.trainer.processes_per_replica)
    return min(len(table.block_edges) - 1 if pin.sharding == "column" else table.rows, ranks)


def _check_table_row(table: TableSpec, path: str, processes: int) -> None:
    if processes == 1:
        raise InvalidSpecError(
            f"{path}.pin.sharding",
            f"table {table.name} is pinned to sharding table-row, which splits rows over the ranks of one node, and a "
            "node has one rank: set trainer.processesPerReplica to 2 or more, or pin to sharding row",
        )
    assert table.pin is not None
    nodes = sorted({rank // processes for rank in table.pin.ranks})
    if len(nodes) > 1:
        raise InvalidSpecError(
            f"{path}.pin.ranks",
            f"table {table.name} is pinned to sharding table-row on ranks of nodes {', '.join(map(str, nodes))}: name "
            f"ranks of one node, such as {nodes[0] * processes} to {(nodes[0] + 1) * processes - 1}, or pin to "
            "sharding row",
        )


def may_split(table: TableSpec) -> bool:
    """Whether the planner may split a table on its own account."""
    return table.rows > 1 and (table.pin is None or (table.pin.sharding is None and len(set(table.pin.ranks)) != 1))


def pinned(tables: Tables, sharding: str) -> NDArray[np.bool_]:
    """(T,) tables whose pin asks for this sharding."""
    return np.array([t.pin is not None and t.pin.sharding == sharding for t in tables.specs], bool)


def worth_replicating(spec: DLRMJobSpec, tables: Tables, costs: Costs, device: Device) -> NDArray[np.bool_]:
    """(T,) small unpinned tables whose gradient costs fewer bytes to all-reduce than their samples to exchange.

    Over all W ranks, a ring all-reduce of R rows moves 2 (W - 1) R D elements; the exchange of a whole table moves the
    ids of the samples of W - 1 ranks, and their pooled vectors there and back. Replicas lie where ranks compute.
    """
    homes = (None, "hbm" if device == "cuda" else "ddr")
    rows = np.array([table.rows for table in tables.specs], np.float64)
    reduced = 2 * (spec.world_size - 1) * rows * costs.dims * ELEMENT_BYTES
    exchanged = costs.sent(np.arange(len(rows)), 1.0, costs.dims, costs.blocks)
    unpinned = [t.pin is None or not (t.pin.sharding or t.pin.ranks or t.pin.tier not in homes) for t in tables.specs]
    small = rows * costs.dims * ELEMENT_BYTES <= MAX_REPLICA_BYTES
    return np.array(unpinned, bool) & small & (reduced < exchanged)


LEAST_ELEMENTS = 2**18
"""A table whose step costs less (1 MiB read) is not split for balance: another shard is another kernel's start."""
WORTH = 0.95
"""Splitting pays where it brings the costliest rank below this part of what it was."""
NEAR = 1.02
"""Fewer shards are taken where they come this close to the best balance."""
NEAR_BY_COLUMNS = 1.1
"""So much worse a balance is taken for columns, whose vectors are sums of whole bags."""
MOST_PIECES = 2**14
"""No more shards are made of tables that are split over all ranks for the sake of balance."""
PINNED = "as it is pinned"
EVERYWHERE = "a step is shortest where all ranks have a part of every table"
UNLEVEL = "whole tables leave the ranks less level"
Ranks = NDArray[np.int64]


class Splitter:
    """Splits tables one after the other, and knows what their shards leave of each rank and of each room."""

    def __init__(self, spec: DLRMJobSpec, tables: Tables, costs: Costs, needs: Needs) -> None:
        self._tables, self._costs, self._needs = tables, costs, needs
        self._processes, self.world_size, self.nodes = (
            spec.trainer.processes_per_replica,
            spec.world_size,
            spec.replicas,
        )
        self.sharing = needs.sharing
        self._whole = costs.whole
        self._everywhere = np.arange(spec.world_size)
        self.load = np.zeros(spec.world_size)
        self.room = np.array(needs.room, np.int64)
        self.reserve = 0.0
        """Of each room, for tables that stay whole."""
        self.splits: dict[int, Split] = {}

    def copy(self) -> Splitter:
        """One that goes on from here by itself."""
        other = copy(self)
        other.load, other.room, other.splits = self.load.copy(), self.room.copy(), dict(self.splits)
        return other

    def add(self, i: int, split: Split | None) -> None:
        """Take a split over, if there is one."""
        if split is None:
            return
        shards, ranks = cut(self._tables, (i,), {i: split}), np.array(split.ranks)
        self.splits[i] = split
        np.add.at(self.load, ranks, shards.cost(self._costs))
        if self._needs.bounded:
            np.subtract.at(self.room, ranks // self.sharing, np.array(self._needs.measure(shards), np.int64))

    def put(self, i: int, rank: int) -> None:
        """Give a whole table to a rank."""
        self.splits[i] = Split(kind="table", ranks=(rank,), edges=(0, self._tables.specs[i].rows), why="")
        self.load[rank] += self._whole[i]
        self.room[rank // self.sharing] -= self._needs.held[i] if self._needs.bounded else 0

    def allowed(self, i: int) -> Ranks:
        """Ranks that a table's pin allows."""
        pin = self._tables.specs[i].pin
        return np.array(sorted(set(pin.ranks)), np.int64) if pin and pin.ranks else self._everywhere

    def as_pinned(self, i: int) -> Split | None:
        """The split that a pin asks for; evenly where memory has no room for it anyway. None: the table stays whole."""
        table, ranks = self._tables.specs[i], self.allowed(i)
        if table.pin is None or table.pin.sharding not in ("row", "column", "table-row"):
            return None
        if table.pin.sharding == "column":
            blocks = min(len(table.block_edges) - 1, len(ranks))
            return self.by_columns(i, blocks, ranks, PINNED) or self._columns(i, ranks[:blocks], PINNED)
        kind: ShardKind = "row"
        if table.pin.sharding == "table-row":
            kind, node = "table-row", ranks[0] // self._processes if table.pin.ranks else self._node_for(i)
            ranks = np.arange(node * self._processes, (node + 1) * self._processes)
        return self.by_rows(i, ranks, kind, PINNED) or self._evenly(i, ranks, kind)

    def _evenly(self, i: int, ranks: Ranks, kind: ShardKind) -> Split | None:
        rows = self._tables.specs[i].rows
        return _row_split(ranks, _even(rows, len(ranks)), kind, PINNED)

    def _node_for(self, i: int) -> int:
        load = self.load.reshape(self.nodes, self._processes).sum(axis=1)
        room = self.room.reshape(self.nodes, self._processes // self.sharing)
        held = -(-self._needs.held[i] // room.shape[1])  # of each room, where a node has several
        fits = (room >= held).all(axis=1) if self._needs.bounded else np.ones(self.nodes, bool)
        return int(np.lexsort((np.arange(self.nodes), load, ~fits))[0])

    def by_rows(self, i: int, ranks: Ranks, kind: ShardKind, why: str) -> Split | None:
        """Row ranges over these ranks, even as far as their nodes have room; None where they have not."""
        for reserve in (self.reserve, 0.0):
            nodes, per = np.unique(ranks // self.sharing, return_counts=True)
            got = spread(self._tables.specs[i].rows, per, self._caps(i, nodes, per, reserve))
            if got is not None:
                sizes = [size for rows, count in zip(got, per.tolist(), strict=True) for size in _even(rows, count)]
                return _row_split(np.sort(ranks), sizes, kind, why)
        return None

    def _caps(self, i: int, nodes: Ranks, per: Ranks, reserve: float) -> Ranks:
        """Rows of a table that each node has room for, in ``per`` pieces."""
        rows, held = self._tables.specs[i].rows, self._needs.held[i]
        if not self._needs.bounded or held == 0:
            return np.full(len(nodes), rows, np.int64)
        room = self.room[nodes] - reserve - per * float(self._needs.extra[i])
        return np.asarray(np.clip(np.floor(room / held * rows) - 1, 0, rows), np.int64)

    def choose(self, i: int, count: int) -> tuple[Ranks, ShardKind] | None:
        """At least ``count`` ranks for row ranges of a table: of one node, or else of as few as have room for it."""
        allowed = self.allowed(i)
        nodes, sizes = np.unique(allowed // self.sharing, return_counts=True)
        load = np.bincount(np.searchsorted(nodes, allowed // self.sharing), weights=self.load[allowed]) / sizes
        rows = self._tables.specs[i].rows
        for reserve in (self.reserve, 0.0):
            caps = self._caps(i, nodes, sizes, reserve)
            order = np.lexsort((nodes, -caps, load))
            inside = order[(caps[order] >= rows) & (sizes[order] >= count)]
            if count > 1 and len(inside):
                kind: ShardKind = "table-row" if self.nodes > 1 else "row"
                return self._least_loaded(allowed, nodes[inside[:1]], count), kind
            least = min(len(nodes), max(2, -(-count // int(sizes.max()))))
            if int(caps[order[:least]].sum()) < rows:
                order = np.lexsort((nodes, load, -caps))
                least = max(least, int(np.searchsorted(np.cumsum(caps[order]), rows)) + 1)
            if 1 < least <= len(nodes):
                return self._least_loaded(allowed, nodes[order[:least]], -(-count // least)), "row"
        return None

    def _least_loaded(self, allowed: Ranks, nodes: Ranks, count: int) -> Ranks:
        chosen = []
        for node in nodes:
            here = allowed[allowed // self.sharing == node]
            chosen.append(here[np.lexsort((here, self.load[here]))[:count]])
        return np.sort(np.concatenate(chosen))

    def by_columns(self, i: int, count: int, allowed: Ranks, why: str) -> Split | None:
        """Groups of column blocks on the least loaded of the ranks that have room; None where too few have."""
        split = self._columns(i, allowed[:count], why)
        if split is None or not self._needs.bounded:
            order = allowed[np.lexsort((allowed, self.load[allowed]))]
            return split and replace(split, ranks=tuple(order[:count].tolist()))
        room, taken = self.room.copy(), np.zeros(self.world_size, bool)
        ranks = []
        for held in self._needs.measure(cut(self._tables, (i,), {i: split})):
            open_ = allowed[(room[allowed // self.sharing] >= held) & ~taken[allowed]]
            if not len(open_):
                return None
            ranks.append(int(open_[np.lexsort((open_, -room[open_ // self.sharing], self.load[open_]))[0]]))
            taken[ranks[-1]], room[ranks[-1] // self.sharing] = True, room[ranks[-1] // self.sharing] - held
        return replace(split, ranks=tuple(ranks))

    def _columns(self, i: int, ranks: Ranks, why: str) -> Split | None:
        table = self._tables.specs[i]
        blocks = len(table.block_edges) - 1
        if len(ranks) < 2 or blocks < 2:
            return None
        edges = edges_of(table, "column", _even(blocks, len(ranks)))
        return Split(kind="column", ranks=tuple(ranks.tolist()), edges=edges, why=why)

    def is_larger(self, i: int) -> bool:
        """Whether no room holds a table whole, even an empty one."""
        return self._needs.bounded and self._needs.held[i] > max(self._needs.room)

    def for_memory(self, i: int) -> Split | None:
        """A split of a table that no room holds: by columns where that is enough, else by rows."""
        table, allowed = self._tables.specs[i], self.allowed(i)
        why = f"no {self._needs.holder} has room for it whole"
        for count in range(2, min(len(table.block_edges) - 1, len(allowed)) + 1):
            if self._needs.held[i] / count > self.room.max():
                continue
            if (split := self.by_columns(i, count, allowed, why)) is not None:
                return split
        chosen = self.choose(i, 1)
        return chosen and self.by_rows(i, *chosen, why)

    def why(self, i: int, total: float) -> str:
        """Why a table is split that has room whole, in words; ``total`` is the cost of all tables."""
        times = float(self._whole[i]) / total * self.world_size
        return f"alone it costs {times:.2f} times the mean of a rank" if times > 1 else UNLEVEL

    def widely(self, i: int, why: str) -> Split | None:
        """A table over all ranks that it may lie on: by columns where bags have several ids and all get a block."""
        table, allowed = self._tables.specs[i], self.allowed(i)
        blocks = len(table.block_edges) - 1
        if table.lookups > 1 and blocks >= len(allowed):
            return self.by_columns(i, len(allowed), allowed, why)
        return self.by_rows(i, allowed, "row", why)

    def for_balance(self, i: int, total: float, other: float) -> Split | None:
        """The split of a table that sets the pace, if one brings the costliest rank down.

        ``total`` is the cost of all tables, ``other`` of the costliest other one: it goes to a rank that has no part of
        the table, or beside a group of its columns. Rows give way to it, columns in whole blocks alone.
        """
        costs, table, allowed = self._costs, self._tables.specs[i], self.allowed(i)
        before, blocks = float(self._whole[i]), len(table.block_edges) - 1
        why = self.why(i, total)
        by_rows = np.arange(2, min(len(allowed), table.rows) + 1)
        by_blocks = np.arange(2, min(len(allowed), blocks) + 1)
        largest = np.asarray(-(-blocks // by_blocks), np.float64)
        fixed, widest = float(costs.total(i, 1.0, 0, 0)), costs.total(i, 1.0, largest * (table.dim / blocks), largest)
        parts = costs.total(i, 1 / by_rows, table.dim, blocks)
        rest = total - before
        beside = np.where(by_blocks < self.world_size, np.maximum(widest, other), widest + other)
        column = np.maximum(beside, (total + (by_blocks - 1) * fixed) / self.world_size)
        row = np.maximum(parts, (rest + by_rows * parts) / self.world_size)
        best = min([*column, *row], default=before)
        if best >= WORTH * before:
            return None
        for bounds, counts, near in ((column, by_blocks, NEAR_BY_COLUMNS), (row, by_rows, NEAR)):
            if (close := counts[bounds <= near * best]).size:
                if bounds is column:
                    split = self.by_columns(i, int(close[0]), allowed, why)
                else:
                    chosen = self.choose(i, int(close[0]))
                    split = chosen and self.by_rows(i, *chosen, why)
                if split is not None:
                    return split
        return None


def forced(
    spec: DLRMJobSpec, tables: Tables, costs: Costs, needs: Needs, which: Sequence[int], *, heavy: bool = True
) -> Splitter:
    """The splits that pins and memory ask for; each on ranks of its own choice.

    Args:
        spec: of the job.
        tables: its tables.
        costs: of their shards.
        needs: their bytes, and the room for them.
        which: tables that are placed.
        heavy: also of tables that balance splits anyway: over more ranks than memory alone asks for.
    """
    splitter = Splitter(spec, tables, costs, needs)
    if spec.world_size == 1:
        return splitter
    for i in which:
        splitter.add(i, splitter.as_pinned(i))
    if needs.bounded:
        larger = [i for i in free(splitter, tables, which) if splitter.is_larger(i)]
        rest = sum(needs.held[i] for i in which if i not in splitter.splits) - sum(needs.held[i] for i in larger)
        splitter.reserve = rest / len(needs.room)
        least = _least_heavy(splitter, costs, which)
        for i in sorted(larger, key=lambda i: -needs.held[i]):
            if heavy or costs.whole[i] <= least:
                splitter.add(i, splitter.for_memory(i))
    return splitter


def _least_heavy(splitter: Splitter, costs: Costs, which: Sequence[int]) -> float:
    """What a table costs at most that no balance asks to split: the mean of a rank, or little."""
    return max(float(costs.whole[list(which)].sum()) / splitter.world_size, LEAST_ELEMENTS)


def free(splitter: Splitter, tables: Tables, which: Sequence[int]) -> list[int]:
    """Tables that may be split and are not."""
    return [i for i in which if i not in splitter.splits and may_split(tables.specs[i])]


def split_heaviest(splitter: Splitter, tables: Tables, costs: Costs, which: Sequence[int]) -> dict[int, Split]:
    """Split the tables that alone cost more than the mean of a rank; what splits add counts for the next."""
    whole = costs.whole
    total, least = float(whole[list(which)].sum()), _least_heavy(splitter, costs, which)
    costliest = sorted(which, key=lambda i: -whole[i])[:2]
    for i in sorted(free(splitter, tables, which), key=lambda i: -whole[i]):
        if whole[i] <= least:
            break
        split = splitter.for_balance(
            i, total, max((float(whole[each]) for each in costliest if each != i), default=0.0)
        )
        splitter.add(i, split or (splitter.for_memory(i) if splitter.is_larger(i) else None))
    return splitter.splits


def spread_heaviest(splitter: Splitter, tables: Tables, costs: Costs, which: Sequence[int]) -> dict[int, Split]:
    """Split the same tables over as many ranks as there may be: each then reads and exchanges as much as others."""
    whole, least = costs.whole, _least_heavy(splitter, costs, which)
    total = float(whole[list(which)].sum())
    heaviest = [i for i in free(splitter, tables, which) if whole[i] > least]
    for i in heaviest if len(heaviest) * splitter.world_size <= MOST_PIECES else ():
        splitter.add(i, splitter.widely(i, splitter.why(i, total)))
    return splitter.splits


def spread_all(splitter: Splitter, tables: Tables, costs: Costs, which: Sequence[int]) -> dict[int, Split]:
    """Split every table whose step is long enough by rows over all ranks that it may lie on."""
    whole = costs.whole
    for i in free(splitter, tables, which):
        if whole[i] >= LEAST_ELEMENTS:
            splitter.add(i, splitter.by_rows(i, splitter.allowed(i), "row", EVERYWHERE))
    return splitter.splits


def spread(rows: int, weights: Ranks, caps: Ranks) -> list[int] | None:
    """Rows in proportion to the weights, as far as the caps allow; None where they do not hold all."""
    if int(caps.sum()) < rows:
        return None
    got = np.zeros(len(caps), np.int64)
    while (left := rows - int(got.sum())) > 0:
        open_ = np.flatnonzero(got < caps)
        share = np.floor(left * (weights[open_] / weights[open_].sum())).astype(np.int64)
        share[: left - int(share.sum())] += 1 if not share.any() else 0
        got[open_] = np.minimum(got[open_] + share, caps[open_])
    return got.tolist()


def edges_of(table: TableSpec, kind: ShardKind, sizes: Sequence[int]) -> tuple[int, ...]:
    """Edges of consecutive parts of so many rows, or of so many column blocks."""
    ends = np.cumsum(sizes).tolist()
    return (0, *(table.block_edges[end] if kind == "column" else end for end in ends))


def _even(count: int, parts: int) -> list[int]:
    return [count // parts + (part < count % parts) for part in range(parts)]


def _row_split(ranks: Ranks, sizes: Sequence[int], kind: ShardKind, why: str) -> Split | None:
    """Consecutive ranges of these sizes; ranks without rows hold no shard. None where one rank holds all."""
    held = [(rank, size) for rank, size in zip(ranks.tolist(), sizes, strict=True) if size]
    if len(held) < 2:
        return None
    edges = (0, *np.cumsum([size for _, size in held]).tolist())
    return Split(kind=kind, ranks=tuple(rank for rank, _ in held), edges=edges, why=why)
