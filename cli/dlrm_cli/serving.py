"""``dlrmctl snapshots`` for what leaves a job: how snapshots differ, tables for serving, and deltas followed."""

from __future__ import annotations

import enum
import json
import re
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlrm_api.errors import NoInputError, TemporaryError, UsageError, visible
from dlrm_cli.snapshots import CaFile, Credentials, Endpoint, Form, Output, Region, Step, Uri, chosen, store_of

if TYPE_CHECKING:
    from dlrm_checkpointer.reading.restore import Snapshot
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
    from dlrm_checkpointer.reading.diff import diff_snapshots

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
    from dlrm_checkpointer.reading.serving_export import Wanted, export_tables
    from dlrm_checkpointer.reading.table_files import Safetensors, TableFormat

    form: TableFormat = Safetensors()
    if format is FileFormat.PARQUET:
        from dlrm_cli.parquet import Parquet

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
    from dlrm_checkpointer.publishing.follow import Follower

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
    from dlrm_checkpointer.reading.catalog import find_snapshot

    match = NAME.fullmatch(name)
    if not match:
        raise UsageError(f"{name}: is neither STEP nor STEP-ATTEMPT")
    return find_snapshot(store, int(match[1]), int(match[2]) if match[2] else None)
