"""``dlrmctl snapshots``: list, show, verify, restore, prune and rank the committed snapshots of a store."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dlrm_api.errors import (
    BadDataError,
    InvalidSpecError,
    NoInputError,
    SnapshotError,
    TemporaryError,
    UsageError,
    first_problem,
)
from dlrm_cli.options import Commands, Output, ServiceOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from dlrm_api.progress import SnapshotInfo
    from dlrm_api.trace import TableTrace
    from dlrm_checkpointer import ListedSnapshot, RetentionPlan, Snapshot, TableMeta, VerifiedSnapshot
    from dlrm_cli.spectrum import TableRank
    from dlrm_cli.views import ByColumns
    from dlrm_stores import ObjectStore

snapshots = Commands(name="snapshots", help="Manage committed snapshots.", no_args_is_help=True)

Encryption = Literal["none", "AES256", "aws:kms"]
Uri = Annotated[
    str, typer.Argument(metavar="STORE", help="A store or a manifest in it: file:///..., s3://bucket/prefix or a path.")
]
Step = Annotated[int | None, typer.Option(min=0, help="Step of the snapshot (default: the newest).")]
KeepLast = Annotated[
    int, typer.Option(min=1, max=1_000, help="Newest snapshots to keep, as spec.checkpoint.retention.keepLast.")
]
KeepEvery = Annotated[
    str | None,
    typer.Option(metavar="DURATION", help="Also keep one per period, as spec.checkpoint.retention.keepEvery."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")]
Encrypted = Annotated[
    Encryption, typer.Option("--encryption", help="Server-side encryption, as spec.checkpoint.s3.encryption.")
]
KmsKey = Annotated[str | None, typer.Option("--kms-key-id", metavar="KEY", help="Key of encryption aws:kms.")]
MANIFEST = re.compile(r"(.+)/manifests/([0-9]{16})-[0-9]{8}\.json")
CAPITAL = re.compile(r"(?<=[a-z0-9])[A-Z]")
"""Begins a further word of a camelCase key; the format has such keys, results have not."""
CREDENTIALS = "--credentials-dir to a folder with accessKeyId and secretAccessKey"


@snapshots.command("list")
def list_(uri: Uri, *, service: ServiceOptions, output: Output = "table") -> None:
    """List committed snapshots, oldest first. Unusable ones are listed on stderr, with the reason."""
    from dlrm_checkpointer import list_snapshots

    listed = list_snapshots(open_snapshot_store(uri, service))
    usable, unusable = split_usable(listed)
    by_columns = {each.uri: _by_columns(each) for each in listed}
    if output == "json":
        print(json.dumps([each.model_dump(by_alias=False) | {"by_columns": by_columns[each.uri]} for each in usable]))
    else:
        from dlrm_cli.views import print_view, snapshots_view

        print_view(snapshots_view(usable, by_columns))
    for each in unusable:
        warn_unusable(each)


@snapshots.command()
def show(uri: Uri, *, step: Step = None, service: ServiceOptions) -> None:
    """Print the contents of one snapshot as JSON."""
    snapshot, _ = select_snapshot(open_snapshot_store(uri, service), chosen_step(uri, step))
    print(json.dumps(_description(snapshot), indent=2))


@snapshots.command()
def verify(
    uri: Uri,
    *,
    step: Step = None,
    each: Annotated[bool, typer.Option("--all", help="Verify every snapshot, oldest first.")] = False,
    service: ServiceOptions,
) -> None:
    """Read and verify every byte of one snapshot. Exits with 65 if it, or a newer one without --step, is damaged."""
    if each and step is not None:
        raise UsageError("--all cannot be combined with --step")
    store = open_snapshot_store(uri, service)
    if each:
        verify_all(store)
    else:
        verify_one(store, chosen_step(uri, step))


@snapshots.command()
def restore(
    uri: Uri,
    *,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="New folder, with one safetensors file per table.")],
    step: Step = None,
    service: ServiceOptions,
) -> None:
    """Write one snapshot's tables and dense state to a folder and print the state digest."""
    from dlrm_checkpointer import restore_to_folder

    snapshot, _ = select_snapshot(open_snapshot_store(uri, service), chosen_step(uri, step))
    digest = restore_to_folder(snapshot, to)
    print(f"restored step {snapshot.step} to {to}", file=sys.stderr)
    print(digest)


