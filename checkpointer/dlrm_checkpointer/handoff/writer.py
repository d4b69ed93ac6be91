"""Access the hand-off directory from the trainer: reserve cuts, and follow their fate."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dlrm_api.errors import DeviceError, DivergedError, InvalidSpecError, TemporaryError
from dlrm_api.process import raise_device
from dlrm_checkpointer.handoff.budget import KEY_BYTES, Budget
from dlrm_checkpointer.handoff.cut import Cut, CutState, HandedOver
from dlrm_checkpointer.handoff.protocol import POLL_S, CutName, HandoffDir
from dlrm_checkpointer.types import CutMeta, CutRows, CutRowSource, CutSize, GoneRows, ShardId, SnapshotName


class HandoffWriter:
    """Hand one rank's cuts to the pod's sidecar.

    Holds the rank's lock while it runs: the sidecar takes all locks free as the end of the trainers, however they died.

    The directory, made if absent, takes at most ``budget_bytes`` with the cuts of all the pod's ``ranks_here`` ranks
    together; None: whatever the device holds. A cut above it is handed over in segments.

    Raises:
        UsageError: another running process is this rank.
        DeviceError: the directory cannot be written.
        SnapshotError: the checkpointer that works on the directory is of another release.
    """

    def __init__(self, folder: Path, rank: int, budget_bytes: int | None, ranks_here: int = 1) -> None:
        self.folder, self.rank = folder, rank
        self._directory = HandoffDir(folder)
        self._budget = Budget(self._directory, budget_bytes, ranks_here)
        self._cut: Cut | None = None
        self._last: CutName | None = None
        """The newest cut that was handed over."""
        self._restored: SnapshotName | None = None
        self._directory.sidecar_lock.check_version("the checkpointer")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = self._directory.rank_lock(rank).hold(f"rank {rank}")
            self._directory.discard_unfinished(rank)
            self._directory.closed(rank).remove()
            self._directory.awaited(rank).remove()
        except OSError as error:
            raise_device(error, folder, 0)

    def ready(self) -> bool:
        """Return whether a cut can be reserved now: not while an earlier one of this rank is copied or waits.

        Raises:
            DivergedError: an earlier one of this attempt could never be stored, and so none that holds its rows.
            InvalidSpecError: another run owns the store now.
        """
        self._note_cut()
        if self._last is not None:
            self._check_storable(self._last.attempt)
        return self._cut is None and all(name.rank != self.rank for name in self._directory.ready_cuts())

    @property
    def share(self) -> int | None:
        """Return this rank's share of the budget in bytes; None: there is no budget."""
        return None if self._budget.size is None else self._budget.size // self._budget.ranks

    def touch(self) -> None:
        """Allocate this rank's share of the budget, so that the first cut takes no longer than later ones."""
        self._budget.touch(self.rank)

    def restored(self, name: SnapshotName | None) -> None:
        """Record which snapshot of the job's own store the state was restored from; None: none."""
        self._restored = name

    def begin(self, attempt: int) -> SnapshotName | None:
        """Choose the parent of the next cut. Retention keeps it until that cut is committed or withdrawn.

        Only rank 0 calls it, and all ranks take its answer. ``reserve`` follows, with a ``CutMeta`` that names it.

        Returns:
            The newest snapshot of the attempt that the sidecar committed, else the one that was restored from. None:
            there is neither, or the sidecar could not read it: the cut must hold every row that was ever updated.

        Raises:
            DeviceError: the directory cannot be written.
        """
        # The sidecar lists parents with the directory locked, after it has recorded a commit.
        with self._directory.lock():
            newest = self._directory.committed.read()
            parent = newest if newest is not None and newest.attempt == attempt else self._restored
            if parent == self.broken_parent():
                return None
            if parent is not None:
                self._directory.parent(self.rank).write(parent)
        return parent

    def broken_parent(self) -> SnapshotName | None:
        """Return the snapshot that the sidecar could not read as a parent, because it is gone or damaged."""
        return self._directory.broken_parent.read()

    def reserve(
        self, meta: CutMeta, dense: Mapping[str, NDArray[Any]] | None, *, owned: Sequence[ShardId], size: CutSize
    ) -> Cut:
        """Take space for a cut, or for a segment of it, and copy its dense state. No call of the cut waits.

        ``dense`` are parameters and optimizer state (float32 or int64) on global rank 0, None elsewhere; ``owned`` all
        shards that the rank stores, also those without a row in the cut, over all ranks each row and column once;
        ``size`` bounds the rows that it will hold.

        Raises:
            TemporaryError: an earlier cut is copied or waits (``ready`` is False).
            DeviceError: the device is full, or the budget cannot hold one row or the dense state.
            DivergedError, InvalidSpecError: see ``ready``.
        """
        if not self.ready():
            raise TemporaryError(f"rank {self.rank}: an earlier cut still waits for the checkpointer")
        cut = Cut(self._budget, CutName(meta.step, meta.attempt, self.rank), meta, owned)
        cut.reserve(size, dense)
        self._cut = cut
        return cut

    def hand_over(
        self,
        meta: CutMeta,
        rows: Iterable[CutRowSource],
        dense: Mapping[str, NDArray[Any]] | None,
        *,
        owned: Sequence[ShardId],
        timeout_s: float,
        gone: Iterable[GoneRows] = (),
    ) -> HandedOver:
        """Reserve a cut, copy rows that do not change meanwhile, and wait until it is ready; see ``reserve``.

        The rows are those of this rank that changed since the cut's parent, in any number of pieces, and ``gone`` the
        keys that left unique tables. A cut that does not fit the budget is withdrawn after ``timeout_s``.

        Raises:
            CutWithdrawnError: the sidecar did not free space in time.
            TemporaryError, DeviceError, DivergedError, ValueError: see ``Cut``.
        """
        every: list[CutRowSource | GoneRows] = [*rows, *gone]
        sources = [each for each in every if len(each.row_ids)]
        start = 0
        size = CutSize(row_bytes=sum(map(_bytes_of, sources)), pieces=len(sources))
        cut, deadline = self.reserve(meta, dense, owned=owned, size=size), time.monotonic() + timeout_s
        while True:
            while sources and not cut.is_waiting():
                source = sources[0]
                start += cut.copy_gone(source, start) if isinstance(source, GoneRows) else cut.copy(source, start)
                if start == len(source.row_ids):
                    sources.pop(0)
                    start = 0
                elif not cut.next_segment():
                    break
            handed = None if sources else cut.finish()
            if handed is not None:
                return handed
            if time.monotonic() > deadline:
                raise cut.withdrawn(
                    f"the checkpointer did not free space for the rest within {timeout_s:g} s: see why its store is "
                    "slow or silent, or raise spec.checkpoint.handoffBudget"
                )
            time.sleep(POLL_S)

    def _note_cut(self) -> None:
        if self._cut is not None and self._cut.is_over:
            if self._cut.state is CutState.READY:
                self._last = self._cut.name
            self._cut = None

    def _check_storable(self, attempt: int) -> None:
        """Raise if the sidecar knows that no cut of this attempt will be stored any more."""
        refused = self._directory.refused.read()
        if refused is not None and refused.attempt == attempt:
            done = self._directory.committed.read()
            if done is None or done.recency < refused.recency:
                raise DivergedError(refused.problem)
        newer = (self._directory.superseded.read() or {"attempt": 0})["attempt"]
        if newer > attempt:
            raise InvalidSpecError(
                "spec.checkpoint.uri",
                f"another run, attempt {newer} there, owns the snapshots of attempt {attempt} now: end one of the two, "
                "or set another URI for one",
            )

    def committed_step(self) -> int | None:
        """Return the step of the newest committed snapshot; None until the sidecar has recorded one."""
        newest = self._directory.committed.read()
        return newest.step if newest else None

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until this rank's last cut is committed; return whether it is. True without a cut.

        Raises:
            DivergedError: the cut can never be stored, because it holds a value that is not finite.
            InvalidSpecError: another run owns the store now.
        """
        self._note_cut()
        deadline = time.monotonic() + timeout_s
        while self._last is not None:
            done = self._directory.committed.read()
            if done and done.recency >= self._last.snapshot.recency:
                break
            if self._directory.awaited(self.rank).read() != self._last.snapshot:
                self._directory.awaited(self.rank).write(self._last.snapshot)
            self._check_storable(self._last.attempt)
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        self._directory.awaited(self.rank).remove()
        return self.ready()

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Record why the rank ends, and unlock the directory. Repeating it does nothing.

        ``failed``: it or another rank failed, so that a cut of this rank may have no counterpart elsewhere.
        """
        if self._lock is None:
            return
        # The free lock says the same, without the reason.
        with contextlib.suppress(DeviceError):
            note = {"reason": reason, "failed": failed, "time": time.time()}
            self._directory.closed(self.rank).write(note)
        os.close(self._lock)
        self._lock = None


def _bytes_of(source: CutRowSource | GoneRows) -> int:
    """Return the bytes that rows, or keys that are gone, take in the hand-off directory."""
    count = len(source.row_ids)
    if isinstance(source, GoneRows):
        return count * KEY_BYTES
    return count * CutRows(shard=source.shard, count=count, state_values=source.state_values).row_bytes
