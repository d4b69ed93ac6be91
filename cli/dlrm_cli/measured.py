"""Tables of what a run measured of itself: how tables used their tiers, and where the time of steps went."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dlrm_api.run_report import HitRate, Profile, StageTimes, TableUse, TierReport
from dlrm_cli.sizes import human_bytes

MOST_TABLES = 20
"""Tables that are shown one by one."""
MOST_RANKS = 8
"""Ranks whose stages are shown one by one; of more ranks each stage's slowest is shown."""
MOST_RATES = 8
"""Hit rates of a rank that are shown, evenly over the run."""
AFTERWARDS = " at the end"
"""Ends the name of what came after the last step, and is no share of steps."""
COUNTS = ("lookups", "accesses", "created_rows", "evicted_rows", "scratch_rows")


def tiers_view(report: TierReport) -> RenderableType:
    """How tables with levels used their tiers, over all ranks."""
    waits = [(rank.prefetch_wait_seconds, rank.rank) for rank in report.ranks]
    slowest, where = max(waits, default=(0.0, 0))
    missing = sum(rank.missing_lookups for rank in report.ranks)
    words = f"waited for rows: {slowest:,.2f} s at most, on rank {where}; rows missing at a batch's start: {missing}"
    return Group(_tables_view([table for rank in report.ranks for table in rank.tables]), _tiers(report), Text(words))


def profile_view(profile: Profile) -> RenderableType:
    """Where the time of steps went, and the hit rate over time."""
    ranks = {each.rank for each in profile.stages}
    shown: Sequence[StageTimes] = profile.stages
    title = "time of a step"
    if len(ranks) > MOST_RANKS:
        title = f"time of a step: each stage on the slowest of {len(ranks)} ranks"
        by_stage: dict[str, StageTimes] = {}
        for each in profile.stages:
            if each.stage not in by_stage or each.mean_seconds > by_stage[each.stage].mean_seconds:
                by_stage[each.stage] = each
        shown = tuple(by_stage.values())
    table = Table(title=title, title_justify="left")
    table.add_column("rank", justify="right")
    table.add_column("stage")
    for name in ("steps", "mean ms", "median ms", "p99 ms", "share"):
        table.add_column(name, justify="right")
    totals = {each.rank: each.mean_seconds * each.steps for each in profile.stages if each.stage == "step"}
    for each in shown:
        times = (each.mean_seconds, each.median_seconds, each.p99_seconds)
        steps = None if each.stage.endswith(AFTERWARDS) else totals.get(each.rank)
        spent = each.mean_seconds * each.steps / steps if steps else None
        cells = (f"{each.steps:,}", *(f"{1e3 * seconds:,.3f}" for seconds in times), _share(spent))
        table.add_row(str(each.rank), each.stage, *cells, end_section=each.stage == "step")
    return Group(table, *(Text(words) for words in _rates(profile.hit_rates)))


def _tables_view(tables: Sequence[TableUse]) -> Table:
    """The largest tables and the total of all."""
    expects = any(table.expected_hit_rate is not None for table in tables)
    view = Table(title="tables over tiers", title_justify="left")
    view.add_column("table", overflow="fold")
    names = ("rows", "lookups", "accesses", "hit rate", "of repeats", *(["expected"] if expects else []))
    for name in (*names, "created", "evicted", "scratch"):
        view.add_column(name, justify="right")
    largest = sorted(tables, key=lambda table: (-table.rows, table.table))
    total = TableUse(
        table=f"all {len(tables)}",
        rows=sum(table.rows for table in tables),
        hits=sum(table.hits for table in tables),
        expected_hit_rate=_expected(tables),
        **{name: sum(getattr(table, name) for table in tables) for name in COUNTS},
    )
    shown = largest[:MOST_TABLES]
    for table in shown:
        view.add_row(*_cells(table, expects=expects), end_section=table is shown[-1])
    view.add_row(*_cells(total, expects=expects))
    return view


def _cells(table: TableUse, *, expects: bool) -> Iterator[str]:
    yield table.table
    yield from (f"{count:,}" for count in (table.rows, table.lookups, table.accesses))
    yield from (_share(table.hit_rate), _share(table.repeat_hit_rate))
    if expects:
        yield _share(table.expected_hit_rate)
    yield from (f"{count:,}" for count in (table.created_rows, table.evicted_rows, table.scratch_rows))


def _expected(tables: Sequence[TableUse]) -> float | None:
    """What the plan expects of all accesses, where it expects something of each table."""
    rates = [table.expected_hit_rate for table in tables]
    accesses = sum(table.accesses for table in tables)
    known = [rate for rate in rates if rate is not None]
    if not accesses or len(known) < len(rates):
        return None
    return min(1.0, sum(rate * table.accesses for rate, table in zip(known, tables, strict=True)) / accesses)


def _tiers(report: TierReport) -> Table:
    """What went through each tier and what lies in it, over all ranks."""
    view = Table(title="tiers", title_justify="left")
    view.add_column("tier")
    for name in ("rows read", "rows written", "read", "written", "device reads", "kept", "of planned"):
        view.add_column(name, justify="right")
    levels = [level for rank in report.ranks for level in rank.levels]
    held = [size for rank in report.ranks for size in rank.tiers]
    for tier in dict.fromkeys(size.tier for size in held):
        here = [level for level in levels if level.tier == tier]
        rows = [sum(getattr(level, name) for level in here) for name in ("read_rows", "written_rows")]
        sizes = [sum(getattr(level, name) for level in here) for name in ("read_bytes", "written_bytes")]
        kept = [sum(getattr(each, n) for each in held if each.tier == tier) for n in ("kept_bytes", "planned_bytes")]
        through = [*(f"{count:,}" for count in rows), *map(human_bytes, sizes)] if here else ["-"] * 4
        reads = f"{sum(level.device_reads for level in here):,}" if tier == "block" else "-"
        view.add_row(tier, *through, reads, *map(human_bytes, kept))
    return view


def _rates(rates: Sequence[HitRate]) -> Iterator[str]:
    for rank, found in groupby(rates, key=lambda rate: rate.rank):
        every = list(found)
        step = max(1, -(-len(every) // MOST_RATES))
        shown = every[::-1][::step][::-1]
        words = ", ".join(f"{rate.hit_rate:.1%} to step {rate.step:,}" for rate in shown)
        yield f"hit rate on rank {rank}: {words}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
