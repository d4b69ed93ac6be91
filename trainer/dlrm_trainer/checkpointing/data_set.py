"""Decide which files are a job's data set: those of the snapshot it continues from, whatever was added since.

Files are told apart by content. Rank 0 lists them. Where their rows lie stands in an index that the job's store keeps;
each rank reads a share of the files that it lacks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import Base64Bytes, TypeAdapter

from dlrm_api.errors import BadDataError, InvalidSpecError, SnapshotError, TemporaryError
from dlrm_api.job import DLRMJobSpec
from dlrm_checkpointer import CutMeta, DataIndex, get_document, put_document, put_index, read_index
from dlrm_stores import ObjectStore
from dlrm_stores.data_files import DataFile, LocalFile, files_named
from dlrm_stores.locations import LeftOut, Listing, Places, TableVersion
from dlrm_trainer.checkpointing.compat import check_data
from dlrm_trainer.data import READERS, Reader, Split, list_data, open_reader
from dlrm_trainer.data.index import FileListing, ListedFiles, identities, index_parts
from dlrm_trainer.data.reads import indexed_files
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import CollectiveKeepalive
from dlrm_trainer.metrics.progress import ProgressBoard
from dlrm_trainer.settings import read_settings

logger = logging.getLogger(__name__)

NAMED = 5
"""Files that a note names."""
FILE_LIST = "fileList"
"""Key of a fingerprint that refers to a document instead of listing files."""
ROUND_FILES = 16_384
"""Files, or parts of them, that are indexed between two exchanges; all ranks hold the result at once."""
PROGRESS_INTERVAL_S = 5.0
TEXT = TypeAdapter(str)


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
    virtual_shards: int | None = None
    """Of the snapshot's data."""


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """Hold the readers of a job's data."""

    train: Reader
    evaluation: Reader
    fingerprint: dict[str, Any]
    """Of the training data, as snapshots hold it."""
    index: str
    """Fingerprint of the index of its files; empty without files."""
    eval_note: str | None
    """What makes an evaluation say less than it seems to."""


