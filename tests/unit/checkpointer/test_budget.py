"""Bytes of the hand-off directory: what a rank has reserved stays its own, whatever others do until it is ready."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlrm_checkpointer.format.manifest import ChunkEntry, ObjectEntry
from dlrm_checkpointer.handoff.budget import Budget
from dlrm_checkpointer.handoff.cut import Cut
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import CutName, Durable, HandoffDir, SegmentName
from dlrm_checkpointer.handoff.writer import HandoffWriter
from dlrm_checkpointer.types import CutMeta, CutRows, CutSize, ShardId, ShardRows

SIZE = 120_000
RANKS = 2
WIDTH = 16
SHARD = ShardId(table="items", row_start=0, row_end=70_000, column_start=0, column_end=WIDTH)
TABLE = {"name": "items", "rows": 70_000, "dim": WIDTH, "seed": 7, "scale": 0.25, "columnBlocks": [[0, WIDTH]]}
ROW_BYTES = CutRows(shard=SHARD, count=1, state_values=1).row_bytes


def rows(count: int) -> ShardRows:
    ids = np.arange(count, dtype=np.int64)
    return ShardRows(
        shard=SHARD, row_ids=ids, rows=np.ones((count, WIDTH), np.float32), state=np.ones((count, 1), np.float32)
    )


def size_of(pieces: list[int]) -> CutSize:
    return CutSize(row_bytes=sum(pieces) * ROW_BYTES, pieces=len(pieces))


def meta(step: int) -> CutMeta:
    return CutMeta(step=step, samples=step, world_size=RANKS, attempt=1, model={"tables": [TABLE]})


def chunk(number: int, name: SegmentName) -> ChunkEntry:
    """The entry of an object, as hard to pack as a real one."""
    sha256 = hashlib.sha256(f"{name} {number}".encode()).hexdigest()
    key = f"chunks/{name.step:016d}/00000001/{name.rank:06d}/{number:06d}-{sha256[:16]}.safetensors"
    put = ObjectEntry(key=key, bytes=4_096 + number, sha256=sha256)
    ids = np.array([number, *range(number + 1, number + 39), 60_000 + number])
    return ChunkEntry.of(put, SHARD, ids)


def folder_bytes(folder: Path, *, spare: bool = True) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return sum(path.stat().st_size for path in files if spare or not path.name.startswith("spare-"))


def segment_taken(writer: HandoffWriter, step: int) -> Cut:
    """A rank begins a cut that does not fit, and fills its first segment."""
    cut = writer.reserve(meta(step), None, owned=[SHARD], size=size_of([2_000]))
    assert not cut.is_whole
    while cut.copy(rows(500)):
        pass
    return cut


def note_grown(inbox: Inbox, writer: HandoffWriter, step: int) -> None:
    """A rank's segment becomes durable, in so many objects that the note of them takes space."""
    segment_taken(writer, step).next_segment()
    (name,) = (name for name in inbox.ready() if isinstance(name, SegmentName))
    inbox.write_durable(name, Durable(slices=1, chunks=tuple(chunk(number, name) for number in range(40)), bits=32))


@pytest.mark.parametrize("meanwhile", ["a neighbour takes a segment", "a note grows"])
def test_a_cut_that_fits_when_it_is_reserved_fits_to_its_end(tmp_path: Path, meanwhile: str) -> None:
    mine, other = (HandoffWriter(tmp_path, rank, SIZE, 2) for rank in range(2))
    inbox, pieces = Inbox(tmp_path, range(2)), [140] * 7

    cut = mine.reserve(meta(1), None, owned=[SHARD], size=size_of(pieces))
    if meanwhile == "a note grows":
        note_grown(inbox, other, 1)
    else:
        segment_taken(other, 1)
    copied = [cut.copy(rows(count)) for count in pieces[:4]]
    laid = [cut.lay(CutRows(shard=SHARD, count=count, state_values=1)) for count in pieces[4:]]
    handed = cut.finish()

    assert cut.is_whole
    assert [*copied, *(len(each.row_ids) for each in laid if each)] == pieces
    assert handed is not None
    assert handed.segments == 1
    assert folder_bytes(tmp_path) <= SIZE
    inbox.close()


def test_a_rank_never_takes_more_than_half_its_share_for_a_segment(tmp_path: Path) -> None:
    writer = HandoffWriter(tmp_path, 0, SIZE, RANKS)

    segment_taken(writer, 1)

    assert SIZE // RANKS // 2 * 0.8 < folder_bytes(tmp_path) <= SIZE // RANKS // 2


