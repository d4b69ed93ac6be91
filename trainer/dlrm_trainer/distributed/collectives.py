"""Run collectives over all ranks, by gloo on the host and NCCL on GPUs, and count them.

A lost peer is an error that names it. Small values travel as JSON of a stated type: what comes from a peer is checked,
and nothing of it is executed.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from dlrm_api.errors import PeerLostError, TemporaryError, first_problem
from dlrm_api.wire import Codec
from dlrm_trainer.compute_device import GPU_FAILURES
from dlrm_trainer.distributed.codecs import message_bytes, read_message, write_message
from dlrm_trainer.distributed.two_levels import TwoLevels
from dlrm_trainer.spans import add_span

T = TypeVar("T")
MAX_GATHERED_BYTES = 16 << 20
"""Limit of one rank's value: every rank holds those of all at once."""
MAX_BROADCAST_BYTES = 1 << 30
"""Limit of rank 0's value, such as a list of data files."""


def encode_value(value: T, kind: TypeAdapter[T]) -> bytes:
    """Encode a value as JSON that keeps non-finite numbers and file names that are not UTF-8."""
    return json.dumps(kind.dump_python(value, mode="json"), separators=(",", ":")).encode()


def decode_value(body: bytes, kind: TypeAdapter[T], rank: int) -> T:
    """Decode what ``encode_value`` returned on another rank.

    Raises:
        TemporaryError: it is not of that type; names the rank and the problem.
    """
    try:
        return kind.validate_python(json.loads(body))
    except ValidationError as error:
        raise _unreadable(rank, first_problem(error)) from error
    except (ValueError, RecursionError) as error:
        raise _unreadable(rank, f"invalid JSON: {error}") from error


def check_size(size: int, limit: int, rank: int) -> None:
    """Refuse a length before memory is allocated for it.

    Raises:
        TemporaryError: no value has that length.
    """
    if not 0 < size <= limit:
        raise _unreadable(rank, f"expected 1 to {limit} bytes, got {size}")


def _unreadable(rank: int, problem: str) -> TemporaryError:
    return TemporaryError(
        f"invalid value from rank {rank}: {problem}; run one version of the trainer on all ranks, and let no other "
        "process reach their ports"
    )


Traffic = Literal["lengths", "ids", "weights", "pooled", "gradients", "dense", "small"]
"""Kinds of traffic: lengths, ids and weights of bags; pooled rows and their gradients; the dense gradient; the rest."""
REDUCED_WIDTH = 64
"""Values of the dense gradient that share a range in int8."""


class Arriving:
    """Wait for the result of a collective, or hold it where nothing is sent."""

    def __init__(self, result: Tensor | Callable[[], Tensor]) -> None:
        self._result = result
        self._after: list[Callable[[Tensor], Tensor]] = []

    def then(self, finish: Callable[[Tensor], Tensor]) -> Arriving:
        """Apply ``finish`` to the result when it is waited for."""
        self._after.append(finish)
        return self

    def wait(self) -> Tensor:
        """Return the values that arrived, rank by rank."""
        result = self._result if isinstance(self._result, Tensor) else self._result()
        for finish in self._after:
            result = finish(result)
        self._result, self._after = result, []
        return result


class DeviceWaits:
    """Measure for how long a GPU waits for collectives while the host goes on."""

    def __init__(self) -> None:
        self._open = deque[tuple[float, Any, Any]]()
        """When each was asked for, and the events before and after it, of collectives that the GPU may wait for."""
        self.seconds = 0.0
        """Of those that are over."""

    @contextlib.contextmanager
    def timed(self, device: torch.device) -> Iterator[None]:
        """Measure what the device's stream waits for in a block; on the host nothing is measured."""
        if device.type != "cuda":
            yield
            return
        self._device = device
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before.record()
        yield
        after.record()
        self._open.append((time.monotonic(), before, after))
        while self._open and self._open[0][2].query():
            _, begin, end = self._open.popleft()
            self.seconds += begin.elapsed_time(end) / 1e3

    def oldest_s(self) -> float:
        """Return for how long the oldest that is not over was asked for; 0 if all are. From any thread."""
        try:
            since, _, after = self._open[0]
        except IndexError:
            return 0.0
        with torch.cuda.device(self._device):
            return 0.0 if after.query() else time.monotonic() - since


