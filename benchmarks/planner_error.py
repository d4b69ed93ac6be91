"""Compare the planner's seconds with the clock: ``python -m benchmarks.planner_error [--settings N] [--seed N]``.

Draws jobs by a seed, runs each with ``dlrmctl run`` on this machine, and plans it by what ``dlrmctl profile measure``
found before and after all runs. A run makes 20 steps that do not count and 50 that do; its figure is their median. The
runs of a setting are not consecutive: every setting runs once before any runs again. Hit rates come from
one more, longer run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy import stats

from benchmarks.measure import tell
from benchmarks.scratch import Scratch
from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.plan import Plan, parse_plan
from dlrm_api.run_report import Profile, RankUse, StageTimes
from dlrm_planner import plan_job

WARM_STEPS, COUNTED_STEPS, REPEATS = 20, 50, 3
STEPS, HIT_STEPS = WARM_STEPS + COUNTED_STEPS, 400
"""Steps of a timed run, and of the run that measures hit rates: rows that reappear in a short run do so sooner than in
the long run that a plan predicts."""
MAX_REPEAT_ERROR, MAX_RERUNS = 0.08, 2
"""A setting whose runs differ by more is run again, as often as this."""
MAX_IDS, MAX_TABLE_BYTES = 2**20, 2**30
"""Of a batch, and of all tables: larger draws are drawn again, so that a run takes seconds."""
MIN_LOOKUPS_PER_ROW = 4
"""Of the steps that do not count, if rows have levels. With fewer, many rows of a short run have never been stored in a
tier, unlike those of a long one."""
HANDOFF_TABLES, MIN_HANDOFF_BYTES = 2, 2**28
"""The hand-off has room for as many copies of all rows, and for dense state, so that no cut falls into a run: a
prediction is of the steps between cuts."""
READY_BATCHES, READY_PARTS = 4, 16
"""Ready batches that one part of so many of a reader's memory holds. In a long run readers are as fast as training;
with more memory they would read all batches of a short one before the steps that count."""
MLPS: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "small": ((64,), (64, 32, 1)),
    "medium": ((256, 128), (256, 128, 1)),
    "large": ((512, 256), (1_024, 512, 256, 1)),
}
"""Widths of the bottom MLP, without its last layer, and of the top MLP."""
BOUNDS: Mapping[str, tuple[str, ...]] = {
    "reader": ("read",),
    "tier": ("prefetch wait",),
    "link": ("exchange", "agreement"),
    "compute": ("forward", "backward", "row update", "dense update"),
    "python": ("prepare", "maintenance", "records"),
}
"""Stages of the training thread by the resource that they wait for or use."""


class RunError(RuntimeError):
    """Report a run that failed, or one whose plan is not the predicted one."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Describe one job."""

    tables: int
    rows: int
    dim: int
    lookups: int
    batch: int
    mlp: str
    precision: str
    cache: float
    """Least bytes of DDR over those of all rows; rows that do not fit are in block storage."""
    ranks: int

    @property
    def table_bytes(self) -> int:
        """Return the bytes of all rows."""
        return self.tables * self.rows * self.dim * 4

    @property
    def handoff_bytes(self) -> int:
        """Return the budget of the hand-off."""
        return HANDOFF_TABLES * self.table_bytes + MIN_HANDOFF_BYTES

    @property
    def prefetch_bytes(self) -> int:
        """Return the memory of each rank's reader."""
        batch_bytes = self.batch * self.tables * (8 * self.lookups + 4) // self.ranks
        return READY_PARTS * READY_BATCHES * batch_bytes

    @property
    def is_usable(self) -> bool:
        """Return whether a run takes seconds, and has seen most rows before the steps that count."""
        is_small = self.batch * self.tables * self.lookups <= MAX_IDS and self.table_bytes <= MAX_TABLE_BYTES
        filling = WARM_STEPS * self.batch * self.lookups / MIN_LOOKUPS_PER_ROW
        return is_small and (self.cache == 1 or self.rows <= filling)


def log_uniform(draw: random.Random, low: float, high: float) -> float:
    """Return a random number whose logarithm is even between those of two."""
    return math.exp(draw.uniform(math.log(low), math.log(high)))


