"""Keep tables in a folder up to date with published deltas: the reference consumer.

Rows are written in place. ``state.json`` names the applied delta, and the one being applied, which a follower that was
killed applies again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from dlrm_api.errors import NoInputError, SnapshotError, TemporaryError, UsageError
from dlrm_api.process import raise_device
from dlrm_checkpointer.codec.digest import block_ranges, block_rows
from dlrm_checkpointer.codec.initializer import initial_rows
from dlrm_checkpointer.codec.rows import decode_rows
from dlrm_checkpointer.format.chunk import decode_row_numbers
from dlrm_checkpointer.publish.delta import Delta, GoneEntry, Published, delta_key, read_delta, sequences
from dlrm_checkpointer.read.export import TABLES_FOLDER, safetensors_header, written_to
from dlrm_checkpointer.read.fetch import fetch, fetch_rows
from dlrm_checkpointer.types import TableMeta
from dlrm_stores import ObjectStore
from dlrm_stores.base import Body, parallel_map
from dlrm_stores.file import make_folder, replace_synced, sync, write_synced

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
IMAGES = "image-"
WriteRows = Callable[[NDArray[np.int64], NDArray[np.float32]], None]


class Applied(BaseModel):
    """Name a delta by its sequence number and the SHA-256 of its manifest."""

    model_config = ConfigDict(frozen=True)

    sequence: int
    sha256: str


class ImageState(BaseModel):
    """Describe the content of a follower's folder: ``state.json``."""

    model_config = ConfigDict(frozen=True)

    format: Literal["dlrm-image"] = "dlrm-image"
    version: Literal[1] = 1
    image: str
    """Folder with the tables."""
    dense: str
    """File with the dense state, in that folder."""
    step: int
    attempt: int
    applied: Applied
    """The newest delta that was applied completely."""
    applying: Applied | None = None
    """A delta that may be applied in part: the tables are consistent only after it was applied again."""


class Image:
    """Manage tables in a folder, which is created if absent.

    Raises:
        UsageError: the folder holds other files.
    """

    def __init__(self, folder: Path, before_write: Callable[[], None]) -> None:
        self._folder, self._before_write = folder, before_write
        foreign = [path.name for path in folder.glob("*") if not path.name.startswith((IMAGES, STATE_FILE))]
        if foreign or (folder.exists() and not folder.is_dir()):
            raise UsageError(f"{folder}: holds something else: give a new folder")
        make_folder(folder)
        self.state = self._read_state()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder in the block and read its state again; no lock if its file system has none.

        Raises:
            TemporaryError: another follower holds the lock.
        """
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise TemporaryError(
                    f"{self._folder}: another follower is at work in this folder: end one of the two"
                ) from error
            except OSError as error:
                logger.warning("failed to lock folder", extra={"folder": str(self._folder), "error": str(error)})
            self.state = self._read_state()
            yield
        finally:
            os.close(descriptor)

    def _read_state(self) -> ImageState | None:
        """Read the state; None if the folder has no image."""
        path = self._folder / STATE_FILE
        try:
            state = ImageState.model_validate_json(path.read_bytes()) if path.exists() else None
        except ValidationError as error:
            raise UsageError(f"{path}: is no follower's state: give a new folder") from error
        return state if state and (self._folder / state.image).is_dir() else None

    def remove_rest(self) -> None:
        """Remove files of killed followers, and images that were replaced."""
        for path in self._folder.glob(f"{IMAGES}*"):
            if self.state is None or path.name != self.state.image:
                self._before_write()
                shutil.rmtree(path, ignore_errors=True)
        if self.state:
            for path in (self._folder / self.state.image).glob("dense-*"):
                if path.name != self.state.dense:
                    self._before_write()
                    path.unlink()

    def save(self, state: ImageState) -> None:
        """Replace the state file atomically, after syncing the folders that it refers to."""
        self._before_write()
        for folder in (self._folder / state.image / TABLES_FOLDER, self._folder / state.image, self._folder):
            sync(folder)
        draft = self._folder / f"{STATE_FILE}.draft"
        write_synced(draft, state.model_dump_json(indent=2) + "\n")
        self._before_write()
        replace_synced(draft, self._folder / STATE_FILE)
        self.state = state

    def new(self, sequence: int) -> str:
        """Create an empty folder for the tables of a full delta; return its name."""
        self._before_write()
        name = f"{IMAGES}{sequence:016d}-{secrets.token_hex(4)}"
        (self._folder / name / TABLES_FOLDER).mkdir(parents=True)
        return name

    def write_dense(self, image: str, sequence: int, body: Body) -> str:
        """Write the dense state; return the file's name."""
        self._before_write()
        name = f"dense-{sequence:016d}.safetensors"
        with (self._folder / image / name).open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        return name

    def make_table(self, image: str, table: TableMeta) -> None:
        """Create a table's file with initial values."""
        self._before_write()
        path, header = self._path(image, table), _header(table)
        with path.open("xb") as file:
            file.write(header)
            file.flush()
            size = len(header) + 4 * table.rows * table.dim
            # The file is mapped: without its blocks, a full disk would be a SIGBUS.
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise_device(error, path, size)
        with self.table(image, table) as write:
            for start, end in block_ranges(table):
                ids = np.arange(start, end, dtype=np.int64)
                write(ids, initial_values(table, ids))

    @contextlib.contextmanager
    def table(self, image: str, table: TableMeta) -> Iterator[WriteRows]:
        """Map a table's file, yield what writes rows to it by their numbers, and sync it at the end."""
        path, header = self._path(image, table), _header(table)
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                raise SnapshotError(f"{path}: is no table of {table.rows} rows x {table.dim} columns as the delta says")
        mapped = np.memmap(path, "<f4", "r+", len(header), (table.rows, table.dim))

        def write(row_ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
            self._before_write()
            mapped[row_ids] = rows

        yield write
        mapped.flush()

    def _path(self, image: str, table: TableMeta) -> Path:
        if Path(table.name).name != table.name:
            raise SnapshotError(f"table name {table.name!r} cannot be a file name")
        return self._folder / image / TABLES_FOLDER / f"{table.name}.safetensors"


def initial_values(table: TableMeta, row_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return rows before any update, with the trainer's values."""
    return table.rounded(initial_rows(table.seed, table.name, row_ids, range(table.dim), table.scale))


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
    """Rows reset to their initial values."""
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
            with self._image.table(image, table) as write, self._kept(delta):
                for coded in parallel_map(partial(fetch_rows, self._store, table=table), chunks):
                    write(coded.row_ids, table.rounded(decode_rows(coded).rows))
                for entry in tombstones:
                    numbers = self._numbers(entry, table)
                    for start in range(0, len(numbers), block_rows(table)):
                        part = numbers[start : start + block_rows(table)]
                        write(part, initial_values(table, part))
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


def _header(table: TableMeta) -> bytes:
    return safetensors_header({"weights": (np.dtype(np.float32), (table.rows, table.dim))})
