"""The sentence that a user reads beside each word of ``dlrm_operator.reconcile.findings``: what, where, and the mend.

A word that is new there needs a situation here (``@reads``), or a place among those that say all by themselves.
"""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from dlrm_api.names import USER_ERROR_CODES, ExitCode
from dlrm_api.progress import CheckpointerProgress, TerminationMessage
from dlrm_api.status import Condition, DLRMJobStatus
from dlrm_operator.controller.apply import ActionExecutor
from dlrm_operator.reconcile.findings import Reason
from dlrm_operator.reconcile.reconcile import reconcile
from dlrm_operator.reconcile.state import EmitEvent, JobKey, Planning, UpdateStatus
from dlrm_testing.operator.hung_gang import hung, straggling
from dlrm_testing.operator.kubelet_double import committed_word
from dlrm_testing.operator.memory_api import MemoryApi
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import (
    POD_0,
    POD_1,
    bring_up,
    crash_checkpointer,
    lose_node,
    next_gang,
    running,
    say,
)

Situation = Callable[[], ModelCluster]
ROWS: dict[Reason, tuple[str, Situation]] = {}
"""By word: what its sentence must hold (a regular expression), and how a cluster comes to say it."""
WORDS_ENOUGH = {
    Reason.PLANNING,
    Reason.ALL_PODS_SCHEDULED,
    Reason.RESTARTING,
    Reason.TRAINING,
    Reason.STORE_AVAILABLE,
    Reason.FINISHED,
}
"""Conditions that need no sentence: nothing is wrong and nothing can be done."""


def reads(reason: Reason, sentence: str) -> Callable[[Situation], Situation]:
    """The situation in which a job says ``reason``, and a pattern of the sentence beside it."""

    def register(situation: Situation) -> Situation:
        assert reason not in ROWS, f"{reason} has its row"
        ROWS[reason] = sentence, situation
        return situation

    return register


class Speaking(ModelCluster):
    """A model cluster that keeps everything it was told to say, of facts that a test may replace."""

    def __init__(self, replicas: int = 2, **spec: Any) -> None:
        super().__init__(replicas, **spec)
        self.facts: dict[str, Any] = {}

    def turn_with(self, **facts: Any) -> "Speaking":
        """One turn that sees these facts."""
        for action in reconcile(replace(self.observe(), **facts), self.now):
            self.perform(action)
        return self


def sentences(cluster: ModelCluster) -> dict[str, set[str]]:
    """Every sentence of the job's status and Events, by the word beside it."""
    status = DLRMJobStatus.model_validate(cluster.job["status"])
    found: dict[str, set[str]] = {}
    said: list[Condition | EmitEvent | Any] = [*status.conditions, *cluster.events]
    if status.last_failure:
        said.append(status.last_failure)
    for one in said:
        found.setdefault(one.reason, set()).add(one.message)
    return found


@reads(
    Reason.HARDWARE_PROFILE_UNAVAILABLE,
    r"spec\.trainer\.hardware: there is no HardwareProfile pool: create it or name another",
)
def a_profile_is_missing() -> ModelCluster:
    words = "spec.trainer.hardware: there is no HardwareProfile pool: create it or name another"
    return Speaking().turn_with(profile_problem=words)


@reads(Reason.UNKNOWN_FIELDS, r"spec\.lifecycle\.newKnob: a field that this operator does not know.*upgraded")
def a_definition_is_newer() -> ModelCluster:
    cluster = ModelCluster()
    cluster.job["spec"]["lifecycle"]["newKnob"] = "x"
    cluster.turn()
    return cluster


@reads(Reason.TRACE_UNAVAILABLE, r"there is no ConfigMap reuse in namespace space: create it with dlrmctl trace")
def a_trace_is_missing() -> ModelCluster:
    words = "there is no ConfigMap reuse in namespace space: create it with dlrmctl trace FILE --configmap reuse"
    return Speaking().turn_with(trace_problem=words)


@reads(Reason.PLANNED, r"^2 ranks on 2 nodes: \w")
def a_plan_is_made() -> ModelCluster:
    return running()


@reads(Reason.INFEASIBLE, r"table a does not fit node 0: 5 bytes short")
def no_plan_fits() -> ModelCluster:
    cluster = Speaking()
    cluster.turn()
    return cluster.turn_with(planning=Planning(problem="table a does not fit node 0: 5 bytes short", final=True))


@reads(Reason.PLANNER_FAILED, r"the planner ended with exit code -9")
def the_planner_dies() -> ModelCluster:
    cluster = Speaking()
    cluster.turn()
    return cluster.turn_with(planning=Planning(problem="the planner ended with exit code -9"))


