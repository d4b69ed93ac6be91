"""URIs of input files: plain paths, ``file:///`` URIs, folders and glob patterns, to files that can be read."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast
from urllib.parse import urlsplit

from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_random_exponential

from dlrm_api.errors import (
    BadDataError,
    NoInputError,
    NoPermissionError,
    StoreUnavailableError,
)
from dlrm_api.names import Env
from dlrm_api.objects import S3Spec, file_path, is_s3
from dlrm_stores.base import FieldNames, ObjectInfo, StoreOptions

ANY_DEPTH = "**"
_MAGIC = frozenset("*?[")
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


def local_path(uri: str) -> Path:
    """Path of a plain path or ``file:///`` URI.

    Raises:
        NoInputError: the URI names another machine or another scheme, or what no file can be called.
    """
    path = file_path(uri)
    if path is None:
        raise NoInputError(f"{uri}: only files of this machine can be read: give a path or file:///path")
    if "\0" in path:
        raise NoInputError(f"{uri!r}: no name of a file: it holds a NUL")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise NoInputError(f"{uri}: no such user: give the whole path") from error


def find_files(uris: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """Files that the URIs name, each once, sorted by path.

    A folder stands for all files below it, also behind links, that end in one of ``suffixes``; hidden ones are passed
    over.

    Raises:
        NoInputError: a URI names nothing.
        NoPermissionError: a file or folder can't be read.
        BadDataError: a URI names a pipe or a device.
    """
    try:
        found = {path for uri in uris for path in _expand(uri, suffixes)}
    except PermissionError as error:
        where = error.filename
        raise NoPermissionError(f"{where}: no permission to look there: change the folder's owner or mode") from error
    for path in found:
        if not os.access(path, os.R_OK, effective_ids=True):
            raise NoPermissionError(f"{path}: no permission to read it: change its owner or mode, or run as its owner")
    return sorted(found)


def relative_names(paths: Sequence[PurePath]) -> list[str]:
    """Names of files below the folder that they share: what stays the same when the folder is mounted elsewhere."""
    shared = PurePath(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(shared).as_posix() for path in paths]


def is_passed_over(name: str) -> bool:
    """Whether a folder's own URI leaves it out: it is hidden, or a writer's own."""
    return name.startswith((".", "_"))


def read_text(path: Path) -> str:
    """Content of a small text file.

    Raises:
        NoInputError: it is not there.
        NoPermissionError: it can't be read.
        BadDataError: it is no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise NoInputError(f"{path}: no such file: check the path") from error
    except PermissionError as error:
        raise NoPermissionError(f"{path}: no permission to read it: change its owner or mode") from error
    except UnicodeDecodeError as error:
        raise BadDataError(f"{path}: not a text file (byte {error.start} is no UTF-8)") from error


def _expand(uri: str, suffixes: Sequence[str]) -> list[Path]:
    path = local_path(uri)
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        mode = 0
    if stat.S_ISDIR(mode):
        return _in_folder(path, suffixes)
    if mode and not stat.S_ISREG(mode):
        raise BadDataError(f"{path}: a pipe or device: data is read in any order, so write it to a file")
    if mode:
        return [path.absolute()]
    if not _MAGIC & set(str(path)):
        raise NoInputError(f"{path}: no such file or folder: check data.train.uris and data.eval.uris")
    matches = _matching(path.absolute())
    if not matches:
        raise NoInputError(f"{path}: no file matches the pattern: check data.train.uris and data.eval.uris")
    return matches


