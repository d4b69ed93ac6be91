from __future__ import annotations

import numpy as np
import pytest
import torch

from dlrm_api.model import ModelSpec
from dlrm_trainer.model.dlrm import DLRM, MLP, build_model, global_mean_loss

TABLES = [{"name": name, "rows": 10, "dim": 4} for name in "abc"]


def spec(**changes: object) -> ModelSpec:
    document = {"denseFeatures": ["x", "y"], "bottomMlp": [6, 4], "topMlp": [5, 1], "tables": TABLES} | changes
    return ModelSpec.model_validate(document)


def arrays(model: DLRM) -> dict[str, np.ndarray]:
    return {name: value.detach().double().numpy() for name, value in model.named_parameters()}


def mlp(parameters: dict[str, np.ndarray], name: str, layers: int, x: np.ndarray, last_relu: bool) -> np.ndarray:
    for layer in range(layers):
        x = parameters[f"{name}.layers.{layer}.weight"] @ x + parameters[f"{name}.layers.{layer}.bias"]
        if last_relu or layer < layers - 1:
            x = np.maximum(x, 0)
    return x


def inputs(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, 2, generator=generator), torch.randn(samples, 12, generator=generator)


def test_dot_interaction_equals_a_loop_over_samples_and_pairs() -> None:
    model = build_model(spec(), seed=7)
    dense, features = inputs(9)
    parameters = arrays(model)

    logits = model(dense, features)

    for sample in range(9):
        bottom = mlp(parameters, "bottom", 2, dense[sample].double().numpy(), True)
        vectors = [bottom, *features[sample].double().numpy().reshape(3, 4)]
        pairs = [vectors[i] @ vectors[j] for i in range(4) for j in range(i)]
        expected = mlp(parameters, "top", 2, np.concatenate((bottom, pairs)), False)
        assert logits[sample].item() == pytest.approx(expected[0], rel=1e-5, abs=1e-6)


def test_cross_interaction_equals_a_loop_over_samples_and_layers() -> None:
    model = build_model(spec(interaction="dcn", crossLayers=2, crossRank=3), seed=7)
    dense, features = inputs(5)
    parameters = arrays(model)

    logits = model(dense, features)

    for sample in range(5):
        bottom = mlp(parameters, "bottom", 2, dense[sample].double().numpy(), True)
        start = x = np.concatenate((bottom, features[sample].double().numpy()))
        for layer in range(2):
            down, up = parameters[f"interaction.down.{layer}.weight"], parameters[f"interaction.up.{layer}.weight"]
            x = start * (up @ (down @ x) + parameters[f"interaction.up.{layer}.bias"]) + x
        expected = mlp(parameters, "top", 2, x, False)
        assert logits[sample].item() == pytest.approx(expected[0], rel=1e-5, abs=1e-6)


def test_mlp_in_bf16_stays_near_fp32_and_gives_float32_gradients() -> None:
    torch.manual_seed(2)
    half, full = (MLP(24, [32, 16], last_relu=True, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    half.load_state_dict(full.state_dict())
    x, incoming = torch.randn(50, 24).requires_grad_(), torch.randn(50, 16)

    outputs = [model(x) for model in (half, full)]
    results = [
        torch.autograd.grad(out, [x, *model.parameters()], incoming)
        for out, model in zip(outputs, (half, full), strict=True)
    ]

    near, exact = (each.detach() for each in outputs)
    assert near.dtype == torch.float32
    assert float((near - exact).norm() / exact.norm()) < 0.02
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        # A ReLU may be open on one side only.
        assert float((ours - theirs).norm() / theirs.norm()) < 0.2


@pytest.mark.parametrize("interaction", ["dot", "dcn"])
def test_a_model_without_dense_features_has_no_bottom_mlp(interaction: str) -> None:
    model = build_model(spec(denseFeatures=[], bottomMlp=[], interaction=interaction), seed=7)

    logits = model(torch.zeros(4, 0), inputs(4)[1])

    assert model.bottom is None
    assert logits.shape == (4,)


def test_dcn_takes_tables_of_mixed_widths() -> None:
    tables = [{"name": "a", "rows": 5, "dim": 4}, {"name": "b", "rows": 5, "dim": 12}]

    model = build_model(spec(tables=tables, interaction="dcn"), seed=7)

    assert model.interaction.width == 4 + 4 + 12


def test_projected_tables_enter_the_dot_interaction_through_their_matrix() -> None:
    tables = [
        {"name": "wide.ids", "rows": 5, "dim": 12, "project": True},
        {"name": "b", "rows": 5, "dim": 4},
        {"name": "narrow", "rows": 5, "dim": 8, "project": True, "features": ["x", "y"]},
    ]
    model = build_model(spec(tables=tables, bottomMlp=[6, 4]), seed=7)
    generator = torch.Generator().manual_seed(1)
    dense, features = (torch.randn(9, columns, generator=generator).requires_grad_() for columns in (2, 32))

    logits = model(dense, features)

    wide, b, narrow = torch.split(features, [12, 4, 16], dim=1)
    first, last = (model.get_parameter(f"projections.{number}.weight") for number in (0, 2))
    vectors = [model.bottom_out(dense), wide @ first.T, b, narrow[:, :8] @ last.T, narrow[:, 8:] @ last.T]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(5) for j in range(i)]
    expected = model.top(torch.cat((vectors[0], torch.stack(pairs, dim=1)), dim=1)).squeeze(1)
    assert torch.allclose(logits, expected, atol=1e-6)
    wanted = [features, *model.parameters()]
    for ours, theirs in zip(*(torch.autograd.grad(out.sum(), wanted) for out in (logits, expected)), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    assert model(torch.zeros(0, 2), torch.zeros(0, 32)).shape == (0,)


def test_initial_weights_are_a_function_of_the_seed_alone() -> None:
    torch.manual_seed(99)
    first = arrays(build_model(spec(), seed=7))
    torch.manual_seed(100)
    again, other = arrays(build_model(spec(), seed=7)), arrays(build_model(spec(), seed=8))

    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["top.layers.0.weight"], other["top.layers.0.weight"])


def test_shares_of_the_loss_add_up_to_the_mean_over_the_global_batch() -> None:
    logits, labels = torch.randn(10, dtype=torch.float64), torch.randint(0, 2, (10,)).double()

    parts = [global_mean_loss(logits[cut], labels[cut], 10) for cut in (slice(0, 3), slice(3, 3), slice(3, 10))]

    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert sum(part.item() for part in parts) == pytest.approx(expected.item(), rel=1e-12)
