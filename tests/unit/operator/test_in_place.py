"""Failed trainers restart in their pods; nodes that fail twice are avoided."""

from collections.abc import Callable
from typing import Any

import pytest

from dlrm_api.lifecycle import RestartSpec, codes_without_restart
from dlrm_api.names import Env, Label
from dlrm_api.status import Phase
from dlrm_operator.controller.informers import read_pod
from dlrm_operator.reconcile.state import AssignAttempt
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import POD_0, POD_1, lose_node, report_progress, running, start_training, status

LIMITS = {"maxRestarts": 3, "backoff": "10s", "maxBackoff": "1m"}


def restarting(second_node: str = "node-b", **restart: Any) -> ModelCluster:
    """Return a cluster that restarts single containers, whose job trains on two nodes."""
    cluster = ModelCluster(2, lifecycle={"restart": {**LIMITS, **restart}})
    cluster.has_restart_rules = True
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    cluster.start(POD_0, "node-a")
    cluster.start(POD_1, second_node)
    start_training(cluster)
    return cluster


def fail(cluster: ModelCluster, code: int = 137, reason: str = "Error") -> None:
    """Let the rank of pod 0 die, and the other miss it."""
    for name, exit_code, why in (("0", code, reason), ("1", 75, "Error")):
        cluster.end(f"demo-trainer-{status(cluster).gang_created_by}-{name}", "trainer", exit_code, reason=why)


def restart_all(cluster: ModelCluster) -> None:
    for name in cluster.pods:
        cluster.restart(name)


def uids(cluster: ModelCluster) -> set[str]:
    return {pod["metadata"]["uid"] for pod in cluster.pods.values()}


def test_failed_trainers_restart_in_their_pods_as_the_next_attempt() -> None:
    cluster = restarting()
    before = uids(cluster)

    fail(cluster)
    cluster.reconcile_once()
    charged = status(cluster)
    restart_all(cluster)
    cluster.settle()
    report_progress(cluster, step=5)
    cluster.settle()

    after = status(cluster)
    assert uids(cluster) == before
    assert cluster.attempts_that_run() == {2}
    assert (charged.attempt, charged.pod_attempt, charged.charged_restarts) == (2, 1, 1)
    assert (after.attempt, after.phase, after.restarts) == (2, Phase.RUNNING, 1)
    assert after.last_failure is not None
    assert (after.last_failure.attempt, after.last_failure.pod) == (1, POD_0)


def test_a_message_of_an_earlier_attempt_does_not_take_back_the_newest_snapshot() -> None:
    cluster = restarting()
    fail(cluster)
    cluster.reconcile_once()
    cluster.end(POD_0, "checkpointer", 0, committed_progress(10).model_dump_json())
    restart_all(cluster)
    cluster.settle()
    report_progress(cluster, step=25, committed=20)
    cluster.pass_time(60)
    cluster.settle()
    reported = status(cluster).last_snapshot

    cluster.polled = None  # another operator has not heard of the checkpointer yet
    cluster.pass_time(60)
    cluster.settle()

    assert status(cluster).pod_attempt == 1
    assert reported is not None
    assert reported.step == 20
    assert status(cluster).last_snapshot == reported


def test_the_next_attempt_is_assigned_once_no_trainer_runs_the_one_before() -> None:
    cluster = restarting()
    cluster.end(POD_0, "trainer", 137)
    cluster.restart(POD_0)
    for _ in range(3):
        cluster.reconcile_once()
    one_ended = cluster.attempts_that_run(), status(cluster).attempt

    cluster.end(POD_1, "trainer", 75)
    actions = cluster.reconcile_once()
    cluster.restart(POD_1)

    assert one_ended == ({1}, 2)
    assert {action.name for action in actions if isinstance(action, AssignAttempt)} == {POD_0, POD_1}
    assert cluster.attempts_that_run() == {2}


def test_a_failure_is_seen_though_the_trainer_runs_again() -> None:
    cluster = restarting()
    fail(cluster)
    restart_all(cluster)

    cluster.settle()

    assert (status(cluster).attempt, status(cluster).charged_restarts) == (2, 1)
    assert cluster.attempts_that_run() == {2}


