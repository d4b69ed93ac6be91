"""Exit codes to decisions: what caused a failure, what follows, what the user reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from dlrm_api.lifecycle import RestartSpec
from dlrm_api.names import USER_ERROR_CODES, ExitCode
from dlrm_cli.run.process import ProcessExit
from dlrm_cli.run.supervisor import LocalRestarts, find_cause


def ended(name: str, code: int, message: str = "") -> ProcessExit:
    return ProcessExit(name=name, code=code, message=message, log=Path("/logs/1") / f"{name}.log")


@pytest.mark.parametrize(
    ("codes", "cause"),
    [((75, 137), 137), ((75, 65, 137), 65), ((143, 75), 75), ((74, 1), 74), ((143, 143), 143), ((78, 74), 78)],
)
def test_the_cause_is_distinguished_from_its_effects(codes: tuple[int, ...], cause: int) -> None:
    exits = [ended(f"trainer-{i}", code) for i, code in enumerate(codes)]

    assert find_cause(exits).code == cause


@pytest.mark.parametrize("code", sorted({*USER_ERROR_CODES, ExitCode.DEVICE}))
def test_user_errors_and_full_disks_end_the_job(code: int) -> None:
    assert LocalRestarts(spec=RestartSpec()).action(code, trained=False) == "fail"


@pytest.mark.parametrize("code", [1, 66, 70, 75, 77, 137, 139])
def test_crashes_and_temporary_failures_are_retried(code: int) -> None:
    assert LocalRestarts(spec=RestartSpec()).action(code, trained=True) == "restart"


def test_a_gang_that_handed_over_its_cut_restarts_for_free() -> None:
    assert LocalRestarts(spec=RestartSpec()).action(ExitCode.TERMINATED, trained=True) == "restart-free"


def waits(spec: RestartSpec, *failures: tuple[str, int | None]) -> list[float | None]:
    """The waits after failures, given as actions and newest committed steps, until the budget is spent."""
    restarts, found = LocalRestarts(spec=spec), []
    for action, committed_step in failures:
        taken = restarts.take(action, committed_step)  # type: ignore[arg-type]
        if taken is None:
            return [*found, None]
        restarts, wait_s = taken
        found.append(wait_s)
    return found


def test_waits_double_up_to_their_bound_until_the_budget_is_spent() -> None:
    spec = RestartSpec(max_restarts=4, backoff=2.0, max_backoff=10.0)

    assert waits(spec, *[("restart", None)] * 5) == [2.0, 4.0, 8.0, 10.0, None]


def test_a_newly_committed_step_restores_the_budget() -> None:
    spec = RestartSpec(max_restarts=1, backoff=2.0)

    assert waits(spec, ("restart", 10), ("restart", 20), ("restart", 20)) == [2.0, 2.0, None]


def test_progress_restores_nothing_if_the_job_says_so() -> None:
    spec = RestartSpec(max_restarts=1, backoff=2.0, progress_resets=False)

    assert waits(spec, ("restart", 10), ("restart", 20)) == [2.0, None]


def test_free_restarts_have_a_budget_of_their_own() -> None:
    spec = RestartSpec(max_restarts=0, max_free_restarts=1)

    assert waits(spec, ("restart-free", None), ("restart-free", 10), ("restart-free", 10)) == [0.0, 0.0, None]


def test_free_restarts_leave_the_charged_budget_alone() -> None:
    spec = RestartSpec(max_restarts=1, backoff=2.0)

    assert waits(spec, ("restart-free", None), ("restart", None), ("restart", None)) == [0.0, 2.0, None]


@example(64, " ")
@given(st.integers(1, 255), st.text("ab :", max_size=20))
def test_every_exit_becomes_an_error_with_a_text_and_a_known_code(code: int, message: str) -> None:
    error = ended("trainer-0", code, message).error()

    known = code in {64, 65, 66, 74, 75, 77, 78}
    assert error.exit_code == (code if known else ExitCode.INTERNAL)
    assert str(error).strip()


def test_a_crash_names_its_log() -> None:
    error = ended("trainer-1", 137).error()

    assert "trainer-1 ended with signal 9" in str(error)
    assert "/logs/1/trainer-1.log" in str(error)
