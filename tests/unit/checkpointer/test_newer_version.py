"""Snapshots that a newer version wrote, read by this one: after a rollback of the software nothing is lost unasked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_api.errors import SnapshotError
from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.format.manifest import NewerVersionError, manifest_key, sealed
from dlrm_checkpointer.read.catalog import find_snapshot, list_snapshots
from dlrm_checkpointer.read.restore import newest_snapshot
from dlrm_checkpointer.write.retention import Retention, RetentionPolicy
from dlrm_cli import app
from dlrm_cli.snapshots import split_usable
from dlrm_stores.file import FileStore

VERSIONS = r"manifests/0000000000000004-00000001\.json: format version 4, this program reads version 3: use a newer"


def rewrite(files: FileStore, step: int, **changes: object) -> None:
    path = files.root / manifest_key(step, 1)
    path.write_bytes(sealed(json.loads(path.read_text()) | changes))


@pytest.fixture
def upgraded(files: FileStore, train_and_commit) -> FileStore:
    """A store of four snapshots, of which a newer version wrote those of steps 3 and 4."""
    train_and_commit(4)
    for step in (3, 4):
        rewrite(files, step, version=4, chain={"another": "form"})
    return files


def keys(files: FileStore) -> list[str]:
    return [info.key for info in files.list("")]


def test_a_job_does_not_go_on_from_before_what_a_newer_version_wrote(upgraded: FileStore):
    with pytest.raises(NewerVersionError, match=VERSIONS) as refused:
        newest_snapshot(upgraded)

    assert "to go back to step 2 and lose what was trained since, move the manifests of later steps" in str(
        refused.value
    )
    assert f"(steps 3 to 4) out of {upgraded.uri}/manifests/" in str(refused.value)


def test_a_damaged_snapshot_is_not_passed_over_for_one_of_before_those(upgraded: FileStore):
    (upgraded.root / manifest_key(4, 1)).write_bytes(b"torn")

    with pytest.raises(NewerVersionError, match=r"0003-00000001\.json: format version 4.*to step 2 .* \(step 3\)"):
        newest_snapshot(upgraded)


def test_going_back_is_a_decision_after_which_those_do_not_count(upgraded: FileStore, tmp_path: Path):
    for step in (3, 4):
        (upgraded.root / manifest_key(step, 1)).rename(tmp_path / str(step))

    snapshot, reasons = newest_snapshot(upgraded)
    claim_attempt(upgraded, snapshot.step, "test")
    for step in (3, 4):
        (tmp_path / str(step)).rename(upgraded.root / manifest_key(step, 1))

    assert (snapshot.step, reasons) == (2, [])
    assert newest_snapshot(upgraded)[0].step == 2
    assert find_snapshot(upgraded).step == 2
    assert [each.step for each in list_snapshots(upgraded) if not each.problem] == [2, 1]


def test_without_an_older_snapshot_step_0_is_the_users_decision(upgraded: FileStore):
    for step in (1, 2):
        upgraded.delete(manifest_key(step, 1))

    with pytest.raises(NewerVersionError, match=r"can read no older one: give an empty spec\.checkpoint\.uri to start"):
        newest_snapshot(upgraded)


def test_a_version_that_was_never_released_is_passed_over_as_damaged(upgraded: FileStore):
    for step in (3, 4):
        rewrite(upgraded, step, version=1)

    snapshot, reasons = newest_snapshot(upgraded)

    assert snapshot.step == 2
    assert "version 1, this program reads version 3: that version was never released" in reasons[0]


def test_nothing_is_removed_beside_snapshots_whose_chain_cannot_be_known(upgraded: FileStore):
    before = keys(upgraded)
    retention = Retention(upgraded, RetentionPolicy(keep_last=1, orphan_s=0))

    with pytest.raises(NewerVersionError, match="newer dlrm-operator"):
        retention.apply(1)
    assert keys(upgraded) == before

    claim_attempt(upgraded, 2, "test")
    retention.apply(2)
    assert [each.step for each in list_snapshots(upgraded)] == [4, 3, 2, 1]  # 2 depends on 1


@pytest.mark.parametrize("command", ["show", "verify", "restore", "prune", "export"])
def test_commands_refuse_an_older_snapshot_that_nobody_named(
    upgraded: FileStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
):
    before, out = keys(upgraded), tmp_path / "out"
    to = ["--to", str(out)] if command in {"restore", "export"} else []

    code = app.main(["snapshots", command, upgraded.uri, *to])

    said = capsys.readouterr()
    assert code == ExitCode.BAD_DATA
    with pytest.raises(SnapshotError, match=VERSIONS):
        raise SnapshotError(said.err)
    assert said.out == ""
    assert keys(upgraded) == before
    assert not out.exists()


def test_commands_take_an_older_snapshot_by_its_step(upgraded: FileStore, capsys: pytest.CaptureFixture[str]):
    assert app.main(["snapshots", "verify", upgraded.uri, "--step", "2"]) == ExitCode.DONE
    assert capsys.readouterr().out.startswith("verified step 2")
    assert app.main(["snapshots", "verify", upgraded.uri, "--step", "4"]) == ExitCode.BAD_DATA
    assert "format version 4, this program reads version 3" in capsys.readouterr().err


def test_a_forged_manifest_spoils_no_listing(upgraded: FileStore, capsys: pytest.CaptureFixture[str]):
    [listed] = [each for each in list_snapshots(upgraded) if each.step == 2]
    assert listed.manifest is not None
    huge = replace(listed.manifest.dense, bytes=2**62)

    usable, unusable = split_usable(
        [replace(listed, manifest=listed.manifest.model_copy(update={"dense": huge})), listed]
    )

    assert [each.step for each in usable] == [2]
    assert [(each.step, each.problem) for each in unusable] == [
        (2, "must be less than or equal to 9007199254740992, got 4611686018427640623")
    ]


def test_a_listing_shows_what_can_be_read_and_names_the_rest(upgraded: FileStore, capsys: pytest.CaptureFixture[str]):
    assert app.main(["snapshots", "list", upgraded.uri, "-o", "json"]) == ExitCode.DONE

    said = capsys.readouterr()
    assert [each["step"] for each in json.loads(said.out)] == [1, 2]
    assert said.err.splitlines()[0].startswith(
        "skipping unusable snapshot at step 4, attempt 1: manifests/0000000000000004-00000001.json"
    )
