"""Write a snapshot as plain files, one per table, with initial values for rows never updated."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from dlrm_api.errors import DeviceError, NoPermissionError, SnapshotError, UsageError
from dlrm_api.process import raise_device
from dlrm_checkpointer.codec.digest import state_digest, table_digest
from dlrm_checkpointer.codec.initializer import id_seed
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_checkpointer.format.chunk import FLOAT_VALUES
from dlrm_checkpointer.read.catalog import walk_table
from dlrm_checkpointer.read.restore import Snapshot
from dlrm_checkpointer.types import ShardRows, TableMeta
from dlrm_kernels.hashing import ids_of_keys
from dlrm_stores.file import make_folder, replace_synced, sync_all, write_synced

HEADER_ALIGNMENT = 8
COPIED_BYTES = 16 << 20
DTYPES = {"uint8": "U8", "float16": "F16", "float32": "F32", "int64": "I64", "uint16": "BF16", "uint32": "U32"}
"""safetensors name of each numpy type; uint16 holds bf16."""


class TableFile(Protocol):
    """Write a table's rows in ascending order, those of a unique table in the order of their keys."""

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Append rows: their numbers and the result of ``at_precision``."""

    def close(self) -> None:
        """Finish the file after the last row."""


class TableFormat(Protocol):
    """Define a file format for tables."""

    name: str
    suffix: str

    def check(self, precision: Precision) -> None:
        """Refuse a precision that the format does not support.

        Raises:
            UsageError: names the supported ones.
        """

    def open(self, path: Path, table: TableMeta, precision: Precision, *, all_rows: bool) -> TableFile:
        """Create a file; ``all_rows``: every row of the table will be added."""


class Safetensors:
    """Write safetensors files, with the rows of each array in the order of ``TableFile``.

    ``row_ids`` (N,) int64 holds the row numbers or ids; it is left out if the file has all rows.
    """

    name = "safetensors"
    suffix = ".safetensors"

    def check(self, precision: Precision) -> None:
        """Accept every precision."""

    def open(self, path: Path, table: TableMeta, precision: Precision, *, all_rows: bool) -> TableFile:  # noqa: ARG002
        """Create a file. Unless all rows will be added, ``close`` joins it from one draft file per array."""
        return _WholeTable(path, table.rows) if all_rows else _SomeRows(path)


class _WholeTable:
    """Write blocks in place: the number of rows is known."""

    def __init__(self, path: Path, rows: int) -> None:
        self._path, self._rows, self._done = path, rows, 0
        self._starts: dict[str, int] = {}

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        if not self._starts:
            self._begin(arrays)
        with self._path.open("r+b") as file:
            for name, array in arrays.items():
                row = array.itemsize * int(np.prod(array.shape[1:], dtype=np.int64))
                file.seek(self._starts[name] + self._done * row)
                file.write(little_endian(array))
        self._done += len(row_ids)

    def _begin(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        layout = _layout(arrays, self._rows)
        header = safetensors_header(layout)
        check_free_space(self._path, len(header) + sum(_bytes(each) for each in layout.values()))
        self._path.write_bytes(header)
        end = len(header)
        for name, (dtype, shape) in layout.items():
            self._starts[name], end = end, end + _bytes((dtype, shape))

    def close(self) -> None:
        """Do nothing: every row is in place already."""


class _SomeRows:
    def __init__(self, path: Path) -> None:
        self._path, self._rows = path, 0
        self._arrays: dict[str, NDArray[Any]] = {}
        """Empty arrays with the type and shape of the real ones."""

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        for name, array in {"row_ids": row_ids, **arrays}.items():
            self._arrays.setdefault(name, array[:0])
            with self._draft(name).open("ab") as file:
                file.write(little_endian(array))
        self._rows += len(row_ids)

    def close(self) -> None:
        layout = _layout(self._arrays, self._rows)
        with self._path.open("xb") as file:
            file.write(safetensors_header(layout))
            for name in layout:
                with self._draft(name).open("rb") as draft:
                    shutil.copyfileobj(draft, file, COPIED_BYTES)
                self._draft(name).unlink()

    def _draft(self, name: str) -> Path:
        return self._path.with_name(f".{self._path.name}.{name}")


Layout = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]


def check_free_space(path: Path, size: int) -> None:
    """Refuse to create a file that does not fit its disk: a damaged manifest may claim trillions of rows.

    Raises:
        DeviceError: names the file, its bytes and the free bytes.
    """
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise DeviceError(f"{path}: takes {size} bytes, and {free} are free there: free space, or give another folder")


def _bytes(array: tuple[np.dtype[Any], tuple[int, ...]]) -> int:
    dtype, shape = array
    return dtype.itemsize * math.prod(shape)


def _layout(arrays: Mapping[str, NDArray[Any]], rows: int) -> Layout:
    """Return types and shapes for ``rows`` rows, wide types first so that every array is aligned."""
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    return {name: (arrays[name].dtype, (rows, *arrays[name].shape[1:])) for name in names}


def safetensors_header(arrays: Layout) -> bytes:
    """Return the header of a file that holds these arrays in their order."""
    entries, end = {}, 0
    for name, (dtype, shape) in arrays.items():
        begin, end = end, end + _bytes((dtype, shape))
        entries[name] = {"dtype": DTYPES[dtype.name], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def little_endian(array: NDArray[Any]) -> memoryview:
    """Return an array's bytes, row by row."""
    flat = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1)
    return flat.view(np.uint8).data


