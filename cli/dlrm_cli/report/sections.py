"""Turn what is known of a run into the report's sections of sentences, plots and tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise

from dlrm_api.run_report import Profile, TableUse
from dlrm_cli.counters import hit_rate, share_without_row
from dlrm_cli.report.collect import Record, throughput
from dlrm_cli.report.plots import Plot, Series, count, number, seconds, size
from dlrm_cli.run.history import Committed, Look
from dlrm_cli.views import (
    SIZES_COLUMNS,
    UNIQUE_COLUMNS,
    UNKNOWN,
    accuracy_rows,
    expected_hit_rate,
    largest_unique,
    maintenance_words,
    share,
    sizes_cells,
    slowest_by_stage,
    sum_uses,
    unique_cells,
)


@dataclass(frozen=True, kw_only=True)
class Table:
    """Hold the displayed rows of a table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: Collection[str] = ()
    """Columns of words; all others are of figures."""
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """Hold one subject."""

    title: str
    words: Sequence[str] = ()
    parts: Sequence[Plot | Table] = ()


@dataclass(frozen=True, kw_only=True)
class Between:
    """Hold two readings of the same attempt."""

    before: Look
    now: Look

    @property
    def steps(self) -> int:
        """Return the steps made between them, at least 1."""
        return self.now.step - self.before.step

    def stage_s(self, stage: str) -> float:
        """Return the time that a rank spent on a stage, as a mean over ranks (s)."""
        spent = self.now.stages.get(stage, 0.0) - self.before.stages.get(stage, 0.0)
        return max(0.0, spent) / max(1, self.now.ranks)


def between(looks: Sequence[Look]) -> Iterator[Between]:
    """Yield each reading with the one before it, if steps were made and both are of one attempt."""
    for before, now in pairwise(looks):
        if before.attempt == now.attempt and now.step > before.step:
            yield Between(before=before, now=now)


def last_of_attempts(looks: Sequence[Look]) -> list[Look]:
    """Return the last reading of each attempt: all that it counted, but for its last seconds."""
    newest = {look.attempt: look for look in looks}
    return [newest[attempt] for attempt in sorted(newest)]


def stall_s(snapshot: Committed, looks: Sequence[Look]) -> float | None:
    """Return the time that a rank spent on cuts between the readings around a snapshot's step (s).

    None without such readings. If several cuts are between the two, it is the sum of all.
    """
    latest = {look.attempt: look for look in looks if look.step >= snapshot.step}
    for attempt in sorted(latest, reverse=True):
        ours = [look for look in looks if look.attempt == attempt]
        before = [look for look in ours if look.step < snapshot.step]
        after = next((look for look in ours if look.step > snapshot.step), latest[attempt])
        if before:
            return Between(before=before[-1], now=after).stage_s("cut")
    return None


MAX_STAGES = 7
"""Stages that a plot shows one by one; the others are summed."""
MAX_EVALUATIONS = 20
MAX_RATES = 80
"""Spans of time over which throughput is shown."""
OTHER = "other stages"


def facts(record: Record) -> Iterator[tuple[str, str]]:
    """Yield a run's figures, each with its name."""
    total = f" of {record.total_steps:,}" if record.total_steps is not None else ""
    yield "steps", count(record.step) + (total if record.step is not None else "")
    yield "samples", count(record.samples)
    if record.skipped_rows or record.truncated_rows:
        yield "bad rows", f"{record.skipped_rows:,} skipped, {record.truncated_rows:,} truncated"
    mean = record.mean_samples_per_s
    yield ("mean samples/s", count(mean)) if mean is not None else ("last samples/s", count(record.samples_per_s))
    yield "NE", number(record.ne)
    yield "AUC", number(record.auc)
    yield "evaluation loss", number(record.eval_loss)
    yield "last training loss", number(record.loss)
    if record.started is not None and record.ended is not None:
        yield "time", seconds(record.ended - record.started)
    if record.started is not None:
        yield "started", format_utc(record.started)
    yield "restarts", count(record.restarts)
    if record.snapshots:
        yield "newest snapshot", f"step {record.snapshots[-1].step:,}"


