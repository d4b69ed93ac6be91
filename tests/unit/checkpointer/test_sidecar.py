"""The sidecar's loop, in this process: what it does when the store, other pods or the ranks fail it."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import dlrm_checkpointer.handoff.protocol as protocol_module
import dlrm_checkpointer.sidecar as sidecar_module
from dlrm_api.errors import DLRMError, InvalidSpecError, NoPermissionError, StoreUnavailableError, UsageError
from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import manifest_key
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import HandoffDir
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.publish.publisher import Backoff
from dlrm_checkpointer.read.catalog import list_snapshots
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.sidecar import ShutdownPolicy
from dlrm_stores.base import Body, ObjectInfo
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.restored import stored_rows
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.waiting import wait_until


class Flaky(FileStore):
    """A store that refuses every write while ``problem`` is set."""

    problem: DLRMError | None = None

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        if self.problem:
            raise self.problem
        super().put(key, body, sha256)


class Counted(FileStore):
    """A store that counts what one pod reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()

    def get(self, key: str) -> bytes:
        self.reads[key.split("/")[0]] += 1
        return super().get(key)


@contextmanager
def running(*pods) -> Iterator[tuple[list[Future[ExitCode]], threading.Event]]:
    """Sidecars of pods in threads; they end with the block."""
    stop = threading.Event()
    made = [pod.sidecar() for pod in pods]
    with ThreadPoolExecutor(len(made)) as pool:
        codes = [pool.submit(sidecar.run, stop) for _, sidecar in made]
        try:
            yield codes, stop
        finally:
            stop.set()
            for pod in pods:
                pod.end("the test is over")
    for inbox, _ in made:
        inbox.close()


def test_each_cut_is_committed_and_the_sidecar_ends_with_the_trainer(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2))
    with running(pod) as (codes, _):
        for _ in range(3):
            pod.cut(model.train())
            assert pod.writers[0].wait_idle(10)
            assert pod.writers[1].wait_idle(10)
            assert pod.status.progress.committed_step == model.step
        pod.end("done")
        code = codes[0].result(10)

    assert code == ExitCode.DONE
    assert pod.status.progress.reason == "TrainersEnded: rank 0: done; rank 1: done"
    assert pod.status.progress.pending_step is None
    assert [each.step for each in list_snapshots(files)] == [3, 2, 1]


def test_a_sidecar_serves_the_trainers_that_restart_beside_it(tmp_path: Path, files: FileStore, new_model, new_pod):
    model = new_model()
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), trainers_restart=True)
    with running(pod) as (codes, _):
        pod.cut(model.train(), attempt=1)
        assert pod.writers[0].wait_idle(10)
        pod.cut(model.train(), attempt=1, only=range(1))
        pod.end("rank 1 was killed", failed=True)
        time.sleep(0.5)
        survived = not codes[0].done()
        pod.open()
        pod.cut(model, attempt=claim_attempt(files, 1, "restarted"))
        again = [pod.writers[rank].wait_idle(10) for rank in pod.ranks]
        pod.end("done")
        code = codes[0].result(10)

    assert survived
    assert again == [True, True]
    assert code == ExitCode.DONE
    assert [(each.step, each.attempt) for each in list_snapshots(files)] == [(2, 2), (1, 1)]


def test_a_gang_that_dies_during_hand_over_leaves_no_snapshot(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), grace_s=60)
    pod.commit(model.train())
    pod.cut(model.train(), only=range(1))
    start = time.monotonic()

    code = pod.finish()

    assert code == ExitCode.DONE
    assert time.monotonic() - start < 30  # half of the grace period
    assert [each.step for each in list_snapshots(files)] == [1]
    assert pod.status.registry.get_sample_value("dlrm_checkpointer_dropped_cuts_total") == 1


def test_two_pods_commit_one_snapshot_together(tmp_path: Path, files: FileStore, new_model, new_pod):
    model = new_model().train()
    first = new_pod(tmp_path / "0", files, world_size=4, ranks=range(2))
    second = new_pod(tmp_path / "1", files, world_size=4, ranks=range(2, 4))
    with running(first, second) as (codes, _):
        first.cut(model)
        alone = first.writers[0].wait_idle(0.3)
        second.cut(model)
        together = [pod.writers[rank].wait_idle(10) for pod in (first, second) for rank in pod.ranks]
        first.end()
        second.end()
        ends = [code.result(10) for code in codes]

    assert not alone
    assert all(together)
    assert ends == [ExitCode.DONE, ExitCode.DONE]
    assert snapshot_digest(newest_snapshot(files)[0]) == model.digest()


