"""Cuts above the hand-off budget: they come slice by slice, whole or not at all, whoever dies in between."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_api.errors import DivergedError, StoreUnavailableError
from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import CHUNKS
from dlrm_checkpointer.handoff.budget import Budget, CutBuffer
from dlrm_checkpointer.handoff.cut import CutWithdrawnError, HandedOver
from dlrm_checkpointer.handoff.protocol import HandoffDir
from dlrm_checkpointer.read.catalog import list_snapshots, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.types import ShardId, ShardRows
from dlrm_stores.base import Body
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.repeats import repeats
from dlrm_testing.waiting import wait_until

UNSHRUNK = [Phase.explicit, Phase.generate]
"""A failure with its threads takes seconds to show again."""
STATELESS = [HealthCheck.function_scoped_fixture]
"""The fixtures are classes."""
BUDGET = 60_000
"""A cut of the model takes about five times that."""
ITEMS = ShardId(table="items", row_start=0, row_end=70_000, column_start=0, column_end=16)


class Outage(FileStore):
    """A store that is slow, or refuses every write, while told to."""

    down = False
    pause_s = 0.0

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:
        time.sleep(self.pause_s)
        if self.down:
            raise StoreUnavailableError("http://s3 did not answer")
        super().put(key, body, sha256)


@contextmanager
def running(*pods) -> Iterator[None]:
    """Sidecars of pods in threads while the block runs; they end with it, the trainers live on."""
    stop = threading.Event()
    made = [pod.sidecar() for pod in pods]
    with ThreadPoolExecutor(len(made)) as pool:
        codes = [pool.submit(sidecar.run, stop) for _, sidecar in made]
        try:
            yield
        finally:
            stop.set()
            for pod in pods:
                pod.end("the test is over")
            for code in codes:
                code.result(20)
            for inbox, _ in made:
                inbox.close()
            for pod in pods:
                pod.open()


def cut_by_all(pod, model, attempt: int = 1) -> list[HandedOver]:
    """Every rank hands its part over, all at once as in a gang."""
    with ThreadPoolExecutor(len(pod.ranks)) as pool:
        return list(pool.map(lambda rank: pod.cut_of(rank, model, attempt), pod.ranks))


def folder_bytes(folder: Path) -> int:
    """Bytes of all files."""
    total = 0
    for path in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
        with suppress(FileNotFoundError):  # freed meanwhile
            total += sum(each.stat().st_size for each in path.iterdir() if each.is_file())
    return total


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir() or path.name.startswith("durable"))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_cut_above_the_budget_comes_back_whole(tmp_path: Path, files: FileStore, new_model, new_pod, ranks: int):
    model = new_model().train(2)
    pod = new_pod(tmp_path / "pod", files, world_size=ranks, ranks=range(ranks), budget_bytes=BUDGET)

    with running(pod):
        handed = cut_by_all(pod, model)
        committed = [pod.writers[rank].wait_idle(10) for rank in pod.ranks]

    snapshot, reasons = newest_snapshot(files)
    verify_snapshot(snapshot)
    assert (all(committed), reasons) == (True, [])
    assert snapshot_digest(snapshot) == model.digest()
    assert all(each.segments > 2 for each in handed)
    assert sum(each.nbytes for each in handed) > 4 * BUDGET
    slices = pod.status.registry.get_sample_value("dlrm_checkpointer_slices_total")
    assert slices == sum(each.segments - 1 for each in handed)
    for rank in pod.ranks:
        keys = [chunk.key for chunk in snapshot.manifest.chunks if f"/{rank:06d}/" in chunk.key]
        assert [key.split("/")[-1][:6] for key in keys] == [f"{number:06d}" for number in range(len(keys))]
    assert leftovers(pod.folder) == []


def test_a_cut_that_fits_is_one_slice_and_waits_for_nobody(tmp_path: Path, files: FileStore, new_model, new_pod):
    model = new_model().train()
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), budget_bytes=400_000)

    most = pod.writers[0].hand_over(
        model.meta(2), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=0
    )
    rest = pod.writers[1].hand_over(model.meta(2), [], None, owned=[], timeout_s=0)

    assert most.segments == rest.segments == 1
    assert most.nbytes > 400_000 // 2
    assert pod.finish() == ExitCode.DONE
    assert snapshot_digest(newest_snapshot(files)[0]) == model.digest()


def chosen_ids(seed: int, sizes: list[list[int]]) -> list[list[NDArray[np.int64]]]:
    """Rows of each rank's pieces, ascending in each; no two are the same."""
    order = np.random.default_rng(seed).permutation(70_000).astype(np.int64)
    each = iter(np.split(order, np.cumsum([size for rank in sizes for size in rank])))
    return [[np.sort(next(each)) for _ in rank] for rank in sizes]


