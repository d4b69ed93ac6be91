"""Objects of a snapshot as bytes: chunks of rows and the dense state, each a safetensors container."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.cut import ShardId, ShardRows
from dlrm_checkpointer.quantize import dequantize_rows, quantize_rows

OBJECT_VERSION = 1
METADATA_KEY = "dlrm"
"""The one entry of the container's metadata, a JSON object: with more than one their order would be left to chance."""
LARGEST_AT_8_BITS = np.float32(2.0**126)
DTYPES = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}
"""safetensors' names of the types that occur, as numpy's."""
HEADER_LENGTH_BYTES = 8


def encode_rows(piece: ShardRows, bits: int) -> bytes:
    """One chunk. Equal rows give equal bytes.

    Raises:
        SnapshotError: names the table and the row of a value that can't be stored.
    """
    _check_finite(piece, bits)
    arrays: dict[str, NDArray[Any]] = {"row_ids": piece.row_ids, "state": piece.state}
    if bits == 32:
        arrays["rows"] = piece.rows
    else:
        arrays["codes"], arrays["step"], arrays["low"] = quantize_rows(piece.rows)
    meta = {"version": OBJECT_VERSION, "kind": "rows", "bits": bits, **shard_json(piece.shard)}
    return _save(arrays, meta)


def decode_rows(body: bytes, key: str) -> ShardRows:
    """Read a chunk; the arrays of a 32-bit chunk are views of ``body``.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    meta, arrays = _load(body, key, "rows")
    try:
        exact = meta["bits"] == 32
        rows = arrays["rows"] if exact else dequantize_rows(*(arrays[name] for name in ("codes", "step", "low")))
        shard = shard_of(meta)
        piece = ShardRows(shard=shard, row_ids=arrays["row_ids"], rows=rows, state=arrays["state"])
    except (KeyError, TypeError, ValueError) as error:
        raise SnapshotError(f"{key}: not a chunk of rows as the format says: {error!r}") from error
    return piece


def encode_dense(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """The dense parameters and dense optimizer state, as they are.

    Raises:
        SnapshotError: names the array that holds a value that is not finite.
    """
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SnapshotError(f"dense {name} holds a value that is not finite: the cut is not stored")
    return _save(dict(arrays), {"version": OBJECT_VERSION, "kind": "dense"})


def decode_dense(body: bytes, key: str) -> dict[str, NDArray[Any]]:
    """Read the dense state.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    return {name: array.copy() for name, array in _load(body, key, "dense")[1].items()}


def shard_json(shard: ShardId) -> dict[str, Any]:
    """A rectangle as the format writes it."""
    return {
        "table": shard.table,
        "rowStart": shard.row_start,
        "rowEnd": shard.row_end,
        "columnStart": shard.column_start,
        "columnEnd": shard.column_end,
    }


def shard_of(value: Mapping[str, Any]) -> ShardId:
    """Read ``shard_json``'s form."""
    return ShardId(
        table=str(value["table"]),
        row_start=int(value["rowStart"]),
        row_end=int(value["rowEnd"]),
        column_start=int(value["columnStart"]),
        column_end=int(value["columnEnd"]),
    )


def _save(arrays: dict[str, NDArray[Any]], meta: dict[str, Any]) -> bytes:
    little = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    return bytes(save(little, {METADATA_KEY: json.dumps(meta, sort_keys=True, separators=(",", ":"))}))


def _load(body: bytes, key: str, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Header and arrays (views of ``body``); the library would copy, and hides the metadata."""
    try:
        start = HEADER_LENGTH_BYTES + int.from_bytes(body[:HEADER_LENGTH_BYTES], "little")
        header = json.loads(body[HEADER_LENGTH_BYTES:start])
        meta = json.loads(header.pop("__metadata__")[METADATA_KEY])
        arrays = {}
        for name, entry in header.items():
            begin, end = (start + offset for offset in entry["data_offsets"])
            arrays[name] = np.frombuffer(body[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        version, found = int(meta["version"]), meta["kind"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{key}: not a safetensors container of this format: {error!r}") from error
    if version > OBJECT_VERSION:
        raise SnapshotError(
            f"{key}: object version {version}, this program reads up to {OBJECT_VERSION}: use a newer dlrm-operator"
        )
    if found != kind:
        raise SnapshotError(f"{key}: holds {found}, not {kind}")
    return meta, arrays


def _check_finite(piece: ShardRows, bits: int) -> None:
    for name, array in (("a weight", piece.rows), ("its optimizer state", piece.state)):
        finite = np.isfinite(array)
        if not finite.all():
            row = piece.row_ids[int(np.argmin(finite.all(axis=1)))]
            raise SnapshotError(f"table {piece.shard.table}, row {row}: {name} is not finite: the cut is not stored")
    if bits < 32 and piece.rows.size:
        large = np.abs(piece.rows).max(axis=1) >= LARGEST_AT_8_BITS
        if large.any():
            row = piece.row_ids[int(np.argmax(large))]
            raise SnapshotError(
                f"table {piece.shard.table}, row {row}: a weight of 2**126 or more does not fit {bits} bits: "
                "the model has diverged, or use spec.checkpoint.bits 32"
            )
