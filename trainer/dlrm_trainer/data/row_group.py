"""One decoded row group of a Parquet file: numbers, checked, in arrays that rows are taken from quickly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_trainer.data.lookups import NONE, Hashing, put_rows_of
from dlrm_trainer.data.packed import PackedRows, SingleIds, pack_bags
from dlrm_trainer.data.scratch import scratch


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
        dense[0] = self._labels(data[columns.label], columns.label)
        for place, name in enumerate(columns.dense, start=1):
            self._dense(data, name, dense[place])
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

    def _labels(self, column: Any, name: str) -> NDArray[np.float32]:
        values = column.cast(pa.float64(), safe=False).to_numpy()
        bad = (values != 0.0) & (values != 1.0)
        if bad.any():
            self._refuse(bad, column, name, "is no label: it must be 0 or 1")
        return np.asarray(values, dtype=np.float32)

    def _dense(self, data: pa.Table, name: str, values: NDArray[np.float32]) -> None:
        """Put a column's values into ``values`` (r,), NaN where null."""
        column = data[name]
        if column.type != pa.float32():
            column = column.cast(pa.float64(), safe=False)
        with np.errstate(over="ignore"):
            values[:] = column.to_numpy()
        if values.size - np.count_nonzero(np.isfinite(values)) != column.null_count:
            bad = ~np.isfinite(values) & column.is_valid().to_numpy()
            problem = "is not finite (as float32): mend the row, or write null for a missing value"
            self._refuse(bad, data[name], name, problem)

    def _ids(self, data: pa.Table, name: str, hashing: Hashing, place: int, singles: SingleIds) -> _Bags:
        """A feature's rows, in ``singles`` where each bag has one; a null bag and a null scalar are empty bags."""
        few = hashing.kind != NONE and int(hashing.rows) <= 2**32
        column = singles.column(place, narrow=few or holds_narrow(data.schema.field(name).type))
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
            self._refuse(own != wanted, column, name, problem)
        with np.errstate(over="ignore"):
            values: NDArray[np.float32] = (
                flat.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False).astype(np.float32)
            )
        if not np.isfinite(values).all():
            rows = np.repeat(np.arange(own.size), own)
            bad = np.zeros(own.size, dtype=bool)
            bad[rows[~np.isfinite(values)]] = True
            self._refuse(bad, column, name, "holds a weight that is not finite (as float32): mend the row")
        return values

    def _flat(self, column: Any, name: str, what: str) -> tuple[NDArray[np.int32] | None, Any]:
        """Bag sizes (r,), None where all are 1, and what the bags hold, one after the other."""
        array: Any = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        if isinstance(array.type, pa.DictionaryType):
            array = array.dictionary_decode()
        if not is_list(array.type):
            if not array.null_count:
                return None, array
            return array.is_valid().to_numpy(zero_copy_only=False).astype(np.int32), array.drop_null()
        sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int32)
        flat = array.flatten()
        if flat.null_count:
            bags = np.repeat(np.arange(sizes.size), sizes)
            holed = np.zeros(sizes.size, dtype=bool)
            holed[bags[flat.is_null().to_numpy(zero_copy_only=False)]] = True
            self._refuse(holed, column, name, f"has a null inside the list: leave missing {what} out of the list")
        return None if (sizes == 1).all() else sizes, flat

    def _refuse(self, bad: NDArray[np.bool_], column: Any, name: str, problem: str) -> NoReturn:
        row = int(bad.argmax())
        value = repr(column[row].as_py())[:60]
        raise BadDataError(f"{self.where(row)}: column {name}: {value} {problem}")


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
