"""Look up and update the parts that a rank alone holds, maybe fetched ahead."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import InvalidSpecError
from dlrm_api.tiers import MAX_DEVICE_COLUMNS
from dlrm_api.training import RowRegularizerSpec
from dlrm_checkpointer import CutRowSource, table_scale
from dlrm_checkpointer import table_key as initial_key
from dlrm_kernels.bags import choose_ids
from dlrm_kernels.directory import ABSENT
from dlrm_kernels.initial_rows import InitialRows, start_rows
from dlrm_kernels.row_updates import table_key
from dlrm_kernels.slabs import BINS
from dlrm_trainer.compute_device import HOST, HostCopy
from dlrm_trainer.embedding.changes import BeforeUpdates, DirtyPart, DirtyRows, Marks, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import (
    LocalPart,
    MemoryPart,
    ResidentPart,
    SlabPart,
    SlotRows,
    StackedPart,
    UniquePart,
    rows_of_stack,
    saved_rows,
)
from dlrm_trainer.embedding.device_batch import Copy
from dlrm_trainer.embedding.exchange import Bags, OwnedIds
from dlrm_trainer.embedding.placement import EmbeddingOptions, PartGroup, Placement
from dlrm_trainer.embedding.planned_stacks import make_stack, stack_tables
from dlrm_trainer.embedding.row_sizes import Counts, ModelSizes, sizes_of, utility_of_bin
from dlrm_trainer.embedding.shared import SharedRows
from dlrm_trainer.embedding.sights import Sights
from dlrm_trainer.embedding.slabs import SlabKernel
from dlrm_trainer.embedding.table_batch import HostKernel, Kernel, SumKernel, TableBatch, Tables
from dlrm_trainer.embedding.tiers.prefetch import Prefetcher, processors_near_levels
from dlrm_trainer.embedding.tiers.stack import NO_ROWS, Fetched, NewRows, Stack, StackLookups
from dlrm_trainer.embedding.unique import (
    Admitted,
    LookupCounts,
    Maintained,
    MaintenancePeriod,
    UniqueGroup,
    UniquePolicy,
    UniqueRows,
)

NO_GAINS = np.empty(0, np.float32)
NO_KEYS = np.empty(0, np.int64)
MAX_UNSCORED = 2
"""Newest steps on a GPU whose norms of gradients the host does not ask for: it may have to wait for them."""


@dataclass(frozen=True, kw_only=True)
class PreparedRows:
    """Hold a batch's ids by group, while rows that are in no slot are fetched."""

    owned: OwnedIds
    groups: tuple[Bags, ...]
    """(C_g, N) bags of each group, column by column."""
    unique: tuple[UniqueLookups | None, ...]
    """What the ids of each group with unique ids are; None for others."""
    fetched: Future[list[Fetched]] | None
    """Slots of each stack's ids; None without stacks."""
    updates: bool


@dataclass(frozen=True, kw_only=True)
class UniqueLookups:
    """Hold the keys of a batch that have rows, in the order of the group's ids."""

    keys: NDArray[np.int64]
    """(L,)"""
    places: NDArray[np.int64]
    """(L,) in the group's directory; (0,) for a lookup without an update."""
    counts: LookupCounts
    new: NewRows
    """Rows that keys got for this batch, numbered over all parts of the group."""
    absent: NDArray[np.int64]
    """(M,) keys without a row, of parts that count these."""
    absent_ends: NDArray[np.int64]
    """Where those of each such part end."""
    shared: Bags | None
    """Of the rows that ids without a row share; None if there are no such ids, or they share none."""


@dataclass(frozen=True, kw_only=True)
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
    stack: Stack | None
    slabs: SlabKernel | None
    """Of rows of several sizes: that of ``batch``."""
    unique: UniqueGroup | None
    """Of unique ids."""
    initial_rows: InitialRows | None
    """Of unique ids that get resident rows."""
    sights: Sights | None
    """Of unique ids without rows; None if no part counts them."""
    shared: SharedRows | None
    """Of unique ids without rows; None if they share none."""


