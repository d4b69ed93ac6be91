"""Runs of embeddings with unique tables: ranks, lookups ahead, maintenance, and snapshots in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.keys import COUNT_WORDS, KEY_BITS
from dlrm_api.model import ModelSpec
from dlrm_api.plan import Plan, RankPlan, ShardRange, TablePlan, TierLevel, TierShare
from dlrm_api.tiers import Tier
from dlrm_api.training import RowOptimizerSpec
from dlrm_checkpointer import CutWithdrawnError, SnapshotName
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_checkpointer.types import ShardRows, load_rows
from dlrm_testing.trainer.cutting import MemoryCut
from dlrm_testing.trainer.reference import Bag, slice_of
from dlrm_testing.trainer.unique_tables import Batch as Keys
from dlrm_testing.trainer.unique_tables import Shape
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import EmbeddingOptions, Embeddings, place
from dlrm_trainer.embedding.checkpoint import LocalPart, ResidentPart, UniquePart, part_meta
from dlrm_trainer.embedding.collection import CheckpointView
from dlrm_trainer.embedding.copy_before_update import CopyBeforeUpdate
from dlrm_trainer.embedding.unique import MaintenancePeriod, UniquePolicy
from dlrm_trainer.metrics.tiers import RankCounters, SharedCounters
from dlrm_trainer.train import prepared_ahead

SAMPLES, STEPS, PERIOD, SEED = 12, 24, 4, 5
ROWS, BUCKETS = {"whole": 24, "split": 40, "half": 24}, 4
ROW_FIELDS = "row_ids", "rows", "state"
SIGHTS = "half:sights"
"""Table of counters in runs that are rated."""
STATE_VALUES = 1
"""Of row-wise Adagrad."""
OPTIMIZER = RowOptimizerSpec(learning_rate=0.1)
WIDTH = (1 << KEY_BITS) // BUCKETS


RATED = {
    "whole": {
        "admission": {"probability": 0.8},
        "eviction": {"keep": "frequent", "halfLifeSamples": 96, "maxAgeSamples": [36, 120]},
        "unknown": "shared",
        "sharedRows": 12,
    },
    "split": {"eviction": {"keep": "useful", "halfLifeSamples": 1_000}, "unknown": "shared", "sharedRows": 8},
    "half": {"admission": {"count": 3}, "eviction": {"maxAgeSamples": [60]}, "unknown": "shared", "sharedRows": 4},
}
"""Options of tables from which rows leave by scores and ages, and whose ids without a row share some."""


def model(*, rated: bool = False, keep: float | None = None) -> ModelSpec:
    """Two features of a table, weights, two types of rows, and a fixed table beside them.

    ``keep``: rows of fp32 tables have several sizes, or only that of all columns if it is 1.
    """
    whole = {"name": "whole", "rows": 24, "dim": 8, "maxLookups": 3, "features": ["a", "b"], "weights": ["x", "y"]}
    tables = [
        whole,
        {"name": "split", "rows": 40, "dim": 8, "maxLookups": 4},
        {"name": "half", "rows": 24, "dim": 4, "dtype": "fp16", "maxLookups": 2},
    ]
    for table in tables:
        options = RATED[str(table["name"])] if rated else {}
        table["embedding"] = {"hash": "unique", "buckets": BUCKETS, **options}
        if keep is not None and "dtype" not in table:
            table["embedding"]["dimension"] = {"keepBytes": keep, "sizes": [8] if keep == 1 else []}
    tables.append({"name": "fixed", "rows": 30, "dim": 8})
    return ModelSpec.model_validate({"topMlp": [1], "interaction": "dcn", "tables": tables})


def shape(table: str, *, rated: bool = False) -> Shape:
    (spec,) = (each for each in model(rated=rated).all_tables() if each.name == table)
    return Shape(BUCKETS, ROWS[table] // BUCKETS, WIDTH, PERIOD, UniquePolicy.of(spec, SAMPLES))


@dataclass(frozen=True)
class RunOptions:
    lookahead: int = 0
    tiers: tuple[Tier, ...] = ()
    """Of all rows; none: resident."""
    folder: Path | None = None
    """For the tiers."""
    cut_seed: int | None = None
    """Of cuts at random steps, copied while training continues; None: no cuts."""
    rated: bool = False
    keep: float | None = None
    """See ``model``."""


def levels(tiers: Sequence[Tier], rows: int) -> TierShare:
    """Few rows above the last level, so that rows move."""
    if not tiers:
        return TierShare()
    above = [max(1, rows // 4)] * (len(tiers) - 1)
    return TierShare(
        levels=tuple(
            TierLevel(tier=tier, rows=count) for tier, count in zip(tiers, [*above, rows - sum(above)], strict=True)
        )
    )


def plan(spec: ModelSpec, world_size: int, options: RunOptions) -> Plan:
    tables = []
    for number, table in enumerate(spec.all_tables()):
        end = BUCKETS if table.is_unique else table.rows
        edges = [end * rank // world_size for rank in range(world_size + 1)] if table.name == "split" else [0, end]
        shards = tuple(
            ShardRange(
                rank=rank if table.name == "split" else number % world_size,
                kind="row" if table.name == "split" else "table",
                row_start=start,
                row_end=stop,
                column_start=0,
                column_end=table.dim,
                tiers=levels(options.tiers, (stop - start) * table.unit_rows),
            )
            for rank, (start, stop) in enumerate(pairwise(edges))
        )
        buckets = BUCKETS if table.is_unique else 0
        tables.append(TablePlan(name=table.name, column_blocks=(0, table.dim), buckets=buckets, ranges=shards))
    return Plan(
        world_size=world_size,
        processes_per_node=world_size,
        ranks=tuple(RankPlan(rank=rank, node=0, bytes_per_tier={}) for rank in range(world_size)),
        tables=tuple(tables),
        lookahead=options.lookahead,
        handoff_bytes=(2**26,),
    )


@cache
def batch(number: int) -> list[list[Bag]]:
    """A drifting stream: most lookups are of few keys, which change. It is the same for all models."""
    spec = model()
    random, tables = np.random.default_rng(number), spec.all_tables()
    found = []
    for feature in spec.all_features():
        table = tables[feature.table]
        keys = np.random.default_rng(feature.table).integers(0, 2**63 - 1, 200)
        bags: list[Bag] = []
        for _ in range(SAMPLES):
            places = np.minimum(random.geometric(0.06, random.integers(0, table.max_lookups + 1)) + 3 * number, 199)
            ids = keys[places] if table.is_unique else random.integers(0, table.rows, len(places))
            weights = random.normal(size=len(ids)) if feature.weights else np.ones(len(ids))
            bags.append(list(zip(ids.tolist(), weights.astype(np.float32).tolist(), strict=True)))
        found.append(bags)
    return found


def keys_of(spec: ModelSpec, table: str) -> list[list[Keys]]:
    """The keys of a table that each feature of each batch looks up."""
    numbers = [number for number, each in enumerate(spec.all_features()) if spec.all_tables()[each.table].name == table]
    return [
        [[key for bag in batch(number)[feature] for key, _ in bag] for feature in numbers] for number in range(STEPS)
    ]


@dataclass(frozen=True)
class TableRows:
    """Held rows of a table on one rank; (n,) each, ascending by key."""

    keys: NDArray[np.int64]
    values: NDArray[np.uint32]
    """(n, V) bits of ``TableMeta.row_values``."""
    weight: NDArray[np.float32]
    state: NDArray[np.float32]


@dataclass(frozen=True)
class UniqueRun:
    states: list[dict[str, TableRows]]
    """After each step."""
    periods: list[MaintenancePeriod]
    """After each step."""
    without_row: int
    features: NDArray[np.float32]
    """Of an evaluation of batch 0 after the last step."""
    counters: NDArray[np.int64]
    """Block of ``RankCounters`` after it."""
    cuts: int = 0
    """Tables of cuts that hold what they must."""
    gone: int = 0
    """Keys of these cuts that are gone."""


def tables_of(rated: bool) -> tuple[str, ...]:
    """Tables of which runs have rows: those of counters and shared rows too."""
    return (*ROWS, SIGHTS, *(f"{table}:shared" for table in ROWS)) if rated else tuple(ROWS)


def has_state(part: LocalPart) -> bool:
    """Tell whether runs show a part's rows."""
    return isinstance(part, UniquePart) or (isinstance(part, ResidentPart) and bool(part.counts_of or part.shared_of))