META_FILE = "meta.json"
DENSE_FILE = "dense.safetensors"
TABLES_FOLDER = "tables"
NO_FOLDER = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP})
"""Errors of paths that cannot be a folder."""


def restore_to_folder(snapshot: Snapshot, folder: Path) -> str:
    """Write a snapshot's state into an empty or absent folder and return its state digest.

    ``tables/<name>.safetensors`` holds ``weights`` (rows, dim) and ``state`` (rows, state values) float32, for tables
    of unique ids also ``row_ids`` (rows,), which are keys, ``touched`` (rows,), a step, and ``score`` (rows,) if they
    have one, and for tables of several sizes ``utility`` and ``columns`` (rows,); ``dense.safetensors`` the dense
    arrays; ``meta.json``, written last, the cut and the digest. Tables stream through memory in blocks.

    Raises:
        UsageError: the folder is not empty, or cannot be created.
        SnapshotError: an object is missing or corrupt.
        NoPermissionError: the folder cannot be written.
        DeviceError: the disk is full.
    """
    with _new_folder(folder):
        tables = [(table.name, _write_table(snapshot, table, folder / TABLES_FOLDER)) for table in snapshot.meta.tables]
        dense = snapshot.dense()
        write_dense(folder, dense)
        digest = state_digest(tables, dense)
        meta = {"snapshot": snapshot.uri, "stateDigest": digest, **snapshot.meta.to_json()}
        write_last(folder / META_FILE, json.dumps(meta, indent=2, sort_keys=True) + "\n")
    return digest


def write_dense(folder: Path, dense: dict[str, NDArray[Any]]) -> None:
    """Write the dense arrays."""
    # safetensors' save_file creates a file that only this user can read, and raises its own error for a full disk.
    (folder / DENSE_FILE).write_bytes(save(dense))


@contextlib.contextmanager
def written_to(folder: Path) -> Iterator[None]:
    """Translate errors of creating or writing a user's folder into those that say who can act.

    Raises:
        UsageError: the path cannot be a folder.
        NoPermissionError: it cannot be read or written.
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


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Create a folder for tables; refuse one that is not empty. Errors in the block are those of ``written_to``."""
    with written_to(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"{folder}: is not empty: give a new folder")
        make_folder(folder / TABLES_FOLDER)
        yield


def write_last(path: Path, text: str) -> None:
    """Sync all files of the folder, then write the file that marks them as complete, atomically."""
    sync_all(path.parent)
    draft = path.with_name(f".{path.name}")
    write_synced(draft, text)
    replace_synced(draft, path)


def _write_table(snapshot: Snapshot, table: TableMeta, folder: Path) -> str:
    """Write one table block by block and return its digest; the library would need all of it in memory."""
    if Path(table.name).name != table.name:
        raise SnapshotError(f"{snapshot.uri}: invalid table name {table.name!r}")
    path, own, partials = folder / f"{table.name}.safetensors", sum(table.state_columns), []
    file: TableFile = _SomeRows(path) if table.is_unique else _WholeTable(path, table.rows)
    names = (*table.row_values, *(("columns",) if table.sizes else ()))
    for block in walk_table(snapshot, table):
        rows, state = block.fill()
        partials.append(block.digest(rows, state))
        arrays: dict[str, NDArray[Any]] = {"weights": rows, "state": state[:, :own]}
        for number, name in enumerate(names, own):
            arrays[name] = (state if name in FLOAT_VALUES else state.view(np.uint32))[:, number]
        file.add(block.row_ids, arrays)
    file.close()
    return table_digest(partials)


Precision = Literal["fp32", "fp16", "bf16", "int8"]
BF16_DROPPED_BITS = 16
INFINITE_BF16 = 0x7F80


def at_precision(
    table: TableMeta, row_ids: NDArray[np.int64], rows: NDArray[np.float32], precision: Precision
) -> dict[str, NDArray[Any]]:
    """Convert complete rows of a table, (N, dim) finite weights of ascending numbers, to a precision.

    Returns:
        ``weights`` (N, dim): float32, float16, or bf16 as the upper half of a float32's bits in uint16, each rounded
        to the nearest, ties to even. At int8 ``codes`` (N, dim) uint8, ``scale`` and ``low`` (N,) float32: a weight is
        ``float32(code) * scale + low``, both rounded to float32 (``code_rows`` at 8 bits).

    Raises:
        SnapshotError: a weight is too large; names the table and the row.
    """
    if precision == "fp32":
        return {"weights": rows}
    if precision == "int8":
        return _codes(table, row_ids, rows)
    if precision == "fp16":
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        _refuse_large(table, row_ids, np.isinf(halves), precision)
        return {"weights": halves}
    bits = rows.view(np.uint32)
    odd = (bits >> np.uint32(BF16_DROPPED_BITS)) & np.uint32(1)
    words = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(BF16_DROPPED_BITS)).astype(np.uint16)
    _refuse_large(table, row_ids, (words & np.uint16(0x7FFF)) >= INFINITE_BF16, precision)
    return {"weights": words}


