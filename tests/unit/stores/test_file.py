from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dlrm_api.errors import DeviceError, InvalidSpecError, NoInputError, NoPermissionError, StoreUnavailableError
from dlrm_checkpointer.format.attempts import claim_attempt, honours_conditions
from dlrm_stores import open_store
from dlrm_stores.file import FileStore


@pytest.mark.slow
def test_killed_writer_leaves_the_old_object_and_lists_nothing_else(files: FileStore):
    files.put("a", b"old")
    code = (
        "import sys; from pathlib import Path; from dlrm_stores.file import FileStore;"
        "print('go', flush=True);"
        "[FileStore(Path(sys.argv[1])).put('a', bytes([i % 256]) * 3_000_000) for i in range(10_000)]"
    )
    seen = set()
    for delay in (0.0, 0.01, 0.02, 0.03, 0.05):
        with subprocess.Popen([sys.executable, "-c", code, str(files.root)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            time.sleep(delay)
            writer.kill()
        body = files.get("a")
        seen.add(len(set(body)))
        assert len(body) in {3, 3_000_000}
        assert len(set(body)) == 1 or body == b"old"

    assert [info.key for info in files.list("")] == ["a"]


def test_a_sweep_removes_what_dead_writers_left(files: FileStore):
    files.put("a/b", b"1")
    draft = files.root / "a" / ".draft-1-2-c"
    draft.write_bytes(b"half")
    os.utime(draft, (1, 1))

    removed = files.sweep_uploads(3_600)

    assert removed == 1
    assert not draft.exists()
    assert files.get("a/b") == b"1"


def test_a_sweep_passes_over_a_folder_that_goes_meanwhile(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    for name in "abc":
        files.put(f"{name}/{name}/x", b"1")
        (files.root / name / name / ".draft-1-2-x").write_bytes(b"half")
    scan = os.scandir

    def remove_and_scan(folder: str):
        if str(folder).endswith("/b/b"):
            shutil.rmtree(files.root / "b")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", remove_and_scan)

    assert files.sweep_uploads(-1) == 2
    assert [info.key for info in files.list("")] == ["a/a/x", "c/c/x"]


@pytest.mark.parametrize("call", ["scandir", "stat", "unlink"])
def test_io_errors_of_lists_and_sweeps_become_store_errors(
    files: FileStore, monkeypatch: pytest.MonkeyPatch, call: str
):
    files.put("a/x", b"1")
    draft = files.root / "a" / ".draft-1-2-x"
    draft.write_bytes(b"half")
    real = getattr(os, call)

    def refuse(path: str, *more: object, **options: object):
        if str(path).endswith(("/a", "/x", "-x")):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return real(path, *more, **options)

    monkeypatch.setattr(os, call, refuse)

    with pytest.raises(StoreUnavailableError, match="Stale file handle"):
        files.sweep_uploads(-1)
    if call != "unlink":
        with pytest.raises(StoreUnavailableError, match="Stale file handle"):
            list(files.list("a/"))


def test_every_folder_that_a_write_makes_outlives_the_machine(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    files.put("chunks/1/x", b"1")
    synced: list[str] = []
    sync = os.fsync

    def remember(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(str(files.root)))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)

    files.put("chunks/2/3/4/x", b"1")

    folders = [name for name in synced if ".draft-" not in name]
    assert sorted(folders) == ["/chunks", "/chunks/2", "/chunks/2/3", "/chunks/2/3/4"]


def test_full_disk_names_path_and_bytes_and_keeps_the_old_object(files: FileStore):
    files.put("a", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, hard))
        with pytest.raises(DeviceError, match=rf"5000 bytes.*{files.root}/a"):
            files.put("a", b"x" * 5_000)
        with pytest.raises(DeviceError, match="5000 bytes"):
            files.put_if_absent("b", b"x" * 5_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)

    assert files.get("a") == b"old"
    assert sorted(path.name for path in files.root.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, DeviceError),
        (errno.EDQUOT, DeviceError),
        (errno.EACCES, NoPermissionError),
        (errno.EROFS, NoPermissionError),
        (errno.EIO, DeviceError),
        (errno.ETIMEDOUT, StoreUnavailableError),
    ],
)
def test_an_error_of_the_device_says_who_can_act(files: FileStore, monkeypatch, number: int, kind: type[Exception]):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(kind, match=f"{files.root}"):
        files.put("a", b"x")
    assert list(files.list("")) == []


