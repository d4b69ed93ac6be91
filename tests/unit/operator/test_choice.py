"""A job whose replicas and hardware an objective chooses: its gang is as its plan says, and stays on its hardware."""

import json
from datetime import timedelta
from typing import Any

import pytest

from dlrm_api.status import ChoiceStatus, Phase
from dlrm_operator.reconcile.findings import timestamp
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.pools import CHEAP, DEAR, job_of_pools, pool
from dlrm_testing.operator.running_job import report_progress, start_next_attempt, start_training, status

TABLES = [{"name": "a", "rows": 1_000, "dim": 4, "pin": {"ranks": [2]}}, {"name": "b", "rows": 2_000, "dim": 4}]
"""Rank 2 is asked for, so fewer than three replicas are not enough."""


def open_job(most: int = 8, **trainer: Any) -> ModelCluster:
    model = {"denseFeatures": ["I1"], "bottomMlp": [8, 4], "topMlp": [8, 1], "tables": TABLES}
    trainer = {"objective": {"maxReplicas": most}, **trainer}
    return ModelCluster(model=model, trainer=trainer, lifecycle={"restart": {"backoff": "0s"}})


def choice(cluster: ModelCluster) -> ChoiceStatus:
    found = status(cluster).choice
    assert found is not None
    return found


def pools_of_pods(cluster: ModelCluster) -> set[str]:
    """Return the hardware that the pods of the current attempt ask for."""
    affinities = [pod["spec"]["affinity"]["nodeAffinity"] for pod in cluster.pods.values()]
    terms = [each["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"] for each in affinities]
    return {value for (term,) in terms for value in term["matchExpressions"][0]["values"]}


def let_go(cluster: ModelCluster) -> None:
    """The gang commits the cut that it is asked for, and its pods end."""
    cluster.reconcile_once()
    cluster.answer_cut(51)
    report_progress(cluster, step=52, committed=51)
    cluster.reconcile_once()
    cluster.pods = {}


def events_of(cluster: ModelCluster, reason: str) -> list[str]:
    return [event.message for event in cluster.events if event.reason == reason]


def trainers_job(cluster: ModelCluster, attempt: int) -> dict[str, Any]:
    """The job as the attempt's trainers read it."""
    found: dict[str, Any] = json.loads(cluster.config_maps[f"demo-plan-{attempt}"]["data"]["job.json"])
    return found


def test_the_gang_has_as_many_pods_as_the_plan_chose() -> None:
    cluster = open_job()

    start_training(cluster)

    plan = status(cluster).plan
    assert plan is not None
    assert (plan.nodes, len(cluster.pods)) == (3, 3)
    assert trainers_job(cluster, 1)["spec"]["trainer"]["replicas"] == 3
    planned = next(each for each in status(cluster).conditions if each.type == "Planned")
    assert "trainer.objective: holding all tables: 3 replicas" in planned.message
    assert "replicas" not in cluster.job["spec"]["trainer"], "the spec is the user's"


def test_the_next_gang_is_planned_as_large_again() -> None:
    cluster = open_job()
    start_training(cluster)
    cluster.pods.pop("demo-trainer-1-1")

    start_next_attempt(cluster)

    assert sorted(cluster.pods) == [f"demo-trainer-2-{index}" for index in range(3)]
    assert status(cluster).phase is Phase.RUNNING


def test_an_operator_that_died_takes_up_the_plan_that_it_wrote() -> None:
    cluster = open_job()
    while not cluster.config_maps:
        cluster.plan()
        cluster.reconcile_once(max_actions=1)
    assert not cluster.pods
    cluster.asked = cluster.planning = None

    cluster.reconcile_once()

    assert cluster.asked is None, "the plan stands in its ConfigMap"
    assert len(cluster.pods) == 3


def test_bounds_that_hold_no_table_fail_the_job_in_words() -> None:
    cluster = open_job(most=2)

    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    cluster.settle()

    failed = next(each for each in status(cluster).conditions if each.type == "Failed")
    assert status(cluster).phase is Phase.FAILED
    assert "tables[0].pin.ranks" in failed.message


def test_pods_run_on_the_chosen_hardware_and_the_status_says_what_the_other_lacks() -> None:
    cluster = job_of_pools(DEAR, CHEAP)

    start_training(cluster)

    chosen = choice(cluster)
    assert (chosen.hardware, chosen.replicas, chosen.met, chosen.price_per_hour) == ("cheap", 1, True, 1)
    assert [(each.hardware, each.lacks) for each in chosen.rejected] == [("dear", "costs 8.00 more per hour")]
    assert pools_of_pods(cluster) == {"cheap"}
    (message,) = events_of(cluster, "HardwareChosen")
    assert "1 replica of cheap" in message
    assert "dear" in message
    assert "8.00 more per hour" in message


