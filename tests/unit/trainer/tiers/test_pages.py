"""How a file is divided: within what the plan budgets, and always with space to clean."""

import numpy as np
from hypothesis import given
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
