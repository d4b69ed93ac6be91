from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dlrm_api.base import ApiModel
from dlrm_api.row_optimizers import state_values
from dlrm_api.tiers import RowDtype
from dlrm_api.training import MIN_EPS, DenseOptimizerSpec, RowOptimizerSpec, RowRegularizerSpec
from dlrm_kernels.row_updates import MAX_UPDATES
from dlrm_testing.trainer import row_rules
from dlrm_testing.trainer.bags import Replicas, bags_of, batch_of, tables_of
from dlrm_testing.trainer.gpus import needs_gpu
from dlrm_trainer.embedding.table_batch import HostKernel, RowUpdate, TableBatch
from dlrm_trainer.model.dense import DenseOptimizer

SHAPES = [(40, 4), (7, 4), (30, 16), (1, 8)]
NAMES = ("t0", "t1", "t2", "t3")
OPTIMIZERS = {
    "rowwise-adagrad": RowOptimizerSpec(kind="rowwise-adagrad", eps=1e-6),
    "sgd": RowOptimizerSpec(kind="sgd"),
    "adam": RowOptimizerSpec(kind="adam", eps=1e-6, beta1=0.8, beta2=0.95),
}
KINDS = list(OPTIMIZERS)
RATES = [0.1, 0.05, 0.2, 0.1]
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])]
both_types = pytest.mark.parametrize("dtype", ["fp32", "fp16"])
each_kind = pytest.mark.parametrize("kind", KINDS)
each_device = pytest.mark.parametrize("device", DEVICES)


def random_bags(generator: np.random.Generator, samples: int, shapes: list[tuple[int, int]] = SHAPES) -> row_rules.Bags:
    """Bags of 0 to 4 ids, with ids that occur twice in a bag and in several bags."""
    return [
        [generator.integers(0, rows, generator.integers(0, 5)).tolist() for _ in range(samples)] for rows, _ in shapes
    ]


def flat(bags: row_rules.Bags, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([row for table in bags for bag in table for row in bag], dtype=torch.int64)
    lengths = torch.tensor([[len(bag) for bag in table] for table in bags], dtype=torch.int32).view(len(bags), -1)
    return ids.to(device), lengths.to(device)


def eighths(generator: np.random.Generator, *shape: int) -> np.ndarray:
    """Gradients with sums and sums of squares that are exact in float32 in any order."""
    return (generator.integers(-8, 9, shape) / 8).astype(np.float32)


class Owned:
    """Tables of one rank, behind the calls that data-parallel ones have too."""

    regularizer: RowRegularizerSpec | None = None

    def __init__(
        self, kind: str, dtype: RowDtype, device: str = "cpu", shapes: Any = SHAPES, names: Any = NAMES
    ) -> None:
        options = {"dtype": dtype, "device": torch.device(device), "seed": 5, "names": names}
        self.batch = batch_of(shapes, OPTIMIZERS[kind], **options)
        self.device = device

    def step(self, bags: row_rules.Bags, gradients: list[np.ndarray], rate: float, number: int) -> torch.Tensor:
        pooled = self.batch.lookup(bags_of(*flat(bags, self.device)), updates=True)
        gradient = torch.from_numpy(np.concatenate(gradients, axis=1)).to(self.device)
        self.batch.update(pooled, gradient, rate, step=number, regularizer=self.regularizer)
        return pooled.detach()

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.cpu().clone() for tensor in (*self.batch.weights, *self.batch.states)]


class Replicated(Owned):
    """Data-parallel tables of a gang of one rank."""

    def __init__(
        self, kind: str, dtype: RowDtype, device: str = "cpu", shapes: Any = SHAPES, names: Any = NAMES
    ) -> None:
        options = {"dtype": dtype, "device": torch.device(device), "seed": 5, "names": names}
        self.batch, self.device = Replicas(shapes, OPTIMIZERS[kind], **options), device

    def step(self, bags: row_rules.Bags, gradients: list[np.ndarray], rate: float, number: int) -> torch.Tensor:
        given = bags_of(*flat(bags, self.device))
        pooled = self.batch.lookup(given)
        gradient = torch.from_numpy(np.concatenate(gradients, axis=1)).to(self.device)
        self.batch.update(given, gradient, rate, number, self.regularizer)
        return pooled


