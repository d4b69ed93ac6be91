"""Between the learner and the checkpointer: what a cut holds, and how training goes on from a snapshot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlrm_api.errors import SnapshotError
from dlrm_api.job import DLRMJobSpec
from dlrm_checkpointer.cut import CutMeta, ShardRows, TableMeta
from dlrm_checkpointer.digest import Partial, add, combine, shard_digest, state_digest
from dlrm_checkpointer.restore import Snapshot, claim_attempt, newest_snapshot, open_snapshot
from dlrm_checkpointer.store import ObjectStore
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.embedding.rows import LocalPart, table_meta
from dlrm_trainer.learner import Learner


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where an attempt starts from; the same on every rank."""

    attempt: int
    """The store's number of this attempt."""
    step: int | None
    """Step of the snapshot; None: from the beginning."""
    snapshot_attempt: int | None
    """Attempt that wrote it."""
    reasons: tuple[str, ...]
    """Why newer snapshots were passed over."""


def choose_start(store: ObjectStore, collectives: Collectives, note: str) -> Start:
    """Choose the newest snapshot that verifies and announce an attempt that goes on from it; rank 0 does it for all.

    Raises:
        SnapshotError: snapshots are there and none of them can be used.
    """
    start = None
    if collectives.rank == 0:
        snapshot, reasons = newest_snapshot(store)
        step = None if snapshot is None else snapshot.step
        start = Start(
            attempt=claim_attempt(store, step, note),
            step=step,
            snapshot_attempt=None if snapshot is None else snapshot.attempt,
            reasons=tuple(reasons),
        )
    return collectives.broadcast(start)


def open_start(store: ObjectStore, start: Start) -> Snapshot | None:
    """The snapshot that ``choose_start`` chose."""
    if start.step is None or start.snapshot_attempt is None:
        return None
    return open_snapshot(store, start.step, start.snapshot_attempt)


def model_document(spec: DLRMJobSpec, learner: Learner) -> dict[str, Any]:
    """What a snapshot says of the model, and what one must agree with to be restored."""
    seed, optimizer = spec.training.seed, spec.training.row_optimizer.kind
    return {
        "tables": [table_meta(table, seed, optimizer).to_json() for table in spec.model.all_tables()],
        "dense": learner.dense.shapes(),
        "interaction": spec.model.interaction,
        "denseFeatures": list(spec.model.dense_features),
        "rowOptimizer": optimizer,
        "denseOptimizer": spec.training.dense_optimizer.kind,
    }


def check_unchanged(meta: CutMeta, model: Mapping[str, Any], fingerprint: Mapping[str, Any], where: str) -> None:
    """Refuse a snapshot of another model or of other data.

    Raises:
        SnapshotError: names the table, parameter or part of the data that changed.
    """
    mend = "undo the change, or give another spec.checkpoint.uri to start from step 0"
    if change := _model_change(meta.model, model):
        raise SnapshotError(f"{where}: the model changed since the snapshot: {change}; {mend}")
    if change := first_change(meta.reader.get("fingerprint", {}), fingerprint, "data"):
        raise SnapshotError(f"{where}: the data changed since the snapshot: {change}; {mend}")


def _model_change(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    if change := first_change(then.get("rowOptimizer"), now.get("rowOptimizer"), "model.rowOptimizer"):
        return change  # before the tables' state, which changes with it
    old = {table["name"]: table | TableMeta.from_json(table).to_json() for table in then.get("tables", ())}
    new = {table["name"]: table for table in now["tables"]}
    if odd := sorted(old.keys() ^ new.keys()):
        return f"table {odd[0]} is {'gone' if odd[0] in old else 'new'}"
    for name, table in new.items():
        if change := first_change(old[name], table, f"table {name}"):
            return change
    if list(old) != list(new):
        return "the order of the tables"
    rest_then = {key: value for key, value in then.items() if key != "tables"}
    rest_now = {key: value for key, value in now.items() if key != "tables"}
    return first_change(rest_then, rest_now, "model")


def first_change(then: Any, now: Any, path: str) -> str | None:
    """The first place where two JSON documents differ, in words; None where they are equal."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted(then.keys() | now.keys()):
            if change := first_change(then.get(key), now.get(key), f"{path}.{key}"):
                return change
        return None
    if _is_list(then) and _is_list(now) and len(then) == len(now) and any(isinstance(each, Mapping) for each in now):
        changes = (first_change(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(then, now, strict=True)))
        return next((change for change in changes if change), None)
    return None if json.dumps(then) == json.dumps(now) else f"{path} was {_short(then)} and is {_short(now)}"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def restore(learner: Learner, snapshot: Snapshot, *, mark: bool = False) -> None:
    """Take a snapshot over a learner that has just started; at 32 bits every byte is as it was.

    Args:
        learner: at its start.
        snapshot: of the same model.
        mark: whether the next cut is to hold every row of it: it is of another store, and can't be a cut's parent.

    Raises:
        SnapshotError: an object is absent or corrupt.
    """
    learner.embeddings.settle()
    for part in learner.embeddings.local:
        pieces = snapshot.shard_rows(part.shard)
        part.restore(_marking(part, pieces) if mark else pieces)
    learner.dense.restore(snapshot.dense())


def _marking(part: LocalPart, pieces: Iterable[ShardRows]) -> Iterator[ShardRows]:
    for piece in pieces:
        part.dirty.mark(piece.row_ids - part.shard.row_start)
        yield piece


def live_digest(learner: Learner, collectives: Collectives) -> str:
    """Digest of the whole logical state in memory, on every rank; equal to that of a snapshot at 32 bits."""
    learner.embeddings.settle()
    mine: dict[str, list[Partial]] = {}
    for part in learner.embeddings.saved:
        meta = table_meta(part.table, 0, learner.row_optimizer)  # the seed is no part of a digest
        mine.setdefault(meta.name, []).append(shard_digest(meta, part.shard, part.read_block))
    partials: dict[str, list[Partial]] = {}
    for found in collectives.gather({name: add(each) for name, each in mine.items()}):
        for name, partial in found.items():
            partials.setdefault(name, []).append(partial)
    return state_digest([(name, combine(each)) for name, each in partials.items()], learner.dense.arrays())