def rows_given(model, ids: list[list[NDArray[np.int64]]], seed: int):
    """The model with other values in all these rows of its largest table."""
    draw, flat = np.random.default_rng(seed), np.concatenate([[], *(piece for rank in ids for piece in rank)])
    rows = flat.astype(np.int64)
    model.rows["items"][rows] = draw.normal(0, 1, (len(rows), 16))
    model.state["items"][rows] = draw.random((len(rows), 2))
    return model


def pieces_of(model, ids: list[NDArray[np.int64]]) -> Iterator[ShardRows]:
    for each in ids:
        yield ShardRows(shard=ITEMS, row_ids=each, rows=model.rows["items"][each], state=model.state["items"][each])


def sampled(call: Callable[..., Any], folder: Path, seen: list[int]) -> Callable[..., Any]:
    """The call, after which the most bytes that the folder ever held are noted, while nothing in it is renamed."""

    def wrapped(*args: Any) -> Any:
        answer = call(*args)
        with HandoffDir(folder).lock():
            seen[0] = max(seen[0], folder_bytes(folder))
        return answer

    return wrapped


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(6, soak=100), phases=UNSHRUNK, suppress_health_check=STATELESS)
@given(data=st.data(), ranks=st.integers(1, 3), seed=st.integers(0, 99))
def test_any_pieces_pass_through_any_budget_and_never_above_it(
    tmp_path_factory: pytest.TempPathFactory, new_model, new_pod, data: st.DataObject, ranks: int, seed: int
):
    budget = data.draw(st.integers(24_000 * ranks, 150_000))
    sizes = data.draw(st.lists(st.lists(st.integers(0, 900), max_size=12), min_size=ranks, max_size=ranks))
    root, seen, ids = tmp_path_factory.mktemp("any"), [0], chosen_ids(seed, sizes)
    pod = new_pod(root / "pod", FileStore(root / "store"), ranks, range(ranks), budget_bytes=budget)
    model = rows_given(new_model(step=1), ids, seed)

    def put(rank: int) -> HandedOver:
        dense = model.dense if rank == 0 else None
        return pod.writers[rank].hand_over(
            model.meta(ranks), pieces_of(model, ids[rank]), dense, owned=[ITEMS], timeout_s=20
        )

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Budget, "reserve_segment"), (CutBuffer, "lay"), (CutBuffer, "hand_over")):
            patch.setattr(owner, name, sampled(getattr(owner, name), pod.folder, seen))
        patch.setattr(HandoffDir, "write_durable", sampled(HandoffDir.write_durable, pod.folder, seen))
        with running(pod), ThreadPoolExecutor(ranks) as pool:
            list(pool.map(put, pod.ranks))
            committed = pod.writers[0].wait_idle(10)

    assert committed
    assert snapshot_digest(newest_snapshot(pod.store)[0]) == model.digest()
    assert 0 < seen[0] <= budget


@pytest.mark.slow
def test_a_cut_times_out_while_the_store_is_down_and_the_next_is_whole(tmp_path: Path, new_model, new_pod):
    store = Outage(tmp_path / "store")
    model, pod = new_model().train(), new_pod(tmp_path / "pod", store, budget_bytes=BUDGET)
    store.down = True
    with running(pod):
        began = time.monotonic()
        with pytest.raises(CutWithdrawnError, match=r"rank 0: the cut at step 1 was withdrawn after 1 segments"):
            pod.cut_of(0, model, timeout_s=0.5)
        took, ready = time.monotonic() - began, pod.writers[0].ready()
        store.down = False
        pod.cut(model.train())
        committed = pod.writers[0].wait_idle(10)

    assert 0.4 < took < 10  # a busy machine sees the time-out late; the store stays down for ever
    assert (ready, committed) == (True, True)
    assert [each.step for each in list_snapshots(store)] == [2]
    assert snapshot_digest(newest_snapshot(store)[0]) == model.digest()
    assert leftovers(pod.folder) == []


