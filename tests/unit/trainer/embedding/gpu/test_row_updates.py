from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_api.row_optimizers import RowOptimizerKind, state_values
from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec, RowRegularizerSpec
from dlrm_planner.tables import UPDATED_LOOKUP_BYTES
from dlrm_testing.trainer import row_rules
from dlrm_testing.trainer.bags import bags_of, tables_of
from dlrm_testing.trainer.host_waits import HostWaits
from dlrm_testing.trainer.live_memory import LiveMemory, takes_unpromised_memory
from dlrm_testing.trainer.triton_programs import ORDERS, memory_in_place, program_order
from dlrm_trainer.embedding.gpu.row_updates import Rounding, SortedLookups, update_rows
from dlrm_trainer.embedding.gpu.tables import DeviceKernel
from dlrm_trainer.embedding.table_batch import HostKernel, Kernel, RowUpdate, Tables
from dlrm_trainer.embedding.tiers.slots import untouched_zeros

KINDS: list[RowOptimizerKind] = ["rowwise-adagrad", "sgd", "adam"]
SHAPES, FEATURES = [(40, 4), (7, 4), (30, 24), (3, 8)], [0, 0, 1, 2, 2, 3]
ADAGRAD, PULLED = RowOptimizerSpec(), RowRegularizerSpec(bits=2, strength=0.3, last_steps=1)
each_kind = pytest.mark.parametrize("kind", KINDS)
both_types = pytest.mark.parametrize("dtype", ["fp32", "fp16"])


def tables(kind: RowOptimizerKind, dtype: RowDtype, shapes: Any = SHAPES, features: Any = FEATURES) -> Tables:
    """Tables that fbgemm does not update."""
    names, columns = [f"t{number}" for number in range(len(shapes))], [4 * number for number in range(len(shapes))]
    spec = RowOptimizerSpec(kind=kind)
    options: dict[str, Any] = {"features": features, "first_columns": columns, "deterministic": True}
    return tables_of(shapes, spec, dtype=dtype, names=names, **options)


def filled(*kernels: Kernel) -> Sequence[Kernel]:
    for kernel in kernels:
        for number, weight in enumerate(kernel.weights):
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return kernels


def content(kernel: Kernel) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in (*kernel.weights, *kernel.states)]


def random_bags(generator: np.random.Generator, samples: int, most: int, *, weighted: bool) -> Any:
    lengths = generator.integers(0, most + 1, (len(FEATURES), samples))
    ids = [generator.integers(0, SHAPES[table][0], n) for table, n in zip(FEATURES, lengths.sum(axis=1), strict=True)]
    flat = torch.from_numpy(np.concatenate(ids))
    weights = torch.from_numpy(generator.normal(size=len(flat)).astype(np.float32)) if weighted else None
    return bags_of(flat, torch.from_numpy(lengths.astype(np.int32)), weights)


def gradient_of(generator: np.random.Generator, samples: int) -> Tensor:
    return torch.from_numpy(
        generator.normal(size=(samples, sum(SHAPES[table][1] for table in FEATURES))).astype(np.float32)
    )


@each_kind
@both_types
@pytest.mark.parametrize(("regularizer", "weighted"), [(None, True), (PULLED, False)], ids=["weighted", "regularized"])
def test_rows_have_the_bits_of_the_hosts(
    kind: RowOptimizerKind, dtype: RowDtype, regularizer: RowRegularizerSpec | None, weighted: bool
) -> None:
    generator, of_kind = np.random.default_rng(6), tables(kind, dtype)
    host, device = filled(HostKernel(of_kind), DeviceKernel(of_kind))

    for step, (samples, most) in enumerate([(3, 3), (0, 0), (2, 0), (2, 4)]):
        bags = random_bags(generator, samples, most, weighted=weighted)
        gradient = gradient_of(generator, samples)
        for kernel in (host, device):
            kernel.update(bags, gradient, bags.ids + 2**40, RowUpdate(0.1 / (step + 1), step, regularizer))

    assert content(device) == content(host)


