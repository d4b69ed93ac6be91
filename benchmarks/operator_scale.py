"""A thousand jobs of two pods: how long until all run, at what cost, and how fast a lost pod's gang is replaced."""

from __future__ import annotations

import argparse
import fnmatch
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import psutil

from benchmarks.fake_nodes import WRITES, FakeNodes
from benchmarks.job_controllers import (
    RAISED_LIMIT,
    BareClient,
    Controller,
    KubeflowTrainer,
    Ours,
    Replacement,
    Submission,
    replace_pod,
)
from benchmarks.measure import Pairs, report, tell
from dlrm_cluster.process import Server

NODES = 20
REPLACED = 20
IDLE_S = 60.0
QUIET_S = 10.0
LOOK_S = 1.0
"""Between two looks at a controller's processes: they cost processor time too, and on its side alone."""
PEERS: dict[str, Callable[[], Controller]] = {
    "kubeflow-trainer": KubeflowTrainer,
    "kubeflow-trainer-raised": lambda: KubeflowTrainer(RAISED_LIMIT),
    "bare-client": BareClient,
}


@dataclass(frozen=True)
class Setting:
    """Describe a line about scale."""

    jobs: int
    against: str
    benchmark: ClassVar[str] = "operator_scale"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"jobs": self.jobs, "pods_per_job": 2, "nodes": NODES}


@dataclass
class Measured:
    """One run of one side."""

    seconds: float
    """From the first create until all jobs run."""
    job_seconds: list[float]
    """Each job's own time."""
    writes: float
    """Writes to the API server a job, until all ran."""
    cpu_s: float
    """Of the controller's processes until all ran."""
    servers_cpu_s: dict[str, float]
    """Of the control plane's, and kwok's, until then."""
    peak_rss: float = 0.0
    replaced: list[Replacement] = field(default_factory=list)
    idle: dict[str, float] = field(default_factory=dict)


