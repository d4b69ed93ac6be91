"""Tables for serving: every precision and format against the model's own rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from dlrm_api.errors import SnapshotError, UsageError
from dlrm_checkpointer.codec import digest
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.read.catalog import Block, find_snapshot
from dlrm_checkpointer.read.export import ExportOptions, Safetensors, export_tables
from dlrm_cli.exports import Parquet
from dlrm_stores.file import FileStore

FORMS = [Safetensors(), Parquet()]


@pytest.fixture
def trained(tmp_path: Path, files: FileStore, new_model, new_pod, all_tables) -> Any:
    model = new_model(all_tables)
    pod = new_pod(tmp_path / "pod", files, world_size=2, ranks=range(2), policy="consecutive")
    attempt = claim_attempt(files, None, "test")
    for _ in range(2):
        pod.commit(model.train(), attempt)
    return model


def read(path: Path) -> dict[str, Any]:
    """A file's arrays; bf16 comes as float32."""
    if path.suffix == ".parquet":
        found = pq.read_table(path)
        arrays = {name: found[name].combine_chunks() for name in found.column_names}
        flat = {name: array.values if hasattr(array.type, "list_size") else array for name, array in arrays.items()}
        return {name: array.to_numpy(zero_copy_only=False).reshape(len(found), -1) for name, array in flat.items()}
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name).to_dense() for name in file.keys()}  # noqa: SIM118


def weights(arrays: dict[str, Any]) -> Any:
    if "codes" not in arrays:
        return np.asarray(
            arrays["weights"].astype(np.float32)
            if isinstance(arrays["weights"], np.ndarray)
            else arrays["weights"].float().numpy()
        )
    codes, scale, low = (np.asarray(arrays[name], np.float32) for name in ("codes", "scale", "low"))
    return codes * scale.reshape(-1, 1) + low.reshape(-1, 1)


@pytest.mark.parametrize("updated_only", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("form", FORMS, ids=["safetensors", "parquet"])
def test_files_hold_the_rows_at_the_precision_that_was_asked_for(
    tmp_path: Path, files: FileStore, trained, form, precision, updated_only
):
    wanted = ExportOptions(form=form, precision=precision, updated_only=updated_only)
    if form.name == "parquet" and precision == "bf16":
        with pytest.raises(UsageError, match="bf16"):
            export_tables(find_snapshot(files), tmp_path / "out", wanted)
        assert not (tmp_path / "out").exists(), "the folder could not be given again"
        return

    written = export_tables(find_snapshot(files), tmp_path / "out", wanted)

    said = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (said["step"], said["precision"], said["updatedOnly"]) == (2, precision, updated_only)
    assert written == sum(each["storedRows"] for each in said["tables"])
    assert [each["name"] for each in said["tables"]] == [table.name for table in trained.tables]
    for entry in [*said["tables"], said["dense"]]:
        body = (tmp_path / "out" / entry["file"]).read_bytes()
        assert (len(body), hashlib.sha256(body).hexdigest()) == (entry["bytes"], entry["sha256"])
    for entry in said["tables"]:
        name, arrays = entry["name"], read(tmp_path / "out" / entry["file"])
        ids = np.flatnonzero(trained.touched[name]) if updated_only else np.arange(entry["rows"])
        key = "row_id" if form.name == "parquet" else "row_ids"
        if key in arrays:
            np.testing.assert_array_equal(np.asarray(arrays[key]).reshape(-1), ids)
        assert (key in arrays) == (updated_only or form.name == "parquet")
        expected, found = trained.rows[name][ids], weights(arrays)
        spread = expected.max(axis=1) - expected.min(axis=1) if len(ids) else np.empty(0)
        bound = {
            "fp32": np.zeros(len(ids)),
            "fp16": np.abs(expected).max(axis=1, initial=0) * 2.0**-11 + 2.0**-25,
            "bf16": np.abs(expected).max(axis=1, initial=0) * 2.0**-8,
            "int8": spread / 255 * 0.51 + np.abs(expected).max(axis=1, initial=0) * 1e-3,
        }[precision]
        assert (np.abs(found - expected).max(axis=1, initial=0) <= bound).all()
    assert {path.name for path in (tmp_path / "out").rglob("*") if path.name.startswith(".")} == set()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=["safetensors", "parquet"])
