"""Increments and full snapshots that checkpointers make of deltas: whatever the policy, state comes back as it was."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.names import ExitCode
from dlrm_checkpointer.codec.rows import code_rows, decode_rows
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import sealed
from dlrm_checkpointer.read.catalog import find_snapshot, list_snapshots, verify_snapshot
from dlrm_checkpointer.read.fetch import fetch_rows
from dlrm_checkpointer.read.restore import newest_snapshot, open_snapshot
from dlrm_checkpointer.types import ShardRows, SnapshotName, TableMeta
from dlrm_stores.base import DEFAULT_WORKERS
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.restored import stored_rows
from dlrm_testing.digests import snapshot_digest
from dlrm_testing.repeats import repeats

POLICIES = ["full", "one-shot", "consecutive", "intermittent"]
KINDS = {"full": ["full"] * 6, "one-shot": ["full", *["increment"] * 5], "consecutive": ["full", *["increment"] * 5]}


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_every_snapshot_of_a_job_holds_its_steps_state_whatever_the_policy(
    tmp_path: Path, files: FileStore, new_model, new_pod, all_tables, policy
):
    model = new_model(all_tables)
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), policy=policy, keep_last=100)
    attempt, digests = claim_attempt(files, None, "test"), {}
    for _ in range(6):
        pod.commit(model.train(), attempt)
        digests[model.step] = model.digest()

    listed = list_snapshots(files)

    for each in listed:
        snapshot = open_snapshot(files, each.step, each.attempt)
        verify_snapshot(snapshot)
        assert snapshot_digest(snapshot) == digests[each.step]
    kinds = [each.manifest.kind for each in reversed(listed)]
    assert kinds == KINDS.get(policy, kinds)
    assert kinds[0] == "full"
    assert ("increment" in kinds) == (policy != "full")


CHUNK_BYTES, INCREMENT_CHUNK_BYTES = 64 << 10, 8 << 10
CHAIN = 12


class Holding(FileStore):
    """Counts the bytes of objects that their readers hold at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held = self.most = 0

    def get_into(self, key: str, buffer: memoryview) -> int:
        self.held += buffer.nbytes
        self.most = max(self.most, self.held)
        weakref.finalize(buffer.obj, self._let_go, buffer.nbytes)
        return super().get_into(key, buffer)

    def _let_go(self, size: int) -> None:
        self.held -= size


