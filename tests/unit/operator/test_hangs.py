"""Gangs that hang are restarted with their stacks taken before; stragglers are named and left alone."""

from dataclasses import replace

import pytest

from dlrm_api.progress import Progress, SlowestRank, TrainerPhase
from dlrm_api.status import ConditionType, Phase
from dlrm_operator.clients.progress import with_durations
from dlrm_operator.reconcile.gang import HUNG_GRACE_S
from dlrm_operator.reconcile.health import INITIAL_HANG_TIMEOUT_S, MIN_HANG_TIMEOUT_S, hang_timeout_s, read_stacks
from dlrm_operator.reconcile.state import DeleteObject, Polled, RequestStacks, WakeAt
from dlrm_testing.operator.hung_gang import (
    COLLECTIVE,
    HUNG_READER,
    answer_stacks,
    hung,
    stack,
    stands_still,
    straggling,
)
from dlrm_testing.operator.running_job import POD_0, POD_1, condition, failure, running, say, status


def test_stacks_are_taken_before_anything_is_done_to_a_gang_that_hangs() -> None:
    cluster = running()
    stands_still(cluster, MIN_HANG_TIMEOUT_S)

    first = cluster.turn()
    again = cluster.turn()
    answer_stacks(cluster, HUNG_READER)
    cluster.turn()

    asked = [action for action in first if isinstance(action, RequestStacks)]
    assert [set(action.ips) for action in asked] == [{POD_0, POD_1}]
    assert not [action for action in (*first, *again) if isinstance(action, DeleteObject)]
    assert status(cluster).phase is Phase.RESTARTING


def test_the_rank_to_blame_is_named_with_its_pod_and_node_and_the_attempt_charged() -> None:
    cluster = hung()

    last = failure(cluster)
    assert (last.reason, last.rank, last.pod, last.node) == ("HangDetected", 1, POD_1, "node")
    assert "reader.py:12" in last.message
    assert status(cluster).restarts_by_reason == {"HangDetected": 1}
    assert status(cluster).charged_restarts == 1
    assert condition(cluster, ConditionType.RUNNING).reason == "HangDetected"


def test_a_gang_that_hung_gets_no_time_for_a_last_cut_that_it_cannot_make() -> None:
    cluster = running()
    stands_still(cluster, MIN_HANG_TIMEOUT_S)
    cluster.turn()
    answer_stacks(cluster, HUNG_READER)

    deleted = [action for action in cluster.turn() if isinstance(action, DeleteObject)]

    assert [(action.name, action.grace_s) for action in deleted] == [(POD_0, HUNG_GRACE_S), (POD_1, HUNG_GRACE_S)]


def test_a_pod_that_shows_no_stacks_is_to_blame_where_all_others_wait() -> None:
    cluster = hung(texts={POD_0: HUNG_READER[POD_0], POD_1: ""})

    last = failure(cluster)
    assert (last.rank, last.pod) == (None, POD_1)
    assert f"pod {POD_1} on node node" in last.message


def test_evidence_of_a_hang_is_bounded() -> None:
    names = "f" * 300
    frames = "".join(f'  File "/opt/{names}.py", line {number} in {names}\n' for number in range(200))
    cluster = hung(texts={POD_0: "", POD_1: stack(1, "a.py", "g").replace('  File "/opt/a.py"', frames + "  File a")})

    assert len(failure(cluster).message) <= 4_096


def test_a_gang_that_moves_on_while_its_stacks_are_taken_does_not_hang() -> None:
    cluster = running()
    stands_still(cluster, MIN_HANG_TIMEOUT_S)
    cluster.turn()
    answer_stacks(cluster, HUNG_READER)

    say(cluster, step=8)
    cluster.turn()

    assert status(cluster).phase is Phase.RUNNING


def test_a_step_that_may_take_longer_is_waited_for() -> None:
    cluster = running()
    stands_still(cluster, 290.0)

    actions = cluster.turn()

    assert not [action for action in actions if isinstance(action, RequestStacks)]
    wakes = [(action.time - cluster.now).total_seconds() for action in actions if isinstance(action, WakeAt)]
    assert wakes == [10.0]


@pytest.mark.parametrize(
    "phase", [TrainerPhase.STARTING, TrainerPhase.RESTORING, TrainerPhase.CUTTING, TrainerPhase.FINISHING]
)
def test_starts_restores_cuts_and_ends_have_deadlines_of_their_own(phase: TrainerPhase) -> None:
    cluster = running()
    stands_still(cluster, 1e6, phase=phase)

    assert not [action for action in cluster.turn() if isinstance(action, RequestStacks)]


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


def test_a_hang_timeout_of_the_users_is_named() -> None:
    cluster = running()
    cluster.job["spec"]["lifecycle"]["hangTimeout"] = "1m"
    stands_still(cluster, 61.0)
    cluster.turn()
    answer_stacks(cluster, HUNG_READER)
    cluster.turn()

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


def test_a_straggler_is_named_with_its_pod_and_node_and_never_restarted_for() -> None:
    cluster = straggling()

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
    progress = status(straggling(slow_s, seconds)).progress

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