MAX_SETTINGS = 200


def settings(record: Record) -> Section:
    """Show with what the run was made."""
    title, fields = "Settings, versions and machine", list(record.settings.items())
    if not fields:
        return Section(title=title, words=["The settings were not recorded."])
    left_out = len(fields) - MAX_SETTINGS
    note = (
        f"{left_out} more fields are in job.json."
        if left_out > 0
        else "Fields that the manifest leaves out have their defaults."
    )
    columns = ("field", "value")
    shown = Table(title="Settings", columns=columns, text_columns=columns, rows=fields[:MAX_SETTINGS], note=note)
    parts = [shown]
    if record.environment:
        columns = ("what", "which")
        rows = list(record.environment.items())
        parts.append(Table(title="Versions and machine", columns=columns, text_columns=columns, rows=rows))
    return Section(title=title, parts=parts)


def compared(names: Sequence[str], records: Sequence[Record]) -> list[Section]:
    """Show several runs side by side: results, what differs in their settings, and loss, quality and throughput."""
    figures = [dict(facts(each)) for each in records]
    every = list(dict.fromkeys(name for each in figures for name in each))
    rows = [[name, *(each.get(name, UNKNOWN) for each in figures)] for name in every]
    results = Table(title="Results", columns=("", *names), text_columns=("",), rows=rows)
    sets = [{**each.settings, **each.environment} for each in records]
    fields = [
        name for name in dict.fromkeys(name for each in sets for name in each) if len({e.get(name) for e in sets}) > 1
    ]
    rows = [[name, *(each.get(name, UNKNOWN) for each in sets)] for name in fields]
    columns = ("field", *names)
    differ = Table(title="Settings that differ", columns=columns, text_columns=columns, rows=rows[:MAX_SETTINGS])
    words = [] if rows else ["No setting differs."]
    plots = [
        _side_by_side(_loss, names, records),
        _side_by_side(_entropy, names, records),
        _side_by_side(_rates_of, names, records),
    ]
    first = Section(title="Comparison", words=words, parts=[results, *([differ] if rows else [])])
    return [first, Section(title="Over time", parts=[each for each in plots if each is not None])]


def _side_by_side(
    draw: Callable[[Record], Plot | None], names: Sequence[str], records: Sequence[Record]
) -> Plot | None:
    """Return one plot with the first series of each run's."""
    plots = [(name, plot) for name, record in zip(names, records, strict=True) if (plot := draw(record)) is not None]
    if not plots:
        return None
    series = [replace(plot.series[0], name=name) for name, plot in plots]
    return replace(plots[0][1], series=series, marks=(), words="The first one of each run's own page.")


def _rates_of(record: Record) -> Plot | None:
    parts = speed(record).parts
    return next((part for part in parts if isinstance(part, Plot)), None)


def learning(record: Record) -> Section:
    """Show loss and quality over steps."""
    title, parts = "Loss and quality", [_loss(record)] if record.steps else []
    words = [] if record.steps else ["The loss of single steps was not recorded."]
    if not record.evaluations:
        return Section(title=title, words=["No evaluations were recorded.", *words], parts=parts)
    shown = record.evaluations[-MAX_EVALUATIONS:]
    rows = [
        [count(e.step), number(e.log_loss), number(e.ne), number(e.auc), number(e.calibration), count(e.samples)]
        for e in shown
    ]
    left_out = len(record.evaluations) - len(shown)
    columns = ("step", "log loss", "NE", "AUC", "calibration", "samples")
    notes = [f"{left_out} earlier ones are in progress.jsonl."] if left_out else []
    note = " ".join([*notes, *dict.fromkeys(f"{each.note}." for each in shown if each.note)])
    table = Table(title="Evaluations", columns=columns, rows=rows, note=note)
    return Section(title=title, words=words, parts=[*parts, _entropy(record), table])


