"""Lookup and update of rows on a GPU: fbgemm's fused kernels, or torch operations. Only this module imports fbgemm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import fbgemm_gpu
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from dlrm_api.row_optimizers import state_values
from dlrm_trainer.embedding.layout import Lookup, Tables, joined, table_views
from dlrm_trainer.embedding.rounding import step_keys
from dlrm_trainer.embedding.updates import Rounding, sum_by_row, update_rows

FBGEMM_TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}


def made_for_gpus() -> bool:
    """Whether fbgemm's operators have kernels for a GPU: the package fbgemm-gpu-cpu has none."""
    return bool(fbgemm_gpu.__variant__ != "cpu")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Neighbouring features [start, stop) of one dim, whose rows are updated at once."""

    start: int
    stop: int
    dim: int
    first_table: int
    last_table: int
    """The one after the last."""
    features: Tensor
    """(stop - start,) int64, the table of each."""
    row_starts: Tensor
    """(stop - start,) int64, of each feature's table in the rows of the run."""


class DeviceKernel:
    """See ``kernels.Kernel``. It works on the host too, where it is compared with the compiled loops."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._fused = tables.dtype == "fp32" and tables.optimizer.kind != "adam"
        self._fbgemm = self._make_fbgemm()
        # As .data: autograd would take rows fetched between a lookup and its update for a change of what it has kept.
        self.weights: tuple[Tensor, ...] = tuple(weight.data for weight in self._fbgemm.split_embedding_weights())
        self.states = self._make_states()
        self._runs = () if self._fused else tuple(_runs(tables))
        self._graph: Tensor | None = None
        self._first_columns = torch.tensor(tables.first_columns, dtype=torch.int64, device=tables.device)

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
            pooling_mode=PoolingMode.SUM,  # a mean divides by the bag's length over all row shards: not known here
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,  # the reader has checked every id
            device=tables.device,
        )

    def _make_states(self) -> tuple[Tensor, ...]:
        if self._fused and self._tables.optimizer.kind == "rowwise-adagrad":
            return tuple(state.data.unsqueeze(1) for (state,) in self._fbgemm.split_optimizer_states())
        kind = self._tables.optimizer.kind
        shapes = [(rows, state_values(kind, dim)) for rows, dim in self._tables.shapes]
        return table_views(torch.zeros(sum(rows * width for rows, width in shapes), device=self._tables.device), shapes)

    def pool(self, ids: Tensor, lengths: Tensor, weights: Tensor | None, learning_rate: float | None) -> Tensor:
        """See ``kernels.Kernel``."""
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=self._tables.device)
        torch.cumsum(lengths.flatten(), 0, out=offsets[1:])
        fused = self._fused and learning_rate is not None
        if fused:
            self._fbgemm.set_learning_rate(learning_rate)  # its forward pass takes the rate: later is a step late
        with torch.set_grad_enabled(fused):
            pooled: Tensor = self._fbgemm(ids, offsets, weights)
        if fused:
            self._graph = pooled
        return pooled.detach()

    def update(self, lookup: Lookup, gradient: Tensor, step: int, rows: Tensor) -> None:
        """See ``kernels.Kernel``."""
        if self._fused:
            graph, self._graph = self._graph, None
            assert graph is not None
            with _deterministic() if self._tables.deterministic else nullcontext():
                graph.backward(gradient)  # type: ignore[no-untyped-call]
            return
        keys = step_keys(self._tables.keys, step)
        counts = lookup.lengths.sum(dim=1, dtype=torch.int64) if lookup.sizes is None else lookup.sizes
        sizes = counts.tolist()
        at = column = 0
        for run in self._runs:
            count, width = sum(sizes[run.start : run.stop]), (run.stop - run.start) * run.dim
            part = slice(at, at + count)
            of_run = Lookup(
                ids=lookup.ids[part],
                lengths=lookup.lengths[run.start : run.stop],
                weights=None if lookup.weights is None else lookup.weights[part],
                learning_rate=lookup.learning_rate,
            )
            self._update_run(run, of_run, gradient[:, column : column + width].reshape(-1, run.dim), keys, rows[part])
            at, column = at + count, column + width

    def _update_run(self, run: Run, lookup: Lookup, gradient: Tensor, keys: Tensor, rows: Tensor) -> None:
        """Update the tables of one run.

        Args:
            run: the features.
            lookup: theirs alone.
            gradient: (N * features of the run, dim), sample-major.
            keys: of all tables; empty for fp32.
            rows: (L,) global rows of the ids.
        """
        features, samples = lookup.lengths.shape
        bags = torch.repeat_interleave(lookup.lengths.flatten().to(torch.int64), output_size=len(lookup.ids))
        feature, sample = bags // max(samples, 1), bags % max(samples, 1)
        each = gradient.index_select(0, sample * features + feature)
        if lookup.weights is not None:
            each = each * lookup.weights[:, None]
        slots, sums, places = sum_by_row(lookup.ids + run.row_starts[feature], each)
        rounding = None
        if len(keys):
            tables = run.features[feature]
            rounding = Rounding(
                keys=torch.empty_like(slots).index_put_((places,), keys[tables]),
                rows=torch.empty_like(slots).index_put_((places,), rows),
                first_column=torch.empty_like(slots).index_put_((places,), self._first_columns[tables]),
            )
        weight, state = (joined(each, run.first_table, run.last_table) for each in (self.weights, self.states))
        update_rows(weight, state, slots, sums, self._tables.optimizer, lookup.learning_rate, rounding)


@contextmanager
def _deterministic() -> Iterator[None]:
    """Have kernels add in an order that is always the same: fbgemm's else add parts of a long sum as they come.

    torch.use_deterministic_algorithms would do it too, but loads torch's compiler.
    """
    memory: Any = torch.utils.deterministic  # whose property no type checker sees
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False  # which costs a pass over what the kernels overwrite
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills


def _runs(tables: Tables) -> Iterator[Run]:
    dims = [tables.shapes[table][1] for table in tables.features]
    start = 0
    for dim, group in groupby(dims):
        stop = start + len(list(group))
        of_run = torch.tensor(tables.features[start:stop], device=tables.device)
        first, last = tables.features[start], tables.features[stop - 1] + 1
        row_starts = torch.tensor([0, *accumulate(rows for rows, _ in tables.shapes[first:last])], device=tables.device)
        yield Run(
            start=start,
            stop=stop,
            dim=dim,
            first_table=first,
            last_table=last,
            features=of_run,
            row_starts=row_starts[of_run - first],
        )
        start = stop
