"""Assign rows to memory tiers within the bytes of a pod."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Device
from dlrm_api.tiers import (
    BLOCK_PLACE_META_BYTES,
    BLOCK_SLACK,
    CHANGED_BYTES,
    COUNTER_BYTES,
    MAX_LINKED_SLOTS,
    ORDER_META_BYTES,
    PLACE_META_BYTES,
    SLOT_META_BYTES,
    Tier,
    extra_slots,
    map_entry_bytes,
    paged_bytes,
    places_meta_bytes,
    usable_claim_bytes,
)
from dlrm_planner.hit_rates import Floats, Reuse
from dlrm_planner.tables import Tables
from dlrm_planner.types import Shards

SlowTier = Literal["cxl", "scm", "block"]
LowerTier = Literal["ddr", "cxl", "scm", "block"]
SLOW_TIERS: tuple[SlowTier, ...] = ("cxl", "scm", "block")
"""Fastest first."""
META_BYTES: Mapping[SlowTier, float] = {
    "cxl": PLACE_META_BYTES,
    "scm": PLACE_META_BYTES,
    "block": BLOCK_PLACE_META_BYTES * BLOCK_SLACK,
}
"""DDR that a row's place in this tier takes, beside its entry."""
UNEVEN = 1.1
"""Rows of the rank that has most of a kind, over the mean, as long as nothing is placed."""
IN_HBM, UNPINNED, IN_DDR = -3, -2, -1
"""What :attr:`Stacks.pin` says of a table pinned to HBM, to no tier, or to DDR; else an index of SLOW_TIERS."""


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """(N,) what each shard takes as a stack, and whole in DDR.

    The slots of a shard lie in DDR, or ``on_device`` in the HBM of its rank's GPU, with what is known of them in DDR.
    """

    rows: Floats
    blocks: Floats
    """Column blocks: each is a stack of as many rows; what a row takes counts all of them."""
    on_device: NDArray[np.bool_]
    whole: Floats
    """DDR of all its rows, as a table without levels; inf on a device, whose tables have levels."""
    least: Floats
    """Slots that it needs at least."""
    most: Floats
    """Slots that it may have at most: links between them name no more."""
    slot: Floats
    """DDR of one more slot."""
    device_slot: Floats
    """HBM of one more slot."""
    entry: Floats
    """DDR of a row's map entry, and of what tells that it changed."""
    fixed: Floats
    """DDR of all entries, of the places of the last level, which has one for every row, of the scratch pad, and of the
    shard's part of a hand-off that holds a full cut."""
    scratch: Floats
    """Slots beside the planned ones, none where these are all rows: for rows of a batch that finds its set full, or of
    an evaluation. What these are expected to be on the host, where memory is taken when used; at most on a device,
    where it is taken at the start."""
    record: Floats
    """Bytes of a row in ddr, cxl and scm, below the slots."""
    paged: Floats
    """Bytes of a row in block, slack included."""
    between: int
    """DDR of each pod for places in tiers between the slots and the last level."""
    pin: NDArray[np.int64]
    ways: int

    def row_bytes(self, tier: LowerTier) -> Floats:
        """(N,) bytes that a row takes in a tier."""
        return self.paged if tier == "block" else self.record

    def is_stack(self, shard: int) -> bool:
        """Whether a shard's cheapest form has levels."""
        cheapest = float(self.at_least(possible=True)[shard])
        return bool(self.pin[shard] >= 0) or cheapest < self.whole[shard]

    def at_least(self, possible: bool) -> Floats:
        """(N,) DDR of each shard in its cheapest form; ``possible``: there is a slower tier for its rows."""
        stack = self.fixed + self.least * self.slot
        cheapest = np.minimum(stack, self.whole) if possible else self.whole
        is_stack = (self.pin >= 0) | self.on_device
        return np.where(is_stack, stack, np.where(self.pin == IN_DDR, self.whole, cheapest))

    def device_at_least(self) -> Floats:
        """(N,) HBM of each shard in its cheapest form."""
        return (self.least + self.scratch) * self.device_slot

    def device_places(self, *, last: bool) -> Floats:
        """(N,) DDR of a row of a shard on a device, in a level below its slots; ``last``: none is below that level."""
        return self.record + self.blocks * (PLACE_META_BYTES + (0 if last else ORDER_META_BYTES))


