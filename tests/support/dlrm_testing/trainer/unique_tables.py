"""A model of unique tables in plain Python: what their rows are after each step, and how training keeps them so.

``Replay`` is the definition: batches one after another, nothing ahead, no cut and no restart. ``ModelTrainer`` adds all
that must not show in its rows: local rows, lookups ahead, cuts that are copied while rows change and leave, lost cuts,
and restores at other numbers of ranks.

A key's bucket is ``key // width``. A row's value is a hash of all updates that it had.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from dlrm_api.keys import KEY_BITS
from dlrm_kernels.eviction import DECAY_PARTS, swept_rows, tie_of
from dlrm_kernels.hashing import mix
from dlrm_trainer.embedding.unique import DEFAULT_POLICY, UniquePolicy

MAX_KEPT = 3
NO_SALT = np.uint64(0)
Batch = Sequence[int]


@dataclass(frozen=True)
class Shape:
    buckets: int
    quota: int
    width: int
    """Keys of a bucket."""
    period: int | None
    """Steps from one maintenance to the next; None: adapted."""
    policy: UniquePolicy = DEFAULT_POLICY

    def bucket(self, key: int) -> int:
        return key // self.width

    def key(self, name: int) -> int:
        """Return the key that stands for one of the model: they are spread over their bucket."""
        width = (1 << KEY_BITS) // self.buckets
        return name // self.width * width + name % self.width * (width // self.width)

    def leaving(self, rows: Mapping[int, Row], step: int = 0, *, is_due: bool = False) -> set[int]:
        """Keys that leave a bucket's rows in the maintenance after a step."""
        age = self.policy.rules.age_steps
        expired = {key for key, row in rows.items() if age and row.touched + age <= step}
        if len(rows) * 100 <= self.quota * 97:
            return expired if is_due else set()
        order = sorted(rows, key=lambda key: (key not in expired, self.rank(rows[key], step), tie_of(self.key(key))))
        return expired | set(order[: len(rows) - swept_rows(np.array([len(rows)]), self.quota)[0]])

    def rank(self, row: Row, step: int) -> float:
        if not self.policy.has_scores:
            return row.touched
        return float(np.float32(self.decayed(row, step)) / np.float32(max(0, step - row.touched) + 1))

    def decayed(self, row: Row, step: int) -> float:
        """Return the score in a step."""
        part = self.policy.rules.decay_steps
        return float(np.float32(row.score) * powers(max(0, step // part - row.touched // part)))

    def is_due(self, bucket: int, step: int, last_step: int) -> bool:
        """Whether the maintenance after a step removes expired keys from a bucket that is not full."""
        interval = max(1, self.policy.rules.age_steps // 16)
        shift = bucket % interval
        return (step + shift) // interval > (last_step + shift) // interval


def powers(parts: int) -> np.float32:
    found = np.float32(1)
    for _ in range(parts):
        found *= np.float32(2 ** (-1 / DECAY_PARTS))
    return found if parts < 32 * DECAY_PARTS else np.float32(0)


def cells_of_bucket(shape: Shape) -> int:
    return -(-shape.quota * 2 // 48) * 48


def cells_of(shape: Shape, key: int) -> set[tuple[int, int]]:
    """Return the bucket and cell of the counters of a key without a row."""
    cells = cells_of_bucket(shape)
    hashed = int(mix(np.uint64(key)))
    return {(shape.bucket(key), half * cells >> 32) for half in (hashed & 2**32 - 1, hashed >> 32)}


def has_chance(key: int, salt: np.uint64, chance: int) -> bool:
    return int(mix(np.uint64(key) ^ salt)) <= chance


class Row(NamedTuple):
    value: int
    touched: int
    score: float = 0.0


@dataclass
class Period:
    """When the next maintenance comes: state of the model as a whole."""

    fixed: int | None
    steps: int
    lookups: int = 0
    full: int = 0
    """Lookups since the last maintenance that found their bucket full, or only waited for it."""
    last_step: int = 0
    rows: int = 0
    """After the last maintenance."""

    @classmethod
    def of(cls, shape: Shape) -> Period:
        return cls(shape.period, shape.period or 8)

    def is_due(self, step: int) -> bool:
        return step % self.steps == 0

    def next_due(self, step: int) -> int:
        return (step // self.steps + 1) * self.steps

    def maintained(self, shape: Shape, step: int, before: int, after: int) -> None:
        """``before`` and ``after`` are the rows of the table."""
        capacity, added = shape.buckets * shape.quota, max(0, before - self.rows)
        if self.fixed is None:
            if self.full * 100 > self.lookups:
                self.steps = max(1, self.steps // 2)
            elif self.full * 1_000 < self.lookups:
                self.steps = min(64, self.steps * 2)
            space = (capacity - after) * (step - self.last_step)
            while self.steps > 1 and 2 * added * self.steps > space:
                self.steps //= 2
        self.lookups = self.full = 0
        self.last_step, self.rows = step, after

    def copy(self) -> Period:
        return replace(self)


def most_seen_first(sights: Counter[int]) -> list[int]:
    """Keys in the order in which they get the last rows of their bucket."""
    return sorted(sights, key=lambda key: (-sights[key], key))


def initial(key: int) -> int:
    return hash(("initial", key))


def updated(value: int, step: int, lookups: int) -> int:
    return hash((value, step, lookups))


class Replay:
    """Rows after each step, by definition."""

    def __init__(self, shape: Shape) -> None:
        self._shape, self.step = shape, 0
        self.rows: dict[int, Row] = {}
        self.period = Period.of(shape)
        self.counts: Counter[tuple[int, int]] = Counter()
        """Of sights, by cell."""
        self.settled: Counter[tuple[int, int]] = Counter()
        """Those at the last maintenance."""
        self.halvings = 0

    def train(self, batch: Batch, salt: np.uint64 = NO_SALT, extra_steps: Sequence[int] | None = None) -> None:
        """``extra_steps`` are those of each lookup's feature."""
        self.step += 1
        shape, lookups, extra = self._shape, Counter(batch), Counter[int]()
        for key, steps in zip(batch, extra_steps or [0] * len(batch), strict=True):
            extra[key] = max(extra[key], steps)
        fill, seen_before = Counter(map(shape.bucket, self.rows)), self.counts.copy()
        for key in most_seen_first(lookups):
            cells = cells_of(shape, key)
            is_known = min(self.settled[cell] for cell in cells) >= shape.policy.rules.seen_before
            if not is_known and key not in self.rows:
                is_waiting = min(seen_before[cell] for cell in cells) >= shape.policy.rules.seen_before
                self.period.full += lookups[key] * is_waiting
            if key not in self.rows and is_known and has_chance(key, salt, shape.policy.chance):
                if fill[shape.bucket(key)] < shape.quota:
                    fill[shape.bucket(key)] += 1
                    self.rows[key] = Row(initial(key), 0)
                else:
                    self.period.full += lookups[key]
            if key in self.rows:
                row, score = self.rows[key], np.float32(0)
                if shape.policy.has_scores:
                    score = np.float32(shape.decayed(row, self.step))
                    for _ in range(lookups[key]):
                        score += np.float32(1)
                until = max(row.touched, self.step + extra[key])
                self.rows[key] = Row(updated(row.value, self.step, lookups[key]), until, float(score))
            elif shape.policy.rules.seen_before:
                for cell in cells:
                    self.counts[cell] = min(15, self.counts[cell] + lookups[key])
        self.period.lookups += len(batch)
        if self.period.is_due(self.step):
            before = len(self.rows)
            for bucket in range(shape.buckets):
                held = {key: row for key, row in self.rows.items() if shape.bucket(key) == bucket}
                is_due = shape.is_due(bucket, self.step, self.period.last_step)
                for key in shape.leaving(held, self.step, is_due=is_due):
                    del self.rows[key]
            for bucket in range(shape.buckets):
                here = [cell for cell in self.counts if cell[0] == bucket]
                total = sum(self.counts[cell] for cell in here)
                if 2 * total > shape.policy.rules.seen_before * cells_of_bucket(shape):
                    self.halvings += 1
                    for cell in here:
                        self.counts[cell] //= 2
            self.settled = self.counts.copy()
            self.period.maintained(shape, self.step, before, len(self.rows))


@dataclass(frozen=True)
class Snapshot:
    parent: int | None
    rows: Mapping[int, Row]
    gone: frozenset[int]
    period: Period


Store = dict[int, Snapshot]
"""Committed snapshots by step."""


def merge(store: Store, step: int) -> dict[int, Row]:
    """Rows of a snapshot with its ancestors: a key is what the newest of them says that names it."""
    found: dict[int, Row | None] = {}
    at: int | None = step
    while at is not None:
        for key in store[at].gone:
            found.setdefault(key, None)
        for key, row in store[at].rows.items():
            found.setdefault(key, row)
        at = store[at].parent
    return {key: row for key, row in found.items() if row is not None}


def fold(upper: Snapshot, lower: Snapshot) -> Snapshot:
    """One snapshot in place of two neighbours of a chain."""
    rows = {key: row for key, row in lower.rows.items() if key not in upper.gone} | dict(upper.rows)
    gone = frozenset() if lower.parent is None else (lower.gone - upper.rows.keys()) | upper.gone
    return Snapshot(lower.parent, rows, gone, upper.period)


@dataclass
class ModelCut:
    """What a cut in progress has copied, and which local rows of each part it has not."""

    step: int
    parent: int | None
    period: Period
    gone: set[int] = field(default_factory=set)
    rows: dict[int, Row] = field(default_factory=dict)
    pending: list[dict[int, int]] = field(default_factory=list)
    """Key of each local row, by part."""


class ModelPart:
    """Buckets of the table on one rank. Bits belong to local rows, and are cleared when a row's key leaves."""

    def __init__(self, shape: Shape, buckets: range) -> None:
        self._shape, self.buckets = shape, buckets
        self._free = list(range(len(buckets) * shape.quota))
        self.local: dict[int, int] = {}
        self._rows: dict[int, Row] = {}
        self._held: set[int] = set()
        self._marked: set[int] = set()
        self._kept: list[tuple[int, set[int], set[int]]] = []
        self._stored: set[int] = set()
        self._gone: set[int] = set()

    def restore(self, rows: Mapping[int, Row]) -> None:
        for key in sorted(rows):
            local = self.local[key] = heapq.heappop(self._free)
            self._rows[local] = rows[key]
            self._held.add(local)
            self._stored.add(local)

    def look_up(self, keys: Iterable[int]) -> dict[int, int | None]:
        """Local row of each key; those seen most often get one first, while their bucket has space."""
        fill, sights = Counter(map(self._shape.bucket, self.local)), Counter(keys)
        found: dict[int, int | None] = {}
        for key in most_seen_first(sights):
            bucket = self._shape.bucket(key)
            if key not in self.local and fill[bucket] < self._shape.quota:
                fill[bucket] += 1
                local = self.local[key] = heapq.heappop(self._free)
                self._rows[local] = Row(initial(key), 0)
            found[key] = self.local.get(key)
        return found

    @property
    def count(self) -> int:
        return len(self.local)

    def read(self, key: int) -> int | None:
        """What an evaluation reads: the value of a row that was ever updated."""
        local = self.local.get(key)
        return self._rows[local].value if local in self._held and local is not None else None

    def update(self, lookups: Mapping[int, int], places: Mapping[int, int | None], step: int) -> int:
        """Update each row once; return the lookups without a row."""
        absent = 0
        for key, count in lookups.items():
            local = places[key]
            if local is None:
                absent += count
                continue
            self._rows[local] = Row(updated(self._rows[local].value, step, count), step)
            self._held.add(local)
            self._marked.add(local)
        return absent

    def save_before(self, places: Iterable[int | None], cut: ModelCut | None, number: int) -> None:
        for local in places:
            if cut is not None and local in cut.pending[number]:
                cut.rows[cut.pending[number].pop(local)] = self._rows[local]

    def maintain(self, cut: ModelCut | None, number: int) -> None:
        assert set(self.local.values()) == self._held, "a row is in flight"
        for bucket in self.buckets:
            rows = {key: self._rows[at] for key, at in self.local.items() if self._shape.bucket(key) == bucket}
            for key in self._shape.leaving(rows):
                self._leave(key, cut, number)

    def _leave(self, key: int, cut: ModelCut | None, number: int) -> None:
        local = self.local.pop(key)
        self._held.remove(local)
        # A snapshot, or a cut that may become one, holds the key.
        if local in self._stored or any(local in kept for _, kept, _ in self._kept):
            self._gone.add(key)
        for bits in (self._marked, self._stored, *(kept for _, kept, _ in self._kept)):
            bits.discard(local)
        self.save_before([local], cut, number)
        heapq.heappush(self._free, local)

    @property
    def first_parent(self) -> int:
        """Step of the oldest cut that a cut may have as its parent."""
        return 0

    def begin_cut(self, cut: ModelCut) -> None:
        if cut.parent is None:
            self._marked |= self._stored
            self._stored = set()
        else:
            for step, kept, _ in self._kept:
                if step <= cut.parent:
                    self._stored |= kept
            self._kept = [each for each in self._kept if each[0] > cut.parent]
        if len(self._kept) == MAX_KEPT:
            (_, old, old_gone), (step, newer, newer_gone) = self._kept[:2]
            self._kept[:2] = [(step, old | newer, old_gone | newer_gone)]
        self._kept.append((cut.step, self._marked, self._gone))
        self._marked, self._gone = set(), set()
        keys = {self.local[key]: key for key in self.local if self.local[key] in self._held}
        changed = set[int]().union(*(kept for _, kept, _ in self._kept))
        assert changed <= self._held
        cut.pending.append({local: keys[local] for local in changed})
        if cut.parent is not None:
            # Keys that were updated again are rows of this cut; those that were only looked up ahead are not.
            cut.gone |= set[int]().union(*(gone for *_, gone in self._kept)) - set(keys.values())

    def copy(self, cut: ModelCut, number: int, most: int) -> None:
        for local in list(cut.pending[number])[:most]:
            cut.rows[cut.pending[number].pop(local)] = self._rows[local]

    def state(self) -> dict[int, Row]:
        return {key: self._rows[local] for key, local in self.local.items() if local in self._held}

    def check(self) -> None:
        used = [*self.local.values(), *self._free]
        assert sorted(used) == list(range(len(self.buckets) * self._shape.quota))
        assert max(Counter(map(self._shape.bucket, self.local)).values(), default=0) <= self._shape.quota


class ModelTrainer:
    """All ranks of a job, from a restored snapshot on or from the start."""

    def __init__(
        self,
        shape: Shape,
        world_size: int,
        lookahead: int,
        store: Store | None = None,
        step: int = 0,
        part: Callable[[Shape, range], ModelPart] = ModelPart,
    ) -> None:
        edges = [shape.buckets * rank // world_size for rank in range(world_size + 1)]
        self._shape, self._lookahead = shape, lookahead
        self._parts = [part(shape, range(*edges[rank : rank + 2])) for rank in range(world_size)]
        self.step, self.period = step, Period.of(shape)
        if store is not None and step:
            rows = merge(store, step)
            self.period = store[step].period.copy()
            for each in self._parts:
                each.restore({key: row for key, row in rows.items() if shape.bucket(key) in each.buckets})
        self._ahead: deque[list[dict[int, int | None]]] = deque()
        self.cut: ModelCut | None = None

    def train(self, batches: Sequence[Batch]) -> None:
        """Make one step, with later batches looked up ahead, but none past the next maintenance."""
        last = min(self.step + 1 + self._lookahead, len(batches), self.period.next_due(self.step))
        while self.step + len(self._ahead) < last:
            batch = batches[self.step + len(self._ahead)]
            self._ahead.append([part.look_up(self._own(part, batch)) for part in self._parts])
        lookups, places = Counter(batches[self.step]), self._ahead.popleft()
        self.step += 1
        for number, part in enumerate(self._parts):
            own = {key: lookups[key] for key in self._own(part, lookups)}
            part.save_before(places[number].values(), self.cut, number)
            self.period.full += part.update(own, places[number], self.step)
        self.period.lookups += lookups.total()
        if self.period.is_due(self.step):
            assert not self._ahead
            before = sum(part.count for part in self._parts)
            for number, part in enumerate(self._parts):
                part.maintain(self.cut, number)
            self.period.maintained(self._shape, self.step, before, sum(part.count for part in self._parts))
        for part in self._parts:
            part.check()

    def _own(self, part: ModelPart, keys: Iterable[int]) -> list[int]:
        return [key for key in keys if self._shape.bucket(key) in part.buckets]

    def begin_cut(self, parent: int | None) -> None:
        self.end_cut()
        if parent is not None and parent < max(part.first_parent for part in self._parts):
            parent = None
        self.cut = ModelCut(self.step, parent, self.period.copy())
        for part in self._parts:
            part.begin_cut(self.cut)

    def copy(self, most: int) -> None:
        """Copy some rows of the cut."""
        for number, part in enumerate(self._parts):
            if self.cut is not None:
                part.copy(self.cut, number, most)

    def finish_cut(self) -> tuple[int, Snapshot] | None:
        """Copy the rest, and return the cut's step and what is handed over; None without a cut."""
        if (cut := self.cut) is None:
            return None
        self.copy(10**9)
        self.end_cut()
        return cut.step, Snapshot(cut.parent, cut.rows, frozenset(cut.gone), cut.period)

    def end_cut(self) -> None:
        """Drop a cut that is not handed over."""
        self.cut = None

    def read(self, keys: Iterable[int]) -> dict[int, int | None]:
        return {key: part.read(key) for part in self._parts for key in self._own(part, keys)}

    def state(self) -> dict[int, Row]:
        return {key: row for part in self._parts for key, row in part.state().items()}
