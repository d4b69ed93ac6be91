"""Hold the slots that kernels compute on; define records and the interface of levels below."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import DeviceError
from dlrm_api.tiers import RowDtype, Tier
from dlrm_kernels.pages import gather_records, scatter_records

Rows = NDArray[np.int64]
"""(N,) rows, numbered over all tables of the stack."""
Places = NDArray[np.int64]
"""(N,) places of a level, each in [0, places)."""
Records = NDArray[np.uint32]
"""(N, W) records: a row, its optimizer state and its access count, as 32-bit words."""
Moved = Callable[[Rows, Places], None]
"""Called by a level that moved records itself: with the rows, and their new places."""

Finish = Callable[[], None]
"""Wait for the end of a copy; call it once. It raises DeviceError as the call that started the copy does."""


def finished() -> None:
    """Return at once: the copy was complete when it started."""


class Level(Protocol):
    """Keep records of W words, for one thread at a time; no array of places names a place twice."""

    @property
    def tier(self) -> Tier:
        """Return the tier of its memory."""

    @property
    def places(self) -> int:
        """Return the number of records that it may hold."""

    @property
    def used(self) -> int:
        """Return the number of records that it holds."""

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """Return the bytes allocated now, by tier: blocks of files, touched memory, and its own tables."""

    def write(self, rows: Rows, records: Records) -> Places:
        """Store records of rows that it does not hold, at places of its choice; the caller makes them fit.

        Raises:
            DeviceError: names the path and the bytes that could not be written.
        """

    def read(self, places: Places, out: Records) -> Finish:
        """Start to copy the records of some places out; they stay there.

        Finish one copy before you start the next. Until then any place may be freed and others written, but neither
        array may change.

        Raises:
            DeviceError: names the path and the bytes that could not be read.
        """

    def free(self, places: Places) -> None:
        """Free places; their records are lost."""

    def coldest(self, count: int) -> tuple[Rows, Places]:
        """Return at most ``count`` rows that arrived first, oldest first, and their places."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True, kw_only=True)
