"""How often pods are asked for their progress, with few jobs and with many."""

from dlrm_operator.beside.polling import POLLS_PER_S, Poller, Target
from dlrm_operator.facts.observed import JobKey


def poller(jobs: int) -> Poller:
    made = Poller(2.0, lambda key: None)
    for number in range(jobs):
        made.follow(JobKey("space", f"job-{number}"), Target(f"uid-{number}", "127.0.0.1"))
    return made


def test_a_new_pod_is_asked_at_once_and_moves_nobody_elses_turn() -> None:
    made = poller(3)
    first = made._take_due(100.0)

    made.follow(JobKey("space", "new"), Target("new", "127.0.0.1"))
    second = made._take_due(101.0)

    assert len(first) == 3
    assert list(second) == [JobKey("space", "new")]


def test_a_few_jobs_are_asked_every_interval() -> None:
    made = poller(3)

    asked = [len(made._take_due(100.0 + step)) for step in range(9)]

    assert asked == [3, 0, 3, 0, 3, 0, 3, 0, 3]


def test_many_jobs_share_a_bounded_number_of_polls() -> None:
    made = poller(1_000)
    made._take_due(100.0)

    asked = sum(len(made._take_due(100.0 + step / 4)) for step in range(1, 401))

    assert asked <= 100 * POLLS_PER_S


def test_a_pod_that_took_another_s_place_is_asked_at_once() -> None:
    made = poller(1)
    made._take_due(100.0)

    made.follow(JobKey("space", "job-0"), Target("uid-next", "127.0.0.2"))

    assert len(made._take_due(100.1)) == 1
