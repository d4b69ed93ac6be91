from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.planner_error import (
    MAX_RERUNS,
    REPEATS,
    Case,
    Run,
    Setting,
    draw_case,
    draw_setting,
    make_case,
    measure_cases,
    summarize,
)

from dlrm_api.hardware import HardwareProfile, parse_profile

GIB = 2**30
RATES = {"readBytesPerSecond": 1e9, "writeBytesPerSecond": 1e9}


def machine() -> HardwareProfile:
    """Return a profile with all rates that a prediction needs."""
    return parse_profile(
        {
            "apiVersion": "dlrm.dev/v1alpha1",
            "kind": "HardwareProfile",
            "metadata": {"name": "machine"},
            "spec": {
                "flopsPerSecond": 1e10,
                "tiers": {"ddr": {"bytes": 16 * GIB, **RATES}, "block": {"bytes": 64 * GIB, "readIops": 1e5, **RATES}},
                "network": {"intraNodeBytesPerSecond": 1e9},
            },
        }
    )


@pytest.mark.slow
def test_drawn_settings_have_a_prediction_and_small_caches_use_block_storage(tmp_path: Path) -> None:
    draw = random.Random(0)
    cases = [draw_case(number, draw, machine(), tmp_path) for number in range(3)]

    assert {case.setting.ranks for case in cases} == {1, 2}
    for case in cases:
        stacks = [shard.tiers.is_stack for table in case.plan.tables for shard in table.shards]
        assert case.setting.is_usable
        assert case.plan.predicted.samples_per_second
        assert any(stacks) == (case.setting.cache < 1)


def test_the_same_seed_draws_the_same_settings() -> None:
    one, other = random.Random(3), random.Random(3)

    assert [draw_setting(one) for _ in range(20)] == [draw_setting(other) for _ in range(20)]


def test_only_settings_whose_runs_differ_are_run_again(tmp_path: Path) -> None:
    setting = Setting(
        tables=8, rows=5_000, dim=16, lookups=1, batch=512, mlp="small", precision="fp32", cache=1.0, ranks=1
    )
    case = make_case(0, setting, machine(), tmp_path)
    cases = [case, replace(case, number=1)]
    order: list[int] = []
    disturbed: Iterator[float] = iter([1.0, 1.0, 2.0] * (1 + MAX_RERUNS))

    def run(case: Case) -> Run:
        order.append(case.number)
        return Run(case.plan, next(disturbed) if case.number else 1.0, "compute", None)

    found = measure_cases(cases, run)

    assert order == [0, 1] * REPEATS + [1] * REPEATS * MAX_RERUNS
    assert [len(found[case.number]) for case in cases] == [REPEATS, REPEATS]


def test_summary_tells_median_from_worst_and_sees_order() -> None:
    lines = [
        {"measured_ms": ms, "predicted_ms": ms * ratio, "error": ratio - 1, "repeat_error": 0.0}
        for ms, ratio in ((4.0, 1.1), (40.0, 0.8), (400.0, 2.0))
    ]

    found = summarize(lines, seed=0)

    assert (found["median_error"], found["worst_error"], found["spearman"]) == (0.2, 1.0, 1.0)
    # Only the first setting is short, and none has levels.
    assert found["worst_short_ms"] == pytest.approx(0.4)
    assert found["worst_hit_rate_points"] is None
