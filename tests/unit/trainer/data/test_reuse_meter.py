"""Test traces of data sets' columns, real ones included."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.model import TableSpec
from dlrm_api.trace import TableTrace, Trace, parse_trace
from dlrm_cli.trace import ReuseMeter, cache_sizes, reuse_histogram, tracked_shares
from dlrm_testing.trainer import unique_runs
from dlrm_testing.trainer.reference import slice_of
from dlrm_testing.trainer.unique_tables import Replay, Shape
from dlrm_trainer.data import open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import place
from dlrm_trainer.embedding.rows_of_ids import RowsOfIds
from dlrm_trainer.embedding.unique import UniquePolicy
from dlrm_trainer.metrics.tiers import tier_report


def traced(spec: Any, batches: int | None = None, rate: float | None = None) -> tuple[Trace, list[list[list[int]]]]:
    """The trace, and each table's lookups batch by batch."""
    reader = open_reader(spec, "train", 0, 1)
    meter = ReuseMeter(spec, rate)
    lookups: list[list[list[int]]] = [[] for _ in meter.tables]
    for batch in reader.iterate(0, batches or reader.batches_per_epoch):
        meter.add(batch)
        ends = np.cumsum(batch.lengths.sum(dim=1).numpy())
        for table, values in zip(lookups, np.split(batch.values.numpy(), ends[:-1]), strict=True):
            table.append(values.tolist())
    reader.close()
    return meter.trace("test"), lookups


def simulated(batches: Sequence[Sequence[int]], size: int) -> float:
    cache: list[int] = []
    hits = accesses = 0
    for batch in batches:
        rows = sorted(set(batch))
        hits, accesses = hits + len(set(rows) & set(cache)), accesses + len(rows)
        cache = ([row for row in cache if row not in rows] + rows)[-size:]
    return hits / accesses


