"""The model's tables: what each takes to hold and to hand over, whole or in part."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_api.row_optimizers import STATE_BYTES, state_values
from dlrm_api.tiers import CHANGED_BYTES
from dlrm_api.tiers import ELEMENT_BYTES as BYTES_OF
from dlrm_planner.costs import ELEMENT_BYTES
from dlrm_planner.dense import EXCHANGED_COPIES

ROW_ID_BYTES = 8
"""Of each row of a cut."""
CUT_PIECE_ROWS, CUT_HEADER_BYTES = 65_536, 512
"""A cut lists its pieces; a piece of fewer rows than this would be waste, and its entry is shorter than that."""

RANGE_COPIES, SENT_COPIES = 2, 2
"""Of a global batch's pooled rows, on a rank with a range of the table's: they and their gradients; and of those of
bags that have ids there, picked and in a message."""
RANGES = tuple(2**power for power in range(1, 13))
"""Numbers of ranges by which the most that one takes is found."""


@dataclass(frozen=True)
class PartBytes:
    """What some rows of some columns take; Python integers, since 5,000 tables of 2**54 bytes overflow int64."""

    row: int
    """A row and its state, as the kernels hold them."""
    resident: int
    """Rows, row state and what tells that rows changed."""
    handoff: int
    """All rows with their ids and state, as a full cut hands them over, headers included."""


@dataclass(frozen=True, kw_only=True)
class Tables:
    """All tables in the model's order; every tuple has one entry for each."""

    specs: tuple[TableSpec, ...]
    paths: tuple[str, ...]
    """Where kubectl shows each table: ``spec.model.tables[3]``."""
    block_state_bytes: tuple[int, ...]
    """Row state of one column block."""
    whole: tuple[PartBytes, ...]
    """Of all rows and columns."""
    held_bytes: tuple[int, ...]
    """What a pod's memory gives for each table: the table, and its part of a hand-off that holds a full cut."""
    vector_bytes: tuple[int, ...]
    """Of each table's pooled rows of a global batch; 0 where they lie in no host's memory."""
    handoff_budget: int | None
    """Bytes of each pod's hand-off, where it is not sized to hold a full cut."""

    def sliced(self, budget: int) -> Tables:
        """The same tables, their cuts handed over in slices that take turns in a budget."""
        return replace(self, held_bytes=tuple(size.resident for size in self.whole), handoff_budget=budget)

    def range_bytes(self, table: int, share: float, ranges: int) -> int:
        """What a step takes for one of so many ranges of a table's rows, beyond a like part of what the table takes.

        Each range has the pooled rows and gradients of every bag of a global batch, be it without an id there; those of
        bags that have ids are copied and sent.
        """
        lookups = self.specs[table].lookups
        copies = RANGE_COPIES + SENT_COPIES * (1.0 - math.pow(1.0 - share, lookups)) - EXCHANGED_COPIES / ranges
        return math.ceil(self.vector_bytes[table] * max(copies, 0.0))

    @cached_property
    def most_range_bytes(self) -> tuple[int, ...]:
        """The most of it, however many even ranges there are."""
        each = range(len(self.specs))
        return tuple(max(self.range_bytes(i, 1 / ranges, ranges) for ranges in RANGES) for i in each)


def read_tables(spec: DLRMJobSpec) -> Tables:
    """Size every table."""
    specs, optimizer = spec.model.all_tables(), spec.training.row_optimizer.kind
    blocks = tuple(STATE_BYTES * state_values(optimizer, table.column_block or table.dim) for table in specs)
    budget = spec.checkpoint.handoff_budget
    sizes = [part_bytes(t, block, 0, t.rows, 0, t.dim) for t, block in zip(specs, blocks, strict=True)]
    return Tables(
        specs=specs,
        paths=table_paths(spec),
        block_state_bytes=blocks,
        whole=tuple(sizes),
        held_bytes=tuple(size.resident + (size.handoff if budget is None else 0) for size in sizes),
        vector_bytes=tuple(ELEMENT_BYTES * t.dim * len(t.sources) * spec.data.global_batch_size for t in specs),
        handoff_budget=budget,
    )


def part_bytes(table: TableSpec, block_state: int, row_start: int, row_end: int, start: int, end: int) -> PartBytes:
    """Bytes of rows [row_start, row_end) of columns [start, end), which are whole blocks: each is held by itself."""
    width = table.column_block or table.dim
    rows, blocks = row_end - row_start, (end - start) // width
    row = BYTES_OF[table.dtype] * width + block_state
    pieces = CUT_HEADER_BYTES * -(-rows // CUT_PIECE_ROWS)
    handoff = rows * (ELEMENT_BYTES * width + block_state + ROW_ID_BYTES) + pieces
    return PartBytes(blocks * row, blocks * rows * (row + CHANGED_BYTES), blocks * handoff)


def table_paths(spec: DLRMJobSpec) -> tuple[str, ...]:
    """Where each table of ``spec.model.all_tables()`` stands in the manifest."""
    own = (f"spec.model.tables[{i}]" for i in range(len(spec.model.tables)))
    grouped = (
        f"spec.model.tableGroups[{i}].template" for i, g in enumerate(spec.model.table_groups) for _ in range(g.count)
    )
    return (*own, *grouped)
