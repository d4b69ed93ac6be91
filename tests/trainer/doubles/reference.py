"""Embedding tables in float64, bag by bag and row by row: what the sharded, fused ones must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.model import TableSpec
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding import Embeddings, OwnedOptions, Placement
from dlrm_trainer.embedding.rows import ResidentTable

EPS = 1e-8
Floats = NDArray[np.float64]


def global_batch(tables: Sequence[TableSpec], samples: int, seed: int) -> list[list[list[int]]]:
    """Random bags: the ids of each sample of each table; some bags are empty, some ids repeat."""
    generator = np.random.default_rng(seed)
    return [
        [generator.integers(0, table.rows, generator.integers(0, 4)).tolist() for _ in range(samples)]
        for table in tables
    ]


def slice_of(bags: list[list[list[int]]], cuts: Sequence[int], rank: int) -> Batch:
    """One rank's samples ``cuts[rank]`` to ``cuts[rank + 1]`` of a global batch."""
    start, stop = cuts[rank], cuts[rank + 1]
    mine = [table[start:stop] for table in bags]
    lengths = torch.tensor([[len(bag) for bag in table] for table in mine], dtype=torch.int32).view(len(bags), -1)
    values = [row for table in mine for bag in table for row in bag]
    return Batch(
        number=0,
        sample_ids=torch.arange(start, stop),
        dense=torch.zeros(stop - start, 0),
        labels=torch.zeros(stop - start),
        lengths=lengths,
        values=torch.tensor(values, dtype=torch.int64),
    )


@dataclass
class DenseTables:
    """Weights and row states of whole tables."""

    tables: Sequence[TableSpec]
    weights: list[Floats]
    states: list[Floats]
    touched: list[set[int]]

    @classmethod
    def start(cls, tables: Sequence[TableSpec]) -> DenseTables:
        """Weights that differ from row to row and column to column."""
        weights = [
            np.cos(np.arange(table.rows * table.dim, dtype=np.float64) + 7 * number).reshape(table.rows, table.dim)
            for number, table in enumerate(tables)
        ]
        states = [np.zeros(table.rows) for table in tables]
        return cls(tables, weights, states, [set() for _ in tables])

    def step(self, bags: list[list[list[int]]], rate: float) -> Floats:
        """Pooled rows, then one row-wise Adagrad step for the loss ``sum(pooled ** 2) / 2``."""
        columns = []
        for table, weight, state, touched, samples in zip(
            self.tables, self.weights, self.states, self.touched, bags, strict=True
        ):
            shares = [1.0 / max(len(bag), 1) if table.pooling == "mean" else 1.0 for bag in samples]
            pooled = np.array([share * weight[bag].sum(axis=0) for bag, share in zip(samples, shares, strict=True)])
            gradient = np.zeros_like(weight)
            for bag, share, output in zip(samples, shares, pooled, strict=True):
                np.add.at(gradient, bag, share * output)
            for row in {row for bag in samples for row in bag}:
                touched.add(row)
                state[row] += np.mean(gradient[row] ** 2)
                weight[row] -= rate * gradient[row] / (np.sqrt(state[row]) + EPS)
            columns.append(pooled.reshape(len(samples), table.dim))
        return np.concatenate(columns, axis=1)


@dataclass(frozen=True)
class RankState:
    """What one rank saw and held."""

    features: list[Floats]
    weights: dict[int, NDArray[np.float32]]
    states: dict[int, NDArray[np.float32]]
    updated: dict[int, NDArray[np.bool_]]
    calls: list[int]
    """Collectives of each step."""


def train_sharded(
    collectives: Collectives,
    placement: Placement,
    cuts: list[list[int]],
    samples: list[int],
    rates: list[float],
) -> RankState:
    """The steps of ``DenseTables.step`` on one rank of a gang, with a lookup for evaluation after each."""
    options = OwnedOptions(optimizer=RowOptimizerSpec(eps=EPS), seed=0, global_batch_size=64, tier_dir=None)
    embeddings = Embeddings(placement, collectives, options)
    start = DenseTables.start(placement.tables)
    for number, table in embeddings.local.items():
        assert isinstance(table, ResidentTable)
        table.weight.copy_(torch.from_numpy(start.weights[number]))
    buffer = torch.zeros(embeddings.gradient_elements)
    features, calls = [], []
    for step, rate in enumerate(rates):
        before = collectives.calls.total()
        bags = global_batch(placement.tables, samples[step], seed=step)
        prepared = embeddings.prepare(slice_of(bags, cuts[step], collectives.rank), updates=True)
        lookup = embeddings.lookup(prepared, rate)
        (lookup.features.square().sum() / 2).backward()
        rows = embeddings.send_gradients(lookup, buffer)
        collectives.all_reduce(buffer)
        embeddings.update(lookup, rows, buffer)
        features.append(lookup.features.detach().double().numpy())
        calls.append(collectives.calls.total() - before)
        other = global_batch(placement.tables, 5, seed=1_000 + step)
        cut = [0, *[5] * collectives.world_size]
        embeddings.lookup(embeddings.prepare(slice_of(other, cut, collectives.rank), updates=False), None)
    local = {number: table for number, table in embeddings.local.items() if isinstance(table, ResidentTable)}
    return RankState(
        features=features,
        weights={number: table.weight.numpy().copy() for number, table in local.items()},
        states={number: table.state[:, 0].numpy().copy() for number, table in local.items()},
        updated={number: table.updated.numpy().copy() for number, table in local.items()},
        calls=calls,
    )
