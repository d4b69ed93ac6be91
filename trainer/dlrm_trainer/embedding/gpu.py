"""Look up and update rows on a GPU by fbgemm, which only this module imports, or by torch operations.

Shapes: R rows of a table, U of them to be updated, L ids, d columns, S values of row state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import fbgemm_gpu
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from dlrm_api.errors import InvalidSpecError
from dlrm_api.row_optimizers import ROW_OPTIMIZERS, state_values
from dlrm_api.training import RowOptimizerSpec, RowRegularizerSpec
from dlrm_kernels import hashing
from dlrm_kernels.row_updates import COLUMNS_PER_HASH, MAX_UPDATES, step_keys
from dlrm_trainer.embedding.exchange import Bags
from dlrm_trainer.embedding.table_batch import RowUpdate, Tables, joined, table_views

FBGEMM_TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
MIN_EXPONENT = 113
"""fp32's exponent field of 2**-14, the smallest normal fp16 number."""
EXPONENT_BITS, MANTISSA_BITS = 0xFF, 23
HALF_MANTISSA_BITS = 10
INVERSE_EXPONENTS = 254
"""Sum of the exponent fields of a power of two and of its inverse."""


def _signed(value: int) -> int:
    """Return the signed 64-bit integer with the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


GOLDEN, MIX_1, MIX_2 = (_signed(int(each)) for each in (hashing.GOLDEN, hashing.MIX_1, hashing.MIX_2))


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
    features: Tensor
    """(n,) int64 table of each feature."""
    row_starts: Tensor
    """(n,) int64 first row of each feature's table among the rows of the run."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """Hold what the random bits of fp16 rows depend on; (U,) int64 each."""

    keys: Tensor
    """Keys of the rows' tables at this step."""
    rows: Tensor
    """Global rows."""
    first_column: Tensor
    """First column in the whole table; a multiple of 4."""


