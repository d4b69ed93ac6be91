"""How findings fold into a status, and what each reason's message names.

A new reason needs a situation here (``@says``), or a place in ``WITHOUT_MESSAGE``.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest

from dlrm_api.names import USER_ERROR_CODES, ExitCode
from dlrm_api.progress import CheckpointerProgress, TerminationMessage
from dlrm_api.status import Condition, ConditionType, DLRMJobStatus, Phase, ProgressStatus
from dlrm_operator.controller.apply import ActionExecutor
from dlrm_operator.reconcile.findings import WAITS, Finding, ForeignReason, Reason, RuleResult, fold, timestamp
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import EmitEvent, JobKey, Planning, UpdateStatus
from dlrm_testing.operator.hung_gang import hung_cluster, straggling_cluster
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.memory_api import MemoryApi
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.pools import CHEAP, DEAR, job_of_pools, restart_on, training_on
from dlrm_testing.operator.running_job import (
    POD_0,
    POD_1,
    crash_checkpointer,
    lose_node,
    measure,
    predicted_job,
    report_progress,
    running,
    start_next_attempt,
    start_training,
)

Situation = Callable[[], ModelCluster]
ROWS: dict[Reason, tuple[tuple[str, ...], Situation]] = {}
"""By reason: what its message must name, and how a cluster comes to report it."""
WITHOUT_MESSAGE = {
    Reason.PLANNING,
    Reason.ALL_PODS_SCHEDULED,
    Reason.RESTARTING,
    Reason.TRAINING,
    Reason.STORE_AVAILABLE,
    Reason.FINISHED,
}


def says(reason: Reason, *names: str) -> Callable[[Situation], Situation]:
    """Register the situation in which a job reports ``reason``, and what its message must name."""

    def register(situation: Situation) -> Situation:
        assert reason not in ROWS, f"{reason} is registered twice"
        ROWS[reason] = names, situation
        return situation

    return register


class SeeingCluster(ModelCluster):
    """A model cluster of which a test may replace what is observed."""

    def __init__(self, replicas: int = 2, **spec: Any) -> None:
        super().__init__(replicas, **spec)
        self.facts: dict[str, Any] = {}

    def turn_with(self, **facts: Any) -> "SeeingCluster":
        """Reconcile once with these facts."""
        for action in reconcile(replace(self.observe(), **facts), self.now):
            self.perform(action)
        return self


def messages(cluster: ModelCluster) -> dict[str, set[str]]:
    """Return the messages of the job's status and Events by reason."""
    status = DLRMJobStatus.model_validate(cluster.job["status"])
    found: dict[str, set[str]] = {}
    said: list[Condition | EmitEvent | Any] = [*status.conditions, *cluster.events]
    if status.last_failure:
        said.append(status.last_failure)
    for one in said:
        found.setdefault(one.reason, set()).add(one.message)
    return found


@says(Reason.NODES_NEEDED, "status.avoidedNodes", "0/3 nodes")
def avoided_nodes_are_needed() -> ModelCluster:
    cluster = running(backoff="0s")
    until = timestamp(cluster.now + timedelta(minutes=30))
    cluster.job["status"]["avoidedNodes"] = [{"name": "node-a", "until": until}]
    cluster.end(POD_0, "trainer", 137)
    cluster.reconcile_once()
    cluster.pods = {}
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    for pod in cluster.pods.values():
        waits = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
        pod["status"]["conditions"] = [{**waits, "lastTransitionTime": timestamp(cluster.now)}]
    cluster.pass_time(121)
    cluster.reconcile_once()
    return cluster


@says(Reason.HARDWARE_PROFILE_UNAVAILABLE, "spec.trainer.hardware")
def a_profile_is_missing() -> ModelCluster:
    words = "spec.trainer.hardware: there is no HardwareProfile pool: create it or name another"
    return SeeingCluster().turn_with(profile_problem=words)


