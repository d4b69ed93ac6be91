from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm_trainer.compute_device import HOST
from dlrm_trainer.model import dense
from dlrm_trainer.model.dense import Processor, maker_of

MAKES = {
    library: Processor(maker=maker, has_avx512=True, has_dot_products=False, has_tiles=False)
    for library, maker in (("torch's choice", "GenuineIntel"), ("oneDNN", "AuthenticAMD"))
}
SIZES = st.tuples(st.sampled_from([0, 1, 7, 300]), st.sampled_from([1, 13, 48]), st.sampled_from([1, 16, 33]))


def matrix(generator: torch.Generator, rows: int, columns: int, layout: str, dtype: torch.dtype) -> Tensor:
    whole = torch.randn(rows + 3, columns + 5, generator=generator).to(dtype)
    if layout == "gaps between rows":
        return whole[:rows, :columns]
    part = whole[:rows, :columns].contiguous()
    return part.t().contiguous().t() if layout == "column by column" else part


@settings(max_examples=40)
@given(
    SIZES,
    st.sampled_from(sorted(MAKES)),
    st.sampled_from(["row by row", "column by column", "gaps between rows"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
def test_products_are_those_of_float64_whatever_the_library_the_layout_and_the_type(
    sizes: tuple[int, int, int], library: str, layout: str, dtype: torch.dtype, relu: bool
) -> None:
    samples, before, after = sizes
    generator = torch.Generator().manual_seed(samples + before + after)
    x = matrix(generator, samples, before, layout, dtype)
    gradient = matrix(generator, samples, after, layout, dtype)
    weight, bias = matrix(generator, after, before, layout, dtype), torch.randn(after, generator=generator).to(dtype)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(dense, "this_processor", lambda: MAKES[library])
        found = [
            dense.affine(x, weight, bias, relu),
            dense.input_gradient(gradient, weight),
            dense.weight_gradient(gradient, x),
        ]

    outputs = x.double() @ weight.double().t() + bias.double()
    expected = [
        outputs.relu() if relu else outputs,
        gradient.double() @ weight.double(),
        gradient.double().t() @ x.double(),
    ]
    near = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 0.2}
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, **near)


@pytest.mark.parametrize("library", sorted(MAKES))
def test_products_have_the_same_bits_each_time(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "this_processor", lambda: MAKES[library])
    results = []
    for _ in range(3):
        generator = torch.Generator().manual_seed(1)
        x, gradient = torch.randn(700, 61, generator=generator), torch.randn(700, 96, generator=generator)
        weight, bias = torch.randn(96, 61, generator=generator), torch.randn(96, generator=generator)
        results.append(
            (
                dense.affine(x, weight, bias, True),
                dense.input_gradient(gradient, weight),
                dense.weight_gradient(gradient, x),
            )
        )

    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(
    ("maker", "has", "in_bf16", "by_onednn"),
    [
        ("AuthenticAMD", {"avx512", "dot_products"}, True, True),
        ("AuthenticAMD", {"avx512"}, False, True),
        ("AuthenticAMD", set(), False, False),
        ("GenuineIntel", {"avx512", "dot_products", "tiles"}, True, False),
        ("GenuineIntel", {"avx512", "dot_products"}, False, False),
        ("", set(), False, False),
    ],
)
def test_a_job_is_computed_in_bf16_and_by_onednn_where_that_was_measured_to_be_faster(
    maker: str, has: set[str], in_bf16: bool, by_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = Processor(maker=maker, **{f"has_{name}": name in has for name in ("avx512", "dot_products", "tiles")})
    monkeypatch.setattr(dense, "this_processor", lambda: processor)

    assert dense.product_type("bf16", HOST) == (torch.bfloat16 if in_bf16 else torch.float32)
    assert dense.product_type("fp32", HOST) == torch.float32
    assert dense.product_type("bf16", torch.device("cuda")) == torch.bfloat16
    assert processor.prefers_onednn == by_onednn


def test_the_maker_is_read_from_what_linux_says_of_its_processors() -> None:
    assert maker_of("processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu\n") == "AuthenticAMD"
    assert maker_of("processor\t: 0\nCPU part\t: 0xd40\n") == ""
