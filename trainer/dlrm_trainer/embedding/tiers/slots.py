"""Hold the first level, where kernels compute, on host or GPU; and define records, and what a level below must do."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import DeviceError
from dlrm_api.tiers import RowDtype, Tier
from dlrm_kernels.pages import gather_records, scatter_records

Rows = NDArray[np.int64]
"""(N,) rows, numbered over all tables that share the level."""
Places = NDArray[np.int64]
"""(N,) places of a level, each in [0, places)."""
Records = NDArray[np.uint32]
"""(N, W) records: a row, its optimizer state and its access count, as 32-bit words."""
Moved = Callable[[Rows, Places], None]
"""Told by a level that moves records on its own account: the rows, and the places where they are now."""

Finish = Callable[[], None]
"""Waits until all of a copy is there; to be called once. Raises DeviceError as what began it."""


def finished() -> None:
    """Of a copy that was all there when it began."""


class Level(Protocol):
    """Keeps records of W words. One thread at a time uses it; every array of places has no place twice."""

    @property
    def tier(self) -> Tier:
        """The memory that it lies in."""

    @property
    def places(self) -> int:
        """Records that it may hold."""

    @property
    def used(self) -> int:
        """Records that it holds."""

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """Bytes really taken now, by tier: allocated blocks of files, touched memory, tables kept beside."""

    def write(self, rows: Rows, records: Records) -> Places:
        """Keep records of rows that it doesn't hold, in places of its choice; the caller has seen to it that they fit.

        Raises:
            DeviceError: names the path and the bytes that could not be written.
        """

    def read(self, places: Places, out: Records) -> Finish:
        """Begin to copy the records of some places out; they stay where they are.

        Until the copy is finished, which it must be before the next one begins, places may be freed, those of these
        records too, and others written; neither array may change.

        Raises:
            DeviceError: names the path and the bytes that could not be read.
        """

    def free(self, places: Places) -> None:
        """Give places back; their records are gone."""

    def coldest(self, count: int) -> tuple[Rows, Places]:
        """Which of its rows have been there longest, at most ``count`` of them, longest first."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """How a class of tables keeps a row of ``dim`` columns and S values of state in W = ``words`` words."""

    dim: int
    dtype: RowDtype
    """Of a row; its state is always float32."""
    words: int
    """Of a record; the last one is the access count."""

    @property
    def kept_words(self) -> int:
        """Words of a row and its state, without its access count."""
        return self.words - 1

    @property
    def state_values(self) -> int:
        """S, values of a row's state."""
        return self.kept_words - self._row_words

    @property
    def _row_words(self) -> int:
        return self.dim if self.dtype == "fp32" else self.dim // 2

    def values(self, records: Records) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Rows (N, dim) and row state (N, S) of records, both float32; fp16 rows are exact in it."""
        row = np.ascontiguousarray(records[:, : self._row_words])
        weights = row.view(np.float32 if self.dtype == "fp32" else np.float16).astype(np.float32, copy=False)
        return weights, np.ascontiguousarray(records[:, self._row_words : self.kept_words]).view(np.float32)

    def records(self, weights: NDArray[np.float32], state: NDArray[np.float32]) -> Records:
        """Records of rows (N, dim) and their state (N, S); the other way round. Access counts start anew."""
        out = np.empty((len(weights), self.words), np.uint32)
        self.begin(weights, out)
        out[:, self._row_words : self.kept_words] = np.ascontiguousarray(state).view(np.uint32)
        return out

    def begin(self, weights: NDArray[np.float32], out: Records) -> None:
        """Fill ``out`` with the records of rows (N, dim) that were never updated: their state and count are zero."""
        values = weights if self.dtype == "fp32" else weights.astype(np.float16)
        out[:, : self._row_words] = np.ascontiguousarray(values).view(np.uint32)
        out[:, self._row_words :] = 0


Slots = NDArray[np.int64]
Mark: TypeAlias = torch.cuda.Event | None


class SlotMemory(Protocol):
    """Rows and row state of slots. A record's last word is the row's access count, which is kept elsewhere."""

    words: int
    """Words of a record."""

    def gather(self, slots: Slots, out: Records) -> None:
        """Copy rows and state of some slots out."""

    def scatter(self, slots: Slots, records: Records) -> None:
        """Copy records into some slots."""

    def mark(self) -> Mark:
        """A moment in what kernels have been asked to do so far. For the thread that asks them."""

    def follow(self, mark: Mark) -> None:
        """Copy nothing from now on before the kernels have come to a mark."""


class HostSlots:
    """Slots in host memory.

    Args:
        weight: (S, dim) fp32 or fp16, contiguous.
        state: (S, n) fp32, contiguous.
    """

    def __init__(self, weight: Tensor, state: Tensor) -> None:
        self.weight = weight.numpy().view(np.uint32)
        """(S, words) of the rows."""
        self.state = state.numpy().view(np.uint32)
        """(S, n) of their states."""
        self.words = record_words(weight, state)

    def gather(self, slots: Slots, out: Records) -> None:
        """See ``SlotMemory``."""
        gather_records(self.weight, self.state, slots, out)

    def scatter(self, slots: Slots, records: Records) -> None:
        """See ``SlotMemory``."""
        scatter_records(self.weight, self.state, slots, records)

    def mark(self) -> Mark:
        """See ``SlotMemory``: kernels on the host have ended when they return."""

    def follow(self, mark: Mark) -> None:
        """See ``SlotMemory``."""


class DeviceSlots:
    """Slots in a GPU's memory: records travel through pinned buffers on a stream of their own.

    Args:
        weight: (S, dim) fp32 or fp16, contiguous, on the device.
        state: (S, n) fp32, likewise.
        most: records that one call moves at most.
    """

    def __init__(self, weight: Tensor, state: Tensor, most: int) -> None:
        self._weight, self._state = weight.view(torch.int32), state.view(torch.int32)
        self._row_words = self._weight.shape[1]
        self.words = record_words(weight, state)
        self._device = weight.device
        self._stream = (
            torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            if self._device.type == "cuda"
            else None
        )
        if self._stream is not None:  # the slots may still have to be zeroed
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pinned = self._stream is not None
        self._buffer = torch.empty(most, self.words - 1, dtype=torch.int32, pin_memory=pinned)
        """Rows and states side by side: whole, since the device copies no part of a row of it without a detour."""
        self._slots = torch.empty(most, dtype=torch.int64, pin_memory=pinned)

    def gather(self, slots: Slots, out: Records) -> None:
        """See ``SlotMemory``."""
        count = len(slots)
        with self._on_stream():
            on_device = self._send_slots(slots)
            found = torch.cat((self._weight[on_device], self._state[on_device]), dim=1)
            self._buffer[:count].copy_(found, non_blocking=True)
        self._wait()
        out[:, :-1] = self._buffer[:count].numpy().view(np.uint32)

    def scatter(self, slots: Slots, records: Records) -> None:
        """See ``SlotMemory``."""
        count, words = len(slots), self._row_words
        self._buffer[:count] = torch.from_numpy(records.view(np.int32)[:, :-1])
        with self._on_stream():
            on_device = self._send_slots(slots)
            found = self._buffer[:count].to(self._device, non_blocking=True)
            self._weight[on_device] = found[:, :words]
            self._state[on_device] = found[:, words:]
        self._wait()

    def mark(self) -> Mark:
        """See ``SlotMemory``."""
        if self._stream is None:
            return None
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(torch.cuda.current_stream(self._device))
        return mark

    def follow(self, mark: Mark) -> None:
        """See ``SlotMemory``."""
        if self._stream is not None and mark is not None:
            self._stream.wait_event(mark)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Work on the stream, and leave the calling thread on the device that it was on.

        A thread is on device 0 until it says otherwise, and torch goes back there from a stream of another device by a
        call that takes some hundred MiB of device 0 for this process; from the device itself it goes back without.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _send_slots(self, slots: Slots) -> Tensor:
        self._slots[: len(slots)] = torch.from_numpy(slots)
        return self._slots[: len(slots)].to(self._device, non_blocking=True)


def record_words(weight: Tensor, state: Tensor) -> int:
    """Words of a record: of a row, its state and its access count."""
    return (weight.shape[1] * weight.itemsize + state.shape[1] * state.itemsize) // 4 + 1


def slot_memory(weight: Tensor, state: Tensor, most: int) -> SlotMemory:
    """The slots' memory where it lies."""
    return HostSlots(weight, state) if weight.device.type == "cpu" else DeviceSlots(weight, state, most)


MAP_NORESERVE = 0x4000
"""As on x86_64 and aarch64; the ``mmap`` module has had it since Python 3.13."""


def untouched_zeros(count: int) -> NDArray[np.int64]:
    """Return (count,) int64 zeros that take no memory until they are written."""
    return np.frombuffer(map_anonymous(count * 8), np.int64)


def map_anonymous(size: int) -> mmap.mmap:
    """Map private memory that takes no page, and no commitment of one, until it is written.

    Raises:
        DeviceError: the process cannot map as much.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        raise DeviceError(f"cannot map {size:,} bytes of memory for rows: {error.strerror}") from error
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # rows are far apart: fewer misses of the processor's page table
    return memory
