"""fbgemm's table-batched embeddings. The one module that imports fbgemm."""

from __future__ import annotations

from collections.abc import Sequence

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
        self._shapes, self._optimizer, self._device = tuple(shapes), optimizer, device
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

    def _make_kernel(self, dtype: RowDtype) -> SplitTableBatchedEmbeddingBagsCodegen:
        """The kernel over memory of ours on the host (its own is written when it is made), over its own on a GPU."""
        host = self._device.type == "cpu"
        where = (EmbeddingLocation.HOST, ComputeDevice.CPU) if host else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        adagrad = self._optimizer.kind == "rowwise-adagrad"
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
        if self._optimizer.kind == "rowwise-adagrad":
            return tuple(state.unsqueeze(1) for (state,) in self._kernel.split_optimizer_states())
        values = [state_values(self._optimizer.kind, dim) for _, dim in self._shapes]
        sizes = [rows * width for (rows, _), width in zip(self._shapes, values, strict=True)]
        host = self._device.type == "cpu"
        buffer = lazy_zeros(sum(sizes), torch.float32) if host else torch.zeros(sum(sizes), device=self._device)
        parts = zip(torch.split(buffer, sizes), self._shapes, values, strict=True)
        return tuple(part.view(rows, width) for part, (rows, _), width in parts)

    def storage(self) -> tuple[Tensor, Tensor]:
        """All tables' rows (sum of rows, dim) and states (sum of rows, S) as one, for tables of one dim."""
        dims = {dim for _, dim in self._shapes}
        assert len(dims) == 1, f"tables of one batch with dims {sorted(dims)} have no common row: group them by dim"
        rows = sum(rows for rows, _ in self._shapes)
        weight, state = self.weights[0], self.states[0]
        return weight.as_strided((rows, weight.shape[1]), weight.stride()), state.as_strided(
            (rows, state.shape[1]), state.stride()
        )

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
        if learning_rate is not None:
            self._kernel.set_learning_rate(learning_rate)
        with torch.set_grad_enabled(learning_rate is not None):
            pooled: Tensor = self._kernel(ids, offsets)
        return pooled

    def update(self, pooled: Tensor, gradient: Tensor, *, step: int = 0, rows: Tensor | None = None) -> None:
        """Update the rows that ``lookup`` summed.

        Args:
            pooled: what ``lookup`` returned for a learning rate.
            gradient: (N, dim) float32, of the loss by ``pooled``.
            step: number of the step, for the rounding of fp16 rows.
            rows: (sum of lengths,) int64 global row numbers of the ids looked up, for the rounding of fp16 rows; None:
                the ids are row numbers themselves.
        """
        if self._kernel is not None:
            pooled.backward(gradient)  # type: ignore[no-untyped-call]


def lazy_zeros(count: int, dtype: torch.dtype) -> Tensor:
    """(count,) zeros on the host, aligned to a cache line, whose pages take no memory until they are written.

    torch.zeros writes every page.
    """
    size = dtype.itemsize
    bytes_ = torch.from_numpy(np.zeros(count * size + ALIGNMENT, np.uint8))
    start = -bytes_.data_ptr() % ALIGNMENT
    return bytes_[start : start + count * size].view(dtype)
