"""From what is known of a run to its page."""

from __future__ import annotations

from collections.abc import Iterator

from dlrm_cli.report.durability import restarts, snapshots, utc
from dlrm_cli.report.memory import plan_and_measured, tiers
from dlrm_cli.report.page import Page
from dlrm_cli.report.quality import learning, speed, step_time
from dlrm_cli.report.quantities import count, number, seconds
from dlrm_cli.report.rates import mean_throughput
from dlrm_cli.report.record import Record


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
