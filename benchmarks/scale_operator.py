"""The operator at 5,000 jobs of 8 pods: what lists and polls take, and how soon it hears of commits."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil

from benchmarks.api_double import TABLES, ApiDouble, progress_pods
from benchmarks.gang import LOOPBACK
from benchmarks.measure import Result, tell
from dlrm_operator.__main__ import tune_collector
from dlrm_operator.clients.pod_requests import PARALLEL_REQUESTS
from dlrm_operator.clients.progress import SCHEDULE_INTERVAL_S, Poller, Target
from dlrm_operator.reconcile.state import JobKey

JOBS, PODS = 5_000, 8
MAX_RSS_MIB, MAX_RELIST_S = 400.0, 30.0
FIRST_RSS_MIB = 200.0
"""Of MAX_RSS_MIB: what modules and pages of a list take however few jobs there are, 165 to 180 by machine."""
CONTAINER_MIB = 1_024.0
"""The chart's memory limit, which the planner's process counts against as well."""
RELISTS, QUICK_RELISTS = 3, 1
POLLS_PER_S, POLLED_S, MAX_CORES = 500, 30.0, 0.6
SUSPENDED, MAX_COMMIT_S = 1_000, 10.0
INTERVAL_S = 10.0
SUSPENDED_AT_S = 600.0
"""By then every job has been polled."""
COMMITS_WITHIN_S, ROUND_TRIP_S = 60.0, 0.02
POD_IP = "127.0.0.1"
PATIENCE_S = 300.0
LOOK_S, QUIET_CORES = 1.0, 0.2
"""An operator that takes less in two looks has nothing left to do but polls, renewals and resyncs."""


class OperatorProcess:
    """Run ``python -m dlrm_operator`` against a double, and read what its process takes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = psutil.Process(process.pid)

    @property
    def cpu_s(self) -> float:
        """Return its processor time so far, without that of its planner."""
        times = self._process.cpu_times()
        return times.user + times.system

    @property
    def peak_rss_mib(self) -> float:
        """Return its largest resident memory so far; getrusage would count its parent's before exec."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024

    @property
    def planner_rss_mib(self) -> float:
        """Return the resident memory of its planner, which runs in a process of its own."""
        return sum(child.memory_info().rss for child in self._process.children()) / 2**20

    def settle(self) -> float:
        """Return its processor time once it has nothing left to do.

        Raises:
            TimeoutError: it is still busy after five minutes.
        """
        quiet, before, deadline = 0, self.cpu_s, time.monotonic() + PATIENCE_S
        while quiet < 2:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the operator is still busy after {PATIENCE_S:g} s")
            time.sleep(LOOK_S)
            before, spent_s = self.cpu_s, self.cpu_s - before
            quiet = quiet + 1 if spent_s < QUIET_CORES * LOOK_S else 0
        return before


@contextmanager
def operator_of(api: ApiDouble) -> Iterator[OperatorProcess]:
    """Start an operator that calls ``api``."""
    with tempfile.TemporaryDirectory() as folder, Path(folder, "log").open("wb") as log:
        config = Path(folder, "kubeconfig")
        config.write_text(api.kubeconfig())
        command = [sys.executable, "-m", "dlrm_operator", "--address", LOOPBACK, "--port", "0"]
        process = subprocess.Popen(command, env={**os.environ, "KUBECONFIG": str(config)}, stderr=log)
        try:
            yield OperatorProcess(process)
        finally:
            process.terminate()
            process.wait(PATIENCE_S)


def pods(is_quick: bool) -> Iterator[Result]:
    """List the pods of jobs that do not exist: what the cache of pods alone takes."""
    with _started(is_quick, has_jobs=False) as (api, operator):
        part = api.jobs / JOBS
        relist_s, start_s = _relist(api, operator, QUICK_RELISTS if is_quick else RELISTS)
        peak_mib, setting = operator.peak_rss_mib, {"pods": api.jobs * PODS}
    limit_mib = FIRST_RSS_MIB + (MAX_RSS_MIB - FIRST_RSS_MIB) * part
    yield Result(metric="peak_rss_mib", value=peak_mib, limit=limit_mib, setting=setting)
    measured, limit_s = {"start_cpu_s": start_s}, MAX_RELIST_S * part
    yield Result(metric="relist_cpu_s", value=relist_s, limit=limit_s, setting=setting, measured=measured)


def jobs(is_quick: bool) -> Iterator[Result]:
    """Start an operator that leads jobs of 26 tables: it polls all, writes their statuses, and lists pods again."""
    with _started(is_quick, has_jobs=True) as (api, operator):
        relist_s, start_s = _relist(api, operator, QUICK_RELISTS if is_quick else RELISTS)
        peak_mib, planner_mib = operator.peak_rss_mib, operator.planner_rss_mib
        setting = {"jobs": api.jobs, "pods": api.jobs * PODS, "tables": TABLES}
    measured = {"operator": peak_mib, "planner": planner_mib}
    total_mib = peak_mib + planner_mib
    yield Result(metric="peak_rss_mib", value=total_mib, limit=CONTAINER_MIB, setting=setting, measured=measured)
    measured = {"start_cpu_s": start_s}
    yield Result(metric="relist_cpu_s", value=relist_s, limit=MAX_RELIST_S, setting=setting, measured=measured)


@contextmanager
def _started(is_quick: bool, *, has_jobs: bool) -> Iterator[tuple[ApiDouble, OperatorProcess]]:
    count = JOBS // 10 if is_quick else JOBS
    with (
        progress_pods() as pod_ip,
        ApiDouble(count, PODS, pod_ip, has_jobs=has_jobs) as api,
        operator_of(api) as operator,
    ):
        tell(f"operator: lists of {count * PODS} pods, {api.pod_bytes / 1e3:.1f} kB each")
        yield api, operator


def _relist(api: ApiDouble, operator: OperatorProcess, times: int) -> tuple[float, float]:
    """Return the processor time of the slowest relist, and that until the operator was ready for the first."""
    api.wait_for_pod_watch(PATIENCE_S)
    start_s = before_s = operator.settle()
    relists_s = []
    for _ in range(times):
        api.expire_pods()
        api.wait_for_pod_watch(PATIENCE_S)
        now_s = operator.settle()
        relists_s.append(now_s - before_s)
        before_s = now_s
    return max(relists_s), start_s


def polls(is_quick: bool) -> Iterator[Result]:
    """Poll jobs at a steady rate: processor time of a process that only polls, for two requests to a pod each."""
    seconds = POLLED_S / 10 if is_quick else POLLED_S
    tell(f"operator: {POLLS_PER_S} polls per second for {seconds:g} s")
    context = multiprocessing.get_context("spawn")
    with progress_pods() as pod_ip:
        pipe, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run_polls, args=(pod_ip, seconds, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            done, elapsed_s, cpu_s = pipe.recv()
        finally:
            process.kill()
            process.join()
    setting = {"jobs": JOBS, "polls_per_s": POLLS_PER_S}
    measured = {"polls_per_s": done / elapsed_s}
    cores = cpu_s / done * POLLS_PER_S
    yield Result(metric="cores", value=cores, limit=MAX_CORES, setting=setting, measured=measured)


def _run_polls(pod_ip: str, seconds: float, pipe: Connection) -> None:
    tune_collector()
    pipe.send(asyncio.run(_poll(pod_ip, seconds)))


async def _poll(pod_ip: str, seconds: float) -> tuple[int, float, float]:
    """Give jobs new pods, which are polled at once; return polls done, seconds, and seconds of processor time."""
    woken: list[JobKey] = []
    poller = Poller(INTERVAL_S, woken.append)
    keys = [JobKey("space", f"job-{number}") for number in range(JOBS)]
    for number, key in enumerate(keys):
        poller.follow(key, Target(f"first-{number}", pod_ip))
    polling = asyncio.create_task(poller.run())
    while len(woken) < JOBS:
        await asyncio.sleep(0.05)
    woken.clear()
    began, cpu_s = time.monotonic(), time.process_time()
    for turn in range(int(seconds / SCHEDULE_INTERVAL_S)):
        await asyncio.sleep(began + turn * SCHEDULE_INTERVAL_S - time.monotonic())
        size = int(POLLS_PER_S * SCHEDULE_INTERVAL_S)
        for number in range(turn * size, (turn + 1) * size):
            poller.follow(keys[number % JOBS], Target(f"pod-{number}", pod_ip))
    await asyncio.sleep(began + seconds - time.monotonic())
    spent = len(woken), time.monotonic() - began, time.process_time() - cpu_s
    polling.cancel()
    return spent


def suspend(is_quick: bool) -> Iterator[Result]:  # noqa: ARG001  simulated time costs little
    """Suspend jobs at once among running ones: simulated seconds from each commit to the answer that tells of it."""
    poller, draw = Poller(INTERVAL_S, lambda _: None), random.Random(0)
    keys = [JobKey("space", f"job-{number}") for number in range(JOBS)]
    targets = [Target(f"uid-{number}", POD_IP) for number in range(JOBS)]
    for key, target in zip(keys, targets, strict=True):
        poller.follow(key, target)
    committed = {key: SUSPENDED_AT_S + draw.uniform(0, COMMITS_WITHIN_S) for key in draw.sample(keys, SUSPENDED)}
    now, heard, polls, is_suspended = 0.0, dict[JobKey, float](), 0, False
    while len(heard) < SUSPENDED:
        if now >= SUSPENDED_AT_S and not is_suspended:
            for key, target in zip(keys, targets, strict=True):
                if key in committed:
                    poller.follow(key, Target(target.pod_uid, POD_IP, waits_for_commit=True))
            is_suspended = True
        due, began = list(poller.take_due(now)), now
        for number, key in enumerate(due):
            now = began + ROUND_TRIP_S * (1 + number // PARALLEL_REQUESTS)
            if is_suspended:
                polls += 1
                if key in committed and key not in heard and now >= committed[key]:
                    heard[key] = now - committed[key]
                    poller.follow(key, None)
        now = max(now, began + SCHEDULE_INTERVAL_S)
    delays = np.array(list(heard.values()))
    setting = {"jobs": JOBS, "suspended": SUSPENDED, "commits_within_s": COMMITS_WITHIN_S, "round_trip_s": ROUND_TRIP_S}
    measured = {
        "median": float(np.median(delays)),
        "max": float(delays.max()),
        "polls_per_s": polls / (now - SUSPENDED_AT_S),
    }
    p99_s = float(np.percentile(delays, 99))
    yield Result(metric="commit_heard_s_p99", value=p99_s, limit=MAX_COMMIT_S, setting=setting, measured=measured)
