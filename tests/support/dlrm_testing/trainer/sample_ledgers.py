"""What ranks kept of the samples that they trained on, read by the words of the format alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt


def records(folder: Path) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Step and sample ids of each record in the ledgers of all ranks, rank by rank."""
    for path in sorted(folder.glob("rank-*.bin")):
        numbers, position = np.fromfile(path, "<i8"), 0
        while position < len(numbers):
            step, count = (int(number) for number in numbers[position : position + 2])
            position += 2 + count
            yield step, numbers[position - count : position]


def sample_ids(folder: Path) -> npt.NDArray[np.int64]:
    """Ids of the samples that the final parameters were made from, over all ranks, sorted: [samples]."""
    return np.sort(np.concatenate([ids for _, ids in records(folder)]))
