"""What reconcile decides, case by case, on a cluster of plain data."""

import json
from datetime import timedelta
from typing import Any

import pytest
from kubelet_double import committed_word
from model_cluster import KEY, ModelCluster

from dlrm_api.progress import CheckpointerProgress, Progress, TerminationMessage, TrainerPhase
from dlrm_api.status import ConditionType, DLRMJobStatus, Phase
from dlrm_operator.actions import ApplyStatus, CreatePod, DeleteObject, EmitEvent, RequestPlan, WakeAt
from dlrm_operator.conditions import find_condition, parse_timestamp
from dlrm_operator.observed import Planning, Polled
from dlrm_operator.reconcile import FORCE_AFTER, reconcile

POD_0, POD_1 = "demo-trainer-1-0", "demo-trainer-1-1"


def status(cluster: ModelCluster) -> DLRMJobStatus:
    return DLRMJobStatus.model_validate(cluster.job.get("status", {}))


def running(replicas: int = 2, **restart: Any) -> ModelCluster:
    """A cluster whose job trains in its first attempt."""
    limits = {"maxRestarts": 3, "backoff": "10s", "maxBackoff": "1m", **restart}
    cluster = ModelCluster(replicas, lifecycle={"restart": limits})
    bring_up(cluster)
    return cluster


def bring_up(cluster: ModelCluster) -> None:
    for _ in range(5):
        cluster.turn()
        cluster.plan()
        for name in cluster.pods:
            cluster.start(name)
    say(cluster, step=1)
    cluster.settle()
    assert status(cluster).phase is Phase.RUNNING


def say(cluster: ModelCluster, step: int, committed: int | None = None, **word: Any) -> None:
    attempt = max(status(cluster).attempt, 1)
    first = cluster.pods[f"demo-trainer-{attempt}-0"]["metadata"]["uid"]
    trainer = Progress(attempt=attempt, phase=TrainerPhase.TRAINING, step=step, loss=0.5)
    checkpointer = committed_word(committed).model_copy(update=word)
    cluster.polled = Polled(pod_uid=first, trainer=trainer, checkpointer=checkpointer)


def next_gang(cluster: ModelCluster) -> None:
    """Old pods go, the backoff passes, the next gang trains."""
    cluster.turn()
    cluster.pods = {}
    cluster.pass_time(120)
    bring_up(cluster)


def test_all_phases_passed_in_one_turn_are_one_write() -> None:
    cluster = ModelCluster()

    actions = cluster.turn()

    assert [type(action) for action in actions] == [ApplyStatus, RequestPlan]
    assert status(cluster).phase is Phase.PLANNING
    assert status(cluster).attempt == 1


def test_a_plan_is_written_down_before_a_pod_relies_on_it() -> None:
    cluster = ModelCluster()
    cluster.turn()
    cluster.plan()

    written = cluster.turn()
    cluster.planning = None  # an operator that was started anew knows no answer
    created = cluster.turn()

    assert not [action for action in written if isinstance(action, CreatePod)]
    assert len([action for action in created if isinstance(action, CreatePod)]) == 2
    assert not [action for action in created if isinstance(action, RequestPlan)]


def test_nothing_is_done_for_a_job_that_is_being_deleted() -> None:
    cluster = running()
    cluster.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.end(POD_0, "trainer", 70)

    assert reconcile(cluster.observe(), cluster.now) == ()


@pytest.mark.parametrize(
    ("code", "phase", "charged"),
    [
        (64, Phase.FAILED, 0),
        (65, Phase.FAILED, 0),
        (66, Phase.FAILED, 0),
        (77, Phase.FAILED, 0),
        (78, Phase.FAILED, 0),
        (1, Phase.RESTARTING, 1),
        (70, Phase.RESTARTING, 1),
        (74, Phase.RESTARTING, 1),
        (137, Phase.RESTARTING, 1),
        (139, Phase.RESTARTING, 1),
    ],
)
def test_what_an_exit_code_means(code: int, phase: Phase, charged: int) -> None:
    cluster = running()

    cluster.end(POD_1, "trainer", code)
    cluster.turn()

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
    cluster.turn()

    assert status(cluster).phase is phase
    assert status(cluster).charged_restarts == charged


