"""Find the files and objects that URIs, directories and patterns of training data stand for, and note what they don't.

Each file is read once, however many names it has. The data of table formats is refused here: only their metadata says
which files and rows count (``delta`` and ``iceberg`` read it).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tenacity import retry, stop_after_delay

from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError
from dlrm_api.fields import S3Spec, file_path, is_s3
from dlrm_api.names import Env
from dlrm_stores.base import FieldNames, ObjectInfo, ObjectStore, StoreOptions
from dlrm_stores.data_files import BACKOFF, RETRIED, SAID, DataFile, LocalFile, S3Object, TableColumns
from dlrm_stores.file import FileStore

if TYPE_CHECKING:
    from dlrm_stores.s3 import S3Store

ANY_DEPTH = "**"
FIELDS = FieldNames(
    uri="data.train.uris and data.eval.uris",
    service="spec.data.s3",
    credentials=(
        f"spec.data.credentialsSecret in a cluster, elsewhere {Env.DATA_CREDENTIALS_DIR} to a folder with accessKeyId "
        "and secretAccessKey"
    ),
)
LIST_RETRY_DEADLINE_S = 60.0
MAX_PROBED = 1_000
"""Keys of a directory above a URI's that are looked at: one page of a listing."""
TABLE_FORMATS = {"Delta": ("_delta_log", ""), "Hudi": (".hoodie", ""), "Iceberg": ("metadata", ".metadata.json")}
"""The directory of a table's metadata, and how a name in it ends: other directories are called ``metadata`` too."""
_MAGIC = re.compile(r"[*?\[]")
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
_SET = re.compile(r"\[!?[^\]]+\]")
_PATTERNS = {"*": r"[^/]*", "?": r"[^/]"}
_FOLDERS = r"(?:(?:[^/._][^/]*|_[^/]*=[^/]*)/)*"
"""Any directories below but hidden ones."""


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Name a file or directory that a URI does not stand for, and say why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class TableVersion:
    """Name the version of a table that is read: of Delta its number, of Iceberg the snapshot's id."""

    uri: str
    version: int
    newest: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """Hold the files that URIs stand for, sorted by path, and what was left out."""

    files: tuple[DataFile, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    tables: tuple[TableVersion, ...] = ()
    """Of a table format."""


class Places:
    """Reach files and objects by their whole names, as the metadata of tables gives them."""

    def __init__(self, s3: S3Spec, credentials_dir: Path | None) -> None:
        self._options = StoreOptions(s3=s3, credentials_dir=credentials_dir, fields=FIELDS)
        self._buckets: dict[str, S3Store] = {}

    def bucket(self, name: str) -> S3Store:
        """Return the store of a bucket's keys."""
        # boto3 takes most of a second to load, and local data needs none.
        from dlrm_stores.s3 import S3Store

        return self._buckets.setdefault(name, S3Store(name, "", self._options))

    def store(self, name: str) -> tuple[ObjectStore, str]:
        """Return the store that holds a path or ``s3://`` name, and its key there."""
        if not is_s3(name):
            return FileStore(Path("/")), name.lstrip("/")
        bucket, _, key = name.removeprefix("s3://").partition("/")
        return self.bucket(bucket), key

    def files(self, sizes: Mapping[str, int], table: str, columns: TableColumns) -> list[DataFile]:
        """Return the files with these names and sizes (in bytes), which the metadata of a table gives.

        Raises:
            NoInputError: one is gone.
            NoPermissionError: one cannot be read.
            BadDataError: one has another size.
        """
        found: dict[str, DataFile] = {}
        for bucket in {name.split("/")[2] for name in sizes if is_s3(name)}:
            keys = [name.removeprefix(f"s3://{bucket}/") for name in sizes if name.startswith(f"s3://{bucket}/")]
            folder = os.path.commonpath([key.rpartition("/")[0] for key in keys])
            store = self.bucket(bucket)
            found |= {
                f"s3://{bucket}/{item.key}": S3Object(store, bucket, item) for item in list_objects(store, folder)
            }
        for name in sizes:
            if not is_s3(name) and os.path.lexists(name):
                check_readable([Path(name)])
                found[name] = LocalFile(Path(name))
        for name, size in sizes.items():
            if name not in found:
                problem = "the table was moved, or its files were removed (vacuumed)"
                raise NoInputError(f"file not found: {name}, which the metadata of {table} names; {problem}")
            if found[name].size != size:
                expected = f"expected {size} bytes (metadata of {table}), got {found[name].size}"
                raise BadDataError(f"{name}: {expected}; restore the file")
            found[name].table = columns
        return [found[name] for name in sizes]


def plain_name(uri: str) -> str:
    """Return the path or ``s3://`` name that a URI in a table's metadata means.

    Raises NoInputError for other services.
    """
    scheme, mark, rest = uri.partition(":")
    if not mark or uri.startswith("/"):
        return uri
    if scheme == "file":
        return f"/{rest.lstrip('/')}"
    if scheme in ("s3", "s3a", "s3n"):
        return f"s3:{rest}"
    raise NoInputError(f"unsupported URI: {uri}; data is read from files and S3")


def table_folder(uri: str) -> str:
    """Return the name of the folder or file that a URI of ``spec.data`` stands for. Raises NoInputError."""
    return (uri if is_s3(uri) else str(local_path(uri).absolute())).rstrip("/")


def local_path(uri: str) -> Path:
    """Return the path of a plain path or ``file:///`` URI.

    Raises:
        NoInputError: the URI names another machine or scheme, or no valid file name.
        BadDataError: the path is not UTF-8.
    """
    if (path := file_path(uri)) is None:
        raise NoInputError(f"unsupported URI: {uri}; give a path, file:///path or s3://bucket/key")
    if "\0" in path:
        raise NoInputError(f"invalid path: {uri!r} contains a NUL")
    _check_utf8(path)
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise NoInputError(f"unknown user: {uri}; give the whole path") from error


def _check_utf8(path: str) -> None:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise BadDataError(f"the name of {shown} is not UTF-8; rename the file") from error


def is_hidden(name: str) -> bool:
    """Return whether a directory's URI skips a name: hidden files, and those private to writers.

    As in Hive and Spark, ``_day=1`` is a partition.
    """
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


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


def find_data_files(uris: Sequence[str], suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None) -> Listing:
    """List the files and objects that URIs name.

    Raises:
        NoInputError: a URI names nothing, a link leads nowhere, or a bucket is not found.
        NoPermissionError: a file, folder or bucket cannot be listed or read.
        BadDataError: a URI names a pipe or a device, a name is not UTF-8, or files belong to a table format.
        StoreUnavailableError: the S3 service does not answer.
    """
    paths, left_here = find_files([uri for uri in uris if not is_s3(uri)], suffixes)
    objects, left_there = find_objects([uri for uri in uris if is_s3(uri)], suffixes, s3, credentials_dir)
    files: list[DataFile] = [*map(LocalFile, paths), *objects]
    return Listing(files=tuple(sorted(files, key=lambda file: file.path)), left_out=(*left_here, *left_there))


def find_files(uris: Sequence[str], suffixes: Sequence[str]) -> tuple[list[Path], list[LeftOut]]:
    """List the files that local URIs name, each once, sorted by path, and what directories leave out.

    A directory stands for all files below it, also behind links, that end in one of ``suffixes``, in capitals or not;
    hidden ones are skipped. Raises as ``find_data_files`` does.
    """
    finder = _Finder(suffixes)
    try:
        found = {path for uri in uris for path in finder.expand(uri)}
    except PermissionError as error:
        raise NoPermissionError(f"permission denied: {error.filename}; change the directory's owner or mode") from error
    check_readable(found)
    once: dict[object, Path] = {}
    # A file keeps the name that is no link.
    for path in sorted(found, key=lambda path: (path != path.resolve(), path)):
        if (first := once.setdefault(_real(path), path)) != path:
            finder.leave_out(path, f"the same file as {first}")
    paths = sorted(once.values())
    folders = {path.parent for path in paths}
    for folder in folders.union(*(folder.parents for folder in folders)):
        for kind, (metadata, ending) in TABLE_FORMATS.items():
            if _has_metadata(folder, metadata, ending):
                raise _table_error(next(path for path in paths if path.is_relative_to(folder)), kind, folder)
    for path in paths:
        # Another URI names it.
        finder.left_out.pop(path, None)
    return paths, [LeftOut(name=str(path), reason=why) for path, why in sorted(finder.left_out.items())]


def check_readable(paths: Iterable[Path]) -> None:
    """Raise NoPermissionError if one of some files can't be read."""
    for path in paths:
        if not os.access(path, os.R_OK, effective_ids=True):
            raise NoPermissionError(f"permission denied: {path}; change its owner or mode")


def _real(path: Path) -> object:
    """Return what all names of a file have in common."""
    status = path.stat()
    return (status.st_dev, status.st_ino) if status.st_nlink > 1 else path.resolve()


def _table_error(files: object, kind: str, table: object) -> BadDataError:
    fix = "write the table's rows as plain Parquet to another folder"
    if kind != "Hudi":
        fix = f"set data.format: {kind.lower()} and the table's folder as URI, or {fix}"
    return BadDataError(
        f"{files} belongs to the {kind} table {table}: only the table's metadata says which files and rows count; {fix}"
    )


def _has_metadata(folder: Path, name: str, ending: str) -> bool:
    with contextlib.suppress(OSError):
        return any(each.name.endswith(ending) for each in (folder / name).iterdir())
    return False


class _Finder:
    """Expand local URIs, and note what they leave out."""

    def __init__(self, suffixes: Sequence[str]) -> None:
        self._suffixes = tuple(suffixes)
        self.left_out: dict[Path, str] = {}
        """The reason for each file or directory."""

    def leave_out(self, path: Path, reason: str) -> None:
        """Note that a file or directory is left out."""
        self.left_out.setdefault(path, reason)

    def expand(self, uri: str) -> list[Path]:
        """Return the files that one URI names."""
        path = local_path(uri)
        try:
            mode = path.stat().st_mode
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
        else:
            if stat.S_ISDIR(mode):
                return self._in_folder(path)
            if stat.S_ISREG(mode):
                return [path.absolute()]
            raise BadDataError(f"not a regular file: {path}; data is read in any order, so write it to a file")
        if not _MAGIC.search(str(path)):
            raise NoInputError(f"file not found: {path}; check data.train.uris and data.eval.uris")
        if not (matches := self._matching(path.absolute())):
            raise NoInputError(f"no file matches {path}; check data.train.uris and data.eval.uris")
        return matches

    def _in_folder(self, folder: Path) -> list[Path]:
        files = [
            path
            for each in self._tree([folder.absolute()])
            for path in self._files(each, "*", lambda path: has_suffix(path.name, self._suffixes))
        ]
        if not files:
            raise NoInputError(
                f"no file ends in {' or '.join(self._suffixes)}: {folder}; check the path, or use a pattern such as "
                f"{folder}/* for files with another suffix"
            )
        return files

    def _matching(self, pattern: Path) -> list[Path]:
        """Return the files that a pattern matches; see ``pattern_parts``."""
        *above, last = pattern_parts(str(pattern.relative_to(pattern.anchor)), str(pattern))
        folders = [Path(pattern.anchor)]
        for part in above:
            if part == ANY_DEPTH:
                folders = self._tree(folders)
            else:
                folders = [found for each in folders for found in _named(each, part) if found.is_dir()]
        return [file for folder in folders for file in self._files(folder, last, None)]

    def _tree(self, tops: Sequence[Path]) -> list[Path]:
        """Return directories and all below them but hidden ones, each once: links may form a loop."""
        found: dict[Path, Path] = {}
        waiting, linked = [*reversed(tops)], list[Path]()
        while waiting or linked:
            # Links come last: a directory that also has a name of its own here keeps it.
            folder = (waiting or linked).pop()
            if found.setdefault(folder.resolve(), folder) is not folder:
                continue
            for each in reversed([each for each in _named(folder, "*") if each.is_dir()]):
                if is_hidden(each.name):
                    self.leave_out(each, "hidden directory")
                else:
                    (linked if each.is_symlink() else waiting).append(each)
        return list(found.values())

    def _files(self, folder: Path, pattern: str, wanted: Callable[[Path], bool] | None) -> list[Path]:
        """Return a directory's files that match; ``wanted``: those of a directory's URI."""
        found = []
        for path in _named(folder, pattern):
            mode = _mode(path)
            if mode is not None and stat.S_ISDIR(mode):
                continue
            if wanted is not None and is_hidden(path.name):
                self.leave_out(path, "hidden file")
            elif wanted is not None and not wanted(path):
                self.leave_out(path, f"its name does not end in {' or '.join(self._suffixes)}")
            elif mode is None and path.is_symlink():
                if has_suffix(path.name, self._suffixes):
                    problem = f"file not found: {path}, a link to {path.readlink()}"
                    raise NoInputError(f"{problem}; fetch the file, or remove the link")
                self.leave_out(path, "a link that leads nowhere")
            elif mode is None:
                # Removed since it was listed.
                continue
            elif stat.S_ISREG(mode):
                found.append(path)
            else:
                self.leave_out(path, "not a regular file")
        return found


def _mode(path: Path) -> int | None:
    """Return what a path leads to; None if it is a link that leads nowhere."""
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def _named(folder: Path, pattern: str) -> list[Path]:
    """List what a directory holds by name, without the fragments that a file system check leaves there for root.

    Raises:
        BadDataError: a name is not UTF-8, which no record of a run could hold.
    """
    if not _MAGIC.search(pattern):
        return [folder / pattern] if os.path.lexists(folder / pattern) else []
    try:
        names = sorted(each.name for each in folder.iterdir())
    except PermissionError as error:
        raise NoPermissionError(f"permission denied: cannot list {folder}; change its owner or mode") from error
    chosen = [name for name in names if name != "lost+found" and fnmatchcase(name, pattern)]
    for name in chosen:
        _check_utf8(f"{folder}/{name}")
    return [folder / name for name in chosen]


def has_suffix(name: str, suffixes: Sequence[str]) -> bool:
    """Return whether a name ends in one of some suffixes, in capitals or not."""
    return name.lower().endswith(tuple(suffixes))


def pattern_parts(pattern: str, uri: str) -> list[str]:
    """Split a pattern without a leading slash. A part is one name, or ``**``: a directory and all below it.

    Raises:
        NoInputError: ``**`` is only a piece of a part; the message quotes ``uri``, as the user wrote it.
    """
    parts = pattern.split("/")
    if any(ANY_DEPTH in part and part != ANY_DEPTH for part in parts):
        raise NoInputError(f"invalid pattern: {uri}; ** must stand alone between slashes, as in **/*.tsv")
    return parts if parts[-1] != ANY_DEPTH else [*parts, "*"]


def find_objects(
    uris: Sequence[str], suffixes: Sequence[str], s3: S3Spec, credentials_dir: Path | None
) -> tuple[list[S3Object], list[LeftOut]]:
    """List the objects that ``s3://`` URIs name, each once, and what directories leave out.

    A URI that names no object is a pattern or a directory, which stands for all objects below it that end in one of
    ``suffixes``; hidden ones are skipped. Raises as ``find_data_files`` does.
    """
    places, found, left_out = Places(s3, credentials_dir), dict[str, S3Object](), dict[str, str]()
    for uri in uris:
        parts = urlsplit(uri, allow_fragments=False)
        bucket, key = parts.netloc, uri.removeprefix(f"s3://{parts.netloc}").lstrip("/")
        if not bucket:
            raise NoInputError(f"invalid URI: {uri}; expected s3://bucket/prefix")
        store = places.bucket(bucket)
        chosen, passed = _expand_s3(store, uri, key, suffixes)
        found |= {f"s3://{bucket}/{item.key}": S3Object(store, bucket, item) for item in chosen}
        left_out |= {f"s3://{bucket}/{name}": reason for name, reason in passed.items()}
    return [*found.values()], [LeftOut(name=name, reason=why) for name, why in left_out.items() if name not in found]


def _expand_s3(store: S3Store, uri: str, key: str, suffixes: Sequence[str]) -> tuple[list[ObjectInfo], dict[str, str]]:
    """Return the objects that a URI names, and the reason for each key or directory that it leaves out."""
    magic = _MAGIC.search(key)
    prefix = key[: magic.start()] if magic else key.rstrip("/")
    # A policy may allow to list a directory only by its name with the slash.
    tried = (
        [prefix]
        if magic or not prefix
        else [prefix, f"{prefix}/"]
        if has_suffix(key, suffixes)
        else [f"{prefix}/", prefix]
    )
    listed: list[ObjectInfo] = []
    for each in tried:
        # Keys that end in a slash are folder markers of S3 consoles.
        listed = listed or [item for item in list_objects(store, each) if not item.key.endswith("/")]
    passed: dict[str, str] = {}
    if chosen := [item for item in listed if item.key == key]:
        pass
    elif magic:
        wanted = _expression(key, uri)
        chosen = [item for item in listed if wanted.fullmatch(item.key)]
        problem = "no object matches"
    else:
        folder = f"{prefix}/" if prefix else ""
        below = [item for item in listed if item.key.startswith(folder)]
        reasons = [_reason_against(item.key[len(folder) :], suffixes) for item in below]
        chosen = [item for item, (reason, _) in zip(below, reasons, strict=True) if not reason]
        passed = {folder + name: reason for reason, name in reasons if reason}
        problem = f"object not found, and none below ends in {' or '.join(suffixes)}"
    if not chosen:
        raise NoInputError(f"{problem}: {uri}; check data.train.uris and data.eval.uris")
    _refuse_tables_of_s3(store, prefix, listed, chosen)
    return chosen, passed


def _reason_against(name: str, suffixes: Sequence[str]) -> tuple[str, str]:
    """Return why a directory's URI leaves a key below it out, empty if it does not, and what to call it."""
    parts = name.split("/")
    hidden = next((place for place, part in enumerate(parts) if is_hidden(part)), None)
    if hidden is not None:
        kind = "hidden file" if hidden == len(parts) - 1 else "hidden directory"
        return kind, "/".join(parts[: hidden + 1])
    return "" if has_suffix(name, suffixes) else f"its name does not end in {' or '.join(suffixes)}", name


def _refuse_tables_of_s3(
    store: S3Store, prefix: str, listed: Sequence[ObjectInfo], chosen: Sequence[ObjectInfo]
) -> None:
    """Refuse objects below a table's metadata directory, in what was listed or above it."""
    above = [prefix[:end] for end, letter in enumerate(prefix) if letter == "/"]
    for kind, (metadata, ending) in TABLE_FORMATS.items():
        inside = re.compile(rf"(|.*/){re.escape(metadata)}/.*{re.escape(ending)}")
        tables = {match[1] for item in listed if (match := inside.fullmatch(item.key))}
        for folder in ("", *(f"{each}/" for each in above)):
            with contextlib.suppress(NoPermissionError):
                keys = list_objects(store, f"{folder}{metadata}/", MAX_PROBED)
                tables |= {folder for item in keys if item.key.endswith(ending)}
        for item in chosen:
            if table := next((each for each in tables if item.key.startswith(each)), None):
                raise _table_error(f"s3://{store.bucket}/{item.key}", kind, f"s3://{store.bucket}/{table}")


@retry(retry=RETRIED, stop=stop_after_delay(LIST_RETRY_DEADLINE_S), wait=BACKOFF, before_sleep=SAID, reraise=True)
def list_objects(store: ObjectStore, prefix: str, limit: int | None = None) -> list[ObjectInfo]:
    """List the objects whose keys start with ``prefix``, by several tries. Raises as ``ObjectStore.list``."""
    return list(islice(store.list(prefix), limit))


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
