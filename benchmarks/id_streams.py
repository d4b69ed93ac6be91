"""Samples whose ids come and go, in order of time: a made-up stream with a planted teacher, and MovieLens 100K."""

from __future__ import annotations

import itertools
import runpy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import yaml
from numpy.typing import NDArray

from dlrm_trainer.data import Batch

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

MOVIELENS = Path(__file__).parents[1] / "examples" / "movielens"
SAMPLES = 300_000
DRIFTING = {"large": 50_000, "middle": 30_000, "small": 15_000}
"""Ids of the features whose ids come and go."""
STATIC = {"category": 2_500, "place": 500, "device": 50}
EXPONENT = 1.05
MEAN_LIFE = 0.35
"""Of an id, as a share of the stream."""
FIRST_BIRTH = -0.5
SLICES = 300
"""In each of them the same ids are alive."""
VECTOR = 4
PAIRS = 9
BIAS_SCALE, PAIR_SCALE = 0.7, 0.15
BASE_RATE = 0.28


@dataclass(frozen=True, kw_only=True)
class Bags:
    """Hold the ids of one feature."""

    ids: Ints
    """Of all samples, one bag after the other."""
    lengths: NDArray[np.int32]
    """(n,) ids of each bag."""


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Hold n samples in order of time, and the model that learns them."""

    name: str
    seed: int
    model: dict[str, Any]
    """``spec.model``, with a row for each id of every table."""
    training: dict[str, Any]
    """``spec.training``."""
    unbounded: tuple[str, ...]
    """Tables whose ids come and go."""
    batch: int
    dense: Floats
    """(n, dense features)."""
    labels: Floats
    """(n,)."""
    features: dict[str, Bags]
    """By table, in the model's order."""
    maintenance_steps: int | Literal["auto"] = "auto"
    """Of unique tables."""

    def batches(self) -> list[Batch]:
        """Return the batches, with ids in place of rows; a short last one is left out."""
        ends = {name: np.concatenate([[0], np.cumsum(bags.lengths)]) for name, bags in self.features.items()}
        found = []
        for number in range(len(self.labels) // self.batch):
            part = slice(number * self.batch, (number + 1) * self.batch)
            ids = [bags.ids[ends[name][part.start] : ends[name][part.stop]] for name, bags in self.features.items()]
            found.append(
                Batch(
                    number=number,
                    sample_ids=torch.arange(part.start, part.stop),
                    dense=torch.from_numpy(self.dense[part]),
                    labels=torch.from_numpy(self.labels[part]),
                    lengths=torch.from_numpy(np.stack([bags.lengths[part] for bags in self.features.values()])),
                    values=torch.from_numpy(np.concatenate(ids)),
                )
            )
        return found


def drifting(seed: int, samples: int = SAMPLES) -> Stream:
    """Draw a stream; most ids of three features live for a part of it only.

    Popularity falls with the rank among all ids of a feature. A label's log odds are the sum of a bias for each id and
    of the products of nine pairs of the ids' vectors.
    """
    draw = np.random.default_rng(seed)
    sizes = DRIFTING | STATIC
    ids = {name: _draw_ids(draw, count, samples, name in DRIFTING) for name, count in sizes.items()}
    logits = np.zeros(samples)
    vectors = {}
    for name, count in sizes.items():
        logits += draw.normal(0, BIAS_SCALE, count)[ids[name]]
        vectors[name] = draw.normal(0, 1, (count, VECTOR))[ids[name]]
    for first, second in list(itertools.combinations(sizes, 2))[:PAIRS]:
        logits += PAIR_SCALE * (vectors[first] * vectors[second]).sum(axis=1)
    return Stream(
        name="drifting",
        seed=seed,
        model={
            "denseFeatures": [],
            "interaction": "dcn",
            "crossLayers": 1,
            "crossRank": 16,
            "topMlp": [32, 1],
            "tables": [
                {"name": name, "rows": count, "dim": 16, "initializer": {"kind": "zero"}}
                for name, count in sizes.items()
            ],
        },
        training=_training(0.05, seed),
        unbounded=tuple(DRIFTING),
        batch=1_024,
        dense=np.empty((samples, 0), np.float32),
        labels=(draw.random(samples) < _with_base_rate(logits)).astype(np.float32),
        features={name: Bags(ids=each, lengths=np.ones(samples, np.int32)) for name, each in ids.items()},
    )


def _draw_ids(draw: np.random.Generator, count: int, samples: int, comes_and_goes: bool) -> Ints:
    popularity = draw.permutation(np.arange(1, count + 1) ** -EXPONENT)
    birth, life = draw.uniform(FIRST_BIRTH, 1, count), draw.exponential(MEAN_LIFE, count)
    parts = []
    for part in np.array_split(np.arange(samples), SLICES):
        now = part.mean() / samples
        alive = (birth <= now) & (now < birth + life) if comes_and_goes else np.full(count, True)
        edges = np.cumsum(popularity * alive)
        parts.append(np.searchsorted(edges, draw.random(len(part)) * edges[-1], side="right"))
    return np.concatenate(parts)


def _with_base_rate(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return probabilities of the log odds, shifted until their mean is the base rate."""
    low, high = -20.0, 20.0
    for _ in range(60):
        shift = (low + high) / 2
        chances: NDArray[np.float64] = 1 / (1 + np.exp(-(logits + shift)))
        low, high = (shift, high) if chances.mean() < BASE_RATE else (low, shift)
    return chances


def movielens(seed: int, folder: Path) -> Stream:
    """Read the ratings of MovieLens 100K in order of time, as ``examples/movielens`` does; ``seed``: of the model.

    Raises:
        OSError: a file of the data is not in the folder.
    """
    table = runpy.run_path(str(MOVIELENS / "prepare.py"))["samples"](folder)
    model = yaml.safe_load((MOVIELENS / "job.yaml").read_text())["spec"]["model"]
    features = {}
    for each in model["tables"]:
        column = table[each["name"]].combine_chunks()
        nested = each["name"] == "genres"
        ids = column.flatten() if nested else column
        lengths = column.value_lengths().to_numpy() if nested else np.ones(len(column), np.int32)
        features[each["name"]] = Bags(ids=ids.to_numpy().astype(np.int64), lengths=lengths.astype(np.int32))
    dense = np.stack([table[name].to_numpy() for name in model["denseFeatures"]], axis=1)
    return Stream(
        name="ml-100k",
        seed=seed,
        model=model,
        training=_training(0.02, seed),
        unbounded=("user", "item"),
        batch=512,
        dense=np.log1p(np.maximum(np.nan_to_num(dense), 0)).astype(np.float32),
        labels=table["label"].to_numpy().astype(np.float32),
        features=features,
    )


def _training(row_rate: float, seed: int) -> dict[str, Any]:
    return {
        "rowOptimizer": {"kind": "rowwise-adagrad", "learningRate": row_rate},
        "denseOptimizer": {"kind": "adagrad", "learningRate": 0.02},
        "seed": seed,
    }
