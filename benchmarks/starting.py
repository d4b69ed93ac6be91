"""How long tables far larger than memory take to start, and what memory they then have."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import torch

from benchmarks.measure import Pairs, Setting, memory, report
from benchmarks.shapes import Batches, Shape, placement_of
from benchmarks.sides import Trained
from dlrm_trainer.data.synthetic import Popularity

LIMIT_S = 10.0
THREADS = 2


def measure_start(shape: Shape, setting: Setting, repeats: int, tier_dir: Path) -> None:
    """Report seconds from a learner's making to the end of its first step, each time in a new process."""
    pairs, memory = Pairs(), []
    context = multiprocessing.get_context("spawn")
    for _ in range(repeats):
        with context.Pool(1) as pool:
            seconds, before, after = pool.apply(_start, (shape, setting.cache, tier_dir))
        pairs.add(seconds, LIMIT_S)
        memory.append((before, after))
    before, after = memory[-1]
    report(setting, "start_s", pairs, table_bytes=shape.table_bytes, resident_bytes=after, resident_bytes_before=before)


def _start(shape: Shape, cache: float, tier_dir: Path) -> tuple[float, int, int]:
    torch.set_num_threads(THREADS)
    batches = Batches(shape, Popularity.zipf(shape.rows, 1.05)).draw(0, 2)
    before, started = memory("VmRSS"), time.perf_counter()
    side = Trained(shape, placement_of(shape, ("block",), cache), tier_dir)
    side.learner.start(shape.seed)
    side.run(batches)
    seconds, after = time.perf_counter() - started, memory("VmRSS")
    side.close()
    return seconds, before, after
