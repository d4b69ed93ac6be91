"""One shard's rows of a cut in shared memory, in ascending order whatever the order in which the rank gave them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from dlrm_checkpointer.types import ShardId, ShardRows


class Delta:
    """Rows that a cut hands over of one shard; each row once.

    Args:
        shard: the rectangle.
        pieces: of it, each with ascending rows.
    """

    def __init__(self, shard: ShardId, pieces: Iterable[ShardRows]) -> None:
        self.shard = shard
        self._pieces: Sequence[ShardRows] = sorted(
            (piece for piece in pieces if len(piece.row_ids)), key=lambda piece: int(piece.row_ids[0])
        )
        sizes = [len(piece.row_ids) for piece in self._pieces]
        self._starts = np.cumsum([0, *sizes])
        self._order: NDArray[np.int64] | None = None
        """Places, among those of all pieces, in ascending order of rows; None where they are in it."""
        ids = [piece.row_ids for piece in self._pieces]
        self.row_ids: NDArray[np.int64] = ids[0] if len(ids) == 1 else np.concatenate([np.empty(0, np.int64), *ids])
        """(N,) ascending."""
        if len(ids) > 1 and not bool((self.row_ids[1:] > self.row_ids[:-1]).all()):
            self._order = np.argsort(self.row_ids, kind="stable")
            self.row_ids = self.row_ids[self._order]

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def state_values(self) -> int:
        """Values of optimizer state of each row; 0 where there is no row."""
        return self._pieces[0].state.shape[1] if self._pieces else 0

    def rows(self, begin: int, end: int) -> ShardRows:
        """The rows at places [begin, end) of ``row_ids``; views where they are of one piece."""
        if self._order is None:
            number, last = map(int, np.searchsorted(self._starts, (begin, end - 1), side="right") - 1)
            if number == last:
                first = int(self._starts[number])
                return self._pieces[number].part(begin - first, end - first)
        places = np.arange(begin, end) if self._order is None else self._order[begin:end]
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        rows = np.empty((end - begin, self.shard.width), np.float32)
        state = np.empty((end - begin, self.state_values), np.float32)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            at = places[here] - self._starts[number]
            rows[here], state[here] = self._pieces[number].rows[at], self._pieces[number].state[at]
        return ShardRows(shard=self.shard, row_ids=self.row_ids[begin:end], rows=rows, state=state)


def deltas(owned: Iterable[ShardId], pieces: Iterable[ShardRows]) -> list[Delta]:
    """The rows of each shard that a rank stores, in the order of ``owned``; some have none."""
    found: dict[ShardId, list[ShardRows]] = {shard: [] for shard in owned}
    for piece in pieces:
        found[piece.shard].append(piece)
    return [Delta(shard, each) for shard, each in found.items()]
