"""The plan's reasons, in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import RankPlan
from dlrm_api.tiers import Tier
from dlrm_planner.memory import Limit, human
from dlrm_planner.placement import Placement
from dlrm_planner.question import Question, Solution
from dlrm_planner.tables import Tables

NAMES_SHOWN = 5
MOST_RANKS = 8
"""Ranks that are named one by one."""
SETS_THE_PACE = 1.05
"""A shard that costs so many times the mean of a rank is named."""


def explain(
    spec: DLRMJobSpec,
    found: Solution,
    asked: Question,
    ranks: Sequence[RankPlan],
    handoff: Sequence[int],
    policy_rule: str,
) -> tuple[str, ...]:
    """Why the plan is as it is: where ranks compute, sharding, balance, tiers, hand-off, memory."""
    tables, placement = found.tables, found.placement
    reasons = [
        f"{spec.world_size} ranks on {_count(spec.replicas, 'node')}: {_count(len(placement.whole), 'table')} whole on "
        "one rank each, "
        f"{len(placement.splits)} split over several, {len(placement.replicated)} replicated on every rank",
        *_device(found),
        *_sharding(spec, tables, placement),
        *_splits(spec, tables, placement),
        *_balance(spec, found),
        *_tiers(spec, found),
        *([policy_rule] if policy_rule else []),
        *_handoff(spec, found, handoff),
        *_device_memory(asked, ranks),
        _memory(spec, asked.limit, ranks),
    ]
    return tuple(reasons)


def _device(found: Solution) -> list[str]:
    if found.device == "cpu":
        return []
    host = [] if found.stacks is None else found.placement.shards.table[~found.stacks.on_device].tolist()
    reasons = ["ranks compute on GPUs, one for each process: dense parameters, replicas and slots lie in HBM"]
    if tables := list(dict.fromkeys(host)):
        reasons.append(f"on the host, as they are pinned, and looked up there: {_names(found.tables, tables)}")
    return reasons


def _sharding(spec: DLRMJobSpec, tables: Tables, placement: Placement) -> list[str]:
    reasons = []
    asked = [i for i in placement.replicated if (pin := tables.specs[i].pin) and pin.sharding == "data"]
    chosen = [i for i in placement.replicated if i not in set(asked)]
    if chosen:
        reasons.append(f"replicated because all-reducing their gradient moves fewer bytes: {_names(tables, chosen)}")
    if asked:
        reasons.append(f"replicated because pinned to data: {_names(tables, asked)}")
    if spec.world_size == 1 and any(t.pin is not None and t.pin.sharding == "data" for t in tables.specs):
        reasons.append("pins to sharding data mean nothing on one rank: its replica is the whole table")
    bound = [i for i in placement.whole if (pin := tables.specs[i].pin) and pin.ranks]
    if bound:
        reasons.append(f"on the ranks that they are pinned to: {_names(tables, bound)}")
    return reasons


def _splits(spec: DLRMJobSpec, tables: Tables, placement: Placement) -> list[str]:
    """How tables are split, over which ranks and why."""
    reasons = []
    shown = dict(list(placement.splits.items())[:NAMES_SHOWN])
    for i, split in shown.items():
        how = "by columns" if split.kind == "column" else "by rows"
        if split.kind == "table-row":
            how += f" inside node {split.ranks[0] // spec.trainer.processes_per_replica}"
        reasons.append(f"table {tables.specs[i].name} is split {how} over {_ranks(split.ranks)}: {split.why}")
    if more := len(placement.splits) - len(shown):
        reasons.append(f"{_count(more, 'more table')} {'is' if more == 1 else 'are'} split: see the plan's shards")
    return reasons


def _ranks(ranks: Sequence[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    if len(ordered) > MOST_RANKS:
        return f"{len(ordered)} ranks from {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def _balance(spec: DLRMJobSpec, found: Solution) -> list[str]:
    placement, shards = found.placement, found.placement.shards
    if spec.world_size == 1:
        return []
    figures = ", ".join(f"{name} {value:.4f}" for name, value in placement.imbalance.items())
    reasons = [
        f"placed by {placement.method}; largest over mean cost (rows read, bytes exchanged) of a rank: {figures}"
    ]
    cost = shards.cost(found.costs)
    mean = float(cost.sum()) / spec.world_size
    if len(cost) and cost.max() > SETS_THE_PACE * mean > 0:
        largest = int(np.argmax(cost))
        part = "alone" if shards.kinds[largest] == "table" else "with one of its shards"
        reasons.append(
            f"table {shards.spec(largest).name} {part} costs {cost.max() / mean:.2f} times the mean of a rank: it sets "
            "the pace"
        )
    return reasons


def _tiers(spec: DLRMJobSpec, found: Solution) -> list[str]:
    """Where the rows of stacks live, and what share of their accesses each tier serves, by group of like tables."""
    reuse, shards, groups = found.reuse, found.placement.shards, dict[tuple[Tier, ...], list[int]]()
    if reuse is None or not found.levels:
        return []
    reasons = []
    for i, levels in sorted(found.levels.items()):
        groups.setdefault(tuple(tier for tier, _ in levels.each) if levels.below else (), []).append(i)
    if in_hbm := groups.pop((), []):
        named = list(dict.fromkeys(shards.table[in_hbm].tolist()))
        reasons.append(f"{_count(len(named), 'table')} whole in HBM: {_names(found.tables, named)}")
    for (first, *below), group in groups.items():
        rows = sum(int(shards.rows[i]) for i in group)
        accesses = max(sum(float(reuse.accesses[i]) for i in group), 1e-300)
        slots = sum(found.levels[i].slots for i in group)
        hits = sum(reuse.hits_at(i, found.levels[i].slots) for i in group)
        served = f"which are expected to serve {hits / accesses:.1%} of accesses"
        kept = [f"{slots / rows:.1%} in slots in {first.upper()}, {served}"]
        for place, tier in enumerate(below):
            held = sum(found.levels[i].below[place][1] for i in group)
            kept.append(f"room for {held / rows:.1%} in {tier}")
        tables = list(dict.fromkeys(shards.table[group].tolist()))
        names = _names(found.tables, tables)
        reasons.append(f"{_count(len(tables), 'table')} with levels, {names}: of {rows} rows {', '.join(kept)}")
    whole = len(found.tables.specs) - len(set(shards.table[list(found.levels)].tolist()))
    if whole and found.device == "cpu":
        reasons.append(f"{_count(whole, 'table')} whole in DDR: there a byte spares most reads of slower tiers")
    if not found.stacked:
        return reasons
    ahead = spec.trainer.cache.lookahead
    reasons.append(
        f"rows are fetched {_count(ahead, 'batch')} ahead: slots hold at least the distinct rows expected of "
        f"{_count(ahead + 1, 'batch')}"
    )
    return reasons


def _handoff(spec: DLRMJobSpec, found: Solution, handoff: Sequence[int]) -> list[str]:
    budget = found.tables.handoff_budget
    if budget is None or spec.checkpoint.handoff_budget is not None or budget not in handoff:
        return []
    return [
        f"cuts are handed over in slices: {human(budget)} of shared memory a pod, because full cuts have no room "
        "beside the tables"
    ]


def _device_memory(asked: Question, ranks: Sequence[RankPlan]) -> list[str]:
    if asked.device == "cpu":
        return []
    fullest = max(ranks, key=lambda rank: rank.bytes_per_tier["hbm"])
    taken = f"rank {fullest.rank} takes most of its GPU, {human(fullest.bytes_per_tier['hbm'])} in all"
    if asked.hbm is None:
        return [
            f"{taken}; not checked against memory: neither devices of a HardwareProfile nor trainer.tierBudgets.hbm"
        ]
    return [f"{taken}; tables have {human(asked.hbm.size)} of it: {asked.hbm.source}"]


def _memory(spec: DLRMJobSpec, limit: Limit | None, ranks: Sequence[RankPlan]) -> str:
    pods = np.zeros(spec.replicas)
    for rank in ranks:
        pods[rank.node] += rank.bytes_per_tier["ddr"]
    fullest = int(np.argmax(pods))
    taken = f"node {fullest} holds most, {human(int(pods[fullest]))} of tables and hand-off"
    if limit is None:
        givers = "HardwareProfile, trainer.tierBudgets.ddr or trainer.resources.limits.memory"
        return f"{taken}; not checked against memory: no {givers} is given"
    return f"{taken}, of {human(limit.size)}: {limit.source}"


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def _names(tables: Tables, indices: Sequence[int]) -> str:
    shown = ", ".join(tables.specs[i].name for i in indices[:NAMES_SHOWN])
    return shown if len(indices) <= NAMES_SHOWN else f"{shown} and {len(indices) - NAMES_SHOWN} more"