class Watched:
    """Processor time and memory of processes and all below them, looked at again and again."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self._processes = [psutil.Process(found.pid) for server in servers if (found := server.identity)]
        self._ended_cpu_s: dict[int, float] = {}
        self.peak_rss = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stop.set()
        self._thread.join()

    @property
    def cpu_s(self) -> float:
        """Return the CPU seconds so far, with those of ended children."""
        self._look()
        return sum(self._ended_cpu_s.values())

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        rss = 0.0
        try:
            below = [child for process in self._processes for child in process.children(recursive=True)]
            for process in (*self._processes, *below):
                times = process.cpu_times()
                self._ended_cpu_s[process.pid] = times.user + times.system
                rss += process.memory_info().rss
        except psutil.NoSuchProcess:
            return
        self.peak_rss = max(self.peak_rss, rss)


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each metric and peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer jobs, a short look at the idle operator")
    parser.add_argument("--jobs", type=int, help="1,000 unless told; 50 with --quick")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--only", default="*", help="pattern of the peers")
    flags = parser.parse_args(argv)
    jobs = flags.jobs or (50 if flags.quick else 1_000)
    idle_s = 10.0 if flags.quick else IDLE_S
    peers = [name for name in PEERS if fnmatch.fnmatch(name, flags.only)]
    ours: list[Measured] = []
    theirs: dict[str, list[Measured]] = {name: [] for name in peers}
    for repeat in range(flags.repeats):
        sides: list[str | None] = [None, *peers]
        for side in sides if repeat % 2 == 0 else sides[::-1]:
            controller = PEERS[side]() if side else Ours()
            tell(f"repeat {repeat + 1}: {controller.name}, {jobs} jobs")
            (theirs[side] if side else ours).append(run(controller, jobs, idle_s))
    for name in peers:
        show(Setting(jobs, name), ours, theirs[name])
    show_alone(Setting(jobs, "none"), ours)


def run(controller: Controller, jobs: int, idle_s: float) -> Measured:
    """One side on a control plane of its own."""
    with FakeNodes(NODES) as cluster:
        processes = controller.start(cluster)
        watched = Watched(processes)
        try:
            time.sleep(2)
            before, writes = watched.cpu_s, cluster.writes(controller.agent)
            servers = cluster.cpu_s()
            submission = Submission(controller, cluster)
            submission.run(jobs, timeout_s=max(120.0, jobs * 2.0))
            times = [submission.ran[name] - submission.created[name] for name in submission.ran]
            seconds = max(submission.ran.values()) - min(submission.created.values())
            cpu_s = watched.cpu_s - before
            servers = {name: spent - servers[name] for name, spent in cluster.cpu_s().items()}
            done = Measured(seconds, times, (cluster.writes(controller.agent) - writes) / jobs, cpu_s, servers)
            tell(f"{controller.name}: all ran after {seconds:.1f} s, {done.writes:.2f} writes a job, {cpu_s:.1f} s CPU")
            if processes:
                done.idle = idle(cluster, controller, watched, idle_s)
                some = np.linspace(0, jobs - 1, min(REPLACED, jobs)).astype(int)
                done.replaced = [replace_pod(cluster, controller, int(number)) for number in some]
            done.peak_rss = watched.peak_rss
            return done
        finally:
            watched.stop()
            for process in processes:
                process.stop()


def idle(cluster: FakeNodes, controller: Controller, watched: Watched, idle_s: float) -> dict[str, float]:
    """Measure what the idle controller costs."""
    time.sleep(QUIET_S)
    calls, cpu_s = _requests(cluster, controller), watched.cpu_s
    time.sleep(idle_s)
    made = _requests(cluster, controller)
    found = {f"idle_{kind}": float(made[kind] - calls[kind]) for kind in made}
    return {"idle_cpu_share": (watched.cpu_s - cpu_s) / idle_s, "idle_s": idle_s, **found}


def _requests(cluster: FakeNodes, controller: Controller) -> dict[str, int]:
    counts = {"writes": 0, "reads": 0, "lease_requests": 0}
    for call in cluster.calls(controller.agent):
        if call.get("objectRef", {}).get("resource") == "leases":
            counts["lease_requests"] += 1
        elif call["verb"] in WRITES:
            counts["writes"] += 1
        elif call["verb"] in ("get", "list"):
            counts["reads"] += 1
    return counts


def show(setting: Setting, ours: Sequence[Measured], theirs: Sequence[Measured]) -> None:
    """Yield the lines that have a peer."""
    times = _pairs([run.seconds for run in ours], [run.seconds for run in theirs])
    report(
        setting,
        "seconds_to_all_running",
        times,
        our_job_s_p50=float(np.median([run_s for run in ours for run_s in run.job_seconds])),
        their_job_s_p50=float(np.median([run_s for run in theirs for run_s in run.job_seconds])),
        our_cpu_ms_per_job=float(np.median([run.cpu_s for run in ours])) * 1000 / setting.jobs,
        their_cpu_ms_per_job=float(np.median([run.cpu_s for run in theirs])) * 1000 / setting.jobs,
        **_servers_ms("our", ours, setting.jobs),
        **_servers_ms("their", theirs, setting.jobs),
    )
    report(setting, "writes_per_job", _pairs([run.writes for run in ours], [run.writes for run in theirs]))
    if theirs[0].replaced:
        mib = 2**20
        report(
            setting,
            "peak_rss_mib",
            _pairs([run.peak_rss / mib for run in ours], [run.peak_rss / mib for run in theirs]),
        )
        our_replaced, their_replaced = _replaced(ours), _replaced(theirs)
        for metric, found in our_replaced.items():
            report(setting, metric, _pairs(found, their_replaced[metric]))


def show_alone(setting: Setting, ours: Sequence[Measured]) -> None:
    """Yield the line without a peer."""
    figures = {
        "seconds_to_all_running": [run.seconds for run in ours],
        "writes_per_job": [run.writes for run in ours],
        "peak_rss_mib": [run.peak_rss / 2**20 for run in ours],
        **_replaced(ours),
    }
    for metric, found in figures.items():
        line: dict[str, Any] = {
            "benchmark": setting.benchmark,
            "setting": setting.shown,
            "metric": metric,
            "ours": float(f"{np.median(found):.4g}"),
            "against": setting.against,
            "repeats": len(found),
        }
        if metric == "peak_rss_mib":
            line["measured"] = {name: float(f"{value:.4g}") for name, value in ours[-1].idle.items()}
        print(json.dumps(line), flush=True)


def _servers_ms(whose: str, runs: Sequence[Measured], jobs: int) -> dict[str, float]:
    """Milliseconds of processor time that each server took a job."""
    return {
        f"{whose}_{name}_ms_per_job": float(np.median([run.servers_cpu_s[name] for run in runs])) * 1000 / jobs
        for name in runs[0].servers_cpu_s
    }


def _pairs(ours: Sequence[float], theirs: Sequence[float]) -> Pairs:
    return Pairs(list(ours), list(theirs))


def _replaced(runs: Sequence[Measured]) -> dict[str, list[float]]:
    """Return what each run took from the loss of a pod: to its replacement, and until the whole job ran again."""
    return {
        f"{metric}_ms_p{percentile}": [
            float(np.percentile([getattr(one, moment) for one in run.replaced], percentile)) * 1000 for run in runs
        ]
        for metric, moment in (("replace", "created_s"), ("recover", "running_s"))
        for percentile in (50, 90)
    }


if __name__ == "__main__":
    main()
