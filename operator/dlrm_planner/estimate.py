"""Cost the placements of a search: the seconds of each shard on its rank, as if nothing overlapped.

Costs of shards add up, so that ranks can be balanced; :mod:`dlrm_planner.predict` says when a step of the chosen plan
ends. Rates come from the HardwareProfile, or from defaults. To add a term, add it to :meth:`CostModel.fixed_s` if all
plans of a job pay it, or to :meth:`CostModel.lookup_s` or :meth:`CostModel.sent_bytes` if a shard's rank does.

Source: Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation
models", ISCA 2022; the planner of torchrec, for the default rates of HBM, DDR and links.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.keys import SLOT_BYTES
from dlrm_api.model import Precision
from dlrm_api.plan import Device
from dlrm_api.tiers import Tier
from dlrm_api.wire import CODECS, LinkClass
from dlrm_planner.hit_rates import collisions
from dlrm_planner.rates import LoopRates, RankRates, read_device_rates, read_rates, read_tier_rates
from dlrm_planner.tables import (
    ELEMENT_BYTES,
    NO_PIN,
    dense_layers,
    dense_parameters,
    has_two_levels,
    largest_slice,
    pair_values,
    step_flops,
)
from dlrm_planner.tiers import TierAssignment
from dlrm_planner.types import Estimate, Floats, Indices, Placement, Problem, Shapes, Timed

Each = Floats | float
NARROW_ROWS = 2**31
"""If all tables have fewer rows and none is unique, ids travel as four bytes, else as eight."""
WEIGHT_BYTES = 4
ROW_READS, ROW_WRITES = 2, 1
"""A lookup reads its row forward; the update reads it again and writes it."""
MIN_SPLIT_BYTES = 2**20
"""A table that reads less in a step is not split for balance: another shard is another kernel launch."""
REPLICA_PART_S, WIDTH_S = 6e-7, 2e-4
"""Host work of a step for each column block of replicated tables, and for each width of blocks, measured by
``benchmarks.scale --only step/data-parallel``, and so of blocks that are not replicated (16 tables on two ranks)."""
DEFAULT_NODE_LINK_RATE, DEFAULT_DEVICE_LINK_RATE, DEFAULT_HOST_LINK_RATE = 12.5 * 2**30, 600 * 2**30, 20 * 2**30
"""Bytes per second between nodes, between GPUs of a node, and between a GPU and its host. Ranks of one node without
GPUs exchange through DDR."""
LATER_BLOCK = 0.7
"""Time of an id in a further column block of its table on the same rank, over that in the first: 91 and 133 ns (updates
of two tables, whole in two blocks or split by columns, ``dlrmctl run --profile`` on two ranks)."""
CACHED_BYTES, TIMED_BYTES, LARGEST_BYTES, ID_GROWTH = 2**21, 2**24, 2**30, 0.15
"""Bytes of a column block that caches hold whole, of those that profiles time, and from which an id takes no longer;
between the first and the last its time grows by this power of them. Of 128 ranks with 2 to 9 tables of 100,000 to
1,000,000 rows, on one thread, predicted lookups and updates are 7 % off (RMS), without it 11 %."""
PARTIAL_PACKS = 1.5
"""Time to add a column of a partial vector to others, over that to pack and unpack it: two tables of 128 and 64 columns
in rows on two ranks take 1.6 ms longer a step to assemble 4,096 samples than whole ones."""
NEWTON_STEPS, NEWTON_TOLERANCE = 12, 1e-4


def found_blocks(blocks: Each) -> Each:
    """Return the cost of an id in this many column blocks on one rank, relative to a single block."""
    return 1 + LATER_BLOCK * (blocks - 1)


@dataclass(frozen=True)
class PartCost:
    """Give the seconds of a part of one table by its share of the rows, or of the column blocks."""

    fixed_s: float  # of every part, however small
    linear_s: float
    vectors_s: float
    """Of pooled vectors of all bags; a part makes and sends those of bags that have an id in it."""
    ids: float
    """Ids of a bag; 1 if there are fewer, which overestimates small parts."""

    def seconds(self, share: float) -> float:
        """Return the seconds of a part."""
        absent: float = (1.0 - share) ** self.ids
        return self.fixed_s + self.linear_s * share + self.vectors_s * (1.0 - absent)

    def share(self, seconds: float) -> float:
        """Return the largest share that takes no longer."""
        if seconds >= self.seconds(1.0):
            return 1.0
        share = 0.0
        # The function is concave, so every Newton step ends below the solution.
        for _ in range(NEWTON_STEPS):
            missing = seconds - self.seconds(share)
            if missing <= NEWTON_TOLERANCE * seconds:
                break
            share += missing / (self.linear_s + self.vectors_s * self.ids * (1.0 - share) ** (self.ids - 1.0))
        return share


@dataclass(frozen=True, kw_only=True)
class DenseHalf:
    """Hold the arithmetic of the dense half on the rank with most samples."""

    samples: int
    precision: Precision
    bottom: Sequence[tuple[int, int]]
    """Inputs and outputs of the layers below the interaction."""
    top: Sequence[tuple[int, int]]
    pair_values: int  # of a sample
    parameters: int

    def seconds(self, rates: LoopRates) -> tuple[float, float, float]:
        """Return the seconds of the layers below, of the interaction and the layers above, and of the update."""
        bottom_s, top_s = (rates.layers_s(each, self.samples, self.precision) for each in (self.bottom, self.top))
        pairs_s = self.pair_values * self.samples * rates.of("pair_value")
        return bottom_s, top_s + pairs_s, self.parameters * rates.of("parameter")


@dataclass(frozen=True, kw_only=True)
class Links:
    """Split what ranks send each other into what crosses nodes and what passes inside them.

    On hosts of several ranks a message takes two levels: through the memory of its node to the rank with the number of
    its receiver, then between nodes (``dlrm_trainer.distributed.two_levels``). So whatever the sharding, of messages
    to all samples the same share takes each link; shardings differ in how much is sent, and from how many nodes.
    """

    nodes: int
    processes: int
    """Ranks of a node, which share its link to others."""
    has_two_levels: bool
    node_byte_s: float
    """Seconds of a byte on the link of a node to others."""
    inside_byte_s: float
    """Seconds of a byte between two ranks of a node."""

    @cached_property
    def _away(self) -> float:
        """Return the share of samples of other ranks; 1 for a lone rank, which sends nothing."""
        world_size = self.nodes * self.processes
        return (world_size - 1) / world_size if world_size > 1 else 1.0

    @cached_property
    def between(self) -> float:
        """Return the part of what a rank sends to others that leaves its node."""
        return (self.nodes - 1) / self.nodes / self._away

    @cached_property
    def inside(self) -> float:
        """Return the part that passes from rank to rank inside a node, before it leaves or after it came too."""
        nodes = 1 if self.has_two_levels else self.nodes
        return (self.processes - 1) / self.processes / nodes / self._away

    @cached_property
    def shares(self) -> dict[LinkClass, float]:
        """Return the part of what a rank sends to others that is for ranks of its node, and for others, if any."""
        on_node = (self.processes - 1) / (self.nodes * self.processes) / self._away
        found: dict[LinkClass, float] = {"intra_node": on_node, "inter_node": self.between}
        return {link: share for link, share in found.items() if share > 0}

    def class_s(self, link: LinkClass, sent: Floats) -> float:
        """Return the seconds of messages for ranks of a class; (W,) bytes would go to all others in their format."""
        rank, node = float(sent.max()), float(self.by_node(sent).max())
        if link == "intra_node":
            return self.shares[link] * self.inside_byte_s * rank
        passed = (self.processes - 1) / self.processes if self.has_two_levels else 0.0
        return self.between * (self.node_byte_s * node + passed * self.inside_byte_s * rank)

    @cached_property
    def rank_byte_s(self) -> float:
        """Return the seconds of a byte that a rank sends to others, if all ranks send as much."""
        return self.between * self.processes * self.node_byte_s + self.inside * self.inside_byte_s

    def between_bytes(self, sent: Floats) -> Floats:
        """Return the (nodes,) bytes that cross between each node and others, of (W,) bytes sent to other ranks."""
        return self.between * self.by_node(sent)

    def messages_s(self, sent: Floats) -> float:
        """Return the seconds of messages of all ranks, of (W,) bytes to others."""
        return float(self.spread_s(self.by_node(sent).max(), sent.max()))

    def by_node(self, sent: Floats) -> Floats:
        """Return the (nodes,) sums over the ranks of each node."""
        return np.asarray(sent.reshape(self.nodes, self.processes).sum(axis=1))

    def spread_s(self, node: Each, rank: Each) -> Floats:
        """Return the seconds of messages if the busiest node and rank send so many bytes to others."""
        return np.asarray(self.between * self.node_byte_s * node + self.inside * self.inside_byte_s * rank)

    def sum_s(self, size: float) -> float:
        """Return the seconds to sum so many bytes of every rank, in a ring that leaves each node once."""
        slowest_s = max(self.node_byte_s * (self.nodes > 1), self.inside_byte_s * (self.processes > 1))
        return 2 * self._away * slowest_s * size


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Give the seconds of shards, from (T,) arrays over tables; a share of the rows has as many ids."""

    ids: Floats
    """Ids looked up in one step."""
    bags: Floats
    """Bags of one step: samples x features."""
    dims: Floats
    blocks: Floats
    """Column blocks of each table; each is a vector of its own."""
    id_bytes: Floats
    """Wire bytes of an id, and of its weight if it has one."""
    length_bytes: int  # wire bytes of a bag's length
    element_bytes: float
    """Wire bytes of one column of a pooled vector and of its gradient, the mean over all other ranks."""
    vector_bytes: float
    """Wire bytes of a vector and its gradient, whatever their columns; the mean over all other ranks."""
    world_size: int
    rates: RankRates
    """Of loops on the host."""
    devices: RankRates | None
    """Of loops on GPUs, if ranks compute there and the profile has such loops."""
    id_s: Floats
    """Seconds to look up and update an id in a column block, whatever its columns, beyond what blocks share."""
    part_s: Floats
    """Seconds of a step for each column block of a shard."""
    element_s: Floats
    """Seconds to look up and update one element."""
    bag_s: Floats
    """Seconds to look up and update a bag in a column block, however many ids it has."""
    slot_s: Floats
    """Seconds of an id that all of its column blocks on a rank share, and of its slot in a directory of unique ids."""
    id_times: Floats
    """Time of an id in a column block of a table on a host, over that of the measured loops."""
    collisions: Floats
    """Probability that two lookups of a table hit the same row, in excess of equally popular rows."""
    partial_s: float
    """Seconds to add one column of a vector that is of a part of a table's rows to those of other parts."""
    on_host: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Tables that the host's kernels look up."""
    lookup_is_stated: Mapping[Tier, bool]
    links: Links
    link_is_stated: bool
    packed_s: float
    """Seconds to pack and unpack a byte for other ranks."""
    batch: tuple[float, float, float, float, float]
    """What the rank with most samples reads: columns, bags, those of varying length, ids, and dense values."""
    dense: DenseHalf
    compute: Timed
    """The dense half; 0 if the profile states no rate."""
    dense_bytes: float  # wire bytes of dense gradients
    table_elements: Floats

    @property
    def computing(self) -> RankRates:
        """Return the rates of loops where ranks compute, of the host if those of GPUs are unknown."""
        return self.devices or self.rates

    @property
    def away(self) -> float:
        """Return the share of samples that belong to other ranks."""
        return (self.world_size - 1) / self.world_size

    @cached_property
    def byte_s(self) -> float:
        """Return the seconds to exchange one byte with other ranks, and to pack and unpack it, if all send as much."""
        return self.links.rank_byte_s + self.packed_s

    def lookup_s(self, table: Indices | int, share: Each, width: Each, blocks: Each) -> Floats:
        """Return the seconds to look up and update the rows of shards.

        Each column block has its own kernels and optimizer state and looks the row up again; ids are sorted once.
        """
        of_ids_s = self.of_ids_s(table, share, width, blocks)
        added_s = self.partial_s * width * (np.asarray(share) < 1)
        return of_ids_s + self.bags_with_ids(table, share) * (self.bag_s[table] * blocks + added_s)

    def of_ids_s(self, table: Indices | int, share: Each, width: Each, blocks: Each) -> Floats:
        """Return the part of ``lookup_s`` that is proportional to ids."""
        of_id = self.element_s[table] * width + self.slot_s[table] + self.id_s[table] * blocks
        return np.asarray(self.ids[table] * share * of_id)

    def excess_s(self, placement: Placement, of_ids_s: Floats) -> Floats:
        """Return the (W,) seconds by which each rank is expected to exceed its mean load if it is the busiest.

        ``of_ids_s`` is the (S,) mean time of a shard's ids by shape.
        """
        variances = self.variances(placement.shards.shapes, of_ids_s)
        return np.asarray(self.deviations * np.sqrt(placement.by_rank(variances, self.world_size)))

    def variances(self, shapes: Shapes, of_ids_s: Floats) -> Floats:
        """Return the (S,) variances of the time of a shard's ids, from their means.

        Hot rows are scattered, so equal ranges of rows receive different numbers of ids: a share s of the rows has a
        relative variance of c (1 - s) / s, with c from ``collisions``. Column blocks receive all ids and do not vary.
        """
        return np.asarray(of_ids_s**2 * self.collisions[shapes.table] * (1 - shapes.share) / shapes.share)

    @cached_property
    def deviations(self) -> float:
        """Return by how many standard deviations the busiest rank is expected to exceed its mean load.

        Source: Blom, "Statistical estimates and transformed beta-variables", 1958, for the expected maximum of W normal
        variables, scaled because their sum is fixed.
        """
        ranks = self.world_size
        return NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) * self.away**-0.5 if ranks > 1 else 0.0

    def bags_with_ids(self, table: Indices | int, share: Each) -> Floats:
        """Return the bags of a step that have an id in shards, and so a vector there."""
        lookups = self.ids[table] / np.maximum(self.bags[table], 1)
        return np.asarray(self.bags[table] * (1 - (1 - share) ** lookups))

    def sent_bytes(self, table: Indices | int, share: Each, width: Each, blocks: Each) -> Floats:
        """Return the bytes that shards exchange: bags, pooled vectors and their gradients.

        A shard of some rows sends vectors for each bag that has an id there, the whole table for every bag.
        """
        here = self.bags_with_ids(table, share)
        bags = self.ids[table] * share * self.id_bytes[table] + self.bags[table] * self.length_bytes
        return np.asarray(self.away * (bags + here * (self.element_bytes * width + self.vector_bytes * blocks)))

    def total_s(self, table: Indices | int, share: Each, width: Each, blocks: Each) -> Floats:
        """Return the seconds of shards on their rank."""
        return self.local_s(table, share, width, blocks) + self.byte_s * self.sent_bytes(table, share, width, blocks)

    def local_s(self, table: Indices | int, share: Each, width: Each, blocks: Each) -> Floats:
        """Return the seconds of shards on their rank without the exchange."""
        return self.lookup_s(table, share, width, blocks) + self.part_s[table] * blocks

    def of_shapes(self, shapes: Shapes) -> Floats:
        """Return the (S,) seconds of a shard of each shape on its rank."""
        return self.total_s(*shapes.parts)

    @cached_property
    def whole_s(self) -> Floats:
        """Return the (T,) seconds of each table whole on one rank."""
        return self.total_s(np.arange(len(self.dims)), 1.0, self.dims, self.blocks)

    @cached_property
    def min_split_s(self) -> Floats:
        """Return the (T,) seconds below which a table is not split for balance."""
        return MIN_SPLIT_BYTES / ELEMENT_BYTES * self.element_s

    def by_part(self, table: int, *, by_columns: bool) -> PartCost:
        """Return the seconds of ranges of a table's rows, or of groups of its column blocks."""
        bags, ids = float(self.bags[table]), float(self.ids[table])
        sent_s = self.byte_s * self.away
        vector = self.element_bytes * float(self.dims[table]) + self.vector_bytes * float(self.blocks[table])
        slots_s = float(self.lookup_s(table, 1.0, 0.0, 0.0))
        bags_s = bags * float(self.bag_s[table] * self.blocks[table])
        added_s = bags * self.partial_s * float(self.dims[table])
        columns_s = float(self.lookup_s(table, 1.0, self.dims[table], self.blocks[table])) - slots_s - bags_s
        of_ids_s = slots_s + sent_s * ids * float(self.id_bytes[table])
        lengths_s, vectors_s = sent_s * bags * self.length_bytes, sent_s * bags * vector + bags_s
        parts_s = float(self.part_s[table] * self.blocks[table])
        if by_columns:
            return PartCost(lengths_s + of_ids_s, columns_s + vectors_s + parts_s, 0.0, 1.0)
        return PartCost(lengths_s + parts_s, columns_s + of_ids_s, vectors_s + added_s, max(ids / max(bags, 1.0), 1.0))

    def replica_host_s(self, replicated: Indices) -> Floats:
        """Return the (n,) seconds of host work that each of these replicated tables adds to those before it."""
        seconds = REPLICA_PART_S * self.blocks[replicated]
        _, firsts = np.unique(self.dims[replicated] / self.blocks[replicated], return_index=True)
        seconds[firsts] += WIDTH_S
        return seconds

    def replica_s(self, replicated: Sequence[int]) -> float:
        """Return the seconds in which a rank looks up its own samples' rows of replicated tables, and updates these."""
        which = np.array(replicated, np.int64)
        looked_up = float(self.lookup_s(which, 1.0, self.dims[which], self.blocks[which]).sum()) / self.world_size
        return looked_up + float(self.replica_host_s(which).sum())

    def reduce_s(self, replicated: Sequence[int]) -> float:
        """Return the seconds of the all-reduce of dense gradients and of those of replicated tables."""
        elements = float(self.table_elements[list(replicated)].sum())
        size = self.dense_bytes + ELEMENT_BYTES * elements
        return self.links.sum_s(size) + 2 * self.away * self.packed_s * size

    def fixed_s(self, replicated: Sequence[int]) -> float:
        """Return the seconds that every placement with these replicated tables takes."""
        return self.compute.seconds + self.replica_s(replicated) + self.reduce_s(replicated)

    def estimate(self, placement: Placement) -> Estimate:
        """Estimate a step of a placement with all rows in the first level."""
        shapes = placement.shards.shapes
        local_s, of_ids_s = self.local_s(*shapes.parts), self.of_ids_s(*shapes.parts)
        on_host, lookups = self.on_host[shapes.table], dict[Tier, Timed]()
        # Replicated tables are in the memory of the device that computes.
        home: Tier = "hbm" if "hbm" in self.lookup_is_stated else "ddr"
        for tier, stated in self.lookup_is_stated.items():
            if tier != home and not on_host.any():
                continue
            own_s = self.replica_s(placement.replicated) if tier == home else 0.0
            here = on_host == (tier == "ddr")
            of_ranks = placement.by_rank(local_s * here, self.world_size) + self.excess_s(placement, of_ids_s * here)
            lookups[tier] = Timed(float(of_ranks.max()) + own_s, stated)
        sent = self.sent_by_rank(placement)
        sent_s = self.links.messages_s(sent) + self.packed_s * float(self.mean_traffic(sent).max())
        exchange = Timed(sent_s + self.reduce_s(placement.replicated), self.link_is_stated)
        return Estimate(compute=self.compute, lookups=lookups, exchange=exchange)

    def mean_traffic(self, sent: Floats) -> Floats:
        """Return the (W,) mean of sent and received bytes, if each rank sends (W,) evenly to all others."""
        others = max(self.world_size - 1, 1)
        return np.asarray((sent + (sent.sum() - sent) / others) / 2)

    def sent_by_rank(self, placement: Placement) -> Floats:
        """Return the (W,) bytes that shards of each rank exchange with other ranks."""
        shapes = placement.shards.shapes
        return placement.by_rank(self.sent_bytes(*shapes.parts), self.world_size)


