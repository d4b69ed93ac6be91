"""Find where the rows of data files lie: each file is read once, and not again while its index is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from dlrm_api.fields import is_s3
from dlrm_checkpointer import DataIndex, file_identity
from dlrm_kernels.parsing import Ints
from dlrm_stores.base import ObjectInfo
from dlrm_stores.data_files import DataFile, LocalFile, S3Object, TableColumns
from dlrm_stores.locations import Places

MAX_BYTES = 1 << 62
"""More than any file has."""
PARALLEL_FILES = 32
"""Files, or parts, that a rank reads at once: each is a few requests of a service that may be far away."""
WAIT_S = 0.5
"""Longest wait between two calls of ``working``."""


@dataclass(frozen=True, kw_only=True)
class FileBlocks:
    """Hold where the rows of one file lie."""

    rows: Ints
    """(b,) of each block."""
    starts: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """(b,) first byte of each block; (0,) if the file itself says where they are."""


ReadBlocks = Callable[[DataFile, BinaryIO, int, int], FileBlocks]
"""Read where the rows lie that begin in some bytes of an open file. Raises BadDataError if the job cannot use it."""


@dataclass(frozen=True, kw_only=True)
class Indexer:
    """Read what a format needs to know of its files."""

    read_blocks: ReadBlocks
    checks: Any
    """What ``read_blocks`` checks files for, as JSON."""
    part_bytes: int = MAX_BYTES
    """Of a file that are read at a time, by any rank."""

    def reads(self, files: Sequence[DataFile]) -> str:
        """Return the digest of all that entries of an index depend on besides the files' bytes."""
        tables = {json.dumps([sorted(each.partitioned_by), dict(each.ids)]) for each in _tables(files)}
        return hashlib.sha256(json.dumps([self.checks, sorted(tables)]).encode()).hexdigest()

    def parts_of(self, sizes: Sequence[int] | Ints) -> tuple[Ints, list[tuple[int, int]]]:
        """Return the parts that (F,) files of some sizes are read in: their number (F,), and place and part of each."""
        counts = np.maximum(1, -(-np.array(sizes, np.int64) // self.part_bytes))
        return counts, [(place, part) for place, count in enumerate(counts.tolist()) for part in range(count)]

    def read(self, file: DataFile, part: int, reads: str) -> DataIndex:
        """Return the index of a part of a file, whose content does not change meanwhile.

        The first part tells what the whole file is.
        """
        content, digest, begin = "00" * 8, "00" * 32, part * self.part_bytes
        with file.open() if part else file.open_with_tail() as opened:
            blocks = self.read_blocks(file, opened, begin, min(begin + self.part_bytes, file.size))
            if not part:
                content = file.sample(opened)
        # What is read of an object is of the very one that was listed; a file may have changed.
        if isinstance(file, LocalFile):
            file.check()
            if not part:
                digest = file.digest = file.compute_digest()
        return DataIndex(
            reads=reads,
            files=identities([file]),
            contents=np.frombuffer(bytes.fromhex(content), np.uint8)[np.newaxis],
            digests=np.frombuffer(bytes.fromhex(digest), np.uint8)[np.newaxis],
            blocks=np.array([blocks.rows.size], np.int64),
            rows=blocks.rows,
            starts=blocks.starts,
        )


def _tables(files: Sequence[DataFile]) -> list[TableColumns]:
    return list({id(each.table): each.table for each in files if each.table}.values())


def identities(files: Sequence[DataFile]) -> NDArray[np.uint8]:
    """Return (F, 16) what tells files from others and from their other versions."""
    each = b"".join(file_identity(file.name, file.size, file.stamp) for file in files)
    return np.frombuffer(each, np.uint8).reshape(len(files), -1 if files else 16)


def index_files(indexer: Indexer, files: Sequence[DataFile], reads: str) -> DataIndex:
    """Read files, many at once, and return their index."""
    counts, parts = indexer.parts_of([file.size for file in files])
    return index_parts(indexer, [(files[place], part) for place, part in parts], reads).join_parts(counts)


def index_parts(
    indexer: Indexer,
    parts: Sequence[tuple[DataFile, int]],
    reads: str,
    working: Callable[[int], object] = lambda _done: None,
) -> DataIndex:
    """Read parts of files, many at once, and return their index, as if each were a file.

    ``working`` is called in this thread with the number of parts done, at least every ``WAIT_S``; what it raises ends
    the reading.
    """
    found, waiting = dict[int, DataIndex](), dict[Future[DataIndex], int]()
    coming = iter(enumerate(parts))
    pool = ThreadPoolExecutor(PARALLEL_FILES, "index")
    try:
        while True:
            for place, (file, part) in islice(coming, 2 * PARALLEL_FILES - len(waiting)):
                waiting[pool.submit(indexer.read, file, part, reads)] = place
            if not waiting:
                break
            for done in wait(waiting, WAIT_S, FIRST_COMPLETED).done:
                found[waiting.pop(done)] = done.result()
            working(len(found))
    finally:
        # After an error, or a signal, files that are being read are not waited for.
        pool.shutdown(wait=False, cancel_futures=True)
    return DataIndex.join([DataIndex.empty(reads), *(found[place] for place in range(len(parts)))])


@dataclass(frozen=True, kw_only=True)
class FileListing:
    """Describe listed files, in JSON types."""

    names: list[str]
    sizes: list[int]
    stamps: list[str]
    tables: list[tuple[list[str], dict[str, int]]]
    """Distinct ``TableColumns``: partition columns and ids."""
    of_table: list[int]
    """Each file's; -1 without one."""

    @classmethod
    def of(cls, files: Sequence[DataFile]) -> FileListing:
        """Describe files."""
        tables = _tables(files)
        numbers = {id(table): number for number, table in enumerate(tables)}
        return cls(
            names=[file.name for file in files],
            sizes=[file.size for file in files],
            stamps=[file.stamp for file in files],
            tables=[(sorted(table.partitioned_by), dict(table.ids)) for table in tables],
            of_table=[numbers.get(id(file.table), -1) for file in files],
        )


class ListedFiles(Sequence[DataFile]):
    """Hold the files that another rank listed; each is made when it is first used.

    So a rank has objects for its own share of thousands of files only.
    """

    def __init__(self, places: Places, tables: Sequence[TableColumns], arrays: Mapping[str, NDArray[Any]]) -> None:
        self._places, self._tables, self._arrays = places, tables, dict(arrays)
        self._made: dict[int, DataFile] = {}

    @classmethod
    def of(cls, listing: FileListing, places: Places) -> Self:
        """Hold the files of a listing; ``places`` reaches them."""
        tables = [TableColumns(partitioned_by=frozenset(columns), ids=ids) for columns, ids in listing.tables]
        arrays = {
            "names": np.array([name.encode() for name in listing.names]),
            "stamps": np.array([stamp.encode() for stamp in listing.stamps]),
            "sizes": np.array(listing.sizes, np.int64),
            "of_table": np.array(listing.of_table, np.int64),
            "digests": np.zeros((len(listing.names), 32), np.uint8),
        }
        return cls(places, tables, arrays)

    def __len__(self) -> int:
        return len(self._arrays["sizes"])

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            arrays = {name: array[place] for name, array in self._arrays.items()}
            return type(self)(self._places, self._tables, arrays)
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        place %= len(self)
        # Two threads may make the same file: the first one is kept.
        if place not in self._made:
            self._made.setdefault(place, self._make(**{name: array[place] for name, array in self._arrays.items()}))
        return self._made[place]

    def _make(self, names: bytes, stamps: bytes, sizes: int, of_table: int, digests: NDArray[np.uint8]) -> DataFile:
        name, stamp, size = names.decode(), stamps.decode(), int(sizes)
        file: DataFile
        if is_s3(name):
            bucket, _, key = name.removeprefix("s3://").partition("/")
            info = ObjectInfo(key=key, size=size, modified=0.0, etag=stamp)
            file = S3Object(self._places.bucket(bucket), bucket, info)
        else:
            file = LocalFile(Path(name), (size, int(stamp)))
            file.digest = digests.tobytes().hex()
        file.table = self._tables[of_table] if of_table >= 0 else None
        return file

    def set_digests(self, digests: NDArray[np.uint8]) -> None:
        """Set the digests of all files, (F, 32). File objects made before are discarded."""
        self._arrays["digests"] = digests
        self._made.clear()
