"""Memory that a thread uses again: fresh pages cost more than what is written to them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Scratch(threading.local):
    """Of one thread."""

    def __init__(self) -> None:
        self.arrays: dict[tuple[str, type[np.generic]], NDArray[Any]] = {}


_scratch = _Scratch()


def scratch(name: str, shape: tuple[int, int], kind: type[np.generic]) -> NDArray[Any]:
    """An array of this thread, with any content, until one of this kind is asked for by the same name again."""
    count = shape[0] * shape[1]
    held = _scratch.arrays.get((name, kind))
    if held is None or held.size < count:
        held = _scratch.arrays[name, kind] = np.empty(count, dtype=kind)
    return held[:count].reshape(shape)
