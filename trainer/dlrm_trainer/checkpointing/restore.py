"""Choose, check and restore the snapshot that training continues from, and describe the state of cuts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar

from pydantic import TypeAdapter

from dlrm_api.errors import NoInputError, SnapshotError, TemporaryError
from dlrm_api.job import DLRMJob, DLRMJobSpec
from dlrm_api.plan import Plan
from dlrm_checkpointer import (
    Check,
    CodedRows,
    HandoffWriter,
    ObjectEntry,
    PartialCut,
    PartialDigest,
    Snapshot,
    SnapshotName,
    add_digests,
    check_bytes,
    claim_attempt,
    find_partial,
    load_chain,
    manifest_key,
    newest_snapshot,
    open_partial,
    shard_digest,
    state_digest,
    table_digest,
)
from dlrm_stores import ObjectStore, StoreOptions, open_store
from dlrm_stores.base import FieldNames
from dlrm_trainer.checkpointing.compat import check_data, check_model, first_change
from dlrm_trainer.checkpointing.control import CutControl
from dlrm_trainer.data import Reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import CollectiveKeepalive
from dlrm_trainer.distributed.rendezvous import RankGroup
from dlrm_trainer.embedding import Placement
from dlrm_trainer.embedding.checkpoint import LocalPart, table_meta
from dlrm_trainer.learner import Learner
from dlrm_trainer.metrics.progress import Observer, ProgressBoard
from dlrm_trainer.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")
ROUND_BYTES = 1 << 30
"""Bytes that each rank verifies between two exchanges of results: bounds the reads after the first damage."""
ENTRIES = TypeAdapter(tuple[ObjectEntry, ...])
TEXT = TypeAdapter(str)


def choose_together(
    store: ObjectStore, collectives: Collectives, choose: Callable[[Check], T], kind: TypeAdapter[T]
) -> T:
    """Return rank 0's choice on every rank; all ranks share the reads of the store that it needs.

    Every rank must call this; ``choose`` is called on rank 0 only, with the function that checks objects.

    Raises:
        PeerLostError: rank 0 failed to choose, or another rank could not read.
    """
    if collectives.rank == 0:
        chosen = choose(functools.partial(_check_together, collectives))
        # Ends the loop of the other ranks.
        collectives.broadcast((), ENTRIES)
        return collectives.broadcast(chosen, kind)
    while entries := collectives.broadcast(None, ENTRIES):
        _check_share(collectives, store, entries)
    return collectives.broadcast(None, kind)


def _check_together(
    collectives: Collectives, store: ObjectStore, objects: Sequence[ObjectEntry], on_whole: Callable[[str], None]
) -> None:
    """Do as ``check_bytes`` on rank 0, with a share of the objects read by each rank."""
    size, done = sum(entry.bytes for entry in objects), 0
    for entries in _rounds(objects, ROUND_BYTES * collectives.world_size):
        collectives.broadcast(entries, ENTRIES)
        if problem := _check_share(collectives, store, entries):
            raise SnapshotError(problem)
        for entry in entries:
            on_whole(entry.key)
        done += sum(entry.bytes for entry in entries)
        logger.info("bytes of snapshots verified", extra={"done": done, "all": size})


def _check_share(collectives: Collectives, store: ObjectStore, entries: Sequence[ObjectEntry]) -> str:
    """Read this rank's share of some objects; return the first problem of any rank, or an empty string."""
    together, problem = CollectiveKeepalive(collectives), ""
    try:
        check_bytes(store, entries[collectives.rank :: collectives.world_size], lambda _key: together.keep_alive())
    except SnapshotError as error:
        problem = str(error)
    together.wait()
    problems = collectives.gather(problem, TEXT)
    return next(filter(None, problems), "")


def _rounds(objects: Sequence[ObjectEntry], limit_bytes: int) -> Iterator[tuple[ObjectEntry, ...]]:
    """Yield runs of objects of at most ``limit_bytes``, or a single larger one."""
    taken: list[ObjectEntry] = []
    size = 0
    for entry in objects:
        if taken and size + entry.bytes > limit_bytes:
            yield tuple(taken)
            taken, size = [], 0
        taken.append(entry)
        size += entry.bytes
    if taken:
        yield tuple(taken)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Hold what an attempt starts from; equal on all ranks."""

    attempt: int
    """The store's number of this attempt."""
    snapshot: SnapshotName | None
    """None: from the beginning."""
    reasons: tuple[str, ...]
    """Why newer snapshots were skipped."""
    salvage: PartialCut | None = None
    """A newer, incomplete cut whose shards replace those of the snapshot."""


START = TypeAdapter(Start)
PARTIALS = TypeAdapter(dict[str, PartialDigest])


