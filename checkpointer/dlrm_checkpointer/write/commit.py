"""The last write of a snapshot: its manifest."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from dlrm_api.errors import NoInputError
from dlrm_checkpointer.format.manifest import (
    PARTS,
    Manifest,
    PartList,
    SnapshotConflictError,
    cut_prefix,
    manifest_key,
    parse_manifest,
    parse_part,
    part_key,
)
from dlrm_stores import ObjectStore
from dlrm_stores.parallel import PARALLEL_GETS, parallel_map

logger = logging.getLogger(__name__)


def try_commit(
    store: ObjectStore, step: int, attempt: int, world_size: int, own: Iterable[int] = ()
) -> Manifest | None:
    """Put the manifest of a cut if the part lists of all its ranks are durable; None where some are missing.

    The manifest goes last: a snapshot exists from the moment its manifest does, so a crash at any point leaves
    only orphans, which retention removes. Its content is a function of the part lists, which are never
    replaced; so every sidecar of the gang may commit, in any order, and repeat it after a lost answer. Retention
    removes part lists before their manifest: one that was put when they are gone is of a snapshot that is retired, and
    is taken back.

    Args:
        store: the job's store.
        step: of the cut.
        attempt: of the gang.
        world_size: of the gang.
        own: ranks whose part lists a manifest that is there already is held to: all that many pods read of each
            other's would be the gang's ranks times its pods.

    Raises:
        StoreUnavailableError: the manifest may or may not be there; repeat the call as it is.
        SnapshotConflictError: it is there with other content; nothing was replaced.
    """
    manifest: Manifest | None = None
    key, present = manifest_key(step, attempt), _present(store, step, attempt)
    known = _get(store, key)
    if known is not None:
        manifest = parse_manifest(known, key)
        _check_holds(manifest, _parts(store, step, attempt, own), f"{store.uri}/{key}")
    elif present.issuperset(part_key(step, attempt, rank) for rank in range(world_size)):
        manifest = _put_manifest(store, step, attempt, world_size, present)
    if manifest:
        logger.info("snapshot committed", extra={"step": step, "attempt": attempt, "bytes": manifest.total_bytes})
    return manifest


def _put_manifest(store: ObjectStore, step: int, attempt: int, world_size: int, present: set[str]) -> Manifest | None:
    parts = _parts(store, step, attempt, range(world_size))
    if len(parts) < world_size:
        return None
    key, manifest = manifest_key(step, attempt), Manifest.of_parts(parts)
    if not store.put_if_absent(key, manifest.encode()):
        known = _get(store, key)
        if known is not None and parse_manifest(known, key) != manifest:
            raise _conflict(f"{store.uri}/{key}")
    elif not present.issubset(_present(store, step, attempt)):
        store.delete(key)
        return None
    return manifest


def _check_holds(manifest: Manifest, parts: Sequence[PartList], where: str) -> None:
    """Check that a manifest holds what some part lists do.

    Raises:
        SnapshotConflictError: it does not.
    """
    held = set(manifest.chunks)
    if any(part.meta != manifest.meta or not held.issuperset(part.chunks) for part in parts):
        raise _conflict(where)


def _conflict(where: str) -> SnapshotConflictError:
    return SnapshotConflictError(f"{where} is there with other content: nothing was replaced")


def _parts(store: ObjectStore, step: int, attempt: int, ranks: Iterable[int]) -> list[PartList]:
    """The part lists of some ranks, as far as they are there.

    What they say alike of the cut (of thousands of tables and of files of data) is in memory once.
    """
    keys = [part_key(step, attempt, rank) for rank in ranks]
    bodies = parallel_map(lambda key: _get(store, key), keys, PARALLEL_GETS)
    found: list[PartList] = []
    for body, key in zip(bodies, keys, strict=True):
        if body is not None:
            part = parse_part(body, key)
            alike = found and part.meta == found[0].meta
            found.append(part.model_copy(update={"meta": found[0].meta}) if alike else part)
    return found


def _present(store: ObjectStore, step: int, attempt: int) -> set[str]:
    return {info.key for info in store.list(cut_prefix(PARTS, step, attempt))}


def _get(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NoInputError:
        return None
