from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_api.errors import InvalidSpecError
from dlrm_api.training import RowOptimizerSpec, RowRegularizerSpec
from dlrm_kernels.row_updates import step_keys, table_key
from dlrm_testing.trainer import row_rules
from dlrm_testing.trainer.bags import bags_of, tables_of
from dlrm_trainer.embedding import gpu
from dlrm_trainer.embedding.gpu import DeviceKernel, Rounding, random_bits, round_to_half
from dlrm_trainer.embedding.table_batch import HostKernel, TableBatch

SUBNORMAL = 2.0**-24
"""The least fp16 number above zero."""


def bits_for(seed: int, table: str, step: int, rows: list[int], columns: int) -> torch.Tensor:
    keys = torch.from_numpy(step_keys(np.array([table_key(seed, table)]), step).view(np.int64))
    count = len(rows)
    rounding = Rounding(
        keys=keys.expand(count), rows=torch.tensor(rows), first_column=torch.zeros(count, dtype=torch.int64)
    )
    return random_bits(rounding, columns)


def ups(value: float) -> int:
    """How many of all 2**16 random bits round ``value`` away from zero."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    results = round_to_half(torch.full((2**16,), value), bits).double().abs()
    low, high = float(results.min()), float(results.max())
    if low == high:
        return 0
    assert set(results.tolist()) == {low, high}
    assert np.nextafter(np.float16(low), np.float16(np.inf)) == np.float16(high)
    return int((results == high).sum())


@settings(max_examples=60)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    step=st.integers(0, 2**40),
    rows=st.lists(st.integers(0, 2**40 - 1), min_size=1, max_size=3),
    quads=st.integers(1, 3),
)
def test_the_random_bits_are_the_hash_that_the_docstring_specifies(
    seed: int, step: int, rows: list[int], quads: int
) -> None:
    bits = bits_for(seed, "Ünï", step, rows, 4 * quads)

    expected = [[row_rules.bits_of(seed, "Ünï", step, row, column) for column in range(4 * quads)] for row in rows]
    assert bits.tolist() == expected


def test_the_random_bits_stay_what_they_were() -> None:
    assert bits_for(42, "users", 0, [0], 8).tolist() == [[54986, 61554, 43480, 57092, 50023, 46771, 9361, 57501]]
    assert bits_for(42, "users", 7, [2**40 - 1], 8).tolist() == [
        [56028, 15805, 19155, 37939, 25506, 1774, 31227, 57804]
    ]


@pytest.mark.parametrize(
    "other",
    [
        ("seed", 43, "users", 7, 3),
        ("table", 42, "items", 7, 3),
        ("step", 42, "users", 8, 3),
        ("row", 42, "users", 7, 4),
    ],
)
def test_the_random_bits_change_with_everything_that_they_depend_on(other: tuple[str, int, str, int, int]) -> None:
    _, seed, table, step, row = other

    equal = bits_for(seed, table, step, [row], 1_024) == bits_for(42, "users", 7, [3], 1_024)

    assert int(equal.sum()) < 4


@settings(max_examples=300)
@given(value=st.floats(width=32, min_value=-70_000, max_value=70_000), bits=st.integers(0, 2**16 - 1))
def test_every_value_and_all_bits_round_as_integers_of_any_size_say(value: float, bits: int) -> None:
    result = round_to_half(torch.tensor([value]), torch.tensor([bits], dtype=torch.int32).to(torch.uint16))

    expected = row_rules.rounded(value, bits)
    assert float(result) == expected
    assert math.copysign(1, float(result)) == math.copysign(1, value)


@given(bits=st.integers(0, 2**16 - 1))
@settings(max_examples=10)
def test_numbers_of_fp16_stay_what_they_are(bits: int) -> None:
    every = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    finite = every[every.isfinite()]

    result = round_to_half(finite.float(), torch.full(finite.shape, bits, dtype=torch.int32).to(torch.uint16))

    assert torch.equal(result.view(torch.int16), finite.view(torch.int16))


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(113, 141), st.integers(0, 2**23 - 1), st.booleans())
def test_over_all_bits_the_mean_of_a_normal_number_is_itself(exponent: int, mantissa: int, negative: bool) -> None:
    value = math.ldexp(1 + mantissa / 2**23, exponent - 127) * (-1 if negative else 1)

    share = (mantissa % 2**13) / 2**13

    assert ups(value) == share * 2**16


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.0 + 2**-11, 2**15),  # half-way from 1 to its neighbour
        (1.0 + 2**-12, 2**14),
        (2.0**-14 + 2.0**-25, 2**15),
        (2.0**-14 - 2.0**-25, 2**15),  # the greatest subnormal, and half of a step more
        (SUBNORMAL / 2, 2**15),
        (SUBNORMAL / 2**16, 1),
        (SUBNORMAL / 2**17, 0),
        (-5.25 * SUBNORMAL, 2**14),
        (SUBNORMAL * (1 + 2**-20), 0),
        (2.0**-149, 0),
    ],
)
def test_near_zero_the_share_of_values_rounded_up_is_exact_to_16_bits(value: float, expected: int) -> None:
    assert ups(value) == expected


def test_what_does_not_fit_becomes_an_infinity_and_nothing_else_does() -> None:
    values = torch.tensor([65_504.0, 65_520.0, 65_520.0, -65_535.0, 65_536.0, -1e30, math.inf, -math.inf, math.nan])
    bits = torch.tensor([0, 0, 2**15, 0, 2**16 - 1, 0, 5, 5, 5], dtype=torch.int32).to(torch.uint16)

    result = round_to_half(values, bits)

    expected = [65_504.0, math.inf, 65_504.0, -math.inf, math.inf, -math.inf, math.inf, -math.inf]
    assert result[:-1].tolist() == expected
    assert result[-1].isnan()


def test_over_many_steps_the_mean_of_a_rounded_value_is_the_value() -> None:
    steps, columns = 400, 256
    values = torch.linspace(1e-7, 3.0, columns) * torch.tensor([1.0, -1.0]).repeat(columns // 2)

    results = torch.stack(
        [round_to_half(values[None], bits_for(1, "t", step, [9], columns)).double()[0] for step in range(steps)]
    )

    exponents = (torch.frexp(values.double().abs())[1] - 1).clamp(min=-14)
    quantum = torch.ldexp(torch.ones(columns, dtype=torch.float64), exponents - 10)
    score = (results.mean(dim=0) - values.double()) / (quantum / 2 / math.sqrt(steps))
    assert float(score.abs().max()) < 4.5
    assert abs(float(score.mean())) * math.sqrt(columns) < 4.5
    assert not torch.equal(results[0], results[1])


def test_neighbouring_rows_columns_and_steps_are_not_correlated() -> None:
    bits = torch.stack([bits_for(0, "t", step, list(range(64)), 64).double() for step in range(64)])  # (64, 64, 64)
    centred = (bits - (2**16 - 1) / 2) / (2**16 / math.sqrt(12))

    for dim in range(3):
        pairs = centred.narrow(dim, 0, 63) * centred.narrow(dim, 1, 63)
        assert abs(float(pairs.mean())) * math.sqrt(pairs.numel()) < 4.5
    assert abs(float(centred.mean())) * math.sqrt(centred.numel()) < 4.5


@pytest.mark.parametrize("kind", ["rowwise-adagrad", "adam"])
def test_regularized_rows_agree_with_the_hosts(kind: str) -> None:
    tables = tables_of([(30, 16), (20, 16), (9, 4)], RowOptimizerSpec.model_validate({"kind": kind}))
    batches = [TableBatch(tables, kernel) for kernel in (HostKernel(tables), DeviceKernel(tables))]
    generator = torch.Generator().manual_seed(3)
    first = [torch.randn(shape, generator=generator) for shape in tables.shapes]
    lengths = torch.ones(3, 40, dtype=torch.int32)
    ids = torch.cat([torch.randint(0, rows, (40,), generator=generator) for rows, _ in tables.shapes])
    gradient = torch.randn(40, 36, generator=generator)

    for batch in batches:
        for weight, start in zip(batch.weights, first, strict=True):
            weight.copy_(start)
        pooled = batch.lookup(bags_of(ids, lengths), updates=True)
        batch.update(pooled, gradient, 0.02, regularizer=RowRegularizerSpec(bits=3, strength=0.5, last_steps=1))

    for ours, theirs in zip(batches[0].weights, batches[1].weights, strict=True):
        np.testing.assert_allclose(theirs.numpy(), ours.numpy(), atol=1e-5)


def test_a_package_without_kernels_for_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "made_for_gpus", lambda: False)
    tables = tables_of([(10, 4)], RowOptimizerSpec(), device=torch.device("cuda", 0))

    with pytest.raises(InvalidSpecError, match=r"plan\.device: .*fbgemm-gpu-cpu has no .* GPUs; install fbgemm-gpu"):
        DeviceKernel(tables)
