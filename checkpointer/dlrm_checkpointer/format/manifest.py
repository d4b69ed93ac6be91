"""Define part lists and manifests, which list a snapshot's objects as a function of the cut alone.

They are sealed: no other object has a SHA-256 of them, so their JSON holds its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic.dataclasses import dataclass

from dlrm_api.errors import SnapshotError, field_path, first_problem
from dlrm_checkpointer.types import MAX_NAME, CutMeta, ShardId, SnapshotName, TableMeta

FORMAT_VERSION, KEYED_FORMAT_VERSION = 2, 3
"""The second is written for models with a table of unique ids, or with rows of several sizes."""
UNSEALED = "0" * 64
FORMAT = ConfigDict(alias_generator=to_camel, validate_by_name=True, validate_by_alias=True, serialize_by_alias=True)
"""Rules of every part of the format: camelCase, unknown fields are ignored, incompatible changes raise the version."""
MANIFESTS = "manifests/"
PARTS = "parts/"
CHUNKS = "chunks/"
Kind = Literal["full", "increment"]
MAX_BYTES = 2**63
"""Bound on the size of an object: sizes are signed 64-bit integers."""
BAD_META = "meta is not as the format says"
_KEY = re.compile(r"manifests/(\d{16})-(\d{8})\.json")
_OF_A_CUT = re.compile(f"(?:{CHUNKS}|{PARTS})([0-9]{{16}})/([0-9]{{8}})/")


class NewerVersionError(SnapshotError):
    """Report an object of a newer version. It may be intact: only a user may go back behind it."""


class SnapshotConflictError(SnapshotError):
    """Report that this step and attempt are stored already with other content; nothing was replaced."""


class FormatModel(BaseModel):
    """Define a part of the format."""

    model_config = ConfigDict(**FORMAT, frozen=True)


class SealedModel(FormatModel):
    """Define an object that holds the SHA-256 of its own bytes."""

    versions: ClassVar[range]
    """Versions that are read."""

    def encode(self) -> bytes:
        """Encode as sealed JSON with sorted keys and no spaces: equal content gives equal bytes."""
        return sealed(self.model_dump(mode="json"))


class _Head(BaseModel):
    """Hold the fields that are checked before all others."""

    version: int
    seal: str = ""


M = TypeVar("M", bound=SealedModel)


def sealed(value: Mapping[str, Any]) -> bytes:
    """Encode as canonical JSON with its SHA-256 as ``seal``, computed with zeros in place of the seal."""
    unsealed = json.dumps({**value, "seal": UNSEALED}, sort_keys=True, separators=(",", ":")).encode()
    return _with_seal(unsealed, UNSEALED, hashlib.sha256(unsealed).hexdigest())


def _with_seal(body: bytes, old: str, new: str) -> bytes:
    return body.replace(f'"seal":"{old}"'.encode(), f'"seal":"{new}"'.encode())


def parse_sealed(model: type[M], body: bytes, key: str, what: str, *, newer: str = "", older: str = "") -> M:
    """Parse sealed JSON of the model's versions; ``newer`` and ``older`` are advice about other versions.

    Raises:
        NewerVersionError: a newer version wrote it.
        SnapshotError: names the object and what is wrong with it.
    """
    try:
        head = _Head.model_validate_json(body)
    except ValidationError as error:
        raise SnapshotError(f"{key}: not JSON of this format: {_first_problem(error)}") from error
    if head.version not in model.versions:
        newest = model.versions[-1]
        refused, advice = (NewerVersionError, newer) if head.version > newest else (SnapshotError, older)
        raise refused(f"{key}: {what} version {head.version}, this program reads version {newest}{advice}")
    if hashlib.sha256(_with_seal(body, head.seal, UNSEALED)).hexdigest() != head.seal:
        raise SnapshotError(f"{key}: corrupt: its SHA-256 is not its seal")
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise SnapshotError(f"{key}: {_first_problem(error)}") from error


def _first_problem(error: ValidationError) -> str:
    path = field_path(error.errors(include_url=False, include_input=False)[0]["loc"])
    return f"{path}: {first_problem(error)}" if path else first_problem(error)


@contextlib.contextmanager
def refusing(key: str, problem: str) -> Iterator[None]:
    """Report an object whose content cannot be used in the block.

    Raises:
        SnapshotError: names the object, the problem and the cause.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{key}: {problem}: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True, config=FORMAT)
