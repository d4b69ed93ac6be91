"""Exit codes to decisions: who is to blame, what follows, what the user reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlrm_api.lifecycle import ExitCodeRule, RestartSpec
from dlrm_api.names import USER_ERROR_CODES, ExitCode
from dlrm_cli.run.supervisor import Budget, Ending, action_after, error_of, to_blame


def ending(name: str, code: int, message: str = "") -> Ending:
    return Ending(name=name, code=code, message=message, log=Path("/logs/1") / f"{name}.log")


@pytest.mark.parametrize(
    ("codes", "blamed"),
    [
        ((75, 137), 137),
        ((75, 65, 137), 65),
        ((143, 75), 75),
        ((74, 1), 74),
        ((143, 143), 143),
        ((78, 74), 78),
    ],
)
def test_the_cause_is_told_from_its_effects(codes: tuple[int, ...], blamed: int) -> None:
    endings = [ending(f"trainer-{i}", code) for i, code in enumerate(codes)]

    cause = to_blame(endings)

    assert cause.code == blamed


@pytest.mark.parametrize("code", sorted({*USER_ERROR_CODES, ExitCode.DEVICE}))
def test_what_the_user_must_mend_is_not_tried_again(code: int) -> None:
    assert action_after(code, RestartSpec()) == "fail"


@pytest.mark.parametrize("code", [1, 70, 75, 137, 139])
def test_crashes_and_temporary_failures_are_tried_again(code: int) -> None:
    assert action_after(code, RestartSpec()) == "restart"


def test_a_gang_that_handed_over_its_cut_is_started_again_for_free() -> None:
    assert action_after(ExitCode.TERMINATED, RestartSpec()) == "restart-free"


def test_the_jobs_own_rules_come_first() -> None:
    rules = (
        ExitCodeRule(exit_codes=(78, 137), action="restart"),
        ExitCodeRule(exit_codes=(137,), action="fail"),
    )
    spec = RestartSpec(rules_by_exit_code=rules)

    assert [action_after(code, spec) for code in (78, 137, 65)] == ["restart", "restart", "fail"]


def test_waits_double_up_to_their_bound_and_then_the_budget_is_spent() -> None:
    budget = Budget(spec=RestartSpec(max_restarts=4, backoff=2.0, max_backoff=10.0))

    waits = []
    for _ in range(5):
        budget, wait_s = budget.charge(None)
        waits.append(wait_s)

    assert waits == [2.0, 4.0, 8.0, 10.0, None]


def test_a_newly_committed_step_makes_the_budget_whole_again() -> None:
    budget = Budget(spec=RestartSpec(max_restarts=1, backoff=2.0))

    budget, first = budget.charge(10)
    budget, second = budget.charge(20)
    budget, third = budget.charge(20)

    assert (first, second, third) == (2.0, 2.0, None)


def test_progress_leaves_the_budget_alone_where_the_job_says_so() -> None:
    budget = Budget(spec=RestartSpec(max_restarts=1, progress_resets=False))

    budget, first = budget.charge(10)
    budget, second = budget.charge(20)

    assert first is not None
    assert second is None


def test_free_restarts_have_a_budget_of_their_own_that_progress_heals() -> None:
    budget = Budget(spec=RestartSpec(max_restarts=0, max_free_restarts=1))

    first = budget.take_free(None)
    assert first is not None
    spent = first.take_free(None)
    healed = first.take_free(10)
    assert healed is not None

    assert spent is None
    assert healed.take_free(10) is None
    assert healed.take_free(20) is not None


def test_free_restarts_leave_the_charged_budget_alone() -> None:
    budget = Budget(spec=RestartSpec(max_restarts=1)).take_free(None)
    assert budget is not None

    budget, wait_s = budget.charge(None)

    assert wait_s is not None
    assert budget.charge(None)[1] is None


@example(64, " ")
@given(st.integers(1, 255), st.text("ab :", max_size=20))
def test_every_ending_becomes_an_error_that_says_something_and_keeps_a_known_exit_code(code: int, message: str) -> None:
    error = error_of(ending("trainer-0", code, message))

    known = code in {64, 65, 66, 74, 75, 77, 78}
    assert error.exit_code == (code if known else ExitCode.INTERNAL)
    assert str(error).strip()


def test_a_crash_says_where_its_log_is() -> None:
    error = error_of(ending("trainer-1", 137))

    assert "trainer-1 ended with signal 9" in str(error)
    assert "/logs/1/trainer-1.log" in str(error)
