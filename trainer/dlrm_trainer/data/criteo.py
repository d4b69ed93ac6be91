"""Read Criteo's text format: a label, 13 integers and 26 hexadecimal ids, separated by tabs.

An empty field is a missing value.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_api.job import CRITEO_DENSE, CRITEO_SPARSE
from dlrm_kernels.parsing import ID, INTEGER, LABEL, MAX_DECIMAL_DIGITS, MAX_HEX_DIGITS, UNUSED, Ints, parse_lines
from dlrm_stores.data_files import DataFile, LocalFile
from dlrm_trainer.data.batch_builder import BatchBuilder, Fingerprint, RawRows, Shares, blocks_of
from dlrm_trainer.data.files import BlockCache, FileSet, SourceRequest
from dlrm_trainer.settings import allow_open_files

logger = logging.getLogger(__name__)

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
_CHUNK_BYTES = 16 << 20
_FIELDS = {
    LABEL: (r"[01]", "a label of 0 or 1"),
    INTEGER: (rf"(-?[0-9]{{1,{MAX_DECIMAL_DIGITS}}})?", f"an integer of at most {MAX_DECIMAL_DIGITS} digits"),
    ID: (rf"[0-9a-fA-F]{{0,{MAX_HEX_DIGITS}}}", f"an id of at most {MAX_HEX_DIGITS} hexadecimal digits"),
}
"""Pattern and description of a field by its role."""


def default_cache_folder() -> Path:
    """Return the default folder of line indexes: one of this user's among the temporary files."""
    return Path(tempfile.gettempdir()) / f"dlrm-line-index-{os.getuid()}"


def line_starts(file: DataFile, cache_folder: Path) -> NDArray[np.int64]:
    """Return offsets of a file's lines, (lines + 1,) int64.

    Line i is bytes ``starts[i]`` to ``starts[i + 1] - 2``. The last entry is one past the final newline, or one past
    where it is missing. The index is read from ``cache_folder`` if it holds one for the file's name and stamp; else the
    file is read once from beginning to end, and the index is written to the folder and mapped from there. Ranks that
    start together build it once. If the folder cannot be written, it is built in memory. Raises BadDataError if the
    file is empty or compressed.
    """
    if file.size == 0:
        raise BadDataError(f"{file.name}: empty file; remove it from the URIs, or write it again")
    name = hashlib.sha256(f"{file.path.as_posix()}\x00{file.stamp}".encode()).hexdigest()
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (cache_folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _kept(cache_folder / f"{name}.starts", file)
    except OSError as error:
        logger.warning("failed to keep line index", extra={"folder": str(cache_folder), "error": str(error)})
        return np.concatenate(list(_scan(file)))


def _kept(kept: Path, file: DataFile) -> NDArray[np.int64]:
    # A power cut may have taken the end of an index. numpy raises ValueError for an empty file or a part of a number.
    with contextlib.suppress(FileNotFoundError, ValueError):
        starts = _mapped(kept)
        if starts[-1] in (file.size, file.size + 1):
            return starts
    draft = kept.with_suffix(".tmp")
    try:
        with draft.open("wb") as stream:
            for some in _scan(file):
                some.tofile(stream)
        draft.replace(kept)
    finally:
        draft.unlink(missing_ok=True)
    return _mapped(kept)


def _mapped(kept: Path) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.memmap(kept, dtype=np.int64, mode="r")
    return starts


def _scan(file: DataFile) -> Iterator[NDArray[np.int64]]:
    """Yield the entries of an index, in pieces."""
    yield np.zeros(1, dtype=np.int64)
    offset, last = 0, 0
    with file.open() as opened:
        while body := opened.read(_CHUNK_BYTES):
            if not offset and (
                packed := next((name for mark, name in _COMPRESSED.items() if body.startswith(mark)), "")
            ):
                raise BadDataError(
                    f"{file.name}: compressed file ({packed}); decompress it, since lines are read in any order"
                )
            data = np.frombuffer(body, dtype=np.uint8)
            yield np.flatnonzero(data == _NEWLINE) + (offset + 1)
            offset, last = offset + data.size, int(data[-1])
    file.check()
    if last != _NEWLINE:
        yield np.array([offset + 1], dtype=np.int64)


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

_TOO_MANY = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Limits of a process and the machine: open files, and mappings."""
BLOCK_BYTES = 4 << 20
"""Lines of a remote file are fetched in blocks of about this size."""


@dataclass(frozen=True)
class _Lines:
    """Hold consecutive lines of one file."""

    text: NDArray[np.uint8]
    starts: Ints
    """(lines + 1,) in the file."""
    offset: int
    """Where ``text`` starts in the file."""
    num_bytes: int
    """Memory that the text takes: none if it is mapped."""

    def spans(self, lines: Ints) -> tuple[Ints, Ints]:
        """Return first byte and end (newline excluded) of some lines in the text."""
        return self.starts[lines] - self.offset, self.starts[lines + 1] - (self.offset + 1)


def open_criteo(request: SourceRequest) -> CriteoSource:
    """Open the text files of a split; see ``CriteoSource``."""
    model, data = request.spec.model, request.spec.data
    ids = [each.column for each in model.all_features()]
    folder, budget, threads = request.cache_folder, request.budget_bytes, request.threads
    return CriteoSource(request.files, model.dense_features, ids, data.lenient, folder, budget, threads)


class CriteoSource:
    """Give the lines of Criteo files in any order: local ones are mapped, others fetched by blocks.

    ``dense`` and ``ids`` are columns; ``lenient`` lines may lack trailing fields; ``cache_folder`` keeps where lines
    start. Raises BadDataError if a file is empty or compressed, or there are more than this process may have open.
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
            self._texts: list[NDArray[np.uint8] | None] = [
                np.memmap(file.path, dtype=np.uint8, mode="r") if isinstance(file, LocalFile) else None
                for file in files
            ]
        except OSError as error:
            if error.errno not in _TOO_MANY:
                raise
            raise BadDataError(
                f"cannot open {files[0].name} and {len(files) - 1} more text files: {error.strerror}; join them "
                "into fewer, or raise the limit of open files (ulimit -n)"
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
        """Unmap the files."""
        self._fetched.close()
        self._texts.clear()

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
            file = self._blocks[number][0]
            # What is fetched is of the very object that was listed; a mapped file may have changed.
            if self._texts[file] is not None:
                self._files.files[file].check()
            block = self._fetched.take(number)
            begins, ends = block.spans(rows)
            bad = parse_lines(
                block.text, begins, ends, self._roles, self._lenient, columns, order, builder.numbers, builder.ids
            )
            if bad >= 0:
                text = block.text[begins[bad] : ends[bad]].tobytes()
                problem = problem_of(text, COLUMNS, self._roles, self._lenient)
                raise BadDataError(f"{self.where(int(sample_ids[order[bad]]))}: {problem}")
        return builder.batches()

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


def _block_edges(starts: Ints, text: NDArray[np.uint8] | None) -> list[int]:
    """Return the first lines of a file's blocks: one block if its text is mapped."""
    if text is not None:
        return [0]
    edges: list[int] = np.unique(np.searchsorted(starts[:-1], np.arange(0, int(starts[-2]) + 1, BLOCK_BYTES))).tolist()
    return edges