class DeviceKernel:
    """Look up and update tables on a GPU; see ``table_batch.Kernel``.

    On the host it runs too, for tests that compare it with the compiled loops.

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
        self._fused = tables.dtype == "fp32" and ROW_OPTIMIZERS[tables.optimizer.kind].is_fused_on_gpu
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
        if self._fused:
            self._backward(bags, gradient, update.learning_rate)
            if update.regularizer is not None:
                self._regularize(bags, update.regularizer)
            return
        keys = self._keys(update.step)
        of_runs = bags.split([len(run.features) for run in self._runs])
        at = column = 0
        for run, of_run in zip(self._runs, of_runs, strict=True):
            count, width = len(of_run.ids), len(run.features) * run.dim
            summed = gradient[:, column : column + width].reshape(-1, run.dim)
            self._update_run(run, of_run, summed, keys, rows[at : at + count], update)
            at, column = at + count, column + width

    def _backward(self, bags: Bags, gradient: Tensor, learning_rate: float) -> None:
        # fbgemm's forward pass captures the learning rate. The lookup took that of the last update; with another one
        # the forward pass runs again.
        graph, self._graph = self._graph, None
        assert graph is not None
        if learning_rate != self._rate:
            self._rate = learning_rate
            graph = self._forward(bags, grad=True)
        with _deterministic() if self._tables.deterministic else nullcontext():
            graph.backward(gradient)  # type: ignore[no-untyped-call]

    def _regularize(self, bags: Bags, regularizer: RowRegularizerSpec) -> None:
        """Regularize the rows that fbgemm has updated."""
        for run, of_run in zip(self._runs, bags.split([len(run.features) for run in self._runs]), strict=True):
            feature, _ = _bags_of_ids(of_run)
            slots = torch.unique(of_run.ids + run.row_starts[feature])
            weight = joined(self.weights, run.first_table, run.last_table)
            weight[slots] = regularized(weight.index_select(0, slots), regularizer)

    def _keys(self, step: int) -> Tensor:
        """Return (T,) int64 keys of the tables at a step; empty for fp32."""
        keys = step_keys(self._tables.keys, step).view(np.int64)
        return torch.from_numpy(keys).to(self._tables.device)

    def _update_run(
        self, run: Run, bags: Bags, gradient: Tensor, keys: Tensor, rows: Tensor, update: RowUpdate
    ) -> None:
        """Update the tables of one run by the gradient of its bags, (N * features, dim), sample-major."""
        feature, each = self._gradients(bags, gradient)
        slots, places = torch.unique(bags.ids + run.row_starts[feature], return_inverse=True)
        # Sums each row's gradients on a GPU always in the same order.
        sums = torch.ops.aten.embedding_dense_backward(each, places, len(slots), -1, False)
        rounding = None
        if len(keys):
            tables = run.features[feature]
            rounding = Rounding(
                keys=torch.empty_like(slots).index_put_((places,), keys[tables]),
                rows=torch.empty_like(slots).index_put_((places,), rows),
                first_column=torch.empty_like(slots).index_put_((places,), self._first_columns[tables]),
            )
        weight, state = (joined(each, run.first_table, run.last_table) for each in (self.weights, self.states))
        self._update(weight, state, slots, sums, rounding, update)

    def _gradients(self, bags: Bags, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return (L,) the feature of each id and (L, d) its gradient, from that of its bag, (N * F, d) sample-major."""
        feature, sample = _bags_of_ids(bags)
        each = gradient.index_select(0, sample * len(bags.lengths) + feature)
        return feature, each if bags.weights is None else each * bags.weights[:, None]

    def add_gradients(self, bags: Bags, gradient: Tensor, sums: Tensor, touched: Tensor) -> None:
        """See ``table_batch.SumKernel``."""
        [run] = self._runs
        feature, each = self._gradients(bags, gradient.reshape(-1, run.dim))
        rows = bags.ids + run.row_starts[feature]
        sums += torch.ops.aten.embedding_dense_backward(each, rows, len(sums), -1, False)
        touched[rows] = 1.0

    def update_rows(self, rows: Tensor, sums: Tensor, update: RowUpdate) -> None:
        """See ``table_batch.SumKernel``."""
        rounding = None
        if self._tables.dtype == "fp16":
            tables = torch.searchsorted(self._row_starts, rows, right=True) - 1
            rounding = Rounding(
                keys=self._keys(update.step)[tables],
                rows=rows - self._row_starts[tables],
                first_column=self._first_columns[tables],
            )
        weight, state = (joined(each, 0, len(each)) for each in (self.weights, self.states))
        self._update(weight, state, rows, sums.index_select(0, rows), rounding, update)

    def _update(
        self,
        weight: Tensor,
        state: Tensor,
        slots: Tensor,
        gradient: Tensor,
        rounding: Rounding | None,
        update: RowUpdate,
    ) -> None:
        """Update (U,) distinct rows by (U, d) gradients in place, each once; float16 rows need ``rounding``."""
        old, optimizer = weight.index_select(0, slots).float(), self._tables.optimizer
        rows, states = updated(old, state.index_select(0, slots), gradient, optimizer, update.learning_rate)
        if update.regularizer is not None:
            rows = regularized(rows, update.regularizer)
        if weight.dtype == torch.float16:
            assert rounding is not None
            rows = round_to_half(rows, random_bits(rounding, gradient.shape[1]))
        weight[slots] = rows
        state[slots] = states


