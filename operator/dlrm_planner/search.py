"""Looks for a placement that memory holds: first with every row in DDR, then with rows in slower tiers.

Where ranks compute on GPUs, every shard is a stack with slots in HBM, but for those that pins keep on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np

from dlrm_planner.enumerate import pinned, worth_replicating
from dlrm_planner.memory import slice_bytes
from dlrm_planner.partition import Placement
from dlrm_planner.predict import slowdown
from dlrm_planner.propose import place
from dlrm_planner.question import Question, Refusal, Solution
from dlrm_planner.tables import Tables
from dlrm_planner.tiered import Tiered
from dlrm_planner.tiers import Short, pinned_slow
from dlrm_planner.types import NoPlacement, whole_needs

WORTH_SLICES = 0.9
"""Cuts are handed over in slices where full ones fit too, if that brings a step below this part of what it was."""


def search(asked: Question) -> Solution | Refusal:
    """The first placement that fits: with hand-offs of full cuts, then of slices, then with rows in slower tiers.

    Of slices also where these leave room for a quicker placement. Each with small tables replicated, or else only those
    that pins ask for, and at first without splitting tables that an empty node could hold.

    Raises:
        InvalidSpecError: a pin names a tier that is not there, or a trace is missing.
    """
    found = _search(asked, quick=False)
    assert found is not None, "what did not fit has a reason"
    return found


def solved(asked: Question) -> bool:
    """Whether there is a placement, be it balanced or not."""
    return isinstance(_search(asked, quick=True), Solution)


def _search(asked: Question, *, quick: bool) -> Solution | Refusal | None:
    if asked.device == "cuda":
        return _search_devices(asked, quick=quick)
    refusal: Refusal | None = None
    stacked = pinned_slow(asked.tables)
    for crowded in () if stacked else (False, True):
        found = _search_ddr(asked, quick=quick, crowded=crowded)
        if isinstance(found, Solution):
            return found
        refusal = found or refusal
    if stacked or asked.caps:
        found = _search_tiers(replace(asked, tables=_in_slices(asked)), quick=quick)
        whole = isinstance(found, Refusal) and not stacked and not quick and _lacks_less_whole(asked, found)
        return _search_ddr(replace(asked, caps={}), quick=False, crowded=True) if whole else found
    return refusal


def _lacks_less_whole(asked: Question, tiered: Refusal) -> bool:
    """Whether all rows in DDR lack less of a pod than what slower tiers take of every pod lacks, tables aside."""
    if asked.limit is None or not isinstance(tiered.cause, NoPlacement) or tiered.cause.room >= 0:
        return False
    wider = replace(asked.limit, size=asked.limit.size - tiered.cause.room)
    return solved(replace(asked, caps={}, limit=wider))


def _search_devices(asked: Question, *, quick: bool) -> Solution | Refusal | None:
    refusal: Refusal | None = None
    for tables in _hand_offs(asked):
        found = _search_tiers(replace(asked, tables=tables), quick=quick)
        if isinstance(found, Solution):
            return found
        refusal = found or refusal
    return refusal


def _search_ddr(asked: Question, *, quick: bool, crowded: bool) -> Solution | Refusal | None:
    """None where there is too little memory, and more to try before a reason is needed."""
    refusal: Refusal | None = None
    best: Solution | None = None
    for tables in _hand_offs(asked):
        if best is not None and (quick or best.placement.imbalance[best.placement.method] * WORTH_SLICES <= 1):
            break
        for replicated in _replications(asked):
            needs = whole_needs(asked.spec, tables, replicated, asked.limit)
            if needs.hopeless and (asked.caps or quick or not crowded):
                continue
            placed = place(asked.spec, tables, asked.costs, needs, quick=quick, crowded=crowded)
            if isinstance(placed, Placement):
                if best is None or placed.pace < WORTH_SLICES * best.placement.pace:
                    best = Solution(device=asked.device, costs=asked.costs, tables=tables, placement=placed, levels={})
                break
            assert placed is not None, "nothing but bytes was asked of it"
            if refusal is None or tables is asked.tables or placed.room >= 0:
                refusal = Refusal(cause=placed, full_cut=tables.handoff_budget is None)
    return best or refusal


def _hand_offs(asked: Question) -> Iterator[Tables]:
    yield asked.tables
    if asked.tables.handoff_budget is None:
        yield _in_slices(asked)


def _in_slices(asked: Question) -> Tables:
    """The tables, whose cuts are handed over in slices unless the user gives the hand-off a budget."""
    if asked.tables.handoff_budget is not None:
        return asked.tables
    return asked.tables.sliced(slice_bytes(asked.spec, asked.tables, asked.limit))


def _replications(asked: Question) -> Iterator[tuple[int, ...]]:
    """Tables to replicate: all that are worth it, then only those that pins ask for."""
    if asked.spec.world_size == 1:
        yield ()  # a replica on the only rank is the whole table
        return
    by_pin, worth = pinned(asked.tables, "data"), worth_replicating(asked.spec, asked.tables, asked.costs, asked.device)
    yield tuple(np.flatnonzero(by_pin | worth).tolist())
    if worth.any():
        yield tuple(np.flatnonzero(by_pin).tolist())


class _Tried:
    """How much slower tiers slow placements down, and the solutions that they are; ``predicts``: not only these."""

    def __init__(self, tiered: Tiered, asked: Question, *, predicts: bool) -> None:
        self._tiered, self._asked, self._predicts = tiered, asked, predicts
        self.solutions: list[Solution] = []

    def __call__(self, placement: Placement) -> float | None:
        """How many times as long a step takes for them; None where tiers do not hold the rows."""
        asked, tiered = self._asked, self._tiered
        if not tiered.fits(placement):
            return None
        found = Solution(
            device=asked.device,
            costs=asked.costs,
            tables=asked.tables,
            placement=placement,
            levels=tiered.found,
            stacks=tiered.stacks,
            reuse=tiered.reuse,
        )
        self.solutions.append(found)
        return slowdown(asked.spec, asked.profile, found) if self._predicts else 1.0


def _search_tiers(asked: Question, *, quick: bool) -> Solution | Refusal | None:
    spec, tables, tiered = asked.spec, asked.tables, Tiered(asked)
    cause: NoPlacement | Short | None = None
    misfits: set[tuple[tuple[int, ...], int]] = set()
    for crowded, replicated in product((False, True), _replications(asked)):
        for turn, needs in enumerate(tiered.needs(replicated)):
            if (quick and needs.hopeless) or (crowded and (replicated, turn) not in misfits):
                continue
            tried = _Tried(tiered, asked, predicts=not quick)
            placed = place(spec, tables, asked.costs, needs, tried, quick=quick, crowded=crowded)
            if isinstance(placed, Placement):
                return next(each for each in tried.solutions if each.placement is placed)
            if isinstance(placed, NoPlacement):
                misfits.add((replicated, turn))
            if turn == 0:  # the other needs are in no bytes
                cause = tiered.short if placed is None else replace(placed, tier=needs.tier)
    if cause is None:
        return None
    if isinstance(cause, Short) and tiered.least_short is not None and tiered.least_short.tier == cause.tier:
        return Refusal(cause=tiered.least_short)
    if isinstance(cause, NoPlacement) and tiered.whole.is_stack(cause.table):
        return Refusal(cause=cause, least=int(tiered.whole.least[cause.table]))
    return Refusal(cause=cause)
