"""Plans are predicted to be as fast as the simple ones beside them: all tables whole, all split by rows."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_planner import plan_job
from dlrm_planner.splitting import NEAR

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
DDR = {"bytes": "8Ti", "readBytesPerSecond": 1.5e11, "writeBytesPerSecond": 1e11}
RATES: dict[str, Any] = {
    "flopsPerSecond": 1e12,
    "network": {"interNodeBytesPerSecond": 3e9, "intraNodeBytesPerSecond": 5e10},
}
BATCH = 65_536
"""Every table of such a batch reads over 1 MiB."""

shapes = st.fixed_dictionaries(
    {"rows": st.integers(200_000, 10_000_000), "dim": st.sampled_from([32, 64]), "maxLookups": st.integers(1, 40)},
    optional={"columnBlock": st.sampled_from([8, 16])},
)
many = st.lists(shapes, min_size=1, max_size=14) | st.builds(
    lambda shape, count: [shape] * count, shapes, st.integers(1, 30)
)
gangs = st.fixed_dictionaries(
    {"replicas": st.integers(1, 16), "processesPerReplica": st.sampled_from([1, 2, 4])}
).filter(lambda gang: gang["replicas"] * gang["processesPerReplica"] > 1)


def named(found: list[dict[str, Any]], **pin: Any) -> list[dict[str, Any]]:
    return [{"name": f"t{i}", **table, **({"pin": pin} if pin else {})} for i, table in enumerate(found)]


def rate(plan: Plan) -> float:
    assert plan.predicted.samples_per_second is not None
    return plan.predicted.samples_per_second


@settings(deadline=None)
@given(found=many, gang=gangs, slow=st.booleans())
def test_no_plan_is_predicted_slower_than_with_all_tables_whole_or_all_split_by_rows(
    make_spec: MakeSpec, make_profile: MakeProfile, found: list[dict[str, Any]], gang: dict[str, int], slow: bool
) -> None:
    network = {key: value / 10 for key, value in RATES["network"].items()} if slow else RATES["network"]
    profile = make_profile(DDR, **{**RATES, "network": network})

    chosen = rate(plan_job(make_spec(named(found), batch=BATCH, **gang), profile))

    for sharding in ("table", "row"):
        pinned = plan_job(make_spec(named(found, sharding=sharding), batch=BATCH, **gang), profile)
        assert chosen * NEAR >= rate(pinned) * (1 - 1e-9)


@pytest.mark.parametrize(("tables", "ranks"), [(3, 4), (12, 16), (26, 40)])
def test_bags_stay_whole_where_their_ranges_would_send_nearly_all_their_vectors(
    make_spec: MakeSpec, make_profile: MakeProfile, tables: int, ranks: int
) -> None:
    found = named([{"rows": 10**7, "dim": 32, "maxLookups": 10}] * tables)

    plan = plan_job(make_spec(found, batch=BATCH, replicas=ranks), make_profile(DDR, **RATES))

    assert {shard.kind for table in plan.tables for shard in table.shards} == {"table"}


@pytest.mark.parametrize("ranks", [24, 48])
def test_tables_of_one_id_are_cut_to_one_level_in_few_pieces(
    make_spec: MakeSpec, make_profile: MakeProfile, ranks: int
) -> None:
    found = named([{"rows": 10**7, "dim": 32}] * 26)

    plan = plan_job(make_spec(found, batch=BATCH, replicas=ranks), make_profile(DDR, **RATES))

    assert plan.predicted.imbalance < 1.05
    assert sum(len(table.shards) for table in plan.tables) <= 26 + ranks


def test_column_blocks_of_bags_go_to_all_ranks_where_that_is_quickest(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    bags = [{"rows": 10**7, "dim": 32, "maxLookups": 10, "columnBlock": 8}]
    others = [{"rows": 10**6, "dim": 32}] * 4
    profile = make_profile(DDR, **RATES)

    plan = plan_job(make_spec(named([*bags, *others]), batch=BATCH, replicas=4), profile)

    assert [shard.kind for shard in plan.tables[0].shards] == ["column"] * 4
    assert plan.predicted.imbalance == pytest.approx(1.0)


@pytest.mark.parametrize("replicas", [4, 8, 16])
@pytest.mark.parametrize("shape", [{}, {"columnBlock": 16}])
def test_a_table_that_no_node_holds_is_read_by_as_many_ranks_as_one_that_any_holds(
    make_spec: MakeSpec, make_profile: MakeProfile, replicas: int, shape: dict[str, Any]
) -> None:
    found = named([{"rows": 10**9, "dim": 64, "maxLookups": 20, **shape}, {"rows": 10**6, "dim": 64}])
    spec = make_spec(found, batch=BATCH, replicas=replicas)
    tight = plan_job(spec, make_profile({**DDR, "bytes": "256Gi"}, **RATES))

    ample = plan_job(spec, make_profile(DDR, **RATES))

    assert rate(tight) >= rate(ample) / 1.02


@pytest.mark.parametrize("lookups", [1, 4, 10])
def test_auto_finds_a_size_where_whole_tables_do(make_spec: MakeSpec, make_profile: MakeProfile, lookups: int) -> None:
    found = [{"rows": 10**7, "dim": 32, "maxLookups": lookups}] * 26
    profile = make_profile(DDR, **RATES)
    whole = named(found, sharding="table")
    target = 0.99 * max(rate(plan_job(make_spec(whole, batch=BATCH, replicas=n), profile)) for n in (32, 40, 60))

    def asked(tables: list[dict[str, Any]]) -> Plan:
        return plan_job(
            make_spec(tables, batch=BATCH, auto={"min": 4, "max": 64, "targetSamplesPerSecond": target}), profile
        )

    chosen, beside = asked(named(found)), asked(whole)

    assert rate(chosen) >= target
    assert chosen.world_size <= beside.world_size
