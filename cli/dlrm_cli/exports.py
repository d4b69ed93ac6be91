"""``dlrmctl snapshots diff``, ``export`` and ``follow``: what leaves a job."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dlrm_api.errors import NoInputError, TemporaryError, UsageError, visible
from dlrm_cli.options import Commands, Output, ServiceOptions
from dlrm_cli.snapshots import Step, Uri, chosen_step, open_snapshot_store, select_snapshot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlrm_checkpointer import Precision, Snapshot, TableFile, TableMeta
    from dlrm_stores import ObjectStore

exports = Commands()

NAME = re.compile(r"(\d+)(?:-(\d+))?")
NAME_HELP = "STEP or STEP-ATTEMPT"


@exports.command()
def diff(
    uri: Uri,
    *,
    before: Annotated[str, typer.Argument(metavar="A", help=f"Older snapshot: {NAME_HELP}.")],
    after: Annotated[str, typer.Argument(metavar="B", help=f"Newer snapshot: {NAME_HELP}.")],
    service: ServiceOptions,
    output: Output = "table",
) -> None:
    """Show for each table how many rows differ between two snapshots, and by how much."""
    from dlrm_checkpointer import diff_snapshots

    store = open_snapshot_store(uri, service)
    found = diff_snapshots(_named(store, before), _named(store, after))
    if output == "json":
        print(json.dumps([asdict(each) for each in found]))
    else:
        from dlrm_cli.views import diff_view, print_view

        print_view(diff_view(found))


@exports.command()
def export(
    uri: Uri,
    *,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder, with one file per table.")],
    format: Annotated[  # noqa: A002
        Literal["parquet", "safetensors"], typer.Option(help="File format.")
    ] = "safetensors",
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8"], typer.Option(help="Precision of rows; int8 has scale and low per row.")
    ] = "fp32",
    step: Step = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Export only this table. May be repeated.")
    ] = None,
    updated_only: Annotated[bool, typer.Option("--updated-only", help="Omit rows that were never updated.")] = False,
    service: ServiceOptions,
) -> None:
    """Export one snapshot's tables for serving: all rows, without optimizer state."""
    from dlrm_checkpointer import ExportOptions, Safetensors, TableFormat, export_tables

    form: TableFormat = Parquet() if format == "parquet" else Safetensors()
    wanted = ExportOptions(form=form, precision=precision, tables=tuple(table or ()), updated_only=updated_only)
    snapshot, _ = select_snapshot(open_snapshot_store(uri, service), chosen_step(uri, step))
    rows = export_tables(snapshot, to, wanted)
    print(f"exported step {snapshot.step} to {to}: {rows:,} rows", file=sys.stderr)


@exports.command()
def follow(
    *,
    uri: Annotated[str, typer.Argument(metavar="URI", help="Value of spec.checkpoint.publish.uri.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the tables; reused by later runs.")],
    once: Annotated[bool, typer.Option("--once", help="Exit when the newest delta is applied.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Polling interval in seconds.")] = 10.0,
    service: ServiceOptions,
) -> None:
    """Keep tables in a folder at the newest published delta. After a gap they are downloaded again in full."""
    from dlrm_checkpointer import Follower

    store = open_snapshot_store(uri, service, must_exist=once)
    follower = Follower(store, to)
    shown = ""
    while True:
        try:
            lines = [str(each) for each in follower.catch_up()]
        except TemporaryError as error:
            if once:
                raise
            lines = [f"waiting: {error}"]
        for line in lines:
            if line != shown:
                print(visible(line), flush=True)
            shown = line
        if once:
            break
        time.sleep(interval)
    if follower.state is None:
        raise NoInputError(f"delta not found: {uri}")


def _named(store: ObjectStore, name: str) -> Snapshot:
    """Return a snapshot by its step, or by step and attempt."""
    from dlrm_checkpointer import find_snapshot

    match = NAME.fullmatch(name)
    if not match:
        raise UsageError(f"invalid snapshot name: expected STEP or STEP-ATTEMPT, got {name!r}")
    return find_snapshot(store, int(match[1]), int(match[2]) if match[2] else None)


class Parquet:
    """Write Parquet: ``row_id`` int64 and the arrays of ``at_precision``, vectors as fixed-size lists."""

    name = "parquet"
    suffix = ".parquet"

    def check(self, precision: Precision) -> None:
        """Refuse bf16, which Parquet does not have, with a UsageError."""
        if precision == "bf16":
            raise UsageError(
                "--precision bf16 cannot be combined with --format parquet; use fp16, or --format safetensors"
            )

    def open(self, path: Path, table: TableMeta, precision: Precision, *, all_rows: bool) -> TableFile:  # noqa: ARG002
        """Open a new file. Row numbers are always in it, because engines that read it may change the order."""
        import pyarrow as pa

        vector = {"fp32": pa.float32(), "fp16": pa.float16(), "int8": pa.uint8()}[precision]
        name = "codes" if precision == "int8" else "weights"
        columns = [("row_id", pa.int64()), (name, pa.list_(vector, table.dim))]
        if precision == "int8":
            columns += [("scale", pa.float32()), ("low", pa.float32())]
        return _ParquetFile(path, pa.schema([pa.field(*column, nullable=False) for column in columns]))


class _ParquetFile:
    def __init__(self, path: Path, schema: Any) -> None:
        import pyarrow.parquet as pq

        self._schema, self._writer = schema, pq.ParquetWriter(path, schema)

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        import pyarrow as pa

        columns = {"row_id": row_ids, **arrays}
        found = [_column(columns[field.name], field.type) for field in self._schema]
        self._writer.write_batch(pa.record_batch(found, schema=self._schema), row_group_size=max(1, len(row_ids)))

    def close(self) -> None:
        self._writer.close()


def _column(array: NDArray[Any], kind: Any) -> Any:
    import numpy as np
    import pyarrow as pa

    if array.ndim == 1:
        return pa.array(array, kind)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)
