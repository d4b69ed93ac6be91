"""Encode and decode a snapshot's objects: chunks of rows and dense state, as safetensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic.alias_generators import to_camel

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.rows import EMPTY, QUANTIZERS, ChunkEncoding, CodedRows
from dlrm_checkpointer.format.manifest import ObjectEntry, refusing
from dlrm_checkpointer.types import ShardId, TableMeta
from dlrm_kernels import packing
from dlrm_stores import ObjectStore
from dlrm_stores.base import Body

OBJECT_VERSION, KEYED_OBJECT_VERSION = 2, 3
"""Versions of objects; the second is that of rows of unique tables and of tables of several sizes, and of keys that are
gone."""
METADATA_KEY = "dlrm"
"""The only entry of the container's metadata, a JSON object: the order of several entries is not deterministic."""
DTYPES = {
    "U64": "<u8", "I64": "<i8", "F64": "<f8", "F32": "<f4", "U32": "<u4", "I32": "<i4", "F16": "<f2", "U16": "<u2",
    "U8": "|u1", "BOOL": "|b1",
}  # fmt: skip
"""numpy type of each safetensors type name, in the order in which the safetensors library writes arrays of different
types; those of one type are sorted by name."""
FIRST_TYPES = tuple(DTYPES)
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()}
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
ALIGNMENT = 8
"""Alignment of the data, by spaces at the end of the header."""
MAX_ROW_NUMBERS = 1 << 23
"""Largest number of row numbers in one object. Contiguous ones take no bytes, so the size does not bound them."""
MAX_GONE_KEYS = 1 << 20
"""Largest number of keys in one object of keys that are gone, as written."""
BITMAP, GAPS, KEYS = "row_bitmap", "row_gaps", "row_keys"
GAP_TYPES = (np.uint8, np.uint16, np.uint32, np.uint64)
TOUCHED, FLOAT_VALUES = "touched", ("score", "utility")
TOUCHED_STEPS = 64
"""Steps of a period: below 32 bits, a row's last touch is stored as the number of periods before ``touchedBase``."""
MAX_TOUCHED_AGE = 2**16 - 1


def encode_rows(coded: CodedRows, table: TableMeta | None = None) -> memoryview:
    """Encode one chunk of at least one row, or of keys that are gone. Equal rows give equal bytes.

    ``table`` is that of the rows; it is needed only if its ids are unique or its rows of several sizes.
    """
    form = coded.form
    shard = {to_camel(name): value for name, value in vars(coded.shard).items()}
    meta = {**_ids_meta(coded.row_ids), **shard}
    is_keyed = table is not None and table.is_unique
    version = KEYED_OBJECT_VERSION if table is not None and table.needs_version_3 else OBJECT_VERSION
    arrays, coding = _encode_keys(coded.row_ids) if is_keyed else (_encode_ids(coded.row_ids), {})
    if coded.is_gone:
        return save_arrays(arrays, "gone", meta | coding, version)
    arrays["state"] = coded.state
    if table is not None and table.row_values:
        own = coded.state.shape[1] - len(table.row_values)
        arrays["state"] = coded.state[:, :own]
        for number, name in enumerate(table.row_values, own):
            arrays[name] = coded.state[:, number]
        if TOUCHED in arrays:
            arrays[TOUCHED], base = _encode_touched(_words(coded.state)[:, own], form.bits)
            coding |= base
    if QUANTIZERS[form.bits].has_scale:
        arrays |= {"codes": coded.body, "scale": coded.scale, "low": coded.low}
    else:
        arrays["rows"] = coded.body
    if form.columns is not None:
        coding |= {"columns": form.columns}
    return save_arrays(arrays, "rows", {"bits": form.bits, "exponent": form.exponent, **meta, **coding}, version)


