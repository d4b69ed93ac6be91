"""Store where the rows of data files lie, so that a restart reads none of the files for it.

An index is a copy of what the files say: whatever is wrong with one, it is built again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.chunk import load_arrays, save_arrays
from dlrm_checkpointer.format.manifest import refusing
from dlrm_stores import ObjectStore
from dlrm_stores.base import ObjectInfo

logger = logging.getLogger(__name__)

INDEXES = "indexes/"
KIND = "data-index"
IDENTITY_BYTES, CONTENT_BYTES, DIGEST_BYTES = 16, 8, 32
UNSIGNED = (np.uint8, np.uint16, np.uint32)
"""Types of numbers that are small enough, else int64."""


def file_identity(name: str, size: int, stamp: str) -> bytes:
    """Return what tells a listed file from others and from its other versions; ``stamp`` changes with the content."""
    return hashlib.sha256(f"{name}\x00{size}\x00{stamp}".encode()).digest()[:IDENTITY_BYTES]


@dataclass(frozen=True, kw_only=True)
class DataIndex:
    """Hold where the rows of F files lie: in B blocks, file by file. Equal files give equal bytes."""

    reads: str
    """SHA-256 of what the files were checked for; in hexadecimal."""
    files: NDArray[np.uint8]
    """(F, 16) ``file_identity`` of each."""
    contents: NDArray[np.uint8]
    """(F, 8) digests of samples."""
    digests: NDArray[np.uint8]
    """(F, 32) digests, 0 if unknown."""
    blocks: NDArray[np.int64]
    """(F,) blocks of each file."""
    rows: NDArray[np.int64]
    """(B,) rows of each block."""
    starts: NDArray[np.int64]
    """(B,) first byte of each block in its file; (0,) if the file itself says where they are."""

    @classmethod
    def empty(cls, reads: str) -> Self:
        """Return the index of no files."""
        widths = {"files": IDENTITY_BYTES, "contents": CONTENT_BYTES, "digests": DIGEST_BYTES}
        of_files = {name: np.empty((0, width), np.uint8) for name, width in widths.items()}
        none = np.empty(0, np.int64)
        return cls(reads=reads, **of_files, blocks=none, rows=none, starts=none)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 that names an index of these files, in hexadecimal."""
        return index_fingerprint(self.reads, self.files)

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """Return (F + 1,) the number of each file's first block, and B."""
        return np.concatenate(([0], np.cumsum(self.blocks)))

    def take(self, places: Sequence[int] | NDArray[np.int64]) -> Self:
        """Return the index of some of the files, in this order."""
        chosen = np.asarray(places, np.int64)
        counts = self.blocks[chosen]
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        of_blocks = np.repeat(self.firsts[chosen], counts) + within
        return type(self)(
            reads=self.reads,
            files=self.files[chosen],
            contents=self.contents[chosen],
            digests=self.digests[chosen],
            blocks=counts,
            rows=self.rows[of_blocks],
            starts=self.starts[of_blocks] if self.starts.size else self.starts,
        )

    @classmethod
    def join(cls, parts: Sequence[DataIndex]) -> Self:
        """Return the index of the files of all parts, of which there is at least one."""
        names = ("files", "contents", "digests", "blocks", "rows", "starts")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(reads=parts[0].reads, **joined)

    def join_parts(self, counts: NDArray[np.int64]) -> Self:
        """Return the index of F files, each of which ``counts`` (F,) entries stand for, at least one each.

        What the first of them says of its file holds.
        """
        firsts = np.cumsum(counts) - counts
        of_files = {name: getattr(self, name)[firsts] for name in ("files", "contents", "digests")}
        return replace(self, **of_files, blocks=np.add.reduceat(self.blocks, firsts) if firsts.size else firsts)

    def encode(self) -> memoryview:
        """Encode as one object."""
        arrays: dict[str, NDArray[Any]] = {"files": self.files, "contents": self.contents, "digests": self.digests}
        arrays |= {name: _small(getattr(self, name)) for name in ("blocks", "rows", "starts")}
        return save_arrays(arrays, KIND, {"reads": self.reads})

    @classmethod
    def decode(cls, body: bytes, key: str) -> Self:
        """Decode one object.

        Raises:
            SnapshotError: names the object and what is wrong with it.
        """
        meta, arrays = load_arrays(body, key, KIND)
        with refusing(key, "not an index of data files as the format says"):
            of_files: dict[str, Any] = {name: arrays[name] for name in ("files", "contents", "digests")}
            numbers: dict[str, Any] = {name: arrays[name].astype(np.int64) for name in ("blocks", "rows", "starts")}
            index = cls(reads=str(meta["reads"]), **of_files, **numbers)
            index._check()
        return index

    def _check(self) -> None:
        count, total = self.blocks.size, self.rows.size
        widths = {"files": IDENTITY_BYTES, "contents": CONTENT_BYTES, "digests": DIGEST_BYTES}
        for name, width in widths.items():
            array = getattr(self, name)
            if array.dtype != np.uint8 or array.shape != (count, width):
                raise ValueError(f"{name} is {array.dtype}{array.shape}, not uint8({count}, {width})")
        if any(array.ndim != 1 or (array < 0).any() for array in (self.blocks, self.rows, self.starts)):
            raise ValueError("expected numbers of at least 0 in one row")
        if int(self.blocks.sum()) != total or self.starts.size not in (0, total):
            raise ValueError(f"{int(self.blocks.sum())} blocks have {total} numbers of rows, {self.starts.size} starts")


def index_fingerprint(reads: str, files: NDArray[np.uint8]) -> str:
    """Return the SHA-256 of ``DataIndex.reads`` and (F, 16) identities of files, in hexadecimal."""
    return hashlib.sha256(reads.encode() + b"\x00" + files.tobytes()).hexdigest()


def _small(numbers: NDArray[np.int64]) -> NDArray[Any]:
    largest = int(numbers.max(initial=0))
    return numbers.astype(next((kind for kind in UNSIGNED if largest <= np.iinfo(kind).max), np.int64))


def index_prefix(fingerprint: str) -> str:
    """Return the prefix of the keys of indexes of these files."""
    return f"{INDEXES}{fingerprint}/"


def read_index(store: ObjectStore, reads: str, files: NDArray[np.uint8]) -> DataIndex | None:
    """Return the store's index of these files, else the newest one of others; the caller compares ``files``.

    A corrupt one is removed, so that another can take its place.
    """
    own = index_prefix(index_fingerprint(reads, files))

    def rank(info: ObjectInfo) -> tuple[bool, float]:
        return info.key.startswith(own), info.modified

    for info in sorted(store.list(INDEXES), key=rank, reverse=True):
        try:
            body = store.get(info.key)
            if hashlib.sha256(body).hexdigest() != _digest_of(info.key):
                raise SnapshotError(f"{store.uri}/{info.key}: corrupt: its SHA-256 is not its name")
            index = DataIndex.decode(body, f"{store.uri}/{info.key}")
        except NoInputError:
            # Another attempt's retention removed it.
            continue
        except SnapshotError as error:
            logger.warning("index of data files is unusable, building it again", extra={"error": str(error)})
            store.delete(info.key)
            continue
        if index.reads == reads:
            return index
    return None


def put_index(store: ObjectStore, index: DataIndex) -> None:
    """Write an index unless the store has it."""
    body = index.encode()
    store.put_if_absent(f"{index_prefix(index.fingerprint)}{hashlib.sha256(body).hexdigest()}.safetensors", body)


def _digest_of(key: str) -> str:
    return key.rpartition("/")[2].removesuffix(".safetensors")
