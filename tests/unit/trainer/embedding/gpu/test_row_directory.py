from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dlrm_kernels.replacement import LFU, LRU, MAX_COUNT, MIXED
from dlrm_testing.trainer.directory_rules import ROWS, DirectoryRun, directories_on_hosts, made, train
from dlrm_testing.trainer.triton_programs import program_order
from dlrm_trainer.embedding.gpu.row_directory import BLOCK_WORDS, COUNT, PINS, WAYS

ORDERS: dict[str, Any] = {
    "backward": lambda at, count: count - 1 - at,
    "evens first": lambda at, count: 2 * at if 2 * at < count else 2 * (at - (count + 1) // 2) + 1,
    "halves swapped": lambda at, count: (at + count // 2) % count,
}


@pytest.mark.parametrize(
    ("policy", "ways", "capacity"),
    [(LRU, 0, 40), (LRU, 8, 5), (LFU, 4, 20), (LFU, 1, 9), (MIXED, 4, 20), (MIXED, 3, 7)],
)
def test_kernels_find_and_admit_rows_as_the_rules_say(policy: int, ways: int, capacity: int) -> None:
    found = train(DirectoryRun(made(policy, ways, capacity)), seed=ways)
    with directories_on_hosts():
        expected = train(DirectoryRun(made(policy, ways, capacity)), seed=ways)

    assert found == expected


@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 65])
def test_rows_at_the_edges_of_blocks_are_found(count: int) -> None:
    directory = made(ways=WAYS, capacity=400)
    assert BLOCK_WORDS // WAYS == 32
    ids = [np.arange(0), np.repeat(np.arange(count), 3)]
    run = DirectoryRun(directory)

    run.fetch(ids)
    again = directory.find(np.concatenate(ids), np.array([0, 3 * count]), 2)

    assert len(again.missing) == 0
    assert len(again.slots) == len(again.slots.unique()) == count
    assert directory.sets.words[again.slots, PINS].tolist() == [2] * count


@pytest.mark.parametrize("policy", [LFU, MIXED])
def test_bytes_do_not_depend_on_the_order_of_programs(policy: int) -> None:
    results = []
    for order in [None, *ORDERS.values()]:
        with nullcontext() if order is None else program_order(order):
            results.append(train(DirectoryRun(made(policy, ways=4, capacity=16)), seed=1))

    assert results[1:] == results[:1] * len(ORDERS)


def test_counts_end_where_they_no_longer_fit() -> None:
    run = DirectoryRun(made())
    run.fetch([np.array([7]), np.arange(0)])
    (slot,) = run.held[0]
    run.directory.count(slot[None], torch.tensor([2**32 - 1]))

    run.fetch([np.array([7]), np.arange(0)])

    assert int(run.directory.sets.words[slot, COUNT]) == MAX_COUNT


def test_looking_changes_nothing() -> None:
    run = DirectoryRun(made())
    before = train(run, seed=2)

    found = run.directory.find(np.array([0, 1, 2, 3]), np.array([2, 4]), 0)

    assert run.bytes() == before
    assert 0 < len(found.missing) < 4 or len(found.slots) == 4


class DirectoryModel(RuleBasedStateMachine):
    """Model the rows that are in slots, and the batches that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = made(MIXED, ways=2, capacity=5)
        self.starts = np.cumsum([0, *ROWS])
        self.slot_of: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.batches: list[list[int]] = []
        self.number = 0

    @rule(ids=st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=2, max_size=2))
    def fetch(self, ids: list[list[int]]) -> None:
        self.number += 1
        flat = np.concatenate([np.array(each, np.int64) for each in ids])
        found = self.directory.find(flat, np.cumsum([len(each) for each in ids]), self.number)
        rows = {int(start) + row for start, each in zip(self.starts, ids, strict=False) for row in each}
        # A row that is in a slot is found there, and no other is.
        assert set(found.missing.tolist()) == rows - set(self.slot_of)
        for row in rows & set(self.slot_of):
            self.counts[row] += 1
        admitted = self.directory.admit(found.missing, self.number)
        pinned = {row for batch in self.batches for row in batch} | (rows & set(self.slot_of))
        for row, slot, leaving, count in zip(found.missing.tolist(), *(a.tolist() for a in admitted), strict=True):
            if slot < 0:
                continue
            # What leaves was in that slot, held by nobody, and is named with its count: nothing is lost.
            if leaving >= 0:
                assert leaving not in pinned
                assert self.slot_of.pop(leaving) == slot
                assert self.counts.pop(leaving) == count
            assert slot not in self.slot_of.values()
            self.slot_of[row], self.counts[row] = slot, 1
            pinned.add(row)
        here = torch.from_numpy(admitted.targets[admitted.targets >= 0])
        self.directory.count(here, torch.zeros(len(here), dtype=torch.int64))
        self.batches.append([row for row in rows if row in self.slot_of])

    @rule()
    def release(self) -> None:
        if self.batches:
            slots = [self.slot_of[row] for row in self.batches.pop(0)]
            self.directory.release(torch.tensor(slots, dtype=torch.int64))

    @rule(row=st.integers(0, 11))
    def drop(self, row: int) -> None:
        if row in self.slot_of and not any(row in batch for batch in self.batches):
            self.directory.drop(torch.tensor([self.slot_of.pop(row)]))
            del self.counts[row]

    @invariant()
    def slots_are_used_or_free_and_pinned_by_the_batches_that_hold_them(self) -> None:
        tags, words = self.directory.sets.tags.numpy(), self.directory.sets.words.numpy()
        assert {int(tag) - 1: slot for slot, tag in enumerate(tags) if tag} == self.slot_of
        assert len(self.slot_of) + int((tags == 0).sum()) == len(tags)
        pins = np.zeros(len(tags), np.int64)
        for batch in self.batches:
            np.add.at(pins, [self.slot_of[row] for row in batch], 1)
        assert words[:, PINS].tolist() == pins.tolist()
        for row, slot in self.slot_of.items():
            assert words[slot, COUNT] == self.counts[row]


TestDirectoryModel = DirectoryModel.TestCase
TestDirectoryModel.settings = settings(
    max_examples=12, stateful_step_count=12, deadline=None, phases=(Phase.explicit, Phase.generate)
)


@pytest.mark.parametrize("rows", [[1, 3], [10**12, 40], [5, 10**9]])
def test_slots_of_a_table_are_its_own_however_many_rows_it_has(rows: list[int]) -> None:
    run, generator = DirectoryRun(made(capacity=9, rows=rows), rows), np.random.default_rng(3)
    ids = [np.unique(generator.integers(0, count, 12)) for count in rows]

    run.fetch(ids)

    slots = run.held[0]
    of_first = int((slots < 9).sum())
    assert 0 < of_first <= len(ids[0])
    assert int(((slots >= 12) & (slots < 21)).sum()) == len(slots) - of_first > 0
