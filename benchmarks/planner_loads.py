"""Compare the load of the fullest rank with torchrec's planner: ``python -m benchmarks.planner_loads --hardware FILE``.

A task is a set of tables with sizes, widths, lookups and reuse of their own, drawn by a seed (the recipe of Zha et al.,
"Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost Models", MLSys 2023); how often
rows are reused comes from production histograms. Both planners may place tables whole, by rows or by columns on eight
ranks of a node, and count next to no time for messages: ours takes the times of lookups and updates from a profile of
this machine. Each rank's share of a step, lookup and update, then runs alone on one thread, ranks and plans in turn;
a plan's load is the slowest of its ranks' medians. Shares run through the trainer's kernel, which gives each column
block a part of its own, and through fbgemm's fused kernel, which takes neighbouring ones as one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import yaml
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import EmbeddingModuleShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.measure import tell
from benchmarks.planner_error import log_uniform
from dlrm_api.hardware import HardwareProfile, parse_profile
from dlrm_api.job import DLRMJobSpec, parse_job
from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels.hashing import stream_key
from dlrm_planner import plan_job
from dlrm_trainer.data.synthetic import Popularity, Scatter, read_histogram
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.table_batch import HostKernel, TableBatch, Tables

RANKS, BATCH, REPEATS = 8, 2_048, 9
"""Ranks of the node, samples of a step of all of them, and runs of each rank's share that count."""
TABLES, ROWS, LOOKUPS = (16, 64), (100_000, 1_000_000), (1, 40)
"""Ranges from which tasks and tables are drawn, ends included; rows and lookups by their logarithm."""
DIMS, PARTS = (16, 32, 64, 128), 2
"""Widths of tables, and the groups of columns that one may be split into."""
MAX_TASK_BYTES, MAX_IDS = 6 * 2**30, 2**21
"""Of the rows of a task, and of the ids of a step: larger draws are drawn again."""
HISTOGRAMS = ("meta-embedding-locality-2021.txt", "meta-embedding-locality-2022.txt")
SHARDINGS = ("table_wise", "row_wise", "column_wise")
DDR_BYTES = 2**40
"""So much that memory never decides."""
LINK_RATE, NO_TIME_S = 6e11, 1e-12
"""Bytes per second between ranks, as torchrec's planner assumes of CPUs; seconds of a packed value or a collective."""
LIMITS = (1.02, 1.05, 0.95)
"""Of the ratio: in 95 of 100 tasks, in all, and of the median."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Describe one table of a task."""

    name: str
    rows: int
    dim: int
    lookups: int
    histogram: str


@dataclass(frozen=True, kw_only=True, order=True)
class Piece:
    """Name a rectangle of a table that one rank holds."""

    table: int
    row_start: int
    row_end: int
    column_start: int
    column_end: int

    @property
    def shape(self) -> tuple[int, int]:
        """Return its rows and columns."""
        return self.row_end - self.row_start, self.column_end - self.column_start


Share = tuple[Piece, ...]
"""All that one rank holds."""


def draw_task(draw: random.Random) -> tuple[Table, ...]:
    """Return the tables of a random task."""

    def between(ends: tuple[int, int]) -> int:
        return round(log_uniform(draw, *ends))

    while True:
        tables = tuple(
            Table(
                name=f"table-{number}",
                rows=between(ROWS),
                dim=draw.choice(DIMS),
                lookups=between(LOOKUPS),
                histogram=draw.choice(HISTOGRAMS),
            )
            for number in range(draw.randint(*TABLES))
        )
        is_small = sum(table.rows * table.dim * 4 for table in tables) <= MAX_TASK_BYTES
        if is_small and sum(table.lookups for table in tables) * BATCH <= MAX_IDS:
            return tables


