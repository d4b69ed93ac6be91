"""Runs of embeddings whose rows have several sizes, and a replay of them row by row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.model import ModelSpec, TableSpec
from dlrm_api.plan import Plan, RankPlan, ShardRange, TablePlan
from dlrm_api.training import RowOptimizerSpec
from dlrm_checkpointer import CutWithdrawnError, initial_rows, table_scale
from dlrm_checkpointer.codec.digest import PartialDigest, shard_digest
from dlrm_checkpointer.codec.rows import CodedRows, code_rows
from dlrm_checkpointer.types import ShardRows, load_rows
from dlrm_kernels.slabs import BIN_OF_ONE, BINS
from dlrm_testing.trainer.cutting import MemoryCut
from dlrm_testing.trainer.reference import Bag, slice_of
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import EmbeddingOptions, Embeddings, place
from dlrm_trainer.embedding.checkpoint import LocalPart, ResidentPart, SlabPart, part_meta
from dlrm_trainer.embedding.collection import CheckpointView
from dlrm_trainer.embedding.copy_before_update import CopyBeforeUpdate
from dlrm_trainer.embedding.row_sizes import ModelSizes, RowSizes, find_cut_off, sizes_of
from dlrm_trainer.embedding.unique import MaintenancePeriod

SAMPLES, STEPS, PERIOD, SEED, RATE = 12, 40, 4, 5, 0.1
NEVER_TRAINED, UNKNOWN = -1, np.float32(-np.inf)
OPTIMIZER = RowOptimizerSpec(learning_rate=RATE)
Floats = NDArray[np.float32]


def model(keep: float | None = 0.5, sizes: Sequence[int] = ()) -> ModelSpec:
    """Two features of a table, weights, a table split by rows, one with other columns, and one of full rows.

    ``keep``: None: all rows are full.
    """
    tables = [
        {"name": "whole", "rows": 60, "dim": 16, "maxLookups": 3, "features": ["a", "b"], "weights": ["x", "y"]},
        {"name": "split", "rows": 90, "dim": 16, "maxLookups": 4},
        {"name": "wide", "rows": 40, "dim": 24, "maxLookups": 2},
    ]
    for table in tables if keep is not None else []:
        table["embedding"] = {"dimension": {"keepBytes": keep, "sizes": [table["dim"]] if sizes else []}}
    tables.append({"name": "fixed", "rows": 30, "dim": 16})
    return ModelSpec.model_validate({"topMlp": [1], "interaction": "dcn", "tables": tables})


def plan(spec: ModelSpec, world_size: int) -> Plan:
    """Tables on ranks in turn, and one of them split by rows over all."""
    tables = []
    for number, table in enumerate(spec.all_tables()):
        is_split = table.name == "split"
        edges = [table.rows * rank // world_size for rank in range(world_size + 1)] if is_split else [0, table.rows]
        shards = tuple(
            ShardRange(
                rank=rank if is_split else number % world_size,
                kind="row" if is_split else "table",
                row_start=start,
                row_end=stop,
                column_start=0,
                column_end=table.dim,
            )
            for rank, (start, stop) in enumerate(pairwise(edges))
        )
        tables.append(TablePlan(name=table.name, column_blocks=(0, table.dim), ranges=shards))
    return Plan(
        world_size=world_size,
        processes_per_node=world_size,
        ranks=tuple(RankPlan(rank=rank, node=0, bytes_per_tier={}) for rank in range(world_size)),
        tables=tuple(tables),
        handoff_bytes=(2**26,),
    )


def batch(spec: ModelSpec, number: int) -> list[list[Bag]]:
    """Bags of a popularity that drifts, with repeated ids; the same for tables of full rows."""
    random = np.random.default_rng(number)
    found = []
    for feature in spec.all_features():
        table = spec.all_tables()[feature.table]
        bags: list[Bag] = []
        for _ in range(SAMPLES):
            count = random.integers(0, table.max_lookups + 1)
            ids = np.minimum(random.geometric(0.08, count) - 1 + number // 2, table.rows - 1)
            weights = random.normal(size=count) if feature.weights else np.ones(count)
            bags.append(list(zip(ids.tolist(), weights.astype(np.float32).tolist(), strict=True)))
        found.append(bags)
    return found


def gradient_of(step: int, width: int) -> Floats:
    """A gradient that depends on the step alone, of a size that grows with the column."""
    return np.random.default_rng(step).normal(size=(SAMPLES, width)).astype(np.float32) / SAMPLES


@dataclass(frozen=True)
class TableState:
    """Hold all rows of a part of a table."""

    first_row: int
    columns: NDArray[np.int64]
    """``NEVER_TRAINED`` for such rows."""
    rows: Floats
    state: Floats
    """(N, 1)"""
    utilities: Floats


@dataclass(frozen=True)
class Saved:
    """Hold what snapshots of a step hold."""

    step: int
    pieces: list[ShardRows]
    period: MaintenancePeriod

    def of(self, part: LocalPart) -> Iterator[CodedRows]:
        """Return the rows of a part, in chunks of one size each."""
        meta = part_meta(part, OPTIMIZER.kind)
        for piece in self.pieces:
            if piece.shard == part.shard:
                yield from code_rows(piece, 32, table=meta)


@dataclass(frozen=True)
class SizedRun:
    """Hold what a rank saw and had."""

    states: list[dict[str, TableState]]
    """After each step."""
    features: list[Floats]
    """Of this rank's samples in each step, and of an evaluation of batch 0 after the last."""
    cuts: int
    """Tables of cuts that hold what they must."""
    saved: Saved
    """After the last step."""
    digests: list[PartialDigest]
    """Of each part, then."""


