"""The number formats in which rows and gradients travel between ranks, and the bytes that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

Codec = Literal["fp32", "fp16", "bf16", "int8"]
CodecChoice = Literal[Codec, "auto"]
LinkClass = Literal["intra_node", "inter_node"]
"""Links between ranks of one node, and between ranks of different nodes."""
LINK_CLASSES: tuple[LinkClass, ...] = get_args(LinkClass)
Direction = Literal["forward", "backward"]
"""Pooled rows, and their gradients."""
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """Describe one wire format by the bytes it takes."""

    value_bytes: int  # per value
    row_bytes: int = 0  # per row, besides its values
    message_bytes: int = 0
    """Per message that is not empty, on top of its rows."""
    quality_loss: float | None = None
    """Mean rise of normalized entropy over fp32 that ``benchmarks.accuracy`` measured; 0 if it fell. None: not
    measured, so ``auto`` never takes the format."""


CODECS: Mapping[Codec, WireFormat] = MappingProxyType(
    {
        "fp32": WireFormat(value_bytes=4, quality_loss=0.0),
        # A scale for the whole message, so that small gradients keep their bits.
        "fp16": WireFormat(value_bytes=2, message_bytes=4, quality_loss=0.0),
        "bf16": WireFormat(value_bytes=2, quality_loss=0.0),
        # Minimum and step of each row as fp32.
        "int8": WireFormat(value_bytes=1, row_bytes=8, quality_loss=0.0009),
    }
)
"""The most exact first."""