each_holder = pytest.mark.parametrize("holder", [Owned, Replicated])


def fill(batch: TableBatch | Replicas, seed: int) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    for weight in batch.weights:
        weight.copy_(torch.randn(weight.shape, generator=generator).to(weight.dtype))
    return [weight.cpu().numpy() for weight in batch.weights]


@each_device
@each_holder
@each_kind
@pytest.mark.parametrize("seed", range(3))
def test_fp32_rows_agree_with_a_float64_optimizer(holder: type[Owned], kind: str, device: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    tables = holder(kind, "fp32", device)
    weights = [weight.astype(np.float64) for weight in fill(tables.batch, seed)]
    states = [np.zeros((rows, state_values(kind, dim))) for rows, dim in SHAPES]

    for number, rate in enumerate(RATES):
        bags = random_bags(generator, 12)
        gradients = [generator.normal(size=(12, dim)).astype(np.float32) for _, dim in SHAPES]
        pooled = tables.step(bags, gradients, rate, number)
        expected = [[weight[bag].sum(axis=0) for bag in table] for weight, table in zip(weights, bags, strict=True)]
        np.testing.assert_allclose(pooled.cpu().numpy(), np.concatenate(expected, axis=1), rtol=1e-5, atol=1e-5)
        for weight, state, table, gradient in zip(weights, states, bags, gradients, strict=True):
            for row, total in row_rules.summed(table, gradient.astype(np.float64)).items():
                weight[row], state[row] = row_rules.rule(weight[row], state[row], total, OPTIMIZERS[kind], rate)

    for found, expected in zip(tables.tensors(), [*weights, *states], strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


FUSED = {(Owned, "rowwise-adagrad", "fp32"), (Owned, "sgd", "fp32")}
"""On a GPU these are fbgemm's: they may round a multiplication and an addition as one, which numpy does not."""


@each_device
@each_holder
@each_kind
@both_types
def test_rows_whose_sums_are_exact_have_the_bits_of_rules_written_apart(
    holder: type[Owned], kind: str, dtype: RowDtype, device: str
) -> None:
    if device == "cuda" and (holder, kind, dtype) in FUSED:
        pytest.skip("fbgemm may fuse a multiplication and an addition")
    generator = np.random.default_rng(2)
    tables = holder(kind, dtype, device)
    weights = [weight.astype(np.float32) for weight in fill(tables.batch, 2)]
    states = [np.zeros((rows, state_values(kind, dim)), np.float32) for rows, dim in SHAPES]

    for number, rate in enumerate(RATES):
        bags, gradients = random_bags(generator, 9), [eighths(generator, 9, dim) for _, dim in SHAPES]
        tables.step(bags, gradients, rate, number)
        for name, weight, state, table, gradient in zip(NAMES, weights, states, bags, gradients, strict=True):
            for row, total in row_rules.summed(table, gradient).items():
                new, state[row] = row_rules.rule(weight[row], state[row], total, OPTIMIZERS[kind], rate)
                if dtype == "fp16":
                    bits = [row_rules.bits_of(5, name, number, row, column) for column in range(len(new))]
                    new = np.array(
                        [row_rules.rounded(float(value), each) for value, each in zip(new, bits, strict=True)]
                    )
                weight[row] = new

    for found, expected in zip(tables.tensors(), [*weights, *states], strict=True):
        np.testing.assert_array_equal(found.float().numpy(), expected)


def train(tables: Owned, seed: int, steps: int, samples: int, first: int = 0) -> list[torch.Tensor]:
    for number in range(first, first + steps):
        generator = np.random.default_rng((seed, number))
        shapes = [tuple(weight.shape) for weight in tables.batch.weights]
        bags = random_bags(generator, samples, shapes)
        gradients = [generator.normal(size=(samples, dim)).astype(np.float32) for _, dim in shapes]
        tables.step(bags, gradients, 0.05, number)
    return tables.tensors()


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(left, right, strict=True)
    )


@pytest.mark.slow
@each_holder
@each_kind
@both_types
def test_bits_do_not_depend_on_the_number_of_threads(holder: type[Owned], kind: str, dtype: RowDtype) -> None:
    shapes = [(3_000, 16), (2_000, 16), (50, 8)]
    threads_before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        tables = holder(kind, dtype, shapes=shapes, names=NAMES[:3])
        fill(tables.batch, 1)
        results.append(train(tables, seed=1, steps=3, samples=1_500))
    torch.set_num_threads(threads_before)

    assert same(results[0], results[1])
    assert same(results[0], results[2])


@each_device
@each_kind
@both_types
@pytest.mark.parametrize("seed", range(3))
def test_bits_do_not_depend_on_which_slot_a_row_is_in(kind: str, dtype: RowDtype, device: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    plain, slotted = Owned(kind, dtype, device), Owned(kind, dtype, device)
    fill(plain.batch, 3)
    places = [torch.from_numpy(generator.permutation(rows)).to(device) for rows, _ in SHAPES]
    for weight, slots, place in zip(plain.batch.weights, slotted.batch.weights, places, strict=True):
        slots[place] = weight

    for number, rate in enumerate(RATES):
        bags = random_bags(generator, 20)
        gradients = [generator.normal(size=(20, dim)).astype(np.float32) for _, dim in SHAPES]
        plain.step(bags, gradients, rate, number)
        rows, lengths = flat(bags, device)
        parts = torch.split(rows, lengths.sum(dim=1).tolist())
        slots = torch.cat([place[part] for place, part in zip(places, parts, strict=True)])
        pooled = slotted.batch.lookup(bags_of(slots, lengths), updates=True)
        gradient = torch.from_numpy(np.concatenate(gradients, axis=1)).to(device)
        slotted.batch.update(pooled, gradient, rate, step=number, rows=rows)

    again = [tensor[place.cpu()] for tensor, place in zip(slotted.tensors(), [*places, *places], strict=True)]
    assert same(plain.tensors(), again)


@each_kind
@both_types
def test_a_table_beside_others_has_the_bits_of_the_table_alone(kind: str, dtype: RowDtype) -> None:
    together, generator = Owned(kind, dtype), np.random.default_rng(8)
    weights = [weight.copy() for weight in fill(together.batch, 8)]
    bags, gradients = (
        random_bags(generator, 30),
        [generator.normal(size=(30, dim)).astype(np.float32) for _, dim in SHAPES],
    )

    together.step(bags, gradients, 0.1, 4)

    for number, shape in enumerate(SHAPES):
        alone = Owned(kind, dtype, shapes=[shape], names=[NAMES[number]])
        alone.batch.weights[0].copy_(torch.from_numpy(weights[number]))
        alone.step([bags[number]], [gradients[number]], 0.1, 4)
        assert same(alone.tensors(), [together.batch.weights[number], together.batch.states[number]])


@each_holder
@each_kind
@both_types
def test_training_from_stored_rows_and_state_ends_with_the_same_bits(
    holder: type[Owned], kind: str, dtype: RowDtype
) -> None:
    whole, second = holder(kind, dtype), holder(kind, dtype)
    fill(whole.batch, 4)

    stored = train(whole, seed=2, steps=4, samples=25)
    for tensor, kept in zip((*second.batch.weights, *second.batch.states), stored, strict=True):
        tensor.copy_(kept.float())
    through, after = (train(tables, seed=2, steps=4, samples=25, first=4) for tables in (whole, second))

    assert same(through, after)
    assert not same(through, stored)


@each_kind
@both_types
def test_an_evaluation_between_a_lookup_and_its_update_changes_nothing(kind: str, dtype: RowDtype) -> None:
    plain, evaluated, generator = Owned(kind, dtype), Owned(kind, dtype), np.random.default_rng(0)
    fill(plain.batch, 6)
    fill(evaluated.batch, 6)
    bags, gradients = random_bags(generator, 10), [eighths(generator, 10, dim) for _, dim in SHAPES]

    plain.step(bags, gradients, 0.1, 0)
    pooled = evaluated.batch.lookup(bags_of(*flat(bags, "cpu")), updates=True)
    other = evaluated.batch.lookup(bags_of(*flat(random_bags(generator, 3), "cpu")))
    evaluated.batch.update(pooled, torch.from_numpy(np.concatenate(gradients, axis=1)), 0.1)

    assert same(plain.tensors(), evaluated.tensors())
    assert not other.requires_grad


@each_kind
@both_types
def test_a_batch_without_samples_or_without_ids_changes_nothing(kind: str, dtype: RowDtype) -> None:
    tables = Owned(kind, dtype)
    fill(tables.batch, 6)
    before = tables.tensors()

    for samples in (0, 3):
        tables.step(
            [[[]] * samples for _ in SHAPES], [np.ones((samples, dim), np.float32) for _, dim in SHAPES], 0.1, 0
        )

    assert same(tables.tensors(), before)


@each_kind
@both_types
@pytest.mark.parametrize("size", [0.0, 1e-23])
def test_gradients_of_zero_and_nearly_so_move_no_row_at_the_least_eps(kind: str, dtype: RowDtype, size: float) -> None:
    spec = RowOptimizerSpec.model_validate({"kind": kind, "eps": MIN_EPS})
    batch = batch_of([(3, 4)], spec, dtype=dtype, names=["t"])
    batch.weights[0].fill_(1.0)
    gradient = torch.full((2, 4), size)

    pooled = batch.lookup(bags_of(torch.tensor([0, 2]), torch.ones(1, 2, dtype=torch.int32)), updates=True)
    batch.update(pooled, gradient, 1.0)

    np.testing.assert_allclose(batch.weights[0].float().numpy(), 1.0, atol=0.01)


@pytest.mark.parametrize("spec", [RowOptimizerSpec, DenseOptimizerSpec])
def test_an_eps_of_zero_is_refused(spec: type[ApiModel]) -> None:
    with pytest.raises(ValidationError, match="eps"):
        spec.model_validate({"eps": 0})


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("size", [0.0, 1e-23])
def test_gradients_of_about_zero_move_no_dense_parameter_at_the_least_eps(kind: str, size: float) -> None:
    values = torch.ones(5)

    optimizer = DenseOptimizer(DenseOptimizerSpec.model_validate({"kind": kind, "eps": MIN_EPS}), values)
    optimizer.step(values, torch.full((5,), size), 1.0)

    np.testing.assert_allclose(values.numpy(), 1.0, atol=0.01)


@settings(max_examples=50)
@given(st.floats(0, 0.999999), st.integers(0, MAX_UPDATES + 1))
def test_adams_correction_is_that_of_exact_powers_however_many_updates(decay: float, done: int) -> None:
    spec = RowOptimizerSpec(kind="adam", beta1=min(decay, 0.9999), beta2=decay, eps=MIN_EPS)
    count = min(done, MAX_UPDATES)
    kernel = HostKernel(tables_of([(1, 4)], spec))
    kernel.states[0][0, -1] = count

    kernel.update_rows(torch.tensor([0]), torch.ones(1, 4), RowUpdate(1.0, 0))

    after = kernel.states[0]
    assert float(after[0, -1]) == min(count + 1, MAX_UPDATES)
    assert bool(torch.isfinite(after).all())


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.999, 0.999999])
@pytest.mark.parametrize("count", [1, 2, 3, 100, 12_345])
def test_a_gradient_of_one_after_many_updates_moves_by_the_exact_ratio(decay: float, count: int) -> None:
    spec = RowOptimizerSpec(kind="adam", beta1=min(decay, 0.9999), beta2=decay, eps=MIN_EPS)
    kernel = HostKernel(tables_of([(1, 4)], spec))
    kernel.states[0][0, -1] = count - 1

    kernel.update_rows(torch.tensor([0]), torch.ones(1, 4), RowUpdate(1.0, 0))

    small, large = (1 - Fraction(beta) for beta in (spec.beta1, spec.beta2))
    first = small / (1 - Fraction(spec.beta1) ** count)
    second = large / (1 - Fraction(spec.beta2) ** count)
    np.testing.assert_allclose(kernel.weights[0].numpy(), -float(first) / float(second) ** 0.5, rtol=5e-7)


