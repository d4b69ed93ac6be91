"""Build stacks of levels from a plan."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dlrm_api.errors import InvalidSpecError
from dlrm_api.tiers import BLOCK_SLACK, MAX_LINKED_SLOTS, TIERS, Tier, device_extra_slots, extra_slots
from dlrm_checkpointer import table_scale
from dlrm_trainer.embedding.placement import PartGroup, Placement
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.memory import AnonymousStorage, ByteLevel, MappedStorage
from dlrm_trainer.embedding.tiers.slots import DeviceSlots, HostSlots, Level, record_words
from dlrm_trainer.embedding.tiers.stack import Stack, StackTable, queued_chunk


def stack_tables(placement: Placement, group: PartGroup, global_batch_size: int) -> list[StackTable]:
    """Return the slots of each part of a group: those of its plan, and extra ones for batches in flight.

    Raises:
        InvalidSpecError: there are more slots or places than the links of their lists can name.
    """
    found = []
    for part in group.parts:
        table = placement.tables[part.table]
        features = len(placement.features_of[part.table])
        lookups, max_lookups = table.lookups * features, table.max_lookups * features
        slots = min(part.share.levels[0].rows, part.rows)
        if TIERS[part.share.levels[0].tier].on_device:
            extra = device_extra_slots(part.rows, lookups, max_lookups, global_batch_size)
        else:
            extra = extra_slots(part.rows, max_lookups, global_batch_size, placement.lookahead)
        shard = f"table {table.name}: a shard of {part.rows:,} rows has"
        if slots + extra > MAX_LINKED_SLOTS:
            raise InvalidSpecError(
                "plan.tables",
                f"{shard} {slots + extra:,} slots, batches in flight included; the limit is {MAX_LINKED_SLOTS:,}; "
                "replan the job, or lower globalBatchSize or maxLookups",
            )
        for level in part.share.levels[1:-1]:
            if min(level.rows, part.rows) > MAX_LINKED_SLOTS:
                raise InvalidSpecError(
                    "plan.tables",
                    f"{shard} {level.rows:,} places in tier {level.tier} above a slower one; the limit is "
                    f"{MAX_LINKED_SLOTS:,}; replan the job",
                )
        found.append(
            StackTable(
                name=table.name,
                rows=part.rows,
                slots=slots,
                extra=extra,
                scale=table_scale(table.initializer, table.rows),
                first_row=0 if part.buckets else part.row_start,
                first_column=part.column_start,
            )
        )
    return found


def make_stack(
    group: PartGroup, tables: Sequence[StackTable], storage: tuple[Tensor, Tensor], seed: int, tier_dir: Path | None
) -> Stack:
    """Make the stack of a group over the slots of its kernel, given as their rows and states.

    Raises:
        InvalidSpecError: a level needs a directory and none was given.
        DeviceError: a level's file cannot be created.
    """
    share = group.parts[0].share
    rows = group.width, group.dtype
    if storage[0].device.type == "cpu":
        stack = Stack(tables, share, HostSlots(*storage), seed, *rows)
    else:
        # Loads Triton.
        from dlrm_trainer.embedding.gpu.stack import GpuStack

        memory = DeviceSlots(*storage, queued_chunk(record_words(*storage)))
        stack = GpuStack(tables, share, memory, seed, *rows)
    tiers = [level.tier for level in share.levels[1:]]
    levels: list[Level] = []
    try:
        for number, tier in enumerate(tiers, start=1):
            planned = sum(part.share.levels[number].rows for part in group.parts)
            last = number == len(tiers)
            levels.append(_make_level(tier, stack, number, planned, tier_dir, last=last))
    except BaseException:
        for level in levels:
            level.close()
        raise
    stack.attach(levels)
    return stack


def _make_level(tier: Tier, stack: Stack, number: int, planned: int, tier_dir: Path | None, *, last: bool) -> Level:
    rows, words = int(stack.row_map.row_starts[-1]), stack.memory.words
    # The last level may hold all rows: sets may leave slots unused, and untouched places cost nothing.
    places = rows if last else min(rows, planned)
    # While a GPU computes, the host's threads have nothing else to do.
    threads = 1 if isinstance(stack.memory, HostSlots) else torch.get_num_threads()
    if tier == "ddr":
        return ByteLevel(tier, AnonymousStorage(words, places), places, ordered=not last, threads=threads)
    if tier_dir is None:
        raise InvalidSpecError(
            "plan.tables", f"rows in tier {tier} need a directory; set DLRM_TIER_DIR, or dlrmctl run --tier-dir"
        )
    folder = tier_dir / tier
    folder.mkdir(parents=True, exist_ok=True)
    if tier == "block":
        return BlockLevel(folder, words, int(min(rows, planned) * BLOCK_SLACK), rows, partial(stack.relocated, number))
    return ByteLevel(tier, MappedStorage(folder, words, places, tier), places, ordered=not last, threads=threads)
