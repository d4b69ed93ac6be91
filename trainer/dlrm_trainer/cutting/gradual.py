"""A cut above the hand-off budget, which goes over while training goes on."""

from __future__ import annotations

from dlrm_checkpointer.cut import RowsInPlace
from dlrm_checkpointer.hand_off.writer import CutAbandonedError, GradualCut, HandedOver
from dlrm_trainer.embedding import SavedParts


class GradualHandOver:
    """Copies the rows of a cut as they were at its step: before they change, or when the checkpointer made room.

    Args:
        saved: whose record of changed rows the cut has begun anew.
        cut: begun.
    """

    def __init__(self, saved: SavedParts, cut: GradualCut) -> None:
        self._saved, self._cut = saved, cut
        self._pending = saved.begin_copying(self._save)
        self._is_copied = False
        self._problem: CutAbandonedError | None = None

    @property
    def step(self) -> int:
        """Of the cut."""
        return self._cut.step

    def _save(self, place: RowsInPlace) -> None:
        """An update follows: a cut that must be given up is given up after it."""
        if self._problem is None:
            try:
                self._cut.save(place)
            except CutAbandonedError as error:
                self._problem = error

    def go_on(self) -> HandedOver | None:
        """Copy what there is room for, between two steps; the answer once the cut is whole.

        Raises:
            CutAbandonedError: rows changed before there was room for them; nothing is left of the cut.
            DeviceError: rows could not be read, or the budget can't hold a single row.
            DivergedError: the cut can never be stored.
        """
        try:
            if self._problem is not None:
                raise self._problem
            if self._cut.is_waiting():
                return None
            if not self._is_copied:
                self._saved.settle()
                self._is_copied = self._pending.copy(self._cut.copy)
            given = self._cut.finish() if self._is_copied else None
        except BaseException:
            self.give_up()
            raise
        if given is not None:
            self._saved.end_copying()
        return given

    def give_up(self) -> None:
        """Leave nothing of the cut."""
        self._saved.end_copying()
        self._cut.withdraw()
