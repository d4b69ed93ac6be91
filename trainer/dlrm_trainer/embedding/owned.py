"""The parts that one rank alone holds: resident ones, and ones whose rows are fetched ahead into slots."""

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
from dlrm_api.training import CommunicationSpec, RowOptimizerSpec
from dlrm_checkpointer.cut import ShardRows
from dlrm_trainer.embedding.exchange import OwnedBags
from dlrm_trainer.embedding.kernels import HOST, TableBatch
from dlrm_trainer.embedding.placement import PartGroup, Placement
from dlrm_trainer.embedding.rows import LocalPart, ResidentPart
from dlrm_trainer.embedding.segment_loops import mark_rows

if TYPE_CHECKING:
    from dlrm_trainer.embedding.tiers.lookahead import Lookahead
    from dlrm_trainer.embedding.tiers.stack import Fetched, Stack


@dataclass(frozen=True, kw_only=True)
class OwnedOptions:
    """What a rank's parts need to know beside the model and the plan."""

    optimizer: RowOptimizerSpec
    seed: int
    global_batch_size: int
    tier_dir: Path | None
    """Folder of the tiers' mounts; None where the plan needs none."""
    communication: CommunicationSpec = field(default_factory=CommunicationSpec)
    """Number formats on the wire."""


@dataclass
class Group:
    """Parts behind one kernel, over slots of a stack or resident."""

    plan: PartGroup
    batch: TableBatch
    parts: Sequence[LocalPart]
    first_rows: Tensor
    """(C_g,) int64 first row, in its table, of each column's part."""
    shifts: Tensor
    """(C_g,) int64 of resident parts: where each column's rows begin in ``updated``."""
    updated: Tensor
    """(sum of rows,) bool, of resident parts."""
    device: torch.device = HOST
    stack: Stack | None = None


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A batch's lookups whose rows are on their way to their slots."""

    bags: OwnedBags
    ids: tuple[Tensor, ...]
    """(L,) int64 of each group, column-major."""
    lengths: tuple[Tensor, ...]
    """(C_g, N) int32 of each group."""
    weights: tuple[Tensor | None, ...]
    """(L,) float32 of each group."""
    fetched: Future[list[Fetched]] | None
    updates: bool


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """Pooled rows of one batch, and what their update needs."""

    pooled: tuple[Tensor, ...]
    """(N, C_g * w_g) of each group."""
    expected: Expected