def test_updated_rows_alone_take_no_time_for_blocks_without_any(
    tmp_path: Path, files: FileStore, trained, form, monkeypatch: pytest.MonkeyPatch
):
    made: list[Block] = []
    fill = Block.fill
    monkeypatch.setattr(digest, "BLOCK_ROWS", 2)
    monkeypatch.setattr(Block, "fill", lambda block: (made.append(block), fill(block))[1])

    written = export_tables(
        find_snapshot(files), tmp_path / "out", ExportOptions(form=form, precision="fp32", updated_only=True)
    )

    assert written == sum(int(touched.sum()) for touched in trained.touched.values())
    assert all(block.stored for block in made if block.start)
    assert len(made) < sum(len(list(digest.block_ranges(table))) for table in trained.tables)


def test_half_precisions_round_to_the_nearest_with_ties_to_even(tmp_path: Path, files: FileStore, trained):
    torch = pytest.importorskip("torch")
    for precision, kind in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        wanted = ExportOptions(form=Safetensors(), precision=precision, tables=("items",))

        export_tables(find_snapshot(files), tmp_path / precision, wanted)

        with safe_open(tmp_path / precision / "tables" / "items.safetensors", "pt") as file:
            assert torch.equal(file.get_tensor("weights"), torch.from_numpy(trained.rows["items"]).to(kind))


def test_only_the_tables_that_were_named_are_written(tmp_path: Path, files: FileStore, trained):
    wanted = ExportOptions(form=Safetensors(), precision="fp32", tables=("one", "users"))

    export_tables(find_snapshot(files), tmp_path / "out", wanted)

    assert {path.name for path in (tmp_path / "out" / "tables").iterdir()} == {"one.safetensors", "users.safetensors"}
    with pytest.raises(UsageError, match="there is no table absent"):
        export_tables(
            find_snapshot(files),
            tmp_path / "b",
            ExportOptions(form=Safetensors(), precision="fp32", tables=("absent",)),
        )


@pytest.mark.parametrize(("precision", "value"), [("fp16", 65_520.0), ("bf16", 3.4e38)])
def test_a_weight_beyond_the_precision_is_refused_by_row(
    tmp_path: Path, files: FileStore, new_model, new_pod, precision, value
):
    model = new_model().train()
    row = int(np.flatnonzero(model.touched["users"])[3])
    model.rows["users"][row, 2] = value
    new_pod(tmp_path / "pod", files).commit(model)

    with pytest.raises(SnapshotError, match=f"table users, row {row}: a weight is too large for {precision}"):
        export_tables(find_snapshot(files), tmp_path / "out", ExportOptions(form=Safetensors(), precision=precision))

    assert not (tmp_path / "out" / "export.json").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, files: FileStore, trained):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")

    with pytest.raises(UsageError, match="is not empty"):
        export_tables(find_snapshot(files), tmp_path / "out", ExportOptions(form=Safetensors(), precision="fp32"))


@pytest.mark.parametrize("updated_only", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=["safetensors", "parquet"])
def test_all_files_are_synced_before_the_one_that_marks_them_complete(
    tmp_path: Path, files: FileStore, trained, to_disk, form, updated_only: bool
):
    wanted = ExportOptions(form=form, precision="fp32", updated_only=updated_only)

    export_tables(find_snapshot(files), out := tmp_path / "new" / "out", wanted)

    others = {path for path in out.rglob("*") if path.name != "export.json"}
    assert {tmp_path, tmp_path / "new", out, *others} <= to_disk.synced_before(out / "export.json")
    assert out in to_disk.synced_after(out / "export.json")
