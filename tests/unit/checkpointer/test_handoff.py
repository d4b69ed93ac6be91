from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dlrm_api.errors import DeviceError, DivergedError, InvalidSpecError, SnapshotError, TemporaryError, UsageError
from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.manifest import NewerVersionError
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import HandoffDir, RefusedCut
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores.file import FileStore


def test_the_sidecar_reads_the_cut_that_a_rank_hands_over(tmp_path: Path, new_model):
    model = new_model().train(2)
    writer = HandoffWriter(tmp_path, 1, None)
    writer.hand_over(model.meta(2), model.pieces(1, 2), None, owned=model.shards(1, 2), timeout_s=1)
    inbox = Inbox(tmp_path, range(2))

    (name,) = inbox.ready()
    cut = inbox.open(name)

    assert (name.step, name.attempt, name.rank) == (2, 1, 1)
    assert cut.meta == model.meta(2)
    assert cut.dense() is None
    given = [piece for piece in model.pieces(1, 2) if len(piece.row_ids)]
    for got, wanted in zip(cut.pieces(), given, strict=True):
        assert got.shard == wanted.shard
        for field in ("row_ids", "rows", "state"):
            np.testing.assert_array_equal(getattr(got, field), getattr(wanted, field))
    inbox.close()


def test_one_cut_waits_at_most_and_freeing_it_lets_the_next_in(tmp_path: Path, new_model):
    model, writer = new_model().train(), HandoffWriter(tmp_path, 0, None)
    writer.hand_over(model.meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1)
    waiting = writer.ready()

    with pytest.raises(TemporaryError, match="rank 0: an earlier cut still waits"):
        writer.hand_over(model.train().meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1)
    inbox = Inbox(tmp_path, range(1))
    inbox.free(inbox.ready()[0])
    inbox.close()

    assert not waiting
    assert writer.ready()
    assert not list(tmp_path.glob("dead-*"))


def test_a_budget_that_cannot_hold_one_row_is_refused_and_nothing_is_left(tmp_path: Path, new_model):
    model, writer = new_model().train(), HandoffWriter(tmp_path, 0, 2_000, 2)

    with pytest.raises(DeviceError, match=r"2000 bytes .* spec\.checkpoint\.handoffBudget"):
        writer.hand_over(model.meta(2), model.pieces(0, 2), model.dense, owned=model.shards(0, 2), timeout_s=1)

    assert HandoffDir(tmp_path).ready_cuts() == []
    assert not list(tmp_path.glob("writing-*"))
    assert writer.ready()


def test_a_full_device_is_named_with_the_bytes_and_leaves_nothing(tmp_path: Path, new_model, monkeypatch):
    model, writer = new_model().train(), HandoffWriter(tmp_path, 0, None)
    real, left = os.posix_fallocate, [0]

    def allocate(descriptor: int, start: int, size: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    with pytest.raises(DeviceError, match=rf"cannot write \d+ bytes to {tmp_path}: No space left on device; free"):
        writer.hand_over(model.meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1)
    monkeypatch.undo()

    assert HandoffDir(tmp_path).ready_cuts() == []
    assert not list(tmp_path.glob("writing-*"))
    writer.hand_over(model.meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1)
    assert not writer.ready()


def test_an_error_of_the_gather_leaves_nothing_behind(tmp_path: Path, new_model):
    model, writer = new_model().train(), HandoffWriter(tmp_path, 0, None)

    def gather():
        yield from list(model.pieces(0, 1))[:1]
        raise RuntimeError("the gather failed")

    with pytest.raises(RuntimeError, match="the gather failed"):
        writer.hand_over(model.meta(1), gather(), model.dense, owned=model.shards(0, 1), timeout_s=1)

    assert writer.ready()
    assert not list(tmp_path.glob("writing-*"))


def test_rows_that_are_not_of_their_shard_are_refused(tmp_path: Path, new_model):
    model, writer = new_model().train(), HandoffWriter(tmp_path, 0, None)
    piece = next(model.pieces(0, 1))
    object.__setattr__(piece, "row_ids", piece.row_ids[::-1].copy())

    with pytest.raises(ValueError, match="row ids"):
        writer.hand_over(model.meta(1), [piece], model.dense, owned=model.shards(0, 1), timeout_s=1)


OTHER_RELEASES = {3: NewerVersionError, 1: SnapshotError}
"""Versions of the folder, which releases before this one and after it would say, and how they are refused."""


@pytest.mark.parametrize("version", OTHER_RELEASES)
def test_a_trainer_beside_a_checkpointer_of_another_release_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
):
    with monkeypatch.context() as other:
        other.setattr("dlrm_checkpointer.handoff.protocol.LAYOUT_VERSION", version)
        Inbox(tmp_path, range(1)).close()

    with pytest.raises(OTHER_RELEASES[version], match=rf"the checkpointer .* version {version} .*spec.trainer.image"):
        HandoffWriter(tmp_path, 0, None)
    assert not (tmp_path / "rank-0.lock").exists()


@pytest.mark.parametrize("version", OTHER_RELEASES)
def test_a_cut_of_another_release_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, new_model, version: int):
    model = new_model().train()
    with monkeypatch.context() as other:
        other.setattr("dlrm_checkpointer.handoff.protocol.LAYOUT_VERSION", version)
        writer = HandoffWriter(tmp_path, 0, None)
        writer.hand_over(model.meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1)
    inbox = Inbox(tmp_path, range(1))

    with pytest.raises(OTHER_RELEASES[version], match=rf"rank 0 uses version {version} .* version 2"):
        inbox.open(inbox.ready()[0])
    inbox.close()


