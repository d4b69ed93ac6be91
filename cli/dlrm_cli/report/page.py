"""What a report consists of: sections of sentences, plots and tables. Plain data, without a form."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dlrm_api.errors import DLRMError, NoInputError, UsageError
from dlrm_api.run_report import Profile, StageTimes, TableUse
from dlrm_cli.report.collect import Record, Steps
from dlrm_cli.report.plots import (
    COLOURS,
    UNKNOWN,
    Level,
    Mark,
    Plot,
    Point,
    Series,
    count,
    exact,
    has_points,
    number,
    seconds,
    share,
    size,
    svg,
)
from dlrm_cli.run.history import Committed, Look, Started
from dlrm_cli.run.workdir import folder_error


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table."""

    name: str
    numeric: bool = True


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells as they are shown."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One subject."""

    title: str
    words: Sequence[str] = ()
    parts: Sequence[Plot | Table] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    state: str
    """Outcome in a word or two."""
    tone: Literal["good", "bad", "open"]
    place: str
    """Where the run is, or was."""
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    notes: Sequence[str]
    """What is missing or could not be read."""


@dataclass(frozen=True, kw_only=True)
class Between:
    """Two looks at the same attempt."""

    before: Look
    now: Look

    @property
    def steps(self) -> int:
        """Steps made between them, at least 1."""
        return self.now.step - self.before.step

    @property
    def hit_rate(self) -> float | None:
        """Share of accesses that were hits; None where there were none."""
        accesses = self.now.accesses - self.before.accesses
        return (self.now.hits - self.before.hits) / accesses if accesses > 0 else None

    def stage_s(self, stage: str) -> float:
        """Time that a rank gave to a stage, mean over ranks (s)."""
        spent = self.now.stages.get(stage, 0.0) - self.before.stages.get(stage, 0.0)
        return max(0.0, spent) / max(1, self.now.ranks)


def between(looks: Sequence[Look]) -> Iterator[Between]:
    """Each look with the one before it, where steps were made and both are of one attempt."""
    for before, now in pairwise(looks):
        if before.attempt == now.attempt and now.step > before.step:
            yield Between(before=before, now=now)


def counted_from(looks: Sequence[Look], attempt: int) -> int:
    """The step from which an attempt's counters count: that of its first look, made before its first step ends."""
    return next(look.step for look in looks if look.attempt == attempt)


def last_of_attempts(looks: Sequence[Look]) -> list[Look]:
    """The last look at each attempt: what it counted in all, but for its last seconds."""
    newest = {look.attempt: look for look in looks}
    return [newest[attempt] for attempt in sorted(newest)]


def throughput(steps: Sequence[Steps], attempts: Sequence[Started], most: int) -> list[list[Point]]:
    """(time, samples/s) over at most ``most`` spans of about the same time; a new run of points with each attempt.

    A span is long enough that single steps do not show, and a pause lies within one.
    """
    if len(steps) < 2:
        return []
    runs: list[list[Point]] = [[]]
    starts = sorted(attempt.time for attempt in attempts)
    least_s = (steps[-1].time - steps[0].time) / most
    before = steps[0]
    for now in steps[1:]:
        if any(before.time < start <= now.time for start in starts):
            runs.append([])
            before = now
        elif now.time - before.time >= max(least_s, 1e-3):
            runs[-1].append((now.time, (now.samples - before.samples) / (now.time - before.time)))
            before = now
    return [run for run in runs if run]


def mean_throughput(steps: Sequence[Steps]) -> float | None:
    """Samples/s from the first kept span to the last, everything between them included; None for fewer than two."""
    if len(steps) < 2 or steps[-1].time <= steps[0].time:
        return None
    return (steps[-1].samples - steps[0].samples) / (steps[-1].time - steps[0].time)


def stall_s(snapshot: Committed, looks: Sequence[Look]) -> float | None:
    """Time that a rank gave to cuts between the last look before a snapshot's step and the first after it (s).

    None where there are no such looks. Where several cuts lie between the two it is that of all of them.
    """
    latest = {look.attempt: look for look in looks if look.step >= snapshot.step}
    for attempt in sorted(latest, reverse=True):
        ours = [look for look in looks if look.attempt == attempt]
        before = [look for look in ours if look.step < snapshot.step]
        after = next((look for look in ours if look.step > snapshot.step), latest[attempt])
        if before:
            return Between(before=before[-1], now=after).stage_s("cut")
    return None


