"""Number formats in which rows travel between ranks, and the bytes that they take.

Shapes: K rows of d float32 values, d a multiple of 4.

- fp32: as they are.
- fp16: times a power of two that goes before them, so that small gradients keep their bits and no finite value
  overflows. The error of a value is at most 2**-11 of it, or 2**-25 of the scale.
- bf16: rounded to the nearest; the error of a value is at most 2**-8 of it.
- int8: each row as d whole numbers from 0 to 255 between its least and its largest value, which go after them as
  float32 least value and step. The error of a value is at most half a step.

Source: Yang et al., Training with Low-precision Embedding Tables / DLP-KDD 2020; Mudigere et al., ISCA 2022, 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dlrm_api.wire import Codec

HALF_MOST = 65_504.0
"""The largest finite fp16 value."""
LEVELS = 255
"""Steps of an int8 row."""
AFFINE_BYTES = 8
"""Least value and step of an int8 row."""
_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def message_bytes(codec: Codec, shapes: Sequence[tuple[int, int]]) -> int:
    """Bytes of a message of pieces of so many rows and such width; an empty message takes none."""
    rows = sum(count * row_bytes(codec, width) for count, width in shapes)
    return rows + header_bytes(codec) if rows else 0


def row_bytes(codec: Codec, width: int) -> int:
    """Bytes of one row of ``width`` values."""
    return {"fp32": 4 * width, "fp16": 2 * width, "bf16": 2 * width, "int8": width + AFFINE_BYTES}[codec]


def header_bytes(codec: Codec) -> int:
    """Bytes before the rows of one message: the scale of fp16."""
    return 4 if codec == "fp16" else 0


def write_message(codec: Codec, pieces: Sequence[Tensor], out: Tensor, wanted_scale: float = 1.0) -> None:
    """Write one message.

    Args:
        codec: the format.
        pieces: (..., d) float32 each, of any strides; d may differ.
        out: uint8, ``message_bytes`` of them, aligned to 4.
        wanted_scale: power of two that brings usual values near 1, where the format has a scale.
    """
    scale, start = 1.0, header_bytes(codec) if out.numel() else 0
    if start:
        scale = _scale(pieces, wanted_scale)
        out[:start].view(torch.float32).fill_(scale)
    for piece in pieces:
        stop = start + piece.numel() // piece.shape[-1] * row_bytes(codec, piece.shape[-1])
        _encode(codec, piece, out[start:stop], scale)
        start = stop


def read_message(codec: Codec, data: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """The pieces of a message, (K, d) float32 of each of the shapes; those of fp32 are views."""
    start = header_bytes(codec) if data.numel() else 0
    scale = float(data[:start].view(torch.float32)) if start else 1.0
    found = []
    for rows, width in shapes:
        stop = start + rows * row_bytes(codec, width)
        found.append(_decode(codec, data[start:stop], width, scale))
        start = stop
    return found


def is_finite(codec: Codec, data: Tensor) -> bool:
    """Whether all values of a message are finite, as far as its header tells: that of fp16 does."""
    start = header_bytes(codec) if data.numel() else 0
    return not start or math.isfinite(float(data[:start].view(torch.float32)))


def _scale(pieces: Sequence[Tensor], wanted: float) -> float:
    """A power of two, at most the one wanted, by which fp16 can hold all values; NaN where one is not finite."""
    bounds = [bound for piece in pieces if piece.numel() for bound in torch.aminmax(piece)]
    largest = float(torch.stack(bounds).abs().max()) if bounds else 0.0
    if not math.isfinite(largest):
        return math.nan
    while largest * wanted > HALF_MOST:
        wanted /= 2
    return wanted


def _encode(codec: Codec, rows: Tensor, out: Tensor, scale: float) -> None:
    if codec == "fp32":
        out.view(torch.float32).view(rows.shape).copy_(rows)
    elif codec == "int8":
        _encode_affine(rows.reshape(-1, rows.shape[-1]), out.view(-1, rows.shape[-1] + AFFINE_BYTES))
    else:
        out.view(_HALVES[codec]).view(rows.shape).copy_(rows if scale == 1.0 else rows * scale)


def _decode(codec: Codec, data: Tensor, width: int, scale: float) -> Tensor:
    if codec == "fp32":
        return data.view(torch.float32).view(-1, width)
    if codec == "int8":
        return _decode_affine(data.view(-1, width + AFFINE_BYTES))
    rows = data.view(_HALVES[codec]).view(-1, width).to(torch.float32)
    return rows if scale == 1.0 else rows.div_(scale)


def _encode_affine(rows: Tensor, out: Tensor) -> None:
    """(K, d) to (K, d + 8) bytes."""
    if not len(rows):
        return
    width = rows.shape[1]
    least, most = torch.aminmax(rows, dim=1, keepdim=True)
    step = (most - least) / LEVELS
    shares = (rows - least) / torch.where(step > 0, step, 1.0)
    out[:, :width].copy_(shares.round_().clamp_(0, LEVELS).nan_to_num_(0.0))
    out[:, width:].copy_(torch.cat((least, step), dim=1).view(torch.uint8))


def _decode_affine(data: Tensor) -> Tensor:
    width = data.shape[1] - AFFINE_BYTES
    affine = data[:, width:].contiguous().view(torch.float32)
    return torch.addcmul(affine[:, :1], data[:, :width].to(torch.float32), affine[:, 1:])
