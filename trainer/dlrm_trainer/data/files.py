"""Rows over several files: which row number lies in which file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_trainer.data.uris import relative_names


class FileSet:
    """Files in order, with their row counts. Row numbers run over all of them."""

    def __init__(self, paths: Sequence[Path], row_counts: Sequence[int]) -> None:
        self._paths = tuple(paths)
        self._bounds = np.concatenate(([0], np.cumsum(row_counts, dtype=np.int64)))
        self.num_rows = int(self._bounds[-1])

    def description(self) -> list[dict[str, Any]]:
        """Name (below the shared folder), bytes and rows of each file, for fingerprints."""
        counts = np.diff(self._bounds).tolist()
        return [
            {"name": name, "bytes": path.stat().st_size, "rows": rows}
            for name, path, rows in zip(relative_names(self._paths), self._paths, counts, strict=True)
        ]

    def locate(self, row: int) -> tuple[Path, int]:
        """File of a row, and the row's number in it."""
        number = int(np.searchsorted(self._bounds, row, side="right")) - 1
        return self._paths[number], row - int(self._bounds[number])

    def runs(self, rows: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Cut rows, at least one, into runs that lie in one file: the file's number, and the rows' numbers in it."""
        numbers = np.searchsorted(self._bounds, rows, side="right") - 1
        edges = np.concatenate(([0], np.flatnonzero(np.diff(numbers)) + 1, [rows.size])).tolist()
        for start, stop in pairwise(edges):
            number = int(numbers[start])
            yield number, rows[start:stop] - self._bounds[number]
