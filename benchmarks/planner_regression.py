"""Compare the plans of this checkout with those of another one, rated by both.

``python -m benchmarks.planner_regression --old ../old/.venv/bin/python --problems 300 --seed 0`` draws random problems,
has both interpreters plan them, has each rate the plans of both by its own cost model, and exits with 1 where a new
plan is slower than the old one by more than a percent by either measure, or a feasible problem became infeasible.

A worker runs under the interpreter of its checkout and reads this file by its path, so it imports ``dlrm_api`` and
``dlrm_planner`` only.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.plan import Plan
from dlrm_api.trace import TableTrace
from dlrm_planner import choose_plan, plan_job
from dlrm_planner.choose import read_problem
from dlrm_planner.replan import read_solution

MIB, GIB = 2**20, 2**30
MAX_SLOWER = 1.01
DEFAULT_RATES: dict[str, dict[str, float]] = {
    "ddr": {"readBytesPerSecond": 5.5e10, "writeBytesPerSecond": 5e10},
    "hbm": {"readBytesPerSecond": 1e12, "writeBytesPerSecond": 1e12},
    "cxl": {"readBytesPerSecond": 2e10, "writeBytesPerSecond": 1e10},
    "scm": {"readBytesPerSecond": 5e9, "writeBytesPerSecond": 2e9},
    "block": {"readBytesPerSecond": 2e9, "writeBytesPerSecond": 1e9, "readIops": 2e5},
}
"""Fill what a problem's profile leaves open, so that every plan can be rated."""


def draw_table(draw: random.Random, number: int, largest: float) -> dict[str, Any]:
    """Draw a table of at most ``10 ** largest`` rows."""
    dim = draw.choice([4, 16, 32, 64, 128])
    table: dict[str, Any] = {
        "name": f"t{number}",
        "rows": int(10 ** draw.uniform(1, largest)),
        "dim": dim,
        "maxLookups": draw.choice([1, 1, 2, 5, 20]),
    }
    if draw.random() < 0.3:
        table["distribution"] = draw.choice([{"prior": "uniform"}, {"prior": "zipf", "alpha": 0.7}])
    if draw.random() < 0.3 and dim > 4:
        table["columnBlock"] = dim // draw.choice([1, 2, 4])
    if draw.random() < 0.15:
        table["dtype"] = "fp16"
    return table


