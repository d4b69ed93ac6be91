"""Read files and objects of training data as they were when they were found; tell edited ones from touched ones."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast

from tenacity import before_sleep_log, retry, retry_if_exception_type, stop_after_delay, wait_random_exponential

from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError, StoreUnavailableError
from dlrm_stores.base import ObjectInfo

if TYPE_CHECKING:
    from dlrm_stores.s3 import S3Store

logger = logging.getLogger(__name__)

CHANGED = "changed after this run found it; restore it, or start a new run on the new data"
SAMPLE_BYTES = 4096
TAIL_BYTES = 64 << 10
"""What readers of Parquet read first: most footers fit."""
MAX_HASHED_BYTES = 256 << 20
"""Larger files are told apart by samples: a hash of all would take longer than reading what a job needs of them."""
RETRY_DEADLINE_S = 300.0
"""Reads are retried this long while the service does not answer."""
RETRIED, BACKOFF = retry_if_exception_type(StoreUnavailableError), wait_random_exponential(0.5, max=15)
SAID = before_sleep_log(logger, logging.WARNING)


@dataclass(frozen=True, kw_only=True)
class TableColumns:
    """Describe the columns of a table that files belong to."""

    partitioned_by: frozenset[str] = frozenset()
    """Columns whose values may be in the table's metadata only."""
    ids: Mapping[str, int] = field(default_factory=dict)
    """Of the columns by name, in a format that tells them apart by id; else empty."""


