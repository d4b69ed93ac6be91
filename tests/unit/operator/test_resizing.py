"""Another ``trainer.replicas``: a plan first, then a cut, then a gang of that size; without a plan nothing changes."""

from dlrm_api.status import ConditionType, Phase
from dlrm_operator.reconcile.findings import find_condition
from dlrm_operator.reconcile.state import DeleteObject, Planning, RequestCut, RequestPlan
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, bring_up, condition, running, say, status


def scale(cluster: ModelCluster, replicas: int) -> None:
    cluster.edit("trainer", replicas=replicas)


def let_go(cluster: ModelCluster) -> None:
    """The gang commits the cut that it is asked for, and its pods end."""
    cluster.turn()
    cluster.answer_cut(51)
    say(cluster, step=52, committed=51)
    cluster.turn()
    assert all("deletionTimestamp" in pod["metadata"] for pod in cluster.pods.values())
    cluster.pods = {}


def test_a_gang_is_asked_for_its_cut_only_once_there_is_a_plan_for_the_new_size() -> None:
    cluster = running()
    scale(cluster, 3)

    asked = cluster.turn()
    planning = condition(cluster, ConditionType.RESIZED)
    meanwhile = status(cluster).phase
    cluster.plan()
    cut = cluster.turn()
    let_go(cluster)
    bring_up(cluster)

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


def test_training_goes_on_while_the_cut_is_committed() -> None:
    cluster = running()
    scale(cluster, 1)
    cluster.turn()
    cluster.plan()
    cluster.turn()

    cluster.answer_cut(51)
    say(cluster, step=55, committed=50)
    actions = cluster.turn()

    assert status(cluster).phase is Phase.RUNNING
    assert condition(cluster, ConditionType.RUNNING).status == "True"
    assert condition(cluster, ConditionType.RESIZED).reason == "Committing"
    assert not [action for action in actions if isinstance(action, DeleteObject)]


def test_a_size_without_a_plan_leaves_the_gang_alone_and_is_told_once() -> None:
    cluster = running()
    scale(cluster, 9)
    cluster.turn()

    cluster.planning = Planning(problem="data.virtualShards is too small", final=True)
    cluster.turn()
    cluster.planning = None
    later = cluster.turn()

    refused = condition(cluster, ConditionType.RESIZED)
    assert refused.reason == "Infeasible"
    assert "data.virtualShards is too small" in refused.message
    assert "spec.trainer.replicas" in refused.message
    assert status(cluster).phase is Phase.RUNNING
    assert status(cluster).attempt == 1
    assert later == ()
    assert [event.reason for event in cluster.events].count("ResizeRefused") == 1
    scale(cluster, 3)
    assert [action for action in cluster.turn() if isinstance(action, RequestPlan)]


def test_a_size_that_is_taken_back_changes_nothing() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.turn()
    cluster.plan()
    cluster.turn()

    cluster.edit("trainer", replicas=2)
    cluster.turn()

    assert status(cluster).halt is None
    assert status(cluster).attempt == 1
    assert condition(cluster, ConditionType.RESIZED).status == "True"


def test_a_cut_for_a_size_whose_profile_is_gone_is_not_waited_for_any_more() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.turn()
    cluster.plan()
    cluster.turn()
    asked = status(cluster).halt

    cluster.planning = None
    cluster.profile_problem = "there is no HardwareProfile pool"
    cluster.turn()
    said = condition(cluster, ConditionType.RESIZED)
    later = status(cluster).halt
    cluster.pass_time(86_400)
    cluster.profile_problem = ""
    cluster.turn()
    cluster.plan()
    cluster.turn()

    assert asked is not None
    assert said.reason == "HardwareProfileUnavailable"
    assert "there is no HardwareProfile pool" in said.message
    assert later is None
    assert status(cluster).attempt == 1, "a deadline of the cut before counted"


def test_a_gang_that_finds_no_nodes_is_made_smaller_at_once() -> None:
    cluster = ModelCluster(replicas=3)
    for _ in range(4):
        cluster.turn()
        cluster.plan()
    assert len(cluster.pods) == 3

    scale(cluster, 1)
    cluster.turn()
    cluster.plan()
    cluster.turn()
    bring_up(cluster)

    assert list(cluster.pods) == ["demo-trainer-2-0"]
    assert status(cluster).charged_restarts == 0


def test_a_restarted_operator_plans_the_new_size_again_and_waits_for_the_same_cut() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.turn()
    cluster.plan()
    cluster.turn()
    cluster.answer_cut(51)
    cluster.turn()

    cluster.planning = cluster.cut = cluster.cut_asked = None
    cluster.turn()
    cluster.plan()
    cluster.turn()

    assert status(cluster).halt is not None
    assert status(cluster).halt.step == 51
    assert cluster.cut_asked is None


def test_a_failure_while_it_is_resized_brings_the_new_size_too() -> None:
    cluster = running()
    scale(cluster, 3)
    cluster.turn()

    cluster.end(POD_0, "trainer", 70)
    cluster.turn()
    cluster.pods = {}
    cluster.pass_time(120)
    bring_up(cluster)

    assert len(cluster.pods) == 3
    assert status(cluster).charged_restarts == 1


def test_a_job_that_is_suspended_and_resized_comes_back_with_the_new_size() -> None:
    cluster = running()
    cluster.edit("lifecycle", suspend=True)
    scale(cluster, 1)
    cluster.turn()
    cluster.pass_time(601)
    cluster.turn()
    cluster.pods = {}
    cluster.turn()

    cluster.edit("lifecycle", suspend=False)
    bring_up(cluster)

    assert list(cluster.pods) == ["demo-trainer-2-0"]
    assert status(cluster).restarts_by_reason == {"Suspended": 1}


def test_a_number_that_the_planner_chose_is_not_taken_for_another_size() -> None:
    cluster = ModelCluster(trainer={"auto": {"min": 2, "max": 3, "targetSamplesPerSecond": 0}})
    bring_up(cluster)

    assert len(cluster.pods) == 2
    assert cluster.turn() == ()
    scale(cluster, 3)  # from now on the user says how many
    cluster.turn()
    cluster.plan()
    let_go(cluster)
    bring_up(cluster)
    assert len(cluster.pods) == 3


def test_a_job_that_never_changed_its_size_has_no_such_condition() -> None:
    cluster = running()

    assert find_condition(status(cluster).conditions, ConditionType.RESIZED) is None
    assert {POD_0, POD_1} == set(cluster.pods)
