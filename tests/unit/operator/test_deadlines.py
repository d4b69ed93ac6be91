"""Deadlines, the deletion of finished jobs, a new start after an edit, and pods kept for inspection."""

from datetime import timedelta
from typing import Any

import pytest

from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.findings import parse_timestamp
from dlrm_operator.reconcile.state import CreatePod, DeleteJob, DeleteObject, RequestCut, WakeAt
from dlrm_testing.operator.kubelet_double import committed_word
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, bring_up, condition, running, say, status


def wakes(cluster: ModelCluster) -> list[float]:
    """Seconds until the operator wants to look again."""
    return [(action.time - cluster.now).total_seconds() for action in cluster.turn() if isinstance(action, WakeAt)]


def suspended(cluster: ModelCluster, seconds: float) -> None:
    """The job rests for so long, then trains again."""
    cluster.edit("lifecycle", suspend=True)
    cluster.turn()
    cluster.answer_cut(1)
    say(cluster, step=1, committed=1)
    cluster.turn()
    cluster.pods = {}
    cluster.turn()
    assert status(cluster).phase is Phase.SUSPENDED
    cluster.pass_time(seconds)
    cluster.edit("lifecycle", suspend=False)
    bring_up(cluster)


def test_a_gang_that_does_not_start_in_time_fails_in_the_schedulers_words() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "5m"})
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available: 2 too small."}
    cluster.pods[POD_1]["status"]["conditions"] = [unscheduled]
    cluster.start(POD_0)

    cluster.pass_time(299)
    before = wakes(cluster)
    waiting = status(cluster).phase
    cluster.pass_time(1)
    cluster.turn()

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
        cluster.turn()
        cluster.plan()
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    for pod in cluster.pods.values():
        pod["spec"]["nodeName"] = "node"
        pod["status"]["containerStatuses"] = [{"name": "trainer", "state": waiting}]

    cluster.turn()
    cluster.pass_time(301)
    cluster.turn()

    words = condition(cluster, ConditionType.FAILED).message
    assert "2 of 2 trainers have not started: demo-trainer-1-0/trainer: ImagePullBackOff: no such image" in words


def test_the_pending_deadline_counts_anew_for_each_attempt_and_ends_when_all_have_started() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "5m", "restart": {"backoff": "10m"}})
    bring_up(cluster)
    cluster.pass_time(1_000)
    cluster.turn()
    assert status(cluster).phase is Phase.RUNNING

    cluster.end(POD_0, "trainer", 70)
    cluster.turn()
    cluster.pods = {}
    cluster.turn()
    cluster.pass_time(601)  # the pause is no wait for pods
    for _ in range(3):
        cluster.turn()
        cluster.plan()
    cluster.pass_time(299)
    cluster.turn()

    assert status(cluster).phase is Phase.SCHEDULING
    cluster.pass_time(2)
    cluster.turn()
    assert status(cluster).phase is Phase.FAILED


def test_the_next_attempt_of_one_that_never_started_has_the_whole_pending_deadline() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "5m", "restart": {"backoff": "10s"}})
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    cluster.start(POD_0)
    cluster.pass_time(200)
    cluster.pods[POD_1]["status"] = {"phase": "Failed", "reason": "OutOfcpu", "message": "Node has not enough cpu"}
    cluster.turn()

    cluster.pass_time(200)  # pod 0 takes its grace
    cluster.turn()
    between = status(cluster).pending_since
    cluster.pods = {}
    for _ in range(3):
        cluster.turn()
        cluster.plan()
    cluster.pass_time(299)
    cluster.turn()

    assert between is None
    assert status(cluster).attempt == 2
    assert status(cluster).phase is Phase.SCHEDULING
    cluster.pass_time(1)
    cluster.turn()
    assert status(cluster).phase is Phase.FAILED


def test_old_pods_that_end_are_no_wait_where_a_spec_was_edited_while_its_gang_was_made() -> None:
    cluster = ModelCluster(lifecycle={"pendingDeadline": "1m"})
    cluster.turn()
    cluster.plan()
    cluster.turn(most=5)  # dies before the status that calls the gang whole
    cluster.start(POD_0)
    cluster.edit("training", seed=7)
    cluster.turn()
    cluster.turn()

    cluster.pass_time(80)  # pod 0 takes its grace
    cluster.turn()

    assert POD_0 in cluster.pods
    assert status(cluster).attempt == 2
    assert status(cluster).phase is Phase.RESTARTING
    assert status(cluster).pending_since is None


