"""How an attempt ends and what follows: who is charged, when the next one starts, which memory it gets."""

import json
from datetime import timedelta
from typing import Any

import pytest

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.names import Container, Env
from dlrm_api.progress import CheckpointerProgress, TerminationMessage
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.attempts import EARLIER_FAILURES
from dlrm_operator.reconcile.findings import find_condition, parse_timestamp
from dlrm_operator.reconcile.health import FORCE_DELETE_AFTER
from dlrm_operator.reconcile.outcomes import NODE_LOST_AFTER
from dlrm_operator.reconcile.state import CreatePod, DeleteObject, EmitEvent, RequestPlan, WakeAt
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import (
    POD_0,
    POD_1,
    condition,
    crash_checkpointer,
    failure,
    lose_node,
    report_progress,
    running,
    start_next_attempt,
    start_training,
    started,
    status,
)

GIB = 2**30


def missed_peer(cluster: ModelCluster, name: str) -> None:
    words = TerminationMessage(exit_code=75, reason="PeerLost", message="rank 1 died or fell silent", rank=0)
    cluster.end(name, "trainer", 75, words.encode().decode())


def test_a_lost_node_is_known_from_its_pods_conditions_and_not_charged() -> None:
    cluster = running()

    missed_peer(cluster, POD_0)
    cluster.reconcile_once()
    first = status(cluster).phase
    cluster.pass_time(45)
    lose_node(cluster, POD_1)
    cluster.reconcile_once()

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
def test_a_pod_that_never_started_is_not_charged(stands_in_the_way: dict[str, Any], reason: str, words: str) -> None:
    cluster = ModelCluster(lifecycle={"restart": {"backoff": "10s"}})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    cluster.pods[POD_1]["status"] |= stands_in_the_way
    if "containerStatuses" in stands_in_the_way:
        cluster.pods[POD_1]["spec"]["nodeName"] = "node"
    cluster.start(POD_0)
    cluster.reconcile_once()

    missed_peer(cluster, POD_0)
    cluster.reconcile_once()
    cluster.pass_time(61)
    cluster.reconcile_once()

    assert status(cluster).restarts_by_reason == {reason: 1}
    assert (status(cluster).charged_restarts, status(cluster).free_restarts) == (0, 1)
    assert failure(cluster).pod == POD_1
    assert words in failure(cluster).message


def test_a_denied_pod_that_peers_waited_for_is_not_charged() -> None:
    cluster = ModelCluster(lifecycle={"restart": {"backoff": "10s"}})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    del cluster.pods[POD_1]
    cluster.job["status"]["gangAttempt"] = 0
    cluster.start(POD_0)

    missed_peer(cluster, POD_0)
    cluster.reconcile_once()

    assert status(cluster).restarts_by_reason == {"RequestDenied": 1}
    assert status(cluster).charged_restarts == 0
    assert f"pod {POD_1} had not been created" in failure(cluster).message


def test_a_silent_node_alone_ends_nothing() -> None:
    cluster = running()
    lose_node(cluster, POD_1)

    cluster.pass_time(200)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.RUNNING


def test_a_pod_on_a_lost_node_is_forced_without_its_whole_grace_period() -> None:
    cluster = running()
    missed_peer(cluster, POD_0)
    lose_node(cluster, POD_1)
    cluster.reconcile_once()
    cluster.reconcile_once()
    del cluster.pods[POD_0]

    cluster.now += NODE_LOST_AFTER - timedelta(seconds=1)
    cluster.pods[POD_1]["metadata"]["deletionTimestamp"] = "2026-01-01T02:00:00Z"
    early = cluster.reconcile_once()
    cluster.pass_time(1)
    forced = cluster.reconcile_once()

    assert not [action for action in early if isinstance(action, DeleteObject)]
    assert [(action.name, action.force) for action in forced if isinstance(action, DeleteObject)] == [(POD_1, True)]
    assert any("has been silent for 60 s" in event.message for event in cluster.events)