def test_small_updates_that_fp16_would_lose_are_kept_in_the_mean() -> None:
    shapes, steps = [(1, 1_024)], 200
    tables = Owned("sgd", "fp16", shapes=shapes, names=["t"])
    tables.batch.weights[0].fill_(1.0)  # its neighbours are 2**-11 below and 2**-10 above

    for number in range(steps):
        tables.step([[[0]]], [np.full((1, 1_024), 0.125, np.float32)], 2.0**-11, number)

    expected = 1.0 - steps * 2.0**-14
    mean = float(tables.batch.weights[0].double().mean())
    assert abs(mean - expected) < 4.5 * (2.0**-11 / 2) * (steps / 1_024) ** 0.5
    assert mean != 1.0


def test_a_diverged_fp16_row_turns_infinite_and_the_others_do_not() -> None:
    tables = Owned("sgd", "fp16", shapes=[(3, 4)], names=["t"])

    tables.step([[[1], [2]]], [np.array([[-1e6] * 4, [1.0] * 4], np.float32)], 1.0, 0)

    assert tables.batch.weights[0][1].tolist() == [float("inf")] * 4
    assert bool(torch.isfinite(tables.batch.weights[0][[0, 2]]).all())


@each_kind
@both_types
@pytest.mark.parametrize("regularizer", [None, RowRegularizerSpec(bits=2, strength=0.3, last_steps=1)])
def test_data_parallel_tables_have_the_bits_of_tables_of_one_rank(
    kind: str, dtype: RowDtype, regularizer: RowRegularizerSpec | None
) -> None:
    owned, replicated = Owned(kind, dtype), Replicated(kind, dtype)
    owned.regularizer = replicated.regularizer = regularizer
    fill(owned.batch, 3)
    fill(replicated.batch, 3)

    assert same(train(owned, seed=3, steps=3, samples=50), train(replicated, seed=3, steps=3, samples=50))


