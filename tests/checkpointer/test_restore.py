from pathlib import Path

import pytest

from dlrm_checkpointer.catalog import find_snapshot, verify_snapshot
from dlrm_checkpointer.files import FileStore
from dlrm_checkpointer.restore import newest_snapshot
from dlrm_checkpointer.walk import snapshot_digest


@pytest.mark.parametrize("written", [1, 2, 4])
@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_snapshot_restores_equal_rows_at_any_world_size(
    tmp_path: Path, files: FileStore, new_model, new_pod, written, read
):
    model = new_model().train(3)
    new_pod(tmp_path / "pod", files, world_size=written, ranks=range(written)).commit(model)

    snapshot, reasons = newest_snapshot(files)
    restored = new_model()
    for rank in range(read):
        for shard in restored.shards(rank, read):
            for piece in snapshot.shard_rows(shard):
                part, meta = piece.shard, snapshot.table(shard.table)
                blocks = meta.blocks_of(part.column_start, part.column_end)
                restored.rows[part.table][piece.row_ids, part.column_start : part.column_end] = piece.rows
                restored.state[part.table][piece.row_ids, blocks.start : blocks.stop] = piece.state
    restored.dense = snapshot.dense()

    assert reasons == []
    assert (snapshot.step, snapshot.meta) == (3, model.meta(written))
    assert restored.digest() == model.digest()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_digest_of_a_snapshot_is_that_of_the_live_state(
    tmp_path: Path, files: FileStore, new_model, new_pod, world_size
):
    model = new_model().train(2)
    new_pod(tmp_path / "pod", files, world_size=world_size, ranks=range(world_size)).commit(model)

    snapshot = find_snapshot(files)

    assert snapshot_digest(snapshot) == model.digest()
    assert verify_snapshot(snapshot).rows == {name: int(each.sum()) for name, each in model.touched.items()}
