"""What a step takes of a GPU's memory beside tables, counted operation by operation, is what plans count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gangs import hand_plan, run_ranks, small_job
from gpus import gpu_of
from live_memory import LiveMemory
from pretended_gpu import Pretended
from shardings import every_shard_in
from stacked import ALONE

from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_planner.dense import device_activation_bytes, lookup_bytes, message_bytes
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.data import open_reader
from dlrm_trainer.embedding import place
from dlrm_trainer.learner import Learner

SAMPLES, TABLES = 2_048, 6
DOT = {"interaction": "dot", "bottomMlp": [8, 64], "topMlp": [32, 1]}


def dcn(layers: int) -> dict[str, Any]:
    return {"interaction": "dcn", "crossLayers": layers, "crossRank": 4, "bottomMlp": [8], "topMlp": [8, 1]}


@pytest.mark.parametrize(
    ("model", "dims", "pooling"),
    [
        (DOT, (64,), "sum"),
        (DOT, (64,), "mean"),
        (dcn(1), (64,), "sum"),
        (dcn(3), (64,), "mean"),
        (dcn(1), (32, 64), "sum"),
        (dcn(2), (32, 64), "mean"),
    ],
)
@pytest.mark.parametrize("most", [None, 256])
@pytest.mark.parametrize("replicas", [0, 1, 2])
def test_a_step_takes_no_more_of_a_gpu_than_plans_count(
    tmp_path: Path, model: dict[str, Any], dims: tuple[int, ...], pooling: str, most: int | None, replicas: int
) -> None:
    tables = [
        {"name": f"t{n}", "rows": 100, "dim": dims[n % len(dims)], "pooling": pooling, "maxLookups": 2}
        for n in range(TABLES)
    ]
    data = {"globalBatchSize": SAMPLES, "synthetic": {"samples": 3 * SAMPLES, "evalSamples": 64}}
    job = small_job(tmp_path, model=model | {"tables": tables}, data=data, training={"microBatchSize": most})
    owners = [None if n % 2 < replicas else 0 for n in range(TABLES)]  # none, every other table, or all of them
    plan = every_shard_in(hand_plan(job, owners), ["hbm"])

    taken = peak_of_a_step(ALONE, job, plan)

    planned = device_activation_bytes(job.spec) + lookup_bytes(job.spec)
    assert 0.5 * planned < taken < 1.01 * planned


def peak_of_a_step(collectives: Collectives, job: DLRMJob, plan: Plan) -> int:
    rank, ranks = collectives.rank, collectives.world_size
    reader = open_reader(job.spec, "train", rank, ranks)
    with gpu_of("pretended") as device, LiveMemory(kind=Pretended) as memory:
        learner = Learner(job.spec, place(job.spec.model, plan, ranks), collectives, device=device)
        learner.start(job.spec.training.seed)
        for number in range(2):  # what the first leaves is there for good
            memory.begin()
            prepared = learner.prepare(learner.send(reader.read(number)))
            learner.apply(learner.compute(prepared, SAMPLES, factor=1.0))
        taken = memory.peak
        learner.embeddings.close()
    return taken


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "pooling", "most"), [(DOT, "mean", None), (dcn(1), "sum", 128), (dcn(1), "mean", 128)]
)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_nor_does_one_of_a_gang_whose_messages_are_counted_too(
    tmp_path: Path, model: dict[str, Any], pooling: str, most: int | None, codec: str
) -> None:
    tables = [{"name": f"t{n}", "rows": 100, "dim": 64, "pooling": pooling, "maxLookups": 2} for n in range(TABLES)]
    data = {"globalBatchSize": SAMPLES, "synthetic": {"samples": 3 * SAMPLES, "evalSamples": 64}}
    formats = dict.fromkeys(("forward", "backward", "dense"), codec)
    training = {"microBatchSize": most, "communication": formats}
    job = small_job(tmp_path, 2, model=model | {"tables": tables}, data=data, training=training)
    plan = every_shard_in(hand_plan(job, [n % 2 for n in range(TABLES)]), ["hbm"])

    taken = run_ranks(2, peak_of_a_step, job, plan)

    planned = device_activation_bytes(job.spec) + lookup_bytes(job.spec) + message_bytes(job.spec)
    assert 0.5 * planned < max(taken) < 1.01 * planned
