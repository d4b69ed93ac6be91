"""Check the decisions of reconcile, case by case, on a cluster of plain data."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

import pytest

from dlrm_api.hardware import parse_profile
from dlrm_api.names import Env
from dlrm_api.progress import EvalMetrics, Progress, TerminationMessage, TrainerPhase
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.api_client import Object
from dlrm_operator.reconcile.findings import find_condition, parse_timestamp
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import (
    CreateConfigMap,
    CreatePod,
    CreateService,
    DeleteObject,
    EmitEvent,
    Planning,
    Polled,
    RequestPlan,
    UpdateStatus,
    WakeAt,
)
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import KEY, ModelCluster
from dlrm_testing.operator.running_job import (
    POD_0,
    POD_1,
    condition,
    report_progress,
    running,
    start_next_attempt,
    start_training,
    status,
)


def test_all_phases_of_one_reconcile_are_one_write() -> None:
    cluster = ModelCluster()

    actions = cluster.reconcile_once()

    assert [type(action) for action in actions] == [UpdateStatus, RequestPlan]
    assert status(cluster).phase is Phase.PLANNING
    assert status(cluster).attempt == 1


def test_a_plan_is_written_down_before_a_pod_relies_on_it() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()
    cluster.plan()

    actions = cluster.reconcile_once(max_actions=2)  # the operator dies then
    cluster.planning = None  # and a restarted operator knows no answer
    created = cluster.reconcile_once()

    kinds = [type(action) for action in actions]
    assert kinds == [CreateService, CreateConfigMap, CreatePod, CreatePod, UpdateStatus]
    assert len([action for action in created if isinstance(action, CreatePod)]) == 2
    assert not [action for action in created if isinstance(action, RequestPlan)]


def test_a_gang_is_called_whole_only_after_its_last_pod_was_created() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()
    cluster.plan()

    cluster.reconcile_once(max_actions=4)  # the operator dies after the first of two pods
    between = status(cluster)
    cluster.reconcile_once()

    assert between.gang_attempt == 0
    assert status(cluster).gang_attempt == 1
    assert set(cluster.pods) == {POD_0, POD_1}


def variables(pod: Object) -> set[str]:
    return {variable["name"] for variable in pod["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize("given", [True, False])
def test_all_pods_of_a_gang_have_a_secret_or_none(given: bool) -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once(max_actions=3)  # the operator dies after the first of two pods
    [first] = cluster.pods.values()
    if not given:  # it was of a version that gives no secret
        trainer = first["spec"]["containers"][0]
        trainer["env"] = [variable for variable in trainer["env"] if variable["name"] != Env.GANG_SECRET]

    cluster.reconcile_once()

    assert [Env.GANG_SECRET in variables(pod) for pod in cluster.pods.values()] == [given, given]


def test_a_refused_child_is_reported_before_the_retry() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()
    cluster.plan()

    actions = reconcile(replace(cluster.observe(), refusal="CreatePod: exceeded quota: few"), cluster.now)

    emitted, update, retried = actions[0], actions[1], actions[-1]
    assert isinstance(emitted, EmitEvent)
    assert "exceeded quota" in emitted.message
    assert isinstance(update, UpdateStatus)
    assert "exceeded quota" in find_condition(update.status.conditions, ConditionType.SCHEDULED).message
    assert isinstance(retried, CreatePod)


def test_pods_that_pod_security_refuses_for_rdma_name_the_label_that_allows_them() -> None:
    cluster = ModelCluster()
    network = {"rdma": {"resource": "rdma/hca", "ipcLock": True}}
    spec = {"tiers": {"ddr": {"bytes": "512Gi"}}, "network": network}
    cluster.profiles = (parse_profile({"metadata": {"name": "pool"}, "spec": spec}),)
    cluster.job["spec"]["trainer"]["hardware"] = "pool"
    cluster.reconcile_once()
    cluster.plan()
    words = 'violates PodSecurity "baseline:latest": non-default capabilities (container "trainer": "IPC_LOCK")'

    found = [
        message_of(reconcile(replace(cluster.observe(), refusal=refusal), cluster.now))
        for refusal in (words, "exceeded quota: few")
    ]

    assert "pod-security.kubernetes.io/enforce=privileged" in found[0]
    assert "network.rdma.ipcLock" in found[0]
    assert found[1].endswith("exceeded quota: few")


def message_of(actions: Sequence[object]) -> str:
    (status,) = (each.status for each in actions if isinstance(each, UpdateStatus))
    return find_condition(status.conditions, ConditionType.SCHEDULED).message


def test_a_start_through_many_phases_needs_two_urgent_writes() -> None:
    cluster, kept = ModelCluster(), []
    for _ in range(6):
        kept += [
            action for action in cluster.reconcile_once() if isinstance(action, UpdateStatus) and not action.passing
        ]
        cluster.plan()
        for name in cluster.pods:
            cluster.start(name)
    report_progress(cluster, step=1)

    kept += [action for action in cluster.reconcile_once() if isinstance(action, UpdateStatus)]

    assert [action.status.phase for action in kept] == [Phase.SCHEDULING, Phase.RUNNING]
    assert [action.decisive for action in kept] == [True, False]


def test_a_repeated_answer_is_not_written_again() -> None:
    cluster = running()

    cluster.pass_time(3_600)

    assert not [action for action in cluster.reconcile_once() if not isinstance(action, WakeAt)]


def test_nothing_is_done_for_a_job_that_is_being_deleted() -> None:
    cluster = running()
    cluster.job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.end(POD_0, "trainer", 70)

    assert reconcile(cluster.observe(), cluster.now) == ()


def test_an_upload_is_not_cut_off_by_success() -> None:
    cluster = running()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
    cluster.end(POD_0, "checkpointer", 0, committed_progress(100).model_dump_json())

    actions = cluster.reconcile_once()

    assert not [action for action in actions if isinstance(action, DeleteObject)]


def test_a_succeeded_job_shows_its_trainers_last_report() -> None:
    cluster = running()
    report_progress(cluster, step=20)
    cluster.reconcile_once()
    quality = EvalMetrics(step=100, samples=10, log_loss=0.5, ne=0.875, auc=0.75)
    last = Progress(attempt=1, step=100, total_steps=100, samples=6_400, loss=0.25, evaluation=quality)
    for name, progress in ((POD_0, last), (POD_1, None)):
        left = TerminationMessage(exit_code=0, reason="Done", step=100, progress=progress)
        cluster.end(name, "trainer", 0, left.encode().decode())
        cluster.end(name, "checkpointer", 0, committed_progress(100).model_dump_json())

    cluster.settle()

    shown = status(cluster)
    assert shown.phase is Phase.SUCCEEDED
    assert shown.progress is not None
    assert (shown.progress.step, shown.progress.samples) == (100, 6_400)
    assert (shown.progress.ne, shown.progress.auc) == (0.875, 0.75)


def test_an_endpoint_that_falls_silent_changes_nothing() -> None:
    cluster = running()
    cluster.polled = None

    cluster.pass_time(3_600)

    assert cluster.reconcile_once() == ()


def test_figures_reach_the_status_every_30_s_and_transitions_at_once() -> None:
    cluster = running()
    writes = cluster.writes

    for step in range(2, 30):
        cluster.pass_time(2)
        report_progress(cluster, step=step)
        cluster.reconcile_once()
    slow = cluster.writes - writes
    report_progress(cluster, step=30, store_error="bucket is gone")
    cluster.reconcile_once()

    assert slow == 1
    assert cluster.writes == writes + 2
    assert condition(cluster, ConditionType.SNAPSHOT_HEALTHY).status == "False"


def test_figures_have_the_digits_that_people_read_and_no_more() -> None:
    cluster = running()
    cluster.pass_time(30)
    assert cluster.polled is not None
    assert cluster.polled.trainer is not None
    word = cluster.polled.trainer.model_copy(
        update={"step": 2, "loss": 0.4711234567, "samples_per_second": 123_456.789}
    )
    cluster.polled = replace(cluster.polled, trainer=word)

    cluster.reconcile_once()

    progress = status(cluster).progress
    assert progress is not None
    assert (progress.loss, progress.samples_per_second) == (0.47112, 123_460.0)


def test_a_gang_that_ended_takes_its_speed_and_its_expected_end_along() -> None:
    cluster = running()
    cluster.pass_time(30)
    assert cluster.polled is not None
    assert cluster.polled.trainer is not None
    word = cluster.polled.trainer.model_copy(update={"step": 2, "eta_seconds": 60.0, "samples_per_second": 5.0})
    cluster.polled = replace(cluster.polled, trainer=word)
    cluster.reconcile_once()
    before = status(cluster).progress

    cluster.pods.pop(POD_0)
    cluster.reconcile_once()

    after = status(cluster).progress
    assert before is not None
    assert before.eta is not None
    assert after is not None
    assert (after.step, after.eta, after.samples_per_second) == (2, None, None)


def test_an_answer_of_another_attempt_or_pod_is_ignored() -> None:
    cluster = running()
    stranger = Progress(attempt=1, phase=TrainerPhase.TRAINING, step=77)
    cluster.polled = Polled(pod_uid="another", trainer=stranger)

    cluster.pass_time(60)

    assert cluster.reconcile_once() == ()


def test_pods_of_a_deleted_namesake_are_waited_for_and_left_alone() -> None:
    cluster = running()
    for pod in cluster.pods.values():
        pod["metadata"]["ownerReferences"][0]["uid"] = "an older job"
    cluster.job["status"] = {}

    actions = cluster.reconcile_once()

    assert not [action for action in actions if isinstance(action, CreatePod | DeleteObject)]


def test_a_pod_without_an_owner_is_named_with_its_remedy() -> None:
    """``kubectl delete --cascade=orphan`` leaves such pods, which the garbage collector never takes."""
    cluster = running()
    pod = next(iter(cluster.pods.values()))
    pod["metadata"]["ownerReferences"] = []

    actions = [action for _ in range(3) for action in cluster.reconcile_once()]

    waits = condition(cluster, ConditionType.SCHEDULED)
    name = pod["metadata"]["name"]
    assert not [action for action in actions if isinstance(action, DeleteObject) and action.name == name]
    assert f"kubectl delete pod {name}" in waits.message


def test_a_spec_that_can_never_work_fails_with_its_field_named() -> None:
    cluster = ModelCluster()
    cluster.job["spec"]["model"]["tables"][0]["dim"] = 3

    cluster.reconcile_once()

    failed = condition(cluster, ConditionType.FAILED)
    assert status(cluster).phase is Phase.FAILED
    assert failed.reason == "InvalidSpec"
    assert "tables" in failed.message


def test_an_infeasible_plan_fails_in_the_planners_words() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()

    cluster.planning = Planning(problem="trainer: table a does not fit node 0: 5 bytes short", final=True)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED
    planned = condition(cluster, ConditionType.PLANNED)
    assert (planned.status, planned.reason) == ("False", "Infeasible")
    assert "5 bytes short" in planned.message


def test_a_crashed_planner_is_not_an_answer() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()

    cluster.planning = Planning(problem="the planner ended with exit code -9")
    cluster.reconcile_once()
    waiting = status(cluster)
    cluster.plan()
    cluster.reconcile_once()

    assert waiting.phase is Phase.PLANNING
    assert find_condition(waiting.conditions, ConditionType.PLANNED).reason == "PlannerFailed"
    assert condition(cluster, ConditionType.PLANNED).status == "True"


def test_config_maps_left_of_another_plan_are_replaced() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once(max_actions=2)
    stale = cluster.config_maps["demo-plan-1"]
    stale["binaryData"] = {"plan.0123456789abcdef.0-of-2.gz": "AAAA"}

    actions = cluster.reconcile_once()

    kinds = [type(action).__name__ for action in actions if not isinstance(action, UpdateStatus | EmitEvent)]
    assert kinds[:2] == ["DeleteObject", "CreateConfigMap"]


def test_a_stored_part_of_the_plan_is_not_created_again() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once(max_actions=2)
    stale = copy.deepcopy(cluster.config_maps["demo-plan-1"])
    stale["metadata"] |= {"name": "demo-plan-1-9", "uid": "stale"}
    stale["binaryData"] = {"plan.0123456789abcdef.0-of-2.gz": "AAAA"}
    cluster.config_maps["demo-plan-1-9"] = stale

    actions = cluster.reconcile_once()

    kinds = [type(action).__name__ for action in actions if not isinstance(action, UpdateStatus | EmitEvent)]
    assert kinds[:2] == ["DeleteObject", "CreatePod"]


def test_plans_of_earlier_attempts_are_removed_once_the_next_gang_stands() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)

    start_next_attempt(cluster)

    assert set(cluster.config_maps) == {"demo-plan-2"}


@pytest.mark.parametrize("again", range(1, 3))
@pytest.mark.parametrize("most", range(2, 8))
def test_a_crash_while_creating_pods_leaves_no_earlier_plan(most: int, again: int) -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 1)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.pass_time(120)

    cluster.reconcile_once(most)
    cluster.reconcile_once(again)
    start_training(cluster)

    assert set(cluster.config_maps) == {"demo-plan-2"}


def test_a_silent_scheduler_is_named() -> None:
    cluster = ModelCluster()
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    for pod in cluster.pods.values():
        pod["spec"]["schedulerName"] = "volcno"
    cluster.pass_time(60)

    cluster.reconcile_once()

    assert "volcno" in condition(cluster, ConditionType.SCHEDULED).message


def test_the_schedulers_words_explain_a_pending_gang() -> None:
    cluster = ModelCluster()
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    words = "0/2 nodes are available: 2 Insufficient memory."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    cluster.pods[POD_0]["status"]["conditions"] = [unscheduled]

    cluster.reconcile_once()

    scheduled = condition(cluster, ConditionType.SCHEDULED)
    assert status(cluster).phase is Phase.SCHEDULING
    assert words in scheduled.message


@pytest.mark.parametrize("code", [0, 78])
def test_a_job_that_has_ended_shows_no_replicas(code: int) -> None:
    cluster = running()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", code, cluster.done(100) if code == 0 else "")
    cluster.end(POD_0, "checkpointer", 0, committed_progress(100).model_dump_json())

    cluster.settle()

    assert status(cluster).phase is (Phase.FAILED if code else Phase.SUCCEEDED)
    assert status(cluster).replicas == 0


@pytest.mark.parametrize("attempt", [None, 1])
def test_a_gang_outlives_a_status_whose_attempt_was_taken_back(attempt: int | None) -> None:
    cluster = running(backoff="0s")
    cluster.end(POD_0, "trainer", 1)
    start_next_attempt(cluster)
    pods = set(cluster.pods)

    cluster.job["status"]["attempt"] = attempt
    if attempt is None:
        del cluster.job["status"]["attempt"]
    cluster.touch()
    cluster.settle()

    assert set(cluster.pods) == pods
    assert (status(cluster).attempt, status(cluster).phase) == (2, Phase.RUNNING)


def test_the_status_says_what_the_job_selects_and_how_many_pods_there_are() -> None:
    cluster = running()

    assert status(cluster).selector == f"dlrm.dev/job={KEY.name}"
    assert status(cluster).replicas == 2
    assert status(cluster).observed_generation == 1
    assert cluster.now - parse_timestamp(status(cluster).start_time) < timedelta(minutes=1)
