"""Compute the hit rates of LRU caches of all sizes in one pass over the batches of one table.

A batch looks up its distinct rows at once: all are searched in the cache that the previous batches left, then all
become the most recent, in ascending order of row. So a row hits if fewer than C other rows were used after its own last
use, where C is the size of the cache in rows. A cache that never evicts rows of a batch in flight, and touches each
distinct row of a batch once, differs only in the order within a batch, which moves a row by less than a batch.

Source: Mattson, Gecsei, Slutz, Traiger, Evaluation techniques for storage hierarchies, IBM Systems Journal 9(2), 1970
(stack distances); Bennett, Kruskal, LRU stack processing, IBM J. Res. Dev. 19(4), 1975 (counted by a tree over the
times of last use); Waldspurger, Park, Garthwaite, Ahmad, Efficient MRC construction with SHARDS, FAST 2015 (sampling by
a hash of the row, halving the rate when too many rows are followed).

Unlike SHARDS, the hotter half of the rows seen before sampling begins is tracked exactly; the other tracked rows count
1 / rate each, scaled so that they add up to all other accesses. Most accesses are of hot rows, so a plain sample's
curve would depend on which of them it contains.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.cache import kernel
from dlrm_kernels.hashing import GOLDEN, mix

_SHIFT_11 = np.uint64(11)
_HASH_BITS = 53
_MIN_SIZE = 1 << 10
_FREE = -1


class _Stack(NamedTuple):
    """Hold the tracked rows in a hash table, and a tree over the times of their last use."""

    rows: NDArray[np.int64]
    """(H,) row in each place of the hash table, -1 if free; H is a power of two."""
    weights: NDArray[np.int64]
    """(H,) number of rows that the row represents: 1, or 1 / rate if sampled."""
    times: NDArray[np.int32]
    """(H,) time of the row's last use."""
    lookups: NDArray[np.int64]
    """(H,) lookups of the row."""
    users: NDArray[np.int32]
    """(H,) place of the row last used at each time, or -1."""
    tree: NDArray[np.int64]
    """(H + 1,) Fenwick tree: weights of the rows last used at each time."""
    distances: NDArray[np.float64]
    """(2, H) accesses of exactly tracked and of sampled rows, by the number of other rows used since the row's last
    use, in units of the sampled rows' weight."""


@kernel
def _mixed(row: int) -> int:
    """Return the upper 53 bits of ``mix64``."""
    return np.int64(mix(np.uint64(row) + GOLDEN) >> _SHIFT_11)  # type: ignore[return-value]  # numba has no int


@kernel
def _place(rows: NDArray[np.int64], row: int, mixed: int) -> int:
    """Return a row's place in the hash table, chosen by the low bits: sampling uses the high ones."""
    mask = len(rows) - 1
    place = mixed & mask
    while rows[place] != row and rows[place] != _FREE:
        place = (place + 1) & mask
    return place


@kernel
def _add(tree: NDArray[np.int64], time: int, change: int) -> None:
    node = time + 1
    while node < len(tree):
        tree[node] += change
        node += node & -node


@kernel
def _seek(
    stack: _Stack, rows: NDArray[np.int64], lookups: NDArray[np.int64], halvings: int, places: NDArray[np.int64]
) -> tuple[int, int]:
    """Find a batch's rows and count their distances; return how many are tracked, and how many of these are new."""
    tracked, new = 0, 0
    used, node = 0, len(stack.tree) - 1
    while node > 0:
        used += stack.tree[node]
        node &= node - 1
    for number in range(len(rows)):
        mixed = _mixed(rows[number])
        place = _place(stack.rows, rows[number], mixed)
        if stack.rows[place] == _FREE:
            if mixed >> (_HASH_BITS - halvings) != 0:
                continue
            stack.rows[place], stack.weights[place], stack.times[place] = rows[number], 1 << halvings, _FREE
            new += 1
        else:
            older, node = 0, stack.times[place] + 1
            while node > 0:
                older += stack.tree[node]
                node &= node - 1
            weight = stack.weights[place]
            stack.distances[np.int64(weight > 1), (used - older) >> halvings] += weight
        stack.lookups[place] += lookups[number]
        places[tracked] = place
        tracked += 1
    return tracked, new


@kernel
def _use(stack: _Stack, places: NDArray[np.int64], count: int, now: int) -> None:
    """Make the rows in some places the most recent, from time ``now`` on."""
    for time in range(now, now + count):
        place = places[time - now]
        if stack.times[place] != _FREE:
            stack.users[stack.times[place]] = _FREE
            _add(stack.tree, stack.times[place], -stack.weights[place])
        stack.times[place] = time
        stack.users[time] = place
        _add(stack.tree, time, stack.weights[place])


