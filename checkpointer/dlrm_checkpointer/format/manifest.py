"""Define part lists and manifests, which list a snapshot's objects as a function of the cut alone."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic.dataclasses import dataclass

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.format.canonical import FORMAT, FormatModel, SealedModel, parse_sealed
from dlrm_checkpointer.types import MAX_NAME, CutMeta, ShardId, SnapshotName, TableMeta

FORMAT_VERSION = 2
MANIFESTS = "manifests/"
PARTS = "parts/"
CHUNKS = "chunks/"
Kind = Literal["full", "increment"]
MAX_BYTES = 2**63
"""Bound on the size of an object: sizes are signed 64-bit integers."""
_KEY = re.compile(r"manifests/(\d{16})-(\d{8})\.json")
_OF_A_CUT = re.compile(f"(?:{CHUNKS}|{PARTS})([0-9]{{16}})/([0-9]{{8}})/")


class SnapshotConflictError(SnapshotError):
    """Report that this step and attempt are stored already with other content; nothing was replaced."""


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

    @classmethod
    def of(cls, put: ObjectEntry, shard: ShardId, row_ids: NDArray[np.int64]) -> Self:
        """Return the entry of an object that holds rows.

        Args:
            put: the object.
            shard: shard of the rows.
            row_ids: (N,) ascending, N >= 1.
        """
        first, last = int(row_ids[0]), int(row_ids[-1])
        return cls(**asdict(put), **asdict(shard), rows=len(row_ids), first_row=first, last_row=last)

    @property
    def shard(self) -> ShardId:
        """Return the shard of the rows."""
        return ShardId(
            table=self.table,
            row_start=self.row_start,
            row_end=self.row_end,
            column_start=self.column_start,
            column_end=self.column_end,
        )


class Link(FormatModel):
    """Name a snapshot that another object is based on, with the SHA-256 of its manifest."""

    step: int = Field(ge=0)
    attempt: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def name(self) -> SnapshotName:
        """Return the name of the snapshot."""
        return SnapshotName(self.step, self.attempt)


class ChainLink(Link):
    """Name a snapshot of a chain, with the SHA-256 of its own manifest."""


class ChainSummary(FormatModel):
    """Sum up the sizes of a full snapshot and its increments, which decide when the next full one is due.

    Sizes are the bytes of all objects that hold rows.
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
        return ChainSummary(
            base_bytes=self.base_bytes,
            base_time=self.base_time,
            increments=self.increments + 1,
            increment_bytes=self.increment_bytes + size,
            last_bytes=size,
        )


class PartList(SealedModel):
    """List what one rank stored of one cut: ``parts/<step>/<attempt>/<rank>.json``."""

    format: Literal["dlrm-part"] = "dlrm-part"
    version: int = FORMAT_VERSION
    rank: int = Field(ge=0)
    kind: Kind
    bits: int
    chain: tuple[ChainLink, ...]
    before: ChainSummary | None
    """Growth of the chain's newest snapshot; None if the snapshot is full."""
    meta: dict[str, Any]
    chunks: tuple[ChunkEntry, ...]
    dense: ObjectEntry | None


class Manifest(SealedModel):
    """Describe a snapshot, which exists exactly as long as this object does."""

    format: Literal["dlrm-snapshot"] = "dlrm-snapshot"
    version: int = FORMAT_VERSION
    kind: Kind
    bits: int
    chain: tuple[ChainLink, ...]
    """Snapshots that provide the rows that this one lacks, oldest first: a full one, then increments."""
    growth: ChainSummary
    meta: dict[str, Any]
    chunks: tuple[ChunkEntry, ...]
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
        return (*self.chunks, self.dense)

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
        size = sum(chunk.bytes for chunk in chunks)
        return cls(
            kind=first.kind,
            bits=first.bits,
            chain=first.chain,
            growth=first.before.after(size) if first.before else ChainSummary(base_bytes=size, base_time=cut.time),
            meta=first.meta,
            chunks=chunks,
            dense=dense[0],
        )


M = TypeVar("M", PartList, Manifest)


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
    with _meta_of(key):
        CutMeta.from_json(part.meta)
    return part


def parse_manifest(body: bytes, key: str) -> Manifest:
    """Parse a manifest.

    Raises:
        NewerVersionError: a newer version wrote it.
        SnapshotError: names the object and the field that is wrong.
    """
    manifest = _parse(Manifest, body, key)
    with _meta_of(key):
        cut = manifest.cut
    check_chunks(manifest, key)
    if parse_manifest_key(key) != (cut.step, cut.attempt):
        raise SnapshotError(f"{key}: says that it is step {cut.step} of attempt {cut.attempt}")
    if (manifest.kind == "full") != (not manifest.chain):
        raise SnapshotError(f"{key}: is {manifest.kind} with a chain of {len(manifest.chain)}")
    return manifest


def checked_tables(documents: Iterable[Mapping[str, Any]], chunks: Iterable[ChunkEntry]) -> dict[str, TableMeta]:
    """Parse tables by name, and check that their chunks lie in them: readers rely on the entries.

    Raises:
        KeyError, TypeError, ValueError, OverflowError: names the table or the chunk that is wrong.
    """
    tables: dict[str, TableMeta] = {}
    for table in map(TableMeta.from_json, documents):
        if tables.setdefault(table.name, table) is not table:
            raise ValueError(f"duplicate table {table.name!r}")
    edges = {
        name: ({start for start, _ in table.column_blocks}, {end for _, end in table.column_blocks})
        for name, table in tables.items()
    }
    for chunk in chunks:
        if chunk.table not in tables:
            raise ValueError(f"{chunk.key} holds rows of a table {chunk.table[:MAX_NAME]} that its model does not have")
        starts, ends = edges[chunk.table]
        if not (
            chunk.row_start <= chunk.first_row <= chunk.last_row < chunk.row_end <= tables[chunk.table].rows
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
    with _meta_of(key):
        checked_tables(manifest.meta["model"].get("tables", ()), manifest.chunks)


@contextlib.contextmanager
def _meta_of(key: str) -> Iterator[None]:
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise SnapshotError(f"{key}: meta is not as the format says: {error!r}") from error


def _parse(model: type[M], body: bytes, key: str) -> M:
    def refusal(version: int) -> str:
        advice = "use a newer dlrm-operator" if version > FORMAT_VERSION else "that version was never released"
        return f"format version {version}, this program reads version {FORMAT_VERSION}: {advice}"

    return parse_sealed(model, body, key, FORMAT_VERSION, refusal)