def open_data_set(
    stack: ExitStack,
    spec: DLRMJobSpec,
    listings: Mapping[Split, Listing] | None,
    collectives: Collectives,
    board: ProgressBoard,
    read_data: Callable[[], StoredData] | None,
    check_stop: Callable[[], object] = lambda: None,
    *,
    virtual_shards: int,
) -> DataSet:
    """Open the training files of the snapshot, or all that were listed, and the evaluation files.

    Rank 0 lists files, and asks ``read_data`` for what the store knows of them; the others pass None as ``listings``.
    ``read_data`` is None for a job without snapshots. Ranks share the files that no stored index has; ``check_stop`` is
    called meanwhile. ``stack`` closes the readers. ``virtual_shards`` is the plan's number, for a job that neither sets
    one nor continues from a snapshot.

    Raises:
        InvalidSpecError: there are more ranks than virtual shards.
        SnapshotError: the data is not that of the snapshot, or ``data.newFiles`` is ``refuse`` and there are new files.
        TemporaryError: ranks found different data.
    """
    first = _Choice.of(spec, listings, board, read_data, virtual_shards) if listings is not None else None
    plan = collectives.broadcast(first.plan if first else None, PLAN)
    spec = spec.with_virtual_shards(plan.virtual_shards)
    board.update(virtual_shards=plan.virtual_shards)
    if collectives.world_size > plan.virtual_shards:
        raise InvalidSpecError(
            "spec.trainer.replicas",
            f"{collectives.world_size} ranks need as many virtual shards, and the data of the snapshot has "
            f"{plan.virtual_shards}: use at most {plan.virtual_shards} ranks, or set data.virtualShards and another "
            "checkpoint.uri to start from step 0",
        )
    places = Places(spec.data.s3, read_settings().data_credentials_dir)
    files = first.files if first else ListedFiles.of(plan.listing, places)
    index = _index_together(spec, files, plan, first, collectives, board, check_stop)
    splits: dict[Split, slice] = {"train": slice(plan.train_files), "eval": slice(plan.train_files, len(files))}
    readers, rank, world_size = dict[Split, Reader](), collectives.rank, collectives.world_size
    for split, chosen in splits.items():
        of_split = index.take(np.arange(len(files))[chosen])
        if split == "train" and plan.train_files:
            board.update(data_files=indexed_files(spec, np.array(plan.listing.sizes, np.int64)[chosen], of_split))
        reader = open_reader(spec, split, rank, world_size, files=files[chosen], index=of_split)
        readers[split] = stack.enter_context(closing(reader))
        _check_copies(reader, of_split, collectives)
    train, evaluation = readers["train"], readers["eval"]
    agreed = collectives.broadcast(first.agree(train, evaluation, board) if first else None, AGREED)
    if agreed.problem:
        raise SnapshotError(agreed.problem)
    return DataSet(
        train=train,
        evaluation=evaluation,
        fingerprint=agreed.fingerprint,
        index=index.fingerprint if plan.train_files else "",
        eval_note=agreed.eval_note or None,
    )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Tell all ranks which files are read."""

    listing: FileListing
    """Of the training files, then of the evaluation files."""
    train_files: int
    reads: str
    missing: list[int]
    """Places of files that no stored index has."""
    virtual_shards: int


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """Tell all ranks what rank 0 knows of the data."""

    fingerprint: dict[str, Any]
    eval_note: str
    problem: str
    """Why the data is not that of the snapshot; empty if it is."""


PLAN, AGREED, BODY = TypeAdapter(Plan), TypeAdapter(Agreed), TypeAdapter(Base64Bytes)


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """Hold what rank 0 alone knows: the listing, and what the store has of it."""

    files: Sequence[DataFile]
    plan: Plan
    stored: StoredData | None
    old: DataIndex
    """The index in the store."""
    left_out: Sequence[LeftOut]
    versions: Mapping[str, int]

    @classmethod
    def of(
        cls,
        spec: DLRMJobSpec,
        listings: Mapping[Split, Listing],
        board: ProgressBoard,
        read_data: Callable[[], StoredData] | None,
        planned_shards: int,
    ) -> _Choice:
        """Choose files, say what is left out, and look which of them the store has an index of."""
        stored = read_data() if read_data else None
        listings = _at_versions(spec, listings, stored)
        newer = [
            f"{table.uri} is read at version {table.version}, its newest is {table.newest}"
            for table in _tables(listings).values()
            if table.version != table.newest
        ]
        _refuse_new(spec, stored, "versions", newer, "; ")
        known = list(stored.fingerprint.get("files", ())) if stored and stored.fingerprint else []
        train, added = choose_files(listings["train"].files, known)
        _refuse_new(spec, stored, "data files", [file.name for file in added], "")
        chosen: dict[Split, Sequence[DataFile]] = {"train": train, "eval": listings["eval"].files}
        for split, some in chosen.items():
            if note := _left_out_note(split, some, listings[split].left_out):
                board.note(note)
        if added:
            names = _some([file.name for file in added])
            board.note(f"data.train: {len(added)} new files since the snapshot are ignored: {names}")
        for each in newer:
            board.note(f"data: {each}; the snapshot's version remains the data set")
        files = [*train, *chosen["eval"]]
        indexer = READERS[spec.data.format].indexer
        reads = indexer(spec).reads(files) if indexer else ""
        wanted = identities(files)
        old = (read_index(stored.store, reads, wanted) if stored and files else None) or DataIndex.empty(reads)
        has = {each.tobytes() for each in old.files}
        return cls(
            files=files,
            plan=Plan(
                listing=FileListing.of(files),
                train_files=len(train),
                reads=reads,
                missing=[place for place, each in enumerate(wanted) if each.tobytes() not in has],
                virtual_shards=_virtual_shards(spec, stored, planned_shards, board),
            ),
            stored=stored,
            old=old,
            left_out=[
                *listings["train"].left_out,
                *(LeftOut(name=file.name, reason="newer than the data") for file in added),
            ],
            versions={uri: table.version for uri, table in _tables(listings).items()},
        )

    def complete(self, found: DataIndex) -> DataIndex:
        """Return the index of all files from the stored one and that of the missing files, and store it."""
        both, wanted = DataIndex.join([self.old, found]), identities(self.files)
        places = {each.tobytes(): place for place, each in enumerate(both.files)}
        index = both.take([places[each.tobytes()] for each in wanted])
        if self.stored and self.plan.missing:
            put_index(self.stored.store, index)
        for file, digest in zip(self.files, index.digests, strict=True):
            if isinstance(file, LocalFile):
                file.digest = digest.tobytes().hex()
        return index

    def agree(self, train: Reader, evaluation: Reader, board: ProgressBoard) -> Agreed:
        """Compare the data with the snapshot's, and store the list of files."""
        described, eval_note, problem = describe(train), _eval_note(train, evaluation), ""
        if eval_note:
            board.note(eval_note)
        if self.stored and self.stored.fingerprint is not None:
            try:
                check_data(self.stored.fingerprint, described, self.stored.where)
            except SnapshotError as error:
                problem = str(error)
        listed = described.pop("files", None)
        if listed is not None and self.stored:
            names = [{"name": each.name, "reason": each.reason} for each in self.left_out]
            document = {"files": listed, "leftOut": names}
            document |= {"versions": dict(self.versions)} if self.versions else {}
            described[FILE_LIST] = put_document(self.stored.store, document)
        return Agreed(fingerprint=described, eval_note=eval_note or "", problem=problem)


