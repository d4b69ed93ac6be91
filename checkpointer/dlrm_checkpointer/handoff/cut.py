"""One cut on its way into the hand-off folder: in one piece where it fits the budget, else slice by slice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dlrm_api.errors import DivergedError, TemporaryError
from dlrm_api.process import raise_device
from dlrm_checkpointer.handoff.budget import Budget, Draft, Laid, Rows, dense_bytes
from dlrm_checkpointer.handoff.protocol import (
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
    remove_entry,
)
from dlrm_checkpointer.types import CutMeta, CutSize, RowsInPlace, ShardId, SnapshotName, check_rows, row_bytes


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


class withdrawn(AbstractContextManager[None]):  # noqa: N801  a context manager
    """Leave nothing of a cut where the block raises.

    Args:
        cut: the cut.
        folder: the hand-off folder.
        then: called after it was withdrawn.

    Raises:
        DeviceError: in place of an OSError.
    """

    def __init__(self, cut: SlicedCut, folder: Path, then: Callable[[], None] = lambda: None) -> None:
        self._cut, self._folder, self._then = cut, folder, then

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            return
        size = self._cut.drafted_bytes
        self._cut.withdraw()
        self._then()
        if isinstance(error, OSError):
            raise_device(error, self._folder, size)


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
        self._folder, self._meta, self._owned, self._budget = folder, meta, owned, budget
        self._tables = {table.name: table for table in meta.tables}
        self.name = name
        self._began, self._put = time.monotonic(), time.monotonic_ns()
        self._patience_s = patience_s
        self._path = folder / f"{WRITING_PREFIX}{name.rank}"
        self._draft = Draft(self._path, meta, name.rank, owned, budget.maps)
        self._flipped = self._sliced_bytes = 0
        self._nbytes = 0
        self._waited_s = 0.0
        self._is_shared = False
        self._flying: Path | None = None

    def start(self) -> None:
        """Begin to copy."""
        self._budget.start(self._draft)

    def reserve(self, size: CutSize, dense: Mapping[str, NDArray[Any]] | None) -> bool:
        """Take room for all of it at once; False where the budget does not hold it now."""
        if dense is not None:
            size = CutSize(row_bytes=size.row_bytes + dense_bytes(dense), pieces=size.pieces + 1)
        return self._budget.reserve(self._draft, size)

    def add_rows(self, place: RowsInPlace) -> None:
        """Copy rows, over several slices where it must be.

        Raises:
            CutAbandonedError: there was no room in time.
            DeviceError: the budget does not hold one row.
            ValueError: they are not of the cut's tables, or the rank does not store them.
        """
        self._check_owned(place.shard)
        check_rows(place, self._tables[place.shard.table])
        count, size, start = len(place.row_ids), row_bytes(place), 0
        while start < count:
            end = start + self._take(size, count - start)
            self._draft.add_rows(place, start, end)
            start = end
        self._nbytes += count * size

    def lay(self, wanted: Sequence[Rows]) -> list[Laid]:
        """Memory for those of some rows that are any, for all of which room was taken.

        Raises:
            ValueError: the rank does not store them.
        """
        wanted = [rows for rows in wanted if rows.count]
        for rows in wanted:
            self._check_owned(rows.shard)
            taken = self._budget.take(self._draft, row_bytes(rows), rows.count, shared=False)
            assert taken == rows.count, f"{rows}: room for {taken}"
            self._nbytes += rows.count * row_bytes(rows)
        return self._draft.lay(wanted) if wanted else []

    def add_dense(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Copy the dense state, which stays whole."""
        self._take(dense_bytes(arrays), 1)
        self._add_dense(arrays)

    def _add_dense(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._draft.add_dense(arrays)
        self._nbytes += sum(array.nbytes for array in arrays.values())

    def take_gradually(self, place: RowsInPlace, start: int) -> int:
        """Copy rows from ``start`` on while the sidecar has no slice of the cut; never waits.

        Returns:
            How many were copied; 0: there is no room before the sidecar has made a slice durable.

        Raises:
            DivergedError: the cut can never be stored.
            DeviceError: the budget does not hold one row.
        """
        if self.is_waiting():
            return 0
        count = self._take_now(row_bytes(place), len(place.row_ids) - start)
        if count == 0:
            self._flying = self._flip(gradual=True)
            return 0
        self._draft.add_rows(place, start, start + count)
        self._nbytes += count * row_bytes(place)
        return count

    def save(self, place: RowsInPlace) -> None:
        """Copy rows that are about to change; never waits.

        Raises:
            CutAbandonedError: there is no room, because the sidecar still has the slice before.
        """
        start, size = 0, row_bytes(place)
        while start < len(place.row_ids):
            count = self._take_now(size, len(place.row_ids) - start)
            if count == 0:
                if self._draft.is_empty or self.is_waiting():  # others have the room, or the sidecar has
                    raise self._abandoned(
                        "rows changed faster than the checkpointer made room: see why its store is slow or silent, "
                        "or raise spec.checkpoint.handoffBudget"
                    )
                self._flying = self._flip(gradual=True)
            else:
                self._draft.add_rows(place, start, start + count)
            start += count
        self._nbytes += start * size

    def finish_gradually(self, arrays: Mapping[str, NDArray[Any]] | None) -> HandedOver | None:
        """Make the cut whole, with the dense state as it was at the cut; None: not before the sidecar made room."""
        if self.is_waiting():
            return None
        if arrays:
            if not self._take_now(dense_bytes(arrays), 1):
                self._flying = self._flip(gradual=True)
                return None
            self._add_dense(arrays)
        return self.finish()

    def is_waiting(self) -> bool:
        """Whether the sidecar still has the last slice.

        Raises:
            DivergedError: the cut can never be stored.
        """
        waiting = self._flying is not None and self._flying.exists()
        self._check_refused()  # after that: the sidecar says so before it lets go of the slice
        return waiting

    def _take_now(self, unit: int, wanted: int) -> int:
        return self._budget.take(self._draft, unit, wanted, shared=False, gradual=True)

    def finish(self) -> HandedOver:
        """Make the cut whole.

        Raises:
            CutAbandonedError: the sidecar let go of its slices, because a newer attempt has started.
        """
        if self._flipped:
            note = durable_path(self._folder, self.name.rank)
            known = read_json(note)
            if known is None or known["put"] != self._put:
                raise self._abandoned("the checkpointer dropped its slices, because a newer attempt has started")
            note.rename(self._path / DURABLE_FILE)
        keep = 0 if self._flipped else self._budget.keeps()
        self._draft.flip(self._folder / str(self.name), self._flipped, keep)
        parent_path(self._folder, self.name.rank).unlink(missing_ok=True)  # the whole cut names it
        return HandedOver(nbytes=self._nbytes, slices=self._flipped + 1, waited_s=self._waited_s)

    def withdraw(self) -> None:
        """Leave nothing of the cut; objects that are in the store already are removed by retention."""
        with contextlib.suppress(OSError):  # what can't be moved now goes when the rank starts again
            discard_unfinished(self._folder, self.name.rank)

    def leave(self) -> None:
        """Remove what was begun, before anything was copied; the cut's parent stays named."""
        remove_entry(self._path, self.name.rank)

    @property
    def drafted_bytes(self) -> int:
        """Bytes of the slice that is being copied."""
        return self._draft.end

    def _check_owned(self, shard: ShardId) -> None:
        if shard not in self._owned:
            raise ValueError(f"{shard}: is nothing that rank {self.name.rank} stores")

    def _take(self, unit: int, wanted: int) -> int:
        """Take room for at least one unit of bytes, whatever that needs."""
        while not (count := self._budget.take(self._draft, unit, wanted, shared=self._is_shared)):
            self._is_shared = True
            flipped = self._flip()
            self._wait()
            while flipped and flipped.exists():
                self._wait()
            self._check_refused()
        return count

    def _flip(self, *, gradual: bool = False) -> Path | None:
        """Hand what is there to the sidecar; where that is nothing, others have all the room."""
        if self._draft.is_empty:
            return None
        name = self.name
        path = self._folder / str(SliceName(name.step, name.attempt, name.rank, self._flipped, self._put))
        self._draft.flip(path, self._flipped)
        self._flipped += 1
        self._sliced_bytes += self._draft.end
        self._draft = Draft(self._path, self._meta, name.rank, self._owned, self._budget.maps)
        self._budget.start(self._draft, gradual=gradual)
        return path

    def _wait(self) -> None:
        """Wait a moment, unless that is hopeless or has lasted too long."""
        self._check_refused()
        began = time.monotonic()
        if began - self._began > self._patience_s:
            raise self._abandoned(
                f"the checkpointer did not make room for the rest within {self._patience_s:g} s: see why its store "
                "is slow or silent, or raise spec.checkpoint.handoffBudget"
            )
        time.sleep(POLL_S)
        self._waited_s += time.monotonic() - began

    def _check_refused(self) -> None:
        refused = read_json(self._folder / REFUSED_FILE)
        if refused and SnapshotName.from_json(refused) == self.name.snapshot:
            raise DivergedError(refused["problem"])

    def _abandoned(self, why: str) -> CutAbandonedError:
        return CutAbandonedError(
            f"rank {self.name.rank}: the cut at step {self.name.step} was given up after {self._flipped} slices of "
            f"{self._sliced_bytes} bytes: {why}",
            self._waited_s,
        )


class CutUnderWay:
    """One rank's part of a cut, on its way. Nothing is left of it where a call raises.

    Args:
        cut: started.
        folder: the hand-off folder.
        ended: told once, with the cut's name where it is whole, else with None.
    """

    def __init__(self, cut: SlicedCut, folder: Path, ended: Callable[[CutName | None], None]) -> None:
        self._cut, self._folder, self._tell = cut, folder, ended
        self._ended = False

    @property
    def step(self) -> int:
        """Of the cut."""
        return self._cut.name.step

    def withdraw(self) -> None:
        """Give the cut up, and leave nothing of it. Repeating it does nothing, nor does it once the cut is whole."""
        if not self._ended:
            self._cut.withdraw()
            self._end(None)

    def _end(self, name: CutName | None) -> None:
        self._ended = True
        self._tell(name)

    def _withdrawn(self) -> withdrawn:
        return withdrawn(self._cut, self._folder, lambda: self._end(None))


class GradualCut(CutUnderWay):
    """One rank's part of a cut, on its way. No call waits, and nothing is left of the cut where one raises.

    The rank must ``save`` each row of the cut before it changes, unless the row was copied before, and calls ``copy``
    for the others and ``finish`` now and then.

    Args:
        cut: started.
        dense: dense state, on global rank 0; copied.
        folder: the hand-off folder.
        ended: told once, with the cut's name where it is whole, else with None.
    """

    def __init__(
        self,
        cut: SlicedCut,
        dense: Mapping[str, NDArray[Any]] | None,
        folder: Path,
        ended: Callable[[CutName | None], None],
    ) -> None:
        super().__init__(cut, folder, ended)
        self._dense = None if dense is None else {name: array.copy() for name, array in dense.items()}

    def copy(self, place: RowsInPlace, start: int) -> int:
        """Copy rows from ``start`` on; returns how many, 0 where there is no room before the sidecar has made some.

        Raises:
            CutAbandonedError: there was no room for rows about to change.
            DeviceError: the device is full, or the budget can't hold a single row.
            DivergedError: the cut can never be stored, because it holds a value that is not finite.
        """
        with self._withdrawn():
            return self._cut.take_gradually(place, start)

    def save(self, place: RowsInPlace) -> None:
        """Copy rows that are about to change; raises what ``copy`` raises."""
        with self._withdrawn():
            self._cut.save(place)

    def is_waiting(self) -> bool:
        """Whether nothing but ``save`` can be done now; raises what ``copy`` raises."""
        with self._withdrawn():
            return self._cut.is_waiting()

    def finish(self) -> HandedOver | None:
        """Make the cut whole, once all its rows are copied; None where the sidecar must make room before.

        Raises:
            CutAbandonedError: the sidecar dropped its slices, because a newer attempt has started.
            DeviceError: the device is full, or the budget can't hold the dense state.
            DivergedError: the cut can never be stored.
        """
        with self._withdrawn():
            given = self._cut.finish_gradually(self._dense)
        if given:
            self._end(self._cut.name)
        return given


class WholeCut(CutUnderWay):
    """One rank's part of a cut, on its way in one piece: room for all of it is taken, and its dense state is in it."""

    def copy(self, place: RowsInPlace) -> None:
        """Copy rows now.

        Raises:
            ValueError: they are not of the cut's tables, or the rank does not store them.
        """
        with self._withdrawn():
            self._cut.add_rows(place)

    def lay(self, wanted: Sequence[Rows]) -> list[Laid]:
        """Memory for those of some rows that are any, filled in before ``finish``; the caller lets go of it then.

        Raises:
            ValueError: the rank does not store them.
        """
        with self._withdrawn():
            return self._cut.lay(wanted)

    def finish(self) -> HandedOver:
        """Make the cut whole, once all of it is filled in."""
        with self._withdrawn():
            given = self._cut.finish()
        self._end(self._cut.name)
        return given
