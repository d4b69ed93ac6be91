"""``dlrmctl snapshots``: list, show, verify, restore and prune what a job has committed."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlrm_api.errors import InvalidSpecError, NoInputError, SnapshotError, TemporaryError, UsageError, first_problem

if TYPE_CHECKING:
    from dlrm_api.progress import SnapshotInfo
    from dlrm_checkpointer import Decision, Listed, Snapshot, Verified
    from dlrm_stores.base import ObjectStore

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
CREDENTIALS = "--credentials-dir to a folder with accessKeyId and secretAccessKey"
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
    """List committed snapshots, oldest first; those that can't be restored from follow on stderr, with the reason."""
    from dlrm_checkpointer import list_snapshots

    listed = list_snapshots(store_of(uri, endpoint, region, ca_file, credentials_dir))
    usable, unusable = _sorted_out(listed)
    if output is Form.JSON:
        print(json.dumps([each.model_dump(by_alias=False) for each in usable]))
    else:
        from dlrm_cli.views import print_view, snapshots_view

        print_view(snapshots_view(usable))
    for each in unusable:
        say_unusable(each)


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
    snapshot, _ = chosen(store_of(uri, endpoint, region, ca_file, credentials_dir), step)
    print(json.dumps(_description(snapshot), indent=2))


@snapshots.command()
def verify(
    uri: Uri,
    step: Step = None,
    each: Annotated[bool, typer.Option("--all", help="Check every snapshot of the listing, oldest first.")] = False,
    endpoint: Endpoint = None,
    region: Region = None,
    ca_file: CaFile = None,
    credentials_dir: Credentials = None,
) -> None:
    """Read every byte of one snapshot and check it; 65 where it, or a newer one that nobody named, is damaged."""
    if each and step is not None:
        raise UsageError("--all and --step: give one of them")
    store = store_of(uri, endpoint, region, ca_file, credentials_dir)
    if each:
        verify_all(store)
    else:
        verify_one(store, step)


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
    from dlrm_checkpointer import restore_to_folder

    snapshot, _ = chosen(store_of(uri, endpoint, region, ca_file, credentials_dir), step)
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
    from dlrm_checkpointer import Retention, Rule, is_claimed, newest_attempt, read_attempts
    from dlrm_cli.documents import seconds

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
    from dlrm_checkpointer import list_snapshots

    return tuple(_sorted_out(list_snapshots(store))[0])


def _sorted_out(listed: Sequence[Listed]) -> tuple[list[SnapshotInfo], list[Listed]]:
    """Snapshots that can be restored from, oldest first; and the others, with their problems, newest first."""
    from pydantic import ValidationError

    usable, unusable = [], [each for each in listed if each.problem]
    for each in listed:
        if not each.problem:
            try:
                usable.append(_info(each))
            except ValidationError as error:  # whoever may write to the store can forge a manifest
                unusable.append(replace(each, problem=first_problem(error)))
    return usable[::-1], sorted(unusable, key=lambda each: (each.step, each.attempt), reverse=True)


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


def chosen(store: ObjectStore, step: int | None) -> tuple[Snapshot, list[Listed]]:
    """The snapshot of a step, or the newest usable one; says on stderr which newer ones were passed over, and why.

    Returns:
        The snapshot, and the newer ones that were passed over.

    Raises:
        NoInputError: there is none; says which steps there are.
        SnapshotError: it can't be used.
    """
    from dlrm_checkpointer import list_snapshots, pick_snapshot

    listed = list_snapshots(store)
    snapshot = pick_snapshot(store, listed, step)
    if step is not None:
        return snapshot, []
    passed_over = [each for each in listed if (each.step, each.attempt) > (snapshot.step, snapshot.attempt)]
    for each in passed_over:
        say_unusable(each)
    return snapshot, passed_over