def test_a_job_that_ran_for_too_long_cuts_commits_and_fails() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h")
    cluster.turn()

    cluster.pass_time(3_700)
    say(cluster, step=50, committed=40)
    asked = cluster.turn()
    meanwhile = status(cluster)
    cluster.answer_cut(51)
    cluster.turn()
    say(cluster, step=52, committed=51)
    cluster.turn()

    assert [action.reason for action in asked if isinstance(action, RequestCut)] == ["DeadlineExceeded"]
    assert meanwhile.phase is Phase.RUNNING
    failed = condition(cluster, ConditionType.FAILED)
    assert (status(cluster).phase, failed.reason) == (Phase.FAILED, "DeadlineExceeded")
    assert "longer than spec.lifecycle.activeDeadline (3600 s); its newest snapshot is of step 51" in failed.message
    assert all("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    assert status(cluster).charged_restarts == 0


def test_the_end_of_the_active_deadline_is_waited_for_without_any_event() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h")

    (left,) = wakes(cluster)

    started = parse_timestamp(status(cluster).start_time)
    assert cluster.now + timedelta(seconds=left) == started + timedelta(hours=1)


def test_the_turn_in_which_a_job_comes_to_run_already_waits_for_the_end_of_its_active_deadline() -> None:
    cluster = ModelCluster(lifecycle={"activeDeadline": "1h"})
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    for name in cluster.pods:
        cluster.start(name)

    assert wakes(cluster) == [3600.0]


def test_suspended_time_does_not_count_for_the_active_deadline() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h")

    suspended(cluster, 86_400)
    cluster.pass_time(3_000)
    say(cluster, step=9, committed=1)
    cluster.turn()
    trains = status(cluster)
    cluster.pass_time(601)
    cluster.turn()

    assert trains.phase is Phase.RUNNING
    assert trains.suspended_seconds == 86_400
    assert status(cluster).halt is not None


def test_a_silent_gang_is_ended_by_the_active_deadline_all_the_same() -> None:
    cluster = running()
    cluster.edit("lifecycle", activeDeadline="1h", commitDeadline="1m")
    cluster.polled = None

    cluster.pass_time(3_700)
    cluster.turn()
    cluster.pass_time(61)
    cluster.turn()

    assert status(cluster).phase is Phase.FAILED


def finished(cluster: ModelCluster) -> None:
    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 0, cluster.done(100))
        cluster.end(name, "checkpointer", 0, committed_word(100).model_dump_json())
    cluster.turn()
    assert status(cluster).phase is Phase.SUCCEEDED


def test_a_finished_job_is_deleted_when_its_time_is_over_and_makes_no_child_again() -> None:
    cluster = running()
    cluster.edit("lifecycle", ttlAfterFinished="1h")
    finished(cluster)

    before = wakes(cluster)
    cluster.pass_time(3_600)
    (deletion,) = cluster.turn()
    cluster.pods = {}
    after = cluster.turn()

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
    cluster.turn()
    cluster.edit("lifecycle", suspend=True)  # nothing comes of it any more
    cluster.turn()
    cluster.turn()
    assert "deletionTimestamp" in cluster.job["metadata"]


def failed() -> ModelCluster:
    """A job whose data are bad, after a restart for another reason."""
    cluster = running(maxRestarts=1)
    cluster.end(POD_0, "trainer", 70)
    cluster.turn()
    cluster.pods = {}
    cluster.pass_time(120)
    bring_up(cluster)
    cluster.end("demo-trainer-2-0", "trainer", 65)
    cluster.turn()
    assert status(cluster).phase is Phase.FAILED
    return cluster


def test_a_failed_job_whose_spec_is_changed_starts_again_with_whole_budgets() -> None:
    cluster = failed()
    cluster.pass_time(500)

    cluster.edit("trainer", image="trainer:mended")
    cluster.turn()
    restarting = status(cluster)
    cluster.pods = {}
    bring_up(cluster)

    assert restarting.phase is Phase.RESTARTING
    assert restarting.charged_restarts == 0
    assert restarting.completion_time is None
    assert restarting.last_failure is not None
    assert status(cluster).attempt == 3
    assert status(cluster).restarts_by_reason == {"Internal": 1, "SpecChanged": 1}
    again = condition(cluster, ConditionType.FAILED)
    assert (again.status, again.reason) == ("False", "SpecChanged")
    assert [event.reason for event in cluster.events].count("SpecChanged") == 1


def test_a_failed_job_that_nobody_changes_stays_as_it_is() -> None:
    cluster = failed()
    cluster.turn()

    cluster.pass_time(100_000)

    assert not [action for action in cluster.turn() if isinstance(action, CreatePod)]
    assert status(cluster).phase is Phase.FAILED


