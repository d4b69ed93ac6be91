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
from dlrm_kernels.cache import kernel
from dlrm_trainer.data.lookups import MIX, NONE, Hashing, put_rows_of
from dlrm_trainer.data.packed import Numbers, PackedRows, SingleIds, pack_bags
from dlrm_trainer.data.scratch import scratch

NO_BITS = np.empty(0, dtype=np.uint8)
_THREE, _SEVEN, _EIGHT = np.uint64(3), np.uint64(7), np.uint64(8)
_NAN = np.float32(np.nan)


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


@kernel
def put_labels(values: NDArray[np.float64], labels: Numbers) -> int:
    """Put labels; returns the first that is none, or -1."""
    bad = 0
    for row in range(values.size):
        labels[row] = values[row]
        bad += int(values[row] != 0.0) & int(values[row] != 1.0)
    if bad:
        for row in range(values.size):
            if values[row] != 0.0 and values[row] != 1.0:
                return row
    return -1


@kernel
def put_floats(values: NDArray[Any], valid: NDArray[np.uint8], floats: Numbers) -> int:
    """Put values, NaN where null.

    Args:
        values: (r,).
        valid: a bit for each; empty: all are valid.
        floats: (r,) to be filled in.

    Returns:
        the first that is valid and not finite as a float32, or -1.
    """
    bad = np.int32(0)
    whole = np.uint64(floats.size // 8 if valid.size else 0)
    for byte in range(whole):
        bits = np.int32(valid[byte])
        for bit in range(np.uint64(8)):
            value = np.float32(values[byte * _EIGHT + bit])
            good = bits >> np.int32(bit) & np.int32(1)
            nothing = value - value  # 0, or NaN where the value is not finite
            bad += good & np.int32(nothing != nothing)
            floats[byte * _EIGHT + bit] = value if good else _NAN
    for row in range(whole * _EIGHT, np.uint64(floats.size)):
        value = np.float32(values[row])
        good = np.int32(valid[row >> _THREE]) >> np.int32(row & _SEVEN) & np.int32(1) if valid.size else np.int32(1)
        nothing = value - value
        bad += good & np.int32(nothing != nothing)
        floats[row] = value if good else _NAN
    if bad:
        for place in range(floats.size):
            if not np.isfinite(floats[place]) and (not valid.size or valid[place >> 3] >> (place & 7) & 1):
                return place
    return -1


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
