"""Run the state machine of one rank's cut: one path for every size, in one segment or in many.

            reserve()                copy()...                finish()
 (none) ─────────────▶ RESERVED ─────────────▶ COPYING ─────────────▶ READY ──(sidecar)──▶ uploaded ▶ committed
                           │                      │
                           └────── withdraw() ────┴─────────────────▶ WITHDRAWN  (nothing is left of it)

A cut that fits the budget has one segment. A larger one has segments of half the rank's share: a rank that has filled
one hands it to the sidecar and fills the next, and no call waits. A rank without space holds only segments that the
sidecar can free, so ranks never wait for each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DivergedError, TemporaryError
from dlrm_api.process import raise_device
from dlrm_checkpointer.handoff.budget import ENTRY_BYTES, Budget, CutBuffer, dense_bytes, head_bytes, index_head
from dlrm_checkpointer.handoff.protocol import CutName, SegmentName
from dlrm_checkpointer.types import (
    CutMeta,
    CutRows,
    CutRowSource,
    CutSize,
    GoneRows,
    ShardId,
    ShardRows,
    check_gone,
    check_rows,
    copy_rows,
)


class CutState(Enum):
    """Name the states of a cut on the trainer's side."""

    RESERVED = "reserved"
    COPYING = "copying"
    READY = "ready"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, kw_only=True)
class HandedOver:
    """Measure a cut that is ready."""

    nbytes: int
    """Bytes of its arrays."""
    segments: int
    """1 if it fitted the budget."""


class CutWithdrawnError(TemporaryError):
    """Report a cut that was withdrawn; nothing of it is left, and its rows are in the next cut."""


