"""Which snapshots go, and how they go without a reader or a writer noticing."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.attempts import (
    RETIRED,
    StoreAttempt,
    in_lineage,
    is_claimed,
    newest_attempt,
    read_attempts,
)
from dlrm_checkpointer.format.canonical import NewerVersionError
from dlrm_checkpointer.format.manifest import (
    CHUNKS,
    MANIFESTS,
    PARTS,
    cut_prefix,
    manifest_key,
    parse_cut_key,
    parse_manifest,
)
from dlrm_checkpointer.read.restore import open_snapshot, snapshot_keys
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores import ObjectStore
from dlrm_stores.base import ObjectInfo

MARK_BYTES = 8


class KeySet:
    """Keys, eight bytes of each one's hash: another key is among them by a chance of their number in 2**64."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._marks = np.fromiter(map(_key_hash, keys), np.uint64)
        self._marks.sort()

    def __len__(self) -> int:
        return len(self._marks)

    def __contains__(self, key: str) -> bool:
        mark = np.uint64(_key_hash(key))
        place = int(np.searchsorted(self._marks, mark))
        return place < len(self._marks) and bool(self._marks[place] == mark)

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self._marks.nbytes


def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=MARK_BYTES).digest())


logger = logging.getLogger(__name__)

ABANDONED_UPLOAD_S = 24 * 3_600
"""Unfinished uploads older than this have no writer any more."""
ORPHAN_S = 3_600.0
"""Objects without a manifest stay for so long, by the store's clock: somebody may be looking into what happened."""
SWEEPS = 6
"""Within the time that objects without a manifest stay, how often they are looked for."""
REST_SHARE = 20
"""Where that takes long, it is not done again for so many times as long, but within that time: no cut is stored
meanwhile."""
DELETE_BATCH = 1_000
"""Objects that are removed together, and keys of a listing that are in memory."""
NONE = KeySet(())


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """What the job asks to be kept."""

    keep_last: int
    """Newest snapshots of the lineage."""
    keep_every_s: float | None = None
    """Beside them the newest of each period of this length, counted from 1970."""
    orphan_s: float = ORPHAN_S


@dataclass(frozen=True, kw_only=True)
class StoredSnapshot:
    """A manifest that is there."""

    name: SnapshotName
    time: float = 0.0
    """Of the cut (Unix seconds)."""
    below: tuple[SnapshotName, ...] = ()
    """Its chain."""
    objects: KeySet = NONE
    """Keys of its own objects."""
    readable: bool = True
    """Whether it can be read, and is known to lack no object where that was looked for."""
    newer: str = ""
    """What is said of the newer version that wrote it; empty where none did."""


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """What retention does with the manifests that are there."""

    keep: tuple[SnapshotName, ...]
    """For themselves, newest first."""
    needed: frozenset[SnapshotName]
    """Below these, or below cuts that are on their way."""
    retire: tuple[SnapshotName, ...]