def near_codes(row: np.ndarray, bits: int) -> np.ndarray:
    """Return the distances of a row's elements from the evenly spaced values of its range, over their spacing."""
    exact = row.astype(np.float64)
    places = (exact - exact.min()) / (exact.max() - exact.min()) * (2**bits - 1)
    return places - places.round()


@each_kind
@both_types
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_regularized_update_adds_a_step_along_a_sine(kind: str, dtype: RowDtype, bits: int) -> None:
    plain, pulled, generator = Owned(kind, "fp32"), Owned(kind, dtype), np.random.default_rng(7)
    pulled.regularizer = RowRegularizerSpec.model_validate({"bits": bits, "strength": 0.4, "lastSteps": 1})
    for tables in (plain, pulled):
        fill(tables.batch, 7)
        # As fp16 rows start.
        for weight in tables.batch.weights:
            weight.copy_(weight.half())
    bags, gradients = random_bags(generator, 9), [eighths(generator, 9, dim) for _, dim in SHAPES]

    for tables in (plain, pulled):
        tables.step(bags, gradients, 0.1, 0)

    assert same(plain.tensors()[len(SHAPES) :], pulled.tensors()[len(SHAPES) :])
    for number, table in enumerate(bags):
        updated_rows = {row for bag in table for row in bag}
        for row, weight in enumerate(plain.batch.weights[number].double().numpy()):
            if row in updated_rows:
                distance = (weight.max() - weight.min()) / (2**bits - 1)
                places = 2 * np.pi * (weight - weight.min()) / distance
                weight -= 0.4 * distance / (2 * np.pi) * np.sin(places)
            found = pulled.batch.weights[number][row].double().numpy()
            np.testing.assert_allclose(found, weight, atol=1e-6 if dtype == "fp32" else 4e-3)


