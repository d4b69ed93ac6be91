"""Plans for GPUs: every row has a place, no GPU and no pod is given more than it has, and what cannot be is refused."""

import math
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api import tiers
from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile, Measured, parse_profile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, Prediction, TierShare, parse_plan
from dlrm_api.row_optimizers import RowOptimizerKind
from dlrm_api.training import RowOptimizerSpec, TrainingSpec
from dlrm_planner import checkpointer_bytes, choose_plan, plan_job, working_set_bytes
from dlrm_planner.fit import LOOPS, Scaled, scale_profile
from dlrm_planner.memory import CHECKPOINTER_BASE_BYTES, CONTEXT_BYTES, KEY_SORT_BYTES, device_working_bytes
from dlrm_planner.rates import DEFAULT_LOOPS
from dlrm_planner.tables import UPDATED_LOOKUP_BYTES, activation_bytes, update_bytes
from dlrm_testing.repeats import repeats

MIB, GIB = 2**20, 2**30
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
HOST_PINS: tuple[dict[str, Any], ...] = ({"tier": "ddr"}, {"tier": "block"})

some_tables = st.lists(
    st.fixed_dictionaries(
        {
            "rows": st.integers(1, 20_000_000),
            "dim": st.sampled_from([4, 16, 64, 512]),
            "maxLookups": st.integers(1, 20),
        },
        optional={
            "distribution": st.sampled_from([{"prior": "uniform"}, {"prior": "zipf", "alpha": 0.8}]),
            "dtype": st.just("fp16"),
            "columnBlock": st.just(4),
            "pin": st.sampled_from([*HOST_PINS, {"tier": "hbm"}, {"sharding": "row"}, {"sharding": "data"}]),
        },
    ),
    min_size=1,
    max_size=10,
)


def gpus(count: int = 8, hbm: Any = "80Gi", **more: Any) -> dict[str, Any]:
    tier = hbm if isinstance(hbm, dict) else {"bytes": hbm}
    return {"resource": "nvidia.com/gpu", "count": count, "hbm": tier, **more}


def with_tiers(profile: HardwareProfile, **sizes: Any) -> HardwareProfile:
    """Return the profile with slower tiers."""
    tiers_of = profile.spec.tiers.model_dump(mode="json", exclude_none=True)
    for tier, size in sizes.items():
        tiers_of[tier] = size if isinstance(size, dict) else {"bytes": size}
    known = type(profile.spec.tiers).model_validate(tiers_of)
    return profile.model_copy(update={"spec": profile.spec.model_copy(update={"tiers": known})})


def table(name: str, rows: int, dim: int = 64, **more: Any) -> dict[str, Any]:
    return {"name": name, "rows": rows, "dim": dim, **more}


def share(plan: Plan, name: str) -> TierShare:
    return next(found.shards[0].tiers for found in plan.tables if found.name == name)


def bytes_on_gpu(spec: DLRMJobSpec, plan: Plan, rank: int) -> int:
    """Return the bytes of a rank's shards on its GPU as the trainer makes them, from dlrm_api.tiers alone."""
    taken, optimizer = 0, spec.training.row_optimizer.kind
    for planned, asked in zip(plan.tables, spec.model.all_tables(), strict=True):
        width = asked.column_block or asked.dim
        row = tiers.row_bytes(width, asked.dtype, optimizer)
        for shard in (shard for shard in planned.shards if shard.kind == "data" or shard.rank == rank):
            rows, blocks = shard.row_end - shard.row_start, (shard.column_end - shard.column_start) // width
            if shard.kind == "data":
                taken += blocks * rows * (row + width * 4)
            elif shard.tiers.levels and shard.tiers.levels[0].tier == "hbm":
                mean, most = (each * len(asked.sources) for each in (asked.lookups, asked.max_lookups))
                extra = tiers.device_extra_slots(rows, mean, most, spec.data.global_batch_size)
                if shard.tiers.is_stack:
                    row_here, extra_here = row + tiers.DIRECTORY_BYTES, extra
                else:
                    row_here, extra_here = row, 0
                taken += blocks * (min(rows, shard.tiers.levels[0].rows) + extra_here) * row_here
    return taken


