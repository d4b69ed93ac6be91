"""Memory of the hand-off folder that goes from cut to cut, and never stands in anybody's way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import HandoffDir
from dlrm_checkpointer.handoff.writer import HandoffWriter

BUDGET = 2_000_000


def inode_of_cut(inbox: Inbox) -> int:
    """Return the inode of the rows of the one waiting cut, and free it."""
    (name,) = inbox.ready()
    inode = (inbox.path / str(name) / "rows.bin").stat().st_ino
    inbox.free(name)
    return inode


def used(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("budget", [BUDGET, None])
def test_a_cut_is_copied_into_the_memory_of_the_one_before_it(tmp_path: Path, new_model, budget: int | None):
    model, writer, inbox = new_model(), HandoffWriter(tmp_path, 0, budget), Inbox(tmp_path, range(1))

    inodes = []
    for _ in range(3):
        writer.hand_over(model.train().meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=0)
        cut = inbox.open(inbox.ready()[0])
        for piece, given in zip(cut.pieces(), [p for p in model.pieces(0, 1) if len(p.row_ids)], strict=True):
            assert (piece.rows == given.rows).all()
        del cut, piece
        inodes.append(inode_of_cut(inbox))

    assert len(set(inodes)) == 1
    inbox.close()


def test_memory_touched_ahead_is_the_ranks_share_and_takes_a_cut(tmp_path: Path, new_model):
    model, writers = new_model().train(), [HandoffWriter(tmp_path, rank, BUDGET, 2) for rank in range(2)]
    inbox = Inbox(tmp_path, range(2))

    for writer in writers:
        writer.touch()
    spare = HandoffDir(tmp_path).spare(0).stat()
    writers[0].hand_over(model.meta(1), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=0)

    assert 0.9 * BUDGET / 2 < spare.st_blocks * 512 <= BUDGET / 2 + 8_192
    assert used(tmp_path) <= BUDGET
    assert inode_of_cut(inbox) == spare.st_ino
    inbox.close()


def test_a_rank_above_its_share_takes_the_spare_memory_of_others(tmp_path: Path, new_model):
    model = new_model().train()
    size = sum(piece.nbytes for piece in model.pieces(0, 1))
    writers = [HandoffWriter(tmp_path, rank, int(size * 1.3) + 16_384, 2) for rank in range(2)]

    for writer in writers:
        writer.touch()
    given = writers[0].hand_over(model.meta(2), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=0)

    assert given.segments == 1
    assert not HandoffDir(tmp_path).spare(1).exists()
    assert used(tmp_path) <= size * 1.3 + 16_384


def test_a_full_device_takes_spare_memory_before_it_refuses_a_cut(
    tmp_path: Path, new_model, monkeypatch: pytest.MonkeyPatch
):
    model, inbox = new_model().train(), Inbox(tmp_path, range(2))
    writers = [HandoffWriter(tmp_path, rank, None, 2) for rank in range(2)]
    writers[1].hand_over(model.meta(2), model.pieces(1, 2), None, owned=model.shards(1, 2), timeout_s=0)
    inbox.free(inbox.ready()[0])
    real = os.posix_fallocate

    def allocate(descriptor: int, start: int, size: int) -> None:
        if HandoffDir(tmp_path).spare(1).exists():
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor, start, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    writers[0].hand_over(model.meta(2), model.pieces(0, 2), model.dense, owned=model.shards(0, 2), timeout_s=0)

    assert not writers[0].ready()
    inbox.close()


def test_a_smaller_cut_leaves_others_the_memory_that_a_larger_one_took(tmp_path: Path, new_model):
    model, inbox = new_model().train(6), Inbox(tmp_path, range(2))
    size = sum(piece.nbytes for piece in model.pieces(0, 1))
    writers = [HandoffWriter(tmp_path, rank, int(size * 1.3) + 16_384, 2) for rank in range(2)]
    writers[0].hand_over(model.meta(2), model.pieces(0, 1), model.dense, owned=model.shards(0, 1), timeout_s=0)
    inbox.free(inbox.ready()[0])

    small = new_model(step=6).train()
    writers[0].hand_over(small.meta(2), small.pieces(0, 2), small.dense, owned=small.shards(0, 2), timeout_s=0)
    rest = writers[1].hand_over(small.meta(2), small.pieces(1, 2), None, owned=small.shards(1, 2), timeout_s=0)

    assert rest.segments == 1
    assert used(tmp_path) <= size * 1.3 + 16_384
    inbox.close()
