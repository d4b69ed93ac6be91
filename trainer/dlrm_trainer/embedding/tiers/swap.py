"""The short way between slots on the host and the one byte-addressable level below them: two rows change places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.row_cache import RowMap, swap_rows
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel
from dlrm_trainer.embedding.tiers.level import Level
from dlrm_trainer.embedding.tiers.slot_memory import HostSlots, SlotMemory


@dataclass(frozen=True)
class Swap:
    """Moves a row up into the slot of the row that moves down into its place, in one pass over both."""

    slots: HostSlots
    level: ByteLevel

    def pairs(self, row_map: RowMap, sources: Any, targets: Any, leaving: Any, counts: Any) -> NDArray[np.bool_]:
        """Swap every missing row that is in the level with the row that leaves its slot.

        Args:
            row_map: told where the rows that leave are.
            sources: (M,) entries of the missing rows.
            targets: (M,) slots that they get.
            leaving: (M,) rows that these slots held; -1 where they were free.
            counts: (M,) uint32; takes the access counts of the rows swapped.

        Returns:
            (M,) which rows were swapped; the others are still to be moved.
        """
        done = np.empty(len(sources), np.bool_)
        slots, places, meta, place_of = self.slots, self.level.records, row_map.meta, row_map.place_of
        swap_rows(slots.weight, slots.state, places, meta, place_of, sources, targets, leaving, done, counts)
        return done


def swap_between(memory: SlotMemory, levels: Sequence[Level]) -> Swap | None:
    """The short way, where there is one: to a level that keeps no order, with nothing below it."""
    if len(levels) == 1 and isinstance(memory, HostSlots):
        level = levels[0]
        if isinstance(level, ByteLevel) and not level.ordered:
            return Swap(memory, level)
    return None