MOST_STAGES = 7
"""Stages that a plot shows one by one; the others are added up."""
MOST_EVALUATIONS = 20
MOST_RATES = 80
"""Spans of time that throughput is shown of."""
OTHER = "other stages"


def learning(record: Record) -> Section:
    """Loss and quality over steps."""
    words = [] if record.evaluations else ["No evaluation was made, or none was kept."]
    if not record.steps:
        words.append("The loss of single steps was not kept.")
    parts = [*([_loss(record)] if record.steps else [])]
    if not record.evaluations:
        return Section(title="Loss and quality", words=words, parts=parts)
    shown = record.evaluations[-MOST_EVALUATIONS:]
    rows = [
        [count(e.step), number(e.log_loss), number(e.ne), number(e.auc), number(e.calibration), count(e.samples)]
        for e in shown
    ]
    names = ("step", "log loss", "NE", "AUC", "calibration", "samples")
    left_out = len(record.evaluations) - len(shown)
    table = Table(
        title="Evaluations",
        columns=[Column(name=name) for name in names],
        rows=rows,
        note=f"{left_out} earlier ones are in progress.jsonl." if left_out else "",
    )
    return Section(title="Loss and quality", words=words, parts=[*parts, _entropy(record), table])


def _loss(record: Record) -> Plot:
    evaluations = [(float(each.step), each.log_loss) for each in record.evaluations]
    dots = [Series(name="evaluation", runs=[evaluations], form="dots")] if evaluations else []
    return Plot(
        title="Training loss",
        words="Mean log loss of a batch, averaged over neighbouring steps; a dot is an evaluation on held-out samples.",
        x_name="step",
        x_unit="count",
        y_name="log loss (nats)",
        y_unit="number",
        series=[Series(name="training", runs=[[(float(each.last), each.loss) for each in record.steps]]), *dots],
    )


def _entropy(record: Record) -> Plot:
    points = [(float(each.step), each.ne) for each in record.evaluations if each.ne is not None]
    return Plot(
        title="Normalized entropy",
        words="Log loss of an evaluation over that of always predicting the base rate; below 1 the model knows more.",
        x_name="step",
        x_unit="count",
        y_name="NE",
        y_unit="number",
        series=[Series(name="NE", runs=[points])],
        levels=[Level(y=1.0, name="always the base rate")],
    )


def speed(record: Record) -> Section:
    """Throughput over time."""
    if not record.steps or record.started is None:
        return Section(title="Throughput", words=["Throughput over time was not kept."])
    start = record.started
    runs = [[(at - start, rate) for at, rate in run] for run in throughput(record.steps, record.attempts, MOST_RATES)]
    marks = [Mark(x=each.time - start, name=f"attempt {each.attempt}") for each in record.attempts]
    predicted = record.predicted_samples_per_s
    plot = Plot(
        title="Samples per second",
        words="Of the steps that led to the result; steps that a restart did again are not among them.",
        x_name="time since the first attempt",
        x_unit="seconds",
        y_name="samples/s",
        y_unit="count",
        series=[Series(name="samples/s", runs=runs)],
        marks=marks,
        levels=[] if predicted is None else [Level(y=predicted, name="predicted by the plan")],
        from_zero=True,
    )
    mean = mean_throughput(record.steps)
    words = [] if mean is None else [f"{mean:,.0f} samples/s from the first step to the last, all pauses included."]
    return Section(title="Throughput", words=words, parts=[plot])


def step_time(record: Record) -> Section:
    """Where the time of a step goes."""
    title = "Time of a step"
    pairs = list(between(record.looks))
    spent, steps = _totals(record)
    if not steps:
        return Section(title=title, words=["Times of stages were not kept: no counter was seen to move."])
    order = sorted(spent, key=lambda stage: -spent[stage])
    whole = sum(spent.values())
    rows = [
        [stage, f"{1e3 * spent[stage] / steps:,.3f}", share(spent[stage] / whole if whole else None)]
        for stage in order
        if spent[stage] > 0
    ]
    table = Table(
        title="Mean over all ranks and counted steps",
        columns=[Column(name="stage", numeric=False), Column(name="ms a step"), Column(name="share")],
        rows=rows,
        note=f"{steps:,.0f} steps were counted, those made again after restarts included.",
    )
    profile = [_profile(record.profile)] if record.profile is not None else []
    plots = [_stages(pairs, order)] if len(pairs) > 1 else []
    return Section(title=title, parts=[*plots, table, *profile])