@says(Reason.UNKNOWN_FIELDS, "spec.lifecycle.newKnob")
def a_definition_is_newer() -> ModelCluster:
    cluster = ModelCluster()
    cluster.job["spec"]["lifecycle"]["newKnob"] = "x"
    cluster.reconcile_once()
    return cluster


@says(Reason.NOT_PREDICTED, "HardwareProfile", "dlrmctl profile measure")
def a_plan_without_rates_is_trained() -> ModelCluster:
    return running()


@says(Reason.NOT_CALIBRATED, "HardwareProfile", "devices.loops", "dlrmctl profile measure")
def a_plan_for_gpus_that_nobody_measured_is_trained() -> ModelCluster:
    cluster = predicted_job()
    cluster.job["status"]["plan"]["uncalibrated"] = ["devices.loops"]
    measure(cluster, step=100, times=1)
    cluster.settle()
    return cluster


@says(Reason.MEASURING, "not measured")
def an_attempt_begins_to_train() -> ModelCluster:
    return predicted_job()


@says(Reason.AS_PREDICTED, "1.10x")
def steps_take_little_longer_than_predicted() -> ModelCluster:
    cluster = predicted_job()
    measure(cluster, step=100, times=1.1)
    cluster.settle()
    return cluster


@says(Reason.SLOWER_THAN_PREDICTED, "2.00x", "exchange")
def steps_take_far_longer_than_predicted() -> ModelCluster:
    cluster = predicted_job()
    for trained_s in (60, 660):
        measure(cluster, step=trained_s, times=2, trained_seconds=trained_s)
        cluster.settle()
    return cluster


@says(Reason.TRACE_UNAVAILABLE, "ConfigMap reuse")
def a_trace_is_missing() -> ModelCluster:
    words = "there is no ConfigMap reuse in namespace space: create it with dlrmctl trace FILE --configmap reuse"
    return SeeingCluster().turn_with(trace_problem=words)


@says(Reason.PLANNED, "2 ranks on 2 nodes")
def a_plan_is_made() -> ModelCluster:
    return running()


@says(Reason.INFEASIBLE, "table a does not fit node 0")
def no_plan_fits() -> ModelCluster:
    cluster = SeeingCluster()
    cluster.reconcile_once()
    return cluster.turn_with(planning=Planning(problem="table a does not fit node 0: 5 bytes short", final=True))


@says(Reason.HARDWARE_CHOSEN, "1 replica of cheap", "1 replica of dear: costs 8.00 more per hour")
def hardware_is_chosen() -> ModelCluster:
    cluster = job_of_pools(CHEAP, DEAR)
    start_training(cluster)
    return cluster


@says(Reason.REPLANNED, "node 0 takes", "2.0 GiB DDR of a pool node")
def a_plan_fits_no_more() -> ModelCluster:
    cluster = training_on("8Gi")
    restart_on(cluster, "2Gi")
    return cluster


@says(Reason.OBJECTIVE_NOT_MET, "maxPricePerBillionSamples 0.00", "of cheap", "of dear")
def all_hardware_costs_too_much() -> ModelCluster:
    cluster = job_of_pools(CHEAP, DEAR, maxPricePerBillionSamples=0)
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    return cluster


@says(Reason.PLANNER_FAILED, "exit code -9")
def the_planner_dies() -> ModelCluster:
    cluster = SeeingCluster()
    cluster.reconcile_once()
    return cluster.turn_with(planning=Planning(problem="the planner ended with exit code -9"))


@says(Reason.REQUEST_DENIED, "exceeded quota: few")
def a_pod_is_refused() -> ModelCluster:
    cluster = SeeingCluster()
    cluster.reconcile_once()
    cluster.plan()
    return cluster.turn_with(refusal='CreatePod: pods "demo-trainer-1-0" is forbidden: exceeded quota: few')


