"""Sections on what was learned and how fast: loss, quality, throughput, time of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dlrm_api.run_report import Profile, StageTimes
from dlrm_cli.report.page import Column, Level, Mark, Plot, Section, Series, Table
from dlrm_cli.report.quantities import UNKNOWN, count, number, share
from dlrm_cli.report.rates import Between, between, counted_from, last_of_attempts, mean_throughput, throughput
from dlrm_cli.report.record import Record

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
        for stage, seconds in look.stages.items():
            spent[stage] += seconds / max(1, look.ranks)
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
