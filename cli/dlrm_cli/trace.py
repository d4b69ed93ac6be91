"""``dlrmctl trace``: read a job's data as training would, and write how its columns reuse rows.

The trainer's packages are imported when data is read: the command can say that they are not installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import yaml
from numpy.typing import NDArray
from rich.console import RenderableType

from dlrm_api.errors import DeviceError, InvalidSpecError, UsageError
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.model import TRACE_KEY, TableSpec
from dlrm_api.trace import CACHE_SHARES, CurvePoint, ReuseBin, TableTrace, Trace, parse_trace
from dlrm_cli.checks import check_inputs
from dlrm_cli.manifests import CONFIGMAP, read_job
from dlrm_cli.options import TraceOptions
from dlrm_cli.run.workdir import replace_file
from dlrm_cli.views import print_view, show_progress, titled_table

if TYPE_CHECKING:
    from dlrm_kernels.reuse import StackDistances
    from dlrm_trainer.data import Reader
    from dlrm_trainer.data.reader import Batch

MAX_CONFIGMAP_BYTES = 1 << 20
"""Limit of a ConfigMap's data."""


@dataclass(frozen=True, kw_only=True)
class TraceMap:
    """Hold one ConfigMap with the traces of the tables that refer to it."""

    name: str
    text: str
    """The trace of its tables."""
    first: str
    """Path of its first table in the manifest."""
    last: str
    """Path of its last one."""

    def manifest(self, namespace: str | None) -> str:
        """Return the object as YAML."""
        metadata = {"name": self.name} | ({"namespace": namespace} if namespace else {})
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {TRACE_KEY: self.text}}
        return yaml.safe_dump(body, sort_keys=False, width=2**31)

    def reference(self) -> str:
        """Return which tables refer to it, as a line of a manifest."""
        which = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{which}: distribution.reference: {CONFIGMAP}{self.name}"


def trace_maps(name: str, trace: Trace, paths: Sequence[str]) -> list[TraceMap]:
    """Return the ConfigMap ``name``, or ``name-0``, ``name-1`` and so on if one cannot hold the trace.

    Tables keep the model's order, and those of one path share a ConfigMap: the template of a group names only one.
    ``paths`` are those of the trace's tables in the manifest. A UsageError names a group with too many tables for a
    ConfigMap.
    """
    parts = list(_parts(trace, paths))
    names = [name] if len(parts) == 1 else [f"{name}-{number}" for number in range(len(parts))]
    return [
        TraceMap(name=each, text=_text(trace, [table for _, table in part]), first=part[0][0], last=part[-1][0])
        for each, part in zip(names, parts, strict=True)
    ]


Part = list[tuple[str, TableTrace]]
"""Tables with their paths."""


def _parts(trace: Trace, paths: Sequence[str]) -> Iterator[Part]:
    """Yield runs of tables that fit one ConfigMap together."""
    capacity = MAX_CONFIGMAP_BYTES - len(_text(trace, []))
    part: Part = []
    taken = 0
    for path, group in groupby(zip(paths, trace.tables, strict=True), key=lambda each: each[0]):
        tables = list(group)
        size = sum(len(table.model_dump_json().encode()) + 1 for _, table in tables)
        if size > capacity:
            raise UsageError(
                f"invalid --configmap: the {len(tables):,} tables of {path} need {size:,} bytes, and a group names one "
                f"ConfigMap of at most {MAX_CONFIGMAP_BYTES:,}; split them into several groups"
            )
        if taken + size > capacity:
            yield part
            part, taken = [], 0
        part += tables
        taken += size
    yield part


def _text(trace: Trace, tables: Sequence[TableTrace]) -> str:
    return trace.model_copy(update={"tables": tuple(tables)}).model_dump_json()


