"""Compute how many columns a table's rows need, from rows that stream past in blocks.

The energy of rows is their sum of squares. The best k columns, of all that are linear in the table's own, keep the k
largest squared singular values of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.trace import ReuseBin

Floats = NDArray[np.float64]
Pass = Callable[[], Iterable[Floats]]
"""Starts to read all rows again, in blocks of (N, dim)."""
ScoredRows = Iterable[tuple[NDArray[np.float32], NDArray[np.float32]]]
"""(N, dim) rows and (N,) scores, block by block, as often as it is iterated. More lookups give a row a higher score."""

MAX_EXACT_COLUMNS = 1_024
"""Largest dim whose dim x dim Gram matrix is computed."""
MAX_ALS_COLUMNS = 256
"""Columns that are found in wider tables: a pass over 2,048 columns then costs as much as a Gram matrix of 1,024."""
SPARE_COLUMNS = 16
"""Further columns that are iterated and not used: the last ones converge slowly.

Without them, two rounds leave up to 1.37 times the error of a singular value decomposition (singular values 0.5**k).
"""
ALS_ROUNDS = 3
SEED = 0
BLOCK_VALUES = 1 << 18
"""Values of a block in float64: 2 MiB, which a core's cache holds."""
DEPENDENT = 1e-12
"""Share of the largest energy below which a column is a rounding error."""
SHARES = (0.9, 0.99, 0.999)
DIM_MULTIPLE = 4


@dataclass(frozen=True, kw_only=True)
class Spectrum:
    """Hold the energy of some rows by column of their best approximation."""

    energies: Floats
    """(K,) squared singular values, descending: all of them, or the largest, which are at most the true ones."""
    total: float
    """Sum of all, including those that are not known."""

    def columns(self, share: float) -> int | None:
        """Return the fewest columns that keep a share of the energy; None: more than K, or there is no energy."""
        kept = np.cumsum(self.energies) >= share * self.total
        return int(np.argmax(kept)) + 1 if self.total > 0 and kept.any() else None


@dataclass(frozen=True, kw_only=True)
class TableRank:
    """Say how many columns of a table keep shares of its rows' energy; None: more than are found, or no energy."""

    table: str
    dim: int
    rows: int
    """Updated rows."""
    energy: float
    """Sum of squares of their weights, each row's times its lookups if they are known."""
    exact: bool
    """Otherwise the numbers of columns are upper bounds, and close."""
    columns_90: int | None
    columns_99: int | None
    columns_99_9: int | None
    advised_dim: int | None
    """Smallest multiple of 4 that keeps 99 %."""


