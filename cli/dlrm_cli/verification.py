"""``dlrmctl snapshots verify``: every byte of one snapshot, or of all of a store, read and checked."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.manifest import manifest_key
from dlrm_checkpointer.reading.catalog import Listed, Verified, list_snapshots, pick_snapshot, verify_snapshot
from dlrm_cli.snapshots import chosen, say_unusable
from dlrm_stores.base import ObjectStore


def verify_one(store: ObjectStore, step: int | None) -> None:
    """Check the snapshot of a step, or the newest usable one.

    Raises:
        SnapshotError: it is damaged; or none was named, and a newer one is.
        NoInputError: there is none.
    """
    snapshot, passed_over = chosen(store, step)
    print(_whole(verify_snapshot(snapshot)))
    damaged = [each.step for each in passed_over if each.damaged]
    if damaged:
        raise SnapshotError(
            f"{store.uri}: newer snapshots can't be used ({_steps(damaged)}): a job would go back to step "
            f"{snapshot.step}; to check that one alone, name it with --step"
        )


def verify_all(store: ObjectStore) -> None:
    """Check every snapshot that a listing shows, oldest first, and say on stderr how far it is.

    Snapshots of histories that were given up are named and left out: nothing restores from them. So are those that
    retention removes meanwhile.

    Raises:
        SnapshotError: some are damaged; the words about each are on stderr.
        NoInputError: the store holds no snapshot.
    """
    listed = list_snapshots(store)
    if not listed:
        pick_snapshot(store, listed)  # says that there is none
    for each in listed:
        if each.problem:
            say_unusable(each)
    usable = [each for each in reversed(listed) if not each.problem]
    damaged = [each.step for each in listed if each.damaged]
    for number, each in enumerate(usable, start=1):
        print(f"verifying step {each.step} ({number} of {len(usable)})", file=sys.stderr)
        try:
            print(_whole(verify_snapshot(pick_snapshot(store, listed, each.step, each.attempt))), flush=True)
        except (SnapshotError, NoInputError) as error:
            if _is_gone(store, each):
                print(f"step {each.step} was removed meanwhile", file=sys.stderr)
                continue
            print(f"damaged: step {each.step}, attempt {each.attempt}: {error}", file=sys.stderr)
            damaged.append(each.step)
    if damaged:
        raise SnapshotError(
            f"{store.uri}: {len(damaged)} of {len(usable) + sum(each.damaged for each in listed)} snapshots can't be "
            f"used ({_steps(sorted(damaged))}): bring back what was there, or keep to the others"
        )


def _is_gone(store: ObjectStore, listed: Listed) -> bool:
    """Whether retention removed a snapshot: its manifest goes first."""
    return store.size(manifest_key(listed.step, listed.attempt)) is None


def _whole(found: Verified) -> str:
    rows = sum(found.rows.values())
    return f"step {found.step} is whole: {found.objects} objects, {found.bytes:,} bytes, {rows:,} rows"


def _steps(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(str(step) for step in steps)}"