class ObjectEntry:
    """Describe one object by its key below the store's URI, its size and its SHA-256.

    It has slots because a model of terabytes has hundreds of thousands of objects, listed in every checkpointer and
    restoring rank.
    """

    key: str = Field(pattern=r"^chunks/\d{16}/\d{8}/\d{6}/[0-9A-Za-z_-]+\.safetensors$")
    bytes: int = Field(ge=0, lt=MAX_BYTES)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True, kw_only=True, config=FORMAT)
class ChunkEntry(ObjectEntry):
    """Describe an object that holds rows of one shard."""

    table: str
    row_start: int = Field(ge=0)
    row_end: int
    column_start: int = Field(ge=0)
    column_end: int
    rows: int = Field(ge=1)
    first_row: int = Field(ge=0)
    last_row: int
    columns: int | None = Field(None, exclude_if=lambda columns: columns is None)
    """Number of the first columns that the rows have, in a table of several sizes."""

    @classmethod
    def of(cls, put: ObjectEntry, shard: ShardId, row_ids: NDArray[np.int64], columns: int | None = None) -> Self:
        """Return the entry of an object that holds rows ``row_ids`` (N,), ascending, N >= 1."""
        first, last = int(row_ids[0]), int(row_ids[-1])
        rows = len(row_ids)
        return cls(**asdict(put), **asdict(shard), rows=rows, first_row=first, last_row=last, columns=columns)

    @property
    def shard(self) -> ShardId:
        """Return the shard of the rows."""
        return ShardId(self.table, self.row_start, self.row_end, self.column_start, self.column_end)

    def overlaps(self, shard: ShardId) -> bool:
        """Tell whether the object may hold rows, or keys, of a rectangle."""
        return (
            self.table == shard.table
            and self.first_row < shard.row_end
            and self.last_row >= shard.row_start
            and self.column_start < shard.column_end
            and self.column_end > shard.column_start
        )


@dataclass(frozen=True, slots=True, kw_only=True, config=FORMAT)
class GoneEntry(ChunkEntry):
    """Describe an object that holds keys of one shard of a unique table which are gone from it."""


class ChainLink(FormatModel):
    """Name a snapshot that another one is based on, with the SHA-256 of its manifest."""

    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def name(self) -> SnapshotName:
        """Return the name of the snapshot."""
        return SnapshotName(self.step, self.attempt)


class ChainSummary(FormatModel):
    """Sum up the sizes of a full snapshot and its increments, which decide when the next full one is due.

    Sizes are the bytes of all objects that hold rows or keys that are gone.
    """

    base_bytes: int = Field(ge=0)
    base_time: float = Field(allow_inf_nan=False)
    """Time of the full snapshot's cut (Unix seconds)."""
    increments: int = Field(0, ge=0)
    increment_bytes: int = Field(0, ge=0)
    """Bytes of all increments together."""
    last_bytes: int = Field(0, ge=0)
    """Bytes of the newest increment."""

    def after(self, size: int) -> ChainSummary:
        """Return the sums with one more increment."""
        return self.model_copy(
            update={
                "increments": self.increments + 1,
                "increment_bytes": self.increment_bytes + size,
                "last_bytes": size,
            }
        )


class _CutModel(SealedModel):
    """Hold what part lists and manifests share."""

    versions = range(FORMAT_VERSION, KEYED_FORMAT_VERSION + 1)
    version: int = FORMAT_VERSION
    chunks: tuple[ChunkEntry, ...]
    gone: tuple[GoneEntry, ...] = ()
    """Keys that are in no older snapshot any more; absent from version 2."""

    def encode(self) -> bytes:
        """Encode as ``SealedModel`` does; version 2 has no ``gone``."""
        return sealed(self.model_dump(mode="json", exclude={"gone"} if self.version == FORMAT_VERSION else None))

    @property
    def row_objects(self) -> tuple[ChunkEntry, ...]:
        """Return the objects with rows, and with keys that are gone."""
        return (*self.chunks, *self.gone)


