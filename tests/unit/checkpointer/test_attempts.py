from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import SnapshotError, StoreUnavailableError, TemporaryError
from dlrm_checkpointer.format.attempts import (
    DEAD_MARK_S,
    StoreAttempt,
    claim_attempt,
    in_lineage,
    newest_attempt,
    read_attempts,
)
from dlrm_checkpointer.read.catalog import list_snapshots
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.types import SnapshotName
from dlrm_checkpointer.write.commit import try_commit
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest


def test_a_manifest_counts_if_every_later_attempt_continued_from_it():
    attempts = [StoreAttempt(2, 100), StoreAttempt(3, 250)]

    assert in_lineage(100, 1, attempts)
    assert not in_lineage(101, 1, attempts)
    assert in_lineage(250, 2, attempts)
    assert not in_lineage(251, 2, attempts)
    assert in_lineage(900, 3, attempts)
    assert not in_lineage(1, 3, [*attempts, StoreAttempt(4, None)])


@given(
    history=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=8),
    late=st.tuples(st.integers(1, 60), st.integers(0, 7)),
)
def test_a_late_commit_never_changes_which_snapshot_is_newest(history, late):
    """Each attempt goes on from the newest snapshot and commits some; an earlier one commits late at any step."""
    attempts: list[StoreAttempt] = []
    manifests: set[tuple[int, int]] = set()

    def newest() -> tuple[int, int] | None:
        return max((key for key in manifests if in_lineage(*key, attempts)), default=None)

    for steps, skipped in history:
        start = newest()
        number = len(attempts) + 1
        attempts.append(StoreAttempt(number, start[0] if start else None))
        first = (start[0] if start else 0) + 1 + skipped
        manifests |= {(first + i, number) for i in range(steps)}
    before = newest()
    step, attempt = late
    if attempt < len(attempts) and not (before and step <= before[0]):
        manifests.add((step, attempt))

    assert newest() == before


def test_a_late_commit_of_a_lost_gang_is_ignored_and_said_so(tmp_path: Path, files: FileStore, new_model, new_pod):
    lost, model = new_model(), new_model()
    first = new_pod(tmp_path / "lost", files)
    attempt = claim_attempt(files, None, "lost node")
    first.commit(lost.train(), attempt)
    model.train()
    second_attempt = claim_attempt(files, 1, "its successor")
    second = new_pod(tmp_path / "next", files)
    first.cut(lost.train(5), attempt)
    part = first.writers[0]
    part.close("lost")

    code = first.finish()  # it notices the newer attempt and gives up
    assert (code, first.status.progress.committed_step) == (0, 1)

    second.commit(model.train(), second_attempt)
    snapshot, reasons = newest_snapshot(files)
    assert (snapshot.step, snapshot.attempt, reasons) == (2, second_attempt, [])


def test_a_commit_that_a_lost_node_had_already_begun_is_fenced_by_readers(
    tmp_path: Path, files: FileStore, new_model, new_pod, dying
):
    lost, model = new_model(), new_model().train()
    attempt = claim_attempt(files, None, "lost node")
    pod = new_pod(tmp_path / "lost", files, grace_s=0)
    pod.commit(lost.train(), attempt)
    pod.cut(lost.train(8), attempt)
    pod.store = dying(files, 6)  # four chunks, the dense state and the part list go up, the manifest does not
    pod.finish()
    successor = claim_attempt(files, 1, "its successor")

    late = try_commit(files, 9, attempt, 1)
    snapshot, reasons = newest_snapshot(files)

    assert late is not None
    assert (snapshot.step, snapshot_digest(snapshot)) == (1, model.digest())
    assert reasons == [f"step 9 of attempt {attempt}: attempt {successor} continued from step 1 instead"]
    assert [(each.step, bool(each.problem)) for each in list_snapshots(files)] == [(9, True), (1, False)]


def test_the_lineage_restarts_if_all_snapshots_were_abandoned(tmp_path: Path, files: FileStore, new_model, new_pod):
    new_pod(tmp_path / "pod", files).commit(new_model().train(), 1)
    claim_attempt(files, None, "1")
    claim_attempt(files, None, "2 started before 1 committed")

    snapshot, reasons = newest_snapshot(files)

    assert snapshot is None
    assert reasons == ["step 1 of attempt 1: attempt 2 continued from the beginning instead"]


