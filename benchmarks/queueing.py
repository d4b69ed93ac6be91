"""A cluster's queue, simulated: ``python -m benchmarks.queueing [--quick] [--only PATTERN] [--seed N]``.

Jobs arrive at 64 nodes as a Poisson process, at loads of 0.5 to 1.1. Ours gives each the smallest number of nodes with
which it meets its deadline, as ``trainer.objective`` does. The peer gives each as many free nodes as make it
faster. A job runs for as long as the planner predicts for its model, samples and number of nodes; how many nodes are of
use, and what each adds, is the planner's too. In both queues jobs start in the order of their arrival, and later ones
overtake those that wait for more nodes. A job that no number of nodes could finish in time any more leaves: it is
blocked.

A job's deadline is ``beta`` times its run time on the fewest nodes that hold its tables, beta uniform over (0.1, 1],
and at least 1.25 times its shortest run time. The load is the least node-seconds with which jobs meet their deadlines,
over the cluster's. Completion times are of jobs that ran. Nothing is trained, and run times are modelled: lines compare
policies, not machines.

Source: Parsonson et al., "Partitioning Distributed Compute Jobs with Reinforcement Learning and Graph Neural Networks",
arXiv 2301.13799 (PAC-ML), for deadlines and blocking.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import yaml

from benchmarks.measure import Pairs, report, tell
from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import parse_job
from dlrm_planner import plan_job

PROFILE = Path(__file__).parents[1] / "examples/cluster/profiles/cpu-nvme.yaml"
NODES = 64
SIZES = tuple(2**power for power in range(7))
LOADS = (0.5, 0.7, 0.9, 1.1)
MODELS, JOBS, REPEATS = 24, 10_000, 5
QUICK_MODELS, QUICK_JOBS, QUICK_REPEATS = 4, 1_000, 2
WARM_UP = 0.1
"""First share of the jobs, which find an emptier cluster and do not count."""
NODE_HOURS = (0.5, 50.0)
"""A job's node-hours at its most efficient size are drawn between these, evenly by their logarithm."""
MIN_BETA, MIN_SLACK = 0.1, 1.25

Choices = tuple[tuple[int, float], ...]
"""Numbers of nodes, ascending, and the seconds that a job runs on them, descending."""
Policy = Callable[[Choices, int, float], int | None]
"""Returns how many of the free nodes a job takes now to end within the seconds left; None: it waits."""


@dataclass(frozen=True)
class QueuedJob:
    """Hold when a job arrives and must end, and how long it runs."""

    arrival_s: float
    deadline_s: float
    choices: Choices


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Hold what became of the jobs of one simulation, warm-up aside."""

    blocking_rate: float
    median_completion_s: float
    """From arrival to end, of jobs that ran."""
    p95_completion_s: float
    mean_nodes: float


@dataclass(frozen=True)
class Setting:
    """Describe a line."""

    load: float
    seed: int
    benchmark: ClassVar[str] = "queueing"
    against: ClassVar[str] = "as-large-as-possible"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``benchmarks.measure.Described``."""
        return {"nodes": NODES, "load": self.load, "seed": self.seed}


def smallest_that_meets(choices: Choices, free: int, left_s: float) -> int | None:
    """Take the fewest nodes that meet the deadline; wait if so many are not free."""
    size = next((size for size, run_s in choices if run_s <= left_s), None)
    return size if size is not None and size <= free else None


def as_large_as_possible(choices: Choices, free: int, left_s: float) -> int | None:
    """Take as many free nodes as make the job faster; wait if it would miss its deadline on them."""
    return next((size for size, run_s in reversed(choices) if size <= free and run_s <= left_s), None)


def simulate(jobs: Sequence[QueuedJob], nodes: int, policy: Policy) -> Outcome:
    """Run jobs, in order of arrival, through one queue."""
    free, waiting, running = nodes, list[int](), list[tuple[float, int]]()
    ends_s, sizes = np.full(len(jobs), np.nan), np.zeros(len(jobs), np.int64)

    def start(now_s: float) -> None:
        nonlocal free, waiting
        still = list[int]()
        for number in waiting:
            job = jobs[number]
            left_s = job.deadline_s - now_s
            size = policy(job.choices, free, left_s)
            if size is not None:
                free -= size
                ends_s[number], sizes[number] = now_s + dict(job.choices)[size], size
                heapq.heappush(running, (float(ends_s[number]), size))
            elif job.choices[-1][1] <= left_s:
                still.append(number)
        waiting = still

    def finish(until_s: float) -> None:
        nonlocal free
        while running and running[0][0] <= until_s:
            end_s, size = heapq.heappop(running)
            free += size
            start(end_s)

    for number, job in enumerate(jobs):
        finish(job.arrival_s)
        waiting.append(number)
        start(job.arrival_s)
    finish(math.inf)
    counted = slice(int(WARM_UP * len(jobs)), None)
    arrivals_s = np.array([job.arrival_s for job in jobs])
    took_s, ran = (ends_s - arrivals_s)[counted], np.isfinite(ends_s[counted])
    median_s, p95_s = np.percentile(took_s[ran], [50, 95])
    run_s = [dict(job.choices).get(int(size), 0.0) for job, size in zip(jobs, sizes, strict=True)]
    return Outcome(
        blocking_rate=1.0 - float(ran.mean()),
        median_completion_s=float(median_s),
        p95_completion_s=float(p95_s),
        mean_nodes=float((sizes * run_s).sum() / np.nanmax(ends_s)),
    )


