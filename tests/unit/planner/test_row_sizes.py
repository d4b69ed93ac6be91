"""Rows of several sizes: a share of their bytes, in DDR alone, on one rank each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.dimensions import MAX_SLAB_ROWS
from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_planner import plan_job

MIB = 2**20
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]

tables = st.lists(
    st.fixed_dictionaries(
        {"rows": st.integers(64, 2_000_000), "dim": st.sampled_from([16, 64]), "maxLookups": st.integers(1, 40)},
        optional={"pin": st.sampled_from([{"sharding": "row"}, {"ranks": [0]}])},
    ),
    min_size=1,
    max_size=4,
)
gangs = st.fixed_dictionaries({"replicas": st.integers(1, 3), "processesPerReplica": st.integers(1, 2)})


def sized(tables: list[dict[str, Any]], keep: float, **embedding: Any) -> list[dict[str, Any]]:
    more = {"embedding": {"dimension": {"keepBytes": keep}, **embedding}}
    return [{"name": f"t{i}", **table, **more} for i, table in enumerate(tables)]


def ddr(plan: Plan) -> int:
    return sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks) - sum(plan.handoff_bytes)


# The fixture changes nothing between examples.
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(found=tables, gang=gangs, keep=st.floats(0.5, 1), less=st.floats(0, 1), unique=st.booleans())
def test_keeping_less_takes_no_more_and_all_is_counted(
    make_spec: MakeSpec, found: list[dict[str, Any]], gang: dict[str, int], keep: float, less: float, unique: bool
) -> None:
    more = {"hash": "unique", "buckets": 8} if unique else {}
    shares = [keep, 0.5 + less * (keep - 0.5)]
    specs = [make_spec(sized(found, share, **more), **gang, tierBudgets={"ddr": "1Ti"}) for share in shares]

    plans = [plan_job(spec) for spec in specs]

    assert ddr(plans[1]) <= ddr(plans[0])
    for spec, plan in zip(specs, plans, strict=True):
        expected = 0
        for table, planned in zip(spec.model.tables, plan.tables, strict=True):
            slabs, buckets = table.slab_bytes(4), table.key_buckets
            assert slabs is not None
            assert {shard.kind for shard in planned.shards} <= {"table", "row", "table-row"}
            for shard in planned.shards:
                rows = (shard.row_end - shard.row_start) * table.unit_rows
                expected += slabs.planned(rows) + rows
            expected += 0 if buckets is None else buckets.count * buckets.directory_bytes
        # Steps on ranges of rows take more.
        is_split = any(len(planned.shards) > 1 for planned in plan.tables)
        assert ddr(plan) >= expected if is_split else ddr(plan) == expected
        assert "with rows of several sizes" in " ".join(plan.reasons)


def test_a_smaller_share_fits_where_all_columns_do_not(make_spec: MakeSpec) -> None:
    table = {"rows": 2**20, "dim": 64}
    budget = {"tierBudgets": {"ddr": "160Mi"}}

    with pytest.raises(InfeasiblePlanError):
        plan_job(make_spec(sized([table], 1), **budget))

    plan = plan_job(make_spec(sized([table], 0.25), **budget))

    assert plan.ranks[0].bytes_per_tier["ddr"] <= 160 * MIB


def test_only_other_tables_leave_ddr(make_spec: MakeSpec) -> None:
    budget = {"tierBudgets": {"ddr": "300Mi", "block": "8Gi"}}
    plain = {"name": "plain", "rows": 2**20, "dim": 64}

    plan = plan_job(make_spec([plain, *sized([{"rows": 2**20, "dim": 64}], 0.25)], **budget))

    assert [bool(table.shards[0].tiers.levels) for table in plan.tables] == [True, False]


def test_a_small_table_is_not_replicated(make_spec: MakeSpec) -> None:
    spec = make_spec(
        [*sized([{"rows": 100, "dim": 16}], 0.5), {"name": "u", "rows": 100, "dim": 16}], replicas=2, batch=1_024
    )

    assert [table.shards[0].kind for table in plan_job(spec).tables] == ["table", "data"]


@pytest.mark.parametrize("memory", [{}, {"tierBudgets": {"ddr": "1Ti"}}], ids=["unknown", "known"])
def test_no_rank_has_more_rows_than_words_can_place(make_spec: MakeSpec, memory: dict[str, Any]) -> None:
    tables = sized([{"rows": 2 * MAX_SLAB_ROWS + 5, "dim": 16}], 0.5)

    with pytest.raises(InvalidSpecError) as refused:
        plan_job(make_spec(tables, replicas=2, **memory))
    plan = plan_job(make_spec(tables, replicas=3, **memory))

    assert refused.value.path == "spec.model.tables[0].rows"
    assert max(shard.row_end - shard.row_start for shard in plan.tables[0].shards) <= MAX_SLAB_ROWS


def test_gpus_are_refused_by_field(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = make_profile("64Gi", devices={"resource": "nvidia.com/gpu", "count": 1, "hbm": {"bytes": "80Gi"}})

    with pytest.raises(InvalidSpecError) as refused:
        plan_job(make_spec(sized([{"rows": 100, "dim": 16}], 0.5)), profile)

    assert refused.value.path == "spec.model.tables[0].embedding.dimension"
