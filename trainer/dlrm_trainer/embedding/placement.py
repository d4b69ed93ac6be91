"""Which table lives where, read from the plan: pure data that every rank derives alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from dlrm_api.errors import InvalidSpecError
from dlrm_api.model import TableSpec
from dlrm_api.plan import Plan, TablePlan


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The owner of every table. Tables are named by their number in the model's order."""

    tables: tuple[TableSpec, ...]
    owners: tuple[int | None, ...]
    """Rank that holds the whole table; None for a data-parallel table, which every rank holds."""
    world_size: int

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The data-parallel tables."""
        return tuple(number for number, owner in enumerate(self.owners) if owner is None)

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """The tables that each rank alone holds."""
        lists: list[list[int]] = [[] for _ in range(self.world_size)]
        for number, owner in enumerate(self.owners):
            if owner is not None:
                lists[owner].append(number)
        return tuple(map(tuple, lists))

    @cached_property
    def exchange_order(self) -> tuple[int, ...]:
        """Tables in the order of their columns after the exchange: owner by owner, then data-parallel ones."""
        return (*(number for numbers in self.owned for number in numbers), *self.replicated)

    def saver(self, number: int) -> int:
        """Rank that hands a table's rows over at a cut: the owner, or one for each data-parallel table in turn."""
        owner = self.owners[number]
        return number % self.world_size if owner is None else owner


def place(tables: Sequence[TableSpec], plan: Plan, world_size: int) -> Placement:
    """Read the owners from a plan.

    Raises:
        InvalidSpecError: the plan is of another job or world size, or asks for a sharding that is not built.
    """
    if plan.world_size != world_size:
        raise InvalidSpecError(
            "plan.worldSize", f"the plan is for {plan.world_size} ranks, the job for {world_size}: plan it again"
        )
    names, planned = [table.name for table in tables], [table.name for table in plan.tables]
    if names != planned:
        odd = next((name for name in names if name not in planned), None)
        what = f"table {odd} is not in the plan" if odd else "the plan's tables are not the model's, in its order"
        raise InvalidSpecError("plan.tables", f"{what}: plan the job again")
    owners = tuple(
        _owner(f"plan.tables[{number}]", table, table_plan, world_size)
        for number, (table, table_plan) in enumerate(zip(tables, plan.tables, strict=True))
    )
    return Placement(tables=tuple(tables), owners=owners, world_size=world_size)


def _owner(path: str, table: TableSpec, plan: TablePlan, world_size: int) -> int | None:
    if plan.column_blocks != (0, table.dim):
        raise InvalidSpecError(
            f"{path}.columnBlocks", f"table {table.name}: one block (0, {table.dim}) is all that this version builds"
        )
    ranks = sorted(shard.rank for shard in plan.shards)
    for number, shard in enumerate(plan.shards):
        if shard.kind not in ("table", "data"):
            raise InvalidSpecError(
                f"{path}.shards[{number}].kind", f"table {table.name}: sharding {shard.kind} is not built here"
            )
        extent = (shard.row_start, shard.row_end, shard.column_start, shard.column_end)
        if extent != (0, table.rows, 0, table.dim):
            raise InvalidSpecError(
                f"{path}.shards[{number}]", f"table {table.name}: a {shard.kind} shard must cover the whole table"
            )
    kinds = {shard.kind for shard in plan.shards}
    if kinds == {"table"} and len(ranks) == 1 and ranks[0] < world_size:
        return ranks[0]
    if kinds == {"data"} and ranks == list(range(world_size)):
        return None
    raise InvalidSpecError(
        f"{path}.shards", f"table {table.name}: give one table shard on a rank of the job, or a data shard on each rank"
    )
