"""Parquet files: scalar columns and lists of ids, read by row groups that are decoded once and kept within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_trainer.data.batch import Fingerprint, RawRows
from dlrm_trainer.data.files import FileSet
from dlrm_trainer.data.ranges import take_ranges
from dlrm_trainer.data.row_group import DecodedRows, RowGroupDecoder, holds_ids, holds_numbers

SUFFIXES = (".parquet",)

CACHE_BYTES = 1 << 30
"""Decoded row groups that one reader keeps. Below what a shuffle window touches, row groups are decoded repeatedly."""

_SHOWN_COLUMNS = 20


class ParquetSource:
    """Rows of Parquet files, in any order. Columns are found by name; others are never read."""

    def __init__(
        self,
        paths: Sequence[Path],
        label: str,
        dense: Sequence[str],
        tables: Sequence[str],
        rename: Mapping[str, str],
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self._paths = tuple(paths)
        self._label = label
        self._dense = [rename.get(name, name) for name in dense]
        self._tables = [rename.get(name, name) for name in tables]
        self._footers = [self._footer(path) for path in paths]
        self._files = FileSet(paths, [footer.num_rows for footer in self._footers])
        self.num_samples = self._files.num_rows
        groups = [(file, group) for file, footer in enumerate(self._footers) for group in range(footer.num_row_groups)]
        sizes = [self._footers[file].row_group(group).num_rows for file, group in groups]
        self._groups = groups
        self._bounds = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self._cache_bytes = cache_bytes
        self._decoded: OrderedDict[int, DecodedRows] = OrderedDict()

    @property
    def fingerprint(self) -> Fingerprint:
        """Names, sizes and row counts of the files."""
        return {"format": "parquet", "files": self._files.description()}

    def where(self, sample_id: int) -> str:
        """File and row, from 0."""
        path, row = self._files.locate(sample_id)
        return f"{path}: row {row}"

    def close(self) -> None:
        """Drop the decoded row groups."""
        self._decoded.clear()

    def rows(self, sample_ids: NDArray[np.int64]) -> RawRows:
        """Take some rows, decoding the row groups that are not at hand.

        Raises:
            BadDataError: a row group is damaged, or holds a value that can't be used.
        """
        numbers = np.searchsorted(self._bounds, sample_ids, side="right") - 1
        by_group = np.argsort(numbers, kind="stable")
        edges = np.concatenate(([0], np.flatnonzero(np.diff(numbers[by_group])) + 1, [by_group.size])).tolist()
        parts = []
        for start, stop in pairwise(edges):
            number = int(numbers[by_group[start]])
            parts.append(_take(self._group(number), sample_ids[by_group[start:stop]] - self._bounds[number]))
        places = np.empty_like(by_group)
        places[by_group] = np.arange(by_group.size)
        lengths = np.concatenate([part.lengths for part in parts])
        starts = np.cumsum(lengths, dtype=np.int64).reshape(lengths.shape) - lengths
        table_major = lengths[places].T
        return RawRows(
            dense=np.concatenate([part.dense for part in parts])[places],
            labels=np.concatenate([part.labels for part in parts])[places],
            lengths=np.ascontiguousarray(table_major),
            ids=take_ranges(
                np.concatenate([part.ids for part in parts]), starts[places].T.reshape(-1), table_major.reshape(-1)
            ),
        )

    def _group(self, number: int) -> DecodedRows:
        if number in self._decoded:
            self._decoded.move_to_end(number)
            return self._decoded[number]
        decoded = self._decode(number)
        self._decoded[number] = decoded
        held = sum(rows.num_bytes for rows in self._decoded.values())
        while held > self._cache_bytes and len(self._decoded) > 1:
            held -= self._decoded.popitem(last=False)[1].num_bytes
        return decoded

    def _decode(self, number: int) -> DecodedRows:
        file, group = self._groups[number]
        path = self._paths[file]
        columns = list(dict.fromkeys([self._label, *self._dense, *self._tables]))

        def read() -> Any:
            with pq.ParquetFile(path, metadata=self._footers[file]) as opened:
                return opened.read_row_group(group, columns=columns)

        first_row = self._files.locate(int(self._bounds[number]))[1]
        return RowGroupDecoder(path, first_row).decode(_guarded(path, read), self._label, self._dense, self._tables)

    def _footer(self, path: Path) -> Any:
        """Read a file's footer and check that it has the columns, of types that can be used."""
        footer = _guarded(path, lambda: pq.read_metadata(path))
        schema = _guarded(path, footer.schema.to_arrow_schema)
        for column in [self._label, *self._dense]:
            kind = _type_of(path, schema, column)
            if not holds_numbers(kind):
                raise BadDataError(f"{path}: column {column} is {kind}: labels and dense values must be numbers")
        for column in self._tables:
            kind = _type_of(path, schema, column)
            if not holds_ids(kind):
                raise BadDataError(
                    f"{path}: column {column} is {kind}: ids must be integers, or lists of integers: "
                    "number or hash the values when the file is written"
                )
        return footer


def _take(group: DecodedRows, rows: NDArray[np.int64]) -> DecodedRows:
    starts = group.starts[rows]
    sizes = group.starts[rows + 1] - starts
    return DecodedRows(
        dense=group.dense[rows],
        labels=group.labels[rows],
        lengths=group.lengths[rows],
        starts=np.concatenate(([0], np.cumsum(sizes))),
        ids=take_ranges(group.ids, starts, sizes),
    )


def _type_of(path: Path, schema: Any, column: str) -> Any:
    place = schema.get_field_index(column)
    if place < 0:
        names = schema.names
        more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
        raise BadDataError(
            f"{path}: no column {column}: the file has {', '.join(names[:_SHOWN_COLUMNS])}{more}: "
            "name the right one in data.columns (label, rename)"
        )
    return schema.field(place).type


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    """Call ``read`` and name the file in what goes wrong."""
    try:
        return read()
    except FileNotFoundError as error:
        raise NoInputError(f"{path}: no such file: it was there before, so put it back") from error
    except (pa.ArrowException, OSError) as error:
        _refuse_file(path, error)


def _refuse_file(path: Path, error: Exception) -> NoReturn:
    reason = str(error).partition("\n")[0][:200]
    raise BadDataError(f"{path}: not a Parquet file, or a damaged one ({reason}): write or copy it anew") from error
