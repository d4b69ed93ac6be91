"""Read and write a scratch file directly at queue depth, through Linux's kernel AIO.

io_uring is faster, but Kubernetes' default seccomp profile blocks it, and many clusters refuse pods with another
profile. Kernel AIO is asynchronous only for direct I/O, which is all that is needed. ctypes releases the GIL during
system calls; Python runs once per batch of requests, never per request.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import DeviceError

REQUEST = np.dtype(
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<u4"),
        ("opcode", "<u2"),
        ("priority", "<i2"),
        ("fd", "<u4"),
        ("buffer", "<u8"),
        ("bytes", "<u8"),
        ("offset", "<i8"),
        ("reserved", "<u8"),
        ("flags", "<u4"),
        ("eventfd", "<u4"),
    ]
)
"""``struct iocb`` of linux/aio_abi.h."""
EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("result2", "<i8")])
"""``struct io_event``."""
Arrived = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Numbers of pieces, and their buffers."""
_READ, _WRITE = 0, 1
_SETUP, _DESTROY, _SUBMIT, _GETEVENTS = range(4)
_NUMBERS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}
_SUBMIT_TIMEOUT_S = 30.0
"""How long to retry while the kernel has no memory for one more request."""
_LIMIT = Path("/proc/sys/fs/aio-max-nr")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _call(name: int, *arguments: int) -> int:
    """Make a system call; repeat it if a signal interrupts it."""
    number = _NUMBERS[platform.machine()][name]
    while True:
        result = int(_libc.syscall(*(ctypes.c_long(argument) for argument in (number, *arguments))))
        if result >= 0:
            return result
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Queue:
    """Hold at most ``depth`` running requests.

    Raises:
        DeviceError: the kernel provides no such queue; says what to change.
    """

    def __init__(self, depth: int) -> None:
        self.depth, self.in_flight = depth, 0
        if platform.machine() not in _NUMBERS:
            raise DeviceError(f"block storage for rows needs an x86_64 or aarch64 host, not {platform.machine()}")
        handle = ctypes.c_ulong(0)
        try:
            _call(_SETUP, depth, ctypes.addressof(handle))
        except OSError as error:
            raise _no_queue(depth, error) from error
        self._handle = handle.value
        self._events = np.zeros(depth, EVENT)

    def submit(self, addresses: NDArray[np.uint64]) -> None:
        """Start the requests at these addresses of ``REQUEST`` structures.

        Raises:
            OSError: one is invalid, or the kernel has no memory; those before it are running.
        """
        sent, deadline = 0, time.monotonic() + _SUBMIT_TIMEOUT_S
        while sent < len(addresses):
            rest = np.ascontiguousarray(addresses[sent:])
            try:
                accepted = _call(_SUBMIT, self._handle, len(rest), rest.ctypes.data)
            except OSError as error:
                if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
                continue
            sent += accepted
            self.in_flight += accepted

    def finished(self, at_least: int) -> NDArray[np.void]:
        """Wait for some requests, at most those running; return new ``EVENT``s, valid until the next call."""
        wanted = min(at_least, self.in_flight)
        count = _call(_GETEVENTS, self._handle, wanted, self.depth, self._events.ctypes.data, 0)
        self.in_flight -= count
        return self._events[:count]

    def drain(self) -> None:
        """Wait for all requests and drop their results: their buffers are free then."""
        while self.in_flight:
            self.finished(self.in_flight)

    def close(self) -> None:
        """Wait for all requests and release the queue."""
        _call(_DESTROY, self._handle)


def _no_queue(depth: int, error: OSError) -> DeviceError:
    if error.errno == errno.EAGAIN:
        limit = f"{int(_LIMIT.read_text()):,}" if _LIMIT.exists() else "unknown"
        return DeviceError(
            f"the host has fewer than {depth:,} asynchronous requests left: fs.aio-max-nr is {limit} for all "
            "processes; raise it, for example by `sysctl -w fs.aio-max-nr=1048576` on the node"
        )
    return DeviceError(
        f"cannot create a queue of {depth:,} asynchronous requests (io_setup): {error.strerror}; rows on block "
        "storage need Linux with CONFIG_AIO and a seccomp profile that allows io_setup, as the default ones do"
    )


def page_aligned(count: int, words: int) -> NDArray[np.uint32]:
    """Return (count, words) uint32 zeros that start at a page, as direct I/O needs, untouched until used."""
    memory = mmap.mmap(-1, count * words * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint32).reshape(count, words)