@pytest.mark.slow
def test_a_cut_that_times_out_on_a_slow_store_can_be_retried_at_its_step(tmp_path: Path, new_model, new_pod):
    store = Outage(tmp_path / "store")
    model, pod = new_model().train(), new_pod(tmp_path / "pod", store, budget_bytes=BUDGET)
    store.pause_s = 0.15
    with running(pod):
        with pytest.raises(CutWithdrawnError, match=r"after \d+ segments"):
            pod.cut_of(0, model, timeout_s=0.4)
        store.pause_s = 0
        pod.cut(model)
        committed = pod.writers[0].wait_idle(10)

    assert committed
    assert snapshot_digest(newest_snapshot(store)[0]) == model.digest()
    assert leftovers(pod.folder) == []


@pytest.mark.slow
def test_one_rank_may_give_up_while_its_neighbour_hands_over(tmp_path: Path, files: FileStore, new_model, new_pod):
    model = new_model().train()
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), budget_bytes=BUDGET)
    with running(pod):
        pod.cut_of(0, model)
        with pytest.raises(CutWithdrawnError):
            pod.cut_of(1, model, timeout_s=0)
        alone = pod.writers[0].wait_idle(0.1)
        wait_until(pod.writers[0].ready)
        cut_by_all(pod, model.train())
        committed = [pod.writers[rank].wait_idle(10) for rank in pod.ranks]

    assert (alone, committed) == (False, [True, True])
    assert [each.step for each in list_snapshots(files)] == [2]
    assert snapshot_digest(newest_snapshot(files)[0]) == model.digest()


def test_without_a_checkpointer_the_cut_is_given_up_in_time(tmp_path: Path, files: FileStore, new_model, new_pod):
    pod = new_pod(tmp_path / "pod", files, budget_bytes=BUDGET)

    with pytest.raises(CutWithdrawnError, match=r"spec.checkpoint.handoffBudget"):
        pod.cut_of(0, new_model().train(), timeout_s=0.1)

    assert pod.writers[0].ready()
    assert pod.finish() == ExitCode.DONE
    assert list(files.list("")) == []
    assert leftovers(pod.folder) == []


def test_a_slice_with_a_value_that_is_not_finite_ends_the_cut_at_once(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files, budget_bytes=BUDGET)
    row = int(np.flatnonzero(model.touched["items"])[5])
    model.rows["items"][row, 3] = np.inf

    with running(pod), pytest.raises(DivergedError, match=f"table items, row {row}: a weight is not finite"):
        pod.cut(model)

    assert list_snapshots(files) == []
    assert leftovers(pod.folder) == []


def test_slices_and_cut_of_a_superseded_attempt_are_dropped(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model().train(), new_pod(tmp_path / "pod", files, budget_bytes=BUDGET)
    old = claim_attempt(files, None, "old")
    claim_attempt(files, None, "new")

    with running(pod), pytest.raises(CutWithdrawnError, match="a newer attempt has started"):
        pod.cut(model, old)

    assert list(files.list("chunks/")) == []
    assert leftovers(pod.folder) == []


@pytest.mark.slow
def test_the_objects_of_a_cut_that_was_given_up_are_swept(tmp_path: Path, new_model, new_pod):
    store = Outage(tmp_path / "store")
    model, pod = new_model().train(), new_pod(tmp_path / "pod", store, budget_bytes=BUDGET, keep_last=1, orphan_s=0)
    attempt = claim_attempt(store, None, "test")
    store.pause_s = 0.1
    with running(pod):
        with pytest.raises(CutWithdrawnError):
            pod.cut_of(0, model, attempt, timeout_s=0.3)
        store.pause_s = 0
        orphans = {info.key for info in store.list(CHUNKS)}
        for _ in range(2):
            pod.cut(model.train(), attempt)
            assert pod.writers[0].wait_idle(10)

    kept = newest_snapshot(store)[0]
    assert orphans
    assert {info.key for info in store.list(CHUNKS)} == {entry.key for entry in kept.manifest.objects}
