"""Slots and places of one shard near 2**31, which is as many as links between them can name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.plan import TierLevel, TierShare
from dlrm_api.tiers import MAX_LINKED_SLOTS
from dlrm_checkpointer.codec.initializer import initial_rows
from dlrm_testing.trainer.gangs import small_job
from dlrm_testing.trainer.stacked import ALONE, Shape, make_learner
from dlrm_trainer.embedding.tiers.memory import AnonymousStorage, ByteLevel
from dlrm_trainer.embedding.tiers.slots import HostSlots, untouched_zeros
from dlrm_trainer.embedding.tiers.stack import Fetched, Stack, StackTable

ROWS, EXTRA, DIM, SEED, SCALE = 2**33, 100, 4, 7, 0.25


def test_the_last_slots_that_links_can_name_hold_their_rows() -> None:
    slots = MAX_LINKED_SLOTS - EXTRA
    weight = torch.from_numpy(untouched_zeros(MAX_LINKED_SLOTS * DIM, np.float32)).view(-1, DIM)
    state = torch.from_numpy(untouched_zeros(MAX_LINKED_SLOTS, np.float32)).view(-1, 1)
    share = TierShare(levels=(TierLevel(tier="ddr", rows=slots), TierLevel(tier="ddr", rows=ROWS)))
    table = StackTable(name="t", rows=ROWS, slots=slots, extra=EXTRA, scale=SCALE)
    stack = Stack([table], share, HostSlots(weight, state), SEED, DIM, "fp32")
    stack.attach([ByteLevel("ddr", AnonymousStorage(stack.memory.words, 1_000), 1_000, ordered=False)])
    rows = np.arange(ROWS - EXTRA, ROWS)
    values = initial_rows(SEED, "t", rows, range(DIM), SCALE)

    def holds(fetched: Fetched, values: NDArray[np.float32]) -> bool:
        return np.array_equal(weight.numpy()[fetched.slots.numpy()], values)

    borrowed = stack.borrow(rows, np.array([EXTRA]))
    assert int(borrowed.slots.max()) == MAX_LINKED_SLOTS - 1
    assert holds(borrowed, values)
    stack.give_back(borrowed)
    stack.row_map.filled[0, 0] = slots - EXTRA // 2  # as if rows had filled all before
    for batch in (1, 2, 3):
        fetched = stack.fetch(rows, np.array([EXTRA]), batch)
        assert holds(fetched, values)
        values += 1
        weight.numpy()[fetched.slots.numpy()] += 1
        stack.release(fetched)
    stack.close()


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (Shape(slots=MAX_LINKED_SLOTS - 100), "table big: a shard of 8,589,934,592 rows has 2,147,483,739 slots"),
        (Shape(tiers=("ddr", "scm", "block"), middle=2**31), "has 2,147,483,648 places in tier scm above a slower one"),
    ],
)
def test_a_plan_with_more_than_links_can_name_is_refused(tmp_path: Path, shape: Shape, says: str) -> None:
    tables = [{"name": "big", "rows": ROWS, "dim": 4}]
    job = small_job(tmp_path, model={"tables": tables, "interaction": "dcn", "bottomMlp": [4]})

    with pytest.raises(InvalidSpecError, match=says):
        make_learner(ALONE, job, shape, tmp_path)
