"""Ranges of shards place the same parts as their shards one by one, and routes are those of every part as an object."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.model import ModelSpec
from dlrm_api.plan import Plan, ShardRange
from dlrm_testing.trainer.shardings import random_plan
from dlrm_testing.unique_tables import with_unique
from dlrm_trainer.embedding import Placement, place
from dlrm_trainer.embedding.placement import Part, routes

ROWS, DIM = 97, 32
BUCKETS = {"t3": 16, "t4": 64}
SOURCES = {"t1": ["a", "b"], "t4": ["c", "d", "e"]}
"""Features of tables that several read."""
TABLES = [{"name": f"t{n}", "rows": ROWS + n, "dim": DIM, "columnBlock": 8} for n in range(3)]
KEYED = [{"name": name, "rows": 4_096, "dim": DIM} for name in BUCKETS]
PLAIN = ModelSpec.model_validate(
    {
        "tables": [table | {"features": SOURCES.get(str(table["name"]), [])} for table in TABLES + KEYED],
        "interaction": "dcn",
    }
)


def model_of() -> ModelSpec:
    return with_unique(PLAIN, BUCKETS)


def even_split(generator: np.random.Generator, units: int, world_size: int) -> tuple[ShardRange, ...]:
    """Split a table evenly over consecutive ranks: by rows in two ranges, or by columns."""
    if units == ROWS and generator.random() < 0.3:
        first = int(generator.integers(0, max(1, world_size - 1)))
        count = 2 if world_size > 1 else 1
        return (
            ShardRange(
                rank=first, ranks=count, kind="column", row_start=0, row_end=units, column_start=0, column_end=DIM
            ),
        )
    cut, found = int(generator.integers(units // 3, 2 * units // 3)), []
    for start, end in ((0, cut), (cut, units)):
        first = int(generator.integers(0, world_size))
        count = int(generator.integers(1, min(world_size - first, end - start) + 1))
        extent = {"row_start": start, "row_end": end, "column_start": 0, "column_end": DIM}
        found.append(ShardRange(rank=first, ranks=count, kind="row", **extent))
    return tuple(found)


def plan_of(seed: int, world_size: int) -> Plan:
    """Plan random rectangles of plain tables, and even splits of half of them and of those of unique ids."""
    generator = np.random.default_rng(seed)
    plan, tables = random_plan(generator, PLAIN, world_size, ("ddr", "block")[: 2 * (seed % 2)]), []
    for planned, table in zip(plan.tables, model_of().all_tables(), strict=True):
        units = BUCKETS.get(table.name, table.rows)
        ranges = planned.ranges
        if table.name in BUCKETS or generator.random() < 0.5:
            ranges = even_split(generator, units, world_size)
        update = {"ranges": ranges, "buckets": BUCKETS.get(table.name, 0), "column_blocks": table.block_edges}
        tables.append(planned.model_copy(update=update))
    return plan.model_copy(update={"tables": tuple(tables)})


def one_by_one(plan: Plan) -> Plan:
    tables = (table.model_copy(update={"ranges": table.shards}) for table in plan.tables)
    return plan.model_copy(update={"tables": tuple(tables)})


def unit_numbers(placement: Placement) -> dict[tuple[int, int, int], int]:
    """Number the units by every part of every rank: feature, first and last row to unit."""
    blocks: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank in range(placement.world_size):
        for part in placement.parts_on(rank):
            if part.row_split:
                blocks.setdefault((part.table, part.column_start), set()).add((part.row_start, part.row_end))
    ways: dict[int, set[tuple[int, ...]]] = {}
    for (table, _), found in blocks.items():
        ways.setdefault(table, set()).add((0, *(end for _, end in sorted(found))))
    numbers, following = {}, len(placement.features)
    for number, feature in enumerate(placement.features):
        for cut in sorted(ways.get(feature.table, ())):
            for start, end in pairwise(cut):
                numbers.setdefault((number, start, end), following)
                following += 1
    return numbers


def first_column(placement: Placement, feature: int, part: Part) -> int:
    return sum(placement.tables[each.table].dim for each in placement.features[:feature]) + part.column_start


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), world_size=st.integers(1, 6))
def test_ranges_place_and_route_what_their_shards_do_one_by_one(seed: int, world_size: int) -> None:
    plan, model = plan_of(seed, world_size), model_of()

    placement, other = place(model, plan, world_size), place(model, one_by_one(plan), world_size)

    ranks = range(world_size)
    assert [placement.parts_on(rank) for rank in ranks] == [other.parts_on(rank) for rank in ranks]
    assert placement.replicated == other.replicated
    numbers, found = unit_numbers(placement), routes(placement, world_size - 1)
    sent: list[int] = []
    for rank, groups in enumerate(map(placement.groups_on, ranks)):
        assert [group.width for group in found.groups[rank]] == [group.width for group in groups]
        wanted: list[int] = []
        for route, group in zip(found.groups[rank], groups, strict=True):
            columns = [(group.parts[part], feature) for part, feature in group.columns]
            units = [
                numbers[feature, part.row_start, part.row_end] if part.row_split else feature
                for part, feature in columns
            ]
            assert route.starts.tolist() == [first_column(placement, feature, part) for part, feature in columns]
            assert (route.whole, route.split_units.tolist()) == (group.whole_columns, units[group.whole_columns :])
            wanted += units
        here = [*dict.fromkeys(wanted)]
        assert found.unit_counts[rank] == len(here)
        sent += here
    own = wanted if found.own_columns is None else [here[each] for each in found.own_columns.tolist()]
    assert own == wanted
    assert len(found.own_ids) == len(found.own_tables) == len(here)
    assert found.units.tolist() == sent


@settings(max_examples=40)
@given(
    start=st.integers(0, 10**6),
    size=st.integers(1, 10**9),
    ranks=st.integers(1, 64),
    kind=st.sampled_from(["row", "column", "grid"]),
)
def test_shards_of_a_range_tile_it_and_are_even(start: int, size: int, ranks: int, kind: str) -> None:
    other, divided = ("row", "column") if kind == "column" else ("column", "row")
    edges = {f"{divided}_start": start, f"{divided}_end": start + size, f"{other}_start": 0, f"{other}_end": 8}
    whole = ShardRange.model_validate({"rank": 3, "ranks": ranks, "kind": kind, **edges}, by_name=True)

    shards = [whole.shard(place_) for place_ in range(ranks)]

    ends = [(getattr(each, f"{divided}_start"), getattr(each, f"{divided}_end")) for each in shards]
    assert [first for first, _ in ends] == [start, *(last for _, last in ends[:-1])]
    assert ends[-1][1] == start + size
    sizes = [last - first for first, last in ends]
    assert max(sizes) - min(sizes) <= 1
    assert [each.rank for each in shards] == list(range(3, 3 + ranks))
    rows = [each.row_end - each.row_start for each in shards]
    assert whole.row_counts == {count: rows.count(count) for count in rows}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"ranks": 5}, r"plan.tables\[0\].ranges\[0\].rank: table t0: expected ranks from 0 to 3"),
        ({"row_end": 3}, r"plan.tables\[0\].ranges\[0\]: table t0: expected one or more rows for each of 4 ranks"),
        ({"row_end": ROWS - 1}, r"plan.tables\[0\].ranges: table t0: rows 96 to 97 "),
        ({"kind": "column", "ranks": 3}, r"plan.tables\[0\].ranges\[0\]: table t0: expected whole column blocks"),
    ],
)
def test_a_range_that_does_not_fit_is_refused(change: dict[str, object], problem: str) -> None:
    model, plan = model_of(), plan_of(0, 4)
    whole = ShardRange(rank=0, ranks=4, kind="row", row_start=0, row_end=ROWS, column_start=0, column_end=DIM)
    table = plan.tables[0].model_copy(update={"ranges": (whole.model_copy(update=change),)})

    with pytest.raises(InvalidSpecError, match=problem):
        place(model, plan.model_copy(update={"tables": (table, *plan.tables[1:])}), 4)