@snapshots.command()
def prune(
    uri: Uri,
    *,
    keep_last: KeepLast = 3,
    keep_every: KeepEvery = None,
    dry_run: DryRun = False,
    service: ServiceOptions,
    encryption: Encrypted = "none",
    kms_key_id: KmsKey = None,
    output: Output = "table",
) -> None:
    """Delete snapshots that retention does not keep, and orphaned objects. The job may be running."""
    from dlrm_checkpointer import Retention, RetentionPolicy, is_claimed, newest_attempt, read_attempts
    from dlrm_cli.documents import parse_duration

    period_s = None if keep_every is None else parse_duration("--keep-every", keep_every)
    store = open_snapshot_store(uri, service, encryption, kms_key_id)
    attempt = newest_attempt(store)
    if not dry_run and not is_claimed(attempt, read_attempts(store, attempt - 1)):
        raise TemporaryError(
            f"attempt {attempt} is selecting its snapshot in {store.uri}; retry in a moment. If the attempt died, wait "
            f"for the next one or delete attempts/{attempt:08d}.json"
        )
    retention = Retention(store, RetentionPolicy(keep_last=keep_last, keep_every_s=period_s), present=True)
    decision = retention.decide()
    if not decision.keep:
        raise NoInputError(
            f"snapshot not found: {store.uri} has none that attempt {attempt} could resume from; nothing is deleted"
        )
    if not dry_run:
        retention.apply(attempt)
        if newest_attempt(store) != attempt:
            raise TemporaryError(f"a new attempt started in {store.uri}; run the command again")
    _print_decision(decision, "would delete" if dry_run else "deleted", output)


def _print_decision(decision: RetentionPlan, retired: str, output: Output) -> None:
    dependencies = sorted(decision.needed, reverse=True)
    verdicts = {"kept": decision.keep, "kept as dependency": dependencies, retired: decision.retire}
    if output == "json":
        print(json.dumps({word: [asdict(name) for name in names] for word, names in verdicts.items()}))
        return
    for word, names in verdicts.items():
        for name in names:
            print(f"{word}: step {name.step}, attempt {name.attempt}")


@snapshots.command()
def rank(
    uri: Uri,
    *,
    step: Step = None,
    table: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Rank only this table. May be repeated.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Weight rows by their lookups in this trace, from dlrmctl trace."),
    ] = None,
    service: ServiceOptions,
    output: Output = "table",
) -> None:
    """Show how many columns keep 90, 99 and 99.9 % of the energy of each table's updated rows, and advise dim."""
    from dlrm_checkpointer import select_tables

    snapshot, _ = select_snapshot(open_snapshot_store(uri, service), chosen_step(uri, step))
    tables = select_tables(snapshot, table or ())
    traces = {} if trace is None else _read_traces(trace, tables)
    found = _rank_tables(snapshot, tables, traces)
    weighted_by = "rows" if trace is None else "lookups"
    if output == "json":
        ranked = {"tables": [asdict(each) for each in found]}
        print(json.dumps({**_identity(snapshot), "weighted_by": weighted_by, **ranked}))
    else:
        from dlrm_cli.views import print_view, rank_view

        print_view(rank_view(found, f"step {snapshot.step:,}: columns by energy kept, weighted by {weighted_by}"))


