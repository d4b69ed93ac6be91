"""Plans of random problems: they fit, cover every row once, are level, and are the same on every processor."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.hardware import HardwareProfile
from dlrm_api.job import DLRMJobSpec
from dlrm_api.plan import Plan, ShardRange
from dlrm_planner import hit_rates, plan_job
from dlrm_planner.write import even_runs
from dlrm_testing.repeats import repeats

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]
SEEDS, PLANS_OF_A_SEED = range(repeats(4, soak=100)), 30
MIB, GIB = 2**20, 2**30
DDR_RATES = {"readBytesPerSecond": 1e10, "writeBytesPerSecond": 5e9}
RATES: dict[str, Any] = {
    "flopsPerSecond": 1e12,
    "network": {"intraNodeBytesPerSecond": 1e10, "interNodeBytesPerSecond": 1e9},
    "pricePerHour": 3.6,
}


def _table(draw: random.Random, number: int) -> dict[str, Any]:
    dim = draw.choice([4, 16, 64, 128])
    table: dict[str, Any] = {
        "name": f"t{number}",
        "rows": int(10 ** draw.uniform(1, 7)),
        "dim": dim,
        "maxLookups": draw.randint(1, 20),
    }
    if draw.random() < 0.3:
        table["distribution"] = draw.choice([{"prior": "uniform"}, {"prior": "zipf", "alpha": 0.7}])
    if draw.random() < 0.3:
        table["columnBlock"] = dim // draw.choice([1, 1, 2]) if dim > 4 else dim
    if draw.random() < 0.2:
        table["dtype"] = "fp16"
    if draw.random() < 0.3:
        table["pin"] = draw.choice([{"tier": "ddr"}, {"tier": "block"}, {"sharding": "row"}, {"sharding": "data"}])
    return table


def draw_problems(seed: int) -> Iterator[tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any] | None]]:
    """Yield tables, trainer and hardware of random problems."""
    draw = random.Random(seed)
    for _ in range(PLANS_OF_A_SEED):
        tables = [_table(draw, number) for number in range(draw.randint(1, 12))]
        trainer: dict[str, Any] = {
            "replicas": draw.randint(1, 4),
            "processesPerReplica": draw.randint(1, 3),
            "cache": {"ways": draw.choice([0, 0, 8]), "lookahead": draw.randint(0, 2)},
        }
        budgets: dict[str, Any] = {"block": draw.randint(1, 60) * GIB}
        if draw.random() < 0.7:
            budgets["ddr"] = draw.randint(200, 4_000) * MIB
        if draw.random() < 0.3:
            budgets["scm"] = draw.randint(1, 4) * GIB
        profile = None
        if draw.random() < 0.5:
            ddr = {"bytes": draw.randint(4, 64) * GIB, **DDR_RATES}
            block = {"bytes": draw.randint(10, 500) * GIB, "readBytesPerSecond": 1e9, "readIops": 1e5}
            scm = {"bytes": draw.randint(1, 50) * GIB, "readBytesPerSecond": 5e9}
            profile = {"tiers": {"ddr": ddr, "block": block, "scm": scm}, **RATES}
        yield tables, {**trainer, "tierBudgets": budgets}, profile


def plans(seed: int, make_spec: MakeSpec, make_profile: MakeProfile) -> list[tuple[DLRMJobSpec, Plan | str]]:
    """Plan the problems of one seed; a refusal is a text."""
    found: list[tuple[DLRMJobSpec, Plan | str]] = []
    for tables, trainer, hardware in draw_problems(seed):
        profile = None
        if hardware is not None:
            rest = {key: value for key, value in hardware.items() if key != "tiers"}
            profile = make_profile("1Gi", **rest)
            tiers = type(profile.spec.tiers).model_validate(hardware["tiers"])
            profile = profile.model_copy(update={"spec": profile.spec.model_copy(update={"tiers": tiers})})
        spec = make_spec(tables, **trainer)
        try:
            found.append((spec, plan_job(spec, profile)))
        except InvalidSpecError as refused:
            found.append((spec, str(refused)))
    return found


def without_rounding(value: Any) -> Any:
    """Drop the last digits of floats, which depend on the order in which a processor adds."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: without_rounding(each) for key, each in value.items()}
    return [without_rounding(each) for each in value] if isinstance(value, list) else value


