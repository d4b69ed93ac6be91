"""How many pages of block storage a step reads, against rows that lie in a fixed random order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measure import Pairs, Setting, report
from benchmarks.shapes import Batches, Shape, popularity_of
from dlrm_api.errors import NoInputError
from dlrm_api.plan import TierLevel, TierShare
from dlrm_api.tiers import BLOCK_SLACK
from dlrm_kernels.row_cache import ACCESSES, HITS
from dlrm_trainer.embedding.tiers.block import BlockLevel
from dlrm_trainer.embedding.tiers.slots import Finish, HostSlots, Moved, Places, Records
from dlrm_trainer.embedding.tiers.stack import Stack, StackTable

Ids = NDArray[np.int64]
Draw = Callable[[int], list[Ids]]
"""Return the ids of each table that a step looks up, by the step's number."""

LAYOUT_TRACES = ("groups-in-bags", "groups-shuffled", "even-groups-in-bags", "even-groups-shuffled")
"""Planted groups: the ids of a group follow each other, or are shuffled with all others of the step. Some groups and
rows are looked up more often than others, by Zipf's law, or all equally often."""
GROUP_ROWS = (8, 32)
"""Smallest and largest planted group."""
SHARE_IN_GROUPS = 0.7
"""Of lookups. All other lookups are of single rows, of any group."""
ALPHA = 0.8
"""Of Zipf's law."""
FILMS = "ml-100k/u.data"
FILMS_BATCH = 128
"""Ratings of a step, in the order of their time."""
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Describe tables over block storage, and what a step looks up in them."""

    rows: tuple[int, ...]
    lookups: int
    """Of a step in each table."""
    draw: Draw


class ComparedLevel(BlockLevel):
    """Count the pages that the same reads would take if rows lay in a random order, without gaps."""

    def __init__(self, folder: Path, words: int, rows: int, moved: Moved) -> None:
        super().__init__(folder, words, int(rows * BLOCK_SLACK), rows, moved)
        self._page_of = np.random.default_rng(SEED).permutation(rows) // self._shape.page_records
        self.random_reads = self.records_read = 0

    def read(self, places: Places, out: Records) -> Finish:
        """See ``Level``; records that are still in memory count for neither layout."""
        stored = places[self._buffer_of[places // self._shape.segment_records] < 0]
        self.records_read += len(stored)
        self.random_reads += len(np.unique(self._page_of[self._owners[stored] - 1]))
        return super().read(places, out)


class PlantedGroups:
    """Draw lookups of a table whose rows are divided into groups at random; a group is looked up as a whole."""

    def __init__(self, rows: int, lookups: int, trace: str, seed: int) -> None:
        random = np.random.default_rng(seed)
        low, high = GROUP_ROWS
        ends = np.cumsum(random.integers(low, high + 1, rows // low))
        self._groups = np.split(random.permutation(rows), ends[ends < rows])
        self._order = random.permutation(rows)
        alpha = 0.0 if trace.startswith("even") else ALPHA
        self._chances = [_chances(len(self._groups), alpha), _chances(rows, alpha)]
        self._lookups, self._is_shuffled, self._seed = lookups, trace.endswith("shuffled"), seed

    def draw(self, step: int) -> Ids:
        """Return the ids of a step."""
        random, (groups, singles) = np.random.default_rng((self._seed, step)), self._chances
        in_groups = int(SHARE_IN_GROUPS * self._lookups)
        # As many as are surely enough.
        chosen = [self._groups[each] for each in np.searchsorted(groups, random.random(in_groups // GROUP_ROWS[0] + 1))]
        sizes = np.cumsum([len(group) for group in chosen])
        chosen = chosen[: int(np.searchsorted(sizes, in_groups)) + 1]
        others = self._lookups - sum(map(len, chosen))
        chosen += np.split(self._order[np.searchsorted(singles, random.random(others))], others)
        ids = np.concatenate([chosen[each] for each in random.permutation(len(chosen))])
        return random.permutation(ids) if self._is_shuffled else ids


def _chances(count: int, alpha: float) -> NDArray[np.float64]:
    weights = np.arange(1, count + 1) ** -alpha
    return np.asarray(np.cumsum(weights / weights.sum()).clip(max=1.0 - 1e-12))


def tables_of(trace: str, shape: Shape, data_dir: Path) -> Tables:
    """Return the tables of a trace: of the shape, or MovieLens' films and users in the order of time.

    Raises:
        NoInputError: ``data_dir`` lacks the trace's file.
    """
    if trace == "ml-100k":
        return _films(data_dir / FILMS)
    rows = (shape.rows,) * shape.tables
    if trace in LAYOUT_TRACES:
        planted = [PlantedGroups(shape.rows, shape.batch, trace, SEED + table) for table in range(shape.tables)]
        return Tables(rows=rows, lookups=shape.batch, draw=lambda step: [each.draw(step) for each in planted])
    batches = Batches(shape, popularity_of(trace, shape.rows, data_dir))

    def draw(step: int) -> list[Ids]:
        (batch,) = batches.draw(step, step + 1)
        return list(batch.values.view(shape.tables, -1).numpy())

    return Tables(rows=rows, lookups=shape.batch, draw=draw)


def _films(path: Path) -> Tables:
    if not path.is_file():
        raise NoInputError(f"{path} is absent: MovieLens 100K, its ratings separated by |")
    ratings = np.loadtxt(path, np.int64, delimiter="|", skiprows=1)
    ids = ratings[np.argsort(ratings[:, 3], kind="stable")][:, [1, 0]] - 1
    steps = len(ids) // FILMS_BATCH

    def draw(step: int) -> list[Ids]:
        first = step % steps * FILMS_BATCH
        return [np.ascontiguousarray(column) for column in ids[first : first + FILMS_BATCH].T]

    return Tables(rows=tuple((ids.max(axis=0) + 1).tolist()), lookups=FILMS_BATCH, draw=draw)


class BlockTables:
    """Keep a share of the rows of some tables in slots and the others on block storage."""

    def __init__(self, tables: Tables, dim: int, cache: float, policy: str, folder: Path) -> None:
        self._tables, self._batch, total = tables, 0, sum(tables.rows)
        extra = [min(rows, 2 * tables.lookups) for rows in tables.rows]
        slots = [max(1, round(cache * rows)) for rows in tables.rows]
        members = [
            StackTable(name=f"table{number}", rows=rows, slots=slots[number], extra=extra[number], scale=0.01)
            for number, rows in enumerate(tables.rows)
        ]
        places = sum(slots) + sum(extra)
        self._storage = torch.zeros(places, dim), torch.zeros(places, 1)
        levels = [TierLevel(tier="ddr", rows=max(slots)), TierLevel(tier="block", rows=max(tables.rows))]
        share = TierShare.model_validate({"levels": levels, "policy": policy, "ways": 0})
        self.stack = Stack(members, share, HostSlots(*self._storage), SEED, dim, "fp32")
        self.level = ComparedLevel(folder, self.stack.memory.words, total, partial(self.stack.relocated, 1))
        self.stack.attach([self.level])

    def fill(self) -> None:
        """Look up every row once, in a random order."""
        random, lookups = np.random.default_rng(SEED), self._tables.lookups
        orders = [random.permutation(rows) for rows in self._tables.rows]
        for first in range(0, max(self._tables.rows), lookups):
            self._train([order[first : first + lookups] for order in orders])

    def run(self, first: int, stop: int) -> None:
        """Bring the rows of some steps to slots, one step after the other."""
        for step in range(first, stop):
            self._train(self._tables.draw(step))

    def _train(self, ids: Sequence[Ids]) -> None:
        self._batch += 1
        ends = np.cumsum([len(each) for each in ids])
        self.stack.release(self.stack.fetch(np.concatenate(ids), ends, self._batch))

    def close(self) -> None:
        """Give the file back."""
        self.stack.close()


def measure_page_reads(
    setting: Setting, tables: Tables, dim: int, policy: str, steps: tuple[int, int, int], folder: Path
) -> None:
    """Report the pages read by a step; ``steps``: before the first repeat, of each repeat, and number of repeats."""
    warm, steps_each, repeats = steps
    pairs = Pairs()
    with closing(BlockTables(tables, dim, setting.cache, policy, folder)) as held:
        level, stats = held.level, held.stack.row_map.stats
        held.fill()
        held.run(0, warm)
        records, moved, counts = level.records_read, level.cleaned, stats.sum(axis=0)
        for repeat in range(repeats):
            before = level.reads, level.random_reads
            held.run(warm + repeat * steps_each, warm + (repeat + 1) * steps_each)
            pairs.add((level.reads - before[0]) / steps_each, (level.random_reads - before[1]) / steps_each)
        count, counts = repeats * steps_each, stats.sum(axis=0) - counts
    report(
        setting, "page_reads", pairs, policy=policy, seed=SEED, tables=len(tables.rows), rows=max(tables.rows),
        lookups=tables.lookups, warm=warm, steps=count, records_read=(level.records_read - records) / count,
        records_cleaned=(level.cleaned - moved) / count, hit_rate=float(counts[HITS] / counts[ACCESSES]),
    )  # fmt: skip
