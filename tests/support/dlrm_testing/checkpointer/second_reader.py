"""A reader of snapshots in a folder, written from docs/format.md alone, with numpy and the standard library."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

TYPES = {"U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8", "I32": "<i4", "I64": "<i8", "BOOL": "?"}
TYPES |= {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
U64 = np.uint64
G = np.array([0x9E3779B97F4A7C15], U64)  # in arrays numbers wrap without a warning
VERSIONS = 2, 3


def newest(root: Path) -> tuple[int, int]:
    """Step and attempt of the newest manifest that counts."""
    said = {int(path.stem): json.loads(path.read_bytes()) for path in (root / "attempts").glob("*.json")}
    later = {number: each["restoredStep"] for number, each in said.items() if not each.get("pending")}
    names = [tuple(map(int, path.stem.split("-"))) for path in (root / "manifests").iterdir()]
    return max(
        (step, attempt)
        for step, attempt in names
        if all(start is not None and step <= start for number, start in later.items() if number > attempt)
    )


def manifest(root: Path, step: int, attempt: int, sha256: str = "") -> dict:
    body = (root / f"manifests/{step:016d}-{attempt:08d}.json").read_bytes()
    value = json.loads(body)
    if value["format"] != "dlrm-snapshot" or value["version"] not in VERSIONS:
        raise ValueError("another format")
    if hashlib.sha256(body.replace(value["seal"].encode(), b"0" * 64)).hexdigest() != value["seal"]:
        raise ValueError("corrupt manifest")
    if sha256 and hashlib.sha256(body).hexdigest() != sha256:
        raise ValueError("another manifest")
    return value


def container(body: bytes) -> tuple[dict, dict[str, np.ndarray]]:
    """Return an object's metadata and arrays."""
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    said = json.loads(header.pop("__metadata__")["dlrm"])
    if said["version"] not in VERSIONS:
        raise ValueError("another format")
    return said, {
        name: np.frombuffer(body[end:][slice(*each["data_offsets"])], TYPES[each["dtype"]]).reshape(each["shape"])
        for name, each in header.items()
    }


def whole(root: Path, entry: dict) -> bytes:
    if not re.fullmatch(r"chunks/[0-9]{16}/[0-9]{8}/[0-9]{6}/[0-9A-Za-z_-]+\.safetensors", entry["key"]):
        raise ValueError("no key")
    body = (root / entry["key"]).read_bytes()
    if (len(body), hashlib.sha256(body).hexdigest()) != (entry["bytes"], entry["sha256"]):
        raise ValueError("corrupt object")
    return body


def row_numbers(said: dict, arrays: dict[str, np.ndarray]) -> np.ndarray:
    first, count = said["firstRow"], said["rows"]
    if "row_keys" in arrays:
        return first + keys(arrays["row_keys"], count, said["lowBits"])
    if "row_bitmap" in arrays:
        return first + np.flatnonzero(np.unpackbits(arrays["row_bitmap"], bitorder="little"))
    gaps = arrays["row_gaps"].astype(np.int64) if "row_gaps" in arrays else np.zeros(count - 1, np.int64)
    return first + np.concatenate([[0], np.cumsum(gaps + 1)]).astype(np.int64)