def state_of(part: SlabPart | ResidentPart) -> TableState:
    """Read a part; full rows have no utility."""
    count = part.dirty.rows.sizes[part.dirty.number]
    piece = load_rows(part.in_place(np.arange(count)))
    if isinstance(part, ResidentPart):
        full = np.full(count, part.shard.width, np.int64)
        return TableState(part.shard.row_start, full, piece.rows, piece.state, np.full(count, UNKNOWN))
    columns = np.ascontiguousarray(piece.state[:, -1]).view(np.uint32).astype(np.int64)
    untrained = np.ones(count, np.bool_)
    untrained[part.kernel.trained(part.number, 0, count)] = False
    columns[untrained] = NEVER_TRAINED
    return TableState(part.shard.row_start, columns, piece.rows, piece.state[:, :1], piece.state[:, 1])


class CutImages:
    """Cut at random steps, copy little by little, and check that each chain of cuts holds its step's rows."""

    def __init__(self, saved: CheckpointView, seed: int) -> None:
        self._saved, self._draw = saved, np.random.default_rng(seed)
        self._segment_rows = 60 if seed else None
        self._images: dict[str, dict[int, bytes]] = {}
        self._base: dict[str, dict[int, bytes]] = {}
        self._step = 0
        self._parent: int | None = None
        self._cut: MemoryCut | None = None
        self._copying: CopyBeforeUpdate | None = None
        self._wanted: dict[str, dict[int, bytes]] = {}
        self.checked = 0

    def after_step(self, step: int, *, last: bool) -> None:
        """Begin a cut, or go on with the one in progress."""
        if self._copying is None:
            parent = None if self._draw.random() < 0.2 else self._parent
            self._saved.begin_cut(step, parent)
            self._base = {} if parent is None else self._images
            self._wanted = {part.table.name: _image(map(load_rows, part.held())) for part in self._sized()}
            self._cut, self._step = MemoryCut(self._segment_rows), step
            self._copying = self._saved.begin_copying(self._cut)
        assert self._cut is not None
        self._cut.is_stored = True
        # The first rows are copied before any changes.
        if self._step == step or self._draw.random() < 0.4 or last:
            try:
                while not (done := self._copying.copy()) and last:
                    self._cut.is_stored = True
            except CutWithdrawnError:
                self._saved.end_copying()
                self._copying = None
                return
            if done:
                self._end()

    def _end(self) -> None:
        assert self._cut is not None
        self._saved.end_copying()
        self._copying = None
        for table, wanted in self._wanted.items():
            found = _image(piece for piece in self._cut.pieces if piece.shard.table == table)
            self._base[table] = self._base.get(table, {}) | found
            assert self._base[table] == wanted
            self.checked += 1
        self._images, self._parent = self._base, self._step

    def _sized(self) -> list[SlabPart]:
        return [part for part in self._saved if isinstance(part, SlabPart)]


def _image(pieces: Iterable[ShardRows]) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for piece in pieces:
        for row, values, state in zip(piece.row_ids.tolist(), piece.rows, piece.state, strict=True):
            assert row not in found
            found[row] = values.tobytes() + state.tobytes()
    return found


