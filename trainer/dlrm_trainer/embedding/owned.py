"""The parts that one rank alone holds: resident ones, and ones whose rows are fetched ahead into slots."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_checkpointer import RowsInPlace
from dlrm_trainer.embedding.checkpoint import LocalPart, saved_rows
from dlrm_trainer.embedding.groups import Group, make_group
from dlrm_trainer.embedding.options import EmbeddingOptions
from dlrm_trainer.embedding.pending import BeforeUpdates, Changing, SlotRows
from dlrm_trainer.embedding.placement import PartGroup, Placement
from dlrm_trainer.embedding.travelling import OwnedBags

if TYPE_CHECKING:
    from dlrm_trainer.embedding.tiers.prefetch import Lookahead
    from dlrm_trainer.embedding.tiers.stack import Fetched, Stack


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A batch's lookups whose rows are on their way to their slots."""

    bags: OwnedBags
    ids: tuple[Tensor, ...]
    """(L,) int64 of each group, column-major."""
    lengths: tuple[Tensor, ...]
    """(C_g, N) int32 of each group."""
    sizes: tuple[Tensor, ...]
    """(C_g,) int64 ids of each column of each group."""
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

    def __init__(self, placement: Placement, rank: int, options: EmbeddingOptions) -> None:
        self._batches = 0
        self.wait_s = 0.0
        """Seconds for which training waited for rows."""
        self.missing = 0
        """Lookups whose row was in no slot when their batch began: none, ever."""
        self.pending: BeforeUpdates | None = None
        """Of a cut that is being handed over while training goes on."""
        with ExitStack() as resources:
            self.groups = [make_group(placement, group, options, resources) for group in placement.groups[rank]]
            self._resources = resources.pop_all()
        self._counts = [len(group.plan.columns) for group in self.groups]
        self._ahead: Lookahead | None = None
        stacks = [group.stack for group in self.groups if group.stack]
        if stacks:
            self._ahead = _lookahead(stacks, options.tier_dir)
            self._resources.callback(self._ahead.close)

    def expect(self, bags: OwnedBags, *, updates: bool) -> Expected:
        """Say which rows a batch will look up, so that they are fetched while others are computed.

        Args:
            bags: of the global batch.
            updates: whether an update follows. Where none does, its lookup must be the next.
        """
        fetched = None
        ids, lengths, weights = self._by_group(bags)
        sizes = tuple(each.sum(dim=1, dtype=torch.int64) for each in lengths)
        if self._ahead is not None:
            lookups = [
                (each.numpy(), _part_ends(group.plan, of_columns).numpy())
                for group, each, of_columns in zip(self.groups, ids, sizes, strict=True)
                if group.stack is not None
            ]
            self._batches += 1
            fetched = self._ahead.fetch(lookups, self._batches) if updates else self._ahead.borrow(lookups)
        return Expected(
            bags=bags, ids=ids, lengths=lengths, sizes=sizes, weights=weights, fetched=fetched, updates=updates
        )

    def lookup(self, expected: Expected, learning_rate: float | None) -> Pooled:
        """Pool the rows of every bag, and keep what the update needs.

        Raises:
            DeviceError: rows could not be fetched.
        """
        slots = iter(self._wait(expected))
        rows = [
            ids if group.stack is None else torch.from_numpy(next(slots).slots)
            for group, ids in zip(self.groups, expected.ids, strict=True)
        ]
        on_devices = [  # of all groups before the first kernel: what is sent to a GPU waits for the kernels before it
            (ids.to(group.device), lengths.to(group.device), None if weights is None else weights.to(group.device))
            for group, ids, lengths, weights in zip(self.groups, rows, expected.lengths, expected.weights, strict=True)
        ]
        pooled = tuple(
            group.batch.lookup(ids, lengths, learning_rate, weights, sizes)
            for group, (ids, lengths, weights), sizes in zip(self.groups, on_devices, expected.sizes, strict=True)
        )
        if not expected.updates and self._ahead is not None and expected.fetched is not None:
            self._ahead.give_back(expected.fetched.result())
        return Pooled(pooled=pooled, expected=expected)

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
        if self.pending is not None:
            self._save_before(expected, self.pending)
        on_devices = [  # see ``lookup``
            (gradient.to(group.device), _rows_to_round(group, ids, sizes))
            for group, gradient, ids, sizes in zip(self.groups, gradients, expected.ids, expected.sizes, strict=True)
        ]
        for group, pooled, (gradient, rows), ids, sizes in zip(
            self.groups, looked_up.pooled, on_devices, expected.ids, expected.sizes, strict=True
        ):
            group.batch.update(pooled, gradient, step=step, rows=rows)
            group.dirty.mark(ids.numpy(), sizes.numpy(), group.starts)
        if self._ahead is not None and expected.fetched is not None:
            self._ahead.release(expected.fetched.result())

    def _save_before(self, expected: Expected, pending: BeforeUpdates) -> None:
        fetched = iter([] if expected.fetched is None else expected.fetched.result())
        for group, ids, sizes in zip(self.groups, expected.ids, expected.sizes, strict=True):
            slots = None if group.stack is None else next(fetched).slots
            place = partial(_place, group, slots)
            pending.before_update(Changing(group.dirty, ids.numpy(), sizes.numpy(), group.starts, place))

    def parts(self) -> Iterator[LocalPart]:
        """Every part that this rank alone holds."""
        for group in self.groups:
            yield from group.parts

    def saved_rows(self, *, moving: bool = False) -> Iterator[RowsInPlace]:
        """Every row of every part that changed since the parent of the next cut, once.

        Args:
            moving: those alone that do not stay where they are in the host's memory.
        """
        for group in self.groups:
            if moving and group.stack is None and group.device.type == "cpu":
                continue
            if group.stack is None:
                for part in group.parts:
                    yield from saved_rows(part)
            else:
                from dlrm_trainer.embedding.checkpoint import StackedPart, rows_of_stack

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


