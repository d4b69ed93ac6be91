"""Check reports of a run, during and at the end: real launchers and ranks with tables in levels."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dlrm_api.names import Env, ExitCode
from dlrm_api.run_report import Profile, TierReport
from dlrm_testing.trainer.gangs import Pod, job_document, small_job
from dlrm_testing.trainer.stacked import Shape, stacked_plan

pytestmark = pytest.mark.slow

SHAPE = Shape(tiers=("ddr", "ddr", "scm"), slots=40, middle=30)


def stacked_pod(folder: Path, *, samples: int) -> Pod:
    """Make a pod of two ranks that takes a profile."""
    data = {"format": "synthetic", "synthetic": {"samples": samples, "evalSamples": 500}}
    changes = {"data": data, "training": {"evalEverySteps": 20}}
    plan = stacked_plan(small_job(folder, 2, **changes), SHAPE).model_dump(mode="json")
    settings = {Env.PROFILE: "1", Env.TIER_DIR: str(folder / "tiers"), Env.HANDOFF_DIR: ""}
    return Pod(folder, job_document(folder, 2, **changes), plan, **settings)


def test_metrics_of_all_ranks_are_on_the_endpoint_and_in_both_reports(tmp_path: Path) -> None:
    pod = stacked_pod(tmp_path, samples=200_000)
    try:
        pod.start(checkpointer=False)
        pod.wait_for_step(40)
        with urllib.request.urlopen(f"http://127.0.0.1:{pod.port}/metrics", timeout=20) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        accesses = {
            (sample.labels["rank"], sample.labels["table"]): sample.value
            for family in families
            for sample in family.samples
            if sample.name == "dlrm_trainer_table_accesses_total"
        }
        assert pod.launcher is not None
        pod.launcher.terminate()
        assert pod.wait() == ExitCode.TERMINATED, pod.log()
    finally:
        pod.close()

    assert set(accesses) == {("0", "users"), ("1", "bags"), ("1", "items")}
    assert min(accesses.values()) > 0
    profile = Profile.model_validate_json((pod.work / "profile.json").read_text())
    assert {each.rank for each in profile.hit_rates} == {0, 1}
    assert len({(each.rank, each.stage) for each in profile.stages}) == len(profile.stages)


def test_the_result_says_how_every_rank_s_tables_used_their_tiers(tmp_path: Path) -> None:
    pod = stacked_pod(tmp_path, samples=4_000)
    try:
        assert pod.run(checkpointer=False) == ExitCode.DONE, pod.log()
    finally:
        pod.close()

    report = TierReport.model_validate(pod.result()["tiers"])
    assert [rank.rank for rank in report.ranks] == [0, 1]
    assert [table.table for rank in report.ranks for table in rank.tables] == ["users", "bags", "items"]
    for rank in report.ranks:
        assert rank.missing_lookups == 0
        assert [level.tier for level in rank.levels] == ["ddr", "scm"]
        assert {size.tier for size in rank.tiers} == {"ddr", "scm"}
        for table in rank.tables:
            assert 0 < table.hits < table.accesses <= table.lookups
            assert 0 < table.created_rows <= table.rows
    lookups = sum(table.lookups for rank in report.ranks for table in rank.tables if table.table == "users")
    assert lookups == 4_000
    stages = Profile.model_validate(json.loads((pod.work / "profile.json").read_text())).stages
    steps = {each.stage: each.steps for each in stages if each.rank == 1}
    assert steps["step"] == steps["forward"] == steps["exchange"] == steps["row update"] == 63
    assert steps["evaluation"] == 3  # after steps 20, 40 and 60
    assert steps["evaluation at the end"] == 1
    assert "cut" not in steps
