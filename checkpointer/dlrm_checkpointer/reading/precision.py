"""Rows as a server of a model takes them: at full or half precision, or as 8-bit codes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.coding.codes import code_rows
from dlrm_checkpointer.types import ShardRows, TableMeta

Precision = Literal["fp32", "fp16", "bf16", "int8"]
BF16_DROPPED_BITS = 16
INFINITE_BF16 = 0x7F80


def at_precision(
    table: TableMeta, row_ids: NDArray[np.int64], rows: NDArray[np.float32], precision: Precision
) -> dict[str, NDArray[Any]]:
    """Whole rows of a table in another form.

    Args:
        table: theirs.
        row_ids: (N,) ascending.
        rows: (N, dim) finite weights.
        precision: of the answer.

    Returns:
        ``weights`` (N, dim): float32, float16, or bf16 as the upper half of a float32's bits in uint16, each rounded
        to the nearest, ties to even. At int8 ``codes`` (N, dim) uint8, ``scale`` and ``low`` (N,) float32: a weight is
        ``float32(code) * scale + low``, both rounded to float32 (``codes.code_rows`` at 8 bits).

    Raises:
        SnapshotError: a weight is too large; names the table and the row.
    """
    if precision == "fp32":
        return {"weights": rows}
    if precision == "int8":
        return _codes(table, row_ids, rows)
    if precision == "fp16":
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        _refuse_large(table, row_ids, np.isinf(halves), precision)
        return {"weights": halves}
    bits = rows.view(np.uint32)
    odd = (bits >> np.uint32(BF16_DROPPED_BITS)) & np.uint32(1)
    words = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(BF16_DROPPED_BITS)).astype(np.uint16)
    _refuse_large(table, row_ids, (words & np.uint16(0x7FFF)) >= INFINITE_BF16, precision)
    return {"weights": words}


def _refuse_large(table: TableMeta, row_ids: NDArray[np.int64], large: NDArray[np.bool_], precision: str) -> None:
    if large.any():
        row = row_ids[int(np.argmax(large.any(axis=1)))]
        raise SnapshotError(f"table {table.name}, row {row}: a weight is too large for {precision}: use fp32")


def _codes(table: TableMeta, row_ids: NDArray[np.int64], rows: NDArray[np.float32]) -> dict[str, NDArray[Any]]:
    none = np.empty((len(row_ids), 0), np.float32)
    found: dict[str, NDArray[Any]] = {
        "codes": np.empty(rows.shape, np.uint8),
        "scale": np.empty(len(row_ids), np.float32),
        "low": np.empty(len(row_ids), np.float32),
    }
    if not len(row_ids):
        return found
    for piece in code_rows(ShardRows(shard=table.whole(), row_ids=row_ids, rows=rows, state=none), 8):
        at = np.searchsorted(row_ids, piece.row_ids)
        factor = np.float32(2.0**piece.form.exponent)
        found["codes"][at] = piece.body
        found["scale"][at] = piece.scale.astype(np.float32) * factor
        found["low"][at] = piece.low.astype(np.float32) * factor
    return found
