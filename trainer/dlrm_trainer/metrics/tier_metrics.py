"""Prometheus metrics of tables and tiers, for all ranks of a pod: read from shared memory when they are scraped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.embedding.tiers.counts import ACCESSES
from dlrm_trainer.metrics.tier_counters import (
    KEPT,
    LEVEL_COUNTS,
    MISSING,
    TABLE_COUNTS,
    TIERS,
    WAIT_NS,
    RankCounters,
    Words,
)
from dlrm_trainer.metrics.tier_report import planned_bytes

MOST_TABLES = 200
"""Tables of a pod that have series of their own; where there are more, those of a class are added up."""
_PER_TABLE = f"Tables are added up by class (class:0, ...) where a pod has more than {MOST_TABLES} with levels."
EXPECTED_HITS = (
    "dlrm_trainer_table_expected_hits",
    f"Hits that the plan expects of so many accesses; absent where it expects nothing. {_PER_TABLE}",
)


class TierMetrics(Collector):
    """All ranks of a pod that have tables with levels; without such a plan there are none of these metrics.

    Args:
        placement: of the job's tables.
        optimizer: of their rows.
        ranks: counters of each rank of the pod.
    """

    def __init__(self, placement: Placement, optimizer: RowOptimizerSpec, ranks: Sequence[RankCounters]) -> None:
        self._names = [table.name for table in placement.tables]
        self._ranks = [each for each in ranks if each.groups]
        self._each = sum(len(group.group.parts) for rank in self._ranks for group in rank.groups) <= MOST_TABLES
        self._planned = {each.rank: planned_bytes(optimizer, each) for each in self._ranks}

    @staticmethod
    def describe() -> list[Metric]:
        """Every metric without its values."""
        return [*_table_families(), _expected_family(), *_level_families(), *_rank_families()]

    def collect(self) -> Iterator[Metric]:
        """Every metric once."""
        if self._ranks:
            yield from self._of_tables()
            yield self._expected()
            yield from self._of_levels()
            yield from self._of_ranks()

    def _of_tables(self) -> Iterable[Metric]:
        families = _table_families()
        for rank in self._ranks:
            for table, counts in self._series(rank).items():
                for family, (_, column, _) in zip(families, TABLE_COUNTS, strict=True):
                    family.add_metric([str(rank.rank), table], counts[column])
        return families

    def _series(self, rank: RankCounters) -> dict[str, Words]:
        """Counts of a rank by table, over all its parts of it; by class where there are too many tables."""
        found: dict[str, Words] = {}
        for number, group in enumerate(rank.groups):
            for part, counts in zip(group.group.parts, group.tables, strict=True):
                name = self._names[part.table] if self._each else f"class:{number}"
                found[name] = found[name] + counts if name in found else counts
        return found

    def _expected(self) -> Metric:
        """Accesses times the hit rate that the plan expects of their part's slots."""
        family = _expected_family()
        for rank in self._ranks:
            found: dict[str, float] = {}
            for number, group in enumerate(rank.groups):
                for part, counts in zip(group.group.parts, group.tables, strict=True):
                    expected = part.share.levels[0].expected_hit_rate
                    if expected is not None:
                        name = self._names[part.table] if self._each else f"class:{number}"
                        found[name] = found.get(name, 0.0) + expected * float(counts[ACCESSES])
            for name, hits in found.items():
                family.add_metric([str(rank.rank), name], hits)
        return family

    def _of_levels(self) -> Iterable[Metric]:
        families = _level_families()
        for rank in self._ranks:
            for tier, counts in _by_tier(rank).items():
                for family, (_, column, _) in zip(families, LEVEL_COUNTS, strict=True):
                    family.add_metric([str(rank.rank), tier], counts[column])
        return families

    def _of_ranks(self) -> Iterator[Metric]:
        kept, planned, waited, missing = _rank_families()
        for rank in self._ranks:
            for tier, size in zip(TIERS, rank.head[KEPT:].tolist(), strict=True):
                if size or self._planned[rank.rank][tier]:
                    kept.add_metric([str(rank.rank), tier], size)
                    planned.add_metric([str(rank.rank), tier], self._planned[rank.rank][tier])
            waited.add_metric([str(rank.rank)], int(rank.head[WAIT_NS]) / 1e9)
            missing.add_metric([str(rank.rank)], int(rank.head[MISSING]))
        yield from (kept, planned, waited, missing)


def _table_families() -> list[CounterMetricFamily]:
    return [
        CounterMetricFamily(f"dlrm_trainer_table_{name}", f"{words} {_PER_TABLE}", labels=["rank", "table"])
        for name, _, words in TABLE_COUNTS
    ]


def _expected_family() -> CounterMetricFamily:
    return CounterMetricFamily(*EXPECTED_HITS, labels=["rank", "table"])


def _level_families() -> list[CounterMetricFamily]:
    return [
        CounterMetricFamily(f"dlrm_trainer_tier_{name}", words, labels=["rank", "tier"])
        for name, _, words in LEVEL_COUNTS
    ]


def _rank_families() -> tuple[GaugeMetricFamily, GaugeMetricFamily, CounterMetricFamily, CounterMetricFamily]:
    """Bytes that are kept, bytes that are planned, time waited for rows, lookups whose row was missing."""
    return (
        GaugeMetricFamily(
            "dlrm_trainer_tier_kept_bytes",
            "Bytes that tables with levels really take: slots ever filled, maps, touched memory, file blocks.",
            labels=["rank", "tier"],
        ),
        GaugeMetricFamily(
            "dlrm_trainer_tier_planned_bytes",
            "Bytes that the plan's rows take in a tier when every level is full.",
            labels=["rank", "tier"],
        ),
        CounterMetricFamily(
            "dlrm_trainer_tier_prefetch_wait_seconds",
            "Time for which lookups waited for rows from slower tiers.",
            labels=["rank"],
        ),
        CounterMetricFamily(
            "dlrm_trainer_tier_missing_lookups",
            "Lookups whose row was in no slot when their batch began; anything but 0 is a bug.",
            labels=["rank"],
        ),
    )


def _by_tier(rank: RankCounters) -> dict[str, list[int]]:
    """Counters of a rank's levels, added up over those in one tier."""
    found: dict[str, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
    for group in rank.groups:
        for level, counts in zip(group.group.parts[0].share.levels[1:], group.levels, strict=True):
            found[level.tier] = found.get(level.tier, np.zeros_like(counts)) + counts
    return {tier: counts.tolist() for tier, counts in found.items()}