@pytest.fixture
def long_chain(tmp_path: Path, files: FileStore, new_model, new_pod, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pod with a full snapshot and as many increments over it as may be, and what it trains; objects are small."""
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", CHUNK_BYTES)
    monkeypatch.setattr("dlrm_checkpointer.write.merge.INCREMENT_CHUNK_BYTES", INCREMENT_CHUNK_BYTES)
    items = TableMeta(
        name="items", rows=40_000, dim=16, seed=7, scale=0.25, column_blocks=((0, 16),), state_columns=(8,)
    )
    model = new_model((items,)).train(20)
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", max_chain=CHAIN, keep_last=100)
    for _ in range(CHAIN + 1):
        pod.commit(model)
        model.train()
    return pod, model


def test_increments_are_small_objects_and_full_snapshots_large_ones(files: FileStore, long_chain: Any):
    sizes = {"full": 0, "increment": 0}
    for each in list_snapshots(files):
        tables = {table.name: table for table in each.manifest.cut.tables}
        for entry in each.manifest.chunks:
            rows = fetch_rows(files, entry, tables[entry.table])
            sizes[each.manifest.kind] = max(sizes[each.manifest.kind], rows.nbytes - rows.row_ids.nbytes)

    assert CHUNK_BYTES * 0.9 < sizes["full"] <= CHUNK_BYTES
    assert INCREMENT_CHUNK_BYTES * 0.8 < sizes["increment"] <= INCREMENT_CHUNK_BYTES


def test_a_base_after_a_chain_holds_few_objects_in_memory(files: FileStore, long_chain: Any):
    pod, model = long_chain
    pod.store = Holding(files.root)

    pod.commit(model)

    snapshot, header = find_snapshot(files), 1 << 10
    assert snapshot.manifest.kind == "full"
    assert snapshot_digest(snapshot) == model.digest()
    increments = (CHAIN + DEFAULT_WORKERS) * (INCREMENT_CHUNK_BYTES + header)
    assert CHAIN * INCREMENT_CHUNK_BYTES < pod.store.most < increments + (1 + DEFAULT_WORKERS) * (CHUNK_BYTES + header)


def test_a_chain_names_the_manifests_that_are_read_and_no_others(tmp_path: Path, files: FileStore, new_model, new_pod):
    chains = {}
    for policy in ("one-shot", "consecutive"):
        store = FileStore(tmp_path / policy)
        model, pod = new_model(), new_pod(tmp_path / f"pod-{policy}", store, policy=policy, keep_last=100)
        attempt = claim_attempt(store, None, "test")
        for _ in range(4):
            pod.commit(model.train(), attempt)
        chains[policy] = [link.step for link in find_snapshot(store).manifest.chain]

    assert chains == {"one-shot": [1], "consecutive": [1, 2, 3]}


def restart(pod: Any, store: FileStore, at: SnapshotName | None) -> int:
    """A new attempt of the pod's ranks that goes on from a snapshot."""
    attempt = claim_attempt(store, None if at is None else at.step, "again")
    for writer in pod.writers.values():
        writer.restored(at)
    return attempt


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(10, soak=300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_lives_of_a_job_restore_what_their_last_commit_held(
    data, tmp_path_factory, new_model, new_pod, small_tables, monkeypatch
):
    """Attempts at random world sizes, sharded otherwise each time, under policies that change, with lost cuts."""
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", data.draw(st.sampled_from([64, 700, 32 << 20])))
    monkeypatch.setattr(
        "dlrm_checkpointer.write.merge.INCREMENT_CHUNK_BYTES", data.draw(st.sampled_from([200, 8 << 20]))
    )
    root = tmp_path_factory.mktemp("life")
    store, model = FileStore(root / "store"), new_model(small_tables)
    at: SnapshotName | None = None
    committed: dict[SnapshotName, str] = {}
    for life in range(data.draw(st.integers(1, 4))):
        world = data.draw(st.integers(1, 4))
        pod = new_pod(
            root / f"pod{life}",
            store,
            world_size=world,
            ranks=range(world),
            policy=data.draw(st.sampled_from(POLICIES)),
            max_chain=data.draw(st.sampled_from([1, 2, 24])),
            keep_last=data.draw(st.sampled_from([1, 3])),
        )
        attempt = restart(pod, store, at)
        for _ in range(data.draw(st.integers(1, 4))):
            model.train(data.draw(st.integers(1, 2)))
            if data.draw(st.booleans()) and world > 1:
                pod.cut(model, attempt, only=range(1))
                pod.finish()
                pod.open()
                for writer in pod.writers.values():
                    writer.restored(at)
            else:
                pod.commit(model, attempt)
                at = SnapshotName(model.step, attempt)
                committed[at] = model.digest()
        pod.end()
        if at is None or at.step != model.step:
            break  # the state went on without a commit: a real gang would go back

    if at is not None:
        snapshot, reasons = newest_snapshot(store)
        assert reasons == []
        assert snapshot.name == at
        verify_snapshot(snapshot)
        assert snapshot_digest(snapshot) == committed[at]
        for each in list_snapshots(store):
            assert snapshot_digest(open_snapshot(store, each.step, each.attempt)) == committed[snapshot_name(each)]


def snapshot_name(listed: Any) -> SnapshotName:
    return SnapshotName(listed.step, listed.attempt)


def test_rows_that_a_cut_lacks_keep_their_codes_and_bits(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables
):
    """Quantized once: a row's value after many merges is what coding it at its last update gave."""
    model = new_model(small_tables)
    attempt, expected = claim_attempt(files, None, "test"), {}
    for number, bits in enumerate([2, 8, 4, 3, 16, 32, 8]):
        policy = ["one-shot", "full", "consecutive"][number % 3]
        pod = new_pod(tmp_path / "pod", files, policy=policy, bits=bits)
        parent = pod.writers[0].begin(attempt)
        model.train()
        for piece in model.pieces(0, 1, parent):
            for coded in code_rows(piece, bits) if len(piece.row_ids) else []:
                rows = decode_rows(coded).rows
                expected |= {(piece.shard, int(row)): rows[place] for place, row in enumerate(coded.row_ids)}
        pod.commit(model, attempt)
        pod.end()

    snapshot = find_snapshot(files)

    for shard in model.shards(0, 1):
        found = {}
        for piece in stored_rows(snapshot, shard):
            for place, row in enumerate(piece.row_ids.tolist()):
                found.setdefault(row, np.zeros(shard.width, np.float32))[
                    piece.shard.column_start : piece.shard.column_end
                ] = piece.rows[place]
        wanted = {row: values for (each, row), values in expected.items() if each == shard}
        assert found.keys() == wanted.keys()
        for row, values in wanted.items():
            np.testing.assert_array_equal(found[row], values)


def test_a_cut_whose_parent_is_gone_is_dropped_and_training_continues(
    tmp_path: Path, files: FileStore, new_model, new_pod
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="consecutive")
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(), attempt)
    files.delete("manifests/0000000000000001-00000001.json")
    pod.cut(model.train(), attempt)

    pod.finish()

    assert list_snapshots(files) == []
    assert pod.status.registry.get_sample_value("dlrm_checkpointer_dropped_cuts_total") == 1
    assert pod.status.registry.get_sample_value("dlrm_checkpointer_refused_cuts_total") == 0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_damaged_link_makes_only_later_snapshots_unusable(
    tmp_path: Path, files: FileStore, new_model, new_pod, victim
):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="consecutive", keep_last=100)
    attempt, digests = claim_attempt(files, None, "test"), {}
    for _ in range(3):
        pod.commit(model.train(), attempt)
        digests[model.step] = model.digest()
    listed = list(reversed(list_snapshots(files)))
    path = files.root / listed[victim].manifest.chunks[0].key
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    if victim == 0:
        with pytest.raises(Exception, match="no snapshot can be used"):
            newest_snapshot(files)
        return
    snapshot, reasons = newest_snapshot(files)

    assert snapshot.step == victim
    assert snapshot_digest(snapshot) == digests[victim]
    assert len(reasons) == 3 - victim
    assert all(listed[victim].manifest.chunks[0].key in reason for reason in reasons)


