"""Failures by their cause, and what follows: who is charged, when the next gang starts, what memory it gets."""

from datetime import timedelta
from typing import Any

import pytest

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.progress import TerminationMessage
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.attempts import EARLIER_FAILURES, NODE_LOST_AFTER
from dlrm_operator.reconcile.findings import parse_timestamp
from dlrm_operator.reconcile.health import FORCE_DELETE_AFTER
from dlrm_operator.reconcile.state import DeleteObject, WakeAt
from dlrm_testing.operator.kubelet_double import committed_word
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import (
    POD_0,
    POD_1,
    bring_up,
    condition,
    crash_checkpointer,
    failure,
    lose_node,
    next_gang,
    running,
    say,
    status,
)

GIB = 2**30


def missed_peer(cluster: ModelCluster, name: str) -> None:
    words = TerminationMessage(exit_code=75, reason="PeerLost", message="rank 1 died or fell silent", rank=0)
    cluster.end(name, "trainer", 75, words.encode().decode())


def test_a_lost_node_is_known_from_its_pods_conditions_and_not_charged() -> None:
    cluster = running()

    missed_peer(cluster, POD_0)
    cluster.turn()
    first = status(cluster).phase
    cluster.pass_time(45)
    lose_node(cluster, POD_1)
    cluster.turn()

    assert first is Phase.RUNNING
    assert status(cluster).charged_restarts == 0
    assert status(cluster).restarts_by_reason == {"NodeLost": 1}
    assert (failure(cluster).pod, failure(cluster).node) == (POD_1, "node")


@pytest.mark.parametrize(
    ("stands_in_the_way", "reason", "words"),
    [
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]},
            "Unschedulable",
            "0/2 nodes are available",
        ),
        (
            {
                "containerStatuses": [
                    {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such tag"}}}
                ]
            },
            "ImagePullError",
            "ImagePullBackOff: no such tag (check spec.trainer.image",
        ),
    ],
)
def test_ranks_that_give_up_on_a_pod_that_never_started_are_not_charged(
    stands_in_the_way: dict[str, Any], reason: str, words: str
) -> None:
    cluster = ModelCluster(lifecycle={"restart": {"backoff": "10s"}})
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    cluster.pods[POD_1]["status"] |= stands_in_the_way
    if "containerStatuses" in stands_in_the_way:
        cluster.pods[POD_1]["spec"]["nodeName"] = "node"
    cluster.start(POD_0)
    cluster.turn()

    missed_peer(cluster, POD_0)
    cluster.turn()
    cluster.pass_time(61)
    cluster.turn()

    assert status(cluster).restarts_by_reason == {reason: 1}
    assert (status(cluster).charged_restarts, status(cluster).free_restarts) == (0, 1)
    assert failure(cluster).pod == POD_1
    assert words in failure(cluster).message


def test_ranks_that_give_up_on_a_pod_that_the_server_refuses_are_not_charged() -> None:
    cluster = ModelCluster(lifecycle={"restart": {"backoff": "10s"}})
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    del cluster.pods[POD_1]
    cluster.job["status"]["gangAttempt"] = 0
    cluster.start(POD_0)

    missed_peer(cluster, POD_0)
    cluster.turn()

    assert status(cluster).restarts_by_reason == {"RequestDenied": 1}
    assert status(cluster).charged_restarts == 0
    assert f"pod {POD_1} had not been created" in failure(cluster).message


def test_a_silent_node_alone_ends_nothing() -> None:
    cluster = running()
    lose_node(cluster, POD_1)

    cluster.pass_time(200)
    cluster.turn()

    assert status(cluster).phase is Phase.RUNNING


def test_a_pod_on_a_lost_node_is_forced_without_its_whole_grace_period() -> None:
    cluster = running()
    missed_peer(cluster, POD_0)
    lose_node(cluster, POD_1)
    cluster.turn()
    cluster.turn()
    del cluster.pods[POD_0]

    cluster.now += NODE_LOST_AFTER - timedelta(seconds=1)
    cluster.pods[POD_1]["metadata"]["deletionTimestamp"] = "2026-01-01T02:00:00Z"
    early = cluster.turn()
    cluster.pass_time(1)
    forced = cluster.turn()

    assert not [action for action in early if isinstance(action, DeleteObject)]
    assert [(action.name, action.force) for action in forced if isinstance(action, DeleteObject)] == [(POD_1, True)]
    assert any("has been silent for 60 s" in event.message for event in cluster.events)


def committing(step: int = 100) -> ModelCluster:
    """A gang whose trainers ended well, and whose checkpointers still upload the last snapshot."""
    cluster = running()
    say(cluster, step=99, committed=40)
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(step))
    cluster.turn()
    return cluster


def taint_manager_deletes(cluster: ModelCluster, name: str) -> None:
    cluster.delete(name)
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "NoExecute"}
    cluster.pods[name]["status"]["conditions"] = [taken]


