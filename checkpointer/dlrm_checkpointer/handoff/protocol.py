"""The hand-off folder's entries: what the ranks of one pod and its sidecar tell each other, by renames.

rank-<r>.lock                        held by rank r for its whole life (flock): its pid and ``LAYOUT_VERSION``
sidecar.lock                         held by the sidecar for its whole life (flock), with the same of it
closed-<r>.json                      why rank r ended, and whether it failed; absent after a kill
budget.lock                          held for a moment by whoever takes room, moves or frees an entry (flock)
parent-<r>.json                      the snapshot that the cut of rank r goes on from, until that cut is whole
writing-<r>/                         a cut, or a slice of one, that rank r is still copying
slice-<step>-<attempt>-<r>-<n>-<put>/  slice n of a cut that isn't whole yet; as a whole cut, but not the last of it
durable-<r>.json                     what the sidecar made durable of rank r's slices: it outlives them
ready-<step>-<attempt>-<r>/          a whole cut: rows.bin, and index.json that says what lies where; or the last
                                     slice of one, with durable.json of those before
dead-<r>-*/                          freed or withdrawn, about to be removed by the sidecar
spare-<r>.bin                        memory of an entry of rank r that was removed, for its next one: it counts as free
uploaded-<step>-<attempt>.json       a cut whose parts the sidecar made durable and that waits for its manifest
committed.json                       newest committed snapshot: step, attempt
refused.json                         a cut that can never be stored: step, attempt, problem
broken.json                          a parent that a cut could not go over: step, attempt
superseded.json                      a newer attempt than the ranks', which the store goes on with: attempt
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dlrm_api.checkpoint import Bits
from dlrm_api.errors import SnapshotError, UsageError
from dlrm_api.process import raise_device
from dlrm_checkpointer.format.canonical import NewerVersionError
from dlrm_checkpointer.format.manifest import ChunkEntry
from dlrm_checkpointer.types import CutMeta, ShardId, ShardRows, SnapshotName

LAYOUT_VERSION = 1
"""Of all that is described above and of what the entries hold: raised with each change that the other side, of another
release, would misread."""

ROWS_FILE = "rows.bin"
INDEX_FILE = "index.json"
DURABLE_FILE = "durable.json"
COMMITTED_FILE = "committed.json"
REFUSED_FILE = "refused.json"
BROKEN_FILE = "broken.json"
SUPERSEDED_FILE = "superseded.json"
WRITING_PREFIX = "writing-"
DURABLE_PREFIX = "durable-"
UPLOADED_PREFIX = "uploaded-"
DEAD_PREFIX = "dead-"
SPARE_PREFIX = "spare-"

LOCK_PATIENCE_S = 2.0
"""The sidecar tests the ranks' locks for an instant now and then, so a first refusal proves nothing."""
POLL_S = 0.02

_READY = re.compile(r"ready-(\d+)-(\d+)-(\d+)")
_SLICE = re.compile(r"slice-(\d+)-(\d+)-(\d+)-(\d+)-(\d+)")
_UPLOADED = re.compile(r"uploaded-(\d+)-(\d+)\.json")
_UNFINISHED = re.compile(r"(?:writing|durable|parent)-(\d+)(?:\.json)?")


@dataclass(frozen=True, order=True)
class CutName:
    """Name of a ready cut; order is step, attempt, rank."""

    step: int
    attempt: int
    rank: int

    @property
    def snapshot(self) -> SnapshotName:
        """What it is to become."""
        return SnapshotName(self.step, self.attempt)

    def __str__(self) -> str:
        return f"ready-{self.step:016d}-{self.attempt:08d}-{self.rank:06d}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read a folder entry's name; None where it is no ready cut."""
        match = _READY.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None


@dataclass(frozen=True, order=True)
class SliceName:
    """Name of a slice that is not its cut's last; ``put`` tells two tries of one cut apart."""

    step: int
    attempt: int
    rank: int
    number: int
    put: int

    @property
    def snapshot(self) -> SnapshotName:
        """What its cut is to become."""
        return SnapshotName(self.step, self.attempt)

    def __str__(self) -> str:
        return f"slice-{self.step:016d}-{self.attempt:08d}-{self.rank:06d}-{self.number:06d}-{self.put}"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Read a folder entry's name; None where it is no slice."""
        match = _SLICE.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None


def lock_path(folder: Path, rank: int) -> Path:
    """The file that a rank locks for its life."""
    return folder / f"rank-{rank}.lock"


