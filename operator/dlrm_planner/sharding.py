"""Which tables are replicated on every rank and which live whole on one, before any rank is chosen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_planner.tables import ELEMENT_BYTES, ROW_ID_BYTES, UPDATED_FLAG_BYTES, Tables

MAX_REPLICA_BYTES = 4 * 2**20
"""Largest table that is replicated unasked: its gradient is cleared and summed whole in every step, in cache still."""


def check_pins(tables: Tables, world_size: int) -> None:
    """Refuse pins that no placement can honour.

    Raises:
        InvalidSpecError: a pinned rank does not exist, or replicas are to live on some ranks alone.
    """
    for table, path in zip(tables.specs, tables.paths, strict=True):
        if table.pin is None or not table.pin.ranks:
            continue
        if max(table.pin.ranks) >= world_size:
            raise InvalidSpecError(
                f"{path}.pin.ranks",
                f"table {table.name} is pinned to rank {max(table.pin.ranks)}, but the job has ranks 0 to "
                f"{world_size - 1}: name one of these, or raise trainer.replicas",
            )
        if table.pin.sharding == "data" and len(set(table.pin.ranks)) < world_size:
            raise InvalidSpecError(
                f"{path}.pin.ranks",
                f"table {table.name} is pinned to sharding data, whose shards live on every rank: leave ranks out",
            )


def pinned(tables: Tables, sharding: str) -> NDArray[np.bool_]:
    """(T,) tables whose pin asks for this sharding."""
    return np.array([t.pin is not None and t.pin.sharding == sharding for t in tables.specs], bool)


def worth_replicating(spec: DLRMJobSpec, tables: Tables) -> NDArray[np.bool_]:
    """(T,) small unpinned tables whose gradient costs fewer bytes to all-reduce than their samples to exchange.

    Over all W ranks, a ring all-reduce of R rows moves 2 (W - 1) R D elements; a table-wise exchange of a global
    batch of B samples with L ids each moves (W - 1) / W of B L ids and, there and back, 2 B D elements.
    """
    world_size, batch = spec.world_size, spec.data.global_batch_size
    rows = np.array([table.rows for table in tables.specs], np.float64)
    dim = np.array([table.dim for table in tables.specs], np.float64)
    lookups = np.array([table.lookups for table in tables.specs], np.float64)
    reduced = 2 * (world_size - 1) * rows * dim * ELEMENT_BYTES
    exchanged = (world_size - 1) / world_size * batch * (lookups * ROW_ID_BYTES + 2 * dim * ELEMENT_BYTES)
    unpinned = [
        t.pin is None or not (t.pin.sharding or t.pin.ranks or t.pin.tier not in (None, "ddr")) for t in tables.specs
    ]
    return np.array(unpinned, bool) & (rows * dim * ELEMENT_BYTES <= MAX_REPLICA_BYTES) & (reduced < exchanged)


def replica_bytes(tables: Tables, index: int) -> int:
    """Bytes of one replica on one rank: the table, and the whole gradient that is all-reduced."""
    table = tables.specs[index]
    return tables.resident_bytes[index] + table.rows * (ELEMENT_BYTES * table.dim + UPDATED_FLAG_BYTES)
