"""Test how long the launcher waits for running ranks, by how the others exited."""

from __future__ import annotations

import pytest

from dlrm_api.names import ExitCode
from dlrm_trainer.launcher import LOST_CHECKPOINTER_TIMEOUT_S, PEER_EXIT_TIMEOUT_S, RankExits

GRACE_S = 60.0
RUNS = {0: None, 1: None}


def observed(*codes_at: tuple[float, dict[int, int | None]], lost_from: float = float("inf")) -> RankExits:
    exits = RankExits(GRACE_S)
    for now, codes in codes_at:
        exits.observe(codes, now, checkpointer_lost=now >= lost_from)
    return exits


def seconds_until_overdue(exits: RankExits, since: float) -> float:
    return next(after for after in range(1_000) if exits.are_overdue(since + after + 0.5))


@pytest.mark.parametrize("code", [-9, 1, ExitCode.TEMPORARY, ExitCode.BAD_DATA])
@pytest.mark.parametrize("observed_before", [[(1.0, RUNS)], []], ids=["running-before", "never-seen-running"])
def test_peers_of_a_failed_rank_have_the_peer_timeout(
    code: int, observed_before: list[tuple[float, dict[int, int | None]]]
) -> None:
    exits = observed(*observed_before, (5.0, {0: code, 1: None}), (9.0, {0: code, 1: None}))

    assert exits.failures == {0: 5.0}
    assert seconds_until_overdue(exits, 5.0) == PEER_EXIT_TIMEOUT_S


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.TERMINATED])
def test_peers_of_a_rank_that_succeeded_have_the_grace_period(code: int) -> None:
    exits = observed((5.0, {0: code, 1: None}), (9.0, {0: code, 1: None}))

    assert exits.failures == {}
    assert seconds_until_overdue(exits, 5.0) == GRACE_S


def test_the_grace_period_starts_at_the_first_signal() -> None:
    exits = observed((1.0, RUNS))
    exits.stop(2.0)
    exits.stop(30.0)

    assert seconds_until_overdue(exits, 2.0) == GRACE_S


def test_ranks_without_checkpointer_are_overdue_unless_it_returns() -> None:
    gone = observed((1.0, RUNS), (4.0, RUNS), (5.0, RUNS), lost_from=4.0)
    back = observed((4.0, RUNS), lost_from=4.0)
    back.observe(RUNS, 6.0, checkpointer_lost=False)

    assert seconds_until_overdue(gone, 4.0) == LOST_CHECKPOINTER_TIMEOUT_S
    assert back.checkpointer_lost_at is None
    assert not back.are_overdue(1_000.0)


def test_running_ranks_are_never_overdue() -> None:
    assert not observed((1.0, RUNS), (2.0, RUNS)).are_overdue(1e6)
