"""Suspend, resize and deadlines: a cut, its commit or a deadline, then no pods; and the way back."""

from datetime import timedelta
from typing import Any

import pytest

from dlrm_api.progress import DataFiles
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.findings import find_condition, parse_timestamp
from dlrm_operator.reconcile.state import (
    CreatePod,
    DeleteJob,
    DeleteObject,
    Planning,
    RequestCut,
    RequestPlan,
    UpdateStatus,
    WakeAt,
)
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, condition, report_progress, running, start_training, status


def wakes(cluster: ModelCluster) -> list[float]:
    """Seconds until the operator wants to look again."""
    return [
        (action.time - cluster.now).total_seconds() for action in cluster.reconcile_once() if isinstance(action, WakeAt)
    ]


def suspended(cluster: ModelCluster, seconds: float) -> None:
    """The job rests for so long, then trains again."""
    cluster.edit("lifecycle", suspend=True)
    cluster.reconcile_once()
    cluster.answer_cut(1)
    report_progress(cluster, step=1, committed=1)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.reconcile_once()
    assert status(cluster).phase is Phase.SUSPENDED
    cluster.pass_time(seconds)
    cluster.edit("lifecycle", suspend=False)
    start_training(cluster)


def test_a_late_start_fails_with_the_schedulers_message() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "5m"})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: 2 too small."}
    cluster.pods[POD_1]["status"]["conditions"] = [unscheduled]
    cluster.start(POD_0)

    cluster.pass_time(299)
    before = wakes(cluster)
    waiting = status(cluster).phase
    cluster.pass_time(1)
    cluster.reconcile_once()

    assert before == [1.0]
    assert waiting is Phase.SCHEDULING
    failed = condition(cluster, ConditionType.FAILED)
    assert failed.reason == "PendingDeadlineExceeded"
    assert "spec.lifecycle.pendingDeadline (300 s)" in failed.message
    assert "0/2 nodes are available: 2 too small." in failed.message
    assert POD_1 not in cluster.pods
    assert "deletionTimestamp" in cluster.pods[POD_0]["metadata"]


def test_a_gang_whose_image_cannot_be_had_fails_in_the_kubelets_words() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "5m"})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    for pod in cluster.pods.values():
        pod["spec"]["nodeName"] = "node"
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": waiting}]

    cluster.reconcile_once()
    cluster.pass_time(301)
    cluster.reconcile_once()

    words = condition(cluster, ConditionType.FAILED).message
    assert "2 of 2 trainers have not started: demo-trainer-1-0/trainer: ImagePullBackOff: no such image" in words


def test_the_pending_deadline_covers_each_attempt_until_it_started() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "5m", "restart": {"backoff": "10m"}})
    start_training(cluster)
    cluster.pass_time(1_000)
    cluster.reconcile_once()
    assert status(cluster).phase is Phase.RUNNING

    cluster.end(POD_0, "trainer", 70)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.reconcile_once()
    cluster.pass_time(601)  # the pause is no wait for pods
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    cluster.pass_time(299)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.SCHEDULING
    cluster.pass_time(2)
    cluster.reconcile_once()
    assert status(cluster).phase is Phase.FAILED


def test_the_next_attempt_has_the_whole_pending_deadline() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "5m", "restart": {"backoff": "10s"}})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    cluster.start(POD_0)
    cluster.pass_time(200)
    cluster.pods[POD_1]["status"] = {"phase": "Failed", "reason": "OutOfcpu", "message": "Node has not enough cpu"}
    cluster.reconcile_once()

    cluster.pass_time(200)  # pod 0 takes its grace
    cluster.reconcile_once()
    between = status(cluster).pending_since
    cluster.pods = {}
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    cluster.pass_time(299)
    cluster.reconcile_once()

    assert between is None
    assert status(cluster).attempt == 2
    assert status(cluster).phase is Phase.SCHEDULING
    cluster.pass_time(1)
    cluster.reconcile_once()
    assert status(cluster).phase is Phase.FAILED


