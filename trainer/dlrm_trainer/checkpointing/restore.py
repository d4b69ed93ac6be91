"""Choose, check and restore the snapshot that training continues from, and describe the state of cuts."""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from dlrm_api.errors import InvalidSpecError, NoInputError, SnapshotError, TemporaryError
from dlrm_api.job import DLRMJob, DLRMJobSpec, settings_of
from dlrm_api.plan import Plan
from dlrm_checkpointer import (
    Chain,
    ChainLink,
    Check,
    CodedRows,
    HandoffWriter,
    JobIdentity,
    ObjectEntry,
    PartialCut,
    PartialDigest,
    PartialSnapshot,
    ShardId,
    Snapshot,
    SnapshotName,
    add_digests,
    check_bytes,
    claim_attempt,
    find_attempt,
    find_partial,
    get_document,
    last_attempt,
    load_chain,
    load_rows,
    manifest_key,
    newest_snapshot,
    open_partial,
    put_document,
    rows_digest,
    shard_digest,
    state_digest,
    table_digest,
)
from dlrm_kernels.eviction import rows_that_fit
from dlrm_stores import ObjectStore, StoreOptions, open_store
from dlrm_stores.base import FieldNames
from dlrm_trainer.checkpointing.compat import changes, check_model
from dlrm_trainer.checkpointing.control import CutControl
from dlrm_trainer.checkpointing.data_set import BODY, TEXT, DataSet, StoredData, read_stored
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import CollectiveKeepalive
from dlrm_trainer.distributed.rendezvous import RankGroup
from dlrm_trainer.embedding import Placement
from dlrm_trainer.embedding.checkpoint import (
    LocalPart,
    ResidentPart,
    SlabPart,
    UniquePart,
    counters_meta,
    part_meta,
    table_meta,
)
from dlrm_trainer.embedding.shared import shared_of
from dlrm_trainer.embedding.sights import counters_of
from dlrm_trainer.embedding.unique import ranks_of
from dlrm_trainer.learner import Learner
from dlrm_trainer.metrics.progress import Observer, ProgressBoard
from dlrm_trainer.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_CHANGES = 10
"""Changed settings that are named."""
ROUND_BYTES = 1 << 30
"""Bytes that each rank verifies between two exchanges of results: bounds the reads after the first damage."""
SHARE = TypeAdapter[tuple[ObjectEntry, ...] | None](tuple[ObjectEntry, ...] | None)
"""Objects that a rank reads; None after the last."""
LINKS = TypeAdapter(tuple[ChainLink, ...])


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
        collectives.scatter([None] * collectives.world_size, SHARE)
        return collectives.broadcast(chosen, kind)
    while (share := collectives.scatter(None, SHARE)) is not None:
        _check_share(collectives, store, share)
    return collectives.broadcast(None, kind)


def _check_together(
    collectives: Collectives, store: ObjectStore, objects: Sequence[ObjectEntry], on_whole: Callable[[str], None]
) -> None:
    """Do as ``check_bytes`` on rank 0, with a share of the objects read by each rank."""
    size, done = sum(entry.bytes for entry in objects), 0
    for entries in _rounds(objects, ROUND_BYTES * collectives.world_size):
        shares = [entries[rank :: collectives.world_size] for rank in range(collectives.world_size)]
        share = collectives.scatter(shares, SHARE)
        assert share is not None
        if problem := _check_share(collectives, store, share):
            raise SnapshotError(problem)
        for entry in entries:
            on_whole(entry.key)
        done += sum(entry.bytes for entry in entries)
        logger.info("bytes of snapshots verified", extra={"done": done, "all": size})


def _check_share(collectives: Collectives, store: ObjectStore, share: Sequence[ObjectEntry]) -> str:
    """Read this rank's share of some objects; return the first problem of any rank, or an empty string."""
    together, problem = CollectiveKeepalive(collectives), ""
    try:
        check_bytes(store, share, lambda _key: together.keep_alive())
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
    changed: tuple[str, ...] = ()
    """Settings that differ from those with which the snapshot was made."""
    notes: tuple[str, ...] = ()
    """What a user should know about the store."""


START = TypeAdapter(Start)
PARTIALS = TypeAdapter(dict[str, PartialDigest])
ROW_COUNTS = TypeAdapter(dict[str, int])


