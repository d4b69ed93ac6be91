"""The host asks a GPU for a whole step without a wait, and reads a step later what came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_api.job import DLRMJob
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_testing.trainer.gpus import gpu_of, needs_gpu
from dlrm_testing.trainer.host_waits import HostWaits
from dlrm_testing.trainer.pretended_gpu import Pretended
from dlrm_testing.trainer.sharded_runs import job_of
from dlrm_testing.trainer.shardings import every_shard_in, random_plan
from dlrm_testing.trainer.stacked import ALONE
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.learner import Learner

STEPS = 5
SETTINGS: dict[str, dict[str, Any]] = {
    "adagrad": {},
    "adam": {"kind": "adam"},
    "micro batches": {"microBatchSize": 7},
    "bf16": {"precision": "bf16"},
}


def run_steps(
    collectives: Collectives,
    job: DLRMJob,
    folder: Path,
    device: torch.device,
    guard: Callable[[], AbstractContextManager[object]],
    tiers: Sequence[str] = ("hbm",),
) -> list[float]:
    """Return the losses of some steps, each but the first within a guard: the first loads kernels."""
    plan = every_shard_in(random_plan(np.random.default_rng(5), job.spec.model, job.spec.world_size), tiers)
    learner = Learner(job.spec, place(job.spec.model, plan, job.spec.world_size), collectives, folder, device=device)
    learner.start(job.spec.training.seed)
    reader, losses, unread = open_reader(job.spec, "train", collectives.rank, job.spec.world_size), [], []
    for number in range(STEPS):
        with guard() if number else nullcontext():
            prepared = learner.prepare(learner.send(reader.read(number)))
            computed = learner.compute(prepared, reader.global_count(number))
            unread.append(learner.apply(computed, factor=1.0))
        if number >= learner.steps_ahead:
            losses.append(learner.read(unread.pop(0))[0])
    losses += [learner.read(sums)[0] for sums in unread]
    learner.embeddings.close()
    return losses


def waits_of_steps(collectives: Collectives, job: DLRMJob, folder: Path, tiers: Sequence[str] = ("hbm",)) -> list[str]:
    """Return the operations for which a step on a pretended GPU waits."""
    waits = HostWaits(Pretended)
    with gpu_of("pretended") as device:
        run_steps(collectives, job, folder, device, lambda: waits, tiers)
    return waits.seen


@pytest.mark.parametrize(
    "setting",
    [name if number % 2 == 0 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(SETTINGS)],
)
def test_the_host_waits_for_the_gpu_nowhere_in_a_step(tmp_path: Path, setting: str) -> None:
    assert waits_of_steps(ALONE, job_of(tmp_path, **SETTINGS[setting]), tmp_path) == []


def test_the_host_waits_for_the_gpu_nowhere_in_a_step_over_slots(tmp_path: Path) -> None:
    assert waits_of_steps(ALONE, job_of(tmp_path), tmp_path, ("hbm", "ddr")) == []


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "fp16", "bf16", "int8"])
def test_the_host_waits_for_the_gpu_nowhere_in_a_step_of_two_ranks(tmp_path: Path, codec: str) -> None:
    job = job_of(tmp_path, 2, communication=dict.fromkeys(("forward", "backward", "dense"), codec))

    assert run_ranks(2, waits_of_steps, job, tmp_path) == [[], []]


def test_a_wait_for_the_gpu_is_seen() -> None:
    with gpu_of("pretended") as device, HostWaits(Pretended) as waits:
        values = torch.ones(3).to(device, non_blocking=True)
        values.to("cpu", non_blocking=True)
        assert waits.seen == []
        for wait in (values.cpu, values.nonzero, values.sum().item, lambda: bool(values[0] > 0)):
            before = waits.count
            wait()
            assert waits.count > before


@contextmanager
def refused_waits() -> Iterator[None]:
    """Make torch raise where it would wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("setting", SETTINGS)
def test_torch_sees_no_wait_for_the_gpu_in_a_step(tmp_path: Path, setting: str) -> None:
    losses = run_steps(ALONE, job_of(tmp_path, **SETTINGS[setting]), tmp_path, torch.device("cuda", 0), refused_waits)

    assert np.isfinite(losses).all()
