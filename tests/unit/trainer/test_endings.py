"""When ranks are no longer waited for: however the others of their pod ended, and whenever that was seen."""

from __future__ import annotations

import pytest

from dlrm_api.names import ExitCode
from dlrm_trainer.launcher import CONSEQUENCES_S, UNSERVED_S, Endings

GRACE_S = 60.0
RUNS = {0: None, 1: None}


def seen(*looks: tuple[float, dict[int, int | None]], unserved_from: float = float("inf")) -> Endings:
    endings = Endings(GRACE_S)
    for now, codes in looks:
        endings.see(codes, now, unserved=now >= unserved_from)
    return endings


def late_from(endings: Endings, since: float) -> float:
    """How long after ``since`` ranks are late, in whole seconds."""
    return next(after for after in range(1_000) if endings.are_late(since + after + 0.5))


@pytest.mark.parametrize("code", [-9, 1, ExitCode.TEMPORARY, ExitCode.BAD_DATA])
@pytest.mark.parametrize("looks_before", [[(1.0, RUNS)], []])
def test_the_others_of_a_rank_that_failed_have_a_moment_whether_or_not_it_was_seen_to_run(
    code: int, looks_before: list[tuple[float, dict[int, int | None]]]
) -> None:
    endings = seen(*looks_before, (5.0, {0: code, 1: None}), (9.0, {0: code, 1: None}))

    assert endings.failures == {0: 5.0}
    assert late_from(endings, 5.0) == CONSEQUENCES_S


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.TERMINATED])
def test_the_others_of_a_rank_that_ended_well_have_the_grace_period(code: int) -> None:
    endings = seen((5.0, {0: code, 1: None}), (9.0, {0: code, 1: None}))

    assert endings.failures == {}
    assert late_from(endings, 5.0) == GRACE_S


def test_ranks_that_were_told_to_end_have_the_grace_period_from_the_first_signal_on() -> None:
    endings = seen((1.0, RUNS))
    endings.stop(2.0)
    endings.stop(30.0)

    assert late_from(endings, 2.0) == GRACE_S


def test_ranks_whose_checkpointer_is_gone_are_not_waited_for_unless_it_comes_back() -> None:
    gone = seen((1.0, RUNS), (4.0, RUNS), (5.0, RUNS), unserved_from=4.0)
    back = seen((4.0, RUNS), unserved_from=4.0)
    back.see(RUNS, 6.0, unserved=False)

    assert late_from(gone, 4.0) == UNSERVED_S
    assert back.unserved_at is None
    assert not back.are_late(1_000.0)


def test_ranks_that_all_run_are_never_late() -> None:
    assert not seen((1.0, RUNS), (2.0, RUNS)).are_late(1e6)