def check_levels(spec: DLRMJobSpec, plan: Plan) -> None:
    """Check the trainer's requirements of a plan for GPUs."""
    for planned, asked in zip(plan.tables, spec.model.all_tables(), strict=True):
        pin = asked.pin.tier if asked.pin else None
        held = Counter[tuple[int, int]]()
        for shard in planned.shards:
            held[shard.column_start, shard.column_end] += shard.row_end - shard.row_start
            levels, rows = shard.tiers.levels, shard.row_end - shard.row_start
            if shard.kind == "data":
                assert not levels
                continue
            if pin == "ddr":
                assert not levels
                continue
            assert 1 <= len(levels) <= 4
            assert [level.tier for level in levels] == sorted(
                {level.tier for level in levels}, key=["hbm", "ddr", "cxl", "scm", "block"].index
            )
            assert levels[0].tier == ("ddr" if pin == "block" else "hbm")
            # Even parts have the levels of the largest.
            alike = {shard.row_end - shard.row_start for shard in planned.shards}
            rows = rows + 1 if max(alike) - min(alike) == 1 and rows == min(alike) else rows
            assert levels[-1].rows == rows
            assert 1 <= levels[0].rows <= rows or pin == "block"
            if pin == "hbm":
                assert [level.rows for level in levels] == [rows]
                assert levels[0].expected_hit_rate == 1
            rates = [level.expected_hit_rate for level in levels]
            assert None not in rates
            assert rates == sorted(rates)
        if all(shard.kind != "data" for shard in planned.shards):
            assert sum((end - start) * rows for (start, end), rows in held.items()) == asked.rows * asked.dim


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(25, soak=500))
@given(
    found=some_tables,
    hbm=st.integers(2_200 * MIB, 20 * GIB),
    ddr=st.integers(16 * GIB, 64 * GIB),
    block=st.none() | st.integers(GIB, 200 * GIB),
    replicas=st.integers(1, 3),
    processes=st.integers(1, 2),
    ways=st.sampled_from([0, 0, 8]),
    lookahead=st.integers(0, 2),
)
def test_rows_have_places_and_nothing_gets_more_than_it_has(
    make_spec: MakeSpec,
    make_profile: MakeProfile,
    found: list[dict[str, Any]],
    hbm: int,
    ddr: int,
    block: int | None,
    replicas: int,
    processes: int,
    ways: int,
    lookahead: int,
) -> None:
    named = [{"name": f"t{i}", **each} for i, each in enumerate(found)]
    cache = {"ways": ways, "lookahead": lookahead}
    spec = make_spec(named, replicas=replicas, processesPerReplica=processes, cache=cache)
    profile = make_profile(ddr, devices=gpus(2, hbm))
    profile = profile if block is None else with_tiers(profile, block=block)

    try:
        plan = plan_job(spec, profile)
    except InvalidSpecError:
        return

    assert plan.device == "cuda"
    assert parse_plan(plan.model_dump_json()) == plan
    check_levels(spec, plan)
    for rank in plan.ranks:
        said, by_hand = rank.bytes_per_tier["hbm"], bytes_on_gpu(spec, plan, rank.rank)
        assert said <= hbm
        assert by_hand <= said - device_working_bytes(spec) <= by_hand * 1.3 + MIB  # flags of replicas are ours alone
    for pod in range(plan.nodes):
        held = Counter[str]()
        for rank in plan.ranks:
            held.update(rank.bytes_per_tier if rank.node == pod else {})
        assert held["ddr"] + working_set_bytes(spec, "cuda") <= ddr
        assert held["block"] <= (block or 0)


@settings(max_examples=30)
@given(rows=st.lists(st.integers(1_000, 5_000_000), min_size=1, max_size=6), more=st.integers(0, 4 * GIB))
def test_more_hbm_never_lowers_the_share_that_it_serves(
    make_spec: MakeSpec, make_profile: MakeProfile, rows: list[int], more: int
) -> None:
    spec = make_spec([table(f"t{i}", count) for i, count in enumerate(rows)])

    def served(hbm: int) -> float:
        plan = plan_job(spec, make_profile("64Gi", devices=gpus(1, hbm)))
        rates = [planned.shards[0].tiers.levels[0].expected_hit_rate or 0.0 for planned in plan.tables]
        return sum(rates)

    assert served(4 * GIB + more) >= served(4 * GIB) - 1e-3 * len(rows)


