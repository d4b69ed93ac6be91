"""Read Criteo's text format: a label, 13 integers and 26 hexadecimal ids, separated by tabs.

An empty field is a missing value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_api.job import CRITEO_DENSE, CRITEO_SPARSE, DLRMJobSpec
from dlrm_checkpointer import DataIndex
from dlrm_kernels.parsing import (
    ID,
    INTEGER,
    LABEL,
    MAX_DECIMAL_DIGITS,
    MAX_HEX_DIGITS,
    UNUSED,
    Ints,
    find_newlines,
    parse_good_lines,
    parse_lines,
)
from dlrm_stores.data_files import CHANGED, DataFile, LocalFile
from dlrm_trainer.data.batch_builder import BatchBuilder, Fingerprint, RawRows, Shares, blocks_of
from dlrm_trainer.data.files import BlockCache, FileSet, SourceRequest
from dlrm_trainer.data.index import FileBlocks, Indexer

_NEWLINE = ord("\n")
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
"""First bytes of compressed files."""
CELL_BYTES = 1 << 20
"""Lines are found again in blocks of this size: an index of a terabyte has a million of them."""
_CHUNK_BYTES = 4 * CELL_BYTES
PART_BYTES = 256 * CELL_BYTES
"""Of a file that one rank, or thread, looks for lines in."""
REMOTE_CELLS = 4
"""Blocks of a remote file that are fetched by one request."""
_FIELDS = {
    LABEL: (r"[01]", "a label of 0 or 1"),
    INTEGER: (rf"(-?[0-9]{{1,{MAX_DECIMAL_DIGITS}}})?", f"an integer of at most {MAX_DECIMAL_DIGITS} digits"),
    ID: (rf"[0-9a-fA-F]{{0,{MAX_HEX_DIGITS}}}", f"an id of at most {MAX_HEX_DIGITS} hexadecimal digits"),
}
"""Pattern and description of a field by its role."""


def index_criteo(_spec: DLRMJobSpec) -> Indexer:
    """Return what finds the lines of text files."""
    return Indexer(read_blocks=find_lines, checks="criteo-tsv", part_bytes=PART_BYTES)


def count_reads(sizes: Ints, _cells: float, is_remote: bool) -> int:
    """Count the reads of files: one of each block of lines."""
    return int((-(-sizes // (CELL_BYTES * (REMOTE_CELLS if is_remote else 1)))).sum())


def find_lines(file: DataFile, opened: BinaryIO, begin: int, end: int) -> FileBlocks:
    """Count the lines that begin in each cell of bytes [begin, end) of an open file; cells without one are no blocks.

    Cells have ``CELL_BYTES``; ``begin`` is where one begins. The bytes are read once, in order. Raises BadDataError if
    the file is empty or compressed.
    """
    if file.size == 0:
        raise BadDataError(f"{file.name}: empty file; remove it from the URIs, or write it again")
    counts = np.zeros(-(-(end - begin) // CELL_BYTES), np.int64)
    starts, after = np.zeros_like(counts), np.empty(1, np.int64)
    # A line begins after a newline, and that may be the last byte of the cell before. The file's last byte begins none.
    opened.seek(max(0, begin - 1))
    for first in range(begin, end, _CHUNK_BYTES):
        origin, stop = max(0, first - 1), min(first + _CHUNK_BYTES, end)
        body = opened.read(stop - 1 - origin)
        if len(body) != stop - 1 - origin:
            raise BadDataError(f"{file.name}: {CHANGED}")
        if not first and (packed := next((name for mark, name in _COMPRESSED.items() if body.startswith(mark)), "")):
            raise BadDataError(
                f"{file.name}: compressed file ({packed}); decompress it, since lines are read in any order"
            )
        text = np.frombuffer(body, np.uint8)
        for cell in range(first, stop, CELL_BYTES):
            at, place = max(0, cell - 1), (cell - begin) // CELL_BYTES
            counts[place] = find_newlines(text[at - origin : cell + CELL_BYTES - 1 - origin], after) + (cell == 0)
            starts[place] = at + after[0] if cell else 0
    held = np.flatnonzero(counts)
    return FileBlocks(rows=counts[held], starts=starts[held])


def problem_of(text: bytes, names: tuple[str, ...], roles: NDArray[np.uint8], lenient: bool) -> str:
    """Describe what is wrong with a line that ``parse_lines`` refused, its newline excluded."""
    fields = [field.decode(errors="replace") for field in text.removesuffix(b"\r").split(b"\t")]
    if len(fields) > len(names) if lenient else len(fields) != len(names):
        problem = f"expected {len(names)} fields (label, I1 to I13, C1 to C26, separated by tabs), got {len(fields)}"
        if len(fields) > len(names):
            return problem
        return f"{problem}; set data.lenient: true to accept lines without trailing empty fields"
    for number, (name, role, field) in enumerate(zip(names, roles.tolist(), fields, strict=False), start=1):
        if role in _FIELDS and not re.fullmatch(_FIELDS[role][0], field):
            return f"invalid column {name} (field {number}): expected {_FIELDS[role][1]}, got {field[:40]!r}"
    raise AssertionError(f"a good line was refused: {text!r}")


SUFFIXES = (".tsv", ".txt")
COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_SPARSE)


@dataclass(frozen=True)
class _Lines:
    """Hold consecutive lines of one file."""

    text: NDArray[np.uint8]
    starts: Ints
    """(lines + 1,) of each line in the text, and one past the last newline, or past where it is missing."""

    @property
    def num_bytes(self) -> int:
        """Return the memory that they take."""
        return self.text.nbytes + self.starts.nbytes

    def spans(self, lines: Ints) -> tuple[Ints, Ints]:
        """Return first byte and end (newline excluded) of some lines in the text."""
        return self.starts[lines], self.starts[lines + 1] - 1


def open_criteo(request: SourceRequest) -> CriteoSource:
    """Open the text files of a split; see ``CriteoSource``."""
    model, data = request.spec.model, request.spec.data
    ids = [each.column for each in model.all_features()]
    return CriteoSource(
        request.files,
        request.index,
        model.dense_features,
        ids,
        data.lenient,
        cells=REMOTE_CELLS if request.is_remote else 1,
        budget_bytes=request.budget_bytes,
        threads=request.threads,
        marks_bad=request.marks_bad,
    )


class CriteoSource:
    """Give the lines of Criteo files in any order, read by blocks of ``cells`` blocks of the index.

    ``dense`` and ``ids`` are columns; ``lenient`` lines may lack trailing fields; ``marks_bad``: bad rows are marked
    and raise nothing.
    """

    hashed = False

    def __init__(
        self,
        files: Sequence[DataFile],
        index: DataIndex,
        dense: Sequence[str],
        ids: Sequence[str],
        lenient: bool,
        *,
        cells: int = 1,
        budget_bytes: int = 1 << 30,
        threads: int = 1,
        marks_bad: bool = False,
    ) -> None:
        self._files = FileSet(files, index)
        within = np.arange(index.rows.size) - np.repeat(index.firsts[:-1], index.blocks)
        kept = np.flatnonzero(within % cells == 0)
        self._starts = index.starts[kept]
        """(blocks,) first byte of each in its file."""
        self._file_of = np.repeat(np.arange(len(files)), index.blocks)[kept]
        self._bounds: Ints = np.append(self._files.blocks[kept], self._files.num_rows)
        self._dense = np.array([COLUMNS.index(name) for name in dense], dtype=np.int64)
        self._ids = np.array([COLUMNS.index(name) for name in ids], dtype=np.int64)
        self._roles = np.full(len(COLUMNS), UNUSED, dtype=np.uint8)
        self._roles[0], self._roles[self._dense], self._roles[self._ids] = LABEL, INTEGER, ID
        self._lenient, self._marks_bad = lenient, marks_bad
        self.num_samples = self._files.num_rows
        self._fetched: BlockCache[_Lines] = BlockCache(self.block, budget_bytes, threads)

    @property
    def fingerprint(self) -> Fingerprint:
        """Return names, sizes and line counts of the files, and the columns that are read."""
        columns = {"dense": [COLUMNS[place] for place in self._dense], "bags": [COLUMNS[place] for place in self._ids]}
        return {"format": "criteo-tsv", "files": self._files.description(), "columns": columns}

    @property
    def remade(self) -> int:
        """Return how many blocks of lines were fetched again because the budget was too small for them."""
        return self._fetched.remade

    def where(self, sample_id: int) -> str:
        """Return file and line number, as editors take them."""
        file, row = self._files.locate(sample_id)
        return f"{file.name}:{row + 1}"

    def rest(self) -> None:
        """Drop the fetched blocks."""
        self._fetched.clear()

    def close(self) -> None:
        """Drop the fetched blocks and end their threads."""
        self._fetched.close()

    def batches(self, slices: Sequence[Ints], ahead: Ints | None = None) -> Iterable[RawRows]:
        """Read and parse the lines of some batches; see ``RowSource``."""
        sizes = [each.size for each in slices]
        builder = BatchBuilder(sizes, self._dense.size, self._ids.size, wide=True, weighted=False)
        sample_ids = np.concatenate(slices)
        shares = Shares(sample_ids, self._bounds)
        if ahead is not None:
            self._fetched.plan([*shares.blocks, *blocks_of(ahead, self._bounds)])
        columns = self._dense, self._ids
        for number, rows, order in shares:
            block = self._fetched.take(number)
            begins, ends = block.spans(rows)
            lines = block.text, begins, ends, self._roles, self._lenient, columns, order, builder.numbers, builder.ids
            if self._marks_bad:
                parse_good_lines(*lines, builder.bad())
            elif (bad := parse_lines(*lines)) >= 0:
                raise BadDataError(self.problem(int(sample_ids[order[bad]])))
        return builder.batches()

    def problem(self, sample_id: int) -> str:
        """Return file, line, column and value of a bad line."""
        number = int(np.searchsorted(self._bounds, sample_id, side="right")) - 1
        block = self._fetched.take(number)
        [begin], [end] = block.spans(np.array([sample_id - self._bounds[number]]))
        text = block.text[begin:end].tobytes()
        return f"{self.where(sample_id)}: {problem_of(text, COLUMNS, self._roles, self._lenient)}"

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of all files."""
        return int(self._starts.size)

    def block(self, number: int) -> _Lines:
        """Read a block's lines."""
        place, first = int(self._file_of[number]), int(self._starts[number])
        file, rows = self._files.files[place], int(self._bounds[number + 1] - self._bounds[number])
        is_last = number + 1 == self._file_of.size or self._file_of[number + 1] != place
        stop = file.size if is_last else int(self._starts[number + 1])
        with file.open() as opened:
            opened.seek(first)
            body = opened.read(stop - first)
        # What is read of an object is of the very one that was listed; a file may have changed.
        if isinstance(file, LocalFile):
            file.check()
        text = np.frombuffer(body, np.uint8)
        starts = np.zeros(rows + 1, np.int64)
        found = find_newlines(text, starts[1:])
        if text[-1] != _NEWLINE:
            # Only the last line of a file may lack its newline.
            starts[found + 1 :] = text.size + 1
            found += 1
        if found != rows:
            raise BadDataError(f"{file.name}: {CHANGED}")
        return _Lines(text, starts)
