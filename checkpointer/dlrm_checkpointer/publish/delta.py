"""Define the format of deltas, put a pod's part of one, and remove old ones.

A delta holds the rows that turn one snapshot into a newer one, for consumers that follow a job. Rank 0's sidecar plans
it, every pod puts its part, and it exists as soon as its manifest does.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass as entry

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.codec.rows import CodedRows, code_rows
from dlrm_checkpointer.format.chain import Chain, load_chain
from dlrm_checkpointer.format.chunk import chunk_rows, encode_row_numbers, encode_rows, put_by_digest
from dlrm_checkpointer.format.manifest import (
    CHUNKS,
    FORMAT,
    PARTS,
    ChainLink,
    ChunkEntry,
    ObjectEntry,
    SealedModel,
    checked_tables,
    parse_sealed,
    refusing,
)
from dlrm_checkpointer.read.diff import updates
from dlrm_checkpointer.read.fetch import fetch
from dlrm_checkpointer.types import ShardId, ShardRows, SnapshotName, TableMeta
from dlrm_stores import ObjectStore
from dlrm_stores.base import Body, parallel_map

PUBLICATION_VERSION, KEYED_PUBLICATION_VERSION = 1, 2
"""The second is written for models with a table of unique ids, or with rows of several sizes."""
DELTAS = "deltas/"
PLAN_KEY = "plan.json"
TRIES = 10**8
_KEY = re.compile(r"deltas/(\d{16})\.json")
_OF_A_DELTA = re.compile(f"(?:{CHUNKS}|{PARTS})([0-9]{{16}})/")


class DeltaLink(ChainLink):
    """Name a delta that another one follows: its sequence, its manifest's SHA-256, and its snapshot."""

    sequence: int = Field(ge=1)


@entry(frozen=True, slots=True, kw_only=True, config=FORMAT)
class TombstoneEntry(ObjectEntry):
    """Describe an object with the numbers of rows that are reset to their initial values, or leave a unique table."""

    table: str
    rows: int = Field(ge=1)


class DeltaHead(SealedModel):
    """Hold what a delta's manifest takes from its plan."""

    versions = range(PUBLICATION_VERSION, KEYED_PUBLICATION_VERSION + 1)
    version: int = PUBLICATION_VERSION
    sequence: int = Field(ge=1)
    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    snapshot: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the snapshot's manifest."""
    previous: DeltaLink | None
    full: bool
    base: int = Field(ge=1)
    """Sequence of the newest full delta, this one included."""
    bits: Literal[8, 16, 32]

    @property
    def name(self) -> SnapshotName:
        """Return the name of the snapshot that the delta leads to."""
        return SnapshotName(self.step, self.attempt)


class DeltaPlan(DeltaHead):
    """Plan the next delta for all pods of a gang: ``plan.json``, written by rank 0's sidecar."""

    format: Literal["dlrm-delta-plan"] = "dlrm-delta-plan"
    number: int = Field(ge=0, lt=TRIES)
    """Distinguishes attempts at one sequence number."""
    pods: int = Field(ge=1)


class DeltaPart(SealedModel):
    """List what one pod put for a delta."""

    versions = range(PUBLICATION_VERSION, KEYED_PUBLICATION_VERSION + 1)
    format: Literal["dlrm-delta-part"] = "dlrm-delta-part"
    version: int = PUBLICATION_VERSION
    problem: str = ""
    """Why the pod could not build its part; then nothing was put."""
    chunks: tuple[ChunkEntry, ...] = ()
    tombstones: tuple[TombstoneEntry, ...] = ()
    dense: ObjectEntry | None = None
    """Set by pod 0 only."""


class Delta(DeltaHead):
    """Describe a delta, which exists exactly as long as this object does."""

    format: Literal["dlrm-delta"] = "dlrm-delta"
    time: float
    """Time of the snapshot's cut (Unix seconds)."""
    tables: tuple[dict[str, Any], ...]
    chunks: tuple[ChunkEntry, ...]
    tombstones: tuple[TombstoneEntry, ...]
    dense: ObjectEntry

    @property
    def table_metas(self) -> tuple[TableMeta, ...]:
        """Return the model's tables as published."""
        return tuple(TableMeta.from_json(table) for table in self.tables)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all its objects."""
        return sum(entry.bytes for entry in (*self.chunks, *self.tombstones, self.dense))


@dataclass(frozen=True)
class Published:
    """Hold a published delta."""

    delta: Delta
    sha256: str
    """SHA-256 of its manifest."""

    @property
    def link(self) -> DeltaLink:
        """Return the link by which the next delta names this one."""
        delta = self.delta
        return DeltaLink(sequence=delta.sequence, step=delta.step, attempt=delta.attempt, sha256=self.sha256)


def published_table(table: TableMeta) -> TableMeta:
    """Return a table as deltas hold it: complete rows without optimizer state."""
    return replace(table, column_blocks=((0, table.dim),), state_columns=(0,), row_values=())


def publication_version(tables: Iterable[TableMeta]) -> int:
    """Return the version in which deltas of these tables are written."""
    is_keyed = any(table.needs_version_3 for table in tables)
    return KEYED_PUBLICATION_VERSION if is_keyed else PUBLICATION_VERSION


def delta_key(sequence: int) -> str:
    """Return the key of a delta's manifest, padded with zeros so that a listing is sorted by sequence."""
    return f"{DELTAS}{sequence:016d}.json"


