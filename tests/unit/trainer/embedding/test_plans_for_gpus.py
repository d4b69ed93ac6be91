"""The trainer reads every plan for GPUs: levels of each kind, replicas, tables kept on the host."""

from typing import Any

import pytest

from dlrm_api.hardware import parse_profile
from dlrm_api.job import parse_job
from dlrm_planner import plan_job
from dlrm_trainer.embedding.placement import Part, place

TABLES: list[dict[str, Any]] = [
    {"name": "small", "rows": 1_000, "dim": 16, "pin": {"sharding": "table"}},
    {"name": "large", "rows": 10**8, "dim": 64},
    {"name": "replica", "rows": 100, "dim": 16, "pin": {"sharding": "data"}},
    {"name": "host", "rows": 1_000, "dim": 16, "pin": {"tier": "ddr"}},
    {"name": "stored", "rows": 10**6, "dim": 16, "pin": {"tier": "block"}},
    {"name": "whole", "rows": 10**6, "dim": 32, "columnBlock": 16, "pin": {"tier": "hbm"}},
]


@pytest.mark.parametrize("ddr", ["12Gi", "64Gi"])
def test_every_shard_of_a_plan_for_gpus_is_a_part_of_its_kind(ddr: str) -> None:
    hardware = {
        "devices": {"resource": "nvidia.com/gpu", "count": 2, "hbm": {"bytes": "4Gi"}},
        "tiers": {"ddr": {"bytes": ddr}, "block": {"bytes": "200Gi"}},
    }
    spec = {
        "model": {"tables": TABLES, "interaction": "dcn", "topMlp": [1]},
        "data": {"format": "synthetic"},
        "trainer": {"processesPerReplica": 2},
        "checkpoint": {"uri": "file:///snapshots"},
    }
    job = parse_job({"metadata": {"name": "job"}, "spec": spec})
    plan = plan_job(job.spec, parse_profile({"metadata": {"name": "gpus"}, "spec": hardware}))

    placement = place(job.spec.model, plan, plan.world_size)

    def tiers(part: Part) -> list[str]:
        return [level.tier for level in part.share.levels]

    found = {
        TABLES[part.table]["name"]: tiers(part)
        for rank in range(placement.world_size)
        for part in placement.parts_on(rank)
    }
    assert plan.device == "cuda"
    assert found == {
        "small": ["hbm"],
        "large": ["hbm", "ddr", "block"] if ddr == "12Gi" else ["hbm", "ddr"],
        "host": [],
        "stored": ["ddr", "block"],
        "whole": ["hbm"],
    }
    assert [TABLES[part.table]["name"] for part in placement.replicated] == ["replica"]
    assert placement.lookahead == plan.lookahead == 1