def read_stacks(
    spec: DLRMJobSpec,
    shards: Shards,
    reuse: Reuse,
    caps: Mapping[SlowTier, int],
    ranks: NDArray[np.int64] | None = None,
    device: Device = "cpu",
) -> Stacks:
    """Size every shard for the slow tiers that there are; ``ranks`` of the shards, where they are known.

    Like shards of one rank are one stack: the map of many rows needs wider entries than that of each shard would.

    Raises:
        InvalidSpecError: a table is pinned to a tier that is not there, or to two things at once.
    """
    rows, blocks = shards.rows, shards.blocks
    row = np.array(shards.row_bytes, np.float64)
    ways = spec.trainer.cache.ways
    pin = np.array([_pin(shards.tables, i, caps) for i in shards.table.tolist()], np.int64)
    on_device = (pin <= UNPINNED) & (device == "cuda")
    record, slot = row + blocks * COUNTER_BYTES, np.where(on_device, 0.0, row) + blocks * SLOT_META_BYTES
    dearest = max((META_BYTES[tier] for tier in caps), default=0.0)
    meta = np.array([META_BYTES[SLOW_TIERS[p]] if p >= 0 else dearest for p in pin.tolist()])
    middle = sum(list(caps.values())[:-1])
    extra = _extra_slots(spec, shards)
    scratch = np.where(on_device, extra, np.ceil(reuse.accesses)) * (pin != IN_HBM)
    least = np.ceil(reuse.least / max(ways, 1)) * max(ways, 1)
    cut_parts = np.array(shards.held_bytes, np.float64) - np.array(shards.resident_bytes, np.float64)
    entry = _map_entries(shards, ranks, spec.world_size) + CHANGED_BYTES
    return Stacks(
        rows=rows,
        blocks=blocks,
        on_device=on_device,
        whole=np.where(on_device, np.inf, np.array(shards.held_bytes, np.float64)),
        least=np.where(pin == IN_HBM, rows, np.where(on_device, np.minimum(least, rows), least)),
        most=np.minimum(rows, np.maximum(MAX_LINKED_SLOTS - extra, 1)),
        slot=slot,
        device_slot=np.where(on_device, row, 0.0),
        entry=entry,
        # a place may be left over, or rounded up
        fixed=blocks * (np.ceil(rows * (entry + meta)) + 2 * BLOCK_PLACE_META_BYTES) + scratch * slot + cut_parts,
        scratch=scratch,
        record=record,
        paged=BLOCK_SLACK * blocks * np.array([paged_bytes(each) for each in (record / blocks).astype(int).tolist()]),
        between=_between(middle, record / blocks, rows * blocks),
        pin=pin,
        ways=ways,
    )


def _extra_slots(spec: DLRMJobSpec, shards: Shards) -> Floats:
    """(N,) slots that batches in flight may need beside the planned ones of each shard."""
    batch, ahead = spec.data.global_batch_size, spec.trainer.cache.lookahead
    most = [table.max_lookups * len(table.sources) for table in shards.tables.specs]
    each = zip(shards.table.tolist(), shards.rows.tolist(), strict=True)
    return np.array([float(extra_slots(int(rows), most[i], batch, ahead)) for i, rows in each])


def _between(size: int, record: Floats, rows: Floats) -> int:
    """DDR for places in so many bytes of middle tiers, if they hold the smallest records there are, or all rows."""
    return math.ceil(
        (PLACE_META_BYTES + ORDER_META_BYTES) * min(size / float(record.min(initial=np.inf)), float(rows.sum()))
    )


def _map_entries(shards: Shards, ranks: NDArray[np.int64] | None, world_size: int) -> Floats:
    """(N,) bytes of a row's map entry in one block, if all shards of a rank with rows of one kind are one stack.

    Where ranks are not known yet, each has its part of all rows of that kind, and a little more.
    """
    half = np.array([table.dtype == "fp16" for table in shards.tables.specs], np.float64)[shards.table]
    where = np.zeros(len(half)) if ranks is None else ranks
    _, kind = np.unique(np.stack([where, shards.width / shards.blocks, half]), axis=1, return_inverse=True)
    own = shards.rows * shards.blocks
    together = np.bincount(kind.ravel(), weights=own)[kind.ravel()]
    rows = np.maximum(own, together * UNEVEN / world_size) if ranks is None else together
    different, inverse = np.unique(rows, return_inverse=True)
    return np.array([float(map_entry_bytes(int(count))) for count in different])[inverse]