def read_spec(tables: Sequence[Table]) -> DLRMJobSpec:
    """Return the job of a task; tables whose replica our planner could choose are kept whole or split."""
    model = {
        "denseFeatures": ["I1"],
        "bottomMlp": [max(DIMS)],
        "topMlp": [1],
        # Next to no dense part, which torchrec's planner does not see; no other interaction takes tables of any width.
        "interaction": "dcn",
        "crossLayers": 1,
        "crossRank": 1,
        "tables": [
            {"name": each.name, "rows": each.rows, "dim": each.dim, "avgLookups": each.lookups,
             "maxLookups": each.lookups, "pooling": "sum", "columnBlock": each.dim // PARTS}
            for each in tables
        ],
    }  # fmt: skip
    data = {"format": "synthetic", "synthetic": {"samples": BATCH, "evalSamples": 0}, "globalBatchSize": BATCH}
    trainer = {"replicas": 1, "processesPerReplica": RANKS}
    body = {"model": model, "data": data, "trainer": trainer, "checkpoint": {"uri": "file:///nowhere"}}
    return parse_job({"metadata": {"name": "loads"}, "spec": body}).spec


def read_profile(file: Path) -> HardwareProfile:
    """Return a measured profile with ample memory, in which messages take next to no time: none is sent here."""
    body = yaml.safe_load(file.read_text())
    body["spec"]["tiers"]["ddr"]["bytes"] = DDR_BYTES
    body["spec"]["network"] = {"intraNodeBytesPerSecond": LINK_RATE}
    for loops in body["spec"]["loops"]:
        for times, field in (("packs", "valueSeconds"), ("collectives", "seconds")):
            loops[times] = [{**each, field: NO_TIME_S} for each in loops.get(times, ())]
    return parse_profile(body)


def our_shares(tables: Sequence[Table], profile: HardwareProfile) -> list[Share]:
    """Return what each rank holds by our plan."""
    found: list[list[Piece]] = [[] for _ in range(RANKS)]
    for number, table in enumerate(plan_job(read_spec(tables), profile).tables):
        for shard in table.shards:
            if shard.kind == "data":
                raise RuntimeError(f"{table.name} is replicated: tables must be too large for that")
            found[shard.rank].append(
                Piece(
                    table=number,
                    row_start=shard.row_start,
                    row_end=shard.row_end,
                    column_start=shard.column_start,
                    column_end=shard.column_end,
                )
            )
    return [tuple(sorted(each)) for each in found]


def their_shares(tables: Sequence[Table]) -> list[Share]:
    """Return what each rank holds by torchrec's plan."""
    bags = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=each.name, embedding_dim=each.dim, num_embeddings=each.rows, feature_names=[each.name]
            )
            for each in tables
        ],
        device=torch.device("meta"),
    )
    constraints = {
        each.name: ParameterConstraints(
            sharding_types=list(SHARDINGS), pooling_factors=[float(each.lookups)], min_partition=each.dim // PARTS
        )
        for each in tables
    }
    topology = Topology(world_size=RANKS, local_world_size=RANKS, compute_device="cpu", ddr_cap=DDR_BYTES)
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=BATCH // RANKS, constraints=constraints, debug=False
    )
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    plan = planner.plan(bags, [sharder]).plan[""]
    assert isinstance(plan, EmbeddingModuleShardingPlan)
    found: list[list[Piece]] = [[] for _ in range(RANKS)]
    for number, table in enumerate(tables):
        placed = plan[table.name]
        if placed.sharding_spec is None:
            raise RuntimeError(f"torchrec replicates {table.name}")
        for shard in placed.sharding_spec.shards:
            (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
            if rows and columns:
                place = shard.placement.rank()
                piece = Piece(
                    table=number, row_start=row, row_end=row + rows, column_start=column, column_end=column + columns
                )
                found[place].append(piece)
    return [tuple(sorted(each)) for each in found]


def check_cover(tables: Sequence[Table], shares: Sequence[Share]) -> None:
    """Refuse a plan that does not hold every value of every table once."""
    held = [0] * len(tables)
    for piece in (piece for share in shares for piece in share):
        held[piece.table] += (piece.row_end - piece.row_start) * (piece.column_end - piece.column_start)
    if held != [table.rows * table.dim for table in tables]:
        raise RuntimeError("a plan leaves out values of a table, or holds some twice")


class Ids:
    """Draw the ids of a step, by table."""

    def __init__(self, tables: Sequence[Table], popularity: dict[str, Callable[[int], Popularity]], seed: int) -> None:
        self._tables, self._popularity, self._seed = tables, popularity, seed
        self._drawn = [self._draw(table) for table in range(len(tables))]

    def _draw(self, table: int) -> NDArray[np.int64]:
        """Return (BATCH, lookups) rows of a table."""
        each = self._tables[table]
        random = np.random.default_rng([self._seed, table])
        drawn = random.integers(0, 2**64, (2, BATCH * each.lookups), np.uint64)
        ranks = self._popularity[each.histogram](each.rows).ranks(*drawn)
        rows = Scatter.of(each.rows, stream_key(self._seed, "scatter", each.name))(ranks)
        return rows.astype(np.int64).reshape(BATCH, each.lookups)

    def of_pieces(self, pieces: Sequence[Piece]) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """Return the ids of each piece, counted from its first row, and the (BATCH,) lengths of its bags."""
        values, lengths = [], []
        for piece in pieces:
            rows = self._drawn[piece.table]
            inside = (rows >= piece.row_start) & (rows < piece.row_end)
            values.append(rows[inside] - piece.row_start)
            lengths.append(inside.sum(axis=1))
        return values, lengths


class TrainerStep:
    """Look up and update the rows of one rank's share as the trainer does."""

    def __init__(self, share: Share, tables: Sequence[Table], ids: Ids) -> None:
        blocks = [
            replace(piece, column_start=start, column_end=start + width)
            for piece in share
            for width in (tables[piece.table].dim // PARTS,)
            for start in range(piece.column_start, piece.column_end, width)
        ]
        held = Tables(
            shapes=tuple(each.shape for each in blocks),
            features=tuple(range(len(blocks))),
            optimizer=RowOptimizerSpec(),
            dtype="fp32",
            device=torch.device("cpu"),
            keys=np.empty(0, np.uint64),
            first_columns=tuple(each.column_start for each in blocks),
        )
        self._batch = TableBatch(held, HostKernel(held))
        values, lengths = ids.of_pieces(blocks)
        self._bags = Bags(
            lengths=torch.from_numpy(np.stack(lengths).astype(np.int32)),
            ids=torch.from_numpy(np.concatenate(values)),
            weights=None,
            sizes=torch.tensor([len(each) for each in values]),
        )
        self._gradient = torch.full((BATCH, sum(width for _, width in held.shapes)), 1e-6)

    def run(self) -> float:
        """Return the seconds of one step."""
        start = time.perf_counter()
        self._batch.update(self._batch.lookup(self._bags, updates=True), self._gradient, 0.01, step=1)
        return time.perf_counter() - start


class FbgemmStep:
    """Look up and update the rows of one rank's share as fbgemm's fused kernel does."""

    def __init__(self, share: Share, tables: Sequence[Table], ids: Ids) -> None:  # noqa: ARG002  blocks do not matter
        specs = [(*each.shape, EmbeddingLocation.HOST, ComputeDevice.CPU) for each in share]
        self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
            embedding_specs=specs, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.01, eps=1e-8
        )
        values, lengths = ids.of_pieces(share)
        self._values = torch.from_numpy(np.concatenate(values))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        self._offsets: Tensor = torch.from_numpy(offsets.astype(np.int64))
        self._gradient = torch.full((BATCH, sum(columns for _, columns, *_ in specs)), 1e-6)

    def run(self) -> float:
        """Return the seconds of one step."""
        start = time.perf_counter()
        self._kernel(self._values, self._offsets).backward(self._gradient)
        return time.perf_counter() - start


KERNELS: dict[str, type[TrainerStep | FbgemmStep]] = {"trainer": TrainerStep, "fbgemm": FbgemmStep}


def loads(
    plans: Sequence[Sequence[Share]], tables: Sequence[Table], ids: Ids, kernel: type[TrainerStep | FbgemmStep]
) -> NDArray[np.float64]:
    """Return the (plans, RANKS) median seconds of every rank's share.

    All shares run once before any runs again, those of one rank next to each other: a machine that slows down for
    seconds would else make one rank the slowest.
    """
    places = [(i, rank) for rank in range(RANKS) for i, shares in enumerate(plans) if shares[rank]]
    steps = {(i, rank): kernel(plans[i][rank], tables, ids) for i, rank in places}
    taken: dict[tuple[int, int], list[float]] = {place: [] for place in places}
    for step in steps.values():
        step.run()
    for repeat in range(REPEATS):
        for place in places[:: 1 if repeat % 2 == 0 else -1]:
            taken[place].append(steps[place].run())
    found = np.zeros((len(plans), RANKS))
    for place, seconds in taken.items():
        found[place] = np.median(seconds)
    return found


def read_popularity(folder: Path) -> dict[str, Callable[[int], Popularity]]:
    """Return what draws ranks of rows, by histogram; NoInputError if one is absent."""
    return {name: read_histogram(str((folder / name).resolve())).popularity for name in HISTOGRAMS}


def run_tasks(options: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Print a line for each task and kernel; yield our load over theirs, by kernel."""
    popularity, profile = read_popularity(options.data_dir), read_profile(options.hardware)
    draw = random.Random(options.seed)
    for number in range(options.first + options.tasks):
        tables = draw_task(draw)
        if number < options.first:
            continue
        started = time.perf_counter()
        plans = [our_shares(tables, profile)]
        planned = time.perf_counter()
        plans.append(their_shares(tables))
        planned_s = [round(planned - started, 3), round(time.perf_counter() - planned, 3)]
        for plan in plans:
            check_cover(tables, plan)
        ids, ratios = Ids(tables, popularity, options.seed + number), dict[str, float]()
        for name in options.kernels:
            found = loads(plans, tables, ids, KERNELS[name])
            ours, theirs = found.max(axis=1)
            ratios[name] = float(ours / theirs)
            line = {
                "benchmark": "planner_loads",
                "setting": {
                    "task": number, "seed": options.seed, "tables": len(tables), "ranks": RANKS, "kernel": name
                },
                "metric": "largest_rank_ms",
                "ours": round(ours * 1e3, 3),
                "against": "torchrec-planner",
                "theirs": round(theirs * 1e3, 3),
                "ratio": round(ratios[name], 4),
                "measured": {
                    "mean_rank_ms": np.round(found.mean(axis=1) * 1e3, 3).tolist(),
                    "shards": [sum(map(len, plan)) for plan in plans],
                    "planning_s": planned_s,
                },
            }  # fmt: skip
            print(json.dumps(line), flush=True)
        tell(f"task {number}: ours / theirs " + ", ".join(f"{name} {each:.3f}" for name, each in ratios.items()))
        yield ratios


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first task, to continue a run [0]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=Path("../shared/data"), help="of the reuse histograms")
    parser.add_argument("--hardware", type=Path, required=True, help="this machine's, by dlrmctl profile measure")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=tuple(KERNELS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = list(run_tasks(options))
    most, all_, median = LIMITS
    for name in options.kernels:
        ratios = np.array([each[name] for each in found])
        summary = {
            "benchmark": "planner_loads",
            "metric": "ratio",
            "kernel": name,
            "tasks": len(ratios),
            "median": round(float(np.median(ratios)), 4),
            "most": round(float(np.percentile(ratios, 95)), 4),
            "worst": round(float(ratios.max()), 4),
            "share_within": round(float((ratios <= most).mean()), 4),
            "limits": {"share_within": 0.95, "worst": all_, "median": median},
        }
        print(json.dumps(summary), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
