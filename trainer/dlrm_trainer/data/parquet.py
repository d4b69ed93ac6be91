"""Read Parquet files by row groups, which are decoded once and kept within a budget.

Columns are found by name; others are never read. Shapes: r rows of a row group, D dense values, F features.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError, InvalidSpecError, NoInputError
from dlrm_api.job import DLRMJobSpec
from dlrm_checkpointer import DataIndex
from dlrm_kernels.hashing import hash_texts
from dlrm_kernels.parsing import MIX, MODULO, NONE, UNIQUE, Hashing, Ints, Numbers, put_floats, put_labels, put_rows_of
from dlrm_stores.data_files import DataFile, LocalFile, TableColumns
from dlrm_trainer.data.batch_builder import (
    BatchBuilder,
    Fingerprint,
    RawRows,
    RowBlock,
    Shares,
    SingleIds,
    blocks_of,
    hashing_of,
    pack_bags,
    scratch,
)
from dlrm_trainer.data.files import BlockCache, FileSet, SourceRequest
from dlrm_trainer.data.index import FileBlocks, Indexer

logger = logging.getLogger(__name__)

SUFFIXES = (".parquet", ".pq")
FOOTERS_SHARE = 16
"""One part in so many of the budget is for footers."""
CHUNK_BYTES = 800
"""Memory of a footer for each column of a row group, whether that is read or not (measured: 500 to 800)."""
MAX_FOOTER = 2**31 - 1
"""Bytes of a text and items of a list in a footer: the largest that pyarrow takes."""
_SHOWN_NAMES = 20
_NO_BITS = np.empty(0, dtype=np.uint8)
_TEXTS = (pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.large_binary(), pa.binary_view())
_TEXT = pa.large_binary()
"""What texts are cast to: those of a row group may exceed 2 GiB."""


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Name the columns of a file that hold what the model reads."""

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
        """Return each name once."""
        return list(dict.fromkeys([self.label, *self.dense, *self.bags, *filter(None, self.weights)]))


def columns_of(spec: DLRMJobSpec) -> Columns:
    """Return the columns that a job reads; InvalidSpecError if a rename names no feature of the model."""
    model, rename = spec.model, spec.data.columns.rename
    features, tables = model.all_features(), model.all_tables()
    known = {*model.dense_features, *(each.column for each in features), *(each.weights for each in features)} - {None}
    if unknown := sorted(set(rename) - known):
        shown = ", ".join(sorted(map(str, known))[:_SHOWN_NAMES])
        raise InvalidSpecError(f"spec.data.columns.rename.{unknown[0]}", f"expected a feature of the model: {shown}")
    return Columns(
        label=spec.data.columns.label,
        dense=[rename.get(name, name) for name in model.dense_features],
        bags=[rename.get(each.column, each.column) for each in features],
        weights=[rename.get(each.weights, each.weights) if each.weights else None for each in features],
        hashings=[hashing_of(tables[each.table], spec.training.seed) for each in features],
    )


def open_parquet(request: SourceRequest) -> ParquetSource:
    """Open the Parquet files of a split."""
    columns, budget, threads = columns_of(request.spec), request.budget_bytes, request.threads
    return ParquetSource(request.files, request.index, columns, budget, threads, marks_bad=request.marks_bad)


def count_reads(sizes: Ints, groups: float, _is_remote: bool) -> int:
    """Count the reads of files with so many row groups: one of each footer, and one of each row group."""
    return round(sizes.size * (1 + groups))


def index_parquet(spec: DLRMJobSpec) -> Indexer:
    """Return what reads the row groups of files and checks their columns for a job."""
    return column_indexer(columns_of(spec))


def column_indexer(columns: Columns) -> Indexer:
    """Return what reads the row groups of files and checks these columns of theirs."""

    def read(file: DataFile, opened: BinaryIO, _begin: int, _end: int) -> FileBlocks:
        footer = _read_checked_footer(file, opened, columns)
        rows = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
        return FileBlocks(rows=np.array(rows, np.int64))

    kinds = [int(hashing.kind) for hashing in columns.hashings]
    names = [columns.label, list(columns.dense), list(columns.bags), list(columns.weights)]
    return Indexer(read_blocks=read, checks=["parquet", *names, kinds])


