"""Reference tables whose rows have different numbers of columns, for quality alone: absent columns are held as zeros.

Shapes: R rows of all tables one after the other, D columns of the widest, U distinct rows of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.dimensions import SLAB_NUMBER_BYTES

VALUE_BYTES = 4
PLAIN_ROW_BYTES = 4
"""Of a row besides its columns: Adagrad's sum."""
PRUNED_ROW_BYTES = 12
"""Of a row that may be pruned, whatever it holds: where it is, its utility, and when it was touched."""
HELD_ROW_BYTES = PLAIN_ROW_BYTES + SLAB_NUMBER_BYTES
"""Of a pruned row besides its columns, if it holds any."""
CHUNK_BYTES, CHUNKED_ROW_BYTES = 8, 4
"""Of each free chunk, whatever it holds: where it is, and its utility. Of their row: when it was touched."""
OCTAVE_PARTS = 8


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describe all rows."""

    rows: Sequence[int]
    """Of each table."""
    dims: Sequence[int]
    """Of each table."""
    pruned: Sequence[bool]
    """Tables that give up columns. They have the same dim."""

    def per_row(self, values: Sequence[int]) -> Tensor:
        """Repeat a value of each table for its rows: (R,)."""
        return torch.repeat_interleave(torch.tensor(values), torch.tensor(self.rows))

    @property
    def plain_bytes(self) -> int:
        """Return the bytes of the tables that give up columns, with all of them."""
        sizes = zip(self.rows, self.dims, self.pruned, strict=True)
        return sum(rows * (VALUE_BYTES * dim + PLAIN_ROW_BYTES) for rows, dim, pruned in sizes if pruned)


class Rows:
    """Rows that keep the columns of their tables."""

    def __init__(self, layout: Layout, learning_rate: float, eps: float) -> None:
        self.layout, self._rate, self._eps, self._over_all = layout, learning_rate, eps, False
        self.dim = max(layout.dims)
        self._width = layout.per_row(layout.dims)
        self._pruned = torch.nonzero(layout.per_row(layout.pruned)).squeeze(1)
        self.weight = torch.zeros(len(self._width), self.dim)
        self._sums = torch.zeros(len(self._width), 1)

    @property
    def bytes(self) -> int:
        """Return what the tables that give up columns take now."""
        return self.layout.plain_bytes

    def update(self, rows: Tensor, gradient: Tensor, lookups: Tensor, step: int) -> None:
        """Make a step of row-wise Adagrad.

        Args:
            rows: (U,) ascending.
            gradient: (U, D) of the batch's mean loss, of absent columns too.
            lookups: (U,) of the batch.
            step: from 1.
        """
        self._count(rows, gradient, lookups, step)
        width = self._width[rows][:, None]
        gradient = gradient * (torch.arange(self.dim) < width)
        over = self.dim if self._over_all else width.clamp(min=1)
        total = self._sums[rows] + gradient.square().sum(dim=1, keepdim=True) / over
        self._sums[rows] = total
        self.weight[rows] -= gradient * (self._rate / (total.sqrt() + self._eps))

    def maintain(self, step: int) -> None:
        """Choose the columns to keep, between two steps."""

    def _count(self, rows: Tensor, gradient: Tensor, lookups: Tensor, step: int) -> None:
        """Note what choices depend on, and give rows that are trained for the first time their columns."""


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """Say how columns are given up."""

    decay: float = 0.998
    """Of utilities, each step."""
    hysteresis: float = 1.1
    warmup_steps: int = 32
    """Before the first choice."""


@dataclass(frozen=True, kw_only=True)
class PrefixPruning(Pruning):
    """Say which prefixes rows may have."""

    sizes: tuple[int, ...] = (16, 32, 64)
    start: int = -1
    """Place in ``sizes`` of a row's first size."""
    steepness: float = 16.0
    """Utility that a size needs, above that of the size before it."""
    over_all: bool = False
    """Whether Adagrad's sum grows by the mean square over all D columns instead of those that the row has."""