def try_prefix(kind: str, sequence: int, number: int) -> str:
    """Return the prefix of the part lists (``PARTS``) or objects (``CHUNKS``) of one attempt at a delta."""
    return f"{kind}{sequence:016d}/{number:08d}/"


def delta_part_key(plan: DeltaPlan, pod: int) -> str:
    """Return the key of a pod's part list."""
    return f"{try_prefix(PARTS, plan.sequence, plan.number)}{pod:06d}.json"


def sequences(store: ObjectStore) -> list[int]:
    """List the sequence numbers of all deltas, ascending."""
    matches = (_KEY.fullmatch(info.key) for info in store.list(DELTAS))
    return [int(match[1]) for match in matches if match]


def read_delta(store: ObjectStore, sequence: int) -> Published:
    """Read one delta's manifest.

    Raises:
        NoInputError: it does not exist.
        SnapshotError: it cannot be read.
    """
    key = delta_key(sequence)
    body = store.get(key)
    delta = parse_sealed(Delta, body, f"{store.uri}/{key}", "delta")
    if delta.sequence != sequence:
        raise SnapshotError(f"{store.uri}/{key}: says that it is number {delta.sequence}")
    with refusing(f"{store.uri}/{key}", "tables or chunks are not as the format says"):
        tables = checked_tables(delta.tables, delta.chunks, keyed=delta.version == KEYED_PUBLICATION_VERSION)
    for gone in delta.tombstones:
        if gone.table not in tables:
            raise SnapshotError(f"{store.uri}/{key}: {gone.key} names a table that its model does not have")
    return Published(delta, hashlib.sha256(body).hexdigest())


def newest_delta(store: ObjectStore) -> tuple[int, Published | None]:
    """Return the greatest sequence number, 0 before the first, and its delta; None if it cannot be read."""
    there = sequences(store)
    if not there:
        return 0, None
    try:
        return there[-1], read_delta(store, there[-1])
    except (SnapshotError, NoInputError):
        return there[-1], None


def read_plan(store: ObjectStore) -> DeltaPlan | None:
    """Read the current plan; None if it does not exist or cannot be read."""
    try:
        return parse_sealed(DeltaPlan, store.get(PLAN_KEY), PLAN_KEY, "delta")
    except (NoInputError, SnapshotError):
        return None


MAX_NUMBERS = 1 << 22
"""Largest number of row numbers in one object of tombstones."""


@dataclass(frozen=True, kw_only=True)
class PublishSlot:
    """Locate the stores that deltas come from and go to, and this pod in its gang."""

    snapshots: ObjectStore
    target: ObjectStore
    pod: int
    before_put: Callable[[], None]
    """Called in any thread before each object is put; may block."""
    on_put: Callable[[int], None]
    """Called in any thread with the bytes of each object that was put."""


def put_part(place: PublishSlot, plan: DeltaPlan) -> None:
    """Put this pod's objects of a delta, then its part list; do nothing if the part list exists.

    The part list also reports a snapshot that cannot be read or published: rank 0's sidecar decides what follows.
    """
    key = delta_part_key(plan, place.pod)
    if place.target.size(key) is not None:
        return
    try:
        part = _Part(place, plan).put()
    except (SnapshotError, NoInputError) as error:
        part = DeltaPart(version=plan.version, problem=str(error))
    place.target.put(key, part.encode())


def parts_of(target: ObjectStore, plan: DeltaPlan) -> list[DeltaPart] | None:
    """Read the part lists of all pods; None while some are missing.

    Raises:
        SnapshotError: one cannot be read.
    """
    there = {info.key for info in target.list(try_prefix(PARTS, plan.sequence, plan.number))}
    wanted = [delta_part_key(plan, pod) for pod in range(plan.pods)]
    if not there.issuperset(wanted):
        return None
    return [parse_sealed(DeltaPart, target.get(key), key, "delta") for key in wanted]


def delta_of(plan: DeltaPlan, after: Chain, parts: Sequence[DeltaPart]) -> Delta:
    """Merge part lists into a delta.

    Raises:
        SnapshotError: not exactly one of them has the dense state.
    """
    dense = [part.dense for part in parts if part.dense]
    if len(dense) != 1:
        raise SnapshotError(f"delta {plan.sequence}: {len(dense)} pods put the dense state, not one")
    cut = after.newest.cut
    return Delta(
        **{name: getattr(plan, name) for name in DeltaHead.model_fields},
        time=cut.time,
        tables=tuple(published_table(table).to_json() for table in cut.model_tables),
        chunks=tuple(chunk for part in parts for chunk in part.chunks),
        tombstones=tuple(entry for part in parts for entry in part.tombstones),
        dense=dense[0],
    )


