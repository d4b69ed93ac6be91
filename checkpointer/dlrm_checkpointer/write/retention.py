"""Decide which snapshots to delete, and delete them safely next to readers and writers."""

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
from dlrm_checkpointer.format.data_index import INDEXES, index_prefix
from dlrm_checkpointer.format.manifest import (
    CHUNKS,
    MANIFESTS,
    PARTS,
    NewerVersionError,
    cut_prefix,
    manifest_key,
    parse_cut_key,
    parse_manifest,
)
from dlrm_checkpointer.read.restore import open_snapshot, snapshot_keys
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores import ObjectStore
from dlrm_stores.base import ObjectInfo

logger = logging.getLogger(__name__)

HASH_BYTES = 8


class KeySet:
    """Hold keys as eight bytes of their hashes; n keys contain another one with probability n / 2**64."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = np.fromiter(map(_key_hash, keys), np.uint64)
        self._hashes.sort()

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, key: str) -> bool:
        value = np.uint64(_key_hash(key))
        place = int(np.searchsorted(self._hashes, value))
        return place < len(self._hashes) and bool(self._hashes[place] == value)

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""
        return self._hashes.nbytes


def _key_hash(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=HASH_BYTES).digest())


ABANDONED_UPLOAD_S = 24 * 3_600
"""Unfinished uploads older than this have no writer."""
ORPHAN_S = 3_600.0
"""Time that objects without a manifest stay, by the store's clock, for whoever investigates what happened."""
SWEEPS = 6
"""Number of searches for orphans within ``orphan_s``."""
SWEEP_PAUSE_FACTOR = 20
"""A search for orphans is followed by a pause this many times as long, at most ``orphan_s``: it blocks uploads."""
DELETE_BATCH = 1_000
"""Objects deleted together, and keys of a listing in memory."""
NONE = KeySet(())


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Hold what the job asks to be kept."""

    keep_last: int
    """Number of newest snapshots of the lineage."""
    keep_every_s: float | None = None
    """Also keep the newest of each period of this length, counted from 1970."""
    orphan_s: float = ORPHAN_S


@dataclass(frozen=True, kw_only=True)
class StoredSnapshot:
    """Describe a manifest in the store."""

    name: SnapshotName
    time: float = 0.0
    """Time of the cut (Unix seconds)."""
    below: tuple[SnapshotName, ...] = ()
    """Its chain."""
    objects: KeySet = NONE
    """Keys of its own objects."""
    readable: bool = True
    """Whether it can be read, and misses no object if that was checked."""
    newer: str = ""
    """The error if a newer version wrote it, else empty."""
    data_index: str = ""
    """Fingerprint of the index of its data; empty if it has none."""


@dataclass(frozen=True, kw_only=True)
class RetentionPlan:
    """State what retention does with the stored manifests."""

    keep: tuple[SnapshotName, ...]
    """Kept for themselves, newest first."""
    needed: frozenset[SnapshotName]
    """Kept because these, or cuts in flight, depend on them."""
    retire: tuple[SnapshotName, ...]


def decide(
    found: Iterable[StoredSnapshot],
    attempts: Sequence[StoreAttempt],
    policy: RetentionPolicy,
    in_use: Iterable[SnapshotName],
) -> RetentionPlan:
    """Keep what the policy wants of the lineage, newest attempt per step, with chains; retire the rest.

    A manifest that cannot be read does not count and stays, with its chain: it may become readable. ``in_use`` are the
    snapshots that cuts in flight are relative to.
    """
    newest_first = sorted(found, key=lambda each: each.name, reverse=True)
    keep: dict[int, StoredSnapshot] = {}
    periods: set[int] = set()
    for each in newest_first:
        name = each.name
        if not each.readable or name.step in keep or not in_lineage(name.step, name.attempt, attempts):
            continue
        period = None if policy.keep_every_s is None else int(each.time // policy.keep_every_s)
        if len(keep) < policy.keep_last or (period is not None and period not in periods):
            keep[name.step] = each
        if period is not None:
            periods.add(period)
    used = set(in_use)
    held = [*keep.values(), *(each for each in newest_first if each.name in used or not each.readable)]
    kept = tuple(each.name for each in keep.values())
    needed = frozenset(used.union(*(each.below for each in held))) - set(kept)
    stay = {*kept, *needed, *(each.name for each in newest_first if not each.readable)}
    retire = tuple(each.name for each in newest_first if each.name not in stay)
    return RetentionPlan(keep=kept, needed=needed, retire=retire)


def is_orphan(cut: SnapshotName, newest: Sequence[SnapshotName], attempts: Sequence[StoreAttempt]) -> bool:
    """Return whether no live writer can still turn a cut's unreferenced objects into a snapshot.

    A cut newer than the oldest of ``newest``, the ``keep_last`` newest snapshots without those kept for their period,
    may still be in flight, unless its attempt was abandoned before it.
    """
    return bool(newest) and (cut.step < min(newest).step or not in_lineage(cut.step, cut.attempt, attempts))


class Retention:
    """Apply a policy to a store repeatedly. It remembers manifests and attempts, which never change.

    With ``present`` a snapshot counts only if all objects of its chain exist, which costs listings.
    """

    def __init__(self, store: ObjectStore, policy: RetentionPolicy, *, present: bool = False) -> None:
        self._store, self._policy, self._present = store, policy, present
        self._known: dict[SnapshotName, StoredSnapshot] = {}
        self._attempts: dict[int, StoreAttempt] = {}
        self._incomplete: frozenset[SnapshotName] = frozenset()
        """Snapshots with own objects that the last sweep did not find."""
        self._next_sweep = float("-inf")
        """Monotonic time; in the past while something to delete may be left."""

    def decide(self, in_use: Iterable[SnapshotName] = ()) -> RetentionPlan:
        """Return what would be deleted now; delete nothing.

        Raises:
            NewerVersionError: see ``apply``.
        """
        attempts = self._read_attempts()
        return decide(self._found(attempts), attempts, self._policy, in_use)

    def apply(self, attempt: int, in_use: Iterable[SnapshotName] = ()) -> int:
        """Delete what the policy does not keep, and orphans; return the number of snapshots deleted.

        Safe to repeat or interrupt. Only the newest attempt deletes anything, and only once it is confirmed: while it
        is pending it may have looked for marks already. A snapshot is marked as retired before the attempts are read
        again, and a new attempt looks for the mark after it announced itself: one of the two sees the other, so a
        snapshot that a new attempt starts from is never deleted.

        Raises:
            NewerVersionError: a newer version wrote a snapshot of the lineage; what it depends on is unknown, so
                nothing is deleted.
        """
        store = self._store
        if newest_attempt(store) != attempt:
            return 0
        attempts = self._read_attempts()
        if not is_claimed(attempt, attempts):
            return 0
        found = self._found(attempts)
        decision = decide(found, attempts, self._policy, in_use)
        is_due = time.monotonic() >= self._next_sweep
        if not decision.retire and not is_due:
            return 0
        # Until all of it is done, the next call has to sweep.
        next_sweep, self._next_sweep = self._next_sweep, float("-inf")
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
        """Return the snapshot of a chain that misses an object, as far as sweeps saw, or None."""
        found = self._known.get(name)
        chain = (*found.below, name) if found else ()
        return next((each for each in chain if each in self._incomplete), None)

    def _retire(self, names: Sequence[SnapshotName]) -> None:
        """Delete marked snapshots, newest first.

        Part lists go first, so that no sidecar commits them again, then the manifest, then its objects. Only prefixes
        of these snapshots are listed; orphans are left to ``_sweep``.
        """
        store = self._store
        parts = [info.key for name in names for info in store.list(cut_prefix(PARTS, name.step, name.attempt))]
        if parts:
            store.delete_all(parts)
        # One after the other: no snapshot ever exists without those that it depends on.
        for name in names:
            store.delete(manifest_key(name.step, name.attempt))
            self._known.pop(name, None)
        for name in names:
            self._remove(info.key for info in store.list(cut_prefix(CHUNKS, name.step, name.attempt)))

    def _remove(self, keys: Iterable[str]) -> None:
        """Delete objects of a listing while it continues."""
        rest = iter(keys)
        while some := list(islice(rest, DELETE_BATCH)):
            self._store.delete_all(some)

    def _read_attempts(self) -> list[StoreAttempt]:
        attempts = read_attempts(self._store, 0, self._attempts)
        self._attempts = {each.number: each for each in attempts}
        return attempts

    def _found(self, attempts: Sequence[StoreAttempt]) -> list[StoredSnapshot]:
        names = (SnapshotName(*key) for key in snapshot_keys(self._store))
        found = [self._known.get(name) or self._read(name) for name in names]
        for each in found:
            if each.newer and in_lineage(each.name.step, each.name.attempt, attempts):
                raise NewerVersionError(f"{self._store.uri}: {each.newer}; nothing is deleted")
        self._known = {each.name: each for each in found if each.readable}
        return found

    def _read(self, name: SnapshotName) -> StoredSnapshot:
        key = manifest_key(name.step, name.attempt)
        try:
            manifest = parse_manifest(self._store.get(key), key)
        except (SnapshotError, NoInputError) as error:
            logger.warning("cannot read manifest, keeping it", extra={"key": key, "error": str(error)})
            newer = str(error) if isinstance(error, NewerVersionError) else ""
            return StoredSnapshot(name=name, readable=False, newer=newer)
        return StoredSnapshot(
            name=name,
            time=manifest.cut.time,
            below=tuple(link.name for link in manifest.chain),
            objects=KeySet(entry.key for entry in manifest.objects),
            readable=not self._present or self._is_present(name),
            data_index=str(manifest.cut.reader.get("dataIndex", "")),
        )

    def _is_present(self, name: SnapshotName) -> bool:
        try:
            open_snapshot(self._store, name.step, name.attempt)
        except (SnapshotError, NoInputError) as error:
            logger.warning("snapshot incomplete, keeping it", extra={"step": name.step, "error": str(error)})
            return False
        return True

    def _sweep(
        self, found: Sequence[StoredSnapshot], decision: RetentionPlan, attempts: Sequence[StoreAttempt]
    ) -> float:
        """Delete old orphans and abandoned uploads; return when to search again. ``found`` is what is left."""
        store, began = self._store, time.monotonic()
        there = {each.name: each for each in found}
        newest = decision.keep[: self._policy.keep_last]
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
            if is_own or now - info.modified < self._policy.orphan_s:
                return False
            if name in there:
                return there[name].readable and info.key.startswith(CHUNKS)
            return is_orphan(name, newest, attempts)

        for kind in (PARTS, CHUNKS):
            self._remove(info.key for info in store.list(kind) if goes(info))
        # A newer attempt may have stored an index that no snapshot names yet.
        last = max(found, key=lambda each: each.name.recency, default=None)
        if last is not None and last.data_index:
            own, others = index_prefix(last.data_index), store.list(INDEXES)
            old = (info for info in others if now - info.modified >= self._policy.orphan_s)
            self._remove(info.key for info in old if not info.key.startswith(own))
        self._incomplete = frozenset(name for name, count in missing.items() if count)
        store.sweep_uploads(ABANDONED_UPLOAD_S)
        ended, longest = time.monotonic(), self._policy.orphan_s
        return ended + max(longest / SWEEPS, min(longest, (ended - began) * SWEEP_PAUSE_FACTOR))


def _mark(name: SnapshotName) -> str:
    return RETIRED + manifest_key(name.step, name.attempt).removeprefix(MANIFESTS)