def test_terminating_pods_do_not_count_as_pending_after_an_edit() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "1m"})
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once(max_actions=5)  # dies before the status that calls the gang whole
    cluster.start(POD_0)
    cluster.edit("training", seed=7)
    cluster.reconcile_once()
    cluster.reconcile_once()

    cluster.pass_time(80)  # pod 0 takes its grace
    cluster.reconcile_once()

    assert POD_0 in cluster.pods
    assert status(cluster).attempt == 2
    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).pending_since is None


def test_a_job_that_ran_for_too_long_cuts_commits_and_fails() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h")
    cluster.reconcile_once()

    cluster.pass_time(3_700)
    report_progress(cluster, step=50, committed=40)
    asked = cluster.reconcile_once()
    meanwhile = status(cluster)
    cluster.answer_cut(51)
    cluster.reconcile_once()
    report_progress(cluster, step=52, committed=51)
    cluster.reconcile_once()

    assert [action.reason for action in asked if isinstance(action, RequestCut)] == ["DeadlineExceeded"]
    assert meanwhile.phase is Phase.RUNNING
    failed = condition(cluster, ConditionType.FAILED)
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "DeadlineExceeded")
    assert "longer than spec.lifecycle.activeDeadline (3600 s); its newest snapshot is of step 51" in failed.message
    assert all("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    assert status(cluster).charged_restarts == 0


def test_a_job_whose_pods_are_gone_at_its_active_deadline_fails_at_once() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h")
    cluster.reconcile_once()

    cluster.pods = {}
    cluster.pass_time(3_700)
    actions = cluster.reconcile_once()

    assert (status(cluster).phase, condition(cluster, ConditionType.FAILED).reason) == (
        Phase.FAILED,
        "DeadlineExceeded",
    )
    assert not any(isinstance(action, RequestCut) for action in actions)


def test_the_end_of_the_active_deadline_is_waited_for_without_any_event() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h")

    (left,) = wakes(cluster)

    started = parse_timestamp(status(cluster).start_time)
    assert cluster.now + timedelta(seconds=left) == started + timedelta(hours=1)


def test_the_first_running_pass_wakes_at_the_active_deadline() -> None:
    cluster = ModelCluster(lifecycle={"activeDeadline": "1h"})
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    for name in cluster.pods:
        cluster.start(name)

    assert wakes(cluster) == [3600.0]


def test_suspended_time_does_not_count_for_the_active_deadline() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h")

    suspended(cluster, 86_400)
    cluster.pass_time(3_000)
    report_progress(cluster, step=9, committed=1)
    cluster.reconcile_once()
    trains = status(cluster)
    cluster.pass_time(601)
    cluster.reconcile_once()

    assert trains.phase is Phase.RUNNING
    assert trains.suspended_seconds == 86_400
    assert status(cluster).halt is not None


def test_a_silent_gang_is_ended_by_the_active_deadline_all_the_same() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h", commitDeadline="1m")
    cluster.polled = None

    cluster.pass_time(3_700)
    cluster.reconcile_once()
    cluster.pass_time(61)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED


def finished(cluster: ModelCluster) -> None:
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
        cluster.end(name, "checkpointer", 0, committed_progress(100).model_dump_json())
    cluster.reconcile_once()
    assert status(cluster).phase is Phase.SUCCEEDED


def test_a_finished_job_is_deleted_after_its_ttl() -> None:
    cluster = running()
    cluster.edit("lifecycle", ttlAfterFinished="1h")
    finished(cluster)

    before = wakes(cluster)
    cluster.pass_time(3_600)
    (deletion,) = cluster.reconcile_once()
    cluster.pods = {}
    after = cluster.reconcile_once()

    assert before == [3_600.0]
    assert deletion == DeleteJob(key=cluster.observe().job.key, uid="job-uid", resource_version=version(cluster, -1))
    assert after == ()


def version(cluster: ModelCluster, less: int) -> str:
    return str(int(cluster.job["metadata"]["resourceVersion"]) + less)


def test_a_suspended_job_is_not_a_finished_one() -> None:
    cluster = running()
    cluster.edit("lifecycle", ttlAfterFinished="0s")

    suspended(cluster, 10_000)

    assert "deletionTimestamp" not in cluster.job["metadata"]
    cluster.end("demo-trainer-2-0", "trainer", 65)
    cluster.reconcile_once()
    cluster.edit("lifecycle", suspend=True)  # nothing comes of it any more
    cluster.reconcile_once()
    cluster.reconcile_once()
    assert "deletionTimestamp" in cluster.job["metadata"]


def failed() -> ModelCluster:
    """A job whose data are bad, after a restart for another reason."""
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 70)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.pass_time(120)
    start_training(cluster)
    cluster.end("demo-trainer-2-0", "trainer", 65)
    cluster.reconcile_once()
    assert status(cluster).phase is Phase.FAILED
    return cluster


