"""What a rank does for the rows that it holds, by how many they are."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.measure import Result, memory, seconds_of, tell
from benchmarks.scale_cut import cut_part, store_cuts
from dlrm_api.model import TableSpec
from dlrm_api.plan import TierLevel, TierShare
from dlrm_api.tiers import BLOCK_SLACK, CHANGED_BYTES, map_entry_bytes, places_meta_bytes
from dlrm_checkpointer import CutRows, HandoffWriter
from dlrm_kernels import pages
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.checkpoint import StackedPart, rows_of_stack, table_meta
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.slots import HostSlots, untouched_zeros
from dlrm_trainer.embedding.tiers.stack import Stack, StackTable

FEW, ROWS = 4 * 10**6, (10**8, 125 * 10**7)
"""Rows of one rank; the last is an eighth of a table of 10^10."""
DIM, SEED, SCALE = 128, 7, 0.25
CHANGED, BATCH, CUTS = 200_000, 8_192, 5
"""Rows that change before each cut, half of them in slots and half on block storage; and rows of a batch."""
STORED_PER_CHANGED = 20
"""Rows on block storage per changed one there: enough that a cut reads their pages, not the whole file."""
MAX_PICK_US = {10**3: 10.0, 10**6: 10.0}
"""By segments of block storage."""
SEGMENT_RECORDS = 16
"""Few, so that many segments fit in memory; what a pick costs does not depend on it."""
PICKS, FREED = 20_000, 200_000


def pick(segments: int, is_quick: bool) -> Iterator[Result]:
    """Free random records of full segments, then have the cleaner pick and refill segments, one at a time."""
    picks, freed = (PICKS // 20, FREED // 100) if is_quick else (PICKS, FREED)
    shape = pages.Shape(words=1, page_words=16, page_records=16, segment_records=SEGMENT_RECORDS)
    owners = np.ones(segments * SEGMENT_RECORDS, np.int64)
    live, tree = np.full(segments, SEGMENT_RECORDS, np.int32), pages.empty_tree(segments)
    for segment in range(segments):
        pages.set_leaf(tree, segment, live[segment])
    places = np.random.default_rng(0).choice(len(owners), min(freed, len(owners) // 2), replace=False)
    emptied, chosen = np.empty(len(places), np.int64), np.empty(1, np.int64)
    pages.release(shape, places[:0], owners, live, tree, emptied)
    freeing_s = seconds_of(lambda: pages.release(shape, places, owners, live, tree, emptied))

    def clean() -> None:
        for _ in range(picks):
            pages.emptiest(live, tree, chosen)
            live[chosen[0]] = SEGMENT_RECORDS
            pages.set_leaf(tree, chosen[0], live[chosen[0]])

    clean()
    yield Result(
        metric="pick_us",
        value=1e6 * seconds_of(clean) / picks,
        limit=MAX_PICK_US[segments],
        setting={"segments": segments, "picks": picks},
        measured={"free_record_ns": 1e9 * freeing_s / len(places)},
    )


def rows(is_quick: bool) -> Iterator[Result]:
    """Start ranks with ever more rows of 128 columns over block storage, whose file is sparse, and cut them.

    Host memory is what a rank has mapped beyond one with few rows, since each page of it is written once all rows were
    looked up.
    """
    shrink = 100 if is_quick else 1
    tell("rows: half of the changed ones are on block storage; medians")
    # The first maps memory for code and threads, too.
    _, (few, _) = (_start_and_cut(FEW // shrink, CHANGED // shrink) for _ in range(2))
    for count in ROWS:
        mapped, measured = _start_and_cut(count // shrink, CHANGED // shrink)
        planned = map_entry_bytes(count) + places_meta_bytes("block", count, last=True) / count + CHANGED_BYTES
        yield Result(
            metric="ddr_bytes_per_row",
            value=(mapped - few) / ((count - FEW) // shrink),
            limit=None if is_quick else planned,
            setting={"rows": count // shrink, "dim": DIM, "changed": CHANGED // shrink},
            measured=measured,
        )


def _start_and_cut(count: int, changed: int) -> tuple[int, dict[str, float]]:
    """Return the bytes that a rank of ``count`` rows maps, and what its start and its cuts take."""
    slots, extra = changed // 2, 2 * BATCH
    table = TableSpec(name="items", rows=count, dim=DIM)
    meta = table_meta(table, 0, "rowwise-adagrad")
    share = TierShare(levels=(TierLevel(tier="ddr", rows=slots), TierLevel(tier="block", rows=count)))
    with tempfile.TemporaryDirectory(dir=".") as below, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mapped, started = memory("VmSize"), time.perf_counter()
        weight = torch.from_numpy(untouched_zeros((slots + extra) * DIM, np.float32)).view(-1, DIM)
        state = torch.from_numpy(untouched_zeros(slots + extra, np.float32)).view(-1, 1)
        member = StackTable(name="items", rows=count, slots=slots, extra=extra, scale=SCALE)
        stack = Stack([member], share, HostSlots(weight, state), SEED, DIM, "fp32")
        places = int(count * BLOCK_SLACK)
        stack.attach([BlockLevel(Path(below), stack.memory.words, places, count, partial(stack.relocated, 1))])
        dirty = DirtyRows([count])
        part = StackedPart(table=table, shard=meta.whole(), stack=stack, number=0, dirty=DirtyPart(dirty, 0))
        start_ms = 1e3 * (time.perf_counter() - started)
        held = np.random.default_rng(0).choice(count, slots * (1 + STORED_PER_CHANGED), replace=False)
        chosen = np.concatenate([held[:-slots:STORED_PER_CHANGED], held[-slots:]])
        for number, some in enumerate(np.array_split(held, -(-len(held) // BATCH)), start=1):
            fetched = stack.fetch(some, np.array([len(some)]), number)
            weight[fetched.slots] += 1
            stack.release(fetched)
        row_bytes = CutRows(shard=part.shard, count=0, state_values=part.state_values).row_bytes
        writer = HandoffWriter(Path(folder), 0, 2 * changed * row_bytes + (64 << 20))
        writer.touch()
        found: list[dict[str, float]] = []
        for step in range(1, CUTS + 1):
            part.dirty.mark(chosen)
            in_order = partial(rows_of_stack, stack, [part])
            found.append(cut_part(writer, part, meta.to_json(), step, chosen[-BATCH:], in_order))
            store_cuts(Path(folder))
        writer.close("measured")
        mapped, resident = memory("VmSize") - mapped, memory("VmRSS")
        stack.close()
    # The first two have no older bitmap to reuse.
    medians = {name: float(np.median([each[name] for each in found[2:]])) for name in found[0]}
    return mapped, {"start_ms": start_ms, "resident_mib": resident / 2**20, **medians}
