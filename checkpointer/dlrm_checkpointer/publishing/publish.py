"""From two snapshots to a delta: each pod codes and puts an even share of every table's rows, then one joins them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.coding.codes import code_rows
from dlrm_checkpointer.format.chain import Chain, load_chain
from dlrm_checkpointer.format.fetch import fetch, in_parallel
from dlrm_checkpointer.format.manifest import CHUNKS, PARTS, ChunkEntry, ObjectEntry
from dlrm_checkpointer.format.objects import encode_row_numbers, encode_rows
from dlrm_checkpointer.format.put import put_by_digest
from dlrm_checkpointer.merging.merge import chunk_rows
from dlrm_checkpointer.publishing.publication import (
    Delta,
    DeltaPart,
    DeltaPlan,
    GoneEntry,
    delta_key,
    delta_object_key,
    delta_part_key,
    parse,
    published_table,
    sequence_of,
    sequences,
    try_prefix,
)
from dlrm_checkpointer.reading.differences import updates
from dlrm_checkpointer.types import ShardId, ShardRows, TableMeta
from dlrm_stores.base import Body, ObjectStore

MOST_NUMBERS = 1 << 22
"""Row numbers in one object of tombstones."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where deltas come from and go to, and which pod of the gang this is."""

    snapshots: ObjectStore
    target: ObjectStore
    pod: int
    pods: int
    before_put: Callable[[], None]
    """Called, in any thread, before each object that is put: may wait."""
    on_put: Callable[[int], None]
    """Told, in any thread, of the bytes of each object."""


def put_part(place: Place, plan: DeltaPlan) -> None:
    """Put this pod's objects of a delta, then its part list, which is kept where it is there already.

    What can't be read or published is said in the part list: who made the plan decides.
    """
    key = delta_part_key(plan, place.pod)
    if place.target.size(key) is not None:
        return
    try:
        part = _Part(place, plan).put()
    except (SnapshotError, NoInputError) as error:
        part = DeltaPart(problem=str(error))
    place.target.put(key, part.encode())


def parts_of(target: ObjectStore, plan: DeltaPlan) -> list[DeltaPart] | None:
    """The part lists of all pods; None while some are missing.

    Raises:
        SnapshotError: one can't be read.
    """
    there = {info.key for info in target.list(try_prefix(PARTS, plan.sequence, plan.number))}
    wanted = [delta_part_key(plan, pod) for pod in range(plan.pods)]
    if not there.issuperset(wanted):
        return None
    return [parse(DeltaPart, target.get(key), key) for key in wanted]


def delta_of(plan: DeltaPlan, after: Chain, parts: Sequence[DeltaPart]) -> Delta:
    """The delta that part lists make up.

    Raises:
        SnapshotError: none of them has the dense state.
    """
    dense = [part.dense for part in parts if part.dense]
    if len(dense) != 1:
        raise SnapshotError(f"delta {plan.sequence}: {len(dense)} pods put the dense state, not one")
    cut = after.newest.cut
    return Delta(
        sequence=plan.sequence,
        step=plan.step,
        attempt=plan.attempt,
        snapshot=plan.snapshot,
        time=cut.time,
        previous=plan.previous,
        full=plan.full,
        base=plan.base,
        bits=plan.bits,
        tables=tuple(published_table(table).to_json() for table in cut.tables),
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
        tombstones=tuple(entry for part in parts for entry in part.tombstones),
        dense=dense[0],
    )


def remove_old(target: ObjectStore, newest: Delta, keep_last: int) -> int:
    """Remove deltas that need not be kept, other tries at the newest one, and part lists; returns how many went.

    The newest full delta and those after it stay. A delta's manifest goes before its objects. Safe to repeat or cut
    off.
    """
    first = min(newest.sequence - keep_last + 1, newest.base)
    gone = [sequence for sequence in sequences(target) if sequence < first]
    target.delete_all([delta_key(sequence) for sequence in gone])
    own = newest.dense.key.rsplit("/", 2)[0] + "/"
    for kind in (CHUNKS, PARTS):
        rest = [info.key for info in target.list(f"{kind}{newest.sequence:016d}/") if not info.key.startswith(own)]
        target.delete_all([*_below(target, kind, first), *rest])
    return len(gone)