def _loss(record: Record) -> Plot:
    evaluations = [(float(each.step), each.log_loss) for each in record.evaluations]
    series = [Series(name="training", runs=[[(float(each.last), each.loss) for each in record.steps]])]
    series += [Series(name="evaluation", runs=[evaluations], form="dots")] if evaluations else []
    words = "Mean log loss of batches over neighbouring steps. Dots are evaluations on held-out samples."
    return Plot(title="Training loss", words=words, y_name="log loss (nats)", y_unit="number", series=series)


def _entropy(record: Record) -> Plot:
    points = [(float(each.step), each.ne) for each in record.evaluations if each.ne is not None]
    words = "Log loss of evaluations, divided by that of always predicting the base rate; lower is better."
    series, levels = [Series(name="NE", runs=[points])], [(1.0, "base rate")]
    return Plot(title="Normalized entropy", words=words, y_name="NE", y_unit="number", series=series, levels=levels)


def speed(record: Record) -> Section:
    """Show throughput over time."""
    if not record.steps or record.started is None:
        return Section(title="Throughput", words=["Throughput over time was not recorded."])
    start = record.started
    runs = [[(at - start, rate) for at, rate in run] for run in throughput(record.steps, record.attempts, MAX_RATES)]
    marks = [(each.time - start, f"attempt {each.attempt}") for each in record.attempts]
    predicted, mean = record.predicted_samples_per_s, record.mean_samples_per_s
    plot = Plot(
        title="Samples per second",
        words="Steps that led to the result. Steps that were repeated after a restart are not counted.",
        x_name="time since the first attempt",
        x_unit="seconds",
        y_name="samples/s",
        y_unit="count",
        series=[Series(name="samples/s", runs=runs)],
        marks=marks,
        levels=[] if predicted is None else [(predicted, "predicted by the plan")],
        from_zero=True,
    )
    words = [] if mean is None else [f"{mean:,.0f} samples/s from the first step to the last, pauses included."]
    return Section(title="Throughput", words=words, parts=[plot])


def step_time(record: Record) -> Section:
    """Show the time of a step by stage."""
    title = "Time of a step"
    spent, steps = _totals(record)
    if not steps:
        return Section(title=title, words=["Times of stages were not recorded."])
    order, whole = sorted(spent, key=lambda stage: -spent[stage]), sum(spent.values())
    busy = [(stage, spent[stage]) for stage in order if spent[stage] > 0]
    rows = [
        [stage, f"{1e3 * spent_s / steps:,.3f}", share(spent_s / whole if whole else None)] for stage, spent_s in busy
    ]
    note = f"Over {steps:,.0f} steps, including those repeated after restarts."
    name, columns = "Mean over all ranks and counted steps", ("stage", "ms per step", "share")
    table = Table(title=name, columns=columns, text_columns=("stage",), rows=rows, note=note)
    profile = [_profile(record.profile)] if record.profile is not None else []
    pairs = list(between(record.looks))
    plots = [_stages(pairs, order)] if len(pairs) > 1 else []
    return Section(title=title, parts=[*plots, table, *profile])


def _totals(record: Record) -> tuple[dict[str, float], float]:
    """Return seconds by stage, mean over ranks, and the steps that they cover, of all attempts."""
    spent: dict[str, float] = defaultdict(float)
    # An attempt's counters start at the step of its first reading.
    starts = {look.attempt: look.step for look in reversed(record.looks)}
    steps = 0
    for look in last_of_attempts(record.looks):
        steps += look.step - starts[look.attempt]
        for stage, spent_s in look.stages.items():
            spent[stage] += spent_s / max(1, look.ranks)
    return dict(spent), steps


