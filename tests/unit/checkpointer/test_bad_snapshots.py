"""Every way in which a snapshot can be bad: what is said, and that the one before is taken instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlrm_api.errors import NoInputError, SnapshotError
from dlrm_checkpointer.format.manifest import manifest_key, sealed
from dlrm_checkpointer.read.catalog import find_snapshot, list_snapshots, verify_snapshot
from dlrm_checkpointer.read.restore import newest_snapshot, open_snapshot
from dlrm_checkpointer.types import ShardId
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest


@pytest.fixture
def two(tmp_path: Path, files: FileStore, new_model, new_pod):
    """A store with the snapshots of steps 1 and 2, and the digest of step 1."""
    model, pod = new_model(), new_pod(tmp_path / "pod", files)
    pod.commit(model.train())
    digest = model.digest()
    pod.commit(model.train())
    return files, digest


def largest(files: FileStore) -> Path:
    manifest = open_snapshot(files, 2, 1).manifest
    return files.root / max(manifest.chunks, key=lambda entry: entry.bytes).key


def flip_a_byte(files: FileStore) -> None:
    path = largest(files)
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(bytes(body))


def truncate(files: FileStore) -> None:
    path = largest(files)
    path.write_bytes(path.read_bytes()[:-1])


def delete(files: FileStore) -> None:
    largest(files).unlink()


def lose_the_dense_state(files: FileStore) -> None:
    (files.root / open_snapshot(files, 2, 1).manifest.dense.key).unlink()


def change_manifest(files: FileStore, **changes: object) -> None:
    path = files.root / manifest_key(2, 1)
    path.write_bytes(sealed(json.loads(path.read_text()) | changes))


def another_digit(files: FileStore) -> None:
    path = files.root / manifest_key(2, 1)
    path.write_text(path.read_text().replace('"samples":128', '"samples":129'))


def without_a_seal(files: FileStore) -> None:
    path = files.root / manifest_key(2, 1)
    value = json.loads(path.read_text())
    del value["seal"]
    path.write_text(json.dumps(value))


def torn_manifest(files: FileStore) -> None:
    path = files.root / manifest_key(2, 1)
    path.write_bytes(path.read_bytes()[:200])


def empty_manifest(files: FileStore) -> None:
    (files.root / manifest_key(2, 1)).write_bytes(b"")


def endless_version(files: FileStore) -> None:
    (files.root / manifest_key(2, 1)).write_text('{"version": Infinity}')


def bottomless_manifest(files: FileStore) -> None:
    (files.root / manifest_key(2, 1)).write_text("[" * 200_000)


def endless_rows(files: FileStore) -> None:
    meta = open_snapshot(files, 2, 1).manifest.meta
    tables = [table | {"rows": float("inf")} for table in meta["model"]["tables"]]
    change_manifest(files, meta=meta | {"model": meta["model"] | {"tables": tables}})


def wrong_kind(files: FileStore) -> None:
    change_manifest(files, kind="sideways")


def of_another_step(files: FileStore) -> None:
    change_manifest(files, meta=open_snapshot(files, 1, 1).manifest.meta)


def without_meta(files: FileStore) -> None:
    change_manifest(files, meta={"step": 2})


def reaching_out_of_the_store(files: FileStore) -> None:
    dense = {"key": "chunks/../../../etc/passwd", "bytes": 1, "sha256": "0" * 64}
    change_manifest(files, dense=dense)


def of_an_unknown_table(files: FileStore) -> None:
    chunks = open_snapshot(files, 2, 1).manifest.model_dump(mode="json")["chunks"]
    change_manifest(files, chunks=[chunks[0] | {"table": "ghosts"}])


DAMAGES = {
    flip_a_byte: r"chunks/.*: corrupt: its SHA-256 is not the manifest's",
    truncate: r"chunks/.*: \d+ bytes, the manifest says \d+",
    delete: r"chunks/.*: an object of the snapshot is missing",
    lose_the_dense_state: r"dense-.*: an object of the snapshot is missing",
    another_digit: r"0000000000000002-00000001\.json: corrupt: its SHA-256 is not its seal",
    without_a_seal: r"0000000000000002-00000001\.json: corrupt: its SHA-256 is not its seal",
    torn_manifest: r"0000000000000002-00000001\.json: not JSON of this format",
    empty_manifest: r"0000000000000002-00000001\.json: not JSON of this format",
    endless_version: r"0000000000000002-00000001\.json: not JSON of this format",
    bottomless_manifest: r"0000000000000002-00000001\.json: not JSON of this format",
    endless_rows: r"meta is not as the format says",
    wrong_kind: r"0000000000000002-00000001\.json: kind: must be 'full'",
    of_another_step: r"says that it is step 1 of attempt 1",
    without_meta: r"meta is not as the format says",
    reaching_out_of_the_store: r"dense\.key: 'chunks.*passwd' does not match",
    of_an_unknown_table: r"holds rows of a table ghosts that its model does not have",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_bad_snapshot_is_passed_over_with_its_reason(two, damage):
    files, digest = two

    damage(files)
    snapshot, reasons = newest_snapshot(files)

    assert (snapshot.step, snapshot_digest(snapshot)) == (1, digest)
    assert len(reasons) == 1
    with pytest.raises(SnapshotError, match=DAMAGES[damage]):
        raise SnapshotError(reasons[0])


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_step_0_is_refused_if_no_snapshot_can_be_used(two, damage):
    files, _ = two
    damage(files)
    files.delete(manifest_key(1, 1))

    with pytest.raises(SnapshotError, match=r"no snapshot can be used .* give an empty spec\.checkpoint\.uri"):
        newest_snapshot(files)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_verification_finds_what_is_bad(two, damage):
    files, _ = two
    damage(files)

    with pytest.raises(SnapshotError, match=DAMAGES[damage]):
        verify_snapshot(open_snapshot(files, 2, 1))


def test_without_verification_damage_shows_while_reading(two):
    files, _ = two
    flip_a_byte(files)

    snapshot, _ = newest_snapshot(files, check=None)

    assert snapshot.step == 2
    with pytest.raises(SnapshotError, match="corrupt"):
        snapshot_digest(snapshot)


def test_a_listing_goes_on_past_a_manifest_that_cannot_be_read(two):
    files, _ = two
    torn_manifest(files)

    listed = list_snapshots(files)

    assert [(each.step, each.manifest is None) for each in listed] == [(2, True), (1, False)]
    assert "not JSON" in listed[0].problem
    assert find_snapshot(files).step == 1


def test_an_empty_store_holds_no_snapshot(files: FileStore):
    assert newest_snapshot(files) == (None, [])
    assert list_snapshots(files) == []
    with pytest.raises(NoInputError, match=r"no snapshot is there \(steps: none\)"):
        find_snapshot(files)


def test_a_step_that_is_not_there_is_refused_with_those_that_are(two):
    with pytest.raises(NoInputError, match=r"no snapshot of step 7 is there \(steps: 1, 2\)"):
        find_snapshot(two[0], step=7)


def test_rows_of_another_model_are_refused_by_table(two):
    snapshot, _ = newest_snapshot(two[0])

    with pytest.raises(SnapshotError, match="has no table ghosts: it is of another model"):
        list(snapshot.shard_codes([ShardId(table="ghosts", row_start=0, row_end=1, column_start=0, column_end=4)]))


def test_columns_that_cut_a_block_are_refused(two):
    snapshot, _ = newest_snapshot(two[0])

    with pytest.raises(SnapshotError, match="table items: columns 0:4 cut its column blocks"):
        list(snapshot.shard_codes([ShardId(table="items", row_start=0, row_end=5, column_start=0, column_end=4)]))


def test_a_row_stored_twice_is_found_by_table_and_row(tmp_path: Path, files: FileStore, new_model, new_pod):
    model = new_model().train()
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2))
    for rank in range(2):  # both ranks hand over rank 0's rows
        dense = model.dense if rank == 0 else None
        pod.writers[rank].hand_over(model.meta(2), model.pieces(0, 2), dense, owned=model.shards(0, 2), timeout_s=1)
    pod.finish()

    with pytest.raises(SnapshotError, match=r"table users, row \d+: is stored twice"):
        verify_snapshot(open_snapshot(files, 1, 1))
