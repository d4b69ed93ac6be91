"""Where the lines of a text file start: found once, then kept in a cache folder, since data may be read-only."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_trainer.data.files import DataFile

logger = logging.getLogger(__name__)

_NEWLINE = ord("\n")
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
"""What files that were compressed begin with."""
_CHUNK_BYTES = 16 << 20


def default_cache_folder() -> Path:
    """Where indexes are kept unless told otherwise: a folder of this user's among the temporary files."""
    return Path(tempfile.gettempdir()) / f"dlrm-line-index-{os.getuid()}"


def line_starts(file: DataFile, cache_folder: Path) -> NDArray[np.int64]:
    """Offsets of the lines of a file, (lines + 1,) int64; line i is bytes ``starts[i]`` to ``starts[i + 1] - 2``.

    The last entry is one past the final newline, or one past where it is missing. The index is read from
    ``cache_folder`` if it holds one for the file's name and stamp; else the file is read once from beginning to end.
    Ranks that start together build it once. It goes to the folder as it is built and is mapped from there. Without room
    or rights to keep it, it is built all the same, in memory.

    Raises:
        BadDataError: the file is empty or compressed.
    """
    if file.size == 0:
        raise BadDataError(f"{file.name}: the file is empty: remove it from the URIs, or write it anew")
    name = hashlib.sha256(f"{file.path.as_posix()}\x00{file.stamp}".encode()).hexdigest()
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (cache_folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _kept(cache_folder / f"{name}.starts", file)
    except OSError as error:
        logger.warning("line index not kept", extra={"folder": str(cache_folder), "error": str(error)})
        return np.concatenate(list(_scan(file)))


def _kept(kept: Path, file: DataFile) -> NDArray[np.int64]:
    if (starts := _whole(kept, file.size)) is not None:
        return starts
    draft = kept.with_suffix(".tmp")
    try:
        with draft.open("wb") as stream:
            for some in _scan(file):
                some.tofile(stream)
        draft.replace(kept)
    finally:
        draft.unlink(missing_ok=True)
    return _mapped(kept)


def _whole(kept: Path, size: int) -> NDArray[np.int64] | None:
    """The index of a file of ``size`` bytes; None where there is none, or a power cut took its end."""
    try:
        starts = _mapped(kept)
    except (FileNotFoundError, ValueError):  # numpy's word for an empty file and for a part of a number
        return None
    return starts if starts[-1] in (size, size + 1) else None


def _mapped(kept: Path) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.memmap(kept, dtype=np.int64, mode="r")
    return starts


def _scan(file: DataFile) -> Iterator[NDArray[np.int64]]:
    """The entries of an index, in pieces."""
    yield np.zeros(1, dtype=np.int64)
    offset, last = 0, 0
    with file.open() as opened:
        while body := opened.read(_CHUNK_BYTES):
            if not offset and (packed := next((name for mark, name in _PACKED.items() if body.startswith(mark)), "")):
                raise BadDataError(
                    f"{file.name}: the file is compressed by {packed}: decompress it, lines are read in any order"
                )
            data = np.frombuffer(body, dtype=np.uint8)
            yield np.flatnonzero(data == _NEWLINE) + (offset + 1)
            offset, last = offset + data.size, int(data[-1])
    file.check()
    if last != _NEWLINE:
        yield np.array([offset + 1], dtype=np.int64)


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, not empty, mapped into memory and read when looked at."""
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    return data
