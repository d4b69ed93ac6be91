from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_kernels.interaction import dot_gradients, dot_products

Floats = NDArray[np.float32]


def draw(seed: int, samples: int, features: int, dim: int, has_bottom: bool) -> tuple[Floats | None, Floats, Floats]:
    """Return a bottom, features, and an empty output."""
    generator, vectors = np.random.default_rng(seed), features + has_bottom
    bottom = generator.normal(size=(samples, dim)).astype(np.float32) if has_bottom else None
    rows = generator.normal(size=(samples, features * dim)).astype(np.float32)
    return bottom, rows, np.empty((samples, has_bottom * dim + vectors * (vectors - 1) // 2), np.float32)


def reference(
    bottom: Floats | None, features: Floats, gradient: Floats, dim: int
) -> tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any]]:
    """Return products and gradients in float64, from all products of all vectors."""
    inputs = features if bottom is None else np.concatenate((bottom, features), axis=1)
    own = 0 if bottom is None else dim
    x = inputs.astype(np.float64).reshape(len(features), inputs.shape[1] // dim, dim)
    row, column = np.tril_indices(x.shape[1], -1)
    products = np.concatenate((inputs[:, :own], (x @ x.transpose(0, 2, 1))[:, row, column]), axis=1)
    square = np.zeros((len(features), x.shape[1], x.shape[1]))
    square[:, row, column] = square[:, column, row] = gradient[:, own:]
    to_all = (square @ x).reshape(inputs.shape)
    return products, to_all[:, :own] + gradient[:, :own] if own else None, to_all[:, own:]


@pytest.mark.slow
@settings(max_examples=12)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0, 1, 5, 200]),
    st.sampled_from([(1, 4, True), (2, 8, False), (12, 12, True), (9, 8, False), (14, 80, True)]),
)
def test_products_and_gradients_equal_those_of_numpy(seed: int, samples: int, model: tuple[int, int, bool]) -> None:
    bottom, features, out = draw(seed, samples, *model)
    gradient = np.random.default_rng(seed + 1).normal(size=out.shape).astype(np.float32)
    to_bottom, to_features = None if bottom is None else np.empty_like(bottom), np.empty_like(features)

    dot_products(bottom, features, out, model[1], 2)
    dot_gradients(bottom, features, gradient, to_bottom, to_features, model[1], 2)

    expected = reference(bottom, features, gradient, model[1])
    for ours, exact in zip((out, to_bottom, to_features), expected, strict=True):
        if exact is not None:
            np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    bottom, features, out = draw(3, 500, 9, 8, True)
    assert bottom is not None
    results = []

    for count in (1, threads):
        found = np.empty_like(out), np.empty_like(bottom), np.empty_like(features)
        dot_products(bottom, features, found[0], 8, count)
        dot_gradients(bottom, features, found[0], found[1], found[2], 8, count)
        results.append(found)

    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))
