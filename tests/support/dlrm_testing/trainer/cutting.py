"""Training that cuts at every step, and what each cut must hold: all that was looked up since its parent, as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_checkpointer import CutRows, CutRowSource, CutWithdrawnError, GoneRows, ShardId, ShardRows, load_rows
from dlrm_checkpointer.types import copy_rows
from dlrm_testing.trainer.gangs import small_job
from dlrm_trainer.data import Batch, open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.changes import MAX_KEPT
from dlrm_trainer.embedding.checkpoint import LocalPart
from dlrm_trainer.learner import Learner
from dlrm_trainer.train import prepared_ahead

Block = tuple[NDArray[np.float32], NDArray[np.float32]]
"""Rows and their state."""
NOT_FILLED = -7.0
TIERS = [(), ("ddr", "scm"), ("ddr", "block"), ("ddr", "ddr", "scm", "block")]
"""Of the rectangles of a plan; none: all rows are resident."""


def job_of(folder: Path, world_size: int = 1, kind: str = "rowwise-adagrad") -> DLRMJob:
    """Blocks, several features of a table, weights, both types of rows."""
    tables = [
        {"name": "users", "rows": 900, "dim": 16, "columnBlock": 8, "features": ["u", "v"]},
        {"name": "bags", "rows": 120, "dim": 16, "columnBlock": 4, "pooling": "mean", "maxLookups": 4, "avgLookups": 2},
        {"name": "items", "rows": 400, "dim": 16, "maxLookups": 3, "features": ["i"], "weights": ["a"]},
        {"name": "half", "rows": 300, "dim": 16, "columnBlock": 8, "maxLookups": 3, "dtype": "fp16"},
    ]
    model = {"denseFeatures": ["a", "b"], "bottomMlp": [16], "topMlp": [16, 1], "tables": tables}
    return small_job(folder, world_size, model=model, training={"rowOptimizer": {"kind": kind, "learningRate": 0.01}})


@dataclass(frozen=True)
class Cuts:
    """Hold the content of one rank's cuts."""

    rows: int
    """Of all cuts together."""
    largest: int


class MemoryCut:
    """Model ``dlrm_checkpointer.Cut``: its segments are plain memory, which must be full at the end.

    Args:
        segment_rows: rows that a segment holds; None: it holds all of the cut.
        values: float32 values that a segment holds.
    """

    def __init__(self, segment_rows: int | None = None, values: int = 1 << 18) -> None:
        self.is_whole = segment_rows is None
        self.pieces: list[ShardRows] = []
        self.gone: list[GoneRows] = []
        self.segments = 1
        self.is_stored = True
        """Whether the sidecar has freed the segment before this one."""
        self._segment_rows, self._values = segment_rows, values
        self._begin()

    def _begin(self) -> None:
        self.memory = np.full(self._values, NOT_FILLED, np.float32)
        self._end, self._free, self._first = 0, self._segment_rows, len(self.pieces)

    def is_waiting(self) -> bool:
        """See ``Cut``."""
        return not self.is_stored

    def lay(self, wanted: CutRows) -> ShardRows | None:
        """See ``Cut``."""
        count = wanted.count if self._free is None else min(wanted.count, self._free)
        if count == 0:
            return None
        if self._free is not None:
            self._free -= count
        width, values, start = wanted.shard.width, wanted.state_values, self._end
        middle, self._end = start + count * width, start + count * (width + values)
        piece = ShardRows(
            shard=wanted.shard,
            row_ids=np.full(count, -1, np.int64),
            rows=self.memory[start:middle].reshape(count, width),
            state=self.memory[middle : self._end].reshape(count, values),
        )
        self.pieces.append(piece)
        return piece

    def copy(self, source: CutRowSource, start: int = 0) -> int:
        """See ``Cut``."""
        return copy_rows(source, start, self.lay)

    def copy_gone(self, rows: GoneRows, start: int = 0) -> int:
        """See ``Cut``."""
        stop = len(rows.row_ids) if self._free is None else min(len(rows.row_ids), start + self._free)
        self._free = None if self._free is None else self._free - (stop - start)
        self.gone.append(GoneRows(shard=rows.shard, row_ids=rows.row_ids[start:stop]))
        return stop - start

    def next_segment(self) -> bool:
        """See ``Cut``."""
        assert self.is_stored
        assert all((piece.row_ids >= 0).all() for piece in self.pieces[self._first :])
        self.is_stored = False
        self.segments += 1
        self._begin()
        return True

    def withdrawn(self, why: str) -> CutWithdrawnError:
        """See ``Cut``."""
        return CutWithdrawnError(why)


