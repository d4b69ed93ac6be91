"""Slots in a GPU's memory: records are copied to them and from them, and kernels of the device compute on them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_api.job import DLRMJob
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_checkpointer.types import load_rows
from dlrm_testing.repeats import IS_SOAK
from dlrm_testing.trainer.cutting import MemoryCut, state_of
from dlrm_testing.trainer.gangs import small_job
from dlrm_testing.trainer.gpus import gpu_of, needs_gpu
from dlrm_testing.trainer.late_copies import LateStream
from dlrm_testing.trainer.stacked import ALONE, Shape, make_learner, train_run
from dlrm_trainer.data import open_reader
from dlrm_trainer.embedding.tiers import slots, stack
from dlrm_trainer.embedding.tiers.slots import DeviceSlots
from dlrm_trainer.embedding.tiers.stack import QUEUED_CHUNK, QUEUED_CHUNK_BYTES
from dlrm_trainer.learner import Learner
from dlrm_trainer.train import prepared_ahead

STEPS, EVAL_EVERY = 10, 3
TWO = ("hbm", "ddr")
KINDS = ["rowwise-adagrad", "sgd", "adam"]


def job_of(folder: Path, kind: str, dtype: str = "fp32") -> DLRMJob:
    """Two widths of rows, several features of a table, weights, means and bags without ids."""
    model_tables = [
        {"name": "users", "rows": 900, "dim": 8, "features": ["u", "v"], "maxLookups": 3},
        {"name": "items", "rows": 400, "dim": 8, "features": ["i"], "weights": ["w"], "maxLookups": 4},
        {"name": "bags", "rows": 120, "dim": 4, "pooling": "mean", "maxLookups": 4, "avgLookups": 1},
        {"name": "small", "rows": 30, "dim": 4},
    ]
    training = {"rowOptimizer": {"kind": kind, "learningRate": 0.05}}
    model = {"interaction": "dcn", "tables": [table | {"dtype": dtype} for table in model_tables]}
    return small_job(folder, training=training, model=model)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_neither_few_slots_nor_levels_below_nor_the_lookahead_change_a_bit(
    tmp_path: Path, gpu: torch.device, kind: str, dtype: str
) -> None:
    job = job_of(tmp_path, kind, dtype)
    stacks, depths = [TWO, ("hbm", "block"), ("hbm", "ddr", "scm", "block")], [0, 1, 3]
    chosen = itertools.product(stacks, depths) if IS_SOAK else zip(stacks, depths, strict=True)
    shapes = [Shape(tiers, slots=20, middle=30, lookahead=depth) for tiers, depth in chosen]

    every_row = train_run(ALONE, job, Shape(TWO, slots=1_000), STEPS, EVAL_EVERY, tmp_path, gpu)

    for shape in shapes:
        assert train_run(ALONE, job, shape, STEPS, EVAL_EVERY, tmp_path, gpu) == every_row, shape


@pytest.mark.parametrize("lookahead", [0, 2])
def test_copies_that_end_as_late_as_they_may_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    job, few = job_of(tmp_path, "rowwise-adagrad"), Shape(TWO, slots=20, lookahead=lookahead)
    with gpu_of("pretended") as device:
        every_row = train_run(ALONE, job, Shape(TWO, slots=1_000), 6, EVAL_EVERY, tmp_path, device)
        monkeypatch.setattr(slots, "copy_stream", LateStream)
        # Several copies a batch, so that buffers are used again.
        monkeypatch.setattr(stack, "QUEUED_CHUNK", 16)

        assert train_run(ALONE, job, few, 6, EVAL_EVERY, tmp_path, device) == every_row


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_losses_agree_with_those_of_the_hosts_own_kernels(
    tmp_path: Path, gpu: torch.device, kind: str, dtype: str
) -> None:
    job = job_of(tmp_path, kind, dtype)

    few_slots = train_run(ALONE, job, Shape(TWO, slots=20), STEPS, EVAL_EVERY, tmp_path, gpu)
    resident = train_run(ALONE, job, None, STEPS, EVAL_EVERY, tmp_path)

    np.testing.assert_allclose(few_slots.losses, resident.losses, rtol=1e-5)
    log_losses = [[loss for loss, _ in run.evaluations] for run in (few_slots, resident)]
    np.testing.assert_allclose(*log_losses, rtol=1e-5)


def train_steps(learner: Learner, job: DLRMJob, first: int, stop: int) -> None:
    reader = open_reader(job.spec, "train", 0, 1)
    batches = (reader.read(number) for number in range(first, stop))
    for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=1, sent_ahead=1):
        learner.apply(learner.compute(prepared, reader.global_count(prepared.batch.number)), factor=1.0)
    learner.embeddings.settle()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_holds_and_restores_rows_of_slots_as_before_their_update(
    tmp_path: Path, gpu: torch.device, kind: str
) -> None:
    job, shape = job_of(tmp_path, kind), Shape(TWO, slots=20)
    cut = MemoryCut()
    learner, restored = (make_learner(ALONE, job, shape, tmp_path, gpu) for _ in range(2))
    train_steps(learner, job, 0, 4)
    learner.embeddings.saved.begin_cut(4, None)
    pieces = [load_rows(piece) for piece in learner.embeddings.saved.changed_rows()]
    before = state_of(learner.embeddings.tables.parts())
    learner.embeddings.saved.begin_copying(cut)
    train_steps(learner, job, 4, 6)
    for part in restored.embeddings.tables.parts():
        part.restore(code_rows(piece, 32)[0] for piece in pieces if piece.shard == part.shard)
    after = state_of(restored.embeddings.tables.parts())

    assert len({piece.shard.table for piece in cut.pieces}) == 4
    for piece in cut.pieces:
        if piece.shard.table != "small":
            rows, state = before[str(piece.shard)][1]
            np.testing.assert_array_equal(piece.rows, rows[piece.row_ids])
            np.testing.assert_array_equal(piece.state, state[piece.row_ids])
    for name, (_, block) in before.items():
        for had, has in zip(block, after[name][1], strict=True):
            np.testing.assert_array_equal(had, has)
    learner.embeddings.close()
    restored.embeddings.close()


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_job_says_whether_sums_on_a_gpu_are_to_be_deterministic(tmp_path: Path, deterministic: bool) -> None:
    job = small_job(tmp_path, training={"deterministic": deterministic})

    owned = make_learner(ALONE, job, Shape(), tmp_path).embeddings.tables

    assert {group.batch.tables.deterministic for group in owned.groups} == {deterministic}
    owned.close()


@pytest.mark.parametrize("dim", [4, 2_048])
def test_pinned_buffers_are_of_so_many_bytes_however_wide_a_row_is(tmp_path: Path, gpu: torch.device, dim: int) -> None:
    table = {"name": "wide", "rows": 100, "dim": dim}
    job = small_job(
        tmp_path, model={"interaction": "dcn", "tables": [table]}, training={"rowOptimizer": {"kind": "adam"}}
    )

    owned = make_learner(ALONE, job, Shape(TWO), tmp_path, gpu).embeddings.tables
    (made,) = [group.stack for group in owned.groups]
    assert made is not None
    assert isinstance(made.memory, DeviceSlots)
    # Two in each direction; the number of its slot comes with a record.
    assert made.memory.pinned_bytes <= 4 * QUEUED_CHUNK_BYTES + 4 * 8 * QUEUED_CHUNK
    owned.close()


@pytest.mark.gpu
@needs_gpu
def test_records_come_back_from_a_device_as_they_went() -> None:
    memory = DeviceSlots(torch.zeros(100, 8, device="cuda"), torch.zeros(100, 1, device="cuda"), 50)
    records = np.random.default_rng(0).integers(0, 2**32, (50, memory.words), dtype=np.uint32)
    chosen = np.random.default_rng(1).permutation(100)[:50]

    memory.scatter(chosen, records)
    memory.follow(memory.mark())
    out = np.zeros_like(records)
    memory.gather(chosen, out)()

    assert np.array_equal(out[:, :-1], records[:, :-1])