def _virtual_shards(spec: DLRMJobSpec, stored: StoredData | None, planned: int, board: ProgressBoard) -> int:
    """Return the user's number of virtual shards, else the snapshot's, else the plan's."""
    kept = stored.virtual_shards if stored else None
    if spec.data.virtual_shards is not None:
        return spec.data.virtual_shards
    # Another batch size is refused when the data is compared.
    if kept is None or spec.data.global_batch_size % kept:
        return planned
    if kept != planned:
        board.note(f"data.virtualShards is {kept}, as in the snapshot, and not {planned}, as the plan expected")
    return kept


def _refuse_new(spec: DLRMJobSpec, stored: StoredData | None, kind: str, found: Sequence[str], separator: str) -> None:
    if found and stored and spec.data.new_files == "refuse":
        names, fix = (separator.join(found), "") if separator else (_some(found), "remove them, ")
        raise SnapshotError(
            f"{stored.where}: new {kind} since the snapshot: {names}; {fix}set data.newFiles: ignore, or set another "
            "spec.checkpoint.uri to start from step 0 with them"
        )


def _index_together(
    spec: DLRMJobSpec,
    files: Sequence[DataFile],
    plan: Plan,
    first: _Choice | None,
    collectives: Collectives,
    board: ProgressBoard,
    check_stop: Callable[[], object],
) -> DataIndex:
    """Return the index of all files on every rank; each reads a share of those that the store has none of.

    Large files of text are shared by bytes.
    """
    found, rank, world_size = [DataIndex.empty(plan.reads)], collectives.rank, collectives.world_size
    make = READERS[spec.data.format].indexer
    sizes, indexer = np.array(plan.listing.sizes, np.int64)[plan.missing], make(spec) if make else None
    assert indexer is not None or not len(sizes), "only formats with files list any"
    counts, parts = indexer.parts_of(sizes) if indexer else (sizes, [])
    progress = _IndexProgress(rank, len(parts), board)
    for start in range(0, len(parts), ROUND_FILES):
        some, together = parts[start : start + ROUND_FILES], CollectiveKeepalive(collectives)

        def working(done: int, start: int = start, together: CollectiveKeepalive = together) -> None:
            check_stop()
            together.keep_alive()
            # The others have read about as many.
            progress.tell(start + done * world_size)

        assert indexer is not None, "without one there are no parts"
        own = [(files[plan.missing[place]], part) for place, part in some[rank::world_size]]
        mine = index_parts(indexer, own, plan.reads, working)
        together.wait()
        bodies = collectives.gather(bytes(mine.encode()), BODY)
        shares = [DataIndex.decode(body, f"index of rank {number}") for number, body in enumerate(bodies)]
        order = np.concatenate([np.arange(len(some))[number::world_size] for number in range(world_size)])
        found.append(DataIndex.join(shares).take(np.argsort(order)))
    progress.end()
    index = first.complete(DataIndex.join(found).join_parts(counts)) if first else None
    body = collectives.broadcast(bytes(index.encode()) if index else None, BODY) if world_size > 1 else b""
    index = index or DataIndex.decode(body, "index of rank 0")
    if isinstance(files, ListedFiles):
        files.set_digests(index.digests)
    return index


