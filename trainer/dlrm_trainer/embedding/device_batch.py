"""Copy batches to the device that computes them, ahead of its kernels; on the host nothing is copied."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from dlrm_trainer.compute_device import to_device
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.messages import Travel
from dlrm_trainer.embedding.tiers.slots import CopyStream, Mark, copy_stream
from dlrm_trainer.spans import spanned

T = TypeVar("T")
Copy: TypeAlias = Callable[[Tensor], Tensor]
"""Return a host tensor on the device."""


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """Hold what a rank computes a batch from, each tensor on the device of what computes with it."""

    dense: Tensor
    labels: Tensor
    lengths: Tensor | None
    """(F, n) of the rank's own samples; None without mean tables."""
    groups: tuple[Bags, ...]
    """(C_g, N) bags of each group of the rank's parts; ids of stacks are none, and slots take their place."""
    numbers: tuple[Tensor | None, ...]
    """(L,) global rows of each group's ids where fp16 rows need them for their rounding and they differ."""
    replicated: tuple[Bags, ...]
    """Bags of each data-parallel group."""
    travel: Travel


class Coming(Generic[T]):
    """Wait for what a thread copies to a device, or hold it where nothing is copied."""

    def __init__(self, made: T | Future[Callable[[], T]]) -> None:
        self._made = made

    def take(self) -> T:
        """Return the copies; kernels that are asked for from now on follow them, and the host does not wait for that.

        For the thread that asks for kernels.
        """
        if isinstance(self._made, Future):
            self._made = self._made.result()()
        return self._made


class BatchCopier:
    """Copy batches to a device in a thread, from pinned memory, on a stream beside the one of its kernels."""

    def __init__(self, device: torch.device, stream: CopyStream | None = None) -> None:
        self._device = device
        self._stream = stream or copy_stream(device)
        self._thread = None if device.type == "cpu" else ThreadPoolExecutor(1, thread_name_prefix="dlrm-copies")

    def start(self, make: Callable[[Copy], T]) -> Coming[T]:
        """Start to make copies; ``make`` is given what copies a tensor, and may run in another thread."""
        if self._thread is None:
            return Coming(make(_same))
        return Coming(self._thread.submit(self._copy, make))

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    @spanned("copy batch")
    def _copy(self, make: Callable[[Copy], T]) -> Callable[[], T]:
        made: list[T] = []
        copies: list[Tensor] = []

        def copy(tensor: Tensor) -> Tensor:
            copies.append(to_device(tensor, self._device))
            return copies[-1]

        end: Mark = self._stream.start(lambda: made.append(make(copy)))

        def take() -> T:
            self._stream.precede(end)
            for each in copies:
                _keep_for_kernels(each)
            return made[0]

        return take


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _keep_for_kernels(tensor: Tensor) -> None:
    """Let torch use the memory again only after the kernels asked for so far: it belongs to the stream of copies."""
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
