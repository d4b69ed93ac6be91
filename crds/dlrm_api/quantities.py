"""Read bytes and durations as Kubernetes users write them (``16Gi``, ``30m``) into plain numbers."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer, ValidationInfo, WithJsonSchema

BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
DURATION_PATTERN = r"^([0-9]+d)?([0-9]+h)?([0-9]+m)?([0-9]+s)?$"

_FACTORS: dict[str | None, int] = {
    None: 1,
    **{suffix: 1024**power for power, suffix in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), start=1)},
    **{suffix: 1000**power for power, suffix in enumerate(("k", "M", "G", "T", "P"), start=1)},
}
_SECONDS = (86_400, 3_600, 60, 1)


def parse_bytes(value: Any) -> Any:
    """Turn ``16Gi``, ``500M`` or a plain integer into bytes.

    Raises:
        ValueError: the text is not a byte quantity; the message shows a valid one.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(BYTES_PATTERN, value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"expected bytes such as 16Gi, 500M or an integer, got {value!r}")
    number = value.removesuffix(match[2] or "")
    return round(Decimal(number) * _FACTORS[match[2]])


def quantity_value(text: str) -> Decimal:
    """Return the value of a resource quantity such as ``500m`` or ``16Gi``, in the resource's own unit."""
    if text.endswith("m"):
        return Decimal(text[:-1]) / 1_000
    suffix = text.lstrip("0123456789.")
    return Decimal(text.removesuffix(suffix)) * _FACTORS[suffix or None]


def parse_duration(value: Any, info: ValidationInfo) -> Any:
    """Turn ``1h30m`` into seconds.

    A bare number is seconds in Python code. In a document it is rejected, as by the API server: its unit is a guess.

    Raises:
        ValueError: the text is not a duration; the message shows a valid one.
    """
    if info.mode == "python" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    match = re.fullmatch(DURATION_PATTERN, value) if isinstance(value, str) and value else None
    if match is None:
        raise ValueError(f"expected a duration such as 90s, 30m or 1h30m, got {value!r}")
    return float(sum(int(part[:-1]) * unit for part, unit in zip(match.groups(), _SECONDS, strict=True) if part))


def _duration_text(seconds: float) -> str:
    return f"{round(seconds)}s"


Bytes = Annotated[
    int,
    BeforeValidator(parse_bytes),
    Field(ge=0, le=2**60),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "minimum": 0,
            "maximum": 2**60,
            "minLength": 1,
            "maxLength": 32,
            "pattern": BYTES_PATTERN,
        }
    ),
]
"""A number of bytes as an integer; YAML may say ``16Gi``."""

Duration = Annotated[
    float,
    BeforeValidator(parse_duration),
    PlainSerializer(_duration_text, return_type=str, when_used="unless-none"),
    Field(ge=0, le=10 * 365 * 86_400),
    WithJsonSchema({"type": "string", "minLength": 2, "maxLength": 32, "pattern": DURATION_PATTERN}),
]
"""A time span in whole seconds as a float; YAML says ``30m``."""
