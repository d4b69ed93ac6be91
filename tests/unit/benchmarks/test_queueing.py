"""The simulated queue: nodes and deadlines are kept, and what each policy takes."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.queueing import (
    NODES,
    Choices,
    Policy,
    QueuedJob,
    as_large_as_possible,
    draw_jobs,
    simulate,
    smallest_that_meets,
)
from hypothesis import given, settings
from hypothesis import strategies as st

MODELS: tuple[Choices, ...] = (((1, 1e-3), (4, 6e-4), (16, 2e-4), (64, 1e-4)), ((8, 1e-4), (32, 5e-5)), ((2, 1e-2),))
POLICIES = [smallest_that_meets, as_large_as_possible]


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 2**32 - 1), load=st.floats(0.1, 3))
@settings(max_examples=25, deadline=None)
def test_no_node_is_given_twice_and_no_job_starts_that_ends_too_late(policy: Policy, seed: int, load: float) -> None:
    jobs = draw_jobs(np.random.default_rng(seed), MODELS, 200, load)
    running, taken_at_most = list[tuple[float, int]](), 0

    def watched(choices: Choices, free: int, left_s: float) -> int | None:
        size = policy(choices, free, left_s)
        if size is not None:
            assert size <= free
            assert dict(choices)[size] <= left_s
            running.append((dict(choices)[size], size))
        nonlocal taken_at_most
        taken_at_most = max(taken_at_most, NODES - free + (size or 0))
        assert 0 <= free <= NODES
        return size

    found = simulate(jobs, NODES, watched)

    assert taken_at_most <= NODES
    assert 0 <= found.blocking_rate < 1
    assert found.mean_nodes <= NODES
    assert found.mean_nodes > 0
    assert len(running) <= len(jobs)


@pytest.mark.parametrize(
    ("policy", "free", "left_s", "size"),
    [
        (smallest_that_meets, 64, 1_000.0, 1),
        (smallest_that_meets, 64, 500.0, 4),
        (smallest_that_meets, 3, 500.0, None),
        (smallest_that_meets, 64, 50.0, None),
        (as_large_as_possible, 64, 1_000.0, 64),
        (as_large_as_possible, 20, 1_000.0, 16),
        (as_large_as_possible, 5, 350.0, None),
    ],
)
def test_what_a_policy_takes(policy: Policy, free: int, left_s: float, size: int | None) -> None:
    assert policy(((1, 1_000.0), (4, 400.0), (16, 300.0), (64, 100.0)), free, left_s) == size


def test_jobs_wait_overtake_and_leave() -> None:
    all_nodes, half = ((NODES, 100.0),), ((NODES // 2, 40.0),)
    jobs = [
        QueuedJob(0.0, 1_000.0, half),
        # Waits for the first to end.
        QueuedJob(1.0, 1_000.0, all_nodes),
        # Overtakes it, onto the nodes that are free.
        QueuedJob(2.0, 1_000.0, half),
        # Could only run after all others, and leaves.
        QueuedJob(3.0, 110.0, all_nodes),
    ] * 3
    jobs = [
        QueuedJob(job.arrival_s + 1e6 * (i // 4), job.deadline_s + 1e6 * (i // 4), job.choices)
        for i, job in enumerate(jobs)
    ]

    found = simulate(jobs, NODES, smallest_that_meets)

    # One job of twelve is warm-up: eleven count, three of them leave.
    assert found.blocking_rate == pytest.approx(3 / 11)
    assert found.median_completion_s == 40.0
    # From 1 s: it starts as the one that overtook ends, at 42 s, and takes 100 s.
    assert found.p95_completion_s == pytest.approx(141.0)


def test_a_nearly_empty_cluster_is_as_busy_as_offered() -> None:
    jobs = draw_jobs(np.random.default_rng(5), MODELS, 5_000, 0.05)

    found = simulate(jobs, NODES, smallest_that_meets)

    assert found.blocking_rate < 0.03
    assert found.mean_nodes == pytest.approx(0.05 * NODES, rel=0.1)
