"""Define the hand-off directory of a pod; no other module touches its files.

Ranks and sidecar talk through this directory, by renames. A name says what an entry is and who owns it.

rank-<r>.lock                         held by rank r while it runs (flock): its pid and ``LAYOUT_VERSION``
sidecar.lock                          held by the sidecar while it runs (flock), with the same content
budget.lock                           held for a moment to take, move or free bytes (flock)
closed-<r>.json                       why rank r ended, and whether it failed; absent after a kill
parent-<r>.json                       the parent of the cut that rank r copies, until that cut is ready
awaited-<r>.json                      the cut whose commit rank r waits for, as after the last step: step, attempt
writing-<r>/                          the segment that rank r copies: rows.bin
slice-<step>-<attempt>-<r>-<n>-<put>/ segment n of a cut, when it is not the cut's last one: rows.bin, index.json
durable-<r>.json                      what the sidecar stored of rank r's segments; outlives them
ready-<step>-<attempt>-<r>/           the last segment of a cut, and with durable.json those before it: the whole cut
dead-<r>-*/                           freed or withdrawn; the sidecar removes it
spare-<r>.bin                         rows.bin of a removed segment, reused by rank r's next one; counts as free
uploaded-<step>-<attempt>.json        the local parts of a cut are durable, its manifest is missing
committed.json                        newest committed snapshot: step, attempt
refused.json                          a cut that can never be stored: step, attempt, problem
broken.json                           a parent that the sidecar could not read: step, attempt
superseded.json                       a newer attempt, which owns the store now: attempt
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import mmap
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, TypeAdapter

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import SnapshotError, TemporaryError, UsageError
from dlrm_api.process import raise_device
from dlrm_checkpointer.format.manifest import ChunkEntry, GoneEntry, NewerVersionError
from dlrm_checkpointer.types import CutMeta, GoneRows, ShardId, ShardRows, SnapshotName

T = TypeVar("T")

LAYOUT_VERSION = 2
"""Version of the entries above and their content. Raise it with each change that an older release would misread."""

LOCK_TIMEOUT_S = 2.0
"""The sidecar tests the ranks' locks for an instant now and then, so a first refusal proves nothing."""
POLL_S = 0.02

_ROWS = "rows.bin"
_INDEX = "index.json"
_DURABLE = "durable.json"
_UPLOADED = re.compile(r"uploaded-(\d+)-(\d+)\.json")
_UNFINISHED = re.compile(r"(?:writing|durable|parent)-(\d+)(?:\.json)?")
_SIDECAR_NOTES = ("durable-*", "uploaded-*", "committed", "refused", "broken", "superseded")
_JSON = TypeAdapter(dict[str, Any])
_NAME = TypeAdapter(SnapshotName)


@dataclass(frozen=True, order=True)
class CutName:
    """Name a ready cut; ordered by step, attempt, rank."""

    step: int
    attempt: int
    rank: int
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"ready-(\d+)-(\d+)-(\d+)")

    def __str__(self) -> str:
        return f"ready-{self.step:016d}-{self.attempt:08d}-{self.rank:06d}"

    @property
    def snapshot(self) -> SnapshotName:
        """Return the snapshot that the cut becomes."""
        return SnapshotName(self.step, self.attempt)

    @classmethod
    def parse(cls, entry: str) -> Self | None:
        """Parse the name of an entry; None if it is of another kind."""
        match = cls.pattern.fullmatch(entry)
        return cls(*map(int, match.groups())) if match else None


@dataclass(frozen=True, order=True)
class SegmentName(CutName):
    """Name a segment that is not its cut's last; ``put`` distinguishes two tries of one cut."""

    number: int
    put: int
    pattern: ClassVar[re.Pattern[str]] = re.compile(r"slice-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)")

    def __str__(self) -> str:
        return f"slice-{self.step:016d}-{self.attempt:08d}-{self.rank:06d}-{self.number:06d}-{self.put}"


@dataclass(frozen=True)
class RefusedCut(SnapshotName):
    """Name a cut that can never be stored, and why."""

    problem: str


