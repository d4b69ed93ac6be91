from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.tiers import device_extra_slots

SAMPLES = st.integers(1, 10**6)


@given(
    rows=st.integers(1, 10**9), share=st.floats(0, 1), max_lookups=st.integers(1, 10**4), samples=SAMPLES, more=SAMPLES
)
def test_scratch_slots_of_a_device_hold_two_mean_batches_and_at_most_two_of_the_longest(
    rows: int, share: float, max_lookups: int, samples: int, more: int
) -> None:
    found = device_extra_slots(rows, share * max_lookups, max_lookups, samples)

    assert min(rows, 2 * share * max_lookups * samples) <= found <= min(rows, 2 * max_lookups * samples)
    assert found <= device_extra_slots(rows, share * max_lookups, max_lookups, samples + more)


def test_scratch_slots_of_a_device_follow_the_mean_lookups_rather_than_the_most() -> None:
    mean, most = (device_extra_slots(10**8, lookups, 100, 65_536) for lookups in (5, 100))

    assert mean < most / 10
