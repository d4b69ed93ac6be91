from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import StoreUnavailableError
from dlrm_checkpointer.format.attempts import StoreAttempt, claim_attempt, in_lineage
from dlrm_checkpointer.format.manifest import manifest_key, part_key
from dlrm_checkpointer.read.catalog import list_snapshots
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.types import SnapshotName
from dlrm_checkpointer.write.commit import try_commit
from dlrm_checkpointer.write.retention import (
    ORPHAN_S,
    SWEEPS,
    KeySet,
    Retention,
    RetentionPolicy,
    StoredSnapshot,
    decide,
    is_orphan,
)
from dlrm_stores.base import Body, ObjectInfo
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.turns import Clock
from dlrm_testing.digests import snapshot_digest

NAMES = st.sets(st.builds(SnapshotName, st.integers(1, 12), st.integers(1, 3)), max_size=15)


def found(names: Iterable[SnapshotName]) -> list[StoredSnapshot]:
    return [StoredSnapshot(name=name) for name in names]


@given(names=NAMES, restored=st.integers(0, 12), keep_last=st.integers(1, 5))
def test_only_the_newest_of_the_lineage_are_kept(names, restored, keep_last):
    attempts = [StoreAttempt(2, restored)]

    decision = decide(found(names), attempts, RetentionPolicy(keep_last=keep_last), ())

    counted = sorted({name.step for name in names if in_lineage(name.step, name.attempt, attempts)}, reverse=True)
    assert [name.step for name in decision.keep] == counted[:keep_last]
    assert set(decision.keep) | set(decision.retire) == names
    assert not set(decision.keep) & set(decision.retire)


@given(data=st.data(), keep_last=st.integers(1, 4), every=st.one_of(st.none(), st.floats(1, 50)))
def test_nothing_below_what_stays_ever_goes(data, keep_last, every):
    manifests: list[StoredSnapshot] = []
    for step in range(1, data.draw(st.integers(1, 12)) + 1):
        below = data.draw(st.sampled_from([(), *((*each.below, each.name) for each in manifests)]))
        manifests.append(StoredSnapshot(name=SnapshotName(step, 1), time=10.0 * step, below=below))
    in_use = data.draw(st.sets(st.sampled_from([each.name for each in manifests]), max_size=2))

    decision = decide(manifests, [], RetentionPolicy(keep_last=keep_last, keep_every_s=every), in_use)

    stay = {each.name for each in manifests} - set(decision.retire)
    assert set(decision.keep) | in_use <= stay
    assert all(set(each.below) <= stay for each in manifests if each.name in {*decision.keep, *in_use})
    assert decision.needed <= stay


def test_one_snapshot_of_each_period_stays_beside_the_newest():
    manifests = [StoredSnapshot(name=SnapshotName(step, 1), time=100.0 * step) for step in range(1, 13)]

    decision = decide(manifests, [], RetentionPolicy(keep_last=2, keep_every_s=400), ())

    assert [name.step for name in decision.keep] == [12, 11, 7, 3]


def test_a_manifest_that_cannot_be_read_neither_counts_nor_goes():
    broken = StoredSnapshot(name=SnapshotName(9, 1), readable=False)

    decision = decide([broken, *found([SnapshotName(8, 1), SnapshotName(7, 1)])], [], RetentionPolicy(keep_last=1), ())

    assert decision.keep == (SnapshotName(8, 1),)
    assert decision.retire == (SnapshotName(7, 1),)


def test_the_chain_of_an_unusable_snapshot_stays():
    broken = StoredSnapshot(name=SnapshotName(9, 1), below=(SnapshotName(6, 1),), readable=False)

    decision = decide([broken, *found([SnapshotName(8, 1), SnapshotName(6, 1)])], [], RetentionPolicy(keep_last=1), ())

    assert (decision.keep, decision.needed) == ((SnapshotName(8, 1),), {SnapshotName(6, 1)})
    assert decision.retire == ()


def test_a_step_committed_twice_counts_once_and_the_newer_attempts_stays():
    names = [SnapshotName(5, 1), SnapshotName(5, 2), SnapshotName(4, 1)]

    decision = decide(found(names), [StoreAttempt(2, 5)], RetentionPolicy(keep_last=2), ())

    assert decision.keep == (SnapshotName(5, 2), SnapshotName(4, 1))
    assert decision.retire == (SnapshotName(5, 1),)


