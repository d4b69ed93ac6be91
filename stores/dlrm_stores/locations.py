"""Turn URIs, directories and patterns of training data into a sorted list of files and objects.

Files are read at any offset and objects by ranges, and only while they are unchanged since they were found.
"""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.parse import urlsplit

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_random_exponential

from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError, StoreUnavailableError
from dlrm_api.fields import S3Spec, file_path, is_s3
from dlrm_api.names import Env
from dlrm_stores.base import FieldNames, ObjectInfo, StoreOptions

ANY_DEPTH = "**"
_MAGIC = re.compile(r"[*?\[]")
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


def local_path(uri: str) -> Path:
    """Return the path of a plain path or ``file:///`` URI.

    Raises:
        NoInputError: the URI names another machine or scheme, or no valid file name.
    """
    if (path := file_path(uri)) is None:
        raise NoInputError(f"unsupported URI: {uri}; give a path, file:///path or s3://bucket/key")
    if "\0" in path:
        raise NoInputError(f"invalid path: {uri!r} contains a NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise NoInputError(f"unknown user: {uri}; give the whole path") from error


def find_files(uris: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """List the files that local URIs name, each once, sorted by path.

    A directory stands for all files below it, also behind links, that end in one of ``suffixes``; hidden ones are
    skipped. Raises as ``find_data_files`` does.
    """
    try:
        found = {path for uri in uris for path in _expand(uri, suffixes)}
    except PermissionError as error:
        raise NoPermissionError(f"permission denied: {error.filename}; change the directory's owner or mode") from error
    for path in found:
        if not os.access(path, os.R_OK, effective_ids=True):
            raise NoPermissionError(f"permission denied: {path}; change its owner or mode")
    return sorted(found)


def relative_names(paths: Sequence[PurePath]) -> list[str]:
    """Return names of files relative to their common directory, wherever that is mounted."""
    shared = PurePath(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(shared).as_posix() for path in paths]


def is_hidden(name: str) -> bool:
    """Return whether a directory's URI skips a name: hidden files, and those private to writers."""
    return name.startswith((".", "_"))


def read_text(path: Path) -> str:
    """Read a small text file.

    Raises:
        NoInputError: it is not found.
        NoPermissionError: it cannot be read.
        BadDataError: it is not UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoInputError(f"file not found: {path}") from error
    except PermissionError as error:
        raise NoPermissionError(f"permission denied: {path}; change its owner or mode") from error
    except UnicodeDecodeError as error:
        raise BadDataError(f"{path}: invalid UTF-8 at byte {error.start}; save the file as UTF-8") from error


def _expand(uri: str, suffixes: Sequence[str]) -> list[Path]:
    path = local_path(uri)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
    else:
        if stat.S_ISDIR(mode):
            return _in_folder(path, suffixes)
        if stat.S_ISREG(mode):
            return [path.absolute()]
        raise BadDataError(f"not a regular file: {path}; data is read in any order, so write it to a file")
    if not _MAGIC.search(str(path)):
        raise NoInputError(f"file not found: {path}; check data.train.uris and data.eval.uris")
    if not (matches := _matching(path.absolute())):
        raise NoInputError(f"no file matches {path}; check data.train.uris and data.eval.uris")
    return matches


def _in_folder(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    found = (file for each in _tree([folder.absolute()]) for file in _files(each, "*"))
    files = [file for file in found if file.name.endswith(tuple(suffixes)) and not is_hidden(file.name)]
    if not files:
        raise NoInputError(
            f"no file ends in {' or '.join(suffixes)}: {folder}; check the path, or use a pattern such as {folder}/* "
            "for files with another suffix"
        )
    return files


def _matching(pattern: Path) -> list[Path]:
    """Return the files that a pattern matches; see ``pattern_parts``."""
    *above, last = pattern_parts(str(pattern.relative_to(pattern.anchor)), str(pattern))
    folders = [Path(pattern.anchor)]
    for part in above:
        folders = _tree(folders) if part == ANY_DEPTH else [found for each in folders for found in _folders(each, part)]
    return [file for folder in folders for file in _files(folder, last)]


def pattern_parts(pattern: str, uri: str) -> list[str]:
    """Split a pattern without a leading slash. A part is one name, or ``**``: a directory and all below it.

    Raises:
        NoInputError: ``**`` is only a piece of a part; the message quotes ``uri``, as the user wrote it.
    """
    parts = pattern.split("/")
    if any(ANY_DEPTH in part and part != ANY_DEPTH for part in parts):
        raise NoInputError(f"invalid pattern: {uri}; ** must stand alone between slashes, as in **/*.tsv")
    return parts if parts[-1] != ANY_DEPTH else [*parts, "*"]


def _tree(tops: Sequence[Path]) -> list[Path]:
    """Return directories and all below them but hidden ones, each once: links may form a loop."""
    found: dict[Path, Path] = {}
    waiting, linked = [*reversed(tops)], list[Path]()
    while waiting or linked:
        # Links come last: a directory that also has a name of its own here keeps it.
        folder = (waiting or linked).pop()
        if found.setdefault(folder.resolve(), folder) is folder:
            below = [each for each in reversed(_folders(folder, "*")) if not is_hidden(each.name)]
            waiting += [each for each in below if not each.is_symlink()]
            linked += [each for each in below if each.is_symlink()]
    return list(found.values())


def _folders(folder: Path, pattern: str) -> list[Path]:
    return _named(folder, pattern, lambda each: each.is_dir())


def _files(folder: Path, pattern: str) -> list[Path]:
    return _named(folder, pattern, lambda each: each.is_file())


def _named(folder: Path, pattern: str, wanted: Callable[[Path | os.DirEntry[str]], bool]) -> list[Path]:
    if not _MAGIC.search(pattern):
        return [folder / pattern] if wanted(folder / pattern) else []
    listed = (each for each in _listed(folder) if fnmatchcase(each.name, pattern))
    return [folder / each.name for each in listed if wanted(Path(each.path) if each.is_symlink() else each)]


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """List a directory by name, without the fragments that a file system check leaves there for root."""
    try:
        with os.scandir(folder) as entries:
            return sorted((each for each in entries if each.name != "lost+found"), key=lambda each: each.name)
    except PermissionError as error:
        raise NoPermissionError(f"permission denied: cannot list {folder}; change its owner or mode") from error


CHANGED = "changed after this run found it; restore it, or start a new run on the new data"


class DataFile(ABC):
    """Read one file as it was when it was found."""

    name: str  # as users write it
    path: PurePath  # files are sorted by it
    size: int  # in bytes
    stamp: str
    """Changes with the content, as far as the store can tell."""

    @abstractmethod
    def check(self) -> None:
        """Check that it is still the same.

        Raises:
            NoInputError: it was removed.
            BadDataError: it was changed.
        """

    @abstractmethod
    def open(self) -> BinaryIO:
        """Open it for reads at any offset, which raise as ``check`` does."""


class LocalFile(DataFile):
    """Read a file of this machine.

    Raises:
        NoInputError: it was removed since it was found.
        NoPermissionError: it cannot be looked up.
    """

    def __init__(self, path: Path) -> None:
        self.path: Path = path
        self.name = str(path)
        self.size, self.stamp = self._look_up()

    def _look_up(self) -> tuple[int, str]:
        try:
            status = self.path.stat()
        except FileNotFoundError as error:
            raise NoInputError(f"file not found: {self.name}; it was removed after this run found it") from error
        except PermissionError as error:
            raise NoPermissionError(f"permission denied: {self.name}; change its owner or mode") from error
        return status.st_size, f"{status.st_size}\x00{status.st_mtime_ns}"

    def check(self) -> None:
        """Compare size and modification time with those at first."""
        size, stamp = self._look_up()
        if size < self.size:
            raise BadDataError(f"{self.name}: {CHANGED} (it shrank from {self.size} to {size} bytes)")
        if stamp != self.stamp:
            raise BadDataError(f"{self.name}: {CHANGED}")

    def open(self) -> BinaryIO:
        """Open it unbuffered."""
        return self.path.open("rb", buffering=0)


if TYPE_CHECKING:
    from dlrm_stores.s3 import S3Store

FIELDS = FieldNames(
    uri="data.train.uris and data.eval.uris",
    service="spec.data.s3",
    credentials=(
        f"spec.data.credentialsSecret in a cluster, elsewhere {Env.DATA_CREDENTIALS_DIR} to a folder with accessKeyId "
        "and secretAccessKey"
    ),
)
RETRY_DEADLINE_S = 300.0
"""Reads are retried this long while the service does not answer."""
LIST_RETRY_DEADLINE_S = 60.0
_UNAVAILABLE, _BACKOFF = retry_if_exception_type(StoreUnavailableError), wait_random_exponential(0.5, max=15)
_SET = re.compile(r"\[!?[^\]]+\]")
_PATTERNS = {"*": r"[^/]*", "?": r"[^/]"}
_FOLDERS = r"(?:[^/._][^/]*/)*"
"""Any directories below but hidden ones."""


class S3Object(DataFile):
    """Read one object as a listing showed it."""

    def __init__(self, store: S3Store, bucket: str, found: ObjectInfo) -> None:
        self._store, self._key, self._etag = store, found.key, found.etag
        self.path = PurePosixPath("/", bucket, found.key)
        self.name = f"s3://{bucket}/{found.key}"
        self.size = found.size
        self.stamp = f"{found.size}\x00{found.etag}"

    def check(self) -> None:
        """Read one byte of it, if it has any."""
        if self.size:
            self.read(0, 1)

    def open(self) -> BinaryIO:
        """Open it for reads by ranges."""
        return cast(BinaryIO, _Ranges(self.size, self.read))

    @retry(retry=_UNAVAILABLE, stop=stop_after_delay(RETRY_DEADLINE_S), wait=_BACKOFF, reraise=True)
    def read(self, start: int, length: int) -> bytes:
        """Read some bytes.

        Raises:
            NoInputError: it was removed.
            BadDataError: it was changed.
            NoPermissionError: the credentials do not allow it.
            StoreUnavailableError: the service did not answer until the deadline.
        """
        try:
            body = self._store.get_range_of(self._key, self._etag, start, length)
        except NoInputError as error:
            problem = f"object not found: {self.name}; it was removed after this run found it"
            raise NoInputError(f"{problem} ({error})") from error
        if body is None:
            raise BadDataError(f"{self.name}: {CHANGED} (its ETag is no longer {self._etag})")
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


def find_objects(
    uris: Sequence[str], suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None
) -> list[S3Object]:
    """List the objects that ``s3://`` URIs name, each once.

    A URI that names no object is a pattern or a directory, which stands for all objects below it that end in one of
    ``suffixes``; hidden ones are skipped. Raises as ``find_data_files`` does.
    """
    found = (item for uri in uris for item in _expand_s3(uri, suffixes, s3, credentials_dir))
    return list({item.name: item for item in found}.values())


def _expand_s3(uri: str, suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None) -> list[S3Object]:
    # boto3 takes most of a second to load, and local data needs none.
    from dlrm_stores.s3 import S3Store

    parts = urlsplit(uri, allow_fragments=False)
    bucket, key = parts.netloc, uri.removeprefix(f"s3://{parts.netloc}").lstrip("/")
    if not bucket:
        raise NoInputError(f"invalid URI: {uri}; expected s3://bucket/prefix")
    store = S3Store(bucket, "", StoreOptions(s3=s3, credentials_dir=credentials_dir, fields=FIELDS))
    magic = _MAGIC.search(key)
    prefix = key[: magic.start()] if magic else key.rstrip("/")
    # Keys that end in a slash are folder markers of S3 consoles.
    listed = [item for item in _list_objects(store, prefix) if not item.key.endswith("/")]
    if chosen := [item for item in listed if item.key == key]:
        return [S3Object(store, bucket, chosen[0])]
    if magic:
        wanted = _expression(key, uri)
        chosen = [item for item in listed if wanted.fullmatch(item.key)]
        problem = "no object matches"
    else:
        folder = f"{prefix}/" if prefix else ""
        chosen = [item for item in listed if item.key.startswith(folder) and _wanted(item.key[len(folder) :], suffixes)]
        problem = f"object not found, and none below ends in {' or '.join(suffixes)}"
    if not chosen:
        raise NoInputError(f"{problem}: {uri}; check data.train.uris and data.eval.uris")
    return [S3Object(store, bucket, item) for item in chosen]


@retry(retry=_UNAVAILABLE, stop=stop_after_delay(LIST_RETRY_DEADLINE_S), wait=_BACKOFF, reraise=True)
def _list_objects(store: S3Store, prefix: str) -> list[ObjectInfo]:
    return list(store.list(prefix))


def _wanted(name: str, suffixes: Sequence[str]) -> bool:
    return name.endswith(tuple(suffixes)) and not any(map(is_hidden, name.split("/")))


def _expression(pattern: str, uri: str) -> re.Pattern[str]:
    """Return a regular expression for a pattern, which means the same as for files. Raises NoInputError."""
    *above, last = pattern_parts(pattern, uri)
    folders = "".join(_FOLDERS if part == ANY_DEPTH else f"{_of_part(part)}/" for part in above)
    try:
        return re.compile(folders + _of_part(last))
    except re.error as error:
        raise NoInputError(f"invalid pattern: {uri}; {error.msg}") from error


def _of_part(part: str) -> str:
    return "".join(_PATTERNS.get(piece) or _of_piece(piece) for piece in re.split(rf"(\*|\?|{_SET.pattern})", part))


def _of_piece(piece: str) -> str:
    return piece.replace("\\", r"\\").replace("[!", "[^") if _SET.fullmatch(piece) else re.escape(piece)


def find_data_files(
    uris: Sequence[str], suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None
) -> list[DataFile]:
    """List the files and objects that URIs name, sorted by path.

    Raises:
        NoInputError: a URI names nothing, or its bucket is not found.
        NoPermissionError: a file, folder or bucket cannot be listed or read.
        BadDataError: a URI names a pipe or a device.
        StoreUnavailableError: the S3 service does not answer.
    """
    files: list[DataFile] = [LocalFile(path) for path in find_files([uri for uri in uris if not is_s3(uri)], suffixes)]
    files += find_objects([uri for uri in uris if is_s3(uri)], suffixes, s3, credentials_dir)
    return sorted(files, key=lambda file: file.path)
