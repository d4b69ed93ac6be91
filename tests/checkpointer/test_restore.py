from pathlib import Path

import numpy as np
import pytest

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.cut import ShardId
from dlrm_checkpointer.files import FileStore
from dlrm_checkpointer.initializer import initial_rows
from dlrm_checkpointer.restore import newest_snapshot


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
