"""Objects of snapshots read by all ranks, a share each, while rank 0 chooses what there is to read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from pydantic import TypeAdapter

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.format.fetch import Check, check_bytes
from dlrm_checkpointer.format.manifest import ObjectEntry
from dlrm_stores.base import ObjectStore
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.distributed.failures import InStep

logger = logging.getLogger(__name__)

T = TypeVar("T")
ROUND_BYTES = 1 << 30
"""What each rank reads before all hear of it: where one finds something damaged, the others read little in vain."""
ENTRIES = TypeAdapter(tuple[ObjectEntry, ...])
PROBLEM = TypeAdapter(str)


def choose_together(
    store: ObjectStore, collectives: Collectives, choose: Callable[[Check], T], kind: TypeAdapter[T]
) -> T:
    """What rank 0 chooses, on every rank; what it has checked for that is read by all of them.

    Args:
        store: of what is read.
        collectives: of all ranks, each of which calls this.
        choose: called on rank 0 alone, with what it checks objects by.
        kind: of what it chooses.

    Raises:
        PeerLostError: rank 0 chose nothing, or another rank could not read.
    """
    if collectives.rank == 0:
        chosen = choose(partial(_check_together, collectives))
        collectives.broadcast((), ENTRIES)  # there is nothing more to read
        return collectives.broadcast(chosen, kind)
    while entries := collectives.broadcast(None, ENTRIES):
        _check_share(collectives, store, entries)
    return collectives.broadcast(None, kind)


def _check_together(
    collectives: Collectives, store: ObjectStore, objects: Sequence[ObjectEntry], on_whole: Callable[[str], None]
) -> None:
    """See ``check_bytes``; on rank 0, whose peers are told what to read."""
    size, done = sum(entry.bytes for entry in objects), 0
    for entries in _rounds(objects, ROUND_BYTES * collectives.world_size):
        collectives.broadcast(entries, ENTRIES)
        if problem := _check_share(collectives, store, entries):
            raise SnapshotError(problem)
        for entry in entries:
            on_whole(entry.key)
        done += sum(entry.bytes for entry in entries)
        logger.info("bytes of snapshots verified", extra={"done": done, "all": size})


def _check_share(collectives: Collectives, store: ObjectStore, entries: Sequence[ObjectEntry]) -> str:
    """Read this rank's share of some objects; every rank returns the first one's problem, empty where none has any."""
    together, problem = InStep(collectives), ""
    try:
        check_bytes(store, entries[collectives.rank :: collectives.world_size], lambda _key: together.at_work())
    except SnapshotError as error:
        problem = str(error)
    together.wait()
    problems = collectives.gather(problem, PROBLEM)
    return next(filter(None, problems), "")


def _rounds(objects: Sequence[ObjectEntry], most: int) -> Iterator[tuple[ObjectEntry, ...]]:
    """Some objects, so many bytes at a time, or one that has more."""
    taken: list[ObjectEntry] = []
    size = 0
    for entry in objects:
        if taken and size + entry.bytes > most:
            yield tuple(taken)
            taken, size = [], 0
        taken.append(entry)
        size += entry.bytes
    if taken:
        yield tuple(taken)
