"""fbgemm's table-batched embeddings. The one module that imports fbgemm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from dlrm_api.tiers import RowDtype, state_values
from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.embedding.rounding import step_keys, table_key
from dlrm_trainer.embedding.updates import Rounding, sum_by_row, update_rows

HOST = torch.device("cpu")
ALIGNMENT = 64
"""Bytes of a cache line: rows of 64 bytes and more straddle as few as they can."""
TORCH_TYPES: dict[RowDtype, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16}
FBGEMM_TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}


class TableBatch:
    """Row slots of several tables behind one kernel: pooled lookup, and an exact update of the rows looked up.

    Each row that a batch looks up is updated once, by the sum of its gradients in the order of the batch: bits depend
    neither on threads nor on which slot a row is in.

    Memory is that of the rows and states alone; pages are untouched until rows are written.

    Args:
        shapes: (rows, dim) of each table; dim a multiple of 4. May be empty: lookups are then (N, 0).
        optimizer: of the rows.
        dtype: of the rows; state is fp32 whatever that is.
        device: of rows and states, and of all tensors given and returned.
        seed: of the rounding of fp16 rows.
        names: of the tables, for the rounding of fp16 rows.

    Source: Mudigere et al., ISCA 2022 (exact fused optimizers); FBGEMM.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        optimizer: RowOptimizerSpec,
        *,
        dtype: RowDtype = "fp32",
        device: torch.device = HOST,
        seed: int = 0,
        names: Sequence[str] = (),
    ) -> None:
        assert dtype == "fp32" or len(names) == len(shapes), "rounding of fp16 rows needs the name of every table"
        self._shapes, self._optimizer, self._device = tuple(shapes), optimizer, device
        self._fused = dtype == "fp32" and optimizer.kind != "adam"
        self._pending: _Pending | None = None
        self.dim = sum(dim for _, dim in shapes)
        """Columns of a lookup: the tables' dims side by side."""
        self.weights: tuple[Tensor, ...] = ()
        """(rows, dim) float32 or float16 of each table, views of one buffer, table by table; zero."""
        self.states: tuple[Tensor, ...] = ()
        """(rows, S) float32 of each table, S = ``state_values``; views of one buffer likewise; zero."""
        self._kernel: SplitTableBatchedEmbeddingBagsCodegen | None = None
        if shapes:
            self._kernel = self._make_kernel(dtype)
            self.weights = tuple(self._kernel.split_embedding_weights())
            self.states = self._make_states()
        keys = [table_key(seed, name) for name in names] if dtype == "fp16" else []
        self._keys = torch.tensor(keys, dtype=torch.int64, device=device)
        self._runs = () if self._fused else tuple(_runs(self._shapes))

    def _make_kernel(self, dtype: RowDtype) -> SplitTableBatchedEmbeddingBagsCodegen:
        """The kernel over memory of ours on the host (its own is written when it is made), over its own on a GPU."""
        host = self._device.type == "cpu"
        where = (EmbeddingLocation.HOST, ComputeDevice.CPU) if host else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        adagrad = self._fused and self._optimizer.kind == "rowwise-adagrad"
        buffers = None
        if host:
            buffers = {"weights": lazy_zeros(sum(rows * dim for rows, dim in self._shapes), TORCH_TYPES[dtype])}
            if adagrad:
                buffers["momentum1"] = lazy_zeros(sum(rows for rows, _ in self._shapes), torch.float32)
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *where) for rows, dim in self._shapes],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD if adagrad else EmbOptimType.EXACT_SGD,
            weights_precision=FBGEMM_TYPES[dtype],
            output_dtype=SparseType.FP32,
            eps=self._optimizer.eps,
            pooling_mode=PoolingMode.SUM,  # a mean divides by the bag's length over all row shards: not known here
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,  # the reader has checked every id
            device=self._device,
            preallocated_host_buffers=buffers,
        )

    def _make_states(self) -> tuple[Tensor, ...]:
        assert self._kernel is not None
        if self._fused and self._optimizer.kind == "rowwise-adagrad":
            return tuple(state.unsqueeze(1) for (state,) in self._kernel.split_optimizer_states())
        values = [state_values(self._optimizer.kind, dim) for _, dim in self._shapes]
        sizes = [rows * width for (rows, _), width in zip(self._shapes, values, strict=True)]
        host = self._device.type == "cpu"
        buffer = lazy_zeros(sum(sizes), torch.float32) if host else torch.zeros(sum(sizes), device=self._device)
        parts = zip(torch.split(buffer, sizes), self._shapes, values, strict=True)
        return tuple(part.view(rows, width) for part, (rows, _), width in parts)

    def rounding(self, number: int, step: int, rows: Tensor) -> Rounding | None:
        """What (R,) int64 global rows of a table are rounded with at a step; None for fp32."""
        if not len(self._keys):
            return None
        return Rounding(keys=step_keys(self._keys[number], step).expand_as(rows), rows=rows)

    def storage(self) -> tuple[Tensor, Tensor]:
        """All tables' rows (sum of rows, dim) and states (sum of rows, S) as one, for tables of one dim."""
        dims = {dim for _, dim in self._shapes}
        assert len(dims) == 1, f"tables of one batch with dims {sorted(dims)} have no common row: group them by dim"
        return self._joined(0, len(self._shapes))

    def _joined(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Rows and states of tables [start, stop), of one dim, as one: they are neighbours in memory."""
        rows = sum(rows for rows, _ in self._shapes[start:stop])
        weight, state = self.weights[start], self.states[start]
        joined_weight = weight.as_strided((rows, weight.shape[1]), weight.stride())
        return joined_weight, state.as_strided((rows, state.shape[1]), state.stride())

    def lookup(self, ids: Tensor, lengths: Tensor, learning_rate: float | None = None) -> Tensor:
        """Sum the rows of each bag.

        Args:
            ids: (sum of lengths,) int64 row numbers of their tables, table-major.
            lengths: (T, N) int32 or int64 ids in each bag.
            learning_rate: of the update that follows, which is fixed here; None: no update follows.

        Returns:
            (N, dim) float32; with a learning rate it carries what ``update`` needs.
        """
        if self._kernel is None:
            return torch.zeros(lengths.shape[1], 0, device=self._device)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=self._device)
        torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
        fused = self._fused and learning_rate is not None
        if fused:
            self._kernel.set_learning_rate(learning_rate)
        with torch.set_grad_enabled(fused):
            pooled: Tensor = self._kernel(ids, offsets)
        if not self._fused and learning_rate is not None:
            self._pending = _Pending(pooled=pooled, ids=ids, lengths=lengths, learning_rate=learning_rate)
        return pooled

    def update(self, pooled: Tensor, gradient: Tensor, *, step: int = 0, rows: Tensor | None = None) -> None:
        """Update the rows that ``lookup`` summed.

        Args:
            pooled: what the last ``lookup`` with a learning rate returned.
            gradient: (N, dim) float32, of the loss by ``pooled``.
            step: number of the step, for the rounding of fp16 rows.
            rows: (sum of lengths,) int64 global row numbers of the ids looked up, for the rounding of fp16 rows; None:
                the ids are row numbers themselves.
        """
        if self._kernel is None:
            return
        if self._fused:
            pooled.backward(gradient)  # type: ignore[no-untyped-call]
            return
        pending, self._pending = self._pending, None
        assert pending is not None
        assert pending.pooled is pooled, "another lookup with a learning rate came between this one and its update"
        rows = pending.ids if rows is None else rows
        sizes = pending.lengths.sum(dim=1, dtype=torch.int64).tolist()
        ids_at = column = 0
        for run in self._runs:
            count, width = sum(sizes[run.start : run.stop]), (run.stop - run.start) * run.dim
            ids = slice(ids_at, ids_at + count)
            columns = gradient[:, column : column + width].reshape(-1, run.dim)
            self._update_run(run, pending, pending.ids[ids], columns, step_keys(self._keys, step), rows[ids])
            ids_at, column = ids_at + count, column + width

    def _update_run(
        self, run: _Run, pending: _Pending, ids: Tensor, gradient: Tensor, keys: Tensor, rows: Tensor
    ) -> None:
        """Update the tables of one run.

        Args:
            run: the tables.
            pending: the lookup.
            ids: (L,) those of the run.
            gradient: (N * tables of the run, dim), sample-major.
            keys: of all tables; empty for fp32.
            rows: (L,) global rows of ``ids``.
        """
        lengths = pending.lengths[run.start : run.stop]
        tables, samples = lengths.shape
        bags = torch.repeat_interleave(lengths.flatten().to(torch.int64))
        table, sample = bags // max(samples, 1), bags % max(samples, 1)
        starts = torch.tensor(run.row_starts, device=self._device)
        slots, sums, places = sum_by_row(ids + starts[table], gradient.index_select(0, sample * tables + table))
        rounding = None
        if len(keys):
            rounding = Rounding(
                keys=torch.empty_like(slots).index_put_((places,), keys[run.start : run.stop][table]),
                rows=torch.empty_like(slots).index_put_((places,), rows),
            )
        weight, state = self._joined(run.start, run.stop)
        update_rows(weight, state, slots, sums, self._optimizer, pending.learning_rate, rounding)


@dataclass(frozen=True, kw_only=True)
class _Pending:
    """A lookup whose update is to come and is not the kernel's."""

    pooled: Tensor
    ids: Tensor
    lengths: Tensor
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Neighbouring tables [start, stop) of one dim, whose rows are updated at once."""

    start: int
    stop: int
    dim: int
    row_starts: tuple[int, ...]
    """Of each table, in the rows of the run."""


def _runs(shapes: Sequence[tuple[int, int]]) -> Iterator[_Run]:
    start = 0
    for dim, group in groupby(shapes, key=lambda shape: shape[1]):
        rows = [rows for rows, _ in group]
        yield _Run(start=start, stop=start + len(rows), dim=dim, row_starts=tuple(accumulate(rows, initial=0))[:-1])
        start += len(rows)


def lazy_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) zeros on the host, aligned to a cache line, whose pages take no memory until they are written.

    torch.zeros writes every page.
    """
    size = dtype.itemsize
    bytes_ = torch.from_numpy(np.zeros(count * size + ALIGNMENT, np.uint8))
    start = -bytes_.data_ptr() % ALIGNMENT
    return bytes_[start : start + count * size].view(dtype)
