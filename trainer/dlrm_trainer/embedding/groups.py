"""Parts of one rank behind one kernel, over slots of a stack or resident, made as the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import InvalidSpecError
from dlrm_api.tiers import MAX_DEVICE_COLUMNS, MAX_LINKED_SLOTS, extra_slots
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.checkpoint import LocalPart, ResidentPart, StackedPart
from dlrm_trainer.embedding.kernels import TableBatch
from dlrm_trainer.embedding.options import EmbeddingOptions
from dlrm_trainer.embedding.placement import PartGroup, Placement

if TYPE_CHECKING:
    from dlrm_trainer.embedding.tiers.stack import Stack


@dataclass
class Group:
    """Parts behind one kernel, over slots of a stack or resident."""

    plan: PartGroup
    batch: TableBatch
    parts: Sequence[LocalPart]
    first_rows: Tensor
    """(C_g,) int64 first row, in its table, of each column's part."""
    dirty: DirtyRows
    starts: NDArray[np.int64]
    """(C_g,) where the rows of each column's part begin in ``dirty``."""
    device: torch.device
    stack: Stack | None = None


def make_group(placement: Placement, plan: PartGroup, options: EmbeddingOptions, resources: ExitStack) -> Group:
    """A group as its plan says.

    Args:
        placement: of all tables.
        plan: of the group.
        options: see there.
        resources: gets what must be closed at the end.

    Raises:
        InvalidSpecError: the plan asks for a tier and no folder was given for it, or for hbm that there is none of.
        DeviceError: a tier's file can't be made.
    """
    device = _device_of(placement, plan, options.device)
    if plan.is_stacked:
        return _make_stacked(placement, plan, options, device, resources)
    rows = [part.rows for part in plan.parts]
    batch = _make_batch(placement, plan, options, rows, device)
    dirty = DirtyRows(rows)
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
    placement: Placement, plan: PartGroup, options: EmbeddingOptions, device: torch.device, resources: ExitStack
) -> Group:
    from dlrm_trainer.embedding.tiers import stack as stacked

    extra = [
        extra_slots(
            part.rows,
            placement.tables[part.table].max_lookups * len(placement.features_of[part.table]),
            options.global_batch_size,
            placement.lookahead,
        )
        for part in plan.parts
    ]
    members = stacked.stack_tables(plan, placement.tables, extra)
    _check_links(placement, plan, [member.slots + member.extra for member in members])
    batch = _make_batch(placement, plan, options, [member.slots + member.extra for member in members], device)
    stack = stacked.make_stack(plan, members, batch.storage(), options.seed, options.tier_dir)
    resources.callback(stack.close)
    dirty = DirtyRows([part.rows for part in plan.parts])
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
        plan=plan, batch=batch, parts=parts, first_rows=firsts[part_of], dirty=dirty, starts=starts, device=device
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
    """Refuse levels of more slots or places than links between them can name."""
    for part, count in zip(plan.parts, slots, strict=True):
        table = placement.tables[part.table]
        if count > MAX_LINKED_SLOTS:
            raise InvalidSpecError(
                "plan.tables",
                f"table {table.name}: a shard of {part.rows:,} rows has {count:,} slots, batches in flight included; "
                f"the limit is {MAX_LINKED_SLOTS:,}: replan the job, or lower globalBatchSize or maxLookups",
            )
        for level in part.share.levels[1:-1]:
            if min(level.rows, part.rows) > MAX_LINKED_SLOTS:
                raise InvalidSpecError(
                    "plan.tables",
                    f"table {table.name}: a shard of {part.rows:,} rows has {level.rows:,} places in tier {level.tier} "
                    f"above a slower one, and {MAX_LINKED_SLOTS:,} at most: plan the job again",
                )


def _device_of(placement: Placement, plan: PartGroup, device: torch.device) -> torch.device:
    """Where the kernel of a group computes: where the rank does, if rows of the group lie in hbm, or on the host."""
    levels = plan.parts[0].share.levels
    if not levels or levels[0].tier != "hbm":
        return HOST
    table = placement.tables[plan.parts[0].table]
    if device.type == "cpu":
        raise InvalidSpecError(
            "plan.tables", f"table {table.name} has rows in tier hbm, and plan.device is cpu: plan the job again"
        )
    if plan.width > MAX_DEVICE_COLUMNS:
        raise InvalidSpecError(
            "plan.tables",
            f"table {table.name}: dim {table.dim} has column blocks of {plan.width}, and rows in tier hbm have "
            f"at most {MAX_DEVICE_COLUMNS} columns: give the table a columnBlock of no more, or pin it elsewhere",
        )
    return device
