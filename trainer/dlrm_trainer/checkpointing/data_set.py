"""Decide which files are a job's data set: those of the snapshot it continues from, whatever was added since.

Files are told apart by content. A rank reads a share of those whose content is not known yet.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from dlrm_api.errors import SnapshotError, TemporaryError
from dlrm_api.job import DLRMJobSpec
from dlrm_checkpointer import CutMeta, get_document, put_document
from dlrm_stores import ObjectStore
from dlrm_stores.data_files import DataFile, LocalFile, files_named
from dlrm_stores.locations import LeftOut, Listing, TableVersion
from dlrm_trainer.checkpointing.compat import first_change
from dlrm_trainer.data import Reader, Split, list_data, open_reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import CollectiveKeepalive
from dlrm_trainer.metrics.progress import ProgressBoard

logger = logging.getLogger(__name__)

NAMED = 5
"""Files that a note names."""
FILE_LIST = "fileList"
"""Key of a fingerprint that refers to a document instead of listing files."""
FINGERPRINT = TypeAdapter(dict[str, Any])
CHANGE = TypeAdapter[str | None](str | None)
TEXT = TypeAdapter(str)
DIGESTS = TypeAdapter(dict[int, str])
VERSIONS = TypeAdapter(dict[str, int])


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """Hold what the job's store knows of the data."""

    store: ObjectStore
    fingerprint: Mapping[str, Any] | None
    """Of the snapshot that training continues from; None without one."""
    where: str
    """The snapshot, for messages."""
    versions: Mapping[str, int] = field(default_factory=dict)
    """Of the tables that the snapshot's run read, by URI."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Hold the readers of a job's data."""

    train: Reader
    evaluation: Reader
    fingerprint: dict[str, Any]
    """Of the training data, as snapshots hold it."""
    described: dict[str, Any]
    """The same with all that is known of each file, for comparisons."""
    eval_note: str | None
    """What makes an evaluation say less than it seems to."""


def open_data_set(
    stack: ExitStack,
    spec: DLRMJobSpec,
    listings: Mapping[Split, Listing],
    collectives: Collectives,
    board: ProgressBoard,
    stored: StoredData | None,
) -> DataSet:
    """Open the training files of the snapshot, or all that were listed, and the evaluation files.

    The store keeps the list of files; ``stored`` is None for a job without snapshots. ``stack`` closes the readers.

    Raises:
        SnapshotError: ``data.newFiles`` is ``refuse``, and there are new files.
        TemporaryError: ranks found different data.
    """
    rank, world_size = collectives.rank, collectives.world_size
    listings = _at_versions(spec, listings, collectives, stored)
    newer = [
        f"{table.uri} is read at version {table.version}, its newest is {table.newest}"
        for table in _tables(listings).values()
        if table.version != table.newest
    ]
    if newer and stored and spec.data.new_files == "refuse":
        raise SnapshotError(
            f"{stored.where}: new versions since the snapshot: {'; '.join(newer)}; set data.newFiles: ignore, or "
            "set another spec.checkpoint.uri to start from step 0 with them"
        )
    known = list(stored.fingerprint.get("files", ())) if stored and stored.fingerprint else []
    files, added = choose_files(listings["train"].files, known)
    if added and stored and spec.data.new_files == "refuse":
        names = _some([file.name for file in added])
        raise SnapshotError(
            f"{stored.where}: new data files since the snapshot: {names}; remove them, set data.newFiles: ignore, or "
            "set another spec.checkpoint.uri to start from step 0 with them"
        )
    chosen: dict[Split, Sequence[DataFile]] = {"train": files, "eval": listings["eval"].files}
    train, evaluation = (
        stack.enter_context(closing(open_reader(spec, split, rank, world_size, files=some)))
        for split, some in chosen.items()
    )
    identify(train.files, known, collectives)
    identify(evaluation.files, (), collectives)
    agree_on_data(collectives, {"train": train.fingerprint, "eval": evaluation.fingerprint})
    eval_note = _eval_note(train, evaluation)
    if rank == 0:
        for split, some in chosen.items():
            if note := _left_out_note(split, some, listings[split].left_out):
                board.note(note)
        if added:
            names = _some([file.name for file in added])
            board.note(f"data.train: {len(added)} new files since the snapshot are ignored: {names}")
        for each in newer:
            board.note(f"data: {each}; the snapshot's version remains the data set")
        if eval_note:
            board.note(eval_note)
    left_out = [*listings["train"].left_out, *(LeftOut(name=file.name, reason="newer than the data") for file in added)]
    described = describe(train)
    versions = {uri: table.version for uri, table in _tables(listings).items()}
    fingerprint = _with_file_list(described, left_out, versions, collectives, stored) if stored else described
    return DataSet(
        train=train, evaluation=evaluation, fingerprint=fingerprint, described=described, eval_note=eval_note
    )


