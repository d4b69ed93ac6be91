"""Hit rates of real slots, against what stack distances of the same batches predict. No time is taken."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from benchmarks.measure import Pairs, Setting, report, tell
from benchmarks.shapes import Batches, Shape, placement_of
from benchmarks.sides import Trained
from dlrm_kernels.reuse import StackDistances
from dlrm_trainer.data.synthetic import Popularity

TABLES = 8
"""Tables are alike: some of them tell as much as all."""


def predicted(batches: Batches, shape: Shape, steps: int, cache_rows: Sequence[int]) -> Iterator[float]:
    """Share of accesses that fully associative LRU serves, one for each distinct row of a batch, by cache size."""
    tables = [StackDistances() for _ in range(shape.tables)]
    for number in range(steps):
        for table, ids in zip(tables, batches.draw(number, number + 1)[0].values.view(shape.tables, -1), strict=True):
            table.add(*np.unique(ids.numpy(), return_counts=True))
    weights = [table.accesses for table in tables]
    for rows in cache_rows:
        yield float(np.average([table.hit_rate(np.array([rows]))[0] for table in tables], weights=weights))


def check_hit_rates(shape: Shape, popularity: Popularity, settings: Sequence[Setting], steps: int) -> None:
    """Report the hit rate of each setting's cache, LRU and fully associative, one batch ahead, from a cold start."""
    shape = replace(shape.without_width(), tables=min(TABLES, shape.tables))
    batches = Batches(shape, popularity)
    sizes = [round(setting.cache * shape.rows) for setting in settings]
    started = time.perf_counter()
    for setting, theirs in zip(settings, predicted(batches, shape, steps, sizes), strict=True):
        side = Trained(shape, placement_of(shape, ("ddr",), setting.cache), None)
        side.look_up(batches, 0, steps)
        counts = side.counts()
        side.close()
        ours = counts["hits"] / counts["accesses"]
        report(setting, "hit_rate", Pairs([ours], [theirs]), points=(ours - theirs) * 100, steps=steps)
    tell(f"hit rates: {time.perf_counter() - started:.0f} s")