def slow_caps(spec: DLRMJobSpec, profile: HardwareProfile | None) -> dict[SlowTier, int]:
    """Bytes of each slower tier of one pod, fastest first: the tighter of the node's and the user's budget.

    A node that gives a tier by claims has the rows whose claim it holds.
    """
    caps: dict[SlowTier, int] = {}
    for tier in SLOW_TIERS:
        node: TierSpec | None = getattr(profile.spec.tiers, tier) if profile else None
        budget = getattr(spec.trainer.tier_budgets, tier)
        given = [] if budget is None else [int(budget)]
        if node is not None:
            given.append(usable_claim_bytes(node.bytes) if node.storage_class else node.bytes)
        if given and min(given) > 0:
            caps[tier] = min(given)
    return caps


def stack_classes(tables: Tables) -> int:
    """Kinds of rows, by width and type, of which a rank may have a stack: tables of a kind share one."""
    kinds = {
        (table.column_block or table.dim, table.dtype)
        for table in tables.specs
        if table.pin is None or not (table.pin.sharding == "data" or table.pin.tier in ("hbm", "ddr"))
    }
    return len(kinds)


def pinned_slow(tables: Tables) -> bool:
    """Whether any table's rows are pinned to a tier below DDR."""
    return any(t.pin is not None and t.pin.tier in SLOW_TIERS for t in tables.specs)


def _pin(tables: Tables, i: int, caps: Mapping[SlowTier, int]) -> int:
    table, path = tables.specs[i], tables.paths[i]
    if table.pin is None or table.pin.tier is None:
        return UNPINNED
    if table.pin.tier in ("hbm", "ddr"):
        return IN_HBM if table.pin.tier == "hbm" else IN_DDR
    tier = next(each for each in SLOW_TIERS if each == table.pin.tier)
    if tier not in caps:
        raise InvalidSpecError(
            f"{path}.pin.tier",
            f"table {table.name} is pinned to {tier}, of which a pod has no bytes: set trainer.tierBudgets.{tier}, or "
            f"name hardware whose profile has tiers.{tier}",
        )
    if table.pin.sharding == "data":
        raise InvalidSpecError(
            f"{path}.pin.tier",
            f"table {table.name} is pinned to sharding data, whose replicas live in DDR: leave out one of the pins",
        )
    return SLOW_TIERS.index(tier)


ROUNDS = 64
"""Times that tables too large to be taken whole are put aside; then all of them are."""
SIGNIFICANT = 2.0**30
"""What gains differ in beyond one in so many is how a processor rounds, and makes no plan another one."""


@dataclass(frozen=True, kw_only=True)
class Wants:
    """What N tables would do with bytes."""

    rows: Floats
    """(N, K) points of each curve: rows, ascending."""
    hits: Floats
    """(N, K) hits at these points."""
    start: Floats
    """(N,) rows that each table has already."""
    stop: Floats
    """(N,) rows that it may have at most."""
    row_cost: Floats
    """(N,) bytes of one more row."""
    whole_cost: Floats
    """(N,) bytes, beyond those that it has, after which the table needs no curve any more: all of it is here; inf
    where that is no choice."""
    whole_hits: Floats
    """(N,) hits then."""


@dataclass(frozen=True)
class Filled:
    """What each table got."""

    rows: Floats
    """(N,)"""
    whole: NDArray[np.bool_]
    """(N,) taken whole; its rows mean nothing."""
    left: float
    """Bytes that nobody gained by."""