class _IndexProgress:
    """Say how many files, or parts of large ones, are indexed, now and then, on rank 0."""

    def __init__(self, rank: int, count: int, board: ProgressBoard) -> None:
        self._count, self._board = count, board
        self._is_told = rank == 0 and count > 0
        self._began = self._last = time.monotonic()

    def tell(self, done: int) -> None:
        """Report it, if it is time to."""
        if self._is_told and time.monotonic() - self._last >= PROGRESS_INTERVAL_S:
            self._last = time.monotonic()
            done = min(done, self._count)
            logger.info("indexing data files", extra={"done": done, "parts": self._count})
            self._board.update(waiting=f"indexing data files: {done:,} of {self._count:,} parts")

    def end(self) -> None:
        """Report the end."""
        if self._is_told:
            seconds = round(time.monotonic() - self._began, 3)
            logger.info("data files indexed", extra={"parts": self._count, "seconds": seconds})
            self._board.update(waiting=None)


def _check_copies(reader: Reader, index: DataIndex, collectives: Collectives) -> None:
    """Check that the local files of each rank's share are those that rank 0 found. Every rank must call this.

    Raises:
        TemporaryError: on every rank; names the first file that differs.
    """
    if collectives.world_size == 1:
        return
    problem = ""
    try:
        for place in reader.own_files(index):
            if isinstance(file := reader.files[place], LocalFile):
                file.accept_copy(index.contents[place].tobytes().hex())
    except BadDataError as error:
        problem = str(error)
    problems = collectives.gather(problem, TEXT)
    for rank, each in enumerate(problems):
        if each:
            raise TemporaryError(
                f"rank {rank} found other data than rank 0: {each}; files changed while ranks started, or copies on "
                "nodes differ; the next start lists them again, so use URIs whose files do not change"
            )


def list_data_set(spec: DLRMJobSpec, versions: Mapping[str, int] | None = None) -> dict[Split, Listing]:
    """List the files of both splits. Raises as ``list_data`` does."""
    return {"train": list_data(spec, "train", versions), "eval": list_data(spec, "eval", versions)}


def _tables(listings: Mapping[Split, Listing]) -> dict[str, TableVersion]:
    """Return the tables of both splits by URI."""
    return {table.uri: table for listing in listings.values() for table in listing.tables}


def _at_versions(
    spec: DLRMJobSpec, listings: Mapping[Split, Listing], stored: StoredData | None
) -> Mapping[Split, Listing]:
    """List tables at the versions that the snapshot names, else at those that were found."""
    found = {uri: table.version for uri, table in _tables(listings).items()}
    if not found:
        return listings
    kept = stored.versions if stored else {}
    wanted = {uri: kept.get(uri, version) for uri, version in found.items()}
    logger.info("tables are read at versions", extra={"versions": wanted})
    return listings if wanted == found else list_data_set(spec, wanted)


def read_stored(store: ObjectStore, meta: CutMeta, where: str) -> StoredData:
    """Return what a snapshot's run knew of its data. Raises SnapshotError if the list of files is gone."""
    found = dict(meta.reader.get("fingerprint", {}))
    digest = found.pop(FILE_LIST, None)
    if digest is None:
        return StoredData(store=store, fingerprint=found, where=where, virtual_shards=meta.virtual_shards)
    listed = get_document(store, digest)
    fingerprint = found | {"files": listed["files"]}
    return StoredData(
        store=store,
        fingerprint=fingerprint,
        where=where,
        versions=listed.get("versions", {}),
        virtual_shards=meta.virtual_shards,
    )


def describe(reader: Reader) -> dict[str, Any]:
    """Return a reader's fingerprint with all that is known of each file: ``digest``, ``etag``, ``modified``."""
    found = dict(reader.fingerprint)
    if "files" not in found:
        return found
    known = ({"digest": each.digest, "etag": each.etag, "modified": each.modified_ns} for each in reader.files)
    shown = ({key: value for key, value in each.items() if value} for each in known)
    return found | {"files": [entry | more for entry, more in zip(found["files"], shown, strict=True)]}


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