@reads(Reason.REQUEST_DENIED, r"exceeded quota: few")
def a_pod_is_refused() -> ModelCluster:
    cluster = Speaking()
    cluster.turn()
    cluster.plan()
    return cluster.turn_with(refusal='CreatePod: pods "demo-trainer-1-0" is forbidden: exceeded quota: few')


@reads(
    Reason.GANG_SCHEDULER_UNAVAILABLE,
    r"spec\.scheduling\.gang: volcano is asked for, and this cluster serves no podgroups of "
    r"scheduling\.volcano\.sh/v1beta1: install Volcano, or set gang: none",
)
def a_gang_scheduler_is_missing() -> ModelCluster:
    cluster = Speaking(scheduling={"gang": "volcano"})
    cluster.groups_problem = (
        "spec.scheduling.gang: volcano is asked for, and this cluster serves no podgroups of "
        "scheduling.volcano.sh/v1beta1: install Volcano, or set gang: none"
    )
    for _ in range(3):
        cluster.turn()
        cluster.plan()
    return cluster


@reads(
    Reason.QUOTA_PENDING,
    r"2 of 2 pods wait: Kueue has not admitted the group demo-1 yet: kubectl describe workload demo-1 says why",
)
def a_gang_waits_in_its_queue() -> ModelCluster:
    cluster = Speaking(scheduling={"gang": "kueue", "queue": "ads"})
    for _ in range(4):
        cluster.turn()
        cluster.plan()
        for pod in cluster.pods.values():
            pod["metadata"]["finalizers"] = ["kueue.x-k8s.io/managed"]
    return cluster


def test_a_gang_in_its_queue_is_told_in_kueues_own_words() -> None:
    words = "couldn't assign flavors to pod set main: insufficient unused quota for cpu in flavor any, 2 more needed"
    cluster = cast("Speaking", a_gang_waits_in_its_queue())

    cluster.turn_with(queue_words=words)

    waiting = next(c for c in cluster.job["status"]["conditions"] if c["type"] == "Scheduled")
    assert waiting["message"] == f"2 of 2 pods wait: Kueue has not admitted the group demo-1 yet: {words}"


@reads(Reason.UNSCHEDULABLE, r"1 of 2 pods have no node: 0/2 nodes are available: 2 Insufficient memory\.")
def a_pod_finds_no_node() -> ModelCluster:
    cluster = gang_created()
    cluster.start(POD_1)
    words = "0/2 nodes are available: 2 Insufficient memory."
    unscheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": words}
    cluster.pods[POD_0]["status"]["conditions"] = [unscheduled]
    cluster.turn()
    return cluster


@reads(
    Reason.TRAINERS_STARTING,
    r"1 of 2 trainers have not started: demo-trainer-1-0/trainer: ContainerCreating .*kubectl describe pod",
)
def a_container_is_being_made() -> ModelCluster:
    return waiting("trainer", "ContainerCreating", "")


@reads(
    Reason.IMAGE_PULL_ERROR,
    r"demo-trainer-1-0/checkpointer: ImagePullBackOff: no such image .*spec\.trainer\.checkpointerImage",
)
def an_image_cannot_be_pulled() -> ModelCluster:
    return waiting("checkpointer", "ImagePullBackOff", "no such image")


@reads(
    Reason.CONTAINER_CONFIG_ERROR,
    r'CreateContainerConfigError: secret "keys" not found \(create what is named there in namespace space',
)
def a_secret_is_missing() -> ModelCluster:
    return waiting("trainer", "CreateContainerConfigError", 'secret "keys" not found')


@reads(
    Reason.PODS_TERMINATING,
    r"waits until 2 pods .* are gone: demo-trainer-1-0 on node node \(it ends within its grace",
)
def pods_of_the_last_attempt_take_their_time() -> ModelCluster:
    return an_attempt_fails()


@reads(
    Reason.POD_FORCE_DELETED,
    r"pod demo-trainer-1-0 \(node node\) was still there 60 s after its grace period: .* by force",
)
def a_pod_does_not_end() -> ModelCluster:
    cluster = an_attempt_fails()
    cluster.turn()
    cluster.pass_time(600)
    cluster.turn()
    return cluster


@reads(Reason.NODE_LOST, r"node node of pod demo-trainer-1-1 fell silent")
def a_node_is_lost() -> ModelCluster:
    cluster = running()
    lose_node(cluster, POD_1)
    cluster.end(POD_0, "trainer", 75, message(75, "PeerLost", "rank 1 died or fell silent"))
    cluster.turn()
    return cluster