class ParquetSource:
    """Give the rows of Parquet files in any order; ``budget_bytes`` are of decoded row groups and footers.

    ``marks_bad``: bad rows are marked and raise nothing.
    """

    hashed = True

    def __init__(
        self,
        files: Sequence[DataFile],
        index: DataIndex,
        columns: Columns,
        budget_bytes: int,
        threads: int = 1,
        *,
        marks_bad: bool = False,
    ) -> None:
        self._columns, self._marks_bad = columns, marks_bad
        footers_bytes = budget_bytes // FOOTERS_SHARE
        self._footers = Footers(files, footers_bytes)
        self._files, self._firsts = FileSet(files, index), index.firsts
        self._bounds = self._files.blocks
        self.num_samples = self._files.num_rows
        self._is_wide = False
        """A row group had an id above uint32, or a negative one."""
        self._decoded: BlockCache[RowBlock] = BlockCache(self._decode, budget_bytes - footers_bytes, threads)
        self._report_large_groups(budget_bytes - footers_bytes)

    def _report_large_groups(self, budget_bytes: int) -> None:
        sizes = np.diff(self._bounds)
        if not sizes.size:
            return
        largest = int(sizes.argmax())
        # A label and dense values of 4 bytes, and at least one id a bag, of 8.
        decoded = int(sizes[largest]) * (4 * (1 + len(self._columns.dense)) + 8 * len(self._columns.bags))
        if decoded > budget_bytes:
            file, group = self.place(largest)
            logger.warning(
                "row group exceeds data.prefetchBytes, and each rank decodes it whole; write smaller row groups",
                extra={
                    "file": self._files.files[file].name,
                    "row_group": group,
                    "rows": int(sizes[largest]),
                    "decoded_bytes": decoded,
                    "budget_bytes": budget_bytes,
                },
            )

    @property
    def fingerprint(self) -> Fingerprint:
        """Return names, sizes and row counts of the files, and the columns that are read."""
        read = self._columns
        columns = {"label": read.label, "dense": [*read.dense], "bags": [*read.bags], "weights": [*read.weights]}
        return {"format": "parquet", "files": self._files.description(), "columns": columns}

    @property
    def remade(self) -> int:
        """Return how many row groups were decoded again because the budget was too small for them."""
        return self._decoded.remade

    def where(self, sample_id: int) -> str:
        """Return file and row, from 0."""
        file, row = self._files.locate(sample_id)
        return f"{file.name}: row {row}"

    def rest(self) -> None:
        """Drop the decoded row groups."""
        self._decoded.clear()

    def close(self) -> None:
        """Drop the decoded row groups and end their threads."""
        self._decoded.close()

    def batches(self, slices: Sequence[Ints], ahead: Ints | None = None) -> Iterable[RawRows]:
        """Take the rows of some batches, decoding the row groups that are not at hand; see ``RowSource``."""
        features, dense, weighted = len(self._columns.bags), len(self._columns.dense), any(self._columns.weights)
        sizes = [each.size for each in slices]
        builder = BatchBuilder(sizes, dense, features, wide=self._is_wide, weighted=weighted)
        shares = Shares(np.concatenate(slices), self._bounds)
        if ahead is not None:
            self._decoded.plan([*shares.blocks, *blocks_of(ahead, self._bounds)])
        for number, rows, order in shares:
            builder.put(self._decoded.take(number), rows, order)
        self._is_wide = builder.is_wide
        return builder.batches()

    @property
    def num_row_groups(self) -> int:
        """Return the number of row groups of all files."""
        return len(self._bounds) - 1

    def place(self, number: int) -> tuple[int, int]:
        """Return the file of a row group, and the row group's number in it."""
        file = int(np.searchsorted(self._firsts, number, side="right")) - 1
        return file, number - int(self._firsts[file])

    def row_group(self, number: int) -> Any:
        """Read a row group's columns of the model as an Arrow table; BadDataError if damaged or changed."""
        file_number, group = self.place(number)
        file, footer = self._files.files[file_number], self._footers.of(file_number)
        first, stop = int(self._bounds[number]), int(self._bounds[number + 1])
        first_row, last_row = (self._files.locate(row)[1] for row in (first, stop - 1))

        def read() -> Any:
            with file.open() as opened:
                parquet = _open_parquet(opened, metadata=footer, pre_buffer=True, page_checksum_verification=True)
                table = parquet.read_row_group(group, columns=self._columns.names, use_threads=False)
            # pyarrow reports no error if all columns end too soon.
            if table.num_rows != stop - first:
                raise pa.ArrowInvalid(f"expected {stop - first} rows, got {table.num_rows}")
            return table

        _check_file(file)
        return guarded(file, f"rows {first_row} to {last_row} (row group {group})", read)

    def _decode(self, number: int) -> RowBlock:
        first, data = int(self._bounds[number]), self.row_group(number)
        bad = np.zeros(data.num_rows, dtype=np.bool_) if self._marks_bad else None
        return RowGroupDecoder(lambda row: self.where(first + row), bad).decode(data, self._columns)

    def problem(self, sample_id: int) -> str:
        """Return file, row, column and value of a bad row, read again."""
        number = int(np.searchsorted(self._bounds, sample_id, side="right")) - 1
        data = self.row_group(number).slice(sample_id - int(self._bounds[number]), 1)
        try:
            RowGroupDecoder(lambda _: self.where(sample_id)).decode(data, self._columns)
        except BadDataError as error:
            return str(error)
        raise AssertionError(f"{self.where(sample_id)}: a good row was marked as bad")


