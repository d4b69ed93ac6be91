"""Criteo's text format: a label, 13 integers and 26 hexadecimal ids, separated by tabs; an empty field is missing."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_api.job import CRITEO_DENSE, CRITEO_SPARSE
from dlrm_trainer.data.batch import Fingerprint, RawRows
from dlrm_trainer.data.blocks import BlockCache
from dlrm_trainer.data.files import DataFile, FileSet, LocalFile
from dlrm_trainer.data.line_index import line_starts, map_file
from dlrm_trainer.data.lines import ID, INTEGER, LABEL, UNUSED, parse_lines, problem_of
from dlrm_trainer.data.spots import Gathered, Ints, Spots, blocks_of, shares_of
from dlrm_trainer.limits import allow_open_files

SUFFIXES = (".tsv", ".txt")
COLUMNS = ("label", *CRITEO_DENSE, *CRITEO_SPARSE)

_TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""A process has a limit of open files, the machine too, and a process one of mappings."""
BLOCK_BYTES = 4 << 20
"""Of a file that is not on this machine, lines are fetched in blocks of about this."""


@dataclass(frozen=True)
class _Lines:
    """Some lines of one file that lie one after the other."""

    text: NDArray[np.uint8]
    starts: Ints
    """(lines + 1,) in the file."""
    offset: int
    """Where ``text`` starts in the file."""
    num_bytes: int
    """Memory that the text takes: none where it is mapped."""

    def spans(self, lines: Ints) -> tuple[Ints, Ints]:
        """First byte and end (newline excluded) of some lines in the text."""
        begins = self.starts[lines] - self.offset
        return begins, self.starts[lines + 1] - (self.offset + 1)