def test_a_changed_spec_retries_a_failed_job_with_full_budgets() -> None:
    cluster = failed()
    cluster.pass_time(500)

    cluster.edit("trainer", image="trainer:repaired")
    cluster.reconcile_once()
    restarting = status(cluster)
    cluster.pods = {}
    start_training(cluster)

    assert restarting.phase is Phase.RESTARTING
    assert restarting.charged_restarts == 0
    assert restarting.completion_time is None
    assert restarting.last_failure is not None
    assert status(cluster).attempt == 3
    assert status(cluster).restarts_by_reason == {"Internal": 1, "SpecChanged": 1}
    again = condition(cluster, ConditionType.FAILED)
    assert (again.status, again.reason) == ("False", "SpecChanged")
    assert [event.reason for event in cluster.events].count("SpecChanged") == 1


def test_a_failed_job_that_nobody_changes_stays_failed() -> None:
    cluster = failed()
    cluster.reconcile_once()

    cluster.pass_time(100_000)

    assert not [action for action in cluster.reconcile_once() if isinstance(action, CreatePod)]
    assert status(cluster).phase is Phase.FAILED


def test_a_failed_job_that_is_suspended_starts_again_when_it_is_resumed() -> None:
    cluster = failed()

    cluster.edit("lifecycle", suspend=True)
    cluster.reconcile_once()
    at_rest = status(cluster).phase
    cluster.edit("lifecycle", suspend=False)
    cluster.reconcile_once()

    assert at_rest is Phase.FAILED
    assert status(cluster).phase is Phase.RESTARTING


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("lifecycle", {"restart": {"maxRestarts": 9, "backoff": "0s"}}),
        ("lifecycle", {"terminationGracePeriod": "40s"}),
        ("trainer", {"resources": {"requests": {"memory": "8Gi"}}}),
        ("training", {"seed": 5}),
        ("checkpoint", {"bits": 8}),
    ],
)
def test_a_change_that_may_fix_a_failed_job_restarts_it(section: str, change: dict[str, Any]) -> None:
    cluster = failed()

    cluster.edit(section, **change)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).failed_spec is None


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("lifecycle", {"ttlAfterFinished": "1h"}),
        ("lifecycle", {"keepFailedPods": True}),
        ("checkpoint", {"retention": {"keepLast": 9}}),
    ],
)
def test_a_change_that_fixes_nothing_leaves_a_failed_job_failed(section: str, change: dict[str, Any]) -> None:
    cluster = failed()

    cluster.edit(section, **change)
    cluster.reconcile_once()
    seen = status(cluster)
    writes = cluster.writes
    cluster.reconcile_once()
    cluster.edit("training", seed=5)
    cluster.reconcile_once()

    assert (seen.phase, seen.observed_generation) == (Phase.FAILED, 2)
    assert status(cluster).phase is Phase.RESTARTING
    assert cluster.writes == writes + 1


def test_a_change_that_is_taken_back_while_nobody_looks_starts_nothing() -> None:
    cluster = failed()

    cluster.edit("training", seed=5)
    cluster.job["spec"].pop("training")
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED


def test_without_a_stored_digest_any_change_retries_a_failed_job() -> None:
    cluster = failed()
    cluster.job["status"].pop("failedSpec")

    cluster.edit("lifecycle", ttlAfterFinished="1h")
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.RESTARTING


def test_a_job_that_succeeded_never_starts_again() -> None:
    cluster = running()
    finished(cluster)
    ended = status(cluster)

    cluster.edit("trainer", replicas=3)
    cluster.reconcile_once()

    assert status(cluster) == ended.model_copy(update={"observed_generation": 2})
    assert ended.phase is Phase.SUCCEEDED
    assert cluster.reconcile_once() == ()