class LocalTables:
    """Look up and update the parts of one rank, group by group.

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
        self.lookups = LookupCounts()
        """Of unique tables, in batches that were updated since the last maintenance."""
        kind, size = options.optimizer.kind, options.global_batch_size
        self.sizes = ModelSizes.of(placement.tables, kind, size, options.warmup_steps)
        """None if no table has rows of several sizes."""
        self.cut_off_utility = 0.0
        """Least utility with which rows have any columns; 0 before the first maintenance that chose it."""
        with ExitStack() as resources:
            self.groups = [
                _make_group(placement, group, options, self.sizes, resources) for group in placement.groups_on(rank)
            ]
            self._resources = resources.pop_all()
        self._is_on_host = options.device.type == "cpu"
        self._unscored = deque[Callable[[], None]]()
        """What is left to record of the newest updates of unique ids."""
        self._counts = [len(group.plan.columns) for group in self.groups]
        self._unique_tables = [table.name for table in placement.tables if table.is_unique]
        self._prefetcher: Prefetcher | None = None
        stacks = [group.stack for group in self.groups if group.stack]
        if stacks:
            self._prefetcher = Prefetcher(stacks, processors_near_levels(stacks, options.tier_dir))
            self._resources.callback(self._prefetcher.close)

    def prepare(self, owned: OwnedIds, *, updates: bool) -> PreparedRows:
        """Start to fetch a batch's rows, while other batches are computed.

        ``updates`` says whether an update follows. If not, the lookup must be the next one.
        """
        fetched, received = None, owned.bags.split(self._counts)
        step = owned.batch.number + 1 if updates else None
        found = [
            (bags, None) if group.unique is None else _look_up(group, group.unique, bags, step)
            for group, bags in zip(self.groups, received, strict=True)
        ]
        groups, unique = tuple(bags for bags, _ in found), tuple(keys for _, keys in found)
        if self._prefetcher is not None:
            lookups = [
                StackLookups(
                    bags.ids.numpy(), _part_ends(group, bags.sizes).numpy(), NO_ROWS if keys is None else keys.new
                )
                for group, bags, keys in zip(self.groups, groups, unique, strict=True)
                if group.stack is not None
            ]
            self._batches += 1
            fetched = self._prefetcher.fetch(lookups, self._batches) if updates else self._prefetcher.borrow(lookups)
        return PreparedRows(owned=owned, groups=groups, unique=unique, fetched=fetched, updates=updates)

    def copied(self, prepared: PreparedRows, copy: Copy) -> tuple[tuple[Bags, ...], tuple[Tensor | None, ...]]:
        """Return the bags of each group on its device, and the global rows of their ids where rounding needs them."""
        bags_of, numbers_of = [], []
        for group, bags, keys in zip(self.groups, prepared.groups, prepared.unique, strict=True):
            on_host = group.device.type == "cpu"
            kept = bags if group.stack is None else replace(bags, ids=bags.ids[:0])
            bags_of.append(kept if on_host else kept.copied(copy))
            numbers = _rows_to_round(group, bags, keys) if prepared.updates else None
            numbers_of.append(numbers if on_host or numbers is None else copy(numbers))
        return tuple(bags_of), tuple(numbers_of)

    def pool(self, prepared: PreparedRows, bags_of_groups: Sequence[Bags]) -> tuple[Tensor, ...]:
        """Return (N, C_g * w) of each group: the sums of the rows of every bag; bags are those of ``copied``.

        Raises:
            DeviceError: rows could not be fetched.
        """
        fetched = self._wait(prepared)
        slots = iter(fetched)
        on_devices = [
            bags if group.stack is None else replace(bags, ids=next(slots).slots)
            for group, bags in zip(self.groups, bags_of_groups, strict=True)
        ]
        # Copies of rows into slots may still be running.
        for stack, each in zip([group.stack for group in self.groups if group.stack], fetched, strict=True):
            stack.memory.precede(each.copied)
        pooled = tuple(
            group.batch.lookup(bags, updates=prepared.updates)
            for group, bags in zip(self.groups, on_devices, strict=True)
        )
        for group, summed, keys in zip(self.groups, pooled, prepared.unique, strict=True):
            if group.shared is not None and keys is not None and keys.shared is not None:
                group.shared.add(keys.shared, summed, updates=prepared.updates)
        if not prepared.updates and self._prefetcher is not None and prepared.fetched is not None:
            self._prefetcher.give_back(prepared.fetched.result())
        return pooled

    def _wait(self, prepared: PreparedRows) -> list[Fetched]:
        if prepared.fetched is None:
            return []
        start = time.monotonic()
        fetched = prepared.fetched.result()
        self.wait_s += time.monotonic() - start
        # Slots on a device were checked when they were found: the host does not wait for it here.
        missing = sum(int((each.slots < 0).sum()) for each in fetched if each.held is None)
        self.missing += missing
        assert missing == 0, f"{missing} lookups of a batch that begins have no row in a slot"
        return fetched

    def update(
        self,
        prepared: PreparedRows,
        pooled: Sequence[Tensor],
        gradients: Sequence[Tensor],
        numbers: Sequence[Tensor | None],
        learning_rate: float,
        step: int,
        regularizer: RowRegularizerSpec | None = None,
    ) -> None:
        """Update every row that ``pool`` summed, once, by the (N, C_g * w) gradients of the loss by each sum.

        ``numbers`` are those of ``copied``.
        """
        if self.pending is not None:
            self._save_before(prepared, self.pending)
        # Everything goes to its device before the first kernel, which what is copied later waits for.
        on_devices = [gradient.to(group.device) for group, gradient in zip(self.groups, gradients, strict=True)]
        for group, summed, gradient, rows, bags in zip(
            self.groups, pooled, on_devices, numbers, prepared.groups, strict=True
        ):
            updated = group.batch.update(summed, gradient, learning_rate, step=step, rows=rows, regularizer=regularizer)
            if group.dirty.marks is not None:
                group.dirty.marks.mark(updated.ids, bags.sizes.numpy(), group.starts)
            else:
                group.dirty.mark(bags.ids.numpy(), bags.sizes.numpy(), group.starts)
        for group, gradient, bags, keys in zip(self.groups, gradients, prepared.groups, prepared.unique, strict=True):
            if group.unique is not None and keys is not None:
                norms = _norms(group.unique.by_gradient, gradient, bags)
                self._unscored.append(partial(_score, group.unique, keys, bags, norms, step + 1))
                if group.sights is not None:
                    waiting = group.sights.count(keys.absent, keys.absent_ends, self.pending)
                    self.lookups = self.lookups.plus(LookupCounts(without_row=waiting))
                if group.shared is not None and keys.shared is not None:
                    group.shared.update(keys.shared, gradient, learning_rate, step, regularizer, self.pending)
                self.lookups = self.lookups.plus(keys.counts)
        self.catch_up(0 if self._is_on_host else MAX_UNSCORED)
        if self._prefetcher is not None and prepared.fetched is not None:
            self._prefetcher.release(prepared.fetched.result())

    def catch_up(self, steps_left: int = 0) -> None:
        """Record what lookups of unique ids add to scores, but for those of the newest steps."""
        while len(self._unscored) > steps_left * len(self.groups):
            self._unscored.popleft()()

    def _save_before(self, prepared: PreparedRows, pending: BeforeUpdates) -> None:
        for group, bags in zip(self.groups, prepared.groups, strict=True):
            locate = partial(_locate, group, group.stack)
            pending.before_update(RowsToUpdate(group.dirty, bags.ids.numpy(), bags.sizes.numpy(), group.starts, locate))

    def maintain(self, step: int, period: MaintenancePeriod) -> Maintained:
        """Evict rows of unique tables after the update of a step, and begin to count lookups. No batch is in flight.

        ``period`` is the one that ends. Returns this rank's counts.

        Raises:
            DeviceError: rows could not be moved.
        """
        lookups, before = self.lookups, self._unique_rows()
        self.lookups = LookupCounts()
        self.settle()
        for group in self.groups:
            if group.unique is None:
                continue
            group.unique.evicted.forget(step)
            if group.sights is not None:
                group.sights.settle(self.pending)
            for number, part in enumerate(group.parts):
                if not isinstance(part, UniquePart):
                    continue
                if len((left := part.rows.choose_leaving(step, period.last_step)).rows):
                    if self.pending is not None:
                        sizes, starts = np.array([len(left.rows)]), group.dirty.starts[[number]]
                        locate = partial(_locate, group, None)
                        self.pending.before_update(RowsToUpdate(group.dirty, left.rows, sizes, starts, locate))
                    if group.stack is not None:
                        group.stack.drop(number, left.rows)
                    if group.slabs is not None:
                        group.slabs.forget(number, left.rows)
                    part.rows.free(left)
                    group.unique.evicted.add(number, left.keys[~left.by_age], step)
        return Maintained(lookups, before, self._unique_rows())

    def count_sizes(self, step: int) -> list[Counts]:
        """Count this rank's rows of each of ``sizes.kinds`` by class and utility, after the update of a step."""
        assert self.sizes is not None
        found: list[Counts] = [np.zeros((len(kind.sizes) + 1, BINS), np.int64) for kind in self.sizes.kinds]
        for group in self.groups:
            if group.slabs is not None:
                found[self.sizes.kinds.index(group.slabs.sizes)] += group.slabs.count(step)
        return found

    def slab_rows(self) -> NDArray[np.int64]:
        """Return this rank's rows of each class of each of ``sizes.kinds``, one after the other; none without these."""
        if self.sizes is None:
            return NO_KEYS
        found = [np.zeros(len(kind.sizes) + 1, np.int64) for kind in self.sizes.kinds]
        for group in self.groups:
            if group.slabs is not None:
                found[self.sizes.kinds.index(group.slabs.sizes)] += group.slabs.slabs.counts
        return np.concatenate(found)

    def start_lower(self, steps_down: int) -> None:
        """Let rows that are trained for the first time start so many classes lower; see ``RowSizes``."""
        for group in self.groups:
            if group.slabs is not None:
                group.slabs.start_class = group.slabs.sizes.start_class(steps_down)

    def resize(self, step: int, cut_off: int) -> None:
        """Let rows have the columns that a model's cut-off gives them. No batch is in flight."""
        self.cut_off_utility = utility_of_bin(cut_off)
        for group in self.groups:
            if group.slabs is None:
                continue
            starts, record = group.slabs.row_starts, group.dirty
            for moves in group.slabs.moves(step, group.slabs.sizes.targets(cut_off)):
                sizes = np.diff(np.searchsorted(moves.rows, starts))
                rows = moves.rows - np.repeat(starts[:-1], sizes)
                if self.pending is not None:
                    locate = partial(_locate, group, None)
                    self.pending.before_update(RowsToUpdate(record, rows, sizes, record.starts, locate))
                record.mark(rows, sizes, record.starts)
                group.slabs.resize(moves)

    def _unique_rows(self) -> NDArray[np.int64]:
        """Count this rank's rows of each unique table."""
        found = dict.fromkeys(self._unique_tables, 0)
        for group in self.groups:
            for part in group.parts:
                if isinstance(part, UniquePart):
                    found[part.table.name] += part.rows.count
        return np.array(list(found.values()), np.int64)

    def parts(self) -> Iterator[LocalPart]:
        """Iterate over the parts of all groups."""
        for group in self.groups:
            yield from group.parts
            for more in (group.shared, group.sights):
                yield from more.parts if more is not None else ()

    def saved_rows(self, *, moving: bool = False) -> Iterator[CutRowSource]:
        """Iterate over every row of every part that changed since the parent of the next cut, once.

        With ``moving`` parts with rows that stay in place are left out.
        """
        for group in self.groups:
            if group.stack is not None:
                yield from rows_of_stack(group.stack, group.parts)
            elif not (moving and group.slabs is None):
                for part in group.parts:
                    yield from saved_rows(part)
            for more in (group.shared, group.sights):
                for each in more.parts if more is not None and not moving else ():
                    yield from saved_rows(each)

    def settle(self) -> None:
        """Wait until no row is moving, so that tables can be read and restored.

        Raises:
            DeviceError: rows could not be moved.
        """
        self.catch_up()
        if self._prefetcher is not None:
            self._prefetcher.settle()

    def close(self) -> None:
        """End the prefetching thread and release the tiers' files."""
        self._resources.close()


