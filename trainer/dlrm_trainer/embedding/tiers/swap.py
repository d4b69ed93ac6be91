"""The short way between slots on the host and the one byte-addressable level below them: two rows change places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.compiled import compiled
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel
from dlrm_trainer.embedding.tiers.directory import Directory
from dlrm_trainer.embedding.tiers.level import Level
from dlrm_trainer.embedding.tiers.replacement import COUNT
from dlrm_trainer.embedding.tiers.slot_memory import HostSlots, SlotMemory


@dataclass(frozen=True)
class Swap:
    """Moves a row up into the slot of the row that moves down into its place, in one pass over both."""

    slots: HostSlots
    level: ByteLevel

    def pairs(self, directory: Directory, sources: Any, targets: Any, leaving: Any, counts: Any) -> NDArray[np.bool_]:
        """Swap every missing row that is in the level with the row that leaves its slot.

        Args:
            directory: told where the rows that leave are.
            sources: (M,) entries of the missing rows.
            targets: (M,) slots that they get.
            leaving: (M,) rows that these slots held; -1 where they were free.
            counts: (M,) uint32; takes the access counts of the rows swapped.

        Returns:
            (M,) which rows were swapped; the others are still to be moved.
        """
        done = np.empty(len(sources), np.bool_)
        slots, places, meta, place_of = self.slots, self.level.records, directory.meta, directory.place_of
        _swap(slots.weight, slots.state, places, meta, place_of, sources, targets, leaving, done, counts)
        return done


def swap_between(memory: SlotMemory, levels: Sequence[Level]) -> Swap | None:
    """The short way, where there is one: to a level that keeps no order, with nothing below it."""
    if len(levels) == 1 and isinstance(memory, HostSlots):
        level = levels[0]
        if isinstance(level, ByteLevel) and not level.ordered:
            return Swap(memory, level)
    return None


@compiled
def _swap(
    weight: Any,
    state: Any,
    records: Any,
    meta: Any,
    place_of: Any,
    sources: Any,
    targets: Any,
    leaving: Any,
    done: Any,
    counts: Any,
) -> None:
    row_words, state_words = weight.shape[1], state.shape[1]
    coming = np.empty(row_words + state_words, np.uint32)
    for n in range(len(sources)):
        done[n] = sources[n] > 0 and leaving[n] >= 0
        if not done[n]:
            continue
        slot, place = targets[n], (sources[n] - 1) >> 2
        for word in range(row_words + state_words):
            coming[word] = records[place, word]
        counts[n] = records[place, row_words + state_words]
        for word in range(row_words):
            records[place, word] = weight[slot, word]
        for word in range(state_words):
            records[place, row_words + word] = state[slot, word]
        records[place, row_words + state_words] = meta[slot, COUNT]
        for word in range(row_words):
            weight[slot, word] = coming[word]
        for word in range(state_words):
            state[slot, word] = coming[row_words + word]
        place_of[leaving[n]] = sources[n]