def read_costs(problem: Problem) -> CostModel:
    """Return the costs of a job's tables on its ranks."""
    spec, profile, device, specs = problem.spec, problem.profile, problem.device, problem.tables.specs
    batch, processes = spec.data.global_batch_size, spec.trainer.processes_per_replica
    bags = np.array([batch * len(table.sources) for table in specs], np.float64)
    id_bytes = 8 if any(table.is_unique or table.rows >= NARROW_ROWS for table in specs) else 4
    longest = max(table.max_lookups for table in specs)
    on_host = np.array([device == "cpu" or (table.pin or NO_PIN).tier not in (None, "hbm") for table in specs], bool)
    rates = read_rates(profile, processes, spec.world_size, spec.trainer.threads_per_process)
    dims = np.array([table.dim for table in specs], np.float64)
    blocks = np.array([len(table.block_edges) - 1 for table in specs], np.float64)
    id_times = _id_times(ELEMENT_BYTES * problem.tables.rows * dims / blocks)
    devices = read_device_rates(profile, processes, spec.world_size) if device == "cuda" else None
    # Most of a lookup's time goes to finding its row, whatever the columns: bytes alone would make columns look cheap.
    id_s, element_s, bag_s = rates.alone.looked_up
    links, link_is_stated = _read_links(spec, profile, device)
    element_bytes = vector_bytes = packed_s = 0.0
    for link, share in links.shares.items():
        directions = spec.training.communication.codecs(link)
        element_bytes += share * sum(CODECS[codec].value_bytes for codec in directions)
        vector_bytes += share * sum(CODECS[codec].row_bytes for codec in directions)
        if (packing := devices if device == "cuda" else rates) and packing.is_measured:
            packed_s += share * packing.alone.pack_s(directions[0]) / CODECS[directions[0]].value_bytes
    of_device = (0.0, 0.0, 0.0, 0.0)
    stated = dict[Tier, bool]()
    if devices is not None:
        of_device, stated["hbm"] = (*devices.alone.looked_up, devices.alone.part_s), True
    elif device == "cuda":
        hbm = read_tier_rates(profile, "hbm")
        of_device = 0.0, ELEMENT_BYTES * (ROW_READS / hbm.read_bytes + ROW_WRITES / hbm.written_bytes), 0.0, 0.0
        stated["hbm"] = hbm.is_stated
    stated["ddr"] = rates.is_measured or read_tier_rates(profile, "ddr").is_stated
    dense, is_timed = _read_dense(spec), device == "cpu" or devices is not None
    ids, varies = bags * [table.lookups for table in specs], [table.max_lookups > table.lookups for table in specs]
    share, features = dense.samples / batch, sum(len(table.sources) for table in specs)
    values = len(spec.model.dense_features) * dense.samples
    return CostModel(
        ids=ids,
        bags=bags,
        dims=dims,
        blocks=blocks,
        id_bytes=np.array([id_bytes + (WEIGHT_BYTES if table.weights else 0) for table in specs], np.float64),
        length_bytes=1 if longest < 2**8 else 2 if longest < 2**15 else 4,
        element_bytes=element_bytes,
        vector_bytes=vector_bytes,
        world_size=spec.world_size,
        rates=rates,
        devices=devices,
        id_s=np.where(on_host, LATER_BLOCK * id_s * id_times, of_device[0]),
        part_s=np.where(on_host, rates.alone.part_s, of_device[3]),
        element_s=np.where(on_host, element_s, of_device[1]),
        bag_s=np.where(on_host, bag_s, of_device[2]),
        slot_s=(1 - LATER_BLOCK) * id_s * id_times * on_host
        + element_s * SLOT_BYTES / ELEMENT_BYTES * np.array([table.is_unique for table in specs]),
        id_times=id_times,
        collisions=collisions(problem),
        partial_s=PARTIAL_PACKS * rates.alone.pack_s("fp32") if spec.world_size > 1 and device == "cpu" else 0.0,
        on_host=on_host,
        lookup_is_stated=stated,
        links=links,
        link_is_stated=link_is_stated or spec.world_size == 1,
        packed_s=packed_s,
        batch=(
            features,
            float(bags.sum()) * share,
            float(bags[varies].sum()) * share,
            float(ids.sum()) * share,
            values,
        ),
        dense=dense,
        compute=_compute(spec, profile, dense, devices or rates) if is_timed else _dense_s(spec, profile),
        dense_bytes=float(CODECS[spec.training.communication.dense].value_bytes * dense.parameters),
        table_elements=problem.tables.rows * dims,
    )