def test_each_restart_in_the_same_pods_is_charged_once_and_the_budget_ends_them() -> None:
    cluster = restarting(second_node="node-a")
    before, attempts = uids(cluster), []
    for _ in range(4):
        fail(cluster)
        restart_all(cluster)
        cluster.settle()
        attempts.append((status(cluster).attempt, status(cluster).charged_restarts))
        cluster.pass_time(42)
        cluster.settle()

    found = status(cluster)
    assert attempts == [(2, 1), (3, 2), (4, 3), (4, 3)]
    assert (found.phase, found.earlier_failures[0].attempt) == (Phase.FAILED, 3)
    assert before >= uids(cluster)


@pytest.mark.parametrize("done", range(8))
def test_an_operator_that_dies_in_between_charges_once(done: int) -> None:
    cluster = restarting()
    fail(cluster)

    cluster.reconcile_once(done)
    restart_all(cluster)
    cluster.settle()

    assert (status(cluster).attempt, status(cluster).charged_restarts) == (2, 1)
    assert cluster.attempts_that_run() == {2}


def test_a_first_restart_has_no_backoff_and_later_ones_do() -> None:
    cluster = restarting(second_node="node-a")
    fail(cluster)
    restart_all(cluster)
    cluster.settle()
    first = cluster.attempts_that_run()

    fail(cluster)
    restart_all(cluster)
    cluster.settle()
    at_once = cluster.attempts_that_run()
    cluster.pass_time(20)
    cluster.settle()

    assert (first, at_once, cluster.attempts_that_run()) == ({2}, set(), {3})


def evict(cluster: ModelCluster) -> None:
    moved = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    cluster.pods[POD_1]["status"]["conditions"] = [moved]
    fail(cluster)


NEW_PODS: dict[str, Callable[[ModelCluster], None]] = {
    "out of memory": lambda cluster: fail(cluster, 137, "OOMKilled"),
    "device error": lambda cluster: fail(cluster, 74),
    "pod deleted": lambda cluster: (fail(cluster), cluster.delete(POD_1))[0],
    "pod evicted": evict,
    "node silent": lambda cluster: (fail(cluster), lose_node(cluster, POD_1))[0],
    "checkpointer ended": lambda cluster: (fail(cluster), cluster.end(POD_1, "checkpointer", 0))[0],
    "other size": lambda cluster: (cluster.edit("trainer", replicas=3), fail(cluster))[1],
    "pods kept": lambda cluster: (cluster.edit("lifecycle", keepFailedPods=True), fail(cluster))[1],
    "not in place": lambda cluster: (cluster.edit("lifecycle", restart={**LIMITS, "inPlace": False}), fail(cluster))[1],
}


@pytest.mark.parametrize("happens", NEW_PODS.values(), ids=NEW_PODS.keys())
def test_new_pods_follow_where_the_process_is_not_the_cause(happens: Callable[[ModelCluster], None]) -> None:
    cluster = restarting()

    happens(cluster)
    actions = [action for _ in range(3) for action in cluster.reconcile_once()]

    assert status(cluster).attempt == 2
    assert status(cluster).pod_attempt is None
    assert not any(isinstance(action, AssignAttempt) for action in actions)


def lose_pod(cluster: ModelCluster) -> None:
    del cluster.pods[POD_1]


def refuse(cluster: ModelCluster) -> None:
    cluster.pods[POD_1]["status"]["phase"] = "Failed"


@pytest.mark.parametrize("happens", [lambda cluster: cluster.pass_time(31), lose_pod, refuse, evict])
def test_a_restart_that_is_not_completed_falls_back_to_new_pods_at_no_charge(
    happens: Callable[[ModelCluster], None],
) -> None:
    cluster = restarting()
    fail(cluster)
    cluster.restart(POD_0)
    cluster.reconcile_once()
    begun = status(cluster).pod_attempt

    happens(cluster)
    cluster.reconcile_once()
    cluster.pods = {}
    start_training(cluster)

    after = status(cluster)
    assert (begun, after.pod_attempt) == (1, None)
    assert (after.attempt, after.charged_restarts, after.free_restarts, after.restarts) == (2, 1, 0, 1)
    assert {pod["metadata"]["labels"][Label.ATTEMPT] for pod in cluster.pods.values()} == {"2"}


@pytest.mark.parametrize("lifecycle", [{}, {"suspend": True}])
def test_a_pod_that_is_lost_after_all_ran_in_place_ends_the_attempt(lifecycle: dict[str, Any]) -> None:
    cluster = restarting()
    fail(cluster)
    cluster.reconcile_once()
    restart_all(cluster)
    cluster.settle()
    report_progress(cluster, step=5)
    cluster.settle()

    cluster.edit("lifecycle", **lifecycle)
    cluster.reconcile_once()
    lose_pod(cluster)
    cluster.reconcile_once()

    after = status(cluster)
    assert after.last_failure is not None
    assert (after.attempt, after.pod_attempt, after.last_failure.attempt) == (3, None, 2)
    assert after.free_restarts == 1


