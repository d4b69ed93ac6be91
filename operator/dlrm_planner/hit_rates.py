"""Estimate hit rates by cache size: a concave curve per table, from a trace or from a prior.

An access is one distinct row of a batch. Priors follow Che's approximation of LRU under independent references: a row
with rate r a batch is still cached after T batches without it with probability 1 - exp(-r T), and T is the time in
which as many distinct rows are accessed as the cache holds.

Source: Che, Tung & Wang, "Hierarchical Web caching systems: modeling, design and experimental results", 2002.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import DistributionSpec, TableSpec
from dlrm_api.trace import TableTrace, parse_trace
from dlrm_planner.tables import table_paths
from dlrm_planner.types import Floats, HitRates, Problem, take

DEFAULT_ALPHA = 1.05
RANKS, HEAD = 96, 16
"""Groups of rows of one table: the most popular ones alone, the others by powers of popularity."""
POINTS = 40
"""Points of a curve between no row and all rows."""
MAX_ROUNDS = 64
"""Rounds in which tables too large to be taken whole are dropped; then all of them are."""
SIGNIFICANT = 2.0**30
"""Smaller relative differences of gains are rounding of a processor, and must not change a plan."""


def table_hit_rates(problem: Problem) -> HitRates:
    """Return the curves of whole tables, from traces or priors; variants of a problem share them.

    Raises:
        InvalidSpecError: a trace that a table refers to was not given, or is of a table of another size.
    """
    ahead = problem.spec.trainer.cache.lookahead
    if ahead not in problem.curves:
        problem.curves[ahead] = _read_hit_rates(problem, ahead + 1)
    return problem.curves[ahead]


def _read_hit_rates(problem: Problem, in_flight: int) -> HitRates:
    tables, batch, size = problem.tables, problem.spec.data.global_batch_size, problem.tables.rows
    lookups = np.array([batch * len(table.sources) * table.lookups for table in tables.specs], np.float64)
    kinds = np.stack([size, lookups, np.array([_alpha(table.distribution) for table in tables.specs])], axis=1)
    different, inverse = np.unique(kinds, axis=0, return_inverse=True)
    found = take(_priors(different[:, 0], different[:, 1], different[:, 2], in_flight), inverse)
    for i, trace in _measured(problem.spec, problem.traces):
        found.accesses[i] = min(size[i], lookups[i] * trace.accesses / max(trace.lookups, 1))
        found.min_rows[i] = min(size[i], in_flight * found.accesses[i])
        found.rows[i], found.hits[i] = _points(trace, found.accesses[i])
    return replace(found, min_rows=np.clip(np.ceil(found.min_rows), 1, size))


def collisions(problem: Problem) -> Floats:
    """Return the (T,) probability that two lookups hit the same row, in excess of equally popular rows.

    Popularity comes from the histogram of a trace if one was read, else from the prior.
    """
    specs, size = problem.tables.specs, problem.tables.rows
    kinds = np.stack([size, np.array([_alpha(table.distribution) for table in specs])], axis=1)
    different, inverse = np.unique(kinds, axis=0, return_inverse=True)
    width, share = _popularity(different[:, 0], different[:, 1])
    found = (share**2 / np.maximum(width, 1e-300)).sum(axis=1)[inverse]
    for i, table, _, _ in _references(problem.spec):
        if (trace := problem.traces.get(table.name)) is not None and trace.histogram:
            rows, lookups = np.array([(each.rows, each.lookups) for each in trace.histogram], np.float64).T
            found[i] = (lookups**2 / np.maximum(rows, 1)).sum() / max(lookups.sum(), 1) ** 2
    return np.asarray(np.maximum(found - 1 / size, 0.0))


def _alpha(distribution: DistributionSpec | None) -> float:
    if distribution is None:
        return DEFAULT_ALPHA
    return 0.0 if distribution.prior == "uniform" else distribution.alpha


def _measured(spec: DLRMJobSpec, traces: Mapping[str, TableTrace]) -> Iterator[tuple[int, TableTrace]]:
    for i, table, field, _ in _references(spec):
        trace = traces.get(table.name)
        if trace is None:
            raise InvalidSpecError(field, f"the trace of table {table.name} was not read: give it, or leave it out")
        if trace.rows != table.rows:
            sizes = f"of {trace.rows} rows, the model's has {table.rows}"
            problem = f"the trace is of a table {table.name} {sizes}: measure it again with dlrmctl trace"
            raise InvalidSpecError(field, problem)
        yield i, trace


def _priors(size: Floats, lookups: Floats, alpha: Floats, in_flight: int) -> HitRates:
    """Return the curves of U tables with popularity ~ rank ** -alpha; ``lookups`` of one step."""
    width, share = _popularity(size, alpha)
    # Lookups of one row in a batch, and accesses of each group in a batch, (U, R).
    rate = lookups[:, None] * share / np.maximum(width, 1e-300)
    once = -np.expm1(-rate) * width
    # After so many batches nearly every row was looked up.
    longest = np.maximum(5 / np.maximum(np.where(width > 0, rate, np.inf).min(axis=1), 1e-18), 2.0)
    rows, hits = np.zeros((len(size), POINTS + 2)), np.zeros((len(size), POINTS + 2))
    for k in range(POINTS):
        seen = -np.expm1(-rate * (longest ** (k / (POINTS - 1)))[:, None])
        rows[:, k + 1], hits[:, k + 1] = (width * seen).sum(axis=1), (once * seen).sum(axis=1)
    accesses = once.sum(axis=1)
    rows[:, -1], hits[:, -1] = size, accesses
    least = (-np.expm1(-rate * in_flight) * width).sum(axis=1)
    return HitRates(rows=np.minimum(rows, size[:, None]), hits=hits, accesses=accesses, min_rows=least)


def _popularity(size: Floats, alpha: Floats) -> tuple[Floats, Floats]:
    """Return the (U, R) rows of each group, and their share of the lookups."""
    step = np.arange(RANKS + 1, dtype=np.float64)
    tail = np.maximum(step - HEAD, 0) / (RANKS - HEAD)
    spread = np.where(step <= HEAD, step, HEAD * np.maximum(size / HEAD, 1)[:, None] ** tail)
    edges = np.where(size[:, None] <= RANKS, np.minimum(step, size[:, None]), spread) + 0.5
    power = 1 - alpha[:, None]
    flat = np.abs(power) < 1e-9
    integral = np.where(flat, np.log(edges), edges**power / np.where(flat, 1, power))
    mass = np.maximum(np.diff(integral, axis=1), 0)
    return np.diff(edges, axis=1), mass / mass.sum(axis=1, keepdims=True)


def _points(trace: TableTrace, accesses: float) -> tuple[Floats, Floats]:
    """Return the upper hull of a measured curve, in as many points as every curve has."""
    hull: list[tuple[float, float]] = [(0.0, 0.0)]
    for point in trace.curve:
        x, y = float(min(point.cache_rows, trace.rows)), max(point.hit_rate, hull[-1][1])
        if x <= hull[-1][0]:
            continue
        while len(hull) > 1 and _below(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    hull.append((float(trace.rows), hull[-1][1]))
    kept = np.array(hull)[np.linspace(0, len(hull) - 1, min(len(hull), POINTS + 2)).round().astype(int)]
    kept = np.concatenate([kept, np.repeat(kept[-1:], POINTS + 2 - len(kept), axis=0)])
    return kept[:, 0], kept[:, 1] * accesses


def _below(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> bool:
    """Return whether b is on or below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def _references(spec: DLRMJobSpec) -> Iterator[tuple[int, TableSpec, str, str]]:
    """Yield the tables that refer to a trace, each with its index, the field, and the reference."""
    for i, (table, path) in enumerate(zip(spec.model.all_tables(), table_paths(spec), strict=True)):
        if table.distribution is not None and table.distribution.reference is not None:
            yield i, table, f"{path}.distribution.reference", table.distribution.reference


