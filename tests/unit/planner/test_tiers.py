"""Plans with slower tiers: every row has a place, no budget is passed, and fast memory goes where it gains most."""

import itertools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlrm_api import tiers
from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, TierShare
from dlrm_planner import plan_job, working_set_bytes
from dlrm_planner.choose import read_problem
from dlrm_planner.hit_rates import table_hit_rates
from dlrm_testing.repeats import repeats
from dlrm_testing.split_rows import range_bytes

MIB, GIB = 2**20, 2**30
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
PLENTY = {"block": "100Ti"}

large_tables = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.integers(1, 10_000_000),
            "dim": st.sampled_from([4, 16, 64, 512]),
            "maxLookups": st.integers(1, 20),
        },
        optional={
            "distribution": st.sampled_from(
                [{"prior": "uniform"}, {"prior": "zipf", "alpha": 0.6}, {"prior": "zipf", "alpha": 1.0}]
            ),
            "pin": st.sampled_from([{"tier": "ddr"}, {"tier": "scm"}, {"tier": "block"}]),
        },
    ),
    min_size=1,
    max_size=12,
)
budgets = st.fixed_dictionaries(
    {"ddr": st.integers(200 * MIB, 3 * GIB), "block": st.integers(1 * GIB, 60 * GIB), "scm": st.integers(1, 4 * GIB)},
    optional={"cxl": st.integers(1, GIB)},
)


def named(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"name": f"t{i}", **table} for i, table in enumerate(found)]


def table(name: str, rows: int, dim: int = 64, **more: Any) -> dict[str, Any]:
    return {"name": name, "rows": rows, "dim": dim, **more}


def share(plan: Plan, name: str) -> TierShare:
    return next(found.shards[0].tiers for found in plan.tables if found.name == name)


def bytes_by_hand(spec: DLRMJobSpec, plan: Plan, pod: int) -> dict[str, float]:
    """Return the bytes of one pod's shards, from dlrm_api.tiers alone."""
    taken: dict[str, float] = {"ddr": 0.0}
    buffered = set()
    accesses = table_hit_rates(read_problem(spec, None, {})).accesses
    for planned, asked, looked_up in zip(plan.tables, spec.model.all_tables(), accesses, strict=True):
        row = (asked.dim, asked.dtype, spec.training.row_optimizer.kind)
        for shard in planned.shards:
            rows = shard.row_end - shard.row_start
            assert (shard.column_start, shard.column_end) == (0, asked.dim)
            if shard.kind == "data":
                replica = tiers.row_bytes(*row) + tiers.CHANGED_BYTES + (asked.dim + 1) * 4
                taken["ddr"] += plan.processes_per_node * rows * replica
                continue
            if shard.rank // plan.processes_per_node != pod:
                continue
            taken["ddr"] += range_bytes(spec, planned, shard) if "row" in shard.kind else 0
            if not shard.tiers.levels:
                taken["ddr"] += rows * (tiers.row_bytes(*row) + tiers.CHANGED_BYTES)
                continue
            buffered.add(shard.rank)
            pad = math.ceil(looked_up * rows / asked.rows)
            first, *below = shard.tiers.levels
            taken["ddr"] += rows * (tiers.map_entry_bytes(rows) + tiers.CHANGED_BYTES)
            taken["ddr"] += (first.rows + pad) * tiers.slot_bytes(*row)
            for number, level in enumerate(below, 1):
                places = level.rows * tiers.BLOCK_SLACK if level.tier == "block" else level.rows
                size = tiers.block_place_bytes(*row) if level.tier == "block" else tiers.record_bytes(*row)
                order = tiers.ORDER_META_BYTES if number < len(below) else 0
                meta = tiers.BLOCK_PLACE_META_BYTES if level.tier == "block" else tiers.PLACE_META_BYTES + order
                taken["ddr"] += places * meta
                taken[level.tier] = taken.get(level.tier, 0.0) + places * size
    free = [table for table in spec.model.all_tables() if table.pin is None or table.pin.tier != "ddr"]
    classes = len({(table.dim, table.dtype) for table in free}) if spec.trainer.tier_budgets.block else 1
    buffers = tiers.TIER_BUFFER_BYTES + max(0, classes - 1) * tiers.CLASS_BUFFER_BYTES
    taken["ddr"] += len(buffered) * buffers + plan.handoff_bytes[pod]
    return taken