def list_data_set(spec: DLRMJobSpec, versions: Mapping[str, int] | None = None) -> dict[Split, Listing]:
    """List the files of both splits. Raises as ``list_data`` does."""
    return {"train": list_data(spec, "train", versions), "eval": list_data(spec, "eval", versions)}


def _tables(listings: Mapping[Split, Listing]) -> dict[str, TableVersion]:
    """Return the tables of both splits by URI."""
    return {table.uri: table for listing in listings.values() for table in listing.tables}


def _at_versions(
    spec: DLRMJobSpec, listings: Mapping[Split, Listing], collectives: Collectives, stored: StoredData | None
) -> Mapping[Split, Listing]:
    """List tables at the versions that the snapshot names, else at those that rank 0 found."""
    found = {uri: table.version for uri, table in _tables(listings).items()}
    if not found:
        return listings
    kept = stored.versions if stored else {}
    chosen = {uri: kept.get(uri, version) for uri, version in found.items()}
    wanted = collectives.broadcast(chosen if collectives.rank == 0 else None, VERSIONS)
    if collectives.rank == 0:
        logger.info("tables are read at versions", extra={"versions": wanted})
    return listings if wanted == found else list_data_set(spec, wanted)


def read_stored(store: ObjectStore, meta: CutMeta, where: str) -> StoredData:
    """Return what a snapshot's run knew of its data. Raises SnapshotError if the list of files is gone."""
    found = dict(meta.reader.get("fingerprint", {}))
    digest = found.pop(FILE_LIST, None)
    if digest is None:
        return StoredData(store=store, fingerprint=found, where=where)
    listed = get_document(store, digest)
    fingerprint = found | {"files": listed["files"]}
    return StoredData(store=store, fingerprint=fingerprint, where=where, versions=listed.get("versions", {}))


def describe(reader: Reader) -> dict[str, Any]:
    """Return a reader's fingerprint with all that is known of each file: ``digest``, ``etag``, ``modified``."""
    found = dict(reader.fingerprint)
    if "files" not in found:
        return found
    known = ({"digest": each.digest, "etag": each.etag, "modified": each.modified_ns} for each in reader.files)
    shown = ({key: value for key, value in each.items() if value} for each in known)
    return found | {"files": [entry | more for entry, more in zip(found["files"], shown, strict=True)]}


def _with_file_list(
    described: Mapping[str, Any],
    left_out: Sequence[LeftOut],
    versions: Mapping[str, int],
    collectives: Collectives,
    stored: StoredData,
) -> dict[str, Any]:
    """Put the list of files, which grows with the data and not with the model, into a document of its own."""
    rest = dict(described)
    if "files" not in rest:
        return rest
    names = [{"name": each.name, "reason": each.reason} for each in left_out]
    document = {"files": rest.pop("files"), "leftOut": names} | ({"versions": dict(versions)} if versions else {})
    digest = put_document(stored.store, document) if collectives.rank == 0 else None
    return rest | {FILE_LIST: collectives.broadcast(digest, TEXT)}


