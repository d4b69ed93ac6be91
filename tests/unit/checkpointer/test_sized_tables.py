"""Snapshots of tables whose rows keep only their first columns (``embedding.dimension``)."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from dlrm_api.errors import SnapshotError
from dlrm_api.names import ExitCode
from dlrm_checkpointer.codec.rows import CodedRows, code_rows, decode_rows, place_weights
from dlrm_checkpointer.format import chunk
from dlrm_checkpointer.format.chain import load_chain
from dlrm_checkpointer.format.manifest import manifest_key, sealed
from dlrm_checkpointer.publish.delta import read_delta
from dlrm_checkpointer.publish.follower import Follower
from dlrm_checkpointer.read.catalog import find_snapshot, list_snapshots, verify_snapshot
from dlrm_checkpointer.read.diff import diff_snapshots, updates
from dlrm_checkpointer.read.export import ExportOptions, Safetensors, export_tables, restore_to_folder
from dlrm_checkpointer.read.restore import Snapshot, open_snapshot
from dlrm_checkpointer.types import ShardRows, SnapshotName, TableMeta
from dlrm_cli import app
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.fixtures import table
from dlrm_testing.checkpointer.turns import Clock, MemoryStore
from dlrm_testing.checkpointer.unique import SIZED_TABLES, UniqueModel, commit, unique_table
from dlrm_testing.digests import snapshot_digest

POLICIES = ["full", "one-shot", "consecutive", "intermittent"]
BITS = [2, 3, 4, 8, 16, 32]
PRUNED = table("pruned", 12, 4, sizes=(1, 2, 4))
Rows = dict[int, tuple[int, bytes, bytes]]
"""Size, present columns and state of each row that was ever updated."""


def held(model: UniqueModel, meta: TableMeta) -> Rows:
    rows, state = model.rows[meta.name], model.state[meta.name]
    sizes = state.view(np.uint32)[:, -1].tolist()
    ids = np.flatnonzero(model.touched_at[meta.name]).tolist()
    return {row: (sizes[row], rows[row, : sizes[row]].tobytes(), state[row, :-1].tobytes()) for row in ids}


def restored(snapshot: Snapshot, model: UniqueModel, world_size: int) -> Rows:
    """Rows of the table of several sizes as ranks restore them: no rank ever has columns that a row lacks."""
    found: Rows = {}
    for rank in range(world_size):
        for _, piece in snapshot.shard_codes(model.shards(rank, world_size)):
            rows = np.empty((len(piece.row_ids), piece.columns), np.float32)
            place_weights(piece, np.arange(len(rows)), rows)
            for row, values, state in zip(piece.row_ids.tolist(), rows, piece.state, strict=True):
                assert row not in found
                found[row] = (piece.columns, values.tobytes(), state.tobytes())
    return found


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_histories_restore_what_a_dictionary_holds(
    data: st.DataObject, clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    """Rows change their size, cuts are lost, and snapshots are merged by every policy at changing world sizes."""
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", data.draw(st.sampled_from([28, 84, 32 << 20])))
    store, model = MemoryStore(clock), UniqueModel((PRUNED,))
    parent: SnapshotName | None = None
    committed: list[tuple[SnapshotName, Rows, np.ndarray, str]] = []
    changes = st.dictionaries(st.integers(0, PRUNED.rows - 1), st.sampled_from(PRUNED.row_sizes), max_size=6)
    for _ in range(data.draw(st.integers(1, 7))):
        model.step += 1
        sized = data.draw(changes)
        ids, columns = np.array(list(sized), np.int64), np.array(list(sized.values()), np.int64)
        draw = np.random.default_rng(model.step)
        model.rows["pruned"][ids] = draw.normal(size=(len(ids), 4))
        model.state["pruned"][ids] = draw.random((len(ids), 3))
        model.touched_at["pruned"][ids] = model.step
        model.resize(PRUNED, ids, columns)
        if data.draw(st.booleans()):
            options = {"world_size": data.draw(st.integers(1, 3)), "policy": data.draw(st.sampled_from(POLICIES))}
            segments = data.draw(st.lists(st.integers(0, 1), max_size=2))
            parent = commit(store, model, parent, segments=segments, **options)
            committed.append((parent, held(model, PRUNED), model.rows["pruned"].copy(), model.digest()))

    for name, rows, _, digest in committed:
        snapshot = open_snapshot(store, name.step, name.attempt)
        assert verify_snapshot(snapshot).rows == {"pruned": len(rows)}
        assert restored(snapshot, model, data.draw(st.integers(1, 4))) == rows
        assert snapshot_digest(snapshot) == digest
    for (one, old, _, _), (other, new, _, _) in pairwise(committed):
        [found] = diff_snapshots(*(open_snapshot(store, each.step, each.attempt) for each in (one, other)))
        assert (found.new, found.gone) == (len(new.keys() - old.keys()), 0)
        assert found.changed == sum(old[key] != new[key] for key in old.keys() & new.keys())
    if committed:
        one, other = data.draw(st.sampled_from(committed)), data.draw(st.sampled_from(committed))
        before, after = (load_chain(store, each[0]) for each in (one, other))
        image = one[2].copy()
        for update in updates(store, PRUNED, before, after, range(PRUNED.rows)):
            image[update.gone] = UniqueModel((PRUNED,)).rows["pruned"][update.gone]
            image[update.row_ids] = update.rows
            assert [new[0] for row, new in other[1].items() if row in update.row_ids] == (
                update.columns.view(np.uint32)[:, 0].tolist()
            )
        np.testing.assert_array_equal(image, other[2])


def sized_rows(meta: TableMeta, count: int = 400) -> ShardRows:
    """Rows of every size and of magnitudes that need several exponents."""
    draw, model = np.random.default_rng(5), UniqueModel((meta,))
    rows = draw.normal(size=(count, meta.dim)) * np.exp2(draw.choice([-3, 0, 40], (count, 1)))
    model.rows[meta.name][:count] = rows
    model.state[meta.name][:count] = draw.normal(size=(count, meta.state_width))
    model.resize(meta, np.arange(count), draw.choice(meta.row_sizes, count))
    return ShardRows(
        shard=meta.whole(),
        row_ids=np.arange(count),
        rows=model.rows[meta.name][:count],
        state=model.state[meta.name][:count],
    )


@pytest.mark.parametrize("bits", BITS)
def test_rows_are_coded_as_those_of_a_table_of_so_many_columns(bits: int):
    meta = table("pruned", 400, 20, sizes=(3, 10, 20))
    given_rows = sized_rows(meta)
    columns = given_rows.state.view(np.uint32)[:, -1]

    coded = code_rows(given_rows, bits, table=meta)

    assert {each.columns for each in coded} == {0, 3, 10, 20}
    np.testing.assert_array_equal(np.sort(np.concatenate([each.row_ids for each in coded])), given_rows.row_ids)
    for size in (3, 10, 20):
        ids = np.flatnonzero(columns == size)
        narrow = table("narrow", 400, size)
        plain = ShardRows(
            shard=narrow.whole(), row_ids=ids, rows=given_rows.rows[ids, :size], state=given_rows.state[ids, :2]
        )
        for ours, theirs in zip([each for each in coded if each.columns == size], code_rows(plain, bits), strict=True):
            assert (ours.form.bits, ours.form.exponent) == (theirs.form.bits, theirs.form.exponent)
            for name in ("row_ids", "body", "scale", "low", "state"):
                np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("bits", BITS)
def test_chunks_come_back_as_they_were_and_padded_with_zeros(bits: int):
    meta = table("pruned", 400, 20, sizes=(3, 10, 20))
    for coded in code_rows(sized_rows(meta), bits, table=meta):
        back = chunk.decode_rows(chunk.encode_rows(coded, meta), "key")
        places = np.random.default_rng(0).permutation(len(coded.row_ids))
        narrow = np.full((len(places), back.columns), np.nan, np.float32)
        wide = np.full((len(places), 20), np.nan, np.float32)
        place_weights(back, places, narrow)
        place_weights(back, places, wide)

        assert (back.form, back.shard) == (coded.form, coded.shard)
        for name in ("row_ids", "body", "scale", "low", "state"):
            np.testing.assert_array_equal(getattr(back, name), getattr(coded, name))
        np.testing.assert_array_equal(wide[places], decode_rows(back).rows)
        np.testing.assert_array_equal(wide[:, : back.columns], narrow)
        assert not wide[:, back.columns :].any()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pod_commits_cuts_and_publishes_deltas(tmp_path: Path, files: FileStore, new_pod, policy: str):
    model, digests, target = UniqueModel(SIZED_TABLES), {}, FileStore(tmp_path / "deltas")
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), policy=policy, keep_last=9, target=target)
    follower = Follower(target, tmp_path / "out")

    for _ in range(4):
        pod.commit(model.train())
        digests[model.step] = model.digest()
        follower.catch_up()
        tables = tmp_path / "out" / json.loads((tmp_path / "out" / "state.json").read_text())["image"] / "tables"
        np.testing.assert_array_equal(load_file(tables / "pruned.safetensors")["weights"], model.rows["pruned"])

    assert {each.step: snapshot_digest(open_snapshot(files, each.step, 1)) for each in list_snapshots(files)} == digests
    assert {each.manifest.version for each in list_snapshots(files)} == {3}
    assert {entry.columns for entry in read_delta(target, 1).delta.chunks if entry.table == "pruned"} <= {0, 3, 6, 12}


def test_lists_say_how_many_rows_have_how_many_columns(files: FileStore, capsys: pytest.CaptureFixture[str]):
    model = UniqueModel(SIZED_TABLES).train()
    commit(files, model, None)

    assert app.main(["snapshots", "list", files.uri, "-o", "json"]) == ExitCode.DONE

    (listed,) = json.loads(capsys.readouterr().out)
    sizes = [size for size, *_ in held(model, SIZED_TABLES[0]).values()]
    found = listed["by_columns"][SIZED_TABLES[0].name]
    assert {int(size): counts["rows"] for size, counts in found.items()} == Counter(sizes)

    assert app.main(["snapshots", "list", files.uri]) == ExitCode.DONE
    assert f"{sizes.count(sizes[0])} of {sizes[0]}" in capsys.readouterr().out


def test_a_cut_without_dimension_has_the_same_bytes(clock: Clock, few_rows):
    alone, together = MemoryStore(clock), MemoryStore(clock)
    commit(alone, UniqueModel(few_rows).train(), None)
    commit(together, UniqueModel((*few_rows, *SIZED_TABLES)).train(), None)

    one, other = find_snapshot(alone).manifest, find_snapshot(together).manifest

    assert (one.version, other.version) == (2, 3)
    names = {entry.table for entry in one.chunks}
    assert [entry.sha256 for entry in other.chunks if entry.table in names] == [entry.sha256 for entry in one.chunks]
    assert b'columns"' not in alone.get(manifest_key(1, 1)).replace(b'"columnStart"', b"")


def test_full_size_rows_take_the_bytes_of_a_plain_table():
    plain, meta = table("pruned", 400, 8), table("pruned", 400, 8, sizes=(4, 8))
    rows = sized_rows(meta)
    rows.state.view(np.uint32)[:, -1] = 8
    [sized] = code_rows(rows, 32, table=meta)
    [other] = code_rows(
        ShardRows(shard=plain.whole(), row_ids=rows.row_ids, rows=rows.rows, state=rows.state[:, :1]), 32
    )

    bodies = [chunk.decode_rows(chunk.encode_rows(*each), "key") for each in ((sized, meta), (other, plain))]

    np.testing.assert_array_equal(bodies[0].body, bodies[1].body)
    np.testing.assert_array_equal(bodies[0].state[:, :1], bodies[1].state)


def test_folders_and_exports_have_rows_padded_with_zeros(tmp_path: Path, clock: Clock):
    store, model = MemoryStore(clock), UniqueModel(SIZED_TABLES).train(3)
    commit(store, model, None)

    digest = restore_to_folder(find_snapshot(store), tmp_path / "restored")
    export_tables(find_snapshot(store), tmp_path / "out", ExportOptions(form=Safetensors(), precision="fp32"))

    assert digest == model.digest()
    found = load_file(tmp_path / "restored" / "tables" / "pruned.safetensors")
    state = model.state["pruned"]
    np.testing.assert_array_equal(found["weights"], model.rows["pruned"])
    np.testing.assert_array_equal(found["state"], state[:, :1])
    np.testing.assert_array_equal(found["utility"], state[:, 1])
    np.testing.assert_array_equal(found["columns"], state.view(np.uint32)[:, 2])
    exported = load_file(tmp_path / "out" / "tables" / "pruned.safetensors")
    np.testing.assert_array_equal(exported["weights"], model.rows["pruned"])


def test_a_size_that_the_table_does_not_have_is_refused_by_row():
    meta = table("pruned", 400, 8, sizes=(4, 8))
    rows = sized_rows(meta)
    rows.state.view(np.uint32)[7, -1] = 5

    with pytest.raises(SnapshotError, match="table pruned, row 7: has 5 columns"):
        code_rows(rows, 8, table=meta)


def test_a_utility_that_no_reader_accepts_is_refused_by_row():
    meta = table("pruned", 400, 8, sizes=(4, 8))
    rows = sized_rows(meta)
    rows.state[7, -2] = -np.inf

    with pytest.raises(SnapshotError, match="table pruned, row 7: its utility is not finite"):
        code_rows(rows, 8, table=meta)


def test_rows_of_a_unique_table_are_never_pruned_to_nothing():
    meta = unique_table(sizes=(4, 8))
    rows, state = np.zeros((1, 8), np.float32), np.zeros((1, 4), np.float32)

    with pytest.raises(SnapshotError, match="has 0 columns"):
        code_rows(ShardRows(shard=meta.whole(), row_ids=np.array([9]), rows=rows, state=state), 8, table=meta)


def rewritten(body: bytes, **claims: object) -> bytes:
    """An object whose text says something else."""
    end = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:end])
    said = json.loads(header["__metadata__"]["dlrm"]) | claims
    text = json.dumps(header | {"__metadata__": {"dlrm": json.dumps(said)}}).encode()
    return len(text).to_bytes(8, "little") + text + body[end:]


@pytest.mark.parametrize("columns", [-1, 2, 6, 13, 2**70, None])
def test_a_chunk_of_another_size_than_it_says_is_refused_by_its_key(columns: object):
    meta = SIZED_TABLES[0]
    coded: CodedRows = next(each for each in code_rows(sized_rows(meta, 60), 8, table=meta) if each.columns == 3)
    body = bytes(chunk.encode_rows(coded, meta))

    with pytest.raises(SnapshotError, match="chunks/x"):
        chunk.decode_rows(rewritten(body, columns=columns), "chunks/x")


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["meta"]["model"]["tables"][0].update(sizes=[12, 6]),
        lambda said: said["meta"]["model"]["tables"][0].update(sizes=[3, 6]),
        lambda said: said["meta"]["model"]["tables"][0].update(sizes=list(range(5, 13))),
        lambda said: said["meta"]["model"]["tables"][0].update(sizes=[]),
        lambda said: said["meta"]["model"]["tables"][0].update(rowValues=["score"]),
        lambda said: said["meta"]["model"]["tables"][0].update(columnBlocks=[[0, 6], [6, 12]], stateColumns=[1, 1]),
        lambda said: said["chunks"][0].update(columns=4),
        lambda said: said["chunks"][0].update(columns=None),
        lambda said: said["chunks"][0].update(columns=12 if said["chunks"][0]["columns"] != 12 else 6),
        lambda said: said.update(version=2),
    ],
)
def test_a_snapshot_with_false_claims_is_refused_by_name(files: FileStore, change):
    commit(files, UniqueModel(SIZED_TABLES).train(), None)
    path = files.root / manifest_key(1, 1)
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_bytes(sealed(manifest))

    with pytest.raises(SnapshotError, match=r"0000000000000001-00000001\.json|chunks/0000000000000001"):
        verify_snapshot(open_snapshot(files, 1, 1))
