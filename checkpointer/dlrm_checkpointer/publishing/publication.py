"""Deltas for inference caches: their objects' keys and JSON."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import Field
from pydantic.dataclasses import dataclass as entry

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.manifest import CHUNKS, PARTS, ChunkEntry, Link, ObjectEntry, checked_tables
from dlrm_checkpointer.format.sealing import FORMAT, SealedModel, parse_sealed
from dlrm_checkpointer.types import SnapshotName, TableMeta
from dlrm_stores.base import ObjectStore

PUBLICATION_VERSION = 1
DELTAS = "deltas/"
PLAN_KEY = "plan.json"
TRIES = 10**8
_KEY = re.compile(r"deltas/(\d{16})\.json")
_OF_A_DELTA = re.compile(f"(?:{CHUNKS}|{PARTS})([0-9]{{16}})/")


class DeltaLink(Link):
    """A delta that another one follows, by its own manifest, and the snapshot that it leads to."""

    sequence: int = Field(ge=1)


@entry(frozen=True, slots=True, kw_only=True, config=FORMAT)
class GoneEntry(ObjectEntry):
    """Numbers of rows that are back at their initial values."""

    table: str
    rows: int = Field(ge=1)


class DeltaPlan(SealedModel):
    """What the next delta is to be, for all pods of a gang: ``plan.json``, written by rank 0's sidecar."""

    format: Literal["dlrm-delta-plan"] = "dlrm-delta-plan"
    version: int = PUBLICATION_VERSION
    sequence: int = Field(ge=1)
    number: int = Field(ge=0, lt=TRIES)
    """Tells tries at one sequence number apart."""
    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    snapshot: str = Field(pattern=r"^[0-9a-f]{64}$")
    """SHA-256 of the snapshot's manifest."""
    previous: DeltaLink | None
    full: bool
    base: int = Field(ge=1)
    """Sequence of the newest full delta, this one included."""
    bits: Literal[8, 16, 32]
    pods: int = Field(ge=1)

    @property
    def name(self) -> SnapshotName:
        """The snapshot that is published."""
        return SnapshotName(self.step, self.attempt)


class DeltaPart(SealedModel):
    """What one pod put for a delta."""

    format: Literal["dlrm-delta-part"] = "dlrm-delta-part"
    version: int = PUBLICATION_VERSION
    problem: str = ""
    """Why the older snapshot can't be gone from; nothing was put then."""
    chunks: tuple[ChunkEntry, ...] = ()
    tombstones: tuple[GoneEntry, ...] = ()
    dense: ObjectEntry | None = None
    """Of pod 0 alone."""


class Delta(SealedModel):
    """A delta: it exists exactly when this object does."""

    format: Literal["dlrm-delta"] = "dlrm-delta"
    version: int = PUBLICATION_VERSION
    sequence: int = Field(ge=1)
    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    snapshot: str = Field(pattern=r"^[0-9a-f]{64}$")
    time: float
    """Of the snapshot's cut (Unix seconds)."""
    previous: DeltaLink | None
    full: bool
    base: int = Field(ge=1)
    bits: Literal[8, 16, 32]
    tables: tuple[dict[str, Any], ...]
    chunks: tuple[ChunkEntry, ...]
    tombstones: tuple[GoneEntry, ...]
    dense: ObjectEntry

    @property
    def name(self) -> SnapshotName:
        """The snapshot that it leads to."""
        return SnapshotName(self.step, self.attempt)

    @property
    def table_metas(self) -> tuple[TableMeta, ...]:
        """The model's tables, as they are published."""
        return tuple(TableMeta.from_json(table) for table in self.tables)

    @property
    def total_bytes(self) -> int:
        """Bytes of all its objects."""
        return sum(entry.bytes for entry in (*self.chunks, *self.tombstones, self.dense))


@dataclass(frozen=True)
class Published:
    """A delta that is there."""

    delta: Delta
    sha256: str
    """Of its manifest."""

    @property
    def link(self) -> DeltaLink:
        """As the next one names it."""
        delta = self.delta
        return DeltaLink(sequence=delta.sequence, step=delta.step, attempt=delta.attempt, sha256=self.sha256)


M = TypeVar("M", DeltaPlan, DeltaPart, Delta)


def published_table(table: TableMeta) -> TableMeta:
    """A table as deltas hold it: whole rows without optimizer state."""
    return replace(table, column_blocks=((0, table.dim),), state_columns=(0,))


def delta_key(sequence: int) -> str:
    """Key of a delta's manifest; zeros in front, so that a listing sorts by sequence."""
    return f"{DELTAS}{sequence:016d}.json"


def try_prefix(kind: str, sequence: int, number: int) -> str:
    """Where the part lists (``PARTS``) or the objects (``CHUNKS``) of one try at a delta are."""
    return f"{kind}{sequence:016d}/{number:08d}/"


def delta_part_key(plan: DeltaPlan, pod: int) -> str:
    """Key of a pod's part list."""
    return f"{try_prefix(PARTS, plan.sequence, plan.number)}{pod:06d}.json"


def delta_object_key(plan: DeltaPlan, pod: int, name: str, sha256: str) -> str:
    """Key of an object."""
    return f"{try_prefix(CHUNKS, plan.sequence, plan.number)}{pod:06d}/{name}-{sha256[:16]}.safetensors"


def sequence_of(key: str) -> int | None:
    """The sequence number below whose prefix an object or part list lies; None of what others put beside them."""
    match = _OF_A_DELTA.match(key)
    return int(match[1]) if match else None


def sequences(store: ObjectStore) -> list[int]:
    """Of every delta that is there, ascending."""
    matches = (_KEY.fullmatch(info.key) for info in store.list(DELTAS))
    return [int(match[1]) for match in matches if match]


def read_delta(store: ObjectStore, sequence: int) -> Published:
    """One delta's manifest.

    Raises:
        NoInputError: it is not there.
        SnapshotError: it can't be read.
    """
    key = delta_key(sequence)
    body = store.get(key)
    delta = parse(Delta, body, f"{store.uri}/{key}")
    if delta.sequence != sequence:
        raise SnapshotError(f"{store.uri}/{key}: says that it is number {delta.sequence}")
    try:
        tables = checked_tables(delta.tables, delta.chunks)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise SnapshotError(f"{store.uri}/{key}: tables or chunks are not as the format says: {error!r}") from error
    for gone in delta.tombstones:
        if gone.table not in tables:
            raise SnapshotError(f"{store.uri}/{key}: {gone.key} is of a table that its model does not have")
    return Published(delta, hashlib.sha256(body).hexdigest())


def newest_delta(store: ObjectStore) -> tuple[int, Published | None]:
    """The greatest sequence number, 0 before the first delta, and that delta; None where it can't be read."""
    there = sequences(store)
    if not there:
        return 0, None
    try:
        return there[-1], read_delta(store, there[-1])
    except (SnapshotError, NoInputError):
        return there[-1], None


def read_plan(store: ObjectStore) -> DeltaPlan | None:
    """The plan that is there; None where there is none or it can't be read."""
    try:
        return parse(DeltaPlan, store.get(PLAN_KEY), PLAN_KEY)
    except (NoInputError, SnapshotError):
        return None


def parse(model: type[M], body: bytes, key: str) -> M:
    """Read JSON of the format.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """

    def refusal(version: int) -> str:
        return f"delta version {version}, this program reads version {PUBLICATION_VERSION}"

    return parse_sealed(model, body, key, PUBLICATION_VERSION, refusal)
