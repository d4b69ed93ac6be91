"""Encode and decode a snapshot's objects: chunks of rows and dense state, as safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.row_ids import decode_ids, encode_ids
from dlrm_checkpointer.codec.rows import EMPTY, QUANTIZERS, ChunkEncoding, CodedRows
from dlrm_checkpointer.format.manifest import ObjectEntry
from dlrm_checkpointer.types import ShardId
from dlrm_stores import ObjectStore
from dlrm_stores.base import Body

OBJECT_VERSION = 2
METADATA_KEY = "dlrm"
"""The only entry of the container's metadata, a JSON object: the order of several entries is not deterministic."""
DTYPES = {
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "U8": "|u1",
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "I32": "<i4",
    "I64": "<i8",
    "BOOL": "|b1",
}
"""numpy type of each safetensors type name."""
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
FIRST_TYPES = ("U64", "I64", "F64", "F32", "U32", "I32", "F16", "U16", "U8", "BOOL")
"""Order in which the safetensors library writes arrays of different types; those of one type are sorted by name."""
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
ALIGNMENT = 8
"""Alignment of the data, by spaces at the end of the header."""
MAX_ROW_NUMBERS = 1 << 23
"""Largest number of row numbers in one object. Contiguous ones take no bytes, so the size does not bound them."""


def encode_rows(coded: CodedRows) -> memoryview:
    """Encode one chunk of at least one row. Equal rows give equal bytes."""
    form = coded.form
    arrays: dict[str, NDArray[Any]] = {"state": coded.state, **encode_ids(coded.row_ids)}
    if QUANTIZERS[form.bits].has_scale:
        arrays |= {"codes": coded.body, "scale": coded.scale, "low": coded.low}
    else:
        arrays["rows"] = coded.body
    meta = {
        "version": OBJECT_VERSION,
        "kind": "rows",
        "bits": form.bits,
        "exponent": form.exponent,
        "firstRow": int(coded.row_ids[0]),
        "rows": len(coded.row_ids),
        **shard_json(coded.shard),
    }
    return _save(arrays, meta)


def decode_rows(body: Body, key: str) -> CodedRows:
    """Decode a chunk; all arrays except the row numbers are views of ``body``.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    meta, arrays = _load(body, key, "rows")
    try:
        return _coded_rows(meta, arrays)
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise SnapshotError(f"{key}: not a chunk of rows as the format says: {error!r}") from error


def _coded_rows(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> CodedRows:
    shard, count = shard_of(meta), int(meta["rows"])
    form = ChunkEncoding(meta["bits"], int(meta["exponent"]))
    quantizer = QUANTIZERS.get(form.bits) if type(form.bits) is int else None
    if quantizer is None or form.exponent not in quantizer.exponents:
        raise ValueError(f"{form.bits} bits with exponent {form.exponent}")
    if shard.width < 1 or shard.row_start < 0 or shard.column_start < 0:
        raise ValueError(f"invalid shard {shard}")
    first = int(meta["firstRow"])
    if first < shard.row_start:
        raise ValueError(f"row {first} lies outside {shard}")
    coded = quantizer.has_scale
    halves = (np.float16, (count,)), (np.float16, (count,))
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {
        "codes" if coded else "rows": (quantizer.dtype, (count, quantizer.columns(shard.width))),
        "state": (np.float32, (count, arrays["state"].shape[-1])),
        **(dict(zip(("scale", "low"), halves, strict=True)) if coded else {}),
    }
    for name, (kind, shape) in wanted.items():
        array = arrays[name]
        if array.dtype != kind or array.shape != shape:
            raise ValueError(f"{name} is {array.dtype}{array.shape}, not {np.dtype(kind)}{shape}")
        if name in ("scale", "low") and not np.isfinite(array).all():
            raise ValueError(f"{name} is not finite")
    return CodedRows(
        shard=shard,
        row_ids=decode_ids(arrays, first, count, shard.row_end),
        form=form,
        body=arrays["codes" if coded else "rows"],
        scale=arrays["scale"] if coded else EMPTY,
        low=arrays["low"] if coded else EMPTY,
        state=arrays["state"],
    )


def encode_row_numbers(table: str, row_ids: NDArray[np.int64]) -> memoryview:
    """Encode 1 to ``MAX_ROW_NUMBERS`` strictly ascending row numbers. Equal ones give equal bytes."""
    meta = {
        "version": OBJECT_VERSION,
        "kind": "row-numbers",
        "table": table,
        "firstRow": int(row_ids[0]),
        "rows": len(row_ids),
    }
    return _save(encode_ids(row_ids), meta)


def decode_row_numbers(body: Body, key: str, table: str, rows: int) -> NDArray[np.int64]:
    """Decode row numbers of a table with ``rows`` rows: (N,) strictly ascending.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    meta, arrays = _load(body, key, "row-numbers")
    try:
        if meta["table"] != table:
            raise ValueError(f"is of table {meta['table']}, not {table}")
        count = int(meta["rows"])
        if count > MAX_ROW_NUMBERS:
            raise ValueError(f"expected at most {MAX_ROW_NUMBERS} row numbers, got {count}")
        return decode_ids(arrays, int(meta["firstRow"]), count, rows)
    except (LookupError, OverflowError, TypeError, ValueError) as error:
        raise SnapshotError(f"{key}: not row numbers as the format says: {error!r}") from error


