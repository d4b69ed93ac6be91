"""The last write of a snapshot: its manifest."""

from __future__ import annotations

import logging

from dlrm_api.errors import NoInputError
from dlrm_checkpointer.manifest import (
    PARTS,
    Manifest,
    SnapshotConflictError,
    cut_prefix,
    manifest_key,
    parse_manifest,
    parse_part,
    part_key,
)
from dlrm_checkpointer.store import ObjectStore

logger = logging.getLogger(__name__)


def try_commit(store: ObjectStore, step: int, attempt: int, world_size: int) -> Manifest | None:
    """Put the manifest of a cut if the part lists of all its ranks are durable; None where some are missing.

    The manifest goes last: a snapshot exists from the moment its manifest does, so a crash at any point leaves
    only orphans, which retention removes. Its content is a function of the part lists, which are never
    replaced; so every sidecar of the gang may commit, in any order, and repeat it after a lost answer. Retention
    removes part lists before their manifest: one that was put when they are gone is of a snapshot that is retired, and
    is taken back.

    Raises:
        StoreUnavailableError: the manifest may or may not be there; repeat the call as it is.
        SnapshotConflictError: it is there with other content; nothing was replaced.
    """
    key = manifest_key(step, attempt)
    present = _present(store, step, attempt)
    wanted = [part_key(step, attempt, rank) for rank in range(world_size)]
    known = _get(store, key)
    if not present.issuperset(wanted):
        return parse_manifest(known, key) if known is not None else None
    bodies = [_get(store, part) for part in wanted]
    if None in bodies:
        return None
    manifest = Manifest.of_parts([parse_part(body, part) for body, part in zip(bodies, wanted, strict=True) if body])
    if known is None and not store.put_if_absent(key, manifest.encode()):
        known = _get(store, key)
    elif known is None and not present.issubset(_present(store, step, attempt)):
        store.delete(key)
        return None
    if known is not None and parse_manifest(known, key) != manifest:
        raise SnapshotConflictError(f"{store.uri}/{key} is there with other content: nothing was replaced")
    logger.info("snapshot committed", extra={"step": step, "attempt": attempt, "bytes": manifest.total_bytes})
    return manifest


def _present(store: ObjectStore, step: int, attempt: int) -> set[str]:
    return {info.key for info in store.list(cut_prefix(PARTS, step, attempt))}


def _get(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NoInputError:
        return None
