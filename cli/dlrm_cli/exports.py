"""``dlrmctl snapshots`` for what leaves a job: how snapshots differ, tables for serving, and deltas followed."""

from __future__ import annotations

import enum
import json
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlrm_api.errors import NoInputError, TemporaryError, UsageError, visible
from dlrm_cli.snapshots import CaFile, Credentials, Endpoint, Form, Output, Region, Step, Uri, chosen, store_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlrm_checkpointer import Precision, Snapshot, TableFile, TableMeta
    from dlrm_stores.base import ObjectStore

serving = typer.Typer()

NAME = re.compile(r"(\d+)(?:-(\d+))?")
Which = "step of a snapshot, or STEP-ATTEMPT"


class FileFormat(enum.StrEnum):
    """Kinds of files that tables are exported to."""

    PARQUET = "parquet"
    SAFETENSORS = "safetensors"


class Numbers(enum.StrEnum):
    """Precisions of exported rows."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


@serving.command()
def diff(
    uri: Uri,
    before: Annotated[str, typer.Argument(metavar="A", help=f"The older one: {Which}.")],
    after: Annotated[str, typer.Argument(metavar="B", help=f"The newer one: {Which}.")],
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
    output: Output = Form.TABLE,
) -> None:
    """Say, table by table, how many rows differ between two snapshots and by how much."""
    from dlrm_checkpointer import diff_snapshots

    store = store_of(uri, endpoint, region, ca_file, credentials_dir)
    found = diff_snapshots(_named(store, before), _named(store, after))
    if output is Form.JSON:
        print(json.dumps([asdict(each) for each in found]))
    else:
        from dlrm_cli.views import diff_view, print_view

        print_view(diff_view(found))


@serving.command()
def export(
    uri: Uri,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for one file a table.")],
    format: Annotated[FileFormat, typer.Option(help="Kind of the files.")] = FileFormat.SAFETENSORS,  # noqa: A002
    precision: Annotated[Numbers, typer.Option(help="Precision of rows; int8: codes with scale and low a row.")] = (
        Numbers.FP32
    ),
    step: Step = None,
    table: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this table. May be repeated.")] = None,
    updated_only: Annotated[bool, typer.Option("--updated-only", help="Leave rows out never updated.")] = False,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
) -> None:
    """Write one snapshot's tables for serving: without optimizer state, all rows filled in."""
    from dlrm_checkpointer import Safetensors, TableFormat, Wanted, export_tables

    form: TableFormat = Safetensors()
    if format is FileFormat.PARQUET:
        form = Parquet()
    wanted = Wanted(form=form, precision=precision.value, tables=tuple(table or ()), updated_only=updated_only)
    snapshot, _ = chosen(store_of(uri, endpoint, region, ca_file, credentials_dir), step)
    rows = export_tables(snapshot, to, wanted)
    print(f"step {snapshot.step} is in {to}: {rows:,} rows", file=sys.stderr)


@serving.command()
def follow(
    uri: Annotated[str, typer.Argument(metavar="URI", help="spec.checkpoint.publish.uri of the job.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder of the tables; kept from run to run.")],
    once: Annotated[bool, typer.Option("--once", help="End when the newest delta is applied.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="Time between two looks.")] = 10.0,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
) -> None:
    """Keep tables in a folder at the newest published delta, and say what was applied; a gap starts them anew."""
    from dlrm_checkpointer import Follower

    store = store_of(uri, endpoint, region, ca_file, credentials_dir, may_come=not once)
    follower = Follower(store, to)
    said = ""
    while True:
        try:
            did = [str(each) for each in follower.catch_up()]
        except TemporaryError as error:
            if once:
                raise
            did = [f"waiting: {error}"]
        for line in did:
            if line != said:
                print(visible(line), flush=True)
            said = line
        if once:
            break
        time.sleep(interval)
    if follower.state is None:
        raise NoInputError(f"{uri}: no delta is there")


def _named(store: ObjectStore, name: str) -> Snapshot:
    """A snapshot by its step, or by step and attempt.

    Raises:
        UsageError: it is no such name.
        NoInputError: there is none.
        SnapshotError: it can't be used.
    """
    from dlrm_checkpointer import find_snapshot

    match = NAME.fullmatch(name)
    if not match:
        raise UsageError(f"{name}: is neither STEP nor STEP-ATTEMPT")
    return find_snapshot(store, int(match[1]), int(match[2]) if match[2] else None)


class Parquet:
    """Parquet files: ``row_id`` int64, and the arrays of ``at_precision``, vectors as lists of a fixed size."""

    name = "parquet"
    suffix = ".parquet"

    def check(self, precision: Precision) -> None:
        """Refuse a precision that files of this kind don't know.

        Raises:
            UsageError: Parquet has no such numbers.
        """
        if precision == "bf16":
            raise UsageError("Parquet has no bf16: take --precision fp16, or --format safetensors")

    def open(self, path: Path, table: TableMeta, precision: Precision, *, all_rows: bool) -> TableFile:  # noqa: ARG002
        """A new file; row numbers are always in it, because engines that read it may change the order."""
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