class Note(Generic[T]):
    """Read and replace a small JSON file atomically; unsynced, as readers are on this machine."""

    def __init__(self, path: Path, content: TypeAdapter[T]) -> None:
        self.path, self._content = path, content

    def read(self) -> T | None:
        """Return the content, or None if the file is absent or unreadable."""
        try:
            # By the json module, as in write: pydantic's parser refuses the lone surrogates of undecodable file names.
            return self._content.validate_python(json.loads(self.path.read_bytes()))
        except (FileNotFoundError, ValueError):
            return None

    def write(self, value: T) -> None:
        """Replace the content.

        Raises:
            DeviceError: the directory cannot be written.
        """
        draft = self.path.with_name(f".{self.path.name}")
        try:
            draft.write_text(json.dumps(self._content.dump_python(value)))
            draft.replace(self.path)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            raise_device(error, self.path, 0)

    def remove(self) -> None:
        """Remove the file, if it exists."""
        self.path.unlink(missing_ok=True)


class ProcessLock:
    """Show that a process runs, by a lock on a file (flock) that ends with it however it dies."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def hold(self, who: str) -> int:
        """Lock until the returned descriptor is closed or the process dies; write its pid and layout version.

        Raises:
            UsageError: a running process holds it; names its pid.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        while not _try_lock(descriptor):
            if time.monotonic() > deadline:
                holder = next(iter(self._holder()), "unknown")
                os.close(descriptor)
                raise UsageError(f"{self.path}: {who} already runs (pid {holder}): end it first")
            time.sleep(POLL_S)
        os.pwrite(descriptor, f"{os.getpid()} {LAYOUT_VERSION}\n".encode(), 0)
        return descriptor

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """Hold the lock in the block if no process holds it; yield whether that is so."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield True
            return
        try:
            yield _try_lock(descriptor)
        finally:
            # Closing the file unlocks it.
            os.close(descriptor)

    def check_version(self, who: str) -> None:
        """Refuse another release by the lock that its process holds, or held last.

        Raises:
            NewerVersionError: the other release is newer.
            SnapshotError: it is older.
        """
        holder = self._holder()
        if not holder:
            return
        version = int(holder[1]) if len(holder) > 1 else 0
        if version != LAYOUT_VERSION:
            refused = NewerVersionError if version > LAYOUT_VERSION else SnapshotError
            raise refused(
                f"{self.path.parent}: {who} uses version {version} of the hand-off directory, this program version "
                f"{LAYOUT_VERSION}: set spec.trainer.image and spec.trainer.checkpointerImage to one release, or to "
                "none"
            )

    def _holder(self) -> list[str]:
        """Read pid and version of the last holder: the first line, as a longer one may precede it."""
        try:
            return self.path.read_text(errors="replace").partition("\n")[0].split()
        except FileNotFoundError:
            return []


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class HandoffDir:
    """Access the hand-off directory of one pod; in shared memory in production."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sidecar_lock = ProcessLock(path / "sidecar.lock")
        self.committed = Note(path / "committed.json", _NAME)
        """The newest committed snapshot."""
        self.refused = Note(path / "refused.json", TypeAdapter(RefusedCut))
        """The newest cut that can never be stored."""
        self.broken_parent = Note(path / "broken.json", _NAME)
        """The snapshot that the sidecar could not read as a cut's parent."""
        self.superseded = Note(path / "superseded.json", TypeAdapter(dict[str, int]))
        """``attempt``: the newer one that owns the store now."""

    def rank_lock(self, rank: int) -> ProcessLock:
        """Return the lock that a rank holds while it runs."""
        return ProcessLock(self.path / f"rank-{rank}.lock")

    def has_lost_its_sidecar(self) -> bool:
        """Return whether a sidecar once ran here and none runs now."""
        # First: a sidecar that creates the file after a look at the lock is starting, not lost.
        if not self.sidecar_lock.path.exists():
            return False
        with self.sidecar_lock.if_free() as free:
            return free

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep all others from taking, moving and freeing bytes for a moment."""
        descriptor = os.open(self.path / "budget.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def entries(self) -> frozenset[str]:
        """List the names of all entries. While they stay the same, no cut and no segment has come or gone."""
        with os.scandir(self.path) as entries:
            return frozenset(entry.name for entry in entries)

    def ready_cuts(self) -> list[CutName]:
        """List the ready cuts, oldest step first."""
        return sorted(filter(None, map(CutName.parse, self.entries())))

    def ready_segments(self) -> list[SegmentName]:
        """List the segments of cuts that are not ready yet, oldest step first."""
        return sorted(filter(None, map(SegmentName.parse, self.entries())))

    def has(self, name: CutName) -> bool:
        """Return whether an entry still exists: a rank may withdraw the segments of a cut."""
        return (self.path / str(name)).exists()

    def writing(self, rank: int) -> Path:
        """Return the folder of the segment that a rank copies."""
        return self.path / f"writing-{rank}"

    def rows(self, rank: int) -> Path:
        """Return the file of the rows that a rank copies."""
        return self.writing(rank) / _ROWS

    def parent(self, rank: int) -> Note[SnapshotName]:
        """Return the note of the parent of the cut that a rank copies; written with the directory locked."""
        return Note(self.path / f"parent-{rank}.json", _NAME)

    def awaited(self, rank: int) -> Note[SnapshotName]:
        """Return the note of the cut whose commit a rank waits for."""
        return Note(self.path / f"awaited-{rank}.json", _NAME)

    def closed(self, rank: int) -> Note[dict[str, Any]]:
        """Return the note of why a rank ended: ``reason``, ``failed`` and ``time`` (Unix seconds)."""
        return Note(self.path / f"closed-{rank}.json", _JSON)

    def spare(self, rank: int) -> Path:
        """Return the file that keeps the memory of a rank's removed segment."""
        return self.path / f"spare-{rank}.bin"

    def begin_segment(self, rank: int) -> int:
        """Make the folder of a segment, with the rank's spare memory as its rows; return their bytes.

        Call it with the directory locked.
        """
        self.writing(rank).mkdir()
        with contextlib.suppress(FileNotFoundError):
            self.spare(rank).rename(self.rows(rank))
        self.rows(rank).touch()
        return file_size(self.rows(rank))

    def hand_over(self, name: CutName, rows: int, index: str, *, has_segments: bool) -> None:
        """Hand a rank's segment to the sidecar, atomically by the rename that ends this call.

        It has the name of its cut if it is the cut's last segment. ``rows`` bytes of its rows stay allocated, and
        ``index`` says what lies where in them; ``has_segments``: the cut has segments before this one.
        """
        with self.lock():
            os.truncate(self.rows(name.rank), rows)
            (self.writing(name.rank) / _INDEX).write_text(index)
            if has_segments and not isinstance(name, SegmentName):
                self._durable(name.rank).path.rename(self.writing(name.rank) / _DURABLE)
            self.writing(name.rank).rename(self.path / str(name))
        if not isinstance(name, SegmentName):
            # The ready cut names its parent itself.
            self.parent(name.rank).remove()

    def discard_unfinished(self, rank: int) -> None:
        """Remove all of a cut that is not ready. A segment's bytes count until the sidecar has closed it."""
        with self.lock():
            for name in self.ready_segments():
                if name.rank == rank:
                    self.retire(name)
            self._durable(rank).remove()
            self.parent(rank).remove()
        self._remove(self.writing(rank), rank)

    def ranks_with_unfinished_cuts(self) -> set[int]:
        """List the ranks with a cut that is not ready; those that run still copy it."""
        matches = filter(None, map(_UNFINISHED.fullmatch, self.entries()))
        return {int(match[1]) for match in matches} | {name.rank for name in self.ready_segments()}

    def retire(self, name: CutName) -> None:
        """Mark an entry for removal, if it still exists. Call it with the directory locked."""
        with contextlib.suppress(FileNotFoundError):
            dead = self.path / f"dead-{name.rank}-{time.monotonic_ns()}-{os.getpid()}"
            (self.path / str(name)).rename(dead)

    def sweep(self) -> None:
        """Remove every entry that was freed or withdrawn."""
        for path in self.path.glob("dead-*"):
            self._remove(path, int(path.name.split("-")[1]))

    def _remove(self, path: Path, rank: int) -> None:
        """Remove an entry that nobody reads, and keep its memory for the rank's next segment."""
        rows, spare = path / _ROWS, self.spare(rank)
        with self.lock(), contextlib.suppress(FileNotFoundError):
            if not spare.exists() or spare.stat().st_size < rows.stat().st_size:
                rows.rename(spare)
        shutil.rmtree(path, ignore_errors=True)

    def spares(self) -> list[Path]:
        """List the spare files, smallest first."""
        return sorted(self.path.glob("spare-*"), key=lambda path: (file_size(path), path))

    def drop_spare(self, path: Path) -> None:
        """Free the memory of a spare file, even if its rank has it mapped; with the directory locked."""
        with contextlib.suppress(FileNotFoundError):
            os.truncate(path, 0)
            path.unlink()

    def usage(self) -> tuple[int, int, int]:
        """Count the bytes that are taken. Call it with the directory locked.

        Returns:
            Bytes of segments, cuts, and what is about to be removed; bytes that the sidecar's notes of durable segments
            may take, as old and new version exist during a rewrite; memory kept for later segments.
        """
        used = notes = spare = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                if entry.name.startswith("durable-"):
                    notes += 2 * file_size(entry)
                elif entry.name.startswith("spare-"):
                    spare += file_size(entry)
                # The sidecar may be removing the folder.
                elif entry.is_dir(follow_symlinks=False):
                    with contextlib.suppress(FileNotFoundError), os.scandir(entry.path) as files:
                        used += sum(map(file_size, files))
        return used, notes, spare

    def parents(self) -> set[SnapshotName]:
        """List the parents of cuts that ranks copy."""
        with self.lock():
            found = [Note(path, _NAME).read() for path in self.path.glob("parent-*.json")]
        return {name for name in found if name}

    def parent_of(self, name: CutName) -> SnapshotName | None:
        """Return the parent of a ready cut or segment; None if it has none, or is gone."""
        index = Note(self.path / str(name) / _INDEX, _JSON).read()
        return SnapshotName.from_json(index["meta"]["parent"]) if index else None

    def open(self, name: CutName) -> ReadyCut:
        """Map a cut or a segment.

        Raises:
            SnapshotError: it is not complete, because the machine went down after it was written or bytes are gone; or
                another release handed it over.
            TemporaryError: the system does not open it now.
        """
        self.rank_lock(name.rank).check_version(f"rank {name.rank}")
        path = self.path / str(name)
        try:
            index = json.loads((path / _INDEX).read_text())
            meta, number = CutMeta.from_json(index["meta"]), int(index["slice"])
            # The file may be longer: the rest is kept for later cuts.
            with (path / _ROWS).open("rb") as file:
                size = min(int(index["bytes"]), os.fstat(file.fileno()).st_size)
                data = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"")
            complete = len(data) == index["bytes"] and index["boot"] == boot_id()
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"{path}: not a complete cut: {error!r}") from error
        except OSError as error:
            raise TemporaryError(f"{path}: cannot be opened: {error.strerror or error}") from error
        if not complete:
            found = f"{len(data)} of {index['bytes']} bytes"
            raise SnapshotError(f"{path}: {found}, or written before the machine restarted")
        return ReadyCut(name=name, meta=meta, number=number, nbytes=len(data), index=index, data=data)

    def read_durable(self, cut: ReadyCut) -> Durable:
        """Read what is durable of the segments before this one, or with it if it was stored already.

        Raises:
            SnapshotError: the note of some of them is gone.
        """
        durable = Note(self.path / str(cut.name) / _DURABLE, _JSON)
        if isinstance(cut.name, SegmentName):
            durable = self._durable(cut.name.rank)
        elif not cut.number:
            return Durable()
        note = durable.read()
        is_other_try = note and isinstance(cut.name, SegmentName) and note["put"] != cut.name.put
        done = Durable.unpack(note["done"]) if note and not is_other_try else Durable()
        if done.slices < cut.number:
            raise SnapshotError(f"{durable.path}: holds {done.slices} of the {cut.number} segments before {cut.name}")
        return done

    def write_durable(self, name: SegmentName, done: Durable) -> None:
        """Record what is durable with this segment, and free it; nothing happens if it was withdrawn."""
        # Packed before the lock, for which the pod's ranks wait.
        note = {"put": name.put, "done": done.pack()}
        with self.lock():
            if self.has(name):
                self._durable(name.rank).write(note)
                self.retire(name)

    def has_durable(self, rank: int, put: int) -> bool:
        """Return whether the sidecar still keeps the segments of this try of a rank's cut."""
        note = self._durable(rank).read()
        return note is not None and note["put"] == put

    def _durable(self, rank: int) -> Note[dict[str, Any]]:
        return Note(self.path / f"durable-{rank}.json", _JSON)

    def uploaded(self) -> list[UploadedCut]:
        """List the cuts with durable local parts and a possibly missing manifest, oldest step first."""
        found = []
        for path in self.path.glob("uploaded-*.json"):
            match, note = _UPLOADED.fullmatch(path.name), Note(path, _JSON).read()
            if match and note:
                name, parent = SnapshotName(int(match[1]), int(match[2])), SnapshotName.from_json(note["parent"])
                found.append(UploadedCut(name, int(note["worldSize"]), float(note["time"]), parent))
        return sorted(found, key=lambda cut: cut.snapshot)

    def write_uploaded(self, cut: ReadyCut) -> None:
        """Record, across a restart of the sidecar, that the parts of a cut are durable."""
        parent = cut.index["meta"]["parent"]
        note = {"worldSize": cut.meta.world_size, "time": cut.index["time"], "parent": parent}
        self._uploaded(cut.name.snapshot).write(note)

    def remove_uploaded(self, cut: UploadedCut) -> None:
        """Remove the record of a cut with a manifest, or without a chance to get one."""
        self._uploaded(cut.snapshot).remove()

    def _uploaded(self, name: SnapshotName) -> Note[dict[str, Any]]:
        return Note(self.path / f"uploaded-{name.step}-{name.attempt}.json", _JSON)

    def remove_unfinished_notes(self) -> None:
        """Remove what a killed sidecar left of the notes that it was writing."""
        for path in (path for name in _SIDECAR_NOTES for path in self.path.glob(f".{name}.json")):
            path.unlink()


