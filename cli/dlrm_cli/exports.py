"""``dlrmctl snapshots diff``, ``export``, ``follow`` and ``convert``: what leaves a job."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dlrm_api.errors import NoInputError, TemporaryError, UsageError, visible
from dlrm_cli.options import Commands, Output, ServiceOptions
from dlrm_cli.snapshots import Encrypted, KmsKey, Step, Uri, chosen_step, open_snapshot_store, select_snapshot

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlrm_checkpointer import ConvertedTable, Precision, Snapshot, TableFile, TableMeta
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


@exports.command()
def convert(
    uri: Uri,
    *,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="An empty store for the converted snapshot.")],
    table: Annotated[
        list[str], typer.Option(metavar="NAME=unique|fixed", help="What a table becomes. May be repeated.")
    ],
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]N", help="Rows of converted tables (default: as in the snapshot)."),
    ] = None,
    buckets: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]N", help="embedding.buckets of unique tables (default: as in the API)."),
    ] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Leave out rows that do not fit, as an eviction does.")] = False,
    step: Step = None,
    service: ServiceOptions,
    encryption: Encrypted = "none",
    kms_key_id: KmsKey = None,
) -> None:
    """Write one snapshot to another store with tables turned into unique or fixed ones, for restoreFrom."""
    from dlrm_checkpointer import Conversion, convert_snapshot, manifest_key
    from dlrm_cli.views import format_bytes, print_stderr, show_progress

    becomes = dict(map(_conversion, table))
    if len(becomes) < len(table):
        raise UsageError("invalid --table: expected each table once")
    sizes, counts = _by_table("--rows", rows or (), becomes), _by_table("--buckets", buckets or (), becomes)
    wanted = [
        Conversion(table=name, ids=ids, rows=sizes.get(name), buckets=counts.get(name)) for name, ids in becomes.items()
    ]
    snapshot, _ = select_snapshot(open_snapshot_store(uri, service), chosen_step(uri, step))
    store = open_snapshot_store(target, service, encryption, kms_key_id, must_exist=False)
    total, done = sum(entry.bytes for entry in snapshot.objects), 0
    try:
        with show_progress("converting", total) as show:

            def read(size: int) -> None:
                nonlocal done
                done += size
                show(done, f"{format_bytes(done)} of {format_bytes(total)}")

            converted = convert_snapshot(snapshot, store, wanted, drop=drop, on_read=read)
    except KeyboardInterrupt:
        print_stderr(f"interrupted; {store.uri} holds no converted snapshot")
        raise
    for each in converted:
        for line in _converted(each):
            print_stderr(line)
    print_stderr(f"start a job from it with spec.checkpoint.restoreFrom: {store.uri}")
    print(f"{store.uri}/{manifest_key(snapshot.step, snapshot.attempt)}")


def _conversion(text: str) -> tuple[str, Literal["unique", "rows"]]:
    name, _, kind = text.rpartition("=")
    if not name or kind not in ("unique", "fixed"):
        raise UsageError(f"invalid --table: expected NAME=unique or NAME=fixed, got {text!r}")
    return name, "unique" if kind == "unique" else "rows"


def _by_table(option: str, given: Sequence[str], tables: Iterable[str]) -> dict[str, int]:
    """Return numbers that are given for all tables, or for one by its name."""
    found: dict[str, int] = {}
    for text in given:
        name, named, number = text.rpartition("=")
        if not number.isdecimal() or (named and name not in tables):
            raise UsageError(f"invalid {option}: expected N, or NAME=N with a table of --table, got {text!r}")
        found |= dict.fromkeys([name] if named else tables, int(number))
    return found


def _converted(found: ConvertedTable) -> Iterator[str]:
    """Say what became of a table, and what a job must set to continue from it."""
    meta = found.meta
    dropped = f", {found.dropped:,} did not fit" if found.dropped else ""
    dropped += f", {found.dropped_shared:,} shared rows are left out" if found.dropped_shared else ""
    unknown = ""
    if found.shared is None:
        yield f"converted table {meta.name}: {found.rows:,} updated rows{dropped}"
    else:
        yield f"converted table {meta.name}: no rows, and the old ones, halved, as {found.shared.rows:,} shared rows"
        unknown = f", unknown: shared, sharedRows: {found.shared.rows}"
    hashed = f"{{hash: unique, buckets: {meta.buckets}{unknown}}}" if meta.is_unique else "{hash: none}"
    scale = f"{{scale: {meta.scale}}}" if meta.scale else "{kind: zero}"
    yield f"set in the job: {{name: {meta.name}, rows: {meta.rows}, embedding: {hashed}, initializer: {scale}}}"
    if found.roomy_rows:
        yield (
            f"table {meta.name} is nearly full, so the job's first eviction removes rows; to keep all, convert with "
            f"--rows {meta.name}={found.roomy_rows}"
        )


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