def _totals(record: Record) -> tuple[dict[str, float], float]:
    """Seconds by stage, mean over ranks, and the steps that they were counted over, of all attempts."""
    spent: dict[str, float] = defaultdict(float)
    steps = 0
    for look in last_of_attempts(record.looks):
        steps += look.step - counted_from(record.looks, look.attempt)
        for stage, spent_s in look.stages.items():
            spent[stage] += spent_s / max(1, look.ranks)
    return dict(spent), steps


def _stages(pairs: Sequence[Between], order: Sequence[str]) -> Plot:
    shown = list(order[:MOST_STAGES])
    rest = order[MOST_STAGES:]
    runs: dict[str, list[tuple[float, float]]] = {stage: [] for stage in shown}
    others: list[tuple[float, float]] = []
    for pair in pairs:
        at = float(pair.now.step)
        for stage in shown:
            runs[stage].append((at, 1e3 * pair.stage_s(stage) / pair.steps))
        others.append((at, 1e3 * sum(pair.stage_s(stage) for stage in rest) / pair.steps))
    series = [Series(name=stage, runs=[_last_at(runs[stage])], form="area") for stage in shown]
    if rest:
        series.append(Series(name=OTHER, runs=[_last_at(others)], form="area"))
    return Plot(
        title="Time of a step by stage",
        words="Mean over ranks between two looks at their counters, one stage on top of the other.",
        x_name="step",
        x_unit="count",
        y_name="ms a step",
        y_unit="milliseconds",
        series=series,
    )


