"""Rows that ids of unique tables share while they have none of their own, against sums in plain Python."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.keys import KEY_END
from dlrm_api.model import ModelSpec
from dlrm_api.plan import Plan, RankPlan, ShardRange, TablePlan, TierShare
from dlrm_api.training import RowOptimizerSpec
from dlrm_testing.trainer.reference import Bag, slice_of
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import EmbeddingOptions, Embeddings, place

SEED, BUCKETS, SHARED, DIM, RATE, SAMPLES = 3, 4, 12, 8, 0.25, 9
FIRST_KEYS = [bucket * 2**63 // BUCKETS for bucket in range(BUCKETS)]
EDGES = [*FIRST_KEYS, FIRST_KEYS[1] - 1, FIRST_KEYS[2] - 1, KEY_END - 1]
Floats = NDArray[np.float64]


def model() -> ModelSpec:
    """No id gets a row in the first batch; two features with weights, and means."""
    options = {"hash": "unique", "buckets": BUCKETS, "admission": {"count": 2}, "unknown": "shared"}
    table = {"name": "ids", "rows": 40, "dim": DIM, "maxLookups": 4, "pooling": "mean", "features": ["a", "b"]}
    table |= {"weights": ["x", "y"], "embedding": options | {"sharedRows": SHARED}}
    return ModelSpec.model_validate({"topMlp": [1], "interaction": "dcn", "tables": [table]})


def embeddings_of(spec: ModelSpec) -> Embeddings:
    whole = ShardRange(
        rank=0, kind="table", row_start=0, row_end=BUCKETS, column_start=0, column_end=DIM, tiers=TierShare()
    )
    table = TablePlan(name="ids", column_blocks=(0, DIM), buckets=BUCKETS, ranges=(whole,))
    ranks = (RankPlan(rank=0, node=0, bytes_per_tier={}),)
    plan = Plan(world_size=1, processes_per_node=1, ranks=ranks, tables=(table,), lookahead=0, handoff_bytes=(2**26,))
    options = EmbeddingOptions(
        optimizer=RowOptimizerSpec(kind="sgd"), seed=SEED, global_batch_size=SAMPLES, tier_dir=None
    )
    return Embeddings(place(spec, plan, 1), Collectives(0, 1, lambda: ""), options)


def rows_read(key: int) -> list[int]:
    """As ``docs/format.md`` says."""
    h = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
    h ^= h >> 31
    each = SHARED // BUCKETS
    bucket = key * BUCKETS >> 63
    return [bucket * each + (half * each >> 32) for half in (h % 2**32, h >> 32)]


def test_ids_without_a_row_read_and_update_two_rows() -> None:
    spec, draw = model(), np.random.default_rng(1)
    keys = [*EDGES, *draw.integers(0, KEY_END, 30).tolist()]
    bags: list[list[Bag]] = [
        [
            [(int(draw.choice(keys)), float(np.float32(draw.normal()))) for _ in range(draw.integers(0, 5))]
            for _ in range(SAMPLES)
        ]
        for _ in range(2)
    ]
    batch = slice_of(spec, bags, [0, SAMPLES], 0)
    embeddings = embeddings_of(spec)
    for part in embeddings.local:
        part.start(SEED)
    (shared,) = (part for part in embeddings.local if part.table.name == "ids:shared")
    before = shared.read_block(0, SHARED)[0].copy()
    gradient = torch.from_numpy(draw.normal(size=(SAMPLES, 2 * DIM)).astype(np.float32))

    evaluated = embeddings.features(embeddings.pool(embeddings.prepare(embeddings.send(batch).result(), updates=False)))
    pooled = embeddings.pool(embeddings.prepare(embeddings.send(batch).result(), updates=True))
    features = embeddings.features(pooled)
    embeddings.update(embeddings.send_gradients(pooled, gradient, torch.zeros(0)), RATE)

    after, _ = shared.read_block(0, SHARED)
    wanted, expected = before.astype(np.float64), np.zeros((SAMPLES, 2 * DIM))
    updated: set[int] = set()
    columns = list(pairwise((0, DIM, 2 * DIM)))
    for (start, stop), samples in zip(columns, bags, strict=True):
        for sample, bag in enumerate(samples):
            for key, weight in bag:
                for row in rows_read(key):
                    expected[sample, start:stop] += weight / len(bag) * before[row]
                    wanted[row] -= RATE * weight / len(bag) * gradient[sample, start:stop].numpy()
                    updated.add(row)
    np.testing.assert_allclose(features.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(features, evaluated)
    np.testing.assert_allclose(after, wanted, rtol=1e-4, atol=1e-5)
    assert shared.dirty.all().tolist() == sorted(updated)
    assert {row * BUCKETS // SHARED for row in updated} == set(range(BUCKETS))
    embeddings.close()