def sidecar_lock_path(folder: Path) -> Path:
    """The file that the sidecar locks for its life."""
    return folder / "sidecar.lock"


def closed_path(folder: Path, rank: int) -> Path:
    """Where a rank says why it ended."""
    return folder / f"closed-{rank}.json"


def durable_path(folder: Path, rank: int) -> Path:
    """Where the sidecar notes what it made durable of a cut that the rank is still handing over."""
    return folder / f"{DURABLE_PREFIX}{rank}.json"


def uploaded_path(folder: Path, step: int, attempt: int) -> Path:
    """Where the sidecar notes that a cut's parts are durable and wait for the manifest."""
    return folder / f"{UPLOADED_PREFIX}{step}-{attempt}.json"


def uploaded_notes(folder: Path) -> Iterator[tuple[int, int, Path]]:
    """Step, attempt and path of each such note."""
    for path in folder.glob(f"{UPLOADED_PREFIX}*.json"):
        if match := _UPLOADED.fullmatch(path.name):
            yield int(match[1]), int(match[2]), path


def parent_path(folder: Path, rank: int) -> Path:
    """Where a rank says which snapshot the cut that it is handing over goes on from."""
    return folder / f"parent-{rank}.json"


def ready_cuts(folder: Path) -> list[CutName]:
    """Every whole cut in the folder, oldest step first."""
    names = (CutName.parse(entry.name) for entry in folder.iterdir())
    return sorted(name for name in names if name)


def ready_slices(folder: Path) -> list[SliceName]:
    """Every slice of cuts that are not whole yet, oldest step first."""
    names = (SliceName.parse(entry.name) for entry in folder.iterdir())
    return sorted(name for name in names if name)


def ranks_with_unfinished_cuts(folder: Path) -> set[int]:
    """Ranks whose cut is not whole yet; the living ones among them are still at it."""
    matches = (_UNFINISHED.fullmatch(entry.name) for entry in folder.iterdir())
    return {int(match[1]) for match in matches if match} | {name.rank for name in ready_slices(folder)}


