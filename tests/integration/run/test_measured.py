"""Tiers and step times as ``dlrmctl run`` shows them."""

from __future__ import annotations

from typing import Any

import pytest

from dlrm_api.run_report import Profile, TierReport
from dlrm_cli.report.collect import read_work_folder

pytestmark = pytest.mark.slow


def test_a_run_over_tiers_gives_its_counts_and_a_profile_of_every_rank(local: Any) -> None:
    document = local.write(trainer={"processesPerReplica": 2, "tierBudgets": {"scm": "1Gi"}})
    tables = document["spec"]["model"]["tables"]
    tables[1]["pin"] = {"tier": "scm"}
    local.write(model={"tables": tables}, trainer={"processesPerReplica": 2, "tierBudgets": {"scm": "1Gi"}})

    result = local.done("--profile")

    uses = [table for rank in TierReport.model_validate(result["tiers"]).ranks for table in rank.tables]
    assert [use.table for use in uses] == ["C2"]
    assert uses[0].lookups == result["samples"]
    assert uses[0].expected_hit_rate is not None
    profile = Profile.model_validate_json((local.workdir / "profile.json").read_text())
    steps = {each.rank: each.steps for each in profile.stages if each.stage == "step"}
    assert steps == {0: result["step"], 1: result["step"]}
    report = read_work_folder(local.workdir)
    assert report.state == "done"
    assert report.step == result["step"]
    assert {each.step for each in report.snapshots} >= {each["step"] for each in result["snapshots"]}
    assert not report.notes
