"""The model of a job's life says what the documentation says, and the lives that CI lives hold every kind of fate."""

from collections import Counter

import pytest

from dlrm_testing.operator.life_model import Budget, End, Fate, Kind, Stuck, ends
from dlrm_testing.operator.life_schedule import random_schedule, traits

CRASH = Fate(kind=Kind.CRASH, code=1)
DONE = Fate(kind=Kind.DONE, committed=100)
ONCE = Budget(most=1, most_free=0)


def only_end(*fates: Fate, budget: Budget = ONCE) -> End:
    (end,) = ends(fates, budget)
    return end


@pytest.mark.parametrize(
    ("fates", "reason"),
    [
        ((CRASH, CRASH), "BackoffLimitExceeded"),
        ((Fate(kind=Kind.HUNG), CRASH), "BackoffLimitExceeded"),
        ((Fate(kind=Kind.DELETED),), "DisruptionLimitExceeded"),
        ((Fate(kind=Kind.CRASH, code=65),), "BadData"),
        ((Fate(kind=Kind.OVERDUE, committed=10),), "DeadlineExceeded"),
        ((Fate(kind=Kind.NOT_PULLED),), "PendingDeadlineExceeded"),
        ((CRASH, DONE), "Committed"),
        ((CRASH, Fate(kind=Kind.CRASH, code=1, committed=10), DONE), "Committed"),
        ((CRASH, Fate(kind=Kind.RESIZED, committed=10), CRASH, DONE), "Committed"),
        ((CRASH, Fate(kind=Kind.SUSPENDED), CRASH), "BackoffLimitExceeded"),
    ],
)
def test_a_life_ends_under_the_word_of_its_rule(fates: tuple[Fate, ...], reason: str) -> None:
    assert only_end(*fates).reason == reason


def test_an_edited_job_goes_on_with_whole_budgets_and_nothing_set_aside() -> None:
    starved = Fate(kind=Kind.OOM, code=137)

    before, after = only_end(starved, CRASH), only_end(starved, CRASH, CRASH)

    assert (before.phase, before.attempt, before.charged, before.reserve) == ("Failed", 2, 1, True)
    assert (after.phase, after.attempt, after.charged, after.reserve) == ("", 4, 1, False)
    assert dict(after.reasons) == {"OOMKilled": 1, "SpecChanged": 1, "Exit1": 1}


def test_the_schedules_of_ci_hold_every_kind_of_fate_and_of_life() -> None:
    found: Counter[str] = Counter()
    for seed in range(50):
        found += traits(random_schedule(seed))

    kinds = {kind.value for kind in Kind} | {stuck.value for stuck in Stuck if stuck}
    lives = set(random_schedule(0).scripts[0].traits()) - {"gang by none"}
    assert kinds | lives | {"gang by volcano", "gang by coscheduling", "schedules of several jobs"} <= set(found)
