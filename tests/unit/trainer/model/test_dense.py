from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dlrm_api.errors import SnapshotError
from dlrm_api.training import DenseOptimizerSpec
from dlrm_trainer.compute_device import HOST
from dlrm_trainer.model import dense as dense_module
from dlrm_trainer.model.dense import DenseParameters, Processor, allow_tf32, linear, processor_maker, product_dtype


@pytest.fixture
def products() -> Iterator[Any]:
    """Return torch's settings of a GPU's products; they are as before afterwards."""
    kept = torch.backends.cuda.matmul.fp32_precision
    yield torch.backends.cuda.matmul
    torch.backends.cuda.matmul.fp32_precision = kept


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "ieee"), ("tf32", "tf32"), ("bf16", "ieee")])
def test_gpus_multiply_in_tf32_only_where_the_model_says_so(products: Any, precision: str, expected: str) -> None:
    products.fp32_precision = "ieee" if expected == "tf32" else "tf32"

    allow_tf32(precision, HOST)
    unchanged = products.fp32_precision != expected
    allow_tf32(precision, torch.device("cuda", 0))

    assert unchanged
    assert products.fp32_precision == expected
    assert product_dtype(precision, torch.device("cuda", 0)) == (
        torch.bfloat16 if precision == "bf16" else torch.float32
    )


MAKERS = {"MKL": "GenuineIntel", "oneDNN": "AuthenticAMD"}


