"""Describe what a reader is to open, number rows over all files, and hold blocks of rows in memory."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from dlrm_api.data import REMOTE_THREADS
from dlrm_api.job import DLRMJobSpec
from dlrm_checkpointer import DataIndex
from dlrm_stores.data_files import DataFile, relative_names

LOCAL_THREADS = 2
"""Threads that make blocks of local files ahead."""

Split = Literal["train", "eval"]


@dataclass(frozen=True, kw_only=True)
class SourceRequest:
    """Say which rows a format's reader is to open."""

    spec: DLRMJobSpec
    split: Split
    files: Sequence[DataFile] = ()
    """Sorted by path; empty for formats without files."""
    index: DataIndex
    """Of the files."""
    is_remote: bool = False
    """Whether files are objects of a service."""
    budget_bytes: int = 0
    """Of blocks of rows that are held."""

    @property
    def marks_bad(self) -> bool:
        """Return whether bad rows are marked, and do not end the job."""
        return self.spec.data.bad_rows.action != "fail"

    @property
    def threads(self) -> int:
        """Return how many threads make blocks ahead."""
        return REMOTE_THREADS if self.is_remote else LOCAL_THREADS


class FileSet:
    """Number the rows of files in order over all of them."""

    def __init__(self, files: Sequence[DataFile], index: DataIndex) -> None:
        self.files = files
        self.blocks: NDArray[np.int64] = np.concatenate(([0], np.cumsum(index.rows)))
        """(B + 1,) first row of each block, and the end of the last one."""
        self.bounds: NDArray[np.int64] = self.blocks[index.firsts]
        """(F + 1,) first row of each file, and the end of the last one."""
        self.num_rows = int(self.bounds[-1])
        self._contents = index.contents

    def description(self) -> list[dict[str, Any]]:
        """Return name (below the shared folder), bytes, rows and ``content`` of each file, for fingerprints."""
        counts = np.diff(self.bounds).tolist()
        names, contents = relative_names([file.path for file in self.files]), self._contents
        return [
            {"name": name, "bytes": file.size, "rows": rows, "content": content.tobytes().hex()}
            for name, file, rows, content in zip(names, self.files, counts, contents, strict=True)
        ]

    def locate(self, row: int) -> tuple[DataFile, int]:
        """Return the file of a row, and the row's number in it."""
        number = int(np.searchsorted(self.bounds, row, side="right")) - 1
        return self.files[number], row - int(self.bounds[number])


class Sized(Protocol):
    """Take memory."""

    @property
    def num_bytes(self) -> int:
        """Return the memory that is held."""


Block = TypeVar("Block", bound=Sized)


class BlockCache(Generic[Block]):
    """Make blocks of rows by number, once, ahead of their use and within a budget.

    Blocks that are wanted next are made in ``threads`` threads, as many as fit the budget; others are dropped for them,
    the least recently used first. Only a single block may be larger than the budget.
    """

    def __init__(self, make: Callable[[int], Block], budget_bytes: int, threads: int = 1) -> None:
        self._make, self._budget, self._threads = make, budget_bytes, threads
        self._pool = ThreadPoolExecutor(threads, "dlrm-decode")
        # Reentrant: a block may be done before its callback is added, which then runs in this thread.
        self._lock = threading.RLock()
        self._held: OrderedDict[int, Block] = OrderedDict()
        self._held_bytes = 0
        self._making: dict[int, Future[Block]] = {}
        self._queue: list[int] = []
        self._all_begun = True
        """Whether every queued block is held or being made."""
        self._seen: set[int] = set()
        self._largest = 0
        self.remade = 0
        """Blocks that were made again after they had been dropped."""

    @property
    def held_bytes(self) -> int:
        """Return the memory of the blocks that are held."""
        with self._lock:
            return self._held_bytes

    def plan(self, numbers: Sequence[int]) -> None:
        """Announce which blocks are taken next, in order, and begin to make some of them."""
        with self._lock:
            self._queue, self._all_begun = list(numbers), False
            self._begin()

    def take(self, number: int) -> Block:
        """Return one block, made now if it is not held. After an error the next call makes it again."""
        with self._lock:
            if number in self._queue:
                del self._queue[: self._queue.index(number) + 1]
            block, making = self._held.get(number), self._making.get(number)
            if block is not None:
                self._held.move_to_end(number)
                self._begin()
                return block
        block = self._make(number) if making is None else making.result()
        with self._lock:
            self._keep(number, block)
            self._begin()
        return block

    def clear(self) -> None:
        """Drop all blocks; those that are being made now are dropped when they are done."""
        with self._lock:
            self._queue = []
            self._making.clear()
            self._held.clear()
            self._held_bytes, self._all_begun = 0, True
            self._seen.clear()

    def close(self) -> None:
        """Stop making blocks, and drop all."""
        self.clear()
        self._pool.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        """Begin to make queued blocks that fit the budget together with those queued before them."""
        if self._all_begun:
            return
        space = self._budget
        for number in dict.fromkeys(self._queue):
            if len(self._making) >= self._threads:
                return
            block = self._held.get(number)
            space -= self._largest if block is None else block.num_bytes
            # The first block shows how large blocks are; whoever takes it makes it.
            if space < 0 or not self._largest:
                return
            if block is None and number not in self._making:
                making = self._making[number] = self._pool.submit(self._make, number)
                making.add_done_callback(functools.partial(self._made, number))
        self._all_begun = True

    def _made(self, number: int, done: Future[Block]) -> None:
        with self._lock:
            # The cache was cleared meanwhile.
            if self._making.get(number) is not done:
                return
            del self._making[number]
            # After an error whoever takes the block makes it again and sees the error.
            if not done.cancelled() and done.exception() is None:
                self._keep(number, done.result())
                self._begin()
            else:
                self._all_begun = False

    def _keep(self, number: int, block: Block) -> None:
        if number in self._held:
            return
        self.remade += number in self._seen
        self._seen.add(number)
        self._largest = max(self._largest, block.num_bytes)
        self._held[number] = block
        self._held_bytes += block.num_bytes
        if self._held_bytes <= self._budget:
            return
        queued = set(self._queue)
        for other in [*(each for each in self._held if each not in queued), *reversed(self._queue)]:
            if self._held_bytes <= self._budget:
                return
            if other != number and other in self._held:
                self._held_bytes -= self._held.pop(other).num_bytes
                self._all_begun = False