def _last_at(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The last value of each step, in order: steps that a restart made again are drawn once."""
    return sorted(dict(points).items())


def _profile(profile: Profile) -> Table:
    """Each stage on its slowest rank."""
    slowest: dict[str, StageTimes] = {}
    for each in profile.stages:
        if each.stage not in slowest or each.mean_seconds > slowest[each.stage].mean_seconds:
            slowest[each.stage] = each
    names = ("steps", "mean ms", "median ms", "p99 ms")
    rows = [
        [
            each.stage,
            str(each.rank),
            count(each.steps),
            *(f"{1e3 * value:,.3f}" for value in (each.mean_seconds, each.median_seconds, each.p99_seconds)),
        ]
        for each in slowest.values()
    ]
    return Table(
        title="Profile of the last attempt, each stage on the rank where it took longest",
        columns=[Column(name="stage", numeric=False), Column(name="rank"), *(Column(name=name) for name in names)],
        rows=rows or [[UNKNOWN] * 6],
    )


MOST_TABLES = 30
"""Tables that are shown one by one, the largest first."""


def tiers(record: Record) -> Section:
    """How tables with levels used their tiers."""
    title = "Memory tiers"
    uses = list(table_uses(record))
    newest = last_of_attempts(record.looks)[-1:]
    if not uses and not any(look.tiers for look in newest):
        return Section(title=title, words=[_without_counts(record)])
    return Section(title=title, parts=[*_hit_rate(record, uses), *_traffic(record), *_tables(uses)])


def _without_counts(record: Record) -> str:
    shards = [shard for table in record.plan.tables for shard in table.shards] if record.plan is not None else []
    if shards and not any(shard.tiers.levels for shard in shards):
        return "No table of this plan has levels: every row is in host memory."
    return "No counters of tables with levels were seen."


def table_uses(record: Record) -> Iterator[TableUse]:
    """Each table with levels, over all ranks."""
    ranks = record.tiers.ranks if record.tiers is not None else ()
    tables: dict[str, list[TableUse]] = {}
    for use in (table for rank in ranks for table in rank.tables):
        tables.setdefault(use.table, []).append(use)
    for name, parts in tables.items():
        yield TableUse(
            table=name,
            rows=sum(part.rows for part in parts),
            lookups=sum(part.lookups for part in parts),
            accesses=sum(part.accesses for part in parts),
            hits=sum(part.hits for part in parts),
            created_rows=sum(part.created_rows for part in parts),
            evicted_rows=sum(part.evicted_rows for part in parts),
            scratch_rows=sum(part.scratch_rows for part in parts),
            expected_hit_rate=_expected(parts),
        )


def _expected(parts: Iterable[TableUse]) -> float | None:
    """What the plan expects of all accesses of some tables; None where it expects nothing of one of them."""
    known = [(part.expected_hit_rate, part.accesses) for part in parts]
    accesses = sum(each for _, each in known)
    if not accesses or any(rate is None for rate, _ in known):
        return None
    return min(1.0, sum((rate or 0.0) * each for rate, each in known) / accesses)


def _hit_rate(record: Record, uses: list[TableUse]) -> Iterator[Plot]:
    points = {float(pair.now.step): rate for pair in between(record.looks) if (rate := pair.hit_rate) is not None}
    expected = _expected(uses) if uses else None
    if points:
        yield Plot(
            title="Hit rate",
            words="Share of accesses (a distinct row of a batch) whose row was in fast memory when the batch came.",
            x_name="step",
            x_unit="count",
            y_name="hit rate",
            y_unit="share",
            series=[Series(name="hit rate", runs=[sorted(points.items())])],
            levels=[] if expected is None else [Level(y=expected, name="expected by the plan")],
        )


def _traffic(record: Record) -> Iterator[Table]:
    """Rows and bytes of each tier: traffic of all attempts, and what lies in it at the end of the last one."""
    ends = last_of_attempts(record.looks)
    names = sorted({name for look in ends for name in look.tiers})
    if not names:
        return
    rows = []
    for name in names:
        seen = [look.tiers[name] for look in ends if name in look.tiers]
        rows.append(
            [
                name,
                count(sum(each.read_rows for each in seen)),
                count(sum(each.written_rows for each in seen)),
                size(sum(each.read_bytes for each in seen)),
                size(sum(each.written_bytes for each in seen)),
                size(seen[-1].kept_bytes),
                size(seen[-1].planned_bytes),
            ]
        )
    headings = ("rows read", "rows written", "read", "written", "kept", "of planned")
    waited = sum(look.prefetch_wait_s / max(1, look.ranks) for look in ends)
    gone, made = sum(look.evicted_rows for look in ends), sum(look.created_rows for look in ends)
    yield Table(
        title="Traffic of tiers in all attempts, and bytes kept at the end of the last",
        columns=[Column(name="tier", numeric=False), *(Column(name=name) for name in headings)],
        rows=rows,
        note=f"{count(made)} rows were made, {count(gone)} left fast memory for others; "
        f"ranks waited {seconds(waited)} for rows on average.",
    )


def _tables(uses: list[TableUse]) -> Iterator[Table]:
    if not uses:
        return
    shown = sorted(uses, key=lambda use: (-use.rows, use.table))[:MOST_TABLES]
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
    headings = ("rows", "accesses", "hit rate", "of repeats", "expected", "evicted", "scratch")
    left_out = len(uses) - len(shown)
    more = f" {left_out} smaller tables are left out." if left_out else ""
    yield Table(
        title="Tables over tiers, last attempt",
        columns=[Column(name="table", numeric=False), *(Column(name=name) for name in headings)],
        rows=rows,
        note="Of repeats: without the first access of each row, which no cache can hit." + more,
    )


def plan_and_measured(record: Record) -> Section:
    """What the plan said beside what came of it."""
    title = "Plan against measured"
    if record.plan is None and not record.plan_status:
        return Section(title=title, words=["The plan was not kept."])
    rows = [*_speed_row(record), *_byte_rows(record), *_rate_rows(record)]
    names = ("what", "planned", "measured", "measured over planned")
    words = []
    if record.predicted_samples_per_s is None:
        words.append(
            "The plan predicts no speed: its HardwareProfile has no rates. dlrmctl run plans by memory alone; "
            "dlrmctl plan --profile FILE predicts for hardware whose rates are known."
        )
    if any(use.expected_hit_rate is not None for use in table_uses(record)):
        words.append(
            "A plan made by a prior leaves the first access of each row out: compare it with the rate of repeats, "
            "under memory tiers. A plan made by a trace counts first accesses as misses."
        )
    reasons = [[str(number), reason] for number, reason in enumerate(record.plan.reasons if record.plan else (), 1)]
    why = Table(
        title="Why the plan is as it is",
        columns=[Column(name="number"), Column(name="reason", numeric=False)],
        rows=reasons,
    )
    table = Table(
        title=_gang(record), columns=[Column(name=name, numeric=i > 0) for i, name in enumerate(names)], rows=rows
    )
    return Section(title=title, words=words, parts=[table, *([why] if reasons else [])])


def _gang(record: Record) -> str:
    if record.plan is not None:
        ranks, nodes, hardware = record.plan.world_size, record.plan.nodes, record.plan.hardware
    else:
        ranks, nodes = (int(record.plan_status.get(key) or 0) for key in ("worldSize", "nodes"))
        hardware = str(record.plan_status.get("hardware") or "")
    return f"{ranks} ranks on {nodes} " + ("pod" if nodes == 1 else "pods") + (f" of {hardware}" if hardware else "")


def _speed_row(record: Record) -> Iterator[list[str]]:
    predicted, measured = record.predicted_samples_per_s, mean_throughput(record.steps) or record.samples_per_s
    ratio = share(measured / predicted) if predicted and measured else UNKNOWN
    yield ["samples/s", count(predicted), count(measured), ratio]


def _byte_rows(record: Record) -> Iterator[list[str]]:
    """Bytes of all ranks, or of the largest one, by tier."""
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
        accesses, hits = sum(use.accesses for use in uses), sum(use.hits for use in uses)
        yield _rate_row("hit rate of all tables with levels", _expected(uses), hits / accesses if accesses else None)
    for use in uses[:MOST_TABLES]:
        yield _rate_row(f"hit rate of {use.table}", use.expected_hit_rate, use.hit_rate)


def _rate_row(name: str, expected: float | None, measured: float | None) -> list[str]:
    ratio = share(measured / expected) if expected and measured is not None else UNKNOWN
    return [name, share(expected), share(measured), ratio]


MOST_ROWS = 50
KINDS = ("full", "increment")


def snapshots(record: Record) -> Section:
    """What was committed, when and how large."""
    if not record.snapshots:
        return Section(title="Snapshots", words=["No snapshot was seen committed."])
    shown = record.snapshots[-MOST_ROWS:]
    rows = [
        [
            count(each.step),
            utc(each.time) if each.time else UNKNOWN,
            each.kind,
            str(each.bits),
            size(each.bytes),
            UNKNOWN if each.chain is None else str(each.chain),
            seconds(each.commit_s),
            seconds(stall_s(each, record.looks)),
        ]
        for each in shown
    ]
    columns = [
        Column(name="step"),
        Column(name="committed", numeric=False),
        Column(name="kind", numeric=False),
        *(Column(name=name) for name in ("bits", "bytes", "chain", "to commit", "stall")),
    ]
    table = Table(
        title=f"The newest {len(shown)} of {len(record.snapshots)}"
        if len(shown) < len(record.snapshots)
        else "All snapshots",
        columns=columns,
        rows=rows,
        note="Chain: snapshots that it goes over. To commit: from hand-over to commit, beside training. Stall: time "
        "that training gave to cuts between the looks around it. A dash: it was not seen.",
    )
    whole = sum(each.bytes for each in record.snapshots)
    many = "1 snapshot" if len(record.snapshots) == 1 else f"{len(record.snapshots)} snapshots"
    words = f"{many}, {size(whole)} in all; the newest holds step {shown[-1].step:,}."
    return Section(title="Snapshots", words=[words], parts=[_sizes(record.snapshots), table])


def _sizes(every: Sequence[Committed]) -> Plot:
    kinds = [*KINDS, *sorted({each.kind for each in every} - set(KINDS))]
    by_kind = {kind: [(float(each.step), float(each.bytes)) for each in every if each.kind == kind] for kind in kinds}
    return Plot(
        title="Bytes of snapshots",
        words="Bytes of each snapshot's own objects, by the step of its cut.",
        x_name="step",
        x_unit="count",
        y_name="bytes",
        y_unit="bytes",
        series=[Series(name=kind, runs=[points], form="bars") for kind, points in by_kind.items() if points],
    )


def restarts(record: Record) -> Section:
    """Attempts, and why they ended."""
    words = [_count_words(record)]
    parts: list[Plot | Table] = []
    if record.failures:
        columns = [Column(name="when", numeric=False), Column(name="attempt"), Column(name="process", numeric=False)]
        columns += [Column(name="code"), *(Column(name=name, numeric=False) for name in ("evidence", "then"))]
        rows = [
            [
                utc(each.time),
                str(each.attempt),
                each.process,
                UNKNOWN if each.code is None else str(each.code),
                each.words,
                each.then or UNKNOWN,
            ]
            for each in record.failures[-MOST_ROWS:]
        ]
        logs = sorted({each.log for each in record.failures[-MOST_ROWS:] if each.log})
        parts.append(
            Table(title="Failures", columns=columns, rows=rows, note=f"Logs: {', '.join(logs)}" if logs else "")
        )
    if record.events:
        columns = [Column(name=name, numeric=False) for name in ("when", "reason", "words")]
        event_rows = [[utc(at), reason, words] for at, reason, words in record.events[-MOST_ROWS:]]
        parts.append(Table(title="Events", columns=columns, rows=event_rows))
    return Section(title="Restarts", words=words, parts=parts)


def _count_words(record: Record) -> str:
    if not record.restarts and not record.failures:
        return "Nothing failed that was seen: no restart."
    words = f"{record.restarts} " + ("restart" if record.restarts == 1 else "restarts") + " of the gang"
    reasons = ", ".join(f"{reason} {number}" for reason, number in sorted(record.restarts_by_reason.items()))
    return words + (f" ({reasons})." if reasons else ".")


def utc(moment: float) -> str:
    """A time of day that every reader understands alike."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def page(record: Record) -> Page:
    """The whole page."""
    return Page(
        title=record.name,
        state=record.state,
        tone=record.tone,
        place=record.place + (f": {record.words}" if record.words else ""),
        facts=list(_facts(record)),
        sections=[
            learning(record),
            speed(record),
            step_time(record),
            tiers(record),
            snapshots(record),
            restarts(record),
            plan_and_measured(record),
        ],
        notes=record.notes,
    )


def _facts(record: Record) -> Iterator[tuple[str, str]]:
    total = f" of {record.total_steps:,}" if record.total_steps is not None else ""
    yield "steps", count(record.step) + (total if record.step is not None else "")
    yield "samples", count(record.samples)
    mean = mean_throughput(record.steps)
    yield ("samples/s, mean", count(mean)) if mean is not None else ("samples/s, last", count(record.samples_per_s))
    yield "NE", number(record.ne)
    yield "AUC", number(record.auc)
    yield "evaluation loss", number(record.eval_loss)
    yield "training loss, last", number(record.loss)
    if record.started is not None and record.ended is not None:
        yield "time", seconds(record.ended - record.started)
    if record.started is not None:
        yield "started", utc(record.started)
    yield "restarts", count(record.restarts)
    if record.snapshots:
        yield "newest snapshot", f"step {record.snapshots[-1].step:,}"


POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser itself refuses whatever would leave the page."""
GENERATOR = "dlrmctl report"
"""What the file says it was made by."""
MOST_VALUES = 12
"""Rows of the table beside a plot, evenly over its points."""

LIGHT = ("#0b6fb8", "#c2571a", "#1f8a5f", "#a23b8f", "#8a6d00", "#4a5fc1", "#b3304a", "#5f6b76")
DARK = ("#5fb3ef", "#f0935a", "#55c79a", "#df86cd", "#d9b93b", "#98a8f5", "#f07f95", "#a9b4bf")

STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f7f9; --ink: #1c2430; --soft: #56606d; --edge: #d5dae1;
  --good: #1b7a4b; --bad: #b3261e; --open: #8a5a00; %(light)s }
@media (prefers-color-scheme: dark) { :root { --page: #14181d; --card: #1d232a; --ink: #e7ebf0; --soft: #a3adb9;
  --edge: #39424d; --good: #5fd39a; --bad: #ff8f86; --open: #f0c060; %(dark)s } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 20px 48px; max-width: 960px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif }
h1 { font-size: 26px; margin: 0 0 4px; overflow-wrap: anywhere }
h2 { font-size: 19px; margin: 36px 0 8px; padding-bottom: 4px; border-bottom: 1px solid var(--edge) }
p { margin: 6px 0; overflow-wrap: anywhere }
.place, figcaption p, .note-line { color: var(--soft) }
.state { display: inline-block; padding: 1px 10px; border: 1.5px solid currentColor; border-radius: 12px;
  font-weight: 600; font-size: 14px; margin-left: 8px; vertical-align: middle }
.good { color: var(--good) } .bad { color: var(--bad) } .open { color: var(--open) }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(180px, 1fr)); gap: 8px; margin: 18px 0 }
dl div { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 12px }
dt { color: var(--soft); font-size: 13px } dd { margin: 0; font-size: 17px; font-variant-numeric: tabular-nums;
  overflow-wrap: anywhere }
ul.notes { padding-left: 20px; color: var(--open); overflow-wrap: anywhere }
figure { margin: 18px 0; break-inside: avoid }
figcaption strong { font-size: 15px }
.plot { width: 100%%; min-width: 540px; height: auto; display: block; margin-top: 6px }
.plot text { font: 12px system-ui, "Segoe UI", "Helvetica Neue", "DejaVu Sans", sans-serif; fill: var(--soft) }
.plot .grid { stroke: var(--edge); stroke-width: 1 } .plot .axis { stroke: var(--soft); stroke-width: 1 }
.plot .mark { stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3 }
.plot .level { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 6 4 }
.plot .line { fill: none; stroke-width: 1.75; stroke-linejoin: round } .plot .area { stroke-width: 0.5 }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; margin: 6px 0 0; padding: 0;
  font-size: 13px }
.legend svg { width: 12px; height: 12px; margin-right: 5px; vertical-align: -1px }
%(series)s
.scroll { overflow-x: auto }
table { border-collapse: collapse; margin: 8px 0; min-width: min(100%%, 560px); font-size: 14px;
  font-variant-numeric: tabular-nums }
caption { text-align: left; font-weight: 600; padding: 4px 0 }
th, td { padding: 3px 12px 3px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--edge) }
th { color: var(--soft); font-weight: 500; white-space: nowrap } td.n, th.n { text-align: right; white-space: nowrap }
td:not(.n) { min-width: 90px; overflow-wrap: anywhere }
details { margin: 4px 0; font-size: 14px } summary { cursor: pointer; color: var(--soft) }
footer { margin-top: 40px; color: var(--soft); font-size: 13px }
@media print { body { max-width: none; padding: 0; font-size: 12px } h2 { break-after: avoid }
  dl div { break-inside: avoid } tr { break-inside: avoid } .scroll { overflow: visible } summary { list-style: none }
  details::details-content { content-visibility: visible; block-size: auto } }
"""


def html(page: Page, made: str) -> str:
    """The file's text.

    Args:
        page: what it shows.
        made: when and by what it was made, for its foot.
    """
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta name="generator" content="{GENERATOR}">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<title>{escape(page.title)}</title><style>{_style()}</style></head><body>",
            f'<header><h1>{escape(page.title)}<span class="state {page.tone}">{escape(page.state)}</span></h1>',
            f'<p class="place">{escape(page.place)}</p></header><main>',
            *_summary(page),
            *(line for number, section in enumerate(page.sections) for line in _section(section, f"s{number}")),
            f"</main><footer>{escape(made)}</footer></body></html>",
            "",
        ]
    )


