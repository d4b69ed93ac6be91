"""Files and folders that outlive the machine: their bytes, and the names by which they are found."""

from __future__ import annotations

import errno
import os
from itertools import takewhile
from pathlib import Path


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are not there, and sync the names of all that were made."""
    made = list(takewhile(lambda each: not each.is_dir(), (folder, *folder.parents)))
    folder.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)


def sync(path: Path) -> None:
    """Have a file's bytes, or the names in a folder, reach the device; some file systems sync no folders."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def sync_all(folder: Path) -> None:
    """``sync`` a folder and all that is in it, at any depth."""
    for directory, _, names in os.walk(folder):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def write_synced(path: Path, text: str) -> None:
    """Write a file, to its last byte on the device."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_synced(draft: Path, path: Path) -> None:
    """Give a synced file its final name, in the same folder."""
    draft.replace(path)
    sync(path.parent)
