"""Hit rates: priors against a simulated cache, measured traces, and the policy that they favor."""

import itertools
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.trace import CurvePoint, ReuseBin, TableTrace, Trace
from dlrm_planner import plan_job, read_traces, trace_references
from dlrm_planner.choose import read_problem
from dlrm_planner.hit_rates import Demand, Filled, fill, table_hit_rates
from dlrm_planner.types import HitRates, take

MakeSpec = Callable[..., DLRMJobSpec]
REFERENCE = "file:///traces/day.json"
TIERS = {"ddr": "1Gi", "block": "1Ti"}


def table(rows: int, **more: Any) -> dict[str, Any]:
    return {"name": "t", "rows": rows, "dim": 64, **more}


def reuse_of(spec: DLRMJobSpec, trace: TableTrace | None = None) -> HitRates:
    return table_hit_rates(read_problem(spec, None, {"t": trace} if trace else {}))


def hits_at(found: HitRates, rows: float) -> float:
    """Return what a cache of so many rows of the only table serves."""
    return float(found.hits_at(np.array([rows], np.float64))[0])


def lru_hits(batches: list[np.ndarray], slots: int) -> tuple[float, float]:
    """Return a simulated cache's hits and accesses a batch, of distinct rows, in the second half of the batches."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = accesses = 0
    for number, batch in enumerate(batches):
        for row in np.unique(batch).tolist():
            counted = number >= len(batches) // 2
            accesses += counted
            hits += counted and row in cache
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > slots:
                cache.popitem(last=False)
    counted = len(batches) - len(batches) // 2
    return hits / counted, accesses / counted


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.05])
def test_a_prior_predicts_what_a_simulated_cache_does(make_spec: MakeSpec, alpha: float) -> None:
    rows, batch, slots = 20_000, 128, 2_000
    prior = {"prior": "zipf", "alpha": alpha} if alpha else {"prior": "uniform"}
    found = reuse_of(make_spec([table(rows, distribution=prior)], batch=batch))
    weights = np.arange(1, rows + 1) ** -alpha
    draw = np.random.default_rng(7)
    batches = [draw.choice(rows, size=batch, p=weights / weights.sum()) for _ in range(400)]

    hits, accesses = lru_hits(batches, slots)

    assert found.accesses[0] == pytest.approx(accesses, rel=0.02)
    assert hits_at(found, slots) / found.accesses[0] == pytest.approx(hits / accesses, abs=0.02)


@pytest.mark.parametrize("rows", [1, 2, 50, 96, 97, 10**6, 2**40])
@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_every_curve_is_concave_and_ends_with_all_rows(make_spec: MakeSpec, rows: int, alpha: float) -> None:
    found = reuse_of(make_spec([table(rows, maxLookups=7, distribution={"prior": "zipf", "alpha": alpha})]))

    x, y = found.rows[0], found.hits[0]
    widths = np.diff(x)
    wide = widths > 1e-9 * rows  # what is less is rounding
    slopes = np.diff(y)[wide] / widths[wide]

    assert (widths >= 0).all()
    assert (np.diff(slopes) <= 1e-6 * slopes[:-1]).all()
    assert x[-1] == rows
    assert y[-1] == pytest.approx(found.accesses[0])
    assert found.accesses[0] <= min(rows, 2_048 * 7) * (1 + 1e-9)
    assert 1 <= found.min_rows[0] <= rows


def test_a_table_that_is_never_looked_up_wants_nothing(make_spec: MakeSpec) -> None:
    found = reuse_of(make_spec([table(1_000, avgLookups=0)]))

    assert found.accesses[0] == 0
    assert found.min_rows[0] == 1


def traced(rows: int = 10**7, **more: Any) -> TableTrace:
    given: dict[str, Any] = {
        "table": "t",
        "rows": rows,
        "lookups": 2_048_000,
        "unique_rows": 500_000,
        "accesses": 1_024_000,
        "curve": (
            CurvePoint(cache_rows=1_000, hit_rate=0.2),
            CurvePoint(cache_rows=10_000, hit_rate=0.21),
            CurvePoint(cache_rows=100_000, hit_rate=0.6),
        ),
        **more,
    }
    return TableTrace(**given)


def test_a_trace_is_taken_as_it_was_measured(make_spec: MakeSpec) -> None:
    spec = make_spec([table(10**7, distribution={"reference": REFERENCE})])

    found = reuse_of(spec, traced())

    assert found.accesses[0] == 1_024
    assert found.min_rows[0] == 2_048
    assert hits_at(found, 1_000) / 1_024 == pytest.approx(0.2)
    assert hits_at(found, 10_000) / 1_024 > 0.22  # on the hull: a cache can be given to others in turns
    assert hits_at(found, 100_000) / 1_024 == pytest.approx(0.6)
    assert hits_at(found, 10**7) / 1_024 == pytest.approx(0.6)  # first accesses always miss


@given(st.data(), st.integers(0, 6), st.integers(2, 9))
def test_hits_lie_on_the_lines_between_points(data: st.DataObject, count: int, points: int) -> None:
    numbers = st.sampled_from([each / 2 for each in range(20)])  # few, so that points have equal rows
    rows, hits = (np.sort(data.draw(arrays(float, (count, points), elements=numbers)), axis=1) for _ in range(2))
    rows[:, 0] = 0
    found = HitRates(rows=rows, hits=hits, accesses=np.ones(count), min_rows=np.ones(count))
    held = data.draw(arrays(float, (count, 3), elements=numbers))

    served = found.hits_at(held)

    assert served.shape == (count, 3)
    assert np.array_equal(found.hits_at(held[:, 0]), served[:, 0])
    for each, x, y, got in zip(held, rows, hits, served, strict=True):
        assert got == pytest.approx(np.interp(each, x, y))


def test_points_of_a_curve_beyond_the_tables_rows_are_one(make_spec: MakeSpec) -> None:
    spec = make_spec([table(10**5, distribution={"reference": REFERENCE})])
    beyond = CurvePoint(cache_rows=200_000, hit_rate=0.6)
    measured = traced(rows=10**5, unique_rows=10**5)

    found = reuse_of(spec, measured.model_copy(update={"curve": (*measured.curve, beyond)}))

    assert np.array_equal(found.hits, reuse_of(spec, measured).hits)


def test_a_plan_says_what_the_trace_expects(make_spec: MakeSpec) -> None:
    spec = make_spec([table(10**7, distribution={"reference": REFERENCE})], tierBudgets=TIERS)

    plan = plan_job(spec, traces={"t": traced()})

    first = plan.tables[0].shards[0].tiers.levels[0]
    assert first.rows >= 100_000
    assert first.expected_hit_rate == pytest.approx(0.6)
    # A traced row that no level holds was accessed for the first time.
    assert sum(plan.predicted.hit_rates.values()) == pytest.approx(1, abs=1e-3)
    assert plan.predicted.hit_rates[first.tier] >= first.expected_hit_rate


def test_the_predicted_hit_rate_counts_every_shard(make_spec: MakeSpec) -> None:
    spread = {"name": "spread", "rows": 10**8, "dim": 64, "maxLookups": 4, "pin": {"sharding": "row"}}
    whole = {"name": "whole", "rows": 10**8, "dim": 64, "pin": {"sharding": "table"}}
    spec = make_spec([spread, whole], replicas=4, tierBudgets={"ddr": "4Gi", "block": "1Ti"})

    plan = plan_job(spec)

    rates = [
        float(np.mean([shard.tiers.levels[0].expected_hit_rate or 0.0 for shard in each.shards]))
        for each in plan.tables
    ]
    expected = np.average(rates, weights=reuse_of(spec).accesses)
    assert len(plan.tables[0].shards) == 4
    assert abs(expected - np.mean(rates)) > 0.01
    assert plan.predicted.hit_rates["ddr"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("traces", "says"),
    [({}, "the trace of table t was not read"), ({"t": traced(rows=5)}, "of 5 rows, the model's has 10000000")],
)
def test_a_trace_that_does_not_fit_is_refused(make_spec: MakeSpec, traces: dict[str, TableTrace], says: str) -> None:
    spec = make_spec([table(10**7, distribution={"reference": REFERENCE})], tierBudgets=TIERS)

    with pytest.raises(InvalidSpecError, match=re.escape(says)) as refused:
        plan_job(spec, traces=traces)

    assert refused.value.path == "spec.model.tables[0].distribution.reference"


def test_documents_become_traces_by_table(make_spec: MakeSpec) -> None:
    spec = make_spec([table(10**7, distribution={"reference": REFERENCE})])
    document = Trace(global_batch_size=2_048, batches=1_000, tables=(traced(),)).model_dump_json()

    assert trace_references(spec) == {REFERENCE: "spec.model.tables[0].distribution.reference"}
    assert read_traces(spec, {REFERENCE: document}) == {"t": traced()}
    with pytest.raises(InvalidSpecError, match="expected a trace"):
        read_traces(spec, {REFERENCE: "{}"})
    with pytest.raises(InvalidSpecError, match="table t is not in the trace"):
        read_traces(spec, {REFERENCE: document.replace('"t"', '"u"')})


def hot(lookups_each: int) -> tuple[ReuseBin, ...]:
    return (
        ReuseBin(most=1, rows=400_000, lookups=400_000),
        ReuseBin(most=None, rows=100_000, lookups=100_000 * lookups_each),
    )


@pytest.mark.parametrize(
    ("histogram", "policy", "expected"),
    [((), "auto", "lru"), (hot(20), "auto", "mixed"), (hot(1), "auto", "lru"), (hot(20), "lfu", "lfu")],
)
def test_the_policy_follows_the_trace_and_the_user_before_it(
    make_spec: MakeSpec, histogram: tuple[ReuseBin, ...], policy: str, expected: str
) -> None:
    found = [table(10**7, distribution={"reference": REFERENCE}, pin={"tier": "block"})]
    spec = make_spec(found, tierBudgets={**TIERS, "ddr": "500Mi"}, cache={"policy": policy})

    plan = plan_job(spec, traces={"t": traced(histogram=histogram)})

    assert plan.tables[0].shards[0].tiers.policy == expected
    assert any(reason.startswith(f"rows leave the slots by {expected}") for reason in plan.reasons)


@st.composite
def demands(draw: st.DrawFn) -> tuple[HitRates, Demand]:
    """Draw up to five tables with concave curves of four pieces, some of which may be taken whole."""
    tables = draw(st.integers(1, 5))
    rows, hits, start, whole = [], [], [], []
    for _ in range(tables):
        widths = [draw(st.integers(1, 50)) for _ in range(4)]
        slopes = sorted((draw(st.floats(0, 1)) for _ in range(4)), reverse=True)
        rows.append(np.concatenate([[0], np.cumsum(widths)]).astype(float))
        hits.append(np.concatenate([[0], np.cumsum(np.multiply(widths, slopes))]))
        start.append(draw(st.integers(0, widths[0])))
        whole.append(draw(st.one_of(st.just(np.inf), st.integers(1, 300))))
    accesses = np.array([each[-1] for each in hits])
    rates = HitRates(rows=np.array(rows), hits=np.array(hits), accesses=accesses, min_rows=np.ones(tables))
    return rates, Demand(
        start=np.array(start, float),
        stop=np.array([each[-1] for each in rows]),
        row_cost=np.array([draw(st.sampled_from([1.0, 2.5, 7.0])) for _ in range(tables)]),
        whole_cost=np.array(whole, float),
    )


def value(rates: HitRates, filled: Filled) -> float:
    curves = [np.interp(r, x, y) for r, x, y in zip(filled.rows, rates.rows, rates.hits, strict=True)]
    return float(np.where(filled.whole, rates.accesses, curves).sum())


def cost(demand: Demand, filled: Filled) -> float:
    slots = (filled.rows - demand.start) * demand.row_cost
    return float(np.where(filled.whole, demand.whole_cost, slots).sum())


def row_each(rates: HitRates) -> float:
    """Return the hits of one row of each table: rows are whole numbers."""
    return float((rates.hits[:, 1] / rates.rows[:, 1]).sum())


@given(given_=demands(), budget=st.floats(0, 2_000), spend_all=st.booleans())
def test_no_more_is_spent_than_there_is(given_: tuple[HitRates, Demand], budget: float, spend_all: bool) -> None:
    rates, demand = given_

    filled = fill(rates, demand, budget, spend_all=spend_all)

    assert cost(demand, filled) <= budget + 1e-4
    assert (filled.rows >= demand.start).all()
    assert (filled.rows <= demand.stop).all()


@given(given_=demands(), budget=st.floats(0, 2_000))
def test_taking_tables_whole_serves_no_less_than_slots_alone(given_: tuple[HitRates, Demand], budget: float) -> None:
    rates, demand = given_

    served = value(rates, fill(rates, demand, budget))

    assert served >= value(rates, fill(rates, replace(demand, whole_cost=np.inf), budget)) - row_each(rates)


@given(given_=demands(), budget=st.floats(0, 2_000))
def test_fill_is_within_one_table_of_the_best_whole_tables(given_: tuple[HitRates, Demand], budget: float) -> None:
    rates, demand = given_
    best = 0.0
    for chosen in itertools.product([False, True], repeat=len(demand.start)):
        rest = budget - float(np.sum(demand.whole_cost, where=chosen))
        if not rest >= 0:
            continue
        kept = np.flatnonzero(~np.array(chosen))
        others, slots_alone = take(rates, kept), replace(take(demand, kept), whole_cost=np.inf)
        served = float(rates.accesses[list(chosen)].sum())
        best = max(best, served + (value(others, fill(others, slots_alone, rest)) if len(kept) else 0.0))

    served = value(rates, fill(rates, demand, budget))

    assert served >= best - float(rates.accesses.max()) - row_each(rates)


def test_a_trace_without_a_document_is_left_to_the_prior(make_spec: MakeSpec) -> None:
    spec = make_spec([table(1_000, distribution={"reference": REFERENCE})])

    assert read_traces(spec, {}) == {}
