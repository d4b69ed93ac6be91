"""Rows go to tiers as an oracle places them, and more hardware never makes a plan worse."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from dlrm_api.hardware import HardwareProfile, TierSpec
from dlrm_api.job import DLRMJobSpec
from dlrm_planner import plan_job
from dlrm_planner.choose import read_problem
from dlrm_planner.hit_rates import table_hit_rates
from dlrm_planner.rates import read_tier_rates
from dlrm_planner.stacks import expected_entries, read_stacks
from dlrm_planner.tiers import Pod, tier_tables
from dlrm_planner.types import TierShortage, cut_tables
from dlrm_testing.repeats import repeats
from dlrm_testing.tier_oracle import oracle_ms

MakeSpec = Callable[..., DLRMJobSpec]
MakeProfile = Callable[..., HardwareProfile]


@dataclass(frozen=True, kw_only=True)
class SmallPod:
    """Hold a pod of few tables, and hardware for it."""

    pod: Pod
    profile: HardwareProfile


def draw_pod(draw: random.Random, make_spec: MakeSpec, make_profile: MakeProfile) -> SmallPod:
    """Return tables that DDR does not hold whole, over one to three slower tiers with rates in bytes and in number."""
    priors = [{"prior": "uniform"}, {"prior": "zipf", "alpha": 0.6}, {"prior": "zipf", "alpha": 1.05}]
    found = [
        {
            "name": f"t{i}",
            "rows": round(10 ** draw.uniform(5, 7)),
            "dim": draw.choice([16, 64, 128, 512]),
            "maxLookups": draw.randint(1, 20),
            "distribution": draw.choice(priors),
        }
        for i in range(draw.randint(1, 4))
    ]
    kinds = sorted(draw.sample(["cxl", "scm", "block"], draw.randint(1, 3)), key=["cxl", "scm", "block"].index)
    rates = {
        "cxl": {"readBytesPerSecond": 10 ** draw.uniform(9.5, 10.5)},
        "scm": {"readBytesPerSecond": 10 ** draw.uniform(9, 10), "writeBytesPerSecond": 10 ** draw.uniform(8.5, 9.7),
                "readIops": 10 ** draw.uniform(6, 8)},
        "block": {"readBytesPerSecond": 10 ** draw.uniform(8.7, 10), "readIops": 10 ** draw.uniform(4.5, 6)},
    }  # fmt: skip
    total = sum(each["rows"] * each["dim"] * 4 for each in found)
    caps = {kind: round(total * draw.uniform(0.05, 0.6)) for kind in kinds[:-1]} | {kinds[-1]: 4 * total + 2**30}
    profile = make_profile("1Ti")
    specs = {kind: TierSpec.model_validate({"bytes": caps[kind], **rates[kind]}) for kind in kinds}
    tiers_ = profile.spec.tiers.model_copy(update=specs)
    profile = profile.model_copy(update={"spec": profile.spec.model_copy(update={"tiers": tiers_})})
    problem = read_problem(make_spec(found, batch=draw.choice([512, 2_048, 8_192])), profile, {})
    shapes = cut_tables(problem.tables, range(len(found)), {}).shapes
    rates_ = table_hit_rates(problem).of(shapes)
    stacks = read_stacks(problem.spec, shapes, rates_, caps, expected_entries(shapes, 1))
    least, most = float(stacks.min_ddr(slower_tiers=True).sum()), float(stacks.whole.sum())
    pod = Pod(
        ranks=np.zeros(len(found), np.int64),
        stacks=stacks,
        rates=rates_,
        hbm=math.inf,
        ddr=least + draw.uniform(0.02, 0.9) * max(most - least, 0),
        slow=caps,
        speeds={kind: read_tier_rates(profile, kind) for kind in ("ddr", *kinds)},
    )
    return SmallPod(pod=pod, profile=profile)


def step_s(pod: Pod) -> float:
    """Return the seconds in which slower tiers serve a step of a pod."""
    placed = tier_tables(pod, refines=True)
    assert not isinstance(placed, TierShortage)
    return pod.seconds(placed.rows)[0]


def losses(count: int, make_spec: MakeSpec, make_profile: MakeProfile) -> list[float]:
    """Return by what share small pods take longer than the fastest placement of their rows."""
    draw, found = random.Random(34), []
    for _ in range(count):
        small = draw_pod(draw, make_spec, make_profile)
        ours_ms = step_s(small.pod) * 1e3
        best_ms = oracle_ms(small.pod.stacks, small.pod.rates, small.pod.ddr, small.pod.slow, small.profile)
        assert best_ms is not None
        found.append((ours_ms - best_ms) / max(best_ms, 1e-3))
    return found


@pytest.mark.parametrize(
    "count", [12, pytest.param(repeats(100, soak=300), marks=[pytest.mark.slow, pytest.mark.soak])]
)
def test_small_pods_are_placed_as_by_the_oracle(make_spec: MakeSpec, make_profile: MakeProfile, count: int) -> None:
    found = np.array(losses(count, make_spec, make_profile))

    assert found.max() <= 0.01
    assert (found <= 1e-4).mean() >= 0.9


@pytest.mark.parametrize("count", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_more_memory_and_faster_tiers_make_no_step_longer(
    make_spec: MakeSpec, make_profile: MakeProfile, count: int
) -> None:
    draw, tolerance = random.Random(43), 1.01
    for _ in range(count):
        pod = draw_pod(draw, make_spec, make_profile).pod
        tier = draw.choice(list(pod.slow))
        speed = pod.speeds[tier]
        faster = replace(speed, read_bytes=2 * speed.read_bytes, reads=2 * speed.reads)
        before_s = step_s(pod)

        assert step_s(replace(pod, ddr=pod.ddr * draw.uniform(1, 1.5))) <= tolerance * before_s
        assert step_s(replace(pod, slow=pod.slow | {tier: 2 * pod.slow[tier]})) <= tolerance * before_s
        assert step_s(replace(pod, speeds={**pod.speeds, tier: faster})) <= tolerance * before_s


def test_a_table_without_reuse_gets_no_cache(make_spec: MakeSpec, make_profile: MakeProfile) -> None:
    found = [
        {"name": "cold", "rows": 50_000_000, "dim": 64, "distribution": {"prior": "uniform"}},
        {"name": "hot", "rows": 50_000_000, "dim": 64, "maxLookups": 20},
    ]
    spec = make_spec(found, tierBudgets={"ddr": "2Gi", "block": "100Gi"})

    cold, hot = (each.shards[0].tiers.levels for each in plan_job(spec, make_profile("64Gi")).tables)

    in_flight = 2_048 * (spec.trainer.cache.lookahead + 1)
    assert cold[0].rows <= in_flight
    assert hot[0].rows > 20 * in_flight
