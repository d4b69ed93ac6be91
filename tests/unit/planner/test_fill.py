"""Water-filling: never more than the budget, never worse than with fewer choices, and best where that is known."""

import itertools
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dlrm_planner.tiers import Filled, Wants, fill


@st.composite
def wants(draw: st.DrawFn) -> Wants:
    """Up to five tables with concave curves of four pieces, some of which may be taken whole."""
    tables = draw(st.integers(1, 5))
    rows, hits, start, whole = [], [], [], []
    for _ in range(tables):
        widths = [draw(st.integers(1, 50)) for _ in range(4)]
        slopes = sorted((draw(st.floats(0, 1)) for _ in range(4)), reverse=True)
        rows.append(np.concatenate([[0], np.cumsum(widths)]).astype(float))
        hits.append(np.concatenate([[0], np.cumsum(np.multiply(widths, slopes))]))
        start.append(draw(st.integers(0, widths[0])))
        whole.append(draw(st.one_of(st.just(np.inf), st.integers(1, 300))))
    return Wants(
        rows=np.array(rows),
        hits=np.array(hits),
        start=np.array(start, float),
        stop=np.array([each[-1] for each in rows]),
        row_cost=np.array([draw(st.sampled_from([1.0, 2.5, 7.0])) for _ in range(tables)]),
        whole_cost=np.array(whole, float),
        whole_hits=np.array([each[-1] for each in hits]),
    )


def value(given_: Wants, filled: Filled) -> float:
    curves = [np.interp(r, x, y) for r, x, y in zip(filled.rows, given_.rows, given_.hits, strict=True)]
    return float(np.where(filled.whole, given_.whole_hits, curves).sum())


def cost(given_: Wants, filled: Filled) -> float:
    slots = (filled.rows - given_.start) * given_.row_cost
    return float(np.where(filled.whole, given_.whole_cost, slots).sum())


def without(given_: Wants, **changes: Any) -> Wants:
    return Wants(**{**given_.__dict__, **changes})


@given(given_=wants(), budget=st.floats(0, 2_000), spend_all=st.booleans())
def test_no_more_is_spent_than_there_is(given_: Wants, budget: float, spend_all: bool) -> None:
    filled = fill(given_, budget, spend_all=spend_all)

    assert cost(given_, filled) <= budget + 1e-4
    assert (filled.rows >= given_.start).all()
    assert (filled.rows <= given_.stop).all()


@given(given_=wants(), budget=st.floats(0, 2_000))
def test_taking_tables_whole_never_serves_less_than_slots_alone(given_: Wants, budget: float) -> None:
    slots_alone = without(given_, whole_cost=np.full(len(given_.start), np.inf))
    a_row_each = float((given_.hits[:, 1] / given_.rows[:, 1]).sum())  # rows are whole numbers

    assert value(given_, fill(given_, budget)) >= value(given_, fill(slots_alone, budget)) - a_row_each


@given(given_=wants(), budget=st.floats(0, 2_000))
def test_it_comes_within_one_table_of_the_best_choice_of_whole_tables(given_: Wants, budget: float) -> None:
    best = 0.0
    for chosen in itertools.product([False, True], repeat=len(given_.start)):
        rest = budget - float(given_.whole_cost[list(chosen)].sum())
        if not rest >= 0:
            continue
        kept = [not each for each in chosen]
        others = Wants(
            **{
                name: each[kept]
                for name, each in without(given_, whole_cost=np.full(len(chosen), np.inf)).__dict__.items()
            }
        )
        served = float(given_.whole_hits[list(chosen)].sum())
        best = max(best, served + (value(others, fill(others, rest)) if any(kept) else 0.0))

    a_row_each = float((given_.hits[:, 1] / given_.rows[:, 1]).sum())
    assert value(given_, fill(given_, budget)) >= best - float(given_.whole_hits.max()) - a_row_each
