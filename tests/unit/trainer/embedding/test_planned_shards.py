"""The trainer takes every plan of the planner: every kind of split, with and without levels, at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import parse_job
from dlrm_api.keys import KEY_END
from dlrm_planner import plan_job
from dlrm_testing.unique_tables import spec_with_unique
from dlrm_trainer.embedding import place

kinds = st.sampled_from([None, "table", "row", "column", "data", "table-row", "grid"])
tables = st.fixed_dictionaries(
    {"rows": st.integers(1, 400_000), "kind": kinds, "lookups": st.integers(1, 40), "slow": st.booleans()}
)


def manifest(found: list[dict[str, Any]], replicas: int, processes: int) -> dict[str, Any]:
    each = []
    for number, table in enumerate(found):
        pin = {"sharding": table["kind"]} if table["kind"] else {}
        if table["slow"] and table["kind"] != "data":
            pin["tier"] = "block"
        each.append(
            {
                "name": f"t{number}",
                "rows": table["rows"],
                "dim": 32,
                "columnBlock": 8,
                "maxLookups": table["lookups"],
                **({"pin": pin} if pin else {}),
            }
        )
    return {
        "metadata": {"name": "job"},
        "spec": {
            "model": {"tables": each, "interaction": "dcn", "topMlp": [1]},
            "data": {"format": "synthetic"},
            "trainer": {"replicas": replicas, "processesPerReplica": processes, "tierBudgets": {"block": "100Gi"}},
            "checkpoint": {"uri": "file:///snapshots"},
        },
    }


@settings(max_examples=40)
@given(found=st.lists(tables, min_size=1, max_size=6), replicas=st.integers(1, 3), processes=st.integers(2, 3))
def test_a_placement_holds_every_row_and_column_that_was_planned(
    found: list[dict[str, Any]], replicas: int, processes: int
) -> None:
    spec = parse_job(manifest(found, replicas, processes)).spec
    plan = plan_job(spec)

    placement = place(spec.model, plan, spec.world_size)

    held = [0] * len(found)
    for parts in (*map(placement.parts_on, range(spec.world_size)), placement.replicated):
        for part in parts:
            held[part.table] += (part.row_end - part.row_start) * (part.column_end - part.column_start)
            assert part.column_end - part.column_start == 8
            levels, rows = part.share.levels, part.row_end - part.row_start
            # Parts that differ by a row have the levels of the larger one.
            assert not levels or levels[-1].rows in (rows, rows + 1)
    assert held == [table["rows"] * 32 for table in found]


def test_a_replica_that_some_ranks_lack_is_refused() -> None:
    spec = parse_job(manifest([{"rows": 100, "kind": "data", "lookups": 1, "slow": False}], 2, 2)).spec
    plan = plan_job(spec)
    [table] = plan.tables
    [shard] = table.shards
    lacking = table.model_copy(update={"ranges": tuple(shard.model_copy(update={"rank": k}) for k in (0, 2, 3))})

    with pytest.raises(InvalidSpecError, match="needs one data range, whole"):
        place(spec.model, plan.model_copy(update={"tables": (lacking,)}), 4)


unique_tables = st.fixed_dictionaries(
    {
        "rows": st.integers(64, 400_000),
        "kind": st.sampled_from([None, "table", "row", "table-row"]),
        "lookups": st.integers(1, 40),
        "slow": st.booleans(),
        "buckets": st.sampled_from([2, 4, 16, 64]),
    }
)


@settings(max_examples=20)
@given(found=st.lists(unique_tables, min_size=1, max_size=4), replicas=st.integers(1, 2), processes=st.integers(2, 3))
def test_parts_of_unique_tables_are_ranges_of_all_keys(
    found: list[dict[str, Any]], replicas: int, processes: int
) -> None:
    document = manifest(found, replicas, processes)
    for table in document["spec"]["model"]["tables"]:
        del table["columnBlock"]
    spec = spec_with_unique(
        parse_job(document).spec, {f"t{number}": table["buckets"] for number, table in enumerate(found)}
    )
    plan = plan_job(spec)

    placement = place(spec.model, plan, spec.world_size)

    assert not placement.replicated
    for number, table in enumerate(spec.model.tables):
        parts = sorted(
            (part for rank in range(spec.world_size) for part in placement.parts_on(rank) if part.table == number),
            key=lambda part: part.row_start,
        )
        edges = [0, *(part.row_end for part in parts)]
        assert [part.row_start for part in parts] == edges[:-1]
        assert edges[-1] == KEY_END
        assert sum(part.rows for part in parts) == table.held_rows
        assert all(part.row_split == (len(parts) > 1) for part in parts)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"buckets": 8}, r"plan.tables\[0\].buckets"),
        ({"buckets": 0}, r"plan.tables\[0\].buckets"),
        ({"ranges": ()}, "buckets 0 to 4"),
    ],
)
def test_a_plan_of_other_buckets_is_refused(change: dict[str, Any], problem: str) -> None:
    document = manifest([{"rows": 1_000, "kind": "row", "lookups": 1, "slow": False}], 1, 2)
    del document["spec"]["model"]["tables"][0]["columnBlock"]
    spec = spec_with_unique(parse_job(document).spec, {"t0": 4})
    plan = plan_job(spec)
    table = plan.tables[0].model_copy(update=change)

    with pytest.raises(InvalidSpecError, match=problem):
        place(spec.model, plan.model_copy(update={"tables": (table,)}), 2)
