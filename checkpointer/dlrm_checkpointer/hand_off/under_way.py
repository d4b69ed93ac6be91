"""What is the same of every cut that a rank hands over while it trains on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dlrm_checkpointer.hand_off.folder import CutName
from dlrm_checkpointer.hand_off.slices import SlicedCut, withdrawn


class CutUnderWay:
    """One rank's part of a cut, on its way. Nothing is left of it where a call raises.

    Args:
        cut: started.
        folder: the hand-off folder.
        ended: told once, with the cut's name where it is whole, else with None.
    """

    def __init__(self, cut: SlicedCut, folder: Path, ended: Callable[[CutName | None], None]) -> None:
        self._cut, self._folder, self._tell = cut, folder, ended
        self._ended = False

    @property
    def step(self) -> int:
        """Of the cut."""
        return self._cut.name.step

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
