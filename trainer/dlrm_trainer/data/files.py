"""Files of a data set, wherever they lie: which row number lies in which file, and whether a file is still the same."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any, BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError
from dlrm_checkpointer.format.fetch import in_parallel
from dlrm_trainer.data.uris import relative_names

CHANGED = "was changed after this run began to read it: put it back, or start the run anew on the new data"

SAMPLE_BYTES = 4096
SAMPLED_AT_ONCE = 32
"""Files; see ``footers.AT_ONCE``."""


class DataFile(Protocol):
    """One file, as it was when it was found."""

    @property
    def name(self) -> str:
        """As users write it."""

    @property
    def path(self) -> PurePath:
        """Its place among the others."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def stamp(self) -> str:
        """Another one where another content stands under this name, as far as its store tells."""

    def check(self) -> None:
        """Find out whether it is still the same.

        Raises:
            NoInputError: it is gone.
            BadDataError: it was changed.
        """

    def open(self) -> BinaryIO:
        """To be read from anywhere in it; reads raise as ``check`` does."""


class LocalFile:
    """A file of this machine, or mounted here.

    Raises:
        NoInputError: it is gone since it was found.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)
        try:
            stat = path.stat()
        except FileNotFoundError as error:
            raise NoInputError(f"{self.name}: no such file: it was there a moment ago, so put it back") from error
        self.size = stat.st_size
        self.stamp = f"{stat.st_size}\x00{stat.st_mtime_ns}"

    def check(self) -> None:
        """Compare size and time of change with those when it was found."""
        try:
            stat = self.path.stat()
        except FileNotFoundError as error:
            raise NoInputError(f"{self.name}: no such file: it was there before, so put it back") from error
        except PermissionError as error:
            raise NoPermissionError(f"{self.name}: no permission to look at it: change its owner or mode") from error
        if stat.st_size < self.size:
            raise BadDataError(f"{self.name}: shrank from {self.size} to {stat.st_size} bytes; it {CHANGED}")
        if f"{stat.st_size}\x00{stat.st_mtime_ns}" != self.stamp:
            raise BadDataError(f"{self.name}: {CHANGED}")

    def open(self) -> BinaryIO:
        """Open it for reading."""
        return self.path.open("rb", buffering=0)


class FileSet:
    """Files in order, with their row counts. Row numbers run over all of them."""

    def __init__(self, files: Sequence[DataFile], row_counts: Sequence[int]) -> None:
        self.files = tuple(files)
        self.bounds: NDArray[np.int64] = np.concatenate(([0], np.cumsum(row_counts, dtype=np.int64)))
        self.num_rows = int(self.bounds[-1])
        self._contents = list(in_parallel(content, self.files, SAMPLED_AT_ONCE))

    def description(self) -> list[dict[str, Any]]:
        """Name (below the shared folder), bytes, rows and ``content`` of each file, for fingerprints."""
        counts = np.diff(self.bounds).tolist()
        names = relative_names([file.path for file in self.files])
        return [
            {"name": name, "bytes": file.size, "rows": rows, "content": sampled}
            for name, file, rows, sampled in zip(names, self.files, counts, self._contents, strict=True)
        ]

    def locate(self, row: int) -> tuple[DataFile, int]:
        """File of a row, and the row's number in it."""
        number = int(np.searchsorted(self.bounds, row, side="right")) - 1
        return self.files[number], row - int(self.bounds[number])


def content(file: DataFile) -> str:
    """What tells a file that was written anew from the one before, though it has as many bytes and rows.

    Hexadecimal digits of the SHA-256 of its middle and its end: the same wherever the file is copied to.

    Raises:
        DLRMError: as ``check`` does.
    """
    digest = hashlib.sha256()
    try:
        with file.open() as opened:
            for start in (file.size // 2, max(0, file.size - SAMPLE_BYTES)):
                opened.seek(start, os.SEEK_SET)
                digest.update(opened.read(SAMPLE_BYTES))
    except OSError as error:
        file.check()
        raise BadDataError(f"{file.name}: cannot be read: {error.strerror or error}: write or copy it anew") from error
    return digest.hexdigest()[:16]