def use_library(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """Make this process take its products to one library."""
    processor = Processor(maker=MAKERS[library], has_avx512=True, has_avx512_bf16=False, has_amx=False)
    monkeypatch.setattr(dense_module, "this_processor", lambda: processor)


def matrix(generator: torch.Generator, rows: int, columns: int, layout: str) -> Tensor:
    whole = torch.randn(rows + 3, columns + 5, generator=generator)
    if layout == "gaps between rows":
        return whole[:rows, :columns]
    part = whole[:rows, :columns].contiguous()
    return part.t().contiguous().t() if layout == "column by column" else part


def apply_linear(layer: nn.Linear, x: Tensor, incoming: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the output and the gradients of x and of the parameters."""
    x = x.detach().requires_grad_()
    out = linear(x, layer, dtype)
    return [out.detach(), *torch.autograd.grad(out, [x, *layer.parameters()], incoming.to(dtype))]


@settings(max_examples=40)
@given(
    st.tuples(st.sampled_from([0, 1, 7, 300]), st.sampled_from([1, 13, 48]), st.sampled_from([1, 16, 33])),
    st.sampled_from(sorted(MAKERS)),
    st.sampled_from(["row by row", "column by column", "gaps between rows"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_linear_equals_float64_in_every_library_layout_and_type(
    sizes: tuple[int, int, int], library: str, layout: str, dtype: torch.dtype, bias: bool
) -> None:
    samples, before, after = sizes
    generator = torch.Generator().manual_seed(sum(sizes))
    torch.manual_seed(sum(sizes))
    layer = nn.Linear(before, after, bias=bias)
    x, incoming = matrix(generator, samples, before, layout), matrix(generator, samples, after, layout)

    with pytest.MonkeyPatch.context() as patched:
        use_library(patched, library)
        found = apply_linear(layer, x, incoming, dtype)

    expected = apply_linear(layer.double(), x.double(), incoming.double(), torch.float64)
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.2}
    assert [each.dtype for each in found] == [dtype, *[torch.float32] * (len(found) - 1)]
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), exact, **near)


@pytest.mark.parametrize("library", sorted(MAKERS))
def test_linear_has_the_same_bits_each_time(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch, library)
    torch.manual_seed(1)
    layer, x, incoming = nn.Linear(61, 96), torch.randn(700, 61), torch.randn(700, 96)

    first, *others = (apply_linear(layer, x, incoming, torch.float32) for _ in range(3))

    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("maker", "has", "in_bf16", "by_onednn"),
    [
        ("AuthenticAMD", {"avx512", "avx512_bf16"}, True, True),
        ("AuthenticAMD", {"avx512"}, False, True),
        ("AuthenticAMD", set(), False, False),
        ("GenuineIntel", {"avx512", "avx512_bf16", "amx"}, True, False),
        ("GenuineIntel", {"avx512", "avx512_bf16"}, False, False),
        ("", set(), False, False),
    ],
)
def test_type_and_library_of_products_follow_the_processor(
    maker: str, has: set[str], in_bf16: bool, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = Processor(maker=maker, **{f"has_{name}": name in has for name in ("avx512", "avx512_bf16", "amx")})
    monkeypatch.setattr(dense_module, "this_processor", lambda: processor)

    assert product_dtype("bf16", HOST) == (torch.bfloat16 if in_bf16 else torch.float32)
    assert product_dtype("fp32", HOST) == torch.float32
    assert product_dtype("bf16", torch.device("cuda")) == torch.bfloat16
    assert processor.prefers_onednn == by_onednn


def test_processor_maker_is_read_from_cpuinfo() -> None:
    assert processor_maker("processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu\n") == "AuthenticAMD"
    assert processor_maker("processor\t: 0\nCPU part\t: 0xd40\n") == ""


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
        return torch.optim.Adam(
            model.parameters(), lr=rate, betas=(spec["beta1"], spec["beta2"]), eps=spec["eps"], fused=True
        )
    return torch.optim.Adagrad(model.parameters(), lr=rate, eps=spec["eps"], fused=True)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_steps_equal_those_of_torch_optim(spec: dict[str, Any]) -> None:
    ours, theirs = model_of(1), model_of(1)
    optimizer = peer(theirs, spec)

    train(ours, dense_of(ours, spec), range(20))
    for step in range(20):
        optimizer.zero_grad()
        theirs(inputs(step)).square().mean().backward()
        optimizer.param_groups[0]["lr"] = spec["learning_rate"] * (1.0 / (1 + step))
        optimizer.step()

    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        # The last elements of a tensor are computed without vectors, and ours are in one tensor.
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


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


def test_state_is_stored_under_the_names_of_the_format() -> None:
    slots = {"sgd": set(), "adagrad": {"sum"}, "adam": {"first", "second", "steps"}}

    for spec in SPECS:
        arrays = dense_of(model_of(1), spec).arrays()

        stored = {name.removeprefix("optimizer/0.bias/") for name in arrays if name.startswith("optimizer/0.bias/")}
        assert stored == slots[spec["kind"]]
        assert all(array.dtype == (np.int64 if "steps" in name else np.float32) for name, array in arrays.items())


@pytest.mark.slow
def test_optimizers_load_no_compiler() -> None:
    code = """
import sys, torch
from dlrm_api.training import DenseOptimizerSpec
from dlrm_trainer.model.dense import DenseOptimizer
for kind in ("sgd", "adagrad", "adam"):
    parameters = torch.ones(3)
    DenseOptimizer(DenseOptimizerSpec(kind=kind), parameters).step(parameters, torch.ones(3), 0.1)
assert "torch._dynamo" not in sys.modules
"""

    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec["kind"])
def test_restored_optimizer_continues_bit_for_bit(spec: dict[str, Any]) -> None:
    whole, first, second = model_of(1), model_of(1), model_of(2)
    whole_dense, first_dense, second_dense = (dense_of(model, spec) for model in (whole, first, second))

    train(whole, whole_dense, range(20))
    train(first, first_dense, range(8))
    second_dense.restore(first_dense.arrays())
    train(second, second_dense, range(8, 20))

    expected, actual = whole_dense.arrays(), second_dense.arrays()
    assert expected.keys() == actual.keys()
    assert all(np.array_equal(expected[name], actual[name]) for name in expected)


def test_array_of_another_shape_or_name_is_refused_by_name() -> None:
    model = model_of(1)
    dense = dense_of(model, SPECS[1])
    arrays = dense.arrays()

    with pytest.raises(SnapshotError, match=r"parameter/0\.bias"):
        dense.restore(arrays | {"parameter/0.bias": np.zeros(3, np.float32)})
    with pytest.raises(SnapshotError, match=r"optimizer/0\.bias/spam"):
        dense.restore(arrays | {"optimizer/0.bias/spam": np.zeros(3, np.float32)})


def test_non_finite_parameters_are_named() -> None:
    model = model_of(1)
    dense = dense_of(model, SPECS[0])

    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")

    assert dense.largest() == (float("inf"), "dense parameter 0.weight")
