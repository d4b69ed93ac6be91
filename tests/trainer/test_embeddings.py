from __future__ import annotations

import numpy as np
import pytest
from gangs import run_ranks
from reference import DenseTables, RankState, global_batch, train_sharded

from dlrm_api.model import TableSpec
from dlrm_api.plan import TierShare
from dlrm_trainer.collectives import Collectives
from dlrm_trainer.embedding import Placement

STEPS = 6


def random_tables(generator: np.random.Generator, count: int) -> tuple[TableSpec, ...]:
    return tuple(
        TableSpec(
            name=f"t{number}",
            rows=int(generator.integers(1, 60)),
            dim=int(4 * generator.integers(1, 5)),
            pooling="mean" if generator.random() < 0.4 else "sum",
            max_lookups=4,
        )
        for number in range(count)
    )


def random_placement(generator: np.random.Generator, world_size: int, count: int = 7) -> Placement:
    owners = [int(owner) for owner in generator.integers(-1, world_size, count)]
    return Placement(
        tables=random_tables(generator, count),
        owners=tuple(None if owner < 0 else owner for owner in owners),
        shares=(TierShare(),) * count,
        world_size=world_size,
    )


def check_against_reference(
    placement: Placement, ranks: list[RankState], samples: list[int], rates: list[float]
) -> None:
    reference = DenseTables.start(placement.tables)
    for step, rate in enumerate(rates):
        expected = reference.step(global_batch(placement.tables, samples[step], seed=step), rate)
        seen = np.concatenate([rank.features[step] for rank in ranks])
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-5)
    for number in range(len(placement.tables)):
        holders = [rank for rank in ranks if number in rank.weights]
        for holder in holders:
            np.testing.assert_allclose(holder.weights[number], reference.weights[number], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(holder.states[number], reference.states[number], rtol=1e-4, atol=1e-6)
            assert set(np.flatnonzero(holder.updated[number])) == reference.touched[number]
            assert np.array_equal(holder.weights[number], holders[0].weights[number])  # data-parallel: bit for bit
            assert np.array_equal(holder.states[number], holders[0].states[number])
        assert len(holders) == (1 if placement.owners[number] is not None else placement.world_size)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_agree_with_dense_float64_tables_with_uneven_and_empty_slices(seed: int) -> None:
    generator = np.random.default_rng(seed)
    world_size = 2 + seed % 3
    placement = random_placement(generator, world_size)
    samples = [int(count) for count in generator.integers(0, 12, STEPS)]
    cuts = [[0, *sorted(generator.integers(0, count + 1, world_size - 1).tolist()), count] for count in samples]
    rates = [0.1, 0.05, 0.2, 0.1, 0.0, 0.1]

    ranks = run_ranks(world_size, train_sharded, placement, cuts, samples, rates)

    check_against_reference(placement, ranks, samples, rates)


@pytest.mark.parametrize("seed", range(3))
def test_one_rank_agrees_with_dense_float64_tables(seed: int) -> None:
    placement = random_placement(np.random.default_rng(seed), world_size=1)
    samples, rates = [5, 0, 8, 1], [0.1, 0.05, 0.2, 0.1]

    state = train_sharded(Collectives(0, 1, lambda: ""), placement, [[0, count] for count in samples], samples, rates)

    check_against_reference(placement, [state], samples, rates)
    assert state.calls == [0, 0, 0, 0]


@pytest.mark.slow
def test_the_number_of_collectives_does_not_grow_with_the_number_of_tables() -> None:
    calls = []
    for count in (2, 40):
        placement = random_placement(np.random.default_rng(1), world_size=2, count=count)

        ranks = run_ranks(2, train_sharded, placement, [[0, 4, 9]] * 2, [9, 9], [0.1, 0.1])

        calls.append([rank.calls for rank in ranks])
    assert calls[0] == calls[1]
    assert calls[0][0] == [6, 6]  # header, lengths, values, pooled rows, their gradients, data-parallel gradients