@pytest.mark.parametrize("dim", [4, 12, 64, 68, 128, 1_024])
@pytest.mark.parametrize("kind", ["rowwise-adagrad", "adam"])
def test_summed_rows_of_any_dim_have_the_bits_of_the_hosts(kind: RowOptimizerKind, dim: int) -> None:
    of_kind = tables(kind, "fp16", [(5, dim), (9, dim)], [0, 1])
    host, device = filled(HostKernel(of_kind), DeviceKernel(of_kind))
    sums = torch.randn(14, dim, generator=torch.Generator().manual_seed(dim))

    for kernel in (host, device):
        kernel.update_rows(torch.tensor([3, 5, 13]), sums, RowUpdate(0.1, 3, PULLED))

    assert content(device) == content(host)


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_add_up_to_the_bits_of_the_hosts(weighted: bool) -> None:
    generator, of_kind = np.random.default_rng(2), tables("sgd", "fp32", [(6, 8), (3, 8)], [0, 0, 1])
    lengths = generator.integers(0, 5, (3, 7))
    ids = torch.from_numpy(generator.integers(0, 3, int(lengths.sum())))
    weights = torch.from_numpy(generator.normal(size=len(ids)).astype(np.float32)) if weighted else None
    bags = bags_of(ids, torch.from_numpy(lengths.astype(np.int32)), weights)
    gradient = torch.from_numpy(generator.normal(size=(7, 24)).astype(np.float32))
    found = []

    for kernel in (HostKernel(of_kind), DeviceKernel(of_kind)):
        sums, touched = torch.zeros(9, 8), torch.zeros(9)
        kernel.add_gradients(bags, gradient, sums, touched)
        found.append((sums.numpy().tobytes(), touched.tolist()))

    assert found[0] == found[1]


SPECIAL = [0.0, -0.0, 2.0**-149, 2.0**-25, 2.0**-24, -3.5 * 2**-24, 2.0**-14 - 2.0**-25, 2.0**-14, 65_504.0, -65_520.0]
OTHERS = [65_536.0, 1e30, np.inf, -np.inf, np.nan]


