"""``dlrmctl snapshots``: list, show, verify, restore and prune what a job has committed."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlrm_api.errors import NoInputError, TemporaryError, first_problem

if TYPE_CHECKING:
    from dlrm_api.progress import SnapshotInfo
    from dlrm_checkpointer.catalog import Listed
    from dlrm_checkpointer.restore import Snapshot
    from dlrm_checkpointer.retention import Decision
    from dlrm_checkpointer.store import ObjectStore

snapshots = typer.Typer(name="snapshots", help="Look after committed snapshots.", no_args_is_help=True)


class Encryption(enum.StrEnum):
    """Encryption that writes ask of an S3 service, as ``spec.checkpoint.s3.encryption`` says it."""

    NONE = "none"
    AES256 = "AES256"
    KMS = "aws:kms"


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
KeepLast = Annotated[
    int, typer.Option(min=1, max=1_000, help="Newest snapshots that stay, as spec.checkpoint.retention.keepLast.")
]
KeepEvery = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Beside them one of each such period, as retention.keepEvery."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")]
Encrypted = Annotated[Encryption, typer.Option("--encryption", help="As spec.checkpoint.s3.encryption.")]
KmsKey = Annotated[str | None, typer.Option("--kms-key-id", metavar="KEY", help="Key for encryption aws:kms.")]
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
    from dlrm_cli.terminal import tell

    listed = list_snapshots(store_of(uri, endpoint, region, ca_file, credentials_dir))
    usable, problems = _sorted_out(listed)
    if output is Form.JSON:
        print(json.dumps([each.model_dump(by_alias=False) for each in usable]))
    else:
        from dlrm_cli.views import print_view, snapshots_view

        print_view(snapshots_view(usable))
    for problem in problems:
        tell(f"not usable: {problem}")


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
    snapshot = _snapshot(store_of(uri, endpoint, region, ca_file, credentials_dir), step)
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

    found = verify_snapshot(_snapshot(store_of(uri, endpoint, region, ca_file, credentials_dir), step))
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

    snapshot = _snapshot(store_of(uri, endpoint, region, ca_file, credentials_dir), step)
    digest = restore_to_folder(snapshot, to)
    print(f"step {snapshot.step} is in {to}", file=sys.stderr)
    print(digest)


@snapshots.command()
def prune(
    uri: Uri,
    keep_last: KeepLast = 3,
    keep_every: KeepEvery = None,
    dry_run: DryRun = False,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
    encryption: Encrypted = Encryption.NONE,
    kms_key_id: KmsKey = None,
    output: Output = Form.TABLE,
) -> None:
    """Remove what retention does not keep, now, also while the job runs; and objects that no snapshot needs."""
    from dlrm_checkpointer.attempts import is_claimed, newest_attempt, read_attempts
    from dlrm_checkpointer.retention import Retention, Rule
    from dlrm_cli.durations import seconds

    period_s = None if keep_every is None else seconds("--keep-every", keep_every)
    store = store_of(uri, endpoint, region, ca_file, credentials_dir, encryption, kms_key_id)
    attempt = newest_attempt(store)
    if not dry_run and not is_claimed(attempt, read_attempts(store, attempt - 1)):
        raise TemporaryError(
            f"{store.uri}: attempt {attempt} is choosing its snapshot: run the command again in a moment; if the "
            f"attempt died in it, once there is another one, or without attempts/{attempt:08d}.json"
        )
    retention = Retention(store, Rule(keep_last=keep_last, keep_every_s=period_s), present=True)
    decision = retention.decide()
    if not decision.keep:
        raise NoInputError(
            f"{store.uri}: no snapshot is there that attempt {attempt} could go on from: nothing is removed"
        )
    if not dry_run:
        retention.apply(attempt)
        if newest_attempt(store) != attempt:
            raise TemporaryError(f"{store.uri}: a new attempt started meanwhile: run the command again")
    _print_decision(decision, "would go" if dry_run else "removed", output)


def _print_decision(decision: Decision, gone: str, output: Form) -> None:
    words = {"kept": decision.keep, "needed": sorted(decision.needed, reverse=True), gone: decision.retire}
    if output is Form.JSON:
        print(json.dumps({word: [asdict(name) for name in names] for word, names in words.items()}))
        return
    for word, names in words.items():
        for name in names:
            print(f"{word}: step {name.step}, attempt {name.attempt}")


def committed(store: ObjectStore) -> tuple[SnapshotInfo, ...]:
    """Snapshots that can be restored from, oldest first."""
    from dlrm_checkpointer.catalog import list_snapshots

    return tuple(_sorted_out(list_snapshots(store))[0])


def _sorted_out(listed: Sequence[Listed]) -> tuple[list[SnapshotInfo], list[str]]:
    """Snapshots that can be restored from, oldest first; and why each other one can't be, newest first."""
    from pydantic import ValidationError

    usable, problems = [], []
    for each in listed:
        problem = each.problem
        if not problem:
            try:
                usable.append(_info(each))
            except ValidationError as error:  # whoever may write to the store can forge a manifest
                problem = first_problem(error)
        if problem:
            problems.append(f"step {each.step}, attempt {each.attempt}: {problem}")
    return usable[::-1], problems


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


def store_of(
    uri: str,
    endpoint: str | None,
    region: str | None,
    ca_file: Path | None,
    credentials_dir: Path | None,
    encryption: Encryption = Encryption.NONE,
    kms_key_id: str | None = None,
    *,
    may_come: bool = False,
) -> ObjectStore:
    """Open the store; ``may_come``: its folder may be made later.

    Raises:
        NoInputError: a file or folder that the URI or the options name is not there.
        InvalidSpecError: the URI is neither file:/// nor s3://, or the options do not describe an S3 service.
    """
    from dlrm_api.base import read
    from dlrm_api.objects import SnapshotS3Spec
    from dlrm_checkpointer.store import StoreOptions, open_made_store, open_store

    for option, path in (("--ca-file", ca_file), ("--credentials-dir", credentials_dir)):
        if path is not None and not path.exists():
            raise NoInputError(f"{option}: {path}: no such file or folder: mend the path")
    given = {
        "endpoint": endpoint,
        "region": region,
        "caFile": ca_file,
        "encryption": encryption.value,
        "kmsKeyId": kms_key_id,
    }
    s3 = read(SnapshotS3Spec, {name: value for name, value in given.items() if value is not None})
    opened = open_store if may_come else open_made_store
    return opened(uri, StoreOptions(s3=s3, credentials_dir=credentials_dir))


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
