"""Reports of pods: hangs, stragglers, last uploads, and the largest figures that a pod can report."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from dlrm_api.fields import MAX_EXACT
from dlrm_api.names import Label
from dlrm_api.progress import (
    MAX_UNIX_SECONDS,
    EvalMetrics,
    Progress,
    SlowestRank,
    SnapshotInfo,
    TerminationMessage,
    TrainerPhase,
)
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.clients.progress import with_durations
from dlrm_operator.controller.informers import MISSING, read_pod
from dlrm_operator.reconcile.findings import Reason, shorten
from dlrm_operator.reconcile.gang import HUNG_GRACE_S
from dlrm_operator.reconcile.health import (
    FORCE_DELETE_AFTER,
    INITIAL_HANG_TIMEOUT_S,
    MIN_HANG_TIMEOUT_S,
    container_wait,
    hang_timeout_s,
    pod_wait,
    read_stacks,
)
from dlrm_operator.reconcile.state import (
    Action,
    ContainerSeen,
    DeleteObject,
    JobKey,
    PodSeen,
    Polled,
    RequestStacks,
    WakeAt,
)
from dlrm_testing.operator.hung_gang import (
    COLLECTIVE,
    HUNG_READER,
    answer_stacks,
    hung_cluster,
    stack,
    stop_progress,
    straggling_cluster,
)
from dlrm_testing.operator.kubelet_double import committed_progress
from dlrm_testing.operator.model_cluster import ModelCluster
from dlrm_testing.operator.running_job import (
    POD_0,
    POD_1,
    condition,
    failure,
    lose_node,
    report_progress,
    running,
    status,
)


def test_stacks_are_taken_before_anything_is_done_to_a_gang_that_hangs() -> None:
    cluster = running()
    stop_progress(cluster, MIN_HANG_TIMEOUT_S)

    first = cluster.reconcile_once()
    again = cluster.reconcile_once()
    answer_stacks(cluster, HUNG_READER)
    cluster.reconcile_once()

    asked = [action for action in first if isinstance(action, RequestStacks)]
    assert [set(action.ips) for action in asked] == [{POD_0, POD_1}]
    assert not [action for action in (*first, *again) if isinstance(action, DeleteObject)]
    assert status(cluster).phase is Phase.RESTARTING


def test_a_hang_is_charged_and_names_rank_pod_and_node() -> None:
    cluster = hung_cluster()

    last = failure(cluster)
    assert (last.reason, last.rank, last.pod, last.node) == ("HangDetected", 1, POD_1, "node")
    assert "reader.py:12" in last.message
    assert status(cluster).restarts_by_reason == {"HangDetected": 1}
    assert status(cluster).charged_restarts == 1
    assert condition(cluster, ConditionType.RUNNING).reason == "HangDetected"


def test_a_gang_that_hung_gets_no_time_for_a_last_cut_that_it_cannot_make() -> None:
    cluster = running()
    stop_progress(cluster, MIN_HANG_TIMEOUT_S)
    cluster.reconcile_once()
    answer_stacks(cluster, HUNG_READER)

    deleted = [action for action in cluster.reconcile_once() if isinstance(action, DeleteObject)]

    assert [(action.name, action.grace_s) for action in deleted] == [(POD_0, HUNG_GRACE_S), (POD_1, HUNG_GRACE_S)]


def test_a_pod_without_stacks_is_blamed_if_all_others_wait() -> None:
    cluster = hung_cluster(texts={POD_0: HUNG_READER[POD_0], POD_1: ""})

    last = failure(cluster)
    assert (last.rank, last.pod) == (None, POD_1)
    assert f"pod {POD_1} on node node" in last.message


def test_evidence_of_a_hang_is_bounded() -> None:
    names = "f" * 300
    frames = "".join(f'  File "/opt/{names}.py", line {number} in {names}\n' for number in range(200))
    cluster = hung_cluster(
        texts={POD_0: "", POD_1: stack(1, "a.py", "g").replace('  File "/opt/a.py"', frames + "  File a")}
    )

    assert len(failure(cluster).message) <= 4_096


def test_a_gang_that_moves_on_while_its_stacks_are_taken_does_not_hang() -> None:
    cluster = running()
    stop_progress(cluster, MIN_HANG_TIMEOUT_S)
    cluster.reconcile_once()
    answer_stacks(cluster, HUNG_READER)

    report_progress(cluster, step=8)
    cluster.reconcile_once()

    assert status(cluster).phase is Phase.RUNNING


def test_a_step_that_may_take_longer_is_waited_for() -> None:
    cluster = running()
    stop_progress(cluster, 290.0)

    actions = cluster.reconcile_once()

    assert not [action for action in actions if isinstance(action, RequestStacks)]
    wakes = [(action.time - cluster.now).total_seconds() for action in actions if isinstance(action, WakeAt)]
    assert wakes == [10.0]


@pytest.mark.parametrize(
    "phase", [TrainerPhase.STARTING, TrainerPhase.RESTORING, TrainerPhase.CUTTING, TrainerPhase.FINISHING]
)
def test_starts_restores_cuts_and_ends_have_deadlines_of_their_own(phase: TrainerPhase) -> None:
    cluster = running()
    stop_progress(cluster, 1e6, phase=phase)

    assert not [action for action in cluster.reconcile_once() if isinstance(action, RequestStacks)]


@pytest.mark.parametrize(
    ("phase", "longest", "user", "allowed"),
    [
        (TrainerPhase.TRAINING, 0.2, None, MIN_HANG_TIMEOUT_S),
        (TrainerPhase.TRAINING, 40.0, None, 800.0),
        (TrainerPhase.TRAINING, None, None, INITIAL_HANG_TIMEOUT_S),
        (TrainerPhase.TRAINING, 40.0, 60.0, 60.0),
        (TrainerPhase.TRAINING, None, 60.0, INITIAL_HANG_TIMEOUT_S),
        (TrainerPhase.TRAINING, None, 7_200.0, 7_200.0),
        (TrainerPhase.EVALUATING, 0.2, None, INITIAL_HANG_TIMEOUT_S),
        (TrainerPhase.EVALUATING, 0.2, 60.0, 60.0),
    ],
)
def test_how_long_a_gang_may_stand_still(
    phase: TrainerPhase, longest: float | None, user: float | None, allowed: float
) -> None:
    assert hang_timeout_s(Progress(phase=phase, longest_step_seconds=longest), user) == allowed


def test_the_message_of_a_hang_names_the_users_timeout() -> None:
    cluster = running()
    cluster.job["spec"]["lifecycle"]["hangTimeout"] = "1m"
    stop_progress(cluster, 61.0)
    cluster.reconcile_once()
    answer_stacks(cluster, HUNG_READER)
    cluster.reconcile_once()

    assert "spec.lifecycle.hangTimeout" in failure(cluster).message


def test_only_time_between_answers_counts() -> None:
    here = Polled(pod_uid="a", trainer=Progress(step=5))
    there = replace(here, trainer=Progress(step=6))

    still = with_durations(with_durations(here, here, 2.0), here, 3.0)
    silent = with_durations(still, here, 0.0)

    assert (still.still_s, silent.still_s) == (5.0, 5.0)
    assert with_durations(still, there, 2.0).still_s == 0.0
    assert with_durations(still, replace(here, pod_uid="b"), 2.0).still_s == 0.0


def test_batches_of_an_evaluation_count_as_moves() -> None:
    first = Polled(pod_uid="a", trainer=Progress(phase=TrainerPhase.EVALUATING, step=5, evaluated_batches=1))
    second = replace(first, trainer=Progress(phase=TrainerPhase.EVALUATING, step=5, evaluated_batches=2))

    assert with_durations(replace(first, still_s=100.0), second, 2.0).still_s == 0.0


def test_a_rank_counts_as_slow_while_it_is_the_same_one() -> None:
    def named(rank: int, seconds: float = 0.5) -> Polled:
        slowest = SlowestRank(rank=rank, seconds=seconds, median_seconds=0.2)
        return Polled(pod_uid="a", trainer=Progress(slowest=slowest))

    slow = with_durations(with_durations(named(1), named(1), 2.0), named(1), 2.0)

    assert slow.slow_s == 4.0
    assert with_durations(slow, named(0), 2.0).slow_s == 0.0
    assert with_durations(slow, named(1, 0.29), 2.0).slow_s == 0.0


def test_a_straggler_is_reported_and_never_restarted() -> None:
    cluster = straggling_cluster()

    progress = status(cluster).progress
    assert progress is not None
    assert progress.straggler is not None
    assert (progress.straggler.rank, progress.straggler.pod, progress.straggler.node) == (1, POD_1, "node")
    assert status(cluster).phase is Phase.RUNNING
    assert status(cluster).restarts == 0
    assert "rank 1 in pod demo-trainer-1-1" in condition(cluster, ConditionType.RUNNING).message
    assert [event.kind for event in cluster.events if event.reason == "StragglerDetected"] == ["Warning"]


@pytest.mark.parametrize(("slow_s", "seconds"), [(200.0, 0.5), (400.0, 0.29)])
def test_a_rank_that_is_slow_for_a_moment_or_a_little_is_not_named(slow_s: float, seconds: float) -> None:
    progress = status(straggling_cluster(slow_s, seconds)).progress

    assert progress is not None
    assert progress.straggler is None


@pytest.mark.parametrize(
    "text",
    ["", "nothing", "rank 0, process 1\n", "rank x, process 2\nThread \n  File", f"rank {'9' * 5_000}, process 1\n"],
)
def test_reading_stacks_never_fails(text: str) -> None:
    assert all(not each.waits for each in read_stacks(text))


def test_a_rank_waits_whose_other_thread_is_in_a_collective() -> None:
    text = stack(0, "a.py", "f").replace("/usr/lib/threading.py", f"/opt/{COLLECTIVE}")

    assert [each.waits for each in read_stacks(text)] == [True]


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
    word = committed_progress(committed).model_copy(update={"pending_step": pending, "time": cluster.now.timestamp()})
    cluster.end(name, "checkpointer", code, word.model_dump_json())


def outage() -> ModelCluster:
    """Training is done, the store went away before: checkpointers gave up for want of time, and were started again."""
    cluster = meshed()
    done(cluster)
    cluster.pass_time(GRACE.total_seconds() / 2)
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, LAST_STEP)
    cluster.reconcile_once()
    return cluster


def hear(cluster: ModelCluster, committed: int | None, pending: int | None, store_error: str = "") -> None:
    """Pod 0 says so now."""
    word = {"pending_step": pending, "store_error": store_error, "time": cluster.now.timestamp()}
    report_progress(cluster, step=LAST_STEP, committed=committed, **word)


def deleted(actions: tuple[Action, ...]) -> set[str]:
    return {action.name for action in actions if isinstance(action, DeleteObject) and action.kind == "Pod"}


def wakes(actions: tuple[Action, ...]) -> set[datetime]:
    return {action.time for action in actions if isinstance(action, WakeAt)}


def succeed(cluster: ModelCluster) -> None:
    for name in PODS:
        end_checkpointer(cluster, name, 0, LAST_STEP, None)


def fail(cluster: ModelCluster) -> None:
    for name in PODS:
        end_checkpointer(cluster, name, 78, 90, LAST_STEP)


@pytest.mark.parametrize(("end", "phase"), [(succeed, Phase.SUCCEEDED), (fail, Phase.FAILED)])
def test_pods_kept_by_a_proxy_go_after_their_upload_time(end: Callable[[ModelCluster], None], phase: Phase) -> None:
    cluster = meshed()
    due = done(cluster)
    end(cluster)

    at_the_end = cluster.reconcile_once()
    cluster.now = due - timedelta(seconds=1)
    before = cluster.reconcile_once()
    cluster.now = due
    after = cluster.reconcile_once()

    assert status(cluster).phase is phase
    assert deleted(at_the_end) == deleted(before) == set()
    assert due in wakes(at_the_end) & wakes(before)
    assert deleted(after) == set(PODS)


def test_pods_that_never_trained_go_after_their_upload_time() -> None:
    cluster = meshed()
    for name in PODS:
        cluster.end(name, "trainer", 65)
    cluster.reconcile_once()

    cluster.now += GRACE + FORCE_DELETE_AFTER
    after = cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED
    assert deleted(after) == set(PODS)


def test_a_pod_that_ended_stays_for_its_log_however_late_it_is() -> None:
    cluster = running()
    for name in PODS:
        cluster.end(name, "trainer", 0, cluster.done(LAST_STEP))
        cluster.end(name, "checkpointer", 0, committed_progress(LAST_STEP).model_dump_json())
    cluster.reconcile_once()

    cluster.pass_time(HOURS_S)

    assert status(cluster).phase is Phase.SUCCEEDED
    assert cluster.reconcile_once() == ()


def test_a_proxy_does_not_delay_the_restart_of_an_unsaved_gang() -> None:
    cluster = meshed()
    due = done(cluster)
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, None)

    waiting = cluster.reconcile_once()
    reason = condition(cluster, ConditionType.RUNNING).reason
    cluster.now = due
    over = cluster.reconcile_once()

    assert reason == "Committing"
    assert due in wakes(waiting)
    assert (status(cluster).phase, status(cluster).charged_restarts) == (Phase.RESTARTING, 1)
    assert failure(cluster).reason == "SnapshotNotCommitted"
    assert POD_0 in failure(cluster).message
    assert PROXY in failure(cluster).message
    assert deleted(over) == set(PODS)


@pytest.mark.parametrize("heard", [True, False])
def test_an_upload_is_waited_for_during_a_store_outage(heard: bool) -> None:
    cluster = outage()
    cluster.polled = None  # a new operator has asked nobody yet
    if heard:
        hear(cluster, None, None, "the store did not answer")

    cluster.pass_time(HOURS_S)
    before = cluster.reconcile_once()
    hear(cluster, 90, LAST_STEP, "the store did not answer")
    cluster.pass_time(HOURS_S)
    later = cluster.reconcile_once()
    waiting = status(cluster)
    hear(cluster, LAST_STEP, None)
    cluster.reconcile_once()

    assert deleted(before) == deleted(later) == set()
    assert (waiting.phase, waiting.attempt) == (Phase.RUNNING, 1)
    assert status(cluster).phase is Phase.SUCCEEDED


def test_a_checkpointer_that_will_be_restarted_has_not_ended() -> None:
    cluster = meshed()
    due = done(cluster)
    for name in PODS:
        give_up(cluster, name, OUT_OF_TIME, 90, LAST_STEP)

    actions = cluster.reconcile_once()

    assert condition(cluster, ConditionType.RUNNING).reason == "Committing"
    assert due in wakes(actions)


def test_a_cut_that_was_given_up_after_an_outage_is_waited_for_no_longer() -> None:
    cluster = outage()
    cluster.pass_time(HOURS_S)
    cluster.reconcile_once()
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, None)

    hear(cluster, 90, None)
    after = cluster.reconcile_once()

    assert failure(cluster).reason == "SnapshotNotCommitted"
    assert deleted(after) == set(PODS)


def test_a_checkpointer_may_upload_for_any_time_after_its_trainer() -> None:
    cluster = meshed()
    done(cluster)

    cluster.pass_time(HOURS_S)
    actions = cluster.reconcile_once()

    assert deleted(actions) == set()
    assert condition(cluster, ConditionType.RUNNING).reason == "Committing"


def test_a_crash_looping_checkpointer_is_waited_for_until_its_time() -> None:
    cluster = outage()
    for name in PODS:
        [sidecar] = cluster.pods[name]["status"]["initContainerStatuses"]
        sidecar["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    cluster.reconcile_once()
    before = status(cluster)

    cluster.now += GRACE + FORCE_DELETE_AFTER
    after = cluster.reconcile_once()

    assert before.attempt == 1
    assert failure(cluster).reason == "SnapshotNotCommitted"
    assert deleted(after) == set(PODS)


def test_a_cut_that_lost_a_part_with_its_node_restarts_for_free() -> None:
    cluster = outage()
    cluster.pass_time(HOURS_S)
    hear(cluster, 90, LAST_STEP)
    lose_node(cluster, POD_1)

    before = cluster.reconcile_once()
    cluster.pass_time(61)
    cluster.reconcile_once()

    assert deleted(before) == set()
    assert failure(cluster).reason == "NodeLost"
    assert status(cluster).charged_restarts == 0


def test_pods_of_a_failed_job_stay_until_their_cut_is_committed() -> None:
    cluster = meshed()
    cluster.end(POD_0, "trainer", 75)
    cluster.end(POD_1, "trainer", 65)
    for name in PODS:
        end_checkpointer(cluster, name, OUT_OF_TIME, 90, LAST_STEP)
    cluster.reconcile_once()

    cluster.pass_time(HOURS_S)
    hear(cluster, 90, LAST_STEP, "the store did not answer")
    during = cluster.reconcile_once()
    hear(cluster, LAST_STEP, None)
    after = cluster.reconcile_once()

    assert status(cluster).phase is Phase.FAILED
    assert deleted(during) == set()
    assert deleted(after) == set(PODS)


def test_the_bound_is_the_grace_period_of_the_job() -> None:
    cluster = meshed()
    cluster.edit("lifecycle", terminationGracePeriod="1h")
    done(cluster)
    succeed(cluster)
    cluster.reconcile_once()

    cluster.now += GRACE + FORCE_DELETE_AFTER
    early = cluster.reconcile_once()
    cluster.now += timedelta(hours=1) - GRACE
    late = cluster.reconcile_once()

    assert deleted(early) == set()
    assert deleted(late) == set(PODS)


NOW = datetime(2026, 1, 1, tzinfo=UTC)
LARGEST = Progress(
    attempt=1,
    phase=TrainerPhase.TRAINING,
    step=MAX_EXACT,
    total_steps=MAX_EXACT,
    samples=MAX_EXACT,
    epoch=MAX_EXACT,
    loss=1e308,
    samples_per_second=1e18,
    eta_seconds=1e18,
    longest_step_seconds=1e9,
    slowest=SlowestRank(rank=MAX_EXACT, seconds=1e9, median_seconds=0),
    evaluation=EvalMetrics(log_loss=-1e308, ne=1e308, auc=1, calibration=1e308),
    time=MAX_UNIX_SECONDS,
)


def test_the_largest_progress_is_written() -> None:
    cluster = running()
    assert cluster.polled is not None
    cluster.polled = replace(cluster.polled, trainer=LARGEST, slow_s=1e9)

    cluster.pass_time(60)
    cluster.reconcile_once()

    progress = status(cluster).progress
    assert progress is not None
    assert (progress.step, progress.loss, progress.ne) == (MAX_EXACT, 1e308, 1e308)


@pytest.mark.parametrize("time", [0, MAX_UNIX_SECONDS])
def test_a_snapshot_of_any_time_is_written(time: float) -> None:
    cluster = running()
    info = SnapshotInfo(step=MAX_EXACT, kind="k" * 32, bits=32, bytes=MAX_EXACT, uri="u" * 4_096, time=time)

    report_progress(cluster, step=1, last_snapshot=info)
    cluster.pass_time(60)
    cluster.reconcile_once()

    snapshot = status(cluster).last_snapshot
    assert snapshot is not None
    assert snapshot.time in ("1970-01-01T00:00:00Z", "9999-12-31T23:59:59Z")


def test_the_longest_step_has_a_deadline() -> None:
    assert NOW + timedelta(seconds=hang_timeout_s(LARGEST, None)) > NOW


def test_reports_reach_the_status_without_control_characters() -> None:
    evil, cluster = "\x1b]52;c;ZXZpbA==\x07\u202e", running()
    info = SnapshotInfo(step=1, kind=evil, bits=32, bytes=1, uri=evil, time=0)
    left = TerminationMessage(exit_code=65, reason="BadData", message=evil).encode().decode()

    report_progress(cluster, step=1, last_snapshot=info)
    cluster.end(POD_0, "trainer", 65, left)
    cluster.reconcile_once()

    snapshot = status(cluster).last_snapshot
    assert snapshot is not None
    assert {failure(cluster).message, snapshot.kind, snapshot.uri} == {r"\x1b]52;c;ZXZpbA==\x07\u202e"}
    assert shorten(evil * 1_000, 100).isprintable()


@pytest.mark.parametrize("label", ["9" * 63, "-1", "x", "", "\u00b2"])
def test_a_pod_whose_labels_are_no_numbers_is_of_no_attempt(label: str) -> None:
    labels = {Label.ATTEMPT: label, Label.INDEX: label}

    pod = read_pod({"metadata": {"name": "p", "labels": labels}})

    assert (pod.attempt, pod.index) == (MISSING, MISSING)


def waiting_pod(*gates: str) -> PodSeen:
    key = JobKey("team", "demo")
    return PodSeen(key=key, name=POD_0, uid="u", owner_uid="job", attempt=1, index=0, phase="Pending", gates=gates)


def test_a_pod_that_a_gate_of_others_holds_names_the_gate() -> None:
    reason, message = pod_wait(waiting_pod("example.com/licence"), "")

    assert reason is Reason.QUOTA_PENDING
    assert "example.com/licence" in message


def test_a_wait_that_the_operator_does_not_know_is_quoted() -> None:
    container = ContainerSeen(
        name="trainer", started=False, waiting_reason="RunContainerError", waiting="no such device"
    )

    assert container_wait(waiting_pod(), container) == (Reason.TRAINERS_STARTING, f"{POD_0}/trainer: no such device")
