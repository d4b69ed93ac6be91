"""Restart policy: exit codes, budgets, waits."""

import pytest

from dlrm_api.lifecycle import (
    JITTER,
    ExitCodeRule,
    RestartAction,
    RestartBudget,
    RestartSpec,
    backoff_s,
    restart_action,
)
from dlrm_api.names import RECOVERABLE_CODES, USER_ERROR_CODES, ExitCode


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("disrupted", [False, True])
@pytest.mark.parametrize("code", sorted(USER_ERROR_CODES))
def test_user_errors_are_final_unless_they_may_pass(code: int, disrupted: bool, trained: bool) -> None:
    retried = trained and code in RECOVERABLE_CODES

    action = restart_action(code, RestartSpec(), disrupted=disrupted, trained=trained)

    assert action == ("restart" if retried else "fail")


@pytest.mark.parametrize(("disrupted", "action"), [(False, "restart"), (True, "restart-free")])
def test_only_restarts_after_disruptions_are_free(disrupted: bool, action: RestartAction) -> None:
    assert restart_action(ExitCode.INTERNAL, RestartSpec(), disrupted=disrupted, trained=False) == action


def test_the_first_matching_rule_of_the_job_decides() -> None:
    rules = (ExitCodeRule(exit_codes=(78, 3), action="restart-free"), ExitCodeRule(exit_codes=(3, 5), action="fail"))
    spec = RestartSpec(rules_by_exit_code=rules)

    assert restart_action(3, spec, disrupted=False, trained=True) == "restart-free"
    assert restart_action(78, spec, disrupted=False, trained=True) == "restart-free"
    assert restart_action(5, spec, disrupted=False, trained=True) == "fail"


def test_further_fatal_codes_come_from_the_caller() -> None:
    fatal = {ExitCode.DEVICE}

    assert restart_action(ExitCode.DEVICE, RestartSpec(), disrupted=False, trained=True, fatal=fatal) == "fail"


def test_waits_double_up_to_their_limit() -> None:
    spec = RestartSpec(backoff=10.0, max_backoff=60.0)

    assert [backoff_s(spec, restarts) for restarts in (1, 2, 3, 4, 10_000)] == [10, 20, 40, 60, 60]


def test_jitter_is_a_function_of_the_seed() -> None:
    spec = RestartSpec(backoff=10.0, max_backoff=60.0)

    waits = {backoff_s(spec, 1, f"{uid}/1") for uid in range(20)}

    assert backoff_s(spec, 3, "a/3") == backoff_s(spec, 3, "a/3")
    assert len(waits) == 20
    assert all(10 * (1 - JITTER) <= wait <= 10 for wait in waits)
    assert backoff_s(spec, 10_000, "a/1") <= 60


def test_the_two_budgets_are_counted_apart() -> None:
    spec = RestartSpec(max_restarts=1, max_free_restarts=2)

    once = RestartBudget().take("restart", spec)

    assert once == RestartBudget(charged=1, free=0)
    assert once.take("restart", spec) is None
    assert once.take("restart-free", spec) == RestartBudget(charged=1, free=1)
    assert RestartBudget(free=2).take("restart-free", spec) is None
