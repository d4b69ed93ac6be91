"""Manifests, deltas and objects that say what can't be: each is refused by its name, before memory is taken for it."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_api.errors import DeviceError, SnapshotError
from dlrm_checkpointer.codec.digest import BLOCK_BYTES, block_ranges
from dlrm_checkpointer.codec.rows import code_rows
from dlrm_checkpointer.format.chunk import MAX_ROW_NUMBERS, decode_dense, decode_row_numbers, decode_rows, encode_rows
from dlrm_checkpointer.format.manifest import ObjectEntry, parse_manifest, parse_part, part_key, sealed
from dlrm_checkpointer.publish.delta import delta_key
from dlrm_checkpointer.publish.follower import Follower
from dlrm_checkpointer.read.export import check_free_space, restore_to_folder
from dlrm_checkpointer.read.fetch import USUAL_BYTES, BufferPool, fetch
from dlrm_checkpointer.read.restore import open_snapshot
from dlrm_checkpointer.types import MAX_ROWS, CutMeta, ShardId, ShardRows, TableMeta
from dlrm_stores.file import FileStore

Object = dict[str, Any]
ROOM_BYTES = 4 << 30
"""Bytes of addresses above those in use: a claim that is believed exceeds them on any machine."""


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, limits)


def container(header: Object, data: bytes = b"", **meta: Any) -> bytes:
    """An object with these arrays and this metadata."""
    text = json.dumps({"__metadata__": {"dlrm": json.dumps({"version": 2, **meta})}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + data


def array(dtype: str, shape: Any, begin: Any, end: Any) -> Object:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DENSE = {
    "outside": container({"w": array("U8", [4], 0, 4)}, b"123", kind="dense"),
    "before the data": container({"w": array("U8", [4], -4, 0)}, b"", kind="dense"),
    "backwards": container({"w": array("U8", [0], 4, 2)}, b"1234", kind="dense"),
    "in each other": container({"v": array("U8", [4], 0, 4), "w": array("U8", [2], 2, 4)}, b"1234", kind="dense"),
    "twice the same": container({str(n): array("U8", [4], 0, 4) for n in range(9)}, b"1234", kind="dense"),
    "with a hole": container({"v": array("U8", [1], 0, 1), "w": array("U8", [1], 3, 4)}, b"1234", kind="dense"),
    "too few": container({"w": array("U8", [2], 0, 2)}, b"1234", kind="dense"),
    "of no number": container({"w": array("U8", [4], 0.0, 4)}, b"1234", kind="dense"),
    "of no shape": container({"w": array("U8", [-1], 0, 4)}, b"1234", kind="dense"),
    "of an endless shape": container({"w": array("U8", [10**30, 0], 0, 0)}, kind="dense"),
    "of an invalid shape": container({"w": array("U8", 4, 0, 4)}, b"1234", kind="dense"),
    "three offsets": container({"w": {"dtype": "U8", "shape": [4], "data_offsets": [0, 1, 4]}}, b"1234", kind="dense"),
    "bottomless": (200_000).to_bytes(8, "little") + b"[" * 200_000,
    "bottomless within": container({"w": {}}, kind="dense").replace(b"{}}", b"[" * 2 + b"}"),
    "an endless header": (2**63).to_bytes(8, "little") + b"{}",
    "a header too long": (100_000_001).to_bytes(8, "little") + b"{}",
    "an endless version": container({}, kind="dense").replace(b"2", b"1e999", 1),
}


@pytest.mark.parametrize("body", DENSE.values(), ids=DENSE)
def test_an_object_with_wrong_array_offsets_is_refused_by_its_key(body: bytes) -> None:
    with pytest.raises(SnapshotError, match="chunks/dense"):
        decode_dense(body, "chunks/dense")


def numbers(first: int, rows: Any, arrays: Object | None = None, data: bytes = b"") -> bytes:
    return container(arrays or {}, data, kind="row-numbers", table="t", firstRow=first, rows=rows)


BITMAP = bytes([255] * 4_096)


@pytest.mark.parametrize(
    "body",
    [
        numbers(0, 10**13),
        numbers(0, MAX_ROW_NUMBERS + 1),
        numbers(0, 10**30),
        numbers(-1, 2),
        numbers(2**63 - 2, 2),
        numbers(0, -1),
        numbers(0, 2, {"row_bitmap": array("U8", [4_096], 0, 4_096)}, BITMAP),
        numbers(0, 2, {"row_gaps": array("U8", [4_096], 0, 4_096)}, BITMAP),
        numbers(0, 3, {"row_gaps": array("U64", [2], 0, 16)}, b"\xff" * 16),
        numbers(0, float("inf")),
    ],
)
def test_a_small_object_that_claims_many_row_numbers_is_refused_by_its_key(body: bytes) -> None:
    with pytest.raises(SnapshotError, match="chunks/gone"):
        decode_row_numbers(body, "chunks/gone", "t", MAX_ROWS)


def test_as_many_row_numbers_as_an_object_may_hold_are_read() -> None:
    found = decode_row_numbers(numbers(7, MAX_ROW_NUMBERS), "key", "t", MAX_ROWS)

    assert (found[0], found[-1], len(found)) == (7, MAX_ROW_NUMBERS + 6, MAX_ROW_NUMBERS)


@pytest.mark.parametrize(
    "claim",
    [{"rows": 10**13}, {"rows": -1}, {"firstRow": 2**62}, {"columnEnd": 2**40}, {"rowEnd": 2**80, "rows": 2**70}],
)
def test_a_chunk_that_claims_rows_without_bytes_is_refused_by_key(claim: Object) -> None:
    shard = ShardId(table="t", row_start=0, row_end=9, column_start=0, column_end=4)
    rows = ShardRows(
        shard=shard, row_ids=np.arange(3), rows=np.ones((3, 4), np.float32), state=np.ones((3, 1), np.float32)
    )
    body = bytes(encode_rows(code_rows(rows, 8)[0]))
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    meta = json.loads(header.pop("__metadata__")["dlrm"]) | claim
    data = body[8 + int.from_bytes(body[:8], "little") :]

    with pytest.raises(SnapshotError, match="chunks/rows"):
        decode_rows(container(header, data, **meta), "chunks/rows")


def table(**claims: Any) -> Callable[[Object], None]:
    def change(manifest: Object) -> None:
        manifest["meta"]["model"]["tables"][0] |= claims

    return change


def chunk(**claims: Any) -> Callable[[Object], None]:
    def change(manifest: Object) -> None:
        manifest["chunks"][0] |= claims

    return change


def cut(**claims: Any) -> Callable[[Object], None]:
    def change(manifest: Object) -> None:
        manifest["meta"] |= claims

    return change


def two_of_a_name(manifest: Object) -> None:
    tables = manifest["meta"]["model"]["tables"]
    tables.append(tables[0])


def no_list_of_tables(manifest: Object) -> None:
    manifest["meta"]["model"]["tables"] = 7


def no_tables_at_all(manifest: Object) -> None:
    manifest["meta"]["model"] = "none"


def endless_dense_state(manifest: Object) -> None:
    manifest["dense"]["bytes"] = 2**64


CLAIMS: dict[str, Callable[[Object], None]] = {
    "trillions of rows": table(rows=10**13),
    "no rows": table(rows=0),
    "fewer than no rows": table(rows=-5),
    "rows beyond 64 bits": table(rows=10**30),
    "rows that are no number": table(rows="many"),
    "millions of columns": table(dim=10**6, columnBlocks=[[0, 10**6]]),
    "blocks with a hole": table(columnBlocks=[[0, 2], [4, 8]]),
    "blocks in each other": table(columnBlocks=[[0, 8], [0, 8]]),
    "blocks backwards": table(columnBlocks=[[0, 12], [12, 8]]),
    "no blocks": table(columnBlocks=[]),
    "terabytes of state": table(stateColumns=[10**12]),
    "negative state": table(stateColumns=[-1]),
    "state of too many blocks": table(stateColumns=[1, 1, 1]),
    "a seed beyond 64 bits": table(seed=2**63),
    "a scale that is no number": table(scale=float("nan")),
    "an endless scale": table(scale=float("inf")),
    "a name of megabytes": table(name="x" * 2_000_000),
    "no name": table(name=""),
    "a name that ends early": table(name="a\0b"),
    "a type of rows that nobody knows": table(dtype="fp64"),
    "a table twice": two_of_a_name,
    "tables that are none": no_list_of_tables,
    "an invalid model": no_tables_at_all,
    "a chunk beyond its table": chunk(rowEnd=10**9, lastRow=10**9 - 1),
    "a chunk beyond 64 bits": chunk(rowEnd=10**30, lastRow=10**29),
    "a chunk of more rows than it spans": chunk(rows=10**12),
    "a chunk backwards": chunk(firstRow=5, lastRow=3),
    "a chunk before its table": chunk(firstRow=-1),
    "a chunk across a block": chunk(columnEnd=3),
    "a chunk of no columns": chunk(columnStart=8, columnEnd=8),
    "a chunk of no number": chunk(rows=float("nan")),
    "a chunk of a table of megabytes": chunk(table="y" * 2_000_000),
    "an object beyond 64 bits": chunk(bytes=2**63),
    "an object of fewer than no bytes": chunk(bytes=-1),
    "a dense state beyond 64 bits": endless_dense_state,
    "millions of ranks": cut(worldSize=10**9),
    "no ranks": cut(worldSize=0),
    "a time that is no number": cut(time=float("nan")),
    "an endless time": cut(time=float("inf")),
    "samples below none": cut(samples=-1),
    "endless samples": cut(samples=float("inf")),
    "an invalid parent": cut(parent=7),
}


def resealed(path: Path, change: Callable[[Object], None]) -> bytes:
    value = json.loads(path.read_text())
    change(value)
    path.write_bytes(sealed(value))
    return path.read_bytes()


@pytest.fixture
def stored(tmp_path: Path, files: FileStore, new_model, new_pod) -> FileStore:
    """A store with one snapshot."""
    new_pod(tmp_path / "pod", files).commit(new_model().train())
    return files


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_a_manifest_that_claims_what_no_snapshot_has_is_refused_by_its_key(
    stored: FileStore, claim: Callable[[Object], None]
) -> None:
    [path] = (stored.root / "manifests").iterdir()
    key = f"manifests/{path.name}"

    body = resealed(path, claim)

    with pytest.raises(SnapshotError, match=key) as refused:
        parse_manifest(body, key)
    assert len(str(refused.value)) < 2_000


@pytest.mark.parametrize(
    "claim", [cut(worldSize=10**9), cut(time=float("nan")), cut(parent=7), lambda part: part["meta"].clear()]
)
def test_a_part_list_that_claims_what_no_cut_has_is_refused_by_its_key(
    stored: FileStore, claim: Callable[[Object], None]
) -> None:
    key = part_key(1, 1, 0)

    body = resealed(stored.root / key, claim)

    with pytest.raises(SnapshotError, match=key):
        parse_part(body, key)


def test_an_object_that_is_smaller_than_its_manifest_says_takes_no_memory(stored: FileStore) -> None:
    dense = open_snapshot(stored, 1, 1).manifest.dense
    claimed = ObjectEntry(**asdict(dense) | {"bytes": 10**15})

    with pytest.raises(SnapshotError, match=f"{dense.key}: {dense.bytes} bytes, the manifest says {10**15}"):
        fetch(stored, claimed, BufferPool.of([claimed, dense]))

    assert len(BufferPool.of([claimed]).take(1).obj.base) <= USUAL_BYTES


def test_an_object_that_memory_does_not_hold_is_named(stored: FileStore) -> None:
    entry = ObjectEntry(**asdict(open_snapshot(stored, 1, 1).manifest.dense) | {"bytes": 2 * ROOM_BYTES})
    with (stored.root / entry.key).open("r+b") as file:
        file.truncate(2 * ROOM_BYTES)

    with pytest.raises(DeviceError, match=f"{2 * ROOM_BYTES} bytes .*{entry.key}"):
        fetch(stored, entry)


def test_blocks_of_the_largest_table_are_lazy_and_take_little_memory() -> None:
    widest = TableMeta(
        name="t",
        rows=MAX_ROWS,
        dim=4_096,
        seed=0,
        scale=0.0,
        column_blocks=tuple((start, start + 1) for start in range(4_096)),
        state_columns=(8,) * 4_096,
    )

    start, end = next(block_ranges(widest))

    assert (start, 0 < (end - start) * 4 * 9 * 4_096 <= BLOCK_BYTES) == (0, True)


def test_a_table_that_does_not_fit_the_disk_is_refused(tmp_path: Path, stored: FileStore) -> None:
    [path] = (stored.root / "manifests").iterdir()
    resealed(path, table(rows=MAX_ROWS))

    with pytest.raises(DeviceError, match=r"tables/users.safetensors: takes \d+ bytes, and \d+ are free there"):
        restore_to_folder(open_snapshot(stored, 1, 1), tmp_path / "out")
    with pytest.raises(DeviceError, match="export: takes"):
        check_free_space(tmp_path / "export", 2**60)


def delta_table(**claims: Any) -> Callable[[Object], None]:
    def change(delta: Object) -> None:
        for table in delta["tables"]:
            table |= claims if table["name"] == "users" else {}

    return change


def foreign_tombstone(delta: Object) -> None:
    delta["tombstones"] = [{**delta["dense"], "table": "ghosts", "rows": 1}]


@pytest.mark.parametrize(
    "claim",
    [
        delta_table(rows=10**13),
        delta_table(dim=-8),
        delta_table(name="x" * 10**6),
        chunk(rowEnd=10**30),
        foreign_tombstone,
    ],
)
def test_a_delta_with_false_claims_leaves_a_follower_waiting_with_a_reason(
    tmp_path: Path, files: FileStore, new_model, new_pod, claim: Callable[[Object], None]
) -> None:
    target = FileStore(tmp_path / "deltas")
    new_pod(tmp_path / "pod", files, target=target).commit(new_model().train())
    resealed(target.root / delta_key(1), claim)

    did = Follower(target, tmp_path / "out").catch_up()

    assert [each.what for each in did] == ["waiting"]


def test_a_delta_of_a_table_with_other_rows_is_refused_by_file(
    tmp_path: Path, files: FileStore, new_model, new_pod
) -> None:
    target = FileStore(tmp_path / "deltas")
    model, pod = new_model(), new_pod(tmp_path / "pod", files, target=target)
    pod.commit(model.train())
    follower = Follower(target, tmp_path / "out")
    follower.catch_up()
    pod.commit(model.train())
    resealed(target.root / delta_key(2), delta_table(rows=MAX_ROWS))

    with pytest.raises(SnapshotError, match=f"users.safetensors: is no table of {MAX_ROWS} rows x 8 columns"):
        follower.catch_up()


def test_a_cut_of_no_ranks_is_none() -> None:
    with pytest.raises(ValueError, match="0 ranks"):
        CutMeta.from_json({**CutMeta(step=1, samples=1, world_size=1, attempt=1).to_json(), "worldSize": 0})
