"""Advise dims of tables within a budget of bytes: the static baseline of tables whose rows have fewer columns.

Source: Ginart et al., Mixed Dimension Embeddings, arXiv 1909.11810, with the number of rows for popularity.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlrm_api.errors import InfeasiblePlanError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableOptions
from dlrm_api.row_optimizers import STATE_BYTES, RowOptimizerKind, state_values
from dlrm_planner.tables import NO_PIN, part_bytes

EXPONENT = 0.3
"""A table's dim is proportional to its rows to the power of minus this."""
STEP = 4  # dims are multiples of it
HALVINGS = 64


@dataclass(frozen=True, kw_only=True)
class TableDim:
    """Advise the dim of a table, or of the tables of a group."""

    path: str
    """``spec.model.tables[3]`` or ``spec.model.tableGroups[0].template``."""
    name: str
    count: int
    """Tables: 1, or those of the group."""
    rows: int
    dim: int
    """As declared: the most that is advised."""
    advised_dim: int
    project: bool
    bytes: int
    """Of all ``count`` tables at the advised dim."""


@dataclass(frozen=True, kw_only=True)
class DimAdvice:
    """Advise the dims of all tables."""

    tables: tuple[TableDim, ...]
    declared_bytes: int
    """Of all tables at their declared dims."""
    projection_parameters: int
    """Elements of the matrices of tables with ``project``, which each rank holds on top of the tables."""

    @property
    def bytes(self) -> int:
        """Return the bytes of all tables at the advised dims."""
        return sum(table.bytes for table in self.tables)


class _Declared:
    """A table, or the tables of a group, as declared."""

    def __init__(self, path: str, name: str, count: int, options: TableOptions, optimizer: RowOptimizerKind) -> None:
        self.path, self.name, self.count, self.options, self._optimizer = path, name, count, options, optimizer
        self.step = options.column_block or STEP
        # A table that is split by columns needs two blocks.
        self.min_dim = self.step * (1 + ((options.pin or NO_PIN).sharding in ("column", "grid")))
        self.scale = math.pow(options.rows, EXPONENT)
        self._bytes: dict[int, int] = {}

    def dim_at(self, factor: float) -> int:
        """Return ``factor / scale`` as a valid dim: the nearest within bounds."""
        nearest = self.step * math.floor(factor / self.scale / self.step + 0.5)
        return min(self.options.dim, max(self.min_dim, nearest))

    def bytes_at(self, dim: int) -> int:
        """Return the bytes of all ``count`` tables with so many columns."""
        if dim not in self._bytes:
            table = self.options.model_copy(update={"dim": dim})
            state = STATE_BYTES * state_values(self._optimizer, table.column_block or dim)
            self._bytes[dim] = self.count * part_bytes(table, state, table.held_rows, dim).resident
        return self._bytes[dim]


def advise_dims(spec: DLRMJobSpec, budget: int) -> DimAdvice:
    """Choose dims proportional to ``rows ** -0.3`` with which all tables take at most ``budget`` bytes.

    Bytes are those of a plan in DDR: rows, row optimizer state, change bits, and directories of unique tables. Dims are
    multiples of 4, or of ``columnBlock``, up to the declared ones. A larger budget narrows no table.

    Raises:
        InfeasiblePlanError: tables of the smallest dims take more.
    """
    declared = list(_declared(spec))

    def dims_at(factor: float) -> list[int]:
        return [table.dim_at(factor) for table in declared]

    def total(dims: Sequence[int]) -> int:
        return sum(table.bytes_at(dim) for table, dim in zip(declared, dims, strict=True))

    dims = [table.options.dim for table in declared]
    declared_bytes = total(dims)
    if declared_bytes > budget:
        if (least := total(dims_at(0.0))) > budget:
            problem = (
                f"tables of the smallest dims take {least} bytes: expected a budget of at least that, got {budget}"
            )
            raise InfeasiblePlanError("spec.model", [problem])
        low, high = 0.0, max(table.options.dim * table.scale for table in declared)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if total(dims_at(middle)) <= budget else (low, middle)
        dims = dims_at(low)
    is_dot, bottom = spec.model.interaction == "dot", spec.model.bottom_mlp
    width = bottom[-1] if bottom else max(dims)
    tables = tuple(
        TableDim(
            path=table.path,
            name=table.name,
            count=table.count,
            rows=table.options.rows,
            dim=table.options.dim,
            advised_dim=dim,
            project=table.options.project or (is_dot and dim != width),
            bytes=table.bytes_at(dim),
        )
        for table, dim in zip(declared, dims, strict=True)
    )
    projected = sum(table.count * table.advised_dim for table in tables if table.project)
    return DimAdvice(tables=tables, declared_bytes=declared_bytes, projection_parameters=width * projected)


def _declared(spec: DLRMJobSpec) -> Iterator[_Declared]:
    optimizer = spec.training.row_optimizer.kind
    for i, table in enumerate(spec.model.tables):
        yield _Declared(f"spec.model.tables[{i}]", table.name, 1, table, optimizer)
    for i, group in enumerate(spec.model.table_groups):
        yield _Declared(f"spec.model.tableGroups[{i}].template", group.name, group.count, group.template, optimizer)