def _id_times(block_bytes: Floats) -> Floats:
    """Return the time of an id in column blocks of so many bytes, over that of the measured loops."""
    return np.asarray((np.clip(block_bytes, CACHED_BYTES, LARGEST_BYTES) / TIMED_BYTES) ** ID_GROWTH)


def _dense_s(spec: DLRMJobSpec, profile: HardwareProfile | None) -> Timed:
    """Return the seconds of the dense half on a GPU without measured loops; 0 if the profile states no rate."""
    devices = profile.spec.devices if profile else None
    flops = devices and devices.flops_per_second
    return Timed(step_flops(spec, largest_slice(spec)) / flops, True) if flops else Timed(0.0, False)


def _compute(spec: DLRMJobSpec, profile: HardwareProfile | None, dense: DenseHalf, rates: RankRates) -> Timed:
    """Return the seconds of the dense half by loops; 0 if nothing in the profile says how fast it is."""
    if not rates.is_measured:
        of_node = profile.spec.flops_per_second if profile else None
        processes = spec.trainer.processes_per_replica
        return Timed(step_flops(spec, dense.samples) * processes / of_node, True) if of_node else Timed(0.0, False)
    return Timed(sum(dense.seconds(rates.alone)), True)


def _read_dense(spec: DLRMJobSpec) -> DenseHalf:
    bottom, top = dense_layers(spec.model)
    return DenseHalf(
        samples=largest_slice(spec),
        precision=spec.model.precision,
        bottom=bottom,
        top=top,
        pair_values=pair_values(spec.model),
        parameters=dense_parameters(spec.model),
    )


