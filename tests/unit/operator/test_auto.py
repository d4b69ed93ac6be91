"""A job whose number of replicas the planner chooses: its gang is as large as its plan says."""

import json
from typing import Any

from dlrm_api.status import Phase
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import start_next_attempt, start_training, status

TABLES = [{"name": "a", "rows": 1_000, "dim": 4, "pin": {"ranks": [2]}}, {"name": "b", "rows": 2_000, "dim": 4}]
"""Rank 2 is asked for, so fewer than three replicas are not enough."""


def open_job(most: int = 8, **trainer: Any) -> ModelCluster:
    model = {"denseFeatures": ["I1"], "bottomMlp": [8, 4], "topMlp": [8, 1], "tables": TABLES}
    auto = {"min": 1, "max": most, "targetSamplesPerSecond": 0}
    return ModelCluster(model=model, trainer={"auto": auto, **trainer}, lifecycle={"restart": {"backoff": "0s"}})


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
    assert "trainer.auto: 3 replicas, the fewest from 1 to 8 that hold all tables" in planned.message
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
