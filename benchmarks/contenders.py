"""Two sides in processes of their own, each in a memory group of its own, under the same limit."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.mapped_bags import MappedBags
from benchmarks.memory_groups import MemoryGroup
from benchmarks.shapes import Batches, Shape, placement_of, popularity_of
from benchmarks.sides import Trained

THREADS = 2
TRIED_ROWS = 2_000
DRAWN = 10
"""Batches in memory at a time: they count against the limit too."""
Kept = tuple[float, str, int]
"""Share of rows in slots, their policy, and batches whose rows are fetched ahead."""


class ContenderError(RuntimeError):
    """Report a side that ended early, as when the kernel killed it for its memory."""


class Contender:
    """One side in a child that enters its group before it opens a file.

    Args:
        kind: ours, or mapped-bags.
        shape: of the model.
        trace: of its batches.
        cache: how rows are kept in slots; ours alone.
        folders: of the rows, and of the histograms.
    """

    def __init__(self, kind: str, shape: Shape, trace: str, cache: Kept, folders: tuple[Path, Path]) -> None:
        self.kind, self.group = kind, MemoryGroup(kind)
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, kind, shape, trace, cache, folders))
        try:
            self._process.start()
            self.group.add(self._process.pid or os.getpid())
            theirs.close()
            self.base_bytes = int(self.ask("base"))
            """Most bytes that it took to train the same model with tables of almost no rows."""
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, *arguments: Any) -> Any:
        """Have the child do something, and wait for its answer.

        Raises:
            ContenderError: it has ended.
        """
        try:
            self._pipe.send((what, arguments))
            answer = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join(5)
            raise ContenderError(
                f"{self.kind} ended with {self._process.exitcode} under its memory limit: {self.group.events()}"
            ) from error
        if what == "base":
            return self.group.peak
        return answer

    def close(self) -> None:
        """End the child and remove its group."""
        if self._process.is_alive():
            self._process.kill()
        if self._process.pid is not None:
            self._process.join()
        self.group.close()


def _serve(pipe: Connection, kind: str, shape: Shape, trace: str, cache: Kept, folders: tuple[Path, Path]) -> None:
    """Run the child process: answer until the parent is gone."""
    torch.set_num_threads(THREADS)
    make: Callable[[Shape], Any] = {"ours": _ours(cache, folders[0]), "mapped-bags": _bags(folders[0])}[kind]
    batches = Batches(shape, popularity_of(trace, shape.rows, folders[1]))
    side: Any = None
    done = 0
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        if what == "base":
            _try_out(make, replace(shape, rows=min(TRIED_ROWS, shape.rows)), trace, folders[1])
            pipe.send(None)
        elif what == "open":
            side = make(shape)
            side.fill()
            pipe.send(None)
        else:
            seconds = 0.0
            for part in _parts(*arguments):
                drawn = batches.draw(done, done + part)
                done += part
                seconds += side.run(drawn)
            pipe.send(seconds)


def _parts(count: int) -> Sequence[int]:
    return [DRAWN] * (count // DRAWN) + [count % DRAWN] * (count % DRAWN > 0)


def _try_out(make: Callable[[Shape], Any], shape: Shape, trace: str, data_dir: Path) -> None:
    """Train a small model, so that all code is loaded and compiled and the buffers of libraries are there."""
    side = make(shape)
    side.fill()
    side.run(Batches(shape, popularity_of(trace, shape.rows, data_dir)).draw(0, 5))
    side.close()


def _ours(cache: Kept, folder: Path) -> Callable[[Shape], Trained]:
    return lambda shape: Trained(shape, placement_of(shape, ("block",), *cache), folder)


def _bags(folder: Path) -> Callable[[Shape], MappedBags]:
    return lambda shape: MappedBags(shape, folder)
