"""The sidecar's side of the hand-off folder: whole cuts to work off, who still lives, and what to tell them."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dlrm_api.errors import SnapshotError, TemporaryError
from dlrm_api.process import raise_device
from dlrm_checkpointer.handoff.protocol import (
    BROKEN_FILE,
    COMMITTED_FILE,
    DURABLE_FILE,
    DURABLE_PREFIX,
    INDEX_FILE,
    REFUSED_FILE,
    ROWS_FILE,
    SUPERSEDED_FILE,
    UPLOADED_PREFIX,
    CutName,
    Durable,
    ReadyCut,
    SliceName,
    UploadedCut,
    boot_id,
    budget_lock,
    check_version,
    closed_path,
    dead_path,
    discard_unfinished,
    durable_path,
    lock_if_free,
    lock_path,
    ranks_with_unfinished_cuts,
    read_json,
    ready_cuts,
    ready_slices,
    sidecar_lock_path,
    sweep_dead,
    take_lock,
    uploaded_notes,
    uploaded_path,
    write_json,
)
from dlrm_checkpointer.types import CutMeta, SnapshotName

_NOTES = (
    f"{DURABLE_PREFIX}*.json",
    f"{UPLOADED_PREFIX}*.json",
    COMMITTED_FILE,
    REFUSED_FILE,
    BROKEN_FILE,
    SUPERSEDED_FILE,
)
"""What the sidecar alone writes: a killed one may have left unfinished ones."""


class Inbox:
    """The hand-off folder of one pod.

    Args:
        folder: made if absent.
        ranks: global ranks of this pod.

    Raises:
        UsageError: another sidecar works on the folder.
        DeviceError: the folder can't be made or written.
    """

    def __init__(self, folder: Path, ranks: range) -> None:
        self.folder, self.ranks = folder, ranks
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(sidecar_lock_path(folder), "a checkpointer of this folder")
        except OSError as error:
            raise_device(error, folder, 0)
        self.sweep()
        for draft in (path for name in _NOTES for path in folder.glob(f".{name}")):
            draft.unlink()

    def entries(self) -> frozenset[str]:
        """Names in the folder: while they stay, no cut and no slice has come or gone."""
        with os.scandir(self.folder) as entries:
            return frozenset(entry.name for entry in entries)

    def ready(self) -> list[CutName | SliceName]:
        """Whole cuts and slices of cuts that wait, oldest step first; a rank has one of the two at a time."""
        names: list[CutName | SliceName] = [*ready_slices(self.folder), *ready_cuts(self.folder)]
        return sorted(names, key=lambda name: (name.step, name.attempt, name.rank))

    def has(self, name: CutName | SliceName) -> bool:
        """Whether an entry is there still: a rank may withdraw the slices of a cut that it gives up."""
        return (self.folder / str(name)).exists()

    def open(self, name: CutName | SliceName) -> ReadyCut:
        """Map a cut or a slice.

        Raises:
            SnapshotError: it can't be whole, because the machine went down after it was written or bytes are gone; or
                another release handed it over.
            TemporaryError: the system does not let it be opened now.
        """
        check_version(lock_path(self.folder, name.rank), f"rank {name.rank}")
        path = self.folder / str(name)
        try:
            index = json.loads((path / INDEX_FILE).read_text())
            meta, number = CutMeta.from_json(index["meta"]), int(index["slice"])
            data = _map(path / ROWS_FILE, int(index["bytes"]))
            whole = len(data) == index["bytes"] and index["boot"] == boot_id()
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"{path}: not a whole cut: {error!r}") from error
        except OSError as error:
            raise TemporaryError(f"{path}: cannot be opened now: {error.strerror or error}") from error
        if not whole:
            raise SnapshotError(
                f"{path}: {len(data)} of {index['bytes']} bytes, or written before the machine restarted"
            )
        return ReadyCut(name=name, meta=meta, number=number, nbytes=len(data), index=index, data=data)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def free(self, name: CutName | SliceName) -> None:
        """Give the memory back; from the rename on it no longer waits. Nothing happens where it was withdrawn."""
        with budget_lock(self.folder):
            self._kill(name)
        self.sweep()

    def _kill(self, name: CutName | SliceName) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.folder / str(name)).rename(dead_path(self.folder, name.rank))

    def sweep(self) -> None:
        """Remove what was freed here, or withdrawn by its rank."""
        sweep_dead(self.folder)

    def durable(self, cut: ReadyCut) -> Durable:
        """What is durable of the slices before this one, or of more where this one was seen to already.

        Raises:
            SnapshotError: the note of some of them is gone.
        """
        path = self.folder / str(cut.name) / DURABLE_FILE
        if isinstance(cut.name, SliceName):
            path = durable_path(self.folder, cut.name.rank)
        elif not cut.number:
            return Durable()
        note = read_json(path)
        if note and isinstance(cut.name, SliceName) and note["put"] != cut.name.put:
            note = None
        done = Durable.unpack(note["done"]) if note else Durable()
        if done.slices < cut.number:
            raise SnapshotError(f"{path}: tells of {done.slices} of the {cut.number} slices before {cut.name}")
        return done

    def note_durable(self, name: SliceName, done: Durable) -> None:
        """Remember, over a restart of the sidecar, what is durable with this slice, unless it was withdrawn."""
        with budget_lock(self.folder):
            if self.has(name):
                write_json(durable_path(self.folder, name.rank), {"put": name.put, "done": done.pack()})
                self._kill(name)

    def drop_unfinished(self) -> list[int]:
        """Throw away what ranks left that died before their cut was whole; returns these ranks."""
        dropped = []
        for rank in sorted(ranks_with_unfinished_cuts(self.folder)):
            with lock_if_free(lock_path(self.folder, rank)) as free:  # so that the rank can't start again meanwhile
                if free:
                    discard_unfinished(self.folder, rank)
                    dropped.append(rank)
        return dropped

    def note_uploaded(self, cut: ReadyCut) -> None:
        """Remember, over a restart of the sidecar, that this cut's parts are durable and wait for the manifest."""
        parent = cut.index["meta"]["parent"]
        note = {"worldSize": cut.meta.world_size, "time": cut.index["time"], "parent": parent}
        write_json(uploaded_path(self.folder, cut.name.step, cut.name.attempt), note)

    def uploaded(self) -> list[UploadedCut]:
        """Cuts whose local parts are durable and whose manifest may be missing, oldest step first."""
        found = []
        for step, attempt, path in uploaded_notes(self.folder):
            value = read_json(path)
            if value:
                parent = SnapshotName.from_json(value["parent"])
                world_size, handed_over = int(value["worldSize"]), float(value["time"])
                found.append(UploadedCut(step, attempt, world_size, handed_over, parent))
        return sorted(found, key=lambda cut: (cut.step, cut.attempt))

    def parents_in_flight(self) -> set[SnapshotName]:
        """Parents of the cuts of this pod's ranks that are not committed yet, which must stay in the store till then.

        A snapshot that a rank will name as a parent is among them, or newer than all that were told of before the call.
        """
        with budget_lock(self.folder):
            notes = [read_json(path) for path in self.folder.glob("parent-*.json")]
        found = {SnapshotName.from_json(note) for note in notes if note}
        for name in self.ready():  # a cut is here before its parent's file is gone, and uploaded before it is not here
            index = read_json(self.folder / str(name) / INDEX_FILE)
            if index:
                found.add(SnapshotName.from_json(index["meta"]["parent"]))
        found.update(cut.parent for cut in self.uploaded())
        return {name for name in found if name is not None}

    def forget_uploaded(self, cut: UploadedCut) -> None:
        """The manifest is there, or will never be."""
        uploaded_path(self.folder, cut.step, cut.attempt).unlink(missing_ok=True)

    def publish_committed(self, name: SnapshotName) -> None:
        """Tell the ranks of the newest committed snapshot."""
        known = SnapshotName.from_json(read_json(self.folder / COMMITTED_FILE))
        if known is None or known.recency < name.recency:
            write_json(self.folder / COMMITTED_FILE, asdict(name))

    def publish_refused(self, step: int, attempt: int, problem: str) -> None:
        """Tell the ranks that a cut of theirs can never be stored."""
        write_json(self.folder / REFUSED_FILE, {"step": step, "attempt": attempt, "problem": problem})

    def publish_broken(self, parent: SnapshotName) -> None:
        """Tell the ranks that no cut can go on from a snapshot."""
        write_json(self.folder / BROKEN_FILE, asdict(parent))

    def publish_superseded(self, attempt: int) -> None:
        """Tell the ranks that the store goes on with a newer attempt than theirs."""
        write_json(self.folder / SUPERSEDED_FILE, {"attempt": attempt})

    def living(self) -> frozenset[int]:
        """Local ranks whose lock is held."""
        return frozenset(rank for rank in self.ranks if self._is_living(rank))

    def _is_living(self, rank: int) -> bool:
        with lock_if_free(lock_path(self.folder, rank)) as free:
            return not free

    def reasons(self) -> dict[int, str]:
        """Why ranks ended, where they said so."""
        return {rank: str(note["reason"]) for rank, note in self._last_words().items()}

    def in_order(self) -> bool:
        """Whether every local rank ended where the gang had agreed to, and not because it, or another rank, failed."""
        words = self._last_words()
        return len(words) == len(self.ranks) and not any(note["failed"] for note in words.values())

    def _last_words(self) -> dict[int, dict[str, Any]]:
        notes = {rank: read_json(closed_path(self.folder, rank)) for rank in self.ranks}
        return {rank: note for rank, note in notes.items() if note}


def _map(path: Path, size: int) -> memoryview:
    """The first bytes of a file, or all where it is shorter; what follows them is memory kept for later cuts."""
    with path.open("rb") as file:
        size = min(size, os.fstat(file.fileno()).st_size)
        return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)) if size else memoryview(b"")
