"""Estimate how often a cache of so many rows holds the row that is looked up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import DistributionSpec
from dlrm_api.trace import TableTrace, parse_trace
from dlrm_planner.tables import Tables, table_paths
from dlrm_planner.types import Shards

DEFAULT_ALPHA = 1.05
RANKS, HEAD = 96, 16
"""Groups of rows of one table: the most popular ones alone, the others by powers of popularity."""
POINTS = 40
"""Points of a curve between no row and all rows."""
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Reuse:
    """Curves of tables, or of their shards; hits grow with rows, ever more slowly."""

    rows: Floats
    """(T, K) rows that a cache holds, ascending from 0."""
    hits: Floats
    """(T, K) accesses of one step that find their row."""
    accesses: Floats
    """(T,) distinct rows of one step."""
    least: Floats
    """(T,) rows of the smallest cache that is planned: those expected of all batches in flight."""

    def hits_at(self, shard: int, rows: float) -> float:
        """Accesses of one step that a cache of ``rows`` serves."""
        return float(np.interp(rows, self.rows[shard], self.hits[shard]))

    def of(self, shards: Shards) -> Reuse:
        """The curves of shards: hot rows lie anywhere, so a range of rows holds its share of them."""
        table, share = shards.table, shards.share
        return Reuse(
            rows=self.rows[table] * share[:, None],
            hits=self.hits[table] * share[:, None],
            accesses=self.accesses[table] * share,
            least=np.clip(np.ceil(self.least[table] * share), 1, shards.rows),
        )


def read_reuse(spec: DLRMJobSpec, tables: Tables, traces: Mapping[str, TableTrace]) -> Reuse:
    """Curves of every table: from its trace, or from its prior.

    Raises:
        InvalidSpecError: a trace that a table refers to was not given, or is of a table of another size.
    """
    in_flight = spec.trainer.cache.lookahead + 1
    batch = spec.data.global_batch_size
    lookups = np.array([batch * len(table.sources) * table.lookups for table in tables.specs], np.float64)
    size = np.array([table.rows for table in tables.specs], np.float64)
    kinds = np.stack([size, lookups, np.array([_alpha(table.distribution) for table in tables.specs])], axis=1)
    different, inverse = np.unique(kinds, axis=0, return_inverse=True)
    prior = _priors(different[:, 0], different[:, 1], different[:, 2], in_flight)
    rows, hits = prior.rows[inverse], prior.hits[inverse]
    accesses, least = prior.accesses[inverse], prior.least[inverse]
    for i, trace in _measured(tables, traces):
        accesses[i] = min(size[i], lookups[i] * trace.accesses / max(trace.lookups, 1))
        least[i] = min(size[i], in_flight * accesses[i])
        rows[i], hits[i] = _points(trace, accesses[i])
    return Reuse(rows=rows, hits=hits, accesses=accesses, least=np.clip(np.ceil(least), 1, size))


def _alpha(distribution: DistributionSpec | None) -> float:
    if distribution is None:
        return DEFAULT_ALPHA
    return 0.0 if distribution.prior == "uniform" else distribution.alpha


def _measured(tables: Tables, traces: Mapping[str, TableTrace]) -> list[tuple[int, TableTrace]]:
    found = []
    for i, (table, path) in enumerate(zip(tables.specs, tables.paths, strict=True)):
        if table.distribution is None or table.distribution.reference is None:
            continue
        field, trace = f"{path}.distribution.reference", traces.get(table.name)
        if trace is None:
            raise InvalidSpecError(field, f"the trace of table {table.name} was not read: give it, or leave it out")
        if trace.rows != table.rows:
            raise InvalidSpecError(
                field,
                f"the trace is of a table {table.name} of {trace.rows} rows, the model's has {table.rows}: "
                "measure it again with dlrmctl trace",
            )
        found.append((i, trace))
    return found


def _priors(size: Floats, lookups: Floats, alpha: Floats, in_flight: int) -> Reuse:
    """Curves of U tables whose popularity falls with the rank to the power -alpha; ``lookups`` of one step."""
    width, share = _popularity(size, alpha)
    rate = lookups[:, None] * share / np.maximum(width, 1e-300)  # of one row, a batch
    once = -np.expm1(-rate) * width  # (U, R) accesses of a batch
    slowest = np.where(width > 0, rate, np.inf).min(axis=1)
    longest = np.maximum(5 / np.maximum(slowest, 1e-18), 2.0)  # by then nearly every row was asked for
    rows, hits = np.zeros((len(size), POINTS + 2)), np.zeros((len(size), POINTS + 2))
    for k in range(POINTS):
        seen = -np.expm1(-rate * (longest ** (k / (POINTS - 1)))[:, None])
        rows[:, k + 1], hits[:, k + 1] = (width * seen).sum(axis=1), (once * seen).sum(axis=1)
    accesses = once.sum(axis=1)
    rows[:, -1], hits[:, -1] = size, accesses
    least = (-np.expm1(-rate * in_flight) * width).sum(axis=1)
    return Reuse(rows=np.minimum(rows, size[:, None]), hits=hits, accesses=accesses, least=least)


def _popularity(size: Floats, alpha: Floats) -> tuple[Floats, Floats]:
    """(U, R) rows of each group, and their share of the lookups."""
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
    """The upper hull of a measured curve, in as many points as every curve has."""
    hull: list[tuple[float, float]] = [(0.0, 0.0)]
    for point in trace.curve:
        x, y = float(min(point.cache_rows, trace.rows)), max(point.hit_rate, hull[-1][1])
        if x <= hull[-1][0]:
            continue
        while len(hull) > 1 and _below(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    hull.append((float(trace.rows), hull[-1][1]))
    chosen = np.linspace(0, len(hull) - 1, min(len(hull), POINTS + 2)).round().astype(int)
    kept = np.array(hull)[chosen]
    kept = np.concatenate([kept, np.repeat(kept[-1:], POINTS + 2 - len(kept), axis=0)])
    return kept[:, 0], kept[:, 1] * accesses


def _below(a: Sequence[float], b: Sequence[float], c: Sequence[float]) -> bool:
    """Whether b lies on or below the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def trace_references(spec: DLRMJobSpec) -> dict[str, str]:
    """Each reference of the job, and the first field that names it."""
    found: dict[str, str] = {}
    for table, path in zip(spec.model.all_tables(), table_paths(spec), strict=True):
        if table.distribution is not None and table.distribution.reference is not None:
            found.setdefault(table.distribution.reference, f"{path}.distribution.reference")
    return found


def read_traces(spec: DLRMJobSpec, texts: Mapping[str, str | bytes]) -> dict[str, TableTrace]:
    """Each referring table's part of its trace; ``texts`` holds the document of each reference.

    Raises:
        InvalidSpecError: a document is no trace, or lacks a table; names the field and the reference.
    """
    fields = trace_references(spec)
    documents: dict[str, dict[str, TableTrace]] = {}
    for reference, text in texts.items():
        try:
            documents[reference] = {each.table: each for each in parse_trace(text).tables}
        except InvalidSpecError as error:
            raise InvalidSpecError(
                fields[reference], f"{reference} holds no trace: {error}: write it with dlrmctl trace"
            ) from error
    found = {}
    for table, path in zip(spec.model.all_tables(), table_paths(spec), strict=True):
        named = table.distribution.reference if table.distribution else None
        if named is None or named not in documents:
            continue
        if table.name not in documents[named]:
            raise InvalidSpecError(
                f"{path}.distribution.reference",
                f"table {table.name} is not in the trace {named}: measure it again with dlrmctl trace",
            )
        found[table.name] = documents[named][table.name]
    return found
