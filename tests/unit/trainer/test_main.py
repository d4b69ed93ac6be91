from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dlrm_api.names import Env, ExitCode
from dlrm_api.plan import plan_to_parts
from dlrm_api.progress import TerminationMessage
from dlrm_checkpointer.settings import read_job
from dlrm_testing.trainer.gangs import hand_plan, job_document, plan_document, small_job
from dlrm_trainer.__main__ import main, read_plan


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.json").write_text(json.dumps(job_document(tmp_path)))
    (tmp_path / "plan.json").write_text(json.dumps(plan_document(small_job(tmp_path))))
    (tmp_path / "broken.yaml").write_text("spec: [1, 2")
    (tmp_path / "other.json").write_text('{"spec": {}}')
    (tmp_path / "empty").mkdir()
    monkeypatch.setenv(Env.TERMINATION_LOG, str(tmp_path / "termination.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ("--plan {}/plan.json", ExitCode.USAGE, "--job"),
        ("--job {}/job.json --plan {}/plan.json --spam", ExitCode.USAGE, "--spam"),
        ("--job {}/absent.json --plan {}/plan.json", ExitCode.NO_INPUT, "absent.json"),
        ("--job {}/job.json --plan {}/absent.json", ExitCode.NO_INPUT, "absent.json"),
        ("--job {}/broken.yaml --plan {}/plan.json", ExitCode.BAD_DATA, "broken.yaml: neither JSON nor YAML"),
        ("--job {}/other.json --plan {}/plan.json", ExitCode.BAD_CONFIG, "this field is required"),
        ("--job {}/job.json --plan {}/other.json", ExitCode.BAD_CONFIG, "plan"),
        ("--job {}/job.json --plan {}/empty", ExitCode.BAD_CONFIG, "no part of the plan"),
    ],
)
def test_bad_arguments_and_files_end_with_a_termination_message(
    files: Path, capsys: pytest.CaptureFixture[str], arguments: str, code: ExitCode, named: str
) -> None:
    result = main(arguments.replace("{}", str(files)).split())

    message = TerminationMessage.decode((files / "termination.json").read_bytes())
    assert result == code
    assert message is not None
    assert (message.exit_code, named in message.message) == (code, True)
    assert capsys.readouterr().err == f"dlrm_trainer: error: {message.message}\n"


def test_an_environment_that_is_no_number_is_named(
    files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(Env.GRACE_S, "soon")

    code = main(["--job", str(files / "job.json"), "--plan", str(files / "plan.json")])

    assert code == ExitCode.USAGE
    assert "invalid DLRM_GRACE_S" in capsys.readouterr().err


def test_a_job_is_read_as_yaml_too(files: Path) -> None:
    (files / "job.yaml").write_text(yaml.safe_dump(job_document(files)))

    assert read_job(files / "job.yaml") == read_job(files / "job.json")


def test_a_plan_is_read_from_the_folder_of_its_parts(files: Path) -> None:
    plan = hand_plan(small_job(files))
    for name, body in plan_to_parts(plan).items():
        (files / "empty" / name).write_bytes(body)

    assert read_plan(files / "empty") == plan


@pytest.mark.slow
def test_bad_files_are_reported_before_torch_is_loaded(files: Path) -> None:
    program = (
        "import sys; from dlrm_trainer.__main__ import main; "
        f"code = main(['--job', '{files}/other.json', '--plan', '{files}/plan.json']); "
        "print(code, 'torch' in sys.modules)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)

    assert done.stdout.split() == ["78", "False"]


@pytest.mark.slow
def test_ranks_may_open_as_many_files_as_the_system_lets_them(files: Path) -> None:
    program = (
        "import resource; from dlrm_trainer.__main__ import main; "
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most // 2, most)); "
        f"main(['--job', '{files}/absent.json', '--plan', '{files}/plan.json']); "
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)

    assert done.stdout.split() == ["True"]