def encode_dense(arrays: Mapping[str, NDArray[Any]]) -> memoryview:
    """Encode the dense parameters and dense optimizer state without loss.

    Raises:
        SnapshotError: names the array that holds a value that is not finite.
    """
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SnapshotError(f"dense {name} holds a value that is not finite: the cut is not stored")
    return _save(dict(arrays), {"version": OBJECT_VERSION, "kind": "dense"})


def decode_dense(body: Body, key: str) -> dict[str, NDArray[Any]]:
    """Decode the dense state.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    return {name: array.copy() for name, array in _load(body, key, "dense")[1].items()}


def shard_json(shard: ShardId) -> dict[str, Any]:
    """Return a rectangle as the format writes it."""
    return {
        "table": shard.table,
        "rowStart": shard.row_start,
        "rowEnd": shard.row_end,
        "columnStart": shard.column_start,
        "columnEnd": shard.column_end,
    }


def shard_of(value: Mapping[str, Any]) -> ShardId:
    """Parse the result of ``shard_json``."""
    return ShardId(
        table=str(value["table"]),
        row_start=int(value["rowStart"]),
        row_end=int(value["rowEnd"]),
        column_start=int(value["columnStart"]),
        column_end=int(value["columnEnd"]),
    )


def _save(arrays: dict[str, NDArray[Any]], meta: dict[str, Any]) -> memoryview:
    """Encode as the safetensors library does, byte for byte, with one copy where the library makes three."""
    little = {name: np.asarray(array, array.dtype.newbyteorder("<")) for name, array in arrays.items()}
    types = {name: NAMES[array.dtype] for name, array in little.items()}
    order = sorted(little, key=lambda name: (FIRST_TYPES.index(types[name]), name))
    header: dict[str, Any] = {"__metadata__": {METADATA_KEY: json.dumps(meta, sort_keys=True, separators=(",", ":"))}}
    begin = 0
    for name in order:
        end = begin + little[name].nbytes
        header[name] = {"dtype": types[name], "shape": little[name].shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    start = HEADER_LENGTH_BYTES + len(text)
    body = np.empty(start + begin, np.uint8)
    body[:start] = np.frombuffer(len(text).to_bytes(HEADER_LENGTH_BYTES, "little") + text, np.uint8)
    for name in order:
        array, (begin, end) = little[name], header[name]["data_offsets"]
        if array.nbytes:
            body[start + begin : start + end].view(array.dtype).reshape(array.shape)[...] = array
    return body.data


def _load(body: Body, key: str, kind: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return metadata and arrays (views of ``body``); the library would copy, and hides the metadata."""
    try:
        length = int.from_bytes(body[:HEADER_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
        data = memoryview(body)[HEADER_LENGTH_BYTES + length :]
        header = json.loads(bytes(body[HEADER_LENGTH_BYTES : HEADER_LENGTH_BYTES + length]))
        meta = json.loads(header.pop("__metadata__")[METADATA_KEY])
        _check_ranges([entry["data_offsets"] for entry in header.values()], len(data))
        arrays = {name: _array(data, entry) for name, entry in header.items()}
        version, found = int(meta["version"]), meta["kind"]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{key}: not a safetensors container of this format: {error!r}") from error
    if version > OBJECT_VERSION:
        raise SnapshotError(
            f"{key}: object version {version}, this program reads up to {OBJECT_VERSION}: use a newer dlrm-operator"
        )
    if version < OBJECT_VERSION:
        raise SnapshotError(f"{key}: object version {version}, which was never released, is not read any more")
    if found != kind:
        raise SnapshotError(f"{key}: holds {found}, not {kind}")
    return meta, arrays


def _check_ranges(ranges: Sequence[Sequence[int]], size: int) -> None:
    """Check that the arrays fill the data exactly, without gap or overlap.

    Raises:
        ValueError: names the range.
    """
    at = 0
    for begin, end in sorted((begin, end) for begin, end in ranges):
        if type(begin) is not int or type(end) is not int or not at == begin <= end <= size:
            raise ValueError(f"data_offsets [{begin}, {end}] do not follow byte {at} of {size} bytes of data")
        at = end
    if at != size:
        raise ValueError(f"arrays take {at} of {size} bytes of data")


def _array(data: memoryview, entry: Mapping[str, Any]) -> NDArray[Any]:
    begin, end = entry["data_offsets"]
    shape = [size for size in entry["shape"] if type(size) is int and size >= 0]
    if len(shape) != len(entry["shape"]):
        raise ValueError(f"invalid shape {entry['shape']}")
    return np.frombuffer(data[begin:end], DTYPES[entry["dtype"]]).reshape(shape)


def put_by_digest(store: ObjectStore, key_of: Callable[[str], str], body: Body) -> ObjectEntry:
    """Put an object under a key that holds the SHA-256 of its bytes.

    Args:
        store: the store.
        key_of: returns the key for the digest in hexadecimal.
        body: contiguous bytes.
    """
    sha256 = hashlib.sha256(body).hexdigest()
    key = key_of(sha256)
    store.put(key, body, sha256)
    return ObjectEntry(key=key, bytes=len(body), sha256=sha256)


CHUNK_BYTES = 32 << 20
"""Bytes of float32 rows with their state in one chunk, which bound the memory of upload and restore."""


def chunk_rows(width: int, state_values: int = 0) -> int:
    """Return the largest number of rows in one chunk, given their columns and state values."""
    return max(1, CHUNK_BYTES // (4 * (width + state_values)))
