"""Look up and update the parts of one rank, resident ones and those with rows fetched into slots ahead of use."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import InvalidSpecError
from dlrm_api.row_optimizers import state_values
from dlrm_api.tiers import MAX_DEVICE_COLUMNS, MAX_LINKED_SLOTS, RowDtype, extra_slots
from dlrm_api.training import RowOptimizerSpec
from dlrm_checkpointer import CutRowSource
from dlrm_kernels import bags as bag_kernels
from dlrm_kernels import row_updates
from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.parallel import parallel_for
from dlrm_kernels.row_updates import Layout, Lookups, Work
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import LocalPart, ResidentPart, SlotRows, StackedPart, rows_of_stack, saved_rows
from dlrm_trainer.embedding.exchange import Bags, OwnedIds
from dlrm_trainer.embedding.placement import (
    TORCH_TYPES,
    EmbeddingOptions,
    PartGroup,
    Placement,
    Tables,
    joined,
    table_views,
)
from dlrm_trainer.embedding.tiers.memory import node_of_folder, processors_near
from dlrm_trainer.embedding.tiers.prefetch import Prefetcher
from dlrm_trainer.embedding.tiers.slots import untouched_zeros
from dlrm_trainer.embedding.tiers.stack import Fetched, Stack, make_stack, stack_tables

UNIT_LOOKUPS, UNIT_BAGS = 1 << 10, 1 << 9
"""Smallest unit of work of a thread."""
UNITS_PER_THREAD = 4
ALL_ONES = np.zeros(0, np.float32)
"""Weights of ids that have none."""


class Kernel(Protocol):
    """Look up and update tables on one device."""

    weights: tuple[Tensor, ...]
    states: tuple[Tensor, ...]

    def pool(self, bags: Bags, updates: bool) -> Tensor:
        """Sum the rows of each bag: see ``TableBatch.lookup``."""

    def update(self, bags: Bags, gradient: Tensor, learning_rate: float, step: int, rows: Tensor) -> None:
        """Update the rows that were pooled: see ``TableBatch.update``."""

    def update_rows(self, table: int, rows: Tensor, gradient: Tensor, learning_rate: float, step: int) -> None:
        """Update chosen rows of a table: see ``TableBatch.update_rows``."""


class HostKernel:
    """Look up and update tables in host memory, on as many threads as torch uses."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        states_of = [(rows, state_values(tables.optimizer.kind, dim)) for rows, dim in tables.shapes]
        rows = lazy_zeros(_elements(tables.shapes), TORCH_TYPES[tables.dtype])
        states = lazy_zeros(_elements(states_of), torch.float32)
        self.weights = table_views(rows, tables.shapes)
        self.states = table_views(states, states_of)
        self._memory = row_updates.memory_of(rows.numpy(), states.numpy())
        dims = [dim for _, dim in tables.shapes]
        feature_dims = [dims[table] for table in tables.features]
        self._width = sum(feature_dims)
        self._layout = Layout(
            starts=_starts(math.prod(shape) for shape in tables.shapes)[:-1],
            state_starts=_starts(math.prod(shape) for shape in states_of)[:-1],
            state_widths=np.array([width for _, width in states_of], np.uint64),
            row_bits=np.array([(rows - 1).bit_length() for rows, _ in tables.shapes], np.uint64),
            first_features=np.searchsorted(tables.features, np.arange(len(dims) + 1)).astype(np.uint64),
            columns=_starts(feature_dims)[:-1],
            first_columns=np.array(tables.first_columns, np.uint64),
        )
        self._feature_starts = self._layout.starts[np.array(tables.features, np.int64)]
        self._by_dim = [
            (size_of(dim), np.flatnonzero(np.array(feature_dims) == dim), np.flatnonzero(np.array(dims) == dim))
            for dim in sorted(set(dims))
        ]
        """Features and tables of each dim."""

    def pool(self, bags: Bags, updates: bool) -> Tensor:
        """See ``Kernel``."""
        del updates
        samples = bags.lengths.shape[1]
        pooled = torch.empty(samples, self._width)
        offsets, out = _offsets(bags.lengths), pooled.view(-1).numpy()
        for size, features, _ in self._by_dim:
            parallel_for(
                bag_kernels.pool,
                max(1, len(features) * min(samples, len(bags.ids)) // UNIT_BAGS),
                torch.get_num_threads(),
                size,
                features,
                self._memory,
                self._feature_starts,
                self._layout.columns,
                _unsigned(bags.ids),
                offsets,
                _weights(bags.weights),
                samples,
                np.uint64(self._width),
                out,
            )
        return pooled

    def update(self, bags: Bags, gradient: Tensor, learning_rate: float, step: int, rows: Tensor) -> None:
        """See ``Kernel``."""
        offsets, samples = _offsets(bags.lengths), bags.lengths.shape[1]
        edges = offsets[self._layout.first_features * np.uint64(samples)]
        sizes = np.diff(edges).astype(np.int64)
        of_batch = Lookups(
            ids=_unsigned(bags.ids),
            numbers=_unsigned(rows),
            offsets=offsets,
            weights=_weights(bags.weights),
            gradient=gradient.contiguous().view(-1).numpy(),
            samples=samples,
            width=np.uint64(self._width),
        )
        constants = self._tables.constants(learning_rate)
        keys = row_updates.step_keys(self._tables.keys, step)
        for size, _, tables in self._by_dim:
            work = _work(tables, sizes[tables])
            parallel_for(
                row_updates.update_rows_of_bags,
                len(work.tables),
                torch.get_num_threads(),
                size,
                work,
                self._memory,
                self._layout,
                of_batch,
                constants,
                keys,
            )

    def update_rows(self, table: int, rows: Tensor, gradient: Tensor, learning_rate: float, step: int) -> None:
        """See ``Kernel``."""
        row_updates.update_rows(
            self.weights[table].numpy(),
            self.states[table].numpy(),
            _unsigned(rows),
            gradient.contiguous().numpy(),
            self._tables.constants(learning_rate),
            row_updates.step_keys(self._tables.keys[table : table + 1], step),
            self._tables.first_columns[table],
            torch.get_num_threads(),
        )


class TableBatch:
    """Hold rows of several tables behind one kernel: pooled lookup, and an exact update of the rows looked up.

    Each row that a batch looks up is updated once, by the sum of its gradients, on the host in the order of the batch
    (feature after feature if a table has several): bits depend neither on threads nor on the slots of rows.
    A GPU has an order of its own: with row-wise Adagrad and SGD an fp32 row that a batch looks up over 1,024 times may
    get other bits each time, unless ``deterministic``; sums of fp16 rows and of Adam are the same each time, but depend
    on whether neighbouring features of one dim have more than 3,072 lookups together.

    Memory is that of rows and states only; pages are untouched until rows are written.

    Args:
        shapes: (rows, dim) of each table; dim a multiple of 4. May be empty: lookups are then (N, 0).
        optimizer: of the rows.
        dtype: of the rows; states are always fp32.
        device: of rows and states, and of all tensors given and returned.
        seed: of the rounding of fp16 rows.
        names: of the tables, for the rounding of fp16 rows.
        features: the table of each feature, ascending; None: one feature per table.
        first_columns: first column of each table in the table of its name, for the rounding of fp16 rows; multiples of
            4. None: all 0.
        deterministic: whether equal batches leave equal bits also on a GPU.

    Source: Mudigere et al., ISCA 2022 (exact fused optimizers).
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        optimizer: RowOptimizerSpec,
        *,
        dtype: RowDtype = "fp32",
        device: torch.device = HOST,
        seed: int = 0,
        names: Sequence[str] = (),
        features: Sequence[int] | None = None,
        first_columns: Sequence[int] | None = None,
        deterministic: bool = False,
    ) -> None:
        assert dtype == "fp32" or len(names) == len(shapes), "rounding of fp16 rows needs the name of every table"
        keys = [row_updates.table_key(seed, name) for name in names] if dtype == "fp16" else []
        tables = Tables(
            shapes=tuple(shapes),
            features=tuple(range(len(shapes)) if features is None else features),
            optimizer=optimizer,
            dtype=dtype,
            device=device,
            keys=np.array(keys, np.uint64),
            first_columns=tuple([0] * len(shapes) if first_columns is None else first_columns),
            deterministic=deterministic,
        )
        assert list(tables.features) == sorted(tables.features), "features of one table must be neighbours"
        self._tables = tables
        self._pending: tuple[Tensor, Bags] | None = None
        self.kernel = make_kernel(tables) if shapes else None
        self.weights: tuple[Tensor, ...] = self.kernel.weights if self.kernel else ()
        """(rows, dim) float32 or float16 of each table, views of one buffer, table by table; zero."""
        self.states: tuple[Tensor, ...] = self.kernel.states if self.kernel else ()
        """(rows, S) float32 of each table, S = ``state_values``; views of one buffer likewise; zero."""

    def storage(self) -> tuple[Tensor, Tensor]:
        """Return all rows (sum of rows, dim) and states (sum of rows, S) as one, for tables of one dim."""
        dims = {dim for _, dim in self._tables.shapes}
        assert len(dims) == 1, f"tables of one batch with dims {sorted(dims)} have no common row: group them by dim"
        count = len(self._tables.shapes)
        return joined(self.weights, 0, count), joined(self.states, 0, count)

    def lookup(self, bags: Bags, *, updates: bool = False) -> Tensor:
        """Sum the rows of each bag, times the ids' weights.

        Args:
            bags: (F, N) bags of row numbers of their tables, on the device.
            updates: whether an update of these rows follows.

        Returns:
            (N, sum of the features' dims) float32.
        """
        if self.kernel is None:
            return torch.zeros(bags.lengths.shape[1], 0, device=self._tables.device)
        pooled = self.kernel.pool(bags, updates)
        if updates:
            self._pending = pooled, bags
        return pooled

    def update(
        self, pooled: Tensor, gradient: Tensor, learning_rate: float, *, step: int = 0, rows: Tensor | None = None
    ) -> None:
        """Update the rows that ``lookup`` summed; gradients are multiplied by the ids' weights.

        Args:
            pooled: what the last ``lookup`` with ``updates`` returned.
            gradient: (N, dims) float32, of the loss by ``pooled``.
            learning_rate: of this step.
            step: number of the step, for the rounding of fp16 rows.
            rows: (L,) int64 global rows of the ids, for the rounding of fp16 rows; None: the ids are global rows.
        """
        if self.kernel is None:
            return
        pending, self._pending = self._pending, None
        assert pending is not None
        assert pending[0] is pooled, "another lookup with an update came between this one and its update"
        bags = pending[1]
        self.kernel.update(bags, gradient, learning_rate, step, bags.ids if rows is None else rows)

    def update_rows(self, table: int, rows: Tensor, gradient: Tensor, learning_rate: float, *, step: int = 0) -> None:
        """Update chosen rows of a table, each once.

        Args:
            table: its number.
            rows: (R,) int64 distinct rows, which are global rows too.
            gradient: (R, dim) float32 of each.
            learning_rate: of this step.
            step: number of the step, for the rounding of fp16 rows.
        """
        assert self.kernel is not None
        self.kernel.update_rows(table, rows, gradient, learning_rate, step)


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """Hold a batch's ids by group, while rows that are in no slot are fetched."""

    owned: OwnedIds
    groups: tuple[Bags, ...]
    """(C_g, N) bags of each group, column by column."""
    fetched: Future[list[Fetched]] | None
    """Slots of each stack's ids; None without stacks."""
    updates: bool

    @property
    def batch(self) -> Batch:
        """Return this rank's slice of the batch."""
        return self.owned.batch


@dataclass
class Group:
    """Hold parts behind one kernel, resident or over slots of a stack."""

    plan: PartGroup
    batch: TableBatch
    parts: Sequence[LocalPart]
    part_of: Tensor
    """(C_g,) int64 number of each column's part."""
    first_rows: Tensor
    """(C_g,) int64 first row, in its table, of each column's part."""
    dirty: DirtyRows
    starts: NDArray[np.int64]
    """(C_g,) start of each column's part in ``dirty``."""
    device: torch.device
    stack: Stack | None = None


class LocalTables:
    """Look up and update the parts of one rank, group by group.

    Args:
        placement: of all tables.
        rank: this one.
        options: of all parts.

    Raises:
        InvalidSpecError: the plan asks for a tier and no directory was given for it.
        DeviceError: a tier's file cannot be made.
    """

    def __init__(self, placement: Placement, rank: int, options: EmbeddingOptions) -> None:
        self._batches = 0
        self.wait_s = 0.0
        """Seconds for which training waited for rows."""
        self.missing = 0
        """Lookups without a row in a slot when their batch began; always 0."""
        self.pending: BeforeUpdates | None = None
        """Rows of a cut that must be copied before they change."""
        with ExitStack() as resources:
            self.groups = [_make_group(placement, group, options, resources) for group in placement.groups[rank]]
            self._resources = resources.pop_all()
        self._counts = [len(group.plan.columns) for group in self.groups]
        self._prefetcher: Prefetcher | None = None
        stacks = [group.stack for group in self.groups if group.stack]
        if stacks:
            self._prefetcher = _make_prefetcher(stacks, options.tier_dir)
            self._resources.callback(self._prefetcher.close)

    def prepare(self, owned: OwnedIds, *, updates: bool) -> PreparedRows:
        """Start to fetch a batch's rows, while other batches are computed.

        Args:
            owned: ids of the global batch.
            updates: whether an update follows. If not, the lookup must be the next one.
        """
        fetched, groups = None, self._by_group(owned.bags)
        if self._prefetcher is not None:
            lookups = [
                (bags.ids.numpy(), _part_ends(group, bags.sizes).numpy())
                for group, bags in zip(self.groups, groups, strict=True)
                if group.stack is not None
            ]
            self._batches += 1
            fetched = self._prefetcher.fetch(lookups, self._batches) if updates else self._prefetcher.borrow(lookups)
        return PreparedRows(owned=owned, groups=groups, fetched=fetched, updates=updates)

    def pool(self, prepared: PreparedRows) -> tuple[Tensor, ...]:
        """Return (N, C_g * w) of each group: the sums of the rows of every bag.

        Raises:
            DeviceError: rows could not be fetched.
        """
        slots = iter(self._wait(prepared))
        # Everything goes to its device before the first kernel: what is sent to a GPU waits for the kernels before it.
        on_devices = [
            (bags if group.stack is None else replace(bags, ids=torch.from_numpy(next(slots).slots))).to(group.device)
            for group, bags in zip(self.groups, prepared.groups, strict=True)
        ]
        pooled = tuple(
            group.batch.lookup(bags, updates=prepared.updates)
            for group, bags in zip(self.groups, on_devices, strict=True)
        )
        if not prepared.updates and self._prefetcher is not None and prepared.fetched is not None:
            self._prefetcher.give_back(prepared.fetched.result())
        return pooled

    def _wait(self, prepared: PreparedRows) -> list[Fetched]:
        if prepared.fetched is None:
            return []
        start = time.monotonic()
        fetched = prepared.fetched.result()
        self.wait_s += time.monotonic() - start
        missing = sum(int((each.slots < 0).sum()) for each in fetched)
        self.missing += missing
        assert missing == 0, f"{missing} lookups of a batch that begins have no row in a slot"
        return fetched

    def update(
        self,
        prepared: PreparedRows,
        pooled: Sequence[Tensor],
        gradients: Sequence[Tensor],
        learning_rate: float,
        step: int,
    ) -> None:
        """Update every row that was pooled, once.

        Args:
            prepared: with ``updates``.
            pooled: what ``pool`` returned.
            gradients: (N, C_g * w) of each group, of the loss by ``pooled``.
            learning_rate: of this step.
            step: number of the step.
        """
        if self.pending is not None:
            self._save_before(prepared, self.pending)
        # As in ``pool``, everything goes to its device first.
        on_devices = [
            (gradient.to(group.device), _rows_to_round(group, bags))
            for group, gradient, bags in zip(self.groups, gradients, prepared.groups, strict=True)
        ]
        for group, summed, (gradient, rows), bags in zip(self.groups, pooled, on_devices, prepared.groups, strict=True):
            group.batch.update(summed, gradient, learning_rate, step=step, rows=rows)
            group.dirty.mark(bags.ids.numpy(), bags.sizes.numpy(), group.starts)
        if self._prefetcher is not None and prepared.fetched is not None:
            self._prefetcher.release(prepared.fetched.result())

    def _save_before(self, prepared: PreparedRows, pending: BeforeUpdates) -> None:
        fetched = iter([] if prepared.fetched is None else prepared.fetched.result())
        for group, bags in zip(self.groups, prepared.groups, strict=True):
            slots = None if group.stack is None else next(fetched).slots
            place = partial(_place, group, slots)
            pending.before_update(RowsToUpdate(group.dirty, bags.ids.numpy(), bags.sizes.numpy(), group.starts, place))

    def parts(self) -> Iterator[LocalPart]:
        """Iterate over the parts of all groups."""
        for group in self.groups:
            yield from group.parts

    def saved_rows(self, *, moving: bool = False) -> Iterator[CutRowSource]:
        """Iterate over every row of every part that changed since the parent of the next cut, once.

        Args:
            moving: leave out parts with rows that stay in place in host memory.
        """
        for group in self.groups:
            if moving and group.stack is None and group.device.type == "cpu":
                continue
            if group.stack is None:
                for part in group.parts:
                    yield from saved_rows(part)
            else:
                yield from rows_of_stack(group.stack, [part for part in group.parts if isinstance(part, StackedPart)])

    def settle(self) -> None:
        """Wait until no row is moving, so that tables can be read and restored.

        Raises:
            DeviceError: rows could not be moved.
        """
        if self._prefetcher is not None:
            self._prefetcher.settle()

    def close(self) -> None:
        """End the prefetching thread and release the tiers' files."""
        self._resources.close()

    def _by_group(self, bags: Bags) -> tuple[Bags, ...]:
        if len(self.groups) < 2:
            return (bags,) * len(self.groups)
        return split_columns(bags, self._counts)


def split_columns(bags: Bags, counts: Sequence[int]) -> tuple[Bags, ...]:
    """Split bags into runs of so many columns each."""
    if not counts:
        return ()
    sizes = torch.split(bags.sizes, list(counts))
    ids = [int(each.sum()) for each in sizes]
    weights = (None,) * len(ids) if bags.weights is None else torch.split(bags.weights, ids)
    parts = zip(torch.split(bags.lengths, list(counts)), torch.split(bags.ids, ids), weights, sizes, strict=True)
    return tuple(Bags(lengths=a, ids=b, weights=c, sizes=d) for a, b, c, d in parts)


def make_kernel(tables: Tables) -> Kernel:
    """Return the kernel for the tables' device."""
    if tables.device.type == "cpu":
        return HostKernel(tables)
    # Loads fbgemm, which takes seconds.
    from dlrm_trainer.embedding.gpu import DeviceKernel

    return DeviceKernel(tables)


def lazy_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """Return (count,) page-aligned zeros on the host that neither use nor commit memory until written.

    torch.zeros writes every page, and numpy's zeros count as committed: a host may have less memory than the slots that
    only a rare batch fills.

    Raises:
        DeviceError: no address space is left.
    """
    words = -(-count * dtype.itemsize // 8)
    return torch.from_numpy(untouched_zeros(max(words, 1))).view(dtype)[:count]


def _make_group(placement: Placement, plan: PartGroup, options: EmbeddingOptions, resources: ExitStack) -> Group:
    device = _device_of(placement, plan, options.device)
    dirty = DirtyRows([part.rows for part in plan.parts])
    if plan.is_stacked:
        return _make_stacked(placement, plan, options, device, dirty, resources)
    batch = _make_batch(placement, plan, options, [part.rows for part in plan.parts], device)
    parts = [
        ResidentPart(
            table=placement.tables[part.table],
            shard=placement.shard(part),
            weight=weight,
            state=state,
            dirty=DirtyPart(dirty, number),
        )
        for number, (part, weight, state) in enumerate(zip(plan.parts, batch.weights, batch.states, strict=True))
    ]
    return _group(plan, batch, parts, dirty, device)


def _make_stacked(
    placement: Placement,
    plan: PartGroup,
    options: EmbeddingOptions,
    device: torch.device,
    dirty: DirtyRows,
    resources: ExitStack,
) -> Group:
    extra = [
        extra_slots(
            part.rows,
            placement.tables[part.table].max_lookups * len(placement.features_of[part.table]),
            options.global_batch_size,
            placement.lookahead,
        )
        for part in plan.parts
    ]
    members = stack_tables(plan, placement.tables, extra)
    slots = [member.slots + member.extra for member in members]
    _check_links(placement, plan, slots)
    batch = _make_batch(placement, plan, options, slots, device)
    stack = make_stack(plan, members, batch.storage(), options.seed, options.tier_dir)
    resources.callback(stack.close)
    parts = [
        StackedPart(placement.tables[part.table], placement.shard(part), stack, number, DirtyPart(dirty, number))
        for number, part in enumerate(plan.parts)
    ]
    group = _group(plan, batch, parts, dirty, device)
    group.stack = stack
    return group


def _group(
    plan: PartGroup, batch: TableBatch, parts: Sequence[LocalPart], dirty: DirtyRows, device: torch.device
) -> Group:
    part_of = torch.tensor([part for part, _ in plan.columns], dtype=torch.int64)
    firsts = torch.tensor([part.row_start for part in plan.parts], dtype=torch.int64)
    starts = dirty.starts[part_of.numpy()]
    return Group(
        plan=plan,
        batch=batch,
        parts=parts,
        part_of=part_of,
        first_rows=firsts[part_of],
        dirty=dirty,
        starts=starts,
        device=device,
    )


def _make_batch(
    placement: Placement, plan: PartGroup, options: EmbeddingOptions, rows: Sequence[int], device: torch.device
) -> TableBatch:
    return TableBatch(
        [(count, plan.width) for count in rows],
        options.optimizer,
        dtype=plan.dtype,
        device=device,
        seed=options.seed,
        names=[placement.tables[part.table].name for part in plan.parts],
        features=[part for part, _ in plan.columns],
        first_columns=[part.column_start for part in plan.parts],
        deterministic=options.deterministic,
    )


def _check_links(placement: Placement, plan: PartGroup, slots: Sequence[int]) -> None:
    """Refuse levels of more slots or places than the links of their lists can name."""
    for part, count in zip(plan.parts, slots, strict=True):
        table = placement.tables[part.table]
        if count > MAX_LINKED_SLOTS:
            raise InvalidSpecError(
                "plan.tables",
                f"table {table.name}: a shard of {part.rows:,} rows has {count:,} slots, batches in flight included; "
                f"the limit is {MAX_LINKED_SLOTS:,}; replan the job, or lower globalBatchSize or maxLookups",
            )
        for level in part.share.levels[1:-1]:
            if min(level.rows, part.rows) > MAX_LINKED_SLOTS:
                raise InvalidSpecError(
                    "plan.tables",
                    f"table {table.name}: a shard of {part.rows:,} rows has {level.rows:,} places in tier {level.tier} "
                    f"above a slower one; the limit is {MAX_LINKED_SLOTS:,}; replan the job",
                )


def _device_of(placement: Placement, plan: PartGroup, device: torch.device) -> torch.device:
    """Return the device of a group's kernel: the rank's if rows of the group lie in hbm, else the host."""
    levels = plan.parts[0].share.levels
    if not levels or levels[0].tier != "hbm":
        return HOST
    table = placement.tables[plan.parts[0].table]
    if device.type == "cpu":
        raise InvalidSpecError(
            "plan.tables", f"table {table.name} has rows in tier hbm, and plan.device is cpu; replan the job"
        )
    if plan.width > MAX_DEVICE_COLUMNS:
        raise InvalidSpecError(
            "plan.tables",
            f"table {table.name}: dim {table.dim} has column blocks of {plan.width}, and rows in tier hbm have "
            f"at most {MAX_DEVICE_COLUMNS} columns; lower the table's columnBlock, or pin it to another tier",
        )
    return device


def _make_prefetcher(stacks: Sequence[Stack], tier_dir: Path | None) -> Prefetcher:
    byte_addressable = {level.tier for stack in stacks for level in stack.levels} & {"scm", "cxl"}
    nodes = {node_of_folder(tier_dir / tier) for tier in byte_addressable} if tier_dir else set()
    nodes.discard(None)
    near = frozenset[int]().union(*(processors_near(node) for node in nodes if node is not None))
    return Prefetcher(stacks, near)


def _place(
    group: Group, slots: NDArray[np.int64] | None, number: int, rows: NDArray[np.int64], lookups: NDArray[np.int64]
) -> CutRowSource:
    """Locate rows of a part that a batch has looked up: in slots, or in place."""
    part = group.parts[number]
    if slots is None:
        return part.in_place(rows)
    weight, state = group.batch.weights[number], group.batch.states[number]
    return SlotRows(part.shard, rows + part.shard.row_start, weight, state, slots[lookups])


def _rows_to_round(group: Group, bags: Bags) -> Tensor | None:
    """Return (L,) global rows on the group's device if fp16 rows need them and the ids looked up differ."""
    if group.plan.dtype == "fp32" or (group.stack is None and not bool(group.first_rows.any())):
        return None
    return (bags.ids + torch.repeat_interleave(group.first_rows, bags.sizes)).to(group.device)


def _part_ends(group: Group, sizes: Tensor) -> Tensor:
    """Return (K,) where the lookups of each part end, from the ids of each column (C_g,), part by part."""
    return torch.zeros(len(group.parts), dtype=torch.int64).index_add_(0, group.part_of, sizes).cumsum(0)


def _work(tables: NDArray[np.int64], sizes: NDArray[np.int64]) -> Work:
    """Return units of about even size, the largest first: (T,) tables, and parts of those with many of the ids."""
    unit = max(UNIT_LOOKUPS, int(sizes.sum()) // (UNITS_PER_THREAD * torch.get_num_threads()))
    parts = np.maximum(1, sizes // unit)
    order = np.argsort(-(sizes // parts), kind="stable")
    parts = parts[order]
    part = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)
    return Work(*(each.astype(np.uint64) for each in (np.repeat(tables[order], parts), part, np.repeat(parts, parts))))


def _offsets(lengths: Tensor) -> NDArray[np.uint64]:
    """Return (bags + 1,) starts of (F, N) bags, and their end."""
    offsets = np.empty(lengths.numel() + 1, np.uint64)
    bag_kernels.fill_offsets(lengths.contiguous().numpy().reshape(-1), offsets)
    return offsets


def _unsigned(values: Tensor) -> NDArray[np.uint64]:
    """Return int64 values of the host for kernels, without a copy if they are contiguous."""
    return values.contiguous().numpy().view(np.uint64)


def _weights(weights: Tensor | None) -> NDArray[np.float32]:
    return ALL_ONES if weights is None else np.asarray(weights.contiguous().numpy())


def _elements(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in shapes)


def _starts(sizes: Iterable[int]) -> NDArray[np.uint64]:
    """Return (n + 1,) running sums, from 0."""
    return np.array([*accumulate(sizes, initial=0)], np.uint64)
