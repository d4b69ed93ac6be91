"""Show how full unique tables are and what happens to their rows, for Prometheus and the run report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api.keys import SLOT_BYTES
from dlrm_api.run_report import UniqueUse
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.metrics.tiers import (
    ADMITTED,
    DECLINED,
    EXPIRED,
    FULLEST,
    IN_USE,
    LEFT,
    MAX_TABLE_SERIES,
    READMITTED,
    UNIQUE_LOOKUPS,
    WITHOUT_ROW,
    RankCounters,
    Words,
)

UNIQUE = "dlrm_trainer_unique_"
"""Beginning of the metrics' names."""
FULL = "full"
"""Why a lookup finds no row or a row is evicted: its bucket is full."""
COUNTS: tuple[tuple[str, Mapping[str, str], str], ...] = (
    ("lookups", {"": "lookups"}, "Lookups of unique tables, duplicates included."),
    (
        "lookups_without_row",
        {FULL: "lookups_without_row", "admission": "lookups_declined"},
        "Lookups of ids that got no row. Reason full: all rows of their bucket were taken; admission: "
        "admission.count or probability.",
    ),
    ("admitted_rows", {"": "admitted_rows"}, "Rows given to ids that had none."),
    (
        "readmitted_rows",
        {"": "readmitted_rows"},
        "Rows given to ids that a full bucket lost within the last one to two half-lives of eviction.halfLifeSamples, "
        "or of its default. Ids are remembered approximately: up to 5 % of all others count too.",
    ),
    (
        "evicted_rows",
        {FULL: "evicted_rows", "age": "expired_rows"},
        "Rows taken from ids in a maintenance. Reason full: their bucket was nearly full; age: eviction.maxAgeSamples.",
    ),
)
"""Name of each counter of a table, its field by reason, and its description."""
GAUGES: tuple[tuple[str, str], ...] = (
    ("rows", "Rows in use, those of batches in flight included."),
    ("capacity_rows", "Most rows at a time: rows of the spec, rounded up to whole buckets."),
    ("fullest_bucket_ratio", "Share of its rows that the fullest bucket uses."),
    ("directory_bytes", "Bytes of the directory from ids to rows, in host memory."),
)
"""Name and description of each gauge of a table."""
SUMS = tuple(name for name in UniqueUse.model_fields if name not in ("table", "fullest_bucket_ratio"))
_PER_TABLE = f"Joined by class of tables (class:0, ...) if a pod has more than {MAX_TABLE_SERIES} unique tables."


class UniqueMetrics(Collector):
    """Collect the metrics of all ranks of a pod; there are none without unique tables."""

    def __init__(self, placement: Placement, ranks: Sequence[RankCounters]) -> None:
        self._placement = placement
        self._ranks = [each for each in ranks if each.unique]
        self._by_class = sum(len(group.tables) for rank in self._ranks for group in rank.unique) > MAX_TABLE_SERIES

    @staticmethod
    def describe() -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Return every metric without its values."""
        of_table = ["rank", "table"]
        return [
            *(
                CounterMetricFamily(
                    UNIQUE + name, f"{text} {_PER_TABLE}", labels=of_table + ["reason"] * ("" not in fields)
                )
                for name, fields, text in COUNTS
            ),
            *(GaugeMetricFamily(UNIQUE + name, f"{text} {_PER_TABLE}", labels=of_table) for name, text in GAUGES),
        ]

    def collect(self) -> Iterable[Metric]:
        """Return every metric once."""
        families = {each.name: each for each in self.describe()} if self._ranks else {}
        for rank in self._ranks:
            for use in _joined(_uses(self._placement, rank, by_class=self._by_class)):
                labels = [str(rank.rank), use.table]
                for name, fields, _ in COUNTS:
                    for reason, field in fields.items():
                        families[UNIQUE + name].add_metric(labels + [reason] * bool(reason), getattr(use, field))
                for name, _ in GAUGES:
                    families[UNIQUE + name].add_metric(labels, getattr(use, name))
        return families.values()


def unique_report(placement: Placement, blocks: Iterable[Words]) -> list[UniqueUse]:
    """Return the report on each unique table of a run from the ``blocks`` of every rank, in order."""
    ranks = (RankCounters(placement, rank, block) for rank, block in enumerate(blocks))
    return _joined(use for rank in ranks for use in _uses(placement, rank, by_class=False))


def _uses(placement: Placement, rank: RankCounters, *, by_class: bool) -> Iterator[UniqueUse]:
    """Yield the use of each part of a rank, under the name of its table or class."""
    for number, group in enumerate(rank.unique):
        for part, counts in zip(group.group.parts, group.tables.tolist(), strict=True):
            assert part.buckets is not None
            yield UniqueUse(
                table=f"class:{number}" if by_class else placement.tables[part.table].name,
                rows=counts[IN_USE],
                capacity_rows=part.buckets.rows,
                fullest_bucket_ratio=counts[FULLEST] / part.buckets.of.quota,
                directory_bytes=part.buckets.count * part.buckets.of.slots * SLOT_BYTES,
                lookups=counts[UNIQUE_LOOKUPS],
                lookups_without_row=counts[WITHOUT_ROW],
                lookups_declined=counts[DECLINED],
                admitted_rows=counts[ADMITTED],
                readmitted_rows=counts[READMITTED],
                evicted_rows=counts[LEFT],
                expired_rows=counts[EXPIRED],
            )


def _joined(uses: Iterable[UniqueUse]) -> list[UniqueUse]:
    """Join the uses of each name: sums, and the ratio of the fullest bucket of all."""
    by_name: dict[str, list[UniqueUse]] = defaultdict(list)
    for use in uses:
        by_name[use.table].append(use)
    return [
        UniqueUse(
            table=name,
            fullest_bucket_ratio=max(part.fullest_bucket_ratio for part in parts),
            **{field: sum(getattr(part, field) for part in parts) for field in SUMS},
        )
        for name, parts in by_name.items()
    ]
