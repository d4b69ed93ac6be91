"""Tables that people read: a plan, a result, a list of snapshots."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dlrm_api import tiers
from dlrm_api.job import DLRMJob
from dlrm_api.model import TableSpec
from dlrm_api.plan import Device, Plan, Prediction, Shard, TablePlan
from dlrm_api.progress import SnapshotInfo
from dlrm_cli.measured import tiers_view
from dlrm_cli.result import RunResult
from dlrm_cli.sizes import human_bytes
from dlrm_cli.terminal import SafeConsole

if TYPE_CHECKING:
    from dlrm_checkpointer.reading.diff import TableDiff

MOST_TABLES = 60
"""Tables of a plan that are shown one by one."""
MOST_SHARDS = 8
"""Shards of a table that are shown one by one."""
WIDTH_OFF_TERMINAL = 200


def print_view(view: RenderableType, *, stderr: bool = False) -> None:
    """Print on stdout, or stderr; wide where nobody sees it, so that URIs and digests stay whole.

    On a narrow terminal whatever has no room in its column goes on in the next line, figures too: none is cut.
    """
    console = SafeConsole(stderr=stderr)
    if not console.is_terminal:
        console = SafeConsole(stderr=stderr, width=WIDTH_OFF_TERMINAL)
    for table in _tables(view):
        for column in table.columns:
            column.overflow = "fold"
    console.print(view)


def _tables(view: RenderableType) -> Iterator[Table]:
    if isinstance(view, Table):
        yield view
    elif isinstance(view, Group):
        for part in view.renderables:
            yield from _tables(part)


def plan_view(job: DLRMJob, plan: Plan) -> RenderableType:
    """A plan: its ranks, its largest tables, its reasons."""
    ranks = Table(title=f"{job.metadata.name}: {plan.world_size} ranks on {plan.nodes} pods", title_justify="left")
    ranks.add_column("rank", justify="right")
    ranks.add_column("pod", justify="right")
    ranks.add_column("tables", justify="right")
    used = sorted({tier for rank in plan.ranks for tier in rank.bytes_per_tier})
    for tier in used:
        ranks.add_column(f"{tier} bytes", justify="right")
    held = Counter(rank for table in plan.tables for rank in _homes(table, plan.world_size))
    for rank in plan.ranks:
        ranks.add_row(
            str(rank.rank),
            str(rank.node),
            str(held[rank.rank]),
            *(f"{rank.bytes_per_tier.get(tier, 0):,}" for tier in used),
        )
    tables = Table(title="tables", title_justify="left")
    for name, justify in (
        ("table", "left"),
        ("rows", "right"),
        ("dim", "right"),
        ("sharding", "left"),
        ("ranks", "left"),
        ("where its rows live", "left"),
    ):
        tables.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    sizes = {table.name: table for table in job.spec.model.all_tables()}
    largest = sorted(plan.tables, key=lambda table: (-sizes[table.name].rows * sizes[table.name].dim, table.name))
    for table in largest[:MOST_TABLES]:
        spec = sizes[table.name]
        tables.add_row(
            table.name,
            f"{spec.rows:,}",
            str(spec.dim),
            table.shards[0].kind,
            _ranks(table, plan.world_size),
            "\n".join(_levels(job, plan.device, spec, table.shards)),
        )
    if len(largest) > MOST_TABLES:
        tables.add_row(f"and {len(largest) - MOST_TABLES} smaller ones", "", "", "", "", "-o json shows all")
    expected = [Text(words) for words in (_prediction(plan.predicted),) if words]
    return Group(ranks, tables, *expected, *(Text(f"- {reason}") for reason in plan.reasons))


def _prediction(predicted: Prediction) -> str:
    """What the plan expects of speed and price; empty where the profile's rates do not tell."""
    if predicted.samples_per_second is None:
        return ""
    price = predicted.price_per_billion_samples
    priced = "" if price is None else f", a billion samples for {price:,.2f} (in the currency of pricePerHour)"
    return f"predicted: {predicted.samples_per_second:,.0f} samples/s{priced}"


