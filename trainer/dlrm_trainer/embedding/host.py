"""Lookup and update of rows on the host: compiled loops on all threads that torch computes with."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.row_optimizers import state_values
from dlrm_kernels.bags import fill_offsets, pool
from dlrm_kernels.intrinsics import size_of
from dlrm_kernels.parallel import parallel_for
from dlrm_kernels.row_updates import Layout, Lookups, Work, memory_of, update_rows_of_bags
from dlrm_trainer.embedding.layout import TORCH_TYPES, Lookup, Tables, table_views
from dlrm_trainer.embedding.rounding import step_keys
from dlrm_trainer.embedding.tiers.slots import untouched_zeros
from dlrm_trainer.embedding.updates import row_constants, unsigned

UNIT_LOOKUPS, UNIT_BAGS = 1 << 10, 1 << 9
"""What a thread takes at a time, or more."""
UNITS_PER_THREAD = 4
NOTHING = np.zeros(0, np.float32)


class HostKernel:
    """See ``kernels.Kernel``."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        states_of = [(rows, state_values(tables.optimizer.kind, dim)) for rows, dim in tables.shapes]
        rows = lazy_zeros(_elements(tables.shapes), TORCH_TYPES[tables.dtype])
        states = lazy_zeros(_elements(states_of), torch.float32)
        self.weights = table_views(rows, tables.shapes)
        self.states = table_views(states, states_of)
        self._memory = memory_of(rows.numpy(), states.numpy())
        dims = [dim for _, dim in tables.shapes]
        feature_dims = [dims[table] for table in tables.features]
        self._width = sum(feature_dims)
        self._layout = Layout(
            starts=_starts(math.prod(shape) for shape in tables.shapes)[:-1],
            state_starts=_starts(math.prod(shape) for shape in states_of)[:-1],
            state_widths=np.array([width for _, width in states_of], np.uint64),
            row_bits=np.array([(rows - 1).bit_length() for rows, _ in tables.shapes], np.uint64),
            first_features=np.searchsorted(tables.features, np.arange(len(dims) + 1)).astype(np.uint64),
            columns=_starts(feature_dims)[:-1],
            first_columns=np.array(tables.first_columns, np.uint64),
        )
        tables_of_features = np.array(tables.features, np.int64)
        self._feature_starts = self._layout.starts[tables_of_features]
        self._by_dim = [
            (size_of(dim), np.flatnonzero(np.array(feature_dims) == dim), np.flatnonzero(np.array(dims) == dim))
            for dim in sorted(set(dims))
        ]
        """Of each dim its features and its tables."""

    def offsets(self, lengths: Tensor) -> NDArray[np.uint64]:
        """(bags + 1,) of (F, N) lengths."""
        offsets = np.empty(lengths.numel() + 1, np.uint64)
        fill_offsets(lengths.contiguous().numpy().reshape(-1), offsets)
        return offsets

    def pool(self, ids: Tensor, lengths: Tensor, weights: Tensor | None, learning_rate: float | None) -> Tensor:
        """See ``kernels.Kernel``."""
        del learning_rate  # the update takes it
        samples = lengths.shape[1]
        pooled = torch.empty(samples, self._width)
        offsets, out = self.offsets(lengths), pooled.view(-1).numpy()
        for size, features, _ in self._by_dim:
            parallel_for(
                pool,
                max(1, len(features) * min(samples, len(ids)) // UNIT_BAGS),
                torch.get_num_threads(),
                size,
                features,
                self._memory,
                self._feature_starts,
                self._layout.columns,
                unsigned(ids),
                offsets,
                _weights(weights),
                samples,
                np.uint64(self._width),
                out,
            )
        return pooled

    def update(self, lookup: Lookup, gradient: Tensor, step: int, rows: Tensor) -> None:
        """See ``kernels.Kernel``."""
        offsets, samples = self.offsets(lookup.lengths), lookup.lengths.shape[1]
        edges = offsets[self._layout.first_features * np.uint64(samples)]
        sizes = np.diff(edges).astype(np.int64)
        keys = unsigned(step_keys(self._tables.keys, step))
        of_batch = Lookups(
            ids=unsigned(lookup.ids),
            numbers=unsigned(rows),
            offsets=offsets,
            weights=_weights(lookup.weights),
            gradient=gradient.contiguous().view(-1).numpy(),
            samples=samples,
            width=np.uint64(self._width),
        )
        rule = row_constants(self._tables.optimizer, lookup.learning_rate)
        for size, _, tables in self._by_dim:
            work = _work(tables, sizes[tables])
            units = len(work.tables)
            parallel_for(
                update_rows_of_bags,
                units,
                torch.get_num_threads(),
                size,
                work,
                self._memory,
                self._layout,
                of_batch,
                rule,
                keys,
            )


def _work(tables: NDArray[np.int64], sizes: NDArray[np.int64]) -> Work:
    """Units of about even size, the largest first: tables, and parts of those that are many threads' work.

    Args:
        tables: (T,) numbers.
        sizes: (T,) ids of each.
    """
    unit = max(UNIT_LOOKUPS, int(sizes.sum()) // (UNITS_PER_THREAD * torch.get_num_threads()))
    parts = np.maximum(1, sizes // unit)
    order = np.argsort(-(sizes // parts), kind="stable")
    parts = parts[order]
    part = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)
    return Work(*(each.astype(np.uint64) for each in (np.repeat(tables[order], parts), part, np.repeat(parts, parts))))


def _weights(weights: Tensor | None) -> NDArray[np.float32]:
    return NOTHING if weights is None else np.asarray(weights.contiguous().numpy())


def _elements(shapes: Iterable[tuple[int, int]]) -> int:
    return sum(rows * width for rows, width in shapes)


def _starts(sizes: Iterable[int]) -> NDArray[np.uint64]:
    """(n + 1,) running sums, from 0."""
    return np.array([*accumulate(sizes, initial=0)], np.uint64)


def lazy_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) zeros on the host, page-aligned, that take no memory, and no promise of it, until they are written.

    torch.zeros writes every page, and numpy's zeros are promised memory: a machine may have less of it than the slots
    take that a rare batch alone would fill.

    Raises:
        DeviceError: not even their addresses are to be had.
    """
    words = untouched_zeros(max(1, -(-count * dtype.itemsize // 8)))
    return torch.from_numpy(words).view(dtype)[:count]
