from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.training import RowOptimizerSpec
from dlrm_trainer.embedding.kernels import TableBatch
from dlrm_trainer.embedding.replicated import ReplicatedParts
from dlrm_trainer.embedding.segments import pick_segments

EPS = 1e-8
ADAGRAD = RowOptimizerSpec(eps=EPS)
SHAPES = [(40, 4), (7, 16), (1, 8)]


def random_bags(generator: np.random.Generator, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = generator.integers(0, 5, (len(SHAPES), samples))
    ids = np.concatenate([generator.integers(0, rows, lengths[i].sum()) for i, (rows, _) in enumerate(SHAPES)])
    return torch.from_numpy(ids), torch.from_numpy(lengths.astype(np.int32))


def fill(batch: TableBatch, seed: int) -> list[np.ndarray]:
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


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), samples=st.integers(0, 30))
def test_the_kernel_agrees_with_a_dense_float64_optimizer(seed: int, samples: int) -> None:
    generator = np.random.default_rng(seed)
    batch = TableBatch(SHAPES, ADAGRAD)
    weights, states = fill(batch, seed), [np.zeros(rows) for rows, _ in SHAPES]

    for step in range(4):
        bags = random_bags(generator, samples)
        pooled = batch.lookup(*bags, 0.1 / (step + 1))
        expected = dense_step(weights, states, bags, rate=0.1 / (step + 1))
        np.testing.assert_allclose(pooled.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
        batch.update(pooled, pooled.detach())

    for weight, state, expected_weight, expected_state in zip(
        batch.weights, batch.states, weights, states, strict=True
    ):
        np.testing.assert_allclose(weight.numpy(), expected_weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state[:, 0].numpy(), expected_state, rtol=1e-4, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), samples=st.integers(0, 30))
def test_data_parallel_tables_follow_the_same_rule(seed: int, samples: int) -> None:
    generator = np.random.default_rng(seed)
    tables = ReplicatedParts(SHAPES, ADAGRAD)
    weights, states = fill(tables.batch, seed), [np.zeros(rows) for rows, _ in SHAPES]
    buffer = torch.full((tables.gradient_elements,), float("nan"))

    for _ in range(4):
        ids, lengths = random_bags(generator, samples)
        pooled = tables.lookup(ids, lengths)
        dense_step(weights, states, (ids, lengths), rate=0.1)
        tables.write_gradient(buffer, pooled, ids, lengths)
        tables.update(buffer, 0.1)

    for weight, state, expected_weight, expected_state in zip(
        tables.batch.weights, tables.batch.states, weights, states, strict=True
    ):
        np.testing.assert_allclose(weight.numpy(), expected_weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(state[:, 0].numpy(), expected_state, rtol=1e-4, atol=1e-6)


def test_bits_do_not_depend_on_the_number_of_threads() -> None:
    threads_before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        generator = np.random.default_rng(5)
        sharded, replicated = TableBatch(SHAPES, ADAGRAD), ReplicatedParts(SHAPES, ADAGRAD)
        fill(sharded, 1)
        fill(replicated.batch, 1)
        buffer = torch.empty(replicated.gradient_elements)
        for _ in range(100):
            ids, lengths = random_bags(generator, 200)
            pooled = sharded.lookup(ids, lengths, 0.05)
            sharded.update(pooled, pooled.detach())
            replicated.write_gradient(buffer, replicated.lookup(ids, lengths), ids, lengths)
            replicated.update(buffer, 0.05)
        tensors = (*sharded.weights, *sharded.states, *replicated.batch.weights, *replicated.batch.states)
        results.append([tensor.clone() for tensor in tensors])
    torch.set_num_threads(threads_before)

    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_rank_without_tables_looks_nothing_up() -> None:
    batch = TableBatch([], ADAGRAD)

    pooled = batch.lookup(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 5, dtype=torch.int32))

    assert pooled.shape == (5, 0)
    assert batch.weights == ()


@given(st.lists(st.integers(0, 6), max_size=20), st.randoms(use_true_random=False))
def test_picking_segments_equals_joining_slices(lengths: list[int], shuffler: object) -> None:
    values = torch.arange(sum(lengths))
    sizes = torch.tensor(lengths, dtype=torch.int64)
    starts = sizes.cumsum(0) - sizes
    order = list(range(len(lengths)))
    shuffler.shuffle(order)  # type: ignore[attr-defined]

    picked = pick_segments(values, starts[order], sizes[order])

    expected = [int(value) for number in order for value in values[starts[number] : starts[number] + sizes[number]]]
    assert picked.tolist() == expected
