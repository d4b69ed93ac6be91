"""How two snapshots of a store differ, table by table: ``dlrmctl snapshots diff``."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from dlrm_api.errors import SnapshotError
from dlrm_checkpointer.reading.differences import differences
from dlrm_checkpointer.reading.restore import Snapshot
from dlrm_checkpointer.types import TableMeta


@dataclass(frozen=True, kw_only=True)
class TableDiff:
    """How a table differs between two snapshots. Norms are L2, over the weights of the rows that differ."""

    table: str
    changed: int
    """Rows that both store and that differ in a weight or in optimizer state."""
    new: int
    """Rows that had their initial values and are stored now."""
    gone: int
    """Rows that were stored and are back at their initial values."""
    change_norm: float
    largest_change: float
    """Largest magnitude of one weight's change."""
    norm_before: float
    norm_after: float


def diff_snapshots(before: Snapshot, after: Snapshot) -> list[TableDiff]:
    """How two snapshots of one store differ, table by table.

    Raises:
        SnapshotError: an object is missing or corrupt, or they are of different models.
    """
    if [table.name for table in before.meta.tables] != [table.name for table in after.meta.tables]:
        raise SnapshotError(f"{after.uri}: its tables are not those of {before.uri}: they are of different models")
    return [_diff_table(before, after, table) for table in after.meta.tables]


def _diff_table(before: Snapshot, after: Snapshot, table: TableMeta) -> TableDiff:
    if before.table(table.name) != table:
        raise SnapshotError(f"{after.uri}: table {table.name} is not as in {before.uri}: they are of different models")
    changed = new = gone = 0
    change = norm_before = norm_after = largest = 0.0
    for each in differences(after.store, table, before.chain, after.chain):
        had, has = each.before.held, each.after.held
        changed += int((had & has).sum())
        new += int((~had & has).sum())
        gone += int((had & ~has).sum())
        steps = each.after.rows.astype(np.float64) - each.before.rows
        change += float(np.square(steps).sum())
        largest = max(largest, float(np.abs(steps).max(initial=0.0)))
        norm_before += float(np.square(each.before.rows, dtype=np.float64).sum())
        norm_after += float(np.square(each.after.rows, dtype=np.float64).sum())
    return TableDiff(
        table=table.name,
        changed=changed,
        new=new,
        gone=gone,
        change_norm=math.sqrt(change),
        largest_change=largest,
        norm_before=math.sqrt(norm_before),
        norm_after=math.sqrt(norm_after),
    )
