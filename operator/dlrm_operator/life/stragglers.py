"""Ranks that keep the others waiting: named, never restarted for."""

from __future__ import annotations

from dlrm_api.progress import SlowestRank
from dlrm_api.status import StragglerStatus
from dlrm_operator.facts.gang import Gang

RATIO = 1.5
"""A rank lags whose own time of a step is so many times the median of the others'."""
LEAST_S = 0.001
"""And longer than it by this: below, clocks and schedulers decide."""
FOR_S = 300.0
"""It is named once it has lagged for so long."""


def lags(slowest: SlowestRank) -> bool:
    """Whether the slowest rank is far slower than the others."""
    more = slowest.seconds - slowest.median_seconds
    return slowest.seconds >= RATIO * slowest.median_seconds and more >= LEAST_S


def straggler(gang: Gang) -> StragglerStatus | None:
    """The rank that has kept the others waiting for long, with the pod and the node that it is on."""
    said = gang.trainer
    if said is None or said.slowest is None or not gang.size or gang.slow_s < FOR_S or not lags(said.slowest):
        return None
    pod = gang.pods.get(said.slowest.rank * gang.size // said.world_size)
    if pod is None:
        return None
    return StragglerStatus(
        rank=said.slowest.rank,
        pod=pod.name,
        node=pod.node,
        seconds=said.slowest.seconds,
        median_seconds=said.slowest.median_seconds,
    )


def straggler_words(found: StragglerStatus) -> str:
    """Who it is; without figures, which change all the time."""
    return (
        f"rank {found.rank} in pod {found.pod} on node {found.node} has kept the others waiting for long: its own part "
        f"of a step takes over {RATIO:g} times theirs (status.progress.straggler); look at that node, or at the plan"
    )