def _read_traces(path: Path, tables: Sequence[TableMeta]) -> dict[str, TableTrace]:
    """Read the traces of some tables from the file of ``--trace``.

    Raises:
        NoInputError: the file cannot be read.
        BadDataError: it is not a trace.
        UsageError: the trace lacks a table or is of another one, or nothing tells which rows were looked up most.
    """
    from dlrm_api.trace import parse_trace

    try:
        found = {each.table: each for each in parse_trace(path.read_bytes()).tables}
    except OSError as error:
        raise NoInputError(
            f"invalid --trace: cannot read {path}: {error.strerror}; measure a trace with dlrmctl trace"
        ) from error
    except InvalidSpecError as error:
        raise BadDataError(
            f"invalid --trace: {path} is not a trace: {error}; measure a trace with dlrmctl trace"
        ) from error
    for table in tables:
        if table.name not in found:
            raise UsageError(
                f"invalid --trace: table {table.name} is not in {path}; measure it again with dlrmctl trace, or "
                "select other tables with --table"
            )
        if (rows := found[table.name].rows) != table.rows:
            raise UsageError(
                f"invalid --trace: {path} is of a table {table.name} with {rows:,} rows, the snapshot's has "
                f"{table.rows:,}; measure it again with dlrmctl trace"
            )
        if not _score_columns(table):
            raise UsageError(
                f"--trace needs row optimizer state, which tells hot rows from cold: table {table.name} has none; "
                "leave --trace out"
            )
    return found


def _score_columns(table: TableMeta) -> list[int]:
    """Return the state values that grow with a row's updates: Adagrad's sum, or Adam's number of updates.

    Of each column block's values it is the last.
    """
    ends = accumulate(table.state_columns)
    return [end - 1 for end, values in zip(ends, table.state_columns, strict=True) if values]


def _rank_tables(snapshot: Snapshot, tables: Sequence[TableMeta], traces: Mapping[str, TableTrace]) -> list[TableRank]:
    """Rank tables one after the other, and show progress on stderr by the bytes that are read."""
    from dlrm_cli.spectrum import passes, rank_table
    from dlrm_cli.views import show_progress

    sizes = Counter[str]()
    for manifest in snapshot.chain.manifests:
        for entry in manifest.row_objects:
            sizes[entry.table] += entry.bytes
    total = sum(sizes[table.name] * passes(table.dim, weighted=bool(traces)) for table in tables)
    done, found = 0.0, []
    with show_progress("ranking", total) as show:

        def advance(table: TableMeta, share: float) -> None:
            nonlocal done
            done += share * sizes[table.name]
            show(done, f"{done / max(1, total):.0%}, table {table.name}")

        for table in tables:
            rows = _ScoredRows(snapshot, table, partial(advance, table))
            histogram = traces[table.name].histogram if traces else None
            found.append(rank_table(table.name, table.dim, rows, histogram))
    return found


@dataclass(frozen=True)
class _ScoredRows:
    """Stream the updated rows of a table with their scores; each iteration reads and checks them again."""

    snapshot: Snapshot
    table: TableMeta
    advance: Callable[[float], None]
    """Called with the share of a pass that was read since the last call."""

    def __iter__(self) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        from dlrm_checkpointer import walk_table

        columns, end = _score_columns(self.table), 0
        for block in walk_table(self.snapshot, self.table):
            if block.stored:
                block.check()
                _, rows, state = block.updated()
                yield rows, state[:, columns].sum(axis=1)
            self.advance((block.end - end) / self.table.end)
            end = block.end


def list_usable(store: ObjectStore) -> tuple[SnapshotInfo, ...]:
    """Return usable snapshots, oldest first."""
    from dlrm_checkpointer import list_snapshots

    return tuple(split_usable(list_snapshots(store))[0])


def stored_virtual_shards(store: ObjectStore) -> int | None:
    """Return the number of virtual shards of the newest usable snapshot; None without one."""
    from dlrm_checkpointer import list_snapshots

    manifests = (each.manifest for each in list_snapshots(store) if not each.problem)
    newest = next(manifests, None)
    return newest.cut.virtual_shards if newest else None


def split_usable(listed: Sequence[ListedSnapshot]) -> tuple[list[SnapshotInfo], list[ListedSnapshot]]:
    """Return usable snapshots, oldest first; and the others with their problems, newest first."""
    from pydantic import ValidationError

    from dlrm_api.progress import SnapshotInfo

    usable, unusable = [], [each for each in listed if each.problem]
    for each in listed:
        if not each.problem:
            assert each.manifest is not None, "an unreadable manifest has a problem"
            kind, bits = each.manifest.kind, each.manifest.bits
            try:
                usable.append(
                    SnapshotInfo(step=each.step, kind=kind, bits=bits, bytes=each.bytes, uri=each.uri, time=each.time)
                )
            except ValidationError as error:
                unusable.append(replace(each, problem=first_problem(error)))
    return usable[::-1], sorted(unusable, key=lambda each: (each.step, each.attempt), reverse=True)


