from __future__ import annotations

import hashlib
import json

import numpy as np

from dlrm_checkpointer.digest import BLOCK_ROWS, block_digest, join_blocks, state_digest, table_digest


def test_a_tables_digest_is_the_hash_of_its_blocks_hashes():
    rows = np.random.default_rng(0).normal(size=(BLOCK_ROWS + 3, 4)).astype(np.float32)
    state = np.arange(len(rows), dtype=np.float32)[:, None]

    digest = table_digest(len(rows), lambda start, end: (rows[start:end], state[start:end]))

    first = hashlib.sha256(rows[:BLOCK_ROWS].tobytes() + state[:BLOCK_ROWS].tobytes()).digest()
    last = hashlib.sha256(rows[BLOCK_ROWS:].tobytes() + state[BLOCK_ROWS:].tobytes()).digest()
    assert digest == hashlib.sha256(first + last).hexdigest()
    assert digest == join_blocks([first, last])


def test_a_block_is_hashed_by_value_whatever_its_layout_in_memory():
    rows = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    state = np.ones((5, 1), np.float32)

    assert block_digest(np.asfortranarray(rows), state) == block_digest(rows, state)
    assert block_digest(rows[:, ::2], state) == block_digest(rows[:, ::2].copy(), state)
    assert block_digest(rows.astype(">f4"), state) == block_digest(rows, state)


def test_the_state_digest_is_that_of_the_canonical_json():
    weight, step = np.ones((2, 3), np.float32), np.asarray(5, np.int64)

    digest = state_digest([("b", "22"), ("a", "11")], {"w": weight, "opt.step": step})

    entries = {
        "tables": [["a", "11"], ["b", "22"]],
        "dense": [
            ["opt.step", "int64", [], hashlib.sha256(step.tobytes()).hexdigest()],
            ["w", "float32", [2, 3], hashlib.sha256(weight.tobytes()).hexdigest()],
        ],
    }
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_one_changed_bit_changes_the_digest():
    dense = {"w": np.ones(3, np.float32)}
    changed = {"w": np.nextafter(dense["w"], np.float32(2))}

    assert state_digest([("a", "11")], dense) != state_digest([("a", "11")], changed)
    assert state_digest([("a", "11")], dense) != state_digest([("a", "12")], dense)
