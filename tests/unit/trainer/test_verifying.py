"""Ranks that read what rank 0 wants checked, a share each."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.format.manifest import ChainSummary, ChunkEntry, Manifest, ObjectEntry, manifest_key
from dlrm_checkpointer.read import fetch
from dlrm_checkpointer.read.fetch import Check
from dlrm_checkpointer.types import CutMeta, ShardId, SnapshotName, TableMeta
from dlrm_stores.file import FileStore
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_trainer.checkpointing import restore
from dlrm_trainer.checkpointing.restore import choose_together, open_together
from dlrm_trainer.distributed import failures
from dlrm_trainer.distributed.collectives import Collectives

Snapshots = Sequence[Sequence[ObjectEntry]]
Outcome = tuple[tuple[int | None, list[str]], list[str], list[str]]
FIRST = TypeAdapter[tuple[int | None, list[str]]](tuple[int | None, list[str]])
SIZE = 1_000
TIMEOUT_S = 2.0
pytestmark = pytest.mark.slow


class NotingStore(FileStore):
    """Notes which objects are read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[str] = []
        self.requests = Counter[str]()

    def get(self, key: str) -> bytes:
        self.requests[key.split("/")[0]] += 1
        return super().get(key)

    def get_into(self, key: str, buffer: memoryview) -> int:
        self.read.append(key)
        return super().get_into(key, buffer)


def first_whole(collectives: Collectives, root: Path, snapshots: Snapshots, round_bytes: int) -> Outcome:
    """The first of some lists of objects that are all whole, why not those before; what a rank read, and heard of."""
    restore.ROUND_BYTES = round_bytes
    store, heard = NotingStore(root), list[str]()

    def choose(check: Check) -> tuple[int | None, list[str]]:
        problems = []
        for number, objects in enumerate(snapshots):
            try:
                check(store, objects, heard.append)
            except SnapshotError as error:
                problems.append(str(error))
            else:
                return number, problems
        return None, problems

    return choose_together(store, collectives, choose, FIRST), store.read, heard


class SlowStore(FileStore):
    """Takes its time for each object."""

    def get_into(self, key: str, buffer: memoryview) -> int:
        time.sleep(TIMEOUT_S / 4)
        return super().get_into(key, buffer)


def read_some(collectives: Collectives, root: Path, objects: Sequence[ObjectEntry]) -> tuple[bool, float]:
    """Have all ranks read objects, that of the first from a slow store; whether they are whole, and the seconds."""
    failures.KEEPALIVE_INTERVAL_S = TIMEOUT_S / 4
    fetch.PARALLEL_GETS = 2
    store = SlowStore(root) if collectives.rank == 0 else FileStore(root)

    def choose(check: Check) -> bool:
        check(store, objects, lambda _key: None)
        return True

    began = time.monotonic()
    return choose_together(store, collectives, choose, TypeAdapter(bool)), time.monotonic() - began


def opened(collectives: Collectives, root: Path, name: SnapshotName) -> tuple[Counter[str], list[int]]:
    """Open a snapshot for one row of this rank; the requests by folder, and the rows of the objects that it holds."""
    store = NotingStore(root)
    shard = ShardId("t", collectives.rank, collectives.rank + 1, 0, 4)
    snapshot = open_together(store, collectives, name, [shard])
    return store.requests, [chunk.first_row for chunk in snapshot.manifest.chunks]


@pytest.fixture
def put(tmp_path: Path) -> Callable[[int, int], list[ObjectEntry]]:
    """Puts a number of objects for a step."""

    def objects(step: int, count: int) -> list[ObjectEntry]:
        entries = []
        for number in range(count):
            key, body = f"chunks/{step:016d}/00000001/000000/{number}.safetensors", bytes([step, number]) * (SIZE // 2)
            FileStore(tmp_path).put(key, body)
            entries.append(ObjectEntry(key=key, bytes=len(body), sha256=hashlib.sha256(body).hexdigest()))
        return entries

    return objects


@pytest.mark.parametrize("round_bytes", [1, 2 * SIZE, 1 << 30])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_object_is_read_by_one_rank_and_all_ranks_get_the_answer(
    tmp_path: Path, put: Callable[[int, int], list[ObjectEntry]], world_size: int, round_bytes: int
) -> None:
    objects = put(5, 14)

    found = run_ranks(world_size, first_whole, tmp_path, [objects], round_bytes)

    keys = sorted(entry.key for entry in objects)
    assert [chosen for chosen, _, _ in found] == [(0, [])] * world_size
    assert sorted(key for _, read, _ in found for key in read) == keys
    assert sorted(found[0][2]) == keys
    if round_bytes > SIZE:
        assert max(len(read) for _, read, _ in found) <= -(-14 // world_size) + 1


def test_rank_0_alone_reads_manifests_and_each_rank_holds_its_objects(tmp_path: Path) -> None:
    table = TableMeta(
        name="t", rows=9, dim=4, seed=0, scale=0.0, column_blocks=((0, 4),), state_columns=(1,), dtype="fp32"
    )
    meta = CutMeta(step=5, samples=1, world_size=1, attempt=1, model={"tables": [table.to_json()]})
    puts = [
        ObjectEntry(key=f"chunks/0000000000000005/00000001/000000/{n}.safetensors", bytes=1, sha256="0" * 64)
        for n in range(10)
    ]
    manifest = Manifest(
        kind="full",
        bits=32,
        chain=(),
        growth=ChainSummary(base_bytes=9, base_time=0.0),
        meta=meta.to_json(),
        chunks=tuple(ChunkEntry.of(put, table.whole(), np.array([row])) for row, put in enumerate(puts[:9])),
        dense=puts[9],
    )
    FileStore(tmp_path).put(manifest_key(5, 1), manifest.encode())

    found = run_ranks(3, opened, tmp_path, SnapshotName(5, 1))

    assert [requests for requests, _ in found] == [{"manifests": 1}, {}, {}]
    # The object with the table's last row is known to all.
    assert [rows for _, rows in found] == [[0, 8], [1, 8], [2, 8]]


@pytest.mark.parametrize("damaged", range(4))
def test_a_damaged_object_is_told_to_all_ranks_whichever_reads_it(
    tmp_path: Path, put: Callable[[int, int], list[ObjectEntry]], damaged: int
) -> None:
    newer, older = put(9, 4), put(5, 3)
    (tmp_path / newer[damaged].key).write_bytes(bytes(SIZE))

    found = run_ranks(2, first_whole, tmp_path, [newer, older], SIZE)

    (number, problems), _, heard = found[0]
    assert number == 1
    assert [newer[damaged].key in problem and "corrupt" in problem for problem in problems] == [True]
    assert found[1][0] == found[0][0]
    assert newer[damaged].key not in heard
    assert {entry.key for entry in older} <= set(heard)


def test_a_rank_may_read_for_longer_than_a_collective_may_wait(
    tmp_path: Path, put: Callable[[int, int], list[ObjectEntry]]
) -> None:
    found = run_ranks(2, read_some, tmp_path, put(5, 40), timeout_s=TIMEOUT_S)

    assert [whole for whole, _ in found] == [True, True]
    assert min(seconds for _, seconds in found) > 2 * TIMEOUT_S