def _make_group(
    placement: Placement, plan: PartGroup, options: EmbeddingOptions, sizes: ModelSizes | None, resources: ExitStack
) -> Group:
    device = _device_of(placement, plan, options.device)
    # Kernels see slots of a stack, and not its rows.
    marks = None if device.type == "cpu" or plan.is_stacked else partial(make_marks, device=device)
    dirty = DirtyRows([part.rows for part in plan.parts], marks)
    dirty_parts = [DirtyPart(dirty, number) for number in range(len(plan.parts))]
    stack: Stack | None = None
    slabs: SlabKernel | None = None
    parts: Sequence[LocalPart]
    memories: Sequence[MemoryPart]
    if plan.sizes:
        assert sizes is not None
        described = describe_tables(placement, plan, options, dirty.sizes, device)
        slabs = _make_slabs(placement, plan, options, described, sizes.half_life)
        batch = TableBatch(described, slabs)
        memories = [
            SlabPart(placement.tables[part.table], placement.shard(part), slabs, number, dirty_parts[number])
            for number, part in enumerate(plan.parts)
        ]
    elif plan.is_stacked:
        tables = stack_tables(placement, plan, options.global_batch_size)
        batch = _make_batch(placement, plan, options, [table.slots + table.extra for table in tables], device)
        stack = make_stack(plan, tables, batch.storage(), options.seed, options.tier_dir)
        resources.callback(stack.close)
        memories = [
            StackedPart(placement.tables[part.table], placement.shard(part), stack, number, dirty_parts[number])
            for number, part in enumerate(plan.parts)
        ]
    else:
        batch = _make_batch(placement, plan, options, dirty.sizes, device)
        memories = resident_parts(placement, plan, batch.kernel, dirty_parts)
    unique: UniqueGroup | None = None
    initial_rows: InitialRows | None = None
    sights: Sights | None = None
    shared: SharedRows | None = None
    parts = memories
    if plan.is_unique:
        parts = _unique_parts(plan, memories, options.global_batch_size)
        unique = UniqueGroup([part.rows for part in parts], [part for part, _ in plan.columns], options.seed)
        of_parts = [placement.tables[part.table] for part in plan.parts]
        sights = Sights(unique, of_parts) if len(unique.sights) else None
        shared = SharedRows(plan, of_parts, options) if plan.has_shared_rows else None
        if stack is None and slabs is None:
            initial_rows = _initial_rows(placement, plan, options.seed)
    part_of = torch.tensor([part for part, _ in plan.columns], dtype=torch.int64)
    firsts = torch.tensor([part.row_start for part in plan.parts], dtype=torch.int64)
    return Group(
        plan=plan,
        batch=batch,
        parts=parts,
        part_of=part_of,
        first_rows=firsts[part_of],
        dirty=dirty,
        starts=dirty.starts[part_of.numpy()],
        device=device,
        stack=stack,
        slabs=slabs,
        unique=unique,
        initial_rows=initial_rows,
        sights=sights,
        shared=shared,
    )