def test_a_node_that_is_lost_before_the_last_commit_restarts_the_gang_once_its_pod_could_be_forced() -> None:
    cluster = committing()
    cluster.end(POD_0, "checkpointer", 75, committed_word(40).model_dump_json())
    taint_manager_deletes(cluster, POD_1)

    waits = [action for action in cluster.turn() if isinstance(action, WakeAt)]
    early = status(cluster).phase
    cluster.now = parse_timestamp(cluster.pods[POD_1]["metadata"]["deletionTimestamp"]) + FORCE_DELETE_AFTER
    cluster.turn()

    assert early is Phase.RUNNING
    assert [wait.time for wait in waits] == [cluster.now]
    assert status(cluster).restarts_by_reason == {"DeletionByTaintManager": 1}
    assert status(cluster).charged_restarts == 0
    assert failure(cluster).pod == POD_1


def test_a_node_that_falls_silent_before_the_last_commit_is_waited_for_as_long_as_before_a_forced_deletion() -> None:
    cluster = committing()
    lose_node(cluster, POD_1)
    cluster.end(POD_0, "checkpointer", 75, committed_word(40).model_dump_json())

    cluster.now += NODE_LOST_AFTER - timedelta(seconds=1)
    cluster.turn()
    early = status(cluster).phase
    cluster.pass_time(1)
    cluster.turn()

    assert early is Phase.RUNNING
    assert status(cluster).restarts_by_reason == {"NodeLost": 1}
    assert status(cluster).charged_restarts == 0


def test_an_upload_at_work_is_waited_for_whatever_befell_the_other_pods() -> None:
    cluster = committing()
    lose_node(cluster, POD_1)

    cluster.pass_time(86_400)
    cluster.turn()
    waiting = status(cluster).phase
    cluster.end(POD_0, "checkpointer", 0, committed_word(100).model_dump_json())
    cluster.turn()

    assert waiting is Phase.RUNNING
    assert status(cluster).phase is Phase.SUCCEEDED


@pytest.mark.parametrize(
    ("code", "by_reason", "charged"), [(137, {"EvictionByEvictionAPI": 1}, 0), (0, {"SnapshotNotCommitted": 1}, 1)]
)
def test_a_drain_that_cuts_the_last_upload_off_is_not_charged(
    code: int, by_reason: dict[str, int], charged: int
) -> None:
    cluster = committing()
    cluster.end(POD_1, "checkpointer", 75, committed_word(40).model_dump_json())
    cluster.delete(POD_0)
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cluster.pods[POD_0]["status"]["conditions"] = [evicted]

    cluster.end(POD_0, "checkpointer", code, committed_word(40).model_dump_json())
    cluster.turn()

    assert status(cluster).restarts_by_reason == by_reason
    assert status(cluster).charged_restarts == charged


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("DisruptionTarget", "DeletionByTaintManager"),
        ("DisruptionTarget", "PreemptionByScheduler"),
        ("TerminationTarget", "WorkloadEvictedDueToPreempted"),
    ],
)
def test_whoever_takes_a_pod_away_is_named_and_the_restart_is_free(kind: str, reason: str) -> None:
    cluster = running()
    taken = {"type": kind, "status": "True", "reason": reason, "message": "somebody needed the node"}
    cluster.pods[POD_1]["status"]["conditions"] = [taken]

    cluster.turn()

    assert status(cluster).restarts_by_reason == {reason: 1}
    assert (status(cluster).charged_restarts, status(cluster).free_restarts) == (0, 1)
    assert "somebody needed the node" in failure(cluster).message


@pytest.mark.parametrize(
    "reason", ["OutOfmemory", "UnexpectedAdmissionError", "NodeAffinity", "TaintToleration", "InvalidNodeInfo"]
)
def test_a_pod_that_its_node_did_not_admit_is_not_charged(reason: str) -> None:
    cluster = running()
    cluster.pods[POD_1]["status"] = {"phase": "Failed", "reason": reason, "message": "Pod was rejected"}

    cluster.turn()

    assert status(cluster).charged_restarts == 0
    assert status(cluster).restarts_by_reason == {reason: 1}


def test_a_container_of_others_that_fails_before_the_trainer_starts_is_named() -> None:
    cluster = running()
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": "vault: permission denied"}}
    trainer = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    cluster.pods[POD_1]["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "vault-agent-init", "state": ended}],
        "containerStatuses": [trainer],
    }

    cluster.turn()

    assert status(cluster).restarts_by_reason == {"PodFailed": 1}
    assert "container vault-agent-init" in failure(cluster).message
    assert "vault: permission denied" in failure(cluster).message


def test_an_image_name_that_can_never_be_pulled_fails_the_job_and_names_the_field() -> None:
    cluster = ModelCluster()
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    state = {"waiting": {"reason": "InvalidImageName", "message": 'couldn\'t parse image reference "A:B:C"'}}
    cluster.pods[POD_0]["status"]["containerStatuses"] = [{"name": "trainer", "state": state}]

    cluster.turn()

    failed = condition(cluster, ConditionType.FAILED)
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "InvalidImageName")
    assert "A:B:C" in failed.message
    assert "spec.trainer.image" in failed.message