@dataclass(frozen=True, kw_only=True)
class ReadyCut:
    """Hold one rank's ready cut or segment. Its arrays are views of mapped memory until ``Inbox.free``."""

    name: CutName
    meta: CutMeta
    number: int
    """Segments of the cut before this one."""
    nbytes: int
    index: dict[str, Any]
    data: memoryview

    @property
    def owned(self) -> list[ShardId]:
        """List all shards that the rank stores, also those without a row here."""
        return [ShardId(**shard) for shard in self.index["owned"]]

    def pieces(self) -> Iterator[ShardRows]:
        """Iterate over the rows, in the order in which the rank copied them."""
        for piece in self.index["pieces"]:
            shard, count, state = ShardId(**piece["shard"]), piece["rows"], piece["stateColumns"]
            rows_at, rows_end = piece["rowsOffset"], piece["rowsOffset"] + 4 * count * shard.width
            yield ShardRows(
                shard=shard,
                row_ids=np.frombuffer(self.data, "<i8", count, piece["offset"]),
                rows=np.frombuffer(self.data, "<f4", count * shard.width, rows_at).reshape(count, shard.width),
                state=np.frombuffer(self.data, "<f4", count * state, rows_end).reshape(count, state),
            )

    def gone(self) -> Iterator[GoneRows]:
        """Iterate over the keys that are gone from unique tables."""
        for piece in self.index["gone"]:
            keys = np.frombuffer(self.data, "<i8", piece["rows"], piece["offset"])
            yield GoneRows(shard=ShardId(**piece["shard"]), row_ids=keys)

    def dense(self) -> dict[str, NDArray[Any]] | None:
        """Return the dense state, if this rank handed it over."""
        if self.index["dense"] is None:
            return None
        arrays = {}
        for entry in self.index["dense"]:
            count = int(np.prod(entry["shape"], dtype=np.int64))
            dtype = np.dtype(entry["dtype"]).newbyteorder("<")
            array = np.frombuffer(self.data, dtype, count, entry["offset"]) if count else np.empty(0, dtype)
            arrays[entry["name"]] = array.reshape(entry["shape"])
        return arrays