def test_tables_that_hbm_holds_lie_there_whole(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table("small", 1_000), table("large", 10**6)])

    plan = plan_job(spec, make_profile("64Gi", devices=gpus(1)))

    for name, rows in (("small", 1_000), ("large", 10**6)):
        assert [(level.tier, level.rows) for level in share(plan, name).levels] == [("hbm", rows)]
    rows = 10**6 + 1_000
    held = plan.ranks[0].bytes_per_tier
    assert held["hbm"] - device_working_bytes(spec) == rows * (64 * 4 + 4)
    assert held["ddr"] - plan.handoff_bytes[0] <= rows  # of what tells which rows changed
    assert any("2 tables whole in HBM: small, large" in reason for reason in plan.reasons)
    assert plan.lookahead == 0


def test_slots_in_hbm_are_backed_by_ddr_and_then_by_slower_tiers(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    spec = make_spec([table("large", 10**8)])
    small = make_profile("8Gi", devices=gpus(1, "4Gi"))

    in_ddr = share(plan_job(spec, make_profile("64Gi", devices=gpus(1, "4Gi"))), "large")
    below = share(plan_job(spec, with_tiers(small, block="200Gi")), "large")

    assert [level.tier for level in in_ddr.levels] == ["hbm", "ddr"]
    assert [level.tier for level in below.levels] == ["hbm", "ddr", "block"]
    assert below.levels[1].rows > 0
    assert below.levels[-1].rows == 10**8


def test_of_four_slower_tiers_a_stack_has_the_slowest_two(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = with_tiers(make_profile("8Gi", devices=gpus(1, "4Gi")), cxl="1Gi", scm="1Gi", block="200Gi")

    levels = share(plan_job(make_spec([table("large", 10**8)]), profile), "large").levels

    assert [level.tier for level in levels] == ["hbm", "ddr", "scm", "block"]


def test_hbm_spares_ddr_whole_tables_where_ddr_is_too_small(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table(f"t{i}", 10**7) for i in range(10)])  # 26 GB

    plan = plan_job(spec, make_profile("18Gi", devices=gpus(1, "24Gi")))

    whole = [planned.name for planned in plan.tables if planned.shards[0].tiers.levels[0].rows == 10**7]
    assert 3 <= len(whole) < 10
    check_levels(spec, plan)


def test_a_table_pinned_to_hbm_that_no_gpu_holds_is_split_over_several(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    spec = make_spec([table("pinned", 10**8, pin={"tier": "hbm"})], processesPerReplica=4)  # 26 GB

    plan = plan_job(spec, make_profile("64Gi", devices=gpus(4, "16Gi")))

    assert len(plan.tables[0].shards) > 1
    check_levels(spec, plan)
    assert max(rank.bytes_per_tier["hbm"] for rank in plan.ranks) <= 16 * GIB


def test_pins_to_the_host_keep_slots_there(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    pinned = [table("ddr", 10**5, pin={"tier": "ddr"}), table("block", 10**5, pin={"tier": "block"}), table("free", 10)]

    plan = plan_job(make_spec(pinned), with_tiers(make_profile("64Gi", devices=gpus(1)), block="10Gi"))

    assert share(plan, "ddr").levels == ()
    assert [level.tier for level in share(plan, "block").levels] == ["ddr", "block"]
    assert [level.tier for level in share(plan, "free").levels] == ["hbm"]
    assert any("pinned to the host" in reason and "ddr, block" in reason for reason in plan.reasons)


def test_replicas_lie_in_hbm_with_their_gradients(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    replicated = table("r", 10**6, pin={"sharding": "data"})
    spec = make_spec([replicated, table("other", 10)], processesPerReplica=2)

    plan = plan_job(spec, make_profile("64Gi", devices=gpus(2)))

    assert {shard.kind for shard in plan.tables[0].shards} == {"data"}
    for rank in plan.ranks:
        assert rank.bytes_per_tier["hbm"] - device_working_bytes(spec) >= 10**6 * (2 * 64 * 4 + 4)
        assert rank.bytes_per_tier["ddr"] <= sum(plan.handoff_bytes) + tiers.TIER_BUFFER_BYTES + MIB


@pytest.mark.parametrize(
    ("devices", "trainer", "pin", "device"),
    [
        (None, {}, None, "cpu"),
        (gpus(1), {}, None, "cuda"),
        (gpus(1), {}, {"tier": "ddr"}, "cuda"),
        ("no profile", {}, None, "cpu"),
        ("no profile", {"tierBudgets": {"hbm": "20Gi"}}, None, "cuda"),
        ("no profile", {}, {"tier": "hbm"}, "cuda"),
    ],
)
def test_where_ranks_compute(
    make_spec: MakeSpec, make_profile: MakeProfile, devices: Any, trainer: Any, pin: Any, device: str
) -> None:
    profile = None if devices == "no profile" else make_profile("64Gi", **({"devices": devices} if devices else {}))
    spec = make_spec([table("t", 1_000, **({"pin": pin} if pin else {}))], **trainer)

    plan = plan_job(spec, profile)

    assert plan.device == device
    assert ("hbm" in plan.ranks[0].bytes_per_tier) == (device == "cuda")


def test_what_hosts_spend_on_computing_is_not_asked_of_them(make_spec: MakeSpec) -> None:
    spec = make_spec([table("t", 1_000, dim=512)], batch=2**18)

    on_host, with_gpus = working_set_bytes(spec), working_set_bytes(spec, "cuda")

    assert device_working_bytes(spec) - CONTEXT_BYTES > GIB
    assert with_gpus - CHECKPOINTER_BASE_BYTES < 4 * GIB
    assert on_host > activation_bytes(spec) > GIB


def test_updates_that_fbgemm_does_not_make_take_memory_of_a_gpu(make_spec: MakeSpec) -> None:
    def updates(kind: RowOptimizerKind, *dtypes: str, deterministic: bool = False, **more: Any) -> int:
        tables = [table(f"t{i}", 9_000, maxLookups=20, dtype=dtype) for i, dtype in enumerate(dtypes)]
        spec = make_spec(tables, **more)
        training = TrainingSpec(row_optimizer=RowOptimizerSpec(kind=kind), deterministic=deterministic)
        return update_bytes(spec.model_copy(update={"training": training}))

    of_one = 20 * 2_048 * UPDATED_LOOKUP_BYTES
    assert updates("rowwise-adagrad", "fp32", "fp32") == 0
    assert updates("adam", "fp32") == updates("sgd", "fp16") == of_one
    assert updates("sgd", "fp32", deterministic=True) == of_one
    assert updates("adam", "fp32", "fp32", "fp16") == 2 * of_one
    assert updates("rowwise-adagrad", "fp32", "fp16") == of_one
    assert updates("adam", "fp32", replicas=2) == of_one // 2
    one, two = (make_spec([table("t", 9_000, dtype=dtype)]) for dtype in ("fp32", "fp16"))
    assert device_working_bytes(two) - device_working_bytes(one) == update_bytes(two)


def test_nothing_known_of_hbm_gives_slots_to_a_tenth_and_is_said(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec([table("in", 10**5, pin={"tier": "hbm"}), table("free", 10**6)]))

    assert share(plan, "in").levels[0].rows == 10**5
    assert share(plan, "free").levels[0].rows == pytest.approx(10**5, rel=0.01)
    assert any("not checked against memory: neither devices" in reason for reason in plan.reasons)


@pytest.mark.parametrize(
    ("more", "trainer", "devices", "path", "words"),
    [
        (
            {},
            {"tierBudgets": {"hbm": "1Gi"}},
            None,
            "spec.trainer.tierBudgets.hbm",
            "GPU memory is requested, but HardwareProfile big has no devices: name hardware that has some, or "
            "leave it out",
        ),
        ({"pin": {"tier": "hbm"}}, {}, None, "spec.model.tables[0].pin.tier", "HardwareProfile big has no devices"),
        (
            {},
            {"processesPerReplica": 3},
            gpus(2),
            "spec.trainer.processesPerReplica",
            "3 processes take one nvidia.com/gpu each, and a node of HardwareProfile big has 2: use fewer processes "
            "and more replicas",
        ),
        (
            {},
            {"processesPerReplica": 2, "resources": {"limits": {"nvidia.com/gpu": "1"}}},
            gpus(2),
            "spec.trainer.resources.limits[nvidia.com/gpu]",
            "1 is not one device for each of 2 processes: leave it out, or make it 2",
        ),
        (
            {"dim": 4_096},
            {},
            gpus(1),
            "spec.model.tables[0].columnBlock",
            "table t has column blocks of 4096 columns, and fbgemm's kernels take at most 2048 on a GPU: give it a "
            "columnBlock of no more, or pin.tier: ddr",
        ),
        (
            {"pin": {"sharding": "data", "tier": "ddr"}},
            {"processesPerReplica": 2},
            gpus(2),
            "spec.model.tables[0].pin.tier",
            "pinned to sharding data, which keeps replicas in hbm",
        ),
    ],
)
def test_what_gpus_cannot_do_is_refused_with_field_and_fix(
    make_spec: MakeSpec, make_profile: MakeProfile, more: Any, trainer: Any, devices: Any, path: str, words: str
) -> None:
    profile = make_profile("64Gi", **({"devices": devices} if devices else {}))

    with pytest.raises(InvalidSpecError) as refused:
        plan_job(make_spec([{**table("t", 1_000), **more}], **trainer), profile)

    assert refused.value.path == path
    assert words in str(refused.value)


@pytest.mark.parametrize("fix", [{"columnBlock": 2_048}, {"pin": {"tier": "ddr"}}])
def test_the_fixes_of_wide_rows_are_enough(make_spec: MakeSpec, make_profile: MakeProfile, fix: dict[str, Any]) -> None:
    spec = make_spec([{**table("t", 1_000, dim=4_096), **fix}])

    assert plan_job(spec, make_profile("64Gi", devices=gpus(1))).device == "cuda"


def refusal(spec: DLRMJobSpec, profile: HardwareProfile | None = None) -> tuple[str, ...]:
    with pytest.raises(InfeasiblePlanError) as refused:
        plan_job(spec, profile)
    assert refused.value.path == "spec.trainer"
    return tuple(refused.value.reasons)


def test_too_little_hbm_is_reported_with_its_use_and_fixes_that_work(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    tables = [table("t", 10**7, pin={"tier": "hbm"})]
    needed = 10**7 * (64 * 4 + 4)

    reasons = refusal(make_spec(tables), make_profile("64Gi", devices=gpus(1, "4Gi")))

    free = 4 * GIB - device_working_bytes(make_spec(tables))
    assert reasons[0] == (
        "table t (10000000 rows x 64) does not fit on the GPU of rank 0 on node 0, which has most free memory: "
        f"with all rows, as pinned, it takes {needed} bytes, "
        f"and {free} bytes are free: {needed - free} bytes short"
    )
    assert reasons[1].startswith(
        f"a rank has {free} bytes for tables: 4.0 GiB HBM of a device of a big node, less 2.0 GiB for CUDA, "
    )
    more = int(re.search(r"^fix: raise HBM per device \(HardwareProfile big\) by (\d+) bytes", reasons[2])[1])  # type: ignore[index]
    assert plan_job(make_spec(tables), make_profile("64Gi", devices=gpus(1, 4 * GIB + more)))
    refusal(make_spec(tables), make_profile("64Gi", devices=gpus(1, 4 * GIB + more - 20 * MIB)))
    assert "fix: spec.model.tables[0].pin.tier: ddr keeps the table on the host, looked up there" in reasons
    assert reasons[-1].startswith("fix: trainer.replicas: 2 of the same hardware")
    assert plan_job(make_spec(tables, replicas=2), make_profile("64Gi", devices=gpus(1, "4Gi")))


def test_slots_too_large_for_a_gpu_are_reported_with_the_batches(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    spec = make_spec([table("t", 10**8, maxLookups=1_000)])

    reasons = refusal(spec, make_profile("64Gi", devices=gpus(1, "2260Mi")))

    assert reasons[0].startswith("table t (100000000 rows x 64) does not fit on the GPU of rank 0 on node 0")
    assert "rows, and scratch slots for the lookups of two batches, it takes" in reasons[0]


def test_a_table_of_which_few_lookups_are_usual_has_more_slots(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = make_profile("64Gi", devices=gpus(1, "8Gi"))
    usual, most = (table("t", 10**8, maxLookups=100, **more) for more in ({"avgLookups": 10}, {}))

    plans = [plan_job(make_spec([each], batch=65_536), profile) for each in (usual, most)]

    slots = [share(plan, "t").levels[0].rows for plan in plans]
    assert slots[0] > slots[1] + 10**7


def test_the_budget_fix_counts_all_processes(make_spec: MakeSpec) -> None:
    tables = [table("t", 3 * 10**7, pin={"tier": "hbm"})]

    def spec(hbm: int) -> DLRMJobSpec:
        return make_spec(tables, processesPerReplica=2, tierBudgets={"hbm": hbm})

    reasons = refusal(spec(6 * GIB))
    found = next(match for each in reasons if (match := re.search(r"raise trainer.tierBudgets.hbm by (\d+)", each)))
    plan = plan_job(spec(6 * GIB + int(found[1])))

    assert sum(rank.bytes_per_tier["hbm"] for rank in plan.ranks) <= 6 * GIB + int(found[1])


def test_a_gpu_too_small_for_the_dense_part_is_said_so(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    reasons = refusal(make_spec([table("t", 10)]), make_profile("64Gi", devices=gpus(1, "1Gi")))

    assert "does not fit on the GPU of rank 0 on node 0: replicated tables" in reasons[0]
    assert any(reason.startswith("fix: raise HBM per device") for reason in reasons)


@pytest.mark.parametrize("pin", [{"ranks": [1]}, {"sharding": "data"}, {}])
def test_a_node_too_small_for_its_processes_is_refused_without_tables(
    make_spec: MakeSpec, make_profile: MakeProfile, pin: dict[str, Any]
) -> None:
    spec = make_spec([table("a", 1_000, pin=pin)], replicas=2)

    reasons = refusal(spec, make_profile("1Gi", devices=gpus()))

    assert "table a (1000 rows x 64) does not fit on rank 0 on node 0: replicated tables, the hand-off" in reasons[0]
    more = re.search(r"fix: raise DDR per node \(HardwareProfile big\) by (\d+) bytes", " ".join(reasons))
    assert more is not None
    assert plan_job(spec, make_profile(GIB + int(more[1]), devices=gpus())).device == "cuda"


def test_rows_that_neither_hbm_nor_ddr_holds_are_reported(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table("t", 10**8)], replicas=1)  # 26 GB

    reasons = refusal(spec, make_profile("16Gi", devices=gpus(1, "8Gi")))

    assert reasons[0].startswith("rows that HBM does not hold, and metadata of rows, do not fit DDR: it is ")
    more = int(re.search(r"raise DDR per node \(HardwareProfile big\) by (\d+) bytes", " ".join(reasons))[1])  # type: ignore[index]
    assert plan_job(spec, make_profile(16 * GIB + more, devices=gpus(1, "8Gi")))
    assert any("trainer.tierBudgets.block" in reason for reason in reasons)


PROFILE_OF_LOOPS = {
    "metadata": {"name": "loops"},
    "spec": {
        "tiers": {"ddr": {"bytes": "1Gi"}},
        "loops": [each.model_dump(mode="json", exclude_none=True) for each in DEFAULT_LOOPS],
    },
}
RATES: dict[str, Any] = {
    "flopsPerSecond": 1e9,
    "network": {"intraNodeBytesPerSecond": 1e11, "interNodeBytesPerSecond": 1e10},
    "pricePerHour": 36,
}
HBM = {"bytes": "4Gi", "readBytesPerSecond": 1e12, "writeBytesPerSecond": 5e11}
DDR = {"bytes": "64Gi", "readBytesPerSecond": 1e10, "writeBytesPerSecond": 1e10}


def test_times_of_a_gpu_are_its_own_and_misses_cross_the_link(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec([table("t", 10**8, maxLookups=4)], batch=8_192)
    devices = gpus(1, HBM, flopsPerSecond=1e14, hostBytesPerSecond=2e10)

    plan = plan_job(spec, make_profile(DDR, devices=devices, **RATES))

    predicted, levels = plan.predicted, plan.tables[0].shards[0].tiers.levels
    dense = 2 * 64 * 1 + 64 + 64 + 1
    assert predicted.compute_seconds == pytest.approx(6 * 8_192 * dense / 1e14)
    assert predicted.lookup_seconds["hbm"] == pytest.approx(8_192 * 4 * 64 * 4 * (2 / 1e12 + 1 / 5e11))
    assert levels[0].expected_hit_rate is not None
    assert levels[0].expected_hit_rate < 1
    assert 0 < predicted.lookup_seconds["ddr"] <= 8_192 * 4 * (64 * 4 + 8) * (2 / 1e10 + 1 / 2e10)
    assert predicted.hit_rates == pytest.approx(
        {"hbm": levels[0].expected_hit_rate, "ddr": 1 - levels[0].expected_hit_rate}, abs=1e-3
    )
    assert sum(predicted.stage_seconds.values()) == pytest.approx(predicted.step_seconds)
    assert predicted.step_seconds is not None
    assert predicted.step_seconds >= predicted.lookup_seconds["hbm"] + predicted.compute_seconds
    assert predicted.samples_per_second == pytest.approx(8_192 / predicted.step_seconds)
    rate = predicted.samples_per_second
    assert rate is not None
    assert predicted.price_per_billion_samples == pytest.approx(36 / 3_600 * 1e9 / rate)


@pytest.mark.parametrize("missing", ["flopsPerSecond", "hostBytesPerSecond", "readBytesPerSecond"])
def test_without_a_rate_of_a_device_there_is_no_prediction_and_it_is_named(
    make_spec: MakeSpec, make_profile: MakeProfile, missing: str
) -> None:
    rates = {"flopsPerSecond": 1e14, "hostBytesPerSecond": 2e10}
    hbm = {"bytes": "4Gi"} if missing == "readBytesPerSecond" else HBM
    profile = make_profile(DDR, devices=gpus(1, hbm, **{k: v for k, v in rates.items() if k != missing}), **RATES)
    tables = [table("t", 10**8, maxLookups=4)]

    assert plan_job(make_spec(tables), profile).predicted.samples_per_second is None

    with pytest.raises(InvalidSpecError) as refused:
        choose_plan(make_spec(tables, objective={"maxReplicas": 2, "samplesPerSecond": 1}), [profile])
    absent = f"devices.{'hbm.' if missing == 'readBytesPerSecond' else ''}{missing}"
    assert f"has no {absent}, devices.loops;" in str(refused.value)


def of_gpus(times: float = 0.01, moved_row_s: float | None = 1e-8) -> list[dict[str, Any]]:
    """Return loops of GPUs that take so many times what the host's do."""
    kinds = {Scaled(processes, kind): times for kind in LOOPS for processes in (1, 2)}
    loops = scale_profile(parse_profile(PROFILE_OF_LOOPS), kinds).spec.loops
    moved = None if moved_row_s is None else Measured(seconds=moved_row_s)
    return [each.model_copy(update={"moved_row": moved}).model_dump(mode="json", exclude_none=True) for each in loops]


def test_measured_loops_calibrate_a_plan_for_gpus_and_faster_ones_shorten_it(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    spec = make_spec([table("t", 10**8, maxLookups=4)], batch=8_192)

    def predicted(**devices: Any) -> Prediction:
        return plan_job(spec, make_profile(DDR, devices=gpus(1, HBM, **devices), **RATES)).predicted

    stated = predicted(flopsPerSecond=1e14, hostBytesPerSecond=2e10)
    slow, fast = (predicted(hostBytesPerSecond=2e10, loops=of_gpus(times)) for times in (20.0, 2.0))
    unmoved = predicted(hostBytesPerSecond=2e10, loops=of_gpus(moved_row_s=None))

    assert stated.uncalibrated == ("devices.loops",)
    assert unmoved.uncalibrated == ("devices.loops.movedRow",)
    assert slow.uncalibrated == fast.uncalibrated == ()
    assert slow.compute_seconds == pytest.approx(10 * (fast.compute_seconds or 0), rel=1e-6)
    assert slow.lookup_seconds["hbm"] == pytest.approx(10 * fast.lookup_seconds["hbm"], rel=1e-6)
    assert (slow.samples_per_second or 0) < (fast.samples_per_second or 0)


@pytest.mark.parametrize(("processes", "loops"), [(1, []), (2, of_gpus()[:2])], ids=["none", "of one rank"])
@pytest.mark.parametrize(("field", "value"), [("samplesPerSecond", 1), ("maxPricePerBillionSamples", 1e9)])
def test_nothing_is_chosen_by_figures_of_gpus_that_nobody_measured(
    make_spec: MakeSpec, make_profile: MakeProfile, processes: int, loops: Any, field: str, value: float
) -> None:
    tables = [table(f"t{i}", 10**5) for i in range(2)]
    rated = gpus(2, HBM, flopsPerSecond=1e14, hostBytesPerSecond=2e10, loops=loops)
    profile = make_profile(DDR, devices=rated, **RATES)

    with pytest.raises(InvalidSpecError, match=r"not calibrated: .* big has no devices\.loops") as refused:
        choose_plan(
            make_spec(tables, processesPerReplica=processes, objective={"maxReplicas": 2, field: value}), [profile]
        )
    held = choose_plan(make_spec(tables, processesPerReplica=processes, objective={"maxReplicas": 2}), [profile])

    assert refused.value.path == f"spec.trainer.objective.{field}"
    assert "dlrmctl profile measure" in str(refused.value)
    assert held.choice is not None
    assert held.choice.uncalibrated
    assert "(not calibrated)" in held.choice.summary
    assert any("not calibrated: HardwareProfile big has no devices.loops" in reason for reason in held.reasons)


def test_fewer_replicas_with_gpus_reach_a_target(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    tables = [table(f"t{i}", 10**5, maxLookups=20) for i in range(16)]
    spec = make_spec(tables, objective={"maxReplicas": 8, "samplesPerSecond": 40_000})
    devices = gpus(1, HBM, hostBytesPerSecond=2e10, loops=of_gpus())
    slow = {**RATES, "flopsPerSecond": 1e12}

    with_gpus = choose_plan(spec, [make_profile(DDR, devices=devices, **slow)])
    on_hosts = choose_plan(spec, [make_profile({**DDR, "readBytesPerSecond": 1e9}, **slow)])

    assert with_gpus.nodes <= on_hosts.nodes
    assert math.isfinite(with_gpus.predicted.price_per_billion_samples or math.inf)


def test_a_checkpointer_gets_memory_to_sort_the_keys_of_a_cut(make_spec: MakeSpec) -> None:
    def with_unique(budget: int | None) -> DLRMJobSpec:
        spec = make_spec([{"name": "ids", "rows": 50_000_000, "dim": 16}])
        [first] = spec.model.tables
        unique = first.model_copy(update={"embedding": first.embedding.model_copy(update={"hash": "unique"})})
        model = spec.model.model_copy(update={"tables": (unique,)})
        checkpoint = spec.checkpoint.model_copy(update={"handoff_budget": budget})
        return spec.model_copy(update={"model": model, "checkpoint": checkpoint})

    plain = checkpointer_bytes(make_spec([{"name": "ids", "rows": 50_000_000, "dim": 16}]))

    assert checkpointer_bytes(with_unique(None)) - plain == KEY_SORT_BYTES * 50_000_000
    assert checkpointer_bytes(with_unique(GIB)) - plain == KEY_SORT_BYTES * GIB // 64