MAX_NAME = 253 - len("-9999")
"""Characters of a ConfigMap's name that leave space for a number."""
MAX_FIRST_ACCESSES = 0.1
"""Share of first accesses above which a caption says that the trace is short."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def trace_job(options: TraceOptions) -> None:
    """Measure the data of a file's job; write the trace, or print it as a ConfigMap, and show a table.

    Nothing is written before all is measured, and then the whole file at once. If a group is too large for a ConfigMap,
    the UsageError says that the trace is in the file.
    """
    configmap = options.configmap
    if configmap is not None and options.out is not None:
        raise UsageError("--out cannot be combined with --configmap")
    job = read_job(options.file, options.settings or (), options.data)
    out = options.out or Path(f"{job.metadata.name}.trace.json")
    _check_out(out, job)
    if configmap is not None and (len(configmap) > MAX_NAME or not _NAME.fullmatch(configmap)):
        raise UsageError(f"invalid --configmap: expected lower-case letters, digits, - and ., got {configmap!r}")
    check_inputs(job.spec)
    try:
        trace = _measured(job, options.batches, options.rate)
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        raise
    if configmap is None:
        _write(out, trace)
        print_view(trace_view(trace))
        print(
            f"wrote {out}; refer to it with distribution.reference: {out.absolute().as_uri()}; for a cluster, print a "
            "ConfigMap with --configmap",
            file=sys.stderr,
        )
        return
    from dlrm_planner import table_paths

    try:
        maps = trace_maps(configmap, trace, table_paths(job.spec))
    except UsageError as error:
        _write(out, trace)
        raise UsageError(f"{error}; the trace is in {out}") from error
    print("---\n".join(each.manifest(job.metadata.namespace) for each in maps), end="")
    print_view(trace_view(trace), stderr=True)
    for each in maps:
        print(each.reference(), file=sys.stderr)


def trace_view(trace: Trace) -> RenderableType:
    """Return a line per table: rows in use, and the hit rates of caches that hold at least a batch's rows."""
    shares = [f"hits at {each:.0%}" for each in CACHE_SHARES]
    view = titled_table(
        f"{trace.job}: {trace.batches:,} batches of {trace.global_batch_size:,} samples",
        ("table", "rows", "lookups", "unique", "distinct per batch", *shares),
        words=("table",),
    )
    view.caption_justify = "left"
    for table in trace.tables:
        about = "" if table.sample_rate == 1 else "~"
        distinct = table.accesses / trace.batches
        counts = (f"{table.rows:,}", f"{table.lookups:,}", f"{about}{table.unique_rows:,}", f"{distinct:,.1f}")
        caches = [each * table.rows for each in CACHE_SHARES]
        hits = ("-" if cache < distinct else f"{about}{table.hit_rate(cache):.1%}" for cache in caches)
        view.add_row(table.table, *counts, *hits)
    first = sum(table.unique_rows for table in trace.tables) / max(1, sum(table.accesses for table in trace.tables))
    if first > MAX_FIRST_ACCESSES:
        view.caption = (
            f"{first:.0%} of accesses are the first of their row, and so miss; a longer trace (--batches) has fewer"
        )
    return view


def _measured(job: DLRMJob, batches: int | None, rate: float | None) -> Trace:
    """Read the batches in training order and measure them."""
    try:
        from dlrm_trainer.data import open_reader

        meter = ReuseMeter(job.spec, rate)
    except ModuleNotFoundError as error:
        raise UsageError(f"package not found: {error.name}; pip install 'dlrm-operator[trainer]'") from error
    from dlrm_planner import virtual_shards

    spec = job.spec.with_virtual_shards(virtual_shards(job.spec))
    with contextlib.closing(open_reader(spec, "train", 0, 1)) as reader:
        batches = batches or _batches(job, reader)
        read = contextlib.closing(reader.iterate(0, batches))
        with show_progress("tracing", batches) as show, read as each_batch:
            for batch in each_batch:
                meter.add(batch)
                show(meter.batches, f"{meter.batches:,}/{batches:,} batches, {meter.lookups:,} lookups")
        return meter.trace(job.metadata.name)


