"""What a level below the slots is: places for records, whatever memory they lie in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import Tier

Rows = NDArray[np.int64]
"""(N,) rows, numbered over all tables that share the level."""
Places = NDArray[np.int64]
"""(N,) places of a level, each in [0, places)."""
Records = NDArray[np.uint32]
"""(N, W) records: a row, its optimizer state and its access count, as 32-bit words."""
Moved = Callable[[Rows, Places], None]
"""PodReport by a level that moves records on its own account: the rows, and the places where they are now."""

Finish = Callable[[], None]
"""Waits until all of a copy is there; to be called once. Raises DeviceError as what began it."""


def finished() -> None:
    """Of a copy that was all there when it began."""


class Level(Protocol):
    """Keeps records of W words. One thread at a time uses it; every array of places has no place twice."""

    @property
    def tier(self) -> Tier:
        """The memory that it lies in."""

    @property
    def places(self) -> int:
        """Records that it may hold."""

    @property
    def used(self) -> int:
        """Records that it holds."""

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """Bytes really taken now, by tier: allocated blocks of files, touched memory, tables kept beside."""

    def write(self, rows: Rows, records: Records) -> Places:
        """Keep records of rows that it doesn't hold, in places of its choice; the caller has seen to it that they fit.

        Raises:
            DeviceError: names the path and the bytes that could not be written.
        """

    def read(self, places: Places, out: Records) -> Finish:
        """Begin to copy the records of some places out; they stay where they are.

        Until the copy is finished, which it must be before the next one begins, places may be freed, those of these
        records too, and others written; neither array may change.

        Raises:
            DeviceError: names the path and the bytes that could not be read.
        """

    def free(self, places: Places) -> None:
        """Give places back; their records are gone."""

    def coldest(self, count: int) -> tuple[Rows, Places]:
        """Which of its rows have been there longest, at most ``count`` of them, longest first."""

    def close(self) -> None:
        """Give the memory back."""
