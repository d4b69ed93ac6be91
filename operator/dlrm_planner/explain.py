"""The plan's reasons, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_api.plan import RankPlan
from dlrm_api.tables import TablePin
from dlrm_api.tiers import Tier, claim_bytes
from dlrm_planner.enumerate import may_split
from dlrm_planner.memory import MIB, MOST_DDR, NODE_DDR, Limit, human
from dlrm_planner.partition import Placement
from dlrm_planner.question import Question, Refusal, Solution, changed
from dlrm_planner.search import solved
from dlrm_planner.tables import Tables, held_samples
from dlrm_planner.tiers import Short
from dlrm_planner.types import NoPlacement

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


MOST_BLOCK = 2**55
LEAST_READ_AHEAD = 64 * MIB
"""Readers of files are told to hold no less: they would decode the same row groups again and again."""


def infeasible(asked: Question, refusal: Refusal, grows: str | None) -> InfeasiblePlanError:
    """The error whose reasons name the table, the rank, the node, the bytes that are missing, and the mends.

    Args:
        asked: what has no answer.
        refusal: why.
        grows: the field that a larger gang is asked for by; None where its pods would share one machine.
    """
    cause = refusal.cause
    if isinstance(cause, Short):
        reasons = [_tier_shortfall(asked, cause), *_tier_mends(asked, cause)]
    else:
        reasons = [_shortfall(asked, refusal, cause)]
    if (limit := _limit_of(asked, cause)) is not None:
        whose = "a rank" if cause.tier == "hbm" else "a pod"
        reasons.insert(1, f"{whose} has {max(0, limit.size)} bytes for tables: {limit.source}")
        more = _enough_memory(asked, limit, _missing(cause), cause.tier)
        if more is not None:
            reasons.append(f"mend: {_raised(limit, limit.size + more, shared=not grows)}")
    reasons.extend(_fewer_activations(asked, cause))
    reasons.extend(_less_read_ahead(asked, cause))
    reasons.extend(_other_mends(asked, refusal, shared=not grows))
    if isinstance(cause, NoPlacement):
        reasons.extend(_unpinned(asked, cause))
    replicas = _enough_replicas(asked) if grows else None
    if not grows:
        reasons.append("more replicas do not help: they share this machine's memory")
    elif replicas is not None:
        reasons.append(f"mend: {grows}: {replicas} of the same hardware hold all tables")
    else:
        reasons.append(f"more replicas do not help: {_bound(asked, cause)}")
    if not any(reason.startswith("mend: ") for reason in reasons):
        reasons.append(f"no one change is enough: with all the {cause.tier} there may be, something else is too small")
    return InfeasiblePlanError("spec.trainer", reasons)


def _limit_of(asked: Question, cause: NoPlacement | Short) -> Limit | None:
    """The limit that is too tight, or that of DDR where it is a slower tier's."""
    return asked.hbm if cause.tier == "hbm" else asked.limit


def _shortfall(asked: Question, refusal: Refusal, cause: NoPlacement) -> str:
    table, limit = asked.tables.specs[cause.table], _limit_of(asked, cause)
    where = f"rank {cause.rank} on node {cause.rank // asked.spec.trainer.processes_per_replica}"
    what = f"table {table.name} ({table.rows} rows x {table.dim})"
    if cause.room < 0 and limit is not None and cause.tier == "hbm":
        return (
            f"{what} does not fit on the GPU of {where}: replicated tables and what else a step needs already "
            f"take {-cause.room} bytes more than it has"
        )
    if cause.room < 0 and limit is not None:
        return (
            f"{what} does not fit on {where}: replicated tables, the hand-off and buffers already take "
            f"{limit.size - cause.room} bytes there, {-cause.room} bytes more than the pod has"
        )
    batches = asked.spec.trainer.cache.lookahead + 1
    if refusal.least and table.pin is not None and table.pin.tier == "hbm":
        form = "with all rows, as it is pinned,"
    elif refusal.least and cause.tier == "hbm":
        form = f"with slots for {refusal.least} rows and for all lookups that {batches + 1} batches in flight can make"
    elif refusal.least:
        form = (
            f"with slots for {refusal.least} rows, those of {batches} batches in flight, a scratch pad, and the map of "
            "all rows"
        )
    else:
        form = "with row state and hand-off" if refusal.full_cut else "with row state"
    beside = "" if cause.alone else " left beside other tables"
    if cause.spread:
        over = f"GPUs of {cause.spread} ranks" if cause.tier == "hbm" else f"ranks of {cause.spread} nodes"
        return (
            f"{what} does not fit, not even split over the {over}: {form} it takes {cause.held} "
            f"bytes, and {cause.room} bytes are free on all of them together{beside}: {cause.held - cause.room} bytes "
            "short"
        )
    on = f"the GPU of {where}" if cause.tier == "hbm" else where
    return (
        f"{what} does not fit on {on}, the roomiest that it may go to: {form} it takes {cause.held} bytes, and "
        f"{cause.room} bytes are free{beside}: {cause.held - cause.room} bytes short"
    )