def expected_hits(plan: Plan, spec: DLRMJobSpec) -> float:
    """Return the mean expected hit rate of fast memory over equally used tables."""
    rates = []
    for planned in plan.tables:
        levels = planned.shards[0].tiers.levels
        rates.append(1.0 if not levels else levels[0].expected_hit_rate or 0.0)
    assert len(rates) == len(spec.model.all_tables())
    return sum(rates) / len(rates)


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(15, soak=400))
@example(  # hand-off and buffers alone take more than a pod has
    found=[{"rows": 6_690_802, "dim": 16, "maxLookups": 20}],
    given_budgets={"scm": 110_100_334, "ddr": 209_715_200, "block": GIB},
    replicas=3,
    processes=2,
    ways=8,
    lookahead=3,
)
@given(
    found=large_tables,
    given_budgets=budgets,
    replicas=st.integers(1, 3),
    processes=st.integers(1, 2),
    ways=st.sampled_from([0, 8]),
    lookahead=st.integers(0, 3),
)
def test_levels_hold_every_row_and_no_budget_is_passed(
    make_spec: MakeSpec,
    found: list[dict[str, Any]],
    given_budgets: dict[str, int],
    replicas: int,
    processes: int,
    ways: int,
    lookahead: int,
) -> None:
    spec = make_spec(
        named(found),
        replicas=replicas,
        processesPerReplica=processes,
        tierBudgets=given_budgets,
        cache={"ways": ways, "lookahead": lookahead},
    )

    try:
        plan = plan_job(spec)
    except InfeasiblePlanError:
        return

    for planned, asked in zip(plan.tables, spec.model.all_tables(), strict=True):
        for shard in planned.shards:
            levels, rows = shard.tiers.levels, shard.row_end - shard.row_start
            if not levels:
                assert asked.pin is None or asked.pin.tier == "ddr"
                continue
            assert levels[0].tier == "ddr"
            assert [level.tier for level in levels[1:]] == [
                tier for tier in ("cxl", "scm", "block") if tier in {level.tier for level in levels[1:]}
            ]
            assert asked.pin is None or [level.tier for level in levels[1:]] == [asked.pin.tier]
            # Parts that differ by a row have the levels of the larger one.
            assert levels[-1].rows in (rows, rows + 1)
            assert ways == 0 or levels[0].rows % ways == 0
            assert levels[0].rows >= 1
            rates = [level.expected_hit_rate for level in levels]
            assert None not in rates
            assert rates == sorted(rates)
            assert plan.lookahead == lookahead
    for pod in range(plan.nodes):
        said: dict[str, float] = {}
        for rank in plan.ranks:
            for tier, size in rank.bytes_per_tier.items():
                said[tier] = said.get(tier, 0) + size if rank.node == pod else said.get(tier, 0)
        by_hand = bytes_by_hand(spec, plan, pod)
        for tier, size in said.items():
            assert size <= given_budgets[tier]
            assert size == pytest.approx(
                by_hand.get(tier, 0.0), rel=1e-3, abs=200 * sum(len(found.shards) for found in plan.tables)
            )


@pytest.mark.slow
@settings(max_examples=50)
@given(
    found=st.lists(
        st.fixed_dictionaries({"rows": st.integers(1_000, 10_000_000), "dim": st.sampled_from([16, 64])}),
        min_size=1,
        max_size=8,
    ),
    budget=st.integers(250 * MIB, 2 * GIB),
    more=st.integers(0, GIB),
)
def test_more_ddr_never_lowers_the_expected_hit_rate(
    make_spec: MakeSpec, found: list[dict[str, Any]], budget: int, more: int
) -> None:
    uniform = [{**each, "distribution": {"prior": "zipf", "alpha": 0.9}} for each in named(found)]
    handoff = 100 * MIB  # by default it grows with DDR

    def hits(ddr: int) -> float:
        spec = make_spec(uniform, tierBudgets={**PLENTY, "ddr": ddr})
        checkpoint = spec.checkpoint.model_copy(update={"handoff_budget": handoff})
        spec = spec.model_copy(update={"checkpoint": checkpoint})
        try:
            plan = plan_job(spec)
        except InfeasiblePlanError:
            return 0.0
        total = served = 0.0
        for asked in spec.model.all_tables():
            levels = share(plan, asked.name).levels
            weight = accesses(asked.rows)
            total += weight
            served += weight * (1.0 if not levels else levels[0].expected_hit_rate or 0.0)
        return served / total

    assert hits(budget + more) >= hits(budget) - 2e-4  # rates are kept to four digits


def accesses(rows: int, batch: int = 2_048, alpha: float = 0.9) -> float:
    """Return the distinct rows of a batch, summed over rows by a coarse integral."""
    edges = [1.0]
    while edges[-1] < rows + 1:
        edges.append(min(rows + 1.0, max(edges[-1] + 1, edges[-1] * 1.05)))
    weights = [(b - a, (b ** (1 - alpha) - a ** (1 - alpha)) / (1 - alpha)) for a, b in itertools.pairwise(edges)]
    whole = sum(mass for _, mass in weights)
    return sum(width * -math.expm1(-batch * mass / whole / width) for width, mass in weights)