def fill(wants: Wants, budget: float, *, spend_all: bool = False) -> Filled:
    """Spend the budget on whatever gains most hits a byte; with ``spend_all`` also where no more hits are gained."""
    x = np.clip(wants.rows, wants.start[:, None], wants.stop[:, None])
    x = np.concatenate([x, wants.stop[:, None]], axis=1)
    hits = np.stack([np.interp(a, b, c) for a, b, c in zip(x, wants.rows, wants.hits, strict=True)])
    cost, gain = np.diff(x, axis=1) * wants.row_cost[:, None], np.diff(hits, axis=1)
    ends = np.concatenate([np.zeros((len(x), 1)), np.cumsum(cost, axis=1)], axis=1)
    worth = _significant(np.where(cost > 0, gain / np.maximum(cost, 1e-9), np.inf))
    open_ = np.isfinite(wants.whole_cost)
    spent, whole = np.zeros_like(cost), np.zeros(len(x), bool)
    for turn in range(ROUNDS + 1):
        if turn == ROUNDS:
            open_[:] = False
        jump_cost, jump_worth, until = _jumps(wants, ends, hits, worth, open_)
        rest = np.where((ends[:, :-1] < until[:, None]) & ~whole[:, None], cost - spent, 0.0)
        costs = np.concatenate([rest.ravel(), np.where(open_, jump_cost, 0.0)])
        gains = np.concatenate([worth.ravel(), jump_worth])
        order = np.argsort(-gains, kind="stable")
        order = order[(costs[order] > 0) & ((gains[order] > 0) | (spend_all & (order < cost.size)))]
        total = np.cumsum(costs[order])
        fits = int(np.searchsorted(total, budget + 1e-6, side="right"))
        taken = order[:fits]
        budget -= float(total[fits - 1]) if fits else 0.0
        divisible = taken[taken < cost.size]
        spent.ravel()[divisible] += costs[divisible]
        whole[taken[taken >= cost.size] - cost.size] = True
        open_ &= ~whole
        if fits == len(order):
            break
        if order[fits] < cost.size:
            spent.ravel()[order[fits]] += budget
            budget = 0.0
            break
        open_ &= jump_cost <= budget  # what is left only shrinks
    rows = wants.start + np.floor(spent.sum(axis=1) / wants.row_cost + 1e-6)
    return Filled(np.minimum(rows, wants.stop), whole, budget)


def _jumps(
    wants: Wants, ends: Floats, hits: Floats, worth: Floats, open_: NDArray[np.bool_]
) -> tuple[Floats, Floats, Floats]:
    """(N,) cost and gain a byte of taking each table whole, and the bytes spent on it before that is due.

    The upper hull of a concave curve and one more point leaves the curve where its line to that point is least steep.
    """
    left = np.where(open_, wants.whole_cost, np.inf)[:, None] - ends
    slope = _significant(np.where(left > 0, (wants.whole_hits[:, None] - hits) / np.where(left > 0, left, 1), np.inf))
    due = np.argmin(slope, axis=1)
    here = np.arange(len(due))
    until = np.where(open_, ends[here, due], np.inf)
    least = np.where(ends[:, :-1] < until[:, None], worth, np.inf).min(axis=1)  # never before its own segments
    best = np.minimum(slope[here, due], least * (1 - 1e-9))
    return np.where(open_, left[here, due], 0.0), np.where(open_, best, 0.0), until