def _tier_shortfall(asked: Question, cause: Short) -> str:
    if cause.tier == "ddr":
        return (
            f"rows that HBM does not hold, and what is known of them, do not fit DDR: it is {cause.missing} bytes "
            f"({human(cause.missing)}) short"
        )
    tiers = ", ".join(f"{tier} {human(size)}" for tier, size in asked.caps.items())
    return (
        f"rows that DDR does not hold do not fit the slower tiers of a pod ({tiers}): {cause.tier} is "
        f"{cause.missing} bytes ({human(cause.missing)}) short"
    )


def _tier_mends(asked: Question, cause: Short) -> Iterator[str]:
    """More of the tier that is short; where its size comes from is for the user to know: budget or profile."""
    if (tier := cause.tier) == "ddr":
        return  # as where a table does not fit
    has = asked.caps[tier]

    def fits(more: int) -> bool:
        return solved(replace(asked, caps={**asked.caps, tier: has + more * MIB}))

    if (more := _least(fits, MOST_BLOCK // MIB, -(-cause.missing // MIB))) is not None:
        size = has + more * MIB
        node: TierSpec | None = getattr(asked.profile.spec.tiers, tier) if asked.profile else None
        claimed = f" ({claim_bytes(size)} of them: it is claimed with a file system)"
        yield (
            f"mend: {tier} of {size} bytes ({human(size)}) a pod: trainer.tierBudgets.{tier}, and the "
            f"profile's tiers.{tier}.bytes{claimed if node and node.storage_class else ''} where hardware is named"
        )


def _other_mends(asked: Question, refusal: Refusal, *, shared: bool) -> Iterator[str]:
    """A slower tier where there is none; fewer batches ahead where slots for them have no room.

    Of pods that are ``shared`` over one machine the tier's rows lie in files of it.
    """
    if isinstance(refusal.cause, NoPlacement) and refusal.cause.tier == "hbm":
        yield from _on_host(asked, refusal.cause)
        yield from _shorter(asked, "needs slots for fewer batches")
    elif not asked.caps:
        rest = (
            sum(size.resident for size in asked.tables.whole)
            - max(0, asked.limit.size if asked.limit else 0) * asked.spec.replicas
        )
        start = max(1, rest // asked.spec.replicas // MIB)
        size = _least(lambda size: solved(replace(asked, caps={"block": size * MIB})), MOST_BLOCK // MIB, start)
        if size is not None:
            where = (
                "into files below --tier-dir"
                if shared
                else "on block storage; in a cluster, name hardware whose profile mounts it"
            )
            yield (
                f"mend: trainer.tierBudgets.block: {size * MIB} ({human(size * MIB)}) puts rows that DDR does not hold "
                f"{where}"
            )
    elif refusal.least:
        yield from _shorter(asked, "needs slots for one batch alone")


def _shorter(asked: Question, why: str) -> Iterator[str]:
    """No batches ahead, where that is enough."""
    cache = asked.spec.trainer.cache
    trainer = asked.spec.trainer.model_copy(update={"cache": cache.model_copy(update={"lookahead": 0})})
    if cache.lookahead > 0 and solved(replace(asked, spec=asked.spec.model_copy(update={"trainer": trainer}))):
        yield f"mend: trainer.cache.lookahead: 0 {why}, and hides no reads"


def _on_host(asked: Question, cause: NoPlacement) -> Iterator[str]:
    """A pin of the table to host memory, where that is enough."""
    table = asked.tables.specs[cause.table]
    if cause.room < 0 or (table.pin is not None and table.pin.sharding == "data"):
        return
    pin = (table.pin or TablePin()).model_copy(update={"tier": "ddr"})
    if solved(_with_table(asked, cause.table, table.model_copy(update={"pin": pin}))):
        yield f"mend: {asked.tables.paths[cause.table]}.pin.tier: ddr keeps the table on the host, looked up there"


def _with_table(asked: Question, i: int, table: TableSpec) -> Question:
    specs = tuple(table if k == i else each for k, each in enumerate(asked.tables.specs))
    return replace(asked, tables=replace(asked.tables, specs=specs))


def _missing(cause: NoPlacement | Short) -> int:
    """Bytes that each pod lacks at least."""
    if isinstance(cause, Short):
        return cause.missing if cause.tier == "ddr" else 1
    return -(-(cause.held - cause.room) // max(1, cause.spread))


def _bound(asked: Question, cause: NoPlacement | Short) -> str:
    """Why a larger gang does not hold the tables."""
    if isinstance(cause, NoPlacement) and cause.room >= 0:
        table = asked.tables.specs[cause.table]
        if table.pin is not None and (table.pin.ranks or not may_split(table)):
            return f"table {table.name} stays where its pin puts it, and is split no further"
    most = asked.spec.max_replicas
    return f"{most} are the most that data.virtualShards {asked.spec.data.virtual_shards} allows, and too few"


def _unpinned(asked: Question, cause: NoPlacement) -> Iterator[str]:
    """Leaving a table to the planner, which may split it, where that is enough."""
    table = asked.tables.specs[cause.table]
    if table.pin is None or not (table.pin.sharding or table.pin.ranks) or cause.room < 0:
        return
    free = table.model_copy(update={"pin": table.pin.model_copy(update={"sharding": None, "ranks": ()})})
    if solved(_with_table(asked, cause.table, free)):
        names = [name for name in ("sharding", "ranks") if getattr(table.pin, name)]
        yield (
            f"mend: leave out {' and '.join(f'{asked.tables.paths[cause.table]}.pin.{name}' for name in names)}: the "
            f"planner then splits the table over {'ranks' if cause.tier == 'hbm' else 'nodes'}"
        )


def _enough_memory(asked: Question, limit: Limit, short: int, tier: str) -> int | None:
    """Bytes to add to each pod, or to each GPU, to within a MiB, after which all tables fit on as many replicas."""

    def fits(more: int) -> bool:
        wider = replace(limit, size=limit.size + more * MIB)
        return solved(replace(asked, hbm=wider) if tier == "hbm" else replace(asked, limit=wider))

    more = _least(fits, (MOST_DDR - limit.size) // MIB, -(-short // MIB))
    return None if more is None else more * MIB


def _raised(limit: Limit, enough: int, *, shared: bool) -> str:
    """By how much each field is to be raised that holds a pod, or a GPU, below what is enough.

    Of a machine that all pods share nobody raises the memory: some of it can be freed.
    """
    below = [each for each in (limit, *limit.looser) if each.size < enough]
    fields, words = [], []
    for each in below:
        size = (enough - each.size) * each.shares
        if shared and each.field.startswith(NODE_DDR):
            words.append(f"free {size} bytes ({human(size)}) more of this machine's memory for each pod")
        else:
            fields.append(f"{each.field} by {size} bytes ({human(size)})")
    return " and ".join([*([f"raise {' and '.join(fields)}"] if fields else []), *words])


def _fewer_activations(asked: Question, cause: NoPlacement | Short) -> Iterator[str]:
    """A micro batch, as large as halving finds one, whose activations leave enough memory to tables."""
    held = held_samples(asked.spec)

    def in_pieces(pieces: int) -> Question:
        training = asked.spec.training.model_copy(update={"micro_batch_size": -(-held // pieces)})
        return changed(asked, asked.spec.model_copy(update={"training": training}))

    if (pieces := _least_that_spares(asked, cause, in_pieces, held)) is not None:
        yield f"mend: training.microBatchSize: {-(-held // pieces)} holds the activations of so many samples at a time"


def _less_read_ahead(asked: Question, cause: NoPlacement | Short) -> Iterator[str]:
    """Readers of files that hold less, as much as halving finds, where that leaves enough memory to tables."""
    held = int(asked.spec.data.prefetch_bytes)

    def without(less: int) -> Question:
        data = asked.spec.data.model_copy(update={"prefetch_bytes": held - less * MIB})
        return changed(asked, asked.spec.model_copy(update={"data": data}))

    if (less := _least_that_spares(asked, cause, without, (held - LEAST_READ_AHEAD) // MIB)) is not None:
        size = held - less * MIB
        yield f"mend: data.prefetchBytes: {size} ({human(size)}) is what each reader of files then holds ahead"


def _least_that_spares(
    asked: Question, cause: NoPlacement | Short, after: Callable[[int], Question], most: int
) -> int | None:
    """How much of a change leaves enough memory to tables; None where even the most of it does not."""
    limit, roomier = _limit_of(asked, cause), _limit_of(after(most), cause) if most > 0 else None
    if limit is None or roomier is None or roomier.size <= limit.size:
        return None  # a budget of tables alone
    return _least(lambda amount: solved(after(amount)), most) if solved(after(most)) else None


def _enough_replicas(asked: Question) -> int | None:
    """A larger number of replicas at which all tables fit, as small as halving finds one."""
    spec = asked.spec
    most = asked.spec.max_replicas - spec.replicas

    def fits(more: int) -> bool:
        return solved(changed(asked, spec.with_replicas(spec.replicas + more)))

    more = _least(fits, most) if most > 0 else None
    return None if more is None else spec.replicas + more


def _least(holds: Callable[[int], bool], most: int, start: int = 1) -> int | None:
    """A number from 1 to ``most`` for which ``holds``: the least but for one part in 128; None where there is none.

    By doubling from ``start``, then halving.
    """
    low, high = 0, max(1, min(start, most))
    while not holds(high):
        if high >= most:
            return None
        low, high = high, min(high * 2, most)
    while high - low > max(1, high // 128):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
