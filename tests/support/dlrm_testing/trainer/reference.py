"""Embedding tables in float64, bag by bag and row by row: what the sharded, fused ones must agree with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.model import ModelSpec
from dlrm_api.training import CommunicationSpec, RowOptimizerSpec, RowRegularizerSpec
from dlrm_checkpointer.types import ShardId
from dlrm_trainer.data import Batch
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import EmbeddingOptions, Embeddings, Placement
from dlrm_trainer.embedding.checkpoint import ResidentPart

EPS = 1e-8
LONGEST = 400
"""Longer bags would take float32 sums too far from those in float64."""
Floats = NDArray[np.float64]
Bag = list[tuple[int, float]]
"""Ids with their weights."""


def global_batch(model: ModelSpec, samples: int, seed: int) -> list[list[Bag]]:
    """Random bags of each feature, shorter than ``maxLookups`` and ``LONGEST``; some are empty, some ids repeat.

    Features without weights have weights of 1.
    """
    generator, tables = np.random.default_rng(seed), model.all_tables()
    found = []
    for feature in model.all_features():
        table, bags = tables[feature.table], []
        for _ in range(samples):
            ids = generator.integers(0, table.rows, generator.integers(0, min(table.max_lookups, LONGEST))).tolist()
            weights = (
                generator.normal(size=len(ids)).astype(np.float32).tolist() if feature.weights else [1.0] * len(ids)
            )
            bags.append(list(zip(ids, weights, strict=True)))
        found.append(bags)
    return found


def slice_of(model: ModelSpec, features: list[list[Bag]], cuts: Sequence[int], rank: int) -> Batch:
    """One rank's samples ``cuts[rank]`` to ``cuts[rank + 1]`` of a global batch."""
    start, stop = cuts[rank], cuts[rank + 1]
    mine = [bags[start:stop] for bags in features]
    lookups = [lookup for bags in mine for bag in bags for lookup in bag]
    weighted = any(feature.weights for feature in model.all_features())
    return Batch(
        number=0,
        sample_ids=torch.arange(start, stop),
        dense=torch.zeros(stop - start, 0),
        labels=torch.zeros(stop - start),
        lengths=torch.tensor([[len(bag) for bag in bags] for bags in mine], dtype=torch.int32).view(len(mine), -1),
        values=torch.tensor([row for row, _ in lookups], dtype=torch.int64),
        weights=torch.tensor([weight for _, weight in lookups], dtype=torch.float32) if weighted else None,
    )


@dataclass
class DenseTables:
    """Weights and row states of whole tables."""

    model: ModelSpec
    weights: list[Floats]
    states: list[Floats]
    """(rows, blocks) of each table."""
    touched: list[set[int]]

    @classmethod
    def start(cls, model: ModelSpec) -> DenseTables:
        """Weights that differ from row to row and column to column."""
        tables = model.all_tables()
        weights = [
            np.cos(np.arange(table.rows * table.dim, dtype=np.float64) + 7 * number).reshape(table.rows, table.dim)
            for number, table in enumerate(tables)
        ]
        states = [np.zeros((table.rows, len(table.block_edges) - 1)) for table in tables]
        return cls(model, weights, states, [set() for _ in tables])

    def step(self, features: list[list[Bag]], rate: float) -> Floats:
        """Pooled rows, then one row-wise Adagrad step for the loss ``sum(pooled ** 2) / 2``."""
        tables, columns = self.model.all_tables(), []
        gradients = [np.zeros_like(weight) for weight in self.weights]
        found: list[set[int]] = [set() for _ in tables]
        for feature, bags in zip(self.model.all_features(), features, strict=True):
            table, weight = tables[feature.table], self.weights[feature.table]
            pooled = np.zeros((len(bags), table.dim))
            for output, bag in zip(pooled, bags, strict=True):
                share = 1.0 / max(len(bag), 1) if table.pooling == "mean" else 1.0
                for row, factor in bag:
                    output += share * factor * weight[row]
                for row, factor in bag:
                    gradients[feature.table][row] += share * factor * output
                    found[feature.table].add(row)
            columns.append(pooled)
        for number, table in enumerate(tables):
            self.touched[number] |= found[number]
            for row in found[number]:
                for block, (first, last) in enumerate(pairwise(table.block_edges)):
                    gradient = gradients[number][row, first:last]
                    self.states[number][row, block] += np.mean(gradient**2)
                    factor = rate / (np.sqrt(self.states[number][row, block]) + EPS)
                    self.weights[number][row, first:last] -= factor * gradient
        return np.concatenate(columns, axis=1)


@dataclass(frozen=True)
class RankState:
    """Hold what one rank saw and owned."""

    features: list[Floats]
    parts: list[tuple[ShardId, NDArray[np.float32], NDArray[np.float32]]]
    """Weights and state of each part; those of data-parallel tables last."""
    changed: list[tuple[ShardId, NDArray[np.int64]]]
    """Changed rows of each part that the rank saves."""
    replicas: int
    calls: list[int]
    """Collectives of each step."""
    bytes_sent: dict[str, int]


def train_sharded(
    collectives: Collectives,
    model: ModelSpec,
    placement: Placement,
    cuts: list[list[int]],
    samples: list[int],
    rates: list[float],
    communication: CommunicationSpec | None = None,
    regularizer: RowRegularizerSpec | None = None,
    ranks_per_node: int = 1,
) -> RankState:
    """Run the steps of ``DenseTables.step`` on one rank of a gang, with a lookup for evaluation after each."""
    options = EmbeddingOptions(
        optimizer=RowOptimizerSpec(eps=EPS),
        seed=0,
        global_batch_size=64,
        tier_dir=None,
        communication=communication or CommunicationSpec(),
        ranks_per_node=ranks_per_node,
    )
    embeddings = Embeddings(placement, collectives, options)
    start = DenseTables.start(model)
    numbers = {table.name: number for number, table in enumerate(model.all_tables())}
    for part in embeddings.local:
        assert isinstance(part, ResidentPart)
        shard = part.shard
        whole = start.weights[numbers[shard.table]]
        part.weight.copy_(
            torch.from_numpy(whole[shard.row_start : shard.row_end, shard.column_start : shard.column_end])
        )
    buffer = torch.zeros(embeddings.gradient_elements)
    features, calls = [], []
    for step, rate in enumerate(rates):
        before = collectives.calls.total()
        batch = slice_of(model, global_batch(model, samples[step], seed=step), cuts[step], collectives.rank)
        pooled = embeddings.pool(embeddings.prepare(embeddings.send(batch).result(), updates=True))
        found = embeddings.features(pooled)
        # The gradient of the loss sum(features ** 2) / 2.
        gradients = embeddings.send_gradients(pooled, found, buffer)
        embeddings.update(gradients, rate, regularizer)
        collectives.all_reduce(buffer)
        embeddings.update_replicated(gradients, buffer, rate, regularizer)
        features.append(found.detach().double().numpy())
        calls.append(collectives.calls.total() - before)
        cut = [0, *[5] * collectives.world_size]
        other = slice_of(model, global_batch(model, 5, seed=1_000 + step), cut, collectives.rank)
        embeddings.features(embeddings.pool(embeddings.prepare(embeddings.send(other).result(), updates=False)))
    parts = [
        (part.shard, part.weight.numpy().copy(), part.state.numpy().copy())
        for part in embeddings.local
        if isinstance(part, ResidentPart)
    ]
    changed = [(part.shard, part.dirty.all()) for part in embeddings.saved]
    return RankState(features, parts, changed, len(embeddings.replicated.parts), calls, dict(collectives.bytes_sent))
