"""``dlrmctl snapshots prune``: retention when a person asks for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.read.catalog import list_snapshots
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_cli import app
from dlrm_stores.file import FileStore
from dlrm_testing.digests import snapshot_digest


@pytest.fixture
def digest(tmp_path: Path, files: FileStore, new_model, new_pod) -> str:
    """Return the digest of the newest of four snapshots in ``files``."""
    model, pod = new_model(), new_pod(tmp_path / "pod", files, keep_last=100)
    attempt = claim_attempt(files, None, "test")
    for _ in range(4):
        pod.commit(model.train(), attempt)
    return model.digest()


def prune(files: FileStore, *options: str) -> int:
    return app.main(["snapshots", "prune", files.uri, *options])


def steps(files: FileStore) -> list[int]:
    return [each.step for each in list_snapshots(files)]


def test_prune_removes_the_rest_and_leaves_kept_snapshots_untouched(
    files: FileStore, digest: str, capsys: pytest.CaptureFixture[str]
):
    code = prune(files, "--keep-last", "2")

    assert code == ExitCode.DONE
    assert steps(files) == [4, 3]
    assert capsys.readouterr().out.splitlines() == [
        "kept: step 4, attempt 1",
        "kept: step 3, attempt 1",
        "deleted: step 2, attempt 1",
        "deleted: step 1, attempt 1",
    ]
    assert snapshot_digest(newest_snapshot(files)[0]) == digest
    assert {info.key.split("/")[1] for info in files.list("chunks/")} == {f"{step:016d}" for step in (3, 4)}


def test_a_dry_run_says_what_would_go_and_removes_nothing(
    files: FileStore, digest: str, capsys: pytest.CaptureFixture[str]
):
    before = [info.key for info in files.list("")]

    code = prune(files, "--keep-last", "3", "--dry-run", "-o", "json")

    assert code == ExitCode.DONE
    found = json.loads(capsys.readouterr().out)
    assert [each["step"] for each in found["kept"]] == [4, 3, 2]
    assert found["would delete"] == [{"step": 1, "attempt": 1}]
    assert [info.key for info in files.list("")] == before


def test_pruning_again_removes_nothing_more(files: FileStore, digest: str):
    prune(files, "--keep-last", "1")
    before = [info.key for info in files.list("")]

    assert prune(files, "--keep-last", "1") == ExitCode.DONE
    assert [info.key for info in files.list("")] == before


def test_nothing_goes_where_the_newest_attempt_could_go_on_from_nothing(
    files: FileStore, digest: str, capsys: pytest.CaptureFixture[str]
):
    claim_attempt(files, None, "from the beginning")

    code = prune(files)

    assert code == ExitCode.NO_INPUT
    assert "attempt 2" in capsys.readouterr().err
    assert steps(files) == [4, 3, 2, 1]


def test_an_attempt_that_starts_meanwhile_stops_it(
    files: FileStore, digest: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    put = FileStore.put

    def start_an_attempt(self: FileStore, key: str, body: bytes) -> None:
        put(self, key, body)
        if key.startswith("retired/"):
            monkeypatch.setattr(FileStore, "put", put)
            put(self, f"attempts/{2:08d}.json", b'{"restoredStep": 1, "note": "", "token": "", "time": 0}')

    monkeypatch.setattr(FileStore, "put", start_an_attempt)

    code = prune(files, "--keep-last", "1")

    assert code == ExitCode.TEMPORARY
    assert "a new attempt started" in capsys.readouterr().err
    assert len(list(files.list("manifests/"))) == 4
    assert list(files.list("retired/")) == []


def test_an_attempt_that_still_chooses_its_snapshot_stops_it(
    files: FileStore, digest: str, capsys: pytest.CaptureFixture[str]
):
    key = f"attempts/{2:08d}.json"
    files.put(key, b'{"restoredStep": 1, "note": "", "token": "", "time": 0, "pending": true}')
    before = [info.key for info in files.list("")]

    code = prune(files, "--keep-last", "1")

    assert code == ExitCode.TEMPORARY
    assert "attempt 2 is selecting its snapshot" in capsys.readouterr().err
    assert prune(files, "--keep-last", "1", "--dry-run") == ExitCode.DONE
    assert Retention(files, RetentionPolicy(keep_last=1)).apply(2) == 0
    assert [info.key for info in files.list("")] == before


@pytest.mark.parametrize("damage", ["gone", "shorter"])
def test_a_snapshot_that_lacks_an_object_is_none_of_those_that_are_kept(
    files: FileStore, digest: str, capsys: pytest.CaptureFixture[str], damage: str
):
    path = files.root / list_snapshots(files)[0].manifest.chunks[0].key
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:-1])

    code = prune(files, "--keep-last", "1")

    assert code == ExitCode.DONE
    assert capsys.readouterr().out.splitlines() == [
        "kept: step 3, attempt 1",
        "deleted: step 2, attempt 1",
        "deleted: step 1, attempt 1",
    ]
    assert newest_snapshot(files)[0].step == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--kms-key-id", "alias/key"), "kmsKeyId needs encryption aws:kms"),
        (("--endpoint", "minio:9000"), "endpoint: 'minio:9000' does not match ^https?://"),
    ],
)
def test_options_that_describe_no_service_are_refused(
    options: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
):
    code = app.main(["snapshots", "prune", "s3://bucket/job", *options])

    assert code == ExitCode.USAGE
    assert words in capsys.readouterr().err
