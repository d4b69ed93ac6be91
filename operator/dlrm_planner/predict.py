"""Predict the steps of a chosen plan: work of its slowest rank, laid out in time, and what the profile lacks for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from dlrm_api.data import REMOTE_THREADS
from dlrm_api.fields import is_s3
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, Prediction
from dlrm_api.tiers import BLOCK_PAGE_BYTES, Tier
from dlrm_api.training import CommunicationSpec
from dlrm_api.wire import CODECS, Codec, LinkClass
from dlrm_planner.estimate import WIDTH_S, CostModel, Moved, estimate, found_blocks, moved_rows, read_costs, transfer_s
from dlrm_planner.rates import DEFAULT_LOOPS, LoopRates, read_device_rates, tier_spec
from dlrm_planner.tables import ELEMENT_BYTES
from dlrm_planner.tiers import TierAssignment
from dlrm_planner.timeline import StepWork, TierWork, Timeline, TrainingWork, lay_out
from dlrm_planner.types import Estimate, Floats, Indices, Levels, Placement, Problem, Timed, take

SECONDS_PER_HOUR = 3_600
COLLECTIVES, RANK_S = 6, 2e-5
"""Collectives of a step, and seconds that a further rank adds to them (``benchmarks.scale --only 'step/*'``)."""
ROW_PROCESSOR_S = 3.3e-6
"""Processor time to read from a lower tier and to write back as much, if the profile does not state it."""
OBJECT_REQUEST_S = 0.03
"""Seconds of a small read of an object store, if the profile does not state it: an assumption."""
AGES = np.concatenate([np.arange(8), np.geomspace(8, 2**24, 48)])
"""Steps since rows left the slots, as edges of ranges."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Hold a placement that fits, its tiers and its estimate."""

    problem: Problem
    """With the hand-off that the placement was made for."""
    costs: CostModel
    placement: Placement
    tiers: TierAssignment | None
    """None if all rows are in DDR."""
    estimate: Estimate

    @cached_property
    def stacked(self) -> Mapping[int, Levels]:
        """Return the groups of shards with rows that move between levels."""
        return self.tiers.stacked if self.tiers else {}

    @cached_property
    def timeline(self) -> Timeline:
        """Return when a step ends, and what it waits for; by defaults where the profile states no rates."""
        return lay_out(step_work(self))

    def under(self, problem: Problem) -> Solution:
        """Return the same placement and tiers by the rates and wire formats of a variant of the problem."""
        costs = read_costs(problem)
        estimated = estimate(problem, costs, self.placement, self.tiers)
        return replace(self, problem=problem, costs=costs, estimate=estimated)


def predict(found: Solution) -> Prediction:
    """Return when a step of a plan ends, and its parts, as far as the profile states the rates.

    The throughput takes rates for every part; what else is unknown has defaults, which are named.
    """
    problem, estimated, imbalance = found.problem, found.estimate, found.placement.imbalance
    spec, profile = problem.spec, problem.profile
    hit_rates = _hit_rates(found)
    if profile is None:
        return Prediction(hit_rates=hit_rates, imbalance=imbalance)
    timeline = found.timeline
    rate = price = None
    if estimated.is_stated and timeline.step_s > 0:
        rate = spec.data.global_batch_size / timeline.step_s
        if profile.spec.price_per_hour is not None:
            price = profile.spec.price_per_hour * spec.replicas / SECONDS_PER_HOUR * 1e9 / rate
    timed: dict[str, list[Timed]] = {}
    for tier, each in (*estimated.lookups.items(), *estimated.misses.items()):
        timed.setdefault(tier, []).append(each)
    stated = ((tier, parts) for tier, parts in timed.items() if all(each.is_stated for each in parts))
    return Prediction(
        compute_seconds=estimated.compute.seconds if estimated.compute.is_stated else None,
        lookup_seconds={tier: sum(each.seconds for each in parts) for tier, parts in stated},
        communication_seconds=estimated.exchange.seconds if estimated.exchange.is_stated else None,
        exposed_communication_seconds=timeline.exposed_link_s if rate else None,
        exposed_tier_seconds=dict(timeline.exposed_tiers_s) if rate else {},
        step_seconds=timeline.step_s if rate else None,
        stage_seconds=dict(timeline.stages_s) if rate else {},
        hit_rates=hit_rates,
        bound=timeline.bound if rate else "",
        samples_per_second=rate,
        price_per_billion_samples=price,
        imbalance=imbalance,
        defaults=_defaults(found),
        uncalibrated=uncalibrated_fields(found),
    )


