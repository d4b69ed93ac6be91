"""Agreements of ranks before they train."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_api.errors import InvalidSpecError, SnapshotError
from dlrm_checkpointer.format.attempts import JobIdentity, newest_attempt
from dlrm_stores.file import FileStore
from dlrm_trainer.checkpointing.restore import Start, choose_start
from dlrm_trainer.distributed.collectives import Collectives


def test_an_empty_store_is_refused_after_the_job_committed_to_it(tmp_path: Path) -> None:
    store, alone = FileStore(tmp_path / "snapshots"), Collectives(0, 1, lambda: "")
    committed = f"{store.uri}/manifests/0000000000000050-00000003.json"

    with pytest.raises(SnapshotError, match=r"snapshot not found: .*50-00000003\.json, which the job"):
        choose_start(store, alone, "demo, attempt 4", committed=committed)

    assert newest_attempt(store) == 0  # what comes back is not given up


def test_another_store_than_that_of_the_jobs_snapshots_starts_from_step_0(tmp_path: Path) -> None:
    store, other = (FileStore(tmp_path / name) for name in ("snapshots", "snapshots-2"))
    alone, committed = Collectives(0, 1, lambda: ""), f"{other.uri}/manifests/0000000000000050-00000003.json"

    start = choose_start(store, alone, "demo, attempt 4", committed=committed)

    assert (start.attempt, start.snapshot) == (1, None)


ADS = JobIdentity("ads", "prod", "uid-1")


def started(store: FileStore, owner: JobIdentity | None) -> Start:
    return choose_start(store, Collectives(0, 1, lambda: ""), "a start", committed="", owner=owner)


def test_the_store_of_another_job_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "snapshots")
    started(store, ADS)

    for other in (JobIdentity("feed", "prod"), JobIdentity("ads", "test")):
        with pytest.raises(InvalidSpecError, match=r"belongs to job prod/ads; set another URI, and restoreFrom: file:"):
            started(store, other)

    assert newest_attempt(store) == 1


@pytest.mark.parametrize(
    ("before", "now", "note"),
    [
        (ADS, ADS, None),
        (ADS, JobIdentity("ads", "prod", "uid-2"), "continuing the snapshots of another run of job prod/ads"),
        (JobIdentity("ads", "", "box:/work"), ADS, "continuing the snapshots of another run"),
        (None, ADS, "written by an earlier version, which names no owner: job prod/ads takes it over"),
    ],
)
def test_another_run_of_a_job_continues_and_says_so(
    tmp_path: Path, before: JobIdentity | None, now: JobIdentity, note: str | None
) -> None:
    store = FileStore(tmp_path / "snapshots")
    started(store, before)

    found = started(store, now)

    assert found.attempt == 2
    assert [note in each for each in found.notes] == [True] if note else found.notes == ()
