"""Give the keys of a part of a unique table local rows: admission, eviction, and what cuts must say of keys that left.

Keys get rows when a batch is looked up, maybe before earlier batches are updated, and lose them only in a maintenance,
where no batch is in flight. A row is *held* from its key's first update on: only held rows are in cuts and are read by
evaluations, so that both see what a run that is restored at this step sees.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_api.errors import InvalidSpecError
from dlrm_api.keys import KeyBuckets
from dlrm_kernels import directory
from dlrm_kernels.directory import ABSENT, MAX_STEP
from dlrm_kernels.dirty_rows import U64, WORD, Words, clear_bits, mark_rows
from dlrm_trainer.embedding.changes import MAX_KEPT, DirtyPart

Ints = NDArray[np.int64]
NO_KEYS = np.empty(0, np.int64)


class Admitted(NamedTuple):
    """Hold the result of a lookup for training."""

    rows: Ints
    """(n,) local row of each key, or ``ABSENT``."""
    places: Ints
    """(n,) where the directory holds it: valid until the next maintenance."""
    new_keys: Ints
    """(m,) ascending keys that got a row now; each must start from its initial value."""
    new_rows: Ints
    """(m,) their rows."""


class HeldKeys(NamedTuple):
    """List the held rows of a part; (n,) each."""

    keys: Ints
    """Ascending."""
    rows: Ints
    steps: Ints
    """Of the last touch."""


class _Gone(NamedTuple):
    step: int
    """Of the cut that keys left before."""
    keys: list[Ints]


class UniqueRows:
    """Map the keys of consecutive buckets of a unique table to local rows.

    Lookups, and what is said to be for them, may run on one thread while another updates rows; all else needs a moment
    without a batch in flight.
    """

    def __init__(self, table: str, buckets: KeyBuckets, owned: range, dirty: DirtyPart) -> None:
        self._table, self._dirty = table, dirty
        self._directory = directory.make_directory(
            first_bucket=owned.start,
            buckets=len(owned),
            all_buckets=buckets.count,
            quota=buckets.quota,
            homes=buckets.homes,
            stride=buckets.slots,
            rows=len(owned) * buckets.rows,
        )
        self._held: Words = np.zeros(len(self._directory.used), U64)
        self._gone: list[Ints] = []
        """Keys that left since the last cut and may be in a snapshot."""
        self._kept: list[_Gone] = []
        """Those that left before cuts that are in no known snapshot."""

    @property
    def count(self) -> int:
        """Return the number of keys, those in flight included."""
        return int(self._directory.fill.sum())

    def admit(self, keys: Ints) -> Admitted:
        """Look up (n,) keys of a batch to train on, and give rows to new ones, in order, while there is space.

        Raises:
            InvalidSpecError: so many keys are close to each other that the directory has no slot for one.
        """
        rows, places = np.empty((2, len(keys)), np.int64)
        if directory.find(self._directory, keys, rows, places) == 0:
            return Admitted(rows, places, NO_KEYS, NO_KEYS)
        absent = np.flatnonzero(rows == ABSENT)
        wanted, number_of = np.unique(keys[absent], return_inverse=True)
        new_rows, new_places = self._insert(wanted)
        rows[absent], places[absent] = new_rows[number_of], new_places[number_of]
        is_new = new_rows != ABSENT
        return Admitted(rows, places, wanted[is_new], new_rows[is_new])

    def read(self, keys: Ints) -> Ints:
        """Return the (n,) held rows of keys, ``ABSENT`` for others."""
        rows, places = np.empty((2, len(keys)), np.int64)
        directory.find(self._directory, keys, rows, places)
        found = rows != ABSENT
        rows[found] = np.where(self._are_held(rows[found]), rows[found], ABSENT)
        return rows

    def updated(self, rows: Ints, places: Ints, step: int) -> None:
        """Record that a batch has updated rows, which are held now, in a step from 1 to ``MAX_STEP``."""
        assert 0 < step <= MAX_STEP, step
        mark_rows(self._held, rows, np.array([len(rows)]), np.zeros(1, np.int64))
        directory.touch(self._directory, places, step)

    def choose_leaving(self) -> HeldKeys:
        """Remove the keys that must make space, and return them with their rows, which stay taken until ``free``."""
        keys, rows = directory.sweep(self._directory, torch.get_num_threads())
        order = np.argsort(rows)
        return HeldKeys(keys[order], rows[order], NO_KEYS)

    def free(self, left: HeldKeys) -> None:
        """Free the rows of keys that left, once a cut in progress has saved them."""
        is_stored = self._dirty.clear_rows(left.rows)
        clear_bits(self._held, left.rows)
        directory.free_rows(self._directory, left.rows)
        if is_stored.any():
            self._gone.append(left.keys[is_stored])

    def begin_cut(self, step: int, parent: int | None) -> None:
        """Close the list of keys that left for a cut, as ``DirtyRows.cut`` does with changed rows."""
        if parent is not None:
            self._kept = [kept for kept in self._kept if kept.step > parent]
        if len(self._kept) == MAX_KEPT:
            old, newer = self._kept[:2]
            self._kept[:2] = [_Gone(newer.step, old.keys + newer.keys)]
        self._kept.append(_Gone(step, self._gone))
        self._gone = []

    def gone(self) -> Ints:
        """Return the keys, ascending, that left since the parent of the cut just begun and were not updated again."""
        keys = np.unique(np.concatenate([NO_KEYS, *(keys for kept in self._kept for keys in kept.keys)]))
        gone: Ints = keys[self.read(keys) == ABSENT]
        return gone

    def held(self) -> HeldKeys:
        """List the held rows."""
        keys, entries = directory.list_keys(self._directory, torch.get_num_threads())
        rows = directory.rows_of(entries)
        chosen = self._are_held(rows)
        return HeldKeys(keys[chosen], rows[chosen], directory.steps_of(entries[chosen]))

    def restore(self, keys: Ints, steps: Ints) -> Ints:
        """Give rows to (n,) ascending keys of a snapshot, with the steps of their last touch; return the rows.

        Raises:
            InvalidSpecError: a bucket has fewer rows than the snapshot has keys of it.
        """
        rows, places = self._insert(keys)
        if (rows == ABSENT).any():
            raise InvalidSpecError(
                "spec.model.tables", f"table {self._table}: the snapshot has more rows in a bucket than fit; raise rows"
            )
        directory.set_steps(self._directory, places, steps)
        mark_rows(self._held, rows, np.array([len(rows)]), np.zeros(1, np.int64))
        self._dirty.store(rows)
        return rows

    def _insert(self, keys: Ints) -> tuple[Ints, Ints]:
        rows, places = np.empty((2, len(keys)), np.int64)
        done = directory.insert(self._directory, keys, rows, places)
        if done < len(keys):
            raise InvalidSpecError(
                "spec.training.seed",
                f"table {self._table}: too many ids hash to neighbours of key {keys[done]}; set another seed, which "
                "hashes ids otherwise",
            )
        return rows, places

    def _are_held(self, rows: Ints) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = (self._held[rows // WORD] >> (rows % WORD).astype(U64)) & U64(1) != 0
        return found