def _stages(pairs: Sequence[Between], order: Sequence[str]) -> Plot:
    parts = {stage: [stage] for stage in order[:MAX_STAGES]}
    if rest := list(order[MAX_STAGES:]):
        parts[OTHER] = rest
    # Repeated steps are drawn once, with their last value.
    runs: dict[str, dict[float, float]] = {name: {} for name in parts}
    for pair in pairs:
        for name, stages in parts.items():
            runs[name][float(pair.now.step)] = 1e3 * sum(pair.stage_s(stage) for stage in stages) / pair.steps
    series = [Series(name=name, runs=[sorted(points.items())], form="area") for name, points in runs.items()]
    words = "Mean over ranks between two readings of their counters, stacked by stage."
    return Plot(
        title="Time of a step by stage", words=words, y_name="time per step", y_unit="milliseconds", series=series
    )


def _profile(profile: Profile) -> Table:
    """Show each stage on its slowest rank."""
    rows = []
    for each in slowest_by_stage(profile.stages):
        times = (each.mean_seconds, each.median_seconds, each.p99_seconds, each.longest_seconds)
        rows.append([each.stage, str(each.rank), count(each.steps), *(f"{1e3 * value:,.3f}" for value in times)])
    title = "Profile of the last attempt, each stage on its slowest rank"
    columns = ("stage", "rank", "steps", "mean ms", "median ms", "p99 ms", "longest ms")
    return Table(title=title, columns=columns, text_columns=("stage",), rows=rows or [[UNKNOWN] * 7])


MAX_TABLES = 30
"""Tables that are shown one by one, the largest first."""


def tiers(record: Record) -> Section:
    """Show how tables with levels used their tiers."""
    title = "Memory tiers"
    uses = list(table_uses(record))
    newest = last_of_attempts(record.looks)[-1:]
    if not uses and not any(look.tiers for look in newest):
        return Section(title=title, words=[_without_counts(record)])
    return Section(title=title, parts=[*_hit_rate(record, uses), *_traffic(record), *_tables(uses)])


def _without_counts(record: Record) -> str:
    ranges = [each for table in record.plan.tables for each in table.ranges] if record.plan is not None else []
    if ranges and not any(each.tiers.levels for each in ranges):
        return "No table of this plan has levels: all rows are in host memory."
    return "No counters of tables with levels were recorded."


def table_uses(record: Record) -> Iterator[TableUse]:
    """Yield the use of each table with levels, over all ranks."""
    ranks = record.tiers.ranks if record.tiers is not None else ()
    tables: dict[str, list[TableUse]] = {}
    for use in (table for rank in ranks for table in rank.tables):
        tables.setdefault(use.table, []).append(use)
    for name, parts in tables.items():
        yield sum_uses(name, parts)


def _hit_rate(record: Record, uses: list[TableUse]) -> Iterator[Plot]:
    readings = ((pair.now, pair.before) for pair in between(record.looks))
    points = {float(now.step): rate for now, before in readings if (rate := hit_rate(now, before)) is not None}
    expected = expected_hit_rate(uses) if uses else None
    if points:
        words = "Share of accesses (distinct rows of a batch) that found their row in fast memory."
        series = [Series(name="hit rate", runs=[sorted(points.items())])]
        levels = [] if expected is None else [(expected, "expected by the plan")]
        yield Plot(title="Hit rate", words=words, y_name="hit rate", y_unit="share", series=series, levels=levels)


def _traffic(record: Record) -> Iterator[Table]:
    """Yield rows and bytes of each tier: traffic of all attempts, and its size at the end of the last."""
    ends = last_of_attempts(record.looks)
    names = sorted({name for look in ends for name in look.tiers})
    if not names:
        return
    rows = []
    for name in names:
        seen = [look.tiers[name] for look in ends if name in look.tiers]
        moved = [sum(getattr(each, field) for each in seen) for field in ("read_rows", "written_rows")]
        sizes = [sum(getattr(each, field) for each in seen) for field in ("read_bytes", "written_bytes")]
        sizes += [seen[-1].kept_bytes, seen[-1].planned_bytes]
        rows.append([name, *map(count, moved), *map(size, sizes)])
    waited = sum(look.prefetch_wait_s / max(1, look.ranks) for look in ends)
    gone, made = sum(look.evicted_rows for look in ends), sum(look.created_rows for look in ends)
    note = f"{count(made)} rows were created and {count(gone)} evicted from fast memory. "
    note += f"Ranks waited {seconds(waited)} for rows on average."
    title = "Traffic of tiers in all attempts, and bytes kept at the end of the last"
    columns = ("tier", "rows read", "rows written", "read", "written", "kept", "of planned")
    yield Table(title=title, columns=columns, text_columns=("tier",), rows=rows, note=note)


