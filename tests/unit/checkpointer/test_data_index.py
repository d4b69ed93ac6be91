"""The index of data files: equal after a round trip, never trusted when damaged, removed when nobody needs it."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.data_index import INDEXES, DataIndex, file_identity, index_prefix, put_index, read_index
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_stores.file import FileStore

ARRAYS = ("files", "contents", "digests", "blocks", "rows", "starts")


def index_of(blocks: list[list[int]], *, starts: bool = False, reads: str = "ab" * 32, stamp: str = "1") -> DataIndex:
    count, rows = len(blocks), np.array([row for each in blocks for row in each], np.int64)
    names = [file_identity(f"/data/{number}.parquet", 9, stamp) for number in range(count)]
    return DataIndex(
        reads=reads,
        files=np.frombuffer(b"".join(names), np.uint8).reshape(count, 16),
        contents=np.arange(8 * count, dtype=np.uint8).reshape(count, 8),
        digests=np.zeros((count, 32), np.uint8),
        blocks=np.array([len(each) for each in blocks], np.int64),
        rows=rows,
        starts=np.arange(rows.size) << 20 if starts else np.empty(0, np.int64),
    )


def check_equal(found: DataIndex, wanted: DataIndex) -> None:
    assert found.reads == wanted.reads
    for name in ARRAYS:
        np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name))


BLOCKS = st.lists(st.lists(st.integers(0, 2**40), max_size=4), min_size=1, max_size=6)


@given(blocks=BLOCKS, starts=st.booleans())
def test_an_index_comes_back_as_it_was(blocks: list[list[int]], starts: bool) -> None:
    index = index_of(blocks, starts=starts)

    check_equal(DataIndex.decode(bytes(index.encode()), "here"), index)


@given(blocks=BLOCKS, starts=st.booleans(), data=st.data())
def test_parts_of_an_index_join_to_it_in_any_order(blocks: list[list[int]], starts: bool, data: Any) -> None:
    index, order = index_of(blocks, starts=starts), data.draw(st.permutations(range(len(blocks))))
    cut = data.draw(st.integers(0, len(blocks)))

    joined = DataIndex.join([index.take(order[:cut]), index.take(order[cut:])])

    check_equal(joined.take(np.argsort(order)), index)


@given(place=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_index_is_never_trusted(place: int, bit: int, cut: bool) -> None:
    index = index_of([[3, 4], [5]], starts=True)
    body = bytearray(index.encode())
    place %= len(body)
    damaged = bytes(body[:place]) if cut else bytes([*body[:place], body[place] ^ 1 << bit, *body[place + 1 :]])
    with tempfile.TemporaryDirectory() as folder:
        store = FileStore(Path(folder))
        put_index(store, index)
        [info] = store.list(INDEXES)
        store.put(info.key, damaged)

        assert read_index(store, index.reads, index.files) is None
        put_index(store, index)
        found = read_index(store, index.reads, index.files)

    assert found is not None
    check_equal(found, index)


def test_an_index_that_contradicts_itself_is_named(caplog: pytest.LogCaptureFixture, files: FileStore) -> None:
    index = index_of([[3, 4], [5]])
    wrong = DataIndex(**{**vars(index), "blocks": np.array([2, 2])})
    put_index(files, wrong)

    with caplog.at_level(logging.WARNING):
        assert read_index(files, index.reads, index.files) is None

    assert "index of data files is unusable, building it again" in caplog.text
    with pytest.raises(SnapshotError, match="here: not an index of data files"):
        DataIndex.decode(bytes(wrong.encode()), "here")


def test_an_index_of_other_files_helps_only_what_reads_alike(files: FileStore) -> None:
    put_index(files, index_of([[3]], stamp="2"))
    put_index(files, index_of([[3]], reads="cd" * 32))

    found = read_index(files, "ab" * 32, index_of([[3]]).files)

    assert found is not None
    check_equal(found, index_of([[3]], stamp="2"))
    assert read_index(files, "ef" * 32, index_of([[3]]).files) is None


def test_retention_keeps_the_index_of_the_newest_attempts_data(
    tmp_path: Path, files: FileStore, new_model: Any, new_pod: Any
) -> None:
    old, own = index_of([[3]]), index_of([[3]], stamp="2")
    for index in (old, own):
        put_index(files, index)
    model, pod = new_model(data_index=old.fingerprint), new_pod(tmp_path / "pod", files)
    pod.commit(model.train(), claim_attempt(files, None, "first"))
    attempt = claim_attempt(files, 1, "second")
    model.data_index = own.fingerprint
    pod.commit(model.train(), attempt)

    Retention(files, RetentionPolicy(keep_last=2)).apply(attempt)
    assert len(list(files.list(INDEXES))) == 2, "an attempt that starts may have just stored it"
    Retention(files, RetentionPolicy(keep_last=2, orphan_s=0)).apply(attempt)

    assert [info.key.startswith(index_prefix(own.fingerprint)) for info in files.list(INDEXES)] == [True]