def committing(step: int = 100) -> ModelCluster:
    """A gang whose trainers ended well, and whose checkpointers still upload the last snapshot."""
    cluster = running()
    report_progress(cluster, step=99, committed=40)
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(step))
    cluster.reconcile_once()
    return cluster


def taint_manager_deletes(cluster: ModelCluster, name: str) -> None:
    cluster.delete(name)
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByTaintManager", "message": "NoExecute"}
    cluster.pods[name]["status"]["conditions"] = [taken]


def test_a_node_lost_before_the_last_commit_restarts_for_free() -> None:
    cluster = committing()
    cluster.end(POD_0, "checkpointer", 75, committed_progress(40).model_dump_json())
    taint_manager_deletes(cluster, POD_1)

    waits = [action for action in cluster.reconcile_once() if isinstance(action, WakeAt)]
    early = status(cluster).phase
    cluster.now = parse_timestamp(cluster.pods[POD_1]["metadata"]["deletionTimestamp"]) + FORCE_DELETE_AFTER
    cluster.reconcile_once()

    assert early is Phase.RUNNING
    assert [wait.time for wait in waits] == [cluster.now]
    assert status(cluster).restarts_by_reason == {"DeletionByTaintManager": 1}
    assert status(cluster).charged_restarts == 0
    assert failure(cluster).pod == POD_1


def test_a_silent_node_is_waited_for_before_the_last_commit() -> None:
    cluster = committing()
    lose_node(cluster, POD_1)
    cluster.end(POD_0, "checkpointer", 75, committed_progress(40).model_dump_json())

    cluster.now += NODE_LOST_AFTER - timedelta(seconds=1)
    cluster.reconcile_once()
    early = status(cluster).phase
    cluster.pass_time(1)
    cluster.reconcile_once()

    assert early is Phase.RUNNING
    assert status(cluster).restarts_by_reason == {"NodeLost": 1}
    assert status(cluster).charged_restarts == 0


def test_a_running_upload_is_awaited_whatever_happened_to_other_pods() -> None:
    cluster = committing()
    lose_node(cluster, POD_1)

    cluster.pass_time(86_400)
    cluster.reconcile_once()
    waiting = status(cluster).phase
    cluster.end(POD_0, "checkpointer", 0, committed_progress(100).model_dump_json())
    cluster.reconcile_once()

    assert waiting is Phase.RUNNING
    assert status(cluster).phase is Phase.SUCCEEDED


@pytest.mark.parametrize(
    ("code", "by_reason", "charged"), [(137, {"EvictionByEvictionAPI": 1}, 0), (0, {"SnapshotNotCommitted": 1}, 1)]
)
def test_a_drain_that_cuts_the_last_upload_off_is_not_charged(
    code: int, by_reason: dict[str, int], charged: int
) -> None:
    cluster = committing()
    cluster.end(POD_1, "checkpointer", 75, committed_progress(40).model_dump_json())
    cluster.delete(POD_0)
    evicted = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cluster.pods[POD_0]["status"]["conditions"] = [evicted]

    cluster.end(POD_0, "checkpointer", code, committed_progress(40).model_dump_json())
    cluster.reconcile_once()

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

    cluster.reconcile_once()

    assert status(cluster).restarts_by_reason == {reason: 1}
    assert (status(cluster).charged_restarts, status(cluster).free_restarts) == (0, 1)
    assert "somebody needed the node" in failure(cluster).message


@pytest.mark.parametrize(
    "reason", ["OutOfmemory", "UnexpectedAdmissionError", "NodeAffinity", "TaintToleration", "InvalidNodeInfo"]
)
def test_a_pod_that_its_node_did_not_admit_is_not_charged(reason: str) -> None:
    cluster = running()
    cluster.pods[POD_1]["status"] = {"phase": "Failed", "reason": reason, "message": "Pod was rejected"}

    cluster.reconcile_once()

    assert status(cluster).charged_restarts == 0
    assert status(cluster).restarts_by_reason == {reason: 1}


