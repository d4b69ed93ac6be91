"""Encode rows in the number formats in which they travel between ranks.

Shapes: K rows of d float32 values, d a multiple of 4.

- fp32: unchanged.
- fp16: multiplied by a power of two, which goes first, so that small gradients keep their bits and no finite value
  overflows. The error of a value is at most 2**-11 of it, or 2**-25 of the scale.
- bf16: rounded to the nearest; the error of a value is at most 2**-8 of it.
- int8: each row as d whole numbers from 0 to 255 between its minimum and its maximum, followed by minimum and step as
  float32. The error of a value is at most half a step.

The bytes of each format are in ``dlrm_api.wire.CODECS``.

Source: Yang et al., Training with Low-precision Embedding Tables / DLP-KDD 2020; Mudigere et al., ISCA 2022, 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from dlrm_api.wire import CODECS, Codec

MAX_HALF = 65_504.0
"""The largest finite fp16 value."""
MAX_HALF_WORD = 0x477FE000
"""Its bits as a float32."""
FRACTION_BITS, BIAS = 23, 127
"""Of a float32: bits of the fraction, and what is added to the exponent."""
INT8_STEPS = 255
"""Steps between the minimum and the maximum of an int8 row."""


def row_bytes(codec: Codec, width: int) -> int:
    """Return the bytes of one row of ``width`` values."""
    return CODECS[codec].value_bytes * width + CODECS[codec].row_bytes


def message_bytes(codec: Codec, shapes: Sequence[tuple[int, int]]) -> int:
    """Return the bytes of a message of pieces of so many rows and such width; an empty message takes none."""
    rows = sum(count * row_bytes(codec, width) for count, width in shapes)
    return rows + CODECS[codec].message_bytes if rows else 0


def write_message(codec: Codec, pieces: Sequence[Tensor], out: Tensor, wanted_scale: float = 1.0) -> None:
    """Write (..., d) float32 pieces of any strides and widths to ``message_bytes`` of uint8, aligned to 4.

    ``wanted_scale`` is a power of two that brings usual values near 1, for formats with a scale. The host does not wait
    for the tensors' device.
    """
    scale, start = None, CODECS[codec].message_bytes if out.numel() else 0
    if start:
        scale = out[:start].view(torch.float32)
        scale.copy_(_fitting_scale(pieces, wanted_scale))
    for piece in pieces:
        stop = start + piece.numel() // piece.shape[-1] * row_bytes(codec, piece.shape[-1])
        _ROWS[codec].encode(piece, out[start:stop], scale)
        start = stop


def read_message(codec: Codec, data: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the pieces of a message, (K, d) float32 of each of the shapes; those of fp32 are views.

    The host does not wait for the tensors' device.
    """
    start = CODECS[codec].message_bytes if data.numel() else 0
    scale = data[:start].view(torch.float32) if start else None
    found = []
    for rows, width in shapes:
        stop = start + rows * row_bytes(codec, width)
        found.append(_ROWS[codec].decode(data[start:stop], width, scale))
        start = stop
    return found


def _fitting_scale(pieces: Sequence[Tensor], wanted: float) -> Tensor:
    """Return a power of two, at most ``wanted``, by which fp16 holds all values; NaN if one is not finite."""
    bounds = [bound for piece in pieces if piece.numel() for bound in torch.aminmax(piece)]
    largest = torch.stack(bounds).abs().max()
    # The difference of two exponents, less one if the fraction of ``largest`` is the greater one.
    exponent = (MAX_HALF_WORD - largest.view(torch.int32)) >> FRACTION_BITS
    scale = ((exponent + BIAS).clamp(1, 2 * BIAS) << FRACTION_BITS).view(torch.float32).clamp(max=wanted)
    return torch.where(largest.isfinite(), scale, math.nan)


def _encode_float(dtype: torch.dtype, rows: Tensor, out: Tensor, scale: Tensor | None) -> None:
    out.view(dtype).view(rows.shape).copy_(rows if scale is None else rows * scale)


def _decode_float(dtype: torch.dtype, data: Tensor, width: int, scale: Tensor | None) -> Tensor:
    rows = data.view(dtype).view(-1, width).to(torch.float32)
    return rows if scale is None else rows.div_(scale)


def _encode_int8(rows: Tensor, out: Tensor, _scale: Tensor | None) -> None:
    rows, out = rows.reshape(-1, rows.shape[-1]), out.view(-1, row_bytes("int8", rows.shape[-1]))
    if not len(rows):
        return
    width = rows.shape[1]
    # Which of 0 and -0 is the lower depends on the processor.
    minimum, maximum = (bound + 0.0 for bound in torch.aminmax(rows, dim=1, keepdim=True))
    step = (maximum - minimum) / INT8_STEPS
    shares = (rows - minimum) / torch.where(step > 0, step, 1.0)
    out[:, :width].copy_(shares.round_().clamp_(0, INT8_STEPS).nan_to_num_(0.0))
    out[:, width:].copy_(torch.cat((minimum, step), dim=1).view(torch.uint8))


def _decode_int8(data: Tensor, width: int, _scale: Tensor | None) -> Tensor:
    data = data.view(-1, row_bytes("int8", width))
    affine = data[:, width:].contiguous().view(torch.float32)
    return data[:, :width].to(torch.float32).mul_(affine[:, 1:]).add_(affine[:, :1])


class _RowCodec(NamedTuple):
    encode: Callable[[Tensor, Tensor, Tensor | None], None]
    """Write (..., d) rows, times a (1,) scale if any, to bytes."""
    decode: Callable[[Tensor, int, Tensor | None], Tensor]
    """Return (K, d) rows of bytes, their width and scale if any."""


def _float_codec(dtype: torch.dtype) -> _RowCodec:
    return _RowCodec(partial(_encode_float, dtype), partial(_decode_float, dtype))


_ROWS: dict[Codec, _RowCodec] = {
    "fp32": _float_codec(torch.float32),
    "fp16": _float_codec(torch.float16),
    "bf16": _float_codec(torch.bfloat16),
    "int8": _RowCodec(_encode_int8, _decode_int8),
}
