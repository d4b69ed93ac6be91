"""The number of virtual shards divides the batch, is even at all sizes up to the job's, and is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InfeasiblePlanError, InvalidSpecError
from dlrm_api.job import DLRMJobSpec
from dlrm_planner import choose_plan, plan_job, virtual_shards
from dlrm_planner.virtual_shards import choose_virtual_shards

MakeSpec = Callable[..., DLRMJobSpec]
TABLES = [{"name": "a", "rows": 1_000, "dim": 4}]


def excess(count: int, replicas: int, processes: int) -> Fraction | float:
    """How much more than the mean the largest slice has, at the worst number of replicas."""
    sizes = [processes * each for each in range(1, replicas + 1)]
    if count < sizes[-1]:
        return math.inf
    return max(Fraction(math.ceil(Fraction(count, ranks)) * ranks, count) - 1 for ranks in sizes)


@settings(max_examples=200)
@given(
    batch=st.one_of(st.integers(1, 5_000), st.sampled_from([2**20, 3 * 2**15, 10**6, 65_537, 2**26])),
    replicas=st.integers(1, 40),
    processes=st.sampled_from([1, 2, 3, 8]),
)
def test_the_number_is_the_divisor_nearest_to_64_that_is_even_enough(batch: int, replicas: int, processes: int) -> None:
    chosen = choose_virtual_shards(batch, replicas, processes)

    divisors = [each for each in range(1, min(batch, 65_536) + 1) if batch % each == 0]
    worst = {each: excess(each, replicas, processes) for each in divisors}
    even = [each for each in divisors if worst[each] <= Fraction(1, 16)]
    if even:
        assert chosen in even
        assert abs(math.log(chosen / 64)) <= min(abs(math.log(each / 64)) for each in even) + 1e-12
    else:
        assert worst[chosen] == min(worst.values())


@pytest.mark.parametrize("ranks", range(1, 7))
def test_small_jobs_have_64(ranks: int) -> None:
    assert {choose_virtual_shards(64 * times, ranks, 1) for times in (1, 2, 3, 32, 1_024)} == {64}


@pytest.mark.parametrize(
    ("batch", "ranks", "expected"), [(65_536, 1_024, 16_384), (2**20, 128, 2_048), (2_048, 8, 128)]
)
def test_large_jobs_have_at_least_sixteen_per_rank(batch: int, ranks: int, expected: int) -> None:
    assert choose_virtual_shards(batch, ranks, 1) == expected


def test_the_plan_holds_the_number_and_its_reason(make_spec: MakeSpec) -> None:
    plan = plan_job(make_spec(TABLES, replicas=8))

    assert plan.virtual_shards == 128
    assert any("data.virtualShards 128, chosen for the job's life" in reason for reason in plan.reasons)


def test_a_planned_number_of_replicas_decides(make_spec: MakeSpec) -> None:
    plan = choose_plan(make_spec(TABLES, batch=65_536, objective={"maxReplicas": 4_096}))

    assert (plan.nodes, plan.virtual_shards) == (1, 64)


@pytest.mark.parametrize("size", [{"replicas": 48}, {"objective": {"maxReplicas": 48}}])
def test_the_number_that_the_job_began_with_is_kept(make_spec: MakeSpec, size: dict[str, Any]) -> None:
    plan = choose_plan(make_spec(TABLES, **size), virtual_shards=64)

    assert plan.virtual_shards == 64
    assert plan.reasons[-1] == "data.virtualShards 64, as since the job began"


def test_the_users_number_wins(make_spec: MakeSpec) -> None:
    spec = make_spec(TABLES, replicas=2).with_virtual_shards(256)

    plan = plan_job(spec, virtual_shards=64)

    assert plan.virtual_shards == 256
    assert not any("virtualShards" in reason for reason in plan.reasons)


def test_a_kept_number_that_does_not_divide_another_batch_is_chosen_again(make_spec: MakeSpec) -> None:
    spec = make_spec(TABLES, batch=100)

    assert plan_job(spec, virtual_shards=64).virtual_shards == virtual_shards(spec)


def test_more_ranks_than_the_kept_number_are_refused(make_spec: MakeSpec) -> None:
    with pytest.raises(InvalidSpecError, match="at most 64 ranks") as refusal:
        plan_job(make_spec(TABLES, replicas=65), virtual_shards=64)

    assert refusal.value.path == "spec.trainer.replicas"


def test_a_batch_without_a_divisor_for_all_ranks_is_refused(make_spec: MakeSpec) -> None:
    with pytest.raises(InvalidSpecError, match="1000003 has no divisor from 2 to 65536") as refusal:
        plan_job(make_spec(TABLES, batch=1_000_003, replicas=2))

    assert refusal.value.path == "spec.data.globalBatchSize"


def test_more_replicas_may_have_more_virtual_shards_as_a_fix(make_spec: MakeSpec) -> None:
    tables = [{"name": f"t{i}", "rows": 100_000, "dim": 16} for i in range(140)]

    with pytest.raises(InfeasiblePlanError) as refusal:
        plan_job(make_spec(tables, replicas=2, tierBudgets={"ddr": "20Mi"}))

    assert any(line.startswith("fix: trainer.replicas: ") for line in refusal.value.reasons)
