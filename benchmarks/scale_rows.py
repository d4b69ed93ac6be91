"""What a rank does for the rows that it holds, by how many they are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.measure import Result, seconds_of
from dlrm_kernels import pages

MAX_PICK_US = {10**3: 10.0, 10**6: 10.0}
"""By segments of block storage."""
SEGMENT_RECORDS = 16
"""Few, so that many segments fit in memory; what a pick costs does not depend on it."""
PICKS, FREED = 20_000, 200_000


def pick(segments: int, is_quick: bool) -> Iterator[Result]:
    """Free random records of full segments, then have the cleaner pick and refill segments, one at a time."""
    picks, freed = (PICKS // 20, FREED // 100) if is_quick else (PICKS, FREED)
    shape = pages.Shape(words=1, page_words=16, page_records=16, segment_records=SEGMENT_RECORDS)
    owners = np.ones(segments * SEGMENT_RECORDS, np.int64)
    live, tree = np.full(segments, SEGMENT_RECORDS, np.int32), pages.empty_tree(segments)
    for segment in range(segments):
        pages.set_leaf(tree, segment, live[segment])
    places = np.random.default_rng(0).choice(len(owners), min(freed, len(owners) // 2), replace=False)
    emptied, chosen = np.empty(len(places), np.int64), np.empty(1, np.int64)
    pages.release(shape, places[:0], owners, live, tree, emptied)
    freeing_s = seconds_of(lambda: pages.release(shape, places, owners, live, tree, emptied))

    def clean() -> None:
        for _ in range(picks):
            pages.emptiest(live, tree, chosen)
            live[chosen[0]] = SEGMENT_RECORDS
            pages.set_leaf(tree, chosen[0], live[chosen[0]])

    clean()
    yield Result(
        metric="pick_us",
        value=1e6 * seconds_of(clean) / picks,
        limit=MAX_PICK_US[segments],
        setting={"segments": segments, "picks": picks},
        measured={"free_record_ns": 1e9 * freeing_s / len(places)},
    )
