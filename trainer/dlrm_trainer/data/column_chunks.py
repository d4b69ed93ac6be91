"""Column chunks of one row group: columns of plain numbers are decoded here, several times faster than by pyarrow.

These are flat columns of 32 or 64-bit numbers, in pages that are plain or coded by a dictionary, as any writer makes
them by default. pyarrow decodes all others, and every chunk that is not as it should be: it alone says what is wrong.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dlrm_trainer.data.lookups import KEPT, Hashing
from dlrm_trainer.data.page_headers import (
    ABSENT,
    CHECKSUM,
    DICTIONARY,
    FIELDS,
    KIND,
    LEVELS,
    PACKED,
    REFUSED,
    SIZE,
    START,
    STORED,
    VALUES,
    Bytes,
    find_pages,
)
from dlrm_trainer.data.pages import PADDING, decode_pages, put_nan, uncompress_pages
from dlrm_trainer.data.scratch import scratch

ENCODINGS = frozenset({"PLAIN", "PLAIN_DICTIONARY", "RLE", "RLE_DICTIONARY"})
CODECS = frozenset({"UNCOMPRESSED", "SNAPPY", "GZIP", "ZSTD", "BROTLI"})
"""Not LZ4: there are two of that name."""
_NUMBERS: Mapping[tuple[str, bool], NDArray[Any]] = {
    ("INT32", True): np.empty(0, np.int32),
    ("INT32", False): np.empty(0, np.uint32),
    ("INT64", True): np.empty(0, np.int64),
    ("INT64", False): np.empty(0, np.uint64),
    ("FLOAT", False): np.empty(0, np.uint32),
    ("DOUBLE", False): np.empty(0, np.uint64),
}
"""Of the type of stored values, by the column's physical type and whether it is one of signed integers."""
LARGEST_HOLE = 8 << 10
"""Bytes between two chunks that are read rather than left out: a read of its own costs more."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """One column of one row group."""

    name: str
    start: int
    """In the file."""
    length: int
    """Bytes there."""
    size: int
    """Bytes of all pages when uncompressed, headers included, as the footer says."""
    rows: int
    codec: str
    optional: bool
    stored: NDArray[Any]
    """Empty, of the type of the values in the file; floating-point numbers as their bits."""
    kind: Any
    """The column's Arrow type."""

    def decode(self, body: Bytes, hashing: Hashing, values: NDArray[Any]) -> tuple[int, Bytes] | None:
        """Decode and hash the column.

        Args:
            body: the chunk and at least ``PADDING`` bytes after it.
            hashing: what becomes of each value.
            values: (rows,) filled in, any number where null.

        Returns:
            how many values are null, and, where some are, which are not, (rows,) of 0 and 1, which holds until this
            thread decodes another column. None: pyarrow must decode it.
        """
        table = scratch("pages", (self.rows + 1, FIELDS), np.int64)
        count = find_pages(body[: self.length], self.rows, table)
        pages = table[: max(0, count)]
        stated: list[list[int]] = pages.tolist()
        total = sum(page[SIZE] for page in stated)
        if count == REFUSED or total > self.size or not _intact(body, stated):
            return None
        plain = self._uncompressed(body, pages, total)
        entries = stated[0][VALUES] if stated[0][KIND] == DICTIONARY else 0
        if plain is None or entries > self.size:
            return None
        valid = scratch("valid", (1, self.rows), np.uint8)[0]
        codes = scratch("codes", (1, self.rows), np.uint32)[0]
        compact = scratch("compact", (1, self.rows + 1), values.dtype.type)[0]
        dictionary = scratch("dictionary", (1, entries), values.dtype.type)[0]
        nulls = decode_pages(
            plain, pages, self.optional, valid, codes, compact, dictionary, self.stored, hashing, values
        )
        return None if nulls == REFUSED else (nulls, valid)

    def array(self, body: Bytes) -> Any:
        """The column as an Arrow array, which holds until this thread makes another one; None: pyarrow must."""
        values = scratch("values", (1, self.rows), np.uint64 if self.stored.itemsize == 8 else np.uint32)[0]
        decoded = self.decode(body, KEPT, values)
        if decoded is None:
            return None
        nulls, valid = decoded
        width = self.kind.bit_width // 8  # integers of 8 and 16 bits are kept in 32
        narrow = values if width == values.itemsize else values.astype(f"u{width}")
        validity = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        return pa.Array.from_buffers(self.kind, self.rows, [validity, pa.py_buffer(narrow)], nulls)

    def _uncompressed(self, body: Bytes, pages: NDArray[np.int64], total: int) -> Bytes | None:
        """The pages' ``total`` bytes, whose places are put into ``pages``; None where they are not what is stated."""
        if self.codec == "UNCOMPRESSED":
            return body if (pages[:, STORED] == pages[:, SIZE]).all() else None
        plain: Bytes = scratch("plain", (1, total + PADDING), np.uint8)[0]
        if self.codec == "SNAPPY":
            return plain if uncompress_pages(body, pages, plain) else None
        codec, filled = pa.Codec(self.codec.lower()), 0
        for page in pages:
            start, stop, levels = int(page[START]), int(page[START] + page[STORED]), max(0, int(page[LEVELS]))
            given, out = body[start + levels : stop], plain[filled + levels : filled + int(page[SIZE])]
            plain[filled : filled + levels] = body[start : start + levels]
            if out.size and page[PACKED]:
                try:
                    given = np.frombuffer(codec.decompress(given, out.size), dtype=np.uint8)
                except (pa.ArrowException, OSError, ValueError):
                    return None
            if out.size and given.size != out.size:
                return None
            out[:] = given[: out.size]
            page[START] = filled
            filled += int(page[SIZE])
        return plain


