"""For how long a cut keeps training from going on: ``python -m benchmarks.stalling [--quick] [--repeats N]``."""

from __future__ import annotations

import argparse
import os
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

from benchmarks.measure import Pairs, report
from benchmarks.scratch import SHARED_MEMORY, Scratch
from benchmarks.shapes import Shape
from benchmarks.shapes import quick as quick_shape
from benchmarks.training_cuts import TOUCHED, AsyncSave, Cuts, Training
from dlrm_checkpointer.handoff.inbox import Inbox
from dlrm_checkpointer.types import SnapshotName
from dlrm_trainer.embedding.changes import BeforeUpdates, RowsToUpdate

REPEATS, DCP_REPEATS = 9, 3
ALONE_STEPS = 20
METRIC = "stall_ms"


@dataclass(frozen=True)
class Stall:
    """Describe a line about stalls."""

    shape: Shape
    against: str
    benchmark: str = "stalling"

    @property
    def shown(self) -> dict[str, Any]:
        """See ``measure.Described``."""
        shape = {"tables": self.shape.tables, "rows": self.shape.rows, "dim": self.shape.dim}
        return {**shape, "changed": TOUCHED, "threads": torch.get_num_threads()}


@dataclass(frozen=True)
class Line:
    """Hold what was measured against one peer, in milliseconds."""

    setting: Stall
    pairs: Pairs
    measured: dict[str, float]


class Timed:
    """Times what is done before updates; ``BeforeUpdates``."""

    def __init__(self, timed: BeforeUpdates) -> None:
        self._timed = timed
        self.seconds = 0.0

    def before_update(self, rows: RowsToUpdate) -> None:
        """See ``BeforeUpdates``."""
        self.seconds += _seconds(partial(self._timed.before_update, rows))


@dataclass(frozen=True)
class Taken:
    """Hold what a cut took, in milliseconds."""

    stall: float
    """All that training waited for: between steps, and before their updates."""
    longest: float
    """The most of it at one time."""
    steps: int
    """Beside which rows were copied."""
    lost: float
    """That these took longer than as many take by themselves, the stall included."""


class Cutter:
    """Cuts beside training, which a checkpointer takes that does nothing with them."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._training, self._cuts, self._inbox = training, Cuts(training, folder, 1), Inbox(folder, range(1))

    def cut(self) -> Taken:
        """One cut of a share of the rows, and the steps until it is handed over."""
        training, owned = self._training, self._training.learner.embeddings.tables
        alone = training.undisturbed_s(ALONE_STEPS)
        training.touch()
        waits, steps = [_seconds(self._cuts.begin)], 0
        began, timed = time.perf_counter() - waits[0], None
        while not self._cuts.handed_over:
            if owned.pending is not None and timed is None:
                owned.pending = timed = Timed(owned.pending)
            before = 0.0 if timed is None else timed.seconds
            training.step()
            steps += 1
            if timed is not None:
                waits.append(timed.seconds - before)
            waits.append(_seconds(self._cuts.advance))
        lost = time.perf_counter() - began - steps * alone
        [name] = self._inbox.ready()
        self._inbox.free(name)
        self._inbox.publish_committed(SnapshotName(training.steps - steps, 1))
        return Taken(stall=1_000 * sum(waits), longest=1_000 * max(waits), steps=steps, lost=1_000 * lost)

    def close(self) -> None:
        """Let go of the folder."""
        self._inbox.close()
        self._cuts.close()


class Gather:
    """Bare ``index_select`` of the rows and states of a cut, in their order, into memory that was touched before."""

    def __init__(self, training: Training) -> None:
        [group] = training.learner.embeddings.tables.groups
        self._sources = group.batch.storage()
        rows = self._sources[0].shape[0]
        self._rows = torch.from_numpy(np.flatnonzero(np.random.default_rng(0).random(rows) < TOUCHED))
        self.out = tuple(torch.ones(len(self._rows), source.shape[1]) for source in self._sources)

    def run(self) -> None:
        """Run once."""
        for source, out in zip(self._sources, self.out, strict=True):
            torch.index_select(source, 0, self._rows, out=out)


class Copy:
    """Copy as many bytes plainly from one place to another."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._to, self._from = [torch.ones_like(each) for each in like], like

    def run(self) -> None:
        """Run once."""
        for to, from_ in zip(self._to, self._from, strict=True):
            to.copy_(from_)


def dcp_ms(save: AsyncSave) -> float:
    """Milliseconds until ``async_save`` returned; what it writes is waited for, and synced, outside of that."""
    taken = _ms(save.begin)
    save.wait()
    os.sync()  # or the kernel writes on beside the next cut
    return taken


def lines(quick: bool, repeats: int | None = None) -> Iterator[Line]:
    """Alternate a rank's cuts with each peer; the first two of either are not counted."""
    shape, count = quick_shape(Shape()) if quick else Shape(), repeats or (2 if quick else REPEATS)
    with ExitStack() as resources:
        folder = resources.enter_context(Scratch(SHARED_MEMORY)).path
        scratch = Path(resources.enter_context(tempfile.TemporaryDirectory()))
        training = Training(shape)
        cutter = Cutter(training, folder)
        resources.callback(cutter.close)
        gather = Gather(training)
        copy = Copy(gather.out)
        for name, run in (("gather", gather.run), ("memcpy", copy.run)):
            yield _alternated(cutter, Stall(shape, name), partial(_ms, run), count)
        save = AsyncSave(training.learner, scratch / "dcp")
        setting = Stall(shape, "dcp-async-save")
        yield _alternated(cutter, setting, partial(dcp_ms, save), min(count, DCP_REPEATS))


def _alternated(cutter: Cutter, setting: Stall, peer: Callable[[], float], repeats: int) -> Line:
    pairs, cuts = Pairs(), list[Taken]()
    for repeat in range(-2, repeats):
        if repeat % 2 == 0:
            ours, theirs = cutter.cut(), peer()
        else:
            theirs, ours = peer(), cutter.cut()
        if repeat >= 0:
            pairs.add(ours.stall, theirs)
            cuts.append(ours)
    medians = {name: float(np.median([getattr(cut, name) for cut in cuts])) for name in ("longest", "steps", "lost")}
    measured = {"longest_ms": medians["longest"], "steps": medians["steps"], "lost_ms": medians["lost"]}
    return Line(setting, pairs, measured | {"theirs_least": min(pairs.theirs)})


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _ms(run: Callable[[], object]) -> float:
    return 1_000 * _seconds(run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the lines."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stalling", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model: does it run here?")
    parser.add_argument("--repeats", type=int, metavar="N")
    given = parser.parse_args(arguments)
    for line in lines(given.quick, given.repeats):
        report(line.setting, METRIC, line.pairs, **line.measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
