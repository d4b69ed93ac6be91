"""Audit a store, whatever went wrong with it: of all that was handed over and acknowledged, what is left.

The states that snapshots must give are made of what was handed over, by the coding of rows alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.rows import code_rows, decode_rows
from dlrm_checkpointer.format.attempts import read_attempts
from dlrm_checkpointer.format.chain import load_chain
from dlrm_checkpointer.format.manifest import Manifest, manifest_key, parse_manifest
from dlrm_checkpointer.read.catalog import walk_table
from dlrm_checkpointer.read.fetch import check_present
from dlrm_checkpointer.read.restore import Snapshot, newest_snapshot
from dlrm_checkpointer.types import ShardRows, SnapshotName, TableMeta
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_testing.checkpointer.turns import MemoryStore

Arrays = dict[str, NDArray[np.float32]]


@dataclass
class State:
    """Hold what restoring a snapshot must give."""

    rows: Arrays
    state: Arrays
    dense: dict[str, NDArray[Any]]


@dataclass
class Handed:
    """Hold a cut as it was handed over."""

    parent: SnapshotName | None
    pieces: list[ShardRows]
    dense: dict[str, NDArray[Any]]


class Truth:
    """Hold what a store must contain.

    Args:
        store: the job's store.
        rule: of its retention.
        new_model: makes the model.
        tables: of the model.
    """

    def __init__(
        self, store: MemoryStore, rule: RetentionPolicy, new_model: Any, tables: tuple[TableMeta, ...]
    ) -> None:
        self.store, self.rule, self.new_model, self.tables = store, rule, new_model, tables
        self.handed: dict[SnapshotName, Handed] = {}
        self.acknowledged: set[SnapshotName] = set()
        self.restored: dict[int, SnapshotName | None] = {}
        """Snapshot that each attempt that counts continued from."""
        self.damaged: set[str] = set()
        self._manifests: dict[bytes, Manifest] = {}

    def note_attempts(self, chosen: SnapshotName | None) -> None:
        """Attempts that are new went on from a snapshot."""
        for attempt in read_attempts(self.store, 0):
            self.restored.setdefault(attempt.number, chosen)

    def lineage(self, attempt: int) -> set[SnapshotName]:
        """Cuts of the histories that the attempt goes on from."""
        if attempt not in self.restored:
            return set()
        found: set[SnapshotName] = set()
        start = self.restored[attempt]
        while start is not None:
            found |= {name for name in self.handed if name.attempt == start.attempt and name.step <= start.step}
            start = self.restored.get(start.attempt)
        return found

    def current(self) -> set[SnapshotName]:
        """Cuts that a new attempt may go on from."""
        newest = max(self.restored, default=0)
        return self.lineage(newest) | {name for name in self.handed if name.attempt == newest}

    def usable(self) -> set[SnapshotName]:
        """Acknowledged ones of the history that counts which must not be forgotten: the newest, if it is undamaged.

        Where the newest is damaged, those that are still there whole.
        """
        found = {name for name in self.current() & self.acknowledged if not self.damaged & set(self.keys(name))}
        if not self.damaged:
            return {max(found)} if found else set()
        return {name for name in found if all(key in self.store.objects for key in self.keys(name))}

    def manifest(self, name: SnapshotName) -> Manifest:
        """Return the manifest as it was written."""
        key = manifest_key(name.step, name.attempt)
        body = self.store.written[key]
        if body not in self._manifests:
            self._manifests[body] = parse_manifest(body, key)
        return self._manifests[body]

    def keys(self, name: SnapshotName) -> Iterator[str]:
        """Return every object that reading a snapshot needs."""
        manifest = self.manifest(name)
        yield manifest_key(name.step, name.attempt)
        yield from (entry.key for entry in manifest.objects)
        for link in manifest.chain:
            yield manifest_key(link.step, link.attempt)
            yield from (entry.key for entry in self.manifest(link.name).chunks)

    def state(self, name: SnapshotName | None) -> State:
        """Return what a snapshot holds: its parent's state with the cut's rows, as encoded."""
        if name is None:
            fresh = self.new_model(self.tables)
            return State(fresh.rows, fresh.state, fresh.dense)
        cut = self.handed[name]
        below = self.state(cut.parent)
        tables = {table.name: table for table in self.tables}
        for piece in cut.pieces:
            shard = piece.shard
            places = tables[shard.table].state_of(shard.column_start, shard.column_end)
            for coded in code_rows(piece, self.manifest(name).bits) if len(piece.row_ids) else []:
                back = decode_rows(coded)
                rows = back.rows.astype(np.float16) if tables[shard.table].dtype == "fp16" else back.rows
                below.rows[shard.table][back.row_ids, shard.column_start : shard.column_end] = rows
                below.state[shard.table][back.row_ids, places.start : places.stop] = back.state
        return State(below.rows, below.state, cut.dense)

    def compare(self, snapshot: Snapshot, wanted: State) -> None:
        """Read all of it."""
        for table in snapshot.meta.tables:
            for block in walk_table(snapshot, table):
                block.check()
                rows, state = block.fill()
                np.testing.assert_array_equal(rows, wanted.rows[table.name][block.start : block.end])
                np.testing.assert_array_equal(state, wanted.state[table.name][block.start : block.end])
        found = snapshot.dense()
        assert found.keys() == wanted.dense.keys()
        for name, array in wanted.dense.items():
            np.testing.assert_array_equal(found[name], array)

    def check(self) -> None:
        """Check that a reader finds the right state, or is refused if nothing better is left."""
        least = self.usable()
        try:
            snapshot, _ = newest_snapshot(self.store)
        except SnapshotError:
            assert self.damaged, "nothing was damaged"
            assert not least, f"{max(least)} could be used"
            return
        if snapshot is None:
            assert not least, f"{max(least)} was forgotten"
            return
        assert snapshot.name in self.handed
        assert self.damaged or snapshot.name in self.current(), f"{snapshot.name} is of no history that counts"
        assert not least or snapshot.name >= max(least), f"{max(least)} was forgotten for {snapshot.name}"
        self.compare(snapshot, self.state(snapshot.name))
        if not self.damaged:
            self.check_chains()

    def check_chains(self) -> None:
        """Check that every snapshot that retention keeps can be read, with its ancestors."""
        for name in Retention(self.store, self.rule).decide().keep:
            chain = load_chain(self.store, name)
            check_present(self.store, Snapshot(self.store, chain).objects)

    def damage(self, draw: random.Random) -> None:
        """Flip a bit of one object, cut it short, or remove it."""
        keys = [key for key in sorted(self.store.objects) if key.startswith(("chunks/", "parts/", "manifests/"))]
        if not keys:
            return
        key = draw.choice(keys)
        body, time = self.store.objects[key]
        harm: Callable[[], bytes | None] = draw.choice(
            [lambda: flipped(body, draw.randrange(8 * len(body))), lambda: body[: len(body) // 2], lambda: None]
        )
        changed = harm()
        self.damaged.add(key)
        if changed is None:
            del self.store.objects[key]
        else:
            self.store.objects[key] = changed, time


def flipped(body: bytes, bit: int) -> bytes:
    """Return a body with one bit changed."""
    changed = bytearray(body)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)
