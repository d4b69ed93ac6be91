"""For how long a cut keeps training from going on: ``python -m benchmarks.stalling [--quick] [--repeats N]``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from benchmarks.measure import Pairs, report
from benchmarks.scratch import SHARED_MEMORY, Scratch
from dlrm_api.model import TableSpec
from dlrm_checkpointer.cut import CutMeta
from dlrm_checkpointer.handoff import HandOffWriter
from dlrm_checkpointer.inbox import Inbox
from dlrm_trainer.embedding.dirty import DirtyPart, DirtyRows
from dlrm_trainer.embedding.host import lazy_zeros
from dlrm_trainer.embedding.rows import ResidentPart, saved_rows, table_meta

ROWS, DIM = 20_000_000, 32
CHANGED = 0.26
REPEATS, DCP_REPEATS = 9, 3
METRIC = "stall_ms"


@dataclass(frozen=True)
class Stall:
    """Of a line."""

    rows: int
    against: str
    benchmark: str = "stalling"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        return {"rows": self.rows, "dim": DIM, "changed": CHANGED, "threads": torch.get_num_threads()}


@dataclass(frozen=True)
class Line:
    """What was measured against one peer, in milliseconds."""

    setting: Stall
    pairs: Pairs
    measured: dict[str, float]


class Table:
    """A table in host memory whose rows changed here and there, and its way to the checkpointer."""

    def __init__(self, rows: int, folder: Path) -> None:
        self.spec = TableSpec(name="items", rows=rows, dim=DIM)
        self.meta = table_meta(self.spec, 0, "rowwise-adagrad")
        self.dirty = DirtyRows([rows])
        self.part = ResidentPart(
            table=self.spec,
            shard=self.meta.whole(),
            weight=lazy_zeros(rows * DIM, torch.float32).view(rows, DIM).uniform_(),
            state=lazy_zeros(rows, torch.float32).view(rows, 1).uniform_(),
            dirty=DirtyPart(self.dirty, 0),
        )
        self.changed = np.flatnonzero(np.random.default_rng(0).random(rows) < CHANGED)
        cut_bytes = len(self.changed) * (8 + 4 * DIM + 4)
        self.writer = HandOffWriter(folder, 0, int(1.2 * cut_bytes) + (8 << 20))
        self.writer.touch()
        self.inbox = Inbox(folder, range(1))
        self.step = 0

    def cut(self) -> float:
        """Milliseconds of one cut of the changed rows; the checkpointer is done with it afterwards."""
        self.part.dirty.mark(self.changed)
        self.step += 1
        start = time.perf_counter()
        parent = self.writer.begin(attempt=1)
        if parent is not None:
            self.dirty.forget(parent.step)
        self.dirty.cut(self.step)
        meta = CutMeta(
            step=self.step,
            samples=0,
            world_size=1,
            attempt=1,
            parent=parent,
            time=time.time(),
            model={"tables": [self.meta.to_json()]},
        )
        given = self.writer.put(meta, saved_rows(self.part), None, owned=[self.part.shard], patience_s=0)
        taken = time.perf_counter() - start
        assert (given.slices, given.waited_s) == (1, 0)
        self.inbox.free(self.inbox.ready()[0])
        self.inbox.publish_committed(self.step, 1)
        return taken * 1_000

    def close(self) -> None:
        """Let go of the folder."""
        self.inbox.close()
        self.writer.close("measured")


class Gather:
    """Bare ``index_select`` of the rows and states of a cut, in their order, into memory that was touched before."""

    def __init__(self, table: Table) -> None:
        self._sources = (table.part.weight, table.part.state)
        self._rows = torch.from_numpy(table.changed)
        self.out = tuple(torch.ones(len(table.changed), source.shape[1]) for source in self._sources)

    def run(self) -> None:
        """Once."""
        for source, out in zip(self._sources, self.out, strict=True):
            torch.index_select(source, 0, self._rows, out=out)


class Copy:
    """A plain copy of as many bytes, from one place to another."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._to, self._from = [torch.ones_like(each) for each in like], like

    def run(self) -> None:
        """Once."""
        for to, from_ in zip(self._to, self._from, strict=True):
            to.copy_(from_)


class AsyncSave:
    """``torch.distributed.checkpoint.async_save`` of the whole model: what it takes before training may go on."""

    def __init__(self, table: Table, folder: Path) -> None:
        self._state = {"items": table.part.weight, "items.state": table.part.state}
        self._folder = folder

    def run_ms(self) -> float:
        """Milliseconds until it returned; what it writes is waited for, removed, and synced outside of that."""
        writer = FileSystemWriter(self._folder, sync_files=False)
        start = time.perf_counter()
        saving = async_save(self._state, storage_writer=writer, no_dist=True)
        taken = time.perf_counter() - start
        assert not isinstance(saving, AsyncSaveResponse)
        saving.result()
        shutil.rmtree(self._folder)
        os.sync()  # or the kernel writes on beside the next cut
        return taken * 1_000


def lines(quick: bool, repeats: int | None = None) -> Iterator[Line]:
    """A rank's cuts against each peer, in turn; the first two of either are not counted."""
    rows = ROWS // 10 if quick else ROWS
    with ExitStack() as resources:
        folder = resources.enter_context(Scratch(SHARED_MEMORY)).path
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        table = Table(rows, folder)
        resources.callback(table.close)
        gather = Gather(table)
        copy = Copy(gather.out)
        count = repeats or (2 if quick else REPEATS)
        for name, run in (("gather", gather.run), ("memcpy", copy.run)):
            yield Line(Stall(rows, name), *_alternated(table, partial(_ms, run), count))
        save = AsyncSave(table, scratch / "dcp")
        yield Line(Stall(rows, "dcp-async-save"), *_alternated(table, save.run_ms, min(count, DCP_REPEATS)))


def _alternated(table: Table, peer: Callable[[], float], repeats: int) -> tuple[Pairs, dict[str, float]]:
    pairs = Pairs()
    for repeat in range(-2, repeats):
        ours, theirs = (table.cut(), peer()) if repeat % 2 == 0 else (peer(), table.cut())[::-1]
        if repeat >= 0:
            pairs.add(ours, theirs)
    return pairs, {"ours_least": min(pairs.ours), "theirs_least": min(pairs.theirs)}


def _ms(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the lines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows: does it run here?")
    parser.add_argument("--repeats", type=int, metavar="N")
    given = parser.parse_args(arguments)
    for line in lines(given.quick, given.repeats):
        report(line.setting, METRIC, line.pairs, **line.measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
