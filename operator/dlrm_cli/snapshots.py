"""``dlrmctl snapshots``: list, show, verify and restore what a job has committed."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlrm_api.errors import NoInputError

if TYPE_CHECKING:
    from dlrm_api.progress import SnapshotInfo
    from dlrm_checkpointer.catalog import Listed
    from dlrm_checkpointer.restore import Snapshot
    from dlrm_checkpointer.store import ObjectStore

snapshots = typer.Typer(name="snapshots", help="Look after committed snapshots.", no_args_is_help=True)


class Form(enum.StrEnum):
    """Forms of an answer."""

    TABLE = "table"
    JSON = "json"


Uri = Annotated[str, typer.Argument(metavar="URI", help="spec.checkpoint.uri of the job: file:///... or s3://...")]
Endpoint = Annotated[str | None, typer.Option(metavar="URL", help="URL of the S3 service; AWS by default.")]
Region = Annotated[str | None, typer.Option(help="S3 region.")]
CaFile = Annotated[Path | None, typer.Option(metavar="FILE", help="PEM file of the service's authority.")]
Credentials = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", envvar="DLRM_CREDENTIALS_DIR", help="Folder with accessKeyId and secretAccessKey."),
]
Step = Annotated[int | None, typer.Option(min=0, help="Step of the snapshot; the newest by default.")]
Output = Annotated[Form, typer.Option("--output", "-o", help="Form of the answer.")]


@snapshots.command("list")
def list_(
    uri: Uri,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
    output: Output = Form.TABLE,
) -> None:
    """List the snapshots that can be restored from, oldest first; the others follow on stderr with the reason."""
    from dlrm_checkpointer.catalog import list_snapshots

    listed = list_snapshots(_store(uri, endpoint, region, ca_file, credentials_dir))
    usable = [_info(each) for each in reversed(listed) if not each.problem]
    if output is Form.JSON:
        print(json.dumps([each.model_dump(by_alias=False) for each in usable]))
    else:
        from dlrm_cli.views import print_view, snapshots_view

        print_view(snapshots_view(usable))
    for each in listed:
        if each.problem:
            print(f"not usable: step {each.step}, attempt {each.attempt}: {each.problem}", file=sys.stderr)


@snapshots.command()
def show(
    uri: Uri,
    step: Step = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
) -> None:
    """Print what one snapshot holds, as JSON."""
    snapshot = _snapshot(_store(uri, endpoint, region, ca_file, credentials_dir), step)
    print(json.dumps(_description(snapshot), indent=2))


@snapshots.command()
def verify(
    uri: Uri,
    step: Step = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
) -> None:
    """Read every byte of one snapshot and check it."""
    from dlrm_checkpointer.catalog import verify_snapshot

    found = verify_snapshot(_snapshot(_store(uri, endpoint, region, ca_file, credentials_dir), step))
    rows = sum(found.rows.values())
    print(f"step {found.step} is whole: {found.objects} objects, {found.bytes:,} bytes, {rows:,} rows")


@snapshots.command()
def restore(
    uri: Uri,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder for one safetensors file a table.")],
    step: Step = None,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
) -> None:
    """Write one snapshot's tables and dense state into a folder, and print the state digest."""
    from dlrm_checkpointer.export import restore_to_folder

    snapshot = _snapshot(_store(uri, endpoint, region, ca_file, credentials_dir), step)
    digest = restore_to_folder(snapshot, to)
    print(f"step {snapshot.step} is in {to}", file=sys.stderr)
    print(digest)


def committed(store: ObjectStore) -> tuple[SnapshotInfo, ...]:
    """Snapshots that can be restored from, oldest first."""
    from dlrm_checkpointer.catalog import list_snapshots

    return tuple(_info(each) for each in reversed(list_snapshots(store)) if not each.problem)


def _info(listed: Listed) -> SnapshotInfo:
    from dlrm_api.progress import SnapshotInfo

    assert listed.manifest is not None, "a manifest that can't be read has a problem"
    return SnapshotInfo(
        step=listed.step,
        kind=listed.manifest.kind,
        bits=listed.manifest.bits,
        bytes=listed.bytes,
        uri=listed.uri,
        time=listed.time,
    )


def _snapshot(store: ObjectStore, step: int | None) -> Snapshot:
    from dlrm_checkpointer.catalog import find_snapshot

    return find_snapshot(store, step)


def _store(
    uri: str, endpoint: str | None, region: str | None, ca_file: Path | None, credentials_dir: Path | None
) -> ObjectStore:
    """Open the store.

    Raises:
        NoInputError: a file or folder that the options name is not there.
        InvalidSpecError: the URI is neither file:/// nor s3://.
    """
    from dlrm_api.objects import S3Spec
    from dlrm_checkpointer.store import StoreOptions, open_store

    for option, path in (("--ca-file", ca_file), ("--credentials-dir", credentials_dir)):
        if path is not None and not path.exists():
            raise NoInputError(f"{option}: {path}: no such file or folder: mend the path")
    s3 = S3Spec(endpoint=endpoint, region=region, ca_file=None if ca_file is None else str(ca_file))
    return open_store(uri, StoreOptions(s3=s3, credentials_dir=credentials_dir))


def _description(snapshot: Snapshot) -> dict[str, Any]:
    """What a snapshot holds: its cut, and for each table the rows that are stored."""
    meta, manifest = snapshot.meta.to_json(), snapshot.manifest
    stored: dict[str, int] = {}
    for chunk in manifest.chunks:
        stored[chunk.table] = stored.get(chunk.table, 0) + chunk.rows
    return {
        "uri": snapshot.uri,
        "step": snapshot.step,
        "attempt": snapshot.attempt,
        "kind": manifest.kind,
        "bits": manifest.bits,
        "bytes": manifest.total_bytes,
        "objects": len(manifest.objects),
        "storedRows": stored,
        "cut": meta,
    }