def _read_links(spec: DLRMJobSpec, profile: HardwareProfile | None, device: Device) -> tuple[Links, bool]:
    """Return the links of ranks, and whether the profile states the rate of those between nodes, else inside."""
    network = profile.spec.network if profile else None
    between, inside = (
        (network.inter_node_bytes_per_second, network.intra_node_bytes_per_second) if network else (None, None)
    )
    default = DEFAULT_DEVICE_LINK_RATE if device == "cuda" else read_tier_rates(profile, "ddr").read_bytes
    processes = spec.trainer.processes_per_replica
    links = Links(
        nodes=spec.replicas,
        processes=processes,
        has_two_levels=device == "cpu" and has_two_levels(spec),
        node_byte_s=1 / (between or DEFAULT_NODE_LINK_RATE),
        inside_byte_s=1 / (inside or default),
    )
    return links, bool(between if spec.replicas > 1 else inside)


def estimate(problem: Problem, costs: CostModel, placement: Placement, tiers: TierAssignment | None) -> Estimate:
    """Estimate a step of a placement."""
    fast = costs.estimate(placement)
    if tiers is None or not tiers.stacked:
        return fast
    prefetches = problem.spec.trainer.cache.lookahead > 0
    return replace(fast, misses=_misses(problem, placement, tiers), prefetches=prefetches)


