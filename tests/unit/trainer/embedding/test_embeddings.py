from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.model import ModelSpec
from dlrm_api.training import CommunicationSpec, InterNodeSpec, RowRegularizerSpec
from dlrm_testing.repeats import repeats
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_testing.trainer.reference import DenseTables, RankState, global_batch, train_sharded
from dlrm_testing.trainer.shardings import random_model, random_plan, whole_plan
from dlrm_trainer.distributed.collectives import Collectives
from dlrm_trainer.embedding import Placement, place

STEPS = 6


def check_against_reference(model: ModelSpec, ranks: list[RankState], samples: list[int], rates: list[float]) -> None:
    reference = DenseTables.start(model)
    for step, rate in enumerate(rates):
        expected = reference.step(global_batch(model, samples[step], seed=step), rate)
        seen = np.concatenate([rank.features[step] for rank in ranks])
        np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=1e-5)
    held = {table.name: np.zeros((table.rows, table.dim), int) for table in model.all_tables()}
    numbers = {table.name: number for number, table in enumerate(model.all_tables())}
    for rank in ranks:
        for shard, weight, state in rank.parts:
            number, rows = numbers[shard.table], slice(shard.row_start, shard.row_end)
            columns = slice(shard.column_start, shard.column_end)
            block = model.all_tables()[number].block_edges.index(shard.column_start)
            np.testing.assert_allclose(weight, reference.weights[number][rows, columns], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(state[:, 0], reference.states[number][rows, block], rtol=1e-4, atol=1e-6)
        for shard, updated in rank.changed:
            rows = range(shard.row_start, shard.row_end)
            touched = {row - shard.row_start for row in reference.touched[numbers[shard.table]] if row in rows}
            assert set(updated.tolist()) == touched
            held[shard.table][shard.row_start : shard.row_end, shard.column_start : shard.column_end] += 1
    assert all((count == 1).all() for count in held.values())
    replicas = [rank.parts[len(rank.parts) - rank.replicas :] for rank in ranks]
    for others in replicas[1:]:
        for (_, *mine), (_, *theirs) in zip(replicas[0], others, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))  # bit for bit


def random_case(seed: int, world_size: int, count: int = 7, max_lookups: int = 4) -> tuple[ModelSpec, Placement]:
    generator = np.random.default_rng(seed)
    model = random_model(generator, count, weighted=seed % 2 == 1, max_lookups=max_lookups)
    return model, place(model, random_plan(generator, model, world_size), world_size)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(repeats(4, soak=100)))
def test_any_sharding_agrees_with_dense_float64_tables_on_uneven_slices(seed: int) -> None:
    world_size = 2 + seed % 3
    model, placement = random_case(seed, world_size)
    generator = np.random.default_rng(seed)
    samples = [int(count) for count in generator.integers(0, 12, STEPS)]
    cuts = [[0, *sorted(generator.integers(0, count + 1, world_size - 1).tolist()), count] for count in samples]
    rates = [0.1, 0.05, 0.2, 0.1, 0.0, 0.1]

    ranks = run_ranks(world_size, train_sharded, model, placement, cuts, samples, rates)

    check_against_reference(model, ranks, samples, rates)


@pytest.mark.slow
@pytest.mark.parametrize("max_lookups", [255, 256, 32_767, 32_768])
def test_ranks_tell_each_other_of_bags_of_any_number_of_ids(max_lookups: int) -> None:
    model, placement = random_case(4, world_size=2, count=1, max_lookups=max_lookups)
    samples, rates = [3, 0, 1], [0.01, 0.01, 0.01]

    ranks = run_ranks(2, train_sharded, model, placement, [[0, 2, 3], [0, 0, 0], [0, 0, 1]], samples, rates)

    check_against_reference(model, ranks, samples, rates)