@reads(
    Reason.CHECKPOINTER_CRASH_LOOP,
    r"demo-trainer-1-1/checkpointer ended with exit code 70 again and again: see its log",
)
def a_checkpointer_crashes_again_and_again() -> ModelCluster:
    cluster = running()
    crash_checkpointer(cluster, POD_1, 70, "Error")
    cluster.turn()
    return cluster


@reads(
    Reason.MEMORY_RESERVE_RAISED, r"a pod ran out of memory: from attempt 2 on each keeps \d+ MiB more, in a new plan"
)
def a_pod_runs_out_of_memory() -> ModelCluster:
    cluster = running()
    cluster.end(POD_1, "trainer", 137, reason="OOMKilled")
    cluster.turn()
    return cluster


@reads(
    Reason.HANG_DETECTED,
    r"no step after step 7 for 300 s \(far longer than recent steps took\); rank 1 in pod demo-trainer-1-1 on node "
    r"node is in no collective, but at read \(data/reader\.py:12\) .*; one of 1 that wait: rank 0 in pod",
)
def a_gang_hangs() -> ModelCluster:
    return hung()


@reads(
    Reason.STRAGGLER_DETECTED,
    r"rank 1 in pod demo-trainer-1-1 on node node has kept the others waiting for long: .* over 1\.5 times theirs",
)
def a_rank_is_slow() -> ModelCluster:
    return straggling()


@reads(
    Reason.DISRUPTION_LIMIT_EXCEEDED,
    r"no progress since step 0: 1 of 1 restarts after disruptions were used "
    r"\(spec\.lifecycle\.restart\.maxFreeRestarts\); the last failure was PodDeleted",
)
def a_gang_is_disrupted_without_end() -> ModelCluster:
    cluster = running(maxFreeRestarts=1)
    del cluster.pods[POD_1]
    next_gang(cluster)
    del cluster.pods["demo-trainer-2-1"]
    cluster.turn()
    return cluster


@reads(Reason.PROGRESS_UNKNOWN, r"trainers run; pod 0 has not answered yet")
def pod_0_is_silent() -> ModelCluster:
    cluster = gang_created()
    for name in cluster.pods:
        cluster.start(name)
    cluster.turn()
    return cluster


@reads(Reason.RESTORING, r"trainers start, or read the newest snapshot")
def trainers_restore() -> ModelCluster:
    cluster = pod_0_is_silent()
    say(cluster, step=0)
    assert cluster.polled is not None
    assert cluster.polled.trainer is not None
    starting = cluster.polled.trainer.model_copy(update={"phase": "Restoring"})
    cluster.polled = replace(cluster.polled, trainer=starting)
    cluster.turn()
    return cluster


@reads(Reason.COMMITTING, r"training is done; the last snapshot is being committed")
def the_last_upload_goes_on() -> ModelCluster:
    cluster = running()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
    cluster.turn()
    return cluster


@reads(Reason.STORE_UNAVAILABLE, r"AccessDenied")
def the_store_refuses() -> ModelCluster:
    cluster = running()
    say(cluster, step=2, store_error="AccessDenied: check the credentials secret")
    cluster.turn()
    return cluster


@reads(Reason.POD_FAILED, r"pod demo-trainer-1-1 failed before its trainer could start")
def a_pod_fails_before_it_starts() -> ModelCluster:
    cluster = gang_created()
    cluster.pods[POD_1]["status"]["phase"] = "Failed"
    cluster.turn()
    return cluster


@reads(Reason.POD_DELETED, r"pod demo-trainer-1-1 was deleted while its gang was at work")
def a_pod_is_deleted() -> ModelCluster:
    cluster = running()
    del cluster.pods[POD_1]
    cluster.turn()
    return cluster


@reads(
    Reason.PLAN_DELETED,
    r"ConfigMap demo-plan-1 with the gang's plan was deleted before pod demo-trainer-1-0 had started by it",
)
def a_plan_is_deleted() -> ModelCluster:
    cluster = ModelCluster()
    for _ in range(3):
        cluster.turn()
        cluster.plan()
    cluster.config_maps.clear()
    cluster.turn()
    return cluster


@reads(
    Reason.SNAPSHOT_NOT_COMMITTED,
    r"training ended at step 100 and no snapshot of it was committed: the newest is of step 90; the store said: 503",
)
def the_last_snapshot_is_lost() -> ModelCluster:
    cluster = running()
    word = committed_word(90).model_copy(update={"store_error": "503 slow down"}).model_dump_json()
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
        cluster.end(name, "checkpointer", 1, word)
    cluster.turn()
    return cluster