def test_what_fits_ddr_has_no_levels(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table("t", 10**5)], tierBudgets={**PLENTY, "ddr": "1Gi"}))

    assert share(plan, "t").levels == ()
    assert plan.lookahead == 0
    assert set(plan.ranks[0].bytes_per_tier) == {"ddr"}


def test_hot_small_tables_are_whole_in_ddr_before_others_get_slots(make_spec: MakeSpec) -> None:
    small = [table(f"s{i}", 20_000) for i in range(5)]
    plan = plan_job(make_spec([*small, table("big", 10**7)], tierBudgets={**PLENTY, "ddr": "600Mi"}))

    assert all(share(plan, f"s{i}").levels == () for i in range(5))
    assert [level.tier for level in share(plan, "big").levels] == ["ddr", "block"]
    assert any("5 tables whole in DDR" in reason for reason in plan.reasons)
    assert any("1 table with levels, big: of 10000000 rows" in reason for reason in plan.reasons)


def test_slots_go_to_the_table_that_is_looked_up_most(make_spec: MakeSpec) -> None:
    found = [table("busy", 5_000_000, maxLookups=20), table("idle", 5_000_000)]

    plan = plan_job(make_spec(found, tierBudgets={**PLENTY, "ddr": "800Mi"}))

    assert share(plan, "busy").levels[0].rows > 3 * share(plan, "idle").levels[0].rows


def test_the_fastest_tier_that_holds_the_rest_is_the_last(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table("t", 10**7)], tierBudgets={"ddr": "1Gi"})
    node = {"ddr": {"bytes": "64Gi"}, "block": {"bytes": "1Ti"}}

    def last(**slower: Any) -> list[str]:
        found = make_profile("64Gi")
        read = type(found.spec.tiers).model_validate({**node, **slower})
        profile = found.model_copy(update={"spec": found.spec.model_copy(update={"tiers": read})})
        return [level.tier for level in share(plan_job(spec, profile), "t").levels]

    assert last() == ["ddr", "block"]
    assert last(scm={"bytes": "64Gi"}) == ["ddr", "scm"]
    assert last(scm={"bytes": "64Gi"}, cxl={"bytes": "64Gi"}) == ["ddr", "cxl"]
    assert last(scm={"bytes": "1Gi"}) == ["ddr", "scm", "block"]
    assert last(scm={"bytes": "1Gi"}, cxl={"bytes": "64Mi"}) == ["ddr", "cxl", "scm", "block"]


def test_slots_hold_the_distinct_rows_of_the_batches_in_flight(make_spec: MakeSpec) -> None:
    uniform = [table("t", 10**9, dim=4, distribution={"prior": "uniform"}, pin={"tier": "block"})]

    for lookahead in (0, 1, 4):
        batch, lookups = 4_096, 10
        spec = make_spec(
            [{**uniform[0], "maxLookups": lookups}],
            batch=batch,
            tierBudgets={**PLENTY, "ddr": "21Gi"},
            cache={"lookahead": lookahead},
        )

        assert share(plan_job(spec), "t").levels[0].rows >= 0.999 * batch * lookups * (lookahead + 1)


def test_a_pinned_table_keeps_a_tenth_of_its_rows_in_slots(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table("t", 10**6, pin={"tier": "block"}), table("u", 10**6)], tierBudgets=PLENTY))

    assert [level.rows for level in share(plan, "t").levels] == [100_000, 10**6]
    assert share(plan, "u").levels == ()


def test_no_shard_has_more_slots_or_places_between_levels_than_links_name(make_spec: MakeSpec) -> None:
    budgets = {"ddr": "2Ti", "scm": "2Ti", "block": "100Ti"}
    known = plan_job(make_spec([table("t", 2**34)], tierBudgets=budgets))
    unknown = plan_job(make_spec([table("t", 2**36, dim=4, pin={"tier": "block"})], tierBudgets=PLENTY))

    extra = tiers.extra_slots(2**34, 1, 2_048, known.lookahead)
    slots = tiers.MAX_LINKED_SLOTS - extra
    assert [level.rows for level in share(known, "t").levels] == [slots, tiers.MAX_LINKED_SLOTS, 2**34]
    assert [level.rows for level in share(unknown, "t").levels] == [slots, 2**36]


