"""The trainer's side of the hand-off folder: copy a cut into shared memory, flip it READY, train on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError, DivergedError, TemporaryError
from dlrm_checkpointer.cut import CutMeta, ShardRows
from dlrm_checkpointer.folder import (
    COMMITTED_FILE,
    INDEX_FILE,
    POLL_S,
    REFUSED_FILE,
    ROWS_FILE,
    WRITING_PREFIX,
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

ALIGNMENT = 64


class HandOffWriter:
    """One rank's way to hand cuts to the pod's sidecar.

    Holds the rank's file lock for its life: the sidecar takes all locks free as the end of the trainers,
    however they died.

    Args:
        folder: the pod's hand-off folder, made if absent; shared memory in production.
        rank: global rank.
        budget_bytes: most bytes that one cut of all the pod's ranks may take; None: whatever the device holds.

    Raises:
        UsageError: another live process is this rank.
        DeviceError: the folder can't be written.
    """

    def __init__(self, folder: Path, rank: int, budget_bytes: int | None) -> None:
        self.folder, self.rank, self.budget_bytes = folder, rank, budget_bytes
        self._last: CutName | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = take_lock(lock_path(folder, rank), f"rank {rank}")
            shutil.rmtree(self._draft, ignore_errors=True)
            closed_path(folder, rank).unlink(missing_ok=True)
        except OSError as error:
            raise_device(error, folder, 0)

    @property
    def _draft(self) -> Path:
        return self.folder / f"{WRITING_PREFIX}{self.rank}"

    def ready(self) -> bool:
        """Whether a cut can be handed over now: False while an earlier one of this rank waits for the sidecar."""
        return all(name.rank != self.rank for name in ready_cuts(self.folder))

    def put(self, meta: CutMeta, shards: Iterable[ShardRows], dense: Mapping[str, NDArray[Any]] | None) -> None:
        """Hand over this rank's part of a cut; it is whole from the rename that ends this call, absent before.

        Args:
            meta: the same on all ranks.
            shards: this rank's rows in any number of pieces, copied one by one, so that a generator keeps memory small.
            dense: dense parameters and optimizer state (float32 or int64) on global rank 0, None elsewhere.

        Raises:
            TemporaryError: an earlier cut still waits (``ready`` is False).
            DeviceError: the cut is above the budget, or the device is full; nothing is left behind.
            ValueError: a piece is not of ``meta``'s tables, or its arrays don't belong together.
        """
        if not self.ready():
            raise TemporaryError(f"rank {self.rank}: an earlier cut still waits for the checkpointer")
        name = CutName(meta.step, meta.attempt, self.rank)
        try:
            self._draft.mkdir()
            index = self._copy(meta, shards, dense)
            index |= {"meta": meta.to_json(), "rank": self.rank, "boot": boot_id(), "time": time.time()}
            (self._draft / INDEX_FILE).write_text(json.dumps(index))
            self._draft.rename(self.folder / str(name))
        except BaseException as error:
            size = _size(self._draft / ROWS_FILE)
            shutil.rmtree(self._draft, ignore_errors=True)
            if isinstance(error, OSError):
                raise_device(error, self.folder, size)
            raise
        self._last = name

    def _copy(
        self, meta: CutMeta, shards: Iterable[ShardRows], dense: Mapping[str, NDArray[Any]] | None
    ) -> dict[str, Any]:
        tables = {table.name: table for table in meta.tables}
        pieces: list[dict[str, Any]] = []
        arrays: list[dict[str, Any]] = []
        with (self._draft / ROWS_FILE).open("wb", buffering=0) as file:
            for piece in shards:
                piece.check(tables[piece.shard.table])
                if not len(piece.row_ids):
                    continue
                self._check_budget(piece.nbytes)
                offset = _append(file.fileno(), (piece.row_ids, piece.rows, piece.state))
                shape = {"rows": len(piece.row_ids), "stateColumns": piece.state.shape[1], "offset": offset}
                pieces.append({"shard": vars(piece.shard), **shape})
            for name, array in (dense or {}).items():
                self._check_budget(array.nbytes)
                offset = _append(file.fileno(), (array,))
                arrays.append({"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "offset": offset})
            size = os.fstat(file.fileno()).st_size
        return {"pieces": pieces, "dense": None if dense is None else arrays, "bytes": size}

    def _check_budget(self, more: int) -> None:
        if self.budget_bytes is None:
            return
        used = sum(_size(path) for path in self.folder.glob(f"*/{ROWS_FILE}")) + more
        if used > self.budget_bytes:
            raise DeviceError(
                f"{self.folder}: a cut of this pod takes at least {used} bytes, above the hand-off budget of "
                f"{self.budget_bytes}: raise spec.checkpoint.handoffBudget"
            )

    def committed_step(self) -> int | None:
        """Step of the newest committed snapshot that the sidecar knows of; None before it said so."""
        value = read_json(self.folder / COMMITTED_FILE)
        return None if value is None else int(value["step"])

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until this rank's last cut is committed; False where it isn't by then. True where nothing waits.

        Raises:
            DivergedError: the cut can never be stored, because it holds a value that is not finite.
        """
        deadline = time.monotonic() + timeout_s
        while self._last is not None:
            key = (self._last.attempt, self._last.step)
            done = read_json(self.folder / COMMITTED_FILE)
            if done and (done["attempt"], done["step"]) >= key:
                break
            refused = read_json(self.folder / REFUSED_FILE)
            if refused and (refused["attempt"], refused["step"]) == key:
                raise DivergedError(refused["problem"])
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return self.ready()

    def close(self, reason: str) -> None:
        """Say why the rank ends, and let go of its lock. Repeating it does nothing."""
        if self._lock is None:
            return
        with contextlib.suppress(DeviceError):  # the free lock says the same, without the reason
            write_json(closed_path(self.folder, self.rank), {"reason": reason, "time": time.time()})
        os.close(self._lock)
        self._lock = None


def _append(descriptor: int, arrays: tuple[NDArray[Any], ...]) -> int:
    """Write arrays one after the other from the next aligned offset, which is returned."""
    start = -(-os.lseek(descriptor, 0, os.SEEK_END) // ALIGNMENT) * ALIGNMENT
    os.lseek(descriptor, start, os.SEEK_SET)
    for array in arrays:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        rest = little.reshape(-1).view(np.uint8).data
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    return start


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
