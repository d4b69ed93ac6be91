"""``slow_trainer`` whose cuts are copied slowly beside training, none of their rows at once.

Run as ``python -m copying_trainer`` with the trainer's arguments and ``slow_trainer``'s environment; the file that
``COPIED`` names gets lines "step, steps over which a rank copied the cut".
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import dlrm_trainer.__main__
from dlrm_testing.trainer import slow_trainer  # noqa: F401  has its faults made
from dlrm_trainer.checkpointing import handover
from dlrm_trainer.embedding import CopyBeforeUpdate, copy_before_update

CHUNK_S = 0.25
copy_rows, copy, times = copy_before_update.copy_rows, CopyBeforeUpdate.copy, 0


def slow_copy_rows(*arguments: Any) -> None:
    time.sleep(CHUNK_S)
    copy_rows(*arguments)


def counted_copy(copying: CopyBeforeUpdate, resting_bytes: int | None = None) -> bool:
    global times
    times += 1
    done = copy(copying, resting_bytes)
    if done:
        with Path(os.environ["COPIED"]).open("a") as file:
            print(copying.step, times, file=file)
        times = 0
    return done


copy_before_update.copy_rows = slow_copy_rows
CopyBeforeUpdate.copy = counted_copy  # type: ignore[method-assign]
handover.SMALL_CUT_BYTES = 0

if __name__ == "__main__":
    sys.exit(dlrm_trainer.__main__.main())
