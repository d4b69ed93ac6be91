"""Pods that the next attempt waits for, and pods whose objects foreign finalizers keep."""

import pytest

from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.findings import find_condition
from dlrm_operator.reconcile.state import CreatePod, DeleteObject, WakeAt
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster, Object
from dlrm_testing.operator.running_job import POD_0, POD_1, report_progress, running, start_training, status

AUDIT = "example.com/audit"


def failed_and_held() -> ModelCluster:
    """A gang that failed, whose pods another controller keeps."""
    cluster = running(backoff="0s")
    for name in (POD_0, POD_1):
        cluster.pods[name]["metadata"]["finalizers"] = [AUDIT]
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    return cluster


def test_pods_held_only_by_foreign_finalizers_do_not_block() -> None:
    cluster = failed_and_held()
    cluster.remove(POD_0)

    one_still_ends = cluster.reconcile_once()
    cluster.remove(POD_1)
    start_training(cluster)

    assert not [action for action in one_still_ends if isinstance(action, CreatePod)]
    assert status(cluster).phase is Phase.RUNNING
    assert set(cluster.pods) == {POD_0, POD_1, "demo-trainer-2-0", "demo-trainer-2-1"}
    assert [cluster.pods[name]["metadata"]["finalizers"] for name in (POD_0, POD_1)] == [[AUDIT], [AUDIT]]
    assert status(cluster).replicas == 2


def test_a_held_pod_neither_reverts_the_snapshot_nor_restores_budgets() -> None:
    cluster = running(backoff="0s")
    cluster.pods[POD_0]["metadata"]["finalizers"] = [AUDIT]
    cluster.end(POD_0, "checkpointer", 0, committed_progress(10).model_dump_json())
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.remove(POD_0)
    cluster.remove(POD_1)
    start_training(cluster)
    report_progress(cluster, step=21, committed=20)
    cluster.reconcile_once()

    for index in range(2):
        cluster.end(f"demo-trainer-2-{index}", "trainer", 1)
    cluster.reconcile_once()
    for index in range(2):
        cluster.remove(f"demo-trainer-2-{index}")
    cluster.reconcile_once()
    between = status(cluster)
    start_training(cluster)
    report_progress(cluster, step=22, committed=20)
    cluster.settle()

    assert between.last_snapshot is not None
    assert between.last_snapshot.step == 20
    assert between.charged_restarts == 1
    assert status(cluster).charged_restarts == 1


def test_a_held_pod_of_a_lost_node_is_force_deleted_once() -> None:
    cluster = failed_and_held()
    cluster.remove(POD_0)

    cluster.pass_time(10_000)
    forced = cluster.reconcile_once()
    later = cluster.reconcile_once()

    assert {(action.name, action.force) for action in forced if isinstance(action, DeleteObject)} == {(POD_1, True)}
    assert not [action for action in later if isinstance(action, DeleteObject) and action.kind == "Pod"]
    assert cluster.pods[POD_1]["metadata"]["finalizers"] == [AUDIT]


def test_a_finished_job_asks_nothing_more_of_a_pod_that_a_finalizer_keeps() -> None:
    cluster = running()
    cluster.pods[POD_1]["metadata"]["finalizers"] = [AUDIT]
    cluster.end(POD_0, "trainer", 65)
    cluster.reconcile_once()

    cluster.remove(POD_1)

    assert status(cluster).phase is Phase.FAILED
    assert all(isinstance(action, WakeAt) for action in cluster.reconcile_once())


@pytest.mark.parametrize("owners", [[], [{"uid": "an older job"}]])
def test_a_foreign_pod_is_waited_for_and_never_force_deleted(owners: list[Object]) -> None:
    cluster = running(backoff="0s")
    theirs = cluster.pods[POD_1]
    theirs["metadata"]["ownerReferences"] = [{**theirs["metadata"]["ownerReferences"][0], **owner} for owner in owners]
    theirs["metadata"] |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    cluster.remove(POD_0)
    cluster.touch()

    done = []
    for _ in range(5):
        cluster.pass_time(10_000)
        done += cluster.reconcile_once()
    condition = find_condition(status(cluster).conditions, ConditionType.SCHEDULED)

    assert not [action for action in done if isinstance(action, DeleteObject) and action.name == POD_1]
    assert not [action for action in done if isinstance(action, CreatePod)]
    assert condition is not None
    assert f"{POD_1} on node node" in condition.message


def test_a_held_pod_of_a_deleted_namesake_is_waited_for() -> None:
    cluster = ModelCluster()
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    old = cluster.pods.pop(POD_0)
    old["metadata"]["ownerReferences"][0]["uid"] = "an older job"
    old["metadata"] |= {"finalizers": [AUDIT], "deletionGracePeriodSeconds": 0}
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.pods = {POD_0: old}
    del cluster.job["status"]
    cluster.touch()

    waiting = cluster.reconcile_once()
    cluster.pods = {}
    start_training(cluster)

    assert not [action for action in waiting if isinstance(action, CreatePod)]
    assert status(cluster).phase is Phase.RUNNING
