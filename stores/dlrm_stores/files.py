"""Object store over a local or mounted folder: temp file, sync, rename (or link, where nothing may be replaced).

Some file systems know no hard links: exFAT, many that FUSE mounts, some that a network serves.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NoReturn
from urllib.parse import quote

from dlrm_api.errors import DLRMError, NoInputError, NoPermissionError, StoreUnavailableError
from dlrm_api.process import FULL, raise_device
from dlrm_stores.base import Body, ObjectInfo, delete_each
from dlrm_stores.synced import make_folder, sync

logger = logging.getLogger(__name__)

DRAFT_PREFIX = ".draft-"
"""Start of the name of a file that is being written; never listed, never read."""
NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})
"""What file systems without hard links answer to one."""
OPEN_TRIES = 5


class FileStore:
    """Keys are paths below one folder.

    Args:
        root: the folder; made by the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._knows_conditions: bool | None = None
        """Whether the file system makes hard links; None before the first that it made or refused."""

    @property
    def uri(self) -> str:
        """Where the keys live, without a trailing slash."""
        return "file://" + quote(str(self.root).rstrip("/"))

    def check_folder(self) -> None:
        """Refuse a folder that somebody must have made before and that is not there.

        Raises:
            NoInputError: it is absent, or a file.
            NoPermissionError: it may not be looked for.
        """
        status = _status(self.root)
        if status is None:
            raise NoInputError(f"{self.root}: there is no such folder: mend the URI")
        if not stat.S_ISDIR(status.st_mode):
            raise _no_folder(self.root)

    def get(self, key: str) -> bytes:
        """The object's bytes."""
        try:
            return (self.root / key).read_bytes()
        except OSError as error:
            raise _read_error(error, self.root / key) from error

    def get_into(self, key: str, buffer: memoryview) -> int:
        """Fill a buffer with the object's first bytes; returns the object's size."""
        view, done = buffer.cast("B"), 0
        try:
            with (self.root / key).open("rb", buffering=0) as file:
                while count := file.readinto(view[done:]):
                    done += count
                return os.fstat(file.fileno()).st_size
        except OSError as error:
            raise _read_error(error, self.root / key) from error

    def put(self, key: str, body: Body, sha256: str | None = None) -> None:  # noqa: ARG002  nobody checks it
        """Write the object whole, replacing one that is there."""
        path = self.root / key
        with self._draft(path, body) as draft:
            draft.replace(path)

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Write the object unless one is there: a hard link never replaces. Where there are none, a rename does."""
        path = self.root / key
        with self._draft(path, body) as draft:
            written = self._link(draft, path)
            if written is None:
                draft.replace(path)
                self._knows_conditions = False
        return written is not False

    def _link(self, draft: Path, path: Path) -> bool | None:
        """Whether the draft became the object; None: the file system knows no hard links, and it did not.

        Where a draft could be written and is renamed, it was the link alone that was refused; what is refused once a
        link was made is refused for other reasons. That a file is there is said before links are thought of.
        """
        if self._knows_conditions is False:
            return None
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        except OSError as error:
            if self._knows_conditions is None and error.errno in NO_LINKS:
                logger.info("objects are written without conditions", extra={"store": self.uri})
                return None
            raise
        self._knows_conditions = True
        return True

    @contextlib.contextmanager
    def _draft(self, path: Path, body: Body) -> Iterator[Path]:
        """A synced file beside ``path``, to be renamed or linked in the block; removed where it was neither."""
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
        """Objects whose key starts with ``prefix``, in ascending order of their keys."""
        folder = self.root / prefix.rpartition("/")[0]
        found: list[ObjectInfo] = []
        for path in self._files(folder):
            key = path.relative_to(self.root).as_posix()
            if not path.name.startswith(DRAFT_PREFIX) and key.startswith(prefix) and (status := _status(path)):
                found.append(ObjectInfo(key=key, size=status.st_size, modified=status.st_mtime))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """Remove the object, and folders that it leaves empty."""
        path = self.root / key
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _raise_write_error(error, path, 0)
        with contextlib.suppress(OSError):  # not empty, or a writer made it anew: both fine
            for folder in path.parents:
                if folder == self.root:
                    break
                folder.rmdir()

    def delete_all(self, keys: Sequence[str]) -> None:
        """Remove objects, and folders that they leave empty."""
        delete_each(self.delete, keys)

    def size(self, key: str) -> int | None:
        """The object's bytes, None where there is none."""
        status = _status(self.root / key)
        return status.st_size if status and stat.S_ISREG(status.st_mode) else None

    def sweep_uploads(self, older_than_s: float) -> int:
        """Remove drafts of dead writers that are older than this."""
        removed = 0
        for path in self._files(self.root):
            status = _status(path) if path.name.startswith(DRAFT_PREFIX) else None
            if status and time.time() - status.st_mtime > older_than_s:
                self.delete(path.relative_to(self.root).as_posix())
                removed += 1
        return removed

    def _files(self, folder: Path) -> Iterator[Path]:
        """All files below a folder; what goes meanwhile may be among them or not."""
        for directory, _, names in os.walk(folder, onerror=self._raise_unless_absent):
            yield from (Path(directory, name) for name in names)

    def _raise_unless_absent(self, error: OSError) -> None:
        """A folder that is not there holds nothing, and neither does one below an object."""
        if isinstance(error, NotADirectoryError) and not self.root.is_dir():
            raise _no_folder(self.root) from error
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise _read_error(error, Path(str(error.filename))) from error


def _status(path: Path) -> os.stat_result | None:
    """None where it is not there, any more or at all."""
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _read_error(error, path) from error


def _open_draft(draft: Path) -> FileIO:
    """Open a new file, making its folders: a delete next door may remove an empty folder between the two."""
    for _ in range(OPEN_TRIES):
        with contextlib.suppress(FileNotFoundError):
            make_folder(draft.parent)
            return FileIO(draft, "xb")
    return FileIO(draft, "xb")


def _no_folder(root: Path) -> NoInputError:
    return NoInputError(f"{root}: is a file, not a folder, or below one: mend the URI")


def _read_error(error: OSError, path: Path) -> DLRMError:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return NoInputError(f"{path}: there is no such object")
    if isinstance(error, PermissionError):
        return NoPermissionError(f"{path}: cannot be read: {error.strerror}; give this user the right to read it")
    return StoreUnavailableError(f"{path}: cannot be read: {error.strerror or error}")


def _raise_write_error(error: OSError, path: Path, size: int) -> NoReturn:
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        raise NoPermissionError(f"{path}: cannot be written: {error.strerror}; give this user the right") from error
    if isinstance(error, NotADirectoryError | FileExistsError):
        raise NoInputError(f"{path}: cannot be written: a part of its path is a file, not a folder") from error
    if error.errno in FULL or error.errno == errno.EIO:
        raise_device(error, path, size)
    raise StoreUnavailableError(f"{path}: cannot be written: {error.strerror or error}") from error
