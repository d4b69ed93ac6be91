"""Test the order of samples: each once an epoch, the same batches at every world size."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dlrm_kernels.hashing import UInts, shuffle
from dlrm_trainer.data.reader import SampleOrder


@st.composite
def orders(draw: st.DrawFn) -> SampleOrder:
    shards = draw(st.integers(1, 12))
    return SampleOrder(
        num_samples=draw(st.integers(1, 120)),
        virtual_shards=shards,
        batch_size=shards * draw(st.integers(1, 9)),
        window_rows=draw(st.sampled_from([0, 1, 2, 7, 16, 1_000])),
        block_rows=draw(st.sampled_from([1, 3, 8, 1_000])),
        seed=draw(st.integers(0, 2**53)),
    )


@given(orders(), st.integers(0, 3))
@settings(max_examples=100)
def test_an_epoch_holds_every_sample_exactly_once(order: SampleOrder, epoch: int) -> None:
    first = epoch * order.batches_per_epoch

    batches = [order.sample_ids(first + number) for number in range(order.batches_per_epoch)]

    assert sorted(np.concatenate(batches).tolist()) == list(range(order.num_samples))


@given(orders())
@settings(max_examples=100)
def test_only_the_last_batch_of_an_epoch_is_short_and_is_counted_unread(order: SampleOrder) -> None:
    sizes = [order.sample_ids(number).size for number in range(2 * order.batches_per_epoch)]

    assert sizes == [order.global_count(number) for number in range(2 * order.batches_per_epoch)]
    assert set(sizes[: order.batches_per_epoch - 1]) <= {order.batch_size}
    assert 0 < sizes[-1] <= order.batch_size


@given(orders(), st.data())
@settings(max_examples=100)
def test_slices_of_ranks_concatenate_to_the_same_batch_at_every_world_size(
    order: SampleOrder, data: st.DataObject
) -> None:
    world_size = data.draw(st.integers(1, order.virtual_shards))
    batch = data.draw(st.integers(0, 3 * order.batches_per_epoch - 1))

    slices = [order.sample_ids(batch, rank, world_size) for rank in range(world_size)]

    assert np.concatenate(slices).tolist() == order.sample_ids(batch).tolist()


def test_without_a_window_every_shard_is_read_in_the_files_order() -> None:
    order = SampleOrder(num_samples=12, virtual_shards=3, batch_size=6, window_rows=0, block_rows=1)

    assert order.sample_ids(0).tolist() == [0, 1, 4, 5, 8, 9]
    assert order.sample_ids(1).tolist() == [2, 3, 6, 7, 10, 11]


def test_more_shards_than_samples_give_one_short_batch() -> None:
    order = SampleOrder(num_samples=5, virtual_shards=64, batch_size=64, window_rows=8)

    assert order.batches_per_epoch == 1
    assert sorted(order.sample_ids(0).tolist()) == [0, 1, 2, 3, 4]
    assert [order.sample_ids(0, rank, 64).size for rank in range(64)].count(0) == 59


def test_a_window_mixes_rows_of_its_own_blocks_alone() -> None:
    order = SampleOrder(num_samples=1_000, virtual_shards=1, batch_size=100, window_rows=100, block_rows=50, seed=3)

    blocks = [set((order.sample_ids(number) // 50).tolist()) for number in range(10)]

    assert all(len(blocks_of_window) == 2 for blocks_of_window in blocks)
    assert len(set().union(*blocks)) == 20


def test_epochs_seeds_and_shards_are_shuffled_differently() -> None:
    def first_shard(seed: int, epoch: int, shard: int = 0) -> list[int]:
        order = SampleOrder(num_samples=4_000, virtual_shards=4, batch_size=400, window_rows=500, seed=seed)
        batches = range(epoch * 10, epoch * 10 + 10)
        return [int(i) % 1_000 for b in batches for i in order.sample_ids(b)[100 * shard : 100 * shard + 100]]

    shuffles = [first_shard(0, 0), first_shard(0, 1), first_shard(1, 0), first_shard(0, 0, shard=1)]

    assert all(sorted(shuffle) == list(range(1_000)) for shuffle in shuffles)
    assert all(shuffles[i] != shuffles[j] for i in range(4) for j in range(i))


def test_any_batch_of_a_trillion_samples_is_found_at_once() -> None:
    order = SampleOrder(num_samples=2**40, virtual_shards=64, batch_size=4_096, window_rows=65_536, block_rows=4_096)

    ids = order.sample_ids(10**12 // 4_096 * 7 + 3)

    assert np.unique(ids).size == 4_096
    assert ids.min() >= 0
    assert ids.max() < 2**40


def permuted(positions: UInts, sizes: UInts, keys: UInts) -> UInts:
    """Blocks of one row, in windows of one."""
    return shuffle(positions, sizes, keys, np.uint64(1), np.uint64(1))


@pytest.mark.parametrize("size", [1, 2, 3, 10, 1_000, 65_537])
def test_a_permutation_hits_every_number_once(size: int) -> None:
    positions = np.arange(size, dtype=np.uint64)

    images = permuted(positions, np.full_like(positions, size), np.full_like(positions, 12_345))

    assert np.sort(images).tolist() == positions.tolist()


def test_a_permutation_puts_each_number_in_each_place_equally_often() -> None:
    keys = np.arange(60_000, dtype=np.uint64)
    counts = np.stack([
        np.bincount(permuted(np.full_like(keys, place), np.full_like(keys, 6), keys).astype(np.int64), minlength=6)
        for place in range(6)
    ])  # fmt: skip

    assert np.abs(counts - 10_000).max() < 500  # five standard deviations


def test_neighbours_do_not_stay_neighbours() -> None:
    positions = np.arange(4_096, dtype=np.uint64)

    images = permuted(positions, np.full_like(positions, 4_096), np.full_like(positions, 7)).astype(np.int64)

    correlation = np.corrcoef(images[:-1], images[1:])[0, 1]
    assert abs(correlation) < 0.08
