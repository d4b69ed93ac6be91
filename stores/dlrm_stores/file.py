"""Store objects as files of a local or mounted directory that survive a crash of the machine."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from dlrm_api.errors import DLRMError, NoInputError, NoPermissionError, StoreUnavailableError
from dlrm_api.process import FULL, raise_device
from dlrm_stores.base import PARALLEL_DELETES, Body, ObjectInfo, parallel_map

logger = logging.getLogger(__name__)

DRAFT_PREFIX = ".draft-"
"""Name prefix of files that are being written; they are never listed or read."""
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""Errors of file systems without hard links: exFAT, many FUSE mounts, some network file systems."""
OPEN_ATTEMPTS = 5


def make_folder(folder: Path) -> None:
    """Create a directory with its parents, and sync the names of those that were created."""
    made = list(takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)


def sync(path: Path) -> None:
    """Flush a file's bytes, or the names in a directory, to the device."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot sync directories.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """Flush a directory and all files and directories below it."""
    for directory, _, names in os.walk(folder):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def write_synced(path: Path, text: str) -> None:
    """Write a file and flush it to the device."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(draft: Path, path: Path) -> None:
    """Rename a synced file within its directory, and sync the new name."""
    draft.replace(path)
    sync(path.parent)


class FileStore:
    """Hold keys as paths below one directory, which the first write creates.

    An object is written to a draft, synced, and renamed; or hard-linked if it must not replace another.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._has_links: bool | None = None
        """Whether the file system has hard links; None before the first."""

    @property
    def uri(self) -> str:
        """Return the URI of the keys' parent, without a trailing slash."""
        return "file://" + quote(str(self.root).rstrip("/"))

    def check_folder(self) -> None:
        """Check that the directory exists.

        Raises:
            NoInputError: it does not, or is a file.
            NoPermissionError: it cannot be looked up.
        """
        if (status := _status(self.root)) is None:
            raise NoInputError(f"directory not found: {self.root}; correct the URI")
        if not stat.S_ISDIR(status.st_mode):
            raise _not_a_directory(self.root)

    def get(self, key: str) -> bytes:
        """Return the object's bytes."""
        try:
            return (self.root / key).read_bytes()
        except OSError as error:
            raise _read_error(error, self.root / key) from error

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill a buffer with the object's first bytes and return the object's size."""
        view, done = buffer.cast("B"), 0
        try:
            with (self.root / key).open("rb", buffering=0) as file:
                while count := file.readinto(view[done:]):
                    done += count
                return os.fstat(file.fileno()).st_size
        except OSError as error:
            raise _read_error(error, self.root / key) from error

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:  # noqa: ARG002  nothing checks it
        """Write or replace the object."""
        with self._draft(self.root / key, body) as draft:
            draft.replace(self.root / key)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless it exists, by a hard link; without hard links, write or replace it."""
        path = self.root / key
        with self._draft(path, body) as draft:
            written = self._link(draft, path)
            if written is None:
                draft.replace(path)
                self._has_links = False
        return written is not False

    def _link(self, draft: Path, path: Path) -> bool | None:
        """Return whether the draft became the object; None: the file system has no hard links."""
        if self._has_links is False:
            return None
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            # After a link has worked, EPERM has other reasons.
            if self._has_links is None and error.errno in NO_LINKS:
                logger.info("store does not support conditional writes", extra={"uri": self.uri})
                return None
            raise
        self._has_links = True
        return True

    @contextlib.contextmanager
    def _draft(self, path: Path, body: Body) -> Iterator[Path]:
        """Write a synced file next to ``path``, to be renamed or linked in the block, then remove it."""
        draft = path.with_name(f"{DRAFT_PREFIX}{os.getpid()}-{time.monotonic_ns()}-{path.name}")
        try:
            with _open_draft(draft) as file:
                rest = memoryview(body)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            yield draft
            draft.unlink(missing_ok=True)
            sync(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                draft.unlink(missing_ok=True)
            _raise_write_error(error, path, len(body))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yield the objects with a key that starts with ``prefix``, in ascending order of keys."""
        folder = self.root / prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []
        for path in self._files(folder):
            key = path.relative_to(self.root).as_posix()
            if not path.name.startswith(DRAFT_PREFIX) and key.startswith(prefix) and (status := _status(path)):
                found.append(ObjectInfo(key=key, size=status.st_size, modified=status.st_mtime))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Remove the object if it exists, and directories that it leaves empty."""
        path = self.root / key
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _raise_write_error(error, path, 0)
        # A directory that is not empty, or that a writer has created again, stays.
        with contextlib.suppress(OSError):
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove those objects that exist, and directories that they leave empty."""
        list(parallel_map(self.delete, keys, PARALLEL_DELETES))

    def size(self, key: str) -> int | None:
        """Return the object's bytes, or None if it does not exist."""
        status = _status(self.root / key)
        return status.st_size if status and stat.S_ISREG(status.st_mode) else None

    def sweep_uploads(self, older_than_s: float) -> int:
        """Remove drafts of dead writers that are older than this; return how many."""
        removed = 0
        for path in self._files(self.root):
            status = _status(path) if path.name.startswith(DRAFT_PREFIX) else None
            if status and time.time() - status.st_mtime > older_than_s:
                self.delete(path.relative_to(self.root).as_posix())
                removed += 1
        return removed

    def _files(self, folder: Path) -> Iterator[Path]:
        """Yield all files below a directory."""
        for directory, _, names in os.walk(folder, onerror=self._raise_unless_absent):
            yield from (Path(directory, name) for name in names)

    def _raise_unless_absent(self, error: OSError) -> None:
        # A directory that does not exist holds nothing; neither does one below an object.
        if isinstance(error, NotADirectoryError) and not self.root.is_dir():
            raise _not_a_directory(self.root) from error
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise _read_error(error, Path(str(error.filename))) from error


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _read_error(error, path) from error


def _open_draft(draft: Path) -> FileIO:
    """Open a new file; a concurrent ``delete`` may remove its empty directory before."""
    for _ in range(OPEN_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            make_folder(draft.parent)
            return FileIO(draft, "xb")
    return FileIO(draft, "xb")


def _not_a_directory(root: Path) -> NoInputError:
    return NoInputError(f"not a directory: {root}; correct the URI")


def _read_error(error: OSError, path: Path) -> DLRMError:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NoInputError(f"object not found: {path}")
    if isinstance(error, PermissionError):
        return NoPermissionError(f"cannot read {path}: {error.strerror}; grant this user read access")
    return StoreUnavailableError(f"cannot read {path}: {error.strerror or error}")


def _raise_write_error(error: OSError, path: Path, size: int) -> NoReturn:
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        raise NoPermissionError(f"cannot write {path}: {error.strerror}; grant this user write access") from error
    if isinstance(error, NotADirectoryError | FileExistsError):
        raise NoInputError(f"cannot write {path}: a part of its path is a file") from error
    if error.errno in FULL or error.errno == errno.EIO:
        raise_device(error, path, size)
    raise StoreUnavailableError(f"cannot write {path}: {error.strerror or error}") from error
