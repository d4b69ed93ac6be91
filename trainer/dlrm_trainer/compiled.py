"""Loops over rows, compiled to machine code when they are first called.

numba keeps what it compiled in ``NUMBA_CACHE_DIR``, or beside the source, or, where that folder is read-only as in an
image, in ``$HOME/.cache/numba``. Where none can be written it refuses to compile at all; then each process compiles
anew without keeping anything, which takes a second or two a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

from numba import njit

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function of numbers, arrays and named tuples of them; it runs without the interpreter's lock."""
    try:
        loop = njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba's only one while decorating: no folder can be written
        loop = njit(nogil=True)(function)
    return cast(Callable[Parameters, Result], loop)
