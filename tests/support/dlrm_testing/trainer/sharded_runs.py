"""Training runs of small jobs over plans that split tables in any way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlrm_api.errors import DivergedError
from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_checkpointer.codec.rows import CodedRows, code_rows
from dlrm_checkpointer.types import ShardId, ShardRows, TableMeta, load_rows
from dlrm_testing.trainer.gangs import small_job
from dlrm_trainer.checkpointing.restore import live_digest, restore
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.checkpoint import table_meta
from dlrm_trainer.learner import Computed, Learner
from dlrm_trainer.train import prepared_ahead


def job_of(
    folder: Path, world_size: int = 1, kind: str = "rowwise-adagrad", *, precision: str = "fp32", **training: Any
) -> DLRMJob:
    """Blocks, several features of a table, several tables of a feature, means, weights, both types of rows."""
    tables = [
        {"name": "users", "rows": 900, "dim": 16, "columnBlock": 8, "features": ["u", "v"]},
        {"name": "bags", "rows": 120, "dim": 16, "columnBlock": 4, "pooling": "mean", "maxLookups": 4, "avgLookups": 2},
        {"name": "small", "rows": 30, "dim": 16, "features": ["u2"]},
        {"name": "items", "rows": 400, "dim": 16, "maxLookups": 3, "features": ["u2", "i"], "weights": ["a", "b"]},
        {"name": "half", "rows": 300, "dim": 16, "columnBlock": 8, "maxLookups": 3, "dtype": "fp16"},
    ]
    model = {"denseFeatures": ["a", "b"], "bottomMlp": [16], "topMlp": [16, 1], "tables": tables}
    training = {"rowOptimizer": {"kind": kind, "learningRate": 0.01}, **training}
    checkpoint = {"bits": training["rowRegularizer"]["bits"]} if "rowRegularizer" in training else {}
    return small_job(
        folder, world_size, model=model | {"precision": precision}, training=training, checkpoint=checkpoint
    )


@dataclass(frozen=True)
class Saved:
    """Hold a snapshot in memory."""

    pieces: Sequence[ShardRows]
    arrays: dict[str, Any]
    metas: dict[str, TableMeta]

    def shard_codes(self, shards: Sequence[ShardId]) -> Iterator[tuple[int, CodedRows]]:
        """See ``Snapshot``."""
        for number, shard in enumerate(shards):
            for piece in self.pieces:
                if piece.shard.table == shard.table and _overlap(piece.shard, shard):
                    part = code_rows(piece, 32)[0].clip(shard, self.metas[shard.table])
                    if len(part.row_ids):
                        yield number, part

    def dense(self) -> dict[str, Any]:
        """See ``Snapshot``."""
        return self.arrays


def _overlap(a: ShardId, b: ShardId) -> bool:
    return a.column_start < b.column_end and b.column_start < a.column_end


@dataclass(frozen=True)
class ShardedRun:
    """Hold what one rank saw and left."""

    losses: list[float]
    """This rank's shares."""
    digest: str
    pieces: list[ShardRows]
    arrays: dict[str, Any]
    bytes_sent: dict[str, int]


def train_plan(
    collectives: Collectives,
    job: DLRMJob,
    plan: Plan,
    steps: range,
    folder: Path,
    saved: Saved | None = None,
    pipelined: bool = False,
    device: torch.device = HOST,
) -> ShardedRun:
    """Train some steps, from a snapshot where there is one."""
    placement, ids = place(job.spec.model, plan, collectives.world_size), None
    if pipelined:
        ids = Collectives(collectives.rank, collectives.world_size, lambda: "")
        ids.use(dist.new_group())
    learner = Learner(job.spec, placement, collectives, folder, id_collectives=ids, device=device)
    learner.start(job.spec.training.seed)
    if saved is not None:
        restore(learner, saved, collectives)  # type: ignore[arg-type]
    reader = open_reader(job.spec, "train", collectives.rank, collectives.world_size)
    batches, losses = (reader.read(number) for number in steps), []
    ahead = 1 if pipelined else 0
    for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=plan.lookahead, sent_ahead=ahead):
        computed = learner.compute(prepared, reader.global_count(prepared.batch.number))
        losses.append(computed.loss.item())
        learner.apply(computed, factor=1.0, regularizer=job.spec.training.row_regularizer)
    digest = live_digest(learner, collectives)
    pieces = [load_rows(piece) for piece in learner.embeddings.saved.changed_rows()]
    learner.embeddings.close()
    return ShardedRun(losses, digest, pieces, learner.dense.arrays(), dict(collectives.bytes_sent))


def saved_of(job: DLRMJob, runs: Sequence[ShardedRun]) -> Saved:
    """Return the snapshot that all ranks make together."""
    seed, kind = job.spec.training.seed, job.spec.training.row_optimizer.kind
    metas = {table.name: table_meta(table, seed, kind) for table in job.spec.model.all_tables()}
    return Saved([piece for run in runs for piece in run.pieces], runs[0].arrays, metas)


def words_of_bad_gradient(collectives: Collectives, job: DLRMJob, plan: Plan, folder: Path) -> str:
    """Return each rank's error if rank 1's gradient of feature 5 is infinite."""
    learner = Learner(job.spec, place(job.spec.model, plan, collectives.world_size), collectives, folder)
    learner.start(job.spec.training.seed)
    embeddings = learner.embeddings
    reader = open_reader(job.spec, "train", collectives.rank, collectives.world_size)
    pooled = embeddings.pool(embeddings.prepare(embeddings.send(reader.read(0)).result(), updates=True))
    gradient = torch.ones_like(embeddings.features(pooled))
    if collectives.rank == 1:
        gradient[3, 5 * 16 + 2] = torch.inf
    try:
        buffer = torch.zeros(embeddings.gradient_elements)
        gradients = embeddings.send_gradients(pooled, gradient, buffer)
        learner.read(learner.apply(Computed(torch.zeros(()), gradients), 1.0))
    except DivergedError as error:
        return str(error)
    return "nothing"