@says(Reason.GANG_SCHEDULER_UNAVAILABLE, "spec.scheduling.gang")
def a_gang_scheduler_is_missing() -> ModelCluster:
    cluster = SeeingCluster(scheduling={"gang": "volcano"})
    cluster.groups_problem = (
        "spec.scheduling.gang: volcano is asked for, and this cluster serves no podgroups of "
        "scheduling.volcano.sh/v1beta1: install Volcano, or set gang: none"
    )
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    return cluster


@says(Reason.QUOTA_PENDING, "2 of 2 pods", "workload demo-1")
def a_gang_waits_in_its_queue() -> ModelCluster:
    cluster = SeeingCluster(scheduling={"gang": "kueue", "queue": "ads"})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
        for pod in cluster.pods.values():
            pod["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    return cluster


def test_a_queued_gang_quotes_kueue() -> None:
    words = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor any, 2 more needed"
    cluster = cast("SeeingCluster", a_gang_waits_in_its_queue())

    cluster.turn_with(queue_message=words)

    waiting = next(c for c in cluster.job["status"]["conditions"] if c["type"] == "Scheduled")
    assert words in waiting["message"]
    assert "demo-1" in waiting["message"]


@says(Reason.UNSCHEDULABLE, "1 of 2 pods", "0/2 nodes are available: 2 Insufficient memory.")
def a_pod_finds_no_node() -> ModelCluster:
    cluster = gang_created()
    cluster.start(POD_1)
    words = "0/2 nodes are available: 2 Insufficient memory."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    cluster.pods[POD_0]["status"]["conditions"] = [unscheduled]
    cluster.reconcile_once()
    return cluster


def test_a_gang_reports_what_its_pods_lack_rather_than_that_it_does_not_fit() -> None:
    cluster = gang_created()
    group = "pod group is unschedulable, minCount (2) cannot be satisfied: 1 scheduled, 0 remaining"
    for name, words in ((POD_0, group), (POD_1, "0/2 nodes are available: 2 Insufficient memory.")):
        unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
        cluster.pods[name]["status"]["conditions"] = [unscheduled]
    cluster.reconcile_once()

    waiting = next(c for c in cluster.job["status"]["conditions"] if c["type"] == "Scheduled")
    assert waiting["message"] == f"2 of 2 pods are unschedulable: {words}"


@says(Reason.TRAINERS_STARTING, "1 of 2 trainers", "demo-trainer-1-0/trainer: ContainerCreating")
def a_container_is_being_made() -> ModelCluster:
    return waiting("trainer", "ContainerCreating", "")


@says(Reason.IMAGE_PULL_ERROR, "demo-trainer-1-0/checkpointer", "spec.trainer.checkpointerImage")
def an_image_cannot_be_pulled() -> ModelCluster:
    return waiting("checkpointer", "ImagePullBackOff", "no such image")


@says(Reason.CONTAINER_CONFIG_ERROR, 'secret "keys" not found', "namespace space")
def a_secret_is_missing() -> ModelCluster:
    return waiting("trainer", "CreateContainerConfigError", 'secret "keys" not found')


@says(Reason.PODS_TERMINATING, "demo-trainer-1-0 on node node")
def pods_of_the_last_attempt_take_their_time() -> ModelCluster:
    return an_attempt_fails()


@says(Reason.POD_FORCE_DELETED, "pod demo-trainer-1-0 (node node)")
def a_pod_does_not_end() -> ModelCluster:
    cluster = an_attempt_fails()
    cluster.reconcile_once()
    cluster.pass_time(600)
    cluster.reconcile_once()
    return cluster


@says(Reason.NODE_LOST, "node node of pod demo-trainer-1-1")
def a_node_is_lost() -> ModelCluster:
    cluster = running()
    lose_node(cluster, POD_1)
    cluster.end(POD_0, "trainer", 75, message(75, "PeerLost", "rank 1 died or fell silent"))
    cluster.reconcile_once()
    return cluster


@says(Reason.CHECKPOINTER_CRASH_LOOP, "demo-trainer-1-1/checkpointer", "code 70")
def a_checkpointer_crashes_again_and_again() -> ModelCluster:
    cluster = running()
    crash_checkpointer(cluster, POD_1, 70, "Error")
    cluster.reconcile_once()
    return cluster


@says(Reason.MEMORY_RESERVE_RAISED, "attempt 2")
def a_pod_runs_out_of_memory() -> ModelCluster:
    cluster = running()
    cluster.end(POD_1, "trainer", 137, reason="OOMKilled")
    cluster.reconcile_once()
    return cluster


@says(
    Reason.HANG_DETECTED, "step 7", "rank 1 in pod demo-trainer-1-1 on node node", "data/reader.py:12", "rank 0 in pod"
)
def a_gang_hangs() -> ModelCluster:
    return hung_cluster()


@says(Reason.STRAGGLER_DETECTED, "rank 1 in pod demo-trainer-1-1 on node node")
def a_rank_is_slow() -> ModelCluster:
    return straggling_cluster()


@says(Reason.DISRUPTION_LIMIT_EXCEEDED, "spec.lifecycle.restart.maxFreeRestarts", "PodDeleted")
def a_gang_is_disrupted_without_end() -> ModelCluster:
    cluster = running(maxFreeRestarts=1)
    del cluster.pods[POD_1]
    start_next_attempt(cluster)
    del cluster.pods["demo-trainer-2-1"]
    cluster.reconcile_once()
    return cluster


@says(Reason.PROGRESS_UNKNOWN, "pod 0")
def pod_0_is_silent() -> ModelCluster:
    cluster = gang_created()
    for name in cluster.pods:
        cluster.start(name)
    cluster.reconcile_once()
    return cluster


def trainer_reports(cluster: ModelCluster, **fields: Any) -> ModelCluster:
    """Let pod 0 report other fields of its progress."""
    report_progress(cluster, step=0)
    assert cluster.polled is not None
    assert cluster.polled.trainer is not None
    cluster.polled = replace(cluster.polled, trainer=cluster.polled.trainer.model_copy(update=fields))
    cluster.reconcile_once()
    return cluster


@says(Reason.WAITING_FOR_RANKS, "rank 1")
def ranks_do_not_come() -> ModelCluster:
    waiting = "waiting for rank 1 since 09:00:00 UTC, for at most 600 s: they have not come"
    return trainer_reports(pod_0_is_silent(), phase="Starting", waiting=waiting)


@says(Reason.NOTICE, "old.csv")
def files_were_left_out() -> ModelCluster:
    return trainer_reports(running(), notes=("data.train: 3 files; left out: old.csv (hidden file)",))


@says(Reason.RESTORING, "snapshot")
def trainers_restore() -> ModelCluster:
    return trainer_reports(pod_0_is_silent(), phase="Restoring")


@says(Reason.COMMITTING, "snapshot")
def the_last_upload_goes_on() -> ModelCluster:
    cluster = running()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
    cluster.reconcile_once()
    return cluster


@says(Reason.STORE_UNAVAILABLE, "AccessDenied")
def the_store_refuses() -> ModelCluster:
    cluster = running()
    report_progress(cluster, step=2, store_error="AccessDenied: check the credentials secret")
    cluster.reconcile_once()
    return cluster


@says(Reason.POD_FAILED, "pod demo-trainer-1-1")
def a_pod_fails_before_it_starts() -> ModelCluster:
    cluster = gang_created()
    cluster.pods[POD_1]["status"]["phase"] = "Failed"
    cluster.reconcile_once()
    return cluster


@says(Reason.POD_DELETED, "pod demo-trainer-1-1")
def a_pod_is_deleted() -> ModelCluster:
    cluster = running()
    del cluster.pods[POD_1]
    cluster.reconcile_once()
    return cluster


@says(Reason.PLAN_DELETED, "ConfigMap demo-plan-1", "pod demo-trainer-1-0")
def a_plan_is_deleted() -> ModelCluster:
    cluster = ModelCluster()
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    cluster.config_maps.clear()
    cluster.reconcile_once()
    return cluster


@says(Reason.SNAPSHOT_NOT_COMMITTED, "step 100", "step 90", "503")
def the_last_snapshot_is_lost() -> ModelCluster:
    cluster = running()
    word = committed_progress(90).model_copy(update={"store_error": "503 slow down"}).model_dump_json()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
        cluster.end(name, "checkpointer", 1, word)
    cluster.reconcile_once()
    return cluster


@says(Reason.COMMITTED, "step 100")
@says(Reason.SUCCEEDED, "step 100")
def a_job_succeeds() -> ModelCluster:
    cluster = the_last_upload_goes_on()
    cluster.end(POD_0, "checkpointer", 0, committed_progress(100).model_dump_json())
    cluster.reconcile_once()
    return cluster


@says(Reason.INVALID_SPEC, "spec.model.tables[0].dim")
def a_spec_can_never_work() -> ModelCluster:
    cluster = ModelCluster()
    cluster.job["spec"]["model"]["tables"][0]["dim"] = 3
    cluster.reconcile_once()
    return cluster


@says(Reason.BACKOFF_LIMIT_EXCEEDED, "spec.lifecycle.restart.maxRestarts", "Internal: boom")
def the_budget_is_spent() -> ModelCluster:
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 70, message(70, "Internal", "boom"))
    start_next_attempt(cluster)
    cluster.end("demo-trainer-2-0", "trainer", 70, message(70, "Internal", "boom"))
    cluster.reconcile_once()
    return cluster


