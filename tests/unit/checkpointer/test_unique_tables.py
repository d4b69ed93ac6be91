"""Snapshots of tables of unique ids: rows by key, and keys that leave."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dlrm_api.errors import SnapshotError
from dlrm_api.keys import KEY_END
from dlrm_checkpointer.codec.initializer import id_seed
from dlrm_checkpointer.codec.rows import CodedRows, code_rows
from dlrm_checkpointer.codec.rows import decode_rows as weights_of
from dlrm_checkpointer.format.chain import load_chain
from dlrm_checkpointer.format.chunk import decode_rows, encode_rows, put_by_digest
from dlrm_checkpointer.format.manifest import manifest_key, part_key, sealed
from dlrm_checkpointer.read.catalog import find_snapshot, list_snapshots, verify_snapshot
from dlrm_checkpointer.read.diff import diff_snapshots, updates
from dlrm_checkpointer.read.export import ExportOptions, Safetensors, export_tables, restore_to_folder
from dlrm_checkpointer.read.restore import PartialCut, find_partial, open_partial, open_snapshot
from dlrm_checkpointer.types import ShardRows, SnapshotName
from dlrm_kernels.hashing import keys_of_ids
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.turns import Clock, MemoryStore
from dlrm_testing.checkpointer.unique import COUNTERS, SHARED, UniqueModel, commit, served, unique_table
from dlrm_testing.digests import snapshot_digest

POLICIES = ["full", "one-shot", "consecutive", "intermittent"]
KEYS = [0, 1, 2**40, 2**60 - 1, 2**60, 2**61, *(2**62 + each for each in range(4)), KEY_END - 1]
HISTORIES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def restored(snapshot, model: UniqueModel, world_size: int) -> dict[int, bytes]:
    """Rows of the table of unique ids as ranks restore them."""
    found: dict[int, bytes] = {}
    for rank in range(world_size):
        shards = [shard for shard in model.shards(rank, world_size) if shard.table == "ids"]
        for number, coded in snapshot.shard_codes(shards):
            piece = weights_of(coded)
            assert shards[number].row_start <= piece.row_ids[0] <= piece.row_ids[-1] < shards[number].row_end
            for place, key in enumerate(piece.row_ids.tolist()):
                assert key not in found
                found[key] = piece.rows[place].tobytes() + piece.state[place].tobytes()
    return found


def held(model: UniqueModel) -> dict[int, bytes]:
    return {key: row.weights.tobytes() + row.state.tobytes() for key, row in model.by_key["ids"].items()}


@HISTORIES
@given(data=st.data())
def test_random_histories_restore_what_a_dictionary_holds(
    data: st.DataObject, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Rows come and go, cuts are lost, and snapshots are merged by every policy at changing world sizes."""
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", data.draw(st.sampled_from([24, 72, 32 << 20])))
    monkeypatch.setattr("dlrm_checkpointer.write.merge.MAX_GONE_KEYS", data.draw(st.sampled_from([1, 2, 1 << 20])))
    store, model = MemoryStore(clock), UniqueModel((unique_table(dim=4, buckets=4),))
    parent: SnapshotName | None = None
    committed: list[tuple[SnapshotName, dict[int, bytes], str]] = []
    some = st.sets(st.sampled_from(KEYS), max_size=6)
    for _ in range(data.draw(st.integers(1, 7))):
        model.step += 1
        model.remove("ids", data.draw(some) & set(model.by_key["ids"]))
        model.update("ids", data.draw(some))
        if data.draw(st.booleans()):
            options = {"world_size": data.draw(st.integers(1, 3)), "policy": data.draw(st.sampled_from(POLICIES))}
            segments = data.draw(st.lists(st.integers(0, 2), max_size=2))
            parent = commit(store, model, parent, segments=segments, **options)
            committed.append((parent, held(model), model.digest()))

    for name, rows, digest in committed:
        snapshot = open_snapshot(store, name.step, name.attempt)
        assert verify_snapshot(snapshot).rows == {"ids": len(rows)}
        assert restored(snapshot, model, data.draw(st.integers(1, 4))) == rows
        assert snapshot_digest(snapshot) == digest
    for (one, old, _), (other, new, _) in pairwise(committed):
        [found] = diff_snapshots(*(open_snapshot(store, each.step, each.attempt) for each in (one, other)))
        assert (found.new, found.gone) == (len(new.keys() - old.keys()), len(old.keys() - new.keys()))
        assert found.changed == sum(old[key] != new[key] for key in old.keys() & new.keys())
    if committed:
        one, other = data.draw(st.sampled_from(committed)), data.draw(st.sampled_from(committed))
        assert updated(store, model, one, other) == weights(other)


