"""Ranks that work longer than a collective may wait."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dlrm_testing.trainer.gangs import run_ranks
from dlrm_trainer.checkpointing.handover import CutDriver
from dlrm_trainer.checkpointing.restore import restore
from dlrm_trainer.distributed import failures
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import CollectiveKeepalive

TIMEOUT_S = 2.0
PIECE_S = 0.25


class SlowPart:
    """Takes its time for each piece."""

    def __init__(self) -> None:
        self.shard, self.table = None, SimpleNamespace(key_buckets=None, sizes=())
        self.pieces = 0

    def restore(self, pieces: Iterator[Any], *, mark: bool) -> None:
        assert not mark
        for _ in pieces:
            time.sleep(PIECE_S)
            self.pieces += 1


def restore_some(collectives: Collectives, pieces: Sequence[int]) -> tuple[int, float]:
    """Pieces that a rank restored, and when it was done, by a clock that all share."""
    failures.KEEPALIVE_INTERVAL_S = TIMEOUT_S / 4
    piece = SimpleNamespace(row_ids=np.arange(3), state=None, form=SimpleNamespace(columns=None))
    part = SlowPart()
    mine = pieces[collectives.rank]
    snapshot: Any = SimpleNamespace(shard_codes=lambda _: ((0, piece) for _ in range(mine)), dense=dict)
    learner: Any = SimpleNamespace(
        embeddings=SimpleNamespace(settle=lambda: None, local=[part]),
        dense=SimpleNamespace(restore=lambda _arrays: None),
    )
    restore(learner, snapshot, collectives)
    done = time.monotonic()
    collectives.barrier()
    return part.pieces, done


class CutBegunError(Exception):
    """Ends the last cut right after the collective of all ranks that it begins with."""


def end_when_ready(collectives: Collectives, waits_s: Sequence[float]) -> bool:
    """Hand a last cut over where the checkpointer of each rank takes the one before it after so many seconds."""
    failures.KEEPALIVE_INTERVAL_S = TIMEOUT_S / 4
    ready_at = time.monotonic() + waits_s[collectives.rank]

    def begun(*_: object) -> None:
        raise CutBegunError

    view = SimpleNamespace(end_copying=lambda: None, begin_cut=begun, first_parent=0)
    parts: Any = SimpleNamespace(
        writer=SimpleNamespace(
            ready=lambda: time.monotonic() >= ready_at, begin=lambda _: None, broken_parent=lambda: None
        ),
        gang=SimpleNamespace(collectives=collectives, rank=collectives.rank),
        settings=SimpleNamespace(grace_s=60.0),
        control=SimpleNamespace(begun=lambda _: None),
        board=SimpleNamespace(phase=lambda _: None),
        learner=SimpleNamespace(embeddings=SimpleNamespace(saved=view), dense=SimpleNamespace(arrays=dict)),
        observer=SimpleNamespace(stages=None),
    )
    with pytest.raises(CutBegunError):
        CutDriver(parts, attempt=1, step=5).hand_over_last(6, lambda _parent, _now: pytest.fail("not called"))
    return time.monotonic() >= ready_at


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [[0, 16, 1], [16, 0, 7]])
def test_ranks_with_few_rows_wait_for_slow_restores_beyond_the_timeout(pieces: list[int]) -> None:
    found = run_ranks(3, restore_some, pieces, timeout_s=TIMEOUT_S)

    ends = [end for _, end in found]
    assert [count for count, _ in found] == pieces
    assert max(pieces) * PIECE_S > 2 * TIMEOUT_S - 0.5
    assert max(ends) - min(ends) < TIMEOUT_S


def test_one_rank_alone_waits_for_nobody() -> None:
    together = CollectiveKeepalive(Collectives(0, 1, lambda: ""))

    assert list(together.over(range(3))) == [0, 1, 2]
    together.wait()


@pytest.mark.slow
def test_a_last_cut_waits_for_a_slow_checkpointer_beyond_the_timeout() -> None:
    assert run_ranks(3, end_when_ready, [0.0, 2 * TIMEOUT_S, 1.0], timeout_s=TIMEOUT_S) == [True] * 3
