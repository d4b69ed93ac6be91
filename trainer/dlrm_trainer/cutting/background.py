"""A cut within the hand-off budget, most of which goes over while training goes on."""

from __future__ import annotations

from dlrm_checkpointer.hand_off.writer import HandedOver, WholeCut
from dlrm_trainer.embedding import SavedParts

AT_ONCE_BYTES = 16 << 20
"""Copied between two steps: milliseconds, and all of a small cut."""


class BackgroundHandOver:
    """Copies the rows of a cut as they were at its step: a few at once, the others in a thread or before they change.

    Rows that move between tiers or lie on a GPU are copied at once, all of them.

    Args:
        saved: whose record of changed rows the cut has begun anew.
        cut: begun.
        at_once: bytes of the others to copy at once.
    """

    def __init__(self, saved: SavedParts, cut: WholeCut, at_once: int = AT_ONCE_BYTES) -> None:
        self._saved, self._cut = saved, cut
        try:
            for rows in saved.rows_in_place(moving=True):
                cut.copy(rows)
            self._copying = saved.begin_copying_on_update(cut.lay)
            self._copying.copy(at_once)
        except BaseException:
            saved.end_copying()
            cut.withdraw()
            raise
        if not self._copying.done:
            self._copying.start()

    @property
    def step(self) -> int:
        """Of the cut."""
        return self._cut.step

    def go_on(self) -> HandedOver | None:
        """The answer once the cut is whole, between two steps.

        Raises:
            DeviceError: the device is full.
        """
        return self._finished() if self._copying.ended() else None

    def end(self) -> HandedOver:
        """Wait until the cut is whole; raises what ``go_on`` does."""
        self._copying.wait()
        return self._finished()

    def give_up(self) -> None:
        """Leave nothing of the cut. Repeating it does nothing, nor does it once the cut is whole."""
        self._saved.end_copying()
        self._copying.close()
        self._cut.withdraw()

    def _finished(self) -> HandedOver:
        self._saved.end_copying()
        return self._cut.finish()