def test_a_restart_keeps_the_hardware_whatever_it_costs_by_then() -> None:
    cluster = job_of_pools(CHEAP, DEAR)
    start_training(cluster)

    cluster.profiles = (pool("cheap", 100), DEAR)
    cluster.planning = None
    start_next_attempt(cluster)

    chosen = choice(cluster)
    assert (chosen.hardware, chosen.kept, chosen.price_per_hour) == ("cheap", True, 100)
    assert [each.hardware for each in chosen.rejected] == ["dear"], "as known from the first attempt"
    assert pools_of_pods(cluster) == {"cheap"}
    assert len(events_of(cluster, "HardwareChosen")) == 1


def test_a_changed_objective_chooses_anew() -> None:
    cluster = job_of_pools(CHEAP, pool("fast", 9, speed=50))
    start_training(cluster)
    assert choice(cluster).hardware == "cheap"
    (other,) = (each for each in choice(cluster).rejected if each.hardware == "fast")
    assert other.samples_per_second is not None

    cluster.edit("lifecycle", suspend=True)
    let_go(cluster)
    cluster.settle()
    cluster.edit("trainer", objective={"maxReplicas": 1, "samplesPerSecond": round(0.99 * other.samples_per_second)})
    cluster.edit("lifecycle", suspend=False)
    start_training(cluster)

    assert (choice(cluster).hardware, choice(cluster).kept) == ("fast", False)
    assert pools_of_pods(cluster) == {"fast"}
    assert len(events_of(cluster, "HardwareChosen")) == 2


def test_hardware_that_holds_the_job_no_longer_is_left() -> None:
    cluster = job_of_pools(CHEAP, DEAR)
    start_training(cluster)

    cluster.profiles = (pool("cheap", 1, ddr="100Mi"), DEAR)
    cluster.planning = None
    start_next_attempt(cluster)

    assert (choice(cluster).hardware, choice(cluster).kept) == ("dear", False)
    assert pools_of_pods(cluster) == {"dear"}


def test_a_target_out_of_reach_is_reported_and_the_closest_runs() -> None:
    cluster = job_of_pools(CHEAP, DEAR, samplesPerSecond=1e12)

    start_training(cluster)

    planned = next(each for each in status(cluster).conditions if each.type == "Planned")
    assert (planned.status, planned.reason) == ("True", "ObjectiveNotMet")
    assert not choice(cluster).met
    (message,) = events_of(cluster, "ObjectiveNotMet")
    assert f"closest: {choice(cluster).name}" in message
    assert choice(cluster).lacks in message
    assert f"{choice(cluster).samples_per_second:,.0f} samples/s" in message


def test_a_price_out_of_reach_fails_the_job_with_the_cheapest_named() -> None:
    cluster = job_of_pools(CHEAP, DEAR, maxPricePerBillionSamples=0)

    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    cluster.settle()

    failed = next(each for each in status(cluster).conditions if each.type == "Failed")
    planned = next(each for each in status(cluster).conditions if each.type == "Planned")
    assert status(cluster).phase is Phase.FAILED
    assert (planned.status, planned.reason, failed.reason) == ("False", "ObjectiveNotMet", "ObjectiveNotMet")
    assert "closest: 1 replica of cheap" in failed.message
    assert not cluster.pods


def test_a_deadline_is_planned_for_the_time_that_is_left() -> None:
    cluster = job_of_pools(CHEAP, deadline="1000h")
    cluster.job["spec"]["training"] = {"maxSamples": 10**9}
    cluster.job["spec"]["data"]["synthetic"] = {"samples": 10**9}
    start_training(cluster)
    assert (len(cluster.pods), choice(cluster).met) == (1, True)

    cluster.job["status"]["startTime"] = timestamp(cluster.now - timedelta(hours=2_000))
    cluster.touch()
    cluster.planning = None
    start_next_attempt(cluster)

    assert not choice(cluster).met
    assert "too long" in choice(cluster).lacks


def test_a_profile_that_is_no_longer_selected_holds_up_the_pods_of_its_plan() -> None:
    cluster = job_of_pools(CHEAP, DEAR)
    while not cluster.config_maps:
        cluster.plan()
        cluster.reconcile_once(max_actions=2)
    assert not cluster.pods

    cluster.profiles = (DEAR,)
    cluster.reconcile_once()

    scheduled = next(each for each in status(cluster).conditions if each.type == "Scheduled")
    assert (scheduled.status, scheduled.reason) == ("False", "HardwareProfileUnavailable")
    assert "cheap" in scheduled.message
    assert not cluster.pods
    cluster.profiles = (CHEAP, DEAR)
    start_training(cluster)
    assert pools_of_pods(cluster) == {"cheap"}


@pytest.mark.parametrize("objective", [{}, {"samplesPerSecond": 1}])
def test_scaling_keeps_the_hardware(objective: dict[str, Any]) -> None:
    cluster = job_of_pools(CHEAP, DEAR, **objective)
    start_training(cluster)

    cluster.edit("trainer", replicas=2)
    cluster.profiles = (pool("cheap", 100), DEAR)
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    let_go(cluster)
    start_training(cluster)

    assert len(cluster.pods) == 2
    assert (choice(cluster).hardware, choice(cluster).replicas) == ("cheap", 2)
    assert pools_of_pods(cluster) == {"cheap"}
