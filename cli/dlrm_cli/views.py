"""Format values and tables for people, and print foreign text safely."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, islice
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column, Table
from rich.text import Text

from dlrm_api import tiers
from dlrm_api.choice import NOT_CALIBRATED, Choice
from dlrm_api.errors import visible
from dlrm_api.job import DLRMJob
from dlrm_api.model import TableSpec
from dlrm_api.plan import Device, Plan, Prediction, ShardRange, TablePlan
from dlrm_api.progress import SnapshotInfo
from dlrm_api.run_report import (
    HitRate,
    MaintenanceTimes,
    Profile,
    SizesUse,
    StageTimes,
    TableUse,
    TierReport,
    UniqueUse,
)
from dlrm_api.status import AccuracyStatus, StepFigures

if TYPE_CHECKING:
    from dlrm_checkpointer import TableDiff
    from dlrm_cli.spectrum import TableRank
    from dlrm_planner import DimAdvice

ByColumns = Mapping[str, Mapping[int, Mapping[str, int]]]
"""``rows`` and ``bytes`` of a snapshot, by table with ``embedding.dimension`` and by the number of columns."""
UNKNOWN = "-"
SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
"""Units and their bytes, largest first: powers of 1000, as disks and networks are sold."""
PLAIN_INTERVAL_S = 5.0
"""Time between two progress lines on stderr if it is not a terminal."""


def format_bytes(count: float) -> str:
    """Return bytes in a suitable unit, such as ``1.5 GB``."""
    for unit, factor in SIZES:
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"


def number(value: float | None, form: str) -> str:
    """Format a number, or return ``-``."""
    return UNKNOWN if value is None else format(value, form)


def predicted_number(value: float | None, form: str, *, uncalibrated: bool) -> str:
    """Format a predicted figure, and say so if it is not calibrated."""
    mark = f" ({NOT_CALIBRATED})" if uncalibrated and value is not None else ""
    return f"{number(value, form)}{mark}"


def share(value: float | None) -> str:
    """Format a share of one as a percentage, or return ``-``."""
    return number(value, ".1%")


def titled_table(title: str, columns: Sequence[str], words: Collection[str]) -> Table:
    """Return an empty table; columns that are not of ``words`` are of figures, aligned to the right.

    On a narrow terminal, cells wrap within their column, figures too: none is cut.
    """
    shown = (Column(name, justify="left" if name in words else "right", overflow="fold") for name in columns)
    return Table(*shown, title=title, title_justify="left")


MAX_USED_TABLES = 20
"""Tables that are shown one by one."""
MAX_RANKS = 8
"""Largest number of ranks with separate stages. With more ranks, each stage is shown on its slowest rank."""
MAX_RATES = 8
"""Hit rates of a rank that are shown, spread evenly over the run."""
AFTER_LAST_STEP = " at the end"
"""Suffix of stages after the last step, which have no share of the steps."""
COUNTS = ("rows", "lookups", "accesses", "hits", "created_rows", "evicted_rows", "scratch_rows")


def accuracy_rows(accuracy: AccuracyStatus) -> list[list[str]]:
    """Return the figures of a step: name, predicted, measured, and measured over predicted."""
    predicted, measured = accuracy.predicted, accuracy.measured or StepFigures()

    def row(name: str, form: str, one: float | None, other: float | None) -> list[str]:
        ratio = share(other / one) if one and other is not None else UNKNOWN
        return [name, number(one, form), number(other, form), ratio]

    def milliseconds(name: str, one: float | None, other: float | None) -> list[str]:
        return row(f"{name} (ms)", ",.3f", *(None if each is None else 1e3 * each for each in (one, other)))

    rows = [
        milliseconds("step", predicted.step_seconds, measured.step_seconds),
        row("samples/s without pauses", ",.0f", predicted.samples_per_second, measured.samples_per_second),
    ]
    for stage in dict.fromkeys((*predicted.stage_seconds, *measured.stage_seconds)):
        seconds = (each.stage_seconds.get(stage) for each in (predicted, measured))
        rows.append(milliseconds(f"step: {stage}", *seconds))
    for tier in dict.fromkeys((*predicted.hit_rates, *measured.hit_rates)):
        rates = (each.hit_rates.get(tier) for each in (predicted, measured))
        rows.append(row(f"accesses served by {tier}", ".1%", *rates))
    return [each for each in rows if each[1:3] != [UNKNOWN, UNKNOWN]]


def tiers_view(report: TierReport) -> RenderableType:
    """Return how tables with levels used their tiers, over all ranks."""
    waits = [(rank.prefetch_wait_seconds, rank.rank) for rank in report.ranks]
    slowest, where = max(waits, default=(0.0, 0))
    missing = sum(rank.missing_lookups for rank in report.ranks)
    words = f"longest wait for rows: {slowest:,.2f} s, on rank {where}; rows missing at a batch's start: {missing}"
    return Group(_tables_view([table for rank in report.ranks for table in rank.tables]), _tiers(report), Text(words))


UNIQUE_COLUMNS = ("table", "rows", "of capacity", "full", "lookups", "without row", "admitted", "evicted")


def unique_cells(use: UniqueUse) -> list[str]:
    """Return the cells of ``UNIQUE_COLUMNS``."""
    rows = (f"{use.rows:,}", f"{use.capacity_rows:,}", share(use.fill))
    moved = (f"{use.admitted_rows:,}", f"{use.evicted_rows + use.expired_rows:,}")
    return [use.table, *rows, f"{use.lookups:,}", share(use.share_without_row), *moved]


def unique_view(uses: Sequence[UniqueUse], maintenance: Sequence[MaintenanceTimes]) -> RenderableType:
    """Return how full unique tables are, the largest first, and what their maintenance took."""
    view = titled_table("unique tables", UNIQUE_COLUMNS, words=("table",))
    for use in largest_unique(uses, MAX_USED_TABLES):
        view.add_row(*unique_cells(use))
    if len(uses) > MAX_USED_TABLES:
        view.add_row(f"and {len(uses) - MAX_USED_TABLES} smaller ones")
    return Group(view, Text(maintenance_words(maintenance)))


SIZES_COLUMNS = ("dim", "columns", "rows", "kept", "of all columns", "grown", "shrunk")


def sizes_cells(uses: Sequence[SizesUse]) -> list[list[str]]:
    """Return the rows of ``SIZES_COLUMNS``: for each dim a row of totals and one for each number of columns."""
    cells = []
    for use in uses:
        total, kept = f"{sum(use.rows.values()):,}", [format_bytes(use.kept_bytes), share(use.kept_share)]
        cells.append([str(use.dim), "all sizes", total, *kept, f"{use.grown_rows:,}", f"{use.shrunk_rows:,}"])
        cells += [[str(use.dim), str(columns), f"{rows:,}", "", "", "", ""] for columns, rows in use.rows.items()]
    return cells


def sizes_view(uses: Sequence[SizesUse]) -> RenderableType:
    """Return how many columns rows of several sizes have."""
    view = titled_table("rows of several sizes", SIZES_COLUMNS, words=("dim", "columns"))
    for cells in sizes_cells(uses):
        view.add_row(*cells)
    return view


def maintenance_words(maintenance: Sequence[MaintenanceTimes]) -> str:
    """Name the longest maintenance of all ranks; empty if there was none."""
    longest = max(maintenance, key=lambda times: times.longest_seconds, default=None)
    if longest is None or not longest.longest_seconds:
        return ""
    return f"longest maintenance: {1e3 * longest.longest_seconds:,.1f} ms, on rank {longest.rank}"


def largest_unique(uses: Sequence[UniqueUse], most: int) -> list[UniqueUse]:
    """Return the largest unique tables, in order of size."""
    return sorted(uses, key=lambda use: (-use.capacity_rows, use.table))[:most]


def slowest_by_stage(stages: Iterable[StageTimes]) -> tuple[StageTimes, ...]:
    """Return the times of each stage on its slowest rank, in the order of a step."""
    slowest: dict[str, StageTimes] = {}
    for each in stages:
        if each.stage not in slowest or each.mean_seconds > slowest[each.stage].mean_seconds:
            slowest[each.stage] = each
    return tuple(slowest.values())


def profile_view(profile: Profile) -> RenderableType:
    """Return the time of steps by stage, and the hit rate over time."""
    ranks = {each.rank for each in profile.stages}
    shown: Sequence[StageTimes] = profile.stages
    title = "time of a step"
    if len(ranks) > MAX_RANKS:
        title = f"time of a step: each stage on the slowest of {len(ranks)} ranks"
        shown = slowest_by_stage(profile.stages)
    columns = ("rank", "stage", "steps", "mean ms", "median ms", "p99 ms", "longest ms", "share")
    table = titled_table(title, columns, words=("stage",))
    totals = {each.rank: each.mean_seconds * each.steps for each in profile.stages if each.stage == "step"}
    for each in shown:
        times = (each.mean_seconds, each.median_seconds, each.p99_seconds, each.longest_seconds)
        steps = None if each.stage.endswith(AFTER_LAST_STEP) else totals.get(each.rank)
        spent = each.mean_seconds * each.steps / steps if steps else None
        cells = (f"{each.steps:,}", *(f"{1e3 * seconds:,.3f}" for seconds in times), share(spent))
        table.add_row(str(each.rank), each.stage, *cells, end_section=each.stage == "step")
    return Group(table, *(Text(words) for words in _rates(profile.hit_rates)))


def _tables_view(tables: Sequence[TableUse]) -> Table:
    expects = any(table.expected_hit_rate is not None for table in tables)
    names = ("rows", "lookups", "accesses", "hit rate", "of repeats", *(["expected"] if expects else []))
    columns = ("table", *names, "created", "evicted", "scratch")
    view = titled_table("tables over tiers", columns, words=("table",))
    largest = sorted(tables, key=lambda table: (-table.rows, table.table))
    total = sum_uses(f"all {len(tables)}", tables)
    shown = largest[:MAX_USED_TABLES]
    for table in shown:
        view.add_row(*_cells(table, expects=expects), end_section=table is shown[-1])
    view.add_row(*_cells(total, expects=expects))
    return view


def _cells(table: TableUse, *, expects: bool) -> Iterator[str]:
    yield table.table
    yield from (f"{count:,}" for count in (table.rows, table.lookups, table.accesses))
    yield from (share(table.hit_rate), share(table.repeat_hit_rate))
    if expects:
        yield share(table.expected_hit_rate)
    yield from (f"{count:,}" for count in (table.created_rows, table.evicted_rows, table.scratch_rows))


def sum_uses(name: str, parts: Sequence[TableUse]) -> TableUse:
    """Return the use of several tables, or of one table's shards, as one."""
    counts = {count: sum(getattr(part, count) for part in parts) for count in COUNTS}
    return TableUse(table=name, expected_hit_rate=expected_hit_rate(parts), **counts)


