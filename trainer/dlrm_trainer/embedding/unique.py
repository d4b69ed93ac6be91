"""Give the keys of a part of a unique table local rows: admission, eviction, and what cuts must say of keys that left.

Keys get rows when a batch is looked up, maybe before earlier batches are updated, and lose them only in a maintenance,
where no batch is in flight. A row is *held* from its key's first update on: only held rows are in cuts and are read by
evaluations, so that both see what a run that is restored at this step sees.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from dlrm_api.errors import InvalidSpecError
from dlrm_api.keys import KeyBuckets
from dlrm_api.model import MAX_MAINTENANCE_STEPS, AdmissionSpec, EvictionSpec, TableSpec
from dlrm_kernels import admission, directory, eviction
from dlrm_kernels.admission import ALL_CHANCES
from dlrm_kernels.directory import ABSENT, MAX_STEP, RECENT, Rules
from dlrm_kernels.dirty_rows import WORD
from dlrm_kernels.eviction import DECAY_PARTS
from dlrm_kernels.row_updates import step_keys, table_key
from dlrm_trainer.embedding.changes import MAX_KEPT, DirtyPart
from dlrm_trainer.embedding.evicted_keys import EvictedKeys
from dlrm_trainer.embedding.tiers.slots import untouched_zeros

Ints = NDArray[np.int64]
INITIAL_STEPS = 8
HALF_LIFE_LOOKUPS = 20
"""Lookups per row in the default half-life of scores, which has at least so many steps:"""
MIN_HALF_LIFE_STEPS = 100
CHECKS_OF_AGE = 16
"""Expired rows leave their bucket so many times within their greatest age."""
NO_PARENT = sys.maxsize
MAX_GONE_SHARE = 0.5
"""Keys that left are remembered up to this share of the rows of a part."""
NO_KEYS = np.empty(0, np.int64)


class LookupCounts(NamedTuple):
    """Count lookups in unique tables."""

    lookups: int = 0
    without_row: int = 0
    """Of ids that found their bucket full, or only wait for the next maintenance to be admitted."""

    def plus(self, other: LookupCounts) -> LookupCounts:
        """Return the sums."""
        return LookupCounts(self.lookups + other.lookups, self.without_row + other.without_row)


class Maintained(NamedTuple):
    """Count what a maintenance of unique tables found and left, on one rank or all."""

    lookups: LookupCounts
    """Since the maintenance before."""
    before: Ints
    """(T,) rows of each table."""
    after: Ints
    """(T,)"""

    def flat(self) -> Ints:
        """Return all counts, to be summed over ranks."""
        return np.concatenate([self.lookups, self.before, self.after])

    @classmethod
    def of(cls, counts: Sequence[float]) -> Maintained:
        """Return counts from sums of ``flat``."""
        lookups, without_row, *rows = map(int, counts)
        before, after = np.array(rows, np.int64).reshape(2, -1)
        return cls(LookupCounts(lookups, without_row), before, after)


class MaintenancePeriod(BaseModel):
    """Say when the next maintenance comes: after each step that ``steps`` divides. Equal on all ranks.

    Only a maintenance empties buckets and admits counted ids. The period halves while over 1 % of lookups find their
    bucket full or wait to be admitted, and doubles below 0.1 %, unless as many new rows as in the last period would
    then take over half of a table's space.
    """

    model_config = ConfigDict(frozen=True)

    steps: int = INITIAL_STEPS
    is_fixed: bool = False
    lookups: int = 0
    """In unique tables, of all ranks, since the last maintenance."""
    without_row: int = 0
    last_step: int = 0
    """Of the last maintenance; 0 without any."""
    rows: tuple[int, ...] = ()
    """Of each unique table after it; empty without any."""
    slab_rows: tuple[int, ...] = ()
    """Of each class of each of ``ModelSizes.kinds`` after it; empty without any."""
    steps_down: int = 0
    """Classes by which rows start lower, for lack of space."""

    @classmethod
    def begin(cls, chosen: int | Literal["auto"], stored: Mapping[str, Any] | None) -> MaintenancePeriod:
        """Return the period of a spec's ``maintenanceSteps``, as the restored snapshot has it."""
        period = cls.model_validate(stored or {})
        if chosen == "auto":
            return period.model_copy(update={"is_fixed": False})
        return period.model_copy(update={"steps": chosen, "is_fixed": True})

    def is_due(self, step: int) -> bool:
        """Return whether a maintenance follows the update of this step."""
        return step % self.steps == 0

    def next_due(self, step: int) -> int:
        """Return the first step after this one that a maintenance follows."""
        return (step // self.steps + 1) * self.steps

    def counted(self, counts: LookupCounts) -> MaintenancePeriod:
        """Return the period with the counts of all ranks."""
        return self.model_copy(update=counts._asdict())

    def maintained(self, step: int, counts: Maintained, capacity: Ints) -> MaintenancePeriod:
        """Return the adapted period that the maintenance after a step begins.

        ``counts`` are those of all ranks, and ``capacity`` the (T,) most rows of each table.
        """
        steps, last_steps = self.steps, step - self.last_step
        grown = np.maximum(counts.before - np.array(self.rows or (0,), np.int64), 0)
        if not self.is_fixed:
            lookups, without_row = counts.lookups
            if without_row * 100 > lookups:
                steps = max(1, steps // 2)
            elif without_row * 1_000 < lookups:
                steps = min(MAX_MAINTENANCE_STEPS, steps * 2)
            space = (capacity - counts.after) * last_steps
            while steps > 1 and (2 * grown * steps > space).any():
                steps //= 2
        return MaintenancePeriod(steps=steps, is_fixed=self.is_fixed, last_step=step, rows=tuple(counts.after.tolist()))


@dataclass(frozen=True)
class UniquePolicy:
    """Say which ids of a unique table get rows and which rows leave, in steps of a job."""

    rules: Rules = RECENT
    chance: int = ALL_CHANCES
    """See ``admission.Chances``."""
    is_by_gradient: bool = False
    """Whether lookups count by the norm of their gradient, rather than 1 each."""
    extra_steps: tuple[int, ...] = ()
    """Of each of the table's features: steps by which its lookups keep rows longer than ``rules.age_steps``."""
    half_life_steps: int = MIN_HALF_LIFE_STEPS
    """Also without scores: within it, an evicted id should not come back."""

    @classmethod
    def of(cls, table: TableSpec, batch_size: int) -> UniquePolicy:
        """Read a table's policy, for global batches of so many samples."""
        keeping = table.embedding.eviction or EvictionSpec()
        admitting = table.embedding.admission or AdmissionSpec()
        half_life = _half_life_steps(table, keeping.half_life_samples, batch_size)
        decay_steps = 0 if keeping.keep == "recent" else max(1, half_life // DECAY_PARTS)
        ages = [-(-samples // batch_size) for samples in keeping.max_age_samples] or [0]
        ages *= len(table.sources) if len(ages) == 1 else 1
        return cls(
            rules=Rules(decay_steps, min(ages), (admitting.count or 1) - 1),
            chance=min(int((admitting.probability or 1.0) * 2.0**64), ALL_CHANCES),
            is_by_gradient=keeping.keep == "useful",
            extra_steps=tuple(age - min(ages) for age in ages),
            half_life_steps=half_life,
        )

    @property
    def has_scores(self) -> bool:
        """Return whether rows have a score besides their last touch."""
        return self.rules.decay_steps > 0


DEFAULT_POLICY = UniquePolicy()


def _half_life_steps(table: TableSpec, samples: int | None, batch_size: int) -> int:
    if samples is not None:
        return -(-samples // batch_size)
    looked_up = (table.lookups or table.max_lookups) * len(table.sources)
    return max(MIN_HALF_LIFE_STEPS, int(HALF_LIFE_LOOKUPS * table.rows / looked_up / batch_size))


class Admitted(NamedTuple):
    """Hold the result of a lookup for training, of all parts of a group."""

    rows: Ints
    """(L,) local row of each key, or ``ABSENT``."""
    places: Ints
    """(L,) where the directory holds it: valid until the next maintenance."""
    new_keys: Ints
    """(m,) keys that got a row now, part by part; each must start from its initial value."""
    new_rows: Ints
    """(m,) their rows, ascending within each part."""
    new_parts: Ints
    """(m,) their parts."""
    has_row: NDArray[np.bool_]
    """(L,)"""
    counts: LookupCounts


class Leaving(NamedTuple):
    """Name the rows that leave a part; (n,) each."""

    keys: Ints
    rows: Ints
    by_age: NDArray[np.bool_]
    """Whether each has expired; the others left a full bucket."""


class HeldKeys(NamedTuple):
    """List the held rows of a part; (n,) each."""

    keys: Ints
    """Ascending."""
    rows: Ints
    steps: Ints
    """Of the last touch."""
    scores: NDArray[np.float32] | None
    """At the last touch; None if rows have none."""

    @property
    def values(self) -> NDArray[np.float32]:
        """Return the (n, V) ``TableMeta.row_values``: bits of the steps, and the scores if rows have them."""
        touched = self.steps.astype(np.uint32).view(np.float32)
        return np.stack([touched] if self.scores is None else [touched, self.scores], axis=1)


def ranks_of(values: NDArray[np.float32], policy: UniquePolicy, step: int) -> NDArray[np.float64]:
    """Return the order in which (n, V) rows leave a full bucket after a step, the lowest first: see ``sweep``."""
    touched = np.ascontiguousarray(values[:, 0]).view(np.uint32).astype(np.float64)
    if not policy.has_scores or values.shape[1] == 1:
        return touched
    parts = step // policy.rules.decay_steps - touched // policy.rules.decay_steps
    scores = values[:, 1].astype(np.float64) * 2.0 ** (-np.maximum(parts, 0) / DECAY_PARTS)
    ranks: NDArray[np.float64] = eviction.worth_of(scores, np.maximum(step - touched, 0))
    return ranks


class _Gone(NamedTuple):
    step: int
    """Of the cut that keys left before."""
    keys: list[Ints]


class _Listed(NamedTuple):
    """Say what held rows are, by local row."""

    keys: Ints
    values: NDArray[np.float32]
    """(rows, V)"""


class UniqueRows:
    """Map the keys of consecutive buckets of a unique table to local rows.

    All of this needs a moment without a batch in flight; ``UniqueGroup`` has what batches need.
    """

    def __init__(
        self, table: str, buckets: KeyBuckets, owned: range, dirty: DirtyPart, policy: UniquePolicy = DEFAULT_POLICY
    ) -> None:
        self.table, self.policy, self._dirty = table, policy, dirty
        self.directory = directory.make_directory(
            first_bucket=owned.start,
            buckets=len(owned),
            all_buckets=buckets.count,
            quota=buckets.quota,
            homes=buckets.homes,
            stride=buckets.slots,
            rows=len(owned) * buckets.quota,
            rules=policy.rules,
            count_rows=buckets.count_rows,
        )
        """In the memory of a ``UniqueGroup`` once it has the part."""
        self._gone: list[Ints] = []
        """Keys that left since the last cut and may be in a snapshot."""
        self._kept: list[_Gone] = []
        """Those that left before cuts that are in no known snapshot."""
        self.first_parent = 0
        """Step of the oldest cut that a cut may have as its parent; ``NO_PARENT``: none may."""
        self._listed: _Listed | None = None
        """Of a cut in progress."""
        self.evicted = self.expired = 0
        """Keys that left since the attempt began, from full buckets and by their age."""

    @property
    def quota_rows(self) -> int:
        """Return the most rows at a time."""
        return len(self.directory.fill) * self.directory.quota

    @property
    def count(self) -> int:
        """Return the number of keys, those in flight included."""
        return int(self.directory.fill.sum())

    @property
    def fullest(self) -> int:
        """Return the number of keys of the fullest bucket."""
        return int(self.directory.fill.max())

    def read(self, keys: Ints) -> Ints:
        """Return the (n,) held rows of keys, ``ABSENT`` for others."""
        rows, places = np.empty((2, len(keys)), np.int64)
        directory.find(self.directory, keys, rows, places)
        return _held_only(self.directory.slots, rows, places)

    def choose_leaving(self, step: int, last_step: int) -> Leaving:
        """Remove the keys that must leave in the maintenance after a step; their rows stay taken until ``free``.

        ``last_step`` is that of the maintenance before.
        """
        owned, due = self.directory, np.zeros(len(self.directory.fill), np.bool_)
        if owned.age_steps:
            # Not all buckets in one maintenance.
            interval = max(1, owned.age_steps // CHECKS_OF_AGE)
            shift = (owned.first_bucket + np.arange(len(due))) % interval
            due = (step + shift) // interval > (last_step + shift) // interval
        left = Leaving(*eviction.sweep(owned, step, due, torch.get_num_threads()))
        expired = int(left.by_age.sum())
        self.evicted += len(left.keys) - expired
        self.expired += expired
        return left

    def free(self, left: Leaving) -> None:
        """Free the rows of keys that left, once a cut in progress has saved them."""
        is_stored = self._dirty.clear_rows(left.rows)
        directory.free_rows(self.directory, left.rows)
        if is_stored.any():
            self._gone.append(left.keys[is_stored])
            self._forget_many()

    def _forget_many(self) -> None:
        """Forget keys that left if they would take as much space in a cut as the rows: it needs no parent then."""
        count = sum(len(keys) for keys in self._gone) + sum(len(keys) for kept in self._kept for keys in kept.keys)
        if count > self.quota_rows * MAX_GONE_SHARE:
            self._gone.clear()
            self._kept.clear()
            self.first_parent = NO_PARENT

    def begin_cut(self, step: int, parent: int | None) -> None:
        """Close the list of keys that left for a cut, as ``DirtyRows.cut`` does with changed rows.

        Until ``end_cut``, ``describe`` answers as of now.
        """
        if parent is not None:
            assert parent >= self.first_parent, "keys that left since the parent are forgotten"
            self._kept = [kept for kept in self._kept if kept.step > parent]
        elif self.first_parent == NO_PARENT:
            self.first_parent = step
        if len(self._kept) == MAX_KEPT:
            old, newer = self._kept[:2]
            self._kept[:2] = [_Gone(newer.step, old.keys + newer.keys)]
        self._kept.append(_Gone(step, self._gone))
        self._gone = []
        self._listed = self._list()

    def end_cut(self) -> None:
        """Forget what rows were at the last cut."""
        self._listed = None

    def describe(self, rows: Ints) -> tuple[Ints, NDArray[np.float32]]:
        """Return the keys and (n, V) values of (n,) rows held when the cut in progress began."""
        assert self._listed is not None, "no cut is in progress"
        return self._listed.keys[rows], self._listed.values[rows]

    def _list(self) -> _Listed:
        count, values = len(self.directory.used) * WORD, 1 + self.policy.has_scores
        listed = _Listed(np.zeros(count, np.int64), np.zeros((count, values), np.float32))
        directory.describe_rows(self.directory, listed.keys, listed.values.view(np.uint32), torch.get_num_threads())
        return listed

    def gone(self) -> Ints:
        """Return the keys, ascending, that left since the parent of the cut just begun and were not updated again."""
        keys = np.unique(np.concatenate([NO_KEYS, *(keys for kept in self._kept for keys in kept.keys)]))
        gone: Ints = keys[self.read(keys) == ABSENT]
        return gone

    def held(self) -> HeldKeys:
        """List the held rows."""
        keys, entries = directory.list_keys(self.directory, torch.get_num_threads())
        steps = directory.steps_of(entries)
        chosen = steps > 0
        rows = directory.rows_of(entries[chosen])
        scores = self.directory.scores[rows] if self.policy.has_scores else None
        return HeldKeys(keys[chosen], rows, steps[chosen], scores)

    def restore(self, keys: Ints, steps: Ints, scores: NDArray[np.float32] | None) -> Ints:
        """Give rows to (n,) ascending keys of a snapshot; return the rows.

        ``steps`` are those of their last touch; ``scores`` are None for a snapshot that has none.

        Raises:
            InvalidSpecError: a bucket has fewer rows than the snapshot has keys of it.
        """
        rows, places = self._insert(keys)
        if (rows == ABSENT).any():
            raise InvalidSpecError(
                "spec.model.tables", f"table {self.table}: the snapshot has more rows in a bucket than fit; raise rows"
            )
        directory.touch(self.directory.slots, places, steps)
        if self.policy.has_scores and scores is not None:
            self.directory.scores[rows] = scores
        return rows

    def _insert(self, keys: Ints) -> tuple[Ints, Ints]:
        rows, places = np.empty((2, len(keys)), np.int64)
        done = directory.insert(self.directory, keys, rows, places)
        if done < len(keys):
            raise self.no_slot(int(keys[done]))
        return rows, places

    def no_slot(self, key: int) -> InvalidSpecError:
        """Return the error about a key that found no slot."""
        return InvalidSpecError(
            "spec.training.seed",
            f"table {self.table}: too many ids hash to neighbours of key {key}; set another seed, which hashes ids "
            "otherwise",
        )


class UniqueGroup:
    """Look up the keys of a batch in all parts of a group.

    Args:
        parts: of the group; their keys are stored together from now on.
        part_of: (C,) number of each column's part, ascending.
        seed: of the job.
    """

    def __init__(self, parts: Sequence[UniqueRows], part_of: Sequence[int], seed: int) -> None:
        self.parts = parts
        empty = [part.directory for part in parts]
        slots = untouched_zeros(2 * sum(len(each.slots) for each in empty), np.int64).reshape(-1, 2)
        self._group, members = directory.make_group(empty, slots)
        for part, member in zip(parts, members, strict=True):
            part.directory = member
        self.counts = np.zeros((5, len(parts)), np.int64)
        """Of each part, since the attempt began: lookups; those whose key found its bucket full; keys admitted; lookups
        that admission declined; keys admitted that ``evicted`` knows."""
        self.evicted = EvictedKeys([part.quota_rows for part in parts], [part.policy.half_life_steps for part in parts])
        self._keys = np.array([table_key(seed, part.table) for part in parts], np.uint64)
        self._chances = np.array([part.policy.chance for part in parts], np.uint64)
        self._columns = np.searchsorted(part_of, np.arange(len(parts) + 1))
        extra = (part.policy.extra_steps or (0,) * n for part, n in zip(parts, np.diff(self._columns), strict=True))
        self._extra_steps = np.array([steps for each in extra for steps in each], np.int64)
        self.by_gradient = np.array([parts[part].policy.is_by_gradient for part in part_of], np.bool_)
        """(C,) whether lookups of each column count by the norm of their gradient."""

    def admit(self, keys: Ints, ends: Ints, step: int) -> Admitted:
        """Look up (L,) keys of the batch of a step from 1, those of each part up to its (K,) end.

        Keys without a row get one in order, while there is space in their bucket, if they have the chance.

        Raises:
            InvalidSpecError: so many keys are close to each other that a directory has no slot for one.
        """
        threads = torch.get_num_threads()
        rows, places = directory.find_in_group(self._group, ends, keys, threads)
        chances = admission.Chances(step_keys(self._keys, step), self._chances)
        new = admission.insert_absent(self._group, ends, keys, rows, places, chances, threads)
        for number in np.flatnonzero(new.failed != ABSENT).tolist():
            raise self.parts[number].no_slot(int(new.failed[number]))
        has_row = rows != ABSENT
        full = np.diff(np.searchsorted(np.flatnonzero(~has_row), ends), prepend=0) - new.declined
        again = self.evicted.count(new.keys, np.cumsum(new.added))
        self.counts += (np.diff(ends, prepend=0), full, new.added, new.declined, again)
        return Admitted(
            rows=rows,
            places=places,
            new_keys=new.keys,
            new_rows=new.rows,
            new_parts=np.repeat(np.arange(len(ends)), new.added),
            has_row=has_row,
            counts=LookupCounts(len(keys), int(full.sum())),
        )

    @property
    def sights(self) -> NDArray[np.float32]:
        """Return the counters of all parts that count, in their order, flat."""
        return self._group.counts

    def cells_of(self, keys: Ints, ends: Ints, numbers: Ints) -> Ints:
        """Return the (n, 2) cells of counters of (n,) keys, those of each part named up to its end."""
        return admission.cells_of(self._group, numbers, ends, keys, torch.get_num_threads())

    def count_sights(self, cells: Ints, ends: Ints, numbers: Ints) -> int:
        """Count sights of keys without a row by their ``cells_of``; return how many wait for the next maintenance."""
        return int(admission.count_sights(self._group, numbers, ends, cells, torch.get_num_threads()).sum())

    def read(self, keys: Ints, ends: Ints) -> Ints:
        """Return the (L,) held rows of keys, ``ABSENT`` for others; see ``admit``."""
        rows, places = directory.find_in_group(self._group, ends, keys, torch.get_num_threads())
        return _held_only(self._group.slots, rows, places)

    def updated(self, places: Ints, sizes: Ints, gains: NDArray[np.float32], step: int) -> None:
        """Record that a batch has updated the rows in (L,) places, which are held now, in a step from 1.

        ``sizes`` are the (C,) lookups of each column. ``gains`` are (L,) what they add to scores; (0,): 1 each.
        """
        assert 0 < step <= MAX_STEP, step
        touches = eviction.Touches(places, np.cumsum(sizes), self._columns, self._extra_steps, gains)
        eviction.touch_in_group(self._group, touches, step, torch.get_num_threads())


def _held_only(slots: Ints, rows: Ints, places: Ints) -> Ints:
    """Replace rows that were never updated by ``ABSENT``."""
    held: Ints = np.where((rows != ABSENT) & (directory.steps_of(slots[np.maximum(places, 0), 1]) > 0), rows, ABSENT)
    return held