def say_unusable(listed: Listed) -> None:
    """Say on stderr why a snapshot will not be restored from."""
    from dlrm_cli.views import tell

    tell(f"not usable: step {listed.step}, attempt {listed.attempt}: {listed.problem}")


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
        UsageError: the URI is neither file:/// nor s3://, or the options do not describe an S3 service.
    """
    from dlrm_api.base import read
    from dlrm_api.checkpoint import SCHEMES
    from dlrm_api.objects import SnapshotS3Spec
    from dlrm_stores.base import FieldNames, StoreOptions, open_made_store, open_store

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
    if not uri.startswith(SCHEMES):
        mend = "give that of the store" if "://" in uri or not uri else f"write {Path(uri).absolute().as_uri()}"
        raise UsageError(f"{uri or 'the URI'} is neither file:///folder nor s3://bucket/prefix: {mend}")
    try:
        s3 = read(SnapshotS3Spec, {name: value for name, value in given.items() if value is not None})
        opened = open_store if may_come else open_made_store
        return opened(
            uri, StoreOptions(s3=s3, credentials_dir=credentials_dir, fields=FieldNames(credentials=CREDENTIALS))
        )
    except InvalidSpecError as error:
        words = {"endpoint": "--endpoint: ", "region": "--region: ", "kmsKeyId": "--kms-key-id: "}
        raise UsageError(f"{words.get(error.path, '')}{error.problem}") from error


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


def verify_one(store: ObjectStore, step: int | None) -> None:
    """Check the snapshot of a step, or the newest usable one.

    Raises:
        SnapshotError: it is damaged; or none was named, and a newer one is.
        NoInputError: there is none.
    """
    from dlrm_checkpointer import verify_snapshot

    snapshot, passed_over = chosen(store, step)
    print(_whole(verify_snapshot(snapshot)))
    damaged = [each.step for each in passed_over if each.damaged]
    if damaged:
        raise SnapshotError(
            f"{store.uri}: newer snapshots can't be used ({_steps(damaged)}): a job would go back to step "
            f"{snapshot.step}; to check that one alone, name it with --step"
        )


def verify_all(store: ObjectStore) -> None:
    """Check every snapshot that a listing shows, oldest first, and say on stderr how far it is.

    Snapshots of histories that were given up are named and left out: nothing restores from them. So are those that
    retention removes meanwhile.

    Raises:
        SnapshotError: some are damaged; the words about each are on stderr.
        NoInputError: the store holds no snapshot.
    """
    from dlrm_checkpointer import list_snapshots, pick_snapshot, verify_snapshot

    listed = list_snapshots(store)
    if not listed:
        pick_snapshot(store, listed)  # says that there is none
    for each in listed:
        if each.problem:
            say_unusable(each)
    usable = [each for each in reversed(listed) if not each.problem]
    damaged = [each.step for each in listed if each.damaged]
    for number, each in enumerate(usable, start=1):
        print(f"verifying step {each.step} ({number} of {len(usable)})", file=sys.stderr)
        try:
            print(_whole(verify_snapshot(pick_snapshot(store, listed, each.step, each.attempt))), flush=True)
        except (SnapshotError, NoInputError) as error:
            if _is_gone(store, each):
                print(f"step {each.step} was removed meanwhile", file=sys.stderr)
                continue
            print(f"damaged: step {each.step}, attempt {each.attempt}: {error}", file=sys.stderr)
            damaged.append(each.step)
    if damaged:
        raise SnapshotError(
            f"{store.uri}: {len(damaged)} of {len(usable) + sum(each.damaged for each in listed)} snapshots can't be "
            f"used ({_steps(sorted(damaged))}): bring back what was there, or keep to the others"
        )


def _is_gone(store: ObjectStore, listed: Listed) -> bool:
    """Whether retention removed a snapshot: its manifest goes first."""
    from dlrm_checkpointer import manifest_key

    return store.size(manifest_key(listed.step, listed.attempt)) is None


def _whole(found: Verified) -> str:
    rows = sum(found.rows.values())
    return f"step {found.step} is whole: {found.objects} objects, {found.bytes:,} bytes, {rows:,} rows"


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(str(step) for step in steps)}"
