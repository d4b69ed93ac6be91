"""The trainer takes every plan of the planner: every kind of split, with and without levels, at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import parse_job
from dlrm_planner import plan_job
from dlrm_trainer.embedding import place

kinds = st.sampled_from([None, "table", "row", "column", "data", "table-row"])
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
    for parts in (*placement.parts, placement.replicated):
        for part in parts:
            held[part.table] += (part.row_end - part.row_start) * (part.column_end - part.column_start)
            assert part.column_end - part.column_start == 8
            levels = part.share.levels
            assert not levels or levels[-1].rows == part.row_end - part.row_start
    assert held == [table["rows"] * 32 for table in found]


def test_a_stored_plan_may_list_a_replica_for_each_rank_or_once() -> None:
    found = [{"rows": 100, "kind": "data", "lookups": 1, "slow": False}]
    spec = parse_job(manifest(found, 2, 2)).spec
    plan = plan_job(spec)
    [table] = plan.tables
    [shard] = table.shards

    listed = table.model_copy(update={"shards": tuple(shard.model_copy(update={"rank": rank}) for rank in range(4))})
    stored = plan.model_copy(update={"tables": (listed,)})

    assert place(spec.model, stored, 4) == place(spec.model, plan, 4)


def test_a_replica_that_some_ranks_lack_is_refused() -> None:
    spec = parse_job(manifest([{"rows": 100, "kind": "data", "lookups": 1, "slow": False}], 2, 2)).spec
    plan = plan_job(spec)
    [table] = plan.tables
    [shard] = table.shards
    lacking = table.model_copy(update={"shards": tuple(shard.model_copy(update={"rank": k}) for k in (0, 2, 3))})

    with pytest.raises(InvalidSpecError, match="needs one data shard, whole"):
        place(spec.model, plan.model_copy(update={"tables": (lacking,)}), 4)
