"""The number of replicas that a plan is made for if the user leaves it open: bounds, target, reasons."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_planner import choose_replicas, plan_job
from dlrm_planner.choose import GRID_SIZES, MAX_EXACT

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]

RATES: dict[str, Any] = {
    "flopsPerSecond": 1e9,
    "network": {"intraNodeBytesPerSecond": 1e9, "interNodeBytesPerSecond": 1e9},
}
DEVICES = {"resource": "nvidia.com/gpu", "count": 1, "hbm": {"bytes": "80Gi"}, "flopsPerSecond": 1e14}
SMALL_HBM = {"bytes": "2200Mi", "readBytesPerSecond": 1e12, "writeBytesPerSecond": 1e12}
DDR = {"bytes": "64Gi", "readBytesPerSecond": 1e9, "writeBytesPerSecond": 5e8}
TABLES = [{"name": f"t{i}", "rows": 10**6, "dim": 16, "maxLookups": 2} for i in range(8)]
MAX_JUDGED = GRID_SIZES + 12


def auto(least: int, most: int, target: float) -> dict[str, Any]:
    return {"min": least, "max": most, "targetSamplesPerSecond": target}


def rate_of(spec: DLRMJobSpec, profile: HardwareProfile, replicas: int) -> float:
    rate = plan_job(spec.with_replicas(replicas), profile).predicted.samples_per_second
    assert rate is not None
    return rate


@st.composite
def judgements(draw: st.DrawFn) -> tuple[int, int, float, Mapping[int, float | None]]:
    """Draw the bounds, a target, and the throughput of each size; None if it does not fit."""
    least = draw(st.integers(1, 50))
    most = least + draw(st.integers(0, 200))
    rates = draw(st.lists(st.none() | st.floats(0, 100), min_size=most - least + 1, max_size=most - least + 1))
    return least, most, draw(st.floats(0, 120)), {least + i: rate for i, rate in enumerate(rates)}


def reaches(rate: float | None, target: float) -> bool:
    return rate is not None and rate >= target


@pytest.mark.slow
@given(judgements())
def test_the_answer_is_true_and_few_sizes_are_judged(
    given_: tuple[int, int, float, Mapping[int, float | None]],
) -> None:
    least, most, target, worth = given_

    found = choose_replicas(least, most, target, worth.__getitem__)

    assert len(found.judged) <= MAX_JUDGED + MAX_EXACT - GRID_SIZES
    assert all(least <= size <= most and worth[size] == judged for size, judged in found.judged.items())
    fitting = [rate for rate in found.judged.values() if rate is not None]
    if found.replicas is None:
        assert not fitting
    elif found.reached:
        assert reaches(worth[found.replicas], target)
        assert not any(reaches(worth[size], target) for size in found.judged if size < found.replicas)
    else:
        assert worth[found.replicas] == max(fitting) < target


@pytest.mark.slow
@given(judgements())
def test_of_few_sizes_the_answer_is_the_fewest_of_all(
    given_: tuple[int, int, float, Mapping[int, float | None]],
) -> None:
    least, most, target, worth = given_
    most = min(most, least + MAX_EXACT - 1)

    found = choose_replicas(least, most, target, worth.__getitem__)

    enough = [size for size in range(least, most + 1) if reaches(worth[size], target)]
    assert found.reached == bool(enough)
    assert not enough or found.replicas == enough[0]


@given(st.integers(1, 4_096), st.integers(1, 4_096), st.integers(1, 5_000))
def test_the_fewest_replicas_win_if_more_are_never_worse(least: int, more: int, needed: int) -> None:
    most = min(4_096, least + more)

    found = choose_replicas(least, most, needed, float)

    assert found.replicas == (max(least, needed) if needed <= most else most)
    assert len(found.judged) <= MAX_JUDGED + MAX_EXACT - GRID_SIZES


def test_sizes_that_only_get_worse_are_left_out() -> None:
    found = choose_replicas(1, 4_096, 100.0, lambda size: 50.0 / size)

    assert found.replicas == 1
    assert max(found.judged) < 20


def test_the_fewest_replicas_that_reach_the_target_are_planned(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = make_profile(DDR, **RATES)
    open_ = make_spec(TABLES, auto=auto(1, 8, 1))
    target = rate_of(open_, profile, 3) * 0.99
    assert target > rate_of(open_, profile, 2)

    plan = plan_job(make_spec(TABLES, auto=auto(1, 8, target)), profile)

    assert plan.nodes == 3
    assert plan.reasons[0].startswith(
        f"trainer.auto: 3 replicas, the fewest from 1 to 8 predicted to reach {target:,.0f} samples/s: "
    )
    assert plan.tables == plan_job(open_.with_replicas(3), profile).tables


def test_a_target_out_of_reach_gives_the_best_and_says_so(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = make_profile(DDR, **RATES)
    spec = make_spec(TABLES, auto=auto(1, 4, 1e12))

    plan = plan_job(spec, profile)

    rates = {size: rate_of(spec, profile, size) for size in range(1, 5)}
    best = max(rates, key=lambda size: rates[size])
    assert plan.nodes == best
    assert plan.reasons[0].startswith(
        "trainer.auto: no number of replicas from 1 to 4 is predicted to reach 1,000,000,000,000 samples/s; "
        f"{best} replicas with the most, {rates[best]:,.0f} ("
    )


def test_replicas_override_auto(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    plan = plan_job(make_spec(TABLES, replicas=2, auto=auto(4, 8, 1)), make_profile(DDR, **RATES))

    assert plan.nodes == 2
    assert not any("trainer.auto" in reason for reason in plan.reasons)


def test_the_fewest_that_hold_all_tables_need_no_measured_rates(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    tables = [{"name": f"t{i}", "rows": 4 * 10**6, "dim": 64} for i in range(4)]

    plan = plan_job(make_spec(tables, auto=auto(1, 8, 0)), make_profile("4Gi"))

    assert plan.nodes > 1
    with pytest.raises(InfeasiblePlanError):
        plan_job(make_spec(tables, replicas=plan.nodes - 1), make_profile("4Gi"))
    assert plan.reasons[0].startswith(
        f"trainer.auto: {plan.nodes} replicas, the fewest from 1 to 8 that hold all tables ("
    )
    assert f"{plan.nodes - 1}: does not fit" in plan.reasons[0]


def test_tables_that_fit_no_allowed_number_are_refused_with_a_fix(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    tables = [{"name": f"t{i}", "rows": 4 * 10**6, "dim": 64} for i in range(8)]

    with pytest.raises(InfeasiblePlanError) as refusal:
        plan_job(make_spec(tables, auto=auto(1, 2, 0)), make_profile("4Gi"))

    words = str(refusal.value)
    assert words.startswith("spec.trainer.auto: no number of replicas from 1 to 2 holds all tables; with 2: table t")
    assert "fix: trainer.auto.max: " in words
    assert "trainer.replicas" not in words


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (None, "trainer.hardware names no HardwareProfile"),
        ({**RATES, "flopsPerSecond": None}, "HardwareProfile big has no flopsPerSecond"),
        (
            {**RATES, "flopsPerSecond": None, "devices": DEVICES},
            "HardwareProfile big has no devices.hbm.readBytesPerSecond",
        ),
        ({**RATES, "devices": {**DEVICES, "hbm": SMALL_HBM}}, "HardwareProfile big has no devices.hostBytesPerSecond"),
        ({**RATES, "network": {}}, "2 replicas cannot be predicted: HardwareProfile big has no network.interNode"),
    ],
)
def test_a_target_without_a_prediction_is_refused(
    make_spec: MakeSpec, make_profile: MakeProfile, profile: dict[str, Any] | None, words: str
) -> None:
    hardware = None if profile is None else make_profile(DDR, **{k: v for k, v in profile.items() if v is not None})

    with pytest.raises(InvalidSpecError) as refusal:
        plan_job(make_spec(TABLES, auto=auto(1, 8, 1e12)), hardware)

    assert refusal.value.path == "spec.trainer.auto.targetSamplesPerSecond"
    assert words in str(refusal.value)
    assert "or a target of 0 for the fewest replicas that hold all tables" in str(refusal.value)


def test_no_more_ranks_are_tried_than_there_are_virtual_shards(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(TABLES, auto=auto(1, 4_096, 1e12), processesPerReplica=32)

    plan = plan_job(spec, make_profile(DDR, **RATES))

    assert plan.world_size <= 2_048
    assert plan.reasons[0].endswith("; data.globalBatchSize 2048 allows no more than 64")


def test_a_pin_to_a_rank_needs_a_size_that_has_it(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    tables = [{**TABLES[0], "pin": {"ranks": [2]}}, *TABLES[1:]]

    assert plan_job(make_spec(tables, auto=auto(1, 8, 0)), make_profile(DDR, **RATES)).nodes == 3
    with pytest.raises(
        InvalidSpecError, match=r"pin\.ranks: .* ranks 0 to 1: name one of these, or raise trainer\.auto\.max$"
    ):
        plan_job(make_spec(tables, auto=auto(1, 2, 0)), make_profile(DDR, **RATES))


@pytest.mark.parametrize("target", [50.0, 1_000.0])
def test_no_size_is_judged_twice(target: float) -> None:
    judged: list[int] = []

    def judge(size: int) -> float:
        judged.append(size)
        return 100.0 - abs(size - 300)

    found = choose_replicas(1, 4_096, target, judge)

    assert sorted(judged) == sorted(found.judged)
