"""The short way between slots on the host and the one byte-addressable level below them: two rows change places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.intrinsics import prefetch, prefetch_lines
from dlrm_trainer.embedding.tiers.byte_level import ByteLevel
from dlrm_trainer.embedding.tiers.directory import LEVEL_BITS, Directory
from dlrm_trainer.embedding.tiers.level import Level
from dlrm_trainer.embedding.tiers.replacement import COUNT
from dlrm_trainer.embedding.tiers.slot_memory import HostSlots, SlotMemory

AHEAD = 4
"""Pairs asked for before their turn."""


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


@kernel
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
    row_words, state_words, words = np.uint64(weight.shape[1]), np.uint64(state.shape[1]), np.uint64(records.shape[1])
    rows, states, places, last = weight.reshape(-1), state.reshape(-1), records.reshape(-1), len(sources) - 1
    for n in range(len(sources)):
        coming = min(n + AHEAD, last)
        row, place = np.uint64(targets[coming]) * row_words, np.uint64((sources[coming] - 1) >> LEVEL_BITS) * words
        prefetch_lines(rows, row, row + row_words)
        prefetch_lines(places, place, place + words)
        prefetch(states, np.uint64(targets[coming]) * state_words)
        prefetch(place_of, leaving[coming])
        done[n] = sources[n] > 0 and leaving[n] >= 0
        if not done[n]:
            continue
        place = np.uint64((sources[n] - 1) >> LEVEL_BITS) * words
        row = np.uint64(targets[n]) * row_words
        for word in range(row_words):
            value = places[place + word]
            places[place + word] = rows[row + word]
            rows[row + word] = value
        row, place = np.uint64(targets[n]) * state_words, place + row_words
        for word in range(state_words):
            value = places[place + word]
            places[place + word] = states[row + word]
            states[row + word] = value
        counts[n] = places[place + state_words]
        places[place + state_words] = meta[targets[n], COUNT]
        place_of[leaving[n]] = sources[n]