class Footers:
    """Give any file's footer, read when it is first wanted, and again on a small budget.

    The most recently used footers are kept within ``budget_bytes``; one alone may take more.
    """

    def __init__(self, files: Sequence[DataFile], budget_bytes: int) -> None:
        self._files, self._budget = files, budget_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self._kept_bytes = 0

    def of(self, file: int) -> Any:
        """Return a file's footer; BadDataError if the file was changed since it was found."""
        with self._lock:
            if file in self._kept:
                self._kept.move_to_end(file)
                return self._kept[file]
        found = self._files[file]
        _check_file(found)
        footer = guarded(found, "", lambda: _read_footer(found))
        with self._lock:
            self._keep(file, footer)
        return footer

    def _keep(self, file: int, footer: Any) -> None:
        # Two threads may have read the same footer.
        if file in self._kept:
            return
        self._kept[file] = footer
        self._kept_bytes += _bytes_of(footer)
        while self._kept_bytes > self._budget and len(self._kept) > 1:
            self._kept_bytes -= _bytes_of(self._kept.popitem(last=False)[1])


def _bytes_of(footer: Any) -> int:
    return max(int(footer.serialized_size), int(footer.num_row_groups) * int(footer.num_columns) * CHUNK_BYTES)


def _check_file(file: DataFile) -> None:
    """Check a local file; what is read of an object is of the very one that was listed, without another request."""
    if isinstance(file, LocalFile):
        file.check()


def _read_footer(file: DataFile) -> Any:
    with file.open() as opened:
        return _open_parquet(opened).metadata


def _open_parquet(opened: Any, **options: Any) -> Any:
    """Open a file whose footer may be of any size: pyarrow takes one of 100 MB for damage by default."""
    return pq.ParquetFile(
        opened, thrift_string_size_limit=MAX_FOOTER, thrift_container_size_limit=MAX_FOOTER, **options
    )


def _read_checked_footer(file: DataFile, opened: BinaryIO, columns: Columns) -> Any:
    def read() -> Any:
        parquet = _open_parquet(opened)
        # metadata.schema would hold the metadata and be held by it.
        return parquet.metadata, parquet.schema_arrow

    footer, schema = guarded(file, "", read)
    kinds = [hashing.kind for hashing in columns.hashings]
    unique = [name for name, kind in zip(columns.bags, kinds, strict=True) if kind == UNIQUE]
    others = [name for name, kind in zip(columns.bags, kinds, strict=True) if kind != UNIQUE]
    wanted: list[tuple[Iterable[str | None], Callable[[Any], bool], str]] = [
        ([columns.label, *columns.dense], _holds_numbers, "numbers"),
        (unique, lambda kind: _holds_ids(kind) or _holds_text(kind), "integers, strings or lists of either"),
        (
            others,
            _holds_ids,
            "integers or lists of integers; for strings set embedding.hash: unique on every table that reads the "
            "column, or number the values when the file is written",
        ),
        (columns.weights, _holds_weights, "numbers or lists of numbers"),
    ]
    for names, is_usable, expected in wanted:
        for name in filter(None, names):
            kind = _type_of(file, schema, name)
            if not is_usable(kind):
                raise BadDataError(f"{file.name}: invalid column {name}: expected {expected}, got {kind}")
    return footer


def _type_of(file: DataFile, schema: Any, column: str) -> Any:
    places = schema.get_all_field_indices(column)
    if len(places) > 1:
        raise BadDataError(f"{file.name}: ambiguous column {column}: {len(places)} columns have this name; rename them")
    if file.table:
        _check_table(file, file.table, schema.field(places[0]) if places else None, column)
    if not places:
        names = schema.names
        more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
        raise BadDataError(
            f"{file.name}: column not found: {column}; set data.columns (label, rename) to one of "
            f"{', '.join(names[:_SHOWN_NAMES])}{more}"
        )
    return schema.field(places[0]).type