class DataFile(ABC):
    """Read one file as it was when it was found."""

    name: str  # as users write it
    path: PurePath  # files are sorted by it
    size: int  # in bytes
    etag: str = ""
    """Of an object."""
    modified_ns: int = 0
    """Time of the last write of a local file."""
    digest: str = ""
    """SHA-256 of the content, or of samples of a file above ``MAX_HASHED_BYTES``; empty if unknown."""
    table: TableColumns | None = None
    """Of the table that it belongs to."""

    @property
    def stamp(self) -> str:
        """Return what changes with the content, as far as the store can tell without reading it."""
        return self.etag or str(self.modified_ns)

    @abstractmethod
    def check(self) -> None:
        """Check that it still has the same content.

        Raises:
            NoInputError: it was removed.
            BadDataError: it was changed.
        """

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open it for reads at any offset, which raise as ``check`` does."""

    def open_with_tail(self) -> BinaryIO:
        """Open it so that its last ``TAIL_BYTES`` are read at once, however many reads follow there."""
        return self.open()

    def sample(self, opened: BinaryIO) -> str:
        """Return hexadecimal digits of the SHA-256 of the open file's middle and end.

        They tell a rewritten file from the one before, even if it has as many bytes and rows, and stay the same
        wherever the file is copied to. Raises as ``check`` does.
        """
        digest = hashlib.sha256()
        try:
            for start in (self.size // 2, max(0, self.size - SAMPLE_BYTES)):
                opened.seek(start, os.SEEK_SET)
                digest.update(opened.read(SAMPLE_BYTES))
        except OSError as error:
            raise self._unreadable(error) from error
        return digest.hexdigest()[:16]

    def _unreadable(self, error: OSError) -> BadDataError:
        self.check()
        return BadDataError(f"{self.name}: cannot read file: {error.strerror or error}; write or copy it again")


class LocalFile(DataFile):
    """Read a file of this machine; ``found`` are the size and time of the last write with which another one listed it.

    Raises:
        NoInputError: it was removed since it was found.
        NoPermissionError: it cannot be looked up.
    """

    def __init__(self, path: Path, found: tuple[int, int] | None = None) -> None:
        self.path: Path = path
        self.name = str(path)
        self._checking = threading.Lock()
        self.size, self.modified_ns = found or self._look_up()

    def _look_up(self) -> tuple[int, int]:
        try:
            status = self.path.stat()
        except FileNotFoundError as error:
            raise NoInputError(f"file not found: {self.name}; it was removed after this run found it") from error
        except PermissionError as error:
            raise NoPermissionError(f"permission denied: {self.name}; change its owner or mode") from error
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Compare the size and, if the modification time is another, the content."""
        size, modified_ns = self._look_up()
        if size < self.size:
            raise BadDataError(f"{self.name}: {CHANGED} (it shrank from {self.size} to {size} bytes)")
        if size > self.size:
            raise BadDataError(f"{self.name}: {CHANGED} (it grew from {self.size} to {size} bytes)")
        if modified_ns == self.modified_ns:
            return
        with self._checking:
            if modified_ns == self.modified_ns:
                return
            if not self.digest or self.compute_digest() != self.digest:
                raise BadDataError(f"{self.name}: {CHANGED}")
            logger.info("data file was touched, its content is the same", extra={"file": self.name})
            self.modified_ns = modified_ns

    def accept_copy(self, content: str) -> None:
        """Take this machine's file for the one that another machine listed, if its sample is ``content``.

        Copies have times of their own. Raises as ``check`` does.
        """
        size, modified_ns = self._look_up()
        if (size, modified_ns) == (self.size, self.modified_ns):
            return
        with self.open() as opened:
            if size != self.size or self.sample(opened) != content:
                raise BadDataError(f"{self.name}: another file than rank 0 found, of {size} bytes")
        self.modified_ns = modified_ns

    def compute_digest(self) -> str:
        """Read the file and return its ``digest``. Raises NoInputError (removed) or BadDataError (unreadable)."""
        try:
            with self.path.open("rb", buffering=0) as opened:
                if self.size <= MAX_HASHED_BYTES:
                    return hashlib.file_digest(opened, "sha256").hexdigest()
                digest = hashlib.sha256()
                for start in range(0, self.size, self.size // 256):
                    opened.seek(start)
                    digest.update(opened.read(SAMPLE_BYTES))
                return digest.hexdigest()
        except FileNotFoundError as error:
            raise NoInputError(f"file not found: {self.name}; it was removed after this run found it") from error
        except OSError as error:
            problem = f"cannot read file: {error.strerror or error}"
            raise BadDataError(f"{self.name}: {problem}; write or copy it again") from error

    def open(self) -> BinaryIO:
        """Open it unbuffered."""
        try:
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise self._unreadable(error) from error


class S3Object(DataFile):
    """Read one object as a listing showed it."""

    def __init__(self, store: S3Store, bucket: str, found: ObjectInfo) -> None:
        self._store, self._key, self.etag = store, found.key, found.etag
        self.path = PurePosixPath("/", bucket, found.key)
        self.name = f"s3://{bucket}/{found.key}"
        self.size = found.size

    def check(self) -> None:
        """Read one byte of it, if it has any."""
        if self.size:
            self.read(0, 1)

    def open(self) -> BinaryIO:
        """Open it for reads by ranges."""
        return cast(BinaryIO, _Ranges(self.size, self.read))

    def open_with_tail(self) -> BinaryIO:
        """Open it after one read of its last ``TAIL_BYTES``."""
        first = max(0, self.size - TAIL_BYTES)
        tail = self.read(first, self.size - first) if self.size else b""

        def read(start: int, length: int) -> bytes:
            return self.read(start, length) if start < first else tail[start - first : start - first + length]

        return cast(BinaryIO, _Ranges(self.size, read))

    @retry(retry=RETRIED, stop=stop_after_delay(RETRY_DEADLINE_S), wait=BACKOFF, before_sleep=SAID, reraise=True)
    def read(self, start: int, length: int) -> bytes:
        """Read some bytes.

        Raises:
            NoInputError: it was removed.
            BadDataError: it was changed.
            NoPermissionError: the credentials do not allow it.
            StoreUnavailableError: the service did not answer until the deadline.
        """
        try:
            body = self._store.get_range_of(self._key, self.etag, start, length)
        except NoInputError as error:
            problem = f"object not found: {self.name}; it was removed after this run found it"
            raise NoInputError(f"{problem} ({error})") from error
        if body is None:
            raise BadDataError(f"{self.name}: {CHANGED} (its ETag is no longer {self.etag})")
        return body


class _Ranges(io.RawIOBase):
    """Read an object as a file."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._read, self._at = size, read, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        wanted = left if size < 0 else min(size, left)
        body = self._read(self._at, wanted) if wanted else b""
        self._at += len(body)
        return body


def relative_names(paths: Sequence[PurePath]) -> list[str]:
    """Return names of files relative to their common directory, wherever that is mounted."""
    shared = PurePath(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(shared).as_posix() for path in paths]


def files_named(files: Sequence[DataFile], names: Sequence[str], sizes: Sequence[int]) -> list[DataFile] | None:
    """Return the files with some ``relative_names``, whose common directory may be a part of that of ``files``.

    None if no directory holds all of them. Of several directories that do, one whose files have these sizes is taken.
    """
    by_path = {file.path.as_posix(): file for file in files}
    ends = f"/{names[0]}"
    roots = [path.removesuffix(ends) for path in by_path if path.endswith(ends)]
    found = [[by_path[f"{root}/{name}"] for name in names] for root in roots if _all_in(by_path, root, names)]
    found.sort(key=lambda chosen: [file.size for file in chosen] != list(sizes))
    return found[0] if found else None


def _all_in(by_path: dict[str, DataFile], root: str, names: Sequence[str]) -> bool:
    return all(f"{root}/{name}" in by_path for name in names)