def draw_setting(draw: random.Random) -> Setting:
    """Return a random setting that is usable."""
    between = partial(log_uniform, draw)
    while True:
        setting = Setting(
            tables=round(between(8, 100)),
            rows=round(between(5_000, 1_000_000)),
            dim=draw.choice((16, 32, 64, 128)),
            lookups=round(between(1, 20)),
            batch=draw.choice((512, 1_024, 2_048, 4_096, 8_192)),
            mlp=draw.choice(tuple(MLPS)),
            precision=draw.choice(("fp32", "bf16")),
            cache=draw.choice((1.0, round(between(0.05, 0.9), 3))),
            ranks=draw.choice((1, 2)),
        )
        if setting.is_usable:
            return setting


def make_job(
    model: Mapping[str, Any],
    batch: int,
    folder: Path,
    *,
    ranks: int,
    handoff_bytes: int,
    data: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    steps: int = STEPS,
) -> DLRMJob:
    """Return a job of one pod on synthetic data that ends after the steps that count, without a cut before."""
    spec = {
        "model": model,
        "data": {
            "format": "synthetic",
            "synthetic": {"samples": batch * steps, "evalSamples": 0},
            "globalBatchSize": batch,
            **(data or {}),
        },
        "training": {"maxSteps": steps},
        "trainer": {"replicas": 1, "processesPerReplica": ranks, **(trainer or {})},
        "checkpoint": {"uri": (folder / "store").as_uri(), "intervalSteps": 1_000_000, "handoffBudget": handoff_bytes},
    }
    head = {"apiVersion": "dlrm.dev/v1alpha1", "kind": "DLRMJob", "metadata": {"name": "benchmark"}}
    return parse_job({**head, "spec": spec})


def read_manifest(setting: Setting, ddr_bytes: int | None, folder: Path, steps: int = STEPS) -> DLRMJob:
    """Return the job of a setting."""
    bottom, top = MLPS[setting.mlp]
    template = {
        "rows": setting.rows,
        "dim": setting.dim,
        "avgLookups": setting.lookups,
        "maxLookups": 2 * setting.lookups if setting.lookups > 1 else 1,
        "pooling": "sum",
    }
    model = {
        "denseFeatures": [f"I{number}" for number in range(13)],
        "bottomMlp": [*bottom, setting.dim],
        "topMlp": list(top),
        "precision": setting.precision,
        "tableGroups": [{"name": "table", "count": setting.tables, "template": template}],
    }
    return make_job(
        model,
        setting.batch,
        folder,
        ranks=setting.ranks,
        handoff_bytes=setting.handoff_bytes,
        data={"prefetchBytes": setting.prefetch_bytes},
        trainer=tier_budgets(ddr_bytes),
        steps=steps,
    )


def tier_budgets(ddr_bytes: int | None) -> Mapping[str, Any]:
    """Return a trainer's tiers: so many bytes of DDR over ample block storage; None: whatever the machine has."""
    return {} if ddr_bytes is None else {"tierBudgets": {"ddr": ddr_bytes, "block": 4 * MAX_TABLE_BYTES}}


@dataclass(frozen=True)
class Case:
    """Hold a setting with its job and plan."""

    number: int
    setting: Setting
    job: DLRMJob
    plan: Plan


def make_case(number: int, setting: Setting, profile: HardwareProfile, folder: Path) -> Case:
    """Plan a setting."""
    read = partial(read_manifest, setting, folder=folder)
    if setting.cache == 1.0:
        job = read(None)
        return Case(number, setting, job, plan_job(job.spec, profile, shared=True))
    job, plan = plan_within(read, setting.handoff_bytes, int(setting.cache * setting.table_bytes), profile)
    return Case(number, setting, job, plan)


def plan_within(
    read: Callable[[int], DLRMJob], handoff_bytes: int, rest_bytes: int, profile: HardwareProfile
) -> tuple[DLRMJob, Plan]:
    """Plan a job with DDR of the hand-off's size and a rest, which grows until all that must be there fits."""
    while True:
        job = read(handoff_bytes + rest_bytes)
        try:
            return job, plan_job(job.spec, profile, shared=True)
        except InfeasiblePlanError:
            rest_bytes = rest_bytes * 5 // 4


def draw_case(number: int, draw: random.Random, profile: HardwareProfile, folder: Path) -> Case:
    """Return a random case; with a cache below 1 some rows are in block storage.

    A small model with the least hand-off may fit DDR whole; such a draw is drawn again.
    """
    while True:
        case = make_case(number, draw_setting(draw), profile, folder)
        if case.setting.cache == 1 or cached_share(case.plan) < 1:
            return case


