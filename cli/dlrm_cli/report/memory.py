"""Sections on where rows lived: hit rates and traffic of tiers, and the plan beside what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from dlrm_api.run_report import TableUse
from dlrm_cli.report.page import Column, Level, Plot, Section, Series, Table
from dlrm_cli.report.quantities import UNKNOWN, count, seconds, share, size
from dlrm_cli.report.rates import between, last_of_attempts, mean_throughput
from dlrm_cli.report.record import Record

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
