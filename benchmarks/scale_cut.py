"""A cut of one rank's rows: what training waits for, by the rows that changed among all."""

from __future__ import annotations

import mmap
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import Result, tell
from dlrm_api.model import TableSpec
from dlrm_checkpointer import CutMeta, CutRows, CutRowSource, CutSize, HandoffWriter, SnapshotName
from dlrm_checkpointer.handoff.protocol import HandoffDir
from dlrm_trainer.checkpointing.handover import SMALL_CUT_BYTES
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows, RowsToUpdate
from dlrm_trainer.embedding.checkpoint import LocalPart, ResidentPart, table_meta
from dlrm_trainer.embedding.copy_before_update import CopyBeforeUpdate, is_resting
from dlrm_trainer.embedding.tiers.slots import MAP_NORESERVE

MAX_PAUSE_MS = {10**8: 6.0, 10**9: 15.0}
"""By number of rows."""
CHANGED, DIM = 200_000, 8
CUTS = 9
FORWARD_S = 2e-3
"""From the end of the pause until a step updates rows: real ones take longer."""
UPDATED = 53_248
"""Rows of a step's update: 26 features, 2,048 samples."""


def untouched(shape: tuple[int, int]) -> torch.Tensor:
    """Return zeros of which small pages are written alone, so that a machine with less memory holds few rows."""
    count = shape[0] * shape[1]
    memory = mmap.mmap(-1, 4 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.float32, count=count).view(shape)


def pause(rows: int, is_quick: bool) -> Iterator[Result]:
    """Cut a resident part nine times; before each cut the same random rows change. A snapshot follows each."""
    rows, cuts = (rows // 100, 4) if is_quick else (rows, CUTS)
    table = TableSpec(name="items", rows=rows, dim=DIM)
    meta = table_meta(table, 0, "rowwise-adagrad")
    part = ResidentPart(
        table=table,
        shard=meta.whole(),
        weight=untouched((rows, DIM)),
        state=untouched((rows, 1)),
        dirty=DirtyPart(DirtyRows([rows]), 0),
    )
    changed = np.random.default_rng(0).choice(rows, min(CHANGED, rows // 4), replace=False)
    part.weight[changed] = part.state[changed] = 1.0
    row_bytes = CutRows(shard=part.shard, count=0, state_values=part.state_values).row_bytes
    found: list[dict[str, float]] = []
    tell(f"cut/{rows}: {len(changed)} changed rows; medians")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        writer = HandoffWriter(Path(folder), 0, 2 * len(changed) * row_bytes + (64 << 20))
        writer.touch()
        for step in range(1, cuts + 1):
            for some in np.array_split(changed, 10):
                part.dirty.mark(some)
            found.append(cut_part(writer, part, meta.to_json(), step, changed[:UPDATED]))
            store_cuts(Path(folder))
        writer.close("measured")
    # The first two have no older bitmap to reuse.
    laps = found[2:]
    medians = {name: float(np.median([each[name] for each in laps])) for name in laps[0]}
    setting = {"rows": rows, "changed": len(changed), "dim": DIM, "cuts": len(laps), "updated_rows": UPDATED}
    # Whatever else runs here only adds to it.
    least = min(each["pause_ms"] for each in laps)
    yield Result(metric="least_pause_ms", value=least, limit=MAX_PAUSE_MS.get(rows), setting=setting, measured=medians)


def store_cuts(folder: Path) -> None:
    """Give back the memory of cuts, as the sidecar does once they are stored."""
    directory = HandoffDir(folder)
    for name in directory.ready_cuts():
        directory.retire(name)
    directory.sweep()


def cut_part(
    writer: HandoffWriter,
    part: LocalPart,
    table: object,
    step: int,
    updated: NDArray[np.int64],
    in_order: Callable[[], Iterable[CutRowSource]] = list,
) -> dict[str, float]:
    """Cut a part as ``CutDriver`` and ``CheckpointView`` do; return what it takes.

    Args:
        writer: of the rank.
        part: whose changed rows are marked.
        table: its description in a manifest.
        step: of the cut; the one before it is stored.
        updated: rows that the step after the cut updates.
        in_order: see ``CopyBeforeUpdate``.
    """
    record, walls, processor = part.dirty.rows, [time.perf_counter()], [time.process_time()]
    row_bytes = CutRows(shard=part.shard, count=0, state_values=part.state_values).row_bytes

    def lap() -> None:
        walls.append(time.perf_counter())
        processor.append(time.process_time())

    parent = None if step == 1 else SnapshotName(step - 1, 1)
    record.forget(step - 1)
    record.cut(step)
    size = CutSize(row_bytes=record.count() * row_bytes, pieces=4)
    described = CutMeta(
        step=step, samples=step, world_size=1, attempt=1, parent=parent, time=time.time(), model={"tables": [table]}
    )
    cut = writer.reserve(described, None, owned=[part.shard], size=size)
    resting, moving = ([part], []) if is_resting(part) else ([], [part])
    copying = CopyBeforeUpdate(cut, resting, moving, in_order, lambda: None)
    if not copying.copy(None if size.row_bytes <= SMALL_CUT_BYTES else 0):
        copying.start()
    lap()
    time.sleep(FORWARD_S)
    lap()
    sizes = np.array([len(updated)])
    copying.before_update(RowsToUpdate(record, updated, sizes, record.starts, lambda _, rows: part.in_place(rows)))
    lap()
    while not copying.copy(0):
        time.sleep(1e-3)
    copying.close()
    lap()
    if cut.finish() is None:
        raise RuntimeError("the hand-off directory did not hold the cut")
    wall, spent = (1e3 * np.diff(each) for each in (walls, processor))
    return {
        "pause_ms": wall[0],
        "pause_processor_ms": spent[0],
        "first_update_ms": wall[2],
        "all_processor_ms": float(spent.sum()),
    }
