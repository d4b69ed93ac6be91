"""Show how many columns rows of several sizes have and what they take, for Prometheus and the run report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dlrm_api.row_optimizers import STATE_BYTES, state_values
from dlrm_api.run_report import SizesUse
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.embedding.placement import Placement
from dlrm_trainer.metrics.tiers import CUT_OFF, GROWN, OF_CLASS, SHRUNK, RankCounters, Words

SIZED = "dlrm_trainer_sized_"
"""Beginning of the metrics' names."""
COUNTS: tuple[tuple[str, str], ...] = (
    ("grown_rows", "Rows that gained columns in a maintenance, by the columns of their table."),
    ("shrunk_rows", "Rows that lost columns in a maintenance, by the columns of their table."),
)
"""Name of each counter, and of its field, and its description; so are the next."""
GAUGES: tuple[tuple[str, str], ...] = (
    ("kept_bytes", "Bytes of rows with embedding.dimension, by the columns of their table: all that is counted."),
    ("full_bytes", "Bytes that these rows would take with all columns; keepBytes is a share of it."),
)
ROWS = "Rows that have so many columns in tables with embedding.dimension of dim columns; others have none."
UTILITY = "Least utility with which rows have the fewest columns; absent before the first maintenance that chose it."


class SizeMetrics(Collector):
    """Collect the metrics of all ranks of a pod; there are none without rows of several sizes."""

    def __init__(self, placement: Placement, optimizer: RowOptimizerSpec, ranks: Sequence[RankCounters]) -> None:
        self._placement, self._optimizer = placement, optimizer
        self._ranks = [each for each in ranks if each.sized]

    @staticmethod
    def describe() -> list[CounterMetricFamily | GaugeMetricFamily]:
        """Return every metric without its values."""
        by_dim = ["rank", "dim"]
        return [
            *(CounterMetricFamily(SIZED + name, text, labels=by_dim) for name, text in COUNTS),
            *(GaugeMetricFamily(SIZED + name, text, labels=by_dim) for name, text in GAUGES),
            GaugeMetricFamily(SIZED + "rows", ROWS, labels=[*by_dim, "columns"]),
            GaugeMetricFamily(SIZED + "cut_off_utility", UTILITY, labels=["rank"]),
        ]

    def collect(self) -> Iterable[Metric]:
        """Return every metric once."""
        families = {each.name: each for each in self.describe()} if self._ranks else {}
        for rank in self._ranks:
            for use in _joined(_uses(self._placement, self._optimizer, rank)):
                labels = [str(rank.rank), str(use.dim)]
                for name, _ in (*COUNTS, *GAUGES):
                    families[SIZED + name].add_metric(labels, getattr(use, name))
                for columns, rows in use.rows.items():
                    families[SIZED + "rows"].add_metric([*labels, str(columns)], rows)
            if utility := float(rank.head[CUT_OFF : CUT_OFF + 1].view(np.float64)[0]):
                families[SIZED + "cut_off_utility"].add_metric([str(rank.rank)], utility)
        return families.values()


def sizes_report(placement: Placement, optimizer: RowOptimizerSpec, blocks: Iterable[Words]) -> list[SizesUse]:
    """Return the report on rows of several sizes of a run from the ``blocks`` of every rank, in order."""
    ranks = (RankCounters(placement, rank, block) for rank, block in enumerate(blocks))
    return _joined(use for rank in ranks for use in _uses(placement, optimizer, rank))


def _uses(placement: Placement, optimizer: RowOptimizerSpec, rank: RankCounters) -> Iterator[SizesUse]:
    """Yield the use of each group of tables of a rank."""
    for group in rank.sized:
        first = group.group.parts[0]
        slabs = placement.tables[first.table].slab_bytes(STATE_BYTES * state_values(optimizer.kind, first.width))
        assert slabs is not None
        rows = sum(part.rows for part in group.group.parts)
        held = dict(zip(group.group.sizes, group.words[OF_CLASS + 1 :].tolist(), strict=False))
        yield SizesUse(
            dim=first.width,
            rows=held,
            kept_bytes=rows * slabs.row + sum(count * slabs.slab_row(columns) for columns, count in held.items()),
            full_bytes=rows * slabs.plain_row,
            grown_rows=int(group.words[GROWN]),
            shrunk_rows=int(group.words[SHRUNK]),
        )


def _joined(uses: Iterable[SizesUse]) -> list[SizesUse]:
    """Add up the uses of each dim."""
    by_dim: dict[int, list[SizesUse]] = defaultdict(list)
    for use in uses:
        by_dim[use.dim].append(use)
    return [
        SizesUse(
            dim=dim,
            rows={
                columns: sum(part.rows.get(columns, 0) for part in parts)
                for columns in sorted({columns for part in parts for columns in part.rows})
            },
            **{name: sum(getattr(part, name) for part in parts) for name, _ in (*COUNTS, *GAUGES)},
        )
        for dim, parts in sorted(by_dim.items())
    ]
