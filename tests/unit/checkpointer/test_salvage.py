"""Cuts of which parts are missing, because their ranks were lost: rows of the others go on from them."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.codec.initializer import initial_rows
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.chain import Chain
from dlrm_checkpointer.format.manifest import manifest_key, part_key
from dlrm_checkpointer.read.catalog import list_snapshots
from dlrm_checkpointer.read.restore import PartialCut, find_partial, newest_snapshot, open_partial
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.restored import stored_rows


@pytest.fixture
def lost(tmp_path: Path, files: FileStore, new_model, new_pod, request):
    """A gang of two ranks that committed step 2, of whose cut at step 4 only rank 0's part was stored."""
    policy = getattr(request, "param", "intermittent")
    model = new_model()
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), policy=policy)
    attempt = claim_attempt(files, None, "test")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    before = copy.deepcopy(model)
    pod.cut(model.train(2), attempt, only=range(1))
    pod.finish()
    return before, model, attempt


@pytest.mark.parametrize("lost", ["full", "one-shot", "consecutive", "intermittent"], indirect=True)
def test_lost_ranks_fall_back_to_the_snapshot_and_others_keep_the_cut(lost, files: FileStore):
    before, after, attempt = lost
    base, _ = newest_snapshot(files)

    salvage = find_partial(files, base)
    snapshot = open_partial(files, base, salvage)

    assert (base.step, salvage) == (2, PartialCut(SnapshotName(4, attempt), (0,)))
    assert (snapshot.step, snapshot.meta.samples) == (4, after.meta(2).samples)
    np.testing.assert_array_equal(snapshot.dense()["top.0.weight"], after.dense["top.0.weight"])
    for model, rank in ((after, 0), (before, 1)):
        for shard in model.shards(rank, 2):
            table = snapshot.table(shard.table)
            ids = np.arange(shard.row_start, shard.row_end)
            columns = range(shard.column_start, shard.column_end)
            rows = initial_rows(table.seed, table.name, ids, columns, table.scale)
            for piece in stored_rows(snapshot, shard):
                first = piece.shard.column_start - shard.column_start
                rows[piece.row_ids - shard.row_start, first : first + piece.shard.width] = piece.rows
            expected = model.rows[shard.table][shard.row_start : shard.row_end, columns.start : columns.stop]
            np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("lost", ["full", "one-shot", "consecutive", "intermittent"], indirect=True)
def test_a_sent_chain_gives_a_rank_its_rows_and_less_to_hold(lost, files: FileStore) -> None:
    model = lost[1]
    base, _ = newest_snapshot(files)
    for whole in (base, open_partial(files, base, find_partial(files, base))):
        links, bodies = whole.chain.links, list(whole.chain.pack())
        for rank in range(3):
            shards = model.shards(rank, 3)

            sent = type(whole)(files, Chain.unpack(links, bodies, shards))

            assert (sent.uri, sent.meta, sent.manifest.dense) == (whole.uri, whole.meta, whole.manifest.dense)
            assert (sent.last_rows(), len(sent.objects) < len(whole.objects)) == (whole.last_rows(), True)
            for shard in shards:
                pieces = zip(stored_rows(sent, shard), stored_rows(whole, shard), strict=True)
                assert all(mine.shard == all_.shard and (mine.rows == all_.rows).all() for mine, all_ in pieces)


@pytest.mark.parametrize(
    "damage", [lambda body: b"", lambda body: body[:-9], lambda body: zlib.compress(zlib.decompress(body)[:-9])]
)
def test_a_damaged_chain_names_the_manifest(lost, files: FileStore, damage: Callable[[bytes], bytes]) -> None:
    base, _ = newest_snapshot(files)
    body, name = next(base.chain.pack()), base.chain.links[0].name

    with pytest.raises(SnapshotError, match=manifest_key(name.step, name.attempt)):
        Chain.unpack(base.chain.links[:1], [damage(body)], [])


def test_nothing_is_salvaged_without_the_dense_state_of_rank_0(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2))
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(), attempt)
    parent = pod.writers[0].begin(attempt)
    pod.cut_of(1, model.train(), attempt, parent=parent)
    pod.finish()

    assert find_partial(files, newest_snapshot(files)[0]) is None


def test_nothing_of_a_history_that_was_given_up_is_salvaged(lost, files: FileStore):
    claim_attempt(files, 2, "went on without it")

    assert find_partial(files, newest_snapshot(files)[0]) is None


def test_a_cut_whose_objects_are_damaged_is_not_salvaged(lost, files: FileStore):
    base, _ = newest_snapshot(files)
    found = open_partial(files, base, find_partial(files, base))
    path = files.root / found.manifest.chunks[0].key
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    assert find_partial(files, base) is None


def test_a_cut_over_a_snapshot_that_cannot_be_used_is_not_salvaged(lost, files: FileStore):
    files.delete("manifests/0000000000000002-00000001.json")
    for rank in range(2):
        files.delete(part_key(2, 1, rank))
    base, _ = newest_snapshot(files)

    assert [each.step for each in list_snapshots(files)] == [1]
    assert find_partial(files, base) is None
