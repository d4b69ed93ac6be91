"""What has to be placed, the memory that it has to fit, and why it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dlrm_api.job import DLRMJobSpec
from dlrm_planner.memory import Limit, fixed_pod_bytes
from dlrm_planner.shards import Shards
from dlrm_planner.tables import CUT_HEADER_BYTES, Tables

UNBOUNDED = 2**62
"""Room of a node of which nothing is known; shards then take no bytes, so that no sum overflows."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes, or other parts of a node, that tables take and nodes have."""

    replicated: tuple[int, ...]
    held: tuple[int, ...]
    """What each table of the model takes of its node, if it is placed whole."""
    room: tuple[int, ...]
    """What each node, or each rank, gives to shards."""
    sharing: int
    """Ranks that share one such room: those of a node, or one where a rank has a room to itself."""
    bounded: bool
    """False: nothing is known of the rooms."""
    measure: Callable[[Shards], tuple[int, ...]]
    """What each shard takes of its node."""
    extra: tuple[int, ...]
    """What a range of a table's rows may take beyond its share of the table."""
    tier: Literal["ddr", "hbm"] = "ddr"
    """What runs short where there is too little room."""

    @property
    def holder(self) -> str:
        """Who has such a room, in words."""
        return "GPU" if self.tier == "hbm" else "node"

    @cached_property
    def placed(self) -> tuple[int, ...]:
        """Tables that are not replicated."""
        replicated = set(self.replicated)
        return tuple(i for i in range(len(self.held)) if i not in replicated)

    @cached_property
    def hopeless(self) -> bool:
        """Whether all nodes together have too little room, however tables are split."""
        return self.bounded and sum(self.held[i] for i in self.placed) > sum(self.room)


@dataclass(frozen=True, kw_only=True)
class NoPlacement:
    """Why no placement was found."""

    table: int
    rank: int
    held: int
    """What the table takes."""
    room: int
    """What was left on the rank's node; negative where it is too small even for what every node holds."""
    alone: bool
    """Whether the table would not fit even if it were the only one."""
    spread: int = 0
    """Rooms that it may be split over, of which ``room`` is the sum; 0 for a shard that goes to one of them."""
    tier: Literal["ddr", "hbm"] = "ddr"
    """The memory that has too little room."""


def whole_needs(
    spec: DLRMJobSpec, tables: Tables, replicated: Sequence[int], limit: Limit | None, *, beside: int = 0
) -> Needs:
    """What shards take whose rows all lie in DDR; ``beside``: bytes of each pod that are for something else."""
    if limit is None:
        room = (UNBOUNDED,) * spec.replicas
    else:
        first, other = (fixed_pod_bytes(spec, tables, replicated, pod) + beside for pod in (0, 1))
        room = tuple(max(limit.size - (first if pod == 0 else other), -UNBOUNDED) for pod in range(spec.replicas))
    return Needs(
        replicated=tuple(replicated),
        held=tables.held_bytes,
        room=room,
        sharing=spec.trainer.processes_per_replica,
        bounded=limit is not None,
        measure=lambda shards: shards.held_bytes,
        extra=tuple(
            CUT_HEADER_BYTES * (len(table.block_edges) - 1) + step
            for table, step in zip(tables.specs, tables.most_range_bytes, strict=True)
        ),
    )
