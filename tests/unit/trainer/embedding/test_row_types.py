"""A whole learner with every row optimizer and type of rows, from its start through a cut and on from it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.row_optimizers import state_values
from dlrm_checkpointer.codec.digest import state_digest, table_digest
from dlrm_checkpointer.codec.rows import CodedRows, code_rows, decode_rows
from dlrm_checkpointer.format import chunk
from dlrm_checkpointer.read.catalog import Block
from dlrm_checkpointer.types import ShardId, load_rows
from dlrm_testing.checkpointer.restored import check_piece
from dlrm_testing.trainer.gangs import hand_plan, job_document
from dlrm_trainer.checkpointing.restore import live_digest, restore
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import PooledRows, place
from dlrm_trainer.embedding.checkpoint import table_meta
from dlrm_trainer.learner import Learner

ALONE = Collectives(0, 1, lambda: "")
KINDS = ["rowwise-adagrad", "sgd", "adam"]
TYPES = {"fp32": ["fp32"] * 4, "fp16": ["fp16"] * 4, "mixed": ["fp16", "fp32", "fp16", "fp32"]}


class Stored:
    """A snapshot in memory with rows encoded at some number of bits."""

    def __init__(self, learner: Learner, bits: int) -> None:
        pieces = [load_rows(piece) for piece in learner.embeddings.saved.changed_rows()]
        coded = [each for piece in pieces for each in code_rows(piece, bits)]
        self.pieces = [decode_rows(chunk.decode_rows(bytearray(chunk.encode_rows(each)), "here")) for each in coded]
        self.arrays = {name: array.copy() for name, array in learner.dense.arrays().items()}

    def shard_codes(self, shards: Sequence[ShardId]) -> Iterator[tuple[int, CodedRows]]:
        for number, shard in enumerate(shards):
            yield from ((number, code_rows(each, 32)[0]) for each in self.pieces if each.shard.table == shard.table)

    def dense(self) -> dict[str, Any]:
        return self.arrays


def job_of(folder: Path, kind: str, types: str, **training: Any) -> DLRMJob:
    document = job_document(folder)
    for table, dtype in zip(document["spec"]["model"]["tables"], TYPES[types], strict=True):
        table["dtype"] = dtype
    document["spec"]["training"]["rowOptimizer"] |= {"kind": kind, **training}
    return parse_job(document)


def learner_of(job: DLRMJob) -> Learner:
    learner = Learner(job.spec, place(job.spec.model, hand_plan(job), 1), ALONE)
    learner.start(job.spec.training.seed)
    return learner


def train(job: DLRMJob, learner: Learner, start: int, stop: int) -> list[float]:
    reader = open_reader(job.spec, "train", 0, 1)
    losses = []
    for number in range(start, stop):
        prepared = learner.prepare(learner.send(reader.read(number)))
        computed = learner.compute(prepared, reader.global_count(number))
        learner.apply(computed, factor=1.0)
        losses.append(computed.loss.item())
    reader.close()
    return losses


def digest_of(job: DLRMJob, learner: Learner) -> str:
    return live_digest(learner, ALONE)


def digest_of_stored(job: DLRMJob, stored: Stored) -> str:
    tables = []
    for table in job.spec.model.all_tables():
        meta = table_meta(table, job.spec.training.seed, job.spec.training.row_optimizer.kind)
        pieces = tuple(piece for piece in stored.pieces if piece.shard.table == table.name)
        for piece in pieces:
            check_piece(piece, meta)
        block = Block(table=meta, start=0, end=table.rows, stored=tuple((0, piece) for piece in pieces))
        tables.append((table.name, table_digest([block.digest(*block.fill())])))
    return state_digest(tables, stored.dense())


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_cut_holds_the_live_state_and_training_from_it_is_exact(tmp_path: Path, kind: str, types: str) -> None:
    job = job_of(tmp_path, kind, types)
    whole, second = learner_of(job), learner_of(job)

    train(job, whole, 0, 5)
    cut, live = Stored(whole, 32), digest_of(job, whole)
    train(job, whole, 5, 9)
    restore(second, cut, ALONE)  # type: ignore[arg-type]
    restored = digest_of(job, second)
    train(job, second, 5, 9)

    assert digest_of_stored(job, cut) == live
    assert restored == live
    assert digest_of(job, second) == digest_of(job, whole) != live
    assert {piece.state.shape[1] for piece in cut.pieces} == {state_values(kind, 8)}


@pytest.mark.parametrize("kind", KINDS)
def test_fp16_rows_start_and_stay_at_fp16_values_also_after_8_bits(tmp_path: Path, kind: str) -> None:
    job = job_of(tmp_path, kind, "fp16")
    learner, second = learner_of(job), learner_of(job)
    start = Stored(learner, 32)

    train(job, learner, 0, 3)
    cut = Stored(learner, 8)
    restore(second, cut, ALONE, mark=True)  # type: ignore[arg-type]

    assert start.pieces == []
    assert any((piece.rows != piece.rows.astype(np.float16)).any() for piece in cut.pieces)
    assert digest_of(job, second) == digest_of_stored(job, cut)
    for piece in map(load_rows, second.embeddings.saved.changed_rows()):
        assert (piece.rows == piece.rows.astype(np.float16)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_fp16_rows_learn_what_fp32_rows_learn_but_for_rounding(tmp_path: Path, kind: str) -> None:
    losses = {}
    for types in ("fp32", "fp16"):
        job = job_of(tmp_path, kind, types)
        losses[types] = train(job, learner_of(job), 0, 40)

    assert losses["fp16"] != losses["fp32"]
    np.testing.assert_allclose(np.mean(losses["fp16"]), np.mean(losses["fp32"]), atol=1e-3)
    assert np.mean(losses["fp16"][-10:]) < np.mean(losses["fp16"][:10])


def test_a_step_leaves_none_of_its_features_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(tmp_path, "sgd", "fp32")
    learner, reader = learner_of(job), open_reader(job.spec, "train", 0, 1)
    find, seen = learner.embeddings.features, []

    def features(pooled: PooledRows) -> torch.Tensor:
        found = find(pooled)
        seen.append(weakref.ref(found))
        return found

    monkeypatch.setattr(learner.embeddings, "features", features)
    computed = learner.compute(learner.prepare(learner.send(reader.read(0))), reader.global_count(0))
    learner.apply(computed, factor=1.0)
    del computed
    gc.collect()

    assert [each() for each in seen] == [None]
    reader.close()
