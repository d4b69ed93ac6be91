"""A reference consumer of deltas: applies them in order to an image on disk, and starts anew from a full one at a gap.

It reads the publisher's folder alone and writes nothing to it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.coding.codes import decode_rows
from dlrm_checkpointer.coding.digest import block_rows
from dlrm_checkpointer.format.fetch import fetch, fetch_rows, in_parallel
from dlrm_checkpointer.format.objects import decode_row_numbers
from dlrm_checkpointer.publishing.image import Applied, Image, ImageState, TableRows, initial_values
from dlrm_checkpointer.publishing.publication import Delta, GoneEntry, Published, delta_key, read_delta, sequences
from dlrm_checkpointer.reading.export import written_to
from dlrm_checkpointer.types import TableMeta
from dlrm_stores.base import ObjectStore

MOST_RELOADS = 2
"""Within one round: more would mean that the publisher's folder is broken where the newest full delta is."""


@dataclass(frozen=True, kw_only=True)
class Did:
    """One thing that a follower did."""

    what: Literal["full", "delta", "waiting"]
    sequence: int
    step: int
    rows: int = 0
    """Rows written."""
    gone: int = 0
    """Rows set back to their initial values."""
    why: str = ""
    """Of a full one why the image was made anew; of waiting what is missing."""

    def __str__(self) -> str:
        if self.what == "waiting":
            return f"waiting at delta {self.sequence}, step {self.step}: {self.why}"
        kind = "full delta" if self.what == "full" else "delta"
        why = f" ({self.why})" if self.why else ""
        return f"{kind} {self.sequence} applied: step {self.step}, {self.rows:,} rows, {self.gone:,} gone{why}"


class GapError(SnapshotError):
    """The next delta is not there, or does not follow what was applied.

    ``whole``: the image is whole and its delta in the publisher's history, so only a newer full delta is of use.
    """

    def __init__(self, why: str, *, whole: bool = False) -> None:
        super().__init__(why)
        self.whole = whole


def _nothing() -> None:
    """The default of ``before_write``."""


