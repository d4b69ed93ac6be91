from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dlrm_trainer.model.dense import Layers
from dlrm_trainer.model.dlrm import DotInteraction, Pairs


def random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).requires_grad_()


def pairs_in_torch(bottom: Tensor | None, features: Tensor, dim: int) -> Tensor:
    """Float64, all products by one matrix product."""
    vectors = features.double() if bottom is None else torch.cat((bottom.double(), features.double()), dim=1)
    vectors = vectors.view(len(features), vectors.shape[1] // dim, dim)
    row, column = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))[:, row, column]
    return products if bottom is None else torch.cat((bottom.double(), products), dim=1)


@settings(max_examples=12)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0, 1, 5, 200]),
    st.sampled_from([(1, 4, True), (2, 8, False), (12, 12, True), (9, 8, False), (14, 80, True)]),
)
def test_pairs_and_their_gradients_are_those_of_a_float64_matrix_product(
    seed: int, samples: int, model: tuple[int, int, bool]
) -> None:
    generator, (features, dim, has_bottom) = torch.Generator().manual_seed(seed), model
    bottom = random(generator, samples, dim) if has_bottom else None
    rows = random(generator, samples, features * dim)
    inputs = [each for each in (bottom, rows) if each is not None]

    found = Pairs.apply(bottom, rows, dim)
    expected = pairs_in_torch(bottom, rows, dim)
    incoming = torch.randn(found.shape, generator=generator)
    gradients = torch.autograd.grad(found, inputs, incoming)
    expected_gradients = torch.autograd.grad(expected, inputs, incoming.double())

    assert found.shape == (samples, DotInteraction(features, dim, has_bottom).width)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=1e-5, atol=1e-5)


def test_pairs_have_the_same_bits_on_one_and_two_threads() -> None:
    threads_before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        generator = torch.Generator().manual_seed(3)
        bottom, rows = random(generator, 500, 8), random(generator, 500, 9 * 8)
        out = Pairs.apply(bottom, rows, 8)
        results.append([out.detach().clone(), *torch.autograd.grad(out, [bottom, rows], out.detach())])
    torch.set_num_threads(threads_before)

    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def linear(widths: list[int], generator: torch.Generator) -> list[Tensor]:
    return [
        each
        for before, after in pairwise(widths)
        for each in (random(generator, after, before), random(generator, after))
    ]


def layers_in_torch(x: Tensor, last_relu: bool, parameters: list[Tensor]) -> Tensor:
    for number in range(0, len(parameters), 2):
        x = nn.functional.linear(x, parameters[number], parameters[number + 1])
        if last_relu or number + 2 < len(parameters):
            x = torch.relu(x)
    return x


@pytest.mark.parametrize("last_relu", [False, True])
@pytest.mark.parametrize("needs_input", [False, True])
@pytest.mark.parametrize("widths", [[13, 32, 16], [19, 5], [7, 33, 16, 1]])
@pytest.mark.parametrize("samples", [0, 11])
def test_layers_and_their_gradients_are_those_of_torch(
    last_relu: bool, needs_input: bool, widths: list[int], samples: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    parameters = linear(widths, generator)
    x = random(generator, samples, widths[0]).detach().requires_grad_(needs_input)
    wanted = [*parameters, *([x] if needs_input else [])]

    relus = (True,) * (len(widths) - 2) + (last_relu,)
    found = Layers.apply(x, relus, torch.float32, *parameters)
    expected = layers_in_torch(x, last_relu, parameters)
    incoming = torch.randn(found.shape, generator=generator)
    kept = incoming.clone()
    gradients = torch.autograd.grad(found, wanted, incoming)

    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, wanted, incoming), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(incoming, kept)


def test_layers_in_bf16_stay_near_those_in_fp32_and_give_float32_gradients() -> None:
    generator = torch.Generator().manual_seed(2)
    parameters, x = linear([24, 32, 16], generator), random(generator, 50, 24)

    outputs = [Layers.apply(x, (True, True), dtype, *parameters) for dtype in (torch.bfloat16, torch.float32)]
    incoming = torch.randn(50, 16, generator=generator)
    gradients = [torch.autograd.grad(each, [x, *parameters], incoming) for each in outputs]
    half, full = (each.detach() for each in outputs)

    assert half.dtype == torch.float32
    assert float((half - full).norm() / full.norm()) < 0.02
    for ours, exact in zip(*gradients, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - exact).norm() / exact.norm()) < 0.2  # where a ReLU is on one side alone


def test_layers_without_a_bias_or_a_relu_between_them_are_products_of_matrices() -> None:
    generator = torch.Generator().manual_seed(4)
    x, down, up, bias = (random(generator, *shape) for shape in ((30, 24), (8, 24), (24, 8), (24,)))

    found = Layers.apply(x, (False, False), torch.float32, down, None, up, bias)
    expected = x @ down.t() @ up.t() + bias
    incoming = torch.randn(found.shape, generator=generator)
    gradients = [torch.autograd.grad(each, [x, down, up, bias], incoming) for each in (found, expected)]

    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)
