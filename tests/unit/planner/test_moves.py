"""Moves and swaps of shards: what they leave ranks with, and the plans that they lead to."""

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_planner.choose import SPLIT_GAIN, choose, read_problem
from dlrm_planner.estimate import CostModel, estimate, read_costs
from dlrm_planner.memory import ddr_capacity
from dlrm_planner.moves import Loads, Mover
from dlrm_planner.partition import Partitioner
from dlrm_planner.predict import Solution
from dlrm_planner.tiers import TierPlanner
from dlrm_planner.types import Indices, Problem

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
DDR = {"bytes": "8Ti", "readBytesPerSecond": 1.5e11, "writeBytesPerSecond": 1e11}
LINKS = {"interNodeBytesPerSecond": 5e8, "intraNodeBytesPerSecond": 5e9}


def draw_tables(draw: random.Random, count: int) -> list[dict[str, Any]]:
    """Return tables whose lookups and messages take unlike parts of a step."""
    return [
        {
            "name": f"t{i}",
            "rows": draw.randint(20_000, 60_000),
            "dim": draw.choice([8, 64, 128]),
            "maxLookups": draw.choice([1, 4, 20]),
        }
        for i in range(count)
    ]


def placed(problem: Problem, costs: CostModel, ranks: Indices) -> Solution:
    """Return all tables whole on these ranks."""
    partitioner = Partitioner(problem.tables, costs, ddr_capacity(problem, ()), {})
    placement = partitioner.place(ranks, "drawn")
    estimated = estimate(problem, costs, placement, None)
    return Solution(problem=problem, costs=costs, placement=placement, tiers=None, estimate=estimated)


@pytest.mark.parametrize("seed", range(20))
def test_what_a_step_waits_for_after_a_swap_is_what_the_new_ranks_say(
    make_spec: MakeSpec, make_profile: MakeProfile, seed: int
) -> None:
    draw = random.Random(seed)
    gang = {"replicas": draw.randint(1, 3), "processesPerReplica": draw.randint(1, 3)}
    spec = make_spec(draw_tables(draw, 7), **gang)
    costs = read_costs(read_problem(spec, make_profile(DDR, network=LINKS), {}))
    ranks = np.array([draw.randrange(spec.world_size) for _ in range(7)])
    amounts = np.array([[draw.random() for _ in range(7)] for _ in range(3)])
    pairs = [(i, 7, to) for i in range(7) for to in range(spec.world_size) if to != ranks[i]]
    pairs += [(i, j, int(ranks[j])) for i, j in itertools.permutations(range(7), 2) if ranks[i] != ranks[j]]
    # What ranks receive at least is the same for all placements.
    mean = amounts[2].sum() / max(spec.world_size - 1, 1) / 2
    loads = [Loads.of_training(costs, ranks, amounts), Loads.of_misses(costs, ranks, amounts[2])]

    for i, j, to in pairs:
        after = np.append(ranks, 0)
        after[[i, j]] = to, ranks[i]
        busy, variance, shared = (np.bincount(after[:7], each, minlength=spec.world_size) for each in amounts)
        nodes = shared.reshape(spec.replicas, -1).sum(axis=1)
        found = [float(each.wait_after(np.array([i]), np.array([j]), np.array([to]))[0]) for each in loads]

        messages_s = costs.links.messages_s(shared) + costs.packed_s * (costs.mean_traffic(shared).max() - mean)
        busy_s = (busy + costs.deviations * variance**0.5).max()
        assert found[0] == pytest.approx(busy_s + messages_s)
        assert found[1] == pytest.approx(gang["processesPerReplica"] * shared.max() + nodes.max())


@pytest.mark.parametrize("seed", range(20))
def test_neighbours_fit_keep_pins_and_parts_of_a_table_apart(
    make_spec: MakeSpec, make_profile: MakeProfile, seed: int
) -> None:
    draw = random.Random(seed)
    found = draw_tables(draw, 10)
    found[0]["pin"] = {"ranks": [0]}
    found[1]["pin"] = {"ranks": [0, 1]}
    found[2]["pin"] = {"sharding": "row"}
    found[3] |= {"rows": 400_000, "dim": 128}
    # A node has memory for its share of the tables, and little more.
    spec = make_spec(found, replicas=3, processesPerReplica=2, tierBudgets={"ddr": "900Mi"})
    solution = choose(read_problem(spec, make_profile(DDR, network=LINKS), {}))
    assert isinstance(solution, Solution)
    problem, before = solution.problem, solution.placement
    capacity = ddr_capacity(problem, before.replicated)
    partitioner = Partitioner(problem.tables, solution.costs, capacity, before.options)

    neighbours = list(Mover(partitioner).neighbours(solution))

    assert neighbours
    table = before.shards.table
    for each in neighbours:
        assert partitioner.fits(each.ranks)
        assert 1 <= np.count_nonzero(each.ranks != before.ranks) <= 2
        assert len(np.unique(table * spec.world_size + each.ranks)) == len(table)
        bound = np.isin(table, [0, 1, 2])
        assert (each.ranks[bound] == before.ranks[bound]).all()
        assert all(option.ranks.tolist() == each.ranks[table == i].tolist() for i, option in each.options.items())


def test_reused_levels_equal_fresh_ones(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    found = [each | {"rows": 20 * each["rows"]} for each in draw_tables(random.Random(5), 16)]
    gang, tiers = {"replicas": 4, "processesPerReplica": 2}, {"ddr": "500Mi", "block": "64Gi"}
    solution = choose(read_problem(make_spec(found, tierBudgets=tiers, **gang), make_profile(DDR, network=LINKS), {}))
    assert isinstance(solution, Solution)
    assert solution.stacked
    problem, before = solution.problem, solution.placement
    planner = TierPlanner(problem)
    [capacity, *_] = planner.capacities(before.replicated)
    near = planner.assign(before)
    assert near is not None

    for each in Mover(Partitioner(problem.tables, solution.costs, capacity, before.options)).neighbours(solution):
        reused, fresh = planner.assign(each, near=near), planner.assign(each)
        assert bool(reused) == bool(fresh)
        if reused and fresh:
            assert reused.levels == fresh.levels
            assert np.array_equal(reused.group, fresh.group)
            assert 0 < len(reused.by_pod.keys() & near.by_pod.keys()) < 4


@pytest.mark.parametrize("lookahead", [0, 8])
@pytest.mark.parametrize("seed", range(10))
def test_no_ranks_of_whole_tables_are_much_faster_than_those_of_the_plan(
    make_spec: MakeSpec, make_profile: MakeProfile, seed: int, lookahead: int
) -> None:
    draw = random.Random(seed)
    found, replicas = draw_tables(draw, 6), draw.randint(2, 4)
    spec = make_spec(found, batch=8_192, replicas=replicas, cache={"lookahead": lookahead})
    problem = read_problem(spec, make_profile(DDR, network=LINKS), {})
    costs = read_costs(problem)

    chosen = choose(problem)

    assert isinstance(chosen, Solution)
    every = (np.array(each) for each in itertools.product(range(replicas), repeat=6))
    best_s = min(placed(problem, costs, ranks).timeline.step_s for ranks in every)
    assert chosen.timeline.step_s <= SPLIT_GAIN * best_s