def _initial_rows(placement: Placement, plan: PartGroup, seed: int) -> InitialRows:
    described = []
    for part in plan.parts:
        table = placement.tables[part.table]
        scale = table_scale(table.initializer, table.rows)
        described.append((initial_key(seed, table.name), part.column_start, scale))
    return InitialRows.of(described)


def _make_slabs(
    placement: Placement, plan: PartGroup, options: EmbeddingOptions, tables: Tables, half_life: int
) -> SlabKernel:
    initial, kind = _initial_rows(placement, plan, options.seed), options.optimizer.kind
    sizes = sizes_of(placement.tables[plan.parts[0].table], kind)
    numbers = [part.row_start for part in plan.parts]
    return SlabKernel(tables, sizes, initial, numbers, options.global_batch_size, half_life)


def resident_parts(
    placement: Placement, plan: PartGroup, kernel: Kernel, dirty: Sequence[DirtyPart]
) -> list[ResidentPart]:
    """Return the parts of a group whose rows all lie in the memory of its kernel."""
    return [
        ResidentPart(
            table=placement.tables[part.table], shard=placement.shard(part), weight=weight, state=state, dirty=each
        )
        for part, weight, state, each in zip(plan.parts, kernel.weights, kernel.states, dirty, strict=True)
    ]


