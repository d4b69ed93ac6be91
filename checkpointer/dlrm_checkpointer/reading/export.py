"""A snapshot as plain safetensors files in a folder, one a table, with rows that were never updated filled in."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from dlrm_api.errors import NoPermissionError, SnapshotError, UsageError
from dlrm_api.process import raise_device
from dlrm_checkpointer.coding.digest import combine, state_digest
from dlrm_checkpointer.reading.restore import Snapshot
from dlrm_checkpointer.reading.table_blocks import walk_table
from dlrm_checkpointer.reading.table_files import check_room, little_endian, safetensors_header
from dlrm_checkpointer.types import TableMeta
from dlrm_stores.synced import make_folder, replace_synced, sync_all, write_synced

META_FILE = "meta.json"
DENSE_FILE = "dense.safetensors"
TABLES_FOLDER = "tables"
NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP})
"""Errors of paths that no folder can have."""


def restore_to_folder(snapshot: Snapshot, folder: Path) -> str:
    """Write a snapshot's state into an empty or absent folder and return its state digest.

    ``tables/<name>.safetensors`` holds ``weights`` (rows, dim) and ``state`` (rows, state values) float32;
    ``dense.safetensors`` the dense arrays; ``meta.json``, written last, the cut and the digest. Tables stream
    through memory in blocks.

    Raises:
        UsageError: the folder holds something, or can't be made.
        SnapshotError: an object is missing or corrupt.
        NoPermissionError: the folder may not be written.
        DeviceError: the disk is full.
    """
    with written_to(folder):
        check_new(folder)
        make_folder(folder / TABLES_FOLDER)
        tables = [(table.name, _write_table(snapshot, table, folder / TABLES_FOLDER)) for table in snapshot.meta.tables]
        dense = snapshot.dense()
        write_dense(folder, dense)
        digest = state_digest(tables, dense)
        meta = {"snapshot": snapshot.uri, "stateDigest": digest, **snapshot.meta.to_json()}
        write_last(folder / META_FILE, json.dumps(meta, indent=2, sort_keys=True) + "\n")
    return digest


def write_dense(folder: Path, dense: dict[str, NDArray[Any]]) -> None:
    """Write the dense arrays as the other files are written.

    safetensors' ``save_file`` gives the user alone the right to read, and tells of a full disk by an error of its own.
    """
    (folder / DENSE_FILE).write_bytes(save(dense))


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Say who can act where a user's folder can't be made or written.

    Raises:
        UsageError: there can be no such folder.
        NoPermissionError: it may not be looked into or written.
        DeviceError: the disk is full, or fails.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise NoPermissionError(
                f"{folder}: cannot be written: {error.strerror}: give this user the right, or another folder"
            ) from error
        if error.errno in NO_FOLDER:
            raise UsageError(f"{folder}: cannot be written: {error.strerror}: give another folder") from error
        raise_device(error, folder, 0)


def check_new(folder: Path) -> None:
    """Refuse a folder that is neither absent nor empty.

    Raises:
        UsageError: it holds something.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder}: is not empty: give a new folder")


def write_last(path: Path, text: str) -> None:
    """Write the file that says that all others are whole, once they outlive the machine: whole or not at all."""
    sync_all(path.parent)
    draft = path.with_name(f".{path.name}")
    write_synced(draft, text)
    replace_synced(draft, path)


def _write_table(snapshot: Snapshot, table: TableMeta, folder: Path) -> str:
    """Write one table block by block and return its digest; the library could write it only from memory."""
    if Path(table.name).name != table.name:
        raise SnapshotError(f"{snapshot.uri}: {table.name!r} is no name of a table")
    state_start, width = 4 * table.rows * table.dim, table.state_width
    floats = np.dtype(np.float32)
    header = safetensors_header({"weights": (floats, (table.rows, table.dim)), "state": (floats, (table.rows, width))})
    partials = []
    path = folder / f"{table.name}.safetensors"
    check_room(path, len(header) + state_start + 4 * table.rows * width)
    with path.open("wb") as file:
        file.write(header)
        file.flush()
        for block in walk_table(snapshot, table):
            rows, state = block.fill()
            partials.append(block.digest(rows, state))
            _write_at(file.fileno(), len(header) + 4 * block.start * table.dim, rows)
            _write_at(file.fileno(), len(header) + state_start + 4 * block.start * width, state)
    return combine(partials)


def _write_at(descriptor: int, offset: int, array: NDArray[np.float32]) -> None:
    rest = little_endian(array)
    while rest:
        done = os.pwrite(descriptor, rest, offset)
        rest, offset = rest[done:], offset + done