def trace_references(spec: DLRMJobSpec) -> dict[str, str]:
    """Return each trace that the job refers to, and the first field that names it."""
    found: dict[str, str] = {}
    for _, _, field, reference in _references(spec):
        found.setdefault(reference, field)
    return found


def read_traces(spec: DLRMJobSpec, texts: Mapping[str, str | bytes]) -> dict[str, TableTrace]:
    """Return each referring table's part of its trace; ``texts`` holds the document of each reference.

    Raises:
        InvalidSpecError: a document is not a trace, or lacks a table; names the field and the reference.
    """
    fields = trace_references(spec)
    documents: dict[str, dict[str, TableTrace]] = {}
    for reference, text in texts.items():
        try:
            documents[reference] = {each.table: each for each in parse_trace(text).tables}
        except InvalidSpecError as error:
            problem = f"expected a trace in {reference}: {error}; write it with dlrmctl trace"
            raise InvalidSpecError(fields[reference], problem) from error
    found = {}
    for _, table, field, reference in _references(spec):
        if (tables := documents.get(reference)) is None:
            continue
        if table.name not in tables:
            problem = f"table {table.name} is not in the trace {reference}: measure it again with dlrmctl trace"
            raise InvalidSpecError(field, problem)
        found[table.name] = tables[table.name]
    return found


