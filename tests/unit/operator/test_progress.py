"""How often pods are asked for their progress, with few jobs and with many."""

import pytest

from dlrm_operator.clients.progress import MAX_GAP_S, POLLS_PER_S, Poller, Target
from dlrm_operator.reconcile.state import JobKey


def poller(jobs: int) -> Poller:
    made = Poller(2.0, lambda key: None)
    for number in range(jobs):
        made.follow(JobKey("space", f"job-{number}"), Target(f"uid-{number}", "127.0.0.1"))
    return made


def test_a_new_pod_is_asked_at_once_and_moves_nobody_elses_turn() -> None:
    made = poller(3)
    first = made.take_due(100.0)

    made.follow(JobKey("space", "new"), Target("new", "127.0.0.1"))
    second = made.take_due(101.0)

    assert len(first) == 3
    assert list(second) == [JobKey("space", "new")]


def test_a_few_jobs_are_asked_every_interval() -> None:
    made = poller(3)

    asked = [len(made.take_due(100.0 + step)) for step in range(9)]

    assert asked == [3, 0, 3, 0, 3, 0, 3, 0, 3]


def test_many_jobs_share_a_bounded_number_of_polls() -> None:
    made = poller(1_000)
    made.take_due(100.0)

    asked = sum(len(made.take_due(100.0 + step / 4)) for step in range(1, 401))

    assert asked <= 100 * POLLS_PER_S


def test_a_pod_that_took_another_s_place_is_asked_at_once() -> None:
    made = poller(1)
    made.take_due(100.0)

    made.follow(JobKey("space", "job-0"), Target("uid-next", "127.0.0.2"))

    assert len(made.take_due(100.1)) == 1


def test_jobs_that_wait_for_a_commit_are_polled_first_and_at_every_interval() -> None:
    made = poller(1_000)
    made.take_due(100.0)
    key, target = JobKey("space", "job-999"), Target("uid-999", "127.0.0.1", waits_for_commit=True)
    made.follow(JobKey("space", "new"), Target("new", "127.0.0.1"))

    made.follow(key, target)

    assert list(made.take_due(100.1)) == [key, JobKey("space", "new")]
    assert [len(made.take_due(100.1 + step)) for step in range(1, 5)] == [0, 1, 0, 1]


def test_answers_of_a_pod_are_kept_when_its_job_starts_to_wait_for_a_commit() -> None:
    made, key, target = poller(1), JobKey("space", "job-0"), Target("uid-0", "127.0.0.1")
    made.gap_s(target, 100.0)

    made.follow(key, Target("uid-0", "127.0.0.1", waits_for_commit=True))

    assert made.gap_s(target, 102.0) == 2.0


@pytest.mark.parametrize(("jobs", "counted_s"), [(10, MAX_GAP_S), (2_000, 200.0), (5_000, 500.0)])
def test_time_between_answers_counts_whole_however_far_many_jobs_move_them_apart(jobs: int, counted_s: float) -> None:
    made, target = poller(jobs), Target("uid-0", "127.0.0.1")
    gap_s = max(jobs / POLLS_PER_S, 10 * MAX_GAP_S if jobs == 10 else 0.0)

    first = made.gap_s(target, 100.0)
    second = made.gap_s(target, 100.0 + gap_s)

    assert (first, second) == (0.0, counted_s)
