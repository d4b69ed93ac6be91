"""Deltas of tables of unique ids, and the image that a follower has of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.format.manifest import sealed
from dlrm_checkpointer.publish.delta import delta_key, read_delta
from dlrm_checkpointer.publish.follower import Follower
from dlrm_stores.file import FileStore
from dlrm_testing.checkpointer.turns import Killed
from dlrm_testing.checkpointer.unique import COUNTERS, UniqueModel, served, unique_table


def image_of(folder: Path) -> dict[int, bytes]:
    """The rows of the table of unique ids in a follower's folder."""
    state = json.loads((folder / "state.json").read_text())
    tables = folder / state["image"] / "tables"
    index, weights = load_file(tables / "ids.keys.safetensors"), load_file(tables / "ids.safetensors")["weights"]
    assert (np.diff(index["keys"]) > 0).all()
    assert len(set(index["places"].tolist())) == len(index["places"])
    rows = zip(index["keys"].tolist(), index["places"].tolist(), strict=True)
    return {key: weights[place].tobytes() for key, place in rows}


@pytest.mark.parametrize("policy", ["full", "consecutive"])
def test_a_follower_has_the_rows_of_the_newest_delta(tmp_path: Path, files: FileStore, new_pod, policy: str):
    """The table is full: new rows take the places of those that left. Its counters stay at home."""
    model, target = UniqueModel((unique_table(rows=20, buckets=1), COUNTERS)), FileStore(tmp_path / "deltas")
    pod = new_pod(tmp_path / "pod", files, policy=policy, target=target)
    follower, did = Follower(target, tmp_path / "out"), []
    for step in range(1, 5):
        model.step = step
        model.remove("ids", sorted(model.by_key["ids"])[: 5 * step])
        model.update("ids", range(step << 40, (step << 40) + 20 - len(model.by_key["ids"])))
        pod.commit(model)
        did += follower.catch_up()
        assert image_of(tmp_path / "out") == served(model)

    assert [(each.what, each.rows, each.gone) for each in did] == [
        ("full", 20, 0),
        ("delta", 10, 10),
        ("delta", 15, 15),
        ("delta", 20, 20),
    ]
    deltas = [read_delta(target, number).delta for number in (1, 2)]
    assert {delta.version for delta in deltas} == {2}
    assert {table.name for delta in deltas for table in delta.table_metas} == {"ids"}


def killing_after(writes: int) -> Callable[[], None]:
    left = iter(range(writes))

    def write() -> None:
        if next(left, None) is None:
            raise Killed

    return write


def test_a_follower_killed_at_any_write_continues_with_the_same_rows(tmp_path: Path, files: FileStore, new_pod):
    model, target, writes = UniqueModel(), FileStore(tmp_path / "deltas"), 0
    pod = new_pod(tmp_path / "pod", files, policy="consecutive", target=target)
    pod.commit(model.train())
    Follower(target, tmp_path / "first").catch_up()
    pod.commit(model.train())

    while True:
        out = tmp_path / f"out{writes}"
        shutil.copytree(tmp_path / "first", out)
        try:
            Follower(target, out, before_write=killing_after(writes)).catch_up()
            break
        except Killed:
            Follower(target, out).catch_up()
            assert image_of(out) == served(model)
            writes += 1

    assert image_of(out) == served(model)
    assert writes > 5


@pytest.mark.parametrize(
    "claims",
    [{"version": 1}, {"version": 3}, {"tables": [unique_table(buckets=1).to_json() | {"buckets": 3}]}],
    ids=str,
)
def test_a_delta_with_false_claims_is_refused_by_name(tmp_path: Path, files: FileStore, new_pod, claims):
    target = FileStore(tmp_path / "deltas")
    new_pod(tmp_path / "pod", files, target=target).commit(UniqueModel((unique_table(),)).train())
    path = target.root / delta_key(1)
    path.write_bytes(sealed(json.loads(path.read_text()) | claims))

    with pytest.raises(SnapshotError, match=r"deltas/0000000000000001\.json"):
        read_delta(target, 1)
