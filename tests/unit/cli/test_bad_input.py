"""Errors before any process starts: exit code, file or field, fix, and nothing left behind."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrm_cli import app
from dlrm_testing.nobody import as_nobody

NOBODY = "http://127.0.0.1:9"
"""An endpoint where nobody listens."""

Change = Callable[[dict[str, Any], Path], None]


def document(folder: Path) -> dict[str, Any]:
    return {
        "apiVersion": "dlrm.dev/v1alpha1",
        "kind": "DLRMJob",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {
                "denseFeatures": ["I1"],
                "bottomMlp": [8],
                "topMlp": [16, 1],
                "tables": [{"name": "C1", "rows": 300, "dim": 8}, {"name": "C2", "rows": 300, "dim": 8}],
            },
            "data": {"format": "synthetic", "globalBatchSize": 64, "virtualShards": 8},
            "checkpoint": {"uri": (folder / "snapshots").as_uri()},
        },
    }


def put(path: str, value: Any) -> Change:
    """Set one field of the document; ``{folder}`` in a text stands for the test's folder."""

    def change(body: dict[str, Any], folder: Path) -> None:
        *steps, last = [int(step) if step.isdigit() else step for step in path.split(".")]
        node: Any = body
        for step in steps:
            node = node[step] if isinstance(step, int) else node.setdefault(step, {})
        node[last] = value.format(folder=folder) if isinstance(value, str) else value

    return change


def drop(path: str) -> Change:
    def change(body: dict[str, Any], folder: Path) -> None:
        *steps, last = path.split(".")
        node = body
        for step in steps:
            node = node[step]
        del node[last]

    return change


def both(*changes: Change) -> Change:
    def change(body: dict[str, Any], folder: Path) -> None:
        for each in changes:
            each(body, folder)

    return change


def tsv(split: str, uri: str) -> Change:
    return both(put("spec.data.format", "criteo-tsv"), put(f"spec.data.{split}.uris", [uri]))


