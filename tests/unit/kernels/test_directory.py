"""The directory of a unique table against a dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba.core import runtime
from numpy.typing import NDArray

from dlrm_kernels import directory as kernels
from dlrm_kernels.directory import ABSENT, MAX_STEP, Directory, make_directory
from dlrm_kernels.eviction import FULL_PERCENT, sweep, swept_rows, tie_of
from dlrm_kernels.hashing import ids_of_keys, keys_of_ids

Ints = NDArray[np.int64]
SPARE_SLOTS = 64
FIRST_BUCKET, BUCKETS, ALL_BUCKETS = 2, 2, 8
WIDTH = 2**63 // ALL_BUCKETS
FIRST_KEY = FIRST_BUCKET * WIDTH


def made(quota: int) -> Directory:
    homes = -(-quota * 5 // 4)
    return make_directory(
        first_bucket=FIRST_BUCKET,
        buckets=BUCKETS,
        all_buckets=ALL_BUCKETS,
        quota=quota,
        homes=homes,
        stride=homes + SPARE_SLOTS,
        rows=BUCKETS * quota,
    )


class Checked:
    """A directory, and a dict of the local row and the last step of each key that must agree with it."""

    def __init__(self, quota: int) -> None:
        self.directory, self.quota = made(quota), quota
        self.rows: dict[int, int] = {}
        self.steps: dict[int, int] = {}

    def find(self, keys: Ints) -> tuple[Ints, Ints]:
        rows, places = np.empty((2, len(keys)), np.int64)
        absent = kernels.find(self.directory, keys, rows, places)
        assert rows.tolist() == [self.rows.get(key, ABSENT) for key in keys.tolist()]
        assert absent == np.count_nonzero(rows == ABSENT) == np.count_nonzero(places < 0)
        return rows, places

    def insert(self, keys: Ints) -> None:
        keys = np.unique(keys)
        keys = keys[self.find(keys)[0] == ABSENT]
        rows, places = np.empty((2, len(keys)), np.int64)
        assert kernels.insert(self.directory, keys, rows, places) == len(keys)
        free = iter(sorted(set(range(BUCKETS * self.quota)) - set(self.rows.values())))
        fill = self.fill()
        for key, row in zip(keys.tolist(), rows.tolist(), strict=True):
            bucket = key // WIDTH - FIRST_BUCKET
            assert row == (next(free) if fill[bucket] < self.quota else ABSENT)
            if row != ABSENT:
                fill[bucket] += 1
                self.rows[key], self.steps[key] = row, 0
        assert np.maximum(self.find(keys)[1], ABSENT).tolist() == places.tolist()

    def touch(self, keys: Ints, step: int) -> None:
        places = self.find(keys)[1]
        kernels.touch(self.directory.slots, places[places >= 0], np.array([step]))
        self.steps |= {key: step for key in keys.tolist() if key in self.rows}

    def sweep(self) -> None:
        wanted = set()
        for bucket, fill in enumerate(self.fill()):
            held = sorted(
                (self.steps[key], tie_of(key), key) for key in self.rows if key // WIDTH - FIRST_BUCKET == bucket
            )
            if fill * 100 > self.quota * 97:
                wanted |= {key for *_, key in held[: fill - swept_rows(np.array([fill]), self.quota)[0]]}
        keys, rows, _ = sweep(self.directory, MAX_STEP, np.zeros(BUCKETS, np.bool_), 1)
        assert len(keys) == len(wanted)
        assert set(keys.tolist()) == wanted
        assert rows.tolist() == [self.rows[key] for key in keys.tolist()]
        self._forget(keys, rows)

    def _forget(self, keys: Ints, rows: Ints) -> None:
        kernels.free_rows(self.directory, rows)
        for key in keys.tolist():
            del self.rows[key], self.steps[key]

    def fill(self) -> list[int]:
        buckets = np.array(list(self.rows), np.int64) // WIDTH - FIRST_BUCKET
        fill: list[int] = np.bincount(buckets, minlength=BUCKETS).tolist()
        return fill

    def check(self) -> None:
        keys, entries = kernels.list_keys(self.directory, 1)
        assert keys.tolist() == sorted(self.rows)
        assert kernels.rows_of(entries).tolist() == [self.rows[key] for key in keys.tolist()]
        assert kernels.steps_of(entries).tolist() == [self.steps[key] for key in keys.tolist()]
        self.find(keys)
        assert self.directory.fill.tolist() == self.fill()
        used = np.unpackbits(self.directory.used.view(np.uint8), bitorder="little")
        assert set(np.flatnonzero(used[: BUCKETS * self.quota]).tolist()) == set(self.rows.values())
        assert used[BUCKETS * self.quota :].all()


def key_sets(most: int) -> st.SearchStrategy[Ints]:
    """Keys of which many share a home, the last one of a bucket among them."""
    heads = st.sampled_from([0, 1, WIDTH // 3, WIDTH - 2**36, WIDTH, 2 * WIDTH - 2**36])
    keys = st.builds(lambda head, tail: FIRST_KEY + head + tail, heads, st.integers(0, 2**36 - 2))
    near = st.builds(lambda head, tail: FIRST_KEY + head + tail, heads, st.integers(0, 12))
    return st.lists(keys | near, max_size=most).map(lambda each: np.array(each, np.int64))


OPERATIONS: list[Callable[[Checked, Ints, int], None]] = [
    lambda checked, keys, _: checked.insert(keys),
    lambda checked, keys, step: checked.touch(keys, step),
    lambda checked, _keys, _step: checked.sweep(),
]


@given(
    st.integers(1, 30),
    st.lists(
        st.tuples(st.sampled_from(OPERATIONS), key_sets(20), st.sampled_from([1, 2, 3, 5_000, MAX_STEP])), max_size=20
    ),
)
def test_directory_equals_a_dict(quota: int, operations: list[tuple[Callable[..., None], Ints, int]]) -> None:
    checked = Checked(quota)

    for operation, keys, step in operations:
        operation(checked, keys, step)
        checked.check()


@pytest.mark.parametrize("one_bucket", [False, True])
def test_random_operations_up_to_full_load_equal_a_dict(one_bucket: bool) -> None:
    random = np.random.default_rng(7)
    checked = Checked(2_000)
    ids = random.integers(0, WIDTH if one_bucket else BUCKETS * WIDTH, 6_000) + FIRST_KEY

    for step in range(1, 60):
        batch = ids[random.integers(0, len(ids), 400)]
        checked.insert(batch)
        checked.touch(batch, step)
        if step % 8 == 0:
            checked.sweep()
            checked.check()

    assert max(checked.fill()) > 0.9 * checked.quota


def test_insertion_ends_where_spare_slots_are_exhausted() -> None:
    directory = made(200)
    # The homes of all are the bucket's last.
    keys = FIRST_KEY + WIDTH - 1 - np.arange(100)[::-1]
    rows, places = np.empty((2, 100), np.int64)

    done = kernels.insert(directory, keys, rows, places)

    assert done == SPARE_SLOTS + 1
    # Lookups pass the full slots into the next bucket.
    assert kernels.find(directory, keys, rows, places) == 100 - done


def test_rows_that_stay_taken_are_used_no_second_time_until_freed() -> None:
    directory = made(10)
    keys = FIRST_KEY + np.arange(10) * 2**40
    rows, places = np.empty((2, 10), np.int64)
    kernels.insert(directory, keys, rows, places)

    left, removed, _ = sweep(directory, 1, np.zeros(BUCKETS, np.bool_), 1)

    one = slice(0, 1)
    assert kernels.insert(directory, keys[one] + WIDTH, rows[one], places[one]) == 1
    assert rows[0] == 10
    kernels.free_rows(directory, removed)
    assert kernels.insert(directory, left, rows[one], places[one]) == 1
    assert rows[one] == removed


def test_a_bucket_stays_even_while_equally_old_keys_leave() -> None:
    random, directory = np.random.default_rng(5), made(20_000)
    for step in range(1, 30):
        count = 37_000 if step == 1 else 2_000
        keys = np.unique(random.integers(FIRST_KEY, FIRST_KEY + BUCKETS * WIDTH, count))
        rows, places = np.empty((2, len(keys)), np.int64)

        assert kernels.insert(directory, keys, rows, places) == len(keys)

        kernels.touch(directory.slots, places[places != ABSENT], np.array([step]))
        kernels.free_rows(directory, sweep(directory, step, np.zeros(BUCKETS, np.bool_), 1)[1])


def test_places_hold_the_same_keys_while_others_are_inserted() -> None:
    random = np.random.default_rng(3)
    directory, step = made(1_000), 2**32 - 1
    keys = np.unique(random.integers(0, BUCKETS * WIDTH, 1_500)) + FIRST_KEY
    first, second = keys[::2].copy(), keys[1::2].copy()
    rows, places, others = np.empty((3, len(first)), np.int64)
    kernels.insert(directory, first, rows, places)
    kernels.insert(directory, second, others[: len(second)], others[: len(second)].copy())

    kernels.touch(directory.slots, places, np.array([step]))

    listed, entries = kernels.list_keys(directory, 2)
    assert listed[kernels.steps_of(entries) == step].tolist() == first.tolist()
    kernels.touch(directory.slots, places, np.arange(len(first)))
    _, entries = kernels.list_keys(directory, 2)
    assert kernels.steps_of(entries)[::2].tolist() == list(range(len(first)))
    assert np.array_equal(kernels.rows_of(entries)[::2], rows)


def test_calls_allocate_no_memory_by_key() -> None:
    numba_runtime: Any = runtime
    numba_runtime._nrt_python.memsys_enable_stats()
    directory = made(100)
    keys = FIRST_KEY + np.sort(np.random.default_rng(0).integers(0, WIDTH, 64))

    def allocations(count: int) -> int:
        some, rows, places = keys[:count], np.empty(count, np.int64), np.empty(count, np.int64)
        before = numba_runtime.rtsys.get_allocation_stats().alloc
        kernels.insert(directory, some, rows, places)
        kernels.find(directory, some, rows, places)
        kernels.touch(directory.slots, places, np.array([3]))
        kernels.free_rows(directory, rows)
        return int(numba_runtime.rtsys.get_allocation_stats().alloc - before)

    # Threads that earlier tests left behind may allocate as well.
    many, one = (min(allocations(count) for _ in range(5)) for count in (64, 1))
    assert many == one > 0


@given(st.lists(st.integers(0, 2**63 - 1)), st.integers(0, 2**63 - 1))
def test_keys_turn_back_into_ids(ids: list[int], seed: int) -> None:
    numbers = np.array([*ids, 0, 2**63 - 1], np.uint64)

    keys = keys_of_ids(numbers, np.uint64(seed))

    assert int(keys.max()) < 2**63
    assert ids_of_keys(keys, np.uint64(seed)).tolist() == numbers.tolist()
    assert len(set(keys.tolist())) == len(set(numbers.tolist()))


def test_buckets_that_are_equally_full_for_long_are_swept_in_different_maintenances() -> None:
    quota, steps = 50_000, 400
    fill, swept = np.full(208, quota * 93 // 100), []
    draw = np.random.default_rng(0)
    for _ in range(steps):
        fill = fill + draw.poisson(quota * 0.016, len(fill))
        is_full = fill * 100 > quota * FULL_PERCENT
        kept = swept_rows(fill, quota)
        assert ((kept >= quota * 92 // 100) & (kept < quota * 94 // 100)).all()
        fill = np.where(is_full, kept, fill)
        swept.append(is_full.mean())

    # A bucket gets 1.6 % of its rows between two maintenances, and loses about 4 % when it is swept.
    assert max(swept[steps // 2 :]) < 0.6
    assert np.mean(swept) == pytest.approx(1.6 / 4, rel=0.25)