def draw_trace(draw: random.Random, table: dict[str, Any]) -> dict[str, Any]:
    """Draw how the rows of a table are reused."""
    rows = table["rows"]
    sizes = sorted({max(1, int(rows * share)) for share in (0.001, 0.01, 0.1, 0.5, 1.0)})
    rate, curve = 0.0, []
    for size in sizes:
        rate += (1 - rate) * draw.uniform(0.1, 0.7)
        curve.append({"cacheRows": size, "hitRate": rate})
    histogram = [
        {"most": 1, "rows": max(1, rows // 2), "lookups": max(1, rows // 2)},
        {"most": None, "rows": max(1, rows // 10), "lookups": max(1, rows // 10) * draw.choice([2, 50])},
    ]
    return {
        "table": table["name"],
        "rows": rows,
        "lookups": 10 * rows,
        "uniqueRows": rows // 2 + 1,
        "accesses": int(draw.uniform(1, 9) * rows),
        "histogram": histogram,
        "curve": curve,
    }


def pin_table(draw: random.Random, table: dict[str, Any], world_size: int, processes: int, tiers: list[str]) -> None:
    """Pin a table to ranks, to a sharding or to a tier."""
    pins: list[dict[str, Any]] = [{"sharding": kind} for kind in ("row", "data")]
    pins += [{"ranks": sorted({draw.randrange(world_size) for _ in range(3)})}, *({"tier": tier} for tier in tiers)]
    if processes > 1:
        pins.append({"sharding": "table-row"})
    if table.get("columnBlock", table["dim"]) < table["dim"]:
        pins += [{"sharding": "column"}] + [{"sharding": "grid"}] * (processes > 1)
    table["pin"] = draw.choice(pins)


def draw_problem(draw: random.Random) -> dict[str, Any]:
    """Draw a job, its hardware or none, and the traces of its tables."""
    on_gpu, tiered, rated = draw.random() < 0.25, draw.random() < 0.4, draw.random() < 0.7
    replicas, processes = draw.choice([1, 1, 2, 3, 4, 8]), draw.choice([1, 1, 2, 4])
    batch = draw.choice([256, 2_048, 16_384])
    tables = [draw_table(draw, number, draw.uniform(5.5, 8.7)) for number in range(draw.choice([1, 3, 8, 20, 40]))]
    tiers: dict[str, Any] = {}
    budgets: dict[str, Any] = {}
    if tiered:
        for tier in ("cxl", "scm", "block"):
            if draw.random() < (0.9 if tier == "block" else 0.3):
                tiers[tier] = {"bytes": draw.randint(2, 400) * GIB, **(DEFAULT_RATES[tier] if rated else {})}
    bytes_of_rows = sum(t["rows"] * t["dim"] * 4 for t in tables)
    share = draw.choice([0.2, 0.6, 1.1, 1.6, 3.0]) if not tiered else draw.choice([0.05, 0.2, 0.6])
    ddr = int(bytes_of_rows * share / replicas) + draw.choice([2, 2, 3, 6]) * GIB * processes
    profile: dict[str, Any] | None = {
        "tiers": {"ddr": {"bytes": ddr, **(DEFAULT_RATES["ddr"] if rated else {})}, **tiers}
    }
    assert profile is not None
    if on_gpu:
        hbm = int(bytes_of_rows * draw.choice([0.1, 0.5, 1.5]) / replicas / processes) + 3 * GIB
        rates = {"flopsPerSecond": 2e13, "hostBytesPerSecond": 2e10} if rated else {}
        hbm_tier = {"bytes": hbm, **(DEFAULT_RATES["hbm"] if rated else {})}
        profile["devices"] = {"resource": "nvidia.com/gpu", "count": 4, "hbm": hbm_tier, **rates}
    if rated:
        profile |= {
            "flopsPerSecond": draw.choice([1e11, 1e13]),
            "network": {
                "intraNodeBytesPerSecond": draw.choice([1e10, 1e11]),
                "interNodeBytesPerSecond": draw.choice([1e9, 1e10]),
            },
            "pricePerHour": 3.6,
        }
    if not on_gpu and draw.random() < 0.25:
        budgets["ddr"] = max(ddr - 4 * GIB, GIB)
        budgets |= {tier: size["bytes"] for tier, size in tiers.items()}
        profile = None
    pinned = draw.choice([0.0, 0.0, 0.2])
    for table in tables:
        if draw.random() < pinned:
            pin_table(draw, table, replicas * processes, processes, [*tiers, "ddr"])
    traces = {}
    if draw.random() < 0.2:
        for table in tables:
            if draw.random() < 0.5:
                table["distribution"] = {"reference": "configmap:traced"}
                traces[table["name"]] = draw_trace(draw, table)
    trainer: dict[str, Any] = {
        "replicas": replicas,
        "processesPerReplica": processes,
        "cache": {"ways": draw.choice([0, 0, 8]), "lookahead": draw.randint(0, 2)},
        "tierBudgets": budgets,
    }
    if draw.random() < 0.05:
        del trainer["replicas"]
        for table in tables:
            table.pop("pin", None)
        trainer["objective"] = {"maxReplicas": 8}
    training = {"communication": {"forward": draw.choice(["fp32", "fp16"]), "backward": draw.choice(["fp32", "int8"])}}
    document = {
        "metadata": {"name": "job"},
        "spec": {
            "model": {"tables": tables, "interaction": "dcn", "crossLayers": 1, "crossRank": 1, "topMlp": [1]},
            "data": {"format": "synthetic", "globalBatchSize": batch},
            "trainer": trainer,
            "training": training,
            "checkpoint": {"uri": "file:///snapshots"},
        },
    }
    hardware = None if profile is None else {"metadata": {"name": "node"}, "spec": profile}
    return {"job": document, "profile": hardware, "traces": traces}


def parse_problem(problem: dict[str, Any]) -> tuple[DLRMJobSpec, HardwareProfile | None, dict[str, TableTrace]]:
    """Return what :func:`plan_problem` takes."""
    profile = None if problem["profile"] is None else parse_profile(problem["profile"])
    traces = {name: TableTrace.model_validate(trace) for name, trace in problem["traces"].items()}
    return parse_job(problem["job"]).spec, profile, traces


def plan_problem(spec: DLRMJobSpec, profile: HardwareProfile | None, traces: Mapping[str, TableTrace]) -> Plan:
    """Plan a job with this process's checkout."""
    if spec.fixed_replicas is None:
        return choose_plan(spec, [profile] if profile else [], traces=traces)
    return plan_job(spec, profile, traces=traces)


def rated_profile(problem: dict[str, Any]) -> HardwareProfile:
    """Return the problem's hardware with every rate that it leaves open."""
    document = json.loads(json.dumps(problem["profile"] or {"metadata": {"name": "node"}, "spec": {"tiers": {}}}))
    spec = document["spec"]
    budgets = problem["job"]["spec"]["trainer"]["tierBudgets"]
    for tier, size in {**budgets, "ddr": budgets.get("ddr", GIB)}.items():
        spec["tiers"].setdefault(tier, {"bytes": size})
    for tier, rates in spec["tiers"].items():
        spec["tiers"][tier] = {**DEFAULT_RATES[tier], **rates}
    spec["flopsPerSecond"] = spec.get("flopsPerSecond", 1e18)
    spec["network"] = {"intraNodeBytesPerSecond": 5e10, "interNodeBytesPerSecond": 1.3e10, **spec.get("network", {})}
    if devices := spec.get("devices"):
        devices["hbm"] = {**DEFAULT_RATES["hbm"], **devices["hbm"]}
        spec["devices"] = {"flopsPerSecond": 1e18, "hostBytesPerSecond": 2e10, **devices}
    return parse_profile(document)


def rate(problem: dict[str, Any], document: dict[str, Any]) -> float:
    """Return the seconds of a step by the cost model of this process's checkout."""
    spec, _, traces = parse_problem(problem)
    plan = Plan.model_validate(document)
    if spec.fixed_replicas is None:
        spec = spec.with_replicas(plan.world_size // plan.processes_per_node)
    asked = read_problem(spec, rated_profile(problem), traces, codecs=plan.row_codecs)
    return read_solution(asked, plan).timeline.step_s


def answer(line: dict[str, Any]) -> dict[str, Any]:
    """Plan a problem, or rate the plans of both sides."""
    if "plans" in line:
        return {"rates": [rate(line["problem"], plan) for plan in line["plans"]]}
    spec, profile, traces = parse_problem(line["problem"])
    started = time.process_time()
    try:
        plan = plan_problem(spec, profile, traces)
    except InfeasiblePlanError as error:
        return {"refused": str(error), "infeasible": True, "seconds": time.process_time() - started}
    except InvalidSpecError as error:
        return {"refused": str(error), "infeasible": False, "seconds": time.process_time() - started}
    return {
        "plan": plan.model_dump(mode="json", by_alias=True, exclude={"choice"}),
        "seconds": time.process_time() - started,
    }


def work() -> None:
    """Answer the problems on standard input, one on each line."""
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def ask(python: Path, lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Send every line to a worker under ``python``; yield its answers."""
    command = [str(python), str(Path(__file__).resolve()), "--worker"]
    # -P: a worker's own checkout provides dlrm_planner, not the folder of this file.
    with subprocess.Popen(
        [command[0], "-P", *command[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as it:
        assert it.stdin is not None
        assert it.stdout is not None
        for line in lines:
            it.stdin.write(json.dumps(line) + "\n")
            it.stdin.flush()
            yield json.loads(it.stdout.readline())
        it.stdin.close()


def compare(number: int, old: dict[str, Any], new: dict[str, Any], ratios: tuple[float, float] | None) -> list[str]:
    """Return what is worse about the new plan."""
    if "plan" in old and "plan" not in new:
        return [f"problem {number}: was feasible, now: {new['refused']}"]
    if ratios is None:
        return []
    named = zip(("old", "new"), ratios, strict=True)
    return [
        f"problem {number}: {ratio:.4f} times as long by the {side} measure"
        for side, ratio in named
        if ratio > MAX_SLOWER
    ]


def main() -> int:
    """Compare, print one JSON line for each measure, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path, help="Python interpreter of the checkout to compare with.")
    parser.add_argument("--problems", type=int, default=300, help="Number of random problems [300].")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the problems [0].")
    parser.add_argument("--cache", type=Path, help="File that keeps the old plans between runs.")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    if options.old is None:
        parser.error("--old is required")
    draw = random.Random(options.seed)
    problems = [draw_problem(draw) for _ in range(options.problems)]
    asked = [{"problem": problem} for problem in problems]
    if options.cache is not None and options.cache.exists():
        old = json.loads(options.cache.read_text())
    else:
        old = list(ask(options.old, asked))
        if options.cache is not None:
            options.cache.write_text(json.dumps(old))
    new = list(ask(Path(sys.executable), asked))
    both = [number for number in range(len(problems)) if "plan" in old[number] and "plan" in new[number]]
    pairs = [{"problem": problems[n], "plans": [old[n]["plan"], new[n]["plan"]]} for n in both]
    by_old = [each["rates"] for each in ask(options.old, pairs)]
    by_new = [each["rates"] for each in ask(Path(sys.executable), pairs)]
    ratios = {n: (a[1] / a[0], b[1] / b[0]) for n, a, b in zip(both, by_old, by_new, strict=True)}
    worse = [line for n in range(len(problems)) for line in compare(n, old[n], new[n], ratios.get(n))]
    print("\n".join(worse), file=sys.stderr)
    for side, column in (("old", 0), ("new", 1)):
        found = sorted(pair[column] for pair in ratios.values())
        mean = math.exp(sum(map(math.log, found)) / max(len(found), 1))
        figures = {"geometric_mean": round(mean, 4), "min": round(found[0], 4), "max": round(found[-1], 4)}
        faster = sum(ratio < 1 / MAX_SLOWER for ratio in found)
        print(
            json.dumps(
                {"benchmark": "planner_regression", "measure": side, "plans": len(found), "faster": faster, **figures}
            )
        )
    feasible = [sum("plan" in each for each in side) for side in (old, new)]
    seconds = [round(sum(each["seconds"] for each in side), 1) for side in (old, new)]
    print(
        json.dumps({"benchmark": "planner_regression", "feasible": feasible, "seconds": seconds, "worse": len(worse)})
    )
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
