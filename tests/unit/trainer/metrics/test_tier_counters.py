"""Compare counters of tables and tiers with a row-by-row simulation and the arithmetic of plans."""

from __future__ import annotations

import multiprocessing
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_api import tiers
from dlrm_api.job import DLRMJob
from dlrm_api.run_report import RankUse
from dlrm_testing.trainer.gangs import small_job
from dlrm_testing.trainer.stacked import ALONE, Shape, make_learner, stacked_plan
from dlrm_trainer.data import Batch, open_reader
from dlrm_trainer.embedding import place
from dlrm_trainer.learner import Learner
from dlrm_trainer.metrics.tiers import READ_ROWS, RankCounters, SharedCounters, rank_use


class SimulatedLru:
    """One table's slots, a row at a time: a batch's rows are all looked for, then all are the newest."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.held: OrderedDict[int, None] = OrderedDict()
        self.seen: set[int] = set()
        self.counts = dict.fromkeys(("lookups", "accesses", "hits", "created_rows", "evicted_rows", "scratch_rows"), 0)

    def batch(self, rows: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(rows))
        found = [row for row in distinct if row in self.held]
        missing = [row for row in distinct if row not in self.held]
        self._count(lookups=len(rows), accesses=len(distinct), hits=len(found))
        self._count(created_rows=len(set(missing) - self.seen))
        self.seen.update(missing)
        for row in found:
            self.held.move_to_end(row)
        for row in missing:
            if len(self.held) < self.slots:
                self.held[row] = None
            elif next(iter(self.held)) not in distinct:
                self.held.popitem(last=False)
                self.held[row] = None
                self._count(evicted_rows=1)
            else:
                self._count(scratch_rows=1)

    def _count(self, **more: int) -> None:
        for name, count in more.items():
            self.counts[name] += count


def trained(learner: Learner, batch: Batch) -> None:
    learner.apply(learner.compute(learner.prepare(learner.send(batch)), batch.lengths.shape[1]), factor=1.0)


def use_of(job: DLRMJob, shape: Shape, learner: Learner) -> RankUse:
    """The report of rank 0 by way of shared memory, as a run makes it."""
    placement = place(job.spec.model, stacked_plan(job, shape), 1)
    learner.embeddings.settle()
    return rank_use(placement, job.spec.training.row_optimizer, counters_of(job, shape, learner))


def counters_of(job: DLRMJob, shape: Shape, learner: Learner) -> RankCounters:
    """The counters of rank 0, copied to shared memory."""
    plan = stacked_plan(job, shape)
    counters = RankCounters(place(job.spec.model, plan, 1), 0, SharedCounters(plan, [0]).blocks[0])
    counters.copy_from(learner.embeddings.tables)
    return counters


@pytest.mark.parametrize("slots", [5, 40, 150])
def test_counts_are_those_of_an_lru_cache_simulated_row_by_row(tmp_path: Path, slots: int) -> None:
    job, shape = small_job(tmp_path), Shape(slots=slots, lookahead=0)
    names = [table.name for table in job.spec.model.all_tables()]
    simulated = {name: SimulatedLru(slots) for name in names}
    learner, reader = make_learner(ALONE, job, shape, tmp_path), open_reader(job.spec, "train", 0, 1)

    for number in range(12):
        batch = reader.read(number)
        trained(learner, batch)
        sizes = batch.lengths.sum(dim=1).tolist()
        for name, rows in zip(names, torch.split(batch.values, sizes), strict=True):
            simulated[name].batch(rows.tolist())

    use, served = use_of(job, shape, learner), counters_of(job, shape, learner).served_by_tier()
    learner.embeddings.close()
    assert {table.table for table in use.tables} == {"users", "bags", "items"}
    for table in use.tables:
        expected = simulated[table.table].counts
        assert {name: getattr(table, name) for name in expected} == expected
    assert use.missing_lookups == 0
    evicted = sum(table.evicted_rows + table.scratch_rows for table in use.tables)
    created = sum(table.created_rows for table in use.tables)
    missed = sum(table.accesses - table.hits for table in use.tables)
    assert sum(level.written_rows for level in use.levels) == evicted
    assert sum(level.read_rows for level in use.levels) == missed - created
    assert served.sum() == sum(table.accesses for table in use.tables) - created


def one_table(folder: Path, rows: int) -> DLRMJob:
    model: dict[str, Any] = {"tables": [{"name": "t", "rows": rows, "dim": 64}], "bottomMlp": [64]}
    return small_job(folder, model=model, data={"globalBatchSize": 1_000})


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["ddr", "scm", "block"])
def test_bytes_kept_are_those_of_rows_in_use_by_the_arithmetic_of_plans(tmp_path: Path, tier: str) -> None:
    rows, slots = 100_000, 10_000
    job, shape = one_table(tmp_path, rows), Shape(tiers=("ddr", tier), slots=slots, lookahead=0)
    learner = make_learner(ALONE, job, shape, tmp_path)

    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for number, ids in enumerate(torch.split(order, 1_000)):
        ones = torch.ones(1, 1_000, dtype=torch.int32)
        dense, labels = torch.zeros(1_000, 2), torch.zeros(1_000)
        trained(learner, Batch(number=number, sample_ids=ids, dense=dense, labels=labels, lengths=ones, values=ids))

    use = use_of(job, shape, learner)
    learner.embeddings.close()
    row = (64, "fp32", "rowwise-adagrad")
    taken = Counter[str](ddr=slots * tiers.slot_bytes(*row) + rows * tiers.map_entry_bytes(rows))
    if tier == "block":  # a log: it fills its file before it is cleaned
        taken["block"] = int(rows * tiers.BLOCK_SLACK * tiers.block_place_bytes(*row))
    else:  # a file is allocated ahead, up to all rows
        taken[tier] += (rows if tier == "scm" else rows - slots) * tiers.record_bytes(*row)
    kept = {each.tier: each.kept_bytes for each in use.tiers}
    beside = kept["ddr"] - taken["ddr"]  # what is known of places below the slots
    assert 0 <= beside <= tiers.places_meta_bytes(tier, rows, last=True)
    assert kept[tier] == pytest.approx(taken[tier] + (beside if tier == "ddr" else 0), rel=0.05)
    assert all(each.kept_bytes <= each.planned_bytes + 4_096 for each in use.tiers)  # and a page begun
    assert use.levels[0].written_rows == rows - slots
    if tier == "block":
        assert use.levels[0].device_writes > 0


def test_a_forked_rank_s_counters_are_seen_by_its_pod(tmp_path: Path) -> None:
    plan = stacked_plan(small_job(tmp_path, 2), Shape(tiers=("ddr", "ddr", "scm")))
    shared = SharedCounters(plan, range(2))
    placement = place(small_job(tmp_path, 2).spec.model, plan, 2)

    def count() -> None:
        RankCounters(placement, 1, shared.blocks[1]).groups[0].levels[1, READ_ROWS] = 7

    process = multiprocessing.get_context("fork").Process(target=count)
    process.start()
    process.join()

    seen = RankCounters(placement, 1, shared.blocks[1])
    assert process.exitcode == 0
    assert seen.groups[0].levels[:, READ_ROWS].tolist() == [0, 7]
    assert not shared.blocks[0].any()