def decode_rows(body: Body, key: str) -> CodedRows:
    """Decode a chunk, or keys that are gone; most arrays are views of ``body``.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    meta, arrays = load_arrays(body, key, "rows", "gone")
    with refusing(key, f"not a chunk of {meta['kind']} as the format says"):
        return _coded_rows(meta, arrays)


def _coded_rows(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> CodedRows:
    rectangle = (int(meta[name]) for name in ("rowStart", "rowEnd", "columnStart", "columnEnd"))
    shard, count = ShardId(str(meta["table"]), *rectangle), int(meta["rows"])
    if shard.width < 1 or shard.row_start < 0 or shard.column_start < 0:
        raise ValueError(f"invalid shard {shard}")
    if (first := int(meta["firstRow"])) < shard.row_start:
        raise ValueError(f"row {first} lies outside {shard}")
    is_keyed = meta["version"] == KEYED_OBJECT_VERSION and KEYS in arrays
    if meta["kind"] == "gone":
        if not is_keyed or count > MAX_ROW_NUMBERS:
            raise ValueError(f"expected at most {MAX_ROW_NUMBERS} keys of a table of unique ids, got {count}")
        return CodedRows.gone(shard, _decode_keys(meta, arrays, first, count, shard.row_end))
    columns = int(meta["columns"]) if meta["version"] == KEYED_OBJECT_VERSION and "columns" in meta else None
    if not 0 <= (width := shard.width if columns is None else columns) <= shard.width:
        raise ValueError(f"rows of {width} columns in {shard}")
    form = ChunkEncoding(meta["bits"], int(meta["exponent"]), columns)
    quantizer = QUANTIZERS.get(form.bits) if type(form.bits) is int else None
    if quantizer is None or form.exponent not in quantizer.exponents:
        raise ValueError(f"{form.bits} bits with exponent {form.exponent}")
    name = "codes" if quantizer.has_scale else "rows"
    wanted: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
        name: (quantizer.dtype, (count, quantizer.columns(width))),
        "state": (np.float32, (count, arrays["state"].shape[-1])),
    }
    if quantizer.has_scale:
        wanted |= {"scale": (np.float16, (count,)), "low": (np.float16, (count,))}
    for each, (kind, shape) in wanted.items():
        array = arrays[each]
        if array.dtype != kind or array.shape != shape:
            raise ValueError(f"{each} is {array.dtype}{array.shape}, not {np.dtype(kind)}{shape}")
        if each in ("scale", "low") and not np.isfinite(array).all():
            raise ValueError(f"{each} is not finite")
    scale, low = (arrays["scale"], arrays["low"]) if quantizer.has_scale else (EMPTY, EMPTY)
    if not is_keyed:
        ids = _decode_ids(arrays, first, count, shard.row_end)
    else:
        ids = _decode_keys(meta, arrays, first, count, shard.row_end)
    state = _with_row_values(meta, arrays)
    return CodedRows(shard=shard, row_ids=ids, form=form, body=arrays[name], scale=scale, low=low, state=state)


def _encode_touched(steps: NDArray[np.uint32], bits: int) -> tuple[NDArray[Any], dict[str, int]]:
    """Encode (N,) steps; below 32 bits as periods before the newest, which are exact again when they are merged."""
    if bits == 32:
        return steps, {}
    periods = steps // np.uint32(TOUCHED_STEPS)
    base = periods.max()
    return np.minimum(base - periods, MAX_TOUCHED_AGE).astype(np.uint16), {"touchedBase": int(base)}


def _with_row_values(meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Return the state with ``RowValue``s as its last columns, if the chunk has them."""
    values = [_decode_touched(meta, arrays[TOUCHED])] if TOUCHED in arrays else []
    for name in FLOAT_VALUES:
        if (value := arrays.get(name)) is not None:
            if value.dtype != np.float32 or value.shape != (int(meta["rows"]),):
                raise ValueError(f"{name} is {value.dtype}{value.shape}, not float32({meta['rows']},)")
            if not np.isfinite(value).all() or (name == "score" and (value < 0).any()):
                raise ValueError(f"{name} is negative or not finite")
            values.append(value)
    return np.column_stack([arrays["state"], *values]) if values else arrays["state"]


def _decode_touched(meta: Mapping[str, Any], touched: NDArray[Any]) -> NDArray[np.float32]:
    """Return the (N,) steps as bits of float32."""
    kind, count = np.uint32 if meta["bits"] == 32 else np.uint16, int(meta["rows"])
    if touched.dtype != kind or touched.shape != (count,):
        raise ValueError(f"{TOUCHED} is {touched.dtype}{touched.shape}, not {np.dtype(kind)}({count},)")
    steps = touched.astype(np.uint32)
    if kind is np.uint16:
        base = int(meta["touchedBase"])
        if not int(steps.max()) <= base < 2**32 // TOUCHED_STEPS:
            raise ValueError(f"rows were touched {steps.max()} periods before period {base}")
        # Step 0 is that of rows that were never updated.
        steps = np.maximum((np.uint32(base) - steps) * np.uint32(TOUCHED_STEPS), np.uint32(1))
    return steps.view(np.float32)


