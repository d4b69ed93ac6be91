"""Hold the tables of a follower in a folder, and write rows to them in place."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from dlrm_api.errors import SnapshotError, TemporaryError, UsageError
from dlrm_api.process import raise_device
from dlrm_checkpointer.codec.digest import block_ranges, block_rows
from dlrm_checkpointer.codec.initializer import initial_rows
from dlrm_checkpointer.read.export import TABLES_FOLDER, little_endian, safetensors_header
from dlrm_checkpointer.types import TableMeta
from dlrm_stores.base import Body
from dlrm_stores.file import make_folder, replace_synced, sync, write_synced

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
IMAGES = "image-"


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
        """Create a table's file with initial values, or one of unique ids without rows."""
        self._before_write()
        path, header = self._path(image, table), _header(table)
        with path.open("xb") as file:
            file.write(header)
            file.flush()
            size = len(header) + 4 * table.capacity * table.dim
            # The file is mapped: without its blocks, a full disk would be a SIGBUS.
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                raise_device(error, path, size)
        with self.table(image, table) as rows:
            for start, end in block_ranges(table) if not table.is_unique else ():
                rows.reset(np.arange(start, end, dtype=np.int64))

    @contextlib.contextmanager
    def table(self, image: str, table: TableMeta) -> Iterator[ImageRows]:
        """Map a table's file, yield what writes rows to it by their numbers, and sync it at the end."""
        path, header = self._path(image, table), _header(table)
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                raise SnapshotError(f"{path}: is no table of {table.rows} rows x {table.dim} columns as the delta says")
        mapped = np.memmap(path, "<f4", "r+", len(header), (table.capacity, table.dim))
        kind = KeyedImageRows if table.is_unique else ImageRows
        rows = kind(table, path, mapped, self._before_write)
        yield rows
        rows.close()

    def _path(self, image: str, table: TableMeta) -> Path:
        if Path(table.name).name != table.name:
            raise SnapshotError(f"table name {table.name!r} cannot be a file name")
        return self._folder / image / TABLES_FOLDER / f"{table.name}.safetensors"


def _header(table: TableMeta) -> bytes:
    return safetensors_header({"weights": (np.dtype(np.float32), (table.capacity, table.dim))})


class ImageRows:
    """Write rows of one table in place, by their numbers."""

    def __init__(
        self, table: TableMeta, path: Path, mapped: NDArray[np.float32], before_write: Callable[[], None]
    ) -> None:
        self._table, self._path, self._mapped, self._before_write = table, path, mapped, before_write

    def write(self, row_ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Write (N, dim) rows. A delta has each once."""
        self._before_write()
        self._mapped[row_ids] = rows

    def reset(self, row_ids: NDArray[np.int64]) -> None:
        """Write the trainer's values before any update."""
        table, size = self._table, block_rows(self._table)
        for start in range(0, len(row_ids), size):
            ids = row_ids[start : start + size]
            initial = initial_rows(table.seed, table.name, ids, range(table.dim), table.scale)
            self.write(ids, table.rounded(initial))

    def close(self) -> None:
        """Sync what was written."""
        assert isinstance(self._mapped, np.memmap)
        self._mapped.flush()


class KeyedImageRows(ImageRows):
    """Write rows of a table of unique ids to places of their own, and an index of these places.

    The index, ``tables/<name>.keys.safetensors``, has ``keys`` (N,) int64, ascending, and ``places`` (N,) int64 in
    ``weights``. It replaces the old one in ``close``, once all rows are written: a delta that was applied in part is
    applied again, from the old index or from the new one. Call ``reset`` before ``write``, which reuses the places.
    Takes up to 33 bytes of memory per row of the table.

    Raises:
        SnapshotError: the index is not one of this table.
    """

    def __init__(
        self, table: TableMeta, path: Path, mapped: NDArray[np.float32], before_write: Callable[[], None]
    ) -> None:
        super().__init__(table, path, mapped, before_write)
        self._index = path.with_suffix(".keys.safetensors")
        self._keys, self._places = self._read()
        self._stay = np.ones(len(self._keys), bool)
        self._new: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        free = np.ones(table.capacity, bool)
        free[self._places] = False
        self._free, self._taken = np.flatnonzero(free), 0

    def write(self, row_ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Write (N, dim) rows by key."""
        at, known = self._find(row_ids)
        added = row_ids[~known]
        places = np.empty(len(row_ids), np.int64)
        places[known], places[~known] = self._places[at[known]], self._take(len(added))
        super().write(places, rows)
        self._new.append((added, places[~known]))

    def reset(self, row_ids: NDArray[np.int64]) -> None:
        """Remove rows."""
        at, known = self._find(row_ids)
        self._stay[at[known]] = False
        self._free = np.concatenate([self._free, self._places[at[known]]])

    def close(self) -> None:
        """Sync the rows, then replace the index."""
        super().close()
        keys = np.concatenate([self._keys[self._stay], *(keys for keys, _ in self._new)])
        places = np.concatenate([self._places[self._stay], *(places for _, places in self._new)])
        order = np.argsort(keys)
        draft = self._index.with_name(f".{self._index.name}")
        self._before_write()
        with draft.open("wb") as file:
            file.write(safetensors_header(dict.fromkeys(("keys", "places"), (keys.dtype, keys.shape))))
            for array in (keys, places):
                file.write(little_endian(array[order]))
            file.flush()
            os.fsync(file.fileno())
        self._before_write()
        replace_synced(draft, self._index)

    def _read(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not self._index.exists():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        try:
            found = load_file(self._index)
            keys, places = found["keys"], found["places"]
        except (SafetensorError, KeyError) as error:
            raise SnapshotError(f"{self._index}: is no index of a table: give a new folder") from error
        if len(places) and not 0 <= places.min() <= places.max() < self._table.capacity:
            raise SnapshotError(f"{self._index}: has places beyond {self._table.capacity} rows: give a new folder")
        return keys, places

    def _find(self, row_ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the positions of keys in the index, and whether they are there."""
        at = np.searchsorted(self._keys, row_ids)
        known = at < len(self._keys)
        known[known] = self._keys[at[known]] == row_ids[known]
        return at, known

    def _take(self, count: int) -> NDArray[np.int64]:
        places = self._free[self._taken : self._taken + count]
        self._taken += count
        if len(places) < count:
            raise SnapshotError(f"table {self._table.name}: the delta has more than {self._table.capacity} rows")
        return places