def test_a_failed_injected_container_is_named() -> None:
    cluster = running()
    ended = {"terminated": {"exitCode": 3, "reason": "Error", "message": "vault: permission denied"}}
    trainer = {"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}
    cluster.pods[POD_1]["status"] = {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "vault-agent-init", "state": ended}],
        "containerStatuses": [trainer],
    }

    cluster.reconcile_once()

    assert status(cluster).restarts_by_reason == {"PodFailed": 1}
    assert "container vault-agent-init" in failure(cluster).message
    assert "vault: permission denied" in failure(cluster).message


def test_an_invalid_image_name_fails_the_job() -> None:
    cluster = ModelCluster()
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    state = {"waiting": {"reason": "InvalidImageName", "message": 'couldn\'t parse image reference "A:B:C"'}}
    cluster.pods[POD_0]["status"]["containerStatuses"] = [{"name": "trainer", "state": state}]

    cluster.reconcile_once()

    failed = condition(cluster, ConditionType.FAILED)
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "InvalidImageName")
    assert "A:B:C" in failed.message
    assert "spec.trainer.image" in failed.message


def test_disruptions_have_a_limit_that_progress_restores() -> None:
    cluster = running(maxFreeRestarts=1)
    cluster.delete(POD_0)
    start_next_attempt(cluster)
    report_progress(cluster, step=60, committed=50)
    cluster.reconcile_once()
    healed = status(cluster).free_restarts
    cluster.delete("demo-trainer-2-0")
    start_next_attempt(cluster)
    cluster.delete("demo-trainer-3-0")
    cluster.reconcile_once()

    failed = condition(cluster, ConditionType.FAILED)
    assert healed == 0
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "DisruptionLimitExceeded")
    assert "no progress since step 50" in failed.message


def test_the_last_failures_are_kept_and_no_more() -> None:
    cluster = running(maxRestarts=100)
    for attempt in range(1, EARLIER_FAILURES + 4):
        words = TerminationMessage(exit_code=70, reason="Internal", message=f"boom {attempt} " + "x" * 8_000, rank=0)
        cluster.end(f"demo-trainer-{attempt}-0", "trainer", 70, words.encode().decode())
        start_next_attempt(cluster)

    kept = [failure(cluster), *status(cluster).earlier_failures]
    assert [one.attempt for one in kept] == [7, 6, 5, 4, 3]
    assert [one.message[:6] for one in kept] == [f"boom {number}" for number in (7, 6, 5, 4, 3)]
    assert all(len(one.message) <= 1_024 for one in kept[1:])


def test_out_of_memory_gives_the_next_gang_more_of_it_once() -> None:
    cluster = running()
    before = asked(cluster, POD_0)

    cluster.end(POD_1, "trainer", 137, reason="OOMKilled")
    start_next_attempt(cluster)
    reserve, after = status(cluster).memory_reserve_bytes, asked(cluster, "demo-trainer-2-0")
    cluster.end("demo-trainer-2-0", "trainer", 137, reason="OOMKilled")
    start_next_attempt(cluster)

    assert reserve >= 512 * 2**20
    assert after == before + reserve
    assert status(cluster).memory_reserve_bytes == reserve
    assert asked(cluster, "demo-trainer-3-0") == after
    assert status(cluster).charged_restarts == 2


def test_an_oom_killed_checkpointer_raises_the_memory_reserve() -> None:
    cluster = running()
    crash_checkpointer(cluster, POD_1, 137, "OOMKilled")

    cluster.reconcile_once()

    assert status(cluster).restarts_by_reason == {"CheckpointerOOMKilled": 1}
    assert status(cluster).memory_reserve_bytes > 0


def test_a_crashing_checkpointer_only_makes_snapshots_unhealthy() -> None:
    cluster = running()
    crash_checkpointer(cluster, POD_1, 70, "Error")

    cluster.reconcile_once()

    assert status(cluster).phase is Phase.RUNNING
    healthy = condition(cluster, ConditionType.SNAPSHOT_HEALTHY)
    assert (healthy.status, healthy.reason) == ("False", "CheckpointerCrashLoop")


