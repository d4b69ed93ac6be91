"""The trainer's side of the hand-off folder: copy a cut into shared memory, flip it READY, train on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dlrm_api.errors import DeviceError, DivergedError, InvalidSpecError, TemporaryError
from dlrm_api.process import raise_device
from dlrm_checkpointer.handoff.budget import Budget
from dlrm_checkpointer.handoff.cut import CutAbandonedError, GradualCut, HandedOver, SlicedCut, WholeCut, withdrawn
from dlrm_checkpointer.handoff.protocol import (
    BROKEN_FILE,
    COMMITTED_FILE,
    POLL_S,
    REFUSED_FILE,
    SUPERSEDED_FILE,
    CutName,
    budget_lock,
    check_version,
    closed_path,
    discard_unfinished,
    lock_if_free,
    lock_path,
    parent_path,
    read_json,
    ready_cuts,
    sidecar_lock_path,
    take_lock,
    write_json,
)
from dlrm_checkpointer.types import CutMeta, CutSize, RowsInPlace, ShardId, SnapshotName

__all__ = ["CutAbandonedError", "GradualCut", "HandOffWriter", "HandedOver", "WholeCut", "has_lost_its_sidecar"]


def has_lost_its_sidecar(folder: Path) -> bool:
    """Whether a sidecar once worked on the folder and none does now."""
    path = sidecar_lock_path(folder)
    if not path.exists():
        return False
    with lock_if_free(path) as free:
        return free


class HandOffWriter:
    """One rank's way to hand cuts to the pod's sidecar.

    Holds the rank's file lock for its life: the sidecar takes all locks free as the end of the trainers,
    however they died.

    Args:
        folder: the pod's hand-off folder, made if absent; shared memory in production.
        rank: global rank.
        budget_bytes: most bytes that the folder may take, cuts of all the pod's ranks together; None: whatever the
            device holds. A cut above it is handed over in slices.
        ranks_here: ranks of the pod.

    Raises:
        UsageError: another live process is this rank.
        DeviceError: the folder can't be written.
        SnapshotError: the checkpointer that works on the folder is of another release.
    """

    def __init__(self, folder: Path, rank: int, budget_bytes: int | None, ranks_here: int = 1) -> None:
        self.folder, self.rank = folder, rank
        self._budget = Budget(folder, budget_bytes, ranks_here)
        self._last: CutName | None = None
        self._restored: SnapshotName | None = None
        self._under_way: GradualCut | WholeCut | None = None
        check_version(sidecar_lock_path(folder), "the checkpointer")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock: int | None = take_lock(lock_path(folder, rank), f"rank {rank}")
            discard_unfinished(folder, rank)
            closed_path(folder, rank).unlink(missing_ok=True)
        except OSError as error:
            raise_device(error, folder, 0)

    def ready(self) -> bool:
        """Whether a cut can be handed over now: False while an earlier one of this rank waits or is not whole yet.

        Raises:
            DivergedError: an earlier one of this attempt could never be stored, and so none that holds its rows.
            InvalidSpecError: another run has taken the store over.
        """
        if self._last is not None:
            self._check_hopes(self._last.attempt)
        return self._under_way is None and all(name.rank != self.rank for name in ready_cuts(self.folder))

    @property
    def share(self) -> int | None:
        """Bytes of the budget that are this rank's, however much the pod's others want; None: there is no budget."""
        return None if self._budget.size is None else self._budget.size // self._budget.ranks

    def touch(self) -> None:
        """Have the device allocate this rank's share of the budget, lest the first cut takes longer than later ones."""
        self._budget.touch(self.rank)

    def restored(self, name: SnapshotName | None) -> None:
        """Say which snapshot of the job's own store the state was restored from; None: none."""
        self._restored = name

    def begin(self, attempt: int) -> SnapshotName | None:
        """The parent of a cut that is about to be made; retention keeps it until that cut is committed or given up.

        For rank 0, whose answer all ranks take: ``put`` follows, of a cut whose ``CutMeta`` names it.

        Args:
            attempt: the store's number of this attempt.

        Returns:
            The newest snapshot of the attempt that the sidecar committed, else the one that was restored from; None:
            neither is there, or the sidecar could not read it, so the cut must hold every row that was ever updated.

        Raises:
            DeviceError: the folder can't be written.
        """
        with budget_lock(self.folder):  # the sidecar looks for parents under it, after it has told of a commit
            newest = self._committed()
            parent = newest if newest is not None and newest.attempt == attempt else self._restored
            if parent == self.broken_parent():
                return None
            if parent is not None:
                write_json(parent_path(self.folder, self.rank), asdict(parent))
        return parent

    def broken_parent(self) -> SnapshotName | None:
        """The snapshot that the pod's sidecar could not store a cut over, because it is gone or damaged."""
        return SnapshotName.from_json(read_json(self.folder / BROKEN_FILE))

    def put(
        self,
        meta: CutMeta,
        shards: Iterable[RowsInPlace],
        dense: Mapping[str, NDArray[Any]] | None,
        *,
        owned: Sequence[ShardId],
        patience_s: float,
    ) -> HandedOver:
        """Hand over this rank's part of a cut; it is whole from the rename that ends this call, absent before.

        A cut that passes the budget goes slice by slice: this call then waits for the sidecar again and again, while
        the rows must stay as they are. Nothing is left of it where this raises.

        Args:
            meta: the same on all ranks.
            shards: this rank's rows that changed since the cut's parent, in any number of pieces, which are copied one
                by one straight into the folder's memory: a generator of rows that are still in place takes no other.
            dense: dense parameters and optimizer state (float32 or int64) on global rank 0, None elsewhere.
            owned: all that the rank stores, also what has no row in the cut; over all ranks each row and column once.
            patience_s: seconds from now after which a cut that doesn't fit is given up; one that fits never waits.

        Raises:
            TemporaryError: an earlier cut still waits (``ready`` is False).
            CutAbandonedError: the sidecar did not make room in time; training can go on and try the next cut.
            DeviceError: the device is full, or the budget can't hold a single row or the dense state.
            DivergedError: the cut can never be stored, because it holds a value that is not finite.
            ValueError: a piece is not of ``meta``'s tables, or its arrays don't belong together.
        """
        cut = self._new(meta, owned, patience_s)
        with withdrawn(cut, self.folder):
            cut.start()
            for place in shards:
                cut.add_rows(place)
            if dense is not None:
                cut.add_dense(dense)
            given = cut.finish()
        self._last = CutName(meta.step, meta.attempt, self.rank)
        return given

    def start_if_room(
        self, meta: CutMeta, dense: Mapping[str, NDArray[Any]] | None, *, owned: Sequence[ShardId], size: CutSize
    ) -> WholeCut | None:
        """Begin to hand over a cut that fits the budget now; None: it does not, and nothing was done.

        Room for all of it is taken before any of it is copied, so nothing that others take meanwhile stops it.
        ``ready`` is False until it ended.

        Args:
            meta: see ``put``.
            dense: see there; copied here.
            owned: see there.
            size: of all rows that it will hold.
        """
        cut = self._new(meta, owned, patience_s=0)
        with withdrawn(cut, self.folder):
            cut.start()
            if not cut.reserve(size, dense):
                cut.leave()
                return None
            if dense is not None:
                cut.add_dense(dense)
        self._under_way = whole = WholeCut(cut, self.folder, self._ended)
        return whole

    def start_gradual(
        self, meta: CutMeta, dense: Mapping[str, NDArray[Any]] | None, *, owned: Sequence[ShardId]
    ) -> GradualCut:
        """Begin to hand over a cut above the budget while its rows go on changing; ``ready`` is False until it ended.

        Args:
            meta: see ``put``.
            dense: see there; copied here.
            owned: see there.
        """
        cut = self._new(meta, owned, patience_s=0)
        with withdrawn(cut, self.folder):
            cut.start()
        self._under_way = gradual = GradualCut(cut, dense, self.folder, self._ended)
        return gradual

    def _ended(self, name: CutName | None) -> None:
        self._under_way = None
        self._last = name or self._last

    def _new(self, meta: CutMeta, owned: Sequence[ShardId], patience_s: float) -> SlicedCut:
        if not self.ready():
            raise TemporaryError(f"rank {self.rank}: an earlier cut still waits for the checkpointer")
        name = CutName(meta.step, meta.attempt, self.rank)
        return SlicedCut(self.folder, name, meta, owned, self._budget, patience_s)

    def _check_hopes(self, attempt: int) -> None:
        """Raise where the sidecar knows that no cut of this attempt will be stored any more."""
        refused = read_json(self.folder / REFUSED_FILE)  # seldom there, and asked for at each step
        if refused is not None and refused["attempt"] == attempt:
            done = self._committed()
            if done is None or done.recency < SnapshotName(refused["step"], attempt).recency:
                raise DivergedError(refused["problem"])
        newer = read_json(self.folder / SUPERSEDED_FILE)
        if newer is not None and newer["attempt"] > attempt:
            raise InvalidSpecError(
                "spec.checkpoint.uri",
                f"another run, attempt {newer['attempt']} there, has taken the snapshots over from attempt {attempt}: "
                "end one of the two, or give one another URI",
            )

    def committed_step(self) -> int | None:
        """Step of the newest committed snapshot that the sidecar knows of; None before it said so."""
        newest = self._committed()
        return None if newest is None else newest.step

    def _committed(self) -> SnapshotName | None:
        return SnapshotName.from_json(read_json(self.folder / COMMITTED_FILE))

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until this rank's last cut is committed; False where it isn't by then. True where nothing waits.

        Raises:
            DivergedError: the cut can never be stored, because it holds a value that is not finite.
            InvalidSpecError: another run has taken the store over.
        """
        deadline = time.monotonic() + timeout_s
        while self._last is not None:
            done = self._committed()
            if done and done.recency >= self._last.snapshot.recency:
                break
            self._check_hopes(self._last.attempt)
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return self.ready()

    def close(self, reason: str, *, failed: bool = False) -> None:
        """Say why the rank ends, and let go of its lock. Repeating it does nothing.

        Args:
            reason: for people.
            failed: whether it or another rank failed, so that a cut of this rank may have no counterpart elsewhere.
        """
        if self._lock is None:
            return
        with contextlib.suppress(DeviceError):  # the free lock says the same, without the reason
            write_json(closed_path(self.folder, self.rank), {"reason": reason, "failed": failed, "time": time.time()})
        os.close(self._lock)
        self._lock = None
