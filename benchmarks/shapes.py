"""The model that is measured, plans for it by hand, and its batches: Criteo's shape, whatever the size."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_api.job import DLRMJob, parse_job
from dlrm_api.model import ModelSpec
from dlrm_api.plan import parse_plan
from dlrm_kernels.hashing import random_bits, stream_key, uniform
from dlrm_trainer.data import Batch
from dlrm_trainer.data.synthetic import Popularity, Scatter, read_histogram
from dlrm_trainer.embedding import Placement, place

RATE = 0.001
"""Learning rate of rows and of dense parameters: small, so that two sides that round apart stay together."""
TRACES = ("zipf-1.05", "production-like")
HISTOGRAM = "meta-embedding-locality-2021.txt"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Describe the size of a model and its batches; by default that of Criteo's data, one lookup a table."""

    tables: int = 26
    rows: int = 400_000
    dim: int = 64
    batch: int = 2_048
    pooling: int = 1
    """Ids in each bag."""
    precision: str = "fp32"
    codec: str = "fp32"
    """Of pooled rows and their gradients."""
    blocks: int = 1
    """Column blocks of each table."""
    hash: str = "none"
    """From ids to rows."""
    keep: float | None = None
    """Share of the rows' bytes that tables keep; None: all rows have all columns."""
    features: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256, 1)
    row_optimizer: str = "rowwise-adagrad"
    dense_optimizer: str = "adagrad"
    seed: int = 7

    @property
    def table_bytes(self) -> int:
        """Bytes of all rows, without state."""
        return self.tables * self.rows * self.dim * 4

    def without_width(self) -> Shape:
        """Return the narrowest model with the same lookups."""
        return replace(self, dim=4, bottom=(4,), top=(1,))


def quick(shape: Shape) -> Shape:
    """Return a model small enough to try the program."""
    return replace(shape, tables=4, rows=20_000, batch=256, bottom=(32, shape.dim), top=(32, 1))


def job_of(shape: Shape) -> DLRMJob:
    """Return the job of a shape; its data section is not read."""
    rates = {"learningRate": RATE}
    table: dict[str, Any] = {
        "rows": shape.rows, "dim": shape.dim, "maxLookups": shape.pooling, "embedding": {"hash": shape.hash}
    }  # fmt: skip
    if shape.keep is not None:
        table["embedding"]["dimension"] = {"keepBytes": shape.keep}
    if shape.blocks > 1:
        table["columnBlock"] = shape.dim // shape.blocks
    model = {
        "denseFeatures": [f"I{number + 1}" for number in range(shape.features)],
        "bottomMlp": list(shape.bottom),
        "topMlp": list(shape.top),
        "precision": shape.precision,
        "tableGroups": [{"name": "table", "count": shape.tables, "template": table}],
    }
    training = {
        "rowOptimizer": {"kind": shape.row_optimizer, **rates},
        "denseOptimizer": {"kind": shape.dense_optimizer, **rates},
        "seed": shape.seed,
        "communication": {"forward": shape.codec, "backward": shape.codec},
    }
    data = {
        "format": "synthetic",
        "synthetic": {"samples": shape.batch, "evalSamples": 0},
        "globalBatchSize": shape.batch,
        "virtualShards": 1,
    }
    spec = {"model": model, "data": data, "training": training, "checkpoint": {"uri": "file:///nowhere"}}
    return parse_job({"metadata": {"name": "measured"}, "spec": spec})


def placement_of(
    shape: Shape, tiers: Sequence[str], cache: float, policy: str = "lru", lookahead: int = 1, slots: str = "ddr"
) -> Placement:
    """Place all tables on one rank: resident without ``tiers``, else in slots for a share of the rows over tiers.

    Args:
        shape: of the model.
        tiers: below the slots.
        cache: share of the rows that the slots hold.
        policy: of the slots.
        lookahead: batches.
        slots: tier of the slots.
    """
    model = job_of(shape).spec.model
    stacks: list[dict[str, Any]] = []
    for table in model.all_tables() if tiers else ():
        levels = [{"tier": slots, "rows": max(1, round(cache * table.held_rows))}]
        levels += [{"tier": tier, "rows": table.held_rows} for tier in tiers]
        stacks.append({"levels": levels, "policy": policy, "ways": 0})
    return on_one_rank(model, stacks, lookahead)


