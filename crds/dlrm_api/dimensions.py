"""The bytes of tables whose rows have several sizes (``embedding.dimension``), by which planner and trainer budget.

A row holds its first columns, as many as one of the table's sizes, in the slab of that size: a dense array of rows of
one width, their optimizer states and their numbers. A word per row says in which slab it is, and where.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_SIZES = 7
"""A row's word has 3 bits for its size, and 0 stands for none."""
MAX_SLAB_ROWS = 2**29
"""The word's other bits are a place in a slab, so a rank has at most so many rows of a table."""
CUT_COLUMNS_BYTES = 4
"""The number of columns of a row in a cut, in which rows have all columns."""
ROW_BYTES = 8
"""Per row of the table, whatever it holds: word and utility."""
SLAB_NUMBER_BYTES = 4
"""The number of a slab's row."""
SLAB_HEADROOM_DIVISOR = 8
"""Slabs may take 1/8 more than the budget between two maintenances, for new rows."""


def default_sizes(dim: int) -> tuple[int, ...]:
    """Return the sizes of rows by default: a quarter, half and all of the columns, in multiples of 4."""
    quarter, half = (max(4, (dim + parts * 2) // (parts * 4) * 4) for parts in (4, 2))
    return tuple(sorted({quarter, half, dim}))


@dataclass(frozen=True, kw_only=True)
class SlabBytes:
    """Compute the bytes of a table's rows from the share of them that it keeps."""

    dim: int
    state_bytes: int
    """Optimizer state of a row."""
    keep: float
    """``keepBytes``."""
    least_columns: int = 0
    """Columns that every row has: the first ones, with unique ids."""

    @property
    def plain_row(self) -> int:
        """Return the bytes of a row, with its state, in a table without sizes."""
        return 4 * self.dim + self.state_bytes

    @property
    def row(self) -> int:
        """Return the bytes per row of the table, whatever it holds."""
        return ROW_BYTES

    @property
    def least_row(self) -> int:
        """Return the bytes of a row with as few columns as it may have."""
        return self.row + (self.slab_row(self.least_columns) if self.least_columns else 0)

    @property
    def min_keep(self) -> float:
        """Return the share that the table takes if no row holds more; ``keep`` must be above it."""
        return self.least_row / self.plain_row

    def slab_row(self, columns: int) -> int:
        """Return the bytes of a slab's row of so many columns."""
        return 4 * columns + self.state_bytes + SLAB_NUMBER_BYTES

    def budget(self, rows: int) -> int:
        """Return the bytes that the slabs of so many rows may take after a maintenance."""
        full = rows * self.slab_row(self.dim)
        return full if self.keep == 1 else min(full, max(0, math.floor(rows * (self.keep * self.plain_row - self.row))))

    def planned(self, rows: int) -> int:
        """Return the most bytes that so many rows take, between maintenances too."""
        budget = self.budget(rows)
        most = budget + -(-budget // SLAB_HEADROOM_DIVISOR)
        return rows * self.row + min(most, rows * self.slab_row(self.dim))