def keys(body: np.ndarray, count: int, low_bits: int) -> np.ndarray:
    """Distances of ascending keys from the first."""
    bits, start = np.unpackbits(body, bitorder="little").astype(np.int64), -(-count * low_bits // 8)
    low = bits[: count * low_bits].reshape(count, low_bits) << np.arange(low_bits)
    high = np.flatnonzero(bits[8 * start :]) - np.arange(count)
    return (high << low_bits) | low.sum(axis=1)


def weights(said: dict, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """(N, D) float32."""
    width = said["columnEnd"] - said["columnStart"]
    present = first_columns(said, arrays, said.get("columns", width))
    return np.pad(present, ((0, 0), (0, width - present.shape[1])))


def first_columns(said: dict, arrays: dict[str, np.ndarray], width: int) -> np.ndarray:
    bits, factor = said["bits"], np.float32(2.0 ** said["exponent"])
    if bits >= 16:
        return arrays["rows"].astype(np.float32) * factor
    columns, packed = np.arange(width), arrays["codes"]
    plane = -(-width * min(bits, 8) // 8) if bits != 3 else -(-width // 4)
    each = 2 if bits == 3 else bits
    codes = (packed[:, columns % plane] >> (each * (columns // plane))) & (2**each - 1)
    if bits == 3:
        tops = -(-width // 8)
        codes = codes + 4 * ((packed[:, plane + columns % tops] >> (columns // tops)) & 1)
    scale, low = (arrays[name].astype(np.float32)[:, None] * factor for name in ("scale", "low"))
    return codes.astype(np.float32) * scale + low


def mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> U64(27))) * U64(0x94D049BB133111EB)
    return z ^ (z >> U64(31))


def key_of(text: bytes) -> np.ndarray:
    return np.frombuffer(hashlib.sha256(text).digest()[:8], "<u8")


def row_value(said: dict, arrays: dict[str, np.ndarray], name: str) -> np.ndarray:
    """(N,) bits of a value of each row."""
    if name == "columns":
        return np.full(said["rows"], said["columns"], np.uint32).view(np.float32)
    if arrays[name].dtype == np.uint16:
        return np.maximum(64 * (np.uint32(said["touchedBase"]) - arrays[name]), 1).view(np.float32)
    return arrays[name].view(np.float32)


def is_unique(table: dict) -> bool:
    return table.get("ids") == "unique"


def initial(table: dict) -> np.ndarray:
    shape = table["rows"], table["dim"]
    if not table["scale"]:
        return np.zeros(shape, np.float32)
    key = key_of(b"dlrm-initializer-1\0" + table["seed"].to_bytes(8, "little", signed=True) + table["name"].encode())
    rows, columns = np.arange(shape[0], dtype=U64)[:, None], np.arange(shape[1], dtype=U64)
    words = mix(mix(key + rows * G) + (columns // U64(2) + U64(1)) * G)
    halves = np.where(columns % U64(2) == 0, words & U64(0xFFFFFFFF), words >> U64(32))
    signed = (halves >> U64(8)).astype(np.int64) - 2**23
    return signed.astype(np.float32) * np.float32(2.0**-23) * np.float32(table["scale"])


def restore(root: Path, step: int, attempt: int) -> str:
    """Return the state digest of a snapshot."""
    top = manifest(root, step, attempt)
    tables = {table["name"]: table for table in top["meta"]["model"]["tables"]}
    fixed = {name: table for name, table in tables.items() if not is_unique(table)}
    sizes = {name: each.get("stateColumns", [1] * len(each["columnBlocks"])) for name, each in tables.items()}
    beside = {
        name: [*each.get("rowValues", ()), *["columns"][: len(each.get("sizes", ()))]] for name, each in tables.items()
    }
    sizes = {name: [each[0] + len(beside[name]), *each[1:]] for name, each in sizes.items()}
    rows = {name: initial(table) for name, table in fixed.items()}
    state = {name: np.zeros((table["rows"], sum(sizes[name])), np.float32) for name, table in fixed.items()}
    by_key: dict = {name: {} for name in tables.keys() - fixed.keys()}
    for layer in (*(manifest(root, **link) for link in top["chain"]), top):  # newer values over older ones
        for entry in (*layer.get("gone", ()), *layer["chunks"]):
            said, arrays = container(whole(root, entry))
            name, ids = said["table"], row_numbers(said, arrays)
            if said["kind"] == "gone":
                by_key[name] = {key: row for key, row in by_key[name].items() if key not in set(ids.tolist())}
                continue
            values = np.column_stack([arrays["state"], *(row_value(said, arrays, each) for each in beside[name])])
            if name in by_key:
                full = np.concatenate([weights(said, arrays), values], axis=1)
                by_key[name] |= dict(zip(ids.tolist(), full, strict=True))
                continue
            starts = [start for start, _ in tables[name]["columnBlocks"]]
            place = sum(sizes[name][: starts.index(said["columnStart"])])
            rows[name][ids, said["columnStart"] : said["columnEnd"]] = weights(said, arrays)
            state[name][ids, place : place + values.shape[1]] = values
    numbers = {name: np.arange(table["rows"]) for name, table in fixed.items()}
    for name, found in by_key.items():
        dim = tables[name]["dim"]
        full = np.array([found[key] for key in sorted(found)], np.float32).reshape(len(found), dim + sizes[name][0])
        numbers[name], rows[name], state[name] = np.array(sorted(found), np.int64), full[:, :dim], full[:, dim:]
    for name, table in tables.items():
        if table.get("dtype") == "fp16":
            rows[name] = rows[name].astype(np.float16).astype(np.float32)
    every = {name: (tables[name], sizes[name], numbers[name], rows[name], state[name]) for name in sorted(tables)}
    digests = [[name, "".join(lanes(*each))] for name, each in every.items()]
    _, dense = container(whole(root, top["dense"]))
    arrays = [[n, a.dtype.name, [*a.shape], hashlib.sha256(a.tobytes()).hexdigest()] for n, a in sorted(dense.items())]
    text = json.dumps({"dense": arrays, "tables": digests}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def lanes(table: dict, sizes: list[int], ids: np.ndarray, rows: np.ndarray, state: np.ndarray) -> Iterator[str]:
    key = key_of(b"dlrm-digest-2\0" + table["name"].encode())
    words = np.concatenate([rows, state], axis=1).view("<u4").astype(U64)
    indices, numbers = np.arange(1, 3 + words.shape[1], dtype=U64), ids.astype(U64) + U64(1)
    for lane in range(4):
        keys = mix(mix(key + U64(lane + 1) * G) + indices * G) | U64(1)
        total = np.zeros(1, U64)
        for block, (start, end) in enumerate(table["columnBlocks"]):
            first = table["dim"] + sum(sizes[:block])
            own = [*range(start, end), *range(first, first + sizes[block])]
            weighed = (words[:, own] * keys[[2 + i for i in own]]).sum(axis=1, dtype=U64)
            total += mix(numbers * keys[0] + U64(block) * keys[1:2] + weighed).sum(dtype=U64)
        yield f"{int(total[0]):016x}"
