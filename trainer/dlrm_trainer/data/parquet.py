"""Parquet files: scalar columns and lists of ids, read by row groups that are decoded once and kept within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_trainer.data.batch import Fingerprint, RawRows, no_rows
from dlrm_trainer.data.blocks import BlockCache
from dlrm_trainer.data.files import DataFile
from dlrm_trainer.data.footers import Footers
from dlrm_trainer.data.guarding import guarded
from dlrm_trainer.data.packed import PackedRows, fill_bags
from dlrm_trainer.data.row_group import Columns, RowGroupDecoder
from dlrm_trainer.data.spots import Gathered, Ints, Spots, blocks_of, shares_of
from dlrm_trainer.data.staged import StagedRows

SUFFIXES = (".parquet",)

FOOTERS_SHARE = 16
"""One part in so many of the budget is for footers."""


class ParquetSource:
    """Rows of Parquet files, in any order. Columns are found by name; others are never read.

    Args:
        files: in order.
        columns: that the model reads.
        budget_bytes: of decoded row groups, and footers.
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
        footers_bytes = budget_bytes // FOOTERS_SHARE
        self._footers = Footers(files, columns, footers_bytes)
        self._files, self._bounds = self._footers.files, self._footers.bounds
        self.num_samples = self._files.num_rows
        self._single = True
        """No row group was met so far that has a bag of other than one id."""
        self._wide = False
        """One was met that has an id above uint32, or a negative one."""
        self._decoded: BlockCache[PackedRows] = BlockCache(self._decode, budget_bytes - footers_bytes, threads)

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
        return len(self._bounds) - 1

    def row_group(self, number: int) -> Any:
        """The columns of one row group that the model reads, as an Arrow table.

        Raises:
            BadDataError: it is damaged, or its file was changed.
        """
        file_number, group = self._footers.place(number)
        file, footer = self._files.files[file_number], self._footers.of(file_number)
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
        return guarded(file, f"rows {first_row} to {last_row} (row group {group})", read)

    def _decode(self, number: int) -> PackedRows:
        first = int(self._bounds[number])
        return RowGroupDecoder(lambda row: self.where(first + row)).decode(self.row_group(number), self._columns)
