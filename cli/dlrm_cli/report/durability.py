"""Sections on what was kept and what went wrong: snapshots, restarts and their evidence."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from dlrm_cli.history import Committed
from dlrm_cli.report.page import Column, Plot, Section, Series, Table
from dlrm_cli.report.quantities import UNKNOWN, count, seconds, size
from dlrm_cli.report.rates import stall_s
from dlrm_cli.report.record import Record

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
