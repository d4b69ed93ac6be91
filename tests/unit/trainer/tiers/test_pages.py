"""How a file is divided: within what the plan budgets, and always with space to clean."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.tiers import BLOCK_PAGE_BYTES, BLOCK_SEGMENT_BYTES, BLOCK_SLACK
from dlrm_kernels import pages
from dlrm_trainer.embedding.tiers.block import divide_file


@given(words=st.integers(1, 5_000), live=st.integers(1, 10**7))
def test_a_file_fits_its_places_and_cleaning_finds_a_segment_not_full(words: int, live: int) -> None:
    places = int(live * BLOCK_SLACK)

    found = divide_file(words, places, live, BLOCK_SEGMENT_BYTES)

    budget = -(-places // found.shape.page_records) * found.page_bytes
    fewest = 2 + live // found.shape.segment_records
    assert found.segments * found.segment_bytes <= max(budget, fewest * found.segment_bytes)
    assert found.segments * found.segment_bytes >= budget * 63 / 64
    assert (found.segments - 1) * found.shape.segment_records > live
    assert found.page_bytes % BLOCK_PAGE_BYTES == 0
    assert found.segment_bytes <= max(BLOCK_SEGMENT_BYTES, found.page_bytes)


@given(words=st.integers(1, 3_000), seed=st.integers(0, 1_000))
def test_a_record_lies_in_one_page_and_comes_back_from_it(words: int, seed: int) -> None:
    shape = divide_file(words, 10_000, 8_000, 16 * BLOCK_PAGE_BYTES).shape
    random = np.random.default_rng(seed)
    count = min(40, shape.segment_records)
    rows, records = random.permutation(1_000)[:count], random.integers(0, 2**32, (count, words), np.uint32)
    image = np.zeros(shape.segment_records // shape.page_records * shape.page_words, np.uint32)
    owners = np.zeros(shape.segment_records, np.int64)
    found_rows, found = np.zeros_like(rows), np.zeros_like(records)

    pages.pack(shape, rows, records, image, 0, owners)
    got = pages.unpack(shape, image, owners, found_rows, found)

    assert got == count
    np.testing.assert_array_equal(found_rows, rows)
    np.testing.assert_array_equal(found, records)
    assert shape.page_records * words <= shape.page_words


@settings(max_examples=200)
@given(
    changes=st.lists(st.tuples(st.integers(0, 36), st.sampled_from(["fill", "free", "clean"]), st.integers(1, 4))),
    segments=st.integers(1, 37),
    wanted=st.integers(1, 5),
)
def test_the_emptiest_segments_are_those_of_a_scan(
    changes: list[tuple[int, str, int]], segments: int, wanted: int
) -> None:
    shape = pages.Shape(words=1, page_words=4, page_records=4, segment_records=4)
    live, full, owners = np.zeros(segments, np.int32), np.zeros(segments, np.bool_), np.zeros(4 * segments, np.int64)
    tree = pages.empty_tree(segments)

    for number, change, count in changes:
        segment = number % segments
        own = owners[4 * segment : 4 * segment + 4]
        if change == "fill" and not full[segment]:
            own[:count] = 1
            live[segment], full[segment] = np.count_nonzero(own), True
            pages.set_leaf(tree, segment, live[segment])
        elif change == "free":
            emptied = np.empty(4, np.int64)
            found = pages.release(shape, 4 * segment + np.flatnonzero(own)[:count], owners, live, tree, emptied)
            assert emptied[:found].tolist() == ([segment] if full[segment] and live[segment] == 0 else [])
            full[emptied[:found]] = False
        elif change == "clean":
            own[:], live[segment], full[segment] = 0, 0, False
            pages.set_leaf(tree, segment, pages.NOT_FULL)
        before, chosen = tree.copy(), np.empty(wanted, np.int64)

        got = pages.emptiest(live, tree, chosen)

        of_scan = sorted(np.flatnonzero(full).tolist(), key=lambda each: (live[each], each))[:wanted]
        assert chosen[:got].tolist() == of_scan
        np.testing.assert_array_equal(tree, before)
