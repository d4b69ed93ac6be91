"""The sidecar's side of the hand-off folder: whole cuts to work off, who still lives, and what to tell them."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.cut import CutMeta, ShardId, ShardRows
from dlrm_checkpointer.folder import (
    COMMITTED_FILE,
    DEAD_PREFIX,
    INDEX_FILE,
    REFUSED_FILE,
    ROWS_FILE,
    CutName,
    boot_id,
    closed_path,
    lock_path,
    raise_device,
    read_json,
    ready_cuts,
    take_lock,
    write_json,
)

_UPLOADED = re.compile(r"uploaded-(\d+)-(\d+)\.json")


@dataclass(frozen=True, kw_only=True)
class ReadyCut:
    """One rank's whole cut; its arrays are views of mapped memory, gone with ``Inbox.free``."""

    name: CutName
    meta: CutMeta
    nbytes: int
    index: dict[str, Any]
    data: memoryview

    def pieces(self) -> Iterator[ShardRows]:
        """The rows, in the order in which the rank gave them."""
        for piece in self.index["pieces"]:
            shard, count, state = ShardId(**piece["shard"]), piece["rows"], piece["stateColumns"]
            ids_end = piece["offset"] + 8 * count
            rows_end = ids_end + 4 * count * shard.width
            yield ShardRows(
                shard=shard,
                row_ids=np.frombuffer(self.data, "<i8", count, piece["offset"]),
                rows=np.frombuffer(self.data, "<f4", count * shard.width, ids_end).reshape(count, shard.width),
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


@dataclass(frozen=True, order=True)
class UploadedCut:
    """A cut whose local parts are durable."""

    step: int
    attempt: int
    world_size: int
    time: float
    """When a rank handed it over (Unix seconds)."""


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
            self._lock = take_lock(folder / "sidecar.lock", "a checkpointer of this folder")
        except OSError as error:
            raise_device(error, folder, 0)
        for path in folder.glob(f"{DEAD_PREFIX}*"):
            shutil.rmtree(path, ignore_errors=True)

    def ready(self) -> list[CutName]:
        """Whole cuts that wait, oldest step first."""
        return ready_cuts(self.folder)

    def open(self, name: CutName) -> ReadyCut:
        """Map a cut.

        Raises:
            SnapshotError: it can't be whole, because the machine went down after it was written or bytes are gone.
        """
        path = self.folder / str(name)
        try:
            index = json.loads((path / INDEX_FILE).read_text())
            meta = CutMeta.from_json(index["meta"])
            data = _map(path / ROWS_FILE)
            whole = len(data) == index["bytes"] and index["boot"] == boot_id()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SnapshotError(f"{path}: not a whole cut: {error!r}") from error
        if not whole:
            raise SnapshotError(
                f"{path}: {len(data)} of {index['bytes']} bytes, or written before the machine restarted"
            )
        return ReadyCut(name=name, meta=meta, nbytes=len(data), index=index, data=data)

    def close(self) -> None:
        """Let go of the folder."""
        os.close(self._lock)

    def free(self, name: CutName) -> None:
        """Give the cut's memory back; from the rename on it no longer waits."""
        dead = self.folder / f"{DEAD_PREFIX}{time.monotonic_ns()}"
        (self.folder / str(name)).rename(dead)
        shutil.rmtree(dead, ignore_errors=True)

    def note_uploaded(self, cut: ReadyCut) -> None:
        """Remember, over a restart of the sidecar, that this cut's parts are durable and wait for the manifest."""
        note = {"worldSize": cut.meta.world_size, "time": cut.index["time"]}
        write_json(self.folder / f"uploaded-{cut.name.step}-{cut.name.attempt}.json", note)

    def uploaded(self) -> list[UploadedCut]:
        """Cuts whose local parts are durable and whose manifest may be missing, oldest step first."""
        found = []
        for path in self.folder.glob("uploaded-*.json"):
            match, value = _UPLOADED.fullmatch(path.name), read_json(path)
            if match and value:
                found.append(UploadedCut(int(match[1]), int(match[2]), int(value["worldSize"]), float(value["time"])))
        return sorted(found)

    def forget_uploaded(self, cut: UploadedCut) -> None:
        """The manifest is there, or will never be."""
        (self.folder / f"uploaded-{cut.step}-{cut.attempt}.json").unlink(missing_ok=True)

    def publish_committed(self, step: int, attempt: int) -> None:
        """Tell the ranks of the newest committed snapshot."""
        known = read_json(self.folder / COMMITTED_FILE)
        if known is None or (known["attempt"], known["step"]) < (attempt, step):
            write_json(self.folder / COMMITTED_FILE, {"step": step, "attempt": attempt})

    def publish_refused(self, step: int, attempt: int, problem: str) -> None:
        """Tell the ranks that a cut of theirs can never be stored."""
        write_json(self.folder / REFUSED_FILE, {"step": step, "attempt": attempt, "problem": problem})

    def living(self) -> frozenset[int]:
        """Local ranks whose lock is held."""
        return frozenset(rank for rank in self.ranks if _is_locked(lock_path(self.folder, rank)))

    def reasons(self) -> dict[int, str]:
        """Why ranks ended, where they said so."""
        markers = {rank: read_json(closed_path(self.folder, rank)) for rank in self.ranks}
        return {rank: str(value["reason"]) for rank, value in markers.items() if value}


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # closing the file lets go of it
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(descriptor)