def choose_files(
    listed: Sequence[DataFile], known: Sequence[Mapping[str, Any]]
) -> tuple[Sequence[DataFile], list[DataFile]]:
    """Return the listed files that a snapshot knows, in its order, and the others; all if one that it knows is gone."""
    if not listed or not known:
        return listed, []
    chosen = files_named(listed, [entry["name"] for entry in known], [entry["bytes"] for entry in known])
    if chosen is None:
        return listed, []
    mine = {file.name for file in chosen}
    return chosen, [file for file in listed if file.name not in mine]


def identify(files: Sequence[DataFile], known: Sequence[Mapping[str, Any]], collectives: Collectives) -> None:
    """Set the digest of each local file, the same on all ranks. Every rank must call this.

    A file that was not written since ``known`` was recorded is not read.
    """
    if not any(isinstance(file, LocalFile) for file in files):
        return
    old = known if len(known) == len(files) else ()
    settled = {
        place: str(entry["digest"])
        for place, (file, entry) in enumerate(zip(files, old, strict=False))
        if "digest" in entry and entry.get("modified") == file.modified_ns and entry["bytes"] == file.size
    }
    # Copies of a file on other nodes have other times.
    settled = collectives.broadcast(settled if collectives.rank == 0 else None, DIGESTS)
    unknown = [place for place, file in enumerate(files) if isinstance(file, LocalFile) and place not in settled]
    size = sum(files[place].size for place in unknown)
    if unknown and collectives.rank == 0:
        logger.info("hashing data files that were written since", extra={"files": len(unknown), "bytes": size})
    began, together = time.monotonic(), CollectiveKeepalive(collectives)
    mine = {}
    for place in together.over(unknown[collectives.rank :: collectives.world_size]):
        file = files[place]
        assert isinstance(file, LocalFile), "ranks list the same files"
        mine[place] = file.compute_digest()
    together.wait()
    for found in (settled, *collectives.gather(mine, DIGESTS)):
        for place, digest in found.items():
            files[place].digest = digest
    if unknown and collectives.rank == 0:
        spent = {"files": len(unknown), "bytes": size, "seconds": round(time.monotonic() - began, 3)}
        logger.info("data files hashed", extra=spent)


def agree_on_data(collectives: Collectives, fingerprint: Mapping[str, Any]) -> None:
    """Check that all ranks found the same data: otherwise batches would consist of other samples.

    Raises:
        TemporaryError: on every rank; names the first difference from rank 0.
    """
    digest = hashlib.sha256(json.dumps(fingerprint).encode()).hexdigest()
    if len(set(collectives.gather(digest, TEXT))) == 1:
        return
    first = collectives.broadcast(dict(fingerprint) if collectives.rank == 0 else None, FINGERPRINT)
    changes = collectives.gather(first_change(first, fingerprint, "data"), CHANGE)
    rank, change = next((rank, change) for rank, change in enumerate(changes) if change)
    raise TemporaryError(
        f"rank {rank} found other data than rank 0: {change}; files changed while ranks started; the next start lists "
        "them again, so use URIs whose files do not change"
    )


def _left_out_note(split: Split, files: Sequence[DataFile], left_out: Sequence[LeftOut]) -> str:
    if not left_out:
        return ""
    shown = _some([f"{each.name} ({each.reason})" for each in left_out])
    return f"data.{split}: {len(files)} files; left out: {shown}"


def _eval_note(train: Reader, evaluation: Reader) -> str | None:
    if not evaluation.files:
        return None
    if not evaluation.num_samples:
        return "data.eval: the evaluation files have no rows, so there is no evaluation"
    trained = {file.digest or file.path for file in train.files}
    both = [file.name for file in evaluation.files if (file.digest or file.path) in trained]
    if not both:
        return None
    return f"data.eval: {len(both)} of {len(evaluation.files)} evaluation files are training files too: {_some(both)}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