def test_a_node_too_small_for_the_reserve_fails_the_job() -> None:
    cluster = ModelCluster(2, lifecycle={"restart": {"backoff": "0s"}}, trainer={"replicas": 2, "hardware": "small"})
    cluster.profiles = (node_of(3 * GIB // 2),)
    start_training(cluster)

    cluster.end(POD_1, "trainer", 137, reason="OOMKilled")
    for _ in range(4):
        cluster.reconcile_once()
        cluster.pods = {}
        cluster.plan()

    failed = condition(cluster, ConditionType.FAILED)
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "Infeasible")
    assert "that stay free" in failed.message
    assert "raise DDR per node (HardwareProfile small)" in failed.message


def test_a_budget_spent_by_want_of_memory_names_what_to_raise() -> None:
    limits = {"replicas": 2, "resources": {"limits": {"memory": "64Gi"}}}
    cluster = ModelCluster(2, lifecycle={"restart": {"maxRestarts": 1, "backoff": "0s"}}, trainer=limits)
    start_training(cluster)

    for attempt in (1, 2):
        cluster.end(f"demo-trainer-{attempt}-1", "trainer", 137, reason="OOMKilled")
        if attempt == 1:
            start_next_attempt(cluster)
    cluster.reconcile_once()

    failed = condition(cluster, ConditionType.FAILED)
    assert failed.reason == "BackoffLimitExceeded"
    assert "raise spec.trainer.resources.limits.memory (64Gi)" in failed.message


def test_the_backoff_is_shown_in_the_condition() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.reconcile_once()

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


@pytest.mark.parametrize(
    ("code", "phase", "charged"),
    [
        (64, Phase.FAILED, 0),
        (65, Phase.FAILED, 0),
        (78, Phase.FAILED, 0),
        (66, Phase.RESTARTING, 1),
        (77, Phase.RESTARTING, 1),
        (1, Phase.RESTARTING, 1),
        (70, Phase.RESTARTING, 1),
        (74, Phase.RESTARTING, 1),
        (137, Phase.RESTARTING, 1),
        (139, Phase.RESTARTING, 1),
    ],
)
def test_exit_codes_decide_phase_and_charge(code: int, phase: Phase, charged: int) -> None:
    cluster = running()

    cluster.end(POD_1, "trainer", code)
    cluster.reconcile_once()

    assert status(cluster).phase is phase
    assert status(cluster).charged_restarts == charged
    assert status(cluster).last_failure is not None


@pytest.mark.parametrize(
    ("action", "phase", "charged"),
    [("fail", Phase.FAILED, 0), ("restart", Phase.RESTARTING, 1), ("restart-free", Phase.RESTARTING, 0)],
)
def test_the_users_rules_come_before_the_built_in_meaning(action: str, phase: Phase, charged: int) -> None:
    cluster = running(rulesByExitCode=[{"exitCodes": [65, 99], "action": action}])

    cluster.end(POD_0, "trainer", 65)
    cluster.reconcile_once()

    assert status(cluster).phase is phase
    assert status(cluster).charged_restarts == charged


def test_symptoms_wait_for_their_cause() -> None:
    cluster = running()

    cluster.end(POD_0, "trainer", 75, '{"exitCode": 75, "reason": "PeerLost", "message": "rank 1 is gone"}')
    first = cluster.reconcile_once()
    cluster.pass_time(2)
    cluster.end(POD_1, "trainer", 65, '{"exitCode": 65, "reason": "BadData", "message": "row 7"}')
    cluster.reconcile_once()

    assert [action for action in first if isinstance(action, WakeAt)]
    assert status(cluster).phase is Phase.FAILED
    assert condition(cluster, ConditionType.FAILED).reason == "BadData"


def test_a_symptom_alone_is_a_failure_after_a_moment() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 75, '{"exitCode": 75, "reason": "PeerLost"}')
    cluster.reconcile_once()

    cluster.pass_time(50)
    cluster.reconcile_once()
    waiting = status(cluster).phase
    cluster.pass_time(11)
    cluster.reconcile_once()

    assert waiting is Phase.RUNNING
    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).restarts_by_reason == {"PeerLost": 1}


