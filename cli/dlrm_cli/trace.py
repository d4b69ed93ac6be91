"""``dlrmctl trace``: read a job's training data as training would, and write how its columns reuse rows."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from rich.console import RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dlrm_api.errors import DeviceError, InvalidSpecError, UsageError
from dlrm_api.job import DLRMJob
from dlrm_api.model import TRACE_KEY
from dlrm_api.trace import CACHE_SHARES, TableTrace, Trace, parse_trace
from dlrm_cli.checks import check_inputs
from dlrm_cli.manifests import CONFIGMAP, read_job
from dlrm_cli.views import PLAIN_INTERVAL_S, SafeConsole, print_view

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

    Args:
        name: Name of the ConfigMap.
        trace: Trace of all the model's tables.
        paths: Path of each table in the manifest.

    Raises:
        UsageError: one group's tables are too many for a ConfigMap; names the group.
    """
    parts = list(_parts(trace, paths))
    found = []
    for number, part in enumerate(parts):
        found.append(
            TraceMap(
                name=name if len(parts) == 1 else f"{name}-{number}",
                text=_text(trace, [table for _, table in part]),
                first=part[0][0],
                last=part[-1][0],
            )
        )
    return found


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


if TYPE_CHECKING:
    from dlrm_trainer.data import Reader

MAX_NAME = 253 - len("-9999")
"""Characters of a ConfigMap's name that leave space for a number."""
MAX_FIRST_ACCESSES = 0.1
"""Share of first accesses above which a caption says that the trace is short."""
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


@dataclass(frozen=True, kw_only=True)
class TraceOptions:
    """Hold the options of the command line."""

    file: Path
    out: Path | None
    configmap: str | None
    batches: int | None
    rate: float | None
    data: str | None
    settings: tuple[str, ...]


def trace_job(options: TraceOptions) -> None:
    """Measure the data of a file's job; write the trace, or print it as a ConfigMap, and show a table.

    Nothing is written before all is measured, and then the whole file at once.

    Raises:
        UsageError: the file holds something else; or a group is too large for a ConfigMap (the trace is in the file).
        DLRMError: the job or its data is invalid.
    """
    if options.configmap is not None and options.out is not None:
        raise UsageError("--out cannot be combined with --configmap")
    job = read_job(options.file, options.settings, options.data)
    out = options.out or Path(f"{job.metadata.name}.trace.json")
    _check_out(out, job)
    if options.configmap is not None:
        _check_name(options.configmap)
    check_inputs(job.spec)
    try:
        trace = _measured(job, options)
    except KeyboardInterrupt:
        print("interrupted, nothing was written", file=sys.stderr)
        raise
    if options.configmap is None:
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
        maps = trace_maps(options.configmap, trace, table_paths(job.spec))
    except UsageError as error:
        _write(out, trace)
        raise UsageError(f"{error}; the trace is in {out}") from error
    print("---\n".join(each.manifest(job.metadata.namespace) for each in maps), end="")
    print_view(trace_view(trace), stderr=True)
    for each in maps:
        print(each.reference(), file=sys.stderr)


def trace_view(trace: Trace) -> RenderableType:
    """Return a line per table: rows in use, and the hit rates of caches that hold at least a batch's rows."""
    view = Table(
        title=f"{trace.job}: {trace.batches:,} batches of {trace.global_batch_size:,} samples",
        title_justify="left",
        caption_justify="left",
    )
    view.add_column("table", overflow="fold")
    for name in (
        "rows",
        "lookups",
        "unique",
        "distinct per batch",
        *(f"hits at {share:.0%}" for share in CACHE_SHARES),
    ):
        view.add_column(name, justify="right")
    for table in trace.tables:
        about = "" if table.sample_rate == 1 else "~"
        distinct = table.accesses / trace.batches
        caches = [share * table.rows for share in CACHE_SHARES]
        view.add_row(
            table.table,
            f"{table.rows:,}",
            f"{table.lookups:,}",
            f"{about}{table.unique_rows:,}",
            f"{distinct:,.1f}",
            *("-" if cache < distinct else f"{about}{table.hit_rate(cache):.1%}" for cache in caches),
        )
    first = sum(table.unique_rows for table in trace.tables) / max(1, sum(table.accesses for table in trace.tables))
    if first > MAX_FIRST_ACCESSES:
        view.caption = (
            f"{first:.0%} of accesses are the first of their row, and so miss; a longer trace (--batches) has fewer"
        )
    return view


def _measured(job: DLRMJob, options: TraceOptions) -> Trace:
    """Read the batches in training order and measure them.

    Raises:
        UsageError: the trainer's packages are not installed.
    """
    try:
        from dlrm_cli.reuse import ReuseMeter
        from dlrm_trainer.data import open_reader
    except ModuleNotFoundError as error:
        raise UsageError(f"package not found: {error.name}; pip install 'dlrm-operator[trainer]'") from error
    with contextlib.closing(open_reader(job.spec, "train", 0, 1)) as reader:
        batches = options.batches or _batches(job, reader)
        meter = ReuseMeter(job.spec.model.all_tables(), options.rate)
        read = contextlib.closing(reader.iterate(0, batches))
        with _TraceDisplay(batches) as display, read as each_batch:
            for batch in each_batch:
                meter.add(batch)
                display.update(meter.batches, meter.lookups)
        return meter.trace(job.metadata.name, job.spec.data.global_batch_size)


def _batches(job: DLRMJob, reader: Reader) -> int:
    """Return the batches of one epoch, or fewer if the job ends earlier."""
    training = job.spec.training
    limits = [reader.batches_per_epoch]
    if training.max_steps is not None:
        limits.append(training.max_steps)
    if training.max_samples is not None:
        limits.append(-(-training.max_samples // job.spec.data.global_batch_size))
    return min(limits)


class _TraceDisplay:
    """Show a bar on a terminal, or print a line every few seconds; both on stderr."""

    def __init__(self, batches: int) -> None:
        self._console = SafeConsole(stderr=True)
        self._bar = Progress(
            TextColumn("tracing"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("batches, {task.fields[lookups]:,} lookups"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("tracing", total=batches, lookups=0)
        self._batches = batches
        self._shown_at = time.monotonic()

    def __enter__(self) -> _TraceDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, batches: int, lookups: int) -> None:
        """Show the progress."""
        self._bar.update(self._task, completed=batches, lookups=lookups)
        if not self._console.is_terminal and time.monotonic() - self._shown_at >= PLAIN_INTERVAL_S:
            self._shown_at = time.monotonic()
            line = f"tracing: {batches:,}/{self._batches:,} batches, {lookups:,} lookups"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME or not _NAME.fullmatch(name):
        raise UsageError(f"invalid --configmap: expected lower-case letters, digits, - and ., got {name!r}")


def _check_out(out: Path, job: DLRMJob) -> None:
    """Allow only an older trace of the same job to be replaced.

    Raises:
        UsageError: the file holds something else, or cannot be written.
    """
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
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        fresh.replace(out)
    except OSError as error:
        raise DeviceError(
            f"failed to write {len(text):,} bytes to {out}: {error.strerror}; choose another --out"
        ) from error
    finally:
        fresh.unlink(missing_ok=True)
