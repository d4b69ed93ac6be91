"""Plans that are read back, and that later attempts continue with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_planner import PastPlan, choose_plan, plan_job
from dlrm_planner.choose import read_problem
from dlrm_planner.rates import DEFAULT_LOOPS
from dlrm_planner.replan import read_solution
from dlrm_planner.write import write_plan

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
TABLES: list[dict[str, Any]] = [
    {"name": "small", "rows": 1_000, "dim": 16, "pin": {"sharding": "data"}},
    {"name": "whole", "rows": 100_000, "dim": 32},
    {"name": "ids", "rows": 200_000, "dim": 16, "embedding": {"hash": "unique"}},
    {"name": "rows", "rows": 20_000_001, "dim": 64, "pin": {"sharding": "row"}},
    {"name": "columns", "rows": 5_000_000, "dim": 64, "columnBlock": 32, "pin": {"sharding": "column"}},
]
LOOPS = [each.model_dump(mode="json", by_alias=True) for each in DEFAULT_LOOPS]
BLOCK = {"bytes": "100Gi", "hostPath": "/x", "readBytesPerSecond": 1e9}


def pool(make_profile: MakeProfile, ddr: str) -> HardwareProfile:
    tiers = {"ddr": {"bytes": ddr, "readBytesPerSecond": 1e10}, "block": BLOCK}
    return make_profile(
        ddr, cpus=4, tiers=tiers, loops=LOOPS, network={"interNodeBytesPerSecond": 1e9, "intraNodeBytesPerSecond": 1e9}
    )


@pytest.mark.parametrize(("ddr", "processes"), [("32Gi", 1), ("32Gi", 2), ("5Gi", 1), ("3Gi", 1)])
def test_a_plan_that_is_read_back_predicts_the_same(
    make_spec: MakeSpec, make_profile: MakeProfile, ddr: str, processes: int
) -> None:
    grid = {"name": "grid", "rows": 100_001, "dim": 64, "columnBlock": 16, "pin": {"sharding": "grid"}}
    tables = TABLES + [grid] * (processes > 1)
    spec, profile = make_spec(tables, replicas=2, processesPerReplica=processes), pool(make_profile, ddr)
    plan = plan_job(spec, profile)

    found = read_solution(read_problem(spec, profile, {}), plan)

    again = write_plan(found)
    assert again.tables == plan.tables
    assert again.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert again.predicted.stage_seconds == pytest.approx(plan.predicted.stage_seconds)
    assert again.predicted.hit_rates == plan.predicted.hit_rates


def test_a_plan_of_other_tables_is_refused(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = pool(make_profile, "32Gi")
    plan = plan_job(make_spec(TABLES, replicas=2), profile)

    for other in (make_spec(TABLES[:3], replicas=2), make_spec(TABLES, replicas=1)):
        with pytest.raises(InvalidSpecError):
            read_solution(read_problem(other, profile, {}), plan)


def shards(plan: Plan) -> list[tuple[Any, ...]]:
    return [
        (table.name, each.rank, each.kind, each.row_start, each.row_end, each.column_start, each.column_end)
        for table in plan.tables
        for each in table.shards
    ]


def restart(spec: DLRMJobSpec, before: Plan, *profiles: HardwareProfile, then: str = "never", **more: Any) -> Plan:
    """Return the plan of an attempt after the one with the plan ``before``."""
    lifecycle = spec.lifecycle.model_copy(update={"replan": then})
    past = PastPlan(spec=spec, plan=before)
    return choose_plan(spec.model_copy(update={"lifecycle": lifecycle}), profiles, before=past, **more)


def without_reasons(plan: Plan) -> Plan:
    return plan.model_copy(update={"reasons": ()})


table_options = st.lists(
    st.fixed_dictionaries(
        {"rows": st.integers(1_000, 20_000_000), "dim": st.sampled_from([16, 64]), "maxLookups": st.integers(1, 8)},
        optional={"embedding": st.just({"hash": "unique"})},
    ),
    min_size=1,
    max_size=6,
)
trainers = st.fixed_dictionaries({"replicas": st.integers(1, 3), "processesPerReplica": st.integers(1, 2)})


@pytest.mark.slow
@settings(max_examples=30)
@given(table_options, trainers, st.sampled_from([512, 8_192]), st.sampled_from(["4Gi", "6Gi", "12Gi", "64Gi"]))
def test_a_plan_fits_what_it_was_made_for(
    make_spec: MakeSpec,
    make_profile: MakeProfile,
    tables: list[dict[str, Any]],
    trainer: dict[str, int],
    batch: int,
    ddr: str,
) -> None:
    named = [{"name": f"t{i}", **table} for i, table in enumerate(tables)]
    spec, profile = make_spec(named, batch=batch, **trainer), pool(make_profile, ddr)
    try:
        plan = plan_job(spec, profile)
    except InfeasiblePlanError:
        assume(False)

    assert restart(spec, plan, profile) == plan
    again = restart(spec, plan, profile, then="onRestart")
    assert again.replanned == ""
    assert shards(again) == shards(plan)
    assert again.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds, rel=0.01)


@pytest.mark.parametrize("then", ["never", "onRestart"])
def test_a_restart_without_changes_keeps_the_plan(make_spec: MakeSpec, make_profile: MakeProfile, then: str) -> None:
    spec, profile = make_spec(TABLES, replicas=2), pool(make_profile, "5Gi")
    plan = plan_job(spec, profile)

    assert without_reasons(restart(spec, plan, profile, then=then)) == without_reasons(plan)


def test_by_default_other_memory_and_traces_change_nothing(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(TABLES, replicas=2)
    plan = plan_job(spec, pool(make_profile, "5Gi"))

    assert restart(spec, plan, pool(make_profile, "32Gi")) == plan


def test_on_restart_tiers_follow_the_hardware_and_shards_stay(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(TABLES, replicas=2)
    plan = plan_job(spec, pool(make_profile, "5Gi"))

    again = restart(spec, plan, pool(make_profile, "3Gi"), then="onRestart")

    assert shards(again) == shards(plan)
    assert again.tables != plan.tables
    assert "onRestart" in again.reasons[0]
    assert again.replanned == ""


def test_a_plan_that_does_not_fit_is_made_anew_and_says_so(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(TABLES, replicas=2)
    plan = plan_job(spec, pool(make_profile, "32Gi"))

    again = restart(spec, plan, pool(make_profile, "5Gi"))

    assert "node 0" in again.replanned
    assert again.reasons[0] == again.replanned
    assert without_reasons(again).tables == plan_job(spec, pool(make_profile, "5Gi")).tables
    assert restart(spec, again, pool(make_profile, "5Gi")).replanned == ""
    assert restart(spec, plan, pool(make_profile, "32Gi"), reserve=26 * 2**30).replanned


def test_shards_that_no_tiers_hold_are_made_anew(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    tables = [{"name": f"t{i}", "rows": 10**7, "dim": 64} for i in range(3)]
    spec = make_spec(tables, batch=64, replicas=2)
    plan = plan_job(spec, make_profile("64Gi"))

    again = restart(spec, plan, make_profile("6Gi"), then="onRestart")

    assert again.replanned
    assert shards(again) != shards(plan)


def test_other_hardware_needs_another_plan(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, other = make_spec(TABLES[1:2]), make_profile("64Gi")
    other = other.model_copy(update={"metadata": other.metadata.model_copy(update={"name": "other"})})

    assert "other" in restart(spec, plan_job(spec, make_profile("64Gi")), other).replanned


def test_a_resize_or_an_edit_plans_as_if_nothing_was_before(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile, spec = pool(make_profile, "5Gi"), make_spec(TABLES, replicas=2)
    past = PastPlan(spec=spec, plan=plan_job(spec, pool(make_profile, "32Gi")))

    for changed in (make_spec(TABLES, replicas=1), make_spec(TABLES, batch=512, replicas=2)):
        assert choose_plan(changed, [profile], before=past) == plan_job(changed, profile)


def test_fields_that_no_plan_depends_on_keep_it(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(TABLES, replicas=2)
    past = PastPlan(spec=spec, plan=plan_job(spec, pool(make_profile, "5Gi")))
    checkpoint = spec.checkpoint.model_copy(update={"interval_steps": 7})

    changed = spec.model_copy(update={"checkpoint": checkpoint})

    assert choose_plan(changed, [pool(make_profile, "32Gi")], before=past) == past.plan


def test_a_plan_whose_tiers_cannot_be_mounted_is_made_anew(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec, profile = make_spec(TABLES, replicas=2), pool(make_profile, "5Gi")
    plan = plan_job(spec, profile)

    def refuse_first(found: Plan, _: HardwareProfile | None) -> None:
        if not found.replanned and found.tables == plan.tables and not refused:
            refused.append(found)
            raise InvalidSpecError("spec.trainer.hardware", "block has no hostPath")

    refused: list[Plan] = []

    assert "hostPath" in restart(spec, plan, profile, check=refuse_first).replanned


@pytest.mark.parametrize("then", ["never", "onRestart"])
def test_an_objective_that_chooses_the_same_again_keeps_the_plan(
    make_spec: MakeSpec, make_profile: MakeProfile, then: str
) -> None:
    wanted = {"samplesPerSecond": 1_000, "minReplicas": 2, "maxReplicas": 2}
    spec = make_spec(TABLES, objective=wanted)
    plan = choose_plan(spec, [pool(make_profile, "3Gi")])

    again = restart(spec, plan, pool(make_profile, "32Gi"), then=then)

    assert again.choice is not None
    assert shards(again) == shards(plan)
    assert (again.tables == plan.tables) == (then == "never")


def test_a_plan_for_gpus_is_kept_while_their_memory_holds_it(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    def pool_of_gpus(hbm: str) -> HardwareProfile:
        return make_profile("64Gi", devices={"resource": "nvidia.com/gpu", "count": 2, "hbm": {"bytes": hbm}})

    tables = [{"name": f"t{i}", "rows": 2 * 10**6, "dim": 64} for i in range(8)]
    spec = make_spec(tables, replicas=1, processesPerReplica=2)
    plan = plan_job(spec, pool_of_gpus("80Gi"))

    assert restart(spec, plan, pool_of_gpus("40Gi")) == plan
    assert "hbm" in restart(spec, plan, pool_of_gpus("3Gi")).replanned
    assert "compute on cuda" in restart(spec, plan, make_profile("64Gi")).replanned
    for hbm in ("80Gi", "3Gi"):
        assert shards(restart(spec, plan, pool_of_gpus(hbm), then="onRestart")) == shards(plan)