def _check_table(file: DataFile, table: TableColumns, found: Any, column: str) -> None:
    """Check that a file's column of this name is the table's, if the file has one."""
    if found is None and column in table.partitioned_by:
        raise BadDataError(
            f"{file.name}: {column} is a partition column, and only the table's metadata has its values; write it into "
            "the files as a column of another name"
        )
    if found is None or not table.ids:
        return
    wanted, stored = table.ids.get(column), (found.metadata or {}).get(b"PARQUET:field_id")
    if wanted is None or (stored is not None and int(stored) != wanted):
        raise BadDataError(
            f"{file.name}: column {column} is not the table's: it was renamed, dropped or replaced (field id "
            f"{int(stored or -1)}, the table's is {wanted}); rewrite the table's files"
        )


def guarded(file: DataFile, rows: str, read: Callable[[], Any]) -> Any:
    """Call ``read``; its errors name file and rows: NoInputError (gone), BadDataError (changed, damaged)."""
    try:
        return read()
    except FileNotFoundError as error:
        raise NoInputError(f"file not found: {file.name}; it was removed after this run found it") from error
    except (pa.ArrowException, OSError) as error:
        # A file that was changed meanwhile is not damaged.
        file.check()
        reason = str(error).partition("\n")[0][:200]
        if "decrypt" in reason.lower():
            problem = "encrypted Parquet is not supported; write it without encryption"
            raise BadDataError(f"{file.name}: {problem}") from error
        what = f"cannot decode {rows}: damaged" if rows else "not a Parquet file, or damaged"
        raise BadDataError(f"{file.name}: {what} ({reason}); write or copy it again") from error


@dataclass(frozen=True)
class _Bags:
    """One column of bags: their ids or weights, one after the other."""

    sizes: NDArray[np.int32] | None
    """None: one each."""
    values: NDArray[Any]