def test_symptoms_wait_for_their_cause() -> None:
    cluster = running()

    cluster.end(POD_0, "trainer", 75, '{"exitCode": 75, "reason": "PeerLost", "message": "rank 1 is gone"}')
    first = cluster.turn()
    cluster.pass_time(2)
    cluster.end(POD_1, "trainer", 65, '{"exitCode": 65, "reason": "BadData", "message": "row 7"}')
    cluster.turn()

    assert [action for action in first if isinstance(action, WakeAt)]
    assert status(cluster).phase is Phase.FAILED
    assert find_condition(status(cluster).conditions, ConditionType.FAILED).reason == "BadData"


def test_a_symptom_alone_is_a_failure_after_a_moment() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 75, '{"exitCode": 75, "reason": "PeerLost"}')
    cluster.turn()

    cluster.pass_time(6)
    cluster.turn()

    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).restarts_by_reason == {"PeerLost": 1}


def test_a_drained_pod_explains_its_neighbours_crash() -> None:
    cluster = running()
    disruption = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cluster.pods[POD_0]["status"]["conditions"] = [disruption]

    cluster.end(POD_1, "trainer", 134)
    cluster.turn()

    assert status(cluster).restarts_by_reason == {"EvictionByEvictionAPI": 1}
    assert status(cluster).charged_restarts == 0


def test_out_of_memory_keeps_the_kubelets_word() -> None:
    cluster = running()

    cluster.end(POD_0, "trainer", 137, reason="OOMKilled")
    cluster.turn()

    assert status(cluster).restarts_by_reason == {"OOMKilled": 1}


def test_a_checkpointer_without_permission_fails_the_job_while_trainers_run() -> None:
    cluster = running()
    word = CheckpointerProgress(store_error="AccessDenied: check the credentials secret").model_dump_json()
    sidecar = cluster.pods[POD_0]["status"]["initContainerStatuses"][0]
    sidecar["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    sidecar["lastState"] = {"terminated": {"exitCode": 77, "message": word}}

    cluster.turn()

    assert status(cluster).phase is Phase.FAILED
    assert "AccessDenied" in find_condition(status(cluster).conditions, ConditionType.FAILED).message


def test_backoff_doubles_up_to_its_ceiling_and_is_kept_in_the_status() -> None:
    cluster = running(maxRestarts=6)
    waits = []

    for attempt in range(1, 6):
        cluster.end(f"demo-trainer-{attempt}-0", "trainer", 1)
        cluster.turn()
        waits.append((parse_timestamp(status(cluster).restart_not_before) - cluster.now).total_seconds())
        next_gang(cluster)

    assert waits == [10, 20, 40, 60, 60]


def test_no_pod_is_created_before_the_backoff_ends() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.turn()
    cluster.pods = {}

    cluster.pass_time(5)
    early = cluster.turn()
    cluster.pass_time(6)
    bring_up(cluster)

    assert not [action for action in early if isinstance(action, CreatePod | RequestPlan)]
    assert [action for action in early if isinstance(action, WakeAt)]
    assert status(cluster).attempt == 2


def test_the_budget_ends_in_failure_that_names_the_last_step() -> None:
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 1)
    next_gang(cluster)

    cluster.end("demo-trainer-2-0", "trainer", 1)
    cluster.turn()

    failed = find_condition(status(cluster).conditions, ConditionType.FAILED)
    assert status(cluster).phase is Phase.FAILED
    assert failed.reason == "RestartBudgetSpent"
    assert "without progress since step 0" in failed.message


