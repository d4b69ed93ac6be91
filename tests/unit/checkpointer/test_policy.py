"""When a snapshot is full, and with how many bits: against Check-N-Run's own rules."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.checkpoint import PolicyName
from dlrm_checkpointer.format.manifest import ChainSummary
from dlrm_checkpointer.write.policy import ChainPolicy, bits_in_use, choose_kind


def policy(name: PolicyName, **changes) -> ChainPolicy:
    defaults = {"base_every_s": None, "max_chain": 24, "max_restore_s": None, "restore_bytes_per_s": 1e6}
    return ChainPolicy(name=name, **(defaults | changes))


def run(chains: ChainPolicy, sizes: list[int], base: int, interval_s: float = 60) -> list[str]:
    """Kinds of the snapshots of a job whose n-th increment since a full one has the n-th size."""
    kinds, growth, length = [], None, 0
    for number in range(len(sizes)):
        now = number * interval_s
        kind = choose_kind(chains, growth, length, now)[0]
        if kind == "full" or growth is None:
            growth, length = ChainSummary(base_bytes=base, base_time=now), 0
        else:
            length = length + 1 if chains.name == "consecutive" else 1
            growth = growth.after(sizes[growth.increments])
        kinds.append(kind)
    return kinds


def test_the_predictor_agrees_with_the_papers_example():
    sizes = [250 + 35 * n for n in range(12)]

    kinds = run(policy("intermittent"), sizes, 1_000)

    assert kinds == ["full", *["increment"] * 7, "full", *["increment"] * 3]


@given(sizes=st.lists(st.integers(0, 2_000), min_size=2, max_size=30), base=st.integers(1, 2_000))
def test_intermittent_takes_a_full_one_where_it_is_expected_to_cost_less(sizes, base):
    growth = ChainSummary(base_bytes=base, base_time=0)
    for size in sizes:
        growth = growth.after(size)
        full, more = base + growth.increment_bytes, (growth.increments + 1) * growth.last_bytes

        assert (choose_kind(policy("intermittent"), growth, 1, 0)[0] == "full") == (full <= more)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("full", ["full"] * 5), ("one-shot", ["full", *["increment"] * 4]), ("consecutive", ["full", *["increment"] * 4])],
)
def test_the_other_policies_are_as_their_names_say(name, kinds):
    assert run(policy(name), [5_000] * 5, 1_000) == kinds


@given(most=st.integers(1, 10))
def test_no_chain_is_longer_than_its_ceiling(most):
    kinds = run(policy("consecutive", max_chain=most), [1] * 40, 1_000_000)

    full = [number for number, kind in enumerate(kinds) if kind == "full"]
    assert all(after - before == most + 1 for before, after in pairwise(full))


def test_a_chain_that_would_take_too_long_to_restore_ends():
    limited = policy("consecutive", max_restore_s=2, restore_bytes_per_s=1_000)

    kinds = run(limited, [300] * 10, 1_000)

    assert kinds == ["full", *["increment"] * 3, "full", *["increment"] * 3, "full", "increment"]


def test_full_snapshots_come_on_schedule():
    assert run(policy("one-shot", base_every_s=180), [1] * 7, 1_000) == [
        "full", "increment", "increment", "full", "increment", "increment", "full",
    ]  # fmt: skip


@pytest.mark.parametrize(("restores", "bits"), [(0, 2), (1, 2), (2, 3), (3, 3), (4, 4), (20, 4), (21, 8), (500, 8)])
def test_bits_follow_the_expected_restores(restores, bits):
    assert bits_in_use("auto", restores, 0)[0] == bits


def test_more_restores_than_expected_fall_back_to_eight_bits():
    assert [bits_in_use("auto", 3, seen)[0] for seen in (0, 3, 4, 50)] == [3, 3, 8, 8]
    assert bits_in_use(2, 1, 99)[0] == 2