@dataclass(frozen=True)
class Demand:
    """Hold what N tables may be given, and its price."""

    start: Floats
    """(N,) rows that each table has already."""
    stop: Floats  # (N,) largest number of rows
    row_cost: Floats  # (N,) bytes of a row
    whole_cost: Floats | float = np.inf
    """(N,) further bytes for the whole table, which serves all accesses; inf if that is not an option."""
    hit_worth: Floats | float = 1.0
    """(N, A) what a hit is worth, for each of A places where its row would be otherwise; the least counts."""
    row_worth: Floats | float = 0.0
    """(N, A) what a row is worth that is not there."""

    def gains(self, hits: Floats, rows: Floats) -> Floats:
        """Return what (N, k) hits on so many rows are worth."""
        if not isinstance(self.hit_worth, np.ndarray):
            return self.hit_worth * hits
        of_rows = np.atleast_2d(self.row_worth)[:, None] * rows[:, :, None]
        return np.asarray((self.hit_worth[:, None] * hits[:, :, None] + of_rows).min(axis=2))


@dataclass(frozen=True)
class Filled:
    """Hold what each table got."""

    rows: Floats  # (N,)
    whole: NDArray[np.bool_]
    """(N,) tables that are whole; their ``rows`` mean nothing."""
    left: float  # bytes without a use
    price: float = 0.0
    """Worth of one more byte."""


def fill(rates: HitRates, demand: Demand, budget: float, *, spend_all: bool = False) -> Filled:
    """Spend the budget where hits per byte are worth most; with ``spend_all`` also on rows that gain none.

    This is water-filling over concave curves, with the jump to a whole table as one more segment of its curve.
    """
    x = np.clip(rates.rows, demand.start[:, None], demand.stop[:, None])
    x = np.concatenate([x, demand.stop[:, None]], axis=1)
    first, last = np.split(rates.hits_at(np.stack([demand.start, demand.stop], axis=1)), 2, axis=1)
    hits = np.concatenate([np.clip(rates.hits, first, last), last], axis=1)
    cost, gain = np.diff(x, axis=1) * demand.row_cost[:, None], demand.gains(np.diff(hits, axis=1), np.diff(x, axis=1))
    rest = demand.gains(rates.accesses[:, None] - hits[:, -1:], rates.rows[:, -1:] - x[:, -1:])
    missed = np.concatenate([gain, rest], axis=1)[:, ::-1].cumsum(axis=1)[:, ::-1]
    ends = np.concatenate([np.zeros((len(x), 1)), np.cumsum(cost, axis=1)], axis=1)
    worth = _significant(np.where(cost > 0, gain / np.maximum(cost, 1e-9), np.inf))
    spent, whole, price = np.zeros_like(cost), np.zeros(len(x), bool), 0.0
    open_ = ~whole & np.isfinite(demand.whole_cost)
    for attempt in range(MAX_ROUNDS + 1):
        if attempt == MAX_ROUNDS:
            open_[:] = False
        jump_cost, jump_worth, until = _jumps(demand.whole_cost, missed, ends, worth, open_)
        unspent = np.where((ends[:, :-1] < until[:, None]) & ~whole[:, None], cost - spent, 0.0)
        costs = np.concatenate([unspent.ravel(), np.where(open_, jump_cost, 0.0)])
        gains = np.concatenate([worth.ravel(), jump_worth])
        order = np.argsort(-gains, kind="stable")
        order = order[(costs[order] > 0) & ((gains[order] > 0) | (spend_all & (order < cost.size)))]
        total = np.cumsum(costs[order])
        fits = int(np.searchsorted(total, budget + 1e-6, side="right"))
        taken = order[:fits]
        budget -= float(total[fits - 1]) if fits else 0.0
        divisible = taken[taken < cost.size]
        spent.ravel()[divisible] += costs[divisible]
        whole[taken[taken >= cost.size] - cost.size] = True
        open_ &= ~whole
        if fits == len(order):
            break
        price = float(gains[order[fits]])
        if order[fits] < cost.size:
            spent.ravel()[order[fits]] += budget
            budget = 0.0
            break
        open_ &= jump_cost <= budget
    rows = demand.start + np.floor(spent.sum(axis=1) / demand.row_cost + 1e-6)
    return Filled(np.minimum(rows, demand.stop), whole, budget, price)


def _jumps(
    whole_cost: Floats | float, missed: Floats, ends: Floats, worth: Floats, open_: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """Return the (N,) cost and gain per byte of taking tables whole, and the bytes spent on them before.

    The upper hull of a concave curve and one more point leaves the curve where its line to that point is least steep.
    """
    left = np.where(open_, whole_cost, np.inf)[:, None] - ends
    slope = _significant(np.where(left > 0, missed / np.where(left > 0, left, 1), np.inf))
    due = np.argmin(slope, axis=1)
    here = np.arange(len(due))
    until = np.where(open_, ends[here, due], np.inf)
    # The jump never comes before the segments of the curve that precede it.
    least = np.where(ends[:, :-1] < until[:, None], worth, np.inf).min(axis=1)
    best = np.minimum(slope[here, due], least * (1 - 1e-9))
    return np.where(open_, left[here, due], 0.0), np.where(open_, best, 0.0), until


def _significant(values: Floats) -> Floats:
    """Drop the last digits, so that equal gains are equal on every processor and the first one wins."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * SIGNIFICANT) / SIGNIFICANT, exponent)
