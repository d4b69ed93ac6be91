"""Pods in which a container that others put there never ends: no node is held for ever, and no upload is cut off."""

from collections.abc import Callable
from datetime import datetime, timedelta

import pytest

from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.health import FORCE_DELETE_AFTER
from dlrm_operator.reconcile.state import Action, DeleteObject, WakeAt
from dlrm_testing.operator.kubelet_double import committed_word
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, condition, failure, lose_node, running, say, status

PODS = (POD_0, POD_1)
PROXY = "istio-proxy"
LAST_STEP = 100
GRACE = timedelta(minutes=10)
"""By default."""
HOURS_S = 5 * 3_600
OUT_OF_TIME = 75


def meshed() -> ModelCluster:
    """A gang that trains, each pod beside a proxy that runs until the pod is deleted."""
    cluster = running()
    for name in PODS:
        cluster.pods[name]["status"]["containerStatuses"].append({"name": PROXY, "state": {"running": {}}})
    return cluster


def done(cluster: ModelCluster) -> datetime:
    """Every trainer ends well; how long their pods may take for what is left."""
    for name in PODS:
        cluster.end(name, "trainer", 0, cluster.done(LAST_STEP))
    return cluster.now + GRACE + FORCE_DELETE_AFTER


def end_checkpointer(cluster: ModelCluster, name: str, code: int, committed: int | None, pending: int | None) -> None:
    """The checkpointer ends with these words, and the kubelet starts it again, since the proxy runs."""
    give_up(cluster, name, code, committed, pending)
    [sidecar] = cluster.pods[name]["status"]["initContainerStatuses"]
    sidecar["lastState"], sidecar["state"] = sidecar["state"], {"running": {}}


def give_up(cluster: ModelCluster, name: str, code: int, committed: int | None, pending: int | None) -> None:
    """The checkpointer ends with these words."""
    word = committed_word(committed).model_copy(update={"pending_step": pending, "time": cluster.now.timestamp()})
    cluster.end(name, "checkpointer", code, word.model_dump_json())


def outage() -> ModelCluster:
    """Training is done, the store went away before: checkpointers gave up for want of time, and were started again."""
    cluster = meshed()
    done(cluster)
    cluster.pass_time(GRACE.total_seconds() / 2)
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, LAST_STEP)
    cluster.turn()
    return cluster


def hear(cluster: ModelCluster, committed: int | None, pending: int | None, store_error: str = "") -> None:
    """Pod 0 says so now."""
    word = {"pending_step": pending, "store_error": store_error, "time": cluster.now.timestamp()}
    say(cluster, step=LAST_STEP, committed=committed, **word)


def deleted(actions: tuple[Action, ...]) -> set[str]:
    return {action.name for action in actions if isinstance(action, DeleteObject) and action.kind == "Pod"}


def wakes(actions: tuple[Action, ...]) -> set[datetime]:
    return {action.time for action in actions if isinstance(action, WakeAt)}


def succeed(cluster: ModelCluster) -> None:
    for name in PODS:
        end_checkpointer(cluster, name, 0, LAST_STEP, None)


def fail(cluster: ModelCluster) -> None:
    for name in PODS:
        end_checkpointer(cluster, name, 77, 90, LAST_STEP)


@pytest.mark.parametrize(("end", "phase"), [(succeed, Phase.SUCCEEDED), (fail, Phase.FAILED)])
def test_pods_of_a_finished_job_that_a_proxy_keeps_go_when_their_time_for_uploads_is_over(
    end: Callable[[ModelCluster], None], phase: Phase
) -> None:
    cluster = meshed()
    due = done(cluster)
    end(cluster)

    at_the_end = cluster.turn()
    cluster.now = due - timedelta(seconds=1)
    before = cluster.turn()
    cluster.now = due
    after = cluster.turn()

    assert status(cluster).phase is phase
    assert deleted(at_the_end) == deleted(before) == set()
    assert due in wakes(at_the_end) & wakes(before)
    assert deleted(after) == set(PODS)


def test_pods_of_a_job_whose_trainers_never_came_to_train_go_when_their_time_is_over() -> None:
    cluster = meshed()
    for name in PODS:
        cluster.end(name, "trainer", 66)
    cluster.turn()

    cluster.now += GRACE + FORCE_DELETE_AFTER
    after = cluster.turn()

    assert status(cluster).phase is Phase.FAILED
    assert deleted(after) == set(PODS)


def test_a_pod_that_ended_stays_for_its_log_however_late_it_is() -> None:
    cluster = running()
    for name in PODS:
        cluster.end(name, "trainer", 0, cluster.done(LAST_STEP))
        cluster.end(name, "checkpointer", 0, committed_word(LAST_STEP).model_dump_json())
    cluster.turn()

    cluster.pass_time(HOURS_S)

    assert status(cluster).phase is Phase.SUCCEEDED
    assert cluster.turn() == ()