def rows_of(part: LocalPart) -> TableRows:
    pieces = list(map(load_rows, part.held()))
    if not pieces:
        shape = (0, part.shard.width), (0, part.state_values)
        return table_rows(np.empty(0, np.int64), *(np.empty(each, np.float32) for each in shape))
    return table_rows(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in ROW_FIELDS))


def table_rows(keys: NDArray[np.int64], weight: NDArray[np.float32], state: NDArray[np.float32]) -> TableRows:
    """Rows of cuts, in any order; counters that never counted, and shared rows never updated, are left out."""
    if state.shape[1] in (COUNT_WORDS, STATE_VALUES):
        order = np.flatnonzero(state.any(axis=1))
        order = order[np.argsort(keys[order])]
        return TableRows(keys[order], np.empty((len(order), 0), np.uint32), weight[order], state[order])
    order = np.argsort(keys)
    values = np.ascontiguousarray(state[order, STATE_VALUES:]).view(np.uint32)
    return TableRows(keys[order], values, weight[order], state[order, :STATE_VALUES])


def equal(a: TableRows, b: TableRows) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("keys", "values", "weight", "state"))


class CutChain:
    """Cut at random steps, copy little by little, lose some cuts, and check that each chain holds its step's rows."""

    def __init__(self, saved: CheckpointView, seed: int) -> None:
        self._saved, self._draw = saved, np.random.default_rng(seed)
        self._segment_rows = None if self._draw.random() < 0.5 else int(self._draw.integers(20, 60))
        self._stored: dict[int, tuple[int | None, MemoryCut]] = {}
        self._newest: int | None = None
        self._cut: MemoryCut | None = None
        self._copying: CopyBeforeUpdate | None = None
        self._wanted: dict[str, TableRows] = {}
        self.checked = self.gone = 0

    def after_step(self, step: int, *, last: bool) -> None:
        if self._copying is None and (last or self._draw.random() < 0.5):
            self._begin(step)
        if self._copying is None:
            return
        assert self._cut is not None
        try:
            amount = None if last else int(self._draw.choice([0, 300, 1_000, 5_000]))
            while not (done := self._copying.copy(amount)) and last:
                self._cut.is_stored = True
            self._cut.is_stored = bool(self._draw.random() < 0.7)
            if done:
                self._end(self._copying.step)
        except CutWithdrawnError:
            self._saved.end_copying()
            self._copying = None

    def _begin(self, step: int) -> None:
        self._parent = None if self._draw.random() < 0.2 else self._newest
        if self._parent is not None and self._parent < self._saved.first_parent:
            self._parent = None
        self._saved.begin_cut(step, self._parent)
        self._wanted = {part.table.name: rows_of(part) for part in self._saved if has_state(part)}
        self._cut = MemoryCut(self._segment_rows)
        self._cut.name = SnapshotName(step, 1)
        self._copying = self._saved.begin_copying(self._cut)
        if self._draw.random() < 0.5:
            # As the thread does first: updates then copy rows to their places.
            while self._copying._unlaid and self._copying._lay():
                pass

    def _end(self, step: int) -> None:
        self._saved.end_copying()
        self._copying = None
        assert self._cut is not None
        self.gone += sum(len(rows.row_ids) for rows in self._cut.gone)
        self._stored[step] = self._parent, self._cut
        for table, wanted in self._wanted.items():
            merged = self._merged(step, table)
            assert len(wanted.keys) == 0 if merged is None else equal(merged, wanted)
            self.checked += 1
        if self._draw.random() < 0.7:
            self._newest = step

    def _merged(self, step: int | None, table: str) -> TableRows | None:
        """Rows of a chain: of each key that its newest cut has, unless it is gone there. None: no cut has any."""
        pieces: list[tuple[NDArray[np.int64], ShardRows]] = []
        seen = np.empty(0, np.int64)
        while step is not None:
            step, cut = self._stored[step]
            here = [piece for piece in cut.pieces if piece.shard.table == table]
            pieces += [(np.flatnonzero(~np.isin(piece.row_ids, seen)), piece) for piece in here]
            gone = [rows.row_ids for rows in cut.gone if rows.shard.table == table]
            named = np.concatenate([np.empty(0, np.int64), *gone, *(piece.row_ids for piece in here)])
            assert len(np.unique(named)) == len(named)
            seen = np.union1d(seen, named)
        if not pieces:
            return None
        return table_rows(
            *(np.concatenate([getattr(piece, name)[chosen] for chosen, piece in pieces]) for name in ROW_FIELDS)
        )


