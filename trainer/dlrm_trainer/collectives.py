"""Collectives over all ranks: gloo on CPU, counted, with a lost peer turned into an error that names it."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_api.errors import PeerLostError

T = TypeVar("T")


class Collectives:
    """The collectives that training needs. At world size 1 nothing is sent and no process group is needed.

    Every rank must make the same calls in the same order.

    Args:
        rank: of this process.
        world_size: number of ranks.
        explain: after a failed collective, says which peers are gone, in words.
    """

    def __init__(self, rank: int, world_size: int, explain: Callable[[], str]) -> None:
        self.rank, self.world_size = rank, world_size
        self._explain = explain
        self.calls: Counter[str] = Counter()
        """Collectives made so far, by kind."""
        self.bytes_sent: Counter[str] = Counter()
        """Bytes that this rank offered to them."""
        self.seconds = 0.0
        """Time spent in them, most of it waiting for other ranks."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place; the result has the same bits on every rank."""
        if self.world_size > 1:
            with self._counted("all_reduce", tensor):
                dist.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """(k,) on each rank to (W, k) on all of them."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self._counted("all_gather", tensor):
            dist.all_gather(gathered, tensor)
        return torch.stack(gathered)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``sent[s]`` elements of a flat tensor to each rank s; return what came, ``received[s]`` from each."""
        if self.world_size == 1:
            return tensor
        output = tensor.new_empty(sum(received))
        with self._counted("all_to_all", tensor):
            dist.all_to_all_single(output, tensor.contiguous(), list(received), list(sent))
        return output

    def gather(self, value: T) -> list[T]:
        """One small picklable value of each rank, on every rank; for starts, ends and evaluations, not for steps."""
        if self.world_size == 1:
            return [value]
        body = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor([len(body)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(body)] = body
        rows = self.all_gather(padded)
        return [pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes, strict=True)]  # noqa: S301

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value, on every rank."""
        first = self.gather(value if self.rank == 0 else None)[0]
        assert first is not None
        return first

    def barrier(self) -> None:
        """Wait for every rank."""
        self.all_reduce(torch.zeros(1))

    @contextlib.contextmanager
    def _counted(self, kind: str, tensor: Tensor) -> Iterator[None]:
        self.calls[kind] += 1
        self.bytes_sent[kind] += tensor.nbytes
        start = time.monotonic()
        try:
            yield
            self.seconds += time.monotonic() - start
        except RuntimeError as error:
            problem = str(error).strip().splitlines()[0]
            raise PeerLostError(f"{self._explain()} ({kind}: {problem})") from error
