"""The model of jobs follows the documented rules, and CI's random schedules hold every kind of fate."""

from collections import Counter

import pytest

from dlrm_testing.operator.job_model import Budget, End, Fate, Kind, Stuck, ends
from dlrm_testing.operator.job_schedule import random_schedule, traits

CRASH = Fate(kind=Kind.CRASH, code=1)
DONE = Fate(kind=Kind.DONE, committed=100)
ONCE = Budget(max_charged=1, max_free=0)


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
def test_a_job_ends_with_the_reason_of_its_rule(fates: tuple[Fate, ...], reason: str) -> None:
    assert only_end(*fates).reason == reason


def test_an_edited_job_continues_with_full_budgets_and_no_reserve() -> None:
    starved = Fate(kind=Kind.OOM, code=137)

    before, after = only_end(starved, CRASH), only_end(starved, CRASH, CRASH)

    assert (before.phase, before.attempt, before.charged, before.reserve) == ("Failed", 2, 1, True)
    assert (after.phase, after.attempt, after.charged, after.reserve) == ("", 4, 1, False)
    assert dict(after.reasons) == {"OOMKilled": 1, "SpecChanged": 1, "Exit1": 1}


def test_the_schedules_of_ci_hold_every_fate_and_trait() -> None:
    found: Counter[str] = Counter()
    for seed in range(50):
        found += traits(random_schedule(seed))

    kinds = {kind.value for kind in Kind} | {stuck.value for stuck in Stuck if stuck}
    known = set(random_schedule(0).scripts[0].traits()) - {"gang by none"}
    assert kinds | known | {"gang by volcano", "gang by coscheduling", "schedules of several jobs"} <= set(found)
