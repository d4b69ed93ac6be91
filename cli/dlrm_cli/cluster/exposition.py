"""Metrics in Prometheus' text form, as our own processes write them. Whatever stands there, reading ends soon."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

_SAMPLE = re.compile(r'([A-Za-z_]\w*)(?:\{((?:\w+="[^"\\]*",?)*)\})? (\S+)', re.ASCII)
_LABEL = re.compile(r'(\w+)="([^"\\]*)"', re.ASCII)
MOST_LINE = 1_024
LARGEST = 1e18
"""No figure of ours comes near; sums of larger ones would soon be infinite."""


@dataclass(frozen=True)
class Sample:
    """One figure: finite, and at most ``LARGEST``."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> Iterator[Sample]:
    """The figures of an exposition. Lines of another form, and figures that are none, are passed over.

    A broken or hostile pod may write anything, so no line is looked at for longer than it is long.
    """
    for line in text.splitlines():
        found = _SAMPLE.match(line) if len(line) <= MOST_LINE else None
        if found is None:
            continue
        try:
            value = float(found[3])
        except ValueError:
            continue
        if math.isfinite(value) and abs(value) <= LARGEST:
            yield Sample(found[1], dict(_LABEL.findall(found[2] or "")), value)