def _tables(uses: list[TableUse]) -> Iterator[Table]:
    if not uses:
        return
    shown = sorted(uses, key=lambda use: (-use.rows, use.table))[:MAX_TABLES]
    rows = [
        [
            use.table,
            count(use.rows),
            count(use.accesses),
            share(use.hit_rate),
            share(use.repeat_hit_rate),
            share(use.expected_hit_rate),
            count(use.evicted_rows),
            count(use.scratch_rows),
        ]
        for use in shown
    ]
    note = "Of repeats: without the first access of each row, which no cache can hit."
    if left_out := len(uses) - len(shown):
        note += f" {left_out} smaller tables are not shown."
    columns = ("table", "rows", "accesses", "hit rate", "of repeats", "expected", "evicted", "scratch")
    yield Table(title="Tables over tiers, last attempt", columns=columns, text_columns=("table",), rows=rows, note=note)


def unique_tables(record: Record) -> Iterator[Section]:
    """Yield a section on how full unique tables are, if there are any."""
    looks = [look for look in record.looks if look.unique_fill is not None]
    if not looks and not record.unique_tables:
        return
    filled = [(float(look.step), look.unique_fill) for look in looks if look.unique_fill is not None]
    without = [
        (float(pair.now.step), found)
        for pair in between(looks)
        if (found := share_without_row(pair.now, pair.before)) is not None
    ]
    series = [
        Series(name="rows in use", runs=[sorted(dict(filled).items())]),
        Series(name="lookups without a row", runs=[sorted(dict(without).items())]),
    ]
    words = "Share of the rows of all unique tables that are in use, and of lookups whose id had no row."
    plot = Plot(title="Rows in use", words=words, y_name="share", y_unit="share", series=series, from_zero=True)
    yield Section(title="Unique tables", parts=[*([plot] if plot.has_points else []), *_unique_rows(record)])


def _unique_rows(record: Record) -> Iterator[Table]:
    if not record.unique_tables:
        return
    shown = largest_unique(record.unique_tables, MAX_TABLES)
    left_out = len(record.unique_tables) - len(shown)
    notes = [f"{left_out} smaller tables are not shown"] * bool(left_out)
    if longest := maintenance_words(record.maintenance):
        notes.append(longest)
    yield Table(
        title="Unique tables, last attempt",
        columns=UNIQUE_COLUMNS,
        text_columns=("table",),
        rows=list(map(unique_cells, shown)),
        note="; ".join(notes),
    )


def row_sizes(record: Record) -> Iterator[Section]:
    """Yield a section on the columns of rows of several sizes, if there are any."""
    looks = [look for look in record.looks if look.kept_share is not None]
    if not looks and not record.row_sizes:
        return
    kept = [(float(look.step), look.kept_share) for look in looks if look.kept_share is not None]
    plot = Plot(
        title="Bytes kept",
        words="Share of the bytes that rows with embedding.dimension take with all columns.",
        y_name="share",
        y_unit="share",
        series=[Series(name="kept", runs=[sorted(dict(kept).items())])],
        from_zero=True,
    )
    table = Table(
        title="Rows by number of columns, at the end",
        columns=SIZES_COLUMNS,
        text_columns=("dim", "columns"),
        rows=sizes_cells(record.row_sizes),
    )
    yield Section(
        title="Rows of several sizes", parts=[*([plot] if kept else []), *([table] if record.row_sizes else [])]
    )


