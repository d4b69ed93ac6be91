"""Plans that are read back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_planner import plan_job
from dlrm_planner.choose import read_problem
from dlrm_planner.rates import DEFAULT_LOOPS
from dlrm_planner.replan import read_solution
from dlrm_planner.write import write_plan

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
TABLES: list[dict[str, Any]] = [
    {"name": "small", "rows": 1_000, "dim": 16, "pin": {"sharding": "data"}},
    {"name": "whole", "rows": 100_000, "dim": 32},
    {"name": "ids", "rows": 200_000, "dim": 16, "embedding": {"hash": "unique"}},
    {"name": "rows", "rows": 20_000_001, "dim": 64, "pin": {"sharding": "row"}},
    {"name": "columns", "rows": 5_000_000, "dim": 64, "columnBlock": 32, "pin": {"sharding": "column"}},
]
LOOPS = [each.model_dump(mode="json", by_alias=True) for each in DEFAULT_LOOPS]
BLOCK = {"bytes": "100Gi", "hostPath": "/x", "readBytesPerSecond": 1e9}


def pool(make_profile: MakeProfile, ddr: str) -> HardwareProfile:
    tiers = {"ddr": {"bytes": ddr, "readBytesPerSecond": 1e10}, "block": BLOCK}
    return make_profile(ddr, cpus=4, tiers=tiers, loops=LOOPS, network={"interNodeBytesPerSecond": 1e9})


@pytest.mark.parametrize("ddr", ["32Gi", "5Gi", "3Gi"])
def test_a_plan_that_is_read_back_predicts_the_same(make_spec: MakeSpec, make_profile: MakeProfile, ddr: str) -> None:
    spec, profile = make_spec(TABLES, replicas=2), pool(make_profile, ddr)
    plan = plan_job(spec, profile)

    found = read_solution(read_problem(spec, profile, {}), plan)

    again = write_plan(found)
    assert again.tables == plan.tables
    assert again.predicted.step_seconds == pytest.approx(plan.predicted.step_seconds)
    assert again.predicted.stage_seconds == pytest.approx(plan.predicted.stage_seconds)
    assert again.predicted.hit_rates == plan.predicted.hit_rates


def test_a_plan_of_other_tables_is_refused(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    profile = pool(make_profile, "32Gi")
    plan = plan_job(make_spec(TABLES, replicas=2), profile)

    for other in (make_spec(TABLES[:3], replicas=2), make_spec(TABLES, replicas=1)):
        with pytest.raises(InvalidSpecError):
            read_solution(read_problem(other, profile, {}), plan)