class CriteoSource:
    """Lines of Criteo files, in any order.

    Args:
        files: in order; those of this machine are mapped, others fetched by blocks of lines.
        dense: columns of dense values.
        ids: columns of the features' ids.
        lenient: whether lines may lack trailing fields.
        cache_folder: keeps where lines start.
        budget_bytes: of blocks of lines.
        threads: that fetch blocks ahead.

    Raises:
        BadDataError: a file is empty or compressed, or there are more than this process may have open.
    """

    hashed = False

    def __init__(
        self,
        files: Sequence[DataFile],
        dense: Sequence[str],
        ids: Sequence[str],
        lenient: bool,
        cache_folder: Path,
        budget_bytes: int = 1 << 30,
        threads: int = 1,
    ) -> None:
        allow_open_files()
        try:
            self._starts = [line_starts(file, cache_folder) for file in files]
            self._texts = [map_file(file.path) if isinstance(file, LocalFile) else None for file in files]
        except OSError as error:
            if error.errno not in _TOO_MANY:
                raise
            raise BadDataError(
                f"{files[0].name} and {len(files) - 1} more text files: {error.strerror} to have all of them open: "
                "join them into fewer, or raise the limit of open files (ulimit -n)"
            ) from error
        self._files = FileSet(files, [starts.size - 1 for starts in self._starts])
        self._dense = np.array([COLUMNS.index(name) for name in dense], dtype=np.int64)
        self._ids = np.array([COLUMNS.index(name) for name in ids], dtype=np.int64)
        self._roles = np.full(len(COLUMNS), UNUSED, dtype=np.uint8)
        self._roles[0], self._roles[self._dense], self._roles[self._ids] = LABEL, INTEGER, ID
        self._lenient = lenient
        self.num_samples = self._files.num_rows
        self._blocks = [
            (file, first) for file in range(len(files)) for first in _block_edges(self._starts[file], self._texts[file])
        ]
        firsts = [int(self._files.bounds[file]) + first for file, first in self._blocks]
        self._bounds: Ints = np.array([*firsts, self.num_samples], dtype=np.int64)
        self._fetched: BlockCache[_Lines] = BlockCache(self._fetch, budget_bytes, threads)

    @property
    def fingerprint(self) -> Fingerprint:
        """Names, sizes and line counts of the files, and which columns are read."""
        columns = {"dense": [COLUMNS[place] for place in self._dense], "bags": [COLUMNS[place] for place in self._ids]}
        return {"format": "criteo-tsv", "files": self._files.description(), "columns": columns}

    @property
    def remade(self) -> int:
        """Blocks of lines that were fetched again because the budget had no room for them."""
        return self._fetched.remade

    def where(self, sample_id: int) -> str:
        """File and line number, as editors take them."""
        file, row = self._files.locate(sample_id)
        return f"{file.name}:{row + 1}"

    def rest(self) -> None:
        """Drop what is held of them."""
        self._fetched.clear()

    def close(self) -> None:
        """Unmap the files."""
        self._fetched.close()
        self._texts.clear()

    def batches(self, slices: Sequence[Ints], ahead: Ints | None = None) -> list[RawRows]:
        """Read and parse the lines of some batches.

        Raises:
            BadDataError: a line has another number of fields or a field that is no label, integer or id.
        """
        features = self._ids.size
        gathered = Gathered.empty(Spots.of([each.size for each in slices], features), self._dense.size, features)
        if not gathered.spots.rows:
            return gathered.batches()
        sample_ids = np.concatenate(slices)
        shares = shares_of(sample_ids, self._bounds)
        if ahead is not None:
            self._fetched.plan([*shares.blocks, *blocks_of(ahead, self._bounds)])
        for place, number in enumerate(shares.blocks):
            span = slice(shares.edges[place], shares.edges[place + 1])
            order = shares.order[span]
            file = self._blocks[number][0]
            if self._texts[file] is not None:  # what is fetched is of the very object that was listed
                self._files.files[file].check()
            bad = self._parse(self._fetched.take(number), shares.within[span], order, gathered)
            if bad >= 0:
                self._refuse(int(sample_ids[order[bad]]))
        return gathered.batches()

    def _parse(self, block: _Lines, lines: Ints, order: Ints, gathered: Gathered) -> int:
        begins, ends = block.spans(lines)
        spots = gathered.spots
        return parse_lines(
            block.text,
            begins,
            ends,
            self._roles,
            self._lenient,
            (self._dense, self._ids),
            (order, spots.bases[order], spots.strides[order]),
            (gathered.dense, gathered.labels, gathered.ids),
        )

    def _fetch(self, number: int) -> _Lines:
        place, first = self._blocks[number]
        file, text = self._files.files[place], self._texts[place]
        rows = int(self._bounds[number + 1] - self._bounds[number])
        starts = self._starts[place][first : first + rows + 1]
        if text is not None:
            return _Lines(text, starts, 0, 0)
        offset, stop = int(starts[0]), min(int(starts[-1]), file.size)
        with file.open() as opened:
            opened.seek(offset)
            body = opened.read(stop - offset)
        return _Lines(np.frombuffer(body, dtype=np.uint8), starts, offset, len(body) + starts.nbytes)

    def _refuse(self, sample_id: int) -> None:
        """Say what is wrong with a line."""
        block = int(np.searchsorted(self._bounds, sample_id, side="right")) - 1
        lines = self._fetched.take(block)
        begins, ends = lines.spans(np.array([sample_id - self._bounds[block]], dtype=np.int64))
        text = lines.text[begins[0] : ends[0]].tobytes()
        raise BadDataError(f"{self.where(sample_id)}: {problem_of(text, COLUMNS, self._roles, self._lenient)}")


def _block_edges(starts: Ints, text: NDArray[np.uint8] | None) -> list[int]:
    """First lines of a file's blocks: one block where its text is mapped."""
    if text is not None:
        return [0]
    edges: list[int] = np.unique(np.searchsorted(starts[:-1], np.arange(0, int(starts[-2]) + 1, BLOCK_BYTES))).tolist()
    return edges
