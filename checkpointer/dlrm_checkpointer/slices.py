"""One cut on its way into the hand-off folder: in one piece where it fits the budget, else slice by slice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dlrm_api.errors import DivergedError, TemporaryError
from dlrm_checkpointer.cut import CutMeta, RowsInPlace, ShardId, row_bytes
from dlrm_checkpointer.draft import Budget, Draft, dense_bytes
from dlrm_checkpointer.folder import (
    DURABLE_FILE,
    POLL_S,
    REFUSED_FILE,
    WRITING_PREFIX,
    CutName,
    SliceName,
    discard_unfinished,
    durable_path,
    parent_path,
    read_json,
)


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """What a cut took to hand over."""

    nbytes: int
    """Bytes of arrays."""
    slices: int
    """1 where it fitted the budget."""
    waited_s: float
    """Seconds that the rank waited for room."""


class CutAbandonedError(TemporaryError):
    """A cut above the budget was given up, and nothing of it is left; a later one may do."""

    def __init__(self, problem: str, waited_s: float) -> None:
        super().__init__(problem)
        self.waited_s = waited_s


class SlicedCut:
    """One rank's part of one cut, while it is handed over.

    A rank that finds no room flips what it has, and holds nothing any more until the sidecar has freed that: so
    ranks that share a budget never wait for each other's copying, only for the sidecar. From then on each keeps to
    its share of the budget, which is free for it once the others do too.

    Args:
        folder: the hand-off folder.
        name: of the cut.
        meta: of the cut.
        owned: see ``Draft``.
        budget: of the folder.
        patience_s: seconds from now after which it waits no longer.
    """

    def __init__(
        self,
        folder: Path,
        name: CutName,
        meta: CutMeta,
        owned: Sequence[ShardId],
        budget: Budget,
        patience_s: float,
    ) -> None:
        self._folder, self._name, self._meta, self._owned, self._budget = folder, name, meta, owned, budget
        self._began, self._put = time.monotonic(), time.monotonic_ns()
        self._patience_s = patience_s
        self._path = folder / f"{WRITING_PREFIX}{name.rank}"
        self._draft = Draft(self._path, meta, name.rank, owned, budget.maps)
        self._flipped = self._sliced_bytes = 0
        self._nbytes = 0
        self._waited_s = 0.0
        self._is_shared = False

    def start(self) -> None:
        """Begin to copy."""
        self._budget.start(self._draft)

    def add_rows(self, place: RowsInPlace) -> None:
        """Copy rows, over several slices where it must be.

        Raises:
            CutAbandonedError: there was no room in time.
            DeviceError: the budget does not hold one row.
        """
        count, size, start = len(place.row_ids), row_bytes(place), 0
        while start < count:
            end = start + self._take(size, count - start)
            self._draft.add_rows(place, start, end)
            start = end
        self._nbytes += count * size

    def add_dense(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the dense state, which stays whole."""
        self._take(dense_bytes(arrays), 1)
        self._draft.add_dense(arrays)
        self._nbytes += sum(array.nbytes for array in arrays.values())

    def finish(self) -> HandedOver:
        """Make the cut whole.

        Raises:
            CutAbandonedError: the sidecar let go of its slices, because a newer attempt has started.
        """
        if self._flipped:
            note = durable_path(self._folder, self._name.rank)
            known = read_json(note)
            if known is None or known["put"] != self._put:
                raise self._abandoned("the checkpointer dropped its slices, because a newer attempt has started")
            note.rename(self._path / DURABLE_FILE)
        keep = 0 if self._flipped else self._budget.keeps()
        self._draft.flip(self._folder / str(self._name), self._flipped, keep)
        parent_path(self._folder, self._name.rank).unlink(missing_ok=True)  # the whole cut names it
        return HandedOver(nbytes=self._nbytes, slices=self._flipped + 1, waited_s=self._waited_s)

    def withdraw(self) -> None:
        """Leave nothing of the cut; objects that are in the store already are removed by retention."""
        with contextlib.suppress(OSError):  # what can't be moved now goes when the rank starts again
            discard_unfinished(self._folder, self._name.rank)

    @property
    def drafted_bytes(self) -> int:
        """Bytes of the slice that is being copied."""
        return self._draft.end

    def _take(self, unit: int, wanted: int) -> int:
        """Take room for at least one unit of bytes, whatever that needs."""
        while not (count := self._budget.take(self._draft, unit, wanted, shared=self._is_shared)):
            self._is_shared = True
            flipped = self._flip()
            self._wait()
            while flipped and flipped.exists():
                self._wait()
        return count

    def _flip(self) -> Path | None:
        """Hand what is there to the sidecar; where that is nothing, others have all the room."""
        if self._draft.is_empty:
            return None
        name = self._name
        path = self._folder / str(SliceName(name.step, name.attempt, name.rank, self._flipped, self._put))
        self._draft.flip(path, self._flipped)
        self._flipped += 1
        self._sliced_bytes += self._draft.end
        self._draft = Draft(self._path, self._meta, name.rank, self._owned, self._budget.maps)
        self._budget.start(self._draft)
        return path

    def _wait(self) -> None:
        """Wait a moment, unless that is hopeless or has lasted too long."""
        refused = read_json(self._folder / REFUSED_FILE)
        if refused and (refused["attempt"], refused["step"]) == (self._name.attempt, self._name.step):
            raise DivergedError(refused["problem"])
        began = time.monotonic()
        if began - self._began > self._patience_s:
            raise self._abandoned(
                f"the checkpointer did not make room for the rest within {self._patience_s:g} s: see why its store "
                "is slow or silent, or raise spec.checkpoint.handoffBudget"
            )
        time.sleep(POLL_S)
        self._waited_s += time.monotonic() - began

    def _abandoned(self, why: str) -> CutAbandonedError:
        return CutAbandonedError(
            f"rank {self._name.rank}: the cut at step {self._name.step} was given up after {self._flipped} slices of "
            f"{self._sliced_bytes} bytes: {why}",
            self._waited_s,
        )
