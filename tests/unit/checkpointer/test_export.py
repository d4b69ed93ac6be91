from __future__ import annotations

import errno
import json
import os
import resource
import signal
import stat
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from dlrm_api.errors import DeviceError, NoPermissionError, UsageError
from dlrm_checkpointer.read.catalog import find_snapshot
from dlrm_checkpointer.read.export import ExportOptions, Safetensors, export_tables, restore_to_folder
from dlrm_stores.file import FileStore


def test_a_restored_folder_holds_every_row_and_its_digest(
    tmp_path: Path, files: FileStore, new_model, new_pod, all_tables
):
    model = new_model(tables=all_tables).train(3)
    new_pod(tmp_path / "pod", files, world_size=4, ranks=range(4)).commit(model)

    digest = restore_to_folder(find_snapshot(files), tmp_path / "out")

    assert digest == model.digest()
    for table in model.tables:
        arrays = safetensors.numpy.load_file(tmp_path / "out" / "tables" / f"{table.name}.safetensors")
        np.testing.assert_array_equal(arrays["weights"], model.rows[table.name])
        np.testing.assert_array_equal(arrays["state"], model.state[table.name])
    dense = safetensors.numpy.load_file(tmp_path / "out" / "dense.safetensors")
    assert {name: array.tobytes() for name, array in dense.items()} == {
        name: array.tobytes() for name, array in model.dense.items()
    }
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert (meta["step"], meta["stateDigest"]) == (3, digest)
    assert meta["snapshot"] == f"{files.uri}/manifests/0000000000000003-00000001.json"


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path, files: FileStore, new_model, new_pod):
    new_pod(tmp_path / "pod", files).commit(new_model().train())
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")

    with pytest.raises(UsageError, match="out: is not empty: give a new folder"):
        restore_to_folder(find_snapshot(files), tmp_path / "out")

    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize("folder", ["file/out", "a" * 300])
def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, files: FileStore, new_model, new_pod, folder: str):
    new_pod(tmp_path / "pod", files).commit(new_model().train())
    (tmp_path / "file").write_bytes(b"x")

    with pytest.raises(UsageError, match=f"{folder}: cannot be written: .*: give another folder"):
        restore_to_folder(find_snapshot(files), tmp_path / folder)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_folder_that_may_not_be_looked_into_is_one_of_the_rights(
    tmp_path: Path, files: FileStore, new_model, new_pod, monkeypatch: pytest.MonkeyPatch, number: int
):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    new_pod(tmp_path / "pod", files).commit(new_model().train())
    snapshot = find_snapshot(files)
    monkeypatch.setattr(Path, "mkdir", refuse)

    with pytest.raises(NoPermissionError, match=r"out: cannot be written: .*: give this user the right, or another"):
        restore_to_folder(snapshot, tmp_path / "out")


def test_a_full_disk_is_named_and_leaves_no_meta(tmp_path: Path, files: FileStore, new_model, new_pod):
    new_pod(tmp_path / "pod", files).commit(new_model().train())
    snapshot = find_snapshot(files)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        with pytest.raises(DeviceError, match=f"{tmp_path}/out: File too large; free space"):
            restore_to_folder(snapshot, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert not (tmp_path / "out" / "meta.json").exists()


def test_a_disk_that_is_full_at_the_dense_arrays_is_named(
    tmp_path: Path, files: FileStore, new_model, new_pod, few_rows, monkeypatch: pytest.MonkeyPatch
):
    new_pod(tmp_path / "pod", files).commit(new_model(few_rows).train())
    snapshot = find_snapshot(files)
    large = {"mlp.weight": np.zeros(1 << 20, np.float32)}
    monkeypatch.setattr(type(snapshot), "dense", lambda _: large)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        with pytest.raises(DeviceError, match=f"{tmp_path}/out: File too large; free space"):
            restore_to_folder(snapshot, tmp_path / "out")
        assert (tmp_path / "out" / "dense.safetensors").exists()
        with pytest.raises(DeviceError, match=f"{tmp_path}/serving: File too large; free space"):
            export_tables(snapshot, tmp_path / "serving", ExportOptions(form=Safetensors(), precision="fp32"))
        assert (tmp_path / "serving" / "dense.safetensors").exists()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_all_files_of_a_folder_may_be_read_by_whom_the_umask_lets(
    tmp_path: Path, files: FileStore, new_model, new_pod, few_rows
):
    new_pod(tmp_path / "pod", files).commit(new_model(few_rows).train())
    snapshot = find_snapshot(files)
    before = os.umask(0o027)
    try:
        restore_to_folder(snapshot, tmp_path / "out")
        export_tables(snapshot, tmp_path / "serving", ExportOptions(form=Safetensors(), precision="fp16"))
    finally:
        os.umask(before)

    written = [path for folder in ("out", "serving") for path in (tmp_path / folder).rglob("*") if path.is_file()]
    assert {path.name for path in written} >= {"dense.safetensors", "meta.json", "export.json"}
    assert {stat.filemode(path.stat().st_mode) for path in written} == {"-rw-r-----"}


def test_a_disk_that_is_full_at_the_very_end_leaves_no_meta(
    tmp_path: Path, files: FileStore, new_model, new_pod, few_rows, monkeypatch: pytest.MonkeyPatch
):
    new_pod(tmp_path / "pod", files).commit(new_model(few_rows).train())
    snapshot = find_snapshot(files)

    def refuse(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(DeviceError, match=f"{tmp_path}/out: No space left on device; free space"):
        restore_to_folder(snapshot, tmp_path / "out")

    assert not (tmp_path / "out" / "meta.json").exists()


def test_all_files_are_synced_before_the_one_that_marks_them_complete(
    tmp_path: Path, files: FileStore, new_model, new_pod, few_rows, to_disk
):
    new_pod(tmp_path / "pod", files).commit(new_model(few_rows).train())

    restore_to_folder(find_snapshot(files), out := tmp_path / "new" / "out")

    others = {path for path in out.rglob("*") if path.name != "meta.json"}
    assert {tmp_path, tmp_path / "new", out, *others} <= to_disk.synced_before(out / "meta.json")
    assert out in to_disk.synced_after(out / "meta.json")


def test_a_file_system_that_syncs_no_folders_takes_files_all_the_same(
    tmp_path: Path, files: FileStore, new_model, new_pod, few_rows, monkeypatch: pytest.MonkeyPatch
):
    new_pod(tmp_path / "pod", files).commit(new_model(few_rows).train())
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)

    restore_to_folder(find_snapshot(files), tmp_path / "out")

    assert (tmp_path / "out" / "meta.json").exists()