def train_sized(
    collectives: Collectives,
    spec: ModelSpec,
    steps: int = STEPS,
    cut_seed: int | None = None,
    saved: Saved | None = None,
) -> SizedRun:
    """Train up to a step on one rank, from the start or what ``saved`` holds; ``cut_seed``: with cuts.

    The gradient depends on the samples alone.
    """
    rank, size = collectives.rank, collectives.world_size
    options = EmbeddingOptions(optimizer=OPTIMIZER, seed=SEED, global_batch_size=SAMPLES, tier_dir=None)
    embeddings = Embeddings(place(spec, plan(spec, size), size), collectives, options)
    for part in embeddings.local:
        part.start(SEED)
        if saved is not None:
            part.restore(saved.of(part))
    edges = [SAMPLES * each // size for each in range(size + 1)]
    first = 0 if saved is None else saved.step
    period = MaintenancePeriod.begin(PERIOD, None if saved is None else saved.period.model_dump())
    embeddings.begin_period(period)
    cuts = None if cut_seed is None else CutImages(embeddings.saved, cut_seed)
    states, found, buffer = [], [], torch.zeros(embeddings.gradient_elements)
    for number in range(first, steps):
        each = slice_of(spec, batch(spec, number), edges, rank)
        each = type(each)(**{**vars(each), "number": number})
        pooled = embeddings.pool(embeddings.prepare(embeddings.send(each).result(), updates=True))
        found.append(embeddings.features(pooled).numpy().copy())
        gradient = torch.from_numpy(gradient_of(number, found[-1].shape[1])[edges[rank] : edges[rank + 1]])
        embeddings.update(embeddings.send_gradients(pooled, gradient, buffer), RATE)
        if (number + 1) % PERIOD == 0:
            period = embeddings.maintain(number + 1, period)
        states.append(
            {part.table.name: state_of(part) for part in embeddings.local if isinstance(part, SlabPart | ResidentPart)}
        )
        if cuts is not None:
            cuts.after_step(number + 1, last=number + 1 == steps)
    evaluated = slice_of(spec, batch(spec, 0), edges, rank)
    pooled = embeddings.pool(embeddings.prepare(embeddings.send(evaluated).result(), updates=False))
    found.append(embeddings.features(pooled).numpy().copy())
    held = [load_rows(piece) for part in embeddings.saved for piece in part.held()]
    digests = [shard_digest(part_meta(part, OPTIMIZER.kind), part.shard, part.read_block) for part in embeddings.saved]  # type: ignore[union-attr]
    embeddings.close()
    return SizedRun(states, found, 0 if cuts is None else cuts.checked, Saved(steps, held, period), digests)


@dataclass
class Row:
    """Hold a row in float64."""

    values: NDArray[np.float64]
    total: float
    utility: float
    step: int

    @property
    def columns(self) -> int:
        """Return how many columns it has."""
        return len(self.values)


@dataclass
class ReplayTable:
    """Replay a table row by row."""

    table: TableSpec
    sizes: RowSizes
    rows: dict[int, Row] = field(default_factory=dict)
    start_class: int = 0

    def initial(self, row: int) -> NDArray[np.float64]:
        """Return all columns of a row that was never trained."""
        scale = table_scale(self.table.initializer, self.table.rows)
        return initial_rows(SEED, self.table.name, np.array([row]), range(self.table.dim), scale)[0].astype(np.float64)

    def update(
        self, gradients: Mapping[int, NDArray[np.float64]], lookups: Mapping[int, int], at: tuple[int, float]
    ) -> None:
        """Update rows by the sums of their gradients, after a step and with a half-life."""
        step, half_life = at
        for id_, gradient in gradients.items():
            if id_ not in self.rows:
                begun = self.initial(id_)[: self.sizes.sizes[self.start_class - 1]]
                self.rows[id_] = Row(begun, 0.0, 0.0, step)
            row = self.rows[id_]
            decayed = row.utility * 2.0 ** ((row.step - step) / half_life)
            row.utility = max(decayed + lookups[id_] * SAMPLES * float(np.linalg.norm(gradient)), 2.0**-100)
            row.step = step
            if row.columns:
                held = gradient[: row.columns]
                row.total += float((held**2).mean())
                row.values = row.values - RATE / (np.sqrt(row.total) + OPTIMIZER.eps) * held

    def bins(self, step: int, half_life: float) -> Iterator[tuple[Row, int, int]]:
        """Iterate over rows with their class, and the bin of their utility at a step."""
        for row in self.rows.values():
            octaves = np.log2(row.utility) + (row.step - step) / half_life
            at = int(np.clip(np.floor(8 * octaves) + BIN_OF_ONE, 0, BINS - 1))
            yield row, (0, *self.sizes.sizes).index(row.columns), at


class Replay:
    """Replay a model's tables of several sizes."""

    def __init__(self, spec: ModelSpec) -> None:
        sizes = ModelSizes.of(spec.all_tables(), OPTIMIZER.kind, SAMPLES, 0)
        assert sizes is not None
        self.spec, self.sizes = spec, sizes
        self.tables = [
            ReplayTable(table, sizes_of(table, OPTIMIZER.kind)) if table.has_sizes else None
            for table in spec.all_tables()
        ]
        self._last = [0] * len(sizes.kinds)
        self.moved = self.lowered = 0
        self._start(0, sizes.new_rows(self._last, None, PERIOD, PERIOD))

    def step(self, number: int) -> None:
        """Update the rows of a batch, and resize rows where a maintenance is due."""
        features, start = batch(self.spec, number), 0
        tables, half_life = self.spec.all_tables(), float(self.sizes.half_life)
        gradient = gradient_of(number, sum(tables[each.table].dim for each in self.spec.all_features()))
        sums: list[dict[int, NDArray[np.float64]]] = [{} for _ in tables]
        lookups: list[dict[int, int]] = [{} for _ in tables]
        for feature, bags in zip(self.spec.all_features(), features, strict=True):
            stop, table = start + tables[feature.table].dim, feature.table
            for bag, each in zip(bags, gradient[:, start:stop].astype(np.float64), strict=True):
                for id_, weight in bag:
                    sums[table][id_] = sums[table].get(id_, np.zeros(stop - start)) + weight * each
                    lookups[table][id_] = lookups[table].get(id_, 0) + 1
            start = stop
        for replayed, summed, looked_up in zip(self.tables, sums, lookups, strict=True):
            if replayed is not None:
                replayed.update(summed, looked_up, (number + 1, half_life))
        if (number + 1) % PERIOD == 0:
            self._maintain(number + 1, half_life)

    def _maintain(self, step: int, half_life: float) -> None:
        held = self._held()
        came = [sum(here) - before for here, before in zip(held, self._last, strict=True)]
        new_rows = self.sizes.new_rows(list(map(sum, held)), came, PERIOD, PERIOD)
        coming = self.sizes.bytes_of_new(new_rows)
        if self.sizes.is_due(step, step - PERIOD, PERIOD, self._used(held) + coming):
            self._resize(step, half_life, self.sizes.budget_before(new_rows))
            held = self._held()
        self._last = list(map(sum, held))
        self._start(self._used(held), new_rows)

    def _start(self, used: int, new_rows: list[int]) -> None:
        steps_down = self.sizes.steps_down(used, new_rows)
        self.lowered += steps_down > 0
        for table in filter(None, self.tables):
            table.start_class = table.sizes.start_class(steps_down)

    def _used(self, held: list[list[int]]) -> int:
        return self.sizes.bytes_of([rows for kind in held for rows in kind])

    def _held(self) -> list[list[int]]:
        """Return the rows of each class, class 0 left out, of each kind."""
        found = [[0] * (len(kind.sizes) + 1) for kind in self.sizes.kinds]
        for table in filter(None, self.tables):
            for row in table.rows.values():
                if row.columns:
                    found[self.sizes.kinds.index(table.sizes)][table.sizes.sizes.index(row.columns) + 1] += 1
        return found

    def _resize(self, step: int, half_life: float, budget: int) -> None:
        counts = [np.zeros((len(kind.sizes) + 1, BINS), np.int64) for kind in self.sizes.kinds]
        for table in filter(None, self.tables):
            for _, present, at in table.bins(step, half_life):
                counts[self.sizes.kinds.index(table.sizes)][present, at] += 1
        cut_off = find_cut_off(self.sizes.kinds, counts, budget)
        for table in filter(None, self.tables):
            targets = table.sizes.targets(cut_off)
            for row, present, at in table.bins(step, half_life):
                columns = (0, *table.sizes.sizes)[targets[present, at]]
                self.moved += columns != row.columns
                grown = np.zeros(max(0, columns - row.columns))
                row.values = np.concatenate([row.values[:columns], grown])
                row.total = row.total if columns else 0.0
