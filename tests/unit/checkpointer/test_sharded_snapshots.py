"""Snapshots of tables that lie in pieces: any tiling by rows and column blocks over ranks comes back as any other."""

from __future__ import annotations

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_checkpointer.codec.digest import shard_digest, state_digest, table_digest
from dlrm_checkpointer.read.catalog import find_snapshot, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.types import ShardId, TableMeta
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.restored import stored_rows
from dlrm_testing.digests import snapshot_digest

RANKS = 3
Layout = dict[int, list[ShardId]]


def with_blocks(name: str, rows: int, width: int, blocks: int, state: int) -> TableMeta:
    return TableMeta(
        name=name,
        rows=rows,
        dim=width * blocks,
        seed=7,
        scale=0.25,
        column_blocks=tuple((i * width, (i + 1) * width) for i in range(blocks)),
        state_columns=(state,) * blocks,
    )


SPLIT_TABLES = (
    with_blocks("adagrad", 200, 4, 3, 1),
    with_blocks("adam", 90, 8, 4, 17),
    with_blocks("sgd", 60, 4, 2, 0),
    with_blocks("whole", 50, 8, 1, 1),
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Each table cut into groups of column blocks, each group into ranges of rows of its own; ranks at random."""
    found: Layout = {rank: [] for rank in range(RANKS)}
    for table in SPLIT_TABLES:
        inner = draw(st.sets(st.sampled_from([end for _, end in table.column_blocks])))
        for start, end in itertools.pairwise(sorted({0, table.dim, *inner})):
            cuts = draw(st.sets(st.integers(1, table.rows - 1), max_size=3))
            for first, last in itertools.pairwise(sorted({0, table.rows, *cuts})):
                shard = ShardId(table=table.name, row_start=first, row_end=last, column_start=start, column_end=end)
                found[draw(st.integers(0, RANKS - 1))].append(shard)
    return found


@pytest.fixture
def sharded(new_model):
    """A model whose shards lie as a layout says."""

    class Sharded(new_model):
        layout: Layout

        def shards(self, rank: int, world_size: int) -> list[ShardId]:
            assert world_size == RANKS
            return self.layout[rank]

    def build(layout: Layout) -> Sharded:
        model = Sharded(tables=SPLIT_TABLES)
        model.layout = layout
        return model

    return build


def digest_by_ranks(model, layout: Layout) -> str:
    """As ranks that hold nothing but their shards do it."""
    tables = []
    for meta in SPLIT_TABLES:
        partials = []
        for shard in (each for shards in layout.values() for each in shards if each.table == meta.name):
            places, columns = (
                meta.state_of(shard.column_start, shard.column_end),
                slice(shard.column_start, shard.column_end),
            )
            rows, state = model.rows[meta.name][:, columns], model.state[meta.name][:, places.start : places.stop]
            partials.append(shard_digest(meta, shard, lambda a, b, rows=rows, state=state: (rows[a:b], state[a:b])))
        tables.append((meta.name, table_digest(partials)))
    return state_digest(tables, model.dense)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=layouts(), read=layouts())
def test_rows_written_at_any_sharding_are_restored_at_any_other(sharded, new_pod, written: Layout, read: Layout):
    with TemporaryDirectory() as folder:
        files, model = FileStore(Path(folder) / "store"), sharded(written).train(2)
        new_pod(Path(folder) / "pod", files, world_size=RANKS, ranks=range(RANKS)).commit(model)

        snapshot, reasons = newest_snapshot(files)
        restored = sharded(read)
        for shard in itertools.chain.from_iterable(read.values()):
            for piece in stored_rows(snapshot, shard):
                part, meta = piece.shard, snapshot.table(shard.table)
                assert shard.row_start <= piece.row_ids[0]
                assert piece.row_ids[-1] < shard.row_end
                assert shard.column_start <= part.column_start < part.column_end <= shard.column_end
                places = meta.state_of(part.column_start, part.column_end)
                restored.rows[part.table][piece.row_ids, part.column_start : part.column_end] = piece.rows
                restored.state[part.table][piece.row_ids, places.start : places.stop] = piece.state
        restored.dense = snapshot.dense()

        assert reasons == []
        assert digest_by_ranks(restored, read) == digest_by_ranks(model, written) == model.digest()
        assert snapshot_digest(find_snapshot(files)) == model.digest()
        stored = {name: int(rows.sum()) for name, rows in model.touched.items()}
        assert verify_snapshot(find_snapshot(files)).rows == stored


@pytest.mark.slow
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(written=layouts())
def test_rows_never_updated_are_not_stored_and_have_initial_values(sharded, new_pod, written: Layout):
    with TemporaryDirectory() as folder:
        files, model = FileStore(Path(folder) / "store"), sharded(written).train(1)
        new_pod(Path(folder) / "pod", files, world_size=RANKS, ranks=range(RANKS), bits=8).commit(model)

        snapshot = find_snapshot(files)

        for meta in SPLIT_TABLES:
            seen = np.zeros((meta.rows, meta.dim), int)
            for piece in stored_rows(snapshot, meta.whole()):
                seen[piece.row_ids, piece.shard.column_start : piece.shard.column_end] += 1
            assert (seen == model.touched[meta.name][:, None]).all()
