"""What a shard costs its rank in one step: rows read, and bytes exchanged with the other ranks.

Source: Mudigere et al., "Software-hardware co-design for fast and scalable training of deep learning recommendation
models", ISCA 2022; the planner of torchrec, for the rates where a profile gives none.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device
from dlrm_api.wire import Codec
from dlrm_planner.tables import ELEMENT_BYTES

NARROW_ROWS = 2**31
"""Where all tables have fewer rows, ids of four bytes travel, else of eight."""
WEIGHT_BYTES = 4
ROW_READS, ROW_WRITES = 2, 1
"""A lookup reads its row forward; the update reads it again and writes it."""
WIRE_BYTES: dict[Codec, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
INT8_RANGE_BYTES = 8
"""Scale and least value of a vector that travels as int8."""
MEMORY_RATE, LINK_RATE = 51 * 2**30, 12.5 * 2**30
"""Bytes/s of DDR and of the link between nodes where no profile says them; ranks of one node exchange through DDR."""
HBM_RATE, DEVICE_LINK_RATE = 897 * 2**30, 600 * 2**30
"""The same of HBM, and of the link between GPUs of one node."""
NEWTON_STEPS, NEWTON_CLOSE = 12, 1e-4
Floats = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Parts:
    """What parts of one table cost, by their share of its rows or of its column blocks."""

    fixed: float
    """Of every part, however small."""
    linear: float
    vectors: float
    """Of vectors for all bags, of which a part sends those that have an id there."""
    ids: float
    """Ids of a bag; 1 where there are fewer, which counts too much of small parts rather than too little."""

    def cost(self, share: float) -> float:
        """Cost of a part."""
        apart: float = (1.0 - share) ** self.ids
        return self.fixed + self.linear * share + self.vectors * (1.0 - apart)

    def share(self, cost: float) -> float:
        """The largest share that costs no more."""
        if cost >= self.cost(1.0):
            return 1.0
        share = 0.0
        for _ in range(NEWTON_STEPS):  # cost is concave, so every step ends below what is sought
            missing = cost - self.cost(share)
            if missing <= NEWTON_CLOSE * cost:
                break
            share += missing / (self.linear + self.vectors * self.ids * (1.0 - share) ** (self.ids - 1.0))
        return share


@dataclass(frozen=True, kw_only=True)
class Costs:
    """(T,) arrays over the model's tables; a share of a table's rows has that share of its ids."""

    ids: Floats
    """Ids looked up in one step."""
    bags: Floats
    """Bags of one step: samples x features."""
    dims: Floats
    blocks: Floats
    """Column blocks of each table: each is a vector of its own."""
    id_bytes: Floats
    """Bytes on the wire of an id, and its weight where it has one."""
    length_bytes: int
    """Bytes on the wire of a bag's length."""
    element_bytes: float
    """Bytes on the wire of one column of a pooled vector and of its gradient."""
    vector_bytes: float
    """Bytes beside them, whatever the columns."""
    away: float
    """Share of samples that are other ranks'."""
    exchange: float
    """Elements that could be looked up while one byte is exchanged."""

    def read(self, table: Indices | int, share: Floats | float, width: Floats | float) -> Floats:
        """Elements that shards of ``width`` columns and a ``share`` of the rows of each table read."""
        return np.asarray(self.ids[table] * share * width)

    def sent(
        self, table: Indices | int, share: Floats | float, width: Floats | float, blocks: Floats | float
    ) -> Floats:
        """Bytes that such shards of so many column blocks exchange: bags, and pooled vectors and their gradients.

        A shard of some rows sends vectors for each bag that has an id there, the whole table for every bag.
        """
        lookups = self.ids[table] / np.maximum(self.bags[table], 1)
        here = self.bags[table] * (1 - (1 - share) ** lookups)
        bags = self.ids[table] * share * self.id_bytes[table] + self.bags[table] * self.length_bytes
        return np.asarray(self.away * (bags + here * (self.element_bytes * width + self.vector_bytes * blocks)))

    def total(
        self, table: Indices | int, share: Floats | float, width: Floats | float, blocks: Floats | float
    ) -> Floats:
        """Cost in elements looked up."""
        return self.read(table, share, width) + self.exchange * self.sent(table, share, width, blocks)

    def parts(self, table: int, *, by_columns: bool) -> Parts:
        """What ranges of its rows, or groups of its column blocks, cost."""
        bags, ids = float(self.bags[table]), float(self.ids[table])
        sent = self.exchange * self.away
        vector = self.element_bytes * float(self.dims[table]) + self.vector_bytes * float(self.blocks[table])
        read, lengths = ids * float(self.dims[table]), sent * bags * self.length_bytes
        moved, vectors = sent * ids * float(self.id_bytes[table]), sent * bags * vector
        if by_columns:
            return Parts(lengths + moved, read + vectors, 0.0, 1.0)
        return Parts(lengths, read + moved, vectors, max(ids / max(bags, 1.0), 1.0))

    @property
    def whole(self) -> Floats:
        """(T,) cost of each table on one rank."""
        return self.total(np.arange(len(self.dims)), 1.0, self.dims, self.blocks)


def read_costs(spec: DLRMJobSpec, profile: HardwareProfile | None, device: Device) -> Costs:
    """Costs of a job's tables on ranks of this kind, at the rates of a profile where it gives them."""
    tables, world_size, batch = spec.model.all_tables(), spec.world_size, spec.data.global_batch_size
    bags = np.array([batch * len(table.sources) for table in tables], np.float64)
    directions = (spec.training.communication.forward, spec.training.communication.backward)
    processes = spec.trainer.processes_per_replica
    network = profile.spec.network if profile else None
    fast = lookup_tier(profile, device) if profile else None
    read = (fast and fast.read_bytes_per_second) or (HBM_RATE if device == "cuda" else MEMORY_RATE)
    write = (fast and fast.write_bytes_per_second) or read
    if spec.replicas > 1:
        link = (network and network.inter_node_bytes_per_second) or LINK_RATE
    else:
        inside = DEVICE_LINK_RATE if device == "cuda" else read
        link = (network and network.intra_node_bytes_per_second) or inside
    looking_up = ELEMENT_BYTES * (ROW_READS / read + ROW_WRITES / write) * (1 if device == "cuda" else processes)
    exchanging = (processes if spec.replicas > 1 else 1) / link  # a node's ranks share its memory and its link
    id_bytes = 4 if max(table.rows for table in tables) < NARROW_ROWS else 8
    longest = max(table.max_lookups for table in tables)
    return Costs(
        ids=bags * [table.lookups for table in tables],
        bags=bags,
        dims=np.array([table.dim for table in tables], np.float64),
        blocks=np.array([len(table.block_edges) - 1 for table in tables], np.float64),
        id_bytes=np.array([id_bytes + (WEIGHT_BYTES if table.weights else 0) for table in tables], np.float64),
        length_bytes=1 if longest < 2**8 else 2 if longest < 2**15 else 4,
        element_bytes=sum(WIRE_BYTES[codec] for codec in directions),
        vector_bytes=INT8_RANGE_BYTES * directions.count("int8"),
        away=(world_size - 1) / world_size,
        exchange=exchanging / looking_up,
    )


def lookup_tier(profile: HardwareProfile, device: Device) -> TierSpec:
    """The memory that kernels look rows up in: of one GPU, or of a node."""
    devices = profile.spec.devices
    return devices.hbm if device == "cuda" and devices is not None else profile.spec.tiers.ddr
