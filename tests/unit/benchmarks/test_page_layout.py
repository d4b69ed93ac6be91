"""Pages of block storage that are read where rows of planted groups are used together."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from benchmarks.page_layout import GROUP_ROWS, BlockTables, Tables, tables_of
from benchmarks.shapes import Shape
from numpy.typing import NDArray

SHAPE = Shape(tables=1, rows=40_000, batch=1_024)
WARM, STEPS = 160, 40
MAX_RATIO = 0.75


def planted(trace: str, shape: Shape = SHAPE) -> Tables:
    return tables_of(trace, shape, Path())


@pytest.mark.slow
@pytest.mark.parametrize("trace", ["groups-in-bags", "groups-shuffled"])
def test_rows_used_together_share_pages(direct_folder: Path, trace: str) -> None:
    with closing(BlockTables(planted(trace), SHAPE.dim, 0.1, "lru", direct_folder)) as held:
        held.fill()
        held.run(0, WARM)
        before = held.level.reads, held.level.random_reads
        held.run(WARM, WARM + STEPS)
        reads, random_reads = held.level.reads - before[0], held.level.random_reads - before[1]

    assert reads <= MAX_RATIO * random_reads, reads / random_reads


def test_a_trace_leads_to_one_layout(direct_folder: Path) -> None:
    def places() -> NDArray[np.int32]:
        with closing(BlockTables(planted("groups-shuffled"), 16, 0.1, "mixed", direct_folder)) as held:
            held.run(0, 60)
            return np.array(held.stack.row_map.place_of)

    np.testing.assert_array_equal(places(), places())


@pytest.mark.parametrize("trace", ["groups-in-bags", "even-groups-shuffled"])
def test_planted_groups_are_looked_up_whole(trace: str) -> None:
    shape = Shape(tables=1, rows=2_000, batch=256)
    draw, again = planted(trace, shape).draw, planted(trace, shape).draw
    steps = [draw(step)[0] for step in range(60)]
    assert all(len(ids) == shape.batch for ids in steps)
    assert all(np.array_equal(ids, again(step)[0]) for step, ids in enumerate(steps))

    # Rows of one group were looked up in the same steps, single rows aside.
    used = np.array([np.bincount(ids, minlength=shape.rows) > 0 for ids in steps], np.int64)
    together = used.T @ used
    np.fill_diagonal(together, 0)
    partners = (together[steps[0]] >= 0.5 * used.sum(axis=0)[steps[0], None]).sum(axis=1)
    assert np.median(partners) >= GROUP_ROWS[0] - 1
