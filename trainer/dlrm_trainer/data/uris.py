"""URIs of input files: plain paths, ``file:///`` URIs, folders and glob patterns, to files that can be read."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePath
from urllib.parse import unquote, urlsplit

from dlrm_api.errors import BadDataError, NoInputError, NoPermissionError

_MAGIC = frozenset("*?[")


def local_path(uri: str) -> Path:
    """Path of a plain path or ``file:///`` URI.

    Raises:
        NoInputError: the URI names another machine or another scheme.
    """
    if "://" not in uri:
        return Path(uri).expanduser()
    parts = urlsplit(uri)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise NoInputError(f"{uri}: only files of this machine can be read: give a path or file:///path")
    return Path(unquote(parts.path))


def find_files(uris: Sequence[str], suffixes: Sequence[str]) -> list[Path]:
    """Files that the URIs name, each once, sorted by path.

    A folder stands for all files below it that end in one of ``suffixes``; hidden ones are passed over.

    Raises:
        NoInputError: a URI names nothing.
        NoPermissionError: a file or folder can't be read.
    """
    found = {path for uri in uris for path in _expand(uri, suffixes)}
    for path in found:
        if not os.access(path, os.R_OK, effective_ids=True):
            raise NoPermissionError(f"{path}: no permission to read it: change its owner or mode, or run as its owner")
    return sorted(found)


def relative_names(paths: Sequence[PurePath]) -> list[str]:
    """Names of files below the folder that they share: what stays the same when the folder is mounted elsewhere."""
    shared = PurePath(os.path.commonpath([path.parent for path in paths]))
    return [path.relative_to(shared).as_posix() for path in paths]


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
    except (FileNotFoundError, NotADirectoryError):
        mode = 0
    except PermissionError as error:
        raise NoPermissionError(f"{path}: no permission to look there: change the folder's owner or mode") from error
    if mode:
        return _in_folder(path, suffixes) if stat.S_ISDIR(mode) else [path.absolute()]
    if not _MAGIC & set(str(path)):
        raise NoInputError(f"{path}: no such file or folder: check data.train.uris and data.eval.uris")
    anchor = Path(path.anchor) if path.is_absolute() else Path.cwd()
    pattern = str(path.relative_to(path.anchor)) if path.is_absolute() else str(path)
    matches = [match for match in anchor.glob(pattern) if match.is_file()]
    if not matches:
        raise NoInputError(f"{path}: no file matches the pattern: check data.train.uris and data.eval.uris")
    return matches


def _in_folder(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    if not os.access(folder, os.R_OK | os.X_OK, effective_ids=True):
        raise NoPermissionError(f"{folder}: no permission to list it: change the folder's owner or mode")
    files = [
        path.absolute()
        for path in folder.rglob("*")
        if path.name.endswith(tuple(suffixes))
        and path.is_file()
        and not any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
    ]
    if not files:
        raise NoInputError(f"{folder}: the folder holds no file that ends in {' or '.join(suffixes)}: check the path")
    return files
