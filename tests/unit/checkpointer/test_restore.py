import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_checkpointer.format.manifest import sealed
from dlrm_checkpointer.read.catalog import find_snapshot, verify_snapshot, walk_table
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.types import ShardId, check_rows
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.restored import stored_rows
from dlrm_testing.digests import snapshot_digest


@pytest.mark.parametrize("written", [1, 2, 4])
@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_snapshot_restores_equal_rows_at_any_world_size(
    tmp_path: Path, files: FileStore, new_model, new_pod, all_tables, written, read
):
    model = new_model(tables=all_tables).train(3)
    new_pod(tmp_path / "pod", files, world_size=written, ranks=range(written)).commit(model)

    snapshot, reasons = newest_snapshot(files)
    restored = new_model(tables=all_tables)
    for rank in range(read):
        for shard in restored.shards(rank, read):
            for piece in stored_rows(snapshot, shard):
                part, meta = piece.shard, snapshot.table(shard.table)
                places = meta.state_of(part.column_start, part.column_end)
                restored.rows[part.table][piece.row_ids, part.column_start : part.column_end] = piece.rows
                restored.state[part.table][piece.row_ids, places.start : places.stop] = piece.state
    restored.dense = snapshot.dense()

    assert reasons == []
    assert (snapshot.step, snapshot.meta) == (3, model.meta(written))
    assert restored.digest() == model.digest()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_digest_of_a_snapshot_is_that_of_the_live_state(
    tmp_path: Path, files: FileStore, new_model, new_pod, all_tables, world_size
):
    model = new_model(tables=all_tables).train(2)
    new_pod(tmp_path / "pod", files, world_size=world_size, ranks=range(world_size)).commit(model)

    snapshot = find_snapshot(files)

    assert snapshot_digest(snapshot) == model.digest()
    assert verify_snapshot(snapshot).rows == {name: int(each.sum()) for name, each in model.touched.items()}


def test_old_table_documents_default_to_one_state_value_and_fp32(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables
):
    model = new_model(tables=small_tables[:3]).train(2)
    new_pod(tmp_path / "pod", files).commit(model)
    key = "manifests/0000000000000002-00000001.json"
    manifest = json.loads(files.get(key))
    for table in manifest["meta"]["model"]["tables"]:
        del table["stateColumns"], table["dtype"]

    files.put(key, sealed(manifest))

    snapshot = find_snapshot(files)
    assert snapshot.meta.tables == model.tables
    assert snapshot_digest(snapshot) == model.digest()


def test_rows_with_another_optimizers_state_are_refused_by_shard(new_model, small_tables):
    adam = small_tables[3]
    piece = next(piece for piece in new_model(tables=(adam,)).train().pieces(0, 1))

    bad = dataclasses.replace(piece, state=piece.state[:, :2].copy())

    check_rows(piece, adam)
    with pytest.raises(ValueError, match=r"adam\[0:90, 0:8\]: rows have 2 values of state, not 18"):
        check_rows(bad, adam)


def test_fp16_rows_come_back_exactly_at_32_bits_and_as_fp16_values_at_8(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables
):
    half = small_tables[5]
    model = new_model(tables=(half,)).train(2)
    pod = new_pod(tmp_path / "pod", files)
    pod.commit(model)
    exact, live = snapshot_digest(find_snapshot(files)), model.digest()
    pod.bits = 8
    pod.commit(model.train())

    snapshot = find_snapshot(files)
    rows, _ = next(walk_table(snapshot, half)).fill()

    assert exact == live
    assert snapshot.manifest.bits == 8
    assert (rows == rows.astype(np.float16)).all()
    np.testing.assert_allclose(rows, model.rows["half"], atol=0.02)
    assert (rows[~model.touched["half"]] == model.rows["half"][~model.touched["half"]]).all()


@pytest.fixture
def stored(tmp_path: Path, files: FileStore, new_model, new_pod, all_tables):
    """A snapshot that two ranks wrote, each column block of ``items`` by itself; and the state that it holds."""
    model = new_model(tables=all_tables).train(2)
    new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2)).commit(model)
    return newest_snapshot(files)[0], model


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_rectangle_along_the_blocks_is_restored_and_nothing_else(stored, data: st.DataObject):
    snapshot, model = stored
    name = data.draw(st.sampled_from(["items", "adam"]))
    table = snapshot.table(name)
    half, values = table.dim // 2, table.state_columns[0]
    start = data.draw(st.integers(0, table.rows - 1))
    end = data.draw(st.integers(start + 1, table.rows))
    first, last = data.draw(st.sampled_from([(0, 1), (1, 2), (0, 2)]))
    columns = (half * first, half * last)
    shard = ShardId(table=name, row_start=start, row_end=end, column_start=columns[0], column_end=columns[1])
    rows = np.full((table.rows, table.dim), np.nan, np.float32)
    state = np.full((table.rows, 2 * values), np.nan, np.float32)

    for piece in stored_rows(snapshot, shard):
        places = table.state_of(piece.shard.column_start, piece.shard.column_end)
        rows[piece.row_ids, piece.shard.column_start : piece.shard.column_end] = piece.rows
        state[piece.row_ids, places.start : places.stop] = piece.state

    inside = np.zeros_like(rows, bool)
    inside[start:end, columns[0] : columns[1]] = model.touched[name][start:end, None]
    assert (~np.isnan(rows) == inside).all()
    assert (rows[inside] == model.rows[name][inside]).all()
    ids, wanted = np.flatnonzero(model.touched[name][start:end]) + start, slice(values * first, values * last)
    assert (state[ids, wanted] == model.state[name][ids, wanted]).all()
    assert np.isnan(np.delete(state, ids, axis=0)).all()


@pytest.mark.parametrize("chunk_bytes", [64, 4_096])
def test_rows_cut_into_many_small_chunks_come_back_the_same(
    tmp_path: Path, files: FileStore, new_model, new_pod, monkeypatch, small_tables, chunk_bytes: int
):
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", chunk_bytes)
    model = new_model(tables=small_tables).train(2)
    new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2)).commit(model)

    snapshot, _ = newest_snapshot(files)

    assert all(entry.rows * 4 * entry.shard.width <= max(chunk_bytes, 64) for entry in snapshot.manifest.chunks)
    assert snapshot_digest(snapshot) == model.digest()
