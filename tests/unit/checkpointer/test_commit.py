"""The manifest, which any sidecar of a gang may put."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_checkpointer.format.manifest import (
    Manifest,
    SnapshotConflictError,
    manifest_key,
    parse_manifest,
    parse_part,
    part_key,
)
from dlrm_checkpointer.write.commit import find_commit, read_parts, try_commit
from dlrm_stores.file import FileStore

RANKS = 8
KEY = manifest_key(1, 1)


@pytest.fixture
def committed(tmp_path: Path, files: FileStore, new_model, new_pod) -> Manifest:
    new_pod(tmp_path / "pod", files, world_size=RANKS, ranks=range(RANKS)).commit(new_model().train())
    return parse_manifest(files.get(KEY), KEY)


def test_whoever_finds_all_part_lists_and_no_manifest_puts_the_same_one(files: FileStore, committed: Manifest) -> None:
    body = files.get(KEY)
    files.delete(KEY)

    assert find_commit(files, 1, 1) is None
    assert try_commit(files, 1, 1, RANKS) == committed
    assert files.get(KEY) == body
    assert find_commit(files, 1, 1) == committed


@pytest.mark.parametrize("missing", [0, RANKS - 1])
def test_nothing_is_committed_while_a_part_list_is_missing(files: FileStore, committed: Manifest, missing: int) -> None:
    files.delete(KEY)
    files.delete(part_key(1, 1, missing))
    files.put(part_key(1, 1, RANKS), b"")

    assert try_commit(files, 1, 1, RANKS) is None
    assert files.size(KEY) is None


def test_a_manifest_without_the_objects_of_a_pod_is_no_commit_of_its_cut(files: FileStore, committed: Manifest) -> None:
    key = part_key(1, 1, 3)
    mine = parse_part(files.get(key), key).chunks
    assert mine
    less = committed.model_copy(update={"chunks": tuple(chunk for chunk in committed.chunks if chunk not in mine)})
    files.put(KEY, less.encode())

    with pytest.raises(SnapshotConflictError, match="other content"):
        find_commit(files, 1, 1, lambda: read_parts(files, 1, 1, range(2, 4)))
    assert files.get(KEY) == less.encode()


@pytest.mark.slow
def test_a_commit_holds_what_part_lists_say_alike_once(files: FileStore, committed: Manifest) -> None:
    data = [{"name": f"day-{number}.parquet", "bytes": 10**8 + number, "rows": 10**6} for number in range(5_000)]
    files.delete(KEY)
    for rank in range(RANKS):
        key = part_key(1, 1, rank)
        part = parse_part(files.get(key), key)
        files.put(key, part.model_copy(update={"meta": part.meta | {"metrics": {"files": data}}}).encode())
    body = files.get(part_key(1, 1, 0))

    tracemalloc.start()
    try:
        one = parse_part(body, part_key(1, 1, 0))
        size, _ = tracemalloc.get_traced_memory()
        del one
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        assert try_commit(files, 1, 1, RANKS) is not None
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert peak - before < 5 * size


@pytest.mark.slow
def test_a_manifest_of_many_objects_takes_little_more_memory_than_its_json(committed: Manifest) -> None:
    count, chunk = 20_000, committed.chunks[0]
    rows = 2 * 10**9
    chunks = tuple(replace(chunk, first_row=n, last_row=10**9 + n, row_end=rows) for n in range(count))
    tables = [table | {"rows": rows} for table in committed.meta["model"]["tables"]]
    meta = committed.meta | {"model": {"tables": tables}}
    body = committed.model_copy(update={"chunks": chunks, "meta": meta}).encode()
    del chunks

    tracemalloc.start()
    try:
        manifest = parse_manifest(body, KEY)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert len(manifest.chunks) == count
    assert max(held, peak) < 2 * len(body)
