"""``slow_trainer`` whose cuts are copied slowly beside training, none of their rows at once.

Run as ``python -m copying_trainer`` with the trainer's arguments and ``slow_trainer``'s environment; the file that
``COPIED`` names gets lines "step, times that a rank went on with the cut".
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import dlrm_trainer.__main__
from dlrm_checkpointer.handoff.writer import HandedOver, WholeCut
from dlrm_testing.trainer import slow_trainer  # noqa: F401  has its faults made
from dlrm_trainer.checkpointing import handover
from dlrm_trainer.checkpointing.handover import BackgroundHandOver
from dlrm_trainer.embedding import Embeddings
from dlrm_trainer.embedding.copy_on_update import Image

CHUNK_S = 0.1
chunks = Image.chunks


def slow_chunks(image: Image) -> Iterator[tuple[int, int, int]]:
    for chunk in chunks(image):
        time.sleep(CHUNK_S)
        yield chunk


class ToldHandOver(BackgroundHandOver):
    """Tells how often a rank went on with it."""

    def __init__(self, embeddings: Embeddings, cut: WholeCut) -> None:
        super().__init__(embeddings, cut, at_once=0)
        self._times = 0

    def go_on(self) -> HandedOver | None:
        """See ``BackgroundHandOver``."""
        self._times += 1
        given = super().go_on()
        if given is not None:
            with Path(os.environ["COPIED"]).open("a") as file:
                print(self.step, self._times, file=file)
        return given


Image.chunks = slow_chunks  # type: ignore[method-assign]
handover.BackgroundHandOver = ToldHandOver  # type: ignore[misc]

if __name__ == "__main__":
    sys.exit(dlrm_trainer.__main__.main())
