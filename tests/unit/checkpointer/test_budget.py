"""Room in the hand-off folder: what a rank has reserved stays its own, whatever others do until it is whole."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dlrm_checkpointer.format.manifest import ChunkEntry, ObjectEntry
from dlrm_checkpointer.handoff.budget import Budget, Rows
from dlrm_checkpointer.handoff.cut import SlicedCut
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.handoff.protocol import SPARE_PREFIX, CutName, Durable, SliceName, discard_unfinished
from dlrm_checkpointer.handoff.writer import CutAbandonedError, HandOffWriter
from dlrm_checkpointer.types import CutMeta, CutSize, ShardId, ShardRows, row_bytes

SIZE = 120_000
RANKS = 2
WIDTH = 16
SHARD = ShardId(table="items", row_start=0, row_end=70_000, column_start=0, column_end=WIDTH)
TABLE = {"name": "items", "rows": 70_000, "dim": WIDTH, "seed": 7, "scale": 0.25, "columnBlocks": [[0, WIDTH]]}


def rows(count: int) -> ShardRows:
    ids = np.arange(count, dtype=np.int64)
    return ShardRows(
        shard=SHARD, row_ids=ids, rows=np.ones((count, WIDTH), np.float32), state=np.ones((count, 1), np.float32)
    )


def size_of(pieces: list[int]) -> CutSize:
    return CutSize(row_bytes=sum(pieces) * row_bytes(rows(1)), pieces=len(pieces))


def meta(step: int) -> CutMeta:
    return CutMeta(step=step, samples=step, world_size=RANKS, attempt=1, model={"tables": [TABLE]})


def chunk(number: int, name: SliceName) -> ChunkEntry:
    """The entry of an object, as hard to pack as a real one."""
    sha256 = hashlib.sha256(f"{name} {number}".encode()).hexdigest()
    key = f"chunks/{name.step:016d}/00000001/{name.rank:06d}/{number:06d}-{sha256[:16]}.safetensors"
    put = ObjectEntry(key=key, bytes=4_096 + number, sha256=sha256)
    ids = np.array([number, *range(number + 1, number + 39), 60_000 + number])
    return ChunkEntry.of(put, SHARD, ids)


def folder_bytes(folder: Path, *, spare: bool = True) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith(".lock"))
    return sum(path.stat().st_size for path in files if spare or not path.name.startswith(SPARE_PREFIX))


def rest_taken(writer: HandOffWriter, step: int) -> None:
    """A rank begins a cut that does not fit, and takes all the room that there is."""
    gradual, count = writer.start_gradual(meta(step), None, owned=[SHARD]), 1
    while count:
        count = gradual.copy(rows(500), 0)


def note_grown(inbox: Inbox, writer: HandOffWriter, step: int) -> None:
    """A rank's slice becomes durable, of so many objects that the note of them takes room."""
    rest_taken(writer, step)
    (name,) = (name for name in inbox.ready() if isinstance(name, SliceName))
    inbox.note_durable(name, Durable(slices=1, chunks=tuple(chunk(number, name) for number in range(40)), bits=32))


@pytest.mark.parametrize("meanwhile", ["a neighbour takes the rest", "a note grows"])
def test_a_cut_that_fits_when_it_is_begun_fits_to_its_end(tmp_path: Path, meanwhile: str):
    mine, other = (HandOffWriter(tmp_path, rank, SIZE, 2) for rank in range(2))
    inbox, pieces = Inbox(tmp_path, range(2)), [180] * 7

    cut = mine.start_if_room(meta(1), None, owned=[SHARD], size=size_of(pieces))
    assert cut is not None
    if meanwhile == "a note grows":
        note_grown(inbox, other, 1)
    else:
        rest_taken(other, 1)
    for count in pieces[:4]:
        cut.copy(rows(count))
    cut.lay([Rows(shard=SHARD, count=count, state_values=1) for count in pieces[4:]])

    assert cut.finish().slices == 1
    assert folder_bytes(tmp_path) <= SIZE
    inbox.close()