class RecordFormat:
    """Describe records of W words: a row of ``dim`` columns, S values of state, and the access count."""

    dim: int
    dtype: RowDtype
    """Type of the row; the state is always float32."""
    words: int
    """W, words of a record."""

    @property
    def kept_words(self) -> int:
        """Return the words of a row and its state, without the access count."""
        return self.words - 1

    @property
    def state_values(self) -> int:
        """Return S, the values of a row's state."""
        return self.kept_words - self._row_words

    @property
    def _row_words(self) -> int:
        return self.dim if self.dtype == "fp32" else self.dim // 2

    def values(self, records: Records) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return the rows (N, dim) and states (N, S) of records, both float32, which holds fp16 rows exactly."""
        row = np.ascontiguousarray(records[:, : self._row_words])
        weights = row.view(np.float32 if self.dtype == "fp32" else np.float16).astype(np.float32, copy=False)
        return weights, np.ascontiguousarray(records[:, self._row_words : self.kept_words]).view(np.float32)

    def records(self, weights: NDArray[np.float32], state: NDArray[np.float32]) -> Records:
        """Return records of rows (N, dim) and states (N, S); access counts start at 0."""
        out = np.empty((len(weights), self.words), np.uint32)
        self.begin(weights, out)
        out[:, self._row_words : self.kept_words] = np.ascontiguousarray(state).view(np.uint32)
        return out

    def begin(self, weights: NDArray[np.float32], out: Records) -> None:
        """Fill ``out`` with records of rows (N, dim) that were never updated: state and count are 0."""
        values = weights if self.dtype == "fp32" else weights.astype(np.float16)
        out[:, : self._row_words] = np.ascontiguousarray(values).view(np.uint32)
        out[:, self._row_words :] = 0


Scalar = TypeVar("Scalar", bound=np.generic)
Answer = TypeVar("Answer")
Slots = NDArray[np.int64]
Mark: TypeAlias = object | None
"""What a stream returns for a place in its work: an event of CUDA; None where nothing is to be waited for."""


class SlotMemory(Protocol):
    """Hold rows and states of slots. The last word of a record, the access count, is kept elsewhere.

    One thread at a time copies. Kernels may be asked for by another.
    """

    words: int
    """W, words of a record."""

    def gather(self, slots: Slots, out: Records) -> Finish:
        """Start to copy rows and states of some slots out.

        Finish copies in their order, and start no third one before the first is finished. Until it is, its slots may
        not change.
        """

    def scatter(self, slots: Slots, records: Records) -> None:
        """Start to copy records into some slots; ``records`` may change at once. Later copies see the new content."""

    def mark(self) -> Mark:
        """Mark what kernels have been asked to do so far. For the thread that asks them."""

    def follow(self, mark: Mark) -> None:
        """Delay all later copies until the kernels have reached a mark."""

    def copied(self) -> Mark:
        """Mark the copies that were started so far. For the thread that starts them."""

    def precede(self, mark: Mark) -> None:
        """Delay what kernels are asked from now on until the copies have reached a mark. For the thread that asks."""


class HostSlots:
    """Hold slots in host memory: (S, dim) weights, fp32 or fp16, and (S, n) fp32 states, both contiguous."""

    def __init__(self, weight: Tensor, state: Tensor) -> None:
        self.weight = weight.numpy().view(np.uint32)
        """(S, words) rows."""
        self.state = state.numpy().view(np.uint32)
        """(S, n) states."""
        self.words = record_words(weight, state)

    def gather(self, slots: Slots, out: Records) -> Finish:
        """See ``SlotMemory``."""
        return partial(gather_records, self.weight, self.state, slots, out)

    def scatter(self, slots: Slots, records: Records) -> None:
        """See ``SlotMemory``."""
        scatter_records(self.weight, self.state, slots, records)

    def mark(self) -> Mark:
        """Do nothing: kernels and copies on the host have ended when they return."""

    def follow(self, mark: Mark) -> None:
        """See ``SlotMemory``."""

    def copied(self) -> Mark:
        """See ``mark``."""

    def precede(self, mark: Mark) -> None:
        """See ``SlotMemory``."""


class CopyStream(Protocol):
    """Run work on a device in the order in which it was started, beside the host and beside kernels."""

    def start(self, work: Callable[[], None]) -> Mark:
        """Start work, and return the mark of its end."""

    def wait(self, mark: Mark) -> None:
        """Let the host wait until a mark is reached."""

    def kernels(self) -> Mark:
        """See ``SlotMemory.mark``."""

    def follow(self, mark: Mark) -> None:
        """See ``SlotMemory``."""

    def precede(self, mark: Mark) -> None:
        """See ``SlotMemory``."""


class CudaStream:
    """Run work on a stream of a GPU, beside the one that the device's kernels run on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # Zeroing of the slots may still be queued.
        self._stream.wait_stream(torch.cuda.current_stream(device))

    def start(self, work: Callable[[], None]) -> Mark:
        """Work on the stream, and leave the calling thread on its device.

        A thread is on device 0 at first, and torch returns there from a stream of another device by a call that takes
        some hundred MiB of device 0 for this process; from the device itself it returns without that.
        """
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()
            return self._mark(self._stream)

    def wait(self, mark: Mark) -> None:
        """See ``CopyStream``."""
        if isinstance(mark, torch.cuda.Event):
            with torch.cuda.device(self._device):
                mark.synchronize()

    def kernels(self) -> Mark:
        """See ``CopyStream``."""
        return self._mark(torch.cuda.current_stream(self._device))

    def follow(self, mark: Mark) -> None:
        """See ``CopyStream``."""
        if isinstance(mark, torch.cuda.Event):
            self._stream.wait_event(mark)

    def precede(self, mark: Mark) -> None:
        """See ``CopyStream``."""
        if isinstance(mark, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(mark)

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(stream)
        return mark


class HostStream:
    """Run work at once, for a device whose work ends before the host goes on."""

    def start(self, work: Callable[[], None]) -> Mark:
        """See ``CopyStream``."""
        work()
        return None

    def wait(self, mark: Mark) -> None:
        """See ``CopyStream``."""

    def kernels(self) -> Mark:
        """See ``CopyStream``."""

    def follow(self, mark: Mark) -> None:
        """See ``CopyStream``."""

    def precede(self, mark: Mark) -> None:
        """See ``CopyStream``."""


def copy_stream(device: torch.device) -> CopyStream:
    """Return a stream for copies to a device and from it."""
    return CudaStream(device) if device.type == "cuda" else HostStream()


class _Buffer:
    """Hold pinned memory for the records of one copy."""

    def __init__(self, limit: int, columns: int, *, pinned: bool) -> None:
        self.records = torch.empty(limit, columns, dtype=torch.int32, pin_memory=pinned)
        """Rows and states side by side. Copied whole: the device copies a part of its rows only through a detour."""
        self.slots = torch.empty(limit, dtype=torch.int64, pin_memory=pinned)
        self.end: Mark = None
        """Of the last copy: the memory may be used again after it."""


class DeviceSlots:
    """Hold slots in a GPU's memory; records move through pinned buffers on a separate stream.

    Two buffers in each direction take turns: the host fills or empties one while the other one's copy runs, and waits
    only for the copy before the last. At most ``limit`` records move per call.
    """

    def __init__(self, weight: Tensor, state: Tensor, limit: int) -> None:
        self._weight, self._state = weight.view(torch.int32), state.view(torch.int32)
        self._row_words = self._weight.shape[1]
        self.words = record_words(weight, state)
        self.device = weight.device
        self._stream = copy_stream(self.device)
        pinned = self.device.type == "cuda"
        out, into = ([_Buffer(limit, self.words - 1, pinned=pinned) for _ in range(2)] for _ in range(2))
        self._out, self._into = cycle(out), cycle(into)
        self._last: Mark = None
        self.pinned_bytes = sum(each.records.nbytes + each.slots.nbytes for each in (*out, *into))
        """Bytes of all buffers."""

    def gather(self, slots: Slots, out: Records) -> Finish:
        """See ``SlotMemory``."""
        buffer, count = next(self._out), len(slots)
        buffer.slots[:count] = torch.from_numpy(slots)

        def copy() -> None:
            on_device = buffer.slots[:count].to(self.device, non_blocking=True)
            found = torch.cat((self._weight[on_device], self._state[on_device]), dim=1)
            buffer.records[:count].copy_(found, non_blocking=True)

        buffer.end = self._last = self._stream.start(copy)

        def finish() -> None:
            self._stream.wait(buffer.end)
            # torch copies with all of the host's threads.
            torch.from_numpy(out.view(np.int32))[:, :-1] = buffer.records[:count]

        return finish

    def scatter(self, slots: Slots, records: Records) -> None:
        """See ``SlotMemory``."""
        buffer, count, words = next(self._into), len(slots), self._row_words
        self._stream.wait(buffer.end)
        buffer.records[:count] = torch.from_numpy(records.view(np.int32)[:, :-1])
        buffer.slots[:count] = torch.from_numpy(slots)

        def copy() -> None:
            on_device = buffer.slots[:count].to(self.device, non_blocking=True)
            found = buffer.records[:count].to(self.device, non_blocking=True)
            self._weight[on_device] = found[:, :words]
            self._state[on_device] = found[:, words:]

        buffer.end = self._last = self._stream.start(copy)

    def start(self, work: Callable[[], None]) -> None:
        """Start other work on the device, between the copies before and after it."""
        self._last = self._stream.start(work)

    def run(self, work: Callable[[], Answer]) -> Answer:
        """Start other work as ``start`` does, and wait for its answer."""
        answers: list[Answer] = []
        self.start(lambda: answers.append(work()))
        self._stream.wait(self._last)
        (answer,) = answers
        return answer

    def mark(self) -> Mark:
        """See ``SlotMemory``."""
        return self._stream.kernels()

    def follow(self, mark: Mark) -> None:
        """See ``SlotMemory``."""
        self._stream.follow(mark)

    def copied(self) -> Mark:
        """See ``SlotMemory``."""
        return self._last

    def precede(self, mark: Mark) -> None:
        """See ``SlotMemory``."""
        self._stream.precede(mark)


def record_words(weight: Tensor, state: Tensor) -> int:
    """Return the words of a record: a row, its state and its access count."""
    return (weight.shape[1] * weight.itemsize + state.shape[1] * state.itemsize) // 4 + 1


MAP_NORESERVE = 0x4000
"""As on x86_64 and aarch64; the ``mmap`` module has had it since Python 3.13."""


def untouched_zeros(count: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return (count,) page-aligned zeros that neither use nor commit memory until they are written.

    numpy's zeros count as committed: a host may have less memory than the slots that only a rare batch fills.

    Raises:
        DeviceError: no address space is left.
    """
    return np.frombuffer(map_anonymous(max(1, count * np.dtype(dtype).itemsize)), dtype, count)


def map_anonymous(size: int) -> mmap.mmap:
    """Map private memory that takes no page, and no commitment of one, until it is written.

    Raises:
        DeviceError: the process cannot map as much.
    """
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError as error:
        raise DeviceError(f"cannot map {size:,} bytes of memory for rows: {error.strerror}") from error
    # Rows are far apart: huge pages save TLB misses. Some kernels have none.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
