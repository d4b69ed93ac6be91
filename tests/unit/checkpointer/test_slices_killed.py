"""Processes that die at any change of a file while a cut is handed over in slices: the trainer, the sidecar."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.names import ExitCode
from dlrm_checkpointer.read.catalog import verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.repeats import spaced

KILLED, FAILED = 9, 1
NEVER = 1_000_000
"""The trainer changes files about 350 times, the sidecar about 180 times."""
CHANGES = frozenset({"os.rename", "os.truncate", "os.remove", "os.rmdir", "os.mkdir", "os.link"})
SPARES = {"spare-0.bin", "spare-1.bin"}
TIDY = ["budget.lock", "committed.json", "rank-0.lock", "rank-1.lock", "sidecar.lock", *SPARES]
"""All that a folder holds when nothing waits; markers of ranks that ended well aside."""


def in_a_process(work: Callable[[], object], dies_at: int) -> int:
    """Do the work in a process of its own, which dies before its n-th change of a file; returns its id."""
    if pid := os.fork():
        return pid
    try:
        left, write, allocate = [dies_at], os.write, os.posix_fallocate

        def change(event: str, arguments: tuple[Any, ...]) -> None:
            opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            if event in CHANGES or opened:
                left[0] -= 1
                if left[0] < 0:
                    os._exit(KILLED)

        def write_half(descriptor: int, data: memoryview) -> int:
            change("os.link", ())
            return write(descriptor, data[: max(1, len(data) // 2)])

        def allocate_later(descriptor: int, start: int, size: int) -> None:
            change("os.link", ())
            allocate(descriptor, start, size)
            change("os.link", ())

        sys.addaudithook(change)
        os.write = write_half  # type: ignore[assignment]
        os.posix_fallocate = allocate_later
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(FAILED)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("closed-"))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("dies_at", [*spaced(370, ci=18, soak=1), NEVER])
def test_a_trainer_that_dies_leaves_a_whole_cut_or_none(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables, dies_at: int
):
    model = new_model(small_tables).train(15)
    pod = new_pod(tmp_path / "pod", files, budget_bytes=12_000, grace_s=20)
    pod.end()

    def train() -> None:
        pod.open()
        pod.cut(model)
        pod.end()

    trainer, stop = in_a_process(train, dies_at), threading.Event()
    inbox, sidecar = pod.sidecar()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sidecar.run, stop)
        how = ended(trainer)
        stop.set()  # it may not have seen the trainer's lock
        code = running.result(20)
    inbox.close()

    snapshot, reasons = newest_snapshot(files)
    assert how in (KILLED, 0)
    assert (code, reasons) == (ExitCode.DONE, [])
    assert snapshot is not None or how == KILLED
    assert snapshot is None or snapshot_digest(snapshot) == model.digest()
    assert set(entries(pod.folder)) <= {*TIDY, ".closed-0.json"}


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("dies_at", [*spaced(190, ci=12, soak=1), NEVER])
def test_a_restarted_sidecar_continues_unnoticed_by_trainers(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables, dies_at: int
):
    model = new_model(small_tables).train(15)
    pod = new_pod(tmp_path / "pod", files, 2, range(2), budget_bytes=20_000, grace_s=20)
    pod.end()  # so that the process doesn't hold the ranks' locks too

    def work() -> None:
        inbox, sidecar = pod.sidecar()
        sidecar.run(threading.Event())
        inbox.close()

    first, stop = in_a_process(work, dies_at), threading.Event()
    pod.open()
    with ThreadPoolExecutor(3) as pool:
        handing = [pool.submit(pod.cut_of, rank, model) for rank in pod.ranks]
        follower = pool.submit(follow, pod, first, stop)
        try:
            handed = [each.result(30) for each in handing]
            committed = [pod.writers[rank].wait_idle(10) for rank in pod.ranks]
        finally:
            pod.end()  # the sidecars end with the ranks
            stop.set()  # one that starts now sees no lock held
        how = follower.result(20)

    snapshot, reasons = newest_snapshot(files)
    verify_snapshot(snapshot)
    assert how in (KILLED, 0)
    assert max(each.segments for each in handed) > 2
    assert (committed, reasons) == ([True, True], [])
    assert snapshot_digest(snapshot) == model.digest()
    assert set(entries(pod.folder)) <= set(TIDY)


def follow(pod, first: int, stop: threading.Event) -> int:
    """Start a sidecar when the first one has died."""
    how = ended(first)
    if how == KILLED:
        inbox, sidecar = pod.sidecar()
        assert sidecar.run(stop) == ExitCode.DONE
        inbox.close()
    return how