JOB_CASES: list[tuple[str, Change, int, tuple[str, ...]]] = [
    ("another kind", put("kind", "Pod"), 78, ("job.yaml", "DLRMJob")),
    ("another version", put("apiVersion", "dlrm.dev/v9"), 78, ("apiVersion", "dlrm.dev/v1alpha1")),
    ("no name", drop("metadata.name"), 78, ("metadata.name", "required")),
    ("a name that no Service can have", put("metadata.name", "Tiny_1"), 78, ("metadata", "name must be")),
    ("no snapshots", drop("spec.checkpoint"), 78, ("spec.checkpoint", "required")),
    ("an unknown field", put("spec.training.lerningRate", 1), 78, ("spec.training.lerningRate", "unknown field")),
    ("a dim that is no multiple of 4", put("spec.model.tables.0.dim", 6), 78, ("spec.model.tables[0].dim", "4")),
    ("no rows", put("spec.model.tables.0.rows", 0), 78, ("spec.model.tables[0].rows", "1")),
    ("words for a number", put("spec.data.epochs", "many"), 78, ("spec.data.epochs", "integer")),
    ("a duration without unit", put("spec.checkpoint.interval", "soon"), 78, ("spec.checkpoint.interval", "30m")),
    ("a gang without queue", put("spec.scheduling", {"gang": "kueue"}), 78, ("spec.scheduling", "LocalQueue")),
    ("a top MLP without logit", put("spec.model.topMlp", [16, 2]), 78, ("topMlp must end in 1",)),
    ("dims that dot can't multiply", put("spec.model.tables.0.dim", 16), 78, ("dim", "bottomMlp")),
    ("one vector that dot has no pair for",
     put("spec.model", {"topMlp": [1], "tables": [{"name": "C1", "rows": 300, "dim": 8}]}), 78,
     ("spec.model", "dot")),
    ("dense features without MLP", put("spec.model.bottomMlp", []), 78, ("denseFeatures and bottomMlp",)),
    ("no table", put("spec.model.tables", []), 78, ("tables",)),
    ("two tables of one name", put("spec.model.tables.1.name", "C1"), 78, ("2 tables have the name C1",)),
    ("shards that don't divide", put("spec.data.virtualShards", 7), 78, ("virtualShards must divide",)),
    ("ranks without a shard", put("spec.trainer.replicas", 16), 78, ("virtualShards", "fewer ranks")),
    ("a pin to no rank", put("spec.model.tables.0.pin", {"ranks": [3]}), 78, ("tables[0].pin", "3")),
    ("an unknown feature", both(tsv("train", "/x"), put("spec.model.tables.0.name", "C77")), 78, ("C77", "C1 to C26")),
    ("no training files", put("spec.data.format", "parquet"), 78, ("train.uris is empty",)),
    ("files that made-up samples leave unread", put("spec.data.train", {"uris": ["/dev/null"]}), 78,
     ("spec.data", "format synthetic reads no files")),
    ("drift that a shuffle hides", put("spec.data.synthetic", {"drift": 2}), 78, ("shuffle.windowRows",)),
    ("two intervals", put("spec.checkpoint", {"uri": "file:///x", "interval": "1m", "intervalSteps": 5}), 78,
     ("interval and intervalSteps",)),
    ("snapshots by ftp", put("spec.checkpoint.uri", "ftp://host/x"), 78, ("spec.checkpoint", "s3:// or file:///")),
    ("snapshots below a file", put("spec.checkpoint.uri", "file://{folder}/job.yaml/x"), 78,
     ("spec.checkpoint.uri", "job.yaml")),
    ("deltas below a file", put("spec.checkpoint.publish", {"uri": "file://{folder}/job.yaml/x"}), 78,
     ("spec.checkpoint.publish.uri", "job.yaml")),
    ("deltas among the snapshots", put("spec.checkpoint.publish", {"uri": "file://{folder}/%73napshots"}), 78,
     ("spec.checkpoint.publish.uri",)),
    ("tables above all memory", put("spec.model.tables.0.rows", 2**36), 78, ("C1", "bytes")),
    ("a missing training file", tsv("train", "{folder}/no.tsv"), 66, ("spec.data.train.uris[0]", "no.tsv", "--data")),
    ("a training file that no name can be of", tsv("train", "/" + 300 * "a"), 66,
     ("spec.data.train.uris[0]", "--data")),
    ("a training file of nobody", tsv("train", "~no-user/x.tsv"), 66, ("uris[0]", "no-user", "--data")),
    ("a missing evaluation file", both(tsv("train", "/dev/null"), tsv("eval", "/no.tsv")), 66,
     ("spec.data.eval.uris[0]", "/no.tsv", "--eval-data")),
    ("data on another machine", tsv("train", "hdfs://host/x"), 78, ("train.uris[0]",)),
    ("data elsewhere", tsv("train", "gs://bucket/x"), 78, ("uris", "s3://bucket/prefix")),
    ("a missing histogram", put("spec.data.synthetic.reuseHistogram", "/no.txt"), 66, ("reuseHistogram", "/no.txt")),
    ("a missing authority", put("spec.checkpoint.s3.caFile", "/no.pem"), 66, ("spec.checkpoint.s3.caFile", "/no.pem")),
    ("an endpoint that does not answer", put("spec.checkpoint", {"uri": "s3://b/x", "s3": {"endpoint": NOBODY}}), 75,
     (NOBODY, "did not answer")),
    ("a publisher's endpoint that does not answer",
     both(put("spec.checkpoint.s3", {"endpoint": NOBODY}), put("spec.checkpoint.publish", {"uri": "s3://b/x"})), 75,
     (NOBODY, "did not answer")),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "nothing")
    monkeypatch.delenv("DLRM_CREDENTIALS_DIR", raising=False)
    return tmp_path


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one error line; other lines say what happens, and nothing is on stdout."""
    printed = capsys.readouterr()
    errors = [line for line in printed.err.splitlines() if line.startswith("dlrmctl: error: ")]
    assert printed.out == ""
    assert len(errors) == 1, printed.err
    assert "Traceback" not in printed.err
    return errors[0]


@pytest.mark.parametrize(
    ("change", "code", "words"), [case[1:] for case in JOB_CASES], ids=[case[0] for case in JOB_CASES]
)
def test_a_bad_job_is_refused_before_anything_starts(
    folder: Path, change: Change, code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    body = copy.deepcopy(document(folder))
    change(body, folder)
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(body).replace("{folder}", str(folder)))

    got = app.main(["run", str(path), "-o", "json"])

    line = error_line(capsys)
    assert got == code, line
    for word in words:
        assert word in line
    assert not (folder / "snapshots").exists()
    assert not list(folder.glob("runs/*/logs/*"))


def test_data_in_an_unreadable_folder_is_refused_with_its_field(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory() as above:
        folder = Path(above) / "folder"
        (folder / "locked").mkdir(parents=True)
        body = document(folder)
        tsv("train", str(folder / "locked" / "day.tsv"))(body, folder)
        (folder / "job.yaml").write_text(yaml.safe_dump(body))
        command = ["run", str(folder / "job.yaml"), "--workdir", str(folder / "work"), "-o", "json"]
        assert app.main(command) == 66  # loads modules too, which nobody may not read below root's home
        capsys.readouterr()
        (folder / "locked").chmod(0)
        Path(above).chmod(0o755)
        with as_nobody(folder):
            got = app.main(command)

    line = error_line(capsys)
    assert got == 77, line
    assert "spec.data.train.uris[0]" in line
    assert "locked/day.tsv" in line


def test_a_job_without_credentials_is_refused_before_anything_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(folder / "none"))
    body = document(folder)
    body["spec"]["checkpoint"] = {"uri": "s3://b/x", "s3": {"endpoint": NOBODY}}
    (folder / "job.yaml").write_text(yaml.safe_dump(body))

    got = app.main(["run", "job.yaml"])

    line = error_line(capsys)
    assert got == 77
    assert "no credentials for bucket b" in line
    assert "set DLRM_CREDENTIALS_DIR to a folder with accessKeyId and secretAccessKey" in line

    body["spec"]["checkpoint"]["credentialsSecret"] = "keys"
    (folder / "job.yaml").write_text(yaml.safe_dump(body))
    asked = app.main(["run", "job.yaml"])
    assert (asked, error_line(capsys)) == (77, line)

    listed = app.main(["snapshots", "list", "s3://b/x", "--endpoint", NOBODY])
    assert listed == 77
    assert "set --credentials-dir to a folder with accessKeyId and secretAccessKey" in error_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--workdir", "job.yaml/work"], 77, ("job.yaml/work", "--workdir")),
        (["--workdir", "/proc/nowhere"], 77, ("/proc/nowhere", "--workdir")),
        (["--set", "spec.training.maxSteps"], 64, ("--set spec.training.maxSteps", "spec.path=value")),
        (["--set", "spec.training.steps=1"], 64, ("spec.training has no field steps", "maxSteps")),
        (["--set", "spec.training.maxSteps=0"], 78, ("spec.training.maxSteps", "1")),
        (["--steps", "3"], 64, ("No such option",)),
        (["--data", "/no.parquet"], 64, ("--data", "--set spec.data.format=parquet")),
        (["--eval-data", "/no.parquet"], 64, ("--eval-data", "spec.data.format")),
        (["--data", "/no.parquet", "--set", "spec.data.format=parquet"], 66, ("uris[0]", "/no.parquet")),
        (["--data", ""], 64, ("--data",)),
    ],
)
def test_a_bad_command_line_is_refused_before_anything_starts(
    folder: Path, arguments: list[str], code: int, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(document(folder)))

    got = app.main(["run", "job.yaml", *arguments])

    line = error_line(capsys)
    assert got == code, line
    for word in words:
        assert word in line
    assert not (folder / "snapshots").exists()


@pytest.mark.parametrize("command", [["run", "JOB"], ["trace", "JOB", "--batches", "3"], ["profile", "measure"]])
def test_a_removed_current_folder_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(document(folder)))
    (folder / "gone").mkdir()
    monkeypatch.chdir(folder / "gone")
    (folder / "gone").rmdir()

    got = app.main([str(folder / "job.yaml") if each == "JOB" else each for each in command])

    assert got == 66
    assert "current folder" in error_line(capsys)
