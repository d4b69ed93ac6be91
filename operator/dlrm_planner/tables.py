"""The model's tables as arrays: what each costs to look up, to hold and to hand over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_api.tiers import ELEMENT_BYTES as BYTES_OF
from dlrm_api.tiers import STATE_BYTES, state_values

ELEMENT_BYTES = 4
"""fp32: what is computed, exchanged and handed over, whatever the type of the rows."""
ROW_ID_BYTES = 8
CUT_PIECE_ROWS, CUT_HEADER_BYTES = 65_536, 512
"""A cut lists its pieces; a piece of fewer rows than this would be waste, and its entry is shorter than that."""
UPDATED_FLAG_BYTES = 1
"""The trainer keeps one byte a row that says whether the row was ever updated."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All tables in the model's order; every array is (T,)."""

    specs: tuple[TableSpec, ...]
    paths: tuple[str, ...]
    """Where kubectl shows each table: ``spec.model.tables[3]``."""
    column_blocks: tuple[tuple[int, ...], ...]
    """Edges of the column blocks, (0, dim) for a table of one block."""
    cost: NDArray[np.float64]
    """Elements read in one step: pooled lookups of the global batch x dim."""
    row_bytes: tuple[int, ...]
    """A row and its state, as the kernels hold them."""
    resident_bytes: tuple[int, ...]
    """Rows, row state and update flags. Python integers: 5,000 tables of 2**54 bytes overflow int64."""
    handoff_bytes: tuple[int, ...]
    """All rows with their ids and state, as a full cut hands them over, headers included."""
    held_bytes: tuple[int, ...]
    """What a pod's memory gives for each table: the table, and its part of a hand-off that holds a full cut."""
    handoff_budget: int | None
    """Bytes of each pod's hand-off, where it is not sized to hold a full cut."""

    def sliced(self, budget: int) -> Tables:
        """The same tables, their cuts handed over in slices that take turns in a budget."""
        return replace(self, held_bytes=self.resident_bytes, handoff_budget=budget)


def read_tables(spec: DLRMJobSpec, column_blocks: Mapping[str, tuple[int, ...]]) -> Tables:
    """Size every table; ``column_blocks`` (edges by table) are those of an earlier manifest and are kept.

    Raises:
        InvalidSpecError: a table's blocks do not cover its dim, so the earlier snapshot is of another model.
    """
    specs, paths = spec.model.all_tables(), table_paths(spec)
    blocks = tuple(_edges(table, path, column_blocks.get(table.name)) for table, path in zip(specs, paths, strict=True))
    optimizer = spec.training.row_optimizer.kind
    states = [STATE_BYTES * sum(state_values(optimizer, b - a) for a, b in pairwise(edges)) for edges in blocks]
    row_bytes = tuple(BYTES_OF[t.dtype] * t.dim + state for t, state in zip(specs, states, strict=True))
    resident = tuple(t.rows * (n + UPDATED_FLAG_BYTES) for t, n in zip(specs, row_bytes, strict=True))
    handoff = tuple(_cut_bytes(t.rows, ELEMENT_BYTES * t.dim + state) for t, state in zip(specs, states, strict=True))
    budget = spec.checkpoint.handoff_budget
    return Tables(
        specs=specs,
        paths=paths,
        column_blocks=blocks,
        cost=np.array([spec.data.global_batch_size * table.lookups * table.dim for table in specs], np.float64),
        row_bytes=row_bytes,
        resident_bytes=resident,
        handoff_bytes=handoff,
        held_bytes=tuple(a + b for a, b in zip(resident, handoff, strict=True)) if budget is None else resident,
        handoff_budget=budget,
    )


def table_paths(spec: DLRMJobSpec) -> tuple[str, ...]:
    """Where each table of ``spec.model.all_tables()`` stands in the manifest."""
    own = (f"spec.model.tables[{i}]" for i in range(len(spec.model.tables)))
    grouped = (
        f"spec.model.tableGroups[{i}].template" for i, g in enumerate(spec.model.table_groups) for _ in range(g.count)
    )
    return (*own, *grouped)


def _cut_bytes(rows: int, row_bytes: int) -> int:
    return rows * (row_bytes + ROW_ID_BYTES) + CUT_HEADER_BYTES * -(-rows // CUT_PIECE_ROWS)


def _edges(table: TableSpec, path: str, edges: tuple[int, ...] | None) -> tuple[int, ...]:
    if edges is None:
        return (0, table.dim)
    if len(edges) < 2 or edges[0] != 0 or edges[-1] != table.dim or list(edges) != sorted(set(edges)):
        raise InvalidSpecError(
            f"{path}.dim",
            f"table {table.name} has dim {table.dim}, but its snapshot has column blocks at {list(edges)}: "
            "restore the dim that it was trained with, or start from an empty checkpoint uri",
        )
    return tuple(edges)
