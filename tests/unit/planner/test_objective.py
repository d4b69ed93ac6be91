"""The number of replicas and the hardware that an objective chooses: bounds, targets, prices, reasons."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dlrm_api.choice import Choice
from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError, ObjectiveNotMetError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_planner import WorkDone, choose_plan, plan_job
from dlrm_planner.objective import GRID_SIZES, MAX_EXACT, choose_replicas

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


def choice_of(plan: Plan) -> Choice:
    assert plan.choice is not None
    return plan.choice


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
    open_ = make_spec(TABLES, objective={"maxReplicas": 8})
    target = rate_of(open_, profile, 3) * 0.99
    assert target > rate_of(open_, profile, 2)

    plan = choose_plan(make_spec(TABLES, objective={"maxReplicas": 8, "samplesPerSecond": target}), [profile])

    choice = choice_of(plan)
    assert (plan.nodes, choice.replicas, choice.met, choice.hardware) == (3, 3, True, "big")
    assert plan.reasons[0].startswith(f"trainer.objective: samplesPerSecond {target:,.0f}: 3 replicas of big (")
    assert [each.replicas for each in choice.rejected] == [1, 2]
    for each in choice.rejected:
        assert each.lacks == f"lacks {target - rate_of(open_, profile, each.replicas):,.0f} of {target:,.0f} samples/s"
    assert plan.tables == plan_job(open_.with_replicas(3), profile).tables


def test_a_target_out_of_reach_gives_the_best_and_says_so(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = make_profile(DDR, **RATES)
    spec = make_spec(TABLES, objective={"maxReplicas": 4, "samplesPerSecond": 1e12})

    plan = choose_plan(spec, [profile])

    rates = {size: rate_of(spec, profile, size) for size in range(1, 5)}
    best = max(rates, key=lambda size: rates[size])
    assert (plan.nodes, choice_of(plan).met) == (best, False)
    assert plan.reasons[0].startswith(
        f"trainer.objective: samplesPerSecond 1,000,000,000,000 is not met; closest: {best} replicas of big ("
    )


def test_fixed_replicas_leave_nothing_to_choose(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    spec = make_spec(TABLES, replicas=2, objective={"minReplicas": 4, "maxReplicas": 8, "samplesPerSecond": 1})

    plan = choose_plan(spec, [make_profile(DDR, **RATES)])

    assert (plan.nodes, plan.choice) == (2, None)


def test_fixed_replicas_choose_hardware_alone(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    objective = {"minReplicas": 4, "maxReplicas": 8, "samplesPerSecond": 1}
    spec = make_spec(TABLES, replicas=2, hardwareProfiles=["a", "b"], objective=objective)

    plan = choose_plan(spec, [kind(make_profile, "a", 3), kind(make_profile, "b", 2)])

    assert (plan.nodes, plan.hardware) == (2, "b")


def test_the_fewest_that_hold_all_tables_need_no_measured_rates(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    tables = [{"name": f"t{i}", "rows": 4 * 10**6, "dim": 64} for i in range(4)]

    plan = choose_plan(make_spec(tables, objective={"maxReplicas": 8}), [make_profile("4Gi")])

    assert plan.nodes > 1
    with pytest.raises(InfeasiblePlanError):
        plan_job(make_spec(tables, replicas=plan.nodes - 1), make_profile("4Gi"))
    smaller = choice_of(plan).rejected[-1]
    assert smaller.replicas == plan.nodes - 1
    assert "bytes short" in smaller.lacks


def test_tables_that_fit_no_allowed_number_are_refused_with_a_fix(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    tables = [{"name": f"t{i}", "rows": 4 * 10**6, "dim": 64} for i in range(8)]

    with pytest.raises(InfeasiblePlanError) as refusal:
        choose_plan(make_spec(tables, objective={"maxReplicas": 2}), [make_profile("4Gi")])

    words = str(refusal.value)
    assert words.startswith("spec.trainer.objective: no number of replicas from 1 to 2 holds all tables; with 2: table")
    assert "fix: trainer.objective.maxReplicas: " in words
    assert "trainer.replicas" not in words


def test_tables_that_fit_no_hardware_are_refused_with_what_each_lacks(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    tables = [{"name": f"t{i}", "rows": 4 * 10**6, "dim": 64} for i in range(8)]
    small = {"bytes": "4Gi"}

    with pytest.raises(InfeasiblePlanError) as refusal:
        choose_plan(
            make_spec(tables, objective={"maxReplicas": 2}),
            [kind(make_profile, "a", 1, ddr=small), kind(make_profile, "b", 1, ddr=small)],
        )

    told = [reason.split(":")[0] for reason in refusal.value.reasons[1:3]]
    assert told == ["2 replicas of a", "2 replicas of b"]
    assert all("bytes short" in reason for reason in refusal.value.reasons[1:3])


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (None, "no HardwareProfile is given"),
        ({**RATES, "flopsPerSecond": None}, "HardwareProfile big has no flopsPerSecond"),
        (
            {**RATES, "flopsPerSecond": None, "devices": DEVICES},
            "HardwareProfile big has no devices.hbm.readBytesPerSecond",
        ),
        ({**RATES, "devices": {**DEVICES, "hbm": SMALL_HBM}}, "HardwareProfile big has no devices.hostBytesPerSecond"),
        ({**RATES, "network": {}}, "2 replicas cannot be predicted: HardwareProfile big has no network.interNode"),
    ],
)
@pytest.mark.parametrize(("field", "value"), [("samplesPerSecond", 1e12), ("deadline", "1s")])
def test_a_target_without_a_prediction_is_refused(
    make_spec: MakeSpec, make_profile: MakeProfile, profile: dict[str, Any] | None, words: str, field: str, value: Any
) -> None:
    hardware = profile and make_profile(DDR, **{k: v for k, v in profile.items() if v is not None})

    with pytest.raises(InvalidSpecError) as refusal:
        choose_plan(make_spec(TABLES, objective={"maxReplicas": 8, field: value}), [hardware] if hardware else [])

    assert refusal.value.path == f"spec.trainer.objective.{field}"
    assert words in str(refusal.value)
    assert "for the fewest replicas that hold all tables" in str(refusal.value)


def test_no_more_ranks_are_tried_than_there_are_virtual_shards(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    objective = {"maxReplicas": 4_096, "samplesPerSecond": 1e12}

    plan = choose_plan(make_spec(TABLES, objective=objective, processesPerReplica=32), [make_profile(DDR, **RATES)])

    assert plan.world_size <= 2_048
    assert plan.reasons[0].endswith("; data.globalBatchSize 2048 allows no more than 64 replicas")


def test_a_pin_to_a_rank_needs_a_size_that_has_it(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    tables = [{**TABLES[0], "pin": {"ranks": [2]}}, *TABLES[1:]]
    profiles = [make_profile(DDR, **RATES)]

    assert choose_plan(make_spec(tables, objective={"maxReplicas": 8}), profiles).nodes == 3
    with pytest.raises(
        InvalidSpecError,
        match=r"pin\.ranks: .* ranks 0 to 1: name one of these, or raise trainer\.objective\.maxReplicas$",
    ):
        choose_plan(make_spec(tables, objective={"maxReplicas": 2}), profiles)


@pytest.mark.parametrize("target", [50.0, 1_000.0])
def test_no_size_is_judged_twice(target: float) -> None:
    judged: list[int] = []

    def judge(size: int) -> float:
        judged.append(size)
        return 100.0 - abs(size - 300)

    found = choose_replicas(1, 4_096, target, judge)

    assert sorted(judged) == sorted(found.judged)


@given(st.integers(1, 4_096))
def test_the_search_for_a_peak_refines_the_grid(peak: int) -> None:
    found = choose_replicas(1, 4_096, float("inf"), lambda size: -float(abs(size - peak)))

    assert not found.reached
    assert found.replicas is not None
    assert abs(found.replicas - peak) <= 0.05 * peak + 1


def kind(
    make_profile: MakeProfile, name: str, price: float | None, *, speed: float = 1.0, ddr: Any = None
) -> HardwareProfile:
    """Return hardware that is a multiple as fast as ``RATES``."""
    base = ddr or DDR
    network = {key: value * speed for key, value in RATES["network"].items()}
    tier = {key: value * speed if key.endswith("Second") else value for key, value in base.items()}
    priced = {} if price is None else {"pricePerHour": price}
    profile = make_profile(tier, flopsPerSecond=RATES["flopsPerSecond"] * speed, network=network, **priced)
    return profile.model_copy(update={"metadata": profile.metadata.model_copy(update={"name": name})})


def enumerate_options(spec: DLRMJobSpec, profiles: list[HardwareProfile], sizes: range) -> list[dict[str, Any]]:
    """Plan every size on every hardware; what does not fit is left out."""
    options = list[dict[str, Any]]()
    for number, profile in enumerate(profiles):
        for size in sizes:
            try:
                predicted = plan_job(spec.with_replicas(size), profile).predicted
            except InfeasiblePlanError:
                continue
            options.append(
                {
                    "hardware": profile.metadata.name,
                    "number": number,
                    "size": size,
                    "rate": predicted.samples_per_second,
                    "hourly": size * (profile.spec.price_per_hour or 0),
                    "price": predicted.price_per_billion_samples,
                }
            )
    return options


SMALL_TABLES = [{"name": f"t{i}", "rows": 10**6, "dim": 16, "maxLookups": 2} for i in range(4)]
kinds = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0, 4.0]), st.sampled_from([1.0, 2.0, 3.0, 8.0]), st.booleans()),
    min_size=1,
    max_size=3,
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kinds=kinds, objective=st.sampled_from(["samplesPerSecond", "deadline", "max"]), level=st.floats(0.3, 1.3))
def test_the_choice_is_the_best_of_all_that_meet_the_objective(
    make_spec: MakeSpec, make_profile: MakeProfile, kinds: list[tuple[float, float, bool]], objective: str, level: float
) -> None:
    sizes = range(1, 5)
    tight = {**DDR, "bytes": "1500Mi"}
    profiles = [
        kind(make_profile, f"k{i}", price, speed=speed, ddr=tight if is_tight else DDR)
        for i, (speed, price, is_tight) in enumerate(kinds)
    ]
    plain = make_spec(SMALL_TABLES)
    options = enumerate_options(plain, profiles, sizes)
    assume(options)
    top_rate = max(option["rate"] for option in options)
    samples = plain.total_samples
    assert samples is not None
    if objective == "samplesPerSecond":
        target = max(1.0, level * top_rate)
        goal: dict[str, Any] = {"samplesPerSecond": target}
        enough = [option for option in options if option["rate"] >= target]
    elif objective == "deadline":
        seconds = max(1, round(samples / (level * top_rate)))
        goal = {"deadline": f"{seconds}s"}
        enough = [option for option in options if option["rate"] >= samples / seconds]
    else:
        cap = level * sorted(option["price"] for option in options)[len(options) // 2]
        goal = {"maxPricePerBillionSamples": cap}
        enough = [option for option in options if option["price"] <= cap]
    spec = make_spec(
        SMALL_TABLES, objective={"maxReplicas": sizes[-1], **goal}, hardwareProfiles=[p.metadata.name for p in profiles]
    )

    if objective == "max" and not enough:
        with pytest.raises(ObjectiveNotMetError) as refusal:
            choose_plan(spec, profiles)
        closest = min(options, key=lambda option: (option["price"], option["hourly"], option["size"]))
        assert f"{closest['price']:,.2f} per 1e9 samples" in str(refusal.value)
        return
    plan = choose_plan(spec, profiles)

    choice = choice_of(plan)
    assert choice.met == bool(enough)
    found = (choice.hardware, choice.replicas)
    assert found == (plan.hardware, plan.nodes)
    if not enough or objective == "max":
        ranked = sorted(enough or options, key=lambda o: (-o["rate"], o["hourly"], o["size"], o["number"]))
        assert choice.samples_per_second == ranked[0]["rate"]
    else:
        # Smallest of each kind, then the cheapest of these.
        smallest = [
            min((o for o in enough if o["number"] == number), key=lambda o: o["size"])
            for number in {o["number"] for o in enough}
        ]
        cost = "hourly" if objective == "samplesPerSecond" else "price"
        best = min(smallest, key=lambda o: (o[cost], o["size"], o["number"]))
        assert found == (best["hardware"], best["size"])
    others = {profile.metadata.name for profile in profiles} - {choice.hardware}
    assert others <= {each.hardware for each in choice.rejected}
    assert all(re.search(r"\d|no better", each.lacks) for each in choice.rejected)


def test_the_cheaper_of_two_that_reach_the_target_wins(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    slow, fast = kind(make_profile, "slow", 2), kind(make_profile, "fast", 9, speed=4)
    target = 0.99 * rate_of(make_spec(TABLES), slow, 2)
    spec = make_spec(
        TABLES, objective={"maxReplicas": 8, "samplesPerSecond": target}, hardwareProfiles=["slow", "fast"]
    )

    choice = choice_of(choose_plan(spec, [slow, fast]))

    assert (choice.hardware, choice.replicas, choice.price_per_hour) == ("slow", 2, 4)
    rejected = {(each.hardware, each.replicas): each.lacks for each in choice.rejected}
    assert rejected["fast", 1] == "costs 5.00 more per hour"
    assert rejected["slow", 1].startswith("lacks ")


@pytest.mark.parametrize(
    ("goal", "field"),
    [
        ({"samplesPerSecond": 1}, "samplesPerSecond"),
        ({"deadline": "1h"}, "deadline"),
        ({"maxPricePerBillionSamples": 1}, "maxPricePerBillionSamples"),
    ],
)
def test_a_profile_without_a_price_is_refused_by_name(
    make_spec: MakeSpec, make_profile: MakeProfile, goal: dict[str, Any], field: str
) -> None:
    spec = make_spec(TABLES, objective={"maxReplicas": 8, **goal}, hardwareProfiles=["a", "b"])

    with pytest.raises(InvalidSpecError, match="HardwareProfile b has no pricePerHour") as refusal:
        choose_plan(spec, [kind(make_profile, "a", 1), kind(make_profile, "b", None)])

    assert refusal.value.path == f"spec.trainer.objective.{field}"


def test_one_kind_of_hardware_needs_a_price_for_a_price_only(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    unpriced = [kind(make_profile, "a", None)]

    choose_plan(make_spec(TABLES, objective={"maxReplicas": 2, "samplesPerSecond": 1}), unpriced)
    with pytest.raises(InvalidSpecError, match="HardwareProfile a has no pricePerHour"):
        choose_plan(make_spec(TABLES, objective={"maxReplicas": 2, "maxPricePerBillionSamples": 1}), unpriced)


def test_a_deadline_counts_the_samples_and_the_time_that_are_left(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    profile = make_profile(DDR, **RATES)
    plain = make_spec(TABLES)
    total, seconds = plain.total_samples, 600
    assert total is not None
    rates = {size: rate_of(plain, profile, size) for size in range(1, 9)}
    spec = make_spec(TABLES, objective={"maxReplicas": 8, "deadline": f"{seconds}s"})

    def sizes(samples_left: float, seconds_left: float) -> tuple[int, bool]:
        done = WorkDone(samples=total - round(samples_left), seconds=seconds - seconds_left)
        choice = choice_of(choose_plan(spec, [profile], done=done))
        return choice.replicas, choice.met

    assert sizes(0.9 * rates[1] * 2, 2) == (1, True)
    assert sizes(0.99 * rates[3] * 2, 2) == (3, True)
    assert sizes(2 * max(rates.values()), 1) == (max(rates, key=lambda size: rates[size]), False)
    assert not sizes(10, -5)[1]
    assert sizes(0, 1) == (1, True)


def test_hardware_of_an_earlier_attempt_is_kept_while_it_holds_the_job(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    cheap, dear = kind(make_profile, "cheap", 1), kind(make_profile, "dear", 9)
    tiny = kind(make_profile, "dear", 9, ddr={**DDR, "bytes": "600Mi"})
    objective = {"maxReplicas": 2, "samplesPerSecond": 1}
    spec = make_spec(TABLES, objective=objective, hardwareProfiles=["cheap", "dear"])

    first, kept = (choice_of(choose_plan(spec, [cheap, dear], kept=name)) for name in ("", "dear"))
    moved, gone = choose_plan(spec, [cheap, tiny], kept="dear"), choose_plan(spec, [cheap, dear], kept="other")

    assert (first.hardware, first.kept) == ("cheap", False)
    assert (kept.hardware, kept.kept) == ("dear", True)
    assert (choice_of(moved).hardware, choice_of(gone).hardware) == ("cheap", "cheap")


def test_hardware_that_cannot_run_a_plan_is_rejected_with_the_reason(
    make_spec: MakeSpec, make_profile: MakeProfile
) -> None:
    def check(plan: Plan, _: HardwareProfile | None) -> None:
        if plan.hardware == "cheap":
            raise InvalidSpecError("spec.trainer.hardware", "nothing to mount")

    spec = make_spec(TABLES, objective={"maxReplicas": 2}, hardwareProfiles=["cheap", "dear"])

    choice = choice_of(choose_plan(spec, [kind(make_profile, "cheap", 1), kind(make_profile, "dear", 9)], check=check))

    assert choice.hardware == "dear"
    assert "spec.trainer.hardware: nothing to mount" in [each.lacks for each in choice.rejected]