@says(Reason.ATTEMPT_FAILED, "attempt 1, pod demo-trainer-1-0", "Internal: boom")
def an_attempt_fails() -> ModelCluster:
    cluster = running()
    cluster.end(POD_0, "trainer", 70, message(70, "Internal", "boom"))
    cluster.reconcile_once()
    return cluster


@says(Reason.RUNNING, "attempt 2")
def the_next_gang_trains() -> ModelCluster:
    cluster = an_attempt_fails()
    start_next_attempt(cluster)
    return cluster


@says(Reason.FAILED, "train.tsv, row 7: column C3")
def data_are_bad() -> ModelCluster:
    cluster = running()
    cluster.end(POD_0, "trainer", 65, message(65, "BadData", "train.tsv, row 7: column C3 is no hex id"))
    cluster.reconcile_once()
    return cluster


@says(Reason.CHECKPOINTING, "pod 0", "no route to host")
@says(Reason.SUSPENDING, "pod 0")
def a_suspended_gang_is_silent() -> ModelCluster:
    cluster = running()
    cluster.edit("lifecycle", suspend=True)
    cluster.reconcile_once()
    cluster.answer_cut(None, "no route to host")
    cluster.pass_time(31)
    cluster.reconcile_once()
    return cluster


@says(Reason.TERMINATING, "2 pods")
def a_suspended_gang_is_let_go() -> ModelCluster:
    cluster = a_suspended_gang_is_silent()
    cluster.pass_time(601)
    cluster.reconcile_once()
    return cluster