def _unique_parts(plan: PartGroup, memories: Sequence[MemoryPart], batch_size: int) -> list[UniquePart]:
    found = []
    for part, memory in zip(plan.parts, memories, strict=True):
        buckets = part.buckets
        assert buckets is not None
        owned = range(buckets.start, buckets.end)
        policy = UniquePolicy.of(memory.table, batch_size)
        rows = UniqueRows(memory.table.name, buckets.of, owned, memory.dirty, policy)
        found.append(UniquePart(rows=rows, memory=memory))
    return found


def _make_batch(
    placement: Placement, plan: PartGroup, options: EmbeddingOptions, rows: Sequence[int], device: torch.device
) -> TableBatch:
    """Return a group's tables, of so many rows each, behind the kernel of their device."""
    tables = describe_tables(placement, plan, options, rows, device)
    return TableBatch(tables, make_kernel(tables))


def describe_tables(
    placement: Placement, plan: PartGroup, options: EmbeddingOptions, rows: Sequence[int], device: torch.device
) -> Tables:
    """Describe a group's tables, of so many rows each, for a kernel."""
    names = [placement.tables[part.table].name for part in plan.parts] if plan.dtype == "fp16" else []
    return Tables(
        shapes=tuple((count, plan.width) for count in rows),
        features=tuple(part for part, _ in plan.columns),
        optimizer=options.optimizer,
        dtype=plan.dtype,
        device=device,
        keys=np.array([table_key(options.seed, name) for name in names], np.uint64),
        first_columns=tuple(part.column_start for part in plan.parts),
        deterministic=options.deterministic,
    )


