"""What a rank is copying into the hand-off folder, and the room that it takes there from the pod's budget."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError
from dlrm_checkpointer.cut import CutMeta, ShardId, ShardRows
from dlrm_checkpointer.folder import DURABLE_PREFIX, INDEX_FILE, ROWS_FILE, boot_id, budget_lock

ALIGNMENT = 64
ENTRY_BYTES = 512
"""What a piece takes beside its arrays: alignment, its entry in the index, and the entry of its object later."""
HEAD_BYTES = 1_024
"""What an index takes beside its entries and the cut's description."""
LARGEST_SPARE = 1 << 20
"""Bytes for each rank that rows never take: files are rounded up to pages, and the sidecar writes notes."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What the budget leaves at one moment (bytes)."""

    total: int
    """For rows and indices of all the pod's ranks."""
    free: int
    share: int
    """What is one rank's, however much the others want."""


class Budget:
    """Bytes of the hand-off folder that the ranks of a pod share.

    Room is taken under a lock by making a file larger before its bytes are written, so the folder's files say at
    any moment what is taken, also after a kill.

    Args:
        folder: the pod's hand-off folder.
        size: bytes; None: whatever the device holds.
        ranks: ranks of the pod.
    """

    def __init__(self, folder: Path, size: int | None, ranks: int) -> None:
        self.folder, self.size, self.ranks = folder, size, ranks

    def take(self, draft: Draft, unit: int, wanted: int, *, shared: bool) -> int:
        """Take room in the draft for an entry of up to ``wanted`` units (rows) of ``unit`` bytes.

        Args:
            draft: grows by what is returned.
            unit: bytes.
            wanted: at least 1.
            shared: whether the cut is known not to fit: the rank keeps to its share then, and waits until it is free.

        Returns:
            How many units there is room for; 0: none now.

        Raises:
            DeviceError: the budget holds not even one unit.
        """
        if self.size is None:
            return wanted
        with budget_lock(self.folder):
            room = self._measure(self.size)
            fixed = ENTRY_BYTES + (0 if draft.taken else draft.head_bytes)
            least = unit + ENTRY_BYTES + draft.head_bytes
            if least > room.total:
                raise DeviceError(
                    f"{self.folder}: {least} bytes have to be handed over at once, above what the hand-off budget of "
                    f"{self.size} bytes leaves for them: raise spec.checkpoint.handoffBudget"
                )
            free = room.free
            if shared:
                most = max(room.share, least)
                if not draft.taken and free < most:
                    return 0
                free = min(free, most - draft.taken)
            count = min(wanted, (free - fixed) // unit)
            if count < 1:
                return 0
            draft.grow(count * unit + ALIGNMENT, fixed - ALIGNMENT)
            return count

    def _measure(self, size: int) -> Room:
        used = noted = 0
        for entry in self.folder.iterdir():
            if entry.name.startswith(DURABLE_PREFIX):
                noted += 2 * _size(entry)  # it is written anew beside the old one
            elif entry.is_dir():
                with contextlib.suppress(FileNotFoundError):  # the sidecar is removing it
                    used += sum(_size(file) for file in entry.iterdir())
        total = size - self.ranks * min(LARGEST_SPARE, size // (16 * self.ranks)) - noted
        return Room(total=total, free=total - used, share=total // self.ranks)


class Draft:
    """One cut, or a slice of one, while it is copied.

    Args:
        path: its folder, made by ``start``.
        meta: of the cut.
        rank: global rank.
        owned: what the rank stores, of whose rows the cut holds those that changed.
    """

    def __init__(self, path: Path, meta: CutMeta, rank: int, owned: Sequence[ShardId]) -> None:
        self._path, self._rows, self._index_file = path, path / ROWS_FILE, path / INDEX_FILE
        self._pieces: list[dict[str, Any]] = []
        self._dense: list[dict[str, Any]] | None = None
        shards = [vars(shard) for shard in owned]
        self._head = {"meta": meta.to_json(), "rank": rank, "boot": boot_id(), "owned": shards}
        self.head_bytes = HEAD_BYTES + len(json.dumps(self._head))
        self.end = 0
        """Bytes of rows.bin that are written."""
        self.taken = 0
        """Bytes of the budget."""
        self._taken_rows = 0

    def start(self) -> None:
        """Make its folder."""
        self._path.mkdir()
        self._rows.touch()
        self._index_file.touch()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was copied yet."""
        return not self._pieces and self._dense is None

    def grow(self, rows: int, index: int) -> None:
        """Make the files larger by so many bytes; what isn't written yet reads as zeros."""
        self.taken += rows + index
        self._taken_rows += rows
        os.truncate(self._rows, self._taken_rows)
        os.truncate(self._index_file, self.taken - self._taken_rows)

    def add_rows(self, piece: ShardRows) -> None:
        """Copy a piece."""
        offset = self._append((piece.row_ids, piece.rows, piece.state))
        shape = {"rows": len(piece.row_ids), "stateColumns": piece.state.shape[1], "offset": offset}
        self._pieces.append({"shard": vars(piece.shard), **shape})

    def add_dense(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the dense state."""
        self._dense = [
            {"name": name, "dtype": array.dtype.name, "shape": list(array.shape), "offset": self._append((array,))}
            for name, array in arrays.items()
        ]

    def flip(self, target: Path, number: int) -> None:
        """Make it slice ``number`` of its cut, whole from the rename that ends this call."""
        os.truncate(self._rows, self.end)
        content = {"pieces": self._pieces, "dense": self._dense, "bytes": self.end}
        self._index_file.write_text(json.dumps(self._head | content | {"slice": number, "time": time.time()}))
        with budget_lock(self._path.parent):
            self._path.rename(target)

    def _append(self, arrays: tuple[NDArray[Any], ...]) -> int:
        """Write arrays one after the other from the next aligned offset, which is returned."""
        start = -(-self.end // ALIGNMENT) * ALIGNMENT
        with self._rows.open("r+b", buffering=0) as file:
            file.seek(start)
            for array in arrays:
                little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
                rest = little.reshape(-1).view(np.uint8).data
                while rest:
                    rest = rest[os.write(file.fileno(), rest) :]
            self.end = max(self.end, file.tell())
        return start


def dense_bytes(arrays: Mapping[str, NDArray[Any]]) -> int:
    """Most bytes that dense state takes in a draft, entries included."""
    return sum(array.nbytes + ENTRY_BYTES for array in arrays.values())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
