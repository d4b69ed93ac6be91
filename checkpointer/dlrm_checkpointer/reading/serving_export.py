"""A snapshot's tables for who serves the model: one file a table, at a chosen precision, without optimizer state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_api.errors import UsageError
from dlrm_checkpointer.reading.export import DENSE_FILE, TABLES_FOLDER, check_new, write_dense, write_last, written_to
from dlrm_checkpointer.reading.precision import Precision, at_precision
from dlrm_checkpointer.reading.restore import Snapshot
from dlrm_checkpointer.reading.table_blocks import walk_table
from dlrm_checkpointer.reading.table_files import TableFormat
from dlrm_checkpointer.types import TableMeta
from dlrm_stores.synced import make_folder

EXPORT_FILE = "export.json"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What of a snapshot is exported."""

    form: TableFormat
    precision: Precision
    tables: tuple[str, ...] = ()
    """Names; all where empty."""
    updated_only: bool = False
    """Leave rows out that were never updated."""


def export_tables(snapshot: Snapshot, folder: Path, wanted: Wanted) -> int:
    """Write tables and the dense state into an empty or absent folder; returns the rows written.

    ``tables/<name><suffix>`` holds a table, ``dense.safetensors`` the dense arrays as they are, and ``export.json``,
    written last, what is there with the SHA-256 of each file. Tables stream through memory in blocks.

    Raises:
        UsageError: the folder holds something or can't be made, there is no table of a name, or files of this kind
            don't know the precision.
        SnapshotError: an object is missing or corrupt, or a weight is too large for the precision.
        NoPermissionError: the folder may not be written.
        DeviceError: the disk is full.
    """
    wanted.form.check(wanted.precision)
    tables = _tables(snapshot, wanted.tables)
    with written_to(folder):
        check_new(folder)
        make_folder(folder / TABLES_FOLDER)
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


def _tables(snapshot: Snapshot, names: Sequence[str]) -> list[TableMeta]:
    there = {table.name: table for table in snapshot.meta.tables}
    for name in names:
        if name not in there:
            raise UsageError(f"{snapshot.uri}: there is no table {name} (tables: {', '.join(there)})")
    chosen = [there[name] for name in dict.fromkeys(names)] or list(there.values())
    for table in chosen:
        if Path(table.name).name != table.name:
            raise UsageError(f"{snapshot.uri}: {table.name!r} is no name of a file")
    return chosen


def _export_table(snapshot: Snapshot, table: TableMeta, folder: Path, wanted: Wanted) -> dict[str, Any]:
    name = f"{TABLES_FOLDER}/{table.name}{wanted.form.suffix}"
    all_rows = not wanted.updated_only
    file = wanted.form.open(folder / name, table, wanted.precision, all_rows=all_rows)
    count = 0
    for block in walk_table(snapshot, table):
        if not all_rows and not block.stored and block.start:  # the first one begins the file, with or without rows
            continue
        rows, _ = block.fill()
        ids = np.arange(block.start, block.end, dtype=np.int64)
        if not all_rows:
            ids = block.held()
            rows = rows[ids - block.start]
        file.add(ids, at_precision(table, ids, rows, wanted.precision))
        count += len(ids)
    file.close()
    return {"name": table.name, "rows": table.rows, "dim": table.dim, "storedRows": count, **_file_entry(folder, name)}


def _file_entry(folder: Path, name: str) -> dict[str, Any]:
    path = folder / name
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": name, "bytes": path.stat().st_size, "sha256": sha256}