def _in_folder(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    found = (file for each in _tree([folder.absolute()]) for file in _files(each, "*"))
    files = [file for file in found if file.name.endswith(tuple(suffixes)) and not is_passed_over(file.name)]
    if not files:
        raise NoInputError(
            f"{folder}: the folder holds no file that ends in {' or '.join(suffixes)}: check the path, or name files "
            f"without that ending by a pattern, as {folder}/*"
        )
    return files


def _matching(pattern: Path) -> list[Path]:
    """Files that a pattern matches; see ``pattern_parts``."""
    *above, last = pattern_parts(str(pattern.relative_to(pattern.anchor)), str(pattern))
    folders = [Path(pattern.anchor)]
    for part in above:
        folders = _tree(folders) if part == ANY_DEPTH else [found for each in folders for found in _folders(each, part)]
    return [file for folder in folders for file in _files(folder, last)]


def pattern_parts(pattern: str, uri: str) -> list[str]:
    """What stands between a pattern's slashes: ``**`` for a folder and all below it, else a pattern of one name.

    Args:
        pattern: without a slash in front.
        uri: as users wrote it, for messages.

    Raises:
        NoInputError: ``**`` is only a piece of a part.
    """
    parts = pattern.split("/")
    if any(ANY_DEPTH in part and part != ANY_DEPTH for part in parts):
        raise NoInputError(f"{uri}: ** must stand alone between slashes: write **/*NAME for files at any depth")
    return parts if parts[-1] != ANY_DEPTH else [*parts, "*"]


def _tree(tops: Sequence[Path]) -> list[Path]:
    """Folders and all below them, hidden ones passed over; each once, as links may lead to it again, or to a loop."""
    found: dict[Path, Path] = {}
    waiting, linked = [*reversed(tops)], list[Path]()
    while waiting or linked:
        folder = (waiting or linked).pop()  # behind links last: what has a name of its own here keeps it
        if found.setdefault(folder.resolve(), folder) is folder:
            below = [each for each in reversed(_folders(folder, "*")) if not is_passed_over(each.name)]
            waiting += [each for each in below if not each.is_symlink()]
            linked += [each for each in below if each.is_symlink()]
    return list(found.values())


def _folders(folder: Path, pattern: str) -> list[Path]:
    if not _MAGIC & set(pattern):
        return [folder / pattern] if (folder / pattern).is_dir() else []
    return [folder / each.name for each in _listed(folder) if fnmatchcase(each.name, pattern) and _is_folder(each)]


def _files(folder: Path, pattern: str) -> list[Path]:
    if not _MAGIC & set(pattern):
        return [folder / pattern] if (folder / pattern).is_file() else []
    return [folder / each.name for each in _listed(folder) if fnmatchcase(each.name, pattern) and _is_file(each)]


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder, by name; its entries know without asking whether they are folders, files or links.

    What a volume's repair has found is nobody's data, and root's alone.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted((each for each in entries if each.name != "lost+found"), key=lambda each: each.name)
    except PermissionError as error:
        raise NoPermissionError(f"{folder}: no permission to list it: change the folder's owner or mode") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return Path(entry.path).is_dir() if entry.is_symlink() else entry.is_dir()


def _is_file(entry: os.DirEntry[str]) -> bool:
    return Path(entry.path).is_file() if entry.is_symlink() else entry.is_file()


CHANGED = "was changed after this run began to read it: put it back, or start the run anew on the new data"


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
PATIENCE_S = 300.0
"""How long a service that does not answer is asked again."""
_S3_MAGIC = re.compile(r"[*?\[]")
_SET = re.compile(r"\[!?[^\]]+\]")
_PATTERNS = {"*": r"[^/]*", "?": r"[^/]"}
_FOLDERS = r"(?:[^/._][^/]*/)*"
"""Any below, hidden ones passed over."""


class S3Object:
    """One object, as a listing showed it."""

    def __init__(self, store: S3Store, bucket: str, found: ObjectInfo) -> None:
        self._store, self._key, self._etag = store, found.key, found.etag
        self.path = PurePosixPath("/", bucket, found.key)
        self.name = f"s3://{bucket}/{found.key}"
        self.size = found.size
        self.stamp = f"{found.size}\x00{found.etag}"

    def check(self) -> None:
        """Ask for one byte of it, if it has any."""
        if self.size:
            self.read(0, 1)

    def open(self) -> BinaryIO:
        """To be read by ranges."""
        return cast(BinaryIO, _Ranges(self.size, self.read))

    @retry(
        retry=retry_if_exception_type(StoreUnavailableError),
        stop=stop_after_delay(PATIENCE_S),
        wait=wait_random_exponential(0.5, max=15),
        reraise=True,
    )
    def read(self, start: int, length: int) -> bytes:
        """Some bytes.

        Raises:
            NoInputError: it is gone.
            BadDataError: it was changed.
            NoPermissionError: it may not be read, or not any longer.
            StoreUnavailableError: the service did not answer for a long time.
        """
        try:
            body = self._store.get_range_of(self._key, self._etag, start, length)
        except NoInputError as error:
            raise NoInputError(f"{self.name}: it was there before and is gone: put it back ({error})") from error
        if body is None:
            raise BadDataError(f"{self.name}: its ETag is not {self._etag} any longer: it {CHANGED}")
        return body


class _Ranges(io.RawIOBase):
    """A file that is read by ranges."""

    def __init__(self, size: int, read: Callable[[int, int], bytes]) -> None:
        self._size, self._read, self._at = size, read, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

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
    """Objects that ``s3://`` URIs name, each once.

    A URI that names no object is a pattern, or a folder: that stands for all objects below it that end in one of
    ``suffixes``; hidden ones are passed over.

    Raises:
        NoInputError: a URI names nothing, or its bucket is not there.
        NoPermissionError: the credentials don't allow to list or to read.
        StoreUnavailableError: the service does not answer.
    """
    found: dict[str, S3Object] = {}
    for uri in uris:
        for item in _expand_s3(uri, suffixes, s3, credentials_dir):
            found.setdefault(item.name, item)
    return list(found.values())


def _expand_s3(uri: str, suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None) -> list[S3Object]:
    from dlrm_stores.s3 import S3Store  # boto3 takes most of a second to load

    parts = urlsplit(uri, allow_fragments=False)
    bucket, key = parts.netloc, uri.removeprefix(f"s3://{parts.netloc}").lstrip("/")
    if not bucket:
        raise NoInputError(f"{uri}: no bucket: write s3://bucket/prefix")
    store = S3Store(bucket, "", StoreOptions(s3=s3, credentials_dir=credentials_dir, fields=FIELDS))
    magic = _S3_MAGIC.search(key)
    prefix = key[: magic.start()] if magic else key.rstrip("/")
    listed = [
        item for item in _list_objects(store, prefix) if not item.key.endswith("/")
    ]  # what marks a folder is no file
    if chosen := [item for item in listed if item.key == key]:
        return [S3Object(store, bucket, chosen[0])]
    if magic:
        wanted = _expression(key, uri)
        chosen = [item for item in listed if wanted.fullmatch(item.key)]
        problem = "no object matches the pattern"
    else:
        folder = f"{prefix}/" if prefix else ""
        chosen = [item for item in listed if item.key.startswith(folder) and _wanted(item.key[len(folder) :], suffixes)]
        problem = f"no such object, and below it is none that ends in {' or '.join(suffixes)}"
    if not chosen:
        raise NoInputError(f"{uri}: {problem}: check data.train.uris and data.eval.uris")
    return [S3Object(store, bucket, item) for item in chosen]


@retry(
    retry=retry_if_exception_type(StoreUnavailableError),
    stop=stop_after_delay(60),
    wait=wait_random_exponential(0.5, max=15),
    reraise=True,
)
def _list_objects(store: S3Store, prefix: str) -> list[ObjectInfo]:
    return list(store.list(prefix))


def _wanted(name: str, suffixes: Sequence[str]) -> bool:
    return name.endswith(tuple(suffixes)) and not any(map(is_passed_over, name.split("/")))


def _expression(pattern: str, uri: str) -> re.Pattern[str]:
    """A regular expression for a pattern, which means what it does of files.

    Raises:
        NoInputError: brackets hold no set of characters, or ``**`` is only a piece of a part.
    """
    *above, last = pattern_parts(pattern, uri)
    folders = "".join(_FOLDERS if part == ANY_DEPTH else f"{_of_part(part)}/" for part in above)
    try:
        return re.compile(folders + _of_part(last))
    except re.error as error:
        raise NoInputError(f"{uri}: no pattern ({error.msg}): mend what stands in its brackets") from error


def _of_part(part: str) -> str:
    return "".join(_PATTERNS.get(piece) or _of_piece(piece) for piece in re.split(rf"(\*|\?|{_SET.pattern})", part))


def _of_piece(piece: str) -> str:
    return piece.replace("\\", r"\\").replace("[!", "[^") if _SET.fullmatch(piece) else re.escape(piece)


def find_data_files(
    uris: Sequence[str], suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None
) -> list[DataFile]:
    """List the files and objects that URIs name, sorted by path.

    Raises:
        NoInputError: a URI names nothing.
        NoPermissionError: a file, folder or bucket can't be read.
        BadDataError: a URI names a pipe or a device.
        StoreUnavailableError: the S3 service does not answer.
    """
    files: list[DataFile] = [LocalFile(path) for path in find_files([uri for uri in uris if not is_s3(uri)], suffixes)]
    files += find_objects([uri for uri in uris if is_s3(uri)], suffixes, s3, credentials_dir)
    return sorted(files, key=lambda file: file.path)
