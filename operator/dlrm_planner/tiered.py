"""Placements of shards that may be stacks: what they go by, and whether the tiers of every pod hold their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlrm_api.tiers import TIER_BUFFER_BYTES
from dlrm_planner.estimate import Floats
from dlrm_planner.hit_rates import Reuse
from dlrm_planner.memory import fixed_pod_bytes
from dlrm_planner.partition import Placement
from dlrm_planner.question import Question
from dlrm_planner.tables import replica_bytes
from dlrm_planner.tiers import Levels, Room, Short, Stacks, read_stacks, tier_tables
from dlrm_planner.types import UNBOUNDED, Needs, NoPlacement, Shards, cut, whole_needs

SCALE = 2**40
"""Parts of a node that mixed needs are counted in."""
MOST_PARTS = 2.0**20
"""Nodes that one table may take, so that sums stay below 2**63."""


class Tiered:
    """Tries placements of shards that may be stacks; keeps what it found last."""

    def __init__(self, asked: Question) -> None:
        self._asked = asked
        self._curves = asked.reuse()
        self.whole, _ = self._sized(cut(asked.tables, range(len(asked.tables.specs)), {}))
        self.stacks = self.whole
        self.found: dict[int, Levels] = {}
        self.short: NoPlacement | Short | None = None
        self.least_short: Short | None = None
        """Of all placements that were tried, the one whose fullest pod lacks least."""

    def _sized(self, shards: Shards, ranks: NDArray[np.int64] | None = None) -> tuple[Stacks, Reuse]:
        reuse = self._curves.of(shards)
        return read_stacks(self._asked.spec, shards, reuse, self._asked.caps, ranks, self._asked.device), reuse

    def needs(self, replicated: tuple[int, ...]) -> Iterator[Needs]:
        """What placements may go by, one after the other, until one fits."""
        return self._device_needs(replicated) if self._asked.device == "cuda" else self._host_needs(replicated)

    def _host_needs(self, replicated: tuple[int, ...]) -> Iterator[Needs]:
        """By DDR alone, and where tiers of several pods fill unevenly, by the tighter of DDR and all tiers."""
        asked, stacks = self._asked, self.whole
        beside = asked.buffers * asked.spec.trainer.processes_per_replica + stacks.between
        by_ddr = whole_needs(asked.spec, asked.tables, replicated, asked.limit, beside=beside)
        room = min(by_ddr.room)
        steps = np.array(asked.tables.most_range_bytes, np.float64)
        more = stacks.slot * (stacks.ways + 4) + steps + TIER_BUFFER_BYTES // 2**16  # what is rounded up

        def least(shards: Shards) -> tuple[int, ...]:
            return _whole_parts(self._sized(shards)[0].at_least(bool(asked.caps)))

        yield replace(
            by_ddr, held=_whole_parts(stacks.at_least(bool(asked.caps))), measure=least, extra=_whole_parts(more)
        )
        if asked.spec.replicas == 1 or room < 0:
            return
        slow = float(sum(asked.caps.values())) + max(0, room) * (1 if asked.limit else 0)

        def mixed(sized: Stacks) -> tuple[int, ...]:
            needed = sized.at_least(bool(asked.caps))
            below = np.where(needed < sized.whole, sized.rows, 0) * sized.paged
            parts = np.maximum(needed / max(room, 1) if asked.limit else 0.0, (below + needed) / max(slow, 1))
            return _whole_parts(np.minimum(parts, MOST_PARTS) * SCALE)

        yield Needs(
            replicated=replicated,
            held=mixed(stacks),
            room=(SCALE,) * asked.spec.replicas,
            sharing=asked.spec.trainer.processes_per_replica,
            bounded=True,
            measure=lambda shards: mixed(self._sized(shards)[0]),
            extra=_whole_parts(more / max(min(room, slow), 1) * SCALE + 2),
        )

    def _device_needs(self, replicated: tuple[int, ...]) -> Iterator[Needs]:
        """By each rank's HBM alone, and by the tightest of it and of a rank's part of its pod's other tiers.

        Of that part first as if HBM spared them no row, then as if it were one of them.
        """
        asked, stacks, hbm = self._asked, self.whole, self._hbm(replicated)
        more = stacks.scratch + stacks.ways + 4  # slots of a range of rows beyond its share, and what is rounded up
        yield Needs(
            replicated=replicated,
            held=_whole_parts(stacks.device_at_least()),
            room=(math.floor(hbm) if math.isfinite(hbm) else UNBOUNDED,) * asked.spec.world_size,
            sharing=1,
            bounded=asked.hbm is not None,
            measure=lambda shards: _whole_parts(self._sized(shards)[0].device_at_least()),
            extra=_whole_parts(more * stacks.device_slot),
            tier="hbm",
        )
        processes = asked.spec.trainer.processes_per_replica
        ddr = min(self._ddr(replicated, pod) for pod in range(asked.spec.replicas)) / processes
        if not math.isfinite(ddr) or min(ddr, hbm) <= 0:
            return
        slow = sum(asked.caps.values()) / processes
        rows_cost = max(float(stacks.slot.max()), 1.0) * more + TIER_BUFFER_BYTES // 2**16
        for also in (0.0, hbm if math.isfinite(hbm) else 0.0):

            def mixed(sized: Stacks, total: float = slow + ddr + also) -> tuple[int, ...]:
                needed = sized.at_least(bool(asked.caps))
                lowest = sized.paged if asked.caps else sized.device_places(last=True)
                below = np.where(sized.on_device | (sized.pin >= 0), sized.rows * lowest, 0)
                parts = np.maximum(sized.device_at_least() / hbm, np.maximum(needed / ddr, (below + needed) / total))
                return _whole_parts(np.minimum(parts, MOST_PARTS) * SCALE)

            def measure(shards: Shards, mixed: Callable[[Stacks], tuple[int, ...]] = mixed) -> tuple[int, ...]:
                return mixed(self._sized(shards)[0])

            extra = np.maximum(more * stacks.device_slot / hbm, rows_cost / ddr)
            yield Needs(
                replicated=replicated,
                held=mixed(stacks),
                room=(SCALE,) * asked.spec.world_size,
                sharing=1,
                bounded=True,
                measure=measure,
                extra=_whole_parts(extra * SCALE + 2),
            )

    def fits(self, placement: Placement) -> bool:
        """Whether every pod's tiers hold the rows that its DDR does not."""
        asked, found = self._asked, {}
        self.stacks, self.reuse = self._sized(placement.shards, placement.ranks)
        least, hbm = self.stacks.at_least(bool(asked.caps)), self._hbm(placement.replicated)
        if not self._fits_devices(placement, hbm):
            return False
        for pod in range(asked.spec.replicas):
            which = placement.on_pod(pod, asked.spec.trainer.processes_per_replica)
            ddr = self._ddr(placement.replicated, pod)
            if ddr < 0:
                self.short = self._no_room(pod, ddr)
                return False
            if float(least[which].sum()) > ddr + len(which):  # wider maps than each shard alone would need
                self.short = _too_little(placement, which, least, ddr)
                return False
            room = Room(ddr=ddr, slow=asked.caps, hbm=hbm)
            levels = tier_tables(which, placement.ranks[which], self.stacks, self.reuse, room)
            if isinstance(levels, Short):
                self.short = levels
                self._remember(levels)
                return False
            found.update(levels)
        self.found = found
        return True

    def _remember(self, short: Short) -> None:
        known = self.least_short
        if known is None or (short.tier == known.tier and short.missing < known.missing):
            self.least_short = short

    def _no_room(self, pod: int, ddr: float) -> NoPlacement:
        """A pod that cannot hold what every pod must, be it without any shard; told by the largest table."""
        held = _whole_parts(self.whole.at_least(bool(self._asked.caps)))
        largest = max(range(len(held)), key=held.__getitem__)
        rank = pod * self._asked.spec.trainer.processes_per_replica
        return NoPlacement(table=largest, rank=rank, held=held[largest], room=math.floor(ddr), alone=True)

    def _fits_devices(self, placement: Placement, hbm: float) -> bool:
        """Whether the GPU of every rank holds the least that its shards take of it."""
        least = self.stacks.device_at_least()
        taken = np.bincount(placement.ranks, weights=least, minlength=1)
        rank = int(np.argmax(taken))
        if float(taken[rank]) <= hbm + len(least):
            return True
        which = np.flatnonzero(placement.ranks == rank)
        self.short = replace(_too_little(placement, which, least, hbm), tier="hbm")
        return False

    def _hbm(self, replicated: tuple[int, ...]) -> float:
        """Bytes of HBM for the shards placed on a rank."""
        if self._asked.hbm is None:
            return math.inf
        return self._asked.hbm.size - sum(replica_bytes(self._asked.tables, i) for i in replicated)

    def _ddr(self, replicated: tuple[int, ...], pod: int) -> float:
        """Bytes of DDR for the shards placed on a pod."""
        asked = self._asked
        if asked.limit is None:
            return math.inf
        fixed = fixed_pod_bytes(asked.spec, asked.tables, replicated, pod, asked.device)
        buffers = asked.buffers * asked.spec.trainer.processes_per_replica
        return asked.limit.size - fixed - buffers - max(self.whole.between, self.stacks.between)


def _too_little(placement: Placement, which: NDArray[np.int64], least: Floats, ddr: float) -> NoPlacement:
    largest = int(which[int(np.argmax(least[which]))])
    held, rest = math.ceil(least[largest]), ddr - float(least[which].sum())
    return NoPlacement(
        table=int(placement.shards.table[largest]),
        rank=int(placement.ranks[largest]),
        held=held,
        room=max(0, held + math.floor(rest)),
        alone=False,
    )


def _whole_parts(sizes: Floats) -> tuple[int, ...]:
    return tuple(math.ceil(size) for size in sizes.tolist())