@pytest.mark.parametrize("lifecycle", [{"suspend": True}, {"activeDeadline": "1s"}])
def test_a_stop_while_trainers_restart_ends_them(lifecycle: dict[str, Any]) -> None:
    cluster = restarting()
    fail(cluster)
    cluster.reconcile_once()
    cluster.pass_time(5)

    cluster.edit("lifecycle", **lifecycle)
    cluster.settle()
    for name in list(cluster.pods):
        cluster.remove(name)
    cluster.settle()

    assert status(cluster).phase in (Phase.SUSPENDED, Phase.FAILED)
    assert cluster.pods == {}


def test_a_lost_status_is_found_again_by_the_pods() -> None:
    cluster = restarting()
    fail(cluster)
    restart_all(cluster)
    cluster.settle()
    before = uids(cluster)

    del cluster.job["status"]
    cluster.touch()
    cluster.settle()

    assert (status(cluster).attempt, status(cluster).pod_attempt) == (2, 1)
    assert uids(cluster) == before
    assert cluster.attempts_that_run() == {2}


def test_pods_of_an_older_server_have_no_rules() -> None:
    cluster = running()

    assert not any(read_pod(pod).restarts_in_place for pod in cluster.pods.values())
    assert Env.ASSIGNMENT not in str(cluster.pods)


def test_the_rules_leave_out_what_a_restart_cannot_mend() -> None:
    rules = [{"exitCodes": [65], "action": "restart"}, {"exitCodes": [9], "action": "fail"}]
    spec = RestartSpec.model_validate({"rulesByExitCode": rules})

    assert codes_without_restart(spec) == [0, 9, 64, 66, 74, 77, 78]


def avoided(cluster: ModelCluster) -> list[str]:
    return [node.name for node in status(cluster).avoided_nodes]


def fail_on_new_pods(cluster: ModelCluster, nodes: tuple[str, str], after_s: float) -> None:
    """Let the gang fail on pod 0, and the next one start on these nodes."""
    cluster.pass_time(after_s)
    fail(cluster)
    cluster.reconcile_once()
    cluster.pods = {}
    cluster.pass_time(60)
    for _ in range(3):
        cluster.reconcile_once()
        cluster.plan()
    for name, node in zip(sorted(cluster.pods), nodes, strict=True):
        cluster.start(name, node)
    start_training(cluster)


@pytest.mark.parametrize(
    ("nodes", "after_s", "expected"),
    [
        pytest.param(("node-a", "node-b"), 60.0, ["node-a"], id="two failures"),
        pytest.param(("node-a", "node-b"), 3_700.0, [], id="an hour apart"),
        pytest.param(("node-c", "node-a"), 60.0, [], id="on different nodes"),
        pytest.param(("node-a", "node-a"), 60.0, [], id="all pods on one node"),
    ],
)
def test_a_node_with_two_failures_in_an_hour_is_avoided(
    nodes: tuple[str, str], after_s: float, expected: list[str]
) -> None:
    cluster = restarting(inPlace=False)

    fail_on_new_pods(cluster, nodes, 0.0)
    fail_on_new_pods(cluster, ("node-c", "node-d"), after_s)

    assert avoided(cluster) == expected
    affinities = [pod["spec"].get("affinity") for pod in cluster.pods.values()]
    wanted = {"key": "metadata.name", "operator": "NotIn", "values": ["node-a"]}
    assert all((str(wanted) in str(affinity)) == bool(expected) for affinity in affinities)


def test_trainers_on_an_avoided_node_do_not_restart_there() -> None:
    cluster = restarting()
    fail(cluster)
    restart_all(cluster)
    cluster.settle()
    in_place = status(cluster).pod_attempt

    fail(cluster)
    cluster.reconcile_once()

    assert in_place == 1
    assert avoided(cluster) == ["node-a"]
    assert status(cluster).pod_attempt is None


def test_an_avoided_node_is_used_again_after_an_hour() -> None:
    cluster = restarting(inPlace=False)
    for _ in range(2):
        fail_on_new_pods(cluster, ("node-a", "node-b"), 0.0)
    before = avoided(cluster)

    cluster.pass_time(3_700)
    cluster.settle()

    assert (before, avoided(cluster)) == (["node-a"], [])
