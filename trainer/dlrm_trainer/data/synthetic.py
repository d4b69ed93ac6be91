"""Compute synthetic samples of the model's own shape, each from (seed, split, sample number) alone.

Labels come from a planted teacher: a logit for each sample, from hidden effects of rows and dense features. A row's
effects are hashes of (seed, table, row), so that no table of effects is ever held. Popularity is Zipf's law, or a
reuse histogram in the text format of https://github.com/facebookresearch/dlrm_datasets (``locality_stats.txt``):
blocks that hold two histograms over bins (0, 1], (1, 2], (2, 4] ... of the times that a row is looked up. The second
one of the first block is read, the share of *lookups* by bin: the first one rounds the hot bins away.

With ``drift`` each popularity rank of a table is held by one id after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dlrm_api.data import SyntheticSpec
from dlrm_api.errors import BadDataError
from dlrm_api.job import DLRMJobSpec
from dlrm_api.model import TableSpec
from dlrm_kernels.hashing import random_bits, stream_key, uniform
from dlrm_kernels.parsing import Ints
from dlrm_stores.locations import local_path, read_text
from dlrm_trainer.data.batch_builder import Fingerprint, RawRows
from dlrm_trainer.data.files import SourceRequest

_TITLE = "Ratio of index distribution"
_BIN = re.compile(r"^\((\d+)(?:, \d+\]|\+): (\d*\.?\d+)\s*$", re.MULTILINE)
_MEAN_IN_BIN = 1.45
"""Mean reuse inside a bin over the bin's lower edge, fitted to both histograms of the traces of 2021."""


@dataclass(frozen=True)
class ReuseHistogram:
    """Hold the share of lookups by the times that a row is looked up."""

    reuse: NDArray[np.float64]
    """(S,) mean number of lookups of a row of each bin, ascending."""
    shares: NDArray[np.float64]
    """(S,) share of lookups that fall on rows of each bin."""

    def popularity(self, rows: int) -> Popularity:
        """Return the popularity of a table of ``rows`` rows, all of them in use, with this histogram's shape.

        A bin that would hold less than one row of a small table gives its share to the hotter step before it; one
        without lookups holds no row.
        """
        used = self.shares > 0
        hottest_first = self.shares[used][::-1]
        of_rows = hottest_first / self.reuse[used][::-1]
        edges = np.ceil(np.cumsum(of_rows) / of_rows.sum() * rows - 1e-9).astype(np.int64).clip(1, rows)
        edges[-1] = rows
        counts = np.diff(edges, prepend=0)
        steps = np.cumsum(counts > 0) - 1
        shares = np.bincount(steps, weights=hottest_first)
        return Popularity.from_steps(counts[counts > 0], shares.astype(np.float64))


def read_histogram(uri: str) -> ReuseHistogram:
    """Read the first block of a histogram file; NoInputError without it, BadDataError for other text."""
    path = local_path(uri)
    return parse_histogram(read_text(path), path)


def parse_histogram(text: str, path: Path) -> ReuseHistogram:
    """Parse a histogram, or raise BadDataError; ``path`` is for messages."""
    block = text.partition(_TITLE)[2].partition("[")[0]
    bins = [(int(low), float(share)) for low, share in _BIN.findall(block)]
    lows = [low for low, _ in bins]
    if not bins or lows != sorted(set(lows)) or sum(share for _, share in bins) <= 0:
        raise BadDataError(
            f"{path}: invalid reuse histogram: expected a line '{_TITLE} ...' followed by lines such as "
            "'(4, 8]: 0.101' with ascending bins and shares of lookups"
        )
    reuse = [low + 1 if low < 2 else round(_MEAN_IN_BIN * low) for low in lows]
    return ReuseHistogram(np.array(reuse, dtype=np.float64), np.array([share for _, share in bins]))


_EXACT_RANKS = 256
_GROWTH = 1.05