def check_exact(table: TableTrace, batches: Sequence[Sequence[int]], points: int) -> None:
    counts = Counter(row for batch in batches for row in batch)
    assert table.sample_rate == 1
    assert table.lookups == counts.total()
    assert table.unique_rows == len(counts)
    assert table.accesses == sum(len(set(batch)) for batch in batches)
    assert sum(each.rows for each in table.histogram) == len(counts)
    assert sum(each.lookups for each in table.histogram) == counts.total()
    assert table.curve[-1].hit_rate == pytest.approx(1 - len(counts) / table.accesses, abs=1e-5)
    for point in table.curve[:: -(-len(table.curve) // points)]:
        assert point.hit_rate == pytest.approx(simulated(batches, point.cache_rows), abs=1e-5)


def test_bags_and_tables_are_told_apart(make_spec: Any, write_parquet: Any) -> None:
    uri = write_parquet({
        "label": [0, 1, 0, 1],
        "a": [[5, 5, 5], [], [6], [5]],
        "b": [[1], [2], [1], [3]],
    })  # fmt: skip
    tables = [{"name": name, "rows": 10, "dim": 4, "maxLookups": 3} for name in "ab"]
    data = {"format": "parquet", "train": {"uris": [uri]}, "globalBatchSize": 2, "virtualShards": 1}

    trace, _ = traced(make_spec({**data, "shuffle": {"windowRows": 0}}, tables, dense=[]))

    first, second = trace.tables
    assert (trace.batches, trace.global_batch_size, trace.job) == (2, 2, "test")
    assert (first.lookups, first.unique_rows, first.accesses) == (5, 2, 3)
    assert [(each.most, each.rows, each.lookups) for each in first.histogram] == [(1, 1, 1), (2, 0, 0), (None, 1, 4)]
    assert [(point.cache_rows, point.hit_rate) for point in first.curve] == [(1, 0.333333), (2, 0.333333)]
    assert (second.lookups, second.unique_rows, second.accesses) == (4, 3, 4)
    assert parse_trace(trace.model_dump_json()) == trace
    assert parse_trace(json.dumps(json.loads(trace.model_dump_json(by_alias=False)))) == trace


def test_epochs_follow_each_other(make_spec: Any) -> None:
    data = {"format": "synthetic", "synthetic": {"samples": 1_000}, "globalBatchSize": 128, "virtualShards": 8}
    spec = make_spec(data, [{"name": "t", "rows": 500, "dim": 4, "maxLookups": 4, "avgLookups": 2}])

    trace, lookups = traced(spec, batches=20)

    assert trace.batches == 20
    check_exact(trace.tables[0], lookups[0], points=6)


def test_only_tables_with_many_rows_in_use_are_sampled(make_spec: Any) -> None:
    data = {"format": "synthetic", "synthetic": {"samples": 200_000, "alpha": 0.8}, "globalBatchSize": 4_096}
    tables = [{"name": name, "rows": rows, "dim": 4} for name, rows in (("small", 16_000), ("large", 1_000_000))]

    sampled, _ = traced(make_spec(data, tables), rate=0.07)
    exact, _ = traced(make_spec(data, tables))

    small, large = sampled.tables
    assert small == exact.tables[0]
    assert large.sample_rate == 1 / 16
    assert large.accesses == exact.tables[1].accesses
    assert large.unique_rows == pytest.approx(exact.tables[1].unique_rows, rel=0.02)
    assert sum(each.lookups for each in large.histogram) == large.lookups == 200_000
    assert sum(each.rows for each in large.histogram) == large.unique_rows
    for found, expected in zip(large.histogram[:4], exact.tables[1].histogram[:4], strict=True):
        assert found.most == expected.most
        assert found.rows == pytest.approx(expected.rows, rel=0.1)


def test_criteo_columns_reuse_rows_as_a_simulated_cache_finds(make_spec: Any, shared_data: Path) -> None:
    data = {
        "format": "criteo-tsv",
        "train": {"uris": [str(shared_data / "criteo-1k.tsv")]},
        "globalBatchSize": 64,
        "virtualShards": 4,
    }

    trace, lookups = traced(make_spec(data))

    assert [table.table for table in trace.tables] == [f"C{number}" for number in range(1, 27)]
    assert trace.tables[8].unique_rows == 2
    for table, batches in zip(trace.tables, lookups, strict=True):
        check_exact(table, batches, points=4)


def test_movielens_users_rate_in_bursts_that_shuffling_scatters(
    make_spec: Any, write_parquet: Any, shared_data: Path
) -> None:
    ratings = np.loadtxt(shared_data / "ml-100k" / "u.data", delimiter="|", skiprows=1, dtype=np.int64)
    ratings = ratings[np.argsort(ratings[:, 3], kind="stable")][:20_000]
    columns = {"label": ratings[:, 2] >= 4, "user": ratings[:, 0] - 1, "item": ratings[:, 1] - 1}
    uri = write_parquet({name: values.astype(np.int64) for name, values in columns.items()}, row_group_size=5_000)
    tables = [{"name": "user", "rows": 943, "dim": 4}, {"name": "item", "rows": 1_682, "dim": 4}]
    data = {"format": "parquet", "train": {"uris": [uri]}, "globalBatchSize": 250, "virtualShards": 1}

    in_time, lookups = traced(make_spec({**data, "shuffle": {"windowRows": 0}}, tables, dense=[]))
    shuffled, _ = traced(make_spec(data, tables, dense=[]))

    for table, batches in zip(in_time.tables, lookups, strict=True):
        check_exact(table, batches, points=4)
    assert in_time.tables[0].unique_rows == shuffled.tables[0].unique_rows
    assert in_time.tables[0].accesses < shuffled.tables[0].accesses / 5


@pytest.mark.parametrize("rated", [False, True])
def test_ids_of_unique_tables_have_the_rows_that_training_gives_them(
    make_spec: Any, tmp_path: Path, rated: bool
) -> None:
    options = unique_runs.RunOptions(1, ("ddr", "scm"), tmp_path, rated=rated)
    model = unique_runs.model(rated=rated).model_copy(update={"maintenance_steps": unique_runs.PERIOD})
    spec = make_spec({"format": "synthetic", "globalBatchSize": unique_runs.SAMPLES, "virtualShards": 1})
    training = spec.training.model_copy(update={"seed": unique_runs.SEED})
    meter = ReuseMeter(spec.model_copy(update={"model": model, "training": training}))
    placement = place(model, unique_runs.plan(model, 1, options), 1)

    for number in range(unique_runs.STEPS):
        meter.add(slice_of(model, unique_runs.batch(number), [0, unique_runs.SAMPLES], 0))
    run = unique_runs.train_unique(Collectives(0, 1, lambda: ""), options)

    traced = {table.table: table for table in meter.trace("test").tables}
    (used,) = tier_report(placement, unique_runs.OPTIMIZER, [run.counters]).ranks
    # Gradients decide which rows of "split" stay if it is rated.
    for use in (use for use in used.tables if not (rated and use.table == "split")):
        table = traced[use.table]
        assert table.accesses == use.accesses
        assert table.unique_rows == use.created_rows
        assert sum(each.rows for each in table.histogram) == use.created_rows
        assert sum(each.lookups for each in table.histogram) == use.lookups < table.lookups or use.table == "fixed"
    for use in (use for use in used.tables if use.table in unique_runs.ROWS):
        assert use.rows < traced[use.table].unique_rows
        assert max(point.cache_rows for point in traced[use.table].curve) == use.rows


@pytest.mark.parametrize(
    "options",
    [{}, {"admission": {"count": 2}}, {"eviction": {"keep": "frequent"}}],
    ids=["recent", "count", "frequent"],
)
def test_adapted_maintenance_is_that_of_a_replay(make_spec: Any, options: dict[str, Any]) -> None:
    embedding = {"hash": "unique", "buckets": unique_runs.BUCKETS, **options}
    table = TableSpec.model_validate({"name": "t", "rows": 400, "dim": 4, "embedding": embedding})
    follower = RowsOfIds(
        make_spec({"format": "synthetic", "globalBatchSize": unique_runs.SAMPLES, "virtualShards": 1}), [table]
    )
    replay = Replay(
        Shape(unique_runs.BUCKETS, 100, unique_runs.WIDTH, None, UniquePolicy.of(table, unique_runs.SAMPLES))
    )
    random, rows, periods = np.random.default_rng(1), set[int](), set()
    pool = random.integers(0, 2**63 - 1, 3_000)

    for step in range(1, 150):
        # Calm at first, then many new ids in each batch.
        spread = 0.2 if step < 100 else 0.01
        keys = pool[np.minimum(random.geometric(spread, 150) + step * 8, len(pool) - 1)]
        rows |= set(follower.look_up(step, [keys], np.array([len(keys)]))[0].tolist())
        rows -= set(follower.maintain(step)[0].tolist())
        replay.train(keys.tolist())
        periods.add(replay.period.steps)
        assert len(rows) == len(replay.rows)

    assert len(periods) > 2


def test_a_read_off_hit_rate_lies_between_its_points() -> None:
    table = TableTrace.model_validate({
        "table": "t", "rows": 100, "lookups": 9, "uniqueRows": 40, "accesses": 9,
        "curve": [{"cacheRows": 10, "hitRate": 0.2}, {"cacheRows": 40, "hitRate": 0.5}],
    })  # fmt: skip

    rates = [table.hit_rate(size) for size in (0, 5, 10, 25, 40, 100)]

    assert rates == pytest.approx([0, 0.1, 0.2, 0.35, 0.5, 0.5])


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=200), st.sampled_from([1.0, 2.5, 32.0]))
def test_a_histogram_holds_every_lookup_and_no_row_without_one(row_lookups: list[int], weight: float) -> None:
    lookups = round(sum(row_lookups) * weight * (1 if weight == 1 else 1.1)) + 1_000 * (weight > 1)

    bins = reuse_histogram(np.array(row_lookups), np.full(len(row_lookups), weight), lookups)

    assert sum(each.lookups for each in bins) == lookups
    assert sum(each.rows for each in bins) == round(len(row_lookups) * weight)
    assert all(each.lookups >= each.rows for each in bins)
    assert [each.most for each in bins] == [*(1 << number for number in range(len(bins) - 1)), None]
    if weight == 1:
        edges = [0, *(each.most or max(row_lookups) for each in bins)]
        assert [each.rows for each in bins] == np.histogram(np.array(row_lookups) - 0.5, edges)[0].tolist()


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=50), st.integers(50, 10**8))
def test_small_tables_are_followed_whole_and_large_ones_share_the_rest(rows: list[int], total: int) -> None:
    shares = tracked_shares(rows, total)

    short = [share for share, size in zip(shares, rows, strict=True) if share < size]
    assert all(0 < share <= size for share, size in zip(shares, rows, strict=True))
    assert sum(shares) <= total
    assert not short or (max(short) - min(short) <= 1 and max(shares) == max(short))


@given(st.integers(1, 2**40), st.integers(0, 2**33))
def test_a_curve_has_about_64_sizes_from_one_to_the_unique_rows(rows: int, unique: int) -> None:
    sizes = cache_sizes(rows, min(rows, unique)).tolist()

    assert sizes == sorted(set(sizes))
    assert len(sizes) <= 64
    assert (sizes[0], sizes[-1]) == (1, min(rows, unique)) if unique else sizes == []