def expected_hit_rate(tables: Sequence[TableUse]) -> float | None:
    """Return the hit rate that the plan expects of all accesses, or None if a table has no expectation."""
    rates = [table.expected_hit_rate for table in tables]
    accesses = sum(table.accesses for table in tables)
    known = [rate for rate in rates if rate is not None]
    if not accesses or len(known) < len(rates):
        return None
    return min(1.0, sum(rate * table.accesses for rate, table in zip(known, tables, strict=True)) / accesses)


def _tiers(report: TierReport) -> Table:
    columns = ("tier", "rows read", "rows written", "read", "written", "device reads", "kept", "of planned")
    view = titled_table("tiers", columns, words=("tier",))
    levels = [level for rank in report.ranks for level in rank.levels]
    held = [size for rank in report.ranks for size in rank.tiers]
    for tier in dict.fromkeys(size.tier for size in held):
        here = [level for level in levels if level.tier == tier]
        rows = [sum(getattr(level, name) for level in here) for name in ("read_rows", "written_rows")]
        sizes = [sum(getattr(level, name) for level in here) for name in ("read_bytes", "written_bytes")]
        kept = [sum(getattr(each, n) for each in held if each.tier == tier) for n in ("kept_bytes", "planned_bytes")]
        through = [*(f"{count:,}" for count in rows), *map(format_bytes, sizes)] if here else [UNKNOWN] * 4
        reads = f"{sum(level.device_reads for level in here):,}" if tier == "block" else UNKNOWN
        view.add_row(tier, *through, reads, *map(format_bytes, kept))
    return view


