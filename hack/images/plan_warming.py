"""Plan jobs of seconds that give a trainer's loops what they are given in life; ``warm_trainer.py`` runs them."""

import sys
from pathlib import Path
from typing import Any

import yaml

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_planner import plan_job

DIMS = (32, 64, 128)
"""Dims of rows whose loops an image holds, besides the example's."""
TIERS = ("scm", "block")
BYTES = 8 << 30
PROFILE = {
    "apiVersion": "dlrm.dev/v1alpha1",
    "kind": "HardwareProfile",
    "metadata": {"name": "any"},
    "spec": {"tiers": {tier: {"bytes": BYTES} for tier in ("ddr", *TIERS)}},
}


def of_seconds(example: Path) -> dict[str, Any]:
    """The example's manifest, made small."""
    document: dict[str, Any] = yaml.safe_load(example.read_text())
    spec = document["spec"]
    spec["data"]["synthetic"] = {"samples": 8_192, "evalSamples": 1_024}
    spec["data"]["globalBatchSize"] = 256
    spec["checkpoint"] |= {"uri": "file:///tmp/warming/snapshots", "intervalSteps": 10}
    return document


def of_one_rank(example: Path) -> dict[str, Any]:
    """The same for one rank, which compiles for all."""
    document = of_seconds(example)
    document["spec"]["trainer"] |= {"replicas": 1, "processesPerReplica": 1}
    return document


def with_dim(example: Path, dim: int) -> dict[str, Any]:
    """A job whose rows have this dim."""
    document = of_one_rank(example)
    model = document["spec"]["model"]
    for table in (*model["tables"], *(group["template"] for group in model["tableGroups"])):
        table["dim"] = dim
    model["bottomMlp"][-1] = dim
    return document


def with_tier(example: Path, tier: str) -> dict[str, Any]:
    """A job with a table below whose slots is this tier."""
    document = of_one_rank(example)
    document["spec"]["model"]["tables"][0]["pin"] = {"tier": tier}
    document["spec"]["trainer"]["tierBudgets"] = {tier: BYTES}
    return document


def main(example: Path, folder: Path) -> None:
    """Write a folder for each job, with job.json and plan.json."""
    jobs = {
        "gang": of_seconds(example),
        **{f"dim-{dim}": with_dim(example, dim) for dim in DIMS},
        **{tier: with_tier(example, tier) for tier in TIERS},
    }
    profile = HardwareProfile.model_validate(PROFILE)
    for name, document in jobs.items():
        job = DLRMJob.model_validate(document)
        place = folder / name
        place.mkdir(parents=True)
        (place / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
        (place / "plan.json").write_text(plan_job(job.spec, profile).model_dump_json(by_alias=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