@reads(Reason.COMMITTED, r"training ended at step 100 and its snapshot is committed")
@reads(Reason.SUCCEEDED, r"training ended at step 100 and its snapshot is committed")
def a_job_succeeds() -> ModelCluster:
    cluster = the_last_upload_goes_on()
    cluster.end(POD_0, "checkpointer", 0, committed_word(100).model_dump_json())
    cluster.turn()
    return cluster


@reads(Reason.INVALID_SPEC, r"spec\.model\.tables\[0\]\.dim: .*4")
def a_spec_can_never_work() -> ModelCluster:
    cluster = ModelCluster()
    cluster.job["spec"]["model"]["tables"][0]["dim"] = 3
    cluster.turn()
    return cluster


@reads(
    Reason.BACKOFF_LIMIT_EXCEEDED,
    r"no progress since step 0: 1 of 1 restarts were used \(spec\.lifecycle\.restart\.maxRestarts\); "
    r"the last failure was Internal: boom",
)
def the_budget_is_spent() -> ModelCluster:
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 70, message(70, "Internal", "boom"))
    next_gang(cluster)
    cluster.end("demo-trainer-2-0", "trainer", 70, message(70, "Internal", "boom"))
    cluster.turn()
    return cluster


@reads(Reason.ATTEMPT_FAILED, r"attempt 1, pod demo-trainer-1-0: Internal: boom")
def an_attempt_fails() -> ModelCluster:
    cluster = running()
    cluster.end(POD_0, "trainer", 70, message(70, "Internal", "boom"))
    cluster.turn()
    return cluster


@reads(Reason.RUNNING, r"attempt 2 trains")
def the_next_gang_trains() -> ModelCluster:
    cluster = an_attempt_fails()
    next_gang(cluster)
    return cluster


@reads(Reason.FAILED, r"BadData: train\.tsv, row 7: column C3 is no hex id")
def data_are_bad() -> ModelCluster:
    cluster = running()
    cluster.end(POD_0, "trainer", 65, message(65, "BadData", "train.tsv, row 7: column C3 is no hex id"))
    cluster.turn()
    return cluster


@reads(
    Reason.CHECKPOINTING, r"pod 0 is asked for a cut, and again after a moment; it could not be had: no route to host"
)
@reads(Reason.SUSPENDING, r"pod 0 is asked for a cut")
def a_suspended_gang_is_silent() -> ModelCluster:
    cluster = running()
    cluster.edit("lifecycle", suspend=True)
    cluster.turn()
    cluster.answer_cut(None, "no route to host")
    cluster.pass_time(31)
    cluster.turn()
    return cluster


@reads(Reason.TERMINATING, r"2 pods are ending; each may commit a last cut within its grace period")
def a_suspended_gang_is_let_go() -> ModelCluster:
    cluster = a_suspended_gang_is_silent()
    cluster.pass_time(601)
    cluster.turn()
    return cluster


@reads(Reason.SUSPENDED, r"pod 0 gave no cut within commitDeadline \(600 s\).*set spec\.lifecycle\.suspend to false")
def a_job_is_suspended() -> ModelCluster:
    cluster = a_suspended_gang_is_let_go()
    cluster.pods = {}
    cluster.turn()
    return cluster


@reads(Reason.RESUMED, r"attempt 2 goes on")
def a_job_is_resumed() -> ModelCluster:
    cluster = a_job_is_suspended()
    cluster.edit("lifecycle", suspend=False)
    cluster.turn()
    return cluster


def scaled(replicas: int) -> ModelCluster:
    cluster = running()
    cluster.edit("trainer", replicas=replicas)
    cluster.turn()
    return cluster


@reads(Reason.RESIZING, r"attempt 2 follows with 3 pods")
@reads(Reason.RESIZED, r"the gang has 3 pods")
def a_gang_is_resized() -> ModelCluster:
    cluster = scaled(3)
    cluster.plan()
    cluster.turn()
    cluster.pass_time(601)
    cluster.turn()
    cluster.pods = {}
    bring_up(cluster)
    return cluster


@reads(
    Reason.RESIZE_REFUSED,
    r"no plan for 9 pods: table a does not fit.*the gang of 2 pods trains on.*set spec\.trainer\.replicas back to 2",
)
def a_size_does_not_fit() -> ModelCluster:
    cluster = scaled(9)
    cluster.planning = Planning(problem="table a does not fit", final=True)
    cluster.turn()
    return cluster