@dataclass
class Whole:
    """A cut with room for all of it, of which some pieces are still to come."""

    cut: SlicedCut
    left: list[int] = field(default_factory=list)


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
    """Ranks that reserve, copy, hand over slice by slice, die and start again, and a sidecar that frees and notes."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, ticks = pytest.MonkeyPatch(), Ticks()
        for module in ("draft", "folder", "slices"):
            self.patch.setattr(f"dlrm_checkpointer.handoff.{module}.time", ticks)
        self.folder = Path(tempfile.mkdtemp())
        self.inbox = Inbox(self.folder, range(RANKS))
        self.budgets = [Budget(self.folder, SIZE, RANKS) for _ in range(RANKS)]
        self.whole: dict[int, Whole] = {}
        self.gradual: dict[int, SlicedCut] = {}
        self.notes: dict[int, list[ChunkEntry]] = {}
        self.step = 0

    def teardown(self) -> None:
        self.patch.undo()
        self.inbox.close()
        shutil.rmtree(self.folder)

    def new(self, rank: int) -> SlicedCut:
        self.step += 1
        self.notes.pop(rank, None)
        name = CutName(self.step, 1, rank)
        cut = SlicedCut(self.folder, name, meta(self.step), [SHARD], self.budgets[rank], patience_s=0)
        cut.start()
        return cut

    def idle(self) -> list[int]:
        """Ranks that may begin a cut."""
        waiting = {name.rank for name in self.inbox.ready()}
        return [rank for rank in range(RANKS) if rank not in {*self.whole, *self.gradual, *waiting}]

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), count=st.integers(1, 6), most=st.booleans(), dense=st.sampled_from([0, 500]))
    def reserve(self, data: st.DataObject, count: int, most: bool, dense: int) -> None:
        rank = data.draw(st.sampled_from(self.idle()))
        leaves = data.draw(st.integers(0, 5_000) if most else st.integers(0, SIZE))
        free = SIZE * 15 // 16 - folder_bytes(self.folder, spare=False) - 1_000 * count - 4 * dense
        pieces = [max(1, (free - leaves) // row_bytes(rows(1)) // count)] * count
        cut, arrays = self.new(rank), {"top.weight": np.ones(dense, np.float32)} if dense else None
        if cut.reserve(size_of(pieces), arrays):
            self.whole[rank] = Whole(cut, pieces)
            if arrays:
                cut.add_dense(arrays)
        else:
            cut.leave()

    @precondition(lambda self: self.whole)
    @rule(data=st.data(), count=st.integers(1, 6))
    def copy(self, data: st.DataObject, count: int) -> None:
        rank = data.draw(st.sampled_from(sorted(self.whole)))
        whole = self.whole[rank]
        for size in whole.left[:count]:
            whole.cut.add_rows(rows(size))  # it raises where there is no room
        whole.left = whole.left[count:]
        if not whole.left:
            self.whole.pop(rank)
            assert whole.cut.finish().slices == 1

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), count=st.integers(1, 500))
    def begin_gradual(self, data: st.DataObject, count: int) -> None:
        rank = data.draw(st.sampled_from(self.idle()))
        self.gradual[rank] = self.new(rank)
        while self.gradual[rank].take_gradually(rows(count), 0):
            pass

    @precondition(lambda self: self.gradual)
    @rule(data=st.data(), count=st.integers(1, 500), how=st.sampled_from(["save", "take", "finish"]))
    def go_on(self, data: st.DataObject, count: int, how: str) -> None:
        rank = data.draw(st.sampled_from(sorted(self.gradual)))
        cut = self.gradual[rank]
        try:
            if how == "save":
                cut.save(rows(count))
            while how == "take" and cut.take_gradually(rows(count), 0):
                pass
            if how == "finish" and cut.finish_gradually(None):
                self.gradual.pop(rank)
        except CutAbandonedError:
            cut.withdraw()
            self.gradual.pop(rank)

    @precondition(lambda self: self.inbox.ready())
    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.inbox.ready()))
        if not isinstance(name, SliceName):
            self.inbox.free(name)
            return
        pieces = len(list(self.inbox.open(name).pieces()))
        known = self.notes.setdefault(name.rank, [])
        known += [chunk(len(known) + number, name) for number in range(pieces)]
        self.inbox.note_durable(name, Durable(slices=name.number + 1, chunks=tuple(known), bits=32))
        self.inbox.free(name)

    @rule(rank=st.integers(0, RANKS - 1), what=st.sampled_from(["dies", "touches", "sweeps"]))
    def disturb(self, rank: int, what: str) -> None:
        """A rank is killed and another takes its place, or it touches memory ahead; or the sidecar sweeps."""
        if what == "dies":
            self.whole.pop(rank, None)
            self.gradual.pop(rank, None)
            self.budgets[rank] = Budget(self.folder, SIZE, RANKS)
            discard_unfinished(self.folder, rank)
        elif what == "touches":
            self.budgets[rank].touch(rank)
        else:
            self.inbox.sweep()

    @invariant()
    def it_is_never_above_the_budget(self) -> None:
        assert folder_bytes(self.folder) <= SIZE


TestFolder: Callable[[], None] = pytest.mark.slow(Folder.TestCase)
TestFolder.settings = settings(max_examples=60, stateful_step_count=60)
