from __future__ import annotations

import random
from itertools import product

import pytest
from benchmarks.planner_choice import SWAPPED, WAYS, draw_case, plans_of


@pytest.mark.parametrize("tables", WAYS)
def test_of_plans_that_differ_by_the_names_of_ranks_one_is_listed(tables: int) -> None:
    found = plans_of(tables)

    assert len(found) <= 12
    for ways in product(*WAYS[tables]):
        swapped = tuple(SWAPPED[way] for way in ways)
        assert len({ways, swapped} & set(found)) == 1


def test_the_same_seed_draws_the_same_problems() -> None:
    one, other = random.Random(3), random.Random(3)

    assert [draw_case(one) for _ in range(5)] == [draw_case(other) for _ in range(5)]
