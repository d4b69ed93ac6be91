"""Load a snapshot with the older ones that it is based on, and choose the base of the next snapshot."""

from __future__ import annotations

import hashlib
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.manifest import (
    ChainLink,
    ChainSummary,
    ChunkEntry,
    Kind,
    Manifest,
    manifest_key,
    parse_manifest,
)
from dlrm_checkpointer.types import ShardId, SnapshotName
from dlrm_stores import ObjectStore


class BrokenChainError(SnapshotError):
    """Report a missing or damaged base. The cut cannot be stored; a later cut brings its rows again."""


class ChainLayers:
    """Index the objects with rows of manifests, oldest first, by table: in one pass however many tables there are.

    Those with keys that are gone are among them.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._of: list[dict[str, list[ChunkEntry]]] = [{} for _ in manifests]
        for found, manifest in zip(self._of, manifests, strict=True):
            for chunk in manifest.row_objects:
                found.setdefault(chunk.table, []).append(chunk)

    def __call__(self, table: str) -> tuple[tuple[ChunkEntry, ...], ...]:
        """Return a table's objects in each of the manifests."""
        return tuple(tuple(each.get(table, ())) for each in self._of)


@dataclass(frozen=True)
class Chain:
    """Hold a snapshot's manifest and those below it, oldest first. The newest one with a row wins."""

    manifests: tuple[Manifest, ...]
    links: tuple[ChainLink, ...]
    """One link per manifest."""

    @property
    def newest(self) -> Manifest:
        """Return the manifest of the snapshot itself."""
        return self.manifests[-1]

    @cached_property
    def chunks(self) -> ChainLayers:
        """Return each table's objects with rows or keys that are gone, manifest by manifest."""
        return ChainLayers(self.manifests)

    def pack(self) -> Iterator[bytes]:
        """Yield each manifest for another process, oldest first: some 60 bytes for an object that it lists."""
        return (zlib.compress(manifest.encode(), 1) for manifest in self.manifests)

    @classmethod
    def unpack(cls, links: Sequence[ChainLink], bodies: Iterable[bytes], shards: Sequence[ShardId]) -> Chain:
        """Return what a process that reads ``shards`` needs of a packed chain; see ``of_shards``.

        Takes memory for one whole manifest at a time.

        Raises:
            SnapshotError: names the manifest that is damaged.
        """
        return cls(tuple(_unpack(*each, shards) for each in zip(links, bodies, strict=True)), tuple(links))

    def of_shards(self, shards: Sequence[ShardId]) -> Chain:
        """Leave out objects without rows of ``shards``, except the one with the last row of each table."""
        return Chain(tuple(_of_shards(manifest, shards) for manifest in self.manifests), self.links)


@dataclass(frozen=True, kw_only=True)
class SnapshotBase:
    """Describe what a snapshot is based on."""

    kind: Kind
    chain: tuple[ChainLink, ...] = ()
    growth: ChainSummary | None = None
    """The parent's growth; None if the snapshot is full."""
    merged: tuple[Manifest, ...] = ()
    """Snapshots, oldest first; their rows are stored again together with those of the cut."""


def load_chain(store: ObjectStore, name: SnapshotName) -> Chain:
    """Read a snapshot's manifest and those of its chain.

    Raises:
        NoInputError: the snapshot does not exist.
        SnapshotError: it cannot be read, or a manifest of its chain is gone or was replaced.
    """
    key = manifest_key(name.step, name.attempt)
    try:
        body = store.get(key)
    except NoInputError as error:
        raise NoInputError(f"{store.uri}: no snapshot of step {name.step} by attempt {name.attempt}") from error
    newest = parse_manifest(body, key)
    below = tuple(_load(store, link, key) for link in newest.chain)
    if below and below[0].kind != "full":
        raise SnapshotError(f"{store.uri}/{key}: its chain does not begin with a full snapshot")
    mine = ChainLink(step=name.step, attempt=name.attempt, sha256=hashlib.sha256(body).hexdigest())
    return Chain((*below, newest), (*newest.chain, mine))


def _load(store: ObjectStore, link: ChainLink, above: str) -> Manifest:
    key = manifest_key(link.step, link.attempt)
    try:
        body = store.get(key)
    except NoInputError as error:
        raise SnapshotError(f"{store.uri}/{key}: manifest not found; {above} is based on it") from error
    if hashlib.sha256(body).hexdigest() != link.sha256:
        raise SnapshotError(f"{store.uri}/{key}: not the manifest that {above} is based on: its SHA-256 differs")
    return parse_manifest(body, key)


def _unpack(link: ChainLink, body: bytes, shards: Sequence[ShardId]) -> Manifest:
    key = manifest_key(link.step, link.attempt)
    try:
        whole = zlib.decompress(body)
    except zlib.error as error:
        raise SnapshotError(f"{key}: damaged on its way from rank 0: {error}") from error
    return _of_shards(parse_manifest(whole, key), shards)


def _of_shards(manifest: Manifest, shards: Sequence[ShardId]) -> Manifest:
    wanted = defaultdict[str, list[ShardId]](list)
    for shard in shards:
        wanted[shard.table].append(shard)
    last = {chunk.table: chunk for chunk in sorted(manifest.chunks, key=lambda chunk: chunk.last_row)}

    def is_kept(entry: ChunkEntry) -> bool:
        return entry is last.get(entry.table) or any(map(entry.overlaps, wanted[entry.table]))

    kept = {"chunks": tuple(filter(is_kept, manifest.chunks)), "gone": tuple(filter(is_kept, manifest.gone))}
    return manifest.model_copy(update=kept)


def snapshot_base(kind: Kind, parent: Chain | None, *, chained: bool) -> SnapshotBase:
    """Return what the snapshot of a cut is based on.

    ``parent`` is what its rows are relative to; None: it holds all rows ever updated. An increment that is ``chained``
    is based on its parent, else on the parent's full snapshot.
    """
    if parent is None:
        return SnapshotBase(kind="full")
    if kind == "full":
        return SnapshotBase(kind="full", merged=parent.manifests)
    growth = parent.newest.growth
    if chained:
        return SnapshotBase(kind=kind, chain=parent.links, growth=growth)
    return SnapshotBase(kind=kind, chain=parent.links[:1], growth=growth, merged=parent.manifests[1:])
