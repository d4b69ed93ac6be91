"""Shards by shape: what each takes, and what a plan of many equal ones says of every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import MAX_RANGES, Plan
from dlrm_planner import plan_job
from dlrm_planner.tables import part_bytes, read_tables
from dlrm_planner.types import ShardOption, cut_tables, sum_exactly

MIB, GIB = 2**20, 2**30
MakeSpec = Callable[..., DLRMJobSpec]


@given(data=st.data(), rows=st.integers(12, 10**6), parts=st.integers(2, 12), is_even=st.booleans())
def test_a_shape_takes_what_each_of_its_shards_takes_alone(
    make_spec: MakeSpec, data: st.DataObject, rows: int, parts: int, is_even: bool
) -> None:
    tables = read_tables(make_spec([{"name": f"t{i}", "rows": rows, "dim": 16, "columnBlock": 4} for i in range(4)]))
    inner = st.lists(st.integers(1, rows - 1), min_size=parts - 1, max_size=parts - 1, unique=True)
    edges = np.arange(parts + 1) * rows // parts if is_even else np.array([0, *sorted(data.draw(inner)), rows])
    whole, cut = np.array([0, 16]), np.array([0, 4, 16])
    by_rows = ShardOption(kind="row", ranks=np.arange(parts), row_edges=edges, column_edges=whole, reason="")
    by_both = replace(by_rows, kind="grid", ranks=np.arange(2 * parts), column_edges=cut)
    by_columns = replace(by_both, kind="column", ranks=np.array([5, 2]), row_edges=np.array([0, rows]))

    shards = cut_tables(tables, range(4), {0: by_rows, 2: by_columns, 3: by_both})

    shapes, shape, counts = shards.shapes, shards.shape, np.diff(edges)
    sizes = [(count, width) for width in (16, 4, 12) for count in counts.tolist()]
    sizes[parts:parts] = [(rows, 16), (rows, 4), (rows, 12)]
    assert shards.table.tolist() == [0] * parts + [1, 2, 2] + [3] * 2 * parts
    assert shards.ranks.tolist() == [*range(parts), -1, 5, 2, *range(2 * parts)]
    assert list(zip(shapes.rows[shape].tolist(), shapes.width[shape].tolist(), strict=True)) == sizes
    alone = [part_bytes(tables.specs[0], tables.block_state_bytes[0], *size) for size in sizes]
    assert shapes.resident_bytes[shape].tolist() == [each.resident for each in alone]
    assert shapes.handoff_bytes[shape].tolist() == [each.handoff for each in alone]
    steps = [tables.range_bytes(0, count / rows, parts, width / 16) for count, width in sizes]
    steps[parts : parts + 3] = [0, 0, 0]
    assert shapes.range_bytes[shape].tolist() == steps
    assert shapes.count.tolist() == np.bincount(shape).tolist()
    # Tiers give even parts one size, the largest.
    evened = shapes.evened().rows[shape][[*range(parts), *range(-2 * parts, 0)]]
    expected = np.full(parts, counts.max()) if np.ptp(counts) == 1 else counts
    assert evened.tolist() == np.tile(expected, 3).tolist()


@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 3)), max_size=50))
def test_sums_of_bytes_do_not_overflow(found: list[tuple[int, int]]) -> None:
    amounts, index = np.array(found, np.int64).reshape(-1, 2).T

    sums = sum_exactly(amounts, index, 4)

    assert sums == [sum(size for size, at in found if at == place) for place in range(4)]


def rows_by_rank(plan: Plan, number: int) -> list[tuple[int, int, int]]:
    return [(shard.rank, shard.row_start, shard.row_end) for shard in plan.tables[number].shards]


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    found=st.lists(
        st.fixed_dictionaries(
            {"rows": st.integers(50, 500_000), "dim": st.sampled_from([4, 16])},
            optional={
                "pin": st.sampled_from(
                    [
                        {"sharding": "row"},
                        {"sharding": "row", "tier": "block"},
                        {"sharding": "row", "ranks": [3, 0]},
                        {"sharding": "data"},
                        {"ranks": [1]},
                    ]
                )
            },
        ),
        min_size=1,
        max_size=6,
    ),
    gang=st.tuples(st.integers(2, 4), st.integers(2, 3)),
    ddr=st.integers(100, 200),
)
def test_pinned_rows_expand_to_even_shards_of_one_by_one(
    make_spec: MakeSpec, found: list[dict[str, Any]], gang: tuple[int, int], ddr: int
) -> None:
    named = [{"name": f"t{i}", **each} for i, each in enumerate(found)]
    budgets = {"ddr": ddr * MIB, "block": GIB}
    spec = make_spec(named, replicas=gang[0], processesPerReplica=gang[1], tierBudgets=budgets)
    try:
        plan = plan_job(spec)
    except InfeasiblePlanError:
        return

    everywhere = list(range(spec.world_size))
    for number, each in enumerate(named):
        pin, rows, planned = each.get("pin", {}), each["rows"], plan.tables[number]
        if pin.get("sharding") == "data":
            assert [(each.kind, each.row_end) for each in planned.ranges] == [("data", rows)]
        elif pin.get("sharding") == "row":
            ranks = sorted(pin.get("ranks", everywhere))
            edges = [k * rows // len(ranks) for k in range(len(ranks) + 1)]
            assert rows_by_rank(plan, number) == list(zip(ranks, edges[:-1], edges[1:], strict=True))
            most = max(end - start for start, end in pairwise(edges))
            for shard in planned.shards:
                levels = shard.tiers.levels
                assert bool(levels) or "tier" not in pin
                assert not levels or levels[-1].rows == most
        elif "ranks" in pin:
            assert rows_by_rank(plan, number) == [(1, 0, rows)]
        else:
            parts = sorted((start, end) for _, start, end in rows_by_rank(plan, number))
            assert [0, *(end for _, end in parts)] == [*(start for start, _ in parts), rows]


def test_tables_split_over_all_ranks_take_few_ranges(make_spec: MakeSpec) -> None:
    count, replicas, processes = 70, 128, 8
    found = [
        {"name": f"t{i}", "rows": 10**7 + 7_919 * i, "dim": 64, "maxLookups": 1 + i % 5, "pin": {"sharding": "row"}}
        for i in range(count)
    ]
    budgets = {"ddr": "1200Mi", "block": "100Gi"}
    spec = make_spec(found, batch=1_024, processesPerReplica=processes, tierBudgets=budgets)
    data = spec.data.model_copy(update={"virtual_shards": replicas * processes})
    spec = spec.model_copy(update={"data": data}).with_replicas(replicas)

    plan = plan_job(spec)

    shards = count * replicas * processes
    assert sum(each.ranks for table in plan.tables for each in table.ranges) == shards > MAX_RANGES
    assert sum(len(table.ranges) for table in plan.tables) < 10 * count
    assert any(each.tiers.is_stack for table in plan.tables for each in table.ranges)
    for number in (0, count - 1):
        rows = found[number]["rows"]
        edges = [k * rows // 1_024 for k in range(1_025)]
        assert rows_by_rank(plan, number) == list(zip(range(1_024), edges[:-1], edges[1:], strict=True))
