"""How soon the operator hears of commits when many jobs are suspended at once, in simulated time."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Result
from dlrm_operator.clients.pod_requests import PARALLEL_REQUESTS
from dlrm_operator.clients.progress import SCHEDULE_INTERVAL_S, Poller, Target
from dlrm_operator.reconcile.state import JobKey

JOBS, SUSPENDED, MAX_COMMIT_S = 5_000, 1_000, 10.0
INTERVAL_S = 10.0
SUSPENDED_AT_S = 600.0
"""By then every job has been polled."""
COMMITS_WITHIN_S, ROUND_TRIP_S = 60.0, 0.02
POD_IP = "127.0.0.1"


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