@says(Reason.SUSPENDED, "commitDeadline", "spec.lifecycle.suspend")
def a_job_is_suspended() -> ModelCluster:
    cluster = a_suspended_gang_is_let_go()
    cluster.pods = {}
    cluster.reconcile_once()
    return cluster


@says(Reason.RESUMED, "attempt 2")
def a_job_is_resumed() -> ModelCluster:
    cluster = a_job_is_suspended()
    cluster.edit("lifecycle", suspend=False)
    cluster.reconcile_once()
    return cluster


def scaled(replicas: int) -> ModelCluster:
    cluster = running()
    cluster.edit("trainer", replicas=replicas)
    cluster.reconcile_once()
    return cluster


@says(Reason.RESIZING, "attempt 2", "3 pods")
@says(Reason.RESIZED, "3 pods")
def a_gang_is_resized() -> ModelCluster:
    cluster = scaled(3)
    cluster.plan()
    cluster.reconcile_once()
    cluster.pass_time(601)
    cluster.reconcile_once()
    cluster.pods = {}
    start_training(cluster)
    return cluster


@says(Reason.RESIZE_REFUSED, "9 pods", "table a does not fit", "spec.trainer.replicas")
def a_size_does_not_fit() -> ModelCluster:
    cluster = scaled(9)
    cluster.planning = Planning(problem="table a does not fit", final=True)
    cluster.reconcile_once()
    return cluster


