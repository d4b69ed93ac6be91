"""Parquet files: scalar columns and lists of ids, read by row groups that are decoded once and kept within a budget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError, NoInputError
from dlrm_kernels.parsing import MIX, NONE, Hashing, Numbers, put_floats, put_labels, put_rows_of
from dlrm_stores.locations import DataFile
from dlrm_stores.parallel import in_parallel
from dlrm_trainer.data.batch_builder import (
    Fingerprint,
    Gathered,
    Ints,
    PackedRows,
    RawRows,
    SingleIds,
    Spots,
    StagedRows,
    blocks_of,
    fill_bags,
    no_rows,
    pack_bags,
    scratch,
    shares_of,
)
from dlrm_trainer.data.files import BlockCache, FileSet

NO_BITS = np.empty(0, dtype=np.uint8)


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Columns of a file that hold what the model reads."""

    label: str
    dense: Sequence[str]
    bags: Sequence[str]
    """Ids of each feature."""
    weights: Sequence[str | None]
    """Weights of each feature."""
    hashings: Sequence[Hashing]
    """What becomes of each feature's ids."""

    @property
    def names(self) -> list[str]:
        """Each once."""
        return list(dict.fromkeys([self.label, *self.dense, *self.bags, *filter(None, self.weights)]))


@dataclass(frozen=True)
class _Bags:
    """One column of bags: their ids one after the other, or one of weights."""

    sizes: NDArray[np.int32] | None
    """None: one each."""
    values: NDArray[Any]


@dataclass(frozen=True)
class RowGroupDecoder:
    """Turns a row group's columns into arrays; ``where`` names a row of the group, for messages."""

    where: Callable[[int], str]

    def decode(self, data: pa.Table, columns: Columns) -> PackedRows:
        """Check and convert all columns that the model reads.

        Raises:
            BadDataError: a value can't be used; the message names file, row and column.
        """
        dense = scratch("dense", (1 + len(columns.dense), data.num_rows), np.float32)
        self._labels(data[columns.label], columns.label, dense[0])
        for place, name in enumerate(columns.dense, start=1):
            self._dense(data[name], name, dense[place])
        singles = SingleIds(len(columns.bags), data.num_rows)
        each_feature = enumerate(zip(columns.bags, columns.hashings, strict=True))
        bags = [self._ids(data, name, hashing, place, singles) for place, (name, hashing) in each_feature]
        weights = None
        if any(columns.weights):
            named = zip(columns.weights, columns.bags, bags, strict=True)
            weights = np.concatenate([self._weights(data, name, ids, bag) for name, ids, bag in named])
        if all(each.sizes is None for each in bags):
            return singles.pack(dense, weights)
        sizes = [np.ones(data.num_rows, np.int32) if each.sizes is None else each.sizes for each in bags]
        return pack_bags(
            dense, np.stack(sizes), np.concatenate([each.values for each in bags], dtype=np.int64), weights
        )

    def _labels(self, column: Any, name: str, labels: Numbers) -> None:
        values = column.cast(pa.float64(), safe=False).to_numpy()
        bad = put_labels(values, labels)
        if bad >= 0:
            self._refuse(bad, column, name, "is no label: it must be 0 or 1")

    def _dense(self, column: Any, name: str, values: Numbers) -> None:
        """Put a column's values into ``values`` (r,), NaN where null."""
        array = _array(column if column.type == pa.float32() else column.cast(pa.float64(), safe=False))
        if array.offset:  # bits are read from the first on
            array = pa.concat_arrays([array])
        validity, held = array.buffers()
        valid = np.frombuffer(validity, np.uint8) if array.null_count else NO_BITS
        kind = np.float32 if array.type == pa.float32() else np.float64
        bad = put_floats(np.frombuffer(held, kind), valid, values)
        if bad >= 0:
            problem = "is not finite (as float32): mend the row, or write null for a missing value"
            self._refuse(bad, column, name, problem)

    def _ids(self, data: pa.Table, name: str, hashing: Hashing, place: int, singles: SingleIds) -> _Bags:
        """A feature's rows, in ``singles`` where each bag has one; a null bag and a null scalar are empty bags."""
        few = hashing.kind != NONE and int(hashing.rows) <= 2**32
        kept = hashing.kind != MIX and holds_narrow(data.schema.field(name).type)  # mixed, short ids become any row
        column = singles.column(place, narrow=few or kept)
        sizes, flat = self._flat(data[name], name, "ids")
        rows = column if sizes is None else np.empty(len(flat), dtype=np.int64)
        ids = flat.to_numpy(zero_copy_only=False)
        if ids.dtype != np.uint32:  # others are not worth a loop of their own
            ids = ids.astype(np.int64, copy=False)
        put_rows_of(ids, hashing, rows)
        return _Bags(sizes, rows)

    def _weights(self, data: pa.Table, name: str | None, ids_name: str, ids: _Bags) -> NDArray[np.float32]:
        """A feature's weights, as long as its ids."""
        if name is None:
            return np.ones(ids.values.size, dtype=np.float32)
        column = data[name]
        sizes, flat = self._flat(column, name, "weights")
        ones = np.ones(data.num_rows, dtype=np.int32)
        own, wanted = (ones if each is None else each for each in (sizes, ids.sizes))
        if (own != wanted).any():
            row = int((own != wanted).argmax())
            problem = f"holds {own[row]} weights for the {wanted[row]} ids of column {ids_name}: give one for each id"
            self._refuse(row, column, name, problem)
        with np.errstate(over="ignore"):
            values: NDArray[np.float32] = (
                flat.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
            )
        if not np.isfinite(values).all():
            bad = int(np.repeat(np.arange(own.size), own)[~np.isfinite(values)][0])
            self._refuse(bad, column, name, "holds a weight that is not finite (as float32): mend the row")
        return values

    def _flat(self, column: Any, name: str, what: str) -> tuple[NDArray[np.int32] | None, Any]:
        """Bag sizes (r,), None where all are 1, and what the bags hold, one after the other."""
        array = _array(column)
        if isinstance(array.type, pa.DictionaryType):
            array = array.dictionary_decode()
        if not is_list(array.type):
            if not array.null_count:
                return None, array
            return array.is_valid().to_numpy(zero_copy_only=False).astype(np.int32), array.drop_null()
        sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int32)
        flat = array.flatten()
        if flat.null_count:
            holed = np.repeat(np.arange(sizes.size), sizes)[flat.is_null().to_numpy(zero_copy_only=False)]
            problem = f"has a null inside the list: leave missing {what} out of the list"
            self._refuse(int(holed[0]), column, name, problem)
        return None if (sizes == 1).all() else sizes, flat

    def _refuse(self, row: int, column: Any, name: str, problem: str) -> NoReturn:
        value = repr(column[row].as_py())[:60]
        raise BadDataError(f"{self.where(row)}: column {name}: {value} {problem}")


