"""Cuts that are copied while training goes on: each row is there once, as it was when the cut was begun."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.model import TableSpec
from dlrm_api.tiers import CHANGED_BYTES
from dlrm_checkpointer.handoff.budget import Laid, Rows
from dlrm_checkpointer.types import RowsInPlace, ShardRows
from dlrm_testing.trainer.cutting import check_cut, job_of, learner_of, rows_of_batch, state_of
from dlrm_testing.trainer.shardings import random_plan
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import copy_on_update
from dlrm_trainer.embedding.changes import MOST_KEPT, DirtyPart, DirtyRows
from dlrm_trainer.embedding.checkpoint import ResidentPart, table_meta
from dlrm_trainer.embedding.copy_on_update import CopyOnUpdate, Image
from dlrm_trainer.embedding.local_tables import lazy_zeros
from dlrm_trainer.embedding.pending import Changing
from dlrm_trainer.train import prepared_ahead

ALONE = Collectives(0, 1, lambda: "")
QUIET = [HealthCheck.function_scoped_fixture]
NOT_FILLED = -7.0
ONE_ROW = 1


class Memory:
    """Of a cut; every piece starts at a place of its own."""

    def __init__(self) -> None:
        self.pieces: list[ShardRows] = []

    def lay(self, wanted: Sequence[Rows]) -> list[Laid]:
        values = sum(rows.count * (rows.shard.width + rows.state_values) for rows in wanted)
        laid, memory, at = [], np.full(values, NOT_FILLED, np.float32), 0
        for rows in wanted:
            if rows.count == 0:
                continue
            sizes = rows.count * rows.shard.width, rows.count * rows.state_values
            state_at = at + sizes[0]
            piece = ShardRows(
                shard=rows.shard,
                row_ids=np.full(rows.count, -1, np.int64),
                rows=memory[at:state_at].reshape(rows.count, rows.shard.width),
                state=memory[state_at : state_at + sizes[1]].reshape(rows.count, rows.state_values),
            )
            self.pieces.append(piece)
            arrays = {"row_ids": piece.row_ids, "rows": piece.rows, "state": piece.state}
            laid.append(Laid(**arrays, memory=memory, rows_at=at, state_at=state_at))
            at += sum(sizes)
        return laid


@settings(max_examples=25, suppress_health_check=QUIET)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["rowwise-adagrad", "sgd", "adam"]),
    begin=st.integers(1, 4),
    amounts=st.lists(st.sampled_from([None, 0, ONE_ROW, 2_000, 20_000]), min_size=1, max_size=5),
)
def test_a_cut_holds_each_row_as_it_was_however_much_of_it_was_copied_before_each_step(
    tmp_path: Path, seed: int, kind: str, begin: int, amounts: list[int | None]
):
    job = job_of(tmp_path, kind=kind)
    plan = random_plan(np.random.default_rng(seed), job.spec.model, 1)
    learner, reader, memory = learner_of(ALONE, job, plan, tmp_path), open_reader(job.spec, "train", 0, 1), Memory()
    embeddings, looked_up, states = learner.embeddings, [], [state_of(learner.embeddings.saved)]
    left, copying = list(amounts), None
    batches = (reader.read(number) for number in range(begin + len(amounts)))
    for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=0, sent_ahead=0):
        if copying is not None:
            copying.copy(left.pop())
        learner.apply(learner.compute(prepared, 64)[1], factor=1.0)
        looked_up.append(rows_of_batch(job, prepared.batch))
        if len(looked_up) == begin:
            states.append(state_of(embeddings.saved))
            embeddings.saved.begin_cut(begin, None)
            copying = embeddings.saved.begin_copying_on_update(memory.lay)
    assert copying is not None
    copying.copy()

    assert copying.done
    assert not list(embeddings.saved.rows_in_place(moving=True))
    assert all((np.diff(piece.row_ids) > 0).all() for piece in memory.pieces)
    check_cut(memory.pieces, states[0], states[1], looked_up[:begin], 0, exact=True)
    embeddings.close()


ROWS, WIDTH = 300_000, 8


def resident(rows: int, dtype: torch.dtype = torch.float32) -> ResidentPart:
    spec = TableSpec(name="items", rows=rows, dim=WIDTH)
    weight = lazy_zeros(rows * WIDTH, dtype).view(rows, WIDTH)
    state = lazy_zeros(rows, torch.float32).view(rows, 1)
    shard = table_meta(spec, 0, "rowwise-adagrad").whole()
    return ResidentPart(table=spec, shard=shard, weight=weight, state=state, dirty=DirtyPart(DirtyRows([rows]), 0))


def test_what_tells_changed_rows_takes_no_more_than_plans_count():
    part, few = resident(ROWS), (np.arange(3), np.array([3]), np.zeros(1, np.int64))

    def most_there_is() -> tuple[DirtyRows, Image]:
        record = DirtyRows([ROWS])
        record.store(*few)
        for step in range(MOST_KEPT + 2):
            record.mark(*few)
            record.cut(step)
        return record, Image([replace(part, dirty=DirtyPart(record, 0))])

    most_there_is()  # what is compiled stays
    tracemalloc.start()
    there = most_there_is()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert there[1].counts == [3]
    assert (MOST_KEPT + 3) / 8 * ROWS < held <= CHANGED_BYTES * ROWS


def nowhere(*_: object) -> RowsInPlace:
    raise AssertionError("rows at rest need no telling where they are")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_a_thread_copies_beside_updates_and_no_row_is_torn(share: float, dtype: torch.dtype):
    part, draw, memory = resident(ROWS, dtype), np.random.default_rng(0), Memory()
    part.weight[:], part.state[:] = 1.0, 1.0
    changed = np.flatnonzero(draw.random(ROWS) < share)
    part.dirty.mark(changed)
    record = part.dirty.rows
    record.cut(1)
    copying = CopyOnUpdate([part], memory.lay)
    copying.start()
    updates = 0
    while not copying.ended() or updates < 3:
        ids = draw.integers(0, ROWS, 2_000)
        copying.before_update(Changing(record, ids, np.array([len(ids)]), record.starts, nowhere))
        part.weight[ids], part.state[ids] = 2.0, 2.0
        updates += 1
    copying.wait()

    [piece] = memory.pieces
    np.testing.assert_array_equal(piece.row_ids, changed)
    assert (piece.rows == 1.0).all()
    assert (piece.state == 1.0).all()


def test_what_ends_the_copying_is_told_to_training(monkeypatch: pytest.MonkeyPatch):
    part, memory = resident(1_000), Memory()
    part.dirty.mark(np.arange(1_000))
    copying = CopyOnUpdate([part], memory.lay)

    def broken(*_: object) -> None:
        raise OSError("the folder is gone")

    monkeypatch.setattr(copy_on_update, "copy_rows", broken)
    copying.start()

    with pytest.raises(OSError, match="the folder is gone"):
        copying.wait()
    with pytest.raises(OSError, match="the folder is gone"):
        copying.ended()


def test_a_cut_that_is_given_up_amid_its_copying_writes_to_its_memory_no_more():
    part, memory = resident(ROWS), Memory()
    part.weight[:] = 1.0
    part.dirty.mark(np.arange(ROWS))
    copying = CopyOnUpdate([part], memory.lay)
    copying.copy(ONE_ROW)
    copying.close()

    copying.copy()

    assert not copying.done
    assert 0 < (memory.pieces[0].rows == NOT_FILLED).sum() < ROWS * WIDTH
