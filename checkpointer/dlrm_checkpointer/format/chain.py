"""A snapshot and those that its rows go over, and what the next one goes over."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dlrm_api.checkpoint import PolicyName
from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.manifest import (
    ChainLink,
    ChunkEntry,
    Growth,
    Kind,
    Manifest,
    manifest_key,
    parse_manifest,
)
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores import ObjectStore


class BrokenChainError(SnapshotError):
    """What a cut goes over is gone or damaged: the cut can't be stored, and its rows come again with a later one."""


class Layers:
    """The chunks of some manifests by table: looked through once, however many tables there are.

    Args:
        manifests: oldest first.
    """

    def __init__(self, manifests: Sequence[Manifest]) -> None:
        self._of: list[dict[str, list[ChunkEntry]]] = []
        for manifest in manifests:
            found: dict[str, list[ChunkEntry]] = {}
            for chunk in manifest.chunks:
                found.setdefault(chunk.table, []).append(chunk)
            self._of.append(found)

    def __call__(self, table: str) -> tuple[tuple[ChunkEntry, ...], ...]:
        """A table's chunks in each of the manifests."""
        return tuple(tuple(each.get(table, ())) for each in self._of)


@dataclass(frozen=True)
class Chain:
    """A snapshot's manifest with those below it, oldest first; a row is that of the newest one that holds it."""

    manifests: tuple[Manifest, ...]
    links: tuple[ChainLink, ...]
    """One for each manifest."""

    @property
    def newest(self) -> Manifest:
        """The snapshot itself."""
        return self.manifests[-1]

    @cached_property
    def chunks(self) -> Layers:
        """Each table's chunks, manifest by manifest."""
        return Layers(self.manifests)


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What a snapshot is made relative to."""

    kind: Kind
    chain: tuple[ChainLink, ...] = ()
    growth: Growth | None = None
    """Of the parent; None where the snapshot is full."""
    merged: tuple[Manifest, ...] = ()
    """Snapshots, oldest first, whose rows are stored once more with those of the cut."""


def load_chain(store: ObjectStore, name: SnapshotName) -> Chain:
    """Read a snapshot's manifest and those of its chain.

    Raises:
        NoInputError: there is no such snapshot.
        SnapshotError: it can't be read, or one of its chain is gone or another one than it was.
    """
    key = manifest_key(name.step, name.attempt)
    try:
        body = store.get(key)
    except NoInputError as error:
        raise NoInputError(
            f"{store.uri}: there is no snapshot of step {name.step} by attempt {name.attempt}"
        ) from error
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
        raise SnapshotError(f"{store.uri}/{key}: gone, and {above} goes over it") from error
    if hashlib.sha256(body).hexdigest() != link.sha256:
        raise SnapshotError(f"{store.uri}/{key}: is not the manifest that {above} goes over: its SHA-256 differs")
    return parse_manifest(body, key)


def basis(kind: Kind, policy: PolicyName, parent: Chain | None) -> Basis:
    """What the snapshot of a cut is made relative to.

    Args:
        kind: of the snapshot.
        policy: of the job.
        parent: what the cut's rows are relative to; None: all rows that were ever updated are in the cut.
    """
    if parent is None:
        return Basis(kind="full")
    if kind == "full":
        return Basis(kind="full", merged=parent.manifests)
    if policy == "consecutive":
        return Basis(kind=kind, chain=parent.links, growth=parent.newest.growth)
    return Basis(kind=kind, chain=parent.links[:1], growth=parent.newest.growth, merged=parent.manifests[1:])
