"""Which tables are replicated on every rank, and which may be split, before any rank is chosen."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_api.plan import MOST_SHARDS, Device
from dlrm_planner.costs import ELEMENT_BYTES, Costs
from dlrm_planner.tables import Tables

MAX_REPLICA_BYTES = 4 * 2**20
"""Largest table that is replicated unasked: its gradient is cleared and summed whole in every step, in cache still."""


def check_pins(spec: DLRMJobSpec, tables: Tables, grows: str) -> None:
    """Refuse pins that no placement can honour; ``grows`` is the field that more ranks are asked for by.

    Raises:
        InvalidSpecError: a pinned rank does not exist, replicas are to live on some ranks alone, ranges of rows over
            one node's ranks have no such ranks, or there would be more shards than a plan holds.
    """
    world_size = spec.world_size
    for table, path in zip(tables.specs, tables.paths, strict=True):
        if table.pin is None:
            continue
        if table.pin.sharding == "table-row":
            _check_table_row(table, path, spec.trainer.processes_per_replica)
        if table.pin.ranks and max(table.pin.ranks) >= world_size:
            raise InvalidSpecError(
                f"{path}.pin.ranks",
                f"table {table.name} is pinned to rank {max(table.pin.ranks)}, but the job has ranks 0 to "
                f"{world_size - 1}: name one of these, or raise {grows}",
            )
        if table.pin.sharding == "data" and 0 < len(set(table.pin.ranks)) < world_size:
            raise InvalidSpecError(
                f"{path}.pin.ranks",
                f"table {table.name} is pinned to sharding data, whose shards live on every rank: leave ranks out",
            )
    _check_shards(spec, tables)


def _check_shards(spec: DLRMJobSpec, tables: Tables) -> None:
    """Count the shards that pins ask for, before any is made."""
    counts = [_pinned_shards(spec, table) for table in tables.specs]
    if sum(counts) <= MOST_SHARDS:
        return
    split = [count for count in counts if count > 1]
    raise InvalidSpecError(
        f"{tables.paths[counts.index(max(counts))]}.pin.sharding",
        f"{len(split)} tables are pinned to be split, into {max(split)} shards at most over the job's "
        f"{spec.world_size} ranks: {sum(counts)} shards with all other tables, and a plan holds at most {MOST_SHARDS}: "
        "pin fewer tables, name fewer ranks in pin.ranks, or use fewer ranks",
    )


def _pinned_shards(spec: DLRMJobSpec, table: TableSpec) -> int:
    """Shards that a table's pin asks for; 1 where it asks for none."""
    pin = table.pin
    if pin is None or pin.sharding not in ("row", "column", "table-row"):
        return 1
    ranks = len(set(pin.ranks)) or spec.world_size
    if pin.sharding == "table-row":
        return min(table.rows, spec.trainer.processes_per_replica)
    return min(len(table.block_edges) - 1 if pin.sharding == "column" else table.rows, ranks)


def _check_table_row(table: TableSpec, path: str, processes: int) -> None:
    if processes == 1:
        raise InvalidSpecError(
            f"{path}.pin.sharding",
            f"table {table.name} is pinned to sharding table-row, which splits rows over the ranks of one node, and a "
            "node has one rank: set trainer.processesPerReplica to 2 or more, or pin to sharding row",
        )
    assert table.pin is not None
    nodes = sorted({rank // processes for rank in table.pin.ranks})
    if len(nodes) > 1:
        raise InvalidSpecError(
            f"{path}.pin.ranks",
            f"table {table.name} is pinned to sharding table-row on ranks of nodes {', '.join(map(str, nodes))}: name "
            f"ranks of one node, such as {nodes[0] * processes} to {(nodes[0] + 1) * processes - 1}, or pin to "
            "sharding row",
        )


def may_split(table: TableSpec) -> bool:
    """Whether the planner may split a table on its own account."""
    return table.rows > 1 and (table.pin is None or (table.pin.sharding is None and len(set(table.pin.ranks)) != 1))


def pinned(tables: Tables, sharding: str) -> NDArray[np.bool_]:
    """(T,) tables whose pin asks for this sharding."""
    return np.array([t.pin is not None and t.pin.sharding == sharding for t in tables.specs], bool)


def worth_replicating(spec: DLRMJobSpec, tables: Tables, costs: Costs, device: Device) -> NDArray[np.bool_]:
    """(T,) small unpinned tables whose gradient costs fewer bytes to all-reduce than their samples to exchange.

    Over all W ranks, a ring all-reduce of R rows moves 2 (W - 1) R D elements; the exchange of a whole table moves the
    ids of the samples of W - 1 ranks, and their pooled vectors there and back. Replicas lie where ranks compute.
    """
    homes = (None, "hbm" if device == "cuda" else "ddr")
    rows = np.array([table.rows for table in tables.specs], np.float64)
    reduced = 2 * (spec.world_size - 1) * rows * costs.dims * ELEMENT_BYTES
    exchanged = costs.sent(np.arange(len(rows)), 1.0, costs.dims, costs.blocks)
    unpinned = [t.pin is None or not (t.pin.sharding or t.pin.ranks or t.pin.tier not in homes) for t in tables.specs]
    small = rows * costs.dims * ELEMENT_BYTES <= MAX_REPLICA_BYTES
    return np.array(unpinned, bool) & small & (reduced < exchanged)


def replica_bytes(tables: Tables, index: int) -> int:
    """Bytes of one replica on one rank: the table, and the gradient that is all-reduced, with a count of each row."""
    table = tables.specs[index]
    return tables.whole[index].resident + table.rows * ELEMENT_BYTES * (table.dim + 1)
