"""How a rank gets ready to train: its way to the checkpointer, and the state of the newest snapshot."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter

from dlrm_api.errors import NoInputError, SnapshotError, TemporaryError
from dlrm_api.job import DLRMJob
from dlrm_api.plan import Plan
from dlrm_checkpointer.cut import SnapshotName
from dlrm_checkpointer.format.chain import load_chain
from dlrm_checkpointer.format.fetch import Check
from dlrm_checkpointer.format.manifest import manifest_key
from dlrm_checkpointer.hand_off.writer import HandOffWriter
from dlrm_checkpointer.reading.restore import Snapshot, newest_snapshot
from dlrm_stores.base import FieldNames, ObjectStore, StoreOptions, open_store
from dlrm_trainer.cutting import snapshots
from dlrm_trainer.cutting.compatible import check_data, check_model, first_change
from dlrm_trainer.cutting.cuts import CutControl
from dlrm_trainer.cutting.verifying import choose_together
from dlrm_trainer.data import Reader
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.rendezvous import Gang
from dlrm_trainer.embedding import Placement
from dlrm_trainer.learner import Learner
from dlrm_trainer.metrics.progress import Observer, ProgressBoard
from dlrm_trainer.settings import Settings

logger = logging.getLogger(__name__)

RESTORE_FROM_FIELDS = FieldNames(uri="spec.checkpoint.restoreFrom")
DIGEST = TypeAdapter(str)
FINGERPRINT = TypeAdapter(dict[str, Any])
CHANGE = TypeAdapter[str | None](str | None)
CHOSEN = TypeAdapter[tuple[SnapshotName | None, list[str]]](tuple[SnapshotName | None, list[str]])


def open_writer(stack: ExitStack, job: DLRMJob, plan: Plan, settings: Settings, rank: int) -> HandOffWriter | None:
    """The rank's way to the checkpointer, which learns at the end why the rank left; None: no snapshots are taken."""
    if settings.handoff_dir is None:
        logger.warning("no hand-off folder: training without snapshots")
        return None
    budget = job.spec.checkpoint.handoff_budget
    if budget is None and settings.replica < len(plan.handoff_bytes):
        budget = plan.handoff_bytes[settings.replica]
    writer = HandOffWriter(settings.handoff_dir, rank, budget or None, job.spec.trainer.processes_per_replica)
    threading.Thread(target=writer.touch, name="touch hand-off", daemon=True).start()

    def close(kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        writer.close(f"{kind.__name__}: {error}" if kind else "ended", failed=kind is not None)

    stack.push(close)
    return writer


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """What one rank's training is made of."""

    job: DLRMJob
    settings: Settings
    gang: Gang
    control: CutControl
    board: ProgressBoard
    placement: Placement
    reader: Reader
    eval_reader: Reader
    learner: Learner
    writer: HandOffWriter | None
    observer: Observer


def agree_on_data(collectives: Collectives, fingerprint: Mapping[str, Any]) -> None:
    """Check that all ranks found the same data: else they would train on other samples than those of their batches.

    Args:
        collectives: of all ranks.
        fingerprint: of all that this rank found.

    Raises:
        TemporaryError: on every rank; names what one found otherwise than rank 0.
    """
    digest = hashlib.sha256(json.dumps(fingerprint).encode()).hexdigest()
    if len(set(collectives.gather(digest, DIGEST))) == 1:
        return
    first = collectives.broadcast(dict(fingerprint) if collectives.rank == 0 else None, FINGERPRINT)
    changes = collectives.gather(first_change(first, fingerprint, "data"), CHANGE)
    rank, change = next((rank, change) for rank, change in enumerate(changes) if change)
    raise TemporaryError(
        f"rank {rank} found other data than rank 0: {change}; files came, went or changed while ranks started: they "
        "are listed anew at the next start, so give URIs whose files stay"
    )


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What training goes on from."""

    attempt: int = 0
    """The store's number of this attempt."""
    step: int = 0
    """Steps done."""
    held_step: int | None = None
    """Step whose state, as it is now, a snapshot of the job's store holds; None: none does."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Of the snapshot: loss of its last step, last evaluation."""


def restore_newest(assembly: Assembly) -> Restored:
    """Fill the learner from the newest snapshot that can be used, and say which one that is and why not a newer one.

    Raises:
        SnapshotError: none can be used, none is there though the job committed one, or it is of another model or of
            other data.
        NoInputError: there is none, and none in ``restoreFrom``.
    """
    spec = assembly.job.spec
    checkpoint = spec.checkpoint
    if assembly.writer is None:
        return Restored()
    options = StoreOptions(s3=checkpoint.s3, credentials_dir=assembly.settings.credentials_dir)
    store = open_store(checkpoint.uri, options)
    note = f"{assembly.job.metadata.name}, attempt {assembly.settings.attempt}"
    start = snapshots.choose_start(
        store,
        assembly.gang.collectives,
        note,
        partial=checkpoint.partial_restore,
        committed=assembly.settings.committed_snapshot,
    )
    for reason in start.reasons:
        logger.warning("snapshot passed over", extra={"problem": reason})
    assembly.board.update(passed_over_snapshots=len(start.reasons))
    snapshot = snapshots.open_start(store, start)
    if snapshot is None:
        if checkpoint.restore_from is not None:
            begin_from(assembly, checkpoint.restore_from, options)
        else:
            logger.info("no snapshot is there: starting from step 0", extra={"store": store.uri})
        return Restored(attempt=start.attempt)
    check_data(snapshot.meta, assembly.reader.fingerprint, snapshot.uri)
    model = snapshots.model_document(spec, assembly.learner)
    resized = check_model(snapshot.meta, snapshot.last_rows(), model, spec.model.all_tables(), snapshot.uri)
    new = resized or start.salvage is not None  # a state that no snapshot holds
    snapshots.restore(assembly.learner, snapshot, assembly.gang.collectives, mark=new)
    assembly.writer.restored(None if new else snapshot.name)
    if start.salvage and start.snapshot:
        told = {"step": start.snapshot.step, "stored_ranks": list(start.salvage.ranks)}
        logger.warning("rows of lost ranks are of an older step", extra=told)
    logger.info("snapshot restored", extra={"step": snapshot.step, "snapshot": snapshot.uri})
    return Restored(
        attempt=start.attempt,
        step=snapshot.step,
        held_step=None if new else snapshot.step,
        metrics=snapshot.meta.metrics,
    )


def begin_from(assembly: Assembly, uri: str, options: StoreOptions) -> None:
    """Take rows, dense parameters and optimizer state of another job's newest snapshot; steps and data begin anew.

    Raises:
        NoInputError: there is none.
        SnapshotError: it can't be used, or is of another model.
        TemporaryError: the other job, which may live, retired it meanwhile.
    """
    other = open_store(uri, replace(options, fields=RESTORE_FROM_FIELDS))

    def choose(check: Check) -> tuple[SnapshotName | None, list[str]]:
        newest, reasons = newest_snapshot(other, check=check)
        return None if newest is None else newest.name, reasons

    name, reasons = choose_together(other, assembly.gang.collectives, choose, CHOSEN)
    for reason in reasons:
        logger.warning("snapshot passed over", extra={"problem": reason})
    if name is None:
        raise NoInputError(f"spec.checkpoint.restoreFrom: {other.uri} holds no snapshot: mend the URI or leave it out")
    with _unless_retired(other, name):
        snapshot = Snapshot(other, load_chain(other, name))
        spec = assembly.job.spec
        model = snapshots.model_document(spec, assembly.learner)
        check_model(snapshot.meta, snapshot.last_rows(), model, spec.model.all_tables(), snapshot.uri)
        snapshots.restore(assembly.learner, snapshot, assembly.gang.collectives, mark=True)
    logger.info("starting from step 0 with the model of another job", extra={"snapshot": snapshot.uri})


@contextlib.contextmanager
def _unless_retired(store: ObjectStore, name: SnapshotName) -> Iterator[None]:
    """Say of what went wrong in the block whether the snapshot is gone: no announcement keeps it, as it does our own.

    Raises:
        TemporaryError: it is gone; the next attempt chooses a newer one.
    """
    try:
        yield
    except (SnapshotError, NoInputError) as error:
        if store.size(manifest_key(name.step, name.attempt)) is not None:
            raise
        raise TemporaryError(
            f"spec.checkpoint.restoreFrom: {store.uri}: the snapshot of step {name.step} was retired while it was "
            "read: running again chooses a newer one"
        ) from error
