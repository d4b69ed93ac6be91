"""A cut above the budget that a rank hands over while it trains on: in slices, each row as it was at the cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dlrm_checkpointer.cut import RowsInPlace
from dlrm_checkpointer.hand_off.folder import CutName
from dlrm_checkpointer.hand_off.slices import HandedOver, SlicedCut
from dlrm_checkpointer.hand_off.under_way import CutUnderWay


class GradualCut(CutUnderWay):
    """One rank's part of a cut, on its way. No call waits, and nothing is left of the cut where one raises.

    The rank must ``save`` each row of the cut before it changes, unless the row was copied before, and calls ``copy``
    for the others and ``finish`` now and then.

    Args:
        cut: started.
        dense: dense state, on global rank 0; copied.
        folder: the hand-off folder.
        ended: told once, with the cut's name where it is whole, else with None.
    """

    def __init__(
        self,
        cut: SlicedCut,
        dense: Mapping[str, NDArray[Any]] | None,
        folder: Path,
        ended: Callable[[CutName | None], None],
    ) -> None:
        super().__init__(cut, folder, ended)
        self._dense = None if dense is None else {name: array.copy() for name, array in dense.items()}

    def copy(self, place: RowsInPlace, start: int) -> int:
        """Copy rows from ``start`` on; returns how many, 0 where there is no room before the sidecar has made some.

        Raises:
            CutAbandonedError: there was no room for rows about to change.
            DeviceError: the device is full, or the budget can't hold a single row.
            DivergedError: the cut can never be stored, because it holds a value that is not finite.
        """
        with self._withdrawn():
            return self._cut.take_gradually(place, start)

    def save(self, place: RowsInPlace) -> None:
        """Copy rows that are about to change; raises what ``copy`` raises."""
        with self._withdrawn():
            self._cut.save(place)

    def is_waiting(self) -> bool:
        """Whether nothing but ``save`` can be done now; raises what ``copy`` raises."""
        with self._withdrawn():
            return self._cut.is_waiting()

    def finish(self) -> HandedOver | None:
        """Make the cut whole, once all its rows are copied; None where the sidecar must make room before.

        Raises:
            CutAbandonedError: the sidecar dropped its slices, because a newer attempt has started.
            DeviceError: the device is full, or the budget can't hold the dense state.
            DivergedError: the cut can never be stored.
        """
        with self._withdrawn():
            given = self._cut.finish_gradually(self._dense)
        if given:
            self._end(self._cut.name)
        return given