@says(Reason.PENDING_DEADLINE_EXCEEDED, "spec.lifecycle.pendingDeadline")
def nobody_starts_in_time() -> ModelCluster:
    cluster = gang_created()
    cluster.edit("lifecycle", pendingDeadline="5m")
    cluster.reconcile_once()
    cluster.pass_time(301)
    cluster.reconcile_once()
    return cluster


@says(Reason.DEADLINE_EXCEEDED, "spec.lifecycle.activeDeadline")
def a_job_runs_for_too_long() -> ModelCluster:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1m", commitDeadline="1s")
    cluster.pass_time(61)
    cluster.reconcile_once()
    cluster.pass_time(2)
    cluster.reconcile_once()
    return cluster


@says(Reason.SPEC_CHANGED, "attempt 2")
def a_failed_job_is_fixed() -> ModelCluster:
    cluster = data_are_bad()
    cluster.edit("training", seed=5)
    cluster.reconcile_once()
    return cluster


def gang_created() -> ModelCluster:
    """A cluster whose pods were all created and have not started."""
    cluster = ModelCluster()
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    assert len(cluster.pods) == 2
    return cluster


def waiting(container: str, reason: str, words: str) -> ModelCluster:
    """A cluster one of whose pods has a node, and a container that the kubelet does not start."""
    cluster = gang_created()
    cluster.start(POD_1)
    kind = "containerStatuses" if container == "trainer" else "initContainerStatuses"
    cluster.pods[POD_0]["spec"]["nodeName"] = "node"
    state = {"waiting": {"reason": reason, "message": words}}
    cluster.pods[POD_0]["status"][kind] = [{"name": container, "state": state}]
    cluster.reconcile_once()
    return cluster


def message(code: int, reason: str, words: str) -> str:
    return TerminationMessage(exit_code=code, reason=reason, message=words).encode().decode()


PENDING = Finding(condition=ConditionType.SCHEDULED, status="False", reason=Reason.UNSCHEDULABLE, message="no node")
SCHEDULED = Finding(condition=ConditionType.SCHEDULED, status="True", reason=Reason.ALL_PODS_SCHEDULED)
EARLY, LATE = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


def test_the_last_finding_of_a_condition_and_the_last_phase_win() -> None:
    first = RuleResult(findings=(replace(PENDING, phase=Phase.SCHEDULING),), changes={"restarts": 1})
    second = RuleResult(findings=(replace(SCHEDULED, phase=Phase.RUNNING),), changes={"restarts": 2})

    folded = fold(DLRMJobStatus(), [first, second, RuleResult()], EARLY)

    assert [(each.type, each.status) for each in folded.conditions] == [("Scheduled", "True")]
    assert (folded.phase, folded.restarts) == (Phase.RUNNING, 2)


@pytest.mark.parametrize(("later", "moves"), [(SCHEDULED, True), (replace(PENDING, message="other"), False)])
def test_a_transition_time_moves_only_with_the_status(later: Finding, moves: bool) -> None:
    before = fold(DLRMJobStatus(), [RuleResult(findings=(PENDING,))], EARLY)

    # What a pass reports in between does not count.
    between = RuleResult(findings=(SCHEDULED,))
    after = fold(before, [between, RuleResult(findings=(later,))], LATE)

    assert after.conditions[0].last_transition_time == timestamp(LATE if moves else EARLY)