def _hit_rates(found: Solution) -> dict[str, float]:
    """Return the share of accesses to tables with levels that each tier serves."""
    if (tiers := found.tiers) is None or not found.stacked:
        return {}
    stacked = list(found.stacked)
    hits = np.diff(tiers.rows.hits(tiers.hit_rates), axis=1, prepend=0.0) * tiers.shapes.count[:, None]
    served, on_device = hits[stacked], tiers.stacks.on_device[stacked]
    by_tier = defaultdict[str, float](float)
    for first, own in (("hbm", on_device), ("ddr", ~on_device)):
        if own.any():
            by_tier[first] = float(served[own, 0].sum())
    for place, tier in enumerate(tiers.rows.below, start=1):
        by_tier[tier] += float(served[:, place].sum())
    return {tier: round(each / float(served.sum()), 4) for tier, each in by_tier.items()}


def step_work(found: Solution) -> StepWork:
    """Return the work of a step: of the rank that looks up longest, and the largest messages of any."""
    spec, costs, rates, computing = found.problem.spec, found.costs, found.costs.rates, found.costs.computing
    shapes = found.placement.shards.shapes
    received = found.placement.by_rank(costs.ids[shapes.table] * shapes.share, spec.world_size).max()
    read_s, alone_s = (each.read_s(spec.data.format, costs.batch) for each in (rates.reading, rates.alone))
    busiest = _busiest(found)
    return StepWork(
        alone=_training(found, rates.alone, computing.alone, *busiest),
        beside=_training(found, rates.reading, computing.reading, *busiest),
        read_s=read_s,
        # Noise in a profile can make a reader look slower alone.
        read_alone_s=min(read_s, alone_s),
        ids_s=received * rates.reading.of("sent_id") if spec.world_size > 1 else 0.0,
        tiers=_tier_work(found),
        files_s=files_s(found.problem),
        prefetches=found.estimate.prefetches,
    )


def _busiest(found: Solution) -> tuple[Indices, float]:
    """Return the shape of each shard of the rank with most lookup time, and its ids relative to their mean.

    All ranks wait for this one.
    """
    placement, costs, ranks = found.placement, found.costs, found.problem.spec.world_size
    shapes = placement.shards.shapes.parts
    of_ids_s = costs.of_ids_s(*shapes)
    excess_s = costs.excess_s(placement, of_ids_s)
    rank = int((placement.by_rank(costs.local_s(*shapes), ranks) + excess_s).argmax())
    excess = float(excess_s[rank] / max(placement.by_rank(of_ids_s, ranks)[rank], 1e-300))
    return placement.shards.shape[placement.ranks == rank], 1 + excess


def step_requests(problem: Problem) -> float:
    """Return the reads of data files that a rank makes for a step."""
    if (data := problem.data) is None or not data.rows:
        return 0.0
    return data.reads * problem.spec.data.global_batch_size / data.rows / problem.spec.world_size


def files_s(problem: Problem) -> float:
    """Return the seconds that the reads of a step wait for an object store; those of local files do not wait."""
    if not any(map(is_s3, problem.spec.data.train.uris)):
        return 0.0
    stated = problem.profile.spec.network.object_request_seconds if problem.profile else None
    return step_requests(problem) * (stated or OBJECT_REQUEST_S) / REMOTE_THREADS


