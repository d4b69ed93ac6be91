"""``dlrmctl profile fit`` on work directories of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import parse_job
from dlrm_api.names import ExitCode
from dlrm_api.plan import STEP_STAGES
from dlrm_api.run_report import Profile, StageTimes
from dlrm_cli.app import main
from dlrm_cli.run.workdir import WorkDir
from dlrm_planner import plan_job
from dlrm_planner.rates import DEFAULT_LOOPS

JOB = parse_job(
    {
        "metadata": {"name": "job"},
        "spec": {
            "model": {"tables": [{"name": "t", "rows": 1_000, "dim": 16}], "interaction": "dcn", "topMlp": [16, 1]},
            "data": {"format": "synthetic", "globalBatchSize": 1_024},
            "trainer": {"replicas": 1},
            "checkpoint": {"uri": "file:///snapshots"},
        },
    }
)
NODE = {
    "apiVersion": "dlrm.dev/v1alpha1",
    "kind": "HardwareProfile",
    "metadata": {"name": "node", "labels": {"pool": "a"}},
    "spec": {
        "cpus": 2,
        "tiers": {"ddr": {"bytes": 2**34}},
        "loops": [each.model_dump(mode="json", exclude_defaults=True) for each in DEFAULT_LOOPS],
    },
}


@pytest.fixture
def node(tmp_path: Path) -> Path:
    path = tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump(NODE))
    return path


def write_run(root: Path, times: float, *, steps: int = 100, cpus: int = 2) -> Path:
    """Write the files of a run whose stages took so many times their predictions."""
    workdir, plan = WorkDir(root), plan_job(JOB.spec, parse_profile(NODE))
    taken = {STEP_STAGES[stage][0]: times * seconds for stage, seconds in plan.predicted.stage_seconds.items()}  # type: ignore[index]
    stages = [
        StageTimes(rank=0, stage=name, steps=steps, mean_seconds=s, median_seconds=s, p99_seconds=s, longest_seconds=s)
        for name, s in (*taken.items(), ("cut", 5.0), ("step", sum(taken.values())))
    ]
    root.mkdir()
    workdir.job.write_text(JOB.model_dump_json(exclude_none=True))
    workdir.plan.write_text(plan.model_dump_json())
    workdir.profile.write_text(Profile(stages=tuple(stages)).model_dump_json())
    workdir.environment.write_text(json.dumps({"processor": f"x86_64, {cpus} CPUs"}))
    return root


def read_step(path: Path) -> float:
    profile: HardwareProfile = parse_profile(yaml.safe_load(path.read_text()))
    step_s = plan_job(JOB.spec, profile).predicted.step_seconds
    assert step_s is not None
    return step_s


def test_a_fitted_profile_predicts_what_a_run_took(
    tmp_path: Path, node: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = write_run(tmp_path / "run", 1.5), tmp_path / "fitted.yaml"

    code = main(["profile", "fit", str(run), "--hardware", str(node), "--out", str(out), "-o", "json"])

    (shown,) = json.loads(capsys.readouterr().out)["runs"]
    step = shown["stages"]["step"]
    assert code == ExitCode.DONE
    assert read_step(out) == pytest.approx(1.5 * read_step(node), rel=0.01)
    assert step["measured_seconds"] == pytest.approx(1.5 * step["predicted_seconds"])
    assert step["fitted_seconds"] == pytest.approx(step["measured_seconds"], rel=0.01)
    assert yaml.safe_load(out.read_text())["metadata"] == NODE["metadata"]


def test_stages_are_shown_for_people(tmp_path: Path, node: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(write_run(tmp_path / name, 2.0)) for name in ("one", "two")]

    assert main(["profile", "fit", *runs, "--hardware", str(node), "--out", str(tmp_path / "fitted.yaml")]) == 0

    shown = capsys.readouterr().out
    assert all(word in shown for word in ("compute", "exchange", "step", "interpreted code"))


@pytest.mark.parametrize(
    ("change", "code", "named"),
    [
        ({"steps": 20}, ExitCode.BAD_DATA, "maxSteps"),
        ({"cpus": 64}, ExitCode.BAD_CONFIG, "64 CPUs"),
        (None, ExitCode.NO_INPUT, "--profile"),
    ],
    ids=["short", "other-machine", "without-stages"],
)
def test_runs_that_tell_nothing_are_refused(
    tmp_path: Path,
    node: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, int] | None,
    code: ExitCode,
    named: str,
) -> None:
    run, out = write_run(tmp_path / "run", 1.5, **(change or {})), tmp_path / "fitted.yaml"
    if change is None:
        WorkDir(run).profile.unlink()

    assert main(["profile", "fit", str(run), "--hardware", str(node), "--out", str(out)]) == code

    message = capsys.readouterr().err
    assert str(run) in message
    assert named in message
    assert not out.exists()
