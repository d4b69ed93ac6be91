"""Between the learner and the checkpointer: what a cut holds, and how training goes on from a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

from pydantic import TypeAdapter

from dlrm_api.errors import SnapshotError
from dlrm_api.job import DLRMJobSpec
from dlrm_checkpointer.coding.codes import CodedRows
from dlrm_checkpointer.coding.digest import Partial, add, combine, shard_digest, state_digest
from dlrm_checkpointer.cut import SnapshotName
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.chain import load_chain
from dlrm_checkpointer.format.fetch import Check
from dlrm_checkpointer.reading.restore import Snapshot, newest_snapshot
from dlrm_checkpointer.reading.salvage import Salvage, find_salvage, open_salvage
from dlrm_stores.base import ObjectStore
from dlrm_trainer.cutting.verifying import choose_together
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import InStep
from dlrm_trainer.embedding.rows import LocalPart, table_meta
from dlrm_trainer.learner import Learner


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where an attempt starts from; the same on every rank."""

    attempt: int
    """The store's number of this attempt."""
    snapshot: SnapshotName | None
    """None: from the beginning."""
    reasons: tuple[str, ...]
    """Why newer snapshots were passed over."""
    salvage: Salvage | None = None
    """A newer cut whose parts are restored over the snapshot."""


START = TypeAdapter(Start)
PARTIALS = TypeAdapter(dict[str, Partial])


def choose_start(
    store: ObjectStore, collectives: Collectives, note: str, *, partial: bool = False, committed: str
) -> Start:
    """Choose the newest snapshot that verifies and announce an attempt that goes on from it; rank 0 does it for all.

    All ranks read what it verifies, a share each.

    Args:
        store: the job's store.
        collectives: of all ranks.
        note: who claims, for people.
        partial: whether a newer cut may be used of which parts are missing.
        committed: URI of the manifest of a snapshot that the job is known to have committed; empty where none is known.

    Raises:
        SnapshotError: on rank 0: snapshots are there and none of them can be used, or the store holds none and no word
            of one though the job committed one there. Nothing is announced.
        PeerLostError: on the others, then.
    """

    def choose(check: Check) -> Start:
        snapshot, reasons = newest_snapshot(store, check=check)
        if snapshot is None and committed.startswith(f"{store.uri}/"):
            raise SnapshotError(
                f"{store.uri}: no snapshot is there, and the job committed {committed}: bring back what was there (is "
                "the right folder mounted?), or give another spec.checkpoint.uri to start from step 0"
            )
        salvage = find_salvage(store, snapshot, check) if partial and snapshot else None
        name = None if snapshot is None else snapshot.name
        attempt = claim_attempt(store, None if name is None else name.step, note)
        return Start(attempt=attempt, snapshot=name, reasons=tuple(reasons), salvage=salvage)

    return choose_together(store, collectives, choose, START)


def open_start(store: ObjectStore, start: Start) -> Snapshot | None:
    """The snapshot that ``choose_start`` chose, with the parts of a newer cut over it where there are any."""
    if start.snapshot is None:
        return None
    snapshot = Snapshot(store, load_chain(store, start.snapshot))  # its objects were all read just now
    return open_salvage(store, snapshot, start.salvage) if start.salvage else snapshot


def model_document(spec: DLRMJobSpec, learner: Learner) -> dict[str, Any]:
    """What a snapshot says of the model, and what one must agree with to be restored."""
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
    """Take a snapshot over a learner that has just started; at 32 bits every byte is as it was.

    Returns on all ranks when it is done on all of them: some have many times the rows of others.

    Args:
        learner: at its start.
        snapshot: of the same model.
        collectives: of all ranks, each of which calls this.
        mark: whether the next cut is to hold every row of it: it can't be a cut's parent, because it is of another
            store, its tables have other sizes, or it is no snapshot but parts of one.

    Raises:
        SnapshotError: an object is absent or corrupt.
        PeerLostError: a rank is gone.
    """
    learner.embeddings.settle()
    in_step = InStep(collectives)
    parts = list(learner.embeddings.local)
    codes = snapshot.shard_codes([part.shard for part in parts])
    for number, group in groupby(codes, key=itemgetter(0)):
        pieces = (piece for _, piece in in_step.over(group))
        parts[number].restore(_recorded(parts[number], pieces, mark=mark))
    learner.dense.restore(snapshot.dense())
    in_step.wait()


def _recorded(part: LocalPart, pieces: Iterable[CodedRows], *, mark: bool) -> Iterator[CodedRows]:
    """The pieces; their rows are changed, or held by the snapshot."""
    record = part.dirty.mark if mark else part.dirty.store
    for piece in pieces:
        record(piece.row_ids - part.shard.row_start)
        yield piece


def live_digest(learner: Learner, collectives: Collectives) -> str:
    """Digest of the whole logical state in memory, on every rank; equal to that of a snapshot at 32 bits."""
    learner.embeddings.settle()
    mine: dict[str, list[Partial]] = {}
    for part in learner.embeddings.saved:
        meta = table_meta(part.table, 0, learner.row_optimizer)  # the seed is no part of a digest
        mine.setdefault(meta.name, []).append(shard_digest(meta, part.shard, part.read_block))
    partials: dict[str, list[Partial]] = {}
    for found in collectives.gather({name: add(each) for name, each in mine.items()}, PARTIALS):
        for name, partial in found.items():
            partials.setdefault(name, []).append(partial)
    return state_digest([(name, combine(each)) for name, each in partials.items()], learner.dense.arrays())