@kernel
def _remove(stack: _Stack, rows: NDArray[np.int64], lookups: NDArray[np.int64], weights: NDArray[np.int64]) -> int:
    """Remove rows, as far as they are tracked; return how many were, and enter their lookups and weights."""
    mask, removed = len(stack.rows) - 1, 0
    for row in rows:
        hole = _place(stack.rows, row, _mixed(row))
        if stack.rows[hole] == _FREE:
            continue
        lookups[removed], weights[removed] = stack.lookups[hole], stack.weights[hole]
        removed += 1
        stack.users[stack.times[hole]] = _FREE
        _add(stack.tree, stack.times[hole], -stack.weights[hole])
        # Rows behind the hole move up to it, unless that is before the place that their hash names.
        place = (hole + 1) & mask
        while stack.rows[place] != _FREE:
            if (place - _mixed(stack.rows[place])) & mask >= (place - hole) & mask:
                stack.rows[hole], stack.weights[hole] = stack.rows[place], stack.weights[place]
                stack.times[hole], stack.lookups[hole] = stack.times[place], stack.lookups[place]
                stack.users[stack.times[hole]] = hole
                hole = place
            place = (place + 1) & mask
        stack.rows[hole], stack.lookups[hole] = _FREE, 0
    return removed


@kernel
def _fill(stack: _Stack, rows: NDArray[np.int64], weights: NDArray[np.int64], lookups: NDArray[np.int64]) -> None:
    """Enter rows, least recently used first, into an empty stack with a complete tree."""
    for time in range(len(rows)):
        place = _place(stack.rows, rows[time], _mixed(rows[time]))
        stack.rows[place], stack.weights[place] = rows[time], weights[time]
        stack.times[place], stack.lookups[place] = time, lookups[time]
        stack.users[time] = place


@kernel
def _sampled(rows: NDArray[np.int64], halvings: int) -> NDArray[np.bool_]:
    """Return which rows the sample contains by their hash."""
    chosen = np.empty(len(rows), dtype=np.bool_)
    for number in range(len(rows)):
        chosen[number] = _mixed(rows[number]) >> (_HASH_BITS - halvings) == 0
    return chosen


def _new_stack(
    rows: NDArray[np.int64],
    weights: NDArray[np.int64],
    lookups: NDArray[np.int64],
    distances: NDArray[np.float64],
    spare: int,
) -> _Stack:
    """Make a stack of rows, least recently used first, with space for ``spare`` more rows and as many accesses."""
    size = max(_MIN_SIZE, 1 << (2 * (rows.size + spare) - 1).bit_length())
    nodes = np.arange(size + 1, dtype=np.int64)
    sums = np.concatenate(([0], np.cumsum(weights)))
    kept = np.zeros((2, size))
    kept[:, : distances.shape[1]] = distances[:, :size]
    stack = _Stack(
        rows=np.full(size, _FREE, dtype=np.int64),
        weights=np.zeros(size, dtype=np.int64),
        times=np.zeros(size, dtype=np.int32),
        lookups=np.zeros(size, dtype=np.int64),
        users=np.full(size, _FREE, dtype=np.int32),
        tree=sums[np.minimum(nodes, rows.size)] - sums[np.minimum(nodes & (nodes - 1), rows.size)],
        distances=kept,
    )
    _fill(stack, rows, weights, lookups)
    return stack