def updated(
    weight: Tensor, state: Tensor, gradient: Tensor, optimizer: RowOptimizerSpec, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Return (U, d) float32 rows and their (U, S) float32 state after one update.

    The state is one sum for row-wise Adagrad, nothing for SGD, and d first moments, d second moments and the number of
    updates for Adam.
    """
    if optimizer.kind == "sgd":
        return weight - gradient * learning_rate, state
    if optimizer.kind == "adam":
        return _adam(weight, state, gradient, optimizer, learning_rate)
    sums = state + gradient.square().mean(dim=1, keepdim=True)
    factors = learning_rate / (sums.sqrt() + optimizer.eps)
    return weight - factors * gradient, sums


def _adam(
    weight: Tensor, state: Tensor, gradient: Tensor, optimizer: RowOptimizerSpec, learning_rate: float
) -> tuple[Tensor, Tensor]:
    """Apply Adam to the rows looked up, with each row's own count of updates to correct its moments.

    Source: Kingma and Ba, ICLR 2015; rows not looked up stay unchanged, as in torch.optim.SparseAdam.
    """
    columns = weight.shape[1]
    first = state[:, :columns] * optimizer.beta1 + gradient * (1 - optimizer.beta1)
    second = state[:, columns : 2 * columns] * optimizer.beta2 + gradient.square() * (1 - optimizer.beta2)
    counts = (state[:, 2 * columns :] + 1).clamp(max=MAX_UPDATES)
    roots = (second / _correction(optimizer.beta2, counts)).sqrt() + optimizer.eps
    steps = first / _correction(optimizer.beta1, counts) / roots
    return weight - steps * learning_rate, torch.cat((first, second, counts), dim=1)


def _correction(decay: float, counts: Tensor) -> Tensor:
    """Return 1 - decay ** count as float32 of (U, 1) float32 counts, whole numbers from 1 to 2**24."""
    # Multiplication in float64 only: a library's power differs by device and lane.
    whole = counts.to(torch.int32)
    powers = torch.ones_like(counts, dtype=torch.float64)
    for bit in range(MAX_UPDATES.bit_length()):
        powers = torch.where((whole >> bit) & 1 == 1, powers * decay, powers)
        decay *= decay
    return (1 - powers).to(torch.float32)


def regularized(weight: Tensor, regularizer: RowRegularizerSpec) -> Tensor:
    """Return (U, d) float32 rows nearer to what a snapshot can store, as ``row_updates`` specifies."""
    low = weight.amin(dim=1, keepdim=True)
    distance = (weight.amax(dim=1, keepdim=True) - low) / (2**regularizer.bits - 1)
    place = (weight - low) / distance
    wave = torch.sin(math.tau * (place - place.round())) / math.tau
    return torch.where((distance > 0) & distance.isfinite(), weight - regularizer.strength * distance * wave, weight)


def _bags_of_ids(bags: Bags) -> tuple[Tensor, Tensor]:
    """Return (L,) the feature and the sample of each id."""
    samples = max(bags.lengths.shape[1], 1)
    bag = torch.repeat_interleave(bags.lengths.flatten().to(torch.int64), output_size=len(bags.ids))
    return bag // samples, bag % samples


def random_bits(rounding: Rounding, columns: int) -> Tensor:
    """Return (U, columns) uint16, the random bits of rows' columns as ``row_updates`` specifies them."""
    keys = rounding.keys
    first = rounding.first_column.view(-1, 1) // COLUMNS_PER_HASH
    quads = (first + torch.arange(1, columns // COLUMNS_PER_HASH + 1, device=keys.device)) * GOLDEN
    streams = _mix(keys + rounding.rows * GOLDEN)
    return _mix(streams[:, None] + quads).view(torch.uint16)


def round_to_half(values: Tensor, bits: Tensor) -> Tensor:
    """Round float32 values to float16, up in magnitude if ``bits`` (uint16 each) say so."""
    exponents = values.view(torch.int32).bitwise_right_shift(MANTISSA_BITS).bitwise_and_(EXPONENT_BITS)
    exponents.clamp_(min=MIN_EXPONENT)
    quantum = _power_of_two(exponents - HALF_MANTISSA_BITS)
    inverse = _power_of_two(INVERSE_EXPONENTS + HALF_MANTISSA_BITS - exponents)
    scaled = inverse.mul_(values).abs_()
    whole = scaled.floor()
    dropped = scaled.sub_(whole).mul_(2.0**16).floor_()
    whole += bits.to(torch.float32) < dropped
    return whole.mul_(quantum).copysign_(values).to(torch.float16)


def _power_of_two(exponents: Tensor) -> Tensor:
    return exponents.bitwise_left_shift_(MANTISSA_BITS).view(torch.float32)


def _mix(values: Tensor) -> Tensor:
    """Apply ``hashing.mix`` to int64 values; masks remove the sign that their right shift copies."""
    values = (values ^ ((values >> 30) & (2**34 - 1))) * MIX_1
    values = (values ^ ((values >> 27) & (2**37 - 1))) * MIX_2
    return values ^ ((values >> 31) & (2**33 - 1))


@contextmanager
def _deterministic() -> Iterator[None]:
    """Make kernels add in a fixed order: fbgemm's would add parts of a long sum as they come.

    torch.use_deterministic_algorithms does it too, but loads torch's compiler.
    """
    # No type checker sees the property of this module.
    memory: Any = torch.utils.deterministic
    mode, fills = torch.get_deterministic_debug_mode(), memory.fill_uninitialized_memory
    # Filling costs a pass over what the kernels overwrite.
    memory.fill_uninitialized_memory = False
    torch.set_deterministic_debug_mode("error")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        memory.fill_uninitialized_memory = fills


def _runs(tables: Tables) -> Iterator[Run]:
    for dim, group in groupby(tables.features, key=lambda table: tables.shapes[table][1]):
        features = list(group)
        first, last = features[0], features[-1] + 1
        starts = torch.tensor([*accumulate((rows for rows, _ in tables.shapes[first:last]), initial=0)])
        of_run = torch.tensor(features)
        yield Run(
            dim=dim,
            first_table=first,
            last_table=last,
            features=of_run.to(tables.device),
            row_starts=starts[of_run - first].to(tables.device),
        )
