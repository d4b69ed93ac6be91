"""The planted teacher of synthetic data: a logit for each sample, from hidden effects of rows and dense features.

A row's effects are hashes of (seed, table, row), so that no table of effects is ever held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_kernels.hashing import random_bits, stream_key, uniform

Floats = NDArray[np.float64]

_ROW_SCALE, _DENSE_SCALE, _PAIR_SCALE = 1.2, 0.9, 0.6
"""Standard deviation of each part of the logit: together 1.6, which leaves a normalized entropy of about 0.75."""


@dataclass(frozen=True)
class Hidden:
    """What the teacher sees of some samples."""

    effects: Floats
    """(F, n) mean first effect of each bag's rows, times their weights; 0 for an empty bag."""
    factors: Floats
    """(F, n) mean second effect of each bag's rows, of which neighbouring features' products count."""
    dense: Floats
    """(n, D) latent value of each dense feature, with mean 0 and variance 1."""


@dataclass(frozen=True)
class Teacher:
    """Weights of the parts of a logit, scaled and shifted on a probe of the data."""

    row_weights: Floats
    dense_weights: Floats
    scales: tuple[float, float, float]
    bias: float

    @classmethod
    def fitted(cls, seed: int, probe: Hidden, noise: float, positive_rate: float) -> Teacher:
        """A teacher whose parts have their proper spread on ``probe`` and whose labels have ``positive_rate``."""
        features, dense = probe.effects.shape[0], probe.dense.shape[1]
        row_weights = 1.0 / np.sqrt(1.0 + np.arange(features))  # some features matter more than others
        dense_weights = _signed(random_bits(stream_key("dense", seed), np.arange(dense, dtype=np.uint64)))
        bare = cls(row_weights, dense_weights, (1.0, 1.0, 1.0), 0.0)
        spreads = [float(part.std()) for part in bare.parts(probe)]
        row, dense, pair = (
            scale / spread if spread > 0 else 0.0
            for scale, spread in zip((_ROW_SCALE, _DENSE_SCALE, _PAIR_SCALE), spreads, strict=True)
        )
        scaled = cls(row_weights, dense_weights, (row, dense, pair), 0.0)
        return cls(row_weights, dense_weights, (row, dense, pair), _bias(scaled.logits(probe), noise, positive_rate))

    def parts(self, hidden: Hidden) -> tuple[Floats, Floats, Floats]:
        """Rows' own, dense and pairwise parts of the logits before scaling, (n,) each."""
        pairs = hidden.factors[:-1] * hidden.factors[1:]
        return (
            _weighted(self.row_weights, hidden.effects),
            _weighted(self.dense_weights, hidden.dense.T),
            _weighted(self.row_weights[:-1], pairs),
        )

    def logits(self, hidden: Hidden) -> Floats:
        """Log odds of a positive label, (n,), before noise."""
        row, dense, pair = self.parts(hidden)
        return self.bias + self.scales[0] * row + self.scales[1] * dense + self.scales[2] * pair


def row_effects(keys: Sequence[np.uint64], rows: NDArray[np.uint64]) -> tuple[Floats, Floats]:
    """First and second hidden effect of some rows of one table: uniform with mean 0 and variance 1."""
    first, second = keys
    return _signed(random_bits(first, rows)), _signed(random_bits(second, rows))


def sigmoid(logits: Floats) -> Floats:
    """Probability of a positive label."""
    with np.errstate(over="ignore"):  # what is less than a double can tell from 0 is 0
        return np.asarray(1.0 / (1.0 + np.exp(-logits)))


def gaussian(bits: NDArray[np.uint64]) -> Floats:
    """Nearly normal numbers with mean 0 and variance 1: the sum of four uniform ones of 16 bits each."""
    quarters = sum((bits >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48))
    return np.asarray((quarters * 2.0**-16 - 2.0) * np.sqrt(3.0))


def _weighted(weights: Floats, terms: Floats) -> Floats:
    """Sum of weights (k,) times terms (k, n), in order: unlike BLAS, no sample's sum depends on the others."""
    total = np.zeros(terms.shape[1])
    for weight, term in zip(weights, terms, strict=True):
        total += weight * term
    return total


def _signed(bits: NDArray[np.uint64]) -> Floats:
    return np.asarray((2.0 * uniform(bits) - 1.0) * np.sqrt(3.0))


def _bias(logits: Floats, noise: float, positive_rate: float) -> float:
    """The shift at which the mean probability is ``positive_rate``, by bisection."""
    noisy = logits + noise * gaussian(random_bits(stream_key("probe noise"), np.arange(logits.size, dtype=np.uint64)))
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(noisy + middle).mean() < positive_rate else (low, middle)
    return (low + high) / 2
