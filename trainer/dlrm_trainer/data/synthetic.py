"""Synthetic samples of the model's own shape: any of them is computed from (seed, split, sample number) alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import Feature, TableSpec
from dlrm_kernels.hashing import random_bits, stream_key, uniform
from dlrm_trainer.data.batch import Fingerprint, RawRows, no_rows
from dlrm_trainer.data.histogram import ReuseHistogram, read_histogram
from dlrm_trainer.data.popularity import Popularity, Scatter
from dlrm_trainer.data.teacher import Hidden, Teacher, gaussian, row_effects, sigmoid

_PROBE_SAMPLES = 4_096


@dataclass(frozen=True)
class _Draws:
    """Keys and distributions of one feature's random numbers."""

    table: TableSpec
    popularity: Popularity
    scatter: Scatter
    length_key: np.uint64
    step_key: np.uint64
    place_key: np.uint64
    weight_key: np.uint64 | None
    """None: the feature has no weights."""
    effect_keys: tuple[np.uint64, np.uint64]

    def lengths(self, sample_ids: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Bag sizes (n,): avgLookups on average, spread as far as maxLookups and 0 allow."""
        most, mean = self.table.max_lookups, min(self.table.lookups, self.table.max_lookups)
        spread = min(mean, most - mean)
        if spread == 0:
            return np.full(sample_ids.size, most if mean else 0, dtype=np.int32)
        wide = uniform(random_bits(self.length_key, sample_ids * np.uint64(2)))
        rounding = uniform(random_bits(self.length_key, sample_ids * np.uint64(2) + np.uint64(1)))
        return np.floor(mean + spread * (2.0 * wide - 1.0) + rounding).clip(0, most).astype(np.int32)

    def lookups(self, sample_ids: NDArray[np.uint64], lengths: NDArray[np.int32]) -> NDArray[np.uint64]:
        """A number for each id that no other id of the feature has: (sum of lengths,), bag after bag."""
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        places_in_bag = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
        bags = np.repeat(sample_ids * np.uint64(self.table.max_lookups), lengths)
        return bags + places_in_bag.view(np.uint64)

    def ids(self, lookups: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Id of each lookup (k,)."""
        ranks = self.popularity.ranks(random_bits(self.step_key, lookups), random_bits(self.place_key, lookups))
        return self.scatter(ranks)

    def weights(self, lookups: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Weight of each lookup (k,): uniform in [0.5, 1.5), or 1 for a feature without weights."""
        if self.weight_key is None:
            return np.ones(lookups.size, dtype=np.float32)
        bits = random_bits(self.weight_key, lookups) >> np.uint64(41)  # 23 bits: 0.5 plus them is exact
        return bits.astype(np.float32) * np.float32(2.0**-23) + np.float32(0.5)


@dataclass(frozen=True)
class _Bags:
    """What features look up: bag sizes (F, n), and by feature ids and weights (the latter only if any has some)."""

    lengths: NDArray[np.int32]
    ids: list[NDArray[np.int64]]
    weights: list[NDArray[np.float32]]


class SyntheticSource:
    """Samples with labels from a planted teacher. Training and evaluation differ in samples and share the teacher."""

    hashed = False
    remade = None

    def __init__(self, spec: DLRMJobSpec, split: str) -> None:
        synthetic, seed = spec.data.synthetic, spec.training.seed
        self._split = split
        self._spec = synthetic
        self._features = len(spec.model.dense_features)
        self._counts = spec.data.dense.transform == "log1p"
        self.num_samples = synthetic.samples if split == "train" else synthetic.eval_samples
        self._histogram = read_histogram(synthetic.reuse_histogram) if synthetic.reuse_histogram else None
        self._draws = _draws(spec, self._histogram, split)
        self._weighted = any(draws.weight_key is not None for draws in self._draws)
        self._dense_keys = [stream_key(seed, split, "dense", number) for number in range(self._features)]
        self._noise_key, self._label_key = (stream_key(seed, split, what) for what in ("noise", "label"))
        probe = np.arange(_PROBE_SAMPLES, dtype=np.uint64)
        self._teacher = Teacher.fitted(seed, self._hidden(probe)[0], synthetic.noise, synthetic.positive_rate)

    @property
    def fingerprint(self) -> Fingerprint:
        """All that the samples depend on beside the model and the seed: a histogram by its content, not its path."""
        ids = {"alpha": self._spec.alpha} if self._histogram is None else {"shares": self._histogram.shares.tolist()}
        return {"format": "synthetic", **ids, "noise": self._spec.noise, "positiveRate": self._spec.positive_rate}

    def where(self, sample_id: int) -> str:
        """Which sample, in words."""
        return f"synthetic {self._split} sample {sample_id}"

    def rest(self) -> None:
        """Nothing is held."""

    def close(self) -> None:
        """Nothing is held."""

    def batches(
        self,
        slices: Sequence[NDArray[np.int64]],
        ahead: NDArray[np.int64] | None = None,  # noqa: ARG002  nothing to make ready
    ) -> list[RawRows]:
        """Compute the samples of some batches."""
        nothing = no_rows(len(self._draws), self._features, self._weighted)
        return [self.rows(each) if each.size else nothing for each in slices]

    def rows(self, sample_ids: NDArray[np.int64]) -> RawRows:
        """Compute some samples."""
        counters = sample_ids.astype(np.uint64)
        hidden, bags = self._hidden(counters)
        noise = self._spec.noise * gaussian(random_bits(self._noise_key, counters))
        chances = sigmoid(self._teacher.logits(hidden) + noise)
        labels = uniform(random_bits(self._label_key, counters)) < chances
        return RawRows(
            dense=self._observed(hidden.dense),
            labels=labels.astype(np.float32),
            lengths=bags.lengths,
            ids=np.concatenate(bags.ids),
            weights=np.concatenate(bags.weights) if self._weighted else None,
        )

    def _hidden(self, counters: NDArray[np.uint64]) -> tuple[Hidden, _Bags]:
        shape = (len(self._draws), counters.size)
        effects, factors = np.empty(shape), np.empty(shape)
        bags = _Bags(np.empty(shape, dtype=np.int32), [], [])
        for number, draws in enumerate(self._draws):
            lengths = bags.lengths[number] = draws.lengths(counters)
            lookups = draws.lookups(counters, lengths)
            rows = draws.ids(lookups)
            first, second = row_effects(draws.effect_keys, rows)
            if self._weighted:
                bags.weights.append(draws.weights(lookups))
                first, second = first * bags.weights[number], second * bags.weights[number]
            effects[number] = _bag_means(first, lengths)
            factors[number] = _bag_means(second, lengths)
            bags.ids.append(rows.view(np.int64))
        dense = np.empty((counters.size, self._features))
        for column, key in enumerate(self._dense_keys):
            dense[:, column] = (2.0 * uniform(random_bits(key, counters)) - 1.0) * np.sqrt(3.0)
        return Hidden(effects, factors, dense), bags

    def _observed(self, latent: NDArray[np.float64]) -> NDArray[np.float32]:
        """Dense fields: the latent values, or heavy-tailed counts that grow with them where log1p will follow."""
        if not self._counts:
            return latent.astype(np.float32)
        shares = latent / (2.0 * np.sqrt(3.0)) + 0.5
        return np.asarray(np.floor(4.0 * shares / (1.0 + 2.0**-10 - shares)), dtype=np.float32)


def _draws(spec: DLRMJobSpec, histogram: ReuseHistogram | None, split: str) -> list[_Draws]:
    tables, seed = spec.model.all_tables(), spec.training.seed
    popularity = {
        rows: histogram.popularity(rows) if histogram else Popularity.zipf(rows, spec.data.synthetic.alpha)
        for rows in {table.rows for table in tables}
    }
    return [
        _feature_draws(seed, split, tables[feature.table], feature, popularity[tables[feature.table].rows])
        for feature in spec.model.all_features()
    ]


def _feature_draws(seed: int, split: str, table: TableSpec, feature: Feature, popularity: Popularity) -> _Draws:
    """Draws of a table's first column are named by the table alone, those of further ones by table and column."""
    name = (table.name,) if feature.column == table.sources[0] else (table.name, feature.column)
    return _Draws(
        table=table,
        popularity=popularity,
        scatter=Scatter.of(table.rows, stream_key(seed, "scatter", table.name)),
        length_key=stream_key(seed, split, "length", *name),
        step_key=stream_key(seed, split, "step", *name),
        place_key=stream_key(seed, split, "place", *name),
        weight_key=stream_key(seed, split, "weight", *name) if feature.weights else None,
        effect_keys=(stream_key(seed, "first", table.name), stream_key(seed, "second", table.name)),
    )


def _bag_means(values: NDArray[np.float64], lengths: NDArray[np.int32]) -> NDArray[np.float64]:
    """Mean of each bag's values (n,); 0 for an empty bag."""
    if values.size == lengths.size and (lengths == 1).all():
        return values
    bags = np.repeat(np.arange(lengths.size), lengths)
    sums = np.bincount(bags, weights=values, minlength=lengths.size)  # no sum depends on another bag's
    return np.asarray(sums / np.maximum(lengths, 1))
