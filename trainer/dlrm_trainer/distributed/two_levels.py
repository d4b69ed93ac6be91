"""Exchange messages in two levels: through shared memory within a node, by gloo between nodes.

M nodes have L ranks each, numbered node by node: rank (m, l) is rank l of node m. A message from (m, l) to (n, k) goes
through rank (m, k), so that a rank talks to L - 1 ranks of its node and M - 1 of others, instead of all:

    (m, l) --- memory of node m ---> (m, k) --- gloo ---> (n, k)
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import TemporaryError
from dlrm_kernels.bags import place_segments


class TwoLevels:
    """Connect one rank with those of its node, and with those of other nodes that have its number there.

    All ranks make the same calls in the same order, from one thread at a time; each blocks, and raises RuntimeError if
    a rank is lost. A lost rank of the node shows in gloo's exchange of sizes, which comes before every message.
    """

    def __init__(self, node: dist.ProcessGroup, peers: dist.ProcessGroup) -> None:
        self._node, self._peers = node, peers
        self._per_node, self._nodes = node.size(), peers.size()
        self._own = _Memory(os.memfd_create("dlrm-even")), _Memory(os.memfd_create("dlrm-odd"))
        self._of_node: list[tuple[_Memory, _Memory]] = []
        self._turn = 0
        self._passing = np.empty(0, np.uint8)

    def all_to_all(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send ``sent[s]`` elements of a flat host tensor to each rank s; return ``received[s]`` from each, in order.

        Raises:
            TemporaryError: a rank of the node described a message that cannot be; names the rank.
        """
        sizes = np.array(sent, np.int64).reshape(self._nodes, self._per_node) * tensor.element_size()
        starts = (sizes.cumsum() - sizes.ravel()).reshape(sizes.shape)
        # A rank that sends its sizes has read all earlier messages: two memories are enough.
        turn, self._turn = self._turn, 1 - self._turn
        self._own[turn].write(tensor.contiguous().view(torch.uint8).numpy())
        # (L, 2, M): where the parts start that this rank passes to each node, and their sizes.
        parts = self._exchange_in_node(np.stack((starts.T, sizes.T), axis=1))
        values = [self._message_of(number, turn, part) for number, part in enumerate(parts)]
        passed = np.ascontiguousarray(parts[:, 1].T)
        places = np.ascontiguousarray((passed.cumsum() - passed.ravel()).reshape(passed.shape).T)
        if passed.sum() > len(self._passing):
            self._passing = np.empty(passed.sum(), np.uint8)
        for each, (part_starts, part_sizes), part_places in zip(values, parts, places, strict=True):
            place_segments(each, part_starts, part_sizes, self._passing, part_places)
        output = tensor.new_empty(sum(received))
        coming = np.array(received, np.int64).reshape(sizes.shape).sum(axis=1) * tensor.element_size()
        dist.all_to_all_single(
            output.view(torch.uint8),
            torch.from_numpy(self._passing[: passed.sum()]),
            coming.tolist(),
            passed.sum(axis=1).tolist(),
            group=self._peers,
        )
        return output

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank the values of rank 0, in place."""
        if self._node.rank() == 0:
            dist.broadcast(tensor, group=self._peers, group_src=0)
        dist.broadcast(tensor, group=self._node, group_src=0)

    def _exchange_in_node(self, parts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Send (2, M) starts and sizes to each rank of the node; return (L, 2, M) of those that came."""
        if not self._of_node:
            self._of_node = self._open_memories()
        came = torch.empty(parts.shape, dtype=torch.int64)
        dist.all_to_all_single(came, torch.from_numpy(np.ascontiguousarray(parts)), group=self._node)
        return came.numpy()

    def _message_of(self, number: int, turn: int, part: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the message of a rank of the node, which has all of the (2, M) starts and sizes."""
        values = self._of_node[number][turn].read(int(part.sum(axis=0).max()))
        if part.min() < 0 or part.max() > len(values) or part.sum(axis=0).max() > len(values):
            rank = dist.get_global_rank(self._node, number)
            raise TemporaryError(
                f"rank {rank} sent sizes of a message that it does not have; run the same trainer version on all ranks"
            )
        return values

    def _open_memories(self) -> list[tuple[_Memory, _Memory]]:
        mine = torch.tensor([os.getpid(), *(each.file for each in self._own)])
        every = [torch.empty_like(mine) for _ in range(self._per_node)]
        dist.all_gather(every, mine, group=self._node)
        return [(_open(process, even), _open(process, odd)) for process, even, odd in (each.tolist() for each in every)]


class _Memory:
    """Map a file without a name, in which one rank of a node leaves messages for the others."""

    def __init__(self, file: int) -> None:
        self.file = file
        self._mapped = np.empty(0, np.uint8)

    def write(self, message: NDArray[np.uint8]) -> None:
        """Put a message at the start. The file grows to a power of two: pages that are not written take no memory."""
        if len(message) > len(self._mapped):
            os.ftruncate(self.file, 1 << (len(message) - 1).bit_length())
            self._map()
        self._mapped[: len(message)] = message

    def read(self, size: int) -> NDArray[np.uint8]:
        """Return what the file holds: more than so many bytes, or fewer if it does not have them."""
        if size > len(self._mapped):
            self._map()
        return self._mapped

    def _map(self) -> None:
        size = os.fstat(self.file).st_size
        self._mapped = np.frombuffer(mmap.mmap(self.file, size), np.uint8) if size else np.empty(0, np.uint8)


def _open(process: int, file: int) -> _Memory:
    path = f"/proc/{process}/fd/{file}"
    try:
        return _Memory(os.open(path, os.O_RDWR))
    # The rank may have been killed: the caller finds out whether it is lost.
    except OSError as error:
        raise RuntimeError(f"cannot open {path}: {error.strerror}") from error