def plan_and_measured(record: Record) -> Section:
    """Show the plan next to what was measured."""
    title = "Plan against measured"
    if record.plan is None and not record.plan_status:
        return Section(title=title, words=["The plan was not recorded."])
    rows = [_speed_row(record), *accuracy_rows(record.accuracy), *_byte_rows(record), *_rate_rows(record)]
    words = []
    if record.predicted_samples_per_s is None:
        words.append(
            "The plan predicts no speed, because its HardwareProfile has no rates. dlrmctl run plans by memory only; "
            "dlrmctl plan --hardware FILE predicts for hardware with known rates."
        )
    if any(use.expected_hit_rate is not None for use in table_uses(record)):
        words.append(
            "A plan from a prior ignores the first access of each row: compare it with the hit rate of repeats, under "
            "memory tiers. A plan from a trace counts first accesses as misses."
        )
    columns: tuple[str, ...] = ("quantity", "planned", "measured", "measured / planned")
    parts = [Table(title=_gang(record), columns=columns, text_columns=("quantity",), rows=rows)]
    if reasons := [[str(i), reason] for i, reason in enumerate(record.plan.reasons if record.plan else (), 1)]:
        columns = ("number", "reason")
        parts.append(Table(title="Reasons of the plan", columns=columns, text_columns=columns[1:], rows=reasons))
    return Section(title=title, words=words, parts=parts)


def _gang(record: Record) -> str:
    if record.plan is not None:
        ranks, nodes, hardware = record.plan.world_size, record.plan.nodes, record.plan.hardware
        shards = record.plan.virtual_shards
    else:
        counts = (int(record.plan_status.get(key) or 0) for key in ("worldSize", "nodes", "virtualShards"))
        ranks, nodes, shards = counts
        hardware = str(record.plan_status.get("hardware") or "")
    where = f"{ranks} ranks on {nodes} " + ("pod" if nodes == 1 else "pods") + (f" of {hardware}" if hardware else "")
    return where + (f", {shards:,} virtual shards" if shards else "")


def _speed_row(record: Record) -> list[str]:
    predicted, measured = record.predicted_samples_per_s, record.mean_samples_per_s or record.samples_per_s
    ratio = share(measured / predicted) if predicted and measured else UNKNOWN
    return ["samples/s", count(predicted), count(measured), ratio]


def _byte_rows(record: Record) -> Iterator[list[str]]:
    """Yield bytes of all ranks, or of the largest one, by tier."""
    planned: Counter[str] = Counter()
    which = "of all ranks"
    if record.plan is not None:
        for rank in record.plan.ranks:
            planned.update(rank.bytes_per_tier)
    else:
        planned.update(record.plan_status.get("bytesPerTier") or {})
        which = "of the largest rank"
    newest = last_of_attempts(record.looks)[-1:]
    kept = {name: counts.kept_bytes for look in newest for name, counts in look.tiers.items()}
    levels = {name: counts.planned_bytes for look in newest for name, counts in look.tiers.items()}
    for name, whole in sorted(planned.items()):
        yield [f"bytes in {name}, {which}: rows, maps, hand-off", size(whole), UNKNOWN, UNKNOWN]
    for name, most in sorted(levels.items()):
        ratio = share(kept[name] / most) if most else UNKNOWN
        yield [f"bytes of tables with levels in {name}", size(most), size(kept[name]), ratio]


def _rate_rows(record: Record) -> Iterator[list[str]]:
    uses = sorted(table_uses(record), key=lambda use: (-use.rows, use.table))
    if len(uses) > 1:
        accesses = sum(use.accesses for use in uses)
        measured = sum(use.hits for use in uses) / accesses if accesses else None
        yield _rate_row("hit rate of all tables with levels", expected_hit_rate(uses), measured)
    for use in uses[:MAX_TABLES]:
        yield _rate_row(f"hit rate of {use.table}", use.expected_hit_rate, use.hit_rate)


