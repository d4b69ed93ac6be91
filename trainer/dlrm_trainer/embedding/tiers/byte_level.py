"""A level in byte-addressable memory: DDR, or SCM and CXL through a mapping. Records are copied by loads and stores."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from dlrm_api.tiers import Tier
from dlrm_kernels.pages import ORDER_WORDS, append_order, list_oldest, load_records, remove_order, store_records
from dlrm_trainer.embedding.tiers.level import Finish, Places, Records, Rows, finished


class Storage(Protocol):
    """Memory for records."""

    @property
    def records(self) -> Records:
        """(places, W); pages are taken when they are first written."""

    def ensure(self, places: int) -> None:
        """Make the first places writable.

        Raises:
            DeviceError: names the path and the bytes that did not fit.
        """

    @property
    def bytes_kept(self) -> int:
        """Bytes really taken."""

    def close(self) -> None:
        """Give the memory back."""


class ByteLevel:
    """Implements ``Level``.

    The coldest record is the one that came first, because whatever is looked up leaves. The last level of a stack
    needs no order: nothing leaves it but by lookups, and a place given back is the next to be taken, while its
    memory is still in the processor's cache.

    Args:
        tier: that the storage lies in.
        storage: of at least ``places`` records.
        places: records that the level may hold.
        ordered: whether ``coldest`` will be asked for.
    """

    def __init__(self, tier: Tier, storage: Storage, places: int, *, ordered: bool) -> None:
        self.tier, self.places, self.ordered = tier, places, ordered
        self.used = 0
        self._storage = storage
        self._filled = 0
        self._free = np.zeros(places, np.int32 if places < 2**31 else np.int64)
        self._order = np.zeros((places if ordered else 0, ORDER_WORDS), np.int32)
        self._ends = np.zeros(2, np.int64)

    @property
    def bytes_kept(self) -> dict[Tier, int]:
        """See ``Level``."""
        beside = self._free.itemsize + (self._order.itemsize * ORDER_WORDS if self.ordered else 0)
        kept: dict[Tier, int] = {"ddr": self._filled * beside}
        kept[self.tier] = kept.get(self.tier, 0) + self._storage.bytes_kept
        return kept

    @property
    def records(self) -> Records:
        """(places, W) of all places; those in use may be changed in place."""
        return self._storage.records

    def write(self, rows: Rows, records: Records) -> Places:
        """See ``Level``."""
        count = len(rows)
        again = min(count, self._filled - self.used)
        places = np.empty(count, np.int64)
        left = self._filled - self.used - again
        places[:again] = self._free[left : left + again][::-1]
        places[again:] = np.arange(self._filled, self._filled + count - again)
        self._storage.ensure(self._filled + count - again)
        self._filled += count - again
        self.used += count
        if self.ordered:
            append_order(self._order, self._ends, rows, places)
        store_records(self._storage.records, places, records)
        return places

    def read(self, places: Places, out: Records) -> Finish:
        """See ``Level``."""
        load_records(self._storage.records, places, out)
        return finished

    def free(self, places: Places) -> None:
        """See ``Level``."""
        known = self._filled - self.used
        self._free[known : known + len(places)] = places
        self.used -= len(places)
        if self.ordered:
            remove_order(self._order, self._ends, places)

    def coldest(self, count: int) -> tuple[Rows, Places]:
        """See ``Level``."""
        places = np.empty(min(count, self.used), np.int64)
        rows = np.empty_like(places)
        list_oldest(self._order, self._ends, rows, places)
        return rows, places

    def close(self) -> None:
        """See ``Level``."""
        self._storage.close()