class Durable(BaseModel):
    """Describe what is durable of a cut that comes in segments."""

    model_config = ConfigDict(frozen=True)

    slices: int = 0
    chunks: tuple[ChunkEntry, ...] = ()
    gone: tuple[GoneEntry, ...] = ()
    bits: Bits | None = None
    """Bits of these chunks, and so of the whole cut; None without chunks."""

    def pack(self) -> str:
        """Encode as text, a sixth of the JSON: it grows with the cut and counts against the ranks' budget."""
        return base64.b85encode(zlib.compress(self.model_dump_json().encode())).decode()

    @classmethod
    def unpack(cls, text: str) -> Self:
        """Decode the text of ``pack``."""
        return cls.model_validate_json(zlib.decompress(base64.b85decode(text)))


@dataclass(frozen=True)
class UploadedCut:
    """Describe a cut with durable local parts."""

    snapshot: SnapshotName
    """The snapshot that it becomes."""
    world_size: int
    time: float
    """When a rank handed it over (Unix seconds)."""
    parent: SnapshotName | None = None
    """See ``CutMeta``."""


def boot_id() -> str:
    """Identify this boot of the machine: a cut of another boot may be torn, as nothing is synced."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def file_size(path: Path | os.DirEntry[str]) -> int:
    """Return the bytes of a file, 0 if it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