class OwnedParts:
    """Looks up and updates the parts of one rank, group by group.

    Args:
        placement: of all tables.
        rank: this one.
        options: see there.

    Raises:
        InvalidSpecError: the plan asks for a tier and no folder was given for it.
        DeviceError: a tier's file can't be made.
    """

    def __init__(self, placement: Placement, rank: int, options: OwnedOptions) -> None:
        self._options, self._placement = options, placement
        self._tables = placement.tables
        self._in_flight = placement.lookahead + 2  # those ahead, the one computed, and an evaluation's
        self._batches = 0
        self.wait_s = 0.0
        """Seconds for which training waited for rows."""
        self.missing = 0
        """Lookups whose row was in no slot when their batch began: none, ever."""
        with ExitStack() as resources:
            self.groups = [self._make_group(group, resources) for group in placement.groups[rank]]
            self._resources = resources.pop_all()
        self._counts = [len(group.plan.columns) for group in self.groups]
        self._ahead: Lookahead | None = None
        stacks = [group.stack for group in self.groups if group.stack]
        if stacks:
            self._ahead = _lookahead(stacks, options.tier_dir)
            self._resources.callback(self._ahead.close)

    def _make_group(self, plan: PartGroup, resources: ExitStack) -> Group:
        if plan.has_levels:
            return self._make_stacked(plan, resources)
        rows = [part.rows for part in plan.parts]
        batch = self._make_batch(plan, rows, HOST)
        updated = torch.zeros(sum(rows), dtype=torch.bool)
        starts = torch.tensor([0, *rows], dtype=torch.int64).cumsum(0)[:-1]
        parts = [
            ResidentPart(
                table=self._tables[part.table],
                shard=self._placement.shard(part),
                weight=weight,
                state=state,
                updated=flags,
            )
            for part, weight, state, flags in zip(
                plan.parts, batch.weights, batch.states, torch.split(updated, rows), strict=True
            )
        ]
        return self._group(plan, batch, parts, starts, updated)

    def _make_stacked(self, plan: PartGroup, resources: ExitStack) -> Group:
        from dlrm_trainer.embedding.tiers import tables as stacked  # compiled loops: loaded where a plan needs them

        options, features = self._options, self._placement.features_of
        most = [
            self._tables[part.table].max_lookups
            * len(features[part.table])
            * options.global_batch_size
            * self._in_flight
            for part in plan.parts
        ]
        members = stacked.stack_tables(plan, self._tables, most)
        device = _device_of(plan)
        batch = self._make_batch(plan, [member.slots + member.extra for member in members], device)
        stack = stacked.make_stack(plan, members, batch, options.seed, options.tier_dir)
        resources.callback(stack.close)
        parts = [
            stacked.StackedPart(self._tables[part.table], self._placement.shard(part), stack, number)
            for number, part in enumerate(plan.parts)
        ]
        group = self._group(plan, batch, parts, torch.zeros(len(parts), dtype=torch.int64), torch.empty(0))
        group.device, group.stack = device, stack
        return group

    def _group(
        self, plan: PartGroup, batch: TableBatch, parts: Sequence[LocalPart], starts: Tensor, updated: Tensor
    ) -> Group:
        part_of = torch.tensor([part for part, _ in plan.columns], dtype=torch.int64)
        firsts = torch.tensor([part.row_start for part in plan.parts], dtype=torch.int64)
        return Group(
            plan=plan, batch=batch, parts=parts, first_rows=firsts[part_of], shifts=starts[part_of], updated=updated
        )

    def _make_batch(self, plan: PartGroup, rows: Sequence[int], device: torch.device) -> TableBatch:
        return TableBatch(
            [(count, plan.width) for count in rows],
            self._options.optimizer,
            dtype=plan.dtype,
            device=device,
            seed=self._options.seed,
            names=[self._tables[part.table].name for part in plan.parts],
            features=[part for part, _ in plan.columns],
            first_columns=[part.column_start for part in plan.parts],
        )

    def expect(self, bags: OwnedBags, *, updates: bool) -> Expected:
        """Say which rows a batch will look up, so that they are fetched while others are computed.

        Args:
            bags: of the global batch.
            updates: whether an update follows. Where none does, its lookup must be the next.
        """
        fetched = None
        ids, lengths, weights = self._by_group(bags)
        if self._ahead is not None:
            lookups = [
                (each.numpy(), _part_ends(group.plan, bag_lengths).numpy())
                for group, each, bag_lengths in zip(self.groups, ids, lengths, strict=True)
                if group.stack is not None
            ]
            self._batches += 1
            fetched = self._ahead.fetch(lookups, self._batches) if updates else self._ahead.borrow(lookups)
        return Expected(bags=bags, ids=ids, lengths=lengths, weights=weights, fetched=fetched, updates=updates)

    def lookup(self, expected: Expected, learning_rate: float | None) -> Pooled:
        """Pool the rows of every bag, and keep what the update needs.

        Raises:
            DeviceError: rows could not be fetched.
        """
        slots = iter(self._wait(expected))
        pooled = []
        for group, ids, lengths, weights in zip(
            self.groups, expected.ids, expected.lengths, expected.weights, strict=True
        ):
            rows = ids if group.stack is None else torch.from_numpy(next(slots).slots)
            on_device = None if weights is None else weights.to(group.device)
            pooled.append(
                group.batch.lookup(rows.to(group.device), lengths.to(group.device), learning_rate, weights=on_device)
            )
        if not expected.updates and self._ahead is not None and expected.fetched is not None:
            self._ahead.give_back(expected.fetched.result())
        return Pooled(pooled=tuple(pooled), expected=expected)

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

    def update(self, looked_up: Pooled, gradients: Sequence[Tensor], step: int) -> None:
        """Update every row that ``lookup`` pooled, once.

        Args:
            looked_up: from a lookup with a learning rate.
            gradients: (N, C_g * w_g) of each group, of the loss by what ``lookup`` pooled.
            step: number of the step.
        """
        expected = looked_up.expected
        for group, pooled, gradient, ids, lengths in zip(
            self.groups, looked_up.pooled, gradients, expected.ids, expected.lengths, strict=True
        ):
            sizes = lengths.sum(dim=1, dtype=torch.int64)
            moved = group.stack is not None or bool(group.first_rows.any())
            rows = (ids + torch.repeat_interleave(group.first_rows, sizes)).to(group.device) if moved else None
            group.batch.update(pooled, gradient.to(group.device), step=step, rows=rows)
            if group.stack is None:
                mark_rows(group.updated.numpy(), ids.numpy(), sizes.numpy(), group.shifts.numpy())
        if self._ahead is not None and expected.fetched is not None:
            self._ahead.release(expected.fetched.result())

    def parts(self) -> Iterator[LocalPart]:
        """Every part that this rank alone holds."""
        for group in self.groups:
            yield from group.parts

    def rows_updated(self) -> Iterator[ShardRows]:
        """Every row of every part that an update ever touched, once."""
        for group in self.groups:
            if group.stack is None:
                for part in group.parts:
                    yield from part.rows_updated()
            else:
                from dlrm_trainer.embedding.tiers.tables import StackedPart, rows_of_stack

                yield from rows_of_stack(group.stack, [part for part in group.parts if isinstance(part, StackedPart)])

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

    def _by_group(self, bags: OwnedBags) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """Ids, lengths and weights of each group."""
        if len(self.groups) < 2:
            count = len(self.groups)
            return (bags.ids,) * count, (bags.lengths,) * count, (bags.weights,) * count
        lengths = torch.split(bags.lengths, self._counts)
        sizes = [int(each.sum()) for each in lengths]
        weights = (None,) * len(sizes) if bags.weights is None else torch.split(bags.weights, sizes)
        return torch.split(bags.ids, sizes), lengths, weights


def _part_ends(plan: PartGroup, lengths: Tensor) -> Tensor:
    """(K,) where the lookups of each part end, from (C_g, N) lengths of bags, part by part."""
    part_of = torch.tensor([part for part, _ in plan.columns], dtype=torch.int64)
    sizes = torch.zeros(len(plan.parts), dtype=torch.int64)
    return sizes.index_add_(0, part_of, lengths.sum(dim=1, dtype=torch.int64)).cumsum(0)


def _device_of(plan: PartGroup) -> torch.device:
    """Where the slots of a group lie: on this process's GPU, or on the host."""
    if plan.parts[0].share.levels[0].tier != "hbm":
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
