"""A follower's copy of published tables: one file a table with every row, in a folder that survives any kill.

A delta is written over the rows in place; the state file says so before the first of them and after the last. A full
delta makes a folder of its own, which the state file names once it is whole.
"""

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

from dlrm_api.errors import SnapshotError, TemporaryError, UsageError
from dlrm_api.process import raise_device
from dlrm_checkpointer.coding.digest import block_ranges
from dlrm_checkpointer.coding.initializer import initial_rows
from dlrm_checkpointer.reading.table_files import safetensors_header
from dlrm_checkpointer.types import TableMeta
from dlrm_stores.base import Body
from dlrm_stores.synced import make_folder, replace_synced, sync, write_synced

logger = logging.getLogger(__name__)

STATE_FILE = "state.json"
IMAGES = "image-"
TABLES_FOLDER = "tables"


class Applied(BaseModel):
    """A delta by its sequence number and the SHA-256 of its manifest."""

    model_config = ConfigDict(frozen=True)

    sequence: int
    sha256: str


class ImageState(BaseModel):
    """What a follower's folder holds: ``state.json``."""

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
    """The newest delta that is whole."""
    applying: Applied | None = None
    """A delta of which rows may be written already: it must be applied again before the tables are whole."""


class Image:
    """Tables in a folder.

    Args:
        folder: made if absent.
        before_write: called before each write.

    Raises:
        UsageError: the folder holds something else.
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
        """Have the folder for oneself, as it is now; where its file system knows no locks, nobody is kept out.

        Raises:
            TemporaryError: another follower has it.
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
                logger.warning("folder can't be locked", extra={"folder": str(self._folder), "problem": str(error)})
            self.state = self._read_state()
            yield
        finally:
            os.close(descriptor)

    def _read_state(self) -> ImageState | None:
        """None where no image is there."""
        path = self._folder / STATE_FILE
        try:
            state = ImageState.model_validate_json(path.read_bytes()) if path.exists() else None
        except ValidationError as error:
            raise UsageError(f"{path}: is no follower's state: give a new folder") from error
        return state if state and (self._folder / state.image).is_dir() else None

    def remove_rest(self) -> None:
        """Remove what a killed follower left, and images that were replaced."""
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
        """Remember, in one step, what the folder holds, once the names of its files outlive the machine."""
        self._before_write()
        for folder in (self._folder / state.image / TABLES_FOLDER, self._folder / state.image, self._folder):
            sync(folder)
        draft = self._folder / f"{STATE_FILE}.draft"
        write_synced(draft, state.model_dump_json(indent=2) + "\n")
        self._before_write()
        replace_synced(draft, self._folder / STATE_FILE)
        self.state = state

    def new(self, sequence: int) -> str:
        """An empty folder for the tables of a full delta; its name."""
        self._before_write()
        name = f"{IMAGES}{sequence:016d}-{secrets.token_hex(4)}"
        (self._folder / name / TABLES_FOLDER).mkdir(parents=True)
        return name

    def write_dense(self, image: str, sequence: int, body: Body) -> str:
        """Write the dense state; returns the file's name."""
        self._before_write()
        name = f"dense-{sequence:016d}.safetensors"
        with (self._folder / image / name).open("wb") as file:
            file.write(body)
            file.flush()
            os.fsync(file.fileno())
        return name

    def make_table(self, image: str, table: TableMeta) -> None:
        """A table's file, with initial values."""
        self._before_write()
        shape = (table.rows, table.dim)
        path = self._path(image, table)
        header = safetensors_header({"weights": (np.dtype(np.float32), shape)})
        with path.open("xb") as file:
            file.write(header)
            file.flush()
            size = len(header) + 4 * table.rows * table.dim
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # else a full disk is a SIGBUS
            except OSError as error:
                raise_device(error, path, size)
        with self.table(image, table) as rows:
            for start, end in block_ranges(table):
                ids = np.arange(start, end, dtype=np.int64)
                rows.write(ids, initial_values(table, ids))

    @contextlib.contextmanager
    def table(self, image: str, table: TableMeta) -> Iterator[TableRows]:
        """A table's rows, to be written; synced at the end."""
        path = self._path(image, table)
        header = safetensors_header({"weights": (np.dtype(np.float32), (table.rows, table.dim))})
        with path.open("rb") as file:
            if file.read(len(header)) != header:
                raise SnapshotError(f"{path}: is no table of {table.rows} rows x {table.dim} columns as the delta says")
        mapped = np.memmap(path, "<f4", "r+", len(header), (table.rows, table.dim))
        yield TableRows(mapped, self._before_write)
        mapped.flush()

    def _path(self, image: str, table: TableMeta) -> Path:
        if Path(table.name).name != table.name:
            raise SnapshotError(f"{table.name!r} is no name of a file")
        return self._folder / image / TABLES_FOLDER / f"{table.name}.safetensors"


class TableRows:
    """Rows of a table in a mapped file."""

    def __init__(self, rows: NDArray[np.float32], before_write: Callable[[], None]) -> None:
        self._rows, self._before_write = rows, before_write

    def write(self, row_ids: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Write some rows."""
        self._before_write()
        self._rows[row_ids] = rows


def initial_values(table: TableMeta, row_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows as they were before any update, as a trainer has them."""
    return table.rounded(initial_rows(table.seed, table.name, row_ids, range(table.dim), table.scale))
