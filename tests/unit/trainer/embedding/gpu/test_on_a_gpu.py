"""Kernels as a GPU runs them: what the interpreter's arithmetic, numpy's, cannot show."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from dlrm_api.wire import CODECS, Codec
from dlrm_testing.trainer.gpus import gpu_of, needs_gpu
from dlrm_testing.trainer.message_reference import SimulatedRanks
from dlrm_trainer.embedding.changes import DirtyRows
from dlrm_trainer.embedding.messages import Formats, HostPacking, Packing
from dlrm_trainer.embedding.placement import Routes

pytestmark = [pytest.mark.gpu, needs_gpu]
RANKS, SEEDS = 3, range(8)
PARTS = [1, 700, 300_000]


@pytest.mark.parametrize("codec", CODECS)
def test_messages_and_vectors_are_those_of_the_host(codec: Codec) -> None:
    from dlrm_trainer.embedding.gpu.message_packing import DevicePacking

    formats = [Formats((codec,) * RANKS)] * RANKS
    with gpu_of("cuda") as device:

        def on_gpu(table: Routes, rank: int) -> Packing:
            return DevicePacking(table, rank, device)

        for seed in SEEDS:
            gang = SimulatedRanks(seed, RANKS, scale=10.0 ** (seed % 9 - 4), most=200)
            found, expected = gang.to(device).exchange(on_gpu, formats), gang.exchange(HostPacking, formats)
            assert found.bits() == expected.bits()


def test_marked_rows_are_those_of_the_host() -> None:
    from dlrm_trainer.embedding.gpu.dirty_rows import DeviceMarks

    generator = np.random.default_rng(0)
    with gpu_of("cuda") as device:
        marked, host = DirtyRows(PARTS, partial(DeviceMarks, device=device)), DirtyRows(PARTS)
        for _ in range(3):
            sizes = generator.integers(0, 100_000, len(PARTS))
            # Many programs mark the same words.
            ids = np.concatenate([generator.zipf(1.2, n) % part for part, n in zip(PARTS, sizes, strict=True)])
            assert marked.marks is not None
            marked.marks.mark(torch.from_numpy(ids).to(device), sizes, host.starts)
            host.mark(ids, sizes, host.starts)
        torch.cuda.synchronize(device)
        assert marked.marked == host.marked
        for record in (marked, host):
            record.cut(1)

    assert marked.lines().words.tolist() == host.lines().words.tolist()
