"""A cut for all of which there is room, on its way: a rank fills it in while it trains on."""

from __future__ import annotations

from collections.abc import Sequence

from dlrm_checkpointer.cut import RowsInPlace
from dlrm_checkpointer.hand_off.draft import Laid, Rows
from dlrm_checkpointer.hand_off.slices import HandedOver
from dlrm_checkpointer.hand_off.under_way import CutUnderWay


class WholeCut(CutUnderWay):
    """One rank's part of a cut, on its way in one piece: room for all of it is taken, and its dense state is in it."""

    def copy(self, place: RowsInPlace) -> None:
        """Copy rows now.

        Raises:
            ValueError: they are not of the cut's tables, or the rank does not store them.
        """
        with self._withdrawn():
            self._cut.add_rows(place)

    def lay(self, wanted: Sequence[Rows]) -> list[Laid]:
        """Memory for those of some rows that are any, filled in before ``finish``; the caller lets go of it then.

        Raises:
            ValueError: the rank does not store them.
        """
        with self._withdrawn():
            return self._cut.lay(wanted)

    def finish(self) -> HandedOver:
        """Make the cut whole, once all of it is filled in."""
        with self._withdrawn():
            given = self._cut.finish()
        self._end(self._cut.name)
        return given