def choose_start(
    store: ObjectStore,
    collectives: Collectives,
    note: str,
    *,
    partial: bool = False,
    committed: str,
    owner: JobIdentity | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Start:
    """Choose the newest snapshot that verifies, and claim an attempt that continues from it.

    Rank 0 decides; each rank reads a share of the objects to verify. The note goes to the claim, for people. With
    ``partial`` a newer cut with missing shards may be used. ``committed`` is the URI of the manifest of a snapshot that
    the job has committed; empty if unknown. ``owner`` is this job, and ``settings`` what decides how it trains.

    Raises:
        SnapshotError: on rank 0: no snapshot is usable, or the store holds none although the job committed one there.
            No attempt is claimed then.
        InvalidSpecError: on rank 0: the store is another job's. No attempt is claimed then.
        PeerLostError: on the others in that case.
    """

    def choose(check: Check) -> Start:
        notes = _check_owner(store, owner)
        snapshot, reasons = newest_snapshot(store, check=check)
        if snapshot is None and committed.startswith(f"{store.uri}/"):
            raise SnapshotError(
                f"snapshot not found: {committed}, which the job committed; restore the content of {store.uri} (check "
                "that the right volume is mounted), or set another spec.checkpoint.uri to start from step 0"
            )
        salvage = find_partial(store, snapshot, check) if partial and snapshot else None
        name = None if snapshot is None else snapshot.name
        changed = _changed_settings(store, name, settings) if name and settings else []
        digest = put_document(store, settings) if settings else ""
        attempt = claim_attempt(store, None if name is None else name.step, note, owner, digest)
        return Start(
            attempt=attempt,
            snapshot=name,
            reasons=tuple(reasons),
            salvage=salvage,
            changed=tuple(changed),
            notes=tuple(notes),
        )

    return choose_together(store, collectives, choose, START)


def open_together(
    store: ObjectStore,
    collectives: Collectives,
    name: SnapshotName,
    shards: Sequence[ShardId],
    salvage: PartialCut | None = None,
) -> Snapshot:
    """Open a snapshot with its chain on every rank, for reading this rank's ``shards``; all ranks must call this.

    Rank 0 alone reads manifests and part lists. They are sent one by one, so that a rank holds one whole.

    Raises:
        NoInputError, SnapshotError: on rank 0; see ``load_chain`` and ``open_partial``.
        PeerLostError: on the others in that case.
    """
    if collectives.rank:
        links = collectives.broadcast(None, LINKS)
        chain = Chain.unpack(links, (collectives.broadcast(None, BODY) for _ in links), shards)
        return (PartialSnapshot if salvage else Snapshot)(store, chain)
    snapshot = Snapshot(store, load_chain(store, name))
    if salvage:
        snapshot = open_partial(store, snapshot, salvage)
    if collectives.world_size > 1:
        collectives.broadcast(snapshot.chain.links, LINKS)
        for body in snapshot.chain.pack():
            collectives.broadcast(body, BODY)
    return type(snapshot)(store, snapshot.chain.of_shards(shards))


def _check_owner(store: ObjectStore, owner: JobIdentity | None) -> list[str]:
    """Refuse another job's store; return what to say if it was another run's, or nobody's."""
    last = last_attempt(store)
    if owner is None or last is None:
        return []
    if last.owner is None:
        return [f"{store.uri} was written by an earlier version, which names no owner: job {owner} takes it over"]
    if not last.owner.is_job(owner):
        raise InvalidSpecError(
            "spec.checkpoint.uri",
            f"{store.uri} belongs to job {last.owner}; set another URI, and restoreFrom: {store.uri} to start from its "
            "newest model",
        )
    if last.owner.uid != owner.uid and owner.uid:
        return [f"continuing the snapshots of another run of job {owner} in {store.uri}"]
    return []


def _changed_settings(store: ObjectStore, name: SnapshotName, settings: Mapping[str, Any]) -> list[str]:
    """Describe the settings that differ from those of the attempt that made a snapshot; none if they are unknown."""
    made_by = find_attempt(store, name.attempt)
    if made_by is None or not made_by.settings:
        return []
    then = settings_of(get_document(store, made_by.settings))
    return list(islice(changes(then, _known_then(then, settings), ""), MAX_CHANGES))


def _known_then(then: Any, now: Any) -> Any:
    """Leave out fields that the version which wrote ``then`` did not have."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        return {key: _known_then(then[key], value) for key, value in now.items() if key in then}
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        return [_known_then(old, new) for old, new in zip(then, now, strict=True)]
    return now


def model_document(spec: DLRMJobSpec, learner: Learner) -> dict[str, Any]:
    """Return the description of the model that snapshots store and that a restore compares."""
    seed, optimizer, tables = spec.training.seed, spec.training.row_optimizer.kind, spec.model.all_tables()
    return {
        "tables": [
            *(
                table_meta(table, seed, optimizer).to_json() | {"hash": table.embedding.hash, "pooling": table.pooling}
                for table in tables
            ),
            *(
                table_meta(shared_of(table), seed, optimizer, table.name).to_json()
                for table in tables
                if table.embedding.shared_rows is not None
            ),
            *(
                counters_meta(counters_of(table), table.name).to_json()
                for table in tables
                if table.embedding.has_counts
            ),
        ],
        "dense": learner.dense.shapes(),
        "interaction": spec.model.interaction,
        "denseFeatures": list(spec.model.dense_features),
        "rowOptimizer": optimizer,
        "denseOptimizer": spec.training.dense_optimizer.kind,
    }


def restore(
    learner: Learner, snapshot: Snapshot, collectives: Collectives, *, mark: bool = False, begins: bool = False
) -> Counter[str]:
    """Load a snapshot into a learner that has just started, and return the rows of each table that found no space.

    Bit-exact at 32 bits. Rows find no space only in a unique table with fewer rows than in the snapshot.

    All ranks must call this, and it returns once all are done: some have many times the rows of others. With ``mark``
    its rows count as changed, so the next cut contains them: needed if the snapshot cannot be the parent of a cut,
    because it is in another store, a table was resized, or it is a partial restore. ``begins``: training starts at
    step 0.

    Raises:
        SnapshotError: an object is absent or corrupt.
        PeerLostError: a rank is lost.
    """
    learner.embeddings.settle()
    in_step = CollectiveKeepalive(collectives)
    parts = [part for part in learner.embeddings.local if not _is_new(part, snapshot)]
    fitting: list[NDArray[np.int64] | None] = [None] * len(parts)
    left = Counter[str]()
    for number, part in enumerate(parts):
        if isinstance(part, UniquePart) and part.table.rows < snapshot.table(part.table.name).rows:
            fitting[number], left[part.table.name] = _fitting_keys(snapshot, part)
            in_step.keep_alive()
    codes = snapshot.shard_codes([part.shard for part in parts])
    for number, group in groupby(codes, key=itemgetter(0)):
        pieces: Iterator[CodedRows] = (piece for _, piece in in_step.over(group))
        if (keys := fitting[number]) is not None:
            pieces = _chosen(pieces, keys)
        part = parts[number]
        if begins and isinstance(part, UniquePart):
            pieces = map(partial(_touched_first, part.own_values), pieces)
        part.restore(map(partial(_fit, part, snapshot, begins), pieces), mark=mark)
    learner.dense.restore(snapshot.dense())
    in_step.wait()
    counts = collectives.gather(dict(left), ROW_COUNTS)
    return sum(map(Counter, counts), Counter[str]())


def _is_new(part: LocalPart, snapshot: Snapshot) -> bool:
    """Tell whether a part starts anew: the snapshot has no shared rows, or no counters, of its table and size."""
    if not (isinstance(part, ResidentPart) and (part.counts_of or part.shared_of)):
        return False
    return all((table.name, table.rows) != (part.table.name, part.table.rows) for table in snapshot.meta.tables)


def _fitting_keys(snapshot: Snapshot, part: UniquePart) -> tuple[NDArray[np.int64], int]:
    """Return the keys of a part that fit into a unique table with fewer rows, and how many others there are."""
    buckets, own = part.table.key_buckets, part.own_values
    assert buckets is not None
    known = own + sum(value != "utility" for value in snapshot.table(part.table.name).row_values)
    found = [
        (piece.row_ids, ranks_of(piece.state[:, own:known], part.rows.policy, snapshot.step))
        for _, piece in snapshot.shard_codes([part.shard])
    ]
    keys = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in found)])
    ranks = np.concatenate([np.empty(0, np.float64), *(each for _, each in found)])
    stay = rows_that_fit(keys, ranks, buckets.count, buckets.quota)
    return np.sort(keys[stay]), int(np.count_nonzero(~stay))


def _fit(part: LocalPart, snapshot: Snapshot, begins: bool, piece: CodedRows) -> CodedRows:
    """Give rows a size that their table has, so that none loses a column, and a utility if it has several.

    Rows of a snapshot of one size have all columns, and a utility by their optimizer state.
    """
    sizes, state, had = part.table.sizes, piece.state, piece.form.columns is not None
    if not sizes:
        return replace(piece, state=np.ascontiguousarray(state[:, :-1])).resized(None) if had else piece
    memory = part.memory if isinstance(part, UniquePart) else part
    assert isinstance(memory, SlabPart)
    if not had:
        step = 0 if begins else snapshot.step
        state = np.column_stack([state, memory.kernel.estimate_utilities(step, state)])
    elif begins:
        state = np.column_stack([state[:, :-1], state[:, -1] - np.float32(snapshot.step)])
    return replace(piece, state=state).resized(min(size for size in (0, *sizes) if size >= piece.columns))


def _touched_first(own: int, piece: CodedRows) -> CodedRows:
    """Count rows as touched in the first step: those of another job's steps would outlive newer ones.

    ``own`` are the values of a row's optimizer state, before that of its touch.
    """
    state = piece.state.copy()
    state[:, own] = np.array(1, np.uint32).view(np.float32)
    return replace(piece, state=state)


def _chosen(pieces: Iterable[CodedRows], keys: NDArray[np.int64]) -> Iterator[CodedRows]:
    for piece in pieces:
        chosen = piece.take(np.flatnonzero(np.isin(piece.row_ids, keys, assume_unique=True)))
        if len(chosen.row_ids):
            yield chosen


def live_digest(learner: Learner, collectives: Collectives) -> str:
    """Return the digest of the whole logical state, on every rank; equal to that of a snapshot at 32 bits."""
    learner.embeddings.settle()
    mine: dict[str, list[PartialDigest]] = defaultdict(list)
    for part in learner.embeddings.saved:
        # Digests do not cover the seed.
        meta = part_meta(part, learner.row_optimizer)
        if isinstance(part, UniquePart):
            mine[meta.name] += [
                rows_digest(meta, piece.row_ids, part.shard.column_start, piece.rows, piece.state)
                for piece in map(load_rows, part.held())
            ]
        else:
            mine[meta.name].append(shard_digest(meta, part.shard, part.read_block))
    partials: dict[str, list[PartialDigest]] = defaultdict(list)
    for found in collectives.gather({name: add_digests(each) for name, each in mine.items()}, PARTIALS):
        for name, each in found.items():
            partials[name].append(each)
    return state_digest([(name, table_digest(each)) for name, each in partials.items()], learner.dense.arrays())


RESTORE_FROM_FIELDS = FieldNames(uri="spec.checkpoint.restoreFrom")
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
    data: DataSet
    learner: Learner
    writer: HandoffWriter | None
    observer: Observer


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


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Hold the job's store, and the snapshot in it that training continues from."""

    store: ObjectStore
    options: StoreOptions
    start: Start
    snapshot: Snapshot | None
    """None: from the beginning."""

    def read_data(self) -> StoredData:
        """Return what the store knows of the data. Raises SnapshotError if the list of files is gone."""
        if self.snapshot is None:
            return StoredData(store=self.store, fingerprint=None, where=self.store.uri)
        return read_stored(self.store, self.snapshot.meta, self.snapshot.uri)


def choose_newest(
    job: DLRMJob, settings: Settings, collectives: Collectives, board: ProgressBoard, shards: Sequence[ShardId]
) -> Chosen:
    """Choose the newest usable snapshot; log which one it is and why newer ones were skipped. See ``choose_start``.

    ``shards`` are what this rank will read of it.
    """
    checkpoint, meta = job.spec.checkpoint, job.metadata
    options = StoreOptions(s3=checkpoint.s3, credentials_dir=settings.credentials_dir)
    store = open_store(checkpoint.uri, options)
    # A run outside a cluster is told apart by its machine and folder.
    place = f"{socket.gethostname()}:{settings.work_dir}" if settings.work_dir else ""
    uid = str((meta.model_extra or {}).get("uid", place))
    start = choose_start(
        store,
        collectives,
        f"{meta.name}, attempt {settings.attempt}",
        partial=checkpoint.partial_restore,
        committed=settings.committed_snapshot,
        owner=JobIdentity(meta.name, meta.namespace or "", uid),
        settings=job.spec.settings(),
    )
    _log_skipped(start.reasons)
    board.update(passed_over_snapshots=len(start.reasons))
    if collectives.rank == 0:
        for note in start.notes:
            board.note(note)
    if start.snapshot is None:
        return Chosen(store=store, options=options, start=start, snapshot=None)
    snapshot = open_together(store, collectives, start.snapshot, shards, start.salvage)
    return Chosen(store=store, options=options, start=start, snapshot=snapshot)


def restore_chosen(assembly: Assembly, chosen: Chosen, total_steps: int) -> Restored:
    """Restore the chosen snapshot, or the one of ``restoreFrom``, of a job of ``total_steps`` steps.

    Raises:
        SnapshotError: it is of another model or of other data.
        InvalidSpecError: it was made with other settings, and no step is left to train with these.
        NoInputError: neither the job's store nor ``restoreFrom`` holds one.
    """
    start, snapshot = chosen.start, chosen.snapshot
    if snapshot is None:
        if assembly.job.spec.checkpoint.restore_from is not None:
            begin_from(assembly, assembly.job.spec.checkpoint.restore_from, chosen.options)
        else:
            logger.info("no snapshot found, starting from step 0", extra={"store": chosen.store.uri})
        return Restored(attempt=start.attempt)
    resized = _check_model(assembly, snapshot)
    _check_settings(assembly, chosen, snapshot.step, total_steps)
    # No snapshot holds the state of a resized table or of a partial restore.
    new = resized or start.salvage is not None
    _note_left(assembly, restore(assembly.learner, snapshot, assembly.gang.collectives, mark=new))
    assert assembly.writer is not None, "a run without snapshots chooses none"
    assembly.writer.restored(None if new else snapshot.name)
    if start.salvage and start.snapshot:
        extra = {"step": start.snapshot.step, "stored_ranks": list(start.salvage.ranks)}
        logger.warning("partial restore: lost shards use an older step", extra=extra)
    logger.info("snapshot restored", extra={"step": snapshot.step, "snapshot": snapshot.uri})
    held_step = None if new else snapshot.step
    return Restored(attempt=start.attempt, step=snapshot.step, held_step=held_step, metrics=snapshot.meta.metrics)


def _check_settings(assembly: Assembly, chosen: Chosen, step: int, total_steps: int) -> None:
    """Say which settings changed since the snapshot; refuse to pass its model off as one trained with these."""
    changed = "; ".join(chosen.start.changed)
    if changed and step >= total_steps:
        raise InvalidSpecError(
            "spec.checkpoint.uri",
            f"the run in {chosen.store.uri} finished at step {step:,} with other settings, so nothing was trained with "
            f"these ({changed}); set another URI to start over (--set spec.checkpoint.uri=URI), or train longer to "
            f"continue from it with these settings (--set spec.training.maxSteps=N, N above {step})",
        )
    if assembly.gang.rank:
        return
    if changed:
        assembly.board.note(f"continuing from step {step:,} with other settings than before: {changed}")
    elif step >= total_steps:
        assembly.board.note(f"nothing to train: {chosen.store.uri} already holds step {step:,}, the job's last")


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
        shards = assembly.learner.embeddings.shards
        snapshot = open_together(other, assembly.gang.collectives, name, shards)
        _check_model(assembly, snapshot)
        left = restore(assembly.learner, snapshot, assembly.gang.collectives, mark=True, begins=True)
        _note_left(assembly, left)
    logger.info("starting from step 0 with the model of another job", extra={"snapshot": snapshot.uri})


def _check_model(assembly: Assembly, snapshot: Snapshot) -> bool:
    """Check that a snapshot is of this model; return whether a table has another number of rows."""
    spec = assembly.job.spec
    model = model_document(spec, assembly.learner)
    return check_model(snapshot.meta, snapshot.last_rows(), model, spec.model.all_tables(), snapshot.uri)


def _note_left(assembly: Assembly, left: Counter[str]) -> None:
    for table, count in left.items() if assembly.gang.rank == 0 else ():
        assembly.board.note(f"table {table}: {count:,} rows of the snapshot do not fit into its rows and left it")


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
