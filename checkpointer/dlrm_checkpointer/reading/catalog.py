"""What is in a store, for people: ``dlrmctl snapshots``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.attempts import in_lineage, read_attempts
from dlrm_checkpointer.format.manifest import MANIFESTS, Manifest, parse_manifest, parse_manifest_key
from dlrm_checkpointer.format.sealing import NewerVersionError
from dlrm_checkpointer.reading.restore import Snapshot, given_up, open_snapshot
from dlrm_checkpointer.reading.table_blocks import walk_table
from dlrm_stores.base import ObjectStore


@dataclass(frozen=True, kw_only=True)
class Listed:
    """One manifest of a store."""

    step: int
    attempt: int
    uri: str
    """URI of the manifest."""
    time: float
    """When it was committed, by the store's clock (Unix seconds)."""
    manifest: Manifest | None
    """None where it can't be read."""
    problem: str
    """Why it will not be restored from; empty where it can be (its objects were not read)."""
    counts: bool = True
    """Whether it is of the lineage; False: a later attempt went on from before it, and nothing goes back to it."""
    newer: bool = False
    """Whether it is of the lineage and a newer version wrote it: what is older is not restored from unasked."""

    @property
    def damaged(self) -> bool:
        """Whether it should be usable and is not."""
        return self.counts and bool(self.problem)

    @property
    def bytes(self) -> int:
        """Bytes of its own objects."""
        return self.manifest.total_bytes if self.manifest else 0


@dataclass(frozen=True, kw_only=True)
class Verified:
    """What reading a whole snapshot found."""

    step: int
    attempt: int
    objects: int
    bytes: int
    rows: dict[str, int]
    """Stored rows of each table; the others have their initial values."""


def list_snapshots(store: ObjectStore) -> list[Listed]:
    """Every manifest, newest first, also those that will not be restored from, with the reason. Reads no objects."""
    infos = {parse_manifest_key(info.key): info for info in store.list(MANIFESTS)}
    keys = sorted((key for key in infos if key), reverse=True)
    attempts = read_attempts(store, min((attempt for _, attempt in keys), default=0)) if keys else []
    found = []
    for step, attempt in keys:
        info = infos[step, attempt]
        manifest, problem, newer = _read(store, info.key)
        counts = in_lineage(step, attempt, attempts)
        if not problem and not counts:
            problem = given_up(step, attempt, attempts)
        found.append(
            Listed(
                step=step,
                attempt=attempt,
                uri=f"{store.uri}/{info.key}",
                time=info.modified,
                manifest=manifest,
                problem=problem,
                counts=counts,
                newer=newer and counts,
            )
        )
    return found


def find_snapshot(store: ObjectStore, step: int | None = None, attempt: int | None = None) -> Snapshot:
    """Open one snapshot: the newest usable one of the lineage, or of those with this step or attempt.

    Raises:
        NoInputError: there is none; says which steps there are.
        NewerVersionError: none is named, and a newer version wrote the newest.
        SnapshotError: there is one and it can't be used.
    """
    return pick_snapshot(store, list_snapshots(store), step, attempt)


def pick_snapshot(
    store: ObjectStore, listed: Sequence[Listed], step: int | None = None, attempt: int | None = None
) -> Snapshot:
    """Open one snapshot of a listing, as ``find_snapshot`` does; where none is named, those before it are unusable.

    Raises:
        NoInputError: see ``find_snapshot``.
        SnapshotError: see ``find_snapshot``.
    """
    wanted = [
        each for each in listed if (step is None or each.step == step) and (attempt is None or each.attempt == attempt)
    ]
    usable = [each for each in wanted if not each.problem or attempt is not None]
    newest = next((each for each in listed if each.newer or not each.problem), None)
    if usable and newest and newest.newer and step is None and attempt is None:
        raise NewerVersionError(f"{store.uri}: {newest.problem}, or name an older snapshot: step {usable[0].step}")
    if usable:
        return open_snapshot(store, usable[0].step, usable[0].attempt)
    if wanted:
        raise SnapshotError(f"{wanted[0].uri}: {wanted[0].problem}")
    steps = ", ".join(str(number) for number in sorted({each.step for each in listed})) or "none"
    what = "no snapshot" if step is None else f"no snapshot of step {step}"
    raise NoInputError(f"{store.uri}: {what} is there (steps: {steps})")


def verify_snapshot(snapshot: Snapshot) -> Verified:
    """Read every byte of a snapshot once and check it: checksums, form, every row at most once, finite values.

    Raises:
        SnapshotError: names the object, or the table and the row.
    """
    rows = {table.name: sum(block.check() for block in walk_table(snapshot, table)) for table in snapshot.meta.tables}
    for name, array in snapshot.dense().items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SnapshotError(f"{snapshot.uri}: dense {name} holds a value that is not finite")
    objects = snapshot.objects
    return Verified(
        step=snapshot.step,
        attempt=snapshot.attempt,
        objects=len(objects),
        bytes=sum(entry.bytes for entry in objects),
        rows=rows,
    )


def _read(store: ObjectStore, key: str) -> tuple[Manifest | None, str, bool]:
    """A manifest, or why it can't be read and whether that is for a newer version."""
    try:
        return parse_manifest(store.get(key), key), "", False
    except (SnapshotError, NoInputError) as error:
        return None, str(error), isinstance(error, NewerVersionError)
