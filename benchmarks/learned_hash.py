"""Maps from ids to rows that are made of earlier samples, before training starts, and stay as they are.

The most frequent ids have rows of their own. The others share rows: by a learned hash, so that ids with similar vectors
collide, or by double hashing, as the sum of two rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

LEARNED, DOUBLE = "learned-hash", "static-double-hash"
NO_ROW = -1
COLUMNS = 4
"""Of the learned vectors."""
HISTORY = 0.5
"""Samples to learn from, as a share of the stream: those before the ones that are evaluated."""
OWN_SHARE = 0.5
"""Rows that the most frequent ids have to themselves, as a share of all; the other ids share the rest."""
ID_BYTES = 4
"""Of an id in a map; its key is not counted."""
ROUNDS = 10


def learned_rows(ids: Ints, vectors: Floats, rows: int, seed: int) -> Ints:
    """Return the (n, 1) row of each id up to n, as many as there are vectors; ids without a lookup share rows modulo.

    Source: Ghaemmaghami et al., "Learning to Collide" (arXiv:2203.15837), as its abstract has it: a map made of the
    ids' frequency and of learned vectors with few columns. Clusters are those of k-means, weighted by frequency.

    Args:
        ids: (L,) lookups of the history.
        vectors: (n, ``COLUMNS``) learned from it.
        rows: of the table, at least 2.
        seed: of the first clusters.
    """
    counts, by_count, own = _by_frequency(ids, len(vectors), rows)
    rest, draw = by_count[own:], np.random.default_rng(seed)
    found = own + np.arange(len(vectors)) % (rows - own)
    found[by_count[:own]] = np.arange(own)
    if len(rest):
        found[rest] = own + _clusters(vectors[rest], counts[rest], rows - own, draw)
    return found[:, None]


def double_rows(ids: Ints, count: int, rows: int, seed: int) -> Ints:
    """Return the (count, 2) rows of each id, ``NO_ROW`` as the second of the most frequent ones; see ``learned_rows``.

    Source: Zhang et al., "Model Size Reduction Using Frequency Based Double Hashing" (arXiv:2007.14523).
    """
    _, by_count, own = _by_frequency(ids, count, rows)
    second = np.random.default_rng(seed).integers(0, rows - own, count)
    found = own + np.stack([np.arange(count) % (rows - own), second], axis=1)
    found[by_count[:own]] = np.stack([np.arange(own), np.full(own, NO_ROW)], axis=1)
    return found


def mapped_ids(ids: Ints, method: str, rows: int) -> int:
    """Return how many ids the map of a method names: all that were looked up, or only the most frequent."""
    seen = len(np.unique(ids))
    return seen if method == LEARNED else min(seen, _own_rows(rows))


def _by_frequency(ids: Ints, count: int, rows: int) -> tuple[Ints, Ints, int]:
    """Return lookups by id, the ids that have any, most frequent first, and how many of them have their own rows."""
    counts = np.bincount(ids, minlength=count)
    by_count = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
    return counts, by_count, min(len(by_count), _own_rows(rows))


def _own_rows(rows: int) -> int:
    return max(1, round(OWN_SHARE * rows))


def _clusters(vectors: Floats, weights: Ints, most: int, draw: np.random.Generator) -> Ints:
    """Return the number of each vector's cluster, at most so many, by k-means (Lloyd) from vectors drawn by weight."""
    chosen = draw.choice(len(vectors), min(most, len(vectors)), replace=False, p=weights / weights.sum())
    centres = vectors[chosen].astype(np.float64)
    for _ in range(ROUNDS):
        nearest = np.asarray(cKDTree(centres).query(vectors)[1], np.int64)
        total = np.bincount(nearest, weights, len(centres))
        sums = [np.bincount(nearest, weights * column, len(centres)) for column in vectors.T]
        centres[total > 0] = (np.stack(sums, axis=1)[total > 0]) / total[total > 0, None]
    return nearest
