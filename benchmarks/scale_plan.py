"""A plan of many tables on many ranks: seconds of one core to make it, its bytes, and what one rank's start takes."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measure import Result, tell
from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.plan import parse_plan, plan_from_parts, plan_to_parts
from dlrm_planner import plan_job
from dlrm_trainer.embedding.placement import place, routes

DIMS, LOOKUPS = (64, 128, 256), (1, 2, 5, 20)
MAX_PLAN_S: Mapping[str, float] = {"1000x128": 5.0, "1000x1024": 15.0, "5000x1024": 40.0}
"""By tables x ranks: seconds of one core for a plan over DDR, CXL, SCM and block storage."""
RANKS, MAX_START_S = 1_024, 10.0
PROCESSES, BATCH, TIB = 8, 8_192, 2**40
SMALL_BATCH = 2_048
"""With ranges of 5,000 tables a rank has pooled rows of the whole batch of each: of a larger one they do not fit."""
NODE_TIERS = {
    "ddr": {"bytes": TIB // 2, "readBytesPerSecond": 2e11},
    "cxl": {"bytes": TIB // 2, "readBytesPerSecond": 4e10},
    "scm": {"bytes": TIB, "readBytesPerSecond": 1e10},
    "block": {"bytes": 3 * TIB, "readBytesPerSecond": 6e9, "readIops": 1e6},
}


def job(tables: int, ranks: int, sharding: str | None, *, batch: int = BATCH, seed: int = 0) -> DLRMJobSpec:
    """Draw tables that take a tenth of a cluster's tiers and more than its DDR; ``sharding``: of all, or the planner's.

    Rows are log-normal, as in production models.
    """
    draw = np.random.default_rng(seed)
    dims = draw.choice(DIMS, tables)
    sizes = draw.lognormal(0.0, 1.0, tables)
    node_bytes = sum(int(tier["bytes"]) for tier in NODE_TIERS.values())
    rows = sizes / (sizes * dims).sum() * (0.1 * node_bytes * ranks / PROCESSES / 4)
    pin = {} if sharding is None else {"pin": {"sharding": sharding}}
    lookups = draw.choice(LOOKUPS, tables).tolist()
    table = [
        {"name": f"t{n}", "rows": int(np.clip(rows[n], 1_000, 2e9)), "dim": int(dims[n]), "maxLookups": lookups[n]}
        | pin
        for n in range(tables)
    ]
    document: dict[str, Any] = {
        "metadata": {"name": "large"},
        "spec": {
            "model": {"denseFeatures": ["a"], "bottomMlp": [512, 64], "topMlp": [512, 1], "interaction": "dcn"}
            | {"tables": table},
            "data": {"format": "synthetic", "globalBatchSize": batch, "virtualShards": ranks},
            "trainer": {"replicas": ranks // PROCESSES, "processesPerReplica": PROCESSES, "hardware": "node"},
            "checkpoint": {"uri": "file:///snapshots"},
        },
    }
    return parse_job(document).spec


def node() -> HardwareProfile:
    """Return a node of four tiers with stated rates."""
    spec = {"tiers": NODE_TIERS, "flopsPerSecond": 5e12, "network": {"interNodeBytesPerSecond": 2.5e10}}
    return parse_profile({"metadata": {"name": "node"}, "spec": spec})


def planning(size: str, is_quick: bool, *, sharding: str | None = None, batch: int = BATCH) -> Iterator[Result]:
    """Plan, write and read; ``size``: tables x ranks."""
    tables, ranks = map(int, size.split("x"))
    if is_quick:
        tables, ranks = tables // 10, ranks // 8
    spec, profile = job(tables, ranks, sharding, batch=batch), node()
    tell(f"{tables} tables on {ranks} ranks, sharding {sharding or 'of the planner'}: one thread")
    marks, before = [time.process_time()], _peak_rss_mib()

    def lap() -> float:
        marks.append(time.process_time())
        return marks[-1] - marks[-2]

    plan = plan_job(spec, profile)
    plan_s, after = lap(), _peak_rss_mib()
    parts = plan_to_parts(plan)
    write_s = lap()
    plan_from_parts(parts)
    read_s = lap()
    yield Result(
        metric="plan_s",
        value=plan_s,
        limit=MAX_PLAN_S[size],
        setting={"tables": tables, "ranks": ranks, "sharding": sharding or "any", "batch": batch},
        measured={
            "write_s": write_s,
            "read_s": read_s,
            "json_bytes": len(plan.model_dump_json()),
            "stored_bytes": sum(map(len, parts.values())),
            "ranges": sum(len(table.ranges) for table in plan.tables),
            "shards": sum(each.ranks for table in plan.tables for each in table.ranges),
            "peak_rss_mib": after,
            "peak_rss_before_mib": before,
        },
    )


def refusing(size: str, is_quick: bool) -> Iterator[Result]:
    """Plan tables of which every rank has ranges: pooled rows of whole batches take more memory than there is."""
    tables, ranks = map(int, size.split("x"))
    if is_quick:
        tables, ranks = tables // 10, ranks // 8
    spec, profile = job(tables, ranks, "row", batch=BATCH * 10 if is_quick else BATCH), node()
    tell(f"{tables} tables on {ranks} ranks that do not fit: one thread")
    start, before, refusal = time.process_time(), _peak_rss_mib(), ""
    try:
        plan_job(spec, profile)
    except InfeasiblePlanError as error:
        refusal = error.reasons[0]
    assert refusal, "a plan was found"
    yield Result(
        metric="refusal_s",
        value=time.process_time() - start,
        limit=MAX_PLAN_S[size],
        setting={"tables": tables, "ranks": ranks, "sharding": "row"},
        measured={"refusal": refusal, "peak_rss_mib": _peak_rss_mib(), "peak_rss_before_mib": before},
    )


def _peak_rss_mib() -> float:
    """Return the peak memory of this process so far: run one result at a time to see its own."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def starting(tables: int, is_quick: bool) -> Iterator[Result]:
    """Read, place and route a plan of tables whose rows are split evenly over all ranks."""
    tables, ranks = (tables // 10, RANKS // 8) if is_quick else (tables, RANKS)
    model = job(tables, ranks, None).model
    document = {
        "worldSize": ranks,
        "processesPerNode": PROCESSES,
        "ranks": [{"rank": rank, "node": rank // PROCESSES, "bytesPerTier": {}} for rank in range(ranks)],
        "tables": [
            {
                "name": table.name,
                "columnBlocks": list(table.block_edges),
                "ranges": [
                    {"rank": 0, "ranks": ranks, "kind": "row", "rowStart": 0, "rowEnd": max(table.rows, ranks)}
                    | {"columnStart": 0, "columnEnd": table.dim}
                ],
            }
            for table in model.all_tables()
        ],
        "handoffBytes": [0] * (ranks // PROCESSES),
    }
    text = json.dumps(document)
    tell(f"{tables} tables split over {ranks} ranks: one thread")
    before = time.process_time()
    placement = place(model, parse_plan(text), ranks)
    placed = time.process_time()
    found = routes(placement, ranks // 2)
    routed = time.process_time()
    yield Result(
        metric="start_s",
        value=routed - before,
        limit=MAX_START_S,
        setting={"tables": tables, "ranks": ranks, "shards": int(found.units.numel())},
        measured={"place_s": placed - before, "route_s": routed - placed, "json_bytes": len(text)},
    )


RESULTS = {
    **{f"plan/{size}": partial(planning, size) for size in MAX_PLAN_S},
    "plan/1000x1024/table-row": partial(planning, "1000x1024", sharding="table-row"),
    "plan/1000x1024/row": partial(planning, "1000x1024", sharding="row"),
    "plan/5000x1024/row": partial(planning, "5000x1024", sharding="row", batch=SMALL_BATCH),
    "plan/5000x1024/row/refused": partial(refusing, "5000x1024"),
    "plan/start/1000": partial(starting, 1_000),
    "plan/start/5000": partial(starting, 5_000),
}
"""Named as ``benchmarks.scale`` names them."""