class _Transfers:
    """Transfer pieces of one size between a file and buffers: buffer n belongs to request n."""

    def __init__(self, file: ScratchFile, depth: int, size: int, opcode: int) -> None:
        self.buffers = page_aligned(depth, size // 4)
        self.queue = Queue(depth)
        self._file, self._size = file, size
        self._requests = np.zeros(depth, REQUEST)
        self._requests["opcode"], self._requests["fd"], self._requests["bytes"] = opcode, file.fd, size
        self._requests["data"] = np.arange(depth)
        self._requests["buffer"] = np.uint64(self.buffers.ctypes.data) + np.arange(depth, dtype=np.uint64) * size
        first, each = np.uint64(self._requests.ctypes.data), np.uint64(REQUEST.itemsize)
        self._addresses = first + np.arange(depth, dtype=np.uint64) * each

    def close(self) -> None:
        """Wait for running requests and release the queue."""
        self.queue.close()

    def _start(self, numbers: NDArray[np.int64], offsets: NDArray[np.int64], verb: str) -> None:
        self._requests["offset"][numbers] = offsets
        try:
            self.queue.submit(self._addresses[numbers])
        except OSError as error:
            raise self._file.failure(verb, self._size, int(offsets[0]), str(error.strerror)) from error

    def _complete(self, number: int, result: int, verb: str) -> None:
        """Transfer what a request left: the kernel may do less than it was asked.

        Raises:
            DeviceError: the request failed, or the file ends.
        """
        offset = int(self._requests["offset"][number])
        if result < 0:
            raise self._file.failure(verb, self._size, offset, os.strerror(-result))
        transfer = self._file.read if verb == "read" else self._file.write
        transfer(memoryview(self.buffers[number]).cast("B")[result:], offset + result)


class DirectReader(_Transfers):
    """Read pieces of ``size`` bytes into ``depth`` buffers, which are reused."""

    def __init__(self, file: ScratchFile, depth: int, size: int) -> None:
        super().__init__(file, depth, size, _READ)
        self._piece_of = np.zeros(depth, np.int64)

    def pieces(self, offsets: NDArray[np.int64]) -> Generator[Arrived, None, None]:
        """Read pieces at offsets (bytes) and yield indices of ``offsets`` and of ``buffers`` as they arrive.

        Buffers are valid until the next iteration. Close the iterator before you call this method again.

        Raises:
            DeviceError: a piece could not be read completely; names the path, offset and bytes.
        """
        count, depth = len(offsets), self.queue.depth
        sent = min(depth, count)
        done, free = 0, np.arange(sent)
        try:
            self._read(free, np.arange(sent), offsets)
            while done < count:
                events = self.queue.finished(max(1, depth // 4))
                free = events["data"].astype(np.int64)
                results = events["result"]
                for n in np.flatnonzero(results != self._size).tolist():
                    self._complete(int(free[n]), int(results[n]), "read")
                done += len(free)
                yield self._piece_of[free], free
                free = free[: count - sent]
                if len(free):
                    self._read(free, np.arange(sent, sent + len(free)), offsets)
                    sent += len(free)
        finally:
            self.queue.drain()

    def _read(self, buffers: NDArray[np.int64], pieces: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        self._piece_of[buffers] = pieces
        self._start(buffers, offsets[pieces], "read")


class EarlyReader(_Transfers):
    """Read pieces of ``size`` bytes before they are needed, each into its own buffer.

    The caller gives each piece a number that it never uses for other bytes.
    """

    def __init__(self, file: ScratchFile, depth: int, size: int) -> None:
        super().__init__(file, depth, size, _READ)
        self._idle = list(range(depth))
        self._buffer_of: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        """Results by buffer."""

    def expect(self, pieces: Sequence[tuple[int, int]]) -> int:
        """Start to read pieces, no more than there are buffers, drop others; return the number of new reads.

        Each piece has a number and an offset (bytes). The first is read in any case, others while buffers are idle.

        Raises:
            DeviceError: the kernel refused at once.
        """
        assert len(pieces) <= self.queue.depth, f"{len(pieces)} pieces in {self.queue.depth} buffers"
        for piece in self._buffer_of.keys() - {piece for piece, _ in pieces}:
            self.give_back(piece)
        begun = 0
        for place, (piece, offset) in enumerate(pieces):
            if piece in self._buffer_of:
                continue
            self._reap(0)
            while not self._idle and place == 0:
                self._reap(1)
            if not self._idle:
                break
            self._start(np.array(self._idle[-1:]), np.array([offset]), "read")
            self._buffer_of[piece] = self._idle.pop()
            begun += 1
        return begun

    def take(self, piece: int) -> NDArray[np.uint32]:
        """Wait for an expected piece and return its buffer, valid until ``give_back``.

        Raises:
            DeviceError: it could not be read completely; names the path, offset and bytes. It is given back.
        """
        buffer = self._buffer_of[piece]
        while buffer not in self._ended:
            self._reap(1)
        result, self._ended[buffer] = self._ended[buffer], self._size
        try:
            self._complete(buffer, result, "read")
        except DeviceError:
            self.give_back(piece)
            raise
        image: NDArray[np.uint32] = self.buffers[buffer]
        return image

    def give_back(self, piece: int) -> None:
        """Release an expected piece, whether it was taken or not."""
        buffer = self._buffer_of.pop(piece)
        if self._ended.pop(buffer, None) is not None:
            self._idle.append(buffer)

    def _reap(self, at_least: int) -> None:
        wanted = set(self._buffer_of.values())
        for event in self.queue.finished(at_least):
            buffer = int(event["data"])
            if buffer in wanted:
                self._ended[buffer] = int(event["result"])
            else:
                self._idle.append(buffer)


class DirectWriter(_Transfers):
    """Write buffers of ``size`` bytes in the background; one that could not be written keeps its bytes."""

    def __init__(self, file: ScratchFile, depth: int, size: int) -> None:
        super().__init__(file, depth, size, _WRITE)
        self.failure: DeviceError | None = None
        """Why a buffer could not be written; write nothing more then."""

    def write(self, buffer: int, offset: int) -> None:
        """Start to write one of ``buffers`` to an offset (bytes).

        Raises:
            DeviceError: the kernel refused at once.
        """
        try:
            self._start(np.array([buffer]), np.array([offset]), "write")
        except DeviceError as error:
            self.failure = error
            raise

    def written(self, at_least: int) -> list[int]:
        """Wait for some buffers, at most those running; return those written. ``failure`` reports the others."""
        good = []
        for event in self.queue.finished(at_least):
            number = int(event["data"])
            try:
                self._complete(number, int(event["result"]), "write")
                good.append(number)
            except DeviceError as error:
                self.failure = error
        return good


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
STEP_BYTES = 64 << 20
"""Growth of a file at a time, while the device has space."""


class ScratchFile:
    """Hold a file that is created exclusively and unlinked at once, so it never outlives this process.

    It lies in an existing directory on the device; ``direct`` reads and writes bypass the page cache.

    Raises:
        DeviceError: the directory is absent or not writable, or its file system has no direct I/O.
    """

    def __init__(self, folder: Path, direct: bool) -> None:
        self.path = folder / f"rows-{os.getpid()}-{secrets.token_hex(8)}"
        """Its path at creation, for messages."""
        self.allocated = 0
        """Bytes from its start that have blocks on the device."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        try:
            self.fd = os.open(self.path, flags, 0o600)
        except OSError as error:
            problem = f"{self.path}: cannot create a file for rows: {error.strerror}"
            if direct and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                problem = (
                    f"{folder}: the file system has no direct I/O (O_DIRECT), without which the page cache would use "
                    "memory outside the plan; mount ext4 or XFS on block storage there"
                )
            raise DeviceError(problem) from error
        finally:
            # Some kernels leave the file behind when they refuse O_DIRECT.
            self.path.unlink(missing_ok=True)

    def resize(self, size: int) -> None:
        """Set the length of the file without allocating blocks.

        Raises:
            OSError: the file system allows no file of that length.
        """
        os.ftruncate(self.fd, size)

    def ensure(self, wanted: int, step: int, limit: int) -> None:
        """Allocate the first ``wanted`` bytes, in steps ahead while the device has space, at most ``limit``.

        Raises:
            DeviceError: it is full; the content of the file is unchanged.
        """
        if wanted <= self.allocated:
            return
        ahead = min(limit, -(-wanted // step) * step)
        try:
            os.posix_fallocate(self.fd, self.allocated, ahead - self.allocated)
            self.allocated = ahead
        except OSError as error:
            if error.errno in _FULL and wanted < ahead:
                self.ensure(wanted, 1, wanted)
                return
            raise DeviceError(
                f"{self.path}: cannot allocate {wanted - self.allocated:,} bytes for rows after {self.allocated:,}: "
                f"{error.strerror}; free space on {self.path.parent}, or give this tier less in the plan"
            ) from error

    @property
    def bytes_kept(self) -> int:
        """Return the bytes that the device has allocated."""
        return os.fstat(self.fd).st_blocks * 512

    def read(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes from an offset; a DeviceError names path, offset and bytes not read."""
        self._transfer("read", os.preadv, buffer, offset)

    def write(self, buffer: memoryview, offset: int) -> None:
        """Write a buffer of bytes to an offset; fails as ``read`` does."""
        self._transfer("write", os.pwritev, buffer, offset)

    def _transfer(
        self, verb: str, move: Callable[[int, list[memoryview], int], int], buffer: memoryview, offset: int
    ) -> None:
        # The kernel may do less than it was asked.
        while buffer:
            try:
                done = move(self.fd, [buffer], offset)
            except OSError as error:
                raise self.failure(verb, len(buffer), offset, str(error.strerror)) from error
            if done == 0:
                raise self.failure(verb, len(buffer), offset, "the file ends before them")
            buffer, offset = buffer[done:], offset + done

    def failure(self, verb: str, count: int, offset: int, reason: str) -> DeviceError:
        """Return the error of a failed transfer; ``verb`` is read or write."""
        return DeviceError(f"{self.path}: cannot {verb} {count:,} bytes at {offset:,}: {reason}")

    def close(self) -> None:
        """Release the file."""
        os.close(self.fd)