@pytest.mark.slow
@settings(max_examples=30)
@given(seed=st.integers(0, 10_000))
def test_one_rank_agrees_with_dense_float64_tables(seed: int) -> None:
    model, placement = random_case(seed, world_size=1)
    samples, rates = [5, 0, 8, 1], [0.1, 0.05, 0.2, 0.1]

    cuts = [[0, count] for count in samples]
    state = train_sharded(Collectives(0, 1, lambda: ""), model, placement, cuts, samples, rates)

    check_against_reference(model, [state], samples, rates)
    assert state.calls == [0, 0, 0, 0]


@pytest.mark.slow
def test_the_number_of_collectives_is_the_same_for_any_number_of_features() -> None:
    calls = []
    for count in (2, 40):
        model, placement = random_case(3, 2, count)

        ranks = run_ranks(2, train_sharded, model, placement, [[0, 4, 9]] * 2, [9, 9], [0.1, 0.1])

        calls.append([rank.calls for rank in ranks])
    assert calls[0] == calls[1]
    # header, lengths, ids and weights, pooled rows, their gradients, data-parallel gradients
    assert calls[0][0] == [7, 7]


@pytest.mark.slow
def test_formats_by_link_give_the_same_bits_in_one_level_and_in_two() -> None:
    model, placement = random_case(2, world_size=4)
    mixed = CommunicationSpec(
        forward="bf16", backward="fp32", inter_node=InterNodeSpec(forward="int8", backward="fp16")
    )
    given = train_sharded, model, placement, [[0, 4, 9, 12, 16]] * 3, [16] * 3, [0.1] * 3

    one, two, exact = (
        run_ranks(4, *given, formats, None, 2, per_node=levels)
        for formats, levels in ((mixed, 1), (mixed, 2), (CommunicationSpec(), 2))
    )

    for mine, other in zip(one, two, strict=True):
        for ours, theirs in zip(mine.features, other.features, strict=True):
            np.testing.assert_array_equal(ours, theirs)
        for (_, *values), (_, *others) in zip(mine.parts, other.parts, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(values, others, strict=True))
        assert mine.bytes_sent == other.bytes_sent
    for seen, full in zip(two, exact, strict=True):
        # Ranges of rows add up errors of their parts.
        np.testing.assert_allclose(seen.features[0], full.features[0], atol=0.05)
        assert seen.bytes_sent["pooled"] < full.bytes_sent["pooled"]
    assert not all(np.array_equal(a.features[0], b.features[0]) for a, b in zip(two, exact, strict=True))


def rows_of(model: ModelSpec, ranks: list[RankState]) -> dict[str, np.ndarray]:
    """Return the rows of each table that is not data-parallel."""
    found = {table.name: np.zeros((table.rows, table.dim), np.float32) for table in model.all_tables()}
    for rank in ranks:
        for shard, weight, _ in rank.parts[: len(rank.parts) - rank.replicas]:
            rows = slice(shard.row_start, shard.row_end)
            found[shard.table][rows, shard.column_start : shard.column_end] = weight
    return found


@pytest.mark.slow
def test_regularized_rows_have_the_same_bits_on_one_rank_and_on_two() -> None:
    # Bags of one id at most: sums of partial bags would round.
    model, placement = random_case(8, world_size=2, max_lookups=2)
    owned = set(rows_of(model, [])) - {model.all_tables()[part.table].name for part in placement.replicated}
    alone = place(model, whole_plan(model, 0, 1), 1)
    samples, rates, regularizer = [9, 7, 8], [0.1, 0.1, 0.1], RowRegularizerSpec(bits=2, strength=0.5, last_steps=3)
    whole, cuts = [[0, count] for count in samples], [[0, 4, count] for count in samples]

    one, plain = (
        train_sharded(Collectives(0, 1, lambda: ""), model, alone, whole, samples, rates, None, each)
        for each in (regularizer, None)
    )
    two = run_ranks(2, train_sharded, model, placement, cuts, samples, rates, None, regularizer)

    assert len(owned) > 2
    for table in owned:
        assert rows_of(model, [one])[table].tobytes() == rows_of(model, two)[table].tobytes()
        assert rows_of(model, [one])[table].tobytes() != rows_of(model, [plain])[table].tobytes()