def _style() -> str:
    light, dark = (" ".join(f"--c{i}: {colour};" for i, colour in enumerate(each)) for each in (LIGHT, DARK))
    series = "\n".join(
        f".line.c{i} {{ stroke: var(--c{i}) }} .dot.c{i}, .bar.c{i}, .swatch.c{i} {{ fill: var(--c{i}) }} "
        f".area.c{i} {{ fill: var(--c{i}); stroke: var(--page) }}"
        for i in range(COLOURS)
    )
    return STYLE % {"light": light, "dark": dark, "series": series}


def _summary(page: Page) -> Iterator[str]:
    yield "<dl>"
    for name, value in page.facts:
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"
    if page.notes:
        yield '<ul class="notes">'
        yield from (f"<li>{escape(note)}</li>" for note in page.notes)
        yield "</ul>"


def _section(section: Section, name: str) -> Iterator[str]:
    yield f'<section aria-labelledby="{name}"><h2 id="{name}">{escape(section.title)}</h2>'
    yield from (f"<p>{escape(words)}</p>" for words in section.words)
    for place, part in enumerate(section.parts):
        if isinstance(part, Table):
            yield from _table(part)
        elif has_points(part):
            yield from _figure(part, f"{name}-{place}")
        else:
            yield f'<p class="note-line">{escape(part.title)}: nothing was kept to draw.</p>'
    yield "</section>"