def _training(found: Solution, rates: LoopRates, computing: LoopRates, own: Indices, excess: float) -> TrainingWork:
    """Return the work of the training thread, by rates of loops on the host and of those where ranks compute.

    ``own`` and ``excess`` are those of ``_busiest``.
    """
    costs, placement, world_size = found.costs, found.placement, found.problem.spec.world_size
    shapes, replicated = placement.shards.shapes, np.array(placement.replicated, np.int64)
    table, share, width, blocks = shapes.table[own], shapes.share[own], shapes.width[own], shapes.blocks[own]
    host, ids = costs.on_host[table], costs.ids[table] * share * excess
    vectors = costs.bags_with_ids(table, share)
    bags = vectors * blocks
    added = float((vectors * width)[share < 1].sum())
    values = float((ids * width)[host].sum())
    copies = replicated[costs.on_host[replicated]]
    # Each column block finds its rows anew.
    of_host = float((ids * costs.id_times[table] * found_blocks(blocks))[host].sum())
    of_host += float((costs.ids * costs.id_times * found_blocks(costs.blocks))[copies].sum()) / world_size
    values += float((costs.ids[copies] * costs.dims[copies]).sum()) / world_size
    bags_of_host = float(bags[host].sum())
    bags_of_host += float((costs.bags[copies] * costs.blocks[copies]).sum()) / world_size
    # A GPU's lookups and updates are one term.
    of_row_s = costs.element_s[table] * width + costs.id_s[table] * blocks
    device_s = float((ids * of_row_s + bags * costs.bag_s[table])[~host].sum())
    parts = float(blocks.sum())
    interpreted_s = computing.step_s + computing.part_s * parts + float(costs.replica_host_s(replicated).sum())
    # Blocks of equal width share their kernel calls; the measured loops have a single width.
    interpreted_s += WIDTH_S * max(0, len(np.unique(width / blocks)) - 1)
    collectives_s = COLLECTIVES * computing.empty_collective_s if world_size > 1 else 0.0
    if not costs.computing.has_own_step:
        interpreted_s += collectives_s
    interpreted_s += RANK_S * max(0, world_size - computing.loops.processes)
    dense_s = costs.dense.seconds(computing) if _is_timed(found) else (0.0, costs.compute.seconds, 0.0)
    return TrainingWork(
        interpreted_s=interpreted_s,
        collectives_s=min(collectives_s, interpreted_s),
        lookup_s=of_host * rates.of("lookup")
        + values * rates.of("lookup_value")
        + bags_of_host * rates.of("lookup_bag")
        + added * costs.partial_s
        + device_s,
        update_s=of_host * rates.of("update")
        + values * rates.of("update_value")
        + bags_of_host * rates.of("update_bag"),
        bottom_s=dense_s[0],
        top_s=dense_s[1],
        dense_update_s=dense_s[2],
        **(_exchange(found, computing) if world_size > 1 else {}),
    )


def _is_timed(found: Solution) -> bool:
    """Return whether there are loops, measured or by default, of where ranks compute."""
    return found.problem.device == "cpu" or found.costs.devices is not None