@contextlib.contextmanager
def budget_lock(folder: Path) -> Iterator[None]:
    """Keep all others from taking, moving and freeing the folder's bytes for a moment."""
    descriptor = os.open(folder / "budget.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def discard_unfinished(folder: Path, rank: int) -> None:
    """Throw away what a rank has not handed over whole. A slice's bytes count until the sidecar lets go of them."""
    with budget_lock(folder):
        for name in ready_slices(folder):
            if name.rank == rank:
                (folder / str(name)).rename(dead_path(folder, rank))
        durable_path(folder, rank).unlink(missing_ok=True)
        parent_path(folder, rank).unlink(missing_ok=True)
    remove_entry(folder / f"{WRITING_PREFIX}{rank}", rank)


def dead_path(folder: Path, rank: int) -> Path:
    """A fresh name for an entry of a rank that is to be removed."""
    return folder / f"{DEAD_PREFIX}{rank}-{time.monotonic_ns()}-{os.getpid()}"


def spare_path(folder: Path, rank: int) -> Path:
    """Where the memory of a rank's removed entry is kept."""
    return folder / f"{SPARE_PREFIX}{rank}.bin"


def remove_entry(path: Path, rank: int) -> None:
    """Remove an entry that nobody reads any more, and keep its memory for the rank's next one."""
    rows, spare = path / ROWS_FILE, spare_path(path.parent, rank)
    with budget_lock(path.parent), contextlib.suppress(FileNotFoundError):
        if not spare.exists() or spare.stat().st_size < rows.stat().st_size:
            rows.rename(spare)
    shutil.rmtree(path, ignore_errors=True)


def sweep_dead(folder: Path) -> None:
    """Remove every entry that was freed or withdrawn."""
    for path in folder.glob(f"{DEAD_PREFIX}*"):
        remove_entry(path, int(path.name.split("-")[1]))


def drop_spare(path: Path) -> None:
    """Give the memory of a spare file back at once, though its rank may have it mapped; under the budget's lock."""
    with contextlib.suppress(FileNotFoundError):
        os.truncate(path, 0)
        path.unlink()


def take_lock(path: Path, who: str) -> int:
    """Lock a file for this process's life and return its descriptor; closing it, or dying, lets go.

    Raises:
        UsageError: a living process holds it; names its pid.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + LOCK_PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = next(iter(_words(path)), "unknown")
                os.close(descriptor)
                raise UsageError(f"{path}: {who} already runs (pid {holder}): end it first") from None
            time.sleep(POLL_S)
        else:
            os.pwrite(descriptor, f"{os.getpid()} {LAYOUT_VERSION}\n".encode(), 0)
            return descriptor


def check_version(path: Path, who: str) -> None:
    """Refuse what another release wrote or reads, by the lock of whoever did.

    Args:
        path: the lock; where it is absent, or its holder has not got to say anything yet, there is nothing to refuse.
        who: holds it, or did last.

    Raises:
        NewerVersionError: its release is newer.
        SnapshotError: it is older.
    """
    words = _words(path)
    if not words:
        return
    version = int(words[1]) if len(words) > 1 else 0
    if version != LAYOUT_VERSION:
        refused = NewerVersionError if version > LAYOUT_VERSION else SnapshotError
        raise refused(
            f"{path.parent}: {who} hands cuts over by version {version} of the folder, this program by version "
            f"{LAYOUT_VERSION}: give images of one release, or none, as spec.trainer.image and "
            "spec.trainer.checkpointerImage"
        )


def _words(path: Path) -> list[str]:
    """What the last holder of a lock said of itself: the first line, since a longer one may have been there before."""
    try:
        return path.read_text(errors="replace").partition("\n")[0].split()
    except FileNotFoundError:
        return []


@contextlib.contextmanager
def lock_if_free(path: Path) -> Iterator[bool]:
    """Hold a lock for a moment if nobody else does; says whether that is so, or nobody ever held it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file lets go of it
        free = True
    except BlockingIOError:
        free = False
    try:
        yield free
    finally:
        os.close(descriptor)


def boot_id() -> str:
    """Identity of this boot of the machine: a cut of another boot may be torn, because nothing syncs the folder."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a small file whole or not at all (one writer and readers on this machine; no sync)."""
    draft = path.with_name(f".{path.name}")
    try:
        draft.write_text(json.dumps(value))
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise_device(error, path, 0)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file of ``write_json``; None where there is none."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, kw_only=True)
class ReadyCut:
    """One rank's whole cut, or one slice of it; its arrays are views of mapped memory, gone with ``Inbox.free``."""

    name: CutName | SliceName
    meta: CutMeta
    number: int
    """Slices of the cut before this one."""
    nbytes: int
    index: dict[str, Any]
    data: memoryview

    @property
    def owned(self) -> list[ShardId]:
        """All that the rank stores, also what has no row here."""
        return [ShardId(**shard) for shard in self.index["owned"]]

    def pieces(self) -> Iterator[ShardRows]:
        """The rows, in the order in which the rank gave them."""
        for piece in self.index["pieces"]:
            shard, count, state = ShardId(**piece["shard"]), piece["rows"], piece["stateColumns"]
            rows_at = piece["rowsOffset"]
            rows_end = rows_at + 4 * count * shard.width
            yield ShardRows(
                shard=shard,
                row_ids=np.frombuffer(self.data, "<i8", count, piece["offset"]),
                rows=np.frombuffer(self.data, "<f4", count * shard.width, rows_at).reshape(count, shard.width),
                state=np.frombuffer(self.data, "<f4", count * state, rows_end).reshape(count, state),
            )

    def dense(self) -> dict[str, NDArray[Any]] | None:
        """The dense state, where this rank gave it."""
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
    """What is durable already of a cut that comes in slices."""

    model_config = ConfigDict(frozen=True)

    slices: int = 0
    chunks: tuple[ChunkEntry, ...] = ()
    bits: Bits | None = None
    """Of these chunks, and so of the whole cut; None where there are none."""

    def pack(self) -> str:
        """As text, a sixth of the JSON: it grows with the cut and lies in the memory that the ranks share."""
        return base64.b85encode(zlib.compress(self.model_dump_json().encode())).decode()

    @classmethod
    def unpack(cls, text: str) -> Self:
        """Read ``pack``'s form."""
        return cls.model_validate_json(zlib.decompress(base64.b85decode(text)))


@dataclass(frozen=True)
class UploadedCut:
    """A cut whose local parts are durable."""

    step: int
    attempt: int
    world_size: int
    time: float
    """When a rank handed it over (Unix seconds)."""
    parent: SnapshotName | None = None
    """See ``CutMeta``."""

    @property
    def snapshot(self) -> SnapshotName:
        """What it is to become."""
        return SnapshotName(self.step, self.attempt)
