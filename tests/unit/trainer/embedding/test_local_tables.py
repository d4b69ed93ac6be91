from __future__ import annotations

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.tiers import RowDtype
from dlrm_api.training import RowOptimizerSpec
from dlrm_testing.trainer.bags import Replicas, bags_of, batch_of, tables_of
from dlrm_testing.trainer.live_memory import takes_unpromised_memory
from dlrm_trainer.embedding.table_batch import HostKernel, TableBatch
from dlrm_trainer.embedding.tiers.slots import untouched_zeros

EPS = 1e-8
ADAGRAD = RowOptimizerSpec(eps=EPS)
SHAPES = [(40, 4), (7, 16), (1, 8)]


def random_bags(generator: np.random.Generator, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = generator.integers(0, 5, (len(SHAPES), samples))
    ids = np.concatenate([generator.integers(0, rows, lengths[i].sum()) for i, (rows, _) in enumerate(SHAPES)])
    return torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32))


def fill(batch: TableBatch | Replicas, seed: int) -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(seed)
    for weight in batch.weights:
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return [weight.double().numpy().copy() for weight in batch.weights]


def dense_step(
    weights: list[np.ndarray], states: list[np.ndarray], bags: tuple[torch.Tensor, torch.Tensor], rate: float
) -> np.ndarray:
    """Pool, then one row-wise Adagrad step for the loss ``sum(pooled ** 2) / 2``, all in float64 and row by row."""
    ids, lengths = bags[0].numpy(), bags[1].numpy()
    pooled, start = [], 0
    for number, weight in enumerate(weights):
        gradient, output = np.zeros_like(weight), np.zeros((lengths.shape[1], weight.shape[1]))
        chosen = []
        for sample, length in enumerate(lengths[number]):
            rows = ids[start : start + length]
            output[sample] = weight[rows].sum(axis=0)
            chosen.append(rows)
            start += length
        for sample, rows in enumerate(chosen):
            np.add.at(gradient, rows, output[sample])
        for row in {int(row) for rows in chosen for row in rows}:
            states[number][row] += np.mean(gradient[row] ** 2)
            weight[row] -= rate * gradient[row] / (np.sqrt(states[number][row]) + EPS)
        pooled.append(output)
    return np.concatenate(pooled, axis=1)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), samples=st.integers(0, 30))
def test_the_kernel_agrees_with_a_dense_float64_optimizer(seed: int, samples: int) -> None:
    generator = np.random.default_rng(seed)
    batch = batch_of(SHAPES, ADAGRAD)
    weights, states = fill(batch, seed), [np.zeros(rows) for rows, _ in SHAPES]

    for step in range(4):
        bags = random_bags(generator, samples)
        pooled = batch.lookup(bags_of(*bags), updates=True)
        expected = dense_step(weights, states, bags, rate=0.1 / (step + 1))
        np.testing.assert_allclose(pooled.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
        batch.update(pooled, pooled.detach(), 0.1 / (step + 1))

    for weight, state, expected_weight, expected_state in zip(
        batch.weights, batch.states, weights, states, strict=True
    ):
        np.testing.assert_allclose(weight.numpy(), expected_weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state[:, 0].numpy(), expected_state, rtol=1e-4, atol=1e-6)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), samples=st.integers(0, 30))
def test_data_parallel_tables_follow_the_same_rule(seed: int, samples: int) -> None:
    generator = np.random.default_rng(seed)
    tables = Replicas(SHAPES, ADAGRAD)
    weights, states = fill(tables, seed), [np.zeros(rows) for rows, _ in SHAPES]

    for _ in range(4):
        ids, lengths = random_bags(generator, samples)
        bags = bags_of(ids, lengths)
        pooled = tables.lookup(bags)
        dense_step(weights, states, (ids, lengths), rate=0.1)
        tables.update(bags, pooled, 0.1)

    for weight, state, expected_weight, expected_state in zip(
        tables.weights, tables.states, weights, states, strict=True
    ):
        np.testing.assert_allclose(weight.numpy(), expected_weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state[:, 0].numpy(), expected_state, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    threads_before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        generator = np.random.default_rng(5)
        sharded, replicated = batch_of(SHAPES, ADAGRAD), Replicas(SHAPES, ADAGRAD)
        fill(sharded, 1)
        fill(replicated, 1)
        for _ in range(100):
            bags = bags_of(*random_bags(generator, 200))
            pooled = sharded.lookup(bags, updates=True)
            sharded.update(pooled, pooled.detach(), 0.05)
            replicated.update(bags, replicated.lookup(bags), 0.05)
        tensors = (*sharded.weights, *sharded.states, *replicated.weights, *replicated.states)
        results.append([tensor.clone() for tensor in tensors])
    torch.set_num_threads(threads_before)

    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


FEATURES = [0, 0, 1, 2, 2, 2]
"""Of ``SHAPES``: the tables of six features."""


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), samples=st.integers(0, 20), weighted=st.booleans())
def test_features_of_a_table_pool_apart_and_update_each_row_once(seed: int, samples: int, weighted: bool) -> None:
    generator = np.random.default_rng(seed)
    batch = batch_of(SHAPES, ADAGRAD, features=FEATURES)
    rows = fill(batch, seed)
    lengths = generator.integers(0, 5, (len(FEATURES), samples))
    ids = np.concatenate(
        [generator.integers(0, SHAPES[t][0], n) for t, n in zip(FEATURES, lengths.sum(1), strict=True)]
    )
    weights = generator.normal(size=len(ids)).astype(np.float32) if weighted else np.ones(len(ids), np.float32)
    given_weights = torch.from_numpy(weights) if weighted else None

    bags = bags_of(torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32)), given_weights)
    pooled = batch.lookup(bags, updates=True)
    gradient = generator.normal(size=pooled.shape).astype(np.float32)
    batch.update(pooled, torch.from_numpy(gradient), 0.1)

    place = column = 0
    sums = [np.zeros_like(each) for each in rows]
    expected = np.zeros(pooled.shape)
    for feature, table in enumerate(FEATURES):
        columns = slice(column, column + SHAPES[table][1])
        for sample, length in enumerate(lengths[feature]):
            for id_, weight in zip(ids[place : place + length], weights[place : place + length], strict=True):
                expected[sample, columns] += weight * rows[table][id_]
                sums[table][id_] += weight * gradient[sample, columns].astype(np.float64)
            place += length
        column = columns.stop
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=1e-5, atol=1e-5)
    for weight_, row, total in zip(batch.weights, rows, sums, strict=True):
        squares = (total**2).mean(axis=1, keepdims=True)
        np.testing.assert_allclose(weight_.numpy(), row - 0.1 * total / (np.sqrt(squares) + EPS), rtol=1e-5, atol=1e-5)


