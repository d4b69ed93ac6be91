"""The trainer's own part of a unique table in the place of the model's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from dlrm_api.keys import KEY_BITS, KeyBuckets
from dlrm_kernels.directory import ABSENT
from dlrm_testing.trainer.unique_tables import ModelCut, ModelPart, Row, Shape, initial, updated
from dlrm_trainer.embedding.changes import DirtyPart, DirtyRows
from dlrm_trainer.embedding.unique import UniqueGroup, UniqueRows


class TrainedPart(ModelPart):
    """``UniqueRows`` and ``DirtyRows``, with an array of values in place of rows. Keys are spread over their bucket."""

    def __init__(self, shape: Shape, buckets: range) -> None:
        super().__init__(shape, buckets)
        sizes = KeyBuckets(shape.buckets, shape.quota)
        rows = max(len(buckets), 1) * sizes.quota
        self._dirty = DirtyPart(DirtyRows([rows]), 0)
        # A rank without buckets has no part of the table.
        self._unique = UniqueRows("ids", sizes, buckets, self._dirty) if buckets else None
        self._group = UniqueGroup([self._unique], [0], 0) if self._unique else None
        self._values = np.zeros(rows, np.int64)
        self._width = (1 << KEY_BITS) // shape.buckets

    def _keys(self, keys: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array([self._shape.key(key) for key in keys], np.int64)

    def _names(self, keys: Iterable[int]) -> list[int]:
        width = self._shape.width
        return [key // self._width * width + key % self._width // (self._width // width) for key in keys]

    def restore(self, rows: Mapping[int, Row]) -> None:
        if self._unique and rows:
            ordered = sorted(rows)
            local = self._unique.restore(self._keys(ordered), np.array([rows[key].touched for key in ordered]), None)
            self._dirty.store(local)
            self._values[local] = [rows[key].value for key in ordered]

    def look_up(self, keys: Iterable[int]) -> dict[int, int | None]:
        keys = list(keys)
        if not self._group or not keys:
            return {}
        found = self._group.admit(self._keys(keys), np.array([len(keys)]), 1)
        self._values[found.new_rows] = [initial(key) for key in self._names(found.new_keys.tolist())]
        self._places = getattr(self, "_places", {})
        self._places |= dict(zip(found.rows.tolist(), found.places.tolist(), strict=True))
        rows = [None if row == ABSENT else row for row in found.rows.tolist()]
        return dict(zip(keys, rows, strict=True))

    def read(self, key: int) -> int | None:
        row = int(self._unique.read(self._keys([key]))[0]) if self._unique else ABSENT
        return None if row == ABSENT else int(self._values[row])

    def update(self, lookups: Mapping[int, int], places: Mapping[int, int | None], step: int) -> int:
        rows = np.array([places[key] for key in lookups if places[key] is not None], np.int64)
        for key, count in lookups.items():
            if (row := places[key]) is not None:
                self._values[row] = updated(int(self._values[row]), step, count)
        if self._group:
            self._dirty.mark(rows)
            slots = np.array([self._places[row] for row in rows.tolist()], np.int64)
            self._group.updated(slots, np.array([len(slots)]), np.empty(0, np.float32), step)
        return sum(count for key, count in lookups.items() if places[key] is None)

    def save_before(self, places: Iterable[int | None], cut: ModelCut | None, number: int) -> None:
        for local in places:
            if cut is not None and local in cut.pending[number]:
                key = cut.pending[number].pop(local)
                cut.rows[key] = Row(int(self._values[local]), self._touched[key])

    def maintain(self, cut: ModelCut | None, number: int) -> None:
        if self._unique:
            left = self._unique.choose_leaving(1, 0)
            self.save_before(left.rows.tolist(), cut, number)
            self._unique.free(left)

    @property
    def count(self) -> int:
        return self._unique.count if self._unique else 0

    @property
    def first_parent(self) -> int:
        return self._unique.first_parent if self._unique else 0

    def begin_cut(self, cut: ModelCut) -> None:
        if not self._unique:
            cut.pending.append({})
            return
        record = self._dirty.rows
        if cut.parent is None:
            record.recall()
        else:
            record.forget(cut.parent)
        record.cut(cut.step)
        self._unique.begin_cut(cut.step, cut.parent)
        held = self._unique.held()
        names = self._names(held.keys.tolist())
        key_of = dict(zip(held.rows.tolist(), names, strict=True))
        self._touched = dict(zip(names, held.steps.tolist(), strict=True))
        cut.pending.append({row: key_of[row] for row in self._dirty.all().tolist()})
        if cut.parent is not None:
            cut.gone |= set(self._names(self._unique.gone().tolist()))

    def copy(self, cut: ModelCut, number: int, most: int) -> None:
        self.save_before(list(cut.pending[number])[:most], cut, number)

    def state(self) -> dict[int, Row]:
        if not self._unique:
            return {}
        held = self._unique.held()
        rows = map(Row, self._values[held.rows].tolist(), held.steps.tolist())
        return dict(zip(self._names(held.keys.tolist()), rows, strict=True))

    def check(self) -> None:
        assert self._unique is None or self._unique.count <= len(self.buckets) * self._shape.quota
