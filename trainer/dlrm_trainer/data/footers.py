"""Footers of Parquet files: each is read at the start, and again where the budget had no room to keep it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from dlrm_api.errors import BadDataError
from dlrm_checkpointer.format.fetch import in_parallel
from dlrm_trainer.data.files import DataFile, FileSet
from dlrm_trainer.data.guarding import guarded
from dlrm_trainer.data.row_group import Columns, holds_ids, holds_numbers, holds_weights
from dlrm_trainer.data.spots import Ints

AT_ONCE = 32
"""Each is a request or two of a service that may be far away, and there may be thousands of files."""
CHUNK_BYTES = 800
"""What a footer takes for each column of a row group, whether that is read or not (measured: 500 to 800)."""
_SHOWN_COLUMNS = 20


class Footers:
    """Knows the rows of every row group, and gives the footer of any file.

    Args:
        files: in order.
        columns: that every file must have.
        budget_bytes: of footers that are kept, the most recently used ones; one alone may take more.

    Raises:
        BadDataError: a file is no Parquet, or has no such columns of types that can be used.
    """

    def __init__(self, files: Sequence[DataFile], columns: Columns, budget_bytes: int) -> None:
        self._files, self._budget = files, budget_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._kept_bytes = 0
        rows = []
        for number, footer in enumerate(in_parallel(lambda file: _checked(file, columns), files, AT_ONCE)):
            rows.append(_rows_of_groups(footer))
            self._keep(number, footer)
        self.files = FileSet(files, [int(each.sum()) for each in rows])
        self.bounds: Ints = np.concatenate(([0], *rows)).cumsum()
        """Where the rows of each row group of all files begin, and where the last one's end."""
        self._firsts = np.array([0, *accumulate(map(len, rows))])
        """The number of each file's first row group."""

    def place(self, number: int) -> tuple[int, int]:
        """The file of a row group, and the row group's number in it."""
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return file, number - int(self._firsts[file])

    def of(self, file: int) -> Any:
        """A file's footer.

        Raises:
            BadDataError: the file was changed since it was found.
        """
        with self._lock:
            if file in self._kept:
                self._kept.move_to_end(file)
                return self._kept[file]
        found = self._files[file]
        found.check()
        footer = guarded(found, "", lambda: _read(found))
        with self._lock:
            self._keep(file, footer)
        return footer

    def _keep(self, file: int, footer: Any) -> None:
        if file in self._kept:  # read by two threads
            return
        self._kept[file] = footer
        self._kept_bytes += _bytes_of(footer)
        while self._kept_bytes > self._budget and len(self._kept) > 1:
            self._kept_bytes -= _bytes_of(self._kept.popitem(last=False)[1])


def _bytes_of(footer: Any) -> int:
    return int(footer.num_row_groups) * int(footer.num_columns) * CHUNK_BYTES


def _rows_of_groups(footer: Any) -> Ints:
    return np.array([footer.row_group(group).num_rows for group in range(footer.num_row_groups)], np.int64)


def _read(file: DataFile) -> Any:
    with file.open() as opened:
        return pq.read_metadata(opened)


def _checked(file: DataFile, columns: Columns) -> Any:
    """Read a file's footer and check that it has the columns, of types that can be used."""

    def read() -> Any:
        with file.open() as opened:
            parquet = pq.ParquetFile(opened)
            return parquet.metadata, parquet.schema_arrow  # ``metadata.schema`` would hold it and be held by it

    footer, schema = guarded(file, "", read)
    for column in [columns.label, *columns.dense]:
        kind = _type_of(file, schema, column)
        if not holds_numbers(kind):
            raise BadDataError(f"{file.name}: column {column} is {kind}: labels and dense values must be numbers")
    for column in columns.bags:
        kind = _type_of(file, schema, column)
        if not holds_ids(kind):
            raise BadDataError(
                f"{file.name}: column {column} is {kind}: ids must be integers, or lists of integers: "
                "number or hash the values when the file is written"
            )
    for column in filter(None, columns.weights):
        kind = _type_of(file, schema, column)
        if not holds_weights(kind):
            raise BadDataError(f"{file.name}: column {column} is {kind}: weights must be numbers, or lists of numbers")
    return footer


def _type_of(file: DataFile, schema: Any, column: str) -> Any:
    places = schema.get_all_field_indices(column)
    if len(places) > 1:
        raise BadDataError(f"{file.name}: {len(places)} columns are called {column}: write the file with one of them")
    if not places:
        names = schema.names
        more = f" and {len(names) - _SHOWN_COLUMNS} more" if len(names) > _SHOWN_COLUMNS else ""
        raise BadDataError(
            f"{file.name}: no column {column}: the file has {', '.join(names[:_SHOWN_COLUMNS])}{more}: "
            "name the right one in data.columns (label, rename)"
        )
    return schema.field(places[0]).type
