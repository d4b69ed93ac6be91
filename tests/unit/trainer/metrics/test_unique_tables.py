"""Counters of unique tables: those of a run, and as they are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlrm_api.keys import SLOT_BYTES, key_buckets
from dlrm_api.tiers import Tier
from dlrm_testing.trainer.unique_runs import BUCKETS, ROWS, RunOptions, keys_of, model, plan, train_unique
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.metrics import unique_tables
from dlrm_trainer.metrics.tiers import (
    ADMITTED,
    FULLEST,
    IN_USE,
    LEFT,
    UNIQUE_LOOKUPS,
    WITHOUT_ROW,
    RankCounters,
    SharedCounters,
)
from dlrm_trainer.metrics.unique_tables import UniqueMetrics, unique_report

ALONE = Collectives(0, 1, lambda: "")


@pytest.mark.parametrize(("tiers", "rated"), [((), True), (("ddr", "scm"), False)])
def test_counts_of_a_run_add_up(tmp_path: Path, tiers: tuple[Tier, ...], rated: bool) -> None:
    options = RunOptions(1, tiers, tmp_path, rated=rated)
    run = train_unique(ALONE, options)

    uses = {use.table: use for use in unique_report(place(model(), plan(model(), 1, options), 1), [run.counters])}

    assert uses.keys() == ROWS.keys()
    for table, use in uses.items():
        assert use.lookups == sum(len(keys) for features in keys_of(model(), table) for keys in features)
        assert use.rows == len(run.states[-1][table].keys) == use.admitted_rows - use.evicted_rows - use.expired_rows
        assert use.capacity_rows == ROWS[table]
        assert use.evicted_rows + use.expired_rows > 0
        assert use.readmitted_rows <= use.admitted_rows * (use.evicted_rows > 0)
        assert use.fill <= use.fullest_bucket_ratio <= 1
        assert use.directory_bytes == BUCKETS * key_buckets(ROWS[table], BUCKETS).slots * SLOT_BYTES
        assert (use.expired_rows > 0, use.lookups_declined > 0) == (rated and table != "split",) * 2
    assert sum(use.readmitted_rows for use in uses.values()) > 0
    # The period also counts ids that only wait for the next maintenance, where tables admit by count.
    without_row = sum(use.lookups_without_row for use in uses.values())
    assert 0 < without_row < run.without_row if rated else 0 < without_row == run.without_row


def two_ranks() -> UniqueMetrics:
    """Return metrics of two ranks: rank r has 10 + r of all that it counts, and a full bucket."""
    planned = plan(model(), 2, RunOptions())
    placement, shared = place(model(), planned, 2), SharedCounters(planned, range(2))
    ranks = [RankCounters(placement, rank, shared.blocks[rank]) for rank in shared.ranks]
    for rank in ranks:
        for group in rank.unique:
            for part, counts in zip(group.group.parts, group.tables, strict=True):
                counts[[UNIQUE_LOOKUPS, WITHOUT_ROW, ADMITTED, LEFT, IN_USE]] = 10 + rank.rank
                assert part.buckets is not None
                counts[FULLEST] = part.buckets.of.quota
    return UniqueMetrics(placement, ranks)


def test_every_rank_and_table_of_a_pod_has_series() -> None:
    metrics = two_ranks()
    families = list(metrics.collect())
    found = {(each.name, *each.labels.values()): each.value for family in families for each in family.samples}

    assert [family.name for family in families] == [family.name for family in metrics.describe()]
    assert found["dlrm_trainer_unique_lookups_total", "1", "split"] == 11
    assert found["dlrm_trainer_unique_evicted_rows_total", "0", "whole", "full"] == 10
    assert found["dlrm_trainer_unique_capacity_rows", "0", "split"] == ROWS["split"] / 2
    assert found["dlrm_trainer_unique_fullest_bucket_ratio", "1", "split"] == 1
    assert ("dlrm_trainer_unique_rows", "1", "whole") not in found
    assert not any("fixed" in key for key in found)


def test_many_tables_are_joined_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_tables, "MAX_TABLE_SERIES", 1)

    rows = next(family for family in two_ranks().collect() if family.name == "dlrm_trainer_unique_rows")
    found = {tuple(each.labels.values()): each.value for each in rows.samples}

    # Rank 0 has one table of fp16 rows and two of fp32 rows.
    assert found == {("0", "class:0"): 10, ("0", "class:1"): 20, ("1", "class:0"): 11}
