"""``dlrmctl runs list`` and ``dlrmctl wait``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlrm_api.errors import DLRMError
from dlrm_api.names import ExitCode
from dlrm_cli import app
from dlrm_cli.cluster.lifecycle import wait_progress


def test_runs_are_listed_with_their_state_and_folder(
    kept_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work = kept_run()
    (work.parent / "empty").mkdir()

    assert app.main(["runs", "list", str(work.parent)]) == ExitCode.DONE
    shown = capsys.readouterr().out
    assert app.main(["runs", "list", str(work.parent), "-o", "json"]) == ExitCode.DONE
    [run] = json.loads(capsys.readouterr().out)

    assert "kept" in shown
    assert str(work) in shown
    assert (run["name"], run["state"], run["step"], run["ne"], run["workdir"]) == ("kept", "done", 400, 0.86, str(work))


def test_a_damaged_run_is_named_and_the_others_are_listed(
    kept_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work = kept_run()
    (work.parent / "bad").mkdir()
    (work.parent / "bad/job.json").write_text("{")

    app.main(["runs", "list", str(work.parent), "-o", "json"])

    captured = capsys.readouterr()
    assert [each["name"] for each in json.loads(captured.out)] == ["kept"]
    assert "bad/job.json" in captured.err


def test_a_folder_without_runs_that_does_not_exist_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["runs", "list", str(tmp_path / "absent")]) == ExitCode.NO_INPUT
    assert "absent" in capsys.readouterr().err


def job(phase: str, generation: int = 1, observed: int = 1) -> dict[str, Any]:
    return {
        "metadata": {"name": "ads", "namespace": "prod", "generation": generation},
        "spec": {},
        "status": {"phase": phase, "observedGeneration": observed},
    }


@pytest.mark.parametrize(
    ("phase", "state", "done"),
    [
        ("Running", "Finished", False),
        ("Succeeded", "Finished", True),
        ("Running", "Running", True),
        ("Failed", "Failed", True),
        ("Suspended", "Suspended", True),
    ],
)
def test_a_wait_ends_at_the_phase_that_it_is_for(phase: str, state: str, done: bool) -> None:
    assert wait_progress(job(phase), state)[0] is done


@pytest.mark.parametrize(
    ("phase", "state"), [("Failed", "Finished"), ("Succeeded", "Running"), ("Failed", "Succeeded")]
)
def test_a_wait_fails_when_the_job_ends_in_another_way(phase: str, state: str) -> None:
    with pytest.raises(DLRMError, match=f"ads has {phase}"):
        wait_progress(job(phase), state)


def test_a_wait_does_not_take_the_phase_of_an_older_spec() -> None:
    assert not wait_progress(job("Succeeded", generation=2), "Finished")[0]