rows_to_settle = st.lists(st.floats(-1, 1, width=32), min_size=4, max_size=8).map(lambda row: row[: len(row) // 4 * 4])


@settings(max_examples=100)
@given(rows_to_settle, st.sampled_from([2, 3, 4, 8]), st.floats(1e-3, 1), st.sampled_from([1.0, 1e-18, 1e18]))
def test_regularized_rows_come_nearer_to_their_codes_and_keep_their_range(
    row: list[float], bits: int, strength: float, scale: float
) -> None:
    tables = Owned("sgd", "fp32", shapes=[(1, len(row))], names=["t"])
    tables.regularizer = RowRegularizerSpec.model_validate({"bits": bits, "strength": strength, "lastSteps": 1})
    before = np.array(row, np.float32) * np.float32(scale)
    tables.batch.weights[0].copy_(torch.from_numpy(before))

    for number in range(5):
        tables.step([[[0]]], [np.zeros((1, len(row)), np.float32)], 1.0, number)

    after = tables.batch.weights[0][0].numpy()
    if before.max() - before.min() < scale * 1e-3:
        np.testing.assert_allclose(after, before, atol=scale * 1e-3)
        return
    np.testing.assert_allclose([after.min(), after.max()], [before.min(), before.max()], atol=scale * 1e-6)
    assert (abs(near_codes(after, bits)) <= abs(near_codes(before, bits)) + 2**bits * 1e-3).all()


@pytest.mark.parametrize("value", [0.0, 2.5, np.inf, np.nan])
def test_a_row_without_a_range_is_not_regularized(value: float) -> None:
    tables = Owned("sgd", "fp32", shapes=[(2, 4)], names=["t"])
    tables.regularizer = RowRegularizerSpec(bits=2, strength=1, last_steps=1)
    tables.batch.weights[0][0] = value

    tables.step([[[0]]], [np.zeros((1, 4), np.float32)], 1.0, 0)

    np.testing.assert_array_equal(tables.batch.weights[0][0].numpy(), value)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:  # noqa: PTH123  a file of the kernel's
        return int(statm.read().split()[1]) * 4_096


@each_kind
@both_types
def test_eight_gibibytes_of_rows_take_no_memory_until_they_are_written(kind: str, dtype: RowDtype) -> None:
    before = resident_bytes()

    batch = batch_of([(2**24, 64), (2**24, 64)], OPTIMIZERS[kind], dtype=dtype, names=["a", "b"])
    made = resident_bytes()
    weight, state = batch.storage()
    weight[2**24 + 5] = 3.0
    state[2**24 + 5] = 2.0

    assert made - before < 64 << 20
    assert resident_bytes() - before < 80 << 20
    assert weight.shape == (2**25, 64)
    assert state.shape == (2**25, state_values(kind, 64))
    assert batch.weights[1][5].tolist() == [3.0] * 64
    assert batch.states[1][5].tolist() == [2.0] * state_values(kind, 64)
    assert weight.data_ptr() % 64 == 0


def test_tables_of_several_dims_have_no_common_storage() -> None:
    batch = batch_of(SHAPES, OPTIMIZERS["sgd"])

    with pytest.raises(AssertionError, match=r"dims \[4, 8, 16\] have no common row"):
        batch.storage()


def test_fp16_tables_without_names_are_refused() -> None:
    with pytest.raises(AssertionError, match="the name of every table"):
        batch_of(SHAPES, OPTIMIZERS["sgd"], dtype="fp16", names=["t0"])