def _rates(rates: Sequence[HitRate]) -> Iterator[str]:
    for rank, found in groupby(rates, key=lambda rate: rate.rank):
        every = list(found)
        step = max(1, -(-len(every) // MAX_RATES))
        shown = every[::-1][::step][::-1]
        words = ", ".join(f"{rate.hit_rate:.1%} to step {rate.step:,}" for rate in shown)
        yield f"hit rate on rank {rank}: {words}"


class SafeConsole(Console):
    """Print through rich with its own colours, but write control characters of foreign text out."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of what is printed, each text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def print_stderr(text: str) -> None:
    """Print a line on stderr, with control characters written out."""
    print(visible(text), file=sys.stderr)


MAX_TABLES = 60
"""Tables of a plan that are shown one by one."""
MAX_SHARDS = 8
"""Shards of a table that are shown one by one."""
WIDTH_OFF_TERMINAL = 200


@contextlib.contextmanager
def show_progress(title: str, total: float) -> Iterator[Callable[[float, str], None]]:
    """Yield a function that shows on stderr how much of a total is done, with a text: as a bar, or as lines."""
    console = SafeConsole(stderr=True)
    text = TextColumn("{task.fields[text]}", markup=False)
    shown_at = time.monotonic()

    def show(done: float, text: str) -> None:
        nonlocal shown_at
        bar.update(task, completed=done, text=text)
        if not console.is_terminal and time.monotonic() - shown_at >= PLAIN_INTERVAL_S:
            shown_at = time.monotonic()
            console.print(f"{title}: {text}", markup=False, highlight=False, soft_wrap=True)

    columns = (TextColumn(title), BarColumn(), text, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=total, text="")
        yield show


def print_view(view: RenderableType, *, stderr: bool = False) -> None:
    """Print on stdout or stderr, wide if it is not a terminal, so that URIs and digests stay whole."""
    # Markup would take the "[users]" of a field's path out of a note.
    console = SafeConsole(stderr=stderr, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH_OFF_TERMINAL
    console.print(view, crop=False)


def plan_view(job: DLRMJob, plan: Plan) -> RenderableType:
    """Return a plan's ranks, its largest tables and its reasons as tables."""
    used = sorted({tier for rank in plan.ranks for tier in rank.bytes_per_tier})
    title = f"{job.metadata.name}: {plan.world_size} ranks on {plan.nodes} pods"
    ranks = titled_table(title, ("rank", "pod", "tables", *(f"{tier} bytes" for tier in used)), words=())
    for rank, held in zip(plan.ranks, _tables_held(plan), strict=True):
        counts = (rank.rank, rank.node, held)
        ranks.add_row(*map(str, counts), *(f"{rank.bytes_per_tier.get(tier, 0):,}" for tier in used))
    columns = ("table", "rows", "dim", "sharding", "ranks", "tiers")
    tables = titled_table("tables", columns, words=("table", "sharding", "ranks", "tiers"))
    sizes = {table.name: table for table in job.spec.model.all_tables()}
    largest = sorted(plan.tables, key=lambda table: (-sizes[table.name].rows * sizes[table.name].dim, table.name))
    for table in largest[:MAX_TABLES]:
        spec = sizes[table.name]
        where, levels = _ranks(table, plan.world_size), "\n".join(_levels(job, plan.device, spec, table.ranges))
        tables.add_row(table.name, f"{spec.rows:,}", str(spec.dim), table.ranges[0].kind, where, levels)
    if len(largest) > MAX_TABLES:
        tables.add_row(f"and {len(largest) - MAX_TABLES} smaller ones", "", "", "", "", "see -o json")
    expected = [] if plan.predicted.samples_per_second is None else [Text(_prediction(plan.predicted))]
    chosen = [] if plan.choice is None else [_choice_table(plan.choice)]
    return Group(ranks, tables, *chosen, *expected, *(Text(f"- {reason}") for reason in plan.reasons))


def _choice_table(choice: Choice) -> Table:
    """Return the chosen number of replicas and hardware, and what each rejected one lacks."""
    columns = ("hardware", "replicas", "samples/s", "per hour", "per 1e9 samples", "")
    table = titled_table(f"choice: {choice.objective}", columns, words=("hardware", ""))
    verdict = "chosen" if choice.met else f"chosen, closest: {choice.lacks}"
    for each, text in ((choice, verdict), *((rejected, rejected.lacks) for rejected in choice.rejected)):
        rate = predicted_number(each.samples_per_second, ",.0f", uncalibrated=each.uncalibrated)
        price = predicted_number(each.price_per_billion_samples, ",.2f", uncalibrated=each.uncalibrated)
        hourly = number(each.price_per_hour, ",.2f")
        table.add_row(each.hardware or UNKNOWN, str(each.replicas), rate, hourly, price, text)
    return table


def _prediction(predicted: Prediction) -> str:
    mark = f" ({NOT_CALIBRATED})" if predicted.uncalibrated else ""
    price = predicted.price_per_billion_samples
    priced = "" if price is None else f", {price:,.2f} per billion samples (currency of pricePerHour){mark}"
    return f"predicted: {predicted.samples_per_second:,.0f} samples/s{mark}{priced}"


def dims_view(job: DLRMJob, advice: DimAdvice) -> RenderableType:
    """Return advised dims, and the bytes of tables with them, as a table."""
    title = f"{job.metadata.name}: {advice.bytes:,} bytes instead of {advice.declared_bytes:,}"
    table = titled_table(title, ("table", "tables", "rows", "dim", "advised", "bytes"), words=("table",))
    for each in advice.tables:
        figures = (each.count, each.rows, each.dim, each.advised_dim, each.bytes)
        table.add_row(each.name, *(f"{figure:,}" for figure in figures))
    added = f"projections add {advice.projection_parameters:,} dense parameters on each rank"
    return Group(table, *([Text(added)] if advice.projection_parameters else []))


def snapshots_view(
    snapshots: Sequence[SnapshotInfo], by_columns: Mapping[str, ByColumns] | None = None
) -> RenderableType:
    """Return committed snapshots, oldest first, as a table; ``by_columns``: rows of several sizes, by URI."""
    if not snapshots:
        return Text("no committed snapshots")
    table = titled_table("snapshots", ("step", "kind", "bits", "bytes"), words=())
    for each in snapshots:
        table.add_row(f"{each.step:,}", each.kind, str(each.bits), f"{each.bytes:,}")
    lines = []
    for each in snapshots:
        lines.append(whole_line(each.uri))
        for name, sizes in (by_columns or {}).get(each.uri, {}).items():
            rows = ", ".join(f"{found['rows']:,} of {columns}" for columns, found in sizes.items())
            lines.append(Text(f"  {name}: rows by columns: {rows}"))
    return Group(table, *lines)


def whole_line(text: str) -> Text:
    """Return text that ``print_view`` breaks nowhere, for URIs and commands that are copied."""
    return Text(text, no_wrap=True, overflow="ignore")


def diff_view(tables: Sequence[TableDiff]) -> RenderableType:
    """Return how the tables of two snapshots differ."""
    columns = ("table", "changed", "new", "gone", "norm of change", "largest change", "norm before", "norm after")
    view = titled_table("rows that differ", columns, words=("table",))
    for each in tables:
        counts = (f"{count:,}" for count in (each.changed, each.new, each.gone))
        norms = (each.change_norm, each.largest_change, each.norm_before, each.norm_after)
        view.add_row(Text(each.table), *counts, *(f"{norm:.6g}" for norm in norms))
    return view


def rank_view(tables: Sequence[TableRank], title: str) -> RenderableType:
    """Return how many columns of each table keep shares of the energy of its rows."""
    from dlrm_cli.spectrum import MAX_ALS_COLUMNS

    columns = ("table", "dim", "updated rows", "90 %", "99 %", "99.9 %", "advised dim")
    view = titled_table(title, columns, words=("table",))
    for each in tables:
        unknown = f"> {MAX_ALS_COLUMNS}" if each.energy else UNKNOWN
        about = "" if each.exact else "~"
        needed = (each.columns_90, each.columns_99, each.columns_99_9)
        kept = (unknown if count is None else f"{about}{count:,}" for count in needed)
        view.add_row(Text(each.table), f"{each.dim:,}", f"{each.rows:,}", *kept, number(each.advised_dim, ","))
    return view


def _levels(job: DLRMJob, device: Device, table: TableSpec, ranges: Sequence[ShardRange]) -> Iterator[str]:
    """Yield a line for each tier: rows and bytes of all shards, and hits of this tier and those above."""
    home = "hbm" if device == "cuda" and ranges[0].kind == "data" else "ddr"
    rows, sizes, served, weights = Counter[str](), Counter[str](), dict[str, float | None](), Counter[str]()
    for shard, count, ranks in ((each, *held) for each in ranges for held in each.row_counts.items()):
        width = (shard.column_end - shard.column_start) // (shard.ranks if shard.kind == "column" else 1)
        blocks = width // (table.column_block or table.dim)
        row = (width // blocks, table.dtype, job.spec.training.row_optimizer.kind)
        count *= table.unit_rows
        if not shard.tiers.is_stack:
            tier = shard.tiers.levels[0].tier if shard.tiers.levels else home
            rows[tier] += ranks * count
            slabs = table.slab_bytes(tiers.row_bytes(*row) - tiers.ELEMENT_BYTES[table.dtype] * row[0])
            sizes[tier] += ranks * (count * blocks * tiers.row_bytes(*row) if slabs is None else slabs.planned(count))
            continue
        for number, level in enumerate(shard.tiers.levels):
            size: float = tiers.slot_bytes(*row, tier=level.tier) if number == 0 else tiers.record_bytes(*row)
            if level.tier == "block":
                size = tiers.BLOCK_SLACK * tiers.block_place_bytes(*row)
            rows[level.tier] += ranks * level.rows
            sizes[level.tier] += ranks * math.ceil(level.rows * blocks * size)
            weights[level.tier] += ranks * count
            before, rate = served.get(level.tier, 0.0), level.expected_hit_rate
            served[level.tier] = None if before is None or rate is None else before + ranks * count * rate
    if not weights:
        yield from (f"{tier}: all, {format_bytes(size)}" for tier, size in sizes.items())
        return
    for number, (tier, count) in enumerate(rows.items()):
        kept = f" ({ranges[0].tiers.policy})" if number == 0 else ""
        hits = served.get(tier)
        rate_shown = "" if hits is None else f", hit rate {hits / weights[tier]:.1%}"
        yield f"{tier}{kept}: {count:,} rows, {format_bytes(sizes[tier])}{rate_shown}"


def _tables_held(plan: Plan) -> Iterable[int]:
    """Return the number of tables on each rank."""
    changes = Counter[int]()
    for table in plan.tables:
        end = 0
        for each in sorted(table.ranges, key=lambda each: each.rank):
            last = plan.world_size if each.kind == "data" else each.rank + each.ranks
            # Ranks may hold several ranges of a table.
            changes[max(each.rank, end)] += 1
            end = max(end, last)
            changes[max(each.rank, end)] -= 1
    return accumulate(changes[rank] for rank in range(plan.world_size))


def _ranks(table: TablePlan, world_size: int) -> str:
    ranges, count = table.ranges, sum(each.ranks for each in table.ranges)
    if ranges[0].kind == "data":
        return "all"
    if count == 1:
        return str(ranges[0].rank)
    if count > MAX_SHARDS:
        first = islice((str(each.rank + place) for each in ranges for place in range(each.ranks)), MAX_SHARDS)
        return f"{count} of {world_size}: {', '.join(first)}, ..."
    return "\n".join(f"{shard.rank}: {_part(shard, has_buckets=table.buckets > 0)}" for shard in table.shards)


def _part(shard: ShardRange, *, has_buckets: bool) -> str:
    if shard.kind == "column":
        return f"columns {shard.column_start} to {shard.column_end - 1}"
    rows = f"{'buckets' if has_buckets else 'rows'} {shard.row_start:,} to {shard.row_end - 1:,}"
    return f"{rows}, columns {shard.column_start} to {shard.column_end - 1}" if shard.kind == "grid" else rows