def _figure(plot: Plot, name: str) -> Iterator[str]:
    yield f"<figure><figcaption><strong>{escape(plot.title)}</strong><p>{escape(plot.words)}</p></figcaption>"
    if len(plot.series) > 1:
        yield '<ul class="legend">'
        for number, series in enumerate(plot.series):
            swatch = f'<rect class="swatch c{number % COLOURS}" width="12" height="12" rx="2"/>'
            yield f'<li><svg viewBox="0 0 12 12" aria-hidden="true">{swatch}</svg>{escape(series.name)}</li>'
        yield "</ul>"
    yield f'<div class="scroll">{svg(plot, name)}</div>'
    yield "<details><summary>Values as a table</summary>"
    yield from _table(_values(plot))
    yield "</details></figure>"


def _values(plot: Plot) -> Table:
    """Values of all series at a few x, evenly over them."""
    columns = [{x: y for run in series.runs for x, y in run} for series in plot.series]
    every = sorted({x for column in columns for x in column})
    last = len(every) - 1
    chosen = every if last < MOST_VALUES else [every[i * last // (MOST_VALUES - 1)] for i in range(MOST_VALUES)]
    rows = [
        [exact(x, plot.x_unit), *(exact(column[x], plot.y_unit) if x in column else "" for column in columns)]
        for x in chosen
    ]
    names = [plot.x_name, *(series.name for series in plot.series)]
    note = "" if len(chosen) == len(every) else f"{len(chosen)} of {len(every)} points"
    return Table(title=plot.y_name, columns=[Column(name=name) for name in names], rows=rows, note=note)


def _table(table: Table) -> Iterator[str]:
    marks = [' class="n"' if column.numeric else "" for column in table.columns]
    yield f'<div class="scroll"><table><caption>{escape(table.title)}</caption><thead><tr>'
    for column, mark in zip(table.columns, marks, strict=True):
        yield f'<th scope="col"{mark}>{escape(column.name)}</th>'
    yield "</tr></thead><tbody>"
    for row in table.rows:
        cells = "".join(f"<td{mark}>{escape(cell)}</td>" for cell, mark in zip(row, marks, strict=True))
        yield f"<tr>{cells}</tr>"
    yield "</tbody></table></div>"
    if table.note:
        yield f'<p class="note-line">{escape(table.note)}</p>'


if TYPE_CHECKING:
    from dlrm_cli.cluster.client import JobClient

HEAD_BYTES = 4_096


def write_report(what: str, output: Path, connect: Callable[[], JobClient]) -> Path:
    """Write the page about a work directory, or a job of the cluster; returns the file.

    Args:
        what: a folder; any other name without a slash is a job's.
        output: the file; an older report is replaced, anything else is left alone.
        connect: opens the cluster.

    Raises:
        NoInputError: there is no such folder or job.
        UsageError: the file is there and is no report.
        NoPermissionError: the file can't be written.
    """
    record = _record(what, connect)
    _check_output(output)
    made = (
        f"Made {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC by dlrmctl report, dlrm-operator {version('dlrm-operator')}."
    )
    draft = output.with_name(f".{output.name}.draft")
    try:
        draft.write_text(html(page(record), made), "utf-8")
        draft.replace(output)
    except OSError as error:
        raise _not_written(output, error) from error
    return output


def _record(what: str, connect: Callable[[], JobClient]) -> Record:
    from dlrm_cli.report.collect import read_work_folder

    if "/" in what or Path(what).is_dir():
        return read_work_folder(Path(what))
    from dlrm_cli.report.collect import read_cluster_job

    try:
        return read_cluster_job(connect(), what)
    except NoInputError as error:
        raise NoInputError(
            f"{error} (and there is no folder {what} here: a work directory is given by its path)"
        ) from error


def _check_output(output: Path) -> None:
    if output.is_dir():
        raise UsageError(f"--output {output}: a folder is there: give a file")
    if output.exists() and not output.is_file():
        raise UsageError(
            f"--output {output}: a pipe or device is there, and the page is put in place whole: give a file"
        )
    try:
        with output.open("rb") as file:
            if GENERATOR.encode() not in file.read(HEAD_BYTES):
                raise UsageError(f"--output {output}: it is there and no report: give another file")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _not_written(output, error) from error


def _not_written(output: Path, error: OSError) -> DLRMError:
    return type(folder_error(output, error))(f"--output {output}: {error.strerror}: give another file")