class PartList(_CutModel):
    """List what one rank stored of one cut: ``parts/<step>/<attempt>/<rank>.json``."""

    format: Literal["dlrm-part"] = "dlrm-part"
    rank: int = Field(ge=0)
    kind: Kind
    bits: int
    chain: tuple[ChainLink, ...]
    before: ChainSummary | None
    """Growth of the chain's newest snapshot; None if the snapshot is full."""
    meta: dict[str, Any]
    dense: ObjectEntry | None


class Manifest(_CutModel):
    """Describe a snapshot, which exists exactly as long as this object does."""

    format: Literal["dlrm-snapshot"] = "dlrm-snapshot"
    kind: Kind
    bits: int
    chain: tuple[ChainLink, ...]
    """Snapshots that provide the rows that this one lacks, oldest first: a full one, then increments."""
    growth: ChainSummary
    meta: dict[str, Any]
    dense: ObjectEntry

    @property
    def name(self) -> SnapshotName:
        """Return the name of the snapshot."""
        return SnapshotName(int(self.meta["step"]), int(self.meta["attempt"]))

    @property
    def cut(self) -> CutMeta:
        """Return the part of the cut that was the same on all ranks."""
        return CutMeta.from_json(self.meta)

    @property
    def objects(self) -> tuple[ObjectEntry, ...]:
        """Return the snapshot's own objects, without those of its chain."""
        return (*self.row_objects, self.dense)

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the snapshot's own objects."""
        return sum(entry.bytes for entry in self.objects)

    @classmethod
    def of_parts(cls, parts: Sequence[PartList]) -> Self:
        """Merge the part lists of all ranks into a manifest.

        Raises:
            SnapshotConflictError: the parts belong to different cuts.
        """
        ordered = sorted(parts, key=lambda part: part.rank)
        first = ordered[0]
        cut = CutMeta.from_json(first.meta)
        dense = [part.dense for part in ordered if part.dense]
        where = f"step {cut.step}, attempt {cut.attempt}"
        if [part.rank for part in ordered] != list(range(cut.world_size)):
            raise SnapshotConflictError(f"{where}: part lists are not those of ranks 0 to {cut.world_size - 1}")
        for part in ordered:
            if part.meta != first.meta:
                raise SnapshotConflictError(f"{where}: rank {part.rank} handed over another cut than rank 0")
            if (part.kind, part.bits, part.chain, part.before) != (first.kind, first.bits, first.chain, first.before):
                raise SnapshotConflictError(f"{where}: rank {part.rank} stored its rows in another way than rank 0")
        if len(dense) != 1:
            raise SnapshotConflictError(f"{where}: {len(dense)} ranks handed over dense state, not one")
        chunks = tuple(chunk for part in ordered for chunk in part.chunks)
        gone = tuple(entry for part in ordered for entry in part.gone)
        size = sum(entry.bytes for entry in (*chunks, *gone))
        return cls(
            version=first.version,
            kind=first.kind,
            bits=first.bits,
            chain=first.chain,
            growth=first.before.after(size) if first.before else ChainSummary(base_bytes=size, base_time=cut.time),
            meta=first.meta,
            chunks=chunks,
            gone=gone,
            dense=dense[0],
        )


def format_version(tables: Iterable[TableMeta]) -> int:
    """Return the version in which snapshots of these tables are written."""
    return KEYED_FORMAT_VERSION if any(table.needs_version_3 for table in tables) else FORMAT_VERSION


def manifest_key(step: int, attempt: int) -> str:
    """Return the key of a manifest, padded with zeros so that a listing is sorted by step."""
    return f"{MANIFESTS}{step:016d}-{attempt:08d}.json"


def parse_manifest_key(key: str) -> tuple[int, int] | None:
    """Parse (step, attempt) from a manifest's key; None for another key."""
    match = _KEY.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def parse_cut_key(key: str) -> SnapshotName | None:
    """Parse the cut from the key of an object or part list; None for another key."""
    match = _OF_A_CUT.match(key)
    return SnapshotName(int(match[1]), int(match[2])) if match else None


def cut_prefix(kind: str, step: int, attempt: int) -> str:
    """Return the prefix of one cut's part lists (``PARTS``) or objects (``CHUNKS``)."""
    return f"{kind}{step:016d}/{attempt:08d}/"


def part_key(step: int, attempt: int, rank: int) -> str:
    """Return the key of a rank's part list."""
    return f"{cut_prefix(PARTS, step, attempt)}{rank:06d}.json"