class OtherProcessor:
    """Stand in for numpy on another processor: the last bit of transcendental functions differs."""

    def __init__(self, seed: int) -> None:
        self._draw = np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if name not in ("expm1", "log", "exp", "power"):
            return function

        def rounded_otherwise(*given: Any) -> Any:
            exact = function(*given)
            return exact * (1 + np.finfo(float).eps * self._draw.integers(-1, 2, np.shape(exact)))

        return rounded_otherwise


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_cover_every_row_once_within_every_budget(
    make_spec: MakeSpec, make_profile: MakeProfile, seed: int
) -> None:
    for spec, plan in plans(seed, make_spec, make_profile):
        if isinstance(plan, str):
            continue
        for table, planned in zip(spec.model.all_tables(), plan.tables, strict=True):
            areas = [(s.row_end - s.row_start) * (s.column_end - s.column_start) for s in planned.shards]
            assert sum(areas) == table.rows * table.dim
            corners = {(s.row_start, s.column_start) for s in planned.shards}
            assert len(corners) == len(planned.shards)
            for shard in planned.shards:
                rows = sum(level.rows for level in shard.tiers.levels)
                assert not shard.tiers.levels or rows >= shard.row_end - shard.row_start
        for tier, budget in spec.trainer.tier_budgets.model_dump(exclude_none=True).items():
            for node in range(plan.nodes):
                held = sum(rank.bytes_per_tier.get(tier, 0) for rank in plan.ranks if rank.node == node)
                assert held <= budget


def test_whole_tables_of_like_cost_leave_ranks_level(make_spec: MakeSpec) -> None:
    found = [{"name": f"t{i}", "rows": 10**5 + i, "dim": 64, "maxLookups": 1 + i % 3} for i in range(64)]

    for replicas in (2, 4, 8, 16):
        plan = plan_job(make_spec(found, replicas=replicas))

        assert plan.predicted.imbalance < 1.1
        assert {shard.rank for table in plan.tables for shard in table.shards} == set(range(replicas))


@pytest.mark.parametrize("lookups", [1, 10])
def test_more_nodes_are_predicted_to_be_faster_for_large_tables(
    make_spec: MakeSpec, make_profile: MakeProfile, lookups: int
) -> None:
    found = [{"name": f"t{i}", "rows": 10**7, "dim": 64, "maxLookups": lookups} for i in range(16)]
    profile = make_profile({"bytes": "1Ti", **DDR_RATES}, **RATES)

    rates = []
    for replicas in (2, 4, 8, 16):
        spec = make_spec(found, batch=16_384, replicas=replicas)
        rate = plan_job(spec, profile).predicted.samples_per_second
        assert rate is not None
        rates.append(rate)

    assert all(later > earlier for earlier, later in pairwise(rates))


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_plans_do_not_depend_on_the_processor_s_rounding(
    make_spec: MakeSpec, make_profile: MakeProfile, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    def documents() -> list[Any]:
        found = plans(seed, make_spec, make_profile)
        return [plan if isinstance(plan, str) else without_rounding(plan.model_dump(mode="json")) for _, plan in found]

    here = documents()

    for other in (1, 2):
        monkeypatch.setattr(hit_rates, "np", OtherProcessor(other))
        assert documents() == here


@given(data=st.data(), count=st.integers(1, 40))
def test_ranges_hold_what_their_shards_hold_one_by_one(data: st.DataObject, count: int) -> None:
    ranks = np.array(data.draw(st.permutations(range(count)) | st.just(list(range(count)))), np.int64)
    is_even, total = data.draw(st.booleans()), data.draw(st.integers(count, 10**12))
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    edges = np.arange(count + 1) * total // count if is_even else np.cumsum([0, *sizes])
    labels = np.array(data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))) // 9

    runs = even_runs(ranks, edges, labels)

    shards = [
        (shard.rank, shard.row_start, shard.row_end)
        for first, last in runs
        for whole in [
            ShardRange(
                rank=int(ranks[first]),
                ranks=last - first,
                kind="row",
                row_start=int(edges[first]),
                row_end=int(edges[last]),
                column_start=0,
                column_end=4,
            )
        ]
        for shard in map(whole.shard, range(last - first))
    ]
    assert shards == list(zip(ranks.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True))
    assert all(len(set(labels[first:last].tolist())) == 1 for first, last in runs)
    if is_even and ranks.tolist() == sorted(ranks) and not labels.any():
        assert len(runs) == 1