@dataclass(frozen=True)
class RowGroupDecoder:
    """Check and convert the columns of a row group; ``where`` names a row of the group for messages."""

    where: Callable[[int], str]
    bad: NDArray[np.bool_] | None = None
    """(r,) marks to set at bad rows; None: they raise BadDataError."""

    def decode(self, data: pa.Table, columns: Columns) -> RowBlock:
        """Convert all columns that the model reads; BadDataError names file, row and column of a bad value."""
        block = self._convert(data, columns)
        return block if self.bad is None or not self.bad.any() else replace(block, bad=self.bad)

    def _convert(self, data: pa.Table, columns: Columns) -> RowBlock:
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
        ids = np.concatenate([each.values for each in bags], dtype=np.int64)
        return pack_bags(dense, np.stack(sizes), ids, weights)

    def _labels(self, column: Any, name: str, labels: Numbers) -> None:
        values = column.cast(pa.float64(), safe=False).to_numpy()
        if put_labels(values, labels) >= 0:
            self._found(np.flatnonzero((values != 0) & (values != 1)), column, name, "expected a label of 0 or 1")

    def _dense(self, column: Any, name: str, values: Numbers) -> None:
        """Copy a column's values to ``values`` (r,), NaN where null."""
        array = _array(column if column.type == pa.float32() else column.cast(pa.float64(), safe=False))
        # The loop reads validity bits from the first on.
        if array.offset:
            array = pa.concat_arrays([array])
        validity, held = array.buffers()
        valid = np.frombuffer(validity, np.uint8) if array.null_count else _NO_BITS
        kind = np.float32 if array.type == pa.float32() else np.float64
        if put_floats(np.frombuffer(held, kind), valid, values) >= 0:
            present = array.is_valid().to_numpy(zero_copy_only=False)
            rows = np.flatnonzero(present & ~np.isfinite(values))
            self._found(rows, column, name, "expected a finite float32, or null for a missing value")

    def _ids(self, data: pa.Table, name: str, hashing: Hashing, place: int, singles: SingleIds) -> _Bags:
        """Return a feature's rows, in ``singles`` if each bag has one; null is an empty bag."""
        few = hashing.kind in (MODULO, MIX) and int(hashing.rows) <= 2**32
        # Mixed, short ids become any row or key.
        kept = hashing.kind in (NONE, MODULO) and _fits_uint32(data.schema.field(name).type)
        column = singles.column(place, narrow=few or kept)
        sizes, flat = self._flat(data[name], name, "ids")
        rows = column if sizes is None else np.empty(len(flat), dtype=np.int64)
        ids = _hashed_texts(flat) if flat.type == _TEXT else flat.to_numpy(zero_copy_only=False)
        # Other types are not worth a compiled loop of their own.
        if ids.dtype != np.uint32:
            ids = ids.astype(np.int64, copy=False)
        put_rows_of(ids, hashing, rows)
        return _Bags(sizes, rows)

    def _weights(self, data: pa.Table, name: str | None, ids_name: str, ids: _Bags) -> Numbers:
        """Return a feature's weights, as many as its ids."""
        if name is None:
            return np.ones(ids.values.size, dtype=np.float32)
        column = data[name]
        sizes, flat = self._flat(column, name, "weights")
        ones = np.ones(data.num_rows, dtype=np.int32)
        own, wanted = (ones if each is None else each for each in (sizes, ids.sizes))
        differ = own != wanted
        if differ.any():
            row = int(differ.argmax())
            problem = f"expected {wanted[row]} weights, one for each id of column {ids_name}, found {own[row]}"
            self._found(np.flatnonzero(differ), column, name, problem)
        with np.errstate(over="ignore"):
            values: Numbers = flat.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
        if not np.isfinite(values).all():
            rows = np.repeat(np.arange(own.size), own)[~np.isfinite(values)]
            self._found(rows, column, name, "expected finite float32 weights")
        if differ.any():
            aligned: Numbers = np.ones(ids.values.size, dtype=np.float32)
            aligned[np.repeat(~differ, wanted)] = values[np.repeat(~differ, own)]
            return aligned
        return values

    def _flat(self, column: Any, name: str, what: str) -> tuple[NDArray[np.int32] | None, Any]:
        """Return bag sizes (r,), None where all are 1, and what the bags hold, one after the other."""
        if _holds_text(column.type):
            array = _array(column.cast(pa.large_list(_TEXT) if _is_list(column.type) else _TEXT))
        else:
            array = _array(column)
        if isinstance(array.type, pa.DictionaryType):
            array = array.dictionary_decode()
        if not _is_list(array.type):
            if not array.null_count:
                return None, array
            return array.is_valid().to_numpy(zero_copy_only=False).astype(np.int32), array.drop_null()
        sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int32)
        flat = array.flatten()
        if flat.null_count:
            holed = np.repeat(np.arange(sizes.size), sizes)[flat.is_null().to_numpy(zero_copy_only=False)]
            self._found(holed, column, name, f"expected no null in the list; leave missing {what} out of it")
            sizes, flat = sizes - np.bincount(holed, minlength=sizes.size).astype(np.int32), flat.drop_null()
        return None if (sizes == 1).all() else sizes, flat

    def _found(self, rows: NDArray[np.intp], column: Any, name: str, problem: str) -> None:
        """Mark bad rows, ascending, or refuse the first."""
        if self.bad is not None:
            self.bad[rows] = True
            return
        row = int(rows[0])
        value = repr(column[row].as_py())[:60]
        raise BadDataError(f"{self.where(row)}: invalid column {name}: {problem}, got {value}")


def _array(column: Any) -> Any:
    """Return a column in one piece, without a copy if it is in one already."""
    if column.num_chunks == 1:
        return column.chunk(0)
    array = column.combine_chunks()
    return pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array


def _hashed_texts(texts: Any) -> Ints:
    """Return the ids (n,) of texts without nulls."""
    ids = np.empty(len(texts), dtype=np.int64)
    if len(texts):
        _, offsets, held = texts.buffers()
        bounds = np.frombuffer(offsets, np.int64)[texts.offset : texts.offset + len(texts) + 1]
        hash_texts(np.frombuffer(held, np.uint8) if held else _NO_BITS, bounds, ids)
    return ids


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _fits_uint32(kind: Any) -> bool:
    each = kind.value_type if _is_list(kind) else kind
    return bool(pa.types.is_unsigned_integer(each) and each.bit_width <= 32)


def _holds_numbers(kind: Any) -> bool:
    is_real = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return bool(is_real or pa.types.is_boolean(kind) or pa.types.is_decimal(kind))


def _holds_weights(kind: Any) -> bool:
    return _holds_numbers(kind.value_type if _is_list(kind) else kind)


def _holds_ids(kind: Any) -> bool:
    holds_others = _is_list(kind) or isinstance(kind, pa.DictionaryType)
    return bool(pa.types.is_integer(kind.value_type if holds_others else kind))


def _holds_text(kind: Any) -> bool:
    each = kind.value_type if _is_list(kind) else kind
    return (each.value_type if isinstance(each, pa.DictionaryType) else each) in _TEXTS
