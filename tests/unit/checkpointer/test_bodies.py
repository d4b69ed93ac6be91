from __future__ import annotations

import gc

import numpy as np

from dlrm_checkpointer.read.fetch import BufferPool


def address(body: memoryview) -> int:
    return np.frombuffer(body, np.uint8).ctypes.data


def test_memory_is_used_again_only_when_no_view_of_it_is_left():
    bodies = BufferPool(100)
    first = bodies.take(60)
    place, part = address(first), np.frombuffer(first[8:16], np.int64)
    del first
    gc.collect()

    second = bodies.take(100)
    assert (address(second) != place, len(second)) == (True, 100)
    second[:] = bytes(100)
    part[0] = 7
    assert (second.tobytes(), part.tolist()) == (bytes(100), [7])

    del part
    third = bodies.take(80)
    assert (address(third), len(third)) == (place, 80)


def test_a_body_larger_than_was_said_has_memory_of_its_own():
    bodies = BufferPool(10)
    small = bodies.take(4)
    del small

    large = bodies.take(1_000)
    large[:] = bytes(1_000)

    assert len(large) == 1_000
    assert len(bodies.take(4)) == 4
