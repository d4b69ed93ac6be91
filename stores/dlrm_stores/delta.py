"""Find the files of Delta tables at one version.

The package deltalake reads the table's log. What would make the files give other rows than the table is refused by
name.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_stores.base import PARALLEL_GETS, parallel_map
from dlrm_stores.data_files import DataFile, TableColumns
from dlrm_stores.locations import Places, TableVersion, list_objects, plain_name, table_folder

LOG = "_delta_log"
_COMMIT = re.compile(r"(\d{20})\.json")
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.(?:(?:\d{10}\.(?P<parts>\d{10})|[\w-]+)\.)?(?:parquet|json)")


def find_delta(places: Places, uri: str, version: int | None) -> tuple[TableVersion, list[DataFile]]:
    """List the files of a table at a version, by default at its newest.

    Raises:
        NoInputError: no table is there, the log no longer has the version, or a file is gone.
        NoPermissionError: log or files cannot be read.
        BadDataError: the log is damaged, or the table has a feature that is not supported.
        StoreUnavailableError: the S3 service does not answer.
    """
    name = table_folder(uri)
    store, key = places.store(name)
    names = [item.key.removeprefix(f"{key}/{LOG}/") for item in list_objects(store, f"{key}/{LOG}/")]
    commits = sorted(int(match[1]) for each in names if (match := _COMMIT.fullmatch(each)))
    if not commits:
        raise NoInputError(f"Delta table not found: {uri} has no {LOG}; check data.train.uris and data.eval.uris")
    wanted = commits[-1] if version is None else version
    with tempfile.TemporaryDirectory(prefix="dlrm-delta-") as folder:
        # deltalake knows neither our credentials nor our CA.
        log = Path(folder, LOG)
        (log / "_sidecars").mkdir(parents=True)
        needed = _needed(uri, names, commits, wanted)
        bodies = parallel_map(lambda each: store.get(f"{key}/{LOG}/{each}"), needed, PARALLEL_GETS)
        for each, body in zip(needed, bodies, strict=True):
            (log / each).write_bytes(body)
        try:
            found, columns = _read(uri, name, DeltaTable(folder, version=wanted))
        except DeltaError as error:
            reason = str(error).partition("\n")[0]
            raise BadDataError(f"{uri}: cannot read the table's log at version {wanted}: {reason}") from error
    read = TableVersion(uri=uri, version=wanted, newest=commits[-1])
    return read, places.files(found, uri, columns)


def _needed(uri: str, names: Sequence[str], commits: Sequence[int], wanted: int) -> list[str]:
    """Return the files of the log that make up a version: the newest checkpoint up to it, and the commits since.

    Raises NoInputError if some are gone.
    """
    parts: dict[int, list[re.Match[str]]] = {}
    for match in filter(None, map(_CHECKPOINT.fullmatch, names)):
        parts.setdefault(int(match[1]), []).append(match)
    whole = (at for at, found in parts.items() if len(found) >= int(found[0]["parts"] or 1) and at <= wanted)
    start = max(whole, default=-1)
    since = [commit for commit in commits if start < commit <= wanted]
    if since != list(range(start + 1, wanted + 1)):
        raise NoInputError(
            f"{uri}: the log no longer has version {wanted}, only up to {commits[-1]}; restore the table, or set "
            "another spec.checkpoint.uri to start from step 0 with its newest version"
        )
    kept = [match.string for match in parts.get(start, ())]
    # A commit is read for the time of a checkpoint.
    first = [f"{start:020}.json"] if start in commits else []
    # Only checkpoints refer to these; a stale one costs a request.
    sidecars = [name for name in names if name.startswith("_sidecars/")] if kept else []
    return [*kept, *first, *(f"{commit:020}.json" for commit in since), *sidecars]


def _read(uri: str, name: str, table: DeltaTable) -> tuple[dict[str, int], TableColumns]:
    """Return sizes of a table's files by name, and its columns."""
    metadata, features = table.metadata(), table.protocol().reader_features or ()
    if metadata.configuration.get("delta.columnMapping.mode", "none") != "none":
        raise BadDataError(
            f"{uri}: column mapping is not supported: files hold the columns under other names; write the table's "
            "rows to a table without delta.columnMapping.mode"
        )
    if "deletionVectors" in features and _has_deletion_vectors(table):
        raise BadDataError(
            f"{uri}: deletion vectors are not supported: its files hold rows that were deleted; run REORG TABLE ... "
            "APPLY (PURGE), and set delta.enableDeletionVectors to false"
        )
    actions = table.get_add_actions()
    paths = [unquote(str(path)) for path in actions.column("path").to_pylist()]
    names = [plain_name(path) if ":" in path or path.startswith("/") else f"{name}/{path}" for path in paths]
    found = dict(zip(names, actions.column("size_bytes").to_pylist(), strict=True))
    return found, TableColumns(partitioned_by=frozenset(metadata.partition_columns))


def _has_deletion_vectors(table: DeltaTable) -> bool:
    try:
        return any(batch.num_rows for batch in table.deletion_vectors())
    except DeltaError:
        # They are in files of their own, which the copy of the log lacks.
        return True
