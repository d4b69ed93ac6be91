"""Plan a job of seconds that gives a trainer's loops what they are given in life; ``warm_trainer.py`` runs it."""

import sys
from pathlib import Path

import yaml

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_planner import plan_job

MEMORY_BYTES = 8 << 30
PROFILE = {
    "apiVersion": "dlrm.dev/v1alpha1",
    "kind": "HardwareProfile",
    "metadata": {"name": "any"},
    "spec": {"tiers": {"ddr": {"bytes": MEMORY_BYTES}}},
}


def main(example: Path, folder: Path) -> None:
    """Write job.json and plan.json."""
    document = yaml.safe_load(example.read_text())
    spec = document["spec"]
    spec["data"]["synthetic"] = {"samples": 8_192, "evalSamples": 1_024}
    spec["data"]["globalBatchSize"] = 256
    spec["checkpoint"] |= {"uri": "file:///tmp/warming/snapshots", "intervalSteps": 10}
    job = DLRMJob.model_validate(document)
    plan = plan_job(job.spec, HardwareProfile.model_validate(PROFILE))
    folder.mkdir()
    (folder / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
    (folder / "plan.json").write_text(plan.model_dump_json(by_alias=True))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
