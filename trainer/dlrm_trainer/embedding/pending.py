"""Rows of a cut that are copied while training goes on: each before it changes, or as soon as there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_checkpointer import RowsInPlace, ShardId
from dlrm_kernels.cache import kernel
from dlrm_kernels.dirty_rows import rows_of_bits
from dlrm_trainer.embedding.changes import WINDOW_ROWS, DirtyRows
from dlrm_trainer.embedding.checkpoint import LocalPart, copy_rows

U64 = np.uint64
Save = Callable[[RowsInPlace], None]
Place = Callable[[int, NDArray[np.int64], NDArray[np.int64]], RowsInPlace]
"""Where chosen rows of a part are: its number in its record, rows counted from its first, and their lookups."""


class Changing(NamedTuple):
    """Rows of some parts that are about to change."""

    record: DirtyRows
    """Of the parts."""
    ids: NDArray[np.int64]
    """See ``DirtyRows.mark``."""
    sizes: NDArray[np.int64]
    starts: NDArray[np.int64]
    place: Place
    """Where they are."""


class BeforeUpdates(Protocol):
    """What must be done before rows change."""

    def before_update(self, rows: Changing) -> None:
        """Copy those that a cut holds and that were not copied yet."""


class Pending:
    """What a cut still has to copy; ``BeforeUpdates``.

    Args:
        parts: whose changed rows the cut holds.
        save: copies rows that are about to change; may raise, and then ends all of it.
    """

    def __init__(self, parts: Sequence[LocalPart], save: Save) -> None:
        self._parts, self._save = parts, save
        self._bits = {part.dirty.rows: part.dirty.rows.all_bits() for part in parts}
        self._at = 0, 0
        """The part and its first row that may still have to be copied."""

    def before_update(self, rows: Changing) -> None:
        """See ``BeforeUpdates``."""
        record, ids, sizes, starts, place = rows
        bits = self._bits.get(record)
        if bits is None:
            return
        lookups, segments = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
        count = _take_bits(bits, ids, sizes, starts, lookups, segments)
        parts = np.searchsorted(record.starts, starts, side="right")[segments[:count]] - 1
        for part in np.unique(parts).tolist():
            here = lookups[:count][parts == part]
            here = here[np.argsort(ids[here])]
            self._save(place(part, ids[here], here))

    def copy(self, take: Callable[[RowsInPlace, int], int]) -> bool:
        """Copy what is left, as far as there is room; True once nothing is.

        Nothing may be under way among the parts meanwhile.

        Args:
            take: copies rows, from a number of them on; returns how many, and 0 where there is no room now.
        """
        number, start = self._at
        for place, part in enumerate(self._parts[number:], number):
            size = part.dirty.rows.sizes[part.dirty.number]
            for first in range(start, size, WINDOW_ROWS):
                self._at = place, first
                if not self._copy_window(part, first, min(size, first + WINDOW_ROWS), take):
                    return False
            start = 0
        self._at = len(self._parts), 0
        return True

    def _copy_window(self, part: LocalPart, first: int, last: int, take: Callable[[RowsInPlace, int], int]) -> bool:
        record = part.dirty.rows
        words = self._bits[record][record.words_of(part.dirty.number, first, last)]
        rows = rows_of_bits(words, first, torch.get_num_threads())
        done, wanted = 0, part.in_place(rows)
        while done < len(rows):
            count = take(wanted, done)
            if count == 0:
                break
            done += count
        _clear_bits(words, rows[:done] - first)
        return done == len(rows)


@dataclass(frozen=True)
class SlotRows:
    """Rows of a part that are in slots; implements ``RowsInPlace``."""

    shard: ShardId
    row_ids: NDArray[np.int64]
    weight: Tensor
    """Of the part's slots."""
    state: Tensor
    slots: NDArray[np.int64]
    """(N,) of the rows."""

    @property
    def state_values(self) -> int:
        """See ``RowsInPlace``."""
        return self.state.shape[1]

    def copy_to(self, start: int, end: int, rows: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """See ``RowsInPlace``."""
        copy_rows(self.weight, self.state, self.slots[start:end], rows, state)


@kernel
def _take_bits(bits: Any, ids: Any, sizes: Any, starts: Any, lookups: Any, segments: Any) -> int:
    """List the lookups whose row's bit is set, and clear it; returns how many these are."""
    first = count = 0
    for segment in range(len(sizes)):
        start = U64(starts[segment])
        for n in range(first, first + sizes[segment]):
            bit = start + U64(ids[n])
            place, mask = bit >> U64(6), U64(1) << (bit & U64(63))
            lookups[count], segments[count] = n, segment
            count += (bits[place] & mask) != U64(0)
            bits[place] &= ~mask
        first += sizes[segment]
    return count


@kernel
def _clear_bits(bits: Any, rows: Any) -> None:
    for row in rows:
        bits[row >> 6] &= ~(U64(1) << U64(row & 63))
