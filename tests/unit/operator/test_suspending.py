"""Suspend saves first: a cut, its commit or a deadline, then no pods; and the way back."""

from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.findings import find_condition
from dlrm_operator.reconcile.state import CreatePod, DeleteObject, RequestCut, RequestPlan, UpdateStatus, WakeAt
from dlrm_testing.operator.kubelet_double import committed_word
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, bring_up, condition, running, say, status


def suspend(cluster: ModelCluster) -> None:
    cluster.edit("lifecycle", suspend=True)
    cluster.turn()


def resume(cluster: ModelCluster) -> None:
    cluster.edit("lifecycle", suspend=False)


def deleted(cluster: ModelCluster) -> list[str]:
    return sorted(name for name, pod in cluster.pods.items() if "deletionTimestamp" in pod["metadata"])


def gone(cluster: ModelCluster) -> None:
    """Deleted pods are gone, and the operator sees it."""
    for name in deleted(cluster):
        del cluster.pods[name]
    cluster.turn()


def test_a_suspended_gang_goes_only_when_its_last_cut_is_committed() -> None:
    cluster = running()
    say(cluster, step=50, committed=40)

    suspend(cluster)
    asked = status(cluster)
    cluster.answer_cut(51)
    cluster.turn()
    committing = condition(cluster, ConditionType.SUSPENDED)
    say(cluster, step=55, committed=50)
    cluster.turn()
    kept = deleted(cluster)
    say(cluster, step=56, committed=51)
    cluster.turn()
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
    assert cluster.turn() == ()


def test_the_cut_is_asked_for_once_and_its_step_outlives_the_operator() -> None:
    cluster = running()

    suspend(cluster)
    first = cluster.cut_asked
    cluster.answer_cut(9)
    cluster.turn()
    cluster.cut = cluster.cut_asked = None  # another operator, which asked nobody
    cluster.turn()

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
    cluster.turn()
    on_the_way = status(cluster)
    cluster.pass_time(60)
    say(cluster, step=80, committed=9)

    suspend(cluster)

    assert on_the_way.phase is Phase.RUNNING
    assert on_the_way.halt is None
    assert status(cluster).halt is not None
    assert status(cluster).halt.step is None
    assert deleted(cluster) == []


def test_a_trainer_that_does_not_answer_is_asked_again_until_the_deadline_and_then_let_go() -> None:
    cluster = running()
    cluster.edit("lifecycle", commitDeadline="2m")
    say(cluster, step=50, committed=40)

    suspend(cluster)
    cluster.answer_cut(None, "pod 0 did not answer: connection refused")
    cluster.pass_time(31)  # words wait until they are due
    cluster.turn()
    words = condition(cluster, ConditionType.SUSPENDED)
    cluster.cut, cluster.cut_asked = None, None
    again = cluster.turn()
    cluster.pass_time(88)
    cluster.turn()
    kept = deleted(cluster)
    cluster.pass_time(1)
    cluster.turn()
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


def test_a_cut_that_is_not_committed_in_time_is_told() -> None:
    cluster = running()
    say(cluster, step=50, committed=40)

    suspend(cluster)
    cluster.answer_cut(51)
    cluster.turn()
    cluster.pass_time(601)
    cluster.turn()
    gone(cluster)

    held = condition(cluster, ConditionType.SUSPENDED).message
    assert "the cut of step 51 was not committed within commitDeadline (600 s); the newest snapshot is of" in held


def test_what_a_checkpointer_commits_while_its_pod_ends_is_held() -> None:
    cluster = running()
    say(cluster, step=50, committed=40)
    suspend(cluster)
    cluster.pass_time(601)
    cluster.turn()

    for name in (POD_0, POD_1):
        cluster.end(name, "trainer", 143)
        cluster.end(name, "checkpointer", 0, committed_word(52).model_dump_json())
    cluster.turn()
    gone(cluster)

    assert status(cluster).last_snapshot is not None
    assert status(cluster).last_snapshot.step == 52
    assert status(cluster).charged_restarts == 0
    assert "step 52" in condition(cluster, ConditionType.SUSPENDED).message