def chunk_key(cut: CutMeta, rank: int, name: str, sha256: str) -> str:
    """Return an object's key. It holds the hash of the bytes: a repeated write changes nothing."""
    return f"{cut_prefix(CHUNKS, cut.step, cut.attempt)}{rank:06d}/{name}-{sha256[:16]}.safetensors"


def parse_part(body: bytes, key: str) -> PartList:
    """Parse a part list.

    Raises:
        SnapshotError: names the object and the field that is wrong.
    """
    part = _parse(PartList, body, key)
    with refusing(key, BAD_META):
        CutMeta.from_json(part.meta)
    return part


def parse_manifest(body: bytes, key: str) -> Manifest:
    """Parse a manifest.

    Raises:
        NewerVersionError: a newer version wrote it.
        SnapshotError: names the object and the field that is wrong.
    """
    manifest = _parse(Manifest, body, key)
    with refusing(key, BAD_META):
        cut = manifest.cut
    check_chunks(manifest, key)
    if manifest.gone and manifest.kind == "full":
        raise SnapshotError(f"{key}: is full, and names keys that are gone")
    if parse_manifest_key(key) != (cut.step, cut.attempt):
        raise SnapshotError(f"{key}: says that it is step {cut.step} of attempt {cut.attempt}")
    if (manifest.kind == "full") != (not manifest.chain):
        raise SnapshotError(f"{key}: is {manifest.kind} with a chain of {len(manifest.chain)}")
    return manifest


def checked_tables(
    documents: Iterable[Mapping[str, Any]], chunks: Iterable[ChunkEntry], *, keyed: bool
) -> dict[str, TableMeta]:
    """Parse tables by name, and check that their chunks lie in them: readers rely on the entries.

    Only where ``keyed``, a table may have unique ids, or rows of several sizes.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: names the table or the chunk that is wrong.
    """
    tables: dict[str, TableMeta] = {}
    for table in map(TableMeta.from_json, documents):
        if tables.setdefault(table.name, table) is not table:
            raise ValueError(f"duplicate table {table.name!r}")
        if table.needs_version_3 and not keyed:
            raise ValueError(f"table {table.name!r}: this version has no tables of unique ids or of several sizes")
    edges = {name: tuple(map(set, zip(*table.column_blocks, strict=True))) for name, table in tables.items()}
    for chunk in chunks:
        if chunk.table not in tables:
            raise ValueError(f"{chunk.key} holds rows of a table {chunk.table[:MAX_NAME]} that its model does not have")
        starts, ends = edges[chunk.table]
        table = tables[chunk.table]
        if isinstance(chunk, GoneEntry) and not table.is_unique:
            raise ValueError(f"{chunk.key}: rows of table {table.name} cannot be gone: its ids are not unique")
        is_gone = isinstance(chunk, GoneEntry)
        if chunk.columns not in ((None,) if is_gone or not table.sizes else table.row_sizes):
            raise ValueError(f"{chunk.key}: holds rows of {chunk.columns} columns, not of {list(table.row_sizes)}")
        most = chunk.rows if is_gone else table.capacity
        if not (
            chunk.row_start <= chunk.first_row <= chunk.last_row < chunk.row_end <= table.end
            and chunk.rows <= most
            and chunk.rows <= chunk.last_row - chunk.first_row + 1
            and chunk.column_start in starts
            and chunk.column_end in ends
            and chunk.column_start < chunk.column_end
        ):
            raise ValueError(f"{chunk.key}: {chunk.rows} rows of {chunk.shard} do not lie in that table")
    return tables


def check_chunks(manifest: Manifest, key: str) -> None:
    """Check that a manifest's chunks lie in its tables.

    Raises:
        SnapshotError: names the object, and the table or the chunk.
    """
    tables, keyed = manifest.meta["model"].get("tables", ()), manifest.version == KEYED_FORMAT_VERSION
    with refusing(key, BAD_META):
        checked_tables(tables, manifest.row_objects, keyed=keyed)


def _parse(model: type[M], body: bytes, key: str) -> M:
    newer, older = ": use a newer dlrm-operator", ": that version was never released"
    return parse_sealed(model, body, key, "format", newer=newer, older=older)
