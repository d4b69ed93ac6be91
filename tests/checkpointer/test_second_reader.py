"""A reader written from checkpointer/README.md alone: it shares no code with the package, and gets the same state."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

from dlrm_checkpointer.catalog import find_snapshot
from dlrm_checkpointer.files import FileStore
from dlrm_checkpointer.walk import snapshot_digest

README = Path(__file__).parents[2] / "checkpointer" / "README.md"
DTYPES = {
    "U16": "<u2",
    "U32": "<u4",
    "U64": "<u8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "BOOL": "?",
}
MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def container(path: Path, sha256: str) -> tuple[dict, dict[str, np.ndarray]]:
    body = path.read_bytes()
    assert hashlib.sha256(body).hexdigest() == sha256
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    meta = json.loads(header.pop("__metadata__")["dlrm"])
    data = body[8 + length :]
    arrays = {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
    return meta, arrays


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def row_numbers(meta: dict, arrays: dict[str, np.ndarray]) -> list[int]:
    first, count = meta["firstRow"], meta["rows"]
    if "row_bitmap" in arrays:
        bits = [(byte >> bit) & 1 for byte in arrays["row_bitmap"].tolist() for bit in range(8)]
        return [first + place for place, bit in enumerate(bits) if bit]
    ids = [first]
    for gap in arrays["row_gaps"].tolist() if "row_gaps" in arrays else [0] * (count - 1):
        ids.append(ids[-1] + gap + 1)
    return ids


def weights(meta: dict, arrays: dict[str, np.ndarray]) -> np.ndarray:
    bits, factor = meta["bits"], np.float32(2.0 ** meta["exponent"])
    if bits == 32:
        return arrays["rows"]
    if bits == 16:
        return arrays["rows"].astype(np.float32) * factor
    step, low = arrays["scale"].astype(np.float32) * factor, arrays["low"].astype(np.float32) * factor
    columns = range(meta["columnEnd"] - meta["columnStart"])
    codes = np.array([[code(row, c, bits, len(columns)) for c in columns] for row in arrays["codes"].tolist()])
    return codes.astype(np.float32) * step[:, None] + low[:, None]


def code(row: list[int], column: int, bits: int, width: int) -> int:
    def planes(data: list[int], each: int, plane: int) -> int:
        return data[column % plane] >> (column // plane * each) & (2**each - 1)

    if bits == 3:
        plane = -(-width // 4)
        return planes(row, 2, plane) + 4 * planes(row[plane:], 1, -(-width // 8))
    return planes(row, bits, -(-width * bits // 8))


def initial(table: dict, row: int) -> list[np.float32]:
    if table["scale"] == 0:
        return [np.float32(0)] * table["dim"]
    text = b"dlrm-initializer-1\0" + table["seed"].to_bytes(8, "little", signed=True) + table["name"].encode()
    start = mix((int.from_bytes(hashlib.sha256(text).digest()[:8], "little") + row * GOLDEN) & MASK)
    values = []
    for column in range(table["dim"]):
        word = mix((start + (column // 2 + 1) * GOLDEN) & MASK)
        half = word >> 32 if column % 2 else word & 0xFFFFFFFF
        values.append(np.float32((half >> 8) - 2**23) * np.float32(2.0**-23) * np.float32(table["scale"]))
    return values


def read(root: Path) -> str:
    """The state digest of the newest manifest."""
    manifest = json.loads(max((root / "manifests").iterdir()).read_bytes())
    assert (manifest["format"], manifest["version"], manifest["kind"]) == ("dlrm-snapshot", 1, "full")
    tables = {table["name"]: table for table in manifest["meta"]["model"]["tables"]}
    rows = {n: np.array([initial(t, r) for r in range(t["rows"])], np.float32) for n, t in tables.items()}
    values_of = {n: t.get("stateColumns", [1] * len(t["columnBlocks"])) for n, t in tables.items()}
    state = {n: np.zeros((t["rows"], sum(values_of[n])), np.float32) for n, t in tables.items()}
    for entry in manifest["chunks"]:
        meta, arrays = container(root / entry["key"], entry["sha256"])
        values = weights(meta, arrays)
        starts = [start for start, _ in tables[entry["table"]]["columnBlocks"]]
        first = sum(values_of[entry["table"]][: starts.index(entry["columnStart"])])
        ids = row_numbers(meta, arrays)
        rows[entry["table"]][ids, entry["columnStart"] : entry["columnEnd"]] = values
        state[entry["table"]][ids, first : first + arrays["state"].shape[1]] = arrays["state"]
    for name, table in tables.items():
        if table.get("dtype") == "fp16":
            rows[name] = rows[name].astype(np.float16).astype(np.float32)
    _, dense = container(root / manifest["dense"]["key"], manifest["dense"]["sha256"])
    return digest(tables, rows, state, dense)


def digest(metas: dict, rows: dict, state: dict, dense: dict) -> str:
    tables = []
    for name in sorted(rows):
        meta, lanes = metas[name], []
        values_of = meta.get("stateColumns", [1] * len(meta["columnBlocks"]))
        key = int.from_bytes(hashlib.sha256(b"dlrm-digest-2\0" + name.encode()).digest()[:8], "little")
        for lane in range(4):
            stream = mix((key + (lane + 1) * GOLDEN) & MASK)
            keys = [mix((stream + (i + 1) * GOLDEN) & MASK) | 1 for i in range(2 + meta["dim"] + sum(values_of))]
            total = 0
            for block, (start, end) in enumerate(meta["columnBlocks"]):
                places = range(sum(values_of[:block]), sum(values_of[: block + 1]))
                indices = [*range(start, end), *(meta["dim"] + place for place in places)]
                words = np.concatenate([rows[name], state[name]], axis=1)[:, indices].view("<u4").tolist()
                for row, values in enumerate(words):
                    weighed = sum(value * keys[2 + i] for value, i in zip(values, indices, strict=True))
                    total += mix(((row + 1) * keys[0] + block * keys[1] + weighed) & MASK)
            lanes.append(f"{total & MASK:016x}")
        tables.append([name, "".join(lanes)])
    arrays = [
        [n, a.dtype.name, list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()] for n, a in sorted(dense.items())
    ]
    text = json.dumps({"dense": arrays, "tables": tables}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16, 32])
def test_a_reader_written_from_the_readme_gets_the_same_state(
    tmp_path: Path, files: FileStore, new_model, new_pod, bits: int, small_tables
):
    model = new_model(tables=small_tables).train(3)
    new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), bits=bits).commit(model)

    read_digest = read(files.root)

    assert read_digest == snapshot_digest(find_snapshot(files))
    assert (read_digest == model.digest()) == (bits == 32)


def test_every_layout_rule_of_the_readme_holds(tmp_path: Path, files: FileStore, new_model, new_pod):
    model = new_model().train()
    new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2)).commit(model)

    keys = [info.key for info in files.list("")]
    names = {
        r"chunks/\d{16}/\d{8}/\d{6}/(\d{6}|dense)-[0-9a-f]{16}\.safetensors",
        r"parts/\d{16}/\d{8}/\d{6}\.json",
        r"manifests/\d{16}-\d{8}\.json",
    }
    manifest = json.loads(files.get("manifests/0000000000000001-00000001.json"))

    assert all(any(re.fullmatch(name, key) for name in names) for key in keys)
    assert (
        files.get("manifests/0000000000000001-00000001.json")
        == json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    )
    for entry in [*manifest["chunks"], manifest["dense"]]:
        assert entry["sha256"][:16] in entry["key"]


def test_the_readme_shows_the_test_vectors_that_the_tests_check():
    text = README.read_text()

    for vector in ("0x9FDD669CE1866FE5", "0xDE688075106056A1", "0x3C05693216BE2682"):
        assert vector in text
    for row in ("BF651EC8 BE4923E8 BF65DF00 BE8F711C 3E6A3990", "3EE85344 BF764DC2 BF2FB362 3E3B12A0 BDB5FCB0"):
        assert row in text
