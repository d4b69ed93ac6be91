"""The tables that one rank alone holds: resident ones, and ones whose rows are fetched ahead into slots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dlrm_api.errors import InvalidSpecError
from dlrm_api.model import TableSpec
from dlrm_api.training import RowOptimizerSpec
from dlrm_checkpointer.cut import ShardRows
from dlrm_trainer.embedding.exchange import OwnedBags
from dlrm_trainer.embedding.kernels import HOST, TableBatch
from dlrm_trainer.embedding.placement import Placement, TableGroup
from dlrm_trainer.embedding.rows import LocalTable, ResidentTable

if TYPE_CHECKING:
    from dlrm_trainer.embedding.tiers.lookahead import Lookahead
    from dlrm_trainer.embedding.tiers.stack import Fetched, Stack


@dataclass(frozen=True, kw_only=True)
class OwnedOptions:
    """What a rank's tables need to know beside the model and the plan."""

    optimizer: RowOptimizerSpec
    seed: int
    global_batch_size: int
    tier_dir: Path | None
    """Folder of the tiers' mounts; None where the plan needs none."""


@dataclass
class Group:
    """Tables behind one kernel, over slots of a stack or resident."""

    plan: TableGroup
    batch: TableBatch
    tables: Sequence[LocalTable]
    device: torch.device = HOST
    stack: Stack | None = None
    updated: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.bool))
    """(sum of rows,) bool, of resident tables."""
    row_starts: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """(tables,) in ``updated``."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A batch's lookups whose rows are on their way to their slots."""

    samples: tuple[int, ...]
    """Of each rank."""
    ids: tuple[Tensor, ...]
    """(L,) int64 of each group, table-major."""
    lengths: tuple[Tensor, ...]
    """(tables, N) int32 of each group."""
    fetched: Future[list[Fetched]] | None
    updates: bool


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Pooled rows of one batch, and what their update needs."""

    pooled: tuple[Tensor, ...]
    """(N, width) of each group."""
    expected: Expected


class OwnedTables:
    """Looks up and updates the tables of one rank, group by group.

    Args:
        placement: of all tables.
        rank: this one.
        options: see there.

    Raises:
        InvalidSpecError: the plan asks for a tier and no folder was given for it.
        DeviceError: a tier's file can't be made.
    """

    def __init__(self, placement: Placement, rank: int, options: OwnedOptions) -> None:
        self._options = options
        self._tables = placement.tables
        self._in_flight = placement.lookahead + 2  # those ahead, the one computed, and an evaluation's
        self._batches = 0
        self.wait_s = 0.0
        """Seconds for which training waited for rows."""
        self.missing = 0
        """Lookups whose row was in no slot when their batch began: none, ever."""
        with ExitStack() as resources:
            self.groups = [self._make_group(group, resources) for group in placement.groups(placement.owned[rank])]
            self._resources = resources.pop_all()
        self._counts = [len(group.plan.numbers) for group in self.groups]
        self._ahead: Lookahead | None = None
        stacks = [group.stack for group in self.groups if group.stack]
        if stacks:
            self._ahead = _lookahead(stacks, options.tier_dir)
            self._resources.callback(self._ahead.close)

    def _make_group(self, plan: TableGroup, resources: ExitStack) -> Group:
        tables = [self._tables[number] for number in plan.numbers]
        rows = [table.rows for table in tables]
        if plan.has_levels:
            return self._make_stacked(plan, tables, resources)
        batch = self._make_batch(plan, tables, rows, HOST)
        updated = torch.zeros(sum(rows), dtype=torch.bool)
        starts = torch.tensor([0, *rows], dtype=torch.int64).cumsum(0)[:-1]
        views = [
            ResidentTable(table=table, weight=weight, state=state, updated=flags)
            for table, weight, state, flags in zip(
                tables, batch.weights, batch.states, torch.split(updated, rows), strict=True
            )
        ]
        return Group(plan=plan, batch=batch, tables=views, updated=updated, row_starts=starts)

    def _make_stacked(self, plan: TableGroup, tables: Sequence[TableSpec], resources: ExitStack) -> Group:
        from dlrm_trainer.embedding.tiers import tables as stacked  # compiled loops: loaded where a plan needs them

        options = self._options
        most = [table.max_lookups * options.global_batch_size * self._in_flight for table in tables]
        members = stacked.stack_tables(plan, self._tables, most)
        device = _device_of(plan)
        batch = self._make_batch(plan, tables, [member.slots + member.extra for member in members], device)
        stack = stacked.make_stack(plan, members, batch, options.seed, tables[0].dim, options.tier_dir)
        resources.callback(stack.close)
        views = [stacked.StackedTable(table, stack, number) for number, table in enumerate(tables)]
        return Group(plan=plan, batch=batch, tables=views, device=device, stack=stack)

    def _make_batch(
        self, plan: TableGroup, tables: Sequence[TableSpec], rows: Sequence[int], device: torch.device
    ) -> TableBatch:
        return TableBatch(
            [(count, table.dim) for count, table in zip(rows, tables, strict=True)],
            self._options.optimizer,
            dtype=plan.dtype,
            device=device,
            seed=self._options.seed,
            names=[table.name for table in tables],
        )

    def expect(self, bags: OwnedBags, *, updates: bool) -> Expected:
        """Say which rows a batch will look up, so that they are fetched while others are computed.

        Args:
            bags: of the global batch.
            updates: whether an update follows. Where none does, its lookup must be the next.
        """
        fetched = None
        all_ids, all_lengths = self._by_group(bags)
        if self._ahead is not None:
            lookups = [
                (ids.numpy(), lengths.sum(dim=1, dtype=torch.int64).cumsum(0).numpy())
                for group, ids, lengths in zip(self.groups, all_ids, all_lengths, strict=True)
                if group.stack is not None
            ]
            self._batches += 1
            fetched = self._ahead.fetch(lookups, self._batches) if updates else self._ahead.borrow(lookups)
        return Expected(samples=bags.samples, ids=all_ids, lengths=all_lengths, fetched=fetched, updates=updates)

    def lookup(self, expected: Expected, learning_rate: float | None) -> tuple[Tensor, Pooled]:
        """Pool the rows of every bag: (N, D_r), group by group, and what the update needs.

        Raises:
            DeviceError: rows could not be fetched.
        """
        slots = iter(self._wait(expected))
        ids = tuple(
            rows if group.stack is None else torch.from_numpy(next(slots).slots)
            for group, rows in zip(self.groups, expected.ids, strict=True)
        )
        pooled = tuple(
            group.batch.lookup(each.to(group.device), lengths.to(group.device), learning_rate)
            for group, each, lengths in zip(self.groups, ids, expected.lengths, strict=True)
        )
        if not expected.updates and self._ahead is not None and expected.fetched is not None:
            self._ahead.give_back(expected.fetched.result())
        parts = [each.detach().to(HOST) for each in pooled]
        joined = parts[0] if len(parts) == 1 else torch.cat([torch.zeros(sum(expected.samples), 0), *parts], dim=1)
        return joined, Pooled(pooled=pooled, expected=expected)

    def _wait(self, expected: Expected) -> list[Fetched]:
        if expected.fetched is None:
            return []
        start = time.monotonic()
        fetched = expected.fetched.result()
        self.wait_s += time.monotonic() - start
        missing = sum(int((each.slots < 0).sum()) for each in fetched)
        self.missing += missing
        assert missing == 0, f"{missing} lookups of a batch that begins have no row in a slot"
        return fetched

    def update(self, looked_up: Pooled, gradient: Tensor, step: int) -> None:
        """Update every row that ``lookup`` pooled, once.

        Args:
            looked_up: from a lookup with a learning rate.
            gradient: (N, D_r) of the loss by what ``lookup`` returned.
            step: number of the step.
        """
        expected = looked_up.expected
        parts = torch.split(gradient, [group.batch.dim for group in self.groups], dim=1) if self.groups else ()
        for group, pooled, part, ids, sizes in zip(
            self.groups, looked_up.pooled, parts, expected.ids, expected.lengths, strict=True
        ):
            global_rows = None if group.stack is None else ids.to(group.device)
            group.batch.update(pooled, part.contiguous().to(group.device), step=step, rows=global_rows)
            if group.stack is None:
                counts = sizes.sum(dim=1, dtype=torch.int64)
                group.updated[ids + torch.repeat_interleave(group.row_starts, counts)] = True
        if self._ahead is not None and expected.fetched is not None:
            self._ahead.release(expected.fetched.result())

    def tables(self) -> Iterator[tuple[int, LocalTable]]:
        """Every table that this rank alone holds, by its number in the model's order."""
        for group in self.groups:
            yield from zip(group.plan.numbers, group.tables, strict=True)

    def rows_updated(self) -> Iterator[ShardRows]:
        """Every row of every table that an update ever touched, once."""
        for group in self.groups:
            if group.stack is None:
                for table in group.tables:
                    yield from table.rows_updated()
            else:
                from dlrm_trainer.embedding.tiers.tables import rows_of_stack

                yield from rows_of_stack(group.stack, [table.table for table in group.tables])

    def settle(self) -> None:
        """Wait until no row is on its way, so that tables can be read and restored.

        Raises:
            DeviceError: rows could not be moved.
        """
        if self._ahead is not None:
            self._ahead.settle()

    def close(self) -> None:
        """End the lookahead and give the tiers' files back."""
        self._resources.close()

    def _by_group(self, bags: OwnedBags) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Ids and lengths of each group."""
        if len(self.groups) < 2:
            return (bags.ids,) * len(self.groups), (bags.lengths,) * len(self.groups)
        lengths = torch.split(bags.lengths, self._counts)
        return torch.split(bags.ids, [int(each.sum()) for each in lengths]), lengths


def _device_of(plan: TableGroup) -> torch.device:
    """Where the slots of a group lie: on this process's GPU, or on the host."""
    if plan.shares[0].levels[0].tier != "hbm":
        return HOST
    if not torch.cuda.is_available():
        raise InvalidSpecError("plan.tables", "slots in tier hbm need a CUDA device, and this process sees none")
    return torch.device("cuda", torch.cuda.current_device())


def _lookahead(stacks: Sequence[Stack], tier_dir: Path | None) -> Lookahead:
    from dlrm_trainer.embedding.tiers.lookahead import Lookahead
    from dlrm_trainer.embedding.tiers.numa import node_of_folder, processors_near

    byte_addressable = {level.tier for stack in stacks for level in stack.levels} & {"scm", "cxl"}
    nodes = {node_of_folder(tier_dir / tier) for tier in byte_addressable} if tier_dir else set()
    nodes.discard(None)
    near = frozenset[int]().union(*(processors_near(node) for node in nodes if node is not None))
    return Lookahead(stacks, near)
