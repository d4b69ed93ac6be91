"""Contract of every ObjectStore; a new kind of store joins by one entry in conftest's STORES."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dlrm_api.errors import NoInputError
from dlrm_checkpointer.format.attempts import claim_attempt, honours_conditions, newest_attempt, read_attempts
from dlrm_checkpointer.read.catalog import list_snapshots, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_stores import ObjectStore
from dlrm_testing.digests import snapshot_digest

LARGE = bytes(range(256)) * (280 << 10)
"""70 MiB: several parts."""


def test_put_objects_are_read_back(store: ObjectStore):
    store.put("a/b", b"hello")

    assert store.get("a/b") == b"hello"
    assert store.size("a/b") == 5


def test_an_object_is_none_whose_key_only_begins_as_another_ones(store: ObjectStore):
    store.put("a/b.json", b"hello")

    assert store.size("a/b") is None


def test_a_put_replaces_the_whole_object(store: ObjectStore):
    store.put("a", b"a long object")
    store.put("a", memoryview(b"short"))

    assert store.get("a") == b"short"


def test_a_large_object_goes_up_in_parts_and_comes_back_whole(store: ObjectStore):
    store.put("chunks/large", memoryview(LARGE))

    assert store.size("chunks/large") == len(LARGE)
    assert store.get("chunks/large") == LARGE
    assert [info.key for info in store.list("")] == ["chunks/large"]


@pytest.mark.parametrize("size", [0, 1, 1_000, 9 << 20, len(LARGE)])
def test_an_object_is_read_into_a_buffer_of_its_size(store: ObjectStore, size: int):
    store.put("a", LARGE[:size])
    buffer = bytearray(size)

    assert store.get_into("a", memoryview(buffer)) == size
    assert buffer == LARGE[:size]


@pytest.mark.parametrize("size", [3, 20 << 20])
@pytest.mark.parametrize("space", [0, 1, 17 << 20])
def test_a_buffer_of_another_size_gets_the_first_bytes_and_learns_the_size(store: ObjectStore, size: int, space: int):
    store.put("a", LARGE[:size])
    buffer = bytearray(space)

    found = store.get_into("a", memoryview(buffer))

    assert found == size
    assert buffer[: min(size, space)] == LARGE[: min(size, space)]


def test_a_buffer_may_hold_numbers(store: ObjectStore):
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    store.put("a", rows.tobytes())
    found = np.zeros_like(rows)

    assert store.get_into("a", memoryview(found)) == rows.nbytes
    assert np.array_equal(found, rows)


@pytest.mark.parametrize("space", [0, 1, 20 << 20])
def test_absent_object_is_not_read_into_a_buffer(store: ObjectStore, space: int):
    with pytest.raises(NoInputError, match="a/c"):
        store.get_into("a/c", memoryview(bytearray(space)))


def test_an_object_without_bytes_is_an_object(store: ObjectStore):
    store.put("empty", b"")

    assert store.get("empty") == b""
    assert store.size("empty") == 0


def test_absent_object_is_reported(store: ObjectStore):
    store.put("a/b", b"x")

    assert store.size("a") is None
    assert store.size("a/c") is None
    with pytest.raises(NoInputError, match="a/c"):
        store.get("a/c")
    store.delete("a/c")
    assert list(store.list("b")) == []


def test_a_listing_is_sorted_and_holds_what_starts_with_the_prefix(store: ObjectStore):
    keys = ["m/10-1.json", "m/09-1.json", "m/10-0.json", "n/1", "m.json", "m/10/x"]
    for key in keys:
        store.put(key, b"12")

    assert [info.key for info in store.list("")] == sorted(keys)
    assert [info.key for info in store.list("m/10-")] == ["m/10-0.json", "m/10-1.json"]
    assert [info.key for info in store.list("m/")] == ["m/09-1.json", "m/10-0.json", "m/10-1.json", "m/10/x"]
    assert {info.size for info in store.list("m/")} == {2}
    assert all(info.modified > 1.6e9 for info in store.list(""))


def test_a_deleted_object_is_gone_and_its_neighbour_stays(store: ObjectStore):
    store.put("a/b/c", b"1")
    store.put("a/b/d", b"2")

    store.delete("a/b/c")

    assert [info.key for info in store.list("a/")] == ["a/b/d"]


def test_batch_delete_removes_only_the_given_objects(store: ObjectStore):
    keys = [f"a/{number}/ä {name}" for number in range(3) for name in ("x&y", "<z>")]
    for key in keys:
        store.put(key, b"1")

    store.delete_all([*keys[1:-1], "a/absent", "absent"])
    store.delete_all([])

    assert [info.key for info in store.list("")] == [keys[0], keys[-1]]


def test_many_writers_at_once_lose_nothing(store: ObjectStore):
    def work(number: int) -> None:
        store.put(f"dir-{number % 3}/{number}", str(number).encode() * 1000)
        if number % 2:
            store.delete(f"dir-{number % 3}/{number}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(40)))

    wanted = sorted(f"dir-{number % 3}/{number}" for number in range(0, 40, 2))
    assert [info.key for info in store.list("dir-")] == wanted


def test_conditional_put_writes_only_if_absent_or_the_probe_says_so(store: ObjectStore):
    honoured = honours_conditions(store)
    first, second = store.put_if_absent("a/x", b"first"), store.put_if_absent("a/x", b"second")

    assert first
    assert (second, store.get("a/x")) == ((False, b"first") if honoured else (True, b"second"))
    assert list(store.list("probe/")) == []


def test_sweeping_leaves_finished_objects_and_young_uploads_alone(store: ObjectStore):
    store.put("a", b"1")

    removed = store.sweep_uploads(3_600)

    assert removed == 0
    assert store.get("a") == b"1"


def test_claimants_at_once_get_numbers_of_their_own(store: ObjectStore):
    barrier = threading.Barrier(4)

    def claim(number: int) -> int:
        barrier.wait()
        return claim_attempt(store, None, f"claimant {number}")

    with ThreadPoolExecutor(4) as pool:
        numbers = list(pool.map(claim, range(4)))

    assert len(set(numbers)) == 4
    assert sorted(numbers) == [attempt.number for attempt in read_attempts(store, 0)]
    assert newest_attempt(store) == max(numbers)
    assert list(store.list("claims/")) == []


def test_a_gang_of_two_ranks_commits_restores_and_retires(store: ObjectStore, tmp_path, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", store, world_size=2, ranks=range(2), keep_last=2)
    attempt = claim_attempt(store, None, "first")
    for _ in range(4):
        pod.commit(model.train(), attempt)

    snapshot, reasons = newest_snapshot(store)

    assert (snapshot.step, reasons) == (4, [])
    assert snapshot_digest(snapshot) == model.digest()
    assert [(each.step, each.problem) for each in list_snapshots(store)] == [(4, ""), (3, "")]
    assert verify_snapshot(snapshot).bytes == snapshot.manifest.total_bytes
    kept = {entry.key for each in list_snapshots(store) for entry in each.manifest.objects}
    assert {info.key for info in store.list("chunks/")} == kept
    assert claim_attempt(store, 4, "second") == attempt + 1
