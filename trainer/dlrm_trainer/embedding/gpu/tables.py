"""Look up and update rows on a GPU by fbgemm, which only this module imports, or by kernels of our own.

Shapes: R rows of a table, U of them to be updated, L ids, d columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby

import fbgemm_gpu
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from numpy.typing import NDArray
from torch import Tensor

from dlrm_api.errors import InvalidSpecError
from dlrm_api.row_optimizers import ROW_OPTIMIZERS, state_values
from dlrm_api.training import RowOptimizerSpec
from dlrm_kernels.row_updates import step_keys
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.gpu.row_updates import Rounding, SortedLookups, update_rows
from dlrm_trainer.embedding.table_batch import RowUpdate, Tables, joined, table_views

ADDITION = RowOptimizerSpec(kind="sgd")
FBGEMM_TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}


def made_for_gpus() -> bool:
    """Tell whether fbgemm's operators have kernels for a GPU: those of the package fbgemm-gpu-cpu do not."""
    return bool(fbgemm_gpu.__variant__ != "cpu")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Describe neighbouring features of one dim, updated in one call."""

    dim: int
    first_table: int
    last_table: int
    """The table after the last."""
    features: NDArray[np.int64]
    """(n,) table of each feature."""
    row_starts: Tensor
    """(n,) int32, or int64 if rows do not fit, first row of each feature's table among the rows of the run."""


