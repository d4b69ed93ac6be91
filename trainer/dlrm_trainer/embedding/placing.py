"""Reads a placement from a plan, and refuses one whose shards don't make up the tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from dlrm_api.errors import InvalidSpecError
from dlrm_api.model import ModelSpec, TableSpec
from dlrm_api.plan import Plan, Shard, TablePlan, TierShare
from dlrm_trainer.embedding.placement import Part, Placement, kernel_key

Rectangle = tuple[int, int, int, int]
"""First row, row after the last, first column, column after the last."""


def place(model: ModelSpec, plan: Plan, world_size: int) -> Placement:
    """Read the parts of every rank.

    Raises:
        InvalidSpecError: the plan is of another job or world size, or its shards don't make up the tables.
    """
    if plan.world_size != world_size:
        raise InvalidSpecError(
            "plan.worldSize", f"the plan is for {plan.world_size} ranks, the job for {world_size}: plan it again"
        )
    tables = model.all_tables()
    names, planned = [table.name for table in tables], [table.name for table in plan.tables]
    if names != planned:
        odd = next((name for name in names if name not in planned), None)
        what = f"table {odd} is not in the plan" if odd else "the plan's tables are not the model's, in its order"
        raise InvalidSpecError("plan.tables", f"{what}: plan the job again")
    owned: list[list[Part]] = [[] for _ in range(world_size)]
    replicated: list[Part] = []
    for number, (table, shards) in enumerate(zip(tables, plan.tables, strict=True)):
        for rank, part in _parts(number, table, shards, world_size):
            (replicated if rank is None else owned[rank]).append(part)

    def in_groups(parts: list[Part]) -> tuple[Part, ...]:
        return tuple(sorted(parts, key=lambda part: _order(tables, part)))

    return Placement(
        tables=tables,
        features=model.all_features(),
        parts=tuple(map(in_groups, owned)),
        replicated=in_groups(replicated),
        world_size=world_size,
        lookahead=plan.lookahead,
    )


def _order(tables: Sequence[TableSpec], part: Part) -> tuple[Any, ...]:
    return (*kernel_key(tables, part), part.row_split, part.table, part.column_start, part.row_start)


def _parts(number: int, table: TableSpec, plan: TablePlan, world_size: int) -> Iterator[tuple[int | None, Part]]:
    """Every part of a table with its rank; None: on every rank."""
    path = f"plan.tables[{number}]"
    if plan.column_blocks != table.block_edges:
        raise InvalidSpecError(
            f"{path}.columnBlocks",
            f"table {table.name}: the job has column blocks with edges {table.block_edges}: plan the job again",
        )
    shards = plan.shards
    if any(shard.kind == "data" for shard in shards):
        _check_replicas(path, table, shards, world_size)
        shards = shards[:1]
    rectangles: list[tuple[Rectangle, Shard]] = []
    for place_, shard in enumerate(shards):
        _check_shard(f"{path}.shards[{place_}]", table, shard, world_size)
        tiers = shard.tiers  # without a stack no policy tells groups apart
        share = tiers if tiers.is_stack else TierShare(levels=tiers.levels)
        edges = [edge for edge in table.block_edges if shard.column_start <= edge <= shard.column_end]
        for first, last in pairwise(edges):
            rectangles.append(
                ((first, last, shard.row_start, shard.row_end), shard.model_copy(update={"tiers": share}))
            )
    rectangles.sort(key=lambda each: each[0])
    _check_tiling(path, table, [rectangle for rectangle, _ in rectangles])
    for (first, last, row_start, row_end), shard in rectangles:
        part = Part(
            table=number,
            row_start=row_start,
            row_end=row_end,
            column_start=first,
            column_end=last,
            row_split=row_end - row_start < table.rows,
            share=shard.tiers,
        )
        yield (None if shard.kind == "data" else shard.rank), part


def _check_replicas(path: str, table: TableSpec, shards: Sequence[Shard], world_size: int) -> None:
    covering = (0, table.rows, 0, table.dim)
    good = all(
        shard.kind == "data" and (shard.row_start, shard.row_end, shard.column_start, shard.column_end) == covering
        for shard in shards
    )
    ranks = sorted(shard.rank for shard in shards)
    if not good or ranks not in ([0], list(range(world_size))):  # plans that are stored already may list each
        raise InvalidSpecError(
            f"{path}.shards",
            f"table {table.name}: a data-parallel table needs one data shard, whole, that stands for each rank's",
        )
    if any(shard.tiers.levels for shard in shards):
        raise InvalidSpecError(
            f"{path}.shards", f"table {table.name}: a data-parallel table is held in one tier, whole"
        )


def _check_shard(path: str, table: TableSpec, shard: Shard, world_size: int) -> None:
    if shard.rank >= world_size:
        raise InvalidSpecError(f"{path}.rank", f"table {table.name}: there are ranks 0 to {world_size - 1} alone")
    edges = table.block_edges
    if shard.column_start not in edges or shard.column_end not in edges or shard.column_start >= shard.column_end:
        raise InvalidSpecError(
            path,
            f"table {table.name}: columns {shard.column_start} to {shard.column_end} are no whole column blocks, "
            f"whose edges are {edges}",
        )
    levels, rows = shard.tiers.levels, shard.row_end - shard.row_start
    alone = len(levels) == 1 and levels[0].tier != "hbm"
    if levels and (alone or sum(level.rows for level in levels) < rows):
        raise InvalidSpecError(
            f"{path}.tiers", f"table {table.name}: its levels must be two or more, or hbm alone, and hold {rows} rows"
        )


def _check_tiling(path: str, table: TableSpec, rectangles: Sequence[Rectangle]) -> None:
    """Each column block's rows, each once: ``rectangles`` (first and last column, first and last row) are sorted."""
    reached: dict[int, int] = dict.fromkeys(table.block_edges[:-1], 0)
    for first, _, row_start, row_end in rectangles:
        if row_start != reached[first] or row_end <= row_start:
            raise InvalidSpecError(
                f"{path}.shards",
                f"table {table.name}: rows from {reached[first]} on of columns from {first} on are in no shard or two",
            )
        reached[first] = row_end
    short = {first: row for first, row in reached.items() if row != table.rows}
    for first, row in short.items():
        raise InvalidSpecError(
            f"{path}.shards",
            f"table {table.name}: rows {row} to {table.rows} of columns from {first} on are not the table's, "
            "or are in no shard: its shards must hold every row and column once",
        )