class _Utilities:
    """Hold decayed sums of lookups times gradient norms: (R, K)."""

    def __init__(self, rows: int, parts: int, decay: float) -> None:
        self._values, self._touched = torch.zeros(rows, parts), torch.zeros(rows, dtype=torch.int64)
        self._decay = decay

    def add(self, rows: Tensor, norms: Tensor, lookups: Tensor, step: int) -> None:
        self._values[rows] = self._now(rows, step) + lookups[:, None] * norms
        self._touched[rows] = step

    def seen(self, rows: Tensor) -> Tensor:
        """Tell which rows were ever trained."""
        return self._touched[rows] > 0

    def logarithms(self, rows: Tensor, step: int) -> NDArray[np.float32]:
        """(rows, K) to base 2; minus infinity where a row was never trained."""
        return self._now(rows, step).log2().numpy()

    def _now(self, rows: Tensor, step: int) -> Tensor:
        ages = step - self._touched[rows]
        return self._values[rows] * torch.pow(torch.tensor(self._decay), ages)[:, None]


class Prefixes(Rows):
    """Rows that keep their first columns, by one cut-off for all tables."""

    def __init__(
        self, layout: Layout, learning_rate: float, eps: float, pruning: PrefixPruning, budget: int, batch: int
    ) -> None:
        super().__init__(layout, learning_rate, eps)
        self._rule, self._batch, self._over_all = pruning, batch, pruning.over_all
        self._sizes = torch.tensor((0, *pruning.sizes))
        self._class = torch.zeros(len(self._width), dtype=torch.int64)
        """Of each row: place in ``_sizes``."""
        self._first_class = range(1, len(self._sizes))[pruning.start]
        self._may_change = torch.zeros(len(self._width), dtype=torch.bool)
        self._may_change[self._pruned] = True
        self._width[self._pruned] = 0
        self._utilities = _Utilities(len(self._width), 1, pruning.decay)
        self._budget = budget - PRUNED_ROW_BYTES * len(self._pruned)
        sizes = np.array(pruning.sizes)
        self._class_bytes = np.concatenate([[0], VALUE_BYTES * sizes + HELD_ROW_BYTES])
        self.cutoff = -math.inf
        """To base 2."""
        self.moves = 0

    @property
    def bytes(self) -> int:
        """See ``Rows``."""
        held = np.bincount(self._class[self._pruned].numpy(), minlength=len(self._class_bytes))
        return int(PRUNED_ROW_BYTES * len(self._pruned) + held @ self._class_bytes)

    def _count(self, rows: Tensor, gradient: Tensor, lookups: Tensor, step: int) -> None:
        new = rows[self._may_change[rows] & ~self._utilities.seen(rows)]
        self._resize(new, torch.full_like(new, self._first_class))
        self._utilities.add(rows, self._batch * gradient.norm(dim=1, keepdim=True), lookups, step)

    def maintain(self, step: int) -> None:
        """See ``Rows``."""
        if step < self._rule.warmup_steps:
            return
        rows = self._pruned[self._utilities.seen(self._pruned)]
        utility = self._utilities.logarithms(rows, step)
        classes = np.arange(1, len(self._sizes))
        margin = np.where(self._class[rows].numpy()[:, None] >= classes, 1, -1) * math.log2(self._rule.hysteresis)
        # (rows, classes): a row gets the class where this reaches the cut-off.
        scores = utility - (classes - 1) * math.log2(self._rule.steepness) + margin
        self.cutoff = _cutoff(scores, np.diff(self._class_bytes), self._budget)
        chosen = torch.from_numpy((scores >= self.cutoff).sum(axis=1))
        changed = chosen != self._class[rows]
        self.moves += int(changed.sum())
        self._resize(rows[changed], chosen[changed])

    def _resize(self, rows: Tensor, classes: Tensor) -> None:
        self._class[rows] = classes
        self._width[rows] = self._sizes[classes]
        self.weight[rows] *= torch.arange(self.dim) < self._width[rows][:, None]


