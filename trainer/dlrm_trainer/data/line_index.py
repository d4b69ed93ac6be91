"""Where the lines of a text file start: found once, then kept in a cache folder, since data may be read-only."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError

logger = logging.getLogger(__name__)

_NEWLINE = ord("\n")
_CHUNK_BYTES = 64 << 20


def default_cache_folder() -> Path:
    """Where indexes are kept unless told otherwise: a folder of this user's among the temporary files."""
    return Path(tempfile.gettempdir()) / f"dlrm-line-index-{os.getuid()}"


def line_starts(path: Path, data: NDArray[np.uint8], cache_folder: Path) -> NDArray[np.int64]:
    """Offsets of the lines of a file, (lines + 1,) int64; line i is ``data[starts[i] : starts[i + 1] - 1]``.

    The last entry is one past the final newline, or one past where it is missing. The index is read from
    ``cache_folder`` if it holds one for the file's path, size and time of change; ranks that start together build it
    once. Without room or rights to keep it, it is built all the same.
    """
    stat = path.stat()
    name = hashlib.sha256(f"{path.absolute()}\x00{stat.st_size}\x00{stat.st_mtime_ns}".encode()).hexdigest()
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (cache_folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _kept(cache_folder / f"{name}.npy", data)
    except OSError as error:
        logger.warning("line index not kept", extra={"folder": str(cache_folder), "error": str(error)})
        return _scan(data)


def _kept(kept: Path, data: NDArray[np.uint8]) -> NDArray[np.int64]:
    if not kept.exists():
        unfinished = kept.with_suffix(".tmp")
        with unfinished.open("wb") as stream:
            np.save(stream, _scan(data))
        unfinished.replace(kept)
    starts: NDArray[np.int64] = np.load(kept, mmap_mode="r")
    return starts


def _scan(data: NDArray[np.uint8]) -> NDArray[np.int64]:
    found = [np.zeros(1, dtype=np.int64)]
    for offset in range(0, data.size, _CHUNK_BYTES):
        found.append(np.flatnonzero(data[offset : offset + _CHUNK_BYTES] == _NEWLINE) + (offset + 1))
    if data[-1] != _NEWLINE:
        found.append(np.array([data.size + 1], dtype=np.int64))
    return np.concatenate(found)


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, mapped into memory, read when looked at.

    Raises:
        BadDataError: the file is empty or compressed.
    """
    if path.stat().st_size == 0:
        raise BadDataError(f"{path}: the file is empty: remove it from the URIs, or write it anew")
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    if data[:2].tobytes() == b"\x1f\x8b":
        raise BadDataError(f"{path}: the file is compressed by gzip: decompress it, lines are read in any order")
    return data