class Follower:
    """Keeps a folder at the newest delta; may be killed at any point and started again on the same folder.

    Args:
        store: the publisher's folder.
        folder: of the image.
        before_write: called before each write to the folder.

    Raises:
        UsageError: the folder holds something else, or can't be made.
        NoPermissionError: it may not be written.
    """

    def __init__(self, store: ObjectStore, folder: Path, before_write: Callable[[], None] = _nothing) -> None:
        self._store, self._folder = store, folder
        with written_to(folder):
            self._image = Image(folder, before_write)

    @property
    def state(self) -> ImageState | None:
        """What the folder holds."""
        return self._image.state

    def catch_up(self) -> list[Did]:
        """Apply all that is there; returns what was done.

        Raises:
            SnapshotError: an object is corrupt.
            TemporaryError: the store does not answer, or another follower is at work in the folder: call again.
            DeviceError: the disk is full.
        """
        with written_to(self._folder), self._image.held():
            return self._catch_up()

    def _catch_up(self) -> list[Did]:
        self._image.remove_rest()
        did: list[Did] = []
        reloads = 0
        while True:
            try:
                step = self._next()
            except GapError as gap:
                reloads += 1
                step = self._reload(gap, give_up=reloads > MOST_RELOADS)
            if step is not None:
                did.append(step)
            if step is None or step.what == "waiting":
                return did
            self._image.remove_rest()

    def _next(self) -> Did | None:
        """Apply the next delta; None where there is none.

        Raises:
            GapError: it can't be applied to what is here.
        """
        there, state = sequences(self._store), self._image.state
        if state is None:
            if there:
                raise GapError("no image was here")
            return None
        if state.applying:
            return self._apply(self._same(state.applying), state)
        newest = there[-1] if there else 0
        if newest < state.applied.sequence:
            raise GapError(f"the newest delta is {newest}, before {state.applied.sequence}, which was applied")
        if newest == state.applied.sequence:
            self._same(state.applied)
            return None
        published = self._read(state.applied.sequence + 1, whole=True)
        previous = published.delta.previous
        if published.delta.full:
            return self._load(published, "")
        if previous is None or previous.sha256 != state.applied.sha256:
            raise GapError(f"delta {published.delta.sequence} follows another delta than the one applied")
        return self._apply(published, state)

    def _read(self, sequence: int, *, whole: bool = False) -> Published:
        try:
            return read_delta(self._store, sequence)
        except NoInputError as error:
            raise GapError(f"delta {sequence} is missing", whole=whole) from error
        except SnapshotError as error:
            raise GapError(str(error), whole=whole) from error

    def _same(self, wanted: Applied) -> Published:
        """A delta that was looked at before, if it is still the same."""
        published = self._read(wanted.sequence)
        if published.sha256 != wanted.sha256:
            raise GapError(f"delta {wanted.sequence} is another one than it was")
        return published

    def _reload(self, gap: GapError, *, give_up: bool) -> Did:
        """Begin anew from the newest full delta, where that leads on."""
        there, state = sequences(self._store), self._image.state
        sequence, step = (state.applied.sequence, state.step) if state else (0, 0)
        waiting = Did(what="waiting", sequence=sequence, step=step, why=str(gap))
        if give_up or not there:
            return waiting
        try:
            base = self._read(self._read(there[-1]).delta.base)
            return waiting if gap.whole and base.delta.sequence <= sequence else self._load(base, str(gap))
        except GapError:
            return waiting

    def _apply(self, published: Published, state: ImageState) -> Did:
        """Write a delta over the image."""
        delta, mark = published.delta, _applied(published)
        if state.applying is None:
            self._image.save(state.model_copy(update={"applying": mark}))
        rows, gone = self._write(delta, state.image)
        dense = self._write_dense(delta, state.image)
        self._image.save(_state(published, state.image, dense))
        return Did(what="delta", sequence=delta.sequence, step=delta.step, rows=rows, gone=gone)

    def _load(self, published: Published, why: str) -> Did:
        """Make a new image of a full delta."""
        delta = published.delta
        image = self._image.new(delta.sequence)
        for table in delta.table_metas:
            self._image.make_table(image, table)
        rows, _ = self._write(delta, image)
        dense = self._write_dense(delta, image)
        self._image.save(_state(published, image, dense))
        return Did(what="full", sequence=delta.sequence, step=delta.step, rows=rows, why=why)

    def _write(self, delta: Delta, image: str) -> tuple[int, int]:
        """Write a delta's rows, a few objects in memory at a time; how many, and how many are initial again."""
        rows = gone = 0
        for table in delta.table_metas:
            chunks = [chunk for chunk in delta.chunks if chunk.table == table.name]
            tombstones = [entry for entry in delta.tombstones if entry.table == table.name]
            if not chunks and not tombstones:
                continue
            with self._image.table(image, table) as target, self._kept(delta):
                for coded in in_parallel(partial(fetch_rows, self._store, table=table), chunks):
                    target.write(coded.row_ids, table.rounded(decode_rows(coded).rows))
                for entry in tombstones:
                    self._reset(target, table, self._numbers(entry, table))
            rows += sum(chunk.rows for chunk in chunks)
            gone += sum(entry.rows for entry in tombstones)
        return rows, gone

    def _numbers(self, entry: GoneEntry, table: TableMeta) -> NDArray[np.int64]:
        key = f"{self._store.uri}/{entry.key}"
        numbers = decode_row_numbers(fetch(self._store, entry), key, table.name, table.rows)
        if len(numbers) != entry.rows:
            raise SnapshotError(f"{key}: holds {len(numbers)} row numbers, the delta says {entry.rows}")
        return numbers

    def _write_dense(self, delta: Delta, image: str) -> str:
        with self._kept(delta):
            return self._image.write_dense(image, delta.sequence, fetch(self._store, delta.dense))

    @contextlib.contextmanager
    def _kept(self, delta: Delta) -> Iterator[None]:
        """Read objects of a delta; where one is gone because the delta was removed meanwhile, that is a gap."""
        try:
            yield
        except SnapshotError as error:
            if self._store.size(delta_key(delta.sequence)) is None:
                raise GapError(f"delta {delta.sequence} was removed while it was read") from error
            raise

    def _reset(self, target: TableRows, table: TableMeta, numbers: NDArray[np.int64]) -> None:
        size = block_rows(table)
        for start in range(0, len(numbers), size):
            part = numbers[start : start + size]
            target.write(part, initial_values(table, part))


def _applied(published: Published) -> Applied:
    return Applied(sequence=published.delta.sequence, sha256=published.sha256)


def _state(published: Published, image: str, dense: str) -> ImageState:
    delta = published.delta
    return ImageState(image=image, dense=dense, step=delta.step, attempt=delta.attempt, applied=_applied(published))