def choose_start(
    store: ObjectStore, collectives: Collectives, note: str, *, partial: bool = False, committed: str
) -> Start:
    """Choose the newest snapshot that verifies, and claim an attempt that continues from it.

    Rank 0 decides; each rank reads a share of the objects to verify. The note goes to the claim, for people. With
    ``partial`` a newer cut with missing shards may be used. ``committed`` is the URI of the manifest of a snapshot that
    the job has committed; empty if unknown.

    Raises:
        SnapshotError: on rank 0: no snapshot is usable, or the store holds none although the job committed one there.
            No attempt is claimed then.
        PeerLostError: on the others in that case.
    """

    def choose(check: Check) -> Start:
        snapshot, reasons = newest_snapshot(store, check=check)
        if snapshot is None and committed.startswith(f"{store.uri}/"):
            raise SnapshotError(
                f"snapshot not found: {committed}, which the job committed; restore the content of {store.uri} (check "
                "that the right volume is mounted), or set another spec.checkpoint.uri to start from step 0"
            )
        salvage = find_partial(store, snapshot, check) if partial and snapshot else None
        name = None if snapshot is None else snapshot.name
        attempt = claim_attempt(store, None if name is None else name.step, note)
        return Start(attempt=attempt, snapshot=name, reasons=tuple(reasons), salvage=salvage)

    return choose_together(store, collectives, choose, START)


def model_document(spec: DLRMJobSpec, learner: Learner) -> dict[str, Any]:
    """Return the description of the model that snapshots store and that a restore compares."""
    seed, optimizer = spec.training.seed, spec.training.row_optimizer.kind
    return {
        "tables": [
            table_meta(table, seed, optimizer).to_json() | {"hash": table.embedding.hash, "pooling": table.pooling}
            for table in spec.model.all_tables()
        ],
        "dense": learner.dense.shapes(),
        "interaction": spec.model.interaction,
        "denseFeatures": list(spec.model.dense_features),
        "rowOptimizer": optimizer,
        "denseOptimizer": spec.training.dense_optimizer.kind,
    }


def restore(learner: Learner, snapshot: Snapshot, collectives: Collectives, *, mark: bool = False) -> None:
    """Load a snapshot into a learner that has just started; bit-exact at 32 bits.

    All ranks must call this, and it returns once all are done: some have many times the rows of others. With ``mark``
    its rows count as changed, so the next cut contains them: needed if the snapshot cannot be the parent of a cut,
    because it is in another store, a table was resized, or it is a partial restore.

    Raises:
        SnapshotError: an object is absent or corrupt.
        PeerLostError: a rank is lost.
    """
    learner.embeddings.settle()
    in_step = CollectiveKeepalive(collectives)
    parts = list(learner.embeddings.local)

    def recorded(part: LocalPart, group: Iterable[tuple[int, CodedRows]]) -> Iterator[CodedRows]:
        record = part.dirty.mark if mark else part.dirty.store
        for _, piece in in_step.over(group):
            record(piece.row_ids - part.shard.row_start)
            yield piece

    codes = snapshot.shard_codes([part.shard for part in parts])
    for number, group in groupby(codes, key=itemgetter(0)):
        parts[number].restore(recorded(parts[number], group))
    learner.dense.restore(snapshot.dense())
    in_step.wait()


def live_digest(learner: Learner, collectives: Collectives) -> str:
    """Return the digest of the whole logical state, on every rank; equal to that of a snapshot at 32 bits."""
    learner.embeddings.settle()
    mine: dict[str, list[PartialDigest]] = defaultdict(list)
    for part in learner.embeddings.saved:
        # Digests do not cover the seed.
        meta = table_meta(part.table, 0, learner.row_optimizer)
        mine[meta.name].append(shard_digest(meta, part.shard, part.read_block))
    partials: dict[str, list[PartialDigest]] = defaultdict(list)
    for found in collectives.gather({name: add_digests(each) for name, each in mine.items()}, PARTIALS):
        for name, each in found.items():
            partials[name].append(each)
    return state_digest([(name, table_digest(each)) for name, each in partials.items()], learner.dense.arrays())


RESTORE_FROM_FIELDS = FieldNames(uri="spec.checkpoint.restoreFrom")
FINGERPRINT = TypeAdapter(dict[str, Any])
CHANGE = TypeAdapter[str | None](str | None)
CHOSEN = TypeAdapter[tuple[SnapshotName | None, list[str]]](tuple[SnapshotName | None, list[str]])