@pytest.mark.parametrize(("ahead_s", "waits"), [(3, True), (59, True), (-59, True), (61, False), (86_400, False)])
def test_a_symptom_waits_for_its_cause_despite_clock_skew(ahead_s: float, waits: bool) -> None:
    cluster = running()

    cluster.pass_time(ahead_s)
    cluster.end(POD_0, "trainer", 75, '{"exitCode": 75, "reason": "PeerLost"}')
    cluster.pass_time(-ahead_s)
    actions = cluster.reconcile_once()

    assert status(cluster).phase is (Phase.RUNNING if waits else Phase.RESTARTING)
    wakes = [(action.time - cluster.now).total_seconds() for action in actions if isinstance(action, WakeAt)]
    assert wakes == ([60 + ahead_s] if waits else [])


def test_a_drained_pod_explains_its_neighbours_crash() -> None:
    cluster = running()
    disruption = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cluster.pods[POD_0]["status"]["conditions"] = [disruption]

    cluster.end(POD_1, "trainer", 134)
    cluster.reconcile_once()

    assert status(cluster).restarts_by_reason == {"EvictionByEvictionAPI": 1}
    assert status(cluster).charged_restarts == 0


def test_out_of_memory_keeps_the_kubelets_word() -> None:
    cluster = running()

    cluster.end(POD_0, "trainer", 137, reason="OOMKilled")
    cluster.reconcile_once()

    assert status(cluster).restarts_by_reason == {"OOMKilled": 1}


@pytest.mark.parametrize("code", [66, 77])
def test_a_missing_file_or_right_fails_a_job_that_never_trained(code: int) -> None:
    cluster = started()

    cluster.end(POD_1, "trainer", code)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED


@pytest.mark.parametrize("code", [66, 77])
def test_a_refusal_after_the_first_step_waits_and_shows_in_a_condition(code: int) -> None:
    cluster = running()
    left = TerminationMessage(exit_code=code, reason="Refused", message="s3://b: AccessDenied", step=5)

    cluster.end(POD_1, "trainer", code, left.model_dump_json())
    cluster.reconcile_once()

    assert "s3://b: AccessDenied" in condition(cluster, ConditionType.RUNNING).message
    assert parse_timestamp(status(cluster).restart_not_before or "") > cluster.now


@pytest.mark.parametrize(("trained", "phase"), [(False, Phase.FAILED), (True, Phase.RESTARTING)])
def test_a_checkpointer_without_permission_is_final_until_the_first_step(trained: bool, phase: Phase) -> None:
    cluster = running() if trained else started()
    word = CheckpointerProgress(store_error="AccessDenied: check the credentials secret").model_dump_json()
    sidecar = cluster.pods[POD_0]["status"]["initContainerStatuses"][0]
    sidecar["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    sidecar["lastState"] = {"terminated": {"exitCode": 77, "message": word}}

    cluster.reconcile_once()

    assert status(cluster).phase is phase
    shown = condition(cluster, ConditionType.RUNNING if trained else ConditionType.FAILED)
    assert "AccessDenied" in shown.message


def test_backoff_doubles_up_to_its_ceiling_and_is_kept_in_the_status() -> None:
    cluster = running(maxRestarts=6)
    waits = []

    for attempt in range(1, 6):
        cluster.end(f"demo-trainer-{attempt}-0", "trainer", 1)
        cluster.reconcile_once()
        waits.append((parse_timestamp(status(cluster).restart_not_before) - cluster.now).total_seconds())
        start_next_attempt(cluster)

    ceilings = [10, 20, 40, 60, 60]
    assert all(0.75 * most - 1 <= wait <= most for wait, most in zip(waits, ceilings, strict=True)), waits


def test_no_pod_is_created_before_the_backoff_ends() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.pods = {}

    cluster.pass_time(5)
    early = cluster.reconcile_once()
    cluster.pass_time(6)
    start_training(cluster)

    assert not [action for action in early if isinstance(action, CreatePod | RequestPlan)]
    assert [action for action in early if isinstance(action, WakeAt)]
    assert status(cluster).attempt == 2


def test_a_spent_budget_fails_the_job_and_names_its_field() -> None:
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 1)
    start_next_attempt(cluster)

    cluster.end("demo-trainer-2-0", "trainer", 1)
    cluster.reconcile_once()

    failed = condition(cluster, ConditionType.FAILED)
    assert status(cluster).phase is Phase.FAILED
    assert failed.reason == "BackoffLimitExceeded"
    assert "spec.lifecycle.restart.maxRestarts" in failed.message