class Collectives:
    """Run the collectives of training. At world size 1 nothing is sent and no process group is needed.

    Every rank must make the same calls in the same order; only one thread may make them. Each call, and each wait for
    the result of one, raises PeerLostError if a rank is lost, in the words of ``explain``.
    """

    def __init__(self, rank: int, world_size: int, explain: Callable[[], str]) -> None:
        self.rank, self.world_size = rank, world_size
        self._explain = explain
        self._group: Any = None
        self._levels: TwoLevels | None = None
        self.calls: Counter[str] = Counter()
        """Collectives made so far, by kind."""
        self.bytes_sent: Counter[str] = Counter()
        """Bytes that this rank sent to others, by ``Traffic``."""
        self.seconds = 0.0
        """Time that the host spent in them, most of it waiting for other ranks."""
        self.device_waits = DeviceWaits()
        self.verdict: Callable[[], str] = lambda: ""
        """Return which ranks are lost, in the words of ``explain``; empty while none is known to be."""

    def use(self, group: Any, levels: TwoLevels | None = None) -> None:
        """Run in this process group from now on; other threads have their own.

        With ``levels`` messages on the host go through them, in a thread, and the group runs no more than rings.
        """
        self._group, self._levels = group, levels
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlrm-exchange")

    def check(self) -> None:
        """Raise PeerLostError if a rank is lost, while the host waits for a GPU."""
        if verdict := self.verdict():
            raise PeerLostError(verdict)

    def connect(self) -> None:
        """Connect with the ranks that messages of the host go to: gloo connects at the first one."""
        ones = [1] * self.world_size
        self.all_to_all("small", torch.zeros(self.world_size, dtype=torch.uint8), ones, ones)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a few numbers over ranks, in place; the result has the same bits on every rank."""
        if self.world_size > 1:
            self._start_sum("small", tensor).wait()

    def start_sum(self, tensor: Tensor, codec: Codec = "fp32") -> Arriving:
        """Begin to sum (k,) float32 over ranks, in place; the result has the same bits on every rank.

        The tensor must not be used until the result is waited for. Sums of other formats than fp32 are made in float32,
        in the order of ranks.
        """
        if self.world_size == 1:
            return Arriving(tensor)
        if codec != "fp32":
            return self._start_encoded(tensor, codec)
        return self._start_sum("dense", tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather (k,) of each rank as (W, k) on all of them."""
        return tensor.unsqueeze(0) if self.world_size == 1 else torch.stack(self._gathered("small", tensor))

    def all_to_all(self, what: Traffic, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``sent[s]`` elements of a flat tensor to each rank s; return ``received[s]`` from each."""
        return self.start_all_to_all(what, tensor, sent, received).wait()

    def start_all_to_all(self, what: Traffic, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        """Begin ``all_to_all``; the tensor must not change until the result is waited for."""
        if self.world_size == 1:
            return Arriving(tensor)
        self.bytes_sent[what] += (sum(sent) - sent[self.rank]) * tensor.element_size()
        if self._levels is not None and tensor.device.type == "cpu":
            with self._counted("all_to_all"):
                passing = self._thread.submit(self._levels.all_to_all, tensor, sent, received)
            return Arriving(self._watching("all_to_all", passing.result))
        output = tensor.new_empty(sum(received))
        with self._counted("all_to_all"):
            work = dist.all_to_all_single(
                output, tensor.contiguous(), list(received), list(sent), group=self._group, async_op=True
            )
        return Arriving(self._waiting("all_to_all", work, output))

    def gather(self, value: T, kind: TypeAdapter[T]) -> list[T]:
        """Return one small value of each rank; for starts, ends and evaluations, not for steps.

        Raises:
            TemporaryError: a rank's value is of another type or too long.
        """
        if self.world_size == 1:
            return [value]
        body = _bytes_tensor(encode_value(value, kind))
        sizes = self.all_gather(torch.tensor([len(body)])).flatten().tolist()
        for rank, size in enumerate(sizes):
            check_size(size, MAX_GATHERED_BYTES, rank)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(body)] = body
        rows = zip(self.all_gather(padded), sizes, strict=True)
        return [decode_value(bytes(row[:size].numpy()), kind, rank) for rank, (row, size) in enumerate(rows)]

    def broadcast(self, value: T | None, kind: TypeAdapter[T]) -> T:
        """Return rank 0's value on every rank; the others pass None.

        Raises:
            TemporaryError: the value is of another type or too long.
        """
        if self.rank == 0:
            assert value is not None
            if self.world_size > 1:
                body = _bytes_tensor(encode_value(value, kind))
                self._broadcast(torch.tensor([len(body)]))
                check_size(len(body), MAX_BROADCAST_BYTES, 0)
                self._broadcast(body)
            return value
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        check_size(int(size), MAX_BROADCAST_BYTES, 0)
        body = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(body)
        return decode_value(bytes(body.numpy()), kind, 0)

    def scatter(self, values: Sequence[T] | None, kind: TypeAdapter[T]) -> T:
        """Return the value that rank 0 has for this rank, of as many as there are ranks; the others pass None.

        Raises:
            TemporaryError: the value is of another type or too long.
        """
        sizes, body = torch.zeros(self.world_size, dtype=torch.int64), torch.empty(0, dtype=torch.uint8)
        if self.rank == 0:
            assert values is not None
            if self.world_size == 1:
                return values[0]
            bodies = [encode_value(value, kind) for value in values]
            sizes[:], body = torch.tensor([len(each) for each in bodies]), _bytes_tensor(b"".join(bodies))
        self._broadcast(sizes)
        size = int(sizes[self.rank])
        check_size(size, MAX_BROADCAST_BYTES, 0)
        sent = sizes.tolist() if self.rank == 0 else [0] * self.world_size
        came = self.all_to_all("small", body, sent, [size] + [0] * (self.world_size - 1))
        return decode_value(bytes(came.numpy()), kind, 0)

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_reduce(torch.zeros(1))

    @contextlib.contextmanager
    def _watched(self, kind: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
            end = time.monotonic()
            self.seconds += end - start
            add_span(kind, start, end)
        # A failure of this rank's own GPU shows at whatever it does next.
        except GPU_FAILURES:
            raise
        except RuntimeError as error:
            problem = str(error).strip().splitlines()[0]
            raise PeerLostError(f"{self._explain()} ({kind}: {problem})") from error

    def _waiting(self, kind: str, work: Any, output: Tensor) -> Callable[[], Tensor]:
        def wait() -> Tensor:
            # On a GPU its stream waits, and the host goes on.
            with self.device_waits.timed(output.device):
                work.wait()
            return output

        return self._watching(kind, wait)

    def _watching(self, kind: str, wait: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def watch() -> Tensor:
            with self._watched(kind):
                return wait()

        return watch

    def _gathered(self, what: Traffic, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self.bytes_sent[what] += tensor.nbytes * (self.world_size - 1)
        with self._counted("all_gather"):
            dist.all_gather(gathered, tensor, group=self._group)
        return gathered

    def _broadcast(self, tensor: Tensor) -> None:
        if self.rank == 0:
            self.bytes_sent["small"] += tensor.nbytes * (self.world_size - 1)
        with self._counted("broadcast"):
            if self._levels is None:
                dist.broadcast(tensor, src=0, group=self._group)
            else:
                self._thread.submit(self._levels.broadcast, tensor).result()

    @contextlib.contextmanager
    def _counted(self, kind: str) -> Iterator[None]:
        self.calls[kind] += 1
        with self._watched(kind):
            yield

    def _start_sum(self, what: Traffic, tensor: Tensor) -> Arriving:
        self.bytes_sent[what] += 2 * tensor.nbytes * (self.world_size - 1) // self.world_size
        with self._counted("all_reduce"):
            work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return Arriving(self._waiting("all_reduce", work, tensor))

    def _start_encoded(self, tensor: Tensor, codec: Codec) -> Arriving:
        """Let each rank sum one slice in the order of ranks, and send the sum to all."""
        ranks = self.world_size
        rows = -(-tensor.numel() // (ranks * REDUCED_WIDTH))
        padded = tensor.new_zeros(ranks, rows, REDUCED_WIDTH)
        padded.view(-1)[: tensor.numel()] = tensor
        shape = (rows, REDUCED_WIDTH)
        size = message_bytes(codec, [shape])
        message = torch.empty(ranks, size, dtype=torch.uint8, device=tensor.device)
        for part, out in zip(padded, message, strict=True):
            write_message(codec, [part], out)
        arriving = self.start_all_to_all("dense", message.view(-1), [size] * ranks, [size] * ranks)

        def finish(came: Tensor) -> Tensor:
            total = tensor.new_zeros(rows, REDUCED_WIDTH)
            for part in torch.split(came, size):
                total += read_message(codec, part, [shape])[0]
            summed = torch.empty(size, dtype=torch.uint8, device=tensor.device)
            write_message(codec, [total], summed)
            whole = torch.cat([read_message(codec, part, [shape])[0] for part in self._gathered("dense", summed)])
            return tensor.copy_(whole.view(-1)[: tensor.numel()])

        return arriving.then(finish)


def _bytes_tensor(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)
