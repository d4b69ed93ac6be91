"""Runs on a pretended GPU, whose sums of a step are read a step later, next to runs on the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_api.names import ExitCode
from dlrm_testing.trainer.gangs import Pod, job_document, plan_document, small_job

pytestmark = pytest.mark.slow

STEPS = 34
MakePod = Callable[..., Pod]


@pytest.fixture
def make_pod(tmp_path: Path) -> Iterator[MakePod]:
    pods: list[Pod] = []

    def make(name: str, world_size: int = 1, *, on_gpu: bool, **changes: Any) -> Pod:
        folder = tmp_path / name
        training = {"maxSteps": STEPS, "evalEverySteps": 15} | changes.pop("training", {})
        changes = {
            "training": training,
            "checkpoint": {"intervalSteps": 10, "retention": {"keepLast": 100}, "bits": 32},
        } | changes
        plan = plan_document(small_job(folder, world_size, **changes))
        if on_gpu:
            for shard in (shard for table in plan["tables"] for shard in table["ranges"] if shard["kind"] == "table"):
                shard["tiers"] = {"levels": [{"tier": "hbm", "rows": shard["rowEnd"]}]}
        pods.append(Pod(folder, job_document(folder, world_size, **changes), plan))
        if on_gpu:
            pods[-1].module = "dlrm_testing.trainer.pretended_trainer"
        return pods[-1]

    yield make
    for pod in pods:
        pod.close()


def cut_steps(pod: Pod) -> list[int]:
    """Return the steps of the snapshots in the store."""
    names = (path.name for path in (pod.folder / "store" / "manifests").iterdir())
    return sorted(int(name.partition("-")[0]) for name in names if re.match(r"\d+-", name))


@pytest.mark.parametrize("world_size", [1, 2])
def test_cuts_evaluations_and_losses_are_those_of_the_host(make_pod: MakePod, world_size: int) -> None:
    host, gpu = (make_pod(str(on_gpu), world_size, on_gpu=on_gpu) for on_gpu in (False, True))

    codes = [pod.run() for pod in (host, gpu)]

    assert codes == [ExitCode.DONE] * 2
    # Those between wait until the checkpointer has taken the one before.
    assert [(steps[0], steps[-1]) for steps in map(cut_steps, (host, gpu))] == [(10, STEPS)] * 2
    steps, losses = ([[line[key] for line in pod.lines()] for pod in (host, gpu)] for key in ("step", "loss"))
    assert steps[0] == steps[1] == list(range(1, STEPS + 1))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3)
    assert gpu.result()["samples"] == host.result()["samples"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_that_is_not_finite_ends_the_job_and_is_in_no_cut(make_pod: MakePod, world_size: int) -> None:
    training = {"rowOptimizer": {"learningRate": 1_000}, "denseOptimizer": {"kind": "sgd", "learningRate": 1_000}}
    cuts = {"intervalSteps": 1, "bits": 32}
    pod = make_pod("diverging", world_size, on_gpu=True, checkpoint=cuts, training=training)

    code, ended = pod.run(), pod.termination()

    assert (code, ended.reason) == (ExitCode.BAD_DATA, "Diverged")
    diverged = int(re.search(r"in step (\d+)", ended.message)[1])  # type: ignore[index]
    assert max(cut_steps(pod), default=0) < diverged
    assert "table " in ended.message or "dense parameter " in ended.message
