"""``dlrmctl snapshots`` on damaged stores: it names what it skips and what it checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import dlrm_checkpointer
from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import manifest_key
from dlrm_checkpointer.read.restore import open_snapshot
from dlrm_cli import app
from dlrm_stores.file import FileStore


@pytest.fixture
def three(files: FileStore, train_and_commit) -> FileStore:
    """A store of three snapshots."""
    train_and_commit(3)
    return files


def tear(files: FileStore, step: int) -> None:
    path = files.root / manifest_key(step, 1)
    path.write_bytes(path.read_bytes()[:100])


def flip(files: FileStore, step: int) -> None:
    path = files.root / open_snapshot(files, step, 1).manifest.chunks[0].key
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.mark.parametrize("command", ["show", "restore", "export"])
def test_restoring_an_older_snapshot_says_why_the_newer_is_skipped(
    three: FileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
):
    tear(three, 3)
    to = [] if command == "show" else ["--to", str(tmp_path / "out")]

    code = app.main(["snapshots", command, three.uri, *to])

    said = capsys.readouterr().err.splitlines()
    assert code == ExitCode.DONE
    assert said[0].startswith(
        "skipping unusable snapshot at step 3, attempt 1: manifests/0000000000000003-00000001.json: not JSON"
    )
    assert not any("step 1," in line for line in said)


def keys(value: object) -> Iterator[str]:
    """Return the keys of a JSON document, of objects within it too."""
    if isinstance(value, dict):
        yield from value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from keys(each)


@pytest.mark.parametrize(
    "arguments",
    [["list", "-o", "json"], ["show"], ["diff", "1", "3", "-o", "json"], ["prune", "--dry-run", "-o", "json"]],
    ids=lambda arguments: arguments[0],
)
def test_json_results_have_no_camel_case_keys(
    three: FileStore, capsys: pytest.CaptureFixture[str], arguments: list[str]
):
    command, *rest = arguments

    code = app.main(["snapshots", command, three.uri, *rest])

    found = set(keys(json.loads(capsys.readouterr().out)))
    assert code == ExitCode.DONE
    assert found
    assert {key for key in found if key != key.lower()} == set()


def test_show_prints_all_of_the_cut_with_keys_of_results(three: FileStore, capsys: pytest.CaptureFixture[str]):
    written = open_snapshot(three, 2, 1).meta

    app.main(["snapshots", "show", three.uri, "--step", "2"])

    cut = json.loads(capsys.readouterr().out)["cut"]
    assert (cut["world_size"], cut["reader"]["next_batch"]) == (written.world_size, written.reader["next_batch"])
    assert [each["column_blocks"] for each in cut["model"]["tables"]] == [
        each["columnBlocks"] for each in written.model["tables"]
    ]


def test_verify_ends_badly_where_the_newest_snapshot_is_damaged(three: FileStore, capsys: pytest.CaptureFixture[str]):
    tear(three, 3)

    code = app.main(["snapshots", "verify", three.uri])
    said = capsys.readouterr()
    named = app.main(["snapshots", "verify", three.uri, "--step", "2"])

    assert code == ExitCode.BAD_DATA
    assert said.out.startswith("verified step 2")
    assert "step 3, attempt 1: " in said.err
    assert "(step 3): a job would resume from step 2" in said.err
    assert named == ExitCode.DONE
    assert capsys.readouterr().err == ""


def test_a_history_that_was_given_up_is_told_and_is_no_damage(three: FileStore, capsys: pytest.CaptureFixture[str]):
    claim_attempt(three, 2, "test")

    codes = [app.main(["snapshots", "verify", three.uri, *more]) for more in ([], ["--all"])]

    assert codes == [ExitCode.DONE, ExitCode.DONE]
    assert "step 3, attempt 1: " in capsys.readouterr().err


def test_all_snapshots_are_checked_past_those_that_are_damaged(three: FileStore, capsys: pytest.CaptureFixture[str]):
    flip(three, 2)
    tear(three, 3)

    code = app.main(["snapshots", "verify", three.uri, "--all"])

    said = capsys.readouterr()
    assert code == ExitCode.BAD_DATA
    assert [line.split(":")[0] for line in said.out.splitlines()] == ["verified step 1"]
    assert "verifying step 2 (2 of 2)" in said.err
    assert "damaged: step 2, attempt 1: " in said.err
    assert "corrupt: its SHA-256 is not the manifest's" in said.err
    assert "(steps 2, 3)" in said.err


def test_all_whole_snapshots_are_named_oldest_first(three: FileStore, capsys: pytest.CaptureFixture[str]):
    code = app.main(["snapshots", "verify", three.uri, "--all"])

    assert code == ExitCode.DONE
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"verified step {step}" for step in (1, 2, 3)
    ]


def test_a_snapshot_that_retention_removes_meanwhile_is_no_damage(
    three: FileStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    check = dlrm_checkpointer.verify_snapshot

    def check_and_retire(snapshot):
        three.delete(manifest_key(3, 1))
        return check(snapshot)

    monkeypatch.setattr(dlrm_checkpointer, "verify_snapshot", check_and_retire)

    code = app.main(["snapshots", "verify", three.uri, "--all"])

    assert code == ExitCode.DONE
    assert "step 3: retention deleted it" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--all"], []])
def test_an_empty_store_has_nothing_to_check(files: FileStore, capsys: pytest.CaptureFixture[str], options: list[str]):
    files.root.mkdir()

    assert app.main(["snapshots", "verify", files.uri, *options]) == ExitCode.NO_INPUT
    assert "no snapshot is there" in capsys.readouterr().err


def test_one_step_and_all_exclude_each_other(three: FileStore, capsys: pytest.CaptureFixture[str]):
    assert app.main(["snapshots", "verify", three.uri, "--all", "--step", "1"]) == ExitCode.USAGE
    assert "--all cannot be combined with --step" in capsys.readouterr().err
