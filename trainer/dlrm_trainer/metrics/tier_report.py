"""What a rank's counters say of its tables and tiers, beside what the plan says. Functions from data to data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from dlrm_api import tiers
from dlrm_api.run_report import LevelUse, RankUse, TableUse, TierBytes, TierReport
from dlrm_api.tiers import Tier
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.embedding.placement import Part, Placement
from dlrm_trainer.metrics.tier_counters import (
    KEPT,
    LEVEL_COUNTS,
    MISSING,
    TABLE_COUNTS,
    TIERS,
    WAIT_NS,
    GroupCounters,
    RankCounters,
    Words,
)


def tier_report(placement: Placement, optimizer: RowOptimizerSpec, blocks: Iterable[Words]) -> TierReport:
    """The report of a run.

    Args:
        placement: of the job's tables.
        optimizer: of their rows.
        blocks: counters of every rank, in order.
    """
    ranks = (RankCounters(placement, rank, block) for rank, block in enumerate(blocks))
    return TierReport(ranks=tuple(rank_use(placement, optimizer, each) for each in ranks if each.groups))


def rank_use(placement: Placement, optimizer: RowOptimizerSpec, counters: RankCounters) -> RankUse:
    """What one rank counted."""
    kept = dict(zip(TIERS, counters.head[KEPT:].tolist(), strict=True))
    planned = planned_bytes(optimizer, counters)
    return RankUse(
        rank=counters.rank,
        prefetch_wait_seconds=int(counters.head[WAIT_NS]) / 1e9,
        missing_lookups=int(counters.head[MISSING]),
        tables=tuple(use for each in counters.groups for use in _tables(placement, each)),
        levels=tuple(use for number, each in enumerate(counters.groups) for use in _levels(number, each)),
        tiers=tuple(
            TierBytes(tier=tier, kept_bytes=kept[tier], planned_bytes=planned[tier])
            for tier in TIERS
            if kept[tier] or planned[tier]
        ),
    )


def planned_bytes(optimizer: RowOptimizerSpec, counters: RankCounters) -> Counter[Tier]:
    """Bytes of a rank's stacks by tier when every level is full, by the arithmetic that plans budget with."""
    planned: Counter[Tier] = Counter()
    for each in counters.groups:
        for part in each.group.parts:
            planned.update(stack_bytes(part, each.group.dtype, optimizer))
    return planned


def stack_bytes(part: Part, dtype: tiers.RowDtype, optimizer: RowOptimizerSpec) -> Counter[Tier]:
    """Bytes of one part with levels, by tier."""
    row = (part.width, dtype, optimizer.kind)
    first, *below = part.share.levels
    slots = min(first.rows, part.rows)
    planned: Counter[Tier] = Counter({first.tier: slots * tiers.row_bytes(*row)})
    planned["ddr"] += slots * tiers.SLOT_META_BYTES + part.rows * tiers.map_entry_bytes(part.rows)
    for level in below:
        if level.tier == "block":
            planned["block"] += math.ceil(math.ceil(level.rows * tiers.BLOCK_SLACK) * tiers.block_place_bytes(*row))
        else:
            planned[level.tier] += level.rows * tiers.record_bytes(*row)
        planned["ddr"] += tiers.places_meta_bytes(level.tier, level.rows, last=level is below[-1])
    return planned


def _tables(placement: Placement, counters: GroupCounters) -> Iterable[TableUse]:
    for part, values in zip(counters.group.parts, counters.tables.tolist(), strict=True):
        table, expected = placement.tables[part.table].name, part.share.levels[0].expected_hit_rate
        counts = {name: values[column] for name, column, _ in TABLE_COUNTS}
        yield TableUse(table=table, rows=part.rows, expected_hit_rate=expected, **counts)


def _levels(number: int, counters: GroupCounters) -> Iterable[LevelUse]:
    below = counters.group.parts[0].share.levels[1:]
    for depth, (level, values) in enumerate(zip(below, counters.levels.tolist(), strict=True), start=1):
        counts = {name: values[column] for name, column, _ in LEVEL_COUNTS}
        yield LevelUse(group=number, level=depth, tier=level.tier, **counts)
