"""Which table lives where, read from the plan: pure data that every rank derives alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from dlrm_api.errors import InvalidSpecError
from dlrm_api.model import TableSpec
from dlrm_api.plan import Plan, TablePlan, TierShare
from dlrm_api.tiers import RowDtype


@dataclass(frozen=True, kw_only=True)
class TableGroup:
    """Tables of one rank that share a kernel: resident ones of one dtype, or a class whose rows share levels."""

    numbers: tuple[int, ...]
    dtype: RowDtype
    shares: tuple[TierShare, ...]
    """Of each table; none has levels, or all have the same tiers, policy and ways, and one dim."""

    @property
    def has_levels(self) -> bool:
        """Whether rows of these tables live in a stack of levels."""
        return bool(self.shares and self.shares[0].levels)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The owner of every table. Tables are named by their number in the model's order."""

    tables: tuple[TableSpec, ...]
    owners: tuple[int | None, ...]
    """Rank that holds the whole table; None for a data-parallel table, which every rank holds."""
    shares: tuple[TierShare, ...]
    """Where each table's rows live on their rank."""
    world_size: int
    lookahead: int = 0
    """Batches whose rows are fetched ahead."""

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """The data-parallel tables, those of a group side by side."""
        return tuple(sorted((n for n, owner in enumerate(self.owners) if owner is None), key=self._group_key))

    @cached_property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """The tables that each rank alone holds, those of a group side by side."""
        lists: list[list[int]] = [[] for _ in range(self.world_size)]
        for number, owner in enumerate(self.owners):
            if owner is not None:
                lists[owner].append(number)
        return tuple(tuple(sorted(numbers, key=self._group_key)) for numbers in lists)

    def groups(self, numbers: Sequence[int]) -> tuple[TableGroup, ...]:
        """The groups of some tables of one rank, in the order of ``owned`` or ``replicated``."""
        return tuple(
            TableGroup(
                numbers=(members := tuple(each)),
                dtype=self.tables[members[0]].dtype,
                shares=tuple(self.shares[number] for number in members),
            )
            for _, each in groupby(numbers, key=lambda number: self._group_key(number)[:-1])
        )

    def _group_key(self, number: int) -> tuple[Any, ...]:
        table, share = self.tables[number], self.shares[number]
        tiers = tuple(level.tier for level in share.levels)
        return (tiers, table.dtype, table.dim if tiers else 0, share.policy, share.ways, number)

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
    shares = tuple(_share(f"plan.tables[{number}]", table_plan) for number, table_plan in enumerate(plan.tables))
    return Placement(
        tables=tuple(tables), owners=owners, shares=shares, world_size=world_size, lookahead=plan.lookahead
    )


def _share(path: str, plan: TablePlan) -> TierShare:
    share = plan.shards[0].tiers
    if not share.levels:
        return TierShare()  # the policy of a table without levels tells no groups apart
    if plan.shards[0].kind == "data":
        raise InvalidSpecError(f"{path}.shards", f"table {plan.name}: a data-parallel table is held in one tier, whole")
    rows = plan.shards[0].row_end - plan.shards[0].row_start
    if len(share.levels) < 2 or sum(level.rows for level in share.levels) < rows:
        raise InvalidSpecError(
            f"{path}.shards[0].tiers", f"table {plan.name}: its levels must be two or more and hold {rows} rows"
        )
    return share


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