def _array(column: Any) -> Any:
    """A column in one piece; what is in one already is not copied."""
    if column.num_chunks == 1:
        return column.chunk(0)
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is some list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def holds_narrow(kind: Any) -> bool:
    """Whether all ids of an Arrow type fit uint32."""
    each = kind.value_type if is_list(kind) else kind
    return bool(pa.types.is_unsigned_integer(each) and each.bit_width <= 32)


def holds_numbers(kind: Any) -> bool:
    """Whether an Arrow type can be a label or a dense value."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def holds_weights(kind: Any) -> bool:
    """Whether an Arrow type can be a weight, or a bag of weights."""
    return holds_numbers(kind.value_type if is_list(kind) else kind)


def holds_ids(kind: Any) -> bool:
    """Whether an Arrow type can be an id or a bag of ids."""
    if is_list(kind) or isinstance(kind, pa.DictionaryType):
        return bool(pa.types.is_integer(kind.value_type))
    return bool(pa.types.is_integer(kind))


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
        for number, footer in enumerate(in_parallel(lambda file: _read_checked_footer(file, columns), files, AT_ONCE)):
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
        footer = guarded(found, "", lambda: _read_footer(found))
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


def _read_footer(file: DataFile) -> Any:
    with file.open() as opened:
        return pq.read_metadata(opened)


def _read_checked_footer(file: DataFile, columns: Columns) -> Any:
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


def guarded(file: DataFile, rows: str, read: Callable[[], Any]) -> Any:
    """Call ``read`` and name the file, and the rows, in what goes wrong.

    Raises:
        NoInputError: the file is gone.
        BadDataError: it was changed, or is damaged.
    """
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
