"""Profiles that are refined from runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.plan import STEP_STAGES
from dlrm_planner import plan_job
from dlrm_planner.choose import read_problem
from dlrm_planner.fit import LOOPS, MAX_SCALE, TRAINING_STAGES, PastRun, Scaled, fit_profile, scale_profile
from dlrm_planner.rates import DEFAULT_LOOPS
from dlrm_planner.replan import read_solution

PROFILE = parse_profile(
    {
        "metadata": {"name": "node"},
        "spec": {
            "cpus": 2,
            "tiers": {
                "ddr": {"bytes": "64Gi"},
                "block": {"bytes": "64Gi", "readBytesPerSecond": 1e9, "readIops": 1e5, "rowProcessorSeconds": 3e-6},
            },
            "loops": [each.model_dump(mode="json", by_alias=True) for each in DEFAULT_LOOPS],
        },
    }
)


def make_job(
    tables: int, rows: int, dim: int, batch: int, ranks: int, layers: int, ddr: str | None, lookups: int = 4
) -> DLRMJobSpec:
    budgets = {"tierBudgets": {"ddr": ddr, "block": "32Gi"}} if ddr else {}
    model = {
        "tables": [{"name": f"t{i}", "rows": rows, "dim": dim, "maxLookups": lookups} for i in range(tables)],
        "denseFeatures": [f"d{i}" for i in range(13)],
        "bottomMlp": [layers, dim],
        "topMlp": [layers, layers, 1],
    }
    document = {
        "metadata": {"name": "job"},
        "spec": {
            "model": model,
            "data": {"format": "synthetic", "globalBatchSize": batch},
            "trainer": {"replicas": 1, "processesPerReplica": ranks, **budgets},
            "checkpoint": {"uri": "file:///snapshots"},
        },
    }
    return parse_job(document).spec


jobs = st.builds(
    make_job,
    tables=st.integers(2, 40),
    rows=st.sampled_from([10_000, 1_000_000]),
    dim=st.sampled_from([16, 64]),
    batch=st.sampled_from([512, 2_048, 8_192]),
    ranks=st.sampled_from([1, 2]),
    layers=st.sampled_from([64, 512]),
    ddr=st.sampled_from([None, "2Gi"]),
)
scales = st.floats(0.4, 2.5)


def run_of(spec: DLRMJobSpec, truth: HardwareProfile, name: str = "run") -> PastRun:
    """Return a run whose steps take what they would on a node with the loops of ``truth``."""
    plan = plan_job(spec, PROFILE)
    found = read_solution(read_problem(spec, truth, {}), plan)
    return PastRun(name=name, spec=spec, plan=plan, stage_seconds=found.timeline.stages_s, traces={})


def total(stages: Mapping[Any, float]) -> float:
    return sum(stages.values())


def times(stages: Mapping[Any, float]) -> dict[str, float]:
    """Return the seconds of work by stage, and of all waits: which thread a step waits for first tells of no loop."""
    return {"waits": stages["read"] + stages["tiers"], **{stage: stages[stage] for stage in TRAINING_STAGES}}


@settings(max_examples=6)
@given(st.lists(jobs, min_size=1, max_size=4))
def test_runs_as_predicted_change_nothing(specs: list[DLRMJobSpec]) -> None:
    fit = fit_profile(PROFILE, [run_of(spec, PROFILE) for spec in specs])

    assert fit.scales == {}
    assert fit.profile == PROFILE


@pytest.mark.slow
@settings(max_examples=6)
@given(st.lists(jobs, min_size=1, max_size=4), scales)
def test_a_node_that_is_slower_as_a_whole_is_found(specs: list[DLRMJobSpec], scale: float) -> None:
    ranks = {spec.world_size for spec in specs}
    truth = scale_profile(
        PROFILE, {Scaled(each, kind): scale for each in ranks for kind in LOOPS} | {Scaled(0, "block"): scale}
    )

    fit = fit_profile(PROFILE, [run_of(spec, truth) for spec in specs])

    for run in fit.runs:
        assert total(run.after) == pytest.approx(total(run.measured), rel=0.01)
    for kind, found in fit.scales.items():
        assert found == pytest.approx(scale, rel=0.05), kind


@settings(max_examples=6)
@given(jobs, st.dictionaries(st.sampled_from(["row updates", "lookups", "collectives", "readers"]), scales, min_size=1))
def test_stages_of_loops_of_other_speeds_are_predicted_after_it(spec: DLRMJobSpec, slower: dict[str, float]) -> None:
    truth = scale_profile(PROFILE, {Scaled(spec.world_size, kind): scale for kind, scale in slower.items()})

    (run,) = fit_profile(PROFILE, [run_of(spec, truth)]).runs

    before, after = (
        sum(abs(predicted[stage] - measured) for stage, measured in times(run.measured).items())
        for predicted in (times(run.before), times(run.after))
    )
    assert after <= max(0.3 * before, 0.03 * total(run.measured))


def test_runs_of_several_shapes_tell_loops_of_one_stage_apart() -> None:
    specs = [make_job(8, 10**6, 64, 8_192, 1, 64, None, 20), make_job(2, 10**4, 16, 8_192, 1, 512, None)]
    slower = {Scaled(1, "lookups"): 2.0, Scaled(1, "dense layers"): 0.5}
    truth = scale_profile(PROFILE, slower)

    fit = fit_profile(PROFILE, [run_of(spec, truth) for spec in specs])

    for kind, scale in slower.items():
        assert fit.scales[kind] == pytest.approx(scale, rel=0.15)
    assert all(scale == pytest.approx(1, abs=0.25) for kind, scale in fit.scales.items() if kind not in slower)


def test_a_disturbed_run_among_several_counts_little() -> None:
    spec = make_job(8, 10**6, 16, 2_048, 1, 64, None)
    truth = scale_profile(PROFILE, {Scaled(1, kind): 1.5 for kind in LOOPS})
    good = [run_of(spec, truth, f"good-{i}") for i in range(3)]
    disturbed = replace(good[0], name="disturbed", stage_seconds={k: 4 * s for k, s in good[0].stage_seconds.items()})

    fit = fit_profile(PROFILE, [*good, disturbed])

    assert total(fit.runs[0].after) == pytest.approx(total(fit.runs[0].measured), rel=0.05)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.lists(st.tuples(jobs, st.lists(st.floats(0, 1), min_size=6, max_size=6)), min_size=1, max_size=2))
def test_whatever_runs_measured_scales_are_bounded(measured: list[tuple[DLRMJobSpec, list[float]]]) -> None:
    runs = [
        PastRun(
            name=f"run-{i}",
            spec=spec,
            plan=plan_job(spec, PROFILE),
            stage_seconds={**dict(zip(STEP_STAGES, seconds, strict=True)), "compute": seconds[0] + 1e-3},
            traces={},
        )
        for i, (spec, seconds) in enumerate(measured)
    ]

    fit = fit_profile(PROFILE, runs)

    assert all(1 / MAX_SCALE <= scale <= MAX_SCALE for scale in fit.scales.values())
    assert parse_profile(fit.profile.model_dump(mode="json", by_alias=True, exclude_none=True)) == fit.profile


def test_runs_that_tell_nothing_of_the_profile_are_refused() -> None:
    one, several = (make_job(2, 10**4, 16, 512, ranks, 64, None) for ranks in (1, 3))
    replicas = one.model_copy(update={"trainer": one.trainer.model_copy(update={"replicas": 2})})
    bare = PROFILE.model_copy(update={"spec": PROFILE.spec.model_copy(update={"loops": ()})})
    rows = one.model_copy(update={"data": one.data.model_copy(update={"format": "parquet"})})
    loops = tuple(each.model_copy(update={"readers": each.readers[:1]}) for each in PROFILE.spec.loops)
    synthetic = PROFILE.model_copy(update={"spec": PROFILE.spec.model_copy(update={"loops": loops})})

    for profile, spec in ((PROFILE, several), (PROFILE, replicas), (bare, one), (synthetic, rows)):
        run = replace(run_of(one, PROFILE, "runs/other"), spec=spec)
        with pytest.raises(InvalidSpecError, match=r"spec\.loops" if profile is bare else "runs/other"):
            fit_profile(profile, [run])