def cut_every_step(
    collectives: Collectives, job: DLRMJob, plan: Plan, steps: int, folder: Path, seed: int, pipelined: bool = False
) -> Cuts:
    """Train, cut after each step, and check every cut against the state.

    Some cuts are committed, at any later step; some find no parent, whatever was committed.
    """
    learner = learner_of(collectives, job, plan, folder, pipelined)
    embeddings, draw = learner.embeddings, np.random.default_rng(seed)
    reader = open_reader(job.spec, "train", collectives.rank, collectives.world_size)
    whole = open_reader(job.spec, "train", 0, 1)
    looked_up: list[dict[str, set[int]]] = []
    states = [state_of(embeddings.saved)]
    parent = rows = largest = recalled = 0
    ahead = 1 if pipelined else 0
    batches = (reader.read(number) for number in range(steps))
    for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=plan.lookahead, sent_ahead=ahead):
        number = prepared.batch.number
        learner.apply(learner.compute(prepared, reader.global_count(number)), factor=1.0)
        looked_up.append(rows_of_batch(job, whole.read(number)))
        if draw.random() < 0.4:
            parent = int(draw.integers(parent, number + 1))
        since = 0 if draw.random() < 0.2 else parent
        recalled = recalled if since else number + 1
        embeddings.saved.begin_cut(number + 1, since or None)
        pieces = [load_rows(piece) for piece in embeddings.saved.changed_rows()]
        states.append(state_of(embeddings.saved))
        exact = since == 0 or (number + 1 - since <= MAX_KEPT and since >= recalled)
        check_cut(pieces, states[since], states[-1], looked_up, since, exact=exact)
        rows += sum(len(piece.row_ids) for piece in pieces)
        largest = max(largest, number + 1 - parent)
    embeddings.close()
    return Cuts(rows, largest)


def learner_of(collectives: Collectives, job: DLRMJob, plan: Plan, folder: Path, pipelined: bool = False) -> Learner:
    """Return a learner at its start."""
    ids = None
    if pipelined:
        ids = Collectives(collectives.rank, collectives.world_size, lambda: "")
        ids.use(dist.new_group())
    placement = place(job.spec.model, plan, collectives.world_size)
    learner = Learner(job.spec, placement, collectives, folder, id_collectives=ids)
    learner.start(job.spec.training.seed)
    return learner


def rows_of_batch(job: DLRMJob, batch: Batch) -> dict[str, set[int]]:
    """Rows of each table that a global batch looks up."""
    tables, first = job.spec.model.all_tables(), 0
    found: dict[str, set[int]] = {table.name: set() for table in tables}
    for feature, lengths in zip(job.spec.model.all_features(), batch.lengths.tolist(), strict=True):
        found[tables[feature.table].name].update(batch.values[first : first + sum(lengths)].tolist())
        first += sum(lengths)
    return found


def state_of(parts: Iterator[LocalPart]) -> dict[str, tuple[ShardId, Block]]:
    """Copies of all rows of parts."""
    found = {}
    for part in parts:
        rows, state = part.read_block(part.shard.row_start, part.shard.row_end)
        found[str(part.shard)] = part.shard, (rows.copy(), state.copy())
    return found


def check_cut(
    pieces: list[ShardRows],
    before: dict[str, tuple[ShardId, Block]],
    now: dict[str, tuple[ShardId, Block]],
    looked_up: list[dict[str, set[int]]],
    parent: int,
    *,
    exact: bool,
) -> None:
    """Check that each row looked up since the parent is there once, with its values, and no row but older cuts' is."""
    held = {name: [piece for piece in pieces if str(piece.shard) == name] for name in now}
    assert sum(len(each) for each in held.values()) == len(pieces)
    for name, (shard, (rows, state)) in now.items():
        ids = np.concatenate([np.empty(0, np.int64), *(piece.row_ids for piece in held[name])])
        places, found = ids - shard.row_start, set(ids.tolist())
        assert len(found) == len(ids)
        for got, wanted in ((("rows", rows)), (("state", state))):
            for piece in held[name]:
                np.testing.assert_array_equal(getattr(piece, got), wanted[piece.row_ids - shard.row_start])
        changed = (rows != before[name][1][0]).any(axis=1) | (state != before[name][1][1]).any(axis=1)
        changed[places] = False
        assert not changed.any()
        mine = set(range(shard.row_start, shard.row_end))
        wanted_rows = set().union(*(batch[shard.table] for batch in looked_up[parent:])) & mine
        assert wanted_rows <= found <= set().union(*(batch[shard.table] for batch in looked_up))
        if exact:
            assert found == wanted_rows
