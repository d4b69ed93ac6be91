"""Cuts that are copied while training continues: each row is there once, as it was when the cut was begun."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.model import TableSpec
from dlrm_api.tiers import CHANGED_BYTES
from dlrm_checkpointer import CutRowSource, CutWithdrawnError
from dlrm_kernels.dirty_rows import LINE_ROWS
from dlrm_testing.trainer.cutting import (
    NOT_FILLED,
    TIERS,
    MemoryCut,
    check_cut,
    job_of,
    learner_of,
    rows_of_batch,
    state_of,
)
from dlrm_testing.trainer.late_copies import LateStream
from dlrm_testing.trainer.pretended_gpu import PRETENDED
from dlrm_testing.trainer.shardings import random_plan
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import copy_before_update, device_copies
from dlrm_trainer.embedding.changes import MAX_KEPT, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import ResidentPart, table_meta
from dlrm_trainer.embedding.copy_before_update import CopyBeforeUpdate
from dlrm_trainer.embedding.tiers.slots import untouched_zeros
from dlrm_trainer.train import prepared_ahead

ALONE = Collectives(0, 1, lambda: "")
QUIET = [HealthCheck.function_scoped_fixture]
ONE_ROW = 1
ROWS, WIDTH = 300_000, 8
VALUES = ROWS * (WIDTH + 1)


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=QUIET, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["rowwise-adagrad", "sgd", "adam"]),
    tiers=st.sampled_from(TIERS[::2]),
    segment_rows=st.sampled_from([None, None, 60, 500]),
    begin=st.integers(1, 4),
    amounts=st.lists(st.sampled_from([None, 0, ONE_ROW, 2_000, 20_000]), min_size=1, max_size=5),
)
def test_a_cut_holds_each_row_as_it_was_however_much_is_copied_per_step(
    tmp_path: Path,
    seed: int,
    kind: str,
    tiers: tuple[str, ...],
    segment_rows: int | None,
    begin: int,
    amounts: list[int | None],
) -> None:
    job = job_of(tmp_path, kind=kind)
    plan = random_plan(np.random.default_rng(seed), job.spec.model, 1, tiers, 1 if tiers else 0)  # type: ignore[arg-type]
    learner, reader, cut = learner_of(ALONE, job, plan, tmp_path), open_reader(job.spec, "train", 0, 1), None
    embeddings, looked_up, states = learner.embeddings, [], [state_of(learner.embeddings.saved)]
    left, copying = list(amounts), None
    batches = (reader.read(number) for number in range(begin + len(amounts)))
    for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=plan.lookahead, sent_ahead=0):
        if copying is not None and cut is not None:
            try:
                copying.copy(left.pop())
            except CutWithdrawnError:
                break
            cut.is_stored = True
        learner.apply(learner.compute(prepared, 64), factor=1.0)
        looked_up.append(rows_of_batch(job, prepared.batch))
        if len(looked_up) == begin:
            embeddings.settle()
            states.append(state_of(embeddings.saved))
            embeddings.saved.begin_cut(begin, None)
            cut = MemoryCut(segment_rows)
            copying = embeddings.saved.begin_copying(cut)
            copying.copy(0)
    assert copying is not None
    assert cut is not None
    try:
        while not copying.copy():
            cut.is_stored = True
    except CutWithdrawnError:
        assert not cut.is_whole
        embeddings.close()
        return

    assert (cut.segments == 1) == (
        segment_rows is None or sum(len(each.row_ids) for each in cut.pieces) <= segment_rows
    )
    assert all((np.diff(piece.row_ids) > 0).all() for piece in cut.pieces)
    check_cut(cut.pieces, states[0], states[1], looked_up[:begin], 0, exact=True)
    embeddings.close()


def resident(rows: int, dtype: type[np.floating] = np.float32) -> ResidentPart:
    spec = TableSpec(name="items", rows=rows, dim=WIDTH)
    weight = torch.from_numpy(untouched_zeros(rows * WIDTH, dtype)).view(rows, WIDTH)
    state = torch.from_numpy(untouched_zeros(rows, np.float32)).view(rows, 1)
    shard = table_meta(spec, 0, "rowwise-adagrad").whole()
    return ResidentPart(table=spec, shard=shard, weight=weight, state=state, dirty=DirtyPart(DirtyRows([rows]), 0))


def copying_of(part: ResidentPart, cut: MemoryCut) -> CopyBeforeUpdate:
    part.dirty.rows.cut(1)
    return CopyBeforeUpdate(cut, [part], [], list, lambda: None)  # type: ignore[arg-type]


def test_bitmaps_of_changed_rows_take_no_more_than_plans_count() -> None:
    rows = 1 << 21
    part, some = resident(rows), np.arange(0, rows, LINE_ROWS)
    given = some, np.array([len(some)]), np.zeros(1, np.int64)

    def fill(cut: MemoryCut) -> tuple[DirtyRows, CopyBeforeUpdate]:
        record = DirtyRows([rows])
        record.store(*given)
        for step in range(MAX_KEPT + 1):
            record.mark(*given)
            record.cut(step)
        record.forget(1)
        record.mark(*given)
        copying = copying_of(replace(part, dirty=DirtyPart(record, 0)), cut)
        copying.copy(ONE_ROW)
        return record, copying

    fill(MemoryCut(values=VALUES))  # what is compiled stays
    cut = MemoryCut(values=VALUES)
    tracemalloc.start()
    filled = fill(cut)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert filled
    assert (MAX_KEPT + 3) / 8 * rows < held <= peak <= CHANGED_BYTES * rows


def locate(*_: object) -> CutRowSource:
    raise AssertionError("rows with a place need not be located")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("segment_rows", [None, 1_500])
def test_rows_of_a_gpu_are_copied_as_before_their_update(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, segment_rows: int | None
) -> None:
    monkeypatch.setattr(device_copies, "copy_stream", LateStream)
    # Buffers are used again within a chunk, and chunks are smaller than what is updated.
    monkeypatch.setattr(device_copies, "BUFFER_BYTES", 64 * 4 * (WIDTH + 1))
    monkeypatch.setattr(copy_before_update, "COPY_ROWS", 600)
    draw, rows = np.random.default_rng(0), 6_000
    spec, record = TableSpec(name="items", rows=rows, dim=WIDTH), DirtyRows([rows])
    weight = torch.randn(rows, WIDTH).to(dtype)
    state = torch.randn(rows, 1)
    part = ResidentPart(
        table=spec,
        shard=table_meta(spec, 0, "rowwise-adagrad").whole(),
        weight=weight.to(PRETENDED),
        state=state.to(PRETENDED),
        dirty=DirtyPart(record, 0),
    )
    changed = np.flatnonzero(draw.random(rows) < 0.7)
    part.dirty.mark(changed)
    cut = MemoryCut(segment_rows)
    copying = copying_of(part, cut)
    copying.copy(ONE_ROW)

    while not copying.done:
        ids = draw.integers(0, rows, 400)
        sizes, starts = np.array([len(ids)]), record.starts
        copying.before_update(RowsToUpdate(record, ids, sizes, starts, lambda _, some: part.in_place(some)))
        chosen = torch.from_numpy(np.unique(ids)).to(PRETENDED)
        part.weight.index_fill_(0, chosen, -1.0)
        part.state.index_fill_(0, chosen, -1.0)
        cut.is_stored = True
        copying.copy(ONE_ROW)

    copied = np.concatenate([piece.row_ids for piece in cut.pieces])
    assert sorted(copied.tolist()) == changed.tolist()
    assert (cut.segments > 1) == (segment_rows is not None)
    for piece in cut.pieces:
        np.testing.assert_array_equal(piece.rows, weight[piece.row_ids].to(torch.float32).numpy())
        np.testing.assert_array_equal(piece.state, state[piece.row_ids].numpy())


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("share", [0.001, 0.3, 1.0])
def test_a_thread_copies_beside_updates_and_no_row_is_torn(share: float, dtype: type[np.floating]) -> None:
    part, draw, cut = resident(ROWS, dtype), np.random.default_rng(0), MemoryCut(values=VALUES)
    part.weight[:], part.state[:] = 1.0, 1.0
    changed = np.flatnonzero(draw.random(ROWS) < share)
    part.dirty.mark(changed)
    record = part.dirty.rows
    copying = copying_of(part, cut)
    copying.copy(ONE_ROW)
    copying.start()
    updates = 0
    while not copying.check() or updates < 3:
        ids = draw.integers(0, ROWS, 2_000)
        copying.before_update(RowsToUpdate(record, ids, np.array([len(ids)]), record.starts, locate))
        part.weight[ids], part.state[ids] = 2.0, 2.0
        updates += 1
    copying.close()

    [piece] = cut.pieces
    np.testing.assert_array_equal(piece.row_ids, changed)
    assert (piece.rows == 1.0).all()
    assert (piece.state == 1.0).all()


def test_an_error_of_the_thread_is_raised_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    part = resident(1_000)
    part.dirty.mark(np.arange(1_000))
    copying = copying_of(part, MemoryCut())

    reached = threading.Event()

    def broken(*_: object) -> None:
        reached.set()
        raise OSError("the directory is gone")

    monkeypatch.setattr(copy_before_update, "copy_rows", broken)
    copying.start()
    assert reached.wait(60.0)
    copying.close()

    with pytest.raises(OSError, match="the directory is gone"):
        copying.copy()
    with pytest.raises(OSError, match="the directory is gone"):
        copying.check()


def test_a_closed_copy_writes_no_more() -> None:
    part, cut = resident(ROWS), MemoryCut(values=VALUES)
    part.weight[:] = 1.0
    part.dirty.mark(np.arange(ROWS))
    copying = copying_of(part, cut)
    copying.copy(ONE_ROW)
    copying.close()

    copying.copy()

    assert not copying.done
    assert 0 < (cut.pieces[0].rows == NOT_FILLED).sum() < ROWS * WIDTH


def test_a_cut_without_space_for_a_changing_row_is_withdrawn() -> None:
    part, cut = resident(1_000), MemoryCut(segment_rows=10)
    part.dirty.mark(np.arange(1_000))
    copying = copying_of(part, cut)
    copying.copy(0)
    ids = np.arange(500, 525)

    record = part.dirty.rows
    copying.before_update(RowsToUpdate(record, ids, np.array([25]), record.starts, lambda _, rows: part.in_place(rows)))

    with pytest.raises(CutWithdrawnError, match=r"spec\.checkpoint\.handoffBudget"):
        copying.copy()
    assert not copying.done
