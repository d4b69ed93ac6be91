"""A cut for all of which there is room, on its way: a rank fills it in while it trains on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from dlrm_checkpointer.cut import RowsInPlace, TableMeta, check_rows
from dlrm_checkpointer.draft import Laid, Rows
from dlrm_checkpointer.folder import CutName
from dlrm_checkpointer.slices import HandedOver, SlicedCut, withdrawn


class WholeCut:
    """One rank's part of a cut, on its way in one piece. Nothing is left of it where a call raises.

    Args:
        cut: started, with room for all of it, and its dense state in it.
        tables: of the cut, by name.
        folder: the hand-off folder.
        ended: told once, with the cut's name where it is whole, else with None.
    """

    def __init__(
        self, cut: SlicedCut, tables: Mapping[str, TableMeta], folder: Path, ended: Callable[[CutName | None], None]
    ) -> None:
        self._cut, self._tables, self._folder, self._tell = cut, tables, folder, ended
        self._ended = False

    @property
    def step(self) -> int:
        """Of the cut."""
        return self._cut.name.step

    def copy(self, place: RowsInPlace) -> None:
        """Copy rows now.

        Raises:
            ValueError: they are not of the cut's tables, or the rank does not store them.
        """
        with self._withdrawn():
            self._cut.check_owned(place.shard)
            check_rows(place, self._tables[place.shard.table])
            self._cut.add_rows(place)

    def lay(self, wanted: Sequence[Rows]) -> list[Laid]:
        """Memory for rows that are filled in before ``finish``; the caller lets go of it then.

        Raises:
            ValueError: the rank does not store them.
        """
        with self._withdrawn():
            for rows in wanted:
                self._cut.check_owned(rows.shard)
            return self._cut.lay(wanted)

    def finish(self) -> HandedOver:
        """Make the cut whole, once all of it is filled in."""
        with self._withdrawn():
            given = self._cut.finish()
        self._end(self._cut.name)
        return given

    def withdraw(self) -> None:
        """Give the cut up, and leave nothing of it. Repeating it does nothing, nor does it once the cut is whole."""
        if not self._ended:
            self._cut.withdraw()
            self._end(None)

    def _end(self, name: CutName | None) -> None:
        self._ended = True
        self._tell(name)

    def _withdrawn(self) -> withdrawn:
        return withdrawn(self._cut, self._folder, lambda: self._end(None))