def test_a_folder_without_the_right_to_write_is_named(tmp_path: Path):
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65_534)  # root may write anywhere
    try:
        with pytest.raises(NoPermissionError, match=f"{tmp_path}/store"):
            FileStore(tmp_path / "store").put("a", b"x")
    finally:
        os.seteuid(user)


def test_a_path_below_a_file_is_refused_with_its_name(tmp_path: Path):
    (tmp_path / "file").write_text("x")

    with pytest.raises(NoInputError, match=f"{tmp_path}/file/a"):
        FileStore(tmp_path / "file").put("a", b"x")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_listing_below_a_file_is_no_empty_store(tmp_path: Path, place: str):
    (tmp_path / "file").write_text("x")

    with pytest.raises(NoInputError, match=f"{tmp_path}/{place}"):
        list(FileStore(tmp_path / place).list("attempts/"))


def test_a_store_is_empty_before_its_folder_is_made_and_below_an_object(tmp_path: Path):
    store = FileStore(tmp_path / "new" / "store")

    before = list(store.list("attempts/"))
    store.put("attempts/1", b"1")

    assert before == []
    assert list(store.list("attempts/1/")) == []


@pytest.mark.parametrize("uri", ["ftp://host/x", "/tmp/x", "file://host/x", "s3:///x", "gs://b/x"])
def test_a_uri_of_another_kind_is_refused_by_field(uri: str):
    with pytest.raises(InvalidSpecError, match=r"spec\.checkpoint\.uri"):
        open_store(uri)


@pytest.mark.parametrize("uri", ["s3://bucket/job#2", "s3://bucket/job?2", "file:///jobs/a#2", "file:///jobs/a?2"])
def test_uri_with_a_query_or_fragment_is_refused(uri: str):
    with pytest.raises(InvalidSpecError, match=r"spec\.checkpoint\.uri"):
        open_store(uri)


@pytest.fixture(params=[errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def asked_to_link(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A file system without hard links; yields the names of attempted links."""
    asked: list[str] = []

    def link(_draft: Path, path: Path) -> None:
        if path.exists():
            raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
        asked.append(path.name)
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(os, "link", link)
    return asked


def test_attempts_are_claimed_without_hard_links(files: FileStore, asked_to_link: list[str]):
    claimed = [claim_attempt(files, None, "") for _ in range(3)]

    assert not honours_conditions(files)
    assert claimed == [1, 2, 3]
    assert len(asked_to_link) == 1
    assert [info.key for info in files.list("")] == [f"attempts/{number:08d}.json" for number in claimed]


@pytest.mark.usefixtures("asked_to_link")
def test_concurrent_claims_without_hard_links_get_distinct_numbers(files: FileStore):
    with ThreadPoolExecutor(3) as pool:
        numbers = list(pool.map(lambda number: claim_attempt(FileStore(files.root), None, str(number)), range(3)))

    assert len(set(numbers)) == 3


@pytest.mark.usefixtures("asked_to_link")
def test_existing_file_stays_and_missing_hard_links_are_still_noticed(files: FileStore):
    files.put("x", b"1")

    assert not files.put_if_absent("x", b"2")
    assert files.get("x") == b"1"
    assert not honours_conditions(files)


def test_write_refused_by_link_and_rename_is_an_error(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        patch.setattr(Path, "replace", refuse)
        with pytest.raises(NoPermissionError, match=f"{files.root}/x"):
            files.put_if_absent("x", b"1")

    assert list(files.root.iterdir()) == []
    assert honours_conditions(files)


def test_a_link_that_is_refused_where_others_were_made_is_an_error(files: FileStore, monkeypatch: pytest.MonkeyPatch):
    assert files.put_if_absent("x", b"1")

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)

    with pytest.raises(NoPermissionError, match=f"{files.root}/y"):
        files.put_if_absent("y", b"1")
    assert [info.key for info in files.list("")] == ["x"]
