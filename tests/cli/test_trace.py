"""``dlrmctl trace``: what it writes, what it shows, and what it refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from dlrm_api.names import ExitCode
from dlrm_api.trace import parse_trace
from dlrm_cli import app
from dlrm_cli import trace as command

JOB = """
apiVersion: dlrm.dev/v1alpha1
kind: DLRMJob
metadata: {name: small, namespace: ads}
spec:
  model: {tables: [{name: C1, rows: 5000, dim: 4, maxLookups: 3}, {name: C2, rows: 10, dim: 4}]}
  data: {format: synthetic, synthetic: {samples: 4000}, globalBatchSize: 128}
  checkpoint: {uri: "file:///tmp/small"}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    return "job.yaml"


def test_one_epoch_is_written_beside_the_user_and_shown(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["trace", job])

    printed = capsys.readouterr()
    trace = parse_trace(Path("small.trace.json").read_text())
    assert code == ExitCode.DONE
    assert (trace.job, trace.batches, trace.global_batch_size) == ("small", 32, 128)
    assert [(table.table, table.rows, table.lookups) for table in trace.tables] == [
        ("C1", 5000, 12_000),
        ("C2", 10, 4_000),
    ]
    assert "small: 32 batches of 128 samples" in printed.out
    assert f"{trace.tables[0].unique_rows:,}" in printed.out
    assert f"{trace.tables[0].hit_rate(500):.1%}" in printed.out
    assert f"written to small.trace.json; refer to it by distribution.reference: {Path.cwd().as_uri()}" in printed.err


def test_a_short_trace_is_told_to_underrate_caches(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    app.main(["trace", job, "--batches", "2"])
    short = capsys.readouterr().out
    app.main(["trace", job, "--batches", "800"])
    long = capsys.readouterr().out

    assert "of accesses are the first of their row" in short
    assert "first of their row" not in long


def test_a_short_job_is_traced_to_its_end_and_a_long_trace_goes_on_into_the_next_epoch(job: str) -> None:
    app.main(["trace", job, "--set", "spec.training.maxSteps=5", "--out", "short.json"])
    app.main(["trace", job, "--batches", "40", "--out", "long.json"])

    assert parse_trace(Path("short.json").read_text()).batches == 5
    assert parse_trace(Path("long.json").read_text()).batches == 40


def test_the_jobs_own_older_trace_is_replaced(job: str) -> None:
    app.main(["trace", job, "--batches", "2"])

    code = app.main(["trace", job, "--batches", "3"])

    assert code == ExitCode.DONE
    assert parse_trace(Path("small.trace.json").read_text()).batches == 3
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["job.yaml", "small.trace.json"]


def test_a_configmap_holds_the_trace_and_no_file_is_written(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["trace", job, "--configmap", "reuse", "--batches", "4"])

    printed = capsys.readouterr()
    manifest = yaml.safe_load(printed.out)
    assert code == ExitCode.DONE
    assert (manifest["apiVersion"], manifest["kind"]) == ("v1", "ConfigMap")
    assert manifest["metadata"] == {"name": "reuse", "namespace": "ads"}
    assert parse_trace(manifest["data"]["trace.json"]).batches == 4
    assert "C1" in printed.err
    assert [path.name for path in Path.cwd().iterdir()] == ["job.yaml"]


def test_a_trace_too_large_for_a_configmap_is_kept_in_a_file(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "CONFIGMAP_BYTES", 100)

    code = app.main(["trace", job, "--configmap", "reuse", "--batches", "4"])

    printed = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert printed.out == ""
    assert "a ConfigMap holds at most 100" in printed.err
    assert "written to small.trace.json instead" in printed.err
    assert parse_trace(Path("small.trace.json").read_text()).batches == 4


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--out", "job.yaml"], ExitCode.USAGE, "job.yaml is no trace"),
        (["--out", "other.json"], ExitCode.USAGE, "other.json is the trace of job other"),
        (["--out", "."], ExitCode.USAGE, "Is a directory"),
        (["--out", "absent/t.json"], ExitCode.USAGE, "absent is no folder"),
        (["--configmap", "Reuse_1"], ExitCode.USAGE, "'Reuse_1' is no name of a ConfigMap"),
        (["--rate", "0"], ExitCode.USAGE, "--rate"),
        (["--rate", "2"], ExitCode.USAGE, "--rate"),
        (["--batches", "0"], ExitCode.USAGE, "--batches"),
        (["--set", "spec.data.format=parquet", "--data", "no.parquet"], ExitCode.NO_INPUT, "no.parquet"),
        (["--set", "spec.data.globalBatchSize=127"], ExitCode.BAD_CONFIG, "virtualShards"),
    ],
)
def test_what_can_not_work_is_refused_in_one_line_and_changes_no_file(
    job: str, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.json").write_text('{"job": "other", "globalBatchSize": 1, "batches": 1, "tables": []}')
    before = {path.name: path.read_bytes() for path in Path.cwd().iterdir()}

    got = app.main(["trace", job, *arguments])

    printed = capsys.readouterr()
    assert (got, printed.out) == (code, "")
    assert [line for line in printed.err.splitlines() if words in line] == printed.err.splitlines()
    assert {path.name: path.read_bytes() for path in Path.cwd().iterdir()} == before


def test_a_full_disk_is_named_and_leaves_nothing(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)

    code = app.main(["trace", job, "--batches", "1"])

    assert code == ExitCode.DEVICE
    assert "small.trace.json: No space left on device" in capsys.readouterr().err
    assert [path.name for path in Path.cwd().iterdir()] == ["job.yaml"]


def test_without_the_trainer_it_says_what_to_install(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("numba", "dlrm_checkpointer.compiled", "dlrm_trainer.data.stack_distance", "dlrm_trainer.data.reuse"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "dlrm_trainer.data.reuse", None)

    code = app.main(["trace", job])

    assert code == ExitCode.USAGE
    assert "pip install 'dlrm-operator[trainer]'" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_ends_it_and_writes_nothing(job: str) -> None:
    arguments = ["trace", job, "--batches", "1000000000"]
    program = f"import sys; from dlrm_cli.app import main; sys.exit(main({arguments!r}))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        sent = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=30)

    assert "tracing: " in first
    assert time.monotonic() - sent < 20
    assert (process.returncode, out) == (130, "")
    assert error.splitlines()[-1] == "stopped; nothing was written"
    assert [path.name for path in Path.cwd().iterdir()] == ["job.yaml"]
