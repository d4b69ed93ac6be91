from __future__ import annotations

import hashlib
import threading

import pytest

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.format.manifest import ObjectEntry
from dlrm_checkpointer.read.fetch import AHEAD_BYTES, check_bytes, gets_at_once
from dlrm_stores.base import PARALLEL_GETS
from dlrm_stores.file import FileStore

SIZE = 1_000


class FarStore(FileStore):
    """Answers no read before so many are asked for at a time."""

    def __init__(self, store: FileStore, together: int) -> None:
        super().__init__(store.root)
        self._met = threading.Barrier(together, timeout=20)

    def get_into(self, key: str, buffer: memoryview) -> int:
        self._met.wait()
        return super().get_into(key, buffer)


def entry_of(size: int, body: bytes = b"", number: int = 0) -> ObjectEntry:
    key = f"chunks/{1:016d}/{1:08d}/{0:06d}/{number:06d}.safetensors"
    return ObjectEntry(key=key, bytes=size, sha256=hashlib.sha256(body).hexdigest())


@pytest.fixture
def objects(files: FileStore) -> list[ObjectEntry]:
    entries = []
    for number in range(2 * PARALLEL_GETS):
        body = bytes([number]) * SIZE
        entries.append(entry_of(SIZE, body, number))
        files.put(entries[-1].key, body)
    return entries


def test_small_objects_are_read_many_at_a_time(files, objects):
    whole: list[str] = []

    check_bytes(FarStore(files, PARALLEL_GETS), objects, whole.append)

    assert whole == [entry.key for entry in objects]


def test_the_first_corrupt_object_is_named_and_those_before_it_are_whole(files, objects):
    files.put(objects[20].key, bytes(SIZE))
    whole: list[str] = []

    with pytest.raises(SnapshotError, match=rf"{objects[20].key}: corrupt"):
        check_bytes(files, objects, whole.append)

    assert whole == [entry.key for entry in objects[:20]]


@pytest.mark.parametrize(
    ("sizes", "at_once"),
    [
        ([], PARALLEL_GETS),
        ([0], PARALLEL_GETS),
        ([1, SIZE], PARALLEL_GETS),
        ([1, AHEAD_BYTES // 5], 5),
        ([AHEAD_BYTES, AHEAD_BYTES + 1], 2),
    ],
)
def test_as_many_are_read_at_a_time_as_memory_holds_of_the_largest(sizes: list[int], at_once: int):
    assert gets_at_once(entry_of(size) for size in sizes) == at_once