def _exchange(found: Solution, rates: LoopRates) -> dict[str, float]:
    """Return the seconds of messages of vectors, of their gradients, and of sums, by fields of ``TrainingWork``."""
    communication = found.problem.spec.training.communication
    used = dict.fromkeys(codec for link in found.costs.links.shares for codec in communication.codecs(link))
    return exchange_times(found, rates, used).work(communication)


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Give the seconds of messages of a step, by class of link and format, in one state of the other threads."""

    classes: tuple[LinkClass, ...]
    """Those that there are."""
    packs: Mapping[tuple[LinkClass, Codec], float]
    """Of one direction."""
    links: Mapping[tuple[LinkClass, Codec], float]
    """Of one direction, on the link."""
    reduce_s: float

    def work(self, communication: CommunicationSpec) -> dict[str, float]:
        """Return the seconds of both directions and of sums, by fields of ``TrainingWork``."""
        used = [(link, communication.codecs(link)) for link in self.classes]
        return {
            "pack_s": sum(self.packs[link, codec] for link, codecs in used for codec in codecs),
            "pooled_s": sum(self.links[link, forward] for link, (forward, _) in used),
            "gradients_s": sum(self.links[link, backward] for link, (_, backward) in used),
            "reduce_s": self.reduce_s,
        }


def exchange_times(found: Solution, rates: LoopRates, codecs: Iterable[Codec]) -> ExchangeTimes:
    """Return the times of messages in some formats, of the rank with most of them."""
    spec, costs, placement = found.problem.spec, found.costs, found.placement
    shapes, is_timed = placement.shards.shapes, _is_timed(found)
    here = costs.bags_with_ids(shapes.table, shapes.share)
    # A rank packs what it sends and unpacks what it receives; gradients travel the opposite way.
    most = float(costs.mean_traffic(placement.by_rank(here * shapes.width, spec.world_size)).max())
    # Messages of ranks of one node, and their sums, take as long as was measured.
    is_measured = spec.replicas == 1 and is_timed and costs.computing.is_measured
    packs, links = dict[tuple[LinkClass, Codec], float](), dict[tuple[LinkClass, Codec], float]()
    for codec in codecs:
        form = CODECS[codec]
        sizes = here * (form.value_bytes * shapes.width + form.row_bytes * shapes.blocks)
        sent = placement.by_rank(sizes, spec.world_size) * costs.away
        # CPUs copy what ranks of one node send and receive; a GPU's link carries both directions at once.
        traffic = float((costs.mean_traffic(sent) if found.problem.device == "cpu" else sent).max())
        measured_s = rates.collective_s("all_to_all", traffic) if is_measured else None
        for link, share in costs.links.shares.items():
            links[link, codec] = costs.links.class_s(link, sent) if measured_s is None else measured_s
            packs[link, codec] = most * share * rates.pack_s(codec) if is_timed else 0.0
    reduced = costs.dense_bytes + ELEMENT_BYTES * float(costs.table_elements[list(placement.replicated)].sum())
    reduce_s = rates.collective_s("all_reduce", reduced) if is_measured else costs.links.sum_s(reduced)
    return ExchangeTimes(classes=tuple(costs.links.shares), packs=packs, links=links, reduce_s=reduce_s)


def _tier_work(found: Solution) -> dict[Tier, TierWork]:
    if found.tiers is None or not found.stacked:
        return {}
    problem, work = found.problem, {}
    for tier, moved in moved_rows(problem, found.placement, found.tiers).items():
        known = tier_spec(problem.profile, tier)
        row_s = _moved_row_s(found, tier) or (known and known.row_processor_seconds) or ROW_PROCESSOR_S
        reads, read = moved.rows, moved.bytes
        if tier == "block":
            reads = page_reads(found, moved)
            read = reads * BLOCK_PAGE_BYTES
        device_s = transfer_s(problem, tier, moved, reads, read, moved.bytes).seconds
        work[tier] = TierWork(device_s=device_s, processor_s=float(reads.max()) * row_s)
    return work


def _moved_row_s(found: Solution, tier: Tier) -> float | None:
    """Return the measured seconds to move a row between a tier and a slot on a GPU; None if there are none."""
    devices = found.costs.devices
    moved = devices.alone.loops.moved_row if devices and tier == "ddr" else None
    return None if moved is None else moved.seconds


def page_reads(found: Solution, moved: Moved) -> Floats:
    """Return the (W,) pages of block storage that are read for a step's rows; several may be in one.

    Rows lie in the order in which they left the slots: those that left a steps ago fill the pages of one step. The
    curve of hits says how many of these are wanted, f of all M rows of a step: their stack distance is a steps further
    than the slots reach. Of their M / k pages, with k rows each, 1 - exp(-k f) are read.
    """
    assert found.tiers is not None
    tiers, ranks = found.tiers, found.placement.ranks
    returning = np.zeros((len(tiers.levels), len(AGES) - 1))
    which = np.flatnonzero(tiers.rows.below["block"])
    rates, slots = take(tiers.hit_rates, which), tiers.rows.slots[which]
    held = slots + sum(rows[which] for tier, rows in tiers.rows.below.items() if tier != "block")
    missed = np.maximum(rates.accesses - rates.hits_at(held), 0.0)
    returning[which] = np.diff(rates.hits_at(held[:, None] + AGES * missed[:, None]))
    world_size = found.problem.spec.world_size
    of_ranks = np.stack([tiers.by_rank(each, ranks, world_size) for each in returning.T], axis=1)
    rows, size = np.maximum(moved.rows, 1e-300), np.maximum(moved.bytes, 1e-300)
    per_page = BLOCK_PAGE_BYTES * rows / size
    steps = np.diff(AGES)
    wanted = of_ranks / rows[:, None] / steps
    pages = (size / BLOCK_PAGE_BYTES)[:, None] * steps * -np.expm1(-np.maximum(per_page, 1.0)[:, None] * wanted)
    return np.asarray(np.where(moved.rows > 0, pages.sum(axis=1), 0.0))


def _defaults(found: Solution) -> tuple[str, ...]:
    """Return the fields of a profile for which defaults stand."""
    problem, costs, names = found.problem, found.costs, list[str]()
    spec = problem.spec
    measured = problem.profile.spec.loops if problem.profile else ()
    if not measured:
        names.append("loops")
    if not any(loops.reader(spec.data.format) for loops in measured or DEFAULT_LOOPS):
        names.append(f"loops.readers of {spec.data.format}")
    network = problem.profile.spec.network if problem.profile else None
    if not costs.link_is_stated:
        names.append("network")
    elif spec.replicas > 1 < costs.links.processes and not (network and network.intra_node_bytes_per_second):
        names.append("network.intraNodeBytesPerSecond")
    if files_s(problem) > 0 and problem.profile and problem.profile.spec.network.object_request_seconds is None:
        names.append("network.objectRequestSeconds")
    for tier in sorted(found.estimate.misses):
        known = tier_spec(problem.profile, tier)
        if not found.estimate.misses[tier].is_stated:
            names.append(f"tiers.{tier}")
        elif known is not None and known.row_processor_seconds is None and _moved_row_s(found, tier) is None:
            names.append(f"tiers.{tier}.rowProcessorSeconds")
    return tuple(names)


def uncalibrated_fields(found: Solution) -> tuple[str, ...]:
    """Return the fields of a profile that were to be measured on a GPU, and that a plan for GPUs lacks."""
    if _is_timed(found):
        lacks_rows = found.problem.device == "cuda" and "ddr" in found.estimate.misses
        return ("devices.loops.movedRow",) if lacks_rows and _moved_row_s(found, "ddr") is None else ()
    if found.problem.spec.world_size == 1:
        return ("devices.loops",)
    return ("devices.loops of two or more processes",)


def missing_rates(spec: DLRMJobSpec, profile: HardwareProfile | None, plan: Plan) -> str:
    """Return the absent fields by which a plan has no throughput, or none that is calibrated; empty if none is."""
    if profile is None:
        return "no HardwareProfile is given"
    hardware, missing = profile.spec, list[str]()
    devices = hardware.devices if plan.device == "cuda" else None
    processes = spec.trainer.processes_per_replica
    is_timed = hardware.loops if devices is None else read_device_rates(profile, processes, spec.world_size)
    if not (hardware if devices is None else devices).flops_per_second and not is_timed:
        missing.append("flopsPerSecond" if devices is None else "devices.flopsPerSecond")
    reads = (hardware.tiers.ddr if devices is None else devices.hbm).read_bytes_per_second
    if not reads and not is_timed:
        missing.append(f"{'tiers.ddr' if devices is None else 'devices.hbm'}.readBytesPerSecond")
    if plan.predicted.communication_seconds is None:
        missing.append(f"network.{'inter' if spec.replicas > 1 else 'intra'}NodeBytesPerSecond")
    used = {level.tier for table in plan.tables for each in table.ranges for level in each.tiers.levels[1:]}
    untimed = used - set(plan.predicted.lookup_seconds)
    if untimed and devices is not None and not devices.host_bytes_per_second:
        missing.append("devices.hostBytesPerSecond")
    for tier in sorted(untimed):
        known = tier_spec(profile, tier)
        if known is None or not (known.read_bytes_per_second or known.read_iops):
            missing.append(f"tiers.{tier}.readBytesPerSecond")
    missing += plan.predicted.uncalibrated
    return f"HardwareProfile {profile.metadata.name} has no {', '.join(dict.fromkeys(missing))}" if missing else ""
