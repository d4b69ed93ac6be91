"""Results in the work directory of a finished run, and a damaged file's effect on the next run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_api.errors import DLRMError
from dlrm_api.job import DLRMJob, parse_job
from dlrm_cli.run.workdir import RunResult, WorkDir, read_final, read_profile, read_result, write_final


@pytest.fixture
def job() -> DLRMJob:
    model = {"tables": [{"name": "C1", "rows": 1_000, "dim": 4}, {"name": "C2", "rows": 10, "dim": 4}]}
    spec = {"model": model, "data": {"format": "synthetic"}, "checkpoint": {"uri": "file:///tmp/small"}}
    return parse_job({"metadata": {"name": "small"}, "spec": spec})


def test_a_job_that_finished_is_known_again_unless_any_field_differs(tmp_path: Path, job: DLRMJob) -> None:
    workdir = WorkDir(tmp_path)
    training = job.spec.training.model_copy(update={"seed": job.spec.training.seed + 1})
    other = job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})
    result = RunResult(
        step=7, samples=70, world_size=1, train_loss=0.5, eval=None, samples_per_s=9.0, restarts=0, snapshots=()
    )

    write_final(workdir, job, result)

    assert read_final(workdir, job) == result
    assert read_final(workdir, other) is None


HUGE = b'{"step": 1%s, "samples": 1, "world_size": 1}' % (b"0" * 5_000)


@pytest.mark.parametrize("content", [b"", b"\xff{[\0", b"{}", HUGE, b"[" * 100_000])
def test_files_that_are_damaged_are_taken_as_absent(tmp_path: Path, job: DLRMJob, content: bytes) -> None:
    workdir = WorkDir(tmp_path)
    for path in (workdir.final, workdir.profile, workdir.result):
        path.write_bytes(content)

    assert read_final(workdir, job) is None
    assert read_profile(workdir) is None
    with pytest.raises(DLRMError, match=r"result\.json"):
        read_result(workdir, (), 0)
