"""Whole jobs under each snapshot policy, from other jobs' snapshots, and with tables of other sizes."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.names import ExitCode
from dlrm_checkpointer.read.catalog import find_snapshot, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_stores import open_store
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.repeats import IS_SOAK
from dlrm_testing.waiting import wait_until

pytestmark = pytest.mark.slow

TABLES = [
    {"name": "C1", "rows": 300, "dim": 8, "initializer": {"scale": 0.05}},
    {"name": "C2", "rows": 2_000, "dim": 8, "initializer": {"scale": 0.05}},
    {"name": "C3", "rows": 50, "dim": 8, "initializer": {"scale": 0.05}},
]


WHY = {
    "full": ("full: policy full",),
    "one-shot": ("increment: policy one-shot",),
    "consecutive": ("increment: policy consecutive",),
    "intermittent": ("increment: policy intermittent", "full: a full snapshot and its increments are expected"),
}
"""Kind and reason, by policy, of a snapshot that has one before it."""
DROPPED = "was discarded, the next is full"
END = 1_000
"""Steps of a run that continues after a kill, and of the undisturbed one."""
INTERVAL = 50
"""Steps between two cuts: so few of them that the chain of no policy reaches its greatest length."""
ENDLESS = {"epochs": 10_000, "globalBatchSize": 512}
"""With steps so long that a busy machine commits a first cut before most of them are made."""


@dataclass(frozen=True)
class Undisturbed:
    """A run of ``END`` steps that nothing disturbed: its snapshots, and the digest of its state."""

    store: Path
    digest: str


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, local_in: Callable[[Path], Any]) -> Undisturbed:
    local = local_in(tmp_path_factory.mktemp("undisturbed"))
    local.write(model={"tables": TABLES}, data=ENDLESS, training={"maxSteps": END}, checkpoint={"intervalSteps": 200})
    return Undisturbed(local.store, local.done("--digest")["state_digest"])


@pytest.mark.soak
@pytest.mark.parametrize("policy", WHY if IS_SOAK else ["consecutive", "intermittent"])
def test_a_killed_run_ends_like_an_undisturbed_one_under_any_policy(
    local: Any, undisturbed: Undisturbed, policy: str
) -> None:
    checkpoint = {"policy": policy, "intervalSteps": INTERVAL, "retention": {"keepLast": 2}}
    local.write(model={"tables": TABLES}, checkpoint=checkpoint, data=ENDLESS)
    process = local.start()
    wait_until(lambda: len(local.steps()) >= INTERVAL + 2 and any(local.store.glob("manifests/*")), state=local.logs)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    killed, steps = local.last_attempt(), len(local.steps())
    assert steps < END - 50, "nothing was left to train when the kill came"

    resumed = local.done("--digest", "--set", f"spec.training.maxSteps={END}")

    assert resumed["state_digest"] == undisturbed.digest
    snapshot = find_snapshot(open_store(local.store.as_uri()))
    verify_snapshot(snapshot)
    assert snapshot_digest(snapshot) == undisturbed.digest
    choices = local.choices(after=killed)
    assert choices, local.logs()
    assert [choice for choice in choices if not choice.startswith(WHY[policy])] == []


def test_snapshots_continue_after_one_that_only_one_pod_finds_damaged(local: Any) -> None:
    checkpoint = {"policy": "full", "intervalSteps": 10}
    local.write(checkpoint=checkpoint, data={"epochs": 40}, trainer={"replicas": 2})
    process = local.start("--digest")
    deadline = time.monotonic() + 120
    while not any(DROPPED in log.read_text() for log in local.workdir.glob("logs/*/*.log")):
        assert time.monotonic() < deadline, local.logs()
        assert process.poll() is None
        with contextlib.suppress(FileNotFoundError):  # a chunk or its folder was retired meanwhile
            for chunk in local.store.glob("chunks/*/*/000001/*.safetensors"):
                body = chunk.read_bytes()
                chunk.write_bytes(body[:-1] + bytes([body[-1] ^ 1]))
        time.sleep(0.2)
    stdout, stderr = process.communicate(timeout=240)

    assert process.returncode == ExitCode.DONE, stderr + local.logs()
    snapshot, reasons = newest_snapshot(open_store(local.store.as_uri()))
    assert reasons == []
    assert snapshot_digest(snapshot) == json.loads(stdout)["state_digest"]
    assert local.last_attempt() == 1
    assert local.choices(after=0).count("full: no parent") > 2  # both pods begin with one


def test_a_job_starts_from_another_jobs_snapshot_and_keeps_all_of_it(local: Any, undisturbed: Undisturbed) -> None:
    old, _ = newest_snapshot(open_store(undisturbed.store.as_uri()))
    local.write(
        model={"tables": TABLES},
        checkpoint={"restoreFrom": undisturbed.store.as_uri(), "intervalSteps": 1_000},
        training={"maxSteps": 1},
    )

    result = local.done("--digest")

    new, reasons = newest_snapshot(open_store(local.store.as_uri()))
    assert (reasons, new.step, new.manifest.kind, new.meta.parent) == ([], 1, "full", None)
    assert snapshot_digest(new) == result["state_digest"]
    assert verify_snapshot(new).rows.items() >= verify_snapshot(old).rows.items()


def test_a_job_that_is_to_start_from_an_empty_store_says_so(local: Any) -> None:
    local.write(checkpoint={"restoreFrom": (local.folder / "nowhere").as_uri()})

    finished = local.run()

    assert finished.code == ExitCode.NO_INPUT
    assert "spec.checkpoint.restoreFrom: " in finished.stderr
    assert "holds no snapshot" in finished.stderr


def test_tables_that_grow_between_two_runs_keep_trained_rows(local: Any, undisturbed: Undisturbed) -> None:
    shutil.copytree(undisturbed.store, local.store)
    larger = [*TABLES[:1], TABLES[1] | {"rows": 5_000}, TABLES[2]]
    local.write(model={"tables": larger}, data=ENDLESS, training={"maxSteps": END + 10})

    result = local.done("--digest")

    snapshot, reasons = newest_snapshot(open_store(local.store.as_uri()))
    assert (reasons, snapshot.step) == ([], END + 10)
    assert snapshot.table("C2").rows == 5_000
    assert snapshot_digest(snapshot) == result["state_digest"]

    local.write(model={"tables": TABLES}, data=ENDLESS, training={"maxSteps": END + 20})
    refused = local.run()
    assert refused.code != ExitCode.DONE
    assert "table C2 to 2000 rows: row " in refused.stderr


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory, local_in: Callable[[Path], Any]) -> Any:
    """A job of two ranks whose newest cut, at its last step, rank 1 lost; a copy of it lies beside."""
    folder = tmp_path_factory.mktemp("two-ranks") / "job"
    folder.mkdir()
    local = local_in(folder)
    local.write(
        data={"epochs": 1},
        training={"maxSteps": 10},
        trainer={"processesPerReplica": 2},
        checkpoint={"intervalSteps": 5, "partialRestore": True},
    )
    local.done()
    (local.store / "manifests/0000000000000010-00000001.json").unlink()
    (local.store / "parts/0000000000000010/00000001/000001.json").unlink()
    local.folder.rename(local.folder.with_name("copy"))
    return local


@pytest.fixture
def salvageable(damaged: Any) -> Iterator[Any]:
    """The job at the same place each time, so that it is the same job."""
    shutil.copytree(damaged.folder.with_name("copy"), damaged.folder)
    yield damaged
    shutil.rmtree(damaged.folder)


def test_a_job_continues_from_a_cut_that_one_rank_lost_if_it_says_so(salvageable: Any) -> None:
    local = salvageable

    result = local.done("--digest", "--set", "spec.training.maxSteps=15")

    snapshot, reasons = newest_snapshot(open_store(local.store.as_uri()))
    assert (reasons, result["step"], snapshot.step, snapshot.manifest.kind) == ([], 15, 15, "full")
    assert snapshot_digest(snapshot) == result["state_digest"]
    assert [line["step"] for line in local.steps()] == list(range(1, 16))
    assert "partial restore: lost shards use an older step step=5 stored_ranks=[0]" in local.logs()


def test_a_last_cut_that_one_rank_lost_is_committed_after_the_last_step(salvageable: Any) -> None:
    local = salvageable

    result = local.done("--digest")

    snapshot, reasons = newest_snapshot(open_store(local.store.as_uri()))
    assert (reasons, result["step"], snapshot.step, snapshot.attempt, snapshot.manifest.kind) == ([], 10, 10, 2, "full")
    assert snapshot_digest(snapshot) == result["state_digest"]
    assert "partial restore: lost shards use an older step step=5 stored_ranks=[0]" in local.logs()