def fail(cluster: ModelCluster, attempt: int) -> None:
    """Pod 0 of the attempt fails, and with its upload done it ends; the other is told to go."""
    name = f"demo-trainer-{attempt}-0"
    cluster.end(name, "trainer", 70)
    cluster.reconcile_once()
    cluster.end(name, "checkpointer", 0)
    cluster.reconcile_once()
    for other in [n for n, pod in cluster.pods.items() if "deletionTimestamp" in pod["metadata"]]:
        del cluster.pods[other]
    cluster.pass_time(120)
    start_training(cluster)


def test_kept_failed_pods_do_not_block_the_next_attempt() -> None:
    cluster = running()
    cluster.edit("lifecycle", keepFailedPods=True, restart={"maxRestarts": 9, "backoff": "1s"})

    fail(cluster, 1)

    assert sorted(cluster.pods) == [POD_0, "demo-trainer-2-0", "demo-trainer-2-1"]
    assert "deletionTimestamp" not in cluster.pods[POD_0]["metadata"]
    assert status(cluster).replicas == 2
    for attempt in (2, 3, 4):
        fail(cluster, attempt)
    assert sorted(n for n in cluster.pods if n.endswith("-0")) == [f"demo-trainer-{n}-0" for n in (2, 3, 4, 5)]


def test_a_kept_pod_blocks_until_its_checkpointer_ended_or_is_late() -> None:
    cluster = running()
    cluster.edit("lifecycle", keepFailedPods=True, terminationGracePeriod="30s")

    cluster.end(POD_0, "trainer", 70)
    first = cluster.reconcile_once()
    del cluster.pods[POD_1]
    waiting = cluster.reconcile_once()
    cluster.pass_time(91)
    cluster.reconcile_once()

    assert [action.name for action in first if isinstance(action, DeleteObject)] == [POD_1]
    assert not [action for action in waiting if isinstance(action, DeleteObject | CreatePod)]
    assert "deletionTimestamp" in cluster.pods[POD_0]["metadata"]


def test_kept_pods_outlive_the_end_of_the_job() -> None:
    cluster = running()
    cluster.edit("lifecycle", keepFailedPods=True)
    fail(cluster, 1)

    for index in (0, 1):
        cluster.end(f"demo-trainer-2-{index}", "trainer", 0, cluster.done(100))
        cluster.end(f"demo-trainer-2-{index}", "checkpointer", 0, committed_progress(100).model_dump_json())
    cluster.reconcile_once()
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.SUCCEEDED
    assert POD_0 in cluster.pods


def suspend(cluster: ModelCluster) -> None:
    cluster.edit("lifecycle", suspend=True)
    cluster.reconcile_once()


def resume(cluster: ModelCluster) -> None:
    cluster.edit("lifecycle", suspend=False)


def deleted(cluster: ModelCluster) -> list[str]:
    return sorted(name for name, pod in cluster.pods.items() if "deletionTimestamp" in pod["metadata"])


def gone(cluster: ModelCluster) -> None:
    """Deleted pods are gone, and the operator sees it."""
    for name in deleted(cluster):
        del cluster.pods[name]
    cluster.reconcile_once()


def test_a_suspended_gang_goes_after_its_last_cut_is_committed() -> None:
    cluster = running()
    report_progress(cluster, step=50, committed=40)

    suspend(cluster)
    asked = status(cluster)
    cluster.answer_cut(51)
    cluster.reconcile_once()
    committing = condition(cluster, ConditionType.SUSPENDED)
    report_progress(cluster, step=55, committed=50)
    cluster.reconcile_once()
    kept = deleted(cluster)
    report_progress(cluster, step=56, committed=51)
    cluster.reconcile_once()
    let_go = deleted(cluster)
    stopping = status(cluster)
    gone(cluster)

    assert asked.phase is Phase.SUSPENDING
    assert (committing.status, committing.reason) == ("False", "Committing")
    assert "step 51" in committing.message
    assert kept == []
    assert let_go == [POD_0, POD_1]
    assert stopping.phase is Phase.SUSPENDING
    assert status(cluster).phase is Phase.SUSPENDED
    assert status(cluster).replicas == 0
    held = condition(cluster, ConditionType.SUSPENDED)
    assert (held.status, held.reason) == ("True", "Suspended")
    assert "step 51" in held.message
    assert "spec.lifecycle.suspend" in held.message
    assert condition(cluster, ConditionType.RUNNING).status == "False"
    assert cluster.reconcile_once() == ()


