"""``dlrmctl snapshots diff``: how two snapshots differ."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dlrm_api.errors import UsageError
from dlrm_cli.snapshots import CaFile, Credentials, Endpoint, Form, Output, Region, Uri, store_of

if TYPE_CHECKING:
    from dlrm_checkpointer.restore import Snapshot
    from dlrm_checkpointer.store import ObjectStore

serving = typer.Typer()

NAME = re.compile(r"(\d+)(?:-(\d+))?")
Which = "step of a snapshot, or STEP-ATTEMPT"


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
    from dlrm_checkpointer.diff import diff_snapshots

    store = store_of(uri, endpoint, region, ca_file, credentials_dir)
    found = diff_snapshots(_named(store, before), _named(store, after))
    if output is Form.JSON:
        print(json.dumps([asdict(each) for each in found]))
    else:
        from dlrm_cli.views import diff_view, print_view

        print_view(diff_view(found))


def _named(store: ObjectStore, name: str) -> Snapshot:
    """A snapshot by its step, or by step and attempt.

    Raises:
        UsageError: it is no such name.
        NoInputError: there is none.
        SnapshotError: it can't be used.
    """
    from dlrm_checkpointer.catalog import find_snapshot

    match = NAME.fullmatch(name)
    if not match:
        raise UsageError(f"{name}: is neither STEP nor STEP-ATTEMPT")
    return find_snapshot(store, int(match[1]), int(match[2]) if match[2] else None)