def _below(target: ObjectStore, kind: str, first: int) -> list[str]:
    """Keys of objects of deltas before the first one that is kept; reads no more of the listing than these."""
    found = []
    for info in target.list(kind):
        sequence = sequence_of(info.key)
        if sequence is None:
            continue
        if sequence >= first:
            break
        found.append(info.key)
    return found


class _Part:
    def __init__(self, place: Place, plan: DeltaPlan) -> None:
        self._place, self._plan = place, plan
        self._after = load_chain(place.snapshots, plan.name)
        if self._after.links[-1].sha256 != plan.snapshot:
            raise SnapshotError(f"{place.snapshots.uri}: step {plan.step} is not the snapshot of the plan any more")
        previous = None if plan.full else plan.previous
        self._before = load_chain(place.snapshots, previous.name) if previous else None
        self._tombstones: list[GoneEntry] = []

    def put(self) -> DeltaPart:
        dense = self._put_dense() if self._place.pod == 0 else None
        tables = self._after.newest.cut.tables
        numbered = enumerate(task for table in tables for task in self._tasks(table))
        entries = in_parallel(lambda task: tuple(task[1](f"{task[0]:06d}")), numbered)
        chunks = tuple(entry for found in entries for entry in found)
        return DeltaPart(chunks=chunks, tombstones=tuple(self._tombstones), dense=dense)

    def _put_dense(self) -> ObjectEntry:
        body = fetch(self._place.snapshots, self._after.newest.dense)
        return self._put_object("dense", body)

    def _tasks(self, table: TableMeta) -> Iterator[Callable[[str], Iterator[ChunkEntry]]]:
        """What codes and puts the rows of this pod's share of a table; numbers of rows that are gone go meanwhile."""
        pod, pods = self._place.pod, self._place.pods
        share = range(table.rows * pod // pods, table.rows * (pod + 1) // pods)
        found = _Gathered(chunk_rows(table.dim))
        gone = _Gathered(MOST_NUMBERS)
        for update in updates(self._place.snapshots, table, self._before, self._after, share):
            for rows in found.add(update.row_ids, update.rows):
                yield partial(self._put_rows, table, share, *rows)
            for numbers, _ in gone.add(update.gone):
                self._put_gone(table, numbers)
        for rows in found.rest():
            yield partial(self._put_rows, table, share, *rows)
        for numbers, _ in gone.rest():
            self._put_gone(table, numbers)

    def _put_rows(
        self, table: TableMeta, share: range, row_ids: NDArray[np.int64], rows: NDArray[np.float32], name: str
    ) -> Iterator[ChunkEntry]:
        shard = ShardId(
            table=table.name, row_start=share.start, row_end=share.stop, column_start=0, column_end=table.dim
        )
        none = np.empty((len(row_ids), 0), np.float32)
        for coded in code_rows(ShardRows(shard=shard, row_ids=row_ids, rows=rows, state=none), self._plan.bits):
            yield ChunkEntry.of(self._put_object(name, encode_rows(coded)), shard, coded.row_ids)

    def _put_gone(self, table: TableMeta, numbers: NDArray[np.int64]) -> None:
        put = self._put_object(f"gone-{len(self._tombstones):06d}", encode_row_numbers(table.name, numbers))
        self._tombstones.append(GoneEntry(**asdict(put), table=table.name, rows=len(numbers)))

    def _put_object(self, name: str, body: Body) -> ObjectEntry:
        self._place.before_put()
        key_of = partial(delta_object_key, self._plan, self._place.pod, name)
        entry = put_by_digest(self._place.target, key_of, body)
        self._place.on_put(len(body))
        return entry


class _Gathered:
    """Rows of ascending bands, gathered to about as many as an object holds."""

    def __init__(self, size: int) -> None:
        self._size, self._count = size, 0
        self._waiting: list[tuple[NDArray[np.int64], NDArray[np.float32]]] = []

    def add(
        self, row_ids: NDArray[np.int64], rows: NDArray[np.float32] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Take some; gives them with those that waited once they are enough."""
        if len(row_ids):
            self._waiting.append((row_ids, np.empty((0, 0), np.float32) if rows is None else rows))
            self._count += len(row_ids)
        if self._count >= self._size:
            yield from self.rest()

    def rest(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """What waits."""
        if self._waiting:
            ids, rows = zip(*self._waiting, strict=True)
            self._waiting, self._count = [], 0
            yield np.concatenate(ids), np.concatenate(rows)