def train_unique(
    collectives: Collectives,
    chosen: RunOptions,
    stop: int = STEPS,
    saved: Mapping[str, Sequence[TableRows]] | None = None,
    first: int = 0,
    period: MaintenancePeriod | None = None,
) -> UniqueRun:
    """Train some steps on one rank, from rows of all ranks on. The gradient depends on the samples alone."""
    spec, rank, size = model(rated=chosen.rated, keep=chosen.keep), collectives.rank, collectives.world_size
    folder = chosen.folder / str(rank) if chosen.folder else None
    options = EmbeddingOptions(optimizer=OPTIMIZER, seed=SEED, global_batch_size=SAMPLES, tier_dir=folder)
    planned = plan(spec, size, chosen)
    placement = place(spec, planned, size)
    embeddings = Embeddings(placement, collectives, options)
    for part in embeddings.local:
        part.start(SEED)
        if saved is not None and has_state(part):
            restore(part, saved[part.table.name])
    chain = None if chosen.cut_seed is None else CutChain(embeddings.saved, chosen.cut_seed)
    edges: list[int] = [SAMPLES * each // size for each in range(size + 1)]
    states: list[dict[str, TableRows]] = []
    batches = (slice_of(spec, batch(number), edges, rank) for number in range(first, stop))
    numbered = (type(each)(**{**vars(each), "number": number}) for number, each in enumerate(batches, first))
    buffer, without_row = torch.zeros(embeddings.gradient_elements), 0
    period = period or MaintenancePeriod.begin(PERIOD, None)
    embeddings.begin_period(period)
    periods = []
    for prepared in prepared_ahead(
        numbered,
        embeddings.send,
        lambda sent: embeddings.prepare(sent.result(), updates=True),
        depth=chosen.lookahead,
        may_prepare=lambda number: first + number < ((first + len(states)) // PERIOD + 1) * PERIOD,
    ):
        step = first + len(states) + 1
        pooled = embeddings.pool(prepared)
        width = embeddings.features(pooled).shape[1]
        gradient = torch.from_numpy(np.random.default_rng(step).normal(size=(SAMPLES, width)).astype(np.float32))
        embeddings.update(embeddings.send_gradients(pooled, gradient[edges[rank] : edges[rank + 1]], buffer), 0.1)
        if step % PERIOD == 0:
            without_row += embeddings.lookups.without_row
            period = embeddings.maintain(step, period)
        embeddings.settle()
        periods.append(period)
        states.append({part.table.name: rows_of(part) for part in embeddings.local if has_state(part)})
        if chain is not None:
            chain.after_step(step, last=step == stop)
    evaluated = slice_of(spec, batch(0), edges, rank)
    pooled = embeddings.pool(embeddings.prepare(embeddings.send(evaluated).result(), updates=False))
    features = embeddings.features(pooled).numpy()
    counters = RankCounters(placement, rank, SharedCounters(planned, [rank]).blocks[rank])
    counters.copy_from(embeddings.tables)
    embeddings.close()
    return UniqueRun(
        states, periods, without_row, features, counters.block, *((chain.checked, chain.gone) if chain else ())
    )


def restore(part: LocalPart, saved: Sequence[TableRows]) -> None:
    """Give a part the rows of its keys, as restores from snapshots at 32 bits do."""
    for rows in saved:
        chosen = (part.shard.row_start <= rows.keys) & (rows.keys < part.shard.row_end)
        if not chosen.any():
            continue
        state = np.concatenate([rows.state[chosen], rows.values[chosen].view(np.float32)], axis=1)
        piece = ShardRows(shard=part.shard, row_ids=rows.keys[chosen], rows=rows.weight[chosen], state=state)
        assert len(part_meta(part, "rowwise-adagrad").row_values) == rows.values.shape[1]
        part.restore(code_rows(piece, 32))


def joined(runs: Sequence[UniqueRun], step: int, table: str) -> TableRows:
    """Rows of a table of all ranks after a step, counted from the runs' first."""
    parts = [run.states[step][table] for run in runs if table in run.states[step]]
    keys = np.concatenate([part.keys for part in parts])
    order = np.argsort(keys)
    fields = (np.concatenate([getattr(part, name) for part in parts])[order] for name in ("values", "weight", "state"))
    return TableRows(keys[order], *fields)
