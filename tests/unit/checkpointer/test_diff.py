"""Which rows differ between two snapshots, against a look at every row of both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.read.catalog import list_snapshots, walk_table
from dlrm_checkpointer.read.diff import diff_snapshots, differences, updates
from dlrm_checkpointer.read.restore import Snapshot, open_snapshot
from dlrm_checkpointer.types import SnapshotName
from dlrm_stores.file import FileStore
from dlrm_testing.repeats import repeats

POLICIES = ["full", "one-shot", "consecutive", "intermittent"]


def image(snapshot: Snapshot, name: str) -> tuple[Any, Any, Any]:
    """Weights, state, and which rows are stored, of a whole table."""
    table = snapshot.table(name)
    blocks = list(walk_table(snapshot, table))
    held = np.zeros(table.rows, bool)
    for block in blocks:
        for _, piece in block.stored:
            held[piece.row_ids] = True
    rows, state = zip(*(block.fill() for block in blocks), strict=True)
    return np.concatenate(rows), np.concatenate(state), held


@pytest.mark.slow
@pytest.mark.soak
@settings(max_examples=repeats(6, soak=150), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_differences_cover_every_row_and_updates_lead_to_the_newer_one(
    data, tmp_path_factory, new_model, new_pod, small_tables, monkeypatch
):
    """Random policies, shardings and a rollback, so that either snapshot may be the older one or of another life."""
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", data.draw(st.sampled_from([700, 32 << 20])))
    monkeypatch.setattr("dlrm_checkpointer.read.diff.BLOCK_ROWS", data.draw(st.sampled_from([7, 64, 65_536])))
    root = tmp_path_factory.mktemp("diff")
    store, model, at = FileStore(root / "store"), new_model(small_tables), None
    bits = data.draw(st.sampled_from([32, 8]))
    for life in range(3):
        world = data.draw(st.integers(1, 3))
        policy = data.draw(st.sampled_from(POLICIES))
        pod = new_pod(
            root / f"pod{life}", store, world_size=world, ranks=range(world), policy=policy, bits=bits, keep_last=100
        )
        back = life == 2 and data.draw(st.booleans())
        if back:  # a new life from the beginning: rows of the lives before are back at their initial values
            model, at = new_model(small_tables), None
        attempt = claim_attempt(store, None if at is None else at.step, "test")
        for writer in pod.writers.values():
            writer.restored(at)
        for _ in range(data.draw(st.integers(1, 2))):
            pod.commit(model.train(), attempt)
            at = SnapshotName(model.step, attempt)
        pod.end()
    found = [open_snapshot(store, each.step, each.attempt) for each in list_snapshots(store)]
    before, after = data.draw(st.sampled_from(found)), data.draw(st.sampled_from(found))

    said = {each.table: each for each in diff_snapshots(before, after)}

    for table in small_tables:
        old, old_state, had = image(before, table.name)
        new, new_state, has = image(after, table.name)
        differ = (old != new).any(axis=1) | (old_state != new_state).any(axis=1)
        each = said[table.name]
        assert each.changed == (differ & had & has).sum()
        assert each.new == (differ & ~had & has).sum()
        assert each.gone == (differ & had & ~has).sum()
        wide = new[differ].astype(np.float64) - old[differ]
        assert each.change_norm == pytest.approx(np.linalg.norm(wide))
        assert each.largest_change == pytest.approx(np.abs(wide).max(initial=0))
        assert each.norm_before == pytest.approx(np.linalg.norm(old[differ].astype(np.float64)))
        assert each.norm_after == pytest.approx(np.linalg.norm(new[differ].astype(np.float64)))
        listed = [part.row_ids for part in differences(store, table, before.chain, after.chain)]
        np.testing.assert_array_equal(np.concatenate([[], *listed]), np.flatnonzero(differ))

        middle = table.rows // 3
        initial, _, _ = image(replace_rows(after), table.name)
        reached = old.copy()
        for rows in (range(middle), range(middle, table.rows)):
            for part in updates(store, table, before.chain, after.chain, rows):
                assert set(part.row_ids.tolist()) | set(part.gone.tolist()) <= set(rows)
                reached[part.row_ids] = part.rows
                reached[part.gone] = initial[part.gone]
                assert not has[part.gone].any()
        np.testing.assert_array_equal(reached, new)


def replace_rows(snapshot: Snapshot) -> Snapshot:
    """The same model without a stored row."""
    bare = [replace_chunks(manifest) for manifest in snapshot.chain.manifests]
    return Snapshot(snapshot.store, replace(snapshot.chain, manifests=tuple(bare)))


def replace_chunks(manifest: Any) -> Any:
    return manifest.model_copy(update={"chunks": ()})


class Counted:
    """A store that notes which objects are read."""

    def __init__(self, store: FileStore) -> None:
        self._store, self.read = store, set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_into(self, key: str, buffer: memoryview) -> int:
        self.read.add(key)
        return self._store.get_into(key, buffer)


def test_updates_read_only_the_growth_of_a_chain(tmp_path: Path, files: FileStore, new_model, new_pod):
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="consecutive", keep_last=100)
    attempt = claim_attempt(files, None, "test")
    for _ in range(3):
        pod.commit(model.train(), attempt)
    first, last = open_snapshot(files, 2, attempt), open_snapshot(files, 3, attempt)
    store, table = Counted(files), last.table("items")

    found = list(updates(store, table, first.chain, last.chain, range(table.rows)))

    assert store.read == {chunk.key for chunk in last.manifest.chunks if chunk.table == "items"}
    assert sum(len(part.row_ids) for part in found) == (model.touched_at["items"] == 3).sum()


def test_lower_snapshots_are_read_only_where_rows_of_theirs_are_needed(
    tmp_path: Path, files: FileStore, new_model, new_pod, monkeypatch
):
    monkeypatch.setattr("dlrm_checkpointer.format.chunk.CHUNK_BYTES", 4_000)
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="consecutive", keep_last=100)
    attempt = claim_attempt(files, None, "test")
    pod.commit(model.train(3), attempt)
    model.step += 1
    model.rows["items"][:10] += 1
    model.touched_at["items"][:10] = model.step
    pod.commit(model, attempt)
    first, last = open_snapshot(files, 3, attempt), open_snapshot(files, 4, attempt)
    store, table = Counted(files), last.table("items")

    list(differences(store, table, first.chain, last.chain))

    lower = [chunk for chunk in first.manifest.chunks if chunk.table == "items"]
    assert len(lower) > 10
    assert store.read - {chunk.key for chunk in last.manifest.chunks} == {c.key for c in lower if c.first_row < 10}


def test_snapshots_of_different_models_are_refused_by_name(tmp_path: Path, files: FileStore, new_model, new_pod):
    names = []
    for steps, rows in ((1, 300), (2, 400)):
        model = new_model((replace(new_model().tables[0], rows=rows),))
        attempt = claim_attempt(files, steps - 1 or None, "test")
        new_pod(tmp_path / f"pod{steps}", files, keep_last=9).commit(model.train(steps), attempt)
        names.append((model.step, attempt))

    with pytest.raises(SnapshotError, match="table users is not as in"):
        diff_snapshots(open_snapshot(files, *names[0]), open_snapshot(files, *names[1]))