def _batches(job: DLRMJob, reader: Reader) -> int:
    """Return the batches of one epoch, or fewer if the job ends earlier."""
    training = job.spec.training
    by_samples = None if training.max_samples is None else -(-training.max_samples // job.spec.data.global_batch_size)
    return min(each for each in (reader.batches_per_epoch, training.max_steps, by_samples) if each is not None)


def _check_out(out: Path, job: DLRMJob) -> None:
    """Allow only an older trace of the same job to be replaced, and raise UsageError otherwise."""
    try:
        if not os.access(out.parent, os.W_OK | os.X_OK):
            raise UsageError(f"invalid --out: cannot write to folder {out.parent}; choose another file")
        old = out.read_bytes() if out.exists() else None
    except OSError as error:
        raise UsageError(f"invalid --out: {out}: {error.strerror}; choose another file") from error
    if old is None:
        return
    try:
        name = parse_trace(old).job
    except InvalidSpecError:
        raise UsageError(f"refusing to overwrite {out}: not a trace; choose another --out") from None
    if name != job.metadata.name:
        raise UsageError(f"refusing to overwrite {out}: trace of job {name}; choose another --out")


def _write(out: Path, trace: Trace) -> None:
    text = trace.model_dump_json()
    try:
        replace_file(out, text)
    except OSError as error:
        raise DeviceError(
            f"failed to write {len(text):,} bytes to {out}: {error.strerror}; choose another --out"
        ) from error


MAX_TRACKED_ROWS = 12_000_000
"""Rows of all tables together that are tracked without a rate: at most 3 GB of memory."""
MAX_DIRECTORY_ROWS = 120_000_000
"""Rows of all unique tables together that ids get and lose as in training: at most 3 GB more. In the largest tables of
more rows each id keeps its row: few traces have as many ids."""
MIN_TRACKED_ROWS = 1 << 16
"""Rows of a table that are tracked at any rate: fewer make a noisy curve and save little."""
CURVE_POINTS = 61
"""Geometric cache sizes of a curve; those of ``CACHE_SHARES`` come in addition."""
_DIGITS = 6


class TableReuse:
    """Count one table's lookups, batch after batch."""

    def __init__(self, table: TableSpec, distances: StackDistances) -> None:
        self.table, self.distances = table, distances
        self.lookups = 0
        self._with_row = 0

    def add(self, rows: NDArray[np.int64], lookups: int) -> None:
        """Count one global batch's lookups: (n,) their rows, in any order; those beyond have none."""
        self.lookups += lookups
        self._with_row += rows.size
        self.distances.add(*np.unique(rows, return_counts=True))

    def trace(self) -> TableTrace:
        """Return what was measured so far."""
        unique = round(self.distances.unique_rows)
        sizes = cache_sizes(self.table.rows, min(unique, self.table.rows))
        hit_rates = self.distances.hit_rate(sizes).round(_DIGITS)
        curve = zip(sizes.tolist(), hit_rates.tolist(), strict=True)
        return TableTrace(
            table=self.table.name,
            rows=self.table.rows,
            lookups=self.lookups,
            unique_rows=unique if self.table.is_unique else min(unique, self.table.rows),
            accesses=self.distances.accesses,
            sample_rate=self.distances.rate,
            histogram=reuse_histogram(*self.distances.row_lookups(), self._with_row),
            curve=tuple(CurvePoint(cache_rows=size, hit_rate=share) for size, share in curve),
        )


class ReuseMeter:
    """Count all tables' lookups, one global batch after the other, in training order."""

    def __init__(self, spec: DLRMJobSpec, rate: float | None = None) -> None:
        """Measure the tables of the batches of a job.

        Without ``rate`` the result is exact unless tables have more than ``MAX_TRACKED_ROWS`` rows together; then the
        largest are sampled. With a rate, tables with more than ``MIN_TRACKED_ROWS`` rows in use are sampled; 1 tracks
        every row.
        """
        from dlrm_kernels.reuse import StackDistances
        from dlrm_trainer.embedding.rows_of_ids import RowsOfIds

        self.batches, self._batch_size = 0, spec.data.global_batch_size
        tables, rows = spec.model.all_tables(), [table.held_rows for table in spec.model.all_tables()]
        most: list[int | None] = [None if rate == 1 else MIN_TRACKED_ROWS] * len(tables)
        if rate is None:
            most[:] = tracked_shares(rows, MAX_TRACKED_ROWS)
        self.tables = [TableReuse(table, StackDistances(rows, rate)) for table, rows in zip(tables, most, strict=True)]
        features = np.array([len(table.sources) for table in tables], dtype=np.intp)
        # A table's features are adjacent in a batch.
        self._firsts = np.cumsum(features) - features
        unique = [i for i, table in enumerate(tables) if table.is_unique]
        shares = tracked_shares([rows[i] for i in unique], MAX_DIRECTORY_ROWS)
        self._unique = [i for i, share in zip(unique, shares, strict=True) if share == rows[i]]
        self._of_unique = np.isin(np.repeat(np.arange(len(tables)), features), self._unique)
        self._rows_of_ids = RowsOfIds(spec, [tables[i] for i in self._unique]) if self._unique else None

    @property
    def lookups(self) -> int:
        """Return the lookups of all tables so far."""
        return sum(table.lookups for table in self.tables)

    def add(self, batch: Batch) -> None:
        """Count the next global batch, read as the only rank; a table's features count together."""
        bags = batch.lengths.numpy().sum(axis=1, dtype=np.int64)
        stops = np.cumsum(np.add.reduceat(bags, self._firsts))
        values = np.split(batch.values.numpy(), stops[:-1])
        rows, left = list(values), list[NDArray[np.int64]]()
        self.batches += 1
        if self._rows_of_ids is not None:
            keys = [values[i] for i in self._unique]
            with_row = self._rows_of_ids.look_up(self.batches, keys, bags[self._of_unique])
            for i, found in zip(self._unique, with_row, strict=True):
                rows[i] = found
            left = self._rows_of_ids.maintain(self.batches)
        for table, found, ids in zip(self.tables, rows, values, strict=True):
            table.add(found, ids.size)
        for i, leaving in zip(self._unique, left, strict=True):
            self.tables[i].distances.remove(leaving)

    def trace(self, job: str) -> Trace:
        """Return what was measured so far, from at least one batch."""
        tables = tuple(table.trace() for table in self.tables)
        return Trace(job=job, global_batch_size=self._batch_size, batches=self.batches, tables=tables)


def tracked_shares(rows: Sequence[int], total: int) -> list[int]:
    """Return how many rows of each table to track: all of small ones, an even share of large ones."""
    shares, left = [0] * len(rows), total
    for place, number in enumerate(sorted(range(len(rows)), key=rows.__getitem__)):
        shares[number] = max(1, min(rows[number], left // (len(rows) - place)))
        left -= shares[number]
    return shares


def cache_sizes(rows: int, unique: int) -> NDArray[np.int64]:
    """Return a curve's ascending cache sizes: geometric up to the unique rows, and shares of all rows."""
    if not unique:
        return np.empty(0, dtype=np.int64)
    geometric = np.geomspace(1, unique, min(CURVE_POINTS, unique)).round().astype(np.int64)
    wanted = np.array([size for share in CACHE_SHARES if 1 <= (size := round(share * rows)) < unique], dtype=np.int64)
    return np.unique(np.concatenate((geometric, wanted)))


def reuse_histogram(row_lookups: NDArray[np.int64], weights: NDArray[np.float64], lookups: int) -> tuple[ReuseBin, ...]:
    """Return rows and lookups in bins (0, 1], (1, 2], (2, 4] ... of lookups per row; the last bin is open.

    (n,) ``row_lookups`` are of the tracked rows, each of which stands for (n,) ``weights`` rows. If rows were sampled,
    what ``lookups`` of all rows have beyond the bins goes to the hottest bins: a few rows with many lookups decide it.
    """
    if not row_lookups.size:
        return ()
    bins = np.frexp((row_lookups - 1).astype(np.float64))[1]
    rows = _binned(bins, weights)
    counts = np.maximum(_binned(bins, weights * row_lookups), rows)
    lacking = lookups - int(counts.sum())
    for number in range(counts.size - 1, -1, -1):
        # Each row was looked up at least once.
        change = max(lacking, int(rows[number] - counts[number]))
        counts[number] += change
        lacking -= change
    last = counts.size - 1
    return tuple(
        ReuseBin(most=None if number == last else 1 << number, rows=int(rows[number]), lookups=int(counts[number]))
        for number in range(last + 1)
    )


def _binned(bins: NDArray[np.int32], values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the sum of each bin's values as whole numbers that add up to the rounded total."""
    sums = np.bincount(bins, weights=values).astype(np.float64)
    return np.diff(np.rint(np.cumsum(sums)), prepend=0.0).astype(np.int64)
