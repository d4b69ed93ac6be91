"""fbgemm's table-batched embeddings. The one module that imports fbgemm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor


class TableBatch:
    """Row slots of several tables behind one kernel: pooled lookup, and exact row-wise Adagrad in its backward.

    Each row that a batch looks up is updated once, by the sum of its gradients in the order of the batch: bits don't
    depend on threads. The update is ``m += mean(g * g)``, then ``w -= learning_rate * g / (sqrt(m) + eps)``.

    Args:
        shapes: (rows, dim) of each table; dim a multiple of 4. May be empty: lookups are then (N, 0).
        eps: added to the root of the row state.

    Source: Mudigere et al., ISCA 2022 (exact fused optimizers); FBGEMM.
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], eps: float) -> None:
        self.dim = sum(dim for _, dim in shapes)
        """Columns of a lookup: the tables' dims side by side."""
        self.weights: tuple[Tensor, ...] = ()
        """(rows, dim) float32 of each table, views of the kernel's memory; not initialised."""
        self.states: tuple[Tensor, ...] = ()
        """(rows,) float32 row state of each table, views likewise; zero."""
        self._kernel: SplitTableBatchedEmbeddingBagsCodegen | None = None
        if shapes:
            self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
                [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shapes],
                optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
                eps=eps,
                pooling_mode=PoolingMode.SUM,  # a mean divides by the bag's length over all row shards: not known here
                stochastic_rounding=False,
                bounds_check_mode=BoundsCheckMode.NONE,  # the reader has checked every id
                device="cpu",
            )
            self.weights = tuple(self._kernel.split_embedding_weights())
            self.states = tuple(state for (state,) in self._kernel.split_optimizer_states())

    def lookup(self, ids: Tensor, lengths: Tensor, learning_rate: float | None = None) -> Tensor:
        """Sum the rows of each bag.

        Args:
            ids: (sum of lengths,) int64 row numbers of their tables, table-major.
            lengths: (T, N) int32 or int64 ids in each bag.
            learning_rate: of the update that follows, which the kernel fixes here; None: no update follows.

        Returns:
            (N, dim) float32; with a learning rate it carries what ``update`` needs.
        """
        if self._kernel is None:
            return torch.zeros(lengths.shape[1], 0)
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
        if learning_rate is not None:
            self._kernel.set_learning_rate(learning_rate)
        with torch.set_grad_enabled(learning_rate is not None):
            pooled: Tensor = self._kernel(ids, offsets)
        return pooled

    def update(self, pooled: Tensor, gradient: Tensor) -> None:
        """Update the rows that ``lookup`` summed.

        Args:
            pooled: what ``lookup`` returned for a learning rate.
            gradient: (N, dim) float32, of the loss by ``pooled``.
        """
        if self._kernel is not None:
            pooled.backward(gradient)  # type: ignore[no-untyped-call]
