"""``dlrmctl profile fit``: refine a HardwareProfile from the stage times of runs on this kind of machine."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from rich.console import Group, RenderableType
from rich.text import Text

from dlrm_api.errors import BadDataError, InvalidSpecError, NoInputError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.plan import STEP_STAGES, Plan, StepStage, parse_plan
from dlrm_api.run_report import Profile
from dlrm_cli.documents import check_new_file, only_profile, write_new_file
from dlrm_cli.manifests import read_references
from dlrm_cli.run.workdir import WorkDir, read_environment
from dlrm_cli.views import print_view, titled_table
from dlrm_planner import FittedRun, PastRun, ProfileFit, fit_profile

MIN_STEPS = 50
"""Steps of a run below which its first ones, which load kernels and fill caches, are too large a part."""
CPUS = re.compile(r"(\d+) CPUs$")
Found = TypeVar("Found")


def fit_runs(folders: Sequence[Path], hardware: Path, out: Path, *, as_json: bool) -> None:
    """Write a profile with loops as fast as in these work directories, and print what it predicts of them.

    Raises:
        UsageError: ``hardware`` has no single profile, or ``out`` exists or cannot be written.
        NoInputError: a folder has no run with stage times.
        BadDataError: a file of a run is damaged, or the run is too short.
        InvalidSpecError: a run is of other hardware, or of a number of ranks that the profile has no loops for.
    """
    check_new_file(out)
    profile = only_profile(hardware)
    fit = fit_profile(profile, [read_run(folder, profile) for folder in folders])
    write_new_file(out, fitted_text(fit, folders))
    if as_json:
        print(json.dumps(fit_json(fit)))
    else:
        print_view(fit_view(fit))


def read_run(folder: Path, profile: HardwareProfile) -> PastRun:
    """Read a work directory of ``dlrmctl run --profile`` on a machine of this kind."""
    workdir = WorkDir(folder)
    job: DLRMJob = _read(workdir.job, lambda text: parse_job(json.loads(text)))
    plan: Plan = _read(workdir.plan, parse_plan)
    stages: Profile = _read(workdir.profile, Profile.model_validate_json)
    cpus = CPUS.search(read_environment(workdir).get("processor", ""))
    if profile.spec.cpus is not None and cpus is not None and float(cpus[1]) != profile.spec.cpus:
        raise InvalidSpecError(
            str(folder),
            f"it ran on {cpus[1]} CPUs, and HardwareProfile {profile.metadata.name} is of {profile.spec.cpus:g}: give "
            "the profile of its machine with --hardware",
        )
    seconds = step_stages(stages)
    steps = max((each.steps for each in stages.stages if each.stage == "step"), default=0)
    if steps < MIN_STEPS or sum(seconds.values()) <= 0:
        raise BadDataError(
            f"{workdir.profile}: expected at least {MIN_STEPS} steps of the last attempt, got {steps}: run it longer "
            "(spec.training.maxSteps), in a new --workdir"
        )
    return PastRun(name=str(folder), spec=job.spec, plan=plan, stage_seconds=seconds, traces=read_references(job.spec))


def _read(path: Path, parse: Callable[[bytes], Found]) -> Found:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise NoInputError(
            f"cannot read {path}: {error.strerror}; give a work directory of dlrmctl run --profile"
        ) from error
    except (ValueError, InvalidSpecError) as error:
        raise BadDataError(f"{path}: invalid: {error}; give a work directory of this version of dlrmctl") from error


def step_stages(profile: Profile) -> dict[StepStage, float]:
    """Return the median seconds of a step by stage of a prediction, of the rank that works longest."""
    found: dict[int, dict[StepStage, float]] = defaultdict(lambda: dict.fromkeys(STEP_STAGES, 0.0))
    steps = {each.rank: each.steps for each in profile.stages if each.stage == "step"}
    of_stage = {name: stage for stage, names in STEP_STAGES.items() for name in names}
    for each in profile.stages:
        if each.stage in of_stage and each.rank in steps:
            # Not every step has every stage.
            found[each.rank][of_stage[each.stage]] += each.median_seconds * each.steps / steps[each.rank]
    return max(found.values(), key=lambda stages: sum(stages.values()) - stages["exchange"], default={})


def fitted_text(fit: ProfileFit, folders: Sequence[Path]) -> str:
    """Return the profile as YAML, with a comment that says of what it was made."""
    spec = fit.profile.model_dump(mode="json", exclude_defaults=True)
    spec["spec"]["loops"] = _rounded(spec["spec"]["loops"])
    document = {"apiVersion": fit.profile.api_version, "kind": fit.profile.kind, **spec}
    head = f"# Fitted by dlrmctl profile fit to {len(folders)} runs: {', '.join(map(str, folders))}.\n"
    return head + yaml.safe_dump(document, sort_keys=False)


def _rounded(value: Any) -> Any:
    """Round to four digits: more would be noise."""
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def stage_rows(run: FittedRun) -> Mapping[str, tuple[float, float, float]]:
    """Return the measured and predicted seconds, before and after the fit, of each stage and of a step."""
    measured, before, after = ({**each, "step": sum(each.values())} for each in (run.measured, run.before, run.after))
    return {name: (measured.get(name, 0.0), before[name], after[name]) for name in (*STEP_STAGES, "step")}


def fit_json(fit: ProfileFit) -> dict[str, Any]:
    """Return a fit for ``-o json``."""
    names = ("measured_seconds", "predicted_seconds", "fitted_seconds")
    runs = [
        {
            "run": run.name,
            "stages": {stage: dict(zip(names, row, strict=True)) for stage, row in stage_rows(run).items()},
        }
        for run in fit.runs
    ]
    scales = [{"processes": of.processes or None, "loops": of.kind, "scale": scale} for of, scale in fit.scales.items()]
    return {"scales": scales, "runs": runs}


def fit_view(fit: ProfileFit) -> RenderableType:
    """Return each run's stages, and by what loops were multiplied."""
    parts: list[RenderableType] = []
    for run in fit.runs:
        columns = ("stage", "measured ms", "predicted ms", "error", "fitted ms", "error")
        table = titled_table(run.name, columns, words=("stage",))
        for stage, (measured, before, after) in stage_rows(run).items():
            errors = [f"{each / measured - 1:+.0%}" if measured else "" for each in (before, after)]
            shown = (f"{1e3 * measured:,.3f}", f"{1e3 * before:,.3f}", errors[0], f"{1e3 * after:,.3f}", errors[1])
            table.add_row(stage, *shown, end_section=stage == "other")
        parts.append(table)
    scales = titled_table("loops, by ranks of a node", ("loops", "ranks", "times"), words=("loops",))
    for of, scale in fit.scales.items():
        scales.add_row(of.kind, str(of.processes or ""), f"{scale:.3f}")
    parts.append(scales if fit.scales else Text("the runs took as long as predicted: nothing was scaled"))
    return Group(*parts)
