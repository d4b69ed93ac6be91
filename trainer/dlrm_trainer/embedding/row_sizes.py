"""Decide how many columns rows keep: one cut-off of their utilities for all tables of a model, the same on all ranks.

Pure functions of integer counts, so that they depend neither on the number of ranks nor on where rows are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_api.dimensions import MAX_SIZES, SLAB_HEADROOM_DIVISOR, SlabBytes
from dlrm_api.model import MAX_MAINTENANCE_STEPS, TableSpec
from dlrm_api.row_optimizers import STATE_BYTES, RowOptimizerKind, state_values
from dlrm_kernels.slabs import BIN_OF_ONE, BINS, BINS_PER_OCTAVE
from dlrm_trainer.embedding.unique import HALF_LIFE_LOOKUPS, MIN_HALF_LIFE_STEPS

Counts = NDArray[np.int64]
"""(C + 1, BINS) rows of each class by the bin of their utility."""
UTILITY_POWER = 4
"""A row with twice the columns needs a utility of 2 to this power."""
HYSTERESIS_BINS = 1
"""A row moves only this far past a cut-off: by a factor of 1.09."""
MOVES_PER_HALF_LIFE = 32
"""Rows move so many times in a half-life, at most in every maintenance."""
QUIET_PERIODS = 4
"""No row moves in the first periods of maintenance: utilities say little yet."""
MAX_NEW_ROWS_RATIO = 2
"""A period may have as many times the new rows of the one before, where not any number of them is within limits."""


@dataclass(frozen=True)
class RowSizes:
    """Describe rows of tables with the same sizes."""

    sizes: tuple[int, ...]
    """Columns of classes 1, 2 and so on, ascending."""
    row_bytes: tuple[int, ...]
    """Bytes of a row of each class in its slab; class 0 takes none."""
    least_class: int = 0
    """1: rows keep their first columns until their id leaves."""

    def start_class(self, steps_down: int) -> int:
        """Return the class in which rows start: that of all columns, or so many steps below it."""
        return max(1, len(self.sizes) - steps_down)

    @cached_property
    def bins(self) -> tuple[int, ...]:
        """Return how many bins above the cut-off of class 1 that of each class is."""
        octaves = (UTILITY_POWER * math.log2(size / self.sizes[0]) for size in self.sizes)
        return tuple(round(BINS_PER_OCTAVE * each) for each in octaves)

    def targets(self, cut_off: int) -> NDArray[np.uint8]:
        """Return (C + 1, BINS) the class that rows of each class and bin have after a maintenance.

        ``cut_off`` is the bin from which on rows hold anything.
        """
        lowest, highest = -HYSTERESIS_BINS - 1, self.bins[-1] + HYSTERESIS_BINS
        return self._classes_above[:, np.clip(np.arange(BINS) - cut_off, lowest, highest) - lowest]

    @cached_property
    def _classes_above(self) -> NDArray[np.uint8]:
        """Return the targets by how many bins a row is above the cut-off: from below all limits to above all."""
        present, classes = np.arange(len(self.sizes) + 1)[:, None], np.arange(1, len(self.sizes) + 1)
        shifts = np.where(classes > present, HYSTERESIS_BINS, -HYSTERESIS_BINS)
        least = np.array(self.bins) + shifts
        above = np.arange(-HYSTERESIS_BINS - 1, self.bins[-1] + HYSTERESIS_BINS + 1)
        reached = (above[None, :, None] >= least[:, None, :]).sum(axis=2)
        found: NDArray[np.uint8] = np.maximum(reached, self.least_class).astype(np.uint8)
        return found

    def held_at(self, counts: Counts, cut_off: int) -> NDArray[np.int64]:
        """Return the (C + 1,) rows in the slab of each class after a maintenance with a cut-off; class 0 has none."""
        held = np.bincount(self.targets(cut_off).ravel(), counts.ravel(), len(self.sizes) + 1).astype(np.int64)
        held[0] = 0
        return held

    def bytes_at(self, counts: Counts, cut_off: int) -> int:
        """Return the bytes that rows take after a maintenance with a cut-off."""
        return int((np.array((0, *self.row_bytes)) * self.held_at(counts, cut_off)).sum())


def find_cut_off(kinds: Sequence[RowSizes], counts: Sequence[Counts], budget: int) -> int:
    """Return the lowest cut-off at which all rows fit a budget of bytes."""
    low = -HYSTERESIS_BINS - max(kind.bins[-1] for kind in kinds)
    high = BINS + HYSTERESIS_BINS
    while low < high:
        middle = (low + high) // 2
        if sum(kind.bytes_at(each, middle) for kind, each in zip(kinds, counts, strict=True)) <= budget:
            high = middle
        else:
            low = middle + 1
    return low


def utility_of_bin(cut_off: int) -> float:
    """Return the utility at which a bin begins."""
    return float(2.0 ** ((cut_off - BIN_OF_ONE) / BINS_PER_OCTAVE))


def sizes_of(table: TableSpec, optimizer: RowOptimizerKind) -> RowSizes:
    """Return the sizes of a table's rows, which has some."""
    row_bytes = tuple(map(_slab_bytes(table, optimizer).slab_row, table.sizes))
    return RowSizes(table.sizes, row_bytes, least_class=int(table.is_unique))


def _slab_bytes(table: TableSpec, optimizer: RowOptimizerKind) -> SlabBytes:
    found = table.slab_bytes(STATE_BYTES * state_values(optimizer, table.dim))
    assert found is not None
    return found