def decide(
    found: Iterable[StoredSnapshot],
    attempts: Sequence[StoreAttempt],
    rule: RetentionPolicy,
    in_use: Iterable[SnapshotName],
) -> RetentionPlan:
    """Keep what the rule says of the lineage, of each step the newest attempt's, with all chains; retire the rest.

    What can't be read counts for nothing and stays, with its chain: something may mend it.

    Args:
        found: every manifest.
        attempts: all.
        rule: of the job.
        in_use: snapshots that cuts on their way are relative to.
    """
    newest_first = sorted(found, key=lambda each: each.name, reverse=True)
    keep: dict[int, StoredSnapshot] = {}
    periods: set[int] = set()
    for each in newest_first:
        name = each.name
        if not each.readable or name.step in keep or not in_lineage(name.step, name.attempt, attempts):
            continue
        period = None if rule.keep_every_s is None else int(each.time // rule.keep_every_s)
        if len(keep) < rule.keep_last or (period is not None and period not in periods):
            keep[name.step] = each
        if period is not None:
            periods.add(period)
    used = set(in_use)
    held = [*keep.values(), *(each for each in newest_first if each.name in used or not each.readable)]
    kept = tuple(each.name for each in keep.values())
    needed = frozenset(used.union(*(each.below for each in held))) - set(kept)
    stay = {*kept, *needed, *(each.name for each in newest_first if not each.readable)}
    return RetentionPlan(
        keep=kept, needed=needed, retire=tuple(each.name for each in newest_first if each.name not in stay)
    )


def is_orphan(cut: SnapshotName, newest: Sequence[SnapshotName], attempts: Sequence[StoreAttempt]) -> bool:
    """Whether objects of a cut that belong to no manifest can go: no live writer may still make a snapshot of them.

    A cut newer than the oldest of the newest snapshots may still be on its way, unless its attempt was given up before
    it.

    Args:
        cut: what the objects are of.
        newest: as many as the rule keeps at least; those that stay for their period are no measure.
        attempts: all.
    """
    return bool(newest) and (cut.step < min(newest).step or not in_lineage(cut.step, cut.attempt, attempts))


class Retention:
    """Applies a rule to a store again and again; it remembers manifests and attempts, which never change.

    Args:
        store: the job's store.
        rule: of the job.
        present: whether a snapshot counts only where all its objects and those of its chain are there, which costs
            listings of them.
    """

    def __init__(self, store: ObjectStore, rule: RetentionPolicy, *, present: bool = False) -> None:
        self._store, self._rule, self._present = store, rule, present
        self._known: dict[SnapshotName, StoredSnapshot] = {}
        self._attempts: dict[int, StoreAttempt] = {}
        self._lacking: frozenset[SnapshotName] = frozenset()
        """Snapshots of whose own objects the last sweep did not see all."""
        self._next_sweep = float("-inf")
        """By the clock; in the past while something that was to go may be left."""

    def decide(self, in_use: Iterable[SnapshotName] = ()) -> RetentionPlan:
        """What would go now; nothing is removed.

        Raises:
            NewerVersionError: see ``apply``.
        """
        attempts = self._read_attempts()
        return decide(self._found(attempts), attempts, self._rule, in_use)

    def apply(self, attempt: int, in_use: Iterable[SnapshotName] = ()) -> int:
        """Remove what the rule doesn't keep, and orphans; return how many snapshots went. Safe to repeat or cut off.

        Of a snapshot that goes its own folders are listed. Orphans are looked for every now and then, in a listing of
        all objects.

        Only the newest attempt removes anything, once it is sure of the snapshot that it goes on from: while it is
        pending, it may have looked for marks already. A snapshot is marked as retired before the attempts are read
        again, and a new attempt looks for the mark after it announced itself: one of the two sees the other, so a
        snapshot that a new attempt goes on from is never removed. The part lists go first, so that no sidecar commits
        them anew, then the manifest, then its objects.

        Args:
            attempt: on whose behalf.
            in_use: snapshots that cuts on their way are relative to.

        Raises:
            NewerVersionError: a newer version wrote a snapshot of the lineage: which others that goes over can't be
                known, so nothing is removed.
        """
        store = self._store
        if newest_attempt(store) != attempt:
            return 0
        attempts = self._read_attempts()
        if not is_claimed(attempt, attempts):
            return 0
        found = self._found(attempts)
        decision = decide(found, attempts, self._rule, in_use)
        is_due = time.monotonic() >= self._next_sweep
        if not decision.retire and not is_due:
            return 0
        next_sweep, self._next_sweep = self._next_sweep, float("-inf")  # until all of it is done
        for name in decision.retire:
            store.put(_mark(name), b"")
        if newest_attempt(store) != attempt:
            store.delete_all([_mark(name) for name in decision.retire])
            return 0
        self._retire(decision.retire)
        if is_due:
            next_sweep = self._sweep([each for each in found if each.name not in decision.retire], decision, attempts)
        store.delete_all([info.key for info in store.list(RETIRED)])
        self._next_sweep = next_sweep
        if decision.retire:
            logger.info("snapshots retired", extra={"steps": [name.step for name in decision.retire]})
        return len(decision.retire)

    def lacking(self, name: SnapshotName) -> SnapshotName | None:
        """Which of a snapshot and those below it lacks an object, as far as sweeps saw; None: none does."""
        found = self._known.get(name)
        chain = (*found.below, name) if found else ()
        return next((each for each in chain if each in self._lacking), None)

    def _retire(self, names: Sequence[SnapshotName]) -> None:
        """Remove snapshots that are marked, newest first."""
        store = self._store
        parts = [info.key for name in names for info in store.list(cut_prefix(PARTS, name.step, name.attempt))]
        if parts:
            store.delete_all(parts)
        for name in names:  # one after the other: none is ever there without those below it
            store.delete(manifest_key(name.step, name.attempt))
            self._known.pop(name, None)
        for name in names:
            self._remove(info.key for info in store.list(cut_prefix(CHUNKS, name.step, name.attempt)))

    def _remove(self, keys: Iterable[str]) -> None:
        """Remove objects of a listing while it goes on."""
        rest = iter(keys)
        while some := list(islice(rest, DELETE_BATCH)):
            self._store.delete_all(some)

    def _read_attempts(self) -> list[StoreAttempt]:
        attempts = read_attempts(self._store, 0, self._attempts)
        self._attempts = {each.number: each for each in attempts}
        return attempts

    def _found(self, attempts: Sequence[StoreAttempt]) -> list[StoredSnapshot]:
        found = [self._known.get(name) or self._read(name) for name in self._names()]
        for each in found:
            if each.newer and in_lineage(each.name.step, each.name.attempt, attempts):
                raise NewerVersionError(f"{self._store.uri}: {each.newer}; nothing is removed meanwhile")
        self._known = {each.name: each for each in found if each.readable}
        return found

    def _names(self) -> list[SnapshotName]:
        return [SnapshotName(step, attempt) for step, attempt in snapshot_keys(self._store)]

    def _read(self, name: SnapshotName) -> StoredSnapshot:
        key = manifest_key(name.step, name.attempt)
        try:
            manifest = parse_manifest(self._store.get(key), key)
        except (SnapshotError, NoInputError) as error:
            logger.warning("manifest can't be read: it stays", extra={"key": key, "problem": str(error)})
            return StoredSnapshot(
                name=name, readable=False, newer=str(error) if isinstance(error, NewerVersionError) else ""
            )
        return StoredSnapshot(
            name=name,
            time=manifest.cut.time,
            below=tuple(link.name for link in manifest.chain),
            objects=KeySet(entry.key for entry in manifest.objects),
            readable=not self._present or self._is_present(name),
        )

    def _is_present(self, name: SnapshotName) -> bool:
        try:
            open_snapshot(self._store, name.step, name.attempt)
        except (SnapshotError, NoInputError) as error:
            logger.warning("snapshot lacks something: it stays", extra={"step": name.step, "problem": str(error)})
            return False
        return True

    def _sweep(
        self, found: Sequence[StoredSnapshot], decision: RetentionPlan, attempts: Sequence[StoreAttempt]
    ) -> float:
        """Remove old objects of no manifest, and uploads that nobody finishes; returns when to look for them again.

        Manifests whose objects are not all in the listing are remembered.

        Args:
            found: every manifest that is left.
            decision: on these.
            attempts: all.
        """
        store, began = self._store, time.monotonic()
        there = {each.name: each for each in found}
        newest = decision.keep[: self._rule.keep_last]
        missing = {each.name: len(each.objects) for each in found}
        now = max((info.modified for info in store.list(MANIFESTS)), default=0.0)

        def goes(info: ObjectInfo) -> bool:
            nonlocal now
            now = max(now, info.modified)
            name = parse_cut_key(info.key)
            if name is None:
                return False
            is_own = name in there and info.key in there[name].objects
            if is_own:
                missing[name] -= 1
            if is_own or now - info.modified < self._rule.orphan_s:
                return False
            if name in there:
                return there[name].readable and info.key.startswith(CHUNKS)
            return is_orphan(name, newest, attempts)

        for kind in (PARTS, CHUNKS):
            self._remove(info.key for info in store.list(kind) if goes(info))
        self._lacking = frozenset(name for name, count in missing.items() if count)
        store.sweep_uploads(ABANDONED_UPLOAD_S)
        ended, rest = time.monotonic(), self._rule.orphan_s
        return ended + max(rest / SWEEPS, min(rest, (ended - began) * REST_SHARE))


def _mark(name: SnapshotName) -> str:
    return RETIRED + manifest_key(name.step, name.attempt).removeprefix(MANIFESTS)
