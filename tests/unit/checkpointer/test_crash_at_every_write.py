"""The store stops answering after every possible number of writes; then a new sidecar goes on on the same folder."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from dlrm_api.errors import StoreUnavailableError
from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import CHUNKS, MANIFESTS
from dlrm_checkpointer.read.catalog import list_snapshots, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot, open_snapshot
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest

WRITES_OF_A_COMMIT = 30
"""More than a commit of two ranks with retention makes; the last cases therefore run undisturbed."""


@pytest.mark.slow
@pytest.mark.parametrize("writes_left", range(WRITES_OF_A_COMMIT))
def test_a_crash_leaves_the_old_or_new_snapshot_and_is_recovered(
    tmp_path: Path, files: FileStore, new_model, new_pod, dying, writes_left: int
):
    model = new_model()
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), keep_last=1, grace_s=0.2)
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(), attempt)
    old = model.digest()
    pod.cut(model.train(), attempt)
    pod.store = dying(files, writes_left)

    code = pod.finish()
    snapshot, reasons = newest_snapshot(files)

    assert reasons == []
    assert snapshot_digest(snapshot) == {1: old, 2: model.digest()}[snapshot.step]
    assert code == (ExitCode.TEMPORARY if snapshot.step == 1 else ExitCode.DONE)

    pod.store = files
    code = pod.finish()
    snapshot, _ = newest_snapshot(files)

    assert code == ExitCode.DONE
    assert (snapshot.step, snapshot_digest(snapshot)) == (2, model.digest())
    assert sorted(path.name for path in pod.folder.iterdir() if path.is_dir()) == []


@pytest.mark.parametrize("writes_left", range(25))
def test_retention_interrupted_anywhere_leaves_only_whole_snapshots(
    tmp_path: Path, files: FileStore, new_model, new_pod, dying, writes_left: int
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, keep_last=100)
    claim_attempt(files, None, "names attempt 1")
    for _ in range(3):
        pod.commit(model.train(), 1)

    with contextlib.suppress(StoreUnavailableError):
        Retention(dying(files, writes_left), RetentionPolicy(keep_last=1, orphan_s=0)).apply(1)

    for each in list_snapshots(files):
        verify_snapshot(open_snapshot(files, each.step, each.attempt))
    assert newest_snapshot(files)[0].step == 3
    Retention(files, RetentionPolicy(keep_last=1, orphan_s=0)).apply(1)
    kept = newest_snapshot(files)[0]
    assert [info.key for info in files.list(MANIFESTS)] == ["manifests/0000000000000003-00000001.json"]
    assert {info.key for info in files.list(CHUNKS)} == {entry.key for entry in kept.manifest.objects}
    assert list(files.list("retired/")) == []
