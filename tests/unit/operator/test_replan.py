"""Plans of later attempts: kept, or made anew with the reason in condition and Event."""

from __future__ import annotations

import pytest

from dlrm_api.plan import Plan, plan_from_parts
from dlrm_api.status import ConditionType
from dlrm_operator.controller.informers import read_config_map
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.pools import restart_on, training_on
from dlrm_testing.operator.running_job import condition, status


def plan_of(cluster: ModelCluster) -> Plan:
    maps = [read_config_map(each) for each in cluster.config_maps.values()]
    newest = max(each.attempt for each in maps)
    return plan_from_parts({key: part for each in maps if each.attempt == newest for key, part in each.parts.items()})


@pytest.mark.parametrize("now", ["8Gi", "64Gi"])
def test_a_restart_keeps_the_plan(now: str) -> None:
    cluster = training_on("8Gi")
    first = plan_of(cluster)

    restart_on(cluster, now)
    restart_on(cluster, now)

    assert status(cluster).attempt == 3
    assert plan_of(cluster) == first
    assert condition(cluster, ConditionType.PLANNED).reason == "Planned"


def test_a_plan_that_does_not_fit_is_made_anew_and_the_job_says_so() -> None:
    cluster = training_on("8Gi")
    first = plan_of(cluster)

    restart_on(cluster, "2Gi")
    planned, second = condition(cluster, ConditionType.PLANNED), plan_of(cluster)
    restart_on(cluster, "2Gi")

    assert (planned.reason, second.tables == first.tables) == ("Replanned", False)
    assert "node 0 takes" in planned.message
    assert [each.message for each in cluster.events if each.reason == "Replanned"] == [planned.message]
    assert plan_of(cluster).tables == second.tables
    assert condition(cluster, ConditionType.PLANNED).reason == "Planned"


def test_on_restart_tiers_are_planned_for_the_hardware_of_now() -> None:
    cluster = training_on("2Gi", "onRestart")
    first = plan_of(cluster)

    restart_on(cluster, "64Gi")

    second = plan_of(cluster)
    assert second.tables != first.tables
    assert [each.rank for each in second.tables[0].shards] == [each.rank for each in first.tables[0].shards]
    assert condition(cluster, ConditionType.PLANNED).reason == "Planned"


def test_a_plan_that_is_lost_is_made_anew() -> None:
    cluster = training_on("8Gi")

    cluster.config_maps = {}
    restart_on(cluster, "64Gi")

    assert status(cluster).attempt == 2
    assert not plan_of(cluster).replanned