def open_writer(stack: ExitStack, job: DLRMJob, plan: Plan, settings: Settings, rank: int) -> HandoffWriter | None:
    """Open the rank's hand-off, if configured; closing ``stack`` reports why the rank ended."""
    if settings.handoff_dir is None:
        logger.warning("no hand-off directory, training without snapshots")
        return None
    budget = job.spec.checkpoint.handoff_budget
    if budget is None and settings.replica < len(plan.handoff_bytes):
        budget = plan.handoff_bytes[settings.replica]
    writer = HandoffWriter(settings.handoff_dir, rank, budget or None, job.spec.trainer.processes_per_replica)
    threading.Thread(target=writer.touch, name="touch hand-off", daemon=True).start()

    def close(kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        writer.close(f"{kind.__name__}: {error}" if kind else "ended", failed=kind is not None)

    stack.push(close)
    return writer


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Hold the components of one rank's training."""

    job: DLRMJob
    settings: Settings
    gang: RankGroup
    control: CutControl
    board: ProgressBoard
    placement: Placement
    reader: Reader
    eval_reader: Reader
    learner: Learner
    writer: HandoffWriter | None
    observer: Observer


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


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Hold what training continues from."""

    attempt: int = 0
    """The store's number of this attempt."""
    step: int = 0
    """Steps done."""
    held_step: int | None = None
    """Step of the snapshot in the job's store that holds exactly this state; None if there is none."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics of the snapshot: loss of its last step, last evaluation."""


def restore_newest(assembly: Assembly) -> Restored:
    """Restore the newest usable snapshot, and log which one it is and why newer ones were skipped.

    Raises:
        SnapshotError: none is usable, the store holds none although the job committed one, or it is of another model
            or of other data.
        NoInputError: neither the job's store nor ``restoreFrom`` holds one.
    """
    checkpoint = assembly.job.spec.checkpoint
    if assembly.writer is None:
        return Restored()
    options = StoreOptions(s3=checkpoint.s3, credentials_dir=assembly.settings.credentials_dir)
    store = open_store(checkpoint.uri, options)
    note = f"{assembly.job.metadata.name}, attempt {assembly.settings.attempt}"
    collectives, committed = assembly.gang.collectives, assembly.settings.committed_snapshot
    start = choose_start(store, collectives, note, partial=checkpoint.partial_restore, committed=committed)
    _log_skipped(start.reasons)
    assembly.board.update(passed_over_snapshots=len(start.reasons))
    if start.snapshot is None:
        if checkpoint.restore_from is not None:
            begin_from(assembly, checkpoint.restore_from, options)
        else:
            logger.info("no snapshot found, starting from step 0", extra={"store": store.uri})
        return Restored(attempt=start.attempt)
    snapshot = Snapshot(store, load_chain(store, start.snapshot))
    if start.salvage:
        snapshot = open_partial(store, snapshot, start.salvage)
    check_data(snapshot.meta, assembly.reader.fingerprint, snapshot.uri)
    resized = _check_model(assembly, snapshot)
    # No snapshot holds the state of a resized table or of a partial restore.
    new = resized or start.salvage is not None
    restore(assembly.learner, snapshot, collectives, mark=new)
    assembly.writer.restored(None if new else snapshot.name)
    if start.salvage:
        extra = {"step": start.snapshot.step, "stored_ranks": list(start.salvage.ranks)}
        logger.warning("partial restore: lost shards use an older step", extra=extra)
    logger.info("snapshot restored", extra={"step": snapshot.step, "snapshot": snapshot.uri})
    held_step = None if new else snapshot.step
    return Restored(attempt=start.attempt, step=snapshot.step, held_step=held_step, metrics=snapshot.meta.metrics)


def begin_from(assembly: Assembly, uri: str, options: StoreOptions) -> None:
    """Load rows, dense parameters and optimizer state of another job's newest snapshot; start from step 0.

    Raises:
        NoInputError: there is none.
        SnapshotError: it is unusable, or of another model.
        TemporaryError: the other job, which may still run, retired it during the restore.
    """
    other = open_store(uri, replace(options, fields=RESTORE_FROM_FIELDS))

    def choose(check: Check) -> tuple[SnapshotName | None, list[str]]:
        newest, reasons = newest_snapshot(other, check=check)
        return None if newest is None else newest.name, reasons

    name, reasons = choose_together(other, assembly.gang.collectives, choose, CHOSEN)
    _log_skipped(reasons)
    if name is None:
        raise NoInputError(f"spec.checkpoint.restoreFrom: {other.uri} holds no snapshot; fix the URI or remove it")
    with _unless_retired(other, name):
        snapshot = Snapshot(other, load_chain(other, name))
        _check_model(assembly, snapshot)
        restore(assembly.learner, snapshot, assembly.gang.collectives, mark=True)
    logger.info("starting from step 0 with the model of another job", extra={"snapshot": snapshot.uri})


def _check_model(assembly: Assembly, snapshot: Snapshot) -> bool:
    """Check that a snapshot is of this model; return whether a table has another number of rows."""
    spec = assembly.job.spec
    model = model_document(spec, assembly.learner)
    return check_model(snapshot.meta, snapshot.last_rows(), model, spec.model.all_tables(), snapshot.uri)


def _log_skipped(reasons: Iterable[str]) -> None:
    for reason in reasons:
        logger.warning("skipping unusable snapshot", extra={"reason": reason})


@contextlib.contextmanager
def _unless_retired(store: ObjectStore, name: SnapshotName) -> Iterator[None]:
    """Turn a failed read into a retry if the snapshot was retired: no claim protects another job's.

    Raises:
        TemporaryError: it was retired; the next attempt chooses a newer one.
    """
    try:
        yield
    except (SnapshotError, NoInputError) as error:
        if store.size(manifest_key(name.step, name.attempt)) is not None:
            raise
        raise TemporaryError(
            f"spec.checkpoint.restoreFrom: {store.uri}: the snapshot of step {name.step} was retired during the "
            "restore; the next run chooses a newer one"
        ) from error