class Ticks:
    """A clock that goes on by one at each look, from one length of digits to the same: times are in files' bytes."""

    def __init__(self) -> None:
        self.now = 10**12

    def monotonic_ns(self) -> int:
        self.now += 1
        return self.now

    def monotonic(self) -> float:
        return float(self.monotonic_ns())

    time = monotonic


class Folder(RuleBasedStateMachine):
    """Ranks that reserve, copy, hand over, withdraw, die and start again, and a sidecar that frees and notes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, ticks = pytest.MonkeyPatch(), Ticks()
        for module in ("budget", "protocol", "cut"):
            self.patch.setattr(f"dlrm_checkpointer.handoff.{module}.time", ticks)
        self.folder = Path(tempfile.mkdtemp())
        self.inbox = Inbox(self.folder, range(RANKS))
        self.budgets = [Budget(HandoffDir(self.folder), SIZE, RANKS) for _ in range(RANKS)]
        self.cuts: dict[int, Cut] = {}
        self.left: dict[int, list[int]] = {}
        """Rows of the pieces that are not copied yet."""
        self.notes: dict[int, list[ChunkEntry]] = {}
        self.step = 0

    def teardown(self) -> None:
        self.patch.undo()
        self.inbox.close()
        shutil.rmtree(self.folder)

    def idle(self) -> list[int]:
        """Ranks that may reserve a cut."""
        waiting = {name.rank for name in self.inbox.ready()}
        return [rank for rank in range(RANKS) if rank not in {*self.cuts, *waiting}]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), count=st.integers(1, 6), most=st.booleans(), dense=st.sampled_from([0, 500]))
    def reserve(self, data: st.DataObject, count: int, most: bool, dense: int) -> None:
        """Reserve a cut of about all that is free, or of less; some do not fit."""
        rank = data.draw(st.sampled_from(self.idle()))
        leaves = data.draw(st.integers(-20_000, 5_000) if most else st.integers(0, SIZE))
        free = SIZE * 15 // 16 - folder_bytes(self.folder, spare=False) - 1_000 * count - 4 * dense
        pieces = [max(1, (free - leaves) // ROW_BYTES // count)] * count
        self.step += 1
        self.notes.pop(rank, None)
        cut = Cut(self.budgets[rank], CutName(self.step, 1, rank), meta(self.step), [SHARD])
        cut.reserve(size_of(pieces), {"top.weight": np.ones(dense, np.float32)} if dense else None)
        self.cuts[rank], self.left[rank] = cut, pieces

    @precondition(lambda self: self.cuts)
    @rule(data=st.data(), count=st.integers(1, 6))
    def copy(self, data: st.DataObject, count: int) -> None:
        """Copy some pieces; a cut that fitted has space for each of them."""
        rank = data.draw(st.sampled_from(sorted(self.cuts)))
        cut, left = self.cuts[rank], self.left[rank]
        for _ in range(min(count, len(left))):
            copied = cut.copy(rows(left[0]))
            assert copied == left[0] or not cut.is_whole
            left[0] -= copied
            if left[0] and not cut.next_segment():
                return
            if not left[0]:
                left.pop(0)
        handed = None if left else cut.finish()
        if handed is not None:
            assert handed.segments == 1 or not cut.is_whole
            del self.cuts[rank]

    @precondition(lambda self: self.inbox.ready())
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.inbox.ready()))
        if not isinstance(name, SegmentName):
            self.inbox.free(name)
            return
        pieces = len(list(self.inbox.open(name).pieces()))
        known = self.notes.setdefault(name.rank, [])
        known += [chunk(len(known) + number, name) for number in range(pieces)]
        self.inbox.write_durable(name, Durable(slices=name.number + 1, chunks=tuple(known), bits=32))
        self.inbox.free(name)

    @rule(rank=st.integers(0, RANKS - 1), what=st.sampled_from(["withdraws", "dies", "touches", "sweeps"]))
    def disturb(self, rank: int, what: str) -> None:
        """A rank gives its cut up, or is killed and replaced, or touches memory ahead; or the sidecar sweeps."""
        if what == "withdraws" and rank in self.cuts:
            self.cuts.pop(rank).withdraw()
        elif what == "dies":
            self.cuts.pop(rank, None)
            directory = HandoffDir(self.folder)
            self.budgets[rank] = Budget(directory, SIZE, RANKS)
            directory.discard_unfinished(rank)
        elif what == "touches":
            self.budgets[rank].touch(rank)
        else:
            self.inbox.sweep()

    @invariant()
    def it_is_never_above_the_budget(self) -> None:
        assert folder_bytes(self.folder) <= SIZE


TestFolder: Callable[[], None] = pytest.mark.slow(Folder.TestCase)
TestFolder.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
