"""A model with tables of unique ids, kept in dictionaries, and its cuts without processes or a hand-off directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.keys import KEY_END
from dlrm_checkpointer.codec.digest import rows_digest, state_digest, table_digest
from dlrm_checkpointer.handoff.protocol import CutName, Durable
from dlrm_checkpointer.types import CutMeta, GoneRows, ShardId, ShardRows, SnapshotName, TableMeta
from dlrm_checkpointer.write.commit import try_commit
from dlrm_checkpointer.write.policy import ChainPolicy
from dlrm_checkpointer.write.upload import Upload, WritePlanner
from dlrm_testing.checkpointer.fixtures import Model, table


def unique_table(
    name: str = "ids",
    *,
    rows: int = 500,
    dim: int = 8,
    buckets: int = 8,
    state: int = 1,
    has_scores: bool = False,
    sizes: tuple[int, ...] = (),
) -> TableMeta:
    """Return a table of unique ids."""
    return TableMeta(
        name=name,
        rows=rows,
        dim=dim,
        seed=7,
        scale=0.25,
        column_blocks=((0, dim),),
        state_columns=(state,),
        ids="unique",
        buckets=buckets,
        row_values=("touched", *["score"][: int(has_scores)], *["utility"][: len(sizes)]),
        sizes=sizes,
    )


COUNTERS = replace(table("ids:sights", 20, 4, scale=0, state=16), counts_of="ids")
"""Counters of a table of unique ids."""
SHARED = replace(table("ids:shared", 40, 8), shared_of="ids")
"""Rows that ids without a row of it share."""
UNIQUE_TABLES = (unique_table(), table("users", 60, 4), unique_table("scored", rows=100, dim=4, has_scores=True))
SIZED_TABLES = (table("pruned", 60, 12, sizes=(3, 6, 12)), unique_table("both", dim=9, has_scores=True, sizes=(4, 9)))
"""Tables with rows of several sizes."""


@dataclass
class Row:
    """Hold a row of a table of unique ids."""

    weights: NDArray[np.float32]
    state: NDArray[np.float32]
    """Optimizer state, the step of the last touch as the bits of a float, maybe a score, a utility, and the columns."""
    touched: int


@dataclass
class UniqueModel(Model):
    """Hold the logical state as a trainer of one rank would; rows of unique tables by key."""

    tables: tuple[TableMeta, ...] = UNIQUE_TABLES
    by_key: dict[str, dict[int, Row]] = field(default_factory=dict)
    gone_at: dict[str, dict[int, int]] = field(default_factory=dict)
    """Step at which a key left last."""

    def __post_init__(self) -> None:
        every, self.tables = self.tables, tuple(each for each in self.tables if not each.is_unique)
        super().__post_init__()
        self.fixed, self.tables = self.tables, every
        for each in every:
            if each.is_unique:
                self.by_key[each.name], self.gone_at[each.name] = {}, {}

    def train(self, steps: int = 1) -> UniqueModel:
        """Train fixed tables as ``Model``; a few random keys of unique ones are updated, and a few leave."""
        every = self.tables
        for _ in range(steps):
            self.tables = self.fixed
            super().train()
            self.tables = every
            draw = np.random.default_rng(self.step)
            for name, rows in self.by_key.items():
                self.remove(name, draw.permutation(sorted(rows))[: len(rows) // 4].tolist())
                self.update(name, draw.integers(0, KEY_END, 20).tolist())
        return self

    def update(self, name: str, keys: Iterable[int]) -> None:
        """Update rows in the current step; keys without a row get one."""
        meta = next(each for each in self.tables if each.name == name)
        for key in keys:
            draw = np.random.default_rng([self.step, key])
            (own,) = meta.state_columns
            state = np.full(meta.state_width, key % 97 / 7, np.float32)
            state[:own] = draw.random(own)
            state.view(np.uint32)[own] = self.step
            weights = draw.normal(size=meta.dim).astype(np.float32)
            if meta.sizes:
                columns = draw.choice(meta.sizes)
                weights[columns:], state.view(np.uint32)[-1] = 0, columns
            self.by_key[name][key] = Row(weights, state, self.step)

    def remove(self, name: str, keys: Iterable[int]) -> None:
        """Remove rows."""
        for key in keys:
            del self.by_key[name][key]
            self.gone_at[name][key] = self.step

    def shards(self, rank: int, world_size: int) -> list[ShardId]:
        """Return rows cut evenly, unique tables between buckets."""
        every, self.tables = self.tables, self.fixed
        found = super().shards(rank, world_size)
        self.tables = every
        for each in every:
            if each.is_unique:
                width = 2**63 // each.buckets
                first, last = (each.buckets * number // world_size * width for number in (rank, rank + 1))
                if last > first:
                    found.append(ShardId(each.name, first, min(last, KEY_END), 0, each.dim))
        return found

    def pieces(self, rank: int, world_size: int, parent: SnapshotName | None = None) -> Iterator[ShardRows]:
        """Yield rows that changed since the parent; those of unique tables in no order, in two pieces."""
        every, self.tables = self.tables, self.fixed
        yield from super().pieces(rank, world_size, parent)
        self.tables = every
        since = -1 if parent is None else parent.step
        for shard in self.shards(rank, world_size):
            if shard.table not in self.by_key:
                continue
            rows = self.by_key[shard.table]
            keys = [key for key in rows if shard.row_start <= key < shard.row_end and rows[key].touched > since]
            shuffled = np.random.default_rng(self.step).permutation(np.array(keys, np.int64))
            for part in np.array_split(shuffled, 2):
                yield self._piece(shard, part)

    def _piece(self, shard: ShardId, keys: NDArray[np.int64]) -> ShardRows:
        meta = next(each for each in self.tables if each.name == shard.table)
        found = [self.by_key[shard.table][key] for key in keys.tolist()]
        return ShardRows(
            shard=shard,
            row_ids=keys,
            rows=np.array([row.weights for row in found], np.float32).reshape(-1, meta.dim),
            state=np.array([row.state for row in found], np.float32).reshape(-1, meta.state_width),
        )

    def gone(self, rank: int, world_size: int, parent: SnapshotName | None = None) -> Iterator[GoneRows]:
        """Yield keys that left since the parent."""
        for shard in self.shards(rank, world_size):
            left = self.gone_at.get(shard.table, {}) if parent is not None else {}
            inside = (key for key in left if shard.row_start <= key < shard.row_end)
            keys = [key for key in inside if left[key] > parent.step and key not in self.by_key[shard.table]]
            yield GoneRows(shard=shard, row_ids=np.array(keys[::-1], np.int64))

    def digest(self) -> str:
        """Return the digest of the state."""
        tables = []
        for each in self.tables:
            if not each.is_unique:
                ids, rows, state = np.arange(each.rows), self.rows[each.name], self.state[each.name]
            else:
                ids = np.array(sorted(self.by_key[each.name]), np.int64)
                piece = self._piece(each.whole(), ids)
                rows, state = piece.rows, piece.state
            tables.append((each.name, table_digest([rows_digest(each, ids, 0, rows, state)])))
        return state_digest(tables, self.dense)


def served(model: UniqueModel) -> dict[int, bytes]:
    """Return the weights of the table ``ids`` by key."""
    return {key: row.weights.tobytes() for key, row in model.by_key["ids"].items()}


@dataclass
class LooseCut:
    """Stand in for a ``ReadyCut``: a rank's part of a cut that no hand-off directory holds."""

    name: CutName
    meta: CutMeta
    owned: list[ShardId]
    rows: list[ShardRows]
    keys: list[GoneRows]
    arrays: dict[str, NDArray[Any]] | None
    number: int = 0

    def pieces(self) -> Iterator[ShardRows]:
        """Yield the rows."""
        yield from (piece for piece in self.rows if len(piece.row_ids))

    def gone(self) -> Iterator[GoneRows]:
        """Yield the keys that left."""
        yield from (piece for piece in self.keys if len(piece.row_ids))

    def dense(self) -> dict[str, NDArray[Any]] | None:
        """Return the dense state."""
        return self.arrays