def test_a_failed_job_that_is_suspended_starts_again_when_it_is_resumed() -> None:
    cluster = failed()

    cluster.edit("lifecycle", suspend=True)
    cluster.turn()
    at_rest = status(cluster).phase
    cluster.edit("lifecycle", suspend=False)
    cluster.turn()

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
def test_what_may_mend_a_failed_job_starts_it_again(section: str, change: dict[str, Any]) -> None:
    cluster = failed()

    cluster.edit(section, **change)
    cluster.turn()

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
def test_what_mends_nothing_is_seen_and_leaves_a_failed_job_failed(section: str, change: dict[str, Any]) -> None:
    cluster = failed()

    cluster.edit(section, **change)
    cluster.turn()
    seen = status(cluster)
    writes = cluster.writes
    cluster.turn()
    cluster.edit("training", seed=5)
    cluster.turn()

    assert (seen.phase, seen.observed_generation) == (Phase.FAILED, 2)
    assert status(cluster).phase is Phase.RESTARTING
    assert cluster.writes == writes + 1


def test_a_change_that_is_taken_back_while_nobody_looks_starts_nothing() -> None:
    cluster = failed()

    cluster.edit("training", seed=5)
    cluster.job["spec"].pop("training")
    cluster.turn()

    assert status(cluster).phase is Phase.FAILED


def test_a_job_that_failed_under_an_operator_that_kept_no_digest_starts_again_by_any_change() -> None:
    cluster = failed()
    cluster.job["status"].pop("failedSpec")

    cluster.edit("lifecycle", ttlAfterFinished="1h")
    cluster.turn()

    assert status(cluster).phase is Phase.RESTARTING


def test_a_job_that_succeeded_never_starts_again() -> None:
    cluster = running()
    finished(cluster)
    ended = status(cluster)

    cluster.edit("trainer", replicas=3)
    cluster.turn()

    assert status(cluster) == ended.model_copy(update={"observed_generation": 2})
    assert ended.phase is Phase.SUCCEEDED
    assert cluster.turn() == ()


def fail(cluster: ModelCluster, attempt: int) -> None:
    """Pod 0 of the attempt fails, and with its upload done it ends; the other is told to go."""
    name = f"demo-trainer-{attempt}-0"
    cluster.end(name, "trainer", 70)
    cluster.turn()
    cluster.end(name, "checkpointer", 0)
    cluster.turn()
    for other in [n for n, pod in cluster.pods.items() if "deletionTimestamp" in pod["metadata"]]:
        del cluster.pods[other]
    cluster.pass_time(120)
    bring_up(cluster)


def test_dead_pods_of_failed_attempts_are_kept_where_asked_and_hold_nobody_back() -> None:
    cluster = running()
    cluster.edit("lifecycle", keepFailedPods=True, restart={"maxRestarts": 9, "backoff": "1s"})

    fail(cluster, 1)

    assert sorted(cluster.pods) == [POD_0, "demo-trainer-2-0", "demo-trainer-2-1"]
    assert "deletionTimestamp" not in cluster.pods[POD_0]["metadata"]
    assert status(cluster).replicas == 2
    for attempt in (2, 3, 4):
        fail(cluster, attempt)
    assert sorted(n for n in cluster.pods if n.endswith("-0")) == [f"demo-trainer-{n}-0" for n in (2, 3, 4, 5)]


def test_a_kept_pod_blocks_the_next_gang_until_its_checkpointer_has_ended_or_took_too_long() -> None:
    cluster = running()
    cluster.edit("lifecycle", keepFailedPods=True, terminationGracePeriod="30s")

    cluster.end(POD_0, "trainer", 70)
    first = cluster.turn()
    del cluster.pods[POD_1]
    waiting = cluster.turn()
    cluster.pass_time(91)
    cluster.turn()

    assert [action.name for action in first if isinstance(action, DeleteObject)] == [POD_1]
    assert not [action for action in waiting if isinstance(action, DeleteObject | CreatePod)]
    assert "deletionTimestamp" in cluster.pods[POD_0]["metadata"]


def test_kept_pods_outlive_the_end_of_the_job() -> None:
    cluster = running()
    cluster.edit("lifecycle", keepFailedPods=True)
    fail(cluster, 1)

    for index in (0, 1):
        cluster.end(f"demo-trainer-2-{index}", "trainer", 0, cluster.done(100))
        cluster.end(f"demo-trainer-2-{index}", "checkpointer", 0, committed_word(100).model_dump_json())
    cluster.turn()
    cluster.turn()

    assert status(cluster).phase is Phase.SUCCEEDED
    assert POD_0 in cluster.pods
