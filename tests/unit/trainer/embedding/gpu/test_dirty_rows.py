"""Rows that a kernel marks: those that the host's loop marks."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from dlrm_kernels.dirty_rows import bitmap_of, mark_rows
from dlrm_testing.trainer.host_waits import HostWaits
from dlrm_testing.trainer.triton_programs import ORDERS, memory_in_place, program_order
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.embedding.changes import DirtyRows
from dlrm_trainer.embedding.gpu import dirty_rows
from dlrm_trainer.embedding.gpu.dirty_rows import LOOKUPS, DeviceMarks
from dlrm_trainer.embedding.tiers.slots import untouched_zeros

PARTS = [1, 512, 700, 3_000]


def on_gpu(bits: int) -> DeviceMarks:
    return DeviceMarks(bits, HOST)


@pytest.mark.parametrize("order", [None, *ORDERS])
def test_marked_rows_are_those_of_the_host(order: str | None) -> None:
    generator, device, host = np.random.default_rng(0), DirtyRows(PARTS, on_gpu), DirtyRows(PARTS)
    columns, total = np.array([0, 1, 1, 2, 3]), 0

    for sizes in ([3, 0, LOOKUPS - 1, 2 * LOOKUPS + 1, LOOKUPS], [0, 0, 0, 0, 0], [1, 1, 1, 0, LOOKUPS + 1]):
        ids = np.concatenate([generator.integers(0, PARTS[part], n) for part, n in zip(columns, sizes, strict=True)])
        given = np.array(sizes, np.int64), host.starts[columns]
        assert device.marks is not None
        with nullcontext() if order is None else program_order(ORDERS[order]), HostWaits() as waits:
            device.marks.mark(torch.from_numpy(ids), *given)
        host.mark(ids, *given)
        total = host.marked
        assert (device.marked, waits.count) == (total, 0)

    for record in (device, host):
        record.cut(1)
    assert device.marked == 0
    assert (device.count(), device.lines().count_rows()) == (total, total)
    assert device.lines().words.tolist() == host.lines().words.tolist()
    assert device.lines().numbers.tolist() == host.lines().numbers.tolist()


def test_bits_past_2_to_the_31_are_reached() -> None:
    # A bitmap of which only touched pages take memory.
    words, count = torch.from_numpy(untouched_zeros(2**27 + 16, np.int32)), torch.zeros(1, dtype=torch.int64)
    segments = torch.tensor([0, 2, 2**32])
    expected = bitmap_of(1)
    mark_rows(expected, np.array([7, 500]), np.array([2]), np.array([0]))

    with memory_in_place():
        dirty_rows.mark_rows[(1, 1)](words, count, torch.tensor([7, 500]), segments, 1, block=LOOKUPS)

    assert words[-16:].tolist() == expected.words.view(np.int32).tolist()
    assert count.tolist() == [2]
