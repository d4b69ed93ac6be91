"""Models and plans with tables split in every way, drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from dlrm_api.model import ModelSpec
from dlrm_api.plan import Plan, RankPlan, ShardRange, TablePlan, TierLevel, TierShare
from dlrm_api.tiers import Tier


def random_model(
    generator: np.random.Generator, count: int, *, weighted: bool = False, dim: int = 0, max_lookups: int = 4
) -> ModelSpec:
    """Tables of any dims, blocks, poolings and features; ``dim``: one dim for all, as the dot interaction needs."""
    tables: list[dict[str, Any]] = []
    for number in range(count):
        width = dim or int(4 * generator.integers(1, 7))
        blocks = [block for block in range(4, width + 1, 4) if width % block == 0]
        features = [f"f{feature}" for feature in sorted(generator.permutation(9)[: generator.integers(1, 4)].tolist())]
        tables.append(
            {
                "name": f"t{number}",
                "rows": int(generator.integers(1, 60)),
                "dim": width,
                "columnBlock": int(generator.choice(blocks)),
                "pooling": "mean" if generator.random() < 0.4 else "sum",
                "maxLookups": max_lookups,
                "features": features,
                "weights": [f"w{feature}" for feature in features] if weighted and generator.random() < 0.5 else [],
            }
        )
    return ModelSpec.model_validate({"tables": tables, "interaction": "dcn"})


def random_plan(
    generator: np.random.Generator, model: ModelSpec, world_size: int, tiers: Sequence[Tier] = (), lookahead: int = 0
) -> Plan:
    """Plan each table replicated, or cut into rectangles of rows and column blocks, each on any rank.

    Args:
        generator: draws.
        model: whose tables are placed.
        world_size: ranks.
        tiers: of every rectangle, the first with few slots; empty: all rows are resident.
        lookahead: batches.
    """
    tables = []
    for table in model.all_tables():
        if generator.random() < 0.25:
            extent = {"row_start": 0, "row_end": table.rows, "column_start": 0, "column_end": table.dim}
            shards = [ShardRange(rank=0, kind="data", **extent)]
        else:
            shards = random_shards(generator, table.rows, table.block_edges, world_size)
            shards = [shard.model_copy(update={"tiers": _levels(generator, shard, tiers)}) for shard in shards]
        tables.append(TablePlan(name=table.name, column_blocks=table.block_edges, ranges=tuple(shards)))
    return _plan(tables, world_size, lookahead)


def whole_plan(model: ModelSpec, owner: int, world_size: int) -> Plan:
    """Plan every table whole on one rank."""
    tables = []
    for table in model.all_tables():
        extent = {"row_start": 0, "row_end": table.rows, "column_start": 0, "column_end": table.dim}
        shard = ShardRange(rank=owner, kind="table", **extent)
        tables.append(TablePlan(name=table.name, column_blocks=table.block_edges, ranges=(shard,)))
    return _plan(tables, world_size, lookahead=0)


def _plan(tables: Sequence[TablePlan], world_size: int, lookahead: int) -> Plan:
    return Plan(
        world_size=world_size,
        processes_per_node=world_size,
        ranks=tuple(RankPlan(rank=rank, node=0, bytes_per_tier={}) for rank in range(world_size)),
        tables=tuple(tables),
        lookahead=lookahead,
        handoff_bytes=(2**26,),
    )


def without_levels(plan: Plan) -> Plan:
    """Return the same shards with all rows resident."""
    tables = tuple(
        table.model_copy(
            update={"ranges": tuple(shard.model_copy(update={"tiers": TierShare()}) for shard in table.shards)}
        )
        for table in plan.tables
    )
    return plan.model_copy(update={"tables": tables, "lookahead": 0})


def _levels(generator: np.random.Generator, shard: ShardRange, tiers: Sequence[Tier]) -> TierShare:
    if not tiers:
        return TierShare()
    rows = shard.row_end - shard.row_start
    sizes = [max(1, rows // int(generator.integers(2, 9))), *[rows] * (len(tiers) - 1)]
    return TierShare(levels=tuple(TierLevel(tier=tier, rows=count) for tier, count in zip(tiers, sizes, strict=True)))


def random_shards(
    generator: np.random.Generator, rows: int, edges: tuple[int, ...], world_size: int
) -> list[ShardRange]:
    """Rectangles that tile a table: runs of column blocks, each cut into uneven ranges of rows."""
    inner = [edge for edge in edges[1:-1] if generator.random() < 0.5]
    shards = []
    for first, last in pairwise([0, *inner, edges[-1]]):
        cuts = {int(cut) for cut in generator.integers(0, rows, generator.integers(0, 4))} if rows > 1 else set()
        for start, end in pairwise(sorted({0, rows, *cuts})):
            kind = "table" if end - start == rows and not inner else "row" if not inner else "column"
            rank = int(generator.integers(0, world_size))
            extent = {"row_start": start, "row_end": end, "column_start": first, "column_end": last}
            shards.append(ShardRange(rank=rank, kind=kind, **extent))
    return shards


def every_shard_in(plan: Plan, tiers: Sequence[str]) -> Plan:
    """Put all shards but replicas into levels of these tiers: whole in one, or a quarter of them in slots."""

    def placed(rows: int) -> TierShare:
        sizes = [rows if len(tiers) == 1 else rows // 4, *[rows] * (len(tiers) - 1)]
        return TierShare.model_validate(
            {"levels": [{"tier": tier, "rows": size} for tier, size in zip(tiers, sizes, strict=True)]}
        )

    tables = [
        table.model_copy(
            update={
                "ranges": tuple(
                    shard
                    if shard.kind == "data"
                    else shard.model_copy(update={"tiers": placed(shard.row_end - shard.row_start)})
                    for shard in table.shards
                )
            }
        )
        for table in plan.tables
    ]
    return plan.model_copy(update={"tables": tuple(tables)})