def draw_jobs(draw: np.random.Generator, models: Sequence[Choices], count: int, load: float) -> list[QueuedJob]:
    """Draw jobs of some models, given as seconds per sample by number of nodes, that offer ``load``."""
    drawn = list[tuple[float, Choices]]()
    for model in draw.integers(len(models), size=count):
        low, high = np.log(NODE_HOURS)
        work_s = 3_600 * math.exp(draw.uniform(low, high))
        samples = work_s / min(size * sample_s for size, sample_s in models[model])
        choices = tuple((size, samples * sample_s) for size, sample_s in models[model])
        beta = 1.0 - (1.0 - MIN_BETA) * draw.random()
        drawn.append((max(beta * choices[0][1], MIN_SLACK * choices[-1][1]), choices))
    least = [min(size * run_s for size, run_s in choices if run_s <= within_s) for within_s, choices in drawn]
    arrivals_s = np.cumsum(draw.exponential(float(np.mean(least)) / (load * NODES), size=count))
    return [
        QueuedJob(float(arrival_s), float(arrival_s) + within_s, choices)
        for arrival_s, (within_s, choices) in zip(arrivals_s, drawn, strict=True)
    ]


def draw_model(draw: np.random.Generator, profile: HardwareProfile) -> Choices:
    """Draw a model, and return its predicted seconds per sample for each number of nodes that helps.

    Sizes that do not hold the tables, or are not faster than smaller ones, are left out.
    """
    dim = int(draw.choice([16, 32, 64, 128]))
    lookups = int(draw.choice([1, 2, 5, 10]))
    document = {
        "kind": "DLRMJob",
        "metadata": {"name": "drawn"},
        "spec": {
            "model": {
                "denseFeatures": [f"I{i}" for i in range(13)],
                "bottomMlp": [int(draw.choice([128, 512])), dim],
                "topMlp": [int(draw.choice([256, 1024])), 256, 1],
                "tableGroups": [
                    {
                        "name": "t",
                        "count": int(draw.integers(8, 65)),
                        "template": {"rows": int(10 ** draw.uniform(6, 8.3)), "dim": dim, "maxLookups": lookups},
                    }
                ],
            },
            "data": {"format": "synthetic", "globalBatchSize": int(2 ** draw.integers(12, 17))},
            "trainer": {"hardware": profile.metadata.name},
            "checkpoint": {"uri": "file:///tmp/drawn"},
        },
    }
    spec, choices = parse_job(document).spec, list[tuple[int, float]]()
    for size in SIZES:
        try:
            rate = plan_job(spec.with_replicas(size), profile).predicted.samples_per_second
        except InfeasiblePlanError:
            continue
        assert rate, f"{PROFILE} states every rate"
        if not choices or 1 / rate < choices[-1][1]:
            choices.append((size, 1 / rate))
    return tuple(choices)


def compare(setting: Setting, models: Sequence[Choices], jobs: int, repeats: int) -> None:
    """Simulate both policies with the same jobs, and print their lines."""
    blocked, completed, nodes, slowest = Pairs(), Pairs(), Pairs(), Pairs()
    for repeat in range(repeats):
        drawn = draw_jobs(np.random.default_rng([setting.seed, repeat]), models, jobs, setting.load)
        ours, theirs = (simulate(drawn, NODES, policy) for policy in (smallest_that_meets, as_large_as_possible))
        blocked.add(ours.blocking_rate, theirs.blocking_rate)
        completed.add(ours.median_completion_s / 60, theirs.median_completion_s / 60)
        slowest.add(ours.p95_completion_s / 60, theirs.p95_completion_s / 60)
        nodes.add(ours.mean_nodes, theirs.mean_nodes)
    busy = {"busy_nodes": float(np.median(nodes.ours)), "busy_nodes_theirs": float(np.median(nodes.theirs))}
    report(setting, "blocking_rate", blocked, **busy)
    report(setting, "median_completion_minutes", completed)
    report(setting, "p95_completion_minutes", slowest)


def main() -> None:
    """Plan the models once, then simulate every load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few models and jobs: does it run here?")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="loads to simulate, such as 0.9")
    parser.add_argument("--seed", type=int, default=0, help="of models and jobs")
    chosen = parser.parse_args()
    draw, profile = np.random.default_rng(chosen.seed), parse_profile(yaml.safe_load(PROFILE.read_text()))
    count = QUICK_MODELS if chosen.quick else MODELS
    tell(f"planning {count} models on up to {NODES} nodes of {profile.metadata.name}")
    models = [draw_model(draw, profile) for _ in range(count)]
    for model in models:
        tell("samples/s by nodes: " + ", ".join(f"{size}: {1 / sample_s:,.0f}" for size, sample_s in model))
    jobs, repeats = (QUICK_JOBS, QUICK_REPEATS) if chosen.quick else (JOBS, REPEATS)
    for load in LOADS:
        if fnmatch(str(load), chosen.only):
            compare(Setting(load, chosen.seed), models, jobs, repeats)


if __name__ == "__main__":
    main()
