"""Plan jobs of seconds that give a trainer's loops what they are given in life; ``warm_trainer.py`` runs them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import yaml

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJob
from dlrm_planner import plan_job

DIMS = (16, 32, 64, 128)
"""Dims of rows whose loops an image holds."""
SAMPLES, EPOCHS = 2_048, 4
"""Of files; evaluation has as many."""
BATCH, INTERVAL_STEPS = 256, 10
BAG = 4
"""Ids in the bags of a feature that has several."""
TIERS = ("scm", "block")
BYTES = 8 << 30
FILES = {"criteo-tsv": "samples.tsv", "parquet": "samples.parquet"}
PROFILE = {
    "apiVersion": "dlrm.dev/v1alpha1",
    "kind": "HardwareProfile",
    "metadata": {"name": "any"},
    "spec": {"tiers": {tier: {"bytes": BYTES} for tier in ("ddr", *TIERS)}},
}


def of_seconds(example: Path) -> dict[str, Any]:
    """Return an example's manifest, made small."""
    document: dict[str, Any] = yaml.safe_load(example.read_text())
    spec = document["spec"]
    spec["data"]["globalBatchSize"] = BATCH
    spec["checkpoint"] |= {"uri": "file:///tmp/warming/snapshots", "intervalSteps": INTERVAL_STEPS}
    if spec["data"]["format"] == "synthetic":
        spec["data"]["synthetic"] = {"samples": EPOCHS * SAMPLES, "evalSamples": SAMPLES}
    return document


def of_one_rank(example: Path) -> dict[str, Any]:
    """Return the same for one rank, which compiles for all."""
    document = of_seconds(example)
    document["spec"]["trainer"] |= {"replicas": 1, "processesPerReplica": 1}
    return document


def with_tier(example: Path, tier: str) -> dict[str, Any]:
    """Return a job with a table whose rows below the slots are in this tier."""
    document = of_one_rank(example)
    document["spec"]["model"]["tables"][0]["pin"] = {"tier": tier}
    document["spec"]["trainer"]["tierBudgets"] = {tier: BYTES}
    return document


def with_file(example: Path, format_: str, dim: int, bag: int = 1) -> dict[str, Any]:
    """Return a job with as many features as Criteo's that reads a file; the first feature's bags are this large."""
    document = of_one_rank(example)
    model, data = document["spec"]["model"], document["spec"]["data"]
    for table in model["tables"]:
        table["dim"] = dim
    model["tables"][0] |= {"maxLookups": bag}
    model["bottomMlp"][-1] = dim
    data |= {
        "format": format_,
        "epochs": EPOCHS,
        "train": {"uris": [FILES[format_]]},
        "eval": {"uris": [FILES[format_]]},
    }
    return document


def write_file(document: dict[str, Any], folder: Path) -> None:
    """Write what a job of ``with_file`` reads; Parquet's numbers are of other types where there are bags."""
    data, tables = document["spec"]["data"], document["spec"]["model"]["tables"]
    widths = [table.get("maxLookups", 1) for table in tables]
    is_wide = data["format"] == "parquet" and max(widths) == 1
    dense_type, id_type = (np.float32, np.int64) if is_wide else (np.int64, np.uint32)
    random = np.random.default_rng(0)
    columns: dict[str, Any] = {"label": pa.array(random.integers(0, 2, SAMPLES, np.int8))}
    for name in document["spec"]["model"]["denseFeatures"]:
        columns[name] = pa.array(random.integers(0, 100, SAMPLES).astype(dense_type), mask=random.random(SAMPLES) < 0.1)
    for table, width in zip(tables, widths, strict=True):
        ids = random.integers(0, 2**32, (SAMPLES, width)).astype(id_type)
        columns[table["name"]] = pa.array(ids[:, 0] if width == 1 else list(ids))
    path = folder / FILES[data["format"]]
    if data["format"] == "parquet":
        pq.write_table(pa.table(columns), path)
        return
    for table in tables:
        columns[table["name"]] = pa.array([f"{each:08x}" for each in columns[table["name"]].to_pylist()])
    options = pa.csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    pa.csv.write_csv(pa.table(columns), path, options)


def main(quickstart: Path, criteo: Path, folder: Path) -> None:
    """Write a folder for each job, with job.json, plan.json and the file that it reads."""
    jobs = {
        "gang": of_seconds(quickstart),
        **{tier: with_tier(quickstart, tier) for tier in TIERS},
        **{f"dim-{dim}": with_file(criteo, "parquet", dim, BAG) for dim in DIMS},
        **{format_: with_file(criteo, format_, DIMS[0]) for format_ in FILES},
    }
    profile = HardwareProfile.model_validate(PROFILE)
    for name, document in jobs.items():
        job = DLRMJob.model_validate(document)
        place = folder / name
        place.mkdir(parents=True)
        if job.spec.data.format in FILES:
            write_file(document, place)
        (place / "job.json").write_text(job.model_dump_json(by_alias=True, exclude_none=True))
        (place / "plan.json").write_text(plan_job(job.spec, profile).model_dump_json(by_alias=True))


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