class FlatColumns:
    """Columns of a file that may be decoded here."""

    def __init__(self, footer: Any, schema: Any, names: Sequence[str]) -> None:
        self._footer = footer
        wanted = set(names)
        leaves = {footer.schema.column(place).path: place for place in range(footer.num_columns)}
        self.kinds = {name: schema.field(name).type for name in names}
        """Arrow types of all columns."""
        self._found: dict[str, tuple[int, bool, Any]] = {}
        for name in wanted & leaves.keys():
            leaf, kind = footer.schema.column(leaves[name]), schema.field(name).type
            flat = leaf.max_repetition_level == 0 and leaf.max_definition_level <= 1
            number = pa.types.is_integer(kind) or pa.types.is_float32(kind) or pa.types.is_float64(kind)
            if flat and number and (leaf.physical_type, pa.types.is_signed_integer(kind)) in _NUMBERS:
                self._found[name] = (leaves[name], leaf.max_definition_level == 1, kind)

    def chunks(self, group: int) -> list[Chunk]:
        """Those of a row group, as they lie in the file."""
        held = self._footer.row_group(group)
        found = []
        for name, (leaf, optional, kind) in self._found.items():
            column = held.column(leaf)
            if column.compression not in CODECS or not ENCODINGS.issuperset(column.encodings):
                continue
            start = column.data_page_offset
            if column.has_dictionary_page:
                start = min(start, column.dictionary_page_offset)
            found.append(
                Chunk(
                    name=name,
                    start=start,
                    length=column.total_compressed_size,
                    size=column.total_uncompressed_size,
                    rows=held.num_rows,
                    codec=column.compression,
                    optional=optional,
                    stored=_NUMBERS[column.physical_type, pa.types.is_signed_integer(kind)],
                    kind=kind,
                )
            )
        return sorted(found, key=lambda chunk: chunk.start)


class RowGroup:
    """Columns of a row group by name; those that are decoded here one at a time, when they are asked for.

    Args:
        rows: of it.
        opened: the file.
        columns: of the file.
        group: number of the row group in it.
        decode: has pyarrow read and decode columns.
    """

    def __init__(
        self, rows: int, opened: BinaryIO, columns: FlatColumns, group: int, decode: Callable[[list[str]], pa.Table]
    ) -> None:
        chunks = columns.chunks(group)
        self.num_rows = rows
        self._kinds = columns.kinds
        self._decode = decode
        self._bodies = _bodies(opened, chunks)
        self._chunks = {chunk.name: chunk for chunk in chunks}
        others = [name for name in columns.kinds if name not in self._chunks]
        self._others = decode(others) if others else None

    def kind(self, name: str) -> Any:
        """A column's Arrow type."""
        return self._kinds[name]

    def __getitem__(self, name: str) -> Any:
        """A column as a chunked Arrow array; it holds until another one is asked for in this thread."""
        if name not in self._chunks:
            assert self._others is not None
            return self._others[name]
        array = self._chunks[name].array(self._bodies[name])
        return self._decode([name])[name] if array is None else pa.chunked_array([array])

    def put_floats(self, name: str, values: NDArray[np.float32]) -> int | None:
        """Put a column of float32 into ``values``, NaN where null; returns how many are. None: ask for the column."""
        if name not in self._chunks or self._kinds[name] != pa.float32():
            return None
        bits = values.view(np.uint32)
        decoded = self._chunks[name].decode(self._bodies[name], KEPT, bits)
        if decoded is None:
            return None
        nulls, valid = decoded
        if nulls:
            put_nan(valid, bits)
        return nulls

    def put_ids(self, name: str, hashing: Hashing, rows: NDArray[Any]) -> bool:
        """Put the rows of a column of ids, none of them null, into ``rows``. False: ask for the column."""
        if name not in self._chunks:
            return False
        decoded = self._chunks[name].decode(self._bodies[name], hashing, rows)
        return decoded is not None and not decoded[0]


def _intact(body: Bytes, pages: Sequence[Sequence[int]]) -> bool:
    """Whether pages have the checksums that they state."""
    return all(
        page[CHECKSUM] == ABSENT
        or zlib.crc32(body[page[START] : page[START] + page[STORED]].data) == page[CHECKSUM] & 0xFFFFFFFF
        for page in pages
    )


def _bodies(opened: BinaryIO, chunks: Sequence[Chunk]) -> dict[str, Bytes]:
    """Read the bytes of chunks, neighbours together; each is followed by ``PADDING`` bytes or more."""
    runs: list[list[Chunk]] = []
    for chunk in chunks:
        if runs and 0 <= chunk.start - _end(runs[-1]) <= LARGEST_HOLE:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    memory = scratch("body", (1, sum(_end(run) - run[0].start for run in runs) + PADDING), np.uint8)[0]
    bodies: dict[str, Bytes] = {}
    filled = 0
    for run in runs:
        size = _end(run) - run[0].start
        _read_all(opened, run[0].start, memory[filled : filled + size])
        bodies |= {chunk.name: memory[filled + chunk.start - run[0].start :] for chunk in run}
        filled += size
    return bodies


def _end(run: Sequence[Chunk]) -> int:
    return run[-1].start + run[-1].length


def _read_all(opened: BinaryIO, start: int, memory: Bytes) -> None:
    opened.seek(start)
    filled = 0
    while filled < memory.size:
        count = opened.readinto(memory[filled:].data)  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"the file ends {memory.size - filled} bytes before the row group does")
        filled += count