def test_a_manifest_that_is_not_the_one_below_is_no_link(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="consecutive")
    attempt = claim_attempt(files, None, "test")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    path = files.root / "manifests/0000000000000001-00000001.json"
    path.write_bytes(sealed(json.loads(path.read_text()) | {"bits": 16}))

    snapshot, reasons = newest_snapshot(files)

    assert snapshot.step == 1
    assert len(reasons) == 1
    assert "manifests/0000000000000001-00000001.json: not the manifest" in reasons[0]


def test_bytes_read_to_merge_are_counted(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="one-shot")
    attempt = claim_attempt(files, None, "test")
    read = []
    for _ in range(3):
        pod.commit(model.train(), attempt)
        read.append(pod.status.registry.get_sample_value("dlrm_checkpointer_merged_bytes_total"))

    increment = open_snapshot(files, 2, attempt).manifest
    assert read == [0, 0, sum(chunk.bytes for chunk in increment.chunks)]


def test_a_delta_gives_rows_in_order_whatever_the_order_of_its_pieces(new_model):
    from dlrm_checkpointer.write.merge import Delta

    model = new_model()
    shard = model.shards(0, 1)[0]
    draw = np.random.default_rng(0)
    ids = draw.permutation(1_000)[:300].astype(np.int64)
    pieces = []
    for part in np.split(ids, [40, 41, 200]):
        part = np.sort(part)
        values = np.repeat(part.astype(np.float32)[:, None], shard.width, axis=1)
        pieces.append(ShardRows(shard=shard, row_ids=part, rows=values, state=values[:, :1]))

    delta = Delta(model.tables[0], shard, pieces, ())
    parts = [delta.rows(begin, begin + 75) for begin in range(0, 300, 75)]

    found = np.concatenate([part.row_ids for part in parts])
    np.testing.assert_array_equal(found, np.sort(ids))
    np.testing.assert_array_equal(np.concatenate([part.rows for part in parts])[:, 0], found)
    np.testing.assert_array_equal(np.concatenate([part.state for part in parts])[:, 0], found)