def test_the_cut_is_asked_for_once_and_its_step_outlives_the_operator() -> None:
    cluster = running()

    suspend(cluster)
    first = cluster.cut_asked
    cluster.answer_cut(9)
    cluster.reconcile_once()
    cluster.cut = cluster.cut_asked = None  # another operator, which asked nobody
    cluster.reconcile_once()

    assert first is not None
    assert (first.attempt, first.ip, first.reason) == (1, "127.0.0.2", "Suspended")
    assert status(cluster).halt is not None
    assert status(cluster).halt.step == 9
    assert cluster.cut_asked is None


def test_an_answer_to_an_earlier_suspension_is_not_taken_for_this_one() -> None:
    cluster = running()
    suspend(cluster)
    cluster.answer_cut(9)
    resume(cluster)
    cluster.reconcile_once()
    on_the_way = status(cluster)
    cluster.pass_time(60)
    report_progress(cluster, step=80, committed=9)

    suspend(cluster)

    assert on_the_way.phase is Phase.RUNNING
    assert on_the_way.halt is None
    assert status(cluster).halt is not None
    assert status(cluster).halt.step is None
    assert deleted(cluster) == []


def test_a_silent_trainer_is_asked_until_the_commit_deadline() -> None:
    cluster = running()
    cluster.edit("lifecycle", commitDeadline="2m")
    report_progress(cluster, step=50, committed=40)

    suspend(cluster)
    cluster.answer_cut(None, "pod 0 did not answer: connection refused")
    cluster.pass_time(31)  # words wait until they are due
    cluster.reconcile_once()
    words = condition(cluster, ConditionType.SUSPENDED)
    cluster.cut, cluster.cut_asked = None, None
    again = cluster.reconcile_once()
    cluster.pass_time(88)
    cluster.reconcile_once()
    kept = deleted(cluster)
    cluster.pass_time(1)
    cluster.reconcile_once()
    let_go = deleted(cluster)
    gone(cluster)

    assert words.reason == "Checkpointing"
    assert "connection refused" in words.message
    assert [type(action) for action in again if not isinstance(action, UpdateStatus)] == [RequestCut, WakeAt]
    assert kept == []
    assert let_go == [POD_0, POD_1]
    held = condition(cluster, ConditionType.SUSPENDED).message
    assert "commitDeadline (120 s)" in held
    assert "step 40" in held


def test_a_cut_that_missed_its_deadline_is_reported() -> None:
    cluster = running()
    report_progress(cluster, step=50, committed=40)

    suspend(cluster)
    cluster.answer_cut(51)
    cluster.reconcile_once()
    cluster.pass_time(601)
    cluster.reconcile_once()
    gone(cluster)

    held = condition(cluster, ConditionType.SUSPENDED).message
    assert "the cut of step 51 was not committed within commitDeadline (600 s); the newest snapshot is of" in held


def test_a_commit_while_the_pod_ends_is_kept_in_the_status() -> None:
    cluster = running()
    report_progress(cluster, step=50, committed=40)
    suspend(cluster)
    cluster.pass_time(601)
    cluster.reconcile_once()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 143)
        cluster.end(name, "checkpointer", 0, committed_progress(52).model_dump_json())
    cluster.reconcile_once()
    gone(cluster)

    assert status(cluster).last_snapshot is not None
    assert status(cluster).last_snapshot.step == 52
    assert status(cluster).charged_restarts == 0
    assert "step 52" in condition(cluster, ConditionType.SUSPENDED).message


def test_a_gang_that_has_trained_nothing_yet_goes_at_once() -> None:
    cluster = ModelCluster()
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    cluster.start(POD_0)

    suspend(cluster)

    assert deleted(cluster) == [POD_0]
    assert list(cluster.pods) == [POD_0]  # the other had no node yet
    assert cluster.cut_asked is None


