"""The command line itself: help, forms of output, one-line errors and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from dlrm_api.job import parse_job
from dlrm_api.names import ExitCode
from dlrm_api.plan import parse_plan
from dlrm_cli import app, manifests
from dlrm_cli.run.command import resume_hint

JOB = """
apiVersion: dlrm.dev/v1alpha1
kind: DLRMJob
metadata: {name: small}
spec:
  model: {tables: [{name: C1, rows: 1000, dim: 4}, {name: C2, rows: 10, dim: 4}]}
  data: {format: synthetic}
  trainer: {processesPerReplica: 2}
  checkpoint: {uri: "file:///tmp/small"}
---
apiVersion: dlrm.dev/v1alpha1
kind: HardwareProfile
metadata: {name: box}
spec: {tiers: {ddr: {bytes: 16Gi}}}
"""

DEVICES = "{resource: nvidia.com/gpu, count: 2, hbm: {bytes: 8Gi}}"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_help_loads_neither_torch_nor_boto3_nor_kubernetes() -> None:
    program = (
        "import sys; from dlrm_cli.app import main; code = main(['--help']); "
        "sys.exit(str({'torch', 'boto3', 'kubernetes', 'torchx', 'numpy'} & set(sys.modules) or '') or code)"
    )

    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert finished.returncode == 0, finished.stderr
    for command in ("validate", "plan", "render", "run", "trace", "snapshots", "get", "logs", "top"):
        assert command in finished.stdout


def test_help_shows_where_a_run_keeps_its_files() -> None:
    """In brackets it would be taken for markup."""
    finished = subprocess.run(
        [sys.executable, "-m", "dlrm_cli", "run", "--help"],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert "runs/<job>" in finished.stdout
    assert "<workdir>/tiers" in finished.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["plan", "JOB"], ["validate", "JOB"]])
def test_a_closed_stdout_is_not_a_failure(job: Path, arguments: list[str]) -> None:
    program = [sys.executable, "-m", "dlrm_cli.app", *(str(job) if each == "JOB" else each for each in arguments)]
    reading, writing = os.pipe()
    os.close(reading)

    finished = subprocess.run(program, stdout=writing, stderr=subprocess.PIPE, timeout=60)
    os.close(writing)

    assert (finished.returncode, finished.stderr) == (ExitCode.DONE, b"")


@pytest.mark.slow
def test_output_to_a_full_disk_is_reported(job: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        program = [sys.executable, "-m", "dlrm_cli.app", "plan", str(job)]
        finished = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)

    assert finished.returncode == ExitCode.DEVICE
    assert finished.stderr.startswith("dlrmctl: error: ")
    assert "No space left on device" in finished.stderr


def test_ctrl_c_while_the_program_loads_ends_it_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, "-m", "dlrm_cli", "--help"]

    finished = subprocess.run(
        program, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=60
    )

    assert (finished.returncode, finished.stdout, finished.stderr) == (130, "", "")


@pytest.mark.parametrize(
    ("started", "program"), [(".venv/bin/dlrmctl", ".venv/bin/dlrmctl"), ("/somewhere/dlrm_cli/__main__.py", "dlrmctl")]
)
def test_the_resume_hint_can_be_copied(monkeypatch: pytest.MonkeyPatch, started: str, program: str) -> None:
    monkeypatch.setattr(sys, "argv", [started, "run", "a job.yaml"])
    monkeypatch.setenv("PATH", "/nowhere")

    assert resume_hint(7) == f"stopped; the snapshot of step 7 is committed; to resume: {program} run 'a job.yaml'"


def test_the_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["--version"])

    assert code == ExitCode.DONE
    assert capsys.readouterr().out == f"dlrmctl {version('dlrm-operator')}\n"


def test_validate_says_what_each_document_is(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["validate", str(job)])

    printed = capsys.readouterr()
    assert code == ExitCode.DONE
    assert "DLRMJob small is valid: 2 tables, 1,010 rows" in printed.out
    assert "HardwareProfile box is valid" in printed.out


def test_validate_names_the_sizes_that_the_plan_chooses_from(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = "trainer: {objective: {minReplicas: 3, maxReplicas: 5}, "
    job.write_text(JOB.replace("trainer: {", chosen))

    code = app.main(["validate", str(job)])

    assert code == ExitCode.DONE
    assert "world size 6 to 10, chosen by the plan" in capsys.readouterr().out


def test_validate_continues_after_a_bad_document_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(f"kind: Pod\n---\n{JOB}\n---\nkind: DLRMJob\nmetadata: {{name: bad}}\n")

    code = app.main(["validate", str(path)])

    printed = capsys.readouterr()
    assert code == ExitCode.BAD_CONFIG
    assert "DLRMJob small is valid" in printed.out
    assert [line.split(": ", 3)[2:3] for line in printed.err.splitlines()] == [[str(path)], [str(path)]]


def test_a_plan_as_json_is_the_plan(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["plan", str(job), "-o", "json"])

    plan = parse_plan(capsys.readouterr().out)
    assert code == ExitCode.DONE
    assert plan.world_size == 2
    assert [table.name for table in plan.tables] == ["C1", "C2"]


def test_advised_dims_are_a_manifest_to_merge(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = "[{name: C1, rows: 1000, dim: 16, pooling: mean}, {name: C2, rows: 100000, dim: 16, project: true}]"
    arguments = ["plan", str(job), "--set", f"spec.model.tables={tables}", "--advise-dims", "--bytes", "3M"]

    app.main([*arguments, "-o", "json"])
    advice = json.loads(capsys.readouterr().out)
    app.main(arguments)
    table, manifest = capsys.readouterr().out.split("spec:")

    assert advice["bytes"] <= 3_000_000 < advice["declared_bytes"]
    assert yaml.safe_load("spec:" + manifest) == advice["manifest"]
    first, second = advice["manifest"]["spec"]["model"]["tables"]
    assert first == {"name": "C1", "rows": 1000, "dim": 16, "pooling": "mean"}
    assert second["dim"] < 16
    assert second["project"] is True
    assert "C2" in table


def test_a_plan_as_a_table_shows_ranks_tables_and_reasons(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["plan", str(job), "--hardware", str(job), "--set", "spec.trainer.hardware=box"])

    shown = capsys.readouterr().out
    assert code == ExitCode.DONE
    for words in ("2 ranks on 1 pods", "C1", "1,000", "- 2 ranks"):
        assert words in shown


def test_render_gives_the_same_objects_as_yaml_and_as_a_list_for_kubectl(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app.main(["render", str(job), "--set", "spec.trainer.replicas=2"])
    documents = list(yaml.safe_load_all(capsys.readouterr().out))
    code = app.main(["render", str(job), "--set", "spec.trainer.replicas=2", "-o", "json"])
    listed = json.loads(capsys.readouterr().out)

    kinds = [document["kind"] for document in documents]
    assert code == ExitCode.DONE
    assert kinds.count("Pod") == 2
    assert {"ConfigMap", "Service"} <= set(kinds)
    assert (listed["apiVersion"], listed["kind"]) == ("v1", "List")
    assert [item["metadata"]["name"] for item in listed["items"]] == [one["metadata"]["name"] for one in documents]


def test_render_warns_of_snapshots_that_go_with_their_pod(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = app.main(["render", str(job)])
    warned = capsys.readouterr().err
    mount = "spec.trainer.podTemplate.container={volumeMounts: [{name: disk, mountPath: /tmp/small}]}"
    app.main(["render", str(job), "--set", mount])

    assert code == ExitCode.DONE
    assert warned.startswith("dlrmctl: warning: spec.checkpoint.uri: no volume is mounted at /tmp/small, so ")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["validate", "render"])
def test_pod_additions_that_operators_refuse_are_warnings(
    command: str, job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = yaml.safe_load(job.read_text().split("---")[0])
    document["spec"]["trainer"] = {"podTemplate": {"container": {"securityContext": {"privileged": True}}}}
    document["spec"]["scheduling"] = {"priorityClass": "system-node-critical"}
    (tmp_path / "widening.yaml").write_text(yaml.safe_dump(document))

    code = app.main([command, str(tmp_path / "widening.yaml")])

    said, warned = capsys.readouterr(), "dlrmctl: warning: spec."
    assert code == ExitCode.DONE
    assert f"{warned}trainer.podTemplate.container.securityContext.privileged: " in said.err
    assert f"{warned}scheduling.priorityClass: " in said.err
    assert command == "validate" or "privileged: true" in said.out


def test_render_warns_of_a_profile_that_the_operator_would_not_use(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "dlrmctl: warning: spec.trainer.hardware"
    app.main(["render", str(job), "--hardware", str(job)])
    unnamed = capsys.readouterr().err
    app.main(["render", str(job), "--hardware", str(job), "--set", "spec.trainer.hardware=box"])

    assert words in unnamed
    assert "HardwareProfile box" in unnamed
    assert words not in capsys.readouterr().err


def test_planned_replicas_are_shown_with_the_reason_and_rendered(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--set", "spec.trainer.objective={minReplicas: 3, maxReplicas: 5}"]
    app.main(["plan", str(job), *chosen])
    shown = capsys.readouterr().out
    app.main(["render", str(job), *chosen])
    kinds = [document["kind"] for document in yaml.safe_load_all(capsys.readouterr().out)]

    assert "6 ranks on 3 pods" in shown
    assert "- trainer.objective: holding all tables: 3 replicas" in shown
    assert kinds.count("Pod") == 3


def test_the_cheapest_of_several_hardware_files_is_planned_and_rendered(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = list[str]()
    for name, price in (("dear", 5), ("cheap", 3)):
        path = tmp_path / f"{name}.yaml"
        body = f"metadata: {{name: {name}, labels: {{zone: a}}}}\nspec: {{pricePerHour: {price}, runtimeClass: {name}, "
        path.write_text(
            f"apiVersion: dlrm.dev/v1alpha1\nkind: HardwareProfile\n{body}tiers: {{ddr: {{bytes: 16Gi}}}}}}\n"
        )
        hardware += ["--hardware", str(path)]
    chosen = ["--set", "spec.trainer={objective: {maxReplicas: 2}, hardwareSelector: {zone: a}}"]

    app.main(["plan", str(job), *hardware, *chosen])
    shown = capsys.readouterr().out
    app.main(["render", str(job), *hardware, *chosen])
    rendered = capsys.readouterr()

    assert "1 replica of cheap (3.00 per hour)" in shown
    assert "costs 2.00 more per hour" in shown
    (pod,) = (each for each in yaml.safe_load_all(rendered.out) if each["kind"] == "Pod")
    assert pod["spec"]["runtimeClassName"] == "cheap"
    assert "spec.trainer.hardware" not in rendered.err


def test_a_job_survives_its_way_through_the_work_directory(job: Path) -> None:
    read, _ = manifests.read_job_and_profiles(job, [], ["spec.checkpoint.interval=90s", "spec.training.seed=3"])

    again = parse_job(json.loads(read.model_dump_json(exclude_none=True)))

    assert again == read


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["run"], ExitCode.USAGE, "Missing argument"),
        (["walk"], ExitCode.USAGE, "No such command"),
        (["plan", "JOB", "--fast"], ExitCode.USAGE, "No such option"),
        (["plan", "JOB", "--advise-dims"], ExitCode.USAGE, "--bytes"),
        (["plan", "JOB", "--advise-dims", "--bytes", "1Gi", "--hardware", "JOB"], ExitCode.USAGE, "--hardware"),
        (["plan", "JOB", "--bytes", "1Gi"], ExitCode.USAGE, "--advise-dims"),
        (["plan", "JOB", "--advise-dims", "--bytes", "1 GB"], ExitCode.USAGE, "--bytes"),
        (["plan", "JOB", "--advise-dims", "--bytes", "1"], ExitCode.BAD_CONFIG, "spec.model"),
        (["plan", "JOB", "-o", "xml"], ExitCode.USAGE, "'-o': 'xml' is not one of 'table', 'json'"),
        (["snapshots", "prune", "file:///", "--keep-every", "5"], ExitCode.USAGE, "--keep-every"),
        (["snapshots", "prune", "file:///", "--keep-every", "0s"], ExitCode.USAGE, "--keep-every"),
        (["logs", "job", "--since", "1 h"], ExitCode.USAGE, "--since"),
        (["suspend", "job", "--wait", "--timeout", "9"], ExitCode.USAGE, "--timeout"),
        (["plan", "JOB", "--hardware", "absent.yaml"], ExitCode.NO_INPUT, "absent.yaml"),
        (["plan", "JOB", "--set", "spec.trainer.hardware=other"], ExitCode.USAGE, "other"),
        (["snapshots", "list", "ftp://host/x"], ExitCode.USAGE, "ftp://host/x"),
        (["snapshots", "list", "/no/such/store"], ExitCode.NO_INPUT, "/no/such/store"),
        (["snapshots", "list", "file:///x?y"], ExitCode.USAGE, "file:///x?y"),
        (["snapshots", "list", "s3://b", "--endpoint", "minio:9000"], ExitCode.USAGE, "minio:9000"),
        (["snapshots", "list", "s3://b", "--ca-file", "absent.pem"], ExitCode.NO_INPUT, "absent.pem"),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    job: Path, arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    got = app.main([str(job) if argument == "JOB" else argument for argument in arguments])

    printed = capsys.readouterr()
    assert got == code
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert printed.err.startswith("dlrmctl: error: ")
    assert words in printed.err


ON_SNAPSHOTS = [
    ["list"],
    ["show"],
    ["verify"],
    ["prune", "--dry-run"],
    ["restore", "--to", "out"],
    ["export", "--to", "out"],
    ["diff", "1", "2"],
    ["follow", "--once", "--to", "out"],
]


@pytest.mark.parametrize("command", ON_SNAPSHOTS, ids=[command[0] for command in ON_SNAPSHOTS])
@pytest.mark.parametrize("place", ["mistyped", "job.yaml"], ids=["absent", "file"])
def test_a_missing_directory_of_snapshots_is_named(
    job: Path, command: list[str], place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(job.parent)
    name, *options = command

    got = app.main(["snapshots", name, (job.parent / place).as_uri(), *options])

    printed = capsys.readouterr()
    assert got == ExitCode.NO_INPUT
    assert printed.out == ""
    assert printed.err.startswith("dlrmctl: error: ")
    assert str(job.parent / place) in printed.err
    assert [path.name for path in job.parent.iterdir()] == ["job.yaml"]


def test_an_empty_folder_of_snapshots_is_one_without_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = app.main(["snapshots", "list", tmp_path.as_uri()])
    words = capsys.readouterr().out
    shown = app.main(["snapshots", "show", tmp_path.as_uri()])

    assert (listed, words) == (ExitCode.DONE, "no committed snapshots\n")
    assert shown == ExitCode.NO_INPUT


def test_a_bug_is_reported_with_its_log(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("seven")

    monkeypatch.setattr(manifests, "print_plan", broken)

    code = app.main(["plan", str(job)])

    line = capsys.readouterr().err
    log = Path(line.split("; see ")[1].strip())
    assert code == ExitCode.INTERNAL
    assert "this is a bug: ZeroDivisionError: seven" in line
    assert "Traceback" not in line
    assert "Traceback" in log.read_text()
    log.unlink()


SMALL_FILES = """
apiVersion: dlrm.dev/v1alpha1
kind: DLRMJob
metadata: {name: small-files}
spec:
  model: {tables: [{name: C1, rows: 10, dim: 4}], interaction: dcn}
  data: {format: parquet, train: {uris: [FOLDER]}}
  checkpoint: {uri: file:///snapshots}
"""


def test_a_plan_counts_the_reads_of_listed_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        columns = {"label": [0, 1] * 50, "C1": [*range(10)] * 10}
        pq.write_table(pa.table(columns), tmp_path / f"{number}.parquet", row_group_size=50)
    path = tmp_path / "job.yaml"
    path.write_text(SMALL_FILES.replace("FOLDER", str(tmp_path)))

    code = app.main(["plan", str(path), "--list-data", "-o", "json"])

    reasons = json.loads(capsys.readouterr().out)["reasons"]
    assert code == ExitCode.DONE
    assert any(reason.startswith("3 data files of 300 rows, 3.0 reads each") for reason in reasons)


LARGE = """
apiVersion: dlrm.dev/v1alpha1
kind: DLRMJob
metadata: {name: large}
spec:
  model: {tables: [{name: C1, rows: 10000000, dim: 64}, {name: C2, rows: 10, dim: 64}]}
  data: {format: synthetic}
  trainer: {tierBudgets: {ddr: 1Gi, block: 10Gi}}
  checkpoint: {uri: "file:///tmp/large"}
"""


def test_a_plan_as_a_table_shows_what_each_rank_holds_of_a_split_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [
        {"name": "C1", "rows": 1_000_000, "dim": 64, "pin": {"sharding": "row"}},
        {"name": "C2", "rows": 1_000, "dim": 64, "columnBlock": 16, "pin": {"sharding": "column", "ranks": [0, 1]}},
        {"name": "C3", "rows": 10, "dim": 64},
    ]
    large = yaml.safe_load(LARGE)
    large["spec"] |= {"model": {"tables": tables}, "trainer": {"replicas": 4}}
    path = tmp_path / "split.yaml"
    path.write_text(yaml.safe_dump(large))

    code = app.main(["plan", str(path)])

    shown = capsys.readouterr().out
    assert code == ExitCode.DONE
    for part in ("0: rows 0 to 249,999", "3: rows 750,000 to 999,999", "0: columns 0 to 31", "1: columns 32 to 63"):
        assert part in shown
    assert "ddr: all, 260.0 MB" in shown
    assert "ddr: all, 272.0 kB" in shown  # a row state for each block
    assert "- table C1 is split by rows over ranks 0 to 3: as pinned" in shown


def test_a_plan_as_a_table_shows_the_levels_of_each_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(LARGE)

    code = app.main(["plan", str(path)])

    shown = capsys.readouterr().out
    levels = parse_plan(plan_of(path, capsys)).tables[0].shards[0].tiers.levels
    assert code == ExitCode.DONE
    assert f"ddr (lru): {levels[0].rows:,} rows, " in shown
    assert f"block: {levels[1].rows:,} rows, " in shown
    assert f"hit rate {levels[0].expected_hit_rate:.1%}" in shown
    assert "ddr: all, 2.6 kB" in shown
    assert "block bytes" in shown


def test_a_plan_for_gpus_shows_what_lies_in_their_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpus.yaml"
    path.write_text(JOB.replace("ddr: {bytes: 16Gi}}", "ddr: {bytes: 16Gi}}, devices: " + DEVICES))
    pins = [f"--set=spec.model.tables[{i}].pin.sharding={how}" for i, how in enumerate(("table", "data"))]

    code = app.main(["plan", str(path), "--set", "spec.trainer.hardware=box", *pins])

    shown = capsys.readouterr().out
    assert code == ExitCode.DONE
    assert "hbm bytes" in shown
    assert "hbm: all, 20.0 kB" in shown
    assert "hbm: all, 200 B" in shown
    assert "ddr:" not in shown


def plan_of(path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert app.main(["plan", str(path), "-o", "json", *more]) == ExitCode.DONE
    return capsys.readouterr().out


def test_a_plan_follows_the_trace_that_a_table_refers_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, trace = tmp_path / "large.yaml", tmp_path / "a trace.json"
    curve = [{"cacheRows": 1_000, "hitRate": 0.125}]
    table = {"table": "C1", "rows": 10**7, "lookups": 10**6, "uniqueRows": 10**6, "accesses": 10**6, "curve": curve}
    trace.write_text(json.dumps({"globalBatchSize": 2_048, "batches": 500, "tables": [table]}))
    path.write_text(LARGE)
    reference = f"spec.model.tables[0].distribution.reference={trace.as_uri()}"

    plan = parse_plan(plan_of(path, capsys, "--set", reference))

    assert plan.tables[0].shards[0].tiers.levels[0].expected_hit_rate == 0.125


@pytest.mark.parametrize(
    ("reference", "says", "code"),
    [
        ("file:///nowhere/trace.json", "/nowhere/trace.json", ExitCode.NO_INPUT),
        ("configmap:reuse", "configmap:reuse", ExitCode.BAD_CONFIG),
    ],
)
@pytest.mark.parametrize("command", ["plan", "render", "run"])
def test_a_missing_trace_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, reference: str, says: str, code: ExitCode
) -> None:
    path = tmp_path / "large.yaml"
    path.write_text(LARGE.replace("file:///tmp/large", (tmp_path / "snapshots").as_uri()))

    ended = app.main([command, str(path), "--set", f"spec.model.tables[0].distribution.reference={reference}"])

    assert ended == code
    error = capsys.readouterr().err
    assert "spec.model.tables[0].distribution.reference: " in error
    assert says in error


def test_validate_reads_trace_files_but_no_config_maps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "large.yaml"

    def validated(reference: str) -> int:
        path.write_text(LARGE.replace("dim: 64}, {", f'dim: 64, distribution: {{reference: "{reference}"}}}}, {{'))
        return app.main(["validate", str(path)])

    assert validated("configmap:reuse") == ExitCode.DONE
    assert validated("file:///nowhere/trace.json") == ExitCode.NO_INPUT
    assert "/nowhere/trace.json: No such file" in capsys.readouterr().err