class Cut:
    """Hand over one rank's part of a cut. If a transition raises, the cut is WITHDRAWN. Not thread-safe.

    ``owned`` are all shards that the rank stores; the cut holds those of their rows that changed.
    """

    def __init__(self, budget: Budget, name: CutName, meta: CutMeta, owned: Sequence[ShardId]) -> None:
        self.name, self.state = name, CutState.RESERVED
        self._budget, self._directory = budget, budget.directory
        self._tables, self._owned = {table.name: table for table in meta.tables}, frozenset(owned)
        self._head, self._put = index_head(meta, name.rank, owned), time.monotonic_ns()
        self._buffer: CutBuffer | None = None
        self._dense: Mapping[str, NDArray[Any]] | None = None
        self._stored: SegmentName | None = None
        """The segment that was handed over last."""
        self._segments = self._bytes = 0
        self._left = 0
        """Bytes that the rest of the cut takes, at most."""
        self.is_whole = False
        """Whether all of the cut fits its first segment."""

    def reserve(self, size: CutSize, dense: Mapping[str, NDArray[Any]] | None) -> None:
        """Enter RESERVED: take space for all of the cut, or for one segment of it, and copy the dense state.

        Raises:
            DeviceError: the device is full, or the budget cannot hold one row or the dense state.
        """
        with self._entering(CutState.RESERVED):
            self._left = head_bytes(self._head) + size.row_bytes + size.pieces * ENTRY_BYTES + dense_bytes(dense or {})
            self._buffer = self._budget.reserve(self._left, self.name.rank, self._head)
            self.is_whole = self._buffer is not None
            if self._buffer is None:
                if dense is not None:
                    self._dense = {name: array.copy() for name, array in dense.items()}
                self._begin_segment()
            elif dense is not None:
                added = self._add_dense(self._buffer, dense)
                assert added, "the cut's size counts the dense state"

    def copy(self, source: CutRowSource, start: int = 0) -> int:
        """Enter COPYING: copy rows from ``start`` on; return how many there was space for.

        Raises:
            ValueError: they are not of the cut's tables, or the rank does not store them.
        """
        with self._entering(CutState.COPYING):
            self._check_owned(source.shard)
            check_rows(source, self._tables[source.shard.table])
            return copy_rows(source, start, self.lay)

    def lay(self, wanted: CutRows) -> ShardRows | None:
        """Enter COPYING: take memory for as many of some rows as there is space for; None: for no row.

        The caller fills it in before it calls ``next_segment`` or ``finish``.

        Raises:
            ValueError: the rank does not store them.
        """
        with self._entering(CutState.COPYING):
            self._check_owned(wanted.shard)
            laid = None if self._buffer is None else self._buffer.lay(wanted)
            if laid is not None:
                self._bytes += laid.nbytes
            return laid

    def copy_gone(self, gone: GoneRows, start: int = 0) -> int:
        """Enter COPYING: copy keys that are gone from ``start`` on; return how many there was space for.

        No key of them is a row of the cut. They count as ``KEY_BYTES`` each in the size of the cut, and as one piece.

        Raises:
            ValueError: they are not of a unique table of the cut, or the rank does not store them.
        """
        with self._entering(CutState.COPYING):
            self._check_owned(gone.shard)
            check_gone(gone, self._tables[gone.shard.table])
            left = gone.row_ids[start:]
            if self._buffer is None or not len(left):
                return 0
            laid = self._buffer.lay_gone(gone.shard, len(left))
            laid[:] = left[: len(laid)]
            self._bytes += laid.nbytes
            return len(laid)

    def next_segment(self) -> bool:
        """Hand what is copied to the sidecar and reserve more; False: the sidecar must free space first.

        Raises:
            DeviceError: the device is full, or the budget cannot hold one row.
            DivergedError: the cut can never be stored, because it holds a value that is not finite.
        """
        with self._entering(CutState.COPYING):
            if self._buffer is not None and not self._buffer.is_empty:
                if self.is_waiting():
                    return False
                name = self.name
                self._stored = SegmentName(name.step, name.attempt, name.rank, self._segments, self._put)
                self._left -= self._buffer.end
                self._buffer.hand_over(self._stored, self._segments)
                self._buffer, self._segments = None, self._segments + 1
            return self._begin_segment()

    def is_waiting(self) -> bool:
        """Return whether the sidecar still has the previous segment; raises as ``next_segment`` does."""
        with self._entering(self.state):
            pending = self._stored is not None and self._directory.has(self._stored)
            # In this order: the sidecar refuses a cut before it frees the segment.
            self._check_refused()
            return pending

    def finish(self) -> HandedOver | None:
        """Enter READY, once all rows are copied; None: there is no space yet for the last segment.

        Raises:
            CutWithdrawnError: the sidecar dropped its segments, because a newer attempt has started.
            DeviceError: the device is full, or the budget cannot hold the dense state.
            DivergedError: the cut can never be stored.
        """
        with self._entering(CutState.COPYING):
            if self.is_waiting() or (self._buffer is None and not self._begin_segment()):
                return None
            assert self._buffer is not None
            if self._dense is not None:
                if not self._add_dense(self._buffer, self._dense):
                    self.next_segment()
                    return None
                self._dense = None
            if self._segments and not self._directory.has_durable(self.name.rank, self._put):
                raise self.withdrawn("the checkpointer dropped its segments, because a newer attempt has started")
            self._buffer.hand_over(self.name, self._segments)
            self._buffer = None
        self.state = CutState.READY
        return HandedOver(nbytes=self._bytes, segments=self._segments + 1)

    def withdraw(self) -> None:
        """Enter WITHDRAWN, unless the cut is READY. Retention removes what the sidecar has stored of it."""
        if not self.is_over:
            self.state = CutState.WITHDRAWN
            self._buffer = None
            # What cannot be removed now is removed when the rank starts again.
            with contextlib.suppress(OSError):
                self._directory.discard_unfinished(self.name.rank)

    @property
    def is_over(self) -> bool:
        """Return whether the cut is READY or WITHDRAWN."""
        return self.state in (CutState.READY, CutState.WITHDRAWN)

    @property
    def memory(self) -> NDArray[np.float32]:
        """Return the memory of the current segment, of which all that ``lay`` returns is a part."""
        assert self._buffer is not None
        return self._buffer.memory

    def withdrawn(self, why: str) -> CutWithdrawnError:
        """Withdraw the cut and return the error that says why."""
        self.withdraw()
        return CutWithdrawnError(
            f"rank {self.name.rank}: the cut at step {self.name.step} was withdrawn after {self._segments} segments "
            f"and {self._bytes} bytes: {why}"
        )

    @contextlib.contextmanager
    def _entering(self, state: CutState) -> Iterator[None]:
        """Enter a state at the end of the block; withdraw the cut if it raises."""
        if self.is_over:
            raise CutWithdrawnError(f"rank {self.name.rank}: the cut at step {self.name.step} is {self.state.value}")
        try:
            yield
        except BaseException as error:
            size = self._left if self._buffer is None else self._buffer.end
            self.withdraw()
            if isinstance(error, OSError):
                raise_device(error, self._directory.path, size)
            raise
        self.state = state

    def _check_owned(self, shard: ShardId) -> None:
        if shard not in self._owned:
            raise ValueError(f"{shard}: rank {self.name.rank} does not store this shard")

    def _begin_segment(self) -> bool:
        """Take a buffer for any row or the dense state, unless there is one; return whether there is."""
        self._check_refused()
        if self._buffer is None:
            least = head_bytes(self._head) + max(ENTRY_BYTES + self._widest_row_bytes, dense_bytes(self._dense or {}))
            self._buffer = self._budget.reserve_segment(max(self._left, least), least, self.name.rank, self._head)
        return self._buffer is not None

    @cached_property
    def _widest_row_bytes(self) -> int:
        places = [(each, self._tables[each.table].state_of(each.column_start, each.column_end)) for each in self._owned]
        rows = (CutRows(shard=shard, count=1, state_values=len(state)) for shard, state in places)
        return max((each.row_bytes for each in rows), default=0)

    def _add_dense(self, buffer: CutBuffer, arrays: Mapping[str, NDArray[Any]]) -> bool:
        """Copy the dense state into a segment; return whether there was space for it."""
        added = buffer.add_dense(arrays)
        if added:
            self._bytes += sum(array.nbytes for array in arrays.values())
        return added

    def _check_refused(self) -> None:
        refused = self._directory.refused.read()
        if refused is not None and refused.recency == self.name.snapshot.recency:
            raise DivergedError(refused.problem)