def test_the_pod_of_rank_0_reads_all_part_lists_and_the_others_the_manifest(tmp_path: Path, new_model, new_pod) -> None:
    model, stores = new_model().train(), [Counted(tmp_path / "store") for _ in range(4)]
    pods = [
        new_pod(tmp_path / str(n), store, world_size=8, ranks=range(2 * n, 2 * n + 2)) for n, store in enumerate(stores)
    ]
    with running(*pods):
        for pod in reversed(pods):
            pod.cut(model)
        committed = [pod.writers[rank].wait_idle(20) for pod in pods for rank in pod.ranks]

    assert all(committed)
    assert [store.reads["parts"] for store in stores] == [8, 0, 0, 0]


def test_a_pod_that_finds_an_older_commit_last_still_reports_the_newest(
    tmp_path: Path, files: FileStore, new_model, new_pod
) -> None:
    model = new_model()
    first = new_pod(tmp_path / "0", files, world_size=2, ranks=range(1))
    second = new_pod(tmp_path / "1", files, world_size=2, ranks=range(1, 2))
    with running(first, second) as (codes, _):
        for _ in range(2):
            model.train()
            first.cut_of(0, model)
            second.cut_of(1, model)
            wait_until(lambda: first.status.progress.committed_step == model.step)
        # No rank waits for the first commit, so the second pod looks for it seconds after the second one.
        last = second.writers[1].wait_idle(20)
        first.end()
        second.end()
        ends = [code.result(20) for code in codes]

    commits = second.status.registry.get_sample_value("dlrm_checkpointer_commits_total", {"kind": "full"})
    assert last
    assert ends == [ExitCode.DONE, ExitCode.DONE]
    assert commits == 2
    assert second.status.progress.committed_step == second.status.progress.last_snapshot.step == 2


def test_a_pod_without_rank_0_commits_what_that_one_no_longer_can(
    tmp_path: Path, files: FileStore, new_model, new_pod
) -> None:
    model = new_model().train()
    first = new_pod(tmp_path / "0", files, world_size=4, ranks=range(2), grace_s=0.5)
    second = new_pod(tmp_path / "1", files, world_size=4, ranks=range(2, 4))
    first.cut(model)
    alone = first.finish()

    second.commit(model)

    assert alone == ExitCode.TEMPORARY

    assert [each.step for each in list_snapshots(files)] == [1]


def test_a_pod_whose_neighbour_is_lost_waits_for_its_grace_alone(tmp_path: Path, files: FileStore, new_model, new_pod):
    pod = new_pod(tmp_path / "0", files, world_size=4, ranks=range(2), grace_s=0.5)
    pod.cut(new_model().train())

    code = pod.finish()

    assert code == ExitCode.TEMPORARY
    assert pod.status.progress.reason.startswith("OutOfTime: cut of step 1")
    assert pod.status.progress.pending_step == 1
    assert newest_snapshot(files) == (None, [])


@pytest.mark.parametrize("killed", [False, True], ids=["failed", "killed"])
def test_a_pod_of_a_broken_gang_leaves_the_commit_to_the_last_pod(
    tmp_path: Path, files: FileStore, new_model, new_pod, monkeypatch: pytest.MonkeyPatch, *, killed: bool
):
    monkeypatch.setattr(sidecar_module, "PEERS_TIMEOUT_S", 0.5)
    model = new_model().train()
    first = new_pod(tmp_path / "0", files, world_size=4, ranks=range(2), grace_s=60)
    second = new_pod(tmp_path / "1", files, world_size=4, ranks=range(2, 4), grace_s=60)
    start = time.monotonic()
    with running(first) as (codes, _):
        first.cut(model)
        wait_until(lambda: not list(first.folder.glob("ready-*")))
        first.end("PeerLostError: rank 2 is lost", failed=True)
        if killed:
            (first.folder / "closed-1.json").unlink()
        code = codes[0].result(10)
    waited = time.monotonic() - start
    left = first.status.registry.get_sample_value("dlrm_checkpointer_dropped_cuts_total"), newest_snapshot(files)
    second.cut(model)

    assert code == ExitCode.DONE
    assert 0.5 <= waited < 10
    assert left == (1, (None, []))
    assert second.finish() == ExitCode.DONE
    assert snapshot_digest(newest_snapshot(files)[0]) == model.digest()