def rank_table(table: str, dim: int, rows: ScoredRows, histogram: Sequence[ReuseBin] | None) -> TableRank:
    """Compute the columns that a table needs, with its rows weighted by the lookups of a trace if there is one."""
    weights = None if histogram is None else lookups_by_bin(count_scores(rows), histogram)
    count = 0

    def read() -> Iterator[Floats]:
        nonlocal count
        count = 0
        for values, scores in rows:
            count += len(values)
            yield from scaled_blocks(values, None if weights is None else weights[score_bins(scores)])

    exact = is_exact(dim)
    spectrum = gram_spectrum(read(), dim) if exact else als_spectrum(read, dim)
    columns_90, columns_99, columns_99_9 = (spectrum.columns(share) for share in SHARES)
    return TableRank(
        table=table,
        dim=dim,
        rows=count,
        energy=spectrum.total,
        exact=exact,
        columns_90=columns_90,
        columns_99=columns_99,
        columns_99_9=columns_99_9,
        advised_dim=None if columns_99 is None else min(-(-columns_99 // DIM_MULTIPLE) * DIM_MULTIPLE, dim),
    )


def is_exact(dim: int) -> bool:
    """Return whether the spectrum of rows of ``dim`` columns is computed exactly."""
    return dim <= MAX_EXACT_COLUMNS


def passes(dim: int, *, weighted: bool) -> int:
    """Return how often ``rank_table`` reads all rows."""
    return weighted + (1 if is_exact(dim) else ALS_ROUNDS)


def gram_spectrum(blocks: Iterable[Floats], dim: int) -> Spectrum:
    """Compute all energies as the eigenvalues of the Gram matrix."""
    gram = np.zeros((dim, dim))
    for rows in blocks:
        gram += rows.T @ rows
    return Spectrum(energies=np.linalg.eigvalsh(gram)[::-1].clip(0), total=float(np.trace(gram)))


def als_spectrum(read: Pass, dim: int, columns: int = MAX_ALS_COLUMNS, rounds: int = ALS_ROUNDS) -> Spectrum:
    """Compute the largest energies by alternating least squares, from a random start.

    A round is a pass. Rows X are approximated by U V^T: U = X V for an orthonormal V, then V = X^T U (U^T U)^-1.
    The next round needs the column space of V alone, so X^T U will do.

    Source: Szlam, Tulloch & Tygert, Accurate Low-Rank Approximations via a Few Iterations of Alternating Least
    Squares, SIAM J. Matrix Anal. Appl. 38(2), 2017.
    """
    right = np.random.default_rng(SEED).standard_normal((dim, min(columns + SPARE_COLUMNS, dim)))
    for _ in range(rounds):
        basis = np.linalg.qr(right).Q
        gram, right, total = np.zeros((basis.shape[1],) * 2), np.zeros_like(basis), 0.0
        for rows in read():
            left = rows @ basis
            gram += left.T @ left
            right += rows.T @ left
            total += float(np.vdot(rows, rows))
    # X^T U W has the singular values of U V^T if U W is orthonormal.
    values, vectors = np.linalg.eigh(gram)
    kept = values > DEPENDENT * values[-1]
    found = np.linalg.svd(right @ (vectors[:, kept] / np.sqrt(values[kept])), compute_uv=False)
    return Spectrum(energies=np.square(found[:columns]), total=total)


def scaled_blocks(rows: NDArray[np.float32], weights: Floats | None) -> Iterator[Floats]:
    """Yield (N, dim) rows as blocks of float64; with (N,) weights, a row's energy counts that many times."""
    size = max(1, BLOCK_VALUES // rows.shape[1])
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        block = rows[part].astype(np.float64)
        yield block if weights is None else block * np.sqrt(weights[part, None])


SCORE_BINS = 1 << 16
"""Bins of scores, by the upper half of a float32's bits: at most 0.8 % wide, and ordered if no score is negative."""


def score_bins(scores: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the bin of each score, at least 0."""
    return (np.ascontiguousarray(scores, np.float32).view(np.uint32) >> 16).astype(np.intp)


def count_scores(rows: ScoredRows) -> NDArray[np.int64]:
    """Return the rows in each bin of scores."""
    counts = np.zeros(SCORE_BINS, np.int64)
    for _, scores in rows:
        counts += np.bincount(score_bins(scores), minlength=SCORE_BINS)
    return counts


def lookups_by_bin(rows: NDArray[np.int64], histogram: Sequence[ReuseBin]) -> Floats:
    """Estimate the lookups of a row in each bin of scores, given the (``SCORE_BINS``,) rows in them.

    A trace tells how many rows were looked up how often, but not which. The rows with the highest scores are taken for
    those with the most lookups; rows beyond those of the trace have none.
    """
    hottest_first = [each for each in reversed(histogram) if each.rows]
    traced = np.cumsum([0, *(each.rows for each in hottest_first)])
    lookups = np.cumsum([0, *(each.lookups for each in hottest_first)])
    counts = rows[::-1]
    found = np.diff(np.interp(np.cumsum(counts), traced, lookups), prepend=0.0)
    weights: Floats = (found / np.maximum(counts, 1))[::-1]
    return weights