def weights(committed: tuple[SnapshotName, dict[int, bytes], str]) -> dict[int, bytes]:
    return {key: row[:16] for key, row in committed[1].items()}


def updated(store, model: UniqueModel, one, other) -> dict[int, bytes]:
    """The rows of a snapshot after what a delta to another one, possibly older, does to them."""
    before, after = (load_chain(store, each[0]) for each in (one, other))
    found = weights(one)
    for update in updates(store, model.tables[0], before, after, range(KEY_END)):
        for key in update.gone.tolist():
            found.pop(key, None)
        found |= dict(zip(update.row_ids.tolist(), map(bytes, update.rows), strict=True))
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pod_commits_cuts_of_unique_tables(tmp_path: Path, files: FileStore, new_pod, policy: str):
    model, digests = UniqueModel(), {}
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), policy=policy, keep_last=9)

    for _ in range(4):
        pod.commit(model.train())
        digests[model.step] = model.digest()

    assert {each.step: snapshot_digest(open_snapshot(files, each.step, 1)) for each in list_snapshots(files)} == digests


def test_a_cut_above_the_budget_holds_rows_and_gone_keys_in_segments(tmp_path: Path, files: FileStore, new_pod):
    model = UniqueModel((unique_table(dim=64, rows=4_000),))
    pod = new_pod(tmp_path / "pod", files, policy="consecutive")
    model.step = 1
    model.update("ids", range(0, 2**62, 2**62 // 600))
    pod.commit(model)
    model.step = 2
    keys = sorted(model.by_key["ids"])
    model.remove("ids", keys[:300])
    model.update("ids", keys[300:])

    commit(files, model, SnapshotName(1, 1), segments=[1, 1])

    assert snapshot_digest(find_snapshot(files)) == model.digest()
    manifest = find_snapshot(files).manifest
    assert manifest.gone
    assert manifest.growth.last_bytes == sum(entry.bytes for entry in (*manifest.chunks, *manifest.gone))


def test_only_models_with_unique_ids_are_written_in_version_3(tmp_path: Path, files: FileStore, new_model, few_rows):
    old, new = FileStore(tmp_path / "old"), FileStore(tmp_path / "new")
    fixed, unique = UniqueModel(few_rows).train(), UniqueModel((*few_rows, unique_table())).train()
    commit(old, fixed, None)
    commit(new, unique, None)

    one, other = find_snapshot(old).manifest, find_snapshot(new).manifest

    assert (one.version, other.version) == (2, 3)
    assert [chunk.sha256 for chunk in other.chunks if chunk.table != "ids"] == [chunk.sha256 for chunk in one.chunks]


@pytest.mark.parametrize("bits", [2, 8, 16])
def test_touched_is_kept_in_periods_below_32_bits(clock: Clock, bits: int):
    store, model, parent = MemoryStore(clock), UniqueModel((unique_table(),)), None
    for step in (1, 1_000, 70_000, 10_000_000):
        model.step = step
        model.update("ids", [step])
        parent = commit(store, model, parent, bits=bits, policy="full")

    [piece] = (weights_of(coded) for _, coded in find_snapshot(store).shard_codes([model.tables[0].whole()]))

    touched = dict(zip(piece.row_ids.tolist(), piece.state.view(np.uint32)[:, -1].tolist(), strict=True))
    oldest = (10_000_000 // 64 - 65_535) * 64
    assert touched == {1: oldest, 1_000: oldest, 70_000: oldest, 10_000_000: 10_000_000 // 64 * 64}


@pytest.mark.parametrize("bits", [8, 32])
def test_rows_of_the_first_steps_count_as_updated(clock: Clock, bits: int):
    """Step 0 means that a row was never updated: a restored trainer would neither read nor save it."""
    store, model = MemoryStore(clock), UniqueModel((unique_table(),))
    model.step = 1
    model.update("ids", [5])
    commit(store, model, None, bits=bits)

    [piece] = (weights_of(coded) for _, coded in find_snapshot(store).shard_codes([model.tables[0].whole()]))

    assert piece.state.view(np.uint32)[0, -1] == 1


def test_a_key_that_is_handed_over_twice_is_refused_by_name(clock: Clock):
    model = UniqueModel((unique_table(),)).train()
    [first, second] = model.pieces(0, 1)
    twice = replace(first, row_ids=np.where(np.arange(len(first.row_ids)) == 0, second.row_ids[0], first.row_ids))

    model.pieces = lambda *_: iter((twice, second))  # type: ignore[method-assign]

    with pytest.raises(SnapshotError, match=f"key {second.row_ids[0]} was handed over twice"):
        commit(MemoryStore(clock), model, None)


def test_a_partial_cut_of_a_unique_table_is_not_used(files: FileStore):
    """A lost rank would go back to a snapshot with other keys."""
    model = UniqueModel().train()
    name = commit(files, model, None, world_size=2)
    commit(files, model.train(), name, world_size=2)
    files.delete(manifest_key(2, 1))
    files.delete(part_key(2, 1, 1))
    base = find_snapshot(files)

    assert find_partial(files, base) is None
    with pytest.raises(SnapshotError, match="unique ids"):
        open_partial(files, base, PartialCut(SnapshotName(2, 1), (0,)))


def as_container(body: bytes, **claims: object) -> bytes:
    """An object whose text says something else."""
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    said = json.loads(header["__metadata__"]["dlrm"]) | claims
    text = json.dumps(header | {"__metadata__": {"dlrm": json.dumps(said)}}).encode()
    return len(text).to_bytes(8, "little") + text + body[end:]


@pytest.mark.parametrize("what", ["rows", "gone"])
@pytest.mark.parametrize(
    "claim",
    [
        {"lowBits": 63},
        {"lowBits": -1},
        {"lowBits": 1},
        {"rows": 10**13},
        {"rows": 11},
        {"rows": 2**70},
        {"firstRow": 2**63 - 3},
        {"firstRow": -1},
        {"rowEnd": 2**40},
        {"rowEnd": 2**64},
        {"touchedBase": 2**26},
        {"touchedBase": 3},
        {"touchedBase": None},
        {"version": 2},
        {"version": 4},
    ],
    ids=str,
)
def test_an_object_with_false_claims_is_refused_by_its_key(what: str, claim: dict[str, object]):
    meta, keys = unique_table(), np.arange(10, dtype=np.int64) << 50
    rows, state = np.ones((10, 8), np.float32), np.zeros((10, 2), np.float32)
    state.view(np.uint32)[:, 1] = np.arange(10) * 64
    piece = ShardRows(shard=meta.whole(), row_ids=keys, rows=rows, state=state)
    coded = CodedRows.gone(meta.whole(), keys) if what == "gone" else code_rows(piece, 8, table=meta)[0]
    body = bytes(encode_rows(coded, meta))
    if what == "gone" and "touchedBase" in claim:
        claim = {"kind": "rows"}

    assert decode_rows(body, "chunks/x").row_ids.tolist() == keys.tolist()
    with pytest.raises(SnapshotError, match="chunks/x"):
        decode_rows(as_container(body, **claim), "chunks/x")


def table_says(**claims: object):
    return lambda manifest: manifest["meta"]["model"]["tables"][0].update(claims)


def entry_says(kind: str, **claims: object):
    return lambda manifest: manifest[kind][0].update(claims)


def swap(manifest: dict[str, list[object]]) -> None:
    manifest["chunks"][0], manifest["gone"][0] = manifest["gone"][0], manifest["chunks"][0]


@pytest.mark.parametrize(
    "change",
    [
        table_says(ids="other"),
        table_says(buckets=3),
        table_says(buckets=2**17),
        table_says(rowValues=["age"]),
        table_says(columnBlocks=[[0, 4], [4, 8]], stateColumns=[1, 1]),
        table_says(rows=4),
        entry_says("chunks", rowEnd=2**63),
        entry_says("chunks", rows=10**6),
        entry_says("gone", table="users"),
        entry_says("gone", lastRow=2**63 - 1),
        lambda manifest: manifest.update(version=2),
        lambda manifest: manifest.update(kind="full", chain=[]),
        swap,
    ],
)
def test_a_snapshot_with_false_claims_is_refused_by_name(files: FileStore, change):
    model = UniqueModel().train()
    parent = commit(files, model, None)
    commit(files, model.train(), parent)
    path = files.root / manifest_key(2, 1)
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_bytes(sealed(manifest))

    with pytest.raises(SnapshotError, match=r"0000000000000002-00000001\.json|chunks/0000000000000002"):
        verify_snapshot(open_snapshot(files, 2, 1))


def test_a_key_that_is_a_row_and_gone_in_one_snapshot_is_found_by_verify(files: FileStore):
    model = UniqueModel((unique_table(),)).train()
    parent = commit(files, model, None)
    model.train()
    [row, *_] = (int(piece.row_ids[0]) for piece in model.pieces(0, 1, parent))
    commit(files, model, parent)
    snapshot = find_snapshot(files)
    [entry] = snapshot.manifest.gone
    body = bytes(encode_rows(CodedRows.gone(model.tables[0].whole(), np.array([row])), model.tables[0]))
    put = put_by_digest(files, lambda _: entry.key, body)
    path = files.root / manifest_key(2, 1)
    changed = {"bytes": put.bytes, "sha256": put.sha256, "rows": 1, "firstRow": row, "lastRow": row}
    manifest = json.loads(path.read_text())
    manifest["gone"][0] |= changed
    path.write_bytes(sealed(manifest))

    with pytest.raises(SnapshotError, match=f"row {row}: is stored twice"):
        verify_snapshot(find_snapshot(files))


def test_exports_have_the_original_ids(tmp_path: Path, clock: Clock):
    store, model = MemoryStore(clock), UniqueModel((unique_table(),))
    ids = np.array([0, 1, 5, 2**40, 2**62 + 1], np.uint64)
    keys = keys_of_ids(ids, np.uint64(id_seed(7, "ids"))).tolist()
    model.step = 1
    model.update("ids", keys)
    commit(store, model, None)

    export_tables(find_snapshot(store), tmp_path / "out", ExportOptions(form=Safetensors(), precision="fp32"))

    found = load_file(tmp_path / "out" / "tables" / "ids.safetensors")
    rows = dict(zip(found["row_ids"].tolist(), map(bytes, found["weights"]), strict=True))
    assert rows == {int(each): served(model)[key] for each, key in zip(ids, keys, strict=True)}


def test_shared_rows_are_the_models_and_counters_are_not(tmp_path: Path, clock: Clock):
    store, model = MemoryStore(clock), UniqueModel((unique_table(), SHARED, COUNTERS)).train(3)
    commit(store, model, None)
    snapshot = find_snapshot(store)

    export_tables(snapshot, tmp_path / "out", ExportOptions(form=Safetensors(), precision="fp32"))

    assert snapshot.meta.tables[1:] == (SHARED, COUNTERS)
    assert {path.stem for path in (tmp_path / "out" / "tables").iterdir()} == {"ids", "ids:shared"}
    assert verify_snapshot(snapshot).rows.keys() == {"ids", "ids:shared"}
    assert [diff.table for diff in diff_snapshots(snapshot, snapshot)] == ["ids", "ids:shared"]
    assert snapshot_digest(snapshot) == model.digest()


def test_a_restored_folder_has_keys_rows_and_steps(tmp_path: Path, clock: Clock):
    store, model = MemoryStore(clock), UniqueModel().train(3)
    commit(store, model, None)

    digest = restore_to_folder(find_snapshot(store), tmp_path / "out")

    found = load_file(tmp_path / "out" / "tables" / "ids.safetensors")
    assert digest == model.digest()
    assert found["row_ids"].tolist() == sorted(model.by_key["ids"])
    assert found["touched"].tolist() == [model.by_key["ids"][key].touched for key in sorted(model.by_key["ids"])]
