"""Commit a snapshot by its last write, the manifest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

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
from dlrm_stores.base import PARALLEL_GETS, parallel_map


def find_commit(
    store: ObjectStore, step: int, attempt: int, own: Callable[[], Iterable[PartList]] = tuple
) -> Manifest | None:
    """Return the manifest of a cut, None before there is one. It must hold the part lists ``own``, asked for then.

    Raises:
        StoreUnavailableError: the outcome is unknown; repeat the call unchanged.
        SnapshotConflictError: the manifest has other content.
    """
    key = manifest_key(step, attempt)
    known = _get(store, key)
    if known is None:
        return None
    manifest = parse_manifest(known, key)
    held = set(manifest.row_objects)
    if any(part.meta != manifest.meta or not held.issuperset(part.row_objects) for part in own()):
        raise _conflict(f"{store.uri}/{key}")
    return manifest


def try_commit(store: ObjectStore, step: int, attempt: int, world_size: int) -> Manifest | None:
    """Put the manifest of a cut once the part lists of all ranks are durable; None if some are missing.

    The manifest goes last: a snapshot exists from the moment its manifest does, so a crash at any point leaves only
    orphans, which retention deletes. Its content is a function of the part lists, which are never replaced; so every
    sidecar of the gang may commit, in any order, and repeat it after a lost response. Retention deletes part lists
    before their manifest: a manifest that was put when they are gone belongs to a retired snapshot and is deleted.

    Raises:
        StoreUnavailableError: the outcome is unknown; repeat the call unchanged.
        SnapshotConflictError: a manifest with other content exists; nothing was replaced.
    """
    present = _present(store, step, attempt)
    if not present.issuperset(part_key(step, attempt, rank) for rank in range(world_size)):
        return None
    return _put_manifest(store, step, attempt, world_size, present)


def _put_manifest(store: ObjectStore, step: int, attempt: int, world_size: int, present: set[str]) -> Manifest | None:
    parts = read_parts(store, step, attempt, range(world_size))
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


def _conflict(where: str) -> SnapshotConflictError:
    return SnapshotConflictError(f"{where} exists with other content; nothing was replaced")


def read_parts(store: ObjectStore, step: int, attempt: int, ranks: Iterable[int]) -> list[PartList]:
    """Return the existing part lists of some ranks.

    Their equal descriptions of the cut (thousands of tables, many data files) are in memory once.
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