def test_an_outage_is_sat_out_while_the_trainer_lives(tmp_path: Path, new_model, new_pod):
    store = Flaky(tmp_path / "store")
    model, pod = new_model().train(), new_pod(tmp_path / "pod", store)
    store.problem = StoreUnavailableError("http://s3 did not answer")
    with running(pod):
        pod.cut(model)
        wait_until(lambda: "did not answer" in pod.status.progress.store_error)
        failing = pod.status.registry.get_sample_value("dlrm_checkpointer_store_failing")
        pending = pod.status.progress.pending_step
        store.problem = None
        committed = pod.writers[0].wait_idle(15)

    assert (failing, pending, committed) == (1, 1, True)
    assert pod.status.progress.store_error == ""
    assert newest_snapshot(store)[0].step == 1


@pytest.mark.slow
def test_an_outage_within_the_grace_period_loses_no_cut(tmp_path: Path, new_model, new_pod):
    store = Flaky(tmp_path / "store")
    model, pod = new_model().train(), new_pod(tmp_path / "pod", store, grace_s=0.6)
    pod.cut(model)
    store.problem = StoreUnavailableError("http://s3 did not answer")

    code = pod.finish()
    store.problem = None
    later = pod.finish()

    assert code == ExitCode.TEMPORARY
    assert later == ExitCode.DONE
    assert snapshot_digest(newest_snapshot(store)[0]) == model.digest()


def test_a_sidecar_started_in_an_outage_reports_its_pending_step(tmp_path: Path, new_model, new_pod):
    class Silent(FileStore):
        """A store that does not even list."""

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            raise StoreUnavailableError("http://s3 did not answer")

    pod = new_pod(tmp_path / "pod", Silent(tmp_path / "store"), grace_s=0.1)
    pod.cut(new_model().train())
    pod.end()

    with running(pod):
        wait_until(lambda: "did not answer" in pod.status.progress.store_error)
        told = pod.status.progress

    assert (told.pending_step, told.committed_step) == (1, None)


def test_refused_credentials_end_it_at_once_when_the_trainers_are_gone(tmp_path: Path, new_model, new_pod):
    store = Flaky(tmp_path / "store")
    store.problem = NoPermissionError("bucket b refused it")
    pod = new_pod(tmp_path / "pod", store, grace_s=60)
    pod.cut(new_model().train())

    code = pod.finish()

    assert code == ExitCode.NO_PERMISSION
    assert "bucket b refused it" in pod.status.progress.reason


def test_a_stop_signal_still_takes_over_the_cut_that_it_causes(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files)
    with running(pod) as (codes, stop):
        stop.set()
        time.sleep(0.2)
        alive = not codes[0].done()
        pod.cut(model)
        pod.end("terminated")
        code = codes[0].result(10)

    assert alive
    assert code == ExitCode.DONE
    assert newest_snapshot(files)[0].step == 1


def test_a_cut_of_an_older_attempt_is_dropped_and_its_memory_freed(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files)
    old = claim_attempt(files, None, "old")
    pod.cut(model, old)
    claim_attempt(files, None, "new")

    code = pod.finish()

    assert code == ExitCode.DONE
    with pytest.raises(InvalidSpecError, match="another run, attempt 2 there"):
        pod.writers[0].ready()
    assert list(files.list("manifests/")) == []
    assert list(files.list("chunks/")) == []


def test_a_refused_cut_is_forgotten_with_the_next_commit(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2))
    first = claim_attempt(files, None, "test")
    good = model.train().copy()
    model.dense["top.0.weight"][0, 0] = np.inf
    with running(pod) as (codes, _):
        pod.cut(model, first)
        wait_until(lambda: (pod.folder / "refused.json").exists() and all(map(has_memory, pod.writers.values())))
        second = claim_attempt(files, None, "again")
        for rank, writer in pod.writers.items():  # one after the other, so that the sidecar goes on
            writer.close("refused")
            pod.writers[rank] = HandoffWriter(pod.folder, rank, None, 2)
        pod.cut(good.train(), second)
        committed = pod.writers[0].wait_idle(10)
        pod.end("done")
        code = codes[0].result(10)

    assert committed
    assert code == ExitCode.DONE, pod.status.progress
    assert snapshot_digest(newest_snapshot(files)[0]) == good.digest()


def has_memory(writer: HandoffWriter) -> bool:
    return all(name.rank != writer.rank for name in HandoffDir(writer.folder).ready_cuts())


