from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dlrm_api.errors import SnapshotError
from dlrm_api.training import DenseOptimizerSpec
from dlrm_trainer.model.dense import DenseParameters

SPECS: list[dict[str, Any]] = [
    {"kind": "sgd", "learning_rate": 0.1},
    {"kind": "adagrad", "learning_rate": 0.1, "eps": 1e-8},
    {"kind": "adam", "learning_rate": 0.01, "eps": 1e-6, "beta1": 0.8, "beta2": 0.99},
]


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 1))


def dense_of(model: nn.Module, spec: dict[str, Any]) -> DenseParameters:
    return DenseParameters(model, DenseOptimizerSpec(**spec), torch.zeros(DenseParameters.elements(model)))


def train(model: nn.Module, dense: DenseParameters, steps: range) -> None:
    for step in steps:
        dense.zero_gradient()
        model(inputs(step)).square().mean().backward()
        dense.update(factor=1.0 / (1 + step))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(16, 5, generator=torch.Generator().manual_seed(step))


def peer(model: nn.Module, spec: dict[str, Any]) -> torch.optim.Optimizer:
    rate = spec["learning_rate"]
    if spec["kind"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=rate)
    if spec["kind"] == "adam":
        return torch.optim.Adam(model.parameters(), lr=rate, betas=(spec["beta1"], spec["beta2"]), eps=spec["eps"])
    return torch.optim.Adagrad(model.parameters(), lr=rate, eps=spec["eps"])


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_steps_are_those_of_torch_optim(spec: dict[str, Any]) -> None:
    ours, theirs = model_of(1), model_of(1)
    optimizer = peer(theirs, spec)

    train(ours, dense_of(ours, spec), range(20))
    for step in range(20):
        optimizer.zero_grad()
        theirs(inputs(step)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = spec["learning_rate"] * (1.0 / (1 + step))
        optimizer.step()

    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        if spec["kind"] == "adagrad":  # torch's square roots may be a bit off
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_steps_have_the_same_bits_on_one_and_two_threads(spec: dict[str, Any]) -> None:
    threads_before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 2):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        model = nn.Linear(1_000, 131)
        dense = dense_of(model, spec)
        for step in range(3):
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)))
            dense.update(factor=1.0)
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    torch.set_num_threads(threads_before)

    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_a_restored_optimizer_goes_on_bit_for_bit(spec: dict[str, Any]) -> None:
    whole, first, second = model_of(1), model_of(1), model_of(2)
    whole_dense, first_dense, second_dense = (dense_of(model, spec) for model in (whole, first, second))

    train(whole, whole_dense, range(20))
    train(first, first_dense, range(8))
    second_dense.restore(first_dense.arrays())
    train(second, second_dense, range(8, 20))

    expected, actual = whole_dense.arrays(), second_dense.arrays()
    assert expected.keys() == actual.keys()
    assert all(np.array_equal(expected[name], actual[name]) for name in expected)


def test_an_array_of_another_shape_or_name_is_refused_by_name() -> None:
    model = model_of(1)
    dense = dense_of(model, SPECS[1])
    arrays = dense.arrays()

    with pytest.raises(SnapshotError, match=r"parameter/0.bias is \(3,\) in the snapshot, \(7,\) here"):
        dense.restore(arrays | {"parameter/0.bias": np.zeros(3, np.float32)})
    with pytest.raises(SnapshotError, match=r"optimizer/0.bias/spam is in the snapshot alone"):
        dense.restore(arrays | {"optimizer/0.bias/spam": np.zeros(3, np.float32)})


def test_parameters_that_are_not_finite_are_named() -> None:
    model = model_of(1)
    dense = dense_of(model, SPECS[0])

    with torch.no_grad():
        next(model.parameters())[0, 0] = float("inf")

    assert dense.bad_parameters() == ["0.weight"]
