"""Parquet files: scalar columns and lists of ids, read by row groups that are decoded once and kept within a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_checkpointer.fetch import in_parallel
from dlrm_trainer.data.batch import Fingerprint, RawRows, no_rows
from dlrm_trainer.data.blocks import BlockCache
from dlrm_trainer.data.files import DataFile, FileSet
from dlrm_trainer.data.packed import PackedRows, fill_bags
from dlrm_trainer.data.row_group import Columns, RowGroupDecoder, holds_ids, holds_numbers, holds_weights
from dlrm_trainer.data.spots import Gathered, Ints, Spots, blocks_of, shares_of
from dlrm_trainer.data.staged import StagedRows

SUFFIXES = (".parquet",)

FOOTERS_AT_ONCE = 32
"""Each is a request or two of a service that may be far away, and there may be thousands of files."""
_SHOWN_COLUMNS = 20


class ParquetSource:
    """Rows of Parquet files, in any order. Columns are found by name; others are never read.

    Args:
        files: in order.
        columns: that the model reads.
        budget_bytes: of decoded row groups.
        threads: that decode row groups ahead.
    """

    hashed = True

    def __init__(
        self,
        files: Sequence[DataFile],
        columns: Columns,
        budget_bytes: int,
        threads: int = 1,
    ) -> None:
        self._columns = columns
        self._footers = list(in_parallel(lambda file: _footer(file, columns), files, FOOTERS_AT_ONCE))
        self._files = FileSet(files, [footer.num_rows for footer in self._footers])
        self.num_samples = self._files.num_rows
        groups = [(file, group) for file, footer in enumerate(self._footers) for group in range(footer.num_row_groups)]
        sizes = [self._footers[file].row_group(group).num_rows for file, group in groups]
        self._groups = groups
        self._bounds: Ints = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
        self._single = True
        """No row group was met so far that has a bag of other than one id."""
        self._wide = False
        """One was met that has an id above uint32, or a negative one."""
        self._decoded: BlockCache[PackedRows] = BlockCache(self._decode, budget_bytes, threads)

    @property
    def fingerprint(self) -> Fingerprint:
        """Names, sizes and row counts of the files, and which columns are read."""
        read = self._columns
        columns = {"label": read.label, "dense": [*read.dense], "bags": [*read.bags], "weights": [*read.weights]}
        return {"format": "parquet", "files": self._files.description(), "columns": columns}

    @property
    def remade(self) -> int:
        """Row groups that were decoded again because the budget had no room for them."""
        return self._decoded.remade

    def where(self, sample_id: int) -> str:
        """File and row, from 0."""
        file, row = self._files.locate(sample_id)
        return f"{file.name}: row {row}"

    def rest(self) -> None:
        """Drop what is held of them."""
        self._decoded.clear()

    def close(self) -> None:
        """Drop the decoded row groups."""
        self._decoded.close()

    def batches(self, slices: Sequence[Ints], ahead: Ints | None = None) -> Iterable[RawRows]:
        """Take the rows of some batches, decoding the row groups that are not at hand.

        Raises:
            BadDataError: a row group is damaged, or holds a value that can't be used.
        """
        features, dense = len(self._columns.bags), len(self._columns.dense)
        weighted, sizes = any(self._columns.weights), [each.size for each in slices]
        sample_ids = np.concatenate(slices)
        if not sample_ids.size:
            return [no_rows(features, dense, weighted) for _ in slices]
        shares = shares_of(sample_ids, self._bounds)
        if ahead is not None:
            self._decoded.plan([*shares.blocks, *blocks_of(ahead, self._bounds)])
        staged = StagedRows(sample_ids.size if self._single else 0, dense, features, wide=self._wide, weighted=weighted)
        parts: list[tuple[Ints, PackedRows]] = []
        for place, number in enumerate(shares.blocks):
            span = slice(shares.edges[place], shares.edges[place + 1])
            block, order, rows = self._decoded.take(number), shares.order[span], shares.within[span]
            if not self._single:
                parts.append((order, block.some(rows, features)))
            elif not staged.put(order, block, rows):
                self._single, self._wide = block.single, True
                return self.batches(slices, ahead)
        if self._single:
            return staged.batches(sizes)
        gathered = Gathered.empty(Spots.of(sizes, features), dense, features, weighted=weighted)
        return fill_bags(gathered, parts).batches()

    @property
    def num_row_groups(self) -> int:
        """Of all files."""
        return len(self._groups)

    def row_group(self, number: int) -> Any:
        """The columns of one row group that the model reads, as an Arrow table.

        Raises:
            BadDataError: it is damaged, or its file was changed.
        """
        file_number, group = self._groups[number]
        file, footer = self._files.files[file_number], self._footers[file_number]
        first, stop = int(self._bounds[number]), int(self._bounds[number + 1])
        first_row, last_row = (self._files.locate(row)[1] for row in (first, stop - 1))

        def read() -> Any:
            with file.open() as opened:
                parquet = pq.ParquetFile(opened, metadata=footer, pre_buffer=True, page_checksum_verification=True)
                table = parquet.read_row_group(group, columns=self._columns.names, use_threads=False)
            if table.num_rows != stop - first:  # columns that all end too soon are no error of pyarrow's
                raise pa.ArrowInvalid(f"{table.num_rows} rows in place of {stop - first}")
            return table

        file.check()
        return _guarded(file, f"rows {first_row} to {last_row} (row group {group})", read)

    def _decode(self, number: int) -> PackedRows:
        first = int(self._bounds[number])
        return RowGroupDecoder(lambda row: self.where(first + row)).decode(self.row_group(number), self._columns)


def _footer(file: DataFile, columns: Columns) -> Any:
    """Read a file's footer and check that it has the columns, of types that can be used."""

    def read() -> Any:
        with file.open() as opened:
            footer = pq.read_metadata(opened)
            return footer, footer.schema.to_arrow_schema()

    footer, schema = _guarded(file, "", read)
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


def _guarded(file: DataFile, rows: str, read: Callable[[], Any]) -> Any:
    """Call ``read`` and name the file, and the rows, in what goes wrong."""
    try:
        return read()
    except FileNotFoundError as error:
        raise NoInputError(f"{file.name}: no such file: it was there before, so put it back") from error
    except (pa.ArrowException, OSError) as error:
        file.check()  # what changed meanwhile is not damaged
        _refuse(file, rows, error)


def _refuse(file: DataFile, rows: str, error: Exception) -> NoReturn:
    reason = str(error).partition("\n")[0][:200]
    if "decrypt" in reason.lower():
        raise BadDataError(f"{file.name}: it is encrypted, and no keys are known here: write it without") from error
    what = f"{rows} can't be decoded: damaged" if rows else "not a Parquet file, or a damaged one"
    raise BadDataError(f"{file.name}: {what} ({reason}): write or copy it anew") from error
