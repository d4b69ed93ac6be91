"""Find the fastest placement of rows over tiers by HiGHS: the oracle of ``dlrm_planner.tiers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from dlrm_api.hardware import HardwareProfile
from dlrm_api.tiers import BLOCK_PAGE_BYTES, Tier
from dlrm_planner.stacks import Stacks
from dlrm_planner.types import HitRates


class Program:
    """Collect variables and constraints of a linear program."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.whole: list[int] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []

    def add(self, cost: float = 0.0, upper: float = np.inf, *, is_whole: bool = False) -> int:
        self.cost.append(cost)
        self.upper.append(upper)
        self.whole.append(int(is_whole))
        return len(self.cost) - 1

    def limit(self, terms: Mapping[int, float], low: float, high: float) -> None:
        self._rows.append((dict(terms), low, high))

    def solve(self) -> float | None:
        matrix = np.zeros((len(self._rows), len(self.cost)))
        for row, (terms, _, _) in enumerate(self._rows):
            for variable, factor in terms.items():
                matrix[row, variable] += factor
        low, high = np.array([row[1] for row in self._rows]), np.array([row[2] for row in self._rows])
        # Rows of one constraint have one scale, so that the solver's tolerance is relative.
        scale = np.abs(matrix).max(axis=1)
        found = milp(
            np.array(self.cost),
            integrality=np.array(self.whole),
            bounds=Bounds(0.0, np.array(self.upper)),
            constraints=LinearConstraint(matrix / scale[:, None], low / scale, high / scale),
            options={"mip_rel_gap": 1e-5},
        )
        return float(found.fun) if found.success else None


def oracle_ms(
    stacks: Stacks, rates: HitRates, ddr: float, caps: Mapping[Tier, float], profile: HardwareProfile
) -> float | None:
    """Return the least milliseconds in which tiers below DDR serve a step; None if nothing fits.

    Rows and bytes count in millions. Parts of each segment of a curve go to any level; whether a shard is whole in DDR,
    or which tier has a place for each of its rows, is a choice of one.
    """
    program, count, tiers = Program(), len(stacks.rows), list(caps)
    in_ddr: dict[int, float] = {}
    held: dict[Tier, dict[int, float]] = {tier: {} for tier in tiers}
    missed: dict[Tier, dict[int, float]] = {tier: {} for tier in tiers}
    read: dict[Tier, dict[int, float]] = {tier: {} for tier in tiers}
    for i in range(count):
        rows, record = stacks.rows[i] / 1e6, float(stacks.record[i])
        whole = program.add(upper=1.0, is_whole=True)
        last = {tier: program.add(upper=1.0, is_whole=True) for tier in tiers}
        program.limit({whole: 1.0, **dict.fromkeys(last.values(), 1.0)}, 1.0, 1.0)
        in_ddr |= {whole: stacks.whole[i] / 1e6, **dict.fromkeys(last.values(), stacks.fixed[i] / 1e6)}
        lengths, hits = np.diff(rates.rows[i]) / 1e6, np.diff(rates.hits[i])
        slots: dict[int, float] = {}
        below: dict[Tier, dict[int, float]] = {tier: {} for tier in tiers}
        for length, hit in zip(lengths.tolist(), hits.tolist(), strict=True):
            if length <= 0:
                continue
            # Shares of a segment: the hottest rows are few, and would vanish in the solver's tolerance.
            parts, slot = {tier: program.add() for tier in tiers}, program.add()
            program.limit({slot: 1.0, **dict.fromkeys(parts.values(), 1.0), whole: 1.0}, 1.0, 1.0)
            slots[slot] = length
            in_ddr[slot] = float(stacks.slot[i]) * length
            for tier, part in parts.items():
                below[tier][part] = length
                missed[tier][part] = hit
                read[tier][part] = hit * record
        program.limit({**slots, whole: stacks.min_slots[i] / 1e6}, stacks.min_slots[i] / 1e6, np.inf)
        for place, tier in enumerate(tiers):
            size = float(stacks.row_bytes(tier)[i])
            middle = program.add()
            program.limit({**below[tier], middle: -1.0, last[tier]: -rows}, -np.inf, 0.0)
            lower = {last[each]: -rows for each in tiers[place:]}
            program.limit({**below[tier], **lower}, -np.inf, 0.0)
            # As plans have it, the last level serves at least one row.
            program.limit({**below[tier], last[tier]: -1e-6}, 0.0, np.inf)
            held[tier] |= {middle: size, last[tier]: size * rows}
    program.limit(in_ddr, 0.0, ddr / 1e6)
    for tier in tiers:
        program.limit(held[tier], 0.0, caps[tier] / 1e6)
        spec: Any = getattr(profile.spec.tiers, tier)
        reads, writes = program.add(cost=1.0), program.add(cost=1.0)
        write = spec.write_bytes_per_second or spec.read_bytes_per_second
        limits = [(reads, missed[tier], spec.read_iops), (reads, read[tier], spec.read_bytes_per_second)]
        limits.append((writes, read[tier], write))
        if tier == "block":
            pages = {part: each * BLOCK_PAGE_BYTES for part, each in missed[tier].items()}
            limits.append((reads, pages, spec.read_bytes_per_second))
        else:
            limits.append((writes, missed[tier], spec.write_iops))
        for total, each, rate in limits:
            if rate:
                program.limit({total: -1.0, **{part: 1e3 * n / rate for part, n in each.items()}}, -np.inf, 0.0)
    return program.solve()