def select_snapshot(store: ObjectStore, step: int | None) -> tuple[Snapshot, list[ListedSnapshot]]:
    """Return the snapshot of a step, or the newest usable one, and the newer ones that were skipped.

    Raises:
        NoInputError: no such snapshot; names the existing steps.
        SnapshotError: it is unusable.
    """
    from dlrm_checkpointer import list_snapshots, pick_snapshot

    listed = list_snapshots(store)
    snapshot = pick_snapshot(store, listed, step)
    if step is not None:
        return snapshot, []
    skipped = [each for each in listed if (each.step, each.attempt) > (snapshot.step, snapshot.attempt)]
    for each in skipped:
        warn_unusable(each)
    return snapshot, skipped


def warn_unusable(listed: ListedSnapshot) -> None:
    """Print on stderr why a snapshot is skipped."""
    from dlrm_cli.views import print_stderr

    print_stderr(f"skipping unusable snapshot at step {listed.step}, attempt {listed.attempt}: {listed.problem}")


def split_target(target: str) -> tuple[str, int | None]:
    """Return the URI of the store that a URI or path names, and the step if it names a manifest."""
    uri = target if "://" in target or not target else Path(target).expanduser().absolute().as_uri()
    match = MANIFEST.fullmatch(uri)
    return (match[1], int(match[2])) if match else (uri, None)


def chosen_step(target: str, step: int | None) -> int | None:
    """Return the step of ``--step``, or else that of a manifest's URI.

    Raises:
        UsageError: both are given and differ.
    """
    named = split_target(target)[1]
    if step is not None and named not in (None, step):
        raise UsageError(f"--step {step} cannot be combined with the manifest of step {named}")
    return named if step is None else step


def open_snapshot_store(
    target: str,
    service: ServiceOptions,
    encryption: Encryption = "none",
    kms_key_id: str | None = None,
    *,
    must_exist: bool = True,
) -> ObjectStore:
    """Open the store of a URI or path and options; unless ``must_exist``, its folder may be made later.

    Raises:
        NoInputError: a file or folder that the URI or the options name does not exist.
        UsageError: an invalid URI, or options that do not describe an S3 service.
    """
    from dlrm_api.base import read
    from dlrm_api.checkpoint import SCHEMES
    from dlrm_api.fields import SnapshotS3Spec
    from dlrm_stores import StoreOptions, open_existing_store, open_store
    from dlrm_stores.base import FieldNames

    for option, path in (("--ca-file", service.ca_file), ("--credentials-dir", service.credentials_dir)):
        if path is not None and not path.exists():
            raise NoInputError(f"invalid {option}: file or folder not found: {path}")
    given = {
        "endpoint": service.endpoint,
        "region": service.region,
        "caFile": service.ca_file,
        "encryption": encryption,
        "kmsKeyId": kms_key_id,
    }
    uri, _ = split_target(target)
    if not uri.startswith(SCHEMES):
        raise UsageError(f"invalid store: expected file:///folder, s3://bucket/prefix or a path, got {target!r}")
    try:
        s3 = read(SnapshotS3Spec, {name: value for name, value in given.items() if value is not None})
        options = StoreOptions(
            s3=s3, credentials_dir=service.credentials_dir, fields=FieldNames(credentials=CREDENTIALS)
        )
        return open_existing_store(uri, options) if must_exist else open_store(uri, options)
    except InvalidSpecError as error:
        named = {"endpoint": "--endpoint", "region": "--region", "kmsKeyId": "--kms-key-id"}
        option = named.get(error.path, "")
        raise UsageError(f"invalid {option}: {error.problem}" if option else error.problem) from error


