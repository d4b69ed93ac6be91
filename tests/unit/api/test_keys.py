"""Buckets hold a table's rows and divide the keys evenly, whatever their number."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.keys import BUCKET_ROWS, KEY_END, MAX_BUCKET_ROWS, MAX_BUCKETS, key_buckets


@given(rows=st.integers(1, 2**40), power=st.none() | st.integers(0, 16))
def test_buckets_hold_all_rows_in_few_more_slots(rows: int, power: int | None) -> None:
    buckets = key_buckets(rows, None if power is None else 2**power)

    assert rows <= buckets.count * buckets.quota < rows + buckets.count
    assert buckets.quota <= 0.8 * buckets.homes < buckets.quota + 1
    assert buckets.slots - buckets.homes >= 64
    assert buckets.slots < 2**32 or buckets.quota > MAX_BUCKET_ROWS


@given(power=st.integers(0, 16), draw=st.data())
def test_buckets_are_equal_ranges_of_all_keys(power: int, draw: st.DataObject) -> None:
    buckets = key_buckets(2**20, 2**power)
    bucket = draw.draw(st.integers(0, buckets.count - 1))

    assert buckets.first_key(0) == 0
    assert buckets.first_key(buckets.count) == KEY_END
    assert buckets.first_key(bucket) >> (63 - power) == bucket
    assert (buckets.first_key(bucket + 1) - 1) >> (63 - power) == bucket


@pytest.mark.parametrize(("rows", "count"), [(1, 1), (98_303, 1), (98_304, 2), (10**6, 16), (2**40, MAX_BUCKETS)])
def test_the_default_is_the_nearest_power_of_two(rows: int, count: int) -> None:
    assert key_buckets(rows, None).count == count


def test_the_default_keeps_buckets_near_their_size() -> None:
    sizes = [key_buckets(rows, None).quota for rows in range(BUCKET_ROWS, 100 * BUCKET_ROWS, 9_999)]

    assert all(2 / 3 < size / BUCKET_ROWS < 3 / 2 for size in sizes)