@dataclass(frozen=True)
class Run:
    """Hold what one run of a job measured."""

    plan: Plan
    step_s: float
    """Median of the steps that count."""
    bound: str
    """Resource that takes most of the training thread's time; a key of BOUNDS."""
    hit_rates: tuple[float, float] | None
    """Expected and measured shares of accesses to rows seen before; None without levels."""


def train(job: DLRMJob, profile: Path, folder: Path) -> Run:
    """Train a job in a folder by a profile.

    Raises:
        RunError: the run failed.
    """
    manifest, work = folder / "job.yaml", folder / "run"
    manifest.write_text(job.model_dump_json(exclude_none=True))
    command = [str(Path(sys.executable).with_name("dlrmctl")), "run", str(manifest), "--workdir", str(work)]
    command += ["--profile", "--hardware", str(profile), "--tier-dir", str(folder / "tiers"), "--output", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(done.stderr.strip()[-2_000:])
    lines = [json.loads(line) for line in (work / "progress.jsonl").read_text().splitlines()]
    times = np.array([line["time"] for line in lines if "loss" in line])
    step_s = float(np.median(np.diff(times)[WARM_STEPS - 1 :]))
    stages = Profile.model_validate_json((work / "profile.json").read_text(), by_name=True).stages
    uses = (json.loads(done.stdout).get("tiers") or {}).get("ranks", ())
    hit_rates = _hit_rates([RankUse.model_validate(each) for each in uses])
    return Run(parse_plan((work / "plan.json").read_text()), step_s, _bound(stages), hit_rates)


def run_case(case: Case, profile: Path, folder: Path, steps: int = STEPS) -> Run:
    """Train a case's job once.

    Raises:
        RunError: the run failed, or was planned otherwise than predicted.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        job = read_manifest(case.setting, case.job.spec.trainer.tier_budgets.ddr, Path(name), steps)
        try:
            done = train(job, profile, Path(name))
        except RunError as error:
            raise RunError(f"setting {case.number}: {error}") from error
        if _levels(done.plan) != _levels(case.plan):
            raise RunError(f"setting {case.number}: dlrmctl run planned other shards or tiers than were predicted")
        return done


def _levels(plan: Plan) -> list[Any]:
    return [
        [
            (shard.rank, shard.kind, shard.row_end, [level.tier for level in shard.tiers.levels])
            for shard in table.shards
        ]
        for table in plan.tables
    ]


def cached_share(plan: Plan) -> float:
    """Return the share of rows that the first levels of all shards can hold."""
    shards = [shard for table in plan.tables for shard in table.shards]
    rows = [shard.row_end - shard.row_start for shard in shards]
    first = [each.tiers.levels[0].rows if each.tiers.levels else n for each, n in zip(shards, rows, strict=True)]
    return sum(first) / sum(rows)


def _bound(stages: Sequence[StageTimes]) -> str:
    spent = {
        bound: sum(each.median_seconds for each in stages if each.stage in names) for bound, names in BOUNDS.items()
    }
    return max(spent, key=lambda bound: spent[bound])


def _hit_rates(ranks: Sequence[RankUse]) -> tuple[float, float] | None:
    tables = [table for rank in ranks for table in rank.tables if table.repeat_hit_rate is not None]
    tables = [table for table in tables if table.expected_hit_rate is not None]
    if not tables:
        return None
    weights = [table.accesses - table.created_rows for table in tables]
    found = [[table.expected_hit_rate or 0.0, table.repeat_hit_rate or 0.0] for table in tables]
    expected, measured = np.average(found, axis=0, weights=weights).tolist()
    return expected, measured


def measure_profile(path: Path, folder: Path) -> HardwareProfile:
    """Measure this machine, as users do."""
    command = [str(Path(sys.executable).with_name("dlrmctl")), "profile", "measure", "--out", str(path)]
    started = time.monotonic()
    subprocess.run([*command, "--tier", f"block={folder}"], check=True, capture_output=True)
    tell(f"profile measure: {time.monotonic() - started:.0f} s")
    return parse_profile(yaml.safe_load(path.read_text()))


def repeat_error(runs: Sequence[Run]) -> float:
    """Return half the range of the runs' step times over their median."""
    steps = [run.step_s for run in runs]
    return float((max(steps) - min(steps)) / 2 / np.median(steps))


def measure_cases(cases: Sequence[Case], run_once: Callable[[Case], Run]) -> dict[int, list[Run]]:
    """Return the runs of every case; those that differ too much are all replaced by new ones."""
    found: dict[int, list[Run]] = {}
    again = list(cases)
    for _ in range(1 + MAX_RERUNS):
        found |= {case.number: [] for case in again}
        for repeat in range(REPEATS):
            for case in again:
                run = run_once(case)
                found[case.number].append(run)
                tell(f"setting {case.number}, run {repeat + 1}: {run.step_s * 1e3:.1f} ms, bound by {run.bound}")
        again = [case for case in again if repeat_error(found[case.number]) > MAX_REPEAT_ERROR]
    return found


def show(
    case: Case, predicted_s: Sequence[float], runs: Sequence[Run], hit_rates: tuple[float, float] | None
) -> dict[str, Any]:
    """Print a setting's line, and return it; ``predicted_s`` is by the profiles before and after."""
    measured = float(np.median([run.step_s for run in runs]))
    predicted = statistics.geometric_mean(predicted_s)
    bounds = sorted(run.bound for run in runs)
    line: dict[str, Any] = {
        "benchmark": "planner_error",
        "setting": {"number": case.number, **vars(case.setting)},
        "measured_ms": round(measured * 1e3, 3),
        "predicted_ms": round(predicted * 1e3, 3),
        "error": round(predicted / measured - 1, 4),
        "repeat_error": round(repeat_error(runs), 4),
        "bound": bounds[len(bounds) // 2],
        "cached_share": round(cached_share(case.plan), 3),
        "predicted": case.plan.predicted.model_dump(by_alias=False, exclude_none=True),
    }
    if hit_rates is not None:
        line["expected_hit_rate"], line["hit_rate"] = (round(rate, 4) for rate in hit_rates)
    print(json.dumps(line), flush=True)
    return line


def summarize(lines: Sequence[Mapping[str, Any]], seed: int) -> dict[str, Any]:
    """Return the errors over all settings."""
    errors = np.abs([line["error"] for line in lines])
    measured, predicted = ([line[side] for line in lines] for side in ("measured_ms", "predicted_ms"))
    short = [line for line in lines if line["measured_ms"] < 5]
    rates = [abs(line["expected_hit_rate"] - line["hit_rate"]) for line in lines if "hit_rate" in line]
    return {
        "benchmark": "planner_error",
        "settings": len(lines),
        "seed": seed,
        "median_error": round(float(np.median(errors)), 4),
        "p90_error": round(float(np.quantile(errors, 0.9)), 4),
        "worst_error": round(float(errors.max()), 4),
        "median_repeat_error": round(float(np.median([line["repeat_error"] for line in lines])), 4),
        "spearman": round(float(stats.spearmanr(measured, predicted).statistic), 4) if len(lines) > 1 else None,
        "worst_short_ms": max((abs(line["predicted_ms"] - line["measured_ms"]) for line in short), default=None),
        "worst_hit_rate_points": round(100 * max(rates), 2) if rates else None,
    }


def main() -> int:
    """Measure, print one JSON line for each setting and one for all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_error", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--settings", type=int, default=30, help="number of random settings [30]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the settings [0]")
    parser.add_argument("--tier-dir", type=Path, default=Path(tempfile.gettempdir()), help="folder on the block device")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with Scratch(options.tier_dir) as scratch:
        folder = scratch.path
        before = measure_profile(folder / "before.yaml", folder)
        cases = [draw_case(number, draw, before, folder) for number in range(options.settings)]
        run_once = partial(run_case, profile=folder / "before.yaml", folder=folder)
        found = measure_cases(cases, run_once)
        after = measure_profile(folder / "after.yaml", folder)
        hit_rates = {case.number: run_once(case, steps=HIT_STEPS).hit_rates for case in cases if case.setting.cache < 1}
        lines = []
        for case in cases:
            plans = (case.plan, plan_job(case.job.spec, after, shared=True))
            predicted_s = [case.setting.batch / (plan.predicted.samples_per_second or math.nan) for plan in plans]
            lines.append(show(case, predicted_s, found[case.number], hit_rates.get(case.number)))
    print(json.dumps(summarize(lines, options.seed)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
