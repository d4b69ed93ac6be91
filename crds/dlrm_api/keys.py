"""The keys of tables with ``hash: unique``: their buckets, and the rows and directory slots of each.

An id's key is its global row number. A bucket is a range of keys with a quota of rows; a shard holds whole buckets.
Planner, trainer and checkpointer derive the same sizes from a table's ``rows`` and ``buckets`` alone.
"""

from __future__ import annotations

from dataclasses import dataclass

KEY_BITS = 63
KEY_END = (1 << KEY_BITS) - 1
"""One past the largest key: 2**63 would overflow int64, so the id of key 2**63 - 1 is refused."""
MAX_BUCKETS = 2**16
BUCKET_ROWS = 2**16
"""Rows of a bucket by default: within 1.2 % (3 sigma) of even, so a table is 96 % full before any bucket is."""
MAX_BUCKET_ROWS = 2**31
"""A slot's place in its bucket has 32 bits."""
SLOT_BYTES = 16
"""A slot of the directory: key, row and the step of the last touch. Five slots for four rows: 20 bytes per row."""
MIN_SPARE_SLOTS, SPARE_SLOT_DIVISOR = 64, 64
"""Slots behind the last home of a bucket, for those that are displaced past it."""
LISTED_BYTES = 16
"""Host memory per row that cuts take: the key and the last touch of each row, as they were when the cut began, and up
to half as many keys that left."""
FILTER_BYTES = 2
"""Host memory per row of the filters of keys that were evicted lately."""
ROW_VALUE_BYTES = 4
"""The step of a row's last touch, or its score, in a cut."""

COUNT_COLUMNS, COUNT_WORDS = 4, 16
"""Columns, which are 0, and state values of a row of a table of counters of sights."""
CELLS_OF_ROW, CELLS_PER_ROW = COUNT_WORDS * 3, 2
"""Counters in such a row, and for each row of the table that they count for."""
COUNT_ROW_BYTES = 4 * (COUNT_COLUMNS + COUNT_WORDS)


@dataclass(frozen=True)
class KeyBuckets:
    """Size the buckets of one table."""

    count: int
    """A power of two: V."""
    quota: int
    """Rows of a bucket at a time: q."""
    has_scores: bool = False
    """Whether a row has a score besides the step of its last touch."""
    has_counts: bool = False
    """Whether sights of ids without a row are counted."""
    shared_rows: int = 0
    """Rows of a bucket that its ids without a row share."""

    @property
    def count_rows(self) -> int:
        """Return the rows of counters of a bucket."""
        return -(-self.quota * CELLS_PER_ROW // CELLS_OF_ROW) if self.has_counts else 0

    @property
    def homes(self) -> int:
        """Return the slots of a bucket that are homes of keys: at most 0.8 of them are used."""
        return -(-self.quota * 5 // 4)

    @property
    def slots(self) -> int:
        """Return the slots of a bucket, spare ones included."""
        return self.homes + max(MIN_SPARE_SLOTS, -(-self.homes // SPARE_SLOT_DIVISOR))

    @property
    def directory_bytes(self) -> int:
        """Return the host memory of a bucket's slots, scores and counters, and of its lists and filters of keys."""
        row = LISTED_BYTES + FILTER_BYTES + 2 * ROW_VALUE_BYTES * self.has_scores
        return self.slots * SLOT_BYTES + self.quota * row + self.count_rows * COUNT_ROW_BYTES

    def first_key(self, bucket: int) -> int:
        """Return the first key of a bucket; of bucket ``count``, the end of all keys."""
        return min(bucket * ((1 << KEY_BITS) // self.count), KEY_END)


@dataclass(frozen=True)
class BucketRange:
    """Consecutive buckets of one table, [start, end), as one rank holds them."""

    of: KeyBuckets
    start: int
    end: int

    @property
    def count(self) -> int:
        """Return the number of buckets."""
        return self.end - self.start

    @property
    def rows(self) -> int:
        """Return the most rows at a time."""
        return self.count * self.of.quota

    @property
    def first_key(self) -> int:
        """Return the first key."""
        return self.of.first_key(self.start)

    @property
    def end_key(self) -> int:
        """Return one past the last key."""
        return self.of.first_key(self.end)


def key_buckets(
    rows: int, buckets: int | None, *, has_scores: bool = False, has_counts: bool = False, shared_rows: int = 0
) -> KeyBuckets:
    """Return the buckets of a table of so many rows; ``buckets`` and ``shared_rows``: as the spec has them."""
    if buckets is None:
        # The power of two nearest to rows / BUCKET_ROWS.
        buckets = min(1 << max((rows * 4 // (3 * BUCKET_ROWS)).bit_length() - 1, 0), MAX_BUCKETS)
    return KeyBuckets(buckets, -(-rows // buckets), has_scores, has_counts, shared_rows // buckets)