def make_kernel(tables: Tables) -> SumKernel:
    """Return the kernel for the tables' device."""
    if tables.device.type == "cpu":
        return HostKernel(tables)
    # Loads fbgemm, which takes seconds.
    from dlrm_trainer.embedding.gpu.tables import DeviceKernel

    return DeviceKernel(tables)


def make_marks(bits: int, device: torch.device) -> Marks:
    """Return a bitmap of changed rows on a GPU."""
    # Loads Triton, which hosts lack.
    from dlrm_trainer.embedding.gpu.dirty_rows import DeviceMarks

    return DeviceMarks(bits, device)


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


def _locate(group: Group, stack: Stack | None, number: int, rows: NDArray[np.int64]) -> CutRowSource:
    """Locate rows of a part: in slots of the ``stack``, where a batch holds them, or in place."""
    part = group.parts[number]
    if stack is None:
        return part.in_place(rows)
    weight, state = group.batch.weights[number], group.batch.states[number]
    found = SlotRows(part.shard, rows + part.shard.row_start, weight, state, stack.slots_of(number, rows))
    return part.keyed(found) if isinstance(part, UniquePart) else found


def _look_up(group: Group, unique: UniqueGroup, bags: Bags, step: int | None) -> tuple[Bags, UniqueLookups]:
    """Turn the keys of a group's bags into local rows, and leave out those without one.

    ``step`` is that of the update that follows, from 1; None: none does.
    """
    ends, keys, new = _part_ends(group, bags.sizes).numpy(), bags.ids.numpy(), NO_ROWS
    places, absent, counts = NO_KEYS, (NO_KEYS, NO_KEYS), LookupCounts()
    shared: Bags | None = None
    if step is None:
        rows = unique.read(keys, ends)
        has_row = rows != ABSENT
    else:
        found = unique.admit(keys, ends, step)
        rows, has_row, counts = found.rows, found.has_row, found.counts
        places = found.places
        if group.stack is not None:
            new = NewRows(found.new_rows + group.stack.row_map.row_starts[found.new_parts], found.new_keys)
        elif len(found.new_rows):
            _start_rows(group, found)
        if group.sights is not None:
            absent = group.sights.absent(keys, ends, has_row)
    # An id without a row adds nothing to its bag in the kernel, which takes no such ids, so these bags become shorter.
    chosen: NDArray[np.int64] | slice = slice(None)
    if has_row.all():
        found_bags = replace(bags, ids=torch.from_numpy(rows))
    else:
        found_bags, chosen = _chosen(bags, has_row)
        found_bags = replace(found_bags, ids=torch.from_numpy(rows[chosen]))
        if group.shared is not None:
            lacking, _ = _chosen(bags, ~has_row)
            shared = group.shared.bags(lacking, _part_ends(group, lacking.sizes).numpy())
    return found_bags, UniqueLookups(
        keys=keys[chosen],
        places=places if step is None else places[chosen],
        counts=counts,
        new=new,
        absent=absent[0],
        absent_ends=absent[1],
        shared=shared,
    )