def test_a_newly_committed_step_makes_the_budget_whole() -> None:
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 1)
    next_gang(cluster)

    say(cluster, step=60, committed=50)
    cluster.end("demo-trainer-2-0", "trainer", 1)
    cluster.turn()

    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).charged_restarts == 1
    assert status(cluster).restarts == 2
    assert status(cluster).last_snapshot.step == 50


def test_a_snapshot_seen_again_after_a_restore_is_no_progress() -> None:
    cluster = running(maxRestarts=1)
    say(cluster, step=60, committed=50)
    cluster.end(POD_0, "trainer", 1)
    next_gang(cluster)

    say(cluster, step=51, committed=50)
    cluster.end("demo-trainer-2-0", "trainer", 1)
    cluster.turn()

    assert status(cluster).phase is Phase.FAILED


def test_success_needs_the_last_step_committed() -> None:
    cluster = running()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
    cluster.turn()
    committing = status(cluster)
    cluster.end(POD_0, "checkpointer", 0, committed_word(100).model_dump_json())
    cluster.turn()

    assert committing.phase is Phase.RUNNING
    assert find_condition(committing.conditions, ConditionType.RUNNING).reason == "Committing"
    assert status(cluster).phase is Phase.SUCCEEDED
    assert status(cluster).completion_time is not None
    assert status(cluster).progress.step == 100


def test_a_gang_that_ends_without_its_last_snapshot_is_restarted() -> None:
    cluster = running()
    word = committed_word(90).model_copy(update={"store_error": "503 slow down"}).model_dump_json()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
        cluster.end(name, "checkpointer", 1, word)
    cluster.turn()

    failure = status(cluster).last_failure
    assert status(cluster).phase is Phase.RESTARTING
    assert failure.reason == "SnapshotNotCommitted"
    assert "step 100" in failure.message
    assert "503 slow down" in failure.message


def test_an_upload_is_not_cut_off_by_success() -> None:
    cluster = running()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
    cluster.end(POD_0, "checkpointer", 0, committed_word(100).model_dump_json())

    actions = cluster.turn()

    assert not [action for action in actions if isinstance(action, DeleteObject)]


def test_an_endpoint_that_falls_silent_changes_nothing() -> None:
    cluster = running()
    cluster.polled = None

    cluster.pass_time(3_600)

    assert cluster.turn() == ()


def test_figures_reach_the_status_every_30_s_and_transitions_at_once() -> None:
    cluster = running()
    writes = cluster.writes

    for step in range(2, 30):
        cluster.pass_time(2)
        say(cluster, step=step)
        cluster.turn()
    slow = cluster.writes - writes
    say(cluster, step=30, store_error="bucket is gone")
    cluster.turn()

    assert slow == 1
    assert cluster.writes == writes + 2
    assert find_condition(status(cluster).conditions, ConditionType.SNAPSHOT_HEALTHY).status == "False"


def test_an_answer_of_another_attempt_or_pod_is_ignored() -> None:
    cluster = running()
    stranger = Progress(attempt=1, phase=TrainerPhase.TRAINING, step=77)
    cluster.polled = Polled(pod_uid="another", trainer=stranger)

    cluster.pass_time(60)

    assert cluster.turn() == ()


def test_a_pod_stuck_in_termination_is_deleted_by_force_once_its_time_is_long_over() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.turn()
    deleted = cluster.turn()

    cluster.now = parse_timestamp(cluster.pods[POD_1]["metadata"]["deletionTimestamp"]) + FORCE_AFTER
    forced = cluster.turn()

    assert [action for action in deleted if isinstance(action, DeleteObject)] == []
    assert {(action.name, action.force) for action in forced if isinstance(action, DeleteObject)} == {
        (POD_0, True),
        (POD_1, True),
    }


def test_pods_of_a_deleted_job_of_the_same_name_are_waited_for_and_left_alone() -> None:
    cluster = running()
    for pod in cluster.pods.values():
        pod["metadata"]["ownerReferences"][0]["uid"] = "an older job"
    cluster.job["status"] = {}

    actions = cluster.turn()

    assert not [action for action in actions if isinstance(action, CreatePod | DeleteObject)]