@each_kind
@both_types
def test_numbers_of_every_class_are_updated_as_on_the_host(kind: RowOptimizerKind, dtype: RowDtype) -> None:
    exponents, generator = np.linspace(-30, 17, 113), np.random.default_rng(0)
    spread = (2.0**exponents * generator.choice([-1, 1], len(exponents))).tolist()
    values = torch.tensor([*SPECIAL, *OTHERS, *spread])
    of_kind = tables(kind, dtype, [(2, len(values))], [0])
    host, device = HostKernel(of_kind), DeviceKernel(of_kind)

    for kernel in (host, device):
        kernel.weights[0][1] = values.to(kernel.weights[0].dtype)
        # A rate of -1 makes gradients the rows of SGD.
        kernel.update_rows(torch.tensor([0, 1]), torch.stack([values, values / 3]), RowUpdate(-1.0, 9))

    for ours, theirs in zip((*device.weights, *device.states), (*host.weights, *host.states), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
        np.testing.assert_array_equal(torch.signbit(ours)[~ours.isnan()], torch.signbit(theirs)[~theirs.isnan()])


SHORT_RUN = 16


def long_rows(*, weighted: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, gradients and weights: rows with fewer lookups than a run, as many, one more, and several runs."""
    generator, run = np.random.default_rng(1), SHORT_RUN
    counts = [3, 2 * run + 5, 1, run, run + 1, 2, 3 * run, run - 1, 7]
    ids = torch.from_numpy(generator.permutation(np.repeat(np.arange(len(counts)), counts)))
    gradient = torch.from_numpy(generator.normal(size=(len(ids), 4)).astype(np.float32))
    weights = torch.from_numpy(generator.normal(size=len(ids)).astype(np.float32)) if weighted else None
    return ids, gradient, weights


def update_long_rows(kernel: Kernel, ids: Tensor, gradient: Tensor, weights: Tensor | None) -> None:
    rows, order = torch.sort(ids, stable=True)
    lookups = SortedLookups(rows.to(torch.int32), order, torch.arange(len(ids)), weights, None)
    weight, state, update = kernel.weights[0], kernel.states[0], RowUpdate(0.1, 0)
    update_rows(weight, state, gradient, lookups, None, ADAGRAD, update, SHORT_RUN)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("order", [None, "backward", "evens first", "halves swapped"])
def test_gradients_of_long_rows_are_summed_in_runs_in_any_order_of_programs(weighted: bool, order: str | None) -> None:
    of_kind = tables("rowwise-adagrad", "fp32", [(9, 4)], [0])
    expected, device = filled(HostKernel(of_kind), HostKernel(of_kind))
    ids, gradient, weights = long_rows(weighted=weighted)

    with nullcontext() if order is None else program_order(ORDERS[order]):
        update_long_rows(device, ids, gradient, weights)

    each = gradient.numpy() if weights is None else gradient.numpy() * weights.numpy()[:, None]
    sums = torch.from_numpy(row_rules.summed_in_runs(ids.numpy(), each, SHORT_RUN))
    expected.update_rows(torch.arange(9), sums, RowUpdate(0.1, 0))
    assert content(device) == content(expected)


@pytest.mark.parametrize("kind", ["rowwise-adagrad", "adam"])
def test_bits_do_not_depend_on_the_order_of_programs(kind: RowOptimizerKind) -> None:
    bags = random_bags(np.random.default_rng(3), 3, 3, weighted=True)
    gradient, results = gradient_of(np.random.default_rng(4), 3), []

    for order in [None, *ORDERS.values()]:
        (kernel,) = filled(DeviceKernel(tables(kind, "fp16")))
        with nullcontext() if order is None else program_order(order):
            kernel.update(bags, gradient, bags.ids, RowUpdate(0.1, 1, PULLED))
        results.append(content(kernel))

    assert results[1:] == results[:1] * len(ORDERS)


@both_types
@takes_unpromised_memory
def test_rows_and_gradients_past_2_to_the_31_elements_are_reached(dtype: RowDtype) -> None:
    dim, rows = 1_024, 2**21 + 3
    kind: RowOptimizerKind = "rowwise-adagrad"
    weight = torch.from_numpy(untouched_zeros(rows * dim, np.float16 if dtype == "fp16" else np.float32)).view(-1, dim)
    state = torch.zeros(rows, state_values(kind, dim))
    gradient = torch.from_numpy(untouched_zeros(rows * dim, np.float32)).view(-1, dim)
    last = rows - 1
    gradient[last] = 1.0
    lookups = SortedLookups(torch.tensor([last]), None, torch.tensor([last]), None, torch.tensor([last]))
    rounding = Rounding(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    with memory_in_place():
        update_rows(
            weight,
            state,
            gradient,
            lookups,
            rounding if dtype == "fp16" else None,
            RowOptimizerSpec(kind=kind),
            RowUpdate(0.5, 0),
        )

    assert weight[last].tolist() == [-0.5] * dim
    assert state[last].tolist() == [1.0]
    # Where offsets of 32 bits would have wrapped to.
    assert not weight[[last % 2**21, last - 1]].any()


@both_types
@pytest.mark.parametrize("weighted", [False, True])
def test_updates_take_what_plans_count_and_let_the_host_not_wait(dtype: RowDtype, weighted: bool) -> None:
    kernel = DeviceKernel(tables("sgd", dtype, [(1, 4)] * 2, [0, 1]))
    gradient, count = torch.ones(60, 8), 120
    weights = torch.ones(count) if weighted else None
    bags = bags_of(torch.zeros(count, dtype=torch.int64), torch.ones((2, 60), dtype=torch.int32), weights)

    with HostWaits() as waits, LiveMemory([*kernel.weights, *kernel.states, gradient]) as memory:
        kernel.update(bags, gradient, bags.ids, RowUpdate(0.1, 1))

    planned = count * UPDATED_LOOKUP_BYTES
    assert 0.4 * planned < memory.peak <= 0.75 * planned
    assert waits.count == 0
