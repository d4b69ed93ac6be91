"""What travels between ranks: bags that came to the owners of their rows, and vectors on their way.

Shapes: n samples of this rank, n_s of rank s, N of all; C columns of this rank, C_g of its group g; V_w vectors of
width w.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlrm_api.errors import DivergedError
from dlrm_api.wire import Codec
from dlrm_trainer.distributed.codecs import is_finite, read_message
from dlrm_trainer.distributed.collectives import Arriving

NOWHERE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class OwnedBags:
    """The bags of the global batch that look into this rank's parts."""

    ids: Tensor
    """(L,) int64 rows of the parts, column-major; within a column in the order of the global batch, at any W."""
    lengths: Tensor
    """(C, N) int32."""
    weights: Tensor | None
    """(L,) float32."""
    samples: tuple[int, ...]
    """n_s of each rank."""
    filled: tuple[tuple[Tensor, ...], ...]
    """Of each rank s and group: (k,) int64 places, in its samples' (n_s * C_g) vectors, of split columns' vectors of
    bags that have ids in the part: no others travel."""
    landing: tuple[tuple[Tensor, ...], ...]
    """Of each rank and group of that: (k,) int64 places in this rank's (n * V_w) vectors where those it pools land."""

    def for_vectors(self, device: torch.device) -> OwnedBags:
        """The same bags, with the places of vectors where the vectors are."""
        if device.type == "cpu":
            return self
        filled, landing = (
            tuple(tuple(each.to(device, non_blocking=True) for each in groups) for groups in places)
            for places in (self.filled, self.landing)
        )
        return replace(self, filled=filled, landing=landing)


@dataclass(frozen=True, kw_only=True)
class Travelling:
    """Vectors on their way to this rank. Pieces are those of whole columns and of split ones, group by group."""

    own: list[Tensor]
    """Pieces that stay here."""
    rank: int
    """This one."""
    codec: Codec
    expected: Sequence[Sequence[tuple[int, int]]]
    """Rows and width of each piece, of each rank."""
    arriving: Arriving | None
    sizes: tuple[int, ...]
    """Bytes from each rank."""
    bags: OwnedBags
    finite: bool = True
    """False: a value that this rank sends in fp16 is not."""

    def wait(self) -> list[list[Tensor]]:
        """The pieces from each rank.

        Raises:
            DivergedError: a value that came in fp16 is not finite.
            PeerLostError: a rank is gone.
        """
        if self.arriving is None:
            return [self.own]
        messages, found = torch.split(self.arriving.wait(), list(self.sizes)), []
        for rank, (message, shapes) in enumerate(zip(messages, self.expected, strict=True)):
            if rank != self.rank and not is_finite(self.codec, message):
                raise DivergedError(f"rank {rank} sent values that are not finite: see its log")
            found.append(self.own if rank == self.rank else read_message(self.codec, message, shapes))
        return found