def test_a_newly_committed_step_restores_the_budgets() -> None:
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 1)
    start_next_attempt(cluster)

    report_progress(cluster, step=60, committed=50)
    cluster.end("demo-trainer-2-0", "trainer", 1)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).charged_restarts == 1
    assert status(cluster).restarts == 2
    assert status(cluster).last_snapshot.step == 50


def test_a_snapshot_seen_again_after_a_restore_is_not_progress() -> None:
    cluster = running(maxRestarts=1)
    report_progress(cluster, step=60, committed=50)
    cluster.end(POD_0, "trainer", 1)
    start_next_attempt(cluster)

    report_progress(cluster, step=51, committed=50)
    cluster.end("demo-trainer-2-0", "trainer", 1)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED


def test_each_gang_gets_the_last_committed_snapshot() -> None:
    cluster = running()
    first = [env_of(pod) for pod in cluster.pods.values()]
    report_progress(cluster, step=60, committed=50)
    cluster.end(POD_0, "trainer", 1)
    start_next_attempt(cluster)
    second = [env_of(pod) for pod in cluster.pods.values()]

    assert [env.get(Env.COMMITTED_SNAPSHOT) for env in first] == [None] * 2
    assert [env.get(Env.COMMITTED_SNAPSHOT) for env in second] == ["s3://b/manifests/50-1.json"] * 2


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    """The environment of a pod's trainer."""
    [trainer] = [each for each in pod["spec"]["containers"] if each["name"] == Container.TRAINER]
    return {each["name"]: each["value"] for each in trainer["env"]}


def test_success_needs_the_last_step_committed() -> None:
    cluster = running()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
    cluster.reconcile_once()
    committing = status(cluster)
    cluster.end(POD_0, "checkpointer", 0, committed_progress(100).model_dump_json())
    cluster.reconcile_once()

    assert committing.phase is Phase.RUNNING
    assert find_condition(committing.conditions, ConditionType.RUNNING).reason == "Committing"
    assert status(cluster).phase is Phase.SUCCEEDED
    assert status(cluster).completion_time is not None
    assert status(cluster).progress.step == 100


def test_a_gang_that_ends_without_its_last_snapshot_is_restarted() -> None:
    cluster = running()
    word = committed_progress(90).model_copy(update={"store_error": "503 slow down"}).model_dump_json()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
        cluster.end(name, "checkpointer", 1, word)
    cluster.reconcile_once()

    last = failure(cluster)
    assert status(cluster).phase is Phase.RESTARTING
    assert last.reason == "SnapshotNotCommitted"
    assert "step 100" in last.message
    assert "503 slow down" in last.message


def test_a_pod_stuck_in_termination_is_force_deleted() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    deleted = cluster.reconcile_once()

    cluster.now = parse_timestamp(cluster.pods[POD_1]["metadata"]["deletionTimestamp"]) + FORCE_DELETE_AFTER
    forced = cluster.reconcile_once()

    assert [action for action in deleted if isinstance(action, DeleteObject)] == []
    assert {(action.name, action.force) for action in forced if isinstance(action, DeleteObject)} == {
        (POD_0, True),
        (POD_1, True),
    }


def test_evidence_is_bounded() -> None:
    cluster = running()

    left = TerminationMessage(exit_code=70, reason="Internal", message="x" * 100_000).encode().decode()
    cluster.end(POD_0, "trainer", 70, left)
    events = [action for action in cluster.reconcile_once() if isinstance(action, EmitEvent)]

    assert len(failure(cluster).message) <= 4_096
    assert max(len(event.message) for event in events) <= 1_024
    assert len(json.dumps(cluster.job["status"])) < 20_000