def test_a_merge_of_many_tables_looks_at_each_of_them_a_few_times(
    tmp_path: Path, files: FileStore, new_model, new_pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, read = 60, list[str]()
    tables = tuple(
        TableMeta(name=f"t{number}", rows=20, dim=4, seed=7, scale=0.25, column_blocks=((0, 4),))
        for number in range(count)
    )
    model, pod = new_model(tables), new_pod(tmp_path / "pod", files, policy="intermittent")
    attempt = claim_attempt(files, None, "test")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    from_json = TableMeta.from_json
    monkeypatch.setattr(TableMeta, "from_json", lambda value: read.append(value["name"]) or from_json(value))

    pod.commit(model.train(), attempt)
    monkeypatch.undo()

    assert count < len(read) < 20 * count
    assert snapshot_digest(find_snapshot(files)) == model.digest()


def spoil(files: FileStore, key: str) -> None:
    path = files.root / key
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("policy", "what"), [*((policy, "manifest") for policy in POLICIES), ("full", "chunk"), ("one-shot", "chunk")]
)
def test_a_damaged_parent_loses_one_cut_and_the_next_holds_all_rows(
    tmp_path: Path, files: FileStore, new_model, new_pod, small_tables, policy: str, what: str
):
    model, pod = new_model(small_tables), new_pod(tmp_path / "pod", files, policy=policy, keep_last=100)
    attempt = claim_attempt(files, None, "test")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    newest = find_snapshot(files)
    spoil(files, newest.manifest.chunks[0].key if what == "chunk" else f"manifests/{2:016d}-{attempt:08d}.json")

    pod.cut(model.train(), attempt)
    code, said = pod.finish(), pod.status.progress
    pod.open()
    for _ in range(4):
        pod.commit(model.train(), attempt)

    assert code == ExitCode.TEMPORARY
    assert "step 3" in said.store_error
    assert said.reason.startswith("BrokenParent: ")
    assert pod.status.progress.store_error == ""
    snapshot, reasons = newest_snapshot(files)
    assert (snapshot.step, reasons) == (7, [])
    assert snapshot_digest(snapshot) == model.digest()
    kept = [each for each in list_snapshots(files) if each.step > 2]
    assert [each.step for each in kept] == [7, 6, 5, 4]
    assert kept[-1].manifest.kind == "full"


@pytest.mark.parametrize(("policy", "lacking"), [("one-shot", 1), ("consecutive", 1), ("consecutive", 3)])
def test_a_missing_object_below_the_newest_makes_the_next_one_full(
    tmp_path: Path, files: FileStore, new_model, new_pod, few_rows, policy, lacking
):
    model, pod = new_model(few_rows), new_pod(tmp_path / "pod", files, policy=policy)
    attempt = claim_attempt(files, None, "test")
    for _ in range(3):
        pod.commit(model.train(), attempt)
    files.delete(open_snapshot(files, lacking, attempt).manifest.chunks[0].key)

    pod.commit(model.train(), attempt)  # the retention that follows it sees what is gone
    pod.commit(model.train(), attempt)
    snapshot, reasons = newest_snapshot(files)

    assert (snapshot.step, snapshot.manifest.kind, reasons) == (5, "full", [])
    assert snapshot_digest(snapshot) == model.digest()
