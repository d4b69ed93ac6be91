from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dlrm_api.wire import Codec
from dlrm_testing.trainer.gang_sums import CODECS, sums
from dlrm_testing.trainer.gangs import run_ranks
from dlrm_trainer.distributed.codecs import message_bytes, read_message, row_bytes, write_message

widths = st.integers(1, 20).map(lambda quads: 4 * quads)


def there_and_back(codec: Codec, pieces: list[torch.Tensor], scale: float = 1.0) -> list[torch.Tensor]:
    shapes = [(piece.numel() // piece.shape[-1], piece.shape[-1]) for piece in pieces]
    message = torch.empty(message_bytes(codec, shapes), dtype=torch.uint8)
    write_message(codec, pieces, message, scale)
    return read_message(codec, message, shapes)


def bound(codec: Codec, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Largest error of each value that the format's description allows."""
    sizes = rows.abs().double()
    if codec == "int8":
        spread = (rows.max(dim=1, keepdim=True).values - rows.min(dim=1, keepdim=True).values).double()
        return spread / 255 * 0.501 + sizes.max() * 2**-22
    if codec == "bf16":
        return sizes * 2**-8
    return torch.maximum(sizes * 2**-11, torch.full_like(sizes, 2.0**-25 / scale)) if codec == "fp16" else 0 * sizes


@pytest.mark.parametrize("codec", CODECS)
@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.tuples(st.integers(0, 9), widths), min_size=1, max_size=4),
    magnitude=st.integers(-30, 30),
)
def test_values_come_back_within_the_error_of_their_format(
    codec: Codec, seed: int, shapes: list[tuple[int, int]], magnitude: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    pieces = [torch.randn(shape, generator=generator) * 2.0**magnitude for shape in shapes]

    found = there_and_back(codec, pieces)

    largest = max((float(piece.abs().max()) for piece in pieces if piece.numel()), default=0.0)
    scale = 1.0 if largest <= 65_504 else 2.0 ** math.floor(math.log2(65_504 / largest))
    for piece, rows in zip(pieces, found, strict=True):
        assert rows.shape == piece.shape
        assert (((rows - piece).abs().double()) <= bound(codec, piece, scale) if piece.numel() else torch.ones(0)).all()


@pytest.mark.parametrize("codec", CODECS)
def test_pieces_of_any_strides_are_written_as_they_read(codec: Codec) -> None:
    vectors = torch.randn(6, 5, 8)

    (part,) = there_and_back(codec, [vectors[:, 1:4]])
    (same,) = there_and_back(codec, [vectors[:, 1:4].contiguous()])

    assert torch.equal(part, same)


def test_bytes_are_those_of_the_formats() -> None:
    assert [row_bytes(codec, 64) for codec in CODECS] == [256, 128, 128, 72]
    assert [message_bytes(codec, [(1, 4)]) - row_bytes(codec, 4) for codec in CODECS] == [0, 4, 0, 0]
    assert [message_bytes(codec, [(0, 64)]) for codec in CODECS] == [0, 0, 0, 0]
    assert message_bytes("fp16", [(10, 64), (3, 8)]) == 4 + 1_280 + 48


def test_a_scale_keeps_small_gradients_that_fp16_alone_would_lose() -> None:
    gradients = torch.full((3, 4), 1e-9)

    (lost,) = there_and_back("fp16", [gradients])
    (kept,) = there_and_back("fp16", [gradients], scale=2.0**21)

    assert not lost.any()
    assert torch.allclose(kept, gradients, rtol=2**-10)


def test_a_scale_gives_way_to_large_values() -> None:
    gradients = torch.tensor([[1e4, -3e30, 0.0, 2.0]])

    (found,) = there_and_back("fp16", [gradients], scale=2.0**21)

    assert torch.isfinite(found).all()
    assert found[0, 1] == pytest.approx(-3e30, rel=2**-11)


@pytest.mark.parametrize("wanted", [1.0, 2.0**17, 2.0**40])
@pytest.mark.parametrize(
    "largest", [0.0, 2.0**-149, 2.0**-126, 1.0, 65_503.0, 65_504.0, 65_505.0, 65_536.0, 131_008.0, 131_009.0, 3e38]
)
def test_a_scale_is_the_largest_that_overflows_nothing(largest: float, wanted: float) -> None:
    message = torch.empty(message_bytes("fp16", [(1, 4)]), dtype=torch.uint8)

    write_message("fp16", [torch.tensor([[largest, -largest / 2, 0.0, 0.0]])], message, wanted)

    scale = float(message[:4].view(torch.float32))
    assert scale <= wanted
    assert scale * largest <= 65_504
    assert scale == wanted or 2 * scale * largest > 65_504


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_stays_one(codec: Codec, value: float) -> None:
    rows = torch.randn(3, 4)
    rows[1, 2] = value

    (found,) = there_and_back(codec, [rows])

    assert not math.isfinite(float(found[1, 2]))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_sums_in_fewer_bits_are_near_and_the_same_on_every_rank(world_size: int) -> None:
    ranks = run_ranks(world_size, sums, 9_600)

    exact = np.sum([mine.astype(np.float64) for mine, _, _ in ranks], axis=0)
    for place, error in enumerate([1e-5, 1e-2, 0.1, 0.2]):
        for _, found, _ in ranks:
            assert np.array_equal(found[place], ranks[0][1][place])
            assert np.abs(found[place] - exact).max() < error
    sent = ranks[0][2]
    assert sent["fp16"] < 0.51 * sent["fp32"]
    assert sent["int8"] < 0.29 * sent["fp32"]
