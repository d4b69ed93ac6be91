"""Keys that full buckets lost are remembered for one to two half-lives, and few others are taken for them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_trainer.embedding.evicted_keys import EvictedKeys

HALF_LIFE = 10


def keys(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**63 - 1, count)


def known(evicted: EvictedKeys, *parts: np.ndarray) -> list[int]:
    return evicted.count(np.concatenate(parts), np.cumsum([len(part) for part in parts])).tolist()


@settings(max_examples=50, deadline=None)
@given(
    rows=st.lists(st.integers(40, 5_000), min_size=2, max_size=2),
    batches=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 2 * HALF_LIFE)), max_size=12),
)
def test_no_key_of_the_last_half_life_is_missed(rows: list[int], batches: list[tuple[int, int, int]]) -> None:
    evicted, left, step = EvictedKeys(rows, [HALF_LIFE] * 2), list[tuple[int, int, np.ndarray]](), 0

    for seed, (part, count, later) in enumerate(batches):
        step += later
        evicted.forget(step)
        evicted.add(part, keys(count, seed), step)
        left.append((part, step, keys(count, seed)))

    for number in range(2):
        mine = [(then, lost) for part, then, lost in left if part == number]
        # As many keys as there are rows are remembered, however lately they left.
        recent = [lost for n, (then, lost) in enumerate(mine) if sum(len(each) for _, each in mine[n:]) <= rows[number]]
        lately = [lost for (then, _), lost in zip(mine[len(mine) - len(recent) :], recent, strict=True)
                  if step - then < HALF_LIFE]  # fmt: skip
        asked = np.concatenate([np.empty(0, np.int64), *lately])
        nothing = asked[:0]
        assert known(evicted, *(asked if part == number else nothing for part in range(2)))[number] == len(asked)


@pytest.mark.parametrize(("steps", "remembered"), [(HALF_LIFE - 1, True), (3 * HALF_LIFE, False)])
def test_keys_are_forgotten_after_two_half_lives(steps: int, remembered: bool) -> None:
    evicted = EvictedKeys([1_000], [HALF_LIFE])
    evicted.add(0, keys(500), 1)

    for step in range(2, 2 + steps):
        evicted.forget(step)

    assert known(evicted, keys(500)) == [500 if remembered else 0]


def test_few_other_keys_are_taken_for_evicted_ones() -> None:
    evicted = EvictedKeys([20_000, 20_000], [HALF_LIFE] * 2)
    for step in (1, 2):
        evicted.add(0, keys(20_000, step), step)

    wrong, elsewhere = known(evicted, keys(20_000, 3), keys(20_000, 1))

    assert wrong < 0.06 * 20_000
    assert elsewhere == 0