def test_a_gang_that_has_nothing_left_to_commit_is_restarted_on_time_though_a_proxy_keeps_its_pods() -> None:
    cluster = meshed()
    due = done(cluster)
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, None)

    waiting = cluster.turn()
    reason = condition(cluster, ConditionType.RUNNING).reason
    cluster.now = due
    over = cluster.turn()

    assert reason == "Committing"
    assert due in wakes(waiting)
    assert (status(cluster).phase, status(cluster).charged_restarts) == (Phase.RESTARTING, 1)
    assert failure(cluster).reason == "SnapshotNotCommitted"
    assert POD_0 in failure(cluster).message
    assert PROXY in failure(cluster).message
    assert deleted(over) == set(PODS)


@pytest.mark.parametrize("heard", [True, False])
def test_an_upload_that_an_outage_of_the_store_holds_up_for_hours_is_waited_for(heard: bool) -> None:
    cluster = outage()
    cluster.polled = None  # a new operator has asked nobody yet
    if heard:
        hear(cluster, None, None, "the store did not answer")

    cluster.pass_time(HOURS_S)
    before = cluster.turn()
    hear(cluster, 90, LAST_STEP, "the store did not answer")
    cluster.pass_time(HOURS_S)
    later = cluster.turn()
    waiting = status(cluster)
    hear(cluster, LAST_STEP, None)
    cluster.turn()

    assert deleted(before) == deleted(later) == set()
    assert (waiting.phase, waiting.attempt) == (Phase.RUNNING, 1)
    assert status(cluster).phase is Phase.SUCCEEDED


def test_a_checkpointer_that_gave_up_beside_a_proxy_is_not_taken_for_ended_before_the_kubelet_starts_it_again() -> None:
    cluster = meshed()
    due = done(cluster)
    for name in PODS:
        give_up(cluster, name, OUT_OF_TIME, 90, LAST_STEP)

    actions = cluster.turn()

    assert condition(cluster, ConditionType.RUNNING).reason == "Committing"
    assert due in wakes(actions)


def test_a_cut_that_was_given_up_after_an_outage_is_waited_for_no_longer() -> None:
    cluster = outage()
    cluster.pass_time(HOURS_S)
    cluster.turn()
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, None)

    hear(cluster, 90, None)
    after = cluster.turn()

    assert failure(cluster).reason == "SnapshotNotCommitted"
    assert deleted(after) == set(PODS)


def test_a_checkpointer_that_saw_its_trainer_end_is_left_at_work_however_long_its_upload_takes() -> None:
    cluster = meshed()
    done(cluster)

    cluster.pass_time(HOURS_S)
    actions = cluster.turn()

    assert deleted(actions) == set()
    assert condition(cluster, ConditionType.RUNNING).reason == "Committing"


def test_a_checkpointer_that_crashes_again_and_again_is_waited_for_until_its_time_is_over() -> None:
    cluster = outage()
    for name in PODS:
        [sidecar] = cluster.pods[name]["status"]["initContainerStatuses"]
        sidecar["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    cluster.turn()
    before = status(cluster)

    cluster.now += GRACE + FORCE_DELETE_AFTER
    after = cluster.turn()

    assert before.attempt == 1
    assert failure(cluster).reason == "SnapshotNotCommitted"
    assert deleted(after) == set(PODS)


def test_a_gang_whose_cut_lacks_the_part_of_a_lost_node_is_restarted_uncharged_though_pod_0_would_wait_for_it() -> None:
    cluster = outage()
    cluster.pass_time(HOURS_S)
    hear(cluster, 90, LAST_STEP)
    lose_node(cluster, POD_1)

    before = cluster.turn()
    cluster.pass_time(61)
    cluster.turn()

    assert deleted(before) == set()
    assert failure(cluster).reason == "NodeLost"
    assert status(cluster).charged_restarts == 0


def test_pods_of_a_job_that_failed_in_an_outage_stay_until_what_they_cut_is_committed() -> None:
    cluster = meshed()
    cluster.end(POD_0, "trainer", 75)
    cluster.end(POD_1, "trainer", 65)
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, LAST_STEP)
    cluster.turn()

    cluster.pass_time(HOURS_S)
    hear(cluster, 90, LAST_STEP, "the store did not answer")
    during = cluster.turn()
    hear(cluster, LAST_STEP, None)
    after = cluster.turn()

    assert status(cluster).phase is Phase.FAILED
    assert deleted(during) == set()
    assert deleted(after) == set(PODS)


def test_the_bound_is_the_grace_period_of_the_job() -> None:
    cluster = meshed()
    cluster.edit("lifecycle", terminationGracePeriod="1h")
    done(cluster)
    succeed(cluster)
    cluster.turn()

    cluster.now += GRACE + FORCE_DELETE_AFTER
    early = cluster.turn()
    cluster.now += timedelta(hours=1) - GRACE
    late = cluster.turn()

    assert deleted(early) == set()
    assert deleted(late) == set(PODS)