def remove_old(target: ObjectStore, newest: Delta, keep_last: int) -> int:
    """Remove deltas beyond ``keep_last``, other attempts at the newest one, and old part lists.

    Keeps the newest full delta and those after it. Removes a delta's manifest before its objects, so it may be
    interrupted and repeated. Returns the number of removed deltas.
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
    """List the keys of objects of deltas before ``first``; stop the listing there."""
    found = []
    for info in target.list(kind):
        match = _OF_A_DELTA.match(info.key)
        if match and int(match[1]) >= first:
            break
        if match:
            found.append(info.key)
    return found


class _Part:
    def __init__(self, place: PublishSlot, plan: DeltaPlan) -> None:
        self._place, self._plan = place, plan
        self._after = load_chain(place.snapshots, plan.name)
        if self._after.links[-1].sha256 != plan.snapshot:
            raise SnapshotError(f"{place.snapshots.uri}: the snapshot of step {plan.step} was replaced since the plan")
        previous = None if plan.full else plan.previous
        self._before = load_chain(place.snapshots, previous.name) if previous else None
        self._tombstones: list[TombstoneEntry] = []

    def put(self) -> DeltaPart:
        dense = self._put_dense() if self._place.pod == 0 else None
        tables = self._after.newest.cut.model_tables
        numbered = enumerate(task for table in tables for task in self._tasks(table))
        entries = parallel_map(lambda task: tuple(task[1](f"{task[0]:06d}")), numbered)
        chunks = tuple(entry for found in entries for entry in found)
        return DeltaPart(version=self._plan.version, chunks=chunks, tombstones=tuple(self._tombstones), dense=dense)

    def _put_dense(self) -> ObjectEntry:
        return self._put_object("dense", fetch(self._place.snapshots, self._after.newest.dense))

    def _tasks(self, table: TableMeta) -> Iterator[Callable[[str], Iterator[ChunkEntry]]]:
        """Yield calls that encode and put this pod's rows of a table; put the tombstones on the way."""
        pod, pods = self._place.pod, self._plan.pods
        share = range(table.end * pod // pods, table.end * (pod + 1) // pods)
        found = _Gathered(chunk_rows(table.dim))
        gone = _Gathered(MAX_NUMBERS)
        for update in updates(self._place.snapshots, table, self._before, self._after, share):
            for rows in found.add(update.row_ids, update.rows, update.columns):
                yield partial(self._put_rows, table, share, rows)
            for (numbers,) in gone.add(update.gone):
                self._put_gone(table, share, numbers)
        for rows in found.rest():
            yield partial(self._put_rows, table, share, rows)
        for (numbers,) in gone.rest():
            self._put_gone(table, share, numbers)

    def _put_rows(
        self, table: TableMeta, share: range, gathered: Sequence[NDArray[Any]], name: str
    ) -> Iterator[ChunkEntry]:
        row_ids, rows, columns = gathered
        shard, published = ShardId(table.name, share.start, share.stop, 0, table.dim), published_table(table)
        piece = ShardRows(shard=shard, row_ids=row_ids, rows=rows, state=columns)
        for coded in code_rows(piece, self._plan.bits, table=published):
            put = self._put_object(name, encode_rows(coded, published))
            yield ChunkEntry.of(put, shard, coded.row_ids, coded.form.columns)

    def _put_gone(self, table: TableMeta, share: range, numbers: NDArray[np.int64]) -> None:
        if table.is_unique:
            shard = ShardId(table.name, share.start, share.stop, 0, table.dim)
            body = encode_rows(CodedRows.gone(shard, numbers), table)
        else:
            body = encode_row_numbers(table.name, numbers)
        put = self._put_object(f"gone-{len(self._tombstones):06d}", body)
        self._tombstones.append(TombstoneEntry(**asdict(put), table=table.name, rows=len(numbers)))

    def _put_object(self, name: str, body: Body) -> ObjectEntry:
        self._place.before_put()
        folder = f"{try_prefix(CHUNKS, self._plan.sequence, self._plan.number)}{self._place.pod:06d}"
        entry = put_by_digest(self._place.target, lambda sha256: f"{folder}/{name}-{sha256[:16]}.safetensors", body)
        self._place.on_put(len(body))
        return entry


class _Gathered:
    """Gather rows of ascending bands until they fill about one object."""

    def __init__(self, size: int) -> None:
        self._size, self._count = size, 0
        self._waiting: list[tuple[NDArray[Any], ...]] = []

    def add(self, *rows: NDArray[Any]) -> Iterator[list[NDArray[Any]]]:
        """Add rows, in one array or several of one length; yield all waiting rows once they fill an object."""
        if len(rows[0]):
            self._waiting.append(rows)
            self._count += len(rows[0])
        if self._count >= self._size:
            yield from self.rest()

    def rest(self) -> Iterator[list[NDArray[Any]]]:
        """Yield the waiting rows."""
        if self._waiting:
            arrays = zip(*self._waiting, strict=True)
            self._waiting, self._count = [], 0
            yield [np.concatenate(each) for each in arrays]
