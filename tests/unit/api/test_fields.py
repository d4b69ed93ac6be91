"""Bytes and durations: what Kubernetes users write comes back unchanged in meaning."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.base import ApiModel, read
from dlrm_api.errors import InvalidSpecError
from dlrm_api.fields import Bytes, Duration

FACTORS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50,
}  # fmt: skip


class Amounts(ApiModel):
    """Both kinds of quantity."""

    bytes: Bytes = 0
    time: Duration = "0s"  # type: ignore[assignment]


@given(st.integers(0, 1_000), st.sampled_from(sorted(FACTORS)))
def test_bytes_with_a_suffix_are_the_number_times_the_factor(number: int, suffix: str) -> None:
    assert read(Amounts, {"bytes": f"{number}{suffix}"}).bytes == number * FACTORS[suffix]


@given(st.integers(0, 1_000), st.integers(0, 999), st.sampled_from(sorted(FACTORS)))
def test_bytes_with_a_fraction_are_rounded_to_whole_bytes(whole: int, thousandths: int, suffix: str) -> None:
    exact = (whole + Fraction(thousandths, 1_000)) * FACTORS[suffix]

    found = read(Amounts, {"bytes": f"{whole}.{thousandths:03}{suffix}"}).bytes

    assert abs(found - exact) <= Fraction(1, 2)


@given(st.integers(0, 2**60))
def test_bytes_survive_a_round_trip_through_json(size: int) -> None:
    text = Amounts(bytes=size).model_dump_json()

    assert read(Amounts, json.loads(text)).bytes == size


@given(st.integers(0, 9), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_a_duration_is_the_sum_of_its_parts(days: int, hours: int, minutes: int, seconds: int) -> None:
    text = f"{days}d{hours}h{minutes}m{seconds}s"

    assert read(Amounts, {"time": text}).time == days * 86_400 + hours * 3_600 + minutes * 60 + seconds


@given(st.integers(0, 10 * 365 * 86_400))
def test_durations_survive_a_round_trip_through_json(seconds: int) -> None:
    text = Amounts(time=float(seconds)).model_dump_json()

    assert read(Amounts, json.loads(text)).time == seconds


@pytest.mark.parametrize(
    "value", ["", "16 Gi", "Gi", "100m", "1e", "-1", "16GiB", "0x10", True, 1.5, [], "9999P", "1e99"]
)
def test_invalid_byte_quantities_are_refused(value: object) -> None:
    with pytest.raises(InvalidSpecError, match=r"^bytes: "):
        read(Amounts, {"bytes": value})


@pytest.mark.parametrize("value", ["", "10", "1m30", "s", "1.5h", "30s1m", "-5s", "5 m", 30, 1.5, True, "99999d"])
def test_invalid_durations_are_refused(value: object) -> None:
    with pytest.raises(InvalidSpecError, match=r"^time: "):
        read(Amounts, {"time": value})


def test_python_code_may_say_seconds_as_a_number() -> None:
    assert Amounts(time=90.0).time == 90
