"""Says why no placement fits, by how many bytes, and what would mend it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import HardwareProfile
from dlrm_planner.costs import read_costs
from dlrm_planner.dense import held_samples
from dlrm_planner.memory import MIB, MOST_DDR, Limit, human, pod_limit
from dlrm_planner.needs import NoPlacement
from dlrm_planner.search import Question, Refusal, solved
from dlrm_planner.sharding import may_split
from dlrm_planner.tiering import Short

MOST_BLOCK = 2**55


def infeasible(
    asked: Question, profile: HardwareProfile | None, refusal: Refusal, grows: str = "trainer.replicas"
) -> InfeasiblePlanError:
    """The error whose reasons name the table, the rank, the node, the bytes that are missing, and the mends.

    Args:
        asked: what has no answer.
        profile: of the nodes.
        refusal: why.
        grows: the field that a larger gang is asked for by.
    """
    cause = refusal.cause
    if isinstance(cause, Short):
        reasons = [_tier_shortfall(asked, cause), *_tier_mends(asked, cause)]
    else:
        reasons = [_shortfall(asked, refusal, cause)]
    if (limit := asked.limit) is not None:
        reasons.insert(1, f"a pod has {max(0, limit.size)} bytes for tables: {limit.source}")
        more = _enough_memory(asked, limit, _missing(cause))
        if more is not None:
            reasons.append(f"mend: raise {limit.field} by {more} bytes ({human(more)})")
    reasons.extend(_fewer_activations(asked, profile))
    reasons.extend(_other_mends(asked, refusal))
    if isinstance(cause, NoPlacement):
        reasons.extend(_unpinned(asked, cause))
    replicas = _enough_replicas(asked, profile)
    if replicas is not None:
        reasons.append(f"mend: {grows}: {replicas} of the same hardware hold all tables")
    else:
        reasons.append(f"more replicas do not help: {_bound(asked, cause)}")
    return InfeasiblePlanError("spec.trainer", reasons)


def _shortfall(asked: Question, refusal: Refusal, cause: NoPlacement) -> str:
    table, limit = asked.tables.specs[cause.table], asked.limit
    where = f"rank {cause.rank} on node {cause.rank // asked.spec.trainer.processes_per_replica}"
    what = f"table {table.name} ({table.rows} rows x {table.dim})"
    if cause.room < 0 and limit is not None:
        return (
            f"{what} does not fit on {where}: replicated tables, the hand-off and buffers already take "
            f"{limit.size - cause.room} bytes there, {-cause.room} bytes more than the pod has"
        )
    batches = asked.spec.trainer.cache.lookahead + 1
    if refusal.least:
        form = (
            f"with slots for {refusal.least} rows, those of {batches} batches in flight, a scratch pad, and the map of "
            "all rows"
        )
    else:
        form = "with row state and hand-off" if refusal.full_cut else "with row state"
    beside = "" if cause.alone else " left beside other tables"
    if cause.spread:
        return (
            f"{what} does not fit, not even split over the ranks of {cause.spread} nodes: {form} it takes {cause.held} "
            f"bytes, and {cause.room} bytes are free on all of them together{beside}: {cause.held - cause.room} bytes "
            "short"
        )
    return (
        f"{what} does not fit on {where}, the roomiest that it may go to: {form} it takes {cause.held} bytes, and "
        f"{cause.room} bytes are free{beside}: {cause.held - cause.room} bytes short"
    )


def _tier_shortfall(asked: Question, cause: Short) -> str:
    tiers = ", ".join(f"{tier} {human(size)}" for tier, size in asked.caps.items())
    return (
        f"rows that DDR does not hold do not fit the slower tiers of a pod ({tiers}): {cause.tier} is "
        f"{cause.missing} bytes ({human(cause.missing)}) short"
    )


def _tier_mends(asked: Question, cause: Short) -> Iterator[str]:
    """More of the tier that is short; where its size comes from is for the user to know: budget or profile."""
    has = asked.caps[cause.tier]

    def fits(more: int) -> bool:
        return solved(replace(asked, caps={**asked.caps, cause.tier: has + more * MIB}))

    if (more := _least(fits, MOST_BLOCK // MIB, -(-cause.missing // MIB))) is not None:
        size = has + more * MIB
        yield (
            f"mend: {cause.tier} of {size} bytes ({human(size)}) a pod: trainer.tierBudgets.{cause.tier}, and the "
            f"profile's tiers.{cause.tier}.bytes where hardware is named"
        )


def _other_mends(asked: Question, refusal: Refusal) -> Iterator[str]:
    """A slower tier where there is none; fewer batches ahead where slots for them have no room."""
    cache = asked.spec.trainer.cache
    if not asked.caps:
        rest = (
            sum(size.resident for size in asked.tables.whole)
            - max(0, asked.limit.size if asked.limit else 0) * asked.spec.replicas
        )
        start = max(1, rest // asked.spec.replicas // MIB)
        size = _least(lambda size: solved(replace(asked, caps={"block": size * MIB})), MOST_BLOCK // MIB, start)
        if size is not None:
            yield (
                f"mend: trainer.tierBudgets.block: {size * MIB} ({human(size * MIB)}) puts rows that DDR does not hold "
                "on block storage; in a cluster, name hardware whose profile mounts it"
            )
    elif refusal.least and cache.lookahead > 0:
        shorter = cache.model_copy(update={"lookahead": 0})
        trainer = asked.spec.trainer.model_copy(update={"cache": shorter})
        if solved(replace(asked, spec=asked.spec.model_copy(update={"trainer": trainer}))):
            yield "mend: trainer.cache.lookahead: 0 needs slots for one batch alone, and hides no reads"


def _missing(cause: NoPlacement | Short) -> int:
    """Bytes that each pod lacks at least."""
    if isinstance(cause, Short):
        return 1
    return -(-(cause.held - cause.room) // max(1, cause.spread))


def _bound(asked: Question, cause: NoPlacement | Short) -> str:
    """Why a larger gang does not hold the tables."""
    if isinstance(cause, NoPlacement) and cause.room >= 0:
        table = asked.tables.specs[cause.table]
        if table.pin is not None and (table.pin.ranks or not may_split(table)):
            return f"table {table.name} stays where its pin puts it, and is split no further"
    most = asked.spec.most_replicas
    return f"{most} are the most that data.virtualShards {asked.spec.data.virtual_shards} allows, and too few"


def _unpinned(asked: Question, cause: NoPlacement) -> Iterator[str]:
    """Leaving a table to the planner, which may split it, where that is enough."""
    table = asked.tables.specs[cause.table]
    if table.pin is None or not (table.pin.sharding or table.pin.ranks) or cause.room < 0:
        return
    free = table.model_copy(update={"pin": table.pin.model_copy(update={"sharding": None, "ranks": ()})})
    specs = tuple(free if i == cause.table else each for i, each in enumerate(asked.tables.specs))
    if solved(replace(asked, tables=replace(asked.tables, specs=specs))):
        names = [name for name in ("sharding", "ranks") if getattr(table.pin, name)]
        yield (
            f"mend: leave out {' and '.join(f'{asked.tables.paths[cause.table]}.pin.{name}' for name in names)}: the "
            "planner then splits the table over nodes"
        )


def _enough_memory(asked: Question, limit: Limit, short: int) -> int | None:
    """Bytes to add to each pod, to within a MiB, after which all tables fit at this number of replicas."""

    def fits(more: int) -> bool:
        return solved(replace(asked, limit=Limit(limit.size + more * MIB, limit.source, limit.field)))

    more = _least(fits, (MOST_DDR - limit.size) // MIB, -(-short // MIB))
    return None if more is None else more * MIB


def _fewer_activations(asked: Question, profile: HardwareProfile | None) -> Iterator[str]:
    """A micro batch, as large as halving finds one, whose activations leave enough of a pod's memory to tables."""
    held, limit = held_samples(asked.spec), asked.limit

    def in_pieces(pieces: int) -> Question:
        training = asked.spec.training.model_copy(update={"micro_batch_size": -(-held // pieces)})
        spec = asked.spec.model_copy(update={"training": training})
        return replace(asked, spec=spec, limit=pod_limit(spec, profile, asked.reserve))

    least = in_pieces(held)
    if limit is None or least.limit is None or least.limit.size <= limit.size or not solved(least):
        return  # a budget of tables alone, or too little even so
    pieces = _least(lambda pieces: solved(in_pieces(pieces)), held)
    assert pieces is not None, "one sample at a time is enough"
    yield f"mend: training.microBatchSize: {-(-held // pieces)} holds the activations of so many samples at a time"


def _enough_replicas(asked: Question, profile: HardwareProfile | None) -> int | None:
    """A larger number of replicas at which all tables fit, as small as halving finds one."""
    spec = asked.spec
    most = asked.spec.most_replicas - spec.replicas

    def fits(more: int) -> bool:
        wider = spec.with_replicas(spec.replicas + more)
        limit = pod_limit(wider, profile, asked.reserve)
        return solved(replace(asked, spec=wider, limit=limit, costs=read_costs(wider, profile)))

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