@reads(
    Reason.PENDING_DEADLINE_EXCEEDED, r"spec\.lifecycle\.pendingDeadline \(300 s\): 2 of 2 pods have no node: the sch"
)
def nobody_starts_in_time() -> ModelCluster:
    cluster = gang_created()
    cluster.edit("lifecycle", pendingDeadline="5m")
    cluster.turn()
    cluster.pass_time(301)
    cluster.turn()
    return cluster


@reads(Reason.DEADLINE_EXCEEDED, r"spec\.lifecycle\.activeDeadline \(60 s\); it has no snapshot: raise the deadline")
def a_job_runs_for_too_long() -> ModelCluster:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1m", commitDeadline="1s")
    cluster.pass_time(61)
    cluster.turn()
    cluster.pass_time(2)
    cluster.turn()
    return cluster


@reads(Reason.SPEC_CHANGED, r"the spec was changed: attempt 2 follows")
def a_failed_job_is_mended() -> ModelCluster:
    cluster = data_are_bad()
    cluster.edit("training", seed=5)
    cluster.turn()
    return cluster


def gang_created() -> ModelCluster:
    """A cluster whose pods were all created and have not started."""
    cluster = ModelCluster()
    for _ in range(4):
        cluster.turn()
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
    cluster.turn()
    return cluster


def message(code: int, reason: str, words: str) -> str:
    return TerminationMessage(exit_code=code, reason=reason, message=words).encode().decode()


def test_every_word_has_a_sentence_or_needs_none() -> None:
    assert set(ROWS) | WORDS_ENOUGH == set(Reason), "give each new reason a row in this file"
    assert not set(ROWS) & WORDS_ENOUGH


@pytest.mark.parametrize("reason", ROWS)
def test_the_sentence_beside_a_word_is_what_the_user_needs(reason: Reason) -> None:
    pattern, situation = ROWS[reason]

    found = sentences(situation()).get(reason, set())

    assert [words for words in found if re.search(pattern, words)], found


@pytest.mark.parametrize("code", sorted(set(ExitCode) - {ExitCode.DONE}))
def test_each_exit_code_of_a_trainer_is_told_by_its_name_where_the_trainer_left_no_message(code: ExitCode) -> None:
    cluster = running()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", code)
    cluster.turn()

    word = code.name.title().replace("_", "")
    assert f"the trainer ended with exit code {code.value} and left no message" in sentences(cluster)[word]


@pytest.mark.parametrize("code", sorted(USER_ERROR_CODES))
def test_a_checkpointer_that_cannot_do_its_work_says_why(code: ExitCode) -> None:
    cluster = running()
    left = CheckpointerProgress(store_error="AccessDenied: check spec.checkpoint.credentials").model_dump_json()

    cluster.end(POD_0, "checkpointer", code, left)
    cluster.turn()

    word = "Checkpointer" + code.name.title().replace("_", "")
    assert any("AccessDenied" in words for words in sentences(cluster)[word])


@pytest.mark.parametrize("reason", ["Evicted", "NodeShutdown", "Preempting", "OutOfcpu", "UnexpectedAdmissionError"])
def test_what_befell_a_pod_is_told_in_the_kubelets_words(reason: str) -> None:
    cluster = gang_created()
    cluster.pods[POD_0]["status"] |= {"phase": "Failed", "reason": reason, "message": "the node had no room left"}

    cluster.turn()

    assert "the node had no room left" in sentences(cluster)[reason]


def test_a_turn_that_says_nothing_new_writes_nothing() -> None:
    cluster = running()
    bring_up(cluster)

    assert not [action for action in cluster.turn() if isinstance(action, UpdateStatus | EmitEvent)]


@pytest.mark.parametrize("reason", [Reason.ATTEMPT_FAILED, Reason.FAILED])
def test_the_failure_of_an_attempt_is_told_once_though_a_later_turn_sees_other_evidence(reason: Reason) -> None:
    api, key = MemoryApi(), JobKey("space", "demo")
    unused = dict.fromkeys(
        ("planner", "checkpoint_client", "stack_client", "queue", "jobs", "pods", "control_key"), cast("Any", None)
    )
    executor = ActionExecutor(api, **unused)
    base = EmitEvent(key=key, uid="u", kind="Warning", reason=reason, message="pod deleted", attempt=2)

    for event in (base, replace(base, message="pod is gone"), replace(base, attempt=3)):
        asyncio.run(executor.execute(event))

    assert len(api.objects) == 2