class DeviceKernel:
    """Look up and update tables on a GPU; see ``table_batch.Kernel``.

    fbgemm looks rows up, and updates fp32 rows by row-wise Adagrad and SGD, unless they are to be ``deterministic`` or
    are regularized. All other updates are those of ``row_updates``.

    Raises:
        InvalidSpecError: the tables are on a GPU, and the installed fbgemm has no kernels for it.
    """

    def __init__(self, tables: Tables) -> None:
        if tables.device.type == "cuda" and not made_for_gpus():
            raise InvalidSpecError(
                "plan.device",
                "expected cpu, got cuda: the package fbgemm-gpu-cpu has no kernels for GPUs; "
                "install fbgemm-gpu, as in the trainer's image for GPUs",
            )
        self._tables = tables
        self._fused = is_fused(tables)
        self._fbgemm = self._make_fbgemm()
        # .data, because autograd would take rows fetched between a lookup and its update for a change of what it saved.
        self.weights: tuple[Tensor, ...] = tuple(weight.data for weight in self._fbgemm.split_embedding_weights())
        self.states = self._make_states()
        self._runs = tuple(_runs(tables))
        self._graph: Tensor | None = None
        self._rate = tables.optimizer.learning_rate
        starts = [*accumulate((rows for rows, _ in tables.shapes), initial=0)]
        self._row_starts = torch.tensor(starts[:-1], device=tables.device)
        """(T,) int64 first row of each table, numbered over all."""
        self._first_columns = np.array(tables.first_columns, np.int64)

    def _make_fbgemm(self) -> SplitTableBatchedEmbeddingBagsCodegen:
        tables = self._tables
        host = tables.device.type == "cpu"
        where = (EmbeddingLocation.HOST, ComputeDevice.CPU) if host else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        adagrad = self._fused and tables.optimizer.kind == "rowwise-adagrad"
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, *where) for rows, dim in tables.shapes],
            feature_table_map=list(tables.features),
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD if adagrad else EmbOptimType.EXACT_SGD,
            weights_precision=FBGEMM_TYPES[tables.dtype],
            output_dtype=SparseType.FP32,
            eps=tables.optimizer.eps,
            # A mean divides by the bag's length over all row shards, which is not known here.
            pooling_mode=PoolingMode.SUM,
            stochastic_rounding=False,
            # Ids were checked when they were read and when they arrived.
            bounds_check_mode=BoundsCheckMode.NONE,
            device=tables.device,
        )

    def _make_states(self) -> tuple[Tensor, ...]:
        if self._fused and self._tables.optimizer.kind == "rowwise-adagrad":
            return tuple(state.data.unsqueeze(1) for (state,) in self._fbgemm.split_optimizer_states())
        kind = self._tables.optimizer.kind
        shapes = [(rows, state_values(kind, dim)) for rows, dim in self._tables.shapes]
        return table_views(torch.zeros(sum(rows * width for rows, width in shapes), device=self._tables.device), shapes)

    def pool(self, bags: Bags, updates: bool) -> Tensor:
        """See ``table_batch.Kernel``."""
        fused = self._fused and updates
        pooled = self._forward(bags, grad=fused)
        if fused:
            self._graph = pooled
        return pooled.detach()

    def _forward(self, bags: Bags, *, grad: bool) -> Tensor:
        offsets = torch.zeros(bags.lengths.numel() + 1, dtype=torch.int64, device=self._tables.device)
        torch.cumsum(bags.lengths.flatten(), 0, out=offsets[1:])
        if grad:
            self._fbgemm.set_learning_rate(self._rate)
        with torch.set_grad_enabled(grad):
            pooled: Tensor = self._fbgemm(bags.ids, offsets, bags.weights)
        return pooled

    def update(self, bags: Bags, gradient: Tensor, rows: Tensor, update: RowUpdate) -> None:
        """See ``table_batch.Kernel``."""
        graph, self._graph = self._graph, None
        if graph is not None and update.regularizer is None:
            self._backward(graph, bags, gradient, update.learning_rate)
            return
        gradient = gradient.contiguous()
        at = column = 0
        for run, of_run in zip(self._runs, bags.split([len(run.features) for run in self._runs]), strict=True):
            numbers = rows[at : at + len(of_run.ids)]
            self._update_run(run, of_run, numbers, gradient, column, update)
            at, column = at + len(numbers), column + len(run.features) * run.dim

    def _backward(self, graph: Tensor, bags: Bags, gradient: Tensor, learning_rate: float) -> None:
        # fbgemm's forward pass captures the learning rate. The lookup took that of the last update; with another one
        # the forward pass runs again.
        if learning_rate != self._rate:
            self._rate = learning_rate
            graph = self._forward(bags, grad=True)
        graph.backward(gradient)  # type: ignore[no-untyped-call]

    def _update_run(
        self, run: Run, bags: Bags, numbers: Tensor, gradient: Tensor, column: int, update: RowUpdate
    ) -> None:
        """Update the tables of one run by the gradient of its bags, in the columns from ``column`` on."""
        rounded = self._tables.dtype == "fp16"
        lookups = self._sorted(run, bags, column, numbers if rounded else None)
        rounding = self._rounding(run.features, update.step) if rounded else None
        weight, state = (joined(each, run.first_table, run.last_table) for each in (self.weights, self.states))
        update_rows(weight, state, gradient, lookups, rounding, self._tables.optimizer, update)

    def _sorted(self, run: Run, bags: Bags, column: int, numbers: Tensor | None = None) -> SortedLookups:
        """Sort the lookups of a run; ``numbers`` are their global rows if these are rounded."""
        samples = max(bags.lengths.shape[1], 1)
        bag = torch.repeat_interleave(bags.lengths.flatten(), output_size=len(bags.ids))
        starts = run.row_starts.index_select(0, bag // samples)
        # 32 bits where rows fit: a sort passes over as many bits as keys have.
        rows, order = torch.sort(bags.ids.to(starts.dtype) + starts, stable=True)
        return SortedLookups(rows, order, bag, bags.weights, numbers, samples=samples, first_column=column)

    def add_gradients(self, bags: Bags, gradient: Tensor, sums: Tensor, touched: Tensor) -> None:
        """See ``table_batch.SumKernel``."""
        [run] = self._runs
        lookups = self._sorted(run, bags, 0)
        # SGD subtracts gradients times the rate.
        update_rows(sums, sums[:, :0], gradient.contiguous(), lookups, None, ADDITION, RowUpdate(-1.0, 0))
        touched.index_fill_(0, lookups.rows.to(torch.int64), 1.0)

    def update_rows(self, rows: Tensor, sums: Tensor, update: RowUpdate) -> None:
        """See ``table_batch.SumKernel``."""
        tables = numbers = rounding = None
        if self._tables.dtype == "fp16":
            tables = torch.searchsorted(self._row_starts, rows, right=True) - 1
            numbers = rows - self._row_starts[tables]
            rounding = self._rounding(np.arange(len(self.weights)), update.step)
        lookups = SortedLookups(rows, None, rows.clamp(max=len(sums) - 1), None, numbers, tables)
        weight, state = (joined(each, 0, len(each)) for each in (self.weights, self.states))
        update_rows(weight, state, sums, lookups, rounding, self._tables.optimizer, update)

    def _rounding(self, tables: NDArray[np.int64], step: int) -> Rounding:
        """Return what rows of features of these tables are rounded by at a step."""
        keys = step_keys(self._tables.keys[tables], step).view(np.int64)
        made = torch.from_numpy(np.stack((keys, self._first_columns[tables])))
        # Without non_blocking the host waits for all that the GPU has to do before.
        return Rounding(*made.to(self._tables.device, non_blocking=True))


def is_fused(tables: Tables) -> bool:
    """Tell whether fbgemm updates the tables' rows."""
    fused = ROW_OPTIMIZERS[tables.optimizer.kind].is_fused_on_gpu
    return fused and tables.dtype == "fp32" and not tables.deterministic


def _runs(tables: Tables) -> Iterator[Run]:
    for dim, group in groupby(tables.features, key=lambda table: tables.shapes[table][1]):
        features = list(group)
        first, last = features[0], features[-1] + 1
        starts = np.array([*accumulate((rows for rows, _ in tables.shapes[first:last]), initial=0)])
        of_run = np.array(features)
        kind = np.int32 if starts[-1] < 2**31 else np.int64
        yield Run(
            dim=dim,
            first_table=first,
            last_table=last,
            features=of_run,
            row_starts=torch.from_numpy(starts[of_run - first].astype(kind)).to(tables.device),
        )