@dataclass(frozen=True)
class ModelSizes:
    """Describe the tables of a model whose rows have several sizes."""

    kinds: tuple[RowSizes, ...]
    """Different ones, in the model's order."""
    rows: tuple[int, ...]
    """Of each kind, at most."""
    step_rows: tuple[int, ...]
    """Of each kind, that a batch can look up at most."""
    budget: int
    """Bytes that rows may take in slabs."""
    half_life: int
    """Of utilities, in steps: one for all tables, which compete."""
    first_step: int
    """No row moves before."""

    @classmethod
    def of(
        cls, tables: Sequence[TableSpec], optimizer: RowOptimizerKind, batch_size: int, first_step: int
    ) -> ModelSizes | None:
        """Read the sizes of a model's tables; None if all rows have all columns."""
        sized = [table for table in tables if table.has_sizes]
        if not sized:
            return None
        budget, looked_up = 0, 0.0
        rows = dict.fromkeys((sizes_of(table, optimizer) for table in sized), 0)
        step_rows = dict(rows)
        for table in sized:
            kind, features = sizes_of(table, optimizer), len(table.sources)
            budget += _slab_bytes(table, optimizer).budget(table.held_rows)
            rows[kind] += table.held_rows
            step_rows[kind] += min(table.held_rows, batch_size * table.max_lookups * features)
            looked_up += (table.lookups or table.max_lookups) * features
        half_life = max(MIN_HALF_LIFE_STEPS, int(HALF_LIFE_LOOKUPS * sum(rows.values()) / looked_up / batch_size))
        return cls(tuple(rows), tuple(rows.values()), tuple(step_rows.values()), budget, half_life, first_step)

    @property
    def limit(self) -> int:
        """Return the most bytes that rows may take until the next maintenance, new ones included."""
        return self.budget + self.budget // SLAB_HEADROOM_DIVISOR

    def bytes_of(self, held: Sequence[int]) -> int:
        """Return the bytes of rows, given the number of each class of each kind, class 0 included."""
        row_bytes = [size for kind in self.kinds for size in (0, *kind.row_bytes)]
        return sum(size * rows for size, rows in zip(row_bytes, held, strict=True))

    def new_rows(self, held: Sequence[int], last_new: Sequence[int] | None, steps: int, last_steps: int) -> list[int]:
        """Return how many new rows of each kind to expect in a period of so many steps.

        That is as many as there can be, if rows with a budget's bytes leave space for twice as many, else at most
        ``MAX_NEW_ROWS_RATIO`` as many per step as in the period before. So only new rows whose number more than doubles
        can exceed the limit, and only there.

        Args:
            held: rows of each kind in slabs.
            last_new: those that came in the period before, None if it is unknown.
            steps: of the period.
            last_steps: of the period before.
        """
        bounds = zip(self.rows, held, self.step_rows, strict=True)
        most = [min(rows - has, each * steps) for rows, has, each in bounds]
        if last_new is None or 2 * self.bytes_of_new(most) <= self.limit - self.budget:
            return most
        ratios = (-(-MAX_NEW_ROWS_RATIO * each * steps // last_steps) for each in last_new)
        return list(map(min, most, ratios))

    def period_steps(
        self, held: Sequence[int], last_new: Sequence[int], steps: int, last_steps: int, *, may_double: bool
    ) -> int:
        """Return the steps of an adapted period, whose new rows find space above the budget.

        Takes what ``new_rows`` takes. A period is never longer than the time between two moments when rows move.
        """

        def fits(steps: int) -> bool:
            new_rows = self.new_rows(held, last_new, steps, last_steps)
            return self.bytes_of_new(new_rows) <= self.limit - self.budget

        if may_double and 2 * steps <= min(MAX_MAINTENANCE_STEPS, self._interval) and fits(2 * steps):
            return 2 * steps
        while steps > 1 and not fits(steps):
            steps //= 2
        return steps

    def bytes_of_new(self, new_rows: Sequence[int], steps_down: int = 0) -> int:
        """Return the bytes of new rows of each kind that start so many classes lower."""
        starts = (kind.row_bytes[kind.start_class(steps_down) - 1] for kind in self.kinds)
        return sum(size * rows for size, rows in zip(starts, new_rows, strict=True))

    def steps_down(self, used: int, new_rows: Sequence[int]) -> int:
        """Return how many classes lower rows start, so that new rows of each kind are within limits."""
        for steps in range(MAX_SIZES):
            if used + self.bytes_of_new(new_rows, steps) <= self.limit:
                return steps
        return MAX_SIZES

    def budget_before(self, new_rows: Sequence[int]) -> int:
        """Return the bytes that rows may keep in a maintenance before new ones with all columns.

        Never less than half of the budget: then new rows start lower.
        """
        return max(self.budget // 2, min(self.budget, self.limit - self.bytes_of_new(new_rows)))

    def is_due(self, step: int, last_step: int, period_steps: int, used: int) -> bool:
        """Return whether rows move in the maintenance after a step.

        ``last_step`` is that of the maintenance before, and ``used`` the bytes that rows take, new ones that are to
        come included.
        """
        if used > self.limit:
            return True
        if step < max(self.first_step, QUIET_PERIODS * period_steps):
            return False
        return step // self._interval > last_step // self._interval

    @property
    def _interval(self) -> int:
        return max(1, self.half_life // MOVES_PER_HALF_LIFE)
