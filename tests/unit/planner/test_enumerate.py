"""Shards: they tile each table, keep to pins and memory, and split what is too large or too costly."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api import tiers
from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, ShardRange
from dlrm_planner import plan_job
from dlrm_planner.choose import read_problem
from dlrm_planner.enumerate import OptionBuilder, spread_rows
from dlrm_planner.estimate import read_costs
from dlrm_planner.memory import ddr_capacity
from dlrm_planner.rates import read_rates
from dlrm_planner.tiers import TierPlanner
from dlrm_testing.repeats import repeats

MIB, GIB = 2**20, 2**30
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]

pins = st.sampled_from(
    [
        {"sharding": "row"},
        {"sharding": "row", "ranks": [1, 0]},
        {"sharding": "column"},
        {"sharding": "column", "ranks": [0, 1]},
        {"sharding": "grid"},
        {"sharding": "table"},
        {"sharding": "data"},
        {"ranks": [0, 1]},
        {"ranks": [0]},
    ]
)
shapes = st.fixed_dictionaries(
    {"rows": st.integers(1, 3_000_000), "dim": st.just(32), "maxLookups": st.integers(1, 60)},
    optional={"pin": pins, "columnBlock": st.sampled_from([8, 16])},
).filter(lambda table: table.get("pin", {}).get("sharding") not in ("column", "grid") or "columnBlock" in table)
many = st.lists(shapes, min_size=1, max_size=12)
gangs = st.fixed_dictionaries({"replicas": st.integers(1, 4), "processesPerReplica": st.integers(1, 3)}).filter(
    lambda gang: gang["replicas"] * gang["processesPerReplica"] > 1
)


def named(found: list[dict[str, Any]], gang: dict[str, int]) -> list[dict[str, Any]]:
    """Name tables; a grid needs several ranks on a node."""
    lone = gang["processesPerReplica"] == 1
    tables = [{**each, "pin": {}} if lone and each.get("pin") == {"sharding": "grid"} else each for each in found]
    return [{"name": f"t{i}", **table} for i, table in enumerate(tables)]


def table(name: str, rows: int, dim: int = 64, **more: Any) -> dict[str, Any]:
    return {"name": name, "rows": rows, "dim": dim, **more}


def shards(plan: Plan, name: str = "t") -> tuple[ShardRange, ...]:
    return next(found.shards for found in plan.tables if found.name == name)


def areas(found: tuple[ShardRange, ...]) -> int:
    return sum((each.row_end - each.row_start) * (each.column_end - each.column_start) for each in found)


def overlap(a: ShardRange, b: ShardRange) -> bool:
    rows = a.row_start < b.row_end and b.row_start < a.row_end
    return rows and a.column_start < b.column_end and b.column_start < a.column_end


def check_tiling(spec: DLRMJobSpec, plan: Plan) -> None:
    """Every table is replicated whole, or tiled exactly by rectangles on ranks of which none comes twice."""
    assert [planned.name for planned in plan.tables] == [asked.name for asked in spec.model.all_tables()]
    for planned, asked in zip(plan.tables, spec.model.all_tables(), strict=True):
        kinds, found = {shard.kind for shard in planned.shards}, planned.shards
        ranks = [shard.rank for shard in found]
        assert len(kinds) == 1
        assert len(set(ranks)) == len(ranks)
        assert max(ranks) < plan.world_size
        assert planned.column_blocks == asked.block_edges
        for shard in found:
            assert 0 <= shard.row_start < shard.row_end <= asked.rows
            assert {shard.column_start, shard.column_end} <= set(asked.block_edges)
            assert shard.column_start < shard.column_end
        if kinds == {"data"}:
            assert ranks == [0]
            assert all(areas((shard,)) == asked.rows * asked.dim for shard in found)
            continue
        assert areas(found) == asked.rows * asked.dim
        assert not any(overlap(a, b) for i, a in enumerate(found) for b in found[:i])
        assert (len(found) == 1) == (kinds == {"table"})
        nodes = {rank // plan.processes_per_node for rank in ranks}
        assert kinds != {"table-row"} or len(nodes) == 1
        if kinds == {"grid"}:
            check_grid(found, plan.processes_per_node)
            continue
        assert kinds == {"column"} or all(shard.column_end - shard.column_start == asked.dim for shard in found)
        assert kinds != {"column"} or all(shard.row_end - shard.row_start == asked.rows for shard in found)


def check_grid(found: tuple[ShardRange, ...], processes: int) -> None:
    """Every group of columns is on one node, which has no other, and all are cut at the same rows."""
    groups = {
        each.column_start: [*filter(lambda shard: shard.column_start == each.column_start, found)] for each in found
    }
    nodes = [{shard.rank // processes for shard in group} for group in groups.values()]
    assert sorted(map(len, nodes)) == [1] * len(set().union(*nodes))
    assert len({tuple(shard.row_start for shard in group) for group in groups.values()}) == 1


@pytest.mark.slow
@given(found=many, gang=gangs)
def test_shards_tile_every_table_exactly_and_keep_to_pins(
    make_spec: MakeSpec, found: list[dict[str, Any]], gang: dict[str, int]
) -> None:
    spec = make_spec(named(found, gang), **gang)

    plan = plan_job(spec)

    check_tiling(spec, plan)
    for planned, asked in zip(plan.tables, spec.model.all_tables(), strict=True):
        kind, pin = planned.shards[0].kind, asked.pin
        ranks = {shard.rank for shard in planned.shards}
        if pin is None:
            continue
        assert not pin.ranks or ranks <= set(pin.ranks)
        if pin.sharding == "row" and asked.rows >= plan.world_size:
            assert ranks == (set(pin.ranks) or set(range(plan.world_size)))
        if pin.sharding == "column":
            assert len(ranks) == min(len(asked.block_edges) - 1, len(pin.ranks) or plan.world_size)
        if pin.sharding == "grid":
            blocks, processes = len(asked.block_edges) - 1, plan.processes_per_node
            assert len(ranks) == min(blocks, plan.nodes) * min(asked.rows, processes)
        if pin.sharding in ("table", "data", "column"):
            assert kind == pin.sharding


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(25, soak=500))
@given(found=many, gang=gangs, budget=st.integers(2 * MIB, 2 * GIB), slow=st.sampled_from([{}, {"block": "4Gi"}]))
def test_no_pod_holds_more_than_its_budgets_however_tables_are_split(
    make_spec: MakeSpec, found: list[dict[str, Any]], gang: dict[str, int], budget: int, slow: dict[str, str]
) -> None:
    spec = make_spec(named(found, gang), **gang, tierBudgets={"ddr": budget, **slow})

    try:
        plan = plan_job(spec)
    except InfeasiblePlanError:
        return

    check_tiling(spec, plan)
    for pod in range(plan.nodes):
        here = [rank.bytes_per_tier for rank in plan.ranks if rank.node == pod]
        assert sum(held["ddr"] for held in here) <= budget
        assert sum(held.get("block", 0) for held in here) <= 4 * GIB
    assert plan_job(spec) == plan


@pytest.mark.parametrize("blocks", [{}, {"columnBlock": 16}])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_table_too_slow_for_one_rank_is_split(make_spec: MakeSpec, ranks: int, blocks: dict[str, int]) -> None:
    others = [table(f"o{i}", 10**6) for i in range(2 * ranks)]
    giant = table("t", 10**7, maxLookups=100, **blocks)

    whole = plan_job(make_spec([{**giant, "pin": {"sharding": "table"}}, *others], replicas=ranks))
    split = plan_job(make_spec([giant, *others], replicas=ranks))

    assert split.predicted.imbalance < 0.75 * whole.predicted.imbalance
    assert len({shard.kind for shard in shards(split)}) == 1
    assert any(reason.startswith("table t is split by ") and "alone it costs" in reason for reason in split.reasons)
    assert all(len(shards(split, f"o{i}")) == 1 for i in range(2 * ranks))


def test_row_ranges_are_shorter_on_ranks_that_hold_more(make_spec: MakeSpec) -> None:
    whole = table("u", 10**6, pin={"sharding": "table"})

    plan = plan_job(make_spec([table("t", 10**7, maxLookups=20), whole], replicas=2))

    rows = {shard.rank: shard.row_end - shard.row_start for shard in shards(plan)}
    home = shards(plan, "u")[0].rank
    assert rows[home] < 0.9 * rows[1 - home]
    assert plan.predicted.imbalance < 1.1


def test_rows_are_split_only_if_column_blocks_do_not_suffice(make_spec: MakeSpec) -> None:
    def kind(ranks: int, blocks: int) -> str:
        giant = table("t", 10**7, maxLookups=20, columnBlock=64 // blocks)
        others = [table(f"o{i}", 10**6) for i in range(20)]
        return shards(plan_job(make_spec([giant, *others], replicas=ranks)))[0].kind

    assert kind(ranks=4, blocks=4) == "column"
    assert kind(ranks=16, blocks=2) == "row"


def test_a_table_whose_step_is_short_stays_whole_however_few_there_are(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table("t", 10**6, dim=16)], replicas=4, batch=1_024))

    assert [shard.kind for shard in shards(plan)] == ["table"]


def test_rows_are_split_inside_a_node_where_that_is_enough(make_spec: MakeSpec) -> None:
    costly = table("t", 10**6, maxLookups=20)
    others = [table(f"o{i}", 10**6, maxLookups=5) for i in range(24)]

    plan = plan_job(make_spec([costly, *others], replicas=4, processesPerReplica=4))

    assert {shard.kind for shard in shards(plan)} == {"table-row"}
    assert len({shard.rank // 4 for shard in shards(plan)}) == 1


@pytest.mark.parametrize(
    "budgets", [{"ddr": "500Mi"}, {"ddr": "350Mi", "block": "1200Mi"}, {"ddr": "300Mi", "scm": "1Gi"}]
)
def test_a_table_larger_than_any_node_is_planned_where_the_gang_holds_it(
    make_spec: MakeSpec, budgets: dict[str, str]
) -> None:
    rows = 5_000_000 if len(budgets) == 1 else 9_000_000
    spec = make_spec([table("t", rows), table("u", 10**5), table("v", 1_000)], replicas=4, tierBudgets=budgets)
    one = make_spec([table("t", rows, pin={"sharding": "table"})], replicas=4, tierBudgets=budgets)

    plan = plan_job(spec)

    check_tiling(spec, plan)
    assert len(shards(plan)) > 1
    for shard in shards(plan):
        levels = shard.tiers.levels
        assert bool(levels) == (len(budgets) > 1)
        assert not levels or levels[-1].rows == shard.row_end - shard.row_start
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(one)
    assert len(budgets) > 1 or any("leave out spec.model.tables[0].pin.sharding" in r for r in refused.value.reasons)


def test_a_pinned_table_that_no_node_holds_fits_without_the_pin(make_spec: MakeSpec) -> None:
    tight = {"ddr": "500Mi"}
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(make_spec([table("t", 4 * 10**6, pin={"ranks": [1]})], replicas=4, tierBudgets=tight))

    assert "fix: leave out spec.model.tables[0].pin.ranks: the planner then splits the table over nodes" in (
        refused.value.reasons
    )
    assert len(shards(plan_job(make_spec([table("t", 4 * 10**6)], replicas=4, tierBudgets=tight)))) > 1


def test_a_table_larger_than_the_gang_is_named_with_fixes_that_work(make_spec: MakeSpec) -> None:
    tight = {"ddr": "200Mi"}
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(make_spec([table("t", 4 * 10**6)], replicas=2, tierBudgets=tight))
    reasons = refused.value.reasons

    assert (
        "table t (4000000 rows x 64) does not fit, not even split over the ranks of 2 nodes: with row state"
        in (reasons[0])
    )
    replicas = int(reasons[-1].removeprefix("fix: trainer.replicas: ").split()[0])
    plan = plan_job(make_spec([table("t", 4 * 10**6)], replicas=replicas, tierBudgets=tight))
    assert len(shards(plan)) == replicas


def test_rows_are_split_unevenly_over_uneven_nodes(make_spec: MakeSpec) -> None:
    held = [table(f"u{i}", 10**6, pin={"ranks": [0], "sharding": "table"}) for i in range(2)]
    budget = 2 * 10**6 * 261 + 150 * MIB

    plan = plan_job(make_spec([table("t", 3 * 10**6), *held], replicas=3, tierBudgets={"ddr": budget}))

    rows = {shard.rank: shard.row_end - shard.row_start for shard in shards(plan)}
    assert rows.get(0, 0) < rows[1]
    assert sum(rows.values()) == 3 * 10**6


def test_a_table_that_fits_nowhere_whole_is_split_as_a_last_resort(make_spec: MakeSpec) -> None:
    found = [table(f"t{i}", 10**6) for i in range(3)]
    budget = int(1.6 * 10**6 * 261) + 70 * MIB

    plan = plan_job(make_spec(found, replicas=2, tierBudgets={"ddr": budget}))

    assert sorted(len(shards(plan, f"t{i}")) for i in range(3)) == [1, 1, 2]
    assert any("no node has enough memory for it whole next to other tables" in reason for reason in plan.reasons)


def test_a_row_range_has_its_share_of_slots_and_the_tables_hit_rate(make_spec: MakeSpec) -> None:
    one = make_spec([table("t", 10**7)], tierBudgets={"ddr": "1Gi", "block": "100Gi"})
    four = make_spec(
        [table("t", 4 * 10**7, pin={"sharding": "row"})], replicas=4, tierBudgets={"ddr": "1Gi", "block": "100Gi"}
    )

    whole, parts = shards(plan_job(one))[0].tiers.levels, shards(plan_job(four))

    for part in parts:
        assert part.tiers.levels[0].rows == pytest.approx(whole[0].rows, rel=0.02)
        assert part.tiers.levels[-1].rows == 10**7
        assert len({each.tiers.levels[0].expected_hit_rate for each in parts}) == 1


def test_table_row_pins_take_one_nodes_ranks(make_spec: MakeSpec) -> None:
    found = [
        table("t", 10**6, pin={"sharding": "table-row", "ranks": [4]}),
        table("u", 10**6, pin={"sharding": "table-row"}),
        table("v", 1, pin={"sharding": "table-row"}),
    ]

    plan = plan_job(make_spec(found, replicas=3, processesPerReplica=2))

    assert [(shard.rank, shard.kind) for shard in shards(plan)] == [(4, "table-row"), (5, "table-row")]
    assert {shard.rank // 2 for shard in shards(plan, "u")} in ({0}, {1})
    assert [shard.kind for shard in shards(plan, "v")] == ["table"]
    assert any("table t is split by rows inside node 2 over ranks 4 and 5: as pinned" in r for r in plan.reasons)


def test_grid_pins_take_all_ranks_of_a_node_for_each_group_of_columns(make_spec: MakeSpec) -> None:
    found = [
        table("t", 10**6, columnBlock=16, pin={"sharding": "grid", "ranks": [5, 0]}),
        table("u", 10**6, columnBlock=32, pin={"sharding": "grid"}),
    ]

    plan = plan_job(make_spec(found, replicas=3, processesPerReplica=2))

    cut = [(0, 0, 500_000), (1, 500_000, 10**6), (4, 0, 500_000), (5, 500_000, 10**6)]
    assert [(shard.rank, shard.row_start, shard.row_end) for shard in shards(plan)] == cut
    assert [(shard.column_start, shard.column_end) for shard in shards(plan)] == [(0, 32)] * 2 + [(32, 64)] * 2
    assert [each.ranks for each in plan.tables[0].ranges] == [2, 2]
    # Nodes 0 and 2 have parts of t: one of them takes half of u, and node 1 the other.
    assert {2, 3} < {shard.rank for shard in shards(plan, "u")}
    assert any(
        "table t is split by columns over 2 nodes and by rows inside each, over ranks 0, 1, 4 and 5: as pinned" in r
        for r in plan.reasons
    )


def test_many_ranks_that_do_not_follow_each_other_are_counted(make_spec: MakeSpec) -> None:
    every_other = {"sharding": "row", "ranks": list(range(0, 20, 2))}

    plan = plan_job(make_spec([table("t", 10**6, pin=every_other)], replicas=20))

    assert [shard.rank for shard in shards(plan)] == every_other["ranks"]
    assert "table t is split by rows over 10 ranks from 0 to 18: as pinned" in plan.reasons


@pytest.mark.parametrize(
    ("pin", "processes", "message"),
    [
        (
            {"sharding": "table-row"},
            1,
            "spec.model.tables[0].pin.sharding: table t is pinned to sharding table-row, which splits rows over the "
            "ranks of one node, and a node has one rank: set trainer.processesPerReplica to 2 or more, or pin to "
            "sharding row",
        ),
        (
            {"sharding": "grid"},
            1,
            "spec.model.tables[0].pin.sharding: table t is pinned to sharding grid, which splits rows over the ranks "
            "of each node, and a node has one rank: set trainer.processesPerReplica to 2 or more, or pin to sharding "
            "column",
        ),
        (
            {"sharding": "table-row", "ranks": [1, 2]},
            2,
            "spec.model.tables[0].pin.ranks: table t is pinned to sharding table-row on ranks of nodes 0, 1: name "
            "ranks of one node, such as 0 to 1, or pin to sharding row",
        ),
    ],
)
def test_pins_to_rows_inside_nodes_need_their_ranks(
    make_spec: MakeSpec, pin: dict[str, Any], processes: int, message: str
) -> None:
    with pytest.raises(InvalidSpecError) as refused:
        plan_job(make_spec([table("t", 10, columnBlock=32, pin=pin)], replicas=2, processesPerReplica=processes))

    assert str(refused.value) == message


def test_a_table_of_several_features_is_looked_up_once_for_each(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = make_profile({"bytes": "64Gi", "readBytesPerSecond": 1e9})

    def seconds(features: list[str]) -> float:
        spec = make_spec([table("t", 10**6, features=features)])
        return plan_job(spec, profile).predicted.lookup_seconds["ddr"]

    calls_s = read_rates(profile, 1, 1, None).alone.part_s
    assert seconds(["a", "b", "c"]) - calls_s == pytest.approx(3 * (seconds(["a"]) - calls_s))


def test_a_range_of_rows_sends_a_vector_for_each_bag_that_has_ids_there(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    profile = make_profile("64Gi", network={"interNodeBytesPerSecond": 1e9})

    def sent(lookups: int) -> float:
        asked = table("t", 10**6, maxLookups=lookups, pin={"sharding": "row"})
        spec = make_spec([asked], batch=1_024, replicas=4)
        dense = 2 * 0.75 * 4 * (2 * 64 + 64 + 64 + 1)  # the cross layer of rank 1 and the top MLP of one layer
        return (plan_job(spec, profile).predicted.communication_seconds or 0) * 1e9 - dense

    for lookups in (1, 3):
        bags = 1_024 * (1 - 0.75**lookups)
        assert sent(lookups) == pytest.approx(0.75 * (1_024 * (lookups / 4 * 4 + 1) + bags * 2 * 64 * 4))


@pytest.mark.parametrize(
    ("codec", "vector"), [("fp32", 64 * 4), ("fp16", 64 * 2), ("bf16", 64 * 2), ("int8", 64 + 4 * 8)]
)
def test_codecs_weights_and_wide_ids_are_counted_on_the_wire(
    make_spec: MakeSpec, make_profile: MakeProfile, codec: str, vector: int
) -> None:
    profile = make_profile("8Ti", network={"interNodeBytesPerSecond": 1e9})
    asked = table("t", 2**31, maxLookups=300, features=["a", "b"], weights=["v", "w"], columnBlock=16)
    spec = make_spec([{**asked, "pin": {"sharding": "table"}}], batch=1_024, replicas=2)
    communication = spec.training.communication.model_copy(update={"forward": codec, "backward": codec})
    training = spec.training.model_copy(update={"communication": communication})

    seconds = plan_job(spec.model_copy(update={"training": training}), profile).predicted.communication_seconds

    dense = 4 * (2 * 128 + 128 + 128 + 1)
    bags = 2 * 1_024
    assert seconds is not None
    assert seconds * 1e9 - dense == pytest.approx(bags * (300 * (8 + 4) + 2 + 2 * vector) / 2)


def test_each_column_block_of_a_table_with_levels_is_a_stack_of_its_own(make_spec: MakeSpec) -> None:
    budgets = {"block": "100Gi", "scm": "1Gi"}
    asked = table("t", 10**6, columnBlock=16, pin={"tier": "block"})
    spec = make_spec([asked], tierBudgets=budgets)

    plan = plan_job(spec)

    slots, places = (level.rows for level in shards(plan)[0].tiers.levels)
    row = (16, "fp32", "rowwise-adagrad")
    block = places * tiers.BLOCK_SLACK * tiers.block_place_bytes(*row)
    ddr = (
        slots * tiers.slot_bytes(*row)
        + 10**6 * (tiers.map_entry_bytes(10**6) + tiers.CHANGED_BYTES)
        + tiers.places_meta_bytes("block", places, last=True)
    )
    held = plan.ranks[0].bytes_per_tier
    assert held["block"] == pytest.approx(4 * block)
    fixed = plan.handoff_bytes[0] + tiers.TIER_BUFFER_BYTES
    scratch = 4 * 2_048 * tiers.slot_bytes(*row)
    assert 4 * ddr <= held["ddr"] - fixed <= 4 * ddr + scratch


def test_a_map_of_many_rows_has_wider_entries(make_spec: MakeSpec) -> None:
    def entry(found: list[dict[str, Any]], ranks: int = 1) -> float:
        spec = make_spec(found, replicas=ranks, tierBudgets={"block": "1000Ti"})
        plan = plan_job(spec)
        rows = sum(each["rows"] for each in found)
        slots = sum(level.rows for t in plan.tables for shard in t.shards for level in shard.tiers.levels[:1])
        held = sum(rank.bytes_per_tier["ddr"] for rank in plan.ranks) - sum(plan.handoff_bytes)
        held -= slots * tiers.slot_bytes(4, "fp32", "rowwise-adagrad")
        held -= rows * (8 * tiers.BLOCK_SLACK + tiers.CHANGED_BYTES)
        return held / rows

    def one(name: str, rows: int) -> dict[str, Any]:
        return table(name, rows, dim=4, pin={"tier": "block", "sharding": "table"})

    assert entry([one("t", 3 * 10**8)]) == pytest.approx(4, abs=0.5)
    assert entry([one("t", 4 * 10**8)]) == pytest.approx(8, abs=0.5)
    assert entry([one("t", 3 * 10**8), one("u", 3 * 10**8)]) == pytest.approx(8, abs=0.5)
    assert entry([one("t", 3 * 10**8), one("u", 3 * 10**8)], ranks=2) == pytest.approx(4, abs=0.7)


@given(
    rows=st.integers(0, 2**40),
    weights=st.lists(st.integers(1, 4), min_size=1, max_size=20),
    caps=st.lists(st.integers(0, 2**40), min_size=20, max_size=20),
)
def test_rows_are_spread_whole_and_within_caps(rows: int, weights: list[int], caps: list[int]) -> None:
    limits = np.array(caps[: len(weights)], np.int64)

    got = spread_rows(rows, np.array(weights, np.int64), limits)

    if got is None:
        assert limits.sum() < rows
        return
    assert sum(got) == rows
    assert all(0 <= each <= limit for each, limit in zip(got, limits.tolist(), strict=True))
    free = [each / weight for each, weight, limit in zip(got, weights, limits.tolist(), strict=True) if each < limit]
    assert not free or max(free) - min(free) <= len(weights)


required = st.sampled_from(
    [*[{"sharding": "row"}] * 4, {"sharding": "column"}, {"sharding": "table-row"}, {"sharding": "grid"}, {}]
)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    found=st.lists(st.tuples(st.integers(1, 400_000), required), min_size=1, max_size=12),
    ddr=st.integers(1, 400),
    has_tiers=st.booleans(),
)
def test_required_splits_of_all_tables_are_those_of_one_after_the_other(
    make_spec: MakeSpec, found: list[tuple[int, dict[str, Any]]], ddr: int, has_tiers: bool
) -> None:
    entries = [table(f"t{i}", rows, 32, pin=pin, columnBlock=8) for i, (rows, pin) in enumerate(found)]
    block = {"block": "100Gi"} if has_tiers else {}
    spec = make_spec(entries, replicas=3, processesPerReplica=2, tierBudgets={"ddr": f"{ddr}Mi", **block})
    problem = read_problem(spec, None, {})
    costs = read_costs(problem)
    capacity = next(TierPlanner(problem).capacities(())) if has_tiers else ddr_capacity(problem, ())
    together, one_by_one = (OptionBuilder(spec, problem.tables, costs, capacity) for _ in range(2))

    together.require()
    for i in capacity.placed:
        one_by_one.add(i, one_by_one.as_pinned(i))

    assert together.options == one_by_one.options
    assert (together.load == one_by_one.load).all()
    assert (together.free == one_by_one.free).all()
