"""Which snapshots go, and how they go without a reader or a writer noticing."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dlrm_checkpointer.attempts import RETIRED, Attempt, in_lineage, newest_attempt, read_attempts
from dlrm_checkpointer.manifest import CHUNKS, MANIFESTS, PARTS, cut_prefix, manifest_key
from dlrm_checkpointer.restore import snapshot_keys
from dlrm_checkpointer.store import ObjectStore

logger = logging.getLogger(__name__)

ABANDONED_UPLOAD_S = 24 * 3_600
"""Unfinished uploads older than this have no writer any more."""
PARALLEL_DELETES = 8
Key = tuple[int, int]
"""(step, attempt)."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What retention does with the manifests that are there."""

    keep: tuple[Key, ...]
    retire: tuple[Key, ...]


def decide(keys: Iterable[Key], attempts: Sequence[Attempt], keep_last: int) -> Decision:
    """Keep the newest ``keep_last`` steps of the lineage, of each the newest attempt's; retire the rest."""
    newest_first = sorted(keys, reverse=True)
    keep: dict[int, Key] = {}
    for step, attempt in newest_first:
        if len(keep) < keep_last and step not in keep and in_lineage(step, attempt, attempts):
            keep[step] = (step, attempt)
    kept = tuple(keep.values())
    return Decision(keep=kept, retire=tuple(key for key in newest_first if key not in kept))


def is_orphan(cut: Key, manifests: Iterable[Key], kept: Sequence[Key], attempts: Sequence[Attempt]) -> bool:
    """Whether objects of a cut without a manifest can go: no live writer may still make a snapshot of them.

    A cut newer than the oldest kept snapshot may still be on its way, unless its attempt was given up before it.
    """
    if cut in manifests or not kept:
        return False
    return cut[0] < min(kept)[0] or not in_lineage(*cut, attempts)


def apply_retention(store: ObjectStore, attempt: int, keep_last: int) -> int:
    """Remove what ``keep_last`` doesn't keep, and orphans; return how many snapshots went. Safe to repeat or cut off.

    Only the newest attempt removes anything. A snapshot is marked as retired before the attempts are read again,
    and a new attempt looks for the mark after it announced itself: one of the two sees the other, so a snapshot
    that a new attempt goes on from is never removed. The manifest goes first, then its objects.
    """
    if newest_attempt(store) != attempt:
        return 0
    keys = snapshot_keys(store)
    attempts = read_attempts(store, 0)
    decision = decide(keys, attempts, keep_last)
    for key in decision.retire:
        store.put(_mark(key), b"")
    if newest_attempt(store) != attempt:
        for key in decision.retire:
            store.delete(_mark(key))
        return 0
    for key in decision.retire:
        store.delete(manifest_key(*key))
        _delete_all(store, [key])
    present = {cut for kind in (CHUNKS, PARTS) for cut in _cuts(store, kind)}
    _delete_all(store, sorted(cut for cut in present if is_orphan(cut, keys, decision.keep, attempts)))
    for info in list(store.list(RETIRED)):
        store.delete(info.key)
    store.sweep_uploads(ABANDONED_UPLOAD_S)
    if decision.retire:
        logger.info("snapshots retired", extra={"steps": [step for step, _ in decision.retire]})
    return len(decision.retire)


def _mark(key: Key) -> str:
    return RETIRED + manifest_key(*key).removeprefix(MANIFESTS)


def _cuts(store: ObjectStore, kind: str) -> set[Key]:
    """(step, attempt) of every cut that has objects of a kind."""
    paths = (info.key.split("/") for info in store.list(kind))
    return {(int(path[1]), int(path[2])) for path in paths if path[1].isdigit() and path[2].isdigit()}


def _delete_all(store: ObjectStore, cuts: Sequence[Key]) -> None:
    """Remove the part lists, then the objects of cuts."""
    with ThreadPoolExecutor(PARALLEL_DELETES, "delete") as pool:
        for cut in cuts:
            for kind in (PARTS, CHUNKS):
                keys = [info.key for info in store.list(cut_prefix(kind, *cut))]
                list(pool.map(store.delete, keys))
