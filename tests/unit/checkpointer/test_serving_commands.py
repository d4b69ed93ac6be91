"""``dlrmctl snapshots`` for what leaves the job: differences, exports, deltas."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.names import ExitCode
from dlrm_checkpointer.format.attempts import claim_attempt
from dlrm_checkpointer.publish.follower import Follower
from dlrm_cli import app
from dlrm_stores.file import FileStore


@pytest.fixture
def trained(train_and_commit) -> Any:
    """A model of which steps 1 to 3 are committed."""
    return train_and_commit(3)


def test_diff_counts_rows_by_table(files: FileStore, trained, capsys: pytest.CaptureFixture[str]):
    code = app.main(["snapshots", "diff", files.uri, "1", "3-1", "-o", "json"])

    assert code == ExitCode.DONE
    users = next(each for each in json.loads(capsys.readouterr().out) if each["table"] == "users")
    touched = trained.touched_at["users"]
    assert users["changed"] + users["new"] == (touched > 1).sum()
    assert users["gone"] == 0
    assert 0 < users["largest_change"] <= users["change_norm"]


def test_diff_prints_a_table(files: FileStore, trained, capsys: pytest.CaptureFixture[str]):
    assert app.main(["snapshots", "diff", files.uri, "2", "2"]) == ExitCode.DONE

    printed = capsys.readouterr().out
    assert "rows that differ" in printed
    assert next(line.split() for line in printed.splitlines() if "users" in line)[3] == "0"


@pytest.mark.parametrize(
    ("name", "says", "code"), [("last", "'last'", ExitCode.USAGE), ("7", "no snapshot of step 7", ExitCode.NO_INPUT)]
)
def test_diff_says_which_snapshot_it_cannot_find(files: FileStore, trained, capsys, name, says, code):
    assert app.main(["snapshots", "diff", files.uri, "1", name]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("form", ["parquet", "safetensors"])
def test_export_writes_one_file_a_table_and_a_manifest(tmp_path: Path, files: FileStore, trained, form):
    out = tmp_path / "out"
    command = ["snapshots", "export", files.uri, "--to", str(out), "--format", form, "--precision", "int8"]

    assert app.main([*command, "--step", "2", "--table", "users", "--updated-only"]) == ExitCode.DONE

    said = json.loads((out / "export.json").read_text())
    assert (said["step"], said["fileFormat"]) == (2, form)
    assert [each["file"] for each in said["tables"]] == [f"tables/users.{form}"]


@pytest.fixture
def published(tmp_path: Path, files: FileStore, new_model, new_pod) -> FileStore:
    """Deltas of steps 1 to 3."""
    target = FileStore(tmp_path / "deltas")
    model, pod = new_model(), new_pod(tmp_path / "pod", files, policy="consecutive", target=target)
    attempt = claim_attempt(files, None, "test")
    for _ in range(3):
        pod.commit(model.train(), attempt)
    return target


def test_follow_once_applies_what_is_there_and_then_nothing(tmp_path: Path, published: FileStore, capsys):
    command = ["snapshots", "follow", published.uri, "--to", str(tmp_path / "out"), "--once"]

    assert app.main(command) == ExitCode.DONE
    first = capsys.readouterr().out.splitlines()
    assert app.main(command) == ExitCode.DONE

    assert [line.split(":")[0] for line in first] == ["full delta 1 applied", "delta 2 applied", "delta 3 applied"]
    assert first[0].endswith("(the folder had no image)")
    assert capsys.readouterr().out == ""
    assert json.loads((tmp_path / "out" / "state.json").read_text())["step"] == 3


def test_follow_once_says_where_nothing_is_published(tmp_path: Path, files: FileStore, capsys):
    files.root.mkdir()

    assert app.main(["snapshots", "follow", files.uri, "--to", str(tmp_path / "out"), "--once"]) == ExitCode.NO_INPUT
    assert "delta not found" in capsys.readouterr().err


@pytest.mark.slow
def test_a_follower_that_is_killed_again_and_again_gets_there(tmp_path: Path, published: FileStore):
    program = [sys.executable, "-c", "import sys; from dlrm_cli.app import main; sys.exit(main(sys.argv[1:]))"]
    arguments = ["snapshots", "follow", published.uri, "--to", str(tmp_path / "out"), "--interval", "0.1"]
    draw = random.Random(0)
    for _ in range(8):
        process = subprocess.Popen([*program, *arguments], stdout=subprocess.DEVNULL)
        time.sleep(draw.uniform(0.5, 2.0))
        process.kill()
        process.wait()
    subprocess.run([*program, *arguments[:-2], "--once"], check=True, timeout=60)

    whole = Follower(published, tmp_path / "whole")
    whole.catch_up()
    killed, fresh = (
        folder / json.loads((folder / "state.json").read_text())["image"]
        for folder in (tmp_path / "out", tmp_path / "whole")
    )
    for path in (fresh / "tables").iterdir():
        assert (killed / "tables" / path.name).read_bytes() == path.read_bytes()