def _rate_row(name: str, expected: float | None, measured: float | None) -> list[str]:
    ratio = share(measured / expected) if expected and measured is not None else UNKNOWN
    return [name, share(expected), share(measured), ratio]


MAX_ROWS = 50
KINDS = ("full", "increment")


def snapshots(record: Record) -> Section:
    """Show what was committed, when and how large."""
    if not record.snapshots:
        return Section(title="Snapshots", words=["No committed snapshots were recorded."])
    shown = record.snapshots[-MAX_ROWS:]
    rows = []
    for each in shown:
        committed = format_utc(each.time) if each.time else UNKNOWN
        chain = UNKNOWN if each.chain is None else str(each.chain)
        times = map(seconds, (each.commit_s, stall_s(each, record.looks)))
        rows.append([count(each.step), committed, each.kind, str(each.bits), size(each.bytes), chain, *times])
    newest = f"Newest {len(shown)} of {len(record.snapshots)}"
    table = Table(
        title=newest if len(shown) < len(record.snapshots) else "All snapshots",
        columns=("step", "committed", "kind", "bits", "bytes", "chain", "to commit", "stall"),
        text_columns=("committed", "kind"),
        rows=rows,
        note="Chain: snapshots that it depends on. To commit: from hand-over to commit, while training continues. "
        "Stall: time that training spent on cuts between the readings around it. A dash: not observed.",
    )
    whole = sum(each.bytes for each in record.snapshots)
    many = "1 snapshot" if len(record.snapshots) == 1 else f"{len(record.snapshots)} snapshots"
    words = f"{many}, {size(whole)} in total; the newest is of step {shown[-1].step:,}."
    return Section(title="Snapshots", words=[words], parts=[_sizes(record.snapshots), table])


def _sizes(every: Sequence[Committed]) -> Plot:
    kinds = [*KINDS, *sorted({each.kind for each in every} - set(KINDS))]
    by_kind = {kind: [(float(each.step), float(each.bytes)) for each in every if each.kind == kind] for kind in kinds}
    series = [Series(name=kind, runs=[points], form="bars") for kind, points in by_kind.items() if points]
    words = "Bytes of each snapshot's own objects, by the step of its cut."
    return Plot(title="Bytes of snapshots", words=words, y_name="bytes", y_unit="bytes", series=series)


def restarts(record: Record) -> Section:
    """Show attempts, and why they ended."""
    parts: list[Plot | Table] = []
    if failures := record.failures[-MAX_ROWS:]:
        rows = []
        for each in failures:
            code = UNKNOWN if each.code is None else str(each.code)
            evidence = (each.process, code, each.words, each.then or UNKNOWN)
            rows.append([format_utc(each.time), str(each.attempt), *evidence])
        logs = ", ".join(sorted({each.log for each in failures if each.log}))
        note = f"Logs: {logs}" if logs else ""
        columns: tuple[str, ...] = ("time", "attempt", "process", "code", "evidence", "action")
        words = ("time", "process", "evidence", "action")
        parts.append(Table(title="Failures", columns=columns, text_columns=words, rows=rows, note=note))
    if record.events:
        columns = ("time", "reason", "message")
        rows = [[format_utc(at), reason, words] for at, reason, words in record.events[-MAX_ROWS:]]
        parts.append(Table(title="Events", columns=columns, text_columns=columns, rows=rows))
    return Section(title="Restarts", words=[_count_words(record)], parts=parts)


def _count_words(record: Record) -> str:
    if not record.restarts and not record.failures:
        return "No failures and no restarts."
    words = f"{record.restarts} " + ("restart" if record.restarts == 1 else "restarts") + " of all trainer pods"
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(record.restarts_by_reason.items()))
    return words + (f" ({reasons})." if reasons else ".")


def format_utc(moment: float) -> str:
    """Format a time in UTC."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