def _significant(values: Floats) -> Floats:
    """Without the last digits, so that equal gains are equal on every processor and the first one listed goes first."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * SIGNIFICANT) / SIGNIFICANT, exponent)


UNCHECKED_SHARE = 0.1
"""Share of rows that slots hold where nothing is known of the memory that they lie in."""
BELOW_DDR = 2
"""Tiers below DDR, the slowest ones, that a shard may have whose slots are in HBM: a stack has four levels at most."""
PARTS = (1.0, 0.5, 0.25, 0.0)
"""Of the HBM that is left beside what shards need at least: slots take DDR too, for what is known of each."""
DDR_TURNS = ((False, False), (True, False), (True, True))
"""Ways to fill DDR, one after the other: what gains hits; all of it, gain or not; all of it, whole shards first."""
Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Room:
    """Bytes that one pod has for shards; inf where nothing is known of a tier."""

    ddr: float
    slow: Mapping[SlowTier, float]
    """Of each slower tier that there is, fastest first."""
    hbm: float = 0.0
    """Of each rank."""


@dataclass(frozen=True)
class Levels:
    """One shard as a stack, or whole in HBM."""

    slots: int
    below: tuple[tuple[LowerTier, int], ...]
    """Rows that each further level may hold, fastest first; none: all rows are in the first for good."""
    first: Literal["ddr", "hbm"] = "ddr"
    """Where the slots lie."""

    @property
    def each(self) -> tuple[tuple[Tier, int], ...]:
        """All levels with their rows, fastest first."""
        return ((self.first, self.slots), *self.below)

    def ddr_bytes(self, stacks: Stacks, shard: int) -> int:
        """Of a stack: slots and scratch pad or what is known of them, map, and bookkeeping of the places below."""
        last = len(self.below) - 1
        places = sum(places_meta_bytes(tier, n, last=k == last) for k, (tier, n) in enumerate(self.below))
        slots = (self.slots + stacks.scratch[shard]) * stacks.slot[shard]
        rows = stacks.rows[shard] * stacks.entry[shard]
        return int(slots + stacks.blocks[shard] * (rows + places))

    def device_bytes(self, stacks: Stacks, shard: int) -> int:
        """HBM of slots and scratch pad, or of all rows."""
        scratch = stacks.scratch[shard] if self.below else 0.0
        return int((self.slots + scratch) * stacks.device_slot[shard])

    def bytes_below(self, stacks: Stacks, shard: int) -> dict[LowerTier, int]:
        """Bytes of rows in each level below the slots, by tier."""
        return {tier: math.ceil(n * stacks.row_bytes(tier)[shard]) for tier, n in self.below}


@dataclass(frozen=True)
class Short:
    """A tier that lacks bytes for the rows of one pod."""

    tier: LowerTier
    missing: int
    """Bytes."""


def tier_tables(which: Indices, ranks: Indices, stacks: Stacks, reuse: Reuse, room: Room) -> dict[int, Levels] | Short:
    """Levels of those of the shards ``which`` that are not whole in DDR; ``ranks`` of them.

    Each tier goes where a byte gains most expected hits: HBM to slots of its rank's shards, then DDR to slots, to whole
    shards, and to rows below slots in HBM. Then the next tiers take what is left, fastest first. DDR that is known
    holds the cheapest form of every shard, and so does HBM. Where slower tiers do not hold the rest, DDR first takes
    whole shards, which need none of them.
    """
    shortest: Short | None = None
    for slots in _device_slots(which, ranks, stacks, reuse, room.hbm):
        for spend_all, wholes in DDR_TURNS if math.isfinite(room.ddr) else DDR_TURNS[:1]:
            filled = _in_ddr(which, slots, stacks, reuse, room, spend_all=spend_all, wholes=wholes)
            found = filled if isinstance(filled, Short) else _below(which, slots, filled, stacks, reuse, room.slow)
            if not isinstance(found, Short):
                return found
            if shortest is None or (found.tier == shortest.tier and found.missing < shortest.missing):
                shortest = found
    assert shortest is not None, "something was tried"
    return shortest


def _device_slots(which: Indices, ranks: Indices, stacks: Stacks, reuse: Reuse, hbm: float) -> Iterator[Floats]:
    """Slots in HBM of each shard, 0 for those on the host; first those that serve most, then those that spare DDR.

    Where DDR cannot hold what is left, whole shards in HBM need none of it for rows, and fewer slots less for the rest.
    """
    here = stacks.on_device[which]
    if not here.any():
        yield np.zeros(len(which))
        return
    if not math.isfinite(hbm):
        yield np.where(here, _whole_or_in_sets(_unchecked(which, stacks), stacks.rows[which], stacks.ways), 0.0)
        return
    for wholes, part in ((False, PARTS[0]), *((True, part) for part in PARTS)):
        slots = np.zeros(len(which))
        for rank in np.unique(ranks[here]).tolist():
            own = np.flatnonzero(here & (ranks == rank))
            slots[own] = _slots_of_rank(which[own], stacks, reuse, hbm, part, wholes=wholes)
        yield slots


def _slots_of_rank(which: Indices, stacks: Stacks, reuse: Reuse, hbm: float, part: float, *, wholes: bool) -> Floats:
    """Slots of the shards of one rank; ``wholes``: first as many whole shards as gain most."""
    rows, slot, slots = stacks.rows[which], stacks.device_slot[which], stacks.least[which].copy()
    left = max(hbm - float(stacks.device_at_least()[which].sum()), 0.0)
    if wholes:
        held = fill(_slot_wants(which, stacks, reuse, slots, slots, (rows - slots) * slot), left)
        slots, left = np.where(held.whole, rows, slots), held.left
    most = np.maximum(stacks.most[which], slots)
    got = fill(_slot_wants(which, stacks, reuse, slots, most, np.inf), part * left, spend_all=True)
    return _whole_or_in_sets(got.rows, rows, stacks.ways)


def _slot_wants(
    which: Indices, stacks: Stacks, reuse: Reuse, start: Floats, stop: Floats, whole_cost: Floats | float
) -> Wants:
    return Wants(
        rows=reuse.rows[which],
        hits=reuse.hits[which],
        start=start,
        stop=stop,
        row_cost=stacks.device_slot[which],
        whole_cost=np.broadcast_to(whole_cost, start.shape),
        whole_hits=reuse.accesses[which],
    )


def _in_ddr(
    which: Indices, slots: Floats, stacks: Stacks, reuse: Reuse, room: Room, *, spend_all: bool, wholes: bool
) -> Filled | Short:
    """Rows of each shard in its slots and in DDR, or that it needs no slower tier; ``wholes``: first many of these."""
    ddr, here, pin, least = room.ddr, stacks.on_device[which], stacks.pin[which], stacks.least[which]
    floor = stacks.fixed[which] + np.where(here, slots, least) * stacks.slot[which]
    backed = stacks.rows[which] * stacks.device_places(last=True)[which]
    whole = np.where(here, floor + np.where(_in_hbm(which, slots, stacks), 0.0, backed), stacks.whole[which])
    bound = (pin == IN_DDR) | ((pin == UNPINNED) & (whole <= floor)) | (here & ((whole <= floor) | (not room.slow)))
    if not math.isfinite(ddr):
        return Filled(np.where(here, slots, _in_sets(_unchecked(which, stacks), stacks.ways)), here | (pin < 0), ddr)
    free = np.flatnonzero(~bound)
    rest = ddr - float(np.where(bound, whole, floor).sum())
    if rest < -len(which) - 1:
        assert here.any(), "the cheapest forms were placed where they fit"
        return Short("ddr", math.ceil(-rest))
    rows, done = np.where(here, slots, least), bound.copy()
    rest = max(rest, 0.0)
    if wholes and len(free):
        wants = _ddr_wants(which[free], slots[free], stacks, reuse, (whole - floor)[free])
        held = fill(replace(wants, stop=wants.start), rest)
        done[free], rest = held.whole, held.left
        free = free[~held.whole]
    if len(free):
        wants = _ddr_wants(which[free], slots[free], stacks, reuse, (whole - floor)[free])
        got = fill(wants, rest, spend_all=spend_all)
        rows[free], done[free] = got.rows, got.whole
    return Filled(np.where(here, rows, _in_sets(rows, stacks.ways)), done, 0.0)


def _ddr_wants(which: Indices, slots: Floats, stacks: Stacks, reuse: Reuse, whole_cost: Floats) -> Wants:
    """More slots on the host, or rows below slots in HBM; or all of a shard."""
    here, least = stacks.on_device[which], stacks.least[which]
    start = np.where(here, slots, least)
    most = np.where(here, np.minimum(stacks.rows[which] - 1, slots + MAX_LINKED_SLOTS), stacks.most[which])
    return Wants(
        rows=reuse.rows[which],
        hits=reuse.hits[which],
        start=start,
        stop=np.maximum(most, start),  # below DDR some level has a row to hold
        row_cost=np.where(here, stacks.device_places(last=False)[which], stacks.slot[which]),
        whole_cost=np.where(stacks.pin[which] >= 0, np.inf, whole_cost),
        whole_hits=reuse.accesses[which],
    )


def _unchecked(which: Indices, stacks: Stacks) -> Floats:
    """Slots of each shard in memory of which nothing is known."""
    least = stacks.least[which]
    wide = np.maximum(least, np.ceil(UNCHECKED_SHARE * stacks.rows[which]))
    return np.minimum(wide, np.maximum(stacks.most[which], least))


def _in_hbm(which: Indices, slots: Floats, stacks: Stacks) -> NDArray[np.bool_]:
    """Shards whose rows have a place each in HBM."""
    return stacks.on_device[which] & (slots >= stacks.rows[which])


def _in_sets(rows: Floats, ways: int) -> Floats:
    return rows if ways == 0 else np.floor(rows / ways) * ways


def _whole_or_in_sets(slots: Floats, rows: Floats, ways: int) -> Floats:
    return np.where(slots >= rows, rows, np.maximum(_in_sets(slots, ways), np.minimum(rows, max(ways, 1))))


def _below(
    which: Indices, slots: Floats, filled: Filled, stacks: Stacks, reuse: Reuse, caps: Mapping[SlowTier, float]
) -> dict[int, Levels] | Short:
    """Rows of each tier below DDR; pinned shards take theirs first.

    The last level of a shard has a place for every row: that is where rows are restored to, where those of a full set
    go while others have room, and what a log fills before it is cleaned.
    """
    stacked = np.flatnonzero(~filled.whole)
    shards, above = which[stacked], filled.rows[stacked]
    total = stacks.rows[shards]
    rest = np.maximum(total - above, 1)  # that some level has to take
    left, held = dict(caps), {tier: np.zeros(len(shards)) for tier in SLOW_TIERS}
    for tier in (tier for tier in SLOW_TIERS if tier in left):
        here = stacks.pin[shards] == SLOW_TIERS.index(tier)
        places = np.where(here, total, 0)
        taken = float((places * stacks.row_bytes(tier)[shards]).sum())
        if taken > left[tier]:
            return Short(tier, math.ceil(taken - left[tier]))
        left[tier] -= taken
        held[tier][here], rest[here] = places[here], 0
    usable: list[SlowTier] = list(left)[-BELOW_DDR:] if stacks.on_device[shards].any() else list(left)
    for tier in usable:
        size = stacks.row_bytes(tier)[shards]
        places = np.where(rest > 0, total, 0)
        needed = float((places * size).sum())
        if needed <= left[tier]:
            held[tier] += places
            break
        if tier == usable[-1]:
            return Short(tier, math.ceil(needed - left[tier]))
        got = np.floor(_middle(shards, total - rest, rest, size, reuse, left[tier]))
        held[tier] += got
        rest = rest - got
    levels = {}
    for k, i in enumerate(shards.tolist()):
        below = tuple((tier, int(held[tier][k])) for tier in SLOW_TIERS if held[tier][k] > 0)
        levels[i] = _levels(stacks, i, slots[stacked[k]], above[k], below)
    in_hbm = _in_hbm(which, slots, stacks)
    for k in np.flatnonzero(filled.whole & stacks.on_device[which]).tolist():
        i, rows = int(which[k]), int(stacks.rows[which[k]])
        levels[i] = Levels(rows, (), "hbm") if in_hbm[k] else Levels(int(slots[k]), (("ddr", rows),), "hbm")
    return levels


def _levels(stacks: Stacks, shard: int, slots: float, above: float, below: tuple[tuple[LowerTier, int], ...]) -> Levels:
    """Levels of a shard with rows below DDR; ``above``: those in its slots and in DDR."""
    if not stacks.on_device[shard]:
        return Levels(int(above), below)
    between = int(above - slots)
    return Levels(int(slots), ((("ddr", between),) if between > 0 else ()) + below, "hbm")


def _middle(shards: Indices, above: Floats, rest: Floats, size: Floats, reuse: Reuse, budget: float) -> Floats:
    """Rows that a level between the first and the last takes of each shard, filling its tier."""
    wants = Wants(
        rows=reuse.rows[shards],
        hits=reuse.hits[shards],
        start=above,
        stop=above + np.clip(rest - 1, 0, MAX_LINKED_SLOTS),  # so that the last level stays the last
        row_cost=size,
        whole_cost=np.full(len(shards), np.inf),
        whole_hits=np.zeros(len(shards)),
    )
    return np.asarray(fill(wants, budget, spend_all=True).rows - above)