def test_a_new_sidecar_knows_the_snapshots_that_were_there(tmp_path: Path, files: FileStore, new_model, new_pod):
    old = new_pod(tmp_path / "old", files)
    old.commit(new_model().train(4))
    pod = new_pod(tmp_path / "new", files)

    pod.finish()

    there, found = old.status.progress.last_snapshot, pod.status.progress.last_snapshot
    assert pod.status.progress.committed_step == 4
    assert found.model_copy(update={"time": there.time}) == there
    assert found.time <= there.time


def test_a_new_sidecar_takes_cuts_beside_a_snapshot_that_it_cannot_read(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model = new_model()
    new_pod(tmp_path / "old", files).commit(model.train(4))
    files.put(manifest_key(4, 1), b"damaged")
    pod = new_pod(tmp_path / "new", files)

    pod.commit(model.train(1))

    assert pod.status.progress.committed_step == 5


@pytest.mark.slow
def test_a_second_sidecar_of_a_folder_is_refused(tmp_path: Path):
    inbox = Inbox(tmp_path, range(1))

    with pytest.raises(UsageError, match="already runs"):
        Inbox(tmp_path, range(1))
    inbox.close()


@pytest.mark.parametrize("bits", [8, 32])
def test_rows_come_back_exact_at_32_bits_and_within_half_a_step_at_8(
    tmp_path: Path, files: FileStore, new_model, new_pod, bits: int
):
    model = new_model().train(2)
    new_pod(tmp_path / "pod", files, bits=bits).commit(model)

    snapshot, _ = newest_snapshot(files)
    pieces = [piece for shard in model.shards(0, 1) for piece in stored_rows(snapshot, shard)]

    assert snapshot.manifest.bits == bits
    for piece in pieces:
        wanted = model.rows[piece.shard.table][piece.row_ids]
        spread = wanted.max(axis=1) - wanted.min(axis=1)
        bound = 0 if bits == 32 else (spread / 255 * 0.501)[:, None]
        assert (abs(piece.rows - wanted) <= bound).all()
        assert (piece.state == model.state[piece.shard.table][piece.row_ids]).all()
    assert sum(len(piece.row_ids) for piece in pieces) == sum(int(each.sum()) for each in model.touched.values())
    assert (snapshot_digest(snapshot) == model.digest()) == (bits == 32)


def test_the_end_of_the_locks_is_the_end_only_after_one_was_held():
    policy = ShutdownPolicy(grace_s=10)
    policy.observe(living=False, stopping=False, now=0)
    before = (policy.ended, policy.deadline)
    policy.observe(living=True, stopping=False, now=1)
    policy.observe(living=False, stopping=False, now=2)

    assert before == (False, None)
    assert (policy.ended, policy.deadline) == (True, 12)
    assert not policy.is_over(11.9)
    assert policy.is_over(12)


def test_a_stop_starts_the_clock_and_waits_for_the_locks():
    policy = ShutdownPolicy(grace_s=10)
    policy.observe(living=True, stopping=True, now=5)
    held = (policy.ended, policy.deadline)
    policy.observe(living=False, stopping=True, now=6)

    assert held == (False, 15)
    assert (policy.ended, policy.deadline) == (True, 15)


def test_pauses_grow_to_a_bound_and_shrink_near_the_end():
    backoff = Backoff()
    pauses = [backoff.next(hurried=False) for _ in range(20)]

    assert pauses[0] <= 0.2
    assert 15 <= pauses[-1] <= 30
    assert backoff.next(hurried=True) <= 2
    backoff.reset()
    assert backoff.next(hurried=False) <= 0.2


def test_a_cut_that_cannot_be_opened_for_a_moment_is_stored_later(
    tmp_path: Path, files: FileStore, new_model, new_pod, monkeypatch: pytest.MonkeyPatch
):
    refused = []

    def refuse_once(*given: Any, **named: Any) -> mmap.mmap:
        if not refused:
            refused.append(errno.ENOMEM)
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return mmap.mmap(*given, **named)

    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    monkeypatch.setattr(protocol_module, "mmap", SimpleNamespace(mmap=refuse_once, ACCESS_READ=mmap.ACCESS_READ))
    with running(pod) as (codes, _):
        pod.cut(model.train())
        assert pod.writers[0].wait_idle(20)
        pod.end("done")
        code = codes[0].result(10)

    assert refused
    assert code == ExitCode.DONE
    assert newest_snapshot(files)[0].step == 1