def test_findings_are_bounded() -> None:
    huge = replace(PENDING, reason=ForeignReason("R" * 1_000), message="m" * 100_000)

    folded = fold(DLRMJobStatus(), [RuleResult(findings=(huge,))], EARLY)

    assert DLRMJobStatus.model_validate(folded.model_dump()) == folded


def test_a_job_that_does_not_train_has_no_throughput() -> None:
    progress = ProgressStatus(step=7, samples_per_second=9.0, eta=timestamp(LATE))
    status = DLRMJobStatus(phase=Phase.RUNNING, progress=progress)
    restarting = RuleResult(findings=(replace(PENDING, phase=Phase.RESTARTING),))

    kept, stripped = (fold(status, results, EARLY).progress for results in ([RuleResult()], [restarting]))

    assert kept == progress
    assert stripped == ProgressStatus(step=7)


def test_every_reason_is_reported_in_some_situation() -> None:
    assert set(ROWS) | WITHOUT_MESSAGE == set(Reason), "register a situation for each new reason"
    assert not set(ROWS) & WITHOUT_MESSAGE


@pytest.mark.parametrize("reason", ROWS)
def test_a_message_names_the_object_and_the_field(reason: Reason) -> None:
    names, situation = ROWS[reason]

    found = messages(situation()).get(reason, set())

    assert [message for message in found if all(name in message for name in names)], found


@pytest.mark.parametrize("reason", WAITS)
def test_a_wait_has_one_event_when_it_begins(reason: Reason) -> None:
    cluster = ROWS[reason][1]()

    assert [each.kind for each in cluster.events if each.reason == reason] == [WAITS[reason]]


@pytest.mark.parametrize("code", sorted(set(ExitCode) - {ExitCode.DONE}))
def test_an_exit_code_without_a_message_is_reported_by_name(code: ExitCode) -> None:
    cluster = running()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", code)
    cluster.reconcile_once()

    reason = code.name.title().replace("_", "")
    assert any(str(code.value) in message for message in messages(cluster)[reason])


@pytest.mark.parametrize("code", sorted(USER_ERROR_CODES))
def test_a_checkpointers_user_error_is_quoted(code: ExitCode) -> None:
    cluster = running()
    left = CheckpointerProgress(store_error="AccessDenied: check spec.checkpoint.credentials").model_dump_json()

    cluster.end(POD_0, "checkpointer", code, left)
    cluster.reconcile_once()

    word = "Checkpointer" + code.name.title().replace("_", "")
    assert any("AccessDenied" in words for words in messages(cluster)[word])


@pytest.mark.parametrize("reason", ["Evicted", "NodeShutdown", "Preempting", "OutOfcpu", "UnexpectedAdmissionError"])
def test_a_disruption_is_reported_in_the_kubelets_words(reason: str) -> None:
    cluster = gang_created()
    cluster.pods[POD_0]["status"] |= {"phase": "Failed", "reason": reason, "message": "the node had no space left"}

    cluster.reconcile_once()

    assert "the node had no space left" in messages(cluster)[reason]


def test_a_pass_without_news_writes_nothing() -> None:
    cluster = running()
    start_training(cluster)

    assert not [action for action in cluster.reconcile_once() if isinstance(action, UpdateStatus | EmitEvent)]


@pytest.mark.parametrize("reason", [Reason.ATTEMPT_FAILED, Reason.FAILED])
def test_a_failure_emits_one_event_for_any_evidence(reason: Reason) -> None:
    api, key = MemoryApi(), JobKey("space", "demo")
    unused = dict.fromkeys(
        ("planner", "checkpoint_client", "stack_client", "queue", "jobs", "pods", "control_key"), cast("Any", None)
    )
    executor = ActionExecutor(api=api, **unused)
    base = EmitEvent(key=key, uid="u", kind="Warning", reason=reason, message="pod deleted", attempt=2)

    for event in (base, replace(base, message="pod is gone"), replace(base, attempt=3)):
        asyncio.run(executor.execute(event))

    assert len(api.objects) == 2