@dataclass(frozen=True)
class Moved:
    """Hold what a step moves between the slots of each rank and one tier, in both directions alike; (W,) arrays."""

    rows: Floats
    bytes: Floats
    crossed_bytes: Floats
    """Bytes over the link between the rank's GPU and the host."""


def moved_rows(problem: Problem, placement: Placement, tiers: TierAssignment) -> dict[Tier, Moved]:
    """Return what moves between the slots and each tier below them.

    A row that is found in a tier is read from it, and another one is written to it in its place. If slots are in HBM,
    both cross the link between their GPU and the host, one each way.
    """

    def by_rank(amounts: Floats) -> Floats:
        return tiers.by_rank(amounts, placement.ranks, problem.spec.world_size)

    record, found = tiers.stacks.record, dict[Tier, Moved]()
    for tier, missed in tiers.served.items():
        crossed = np.where(tiers.stacks.on_device, missed * record, 0.0)
        found[tier] = Moved(by_rank(missed), by_rank(missed * record), by_rank(crossed))
    return found


def _misses(problem: Problem, placement: Placement, tiers: TierAssignment) -> dict[Tier, Timed]:
    """Return the seconds of each tier below the slots, of the pod that asks most of it."""
    found: dict[Tier, Timed] = {}
    for tier, each in moved_rows(problem, placement, tiers).items():
        size = np.maximum(each.bytes, each.rows * read_tier_rates(problem.profile, tier).page_bytes)
        found[tier] = transfer_s(problem, tier, each, each.rows, size, each.bytes)
    return found


def transfer_s(problem: Problem, tier: Tier, moved: Moved, reads: Floats, read: Floats, written: Floats) -> Timed:
    """Return the seconds of (W,) reads, of bytes read and of bytes written, of the pod that asks most of a tier.

    Each direction is limited by bytes and by count.
    """
    devices = problem.profile.spec.devices if problem.profile else None
    link, pods = devices and devices.host_bytes_per_second, problem.spec.replicas
    count, read_size, write_size = (float(each.reshape(pods, -1).sum(axis=1).max()) for each in (reads, read, written))
    rates = read_tier_rates(problem.profile, tier)
    crossed_s = float(moved.crossed_bytes.max()) / (link or DEFAULT_HOST_LINK_RATE)
    seconds = rates.seconds(count, read_size, write_size) + crossed_s
    return Timed(seconds, rates.is_stated and (bool(link) or problem.device == "cpu"))