def result_view(result: RunResult) -> RenderableType:
    """What a run came to."""
    table = Table(show_header=False, title="result", title_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows: list[tuple[str, str]] = [
        ("steps", f"{result.step:,}"),
        ("samples", f"{result.samples:,}"),
        ("world size", str(result.world_size)),
        ("training loss", _number(result.train_loss)),
    ]
    if result.eval is not None:
        rows += [
            ("eval log loss", _number(result.eval.log_loss)),
            ("eval NE", _number(result.eval.ne)),
            ("eval AUC", _number(result.eval.auc)),
            ("eval calibration", _number(result.eval.calibration)),
        ]
    rows += [
        ("samples/s", "-" if result.samples_per_s is None else f"{result.samples_per_s:,.0f}"),
        ("restarts", str(result.restarts)),
    ]
    if result.state_digest is not None:
        rows.append(("state digest", result.state_digest))
    for name, value in rows:
        table.add_row(name, value)
    tiers = [] if result.tiers is None else [tiers_view(result.tiers)]
    return Group(table, *tiers, snapshots_view(result.snapshots))


def snapshots_view(snapshots: Sequence[SnapshotInfo]) -> RenderableType:
    """Committed snapshots, oldest first."""
    if not snapshots:
        return Text("no snapshot is committed")
    table = Table(title="snapshots", title_justify="left")
    for name in ("step", "kind", "bits", "bytes"):
        table.add_column(name, justify="right")
    table.add_column("manifest", overflow="fold")
    for snapshot in snapshots:
        table.add_row(
            f"{snapshot.step:,}", snapshot.kind, str(snapshot.bits), f"{snapshot.bytes:,}", Text(snapshot.uri)
        )
    return table


def diff_view(tables: Sequence[TableDiff]) -> RenderableType:
    """How the tables of two snapshots differ."""
    view = Table(title="rows that differ", title_justify="left")
    view.add_column("table", overflow="fold")
    for name in ("changed", "new", "gone", "norm of change", "largest change", "norm before", "norm after"):
        view.add_column(name, justify="right")
    for each in tables:
        counts = (f"{count:,}" for count in (each.changed, each.new, each.gone))
        norms = (each.change_norm, each.largest_change, each.norm_before, each.norm_after)
        view.add_row(Text(each.table), *counts, *(f"{norm:.6g}" for norm in norms))
    return view


def _levels(job: DLRMJob, device: Device, table: TableSpec, shards: Sequence[Shard]) -> Iterator[str]:
    """A line for each tier: rows and bytes of all shards, and the share of accesses that it and those above serve."""
    home = "hbm" if device == "cuda" and shards[0].kind == "data" else "ddr"
    rows, sizes, served, weights = Counter[str](), Counter[str](), dict[str, float | None](), Counter[str]()
    for shard in shards[:1] if shards[0].kind == "data" else shards:
        width = shard.column_end - shard.column_start
        blocks = width // (table.column_block or table.dim)
        row = (width // blocks, table.dtype, job.spec.training.row_optimizer.kind)
        count = shard.row_end - shard.row_start
        if not shard.tiers.is_stack:
            tier = shard.tiers.levels[0].tier if shard.tiers.levels else home
            rows[tier] += count
            sizes[tier] += count * blocks * tiers.row_bytes(*row)
            continue
        for number, level in enumerate(shard.tiers.levels):
            size: float = tiers.slot_bytes(*row) if number == 0 else tiers.record_bytes(*row)
            if level.tier == "hbm":
                size = tiers.row_bytes(*row)  # what is known of a slot lies in ddr
            if level.tier == "block":
                size = tiers.BLOCK_SLACK * tiers.block_place_bytes(*row)
            rows[level.tier] += level.rows
            sizes[level.tier] += math.ceil(level.rows * blocks * size)
            weights[level.tier] += count
            before, rate = served.get(level.tier, 0.0), level.expected_hit_rate
            served[level.tier] = None if before is None or rate is None else before + count * rate
    if not weights:
        yield from (f"{tier}: all, {human_bytes(size)}" for tier, size in sizes.items())
        return
    for number, (tier, count) in enumerate(rows.items()):
        kept = f" ({shards[0].tiers.policy})" if number == 0 else ""
        hits = served.get(tier)
        rate_shown = "" if hits is None else f", hit rate {hits / weights[tier]:.1%}"
        yield f"{tier}{kept}: {count:,} rows, {human_bytes(sizes[tier])}{rate_shown}"


def _homes(table: TablePlan, world_size: int) -> Iterable[int]:
    """Ranks that hold a part of a table."""
    return range(world_size) if table.shards[0].kind == "data" else {shard.rank for shard in table.shards}


def _ranks(table: TablePlan, world_size: int) -> str:
    """The ranks of a table's shards; what each holds of a table that is split over a few."""
    shards = table.shards
    if shards[0].kind == "data":
        return "all"
    if len(shards) == 1:
        return str(shards[0].rank)
    if len(shards) > MOST_SHARDS:
        return f"{len(shards)} of {world_size}: {', '.join(str(shard.rank) for shard in shards[:MOST_SHARDS])}, ..."
    return "\n".join(f"{shard.rank}: {_part(shard)}" for shard in shards)


def _part(shard: Shard) -> str:
    if shard.kind == "column":
        return f"columns {shard.column_start} to {shard.column_end - 1}"
    return f"rows {shard.row_start:,} to {shard.row_end - 1:,}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.5f}"
