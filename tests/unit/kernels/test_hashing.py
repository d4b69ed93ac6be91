"""Hashes of texts, which must equal those of any other program."""

from __future__ import annotations

import numpy as np

from dlrm_kernels.hashing import hash_texts

XXH64 = {
    b"": 0xEF46DB3751D8E999,
    b"a": 0xD24EC4F1A98C6E5B,
    b"abc": 0x44BC2CF5AD770999,
    b"Nobody inspects the spammish repetition": 0xFBCEA83C8A378BF1,
    bytes(range(100)): 0x6AC1E58032166597,
}
"""Of some texts, by the package xxhash 3."""


def test_texts_hash_to_the_upper_63_bits_of_xxh64() -> None:
    ids = np.empty(len(XXH64), np.int64)
    offsets = np.cumsum([0, *map(len, XXH64)])

    hash_texts(np.frombuffer(b"".join(XXH64), np.uint8), offsets, ids)

    assert ids.tolist() == [value >> 1 for value in XXH64.values()]