def test_objects_that_may_still_become_a_snapshot_are_no_orphans():
    kept, attempts = [SnapshotName(100, 2), SnapshotName(150, 2)], [StoreAttempt(2, 100)]

    assert not is_orphan(SnapshotName(200, 2), kept, attempts), "the newest attempt's next cut"
    assert not is_orphan(SnapshotName(120, 2), kept, attempts), "a slow pod of the newest attempt"
    assert is_orphan(SnapshotName(120, 1), kept, attempts), "of a history that was given up"
    assert is_orphan(SnapshotName(50, 1), kept, attempts), "older than all that is kept"
    assert not is_orphan(SnapshotName(1, 1), [], attempts), "nothing is committed yet"


def test_the_last_n_stay_and_their_state_is_untouched(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, keep_last=2)
    attempt = claim_attempt(files, None, "test")
    digests = {}
    for _ in range(5):
        pod.commit(model.train(), attempt)
        digests[model.step] = model.digest()

    steps = [each.step for each in list_snapshots(files)]

    assert steps == [5, 4]
    assert snapshot_digest(newest_snapshot(files)[0]) == digests[5]
    assert {key.split("/")[1] for key in (info.key for info in files.list("chunks/"))} == {f"{s:016d}" for s in steps}
    assert {key.split("/")[1] for key in (info.key for info in files.list("parts/"))} == {f"{s:016d}" for s in steps}