def column_blocks(dtype: RowDtype, first_columns: list[int] | None) -> list[torch.Tensor]:
    """Two steps on a table of 16 columns, whole or as four blocks of 4; fp16 rows are rounded."""
    generator = torch.Generator().manual_seed(4)
    start, ids = torch.randn(30, 16, generator=generator), torch.randint(0, 30, (40,), generator=generator)
    count = 1 if first_columns is None else len(first_columns)
    batch = batch_of(
        [(30, 16 // count)] * count,
        RowOptimizerSpec(kind="sgd"),
        dtype=dtype,
        names=["t"] * count,
        first_columns=first_columns,
    )
    for weight, block in zip(batch.weights, start.chunk(count, dim=1), strict=True):
        weight.copy_(block)
    for step in range(2):
        bags = bags_of(ids.repeat(count), torch.ones(count, 40, dtype=torch.int32))
        pooled = batch.lookup(bags, updates=True)
        batch.update(pooled, torch.randn(40, 16, generator=generator), 0.1, step=step)
    return [torch.cat(list(batch.weights), dim=1)]


def test_fp16_rows_are_rounded_to_the_same_bits_whole_and_by_column_blocks() -> None:
    whole, blocks = column_blocks("fp16", None), column_blocks("fp16", [0, 4, 8, 12])

    assert torch.equal(whole[0], blocks[0])
    assert not torch.equal(whole[0], column_blocks("fp16", [0, 0, 0, 0])[0])


def test_a_row_of_all_samples_has_the_same_bits_on_one_and_two_threads() -> None:
    threads_before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(1)
        batch = batch_of([(5, 16)], ADAGRAD)
        ids = torch.randint(0, 2, (20_000,), generator=generator) * 3
        lengths = torch.full((1, 2_000), 10, dtype=torch.int32)
        for _ in range(3):
            pooled = batch.lookup(bags_of(ids, lengths), updates=True)
            batch.update(pooled, torch.randn(2_000, 16, generator=generator), 0.1)
        results.append([batch.weights[0].clone(), batch.states[0].clone()])
    torch.set_num_threads(threads_before)

    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
    assert results[0][0][[1, 2, 4]].count_nonzero() == 0


@takes_unpromised_memory
def test_untouched_rows_may_take_more_memory_than_the_machine_has() -> None:
    rows = torch.from_numpy(untouched_zeros(2 * psutil.virtual_memory().total // 4, np.float32))

    rows[:1_000] += 1

    assert rows[[0, 999, 1_000, -1]].tolist() == [1, 1, 0, 0]
    assert rows.data_ptr() % 64 == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), samples=st.integers(0, 2_000), threads=st.integers(1, 3))
def test_gradients_add_up_in_the_order_of_lookups_on_any_threads(seed: int, samples: int, threads: int) -> None:
    generator, features = np.random.default_rng(seed), [0, 0, 1, 2, 2]
    tables = tables_of(shapes := [(40, 8), (1, 8), (7, 8)], ADAGRAD, features=features)
    lengths = generator.integers(0, 5, (len(features), samples))
    counts = zip(features, lengths.sum(axis=1), strict=True)
    ids = torch.from_numpy(np.concatenate([generator.integers(0, shapes[table][0], n) for table, n in counts]))
    weights = torch.from_numpy(generator.normal(size=len(ids)).astype(np.float32))
    bags = bags_of(ids, torch.from_numpy(lengths.astype(np.int32)), weights)
    gradient = torch.from_numpy(generator.normal(size=(samples, 40)).astype(np.float32))
    # torch's order on one thread is that of the ids.
    of_bags = torch.cat([gradient[:, first : first + 8] for first in range(0, 40, 8)])
    each = torch.repeat_interleave(of_bags, bags.lengths.flatten(), dim=0) * weights[:, None]
    rows = ids + torch.repeat_interleave(torch.tensor([0, 0, 40, 41, 41]), bags.sizes)
    expected = torch.ops.aten.embedding_dense_backward(each, rows, 48, -1, False)

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    sums, touched = torch.zeros(48, 8), torch.zeros(48)
    HostKernel(tables).add_gradients(bags, gradient, sums, touched)
    torch.set_num_threads(threads_before)

    assert torch.equal(sums, expected)
    assert touched.nonzero().squeeze(1).tolist() == sorted(set(rows.tolist()))
