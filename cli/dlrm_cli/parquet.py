"""A table's rows as one Parquet file, a row group a block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from dlrm_api.errors import UsageError
from dlrm_checkpointer.cut import TableMeta
from dlrm_checkpointer.reading.precision import Precision
from dlrm_checkpointer.reading.table_files import TableFile


class Parquet:
    """Parquet files: ``row_id`` int64, and the arrays of ``at_precision``, vectors as lists of a fixed size."""

    name = "parquet"
    suffix = ".parquet"

    def check(self, precision: Precision) -> None:
        """Refuse a precision that files of this kind don't know.

        Raises:
            UsageError: Parquet has no such numbers.
        """
        if precision == "bf16":
            raise UsageError("Parquet has no bf16: take --precision fp16, or --format safetensors")

    def open(self, path: Path, table: TableMeta, precision: Precision, *, all_rows: bool) -> TableFile:  # noqa: ARG002
        """A new file; row numbers are always in it, because engines that read it may change the order."""
        vector = {"fp32": pa.float32(), "fp16": pa.float16(), "int8": pa.uint8()}[precision]
        name = "codes" if precision == "int8" else "weights"
        columns = [("row_id", pa.int64()), (name, pa.list_(vector, table.dim))]
        if precision == "int8":
            columns += [("scale", pa.float32()), ("low", pa.float32())]
        return _ParquetFile(path, pa.schema([pa.field(*column, nullable=False) for column in columns]))


class _ParquetFile:
    def __init__(self, path: Path, schema: Any) -> None:
        self._schema, self._writer = schema, pq.ParquetWriter(path, schema)

    def add(self, row_ids: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]]) -> None:
        columns = {"row_id": row_ids, **arrays}
        found = [_column(columns[field.name], field.type) for field in self._schema]
        self._writer.write_batch(pa.record_batch(found, schema=self._schema), row_group_size=max(1, len(row_ids)))

    def close(self) -> None:
        self._writer.close()


def _column(array: NDArray[Any], kind: Any) -> Any:
    if array.ndim == 1:
        return pa.array(array, kind)
    flat = pa.array(np.ascontiguousarray(array).reshape(-1), kind.value_type)
    return pa.FixedSizeListArray.from_arrays(flat, type=kind)