def test_a_spec_that_can_never_work_fails_with_its_field_named() -> None:
    cluster = ModelCluster()
    cluster.job["spec"]["model"]["tables"][0]["dim"] = 3

    cluster.turn()

    failed = find_condition(status(cluster).conditions, ConditionType.FAILED)
    assert status(cluster).phase is Phase.FAILED
    assert failed.reason == "InvalidSpec"
    assert "tables" in failed.message


def test_an_infeasible_plan_fails_in_the_planners_words() -> None:
    cluster = ModelCluster()
    cluster.turn()

    cluster.planning = Planning(problem="trainer: table a does not fit node 0: 5 bytes short", final=True)
    cluster.turn()

    assert status(cluster).phase is Phase.FAILED
    planned = find_condition(status(cluster).conditions, ConditionType.PLANNED)
    assert (planned.status, planned.reason) == ("False", "Infeasible")
    assert "5 bytes short" in planned.message


def test_a_planner_that_crashed_is_no_verdict() -> None:
    cluster = ModelCluster()
    cluster.turn()

    cluster.planning = Planning(problem="the planner ended with exit code -9")
    cluster.turn()
    waiting = status(cluster)
    cluster.plan()
    cluster.turn()

    assert waiting.phase is Phase.PLANNING
    assert find_condition(waiting.conditions, ConditionType.PLANNED).reason == "PlannerFailed"
    assert find_condition(status(cluster).conditions, ConditionType.PLANNED).status == "True"


def test_config_maps_that_a_crash_left_of_another_plan_make_room() -> None:
    cluster = ModelCluster()
    cluster.turn()
    cluster.plan()
    cluster.turn()
    stale = cluster.config_maps["demo-plan-1"]
    stale["binaryData"] = {"plan.0123456789abcdef.0-of-2.gz": "AAAA"}
    cluster.job["status"]["gangAttempt"] = 0

    actions = cluster.turn()

    kinds = [type(action).__name__ for action in actions if not isinstance(action, ApplyStatus | EmitEvent)]
    assert kinds == ["DeleteObject", "ApplyConfigMap", "WakeAt"]


def test_plans_and_tokens_of_earlier_attempts_are_removed_once_the_next_gang_stands() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)

    next_gang(cluster)

    assert set(cluster.config_maps) == {"demo-plan-2"}
    assert set(cluster.secrets) == {"demo-token-2"}


def test_evidence_is_bounded() -> None:
    cluster = running()

    left = TerminationMessage(exit_code=70, reason="Internal", message="x" * 100_000).encode().decode()
    cluster.end(POD_0, "trainer", 70, left)
    events = [action for action in cluster.turn() if isinstance(action, EmitEvent)]

    assert len(status(cluster).last_failure.message) <= 4_096
    assert max(len(event.message) for event in events) <= 1_024
    assert len(json.dumps(cluster.job["status"])) < 20_000


def test_the_schedulers_words_explain_a_pending_gang() -> None:
    cluster = ModelCluster()
    for _ in range(3):
        cluster.turn()
        cluster.plan()
    words = "0/2 nodes are available: 2 Insufficient memory."
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    cluster.pods[POD_0]["status"]["conditions"] = [condition]

    cluster.turn()

    scheduled = find_condition(status(cluster).conditions, ConditionType.SCHEDULED)
    assert status(cluster).phase is Phase.SCHEDULING
    assert words in scheduled.message


def test_the_status_says_what_the_job_selects_and_how_many_pods_there_are() -> None:
    cluster = running()

    assert status(cluster).selector == f"dlrm.dev/job={KEY.name}"
    assert status(cluster).replicas == 2
    assert status(cluster).observed_generation == 1
    assert cluster.now - parse_timestamp(status(cluster).start_time) < timedelta(minutes=1)
