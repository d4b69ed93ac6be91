"""Tables of unique ids: a directory in DDR, and splits at the edges of buckets alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_planner import plan_job
from dlrm_planner.choose import SPLIT_GAIN, read_problem
from dlrm_planner.estimate import read_costs
from dlrm_planner.tables import read_tables
from dlrm_testing.unique_tables import spec_with_unique

MIB = 2**20
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]

tables = st.lists(
    st.fixed_dictionaries(
        {"rows": st.integers(64, 2_000_000), "dim": st.just(32), "maxLookups": st.integers(1, 40)},
        optional={"pin": st.sampled_from([{"sharding": "row"}, {"ranks": [0]}])},
    ),
    min_size=1,
    max_size=5,
)
powers = st.none() | st.integers(1, 6)
gangs = st.fixed_dictionaries({"replicas": st.integers(1, 3), "processesPerReplica": st.integers(1, 2)})


def unique(spec: DLRMJobSpec, *buckets: int | None) -> DLRMJobSpec:
    return spec_with_unique(spec, {table.name: count for table, count in zip(spec.model.tables, buckets, strict=False)})


def check_buckets(spec: DLRMJobSpec, plan: Plan) -> None:
    """Shards of unique tables tile their buckets, on one rank each, whole rows only."""
    for table, planned in zip(spec.model.tables, plan.tables, strict=True):
        buckets = table.key_buckets
        assert planned.buckets == (buckets.count if buckets else 0)
        if buckets is None:
            continue
        found = sorted(planned.shards, key=lambda shard: shard.row_start)
        edges = [0, *(shard.row_end for shard in found)]
        assert [(shard.row_start, shard.row_end) for shard in found] == list(pairwise(edges))
        assert edges == sorted(set(edges))
        assert edges[-1] == buckets.count
        assert len({shard.rank for shard in found}) == len(found) <= buckets.count
        assert all((shard.column_start, shard.column_end) == (0, table.dim) for shard in found)
        assert {shard.kind for shard in found} <= {"table", "row", "table-row"}


@settings(max_examples=40, deadline=None)
@given(found=tables, counts=st.lists(powers, max_size=5), gang=gangs, data=st.data())
def test_plans_split_at_buckets_and_count_every_byte(
    make_spec: MakeSpec,
    found: list[dict[str, Any]],
    counts: list[int | None],
    gang: dict[str, int],
    data: st.DataObject,
) -> None:
    budget = data.draw(st.sampled_from([64 * MIB, 512 * MIB, 2**40]))
    named = [{"name": f"t{i}", **table} for i, table in enumerate(found)]
    spec = unique(make_spec(named, **gang, tierBudgets={"ddr": budget}), *(each and 2**each for each in counts))

    try:
        plan = plan_job(spec)
    except InfeasiblePlanError:
        return
    except InvalidSpecError as refused:
        is_refused_for_buckets = refused.path.endswith(".embedding.buckets")
        assert is_refused_for_buckets
        return

    check_buckets(spec, plan)
    held = [0] * plan.nodes
    for rank in plan.ranks:
        held[rank.node] += rank.bytes_per_tier["ddr"]
    assert max(held) <= budget
    least = 0
    for table in spec.model.tables:
        if (buckets := table.key_buckets) is not None:
            least += buckets.count * (buckets.quota * (32 * 4 + 4 + 1) + buckets.directory_bytes)
    assert sum(held) - sum(plan.handoff_bytes) >= least


@settings(max_examples=15, deadline=None)
@given(rows=st.integers(200_000, 2_000_000), power=st.none() | st.integers(2, 6), smaller=st.integers(96, 400))
def test_more_memory_makes_no_step_slower_than_fewer_shards_may(
    make_spec: MakeSpec, make_profile: MakeProfile, rows: int, power: int | None, smaller: int
) -> None:
    rates = {"readBytesPerSecond": 10**10}
    profile = make_profile({"bytes": "64Gi", **rates}, flopsPerSecond=10**12, network={
        "interNodeBytesPerSecond": 10**9, "intraNodeBytesPerSecond": 10**10
    })  # fmt: skip
    speeds = []
    for budget in (smaller * MIB, 2 * smaller * MIB, 2**35):
        spec = make_spec([{"name": "t", "rows": rows, "dim": 32}], replicas=3, tierBudgets={"ddr": budget})
        try:
            speeds.append(plan_job(unique(spec, power and 2**power), profile).predicted.samples_per_second)
        except InfeasiblePlanError:
            assert not speeds

    known = [speed for speed in speeds if speed is not None]
    assert len(known) == len(speeds) > 0
    assert all(slow <= SPLIT_GAIN * fast for slow, fast in pairwise(known))


@pytest.mark.parametrize("tiers", [{}, {"tierBudgets": {"ddr": "2Gi", "block": "64Gi"}}], ids=["resident", "stacked"])
def test_a_unique_table_takes_38_bytes_of_ddr_more_for_each_row(make_spec: MakeSpec, tiers: dict[str, Any]) -> None:
    pin = {"tier": "block"} if tiers else {}
    spec = make_spec([{"name": "t", "rows": 2**20, "dim": 16, "pin": pin}], **tiers)
    one = unique(spec, 16)
    buckets = one.model.tables[0].key_buckets
    assert buckets is not None
    same = make_spec([{"name": "t", "rows": 16 * buckets.quota, "dim": 16, "pin": pin}], **tiers)

    with_directory, without = (plan_job(each) for each in (one, same))

    ddr = [plan.ranks[0].bytes_per_tier["ddr"] - plan.handoff_bytes[0] for plan in (with_directory, without)]
    assert ddr[0] - ddr[1] == pytest.approx(16 * buckets.directory_bytes, abs=1)
    assert 38 <= 16 * buckets.directory_bytes / 2**20 < 38.5
    assert "directories, and lists and filters of keys, take" in " ".join(with_directory.reasons)


@pytest.mark.parametrize("tiers", [{}, {"tierBudgets": {"ddr": "2Gi", "block": "64Gi"}}], ids=["resident", "stacked"])
def test_shared_rows_take_ddr_and_space_in_cuts(make_spec: MakeSpec, tiers: dict[str, Any]) -> None:
    table = {"name": "t", "rows": 2**20, "dim": 16, "pin": {"tier": "block"} if tiers else {}}
    options = {"hash": "unique", "buckets": 16}
    shared = {**options, "unknown": "shared", "sharedRows": 2**16}

    specs = [make_spec([{**table, "embedding": each}], **tiers) for each in (shared, options)]

    plans, sizes = [plan_job(spec) for spec in specs], [read_tables(spec).whole[0] for spec in specs]

    ddr = [plan.ranks[0].bytes_per_tier["ddr"] - plan.handoff_bytes[0] for plan in plans]
    assert sizes[0].handoff - sizes[1].handoff == pytest.approx(2**16 * (16 * 4 + 4 + 8), rel=0.001)
    assert ddr[0] - ddr[1] == pytest.approx(2**16 * (16 * 4 + 4 + 1), abs=1)
    assert "shared rows take" in " ".join(plans[0].reasons)


def test_one_unique_table_widens_all_ids(make_spec: MakeSpec) -> None:
    spec = make_spec([{"name": name, "rows": 10**6, "dim": 16} for name in "tu"], replicas=2)

    narrow, wide = (read_costs(read_problem(each, None, {})) for each in (spec, unique(spec, 16)))

    assert narrow.id_bytes.tolist() == [4, 4]
    assert wide.id_bytes.tolist() == [8, 8]
    assert wide.whole_s[0] > wide.whole_s[1] > narrow.whole_s[1]


def test_a_small_unique_table_is_not_replicated(make_spec: MakeSpec) -> None:
    spec = make_spec([{"name": "t", "rows": 100, "dim": 16}, {"name": "u", "rows": 100, "dim": 16}], replicas=2)

    plan = plan_job(unique(spec, None))

    assert [table.shards[0].kind for table in plan.tables] == ["table", "data"]


def test_a_pin_that_splits_one_bucket_names_the_field(make_spec: MakeSpec) -> None:
    spec = make_spec([{"name": "t", "rows": 1_000, "dim": 16, "pin": {"sharding": "row"}}], replicas=2)

    with pytest.raises(InvalidSpecError) as refused:
        plan_job(unique(spec, None))

    assert refused.value.path == "spec.model.tables[0].embedding.buckets"
    assert len(plan_job(unique(spec, 4)).tables[0].shards) == 2
