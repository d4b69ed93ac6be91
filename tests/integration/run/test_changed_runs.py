"""Runs whose job, settings or data are not those of the snapshots in their store."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

pytestmark = pytest.mark.slow


def test_a_result_is_of_the_settings_that_trained_it(tmp_path: Path, local_in: Callable[[Path], Any]) -> None:
    local = local_in(tmp_path)
    short = {"maxSteps": 20}
    local.write(training=short)
    first = local.done()

    local.write(training={**short, "rowOptimizer": {"learningRate": 0.5}})
    changed = local.run()
    local.write(training={"maxSteps": 30, "rowOptimizer": {"learningRate": 0.5}})
    longer = local.run()
    elsewhere = local.run("--workdir", str(tmp_path / "elsewhere"))

    assert changed.code == 78
    assert "training.rowOptimizer.learningRate was 0.05 and is 0.5" in changed.error
    assert "--set spec.checkpoint.uri=URI" in changed.error
    assert first["step"] == 20
    assert (longer.code, longer.result["step"]) == (0, 30)
    [note] = longer.result["notes"]
    assert note.startswith(
        "continuing from step 20 with other settings than before: training.maxSteps was 20 and is 30"
    )
    assert f"note: {note}" in longer.stderr
    assert elsewhere.code == 0
    assert any("another run of job tiny" in each for each in elsewhere.result["notes"])
    assert any("nothing to train" in each for each in elsewhere.result["notes"])


def write_rows(path: Path, rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    columns: dict[str, Any] = {"label": random.integers(0, 2, rows).astype(np.int8)}
    columns |= {f"I{i}": random.random(rows, dtype=np.float32) for i in (1, 2, 3)}
    columns |= {f"C{i}": random.integers(0, 50, rows) for i in (1, 2, 3)}
    pq.write_table(pa.table(columns), path)


def test_a_unique_table_keeps_its_newest_rows_with_fewer_rows_and_in_another_job(local: Any) -> None:
    def write(rows: int, keep: str = "recent", **checkpoint: str) -> None:
        unique = {"hash": "unique", "buckets": 2, "eviction": {"keep": keep}}
        scale = {"scale": 0.05}
        tables = [{"name": "C1", "rows": rows, "dim": 8, "embedding": unique, "initializer": scale}]
        synthetic = {"samples": 64 * 60, "evalSamples": 200, "idsPerRow": 4}
        changes = {"uri": local.store.as_uri(), "intervalSteps": 20, "bits": 32} | checkpoint
        local.write(model={"tables": tables}, data={"synthetic": synthetic, "epochs": 1}, checkpoint=changes)

    write(400)
    local.done("--set", "spec.training.maxSteps=30")
    write(200)

    smaller = local.done("--set", "spec.training.maxSteps=40")

    assert any("table C1: " in note and "left it" in note for note in smaller["notes"]), smaller["notes"]
    shown = json.loads(local.run("show", local.store.as_uri(), command="snapshots").stdout)
    assert 150 < shown["stored_rows"]["C1"] <= 200
    assert shown["kind"] == "full"
    write(200, "frequent")
    assert local.done("--set", "spec.training.maxSteps=50")["step"] == 50
    shown = json.loads(local.run("show", local.store.as_uri(), command="snapshots").stdout)
    assert shown["kind"] == "full"
    write(200, uri=(local.folder / "other").as_uri(), restoreFrom=local.store.as_uri())
    begun = local.done("--set", "spec.training.maxSteps=10", "--workdir", str(local.folder / "work-other"))
    assert begun["step"] == 10


def test_a_fixed_table_becomes_a_unique_one_with_the_same_quality(local: Any) -> None:
    """A job with learning rate 0 evaluates the model that it starts from."""
    tables = [{"name": f"C{number}", "rows": rows, "dim": 8} for number, rows in ((1, 40), (2, 70), (3, 20))]
    converted = (local.folder / "converted").as_uri()
    local.write(model={"tables": tables})
    trained = local.done()
    shown = json.loads(local.run("show", local.store.as_uri(), command="snapshots").stdout)
    # The newest snapshot may be an increment, which lacks rows that nothing touched since the one before.
    assert shown["stored_rows"].keys() == {"C1", "C2", "C3"}
    assert all(0 < shown["stored_rows"][table["name"]] <= table["rows"] for table in tables)

    changes = ("--table", "C1=unique", "--table", "C2=unique")
    done = local.run("convert", local.store.as_uri(), converted, *changes, command="snapshots")

    assert done.code == 0, done.stderr
    for table in tables[:2]:
        table["embedding"] = {"hash": "unique"}
    still = {"maxSteps": 1, "rowOptimizer": {"learningRate": 0}, "denseOptimizer": {"learningRate": 0}}
    checkpoint = {"uri": (local.folder / "other").as_uri(), "restoreFrom": converted}
    local.write(model={"tables": tables}, training=still, checkpoint=checkpoint)
    begun = local.done("--workdir", str(local.folder / "work-other"))
    assert begun["eval"] == trained["eval"]
    assert [each["rows"] for each in begun["unique_tables"]] == [40, 70]


def test_a_hashed_table_becomes_rows_that_ids_share(local: Any) -> None:
    table: dict[str, Any] = {"name": "C1", "rows": 40, "dim": 8, "embedding": {"hash": "modulo"}}
    converted, other = ((local.folder / name).as_uri() for name in ("converted", "other"))
    local.write(model={"tables": [table]})
    local.done()

    done = local.run(
        "convert", local.store.as_uri(), converted, "--table", "C1=unique", "--buckets=2", command="snapshots"
    )

    assert "unknown: shared, sharedRows: 40" in done.stderr
    shared = {"unknown": "shared", "sharedRows": 40, "admission": {"count": 15}}
    table["embedding"] = {"hash": "unique", "buckets": 2, **shared}
    checkpoint = {"uri": other, "restoreFrom": converted, "bits": 32}
    local.write(model={"tables": [table]}, checkpoint=checkpoint, trainer={"processesPerReplica": 2})
    local.done("--workdir", str(local.folder / "work-other"), "--set", "spec.training.maxSteps=3")
    local.write(model={"tables": [table]}, checkpoint=checkpoint)
    ended = local.done("--workdir", str(local.folder / "work-last"), "--set", "spec.training.maxSteps=6", "--digest")
    restored = local.run("restore", other, "--to", str(local.folder / "restored"), command="snapshots")

    assert ended["step"] == 6
    assert ended["state_digest"] in restored.stdout
    assert load_file(local.folder / "restored" / "tables" / "C1.safetensors")["weights"].shape == (0, 8)
    shared_rows = load_file(local.folder / "restored" / "tables" / "C1:shared.safetensors")
    assert (shared_rows["state"] > 0).all()
    assert shared_rows["state"].shape == (40, 1)


def test_files_that_come_later_are_left_out_and_named_everywhere(local: Any) -> None:
    data = local.folder / "data"
    data.mkdir()
    write_rows(data / "a.parquet", 64 * 20, seed=1)
    (data / "notes.txt").touch()
    parquet = {"format": "parquet", "train": {"uris": [str(data)]}, "synthetic": {}}
    local.write(data=parquet, training={"maxSteps": 20})
    first = local.done()
    write_rows(data / "b.parquet", 64 * 20, seed=2)
    (data / "a.parquet").touch()

    local.write(data=parquet, training={"maxSteps": 30})
    again = local.done()

    assert "notes.txt" in first["notes"][0]
    assert again["samples"] == 64 * 30
    assert any("1 new files since the snapshot are ignored" in note for note in again["notes"])
    lists = [json.loads(path.read_text()) for path in (local.store / "documents").glob("*.json")]
    left_out = {each["name"]: each["reason"] for found in lists if "files" in found for each in found["leftOut"]}
    assert {Path(name).name for name in left_out} == {"notes.txt", "b.parquet"}
