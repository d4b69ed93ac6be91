"""Look up and update tables whose rows hold only their first columns, and move rows between sizes."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.row_optimizers import state_values
from dlrm_kernels import slabs as kernels
from dlrm_kernels.initial_rows import InitialRows
from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.parallel import parallel_for
from dlrm_kernels.row_updates import Layout
from dlrm_kernels.slabs import CLASS_SHIFT, NEVER_TRAINED, SlabTables, Utility
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.row_sizes import Counts, RowSizes
from dlrm_trainer.embedding.table_batch import UNIT_BAGS, RowUpdate, Tables, bag_weights, lookups_of, unsigned, work_of
from dlrm_trainer.embedding.tiers.slots import map_anonymous

Rows = NDArray[np.int64]
MIN_RELEASED_BYTES = 1 << 16
"""Pages behind the end of a slab go back to the system from here on: the next rows would only touch them again."""

WINDOW_ROWS = 1 << 18
"""Rows whose moves are listed at a time."""


class Moves(NamedTuple):
    """Name rows of a group that change their class, ascending, numbered over all parts; (M,) each."""

    rows: Rows
    targets: NDArray[np.uint8]


class SlabKernel:
    """Look up and update rows of several sizes in host memory; a ``Kernel``.

    Pages are untouched until a row needs them, and go back to the system behind the end of each slab.
    """

    def __init__(
        self,
        tables: Tables,
        sizes: RowSizes,
        initial: InitialRows,
        numbers: Sequence[int],
        samples: int,
        half_life: int,
    ) -> None:
        """``numbers`` are the global row of each table's first row, ``samples`` those of the global batch."""
        self.sizes, self._tables, self.half_life, self._samples = sizes, tables, float(half_life), samples
        self.start_class = sizes.start_class(0)
        """Of rows that are trained for the first time."""
        self.grown = self.shrunk = 0
        """Rows that ``resize`` gave more columns, or fewer."""
        self.weights: tuple[Tensor, ...] = ()
        self.states: tuple[Tensor, ...] = ()
        rows, (dim,) = [count for count, _ in tables.shapes], {dim for _, dim in tables.shapes}
        self.row_starts = np.array([0, *np.cumsum(rows)], np.int64)
        """(K + 1,) first row of each table, numbered over all."""
        self._maps: dict[int, mmap.mmap] = {}
        self.slabs = kernels.make_slabs(
            int(self.row_starts[-1]), sizes.sizes, state_values(tables.optimizer.kind, dim), self._allocate
        )
        features, starts = len(tables.features), self.row_starts[:-1].astype(np.uint64)
        self._dim, self._width = dim, features * dim
        self._slab_tables = SlabTables(
            starts=starts,
            numbers=np.array(numbers, np.uint64),
            of_features=np.array(tables.features, np.uint64),
            columns=np.arange(features, dtype=np.uint64) * np.uint64(dim),
            initial=initial,
        )
        self._layout = Layout(
            starts=starts,
            state_starts=starts,
            state_widths=starts,
            row_bits=np.array([(count - 1).bit_length() for count in rows], np.uint64),
            first_features=np.searchsorted(tables.features, np.arange(len(rows) + 1)).astype(np.uint64),
            columns=self._slab_tables.columns,
            first_columns=np.zeros(len(rows), np.uint64),
        )

    def _allocate(self, count: int, dtype: type[np.generic]) -> NDArray[Any]:
        mapped = map_anonymous(max(1, count * np.dtype(dtype).itemsize))
        array = np.frombuffer(mapped, dtype, count)
        self._maps[array.ctypes.data] = mapped
        return array

    def pool(self, bags: Bags, updates: bool) -> Tensor:
        """See ``Kernel``. A row that was never trained reads as it starts; without an update, as its initial value."""
        samples = bags.lengths.shape[1]
        pooled = torch.empty(samples, self._width)
        fresh = self.sizes.sizes[self.start_class - 1] if updates else self._dim
        parallel_for(
            kernels.pool,
            max(1, len(self._tables.features) * min(samples, len(bags.ids)) // UNIT_BAGS),
            torch.get_num_threads(),
            size_of(self._dim),
            self.slabs,
            self._slab_tables,
            np.uint64(fresh),
            unsigned(bags.ids),
            bags.offsets,
            bag_weights(bags.weights),
            samples,
            np.uint64(self._width),
            pooled.view(-1).numpy(),
        )
        return pooled

    def update(self, bags: Bags, gradient: Tensor, rows: Tensor, update: RowUpdate) -> None:
        """See ``Kernel``."""
        of_batch = lookups_of(bags, gradient, rows)
        work = work_of(np.arange(len(self._tables.shapes)), self._layout, of_batch)
        parallel_for(
            kernels.update_rows_of_bags,
            len(work.tables),
            torch.get_num_threads(),
            size_of(self._dim),
            work,
            self.slabs,
            self._slab_tables,
            np.uint64(self.start_class),
            self._layout,
            of_batch,
            self._tables.constants(update),
            self._utility(update.step),
        )

    def _utility(self, step: int) -> Utility:
        # Steps of utilities are those after the update, as in a maintenance.
        return Utility(float(step + 1), self.half_life, float(self._samples))

    def begin(self, parts: NDArray[np.int64], rows: Rows, keys: Rows) -> None:
        """Give (n,) rows of parts, which ``keys`` number in their tables, their first columns."""
        chosen = rows + self.row_starts[parts]
        start = np.uint64(self.start_class)
        kernels.begin_rows(self.slabs, chosen, keys, parts, self._slab_tables.initial, start)

    def copy(self, table: int, rows: Rows, out: NDArray[np.float32], out_state: NDArray[np.float32]) -> None:
        """Copy (n,) rows, counted from the table's first: see ``kernels.copy_rows``."""
        threads = torch.get_num_threads()
        kernels.copy_rows(self.slabs, self._slab_tables, table, rows, out, out_state, threads)

    def store(
        self,
        table: int,
        rows: Rows,
        columns: int,
        values: NDArray[np.float32],
        state: NDArray[np.float32],
        utilities: NDArray[np.float32],
    ) -> None:
        """Store (n,) rows of so many columns; see ``kernels.store_rows``."""
        kind = (0, *self.sizes.sizes).index(columns)
        classes = np.full(len(rows), kind, np.uint8)
        kernels.store_rows(self.slabs, rows + self.row_starts[table], classes, values, state, utilities)

    def estimate_utilities(self, step: int, states: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return utilities after a step for (n,) rows whose own are unknown, as if no gradient were older.

        ``states`` (n, any) begins with their optimizer state. Without one all get the same.
        """
        mean_squares = states[:, 0].astype(np.float64) if self.slabs.state_width else np.ones(len(states))
        gains = np.maximum(self._samples * np.sqrt(self._dim * mean_squares), kernels.MIN_GAIN)
        utilities: NDArray[np.float32] = (step + self.half_life * np.log2(gains)).astype(np.float32)
        return utilities

    def trained(self, table: int, first: int, last: int) -> Rows:
        """Return the rows in [first, last) of a table that were ever trained, ascending."""
        start = self.row_starts[table]
        found: Rows = np.flatnonzero(self.slabs.words[start + first : start + last] != NEVER_TRAINED)
        return found + first

    def count(self, step: int) -> Counts:
        """Count the rows of each class by the bin of their utility at a step."""
        return kernels.histogram(self.slabs, step, self.half_life, torch.get_num_threads())

    def moves(self, step: int, targets: NDArray[np.uint8]) -> Iterator[Moves]:
        """Iterate over rows that must change their class in the maintenance after a step; see ``RowSizes.targets``.

        Windows of rows come in turn: lists of all would stay with the process. ``resize`` each at once or later.
        """
        rows, threads = int(self.row_starts[-1]), torch.get_num_threads()
        for first in range(0, rows, WINDOW_ROWS):
            window = slice(first, min(first + WINDOW_ROWS, rows))
            found = Moves(*kernels.choose_moves(self.slabs, window, step, self.half_life, targets, threads))
            if len(found.rows):
                yield found

    def resize(self, moves: Moves) -> None:
        """Change the classes of rows as ``move`` does, and count those that gain and lose columns."""
        present = self.slabs.words[moves.rows] >> CLASS_SHIFT
        self.grown += int((moves.targets > present).sum())
        self.shrunk += int((moves.targets < present).sum())
        self.move(moves)

    def move(self, moves: Moves) -> None:
        """Change the classes of rows, and give back pages that no slab needs any longer."""
        # Slabs only grow between moves, and no further than by all rows that arrive.
        touched = self.slabs.counts + np.bincount(moves.targets, minlength=len(self.slabs.counts))
        kernels.move_rows(self.slabs, moves.rows, moves.targets)
        self._release(touched)

    def forget(self, table: int, rows: Rows) -> None:
        """Make (n,) rows of a table as if they were never trained."""
        chosen = rows + self.row_starts[table]
        self.move(Moves(chosen, np.zeros(len(rows), np.uint8)))
        self.slabs.words[chosen] = NEVER_TRAINED

    def _release(self, touched: NDArray[np.int64]) -> None:
        slabs = self.slabs
        for kind, (held, places) in enumerate(zip(slabs.counts.tolist(), touched.tolist(), strict=True)):
            for array, start, per_place in (
                (slabs.rows, slabs.starts[kind], slabs.widths[kind]),
                (slabs.states, slabs.places[kind] * slabs.state_width, slabs.state_width),
                (slabs.owners, slabs.places[kind], 1),
            ):
                first, stop = (4 * (int(start) + end * int(per_place)) for end in (held, places))
                first = -(-first // MIN_RELEASED_BYTES) * MIN_RELEASED_BYTES
                if kind and stop > first:
                    self._maps[array.ctypes.data].madvise(mmap.MADV_DONTNEED, first, stop - first)