def _place(
    group: Group, slots: NDArray[np.int64] | None, number: int, rows: NDArray[np.int64], lookups: NDArray[np.int64]
) -> RowsInPlace:
    """Where rows of a part are that a batch has looked up: in slots, or in their own place."""
    part = group.parts[number]
    if slots is None:
        return part.in_place(rows)
    weight, state = group.batch.weights[number], group.batch.states[number]
    return SlotRows(part.shard, rows + part.shard.row_start, weight, state, slots[lookups])


def _rows_to_round(group: Group, ids: Tensor, sizes: Tensor) -> Tensor | None:
    """(L,) rows in their tables, on the group's device, where an update needs them and the ids looked up are others."""
    if group.plan.dtype == "fp32" or (group.stack is None and not bool(group.first_rows.any())):
        return None
    return (ids + torch.repeat_interleave(group.first_rows, sizes)).to(group.device)


def _part_ends(plan: PartGroup, sizes: Tensor) -> Tensor:
    """(K,) where the lookups of each part end, from those of each column (C_g,), part by part."""
    part_of = torch.tensor([part for part, _ in plan.columns], dtype=torch.int64)
    return torch.zeros(len(plan.parts), dtype=torch.int64).index_add_(0, part_of, sizes).cumsum(0)


def _lookahead(stacks: Sequence[Stack], tier_dir: Path | None) -> Lookahead:
    from dlrm_trainer.embedding.tiers.memory import node_of_folder, processors_near
    from dlrm_trainer.embedding.tiers.prefetch import Lookahead

    byte_addressable = {level.tier for stack in stacks for level in stack.levels} & {"scm", "cxl"}
    nodes = {node_of_folder(tier_dir / tier) for tier in byte_addressable} if tier_dir else set()
    nodes.discard(None)
    near = frozenset[int]().union(*(processors_near(node) for node in nodes if node is not None))
    return Lookahead(stacks, near)