def test_only_the_newest_attempt_removes_anything(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    attempt = claim_attempt(files, None, "old")
    for _ in range(3):
        pod.commit(model.train(), attempt)
    claim_attempt(files, 3, "new")

    removed = Retention(files, RetentionPolicy(keep_last=1, orphan_s=0)).apply(attempt)

    assert removed == 0
    assert [each.step for each in list_snapshots(files)] == [3, 2, 1]


class Counting(FileStore):
    """Remembers what was listed; ``down``, it removes nothing."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.listed: list[str] = []
        self.down = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.listed.append(prefix)
        return super().list(prefix)

    def delete(self, key: str) -> None:
        if self.down and key.startswith("chunks/"):
            raise StoreUnavailableError("the store is gone")
        super().delete(key)


def test_retiring_lists_only_the_snapshots_own_folders_most_times(
    tmp_path: Path, files: FileStore, new_model, new_pod, clock: Clock
):
    model, pod, store = new_model(), new_pod(tmp_path / "pod", files, keep_last=9), Counting(files.root)
    attempt = claim_attempt(files, None, "one")
    retention = Retention(store, RetentionPolicy(keep_last=1))

    removed, listed = [], []
    for pause_s in (0, 0, 0, ORPHAN_S / SWEEPS):
        pod.commit(model.train(), attempt)
        clock.now += pause_s
        removed.append(retention.apply(attempt))
        listed.append([prefix for prefix in store.listed if prefix.startswith(("parts/", "chunks/"))])
        store.listed.clear()

    def own(step: int) -> list[str]:
        return [f"{kind}{step:016d}/{attempt:08d}/" for kind in ("parts/", "chunks/")]

    assert removed == [0, 1, 1, 1]
    assert listed == [["parts/", "chunks/"], own(1), own(2), [*own(3), "parts/", "chunks/"]]
    assert {info.key.split("/")[1] for info in files.list("chunks/")} == {f"{model.step:016d}"}


class Slow(FileStore):
    """Its listings of all objects take a while."""

    def __init__(self, root: Path, clock: Clock, seconds: float) -> None:
        super().__init__(root)
        self.sweeps, self._clock, self._seconds = 0, clock, seconds

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix == "chunks/":
            self.sweeps += 1
            self._clock.now += self._seconds
        return super().list(prefix)


@pytest.mark.parametrize(("seconds", "pause_s"), [(1, 600), (60, 1_200), (3_000, 3_600)])
def test_slow_listings_of_all_objects_are_rarer_but_at_least_hourly(
    tmp_path: Path, files: FileStore, new_model, new_pod, clock: Clock, seconds, pause_s
):
    new_pod(tmp_path / "pod", files).commit(new_model().train(), claim_attempt(files, None, "one"))
    store = Slow(files.root, clock, seconds)
    retention = Retention(store, RetentionPolicy(keep_last=1))

    sweeps = []
    for pause in (0, pause_s - 1, 1):
        clock.now += pause
        retention.apply(1)
        sweeps.append(store.sweeps)

    assert sweeps == [1, 1, 2]


class Crowded(FileStore):
    """Adds many orphans to a store, and counts the entries of its listing that are held at once."""

    orphans = 20_000

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held = self.most = self.removed = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        yield from super().list(prefix)
        for number in range(self.orphans) if prefix == "chunks/" else ():
            info = ObjectInfo(key=f"chunks/{0:016d}/{0:08d}/000000/{number:06d}-aa.safetensors", size=1, modified=0.0)
            self.held += 1
            self.most = max(self.most, self.held)
            weakref.finalize(info, self._let_go)
            yield info

    def _let_go(self) -> None:
        self.held -= 1

    def delete_all(self, keys: Sequence[str]) -> None:
        self.removed += len(keys)
        assert len(keys) <= 1_000


def test_a_sweep_removes_orphans_while_listing_in_bounded_memory(tmp_path: Path, files: FileStore, new_model, new_pod):
    new_pod(tmp_path / "pod", files).commit(new_model().train(), claim_attempt(files, None, "one"))
    store = Crowded(files.root)

    Retention(store, RetentionPolicy(keep_last=1)).apply(1)

    assert store.removed == store.orphans
    assert store.most < 10


@given(names=st.sets(st.text(max_size=9), max_size=30), other=st.text(max_size=9))
def test_keys_are_known_again_and_take_eight_bytes_each(names, other):
    keys = KeySet(names)

    assert all(name in keys for name in names)
    assert (other in keys) == (other in names)
    assert (len(keys), keys.nbytes) == (len(names), 8 * len(names))


def test_leftovers_of_a_dead_sidecar_go_and_a_snapshots_objects_stay(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model = new_model()
    new_pod(tmp_path / "pod", files).commit(model.train(), claim_attempt(files, None, "one"))
    own = [info.key for info in files.list("chunks/")]
    stray = f"{own[0].rpartition('-')[0]}-aa.safetensors"
    files.put(stray, b"x")

    Retention(files, RetentionPolicy(keep_last=1, orphan_s=0)).apply(1)

    assert [info.key for info in files.list("chunks/")] == own
    assert snapshot_digest(newest_snapshot(files)[0]) == model.digest()


def test_a_removal_interrupted_by_an_outage_is_finished_next_time(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod, store = new_model(), new_pod(tmp_path / "pod", files, keep_last=9), Counting(files.root)
    attempt = claim_attempt(files, None, "one")
    retention = Retention(store, RetentionPolicy(keep_last=1))
    pod.commit(model.train(), attempt)
    retention.apply(attempt)
    pod.commit(model.train(), attempt)
    store.down = True
    with pytest.raises(StoreUnavailableError):
        retention.apply(attempt)
    store.down = False
    store.listed.clear()

    retention.apply(attempt)

    assert "chunks/" in store.listed
    assert list(files.list("retired/")) == []


class Ordered(FileStore):
    """Remembers what was removed by itself, in order, and what was removed together."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.alone: list[str] = []
        self.together: list[list[str]] = []

    def delete(self, key: str) -> None:
        self.alone.append(key)
        super().delete(key)

    def delete_all(self, keys: Sequence[str]) -> None:
        self.together.append(sorted(keys))
        super().delete_all(keys)


def test_a_chain_goes_from_its_end_and_nothing_goes_before_the_part_lists(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="consecutive", max_chain=2, keep_last=9)
    attempt, store = claim_attempt(files, None, "one"), Ordered(files.root)
    for _ in range(4):  # a full one, two increments, a full one
        pod.commit(model.train(), attempt)

    removed = Retention(store, RetentionPolicy(keep_last=1)).apply(attempt)

    parts = [part_key(step, attempt, 0) for step in (1, 2, 3)]
    manifests = [manifest_key(step, attempt) for step in (3, 2, 1)]
    assert removed == 3
    assert store.together[0] == parts
    assert sorted(store.alone[:3]) == parts
    assert store.alone[3:6] == manifests
    assert not any(set(manifests).intersection(keys) for keys in store.together)


def test_live_uploads_stay_and_abandoned_ones_go(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    lost = claim_attempt(files, None, "lost")
    attempt = claim_attempt(files, None, "live")
    pod.commit(model.train(2), attempt)
    abandoned = f"chunks/{9:016d}/{lost:08d}/000000/000000-aa.safetensors"
    uploading = f"chunks/{9:016d}/{attempt:08d}/000000/000000-aa.safetensors"
    files.put(abandoned, b"x")
    files.put(uploading, b"x")

    Retention(files, RetentionPolicy(keep_last=1, orphan_s=0)).apply(attempt)

    assert files.size(uploading) == 1
    assert files.size(abandoned) is None


@pytest.mark.parametrize("stray", ["chunks/7", "chunks/notes.txt", "parts/7", "chunks/²/1/x", "chunks/7/1"])
def test_foreign_objects_stay_and_do_not_stop_retention(tmp_path: Path, files: FileStore, new_model, new_pod, stray):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, keep_last=100)
    attempt = claim_attempt(files, None, "test")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    files.put(stray, b"theirs")

    removed = Retention(files, RetentionPolicy(keep_last=1, orphan_s=0)).apply(attempt)

    assert removed == 1
    assert files.get(stray) == b"theirs"


def test_orphans_stay_for_their_safety_age_by_the_stores_clock(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    lost = claim_attempt(files, None, "lost")
    attempt = claim_attempt(files, None, "live")
    young, old = (f"chunks/{9:016d}/{lost:08d}/000000/00000{n}-aa.safetensors" for n in range(2))
    files.put(old, b"x")
    os.utime(files.root / old, (0, 0))
    files.put(young, b"x")
    pod.commit(model.train(), attempt)

    assert files.size(old) is None
    assert files.size(young) == 1


def test_leftovers_of_a_dead_retention_go_despite_older_kept_snapshots(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, keep_last=100)
    attempt = claim_attempt(files, None, "test")
    for _ in range(3):
        pod.commit(model.train(), attempt)
    files.delete("manifests/0000000000000002-00000001.json")  # and there it died

    Retention(files, RetentionPolicy(keep_last=1, keep_every_s=2_000, orphan_s=0)).apply(attempt)

    assert [each.step for each in list_snapshots(files)] == [3, 1]
    assert list(files.list(f"chunks/{2:016d}/")) == []


@pytest.mark.parametrize("before", ["get", "put_if_absent"])
def test_a_snapshot_retired_while_a_pod_commits_it_does_not_come_back(
    tmp_path: Path, files: FileStore, new_model, new_pod, before
):
    class Racing(FileStore):
        """The other pod commits, and the next snapshot too, while this one is stuck in a call."""

        def get(self, key: str) -> bytes:
            if before == "get" and key.startswith("manifests/"):
                meanwhile()
            return super().get(key)

        def put_if_absent(self, key: str, body: Body) -> bool:
            meanwhile()
            return super().put_if_absent(key, body)

    def meanwhile() -> None:
        assert try_commit(files, 1, attempt, 1)
        pod.commit(model.train(), attempt)

    model, pod = new_model(), new_pod(tmp_path / "pod", files, keep_last=1)
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(), attempt)
    files.delete("manifests/0000000000000001-00000001.json")

    manifest = try_commit(Racing(files.root), 1, attempt, 1)

    assert manifest is None
    assert [each.step for each in list_snapshots(files)] == [2]


def test_announcements_of_a_job_that_is_often_restarted_are_read_once(tmp_path: Path, new_model, new_pod):
    asked: list[str] = []

    class Asked(FileStore):
        def get(self, key: str) -> bytes:
            asked.append(key)
            return super().get(key)

    store = Asked(tmp_path / "store")
    model, pod = new_model(), new_pod(tmp_path / "pod", store, keep_last=9)
    attempts = [claim_attempt(store, None, "test") for _ in range(40)]
    pod.commit(model.train(), attempts[-1])
    retention = Retention(store, RetentionPolicy(keep_last=1))
    retention.apply(attempts[-1])
    pod.commit(model.train(), attempts[-1])
    newest = claim_attempt(store, 2, "test")
    asked.clear()

    retired = retention.apply(newest)

    assert retired == 1
    assert [key for key in asked if key.startswith("attempts/")] == [f"attempts/{newest:08d}.json"]