def _description(snapshot: Snapshot) -> dict[str, Any]:
    manifest, stored, gone = snapshot.manifest, Counter[str](), Counter[str]()
    shown = {table.name for table in snapshot.meta.model_tables}
    for chunk in manifest.chunks:
        if chunk.table in shown:
            stored[chunk.table] += chunk.rows
    for entry in manifest.gone:
        gone[entry.table] += entry.rows
    return {
        **_identity(snapshot),
        "kind": manifest.kind,
        "bytes": manifest.total_bytes,
        "objects": len(manifest.objects),
        "stored_rows": stored,
        "capacity": {table.name: table.rows for table in snapshot.meta.tables if table.is_unique},
        "gone_keys": gone,
        "by_columns": _by_columns(snapshot),
        "cut": _with_snake_case_keys(asdict(snapshot.meta)),
    }


def _by_columns(snapshot: Snapshot | ListedSnapshot) -> ByColumns:
    found: dict[str, dict[int, Counter[str]]] = {}
    for chunk in snapshot.manifest.chunks if snapshot.manifest is not None else ():
        if chunk.columns is not None:
            sizes = found.setdefault(chunk.table, {})
            sizes.setdefault(chunk.columns, Counter()).update(rows=chunk.rows, bytes=chunk.bytes)
    return {table: dict(sorted(sizes.items())) for table, sizes in found.items()}


def _identity(snapshot: Snapshot) -> dict[str, Any]:
    return {"uri": snapshot.uri, "step": snapshot.step, "attempt": snapshot.attempt, "bits": snapshot.manifest.bits}


def _with_snake_case_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            CAPITAL.sub(lambda found: f"_{found[0].lower()}", key): _with_snake_case_keys(each)
            for key, each in value.items()
        }
    return [_with_snake_case_keys(each) for each in value] if isinstance(value, list) else value


def verify_one(store: ObjectStore, step: int | None) -> None:
    """Verify the snapshot of a step, or the newest usable one.

    Raises:
        SnapshotError: it is damaged; or none was named, and a newer one is.
        NoInputError: no such snapshot.
    """
    from dlrm_checkpointer import verify_snapshot

    snapshot, skipped = select_snapshot(store, step)
    print(_verified(verify_snapshot(snapshot)))
    damaged = [each.step for each in skipped if each.damaged]
    if damaged:
        raise SnapshotError(
            f"newer snapshots in {store.uri} are unusable ({_steps(damaged)}): a job would resume from step "
            f"{snapshot.step}; to verify only that one, use --step"
        )


def verify_all(store: ObjectStore) -> None:
    """Verify every snapshot of a store, oldest first, and print progress on stderr.

    Snapshots of abandoned histories, and those that retention deletes meanwhile, are named and skipped.

    Raises:
        SnapshotError: some are damaged; stderr has the problem of each.
        NoInputError: the store has no snapshot.
    """
    from dlrm_checkpointer import list_snapshots, manifest_key, pick_snapshot, verify_snapshot

    listed = list_snapshots(store)
    if not listed:
        # Raises the error for an empty store.
        pick_snapshot(store, listed)
    for each in listed:
        if each.problem:
            warn_unusable(each)
    usable = [each for each in reversed(listed) if not each.problem]
    damaged = [each.step for each in listed if each.damaged]
    for number, each in enumerate(usable, start=1):
        print(f"verifying step {each.step} ({number} of {len(usable)})", file=sys.stderr)
        try:
            print(_verified(verify_snapshot(pick_snapshot(store, listed, each.step, each.attempt))), flush=True)
        except (SnapshotError, NoInputError) as error:
            # Retention deletes a snapshot's manifest first.
            if store.size(manifest_key(each.step, each.attempt)) is None:
                print(f"skipping step {each.step}: retention deleted it meanwhile", file=sys.stderr)
                continue
            print(f"damaged: step {each.step}, attempt {each.attempt}: {error}", file=sys.stderr)
            damaged.append(each.step)
    if damaged:
        raise SnapshotError(
            f"{len(damaged)} of {len(usable) + sum(each.damaged for each in listed)} snapshots in {store.uri} are "
            f"damaged ({_steps(sorted(damaged))}); recover their objects, or use the others"
        )


def _verified(found: VerifiedSnapshot) -> str:
    rows = sum(found.rows.values())
    gone = f", {found.gone:,} keys gone" if found.gone else ""
    return f"verified step {found.step}: {found.objects} objects, {found.bytes:,} bytes, {rows:,} rows{gone}"


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(str(step) for step in steps)}"
