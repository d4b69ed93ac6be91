"""A step of one rank's tables among simulated peers: its time on the host, its messages and its collectives."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.measure import Result, tell
from benchmarks.peers import SimulatedPeers, constant, zeros
from dlrm_api.model import ModelSpec
from dlrm_api.plan import parse_plan
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.data import Batch
from dlrm_trainer.embedding import EmbeddingOptions, Embeddings, Placement, place

TABLES, ROWS = 1_000, 1_000
WIDTHS = 8, 16, 24, 32, 48, 64, 96, 128
MAX_HOST_MS = {8: 2.0, 128: 5.0, 1_024: 15.0}
"""By number of ranks: host time of a step beyond kernels and bytes, on one core."""
REPLICAS, REPLICA_ROWS, REPLICA_RANKS, MAX_REPLICA_MS = 700, 16, 8, 3.0
"""Of a step of data-parallel tables: few rows, since each step clears the gradient of all."""
SAMPLES = 1
"""Of each rank: the fewest that let every message hold something, so that kernels and bytes take next to nothing."""


def placement_of(ranks: int, *, replicated: bool) -> Placement:
    """Place the tables whole, in turn, over the ranks, or each on every rank."""
    count, rows = (REPLICAS, REPLICA_ROWS) if replicated else (TABLES, ROWS)
    table = [{"name": f"t{n}", "rows": rows, "dim": WIDTHS[n % len(WIDTHS)]} for n in range(count)]
    model = ModelSpec.model_validate(
        {"denseFeatures": ["a"], "bottomMlp": [8], "topMlp": [8, 1], "interaction": "dcn", "tables": table}
    )
    tables = [
        {
            "name": each.name,
            "columnBlocks": list(each.block_edges),
            "ranges": [
                {
                    "rank": 0 if replicated else number // len(WIDTHS) % ranks if ranks < TABLES else number,
                    "kind": "data" if replicated else "table",
                    "rowStart": 0,
                    "rowEnd": each.rows,
                    "columnStart": 0,
                    "columnEnd": each.dim,
                }
            ],
        }
        for number, each in enumerate(model.all_tables())
    ]
    document = {
        "worldSize": ranks,
        "processesPerNode": 8,
        "ranks": [{"rank": rank, "node": rank // 8, "bytesPerTier": {}} for rank in range(ranks)],
        "tables": tables,
        "handoffBytes": [2**26] * (ranks // 8),
    }
    return place(model, parse_plan(json.dumps(document)), ranks)


def replica_time(is_quick: bool) -> Iterator[Result]:
    """Time steps of data-parallel tables; see ``host_time``."""
    return host_time(REPLICA_RANKS, is_quick, replicated=True)


def host_time(ranks: int, is_quick: bool, *, replicated: bool = False) -> Iterator[Result]:
    """Time steps of rank 0 on one thread; every rank has one sample, with one id in each bag."""
    torch.set_num_threads(1)
    placement = placement_of(ranks, replicated=replicated)
    tables, rows = len(placement.tables), placement.tables[0].rows
    peers = SimulatedPeers(0, ranks)
    options = EmbeddingOptions(optimizer=RowOptimizerSpec(), seed=0, global_batch_size=ranks * SAMPLES, tier_dir=None)
    embeddings = Embeddings(placement, peers, options)
    columns = sum(len(group.columns) for group in placement.groups_on(0))
    bags = columns * ranks * SAMPLES
    draw = torch.Generator().manual_seed(0)
    header = torch.tensor([SAMPLES, columns * SAMPLES]).repeat(ranks)
    peers.script = [
        constant(header),
        constant(torch.ones(bags, dtype=torch.uint8)),
        constant(torch.randint(rows, (bags,), generator=draw, dtype=torch.int32)),
        zeros(torch.uint8),
    ]
    batches = [
        Batch(
            number=number,
            sample_ids=torch.arange(SAMPLES),
            dense=torch.zeros(SAMPLES, 1),
            labels=torch.zeros(SAMPLES),
            lengths=torch.ones(tables, SAMPLES, dtype=torch.int32),
            values=torch.randint(rows, (tables * SAMPLES,), generator=draw),
        )
        for number in range(2)
    ]
    gradient = torch.ones(SAMPLES, sum(table.dim for table in placement.tables))
    buffer = torch.zeros(embeddings.gradient_elements)

    def step(batch: Batch) -> dict[str, float]:
        marks = [time.thread_time()]
        taken = {}

        def lap(name: str) -> None:
            marks.append(time.thread_time())
            taken[name] = (marks[-1] - marks[-2]) * 1e3

        peers.begin_step()
        owned = embeddings.send(batch).result()
        lap("send_ids_ms")
        prepared = embeddings.prepare(owned, updates=True)
        lap("prepare_ms")
        pooled = embeddings.pool(prepared)
        lap("pool_and_send_ms")
        embeddings.features(pooled)
        lap("features_ms")
        gradients = embeddings.send_gradients(pooled, gradient, buffer)
        lap("send_gradients_ms")
        embeddings.update(gradients, 0.01)
        lap("update_ms")
        embeddings.update_replicated(gradients, buffer, 0.01)
        lap("update_replicated_ms")
        return taken | {"all": (marks[-1] - marks[0]) * 1e3}

    tell(f"{tables} tables on {ranks} ranks: one thread; medians of its processor time")
    for number in range(3):
        step(batches[number % 2])
    peers.messages.clear()
    peers.calls.clear()
    peers.bytes_sent.clear()
    steps = 5 if is_quick else 50
    laps = [step(batches[number % 2]) for number in range(steps)]
    embeddings.close()
    medians = {name: float(np.median([each[name] for each in laps])) for name in laps[0]}
    setting = {"ranks": ranks, "tables": tables, "widths": len(WIDTHS), "samples_per_rank": SAMPLES, "steps": steps}
    host_ms, limit = medians.pop("all"), MAX_REPLICA_MS if replicated else MAX_HOST_MS[ranks]
    yield Result(metric="host_ms", value=host_ms, limit=limit, setting=setting, measured=medians)
    counts = {f"{what}_messages": count / steps for what, count in peers.messages.items()}
    yield Result(
        metric="messages",
        value=peers.messages.total() / steps,
        setting=setting,
        measured={
            **counts,
            "collectives": peers.calls.total() / steps,
            "bytes": sum(peers.bytes_sent.values()) / steps,
        },
    )