class StackDistances:
    """Track one table's accesses: hit rate by cache size, and lookups of each tracked row.

    Exact while all rows are tracked. Memory: at most 230 bytes per tracked row, and briefly twice that.
    """

    def __init__(self, max_rows: int | None = None, rate: float | None = None) -> None:
        """Track all rows up to ``max_rows``, then a sample.

        Args:
            max_rows: None always tracks all rows.
            rate: share of rows in the sample, rounded to a power of two below 1; by default what keeps within
                ``max_rows``.
        """
        self.accesses = 0
        """Distinct rows of each batch, summed, whether tracked or not."""
        self._max_rows = max_rows
        self._wanted_halvings = None if rate is None else max(1, round(-math.log2(rate)))
        self._halvings = self._now = self._tracked = 0
        # Of exactly tracked and of sampled rows.
        self._first_accesses = np.zeros(2)
        self._removed: Counter[tuple[int, int]] = Counter()
        """Removed rows by their lookups and weight."""
        nothing = np.empty(0, dtype=np.int64)
        self._stack = _new_stack(nothing, nothing, nothing, np.empty((2, 0)), 0)
        self._places = nothing

    @property
    def rate(self) -> float:
        """Return the share of the rows not tracked exactly that the sample contains."""
        return 1.0 / (1 << self._halvings)

    @property
    def unique_rows(self) -> float:
        """Return the number of distinct rows accessed, estimated if sampled; a removed row is another one later."""
        return float(self._first_accesses[0] + self._scale * self._first_accesses[1])

    def row_lookups(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return (n,) lookups of tracked rows, and (n,) rows that each represents, which sum to ``unique_rows``."""
        there = self._stack.rows != _FREE
        removed = np.array([*self._removed], np.int64).reshape(-1, 2)
        lookups = np.concatenate([self._stack.lookups[there], removed[:, 0]])
        weights = np.concatenate([self._stack.weights[there], removed[:, 1]]).astype(np.float64)
        sampled = weights > 1
        weights[there.sum() :] *= [*self._removed.values()]
        if sampled.any():
            weights[sampled] *= max(0.0, self.unique_rows - weights[~sampled].sum()) / weights[sampled].sum()
        return lookups, weights

    def add(self, rows: NDArray[np.int64], lookups: NDArray[np.int64]) -> None:
        """Count the next batch.

        Args:
            rows: (n,) distinct rows of the batch, ascending, none negative.
            lookups: (n,) how often the batch looks each up.
        """
        size = self._stack.rows.size
        if 3 * (self._tracked + rows.size) > 2 * size or self._now + rows.size > size:
            self._renew(rows.size)
        if self._places.size < rows.size:
            self._places = np.empty(rows.size, dtype=np.int64)
        self.accesses += rows.size
        tracked, new = _seek(self._stack, rows, lookups, self._halvings, self._places)
        _use(self._stack, self._places, tracked, self._now)
        self._now += tracked
        self._tracked += new
        self._first_accesses[int(self._halvings > 0)] += new << self._halvings
        if self._max_rows is not None and self._tracked > self._max_rows:
            self._thin(self._max_rows)

    def remove(self, rows: NDArray[np.int64]) -> None:
        """Remove (n,) rows from caches of all sizes: the next access to each is a first one."""
        lookups, weights = np.empty((2, rows.size), np.int64)
        count = _remove(self._stack, rows, lookups, weights)
        self._tracked -= count
        self._removed.update(zip(lookups[:count].tolist(), weights[:count].tolist(), strict=True))

    def hit_rate(self, cache_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the hit rate of an LRU cache of each size, (k,) rows; a row's first access misses."""
        if not self.accesses:
            return np.zeros(cache_rows.shape)
        distances = self._stack.distances[0] + self._scale * self._stack.distances[1]
        hits = np.concatenate(([0.0], np.cumsum(distances)))
        within = np.ceil(cache_rows * self.rate).astype(np.int64).clip(max=distances.size)
        return np.asarray(hits[within] / self.accesses)

    @property
    def _scale(self) -> float:
        """Return the factor that scales accesses of sampled rows to all accesses not tracked exactly."""
        counted, sampled = self._stack.distances.sum(axis=1) + self._first_accesses
        return (self.accesses - counted) / sampled if sampled else 0.0

    def _thin(self, max_rows: int) -> None:
        """Lower the rate to track fewer rows."""
        if self._wanted_halvings is None:
            while self._tracked > max_rows:
                self._renew(0, halvings=1)
        elif not self._halvings:
            self._renew(0, halvings=self._wanted_halvings)

    def _renew(self, spare: int, halvings: int = 0) -> None:
        """Renumber the times of last use, with space for ``spare`` more, and halve the rate ``halvings`` times."""
        old = self._stack
        places = old.users[: self._now]
        places = places[places != _FREE]
        rows, weights, lookups, distances = old.rows[places], old.weights[places], old.lookups[places], old.distances
        if halvings:
            certain = weights == 1
            if not self._halvings:
                certain[np.argsort(lookups, kind="stable")[: rows.size // 2]] = False
            self._halvings += halvings
            weights = np.where(certain, 1, 1 << self._halvings)
            kept = certain | _sampled(rows, self._halvings)
            rows, weights, lookups = rows[kept], weights[kept], lookups[kept]
            distances = distances.reshape(2, -1, min(distances.shape[1], 1 << halvings)).sum(axis=2)
        self._stack = _new_stack(rows, weights, lookups, distances, spare)
        self._now = self._tracked = rows.size
