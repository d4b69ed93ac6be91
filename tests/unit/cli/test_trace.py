"""``dlrmctl trace``: what it writes, what it shows, and what it refuses."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.names import ExitCode
from dlrm_api.trace import CurvePoint, TableTrace, Trace, parse_trace
from dlrm_cli import app
from dlrm_cli import trace as trace_module
from dlrm_cli.trace import trace_maps
from dlrm_cluster.control_plane import ControlPlane

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


def test_one_epoch_is_traced_and_shown(job: str, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert f"distribution.reference: {Path.cwd().as_uri()}/small.trace.json" in printed.err


@pytest.mark.slow
def test_a_short_trace_is_reported_to_underestimate_caches(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    app.main(["trace", job, "--batches", "2"])
    short = capsys.readouterr().out
    app.main(["trace", job, "--batches", "800"])
    long = capsys.readouterr().out

    assert "of accesses are the first of their row" in short
    assert "first of their row" not in long


def test_a_trace_ends_with_the_job_and_may_span_epochs(job: str) -> None:
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


def test_a_trace_too_large_for_a_configmap_is_split_by_tables(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app.main(["trace", job, "--batches", "4"])
    whole = parse_trace(Path("small.trace.json").read_text())
    monkeypatch.setattr(trace_module, "MAX_CONFIGMAP_BYTES", len(Path("small.trace.json").read_text()) - 1)
    capsys.readouterr()

    code = app.main(["trace", job, "--configmap", "reuse", "--batches", "4"])

    printed = capsys.readouterr()
    manifests = list(yaml.safe_load_all(printed.out))
    assert code == ExitCode.DONE
    assert [each["metadata"] for each in manifests] == [
        {"name": "reuse-0", "namespace": "ads"},
        {"name": "reuse-1", "namespace": "ads"},
    ]
    assert [parse_trace(each["data"]["trace.json"]).tables for each in manifests] == [
        (table,) for table in whole.tables
    ]
    assert "\nspec.model.tables[0]: distribution.reference: configmap:reuse-0\n" in printed.err
    assert "\nspec.model.tables[1]: distribution.reference: configmap:reuse-1\n" in printed.err


def test_a_group_too_large_for_a_configmap_is_named_and_its_trace_is_kept(
    job: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trace_module, "MAX_CONFIGMAP_BYTES", 3_000)
    group = "spec.model.tableGroups=[{name: g, count: 9, template: {rows: 100, dim: 4}}]"

    code = app.main(["trace", job, "--configmap", "reuse", "--batches", "4", "--set", group])

    printed = capsys.readouterr()
    assert code == ExitCode.USAGE
    assert printed.out == ""
    assert "9 tables of spec.model.tableGroups[0].template" in printed.err
    assert "small.trace.json" in printed.err
    assert len(parse_trace(Path("small.trace.json").read_text()).tables) == 11


tables = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=30)


@given(shapes=tables, limit=st.integers(6_000, 20_000))
def test_every_part_fits_and_together_they_hold_each_table_once(shapes: list[tuple[int, int]], limit: int) -> None:
    points = tuple(CurvePoint(cache_rows=row, hit_rate=0.5) for row in range(1, 31))
    paths, each = [], []
    for number, (length, count) in enumerate(shapes):
        for _ in range(count if count < 4 else 1):
            paths.append(f"spec.model.tables[{number}]")
            name = f"t{len(paths)}"
            each.append(TableTrace(table=name, rows=9, lookups=1, unique_rows=1, accesses=1, curve=points[:length]))
    trace = Trace(global_batch_size=1, batches=1, tables=tuple(each))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_module, "MAX_CONFIGMAP_BYTES", limit)
        parts = trace_maps("reuse", trace, paths)

    assert all(len(part.text.encode()) <= limit for part in parts)
    read = [parse_trace(part.text).tables for part in parts]
    assert [table for part in read for table in part] == each
    homes = [{paths[each.index(table)] for table in part} for part in read]
    assert sum(map(len, homes)) == len(set().union(*homes)), "tables of one path are in two parts"


@pytest.mark.cluster
def test_a_real_server_takes_configmaps_that_are_full(control_plane: ControlPlane) -> None:
    points = tuple(CurvePoint(cache_rows=7**row, hit_rate=row / 65) for row in range(1, 65))
    tables = tuple(
        TableTrace(table=f"t{number}", rows=9, lookups=1, unique_rows=1, accesses=1, curve=points)
        for number in range(500)
    )
    trace = Trace(global_batch_size=1, batches=1, tables=tables)

    parts = trace_maps("reuse", trace, [f"spec.model.tables[{i}]" for i in range(500)])
    applied = subprocess.run(
        [control_plane.kubectl, "--kubeconfig", control_plane.kubeconfig, "apply", "--server-side", "-f", "-"],
        input="---\n".join(part.manifest("default") for part in parts),
        text=True,
        check=False,
        capture_output=True,
    )

    assert len(parts) > 1
    assert applied.returncode == 0, applied.stderr
    assert applied.stdout.splitlines() == [f"configmap/{part.name} serverside-applied" for part in parts]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--out", "job.yaml"], ExitCode.USAGE, "job.yaml"),
        (["--out", "other.json"], ExitCode.USAGE, "other.json"),
        (["--out", "."], ExitCode.USAGE, "Is a directory"),
        (["--out", "absent/t.json"], ExitCode.USAGE, "absent"),
        (["--configmap", "Reuse_1"], ExitCode.USAGE, "'Reuse_1'"),
        (["--configmap", "reuse", "--out", "t.json"], ExitCode.USAGE, "--configmap"),
        (["--rate", "0"], ExitCode.USAGE, "--rate"),
        (["--rate", "2"], ExitCode.USAGE, "--rate"),
        (["--batches", "0"], ExitCode.USAGE, "--batches"),
        (["--set", "spec.data.format=parquet", "--data", "no.parquet"], ExitCode.NO_INPUT, "no.parquet"),
        (["--set", "spec.data.virtualShards=127"], ExitCode.BAD_CONFIG, "virtualShards"),
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
    monkeypatch.setitem(sys.modules, "dlrm_kernels.reuse", None)

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
    assert error.splitlines()[-1] == "interrupted, nothing was written"
    assert [path.name for path in Path.cwd().iterdir()] == ["job.yaml"]