def test_a_checkpointer_from_before_versions_is_told_by_its_lock(tmp_path: Path):
    (tmp_path / "sidecar.lock").write_text("4711")

    with pytest.raises(SnapshotError, match="the checkpointer uses version 0"):
        HandoffWriter(tmp_path, 0, None)


@pytest.mark.slow
def test_a_second_process_of_the_same_rank_is_refused_with_the_pid(tmp_path: Path):
    writer = HandoffWriter(tmp_path, 3, None)

    with pytest.raises(UsageError, match=rf"rank-3.lock: rank 3 already runs \(pid {os.getpid()}\)"):
        HandoffWriter(tmp_path, 3, None)
    writer.close("done")
    HandoffWriter(tmp_path, 3, None).close("done")


@pytest.mark.slow
def test_a_killed_rank_lets_go_of_its_lock(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from dlrm_checkpointer.handoff.writer import HandoffWriter;"
        "w = HandoffWriter(Path(sys.argv[1]), 0, None); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        inbox = Inbox(tmp_path, range(2))
        held = inbox.living()
        rank.send_signal(signal.SIGKILL)
        rank.wait()

    assert held == {0}
    assert inbox.living() == set()
    assert inbox.reasons() == {}
    inbox.close()


def test_a_rank_that_closes_says_why(tmp_path: Path):
    writer = HandoffWriter(tmp_path, 0, None)
    writer.close("done")
    writer.close("again")
    inbox = Inbox(tmp_path, range(1))

    assert inbox.reasons() == {0: "done"}
    inbox.close()


@pytest.mark.parametrize("damage", ["shorter", "other boot", "no index"])
def test_a_cut_that_cannot_be_whole_is_refused(tmp_path: Path, new_model, damage: str):
    model, writer = new_model().train(), HandoffWriter(tmp_path, 0, None)
    writer.hand_over(model.meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1)
    inbox = Inbox(tmp_path, range(1))
    folder = tmp_path / str(inbox.ready()[0])
    index = folder / "index.json"
    if damage == "shorter":
        os.truncate(folder / "rows.bin", 100)
    elif damage == "other boot":
        index.write_text(index.read_text().replace('"boot": "', '"boot": "x'))
    else:
        index.unlink()

    with pytest.raises(SnapshotError, match=r"ready-0000000000000001-00000001-000000"):
        inbox.open(inbox.ready()[0])
    inbox.close()


def test_waiting_for_the_commit_ends_with_it(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files)
    writer = pod.writers[0]
    assert writer.wait_idle(0)
    assert writer.committed_step() is None
    pod.cut(model)

    before = writer.wait_idle(0.05)
    pod.finish()

    assert not before
    assert writer.wait_idle(0)
    assert writer.committed_step() == 1


def test_a_cut_with_a_value_that_is_not_finite_is_refused_by_table_and_row(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files)
    row = int(np.flatnonzero(model.touched["items"])[5])
    model.rows["items"][row, 3] = np.nan
    pod.cut(model)
    writer = pod.writers[0]

    code = pod.finish()

    problem = f"table items, row {row}: a weight is not finite"
    assert code == ExitCode.BAD_DATA
    assert problem in pod.status.progress.reason
    assert list(files.list("manifests/")) == []
    for then in (lambda: writer.wait_idle(1), writer.ready, lambda: pod.cut(model.train())):
        with pytest.raises(DivergedError, match=problem):
            then()


def test_a_refused_cut_concerns_only_its_attempt_until_a_newer_commit(tmp_path: Path, new_model, new_pod):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", FileStore(tmp_path / "store"))
    inbox, writer = Inbox(pod.folder, pod.ranks), pod.writers[0]
    pod.cut(model, attempt=2)
    inbox.free(inbox.ready()[0])
    answers = []
    for notice in (
        lambda: inbox.refused.write(RefusedCut(1, 1, "of an attempt before")),
        lambda: inbox.refused.write(RefusedCut(1, 2, "bad")),
        lambda: inbox.publish_committed(SnapshotName(2, 2)),
    ):
        notice()
        try:
            answers.append(writer.ready())
        except DivergedError as error:
            answers.append(str(error))

    assert answers == [True, "bad", True]
    inbox.close()


def test_a_rank_is_told_that_a_newer_attempt_owns_its_store(tmp_path: Path, new_model, new_pod):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", FileStore(tmp_path / "store"))
    inbox, writer = Inbox(pod.folder, pod.ranks), pod.writers[0]
    inbox.superseded.write({"attempt": 2})  # of an earlier use of the folder
    pod.cut(model, attempt=2)
    inbox.free(inbox.ready()[0])
    assert writer.ready()

    inbox.superseded.write({"attempt": 3})

    for ask in (writer.ready, lambda: writer.wait_idle(1)):
        with pytest.raises(InvalidSpecError, match=r"spec\.checkpoint\.uri: another run, attempt 3"):
            ask()
    inbox.close()


def test_a_file_size_limit_is_a_full_device_too(tmp_path: Path, new_model):
    model, writer = new_model().train(), HandoffWriter(tmp_path, 0, None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(DeviceError, match="File too large; free space there or raise its size"):
            writer.hand_over(model.meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert writer.ready()


def test_a_reason_that_names_an_undecodable_file_is_read(tmp_path: Path):
    inbox, writer = Inbox(tmp_path, range(1)), HandoffWriter(tmp_path, 0, None)
    reason = f"file not found: {os.fsdecode(bytes([0xFF]))}.tsv"

    writer.close(reason, failed=True)

    assert inbox.reasons() == {0: reason}
    inbox.close()