def test_a_gang_that_has_trained_nothing_yet_goes_at_once() -> None:
    cluster = ModelCluster()
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    cluster.start(POD_0)

    suspend(cluster)

    assert deleted(cluster) == [POD_0]
    assert list(cluster.pods) == [POD_0]  # the other had no node yet
    assert cluster.cut_asked is None


def test_a_job_that_is_suspended_before_it_has_pods_gets_none() -> None:
    cluster = ModelCluster(lifecycle={"suspend": True})

    first = cluster.turn()
    later = cluster.turn()

    assert [type(action) for action in first if not isinstance(action, WakeAt)][-1] is UpdateStatus
    assert not [action for action in first if isinstance(action, CreatePod | RequestPlan)]
    assert later == ()
    assert status(cluster).phase is Phase.SUSPENDED
    assert "nothing was trained yet" in condition(cluster, ConditionType.SUSPENDED).message
    resume(cluster)
    bring_up(cluster)
    assert status(cluster).attempt == 1
    assert status(cluster).restarts == 0


def test_a_resumed_job_is_a_new_attempt_that_is_not_charged() -> None:
    cluster = running()
    suspend(cluster)
    cluster.pass_time(601)
    cluster.turn()
    gone(cluster)

    resume(cluster)
    bring_up(cluster)

    assert status(cluster).attempt == 2
    assert status(cluster).charged_restarts == 0
    assert status(cluster).restarts_by_reason == {"Suspended": 1}
    assert status(cluster).halt is None
    resumed = condition(cluster, ConditionType.SUSPENDED)
    assert (resumed.status, resumed.reason) == ("False", "Resumed")


def test_a_spec_that_was_changed_while_suspended_is_planned_anew() -> None:
    cluster = ModelCluster()
    cluster.turn()
    cluster.plan()
    cluster.turn(most=2)  # the plan is written down, and no pod relies on it
    assert cluster.config_maps
    assert not cluster.pods
    suspend(cluster)

    cluster.edit("trainer", replicas=3)
    resume(cluster)
    bring_up(cluster)

    assert sorted(cluster.pods) == ["demo-trainer-1-0", "demo-trainer-1-1", "demo-trainer-1-2"]


def test_a_plan_that_a_crash_left_without_pods_is_taken_where_the_spec_is_the_same() -> None:
    for trainer in ({"replicas": 2}, {}, {"auto": {"max": 2, "targetSamplesPerSecond": 0}}):
        cluster = ModelCluster(trainer=trainer)
        cluster.turn()
        cluster.plan()
        cluster.turn(most=2)
        cluster.planning = None  # another operator

        actions = cluster.turn()

        assert cluster.pods
        assert not [action for action in actions if isinstance(action, RequestPlan)], trainer


def test_a_gang_that_fails_while_it_is_to_be_suspended_is_charged_and_not_replaced() -> None:
    cluster = running()
    suspend(cluster)

    cluster.end(POD_0, "trainer", 70)
    cluster.turn()
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
    waiting = cluster.turn()
    for name in (POD_0, POD_1):
        cluster.end(name, "checkpointer", 0, committed_word(100).model_dump_json())
    cluster.turn()

    assert not [action for action in waiting if isinstance(action, DeleteObject | RequestCut)]
    assert status(cluster).phase is Phase.SUCCEEDED
    assert condition(cluster, ConditionType.SUSPENDED).status == "False"


def test_suspending_a_finished_job_does_nothing() -> None:
    cluster = running()
    cluster.end(POD_0, "trainer", 65)
    cluster.turn()
    gone(cluster)

    suspend(cluster)

    assert status(cluster).phase is Phase.FAILED
    assert find_condition(status(cluster).conditions, ConditionType.SUSPENDED) is None


def test_each_step_of_a_suspension_is_told_once() -> None:
    cluster = running()
    suspend(cluster)
    cluster.answer_cut(2)
    cluster.turn()
    say(cluster, step=3, committed=2)
    cluster.turn()
    gone(cluster)
    cluster.turn()
    resume(cluster)
    bring_up(cluster)

    told = [event.reason for event in cluster.events]
    assert [told.count(reason) for reason in ("Suspending", "Suspended", "Resumed")] == [1, 1, 1]