def commit(
    store: Any,
    model: UniqueModel,
    parent: SnapshotName | None,
    *,
    world_size: int = 1,
    policy: Any = "consecutive",
    bits: Any = 32,
    attempt: int = 1,
    segments: Sequence[int] = (),
) -> SnapshotName:
    """Commit the state of a model as the sidecars of a gang do; segments are pieces of rank 0 that go first."""
    chains = ChainPolicy(name=policy, base_every_s=None, max_chain=24, max_restore_s=None, restore_bytes_per_s=1e8)
    for rank in range(world_size):
        meta = model.meta(world_size, attempt, parent)
        cut = LooseCut(
            name=CutName(meta.step, attempt, rank),
            meta=meta,
            owned=model.shards(rank, world_size),
            rows=list(model.pieces(rank, world_size, parent)),
            keys=list(model.gone(rank, world_size, parent)),
            arrays=model.dense if rank == 0 else None,
        )
        planner = WritePlanner(store, bits, 3, chains)
        plan, before = planner.of(cut), Durable()
        for number in segments if rank == 0 else ():
            rows, keys = cut.rows[:number], cut.keys[:number]
            cut.rows, cut.keys = cut.rows[number:], cut.keys[number:]
            part = LooseCut(cut.name, meta, cut.owned, rows, keys, None, before.slices)
            before = Durable.unpack(_upload(store, part, before, plan).run_slice().pack())
        _upload(store, cut, before, plan).run()
    assert try_commit(store, meta.step, attempt, world_size)
    return SnapshotName(meta.step, attempt)


def _upload(store: Any, cut: LooseCut, before: Durable, plan: Any) -> Upload:
    return Upload(store, cut, before, plan, on_put=lambda _: None, on_read=lambda _: None)  # type: ignore[arg-type]
