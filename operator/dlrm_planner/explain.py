"""Explain plans: their reasons, and why nothing fits and what would fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from dlrm_api.dimensions import SLAB_HEADROOM_DIVISOR
from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.hardware import TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import RankPlan
from dlrm_api.tiers import Tier, claim_bytes
from dlrm_planner.codecs import explain_codecs
from dlrm_planner.enumerate import may_split, pinned_to_data, required_shards
from dlrm_planner.memory import MAX_DDR, MIB, NODE_DDR, device_limit, human, pod_limit
from dlrm_planner.predict import Solution, files_s, step_requests, uncalibrated_fields
from dlrm_planner.tables import NO_PIN, Tables, held_samples
from dlrm_planner.types import Infeasible, Limit, Options, Problem, TableShortage, TierShortage
from dlrm_planner.virtual_shards import explain_virtual_shards, max_replicas

MAX_NAMED_TABLES = 5
MAX_NAMED_RANKS = 8
BOTTLENECK_RATIO = 1.05
"""A shard that takes so many times the mean of a rank is named."""
MAX_BLOCK = 2**55
MAX_TRIED_SHARDS = 2**18
"""Fixes are tried by planning some twenty times, which with more shards takes minutes."""
MIN_READ_AHEAD = 64 * MIB
"""With less, readers of files would decode the same row groups again and again."""


def explain_plan(
    found: Solution, ranks: Sequence[RankPlan], handoff: Sequence[int], policy_reason: str
) -> tuple[str, ...]:
    """Give the reasons of a plan: where ranks compute, sharding, balance, tiers, hand-off, memory."""
    problem, placement = found.problem, found.placement
    spec, tables = problem.spec, problem.tables
    whole = [i for i in np.unique(placement.shards.shapes.table).tolist() if i not in placement.options]
    return (
        f"{spec.world_size} ranks on {_count(spec.replicas, 'node')}: {_count(len(whole), 'table')} whole on one rank "
        f"each, {len(placement.options)} split over several, {len(placement.replicated)} replicated on every rank",
        *_virtual_shards(spec),
        *_data_files(problem),
        *_device(found),
        *_calibration(found),
        *_sharding(spec, tables, placement.replicated, whole),
        *_splits(spec, tables, placement.options),
        *_balance(found),
        *explain_codecs(found),
        *_directories(found),
        *_sizes(found),
        *_tiers(found),
        *([policy_reason] if policy_reason else []),
        *_handoff(problem, handoff),
        *_device_memory(problem, ranks),
        _memory(problem, ranks),
    )


def _virtual_shards(spec: DLRMJobSpec) -> Iterator[str]:
    if spec.data.virtual_shards is None:
        yield explain_virtual_shards(spec)


def _data_files(problem: Problem) -> Iterator[str]:
    if (data := problem.data) is not None and data.files:
        yield (
            f"{_count(data.files, 'data file')} of {data.rows:,} rows, {data.reads / data.files:.1f} reads each: a "
            f"rank makes {step_requests(problem):.2f} of them a step, which wait {files_s(problem) * 1e3:.2f} ms"
        )


def _device(found: Solution) -> Iterator[str]:
    if found.problem.device == "cpu":
        return
    yield "ranks compute on GPUs, one for each process: dense parameters, replicas and slots are in HBM"
    if found.tiers is None:
        return
    # A shard without levels is on the host.
    on_device = np.append(found.tiers.stacks.on_device, False)[found.tiers.group]
    if host := np.unique(found.placement.shards.table[~on_device]).tolist():
        yield f"pinned to the host, and looked up there: {_names(found.problem.tables, host)}"


def _calibration(found: Solution) -> Iterator[str]:
    if (missing := uncalibrated_fields(found)) and found.problem.profile is not None:
        yield (
            f"samples/s and price are not calibrated: HardwareProfile {found.problem.profile.metadata.name} has no "
            f"{', '.join(missing)}; measure it on a node of this kind (dlrmctl profile measure)"
        )


def _sharding(spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], whole: Sequence[int]) -> Iterator[str]:
    is_pinned = pinned_to_data(tables)
    if chosen := [i for i in replicated if not is_pinned[i]]:
        yield f"replicated because all-reducing their gradient moves fewer bytes: {_names(tables, chosen)}"
    if pinned := [i for i in replicated if is_pinned[i]]:
        yield f"replicated because pinned to data: {_names(tables, pinned)}"
    if spec.world_size == 1 and is_pinned.any():
        yield "pins to sharding data mean nothing on one rank: its replica is the whole table"
    if bound := [i for i in whole if (tables.specs[i].pin or NO_PIN).ranks]:
        yield f"on the ranks that they are pinned to: {_names(tables, bound)}"


def _splits(spec: DLRMJobSpec, tables: Tables, options: Options) -> Iterator[str]:
    for i, option in islice(options.items(), MAX_NAMED_TABLES):
        how = "by columns" if option.kind == "column" else "by rows"
        if option.kind == "table-row":
            how += f" inside node {option.ranks[0] // spec.trainer.processes_per_replica}"
        if option.kind == "grid":
            how = f"by columns over {_count(len(option.column_edges) - 1, 'node')} and by rows inside each,"
        yield f"table {tables.specs[i].name} is split {how} over {_ranks(option.ranks.tolist())}: {option.reason}"
    if (more := len(options) - MAX_NAMED_TABLES) > 0:
        yield f"{_count(more, 'more table')} {'is' if more == 1 else 'are'} split: see the plan's shards"


def _ranks(ranks: Sequence[int]) -> str:
    ordered = sorted(ranks)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"ranks {ordered[0]} to {ordered[-1]}"
    if len(ordered) > MAX_NAMED_RANKS:
        return f"{len(ordered)} ranks from {ordered[0]} to {ordered[-1]}"
    return f"ranks {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def _balance(found: Solution) -> Iterator[str]:
    placement, problem, shapes = found.placement, found.problem, found.placement.shards.shapes
    if problem.spec.world_size == 1:
        return
    balance = f"largest over mean cost (lookups and exchange) of a rank: {placement.imbalance:.4f}"
    yield f"placed by {placement.method}; {balance}"
    yield from _between_nodes(found)
    seconds = found.costs.of_shapes(shapes)
    mean = float((seconds * shapes.count).sum()) / problem.spec.world_size
    if len(seconds) and seconds.max() > BOTTLENECK_RATIO * mean > 0:
        largest = int(np.argmax(seconds))
        part = "with one of its shards" if int(shapes.table[largest]) in placement.options else "alone"
        costs = f"costs {seconds.max() / mean:.2f} times the mean of a rank: it is the bottleneck"
        yield f"table {shapes.spec(largest).name} {part} {costs}"


def _between_nodes(found: Solution) -> Iterator[str]:
    links, sent = found.costs.links, found.costs.sent_by_rank(found.placement)
    if links.nodes == 1 or not sent.any():
        return
    crossed = links.between_bytes(sent)
    busiest = int(crossed.argmax())
    yield (
        f"shards exchange {human(int(sent.sum()))} a step with other ranks, {links.between:.0%} of it between nodes: "
        f"{human(int(crossed[busiest]))} by node {busiest}, in {crossed[busiest] * links.node_byte_s * 1e3:.2f} ms"
    )


def _tiers(found: Solution) -> Iterator[str]:
    """Say where the rows of stacks are, and the accesses that slots serve, by group of like tables."""
    if found.tiers is None or not found.tiers.levels:
        return
    rates, levels_of, shapes = found.tiers.hit_rates, found.tiers.levels, found.tiers.shapes
    in_slots = rates.hits_at(found.tiers.rows.slots)
    tables, groups = found.problem.tables, dict[tuple[Tier, ...], list[int]]()
    group_of, shards = found.tiers.group, found.placement.shards
    firsts = np.unique(group_of, return_index=True)[1][-len(levels_of) :]
    # Levels count even parts as the largest.
    rows_of = np.bincount(group_of + 1, weights=shards.shapes.rows[shards.shape])[1:]
    for i in np.argsort(firsts).tolist():
        levels = levels_of[i]
        groups.setdefault(tuple(tier for tier, _ in levels.each) if levels.below else (), []).append(i)
    if in_hbm := groups.pop((), []):
        named = shapes.table[in_hbm].tolist()
        yield f"{_count(len(set(named)), 'table')} whole in HBM: {_names(tables, named)}"
    for (first, *below), group in groups.items():
        count = [int(shapes.count[i]) for i in group]
        rows = int(rows_of[group].sum())
        accesses = max(_total(count, (float(rates.accesses[i]) for i in group)), 1e-300)
        slots = _total(count, (levels_of[i].slots for i in group))
        hits = _total(count, in_slots[group].tolist())
        served = f"which are expected to serve {hits / accesses:.1%} of accesses"
        kept = [f"{slots / rows:.1%} in slots in {first.upper()}, {served}"]
        held = [_total(count, (levels_of[i].below[place][1] for i in group)) for place in range(len(below))]
        kept += [f"space for {size / rows:.1%} in {tier}" for tier, size in zip(below, held, strict=True)]
        named = shapes.table[group].tolist()
        counted = _count(len(set(named)), "table")
        yield f"{counted} with levels, {_names(tables, named)}: of {rows} rows {', '.join(kept)}"
    whole = len(tables.specs) - len(set(shapes.table.tolist()))
    if whole and found.problem.device == "cpu":
        yield f"{_count(whole, 'table')} whole in DDR: there a byte spares most reads of slower tiers"
    if found.stacked:
        ahead = found.problem.spec.trainer.cache.lookahead
        wanted = f"slots hold at least the distinct rows expected of {_count(ahead + 1, 'batch')}"
        yield f"rows are fetched {_count(ahead, 'batch')} ahead: {wanted}"


def _directories(found: Solution) -> Iterator[str]:
    shapes, tables = found.placement.shards.shapes, found.problem.tables
    if unique := [i for i, table in enumerate(tables.specs) if table.is_unique]:
        size = int(_total(shapes.count.tolist(), shapes.directory_bytes.tolist()))
        share = size / sum(tables.specs[i].rows for i in unique)
        taken = f"{human(size)} of DDR over all nodes, {share:.1f} bytes for each of their rows"
        named = f"{_count(len(unique), 'table')} of unique ids, {_names(tables, unique)}"
        shared = any(tables.specs[i].embedding.shared_rows for i in unique)
        more = ", and shared rows" if shared else ","
        yield f"{named}: directories, and lists and filters of keys{more} take {taken}"


def _sizes(found: Solution) -> Iterator[str]:
    """Say what rows of several sizes take, and what they would take with all columns."""
    shapes, tables, taken, plain = found.placement.shards.shapes, found.problem.tables, 0, 0
    if not (sized := [i for i, table in enumerate(tables.specs) if table.has_sizes]):
        return
    for shape, (rows, count) in enumerate(
        zip(shapes.rows.astype(np.int64).tolist(), shapes.count.tolist(), strict=True)
    ):
        slabs = shapes.spec(shape).slab_bytes(tables.block_state_bytes[shapes.table[shape]])
        if slabs is not None:
            taken += count * slabs.planned(rows)
            plain += count * rows * slabs.plain_row
    named = f"{_count(len(sized), 'table')} with rows of several sizes, {_names(tables, sized)}"
    yield (
        f"{named}: rows take at most {human(taken)} over all nodes, {taken / plain:.1%} of what they take with all "
        f"columns: keepBytes, and 1/{SLAB_HEADROOM_DIVISOR} of the columns kept for new rows"
    )


def _handoff(problem: Problem, handoff: Sequence[int]) -> Iterator[str]:
    budget = problem.tables.handoff_budget
    if budget is not None and problem.spec.checkpoint.handoff_budget is None and budget in handoff:
        reason = "so that tables have the memory that full cuts would take"
        yield f"cuts are handed over in segments: {human(budget)} of shared memory a pod, {reason}"


def _device_memory(problem: Problem, ranks: Sequence[RankPlan]) -> Iterator[str]:
    if problem.device == "cpu":
        return
    fullest = max(ranks, key=lambda rank: rank.bytes_per_tier["hbm"])
    limit = "not checked against memory: neither devices of a HardwareProfile nor trainer.tierBudgets.hbm"
    if problem.hbm is not None:
        limit = f"tables have {human(problem.hbm.size)} of it: {problem.hbm.source}"
    yield f"rank {fullest.rank} takes most of its GPU, {human(fullest.bytes_per_tier['hbm'])} in all; {limit}"


def _memory(problem: Problem, ranks: Sequence[RankPlan]) -> str:
    pods = np.bincount([rank.node for rank in ranks], weights=[rank.bytes_per_tier["ddr"] for rank in ranks])
    fullest = int(np.argmax(pods))
    taken = f"node {fullest} holds most, {human(int(pods[fullest]))} of tables and hand-off"
    if problem.limit is None:
        givers = "HardwareProfile, trainer.tierBudgets.ddr or trainer.resources.limits.memory"
        return f"{taken}; not checked against memory: no {givers} is given"
    return f"{taken}, of {human(problem.limit.size)}: {problem.limit.source}"


def _total(counts: Iterable[int], amounts: Iterable[float]) -> float:
    """Return the sum over all shards of what each shard of some groups has; of integers it is exact."""
    return sum(count * amount for count, amount in zip(counts, amounts, strict=True))


def _count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"


def _names(tables: Tables, indices: Iterable[int]) -> str:
    names = [tables.specs[i].name for i in dict.fromkeys(indices)]
    shown = ", ".join(names[:MAX_NAMED_TABLES])
    return shown if len(names) <= MAX_NAMED_TABLES else f"{shown} and {len(names) - MAX_NAMED_TABLES} more"


def explain_infeasible(
    problem: Problem, failure: Infeasible, replicas_field: str | None, is_feasible: Callable[[Problem], bool]
) -> InfeasiblePlanError:
    """Return the error that names the table, the rank, the node, the missing bytes, and what would fix it.

    Every fix was tried with ``is_feasible``; none is with over ``MAX_TRIED_SHARDS``. ``replicas_field`` adds replicas;
    None if they would share one machine.
    """
    fixes, cause = _Fixes(problem, failure, replicas_field, is_feasible), failure.cause
    reasons = [explain_shortage(problem, failure)]
    if (limit := fixes.limit_of(problem)) is not None:
        owner = "a rank" if cause.tier == "hbm" else "a pod"
        reasons.append(f"{owner} has {max(0, limit.size)} bytes for tables: {limit.source}")
    if (shards := required_shards(problem.spec, problem.tables)) > MAX_TRIED_SHARDS:
        reasons.append(
            f"no fix was tried, since a try places {shards} shards: pin fewer tables to be split, or use a smaller "
            "batch or more memory a node, and plan again"
        )
        return InfeasiblePlanError("spec.trainer", reasons)
    reasons += [*fixes.more_of_tier(), *fixes.more_memory(), *fixes.fewer_activations(), *fixes.less_read_ahead()]
    reasons += [*fixes.other_memory(), *fixes.no_pin(), fixes.more_replicas()]
    if not any(reason.startswith("fix: ") for reason in reasons):
        reasons.append(f"no single change is enough: with all the {cause.tier} there may be, something else runs short")
    return InfeasiblePlanError("spec.trainer", reasons)


def explain_shortage(problem: Problem, failure: Infeasible) -> str:
    """Name what runs short, where, and the missing bytes."""
    if isinstance(failure.cause, TierShortage):
        return _tier_shortage(problem, failure.cause)
    return _table_shortage(problem, failure, failure.cause)


def _table_shortage(problem: Problem, failure: Infeasible, cause: TableShortage) -> str:
    table, is_hbm = problem.tables.specs[cause.table], cause.tier == "hbm"
    limit = problem.hbm if is_hbm else problem.limit
    where = f"rank {cause.rank} on node {cause.rank // problem.spec.trainer.processes_per_replica}"
    where = f"the GPU of {where}" if is_hbm else where
    refused = f"table {table.name} ({table.rows} rows x {table.dim}) does not fit"
    if cause.free < 0 and limit is not None:
        taken = f", the hand-off and buffers already take {limit.size - cause.free} bytes there, {-cause.free} bytes "
        taken += "more than the pod has"
        if is_hbm:
            taken = f" and the working memory of a step take {-cause.free} bytes more than it has"
        return f"{refused} on {where}: replicated tables{taken}"
    batches, slots = problem.spec.trainer.cache.lookahead + 1, f"with slots for {failure.min_slots} rows"
    if not failure.min_slots:
        handoff, directory = failure.has_full_handoff, table.is_unique
        form = "with row state" + (", directory and hand-off" if handoff and directory else "")
        form += "" if handoff == directory else " and hand-off" if handoff else " and directory"
    elif (table.pin or NO_PIN).tier == "hbm":
        form = "with all rows, as pinned,"
    elif is_hbm:
        form = f"{slots}, and scratch slots for the lookups of two batches,"
    else:
        form = f"{slots}, those of {batches} batches in flight, scratch slots, and the map of all rows"
    on, free = f" on {where}, which has most free memory", "bytes are free"
    if cause.spread:
        over = f"GPUs of {cause.spread} ranks" if is_hbm else f"ranks of {cause.spread} nodes"
        on, free = f", not even split over the {over}", "bytes are free for its rows on all of them together"
    next_to = "" if cause.is_alone else " next to other tables"
    short = f"{cause.held - cause.free} bytes short"
    it = "a shard of it" if cause.is_shard else "it"
    return f"{refused}{on}: {form} {it} takes {cause.held} bytes, and {cause.free} {free}{next_to}: {short}"


def _tier_shortage(problem: Problem, cause: TierShortage) -> str:
    short = f"{cause.missing} bytes ({human(cause.missing)}) short"
    if cause.tier == "ddr":
        return f"rows that HBM does not hold, and metadata of rows, do not fit DDR: it is {short}"
    tiers = ", ".join(f"{tier} {human(size)}" for tier, size in problem.caps.items())
    return f"rows that DDR does not hold do not fit the slower tiers of a pod ({tiers}): {cause.tier} is {short}"


@dataclass(frozen=True)
class _Fixes:
    """Find changes that make a problem feasible, each by planning it."""

    problem: Problem
    failure: Infeasible
    replicas_field: str | None
    is_feasible: Callable[[Problem], bool]

    def limit_of(self, problem: Problem) -> Limit | None:
        """Return the limit that is too tight, or that of DDR if a slower tier runs short."""
        return problem.hbm if self.failure.cause.tier == "hbm" else problem.limit

    def _with_spec(self, spec: DLRMJobSpec) -> Problem:
        problem = self.problem
        hbm = device_limit(spec, problem.profile) if problem.device == "cuda" else None
        limit = pod_limit(spec, problem.profile, problem.reserve, problem.device)
        return replace(problem, spec=spec, limit=limit, hbm=hbm)

    def more_of_tier(self) -> Iterator[str]:
        """Yield a size of the tier that runs short; the user knows whether it is of a budget or a profile."""
        problem, cause = self.problem, self.failure.cause
        # DDR is a matter of ``more_memory``.
        if not isinstance(cause, TierShortage) or (tier := cause.tier) == "ddr":
            return
        has = problem.caps[tier]

        def fits(more: int) -> bool:
            return self.is_feasible(replace(problem, caps={**problem.caps, tier: has + more * MIB}))

        if (more := _smallest(fits, MAX_BLOCK // MIB, -(-cause.missing // MIB))) is not None:
            size = has + more * MIB
            node: TierSpec | None = getattr(problem.profile.spec.tiers, tier) if problem.profile else None
            claimed = f" ({claim_bytes(size)} of them: it is claimed with a file system)"
            yield (
                f"fix: {tier} of {size} bytes ({human(size)}) a pod: trainer.tierBudgets.{tier}, and the "
                f"profile's tiers.{tier}.bytes{claimed if node and node.storage_class else ''} if hardware is named"
            )

    def more_memory(self) -> Iterator[str]:
        """Yield the bytes to add to each pod, or to each GPU, to within a MiB."""
        cause, problem, limit = self.failure.cause, self.problem, self.limit_of(self.problem)
        if limit is None:
            return
        if isinstance(cause, TierShortage):
            missing = cause.missing if cause.tier == "ddr" else 1
        else:
            missing = -(-(cause.held - cause.free) // max(1, cause.spread))

        def fits(more: int) -> bool:
            larger = replace(limit, size=limit.size + more * MIB)
            is_hbm = cause.tier == "hbm"
            return self.is_feasible(replace(problem, hbm=larger) if is_hbm else replace(problem, limit=larger))

        if (more := _smallest(fits, (MAX_DDR - limit.size) // MIB, -(-missing // MIB))) is not None:
            yield f"fix: {self._raise_fields(limit, limit.size + more * MIB)}"

    def _raise_fields(self, limit: Limit, enough: int) -> str:
        """Say by how much to raise each field that keeps a pod, or a GPU, below ``enough``.

        Nobody raises the memory of a machine that all pods share; some of it can be freed.
        """
        fields, others = [], []
        for each in (each for each in (limit, *limit.looser) if each.size < enough):
            size = (enough - each.size) * each.shares
            if self.replicas_field is None and each.field.startswith(NODE_DDR):
                others.append(f"free {size} bytes ({human(size)}) more of this machine's memory for each pod")
            else:
                fields.append(f"{each.field} by {size} bytes ({human(size)})")
        return " and ".join([*([f"raise {' and '.join(fields)}"] if fields else []), *others])

    def other_memory(self) -> Iterator[str]:
        """Yield other memory for a table: the host's, a slower tier, or slots for fewer batches."""
        problem, cause = self.problem, self.failure.cause
        if isinstance(cause, TableShortage) and cause.tier == "hbm":
            yield from self._host_pin(cause)
            yield from self._no_lookahead("needs slots for fewer batches")
        elif not problem.caps:
            free = max(0, problem.limit.size if problem.limit else 0) * problem.spec.replicas
            rest = sum(size.resident for size in problem.tables.whole) - free
            start = max(1, rest // problem.spec.replicas // MIB)

            def fits(size: int) -> bool:
                return self.is_feasible(replace(problem, caps={"block": size * MIB}))

            if (size := _smallest(fits, MAX_BLOCK // MIB, start)) is not None:
                where = "on block storage; in a cluster, name hardware with a profile that mounts it"
                where = "into files below --tier-dir" if self.replicas_field is None else where
                budget = f"{size * MIB} ({human(size * MIB)})"
                yield f"fix: trainer.tierBudgets.block: {budget} puts rows that DDR does not hold {where}"
        elif self.failure.min_slots:
            yield from self._no_lookahead("needs slots for one batch alone")

    def _no_lookahead(self, reason: str) -> Iterator[str]:
        spec, cache = self.problem.spec, self.problem.spec.trainer.cache
        trainer = spec.trainer.model_copy(update={"cache": cache.model_copy(update={"lookahead": 0})})
        changed = replace(self.problem, spec=spec.model_copy(update={"trainer": trainer}))
        if cache.lookahead > 0 and self.is_feasible(changed):
            yield f"fix: trainer.cache.lookahead: 0 {reason}, and hides no reads"

    def _host_pin(self, cause: TableShortage) -> Iterator[str]:
        table = self.problem.tables.specs[cause.table]
        if cause.free < 0 or (table.pin or NO_PIN).sharding == "data":
            return
        pin = (table.pin or NO_PIN).model_copy(update={"tier": "ddr"})
        if self.is_feasible(self.problem.with_pin(cause.table, pin)):
            path = self.problem.tables.paths[cause.table]
            yield f"fix: {path}.pin.tier: ddr keeps the table on the host, looked up there"

    def no_pin(self) -> Iterator[str]:
        """Yield that a table be left to the planner, which may split it."""
        cause = self.failure.cause
        if not isinstance(cause, TableShortage) or cause.free < 0:
            return
        pin, path = self.problem.tables.specs[cause.table].pin or NO_PIN, self.problem.tables.paths[cause.table]
        free = pin.model_copy(update={"sharding": None, "ranks": ()})
        if free != pin and self.is_feasible(self.problem.with_pin(cause.table, free)):
            names = " and ".join(f"{path}.pin.{name}" for name in ("sharding", "ranks") if getattr(pin, name))
            over = "ranks" if cause.tier == "hbm" else "nodes"
            yield f"fix: leave out {names}: the planner then splits the table over {over}"

    def fewer_activations(self) -> Iterator[str]:
        """Yield a micro batch, as large as bisection finds one."""
        spec, held = self.problem.spec, held_samples(self.problem.spec)

        def in_pieces(pieces: int) -> Problem:
            training = spec.training.model_copy(update={"micro_batch_size": -(-held // pieces)})
            return self._with_spec(spec.model_copy(update={"training": training}))

        if (pieces := self._smallest_change(in_pieces, held)) is not None:
            size = -(-held // pieces)
            yield f"fix: training.microBatchSize: {size} holds the activations of so many samples at a time"

    def less_read_ahead(self) -> Iterator[str]:
        """Yield a read-ahead of files, as large as bisection finds one."""
        spec, held = self.problem.spec, int(self.problem.spec.data.prefetch_bytes)

        def without(less: int) -> Problem:
            data = spec.data.model_copy(update={"prefetch_bytes": held - less * MIB})
            return self._with_spec(spec.model_copy(update={"data": data}))

        if (less := self._smallest_change(without, (held - MIN_READ_AHEAD) // MIB)) is not None:
            size = held - less * MIB
            yield f"fix: data.prefetchBytes: {size} ({human(size)}) is what each reader of files then holds ahead"

    def _smallest_change(self, after: Callable[[int], Problem], most: int) -> int | None:
        """Return how much of a change leaves enough memory to tables; None if not even ``most`` does."""
        limit, larger = self.limit_of(self.problem), self.limit_of(after(most)) if most > 0 else None
        # A budget of tables alone does not change with what else a pod holds.
        if limit is None or larger is None or larger.size <= limit.size or not self.is_feasible(after(most)):
            return None
        return _smallest(lambda amount: self.is_feasible(after(amount)), most)

    def more_replicas(self) -> str:
        """Return a number of replicas that holds all tables, as small as bisection finds, or why none does."""
        problem, cause = self.problem, self.failure.cause
        if self.replicas_field is None:
            return "more replicas do not help: they share this machine's memory"
        now, most = problem.spec.replicas, max_replicas(problem.spec)

        def fits(more: int) -> bool:
            return self.is_feasible(self._with_spec(problem.spec.with_replicas(now + more)))

        if most > now and (more := _smallest(fits, most - now)) is not None:
            return f"fix: {self.replicas_field}: {now + more} of the same hardware hold all tables"
        field = "globalBatchSize" if problem.spec.data.virtual_shards is None else "virtualShards"
        reason = f"{most} are the most that data.{field} allows, and too few"
        if isinstance(cause, TableShortage) and cause.free >= 0:
            table = problem.tables.specs[cause.table]
            if table.pin is not None and (table.pin.ranks or not may_split(table)):
                reason = f"table {table.name} stays where its pin puts it, and is split no further"
        return f"more replicas do not help: {reason}"


def _smallest(holds: Callable[[int], bool], most: int, start: int = 1) -> int | None:
    """Return the smallest number up to ``most`` for which ``holds``, to within one part in 128, or None.

    It doubles from ``start``, then bisects.
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