def _words(state: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(state).view(np.uint32)


def encode_row_numbers(table: str, row_ids: NDArray[np.int64]) -> memoryview:
    """Encode 1 to ``MAX_ROW_NUMBERS`` strictly ascending row numbers. Equal ones give equal bytes."""
    return save_arrays(_encode_ids(row_ids), "row-numbers", {"table": table, **_ids_meta(row_ids)})


def decode_row_numbers(body: Body, key: str, table: str, rows: int) -> NDArray[np.int64]:
    """Decode row numbers of a table with ``rows`` rows: (N,) strictly ascending.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    meta, arrays = load_arrays(body, key, "row-numbers")
    with refusing(key, "not row numbers as the format says"):
        if meta["table"] != table:
            raise ValueError(f"is of table {meta['table']}, not {table}")
        count = int(meta["rows"])
        if count > MAX_ROW_NUMBERS:
            raise ValueError(f"expected at most {MAX_ROW_NUMBERS} row numbers, got {count}")
        return _decode_ids(arrays, int(meta["firstRow"]), count, rows)


def encode_dense(arrays: Mapping[str, NDArray[Any]]) -> memoryview:
    """Encode the dense parameters and dense optimizer state without loss.

    Raises:
        SnapshotError: names the array that holds a value that is not finite.
    """
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise SnapshotError(f"dense {name} holds a value that is not finite: the cut is not stored")
    return save_arrays(arrays, "dense", {})


def decode_dense(body: Body, key: str) -> dict[str, NDArray[Any]]:
    """Decode the dense state.

    Raises:
        SnapshotError: names the object and what is wrong with it.
    """
    return {name: array.copy() for name, array in load_arrays(body, key, "dense")[1].items()}


def _encode_ids(row_ids: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Encode N >= 1 ascending row numbers in the smaller way, without their first and their count.

    Returns:
        Nothing if they are contiguous; ``row_bitmap`` uint8 with bit i of byte j (least significant first) for the
        first row + 8 j + i; or, unless that is smaller, ``row_gaps`` (N - 1,) of the smallest unsigned type: the
        number of rows left out between each row and the next.
    """
    count, first = len(row_ids), int(row_ids[0])
    span = int(row_ids[-1]) - first + 1
    if span == count:
        return {}
    size = -(-span // 8)
    # A smaller bitmap also beats gaps of one byte each.
    if size >= count - 1:
        gaps = np.diff(row_ids)
        gaps -= 1
        kind = next(kind for kind in GAP_TYPES if int(gaps.max()) <= np.iinfo(kind).max)
        if size >= (count - 1) * np.dtype(kind).itemsize:
            return {GAPS: gaps.astype(kind)}
    present = np.zeros(span, bool)
    present[row_ids - first] = True
    return {BITMAP: np.packbits(present, bitorder="little")}


def _decode_ids(arrays: Mapping[str, NDArray[Any]], first: int, count: int, end: int) -> NDArray[np.int64]:
    """Decode ``count`` row numbers below ``end``; allocates them, so the caller must have checked both.

    Raises:
        ValueError: the arrays do not hold ``count`` rows from ``first`` on, below ``end``.
    """
    if not (0 <= first < end and 1 <= count <= end - first):
        raise ValueError(f"{count} rows from row {first} on do not lie below row {end}")
    if (BITMAP in arrays and GAPS in arrays) or KEYS in arrays:
        raise ValueError(f"expected either {BITMAP} or {GAPS}, got {sorted(arrays)}")
    if BITMAP in arrays:
        bitmap = arrays[BITMAP]
        if bitmap.dtype != np.uint8 or bitmap.ndim != 1 or int(np.bitwise_count(bitmap).sum()) != count:
            raise ValueError(f"{BITMAP} is {bitmap.dtype}{bitmap.shape}, and not of {count} rows")
        ids = np.flatnonzero(np.unpackbits(bitmap, bitorder="little")).astype(np.int64, copy=False)
    elif GAPS in arrays:
        gaps = arrays[GAPS]
        if gaps.dtype not in GAP_TYPES or gaps.shape != (count - 1,):
            raise ValueError(f"{GAPS} is {gaps.dtype}{gaps.shape}, and not of {count} rows")
        ids = np.zeros(count, np.int64)
        # A sum that overflows does not ascend, which is checked below.
        np.cumsum(gaps.astype(np.int64) + 1, out=ids[1:])
    else:
        return np.arange(first, first + count, dtype=np.int64)
    if len(ids) != count or ids[0] != 0 or ids[-1] >= end - first or not (ids[1:] > ids[:-1]).all():
        raise ValueError(f"expected {count} ascending row numbers from row {first} on, below row {end}")
    ids += first
    return ids


def _encode_keys(keys: NDArray[np.int64]) -> tuple[dict[str, NDArray[Any]], dict[str, int]]:
    """Encode N >= 1 ascending keys as Elias-Fano: 2 + log2(range / N) bits each; return the array and its metadata."""
    count, span = len(keys), int(keys[-1]) - int(keys[0])
    low_bits = max(0, (span // count).bit_length() - 1)
    body = np.zeros(-(-count * low_bits // 8) - (-((span >> low_bits) + count) // 8), np.uint8)
    packing.pack_keys(keys, np.uint64(low_bits), body)
    return {KEYS: body}, {"lowBits": low_bits}


def _decode_keys(
    meta: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]], first: int, count: int, end: int
) -> NDArray[np.int64]:
    """Decode ``count`` ascending keys below ``end``, of which the body has at least a bit each.

    Raises:
        ValueError: the array does not hold ``count`` keys from ``first`` on, below ``end``.
    """
    body, low_bits = arrays[KEYS], int(meta["lowBits"])
    if body.dtype != np.uint8 or body.ndim != 1 or not 0 <= low_bits < packing.KEY_BITS:
        raise ValueError(f"{KEYS} is {body.dtype}{body.shape} with {low_bits} low bits")
    if not (0 <= first < end <= 2**63 and 1 <= count <= 8 * len(body)):
        raise ValueError(f"{count} keys from key {first} on, below {end}, are not in {len(body)} bytes")
    keys = np.zeros(count, np.int64)
    is_whole = packing.unpack_keys(body, np.uint64(first), np.uint64(low_bits), keys)
    if not is_whole or keys[0] != first or keys[-1] >= end or not (keys[1:] > keys[:-1]).all():
        raise ValueError(f"expected {count} ascending keys from key {first} on, below {end}")
    return keys


def _ids_meta(row_ids: NDArray[np.int64]) -> dict[str, int]:
    return {"firstRow": int(row_ids[0]), "rows": len(row_ids)}


def save_arrays(
    arrays: Mapping[str, NDArray[Any]], kind: str, meta: Mapping[str, Any], version: int = OBJECT_VERSION
) -> memoryview:
    """Encode as the safetensors library does, byte for byte, with one copy where the library makes three."""
    meta = {"version": version, "kind": kind, **meta}
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


def load_arrays(body: Body, key: str, *kinds: str) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Return metadata and arrays (views of ``body``); the library would copy, and hides the metadata."""
    with refusing(key, "not a safetensors container of this format"):
        length = int.from_bytes(body[:HEADER_LENGTH_BYTES], "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {length}")
        data = memoryview(body)[HEADER_LENGTH_BYTES + length :]
        header = json.loads(bytes(body[HEADER_LENGTH_BYTES : HEADER_LENGTH_BYTES + length]))
        meta = json.loads(header.pop("__metadata__")[METADATA_KEY])
        _check_ranges([entry["data_offsets"] for entry in header.values()], len(data))
        arrays = {name: _array(data, entry) for name, entry in header.items()}
        version, found = int(meta["version"]), meta["kind"]
    if version > KEYED_OBJECT_VERSION:
        raise SnapshotError(
            f"{key}: object version {version}, this program reads up to {KEYED_OBJECT_VERSION}: use a newer "
            "dlrm-operator"
        )
    if version < OBJECT_VERSION:
        raise SnapshotError(f"{key}: object version {version}, which was never released, is not read any more")
    if found not in kinds:
        raise SnapshotError(f"{key}: holds {found}, not {' or '.join(kinds)}")
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
    """Put an object of contiguous bytes under the key for their SHA-256 (hexadecimal)."""
    sha256 = hashlib.sha256(body).hexdigest()
    key = key_of(sha256)
    store.put(key, body, sha256)
    return ObjectEntry(key=key, bytes=len(body), sha256=sha256)


CHUNK_BYTES = 32 << 20
"""Bytes of float32 rows with their state in one chunk, which bound the memory of upload and restore."""


def chunk_rows(width: int, state_values: int = 0) -> int:
    """Return the largest number of rows in one chunk, given their columns and state values."""
    return max(1, CHUNK_BYTES // (4 * (width + state_values)))