def test_a_job_that_is_suspended_before_it_has_pods_gets_none() -> None:
    cluster = ModelCluster(lifecycle={"suspend": True})

    first = cluster.reconcile_once()
    later = cluster.reconcile_once()

    assert [type(action) for action in first if not isinstance(action, WakeAt)][-1] is UpdateStatus
    assert not [action for action in first if isinstance(action, CreatePod | RequestPlan)]
    assert later == ()
    assert status(cluster).phase is Phase.SUSPENDED
    assert "nothing was trained yet" in condition(cluster, ConditionType.SUSPENDED).message
    resume(cluster)
    start_training(cluster)
    assert status(cluster).attempt == 1
    assert status(cluster).restarts == 0


def test_a_resumed_job_is_a_new_attempt_that_is_not_charged() -> None:
    cluster = running()
    suspend(cluster)
    cluster.pass_time(601)
    cluster.reconcile_once()
    gone(cluster)

    resume(cluster)
    start_training(cluster)

    assert status(cluster).attempt == 2
    assert status(cluster).charged_restarts == 0
    assert status(cluster).restarts_by_reason == {"Suspended": 1}
    assert status(cluster).halt is None
    resumed = condition(cluster, ConditionType.SUSPENDED)
    assert (resumed.status, resumed.reason) == ("False", "Resumed")


def test_a_spec_that_was_changed_while_suspended_is_planned_again() -> None:
    cluster = ModelCluster()
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once(max_actions=2)  # the plan is written down, and no pod relies on it
    assert cluster.config_maps
    assert not cluster.pods
    suspend(cluster)

    cluster.edit("trainer", replicas=3)
    resume(cluster)
    start_training(cluster)

    assert sorted(cluster.pods) == ["demo-trainer-1-0", "demo-trainer-1-1", "demo-trainer-1-2"]


def test_a_stored_plan_without_pods_is_used_for_the_same_spec() -> None:
    for trainer in ({"replicas": 2}, {}, {"objective": {"maxReplicas": 2}}):
        cluster = ModelCluster(trainer=trainer)
        cluster.reconcile_once()
        cluster.plan()
        cluster.reconcile_once(max_actions=2)
        cluster.planning = None  # another operator

        actions = cluster.reconcile_once()

        assert cluster.pods
        assert not [action for action in actions if isinstance(action, RequestPlan)], trainer


def test_a_gang_that_fails_while_suspending_is_charged_not_replaced() -> None:
    cluster = running()
    suspend(cluster)

    cluster.end(POD_0, "trainer", 70)
    cluster.reconcile_once()
    gone(cluster)

    assert status(cluster).phase is Phase.SUSPENDED
    assert status(cluster).charged_restarts == 1
    assert status(cluster).restarts == 1
    assert condition(cluster, ConditionType.SUSPENDED).message.startswith("no snapshot is known;")
    assert cluster.pods == {POD_0: cluster.pods[POD_0]} if POD_0 in cluster.pods else cluster.pods == {}


def test_a_job_that_ends_well_while_it_is_to_be_suspended_has_succeeded() -> None:
    cluster = running()
    suspend(cluster)

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
    waiting = cluster.reconcile_once()
    for name in (POD_0, POD_1):
        cluster.end(name, "checkpointer", 0, committed_progress(100).model_dump_json())
    cluster.reconcile_once()

    assert not [action for action in waiting if isinstance(action, DeleteObject | RequestCut)]
    assert status(cluster).phase is Phase.SUCCEEDED
    assert condition(cluster, ConditionType.SUSPENDED).status == "False"


def test_suspending_a_finished_job_does_nothing() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 65)
    cluster.reconcile_once()
    gone(cluster)

    suspend(cluster)

    assert status(cluster).phase is Phase.FAILED
    assert find_condition(status(cluster).conditions, ConditionType.SUSPENDED) is None


def test_each_step_of_a_suspension_is_reported_once() -> None:
    cluster = running()
    suspend(cluster)
    cluster.answer_cut(2)
    cluster.reconcile_once()
    report_progress(cluster, step=3, committed=2)
    cluster.reconcile_once()
    gone(cluster)
    cluster.reconcile_once()
    resume(cluster)
    start_training(cluster)

    told = [event.reason for event in cluster.events]
    assert [told.count(reason) for reason in ("Suspending", "Suspended", "Resumed")] == [1, 1, 1]


