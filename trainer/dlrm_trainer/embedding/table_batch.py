"""Look up and update the rows of several tables behind one kernel, in host memory or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.row_optimizers import state_values
from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec, RowRegularizerSpec
from dlrm_kernels import bags as bag_kernels
from dlrm_kernels import row_updates
from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.parallel import parallel_for
from dlrm_kernels.row_updates import Layout, Lookups, OptimizerConstants, Work, constants_of
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.tiers.slots import untouched_zeros

UNIT_LOOKUPS, UNIT_BAGS = 1 << 10, 1 << 9
"""Smallest unit of work of a thread."""
UNIT_ELEMENTS = 1 << 14
"""Smallest unit, in elements, of rows that are updated by sums."""
UNITS_PER_THREAD = 2
"""Parts of a table with all lookups. More of them share the work more evenly, but each reads all ids of its table: 4
made an update on two threads 9 % slower. A lone thread shares nothing."""
NO_ROW = 2**62
"""Stands for no row where only a GPU knows how many rows there are."""
ALL_ONES = np.zeros(0, np.float32)
"""Weights of ids that have none."""
ROW_TYPES: dict[RowDtype, type[np.floating[Any]]] = {"fp32": np.float32, "fp16": np.float16}


class RowUpdate(NamedTuple):
    """Say how rows are updated in a step."""

    learning_rate: float
    step: int
    """For the rounding of fp16 rows."""
    regularizer: RowRegularizerSpec | None = None


@dataclass(frozen=True, kw_only=True)
class Tables:
    """Describe the tables behind one kernel."""

    shapes: tuple[tuple[int, int], ...]
    """(rows, dim) of each; dim is a multiple of 4."""
    features: tuple[int, ...]
    """The table of each feature, ascending."""
    optimizer: RowOptimizerSpec
    dtype: RowDtype
    """Of the rows; states are always fp32."""
    device: torch.device
    """Of rows and states, and of all tensors given and returned."""
    keys: NDArray[np.uint64]
    """(T,) ``row_updates.table_key``, for the rounding of fp16 rows; empty for fp32."""
    first_columns: tuple[int, ...]
    """First column of each table in the whole table; multiples of 4."""
    deterministic: bool = False
    """Whether a GPU sums gradients in a fixed order."""

    def constants(self, update: RowUpdate) -> OptimizerConstants:
        """Return the constants of an update for kernels."""
        optimizer, regularizer = self.optimizer, update.regularizer
        given = optimizer.kind, update.learning_rate, optimizer.eps, optimizer.beta1, optimizer.beta2
        more = () if regularizer is None else (regularizer.strength, regularizer.bits)
        return constants_of(*given, *more)

    def step_keys(self, step: int) -> NDArray[np.uint64]:
        """Return the keys of the tables at a step; empty for fp32."""
        return row_updates.step_keys(self.keys, step) if len(self.keys) else self.keys


def table_views(buffer: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Split a buffer into views (rows, width), table by table."""
    parts = torch.split(buffer, [rows * width for rows, width in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def joined(views: Sequence[Tensor], start: int, stop: int) -> Tensor:
    """Return tables [start, stop) of one width as one: they are neighbours in memory."""
    rows = sum(len(view) for view in views[start:stop])
    return views[start].as_strided((rows, views[start].shape[1]), views[start].stride())


class Kernel(Protocol):
    """Look up and update tables on one device."""

    weights: tuple[Tensor, ...]
    states: tuple[Tensor, ...]

    def pool(self, bags: Bags, updates: bool) -> Tensor:
        """Sum the rows of each bag: see ``TableBatch.lookup``."""

    def update(self, bags: Bags, gradient: Tensor, rows: Tensor, update: RowUpdate) -> None:
        """Update the rows that were pooled: see ``TableBatch.update``."""


class SumKernel(Kernel, Protocol):
    """Also sum gradients by row and update rows by such sums, for tables of one dim d and R rows in all."""

    def add_gradients(self, bags: Bags, gradient: Tensor, sums: Tensor, touched: Tensor) -> None:
        """Add the gradient of each row that was pooled to its (R, d) sum, in the order of the batch; see ``update``.

        Also set its (R,) ``touched`` to 1. Rows are numbered over all tables.
        """

    def update_rows(self, rows: Tensor, sums: Tensor, update: RowUpdate) -> None:
        """Update (U,) int64 rows, ascending and numbered over all tables, by their (R, d) sums of gradients.

        On a GPU the last ones may be ``NO_ROW``.
        """


class HostKernel:
    """Look up and update tables in host memory, on as many threads as torch uses."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        states_of = [(rows, state_values(tables.optimizer.kind, dim)) for rows, dim in tables.shapes]
        starts, state_starts = (_starts(map(math.prod, shapes)) for shapes in (tables.shapes, states_of))
        rows = untouched_zeros(int(starts[-1]), ROW_TYPES[tables.dtype])
        states = untouched_zeros(int(state_starts[-1]), np.float32)
        self.weights = table_views(torch.from_numpy(rows), tables.shapes)
        self.states = table_views(torch.from_numpy(states), states_of)
        self._memory = row_updates.memory_of(rows, states)
        dims = [dim for _, dim in tables.shapes]
        feature_dims = [dims[table] for table in tables.features]
        self._width = sum(feature_dims)
        self._layout = Layout(
            starts=starts[:-1],
            state_starts=state_starts[:-1],
            state_widths=np.array([width for _, width in states_of], np.uint64),
            row_bits=np.array([(rows - 1).bit_length() for rows, _ in tables.shapes], np.uint64),
            first_features=np.searchsorted(tables.features, np.arange(len(dims) + 1)).astype(np.uint64),
            columns=_starts(feature_dims)[:-1],
            first_columns=np.array(tables.first_columns, np.uint64),
        )
        self._feature_starts = self._layout.starts[np.array(tables.features, np.int64)]
        self._by_dim = [
            (size_of(dim), np.flatnonzero(np.array(feature_dims) == dim), np.flatnonzero(np.array(dims) == dim))
            for dim in sorted(set(dims))
        ]
        """Features and tables of each dim."""

    def pool(self, bags: Bags, updates: bool) -> Tensor:  # noqa: ARG002  one lookup serves both
        """See ``Kernel``."""
        samples = bags.lengths.shape[1]
        pooled = torch.empty(samples, self._width)
        out = pooled.view(-1).numpy()
        for size, features, _ in self._by_dim:
            parallel_for(
                bag_kernels.pool,
                max(1, len(features) * min(samples, len(bags.ids)) // UNIT_BAGS),
                torch.get_num_threads(),
                size,
                features,
                self._memory,
                self._feature_starts,
                self._layout.columns,
                unsigned(bags.ids),
                bags.offsets,
                bag_weights(bags.weights),
                samples,
                np.uint64(self._width),
                out,
            )
        return pooled

    def update(self, bags: Bags, gradient: Tensor, rows: Tensor, update: RowUpdate) -> None:
        """See ``Kernel``."""
        of_batch = lookups_of(bags, gradient, rows)
        constants = self._tables.constants(update)
        keys = self._tables.step_keys(update.step)
        for size, _, tables in self._by_dim:
            work = work_of(tables, self._layout, of_batch)
            parallel_for(
                row_updates.update_rows_of_bags,
                len(work.tables),
                torch.get_num_threads(),
                size,
                work,
                self._memory,
                self._layout,
                of_batch,
                constants,
                keys,
            )

    def add_gradients(self, bags: Bags, gradient: Tensor, sums: Tensor, touched: Tensor) -> None:
        """See ``SumKernel``."""
        [(size, _, tables)] = self._by_dim
        of_batch = lookups_of(bags, gradient, bags.ids)
        work = work_of(tables, self._layout, of_batch)
        parallel_for(
            row_updates.add_gradients,
            len(work.tables),
            torch.get_num_threads(),
            size,
            work,
            self._layout,
            of_batch,
            sums.view(-1).numpy(),
            touched.numpy(),
        )

    def update_rows(self, rows: Tensor, sums: Tensor, update: RowUpdate) -> None:
        """See ``SumKernel``."""
        [(size, _, _)] = self._by_dim
        parallel_for(
            row_updates.update_summed_rows,
            max(1, len(rows) * sums.shape[1] // UNIT_ELEMENTS),
            torch.get_num_threads(),
            size,
            self._memory,
            self._layout,
            unsigned(rows),
            sums.view(-1).numpy(),
            self._tables.constants(update),
            self._tables.step_keys(update.step),
        )


class TableBatch:
    """Hold rows of several tables behind one kernel: pooled lookup, and exact updates of rows looked up.

    Each row that a batch looks up is updated once, by the sum of its gradients, on the host in the order of the batch
    (feature after feature if a table has several): bits depend neither on threads nor on the slots of rows.
    A GPU has an order of its own: with row-wise Adagrad and SGD an fp32 row that a batch looks up over 1,024 times may
    get other bits each time, unless ``deterministic``; sums of fp16 rows and of Adam are the same each time, but depend
    on whether neighbouring features of one dim have more than 3,072 lookups together.

    Memory is that of rows and states only; pages are untouched until rows are written.

    Source: Mudigere et al., ISCA 2022 (exact fused optimizers).
    """

    def __init__(self, tables: Tables, kernel: Kernel) -> None:
        keyed = tables.dtype == "fp32" or len(tables.keys) == len(tables.shapes)
        assert keyed, "rounding of fp16 rows needs the name of every table"
        assert list(tables.features) == sorted(tables.features), "features of one table must be neighbours"
        self.tables = tables
        self._pending: tuple[Tensor, Bags] | None = None
        self.kernel = kernel
        self.weights = kernel.weights
        """(rows, dim) float32 or float16 of each table, views of one buffer, table by table; zero."""
        self.states = kernel.states
        """(rows, S) float32 of each table, S = ``state_values``; views of one buffer likewise; zero."""

    def storage(self) -> tuple[Tensor, Tensor]:
        """Return all rows (sum of rows, dim) and states (sum of rows, S) as one, for tables of one dim."""
        dims = {dim for _, dim in self.tables.shapes}
        assert len(dims) == 1, f"tables of one batch with dims {sorted(dims)} have no common row: group them by dim"
        count = len(self.weights)
        return joined(self.weights, 0, count), joined(self.states, 0, count)

    def lookup(self, bags: Bags, *, updates: bool = False) -> Tensor:
        """Sum the rows of each bag, times the ids' weights.

        ``bags`` are (F, N), on the device; ``updates`` says whether an update of these rows follows.

        Returns:
            (N, sum of the features' dims) float32.
        """
        pooled = self.kernel.pool(bags, updates)
        if updates:
            self._pending = pooled, bags
        return pooled

    def update(
        self,
        pooled: Tensor,
        gradient: Tensor,
        learning_rate: float,
        *,
        step: int = 0,
        rows: Tensor | None = None,
        regularizer: RowRegularizerSpec | None = None,
    ) -> Bags:
        """Update the rows that ``lookup`` summed, and return their bags; gradients are multiplied by the ids' weights.

        The gradient is (N, dims) float32, of the loss by what the last ``lookup`` with ``updates`` returned. Step and
        ``rows``, the (L,) int64 global rows of the ids, serve the rounding of fp16 rows; None: the ids are global rows.
        """
        pending, self._pending = self._pending, None
        assert pending is not None
        assert pending[0] is pooled, "another lookup with an update came between this one and its update"
        bags = pending[1]
        update = RowUpdate(learning_rate, step, regularizer)
        self.kernel.update(bags, gradient, bags.ids if rows is None else rows, update)
        return bags


def work_of(tables: NDArray[np.int64], layout: Layout, lookups: Lookups) -> Work:
    """Return units of about even size, largest first: (T,) tables, and parts of those with many ids."""
    edges, threads = (layout.first_features, lookups.offsets), torch.get_num_threads()
    most = UNITS_PER_THREAD * threads if threads > 1 else 1
    return Work(*row_updates.divide_work(tables, *edges, lookups.samples, UNIT_LOOKUPS, most))


def lookups_of(bags: Bags, gradient: Tensor, rows: Tensor) -> Lookups:
    """Return lookups for kernels, with the (N, D) gradient of the loss by their sums and their (L,) global rows."""
    return Lookups(
        ids=unsigned(bags.ids),
        numbers=unsigned(rows),
        offsets=bags.offsets,
        weights=bag_weights(bags.weights),
        gradient=gradient.numpy().reshape(-1),
        samples=bags.lengths.shape[1],
        width=np.uint64(gradient.shape[1]),
    )


def unsigned(values: Tensor) -> NDArray[np.uint64]:
    """Return int64 values of the host for kernels, without a copy if they are contiguous."""
    return values.contiguous().numpy().view(np.uint64)


def bag_weights(weights: Tensor | None) -> NDArray[np.float32]:
    """Return weights of ids for kernels; ``ALL_ONES`` without any."""
    return ALL_ONES if weights is None else np.asarray(weights.contiguous().numpy())


def _starts(sizes: Iterable[int]) -> NDArray[np.uint64]:
    """Return (n + 1,) running sums, from 0."""
    return np.array([*accumulate(sizes, initial=0)], np.uint64)