def _chosen(bags: Bags, chosen: NDArray[np.bool_]) -> tuple[Bags, NDArray[np.int64]]:
    """Return (L,) chosen ids of bags, and their numbers among all."""
    numbers, lengths = np.empty(len(chosen), np.int64), torch.empty_like(bags.lengths)
    count = choose_ids(chosen, bags.lengths.contiguous().view(-1).numpy(), numbers, lengths.view(-1).numpy())
    places = torch.from_numpy(numbers[:count])
    found = Bags(
        lengths=lengths,
        ids=bags.ids[places],
        weights=None if bags.weights is None else bags.weights[places],
        sizes=lengths.sum(dim=1, dtype=torch.int64),
    )
    return found, numbers[:count]


def _norms(by_gradient: NDArray[np.bool_], gradient: Tensor, bags: Bags) -> HostCopy | None:
    """Return the (C, N) norms of the gradients of bags; None if no column's rows have scores by gradient.

    ``gradient`` is the (N, C * w) of the loss by the sums of the bags, and the loss a mean over all samples.
    """
    if not by_gradient.any():
        return None
    columns, samples = bags.lengths.shape
    return HostCopy(gradient.view(samples, columns, -1).norm(dim=2).t())


def _score(unique: UniqueGroup, keys: UniqueLookups, bags: Bags, norms: HostCopy | None, step: int) -> None:
    """Record that a batch has updated its rows in a step from 1."""
    gains = NO_GAINS if norms is None else _gains(unique.by_gradient, norms.read(), bags)
    unique.updated(keys.places, bags.sizes.numpy(), gains, step)


def _gains(by_gradient: NDArray[np.bool_], norms: Tensor, bags: Bags) -> NDArray[np.float32]:
    """Return (L,) what lookups add to the scores of their rows: the norm of their gradient, or 1."""
    norms = norms.where(torch.from_numpy(by_gradient)[:, None], 1.0).flatten()
    gains = torch.repeat_interleave(norms, bags.lengths.flatten(), output_size=len(bags.ids))
    if bags.weights is not None:
        weighted = torch.repeat_interleave(torch.from_numpy(by_gradient), bags.sizes, output_size=len(bags.ids))
        gains = gains.where(~weighted, gains * bags.weights.abs())
    found: NDArray[np.float32] = gains.numpy()
    return found


def _start_rows(group: Group, new: Admitted) -> None:
    """Give resident rows that keys have just got their initial values."""
    if group.slabs is not None:
        group.slabs.begin(new.new_parts, new.new_rows, new.new_keys)
        return
    assert group.initial_rows is not None
    weight, state = group.batch.storage()
    first_rows = np.cumsum((0, *group.dirty.sizes[:-1]))
    rows = new.new_rows + first_rows[new.new_parts]
    of_rows = new.new_keys, new.new_parts, group.initial_rows
    start_rows(weight.numpy(), state.numpy(), rows, *of_rows, torch.get_num_threads())


def _rows_to_round(group: Group, bags: Bags, unique: UniqueLookups | None) -> Tensor | None:
    """Return (L,) global rows if fp16 rows need them and the ids looked up differ."""
    if unique is not None and group.plan.dtype != "fp32":
        return torch.from_numpy(unique.keys)
    if group.plan.dtype == "fp32" or (group.stack is None and not bool(group.first_rows.any())):
        return None
    return bags.ids + torch.repeat_interleave(group.first_rows, bags.sizes)


def _part_ends(group: Group, sizes: Tensor) -> Tensor:
    """Return (K,) where the lookups of each part end, from the ids of each column (C_g,), part by part."""
    return torch.zeros(len(group.parts), dtype=torch.int64).index_add_(0, group.part_of, sizes).cumsum(0)