def on_one_rank(model: ModelSpec, stacks: Sequence[Mapping[str, Any]] = (), lookahead: int = 0) -> Placement:
    """Place all tables whole on one rank: resident without ``stacks``, else over the tiers of their stacks."""
    tables = []
    for number, table in enumerate(model.all_tables()):
        buckets = 0 if table.key_buckets is None else table.key_buckets.count
        extent = {"rowStart": 0, "rowEnd": buckets or table.rows, "columnStart": 0, "columnEnd": table.dim}
        shard = {"rank": 0, "kind": "table", **extent, "tiers": stacks[number] if stacks else {}}
        tables.append({"name": table.name, "columnBlocks": [0, table.dim], "buckets": buckets, "ranges": [shard]})
    document = {
        "worldSize": 1,
        "processesPerNode": 1,
        "ranks": [{"rank": 0, "node": 0, "bytesPerTier": {}}],
        "tables": tables,
        "lookahead": lookahead if stacks else 0,
        "handoffBytes": [2**26],
    }
    return place(model, parse_plan(json.dumps(document)), 1)


def split_placement(shape: Shape, ranks: int, sharding: str) -> Placement:
    """Split every table in memory over some ranks: by table, row or column; mixed: in turn."""
    model = job_of(shape).spec.model
    tables = []
    for number, table in enumerate(model.all_tables()):
        kind = ("table", "row", "column")[number % 3] if sharding == "mixed" else sharding
        count = 1 if kind == "table" else ranks
        shards = []
        for part in range(count):
            rows, columns = (0, shape.rows), (0, shape.dim)
            if kind == "row":
                rows = (shape.rows * part // count, shape.rows * (part + 1) // count)
            elif kind == "column":
                columns = (shape.dim * part // count, shape.dim * (part + 1) // count)
            extent = {"rowStart": rows[0], "rowEnd": rows[1], "columnStart": columns[0], "columnEnd": columns[1]}
            shards.append({"rank": number % ranks if kind == "table" else part, "kind": kind, **extent})
        tables.append({"name": table.name, "columnBlocks": list(table.block_edges), "ranges": shards})
    document = {
        "worldSize": ranks,
        "processesPerNode": ranks,
        "ranks": [{"rank": rank, "node": 0, "bytesPerTier": {}} for rank in range(ranks)],
        "tables": tables,
        "handoffBytes": [2**26],
    }
    return place(model, parse_plan(json.dumps(document)), ranks)


def popularity_of(trace: str, rows: int, data_dir: Path) -> Popularity:
    """Return how often the rows of a table are looked up.

    Raises:
        NoInputError: the histogram is not in ``data_dir``.
    """
    if trace == "zipf-1.05":
        return Popularity.zipf(rows, 1.05)
    return read_histogram(str((data_dir / HISTOGRAM).resolve())).popularity(rows)


class Batches:
    """Batches of a shape, each a pure function of its number; hot rows lie all over their table."""

    def __init__(self, shape: Shape, popularity: Popularity) -> None:
        self._shape, self._popularity = shape, popularity
        names = [str(number) for number in range(shape.tables)]
        self._scatters = [Scatter.of(shape.rows, stream_key(shape.seed, "scatter", name)) for name in names]
        self._keys = [(stream_key(shape.seed, "step", name), stream_key(shape.seed, "place", name)) for name in names]
        self._other = stream_key(shape.seed, "dense")

    def draw(self, start: int, stop: int) -> list[Batch]:
        """Batches [start, stop)."""
        return [self._batch(number) for number in range(start, stop)]

    def _batch(self, number: int) -> Batch:
        shape = self._shape
        samples = np.arange(number * shape.batch, (number + 1) * shape.batch, dtype=np.int64)
        lookups = shape.batch * shape.pooling
        drawn_at = np.arange(number * lookups, (number + 1) * lookups, dtype=np.uint64)
        values = np.empty((shape.tables, lookups), np.uint64)
        for table, (scatter, (step, where)) in enumerate(zip(self._scatters, self._keys, strict=True)):
            values[table] = scatter(self._popularity.ranks(random_bits(step, drawn_at), random_bits(where, drawn_at)))
        width = shape.features + 1
        size = width * shape.batch
        cells = np.arange(number * size, (number + 1) * size, dtype=np.uint64)
        drawn = uniform(random_bits(self._other, cells)).reshape(shape.batch, width).astype(np.float32)
        return Batch(
            number=number,
            sample_ids=torch.from_numpy(samples),
            dense=torch.from_numpy(drawn[:, 1:].copy()),
            labels=torch.from_numpy((drawn[:, 0] < 0.25).astype(np.float32)),
            lengths=torch.full((shape.tables, shape.batch), shape.pooling, dtype=torch.int32),
            values=torch.from_numpy(values.view(np.int64).reshape(-1)),
        )


def slice_of(batch: Batch, rank: int, ranks: int) -> Batch:
    """Return the samples of one rank, with bags of one length."""
    samples, tables = len(batch.labels), len(batch.lengths)
    part = slice(samples * rank // ranks, samples * (rank + 1) // ranks)
    return Batch(
        number=batch.number,
        sample_ids=batch.sample_ids[part],
        dense=batch.dense[part],
        labels=batch.labels[part],
        lengths=batch.lengths[:, part].contiguous(),
        values=batch.values.view(tables, samples, -1)[:, part].reshape(-1),
    )