@pytest.mark.parametrize(
    ("more", "path", "says"),
    [
        ({"pin": {"tier": "scm"}}, "spec.model.tables[0].pin.tier", "set trainer.tierBudgets.scm"),
        ({"pin": {"tier": "block", "sharding": "data"}}, "spec.model.tables[0].pin.tier", "keeps replicas in DDR"),
    ],
)
def test_a_tier_pin_that_cannot_be_honoured_is_refused(
    make_spec: MakeSpec, more: dict[str, Any], path: str, says: str
) -> None:
    with pytest.raises(InvalidSpecError, match=re.escape(says)) as refused:
        plan_job(make_spec([table("t", 10**6, **more)], tierBudgets=PLENTY))

    assert refused.value.path == path


def fix_bytes(reasons: tuple[str, ...], start: str) -> int:
    return next(int(found[1]) for reason in reasons if (found := re.match(rf"fix: {start}(\d+)", reason)))


def test_a_missing_tier_is_fixed_by_the_named_bytes(make_spec: MakeSpec) -> None:
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(make_spec([table("t", 10**7)], tierBudgets={"ddr": "1Gi"}))
    block = fix_bytes(refused.value.reasons, "trainer.tierBudgets.block: ")

    plan = plan_job(make_spec([table("t", 10**7)], tierBudgets={"ddr": "1Gi", "block": block}))

    assert plan.ranks[0].bytes_per_tier["block"] <= block
    with pytest.raises(InfeasiblePlanError):
        plan_job(make_spec([table("t", 10**7)], tierBudgets={"ddr": "1Gi", "block": block * 97 // 100}))


def test_the_fix_of_a_claimed_tier_names_enough_bytes(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table(f"t{i}", 6_000_000 + i) for i in range(4)], tierBudgets={"ddr": "1Gi"})

    def node(size: int) -> HardwareProfile:
        block = {"bytes": size, "storageClass": "nvme"}
        return make_profile("16Gi", tiers={"ddr": {"bytes": "16Gi"}, "block": block})

    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(spec, node(GIB))
    said = next(reason for reason in refused.value.reasons if reason.startswith("fix: block of "))
    enough = int(re.search(r"tiers\.block\.bytes \((\d+) of them: ", said)[1])  # type: ignore[index]

    plan = plan_job(spec, node(enough))
    assert enough * 0.9 < tiers.claim_bytes(plan.ranks[0].bytes_per_tier["block"]) <= enough


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_tier_that_is_too_small_is_named_with_fixes_that_work(make_spec: MakeSpec, replicas: int) -> None:
    found = [table(f"t{i}", 6_000_000 + i) for i in range(4)]
    small = {"ddr": "1Gi", "block": "1Gi"}
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(make_spec(found, replicas=replicas, tierBudgets=small))
    block = fix_bytes(refused.value.reasons, "block of ")
    ddr = fix_bytes(refused.value.reasons, r"raise trainer\.tierBudgets\.ddr by ")

    assert "do not fit the slower tiers of a pod (block 1.0 GiB): block is " in refused.value.reasons[0]
    for larger in ({**small, "block": block}, {**small, "ddr": GIB + ddr}):
        assert plan_job(make_spec(found, replicas=replicas, tierBudgets=larger)).nodes == replicas


def test_a_table_pinned_to_ddr_is_refused_as_a_whole(make_spec: MakeSpec) -> None:
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(make_spec([table("t", 10**7, pin={"tier": "ddr"})], tierBudgets={**PLENTY, "ddr": "1Gi"}))

    assert f"with row state it takes {10**7 * 261} bytes" in refused.value.reasons[0]


def test_slots_that_do_not_fit_are_fixed_by_ddr_or_a_shorter_lookahead(make_spec: MakeSpec) -> None:
    busy = table("busy", 10**7, maxLookups=100, distribution={"prior": "uniform"})
    tight = {**PLENTY, "ddr": "800Mi"}
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(make_spec([busy], batch=8_192, tierBudgets=tight))
    more = fix_bytes(refused.value.reasons, r"raise trainer\.tierBudgets\.ddr by ")

    assert re.search(
        r"table busy .*: with slots for \d+ rows, those of 2 batches in flight, .* bytes short", str(refused.value)
    )
    assert plan_job(make_spec([busy], batch=8_192, tierBudgets={**tight, "ddr": 800 * MIB + more})).lookahead == 1
    assert "fix: trainer.cache.lookahead: 0 needs slots for one batch alone, and hides no reads" in (
        refused.value.reasons
    )
    assert share(plan_job(make_spec([busy], batch=8_192, tierBudgets=tight, cache={"lookahead": 0})), "busy").levels


def test_the_memory_of_a_pod_is_its_working_set_and_its_ddr(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table("t", 10**8)], tierBudgets=PLENTY)
    node = 8 * GIB

    plan = plan_job(spec, make_profile(node))

    assert node * 0.99 < working_set_bytes(spec) + plan.ranks[0].bytes_per_tier["ddr"] <= node


@pytest.mark.parametrize("tier", ["scm", "block"])
def test_slow_tiers_are_timed_by_their_rates(make_spec: MakeSpec, make_profile: MakeProfile, tier: str) -> None:
    node: dict[str, Any] = {
        "ddr": {"bytes": "6Gi", "readBytesPerSecond": 1e10, "writeBytesPerSecond": 1e10},
        tier: {
            "bytes": "1Ti",
            "readIops": 1e5,
            "writeIops": 5e4,
            "readBytesPerSecond": 1e9,
            "writeBytesPerSecond": 5e8,
        },
    }
    profile = make_profile("6Gi", flopsPerSecond=1e12, network={"intraNodeBytesPerSecond": 1e9})
    read = type(profile.spec.tiers).model_validate(node)
    profile = profile.model_copy(update={"spec": profile.spec.model_copy(update={"tiers": read})})
    uniform = table("t", 10**8, distribution={"prior": "uniform"})

    plan = plan_job(make_spec([uniform], batch=8_192), profile)

    misses = 8_192 * (1 - (share(plan, "t").levels[0].expected_hit_rate or 0))
    record = 4 * (64 + 1 + 1)
    in_sequence = misses / 1e5 + misses * record / 5e8  # pages are read one by one, segments of records written
    seconds = in_sequence if tier == "block" else misses / 1e5 + misses / 5e4
    assert plan.predicted.lookup_seconds[tier] == pytest.approx(seconds, rel=0.01)
    assert plan.predicted.samples_per_second
    # Some rows share a page.
    assert plan.predicted.samples_per_second <= 1.01 * 8_192 / plan.predicted.lookup_seconds[tier]


@pytest.mark.slow
def test_five_thousand_tables_are_tiered(make_spec: MakeSpec, capsys: pytest.CaptureFixture[str]) -> None:
    many = [
        table(f"t{i}", 100 + i * i % 900_001 * 10, dim=16 * (1 + i % 4), maxLookups=1 + i % 9) for i in range(5_000)
    ]
    spec = make_spec(many, replicas=4, tierBudgets={"ddr": "160Gi", "scm": "100Gi", "block": "2Ti"})

    start = time.perf_counter()
    plan = plan_job(spec)
    seconds = time.perf_counter() - start

    with capsys.disabled():
        print(f"\n5,000 tables over 4 pods and 3 tiers: planned in {seconds:.2f} s")
    assert any(found.shards[0].tiers.levels for found in plan.tables)
    assert max(sum(r.bytes_per_tier["ddr"] for r in plan.ranks if r.node == pod) for pod in range(4)) <= 160 * GIB
    # Rows of few bytes go to scm, where they take little of its bandwidth.
    assert expected_hits(plan, spec) > 0.35


@pytest.mark.parametrize(("tier", "each"), [("block", tiers.CLASS_BUFFER_BYTES), ("scm", 0)])
def test_buffers_of_each_class_of_rows_are_counted(make_spec: MakeSpec, tier: str, each: int) -> None:
    def buffers(*kinds: dict[str, Any]) -> int:
        found = [{"rows": 100_000, "dim": 16, "pin": {"tier": tier}, **kind} for kind in kinds]
        plan = plan_job(make_spec(named(found), tierBudgets={"ddr": "4Gi", tier: "4Gi"}))
        by_shards = bytes_by_hand(make_spec(named(found)), plan, 0)["ddr"]
        return round((plan.ranks[0].bytes_per_tier["ddr"] - by_shards) / MIB) * MIB

    assert buffers({}, {}) == 0
    assert buffers({}, {"dim": 32}, {"dtype": "fp16"}, {"dtype": "fp16"}) == 2 * each
    assert buffers({}, {"dim": 32, "pin": {"tier": "ddr"}}) == 0


def test_tables_are_whole_in_ddr_if_slow_tiers_cannot_back_all_slots(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    found = [{"name": f"t{i}", "rows": 192_000_000, "dim": 64} for i in range(3)]
    spec = make_spec(found, batch=8_192, replicas=1, tierBudgets={"block": "80Gi"})

    plan = plan_job(spec, make_profile("128Gi"))

    assert sorted(len(table.shards[0].tiers.levels) for table in plan.tables) == [0, 0, 2]
    assert plan.ranks[0].bytes_per_tier["block"] <= 80 * 2**30