def test_a_claim_on_a_snapshot_that_is_being_removed_is_taken_back(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    new_pod(tmp_path / "pod", files).commit(new_model().train(), claim_attempt(files, None, "1"))
    files.put("retired/0000000000000001-00000001.json", b"")

    with pytest.raises(TemporaryError, match="step 1 is being removed: choose again"):
        claim_attempt(files, 1, "2")

    assert newest_attempt(files) == 1


def test_retention_stops_if_an_attempt_appears_between_mark_and_delete(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    class Interrupted(FileStore):
        """A new attempt claims right after the first mark."""

        def put(self, key: str, body: bytes, sha256: str | None = None) -> None:
            super().put(key, body, sha256)
            if key.startswith("retired/") and newest_attempt(files) == 1:
                claim_attempt(files, 3, "2")

    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    claim_attempt(files, None, "1")
    for _ in range(3):
        pod.commit(model.train(), 1)

    removed = Retention(Interrupted(files.root), RetentionPolicy(keep_last=1, orphan_s=0)).apply(1)

    assert removed == 0
    assert [each.step for each in list_snapshots(files)] == [3, 2, 1]
    assert list(files.list("retired/")) == []


def test_an_announcement_that_cannot_be_read_is_named(files: FileStore):
    files.put("attempts/00000002.json", b"{")
    files.put("manifests/0000000000000001-00000001.json", b"{}")

    with pytest.raises(SnapshotError, match=r"attempts/00000002\.json: not an attempt's announcement"):
        newest_snapshot(files)


@pytest.mark.parametrize("writes_left", range(5))
def test_a_claim_that_dies_anywhere_invalidates_no_earlier_commit(
    tmp_path: Path, files: FileStore, new_model, new_pod, dying, writes_left: int
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    pod.commit(model.train(), claim_attempt(files, None, "1"))
    pod.commit(model.train(), 1)  # after the claimant had chosen step 1
    files.put("retired/0000000000000001-00000001.json", b"")

    with contextlib.suppress(StoreUnavailableError, TemporaryError):
        claim_attempt(dying(files, writes_left), 1, "2")
    snapshot, reasons = newest_snapshot(files)

    assert (snapshot.step, reasons) == (2, [])
    assert read_attempts(files, 1) == []


def test_a_mark_whose_retention_died_long_ago_holds_no_claim_up(tmp_path: Path, files: FileStore, new_model, new_pod):
    new_pod(tmp_path / "pod", files).commit(new_model().train(), claim_attempt(files, None, "1"))
    mark = "retired/0000000000000001-00000001.json"
    files.put(mark, b"")
    then = time.time() - DEAD_MARK_S - 60
    os.utime(files.root / mark, (then, then))

    assert claim_attempt(files, 1, "2") == 2


def test_an_attempt_withdrawn_while_it_is_read_does_not_count(files: FileStore):
    class Late(FileStore):
        """An announcement goes between its listing and its reading."""

        def get(self, key: str) -> bytes:
            if key == "attempts/00000002.json":
                self.delete(key)
            return super().get(key)

    for note in ("1", "2", "3"):
        claim_attempt(files, None, note)

    assert read_attempts(Late(files.root), 0) == [StoreAttempt(1, None), StoreAttempt(3, None)]


def test_step_0_is_refused_if_the_newest_attempt_restored_a_lost_snapshot(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    new_pod(tmp_path / "pod", files).commit(new_model().train(), claim_attempt(files, None, "1"))
    claim_attempt(files, 1, "2")
    files.delete("manifests/0000000000000001-00000001.json")

    with pytest.raises(SnapshotError, match="attempt 2 continued from step 1, but no snapshot of its history exists"):
        newest_snapshot(files)


def test_a_snapshot_retired_during_verification_yields_to_its_successor(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, lock = new_model(), threading.Lock()

    class Racing(FileStore):
        """An older attempt commits and retires while the first object is read."""

        def get_into(self, key: str, buffer: memoryview) -> int:
            with lock:
                if key.startswith("chunks/") and model.step == 1:
                    pod.commit(model.train(), 1)
            return super().get_into(key, buffer)

    pod = new_pod(tmp_path / "pod", files, keep_last=1)
    pod.commit(model.train(), claim_attempt(files, None, "1"))

    snapshot, reasons = newest_snapshot(Racing(files.root))

    assert (snapshot.step, reasons) == (2, [])
    assert snapshot_digest(snapshot) == model.digest()


@pytest.mark.parametrize("left", ["manifest", "part list"])
def test_a_number_that_anything_is_stored_under_is_not_claimed_again(
    tmp_path: Path, files: FileStore, new_model, new_pod, left: str
):
    """A copy of a store that was in use, or a lifecycle rule, may lack an announcement whose gang stored something."""
    new_pod(tmp_path / "pod", files).commit(new_model().train(), claim_attempt(files, None, "1"))
    other = new_model().train()
    second = claim_attempt(files, 1, "2")
    other.dense["top.0.weight"] += 1
    new_pod(tmp_path / "second", files).commit(other.train(2), second)
    files.delete(f"attempts/{second:08d}.json")
    if left == "part list":
        files.delete(f"manifests/{other.step:016d}-{second:08d}.json")
    else:
        files.delete(f"parts/{other.step:016d}/{second:08d}/000000.json")

    model = new_model().train()
    third = claim_attempt(files, 1, "3")
    new_pod(tmp_path / "third", files).commit(model.train(2), third)
    snapshot, _ = newest_snapshot(files)

    assert third == 3
    assert (snapshot.name, snapshot_digest(snapshot)) == (SnapshotName(3, 3), model.digest())
