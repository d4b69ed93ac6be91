"""Criteo's text format: a label, 13 integers and 26 hexadecimal ids, separated by tabs; an empty field is missing."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_api.job import CRITEO_DENSE, CRITEO_SPARSE
from dlrm_kernels.parsing import DECIMAL_WIDTH, HEX_WIDTH, ID, INTEGER, LABEL, UNUSED, parse_lines
from dlrm_stores.locations import DataFile, LocalFile
from dlrm_trainer.data.batch_builder import Fingerprint, Gathered, Ints, RawRows, Spots, blocks_of, shares_of
from dlrm_trainer.data.files import BlockCache, FileSet
from dlrm_trainer.settings import allow_open_files

logger = logging.getLogger(__name__)

_NEWLINE = ord("\n")
_PACKED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
    b"\x04\x22\x4d\x18": "lz4",
}
"""What files that were compressed begin with."""
_CHUNK_BYTES = 16 << 20


def default_cache_folder() -> Path:
    """Where indexes are kept unless told otherwise: a folder of this user's among the temporary files."""
    return Path(tempfile.gettempdir()) / f"dlrm-line-index-{os.getuid()}"


def line_starts(file: DataFile, cache_folder: Path) -> NDArray[np.int64]:
    """Offsets of the lines of a file, (lines + 1,) int64; line i is bytes ``starts[i]`` to ``starts[i + 1] - 2``.

    The last entry is one past the final newline, or one past where it is missing. The index is read from
    ``cache_folder`` if it holds one for the file's name and stamp; else the file is read once from beginning to end.
    Ranks that start together build it once. It goes to the folder as it is built and is mapped from there. Without room
    or rights to keep it, it is built all the same, in memory.

    Raises:
        BadDataError: the file is empty or compressed.
    """
    if file.size == 0:
        raise BadDataError(f"{file.name}: the file is empty: remove it from the URIs, or write it anew")
    name = hashlib.sha256(f"{file.path.as_posix()}\x00{file.stamp}".encode()).hexdigest()
    try:
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with (cache_folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return _kept(cache_folder / f"{name}.starts", file)
    except OSError as error:
        logger.warning("line index not kept", extra={"folder": str(cache_folder), "error": str(error)})
        return np.concatenate(list(_scan(file)))


def _kept(kept: Path, file: DataFile) -> NDArray[np.int64]:
    if (starts := _whole(kept, file.size)) is not None:
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


def _whole(kept: Path, size: int) -> NDArray[np.int64] | None:
    """The index of a file of ``size`` bytes; None where there is none, or a power cut took its end."""
    try:
        starts = _mapped(kept)
    except (FileNotFoundError, ValueError):  # numpy's word for an empty file and for a part of a number
        return None
    return starts if starts[-1] in (size, size + 1) else None


def _mapped(kept: Path) -> NDArray[np.int64]:
    starts: NDArray[np.int64] = np.memmap(kept, dtype=np.int64, mode="r")
    return starts


def _scan(file: DataFile) -> Iterator[NDArray[np.int64]]:
    """The entries of an index, in pieces."""
    yield np.zeros(1, dtype=np.int64)
    offset, last = 0, 0
    with file.open() as opened:
        while body := opened.read(_CHUNK_BYTES):
            if not offset and (packed := next((name for mark, name in _PACKED.items() if body.startswith(mark)), "")):
                raise BadDataError(
                    f"{file.name}: the file is compressed by {packed}: decompress it, lines are read in any order"
                )
            data = np.frombuffer(body, dtype=np.uint8)
            yield np.flatnonzero(data == _NEWLINE) + (offset + 1)
            offset, last = offset + data.size, int(data[-1])
    file.check()
    if last != _NEWLINE:
        yield np.array([offset + 1], dtype=np.int64)


def map_file(path: Path) -> NDArray[np.uint8]:
    """The bytes of a file, not empty, mapped into memory and read when looked at."""
    data: NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
    return data


def problem_of(text: bytes, names: tuple[str, ...], roles: NDArray[np.uint8], lenient: bool) -> str:
    """What is wrong with a line that ``parse_lines`` refused, its newline excluded: column, value and mend in words."""
    fields = [field.decode(errors="replace") for field in text.removesuffix(b"\r").split(b"\t")]
    wrong = len(fields) > len(names) if lenient else len(fields) != len(names)
    if wrong:
        mend = "mend or remove the line"
        if len(fields) < len(names):
            mend += ", or set data.lenient: true to take lines that lost their trailing empty fields as if padded"
        return f"{len(fields)} fields, expected {len(names)} (label, I1 to I13, C1 to C26, separated by tabs): {mend}"
    checks: dict[int, tuple[Any, str]] = {
        LABEL: (_is_label, "is no label: it must be 0 or 1"),
        INTEGER: (_is_integer, f"is no integer of at most {DECIMAL_WIDTH} digits"),
        ID: (_is_id, f"is no id of at most {HEX_WIDTH} hexadecimal digits"),
    }
    for number, (name, role, field) in enumerate(zip(names, roles.tolist(), fields, strict=False), start=1):
        if role in checks and not checks[role][0](field):
            return f"column {name} (field {number}): {field[:40]!r} {checks[role][1]}: mend or remove the line"
    raise AssertionError(f"a good line was refused: {text!r}")


def _is_label(field: str) -> bool:
    return field in ("0", "1")


def _is_integer(field: str) -> bool:
    digits = field.removeprefix("-")
    return not field or (digits.isascii() and digits.isdigit() and len(digits) <= DECIMAL_WIDTH)


def _is_id(field: str) -> bool:
    return len(field) <= HEX_WIDTH and all(character in "0123456789abcdefABCDEF" for character in field)


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