class Chunks(Rows):
    """Rows that keep any of their chunks, each with a sum and a utility of its own; whole rows are single chunks."""

    def __init__(
        self, layout: Layout, learning_rate: float, eps: float, pruning: Pruning, budget: int, chunk: int
    ) -> None:
        super().__init__(layout, learning_rate, eps)
        self._rule, self._chunk, chunks = pruning, chunk, self.dim // chunk
        starts = torch.arange(chunks) * chunk
        self._chunk_widths = (self._width[:, None] - starts).clamp(0, chunk)
        self._held = self._chunk_widths > 0
        self._held[self._pruned] = False
        self._may_change = torch.zeros(len(self._width), dtype=torch.bool)
        self._may_change[self._pruned] = True
        self._sums = torch.zeros(len(self._width), chunks)
        self._utilities = _Utilities(len(self._width), chunks, pruning.decay)
        row_bytes = PRUNED_ROW_BYTES if chunks == 1 else CHUNKED_ROW_BYTES + chunks * CHUNK_BYTES
        self._metadata = row_bytes * len(self._pruned)
        self._unit = VALUE_BYTES * chunk + HELD_ROW_BYTES
        self._budget = budget - self._metadata

    @property
    def bytes(self) -> int:
        """See ``Rows``."""
        return self._metadata + self._unit * int(self._held[self._pruned].sum())

    def update(self, rows: Tensor, gradient: Tensor, lookups: Tensor, step: int) -> None:
        """See ``Rows``."""
        new = rows[self._may_change[rows] & ~self._utilities.seen(rows)]
        self._held[new] = True
        squares = gradient.view(len(rows), -1, self._chunk).square().sum(dim=2)
        self._utilities.add(rows, squares.sqrt(), lookups, step)
        held = self._held[rows]
        total = self._sums[rows] + held * squares / self._chunk_widths[rows].clamp(min=1)
        self._sums[rows] = total
        steps = held * (self._rate / (total.sqrt() + self._eps))
        self.weight[rows] -= gradient * steps.repeat_interleave(self._chunk, dim=1)

    def maintain(self, step: int) -> None:
        """See ``Rows``."""
        if step < self._rule.warmup_steps:
            return
        rows = self._pruned[self._utilities.seen(self._pruned)]
        held = self._held[rows]
        scores = self._utilities.logarithms(rows, step) + held.numpy() * math.log2(self._rule.hysteresis)
        kept = torch.from_numpy(_best(scores.ravel(), self._budget // self._unit).reshape(scores.shape))
        lost = held & ~kept
        some = lost.any(dim=1)
        self.weight[rows[some]] *= ~lost[some].repeat_interleave(self._chunk, dim=1)
        self._held[rows] = kept


def _best(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.bool_]:
    if count >= len(scores):
        return np.full(len(scores), True)
    found = np.full(len(scores), False)
    found[np.argpartition(scores, -count)[-count:]] = True
    return found


def _cutoff(scores: NDArray[np.floating[Any]], class_bytes: NDArray[np.int64], budget: int) -> float:
    """Return the least of the eighths of octaves at which the bytes of all classes fit."""
    finite = np.isfinite(scores)
    if not finite.any():
        return -math.inf
    least = math.floor(scores[finite].min() * OCTAVE_PARTS)
    bins = np.floor(np.where(finite, scores, least / OCTAVE_PARTS) * OCTAVE_PARTS).astype(np.int64) - least
    taken = np.bincount(bins.ravel(), weights=(finite * class_bytes).ravel())
    fits = np.flatnonzero(taken[::-1].cumsum() <= budget)
    return float(least + len(taken) - 1 - (fits[-1] if len(fits) else -1)) / OCTAVE_PARTS
