"""Jobs and hardware to plan for."""

from collections.abc import Callable
from typing import Any

import pytest

from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec, parse_job

Table = dict[str, Any]
MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]


def build_spec(tables: list[Table], *, batch: int = 2_048, **trainer: Any) -> DLRMJobSpec:
    document = {
        "metadata": {"name": "job"},
        "spec": {
            "model": {"tables": tables, "interaction": "dcn", "crossLayers": 1, "crossRank": 1, "topMlp": [1]},
            "data": {"format": "synthetic", "globalBatchSize": batch},
            "trainer": trainer,
            "checkpoint": {"uri": "file:///snapshots"},
        },
    }
    return parse_job(document).spec


def build_profile(ddr: Any, **spec: Any) -> HardwareProfile:
    tier = ddr if isinstance(ddr, dict) else {"bytes": ddr}
    return parse_profile({"metadata": {"name": "big"}, "spec": {"tiers": {"ddr": tier}, **spec}})


@pytest.fixture(scope="session")
def make_spec() -> MakeSpec:
    return build_spec


@pytest.fixture(scope="session")
def make_profile() -> MakeProfile:
    return build_profile
