"""A rank's collectives with simulated peers: each sends what the shapes ask for, and messages are counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dlrm_trainer.distributed.collectives import Arriving, Collectives, Traffic

Answer = Callable[[int], Tensor]
"""What the peers send together, in the order of ranks, this one included: so many elements."""


class SimulatedPeers(Collectives):
    """Answer each all-to-all at once, without a process group. What this rank sends to itself is not returned.

    ``script`` holds the peers' messages of a step, in the order of its calls; the last one repeats.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, lambda: "no rank is real but this one")
        self.script: list[Answer] = []
        self._at = 0
        self.messages: Counter[str] = Counter()
        """Messages that this rank sent to others and that were not empty, by ``Traffic``."""
        self.bytes_received: Counter[str] = Counter()

    def begin_step(self) -> None:
        """Start the script again."""
        self._at = 0

    def start_all_to_all(self, what: Traffic, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Arriving:
        """See ``Collectives``."""
        self.calls["all_to_all"] += 1
        self.bytes_sent[what] += (sum(sent) - sent[self.rank]) * tensor.element_size()
        self.messages[what] += sum(map(bool, sent)) - bool(sent[self.rank])
        answer = self.script[min(self._at, len(self.script) - 1)](sum(received))
        self._at += 1
        assert answer.dtype == tensor.dtype, f"{what}: {tensor.dtype} was sent and {answer.dtype} comes"
        assert len(answer) == sum(received), f"{what}: {sum(received)} elements are due and {len(answer)} come"
        self.bytes_received[what] += answer.nbytes
        return Arriving(answer)

    def start_sum(self, tensor: Tensor, codec: str = "fp32") -> Arriving:  # noqa: ARG002  peers send zeros
        """See ``Collectives``."""
        self.calls["all_reduce"] += 1
        return Arriving(tensor)


def constant(values: Tensor) -> Answer:
    """Return an answer that is always the same."""
    return lambda _: values


def zeros(dtype: torch.dtype) -> Answer:
    """Return an answer of zeros."""
    return lambda count: torch.zeros(count, dtype=dtype)
