"""Keep tables in a folder up to date with published deltas: the reference consumer.

Rows are written in place. ``state.json`` names the applied delta, and the one being applied, which a follower that was
killed applies again.
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
from dlrm_checkpointer.codec.rows import decode_rows
from dlrm_checkpointer.format.chunk import decode_row_numbers
from dlrm_checkpointer.format.chunk import decode_rows as decode_keys
from dlrm_checkpointer.publish.delta import Delta, Published, TombstoneEntry, delta_key, read_delta, sequences
from dlrm_checkpointer.publish.image import Applied, Image, ImageState
from dlrm_checkpointer.read.export import written_to
from dlrm_checkpointer.read.fetch import fetch, fetch_rows
from dlrm_checkpointer.types import TableMeta
from dlrm_stores import ObjectStore
from dlrm_stores.base import parallel_map

MAX_RELOADS = 2
"""Largest number of reloads per round; more would mean that the publisher's newest full delta is broken."""


@dataclass(frozen=True, kw_only=True)
class Did:
    """Describe one action of a follower."""

    what: Literal["full", "delta", "waiting"]
    sequence: int
    step: int
    rows: int = 0
    """Rows written."""
    gone: int = 0
    """Rows reset to their initial values, or removed."""
    why: str = ""
    """Why a full delta replaced the image, or what a waiting follower lacks."""

    def __str__(self) -> str:
        if self.what == "waiting":
            return f"waiting at delta {self.sequence}, step {self.step}: {self.why}"
        kind = "full delta" if self.what == "full" else "delta"
        why = f" ({self.why})" if self.why else ""
        return f"{kind} {self.sequence} applied: step {self.step}, {self.rows:,} rows, {self.gone:,} gone{why}"


class GapError(SnapshotError):
    """Report that the next delta is missing, or does not follow the applied one.

    ``whole``: the image is consistent and its delta is in the publisher's history, so only a newer full delta helps.
    """

    def __init__(self, why: str, *, whole: bool = False) -> None:
        super().__init__(why)
        self.whole = whole


class Follower:
    """Keep a folder at the newest delta; it may be killed at any point and restarted on the same folder.

    ``before_write`` is called before each write to the folder.

    Raises:
        UsageError: the folder holds other files, or cannot be created.
        NoPermissionError: it cannot be written.
    """

    def __init__(self, store: ObjectStore, folder: Path, before_write: Callable[[], None] = lambda: None) -> None:
        self._store, self._folder = store, folder
        with written_to(folder):
            self._image = Image(folder, before_write)

    @property
    def state(self) -> ImageState | None:
        """Return the state of the folder."""
        return self._image.state

    def catch_up(self) -> list[Did]:
        """Apply all published deltas; return what was done.

        Raises:
            SnapshotError: an object is corrupt.
            TemporaryError: the store does not answer, or another follower holds the folder: call again.
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
                step = self._reload(gap, give_up=reloads > MAX_RELOADS)
            if step is not None:
                did.append(step)
            if step is None or step.what == "waiting":
                return did
            self._image.remove_rest()

    def _next(self) -> Did | None:
        """Apply the next delta, if any.

        Raises:
            GapError: it cannot be applied to the image.
        """
        there, state = sequences(self._store), self._image.state
        if state is None:
            if there:
                raise GapError("the folder had no image")
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
        """Read a delta that was read before; it must not have changed."""
        published = self._read(wanted.sequence)
        if published.sha256 != wanted.sha256:
            raise GapError(f"delta {wanted.sequence} was replaced")
        return published

    def _reload(self, gap: GapError, *, give_up: bool) -> Did:
        """Start over from the newest full delta, if it is newer."""
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
        """Apply a delta to the image."""
        delta = published.delta
        if state.applying is None:
            self._image.save(state.model_copy(update={"applying": _applied(published)}))
        rows, gone = self._write(delta, state.image)
        dense = self._write_dense(delta, state.image)
        self._image.save(_state(published, state.image, dense))
        return Did(what="delta", sequence=delta.sequence, step=delta.step, rows=rows, gone=gone)

    def _load(self, published: Published, why: str) -> Did:
        """Create a new image from a full delta."""
        delta = published.delta
        image = self._image.new(delta.sequence)
        for table in delta.table_metas:
            self._image.make_table(image, table)
        rows, _ = self._write(delta, image)
        dense = self._write_dense(delta, image)
        self._image.save(_state(published, image, dense))
        return Did(what="full", sequence=delta.sequence, step=delta.step, rows=rows, why=why)

    def _write(self, delta: Delta, image: str) -> tuple[int, int]:
        """Write a delta's rows, with a few objects in memory; return the numbers of written and reset rows."""
        rows = gone = 0
        for table in delta.table_metas:
            chunks = [chunk for chunk in delta.chunks if chunk.table == table.name]
            tombstones = [entry for entry in delta.tombstones if entry.table == table.name]
            if not chunks and not tombstones:
                continue
            with self._image.table(image, table) as image_rows, self._kept(delta):
                for entry in tombstones:
                    image_rows.reset(self._numbers(entry, table))
                for coded in parallel_map(partial(fetch_rows, self._store, table=table), chunks):
                    image_rows.write(coded.row_ids, table.rounded(decode_rows(coded).rows))
            rows += sum(chunk.rows for chunk in chunks)
            gone += sum(entry.rows for entry in tombstones)
        return rows, gone

    def _numbers(self, entry: TombstoneEntry, table: TableMeta) -> NDArray[np.int64]:
        key, body = f"{self._store.uri}/{entry.key}", fetch(self._store, entry)
        if table.is_unique:
            piece = decode_keys(body, key)
            if not piece.is_gone or piece.shard.table != table.name:
                raise SnapshotError(f"{key}: does not hold keys that are gone from table {table.name}")
            numbers = piece.row_ids
        else:
            numbers = decode_row_numbers(body, key, table.name, table.rows)
        if len(numbers) != entry.rows:
            raise SnapshotError(f"{key}: holds {len(numbers)} row numbers, the delta says {entry.rows}")
        return numbers

    def _write_dense(self, delta: Delta, image: str) -> str:
        with self._kept(delta):
            return self._image.write_dense(image, delta.sequence, fetch(self._store, delta.dense))

    @contextlib.contextmanager
    def _kept(self, delta: Delta) -> Iterator[None]:
        """Read objects of a delta in the block; report a gap if the delta was removed meanwhile."""
        try:
            yield
        except SnapshotError as error:
            if self._store.size(delta_key(delta.sequence)) is None:
                raise GapError(f"delta {delta.sequence} was removed while it was read") from error
            raise


def _applied(published: Published) -> Applied:
    return Applied(sequence=published.delta.sequence, sha256=published.sha256)


def _state(published: Published, image: str, dense: str) -> ImageState:
    delta = published.delta
    return ImageState(image=image, dense=dense, step=delta.step, attempt=delta.attempt, applied=_applied(published))
