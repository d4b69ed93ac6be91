"""How an attempt ends and what follows, case by case, on a cluster of plain data."""

import json
from typing import Any

import pytest

from dlrm_api.names import Container, Env
from dlrm_api.progress import CheckpointerProgress, TerminationMessage
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.findings import find_condition, parse_timestamp
from dlrm_operator.reconcile.health import FORCE_DELETE_AFTER
from dlrm_operator.reconcile.state import CreatePod, DeleteObject, EmitEvent, RequestPlan, WakeAt
from dlrm_testing.operator.kubelet_double import committed_word
from dlrm_testing.operator.running_job import (
    POD_0,
    POD_1,
    bring_up,
    condition,
    failure,
    next_gang,
    running,
    say,
    status,
)


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
    assert condition(cluster, ConditionType.FAILED).reason == "BadData"


def test_a_symptom_alone_is_a_failure_after_a_moment() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 75, '{"exitCode": 75, "reason": "PeerLost"}')
    cluster.turn()

    cluster.pass_time(50)
    cluster.turn()
    waiting = status(cluster).phase
    cluster.pass_time(11)
    cluster.turn()

    assert waiting is Phase.RUNNING
    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).restarts_by_reason == {"PeerLost": 1}


@pytest.mark.parametrize(("ahead_s", "waits"), [(3, True), (59, True), (-59, True), (61, False), (86_400, False)])
def test_a_symptom_waits_for_its_cause_also_where_a_kubelets_clock_is_ahead(ahead_s: float, waits: bool) -> None:
    cluster = running()

    cluster.pass_time(ahead_s)
    cluster.end(POD_0, "trainer", 75, '{"exitCode": 75, "reason": "PeerLost"}')
    cluster.pass_time(-ahead_s)
    actions = cluster.turn()

    assert status(cluster).phase is (Phase.RUNNING if waits else Phase.RESTARTING)
    wakes = [(action.time - cluster.now).total_seconds() for action in actions if isinstance(action, WakeAt)]
    assert wakes == ([60 + ahead_s] if waits else [])


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
    assert "AccessDenied" in condition(cluster, ConditionType.FAILED).message


def test_backoff_doubles_up_to_its_ceiling_and_is_kept_in_the_status() -> None:
    cluster = running(maxRestarts=6)
    waits = []

    for attempt in range(1, 6):
        cluster.end(f"demo-trainer-{attempt}-0", "trainer", 1)
        cluster.turn()
        waits.append((parse_timestamp(status(cluster).restart_not_before) - cluster.now).total_seconds())
        next_gang(cluster)

    ceilings = [10, 20, 40, 60, 60]
    assert all(0.75 * most - 1 <= wait <= most for wait, most in zip(waits, ceilings, strict=True)), waits


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

    failed = condition(cluster, ConditionType.FAILED)
    assert status(cluster).phase is Phase.FAILED
    assert failed.reason == "BackoffLimitExceeded"
    assert "spec.lifecycle.restart.maxRestarts" in failed.message


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


def test_each_gang_is_told_which_snapshot_the_job_has_committed() -> None:
    cluster = running()
    first = [env_of(pod) for pod in cluster.pods.values()]
    say(cluster, step=60, committed=50)
    cluster.end(POD_0, "trainer", 1)
    next_gang(cluster)
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

    last = failure(cluster)
    assert status(cluster).phase is Phase.RESTARTING
    assert last.reason == "SnapshotNotCommitted"
    assert "step 100" in last.message
    assert "503 slow down" in last.message


def test_a_pod_stuck_in_termination_is_deleted_by_force_once_its_time_is_long_over() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.turn()
    deleted = cluster.turn()

    cluster.now = parse_timestamp(cluster.pods[POD_1]["metadata"]["deletionTimestamp"]) + FORCE_DELETE_AFTER
    forced = cluster.turn()

    assert [action for action in deleted if isinstance(action, DeleteObject)] == []
    assert {(action.name, action.force) for action in forced if isinstance(action, DeleteObject)} == {
        (POD_0, True),
        (POD_1, True),
    }


def test_evidence_is_bounded() -> None:
    cluster = running()

    left = TerminationMessage(exit_code=70, reason="Internal", message="x" * 100_000).encode().decode()
    cluster.end(POD_0, "trainer", 70, left)
    events = [action for action in cluster.turn() if isinstance(action, EmitEvent)]

    assert len(failure(cluster).message) <= 4_096
    assert max(len(event.message) for event in events) <= 1_024
    assert len(json.dumps(cluster.job["status"])) < 20_000