def test_disruptions_without_progress_end_at_their_own_cap_and_progress_heals_it() -> None:
    cluster = running(maxFreeRestarts=1)
    cluster.delete(POD_0)
    next_gang(cluster)
    say(cluster, step=60, committed=50)
    cluster.turn()
    healed = status(cluster).free_restarts
    cluster.delete("demo-trainer-2-0")
    next_gang(cluster)
    cluster.delete("demo-trainer-3-0")
    cluster.turn()

    failed = condition(cluster, ConditionType.FAILED)
    assert healed == 0
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "DisruptionLimitExceeded")
    assert "no progress since step 50" in failed.message


def test_the_last_failures_are_kept_and_no_more() -> None:
    cluster = running(maxRestarts=100)
    for attempt in range(1, EARLIER_FAILURES + 4):
        words = TerminationMessage(exit_code=70, reason="Internal", message=f"boom {attempt} " + "x" * 8_000, rank=0)
        cluster.end(f"demo-trainer-{attempt}-0", "trainer", 70, words.encode().decode())
        next_gang(cluster)

    kept = [failure(cluster), *status(cluster).earlier_failures]
    assert [one.attempt for one in kept] == [7, 6, 5, 4, 3]
    assert [one.message[:6] for one in kept] == [f"boom {number}" for number in (7, 6, 5, 4, 3)]
    assert all(len(one.message) <= 1_024 for one in kept[1:])


def test_out_of_memory_gives_the_next_gang_more_of_it_once() -> None:
    cluster = running()
    before = asked(cluster, POD_0)

    cluster.end(POD_1, "trainer", 137, reason="OOMKilled")
    next_gang(cluster)
    reserve, after = status(cluster).memory_reserve_bytes, asked(cluster, "demo-trainer-2-0")
    cluster.end("demo-trainer-2-0", "trainer", 137, reason="OOMKilled")
    next_gang(cluster)

    assert reserve >= 512 * 2**20
    assert after == before + reserve
    assert status(cluster).memory_reserve_bytes == reserve
    assert asked(cluster, "demo-trainer-3-0") == after
    assert status(cluster).charged_restarts == 2


def test_a_checkpointer_that_keeps_running_out_of_memory_is_told_from_its_trainer() -> None:
    cluster = running()
    crash_checkpointer(cluster, POD_1, 137, "OOMKilled")

    cluster.turn()

    assert status(cluster).restarts_by_reason == {"CheckpointerOOMKilled": 1}
    assert status(cluster).memory_reserve_bytes > 0


def test_a_crashing_checkpointer_leaves_training_alone_and_shows_as_unhealthy_snapshots() -> None:
    cluster = running()
    crash_checkpointer(cluster, POD_1, 70, "Error")

    cluster.turn()

    assert status(cluster).phase is Phase.RUNNING
    healthy = condition(cluster, ConditionType.SNAPSHOT_HEALTHY)
    assert (healthy.status, healthy.reason) == ("False", "CheckpointerCrashLoop")


def test_a_node_too_small_for_the_reserve_fails_the_job_and_names_what_to_raise() -> None:
    cluster = ModelCluster(2, lifecycle={"restart": {"backoff": "0s"}}, trainer={"replicas": 2, "hardware": "small"})
    cluster.profile = node_of(3 * GIB // 2)
    bring_up(cluster)

    cluster.end(POD_1, "trainer", 137, reason="OOMKilled")
    for _ in range(4):
        cluster.turn()
        cluster.pods = {}
        cluster.plan()

    failed = condition(cluster, ConditionType.FAILED)
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "Infeasible")
    assert "that stay free" in failed.message
    assert "raise DDR per node (HardwareProfile small)" in failed.message


def test_a_budget_spent_by_want_of_memory_names_what_to_raise() -> None:
    limits = {"replicas": 2, "resources": {"limits": {"memory": "64Gi"}}}
    cluster = ModelCluster(2, lifecycle={"restart": {"maxRestarts": 1, "backoff": "0s"}}, trainer=limits)
    bring_up(cluster)

    for attempt in (1, 2):
        cluster.end(f"demo-trainer-{attempt}-1", "trainer", 137, reason="OOMKilled")
        if attempt == 1:
            next_gang(cluster)
    cluster.turn()

    failed = condition(cluster, ConditionType.FAILED)
    assert failed.reason == "BackoffLimitExceeded"
    assert "raise spec.trainer.resources.limits.memory (64Gi)" in failed.message


def test_the_pause_is_said_in_the_condition() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.turn()
    cluster.pods = {}
    cluster.turn()

    scheduled = condition(cluster, ConditionType.SCHEDULED)
    assert scheduled.reason == "Restarting"
    assert "spec.lifecycle.restart.backoff" in scheduled.message
    assert parse_timestamp(status(cluster).restart_not_before or "") > cluster.now


def asked(cluster: ModelCluster, name: str) -> int:
    return int(cluster.pods[name]["spec"]["containers"][0]["resources"]["requests"]["memory"])


def node_of(size: int) -> HardwareProfile:
    document = {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "HardwareProfile",
        "metadata": {"name": "small"},
        "spec": {"tiers": {"ddr": {"bytes": size}}},
    }
    return parse_profile(document)