@dataclass(frozen=True)
class Popularity:
    """Draw rows by popularity, in steps; the rows of one step are equally popular.

    Zipf's law is exact for its first 256 ranks and within 3 % of it in the steps after them, each 5 % wide.
    """

    starts: NDArray[np.uint64]
    """(S,) first rank of each step."""
    counts: NDArray[np.uint64]
    """(S,) ranks of each step."""
    ceilings: NDArray[np.uint64]
    """(S,) a 64-bit random number belongs to the first step whose ceiling is at or above it."""

    @classmethod
    def from_steps(cls, counts: NDArray[np.int64], shares: NDArray[np.float64]) -> Popularity:
        """Build steps of ``counts`` ranks (hottest first) that take ``shares`` of the lookups, of any sum."""
        stops = np.cumsum(counts)
        cumulated = np.cumsum(shares) / np.sum(shares)
        ceilings = (cumulated * 2.0**53).astype(np.uint64) * np.uint64(2**11)
        ceilings -= np.uint64(1)
        ceilings[-1] = np.uint64(2**64 - 1)
        return cls((stops - counts).astype(np.uint64), counts.astype(np.uint64), ceilings)

    @classmethod
    def zipf(cls, rows: int, alpha: float) -> Popularity:
        """Look rank k of ``rows`` up in proportion to (k + 1) ** -alpha."""
        edges = list(range(min(rows, _EXACT_RANKS) + 1))
        while edges[-1] < rows:
            edges.append(min(rows, math.ceil(edges[-1] * _GROWTH)))
        bounds = np.array(edges, dtype=np.int64)
        counts = np.diff(bounds)
        middles = (bounds[:-1] + 1 + bounds[1:]) / 2  # of the ranks, counted from 1
        return cls.from_steps(counts, counts * middles**-alpha)

    def ranks(self, steps: NDArray[np.uint64], places: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return ranks from two independent random 64-bit numbers each: one picks the step, one the place."""
        step = np.searchsorted(self.ceilings, steps)
        return self.starts[step] + places % self.counts[step]


@dataclass(frozen=True)
class Scatter:
    """Map popularity ranks to row numbers, one to one, so that hot rows lie all over the table."""

    rows: int
    factor: int
    shift: int

    @classmethod
    def of(cls, rows: int, key: np.uint64) -> Scatter:
        """Return the bijection on ``rows`` rows that ``key`` names."""
        # 24 bits: the product with a row number stays below 2**64.
        factor = int(key >> np.uint64(41)) | 1 << 23
        while math.gcd(factor, rows) != 1:
            factor = 1 << 23 | (factor + 1) % (1 << 23)
        return cls(rows, factor, int(stream_key("shift", int(key)) % np.uint64(rows)))

    def __call__(self, ranks: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the row number of each rank."""
        rows = np.uint64(self.rows)
        return (ranks * np.uint64(self.factor) % rows + np.uint64(self.shift)) % rows


_QUANTA = 64
"""Quanta of a block: an id may be born at the start of each of them."""
_BIRTHS_PER_BLOCK = 1 + 63 / 8
"""One at the start of a block, and one in each other quantum with a chance of 1/8."""
_MAX_QUANTUM = 2**50


@dataclass(frozen=True)
class Turnover:
    """Choose the id of 63 bits that holds each popularity rank of a table at the time of a sample.

    Time is the number of the epoch's samples that are read before. Ids of a rank live for a number of quanta that is
    nearly geometric: it ends with the block, and so after nine mean lives at the latest. Blocks of ranks begin at
    times of their own. So an id is a function of rank and time alone, in a few operations.
    """

    key: np.uint64
    samples: int
    """Of an epoch."""
    virtual_shards: int
    """Equal runs of samples that are read side by side; 0: all samples are of the epoch's end."""
    quantum: int
    """Samples; 0: ids live for ever."""

    @classmethod
    def of(cls, synthetic: SyntheticSpec, virtual_shards: int, key: np.uint64) -> Turnover:
        """Return the turnover of a table that ``key`` names."""
        lives = synthetic.samples * _BIRTHS_PER_BLOCK / _QUANTA
        quantum = int(min(max(lives / synthetic.drift, 1), _MAX_QUANTUM)) if synthetic.drift else 0
        return cls(key, synthetic.samples, virtual_shards, quantum)

    def __call__(self, ranks: NDArray[np.uint64], sample_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the id of each rank (k,) at the time of each sample (k,)."""
        keys = random_bits(self.key, ranks)
        if not self.quantum:
            return keys >> np.uint64(1)
        ages = self._times(sample_ids) + keys % np.uint64(self.quantum * _QUANTA)
        quanta = ages // np.uint64(self.quantum)
        return random_bits(keys, _last_births(~keys, quanta)) >> np.uint64(1)

    def _times(self, sample_ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
        samples, shards = np.uint64(self.samples), np.uint64(self.virtual_shards)
        if not shards:
            return np.full(sample_ids.size, samples)
        shard = ((sample_ids + np.uint64(1)) * shards - np.uint64(1)) // samples
        return (sample_ids - shard * samples // shards) * shards


def _last_births(keys: NDArray[np.uint64], quanta: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the last quantum with a birth, up to each given one (k,)."""
    blocks, places = quanta // np.uint64(_QUANTA), quanta % np.uint64(_QUANTA)
    # One bit for each quantum of the block, the first in the lowest.
    births = random_bits(keys, blocks * np.uint64(3))
    for draw in (1, 2):
        births &= random_bits(keys, blocks * np.uint64(3) + np.uint64(draw))
    births = (births | np.uint64(1)) << (np.uint64(_QUANTA - 1) - places)
    # Without the bit below the highest, rounding to 53 bits does not carry into the exponent.
    exponents = np.frexp((births & ~(births >> np.uint64(1))).astype(np.float64))[1]
    return quanta - (_QUANTA - exponents).astype(np.uint64)


Floats = NDArray[np.float64]

_ROW_SCALE, _DENSE_SCALE, _PAIR_SCALE = 1.2, 0.9, 0.6
"""Standard deviation of each part of the logit: together 1.6, which leaves a normalized entropy of about 0.75."""


@dataclass(frozen=True)
class Hidden:
    """Hold what the teacher sees of some samples."""

    effects: Floats
    """(F, n) mean first effect of each bag's rows, times their weights; 0 for an empty bag."""
    factors: Floats
    """(F, n) mean second effect of each bag's rows, of which neighboring features' products count."""
    dense: Floats
    """(n, D) latent value of each dense feature, with mean 0 and variance 1."""


@dataclass(frozen=True)
class Teacher:
    """Hold weights of the parts of a logit, scaled and shifted on a probe of the data."""

    row_weights: Floats
    dense_weights: Floats
    scales: tuple[float, float, float]
    bias: float

    @classmethod
    def fitted(cls, seed: int, probe: Hidden, noise: float, positive_rate: float) -> Teacher:
        """Fit a teacher whose parts have their spread on ``probe``, and whose labels have ``positive_rate``."""
        # Some features matter more than others.
        row_weights = 1.0 / np.sqrt(1.0 + np.arange(probe.effects.shape[0]))
        numbers = np.arange(probe.dense.shape[1], dtype=np.uint64)
        dense_weights = _signed(random_bits(stream_key("dense", seed), numbers))
        bare = cls(row_weights, dense_weights, (1.0, 1.0, 1.0), 0.0)
        spreads = [float(part.std()) for part in bare.parts(probe)]
        row, dense, pair = (
            scale / spread if spread > 0 else 0.0
            for scale, spread in zip((_ROW_SCALE, _DENSE_SCALE, _PAIR_SCALE), spreads, strict=True)
        )
        scaled = replace(bare, scales=(row, dense, pair))
        return replace(scaled, bias=_bias(scaled.logits(probe), noise, positive_rate))

    def parts(self, hidden: Hidden) -> tuple[Floats, Floats, Floats]:
        """Return the rows' own, dense and pairwise parts of the logits before scaling, (n,) each."""
        pairs = hidden.factors[:-1] * hidden.factors[1:]
        return (
            _weighted(self.row_weights, hidden.effects),
            _weighted(self.dense_weights, hidden.dense.T),
            _weighted(self.row_weights[:-1], pairs),
        )

    def logits(self, hidden: Hidden) -> Floats:
        """Return the log odds of a positive label, (n,), before noise."""
        row, dense, pair = self.parts(hidden)
        return self.bias + self.scales[0] * row + self.scales[1] * dense + self.scales[2] * pair


def sigmoid(logits: Floats) -> Floats:
    """Return the probability of a positive label."""
    # A chance too small for a double is 0.
    with np.errstate(over="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-logits)))


def gaussian(bits: NDArray[np.uint64]) -> Floats:
    """Return nearly normal numbers with mean 0 and variance 1: sums of four uniform ones of 16 bits each."""
    quarters = sum((bits >> np.uint64(shift) & np.uint64(0xFFFF)).astype(np.float64) for shift in (0, 16, 32, 48))
    return np.asarray((quarters * 2.0**-16 - 2.0) * np.sqrt(3.0))


def _weighted(weights: Floats, terms: Floats) -> Floats:
    """Sum weights (k,) times terms (k, n), in order: unlike BLAS, no sample's sum depends on the others."""
    total = np.zeros(terms.shape[1])
    for weight, term in zip(weights, terms, strict=True):
        total += weight * term
    return total


def _signed(bits: NDArray[np.uint64]) -> Floats:
    """Return uniform numbers with mean 0 and variance 1."""
    return np.asarray((2.0 * uniform(bits) - 1.0) * np.sqrt(3.0))


def _bias(logits: Floats, noise: float, positive_rate: float) -> float:
    """Find the shift at which the mean probability is ``positive_rate``, by bisection."""
    noisy = logits + noise * gaussian(random_bits(stream_key("probe noise"), np.arange(logits.size, dtype=np.uint64)))
    low, high = -200.0, 200.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sigmoid(noisy + middle).mean() < positive_rate else (low, middle)
    return (low + high) / 2


_PROBE_SAMPLES = 4_096


@dataclass(frozen=True)
class _Draws:
    """Draw one feature's random numbers."""

    table: TableSpec
    popularity: Popularity
    scatter: Scatter
    turnover: Turnover | None
    """None: ids are the table's rows."""
    length_key: np.uint64
    step_key: np.uint64
    place_key: np.uint64
    weight_key: np.uint64 | None
    """None: the feature has no weights."""
    effect_keys: tuple[np.uint64, np.uint64]

    def lengths(self, sample_ids: NDArray[np.uint64]) -> NDArray[np.int32]:
        """Return bag sizes (n,): avgLookups on average, spread as far as maxLookups and 0 allow."""
        most, mean = self.table.max_lookups, min(self.table.lookups, self.table.max_lookups)
        spread = min(mean, most - mean)
        if spread == 0:
            return np.full(sample_ids.size, most if mean else 0, dtype=np.int32)
        wide = uniform(random_bits(self.length_key, sample_ids * np.uint64(2)))
        rounding = uniform(random_bits(self.length_key, sample_ids * np.uint64(2) + np.uint64(1)))
        return np.floor(mean + spread * (2.0 * wide - 1.0) + rounding).clip(0, most).astype(np.int32)

    def lookups(self, sample_ids: NDArray[np.uint64], lengths: NDArray[np.int32]) -> NDArray[np.uint64]:
        """Return a number for each id, (sum of lengths,) bag after bag, that no other id of the feature has."""
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        places_in_bag = np.arange(int(lengths.sum()), dtype=np.int64) - np.repeat(starts, lengths)
        bags = np.repeat(sample_ids * np.uint64(self.table.max_lookups), lengths)
        return bags + places_in_bag.view(np.uint64)

    def ids(self, lookups: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return the id of each lookup (k,)."""
        ranks = self.popularity.ranks(random_bits(self.step_key, lookups), random_bits(self.place_key, lookups))
        if self.turnover is None:
            return self.scatter(ranks)
        return self.turnover(ranks, lookups // np.uint64(self.table.max_lookups))

    def weights(self, lookups: NDArray[np.uint64]) -> NDArray[np.float32]:
        """Return each lookup's weight (k,): uniform in [0.5, 1.5), or 1 for a feature without weights."""
        if self.weight_key is None:
            return np.ones(lookups.size, dtype=np.float32)
        # 23 bits: 0.5 plus them is exact.
        bits = random_bits(self.weight_key, lookups) >> np.uint64(41)
        return bits.astype(np.float32) * np.float32(2.0**-23) + np.float32(0.5)


def open_synthetic(request: SourceRequest) -> SyntheticSource:
    """Open the synthetic samples of a split."""
    return SyntheticSource(request.spec, request.split)


class SyntheticSource:
    """Give samples with labels from a planted teacher, which training and evaluation share."""

    hashed = False
    remade = None

    def __init__(self, spec: DLRMJobSpec, split: str) -> None:
        synthetic, seed = spec.data.synthetic, spec.training.seed
        self._split, self._spec, self._features = split, synthetic, len(spec.model.dense_features)
        self._counts = spec.data.dense.transform == "log1p"
        self.num_samples = synthetic.samples if split == "train" else synthetic.eval_samples
        self._histogram = read_histogram(synthetic.reuse_histogram) if synthetic.reuse_histogram else None
        self._draws = _draws(spec, self._histogram, split)
        self._weighted = any(draws.weight_key is not None for draws in self._draws)
        self._dense_keys = [stream_key(seed, split, "dense", number) for number in range(self._features)]
        self._noise_key, self._label_key = (stream_key(seed, split, what) for what in ("noise", "label"))
        self._teacher = self._fitted_teacher(spec)

    @property
    def fingerprint(self) -> Fingerprint:
        """Return what samples depend on besides model and seed: a histogram by its content, not its path."""
        ids = {"alpha": self._spec.alpha} if self._histogram is None else {"shares": self._histogram.shares.tolist()}
        if _is_open(self._spec):
            ids |= {"idsPerRow": self._spec.ids_per_row, "drift": self._spec.drift}
        return {"format": "synthetic", **ids, "noise": self._spec.noise, "positiveRate": self._spec.positive_rate}

    def where(self, sample_id: int) -> str:
        """Return the sample's split and number."""
        return f"synthetic {self._split} sample {sample_id}"

    def rest(self) -> None:
        """Do nothing."""

    close = rest

    def problem(self, sample_id: int) -> str:
        """Refuse: every sample is good."""
        raise AssertionError(self.where(sample_id))

    def batches(self, slices: Sequence[Ints], ahead: Ints | None = None) -> list[RawRows]:  # noqa: ARG002
        """Compute the samples of some batches."""
        return [self.rows(each) for each in slices]

    def rows(self, sample_ids: Ints) -> RawRows:
        """Compute some samples."""
        counters = sample_ids.astype(np.uint64)
        hidden, all_lengths, ids, weights = self._hidden(counters)
        noise = self._spec.noise * gaussian(random_bits(self._noise_key, counters))
        chances = sigmoid(self._teacher.logits(hidden) + noise)
        labels = uniform(random_bits(self._label_key, counters)) < chances
        return RawRows(
            dense=self._observed(hidden.dense),
            labels=labels.astype(np.float32),
            lengths=all_lengths,
            ids=np.concatenate(ids),
            weights=np.concatenate(weights) if self._weighted else None,
        )

    def _fitted_teacher(self, spec: DLRMJobSpec) -> Teacher:
        probe = np.arange(_PROBE_SAMPLES, dtype=np.uint64)
        if self._spec.drift:
            # Some time of the epoch has other ids than the rest, and a teacher fitted on them another bias.
            if self._split != "train":
                return SyntheticSource(spec, "train")._teacher
            probe = probe * np.uint64(self.num_samples) // np.uint64(_PROBE_SAMPLES)
        hidden = self._hidden(probe)[0]
        return Teacher.fitted(spec.training.seed, hidden, self._spec.noise, self._spec.positive_rate)

    def _hidden(
        self, counters: NDArray[np.uint64]
    ) -> tuple[Hidden, NDArray[np.int32], list[Ints], list[NDArray[np.float32]]]:
        """Return also bag sizes (F, n), and by feature ids and weights, the latter if any feature has some."""
        shape = (len(self._draws), counters.size)
        effects, factors, all_lengths = np.empty(shape), np.empty(shape), np.empty(shape, dtype=np.int32)
        ids: list[Ints] = []
        weights: list[NDArray[np.float32]] = []
        for number, draws in enumerate(self._draws):
            lengths = all_lengths[number] = draws.lengths(counters)
            lookups = draws.lookups(counters, lengths)
            rows = draws.ids(lookups)
            first, second = (_signed(random_bits(key, rows)) for key in draws.effect_keys)
            if self._weighted:
                weights.append(draws.weights(lookups))
                first, second = first * weights[number], second * weights[number]
            effects[number] = _bag_means(first, lengths)
            factors[number] = _bag_means(second, lengths)
            ids.append(rows.view(np.int64))
        dense = np.empty((counters.size, self._features))
        for column, key in enumerate(self._dense_keys):
            dense[:, column] = _signed(random_bits(key, counters))
        return Hidden(effects, factors, dense), all_lengths, ids, weights

    def _observed(self, latent: NDArray[np.float64]) -> NDArray[np.float32]:
        """Return the latent values, or heavy-tailed counts that grow with them if log1p follows."""
        if not self._counts:
            return latent.astype(np.float32)
        shares = latent / (2.0 * np.sqrt(3.0)) + 0.5
        return np.asarray(np.floor(4.0 * shares / (1.0 + 2.0**-10 - shares)), dtype=np.float32)


def _draws(spec: DLRMJobSpec, histogram: ReuseHistogram | None, split: str) -> list[_Draws]:
    tables, seed, synthetic = spec.model.all_tables(), spec.training.seed, spec.data.synthetic
    is_open = [_is_open(synthetic) and table.embedding.hash != "none" for table in tables]
    ids = [
        max(1, round(table.rows * synthetic.ids_per_row)) if own else table.rows
        for table, own in zip(tables, is_open, strict=True)
    ]
    popularity = {
        count: histogram.popularity(count) if histogram else Popularity.zipf(count, synthetic.alpha)
        for count in set(ids)
    }
    virtual_shards = spec.virtual_shards if split == "train" else 0
    found = []
    for feature in spec.model.all_features():
        table = tables[feature.table]
        # Draws of a table's first column are named by the table alone, those of further ones by table and column.
        name = (table.name,) if feature.column == table.sources[0] else (table.name, feature.column)
        draws = _Draws(
            table=table,
            popularity=popularity[ids[feature.table]],
            scatter=Scatter.of(table.rows, stream_key(seed, "scatter", table.name)),
            turnover=Turnover.of(synthetic, virtual_shards, stream_key(seed, "id", table.name))
            if is_open[feature.table]
            else None,
            length_key=stream_key(seed, split, "length", *name),
            step_key=stream_key(seed, split, "step", *name),
            place_key=stream_key(seed, split, "place", *name),
            weight_key=stream_key(seed, split, "weight", *name) if feature.weights else None,
            effect_keys=(stream_key(seed, "first", table.name), stream_key(seed, "second", table.name)),
        )
        found.append(draws)
    return found


def _is_open(synthetic: SyntheticSpec) -> bool:
    """Return whether ids of tables that hash them are not their rows."""
    return synthetic.drift > 0 or synthetic.ids_per_row != 1


def _bag_means(values: NDArray[np.float64], lengths: NDArray[np.int32]) -> NDArray[np.float64]:
    """Return the mean of each bag's values (n,); 0 for an empty bag."""
    if values.size == lengths.size and (lengths == 1).all():
        return values
    bags = np.repeat(np.arange(lengths.size), lengths)
    sums = np.bincount(bags, weights=values, minlength=lengths.size)
    return np.asarray(sums / np.maximum(lengths, 1))