def scale(cluster: ModelCluster, replicas: int) -> None:
    cluster.edit("trainer", replicas=replicas)


def let_go(cluster: ModelCluster) -> None:
    """The gang commits the cut that it is asked for, and its pods end."""
    cluster.reconcile_once()
    cluster.answer_cut(51)
    report_progress(cluster, step=52, committed=51)
    cluster.reconcile_once()
    assert all("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    cluster.pods = {}


def test_a_resize_requests_the_cut_only_after_the_plan() -> None:
    cluster = running()
    scale(cluster, 3)

    asked = cluster.reconcile_once()
    planning = condition(cluster, ConditionType.RESIZED)
    meanwhile = status(cluster).phase
    cluster.plan()
    cut = cluster.reconcile_once()
    let_go(cluster)
    start_training(cluster)

    assert [type(action) for action in asked if isinstance(action, RequestPlan | RequestCut)] == [RequestPlan]
    assert (planning.status, planning.reason) == ("False", "Planning")
    assert meanwhile is Phase.RUNNING
    assert [action.reason for action in cut if isinstance(action, RequestCut)] == ["Resized"]
    assert sorted(cluster.pods) == [f"demo-trainer-2-{index}" for index in range(3)]
    assert status(cluster).charged_restarts == 0
    assert status(cluster).free_restarts == 0
    assert status(cluster).restarts_by_reason == {"Resized": 1}
    resized = condition(cluster, ConditionType.RESIZED)
    assert (resized.status, resized.reason) == ("True", "Resized")
    assert [event.reason for event in cluster.events].count("Resizing") == 1


def test_training_continues_while_the_cut_is_committed() -> None:
    cluster = running()
    scale(cluster, 1)
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()

    cluster.answer_cut(51)
    report_progress(cluster, step=55, committed=50)
    actions = cluster.reconcile_once()

    assert status(cluster).phase is Phase.RUNNING
    assert condition(cluster, ConditionType.RUNNING).status == "True"
    assert condition(cluster, ConditionType.RESIZED).reason == "Committing"
    assert not [action for action in actions if isinstance(action, DeleteObject)]


def test_an_infeasible_size_keeps_the_gang_and_is_reported_once() -> None:
    cluster = running()
    scale(cluster, 9)
    cluster.reconcile_once()

    cluster.planning = Planning(problem="data.virtualShards is too small", final=True)
    cluster.reconcile_once()
    cluster.planning = None
    later = cluster.reconcile_once()

    refused = condition(cluster, ConditionType.RESIZED)
    assert refused.reason == "Infeasible"
    assert "data.virtualShards is too small" in refused.message
    assert "spec.trainer.replicas" in refused.message
    assert status(cluster).phase is Phase.RUNNING
    assert status(cluster).attempt == 1
    assert later == ()
    assert [event.reason for event in cluster.events].count("ResizeRefused") == 1
    scale(cluster, 3)
    assert [action for action in cluster.reconcile_once() if isinstance(action, RequestPlan)]


def planned_shards(cluster: ModelCluster) -> int | None:
    plan = status(cluster).plan
    assert plan is not None
    return plan.virtual_shards


@pytest.mark.parametrize("reported", [None, 64, 32])
def test_a_resized_job_keeps_its_virtual_shards(reported: int | None) -> None:
    cluster = running()
    first = planned_shards(cluster)
    report_progress(cluster, step=2, shards=reported)
    cluster.reconcile_once()
    in_use = planned_shards(cluster)

    scale(cluster, 8)
    cluster.reconcile_once()
    cluster.plan()
    let_go(cluster)
    start_training(cluster)

    # Eight pods would have 128 of their own. The number of a snapshot is known to the trainers alone.
    assert (first, in_use) == (64, reported or 64)
    assert (len(cluster.pods), planned_shards(cluster)) == (8, in_use)


def test_the_next_plan_knows_the_files_that_trainers_found() -> None:
    cluster, found = running(), DataFiles(files=20_000, rows=10**9, reads=40_000)
    report_progress(cluster, step=2, files=found)
    cluster.reconcile_once()
    report_progress(cluster, step=3)

    scale(cluster, 3)
    asked = [action.question for action in cluster.reconcile_once() if isinstance(action, RequestPlan)]
    cluster.plan()
    let_go(cluster)
    start_training(cluster)

    assert [question.data_files for question in asked] == [found]
    assert status(cluster).data_files == found


def test_a_size_beyond_the_kept_virtual_shards_is_refused() -> None:
    cluster = running()
    report_progress(cluster, step=2, shards=4)
    cluster.reconcile_once()

    scale(cluster, 5)
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()

    assert condition(cluster, ConditionType.RESIZED).reason == "Infeasible"
    assert status(cluster).phase is Phase.RUNNING


def test_a_size_that_is_taken_back_changes_nothing() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()

    cluster.edit("trainer", replicas=2)
    cluster.reconcile_once()

    assert status(cluster).halt is None
    assert status(cluster).attempt == 1
    assert condition(cluster, ConditionType.RESIZED).status == "True"


def test_a_resize_without_its_profile_withdraws_the_cut() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()
    asked = status(cluster).halt

    cluster.planning = None
    cluster.profile_problem = "there is no HardwareProfile pool"
    cluster.reconcile_once()
    said = condition(cluster, ConditionType.RESIZED)
    later = status(cluster).halt
    cluster.pass_time(86_400)
    cluster.profile_problem = ""
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()

    assert asked is not None
    assert said.reason == "HardwareProfileUnavailable"
    assert "there is no HardwareProfile pool" in said.message
    assert later is None
    assert status(cluster).attempt == 1, "a deadline of the cut before counted"


def test_a_gang_that_finds_no_nodes_is_made_smaller_at_once() -> None:
    cluster = ModelCluster(replicas=3)
    for _ in range(4):
        cluster.reconcile_once()
        cluster.plan()
    assert len(cluster.pods) == 3

    scale(cluster, 1)
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()
    start_training(cluster)

    assert list(cluster.pods) == ["demo-trainer-2-0"]
    assert status(cluster).charged_restarts == 0


def test_a_restarted_operator_waits_for_the_same_cut_of_a_resize() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()
    cluster.answer_cut(51)
    cluster.reconcile_once()

    cluster.planning = cluster.cut = cluster.cut_asked = None
    cluster.reconcile_once()
    cluster.plan()
    cluster.reconcile_once()

    assert status(cluster).halt is not None
    assert status(cluster).halt.step == 51
    assert cluster.cut_asked is None


def test_a_failure_while_it_is_resized_brings_the_new_size_too() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.reconcile_once()

    cluster.end(POD_0, "trainer", 70)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.pass_time(120)
    start_training(cluster)

    assert len(cluster.pods) == 3
    assert status(cluster).charged_restarts == 1


def test_a_job_that_is_suspended_and_resized_comes_back_with_the_new_size() -> None:
    cluster = running()
    cluster.edit("lifecycle", suspend=True)
    scale(cluster, 1)
    cluster.reconcile_once()
    cluster.pass_time(601)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.reconcile_once()

    cluster.edit("lifecycle", suspend=False)
    start_training(cluster)

    assert list(cluster.pods) == ["demo-trainer-2-0"]
    assert status(cluster).restarts_by_reason == {"Suspended": 1}


def test_a_number_that_the_planner_chose_is_not_taken_for_another_size() -> None:
    cluster = ModelCluster(trainer={"objective": {"minReplicas": 2, "maxReplicas": 3}})
    start_training(cluster)

    assert len(cluster.pods) == 2
    assert cluster.reconcile_once() == ()
    scale(cluster, 3)  # from now on the user says how many
    cluster.reconcile_once()
    cluster.plan()
    let_go(cluster)
    start_training(cluster)
    assert len(cluster.pods) == 3


def test_a_job_that_never_changed_its_size_has_no_such_condition() -> None:
    cluster = running()

    assert find_condition(status(cluster).conditions, ConditionType.RESIZED) is None
    assert {POD_0, POD_1} == set(cluster.pods)
