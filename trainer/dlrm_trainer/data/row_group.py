"""One decoded row group of a Parquet file: numbers, checked, in arrays that rows are taken from quickly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dlrm_api.errors import BadDataError
from dlrm_trainer.data.ranges import range_indexes


@dataclass(frozen=True)
class DecodedRows:
    """Rows of one row group. Ids lie row by row, and in a row table by table."""

    dense: NDArray[np.float32]
    """(r, F), NaN where null."""
    labels: NDArray[np.float32]
    """(r,)."""
    lengths: NDArray[np.int32]
    """(r, T) ids in each bag."""
    starts: NDArray[np.int64]
    """(r + 1,) where each row's ids start."""
    ids: NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return sum(array.nbytes for array in (self.dense, self.labels, self.lengths, self.starts, self.ids))


@dataclass(frozen=True)
class RowGroupDecoder:
    """Turns a row group's columns into arrays; ``path`` and ``first_row`` are for messages."""

    path: Path
    first_row: int

    def decode(self, data: pa.Table, label: str, dense: Sequence[str], tables: Sequence[str]) -> DecodedRows:
        """Check and convert all columns that the model reads.

        Raises:
            BadDataError: a value can't be used; the message names file, row and column.
        """
        values = np.empty((data.num_rows, len(dense)), dtype=np.float32)
        for place, name in enumerate(dense):
            values[:, place] = self._dense(data[name], name)
        bags = [self._bags(data[name], name) for name in tables]
        lengths = np.stack([sizes for sizes, _ in bags], axis=1)
        stops: NDArray[np.int64] = np.cumsum(lengths.astype(np.int64)).reshape(lengths.shape)
        ids = np.empty(int(stops[-1, -1]), dtype=np.int64)
        for place, (sizes, bag_ids) in enumerate(bags):
            ids[range_indexes(stops[:, place] - sizes, sizes)] = bag_ids
        return DecodedRows(
            dense=values,
            labels=self._labels(data[label], label),
            lengths=lengths,
            starts=np.concatenate(([0], stops[:, -1])),
            ids=ids,
        )

    def _labels(self, column: Any, name: str) -> NDArray[np.float32]:
        values = column.cast(pa.float64(), safe=False).to_numpy()
        bad = (values != 0.0) & (values != 1.0)
        if bad.any():
            self._refuse(bad, column, name, "is no label: it must be 0 or 1")
        return np.asarray(values, dtype=np.float32)

    def _dense(self, column: Any, name: str) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            values: NDArray[np.float32] = column.cast(pa.float64(), safe=False).to_numpy().astype(np.float32)
        bad = ~np.isfinite(values)
        if column.null_count:
            bad &= column.is_valid().to_numpy()
        if bad.any():
            problem = "is not finite (as float32): mend the row, or write null for a missing value"
            self._refuse(bad, column, name, problem)
        return values

    def _bags(self, column: Any, name: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """Bag sizes (r,) and ids; a null bag and a null scalar are empty bags."""
        array: Any = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        if isinstance(array.type, pa.DictionaryType):
            array = array.dictionary_decode()
        if is_list(array.type):
            sizes = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int32)
            flat = array.flatten()
            if flat.null_count:
                bags = np.repeat(np.arange(sizes.size), sizes)
                holed = np.zeros(sizes.size, dtype=bool)
                holed[bags[flat.is_null().to_numpy(zero_copy_only=False)]] = True
                self._refuse(holed, column, name, "has a null inside the list: leave missing ids out of the list")
        else:
            sizes = array.is_valid().to_numpy(zero_copy_only=False).astype(np.int32)
            flat = array.drop_null()
        if pa.types.is_uint64(flat.type):
            return sizes, flat.to_numpy(zero_copy_only=False).view(np.int64)  # hashes take ids as 64 bits
        return sizes, flat.cast(pa.int64()).to_numpy(zero_copy_only=False)

    def _refuse(self, bad: NDArray[np.bool_], column: Any, name: str, problem: str) -> NoReturn:
        row = int(bad.argmax())
        value = repr(column[row].as_py())[:60]
        raise BadDataError(f"{self.path}: row {self.first_row + row}: column {name}: {value} {problem}")


def is_list(kind: Any) -> bool:
    """Whether an Arrow type is some list."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def holds_numbers(kind: Any) -> bool:
    """Whether an Arrow type can be a label or a dense value."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_decimal(kind)
    )


def holds_ids(kind: Any) -> bool:
    """Whether an Arrow type can be an id or a bag of ids."""
    if is_list(kind) or isinstance(kind, pa.DictionaryType):
        return bool(pa.types.is_integer(kind.value_type))
    return bool(pa.types.is_integer(kind))