def _refuse_large(table: TableMeta, row_ids: NDArray[np.int64], large: NDArray[np.bool_], precision: str) -> None:
    if large.any():
        row = row_ids[int(np.argmax(large.any(axis=1)))]
        raise SnapshotError(f"table {table.name}, row {row}: a weight is too large for {precision}: use fp32")


def _codes(table: TableMeta, row_ids: NDArray[np.int64], rows: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    none = np.empty((len(row_ids), 0), np.float32)
    found: dict[str, NDArray[Any]] = {
        "codes": np.empty(rows.shape, np.uint8),
        "scale": np.empty(len(row_ids), np.float32),
        "low": np.empty(len(row_ids), np.float32),
    }
    if not len(row_ids):
        return found
    for piece in code_rows(ShardRows(shard=table.whole(), row_ids=row_ids, rows=rows, state=none), 8):
        at = np.searchsorted(row_ids, piece.row_ids)
        factor = np.float32(2.0**piece.form.exponent)
        found["codes"][at] = piece.body
        found["scale"][at] = piece.scale.astype(np.float32) * factor
        found["low"][at] = piece.low.astype(np.float32) * factor
    return found


EXPORT_FILE = "export.json"


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Select what of a snapshot is exported."""

    form: TableFormat
    precision: Precision
    tables: tuple[str, ...] = ()
    """Names of tables; empty: all."""
    updated_only: bool = False
    """Leave out rows that were never updated. A table of unique ids has no such rows."""


def export_tables(snapshot: Snapshot, folder: Path, wanted: ExportOptions) -> int:
    """Write tables and the dense state into an empty or absent folder; return the number of rows written.

    ``tables/<name><suffix>`` holds a table, ``dense.safetensors`` the unchanged dense arrays, and ``export.json``,
    written last, lists the files with their SHA-256. Tables stream through memory in blocks.

    Raises:
        UsageError: the folder is not empty or cannot be created, a table does not exist, or the file format does not
            support the precision.
        SnapshotError: an object is missing or corrupt, or a weight is too large for the precision.
        NoPermissionError: the folder cannot be written.
        DeviceError: the disk is full.
    """
    wanted.form.check(wanted.precision)
    tables = select_tables(snapshot, wanted.tables)
    for table in tables:
        if Path(table.name).name != table.name:
            raise UsageError(f"{snapshot.uri}: table name {table.name!r} cannot be a file name")
    with _new_folder(folder):
        entries = [_export_table(snapshot, table, folder, wanted) for table in tables]
        write_dense(folder, snapshot.dense())
        described = {
            "format": "dlrm-export",
            "version": 1,
            "snapshot": snapshot.uri,
            "step": snapshot.step,
            "attempt": snapshot.attempt,
            "precision": wanted.precision,
            "fileFormat": wanted.form.name,
            "updatedOnly": wanted.updated_only,
            "tables": entries,
            "dense": _file_entry(folder, DENSE_FILE),
        }
        write_last(folder / EXPORT_FILE, json.dumps(described, indent=2) + "\n")
    return sum(entry["storedRows"] for entry in entries)


def select_tables(snapshot: Snapshot, names: Sequence[str]) -> list[TableMeta]:
    """Return the tables of these names, or all of them if there are none.

    Raises:
        UsageError: a table does not exist; names those that do.
    """
    there = {table.name: table for table in snapshot.meta.model_tables}
    for name in names:
        if name not in there:
            raise UsageError(f"{snapshot.uri}: there is no table {name} (tables: {', '.join(there)})")
    return [there[name] for name in dict.fromkeys(names)] or list(there.values())


def _export_table(snapshot: Snapshot, table: TableMeta, folder: Path, wanted: ExportOptions) -> dict[str, Any]:
    name = f"{TABLES_FOLDER}/{table.name}{wanted.form.suffix}"
    all_rows = not (wanted.updated_only or table.is_unique)
    file = wanted.form.open(folder / name, table, wanted.precision, all_rows=all_rows)
    count = 0
    for block in walk_table(snapshot, table):
        # The first block creates the file, even if it has no rows.
        if not all_rows and not block.stored and block.start:
            continue
        ids, rows, _ = (block.row_ids, *block.fill()) if all_rows else block.updated()
        file.add(_exported_ids(table, ids), at_precision(table, ids, rows, wanted.precision))
        count += len(ids)
    file.close()
    return {"name": table.name, "rows": table.rows, "dim": table.dim, "storedRows": count, **_file_entry(folder, name)}


def _exported_ids(table: TableMeta, row_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return row numbers, or the ids that keys of a unique table stand for."""
    if not table.is_unique:
        return row_ids
    seed = np.uint64(id_seed(table.seed, table.name))
    return ids_of_keys(row_ids.view(np.uint64), seed).view(np.int64)


def _file_entry(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": name, "bytes": path.stat().st_size, "sha256": sha256}
