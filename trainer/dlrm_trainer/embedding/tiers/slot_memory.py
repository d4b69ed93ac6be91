"""The slots' own memory, where kernels compute: rows and row state go in and come out as records."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_kernels.pages import gather_records, scatter_records
from dlrm_trainer.embedding.tiers.level import Records

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
