"""URIs of input files: plain paths, ``file:///`` URIs, folders and glob patterns, to files that can be read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath

from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError
from dlrm_api.objects import file_path

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
