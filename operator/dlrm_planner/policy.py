"""Which row leaves the slots: what the user says, or what the traces speak for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from dlrm_api.job import DLRMJobSpec
from dlrm_api.trace import TableTrace
from dlrm_planner.question import Solution

Policy = Literal["lru", "lfu", "mixed"]
CLEARLY = 0.05
"""Share of accesses by which the most frequent rows must beat the most recent ones before they count as well."""


def choose_policy(spec: DLRMJobSpec, found: Solution, traces: Mapping[str, TableTrace]) -> tuple[Policy, str]:
    """One policy for all tables with levels, which share slots, and the rule in words; empty where there are none.

    Traced tables are asked what share of accesses their most recent rows would serve (the measured curve), and what
    share their most frequent ones (the histogram). LRU follows what changes, so it must be clearly worse to lose.
    """
    if not found.stacked or found.reuse is None:
        return "lru", ""
    policy = spec.trainer.cache.policy
    if policy != "auto":
        return policy, f"rows leave the slots by {policy}, as trainer.cache.policy says"
    recent = frequent = total = 0.0
    shards = found.placement.shards
    for i, levels in found.stacked.items():
        trace = traces.get(shards.spec(i).name)
        if trace is None or not trace.histogram:
            continue
        total += float(found.reuse.accesses[i])
        recent += found.reuse.hits_at(i, levels.slots)
        frequent += _frequent(trace, levels.slots, float(found.reuse.accesses[i]), float(shards.share[i]))
    if total == 0:
        return "lru", "rows leave the slots by lru: no table with levels has a trace that speaks for anything else"
    figures = f"the traced tables' most recent rows serve {recent / total:.1%} of accesses, their most frequent ones "
    figures += f"{frequent / total:.1%}"
    if frequent - recent > CLEARLY * total:
        return "mixed", f"rows leave the slots by mixed: {figures}, which is over {CLEARLY:.0%} more"
    return "lru", f"rows leave the slots by lru: {figures}, which is not over {CLEARLY:.0%} more"


def _frequent(trace: TableTrace, slots: int, accesses: float, part: float) -> float:
    """Accesses of a step that the ``slots`` most looked up rows would serve, of a shard with ``part`` of the rows."""
    rows = part * np.array([each.rows for each in trace.histogram], np.float64)
    lookups = part * np.array([each.lookups for each in trace.histogram], np.float64)
    batches = part * trace.accesses / max(accesses, 1e-300)  # of today's size, in the whole trace
    mean = lookups / np.maximum(rows, 1e-300)
    once = -np.expm1(-mean / max(batches, 1.0)) * rows  # accesses of a step, if lookups come evenly
    order = np.argsort(-mean, kind="stable")
    before = np.cumsum(rows[order]) - rows[order]
    share = np.clip((slots - before) / np.maximum(rows[order], 1e-300), 0, 1)
    scale = accesses / max(float(once.sum()), 1e-300)
    return float((share * once[order]).sum()) * scale
