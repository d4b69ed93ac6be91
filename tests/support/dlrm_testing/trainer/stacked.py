"""Plans with stacks of levels by hand, and training runs whose every bit is kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan, parse_plan
from dlrm_testing.trainer.gangs import plan_document
from dlrm_trainer.checkpointing.restore import live_digest
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.evaluate import evaluate
from dlrm_trainer.learner import Learner
from dlrm_trainer.train import prepared_ahead

ALONE = Collectives(0, 1, lambda: "")


@dataclass(frozen=True)
class Shape:
    """Describe how every table-wise table of a plan is stacked."""

    tiers: tuple[str, ...] = ("ddr", "ddr")
    slots: int = 8
    middle: int = 16
    """Rows of each level between the first and the last."""
    policy: str = "lru"
    ways: int = 0
    lookahead: int = 1
    expected: float | None = None
    """Hit rate that the plan expects of the slots."""


def stacked_plan(job: DLRMJob, shape: Shape | None, owners: Sequence[int | None] | None = None) -> Plan:
    """``plan_document`` with levels; None: everything resident."""
    document = plan_document(job, owners)
    if shape is None:
        return parse_plan(json.dumps(document))
    document["lookahead"] = shape.lookahead
    for table, entry in zip(job.spec.model.all_tables(), document["tables"], strict=True):
        rows = [shape.slots, *[shape.middle] * (len(shape.tiers) - 2), table.rows]
        for shard in entry["ranges"]:
            if shard["kind"] == "table":
                levels = [{"tier": tier, "rows": count} for tier, count in zip(shape.tiers, rows, strict=True)]
                levels[0]["expectedHitRate"] = shape.expected
                shard["tiers"] = {"levels": levels, "policy": shape.policy, "ways": shape.ways}
    return parse_plan(json.dumps(document))


@dataclass(frozen=True)
class Run:
    """Hold the bits of a run that must not depend on where rows live."""

    losses: list[float]
    evaluations: list[tuple[float, float | None]]
    digest: str


def train_run(
    collectives: Collectives,
    job: DLRMJob,
    shape: Shape | None,
    steps: int,
    eval_every: int,
    folder: Path,
    device: torch.device = HOST,
) -> Run:
    """Train some steps with evaluations between them, on every rank."""
    learner, losses, evaluations = make_learner(collectives, job, shape, folder, device), [], []
    plan = stacked_plan(job, shape)
    reader = open_reader(job.spec, "train", collectives.rank, job.spec.world_size)
    eval_reader = open_reader(job.spec, "eval", collectives.rank, job.spec.world_size)
    batches = (reader.read(number) for number in range(steps))
    for prepared in prepared_ahead(batches, learner.send, learner.prepare, depth=plan.lookahead, sent_ahead=1):
        number = prepared.batch.number
        computed = learner.compute(prepared, reader.global_count(number))
        losses.append(computed.loss.item())
        learner.apply(computed, factor=1.0, regularizer=job.spec.training.row_regularizer)
        if eval_every and number % eval_every == 0:
            quality = evaluate(learner, eval_reader.iterate(0, eval_reader.batches_per_epoch), collectives, number)
            assert quality is not None
            evaluations.append((quality.log_loss, quality.auc))
    digest = live_digest(learner, collectives)
    assert learner.embeddings.tables.missing == 0
    learner.embeddings.close()
    return Run(losses, evaluations, digest)


def make_learner(
    collectives: Collectives, job: DLRMJob, shape: Shape | None, folder: Path, device: torch.device = HOST
) -> Learner:
    """Return a learner at its start."""
    placement = place(job.spec.model, stacked_plan(job, shape), job.spec.world_size)
    learner = Learner(job.spec, placement, collectives, folder, device=device)
    learner.start(job.spec.training.seed)
    return learner
